"""Settings of single topics and channels: where they come from, what counts before what, and that they have effect.

What they are set to shows in what clients see: refusals, deliveries, numbers of the stats. Clients are those of
``fakes``; HTTP and the journal are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import StartBroker
from hypothesis import given
from hypothesis import strategies as st

from flintmq.broker import backup
from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.settings import (
    APPLY_AT_ONCE,
    CHANNEL_SETTINGS,
    TOPIC_SETTINGS,
    ChannelSettings,
    Setting,
    TopicSettings,
)
from flintmq.broker.storage.disk import Disk
from flintmq.errors import OptionError, StartError
from flintmq.lookup.daemon import Lookupd
from flintmq.options import DURATION, HOUR, MILLISECOND, MINUTE, SECOND, NsqdOptions, NsqlookupdOptions, option_table
from support.fakes import Client, CountingDisk, FakeClock, dpub, pass_time, pub, quiet, replace_method, until
from support.http_client import Answer, HttpClient

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = (REPOSITORY / "docs" / "settings.md").read_text()

Tables = dict[str, Any]


class Config:
    """``/topic/config`` and ``/channel/config`` of a broker, asked over a connection."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def get(self, topic: str, channel: str = "") -> Any:
        answer = await self._http.get(_target(topic, channel))
        assert answer.status == 200, answer
        return answer.json

    async def put(self, topic: str, channel: str = "", /, **changes: Any) -> Any:
        answer = await self.try_put(topic, channel, **changes)
        assert answer.status == 200, answer
        return answer.json

    async def try_put(self, topic: str, channel: str = "", /, **changes: Any) -> Answer:
        body = msgspec.json.encode({key.replace("_", "-"): value for key, value in changes.items()})
        return await self._http.ask("PUT", _target(topic, channel), body)


def _target(topic: str, channel: str) -> str:
    path = f"/channel/config?topic={topic}&channel={channel}" if channel else f"/topic/config?topic={topic}"
    return path.replace("#", "%23")


@pytest.fixture
async def live(start_broker: StartBroker) -> AsyncIterator[tuple[Broker, Config]]:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with HttpClient.connect(broker.http_address) as http:
        yield broker, Config(http)


# --- What counts before what ------------------------------------------------------------------------------------------


def settings_of(tables: Tables, **options: Any) -> Any:
    """The settings of a broker that has these tables in its file; it is not started."""
    return Broker(topic=tables, **options).settings


def test_without_tables_everything_is_as_the_options_say() -> None:
    settings = settings_of({}, durability="fsync", max_topic_bytes=7, msg_timeout=3 * SECOND, max_req_timeout=MINUTE)
    assert settings.topic("t") == TopicSettings(
        durability="fsync",
        mem_queue_size=10_000,
        mem_queue_bytes=256 << 20,
        max_messages=0,
        max_bytes=7,
        limit_policy="refuse",
        publish_rate=0,
        max_defer=MINUTE,
    )
    assert settings.channel("t", "c") == ChannelSettings(
        msg_timeout=3 * SECOND, max_defer=MINUTE, delivery_rate=0, max_attempts=0, dead_letter_topic=""
    )


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        # The name itself before patterns, the one with more literal characters before the other.
        ({"*": 1, "orders.*": 2, "orders.new": 3}, 3),
        ({"*": 1, "orders.*": 2, "*.new": 3}, 2),
        ({"orders.*": 1, "o*rders.new": 2}, 2),
        ({"*": 1, "billing": 2}, 1),
        # Of equally many, fewer stars; then the order of the alphabet.
        ({"o*r*w": 1, "ord*": 2}, 2),
        ({"ord*": 1, "*new": 2, "*n*w": 3}, 2),
        ({"orders*new": 5}, 5),
        ({"rders.*": 1, "*rder": 2, "orders.new#ephemeral": 3}, 0),
        ({"orders.new*": 4}, 4),
    ],
)
def test_the_most_exact_name_counts(tables: dict[str, int], expected: int) -> None:
    settings = settings_of({name: {"max-messages": value} for name, value in tables.items()})
    assert settings.topic("orders.new").max_messages == expected


def test_each_key_is_looked_for_on_its_own() -> None:
    settings = settings_of(
        {"*": {"max-messages": 1, "max-bytes": 1, "ttl": "1s"}, "o*": {"max-bytes": 2, "ttl": "2s"}, "o": {"ttl": "3s"}}
    )
    found = settings.topic("o")
    assert (found.max_messages, found.max_bytes, found.ttl) == (1, 2, 3 * SECOND)
    assert settings.topic("x").ttl == SECOND


def test_of_a_channel_the_topic_is_compared_first() -> None:
    def table(**channels: int) -> Tables:
        return {"channel": {name.replace("_", "*"): {"max-attempts": value} for name, value in channels.items()}}

    settings = settings_of({"orders": table(_=1), "*": table(archive=2, _=3), "ord*": table(arch_=4, a_=5)})
    assert settings.channel("orders", "archive").max_attempts == 1
    assert settings.channel("ordinary", "archive").max_attempts == 4
    assert settings.channel("ordinary", "audit").max_attempts == 5
    assert settings.channel("other", "archive").max_attempts == 2
    assert settings.channel("other", "audit").max_attempts == 3


def test_a_pattern_is_for_whole_names_and_many_stars_take_no_longer() -> None:
    settings = settings_of({"a*" * 31 + "b": {"max-messages": 1}, "a.c": {"max-messages": 2}})
    assert settings.topic("a" * 64).max_messages == 0
    assert settings.topic("a" * 63 + "b").max_messages == 1
    assert settings.topic("abc").max_messages == 0


NAMES = st.text("ab*", min_size=1, max_size=4)


@given(st.dictionaries(NAMES, st.integers(1, 9)), st.text("ab", min_size=1, max_size=4))
def test_any_tables_come_to_what_the_rules_say(tables: dict[str, int], name: str) -> None:
    settings = settings_of({key: {"max-messages": value} for key, value in tables.items()})
    matching = [key for key in tables if fnmatchcase(name, key)]
    matching.sort(key=lambda key: ("*" in key, -len(key.replace("*", "")), key.count("*"), key))
    assert settings.topic(name).max_messages == (tables[matching[0]] if matching else 0)


async def test_what_is_set_live_counts_before_the_file(start_broker: StartBroker) -> None:
    tables = {"orders": {"max-messages": 1, "max-bytes": 1, "ttl": "1h"}, "o*": {"publish-rate": 5}}
    broker = await start_broker(http_address="127.0.0.1:0", topic=tables)
    async with HttpClient.connect(broker.http_address) as http:
        config = Config(http)
        await config.put("*", max_messages=2)
        await config.put("orders", max_bytes=3)
        found = await config.get("orders")
    assert found["settings"]["max-messages"] == 2
    assert found["settings"]["max-bytes"] == 3
    assert found["settings"]["ttl"] == "1h0m0s"
    assert found["set"] == {"max-bytes": 3}
    sources = found["source"]
    assert {key: sources[key] for key in ("max-messages", "max-bytes", "ttl", "publish-rate", "durability")} == {
        "max-messages": "live",
        "max-bytes": "live",
        "ttl": "file",
        "publish-rate": "file",
        "durability": "default",
    }
    assert found["settings"].keys() == sources.keys() == TOPIC_SETTINGS.keys()
    assert broker.topics["orders"].settings.max_bytes == 3


