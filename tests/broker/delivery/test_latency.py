"""Quantiles over a sliding window: as near to the exact ones as promised, and of what is in the window only."""

from __future__ import annotations

from array import array
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.latency import ACCURACY, LONGEST, SLICES, Latency, Sketch, quantiles
from flintmq.broker.observe import stats
from flintmq.kernel import Block
from support.fakes import SECOND, Client, FakeClock, pass_time, quiet, until

WINDOW = 80 * SECOND
#: Values of every size, and many of the same.
values = st.one_of(st.integers(0, 50), st.integers(0, 10**9), st.integers(0, LONGEST))
percentiles = st.lists(st.floats(0, 1, exclude_min=True), min_size=1, max_size=5)


def exact(seen: list[int], q: float) -> int:
    return sorted(seen)[min(max(ceil(round(q * len(seen), 6)), 1), len(seen)) - 1]


def near(found: int, right: int) -> bool:
    # It is told in whole ns.
    return abs(found - right) <= right * (ACCURACY + 1e-9) + 0.5


@settings(deadline=None)
@given(st.lists(values, min_size=1, max_size=300), percentiles)
def test_a_quantile_is_off_by_at_most_one_percent(seen: list[int], wanted: list[float]) -> None:
    sketch = Sketch(WINDOW)
    for value in seen:
        sketch.add(value, 1, 0)
    count, found = quantiles([sketch], wanted, 0)
    assert count == len(seen)
    assert all(near(value, exact(seen, q)) for q, value in zip(wanted, found, strict=True))


@settings(deadline=None)
@given(st.lists(st.lists(values, max_size=60), max_size=5), percentiles)
def test_sketches_together_are_as_good_as_one_of_all_values(parts: list[list[int]], wanted: list[float]) -> None:
    sketches = [Sketch(WINDOW) for _ in parts]
    for sketch, part in zip(sketches, parts, strict=True):
        for value in part:
            sketch.add(value, 1, 0)
    before = [dict(sketch.buckets) for sketch in sketches]
    seen = [value for part in parts for value in part]
    count, found = quantiles(sketches, wanted, 0)
    assert count == len(seen)
    if seen:
        assert all(near(value, exact(seen, q)) for q, value in zip(wanted, found, strict=True))
    else:
        assert found == [0] * len(wanted)
    assert [sketch.buckets for sketch in sketches] == before


@settings(deadline=None)
@given(st.lists(st.tuples(values, st.integers(1, 1000)), min_size=1, max_size=40), percentiles)
def test_many_equal_values_at_once_are_as_many_single_ones(runs: list[tuple[int, int]], wanted: list[float]) -> None:
    at_once, singly = Sketch(WINDOW), Sketch(WINDOW)
    for value, count in runs:
        at_once.add(value, count, 0)
        for _ in range(min(count, 3)):
            singly.add(value, count // 3 if count >= 3 else 1, 0)
        if count > 3 and count % 3:
            singly.add(value, count % 3, 0)
    assert quantiles([at_once], wanted, 0) == quantiles([singly], wanted, 0)


@pytest.mark.parametrize("seen", [[5], [123_456_789], [7, 1_000_003]])
def test_the_lowest_and_the_highest_are_exact(seen: list[int]) -> None:
    sketch = Sketch(WINDOW)
    for value in seen:
        sketch.add(value, 1, 0)
    assert quantiles([sketch], (1.0, 0.0001), 0) == (len(seen), [max(seen), min(seen)])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40 * SECOND), values), min_size=1, max_size=60), st.integers(0, WINDOW * 2))
