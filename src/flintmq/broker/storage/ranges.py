"""A sorted set of seqs kept as ranges: what of a topic's log a channel still has to see.

Nearly always one range; emptying, gaps, deferred and addressed messages cut holes. Taking from the front and adding
at the end are cheap, cutting a hole anywhere is one bisection.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Ranges"]


class Ranges:
    __slots__ = ("_head", "_starts", "_stops", "total")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts = array("q")
        self._stops = array("q")
        self._head = 0
        #: How many seqs there are.
        self.total = 0
        for first, stop in ranges:
            self.add(first, stop)

    def __bool__(self) -> bool:
        return self._head < len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for i in range(self._head, len(self._starts)):
            yield self._starts[i], self._stops[i]

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._starts) - self._head

    @property
    def first(self) -> int:
        return self._starts[self._head]

    @property
    def first_stop(self) -> int:
        """Where the first range ends."""
        return self._stops[self._head]

    @property
    def stop(self) -> int:
        """Where the last range ends."""
        return self._stops[-1]

    def __contains__(self, seq: int) -> bool:
        i = bisect_right(self._starts, seq, self._head) - 1
        return i >= self._head and seq < self._stops[i]

    def meets(self, first: int, stop: int) -> bool:
        """Is any seq of ``first`` … ``stop - 1`` in the set?"""
        i = bisect_right(self._stops, first, self._head)
        return i < len(self._starts) and self._starts[i] < stop

    def since(self, seq: int) -> Iterator[tuple[int, int]]:
        """What is there from ``seq`` on."""
        for i in range(bisect_right(self._stops, seq, self._head), len(self._starts)):
            yield max(seq, self._starts[i]), self._stops[i]

    @property
    def last(self) -> int:
        """Where the last range begins."""
        return self._starts[-1]

    def count_before(self, seq: int) -> int:
        """How many seqs of the set lie before ``seq``."""
        i = bisect_left(self._starts, seq, self._head)
        if i == len(self._starts):
            return self.total - (max(0, self._stops[-1] - seq) if self else 0)
        count = sum(self._stops[self._head : i]) - sum(self._starts[self._head : i])
        return count - (max(0, self._stops[i - 1] - seq) if i > self._head else 0)

    def place(self, count: int) -> int:
        """Where the first ``count`` ranges end; beyond everything if there are no more."""
        at = self._head + count
        return self._starts[at] if at < len(self._starts) else 1 << 62

    def copy(self) -> Ranges:
        result = Ranges()
        result._starts, result._stops = self._starts[self._head :], self._stops[self._head :]
        result.total = self.total
        return result

    def clear(self) -> None:
        self._starts = array("q")
        self._stops = array("q")
        self._head = 0
        self.total = 0

    def add(self, first: int, stop: int) -> None:
        """Add ``first`` … ``stop - 1``, which must lie behind everything that is there."""
        if first >= stop:
            return
        if self._head < len(self._stops):
            last = self._stops[-1]
            if first < last:
                raise ValueError("add: not at the end")
            if first == last:
                self._stops[-1] = stop
                self.total += stop - first
                return
        self._starts.append(first)
        self._stops.append(stop)
        self.total += stop - first

    def take(self, count: int) -> None:
        """Remove ``count`` seqs from the front, all of the first range."""
        head = self._head
        first = self._starts[head] + count
        if first > self._stops[head]:
            raise ValueError("take: more than the first range holds")
        self.total -= count
        if first < self._stops[head]:
            self._starts[head] = first
            return
        self._head += 1
        if self._head == len(self._starts):
            self.clear()
        elif self._head > 1024 and self._head * 2 > len(self._starts):
            del self._starts[: self._head]
            del self._stops[: self._head]
            self._head = 0

    def remove(self, first: int, stop: int) -> int:
        """Remove ``first`` … ``stop - 1``, whatever of it is there; how many that were."""
        if first >= stop:
            return 0
        starts, stops = self._starts, self._stops
        i = bisect_right(stops, first, self._head)
        j = bisect_left(starts, stop, self._head)
        if i >= j:
            return 0
        left = (starts[i], first) if starts[i] < first else None
        right = (stop, stops[j - 1]) if stops[j - 1] > stop else None
        before = self.total
        removed = sum(stops[k] - starts[k] for k in range(i, j))
        keep = [r for r in (left, right) if r is not None]
        removed -= sum(b - a for a, b in keep)
        starts[i:j] = array("q", [a for a, _ in keep])
        stops[i:j] = array("q", [b for _, b in keep])
        self.total = before - removed
        return removed

    def without(self, other: Ranges) -> Ranges:
        """What of this set is not in ``other``: in one pass, where many ``remove`` would move the rest each time."""
        result = Ranges()
        holes = iter(other)
        hole = next(holes, None)
        for first, stop in self:
            while hole is not None and hole[1] <= first:
                hole = next(holes, None)
            while hole is not None and hole[0] < stop:
                result.add(first, hole[0])
                first = min(stop, hole[1])
                if hole[1] > stop:
                    break
                hole = next(holes, None)
            result.add(first, stop)
        return result

    def within(self, spans: Iterable[tuple[int, int]]) -> Ranges:
        """What of this set lies in ``spans`` (sorted, disjoint)."""
        result = Ranges()
        mine = iter(self)
        current = next(mine, None)
        for first, stop in spans:
            while current is not None and current[1] <= first:
                current = next(mine, None)
            while current is not None and current[0] < stop:
                result.add(max(first, current[0]), min(stop, current[1]))
                if current[1] > stop:
                    break
                current = next(mine, None)
        return result
