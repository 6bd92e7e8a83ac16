"""What a channel still needs of its topic's log: which seqs may be sent again, or for the first time.

A Needed belongs to one channel and only reads it. The topic asks before it drops blocks from memory or deletes files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from flintmq.broker.storage.disk import Clock
from flintmq.broker.storage.journal import NEVER

if TYPE_CHECKING:
    from flintmq.broker.delivery.channel import Channel

__all__ = ["Needed"]

#: Requeued and deferred messages that are looked through to learn whether one of them needs a block of the log.
LOOK_THROUGH = 1_000
#: Requeued messages that are counted one by one.
COUNT_AT_ONCE = 20_000
#: What it takes to look at one requeued message, in ns; a deferred one takes about 1.
LOOK_COST = 50
#: A block that a message was found to need is asked about again after this time.
LOOK_AGAIN = 1_000_000_000


class Needed:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._looks = _Looks(channel.broker.clock)

    def first_single(self, start: int) -> int:
        """The lowest seq from ``start`` on that was sent, or is not to be sent yet, and is not finished."""
        channel = self._channel
        lowest = NEVER
        if channel.ring.count and channel.ring.hi > start:
            if channel.ring.lo >= start:
                lowest = channel.ring.lo
            else:
                lowest = min((seq for seq, _ in channel.ring.held(start, channel.ring.hi)), default=NEVER)
        for singles in (channel.requeued, channel.unusual, channel.leaving):
            found = min(singles, default=NEVER)
            if found < start:
                found = min(filter(start.__le__, singles), default=NEVER)
            lowest = min(lowest, found)
        deferred = channel.deferred.first_seq(start)
        return lowest if deferred < 0 else min(lowest, deferred)

    def first(self) -> int:
        """The lowest seq of the log that this channel may still send. Old messages may have a copy elsewhere."""
        channel = self._channel
        return min(channel.first_unsent, self.first_single(channel.topic.mover.below))

    def _requeued_between(self, first: int, stop: int) -> Iterator[int]:
        """Yield the seqs in this range that are requeued, in flight for another time, or leaving."""
        channel = self._channel
        return filter(range(first, stop).__contains__, chain(channel.requeued, channel.unusual, channel.leaving))

    def count_singles(self, first: int, stop: int) -> int:
        """How many messages of these seqs are in flight, requeued, deferred or leaving, at most."""
        channel = self._channel
        requeued = len(channel.requeued) + len(channel.unusual) + len(channel.leaving)
        if requeued <= COUNT_AT_ONCE:
            requeued = sum(1 for _ in self._requeued_between(first, stop))
        return requeued + channel.deferred.count_between(first, stop) + min(channel.ring.count, stop - first)

    def singles(self, first: int, stop: int) -> Iterator[int]:
        """These messages."""
        channel = self._channel
        yield from (seq for seq, _ in channel.ring.held(first, stop))
        yield from self._requeued_between(first, stop)
        yield from (seq for _, seq in channel.deferred.between(first, stop))

    def between(self, first: int, stop: int) -> bool:
        """May any of these seqs still be sent to somebody?"""
        channel = self._channel
        ring, expired = channel.ring, channel.leaving.expired
        if channel.seen < stop or channel.waiting.meets(first, stop) or (expired and expired.meets(first, stop)):
            return True
        if ring.count and ring.lo < stop and ring.hi > first and ring.holds(first, stop):
            return True
        count = len(channel.requeued) + len(channel.unusual) + len(channel.leaving)
        if count + len(channel.deferred) > LOOK_THROUGH:
            if not (channel.ephemeral or channel.topic.ephemeral):
                # Perhaps not; but a wrong yes costs no more than memory up to its limit, and this is asked often.
                return True
            # Memory is all there is, and nothing else limits it: look, but seldom enough to have time for other things.
            return self._looks.find(first, LOOK_COST * count + len(channel.deferred), partial(self._has, first, stop))
        return self._has(first, stop)

    def _has(self, first: int, stop: int) -> bool:
        channel = self._channel
        found = next(self._requeued_between(first, stop), None) is not None
        return found or channel.deferred.count_between(first, stop) > 0


class _Looks:
    """How often many messages are looked through to learn whether one of them needs a block.

    Looking takes at most a tenth of the time. A block that is needed is asked about again after a second; until it was
    looked at, a block counts as needed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = 0
        self._known: dict[int, int] = {}

    def find(self, block: int, cost: int, look: Callable[[], bool]) -> bool:
        """Return whether the block is needed; ``cost`` is the time that a look takes, in ns."""
        now = self._clock.now()
        if now < self._next or now < self._known.get(block, 0):
            return True
        self._next = now + 9 * cost
        needed = look()
        if len(self._known) > LOOK_THROUGH:
            self._known = {base: until for base, until in self._known.items() if until > now}
        if needed:
            self._known[block] = now + LOOK_AGAIN
        return needed
