"""A large backlog does not hold the event loop, and whatever happens between two slices of work finds a whole state."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery import channel as channel_module
from flintmq.broker.delivery import give_back
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.in_flight import Runs
from flintmq.broker.delivery.seek import Seek
from flintmq.broker.delivery.slices import Steps
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.limits import TopicLimits
from flintmq.kernel import Ring
from flintmq.protocol.seqs import SEQ_MASK
from flintmq.protocol.wire import encode_command
from support.fakes import SECOND, Client, FakeClock, dpub, pass_time, places, pub, quiet, until
from support.small_slices import small_slices

#: Enough that anything done in one go takes several times as long as is allowed.
MANY = 300_000
#: CPU time that one callback of the loop may take; other programs on the machine do not count.
LONGEST = 0.1
HOUR = 3_600 * SECOND


@contextmanager
def holds() -> Iterator[list[tuple[float, str]]]:
    """Collect the CPU time of each callback that the loop runs meanwhile."""
    found: list[tuple[float, str]] = []
    run = events.Handle._run

    def timed(handle: events.Handle) -> None:
        started = time.thread_time()
        run(handle)
        found.append((time.thread_time() - started, repr(handle._callback)))  # type: ignore[attr-defined]

    events.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        events.Handle._run = run  # type: ignore[method-assign]


def publish(topic: Topic, count: int, delay: int = 0) -> None:
    record = b"\0\0\0\1x"
    topic.publish(bytearray(record * count), 0, len(record) * count, count, delay=delay)


async def deferred(broker: Broker, count: int) -> Channel:
    topic = broker.topic("t")
    channel, _ = topic.channel("c")
    for _ in range(count // 10_000):
        publish(topic, 10_000, HOUR)
        await quiet(broker)
    return channel


async def requeued(broker: Broker, count: int) -> Channel:
    channel = await deferred(broker, 0)
    channel.requeued.extend(range(channel.seen, channel.seen + count))
    channel.attempts.update(dict.fromkeys(channel.requeued, 1))
    publish(channel.topic, 10_000)
    await quiet(broker)
    return channel


async def ranges(broker: Broker, count: int) -> Channel:
    channel = await deferred(broker, 0)
    publish(channel.topic, 2 * count)
    await quiet(broker)
    channel.catch_up(channel.topic.pumped)
    first = channel.waiting.first
    channel.waiting.clear()
    for number in range(count):
        channel.waiting.add(first + 2 * number, first + 2 * number + 1)
    return channel


def limit(channel: Channel) -> None:
    channel.topic.settings = replace(channel.topic.settings, max_messages=1_000, limit_policy="drop-oldest")
    channel.topic.limits = TopicLimits.of(channel.topic)
    publish(channel.topic, 1)


OPERATIONS: dict[str, Callable[[Channel], object]] = {
    "snapshot": lambda channel: channel.broker.journal.take_snapshot(),
    "statistics": lambda channel: (channel.depth, channel.backend_depth, channel.in_flight_count),
    "housekeeping": lambda channel: channel.topic.let_go(),
    "seek": lambda channel: channel.seek(channel.topic.log.first),
    "expiry": lambda channel: channel.leaving.expire_before(channel.topic.log.end),
    "empty": lambda channel: channel.empty(),
    "delete": lambda channel: channel.topic.delete_channel("c"),
    "limit": limit,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backlog", [deferred, requeued, ranges])
async def test_a_large_backlog_does_not_hold_the_loop(
    start_broker: StartBroker, operation: str, backlog: Callable[[Broker, int], object]
) -> None:
    broker = await start_broker(sync_timeout=HOUR)
    channel = await backlog(broker, MANY)  # type: ignore[misc]
    with holds() as found:
        asyncio.get_running_loop().call_soon(OPERATIONS[operation], channel)
        await quiet(broker)
        await until(lambda: not broker.journal._snapshotting)
    longest, what = max(found)
    assert longest < LONGEST, f"{what} held the loop for {longest * 1000:.0f} ms"


async def test_a_deferred_backlog_is_handed_over_without_holding_the_loop(start_broker: StartBroker) -> None:
    broker = await start_broker()
    topic = broker.topic("t")
    for _ in range(MANY // 10_000):
        publish(topic, 10_000, HOUR)
        await quiet(broker)
    with holds() as found:
        channel, _ = topic.channel("c")
        await quiet(broker)
    longest, what = max(found)
    assert longest < LONGEST, f"{what} held the loop for {longest * 1000:.0f} ms"
    assert (topic.depth, len(channel.deferred), channel.message_count) == (0, MANY, MANY)


@pytest.mark.parametrize("count", [7, 20])
async def test_a_seek_over_deferred_messages_that_are_due_is_in_slices(
    broker: Broker, clock: FakeClock, count: int
) -> None:
    topic = broker.topic("t")
    topic.settings = replace(topic.settings, retain_bytes=1 << 40)
    channel, _ = topic.channel("c")
    for _ in range(count):
        publish(topic, 1, SECOND)
    await quiet(broker)
    await pass_time(broker, clock, 2)
    ended: list[bool] = []
    with small_slices(3):
        channel.seek(topic.log.first, lambda: ended.append(True))
        assert not ended
        await quiet(broker)
    assert ended and channel.depth == count


async def test_a_deferred_backlog_is_handed_to_more_channels_than_a_slice_holds(broker: Broker) -> None:
    topic = broker.topic("t")
    topic.pause(True)
    channels = [topic.channel(f"c{number}")[0] for number in range(7)]
    publish(topic, 5, HOUR)
    with small_slices(3):
        topic.pause(False)
        await quiet(broker)
    assert [len(channel.deferred) for channel in channels] == [5] * 7


@pytest.mark.parametrize("paused", [False, True])
async def test_a_first_channel_that_starts_at_the_latest_gets_nothing_of_a_deferred_backlog(
    start_broker: StartBroker, clock: FakeClock, paused: bool
) -> None:
    broker = await start_broker()
    topic = broker.topic("t")
    topic.settings = replace(topic.settings, new_channel="latest")
    for number in range(20):
        publish(topic, 1, HOUR if number % 3 else 0)
    await quiet(broker)
    topic.pause(paused)
    with small_slices(3):
        channel, _ = topic.channel("c")
        publish(topic, 1, 10 * SECOND)
        topic.pause(False)
        await quiet(broker)
    assert (topic.depth, channel.depth, len(channel.deferred)) == (0, 0, 1)
    broker.kill()
    broker = await start_broker()
    channel = broker.topics["t"].channels["c"]
    await quiet(broker)
    await pass_time(broker, clock, 11)
    assert (broker.topics["t"].depth, channel.depth, len(channel.deferred)) == (0, 1, 0)


async def test_an_emptied_deferred_backlog_does_not_hold_the_loop(start_broker: StartBroker) -> None:
    broker = await start_broker()
    topic = broker.topic("t")
    for _ in range(MANY // 10_000):
        publish(topic, 10_000, HOUR)
        await quiet(broker)
    with holds() as found:
        asyncio.get_running_loop().call_soon(topic.empty)
        await until(lambda: not topic.log.deferred)
    longest, what = max(found)
    assert longest < LONGEST, f"{what} held the loop for {longest * 1000:.0f} ms"
    publish(topic, 3)
    channel, _ = topic.channel("c")
    await quiet(broker)
    assert (topic.depth, channel.depth, len(channel.deferred)) == (0, 3, 0)


async def due(broker: Broker, count: int, name: str = "t") -> Channel:
    """Deferred messages, each a publish of its own, that are requeued when a second has passed."""
    topic = broker.topic(name)
    channel, _ = topic.channel("c")
    for number in range(count):
        publish(topic, 1, SECOND)
        if number % 1_000 == 999:
            await quiet(broker)
    return channel


@pytest.mark.parametrize("durability", ["os", "memory"])
@pytest.mark.parametrize("name", ["t", "t#ephemeral"])
async def test_a_consumer_that_comes_when_all_is_too_old_does_not_hold_the_loop(
    start_broker: StartBroker, clock: FakeClock, name: str, durability: str
) -> None:
    broker = await start_broker(sync_timeout=HOUR, mem_queue_size=20_000, durability=durability)
    channel = await due(broker, 12_000, name)
    topic = channel.topic
    if name != "t":
        # What an ephemeral topic holds beyond this stays behind in memory.
        topic.settings = replace(topic.settings, mem_queue_size=100)
        topic.trim()
        topic.settings = replace(topic.settings, mem_queue_size=20_000)
    await pass_time(broker, clock, 1)
    assert len(channel.requeued) == 12_000
    topic.settings = replace(topic.settings, ttl=SECOND)
    clock.advance(2)
    consumer = Client(broker)
    with holds() as found:
        # From here on it is the loop that runs this.
        await asyncio.sleep(0)
        await consumer.subscribe(name, "c", 1)
        await until(lambda: not channel.depth)
    longest, what = max(found)
    assert longest < LONGEST, f"{what} held the loop for {longest * 1000:.0f} ms"
    assert channel.leaving.expired_count == 12_000 and consumer.messages == []
    publish(topic, 1)
    await until(lambda: len(consumer.messages) == 1)


async def test_scattered_messages_that_are_too_old_take_several_turns(
    start_broker: StartBroker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "SKIP_AT_ONCE", 2)
    broker = await start_broker(sync_timeout=HOUR)
    channel = await ranges(broker, 20)
    channel.topic.settings = replace(channel.topic.settings, ttl=SECOND)
    consumer = Client(broker)
    await consumer.subscribe("t", "c")
    clock.advance(2)
    consumer.session.ready_count = 1
    channel.wake(consumer.session)
    channel.pump()
    assert channel.depth == 18, "the rest expires in later turns"
    publish(channel.topic, 1)
    await until(lambda: len(consumer.messages) == 1)
    assert (channel.depth, channel.leaving.expired_count) == (0, 20)


async def test_a_small_sample_of_very_many_takes_several_turns(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "RUN_BYTES", 100)
    monkeypatch.setattr(channel_module, "PUMP_BYTES", 100)
    monkeypatch.setattr(random, "randrange", lambda stop: stop - 1)
    broker = await start_broker(sync_timeout=HOUR)
    channel = await deferred(broker, 0)
    publish(channel.topic, 100)
    await quiet(broker)
    consumer = Client(broker)
    assert await consumer.ask(encode_command(b"IDENTIFY", body=b'{"sample_rate":1}')) == b"OK"
    await consumer.subscribe("t", "c")
    consumer.session.ready_count = 10
    channel.wake(consumer.session)
    channel.pump()
    assert channel.depth > 90, "the rest is passed over in later turns"
    await until(lambda: not channel.depth)
    assert consumer.messages == []


# --- Between two slices -----------------------------------------------------------------------------------------------


def mixed(count: int, chance: random.Random) -> bytes:
    return b"".join(
        dpub("t", 60_000, b"later %d" % number) if chance.random() < 0.6 else pub("t", b"now %d" % number)
        for number in range(count)
    )


def unfinished(channel: Channel, seqs: range) -> set[int]:
    found = {seq: places(channel, seq) for seq in seqs}
    assert all(len(where) <= 1 for where in found.values()), "a message is in two places"
    return {seq for seq, where in found.items() if where}


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 9])
async def test_a_crash_while_a_deferred_backlog_is_handed_over_loses_nothing(
    start_broker: StartBroker, clock: FakeClock, turns: int
) -> None:
    broker = await start_broker()
    producer = Client(broker)
    producer.send(mixed(40, random.Random(turns)))
    await quiet(broker)
    topic = broker.topics["t"]
    assert topic.depth == 40
    with small_slices(3):
        first, _ = topic.channel("first")
        for _ in range(turns):
            await asyncio.sleep(0)
        # In the middle: what one channel has got another does not get, and every number adds up.
        topic.channel("second")
        assert topic.depth + first.depth + len(first.deferred) == 40
        left = topic.depth
        broker.journal.flush()
        broker.kill()
        again = await start_broker()
    seqs = range(topic.log.first, topic.log.first + 40)
    await quiet(again)
    channels = again.topics["t"].channels
    assert unfinished(channels["first"], seqs) == set(seqs)
    assert unfinished(channels["second"], seqs) == set(seqs[40 - left :])
    consumer = Client(again)
    await consumer.subscribe("t", "first", 100)
    await quiet(again)
    assert all(message.body.startswith(b"now") for message in consumer.messages)
    await pass_time(again, clock, 61)
    assert len({message.body for message in consumer.messages}) == 40


@pytest.mark.parametrize("seed", range(12))
async def test_what_happens_while_a_snapshot_is_taken_is_known_after_a_crash(
    start_broker: StartBroker, clock: FakeClock, seed: int
) -> None:
    """Messages change their state between the parts: none may be missed because it moved behind the reader's back."""
    chance = random.Random(seed)
    broker = await start_broker(msg_timeout=30 * SECOND)
    producer, consumer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 40)
    producer.send(mixed(120, chance))
    await quiet(broker)
    channel = broker.topics["t"].channels["c"]
    seqs = range(broker.topics["t"].log.first, broker.topics["t"].log.end)
    finished: set[int] = set()
    held = {message.id: message for message in consumer.messages}

    def act() -> None:
        for message in chance.sample(sorted(held.values(), key=lambda m: m.id), min(3, len(held))):
            kind = chance.choice(["finish", "requeue", "later", "touch"])
            if kind == "touch":
                consumer.touch(message)
                continue
            del held[message.id]
            if kind == "finish":
                consumer.finish(message)
                finished.add(int(message.id, 16) & SEQ_MASK)
            else:
                consumer.requeue(message, 0 if kind == "requeue" else 45_000)
        for message in consumer.messages:
            held.setdefault(message.id, message)
        consumer.take()

    consumer.take()
    act()
    broker.journal.flush()
    with small_slices(chance.randint(1, 4)):
        broker.journal.take_snapshot()
        for _ in itertools.takewhile(lambda _: broker.journal._snapshotting, range(300_000)):
            act()
            await asyncio.sleep(0)
        assert not broker.journal._snapshotting
    broker.journal.flush()
    expected = set(seqs) - finished
    assert unfinished(channel, seqs) == expected
    broker.kill()
    again = await start_broker()
    await quiet(again)
    assert unfinished(again.topics["t"].channels["c"], seqs) == expected


