"""What a start makes of a data path that is not as it should be."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.storage import journal
from flintmq.broker.storage.journal import FILE_HEADER, read_batches, read_head
from flintmq.errors import StartError
from support.fakes import Client, CountingDisk, FakeClock, pub, quiet


class FullDisk(CountingDisk):
    def allocate(self, fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_disk_too_full_to_allocate_space_ahead_is_started_on(start_broker: StartBroker) -> None:
    first = await start_broker()
    await Client(first).publish("t", b"kept")
    await first.stop()
    second = await start_broker(disk=FullDisk())
    consumer = Client(second)
    await consumer.subscribe("t", "c", 1)
    await quiet(second)
    assert consumer.bodies == [b"kept"]


async def test_whoever_prepares_a_start_does_so_before_anybody_can_connect(
    tmp_path: Path, start_broker: StartBroker
) -> None:
    """Such as the command line, which collects garbage then: who is connected would wait for it."""
    first = await start_broker(data_path=tmp_path)
    await Client(first).publish("t", b"kept")
    address = first.tcp_address
    await first.stop()
    broker = Broker(data_path=tmp_path, tcp_address=address, http_address="127.0.0.1:0", broadcast_address="127.0.0.1")
    found: list[tuple[list[str], int]] = []

    def opened() -> None:
        host, _, port = address.rpartition(":")
        with socket.socket() as probe:
            found.append((list(broker.topics), probe.connect_ex((host, int(port)))))

    await broker.start(opened)
    await broker.stop()
    assert found == [(["t"], errno.ECONNREFUSED)]


async def test_a_stop_closes_the_disk_only_when_nobody_can_ask_it_for_more(start_broker: StartBroker) -> None:
    """It is closed in a thread. Whoever looked whether it is, on the loop, must not find it closed a moment later."""

    class Watched(CountingDisk):
        refused_before = False

        def close(self) -> None:
            self.refused_before = self.closing
            super().close()

    disk = Watched()
    broker = await start_broker(disk=disk)
    await Client(broker).publish("t", b"one")
    await broker.stop()
    assert disk.refused_before


async def test_clean_restarts_do_not_pile_up_journals(start_broker: StartBroker, tmp_path: Path) -> None:
    for _ in range(5):
        broker = await start_broker()
        await quiet(broker)
        await broker.stop()
    names = {path.name.partition("-")[0] for path in (tmp_path / "flintmq" / "journal").iterdir()}
    assert names == {"journal", "snapshot"}
    assert len(list((tmp_path / "flintmq" / "journal").iterdir())) <= 3


async def test_messages_of_a_topic_that_the_journal_never_heard_of_are_set_aside(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = await start_broker()
    await Client(broker).publish("known", b"one")
    await broker.stop()
    stranger = tmp_path / "flintmq" / "topics" / "stranger@77"
    stranger.mkdir()
    (stranger / "0000000000000001.seg").write_bytes(b"who knows")
    empty = tmp_path / "flintmq" / "topics" / "empty@78"
    empty.mkdir()
    deleted = tmp_path / "flintmq" / "topics" / "deleted@0"
    deleted.mkdir()
    (deleted / "0000000000000001.seg").write_bytes(b"of no use")
    again = await start_broker()
    assert set(again.topics) == {"known"}
    lost = tmp_path / "flintmq" / "topics" / "stranger@77.lost"
    assert (lost / "0000000000000001.seg").read_bytes() == b"who knows"
    await again.stop()
    await start_broker()
    assert lost.exists()
    assert not stranger.exists() and not empty.exists() and not deleted.exists()


@pytest.mark.parametrize("verb", ["PUB", "MPUB", "DPUB", "SUB"])
async def test_a_topic_that_cannot_be_made_is_an_answer_not_a_crash(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(broker.disk, "make_folder", refuse)
    client = Client(broker)
    commands = {
        "PUB": pub("t", b"x"),
        "MPUB": b"MPUB t\n\0\0\0\x09\0\0\0\1\0\0\0\1x",
        "DPUB": b"DPUB t 5\n\0\0\0\1x",
        "SUB": b"SUB t c\n",
    }
    client.send(commands[verb])
    assert client.errors == [f"E_{verb}_FAILED {verb} failed disk quota exceeded".encode()]
    assert client.is_over
    assert broker.health.startswith("NOK - cannot make a folder")
    monkeypatch.undo()
    await Client(broker).publish("t", b"fine again")


# --- A damaged journal ------------------------------------------------------------------------------------------------


def batches(path: Path) -> list[tuple[int, int]]:
    """(start, stop) of each batch of a journal or a snapshot, but the one that ends it."""
    data = path.read_bytes()
    head = read_head(data, path)
    assert head is not None
    found = []
    start = FILE_HEADER
    for stop, entries in read_batches(data, head[0]):
        if entries:
            found.append((start, stop))
        start = stop
    return found


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def newest(path: Path, kind: str) -> Path:
    return max((path / "flintmq" / "journal").glob(f"{kind}-*[0-9]"))


TOPICS = ["a", "b", "c", "d", "e"]


async def fill(start_broker: StartBroker, how: str) -> None:
    """Topics, channels and messages, each in a batch of the journal of its own."""
    broker = await start_broker()
    for topic in TOPICS:
        broker.topic(topic).channel("c")
        await Client(broker).publish(topic, *(f"{topic}{i}".encode() for i in range(3)))
        await quiet(broker)
        broker.journal.flush()
    await (broker.stop() if how == "stop" else _killed(broker))


async def _killed(broker: Broker) -> None:
    broker.kill()


async def delivered(broker: Broker) -> dict[str, list[bytes]]:
    found = {}
    for topic in broker.topics.values():
        client = Client(broker)
        await client.subscribe(topic.name, "c", 100)
        await quiet(broker)
        found[topic.name] = client.bodies
    return found


def refused(path: Path, offset: int) -> Any:
    text = rf"(?s)the journal is damaged.*{path.name}.*offset {offset}\b.*--accept-damaged-journal.*flintmq recover"
    return pytest.raises(StartError, match=text)


@pytest.mark.parametrize("seed", range(8))
async def test_a_journal_with_a_bad_batch_before_good_ones_is_refused_unless_accepted(
    start_broker: StartBroker, tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    random.seed(seed)
    await fill(start_broker, "stop" if seed % 2 else "kill")
    path = newest(tmp_path, "journal")
    start, stop = random.choice(batches(path)[1:-1])
    flip(path, random.randrange(start, stop))
    before = {file: file.read_bytes() for file in (tmp_path / "flintmq").rglob("*") if file.is_file()}
    for _ in range(2):
        with refused(path, start):
            await start_broker()
    assert {file: file.read_bytes() for file in (tmp_path / "flintmq").rglob("*") if file.is_file()} == before
    broker = await start_broker(accept_damaged_journal=True)
    assert path.name in caplog.text and "damaged" in caplog.text
    assert path.with_suffix(".bad").read_bytes() == before[path]
    # Whatever the journal does not know any more is set aside, never deleted.
    folders = {folder.name for folder in (tmp_path / "flintmq" / "topics").iterdir()}
    assert {folder.partition("@")[0] for folder in folders} == set(TOPICS)
    assert len(folders) == len(TOPICS)
    for topic in broker.topics.values():
        if "c" not in topic.channels:
            topic.channel("c")
    found = await delivered(broker)
    assert found == {topic: [f"{topic}{i}".encode() for i in range(3)] for topic in found}
    lost = {folder.partition("@")[0] for folder in folders if folder.endswith(".lost")}
    assert set(found) == set(TOPICS) - lost
    # From here on it is whole again.
    await broker.stop()
    again = await start_broker()
    assert set(again.topics) == set(found)


@pytest.mark.parametrize("seed", range(12))
async def test_a_used_journal_without_its_beginning_is_refused_unless_accepted(
    start_broker: StartBroker, tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Sectors at its beginning are zeros, or it is cut off there. A later batch or the snapshot shows it was used."""
    random.seed(seed)
    await fill(start_broker, "stop" if seed % 2 else "kill")
    path = newest(tmp_path, "journal")
    data = path.read_bytes()
    if seed < 4:
        path.write_bytes(data[: (0, 20, FILE_HEADER, batches(path)[0][1] - 1)[seed]])
    else:
        size = random.randrange(1, batches(path)[-1][0])
        path.write_bytes(bytes(size) + data[size:])
        if seed >= 8:
            # Not taken yet. What is in the file tells.
            newest(tmp_path, "snapshot").unlink()
    before = {file: file.read_bytes() for file in (tmp_path / "flintmq").rglob("*") if file.is_file()}
    with pytest.raises(StartError, match=rf"the journal is damaged.*{path.name}.*offset \d.*--accept-damaged-journal"):
        await start_broker()
    assert {file: file.read_bytes() for file in (tmp_path / "flintmq").rglob("*") if file.is_file()} == before
    broker = await start_broker(accept_damaged_journal=True)
    assert path.name in caplog.text and "damaged" in caplog.text
    folders = {folder.name.partition("@")[0] for folder in (tmp_path / "flintmq" / "topics").iterdir()}
    assert folders == set(TOPICS)
    await broker.stop()
    await start_broker()


