"""Ranges against a plain set of numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flintmq.broker.storage.ranges import Ranges

small = st.integers(0, 80)


class RangesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranges = Ranges()
        self.model: set[int] = set()

    @rule(gap=st.integers(0, 5), size=st.integers(0, 8))
    def add(self, gap: int, size: int) -> None:
        first = (max(self.model) + 1 if self.model else 0) + gap
        self.ranges.add(first, first + size)
        self.model |= set(range(first, first + size))

    @precondition(lambda self: self.model)
    @rule(share=st.floats(0, 1))
    def take(self, share: float) -> None:
        first, stop = self.ranges.first, self.ranges.first_stop
        count = round(share * (stop - first))
        self.ranges.take(count)
        self.model -= set(range(first, first + count))

    @rule(first=small, size=st.integers(-2, 30))
    def remove(self, first: int, size: int) -> None:
        gone = set(range(first, first + size)) & self.model
        assert self.ranges.remove(first, first + size) == len(gone)
        self.model -= gone

    @rule()
    def clear(self) -> None:
        self.ranges.clear()
        self.model.clear()

    @rule(cuts=st.lists(small, max_size=8, unique=True))
    def within(self, cuts: list[int]) -> None:
        cuts.sort()
        spans = list(zip(cuts[::2], cuts[1::2], strict=False))
        inside = {seq for first, stop in spans for seq in range(first, stop)}
        assert numbers(self.ranges.within(spans)) == sorted(self.model & inside)

    @rule(cuts=st.lists(small, max_size=12, unique=True))
    def without(self, cuts: list[int]) -> None:
        cuts.sort()
        holes = Ranges(zip(cuts[::2], cuts[1::2], strict=False))
        assert numbers(self.ranges.without(holes)) == sorted(self.model - set(numbers(holes)))

    @rule(first=small, size=st.integers(1, 20))
    def look(self, first: int, size: int) -> None:
        assert (first in self.ranges) == (first in self.model)
        assert self.ranges.meets(first, first + size) == bool(self.model & set(range(first, first + size)))
        since = [seq for start, stop in self.ranges.since(first) for seq in range(start, stop)]
        assert since == sorted(seq for seq in self.model if seq >= first)

    @invariant()
    def is_the_same(self) -> None:
        assert numbers(self.ranges) == sorted(self.model)
        assert self.ranges.total == len(self.model)
        assert bool(self.ranges) == bool(self.model)
        pairs = list(self.ranges)
        assert len(self.ranges) == len(pairs)
        assert all(first < stop for first, stop in pairs)
        assert all(one[1] <= other[0] for one, other in pairwise(pairs))
        if self.model:
            assert self.ranges.first == min(self.model)


def numbers(ranges: Ranges) -> list[int]:
    return [seq for first, stop in ranges for seq in range(first, stop)]


TestRanges = RangesMachine.TestCase


def test_ranges_that_touch_become_one() -> None:
    ranges = Ranges([(1, 3), (3, 5), (7, 8)])
    assert list(ranges) == [(1, 5), (7, 8)]


def test_only_the_end_grows() -> None:
    ranges = Ranges([(1, 5)])
    with pytest.raises(ValueError, match="not at the end"):
        ranges.add(4, 9)


def test_no_more_is_taken_than_the_first_range_holds() -> None:
    ranges = Ranges([(1, 5), (6, 9)])
    with pytest.raises(ValueError, match="more than the first range"):
        ranges.take(5)
    assert list(ranges) == [(1, 5), (6, 9)]


@given(st.integers(1_100, 3_000))
def test_many_ranges_taken_from_the_front_give_their_memory_back(count: int) -> None:
    ranges = Ranges((2 * n, 2 * n + 1) for n in range(count))
    for _ in range(count - 1):
        ranges.take(1)
    assert list(ranges) == [(2 * count - 2, 2 * count - 1)]
    assert len(ranges._starts) < max(1_100, count)


pairs = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 30)).map(lambda p: (p[0], p[0] + p[1])), max_size=90)


def as_set(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {seq for first, stop in ranges for seq in range(first, stop)}


def whole(found: Ranges) -> set[int]:
    """Its seqs, after a look at whether it is well formed."""
    listed = list(found)
    assert all(first < stop for first, stop in listed)
    assert all(a[1] < b[0] for a, b in pairwise(listed)), "ranges that touch are one"
    assert found.total == len(as_set(listed))
    return as_set(listed)


@given(pairs, pairs, st.sampled_from([1, 1 << 40]))
def test_removing_many_at_once_is_removing_each(
    there: list[tuple[int, int]], gone: list[tuple[int, int]], far: int
) -> None:
    """With a few of them, with many, close together and so far apart that no byte for each seq is affordable."""
    ranges = Ranges.union(sorted([*there, (1000 * far, 1000 * far + 5)]))
    gone = [*gone, (1000 * far + 1, 1000 * far + 2)]
    ranges.remove_many(array("q", [first for first, _ in gone]), array("q", [stop for _, stop in gone]))
    assert whole(ranges) == as_set(there) - as_set(gone) | {1000 * far + i for i in (0, 2, 3, 4)}


@given(pairs, pairs)
def test_without_within_and_gaps_are_those_of_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    first, second = Ranges.union(sorted(a)), Ranges.union(sorted(b))
    assert whole(first) == as_set(a)
    assert whole(first.without(second)) == as_set(a) - as_set(b)
    assert whole(first.within(list(second))) == as_set(a) & as_set(b)
    starts, stops = first.gaps(0, 500)
    assert as_set(zip(starts, stops, strict=True)) == set(range(500)) - as_set(a)