@pytest.mark.parametrize("then", ["publish", "finish", "empty", "seek", "delete", "crash", "dismiss", "clear"])
@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_a_second_operation_in_the_middle_of_a_seek(
    start_broker: StartBroker, clock: FakeClock, then: str, turns: int
) -> None:
    broker = await start_broker(max_bytes_per_file=1_000)
    producer, consumer = Client(broker), Client(broker)
    topic = broker.topic("t")
    topic.readers.move("keep", topic.log.first)
    await consumer.subscribe("t", "c", 5)
    producer.send(mixed(60, random.Random(turns)))
    await quiet(broker)
    channel = topic.channels["c"]
    seqs = range(topic.log.first, topic.log.end)
    got = consumer.messages
    consumer.take()
    for message in got[:3]:
        consumer.finish(message)
    await quiet(broker)
    before = unfinished(channel, seqs)
    ended: list[str] = []
    with small_slices(4):
        channel.seek(seqs[10], lambda: ended.append("first"))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert channel.seeking is not None
        assert not ended
        if then == "publish":
            producer.send(mixed(9, random.Random(5)))
        elif then == "finish":
            consumer.finish(got[3])
        elif then == "empty":
            channel.empty()
        elif then == "seek":
            channel.seek(seqs[20], lambda: ended.append("second"))
        elif then == "delete":
            topic.delete_channel("c")
        elif then == "dismiss":
            assert channel.dismiss(seqs[30]) or seqs[30] in before
        elif then == "clear":
            producer.send(mixed(9, random.Random(5)))
            await asyncio.sleep(0)
            topic.empty()
        elif then == "crash":
            broker.journal.flush()
            broker.kill()
            again = await start_broker()
            await quiet(again)
            assert unfinished(again.topics["t"].channels["c"], seqs) == before
            return
        await quiet(broker)
    assert ended == (["first", "second"] if then == "seek" else ["first"])
    assert channel.seeking is None
    if then == "delete":
        assert "c" not in topic.channels
        return
    start = {"empty": len(seqs), "seek": 20}.get(then, 10)
    assert unfinished(channel, seqs) == set(seqs[start:])
    if then == "publish":
        assert unfinished(channel, range(seqs.stop, seqs.stop + 9)) == set(range(seqs.stop, seqs.stop + 9))
    broker.journal.flush()
    broker.kill()
    again = await start_broker()
    await quiet(again)
    assert unfinished(again.topics["t"].channels["c"], seqs) == set(seqs[start:])


