"""Backups: of brokers that stand still, that work, and that come and go; found whole or found out; and put back."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from flintmq.broker import backup
from flintmq.broker.daemon import Broker
from flintmq.broker.stage.state import Prepared, encode_state
from flintmq.broker.storage import journal
from flintmq.errors import BackupError, FormatError, StartError
from flintmq.protocol.wire import encode_command, encode_mpub
from support.nsq_client import NsqClient

# A guard against hanging, nowhere a measure.
PATIENCE = 60


async def contents(broker: Broker, topic: str, channel: str) -> list[bytes]:
    """Everything that the channel still has to deliver; it is empty afterwards."""
    found: list[bytes] = []
    source = broker.topics[topic].channels[channel]
    async with NsqClient.to(broker.tcp_address) as client:
        await client.subscribe(topic, channel, 2500)
        while source.depth or source.in_flight_count or len(source.deferred):
            try:
                async with asyncio.timeout(0.05):
                    message = await client.message()
            except TimeoutError:
                # The last FINs may still be on their way, or a deferred message not yet due.
                continue
            found.append(message.body)
            client.send(b"FIN %s\n" % message.id)
    return found


async def in_thread(work: Callable[[], object]) -> None:
    """Out of the loop's way, as another process would be."""
    await asyncio.get_running_loop().run_in_executor(None, work)


def segments(path: Path) -> list[Path]:
    """The segment files of all topics; folders may vanish meanwhile."""
    found = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return sorted(file for file in found if file.suffix == ".seg" and "topics" in file.parts)


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.fixture
async def stopped(tmp_path: Path) -> Path:
    """The data path of a broker that has stopped: two channels, one of which has finished a message."""
    path = tmp_path / "data"
    path.mkdir()
    async with Broker(data_path=path, disk_reserve=0) as broker, NsqClient.to(broker.tcp_address) as client:
        await client.subscribe("t", "c", 1)
        assert await client.ask(encode_mpub(b"t", [b"one", b"two", b"three"])) == b"OK"
        first = await client.message()
        client.send(b"FIN %s\n" % first.id)
        await client.message()
        async with NsqClient.to(broker.tcp_address) as other:
            await other.subscribe("t", "d", 0)
            await other.publish_many("t", b"four")
            await other.publish_many("nobody", b"waits")
            assert await other.ask(encode_command(b"DPUB", b"t", b"60000", body=b"later")) == b"OK"
    return path


# --- What is in it ----------------------------------------------------------------------------------------------------


async def test_a_stopped_broker_comes_back_as_it_was(stopped: Path, tmp_path: Path) -> None:
    made = backup.make(stopped, tmp_path / "copy")
    assert (made.topics, made.messages, made.damage, made.left_out) == (2, 6, [], [])
    assert backup.verify(tmp_path / "copy") == made
    backup.restore(tmp_path / "copy", tmp_path / "new")
    async with Broker(data_path=tmp_path / "new", disk_reserve=0) as broker:
        topic = broker.topics["t"]
        assert {name: channel.depth for name, channel in topic.channels.items()} == {"c": 3, "d": 1}
        assert [len(channel.deferred) for channel in topic.channels.values()] == [1, 1]
        assert broker.topics["nobody"].depth == 1
        async with NsqClient.to(broker.tcp_address) as client:
            await client.subscribe("t", "c", 10)
            messages = sorted([await client.message() for _ in range(3)], key=lambda message: message.id)
            # In flight when it stopped: delivered again, and counted.
            assert [(m.body, m.attempts) for m in messages] == [(b"two", 2), (b"three", 1), (b"four", 1)]