def test_the_window_slides(steps: list[tuple[int, int]], silence: int) -> None:
    """Nothing older than the window counts, everything younger than 7/8 of it does."""
    sketch = Sketch(WINDOW)
    now = 1_000 * SECOND
    seen: list[tuple[int, int]] = []
    for pause, value in steps:
        now += pause
        sketch.add(value, 1, now)
        seen.append((now, value))
    now += silence
    count, [highest] = quantiles([sketch], (1.0,), now)
    certain = [value for at, value in seen if now - at <= WINDOW * (SLICES - 1) // SLICES]
    possible = [value for at, value in seen if now - at < WINDOW]
    assert len(certain) <= count <= len(possible)
    assert max(certain, default=0) <= highest <= max(possible, default=0)


def test_a_sketch_has_a_limit_whatever_it_is_told() -> None:
    sketch = Sketch(WINDOW)
    value = 1
    while value < LONGEST * 4:
        sketch.add(value, 1, 0)
        value += value // 300 + 1
    sketch.add(-5, 1, 0)
    assert len(sketch.buckets) <= 2_185 + 1
    assert quantiles([sketch], (0.000001,), 0)[1] == [0]


def test_an_empty_sketch_says_zero() -> None:
    sketch = Sketch(WINDOW)
    assert quantiles([sketch], (1.0, 0.5), 0) == (0, [0, 0])
    sketch.add(9, 1, 0)
    assert quantiles([sketch], (1.0, 0.5), WINDOW * 2) == (0, [0, 0])
    assert not sketch.buckets


# --- When messages were published -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_the_publish_time_of_everything_in_flight_is_known(data: st.DataObject) -> None:
    """Batches of any size, sent in runs of any size; what is finished from the front is forgotten."""
    batches = data.draw(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3)), min_size=1, max_size=25))
    base = 1_000
    block = Block(1 << 20, base)
    times: list[int] = []
    time = 10**18
    for count, step in batches:
        time += step
        body = (b"\0\0\0\1x") * count
        block.fill(bytearray(body), 0, len(body), count, base + len(times), time, 1, 1 << 20)
        times += [time] * count
    latency = Latency(WINDOW)
    lowest = at = 0
    while at < len(times):
        stop = min(at + data.draw(st.integers(1, 200)), len(times))
        latency.sent(block, base + at, base + stop, base + lowest)
        at = stop
        assert [latency.published(base + i) for i in range(lowest, at)] == times[lowest:at]
        lowest = data.draw(st.integers(lowest, at))
    latency.finished(array("q", [base + lowest, base + at]).tobytes(), time + 5, 0)
    wanted = sorted(time + 5 - published for published in times[lowest:at])
    assert latency.sketch.count == len(wanted)
    if wanted:
        assert (latency.sketch.lowest, latency.sketch.highest) == (wanted[0], wanted[-1])
        assert array("q", latency.done).tolist() == [base + lowest, base + at]


def test_steps_of_what_is_finished_are_forgotten() -> None:
    latency = Latency(WINDOW)
    block = Block(1 << 20, 0)
    record = bytearray(b"\0\0\0\1x")
    for seq in range(5_000):
        block.fill(record, 0, len(record), 1, seq, 10**18 + seq, 1, 1 << 20)
        latency.sent(block, seq, seq + 1, max(seq - 10, 0))
    assert len(latency._firsts) < 200
    assert latency.published(4_995) == 10**18 + 4_995


# --- In a channel -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def broker(start_broker: Any) -> Broker:
    return await start_broker(e2e_processing_latency_percentiles=(1.0, 0.5, 0.001))


def seconds(channel: Channel) -> tuple[int, list[float]]:
    """How many messages were finished, and (highest, middle, lowest) in whole milliseconds, as /stats has it."""
    latency = stats.document(channel.broker, topic=channel.topic.name, channel=channel.name)["topics"][0]["channels"][0]
    found = latency["e2e_processing_latency"]
    return found["count"], [round(item["value"] / SECOND, 3) for item in found["percentiles"]]


async def consumer_of(broker: Broker, topic: str = "t", channel: str = "c", ready: int = 100) -> Client:
    client = Client(broker)
    await client.subscribe(topic, channel, ready=ready)
    return client


async def test_the_time_from_publish_to_fin_is_measured(broker: Broker, clock: FakeClock) -> None:
    consumer = await consumer_of(broker)
    producer = Client(broker)
    for _ in range(3):
        await producer.publish("t", b"x")
        clock.advance(1)
    await until(lambda: len(consumer.messages) == 3)
    consumer.finish(*consumer.messages)
    assert seconds(broker.topics["t"].channels["c"]) == (3, [3.0, pytest.approx(2.0, rel=ACCURACY), 1.0])


async def test_messages_of_one_batch_finished_at_different_times(broker: Broker, clock: FakeClock) -> None:
    consumer = await consumer_of(broker)
    await Client(broker).publish_many("t", [b"x"] * 50)
    await until(lambda: len(consumer.messages) == 50)
    messages = consumer.messages
    for i in range(0, 50, 10):
        clock.advance(1)
        # Backwards: so that they do not come as one range.
        consumer.finish(*reversed(messages[i : i + 10]))
    assert seconds(broker.topics["t"].channels["c"]) == (50, [5.0, pytest.approx(3.0, rel=ACCURACY), 1.0])


async def test_a_message_that_was_put_back_counts_from_its_publish(broker: Broker, clock: FakeClock) -> None:
    consumer = await consumer_of(broker)
    await Client(broker).publish("t", b"x")
    [message] = await until(lambda: consumer.messages)
    clock.advance(2)
    consumer.take()
    consumer.requeue(message, 5)
    await pass_time(broker, clock, 6)
    [again] = await until(lambda: consumer.messages)
    clock.advance(1)
    consumer.finish(again)
    assert seconds(broker.topics["t"].channels["c"]) == (1, [9.0, 9.0, 9.0])