async def test_a_new_channel_that_starts_at_the_earliest_survives_a_crash_before_it_has_found_its_place(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker()
    topic = broker.topic("t")
    topic.settings = replace(topic.settings, new_channel="earliest")
    topic.readers.move("keep", topic.log.first)
    topic.channel("other")
    Client(broker).send(mixed(40, random.Random(1)))
    await quiet(broker)
    seqs = range(topic.log.first, topic.log.end)
    monkeypatch.setattr(Seek, "run", lambda seek: None)
    channel, _ = topic.channel("c")
    assert channel.seeking is not None
    # A roll takes a snapshot, and what the old file says counts no more.
    broker.journal.flush()
    files = {path.name for path in journal_folder(broker).iterdir()}
    broker.journal._roll()
    await until(lambda: files.isdisjoint(path.name for path in journal_folder(broker).iterdir()))
    broker.kill()
    again = await start_broker()
    await quiet(again)
    assert unfinished(again.topics["t"].channels["c"], seqs) == set(seqs)


def journal_folder(broker: Broker) -> Path:
    return broker.path / "flintmq" / "journal"


# --- One that fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["pump", "hand_deferred", "expire"])
async def test_a_channel_that_fails_does_not_keep_the_others_from_their_turn(
    broker: Broker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    clients = []
    for name in ("a", "b", "c"):
        client = Client(broker)
        await client.subscribe("t", name, 10)
        clients.append(client)

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(broker.topics["t"].channels["b"], broken, fail)
    producer = Client(broker)
    producer.send(pub("t", b"now") + dpub("t", 5_000, b"later"))
    await quiet(broker)
    await pass_time(broker, clock, 6)
    await pass_time(broker, clock, 6)
    assert [message.body for message in clients[0].messages] == [b"now", b"later"]
    assert [message.body for message in clients[2].messages] == [b"now", b"later"]
    assert "on purpose" in caplog.text


async def test_a_channel_that_fails_at_a_gap_does_not_keep_the_others_from_their_turn(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await start_broker()
    topic = broker.topic("t")
    for name in ("a", "b", "c"):
        topic.channel(name)
    topic.pause(True)
    await Client(broker).publish("t", b"before")
    broker.journal.flush()
    broker.kill()
    # The log goes on behind a gap, which nobody has been handed yet.
    again = await start_broker()
    topic = again.topics["t"]
    await Client(again).publish("t", b"after")
    assert topic.gaps

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(topic.channels["b"], "skip", fail)
    topic.pause(False)
    await quiet(again)
    assert "on purpose" in caplog.text
    for name in ("a", "c"):
        client = Client(again)
        await client.subscribe("t", name, 10)
        await quiet(again)
        assert client.bodies == [b"before", b"after"]


class CountingRing(Ring):
    """A ring that counts the deliveries that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[int] = []

    def held(self, first: int, stop: int) -> list[tuple[int, int]]:
        found = super().held(first, stop)
        self.looked.append(len(found))
        return found


async def test_a_fleet_of_lost_consumers_is_one_walk_in_slices(start_broker: StartBroker) -> None:
    broker = await start_broker(requeue_on_disconnect=True)
    channel, _ = broker.topic("t").channel("c")
    ring = channel.ring = channel.in_flight.ring = CountingRing()
    ring.reset(channel.seen)
    clients = [Client(broker) for _ in range(60)]
    for client in clients:
        await client.subscribe("t", "c", 100)
    publish(channel.topic, 6_000)
    await until(lambda: channel.in_flight_count == 6_000)
    ring.looked.clear()
    for client in clients[1:]:
        client.hang_up()
    await until(lambda: channel.depth == 5_900)
    # Each would look at what all others hold: 59 times as many.
    assert sum(ring.looked) <= 2 * 6_000
    assert max(ring.looked) <= give_back.LOOK_AT_ONCE
    assert (channel.in_flight_count, channel.requeue_count) == (100, 5_900)
    assert not any(channel.attempts[seq] != 1 for seq in channel.requeued)


@pytest.mark.parametrize("back", [False, True], ids=["emptied", "sought"])
async def test_what_lost_consumers_held_is_no_longer_theirs_after_a_change(
    start_broker: StartBroker, back: bool
) -> None:
    """It is emptied, or sought back, between two slices of giving back: nothing is taken from those who stay."""
    broker = await start_broker(requeue_on_disconnect=True, max_rdy_count=100)
    lost, other = Client(broker), Client(broker)
    await lost.subscribe("t", "c", 20)
    channel = broker.topics["t"].channels["c"]
    publish(channel.topic, 20)
    await quiet(broker)
    for message in lost.messages:
        # Not its first delivery any more.
        lost.requeue(message)
    await quiet(broker)
    await other.subscribe("t", "c")
    with small_slices(3):
        lost.hang_up()
        await until(lambda: channel.requeue_count > 20)
        assert channel.requeue_count < 40
        channel.seek(channel.topic.log.first if back else channel.seen)
        other.ready(5)
        await until(lambda: channel.giving_back is None or not channel.giving_back.busy)
        await quiet(broker)
    assert other.session.in_flight == channel.in_flight_count == (5 if back else 0)
    finished = 0
    while messages := other.messages:
        other.take()
        other.finish(*messages)
        finished += len(messages)
        await quiet(broker)
    assert (finished, channel.depth, channel.in_flight_count, other.errors) == (20 if back else 0, 0, 0, [])


async def test_a_sample_of_very_many_small_messages_takes_several_turns(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a budget in messages a pump would go through 2 MiB of them, which are 60000."""
    channel = await deferred(broker, 0)
    passed: list[int] = []
    run, send = Channel._pump, Channel._send_sample

    def pump(self: Channel, *ready: object) -> None:
        passed.append(0)
        run(self, *ready)  # type: ignore[arg-type]

    def sample(self: Channel, session: object, block: object, first: int, count: int) -> int:
        passed[-1] += count
        return send(self, session, block, first, count)  # type: ignore[arg-type]

    monkeypatch.setattr(Channel, "_pump", pump)
    monkeypatch.setattr(Channel, "_send_sample", sample)
    publish(channel.topic, 20_000)
    await quiet(broker)
    consumer = Client(broker)
    await consumer.ask(encode_command(b"IDENTIFY", body=b'{"sample_rate": 1}'))
    await consumer.subscribe("t", "c", 2_500)
    await until(lambda: channel.depth == 0)
    assert sum(passed) == 20_000
    assert max(passed) <= 6_000


async def test_fin_costs_the_same_however_many_timeouts_there_are(broker: Broker) -> None:
    """Deadlines are kept by timeout, and any client may ask for any: FINs of others do not go through all of them."""
    channel = await deferred(broker, 0)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 1)
    for number in range(500):
        # What they hold stays in flight: the last run of none of them is finished.
        other = Client(broker)
        await other.ask(encode_command(b"IDENTIFY", body=b'{"msg_timeout": %d}' % (60_001 + number)))
        await other.subscribe("t", "c", 1)
    publish(channel.topic, 501)
    await until(lambda: channel.in_flight_count == 501)
    looked = 0

    class Counting(dict[int, Runs]):
        def values(self) -> Any:
            nonlocal looked
            looked += len(self)
            return super().values()

    channel.in_flight._runs = Counting(channel.in_flight._runs)
    publish(channel.topic, 1_000)
    for _ in range(1_000):
        consumer.finish(consumer.messages[-1])
        await quiet(broker)
    assert channel.in_flight_count == 501
    # Once in as many FINs as there are timeouts, and not for each.
    assert looked <= 4 * 1_000


class Waiting(Steps):
    """What it waits for never comes; what it is told now and then was for another."""

    taken = 0

    def _step(self) -> None:
        self.taken += 1
        self._wait(self._tell)

    def _tell(self, then: Callable[[], None]) -> None:
        if self.taken % 3 == 0:
            then()
        elif self.taken % 3 == 1:
            self._broker.later(then)


async def test_steps_that_wait_for_long_are_taken_no_more_often_than_they_should(broker: Broker) -> None:
    timers: list[Callable[[], None]] = []
    broker.store.delay = lambda _, work: timers.append(work)
    steps = Waiting(broker)
    for _ in range(40):
        steps.go_on()
        await quiet(broker)
        due, timers[:] = list(timers), []
        for work in due:
            work()
        await quiet(broker)
        # Those that nobody waits for any more are still there until their time has come.
        assert len(timers) <= 4
    assert steps.taken <= 4 * 40
