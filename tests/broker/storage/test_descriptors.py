"""Too few descriptors, and files that cannot be opened for a while: a delay, never a failed sync or another file."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
from conftest import StartBroker

from flintmq.broker.storage import log as log_module
from flintmq.broker.storage import store as store_module
from flintmq.protocol.wire import FrameDecoder, encode_command, encode_mpub
from flintmq.system import shares_of_descriptors
from support.fakes import Client, CountingDisk, FakeClock, pub, quiet, until
from support.simdisk import SimDisk, settled


class FewFiles(CountingDisk):
    """The real disk of a process that may have ``most`` segment files open. Numbers are reused, as the system does."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self._segments: set[int] = set()

    def open(self, path: Path, *, create: bool = False) -> int:
        if path.suffix == ".seg" and len(self._segments) >= self.most:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        fd = super().open(path, create=create)
        if path.suffix == ".seg":
            self._segments.add(fd)
        return fd

    def close_file(self, fd: int) -> None:
        super().close_file(fd)
        self._segments.discard(fd)


@pytest.mark.parametrize("most", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(3))
async def test_a_write_in_a_thread_goes_to_its_own_files_when_descriptors_run_out(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, most: int, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(log_module, "WRITE_IN_THREAD_AT", 0)
    broker = await start_broker(disk=FewFiles(most), max_bytes_per_file=2_000, mem_queue_size=0, cold_cache_bytes=1)
    acknowledged: dict[str, list[bytes]] = {"t": [], "u": []}
    for topic, bodies in acknowledged.items():
        await Client(broker).subscribe(topic, "c")
        for _ in range(3):
            client = Client(broker)
            batch = [b"%d " % (len(bodies) + i) + rng.randbytes(rng.randrange(400, 1_900)) for i in range(20)]
            client.send(b"".join(pub(topic, body) for body in batch))
            await until(lambda client=client: len(client.frames) == 20)
            assert client.responses == [b"OK"] * 20, client.errors[:1]
            bodies += batch
    await quiet(broker)
    broker.kill()
    broker = await start_broker(disk=FewFiles(most))
    for topic, bodies in acknowledged.items():
        consumer = Client(broker)
        await consumer.subscribe(topic, "c", 100)
        await until(lambda topic=topic: broker.topics[topic].channels["c"].depth == 0)
        await quiet(broker)
        lost = set(bodies) - set(consumer.bodies)
        assert not lost, f"{len(lost)} of {len(bodies)} acknowledged messages are lost"


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
async def test_a_file_that_cannot_be_opened_once_is_synced_later(
    start_broker: StartBroker, tmp_path: Path, error: int, clock: FakeClock
) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk)
    client = Client(broker)
    client.send(pub("t", b"one"))
    await settled(broker)
    # Another topic needed the descriptor meanwhile.
    disk.most_files = len(disk.open_files)
    client.send(pub("u", b"two"))
    await settled(broker)
    disk.most_files = None
    assert client.responses == [b"OK", b"OK"]
    log = broker.topics["t"].log
    assert log.segments[0].fd < 0
    disk.fail("open", error, times=20, path="t@")
    broker.upkeep.sync()
    await settled(broker)
    assert log.durable < log.end
    disk.heal()
    for _ in range(3):
        clock.advance(2)
        broker.upkeep.sync()
        await settled(broker)
    assert log.durable == log.end, "it is never synced again"
    assert broker.store.unsynced == 0
    assert not broker.stopping


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("times", [1, 5, 50])
async def test_no_descriptor_for_a_folder_is_no_failed_sync(
    start_broker: StartBroker, tmp_path: Path, error: int, times: int
) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, durability="fsync")
    client = Client(broker)
    await settled(broker)
    disk.fail("open_folder", error, times=times, path="topics")
    client.send(pub("t", b"one"))
    await settled(broker)
    assert not broker.stopping, "no descriptor, and the broker has stopped"
    disk.heal()
    await until(lambda: client.responses == [b"OK"])
    disk = disk.after_power_loss("none")
    broker.kill()
    broker = await start_broker(disk=disk, durability="fsync")
    consumer = Client(broker)
    consumer.send(b"SUB t c\nRDY 1\n")
    await settled(broker)
    assert consumer.bodies == [b"one"]


