"""Producers and consumers, with the project's own client, that tell the ledger everything they do and see.

A Wire opens the connections of one client and can cut them. A Publisher and a Subscriber each own one client; the load
is closed: publishers hold back while channels owe too much, so that the cluster is always busy and never buried.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from flintmq.addresses import split
from flintmq.client.connection import Connection, Message
from flintmq.client.consumer import Consumer
from flintmq.client.producer import Producer
from flintmq.errors import ClosedError, ConnectError, PublishError, PublishUnknownError
from flintmq.tools.torture.cluster_ledger import ClusterLedger, NodeLink

__all__ = ["Publisher", "Subscriber", "Wire"]

#: Of each publisher: calls under way, and the pause after each.
_UNDER_WAY = 4
_PAUSE = 0.02
#: First deliveries owed at which publishers hold back.
_MOST_OWED = 3_000
_LARGEST_BATCH = 40
_LONGEST_DELAY = 1.0
#: Of all deliveries, these parts are requeued, and take some time.
_REQUEUED = 0.02
_SLOW = 0.05

#: Seconds that an nsqd waits for the first words of a client.
_HANDSHAKE = 5.0
#: Seconds that a client has to disconnect when the run is cut short.
_ABANDON_SECONDS = 0.5

#: A machine that stands still for minutes is not a dead one. Nodes come and go: look for them often.
SETTINGS: dict[str, Any] = {
    "heartbeat_interval": 3600.0,
    "read_timeout": 7200.0,
    "write_timeout": 3600.0,
    "dial_timeout": 60.0,
    "lookupd_timeout": 60.0,
    "reconnect_delay": 0.05,
    "max_reconnect_delay": 0.5,
    "lookupd_poll_interval": 0.25,
}


class Wire:
    """The connections of one client."""

    def __init__(self, ledger: ClusterLedger) -> None:
        self._ledger = ledger
        self._open: dict[Connection, tuple[NodeLink, asyncio.Transport]] = {}
        #: Of those that ended.
        self._links: dict[Connection, NodeLink] = {}
        self.lost_count = 0
        self._closing = False

    async def connect(
        self, address: str, factory: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """The client's ``connect`` option."""
        host, port, _ = split(address)
        # Before it is open: a node that is killed meanwhile is a reason for its end.
        link = self._ledger.opened(address, time.monotonic())
        link.closing = self._closing
        try:
            transport, protocol = await asyncio.get_running_loop().create_connection(factory, host, port)
        except BaseException:
            link.closing = True
            self._ledger.lost(link, time.monotonic())
            raise
        assert isinstance(protocol, Connection)
        self._open[protocol] = (link, transport)
        self._links[protocol] = link
        protocol.lost.add_done_callback(lambda _: self._lost(protocol))
        return transport, protocol

    def _lost(self, connection: Connection) -> None:
        link, _ = self._open.pop(connection)
        self.lost_count += 1
        now = time.monotonic()
        given_up = isinstance(connection.reason, ClosedError)
        if connection._shaking and (given_up or now - link.opened >= _HANDSHAKE):
            # Never in use. A client may think better of it, when the nsqlookupds have forgotten the node meanwhile; and
            # a node does not wait for ever for a client on a machine that stands still.
            link.closing = True
        if "_FAILED" in str(connection.reason) and link.cause is None:
            # A publish was refused, and after that a broker hangs up.
            link.cause = now
        phase = "in the handshake" if connection._shaking else "in use"
        self._ledger.lost(link, now, f"{phase}, after {now - link.opened:.1f} s - {connection.reason}")

    def link(self, message: Message) -> NodeLink:
        assert message.source is not None
        return self._links[message.source]

    def say_goodbye(self) -> None:
        """The client is about to close them itself."""
        self._closing = True
        for link, _ in self._open.values():
            link.closing = True

    def cut(self, rng: random.Random) -> bool:
        """Cut one of them, as a network would. Is there one?"""
        if not self._open:
            return False
        link, transport = rng.choice(list(self._open.values()))
        if link.cause is None:
            link.cause = time.monotonic()
        transport.abort()
        return True