# --- Wrong values -----------------------------------------------------------------------------------------------------

WRONG_OF_A_TOPIC = [
    ({"retain": 5}, "retain: there is no such setting of a topic, only durability, mem-queue-size"),
    ({"max-attempts": 5}, "max-attempts: there is no such setting of a topic"),
    ({"ttl": "7d"}, 'ttl: unknown unit "d" in duration "7d"'),
    ({"ttl": "-1s"}, "ttl: must be at least 0s"),
    ({"ttl": 1.5}, "ttl: a float cannot be its value"),
    ({"max-messages": -1}, "max-messages: must be at least 0"),
    ({"max-messages": 2**63}, "max-messages: must be at most 9223372036854775807"),
    ({"max-messages": True}, "max-messages: a bool cannot be its value"),
    ({"max-messages": "many"}, 'max-messages: "many" is not a whole number'),
    ({"max-messages": [1]}, "max-messages: a list cannot be its value"),
    ({"durability": "paper"}, 'durability: "paper" is none of memory, os, fsync'),
    ({"new-channel": "first"}, 'new-channel: "first" is none of backlog, earliest, latest'),
    ({"ttl-action": "forget"}, 'ttl-action: "forget" is none of drop, dead-letter'),
    ({"max-defer": "1194h"}, "max-defer: must be at most 1193h2m47.295s"),
]
WRONG_OF_A_CHANNEL = [
    ({"ttl": "1s"}, "ttl: there is no such setting of a channel, only msg-timeout"),
    ({"channel": {}}, "channel: there is no such setting of a channel"),
    ({"msg-timeout": "0s"}, "msg-timeout: must be at least 1ns"),
    ({"msg-timeout": "16m"}, "msg-timeout: must be at most 15m0s, which is --max-msg-timeout"),
    ({"max-attempts": 65_536}, "max-attempts: must be at most 65535"),
    ({"dead-letter-topic": "a b"}, 'dead-letter-topic: "a b" is not a topic name'),
    ({"dead-letter-topic": 5}, "dead-letter-topic: a int cannot be its value"),
]


@pytest.mark.parametrize(("table", "text"), WRONG_OF_A_TOPIC)
def test_a_wrong_table_of_a_topic_is_refused_with_its_name_and_key(table: Tables, text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f'[topic."o*"] {text}')):
        settings_of({"x": {}, "o*": table})


