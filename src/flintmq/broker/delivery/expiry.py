"""Messages that are too old to be delivered: which ones, and finding them while nobody asks.

An Expiry belongs to one topic and answers for its setting ``ttl``; without it nothing here is ever asked. A message is
too old when ``ttl`` has passed since it was published or, if its publish was deferred, since it became due. The time in
its frame tells that, on the machine's clock. What becomes of such a message is its channel's business.

Channels ask before they send, so that nothing too old goes out. What nobody wants to have is found every now and then:
the log knows which message was the first at a time.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from typing import TYPE_CHECKING

from flintmq.broker.storage.journal import NEVER, SIDE
from flintmq.broker.storage.segment import timestamp_of
from flintmq.errors import DamageError

if TYPE_CHECKING:
    from flintmq.broker.delivery.topic import Topic
    from flintmq.kernel import Block

__all__ = ["Expiry"]

logger = logging.getLogger(__name__)

#: Old messages are looked for again after this part of ``ttl``: 14 seconds for one of an hour.
PART = 256


class Expiry:
    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._looking = False
        self._looked = 0

    @property
    def cutoff(self) -> int:
        """What was published by then is too old."""
        return self._topic.broker.clock.wall() - self._topic.settings.ttl

    def too_old_from(self, block: Block, first: int, stop: int) -> int:
        """Up to which seq the messages of a block, from ``first`` on, are too old by their timestamps."""
        cutoff = self.cutoff
        if timestamp_of(block.view, block.find(first)) > cutoff:
            return first
        seqs = range(first, min(stop, block.base + block.count))
        return first + bisect_right(seqs, cutoff, key=lambda seq: timestamp_of(block.view, block.find(seq)))

    def still_good(self, first: int, stop: int, most: int) -> tuple[list[int], int]:
        """Of these seqs, which were all published too early: those that were deferred and became due later.

        At most ``most`` deferred messages are looked at; the second value says up to which seq.
        """
        cutoff = self.cutoff
        good: list[int] = []
        for seq, due in self._topic.log.delays(first, stop):
            if not most:
                return good, seq
            most -= 1
            if due > cutoff:
                good.append(seq)
        return good, stop

    def is_too_old(self, seq: int, frame: bytearray, delivered: int) -> bool:
        """The same for a single message that was delivered so often. What came for one channel alone never is."""
        if seq >= SIDE or timestamp_of(frame) > self.cutoff or self.still_good(seq, seq + 1, 1)[0]:
            return False
        # Of a deferred message whose segment is gone nobody knows any more when it became due.
        mover = self._topic.mover
        return delivered > 0 or seq >= mover.below or mover.tells_age(seq)

    def _first_young_pinned(self) -> int:
        """The first message that is not too old of those that only memory holds, for an ephemeral channel.

        The log tells which of its own were published too early, and calls everything before them older still.
        """
        for pinned in self._topic.log.memory.pinned:
            stop = pinned.block.base + pinned.block.count
            fresh = self.too_old_from(pinned.block, pinned.block.base, stop)
            if fresh < stop:
                return fresh
        return NEVER

    def has_expired(self, seq: int, delivered: int) -> bool | None:
        """Is a message too old that the log says was published too early? None while it is being read back."""
        topic = self._topic
        moved = seq < topic.mover.below
        if moved and not delivered and not topic.mover.tells_age(seq):
            return False
        if not moved or topic.log.in_memory(seq):
            return not self.still_good(seq, seq + 1, 1)[0]
        # The log does not hold it any more, only a copy: that tells its time.
        try:
            frame = topic.frame(seq)
        except DamageError:
            # Told when it is to be sent.
            return False
        return None if frame is None else self.is_too_old(seq, frame, delivered)

    def look(self) -> None:
        """Called every few seconds: find what is too old, if it is time."""
        topic = self._topic
        now = topic.broker.clock.now()
        if self._looking or now - self._looked < topic.settings.ttl // PART:
            return
        if not topic.depth and not any(channel.depth for channel in topic.channels.values()):
            return
        self._looking = True
        self._looked = now
        topic.log.seq_at(self.cutoff + 1, self._found)

    def _found(self, seq: int, error: BaseException | None) -> None:
        self._looking = False
        topic = self._topic
        if topic.exiting or topic.broker.stopping or not topic.settings.ttl:
            return
        if error is not None:
            logger.error("TOPIC(%s): cannot find what is too old - %s", topic.name, error)
            return
        if topic.log.folder is not None:
            seq = min(seq, self._first_young_pinned())
        for channel in topic.channels.values():
            try:
                channel.leaving.expire_before(seq)
                channel.leaving.expire_requeued(seq)
            except Exception:
                logger.exception("TOPIC(%s): channel %s failed", topic.name, channel.name)
        if not topic.channels:
            # What a paused topic holds is for its channels to see to.
            topic.expire_backlog(seq)
