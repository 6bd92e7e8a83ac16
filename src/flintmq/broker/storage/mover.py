"""Old messages that hold files: they get a copy in the topic's side log, so that their segment can be deleted.

One message that is deferred for a day, requeued again and again or in flight for long needs only itself, but keeps the
whole segment it stands in, and all that follow. When such messages are few in the oldest segment, a Mover copies them.
Nothing changes for channels: a message keeps its seq and its id, only its frame is read from elsewhere.

A copy is a record of the side log that is for no channel in particular and carries the seq it stands for. The segment
is deleted only when copies are on the device, and the journal knows when each deferred one is due: until then the
segment did.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import TYPE_CHECKING

from flintmq.broker.storage.journal import SIDE
from flintmq.broker.storage.segment import Segment, timestamp_of
from flintmq.errors import DamageError, PublishError
from flintmq.kernel import FRAME_OVERHEAD

if TYPE_CHECKING:
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic
    from flintmq.broker.storage.log import Log

__all__ = ["Mover", "copies"]

logger = logging.getLogger(__name__)

#: Whom a record of the side log is for, nobody in particular, and the seq it is a copy of. What extra bytes the
#: original has follow.
_address = Struct(">IQ")
#: Added to the seq: the message was not deferred by its publisher, so that its timestamp alone tells its age. Copies
#: of 0.1.0 do not say it.
_NOT_DEFERRED = 1 << 63
_NOBODY = bytes(4)
_u32 = Struct(">I")
#: Messages of a segment are copied if at most one in FEW of them is still needed.
FEW = 4
#: What is copied before the loop is handed back.
COPY_BYTES = 1 << 20
#: A segment that too many messages need is looked at again after this time.
LOOK_AGAIN = 30_000_000_000


def copies(side: Log) -> Iterator[tuple[int, int, bool]]:
    """(seq, where its copy is, whether it was surely not deferred) of all copies in a side log."""
    for first, _, extra in side.addressed():
        if extra[:4] == _NOBODY:
            seq = _address.unpack_from(extra)[1]
            yield seq & ~_NOT_DEFERRED, first, bool(seq & _NOT_DEFERRED)


class Mover:
    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        #: Whatever before this seq is still needed has a copy.
        self.below = 0
        # The copies: of which seq, and where. Both ascend.
        self._seqs = array("q")
        self._places = array("q")
        # Those whose publish was not deferred.
        self._plain: set[int] = set()
        # Under way: what is still to be copied, what was, and up to where that gives the log free.
        self._wanted: deque[int] = deque()
        self._new_seqs = array("q")
        self._new_places = array("q")
        self._new_plain: set[int] = set()
        self._stop = 0
        # The segment that was looked at in vain, and when.
        self._kept: Segment | None = None
        self._kept_at = 0

    def restore(self, found: Iterable[tuple[int, int, bool]]) -> list[tuple[int, int]]:
        """Take up what a start found in the side log; the seqs that exist as copies alone, as ranges."""
        copied = {seq: (place, plain) for seq, place, plain in found}
        log = self._topic.log
        segments = [(segment.base, segment.end) for segment in log.segments]

        def is_removed(seq: int) -> bool:
            i = bisect_right(segments, (seq, SIDE << 1)) - 1
            return seq >= log.first and not (i >= 0 and seq < segments[i][1])

        removed = max(filter(is_removed, copied), default=None)
        if removed is not None:
            # Files before a removed one are back after a power loss, or could not be removed: they count no more.
            log.remove_before(next((base for base, _ in segments if base > removed), log.end))
        self.below = log.first
        # Of a segment that is still there the copies do not count: it may have been given up in the middle.
        kept = sorted(seq for seq in copied if seq < self.below)
        self._seqs = array("q", kept)
        self._places = array("q", (copied[seq][0] for seq in kept))
        self._plain.update(seq for seq in kept if copied[seq][1])
        return [(seq, seq + 1) for seq in kept]

    def frame(self, seq: int) -> bytearray | None:
        """The frame of a message whose segment was deleted; None while it is being read back."""
        side, place = self.place(seq)
        frame = side.frame(place)
        if frame is not None:
            frame[18:34] = self._topic.ids.text(seq)
        return frame

    def extra(self, seq: int) -> bytes | None:
        """The extra bytes that its record had; None while they are being read back."""
        side, place = self.place(seq)
        extra = side.extra(place)
        return None if extra is None else extra[_address.size :]

    def place(self, seq: int) -> tuple[Log, int]:
        """The log that holds the copy of a message whose segment was deleted, and the copy's seq in it."""
        side = self._topic.side
        i = bisect_left(self._seqs, seq)
        if side is None or i == len(self._seqs) or self._seqs[i] != seq:
            raise DamageError(f"LOG({self._topic.name}): seq {seq} is gone", seq, seq + 1)
        return side, self._places[i]

    def tells_age(self, seq: int) -> bool:
        """Is it certain that the message was not deferred? Then it is as old as its timestamp says."""
        return seq in self._plain

    def look_back(self) -> None:
        """A channel goes back in the log: of what is still in its files copies do not count, nor are any made now."""
        self._give_up()
        first = self._topic.log.first
        if self.below > first:
            kept = bisect_left(self._seqs, first)
            self._plain.difference_update(self._seqs[kept:])
            del self._seqs[kept:], self._places[kept:]
            self.below = first

    @property
    def first_copied(self) -> int:
        """The lowest seq that exists as a copy alone."""
        return self._seqs[0] if self._seqs else SIDE

    @property
    def first_place(self) -> int:
        """The first of the side log's seqs that is needed here."""
        if self._places:
            return self._places[0]
        return self._new_places[0] if self._new_places else SIDE << 1

    # --- Copying ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Called every few seconds: go on with what is under way, or see whether there is something to do."""
        self._prune()
        if self._stop:
            self._go_on()
        else:
            self._begin()

    def _channels(self) -> list[Channel]:
        # Ephemeral channels never read from files.
        return [channel for channel in self._topic.channels.values() if not channel.ephemeral]

    def _prune(self) -> None:
        """Forget copies that nobody needs any more, oldest first."""
        if self._seqs:
            lowest = min((channel.needed.first_single(0) for channel in self._channels()), default=SIDE)
            gone = bisect_left(self._seqs, lowest)
            if gone:
                self._plain.difference_update(self._seqs[:gone])
                del self._seqs[:gone], self._places[:gone]

    def _begin(self) -> None:
        storage = self._topic.log
        segment = storage.oldest_sealed
        if segment is None:
            return
        now = self._topic.broker.clock.now()
        if segment is self._kept and now - self._kept_at < LOOK_AGAIN:
            return
        self._kept, self._kept_at = segment, now
        stop = storage.segments[1].base
        channels = self._channels()
        if self._topic.pumped < stop or any(channel.first_unsent < stop for channel in channels):
            return
        if min(self._topic.readers.first, self._topic.retention.first) < stop:
            # It stays in any case.
            return
        start = max(self.below, segment.base)
        most = sum(segment.spans[1::2]) - sum(segment.spans[::2])
        if sum(channel.needed.count_singles(start, stop) for channel in channels) > most // FEW:
            return
        needed: set[int] = set()
        for channel in channels:
            needed.update(channel.needed.singles(start, stop))
        if needed:
            logger.info(
                "TOPIC(%s): copying %d old messages so that %s can go", self._topic.name, len(needed), segment.path
            )
            self._wanted.extend(sorted(needed))
            self._stop = stop
            self._go_on()

    def _go_on(self) -> None:
        topic = self._topic
        side = topic.side
        if self._wanted:
            self._copy(topic.side_log())
            return
        if side is None or not self._new_places:
            # All of them turned out to be damaged.
            self._give_up()
        elif side.durable > self._new_places[-1]:
            self._settle()
        else:
            side.write_all()
            side.sync()

    def write_failed(self, place: int) -> None:
        """From this seq of the side log on nothing was written: if copies are among it, from the beginning, later."""
        if self._new_places and self._new_places[-1] >= place:
            self._give_up()

    def step(self) -> None:
        """Something was read back: perhaps what is copied next."""
        if self._wanted and not self._topic.exiting:
            try:
                side = self._topic.side_log()
            except OSError as exc:
                # Channels wait for what was read, too: they must not be kept from it.
                logger.error("TOPIC(%s): old messages cannot be copied, later - %s", self._topic.name, exc)
                self._give_up()
            else:
                self._copy(side)

    def _copy(self, side: Log) -> None:
        size = 0
        while self._wanted:
            seq = self._wanted[0]
            try:
                frame = self._topic.log.frame(seq)
                extra = self._topic.log.extra(seq) if frame is not None else None
            except DamageError:
                # Whoever wants it will be told so.
                self._wanted.popleft()
                continue
            if frame is None or extra is None:
                return
            self._wanted.popleft()
            body = len(frame) - FRAME_OVERHEAD
            record = bytearray(_u32.pack(body)) + frame[FRAME_OVERHEAD:]
            plain = not any(self._topic.log.delays(seq, seq + 1))
            address = _address.pack(0, seq | (_NOT_DEFERRED if plain else 0)) + extra
            try:
                place = side.append(record, 0, len(record), 1, timestamp_of(frame), extra=address)
            except PublishError as exc:
                logger.error("TOPIC(%s): old messages cannot be copied, later - %s", self._topic.name, exc)
                self._give_up()
                return
            self._new_seqs.append(seq)
            self._new_places.append(place)
            if plain:
                self._new_plain.add(seq)
            size += body
            if size > COPY_BYTES:
                side.write_all()
                self._topic.broker.later(self.step)
                return
        side.write_all()
        side.sync()

    def _settle(self) -> None:
        """The copies are on the device: from here on they are what is read."""
        for channel in self._channels():
            channel.note_due(self.below, self._stop)
        self._seqs.extend(self._new_seqs)
        self._places.extend(self._new_places)
        self._plain |= self._new_plain
        self.below = self._stop
        self._give_up()

    def _give_up(self) -> None:
        self._wanted.clear()
        del self._new_seqs[:], self._new_places[:]
        self._new_plain.clear()
        self._stop = 0