@pytest.mark.parametrize(("table", "text"), WRONG_OF_A_CHANNEL)
def test_a_wrong_table_of_a_channel_is_refused_with_its_name_and_key(table: Tables, text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f'[topic."o*".channel."c"] {text}')):
        settings_of({"o*": {"max-messages": 5, "channel": {"c": table}}})


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"a b": {}}, '[topic."a b"] "a b" is neither a name nor a pattern of names'),
        ({"": {}}, '[topic.""] "" is neither'),
        ({"a" * 65: {}}, "is neither a name nor a pattern"),
        ({"a#b*": {}}, '"a#b*" is neither'),
        ({"a": 5}, '[topic."a"] must be a table'),
        ({"a": {"channel": 5}}, '[topic."a"] channel: write a table, such as [topic."a".channel."c"]'),
        ({"a": {"channel": {"c": 5}}}, '[topic."a".channel."c"] must be a table'),
        ({"a": {"channel": {"c?": {}}}}, '[topic."a".channel."c?"] "c?" is neither'),
    ],
)
def test_tables_that_are_none_are_refused(tables: Tables, text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        settings_of(tables)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[topic."orders.*"]\nretain-age = "7d"', '[topic."orders.*"] retain-age: unknown unit "d"'),
        ('[topic.orders.channel."x*"]\nttl = 5', '[topic."orders".channel."x*"] ttl: there is no such setting'),
        ("topic = 5", 'topic: write a table, such as [topic."orders"]'),
    ],
)
def test_nsqd_does_not_start_with_wrong_tables_and_says_where_they_are(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "nsqd.toml"
    path.write_text(text)
    flags = (f"--config={path}", f"--data-path={tmp_path}", "--tcp-address=127.0.0.1:0", "--http-address=")
    command = [sys.executable, "-m", "flintmq", "nsqd", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"FATAL: failed to load config file {path} - {reason}" in ended.stderr
    assert not (tmp_path / "flintmq").exists()


@pytest.mark.parametrize(("change", "text"), WRONG_OF_A_TOPIC)
async def test_a_wrong_change_of_a_topic_changes_nothing(
    live: tuple[Broker, Config], change: Tables, text: str
) -> None:
    broker, config = live
    topic = broker.topic("o")
    await config.put("o", max_messages=3)
    before = await config.get("o")
    answer = await config.try_put("o", publish_rate=5, **change)
    if change == {"max-messages": 2**63}:
        # JSON has no such numbers.
        text = "max-messages: "
    assert (answer.status, answer.message.startswith(f"INVALID_SETTING: {text}")) == (400, True), answer
    assert await config.get("o") == before
    assert topic.settings.publish_rate == 0


@pytest.mark.parametrize(("change", "text"), WRONG_OF_A_CHANNEL)
async def test_a_wrong_change_of_a_channel_changes_nothing(
    live: tuple[Broker, Config], change: Tables, text: str
) -> None:
    broker, config = live
    channel, _ = broker.topic("o").channel("c")
    before = await config.get("o", "c")
    answer = await config.try_put("o", "c", delivery_rate=5, **change)
    assert (answer.status, answer.message.startswith(f"INVALID_SETTING: {text}")) == (400, True), answer
    assert await config.get("o", "c") == before
    assert channel.settings.delivery_rate == 0


async def test_requests_that_make_no_sense_get_a_clear_error(live: tuple[Broker, Config]) -> None:
    broker, config = live
    broker.topic("o").channel("c")
    http = config._http
    for method in ("GET", "PUT"):
        for target, status, message in (
            ("/topic/config", 400, "MISSING_ARG_TOPIC"),
            ("/topic/config?topic=a+b", 400, "INVALID_TOPIC"),
            ("/topic/config?topic=", 400, "INVALID_TOPIC"),
            ("/topic/config?topic=x", 404, "TOPIC_NOT_FOUND"),
            ("/channel/config?topic=o", 400, "MISSING_ARG_CHANNEL"),
            ("/channel/config?topic=*&channel=%00", 400, "INVALID_ARG_CHANNEL"),
            ("/channel/config?topic=x+y&channel=c", 400, "INVALID_ARG_TOPIC"),
            ("/channel/config?topic=x&channel=c", 404, "TOPIC_NOT_FOUND"),
            ("/channel/config?topic=o&channel=x", 404, "CHANNEL_NOT_FOUND"),
        ):
            answer = await http.ask(method, target, b"{}" if method == "PUT" else None)
            assert (answer.status, answer.message) == (status, message), (method, target)
    for body in (b"", b"{", b"[]", b"5", b'{"ttl": }', b"\xff", b'{"ttl":1}x'):
        answer = await http.ask("PUT", "/topic/config?topic=o", body)
        assert answer.status == 400
        assert answer.message.startswith("INVALID_SETTING: the body must be a JSON object of settings"), body
    answer = await http.ask("PUT", "/topic/config?topic=o", b'{"nonsense": null}')
    assert (answer.status, answer.message.split(",")[0]) == (
        400,
        "INVALID_SETTING: nonsense: there is no such setting of a topic",
    )
    assert (await config.get("o"))["set"] == {}
    answer = await http.ask("PUT", "/topic/config?topic=o", b" " * 70_000)
    assert (answer.status, answer.message) == (413, "BODY_TOO_BIG")


# --- Looking at them, changing them -----------------------------------------------------------------------------------


async def test_values_are_shown_as_the_file_has_them(live: tuple[Broker, Config]) -> None:
    broker, config = live
    broker.topic("o").channel("c")
    found = await config.put(
        "o", durability="fsync", retain_age="168h", ttl=1500, ttl_action="dead-letter", max_bytes="0x10"
    )
    assert found == await config.get("o")
    assert found["set"] == {
        "durability": "fsync",
        "retain-age": "168h0m0s",
        "ttl": "1.5s",
        "ttl-action": "dead-letter",
        "max-bytes": 16,
    }
    assert found["settings"]["retain-age"] == "168h0m0s"
    assert found["settings"]["max-defer"] == "1h0m0s"
    assert found["settings"]["key-count"] == 1_000_000
    assert found["topic"] == "o" and "channel" not in found
    channel = await config.put("o", "c", dead_letter_topic="dead", msg_timeout="90s")
    assert (channel["topic"], channel["channel"]) == ("o", "c")
    assert channel["set"] == {"dead-letter-topic": "dead", "msg-timeout": "1m30s"}
    assert channel["settings"] == {
        "msg-timeout": "1m30s",
        "max-defer": "1h0m0s",
        "delivery-rate": 0,
        "max-attempts": 0,
        "dead-letter-topic": "dead",
    }
    assert broker.topics["o"].settings.ttl == 1500 * MILLISECOND


async def test_null_takes_a_live_value_away(live: tuple[Broker, Config]) -> None:
    broker, config = live
    topic = broker.topic("o")
    await config.put("*", max_messages=1)
    await config.put("o", max_messages=2, ttl="1s")
    found = await config.put("o", max_messages=None, max_bytes=None, publish_rate=3)
    assert found["set"] == {"ttl": "1s", "publish-rate": 3}
    assert topic.settings.max_messages == 1
    assert (await config.put("o", ttl=None, publish_rate=None))["set"] == {}
    await config.put("*", max_messages=None)
    assert topic.settings == TopicSettings.of(broker.options)


async def test_a_pattern_shows_what_such_names_get(live: tuple[Broker, Config]) -> None:
    _, config = live
    await config.put("orders.*", ttl="1s")
    await config.put("*", ttl="2s", max_bytes=5)
    await config.put("orders.new*", ttl="3s")
    found = await config.get("orders.*")
    assert found["set"] == {"ttl": "1s"}
    assert (found["settings"]["ttl"], found["settings"]["max-bytes"]) == ("1s", 5)
    assert (await config.get("billing.*"))["settings"]["ttl"] == "2s"
    await config.put("orders.*", "arch*", max_attempts=7)
    assert (await config.get("orders.*", "archive"))["settings"]["max-attempts"] == 7


async def test_a_change_reaches_those_that_are_there_and_those_that_come(live: tuple[Broker, Config]) -> None:
    broker, config = live
    there, elsewhere = broker.topic("orders.a"), broker.topic("billing")
    channel, _ = there.channel("archive")
    await config.put("orders.*", ttl="1s")
    await config.put("orders.*", "arch*", max_attempts=3)
    assert (there.settings.ttl, elsewhere.settings.ttl) == (SECOND, 0)
    assert channel.settings.max_attempts == 3
    later, _ = broker.topic("orders.b").channel("archive")
    assert (later.topic.settings.ttl, later.settings.max_attempts) == (SECOND, 3)
    assert there.channel("other")[0].settings.max_attempts == 0


async def test_options_that_change_are_the_new_defaults(broker: Broker) -> None:
    broker.settings.change(("o*",), {"max-bytes": 1})
    topic, (channel, _) = broker.topic("o"), broker.topic("o").channel("c")
    broker.change_options(max_topic_bytes=7, max_topic_messages=8, msg_timeout=9 * SECOND)
    assert (topic.settings.max_bytes, topic.settings.max_messages) == (1, 8)
    assert channel.settings.msg_timeout == 9 * SECOND
    with pytest.raises(OptionError, match="no such setting"):
        broker.change_options(topic={"o": {"nonsense": 1}})
    assert broker.options.topic == {}
    broker.change_options(topic={"o": {"max-messages": 5}})
    assert topic.settings.max_messages == 5


async def test_nothing_is_looked_up_per_message(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.settings.change(("t*",), {"ttl": "1h", "mem-queue-size": 5})
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 100)

    def looked_up(*_: Any) -> Any:
        raise AssertionError("settings were looked up")

    monkeypatch.setattr(broker.settings, "_resolve", looked_up)
    await producer.publish("t", b"one")
    await producer.publish_many("t", [b"two"] * 20)
    await producer.publish_later("t", b"three", 0)
    await until(lambda: len(consumer.messages) == 22)
    consumer.requeue(consumer.messages[0], 1)
    consumer.touch(consumer.messages[1])
    consumer.finish(*consumer.messages[1:])
    await quiet(broker)
    assert broker.topics["t"].channels["c"].in_flight_count == 0


# --- What must survive ------------------------------------------------------------------------------------------------


async def set_some(broker: Broker) -> None:
    broker.topic("orders").channel("archive")
    broker.topic("billing")
    change = broker.settings.change
    change(("orders",), {"ttl": "1h", "max-messages": 5})
    change(("orders", "archive"), {"max-attempts": 3})
    change(("orders", "a*"), {"delivery-rate": 4})
    change(("*",), {"retain-bytes": 6, "ttl": "1s"})
    change(("b*", "c*"), {"msg-timeout": "7s"})
    change(("billing",), {"max-bytes": 1})
    # Taken away again: that must survive too.
    change(("billing",), {"max-bytes": None})
    change(("gone*",), {"ttl": "1s"})
    change(("gone*",), {"ttl": None})


def assert_some(broker: Broker) -> None:
    orders, billing = broker.topics["orders"], broker.topics["billing"]
    assert (orders.settings.ttl, orders.settings.max_messages, orders.settings.retain_bytes) == (HOUR, 5, 6)
    assert (billing.settings.ttl, billing.settings.max_bytes) == (SECOND, 0)
    archive = orders.channels["archive"].settings
    assert (archive.max_attempts, archive.delivery_rate) == (3, 4)
    assert billing.channel("copy")[0].settings.msg_timeout == 7 * SECOND
    assert broker.settings.describe(("billing",))["set"] == broker.settings.describe(("gone*",))["set"] == {}


@pytest.mark.parametrize("end", ["stop", "crash", "crash after a snapshot"])
async def test_what_was_set_live_survives(start_broker: StartBroker, end: str) -> None:
    broker = await start_broker()
    await set_some(broker)
    if end == "crash after a snapshot":
        broker.journal._roll()
        await quiet(broker)
    broker.journal.flush()
    if end == "stop":
        await broker.stop()
    else:
        broker.kill()
    for _ in range(2):
        broker = await start_broker()
        assert_some(broker)
        broker.topics["billing"].delete_channel("copy")
        await quiet(broker)
        broker.kill()


@contextlib.asynccontextmanager
async def nsqd(data_path: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Config]]:
    """nsqd as a program of its own; killed at the end."""
    addresses = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", f"--data-path={data_path}")
    command = (sys.executable, "-m", "flintmq", "nsqd", *addresses, *flags)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        address = (await wait_for(process, r"HTTP: listening on (\S+)"))[1]
        async with HttpClient.connect(address) as http:
            yield process, Config(http)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def wait_for(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """The first line of its log that has this."""
    assert process.stderr is not None
    async for line in process.stderr:
        if found := re.search(pattern, line.decode()):
            return found
    raise AssertionError(f"it ended without {pattern}")


async def test_a_change_that_was_answered_survives_kill_9(tmp_path: Path) -> None:
    async with nsqd(tmp_path) as (process, config):
        await config._http.post("/topic/create?topic=orders")
        await config._http.post("/channel/create?topic=orders&channel=c")
        await config.put("orders", ttl="1h")
        await config.put("o*", "*", max_attempts=3)
        process.kill()
        await process.wait()
    async with nsqd(tmp_path) as (_, config):
        assert (await config.get("orders"))["set"] == {"ttl": "1h0m0s"}
        assert (await config.get("orders", "c"))["settings"]["max-attempts"] == 3


async def test_a_backup_has_them(start_broker: StartBroker, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    broker = await start_broker(data_path=tmp_path / "data")
    await set_some(broker)
    broker.journal.flush()
    await asyncio.to_thread(backup.make, tmp_path / "data", tmp_path / "backup")
    await asyncio.to_thread(backup.restore, tmp_path / "backup", tmp_path / "restored")
    assert_some(await start_broker(data_path=tmp_path / "restored"))


@pytest.mark.parametrize("crash", [False, True])
async def test_they_go_with_their_topic_or_channel_and_patterns_stay(start_broker: StartBroker, crash: bool) -> None:
    broker = await start_broker()
    await set_some(broker)
    broker.settings.change(("billing",), {"max-bytes": 9})
    broker.topics["orders"].delete_channel("archive")
    broker.delete_topic("billing")
    for _ in range(2):
        orders, billing = broker.topics["orders"], broker.topic("billing")
        again, _ = orders.channel("archive")
        assert (again.settings.max_attempts, again.settings.delivery_rate) == (0, 4)
        assert (orders.settings.ttl, billing.settings.max_bytes, billing.settings.retain_bytes) == (HOUR, 0, 6)
        await quiet(broker)
        broker.kill() if crash else await broker.stop()
        broker = await start_broker()
    broker.delete_topic("orders")
    orders = broker.topic("orders")
    assert (orders.settings.ttl, orders.channel("archive")[0].settings.delivery_rate) == (SECOND, 0)


async def test_a_topic_made_again_while_a_snapshot_is_taken_has_nothing_of_the_old_one(
    start_broker: StartBroker,
) -> None:
    broker = await start_broker()
    for number in range(120):
        broker.topic(f"t{number}")
        broker.settings.change((f"t{number}",), {"ttl": "1h"})
    broker.journal._roll()
    # Its first slice is taken, others follow in the next turns of the loop.
    for number in range(0, 120, 2):
        broker.delete_topic(f"t{number}")
        broker.topic(f"t{number}")
    broker.settings.change(("t2",), {"ttl": "2h"})
    await quiet(broker)
    broker.journal.flush()
    broker.kill()
    broker = await start_broker()
    expected = {f"t{number}": 0 if number % 2 == 0 else HOUR for number in range(120)} | {"t2": 2 * HOUR}
    assert {name: topic.settings.ttl for name, topic in broker.topics.items()} == expected


async def test_what_is_ephemeral_leaves_nothing_behind(start_broker: StartBroker) -> None:
    broker = await start_broker()
    broker.topic("t#ephemeral").channel("c")
    broker.topic("t").channel("c#ephemeral")
    broker.settings.change(("t#ephemeral",), {"ttl": "1s"})
    broker.settings.change(("t#ephemeral", "c"), {"max-attempts": 1})
    broker.settings.change(("t", "c#ephemeral"), {"max-attempts": 2})
    broker.settings.change(("t", "*#ephemeral"), {"delivery-rate": 3})
    assert broker.topics["t"].channels["c#ephemeral"].settings.max_attempts == 2
    await broker.stop()
    broker = await start_broker()
    assert broker.topic("t#ephemeral").settings.ttl == 0
    assert broker.topic("t#ephemeral").channel("c")[0].settings.max_attempts == 0
    channel, _ = broker.topic("t").channel("c#ephemeral")
    assert (channel.settings.max_attempts, channel.settings.delivery_rate) == (0, 3)


async def test_a_key_that_only_a_newer_version_knows_is_kept_and_can_be_taken_away(start_broker: StartBroker) -> None:
    broker = await start_broker()
    topic = broker.topic("t")
    broker.journal.note("settings", topic.incarnation, "", {"of-tomorrow": 5, "ttl": SECOND})
    await broker.stop()
    broker = await start_broker()
    assert broker.topics["t"].settings.ttl == SECOND
    assert broker.settings.describe(("t",))["set"] == {"ttl": "1s"}
    broker.settings.change(("t",), {"ttl": "2s"})
    await broker.stop()
    broker = await start_broker()
    assert broker.settings._live.get(("t",)) == {"of-tomorrow": 5, "ttl": 2 * SECOND}
    broker.settings.change(("t",), {"of-tomorrow": None})
    assert broker.settings._live.get(("t",)) == {"ttl": 2 * SECOND}


# --- They have effect at once -----------------------------------------------------------------------------------------


async def test_memory_is_given_back_when_less_of_it_may_be_used(broker: Broker) -> None:
    topic = broker.topic("t")
    topic.channel("c")
    producer = Client(broker)
    for number in range(20):
        await producer.publish("t", b"%d" % number + bytes(4000))
    assert topic.channels["c"].backend_depth == 0
    broker.settings.change(("t",), {"mem-queue-size": 5})
    assert topic.channels["c"].backend_depth >= 14
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 100)
    await until(lambda: len(consumer.messages) == 20)


async def test_an_ephemeral_channel_holds_what_its_topic_s_setting_says(broker: Broker) -> None:
    channel, _ = broker.topic("t").channel("c#ephemeral")
    broker.settings.change(("t",), {"mem-queue-size": 3})
    await Client(broker).publish_many("t", [b"x"] * 10)
    await quiet(broker)
    assert channel.depth == 3


async def test_a_limit_of_messages_holds_at_once_and_can_be_lifted(broker: Broker) -> None:
    topic = broker.topic("t")
    topic.channel("c")
    producer = Client(broker)
    await producer.publish_many("t", [b"x"] * 5)
    broker.settings.change(("t",), {"max-messages": 5})
    refused = Client(broker)
    assert b"limit of 5 messages" in await refused.ask(pub("t", b"x"))
    broker.settings.change(("t",), {"max-messages": 6})
    await producer.publish("t", b"x")
    assert b"limit of 6 messages" in await Client(broker).ask(pub("t", b"x"))
    # Another policy for the same limit, and a lower one: the oldest make room at once.
    broker.settings.change(("t",), {"limit-policy": "drop-oldest", "max-messages": 2})
    await quiet(broker)
    assert topic.channels["c"].depth == 2
    broker.settings.change(("t",), {"max-messages": None})
    assert topic.limits is None
    await producer.publish_many("t", [b"x"] * 10)
    assert topic.channels["c"].depth == 12


@pytest.mark.parametrize("count", [3, 41, 5_000])
@pytest.mark.parametrize("values", [{"max-messages": 2}, {"max-bytes": 100}])
async def test_the_first_limit_with_drop_oldest_drops_at_once(
    broker: Broker, values: dict[str, Any], count: int
) -> None:
    """Without any publish after it."""
    topic = broker.topic("t")
    topic.channel("c")
    await Client(broker).publish_many("t", [b"x" * 80] * count)
    await quiet(broker)
    broker.settings.change(("t",), {"limit-policy": "drop-oldest", **values})
    await quiet(broker)
    assert topic.channels["c"].depth <= 2


async def test_a_limit_of_bytes_counts_what_is_there_already(broker: Broker) -> None:
    for durability in ("os", "memory"):
        broker.settings.change((f"{durability}*",), {"durability": durability})
        name = f"{durability}-topic"
        broker.topic(name).channel("c")
        producer = Client(broker)
        await producer.publish_many(name, [bytes(1000)] * 50)
        broker.settings.change((name,), {"max-bytes": 40_000})
        assert b"limit of 40000 bytes" in await Client(broker).ask(pub(name, b"x")), durability
        broker.settings.change((name,), {"max-bytes": 80_000})
        await producer.publish(name, bytes(1000))


async def test_a_limit_reaches_producers_on_the_short_way(start_broker: StartBroker) -> None:
    broker = await start_broker()
    host, _, port = broker.tcp_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"  V2")
    try:
        for _ in range(5):
            writer.write(pub("t", b"x"))
            assert (await reader.readexactly(10))[8:] == b"OK"
        broker.settings.change(("t",), {"max-messages": 5})
        writer.write(pub("t", b"x"))
        assert b"limit of 5 messages" in await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_limit_reaches_those_who_are_looked_at_without_being_asked_to(start_broker: StartBroker) -> None:
    """Publishers of the last turn are read again, because their next publish may have come."""
    broker = await start_broker()
    host, _, port = broker.tcp_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"  V2")
        for _ in range(5):
            writer.write(pub("t", b"x"))
            assert (await reader.readexactly(10))[8:] == b"OK"
        lane = broker.lane(broker.topics["t"], "PUB")
        if lane is None or not lane._regulars:
            pytest.skip("there is no short way here")
        broker.settings.change(("t",), {"max-messages": 5})
        # The loop does not get to see that it came.
        writer.write(pub("t", b"x"))
        lane.run()
        assert broker.topics["t"].depth == 5
        assert b"limit of 5 messages" in await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_rates_of_publishing_and_delivery_hold_at_once(broker: Broker, clock: FakeClock) -> None:
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 100)
    await producer.publish_many("t", [b"x"] * 10)
    await until(lambda: len(consumer.messages) == 10)
    consumer.finish(*consumer.messages)
    broker.settings.change(("t",), {"publish-rate": 4})
    broker.settings.change(("t", "c"), {"delivery-rate": 3})
    await producer.publish_many("t", [b"y"] * 4)
    assert b"limit of 4 messages a second" in await Client(broker).ask(pub("t", b"x"))
    await quiet(broker)
    assert len(consumer.messages) == 13
    # Not limited any more: what waits goes out, though nobody publishes and no time passes.
    broker.settings.change(("t", "c"), {"delivery-rate": 0})
    await until(lambda: len(consumer.messages) == 14)
    broker.settings.change(("t",), {"publish-rate": None})
    await producer.publish_many("t", [b"z"] * 50)