async def test_the_original_is_not_touched(stopped: Path, tmp_path: Path) -> None:
    def everything() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}

    before = everything()
    backup.make(stopped, tmp_path / "copy")
    assert everything() == before


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_backups_in_a_row_of_a_busy_broker_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """Topics come and go, segments are begun and freed and the journal rolls, all while backups are made.

    Of each backup: what was acknowledged before it began and not finished when it ended is delivered by the broker that
    is started on it, on every channel; and batches are there as a whole or not at all.
    """
    monkeypatch.setattr(journal, "ROLL_AT", 4 << 10)
    data = tmp_path / "data"
    data.mkdir()
    acknowledged: dict[str, set[bytes]] = {"busy": set(), "kept": set()}
    finished: dict[str, set[bytes]] = {"one": set(), "two": set()}
    begun, over = asyncio.Event(), asyncio.Event()
    batches = 0

    async def publish(broker: Broker, topic: str) -> None:
        nonlocal batches
        async with NsqClient.to(broker.tcp_address) as client:
            while not over.is_set():
                batches += 1
                bodies = [b"%d %d/10 " % (batches, k) + b"x" * random.randrange(200) for k in range(10)]
                await client.publish_many(topic, *bodies)
                acknowledged[topic].update(bodies)
                if all(acknowledged.values()):
                    begun.set()
                await asyncio.sleep(0.002 if topic == "kept" else 0)

    async def consume(broker: Broker, channel: str) -> None:
        async with NsqClient.to(broker.tcp_address) as client:
            await client.subscribe("busy", channel, 10)
            while not over.is_set():
                message = await client.message()
                if random.random() < 0.02:
                    client.send(b"REQ %s %d\n" % (message.id, random.choice((0, 20))))
                else:
                    client.send(b"FIN %s\n" % message.id)
                    finished[channel].add(message.body)

    async def come_and_go(broker: Broker) -> None:
        async with NsqClient.to(broker.tcp_address) as client:
            while not over.is_set():
                await client.publish_many("fleeting", b"x" * 1000)
                broker.delete_topic("fleeting")

    async def check(number: int) -> None:
        before = {topic: set(bodies) for topic, bodies in acknowledged.items()}
        copy, new = tmp_path / f"copy{number}", tmp_path / f"new{number}"
        await in_thread(lambda: backup.make(data, copy))
        gone = {channel: set(bodies) for channel, bodies in finished.items()}
        await in_thread(lambda: backup.verify(copy))
        await in_thread(lambda: backup.restore(copy, new))
        async with Broker(data_path=new, disk_reserve=0) as restored:
            for channel in ("one", "two"):
                found = set(await contents(restored, "busy", channel))
                assert before["busy"] - gone[channel] - found == set()
            kept = await contents(restored, "kept", "idle")
            assert before["kept"] - set(kept) == set()
            sizes: dict[bytes, int] = {}
            for body in set(kept):
                sizes[body.split()[0]] = sizes.get(body.split()[0], 0) + 1
            assert set(sizes.values()) == {10}
        shutil.rmtree(copy)
        shutil.rmtree(new)

    async with Broker(
        data_path=data, durability=durability, max_bytes_per_file=60_000, sync_timeout=20_000_000, disk_reserve=0
    ) as broker:
        async with NsqClient.to(broker.tcp_address) as client:
            await client.subscribe("kept", "idle", 0)
        for channel in ("one", "two"):
            broker.topic("busy").channel(channel)
        work: list[Awaitable[None]] = [
            *(publish(broker, topic) for topic in ("busy", "busy", "kept")),
            *(consume(broker, channel) for channel in ("one", "two")),
            come_and_go(broker),
        ]
        tasks = [asyncio.ensure_future(some) for some in work]
        seen: set[Path] = set()
        # A busy machine may be slow to publish the first message.
        await begun.wait()
        for number in range(6):
            await check(number)
            seen |= set(segments(data))
            assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
        over.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # It was as lively as it is said to be.
        assert len(seen - set(segments(data))) > 3
        assert max(int(p.name.split("-")[1]) for p in (data / "flintmq" / "journal").glob("journal-*")) > 3


async def test_a_broker_that_starts_while_its_backup_is_made_is_copied_again(stopped: Path, tmp_path: Path) -> None:
    """The journal said that each log ends where it stopped; by then it goes on."""
    reached, go_on = threading.Event(), threading.Event()
    attempts = 0

    def progress(done: int, of: int) -> None:
        nonlocal attempts
        if done == 0:
            attempts += 1
            reached.set()
            assert go_on.wait(PATIENCE)

    making = asyncio.ensure_future(in_thread(lambda: backup.make(stopped, tmp_path / "copy", progress)))
    await asyncio.get_running_loop().run_in_executor(None, reached.wait, PATIENCE)
    async with Broker(data_path=stopped, disk_reserve=0) as broker, NsqClient.to(broker.tcp_address) as client:
        await client.publish_many("t", b"after the start")
        go_on.set()
        await making
    assert attempts == 2
    backup.restore(tmp_path / "copy", tmp_path / "new")
    async with Broker(data_path=tmp_path / "new", disk_reserve=0) as broker:
        assert broker.topics["t"].channels["d"].depth == 2


