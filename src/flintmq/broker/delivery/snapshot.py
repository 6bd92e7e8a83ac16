"""A channel's state as the journal's snapshot keeps it, in parts that each take little time; and how it comes back.

The state is that of the moment at which the first part is asked for: large containers are copied then, which is cheap,
and sorted and written down later, a slice at a time. Entries that the journal takes in meanwhile are replayed on top of
the snapshot, so that it does no harm if they are known to both.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from flintmq.broker.storage.disk import pack_numbers
from flintmq.broker.storage.journal import NEVER, SIDE
from flintmq.broker.storage.ranges import Ranges

if TYPE_CHECKING:
    from flintmq.broker.delivery.channel import Channel

__all__ = ["Part", "Restored", "restored", "snapshot_parts"]

#: Ranges of seqs as pairs (first, stop), and rows (seq, attempts, due on the clock, due on the wall).
Part = tuple[bytes, bytes]

#: Messages that one part goes through.
PART = 2_000
#: Seqs that are sorted in one go.
CHUNK = 8_000


def snapshot_parts(channel: Channel) -> Iterator[Part]:
    """Yield all that is outstanding as pairs in ascending order, and the rows of messages delivered before.

    The parts follow each other: together their pairs and rows are those of a ``ChannelState``. Some are empty.
    """
    clock = channel.broker.clock
    now, wall = clock.now(), clock.wall()
    start = channel.seen if channel.sought is None else channel.sought
    waiting, expired, side = channel.waiting.copy(), channel.leaving.expired.copy(), channel.side.copy()
    requeued = list(channel.requeued)
    unusual = list(channel.unusual)
    messages = list(channel.unusual.values())
    leaving = dict(channel.leaving.attempts)
    seqs = channel.deferred.items()
    deferred = channel.deferred.items()
    attempts = channel.attempts.copy()
    # Messages that are being written to the side log for this channel are in none of its ranges yet.
    side_start = channel.topic.side_end
    if channel.redrive is not None:
        side_start = min(side_start, channel.redrive.first_place)
    ends = chain(waiting, [(start, SIDE)], side, [(side_start, NEVER)])
    ring = channel.in_flight.slices(CHUNK)
    head = next(ring, [])
    # From here on the channel goes on, and what is read is a copy.

    streams: list[list[array[int]]] = []
    singles = chain(requeued, unusual, leaving, (seq for _, seq in seqs))
    for chunk in chain([head], ring, iter(lambda: list(islice(singles, CHUNK)), [])):
        ordered = array("q", sorted(chunk))
        if not ordered:
            continue
        if streams and streams[-1][-1][-1] < ordered[0]:
            streams[-1].append(ordered)
        else:
            streams.append([ordered])
        if len(chunk) == CHUNK:
            yield b"", b""
    single = merge(*(chain.from_iterable(stream) for stream in streams))
    yield from _pairs(merge(ends, expired, ((seq, seq + 1) for seq in single)))

    def rows() -> Iterator[tuple[int, int, int, int] | None]:
        for seq in requeued:
            # Also of one that was never delivered: its publisher may have wished it later than it is to come now.
            yield (seq, attempts[seq], 0, 0) if seq in attempts else None
        for due, seq in deferred:
            # A deferred publish is known from the log; a requeued message is known here alone.
            yield (seq, attempts[seq], due, wall + due - now) if seq in attempts else None
        for seq, message in zip(unusual, messages, strict=True):
            yield seq, message.attempts - 1, 0, 0
        for seq, count in leaving.items():
            yield (seq, count, 0, 0) if count else None

    found = rows()
    while some := list(islice(found, PART)):
        numbers = array("q", chain.from_iterable(row for row in some if row is not None))
        yield b"", pack_numbers(numbers)


def _pairs(spans: Iterable[tuple[int, int]]) -> Iterator[Part]:
    """Yield ascending spans as pairs, joined where they touch or overlap."""
    spans = iter(spans)
    last = (0, 0)
    while some := list(islice(spans, PART)):
        pairs = array("q")
        for first, stop in some:
            if first <= last[1] and last[1]:
                last = (last[0], max(last[1], stop))
                continue
            if last[1]:
                pairs.extend(last)
            last = (first, stop)
        yield pack_numbers(pairs), b""
    if last[1]:
        yield pack_numbers(array("q", last)), b""


class Restored(NamedTuple):
    """A channel's messages after a start, by their state."""

    waiting: Ranges
    #: Waiting, of the side log.
    side: Ranges
    requeued: list[int]
    #: Deferred.
    dues: array[int]
    seqs: array[int]
    #: How often messages were delivered before.
    attempts: dict[int, int]


def restored(
    outstanding: Ranges,
    back: dict[int, tuple[int, int, int]],
    deferrals: Iterable[tuple[int, int]],
    now: int,
    below: int,
) -> Restored:
    """Sort what the journal and the log know into states.

    ``outstanding`` holds only seqs that exist; ``back`` has attempts and due times of messages delivered before;
    ``deferrals`` are pairs (seq, due) of the log. Of messages before ``below`` only a copy is left.
    """
    dues, seqs = array("q"), array("q")
    outstanding = _without_deferred(outstanding, back, deferrals, now, dues, seqs)
    # Taken out together: there may be a million of them, in nearly as many ranges.
    taken = Ranges()
    requeued: list[int] = []
    counts: dict[int, int] = {}
    for seq in sorted(back):
        attempts, due, _ = back[seq]
        if seq in outstanding:
            taken.add(seq, seq + 1)
            counts[seq] = attempts
            if due > now:
                dues.append(due)
                seqs.append(seq)
            else:
                requeued.append(seq)
    if taken:
        outstanding = outstanding.without(taken)
    for first, stop in outstanding.within([(0, below)]):
        # Only a copy is left of these, and copies are read one by one.
        requeued.extend(range(first, stop))
    waiting, side = outstanding.within([(below, SIDE)]), outstanding.within([(SIDE, NEVER)])
    return Restored(waiting, side, requeued, dues, seqs, counts)


def _without_deferred(
    outstanding: Ranges,
    back: dict[int, tuple[int, int, int]],
    deferrals: Iterable[tuple[int, int]],
    now: int,
    dues: array[int],
    seqs: array[int],
) -> Ranges:
    """Move those that are not due yet to ``dues`` and ``seqs``; return what of ``outstanding`` is left."""
    left = Ranges()
    spans = iter(outstanding)
    first, stop = next(spans, (NEVER, NEVER))
    before = -1
    again: list[tuple[int, int]] = []
    for seq, due in deferrals:
        if due <= now or (back and seq in back):
            continue
        if seq <= before:
            # Said twice: a file that was copied after a crash, and the copy.
            again.append((seq, due))
            continue
        before = seq
        while stop <= seq:
            left.add(first, stop)
            first, stop = next(spans, (NEVER, NEVER))
        if seq >= first:
            if first < seq:
                left.add(first, seq)
            first = seq + 1
            dues.append(due)
            seqs.append(seq)
    if first < NEVER:
        left.add(first, stop)
    for first, stop in spans:
        left.add(first, stop)
    missed = sorted((seq, due) for seq, due in again if seq in left)
    return _without_deferred(left, back, missed, now, dues, seqs) if missed else left