@pytest.mark.parametrize("durability", ["fsync", "os"])
async def test_connections_that_take_all_descriptors_stop_nothing_else(tmp_path: Path, durability: str) -> None:
    """A process with few of them, and a client that opens connections for as long as it can."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "from flintmq.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    broker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        "nsqd",
        f"--data-path={tmp_path}",
        f"--durability={durability}",
        "--tcp-address=127.0.0.1:0",
        "--http-address=",
        "--https-address=",
        "--sync-timeout=100ms",
        stderr=asyncio.subprocess.PIPE,
    )
    taken: list[socket.socket] = []
    try:
        assert broker.stderr is not None
        async with asyncio.timeout(60):
            while not (found := re.search(rb"TCP: listening on (\S+):(\d+)", await broker.stderr.readline())):
                pass
        draining = asyncio.create_task(broker.stderr.read())
        address = found[1].decode(), int(found[2])
        reader, writer = await asyncio.open_connection(*address)
        decoder = FrameDecoder()
        writer.write(b"  V2")

        async def ask(command: bytes) -> bytes:
            writer.write(command)
            async with asyncio.timeout(30):
                while True:
                    data = await reader.read(1 << 16)
                    assert data, "the broker has closed the connection"
                    for _, answer in decoder.feed(data):
                        if answer != b"_heartbeat_":
                            return answer

        assert await ask(encode_command(b"PUB", b"before", body=b"x")) == b"OK"
        for _ in range(100):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(address)
            taken.append(one)
        for number in range(12):
            topic = b"t%d" % (number % 6)
            assert await ask(encode_command(b"PUB", topic, body=b"%d" % number)) == b"OK"
        assert broker.returncode is None
        for number in range(6):
            assert await ask(encode_command(b"PUB", b"t%d" % number, body=b"more")) == b"OK"
        writer.close()
    finally:
        for one in taken:
            one.close()
        if broker.returncode is None:
            broker.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            status = await broker.wait()
    assert status == 0, (await draining).decode()[-2_000:]
    await draining


@pytest.mark.parametrize("batch", [1, 3], ids=["PUB", "MPUB"])
async def test_a_publish_without_a_descriptor_is_refused_and_the_next_one_taken(
    start_broker: StartBroker, batch: int
) -> None:
    """Over sockets, where publishes of several connections are taken together."""
    disk = FewFiles(5)
    broker = await start_broker(disk=disk)
    host, port = broker.tcp_address.split(":")
    command = encode_command(b"PUB", b"t", body=b"x") if batch == 1 else encode_mpub(b"t", [b"x"] * batch)
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(3)]

    async def publish() -> list[bytes]:
        answers = []
        for _, writer in connections:
            writer.write(command)
        for reader, _ in connections:
            async with asyncio.timeout(30):
                size = int.from_bytes(await reader.readexactly(4), "big")
                answers.append((await reader.readexactly(size))[4:])
        return answers

    for _, writer in connections:
        writer.write(b"  V2")
    for _ in range(5):
        assert await publish() == [b"OK"] * 3
    disk.most = 0
    broker.store._close_files(0)
    refused = await publish()
    assert all(b"PUB_FAILED" in answer and b"Too many open files" in answer for answer in refused), refused
    for _, writer in connections:
        writer.close()
    disk.most = 5
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
    for _, writer in connections:
        writer.write(b"  V2")
    for _ in range(5):
        assert await publish() == [b"OK"] * 3
    for _, writer in connections:
        writer.close()
    assert broker.topics["t"].depth == 30 * batch


class Unreachable(CountingDisk):
    """Syncs wait until they may ``go_on``, and no segment can be opened while the folder is ``renamed``."""

    renamed = False

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    def open(self, path: Path, *, create: bool = False) -> int:
        if path.suffix == ".seg" and self.renamed:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return super().open(path, create=create)

    def sync(self, fd: int) -> None:
        """Nobody looks at what is on the device, and a thousand real ones take their time."""
        self.go_on.wait(60)

    def sync_folder(self, path: Path) -> None:
        pass


async def test_any_number_of_logs_that_cannot_be_opened_wait_for_their_sync(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "shares_of_descriptors", lambda: (4, 100))
    disk = Unreachable()
    broker = await start_broker(disk=disk, durability="fsync")
    client = Client(broker)
    topics = sys.getrecursionlimit()
    disk.go_on.clear()
    client.send(b"".join(pub(f"t{number}", b"x") for number in range(topics)))
    await until(lambda: len(broker.store._sync_queue) + broker.store._syncs == topics)
    # Those under way end: each of the others can only be tried, and is tried again later.
    disk.renamed = True
    disk.go_on.set()
    await until(lambda: not broker.store._sync_queue)
    disk.renamed = False
    await until(lambda: len(client.frames) == topics)
    assert client.responses == [b"OK"] * topics
    assert broker.store.unsynced == 0


@pytest.mark.parametrize("limit", [64, 1_024, 65_536, resource.RLIM_INFINITY])
def test_connections_leave_descriptors_for_storage(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    files, taken = shares_of_descriptors()
    assert taken >= 32 and files >= 16
    if limit != resource.RLIM_INFINITY:
        assert limit - taken >= min(limit // 2, 400)
        assert limit - taken - files >= min(limit // 4, 100)


@pytest.mark.parametrize(("limit", "topics"), [(1_024, 256), (4_096, 512), (20_000, 2_500), (65_536, 4_096)])
def test_as_many_topics_as_there_is_room_for_keep_their_files_open(
    limit: int, topics: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    files, taken = shares_of_descriptors()
    assert files >= min(topics, 400) and (files >= topics or limit < 8_192)
    assert taken >= limit // 2
