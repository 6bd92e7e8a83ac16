"""What goes wrong in one topic or channel costs that one: the others are written, answered, synced and freed."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from support.fakes import Client, CountingDisk, FakeClock, quiet, replace_method, until

HOUR = 3600.0
SMALL = {"max_bytes_per_file": 20_000, "mem_queue_size": 0, "sync_timeout": 3_600_000_000_000}


class NoFolders(CountingDisk):
    """A disk too full for one more folder."""

    full = False

    def make_folder(self, path: Path) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().make_folder(path)


def segments(path: Path, topic: str) -> int:
    return len(list(path.glob(f"flintmq/topics/{topic}@*/*.seg")))


async def churn(broker: Broker, topic: str, count: int, size: int) -> None:
    """Messages come, are delivered and finished: enough for some segments."""
    consumer = Client(broker)
    await consumer.subscribe(topic, "c", 100)
    producer = Client(broker)
    for _ in range(count // 20):
        await producer.publish_many(topic, [b"x" * size] * 20)
        await until(lambda: len(consumer.messages) >= 20)
        consumer.finish(*consumer.messages)
        consumer.take()
    await quiet(broker)
    consumer.hang_up()
    await until(lambda: not broker.topics[topic].channels["c"].sessions)


@pytest.mark.parametrize("stuck", [["a"], ["m", "z"], ["a", "m", "z"]])
async def test_a_topic_that_gets_no_folder_does_not_keep_the_others_from_freeing_theirs(
    start_broker: StartBroker, clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, stuck: list[str]
) -> None:
    """The one message that is left of its oldest file would move to the side log, which has no folder yet."""
    disk = NoFolders()
    broker = await start_broker(disk=disk, **SMALL)
    topics = sorted({"b", "n", *stuck})
    for topic in topics:
        if topic in stuck:
            broker.topic(topic).channel("c")
            await Client(broker).publish_later(topic, b"in an hour", HOUR)
        await churn(broker, topic, 400, 97)
        assert segments(tmp_path, topic) > 2
    disk.full = True
    for _ in range(12):
        clock.advance(31)
        broker.upkeep.sync()
        await quiet(broker)
    assert {topic: segments(tmp_path, topic) for topic in topics if topic not in stuck} == {"b": 1, "n": 1}
    for topic in stuck:
        assert f"TOPIC({topic})" in caplog.text
    disk.full = False
    for _ in range(12):
        clock.advance(31)
        broker.upkeep.sync()
        await quiet(broker)
    assert all(segments(tmp_path, topic) == 1 for topic in topics)


async def test_a_topic_that_gets_no_folder_still_delivers_what_it_reads_back(
    start_broker: StartBroker, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """An old message waits to be copied to the side log, which has no folder; the backlog is in files."""
    disk = NoFolders()
    broker = await start_broker(disk=disk, **SMALL)
    broker.topic("a").channel("c")
    await Client(broker).publish_later("a", b"in an hour", HOUR)
    await churn(broker, "a", 400, 97)
    disk.full = True
    for _ in range(3):
        clock.advance(31)
        broker.upkeep.sync()
        await quiet(broker)
    assert "TOPIC(a)" in caplog.text
    for _ in range(20):
        await Client(broker).publish_many("a", [b"y" * 97] * 20)
    await quiet(broker)
    consumer = Client(broker)
    await consumer.subscribe("a", "c", 500)
    await until(lambda: len(consumer.messages) == 400)


def _break(target: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on the method fails; how often it was called."""
    calls: list[int] = []

    def fail(*_: Any, **__: Any) -> Any:
        calls.append(1)
        raise OSError(errno.EIO, "Input/output error")

    replace_method(monkeypatch, target, name, fail)
    return calls


#: What is done for every topic or channel in a round, and where it is found in a broken one.
WORK: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "flush": lambda topic: (topic, "flush"),
    "trim": lambda topic: (topic, "trim"),
    "sync": lambda topic: (topic.log, "sync"),
    "look": lambda topic: (topic.mover, "look"),
    "let_go": lambda topic: (topic, "let_go"),
    "free": lambda topic: (topic.log, "free"),
    "spare": lambda topic: (topic.retention, "spare"),
    "snapshot": lambda topic: (topic.channels["c"], "snapshot_parts"),
    "pump": lambda topic: (topic.channels["c"], "pump"),
}


@pytest.mark.parametrize("work", WORK)
async def test_an_error_in_one_topic_is_logged_with_its_name_and_costs_no_other(
    start_broker: StartBroker,
    clock: FakeClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    work: str,
) -> None:
    caplog.set_level(logging.ERROR)
    disk = CountingDisk()
    broker = await start_broker(disk=disk, disk_reserve=1 << 30, **SMALL)
    disk.free_bytes = 5 << 30
    # The broken one stands before, between and behind the others.
    for topic in ("one", "broken", "two"):
        await churn(broker, topic, 400, 99)
    broken = broker.topics["broken"]
    with monkeypatch.context() as patch:
        calls = _break(*WORK[work](broken), patch)
        for topic in ("broken", "one", "two"):
            Client(broker).send(b"PUB %s\n\0\0\0\4more" % topic.encode())
            broker.turns.pump_later(broker.topics[topic].channels["c"])
            broker.soon(broker.topics[topic].channels["c"])
            broker.answered(broker.topics[topic].channels["c"])
        broker.turns.end()
        broker.turns.housekeeping()
        await quiet(broker)
        disk.free_bytes = 1 << 30
        broker.upkeep.look_at_space()
        disk.free_bytes = 5 << 30
        broker.upkeep.look_at_space()
        await quiet(broker)
        for _ in range(3):
            clock.advance(31)
            broker.upkeep.sync()
            await quiet(broker)
        broker.journal._roll()
        await quiet(broker)
        assert calls, "it was not even tried"
        for topic in ("one", "two"):
            consumer = Client(broker)
            await consumer.subscribe(topic, "c", 10)
            await quiet(broker)
            assert consumer.bodies == [b"more"]
            consumer.finish(*consumer.messages)
            await quiet(broker)
            # A file or two with what was published last.
            assert segments(tmp_path, topic) <= 2
            consumer.hang_up()
        assert "broken" in caplog.text
    await broker.stop()
    again = await start_broker()
    assert {topic.name: set(topic.channels) for topic in again.topics.values()} == {
        "one": {"c"},
        "broken": {"c"},
        "two": {"c"},
    }