async def test_a_touched_message_counts_from_its_publish(broker: Broker, clock: FakeClock) -> None:
    consumer = await consumer_of(broker)
    await Client(broker).publish_many("t", [b"x", b"y"])
    messages = await until(lambda: len(consumer.messages) == 2 and consumer.messages)
    clock.advance(2)
    consumer.touch(messages[0])
    clock.advance(2)
    consumer.finish(messages[0])
    assert seconds(broker.topics["t"].channels["c"]) == (1, [4.0, 4.0, 4.0])


async def test_a_message_that_was_read_back_from_the_disk_counts_from_its_publish(
    start_broker: Any, clock: FakeClock
) -> None:
    broker = await start_broker(e2e_processing_latency_percentiles=(1.0, 0.5, 0.001), mem_queue_size=0)
    await consumer_of(broker, ready=0)
    producer = Client(broker)
    for _ in range(4):
        await producer.publish_many("t", [b"x" * 3000] * 30)
        clock.advance(1)
    await quiet(broker)
    await broker.stop()
    clock.advance(10)
    broker = await start_broker(e2e_processing_latency_percentiles=(1.0, 0.5, 0.001), mem_queue_size=0)
    consumer = await consumer_of(broker)
    for _ in range(2):
        await until(lambda: len(consumer.messages) >= 60)
        consumer.finish(*consumer.messages[:60])
        consumer._frames = consumer._frames[60:]
    assert seconds(broker.topics["t"].channels["c"]) == (120, [14.0, pytest.approx(12, rel=0.02), 11.0])


async def test_a_wrong_answer_is_not_measured(broker: Broker, clock: FakeClock) -> None:
    consumer, other = await consumer_of(broker), await consumer_of(broker, ready=0)
    await Client(broker).publish("t", b"x")
    [message] = await until(lambda: consumer.messages)
    other.finish(message)
    consumer.finish(message, message)
    await until(lambda: other.errors and consumer.errors)
    assert seconds(broker.topics["t"].channels["c"])[0] == 1


async def test_a_clock_that_was_set_back_makes_no_negative_time(broker: Broker, clock: FakeClock) -> None:
    consumer = await consumer_of(broker)
    await Client(broker).publish("t", b"x")
    [message] = await until(lambda: consumer.messages)
    clock.step_wall(-3600)
    consumer.finish(message)
    assert seconds(broker.topics["t"].channels["c"]) == (1, [0, 0, 0])


async def test_a_topic_has_what_its_channels_have_together(broker: Broker, clock: FakeClock) -> None:
    fast, slow = await consumer_of(broker, channel="fast"), await consumer_of(broker, channel="slow")
    await Client(broker).publish("t", b"x")
    clock.advance(1)
    fast.finish(*await until(lambda: fast.messages))
    clock.advance(7)
    slow.finish(*await until(lambda: slow.messages))
    [topic] = stats.document(broker)["topics"]
    assert topic["e2e_processing_latency"]["count"] == 2
    assert [item["value"] for item in topic["e2e_processing_latency"]["percentiles"]] == [8 * SECOND, SECOND, SECOND]
    # Asked for one channel, the topic still tells of all.
    [topic] = stats.document(broker, channel="fast")["topics"]
    assert topic["e2e_processing_latency"]["count"] == 2


async def test_what_is_finished_stays_finished_after_a_crash(start_broker: Any) -> None:
    """Measuring takes the finished ranges on another way to the journal: none may be lost on it."""
    broker = await start_broker(e2e_processing_latency_percentiles=(0.5,))
    consumer = await consumer_of(broker, ready=30)
    await Client(broker).publish_many("t", [b"%d" % i for i in range(30)])
    messages = await until(lambda: len(consumer.messages) == 30 and consumer.messages)
    consumer.finish(*messages[:5])
    consumer.touch(messages[5])
    consumer.finish(messages[5], *messages[10:12], messages[20])
    consumer.send(b"FIN %s\r\n" % messages[21].id)
    broker.journal.flush()
    broker.kill()
    broker = await start_broker(e2e_processing_latency_percentiles=(0.5,))
    again = await consumer_of(broker, ready=30)
    await quiet(broker)
    left = {message.body for message in messages} - {b"%d" % i for i in (0, 1, 2, 3, 4, 5, 10, 11, 20, 21)}
    assert {message.body for message in again.messages} == left


async def test_without_the_option_nothing_is_kept(start_broker: Any) -> None:
    broker = await start_broker()
    consumer = await consumer_of(broker)
    await Client(broker).publish("t", b"x")
    consumer.finish(*await until(lambda: consumer.messages))
    channel = broker.topics["t"].channels["c"]
    assert channel.latency is None
    [topic] = stats.document(broker)["topics"]
    assert topic["e2e_processing_latency"] == topic["channels"][0]["e2e_processing_latency"]
    assert topic["e2e_processing_latency"] == {"count": 0, "percentiles": None}
