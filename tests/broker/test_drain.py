"""Draining: nothing comes in, consumers take what they can, the rest stays and is reported, the broker stops."""

from __future__ import annotations

import asyncio
import logging

import pytest
from conftest import StartBroker

from flintmq.broker import drain as draining
from flintmq.broker.drain import DrainReport, Remainder
from flintmq.protocol.wire import encode_mpub
from support.fakes import Client, FakeClock, dpub, pass_time, pub, quiet, until


async def test_an_empty_node_stops_at_once(start_broker: StartBroker) -> None:
    broker = await start_broker()
    assert await broker.drain() == DrainReport([], True)
    assert broker.stopping
    await broker.wait_closed()


@pytest.mark.parametrize(
    ("verb", "command"),
    [("PUB", pub("t", b"x")), ("MPUB", encode_mpub(b"t", [b"x"])), ("DPUB", dpub("t", 1000, b"x"))],
)
async def test_publishes_are_refused_with_the_reason(start_broker: StartBroker, verb: str, command: bytes) -> None:
    broker = await start_broker()
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 0)
    await Client(broker).publish("t", b"keeps it busy")
    task = broker.drain()
    answer = await Client(broker).ask(command)
    assert answer == f"E_{verb}_FAILED {verb} failed the node is being drained".encode()
    assert broker.health == "NOK - the node is being drained"
    # Room on the disk changes nothing about it.
    broker.upkeep.look_at_space()
    assert broker.health == "NOK - the node is being drained"
    consumer.ready(1)
    message = await until(lambda: consumer.messages and consumer.messages[0])
    consumer.finish(message)
    assert (await task).complete


async def test_it_ends_when_consumers_have_finished_everything(start_broker: StartBroker) -> None:
    broker = await start_broker()
    consumer, producer = Client(broker), Client(broker)
    # One at a time, so that what was taken from the list was looked at.
    await consumer.subscribe("t", "c", 1)
    await producer.publish("t", *[b"%d" % number for number in range(10)])
    task = broker.drain()
    finished = set()
    while len(finished) < 10:
        message = (await until(lambda: consumer.messages))[0]
        consumer.take()
        assert not task.done()
        if message.body == b"4" and message.attempts == 1:
            # Put back: it is not finished, and comes again.
            consumer.requeue(message)
        else:
            consumer.finish(message)
            finished.add(message.body)
    assert await task == DrainReport([], True)


async def test_a_consumer_may_still_come(start_broker: StartBroker) -> None:
    """Reconnects, and consumers of channels that had none when it began."""
    broker = await start_broker()
    first = Client(broker)
    await first.subscribe("t", "c", 0)
    broker.topics["t"].channel("d")
    await Client(broker).publish("t", b"m")
    task = broker.drain()
    second = Client(broker)
    await second.subscribe("t", "d", 1)
    first.ready(1)
    for client in (first, second):
        client.finish(await until(lambda client=client: client.messages and client.messages[0]))
    assert await task == DrainReport([], True)


async def test_what_nobody_can_take_stays_and_is_reported(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await start_broker()
    caplog.set_level(logging.INFO, "flintmq.broker.drain")
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "served", 10)
    broker.topics["t"].channel("idle")
    paused, _ = broker.topics["t"].channel("paused")
    paused.pause(True)
    await producer.publish("t", b"1", b"2")
    await producer.publish_later("t", b"later", 60)
    await producer.publish("nobody", b"x")
    await producer.publish("standing", b"y")
    broker.topics["standing"].pause(True)
    broker.topics["standing"].channel("c")
    task = broker.drain()
    await until(lambda: caplog.records)
    consumer.finish(*await until(lambda: len(consumer.messages) == 2 and consumer.messages))
    report = await task
    assert report.complete
    assert report.left == [
        Remainder("t", "served", 1, 1, ""),
        Remainder("t", "idle", 3, 1, "without a consumer"),
        Remainder("t", "paused", 3, 1, "paused"),
        Remainder("nobody", None, 1, 0, "without a channel"),
        Remainder("standing", None, 1, 0, "paused"),
    ]
    assert report.messages == 9
    assert [record.getMessage() for record in caplog.records] == [
        "NSQ: draining, 2 messages are with consumers",
        "CHANNEL(served): 1 messages of t stay: 1 deferred",
        "CHANNEL(idle): 3 messages of t stay: 1 deferred, 2 without a consumer",
        "CHANNEL(paused): 3 messages of t stay: 1 deferred, 2 paused",
        "TOPIC(nobody): 1 messages stay: 1 without a channel",
        "TOPIC(standing): 1 messages stay: 1 paused",
        "NSQ: drained, 9 messages stay for the next start",
    ]
    # And they do stay.
    broker = await start_broker()
    topic = broker.topics["t"]
    assert {name: channel.depth + len(channel.deferred) for name, channel in topic.channels.items()} == {
        "served": 1,
        "idle": 3,
        "paused": 3,
    }
    assert (broker.topics["nobody"].depth, broker.topics["standing"].depth) == (1, 1)


async def test_what_times_out_is_delivered_again_before_the_end(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(msg_timeout=1_000_000_000)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 1)
    await Client(broker).publish("t", b"m")
    await until(lambda: consumer.messages)
    task = broker.drain()
    await pass_time(broker, clock, 2)
    again = await until(lambda: len(consumer.messages) == 2 and consumer.messages[1])
    assert again.attempts == 2
    consumer.finish(again)
    assert (await task).complete


async def test_it_does_not_wait_for_ever(start_broker: StartBroker, caplog: pytest.LogCaptureFixture) -> None:
    broker = await start_broker()
    caplog.set_level(logging.INFO, "flintmq.broker.drain")
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 1)
    await Client(broker).publish("t", b"never finished", b"never sent")
    report = await broker.drain(timeout=0.05)
    assert report == DrainReport([Remainder("t", "c", 2, 0, "")], False)
    assert [record.getMessage() for record in caplog.records][-2:] == [
        "CHANNEL(c): 2 messages of t stay: 2 not finished in time",
        "NSQ: not drained, 2 messages stay for the next start",
    ]
    await broker.wait_closed()


async def test_progress_is_said_now_and_then(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_SAY", 0.0)
    caplog.set_level(logging.INFO, "flintmq.broker.drain")
    broker = await start_broker()
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 1)
    await Client(broker).publish("t", b"m")
    task = broker.drain()
    await until(lambda: "NSQ: draining, 1 messages to go" in [record.getMessage() for record in caplog.records])
    consumer.finish(*consumer.messages)
    await task


async def test_a_stop_ends_it_at_once(start_broker: StartBroker) -> None:
    broker = await start_broker()
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 1)
    await Client(broker).publish("t", b"m")
    await quiet(broker)
    task = broker.drain(timeout=0)
    assert broker.drain() is task
    await broker.stop()
    async with asyncio.timeout(30):
        report = await task
    assert not report.complete
    broker = await start_broker()
    assert broker.topics["t"].channels["c"].depth == 1
