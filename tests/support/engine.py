"""A broker under mixed load on real sockets, with a ledger of what it owes to whom; everything is drawn from a seed.

An Engine runs one broker in this process and drives it over TCP and HTTP: publishers of every kind on several topics,
durable and ephemeral, batches under keys that are repeated, staged publishes that are committed or aborted, fast, slow
and lagging consumers, small memory and small files, timeouts, clean restarts and kills, also between a request and its
answer, another node id, full disks and missing descriptors. Sockets, the poller and its lanes are the real ones; the
clock and the system calls on files are replaced. The Ledger judges every delivery as it arrives, and at the end what
is still owed.

A failing seed runs again with ``python -m support.engine SEED`` in the folder of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from flintmq import kernel
from flintmq.broker.daemon import Broker
from flintmq.broker.storage import journal as journal_module
from flintmq.protocol.wire import FRAME_ERROR, FRAME_MESSAGE, HEARTBEAT, FrameDecoder, decode_message
from flintmq.system import Buffer, System
from support.fakes import SECOND, CountingDisk, FakeClock

DURABLE_TOPICS = ("orders", "audit", "logs")
EPHEMERAL_TOPIC = "live#ephemeral"
CHANNELS = ("fast", "slow", "lag")
EPHEMERAL_CHANNEL = "tail#ephemeral"
MSG_TIMEOUT = 10.5
#: Seconds that a condition may take to come true; only failures take that long.
PATIENCE = 20.0


class Violation(AssertionError):
    """The broker broke a promise."""


class FaultySystem(System):
    """The real system calls, which fail while a fault is on; the kernel's own writes too."""

    def __init__(self) -> None:
        super().__init__()
        #: Error number by call: "open", "pwritev", "mkdir".
        self.faults: dict[str, int] = {}
        self.failures: Counter[str] = Counter()
        self._paths: dict[int, Path] = {}

    def check(self, call: str) -> None:
        error = self.faults.get(call)
        if error:
            self.failures[f"{call}: {errno.errorcode[error]}"] += 1
            raise OSError(error, "injected")

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self.check("open")
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def mkdir(self, path: Path) -> None:
        self.check("mkdir")
        super().mkdir(path)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        # The journal's file has its space reserved: a disk that is full does not concern it.
        if not self._paths[fd].name.startswith("journal"):
            self.check("pwritev")
        return super().pwritev(fd, buffers, offset)


class FaultyCalls(kernel.Calls):
    """The kernel's table over a FaultySystem."""

    def __init__(self, system: FaultySystem) -> None:
        super().__init__()
        self._system = system

    def pwritev(self, fd: int, parts: Any, offset: int) -> int:
        try:
            return self._system.pwritev(fd, parts, offset)
        except OSError as exc:
            return -(exc.errno or errno.EIO)


@dataclass
class ChannelBook:
    """What one durable channel owes its consumers."""

    #: Bodies that must still be delivered and finished.
    owed: set[bytes] = field(default_factory=set)
    #: Bodies that were finished, and whose FIN a clean stop has recorded.
    done: set[bytes] = field(default_factory=set)
    #: Bodies that were finished since.
    finished: set[bytes] = field(default_factory=set)
    #: All bodies that were ever finished.
    ever: set[bytes] = field(default_factory=set)


@dataclass
class KeyedBatch:
    """A batch under a key. It may be sent again and again, and is stored once."""

    topic: str
    key: str
    bodies: list[bytes]
    #: The broker has said that it is stored, and has not lost its memory since.
    known: bool = False


@dataclass
class Transaction:
    """A staged publish: ``chunks`` are committed, all or none; ``losers`` never are."""

    txn: int
    chunks: list[tuple[str, list[bytes]]]
    losers: list[tuple[str, list[bytes]]]
    #: The call that is to be made next.
    phase: str = "open"
    epoch: int = 0
    decided: Any = None
    set: str = ""

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, bodies in self.chunks for body in bodies]


