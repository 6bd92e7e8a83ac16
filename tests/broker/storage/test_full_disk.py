"""Starting, stopping and going on with a disk that is full."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import StartBroker

from flintmq.broker import upkeep
from flintmq.broker.storage.disk import Buffer
from flintmq.errors import StartError, StorageError
from support.fakes import Client, CrampedDisk, FakeClock, pub, quiet, until
from support.simdisk import SimDisk, settled


@pytest.mark.parametrize("size", [100, 3_000, 300_000])
async def test_a_stop_that_cannot_write_what_is_in_memory_says_how_much_is_lost(
    start_broker: StartBroker, tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What fits is written, the exit status tells, and other topics are saved."""
    disk = CrampedDisk(tmp_path)
    broker = await start_broker(disk=disk, durability="memory", mem_queue_size=10_000, mem_queue_bytes=1 << 30)
    broker.topic("t").channel("c")
    broker.topic("u").channel("c")
    bodies = [b"%06d" % i + bytes(size) for i in range(6_000_000 // (size + 3_000))]
    for i in range(0, len(bodies), 100):
        await Client(broker).publish("t", *bodies[i : i + 100])
    await Client(broker).publish("u", b"small")
    await quiet(broker)
    disk.pages = disk.used() + 40 + 200_000 * (size > 3_000) // 4096 * 3
    await broker.stop()
    with pytest.raises(StorageError, match="cannot save everything"):
        await broker.wait_closed()
    again = await start_broker(durability="memory")
    got = {}
    for topic in ("t", "u"):
        client = Client(again)
        await client.subscribe(topic, "c", 2500)
        await quiet(again)
        got[topic] = client.bodies
    assert 0 < len(got["t"]) < len(bodies), "what fits is kept"
    assert got["t"] == bodies[: len(got["t"])]
    assert f"TOPIC(t): {len(bodies) - len(got['t'])} messages in memory could not be written" in caplog.text


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("size", [100, 100_000])
async def test_a_full_disk_is_started_on_after_a_kill(
    start_broker: StartBroker, tmp_path: Path, size: int, synced: bool
) -> None:
    """The room is what the old journal had allocated ahead. Consumers can then empty the disk."""
    broker = await start_broker()
    bodies = {topic: [b"%s%06d" % (topic.encode(), i) + bytes(size) for i in range(20)] for topic in ("t", "u")}
    for topic, some in bodies.items():
        broker.topic(topic).channel("c")
        await Client(broker).publish(topic, *some)
    if synced:
        await broker.synced()
        await quiet(broker)
    broker.kill()
    disk = CrampedDisk(tmp_path)
    disk.pages = disk.used()
    again = await start_broker(disk=disk)
    for topic, some in bodies.items():
        client = Client(again)
        await client.subscribe(topic, "c", 100)
        await quiet(again)
        assert client.bodies == some


@pytest.mark.parametrize("room", [0, 1, 3])
async def test_a_start_without_room_says_which_file_how_much_and_what_to_do(
    start_broker: StartBroker, tmp_path: Path, room: int
) -> None:
    broker = await start_broker()
    broker.topic("t").channel("c")
    bodies = [b"%06d" % i + bytes(9_000) for i in range(20)]
    await Client(broker).publish("t", *bodies)
    broker.kill()
    disk = CrampedDisk(tmp_path)
    journal = max((tmp_path / "flintmq" / "journal").glob("journal-*"))
    disk.pages = disk.used() - journal.stat().st_size // disk.PAGE + room
    text = r"cannot write \S+: No space left on device, \d+ bytes are needed.*Nothing is lost.*free some space"
    for _ in range(2):
        with pytest.raises(StartError, match=text):
            await start_broker(disk=disk)
        assert list((tmp_path / "flintmq" / "topics").rglob("*.tmp")) == []
        disk = CrampedDisk(tmp_path, disk.pages)
    again = await start_broker()
    client = Client(again)
    await client.subscribe("t", "c", 100)
    await quiet(again)
    assert client.bodies == bodies


async def killed_with_files(start_broker: StartBroker, folder: Path) -> SimDisk:
    """Return the disk of a broker that was killed: files that are whole and synced, and one that is neither."""
    disk = SimDisk(folder)
    broker = await start_broker(disk=disk, max_bytes_per_file=5_000)
    broker.topic("t").channel("c")
    for number in range(5):
        await Client(broker).publish("t", b"%06d" % number + bytes(3_000))
        await settled(broker)
    broker.topics["t"].log.sync()
    await settled(broker)
    await Client(broker).publish("t", bytes(3_000))
    broker.kill()
    return disk


async def test_a_start_that_fails_leaves_no_file_open(start_broker: StartBroker, tmp_path: Path) -> None:
    """A program that runs a broker in its own process may try again as often as it likes."""
    disk = await killed_with_files(start_broker, tmp_path)
    cramped = disk.after_kill()
    cramped.fail("write", errno.ENOSPC, path=".tmp")
    with pytest.raises(StartError, match="Nothing is lost"):
        await start_broker(disk=cramped)
    assert cramped.open_files == []


@pytest.mark.parametrize("kind", ["open", "read", "write", "truncate", "rename", "sync", "sync_folder"])
async def test_a_start_whose_disk_fails_at_any_call_leaves_no_file_open(
    start_broker: StartBroker, tmp_path: Path, kind: str
) -> None:
    disk = await killed_with_files(start_broker, tmp_path)
    failed = 0
    for number in range(100):
        failing = disk.after_kill()
        failing.fail(kind, errno.EIO, skip=number)
        try:
            again = await start_broker(disk=failing)
        except StartError:
            failed += 1
            assert failing.open_files == [], f"call {number}"
        else:
            again.kill()
            if not failing.system.met:
                break
    assert failed


async def test_nsqd_dat_is_tried_again(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "METADATA_DELAY", 0.0)
    monkeypatch.setattr(upkeep, "METADATA_RETRY", 0.0)
    broker = await start_broker()
    await quiet(broker)
    replace = broker.disk.replace
    failures = 3

    def refused(path: Path, content: Sequence[Buffer]) -> None:
        nonlocal failures
        if path.name == "nsqd.dat" and failures:
            failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, content)

    monkeypatch.setattr(broker.disk, "replace", refused)
    broker.topic("new")
    await until(lambda: b'"new"' in (broker.path / "nsqd.dat").read_bytes())
    assert caplog.text.count("cannot write nsqd.dat") == 3


@pytest.mark.parametrize("durability", ["os", "memory"])
async def test_a_full_disk_is_not_filled_with_lines_about_it(
    start_broker: StartBroker, tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, durability: str
) -> None:
    disk = CrampedDisk(tmp_path)
    broker = await start_broker(disk=disk, durability=durability, mem_queue_size=0)
    await Client(broker).publish("t", b"before")
    await quiet(broker)
    disk.pages = 0

    async def lines(publishes: int) -> int:
        caplog.clear()
        for _ in range(publishes):
            Client(broker).send(pub("t", b"x" * 5_000))
            await quiet(broker)
        return caplog.text.count("LOG(t): cannot write")

    assert await lines(20) == 1
    clock.advance(9)
    assert await lines(20) == 0
    clock.advance(1)
    assert await lines(20) == 1
    disk.pages = None


async def test_a_start_leaves_room_for_its_snapshot_however_full_the_disk_is(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk)
    client = Client(broker)
    client.send(pub("t", b"one"))
    await settled(broker)
    for room in range(0, 3_000, 100):
        # What the old journal had ahead is given back: with a little more it is as much as the new one wants.
        after = disk.after_kill()
        after.capacity = after.used + room
        started = await start_broker(disk=after)
        assert list(started.topics) == ["t"]
        await started.stop()
