"""The queue scan: each of its options has the effect its name promises."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.delivery.scan import SPARE, Scan
from flintmq.options import NsqdOptions
from support.fakes import SECOND, Client, FakeClock, dpub, pass_time, quiet, until


class FakeChannel:
    """Something with deadlines: each look handles what is due."""

    def __init__(self, scan: Scan, name: str, deadlines: list[int], looks: list[str], dirty: bool = True) -> None:
        self.scheduled = 1 << 62
        self.exiting = False
        self.name = name
        self._deadlines = sorted(deadlines)
        self._looks = looks
        self._dirty = dirty
        scan.watch(self, self._deadlines[0])

    def expire(self, now: int) -> bool:
        assert self._deadlines[0] <= now, "looked at before anything was due"
        self._looks.append(self.name)
        self._deadlines = [deadline for deadline in self._deadlines if deadline > now]
        return self._dirty

    def next_deadline(self) -> int:
        return self._deadlines[0] if self._deadlines else 1 << 62


class Bench:
    """A scan whose loop turns are taken one by one."""

    def __init__(self, **options: Any) -> None:
        self.options = NsqdOptions(**options)
        self.later: list[Callable[[], None]] = []
        self.scan = Scan(lambda: self.options, self.later.append)
        self.looks: list[str] = []
        self.now = 100

    def channels(self, count: int, *deadlines: int, dirty: bool = True) -> None:
        for number in range(count):
            FakeChannel(self.scan, f"{number}", list(deadlines) or [number], self.looks, dirty)

    def tick(self) -> list[list[str]]:
        """One interval passes: which channels were looked at, turn by turn."""
        turns = []
        self.scan.tick(lambda: self.now)
        while True:
            turns.append(self.looks[:])
            self.looks.clear()
            if not self.later:
                return turns
            self.later.pop(0)()


def test_a_round_looks_at_so_many_channels_and_no_more() -> None:
    bench = Bench(queue_scan_selection_count=3, queue_scan_worker_pool_max=100, queue_scan_dirty_percent=1.0)
    bench.channels(7)
    assert bench.tick() == [["0", "1", "2"]]
    assert bench.tick() == [["3", "4", "5"]]
    assert bench.tick() == [["6"]]
    assert bench.tick() == [[]]


def test_channels_with_the_earliest_deadlines_come_first() -> None:
    bench = Bench(queue_scan_selection_count=2, queue_scan_worker_pool_max=100, queue_scan_dirty_percent=1.0)
    for name, deadline in (("late", 90), ("early", 10), ("not yet", 101), ("middle", 50)):
        FakeChannel(bench.scan, name, [deadline], bench.looks)
    assert bench.tick() == [["early", "middle"]]
    assert bench.tick() == [["late"]]
    assert bench.tick() == [[]]
    bench.now = 101
    assert bench.tick() == [["not yet"]]


def test_others_get_a_turn_after_so_many_channels() -> None:
    bench = Bench(queue_scan_selection_count=7, queue_scan_worker_pool_max=3, queue_scan_dirty_percent=1.0)
    bench.channels(7)
    assert bench.tick() == [["0", "1", "2"], ["3", "4", "5"], ["6"]]


def test_a_round_with_many_dirty_channels_is_followed_by_another_at_once() -> None:
    bench = Bench(queue_scan_selection_count=2, queue_scan_worker_pool_max=100, queue_scan_dirty_percent=0.25)
    bench.channels(5)
    assert bench.tick() == [["0", "1"], ["2", "3"], ["4"], []]


@pytest.mark.parametrize(("dirty", "again"), [(1, False), (2, True)])
def test_the_share_of_dirty_channels_must_be_more_than_the_limit(dirty: int, again: bool) -> None:
    """A quarter of four is one: not more than a quarter."""
    bench = Bench(queue_scan_selection_count=4, queue_scan_worker_pool_max=100, queue_scan_dirty_percent=0.25)
    for number in range(8):
        FakeChannel(bench.scan, f"{number}", [number], bench.looks, dirty=number < dirty)
    first, *rest = bench.tick()
    assert first == ["0", "1", "2", "3"]
    assert bool(rest) is again


def test_a_limit_of_one_never_looks_again_at_once() -> None:
    bench = Bench(queue_scan_selection_count=1, queue_scan_worker_pool_max=100, queue_scan_dirty_percent=1.0)
    bench.channels(3)
    assert [bench.tick() for _ in range(3)] == [[["0"]], [["1"]], [["2"]]]


def test_a_tick_during_a_round_does_not_start_another() -> None:
    bench = Bench(queue_scan_selection_count=6, queue_scan_worker_pool_max=2, queue_scan_dirty_percent=1.0)
    bench.channels(6)
    bench.scan.tick(lambda: bench.now)
    bench.scan.tick(lambda: bench.now)
    assert bench.looks == ["0", "1"]
    assert len(bench.later) == 1


def test_a_channel_is_looked_at_again_for_its_next_deadline() -> None:
    bench = Bench(queue_scan_dirty_percent=1.0)
    bench.channels(1, 50, 150)
    assert bench.tick() == [["0"]]
    assert bench.tick() == [[]]
    bench.now = 150
    assert bench.tick() == [["0"]]


def test_a_channel_that_asked_twice_is_looked_at_once() -> None:
    bench = Bench(queue_scan_dirty_percent=1.0)
    channel = FakeChannel(bench.scan, "0", [10, 90], bench.looks)
    bench.scan.watch(channel, 5)
    channel._deadlines.insert(0, 5)
    assert bench.tick() == [["0"]]


def test_a_channel_that_is_going_is_left_alone() -> None:
    bench = Bench()
    channel = FakeChannel(bench.scan, "0", [10], bench.looks)
    channel.exiting = True
    assert bench.tick() == [[]]


# --- In a broker


async def test_the_interval_is_how_often_the_scan_looks(start_broker: StartBroker, clock: FakeClock) -> None:
    """Nobody calls the scan here: it wakes by itself."""
    broker = await start_broker(queue_scan_interval=SECOND // 1000)
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 1)
    await producer.publish("t", b"m")
    await until(lambda: consumer.messages)
    clock.advance(61)
    await until(lambda: len(consumer.messages) == 2)


async def test_a_long_interval_leaves_what_is_due_where_it_is(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(queue_scan_interval=3600 * SECOND)
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 1)
    await producer.publish("t", b"m")
    await until(lambda: consumer.messages)
    assert broker._timers["scan"].when() - broker._loop.time() > 3000
    clock.advance(61)
    await quiet(broker)
    assert len(consumer.messages) == 1
    broker.scan.tick(clock.now)
    await quiet(broker)
    assert len(consumer.messages) == 2


async def test_a_new_channel_is_never_late_whatever_the_refresh_interval(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(queue_scan_refresh_interval=3600 * SECOND)
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("brand-new", "c", 1)
    await producer.publish_later("brand-new", b"m", 0.2)
    await pass_time(broker, clock, 0.1)
    assert consumer.messages == []
    await pass_time(broker, clock, 0.1)
    assert consumer.bodies == [b"m"]


async def test_many_channels_due_at_once_are_all_served_in_one_tick(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    """More than one round looks at: the dirty share keeps it going."""
    broker = await start_broker(queue_scan_selection_count=5, queue_scan_worker_pool_max=2)
    producer = Client(broker)
    topic = broker.topic("t")
    for number in range(33):
        topic.channel(f"c{number}")
    await producer.publish_later("t", b"m", 1)
    await quiet(broker)
    assert [len(channel.deferred) for channel in topic.channels.values()] == [1] * 33
    await pass_time(broker, clock, 1)
    assert [channel.depth for channel in topic.channels.values()] == [1] * 33


async def test_the_index_of_deadlines_is_no_larger_than_the_number_of_channels(start_broker: StartBroker) -> None:
    broker = await start_broker()
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 0)
    channel = broker.topics["t"].channels["c"]
    # Each is due earlier than the one before.
    for number in range(1_000):
        await Client(broker).ask(dpub("t", 3_000_000 - number, b"x"))
    await quiet(broker)
    assert len(channel.deferred) == 1_000
    assert len(broker.scan._heap) <= 2 * len(broker.topics) + SPARE


async def test_a_deleted_channel_is_not_kept_until_its_deadline(start_broker: StartBroker) -> None:
    broker = await start_broker()
    topic = broker.topic("t")
    gone = []
    for number in range(20):
        channel, _ = topic.channel(f"c{number}")
        gone.append(weakref.ref(channel))
    await Client(broker).ask(dpub("t", 3_000_000, b"x"))
    await quiet(broker)
    assert all(len(other.deferred) == 1 for other in topic.channels.values())
    del channel
    for name in list(topic.channels):
        topic.delete_channel(name)
    await quiet(broker)
    broker.turns.housekeeping()
    gc.collect()
    assert [reference() for reference in gone] == [None] * 20


def test_a_channel_that_asks_twice_for_one_deadline_is_looked_at_once() -> None:
    bench = Bench(queue_scan_selection_count=10)
    channel = FakeChannel(bench.scan, "a", [50], bench.looks)
    bench.scan.watch(channel, 50)
    assert [name for turn in bench.tick() for name in turn] == ["a"]
