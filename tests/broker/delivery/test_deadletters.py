"""Dead letters: where they go, what is kept with them, that none is lost on the way, and how they come back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery import dead_letters as deadletters
from flintmq.broker.delivery import redrive as redrive_module
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.dead_letters import LONGEST_PATH, RETRY_DELAY, SLICE
from flintmq.broker.delivery.redrive import REDRIVE, Redrive
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.drain import Remainder, _remainders
from flintmq.broker.http.peek import cursor_of, peek_topic
from flintmq.broker.observe import prometheus
from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage.journal import NEVER
from flintmq.errors import OptionError
from flintmq.protocol.seqs import SEQ_MASK
from flintmq.protocol.wire import Message, valid_name
from flintmq.system import Buffer
from support.fakes import SECOND, Client, CountingDisk, FakeClock, pass_time, quiet, until
from support.garbage import collect_if_grown
from support.http_client import HttpClient
from support.power_loss import Ledger, World, frozen_time, unexpected
from support.simdisk import PowerLoss, SimDisk, settled

MINUTE = 60.0


def limit(channel: Channel, attempts: int, dead_letter_topic: str = "") -> None:
    channel.settings = replace(channel.settings, max_attempts=attempts, dead_letter_topic=dead_letter_topic)


async def channel_of(broker: Broker, topic: str = "t", name: str = "c", attempts: int = 1, to: str = "") -> Channel:
    channel, _ = broker.topic(topic).channel(name)
    limit(channel, attempts, to)
    await quiet(broker)
    return channel


async def consumer_of(channel: Channel, ready: int = 100) -> Client:
    consumer = Client(channel.broker)
    await consumer.subscribe(channel.topic.name, channel.name, ready)
    return consumer


async def received(consumer: Client, count: int = 1) -> list[Message]:
    await until(lambda: len(consumer.messages) >= count)
    messages = consumer.messages
    consumer.take()
    return messages


async def moved(broker: Broker) -> None:
    """All copies are made and on the device, and what they are of is finished."""
    channels = [channel for topic in broker.topics.values() for channel in topic.channels.values()]
    await until(lambda: not any(channel.leaving or channel.leaving.expired for channel in channels))
    await quiet(broker)


async def die(channel: Channel, *bodies: bytes) -> list[Message]:
    """Publish these and let a consumer give them up; what it got."""
    await Client(channel.broker).publish_many(channel.topic.name, list(bodies))
    consumer = await consumer_of(channel, len(bodies))
    messages = await received(consumer, len(bodies))
    for message in messages:
        consumer.requeue(message)
    await moved(channel.broker)
    consumer.hang_up()
    await until(lambda: consumer.transport.lost)
    return messages


async def about(topic: Topic, seq: int) -> dict[str, Any]:
    # Empty, if nothing is kept with it, is not nothing.
    [extra] = await until(lambda: [extra for extra in [topic.extra_of(seq)] if extra is not None])
    return extra


async def body(topic: Topic, seq: int) -> bytes:
    return bytes(await until(lambda: topic.frame(seq) or b""))[34:]


def outstanding(channel: Channel) -> list[int]:
    """Every seq that the channel still has to see to, wherever it is."""
    seqs = [seq for first, stop in [*channel.waiting, *channel.side] for seq in range(first, stop)]
    seqs += range(channel.seen, channel.topic.pumped)
    seqs += [*channel.requeued, *channel.unusual, *channel.leaving]
    seqs += channel.deferred.columns()[1]
    seqs += [seq for seq, _ in channel.ring.held(channel.ring.lo, channel.ring.hi)]
    assert len(seqs) == len(set(seqs)), "a message is in two places"
    return seqs


async def contents(broker: Broker) -> dict[str, list[bytes]]:
    """The messages of each channel, as topic/channel, and of each backlog, as topic."""
    found = {}
    for topic in broker.topics.values():
        backlog = [
            seq for first, stop in topic.log.spans() for seq in range(max(first, topic.pumped), stop) if topic.depth
        ]
        if backlog:
            found[topic.name] = [await body(topic, seq) for seq in backlog]
        for channel in topic.channels.values():
            found[f"{topic.name}/{channel.name}"] = [await body(topic, seq) for seq in outstanding(channel)]
    return found


# --- Where they go ----------------------------------------------------------------------------------------------------


async def test_a_message_goes_to_the_dead_letter_topic_after_its_last_attempt(broker: Broker, clock: FakeClock) -> None:
    channel = await channel_of(broker, attempts=3)
    published = clock.wall()
    await Client(broker).publish("t", b"poison")
    consumer = await consumer_of(channel)
    for attempt in (1, 2, 3):
        [message] = await received(consumer)
        assert message.attempts == attempt
        assert "t.c.dead" not in broker.topics
        clock.advance(1)
        consumer.requeue(message)
    await moved(broker)
    assert await contents(broker) == {"t/c": [], "t.c.dead": [b"poison"]}
    dead = broker.topics["t.c.dead"]
    assert (await about(dead, dead.pumped))["dead"] == {
        "topic": "t",
        "channel": "c",
        "id": message.id.decode(),
        "attempts": 3,
        "reason": "requeued",
        "time": clock.wall(),
        "published": published,
        "path": ["t"],
    }
    other = await consumer_of(dead.channel("look")[0])
    [letter] = await received(other)
    assert (letter.body, letter.attempts, letter.timestamp) == (b"poison", 1, clock.wall())
    assert (channel.requeue_count, channel.leaving.dead_lettered_count) == (3, 1)
    assert consumer.messages == [] and consumer.errors == []


async def test_a_timeout_is_a_failed_attempt(broker: Broker, clock: FakeClock) -> None:
    channel = await channel_of(broker, attempts=2)
    await Client(broker).publish("t", b"hangs")
    consumer = await consumer_of(channel)
    await received(consumer)
    await pass_time(broker, clock, 61)
    [message] = await received(consumer)
    assert message.attempts == 2
    await pass_time(broker, clock, 61)
    await moved(broker)
    dead = broker.topics["t.c.dead"]
    found = (await about(dead, dead.pumped))["dead"]
    assert (found["reason"], found["attempts"]) == ("timed out", 2)
    assert consumer.session.in_flight == 0
    consumer.finish(message)
    assert consumer.errors[0].startswith(b"E_FIN_FAILED")


async def test_without_a_limit_a_message_is_put_back_for_ever(broker: Broker) -> None:
    channel = await channel_of(broker, attempts=0)
    await Client(broker).publish("t", b"again")
    consumer = await consumer_of(channel)
    for attempt in range(1, 50):
        [message] = await received(consumer)
        assert message.attempts == attempt
        consumer.requeue(message)
    assert list(broker.topics) == ["t"] and channel.leaving.dead_letters is None


async def test_each_channel_has_dead_letters_of_its_own(broker: Broker) -> None:
    a, b = await channel_of(broker, name="a"), await channel_of(broker, name="b", attempts=0)
    await die(a, b"one", b"two")
    assert await contents(broker) == {"t/a": [], "t.a.dead": [b"one", b"two"], "t/b": [b"one", b"two"]}
    assert b.leaving.dead_lettered_count == 0


async def test_the_setting_names_another_topic(broker: Broker) -> None:
    await die(await channel_of(broker, name="a", to="graveyard"), b"one")
    await die(await channel_of(broker, "u", "b", to="graveyard"), b"two")
    grave = broker.topics["graveyard"]
    assert (await contents(broker))["graveyard"] == [b"one", b"two"]
    origins = [(await about(grave, grave.pumped + i))["dead"]["topic"] for i in (0, 1)]
    assert origins == ["t", "u"]


@pytest.mark.parametrize(
    ("topic", "channel", "expected"),
    [
        ("orders", "billing", "orders.billing.dead"),
        ("orders#ephemeral", "billing", "orders.billing.dead#ephemeral"),
        ("orders", "billing#ephemeral", "orders.billing.dead#ephemeral"),
        ("o" * 29, "c" * 29, "o" * 29 + "." + "c" * 29 + ".dead"),
        ("o" * 30, "c" * 29, "o" * 30 + "." + "c" * 15 + ".ba394e845578.dead"),
    ],
)
def test_the_name_of_a_dead_letter_topic(topic: str, channel: str, expected: str) -> None:
    assert deadletters._own_topic(topic, channel) == expected
    assert valid_name(expected)


def test_the_longest_names_give_valid_names_that_differ() -> None:
    long = ["x" * 64, "x" * 54 + "#ephemeral", "x" * 63 + "y"]
    names = {deadletters._own_topic(topic, channel) for topic in long for channel in long}
    assert len(names) == 9 and all(valid_name(name) for name in names)


async def test_what_is_ephemeral_has_ephemeral_dead_letters(broker: Broker, tmp_path: Path) -> None:
    await die(await channel_of(broker, "t#ephemeral"), b"one")
    consumer = await consumer_of(await channel_of(broker, "u", "c#ephemeral"))
    await Client(broker).publish("u", b"two")
    consumer.requeue((await received(consumer))[0])
    await moved(broker)
    topics = {name: topic.depth for name, topic in broker.topics.items() if "dead" in name}
    assert topics == {"t.c.dead#ephemeral": 1, "u.c.dead#ephemeral": 1}
    dead = broker.topics["t.c.dead#ephemeral"]
    assert (await about(dead, dead.pumped))["dead"]["id"]
    assert not list(tmp_path.glob("flintmq/topics/*dead*"))


# --- Nothing is lost on the way ---------------------------------------------------------------------------------------


@pytest.fixture
async def slow(start_broker: StartBroker, tmp_path: Path) -> tuple[Broker, SimDisk]:
    """A broker on a simulated disk, whose threads can be held."""
    disk = SimDisk(tmp_path)
    return await start_broker(disk=disk, data_path=disk.root), disk


async def give_up(channel: Channel, *bodies: bytes) -> Client:
    """Publish, deliver, requeue; copies may still be under way."""
    await Client(channel.broker).publish_many(channel.topic.name, list(bodies))
    consumer = await consumer_of(channel)
    for message in await received(consumer, len(bodies)):
        consumer.requeue(message)
    return consumer


@pytest.mark.parametrize("durability", ["os", "memory"])
async def test_it_is_finished_only_when_its_copy_is_on_the_device(
    start_broker: StartBroker, tmp_path: Path, durability: str
) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, durability=durability)
    channel, _ = broker.topic("t").channel("c")
    limit(channel, 1)
    broker.topic("t.c.dead")
    await settled(broker)
    disk.hold()
    consumer = await give_up(channel, b"one", b"two")
    dead = broker.topics["t.c.dead"]
    await until(lambda: dead.depth == 2)
    await settled(broker)
    assert len(channel.leaving) == 2 and channel.depth == 0 and channel.in_flight_count == 0
    assert consumer.messages == [], "in no state in which it could be delivered"
    assert channel.leaving.dead_lettered_count == 0
    disk.release()
    await until(lambda: not channel.leaving)
    assert dead.log.durable == dead.log.end and channel.leaving.dead_lettered_count == 2


async def test_a_dead_letter_topic_that_refuses_costs_nothing(
    broker: Broker, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    channel = await channel_of(broker)
    await Client(broker).publish_many("t", [b"one", b"two"])
    broker.refusing = "the disk is nearly full"
    consumer = await consumer_of(channel)
    with caplog.at_level(logging.WARNING):
        for message in await received(consumer, 2):
            consumer.requeue(message)
        await moved(broker)
    assert [record.message for record in caplog.records] == [
        "CHANNEL(c): a message of topic t cannot go to its dead-letter topic t.c.dead and is requeued "
        "- the disk is nearly full"
    ]
    assert len(channel.deferred) == 2 and channel.leaving.dead_lettered_count == 0
    broker.refusing = ""
    await pass_time(broker, clock, RETRY_DELAY / SECOND)
    messages = await received(consumer, 2)
    assert [message.attempts for message in messages] == [2, 2]
    for message in messages:
        consumer.requeue(message)
    await moved(broker)
    assert sorted((await contents(broker))["t.c.dead"]) == [b"one", b"two"]


async def test_a_limit_of_the_dead_letter_topic_is_kept(start_broker: StartBroker) -> None:
    broker = await start_broker(max_topic_messages=2)
    channel = await channel_of(broker)
    await die(channel, b"one", b"two")
    await die(channel, b"three")
    assert (await contents(broker)) == {"t/c": [b"three"], "t.c.dead": [b"one", b"two"]}
    assert len(channel.deferred) == 1


async def test_a_write_that_fails_puts_it_back(slow: tuple[Broker, SimDisk]) -> None:
    broker, disk = slow
    channel, _ = broker.topic("t").channel("c")
    limit(channel, 1)
    broker.topic("t.c.dead")
    await settled(broker)
    disk.fail("write", errno.ENOSPC, path="t.c.dead", times=1)
    await give_up(channel, b"one")
    await until(lambda: len(channel.deferred))
    assert not channel.leaving and broker.topics["t.c.dead"].depth == 0


async def test_with_durability_memory_a_write_that_fails_is_tried_again(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flintmq.broker.storage.log.WRITE_AGAIN", 0.01)
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, durability="memory")
    channel, _ = broker.topic("t").channel("c")
    limit(channel, 1)
    disk.fail("write", errno.ENOSPC, path="t.c.dead", times=2)
    await give_up(channel, b"one")
    await until(lambda: channel.leaving.dead_lettered_count)
    assert broker.topics["t.c.dead"].depth == 1


class FullDisk(CountingDisk):
    """Has no room for messages while it is full; counts the writes that failed."""

    is_full = False
    failures = 0

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.is_full and sum(map(len, buffers)) > 10_000:
            self.failures += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, buffers, offset)


@pytest.mark.parametrize("large", [True, False])
async def test_a_write_that_fails_is_not_tried_again_at_once(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Dead letters wait for the device also with durability memory: those of a full disk for a while."""
    if large:
        # Otherwise no thread would write them.
        monkeypatch.setattr("flintmq.broker.storage.log.LARGE_WRITE", 1)
    disk = FullDisk()
    broker = await start_broker(disk=disk, durability="memory")
    channel = await channel_of(broker)
    consumer = await consumer_of(channel)
    await Client(broker).publish_many("t", [b"x" * 50_000] * 8)
    messages = await received(consumer, 8)
    disk.is_full = True
    for message in messages:
        consumer.requeue(message)
        await asyncio.sleep(0)
    await until(lambda: disk.failures)
    for _ in range(300):
        await asyncio.sleep(0.0005)
    assert disk.failures <= 2
    disk.is_full = False
    await moved(broker)
    assert broker.topics["t.c.dead"].depth == 8


