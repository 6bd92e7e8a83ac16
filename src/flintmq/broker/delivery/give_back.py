"""Requeue the messages of consumers that are gone, with ``--requeue-on-disconnect``.

A GiveBack belongs to one channel. It owns which of its former consumers still hold something, and goes through all that
is in flight once for all that left until then, in slices: a whole fleet may leave at once, and each of its consumers
would go through what the others hold. Until its message is found it is in flight, and may time out there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flintmq.broker.delivery.slices import Steps

if TYPE_CHECKING:
    from flintmq.broker.delivery.channel import Channel

__all__ = ["GiveBack"]

#: Messages in flight that are looked at, and requeued where their consumer is gone, before the loop is handed back.
LOOK_AT_ONCE = 2_000


class GiveBack(Steps):
    def __init__(self, channel: Channel) -> None:
        super().__init__(channel.broker)
        self._channel = channel
        # How many messages each former consumer held, by its number; those the next walk will look for.
        self._gone: dict[int, int] = {}
        self._walk: Iterator[None] | None = None

    @property
    def busy(self) -> bool:
        """Is there something to requeue?"""
        return self._planned

    def add(self, ident: int, held: int) -> None:
        """A consumer is gone that held so many messages."""
        self._gone[ident] = held
        self.go_on()

    def _step(self) -> None:
        channel = self._channel
        if self._broker.stopping or channel.exiting:
            # The end of the broker is no reason: it keeps what is in flight, with its attempts.
            self._gone, self._walk = {}, None
            return
        if self._walk is None:
            gone, self._gone = self._gone, {}
            self._walk = self._look(gone, sum(gone.values()))
        try:
            next(self._walk)
        except StopIteration:
            self._walk = None
        channel.pump()
        if self._walk is not None or self._gone:
            self.go_on()

    def _look(self, gone: dict[int, int], left: int) -> Iterator[None]:
        """Requeue what these held, a slice for each yield; ``left`` is how many messages that is at most."""
        channel = self._channel
        ring = channel.ring
        at, stop = ring.lo, ring.hi
        while left > 0 and at < stop:
            found = [seq for seq, owner in ring.held(at, min(at + LOOK_AT_ONCE, stop)) if owner in gone]
            for seq in found:
                channel.give_back(seq)
            left -= len(found)
            at += LOOK_AT_ONCE
            yield
        # Not before: first deliveries may have become unusual ones meanwhile.
        seqs = list(channel.unusual) if left > 0 else []
        for start in range(0, len(seqs), LOOK_AT_ONCE):
            for seq in seqs[start : start + LOOK_AT_ONCE]:
                # Asked of the channel each time: it may have been emptied since, and sought back.
                message = channel.unusual.get(seq)
                if message is not None and message.owner in gone:
                    channel.give_back(seq)
            yield
