"""A sorted set of seqs kept as ranges: what of a topic's log a channel still has to see.

Nearly always one range; emptying, gaps, deferred and addressed messages cut holes. Taking from the front and adding
at the end are cheap, cutting a hole anywhere is one bisection.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import compress
from operator import sub

__all__ = ["Ranges"]

#: Ranges that are removed one by one: for more, one pass over all is quicker.
_FEW = 32
#: Seqs for which a byte each is always affordable.
_SMALL = 1 << 20


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

    def around(self, seq: int) -> tuple[int, int]:
        """The range that holds ``seq``; an empty one if none does."""
        i = bisect_right(self._starts, seq, self._head) - 1
        return (self._starts[i], self._stops[i]) if i >= self._head and seq < self._stops[i] else (0, 0)

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

    def remove_many(self, firsts: array[int], stops: array[int]) -> None:
        """Remove all of these ranges, in any order: in one pass, where each ``remove`` would move the rest."""
        count = len(firsts)
        if count < _FEW:
            for first, stop in zip(firsts, stops, strict=True):
                self.remove(first, stop)
            return
        low, high = min(firsts), max(stops)
        if high - low <= max(_SMALL, 64 * (count + len(self))):
            self._remove_by_bits(firsts, stops, low, high)
            return
        pairs = sorted(zip(firsts, stops, strict=True))
        self._become(self.without(Ranges.union(pairs)))

    def _remove_by_bits(self, firsts: array[int], stops: array[int], low: int, high: int) -> None:
        """A byte for each seq from ``low`` to ``high``: 1 if it is in the set."""
        bits = bytearray(high - low)
        i = bisect_right(self._stops, low, self._head)
        j = bisect_left(self._starts, high, self._head)
        if i >= j:
            return
        for first, stop in zip(self._starts[i:j], self._stops[i:j], strict=True):
            first, stop = max(first, low), min(stop, high)
            bits[first - low : stop - low] = b"\1" * (stop - first)
        if _total(firsts, stops) == len(firsts):
            for first in firsts:
                bits[first - low] = 0
        else:
            for first, stop in zip(firsts, stops, strict=True):
                bits[first - low : stop - low] = bytes(stop - first)
        # A range begins or ends where a byte differs from the one before it.
        number = int.from_bytes(bits, "little")
        changes = (number ^ (number << 8)).to_bytes(len(bits) + 1, "little")
        edges = array("q", compress(range(low, high + 1), changes))
        starts, ends = edges[::2], edges[1::2]
        if self._starts[i] < low:
            starts.insert(0, self._starts[i])
            ends.insert(0, low)
        if self._stops[j - 1] > high:
            starts.append(high)
            ends.append(self._stops[j - 1])
        # What was cut at the edges, and is one range all the same.
        for edge in (len(starts) - 1, 1):
            if 0 < edge < len(starts) and starts[edge] == ends[edge - 1]:
                del starts[edge], ends[edge - 1]
        self._starts[i:j] = starts
        self._stops[i:j] = ends
        self.total = _total(self._starts[self._head :], self._stops[self._head :])

    def _become(self, other: Ranges) -> None:
        self._starts, self._stops, self._head, self.total = other._starts, other._stops, other._head, other.total

    @classmethod
    def union(cls, pairs: Iterable[tuple[int, int]]) -> Ranges:
        """The union of ranges that are sorted by where they begin."""
        result = cls()
        starts, stops = result._starts, result._stops
        for first, stop in pairs:
            if first >= stop:
                continue
            if stops and first <= stops[-1]:
                stops[-1] = max(stops[-1], stop)
            else:
                starts.append(first)
                stops.append(stop)
        result.total = _total(starts, stops)
        return result

    @classmethod
    def _of(cls, starts: array[int], stops: array[int], total: int = -1) -> Ranges:
        result = cls()
        result._starts, result._stops = starts, stops
        result.total = _total(starts, stops) if total < 0 else total
        return result

    def gaps(self, first: int, stop: int) -> tuple[array[int], array[int]]:
        """What of ``first`` … ``stop - 1`` is not in the set: where each gap begins, and where it ends.

        All of the set lies between them.
        """
        starts = array("q", (first,)) + self._stops[self._head :]
        stops = self._starts[self._head :] + array("q", (stop,))
        for edge in (-1, 0):
            if starts and starts[edge] >= stops[edge]:
                del starts[edge], stops[edge]
        return starts, stops

    def without(self, other: Ranges) -> Ranges:
        """What of this set is not in ``other``. Many holes in one range cost no loop over them."""
        if not other:
            return self.copy()
        starts, stops = array("q"), array("q")
        hole_starts, hole_stops = other._starts[other._head :], other._stops[other._head :]
        i = 0
        for first, stop in self:
            i = bisect_right(hole_stops, first, i)
            j = bisect_left(hole_starts, stop, i)
            if i < j:
                # The ranges between the holes, with what lies before the first of them and behind the last.
                if first < hole_starts[i]:
                    starts.append(first)
                    stops.append(hole_starts[i])
                starts += hole_stops[i : j - 1]
                stops += hole_starts[i + 1 : j]
                first = hole_stops[j - 1]
                # The last one may reach into the next range.
                i = j - 1
            if first < stop:
                starts.append(first)
                stops.append(stop)
        return Ranges._of(starts, stops)

    def within(self, spans: Iterable[tuple[int, int]]) -> Ranges:
        """What of this set lies in ``spans`` (sorted, disjoint). Many ranges in one span cost no loop over them."""
        starts, stops = array("q"), array("q")
        i = self._head
        for first, stop in spans:
            i = bisect_right(self._stops, first, i)
            j = bisect_left(self._starts, stop, i)
            if i >= j:
                continue
            at = len(starts)
            joined = bool(stops) and stops[-1] == max(first, self._starts[i])
            starts += self._starts[i:j]
            stops += self._stops[i:j]
            starts[at] = max(first, starts[at])
            stops[-1] = min(stop, stops[-1])
            if joined:
                del starts[at], stops[at - 1]
            # The last one may reach into the next span.
            i = j - 1
        return Ranges._of(starts, stops)


def _total(starts: array[int], stops: array[int]) -> int:
    # Not the difference of two sums: those are beyond 64 bits, and slow.
    return sum(map(sub, stops, starts))
