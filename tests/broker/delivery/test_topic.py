"""A topic's marks and numbers, what survives a stop or a crash, and what a full disk does."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.topic import RESERVE
from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage.disk import BACKGROUND, Buffer
from flintmq.errors import NotFoundError, StartError
from flintmq.options import NsqdOptions
from flintmq.protocol.seqs import SEQ_MASK
from flintmq.protocol.wire import encode_mpub
from support.fakes import SECOND, Client, CountingDisk, FakeClock, dpub, pass_time, pub, quiet, until

OK = (0, b"OK")


def bodies(count: int, name: str = "m") -> list[bytes]:
    return [b"%s %d" % (name.encode(), number) for number in range(count)]


async def consumer_of(broker: Broker, ready: int, topic: str = "t", channel: str = "c") -> Client:
    client = Client(broker)
    await client.subscribe(topic, channel, ready)
    await quiet(broker)
    return client


@pytest.fixture
async def producer(broker: Broker) -> Client:
    return Client(broker)


# --- The backlog and the channels -------------------------------------------------------------------------------------


async def test_the_backlog_goes_to_the_first_channel_only(broker: Broker, producer: Client) -> None:
    await producer.publish_many("t", bodies(5))
    topic = broker.topics["t"]
    assert (topic.depth, topic.message_count, topic.message_bytes) == (5, 5, 15)
    first, _ = topic.channel("first")
    await quiet(broker)
    second, _ = topic.channel("second")
    await producer.publish("t", b"for both")
    await quiet(broker)
    assert (topic.depth, first.depth, second.depth) == (0, 6, 1)
    assert (first.message_count, second.message_count) == (6, 1)


async def test_a_new_channel_starts_behind_what_was_published(broker: Broker, producer: Client) -> None:
    early = await consumer_of(broker, 10, channel="early")
    await producer.publish("t", b"before")
    late = await consumer_of(broker, 10, channel="late")
    await producer.publish("t", b"after")
    await quiet(broker)
    assert (early.bodies, late.bodies) == ([b"before", b"after"], [b"after"])


async def test_a_topic_that_lost_its_last_channel_keeps_what_comes(broker: Broker, producer: Client) -> None:
    await consumer_of(broker, 10)
    await producer.publish("t", b"seen")
    await quiet(broker)
    topic = broker.topics["t"]
    topic.delete_channel("c")
    await producer.publish_many("t", bodies(3))
    assert topic.depth == 3
    again = await consumer_of(broker, 10)
    assert again.bodies == bodies(3)


async def test_a_paused_topic_takes_messages_and_hands_none_on(broker: Broker, producer: Client) -> None:
    consumer = await consumer_of(broker, 10)
    topic = broker.topics["t"]
    topic.pause(True)
    await producer.publish_many("t", bodies(3))
    await quiet(broker)
    assert (consumer.messages, topic.depth, topic.channels["c"].depth) == ([], 3, 0)
    # A channel made meanwhile has a share in it: nothing has been handed on yet.
    other, _ = topic.channel("other")
    topic.pause(False)
    await quiet(broker)
    assert (consumer.bodies, topic.depth, other.depth) == (bodies(3), 0, 3)


async def test_emptying_a_topic_drops_its_backlog_and_leaves_the_channels_theirs(
    broker: Broker, producer: Client, clock: FakeClock
) -> None:
    topic = broker.topic("t")
    channel, _ = topic.channel("c")
    await producer.publish_many("t", bodies(2))
    await quiet(broker)
    topic.pause(True)
    await producer.publish_many("t", bodies(3, "dropped"))
    await producer.publish_later("t", b"dropped too", 5)
    topic.empty()
    assert (topic.depth, channel.depth) == (0, 2)
    await producer.publish("t", b"last")
    topic.pause(False)
    consumer = await consumer_of(broker, 10)
    await pass_time(broker, clock, 10)
    assert consumer.bodies == [*bodies(2), b"last"]
    assert channel.message_count == 3


async def test_a_message_reaches_ten_channels_with_one_id(broker: Broker, producer: Client) -> None:
    consumers = [await consumer_of(broker, 10, channel=f"c{number}") for number in range(10)]
    await producer.publish("t", b"m")
    await quiet(broker)
    assert len({(message.id, message.timestamp, message.body) for c in consumers for message in c.messages}) == 1
    assert all(len(consumer.messages) == 1 for consumer in consumers)


async def test_deleting_a_topic_closes_its_consumers_without_a_word(broker: Broker, producer: Client) -> None:
    consumers = [await consumer_of(broker, 1, channel=name) for name in ("a", "b")]
    bystander = await consumer_of(broker, 1, topic="other")
    await producer.publish("t", b"m")
    folder = broker.topics["t"].folder
    assert folder is not None
    await quiet(broker)
    for consumer in consumers:
        consumer.take()
    broker.delete_topic("t")
    await quiet(broker)
    assert all(consumer.transport.closing and consumer.frames == [] for consumer in consumers)
    assert not bystander.transport.closing
    assert not producer.transport.closing
    assert list(broker.topics) == ["other"]
    assert not folder.exists()
    with pytest.raises(NotFoundError, match="topic does not exist"):
        broker.delete_topic("t")
    with pytest.raises(NotFoundError, match="channel does not exist"):
        broker.topics["other"].delete_channel("no such")


async def test_a_publish_that_waits_when_its_topic_goes_is_refused(broker: Broker, producer: Client) -> None:
    await producer.publish("t", b"m")
    one, many = Client(broker), Client(broker)
    one.send(pub("t", b"x"))
    many.send(encode_mpub(b"t", [b"y", b"z"]))
    broker.delete_topic("t")
    await quiet(broker)
    assert one.frames == [(1, b"E_PUB_FAILED PUB failed exiting")]
    assert many.frames == [(1, b"E_MPUB_FAILED MPUB failed exiting")]
    assert one.is_over and many.is_over


async def test_seqs_are_never_used_twice_not_even_by_a_topic_made_again(broker: Broker, producer: Client) -> None:
    """The clock stands still here: only the floor that a deletion raises keeps the ids apart."""
    ids = set()
    for _ in range(3):
        consumer = await consumer_of(broker, 10)
        await producer.publish_many("t", bodies(4))
        await quiet(broker)
        ids |= {message.id for message in consumer.messages}
        broker.delete_topic("t")
        await quiet(broker)
    assert len(ids) == 12


async def test_seqs_are_reserved_on_the_device_before_they_are_used(start_broker: StartBroker) -> None:
    class HeldDisk(CountingDisk):
        """Its threads can be held back."""

        def __init__(self) -> None:
            super().__init__()
            self.hold = False
            self.held: list[Callable[[], None]] = []

        def submit(
            self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], urgency: int = BACKGROUND
        ) -> None:
            start = functools.partial(super().submit, work, done, urgency)
            if self.hold:
                self.held.append(start)
            else:
                start()

        def let_go(self) -> None:
            self.hold = False
            for start in self.held:
                start()

    disk = HeldDisk()
    broker = await start_broker(disk=disk)
    disk.hold = True
    producer = Client(broker)
    producer.send(pub("t", b"m"))
    await quiet(broker)
    # Written to the file, but a crash could still make its seq come again.
    assert broker.topics["t"].log.written == broker.topics["t"].log.end
    assert producer.frames == []
    disk.let_go()
    await quiet(broker)
    assert producer.frames == [OK]


async def test_after_a_crash_the_log_goes_on_at_its_ceiling(start_broker: StartBroker) -> None:
    """Gaps are legal: they are not depth, they are not delivered, and nobody calls them lost."""
    broker = await start_broker()
    await Client(broker).publish_many("t", bodies(3))
    last = broker.topics["t"].log.end
    for round_ in range(3):
        broker.kill()
        broker = await start_broker()
        topic = broker.topics["t"]
        assert topic.log.end >= last + RESERVE // 2
        assert (topic.depth, topic.backend_depth) == (3 + round_, 3 + round_)
        await Client(broker).publish("t", b"after %d" % round_)
        last = topic.log.end
        assert topic.depth == 4 + round_
    topic.channel("c")
    await quiet(broker)
    channel = topic.channels["c"]
    assert (topic.depth, channel.depth, channel.message_count) == (0, 6, 6)
    consumer = await consumer_of(broker, 10)
    await until(lambda: len(consumer.messages) == 6)
    assert consumer.bodies == [*bodies(3), b"after 0", b"after 1", b"after 2"]


async def test_deferred_messages_around_a_gap_keep_their_time(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker()
    await Client(broker).publish_later("t", b"one", 100)
    broker.kill()
    broker = await start_broker()
    await Client(broker).publish_later("t", b"two", 50)
    await Client(broker).publish("t", b"now")
    consumer = await consumer_of(broker, 10)
    channel = broker.topics["t"].channels["c"]
    assert (consumer.bodies, len(channel.deferred), channel.depth) == ([b"now"], 2, 0)
    await pass_time(broker, clock, 50)
    assert consumer.bodies == [b"now", b"two"]
    consumer.finish(*consumer.messages)
    await pass_time(broker, clock, 50)
    await until(lambda: len(consumer.bodies) == 3)
    assert consumer.bodies[2] == b"one"


async def test_emptying_a_backlog_with_a_gap_leaves_nothing(start_broker: StartBroker) -> None:
    broker = await start_broker()
    await Client(broker).publish_many("t", bodies(3))
    broker.kill()
    broker = await start_broker()
    await Client(broker).publish("t", b"after")
    topic = broker.topics["t"]
    topic.empty()
    assert topic.depth == 0
    await Client(broker).publish("t", b"new")
    consumer = await consumer_of(broker, 10)
    assert consumer.bodies == [b"new"]


# --- Ephemeral topics -------------------------------------------------------------------------------------------------


async def test_an_ephemeral_topic_keeps_nothing_of_what_went_through_it(broker: Broker) -> None:
    producer, consumer = Client(broker), Client(broker)
    await consumer.subscribe("t#ephemeral", "c", 10)
    for _ in range(5):
        await producer.publish_many("t#ephemeral", [b"x" * 1_000] * 10)
        await until(lambda: len(consumer.messages) == 10)
        consumer.finish(*consumer.messages)
        consumer.take()
        await quiet(broker)
        broker.turns.housekeeping()
    log = broker.topics["t#ephemeral"].log
    assert (log.blocks, list(log._pending)) == ([], [])


async def test_an_ephemeral_topic_keeps_the_oldest_in_memory_and_drops_the_rest(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = await start_broker(mem_queue_size=5)
    producer = Client(broker)
    await producer.publish("t#ephemeral", b"one")
    await producer.publish_many("t#ephemeral", bodies(7))
    await producer.publish("t#ephemeral", b"too late")
    topic = broker.topics["t#ephemeral"]
    # The publisher is told OK, and all of them are counted.
    assert (topic.depth, topic.message_count) == (5, 9)
    assert list((tmp_path / "flintmq" / "topics").iterdir()) == []
    consumer = await consumer_of(broker, 10, topic="t#ephemeral")
    assert consumer.bodies == [b"one", *bodies(4)]


async def test_an_ephemeral_topic_vanishes_with_its_last_channel(broker: Broker, producer: Client) -> None:
    await producer.publish("t#ephemeral", b"m")
    topic = broker.topics["t#ephemeral"]
    await quiet(broker)
    assert "t#ephemeral" in broker.topics, "it never had a channel, so it stays"
    topic.channel("a")
    brief = await consumer_of(broker, 1, topic="t#ephemeral", channel="b#ephemeral")
    topic.delete_channel("a")
    await quiet(broker)
    assert "t#ephemeral" in broker.topics
    brief.hang_up()
    await quiet(broker)
    assert "t#ephemeral" not in broker.topics


async def test_nothing_ephemeral_survives_a_restart(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker()
    producer = Client(broker)
    broker.topic("t#ephemeral").channel("durable")
    broker.topic("t").channel("c#ephemeral")
    broker.topic("t").channel("c")
    await producer.publish("t#ephemeral", b"m")
    await producer.publish("t", b"m")
    await broker.stop()
    saved = json.loads((tmp_path / "nsqd.dat").read_bytes())
    assert saved["topics"] == [{"name": "t", "paused": False, "channels": [{"name": "c", "paused": False}]}]
    broker = await start_broker()
    assert list(broker.topics) == ["t"]
    assert list(broker.topics["t"].channels) == ["c"]


# --- Memory and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mem_queue_size", [0, 10, 10_000])
async def test_depth_counts_everything_and_backend_depth_what_is_not_in_memory(
    start_broker: StartBroker, mem_queue_size: int
) -> None:
    broker = await start_broker(mem_queue_size=mem_queue_size)
    producer = Client(broker)
    broker.topic("listened").channel("c")
    for _ in range(100):
        await producer.publish_many("alone", [b"x" * 500] * 10)
        await producer.publish_many("listened", [b"x" * 500] * 10)
    await quiet(broker)
    alone, channel = broker.topics["alone"], broker.topics["listened"].channels["c"]
    assert (alone.depth, channel.depth) == (1000, 1000)
    if mem_queue_size == 10_000:
        assert (alone.backend_depth, channel.backend_depth) == (0, 0)
    else:
        # Whole blocks stay or go, and a small block of the newest is always there.
        assert 1000 - mem_queue_size - 1000 // 3 <= alone.backend_depth <= 1000
        assert alone.backend_depth == channel.backend_depth
        assert alone.log.memory_count <= mem_queue_size + 1000 // 3
    consumer = await consumer_of(broker, 2500, topic="listened")
    await until(lambda: len(consumer.messages) == 1000)
    assert (channel.depth, channel.backend_depth) == (0, 0)


async def test_without_a_memory_queue_messages_are_read_back_in_order(start_broker: StartBroker) -> None:
    broker = await start_broker(mem_queue_size=0, max_bytes_per_file=20_000)
    producer = Client(broker)
    sent = [b"%d" % number + b"." * 700 for number in range(500)]
    for at in range(0, 500, 50):
        await producer.publish_many("t", sent[at : at + 50])
    consumer = await consumer_of(broker, 7)
    received = []
    while len(received) < 500:
        await until(lambda: consumer.messages)
        messages = consumer.messages
        consumer.take()
        received += [message.body for message in messages]
        consumer.finish(*messages)
    assert received == sent


async def test_files_go_when_nobody_needs_them(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(max_bytes_per_file=10_000)
    producer = Client(broker)
    fast, slow = await consumer_of(broker, 1000, channel="fast"), await consumer_of(broker, 1, channel="slow")
    for _ in range(20):
        await producer.publish_many("t", [b"x" * 1000] * 10)
    await quiet(broker)
    topic = broker.topics["t"]
    assert len(topic.log.segments) > 10
    fast.finish(*fast.messages)
    broker.upkeep.sync()
    await quiet(broker)
    assert len(topic.log.segments) > 10, "the slow one still needs them"
    slow.ready(1000)
    await until(lambda: len(slow.messages) == 200)
    slow.finish(*slow.messages)
    await quiet(broker)
    broker.upkeep.sync()
    await quiet(broker)
    broker.upkeep.sync()
    await quiet(broker)
    assert len(topic.log.segments) <= 2
    assert topic.folder is not None
    assert len(list(topic.folder.iterdir())) == len(topic.log.segments)


# --- A full or broken disk --------------------------------------------------------------------------------------------


async def test_a_nearly_full_disk_refuses_publishes_and_recovers_by_itself(start_broker: StartBroker) -> None:
    disk = CountingDisk()
    disk.free_bytes = 10_000
    broker = await start_broker(disk=disk, disk_reserve=5_000)
    consumer = await consumer_of(broker, 1)
    await Client(broker).publish_many("t", bodies(2))
    await quiet(broker)
    assert broker.health == "OK"
    disk.free_bytes = 4_000
    broker.upkeep.look_at_space()
    refused = {b"PUB": pub("t", b"x"), b"MPUB": encode_mpub(b"t", [b"x"]), b"DPUB": b"DPUB t 5\n\0\0\0\1x"}
    for verb, command in refused.items():
        client = Client(broker)
        client.send(command)
        assert client.errors[0].startswith(b"E_%s_FAILED %s failed the disk is nearly full" % (verb, verb))
        assert client.is_over
    assert broker.health.startswith("NOK - the disk is nearly full: 4000 bytes free, 5000 are kept in reserve")
    # Consumers go on.
    consumer.finish(consumer.messages[0])
    await quiet(broker)
    assert consumer.bodies == bodies(2)
    disk.free_bytes = 6_000
    broker.upkeep.look_at_space()
    assert broker.health == "OK"
    await Client(broker).publish("t", b"again")
    assert broker.topics["t"].message_count == 3


async def test_free_space_is_looked_at_every_second(start_broker: StartBroker) -> None:
    broker = await start_broker()
    assert 0 < broker._timers["space"].when() - asyncio.get_running_loop().time() <= 1


async def test_a_fast_publisher_is_refused_before_the_reserve_is_used_up(start_broker: StartBroker) -> None:
    """Hundreds of megabytes can be written between two looks a second apart."""

    class FillingDisk(CountingDisk):
        def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
            size = super().write(fd, buffers, offset)
            self.free_bytes -= size
            return size

    disk = FillingDisk()
    disk.free_bytes = 20 << 20
    broker = await start_broker(disk=disk, disk_reserve=8 << 20, max_msg_size=1 << 20)
    broker._timers["space"].cancel()
    client = Client(broker)
    for _ in range(40):
        client.send(pub("t", bytes(500_000)))
        await quiet(broker)
        if client.errors:
            break
    assert client.errors, f"nothing was refused with {disk.free_bytes} bytes free"
    assert b"the disk is nearly full" in client.errors[0]
    assert (8 << 20) - 2 * (1 << 20) < disk.free_bytes < 8 << 20


async def test_a_write_that_fails_is_told_to_its_publishers_and_leaves_no_message(start_broker: StartBroker) -> None:
    class FullDisk(CountingDisk):
        full = False

        def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, buffers, offset)

    disk = FullDisk()
    broker = await start_broker(disk=disk)
    consumer = await consumer_of(broker, 10)
    await Client(broker).publish("t", b"before")
    await quiet(broker)
    disk.full = True
    one, other = Client(broker), Client(broker)
    one.send(pub("t", b"lost"))
    other.send(encode_mpub(b"t", [b"lost too", b"and this"]))
    await quiet(broker)
    disk.full = False
    assert one.errors == [b"E_PUB_FAILED PUB failed No space left on device"]
    assert other.errors == [b"E_MPUB_FAILED MPUB failed No space left on device"]
    assert broker.health == "NOK - cannot write to the disk: No space left on device"
    await Client(broker).publish("t", b"after")
    await quiet(broker)
    assert consumer.bodies == [b"before", b"after"]
    assert broker.topics["t"].depth == 0
    broker.upkeep.look_at_space()
    assert broker.health == "OK"


# --- nsqd.dat, the lock -----------------------------------------------------------------------------------------------


def saved(path: Path) -> object:
    return json.loads((path / "nsqd.dat").read_bytes())


async def test_nsqd_dat_says_null_for_nothing(broker: Broker, tmp_path: Path) -> None:
    path = tmp_path / "nsqd.dat"
    await until(path.exists)
    assert path.read_bytes() == b'{"topics":null,"version":"1.3.0"}'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    broker.topic("t")
    expected = b'{"topics":[{"name":"t","paused":false,"channels":null}],"version":"1.3.0"}'
    await until(lambda: path.read_bytes() == expected)


async def test_nsqd_dat_follows_what_happens(broker: Broker, tmp_path: Path) -> None:
    topic = broker.topic("t")
    channel, _ = topic.channel("c")

    def says(topics: object) -> bool:
        return saved(tmp_path) == {"topics": topics, "version": "1.3.0"}

    await until((tmp_path / "nsqd.dat").exists)
    await until(lambda: says([{"name": "t", "paused": False, "channels": [{"name": "c", "paused": False}]}]))
    channel.pause(True)
    await until(lambda: says([{"name": "t", "paused": False, "channels": [{"name": "c", "paused": True}]}]))
    topic.pause(True)
    await until(lambda: says([{"name": "t", "paused": True, "channels": [{"name": "c", "paused": True}]}]))
    topic.delete_channel("c")
    await until(lambda: says([{"name": "t", "paused": True, "channels": None}]))
    broker.delete_topic("t")
    await until(lambda: says(None))
    assert [name for name in os.listdir(tmp_path) if name.startswith("nsqd.dat")] == ["nsqd.dat"]


@pytest.mark.parametrize("crash", [False, True])
async def test_pauses_survive(start_broker: StartBroker, crash: bool) -> None:
    broker = await start_broker()
    topic = broker.topic("t")
    topic.channel("running")
    topic.channel("paused")[0].pause(True)
    await Client(broker).publish("t", b"before")
    topic.pause(True)
    broker.topic("free")
    await Client(broker).publish("t", b"while paused")
    broker.journal.flush()
    await quiet(broker)
    if crash:
        broker.kill()
    else:
        await broker.stop()
    broker = await start_broker()
    topic = broker.topics["t"]
    assert (topic.paused, topic.depth, broker.topics["free"].paused) == (True, 1, False)
    assert {name: channel.paused for name, channel in topic.channels.items()} == {"running": False, "paused": True}
    consumer = await consumer_of(broker, 10, channel="running")
    await until(lambda: consumer.bodies == [b"before"])
    topic.pause(False)
    await until(lambda: consumer.bodies == [b"before", b"while paused"])
    assert topic.channels["paused"].depth == 2


async def test_a_data_path_belongs_to_one_broker(broker: Broker, start_broker: StartBroker, tmp_path: Path) -> None:
    text = f"failed to lock data-path: cannot flock directory {tmp_path} - resource temporarily unavailable "
    text += "(possibly in use by another instance of nsqd)"
    with pytest.raises(StartError) as caught:
        await start_broker()
    assert str(caught.value) == text
    await Client(broker).publish("t", b"undisturbed")
    await broker.stop()
    again = await start_broker()
    assert again.topics["t"].depth == 1


async def test_a_data_path_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(StartError) as caught:
        async with Broker(NsqdOptions(data_path=str(missing), tcp_address="127.0.0.1:0")):
            pass
    assert str(caught.value) == f"failed to lock data-path: open {missing}: no such file or directory"
    assert not missing.exists()


# --- Stopping and starting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
async def test_a_clean_stop_keeps_everything_with_its_attempts(
    start_broker: StartBroker, clock: FakeClock, durability: str
) -> None:
    broker = await start_broker(durability=durability)
    producer = Client(broker)
    consumer = await consumer_of(broker, 4)
    await producer.publish_many("t", [b"finished", b"in flight", b"twice in flight", b"put back", b"waiting"])
    await producer.publish_later("t", b"deferred", 100)
    await producer.publish("backlog", b"nobody yet")
    await quiet(broker)
    finished, _, twice, later = consumer.messages
    consumer.finish(finished)
    consumer.requeue(twice)
    consumer.requeue(later, 50)
    await quiet(broker)
    consumer.take()
    ids = {body: message.id for body, message in zip([b"twice in flight", b"put back"], [twice, later], strict=True)}
    await broker.stop()

    broker = await start_broker(durability=durability)
    channel = broker.topics["t"].channels["c"]
    assert (channel.depth, len(channel.deferred), channel.in_flight_count) == (3, 2, 0)
    assert broker.topics["backlog"].depth == 1
    consumer = await consumer_of(broker, 10)
    await until(lambda: len(consumer.messages) == 3)
    attempts = {message.body: message.attempts for message in consumer.messages}
    assert attempts == {b"in flight": 2, b"twice in flight": 3, b"waiting": 2}
    await pass_time(broker, clock, 50)
    await until(lambda: len(consumer.messages) == 4)
    assert (consumer.messages[3].body, consumer.messages[3].attempts) == (b"put back", 2)
    await pass_time(broker, clock, 50)
    await until(lambda: b"deferred" in consumer.bodies)
    for message in consumer.messages:
        assert ids.get(message.body, message.id) == message.id


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_a_stop_right_behind_publishes_keeps_them(start_broker: StartBroker, durability: str) -> None:
    """Syncs are under way, and more has come meanwhile: the stop waits for all of it."""
    broker = await start_broker(durability=durability)
    producers = [Client(broker) for _ in range(3)]
    await producers[0].publish("t", b"first")
    for round_ in range(4):
        for producer in producers:
            producer.send(pub("t", b"%d" % round_))
        await asyncio.sleep(0)
    await broker.stop()
    answered = sum(len(producer.responses) for producer in producers)
    broker = await start_broker()
    assert answered <= broker.topics["t"].depth <= 13
    assert broker.topics["t"].depth == 13


async def test_a_crash_costs_no_publish_that_was_answered(start_broker: StartBroker) -> None:
    broker = await start_broker()
    producer = Client(broker)
    consumer = await consumer_of(broker, 5)
    await producer.publish_many("t", bodies(10))
    await producer.publish("backlog", b"m")
    await quiet(broker)
    consumer.finish(*consumer.messages[:3])
    broker.journal.flush()
    broker.kill()
    broker = await start_broker()
    assert broker.topics["backlog"].depth == 1
    consumer = await consumer_of(broker, 10)
    # What was finished before the journal was written does not come again; finished later would.
    await until(lambda: len(consumer.messages) == 7)
    assert sorted(consumer.bodies) == bodies(10)[3:]


async def test_a_start_with_thousands_of_channels_knows_them_all(start_broker: StartBroker) -> None:
    broker = await start_broker()
    producer = Client(broker)
    for number in range(20):
        topic = broker.topic(f"t{number}")
        for other in range(150):
            channel, _ = topic.channel(f"c{other}")
            channel.pause(other % 2 == 1)
        await producer.publish_many(topic.name, bodies(3))
    await quiet(broker)
    for topic in broker.topics.values():
        topic.channels["c7"].empty()
    await broker.stop()
    for crash in (True, False):
        broker = await start_broker()
        assert len(broker.topics) == 20
        for topic in broker.topics.values():
            assert len(topic.channels) == 150
            for name, channel in topic.channels.items():
                assert channel.paused == (int(name[1:]) % 2 == 1)
                assert channel.depth == (0 if name == "c7" else 3)
        if crash:
            broker.kill()
    await broker.stop()


async def test_a_journal_that_rolls_answers_everybody_who_waits_for_it(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic's first publish waits for the journal's sync; a roll at that very moment must not swallow the wait."""
    monkeypatch.setattr(journal_module, "ROLL_AT", 500)
    broker = await start_broker()
    producer = Client(broker)
    for number in range(50):
        assert await producer.ask(pub(f"t{number}", b"m")) == b"OK"
    await quiet(broker)
    broker.kill()
    broker = await start_broker()
    assert {name: topic.depth for name, topic in broker.topics.items()} == {f"t{n}": 1 for n in range(50)}