async def test_a_topic_that_cannot_be_made_puts_it_back(slow: tuple[Broker, SimDisk]) -> None:
    broker, disk = slow
    channel, _ = broker.topic("t").channel("c")
    limit(channel, 1)
    await settled(broker)
    disk.fail("make_folder", errno.ENOSPC, times=1)
    await give_up(channel, b"one")
    await until(lambda: len(channel.deferred))
    assert list(broker.topics) == ["t"]


async def test_the_channel_is_emptied_or_deleted_meanwhile(slow: tuple[Broker, SimDisk]) -> None:
    broker, disk = slow
    channel, _ = broker.topic("t").channel("c")
    limit(channel, 1)
    await settled(broker)
    disk.hold()
    consumer = await give_up(channel, b"one", b"two")
    await until(lambda: "t.c.dead" in broker.topics and broker.topics["t.c.dead"].depth)
    channel.empty()
    assert outstanding(channel) == []
    disk.release()
    await settled(broker)
    assert channel.leaving.dead_lettered_count == 0 and outstanding(channel) == []
    consumer.hang_up()
    await settled(broker)
    disk.hold()
    await give_up(channel, b"three")
    broker.topics["t"].delete_channel("c")
    disk.release()
    await settled(broker)
    assert list(broker.topics["t"].channels) == []


