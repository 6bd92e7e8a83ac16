"""``/stats?extended=true&since=CURSOR``: what has changed since somebody last asked.

Nothing on a message's way counts changes. A ``Deltas`` keeps, for each topic and channel, the few numbers that tell
whether anything happened there, and when it noticed that; an asker gets what was noticed after his last question.
Each answer has a ``cursor`` for the next one. A cursor of another start of the broker, or one that is too old, gets
everything.

Most channels of a large broker are at rest: they have no message in any state, nor one whose latency is told. Such a
channel does not change before the topic's mark ``pumped`` moves, or its count ``touched``. So where all channels of a
topic were at rest, a glance at the topic is enough: with very many channels, each number that is read costs a cache
miss.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from flintmq.broker.observe.stats import channel_stats, header, more_of_channel, more_of_topic, topic_stats
from flintmq.broker.observe.steps import Steps, in_turns
from flintmq.http.site import json_bytes

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic

__all__ = ["Deltas"]

#: Deleted topics and channels that are remembered.
MOST_GONE = 10_000
#: Channels whose numbers are read, and topics that are glanced at, in the time that it takes to tell of one channel.
LOOKS = 4
GLANCES = 4
#: The first of a channel's numbers say how many messages it has in each state, and of how many it tells the latency:
#: all of them 0 when it is at rest.
HELD = 10


class _Seen:
    """What was last seen of a topic and its channels, and the numbers under which that was noticed."""

    __slots__ = ("at_rest", "channels", "latest", "noticed", "numbers", "numbers_of_channels", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.numbers: tuple[Any, ...] = ()
        # Were all channels at rest?
        self.at_rest = False
        # Side by side: most of the time nothing has changed, and lists are compared at once.
        self.channels: list[Channel] = []
        self.numbers_of_channels: list[tuple[Any, ...]] = []
        self.noticed: list[int] = []
        self.latest = 0


class Deltas:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._boot = broker.disk.system.randbytes(4).hex()
        self._count = 0
        self._topics: dict[str, _Seen] = {}
        self._gone: deque[tuple[int, str, str]] = deque()
        self._walking = asyncio.Lock()
        #: Channels whose numbers were read, since the start.
        self.looked = 0
        # Before it, nobody knows what has gone.
        self._floor = 0
        # The version of what pipelines report that was last seen, and the number under which that was noticed.
        self._reports = (0, 0)

    async def json(self, since: str, include_mem: bool) -> bytes:
        """The answer to a question with this cursor."""
        # One at a time: what one walk notices behind the back of another would be told to neither's asker.
        async with self._walking:
            return await in_turns(self._json(since, include_mem))

    def _json(self, since: str, include_mem: bool) -> Steps[bytes]:
        boot, _, text = since.partition("-")
        after = int(text) if boot == self._boot and text.isascii() and text.isdecimal() else -1
        is_delta = after >= self._floor and after <= self._count
        if not is_delta:
            after = -1
        parts: list[bytes] = []
        glances = 0
        for topic in list(self._broker.topics.values()):
            if topic.exiting:
                continue
            looked = self.looked
            seen = self._look(topic)
            glances += 1
            if self.looked > looked or glances == GLANCES:
                yield 1 + (self.looked - looked) // LOOKS
                glances = 0
            if seen.latest > after:
                parts.append(self._tell(seen, after))
                yield len(seen.channels)
        self._notice_gone()
        pipelines = self._broker.pipelines.describe()
        if self._reports[0] != self._broker.pipelines.version:
            self._reports = (self._broker.pipelines.version, self._next())
        result = header(self._broker, include_mem=include_mem)
        result |= {"delta": is_delta, "cursor": f"{self._boot}-{self._count}"}
        if self._reports[1] > after:
            result["pipelines"] = pipelines
        if is_delta:
            gone = [(topic, channel) for noticed, topic, channel in self._gone if noticed > after]
            result["removed"] = {
                "topics": [topic for topic, channel in gone if not channel],
                "channels": [[topic, channel] for topic, channel in gone if channel],
            }
        return json_bytes(result)[:-1] + b',"topics":[' + b",".join(parts) + b"]}"

    def _look(self, topic: Topic) -> _Seen:
        """Notice what has changed."""
        seen = self._topics.get(topic.name)
        if seen is None or seen.topic is not topic:
            if seen is not None:
                self._note_gone(topic.name, "")
            seen = self._topics[topic.name] = _Seen(topic)
        log, pumped = topic.log, topic.pumped
        memory = log.blocks[0].base if log.blocks else log.end
        readers: tuple[Any, ...] = ()
        if topic.readers.positions:
            readers = tuple(tuple(one.values()) for one in more_of_topic(topic)["readers"])
        numbers = (
            pumped,
            log.end,
            memory,
            topic.message_count,
            len(topic.gaps),
            topic.paused,
            topic.expired_count,
            len(topic.channels),
            topic.touched,
            readers,
        )
        channels = list(topic.channels.values())
        if numbers != seen.numbers:
            seen.numbers = numbers
            seen.latest = self._next()
        elif seen.at_rest and channels == seen.channels:
            return seen
        if channels != seen.channels:
            self._rearrange(seen, channels)
        self.looked += len(channels)
        now = self._broker.clock.now()
        # Written out, for speed.
        its: list[tuple[Any, ...]] = [
            (
                pumped - one.seen,
                one.ring.count,
                one.waiting.total,
                one.side.total,
                len(one.requeued),
                len(one.deferred),
                len(one.in_flight.unusual),
                len(one.leaving),
                one.leaving.expired.total,
                # They leave the window by themselves, one day.
                0 if one.latency is None else one.latency.measured(now),
                # What has left the memory changes what is told of a channel that has messages.
                memory if one.seen < pumped or one.waiting.total else 0,
                pumped,
                one.seen,
                one.message_count,
                one.waiting,
                one.requeue_count,
                one.timeout_count,
                one.paused,
                one.leaving.dead_lettered_count,
                one.leaving.expired_count,
                len(one.sessions),
            )
            for one in channels
        ]
        seen.at_rest = not any(any(each[:HELD]) for each in its)
        if its != seen.numbers_of_channels:
            for number, (old, new) in enumerate(zip(seen.numbers_of_channels, its, strict=True)):
                if old != new:
                    seen.noticed[number] = seen.latest = self._next()
            seen.numbers_of_channels = its
        return seen

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _rearrange(self, seen: _Seen, channels: list[Channel]) -> None:
        """Channels came or went."""
        known = {
            id(channel): (numbers, noticed)
            for channel, numbers, noticed in zip(seen.channels, seen.numbers_of_channels, seen.noticed, strict=True)
        }
        there = set(map(id, channels))
        for channel in seen.channels:
            if id(channel) not in there:
                self._note_gone(seen.topic.name, channel.name)
        seen.channels = channels
        seen.numbers_of_channels = [known.get(id(channel), ((), 0))[0] for channel in channels]
        seen.noticed = [known.get(id(channel), ((), 0))[1] for channel in channels]

    def _tell(self, seen: _Seen, after: int) -> bytes:
        channels = [
            channel_stats(channel) | more_of_channel(channel)
            for channel, noticed in zip(seen.channels, seen.noticed, strict=True)
            if noticed > after and not channel.exiting
        ]
        return json_bytes(topic_stats(seen.topic, channels) | more_of_topic(seen.topic))

    def _notice_gone(self) -> None:
        topics = self._broker.topics
        for name in [name for name in self._topics if name not in topics or topics[name].exiting]:
            del self._topics[name]
            self._note_gone(name, "")

    def _note_gone(self, topic: str, channel: str) -> None:
        self._gone.append((self._next(), topic, channel))
        while len(self._gone) > MOST_GONE:
            self._floor = self._gone.popleft()[0]
