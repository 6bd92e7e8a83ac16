"""Who gets which message, when, and what happens to it then."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery import channel as channel_module
from flintmq.broker.delivery import needed
from flintmq.broker.delivery.channel import QUANTUM, Channel
from flintmq.protocol.seqs import SEQ_MASK
from flintmq.protocol.wire import Message
from support.fakes import SECOND, Client, FakeClock, dpub, pass_time, places, quiet, until

MSG_TIMEOUT = 60


def seq_of(message: Message) -> int:
    return int(message.id, 16) & SEQ_MASK


def bodies(count: int, name: str = "m") -> list[bytes]:
    return [b"%s %d" % (name.encode(), number) for number in range(count)]


@pytest.fixture
async def producer(broker: Broker) -> Client:
    return Client(broker)


async def consumer_of(broker: Broker, ready: int, topic: str = "t", channel: str = "c") -> Client:
    client = Client(broker)
    await client.subscribe(topic, channel, ready)
    return client


def channel_of(broker: Broker, topic: str = "t", channel: str = "c") -> Channel:
    return broker.topics[topic].channels[channel]


# --- RDY --------------------------------------------------------------------------------------------------------------


async def test_ready_is_a_level_not_a_credit(broker: Broker, producer: Client) -> None:
    consumer = await consumer_of(broker, 2)
    await producer.publish_many("t", bodies(10))
    await quiet(broker)
    for count in range(2, 10):
        assert len(consumer.messages) == count
        assert consumer.session.in_flight == 2
        consumer.finish(consumer.messages[count - 2])
        await quiet(broker)


async def test_lowering_ready_below_what_is_in_flight_only_stops_new_messages(broker: Broker, producer: Client) -> None:
    consumer = await consumer_of(broker, 5)
    await producer.publish_many("t", bodies(10))
    await quiet(broker)
    consumer.ready(2)
    consumer.finish(*consumer.messages[:3])
    await quiet(broker)
    assert len(consumer.messages) == 5
    consumer.finish(consumer.messages[3])
    await quiet(broker)
    assert len(consumer.messages) == 6


@pytest.mark.parametrize("count", [3, 4, 90, 91])
async def test_a_burst_is_shared_among_all_who_are_ready(broker: Broker, producer: Client, count: int) -> None:
    consumers = [await consumer_of(broker, 2500) for _ in range(3)]
    await producer.publish_many("t", bodies(count))
    await quiet(broker)
    shares = sorted(len(consumer.messages) for consumer in consumers)
    assert sum(shares) == count
    # A run is at most a third of what is there, again and again: nobody takes it all, everybody gets some.
    assert shares[-1] <= -(-count // 2)
    assert shares[0] >= count // 6


async def test_many_bursts_are_shared_evenly(broker: Broker, producer: Client) -> None:
    consumers = [await consumer_of(broker, 2500) for _ in range(3)]
    for _ in range(30):
        await producer.publish_many("t", bodies(50))
    await quiet(broker)
    shares = sorted(len(consumer.messages) for consumer in consumers)
    assert sum(shares) == 1500
    assert shares[0] >= 400


async def test_single_messages_go_round(broker: Broker, producer: Client) -> None:
    consumers = [await consumer_of(broker, 100) for _ in range(3)]
    for body in bodies(30):
        await producer.publish("t", body)
    await quiet(broker)
    assert [len(consumer.messages) for consumer in consumers] == [10, 10, 10]


async def test_who_has_little_room_does_not_hold_up_the_others(broker: Broker, producer: Client) -> None:
    small, large = await consumer_of(broker, 1), await consumer_of(broker, 1000)
    await producer.publish_many("t", bodies(100))
    await quiet(broker)
    assert (len(small.messages), len(large.messages)) == (1, 99)


async def test_a_pump_hands_the_loop_back_after_its_share(
    broker: Broker, producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "PUMP_BYTES", 100_000)
    monkeypatch.setattr(channel_module, "RUN_BYTES", 50_000)
    consumers = [await consumer_of(broker, 1000) for _ in range(2)]
    channel = channel_of(broker)
    channel.pause(True)
    await producer.publish_many("t", [b"x" * 1000] * 500)
    await quiet(broker)
    channel.pause(False)
    sent = sum(len(consumer.messages) for consumer in consumers)
    assert 100 <= sent <= 200
    await quiet(broker)
    assert sum(len(consumer.messages) for consumer in consumers) == 500


# --- Timeouts ---------------------------------------------------------------------------------------------------------


async def test_a_message_times_out_when_its_time_is_over_and_not_before(
    broker: Broker, producer: Client, clock: FakeClock
) -> None:
    consumer = await consumer_of(broker, 1)
    await producer.publish("t", b"m")
    await quiet(broker)
    await pass_time(broker, clock, MSG_TIMEOUT - 0.001)
    assert [message.attempts for message in consumer.messages] == [1]
    await pass_time(broker, clock, 0.001 + QUANTUM / SECOND)
    assert [message.attempts for message in consumer.messages] == [1, 2]
    # A second delivery is kept in another place, and timed to the nanosecond.
    await pass_time(broker, clock, MSG_TIMEOUT - 0.001)
    assert len(consumer.messages) == 2
    await pass_time(broker, clock, 0.001)
    assert [message.attempts for message in consumer.messages] == [1, 2, 3]
    channel = channel_of(broker)
    assert (channel.timeout_count, channel.requeue_count, channel.in_flight_count) == (2, 0, 1)
    assert len({message.id for message in consumer.messages}) == 1


async def test_only_what_was_not_finished_times_out(broker: Broker, producer: Client, clock: FakeClock) -> None:
    consumer = await consumer_of(broker, 100)
    await producer.publish_many("t", bodies(100))
    await quiet(broker)
    first = consumer.messages
    kept = [first[0], first[37], first[99]]
    random.Random(1).shuffle(first)
    consumer.finish(*(message for message in first if message not in kept))
    consumer.take()
    await pass_time(broker, clock, MSG_TIMEOUT + 1)
    assert sorted(message.body for message in consumer.messages) == sorted(message.body for message in kept)
    assert channel_of(broker).timeout_count == 3


async def test_each_client_has_its_own_timeout(broker: Broker, producer: Client, clock: FakeClock) -> None:
    quick, slow = Client(broker), Client(broker)
    body = b'{"msg_timeout":5000}'
    assert await quick.ask(b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body) == b"OK"
    await quick.subscribe("t", "c", 1)
    await slow.subscribe("t", "c", 1)
    await producer.publish_many("t", bodies(2))
    await quiet(broker)
    assert (len(quick.messages), len(slow.messages)) == (1, 1)
    await pass_time(broker, clock, 6)
    assert (len(quick.messages), len(slow.messages)) == (2, 1)
    await pass_time(broker, clock, 55)
    assert channel_of(broker).timeout_count == 3


async def test_answers_to_a_message_that_timed_out_are_errors(
    broker: Broker, producer: Client, clock: FakeClock
) -> None:
    first = await consumer_of(broker, 1)
    await producer.publish("t", b"m")
    await quiet(broker)
    [message] = first.messages
    first.ready(0)
    second = await consumer_of(broker, 0)
    await pass_time(broker, clock, MSG_TIMEOUT + 1)
    first.finish(message)
    assert first.errors == [b"E_FIN_FAILED FIN %s failed ID not in flight" % message.id]
    second.ready(1)
    await quiet(broker)
    assert [message.attempts for message in second.messages] == [2]
    first.take()
    for verb, command in (("FIN", b"FIN %s\n"), ("REQ", b"REQ %s 0\n"), ("TOUCH", b"TOUCH %s\n")):
        first.send(command % message.id)
        text = f"E_{verb}_FAILED {verb} {message.id.decode()} failed client does not own message"
        assert first.take() == [(1, text.encode())]
    assert channel_of(broker).in_flight_count == 1


async def test_a_lost_client_s_messages_stay_in_flight_until_their_time(
    broker: Broker, producer: Client, clock: FakeClock
) -> None:
    lost = await consumer_of(broker, 10)
    await producer.publish_many("t", bodies(3))
    await quiet(broker)
    assert len(lost.messages) == 3
    lost.hang_up()
    other = await consumer_of(broker, 10)
    await pass_time(broker, clock, MSG_TIMEOUT - 1)
    channel = channel_of(broker)
    assert (other.messages, channel.in_flight_count, channel.depth) == ([], 3, 0)
    await pass_time(broker, clock, 2)
    assert [message.attempts for message in other.messages] == [2, 2, 2]
    assert channel.timeout_count == 3


# --- TOUCH ------------------------------------------------------------------------------------------------------------


async def test_touch_starts_the_time_again_and_is_capped_from_the_delivery(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(max_msg_timeout=150 * SECOND)
    producer, consumer = Client(broker), await consumer_of(broker, 1)
    await producer.publish("t", b"m")
    await quiet(broker)
    [message] = consumer.messages
    for _ in range(4):
        await pass_time(broker, clock, 35)
        consumer.touch(message)
    # 140 s after its delivery and just touched; at 150 it is over all the same.
    assert consumer.errors == []
    await pass_time(broker, clock, 9.9)
    assert len(consumer.messages) == 1
    await pass_time(broker, clock, 0.2)
    assert [message.attempts for message in consumer.messages] == [1, 2]
    # The cap is counted anew from the second delivery.
    consumer.touch(consumer.messages[1])
    await pass_time(broker, clock, 59)
    assert len(consumer.messages) == 2


async def test_touch_may_shorten_the_time(broker: Broker, producer: Client, clock: FakeClock) -> None:
    """Deliveries go by the first IDENTIFY, TOUCH by the last one."""
    consumer = Client(broker)
    for milliseconds in (60_000, 2_000):
        body = b'{"msg_timeout":%d}' % milliseconds
        assert await consumer.ask(b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body) == b"OK"
    await consumer.subscribe("t", "c", 3)
    await producer.publish_many("t", bodies(3))
    await quiet(broker)
    one, two, _ = consumer.messages
    consumer.touch(one)
    await pass_time(broker, clock, 1)
    consumer.touch(two)
    await pass_time(broker, clock, 1.5)
    assert len(consumer.messages) == 4
    await pass_time(broker, clock, 1)
    assert [message.body for message in consumer.messages[3:]] == [one.body, two.body]


async def test_a_message_put_back_again_and_again_leaves_nothing_behind(
    broker: Broker, producer: Client, clock: FakeClock
) -> None:
    consumer = await consumer_of(broker, 2)
    await producer.publish_many("t", bodies(2))
    await quiet(broker)
    channel = channel_of(broker)
    for round_ in range(20):
        for _ in range(500):
            message = consumer.messages[-1]
            consumer.take()
            consumer.requeue(message)
            consumer.touch(message) if round_ % 2 else None
        await pass_time(broker, clock, 7)
    assert len(channel.in_flight._deadlines) < 3_000
    assert channel.in_flight_count == 2


# --- Attempts ---------------------------------------------------------------------------------------------------------


async def test_attempts_stay_at_the_highest_number(broker: Broker, producer: Client) -> None:
    consumer = await consumer_of(broker, 1)
    await producer.publish("t", b"m")
    await quiet(broker)
    [message] = consumer.messages
    channel = channel_of(broker)
    consumer.requeue(message)
    consumer.ready(0)
    consumer.requeue(consumer.messages[-1])
    # Sixty-five thousand deliveries later.
    channel.attempts[seq_of(message)] = 65_533
    consumer.take()
    consumer.ready(1)
    for _ in range(3):
        await quiet(broker)
        consumer.requeue(consumer.messages[-1])
    await quiet(broker)
    assert [message.attempts for message in consumer.messages] == [65_534, 65_535, 65_535, 65_535]


# --- Requeue and deferral ---------------------------------------------------------------------------------------------


async def test_a_requeued_message_comes_at_once_or_when_it_is_due(
    broker: Broker, producer: Client, clock: FakeClock
) -> None:
    consumer = await consumer_of(broker, 1)
    await producer.publish("t", b"m")
    await quiet(broker)
    consumer.requeue(consumer.messages[0])
    await quiet(broker)
    assert [message.attempts for message in consumer.messages] == [1, 2]
    consumer.requeue(consumer.messages[1], 30)
    await pass_time(broker, clock, 29.9)
    assert len(consumer.messages) == 2
    await pass_time(broker, clock, 0.1)
    assert [message.attempts for message in consumer.messages] == [1, 2, 3]
    channel = channel_of(broker)
    assert (channel.requeue_count, channel.timeout_count, channel.message_count) == (2, 0, 1)
    assert (consumer.session.requeue_count, consumer.session.message_count) == (2, 3)


async def test_requeued_and_new_messages_do_not_starve_each_other(broker: Broker, producer: Client) -> None:
    """A poison message that always comes back, and a stream that never ends: both get through."""
    consumer = await consumer_of(broker, 1)
    await producer.publish_many("t", [b"poison", *bodies(50)])
    await quiet(broker)
    seen: Counter[bytes] = Counter()
    for _ in range(102):
        [message] = consumer.messages
        consumer.take()
        seen[message.body] += 1
        if message.body == b"poison":
            consumer.requeue(message)
        else:
            consumer.finish(message)
        await quiet(broker)
    assert len(seen) == 51
    assert 20 <= seen[b"poison"] <= 60


async def test_deferral_counts_from_the_publish(broker: Broker, producer: Client, clock: FakeClock) -> None:
    """A topic without a channel, or a paused one, does not postpone it; and nothing is early."""
    await producer.publish_later("t", b"soon", 10)
    await producer.publish_later("t", b"later", 30)
    await pass_time(broker, clock, 15)
    consumer = await consumer_of(broker, 10)
    await quiet(broker)
    assert consumer.bodies == [b"soon"]
    await pass_time(broker, clock, 14.9)
    assert consumer.bodies == [b"soon"]
    broker.topics["t"].pause(True)
    await producer.publish_later("t", b"while paused", 5)
    await pass_time(broker, clock, 0.1)
    # Already in the channel: a pause of the topic does not hold it.
    assert consumer.bodies == [b"soon", b"later"]
    await pass_time(broker, clock, 60)
    assert b"while paused" not in consumer.bodies
    broker.topics["t"].pause(False)
    await quiet(broker)
    assert b"while paused" in consumer.bodies


async def test_deferred_messages_are_not_part_of_the_depth(broker: Broker, producer: Client, clock: FakeClock) -> None:
    broker.topic("t").channel("c")
    await producer.publish_later("t", b"d", 10)
    await producer.publish("t", b"m")
    await quiet(broker)
    channel = channel_of(broker)
    assert (channel.depth, len(channel.deferred), channel.message_count) == (1, 1, 2)
    await pass_time(broker, clock, 10)
    assert (channel.depth, len(channel.deferred), channel.message_count) == (2, 0, 2)


@pytest.mark.parametrize("step", [100_000, -100_000])
async def test_a_step_of_the_wall_clock_makes_nothing_early_or_late(
    start_broker: StartBroker, clock: FakeClock, step: int
) -> None:
    broker = await start_broker()
    producer, consumer = Client(broker), await consumer_of(broker, 10)
    await producer.publish_later("t", b"deferred", 100)
    await producer.publish("t", b"requeued")
    await quiet(broker)
    consumer.requeue(consumer.messages[0], 100)
    consumer.take()
    clock.step_wall(step)
    await pass_time(broker, clock, 50)
    assert consumer.messages == []
    await broker.stop()
    clock.step_wall(step)
    broker = await start_broker()
    consumer = await consumer_of(broker, 10)
    await pass_time(broker, clock, 49.9)
    assert consumer.messages == []
    await pass_time(broker, clock, 0.1)
    assert sorted((message.body, message.attempts) for message in consumer.messages) == [
        (b"deferred", 1),
        (b"requeued", 2),
    ]


async def test_delays_survive_a_reboot_and_a_restart_after_it(start_broker: StartBroker, clock: FakeClock) -> None:
    """The clock that never steps starts anew with the machine: then the wall clock knows."""
    broker = await start_broker()
    producer, consumer = Client(broker), await consumer_of(broker, 10)
    await producer.publish_later("t", b"deferred", 1000)
    await producer.publish("t", b"requeued")
    await quiet(broker)
    consumer.requeue(consumer.messages[0], 1000)
    await broker.stop()
    clock.reboot(seconds=400)
    for _ in range(3):
        broker = await start_broker()
        consumer = await consumer_of(broker, 10)
        await pass_time(broker, clock, 100)
        assert consumer.messages == []
        await broker.stop()
    broker = await start_broker()
    consumer = await consumer_of(broker, 10)
    await pass_time(broker, clock, 299)
    assert consumer.messages == []
    await pass_time(broker, clock, 1)
    assert sorted(consumer.bodies) == [b"deferred", b"requeued"]


# --- Where a message is -----------------------------------------------------------------------------------------------


async def test_a_straggler_leaves_the_ring_and_is_still_in_flight(
    broker: Broker, producer: Client, clock: FakeClock
) -> None:
    """One message that is never answered must not make the ring as long as the log."""
    holder, other = await consumer_of(broker, 1), await consumer_of(broker, 0)
    await producer.publish("t", b"straggler")
    await quiet(broker)
    [straggler] = holder.messages
    other.ready(100)
    channel = channel_of(broker)
    channel.ring.limit = 256
    for _ in range(20):
        await producer.publish_many("t", bodies(100))
        await until(lambda: len(other.messages) == 100)
        other.finish(*other.messages)
        other.take()
        assert channel.ring.window <= 512
    assert places(channel, seq_of(straggler)) == ["in flight, unusual"]
    holder.touch(straggler)
    assert holder.errors == []
    other.ready(0)
    await pass_time(broker, clock, MSG_TIMEOUT + 1)
    assert channel.timeout_count == 1
    assert holder.messages[-1].body == b"straggler"
    assert holder.messages[-1].attempts == 2


async def test_a_straggler_can_be_finished(broker: Broker, producer: Client) -> None:
    consumer = await consumer_of(broker, 2500)
    channel_of(broker).ring.limit = 64
    await producer.publish_many("t", bodies(2000))
    await until(lambda: len(consumer.messages) == 2000)
    messages = consumer.messages
    random.Random(2).shuffle(messages)
    for message in messages:
        consumer.finish(message)
    assert consumer.errors == []
    channel = channel_of(broker)
    assert (channel.in_flight_count, consumer.session.in_flight) == (0, 0)


async def test_empty_drops_everything_and_resets_the_counts(broker: Broker, producer: Client, clock: FakeClock) -> None:
    consumer = await consumer_of(broker, 3)
    await producer.publish_many("t", bodies(10))
    await producer.publish_later("t", b"deferred", 10)
    await quiet(broker)
    held = consumer.messages
    consumer.requeue(held[0], 50)
    await quiet(broker)
    channel = channel_of(broker)
    assert (channel.depth, channel.in_flight_count, len(channel.deferred)) == (6, 3, 2)
    channel.empty()
    assert (channel.depth, channel.in_flight_count, len(channel.deferred)) == (0, 0, 0)
    assert consumer.session.in_flight == 0
    consumer.take()
    consumer.finish(held[1])
    assert consumer.errors == [b"E_FIN_FAILED FIN %s failed ID not in flight" % held[1].id]
    await pass_time(broker, clock, 1000)
    assert consumer.messages == []
    await producer.publish_many("t", bodies(5, "new"))
    await quiet(broker)
    assert consumer.bodies == bodies(3, "new")
    # Counters of what happened are not reset.
    assert channel.message_count == 16


async def test_a_paused_channel_keeps_what_comes_and_what_comes_back(
    broker: Broker, producer: Client, clock: FakeClock
) -> None:
    consumer = await consumer_of(broker, 2)
    await producer.publish_many("t", bodies(2))
    await quiet(broker)
    channel = channel_of(broker)
    channel.pause(True)
    consumer.requeue(consumer.messages[0])
    await producer.publish("t", b"new")
    await pass_time(broker, clock, MSG_TIMEOUT + 1)
    assert len(consumer.messages) == 2
    assert channel.depth == 3
    channel.pause(False)
    await quiet(broker)
    assert len(consumer.messages) == 4
    assert channel.depth == 1


async def test_many_deferred_messages_are_not_looked_through_again_and_again(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand of them would stop the loop each time memory is looked after; and memory is freed anyway."""
    monkeypatch.setattr(needed, "LOOK_THROUGH", 50)
    broker = await start_broker(mem_queue_size=100)
    producer, consumer = Client(broker), await consumer_of(broker, 100)
    producer.send(b"".join(dpub("t", 3_600_000, b"%d" % number) for number in range(60)))
    await quiet(broker)
    topic, channel = broker.topics["t"], channel_of(broker)
    assert len(channel.deferred) == 60
    monkeypatch.setattr(channel.needed, "_has", lambda first, stop: pytest.fail("looked through"))
    for _ in range(30):
        await producer.publish_many("t", bodies(100))
        await until(lambda: len(consumer.messages) == 100)
        consumer.finish(*consumer.messages)
        consumer.take()
        broker.turns.housekeeping()
    assert topic.log.memory_count < 1000