async def test_the_dead_letter_topic_is_deleted_meanwhile(slow: tuple[Broker, SimDisk], clock: FakeClock) -> None:
    broker, disk = slow
    channel, _ = broker.topic("t").channel("c")
    limit(channel, 1)
    await settled(broker)
    disk.hold()
    consumer = await give_up(channel, b"one")
    await until(lambda: "t.c.dead" in broker.topics and broker.topics["t.c.dead"].depth)
    broker.delete_topic("t.c.dead")
    disk.release()
    await until(lambda: len(channel.deferred))
    assert not channel.leaving
    clock.advance(RETRY_DELAY / SECOND)
    broker.scan.tick(clock.now)
    [message] = await received(consumer)
    consumer.requeue(message)
    await until(lambda: channel.leaving.dead_lettered_count == 1)
    assert (await contents(broker))["t.c.dead"] == [b"one"]


async def test_a_paused_channel_gives_up_as_well(broker: Broker, clock: FakeClock) -> None:
    channel = await channel_of(broker)
    await Client(broker).publish("t", b"one")
    await received(await consumer_of(channel))
    channel.pause(True)
    await pass_time(broker, clock, 61)
    await moved(broker)
    assert await contents(broker) == {"t/c": [], "t.c.dead": [b"one"]}


async def test_thousands_of_timeouts_are_copied_a_slice_at_a_time(broker: Broker, clock: FakeClock) -> None:
    channel = await channel_of(broker)
    bodies = [b"%d" % i for i in range(5_000)]
    await Client(broker).publish_many("t", bodies)
    consumer = await consumer_of(channel, 2_500)
    other = await consumer_of(channel, 2_500)
    await until(lambda: len(consumer.messages) + len(other.messages) == 5_000)
    dead = broker.topic("t.c.dead")
    clock.advance(61)
    broker.scan.tick(clock.now)
    before, slices = 0, 0
    while dead.message_count < 5_000:
        assert dead.message_count - before <= SLICE, "too much in one turn of the loop"
        slices += dead.message_count > before
        before = dead.message_count
        await asyncio.sleep(0)
    assert slices >= 5_000 / SLICE - 1
    await moved(broker)
    assert (await contents(broker)) == {"t/c": [], "t.c.dead": bodies}