async def test_numbers_that_the_journal_had_not_reserved_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a large topic is copied it may grow beyond what was reserved when the journal was read."""
    data = tmp_path / "data"
    data.mkdir()
    async with Broker(data_path=data, disk_reserve=0) as broker, NsqClient.to(broker.tcp_address) as client:
        await client.subscribe("t", "c", 0)
        first = broker.topics["t"].log.end
        for number in range(5):
            await client.publish_many("t", b"%d" % number)
        replay = backup._replay

        def with_less_reserved(folder: Path) -> journal.State:
            state = replay(folder)
            for topic in state.topics.values():
                topic.ceiling = first + 3
            return state

        monkeypatch.setattr(backup, "_replay", with_less_reserved)
        made = await asyncio.get_running_loop().run_in_executor(None, backup.make, data, tmp_path / "copy")
    assert made.messages == 3
    backup.restore(tmp_path / "copy", tmp_path / "new")
    async with Broker(data_path=tmp_path / "new", disk_reserve=0) as broker:
        assert await contents(broker, "t", "c") == [b"0", b"1", b"2"]


# --- Who it is --------------------------------------------------------------------------------------------------------


def node(path: Path) -> str:
    about = msgspec.json.decode((path / "flintmq" / "format.json").read_bytes())
    return str(about["node"])


async def test_a_restored_broker_is_another_node_unless_told_otherwise(stopped: Path, tmp_path: Path) -> None:
    made = backup.make(stopped, tmp_path / "copy")
    assert made.node == node(stopped)
    for name in ("a", "b"):
        backup.restore(tmp_path / "copy", tmp_path / name)
    backup.restore(tmp_path / "copy", tmp_path / "same", same_node=True)
    assert len({node(stopped), node(tmp_path / "a"), node(tmp_path / "b")}) == 3
    assert node(tmp_path / "same") == node(stopped)


@pytest.mark.parametrize("same_node", [False, True])
async def test_no_id_that_the_original_gave_since_is_given_again(
    stopped: Path, tmp_path: Path, same_node: bool
) -> None:
    backup.make(stopped, tmp_path / "copy")

    async def id_of_next(path: Path) -> bytes:
        async with Broker(data_path=path, disk_reserve=0) as broker, NsqClient.to(broker.tcp_address) as client:
            channel = broker.topic("t").channels["d"]
            channel.empty()
            await client.subscribe("t", "d", 100)
            client.send(encode_mpub(b"t", [b"next"]))
            return (await client.message()).id

    # Killed again and again, the original leaps ahead by all that it reserved each time.
    original = [await id_of_next(stopped)]
    for _ in range(2):
        broker = Broker(data_path=stopped, disk_reserve=0)
        await broker.start()
        broker.kill()
        original.append(await id_of_next(stopped))
    assert original == sorted(original)
    # As if a minute had passed since.
    manifest = backup._read_manifest(tmp_path / "copy")
    manifest.made -= 60
    backup._write_manifest(tmp_path / "copy", manifest)
    backup.restore(tmp_path / "copy", tmp_path / "new", same_node=same_node)
    assert await id_of_next(tmp_path / "new") > original[-1]


# --- What is damaged --------------------------------------------------------------------------------------------------


async def test_a_flipped_bit_anywhere_in_a_backup_is_found_and_nothing_is_restored(
    stopped: Path, tmp_path: Path
) -> None:
    copy, new = tmp_path / "copy", tmp_path / "new"
    backup.make(stopped, copy)
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert len(files) >= 5
    for path in files:
        for offset in (0, path.stat().st_size // 2, path.stat().st_size - 2):
            flip(path, offset)
            with pytest.raises(BackupError, match=re.escape(str(path))):
                backup.verify(copy)
            with pytest.raises(BackupError, match=re.escape(str(path))):
                backup.restore(copy, new)
            assert not new.exists() or list(new.iterdir()) == []
            flip(path, offset)
    backup.verify(copy)


async def test_what_is_missing_or_short_is_named_all_at_once(stopped: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    backup.make(stopped, copy)
    first, second = segments(copy)[:2]
    size = first.stat().st_size
    os.truncate(first, size - 1)
    second.unlink()
    with pytest.raises(BackupError) as error:
        backup.verify(copy)
    assert f"{first} has {size - 1} bytes instead of {size}" in str(error.value)
    assert f"{second} is missing" in str(error.value)


async def test_damage_in_the_data_path_is_said_and_the_rest_is_saved(stopped: Path, tmp_path: Path) -> None:
    source = next(path for path in segments(stopped) if "t@" in str(path))
    at = source.read_bytes().index(b"two")
    flip(source, at)
    made = backup.make(stopped, tmp_path / "copy")
    assert len(made.damage) == 1
    assert made.damage[0].startswith(f"{source}: ")
    assert backup.verify(tmp_path / "copy").damage == made.damage
    backup.restore(tmp_path / "copy", tmp_path / "new")
    async with Broker(data_path=tmp_path / "new", disk_reserve=0) as broker:
        # The batch of three was one record.
        found = await contents(broker, "nobody", broker.topics["nobody"].channel("c")[0].name)
        assert found == [b"waits"]
        async with NsqClient.to(broker.tcp_address) as client:
            await client.subscribe("t", "d", 100)
            assert (await client.message()).body == b"four"


async def test_a_journal_that_is_damaged_in_its_middle_is_not_copied(stopped: Path, tmp_path: Path) -> None:
    [path] = (stopped / "flintmq" / "journal").glob("journal-*")
    flip(path, journal.FILE_HEADER + 14)
    with pytest.raises(BackupError, match=f"{path} is damaged at {journal.FILE_HEADER}"):
        backup.make(stopped, tmp_path / "copy")
    assert list(tmp_path.glob("copy*")) == []


async def test_what_the_broker_set_aside_is_left_out_and_named(stopped: Path, tmp_path: Path) -> None:
    topics = stopped / "flintmq" / "topics"
    (topics / "old@9.lost").mkdir()
    (topics / "nobody@2" / "0.bad").write_bytes(b"?")
    made = backup.make(stopped, tmp_path / "copy")
    assert sorted(made.left_out) == ["topics/nobody@2/0.bad", "topics/old@9.lost"]


# --- Where it may go --------------------------------------------------------------------------------------------------


async def test_a_backup_needs_a_source_and_a_free_place(stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_bytes(b"")
    with pytest.raises(BackupError, match="is there already"):
        backup.make(stopped, tmp_path / "taken")
    with pytest.raises(BackupError, match="inside the data path"):
        backup.make(stopped, stopped / "copy")
    with pytest.raises(BackupError, match="there is no data of flintmq in"):
        backup.make(tmp_path / "taken", tmp_path / "copy")
    with pytest.raises(BackupError, match="No such file or directory"):
        backup.make(stopped, tmp_path / "not" / "there")
    (tmp_path / "empty").mkdir()
    backup.make(stopped, tmp_path / "empty")
    backup.verify(tmp_path / "empty")


async def test_two_backups_to_one_place_do_not_mix(stopped: Path, tmp_path: Path) -> None:
    partial = tmp_path / "copy.partial"
    partial.mkdir()
    (partial / "leftover").write_bytes(b"of one that was cut off")
    with open_lock(partial), pytest.raises(BackupError, match="another backup"):
        backup.make(stopped, tmp_path / "copy")
    assert (partial / "leftover").exists()
    backup.make(stopped, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["data", "manifest.json"]
    assert not partial.exists()


@contextlib.contextmanager
def open_lock(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


async def test_nothing_is_restored_over_data_or_under_a_running_broker(stopped: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    backup.make(stopped, copy)
    with pytest.raises(BackupError, match="holds data already"):
        backup.restore(copy, stopped)
    go = tmp_path / "go"
    go.mkdir()
    (go / "nsqd.dat").write_text('{"topics":[],"version":"1.3.0"}')
    with pytest.raises(BackupError, match="holds data already"):
        backup.restore(copy, go)
    (tmp_path / "locked").mkdir()
    with open_lock(tmp_path / "locked"), pytest.raises(BackupError, match="is in use by a broker"):
        backup.restore(copy, tmp_path / "locked")
    with pytest.raises(BackupError, match="is no backup"):
        backup.restore(tmp_path, tmp_path / "new")


async def test_no_broker_starts_beside_a_restore_that_was_cut_off(stopped: Path, tmp_path: Path) -> None:
    backup.make(stopped, tmp_path / "copy")
    new = tmp_path / "new"
    (new / "flintmq.restoring" / "topics").mkdir(parents=True)
    with pytest.raises(StartError, match="a restore that was cut off"):
        await Broker(data_path=new, disk_reserve=0).start()
    backup.restore(tmp_path / "copy", new)
    async with Broker(data_path=new, disk_reserve=0) as broker:
        assert set(broker.topics) == {"t", "nobody"}


async def test_a_manifest_cannot_point_outside_its_backup(stopped: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    manifest = backup.make(stopped, copy)
    manifest.files[0].path = "data/../../escaped"
    backup._write_manifest(copy, manifest)
    with pytest.raises(BackupError, match="outside the backup"):
        backup.restore(copy, tmp_path / "new")


# --- The commands -----------------------------------------------------------------------------------------------------


def flintmq(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flintmq", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


async def test_the_commands_say_what_they_did(stopped: Path, tmp_path: Path) -> None:
    copy, new = tmp_path / "copy", tmp_path / "new"
    made = flintmq("backup", "--data-path", stopped, copy)
    size = sum(path.stat().st_size for path in (copy / "data").rglob("*") if path.is_file())
    files = len(backup.verify(copy).files)
    contents = f"2 topics, 6 messages, {files} files, {size} bytes\n"
    assert (made.returncode, made.stdout, made.stderr) == (0, f"{copy}: {contents}", "")
    checked = flintmq("backup", "--verify", copy)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, f"{copy} is whole: {contents}", "")
    restored = flintmq("restore", copy, "--data-path", new)
    assert (restored.returncode, restored.stdout, restored.stderr) == (0, f"{new}: {contents}", "")
    again = flintmq("restore", copy, "--data-path", new)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == f"flintmq restore: {new} holds data already: restore to an empty folder\n"


async def test_the_commands_answer_in_json_for_scripts(stopped: Path, tmp_path: Path) -> None:
    copy, again = tmp_path / "copy", tmp_path / "again"
    results = [
        json.loads(flintmq(*words, "--json").stdout)
        for words in (
            ("backup", "--data-path", stopped, copy),
            ("backup", "--verify", copy),
            ("restore", copy, "--data-path", again),
        )
    ]
    assert [result.pop("path") for result in results] == [str(copy), str(copy), str(again)]
    assert results[0] == results[1] == results[2]
    assert results[0]["messages"] > 0 and results[0]["damage"] == results[0]["left_out"] == []


async def test_a_damaged_data_path_or_backup_ends_the_command_with_status_1(stopped: Path, tmp_path: Path) -> None:
    source = next(path for path in segments(stopped) if "t@" in str(path))
    flip(source, source.read_bytes().index(b"two"))
    made = flintmq("backup", "--data-path", stopped, tmp_path / "copy")
    assert made.returncode == 1
    assert made.stderr.splitlines()[-1].endswith(
        "the backup was written, but some messages of the data path could not be read"
    )
    flip(segments(tmp_path / "copy")[0], 60)
    assert flintmq("backup", "--verify", tmp_path / "copy").returncode == 1


@pytest.mark.parametrize(
    "argv", [["backup"], ["backup", "x"], ["backup", "--verify", "--data-path=y", "x"], ["restore", "x"]]
)
def test_a_command_line_that_leaves_it_open_is_a_usage_error(argv: list[str]) -> None:
    result = flintmq(*argv)
    assert result.returncode == 2
    assert f"usage: flintmq {argv[0]}" in result.stderr


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    """More segments than may be open: the rest is opened when its turn comes."""

    async def fill() -> None:
        async with Broker(data_path=tmp_path / "data", disk_reserve=0, max_bytes_per_file=1) as broker:
            async with NsqClient.to(broker.tcp_address) as client:
                for number in range(150):
                    await client.publish_many("t", b"%d" % number)

    (tmp_path / "data").mkdir()
    asyncio.run(fill())
    assert len(segments(tmp_path / "data")) == 150
    script = (
        "import resource, sys; from pathlib import Path; from flintmq.broker import backup;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "print(backup.make(Path(sys.argv[1]), Path(sys.argv[2])).messages)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "data"), str(tmp_path / "copy")],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (result.stdout, result.stderr) == ("150\n", "")
    assert time.time() > backup.verify(tmp_path / "copy").made


@pytest.mark.parametrize("roll_at", [100, 2_345])
async def test_a_copy_of_very_many_topics_is_restored_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roll_at: int
) -> None:
    """Its journal is gone on with before a broker is there that could take a snapshot of anything."""
    path = tmp_path / "data"
    path.mkdir()
    names = {f"topic-{i}" for i in range(150)}
    async with Broker(data_path=path, disk_reserve=0) as broker:
        for name in names:
            broker.topic(name).channel("c")
    await in_thread(lambda: backup.make(path, tmp_path / "backup"))
    with monkeypatch.context() as patch:
        patch.setattr(journal, "ROLL_AT", roll_at)
        await in_thread(lambda: backup.restore(tmp_path / "backup", tmp_path / "copy"))
    async with Broker(data_path=tmp_path / "copy", disk_reserve=0) as broker:
        assert {topic.name for topic in broker.topics.values()} == names
        assert all("c" in topic.channels for topic in broker.topics.values())


# --- One that was made by somebody else -------------------------------------------------------------------------------

OUTSIDE = ("../../outside", "../../../../outside", "/tmp/outside", "a/b", "../x", "", "x" * 65, "a\nb", "a\0b")


def sealed(source: Path) -> None:
    """Give the backup a manifest that fits what lies in it now."""
    manifest = backup._read_manifest(source)
    for file in manifest.files:
        content = (source / file.path).read_bytes()
        file.size, file.sha256 = len(content), hashlib.sha256(content).hexdigest()
    backup._write_manifest(source, manifest)


async def crafted(path: Path, *notes: tuple[object, ...]) -> Path:
    """A backup whose journal has these notes at its end."""
    (path / "data").mkdir()
    async with Broker(data_path=path / "data", disk_reserve=0) as broker:
        broker.topic("t").channel("c")
    source = path / "backup"
    backup.make(path / "data", source)
    folder = source / "data" / "journal"
    writer = backup._journal(folder)
    writer.start(writer.recover())
    for note in notes:
        writer.note(*note)
    writer.sync_now()
    writer.close()
    manifest = backup._read_manifest(source)
    manifest.files = [file for file in manifest.files if not file.path.startswith("data/journal/")]
    names = [f"data/journal/{file.name}" for file in folder.iterdir()]
    manifest.files += [backup.FileEntry(name, 0, "") for name in names]
    backup._write_manifest(source, manifest)
    sealed(source)
    backup.verify(source)
    return source


def tree(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", ["topic", "channel", "redrive"])
async def test_names_in_a_backup_lead_nowhere(tmp_path: Path, name: str, kind: str) -> None:
    """As a topic's folder they would lead out of the data path, to be made, filled and removed."""
    notes: dict[str, tuple[object, ...]] = {
        "topic": ("topic", 77, name, 1, 1000),
        "channel": ("channel", 1, 78, name, 1, journal.SIDE),
        "redrive": ("redrive", 1, name, "c", 1, None, None, 0, False, None),
    }
    source = await crafted(tmp_path, notes[kind])
    before = tree(tmp_path)
    target = tmp_path / "restored"
    with pytest.raises(FormatError, match="a name that cannot be one"):
        backup.restore(source, target)
    assert [found for found in tree(tmp_path) if found not in before] == ["restored"]
    # Nor does a broker take it up that finds it in its own folder.
    shutil.rmtree(tmp_path / "data" / "flintmq" / "journal")
    shutil.copytree(source / "data" / "journal", tmp_path / "data" / "flintmq" / "journal")
    before = tree(tmp_path)
    with pytest.raises((StartError, FormatError), match="a name that cannot be one"):
        await Broker(data_path=tmp_path / "data", disk_reserve=0).start()
    assert [found for found in tree(tmp_path) if found not in before] == []