@pytest.mark.parametrize("size", [0, 20, FILE_HEADER, 3 << 10])
async def test_a_journal_that_was_being_made_when_the_power_went_is_passed_over(
    start_broker: StartBroker, tmp_path: Path, size: int
) -> None:
    await fill(start_broker, "stop")
    path = newest(tmp_path, "journal")
    made = path.with_name(f"journal-{int(path.name[-8:]) + 1:08d}")
    made.write_bytes(bytes(size))
    broker = await start_broker()
    assert set(broker.topics) == set(TOPICS)


@pytest.mark.parametrize("cut", [1, 5, 13])
async def test_a_torn_tail_is_normal(start_broker: StartBroker, tmp_path: Path, cut: int) -> None:
    await fill(start_broker, "kill")
    path = newest(tmp_path, "journal")
    start, stop = batches(path)[-1]
    data = path.read_bytes()
    path.write_bytes(data[: min(start + cut, stop - 1)] + bytes(len(data) - start - cut))
    broker = await start_broker()
    assert set(TOPICS[:-1]) <= set(broker.topics)


async def test_batches_that_a_power_failure_wrote_in_another_order_are_a_torn_tail(
    start_broker: StartBroker, tmp_path: Path, clock: FakeClock
) -> None:
    """What was not synced may reach the device in any order: a hole in it is no damage, and nobody was told OK."""
    broker = await start_broker()
    broker.topic("a").channel("c")
    await broker.synced()
    first = broker.journal.size
    for name in ("x", "y", "z"):
        broker.topics["a"].channel(name)
    path = newest(tmp_path, "journal")
    content = path.read_bytes()
    broker.kill()
    start = next(start for start, _ in batches(path) if start >= first)
    path.write_bytes(content)
    flip(path, start + 3)
    clock.reboot()
    broker = await start_broker()
    assert set(broker.topics["a"].channels) == {"c"}