async def test_the_same_rate_again_does_not_fill_the_bucket(broker: Broker) -> None:
    broker.topic("t")
    broker.settings.change(("t",), {"publish-rate": 2})
    await Client(broker).publish("t", b"x", b"x")
    broker.settings.change(("t",), {"publish-rate": 2, "ttl": "1h"})
    assert b"limit of 2 messages a second" in await Client(broker).ask(pub("t", b"x"))


async def test_a_channel_s_timeout_is_for_those_who_have_not_asked_for_one(broker: Broker, clock: FakeClock) -> None:
    broker.topic("t").channel("c")
    broker.settings.change(("t", "c"), {"msg-timeout": "10s"})
    modest, own = Client(broker), Client(broker)
    body = b'{"msg_timeout": 30000}'
    assert await own.ask(b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body) == b"OK"
    await modest.subscribe("t", "c", 1)
    await own.subscribe("t", "c", 1)
    await Client(broker).publish_many("t", [b"one", b"two"])
    await until(lambda: modest.messages and own.messages)
    channel = broker.topics["t"].channels["c"]
    await pass_time(broker, clock, 9)
    assert channel.timeout_count == 0
    await pass_time(broker, clock, 2)
    assert (channel.timeout_count, len(modest.messages)) == (1, 2)
    # It holds for the next deliveries of those who are connected, also by TOUCH.
    broker.settings.change(("t", "c"), {"msg-timeout": "20s"})
    modest.touch(modest.messages[-1])
    await pass_time(broker, clock, 18)
    assert channel.timeout_count == 1
    await pass_time(broker, clock, 3)
    assert channel.timeout_count == 3
    assert own.session.deliver_timeout == 30 * SECOND