@pytest.mark.parametrize("attempt", ["../../../../secret", "a/../../x", "a.b", ""])
async def test_names_of_staged_rows_lead_nowhere(tmp_path: Path, attempt: str) -> None:
    """A backup of a data path whose state names a file elsewhere would take that file along."""
    (tmp_path / "data").mkdir()
    async with Broker(data_path=tmp_path / "data", disk_reserve=0) as broker:
        producer = broker.stage.producer("p")
        await producer.open("run", "job", 0)
        await producer.save()
        folder = producer.folder
        state = producer.state
        state.sets[0] = Prepared(1, "set", [(attempt, 1, 1)], {})
        crafted = encode_state(state)
    (folder / "state").write_bytes(crafted)
    with pytest.raises(FormatError, match="cannot be one"):
        backup.make(tmp_path / "data", tmp_path / "backup")
    with pytest.raises((StartError, FormatError), match="cannot be one"):
        await Broker(data_path=tmp_path / "data", disk_reserve=0).start()


async def test_a_backup_has_no_links(tmp_path: Path) -> None:
    source = await crafted(tmp_path)
    secret = tmp_path / "secret"
    content = (source / "data" / "format.json").read_bytes()
    secret.write_bytes(content)
    (source / "data" / "format.json").unlink()
    (source / "data" / "format.json").symlink_to(secret)
    with pytest.raises(BackupError, match="is a link"):
        backup.verify(source)
    with pytest.raises(BackupError, match="is a link"):
        backup.restore(source, tmp_path / "restored")
