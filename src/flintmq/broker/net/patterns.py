"""Regular expressions of an auth server, in Go's syntax, that can never take long.

Python's own engine tries one way after the other, and some expressions make it try until the end of the world: an auth
server, or whoever can write to it, could stop the broker with a line of text. Here, as in Go, all ways are followed at
once, so that the time is bounded by the size of the pattern times the length of the name. What is asked is only whether
there is a match anywhere; groups and greediness change nothing.

Names are ASCII, and so is the alphabet here, with the two letters beyond it that are an ASCII letter in another case.
A set of characters is a whole number with a bit for each. What Go refuses is refused, and so are a few things that Go
takes and that make no sense for names: most Unicode scripts, very deep nesting, very large patterns.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Pattern", "PatternError"]

#: Steps of a pattern with its repetitions written out.
LARGEST = 5_000
DEEPEST = 50
_MOST_REPEATS = 1_000

# --- Sets of characters -----------------------------------------------------------------------------------------------

#: The long s and the Kelvin sign are the only other characters that are an ASCII letter in another case.
_ALPHABET = [*range(128), 0x17F, 0x212A]
_ALL = (1 << len(_ALPHABET)) - 1
_SAME_LETTER = [
    sum(1 << i for i, code in enumerate(_ALPHABET) if chr(code).casefold() == letter)
    for letter in "abcdefghijklmnopqrstuvwxyz"
]


def _where(test: Callable[[str], bool]) -> int:
    return sum(1 << i for i, code in enumerate(_ALPHABET) if test(chr(code)))


def _span(low: int, high: int) -> int:
    return _where(lambda char: low <= ord(char) <= high)


def _any_case(characters: int) -> int:
    for letter in _SAME_LETTER:
        if characters & letter:
            characters |= letter
    return characters


def _ascii(text: str) -> int:
    return _where(lambda char: char in text)


_DIGIT = _span(0x30, 0x39)
_UPPER = _span(0x41, 0x5A)
_LOWER = _span(0x61, 0x7A)
_WORD = _DIGIT | _UPPER | _LOWER | _ascii("_")
_PERL = {"d": _DIGIT, "w": _WORD, "s": _ascii("\t\n\f\r ")}
_POSIX = {
    "alnum": _DIGIT | _UPPER | _LOWER,
    "alpha": _UPPER | _LOWER,
    "ascii": _span(0, 0x7F),
    "blank": _ascii("\t "),
    "cntrl": _span(0, 0x1F) | _ascii("\x7f"),
    "digit": _DIGIT,
    "graph": _span(0x21, 0x7E),
    "lower": _LOWER,
    "print": _span(0x20, 0x7E),
    "punct": _span(0x21, 0x7E) & ~(_DIGIT | _UPPER | _LOWER),
    "space": _ascii("\t\n\v\f\r "),
    "upper": _UPPER,
    "word": _WORD,
    "xdigit": _DIGIT | _ascii("abcdefABCDEF"),
}
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_CATEGORIES = {
    *("C", "Cc", "Cf", "Co", "Cs", "L", "Ll", "Lm", "Lo", "Lt", "Lu", "M", "Mc", "Me", "Mn", "N", "Nd", "Nl", "No"),
    *("P", "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S", "Sc", "Sk", "Sm", "So", "Z", "Zl", "Zp", "Zs"),
}


def _property(name: str) -> int:
    if name in _CATEGORIES:
        return _where(lambda char: unicodedata.category(char).startswith(name))
    if name == "Any":
        return _ALL
    if name == "Latin":
        return _where(str.isalpha)
    if name == "Common":
        return _where(lambda char: not char.isalpha())
    raise PatternError(f"unknown character class \\p{{{name}}}")


# --- Parsing ----------------------------------------------------------------------------------------------------------


class PatternError(ValueError):
    """Not a pattern that Go would take, or one that is too large."""


class _Characters(NamedTuple):
    characters: int


class _Assert(NamedTuple):
    """A place: ``^`` the start, ``$`` the end, ``b`` the edge of a word, ``B`` any other."""

    place: str


class _Sequence(NamedTuple):
    parts: list[_Node]


class _Choice(NamedTuple):
    options: list[_Node]


class _Repeat(NamedTuple):
    part: _Node
    least: int
    #: None: no limit.
    most: int | None


_Node = _Characters | _Assert | _Sequence | _Choice | _Repeat


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0
        self._fold = False

    def parse(self) -> _Node:
        node = self._choice()
        if self._at < len(self._source):
            raise PatternError("unexpected )")
        return node

    def _peek(self, text: str) -> bool:
        return self._source.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if self._peek(text):
            self._at += len(text)
            return True
        return False

    def _next(self, missing: str) -> str:
        if self._at >= len(self._source):
            raise PatternError(missing)
        self._at += 1
        return self._source[self._at - 1]

    def _choice(self) -> _Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Choice(options)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        repeated = False
        while self._at < len(self._source) and not self._peek("|") and not self._peek(")"):
            counts = self._counts()
            if counts is not None:
                if not parts:
                    raise PatternError("missing argument to repetition operator")
                if repeated:
                    raise PatternError("invalid nested repetition operator")
                parts[-1] = _Repeat(parts[-1], *counts)
            elif self._take("\\Q"):
                quoted, _, rest = self._source[self._at :].partition("\\E")
                parts += [self._characters(_span(ord(char), ord(char))) for char in quoted]
                self._at = len(self._source) - len(rest)
            elif (node := self._atom()) is not None:
                parts.append(node)
            repeated = counts is not None
        return parts[0] if len(parts) == 1 else _Sequence(parts)

    def _counts(self) -> tuple[int, int | None] | None:
        """A repetition operator, if one stands here."""
        if self._take("*"):
            counts: tuple[int, int | None] = (0, None)
        elif self._take("+"):
            counts = (1, None)
        elif self._take("?"):
            counts = (0, 1)
        elif self._peek("{") and (end := self._source.find("}", self._at)) > 0:
            low, comma, high = self._source[self._at + 1 : end].partition(",")
            if not _is_number(low) or (high and not _is_number(high)):
                # Anything else in braces stands for itself.
                return None
            least, most = _repeats(low), _repeats(high) if high else None if comma else _repeats(low)
            if least > _MOST_REPEATS or (most is not None and not least <= most <= _MOST_REPEATS):
                raise PatternError(f"invalid repeat count {self._source[self._at : end + 1]}")
            self._at = end + 1
            counts = (least, most)
        else:
            return None
        # Whether as much or as little as possible makes no difference here.
        self._take("?")
        return counts

    def _characters(self, characters: int) -> _Node:
        return _Characters(_any_case(characters) if self._fold else characters)

    def _atom(self) -> _Node | None:
        char = self._next("")
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            return _Characters(_ALL)
        if char in "^$":
            return _Assert(char)
        if char != "\\":
            return self._characters(_span(ord(char), ord(char)))
        for name, place in (("A", "^"), ("z", "$"), ("b", "b"), ("B", "B")):
            if self._take(name):
                return _Assert(place)
        found = self._shorthand()
        if found is not None:
            return self._characters(found)
        code = self._escape()
        return self._characters(_span(code, code))

    def _group(self) -> _Node | None:
        """Behind a ``(``. None for one that only sets flags."""
        fold = self._fold
        if self._take("?"):
            if self._take("P<") or self._take("<"):
                name, bracket, rest = self._source[self._at :].partition(">")
                if not bracket or not name.replace("_", "a").isalnum() or not name.isascii():
                    raise PatternError("invalid named capture")
                self._at = len(self._source) - len(rest)
            elif self._flags():
                return None
        self._depth += 1
        if self._depth > DEEPEST:
            raise PatternError("expression nests too deeply")
        node = self._choice()
        self._depth -= 1
        if not self._take(")"):
            raise PatternError("missing closing )")
        self._fold = fold
        return node

    def _flags(self) -> bool:
        """``i``, ``m``, ``s``, ``U`` and their opposites, up to ``:`` or ``)``; True if they end the group."""
        on, seen = True, False
        while True:
            char = self._next("missing argument to repetition operator")
            if char in "imsU":
                seen = True
                if char == "i":
                    self._fold = on
            elif char == "-" and on:
                on = seen = False
            elif char in ":)" and (seen or on):
                return char == ")"
            else:
                raise PatternError("invalid or unsupported Perl syntax")

    def _shorthand(self) -> int | None:
        """``\\d``, ``\\W``, ``\\pL``, ``\\p{^Lu}``: the set behind the backslash, if it is one of these."""
        if self._at >= len(self._source):
            raise PatternError("trailing backslash at end of expression")
        char = self._source[self._at]
        if char.lower() in _PERL:
            self._at += 1
            found = _PERL[char.lower()]
        elif char in "pP":
            self._at += 1
            name = self._next("invalid character class range")
            if name == "{":
                name, brace, rest = self._source[self._at :].partition("}")
                if not brace:
                    raise PatternError("invalid character class range")
                self._at = len(self._source) - len(rest)
            found = _property(name.removeprefix("^"))
            if name.startswith("^"):
                found ^= _ALL
        else:
            return None
        return found ^ _ALL if char.isupper() else found

    def _escape(self) -> int:
        """The code of one character behind a backslash."""
        char = self._next("trailing backslash at end of expression")
        if char in _CONTROLS:
            return ord(_CONTROLS[char])
        digits = self._source[self._at : self._at + 2]
        if char == "0" or (char in "1234567" and digits[:1] in tuple("01234567")):
            octal = char
            while len(octal) < 3 and self._at < len(self._source) and self._source[self._at] in "01234567":
                octal += self._next("")
            return int(octal, 8)
        if char == "x":
            if self._take("{"):
                digits, brace, _ = self._source[self._at :].partition("}")
                self._at += len(digits) + 1
            else:
                brace = "}" if len(digits) == 2 else ""
                self._at += 2
            if brace and _is_hex(digits) and len(digits) <= 8 and int(digits, 16) <= 0x10FFFF:
                return int(digits, 16)
        elif char.isascii() and not char.isalnum():
            return ord(char)
        raise PatternError(f"invalid escape sequence \\{char}")

    def _class(self) -> _Node:
        missing = "missing closing ]"
        negated = self._take("^")
        found = 0
        first = True
        while first or not self._peek("]"):
            first = False
            if self._peek("[:") and (end := self._source.find(":]", self._at + 2)) > 0:
                name = self._source[self._at + 2 : end]
                if name.removeprefix("^") not in _POSIX:
                    raise PatternError(f"invalid character class range [:{name}:]")
                posix = _POSIX[name.removeprefix("^")]
                found |= posix ^ _ALL if name.startswith("^") else posix
                self._at = end + 2
                continue
            if self._peek("\\"):
                at = self._at
                self._at += 1
                shorthand = self._shorthand()
                if shorthand is not None:
                    found |= shorthand
                    continue
                self._at = at
            low = high = self._one(missing)
            if self._peek("-") and not self._peek("-]"):
                self._at += 1
                high = self._one(missing)
                if high < low:
                    raise PatternError("invalid character class range")
            found |= _span(low, high)
        self._at += 1
        if self._fold:
            found = _any_case(found)
        return _Characters(found ^ _ALL if negated else found)

    def _one(self, missing: str) -> int:
        char = self._next(missing)
        return self._escape() if char == "\\" else ord(char)


def _is_number(text: str) -> bool:
    """As in a repetition: digits, and no zero in front."""
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")


def _is_hex(text: str) -> bool:
    return bool(text) and all(char in "0123456789abcdefABCDEF" for char in text)


def _repeats(text: str) -> int:
    return int(text) if len(text) <= 4 else _MOST_REPEATS + 1


# --- Matching ---------------------------------------------------------------------------------------------------------

_MATCH, _TAKE, _SPLIT, _PLACE = range(4)


class Pattern:
    """One regular expression. ``size`` is what a search may cost, per character of the name."""

    def __init__(self, source: str) -> None:
        """PatternError if it is none, or too large."""
        self._literal = _plain(source)
        if self._literal is not None:
            self.size = 1
            return
        # The program: what to do at each step, with what, and which step follows (for a split, two).
        self._steps: list[tuple[int, int | str, int]] = []
        self._budget = LARGEST
        node = _Parser(source).parse()
        self._write(node)
        self._steps.append((_MATCH, 0, 0))
        self.size = len(self._steps)

    def _write(self, node: _Node) -> None:
        """Append the steps of a node; what follows it is what is appended next."""
        # Counted per node, not per step: nothing at all, repeated, takes no step and all the time in the world.
        self._budget -= 1
        if self._budget < 0:
            raise PatternError("expression too large")
        steps = self._steps
        match node:
            case _Characters(characters):
                steps.append((_TAKE, characters, len(steps) + 1))
            case _Assert(place):
                steps.append((_PLACE, place, len(steps) + 1))
            case _Sequence(parts):
                for part in parts:
                    self._write(part)
            case _Choice(options):
                ends = []
                for option in options[:-1]:
                    split = self._reserve()
                    self._write(option)
                    ends.append(self._reserve())
                    steps[split] = (_SPLIT, len(steps), split + 1)
                self._write(options[-1])
                for end in ends:
                    steps[end] = (_SPLIT, len(steps), len(steps))
            case _Repeat(part, least, most):
                for _ in range(least):
                    self._write(part)
                if most is None:
                    split = self._reserve()
                    self._write(part)
                    steps.append((_SPLIT, split, split))
                    steps[split] = (_SPLIT, len(steps), split + 1)
                else:
                    splits = []
                    for _ in range(most - least):
                        splits.append(self._reserve())
                        self._write(part)
                    for split in splits:
                        steps[split] = (_SPLIT, len(steps), split + 1)

    def _reserve(self) -> int:
        self._steps.append((_MATCH, 0, 0))
        return len(self._steps) - 1

    def found_in(self, name: str) -> bool:
        """Does any part of the name match?"""
        if self._literal is not None:
            at_start, text, at_end = self._literal
            if at_start and at_end:
                return name == text
            return name.startswith(text) if at_start else name.endswith(text) if at_end else text in name
        steps = self._steps
        reached: list[int] = []
        for at in range(len(name) + 1):
            stack = [0, *reached]
            seen: set[int] = set()
            takers: list[tuple[int, int]] = []
            while stack:
                number = stack.pop()
                if number in seen:
                    continue
                seen.add(number)
                kind, what, after = steps[number]
                if kind == _TAKE:
                    assert isinstance(what, int)
                    takers.append((what, after))
                elif kind == _SPLIT:
                    assert isinstance(what, int)
                    stack += (what, after)
                elif kind == _MATCH:
                    return True
                elif _is_at(what, name, at):
                    stack.append(after)
            if at < len(name):
                bit = 1 << ord(name[at])
                reached = [after for characters, after in takers if characters & bit]
        return False


def _is_at(place: int | str, name: str, at: int) -> bool:
    if place == "^":
        return at == 0
    if place == "$":
        return at == len(name)
    before = at > 0 and bool(_WORD >> ord(name[at - 1]) & 1)
    behind = at < len(name) and bool(_WORD >> ord(name[at]) & 1)
    return (before != behind) == (place == "b")


def _plain(source: str) -> tuple[bool, str, bool] | None:
    """The usual case, ``^a-name$`` with or without its anchors: at the start, what, at the end."""
    text = source.removeprefix("^").removesuffix("$")
    if not all(char.isascii() and (char.isalnum() or char in "_-#") for char in text):
        return None
    return source.startswith("^"), text, source.endswith("$")
