"""A channel's state as the journal's snapshot keeps it, in parts that each take little time; and how it comes back.

The state is that of the moment at which the first part is asked for: large containers are copied then, which is cheap,
and sorted and written down later, a slice at a time. Entries that the journal takes in meanwhile are replayed on top of
the snapshot, so that it does no harm if they are known to both.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, compress, islice, pairwise
from operator import gt
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
#: Seqs that are sorted in one go, and ranges that are joined in one go.
CHUNK = WINDOW = 8_000


def snapshot_parts(channel: Channel) -> Iterator[Part]:
    """Yield all that is outstanding as pairs in ascending order, and the rows of messages delivered before.

    The parts follow each other: together their pairs and rows are those of a ``ChannelState``. Some are empty.
    """
    clock = channel.broker.clock
    now, wall = clock.now(), clock.wall()
    start = channel.seen if channel.sought is None else channel.sought
    requeued = list(channel.requeued)
    unusual = list(channel.unusual)
    messages = list(channel.unusual.values())
    leaving = dict(channel.leaving.attempts)
    dues, seqs = channel.deferred.columns()
    attempts = channel.attempts.copy()
    # Messages that are being written to the side log for this channel are in none of its ranges yet.
    side_start = channel.topic.side_end
    if channel.redrive is not None:
        side_start = min(side_start, channel.redrive.first_place)
    sets = [channel.waiting.copy(), Ranges([(start, SIDE)]), channel.side.copy(), Ranges([(side_start, NEVER)])]
    sets.append(channel.leaving.expired.copy())
    ring = channel.in_flight.slices(CHUNK)
    head = next(ring, [])
    # From here on the channel goes on, and what is read is a copy.

    singles: list[Ranges] = []
    others = chain(requeued, unusual, leaving)
    deferred = (seqs[at : at + CHUNK] for at in range(0, len(seqs), CHUNK))
    for chunk in chain([head], ring, iter(lambda: list(islice(others, CHUNK)), []), deferred):
        found = Ranges.of_seqs(array("q", sorted(set(chunk))))
        if found and singles and singles[-1].stop <= found.first:
            singles[-1].append(found)
        elif found:
            singles.append(found)
        if len(chunk) == CHUNK:
            yield b"", b""
    while len(singles) > 1:
        # Two at a time, so that each is gone through seldom however many there are.
        singles.append(singles.pop(0).with_all(singles.pop(0)))
        yield b"", b""
    yield from _pairs([*sets, *singles])

    def rows() -> Iterator[tuple[int, int, int, int] | None]:
        for seq in requeued:
            # Also of one that was never delivered: its publisher may have wished it later than it is to come now.
            yield (seq, attempts[seq], 0, 0) if seq in attempts else None
        # A deferred publish is known from the log; a requeued message is known here alone.
        for due, seq in zip(dues, seqs, strict=True) if attempts else ():
            yield (seq, attempts[seq], due, wall + due - now) if seq in attempts else None
        for seq, message in zip(unusual, messages, strict=True):
            yield seq, message.attempts - 1, 0, 0
        for seq, count in leaving.items():
            yield (seq, count, 0, 0) if count else None

    all_rows = rows()
    while some := list(islice(all_rows, PART)):
        numbers = array("q", chain.from_iterable(row for row in some if row is not None))
        yield b"", pack_numbers(numbers)


def _pairs(sets: list[Ranges]) -> Iterator[Part]:
    """Yield the union of sets as pairs in ascending order."""
    cuts = sorted(chain.from_iterable(each.starts(WINDOW) for each in sets))
    last = Ranges()
    for low, high in pairwise([*cuts, 2 * NEVER]):
        for each in sets:
            some = each.within([(low, high)])
            if some:
                last = last.with_all(some)
        # What ends here may go on in the next window.
        whole = last.within([(0, last.last)]) if last else last
        yield pack_numbers(whole.pairs()), b""
        last = last.within([(last.last, 2 * NEVER)]) if last else last
    yield pack_numbers(last.pairs()), b""


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
    deferrals: Iterable[tuple[array[int], array[int]]],
    now: int,
    below: int,
) -> Restored:
    """Sort what the journal and the log know into states.

    ``outstanding`` holds only seqs that exist; ``back`` has attempts and due times of messages delivered before;
    ``deferrals`` are seqs of the log and when they are due. Of messages before ``below`` only a copy is left.
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
    deferrals: Iterable[tuple[array[int], array[int]]],
    now: int,
    all_dues: array[int],
    all_seqs: array[int],
) -> Ranges:
    """Move those that are not due yet to ``all_dues`` and ``all_seqs``; return what of ``outstanding`` is left."""
    taken = Ranges()
    for seqs, dues in deferrals:
        if back or min(dues, default=now) <= now:
            wanted = [due > now and seq not in back for seq, due in zip(seqs, dues, strict=True)]
            seqs, dues = array("q", compress(seqs, wanted)), array("q", compress(dues, wanted))
        try:
            new = Ranges.of_seqs(seqs)
        except ValueError:
            # Said twice: a file that was copied after a crash, and the copy. The first one counts.
            said = dict(zip(reversed(seqs), reversed(dues), strict=True))
            seqs = array("q", sorted(said))
            dues = array("q", map(said.__getitem__, seqs))
            new = Ranges.of_seqs(seqs)
        mask = outstanding.select(seqs)
        again = bool(taken and new) and new.first < taken.stop
        if again:
            mask = bytearray(map(gt, mask, taken.select(seqs)))
        if not all(mask):
            seqs, dues = array("q", compress(seqs, mask)), array("q", compress(dues, mask))
            new = Ranges.of_seqs(seqs)
        all_dues += dues
        all_seqs += seqs
        if again:
            taken = taken.with_all(new)
        else:
            taken.append(new)
    return outstanding.without(taken) if taken else outstanding