async def test_no_more_are_leaving_than_can_be_kept_in_memory(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintmq.broker.delivery.leaving.LONGEST_QUEUE", 3)
    channel = await channel_of(broker)
    await Client(broker).publish_many("t", [b"%d" % i for i in range(5)])
    consumer = await consumer_of(channel)
    consumer.send(b"".join(b"REQ %s 0\n" % message.id for message in await received(consumer, 5)))
    assert (len(channel.leaving), len(channel.deferred)) == (3, 2)
    await moved(broker)
    assert channel.leaving.dead_lettered_count == 3


async def test_messages_that_left_the_memory_are_read_back(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(mem_queue_size=0, max_bytes_per_file=50_000, cold_cache_bytes=1)
    channel = await channel_of(broker)
    bodies = [b"%d" % i * 500 for i in range(200)]
    await Client(broker).publish_many("t", bodies)
    await received(await consumer_of(channel, 200), 200)
    await quiet(broker)
    await pass_time(broker, clock, 61)
    await moved(broker)
    assert await contents(broker) == {"t/c": [], "t.c.dead": bodies}
    dead = broker.topics["t.c.dead"]
    broker.turns.housekeeping()
    dead.trim()
    assert not dead.log.in_memory(dead.pumped), "to be read from a file"
    for i in (0, 199, 100):
        assert (await about(dead, dead.pumped + i))["dead"]["topic"] == "t"


async def test_a_damaged_message_is_given_up(start_broker: StartBroker, tmp_path: Path, clock: FakeClock) -> None:
    broker = await start_broker(mem_queue_size=0)
    channel = await channel_of(broker)
    await Client(broker).publish("t", b"first")
    await Client(broker).publish("t", b"second")
    consumer = await consumer_of(channel)
    await received(consumer, 2)
    await quiet(broker)
    broker.topics["t"].trim()
    broker.store.close()
    [segment] = tmp_path.glob("flintmq/topics/t@*/*.seg")
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"first", b"fir5t"))
    await pass_time(broker, clock, 61)
    await moved(broker)
    assert await contents(broker) == {"t/c": [], "t.c.dead": [b"second"]}


# --- No loops ---------------------------------------------------------------------------------------------------------


async def test_a_dead_letter_never_goes_back_to_where_it_was(broker: Broker, clock: FakeClock) -> None:
    await die(await channel_of(broker), b"one")
    back = await channel_of(broker, "t.c.dead", "look", to="t")
    consumer = await consumer_of(back)
    consumer.requeue((await received(consumer))[0])
    await moved(broker)
    assert await contents(broker) == {"t/c": [], "t.c.dead/look": [b"one"]}
    assert len(back.deferred) == 1
    limit(back, 1, "t.c.dead")
    await pass_time(broker, clock, RETRY_DELAY / SECOND)
    consumer.requeue((await received(consumer))[0])
    await moved(broker)
    assert len(back.deferred) == 1, "nor does it stay in a circle of one"


async def test_dead_letters_of_dead_letters_come_to_an_end(broker: Broker) -> None:
    name = "t"
    await Client(broker).publish("t", b"nobody wants it")
    for depth in range(LONGEST_PATH + 1):
        channel = await channel_of(broker, name, "c")
        consumer = await consumer_of(channel)
        consumer.requeue((await received(consumer))[0])
        await moved(broker)
        if depth < LONGEST_PATH:
            name = deadletters.dead_letter_topic(channel)
            topic = broker.topics[name]
            found = (await about(topic, topic.pumped))["dead"]
            assert len(found["path"]) == depth + 1 and found["published"] == consumer.broker.clock.wall()
    assert len(channel.deferred) == 1
    assert len(broker.topics) == LONGEST_PATH + 1


async def test_who_it_was_is_known_when_its_segment_is_gone(start_broker: StartBroker, clock: FakeClock) -> None:
    """A copy of an old message keeps what was kept with the original; after a crash too."""
    small = {"max_bytes_per_file": 20_000, "mem_queue_size": 0, "sync_timeout": 3_600 * SECOND}
    broker = await start_broker(**small)
    await die(await channel_of(broker), b"old")
    dead = broker.topics["t.c.dead"]
    consumer = await consumer_of(dead.channel("look")[0])
    [message] = await received(consumer)
    seq = int(message.id, 16) & SEQ_MASK
    consumer.requeue(message, MINUTE * 50)
    producer = Client(broker)
    for _ in range(20):
        await producer.publish_many("t.c.dead", [b"passes by" * 10] * 20)
        consumer.finish(*await received(consumer, 20))
    for _ in range(12):
        await quiet(broker)
        clock.advance(31)
        broker.upkeep.sync()
    await quiet(broker)
    assert dead.mover.below > seq
    assert (await about(dead, seq))["dead"]["id"]
    broker.kill()
    broker = await start_broker(**small)
    dead = broker.topics["t.c.dead"]
    assert dead.mover.below > seq
    assert (await about(dead, seq))["dead"]["topic"] == "t"
    assert await body(dead, seq) == b"old"
    assert await about(dead, dead.log.spans()[-1][1] - 1) == {}


# --- Restarts ---------------------------------------------------------------------------------------------------------


async def test_a_stop_finishes_what_has_a_copy(slow: tuple[Broker, SimDisk], start_broker: StartBroker) -> None:
    broker, disk = slow
    channel, _ = broker.topic("t").channel("c")
    limit(channel, 1)
    await settled(broker)
    disk.hold()
    await give_up(channel, b"one")
    await until(lambda: "t.c.dead" in broker.topics and broker.topics["t.c.dead"].depth)
    assert channel.leaving
    disk.release()
    await broker.stop()
    broker = await start_broker(disk=disk.after_power_loss("none"), data_path=disk.root)
    assert await contents(broker) == {"t/c": [], "t.c.dead": [b"one"]}


