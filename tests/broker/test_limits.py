"""Limits: each refuses, paces or drops exactly what it says, names the reason, and lets go again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.delivery.needed import Needed
from flintmq.broker.limits import Bucket, Connections
from flintmq.broker.storage.disk import BACKGROUND
from flintmq.errors import LimitError, PublishError, RateError
from flintmq.kernel import FRAME_OVERHEAD
from flintmq.options import NsqdOptions
from flintmq.protocol.wire import encode_mpub
from support.fakes import Client, CountingDisk, FakeClock, dpub, pass_time, pub, quiet, until


async def refusal(broker, command: bytes) -> bytes:
    """What a fresh connection is told when it is refused."""
    client = Client(broker)
    answer = await client.ask(command)
    assert client.is_over, answer
    return answer


# --- Nothing is there without a limit ---------------------------------------------------------------------------------


async def test_without_limits_there_is_nothing_to_ask(start_broker: StartBroker) -> None:
    broker = await start_broker()
    topic = broker.topic("t")
    channel, _ = topic.channel("c")
    assert (broker.connections, topic.limits, channel.pace) == (None, None, None)
    assert topic.open


@pytest.mark.parametrize("option", ["max_topic_messages", "max_topic_bytes", "max_publish_rate"])
async def test_a_limited_topic_leaves_the_short_way(start_broker: StartBroker, option: str) -> None:
    broker = await start_broker(**{option: 5})
    assert not broker.topic("t").open


# --- Connections ------------------------------------------------------------------------------------------------------


def test_connections_are_counted_by_address() -> None:
    clock = FakeClock()
    connections = Connections(NsqdOptions(max_connections=3, max_connections_per_address=2), clock)
    assert [connections.admit(key, "a") for key in (1, 2)] == ["", ""]
    assert connections.admit(3, "a") == "limit of 2 connections from a reached"
    assert connections.admit(4, "b") == ""
    assert connections.admit(5, "b") == "limit of 3 connections reached"
    connections.release(5)
    assert connections.admit(6, "c") == "limit of 3 connections reached"
    connections.release(1)
    assert connections.admit(7, "c") == ""


def test_unix_sockets_have_no_address_to_count() -> None:
    connections = Connections(NsqdOptions(max_connections_per_address=1), FakeClock())
    assert [connections.admit(key, "") for key in range(3)] == ["", "", ""]


def test_nothing_is_kept_of_addresses_that_are_gone() -> None:
    connections = Connections(NsqdOptions(max_connections_per_address=1), FakeClock())
    for number in range(1000):
        assert connections.admit(number, f"10.0.0.{number}") == ""
        connections.release(number)
    assert (len(connections._addresses), len(connections._counts)) == (0, 0)


def test_a_flood_of_connections_is_not_a_flood_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    connections = Connections(NsqdOptions(max_connections=1), clock)
    connections.admit(0, "a")
    for key in range(1, 501):
        connections.admit(key, "a")
    clock.advance(10)
    connections.admit(501, "a")
    assert [record.getMessage() for record in caplog.records] == [
        "TCP: limit of 1 connections reached, 1 turned away so far",
        "TCP: limit of 1 connections reached, 501 turned away so far",
    ]


async def test_one_connection_too_many_is_told_so_and_a_free_place_is_taken(start_broker: StartBroker) -> None:
    broker = await start_broker(max_connections=2)
    first, second = Client(broker), Client(broker)
    third = Client(broker, magic=False)
    assert third.errors == [b"E_TOO_MANY_CONNECTIONS limit of 2 connections reached"]
    await until(lambda: third.transport.lost)
    assert len(broker.sessions) == 2
    await second.publish("t", b"those who are in are served")
    first.hang_up()
    await until(lambda: len(broker.sessions) == 1)
    await Client(broker).publish("t", b"and a place that is free is taken")


async def test_what_a_client_calls_itself_does_not_free_a_place(start_broker: StartBroker) -> None:
    broker = await start_broker(max_connections_per_address=1)
    client = Client(broker)
    await client.ask(b'IDENTIFY\n\0\0\0\x14{"hostname":"other"}')
    assert Client(broker, magic=False).errors
    assert not Client(broker, peer=("10.0.0.1", 1)).errors
    client.hang_up()
    await until(lambda: client.transport.lost)
    assert not Client(broker).errors


# --- What a topic may hold --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "command"),
    [("PUB", pub("t", b"x")), ("MPUB", encode_mpub(b"t", [b"x"])), ("DPUB", dpub("t", 1000, b"x"))],
)
async def test_a_full_topic_refuses_with_the_reason(start_broker: StartBroker, verb: str, command: bytes) -> None:
    broker = await start_broker(max_topic_messages=2)
    await Client(broker).publish("t", b"1", b"2")
    text = f"E_{verb}_FAILED {verb} failed limit of 2 messages in the topic reached"
    assert await refusal(broker, command) == text.encode()
    # Another topic has room of its own.
    await Client(broker).publish("u", b"1", b"2")


async def test_a_batch_is_let_in_whole_or_not_at_all(start_broker: StartBroker) -> None:
    broker = await start_broker(max_topic_messages=5)
    await Client(broker).publish_many("t", [b"x"] * 3)
    assert b"limit of 5" in await refusal(broker, encode_mpub(b"t", [b"x"] * 3))
    await Client(broker).publish_many("t", [b"x"] * 2)
    assert broker.topics["t"].depth == 5


async def test_what_a_channel_has_not_finished_fills_its_topic(start_broker: StartBroker, clock: FakeClock) -> None:
    """Waiting, in flight, put back and deferred: all of it is kept, and only finishing makes room."""
    broker = await start_broker(max_topic_messages=4)
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 2)
    await producer.publish("t", b"1", b"2", b"3")
    await producer.publish_later("t", b"4", 100)
    assert b"limit" in await refusal(broker, pub("t", b"x"))
    await until(lambda: len(consumer.messages) == 2)
    consumer.requeue(consumer.messages[0], 50)
    assert b"limit" in await refusal(broker, pub("t", b"x"))
    consumer.finish(consumer.messages[1])
    await quiet(broker)
    await Client(broker).publish("t", b"5")


async def test_the_fullest_channel_counts(start_broker: StartBroker) -> None:
    broker = await start_broker(max_topic_messages=2)
    fast, slow = Client(broker), Client(broker)
    await fast.subscribe("t", "fast", 10)
    await slow.subscribe("t", "slow", 0)
    producer = Client(broker)
    await producer.publish("t", b"1", b"2")
    await until(lambda: len(fast.messages) == 2)
    fast.finish(*fast.messages)
    assert b"limit" in await refusal(broker, pub("t", b"x"))


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
async def test_bytes_count_from_the_oldest_message_that_is_needed(start_broker: StartBroker, durability: str) -> None:
    size = FRAME_OVERHEAD + 100
    broker = await start_broker(max_topic_bytes=4 * size, durability=durability)
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 10)
    await producer.publish("t", *[b"x" * 100] * 4)
    limits = broker.topics["t"].limits
    assert limits is not None and limits.held_bytes == 4 * size
    text = f"E_PUB_FAILED PUB failed limit of {4 * size} bytes in the topic reached"
    assert await refusal(broker, pub("t", b"x")) == text.encode()
    messages = list(await until(lambda: len(consumer.messages) == 4 and consumer.messages))
    # Not the oldest: its file is still needed whole.
    consumer.finish(messages[2])
    assert b"bytes" in await refusal(broker, pub("t", b"x"))
    consumer.finish(messages[0])
    await quiet(broker)
    assert limits.held_bytes == 3 * size
    await producer.publish("t", b"x" * 100)


async def test_bytes_are_known_after_a_restart(start_broker: StartBroker) -> None:
    broker = await start_broker()
    await Client(broker).publish("t", *[b"x" * 1000] * 10)
    await broker.stop()
    broker = await start_broker(max_topic_bytes=9_000)
    assert b"limit of 9000 bytes" in await refusal(broker, pub("t", b"x"))
    broker.topics["t"].empty()
    await Client(broker).publish("t", b"x")


async def test_a_batch_that_comes_in_slices_is_let_in_by_its_first(start_broker: StartBroker) -> None:
    broker = await start_broker(max_topic_messages=25_000)
    await Client(broker).publish_many("t", [b"x"] * 21_000)
    await Client(broker).publish_many("t", [b"x"] * 21_000)
    assert broker.topics["t"].depth == 42_000
    assert b"limit" in await refusal(broker, encode_mpub(b"t", [b"x"] * 21_000))


# --- Where the oldest go ----------------------------------------------------------------------------------------------


async def test_the_oldest_go_in_every_channel_and_are_counted(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await start_broker(max_topic_messages=3, topic_limit_policy="drop-oldest")
    caplog.set_level(logging.WARNING, "flintmq")
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "fast", 10)
    slow, _ = broker.topics["t"].channel("slow")
    for number in range(8):
        await producer.publish("t", b"%d" % number)
        message = await until(lambda number=number: len(consumer.messages) > number and consumer.messages[number])
        consumer.finish(message)
    await quiet(broker)
    assert consumer.bodies == [b"%d" % number for number in range(8)]
    assert broker.topics["t"].channels["fast"].dropped_count == 0
    assert (slow.depth, slow.dropped_count) == (3, 5)
    late = Client(broker)
    await late.subscribe("t", "slow", 10)
    assert await until(lambda: len(late.bodies) == 3 and late.bodies) == [b"5", b"6", b"7"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["TOPIC(t): its limit is reached, the oldest messages are dropped"]


async def test_a_backlog_without_channels_loses_its_oldest_too(start_broker: StartBroker) -> None:
    broker = await start_broker(max_topic_messages=3, topic_limit_policy="drop-oldest")
    for number in range(8):
        await Client(broker).publish("t", b"%d" % number)
    await quiet(broker)
    topic = broker.topics["t"]
    assert (topic.depth, topic.dropped_count) == (3, 5)
    # Dropped for good: a restart does not bring it back.
    await broker.stop()
    broker = await start_broker()
    assert broker.topics["t"].depth == 3
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 10)
    assert await until(lambda: len(consumer.bodies) == 3 and consumer.bodies) == [b"5", b"6", b"7"]


@pytest.mark.parametrize("paused", [False, True])
async def test_the_limit_of_a_backlog_holds_over_what_a_crash_left_out(
    start_broker: StartBroker, clock: FakeClock, paused: bool
) -> None:
    limits = {"max_topic_messages": 10, "topic_limit_policy": "drop-oldest"}
    broker = await start_broker(**limits)
    topic = broker.topic("t")
    if paused:
        topic.channel("c")
        topic.pause(True)
    sent = [b"%d" % number for number in range(60)]
    for body in sent[:10]:
        await Client(broker).publish("t", body)
    broker.journal.flush()
    # After each crash the seqs go on millions later.
    for life in range(1, 4):
        broker.kill()
        broker = await start_broker(**limits)
        topic = broker.topics["t"]
        assert topic.depth == 10
        for body in sent[10 * life : 10 * life + 4 + life]:
            await Client(broker).publish("t", body)
        # An idle broker says nothing more to its journal.
        await quiet(broker)
        noted = broker.journal.noted
        await pass_time(broker, clock, 1)
        assert (topic.depth, broker.journal.noted - noted) == (10, 0)
        broker.journal.flush()
    if paused:
        topic.pause(False)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 100)
    expected = [*sent[14:15], *sent[20:26], *sent[30:37]][-10:]
    assert await until(lambda: len(consumer.bodies) == 10 and consumer.bodies) == expected


class HeldSyncs(CountingDisk):
    """Work in threads is done at once; while ``held`` is a list, the loop does not hear of it."""

    held: list[Callable[[], None]] | None = None

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], urgency: int = BACKGROUND
    ) -> None:
        def ended(result: Any, error: BaseException | None) -> None:
            if self.held is None:
                done(result, error)
            else:
                self.held.append(partial(done, result, error))

        super().submit(work, ended, urgency)


async def test_publishers_at_the_limit_are_answered_while_others_publish(start_broker: StartBroker) -> None:
    disk = HeldSyncs()
    broker = await start_broker(disk=disk, max_topic_messages=10, topic_limit_policy="drop-oldest")
    broker.topic("t")
    client = Client(broker)
    for number in range(20):
        await client.publish("t", b"%d" % number)
    await quiet(broker)
    client.take()
    disk.held = held = []
    # There is always a newer publish than the journal's last sync.
    for number in range(20):
        client.send(pub("t", b"%d" % number))
        await quiet(broker)
        for told in held[:-1]:
            told()
        del held[:-1]
    answered = len(client.take())
    disk.held = None
    for told in held:
        told()
    assert answered == 20


async def test_what_is_in_flight_or_deferred_is_never_dropped(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(max_topic_messages=3, topic_limit_policy="drop-oldest")
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 1)
    await producer.publish("t", b"in flight")
    held = await until(lambda: consumer.messages and consumer.messages[0])
    await producer.publish_later("t", b"deferred", 5)
    await producer.publish("t", b"1", b"2", b"3", b"4")
    await quiet(broker)
    channel = broker.topics["t"].channels["c"]
    assert (channel.in_flight_count, len(channel.deferred), channel.depth, channel.dropped_count) == (1, 1, 1, 3)
    consumer.finish(held)
    consumer.ready(10)
    await pass_time(broker, clock, 6)
    assert sorted(consumer.bodies) == [b"4", b"deferred", b"in flight"]


@pytest.mark.parametrize("limit", [{"max_topic_messages": 3}, {"max_topic_bytes": 3 * (FRAME_OVERHEAD + 1)}])
async def test_what_was_put_back_is_dropped_by_its_age(start_broker: StartBroker, limit: dict[str, int]) -> None:
    broker = await start_broker(**limit, topic_limit_policy="drop-oldest")
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 3)
    await producer.publish("t", b"1", b"2", b"3")
    one, two, three = await until(lambda: len(consumer.messages) == 3 and list(consumer.messages))
    consumer.ready(0)
    for message in (three, one, two):
        consumer.requeue(message)
    await producer.publish("t", b"4")
    await quiet(broker)
    channel = broker.topics["t"].channels["c"]
    assert (channel.depth, channel.dropped_count) == (3, 1)
    await producer.publish("t", b"5", b"6")
    await quiet(broker)
    assert (channel.depth, channel.dropped_count) == (3, 3)
    assert not channel.requeued and not channel.attempts
    consumer.take()
    consumer.ready(10)
    assert await until(lambda: len(consumer.bodies) == 3 and consumer.bodies) == [b"4", b"5", b"6"]


async def test_bytes_make_the_oldest_go(start_broker: StartBroker) -> None:
    size = FRAME_OVERHEAD + 1000
    broker = await start_broker(max_topic_bytes=5 * size, topic_limit_policy="drop-oldest")
    idle, _ = broker.topic("t").channel("idle")
    for number in range(20):
        await Client(broker).publish("t", b"%03d" % number + b"x" * 997)
    await quiet(broker)
    assert (idle.depth, idle.dropped_count) == (5, 15)
    limits = broker.topics["t"].limits
    assert limits is not None and limits.held_bytes == 5 * size


# --- Rates ------------------------------------------------------------------------------------------------------------


def test_a_bucket_fills_with_time_and_holds_one_second() -> None:
    clock = FakeClock()
    bucket = Bucket(10, clock)
    assert [bucket.take(1) for _ in range(11)] == [True] * 10 + [False]
    clock.advance(0.25)
    assert [bucket.take(1) for _ in range(3)] == [True, True, False]
    clock.advance(3600)
    assert [bucket.take(5) for _ in range(3)] == [True, True, False]


def test_a_batch_larger_than_the_bucket_passes_when_it_is_full_and_is_paid_later() -> None:
    clock = FakeClock()
    bucket = Bucket(10, clock)
    assert bucket.take(30)
    clock.advance(2)
    assert not bucket.take(1)
    clock.advance(0.1)
    assert bucket.take(1)


async def test_publishes_above_the_rate_are_refused_until_time_has_passed(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(max_publish_rate=3)
    producer = Client(broker)
    await producer.publish("t", b"1", b"2", b"3")
    text = b"E_PUB_FAILED PUB failed limit of 3 messages a second reached"
    assert await refusal(broker, pub("t", b"x")) == text
    await producer.publish("u", b"has a rate of its own")
    clock.advance(0.34)
    await producer.publish("t", b"4")
    assert b"3 messages a second" in await refusal(broker, encode_mpub(b"t", [b"x", b"y"]))


async def test_a_refusal_says_what_it_is_over_http(start_broker: StartBroker) -> None:
    assert (PublishError("").http_status, LimitError("").http_status, RateError("").http_status) == (503, 503, 429)
    broker = await start_broker(max_publish_rate=1, max_topic_messages=5)
    topic = broker.topic("t")
    with pytest.raises(RateError):
        for _ in range(2):
            topic.publish(bytearray(b"\0\0\0\1x"), 0, 5, 1)
    with pytest.raises(LimitError) as full:
        topic.publish(bytearray(b"\0\0\0\1x" * 6), 0, 30, 6)
    assert full.value.http_status == 503


async def test_deliveries_above_the_rate_wait_for_a_timer(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(max_delivery_rate=4)
    consumers = [Client(broker) for _ in range(2)]
    for consumer in consumers:
        await consumer.subscribe("t", "c", 100)
    waits: list[float] = []
    delay = broker.store.delay
    broker.store.delay = lambda seconds, work: (waits.append(seconds), delay(seconds, work))
    await Client(broker).publish_many("t", [b"%d" % number for number in range(20)])
    await quiet(broker)

    def delivered() -> int:
        return sum(len(consumer.messages) for consumer in consumers)

    assert delivered() == 4
    for expected in (8, 12, 16, 20):
        clock.advance(1)
        await until(lambda expected=expected: delivered() == expected)
    await quiet(broker)
    assert sorted(body for consumer in consumers for body in consumer.bodies) == sorted(b"%d" % n for n in range(20))
    # One timer at a time, never at once: the loop is not kept busy.
    assert min(waits) >= 0.01
    # Another channel has a rate of its own.
    other = Client(broker)
    await other.subscribe("u", "c", 100)
    await Client(broker).publish_many("u", [b"x"] * 3)
    await until(lambda: len(other.messages) == 3)


async def test_messages_put_back_are_paced_too(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(max_delivery_rate=2)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 10)
    await Client(broker).publish("t", b"x")
    first = await until(lambda: consumer.messages and consumer.messages[0])
    consumer.requeue(first)
    await until(lambda: len(consumer.messages) == 2)
    consumer.requeue(consumer.messages[1])
    await quiet(broker)
    assert len(consumer.messages) == 2
    clock.advance(0.5)
    await until(lambda: len(consumer.messages) == 3)
    assert [message.attempts for message in consumer.messages] == [1, 2, 3]


async def test_a_publish_beyond_the_limit_does_not_look_through_all_that_is_requeued(
    start_broker: StartBroker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(max_topic_bytes=1_000, topic_limit_policy="drop-oldest")
    producer, consumer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 0)
    # They are not to be dropped, and keep the topic beyond its limit.
    for _ in range(1_100):
        await producer.ask(dpub("t", 3_000_000, b"x"))
    await quiet(broker)
    looks = 0
    look = Needed.first_single

    def counted(self: Needed, start: int) -> int:
        nonlocal looks
        looks += 1
        return look(self, start)

    clock.advance(1)
    monkeypatch.setattr(Needed, "first_single", counted)
    for _ in range(100):
        await producer.publish("t", b"x")
    await quiet(broker)
    # No time has passed: for the first of them it is looked, and once more if something was dropped.
    assert looks <= 2
    clock.advance(1)
    await producer.publish("t", b"x")
    await quiet(broker)
    channel = broker.topics["t"].channels["c"]
    assert channel.dropped_count > 0 and channel.depth < 30


async def test_a_lower_limit_in_bytes_drops_at_once(start_broker: StartBroker) -> None:
    broker = await start_broker(max_topic_bytes=1 << 20, topic_limit_policy="drop-oldest")
    producer, consumer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 0)
    for _ in range(3):
        await producer.publish_many("t", [b"x" * 100] * 500)
    channel = broker.topics["t"].channels["c"]
    await until(lambda: channel.depth == 1_500)
    for limit in (100_000, 50_000):
        # No time passes between the two.
        broker.settings.change(("t",), {"max-bytes": limit})
        await until(lambda: channel.depth * 100 < limit)  # noqa: B023
