"""A sorted set of seqs kept as ranges: what of a topic's log a channel still has to see.

Nearly always one range; emptying, gaps, deferred and addressed messages cut holes. Taking from the front and adding
at the end are cheap, cutting a hole anywhere is one bisection.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain

from flintmq.kernel import spans_hold, spans_of, spans_total, spans_union, spans_without

__all__ = ["Ranges"]

#: Ranges that are removed one by one: for more, one pass over all is quicker.
_FEW = 32
_NONE = array("q")


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

    def front(self) -> tuple[int, int]:
        """Return where the first range begins, and how many seqs are in it."""
        first = self._starts[self._head]
        return first, self._stops[self._head] - first

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
        if len(firsts) < _FEW:
            for first, stop in zip(firsts, stops, strict=True):
                self.remove(first, stop)
            return
        try:
            holes = Ranges.of(firsts, stops)
        except ValueError:
            order = sorted(range(len(firsts)), key=firsts.__getitem__)
            holes = Ranges.of(array("q", map(firsts.__getitem__, order)), array("q", map(stops.__getitem__, order)))
        self._become(self.without(holes))

    def _become(self, other: Ranges) -> None:
        self._starts, self._stops, self._head, self.total = other._starts, other._stops, other._head, other.total

    @classmethod
    def of(cls, starts: array[int], stops: array[int]) -> Ranges:
        """The union of ranges that are sorted by where they begin; ValueError if they are not."""
        return cls._of(*spans_union(starts, stops, _NONE, _NONE))

    @classmethod
    def of_seqs(cls, seqs: array[int]) -> Ranges:
        """The set of these, which ascend; ValueError if they do not."""
        return cls._of(*spans_of(seqs))

    @classmethod
    def union(cls, pairs: Iterable[tuple[int, int]]) -> Ranges:
        """The union of ranges that are sorted by where they begin."""
        flat = array("q", chain.from_iterable(pairs))
        return cls.of(flat[::2], flat[1::2])

    @classmethod
    def _of(cls, starts: array[int], stops: array[int]) -> Ranges:
        result = cls()
        result._starts, result._stops = starts, stops
        result.total = spans_total(starts, stops)
        return result

    def pairs(self) -> array[int]:
        """All ranges as pairs (first, stop), one after the other."""
        count = len(self)
        flat = array("q", bytes(16 * count))
        flat[::2] = self._starts[self._head :]
        flat[1::2] = self._stops[self._head :]
        return flat

    def with_all(self, other: Ranges) -> Ranges:
        """What is in either set."""
        return Ranges._of(
            *spans_union(
                self._starts[self._head :],
                self._stops[self._head :],
                other._starts[other._head :],
                other._stops[other._head :],
            )
        )

    def append(self, other: Ranges) -> None:
        """Add a set that lies behind everything that is there."""
        if not other:
            return
        self.add(other.first, other.first_stop)
        self._starts += other._starts[other._head + 1 :]
        self._stops += other._stops[other._head + 1 :]
        self.total += other.total - (other.first_stop - other.first)

    def starts(self, step: int) -> array[int]:
        """Where every ``step``-th range begins."""
        return self._starts[self._head :: step]

    def select(self, seqs: array[int]) -> bytearray:
        """Return a byte for each of the ascending seqs: 1 if it is in the set."""
        return spans_hold(self._starts[self._head :], self._stops[self._head :], seqs)

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
        """What of this set is not in ``other``."""
        return Ranges._of(
            *spans_without(
                self._starts[self._head :],
                self._stops[self._head :],
                other._starts[other._head :],
                other._stops[other._head :],
            )
        )

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