async def test_only_the_first_identify_chooses_the_time_of_deliveries(broker: Broker) -> None:
    client = Client(broker)
    for body in (b"{}", b'{"msg_timeout": 30000}'):
        assert await client.ask(b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body) == b"OK"
    broker.topic("t").channel("c")
    broker.settings.change(("t", "c"), {"msg-timeout": "10s"})
    await client.subscribe("t", "c", 1)
    assert (client.session.deliver_timeout, client.session.msg_timeout) == (10 * SECOND, 30 * SECOND)


async def test_longest_delays_are_the_topic_s_and_the_channel_s(live: tuple[Broker, Config], clock: FakeClock) -> None:
    broker, config = live
    broker.settings.change(("t*",), {"max-defer": "2h"})
    broker.settings.change(("t*", "c"), {"max-defer": "5s"})
    producer, http = Client(broker), config._http
    # A topic that is not there yet has its settings all the same.
    assert await producer.ask(dpub("t1", 7_200_000, b"x")) == b"OK"
    assert await producer.ask(dpub("t1", 7_200_000, b"x")) == b"OK"
    answer = await Client(broker).ask(dpub("t2", 7_200_001, b"x"))
    assert answer == b"E_INVALID DPUB timeout 7200001 out of range 0-7200000"
    answer = await Client(broker).ask(dpub("other", 3_600_001, b"x"))
    assert answer == b"E_INVALID DPUB timeout 3600001 out of range 0-3600000"
    for topic, delay, status in (("t1", 7_200_000, 200), ("t1", 7_200_001, 400), ("o", 3_600_001, 400), ("o", 0, 200)):
        answers = [await http.post(f"/pub?topic={topic}&defer={delay}", b"x") for _ in range(2)]
        assert [answer.status for answer in answers] == [status] * 2, (topic, delay)
    # The same request, and another limit now.
    broker.settings.change(("t1",), {"max-defer": "1h"})
    assert (await http.post("/pub?topic=t1&defer=7200000", b"x")).message == "INVALID_DEFER"
    consumer = Client(broker)
    await consumer.subscribe("t3", "c", 1)
    await producer.publish("t3", b"x")
    await until(lambda: consumer.messages)
    consumer.requeue(consumer.messages[0], 3600)
    await pass_time(broker, clock, 6)
    assert len(consumer.messages) == 2


