"""A batch is there whole or not at all: when the broker is killed in the middle, or has no memory for the rest."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.commit import SLICED_FROM
from flintmq.broker.storage.store import Store
from flintmq.kernel import Block
from flintmq.protocol.wire import encode_command, encode_mpub
from flintmq.system import Buffer, System
from support.fakes import Client, CountingDisk, quiet, until
from support.stage_client import StageClient

MANY = SLICED_FROM + 5_000
#: Little memory, so that the beginning of a batch goes to files before its end is there.
SMALL: dict[str, Any] = {"http_address": "127.0.0.1:0", "mem_queue_size": 100, "durability": "memory"}


def keyed(broker: Broker) -> Client:
    client = Client(broker)
    client.send(encode_command(b"IDENTIFY", body=b'{"flintmq": true}'))
    client.take()
    return client


def bodies(count: int, size: int = 0) -> list[bytes]:
    return [b"%d " % number + bytes(size) for number in range(count)]


async def delivered(broker: Broker, count: int) -> Counter[bytes]:
    """All that the channel delivers, once there are ``count`` or nothing comes any more."""
    channel, _ = broker.topics["t"].channel("c")
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    found: Counter[bytes] = Counter()
    while True:
        await quiet(broker)
        messages = consumer.messages
        consumer.take()
        if not messages and not channel.depth:
            break
        found.update(message.body for message in messages)
        consumer.finish(*messages)
    consumer.hang_up()
    assert found.total() <= count
    return found


# --- A kill -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.3, 1.0])
async def test_a_batch_under_a_key_that_a_kill_cuts_off_is_stored_by_its_repeat(
    start_broker: StartBroker, part: float
) -> None:
    """Durability memory: what of it is in files must not pass for all of it."""
    broker = await start_broker(**SMALL)
    topic = broker.topic("t")
    topic.channel("c")
    batch = encode_mpub(b"t", bodies(MANY), b"key")
    first = topic.log.end
    keyed(broker).send(batch)
    await until(lambda: topic.log.end - first >= part * MANY)
    for _ in range(3):
        await asyncio.sleep(0)
    broker.kill()
    broker = await start_broker(**SMALL)
    assert await keyed(broker).ask(batch) == b"OK"
    assert await delivered(broker, MANY) == Counter(bodies(MANY))


async def test_what_is_left_of_a_batch_under_a_key_outlives_a_kill_with_its_key(start_broker: StartBroker) -> None:
    """Durability memory: its beginning was finished before any of it went to a file."""
    broker = await start_broker(**{**SMALL, "mem_queue_size": 600})
    topic = broker.topic("t")
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 250)
    batch = encode_mpub(b"t", bodies(500, 1_000), b"key")
    assert await keyed(broker).ask(batch) == b"OK"
    await until(lambda: len(consumer.messages) == 250)
    consumer.ready(0)
    consumer.finish(*consumer.messages)
    await quiet(broker)
    topic.trim()
    assert topic.log.memory_count < 500
    await Client(broker).publish_many("t", bodies(1_000, 2_000))
    await until(lambda: topic.log.segments)
    await quiet(broker)
    in_files = topic.log.written - topic.log.segments[0].base
    assert in_files >= 250
    broker.kill()
    broker = await start_broker(**SMALL)
    assert await keyed(broker).ask(batch) == b"OK"
    assert broker.topics["t"].message_count == 0, "it was stored again"
    found = await delivered(broker, in_files)
    assert not set(bodies(500, 1_000)[250:]) - set(found)


@pytest.mark.parametrize(("durability", "part"), [("memory", 0.1), ("memory", 0.6), ("os", 0.6)])
async def test_staged_rows_are_there_once_after_a_kill_in_the_middle(
    start_broker: StartBroker, durability: str, part: float
) -> None:
    """No row is lost with a chunk that is in files by half, and none comes again that a consumer has finished."""
    options = {**SMALL, "durability": durability}
    broker = await start_broker(**options)
    topic = broker.topic("t")
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    seen: Counter[bytes] = Counter()
    chunks = [bodies(3, 10), bodies(MANY), bodies(5, 20)]
    rows = Counter(body for chunk in chunks for body in chunk)
    first = topic.log.end
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", chunks)
        prepared = await client.prepare(1, 0, [winner])
        await client.decide(1, 0, {"n": prepared["set"]})
        apply = asyncio.create_task(client.apply(0, prepared["set"]))
        await until(lambda: topic.log.end - first >= part * rows.total())
        for _ in range(2):
            await asyncio.sleep(0)
        seen.update(message.body for message in consumer.messages)
        consumer.finish(*consumer.messages)
        broker.journal.flush()
        broker.kill()
        apply.cancel()
        await asyncio.gather(apply, return_exceptions=True)
    broker = await start_broker(**options)
    async with StageClient.connect(broker) as client:
        assert await client.apply(0, prepared["set"]) == {"topics": {"t": rows.total()}}
    assert seen + await delivered(broker, rows.total()) == rows


async def test_a_staged_row_that_a_consumer_has_finished_does_not_come_again_after_a_kill(
    start_broker: StartBroker,
) -> None:
    """Durability memory, with room for all of it there."""
    options = {**SMALL, "mem_queue_size": 10_000}
    broker = await start_broker(**options)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    chunks = [[b"%d %d" % (chunk, row) for row in range(3)] for chunk in range(300)]
    rows = Counter(body for chunk in chunks for body in chunk)
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", chunks)
        prepared = await client.prepare(1, 0, [winner])
        await client.decide(1, 0, {"n": prepared["set"]})
        apply = asyncio.create_task(client.apply(0, prepared["set"]))
        await until(lambda: consumer.messages)
        seen = Counter(message.body for message in consumer.messages)
        consumer.finish(*consumer.messages)
        broker.journal.flush()
        broker.kill()
        apply.cancel()
        await asyncio.gather(apply, return_exceptions=True)
    broker = await start_broker(**options)
    async with StageClient.connect(broker) as client:
        await client.apply(0, prepared["set"])
    assert seen + await delivered(broker, rows.total()) == rows


class FullTopics(System):
    """The real system calls; while ``full``, nothing can be written to the files of topics."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.refused = 0
        self._segments: set[int] = set()

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        (self._segments.add if path.suffix == ".seg" else self._segments.discard)(fd)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.full and fd in self._segments:
            self.refused += 1
            raise OSError(errno.ENOSPC, "injected")
        return super().pwritev(fd, buffers, offset)