async def test_a_stop_brings_back_what_has_none(broker: Broker, start_broker: StartBroker) -> None:
    channel = await channel_of(broker, attempts=1)
    await Client(broker).publish("t", b"one")
    consumer = await consumer_of(channel)
    [message] = await received(consumer)
    consumer.requeue(message)
    assert channel.leaving
    await broker.stop()
    broker = await start_broker()
    channel = broker.topics["t"].channels["c"]
    assert await contents(broker) == {"t/c": [b"one"]}
    limit(channel, 1)
    consumer = await consumer_of(channel)
    [message] = await received(consumer)
    assert message.attempts == 2
    consumer.requeue(message)
    await moved(broker)
    assert await contents(broker) == {"t/c": [], "t.c.dead": [b"one"]}


async def test_dead_letters_and_what_is_kept_with_them_outlive_the_broker(start_broker: StartBroker) -> None:
    for crash in (False, True):
        broker = await start_broker()
        channel = await channel_of(broker)
        await die(channel, b"one")
        if crash:
            broker.kill()
        else:
            await broker.stop()
    broker = await start_broker()
    dead = broker.topics["t.c.dead"]
    assert await contents(broker) == {"t/c": [], "t.c.dead": [b"one", b"one"]}
    seqs = [seq for first, stop in dead.log.spans() for seq in range(first, stop)]
    assert [(await about(dead, seq))["dead"]["reason"] for seq in seqs] == ["requeued", "requeued"]


async def dead_and_back(world: World) -> None:
    """Messages die, some come back, and some of those are finished."""
    await world.start()
    producer, broker = world.client(), world.broker
    bodies = [b"message %d" % i for i in range(6)]
    for one in bodies:
        await world.publish(producer, b"PUB t\n" + len(one).to_bytes(4, "big") + one, "t", [one])
    consumer = await world.subscribe("t", "c")
    channel = broker.topics["t"].channels["c"]
    limit(channel, 2)
    for count in (6, 6):
        for message in await world.receive(consumer, "t", count):
            consumer.requeue(message)
        await world.settle()
    await world.pass_time(1)
    await world.sync()
    if world.disk.power_off_at is None:
        assert channel.leaving.dead_lettered_count == 6
    source, _ = broker.topic("t.c.dead").channel(REDRIVE)
    await world.settle()
    channel.redrive = Redrive(channel, source, 4, 0)
    await world.settle()
    await world.pass_time(1)
    if world.disk.power_off_at is None:
        assert channel.redrive.moved == 4 and not channel.redrive.running
    messages = await world.receive(consumer, "t", 4)
    await world.finish(consumer, "t", "c", messages[:2])
    await world.sync()
    await world.sync()


async def until_the_power_goes(folder: Path, n: int | None, durability: str) -> tuple[SimDisk, World]:
    disk = SimDisk(folder, seed=n or 0)
    disk.power_off_at = n
    clock = FakeClock()
    world = World(disk, clock, Ledger(), durability=durability)
    async with frozen_time(clock) as raised:
        with contextlib.suppress(PowerLoss):
            await dead_and_back(world)
        await world.die()
    assert unexpected(raised) == []
    return disk, world


async def what_is_left(disk: SimDisk, clock: FakeClock, durability: str) -> dict[str, list[bytes]]:
    async with frozen_time(clock) as raised:
        world = World(disk, clock, Ledger(), durability=durability)
        await world.start()
        reading = asyncio.ensure_future(contents(world.broker))
        while not reading.done():
            await world.settle()
        await world.broker.stop()
    assert unexpected(raised) == []
    return reading.result()


@pytest.fixture
def small_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ROLL_AT", 700)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["power", "kill"])
@pytest.mark.usefixtures("small_journals")
async def test_a_crash_at_any_call_neither_loses_nor_doubles_a_message(tmp_path: Path, kind: str) -> None:
    """Each message is at its channel, or among the dead letters, or was finished: never in two of these places."""
    durability = "fsync" if kind == "power" else "os"
    whole, _ = await until_the_power_goes(tmp_path, None, durability)
    for n in range(1, whole.calls + 1):
        disk, world = await until_the_power_goes(tmp_path, n, durability)
        promised = set().union(*world.ledger.owed.values())
        gone = {one for _, _, one in world.ledger.gone}
        left: list[int | str] = ["none", n, "all"]
        for after in [disk.after_kill()] if kind == "kill" else [disk.after_power_loss(one) for one in left]:
            found = [one for bodies in (await what_is_left(after, world.clock, durability)).values() for one in bodies]
            where = f"crash at call {n} of {whole.calls}, {disk.history[n - 1]}"
            assert len(found) == len(set(found)), f"doubled: {where}"
            assert promised <= set(found), f"lost: {where}"
            assert not gone & set(found), f"came back: {where}"
        collect_if_grown()


# --- The way back -----------------------------------------------------------------------------------------------------


async def redriven(channel: Channel, most: int = NEVER, rate: int = 0, source: str = REDRIVE) -> Redrive:
    topic = channel.broker.topics[deadletters.dead_letter_topic(channel)]
    taken_from, _ = topic.channel(source)
    await quiet(channel.broker)
    channel.redrive = Redrive(channel, taken_from, most, rate)
    redrive = channel.redrive
    await until(lambda: not redrive.running)
    await quiet(channel.broker)
    return redrive


async def test_dead_letters_go_back_to_their_channel_alone(broker: Broker, clock: FakeClock) -> None:
    channel, other = await channel_of(broker, attempts=2), await channel_of(broker, name="other", attempts=0)
    published = clock.wall()
    await Client(broker).publish_many("t", [b"one", b"two"])
    consumer = await consumer_of(channel)
    for _ in range(2):
        for message in await received(consumer, 2):
            consumer.requeue(message)
    await moved(broker)
    clock.advance(100)
    redrive = await redriven(channel)
    assert (redrive.moved, redrive.planned, redrive.error) == (2, 2, "")
    messages = await received(consumer, 2)
    assert [(m.body, m.attempts, m.timestamp) for m in messages] == [(b"one", 1, published), (b"two", 1, published)]
    assert other.depth == 2, "the other channel has them once, as before"
    assert (await contents(broker))["t.c.dead/redrive"] == []
    consumer.finish(messages[0])
    consumer.requeue(messages[1])
    [again] = await received(consumer)
    assert (again.body, again.attempts) == (b"two", 2)
    consumer.requeue(again)
    await moved(broker)
    assert consumer.errors == []
    assert (await contents(broker))["t.c.dead/redrive"] == [b"two"], "it may die again"
    assert channel.leaving.dead_lettered_count == 3