class Publisher:
    def __init__(
        self,
        ledger: ClusterLedger,
        rng: random.Random,
        lookupds: Sequence[str],
        topics: Sequence[str],
        *,
        retries: bool,
    ) -> None:
        self._ledger = ledger
        self._rng = rng
        self._topics = topics
        self._retries = retries
        self.wire = Wire(ledger)
        self._producer = Producer(
            lookupd=lookupds, connect=self.wire.connect, retry_unknown=retries, timeout=120.0, **SETTINGS
        )
        self._stopping = False
        self._work: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._producer.start()
        self._work = [asyncio.create_task(self._publish_on()) for _ in range(_UNDER_WAY)]

    async def _publish_on(self) -> None:
        while not self._stopping:
            if self._ledger.owed < _MOST_OWED:
                await self._publish_once()
            await asyncio.sleep(_PAUSE * self._rng.uniform(0.5, 1.5))

    async def _publish_once(self) -> None:
        rng, producer = self._rng, self._producer
        topic = rng.choice(self._topics)
        kind = rng.choice(("one", "one", "batch", "deferred"))
        sizes = [rng.randrange(0, 300) for _ in range(rng.randint(2, _LARGEST_BATCH) if kind == "batch" else 1)]
        publish, bodies = self._ledger.publish(topic, sizes, time.monotonic())
        lost_before = self.wire.lost_count

        def resent() -> bool:
            return self._retries and self.wire.lost_count > lost_before

        try:
            if kind == "one":
                await producer.publish(topic, bodies[0])
            elif kind == "batch":
                await producer.publish_many(topic, bodies)
            else:
                await producer.defer(topic, bodies[0], rng.uniform(0, _LONGEST_DELAY))
        except PublishUnknownError:
            self._ledger.doubt(publish, resent=resent())
        except ConnectError:
            self._ledger.refuse(publish)
        except PublishError as exc:
            self._ledger.refuse(publish)
            if "_FAILED" not in str(exc):
                self._ledger.violations.add("refused", f"message {publish.first}: {exc}")
        else:
            self._ledger.acknowledge(publish, resent=resent())

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._work)
        self.wire.say_goodbye()
        await self._producer.close()

    async def abandon(self) -> None:
        """End at once, whatever is under way."""
        for task in self._work:
            task.cancel()
        self.wire.say_goodbye()
        await _at_once(self._producer.close())


class Subscriber:
    """One member of a channel; ``replace`` closes its consumer and makes another one."""

    def __init__(
        self, ledger: ClusterLedger, rng: random.Random, lookupds: Sequence[str], topic: str, channel: str
    ) -> None:
        self._ledger = ledger
        self._rng = rng
        self._lookupds = lookupds
        self._topic = topic
        self._channel = channel
        self._book = ledger.books[topic, channel]
        #: No more tricks: what comes is finished.
        self.draining = False
        self._make()

    def _make(self) -> None:
        self.wire = Wire(self._ledger)
        self._consumer = Consumer(
            self._topic,
            self._channel,
            lookupd=self._lookupds,
            handler=self._handle,
            concurrency=20,
            max_in_flight=100,
            max_attempts=0,
            msg_timeout=self._ledger.msg_timeout,
            connect=self.wire.connect,
            **SETTINGS,
        )

    async def _handle(self, message: Message) -> None:
        delivery = self._book.receive(message.body, message.id, self.wire.link(message), time.monotonic())
        if self.draining:
            return
        if self._rng.random() < _SLOW:
            await asyncio.sleep(self._rng.uniform(0, 0.2))
        if delivery is not None and self._rng.random() < _REQUEUED:
            delivery.put_back = True
            message.requeue(self._rng.choice((0, 0.3)), backoff=False)

    async def start(self) -> None:
        await self._consumer.start()

    async def replace(self) -> None:
        await self.stop()
        self._make()
        await self.start()

    async def stop(self) -> None:
        self.wire.say_goodbye()
        await self._consumer.close()

    async def abandon(self) -> None:
        """End at once, whatever is under way."""
        self.wire.say_goodbye()
        await _at_once(self._consumer.close())

    @property
    def connections(self) -> list[str]:
        return self._consumer.connections


async def _at_once(closing: Awaitable[None]) -> None:
    """Wait briefly for a client to close. One that is cancelled then drops its connections and closes what it holds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ABANDON_SECONDS):
            await closing
