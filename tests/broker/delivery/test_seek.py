"""Sending a channel back or forward in its topic's log, and where a new channel starts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.storage import journal as journal_module
from flintmq.protocol.wire import Message
from support.fakes import SECOND, Client, FakeClock, pass_time, quiet, until
from support.http_client import Answer, HttpClient
from support.simdisk import PowerLoss, SimDisk, settled

HOUR = 3600.0
SMALL: dict[str, Any] = {
    "http_address": "127.0.0.1:0",
    "max_bytes_per_file": 20_000,
    "mem_queue_size": 50,
    "sync_timeout": 3600 * SECOND,
}


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker(**SMALL)


@pytest.fixture
async def http(broker: Broker) -> AsyncIterator[HttpClient]:
    async with HttpClient.connect(broker.http_address) as client:
        yield client


def retaining(broker: Broker, **settings: Any) -> Topic:
    """A topic that keeps its files."""
    topic = broker.topic("t")
    topic.settings = dataclasses.replace(topic.settings, retain_bytes=1 << 40, **settings)
    return topic


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [(b"%d " % number).ljust(100, b".") for number in range(start, start + count)]


async def consumer_of(broker: Broker, ready: int = 500, channel: str = "c") -> Client:
    consumer = Client(broker)
    await consumer.subscribe("t", channel, ready)
    return consumer


async def taken(consumer: Client, count: int) -> list[Message]:
    await until(lambda: len(consumer.messages) >= count)
    messages = consumer.messages
    consumer.take()
    assert len(messages) == count
    return messages


async def consumed(broker: Broker, count: int = 300) -> tuple[Topic, Client, list[bytes]]:
    """A topic that keeps its files, all of it delivered and finished."""
    topic = retaining(broker)
    consumer = await consumer_of(broker)
    bodies = numbered(count)
    producer = Client(broker)
    for i in range(0, count, 50):
        await producer.publish_many("t", bodies[i : i + 50])
    consumer.finish(*await taken(consumer, count))
    await quiet(broker)
    broker.turns.housekeeping()
    for _ in range(3):
        broker.upkeep.sync()
        await quiet(broker)
    assert len(topic.log.segments) > 1 and not topic.log.in_memory(topic.log.first)
    return topic, consumer, bodies


async def seek(http: HttpClient, to: object) -> Answer:
    return await http.post(f"/channel/seek?topic=t&channel=c&to={to}")


# --- To where ---------------------------------------------------------------------------------------------------------


async def test_earliest_delivers_everything_again(broker: Broker, http: HttpClient) -> None:
    topic, consumer, bodies = await consumed(broker)
    consumer.ready(0)
    answer = await seek(http, "earliest")
    assert answer.json == {"topic": "t", "channel": "c", "offset": topic.log.first, "messages": 300}
    consumer.ready(500)
    messages = await taken(consumer, 300)
    assert [message.body for message in messages] == bodies
    assert {message.attempts for message in messages} == {1}, "it is a first delivery"
    consumer.finish(*messages)
    assert consumer.errors == []
    assert topic.channels["c"].depth == 0


async def test_latest_skips_all_that_waits(broker: Broker, http: HttpClient) -> None:
    topic = retaining(broker)
    topic.channel("c")
    await Client(broker).publish_many("t", numbered(300))
    answer = await seek(http, "latest")
    assert answer.json == {"topic": "t", "channel": "c", "offset": topic.log.end, "messages": 0}
    consumer = await consumer_of(broker)
    await Client(broker).publish("t", b"new")
    assert [message.body for message in await taken(consumer, 1)] == [b"new"]
    assert (await seek(http, topic.log.end + 5)).json["offset"] == topic.log.end, "beyond the end is the end"


async def test_an_offset_or_a_time_may_be_given(broker: Broker, http: HttpClient, clock: FakeClock) -> None:
    topic = retaining(broker)
    topic.channel("c")
    producer = Client(broker)
    for number in range(10):
        await producer.publish_many("t", numbered(30, number * 30))
        clock.advance(60)
    first = topic.log.first
    assert (await seek(http, first + 77)).json["messages"] == 223
    # Where the test's clock begins, and four minutes and a bit later.
    assert (await seek(http, "2023-11-14T22:17:50Z")).json["offset"] == first + 150
    assert (await seek(http, "2023-11-14T22:17:20Z")).json["offset"] == first + 120
    assert (await seek(http, "2023-11-14T00:00:00Z")).json["offset"] == first
    assert (await seek(http, "2030-01-01T00:00:00Z")).json["messages"] == 0
    assert (await seek(http, first)).json["messages"] == 300


async def test_seeking_into_a_gap_goes_on_behind_it(start_broker: StartBroker) -> None:
    broker = await start_broker(**SMALL)
    topic = retaining(broker)
    topic.channel("c")
    await Client(broker).publish_many("t", numbered(10))
    middle = topic.log.end + 1_000
    broker.upkeep.sync()
    await quiet(broker)
    broker.kill()
    broker = await start_broker(**SMALL)
    topic = retaining(broker)
    await Client(broker).publish_many("t", numbered(10, 10))
    async with HttpClient.connect(broker.http_address) as http:
        answer = await seek(http, middle)
        assert (answer.json["offset"], answer.json["messages"]) == (topic.log.end - 10, 10)
        assert (await seek(http, "earliest")).json["messages"] == 20
    consumer = await consumer_of(broker)
    assert [message.body for message in await taken(consumer, 20)] == numbered(20)


@pytest.mark.parametrize(
    ("target", "status", "code"),
    [
        ("topic=t&channel=c", 400, "MISSING_ARG_TO"),
        ("topic=t&channel=c&to=soon", 400, "INVALID_ARG_TO"),
        ("topic=t&channel=c&to=1", 410, "GONE"),
        ("topic=t&channel=nothing&to=latest", 404, "CHANNEL_NOT_FOUND"),
        ("topic=nothing&channel=c&to=latest", 404, "TOPIC_NOT_FOUND"),
        ("topic=t&to=latest", 400, "MISSING_ARG_CHANNEL"),
        ("topic=t&channel=e%23ephemeral&to=latest", 400, "NO_LOG"),
        ("topic=t%23ephemeral&channel=c&to=latest", 400, "NO_LOG"),
    ],
)
async def test_what_cannot_be_is_refused(broker: Broker, http: HttpClient, target: str, status: int, code: str) -> None:
    for name in ("t", "t#ephemeral"):
        broker.topic(name).channel("c")
    broker.topic("t").channel("e#ephemeral")
    answer = await http.post(f"/channel/seek?{target}")
    assert (answer.status, answer.message.partition(":")[0]) == (status, code)


# --- What becomes of what is there ------------------------------------------------------------------------------------


async def test_what_is_in_flight_is_taken_back(broker: Broker) -> None:
    topic = retaining(broker)
    consumer = await consumer_of(broker, 10)
    await Client(broker).publish_many("t", numbered(30))
    held = await taken(consumer, 10)
    consumer.requeue(held[0], HOUR)
    consumer.touch(held[1])
    consumer.ready(0)
    topic.channels["c"].seek(topic.log.first + 5)
    channel = topic.channels["c"]
    assert (channel.depth, channel.in_flight_count, len(channel.deferred)) == (25, 0, 0)
    assert consumer.session.in_flight == 0
    consumer.finish(held[2])
    assert consumer.errors[-1].startswith(b"E_FIN_FAILED")
    consumer.take()
    consumer.ready(100)
    messages = await taken(consumer, 25)
    assert [message.body for message in messages] == numbered(25, 5)
    consumer.finish(*messages)
    assert consumer.errors == [] and channel.depth == channel.in_flight_count == 0


async def test_a_deferred_message_whose_time_has_not_come_stays_deferred(
    broker: Broker, http: HttpClient, clock: FakeClock
) -> None:
    retaining(broker)
    consumer = await consumer_of(broker)
    producer = Client(broker)
    await producer.publish("t", b"one")
    await producer.publish_later("t", b"soon", 60)
    await producer.publish_later("t", b"late", HOUR)
    await producer.publish("t", b"two")
    consumer.finish(*await taken(consumer, 2))
    await pass_time(broker, clock, 61)
    consumer.finish(*await taken(consumer, 1))
    answer = await seek(http, "earliest")
    assert (await taken(consumer, 3)) and answer.status == 200
    assert b"late" not in consumer.bodies
    await pass_time(broker, clock, HOUR)
    await until(lambda: b"late" in consumer.bodies)
    assert consumer.bodies.count(b"late") == 1


async def test_messages_for_this_channel_alone_stay(broker: Broker) -> None:
    """They are not in the log: what a seek drops of them would be gone."""
    topic = retaining(broker)
    channel, _ = topic.channel("c")
    await Client(broker).publish_many("t", numbered(20))
    record = bytearray(b"\0\0\0\5mine!")
    side = topic.side_log()
    for attempts in (1, 4, 1):
        place = side.append(
            record, 0, 9, 1, broker.clock.wall(), attempts=attempts, extra=channel.id.to_bytes(4, "big")
        )
        side.write_all()
        channel.side.add(place, place + 1)
    consumer = await consumer_of(broker, 2)
    held = await taken(consumer, 2)
    assert [message.body for message in held] == [b"mine!"] * 2
    consumer.ready(0)
    consumer.requeue(held[0], HOUR)
    channel.seek(topic.log.first)
    assert len(channel.deferred) == 1, "put back for later is put back for later"
    consumer.ready(100)
    await until(lambda: len(consumer.messages) >= 22)
    own = [message for message in consumer.messages if message.body == b"mine!"]
    assert sorted(message.attempts for message in own) == [1, 5], "the one in flight comes again, counted"
    channel.seek(topic.log.end)
    assert channel.depth == len(channel.deferred) == 0, "the end is the end for all"


async def test_old_messages_of_which_a_copy_is_left_survive_a_way_back(broker: Broker, clock: FakeClock) -> None:
    topic = broker.topic("t")
    consumer = await consumer_of(broker, 100)
    producer = Client(broker)
    await producer.publish_later("t", b"in an hour", HOUR)
    for number in range(20):
        await producer.publish_many("t", numbered(20, 20 * number))
        consumer.finish(*await taken(consumer, 20))
    for _ in range(12):
        await quiet(broker)
        clock.advance(31)
        broker.upkeep.sync()
    await quiet(broker)
    assert topic.mover.below > 0 and topic.log.first >= topic.mover.below
    channel = topic.channels["c"]
    consumer.ready(500)
    channel.seek(topic.log.first)
    assert len(channel.deferred) == 1
    await taken(consumer, topic.log.end - topic.log.first)
    await pass_time(broker, clock, HOUR)
    await until(lambda: b"in an hour" in consumer.bodies)


async def test_a_way_back_into_files_whose_messages_were_copied_needs_no_copies(
    broker: Broker, clock: FakeClock
) -> None:
    """Copies are made, and then something else keeps the file they were to free."""
    topic = broker.topic("t")
    consumer = await consumer_of(broker, 100)
    producer = Client(broker)
    await producer.publish_later("t", b"in an hour", HOUR)
    for number in range(20):
        await producer.publish_many("t", numbered(20, 20 * number))
        consumer.finish(*await taken(consumer, 20))
    first = topic.log.first
    await quiet(broker)
    while not topic.mover.below:
        clock.advance(31)
        topic.mover.look()
        await quiet(broker)
    retaining(broker)
    assert topic.log.first == first < topic.mover.below
    consumer.ready(0)
    topic.channels["c"].seek(first)
    consumer.ready(500)
    messages = await taken(consumer, 400)
    consumer.requeue(messages[0])
    [again] = await taken(consumer, 1)
    assert (again.body, again.attempts) == (messages[0].body, 2), "it is read from its file"
    for _ in range(3):
        broker.upkeep.sync()
        await quiet(broker)
    assert topic.log.first == first


async def test_other_channels_notice_nothing(broker: Broker) -> None:
    topic, _, _ = await consumed(broker)
    other = await consumer_of(broker, channel="other")
    await Client(broker).publish("t", b"new")
    await taken(other, 1)
    topic.channels["c"].seek(topic.log.first)
    await quiet(broker)
    assert other.messages == [] and topic.channels["other"].depth == 0


async def test_files_do_not_go_under_a_channel_that_went_back(broker: Broker) -> None:
    """What was free to go a moment ago is not any more."""
    topic = broker.topic("t")
    consumer = await consumer_of(broker)
    await Client(broker).publish_many("t", numbered(300))
    consumer.finish(*await taken(consumer, 300))
    consumer.ready(0)
    await quiet(broker)
    first = topic.log.first
    # The journal is on its way to the device, then files go.
    broker.upkeep.sync()
    topic.channels["c"].seek(first)
    await quiet(broker)
    assert topic.log.first == first
    consumer.ready(500)
    assert [message.body for message in await taken(consumer, 300)] == numbered(300)


# --- The end, and a new beginning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
async def test_a_seek_survives(start_broker: StartBroker, crash: bool) -> None:
    broker = await start_broker(**SMALL)
    topic, consumer, bodies = await consumed(broker)
    consumer.ready(0)
    topic.channels["c"].seek(topic.log.first + 100)
    consumer.ready(50)
    messages = await taken(consumer, 50)
    consumer.finish(*messages[:30])
    consumer.requeue(messages[30], HOUR)
    await quiet(broker)
    broker.journal.flush()
    if crash:
        broker.kill()
    else:
        await broker.stop()
    broker = await start_broker(**SMALL)
    channel = broker.topics["t"].channels["c"]
    assert channel.depth == 169 and len(channel.deferred) == 1
    consumer = await consumer_of(broker)
    found = await taken(consumer, 169)
    assert {message.body for message in found} == set(bodies[131:])


WHERE = [10, 3, 20]
TINY: dict[str, Any] = {
    "max_bytes_per_file": 1_500,
    "mem_queue_size": 5,
    "sync_timeout": 3600 * SECOND,
    "durability": "fsync",
    "disk_reserve": 0,
}


async def calm(broker: Broker) -> None:
    await settled(broker)
    assert isinstance(broker.disk, SimDisk)
    if broker.disk.dead:
        raise PowerLoss


async def send_about(broker: Broker, sure: list[int]) -> None:
    """30 messages are consumed, then the channel is sent to some places; ``sure`` are those that were answered."""
    await broker.start()
    topic = retaining(broker)
    consumer, producer = Client(broker), Client(broker)
    consumer.send(b"SUB t c\nRDY 100\n")
    await calm(broker)
    for number in range(6):
        producer.send(b"".join(b"PUB t\n\0\0\0\x64" + body for body in numbered(5, 5 * number)))
        await calm(broker)
    consumer.finish(*consumer.messages)
    await calm(broker)
    broker.upkeep.sync()
    await calm(broker)
    sure.append(30)
    for start in WHERE:
        topic.channels["c"].seek(topic.log.first + start)
        broker.journal.when_synced(broker.journal.noted, lambda start=start: sure.append(start))
        await calm(broker)


async def test_a_seek_survives_the_loss_of_power_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its answer the channel is where it was or where it was sent; afterwards where it was sent."""
    monkeypatch.setattr(journal_module, "ROLL_AT", 600)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    n = calls = 0
    while n <= calls:
        disk, sure = SimDisk(tmp_path), list[int]()
        disk.power_off_at = n or None
        broker = Broker(disk=disk, clock=FakeClock(), data_path=disk.root, **TINY)
        with contextlib.suppress(PowerLoss):
            await send_about(broker, sure)
        if not n:
            calls = disk.calls
            assert sure == [30, *WHERE] and len(broker.topics["t"].log.segments) > 2
        disk.dead = True
        with contextlib.suppress(PowerLoss):
            broker.kill()
        n += 1
        if not sure:
            continue
        left = disk.after_power_loss(n % 7 if n % 3 else "none")
        again = Broker(disk=left, clock=FakeClock(), data_path=left.root, **TINY)
        await again.start()
        channel = again.topics["t"].channels["c"]
        waiting = {seq for first, stop in channel.waiting for seq in range(first, stop)} | set(channel.requeued)
        first = again.topics["t"].log.first
        possible = [30, *WHERE][len(sure) - 1 :]
        assert waiting in [set(range(first + start, first + 30)) for start in possible], (n, sure, len(waiting))
        await again.stop()


