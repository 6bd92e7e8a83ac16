"""What an nsqlookupd knows: which nsqds there are, which topics and channels each of them has, who is hidden.

The Registry owns all of it and does no I/O; time is passed in. It lives in memory only: after a restart it is empty
until every nsqd has connected again.

Two indexes say who has what. A producer's own (``Producer.topics``) is the truth: it is changed in one step. The lists
of topics and channels follow in slices (``settle``), because an nsqd may have 100,000 names when its connection ends;
until then they may still hold a producer that has left, and whoever reads them asks the producer.

A topic or channel, once named, stays known when its last nsqd has gone: that is how one that was made in advance, or
whose nsqds are all down, is still found. Only ephemeral ones go with their last nsqd. A tombstone hides one topic of
one nsqd for a while, so that consumers leave it before it is deleted there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from flintmq import addresses
from flintmq.errors import FullError
from flintmq.protocol.wire import is_ephemeral

__all__ = ["Producer", "Registry"]

logger = logging.getLogger(__name__)

#: Names that are kept, topics and channels together, and how many of them one nsqd may claim.
MOST_NAMES = 1_000_000
MOST_REGISTRATIONS = 200_000
#: Names that a producer leaves at once, when its connection ends or it unregisters a topic.
SLICE = 64

#: What Go prints for a moment that never was: nanoseconds of the year 1, wrapped.
NEVER = -6795364578871345152

_GONE = "DB: client(%s) UNREGISTER category:%s key:%s subkey:%s"
_UNEXPECTED = "client(%s) unexpected UNREGISTER category:%s key:%s subkey:%s"


class Producer:
    """An nsqd, as it introduced itself on one connection."""

    __slots__ = (
        "broadcast_address",
        "count",
        "hostname",
        "http_port",
        "id",
        "last_update",
        "seen",
        "tcp_port",
        "topics",
        "topology_region",
        "topology_zone",
        "version",
    )

    def __init__(
        self,
        id: str,
        *,
        broadcast_address: str,
        tcp_port: int,
        http_port: int,
        version: str,
        hostname: str = "",
        topology_zone: str = "",
        topology_region: str = "",
    ) -> None:
        #: The address that the connection comes from: after a reconnect it is another producer.
        self.id = id
        self.hostname = hostname
        self.broadcast_address = broadcast_address
        self.tcp_port = tcp_port
        self.http_port = http_port
        self.version = version
        self.topology_zone = topology_zone
        self.topology_region = topology_region
        # Its last sign of life: for our own reckoning, and as a date.
        self.seen = 0
        self.last_update = 0
        # The topics that it has, each with its channels, and how many names that is.
        self.topics: dict[Topic, dict[str, None]] = {}
        self.count = 0

    def about(self) -> dict[str, Any]:
        """As consumers are told of it."""
        return {
            "remote_address": self.id,
            "hostname": self.hostname,
            "broadcast_address": self.broadcast_address,
            "tcp_port": self.tcp_port,
            "http_port": self.http_port,
            "version": self.version,
            "topology_zone": self.topology_zone,
            "topology_region": self.topology_region,
        }

    def has(self, topic: Topic, channel: str = "") -> bool:
        held = self.topics.get(topic)
        return held is not None and (not channel or channel in held)

    def is_at(self, node: str) -> bool:
        """Is it the one that is called ``address:http_port``? An IPv6 address may have its brackets or not."""
        host = self.broadcast_address.removeprefix("[").removesuffix("]")
        return node in (addresses.join(host, self.http_port), f"{host}:{self.http_port}")


class Topic:
    """A topic that somebody has named: who has it, and its channels with who has them."""

    __slots__ = ("channels", "name", "producers")

    def __init__(self, name: str) -> None:
        self.name = name
        #: With the moment of its tombstone: for our own reckoning, and as a date.
        self.producers: dict[Producer, tuple[int, int] | None] = {}
        self.channels: dict[str, dict[Producer, None]] = {}


class Registry:
    """``inactive_timeout`` and ``tombstone_lifetime`` are nanoseconds, as are both clocks."""

    def __init__(
        self,
        *,
        inactive_timeout: int,
        tombstone_lifetime: int,
        now: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._inactive_timeout = inactive_timeout
        self._tombstone_lifetime = tombstone_lifetime
        self._now = now
        self._wall = wall
        self.producers: dict[str, Producer] = {}
        self.topics: dict[str, Topic] = {}
        #: Of all topics together.
        self.channel_count = 0
        #: What producers have left and is still to be taken out of the topics' lists.
        self._leaving: deque[Iterator[None]] = deque()

    @property
    def name_count(self) -> int:
        return len(self.topics) + self.channel_count

    # --- What nsqds say --------------------------------------------------------------------------------------------

    def add(self, producer: Producer) -> None:
        self.producers[producer.id] = producer
        self.ping(producer)
        logger.info("DB: client(%s) REGISTER category:client key: subkey:", producer.id)

    def ping(self, producer: Producer) -> None:
        """A sign of life. Only this keeps a producer from being taken for dead: registering does not."""
        producer.seen = self._now()
        producer.last_update = self._wall()

    def register(self, producer: Producer, topic_name: str, channel: str = "") -> None:
        """The producer has this topic, or this channel of it. FullError if that is one name too many."""
        topic = self._topic(topic_name)
        has_topic = topic is not None and producer.has(topic)
        has_channel = not channel or (topic is not None and producer.has(topic, channel))
        if has_topic and has_channel:
            # A tombstone, if there is one, stays: only unregistering ends it early.
            return
        if producer.count >= MOST_REGISTRATIONS:
            raise FullError(f"too many registrations, {MOST_REGISTRATIONS} are allowed")
        topic = self.make_topic(topic_name)
        holders = self._make_channel(topic, channel) if not has_channel else None
        if not has_topic:
            topic.producers[producer] = None
            producer.topics[topic] = {}
            producer.count += 1
        if holders is not None:
            holders[producer] = None
            producer.topics[topic][channel] = None
            producer.count += 1
            logger.info("DB: client(%s) REGISTER category:channel key:%s subkey:%s", producer.id, topic_name, channel)
        if not has_topic:
            logger.info("DB: client(%s) REGISTER category:topic key:%s subkey:", producer.id, topic_name)

    def unregister(self, producer: Producer, topic_name: str, channel: str = "") -> None:
        """The producer has this channel no longer, or this topic with all its channels."""
        topic = self._topic(topic_name)
        if topic is None:
            return
        held = producer.topics.get(topic)
        if channel:
            if held is not None and channel in held:
                del held[channel]
                producer.count -= 1
                self._leave_channel(topic, channel, producer)
                logger.info(_GONE, producer.id, "channel", topic_name, channel)
            elif is_ephemeral(channel) and not self._channel(topic, channel):
                # Made in advance, and now nobody comes.
                self.delete_channel(topic_name, channel)
        elif held is not None:
            del producer.topics[topic], topic.producers[producer]
            producer.count -= 1 + len(held)
            self._forget_if_left(topic)
            self._leave(self._leave_topic(topic, held, producer, logging.WARNING, _UNEXPECTED))
        else:
            self._forget_if_left(topic)

    def remove(self, producer: Producer) -> None:
        """The connection has ended: the producer has nothing any more."""
        held, producer.topics, producer.count = producer.topics, {}, 0
        # A later connection may have come from the same address, before the end of this one was noticed.
        if self.producers.get(producer.id) is producer:
            del self.producers[producer.id]
        self._leave(self._leave_all(held, producer))

    def settle(self) -> bool:
        """Take a slice of what has been left out of the topics' lists. Return whether there is more to do."""
        for _ in range(SLICE):
            if not self._leaving:
                break
            if next(self._leaving[0], self) is self:
                self._leaving.popleft()
        return bool(self._leaving)

    def _leave(self, steps: Iterator[None]) -> None:
        self._leaving.append(steps)
        if len(self._leaving) == 1:
            self.settle()

    def _leave_all(self, held: dict[Topic, dict[str, None]], producer: Producer) -> Iterator[None]:
        for topic, channels in held.items():
            topic.producers.pop(producer, None)
            self._forget_if_left(topic)
            yield from self._leave_topic(topic, channels, producer, logging.INFO, _GONE)
        logger.info(_GONE, producer.id, "client", "", "")

    def _leave_topic(
        self, topic: Topic, channels: dict[str, None], producer: Producer, level: int, text: str
    ) -> Iterator[None]:
        """Take a producer that has left a topic out of its channels too."""
        for name in channels:
            # It may have come back in the meantime.
            if not producer.has(topic, name):
                self._leave_channel(topic, name, producer)
                logger.log(level, text, producer.id, "channel", topic.name, name)
            yield
        logger.info(_GONE, producer.id, "topic", topic.name, "")
        yield

    def _leave_channel(self, topic: Topic, name: str, producer: Producer) -> None:
        holders = topic.channels.get(name)
        if holders is None or producer not in holders:
            return
        del holders[producer]
        if not holders and is_ephemeral(name):
            self._forget_channel(topic, name)

    def _topic(self, name: str) -> Topic | None:
        """Return a topic that is known. An ephemeral one that all its producers have left is forgotten on the way."""
        topic = self.topics.get(name)
        if topic is not None and topic.producers and self._forget_if_left(topic):
            return None
        return topic

    def _forget_if_left(self, topic: Topic) -> bool:
        """Forget the topic if it is ephemeral and nobody has it any more."""
        if not is_ephemeral(topic.name) or any(producer.has(topic) for producer in topic.producers):
            return False
        self._forget(topic)
        return True

    def _channel(self, topic: Topic, name: str) -> dict[Producer, None] | None:
        """Return who has a channel, None if it is not known; the same of an ephemeral one that all have left."""
        holders = topic.channels.get(name)
        if holders and is_ephemeral(name) and not any(producer.has(topic, name) for producer in holders):
            self._forget_channel(topic, name)
            return None
        return holders

    def _forget(self, topic: Topic) -> None:
        for producer in topic.producers:
            held = producer.topics.pop(topic, None)
            if held is not None:
                producer.count -= 1 + len(held)
        self.channel_count -= len(topic.channels)
        # Whoever is still leaving it finds nothing to leave.
        topic.producers, topic.channels = {}, {}
        if self.topics.get(topic.name) is topic:
            del self.topics[topic.name]

    def _forget_channel(self, topic: Topic, name: str) -> None:
        for producer in topic.channels.pop(name):
            held = producer.topics.get(topic)
            if held is not None and name in held:
                del held[name]
                producer.count -= 1
        self.channel_count -= 1

    # --- What operators say ----------------------------------------------------------------------------------------

    def make_topic(self, name: str) -> Topic:
        topic = self._topic(name)
        if topic is None:
            self._check_room()
            topic = self.topics[name] = Topic(name)
        return topic

    def make_channel(self, topic: str, name: str) -> None:
        self._make_channel(self.make_topic(topic), name)

    def _make_channel(self, topic: Topic, name: str) -> dict[Producer, None]:
        holders = self._channel(topic, name)
        if holders is None:
            self._check_room()
            holders = topic.channels[name] = {}
            self.channel_count += 1
        return holders

    def _check_room(self) -> None:
        if self.name_count >= MOST_NAMES:
            raise FullError(f"too many topics and channels, {MOST_NAMES} are allowed")

    def delete_topic(self, name: str) -> None:
        """Forget the topic and its channels. An nsqd that still has it names it again when it connects next."""
        topic = self._topic(name)
        if topic is not None:
            self._forget(topic)

    def delete_channel(self, topic_name: str, name: str) -> bool:
        """Forget the channel; false if nobody ever named it."""
        topic = self._topic(topic_name)
        if topic is None or self._channel(topic, name) is None:
            return False
        self._forget_channel(topic, name)
        return True

    def tombstone(self, topic_name: str, node: str) -> None:
        """Hide the topic of the nsqd that is called ``node``."""
        topic = self._topic(topic_name)
        for producer in topic.producers if topic is not None else ():
            if topic is not None and producer.is_at(node):
                topic.producers[producer] = (self._now(), self._wall())

    # --- What is asked ---------------------------------------------------------------------------------------------

    def channels(self, topic_name: str) -> list[str]:
        topic = self._topic(topic_name)
        return list(topic.channels) if topic is not None else []

    def lookup(self, topic_name: str) -> list[Producer] | None:
        """Who has the topic, without the dead and the hidden; None if nobody ever named it."""
        topic = self._topic(topic_name)
        if topic is None:
            return None
        holders = topic.producers.items()
        return [p for p, mark in holders if p.has(topic) and self._is_active(p) and not self._is_hidden(mark)]

    def active_count(self) -> int:
        return sum(map(self._is_active, self.producers.values()))

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Every nsqd that is alive with its topics, and for each topic whether it is hidden."""
        for producer in list(self.producers.values()):
            if self._is_active(producer):
                topics = list(producer.topics)
                yield producer.about() | {
                    "tombstones": [self._is_hidden(topic.producers[producer]) for topic in topics],
                    "topics": [topic.name for topic in topics],
                }

    def dump(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Every name somebody has, as ``category:key:subkey``, and who has it; also the dead and the hidden."""
        return (entry for entry in self.dump_steps() if entry[1])

    def dump_steps(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """As `dump`, in short steps: names that nobody has come too, with an empty list."""
        for topic in list(self.topics.values()):
            yield "", []
            for name, holders in list(topic.channels.items()):
                held = [_record(producer, None) for producer in holders if producer.has(topic, name)]
                yield f"channel:{topic.name}:{name}", held
        yield "client::", [_record(producer, None) for producer in self.producers.values()]
        for topic in list(self.topics.values()):
            yield f"topic:{topic.name}:", [_record(p, mark) for p, mark in topic.producers.items() if p.has(topic)]

    def _is_active(self, producer: Producer) -> bool:
        return self._now() - producer.seen <= self._inactive_timeout

    def _is_hidden(self, mark: tuple[int, int] | None) -> bool:
        return mark is not None and self._now() - mark[0] < self._tombstone_lifetime


def _record(producer: Producer, mark: tuple[int, int] | None) -> dict[str, Any]:
    return {
        "broadcast_address": producer.broadcast_address,
        "hostname": producer.hostname,
        "http_port": producer.http_port,
        "id": producer.id,
        "last_update": producer.last_update,
        "tcp_port": producer.tcp_port,
        "tombstoned": mark is not None,
        "tombstoned_at": mark[1] if mark is not None else NEVER,
        "topology_region": producer.topology_region,
        "topology_zone": producer.topology_zone,
        "version": producer.version,
    }
