"""Moving a channel to another place in its log.

A Seek goes through the log from its target on and collects what will be waiting and what will be deferred, beside the
channel. Deferred messages may be a million: the loop is handed back after each slice. Until all is collected the
channel is as it was, only that it delivers nothing and sees nothing new; then it takes over everything in one step. A
crash before that step leaves the channel where it was, one after it where it is now.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from flintmq.broker.storage.ranges import Ranges
from flintmq.kernel import Heap

if TYPE_CHECKING:
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.storage.log import Log

__all__ = ["Seek"]

#: Deferred messages that are looked at before the loop is handed back.
SLICE = 5_000


class Seek:
    def __init__(self, channel: Channel, start: int, then: Callable[[], None], *, noted: bool) -> None:
        self._channel = channel
        self._then = then
        self.start = start
        #: The journal knows of it already: the channel is new and has nothing else.
        self.noted = noted
        self.waiting = Ranges()
        self.deferred = Heap()
        self._steps = self._collect(channel.seen)
        # What the topic has done meanwhile: the channel sees it afterwards.
        self._postponed: list[Callable[[], None]] = []

    def run(self) -> None:
        """Collect one slice; after the last one let the channel take over."""
        channel = self._channel
        if channel.seeking is not self:
            return
        if next(self._steps, None) is not None:
            channel.broker.later(self.run)
            return
        self._settle()

    def _settle(self) -> None:
        """Take over, once the journal knows every copy of what left the channel to be on the device.

        A start finishes what has a copy of which that is not known: it would undo the seek.
        """
        channel = self._channel
        copied = channel.leaving.copied_to
        while copied:
            log, (verb, incarnation, stop) = next(iter(copied.items()))
            stop = min(stop, log.end)
            if log.durable < stop and not log.closed:
                log.when_durable(stop, partial(self._settled, log))
                return
            del copied[log]
            channel.broker.journal.note(verb, incarnation, log.durable)
        channel.take_over(self)
        self.end()

    def _settled(self, log: Log, error: Exception | None) -> None:
        channel = self._channel
        if channel.seeking is self and not channel.broker.stopping:
            if error is not None:
                # There is no such copy.
                channel.leaving.copied_to.pop(log, None)
            self._settle()

    def postpone(self, work: Callable[[], None]) -> None:
        """Do this to the channel when it has taken over."""
        self._postponed.append(work)

    def end(self) -> None:
        """Let the channel see what came meanwhile, and tell who waits. It is no longer ``seeking``."""
        for work in self._postponed:
            work()
        self._channel.pump()
        self._then()

    def _collect(self, stop: int) -> Iterator[bool]:
        """Sort the messages up to ``stop`` that are in the log into waiting and deferred, a slice for each yield."""
        log = self._channel.topic.log
        now = self._channel.broker.clock.now()
        spans = deque(Ranges(log.spans()).within([(self.start, stop)]))
        dues, seqs = array("q"), array("q")
        looked = 0
        # Also those that are due: however many they are, looking at them counts.
        pairs = chain.from_iterable(zip(seqs, dues, strict=True) for seqs, dues in log.deferrals())
        for seq, due in pairs:
            looked += 1
            if looked % SLICE == 0:
                self._push(dues, seqs)
                yield True
            if due <= now:
                continue
            while spans and spans[0][1] <= seq:
                self.waiting.add(*spans.popleft())
            if not spans:
                break
            first, last = spans[0]
            if seq >= first:
                self.waiting.add(first, seq)
                spans[0] = (seq + 1, last)
                dues.append(due)
                seqs.append(seq)
        self._push(dues, seqs)
        for first, last in spans:
            self.waiting.add(first, last)

    def _push(self, dues: array[int], seqs: array[int]) -> None:
        self.deferred.extend(dues, seqs)
        del dues[:], seqs[:]