async def test_a_requeue_cannot_be_longer_than_the_journal_can_say(
    start_broker: StartBroker, live: tuple[Broker, Config], clock: FakeClock
) -> None:
    """Nor where an older version has let in a longer one."""
    broker, _ = live
    longest = "1193h2m47.295s"
    with pytest.raises(OptionError, match=f"max-defer: must be at most {longest}"):
        broker.settings.change(("t", "c"), {"max-defer": "1193h2m48s"})
    broker.topic("t").channel("c")
    too_long = 2_500_000 * 3600 * SECOND
    broker.journal.note("settings", broker.topics["t"].incarnation, "c", {"max-defer": too_long})
    broker.journal.flush()
    broker.kill()
    broker = await start_broker()
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 1)
    await Client(broker).publish("t", b"x")
    await until(lambda: consumer.messages)
    consumer.requeue(consumer.messages[0], too_long // SECOND)
    await quiet(broker)
    assert consumer.errors == []
    await broker.stop()
    broker = await start_broker()
    channel = broker.topics["t"].channels["c"]
    assert (channel.depth, len(channel.deferred)) == (0, 1)
    assert CHANNEL_SETTINGS["max-defer"].shown(channel.settings.max_defer) == longest


class SyncCounter(CountingDisk):
    def __init__(self) -> None:
        super().__init__()
        self.synced = 0

    def sync(self, fd: int) -> None:
        self.synced += 1
        super().sync(fd)


async def test_durability_changes_between_os_and_fsync_at_any_time(start_broker: StartBroker) -> None:
    disk = SyncCounter()
    broker = await start_broker(disk=disk)
    producer = Client(broker)
    await producer.publish("t", b"one")
    topic = broker.topics["t"]
    await quiet(broker)
    assert topic.log.durable < topic.log.end
    broker.settings.change(("t",), {"durability": "fsync"})
    await quiet(broker)
    # What was published before is brought to the device now.
    assert topic.log.durable == topic.log.end
    for number in range(5):
        await producer.publish("t", b"%d" % number)
        assert topic.log.durable == topic.log.end
    synced = disk.synced
    broker.settings.change(("t",), {"durability": "os"})
    await producer.publish("t", b"last")
    assert topic.log.durable < topic.log.end
    assert disk.synced == synced
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 100)
    await until(lambda: len(consumer.messages) == 7)


async def test_publishes_that_wait_for_a_sync_are_answered_when_none_is_needed_any_more(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(durability="fsync")
    producer = Client(broker)
    await producer.publish("t", b"one")
    topic = broker.topics["t"]
    replace_method(monkeypatch, topic.log.syncer, "sync", lambda *_: None)
    producer.send(pub("t", b"two"))
    await quiet(broker)
    assert producer.responses == []
    broker.settings.change(("t",), {"durability": "os"})
    await until(lambda: producer.responses == [b"OK"])


@pytest.mark.parametrize(("before", "after"), [("os", "memory"), ("memory", "os"), ("memory", "fsync")])
async def test_to_and_from_memory_only_an_empty_topic_changes(
    start_broker: StartBroker, before: str, after: str
) -> None:
    broker = await start_broker(durability=before)
    topic = broker.topic("t")
    consumer, producer = Client(broker), Client(broker)

    def refused() -> bool:
        was = broker.settings.describe(("t",))
        with pytest.raises(OptionError, match="durability: topic t holds messages"):
            broker.settings.change(("t*",), {"durability": after, "ttl": "1s"})
        assert broker.settings.describe(("t",)) == was
        return topic.log.durability == before

    await producer.publish("t", b"one")
    assert refused()
    await consumer.subscribe("t", "c", 10)
    await until(lambda: consumer.messages)
    assert refused()
    consumer.requeue(consumer.messages[0], 5)
    await quiet(broker)
    assert refused()
    topic.channels["c"].empty()
    broker.settings.change(("t*",), {"durability": after})
    assert topic.log.durability == topic.settings.durability == after
    await producer.publish("t", b"two")
    await until(lambda: b"two" in consumer.bodies)
    consumer.finish(consumer.messages[-1])
    await producer.publish("t", b"three")
    await broker.stop()
    again = await start_broker(durability=before)
    assert again.topics["t"].log.durability == after
    late = Client(again)
    await late.subscribe("t", "c", 10)
    await until(lambda: late.bodies)
    assert late.bodies == [b"three"]


async def test_a_topic_that_was_emptied_into_os_loses_nothing_in_a_crash(start_broker: StartBroker) -> None:
    broker = await start_broker(durability="memory")
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 10)
    await producer.publish("t", b"one", b"two")
    await until(lambda: len(consumer.messages) == 2)
    consumer.finish(*consumer.messages)
    await quiet(broker)
    broker.settings.change(("t",), {"durability": "os"})
    consumer.ready(0)
    await producer.publish("t", b"three")
    broker.journal.flush()
    broker.kill()
    again = await start_broker(durability="memory")
    late = Client(again)
    await late.subscribe("t", "c", 10)
    await until(lambda: late.bodies)
    assert late.bodies == [b"three"]


