"""What is too old is delivered by nobody: it is dropped, or among the dead letters, and nothing else is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from conftest import StartBroker
from test_deadletters import about, channel_of, consumer_of, contents, die, moved, received, redriven

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery import leaving as leaving_module
from flintmq.broker.delivery.dead_letters import SLICE
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.observe import prometheus, stats
from support.fakes import SECOND, Client, CountingDisk, FakeClock, dpub, pass_time, quiet, until

TTL = 100
Started = Callable[..., Awaitable[Topic]]


@pytest.fixture(params=["os", "memory"])
def start(request: pytest.FixtureRequest, start_broker: StartBroker) -> Started:
    """Start a broker and its topic ``t``, in which messages live for TTL seconds."""

    async def start(action: str = "drop", name: str = "t", **options: Any) -> Topic:
        broker = await start_broker(**{"durability": request.param, "sync_timeout": 3_600 * SECOND, **options})
        return expiring(broker, action, name)

    return start


def expiring(broker: Broker, action: str = "drop", name: str = "t", seconds: int = TTL) -> Topic:
    topic = broker.topic(name)
    topic.settings = replace(topic.settings, ttl=seconds * SECOND, ttl_action=action)
    return topic


async def look(broker: Broker) -> None:
    """What the timer does."""
    await quiet(broker)
    broker.upkeep.sync()
    await quiet(broker)


async def test_what_is_too_old_is_not_delivered(start: Started, clock: FakeClock) -> None:
    topic = await start()
    channel = await channel_of(topic.broker, attempts=0)
    producer = Client(topic.broker)
    await producer.publish("t", b"old", b"old too")
    clock.advance(1)
    await producer.publish("t", b"young")
    clock.advance(TTL - 1)
    consumer = await consumer_of(channel)
    [message] = await received(consumer)
    assert message.body == b"young"
    consumer.finish(message)
    await quiet(topic.broker)
    assert (channel.leaving.expired_count, channel.depth, channel.leaving.dead_lettered_count) == (2, 0, 0)
    assert await contents(topic.broker) == {"t/c": []} and consumer.errors == []


async def test_without_a_ttl_everything_is_delivered(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker()
    channel = await channel_of(broker)
    await Client(broker).publish("t", b"as old as you like")
    clock.advance(10**9)
    broker.upkeep.sync()
    assert len(await received(await consumer_of(channel))) == 1
    assert channel.leaving.expired_count == 0


async def test_what_nobody_wants_goes_as_well(start: Started, clock: FakeClock) -> None:
    """A channel without consumers, one that is paused, and a topic without channels."""
    topic = await start()
    broker = topic.broker
    idle, paused = await channel_of(broker, name="idle"), await channel_of(broker, name="paused")
    paused.pause(True)
    lonely = expiring(broker, name="u")
    producer = Client(broker)
    for name in ("t", "u"):
        await producer.publish_many(name, [b"old"] * 5)
    clock.advance(TTL / 2)
    for name in ("t", "u"):
        await producer.publish_many(name, [b"young"] * 3)
    await look(broker)
    assert (idle.depth, paused.depth, lonely.depth) == (8, 8, 8)
    clock.advance(TTL / 2)
    await look(broker)
    assert (idle.depth, paused.depth, lonely.depth) == (3, 3, 3)
    assert (idle.leaving.expired_count, paused.leaving.expired_count) == (5, 5)
    assert (topic.expired_count, lonely.expired_count) == (0, 5)
    channel = await channel_of(broker, "u")
    consumer = await consumer_of(channel)
    assert [message.body for message in await received(consumer, 3)] == [b"young"] * 3


async def test_looking_for_old_messages_keeps_no_file_that_nobody_needs(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    """Each look reads the file that holds the last message too old: that must not keep it from being deleted."""
    broker = await start_broker(
        mem_queue_size=0, max_bytes_per_file=1_000, sync_timeout=3_600 * SECOND, disk=CountingDisk()
    )
    topic = expiring(broker)
    channel = await channel_of(broker)
    producer = Client(broker)
    await producer.publish("t", b"old" * 400)
    consumer = await consumer_of(channel, ready=1)
    consumer.finish(*await received(consumer))
    consumer.ready(0)
    clock.advance(TTL)
    await producer.publish("t", b"young" * 400)
    # The journal has nothing more to say by the time that the file may go: nothing waits for it.
    topic.settings = replace(topic.settings, retain_bytes=1 << 20)
    for _ in range(2):
        clock.advance(1)
        await look(broker)
    assert channel.depth == 1 and len(topic.log.segments) == 2
    topic.settings = replace(topic.settings, retain_bytes=0)
    for _ in range(2):
        clock.advance(1)
        await look(broker)
    assert channel.depth == 1 and len(topic.log.segments) == 1


async def test_very_many_old_messages_on_the_disk(start_broker: StartBroker, clock: FakeClock) -> None:
    """They are found without being read: files go, and the next message is delivered at once."""
    disk = CountingDisk()
    broker = await start_broker(mem_queue_size=0, max_bytes_per_file=20_000, sync_timeout=3_600 * SECOND, disk=disk)
    topic = expiring(broker)
    channel = await channel_of(broker)
    producer = Client(broker)
    for _ in range(20):
        await producer.publish_many("t", [b"old" * 10] * 200)
    clock.advance(TTL)
    await producer.publish("t", b"young")
    await quiet(broker)
    count = len(topic.log.segments)
    assert count > 10
    reads = 0
    read = disk.read

    def counted(fd: int, size: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        return read(fd, size, offset)

    disk.read = counted  # type: ignore[method-assign]
    await look(broker)
    assert channel.leaving.expired_count == 4_000 and channel.depth == 1 and reads <= 2
    await look(broker)
    assert len(topic.log.segments) <= 2
    assert [message.body for message in await received(await consumer_of(channel))] == [b"young"]


async def test_in_flight_stays_with_its_owner_and_expires_when_it_is_put_back(start: Started, clock: FakeClock) -> None:
    topic = await start(max_msg_timeout=900 * SECOND, msg_timeout=900 * SECOND)
    channel = await channel_of(topic.broker, attempts=0)
    await Client(topic.broker).publish_many("t", [b"finished", b"put back"])
    consumer = await consumer_of(channel)
    finished, put_back = await received(consumer, 2)
    await pass_time(topic.broker, clock, TTL + 1)
    await look(topic.broker)
    consumer.finish(finished)
    assert consumer.errors == [] and channel.leaving.expired_count == 0
    consumer.requeue(put_back)
    await quiet(topic.broker)
    assert consumer.messages == [] and channel.leaving.expired_count == 1
    assert await contents(topic.broker) == {"t/c": []}


@pytest.mark.parametrize("restart", [False, True])
async def test_a_deferred_message_lives_from_when_it_is_due(
    start: Started, start_broker: StartBroker, clock: FakeClock, restart: bool
) -> None:
    topic = await start()
    broker = topic.broker
    await channel_of(broker, attempts=0)
    producer = Client(broker)
    await producer.publish_later("t", b"later", 3 * TTL)
    await producer.publish_later("t", b"too late", TTL)
    await producer.publish("t", b"now")
    await pass_time(broker, clock, 3 * TTL)
    if restart:
        # Due by now: after a start they wait with all others.
        await broker.stop()
        topic = await start()
        broker = topic.broker
    channel = topic.channels["c"]
    await look(broker)
    consumer = await consumer_of(channel)
    [message] = await received(consumer)
    await quiet(broker)
    assert (message.body, consumer.messages, channel.leaving.expired_count) == (b"later", [], 2)
    await pass_time(broker, clock, TTL)
    assert channel.timeout_count == 1, "it was put back"
    assert consumer.messages == [] and channel.leaving.expired_count == 3


async def test_a_deferred_message_holds_up_no_backlog_for_ever(start: Started, clock: FakeClock) -> None:
    topic = await start()
    producer = Client(topic.broker)
    await producer.publish("t", b"one")
    await producer.publish_later("t", b"later", 2 * TTL)
    await producer.publish("t", b"two")
    clock.advance(TTL)
    await look(topic.broker)
    assert (topic.depth, topic.expired_count) == (2, 1), "what comes after it waits with it"
    clock.advance(2 * TTL)
    await look(topic.broker)
    assert (topic.depth, topic.expired_count) == (0, 3)


async def test_expired_messages_may_become_dead_letters(start: Started, clock: FakeClock) -> None:
    topic = await start("dead-letter")
    broker = topic.broker
    channel = await channel_of(broker, attempts=0)
    producer = Client(broker)
    bodies = [b"%d" % i for i in range(3 * SLICE)]
    await producer.publish_many("t", bodies)
    clock.advance(TTL)
    await producer.publish("t", b"young")
    consumer = await consumer_of(channel)
    [message] = await received(consumer)
    assert message.body == b"young", "nobody waits for the copies"
    consumer.finish(message)
    await until(lambda: channel.leaving.dead_lettered_count == len(bodies))
    assert await contents(broker) == {"t/c": [], "t.c.dead": bodies}
    dead = broker.topics["t.c.dead"]
    found = (await about(dead, dead.pumped))["dead"]
    assert (found["reason"], found["attempts"]) == ("expired", 0)
    assert channel.leaving.expired_count == len(bodies)


@pytest.mark.parametrize("crash", [False, True])
async def test_expired_messages_on_their_way_outlive_the_broker(
    start_broker: StartBroker, clock: FakeClock, crash: bool
) -> None:
    broker = await start_broker()
    expiring(broker, "dead-letter")
    channel = await channel_of(broker, attempts=0)
    bodies = [b"%d" % i for i in range(2 * SLICE)]
    await Client(broker).publish_many("t", bodies)
    clock.advance(TTL)
    channel.leaving.expire_before(channel.topic.log.end)
    assert channel.depth == 0 and channel.leaving.expired.total == len(bodies)
    broker.journal.take_snapshot()
    await until(lambda: "t.c.dead" in broker.topics and broker.topics["t.c.dead"].log.written > 0)
    if crash:
        broker.kill()
    else:
        await broker.stop()
    broker = await start_broker()
    found = await contents(broker)
    assert sorted([*found["t/c"], *found.get("t.c.dead", []), *found.get("t.c.dead/redrive", [])]) == sorted(bodies)


async def test_a_put_back_message_becomes_a_dead_letter_with_its_attempts(start: Started, clock: FakeClock) -> None:
    topic = await start("dead-letter")
    channel = await channel_of(topic.broker, attempts=0)
    await Client(topic.broker).publish("t", b"one")
    consumer = await consumer_of(channel)
    [message] = await received(consumer)
    consumer.requeue(message, TTL)
    await pass_time(topic.broker, clock, TTL)
    await moved(topic.broker)
    dead = topic.broker.topics["t.c.dead"]
    found = (await about(dead, dead.pumped))["dead"]
    assert (found["reason"], found["attempts"], found["id"]) == ("expired", 1, message.id.decode())


async def test_dead_letters_that_get_too_old_are_dropped(start: Started, clock: FakeClock) -> None:
    topic = await start()
    broker = topic.broker
    await die(await channel_of(broker), b"one")
    expiring(broker, "dead-letter", "t.c.dead")
    channel = await channel_of(broker, "t.c.dead", "look")
    clock.advance(TTL)
    await look(broker)
    await moved(broker)
    assert await contents(broker) == {"t/c": [], "t.c.dead/look": []}
    assert (channel.leaving.expired_count, channel.leaving.dead_lettered_count) == (1, 0)


async def test_what_was_sent_back_is_delivered_however_old_it_is(start: Started, clock: FakeClock) -> None:
    topic = await start("dead-letter")
    channel = await channel_of(topic.broker, attempts=0)
    published = clock.wall()
    await Client(topic.broker).publish("t", b"one")
    clock.advance(TTL)
    consumer = await consumer_of(channel)
    await until(lambda: channel.leaving.dead_lettered_count == 1)
    await redriven(channel)
    [message] = await received(consumer)
    assert (message.body, message.timestamp, message.attempts) == (b"one", published, 1)


async def test_an_ephemeral_topic(start: Started, clock: FakeClock) -> None:
    topic = await start(name="t#ephemeral")
    channel = await channel_of(topic.broker, "t#ephemeral")
    producer = Client(topic.broker)
    await producer.publish("t#ephemeral", b"old")
    await producer.publish_later("t#ephemeral", b"later", 2 * TTL)
    await pass_time(topic.broker, clock, 2 * TTL)
    consumer = await consumer_of(channel)
    assert [message.body for message in await received(consumer)] == [b"later"]
    assert channel.leaving.expired_count == 1


async def test_expired_messages_are_counted(start: Started, clock: FakeClock) -> None:
    topic = await start()
    await Client(topic.broker).publish("t", b"one")
    clock.advance(TTL)
    await look(topic.broker)
    await channel_of(topic.broker)
    await Client(topic.broker).publish_many("t", [b"two", b"three"])
    clock.advance(TTL)
    await look(topic.broker)
    lines = prometheus.metrics(topic.broker)[0].decode()
    assert 'nsqd_topic_expired_messages_total{topic="t"} 1\n' in lines
    assert 'nsqd_channel_expired_messages_total{topic="t",channel="c"} 2\n' in lines
    [found] = stats.document(topic.broker, extended=True)["topics"]
    assert (found["expired_count"], found["channels"][0]["expired_count"]) == (1, 2)
    [found] = stats.document(topic.broker)["topics"]
    assert "expired_count" not in found and "expired_count" not in found["channels"][0]


# --- Requeued messages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["drop", "dead-letter"])
async def test_requeued_messages_expire_when_nobody_comes_for_them(
    start: Started, clock: FakeClock, action: str
) -> None:
    topic = await start(action, msg_timeout=900 * SECOND, max_msg_timeout=900 * SECOND)
    broker = topic.broker
    channel = await channel_of(broker, attempts=0)
    producer = Client(broker)
    await producer.publish_many("t", [b"old"] * 3)
    clock.advance(TTL / 2)
    await producer.publish_later("t", b"due late", TTL / 2)
    await producer.publish_many("t", [b"young"] * 2)
    consumer = await consumer_of(channel, 10)
    messages = await received(consumer, 5)
    consumer.ready(0)
    for message in messages:
        consumer.requeue(message)
    consumer.hang_up()
    await pass_time(broker, clock, TTL / 2)
    assert (channel.depth, len(channel.requeued)) == (6, 6)
    await look(broker)
    assert (channel.depth, channel.leaving.expired_count) == (3, 3)
    await pass_time(broker, clock, TTL / 2)
    await look(broker)
    assert (channel.depth, channel.leaving.expired_count) == (1, 5), "a deferred message lives from when it is due"
    await moved(broker)
    found = await contents(broker)
    assert found["t/c"] == [b"due late"]
    assert sorted(found.get("t.c.dead", [])) == ([b"old"] * 3 + [b"young"] * 2 if action == "dead-letter" else [])


async def test_very_many_requeued_messages_expire_in_slices(
    start: Started, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving_module, "LOOK_AT_ONCE", 2)
    topic = await start()
    channel = await channel_of(topic.broker, attempts=0)
    producer = Client(topic.broker)
    for number in range(7):
        await producer.publish_later("t", b"%d" % number, TTL if number in (0, 4) else 1)
    await pass_time(topic.broker, clock, TTL)
    assert len(channel.requeued) == 7
    clock.advance(2)
    # One slice at once, and a consumer that comes in between is sent none that is too old.
    topic.broker.upkeep.sync()
    await until(lambda: 0 < channel.leaving.expired_count < 5)
    consumer = await consumer_of(channel, 10)
    await until(lambda: channel.leaving.expired_count == 5)
    assert sorted(message.body for message in await received(consumer, 2)) == [b"0", b"4"]
    assert channel.depth == 0


async def test_a_message_that_was_moved_expires_by_its_own_time(start_broker: StartBroker, clock: FakeClock) -> None:
    """The log has forgotten its file: it tells the time of newer messages only."""
    broker = await start_broker(
        mem_queue_size=0, max_bytes_per_file=4_000, sync_timeout=3_600 * SECOND, msg_timeout=900 * SECOND
    )
    topic = expiring(broker)
    channel = await channel_of(broker, attempts=0)
    producer = Client(broker)
    await producer.publish("t", b"requeued")
    consumer = await consumer_of(channel, 1)
    [message] = await received(consumer)
    consumer.ready(0)
    consumer.requeue(message, 1)
    other = await consumer_of(channel, 2_500)
    for _ in range(60):
        await producer.publish_many("t", [b"x" * 1_000] * 10)
        await until(lambda: len(other.messages) >= 10)
        other.finish(*other.messages)
        other.take()
        await look(broker)
    assert message.id.decode() == topic.ids.text(topic.mover.first_copied).decode(), "only a copy of it is left"
    other.hang_up()
    await pass_time(broker, clock, TTL - 1)
    await look(broker)
    assert (channel.depth, channel.leaving.expired_count) == (1, 0), "it is young, though older than the log"
    clock.advance(1)
    await look(broker)
    await until(lambda: channel.leaving.expired_count == 1)
    assert channel.depth == 0


@pytest.mark.parametrize("deferred", [False, True])
async def test_a_message_that_was_moved_and_never_counted_expires(
    start_broker: StartBroker, clock: FakeClock, deferred: bool
) -> None:
    """A kill forgets that it was in flight. If it was deferred, nobody knows since when it is due: then it stays."""
    options = {"mem_queue_size": 0, "max_bytes_per_file": 4_000, "sync_timeout": 3_600 * SECOND}
    broker = await start_broker(**options, msg_timeout=900 * SECOND)
    topic = expiring(broker)
    channel = await channel_of(broker, attempts=0)
    producer = Client(broker)
    if deferred:
        assert await producer.ask(dpub("t", 1_000, b"old")) == b"OK"
        await pass_time(broker, clock, 2)
    else:
        await producer.publish("t", b"old")
    slow = await consumer_of(channel, 1)
    [message] = await received(slow)
    slow.ready(0)
    other = await consumer_of(channel, 2_500)
    for _ in range(60):
        await producer.publish_many("t", [b"x" * 1_000] * 10)
        await until(lambda: len(other.messages) >= 10)
        other.finish(*other.messages)
        other.take()
        await look(broker)
    assert message.id.decode() == topic.ids.text(topic.mover.first_copied).decode(), "only a copy of it is left"
    broker.kill()
    clock.advance(TTL - 1)
    broker = await start_broker(**options)
    expiring(broker)
    channel = broker.topics["t"].channels["c"]
    await look(broker)
    assert (channel.depth, channel.leaving.expired_count) == (1, 0), "it is young"
    clock.advance(1)
    await look(broker)
    if deferred:
        assert len(await received(await consumer_of(channel))) == 1
    else:
        await until(lambda: channel.leaving.expired_count == 1)
        assert channel.depth == 0


async def test_an_ephemeral_channel_keeps_what_is_older_than_the_log_and_not_too_old(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(mem_queue_size=2, max_bytes_per_file=4_000, sync_timeout=3_600 * SECOND)
    topic = expiring(broker)
    channel = await channel_of(broker, name="slow#ephemeral")
    slow = await consumer_of(channel, 0)
    channel.pause(True)
    producer, quick = Client(broker), await consumer_of(await channel_of(broker, name="quick"), 2_500)
    for number in range(60):
        await producer.publish_many("t", [b"%d" % number + b"x" * 1_000] * 10)
        await until(lambda: len(quick.messages) == 10)
        quick.finish(*quick.messages)
        quick.take()
        await look(broker)
    assert topic.log.memory.pinned and channel.waiting.first < topic.log.first and channel.depth == 2
    clock.advance(TTL - 1)
    await look(broker)
    assert (channel.depth, channel.leaving.expired_count) == (2, 0)
    clock.advance(1)
    await look(broker)
    assert (channel.depth, channel.leaving.expired_count) == (0, 2)
    assert slow.errors == []