class Ledger:
    """Promises of the broker. Bodies are unique: they begin with topic and number."""

    def __init__(self) -> None:
        self.channels: dict[tuple[str, str], ChannelBook] = {}
        #: Bodies that were sent: the answer was OK, an error, or none.
        self.acknowledged: set[bytes] = set()
        self.refused: set[bytes] = set()
        self.ids: dict[tuple[str, bytes], bytes] = {}
        #: The id of every body that was delivered: each is stored once.
        self.id_of: dict[bytes, bytes] = {}
        #: Bodies that a committed transaction has made durable, whatever the durability of their topic.
        self.committed: set[bytes] = set()
        #: Bodies of batches under keys.
        self.keyed: set[bytes] = set()
        self.counts: Counter[str] = Counter()

    def published(self, topic: str, bodies: list[bytes]) -> None:
        self.acknowledged.update(bodies)
        self.counts["published"] += len(bodies)
        for (name, _), book in self.channels.items():
            if name == topic:
                book.owed.update(bodies)

    def sends_again(self, bodies: list[bytes]) -> None:
        """A publish that failed or was not answered is repeated: from now on it may be there."""
        self.refused.difference_update(bodies)

    def repeated(self, topic: str, bodies: list[bytes]) -> None:
        """A repeated publish was acknowledged: all of it is there, but for those who have finished it."""
        for (name, _), book in self.channels.items():
            if name == topic:
                book.owed.update(body for body in bodies if body not in book.ever)

    def delivered(self, topic: str, channel: str, id: bytes, attempts: int, body: bytes) -> None:
        self.counts["delivered"] += 1
        if not body.startswith(topic.encode() + b" "):
            raise Violation(f"{topic}/{channel} was sent a message of another topic: {body[:60]!r}")
        known = self.ids.setdefault((topic, id), body)
        if known != body:
            raise Violation(f"id {id!r} of {topic} stands for {known[:40]!r} and for {body[:40]!r}")
        if self.id_of.setdefault(body, id) != id:
            raise Violation(f"{topic}/{channel}: {body[:40]!r} is stored twice, as {self.id_of[body]!r} and {id!r}")
        if body in self.refused:
            raise Violation(f"{topic}/{channel} was sent {body[:40]!r}, whose publish was refused")
        if attempts < 1:
            raise Violation(f"{body[:40]!r} came with attempts {attempts}")
        book = self.channels.get((topic, channel))
        if book is not None and body in book.done:
            raise Violation(f"{topic}/{channel} was sent {body[:40]!r} again, which was finished before a clean stop")

    def finished(self, topic: str, channel: str, body: bytes) -> None:
        self.counts["finished"] += 1
        book = self.channels.get((topic, channel))
        if book is not None:
            book.owed.discard(body)
            book.finished.add(body)
            book.ever.add(body)

    def stopped(self, clean: bool) -> None:
        for book in self.channels.values():
            if clean:
                book.done |= book.finished
            book.finished.clear()

    def forgive(self) -> None:
        """Durability ``memory`` and a kill: messages that were only in memory are gone."""
        for book in self.channels.values():
            book.owed &= self.committed
            # Its key may be gone too, and then a repeat stores it again; or it is there, and so is what was finished.
            book.done -= self.keyed
        self.id_of = {body: id for body, id in self.id_of.items() if body in self.committed}


class Peer(asyncio.Protocol):
    """One TCP connection to the broker."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.decoder = FrameDecoder()
        self.answers: list[tuple[int, bytes]] = []
        self.closed = False
        self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"  V2")

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        for kind, payload in self.decoder.feed(data):
            if kind == FRAME_MESSAGE:
                self.message(payload)
            elif payload == HEARTBEAT:
                self.send(b"NOP\n")
            else:
                self.answers.append((kind, payload))

    def message(self, payload: bytes) -> None:
        raise Violation("a publisher was sent a message")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def send(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()


class Consumer(Peer):
    """A consumer of one channel. ``held``: messages it was sent and has not answered."""

    def __init__(self, engine: Engine, topic: str, channel: str) -> None:
        super().__init__()
        self.engine = engine
        self.topic = topic
        self.channel = channel
        #: Body and deadline by id.
        self.held: dict[bytes, tuple[bytes, int]] = {}
        self.most_ready = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        for kind, payload in self.answers:
            if kind == FRAME_ERROR and not self.closed:
                self.engine.violations.append(f"{self.topic}/{self.channel} was answered with {payload!r}")
        self.answers = [answer for answer in self.answers if answer[0] != FRAME_ERROR]

    def message(self, payload: bytes) -> None:
        message = decode_message(payload)
        body = bytes(message.body)
        try:
            self.engine.ledger.delivered(self.topic, self.channel, message.id, message.attempts, body)
            self.held[message.id] = (body, self.engine.clock.now() + round(MSG_TIMEOUT * SECOND))
            if len(self.held) > self.most_ready:
                raise Violation(f"{len(self.held)} messages are in flight, RDY was {self.most_ready} at most")
        except Violation as exc:
            self.engine.violations.append(str(exc))

    def ready(self, count: int) -> None:
        self.most_ready = max(self.most_ready, count)
        self.send(b"RDY %d\n" % count)

    def finish(self, ids: list[bytes]) -> None:
        self.send(b"".join(b"FIN %s\n" % id for id in ids))
        for id in ids:
            self.engine.ledger.finished(self.topic, self.channel, self.held.pop(id)[0])

    def requeue(self, id: bytes, milliseconds: int) -> None:
        self.send(b"REQ %s %d\n" % (id, milliseconds))
        self.held.pop(id)

    def touch(self, id: bytes) -> None:
        self.send(b"TOUCH %s\n" % id)
        self.held[id] = (self.held[id][0], self.engine.clock.now() + round(MSG_TIMEOUT * SECOND))

    def expire(self, now: int) -> None:
        """Forget messages whose time is over: the broker may send them to anybody."""
        self.held = {id: entry for id, entry in self.held.items() if entry[1] > now}


class HttpPeer(asyncio.Protocol):
    """One keep-alive HTTP connection; requests are answered one by one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.buffer = bytearray()
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.buffer[:end]).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self.buffer) < end + 4 + length:
                return
            self.bodies.append(bytes(self.buffer[end + 4 : end + 4 + length]))
            del self.buffer[: end + 4 + length]
            self.statuses.append(int(head.split(b" ", 2)[1]))

    def post(self, path: str, body: bytes, header: str = "") -> None:
        assert self.transport is not None
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{header}Content-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()