async def test_a_redrive_of_some(broker: Broker) -> None:
    channel = await channel_of(broker)
    bodies = [b"%d" % i for i in range(10)]
    await die(channel, *bodies)
    redrive = await redriven(channel, most=4)
    assert (redrive.moved, redrive.planned) == (4, 4)
    assert await contents(broker) == {"t/c": bodies[:4], "t.c.dead/redrive": bodies[4:]}
    redrive = await redriven(channel)
    assert (redrive.moved, redrive.planned) == (6, 6)
    assert await contents(broker) == {"t/c": bodies, "t.c.dead/redrive": []}
    redrive = await redriven(channel)
    assert (redrive.moved, redrive.planned) == (0, 0)


async def test_a_redrive_has_a_rate(broker: Broker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive_module, "STRIDE", 0.001)
    channel = await channel_of(broker)
    await die(channel, *[b"%d" % i for i in range(25)])
    source, _ = broker.topics["t.c.dead"].channel(REDRIVE)
    await quiet(broker)
    channel.redrive = redrive = Redrive(channel, source, NEVER, 10)
    for expected in (10, 20, 25):
        await until(lambda expected=expected: redrive.moved == expected)  # type: ignore[misc]
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert redrive.moved == expected and redrive.running == (expected < 25)
        clock.advance(1)
    assert redrive.planned == 25


async def test_only_ones_own_come_back_from_a_topic_of_many(broker: Broker) -> None:
    a, b = await channel_of(broker, name="a", to="grave"), await channel_of(broker, name="b", to="grave")
    await die(a, b"a1", b"a2")
    b.empty()
    await die(b, b"b1")
    a.empty()
    await Client(broker).publish("grave", b"never alive")
    redrive = await redriven(b)
    assert (redrive.moved, redrive.planned) == (1, 1)
    assert await contents(broker) == {"t/a": [], "t/b": [b"b1"], "grave/redrive": [b"a1", b"a2", b"never alive"]}


async def test_what_somebody_has_handled_does_not_come_back(broker: Broker) -> None:
    channel = await channel_of(broker)
    await die(channel, b"one", b"two", b"three", b"four")
    look, _ = broker.topics["t.c.dead"].channel(REDRIVE)
    consumer = await consumer_of(look, 3)
    one, two, _ = await received(consumer, 3)
    consumer.ready(0)
    consumer.finish(one)
    consumer.requeue(two)
    redrive = await redriven(channel)
    assert redrive.moved == 2, "neither what was finished nor what is in flight"
    assert sorted((await contents(broker))["t/c"]) == [b"four", b"two"]
    assert (await contents(broker))["t.c.dead/redrive"] == [b"three"]


async def test_thousands_come_back_a_slice_at_a_time(start_broker: StartBroker) -> None:
    broker = await start_broker(mem_queue_size=100, max_bytes_per_file=100_000, cold_cache_bytes=1)
    channel = await channel_of(broker)
    bodies = [b"%d" % i for i in range(2_000)]
    await die(channel, *bodies)
    source, _ = broker.topics["t.c.dead"].channel(REDRIVE)
    await quiet(broker)
    channel.redrive = redrive = Redrive(channel, source, NEVER, 0)
    before = 0
    while redrive.running:
        end = channel.topic.side_end - channel.topic.side_base
        assert end - before <= SLICE
        before = end
        await asyncio.sleep(0)
    assert redrive.moved == 2_000
    consumer = await consumer_of(channel, 2_000)
    messages = await received(consumer, 2_000)
    assert [message.body for message in messages] == bodies
    consumer.finish(*messages)
    await quiet(broker)
    broker.turns.housekeeping()
    side = channel.topic.side
    assert side is not None and side.memory_count == 0, "nothing of it stays in memory"


@pytest.mark.parametrize("crash", [False, True])
async def test_what_came_back_outlives_the_broker(start_broker: StartBroker, crash: bool) -> None:
    broker = await start_broker()
    channel = await channel_of(broker)
    await die(channel, b"one", b"two", b"three")
    await redriven(channel, most=2)
    consumer = await consumer_of(channel, 1)
    consumer.finish(*await received(consumer))
    consumer.ready(0)
    await quiet(broker)
    broker.journal.flush()
    if crash:
        broker.kill()
    else:
        await broker.stop()
    broker = await start_broker()
    assert await contents(broker) == {"t/c": [b"two"], "t.c.dead/redrive": [b"three"]}