async def dead_letters(broker: Broker, count: int, *, copied: bool) -> Topic:
    """A topic whose messages all died in its channel; ``copied``: their copies are on the device."""
    topic = retaining(broker)
    channel, _ = topic.channel("c")
    channel.settings = dataclasses.replace(channel.settings, max_attempts=1)
    await Client(broker).publish_many("t", numbered(count))
    consumer = await consumer_of(broker, count)
    for message in await taken(consumer, count):
        consumer.requeue(message)
    if copied:
        await until(lambda: not channel.leaving)
    else:
        await until(lambda: "t.c.dead" in broker.topics)
    consumer.hang_up()
    return topic


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("count", [1, 20, 333])
async def test_a_seek_to_dead_letters_survives_a_kill(start_broker: StartBroker, count: int, copied: bool) -> None:
    """What has a copy among the dead letters is finished by a start, but not if it was sought back since."""
    broker = await start_broker(**SMALL)
    await dead_letters(broker, count, copied=copied)
    async with HttpClient.connect(broker.http_address) as http:
        assert (await seek(http, "earliest")).status == 200
    broker.journal.flush()
    broker.kill()
    broker = await start_broker(**SMALL)
    assert broker.topics["t"].channels["c"].depth == count
    consumer = await consumer_of(broker)
    assert sorted(message.body for message in await taken(consumer, count)) == sorted(numbered(count))


