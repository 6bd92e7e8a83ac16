"""Patterns of an auth server: Go's syntax and meaning, and no pattern that takes long."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.broker.net.patterns import DEEPEST, LARGEST, Pattern, PatternError

NAMES = string.ascii_letters + string.digits + "._-"

#: Pattern, names that have a match, names that have none. The Go daemon agrees: see test_auth.py.
MATCHES: list[tuple[str, list[str], list[str]]] = [
    ("", ["", "a"], []),
    (".*", ["", "anything"], []),
    (".", ["a", "#"], [""]),
    ("order", ["order", "orders", "my-order"], ["", "Order"]),
    ("^order", ["orders"], ["my-order"]),
    ("order$", ["my-order"], ["orders"]),
    ("^order$", ["order"], ["orders", "my-order", ""]),
    ("^$", [""], ["a"]),
    ("^", ["", "a"], []),
    ("$", ["", "a"], []),
    ("a^", [], ["a", ""]),
    ("a.c", ["abc", "a.c"], ["ac"]),
    (r"^a\.c$", ["a.c"], ["abc"]),
    (r"^a\-b\_c\#$", ["a-b_c#"], ["a-b_c"]),
    ("^(a|bc)+$", ["a", "bca"], ["", "b", "ab"]),
    ("^(?:a|bc)*$", ["", "abc"], ["b"]),
    ("^(?P<name>a)(?P<n_2>b)$", ["ab"], ["a"]),
    ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
    ("^(a||b)c$", ["c", "ac", "bc"], ["abc"]),
    ("^()$", [""], ["a"]),
    ("^a?b+?c*$", ["b", "abbcc"], ["a", "ac"]),
    ("^a{3}$", ["aaa"], ["aa", "aaaa"]),
    ("^a{2,}$", ["aa", "aaaaa"], ["a"]),
    ("^a{0,2}$", ["", "a", "aa"], ["aaa"]),
    ("^(ab){2,3}?$", ["abab", "ababab"], ["ab"]),
    ("^a{0}$", [""], ["a"]),
    ("^[a-c]+$", ["abc"], ["abcd"]),
    ("^[^a-c]+$", ["xyz", "."], ["xaz"]),
    ("^[a-]+$", ["a-"], ["b"]),
    ("^[-a]+$", ["-a"], ["b"]),
    ("^[.]$", ["."], ["a"]),
    (r"^[\]a]$", ["a"], ["b"]),
    (r"^[\d_]+$", ["1_2"], ["a"]),
    (r"^[^\d]+$", ["abc"], ["a1"]),
    (r"^\d+\D+$", ["12ab"], ["ab12"]),
    (r"^\w+$", ["aZ_9"], ["a-b"]),
    (r"^\W$", ["-"], ["a"]),
    (r"^\S+$", ["abc"], [""]),
    (r"\s", [], ["abc", ""]),
    (r"\bfoo\b", ["foo", "a-foo.b"], ["afoo", "foo_"]),
    (r"\Bfoo", ["afoo"], ["foo", "-foo"]),
    (r"\Aab\z", ["ab"], ["abc"]),
    ("^[[:alpha:]]+[[:digit:]]$", ["abc1"], ["abc"]),
    ("^[[:^alpha:]x]+$", ["12x"], ["12y"]),
    ("(?i)^OrDer$", ["order", "ORDER"], ["orders"]),
    ("^(?i:a)b$", ["Ab", "ab"], ["aB"]),
    ("^a(?i)b$", ["ab", "aB"], ["Ab"]),
    ("^(a(?i)b)c$", ["aBc"], ["aBC"]),
    ("(?i)^[a-c]$", ["B"], ["d"]),
    ("(?i)^[^a-c]$", ["d"], ["B"]),
    ("(?i)^\u017f\u212a$", ["sk", "SK"], ["s"]),
    ("(?i-i)A", ["A"], ["a"]),
    ("(?ms)^a.$", ["ab"], ["b"]),
    ("(?U)^a+$", ["aaa"], ["b"]),
    ("(?s:.)", ["a"], [""]),
    (r"^\Qa.b*\E+$", [], ["a.b", "axb"]),
    (r"^\Qa.b\Ec$", ["a.bc"], ["axbc"]),
    (r"^\x61\x{62}\143\056$", ["abc."], ["abc"]),
    (r"^\pL\p{Nd}\PN$", ["a1b"], ["11b"]),
    (r"^\p{^Lu}\p{Latin}$", ["ab"], ["Ab"]),
    ("^a{,2}$", [], ["a", "aa"]),
    ("^x{a}$", [], ["x"]),
    ("^\u00e9", [], ["e"]),
    ("^[^\u00e9]$", ["e"], [""]),
    (r"^[\x00-\x{10FFFF}]$", ["a"], [""]),
    (r"[^\x00-\x{10FFFF}]", [], ["a", ""]),
    ("^(a|a)*b$", ["aab"], ["aa"]),
    ("(((((a)))))", ["bab"], ["b"]),
    ("#ephemeral$", ["t#ephemeral"], ["t"]),
]

REFUSED = [
    *(
        "*",
        "+a",
        "?",
        "{2}",
        "a|*",
        "(*)",
        "(",
        ")",
        "a)",
        "(a",
        "[",
        "[a",
        "[]",
        "[^]",
        "[b-a]",
        "[a-\\d]",
        "[[:foo:]]",
    ),
    *("a**", "a+*", "a*+", "a{2}{3}", "a{1001}", "a{2,1}", "a{1,1001}", "a\\", r"\1", r"\8", r"\Z", r"\G", r"\y"),
    *(
        r"\x",
        r"\x6",
        r"\x{",
        r"\x{110000}",
        r"\xg1",
        "(?=a)",
        "(?!a)",
        "(?<=a)",
        "(?<!a)",
        "(?P=a)",
        "(?P<a",
        "(?P<>a)",
    ),
    *("(?P<a-b>x)", "(?z)", "(?i", "(?i-)", "(?--i)", "(?>a)", "(?#a)", r"\p{Nope}", r"\p", r"\p{L", r"\pX", r"(a)\1"),
]


@pytest.mark.parametrize(("source", "good", "bad"), MATCHES)
def test_a_pattern_means_what_it_means_in_go(source: str, good: list[str], bad: list[str]) -> None:
    pattern = Pattern(source)
    assert [name for name in good if not pattern.found_in(name)] == []
    assert [name for name in bad if pattern.found_in(name)] == []


@pytest.mark.parametrize("source", REFUSED)
def test_what_go_refuses_is_refused(source: str) -> None:
    with pytest.raises(PatternError):
        Pattern(source)


# Without what the two languages understand differently; \B in an empty text is one such thing.
_characters = st.sampled_from("ab.c-_1")
_atoms = st.one_of(
    _characters.map(re.escape),
    st.just("."),
    st.sampled_from([r"\d", r"\w", r"\W", "[a-c]", "[^a-c]", "[b1_-]", "^", r"\b", r"\B"]),
)


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda text: f"(?i:{text})"),
    )


@settings(deadline=None, max_examples=400)
@given(st.recursive(_atoms, _compound, max_leaves=6), st.text("abcB.-_1", min_size=1, max_size=7), st.booleans())
def test_the_answer_is_that_of_an_engine_that_tries_every_way(source: str, name: str, to_the_end: bool) -> None:
    source += r"\z" if to_the_end else ""
    expected = re.search(source.replace(r"\z", r"\Z"), name, re.ASCII) is not None
    assert Pattern(source).found_in(name) is expected


@settings(deadline=None)
@given(st.text(alphabet="ab()[]{}|*+?^$\\.-,:P<>iQE012dpxz", max_size=14))
def test_no_text_raises_anything_else(source: str) -> None:
    try:
        pattern = Pattern(source)
    except PatternError:
        return
    pattern.found_in("ab-0")


@pytest.mark.parametrize(
    "source",
    ["(a+)+$", "(a|a)*$", "(a|aa)+$", "(.*a){25}$", "(x+x+)+y", "^(([a-z])+.)+[A-Z]([a-z])+$", "(a?){64}a{64}"],
)
def test_a_pattern_that_other_engines_never_finish_is_decided(source: str) -> None:
    """Tried one way after the other, these take longer than any test may."""
    for name in ("a" * 63 + "!", "x" * 64):
        Pattern(source).found_in(name)


def test_the_time_is_bounded_by_size_and_length() -> None:
    looked_at = 0

    class Counting(list):  # type: ignore[type-arg]
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(index)

    pattern = Pattern("((a*)*(b|a)*){20}c")
    pattern._steps = Counting(pattern._steps)
    assert not pattern.found_in("a" * 64)
    assert looked_at <= pattern.size * 65


@pytest.mark.parametrize(
    "source",
    [
        "((a{1000}){1000}){1000}",
        "((((){1000}){1000}){1000}){1000}",
        "(" * (DEEPEST + 1) + ")" * (DEEPEST + 1),
        "(a" * 5_000,
        "a.b" * LARGEST,
        "(|)" * LARGEST,
    ],
)
def test_a_pattern_that_is_too_large_is_refused(source: str) -> None:
    with pytest.raises(PatternError):
        Pattern(source)


def test_a_plain_name_costs_one_step() -> None:
    assert Pattern("^some-topic_1$").size == Pattern("some#ephemeral").size == 1
    assert Pattern("^some.topic$").size > 1