async def test_nobody_sees_a_staged_row_before_it_is_written(start_broker: StartBroker) -> None:
    """Durability memory: a kill would take it back, and the next apply stores it again under another number."""
    system = FullTopics()
    broker = await start_broker(**{**SMALL, "mem_queue_size": 10_000}, disk=CountingDisk(system))
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", [[b"1", b"2", b"3"]])
        prepared = await client.prepare(1, 0, [winner])
        await client.decide(1, 0, {"n": prepared["set"]})
        system.full = True
        apply = asyncio.create_task(client.apply(0, prepared["set"]))
        await until(lambda: system.refused)
        await quiet(broker)
        assert consumer.messages == []
        system.full = False
        assert await apply == {"topics": {"t": 3}}
    await quiet(broker)
    assert consumer.bodies == [b"1", b"2", b"3"]


async def test_a_clean_stop_in_the_middle_of_an_apply_doubles_nothing(start_broker: StartBroker) -> None:
    """Durability memory, and keys of publishers beside those of chunks."""
    broker = await start_broker(**SMALL)
    assert await keyed(broker).ask(encode_command(b"PUB", b"t", b"key", body=b"x")) == b"OK"
    chunks = [bodies(3, number) for number in range(200)]
    rows = Counter(body for chunk in chunks for body in chunk)
    topic = broker.topics["t"]
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", chunks)
        prepared = await client.prepare(1, 0, [winner])
        await client.decide(1, 0, {"n": prepared["set"]})
        apply = asyncio.create_task(client.apply(0, prepared["set"]))
        await until(lambda: topic.message_count >= 100)
        await broker.stop()
        apply.cancel()
        await asyncio.gather(apply, return_exceptions=True)
    broker = await start_broker(**SMALL)
    async with StageClient.connect(broker) as client:
        await client.apply(0, prepared["set"])
    assert await delivered(broker, 10_000) == rows + Counter([b"x"])


# --- No memory --------------------------------------------------------------------------------------------------------