@pytest.mark.parametrize("most", [7, 20])
async def test_a_seek_of_redriven_dead_letters_survives_a_kill(start_broker: StartBroker, most: int) -> None:
    broker = await start_broker(**SMALL)
    await dead_letters(broker, 20, copied=True)
    dead = broker.topics["t.c.dead"]
    dead.settings = dataclasses.replace(dead.settings, retain_bytes=1 << 40)
    async with HttpClient.connect(broker.http_address) as http:
        await http.ask("POST", f"/channel/redrive?topic=t&channel=c&count={most}", b"")
        await until(lambda: getattr(broker.topics["t"].channels["c"].redrive, "moved", 0) == most)
        answer = await http.ask("POST", "/channel/seek?topic=t.c.dead&channel=redrive&to=earliest", b"")
    assert answer.status == 200
    broker.journal.flush()
    broker.kill()
    broker = await start_broker(**SMALL)
    assert broker.topics["t.c.dead"].channels["redrive"].depth == 20


async def test_dead_letters_of_a_deleted_channel_are_not_those_of_the_next(start_broker: StartBroker) -> None:
    broker = await start_broker(**SMALL)
    topic = await dead_letters(broker, 20, copied=True)
    topic.settings = dataclasses.replace(topic.settings, new_channel="earliest")
    topic.delete_channel("c")
    topic.channel("c")
    await quiet(broker)
    assert topic.channels["c"].depth == 20
    broker.journal.flush()
    broker.kill()
    broker = await start_broker(**SMALL)
    assert broker.topics["t"].channels["c"].depth == 20


# --- Where a new channel starts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(("where", "count"), [("backlog", None), ("earliest", 300), ("latest", 0)])
async def test_a_new_channel_starts_where_the_topic_says(
    start_broker: StartBroker, where: str, count: int | None, others: bool, crash: bool
) -> None:
    broker = await start_broker(**SMALL)
    topic = retaining(broker, new_channel=where)
    if others:
        topic.channel("other")
    await Client(broker).publish_many("t", numbered(300))
    topic.channel("c")
    await quiet(broker)
    if count is None:
        # What no channel has seen yet, as in NSQ.
        count = 0 if others else 300
    assert topic.channels["c"].depth == count
    await Client(broker).publish("t", b"new")
    if crash:
        broker.kill()
        broker = await start_broker(**SMALL)
    consumer = await consumer_of(broker)
    assert [message.body for message in await taken(consumer, count + 1)] == [*numbered(count), b"new"]
