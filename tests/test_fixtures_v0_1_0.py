"""Data paths of 0.1.0 are opened by this version: every message, setting and position is found where it was.

``fixtures/v0_1_0/make.py`` wrote them with brokers of 0.1.0, and ``expected.json`` says what is in them. The tests work
on copies, by public means alone. Most of them set the broker's clock to the time when the files were written: the
longest delay of 0.1.0 is 49 days, and its deferred messages are to be deferred for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from flintmq import Broker, Consumer, NodeClient, Producer
from flintmq.broker.data_path import FORMAT
from flintmq.options import MILLISECOND, SECOND

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "v0_1_0"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
KINDS = ["clean", "killed"]
#: After this time everything that was deferred is due.
LONGEST_DELAY = 50 * 24 * 3600 * SECOND
#: A guard against hanging, nowhere a measure.
PATIENCE = 60.0

Message = dict[str, Any]


class Then:
    """A clock that was set to another time, on a machine that was started since. It can be moved on."""

    def __init__(self, wall: int) -> None:
        self._ahead = wall - time.time_ns()
        self._moved = 0

    def advance(self, nanoseconds: int) -> None:
        self._moved += nanoseconds

    def now(self) -> int:
        return time.monotonic_ns() + self._moved

    def wall(self) -> int:
        return time.time_ns() + self._ahead + self._moved

    def boot_id(self) -> bytes:
        return b"another boot ..."


class DataPath(NamedTuple):
    """A copy of a data path, and what is in it."""

    kind: str
    path: Path
    expected: dict[str, Any]
    clock: Then

    @property
    def topics(self) -> dict[str, Any]:
        found: dict[str, Any] = self.expected["topics"]
        return found

    @contextlib.asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[tuple[Broker, NodeClient]]:
        """A broker of this version on it. A clean stop follows."""
        chosen = {"id": self.expected["node_id"], "clock": self.clock, **options}
        broker = Broker(
            data_path=self.path,
            http_address="127.0.0.1:0",
            sync_timeout=50 * MILLISECOND,
            queue_scan_interval=10 * MILLISECOND,
            disk_reserve=0,
            **chosen,
        )
        async with broker, NodeClient(broker.http_address) as node:
            yield broker, node

    def channels(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for name, topic in self.topics.items():
            for channel, state in topic["channels"].items():
                yield name, channel, state


def unpack(kind: str, folder: Path) -> DataPath:
    folder.mkdir()
    with tarfile.open(FIXTURES / f"data_path-{kind}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    expected = EXPECTED["data_path"][kind]
    return DataPath(kind, folder, expected, Then(expected["written"] + 60 * SECOND))


@pytest.fixture(params=KINDS)
def data_path(request: pytest.FixtureRequest, tmp_path: Path) -> DataPath:
    return unpack(request.param, tmp_path / "data")


@pytest.fixture
def clean(tmp_path: Path) -> DataPath:
    return unpack("clean", tmp_path / "data")


@pytest.fixture
def killed(tmp_path: Path) -> DataPath:
    return unpack("killed", tmp_path / "data")


# --- What a broker shows, in the form of expected.json ----------------------------------------------------------------


def show(body: bytes) -> str:
    """A body as make.py writes it down."""
    if len(body) <= 120 and body.isascii() and body.decode("ascii").isprintable():
        return body.decode("ascii")
    return f"sha256:{hashlib.sha256(body).hexdigest()}:{len(body)}"


async def until(condition: Callable[[], Any], what: str) -> Any:
    """What an async condition says as soon as it says something."""
    give_up = time.monotonic() + PATIENCE
    while not (found := await condition()):
        assert time.monotonic() < give_up, f"still not: {what}"
        await asyncio.sleep(0.01)
    return found


async def peek(node: NodeClient, topic: str, channel: str, state: Any, node_id: int | None) -> list[Message]:
    """Messages of a channel in one state, by their seqs. Their ids are those of this node, unless that is None."""
    page = await node.peek(topic, channel, state, limit=1000, shown=None)
    assert page.next is None
    found = []
    for message in page.messages:
        assert not message.damaged
        assert node_id is None or message.id == ident(node_id, message.seq)
        row: Message = {
            "body": show(message.body),
            "attempts": message.attempts,
            "seq": message.seq,
            "timestamp": message.timestamp,
        }
        if message.due is not None:
            row["due"] = message.due
        if message.dead is not None:
            row["dead"] = json.loads(msgspec.json.encode(message.dead))
        found.append(row)
    return sorted(found, key=lambda row: row["seq"])


def ident(node_id: int, seq: int) -> str:
    """The id of a message on the wire."""
    return f"{node_id << 54 | seq:016x}"


def same_but_due(found: list[Message], expected: list[Message]) -> bool:
    """Are these the same messages, and due within a second of each other?"""
    pairs = zip(found, expected, strict=False)
    return (
        len(found) == len(expected)
        and all({**a, "due": 0} == {**b, "due": 0} for a, b in pairs)
        and all(abs(a["due"] - b["due"]) < SECOND for a, b in zip(found, expected, strict=True))
    )


async def durable_log(node: NodeClient, topic: str) -> Any:
    async def durable() -> Any:
        info = await node.log_info(topic)
        return info if info.durable == info.end else None

    return await until(durable, f"the log of {topic} is durable")


async def read_log(node: NodeClient, topic: str) -> list[Message]:
    info = await durable_log(node, topic)
    rows = node.log_messages(topic, info.first, info.durable, epoch=info.epoch)
    return [{"body": show(row.body), "seq": row.seq, "timestamp": row.timestamp} async for row in rows]


async def check_channels(node: NodeClient, data_path: DataPath, *, check_ids: bool = True) -> None:
    chosen = data_path.expected["node_id"] if check_ids else None
    for topic, channel, state in data_path.channels():
        where = f"{topic}/{channel}"
        assert await peek(node, topic, channel, "ready", chosen) == state["ready"], where
        assert await peek(node, topic, channel, "in_flight", chosen) == [], where
        deferred = await peek(node, topic, channel, "deferred", chosen)
        assert same_but_due(deferred, state["deferred"]), f"{where}: {deferred}"


async def check(node: NodeClient, data_path: DataPath) -> None:
    """Everything that expected.json says is so."""
    info = await node.info(extended=True)
    assert info["flintmq"]["node"] == data_path.expected["node"]
    stats = {row["topic_name"]: row for row in (await node.stats())["topics"]}
    assert stats.keys() == data_path.topics.keys()
    for name, topic in data_path.topics.items():
        found = stats[name]
        assert found["paused"] == topic["paused"], name
        assert found["depth"] == topic["depth"], name
        assert (await node.topic_settings(name)).set == topic["set"], name
        channels = {row["channel_name"]: row for row in found["channels"] or []}
        assert channels.keys() == topic["channels"].keys(), name
        for channel, state in topic["channels"].items():
            where = f"{name}/{channel}"
            assert channels[channel]["paused"] == state["paused"], where
            assert channels[channel]["depth"] == len(state["ready"]), where
            assert channels[channel]["deferred_count"] == len(state["deferred"]), where
            assert channels[channel]["in_flight_count"] == 0, where
            assert (await node.channel_settings(name, channel)).set == state["set"], where
        if "log" in topic:
            log = await durable_log(node, name)
            assert (log.epoch, log.first) == (topic["log"]["epoch"], topic["log"]["first"]), name
            assert await read_log(node, name) == topic["log"]["messages"], name
            dead = {
                str(row.seq): json.loads(msgspec.json.encode(row.dead))
                for row in (await node.peek_topic(name, limit=1000)).messages
                if row.dead is not None
            }
            assert dead == topic.get("dead", {}), name
            readers = {row.reader: {"offset": row.offset, "lag": row.lag} for row in await node.positions(name)}
            assert readers == topic["readers"], name
    await check_channels(node, data_path)
    for topic_pattern, channel_pattern, values in data_path.expected["patterns"]:
        if channel_pattern:
            assert (await node.channel_settings(topic_pattern, channel_pattern)).set == values
        else:
            assert (await node.topic_settings(topic_pattern)).set == values


async def consume(broker: Broker, topic: str, channel: str, count: int) -> list[Message]:
    """So many messages, finished, by their seqs."""
    found: list[Message] = []
    if not count:
        return found
    async with (
        asyncio.timeout(PATIENCE),
        Consumer(topic, channel, nsqd=broker.tcp_address, max_in_flight=200, max_attempts=0) as consumer,
    ):
        async for message in consumer:
            with message:
                seq = int(message.id, 16) % (1 << 54)
                row = {"body": show(message.body), "attempts": message.attempts, "seq": seq}
                found.append({**row, "timestamp": message.timestamp})
            if len(found) == count:
                break
    return sorted(found, key=lambda row: row["seq"])


def delivered(messages: list[Message]) -> list[Message]:
    """These messages as their next delivery shows them."""
    keys = ("body", "seq", "timestamp")
    return [{**{key: row[key] for key in keys}, "attempts": row["attempts"] + 1} for row in messages]


async def is_empty(node: NodeClient, topic: str, channel: str, deferred: int) -> bool:
    (row,) = (await node.stats(topic, channel))["topics"]
    (found,) = row["channels"]
    return (found["depth"], found["in_flight_count"], found["deferred_count"]) == (0, 0, deferred)


# --- The tests --------------------------------------------------------------------------------------------------------


def test_the_fixtures_have_what_they_are_for() -> None:
    """An empty expectation would hold for everything."""
    for kind in KINDS:
        topics = EXPECTED["data_path"][kind]["topics"]
        billing = topics["orders"]["channels"]["billing"]
        assert len(billing["ready"]) > 50
        assert len(billing["deferred"]) == 2
        assert len(billing["was_in_flight"]) == 6
        assert {row["attempts"] for row in billing["ready"]} >= {0, 1}
        assert topics["orders"]["channels"]["archive"]["paused"]
        assert topics["paused"]["paused"]
        assert topics["paused"]["depth"] == 2
        assert topics["backlog"]["depth"] == 6
        assert {row["reason"] for row in topics["graveyard"]["dead"].values()} == {"timed out"}
        assert {row["reason"] for row in topics["jobs.workers.dead"]["dead"].values()} == {"requeued"}
        assert any(row["seq"] >= 1 << 53 for row in topics["jobs"]["channels"]["workers"]["ready"])
        old = topics["old"]
        assert all(row["seq"] < old["log"]["first"] for row in old["channels"]["c"]["deferred"])
        assert topics["log"]["readers"].keys() == {"nightly", "weekly"}
    assert len(EXPECTED["data_path"]["clean"]["topics"]["memory"]["channels"]["c"]["ready"]) == 2
    assert EXPECTED["data_path"]["clean"]["node_id"] != EXPECTED["data_path"]["killed"]["node_id"]


async def test_everything_is_found_and_again_after_restarts(data_path: DataPath) -> None:
    async with data_path.opened() as (_, node):
        await check(node, data_path)
    async with data_path.opened() as (broker, node):
        await check(node, data_path)
        broker.kill()
    async with data_path.opened() as (_, node):
        await check(node, data_path)


async def test_a_data_path_of_0_1_0_is_refused_by_it_once_it_was_opened(data_path: DataPath) -> None:
    """0.1.0 compares the number in format.json with 1 and says that the data path is newer."""
    about = data_path.path / "flintmq" / "format.json"
    before = msgspec.json.decode(about.read_bytes())
    assert before["format"] == 1
    async with data_path.opened():
        assert msgspec.json.decode(about.read_bytes()) == {**before, "format": FORMAT}
    assert FORMAT > 1


async def test_every_message_is_delivered_once_and_deferred_ones_when_they_are_due(data_path: DataPath) -> None:
    async with data_path.opened() as (broker, node):
        for topic, channel, state in data_path.channels():
            if state["paused"]:
                await node.unpause_channel(topic, channel)
            taken = await consume(broker, topic, channel, len(state["ready"]))
            assert taken == delivered(state["ready"]), f"{topic}/{channel}"
            deferred = len(state["deferred"])
            await until(lambda at=(topic, channel, deferred): is_empty(node, *at), f"{topic}/{channel} is empty")
    async with data_path.opened() as (broker, node):
        for topic, channel, state in data_path.channels():
            assert await is_empty(node, topic, channel, len(state["deferred"])), f"{topic}/{channel}"
        data_path.clock.advance(LONGEST_DELAY)
        for topic, channel, state in data_path.channels():
            taken = await consume(broker, topic, channel, len(state["deferred"]))
            assert taken == delivered(state["deferred"]), f"{topic}/{channel}"
    async with data_path.opened() as (_, node):
        for topic, channel, _state in data_path.channels():
            assert await is_empty(node, topic, channel, 0), f"{topic}/{channel}"


async def test_what_a_topic_holds_back_goes_to_its_channels(data_path: DataPath) -> None:
    async with data_path.opened() as (broker, node):
        await node.unpause_topic("paused")
        rows = await consume(broker, "paused", "c", 4)
        assert [row["body"] for row in rows] == ["before 1", "before 2", "after 1", "after 2"]
        await node.create_channel("backlog", "first")
        rows = await consume(broker, "backlog", "first", 5)
        assert [row["body"] for row in rows] == [f"waits {n}" for n in (1, 2, 3, 4, 5)]
        (late,) = await peek(node, "backlog", "first", "deferred", data_path.expected["node_id"])
        assert late["body"] == "waits for long"
        assert late["due"] > data_path.clock.wall() + 40 * 24 * 3600 * SECOND
    async with data_path.opened() as (_, node):
        (row,) = (await node.stats("paused"))["topics"]
        assert not row["paused"]
        assert await is_empty(node, "backlog", "first", 1)


async def test_keys_are_remembered(data_path: DataPath) -> None:
    """Those in segments, those in a file of their own, and that of a group."""
    async with data_path.opened() as (broker, node), Producer(broker.tcp_address) as producer:
        for n in range(60):
            await producer.publish("keys", b"a repeat", key=f"key-{n}")
        await producer.publish_many("keys", [b"a repeat", b"another"], key="group-key")
        await producer.defer("keys", b"a repeat", delay=1, key="deferred-key")
        await producer.publish("keys", b"a repeat", key="key-of-the-second-run")
        assert await read_log(node, "keys") == data_path.topics["keys"]["log"]["messages"]
        await producer.publish("keys", b"no repeat", key="key-of-another-version")
        assert (await read_log(node, "keys"))[-1]["body"] == "no repeat"


async def test_dead_letters_go_back(data_path: DataPath) -> None:
    waiting = {row["body"] for row in data_path.topics["jobs.workers.dead"]["channels"]["redrive"]["ready"]}
    before = data_path.topics["jobs"]["channels"]["workers"]["ready"]
    async with data_path.opened() as (broker, node):
        await node.redrive("jobs", "workers")

        async def ended() -> bool:
            return not (await node.redrive_progress("jobs", "workers")).running

        await until(ended, "the redrive")
        rows = await consume(broker, "jobs", "workers", len(before) + len(waiting))
        known = {row["seq"] for row in before}
        back = [row for row in rows if row["seq"] not in known]
        assert {row["body"] for row in back} == waiting
        assert {row["attempts"] for row in back} == {1}
        assert await is_empty(node, "jobs.workers.dead", "redrive", 0)
        # The channel's own limit, and its own topic for what it gives up.
        async with Consumer("jobs", "others", nsqd=broker.tcp_address) as consumer:
            (await anext(consumer)).requeue(0, backoff=False)

            async def died() -> bool:
                (row,) = (await node.stats("graveyard"))["topics"]
                return bool(row["depth"] == 3)

            await until(died, "one more dies")


async def test_the_log_goes_on_and_readers_and_channels_with_it(data_path: DataPath) -> None:
    expected = data_path.topics["log"]
    newest = max(row["seq"] for row in expected["log"]["messages"])
    first = expected["log"]["first"]
    async with data_path.opened() as (broker, node), Producer(broker.tcp_address) as producer:
        for n in range(3):
            await producer.publish("log", f"new {n}".encode())
        rows = await read_log(node, "log")
        assert rows[:-3] == expected["log"]["messages"]
        assert [row["body"] for row in rows[-3:]] == ["new 0", "new 1", "new 2"]
        assert rows[-3]["seq"] > newest
        assert (await node.position("log", "nightly")).lag == expected["readers"]["nightly"]["lag"] + 3
        moved = await node.set_position("log", "nightly", rows[50]["seq"])
        assert moved.lag == len(rows) - 50
        middle = rows[40]
        assert await node.log_offset("log", middle["timestamp"]) == middle["seq"]
        assert (await node.seek("log", "again", "earliest")).offset == first
        again = await consume(broker, "log", "again", len(rows))
        assert [row["seq"] for row in again] == [row["seq"] for row in rows]
    async with data_path.opened() as (_, node):
        assert await read_log(node, "log") == rows
        assert (await node.position("log", "nightly")).offset == rows[50]["seq"]


async def test_settings_have_effect(data_path: DataPath) -> None:
    async with data_path.opened() as (_, node):
        billing = await node.channel_settings("orders", "billing")
        assert billing.settings["msg-timeout"] == "10m0s"
        assert billing.source["msg-timeout"] == "live"
        printer = await node.channel_settings("orders.eu", "printer")
        assert (printer.settings["max-attempts"], printer.set) == (7, {})
        pattern = await node.topic_settings("orders.eu")
        assert (pattern.settings["retain-age"], pattern.settings["key-count"]) == ("168h0m0s", 5000)
        assert (await node.topic_settings("fsync")).settings["durability"] == "fsync"
        await node.set_topic_settings("orders", {"ttl": None})
    async with data_path.opened() as (_, node):
        assert (await node.topic_settings("orders")).set == {"max-messages": 100000, "limit-policy": "refuse"}


async def test_a_node_may_have_another_number(clean: DataPath) -> None:
    """A backlog can still be finished, under whatever ids it is delivered."""
    async with clean.opened(id=5) as (broker, node):
        await check_channels(node, clean, check_ids=False)
        for topic, channel in (("keeps", "c"), ("orders", "billing"), ("jobs", "workers")):
            state = clean.topics[topic]["channels"][channel]
            assert await consume(broker, topic, channel, len(state["ready"])) == delivered(state["ready"])
            deferred = len(state["deferred"])
            await until(lambda at=(topic, channel, deferred): is_empty(node, *at), f"{topic}/{channel} is empty")


async def test_an_mpub_that_was_cut_off_is_dropped_as_a_whole(killed: DataPath) -> None:
    """As after a power loss: the last segment has no footer yet, and the end of its last record is missing."""
    segment = sorted(killed.path.glob("flintmq/topics/cut@*/*.seg"))[-1]
    os.truncate(segment, segment.stat().st_size - 100)
    before, *group = killed.topics["cut"]["channels"]["c"]["ready"]
    assert len(group) == 6
    async with killed.opened() as (broker, node):
        assert await peek(node, "cut", "c", "ready", killed.expected["node_id"]) == [before]
        assert await consume(broker, "cut", "c", 1) == delivered([before])


async def test_the_command_opens_it_today(data_path: DataPath) -> None:
    """With the machine's own clock: whether a deferred message is due is then a question of the date."""
    command = [sys.executable, "-m", "flintmq", "nsqd", f"--data-path={data_path.path}", "--disk-reserve=0"]
    flags = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--broadcast-address=127.0.0.1"]
    node_id = data_path.expected["node_id"]
    process = await asyncio.create_subprocess_exec(
        *command, *flags, f"--node-id={node_id}", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        address = ""
        while not address:
            line = await process.stderr.readline()
            assert line, "nsqd ended"
            if match := re.search(r"HTTP: listening on (\S+)", line.decode()):
                address = match[1]
        async with NodeClient(address) as node:
            for topic, channel, state in data_path.channels():
                found = [
                    (row["seq"], row["body"], row["attempts"])
                    for kind in ("ready", "deferred")
                    for row in await peek(node, topic, channel, kind, node_id)
                ]
                rows = [*state["ready"], *state["deferred"]]
                assert sorted(found) == sorted((row["seq"], row["body"], row["attempts"]) for row in rows)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_a_backup_of_it_can_be_restored(data_path: DataPath, tmp_path: Path) -> None:
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    for arguments in (
        ["backup", "--data-path", str(data_path.path), str(backup)],
        ["restore", str(backup), "--data-path", str(restored)],
    ):
        command = [sys.executable, "-m", "flintmq", *arguments]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
        assert process.returncode == 0, errors
    async with data_path._replace(path=restored).opened() as (_, node):
        await check_channels(node, data_path)
