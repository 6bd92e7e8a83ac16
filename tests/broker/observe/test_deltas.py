"""``/stats?extended=true&since=``: only what changed, and nothing that changed is left out."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.observe import stats
from flintmq.broker.observe.deltas import Deltas
from support.fakes import SECOND, Client, FakeClock, quiet, until
from support.http_client import HttpClient
from support.nsq_client import NsqClient

TARGET = "/stats?format=json&extended=true&include_mem=false&since="


def merged(known: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """What an asker knows after an answer."""
    topics: dict[str, Any] = known if answer["delta"] else {}
    for name in answer.get("removed", {}).get("topics", ()):
        topics.pop(name, None)
    for name, channel in answer.get("removed", {}).get("channels", ()):
        topics.get(name, {}).get("channels", {}).pop(channel, None)
    for topic in answer["topics"]:
        channels = {channel["channel_name"]: channel for channel in topic["channels"]}
        before = topics.get(topic["topic_name"], {}).get("channels", {})
        topics[topic["topic_name"]] = topic | {"channels": before | channels}
    return topics


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    return merged({}, answer | {"delta": False})


def without_lags(topics: dict[str, Any]) -> dict[str, Any]:
    """The device takes its time: what is durable, and so a lag, may be more in the second of two answers."""
    return {
        name: topic | {"readers": [reader["reader"] for reader in topic["readers"]]} for name, topic in topics.items()
    }


async def test_an_answer_has_what_changed_and_nothing_else(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        async with HttpClient.connect(broker.http_address) as client:
            for name in ("a", "b"):
                await client.post(f"/topic/create?topic={name}")
                for channel in ("x", "y"):
                    await client.post(f"/channel/create?topic={name}&channel={channel}")
            first = (await client.get(TARGET)).json
            assert first["delta"] is False and len(first["topics"]) == 2
            second = (await client.get(TARGET + first["cursor"])).json
            assert second["delta"] is True and second["topics"] == []
            await client.post("/channel/pause?topic=a&channel=x")
            third = (await client.get(TARGET + second["cursor"])).json
            [topic] = third["topics"]
            assert (topic["topic_name"], [one["channel_name"] for one in topic["channels"]]) == ("a", ["x"])
            # Another asker, who knows less, is told too.
            again = (await client.get(TARGET + first["cursor"])).json
            assert [one["topic_name"] for one in again["topics"]] == ["a"]
            await client.post("/channel/delete?topic=a&channel=y")
            await client.post("/topic/delete?topic=b")
            fourth = (await client.get(TARGET + third["cursor"])).json
            assert fourth["removed"] == {"topics": ["b"], "channels": [["a", "y"]]}


async def test_a_cursor_of_another_start_or_of_nobody_gets_everything(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        async with HttpClient.connect(broker.http_address) as client:
            await client.post("/topic/create?topic=a")
            own = (await client.get(TARGET)).json["cursor"]
            boot = own.partition("-")[0]
            for cursor in ("", "x", "00000000-1", f"{boot}-999999", f"{boot}-x", boot):
                answer = (await client.get(TARGET + cursor)).json
                assert answer["delta"] is False and len(answer["topics"]) == 1, cursor


async def test_whoever_merges_all_changes_knows_what_there_is(tmp_path: Path) -> None:
    chance = random.Random(7)
    # Nothing becomes due between two questions, however slow the machine is.
    options: dict[str, Any] = {"msg_timeout": 900_000_000_000, "disk_reserve": 0}
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", **options) as broker:
        async with HttpClient.connect(broker.http_address) as client, NsqClient.to(broker.tcp_address) as consumer:
            await client.post("/topic/create?topic=t0")
            await client.post("/channel/create?topic=t0&channel=c0")
            await consumer.subscribe("t0", "c0", ready=5)
            known: dict[str, Any] = {}
            cursor = ""
            for _ in range(120):
                topic, channel = f"t{chance.randrange(4)}", f"c{chance.randrange(3)}"
                both = f"topic={topic}&channel={channel}"
                target = chance.choice(
                    (
                        f"/topic/create?topic={topic}",
                        f"/channel/create?{both}",
                        f"/channel/create?{both}",
                        f"/pub?topic={topic}",
                        f"/pub?topic={topic}&defer=3000000",
                        f"/channel/pause?{both}",
                        f"/channel/unpause?{both}",
                        f"/channel/empty?{both}",
                        f"/channel/delete?{both}" if both != "topic=t0&channel=c0" else f"/topic/pause?topic={topic}",
                        f"/topic/delete?topic={topic}" if topic != "t0" else "/topic/unpause?topic=t0",
                        f"/log/position?topic={topic}&reader=r&to=earliest",
                        f"/channel/seek?{both}&to=earliest",
                        # Topics whose channels have nothing at all are looked at in another way.
                        "empty",
                        "empty",
                    )
                )
                if target == "empty":
                    for number in range(3):
                        await client.post(f"/channel/empty?topic={topic}&channel=c{number}")
                else:
                    await client.post(target, b"x")
                for tries in range(50):
                    answer = (await client.get(TARGET + cursor)).json
                    cursor, known = answer["cursor"], merged(known, answer)
                    now = whole((await client.get("/stats?format=json&extended=true&include_clients=false")).json)
                    # Between the two a message that was read back may have been sent: the next answer tells of it.
                    if without_lags(known) == without_lags(now):
                        break
                    await asyncio.sleep(0.001 * tries)
                assert without_lags(known) == without_lags(now), target


async def question(deltas: Deltas, cursor: str) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(await deltas.json(cursor, False))
    return answer


def told(answer: dict[str, Any]) -> dict[str, list[str]]:
    return {
        topic["topic_name"]: [channel["channel_name"] for channel in topic["channels"]] for topic in answer["topics"]
    }


async def test_channels_at_rest_are_not_read(broker: Broker) -> None:
    """The work is that of the topics where something happens, however many others there are."""
    for number in range(50):
        for channel in ("x", "y"):
            broker.topic(f"t{number}").channel(channel)
    deltas = Deltas(broker)
    answer = await question(deltas, "")
    assert deltas.looked == 100
    answer = await question(deltas, answer["cursor"])
    assert deltas.looked == 100 and not answer["topics"]
    await Client(broker).publish("t7", b"x")
    await quiet(broker)
    answer = await question(deltas, answer["cursor"])
    assert deltas.looked == 102 and told(answer) == {"t7": ["x", "y"]}
    # It has a message now that may go at any time.
    answer = await question(deltas, answer["cursor"])
    assert deltas.looked == 104 and not answer["topics"]
    for channel in ("x", "y"):
        broker.topics["t7"].channels[channel].empty()
    answer = await question(deltas, answer["cursor"])
    assert deltas.looked == 106 and told(answer) == {"t7": ["x", "y"]}
    answer = await question(deltas, answer["cursor"])
    assert deltas.looked == 106 and not answer["topics"]


async def test_what_happens_to_a_channel_at_rest_is_told(broker: Broker) -> None:
    for name in ("x", "y"):
        broker.topic("t").channel(name)
    channel = broker.topics["t"].channels["x"]
    # Messages that stay in the log for others, to go back to.
    broker.topics["t"].readers.move("r", 0)
    consumer = Client(broker)
    await consumer.subscribe("t", "x", ready=10)
    await Client(broker).publish_many("t", [b"1", b"2"])
    await until(lambda: len(consumer.messages) == 2)
    consumer.finish(*consumer.messages)
    broker.topics["t"].channels["y"].empty()
    await quiet(broker)
    deltas = Deltas(broker)
    cursor = (await question(deltas, ""))["cursor"]

    async def told_after_it() -> dict[str, list[str]]:
        nonlocal cursor
        await quiet(broker)
        answer = await question(deltas, cursor)
        looked = deltas.looked
        assert not (await question(deltas, answer["cursor"]))["topics"]
        # At rest again.
        assert deltas.looked == looked
        cursor = answer["cursor"]
        return told(answer)

    assert await told_after_it() == {}
    channel.pause(True)
    assert await told_after_it() == {"t": ["x"]}
    channel.pause(False)
    assert await told_after_it() == {"t": ["x"]}
    other = Client(broker)
    await other.subscribe("t", "x", ready=0)
    assert await told_after_it() == {"t": ["x"]}
    other.hang_up()
    assert await told_after_it() == {"t": ["x"]}
    # Back, and through all of it, between two questions: only messages sent from memory are more than before.
    channel.seek(0)
    await until(lambda: len(consumer.messages) == 4)
    consumer.finish(*consumer.messages[2:])
    assert await told_after_it() == {"t": ["x"]}
    assert await told_after_it() == {}
    # Another channel of the same name.
    broker.topics["t"].delete_channel("y")
    broker.topics["t"].channel("y")
    assert await told_after_it() == {"t": ["y"]}


async def test_a_backlog_that_leaves_the_memory_is_told(broker: Broker) -> None:
    topic = broker.topic("t")
    topic.channel("c")
    deltas = Deltas(broker)
    await Client(broker).publish_many("t", [b"x" * 100] * 50)
    await quiet(broker)
    before = await question(deltas, "")
    topic.change_settings(replace(topic.settings, mem_queue_size=0))
    await quiet(broker)
    [channel] = stats.document(broker)["topics"][0]["channels"]
    assert channel["backend_depth"] == 50 != before["topics"][0]["channels"][0]["backend_depth"]
    after = await question(deltas, before["cursor"])
    assert [one["backend_depth"] for one in after["topics"][0]["channels"]] == [50]


async def test_messages_that_come_for_a_channel_at_rest_alone_are_told(start_broker: StartBroker) -> None:
    """Dead letters come back, and are gone again before the next question."""
    broker = await start_broker(http_address="127.0.0.1:0")
    channel, _ = broker.topic("t").channel("c")
    channel.settings = replace(channel.settings, max_attempts=1)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", ready=10)
    await Client(broker).publish("t", b"x")
    await until(lambda: consumer.messages)
    consumer.requeue(consumer.messages[0])
    await until(lambda: channel.leaving.dead_lettered_count)
    await quiet(broker)
    deltas = Deltas(broker)
    before = await question(deltas, "")
    async with HttpClient.connect(broker.http_address) as client:
        assert (await client.post("/channel/redrive?topic=t&channel=c")).status == 200
    await until(lambda: len(consumer.messages) == 2)
    consumer.finish(consumer.messages[1])
    await quiet(broker)
    after = await question(deltas, before["cursor"])
    counts = [
        {topic["topic_name"]: topic for topic in answer["topics"]}["t"]["channels"][0]["message_count"]
        for answer in (before, after)
    ]
    assert counts == [1, 2]


async def test_latencies_that_leave_their_window_are_told(start_broker: StartBroker, clock: FakeClock) -> None:
    window = {"e2e_processing_latency_percentiles": (0.5,), "e2e_processing_latency_window_time": 60 * SECOND}
    broker = await start_broker(**window)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", ready=1)
    await Client(broker).publish("t", b"x")
    await until(lambda: consumer.messages)
    consumer.finish(consumer.messages[0])
    await quiet(broker)
    deltas = Deltas(broker)

    def count(topic: dict[str, Any]) -> tuple[int, int]:
        [channel] = topic["channels"]
        return topic["e2e_processing_latency"]["count"], channel["e2e_processing_latency"]["count"]

    before = await question(deltas, "")
    assert [count(topic) for topic in before["topics"]] == [(1, 1)]
    clock.advance(61)
    after = await question(deltas, before["cursor"])
    assert [count(topic) for topic in after["topics"]] == [(0, 0)]
    looked = deltas.looked
    assert not (await question(deltas, after["cursor"]))["topics"] and deltas.looked == looked