async def test_no_number_of_the_side_log_is_used_twice(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its files are gone and only a snapshot is left: what has such a number would pass for finished."""
    small = {"max_bytes_per_file": 300, "sync_timeout": 3_600 * SECOND}
    broker = await start_broker(**small)
    channel = await channel_of(broker)
    await die(channel, *[b"one" * 100, b"two" * 100, b"three" * 100])
    await redriven(channel)
    consumer = await consumer_of(channel)
    consumer.finish(*await received(consumer, 3))
    await quiet(broker)
    await broker.stop()
    broker = await start_broker(**small)
    side = broker.topics["t"].side
    assert side is not None
    for _ in range(3):
        broker.upkeep.sync()
        await quiet(broker)
    assert side.segments == []
    monkeypatch.setattr(journal_module, "ROLL_AT", 200)
    broker.topics["t"].pause(True)
    broker.topics["t"].pause(False)
    await quiet(broker)
    used = side.end
    broker.kill()
    broker = await start_broker(**small)
    channel = await channel_of(broker)
    assert channel.topic.side_end >= used
    await die(channel, b"four")
    await redriven(channel)
    broker.kill()
    broker = await start_broker(**small)
    assert (await contents(broker))["t/c"] == [b"four"]


async def test_what_is_ephemeral_comes_back_too(broker: Broker) -> None:
    channel = await channel_of(broker, "t#ephemeral")
    await die(channel, b"one")
    await redriven(channel)
    consumer = await consumer_of(channel)
    [message] = await received(consumer)
    assert (message.body, message.attempts) == (b"one", 1)
    consumer.finish(message)
    await quiet(broker)
    broker.turns.housekeeping()
    side = channel.topic.side
    assert side is not None and side.blocks == []


async def test_a_redrive_and_its_channels_end(slow: tuple[Broker, SimDisk]) -> None:
    """Either channel may be deleted, or the target emptied, while copies are under way."""
    broker, disk = slow
    channel, _ = broker.topic("t").channel("c")
    limit(channel, 1)
    await settled(broker)

    async def begin(*bodies: bytes) -> tuple[Redrive, Channel]:
        consumer = await give_up(channel, *bodies)
        await until(lambda: "t.c.dead" in broker.topics and not channel.leaving)
        consumer.hang_up()
        source, _ = broker.topics["t.c.dead"].channel(REDRIVE)
        await settled(broker)
        broker.journal.sync_now()
        disk.hold()
        channel.redrive = redrive = Redrive(channel, source, NEVER, 0)
        await until(lambda: len(source.leaving) == len(bodies))
        return redrive, source

    redrive, source = await begin(b"emptied", b"emptied too")
    channel.empty()
    disk.release()
    await until(lambda: not redrive.running)
    assert outstanding(channel) == [] and outstanding(source) == [] and redrive.moved == 2

    redrive, source = await begin(b"source deleted")
    source.topic.delete_channel(REDRIVE)
    disk.release()
    await until(lambda: not source.leaving and channel.depth)
    assert await contents(broker) == {"t/c": [b"source deleted"]}
    channel.empty()

    redrive, source = await begin(b"target deleted")
    broker.topics["t"].delete_channel("c")
    disk.release()
    await until(lambda: not redrive.running)
    assert redrive.error and await contents(broker) == {"t.c.dead/redrive": [b"target deleted"]}


async def test_a_redrive_that_cannot_write_stops_and_says_why(slow: tuple[Broker, SimDisk]) -> None:
    broker, disk = slow
    channel, _ = broker.topic("t").channel("c")
    limit(channel, 1)
    await settled(broker)
    consumer = await give_up(channel, b"one")
    await until(lambda: "t.c.dead" in broker.topics and not channel.leaving)
    consumer.hang_up()
    disk.fail("write", errno.ENOSPC, path="side", times=1)
    redrive = await redriven_on(disk, channel)
    assert "No space left" in redrive.error and redrive.moved == 0
    assert await contents(broker) == {"t/c": [], "t.c.dead/redrive": [b"one"]}
    disk.heal()
    redrive = await redriven_on(disk, channel)
    assert (redrive.error, redrive.moved) == ("", 1)
    assert await contents(broker) == {"t/c": [b"one"], "t.c.dead/redrive": []}


async def redriven_on(disk: SimDisk, channel: Channel) -> Redrive:
    source, _ = channel.broker.topics["t.c.dead"].channel(REDRIVE)
    await settled(channel.broker)
    channel.redrive = redrive = Redrive(channel, source, NEVER, 0)
    await until(lambda: not redrive.running)
    return redrive


# --- What is told -----------------------------------------------------------------------------------------------------

Ask = Callable[..., Awaitable[tuple[int, Any]]]


@pytest.fixture
async def ask(start_broker: StartBroker) -> AsyncIterator[tuple[Broker, Ask]]:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with HttpClient.connect(broker.http_address) as client:

        async def ask(method: str, target: str) -> tuple[int, Any]:
            answer = await client.ask(method, target, b"" if method == "POST" else None)
            return answer.status, answer.json

        yield broker, ask


async def test_a_redrive_over_http(ask: tuple[Broker, Ask]) -> None:
    broker, http = ask
    channel = await channel_of(broker)
    target = "/channel/redrive?topic=t&channel=c"
    nothing = {"dead_letter_topic": "t.c.dead", "reason": "", "planned": 0, "moved": 0, "running": False}
    assert await http("GET", target) == (200, nothing)
    assert await http("POST", target) == (200, nothing), "there is no dead letter yet"
    await die(channel, b"one", b"two", b"three")
    started = {"dead_letter_topic": "t.c.dead", "reason": "", "planned": 2, "moved": 0, "running": True}
    assert await http("POST", target + "&count=2") == (200, started)
    await until(lambda: channel.redrive is not None and not channel.redrive.running)
    assert await http("GET", target) == (200, {**started, "moved": 2, "running": False})
    assert await contents(broker) == {"t/c": [b"one", b"two"], "t.c.dead/redrive": [b"three"]}


async def test_one_redrive_at_a_time(ask: tuple[Broker, Ask]) -> None:
    broker, http = ask
    channel = await channel_of(broker)
    await die(channel, *[b"%d" % i for i in range(10)])
    status, answer = await http("POST", "/channel/redrive?topic=t&channel=c&rate=1")
    assert (status, answer["running"]) == (200, True)
    status, answer = await http("POST", "/channel/redrive?topic=t&channel=c")
    assert (status, answer["message"].partition(":")[0]) == (409, "ALREADY_RUNNING")


async def test_a_dead_letter_topic_with_consumers_of_its_own(ask: tuple[Broker, Ask]) -> None:
    broker, http = ask
    channel = await channel_of(broker)
    broker.topic("t.c.dead").channel("alerts")
    await die(channel, b"one")
    status, answer = await http("POST", "/channel/redrive?topic=t&channel=c")
    assert status == 400 and answer["message"].startswith("MISSING_ARG_FROM") and "alerts" in answer["message"]
    assert list(broker.topics["t.c.dead"].channels) == ["alerts"]
    status, answer = await http("POST", "/channel/redrive?topic=t&channel=c&from=alerts")
    assert (status, answer["planned"]) == (200, 1)
    await until(lambda: channel.redrive is not None and channel.redrive.moved == 1)
    assert await contents(broker) == {"t/c": [b"one"], "t.c.dead/alerts": []}


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("", 400, "MISSING_ARG_TOPIC"),
        ("topic=t", 400, "MISSING_ARG_CHANNEL"),
        ("topic=t%20t&channel=c", 400, "INVALID_ARG_TOPIC"),
        ("topic=u&channel=c", 404, "TOPIC_NOT_FOUND"),
        ("topic=t&channel=d", 404, "CHANNEL_NOT_FOUND"),
    ],
)
async def test_an_unknown_channel(ask: tuple[Broker, Ask], method: str, query: str, status: int, code: str) -> None:
    broker, http = ask
    await channel_of(broker)
    assert await http(method, f"/channel/redrive?{query}") == (status, {"message": code})


@pytest.mark.parametrize(
    "argument", ["count=0", "count=-1", "count=x", "rate=0", "rate=1e9", f"count={10**20}", "rate="]
)
async def test_a_number_that_is_none(ask: tuple[Broker, Ask], argument: str) -> None:
    broker, http = ask
    await channel_of(broker)
    status, answer = await http("POST", f"/channel/redrive?topic=t&channel=c&{argument}")
    name = argument.partition("=")[0].upper()
    assert status == 400 and answer["message"].startswith(f"INVALID_ARG_{name}: ")


async def test_peek_tells_what_a_dead_letter_was(ask: tuple[Broker, Ask]) -> None:
    broker, http = ask
    channel = await channel_of(broker)
    [message] = await die(channel, b"one")
    broker.topics["t.c.dead"].channel(REDRIVE)
    await Client(broker).publish("t.c.dead", b"never alive")
    for target in ("/topic/peek?topic=t.c.dead", "/channel/peek?topic=t.c.dead&channel=redrive"):
        _, page = await http("GET", target)
        dead, other = page["messages"]
        assert (dead["dead"]["id"], dead["dead"]["topic"], dead["dead"]["channel"]) == (message.id.decode(), "t", "c")
        assert "dead" not in other


async def test_peek_reads_what_a_dead_letter_was_from_its_file(start_broker: StartBroker) -> None:
    broker = await start_broker()
    await die(await channel_of(broker), b"one")
    await broker.stop()
    broker = await start_broker()
    page = await peek_topic(broker.topics["t.c.dead"], 10, cursor_of(""), 10)
    assert [found["dead"]["reason"] for found in page["messages"]] == ["requeued"]


async def test_a_lost_client_gives_up_as_well(start_broker: StartBroker) -> None:
    broker = await start_broker(requeue_on_disconnect=True)
    consumer = await consumer_of(await channel_of(broker))
    await Client(broker).publish("t", b"one")
    await received(consumer)
    consumer.hang_up()
    await until(lambda: consumer.transport.lost)
    await moved(broker)
    assert await contents(broker) == {"t/c": [], "t.c.dead": [b"one"]}


async def test_settings_over_http_hold_at_once(ask: tuple[Broker, Ask]) -> None:
    broker, _ = ask
    channel, _ = broker.topic("t").channel("c")
    async with HttpClient.connect(broker.http_address) as client:
        wanted = b'{"max-attempts": 1, "dead-letter-topic": "grave"}'
        assert (await client.ask("PUT", "/channel/config?topic=t&channel=c", wanted)).status == 200
    await die(channel, b"one")
    assert await contents(broker) == {"t/c": [], "grave": [b"one"]}


async def test_dead_letters_are_counted(ask: tuple[Broker, Ask]) -> None:
    broker, http = ask
    await die(await channel_of(broker), b"one", b"two")
    line = 'nsqd_channel_dead_lettered_messages_total{topic="t",channel="c"} 2\n'
    assert line in prometheus.metrics(broker)[0].decode()
    _, usual = await http("GET", "/stats?format=json&topic=t")
    _, extended = await http("GET", "/stats?format=json&topic=t&extended=true")
    assert "dead_lettered_count" not in usual["topics"][0]["channels"][0]
    assert extended["topics"][0]["channels"][0]["dead_lettered_count"] == 2


async def test_a_death_that_a_seek_undid_has_no_copy(broker: Broker) -> None:
    channel = await channel_of(broker)
    dead, _ = broker.topic("t.c.dead").channel("d")
    consumer, keeper = await consumer_of(channel), await consumer_of(broker.topic("t").channel("keeper")[0], 0)
    await Client(broker).publish_many("t", [b"a", b"b"])
    # Its dead-letter topic takes a large batch, and nothing else until that is in.
    dead.topic.hold(keeper)
    for deaths in (2, 4):
        await until(lambda: len(consumer.messages) == deaths)  # noqa: B023
        for message in consumer.messages[-2:]:
            consumer.requeue(message)
        await quiet(broker)
        assert len(channel.leaving) == 2
        if deaths == 2:
            channel.seek(channel.topic.log.first)
    dead.topic.release()
    await moved(broker)
    assert (channel.leaving.dead_lettered_count, dead.message_count) == (2, 2)


async def test_a_topic_is_not_empty_while_dead_letters_are_on_their_way(broker: Broker) -> None:
    channel = await channel_of(broker)
    dead = broker.topic("t.c.dead")
    consumer = await consumer_of(channel)
    dead.hold(consumer)
    await Client(broker).publish("t", b"a")
    await until(lambda: consumer.messages)
    consumer.requeue(consumer.messages[0])
    await quiet(broker)
    assert (channel.depth, channel.in_flight_count, len(channel.leaving)) == (0, 0, 1)
    with pytest.raises(OptionError, match="holds messages"):
        broker.settings.change(("t",), {"durability": "memory"})
    drained = broker.drain(5)
    assert [str(found) for found in _remainders(broker)] == ["CHANNEL(c): 1 messages of t stay: 1 not finished in time"]
    dead.release()
    broker.refuse("")
    assert (await drained).left == [Remainder("t.c.dead", None, 1, 0, "without a channel")]
