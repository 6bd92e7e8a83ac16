"""The option ``where`` of a batch read: a condition in SQL that the source itself keeps to.

A condition is on ``offset``, ``timestamp``, ``timestamp_ns``, ``topic`` and ``node``. It is used twice: as boxes of
offsets and times, outside of which no row can fit, so that nothing is fetched there; and as a test of every row that
was fetched. So boxes may be too large, and never too small. Comparisons with NULL are as in SQL: unknown, which is
neither true nor false, and a row for which the condition is unknown is none.

Spark's own way, ``pushFilters``, is not used: Spark 4.3 keeps one plan of partitions for a DataFrame, and filters of
one query would narrow what the next one reads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from flintmq.errors import OptionError
from flintmq.spark.shipped.columns import without

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LEAST", "MOST", "Box", "Where", "chosen", "read_where"]

#: The ends of all offsets and times.
LEAST, MOST = -(1 << 63), 1 << 63
#: Conditions with more alternatives than this are read as one range around them.
_MOST_BOXES = 64
#: Brackets and NOTs inside of each other.
_MOST_DEPTH = 100

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS = {"offset": "number", "timestamp_ns": "number", "timestamp": "time", "topic": "text", "node": "text"}
_OPPOSITE = {"=": "<>", "<>": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_MIRRORED = {"=": "=", "<>": "<>", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_UNITS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+)(?![\w.])|(?P<text>'[^'\\]*'|\"[^\"\\]*\")|(?P<name>[A-Za-z_]\w*|`\w+`)"
    r"|(?P<sign><=(?!>)|>=|<>|!=|==|[=<>(),+-]))"
)


class Box(NamedTuple):
    """Offsets ``first`` … ``stop - 1``, published at ``since`` … ``until - 1``, in ns since 1970."""

    first: int = LEAST
    stop: int = MOST
    since: int = LEAST
    until: int = MOST

    @property
    def has_time(self) -> bool:
        return (self.since, self.until) != (LEAST, MOST)


class _Test(NamedTuple):
    """A comparison of a column with a value; times are in µs."""

    column: str
    sign: str
    value: Any


class _Said(NamedTuple):
    """What is the same for every row; None is unknown."""

    value: bool | None


class _Join(NamedTuple):
    """Several conditions: all of them, or any."""

    all: bool
    parts: tuple[_Node, ...]


class _Not(NamedTuple):
    part: _Node


_Node = _Test | _Said | _Join | _Not


@dataclass(frozen=True)
class Where:
    """A condition that was read."""

    text: str
    root: _Node

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it is on."""
        return frozenset(_columns(self.root))

    def at(self, topic: str, node: str) -> Where | None:
        """Return what it comes to for a topic on a node; None if all rows fit."""
        root = _simplified(self.root, {"topic": topic, "node": node})
        return None if root == _Said(True) else Where(self.text, root)

    def boxes(self, topic: str, node: str) -> list[Box]:
        """Return boxes that hold every row of a topic on a node which fits; none, if no row can."""
        return _boxes(self.root, True, {"topic": topic, "node": node})

    def others(self, topic: str, node: str) -> list[Box]:
        """Return boxes that hold every row which does not fit. Outside of them all fit."""
        names = {"topic": topic, "node": node}
        # With unknown parts a condition may be neither true nor false.
        return [Box()] if _is_unsure(self.root) else _boxes(self.root, False, names)

    def fitting(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch for which it is true."""
        import pyarrow as pa
        import pyarrow.compute as compute

        mask = _mask(self.root, batch)
        if isinstance(mask, pa.Scalar):
            return batch if mask.as_py() else batch.slice(0, 0)
        if compute.all(mask, skip_nulls=False).as_py():
            return batch
        return batch.filter(mask)


def read_where(text: str) -> Where:
    """Read a condition. ``now()`` is the moment at which this is done. OptionError says what is wrong with it."""
    return Where(text, _Parser(text).read())


def chosen(batch: pa.RecordBatch, where: Where | None, wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch that fit, with null in all columns but those that are wanted; nothing if none fits."""
    fitting = batch if where is None else where.fitting(batch)
    if fitting.num_rows:
        yield without(fitting, wanted)


def _simplified(node: _Node, names: Mapping[str, str]) -> _Node:
    """The same condition where some columns have these values."""
    match node:
        case _Test() if node.column in names:
            return _Said(_compare(names[node.column], node.sign, node.value))
        case _Not():
            part = _simplified(node.part, names)
            if isinstance(part, _Said):
                return _Said(None if part.value is None else not part.value)
            return _Not(part)
        case _Join():
            parts = [_simplified(part, names) for part in node.parts]
            # One False decides an AND, one True an OR; what decides nothing is left out.
            if _Said(not node.all) in parts:
                return _Said(not node.all)
            left = tuple(part for part in parts if part != _Said(node.all))
            return _Join(node.all, left) if len(left) > 1 else (left or (_Said(node.all),))[0]
    return node


def _is_unsure(node: _Node) -> bool:
    match node:
        case _Said():
            return node.value is None
        case _Join():
            return any(_is_unsure(part) for part in node.parts)
        case _Not():
            return _is_unsure(node.part)
    return False


def _columns(node: _Node) -> set[str]:
    match node:
        case _Test():
            return {node.column}
        case _Join():
            return set().union(*(_columns(part) for part in node.parts))
        case _Not():
            return _columns(node.part)
    return set()


# --- Where rows can be ------------------------------------------------------------------------------------------------


def _boxes(node: _Node, wanted: bool, names: Mapping[str, str]) -> list[Box]:
    """Boxes that hold every row for which a condition is ``wanted``."""
    match node:
        case _Not():
            return _boxes(node.part, not wanted, names)
        case _Said():
            return [Box()] if node.value is wanted else []
        case _Join():
            parts = [_boxes(part, wanted, names) for part in node.parts]
            if node.all == wanted:
                found = [Box()]
                for boxes in parts:
                    found = _limited([both for a in found for b in boxes if (both := _both(a, b)) is not None])
                return found
            return _limited([box for boxes in parts for box in boxes])
    sign = node.sign if wanted else _OPPOSITE[node.sign]
    if node.column in names:
        return [Box()] if _compare(names[node.column], sign, node.value) else []
    signs = ("<", ">") if sign == "<>" else (sign,)
    return [box for one in signs if (box := _both(Box(), _box(node.column, one, node.value))) is not None]


def _box(column: str, sign: str, value: int) -> Box:
    first = value + (sign == ">") if sign in ("=", ">", ">=") else LEAST
    stop = value + (sign != "<") if sign in ("=", "<", "<=") else MOST
    if column == "offset":
        return Box(first=first, stop=stop)
    if column == "timestamp":
        # A time of the column is that of the message, rounded down.
        first, stop = (edge if edge in (LEAST, MOST) else edge * 1000 for edge in (first, stop))
    return Box(since=first, until=stop)


def _both(a: Box, b: Box) -> Box | None:
    both = Box(max(a.first, b.first), min(a.stop, b.stop), max(a.since, b.since), min(a.until, b.until))
    return both if both.first < both.stop and both.since < both.until else None


def _limited(boxes: list[Box]) -> list[Box]:
    if len(boxes) <= _MOST_BOXES:
        return boxes
    edges = [f(column) for f, column in zip((min, max, min, max), zip(*boxes, strict=True), strict=True)]
    return [Box(*edges)]


def _compare(a: str, sign: str, b: str) -> bool:
    match sign:
        case "=":
            return a == b
        case "<>":
            return a != b
        case "<":
            return a < b
        case "<=":
            return a <= b
        case ">":
            return a > b
    return a >= b


# --- Which rows fit ---------------------------------------------------------------------------------------------------

_FUNCTIONS = {
    "=": "equal",
    "<>": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


def _mask(node: _Node, batch: pa.RecordBatch) -> Any:
    """Which rows fit: true, false or null for each, or one of them for all."""
    import pyarrow as pa
    import pyarrow.compute as compute

    match node:
        case _Said():
            return pa.scalar(node.value, pa.bool_())
        case _Not():
            return compute.invert(_mask(node.part, batch))
        case _Join():
            join = compute.and_kleene if node.all else compute.or_kleene
            found = _mask(node.parts[0], batch)
            for part in node.parts[1:]:
                found = join(found, _mask(part, batch))
            return found
    column = batch.column(batch.schema.get_field_index(node.column))
    return compute.call_function(_FUNCTIONS[node.sign], [column, pa.scalar(node.value, column.type)])


# --- Reading it -------------------------------------------------------------------------------------------------------


class _Parser:
    """Reads a condition by descent, from OR down to a comparison."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        self._depth = 0
        self._now = time.time_ns() // 1000
        at = 0
        text = text.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise OptionError(f"where: {text[at:].strip()[:40]!r} is not understood: {_RULE}")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()

    def read(self) -> _Node:
        found = self._any()
        if self._at < len(self._tokens):
            raise self._wrong("AND, OR or the end")
        return found

    def _any(self) -> _Node:
        parts = [self._all()]
        while self._takes("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else _Join(False, tuple(parts))

    def _all(self) -> _Node:
        parts = [self._one()]
        while self._takes("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else _Join(True, tuple(parts))

    def _one(self) -> _Node:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise OptionError(f"where: more than {_MOST_DEPTH} brackets and NOTs inside of each other")
        try:
            if self._takes("not"):
                return _Not(self._one())
            if self._takes("("):
                found = self._any()
                self._need(")")
                return found
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> _Node:
        kind, word = self._next()
        if kind == "name" and word in ("true", "false") and self._peek() not in _OPPOSITE:
            self._at += 1
            return _Said(word == "true")
        # TIMESTAMP '…' is a value.
        is_literal = word == "timestamp" and self._next(1)[0] == "text"
        if kind == "name" and word in _KINDS and not is_literal:
            self._at += 1
            return self._of_column(word)
        value = self._value()
        sign = self._sign()
        kind, word = self._next()
        if kind != "name" or word not in _KINDS:
            raise self._wrong(f"a column ({', '.join(_KINDS)})")
        self._at += 1
        return self._test(word, _MIRRORED[sign], value)

    def _of_column(self, column: str) -> _Node:
        if self._takes("is"):
            negated = self._takes("not")
            self._need("null")
            # None of these columns is ever null.
            return _Said(negated)
        negated = self._takes("not")
        if self._takes("between"):
            low = self._value()
            self._need("and")
            high = self._value()
            found: _Node = _Join(True, (self._test(column, ">=", low), self._test(column, "<=", high)))
        elif self._takes("in"):
            self._need("(")
            tests = [self._test(column, "=", self._value())]
            while self._takes(","):
                tests.append(self._test(column, "=", self._value()))
            self._need(")")
            found = _Join(False, tuple(tests))
        elif negated:
            raise self._wrong("BETWEEN or IN")
        else:
            return self._test(column, self._sign(), self._value())
        return _Not(found) if negated else found

    def _sign(self) -> str:
        kind, sign = self._next()
        sign = {"==": "=", "!=": "<>"}.get(sign, sign)
        if kind != "sign" or sign not in _OPPOSITE:
            raise self._wrong("a comparison")
        self._at += 1
        return sign

    def _test(self, column: str, sign: str, value: Any) -> _Node:
        """``value`` is None for NULL, a number, a text, or a time: a tuple of its µs."""
        if value is None:
            return _Said(None)
        kind = _KINDS[column]
        if kind == "number" and isinstance(value, int):
            return _Test(column, sign, value)
        if kind == "text" and isinstance(value, str):
            return _Test(column, sign, value)
        if kind == "time" and isinstance(value, tuple):
            return _Test(column, sign, value[0])
        if kind == "time" and isinstance(value, str):
            return _Test(column, sign, _time(value))
        needed = {"number": "a whole number", "text": "a text in quotes", "time": "a time"}[kind]
        raise OptionError(f"where: {column} is compared with {needed}: {_RULE}")

    def _value(self) -> Any:
        kind, word = self._next()
        self._at += 1
        if kind == "text":
            return word
        if kind == "number" or (kind == "sign" and word in ("-", "+") and self._next()[0] == "number"):
            sign = -1 if word == "-" else 1
            if kind == "sign":
                _, word = self._next()
                self._at += 1
            number = sign * int(word)
            if not LEAST <= number < MOST:
                raise OptionError(f"where: {number} has more than 64 bits")
            return number
        if kind == "name" and word == "null":
            return None
        if kind == "name" and word == "timestamp" and self._next()[0] == "text":
            moment = _time(self._next()[1])
            self._at += 1
        elif kind == "name" and word in ("now", "current_timestamp"):
            if self._takes("("):
                self._need(")")
            elif word == "now":
                raise self._wrong("()")
            moment = self._now
        else:
            self._at -= 1
            raise self._wrong("a value")
        while self._peek() in ("+", "-"):
            forward = self._peek() == "+"
            self._at += 1
            self._need("interval")
            moment += self._interval() if forward else -self._interval()
            if not LEAST <= moment < MOST:
                raise OptionError("where: a time that is so far away has more than 64 bits in microseconds")
        return (moment,)

    def _interval(self) -> int:
        """``1 MINUTE``, ``'90' seconds``, ``1 hour 30 minutes``; in µs."""
        total = 0
        begun = False
        while True:
            kind, word = self._next()
            if kind not in ("number", "text") or not word.strip().isdecimal() or not word.isascii():
                if begun:
                    return total
                raise self._wrong("a number of INTERVAL")
            self._at += 1
            _, unit = self._next()
            if unit.removesuffix("s") not in _UNITS:
                raise self._wrong(f"one of {', '.join(_UNITS)}")
            self._at += 1
            total += int(word) * _UNITS[unit.removesuffix("s")]
            begun = True

    # --- Tokens -------------------------------------------------------------------------------------------------------

    def _next(self, later: int = 0) -> tuple[str, str]:
        """Kind and text of the next one, or of a later one: names in lower case, texts without their quotes."""
        if self._at + later >= len(self._tokens):
            return "", ""
        kind, text = self._tokens[self._at + later]
        if kind == "name":
            return kind, text.strip("`").lower()
        return kind, text[1:-1] if kind == "text" else text

    def _peek(self) -> str:
        """The next word or sign; a text is neither."""
        kind, text = self._next()
        return "" if kind == "text" else text

    def _takes(self, word: str) -> bool:
        if self._peek() != word:
            return False
        self._at += 1
        return True

    def _need(self, word: str) -> None:
        if not self._takes(word):
            raise self._wrong(word.upper())

    def _wrong(self, needed: str) -> OptionError:
        rest = " ".join(text for _, text in self._tokens[self._at : self._at + 5]) or "the end"
        return OptionError(f"where: {needed} is needed before {rest[:40]!r}: {_RULE}")


#: Said with every mistake.
_RULE = (
    "it joins comparisons of offset, timestamp, timestamp_ns, topic and node by AND, OR and NOT, such as "
    "\"topic = 'orders' AND timestamp >= now() - INTERVAL 1 MINUTE\"; for anything else use filter() or WHERE"
)


def _time(text: str) -> int:
    """µs since 1970, of a time with its zone; what is smaller than a µs is cut off, as Spark does."""
    shortened = re.sub(r"(\.\d{6})\d+", r"\1", text.strip())
    try:
        when = datetime.fromisoformat(shortened)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise OptionError(f"where: {text!r} is no time with its zone, such as '2026-01-31T08:00:00Z'")
    return (when - _EPOCH) // timedelta(microseconds=1)