class Engine:
    """One seed. ``run`` raises Violation, with everything that was found, if the broker broke a promise."""

    def __init__(self, seed: int, path: Path, *, steps: int = 60, small: bool = False, once: bool = False) -> None:
        """``small``: messages are small enough for lanes, and memory is large enough for their blocks.

        ``once``: most steps publish under keys or in transactions, or restart the broker.
        """
        self.random = random.Random(seed)
        self.seed = seed
        self.path = path
        self.steps = steps
        self.clock = FakeClock()
        self.ledger = Ledger()
        self.violations: list[str] = []
        self.raised: list[dict[str, Any]] = []
        self.consumers: list[Consumer] = []
        #: By topic and kind of publish: a client that repeats one kind is on a lane.
        self.publishers: dict[tuple[str, str], list[Peer]] = {}
        self.web: list[HttpPeer] = []
        self.number = 0
        self.batches: list[KeyedBatch] = []
        self.transaction: Transaction | None = None
        self.transactions = 0
        self.job = 1
        self.history: list[str] = []
        self.lane_counts: Counter[str] = Counter()
        choose = self.random.choice
        self.options: dict[str, Any] = {
            "mem_queue_size": choose([0, 1, 7, 50, 500, 10_000]),
            "mem_queue_bytes": choose([4 << 10, 50_000, 1 << 20, 64 << 20]),
            "max_bytes_per_file": choose([2_000, 30_000, 300_000, 100 << 20]),
            "durability": choose(["os", "os", "fsync", "memory"]),
            "sync_every": choose([1, 50, 2500]),
            "id": self.random.randrange(1024),
            "msg_timeout": round(MSG_TIMEOUT * SECOND),
            "disk_reserve": 0,
        }
        self.sizes = choose([(1, 40), (1, 3_000), (100, 9_000), (1, 70_000)])
        self.small = small
        self.once = once
        self.rounds = 20 if small else 12
        if small:
            self.sizes = choose([(1, 40), (1, 300)])
            self.options["mem_queue_bytes"] = choose([1 << 20, 64 << 20])
        # One topic gets most of the traffic, which one differs.
        names = [*DURABLE_TOPICS, EPHEMERAL_TOPIC]
        self.random.shuffle(names)
        self.traffic = dict(zip(names, (6, 2, 1, 1), strict=True))

    # --- The broker --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.system = FaultySystem()
        self.calls = FaultyCalls(self.system)
        kernel.replace_calls(self.calls)
        self.disk = CountingDisk(self.system)
        self.broker = Broker(
            clock=self.clock, disk=self.disk, data_path=self.path, http_address="127.0.0.1:0", **self.options
        )
        await self.broker.start()

    async def stop(self, how: str) -> None:
        self.system.faults.clear()
        if how == "clean":
            await self.settle()
        self._count_lanes()
        for peer in (*self._peers(), *self.web):
            peer.close()
        self.consumers.clear()
        self.publishers.clear()
        self.web.clear()
        if how != "kill":
            await self.broker.stop()
            # In a hurry, answers of consumers may still have been under way.
            self.ledger.stopped(how == "clean")
        else:
            self.broker.kill()
            # Requests that were being served end with their process.
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)
            if self.options["durability"] == "memory":
                self.ledger.forgive()
                for batch in self.batches:
                    batch.known = False
            self.ledger.stopped(False)
        for _ in range(3):
            await asyncio.sleep(0)

    def _count_lanes(self) -> None:
        self.lane_counts["published"] += self.broker.counters.lane_published
        self.lane_counts["finished"] += self.broker.counters.lane_finished

    async def settle(self) -> None:
        """Wait until nothing moves any more: no thread works, and no byte arrives."""
        calm = 0
        deadline = time.monotonic() + PATIENCE
        before = -1
        while calm < 4:
            await asyncio.sleep(0)
            now = sum(peer.received for peer in self._peers())
            busy = self.disk.under_way or now != before
            calm = 0 if busy else calm + 1
            before = now
            if busy:
                await asyncio.sleep(0.0005)
            if time.monotonic() > deadline:
                raise Violation("the broker does not come to rest")

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise Violation(f"waited in vain for {what}")
            await asyncio.sleep(0 if time.monotonic() < deadline - PATIENCE + 0.05 else 0.001)

    # --- Peers -------------------------------------------------------------------------------------------------------

    async def connect(self, make: Callable[[], Any], address: str) -> Any:
        host, _, port = address.rpartition(":")
        _, peer = await asyncio.get_running_loop().create_connection(make, host, int(port))
        return peer

    async def publisher(self, topic: str, kind: str) -> Peer:
        """Return a connection, mostly one that has published like this before."""
        if self.random.random() < 0.1:
            topic, kind = self.random.choice(list(self.publishers) or [(topic, kind)])
        peers = self.publishers.setdefault((topic, kind), [])
        peers[:] = [peer for peer in peers if not peer.closed]
        if len(peers) < 2:
            peers.append(await self.connect(Peer, self.broker.tcp_address))
        return self.random.choice(peers)

    def _peers(self) -> list[Peer]:
        return [*self.consumers, *chain.from_iterable(self.publishers.values())]

    async def subscribe(self, topic: str, channel: str, ready: int) -> Consumer | None:
        consumer: Consumer = await self.connect(lambda: Consumer(self, topic, channel), self.broker.tcp_address)
        consumer.most_ready = ready
        consumer.send(f"SUB {topic} {channel}\nRDY {ready}\n".encode())
        await self.until(lambda: consumer.answers or consumer.closed, f"SUB {topic} {channel}")
        if consumer.closed:
            return None
        self.consumers.append(consumer)
        return consumer

    # --- Steps -------------------------------------------------------------------------------------------------------

    def body(self, topic: str) -> bytes:
        self.number += 1
        low, high = self.sizes
        head = b"%s %d " % (topic.encode(), self.number)
        return head + b"x" * max(0, self.random.randint(low, high) - len(head))

    def topic(self) -> str:
        return self.random.choices(list(self.traffic), list(self.traffic.values()))[0]

    async def publish(self) -> None:
        """Several publishers send to one topic, each one command at a time."""
        topic, rounds, batch = self.topic(), self.random.randint(1, self.rounds), self.random.choice([1, 3, 3, 40])
        kind = "MPUB" if batch > 1 else "PUB"
        peers = [await self.publisher(topic, kind) for _ in range(self.random.randint(1, 3))]
        peers = list(dict.fromkeys(peers))
        for _ in range(rounds):
            sent = []
            for peer in peers:
                bodies = [self.body(topic) for _ in range(batch)]
                peer.answers.clear()
                peer.send(_mpub(topic, bodies) if batch > 1 else _pub(topic, bodies[0]))
                sent.append((peer, bodies))
            for peer, bodies in sent:
                await self.until(lambda peer=peer: peer.answers or peer.closed, "the answer of a publish")
                self._answered(topic, peer, bodies)
            peers = [peer for peer in peers if not peer.closed]

    def _answered(self, topic: str, peer: Peer, bodies: list[bytes]) -> None:
        if not peer.answers:
            return
        kind, payload = peer.answers[0]
        if kind == FRAME_ERROR:
            self.ledger.refused.update(bodies)
            self.ledger.counts["refused"] += len(bodies)
            if not self.system.failures:
                self.violations.append(f"a publish was refused without a fault: {payload!r}")
        else:
            self.ledger.published(topic, bodies)
            self.ledger.counts["over TCP"] += len(bodies)

    async def publish_deferred(self) -> None:
        topic = self.topic()
        peer = await self.publisher(topic, "DPUB")
        body = self.body(topic)
        peer.answers.clear()
        milliseconds = self.random.choice([0, 500, 5_500, 60_500])
        peer.send(b"DPUB %s %d\n" % (topic.encode(), milliseconds) + struct.pack(">I", len(body)) + body)
        await self.until(lambda: peer.answers or peer.closed, "the answer of DPUB")
        self._answered(topic, peer, [body])

    async def publish_over_http(self) -> None:
        topic, batch = self.topic(), self.random.choice([1, 1, 5, 30])
        self.web = [peer for peer in self.web if not peer.closed]
        if not self.web:
            self.web.append(await self.connect(HttpPeer, self.broker.http_address))
        peer = self.web[0]
        for _ in range(self.random.randint(1, 6)):
            bodies = [self.body(topic) for _ in range(batch)]
            before = len(peer.statuses)
            name = topic.replace("#", "%23")
            if batch == 1:
                peer.post(f"/pub?topic={name}", bodies[0])
            else:
                peer.post(f"/mpub?topic={name}&binary=true", _records(bodies))
            await self.until(lambda before=before: len(peer.statuses) > before or peer.closed, "an HTTP answer")
            if len(peer.statuses) == before:
                return
            if peer.statuses[-1] == 200:
                self.ledger.published(topic, bodies)
            else:
                self.ledger.refused.update(bodies)
                if not self.system.failures:
                    self.violations.append(f"/pub was answered with {peer.statuses[-1]} without a fault")

    async def _ask(self, path: str, body: bytes, header: str = "", *, risk: float = 0.08) -> tuple[int, bytes] | None:
        """Make one request. None: the broker was killed or stopped before its answer, and runs again."""
        self.web = [peer for peer in self.web if not peer.closed]
        if not self.web:
            self.web.append(await self.connect(HttpPeer, self.broker.http_address))
        peer = self.web[0]
        before = len(peer.statuses)
        stored = self._stored()
        peer.post(path, body, header)
        if self.random.random() < risk:
            if risk > 0.1 and self.random.random() < 0.7:
                # In the middle of it: some of it is in a log.
                await self.until(lambda: len(peer.statuses) > before or self._stored() > stored, f"some of {path}")
            for _ in range(self.random.choice([0, 1, 2, 3, 6, 12])):
                await asyncio.sleep(0)
            if len(peer.statuses) == before:
                self.ledger.counts["killed before the answer"] += 1
                await self.restart(self.random.choice(["kill", "hurry"]))
                return None
        await self.until(lambda: len(peer.statuses) > before or peer.closed, f"the answer of {path}")
        return (peer.statuses[-1], peer.bodies[-1]) if len(peer.statuses) > before else None

    def _stored(self) -> int:
        return sum(topic.message_count for topic in self.broker.topics.values())

    async def publish_keyed(self) -> None:
        """A batch under a key: a new one, one that was sent before, or other messages under a key that is used."""
        known = [batch for batch in self.batches if batch.known]
        choice = self.random.random()
        if known and choice < 0.15:
            await self._misuse_key(self.random.choice(known))
            return
        is_new = not self.batches or choice < 0.5
        if is_new:
            topic = self.random.choice(DURABLE_TOPICS)
            bodies = [self.body(topic) for _ in range(self.random.choice([1, 2, 5, 30]))]
            self.batches.append(KeyedBatch(topic, f"key-{self.number}", bodies))
            self.ledger.keyed.update(bodies)
        batch = self.batches[-1] if is_new else self.random.choice(self.batches)
        await self._send_keyed(batch)

    async def _send_keyed(self, batch: KeyedBatch) -> bool:
        """Send it until there is an answer; whether that says that it is stored."""
        self.ledger.sends_again(batch.bodies)
        path = f"/mpub?topic={batch.topic}&binary=true"
        answer = None
        while answer is None:
            answer = await self._ask(path, _records(batch.bodies), f"X-Flintmq-Key: {batch.key}\r\n")
        if answer[0] == 200:
            self.ledger.counts["under a key"] += 1
            self.ledger.acknowledged.update(batch.bodies)
            self.ledger.repeated(batch.topic, batch.bodies)
            batch.known = True
        else:
            if batch.known or not self.system.failures:
                self.violations.append(f"a batch under a key was answered with {answer[0]} without a fault")
            self.ledger.refused.update(batch.bodies)
        return answer[0] == 200

    async def _misuse_key(self, batch: KeyedBatch) -> None:
        bodies = [self.body(batch.topic)]
        self.ledger.refused.update(bodies)
        path = f"/mpub?topic={batch.topic}&binary=true"
        answer = await self._ask(path, _records(bodies), f"X-Flintmq-Key: {batch.key}\r\n")
        if answer is not None and answer[0] != 409:
            self.violations.append(f"other messages under {batch.key} were answered with {answer[0]}, not 409")

    # --- Staged publishes --------------------------------------------------------------------------------------------

    async def stage(self) -> None:
        """Take the transaction that is under way, or a new one, some calls further."""
        for _ in range(self.random.randint(1, 6)):
            if self.transaction is None:
                self.transaction = self._new_transaction()
            await self._stage_on(self.transaction)

    def _new_transaction(self) -> Transaction:
        self.transactions += 1
        chunks, losers = [
            [(topic, [self.body(topic) for _ in range(self.random.choice([1, 3, 20]))]) for topic in topics]
            for topics in (self.random.choices(DURABLE_TOPICS, k=8), self.random.choices(DURABLE_TOPICS, k=1))
        ]
        transaction = Transaction(self.transactions, chunks, losers)
        # Nobody sees any of it before it is committed.
        self.ledger.refused.update(transaction.bodies)
        self.ledger.refused.update(body for _, bodies in losers for body in bodies)
        return transaction

    async def _call(self, verb: str, **fields: Any) -> Any:
        """Make one call until it is answered. None: it was refused, which only a fault explains."""
        answer = None
        body = msgspec.json.encode({"producer": "query", **fields})
        while answer is None:
            answer = await self._ask(f"/stage/{verb}", body, risk=0.4 if verb == "apply" else 0.08)
        if answer[0] != 200:
            if not self.system.failures:
                self.violations.append(f"/stage/{verb} was answered with {answer} without a fault")
            return None
        return msgspec.json.decode(answer[1])

    async def _stage_on(self, it: Transaction) -> None:
        """Make the next call of a transaction. Each may be repeated: after a fault it is."""
        if it.phase in ("stage", "prepare", "decide") and self.random.random() < 0.08:
            if await self._call("abort", epoch=it.epoch, txn=it.txn) == {"decided": False}:
                self.ledger.counts["aborted"] += 1
                # Only another job may use a number again, and this one does not.
                self.job += 1
                self.transaction = None
            return
        if it.phase == "open":
            if self.random.random() < 0.3:
                self.job += 1
            answer = await self._call("open", run="run", job=f"job-{self.job}", txn=it.txn)
            if answer is not None:
                it.epoch, it.decided, it.phase = answer["epoch"], answer["decided"], "stage"
        elif it.phase == "stage":
            if await self._put(it, "wins", it.chunks) and await self._put(it, "loses", it.losers):
                it.phase = "prepare"
        elif it.phase == "prepare":
            winner = ("wins", len(it.chunks), len(it.bodies))
            answer = await self._call("prepare", epoch=it.epoch, txn=it.txn, winners=[winner])
            if answer is not None:
                it.set, it.phase = answer["set"], "decide"
        elif it.phase == "decide":
            if await self._call("decide", epoch=it.epoch, txn=it.txn, nodes={"n": it.set}, print=it.txn) is not None:
                it.phase = "apply"
        elif it.phase == "apply":
            self.ledger.sends_again(it.bodies)
            if await self._call("apply", txn=it.txn, set=it.set) is not None:
                self.ledger.counts["committed"] += 1
                self.ledger.acknowledged.update(it.bodies)
                self.ledger.committed.update(it.bodies)
                for topic, bodies in it.chunks:
                    self.ledger.repeated(topic, bodies)
                it.phase = self.random.choice(["apply", "done", "done"])
        elif await self._call("done", txn=it.txn) is not None:
            self.transaction = None

    async def _put(self, it: Transaction, attempt: str, chunks: list[tuple[str, list[bytes]]]) -> bool:
        """Stage what an attempt has not staged yet."""
        fields = {"epoch": it.epoch, "txn": it.txn, "attempt": attempt}
        kills = self.ledger.counts["killed before the answer"]
        answer = await self._call("begin", **fields, decided=it.decided)
        if answer is None:
            return False
        query = "&".join(f"{name}={value}" for name, value in fields.items())
        for number, (topic, bodies) in enumerate(chunks):
            path = f"/stage/put?producer=query&{query}&chunk={number}&topic={topic}"
            # Now and then one that is there already.
            put = None
            while put is None and (number >= answer["next"] or self.random.random() < 0.2):
                put = await self._ask(path, _records(bodies))
                if self.ledger.counts["killed before the answer"] > kills:
                    # It may not know the attempt any more: from its beginning.
                    return False
            if put is not None and put[0] != 200:
                if not self.system.failures:
                    self.violations.append(f"/stage/put was answered with {put} without a fault")
                return False
        return True

    async def consume(self) -> None:
        """A new consumer; the lagging channel's hold what they get."""
        topic = self.topic()
        channel = self.random.choice([*CHANNELS, EPHEMERAL_CHANNEL, EPHEMERAL_CHANNEL])
        await self.subscribe(topic, channel, self.random.choice([1, 1, 2, 10, 300]))

    def _open_consumers(self) -> list[Consumer]:
        self.consumers = [consumer for consumer in self.consumers if not consumer.closed]
        return self.consumers

    async def answer(self) -> None:
        """Consumers finish some of what they hold, most of all the fast ones."""
        for consumer in self._open_consumers():
            ids = list(consumer.held)
            if consumer.channel == "lag" or not ids:
                continue
            if consumer.channel == EPHEMERAL_CHANNEL and self.random.random() < 0.7:
                continue
            if consumer.channel == "slow":
                ids = ids[:1]
            elif self.random.random() < 0.3:
                self.random.shuffle(ids)
                ids = ids[: len(ids) // 2 + 1]
            consumer.finish(ids)

    async def work_hard(self) -> None:
        """The fast consumers finish everything they are sent, for a while."""
        for _ in range(10):
            for consumer in self._open_consumers():
                if consumer.channel == "fast" and consumer.held:
                    consumer.finish(list(consumer.held))
            await asyncio.sleep(0)

    async def give_back(self) -> None:
        for consumer in self._open_consumers():
            if consumer.held and self.random.random() < 0.5:
                consumer.requeue(self.random.choice(list(consumer.held)), self.random.choice([0, 0, 700, 30_500]))

    async def touch(self) -> None:
        for consumer in self._open_consumers():
            if consumer.held:
                consumer.touch(self.random.choice(list(consumer.held)))

    async def change_ready(self) -> None:
        for consumer in self._open_consumers():
            if self.random.random() < 0.5:
                consumer.ready(self.random.choice([0, 1, 5, 50, 300]))

    async def leave(self) -> None:
        # Not with answers under way: a connection that ends with unread bytes takes those with it.
        await self.settle()
        consumers = self._open_consumers()
        if consumers:
            self.random.choice(consumers).close()

    async def pass_time(self) -> None:
        await self.advance(self.random.choice([0.1, 1, 6, MSG_TIMEOUT + 1]))

    async def advance(self, seconds: float) -> None:
        await self.settle()
        self.clock.advance(seconds)
        for consumer in self.consumers:
            consumer.expire(self.clock.now())
        self.broker.scan.tick(self.clock.now)
        await self.settle()

    async def housekeeping(self) -> None:
        await self.settle()
        self.broker.upkeep.sync()
        await self.settle()

    async def restart(self, how: str = "") -> None:
        await self.stop(how or self.random.choice(["clean", "kill"]))
        self.clock.advance(self.random.choice([0.001, 1, 100]))
        if self.random.random() < 0.5:
            self.options["id"] = self.random.randrange(1024)
        await self.start()

    async def full_disk(self) -> None:
        """Writes fail for a while."""
        self.system.faults["pwritev"] = self.random.choice([errno.ENOSPC, errno.EIO])
        self.system.faults["mkdir"] = errno.ENOSPC
        for step in self.random.sample([self.publish, self.publish_over_http, self.work_hard, self.housekeeping], 3):
            await step()
        self.system.faults.clear()

    async def no_descriptors(self) -> None:
        """Files cannot be opened for a while; new connections still can."""
        self.system.faults["open"] = errno.EMFILE
        for step in self.random.sample([self.publish, self.answer, self.work_hard, self.housekeeping], 2):
            await step()
        self.system.faults.clear()

    def _weighted(self) -> list[tuple[Callable[[], Awaitable[None]], int]]:
        return [
            (self.publish, 30),
            (self.publish_deferred, 4),
            (self.publish_over_http, 8),
            # Not where lanes are counted: these restart the broker, and a new connection is in no lane yet.
            (self.publish_keyed, 60 if self.once else 0 if self.small else 8),
            (self.stage, 90 if self.once else 0 if self.small else 6),
            (self.consume, 12),
            (self.answer, 25),
            (self.work_hard, 12),
            (self.give_back, 4),
            (self.touch, 3),
            (self.change_ready, 4),
            (self.leave, 3),
            (self.pass_time, 3),
            (self.housekeeping, 6),
            (self.restart, 25 if self.once else 2),
            (self.full_disk, 1),
            (self.no_descriptors, 2),
        ]

    # --- The run -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.raised.append(context))
        await self.start()
        for topic in DURABLE_TOPICS:
            for channel in CHANNELS:
                self.ledger.channels[topic, channel] = ChannelBook()
                consumer = await self.subscribe(topic, channel, 0)
                assert consumer is not None
        steps, weights = zip(*self._weighted(), strict=True)
        try:
            for _ in range(self.steps):
                step = self.random.choices(steps, weights)[0]
                self.history.append(step.__name__)
                await step()
                self.check()
            await self.drain()
        finally:
            self._count_lanes()
            with contextlib.suppress(Exception):
                for peer in (*self._peers(), *self.web):
                    peer.close()
                await self.broker.stop()
        self.check()

    def check(self) -> None:
        if self.violations or self.raised or self.calls.failures:
            self.violations += [f"a call of the kernel raised {exc!r}" for exc in self.calls.failures]
            raised = [f"{context.get('message')}: {context.get('exception')!r}" for context in self.raised]
            raise Violation("\n".join([*self.violations[:5], *raised[:5]]))

    async def drain(self) -> None:
        """Everything that is owed must arrive now, and nothing twice."""
        self.system.faults.clear()
        await self.settle()
        for batch in self.batches:
            # Whatever became of it: from now on it is there, once.
            await self._send_keyed(batch)
        while self.transaction is not None and self.transaction.phase in ("apply", "done"):
            await self._stage_on(self.transaction)
        self.check()
        await self.settle()
        for consumer in self.consumers:
            consumer.close()
        self.consumers.clear()
        for topic, channel in self.ledger.channels:
            assert await self.subscribe(topic, channel, 500) is not None
        deadline = time.monotonic() + PATIENCE
        while any(book.owed for book in self.ledger.channels.values()):
            progress = sum(consumer.received for consumer in self.consumers)
            for consumer in self.consumers:
                if consumer.held:
                    consumer.finish(list(consumer.held))
            await self.settle()
            self.check()
            if sum(consumer.received for consumer in self.consumers) == progress:
                # Deferred, or in flight on a connection that is gone.
                await self.advance(61)
            if time.monotonic() > deadline:
                left = {f"{t}/{c}": len(book.owed) for (t, c), book in self.ledger.channels.items() if book.owed}
                some = next(iter(next(book.owed for book in self.ledger.channels.values() if book.owed)))
                raise Violation(f"never delivered: {left}, for example {some[:40]!r}")


def _pub(topic: str, body: bytes) -> bytes:
    return b"PUB %s\n" % topic.encode() + struct.pack(">I", len(body)) + body


def _records(bodies: list[bytes]) -> bytes:
    return struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(body)) + body for body in bodies)