async def test_a_file_that_asks_for_too_much_at_once_is_followed_as_far_as_possible(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await start_broker()
    await Client(broker).publish("t", b"one")
    broker.change_options(topic={"t": {"durability": "memory", "ttl": "1h"}})
    topic = broker.topics["t"]
    assert (topic.settings.durability, topic.log.durability, topic.settings.ttl) == ("os", "os", HOUR)
    assert "its durability stays as it was" in caplog.text
    assert broker.settings.describe(("t",))["settings"]["durability"] == "os"
    # Other changes are not held up by it.
    broker.settings.change(("t",), {"max-messages": 9})
    assert (topic.settings.durability, topic.settings.max_messages) == ("os", 9)
    assert broker.topic("other").log.durability == "os"


async def test_a_channel_of_a_topic_with_fsync_is_on_the_device_before_its_answer(start_broker: StartBroker) -> None:
    broker = await start_broker(topic={"safe*": {"durability": "fsync"}}, http_address="127.0.0.1:0")
    for subscribe in (True, False):
        if subscribe:
            await Client(broker).subscribe("safe", "one")
        else:
            async with HttpClient.connect(broker.http_address) as http:
                assert (await http.post("/channel/create?topic=safe&channel=two")).status == 200
        assert broker.journal.synced == broker.journal.noted


# --- Declared ---------------------------------------------------------------------------------------------------------


async def test_tables_with_a_name_are_there_from_the_start(start_broker: StartBroker) -> None:
    tables: Tables = {
        "orders": {"channel": {"archive": {"max-attempts": 3}, "audit": {}, "x*": {}, "e#ephemeral": {}}},
        "billing": {},
        "log.*": {"ttl": "1h", "channel": {"all": {}}},
        "fleeting#ephemeral": {},
    }
    broker = await start_broker(topic=tables)
    assert {name: set(topic.channels) for name, topic in broker.topics.items()} == {
        "orders": {"archive", "audit"},
        "billing": set(),
    }
    assert broker.topics["orders"].channels["archive"].settings.max_attempts == 3
    await Client(broker).publish("orders", b"first")
    for channel in ("archive", "audit"):
        consumer = Client(broker)
        await consumer.subscribe("orders", channel, 1)
        await until(lambda consumer=consumer: consumer.bodies == [b"first"])
    # Deleted, they are gone until the next start.
    broker.topics["orders"].delete_channel("audit")
    broker.delete_topic("billing")
    broker.change_options(log_level="debug")
    assert set(broker.topics) == {"orders"}
    await broker.stop()
    again = await start_broker(topic=tables)
    assert set(again.topics["orders"].channels) == {"archive", "audit"}
    assert again.topics["orders"].channels["archive"].depth == 1
    assert "billing" in again.topics


async def test_a_declared_topic_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    class NoFolders(Disk):
        def make_folder(self, path: Path) -> None:
            if "orders" in path.name:
                raise OSError(28, "No space left on device")
            super().make_folder(path)

    broker = Broker(data_path=tmp_path, disk=NoFolders(), topic={"orders": {}}, disk_reserve=0)
    with pytest.raises(StartError, match="no space left on device"):
        await broker.start()


async def test_nsqlookupd_is_told_and_asked_about_declared_topics(start_broker: StartBroker, tmp_path: Path) -> None:
    options = NsqlookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", broadcast_address="127.0.0.1")
    (tmp_path / "other").mkdir()
    async with Lookupd(options) as lookupd:
        at = {"nsqlookupd_tcp_addresses": (lookupd.tcp_address,), "http_address": "127.0.0.1:0"}
        other = await start_broker(broadcast_address="q2", data_path=tmp_path / "other", **at)
        other.topic("orders").channel("elsewhere")

        async def registered() -> dict[str, list[str]]:
            async with HttpClient.connect(lookupd.http_address) as http:
                answers = [(await http.get(f"/{kind}?topic=orders")).json for kind in ("channels", "topics")]
            return {"channels": sorted(answers[0].get("channels", [])), "topics": answers[1]["topics"]}

        async def eventually(**expected: list[str]) -> None:
            for _ in range(10_000):
                if await registered() == expected:
                    return
                await asyncio.sleep(0.005)
            raise AssertionError(await registered())

        await eventually(channels=["elsewhere"], topics=["orders"])
        broker = await start_broker(broadcast_address="q1", topic={"orders": {"channel": {"archive": {}}}}, **at)
        await Client(broker).publish("orders", b"first")
        await eventually(channels=["archive", "elsewhere"], topics=["orders"])
        # The first message waited for the channel that only the other node had.
        channels = broker.topics["orders"].channels
        await until(lambda: channels["archive"].depth == 1)
        assert channels["elsewhere"].depth == 1


# --- The file again ---------------------------------------------------------------------------------------------------


async def test_a_reload_reads_the_tables_again_and_only_good_ones(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nsqd.toml"
    path.write_text('[topic."o*"]\nttl = "1h"\n')
    broker = await start_broker(config=str(path), topic={"o*": {"ttl": "1h"}})
    topic = broker.topic("orders")
    broker.settings.change(("orders",), {"max-bytes": 5})
    path.write_text('[topic."o*"]\nttl = "2h"\n[topic.declared.channel.c]\nmax-attempts = 3\n')
    broker.reload()
    await until(lambda: topic.settings.ttl == 2 * HOUR)
    assert topic.settings.max_bytes == 5
    await until(lambda: "declared" in broker.topics)
    assert broker.topics["declared"].channels["c"].settings.max_attempts == 3
    for text, reason in (
        ('[topic."o*"]\nttl = "3x"', f'{path} - [topic."o*"] ttl: unknown unit'),
        ("[topic", "failed to load config file"),
        ("topic = 1", "topic: write a table"),
    ):
        caplog.clear()
        path.write_text(text)
        broker.reload()
        await until(lambda: "they stay as they were" in caplog.text)
        assert reason in caplog.text
        assert topic.settings.ttl == 2 * HOUR
    path.unlink()
    caplog.clear()
    broker.reload()
    await until(lambda: "they stay as they were" in caplog.text)
    path.write_text("")
    broker.reload()
    await until(lambda: topic.settings.ttl == 0)
    assert "declared" in broker.topics


async def test_sighup_reads_them_again(tmp_path: Path) -> None:
    path = tmp_path / "nsqd.toml"
    path.write_text('[topic.orders]\nttl = "1h"\n')
    async with nsqd(tmp_path, f"--config={path}") as (process, config):
        found = await config.get("orders")
        assert (found["settings"]["ttl"], found["source"]["ttl"]) == ("1h0m0s", "file")
        path.write_text('[topic.orders]\nttl = "2h"\n')
        process.send_signal(signal.SIGHUP)
        await wait_for(process, "SETTINGS: the tables of .* were read again")
        assert (await config.get("orders"))["settings"]["ttl"] == "2h0m0s"


# --- Lost clients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["lost", "closed", "after CLS", "missed heartbeats"])
async def test_what_a_lost_client_held_comes_to_another_at_once(start_broker: StartBroker, way: str) -> None:
    broker = await start_broker(requeue_on_disconnect=True)
    first, second, producer = Client(broker), Client(broker), Client(broker)
    await first.subscribe("t", "c", 10)
    await producer.publish_many("t", [b"a", b"b", b"c", b"d"])
    await until(lambda: len(first.messages) == 4)
    first.finish(first.messages[0])
    # One that is in flight for the second time, and one that was touched.
    first.requeue(first.messages[1])
    await until(lambda: len(first.messages) == 5)
    first.touch(first.messages[2])
    await second.subscribe("t", "c", 2)
    channel = broker.topics["t"].channels["c"]
    assert (channel.in_flight_count, channel.depth) == (3, 0)
    if way == "after CLS":
        first.send(b"CLS\n")
        first.end_input()
    elif way == "missed heartbeats":
        first.session.drop()
    elif way == "closed":
        first.end_input()
    else:
        first.hang_up()
    await until(lambda: len(second.messages) == 2)
    assert (channel.in_flight_count, channel.depth, channel.timeout_count) == (2, 1, 0)
    # The one that it requeued itself, and the three that its end requeued.
    assert channel.requeue_count == 4
    second.finish(*second.messages)
    await until(lambda: len(second.messages) == 3)
    second.finish(second.messages[-1])
    assert {message.body: message.attempts for message in second.messages} == {b"b": 3, b"c": 2, b"d": 2}
    await quiet(broker)
    assert (channel.in_flight_count, channel.depth) == (0, 0)


async def test_others_keep_what_they_hold_when_one_is_lost(start_broker: StartBroker) -> None:
    broker = await start_broker(requeue_on_disconnect=True)
    clients = [Client(broker) for _ in range(3)]
    for client in clients:
        await client.subscribe("t", "c", 2)
    await Client(broker).publish_many("t", [b"%d" % number for number in range(6)])
    await until(lambda: all(len(client.messages) == 2 for client in clients))
    clients[0].hang_up()
    channel = broker.topics["t"].channels["c"]
    await until(lambda: channel.depth == 2)
    assert channel.in_flight_count == 4
    for client in clients[1:]:
        client.finish(*client.messages)
    await until(lambda: sum(len(client.messages) for client in clients[1:]) == 6)
    assert all(client.errors == [] for client in clients[1:])


async def test_without_the_option_it_waits_for_its_timeout(broker: Broker, clock: FakeClock) -> None:
    first, second = Client(broker), Client(broker)
    await first.subscribe("t", "c", 10)
    await Client(broker).publish("t", b"a")
    await until(lambda: first.messages)
    await second.subscribe("t", "c", 10)
    first.hang_up()
    await quiet(broker)
    assert second.messages == []
    await pass_time(broker, clock, 61)
    assert [message.attempts for message in second.messages] == [2]


@pytest.mark.parametrize("requeue", [False, True])
async def test_the_end_of_the_broker_is_no_lost_client(start_broker: StartBroker, requeue: bool) -> None:
    broker = await start_broker(requeue_on_disconnect=requeue)
    first, second = Client(broker), Client(broker)
    await first.subscribe("t", "c", 1)
    await second.subscribe("t", "c", 1)
    await Client(broker).publish_many("t", [b"a", b"b", b"c"])
    await until(lambda: first.messages and second.messages)
    await broker.stop()
    again = await start_broker(requeue_on_disconnect=requeue)
    consumer = Client(again)
    await consumer.subscribe("t", "c", 10)
    await until(lambda: len(consumer.messages) == 3)
    assert sorted(message.attempts for message in consumer.messages) == [1, 2, 2]


async def test_a_killed_socket_gives_its_messages_back_and_a_crash_after_it_keeps_them(
    start_broker: StartBroker,
) -> None:
    broker = await start_broker(requeue_on_disconnect=True)
    host, _, port = broker.tcp_address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"  V2SUB t c\nRDY 100\n")
    await until(lambda: "t" in broker.topics and broker.topics["t"].channels)
    await Client(broker).publish_many("t", [b"%d" % number for number in range(50)])
    channel = broker.topics["t"].channels["c"]
    await until(lambda: channel.in_flight_count == 50)
    writer.transport.abort()
    await until(lambda: channel.depth == 50)
    await quiet(broker)
    broker.journal.flush()
    broker.kill()
    again = await start_broker()
    consumer = Client(again)
    await consumer.subscribe("t", "c", 100)
    await until(lambda: len(consumer.messages) == 50)
    assert {message.attempts for message in consumer.messages} == {2}


# --- The document -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "table"),
    [("Settings of a topic", TOPIC_SETTINGS), ("Settings of a channel", CHANNEL_SETTINGS)],
    ids=["topic", "channel"],
)
def test_every_setting_is_in_the_document(title: str, table: dict[str, Setting]) -> None:
    section = DOCUMENT.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    flags = {entry.key: flag for flag, entry in option_table(NsqdOptions).items()}
    assert [row[0] for row in rows] == [f"`{key}`" for key in table]
    for row, entry in zip(rows, table.values(), strict=True):
        if entry.option is not None:
            assert row[1] == f"`--{flags[entry.option]}`"
        else:
            assert row[1] == (f"`{entry.kind.to_text(entry.default)}`" if entry.default != "" else "empty")
        assert row[2] == entry.help


