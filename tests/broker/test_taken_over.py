"""A broker started on the data path of a Go nsqd: everything that was in it is there, under our roof.

What is in the files is the business of ``test_takeover``; here it is what a consumer gets of it. ``go_data/clean_stop``
was left by the real daemon.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker import daemon, takeover
from flintmq.broker.storage import journal
from flintmq.errors import StartError, StorageError
from flintmq.system import System
from support.fakes import Client, CountingDisk, FakeClock, quiet

CLEAN_STOP = Path(__file__).parent / "go_data" / "clean_stop"


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    shutil.copytree(CLEAN_STOP, path)
    return path


def expected(path: Path) -> dict[tuple[str, str], Counter[tuple[bytes, int, int]]]:
    """Per topic and channel: (body, timestamp, attempts of the next delivery). The topic's backlog is for everyone."""
    found: dict[tuple[str, str], Counter[tuple[bytes, int, int]]] = {}
    for topic in takeover.read(path, max_msg_size=1 << 20).topics:
        backlog = [] if topic.paused else [(m.body, m.timestamp, 1) for m in topic.queue]
        for channel in topic.channels:
            own = [(m.body, m.timestamp, m.attempts + 1) for m in channel.queue]
            found[topic.name, channel.name] = Counter(backlog + own)
    return found


async def consume_all(broker: daemon.Broker) -> dict[tuple[str, str], Counter[tuple[bytes, int, int]]]:
    found = {}
    for topic in list(broker.topics.values()):
        for channel in list(topic.channels.values()):
            channel.pause(False)
            client = Client(broker)
            await client.subscribe(topic.name, channel.name, 2500)
            await quiet(broker)
            messages = client.messages
            client.finish(*messages)
            found[topic.name, channel.name] = Counter((m.body, m.timestamp, m.attempts) for m in messages)
            client.hang_up()
    return found


async def test_every_channel_gets_its_messages_with_their_attempts_and_times(
    data_path: Path, start_broker: StartBroker
) -> None:
    wanted = expected(data_path)
    assert sum(sum(counter.values()) for counter in wanted.values()) > 20
    assert any(attempts > 1 for counter in wanted.values() for _, _, attempts in counter)
    broker = await start_broker(data_path=data_path)
    assert await consume_all(broker) == wanted


async def test_pause_flags_and_the_backlog_of_a_paused_topic_are_kept(
    data_path: Path, start_broker: StartBroker
) -> None:
    before = takeover.read(data_path, max_msg_size=1 << 20).topics
    waiting = {topic.name: len(list(topic.queue)) for topic in before}
    assert any(topic.paused and waiting[topic.name] for topic in before)
    assert any(channel.paused for topic in before for channel in topic.channels)
    broker = await start_broker(data_path=data_path)
    for topic in before:
        ours = broker.existing_topic(topic.name)
        assert ours.paused == topic.paused
        assert {c.name: c.paused for c in topic.channels} == {c.name: c.paused for c in ours.channels.values()}
        if topic.paused:
            assert ours.depth == waiting[topic.name]


async def test_what_was_taken_over_survives_a_restart_and_a_crash(data_path: Path, start_broker: StartBroker) -> None:
    wanted = expected(data_path)
    broker = await start_broker(data_path=data_path)
    await broker.stop()
    broker = await start_broker(data_path=data_path)
    broker.kill()
    broker = await start_broker(data_path=data_path)
    assert await consume_all(broker) == wanted
    await broker.stop()
    broker = await start_broker(data_path=data_path)
    assert all(not counter for counter in (await consume_all(broker)).values())


async def test_old_files_are_moved_aside_and_ours_take_their_place(data_path: Path, start_broker: StartBroker) -> None:
    old = {path.name: path.read_bytes() for path in data_path.iterdir()}
    broker = await start_broker(data_path=data_path)
    await broker.stop()
    folders = [path for path in data_path.iterdir() if path.is_dir() and path.name != "flintmq"]
    assert len(folders) == 1
    assert {path.name: path.read_bytes() for path in folders[0].iterdir()} == old
    assert {path.name for path in data_path.iterdir()} == {"flintmq", "nsqd.dat", folders[0].name}