async def test_a_journal_of_0_1_0_with_a_bad_batch_before_good_ones_is_refused(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not say what was on the device, so that it must be asked."""
    with monkeypatch.context() as patch:
        patch.setattr(journal, "MARK_SIZE", 1 << 30)
        patch.setattr(journal.Journal, "_safe", property(lambda self: 0, lambda self, value: None), raising=False)
        await fill(start_broker, "kill")
    path = newest(tmp_path, "journal")
    start, stop = batches(path)[2]
    flip(path, stop - 1)
    with refused(path, start):
        await start_broker()


async def test_damage_to_what_was_synced_is_found_after_a_reboot_too(
    start_broker: StartBroker, tmp_path: Path, clock: FakeClock
) -> None:
    broker = await start_broker()
    broker.topic("a").channel("c")
    await broker.synced()
    broker.topics["a"].channel("x")
    await broker.synced()
    broker.topics["a"].channel("y")
    await broker.synced()
    path = newest(tmp_path, "journal")
    broker.kill()
    start, _ = batches(path)[1]
    flip(path, start + 3)
    clock.reboot()
    with refused(path, start):
        await start_broker()


@pytest.mark.parametrize("seed", range(4))
async def test_a_damaged_snapshot_is_refused_unless_accepted(
    start_broker: StartBroker, tmp_path: Path, seed: int
) -> None:
    random.seed(seed)
    await fill(start_broker, "kill")
    broker = await start_broker()
    await (broker.stop() if seed % 2 else _killed(broker))
    path = newest(tmp_path, "snapshot")
    start, stop = random.choice(batches(path))
    if seed == 3:
        # Cut off: the batch that ends it is missing.
        path.write_bytes(path.read_bytes()[: stop - 1])
    else:
        flip(path, random.randrange(start, stop))
    with refused(path, start):
        await start_broker()
    broker = await start_broker(accept_damaged_journal=True)
    folders = {folder.name.partition("@")[0] for folder in (tmp_path / "flintmq" / "topics").iterdir()}
    assert folders == set(TOPICS)
    await broker.stop()


@pytest.mark.parametrize("missing", ["journal", "snapshot", "all"])
async def test_a_journal_with_a_missing_file_is_refused_unless_accepted(
    start_broker: StartBroker, tmp_path: Path, missing: str
) -> None:
    await fill(start_broker, "kill")
    broker = await start_broker()
    broker.kill()
    if missing == "all":
        for path in (tmp_path / "flintmq" / "journal").iterdir():
            path.unlink()
    else:
        newest(tmp_path, missing).unlink()
    with pytest.raises(StartError, match=r"(?s)the journal is damaged.*missing.*--accept-damaged-journal"):
        await start_broker()
    await start_broker(accept_damaged_journal=True)
    folders = {folder.name.partition("@")[0] for folder in (tmp_path / "flintmq" / "topics").iterdir()}
    assert folders == set(TOPICS)


async def test_messages_of_a_topic_beyond_the_end_of_the_journal_are_set_aside_with_a_word(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A power failure may leave a topic's file and not its note. Nobody was told OK then."""
    await fill(start_broker, "kill")
    path = newest(tmp_path, "journal")
    start, _ = batches(path)[3]
    data = path.read_bytes()
    path.write_bytes(data[:start] + bytes(len(data) - start))
    broker = await start_broker()
    assert "e" not in broker.topics
    assert (tmp_path / "flintmq" / "topics" / "e@5.lost").is_dir()
    assert "the journal does not know e@5" in caplog.text and "flintmq recover" in caplog.text


def test_nsqd_says_what_is_damaged_in_one_paragraph_and_fails(tmp_path: Path) -> None:
    async def fill_it() -> None:
        broker = Broker(data_path=tmp_path, disk_reserve=0)
        await broker.start()
        for topic in TOPICS:
            broker.topic(topic).channel("c")
            await broker.synced()
        broker.kill()

    asyncio.run(fill_it())
    path = newest(tmp_path, "journal")
    start, _ = batches(path)[2]
    flip(path, start + 20)
    command = [sys.executable, "-m", "flintmq", "nsqd", "--data-path", str(tmp_path), "--tcp-address=127.0.0.1:0"]
    done = subprocess.run([*command, "--http-address=127.0.0.1:0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "FATAL" in line]
    assert len(lines) == 1
    assert f"{path}: the batch at offset {start}" in lines[0] and "flintmq recover" in lines[0]


async def test_a_broker_in_a_program_creates_its_folder(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path / "made"):
        assert (tmp_path / "made").is_dir()
    with pytest.raises(StartError, match=r"failed to lock data-path: open .*made"):
        async with Broker(data_path=tmp_path / "no" / "made"):
            pass


#: A message that goes in and out, on a system that lacks what macOS lacks.
ELSEWHERE = """
import os, select, time

for module, names in (
    (select, [name for name in vars(select) if name.startswith(("EPOLL", "epoll", "POLLRDHUP"))]),
    (os, ["posix_fallocate", "posix_fadvise", "fdatasync", "copy_file_range", "pipe2"]),
    (time, ["CLOCK_BOOTTIME"]),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

import asyncio, sys
from flintmq.broker.daemon import Broker
from support.nsq_client import NsqClient

async def main():
    async with Broker(data_path=sys.argv[1], disk_reserve=0) as broker, NsqClient.to(broker.tcp_address) as client:
        await client.publish("t", b"one")
        await client.subscribe("t", "c", ready=1)
        print((await client.message()).body)

asyncio.run(main())
"""


def test_a_system_without_epoll_is_started_on(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'one'\n", "")


@pytest.mark.parametrize(
    "name", ["journal/journal-\N{SUPERSCRIPT TWO}", "topics/t0@1/mine.first", "topics/t0@1/mine.seg", "topics/mine@²"]
)
async def test_a_name_that_the_broker_did_not_give_is_left_alone(
    start_broker: StartBroker, tmp_path: Path, name: str
) -> None:
    await fill(start_broker, "stop")
    [folder] = (tmp_path / "flintmq" / "topics").glob(f"{TOPICS[0]}@*")
    path = tmp_path / "flintmq" / name.replace("t0@1", folder.name)
    if "@²" in name:
        path.mkdir()
        path = path / "mine.seg"
    path.write_bytes(b"something")
    broker = await start_broker()
    assert await delivered(broker) == {topic: [f"{topic}{i}".encode() for i in range(3)] for topic in TOPICS}
    assert path.exists() or path.parent.with_name(f"{path.parent.name}.lost").exists()


async def test_a_start_names_many_missing_journals_in_one_line(start_broker: StartBroker, tmp_path: Path) -> None:
    """A copy that somebody named by the date, say: millions of files seem to be missing before it."""
    await fill(start_broker, "stop")
    path = newest(tmp_path, "journal")
    path.with_name("journal-00200000").write_bytes(path.read_bytes())
    with pytest.raises(StartError, match=r"journal-\d+ to journal-00199999 are missing") as caught:
        await start_broker()
    assert len(str(caught.value)) < 2_000
