"""Blocks that stay in memory for one message: everything around them must be as if they were not there. Over TCP."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.storage import log as log_module
from flintmq.kernel import Intake
from flintmq.protocol.wire import FRAME_MESSAGE, FrameDecoder, Message, decode_message, encode_command, encode_mpub
from support.fakes import SECOND, quiet, until
from support.fakes import Client as FakeClient
from support.log_rig import Rig


class Client:
    """One connection over a socket, so that publishes and answers take the same way as any user's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = FrameDecoder()
        self._frames: list[tuple[int, bytes]] = []

    @classmethod
    @asynccontextmanager
    async def connect(cls, broker: Broker) -> AsyncIterator[Client]:
        host, port = broker.tcp_address.split(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        client.send(b"  V2")
        try:
            yield client
        finally:
            client._writer.close()
            await client._writer.wait_closed()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def frame(self) -> tuple[int, bytes]:
        async with asyncio.timeout(30):
            while not self._frames:
                data = await self._reader.read(1 << 18)
                assert data, "the broker closed the connection"
                self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    async def ask(self, command: bytes) -> bytes:
        self.send(command)
        kind, data = await self.frame()
        assert kind != FRAME_MESSAGE
        return data

    async def message(self) -> Message:
        while True:
            kind, data = await self.frame()
            if kind == FRAME_MESSAGE:
                return decode_message(data)

    def finish(self, message: Message) -> None:
        self.send(b"FIN %s\n" % message.id)


@pytest.fixture(autouse=True)
async def nothing_raises() -> AsyncIterator[None]:
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    yield
    assert raised == []


async def publish(clients: list[Client], bodies: list[bytes], rng: random.Random, count: int, largest: int) -> None:
    """Add numbered messages of all sizes to ``bodies``, one by one and in batches, from several connections."""
    stop = len(bodies) + count
    while len(bodies) < stop:
        for client in clients:
            batch = [
                b"%d " % number + rng.randbytes(rng.choice([0, 1, rng.randrange(100), rng.randrange(largest)]))
                for number in range(len(bodies), len(bodies) + rng.choice([1, 1, 1, rng.randrange(1, 30)]))
            ]
            single = len(batch) == 1
            client.send(encode_command(b"PUB", b"t", body=batch[0]) if single else encode_mpub(b"t", batch))
            bodies += batch
        for client in clients:
            assert (await client.frame())[1] == b"OK"


@pytest.mark.parametrize("durability", ["os", "fsync", "memory"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_message_held_by_an_ephemeral_consumer_changes_nothing_for_others(
    tmp_path: Path, durability: str, seed: int
) -> None:
    rng = random.Random(seed)
    limit = [1, 20, 100, 300][seed]
    bodies: list[bytes] = []
    async with (
        Broker(
            data_path=tmp_path, durability=durability, mem_queue_size=limit, cold_cache_bytes=100_000, disk_reserve=0
        ) as broker,
        Client.connect(broker) as tail,
        Client.connect(broker) as slow,
        Client.connect(broker) as one,
        Client.connect(broker) as two,
        Client.connect(broker) as three,
    ):
        assert await slow.ask(b"SUB t slow\n") == b"OK"
        assert await tail.ask(b"SUB t tail#ephemeral\n") == b"OK"
        tail.send(b"RDY 1\n")
        await publish([one, two, three], bodies, rng, 50, 500)
        held = await tail.message()
        await publish([one, two, three], bodies, rng, 2_000, 4_000)
        slow.send(b"RDY 100\n")
        got: list[bytes] = []
        ids: set[bytes] = set()
        while len(got) < len(bodies):
            message = await slow.message()
            got.append(message.body)
            ids.add(message.id)
            slow.finish(message)
        missing = set(bodies) - set(got)
        assert not missing, f"{len(missing)} of {len(bodies)} were replaced by others"
        assert len(ids) == len(bodies)
        assert held.id in ids
        tail.send(b"RDY 0\nREQ %s 0\n" % held.id)
        tail.send(b"RDY 1\n")
        seen = await tail.message()
        assert seen.body in bodies and (seen.id != held.id or seen.body == held.body)


@pytest.mark.parametrize("kind", ["deferred", "in flight", "requeued"])
async def test_an_ephemeral_topic_forgets_what_is_finished_around_a_message_that_is_not(
    tmp_path: Path, kind: str
) -> None:
    name = b"t#ephemeral"
    async with (
        Broker(data_path=tmp_path, mem_queue_size=1_000, mem_queue_bytes=4 << 20, disk_reserve=0) as broker,
        Client.connect(broker) as consumer,
        Client.connect(broker) as other,
        Client.connect(broker) as producer,
    ):
        assert await consumer.ask(b"SUB %s c\n" % name) == b"OK"
        if kind == "deferred":
            assert await producer.ask(encode_command(b"DPUB", name, b"3600000", body=b"held")) == b"OK"
        else:
            assert await other.ask(b"SUB %s c\n" % name) == b"OK"
            other.send(b"RDY 1\n")
            assert await producer.ask(encode_command(b"PUB", name, body=b"held")) == b"OK"
            held = await other.message()
            other.send(b"RDY 0\n")
            if kind == "requeued":
                other.send(b"REQ %s 3000000\n" % held.id)
        consumer.send(b"RDY 100\n")
        largest = 0
        log = broker.topics[name.decode()].log
        for round_ in range(60):
            batch = [b"%d " % (round_ * 20 + i) + bytes(20_000) for i in range(20)]
            assert await producer.ask(encode_mpub(name, batch)) == b"OK"
            for body in batch:
                message = await consumer.message()
                assert message.body == body
                consumer.finish(message)
            largest = max(largest, log.memory_bytes)
        assert largest < 12 << 20, f"24 MB were finished and {largest >> 20} MiB are held"
        channel = broker.topics[name.decode()].channels["c"]
        await until(lambda: channel.depth + channel.in_flight_count + len(channel.deferred) == 1)


@pytest.mark.parametrize("folder", [True, False], ids=["with files", "without files"])
@pytest.mark.parametrize("seed", range(20))
def test_every_message_is_found_under_its_own_seq_whatever_is_pinned(
    folder: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appends, batches, trims and failed writes in any order, while some messages must stay in memory.

    Some messages are larger than the largest block that is made for publishes straight from sockets.
    """
    rng = random.Random(seed)
    monkeypatch.setattr(log_module, "LARGEST_BLOCK", rng.choice([5_000, 20_000, 1 << 20]))
    intake = Intake(bytearray(1 << 16), b"PUB t", b"", 1 << 20, 0)
    durability = rng.choice(["os", "memory", "fsync"])
    rig = Rig(durability=durability, max_bytes_per_file=60_000, cold_cache_bytes=1, folder=folder)
    bodies: dict[int, bytes] = {}
    due: dict[int, list[tuple[int, int]]] = {}
    pins: set[int] = set()
    wanted: set[int] = set()

    def needs(seqs: set[int]) -> Callable[[int, int], bool]:
        # Whoever has not seen a message before it says the same of an empty block.
        return lambda first, stop: any(first <= seq < stop or seq < first == stop for seq in seqs)

    for _ in range(150):
        batch = [rng.randbytes(rng.choice([1, 10, 1_000, 9_000])) for _ in range(rng.choice([1, 1, 3, 20]))]
        failing = durability != "memory" and folder and rng.random() < 0.1
        if failing:
            rig.disk.fail("write", errno.ENOSPC, short=rng.randrange(100))
        delay = rng.choice([0, 0, SECOND])
        first = rig.append(*batch, delay=delay)
        rig.log.flush()
        rig.run()
        rig.disk.heal()
        if rng.random() < 0.3:
            # Nothing has come.
            rig.log.take_in(intake, [], [], 0, False, 1 << 20)
        if rig.log.end == first:
            assert failing
            continue
        for seq, body in enumerate(batch, first):
            bodies[seq] = body
            due[seq] = [(seq, rig.clock.wall() + delay)] if delay else []
            wanted.add(seq)
            if rng.random() < 0.05:
                pins.add(seq)
        for seqs in (wanted, pins):
            for seq in rng.sample(sorted(seqs), rng.randrange(len(seqs) // 2 + 1)):
                seqs.discard(seq)
        limit, cap = rng.choice([(0, 0), (5, 1 << 20), (50, 20_000), (10_000, 1 << 20)])
        if durability == "memory" and folder:
            rig.log.spill(limit, cap)
        rig.log.trim(limit, cap, needs(wanted | pins), needs(pins))
        blocks = rig.log.blocks
        assert not blocks or blocks[-1].base + blocks[-1].count == rig.log.end
        assert all(one.base + one.count == other.base for one, other in pairwise(blocks))
        pinned = [each.block for each in rig.log.memory.pinned]
        assert all(one.base + one.count <= other.base for one, other in pairwise((*pinned, *blocks)))
        assert all(block.count for block in (*pinned, *blocks[:-1]))
        assert rig.log.memory_bytes == sum(block.size for block in (*pinned, *blocks))
        assert rig.log.memory_count == sum(block.count for block in (*pinned, *blocks))
        for seq in pins:
            assert rig.log.in_memory(seq)
        left = sorted(wanted | pins)
        for seq in rng.sample(left, min(len(left), 20)):
            assert rig.body(seq) == bodies[seq]
            assert list(rig.log.delays(seq, seq + 1)) == due[seq]
        rig.clock.advance(rng.random())
    assert rig.fatal == []


@pytest.mark.parametrize("consumed", [1, 30, 120, 290])
@pytest.mark.parametrize("size", [700, 10_000])
async def test_what_left_the_memory_outlives_a_kill_although_its_batch_is_not_whole(
    start_broker: StartBroker, consumed: int, size: int
) -> None:
    """Durability memory: the beginning of a batch is finished before its rest goes to a file, or the other way."""
    broker = await start_broker(durability="memory", mem_queue_size=320, mem_queue_bytes=1 << 30, cold_cache_bytes=1)
    client, consumer = FakeClient(broker), FakeClient(broker)
    await consumer.subscribe("t", "c", consumed)
    bodies = [b"%d " % number + bytes(size) for number in range(600)]
    await client.publish_many("t", bodies[:300])
    await until(lambda: len(consumer.messages) == consumed)
    consumer.ready(0)
    consumer.finish(*consumer.messages)
    await quiet(broker)
    broker.turns.housekeeping()
    await client.publish_many("t", bodies[300:])
    await quiet(broker)
    channel = broker.topics["t"].channels["c"]
    in_files = channel.backend_depth
    assert in_files > 0
    broker.kill()
    broker = await start_broker(durability="memory", mem_queue_size=320)
    consumer = FakeClient(broker)
    await consumer.subscribe("t", "c", 2_500)
    await until(lambda: broker.topics["t"].channels["c"].depth == 0)
    await quiet(broker)
    lost = set(bodies[consumed : consumed + in_files]) - {message.body for message in consumer.messages}
    assert not lost, f"{len(lost)} of the {in_files} messages that were in files"


async def test_what_a_thread_has_written_leaves_the_memory_when_nobody_publishes_again(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn that wrote it was over before the write was: without a consumer nothing looked at it any more."""
    monkeypatch.setattr(log_module, "WRITE_IN_THREAD_AT", 0)
    broker = await start_broker(mem_queue_size=0)
    await FakeClient(broker).publish_many("t", [bytes(10_000)] * 60)
    await quiet(broker)
    log = broker.topics["t"].log
    assert log.written == log.end
    broker.upkeep.sync()
    await quiet(broker)
    assert broker.topics["t"].depth == 60
    assert log.memory_count <= sum(block.count for block in log.blocks[-1:])