def test_every_option_that_a_setting_takes_the_place_of_is_of_its_kind() -> None:
    options = {entry.key: entry for entry in option_table(NsqdOptions).values()}
    for table, settings in ((TOPIC_SETTINGS, TopicSettings), (CHANNEL_SETTINGS, ChannelSettings)):
        assert [entry.field for entry in table.values()] == [field.name for field in dataclasses.fields(settings)]
        for entry in table.values():
            if entry.option is not None:
                assert entry.kind == options[entry.option].kind
                assert options[entry.option].minimum in (None, entry.minimum)
            elif entry.kind is not DURATION:
                assert entry.read(entry.default) == entry.default


def test_the_examples_of_the_document_are_read() -> None:
    examples = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert examples
    for example in examples:
        settings_of(tomllib.loads(example)["topic"])


async def test_a_pattern_of_many_channels_is_applied_in_slices(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker()
    for number in range(900):
        broker.topic(f"t{number % 3}").channel(f"c{number}")
    await quiet(broker)
    turn = 0
    turns: Counter[int] = Counter()
    change = Channel.change_settings

    def counted(self: Channel, settings: Any) -> None:
        turns[turn] += 1
        change(self, settings)

    monkeypatch.setattr(Channel, "change_settings", counted)
    applied: list[int] = []
    broker.settings.change(("t*", "*"), {"max-attempts": 3})
    broker.settings.when_applied(lambda: applied.append(turn))
    while not applied:
        turn += 1
        if turn == 2:
            # A later one is not overtaken, and what is new has it at once.
            broker.settings.change(("t*", "*"), {"max-attempts": 4})
            assert broker.topic("t0").channel("new")[0].settings.max_attempts == 4
        await asyncio.sleep(0)
    assert max(turns.values()) <= 2 * APPLY_AT_ONCE < 900
    found = [c.settings.max_attempts for topic in broker.topics.values() for c in topic.channels.values()]
    assert found == [4] * 901