# --- Sampling ---------------------------------------------------------------------------------------------------------


async def test_a_sample_of_n_percent_is_one_more_and_the_rest_is_gone(
    broker: Broker, producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(list(range(100)) * 3)
    monkeypatch.setattr(random, "randrange", lambda stop: next(numbers))
    consumer = Client(broker)
    body = b'{"sample_rate":20}'
    assert await consumer.ask(b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body) == b"OK"
    await consumer.subscribe("t", "c", 2500)
    await producer.publish_many("t", bodies(300))
    await quiet(broker)
    assert len(consumer.messages) == 63
    channel = channel_of(broker)
    assert (channel.depth, channel.in_flight_count, channel.message_count) == (0, 63, 300)
    assert consumer.session.message_count == 63


async def test_a_sampled_message_that_comes_back_is_sampled_again(
    broker: Broker, producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter([0, 0, 99])
    monkeypatch.setattr(random, "randrange", lambda stop: next(draws))
    consumer = Client(broker)
    body = b'{"sample_rate":20}'
    assert await consumer.ask(b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body) == b"OK"
    await consumer.subscribe("t", "c", 1)
    await producer.publish("t", b"m")
    for _ in range(2):
        await quiet(broker)
        consumer.requeue(consumer.messages[-1])
    await quiet(broker)
    assert [message.attempts for message in consumer.messages] == [1, 2]
    channel = channel_of(broker)
    assert (channel.depth, channel.in_flight_count) == (0, 0)


# --- Ephemeral channels -----------------------------------------------------------------------------------------------


async def test_an_ephemeral_channel_drops_the_newest_beyond_its_memory(start_broker: StartBroker) -> None:
    broker = await start_broker(mem_queue_size=5)
    producer = Client(broker)
    topic = broker.topic("t")
    brief, _ = topic.channel("brief#ephemeral")
    kept, _ = topic.channel("kept")
    await producer.publish_many("t", bodies(3))
    await producer.publish_many("t", bodies(4, "more"))
    await producer.publish("t", b"too late")
    await quiet(broker)
    assert (brief.depth, brief.message_count, brief.dropped_count) == (5, 8, 3)
    assert brief.backend_depth == 0
    assert kept.depth == 8
    consumer = await consumer_of(broker, 10, channel="brief#ephemeral")
    await quiet(broker)
    assert consumer.bodies == [*bodies(3), *bodies(2, "more")]


async def test_an_ephemeral_channel_vanishes_with_its_last_consumer(broker: Broker, producer: Client) -> None:
    first = await consumer_of(broker, 1, channel="brief#ephemeral")
    second = await consumer_of(broker, 1, channel="brief#ephemeral")
    first.hang_up()
    await quiet(broker)
    assert "brief#ephemeral" in broker.topics["t"].channels
    second.hang_up()
    await quiet(broker)
    assert broker.topics["t"].channels == {}
    # The topic is an ordinary one, and stays.
    await producer.publish("t", b"m")
    assert broker.topics["t"].depth == 1


async def test_an_ephemeral_channel_that_somebody_rejoins_at_once_stays(broker: Broker) -> None:
    first = await consumer_of(broker, 1, channel="brief#ephemeral")
    channel = channel_of(broker, channel="brief#ephemeral")
    first.session.drop()
    await consumer_of(broker, 1, channel="brief#ephemeral")
    await quiet(broker)
    assert channel_of(broker, channel="brief#ephemeral") is channel


async def test_an_ephemeral_channel_that_nobody_joined_stays(broker: Broker) -> None:
    broker.topic("t").channel("brief#ephemeral")
    await quiet(broker)
    assert "brief#ephemeral" in broker.topics["t"].channels


# --- Consumers --------------------------------------------------------------------------------------------------------


async def test_one_consumer_too_many_is_refused_and_room_is_made_by_leaving(start_broker: StartBroker) -> None:
    broker = await start_broker(max_channel_consumers=2)
    consumers = [await consumer_of(broker, 1) for _ in range(2)]
    extra = Client(broker)
    extra.send(b"SUB t c\n")
    assert extra.errors == [b"E_SUB_FAILED SUB failed consumers for t:c exceeds limit of 2"]
    assert extra.is_over
    consumers[0].hang_up()
    await quiet(broker)
    await consumer_of(broker, 1)
    assert len(channel_of(broker).sessions) == 2


async def test_deleting_a_channel_closes_its_consumers_without_a_word(broker: Broker, producer: Client) -> None:
    mine, other = await consumer_of(broker, 1), await consumer_of(broker, 1, channel="other")
    await producer.publish("t", b"m")
    await quiet(broker)
    mine.take()
    broker.topics["t"].delete_channel("c")
    await quiet(broker)
    assert mine.transport.closing
    assert mine.frames == []
    assert not other.transport.closing
    assert list(broker.topics["t"].channels) == ["other"]
