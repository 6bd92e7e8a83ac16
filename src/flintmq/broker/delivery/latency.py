"""How long messages take from publish to FIN: quantiles over a sliding window, per channel.

A Sketch holds what was measured, a Latency also knows when the messages in flight of one channel were published. Both
exist only where ``--e2e-processing-latency-percentile`` asks for them. A topic has none of its own: its quantiles are
those of all its channels' sketches together.

When a message was published stands in its frame. It is read when the frame is sent, because then it is in memory for
certain, and kept for as long as the message is in flight: a few numbers per batch that was published, not per message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import ceil, log
from struct import Struct

from flintmq.kernel import Block

__all__ = ["Latency", "Sketch", "publish_time", "quantiles"]

#: A quantile is off by at most this share of itself.
ACCURACY = 0.01
#: The window moves on by this part of itself: what is seen is never older than it, and covers 7/8 of it at least.
SLICES = 8
#: Nothing is longer than what 63 bits hold (292 years): 2,185 buckets at most.
LONGEST = (1 << 63) - 1

_GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GROWTH = log(_GROWTH)
_timestamp = Struct(">q")
_TIME_AT = 8


def publish_time(frame: bytes | bytearray | memoryview) -> int:
    """When the message of this frame was published, in ns since 1970."""
    return int(_timestamp.unpack_from(frame, _TIME_AT)[0])


def _time_in(block: Block, seq: int) -> int:
    return int(_timestamp.unpack_from(block.view, block.find(seq) + _TIME_AT)[0])


def _end_of_batch(block: Block, first: int, stop: int, time: int) -> int:
    """From ``first`` on, up to ``stop`` at most, messages were published at ``time``; where those of another begin.

    All messages of a batch have the same time: so longer and longer steps ahead, then halving the last one.
    """
    same, step = first, 1
    while same + step < stop and _time_in(block, same + step) == time:
        same += step
        step *= 2
    other = min(same + step, stop)
    while other - same > 1:
        middle = (same + other) // 2
        if _time_in(block, middle) == time:
            same = middle
        else:
            other = middle
    return other


def _bucket(value: int) -> int:
    """Buckets grow by the same factor each, so that the middle of one is near every value in it."""
    return 1 + ceil(log(value) / _LOG_GROWTH) if value > 0 else 0


def _middle(bucket: int) -> float:
    return 2 * _GROWTH ** (bucket - 1) / (_GROWTH + 1) if bucket else 0.0


class _Slice:
    """What was measured in one part of the window."""

    __slots__ = ("buckets", "count", "highest", "lowest", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.lowest = LONGEST
        self.highest = 0


class Sketch:
    """How often which duration was seen within the window: a count for each bucket of nearly equal durations.

    Its size depends on how far the durations lie apart, not on how many they are: from 1 ms to 10 s some 460 buckets.
    """

    __slots__ = ("_buckets", "_period", "_slices", "count", "ever", "spent")

    def __init__(self, window: int) -> None:
        self._period = max(1, window // SLICES)
        self._slices: list[_Slice] = []
        # All slices together, so that asking costs no more than counting once.
        self._buckets: dict[int, int] = {}
        self.count = 0
        #: How many there were since the start, and how long they took together.
        self.ever = 0
        self.spent = 0

    def add(self, value: int, count: int, now: int) -> None:
        """``count`` messages took ``value`` ns each. ``now`` is the time that the window moves by."""
        number = now // self._period
        if not self._slices or self._slices[-1].number < number:
            self.expire(now)
            self._slices.append(_Slice(number))
        current = self._slices[-1]
        # The machine's date may have been set back meanwhile.
        value = min(max(value, 0), LONGEST)
        bucket = _bucket(value)
        current.buckets[bucket] = current.buckets.get(bucket, 0) + count
        current.count += count
        current.lowest = min(current.lowest, value)
        current.highest = max(current.highest, value)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += count
        self.ever += count
        self.spent += value * count

    def expire(self, now: int) -> None:
        """Forget what has left the window."""
        oldest = now // self._period - SLICES
        while self._slices and self._slices[0].number <= oldest:
            gone = self._slices.pop(0)
            self.count -= gone.count
            for bucket, count in gone.buckets.items():
                left = self._buckets[bucket] - count
                if left:
                    self._buckets[bucket] = left
                else:
                    del self._buckets[bucket]

    @property
    def buckets(self) -> dict[int, int]:
        return self._buckets

    @property
    def lowest(self) -> int:
        return min((part.lowest for part in self._slices), default=0)

    @property
    def highest(self) -> int:
        return max((part.highest for part in self._slices), default=0)


def quantiles(sketches: Iterable[Sketch], wanted: Sequence[float], now: int) -> tuple[int, list[int]]:
    """How many messages the sketches saw within their window, and the ``wanted`` quantiles of them all, 0 without any.

    The quantile q of n values is the one at place ceil(q · n) among them. Each is off by at most ``ACCURACY`` of
    itself; the lowest and the highest are exact.
    """
    some = []
    for sketch in sketches:
        sketch.expire(now)
        if sketch.count:
            some.append(sketch)
    if not some:
        return 0, [0] * len(wanted)
    buckets = some[0].buckets
    if len(some) > 1:
        buckets = dict(buckets)
        for sketch in some[1:]:
            for bucket, count in sketch.buckets.items():
                buckets[bucket] = buckets.get(bucket, 0) + count
    total = sum(sketch.count for sketch in some)
    lowest, highest = min(sketch.lowest for sketch in some), max(sketch.highest for sketch in some)
    # Rounded before it is rounded up: 0.07 · 100 is a little more than 7 for a machine.
    places = [min(max(ceil(round(q * total, 6)), 1), total) for q in wanted]
    found: dict[int, int] = {1: lowest, total: highest}
    left = sorted(set(places) - found.keys(), reverse=True)
    passed = 0
    for bucket in sorted(buckets):
        if not left:
            break
        passed += buckets[bucket]
        while left and left[-1] <= passed:
            found[left.pop()] = round(min(max(_middle(bucket), lowest), highest))
    return total, [found[place] for place in places]


class Latency:
    """One channel's sketch, and when the messages were published that it has in flight for the first time.

    Those times are kept as steps: from this seq on, this time. Seqs are delivered in order, so steps are added at the
    end and dropped at the front. Other messages in flight carry their time themselves (``Unusual.published``).
    """

    __slots__ = ("_firsts", "_head", "_times", "done", "sketch")

    def __init__(self, window: int) -> None:
        self.sketch = Sketch(window)
        #: Pairs (first, stop) of what is finished and counted, until the journal takes them.
        self.done = bytearray()
        self._firsts: list[int] = []
        self._times: list[int] = []
        self._head = 0

    def sent(self, block: Block, first: int, stop: int, lowest: int) -> None:
        """``first`` … ``stop - 1`` of the block go out for the first time; nothing before ``lowest`` is in flight."""
        if self._firsts and first < self._firsts[-1]:
            # The cursor went back. It does so only with nothing in flight.
            self._clear()
        self._prune(lowest)
        while first < stop:
            time = _time_in(block, first)
            if not self._times or self._times[-1] != time:
                self._firsts.append(first)
                self._times.append(time)
            first = _end_of_batch(block, first, stop, time)

    def measured(self, now: int) -> int:
        """Return how many messages were measured within the window."""
        self.sketch.expire(now)
        return self.sketch.count

    def published(self, seq: int) -> int:
        """When a message that was sent once was published."""
        return self._times[max(bisect_right(self._firsts, seq) - 1, 0)]

    def finished(self, pairs: bytes, wall: int, now: int) -> None:
        """Ranges that were in flight for the first time are finished."""
        self.done += pairs
        numbers = array("q", pairs)
        firsts, times, add = self._firsts, self._times, self.sketch.add
        for i in range(0, len(numbers), 2):
            first, stop = numbers[i], numbers[i + 1]
            step = max(bisect_right(firsts, first) - 1, 0)
            while first < stop:
                after = min(firsts[step + 1], stop) if step + 1 < len(firsts) else stop
                add(wall - times[step], after - first, now)
                first = after
                step += 1

    def _clear(self) -> None:
        self._firsts.clear()
        self._times.clear()
        self._head = 0

    def _prune(self, lowest: int) -> None:
        firsts = self._firsts
        while self._head + 1 < len(firsts) and firsts[self._head + 1] <= lowest:
            self._head += 1
        if self._head > 64 and self._head * 2 > len(firsts):
            del firsts[: self._head], self._times[: self._head]
            self._head = 0