def _mpub(topic: str, bodies: list[bytes]) -> bytes:
    records = _records(bodies)
    return b"MPUB %s\n" % topic.encode() + struct.pack(">I", len(records)) + records


def run_seed(seed: int, *, steps: int = 60, small: bool = False, once: bool = False) -> Engine:
    """Run one seed in an event loop of its own; Violation if the broker broke a promise."""
    roll_at = journal_module.ROLL_AT
    before = kernel.replace_calls(None)
    # Journals roll often, so that snapshots are taken in every state.
    journal_module.ROLL_AT = 3_000
    try:
        with tempfile.TemporaryDirectory(prefix="flintmq-engine-") as folder:
            engine = Engine(seed, Path(folder), steps=steps, small=small, once=once)
            try:
                asyncio.run(engine.run())
            except Violation as exc:
                steps_taken = " ".join(engine.history)
                raise Violation(f"seed {seed}, {engine.options}, sizes {engine.sizes}: {exc}\n{steps_taken}") from exc
            return engine
    finally:
        kernel.replace_calls(before)
        journal_module.ROLL_AT = roll_at


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        begin = time.monotonic()
        ended = run_seed(number)
        seconds = time.monotonic() - begin
        sys.stdout.write(f"{number}: {seconds:.1f} s {dict(ended.ledger.counts)} {dict(ended.lane_counts)}\n")
