"""Emptying a node before it goes: nothing more comes in, consumers take what is there, then the broker stops.

Publishes are refused with the reason, so that producers go to another node. Everything else goes on: consumers come,
finish and requeue as ever. The node is empty when no channel that has a consumer has anything waiting or in flight.
What nobody can take now stays in the log for the next start and is reported: what is deferred, what is paused, and what
has no consumer or no channel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.topic import Topic

__all__ = ["REASON", "DrainReport", "Remainder", "drain"]

logger = logging.getLogger(__name__)

#: What publishers are told.
REASON = "the node is being drained"
#: How often it is looked at what is left, and how often that is said, in seconds.
_LOOK, _SAY = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class Remainder:
    """What one channel, or a topic for lack of one (``channel`` is None), still holds."""

    topic: str
    channel: str | None
    messages: int
    #: How many of them are deferred.
    deferred: int
    #: Why nobody takes the others; empty where somebody does.
    why: str

    def __str__(self) -> str:
        actor = f"TOPIC({self.topic})" if self.channel is None else f"CHANNEL({self.channel})"
        of = "" if self.channel is None else f" of {self.topic}"
        parts = [f"{self.deferred} deferred"] if self.deferred else []
        if self.messages > self.deferred:
            parts.append(f"{self.messages - self.deferred} {self.why or 'not finished in time'}")
        return f"{actor}: {self.messages} messages{of} stay: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class DrainReport:
    #: Everything that was not delivered and finished.
    left: list[Remainder]
    #: Did consumers finish all that they could?
    complete: bool

    @property
    def messages(self) -> int:
        return sum(remainder.messages for remainder in self.left)


async def drain(broker: Broker, *, longest: float) -> DrainReport:
    """See the module's text. Stops the broker; after ``longest`` seconds (0: never) even if it is not empty."""
    logger.info("NSQ: draining, %d messages are with consumers", _to_go(broker))
    deadline = broker.now() + longest if longest else float("inf")
    say = broker.now() + _SAY
    while (to_go := _to_go(broker)) and broker.now() < deadline and not broker.stopping:
        if broker.now() >= say:
            say += _SAY
            logger.info("NSQ: draining, %d messages to go", to_go)
        await asyncio.sleep(_LOOK)
    # A stop in between leaves nothing with consumers either, because it disconnects them.
    report = DrainReport(list(_remainders(broker)), not to_go and not broker.stopping)
    for remainder in report.left:
        logger.info("%s", remainder)
    if report.complete:
        logger.info("NSQ: drained, %d messages stay for the next start", report.messages)
    else:
        logger.warning("NSQ: not drained, %d messages stay for the next start", report.messages)
    await broker.stop()
    return report


def _to_go(broker: Broker) -> int:
    """Messages that somebody is there to take."""
    return sum(found.messages - found.deferred for found in _remainders(broker) if not found.why)


def _remainders(broker: Broker) -> Iterator[Remainder]:
    for topic in broker.topics.values():
        depth = topic.depth
        if depth:
            yield Remainder(topic.name, None, depth, 0, _why_backlog(topic))
        for channel in topic.channels.values():
            deferred = len(channel.deferred)
            messages = channel.depth + channel.in_flight_count + deferred
            why = "paused" if channel.paused else "" if channel.sessions else "without a consumer"
            if messages:
                yield Remainder(topic.name, channel.name, messages, deferred, why)
            if channel.leaving_count:
                # Dead letters, and what is redriven: they need no consumer here.
                yield Remainder(topic.name, channel.name, channel.leaving_count, 0, "")


def _why_backlog(topic: Topic) -> str:
    if topic.paused:
        return "paused"
    # Otherwise they are on their way to the channels.
    return "" if topic.channels and not topic.frozen else "without a channel"