class Shortage:
    """From some block on, the system has no memory for another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 30
        new_block: Callable[[Store, int, int], Block] = Store.new_block

        def limited(store: Store, size: int, base: int) -> Block:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return new_block(store, size, base)

        monkeypatch.setattr(Store, "new_block", limited)


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    return Shortage(monkeypatch)


@pytest.mark.parametrize("durability", ["memory", "os"])
@pytest.mark.parametrize("count", [300, MANY])
async def test_a_batch_that_there_is_no_memory_for_is_refused_whole(
    start_broker: StartBroker, shortage: Shortage, durability: str, count: int
) -> None:
    options = {"durability": durability}
    broker = await start_broker(**options)
    topic = broker.topic("t")
    topic.channel("c")
    size = 10_000 if count == 300 else 0
    await Client(broker).publish("t", b"before", b"it")
    batch = encode_mpub(b"t", bodies(count, size), b"key")
    end = topic.log.end
    shortage.left = 3
    client = keyed(broker)
    client.send(batch)
    await until(lambda: client.is_over)
    assert client.errors == [b"E_MPUB_FAILED MPUB failed Cannot allocate memory"]
    await quiet(broker)
    assert (topic.log.end, topic.message_count) == (end, 2)
    # A small one fits, and shares nothing with what was refused.
    shortage.left = 1 << 30
    await Client(broker).publish("t", b"between")
    assert await keyed(broker).ask(batch) == b"OK"
    if durability != "memory":
        broker.kill()
        broker = await start_broker(**options)
    found = await delivered(broker, count + 3)
    assert found == Counter([b"before", b"it", b"between", *bodies(count, size)])


async def test_who_publishes_beside_a_batch_without_memory_is_answered(
    start_broker: StartBroker, shortage: Shortage
) -> None:
    broker = await start_broker(durability="fsync")
    topic = broker.topic("t")
    topic.channel("c")
    one, other = Client(broker), keyed(broker)
    await one.publish("t", b"first")
    shortage.left = 2
    # In one turn of the loop.
    one.send(encode_command(b"PUB", b"t", body=b"beside"))
    other.send(encode_mpub(b"t", bodies(MANY), b"key"))
    await until(lambda: other.is_over and one.frames)
    shortage.left = 1 << 30
    assert one.responses[-1:] == [b"OK"]
    assert await delivered(broker, 2) == Counter([b"first", b"beside"])


class NoThreads(CountingDisk):
    """No thread can be started any more."""

    refused = 0

    def _start(self, name: str, target: Callable[[], None]) -> Any:
        if name.startswith("flintmq-spare"):
            self.refused += 1
            raise RuntimeError("can't start new thread")
        return super()._start(name, target)


async def test_a_publish_needs_no_thread(start_broker: StartBroker) -> None:
    disk = NoThreads()
    broker = await start_broker(disk=disk)
    broker.topic("t").channel("c")
    batch = bodies(100, 100_000)
    for _ in range(4):
        await Client(broker).publish_many("t", batch[:40])
    assert disk.refused
    assert (await delivered(broker, 160)).total() == 160


# --- Other things that happen meanwhile -------------------------------------------------------------------------------


class FullDisk(CountingDisk):
    """Writes to some files fail."""

    full = ""

    def write(self, fd: int, buffers: Any, offset: int) -> int:
        if self.full and self.full in str(Path(f"/proc/self/fd/{fd}").resolve()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(fd, buffers, offset)


@pytest.mark.parametrize(("durability", "where"), [("memory", ".seg"), ("os", "/side/")])
async def test_a_batch_is_not_refused_by_half_for_a_write_that_is_not_its_own(
    start_broker: StartBroker, durability: str, where: str
) -> None:
    disk = FullDisk()
    broker = await start_broker(disk=disk, durability=durability, mem_queue_size=100)
    topic = broker.topic("t")
    topic.channel("c")
    await Client(broker).publish_many("t", bodies(200, 100))
    await quiet(broker)
    end = topic.log.end
    client = keyed(broker)
    client.send(encode_mpub(b"t", bodies(MANY), b"key"))
    await until(lambda: topic.log.end > end)
    disk.full = where
    if durability == "memory":
        topic.log.spill(0, 0)
    else:
        side = topic.side_log()
        record = bytearray(b"\x00\x00\x00\x01x")
        side.append(record, 0, len(record), 1, broker.clock.wall(), extra=bytes(12))
        side.write_all()
    disk.full = ""
    await until(lambda: client.frames)
    assert (client.errors, client.responses[-1:]) == ([], [b"OK"])
    assert await delivered(broker, MANY + 200) == Counter(bodies(MANY)) + Counter(bodies(200, 100))


async def test_an_ephemeral_topic_goes_on_after_a_batch_that_it_could_not_hold(start_broker: StartBroker) -> None:
    broker = await start_broker(mem_queue_size=SLICED_FROM // 2)
    client = Client(broker)
    await client.publish_many("t#ephemeral", bodies(MANY))
    consumer = Client(broker)
    await consumer.subscribe("t#ephemeral", "c", 2_500)
    await until(lambda: consumer.messages)
    await client.publish("t#ephemeral", b"after")
    found: list[bytes] = []
    while b"after" not in found:
        await until(lambda: consumer.messages)
        found += consumer.bodies
        messages = consumer.messages
        consumer.take()
        consumer.finish(*messages)
    assert found == [*bodies(MANY)[: SLICED_FROM // 2], b"after"]
