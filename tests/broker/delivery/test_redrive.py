"""A redrive that a stop or a crash interrupts goes on at the next start: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from support.fakes import Client, FakeClock, quiet, until
from support.http_client import HttpClient

REDRIVE = "/channel/redrive?topic=t&channel=c"


async def ask(broker: Broker, method: str, target: str) -> dict[str, Any]:
    async with HttpClient.connect(broker.http_address) as client:
        answer = await client.ask(method, target, b"" if method == "POST" else None)
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


async def with_dead_letters(broker: Broker, count: int) -> list[bytes]:
    channel, _ = broker.topic("t").channel("c")
    channel.settings = replace(channel.settings, max_attempts=1)
    bodies = [b"%d" % number for number in range(count)]
    await Client(broker).publish_many("t", bodies)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", count)
    await until(lambda: len(consumer.messages) >= count)
    for message in consumer.messages:
        consumer.requeue(message)
    await until(lambda: not channel.leaving)
    consumer.hang_up()
    await until(lambda: consumer.transport.lost)
    await quiet(broker)
    return bodies


async def all_of(broker: Broker, count: int) -> Counter[bytes]:
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 1_000)
    await until(lambda: len(consumer.messages) >= count)
    await quiet(broker)
    return Counter(message.body for message in consumer.messages)


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize(("count", "most", "moved"), [(30, 30, 10), (450, 450, 200), (450, 321, 200), (7, 7, 0)])
async def test_a_redrive_goes_on_after_a_restart(
    start_broker: StartBroker, clock: FakeClock, end: str, count: int, most: int, moved: int
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    bodies = await with_dead_letters(broker, count)
    # The first second's worth goes at once, then time stands still.
    rate = max(1, moved)
    await ask(broker, "POST", f"{REDRIVE}&count={most}&rate={rate}")
    await until(lambda: broker.topics["t"].channels["c"].redrive is not None)
    redrive = broker.topics["t"].channels["c"].redrive
    assert redrive is not None
    await until(lambda: redrive.moved == rate)
    if end == "stop":
        await broker.stop()
    else:
        broker.journal.flush()
        broker.kill()
    again = await start_broker(http_address="127.0.0.1:0")
    progress = await ask(again, "GET", REDRIVE)
    assert (progress["running"], progress["planned"]) == (True, most)
    assert progress["moved"] >= rate
    while (await ask(again, "GET", REDRIVE))["running"]:
        # It looks at the clock again after a real STRIDE.
        clock.advance(1)
        await asyncio.sleep(0.01)
    progress = await ask(again, "GET", REDRIVE)
    assert progress == {"dead_letter_topic": "t.c.dead", "planned": most, "moved": most, "running": False}
    found = await all_of(again, most)
    assert set(found.values()) == {1}
    assert len(found) == most
    left = again.topics["t.c.dead"].channels["redrive"].depth
    assert left == len(bodies) - most


async def test_how_a_redrive_ended_is_known_after_a_restart(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 12)
    await ask(broker, "POST", f"{REDRIVE}&count=5")
    await until(lambda: getattr(broker.topics["t"].channels["c"].redrive, "moved", 0) == 5)
    ended = await ask(broker, "GET", REDRIVE)
    await broker.stop()
    again = await start_broker(http_address="127.0.0.1:0")
    assert await ask(again, "GET", REDRIVE) == ended


async def test_a_redrive_whose_source_is_gone_after_a_restart_is_reported(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 12)
    await ask(broker, "POST", f"{REDRIVE}&rate=2")
    redrive = broker.topics["t"].channels["c"].redrive
    assert redrive is not None
    await until(lambda: redrive.moved == 2)
    broker.delete_topic("t.c.dead")
    broker.journal.flush()
    broker.kill()
    again = await start_broker(http_address="127.0.0.1:0")
    progress = await ask(again, "GET", REDRIVE)
    assert (progress["running"], progress["moved"], progress["error"]) == (False, 2, "a channel was deleted")