async def test_ids_tell_the_node_and_count_up(start_broker: StartBroker) -> None:
    broker = await start_broker(id=617)
    consumer = await consumer_of(broker, 10)
    await Client(broker).publish_many("t", bodies(3))
    await quiet(broker)
    numbers = [int(message.id, 16) for message in consumer.messages]
    assert [number >> 54 for number in numbers] == [617] * 3
    assert [number - numbers[0] for number in numbers] == [0, 1, 2]
    assert numbers[0] & SEQ_MASK >= 1_700_000_000 * SECOND // 1000


@pytest.mark.parametrize("stragglers", [1, 7, 1_500])
@pytest.mark.parametrize("kind", ["deferred", "in flight"])
async def test_stragglers_of_an_ephemeral_topic_hold_no_more_than_the_blocks_they_stand_in(
    start_broker: StartBroker, clock: FakeClock, stragglers: int, kind: str
) -> None:
    """Memory is the only place of an ephemeral topic: it must not keep all that came after one old message."""
    broker = await start_broker(mem_queue_size=100, msg_timeout=3_600 * SECOND, max_msg_timeout=7_200 * SECOND)
    name = "t#ephemeral"
    producer, consumer = Client(broker), await consumer_of(broker, 2_500, topic=name)
    topic = broker.topics[name]
    if kind == "deferred":
        settings = topic.settings
        # As many as there is room for are deferred at a time when there is.
        topic.settings = replace(settings, mem_queue_size=stragglers)
        producer.send(b"".join(dpub(name, 3_500_000, b"%d" % number) for number in range(stragglers)))
        await quiet(broker)
        topic.settings = settings
    else:
        for start in range(0, stragglers, 50):
            await producer.publish_many(name, bodies(min(50, stragglers - start)))
            await quiet(broker)
        # Delivered once more: no longer an ordinary first delivery.
        for message in consumer.messages:
            consumer.requeue(message)
        await quiet(broker)
    consumer.take()
    for _ in range(400):
        await producer.publish_many(name, [bytes(20_000)] * 5)
        await quiet(broker)
        for message in consumer.messages:
            if len(message.body) == 20_000:
                consumer.finish(message)
        consumer.take()
        clock.advance(0.01)
    topic.trim()
    for _ in range(200):
        clock.advance(0.1)
        topic.trim()
    assert topic.log.memory_bytes <= 6 << 20, "40 MB were published and finished"
    channel = topic.channels["c"]
    assert (len(channel.deferred) if kind == "deferred" else channel.in_flight_count) == stragglers
