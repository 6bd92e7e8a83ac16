"""Old messages get out of the way of their segment, and nobody notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from support.fakes import Client, FakeClock, Message, pass_time, quiet, until

HOUR = 3600.0
SMALL = {"max_bytes_per_file": 20_000, "mem_queue_size": 0, "sync_timeout": 3_600_000_000_000}


async def settle(broker: Broker) -> None:
    """What a minute of syncing does, in no time."""
    for _ in range(12):
        await quiet(broker)
        broker.clock.advance(31)  # type: ignore[attr-defined]
        broker.upkeep.sync()
        await quiet(broker)


async def churn(broker: Broker, consumer: Client, count: int = 400) -> None:
    """Messages come, are delivered and finished: enough for some segments."""
    producer = Client(broker)
    for _ in range(count // 20):
        await producer.publish_many("t", [b"passes by" * 10] * 20)
        await until(lambda: len(consumer.messages) >= 20)
        consumer.finish(*taken(consumer))


def taken(client: Client) -> list[Message]:
    messages = client.messages
    client.take()
    return messages


def segments(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("flintmq/topics/t@*/*.seg"))


async def consumer_of(broker: Broker, ready: int = 100) -> Client:
    consumer = Client(broker)
    await consumer.subscribe("t", "c", ready)
    return consumer


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker(**SMALL)


async def test_a_deferred_message_does_not_hold_the_segments_behind_it(
    broker: Broker, clock: FakeClock, tmp_path: Path
) -> None:
    consumer = await consumer_of(broker)
    await Client(broker).publish_later("t", b"in an hour", HOUR)
    published = clock.wall()
    await churn(broker, consumer)
    [first, *others] = segments(tmp_path)
    assert len(others) >= 2
    await settle(broker)
    assert first not in segments(tmp_path) and len(segments(tmp_path)) <= 2
    assert broker.topics["t"].channels["c"].depth == 0
    assert len(broker.topics["t"].channels["c"].deferred) == 1
    assert consumer.messages == [], "it is not early"
    await pass_time(broker, clock, HOUR)
    await until(lambda: consumer.messages)
    [message] = taken(consumer)
    assert (message.body, message.attempts, message.timestamp) == (b"in an hour", 1, published)
    consumer.finish(message)
    await settle(broker)
    assert consumer.errors == []
    assert broker.topics["t"].side is not None and broker.topics["t"].mover.first_place > broker.topics["t"].side_end


@pytest.mark.parametrize("crash", [False, True])
async def test_copies_survive_the_broker(
    start_broker: StartBroker, clock: FakeClock, tmp_path: Path, crash: bool
) -> None:
    broker = await start_broker(**SMALL)
    consumer = await consumer_of(broker)
    producer = Client(broker)
    await producer.publish_later("t", b"deferred", HOUR)
    await producer.publish("t", b"put back")
    await until(lambda: consumer.messages)
    [held] = taken(consumer)
    consumer.requeue(held, HOUR)
    await churn(broker, consumer)
    await settle(broker)
    assert len(segments(tmp_path)) <= 2
    if crash:
        broker.kill()
    else:
        await broker.stop()
    broker = await start_broker(**SMALL)
    channel = broker.topics["t"].channels["c"]
    assert (channel.depth, len(channel.deferred)) == (0, 2)
    consumer = await consumer_of(broker)
    await settle(broker)
    assert consumer.messages == [], "they are not early"
    await pass_time(broker, clock, HOUR)
    await until(lambda: len(consumer.messages) == 2)
    found: dict[bytes, Message] = {message.body: message for message in taken(consumer)}
    assert {body: message.attempts for body, message in found.items()} == {b"deferred": 1, b"put back": 2}
    assert found[b"put back"].id == held.id, "a message keeps its id"
    consumer.finish(*found.values())
    await quiet(broker)
    assert consumer.errors == []
    await broker.stop()
    broker = await start_broker(**SMALL)
    channel = broker.topics["t"].channels["c"]
    assert (channel.depth, len(channel.deferred), channel.in_flight_count) == (0, 0, 0)


@pytest.mark.parametrize("back", range(1, 16))
async def test_removed_files_that_are_there_again_cost_no_message(
    start_broker: StartBroker, clock: FakeClock, tmp_path: Path, back: int
) -> None:
    """A power loss brings removed files back, in any selection; one that could not be removed is there, too."""

    def files() -> list[Path]:
        return list(tmp_path.glob("flintmq/topics/t@*/*.seg"))

    broker = await start_broker(**SMALL)
    consumer = await consumer_of(broker)
    producer = Client(broker)
    deferred = [b"deferred %d" % number for number in range(4)]
    seen: dict[Path, bytes] = {}
    for body in deferred:
        await producer.publish_later("t", body, HOUR)
        await churn(broker, consumer)
        seen.update({path: path.read_bytes() for path in files()})
    for _ in range(4):
        await settle(broker)
    removed = seen.keys() - set(files())
    homes = [next(path for path in removed if body in seen[path]) for body in deferred]
    assert len(set(homes)) == 4, "each was in another file"
    broker.kill()
    for number, path in enumerate(homes):
        if back & 1 << number:
            path.write_bytes(seen[path])
    broker = await start_broker(**SMALL)
    consumer = await consumer_of(broker)
    await settle(broker)
    assert consumer.messages == [], "they are not early"
    await pass_time(broker, clock, HOUR)
    await until(lambda: len(consumer.messages) == 4)
    assert sorted(message.body for message in taken(consumer)) == deferred


async def test_a_message_in_flight_is_copied_too_and_can_be_finished(broker: Broker, tmp_path: Path) -> None:
    holder = await consumer_of(broker, 1)
    await Client(broker).publish("t", b"takes long")
    await until(lambda: holder.messages)
    [message] = taken(holder)
    other = await consumer_of(broker)
    await churn(broker, other)
    for _ in range(4):
        holder.touch(message)
        await quiet(broker)
        broker.clock.advance(10)  # type: ignore[attr-defined]
        broker.upkeep.sync()
        await quiet(broker)
    assert len(segments(tmp_path)) <= 2
    holder.finish(message)
    assert holder.errors == []


async def test_a_message_in_flight_whose_segment_is_gone_comes_back_after_a_crash(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = await start_broker(**SMALL)
    holder = await consumer_of(broker, 3)
    await Client(broker).publish_many("t", [b"one", b"two", b"three"])
    await until(lambda: len(holder.messages) == 3)
    messages = taken(holder)
    other = await consumer_of(broker)
    await churn(broker, other)
    for _ in range(4):
        for message in messages:
            holder.touch(message)
        await quiet(broker)
        broker.clock.advance(10)  # type: ignore[attr-defined]
        broker.upkeep.sync()
        await quiet(broker)
    assert len(segments(tmp_path)) <= 2
    holder.finish(messages[1])
    await quiet(broker)
    broker.journal.flush()
    broker.kill()
    broker = await start_broker(**SMALL)
    assert broker.topics["t"].channels["c"].depth == 2
    consumer = await consumer_of(broker)
    await until(lambda: len(consumer.messages) == 2)
    assert sorted(consumer.bodies) == [b"one", b"three"]
    assert {message.id for message in consumer.messages} == {messages[0].id, messages[2].id}
    consumer.finish(*taken(consumer))
    await quiet(broker)
    assert consumer.errors == []


async def test_a_segment_that_many_messages_need_stays(broker: Broker, tmp_path: Path) -> None:
    consumer = await consumer_of(broker)
    producer = Client(broker)
    for _ in range(200):
        await producer.publish_later("t", b"all of them are deferred" * 3, HOUR)
    await churn(broker, consumer)
    first = segments(tmp_path)[0]
    await settle(broker)
    assert segments(tmp_path)[0] == first
    assert broker.topics["t"].side is None


async def test_a_message_that_waits_is_never_copied(broker: Broker, tmp_path: Path) -> None:
    await consumer_of(broker, 0)
    producer = Client(broker)
    for _ in range(20):
        await producer.publish_many("t", [b"nobody takes it" * 10] * 20)
    before = segments(tmp_path)
    await settle(broker)
    assert segments(tmp_path) == before
    assert broker.topics["t"].side is None