@pytest.mark.parametrize("moment", ["_take_over", "rename", "move_aside", "remove"])
async def test_a_crash_during_the_take_over_only_repeats_it(
    data_path: Path, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    wanted = expected(data_path)

    class Crash(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        if moment == "_take_over":
            patch.setattr(takeover.Importer, "finish", crash)
        elif moment == "move_aside":
            patch.setattr(takeover, "move_aside", crash)
        else:
            # Before the new folder gets its name; after the old files were moved.
            patch.setattr(f"support.fakes.CountingDisk.{moment}", crash, raising=False)
        broker = daemon.Broker(data_path=str(data_path), disk=CountingDisk(), clock=FakeClock(), disk_reserve=0)
        with pytest.raises(Crash):
            await broker.start()
        # The process is gone, and with it its lock.
        broker._data_path.unlock()
        broker.disk.close()
        broker.journal.close()
    broker = await start_broker(data_path=data_path)
    assert await consume_all(broker) == wanted


async def test_new_messages_come_after_the_old_ones(data_path: Path, start_broker: StartBroker) -> None:
    wanted = expected(data_path)
    broker = await start_broker(data_path=data_path)
    names = [topic for topic, _ in wanted if not broker.topics[topic].paused]
    producer = Client(broker)
    await producer.publish(names[0], b"new")
    found = await consume_all(broker)
    for (topic, channel), counter in wanted.items():
        extra = found[topic, channel] - counter
        assert [body for body, _, _ in extra] == ([b"new"] if topic == names[0] else [])
        assert not counter - found[topic, channel]


@pytest.mark.parametrize(
    ("topics", "channels", "roll_at"), [(1, 700, 1_000), (37, 11, 4_321), (3, 2, 100), (250, 1, 8_192)]
)
async def test_a_data_path_whose_description_is_larger_than_a_journal_is_taken_over_whole(
    tmp_path: Path, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, topics: int, channels: int, roll_at: int
) -> None:
    """The importer's journal must hold all of it: there is nothing that a snapshot could be made of."""
    wanted = {f"t{i}": {f"channel-{i}-{j}": j % 3 == 0 for j in range(channels)} for i in range(topics)}
    go = [
        {"name": name, "paused": False, "channels": [{"name": c, "paused": p} for c, p in chans.items()]}
        for name, chans in wanted.items()
    ]
    (tmp_path / "nsqd.dat").write_text(json.dumps({"topics": go, "version": "1.3.0"}))
    monkeypatch.setattr(journal, "ROLL_AT", roll_at)
    for _ in range(2):
        broker = await start_broker()
        found = {t.name: {c.name: c.paused for c in t.channels.values()} for t in broker.topics.values()}
        assert found == wanted
        await quiet(broker)
        await broker.stop()


def open_files(path: Path) -> set[str]:
    """Files of the data path that this process holds."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(f"{path}"):
                found.add(target)
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("how", ["stop", "kill", "fatal", "failed start"])
async def test_every_way_to_stop_gives_back_all_files_those_of_side_logs_included(
    data_path: Path, start_broker: StartBroker, how: str
) -> None:
    wanted = expected(data_path)
    broker = await start_broker(data_path=data_path)
    sides = [topic.side for topic in broker.topics.values() if topic.side is not None]
    assert sides and any("/side/" in name for name in open_files(data_path))
    if how == "stop":
        await broker.stop()
    elif how == "kill":
        broker.kill()
    elif how == "fatal":
        broker._fatal(StorageError("the disk is gone"))
        assert all(side.closed for side in sides)
        with pytest.raises(StorageError, match="the disk is gone"):
            await broker.wait_closed()
    else:
        await broker.stop()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(StartError, match="failed - address already in use"):
                await start_broker(data_path=data_path, tcp_address=address)
    assert open_files(data_path) == set()
    again = await start_broker(data_path=data_path)
    assert await consume_all(again) == wanted


class FailingSystem(System):
    """Its n-th call on a file fails. It knows which files are open."""

    CALLS = ("open", "pread", "pwritev", "fdatasync", "fsync", "size", "mkdir", "listdir", "exists", "rename", "unlink")

    def __init__(self, fails_at: int, error: int) -> None:
        super().__init__()
        self.calls = 0
        self.open_files: set[int] = set()
        self._fails_at, self._error = fails_at, error
        for name in self.CALLS:
            setattr(self, name, partial(self._call, getattr(self, name)))

    def _call(self, call: Any, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self._fails_at:
            raise OSError(self._error, os.strerror(self._error))
        result = call(*args)
        if call.__name__ == "open":
            self.open_files.add(result)
        return result

    def close(self, fd: int) -> None:
        self.open_files.discard(fd)
        super().close(fd)


@pytest.mark.timeout(300)
async def test_an_error_at_any_call_of_a_take_over_costs_nothing(start_broker: StartBroker, tmp_path: Path) -> None:
    """The start fails, or not: no file stays open, and the next one has everything."""
    number, met = 0, True
    while met:
        number += 4
        error = (errno.EIO, errno.ENOSPC, errno.EMFILE)[number % 3]
        system = FailingSystem(number, error)
        path = tmp_path / f"data-{number}"
        shutil.copytree(CLEAN_STOP, path)
        wanted = expected(path)
        try:
            broker = await start_broker(data_path=path, disk=CountingDisk(system))
            await quiet(broker)
            broker.kill()
        except StartError:
            assert not system.open_files, f"{len(system.open_files)} files are open after call {number}"
        met = system.calls >= number
        broker = await start_broker(data_path=path)
        depths = {(t.name, c.name): c.depth for t in broker.topics.values() for c in t.channels.values()}
        paused = {name for name, topic in broker.topics.items() if topic.paused}
        assert depths == {key: found.total() for key, found in wanted.items()}, f"after call {number}, {paused}"
        await broker.stop()
    assert number > 200
