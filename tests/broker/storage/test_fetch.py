"""Reading a topic's log over HTTP: ranges, how far they reach, what cannot be had, and who is not disturbed by it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.http.log import time_of
from flintmq.broker.storage import fetch as fetch_module
from flintmq.broker.storage import segment as segment_module
from flintmq.broker.storage.segment import FILE_HEADER, RECORD_HEADER
from flintmq.protocol.seqs import SEQ_MASK
from flintmq.protocol.wire import FRAME_MESSAGE, FrameDecoder, decode_message, encode_mpub
from support.fakes import SECOND, Client, FakeClock, quiet, until
from support.http_client import Answer, HttpClient, request_of
from support.simdisk import SimDisk, settled

#: Small files; syncs when a test asks for them.
SMALL: dict[str, Any] = {
    "http_address": "127.0.0.1:0",
    "max_bytes_per_file": 100_000,
    "sync_timeout": 3600 * SECOND,
    "sync_every": 1_000_000,
}


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker(**SMALL)


@pytest.fixture
async def http(broker: Broker) -> AsyncIterator[HttpClient]:
    async with HttpClient.connect(broker.http_address) as client:
        yield client


async def synced(broker: Broker, topic: str = "t") -> Topic:
    """All that was published is durable."""
    found = broker.topics[topic]
    await quiet(broker)
    found.log.sync()
    await until(lambda: found.durable == found.log.end)
    await quiet(broker)
    return found


def messages(body: bytes) -> dict[int, bytes]:
    """By their seqs, in the order they came."""
    found: dict[int, bytes] = {}
    for kind, data in FrameDecoder().feed(body):
        assert kind == FRAME_MESSAGE
        message = decode_message(data)
        assert message.attempts == 1
        found[int(message.id, 16) & SEQ_MASK] = message.body
    return found


async def fetch(http: HttpClient, first: int, stop: int, **arguments: object) -> Answer:
    query = "".join(f"&{name}={value}" for name, value in arguments.items())
    return await http.get(f"/log/fetch?topic=t&from={first}&to={stop}{query}")


async def read(http: HttpClient, first: int, stop: int, **arguments: object) -> dict[int, bytes]:
    """The whole range, in as many requests as it takes."""
    found: dict[int, bytes] = {}
    while first < stop:
        answer = await fetch(http, first, stop, **arguments)
        assert answer.status == 200, answer.body
        some = messages(answer.body)
        following = int(answer.headers["x-flintmq-next"])
        assert first < following <= stop and all(first <= seq < following for seq in some)
        assert some or following == stop
        found.update(some)
        first = following
    return found


def numbered(count: int, size: int = 50, start: int = 0) -> list[bytes]:
    return [(b"%d " % number).ljust(size, b".") for number in range(start, start + count)]


async def filled(broker: Broker, count: int = 3_000, size: int = 200) -> dict[int, bytes]:
    """A topic with some segments; its messages by their seqs."""
    producer = Client(broker)
    bodies = numbered(count, size)
    for i in range(0, count, 100):
        await producer.publish_many("t", bodies[i : i + 100])
    topic = await synced(broker)
    return dict(enumerate(bodies, topic.log.end - count))


# --- What is there ----------------------------------------------------------------------------------------------------


async def test_info_tells_what_can_be_read(broker: Broker, http: HttpClient) -> None:
    await Client(broker).publish("t", b"one", b"two")
    topic = broker.topics["t"]
    before = (await http.get("/log/info?topic=t")).json
    assert (before["first"], before["durable"], before["end"]) == (topic.log.first, topic.log.first, topic.log.end)
    assert before["messages"] == 0
    await synced(broker)
    after = (await http.get("/log/info?topic=t")).json
    assert after == {
        "topic": "t",
        "node": broker.node.hex(),
        "epoch": topic.epoch,
        "first": topic.log.first,
        "durable": topic.log.first + 2,
        "end": topic.log.first + 2,
        "messages": 2,
        "bytes": topic.log.segments[0].size,
    }


async def test_an_epoch_ends_with_its_log(start_broker: StartBroker) -> None:
    broker = await start_broker(**SMALL)
    await Client(broker).publish("t", b"one")
    epoch = broker.topics["t"].epoch
    await broker.stop()
    broker = await start_broker(**SMALL)
    assert broker.topics["t"].epoch == epoch, "a restart is no new beginning"
    broker.delete_topic("t")
    await Client(broker).publish("t", b"one")
    topic = await synced(broker)
    assert topic.epoch != epoch
    async with HttpClient.connect(broker.http_address) as http:
        answer = await fetch(http, topic.log.first, topic.durable, epoch=epoch)
        assert (answer.status, answer.json["epoch"]) == (409, topic.epoch)
        assert answer.message.startswith("EPOCH_CHANGED: ")
        assert (await fetch(http, topic.log.first, topic.durable, epoch=topic.epoch)).status == 200


async def test_a_time_is_a_place_in_the_log(broker: Broker, http: HttpClient, clock: FakeClock) -> None:
    producer = Client(broker)
    begun = clock.wall()
    for number in range(5):
        await producer.publish("t", b"%d" % number)
        clock.advance(60)
    topic = await synced(broker)
    first = topic.log.first

    async def offset(text: object) -> int:
        answer = await http.get(f"/log/offset?topic=t&time={text}")
        assert answer.status == 200, answer.body
        found: int = answer.json["offset"]
        return found

    assert [await offset(begun + n * SECOND) for n in (-1, 0, 1, 60, 119, 10_000)] == [
        first,
        first,
        first + 1,
        first + 1,
        first + 2,
        first + 5,
    ]
    assert await offset("2023-11-14T22:13:20Z") == first, "where the test's clock begins"
    assert await offset("2023-11-14T22:13:20.000000001Z") == first + 1
    assert await offset("2023-11-15T00:14:20+02:00") == first + 1
    await producer.publish("t", b"not yet durable")
    assert await offset(clock.wall()) == first + 5
    for wrong in ("", "yesterday", "2023-11-14", "2023-11-14T22:13:20", "2023-13-14T22:13:20Z", "-5", "1e9", "9" * 20):
        answer = await http.get(f"/log/offset?topic=t&time={wrong}")
        assert (answer.status, answer.message.partition(":")[0]) == (400, "INVALID_TIME"), wrong


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01t00:00:01.5z", 1_500_000_000),
        ("1970-01-01 00:00:00.123456789Z", 123_456_789),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1970-01-01T01:00:00 01:00", 0),
        ("1969-12-31T23:59:59.25Z", -750_000_000),
        ("1970-01-01T00:00:00", None),
        ("1970-01-01T25:00:00Z", None),
        ("now", None),
    ],
)
def test_times_are_those_of_rfc_3339(text: str, nanoseconds: int | None) -> None:
    assert time_of(text) == nanoseconds


# --- Times ------------------------------------------------------------------------------------------------------------


async def published(http: HttpClient, topic: Topic) -> dict[int, int]:
    """When each durable message was published, by its seq."""
    found: dict[int, int] = {}
    first = topic.log.first
    while first < topic.durable:
        answer = await fetch(http, first, topic.durable)
        for _, data in FrameDecoder().feed(answer.body):
            message = decode_message(data)
            found[int(message.id, 16) & SEQ_MASK] = message.timestamp
        first = int(answer.headers["x-flintmq-next"])
    return found


def covered(ranges: list[dict[str, Any]], times: dict[int, int], since: int, until: int) -> int:
    """Check what ranges claim; how many messages they ask to be read that are of another time."""
    edges = [edge for one in ranges for edge in (one["from"], one["to"])]
    assert edges == sorted(edges)
    inside: set[int] = set()
    for one in ranges:
        seqs = [seq for seq in times if one["from"] <= seq < one["to"]]
        assert one["messages"] == len(seqs)
        if one["all"]:
            assert all(since <= times[seq] < until for seq in seqs)
        inside.update(seqs)
    assert {seq for seq, time in times.items() if since <= time < until} <= inside
    return sum(not since <= times[seq] < until for seq in inside)


@pytest.mark.parametrize("seed", range(12))
async def test_the_ranges_of_a_time_hold_all_of_it_whatever_the_clock_did(
    start_broker: StartBroker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Publishes of all kinds, steps of the clock, stops and kills: no message of a time is left out."""
    monkeypatch.setattr(segment_module, "CHUNK_BYTES", 3_000)
    dice = random.Random(seed)
    steps = dice.choice([(), (), (-0.001, -5.0, 3600.0, -3600.0)])
    settings = {**SMALL, "tcp_address": "127.0.0.1:0", "max_bytes_per_file": dice.choice([15_000, 60_000])}
    broker = await start_broker(**settings)
    for _ in range(dice.randint(1, 3)):
        producer = Client(broker)
        reader, writer = await asyncio.open_connection(*broker.tcp_address.rsplit(":", 1))
        writer.write(b"  V2")
        for _ in range(dice.randint(5, 60)):
            bodies = numbered(dice.randint(1, 40), dice.choice([10, 100, 900]))
            match dice.randrange(4):
                case 0:
                    await producer.publish("t", bodies[0])
                case 1:
                    await producer.publish_many("t", bodies)
                case 2:
                    for body in bodies[:5]:
                        await producer.publish("t", body)
                        clock.advance(dice.choice([0, 0.001]))
                case 3:
                    # The lane: the kernel takes them from the socket.
                    for _ in range(2):
                        writer.write(encode_mpub(b"t", bodies))
                        assert (await reader.readexactly(10))[8:] == b"OK"
            clock.advance(dice.choice([0, 0.000001, 0.5, 10]))
            if steps and not dice.randrange(8):
                clock.step_wall(dice.choice(steps))
        writer.close()
        await writer.wait_closed()
        await synced(broker)
        if dice.randrange(2):
            broker.kill()
        else:
            await broker.stop()
        broker = await start_broker(**settings)
    topic = await synced(broker)
    async with HttpClient.connect(broker.http_address) as http:
        times = await published(http, topic)
        moments = sorted(set(times.values()))
        for _ in range(60):
            since, until = (dice.choice(moments) + dice.choice([-1, 0, 1, 500_000]) for _ in range(2))
            answer = await http.get(f"/log/ranges?topic=t&since={since}&until={until}")
            assert (answer.status, answer.json["epoch"]) == (200, topic.epoch)
            covered(answer.json["ranges"], times, since, until)
            answer = await http.get(f"/log/ranges?topic=t&since={since}")
            covered(answer.json["ranges"], times, since, 1 << 63)
            first, stop = sorted(dice.randint(topic.log.first, topic.durable) for _ in range(2))
            answer = await http.get(f"/log/ranges?topic=t&until={until}&from={first}&to={stop}")
            some = {seq: time for seq, time in times.items() if first <= seq < stop}
            covered(answer.json["ranges"], some, -1, until)
            answer = await http.get(f"/log/ranges?topic=t&from={first}&to={stop}")
            assert sum(one["messages"] for one in answer.json["ranges"]) == len(some)
            assert all(one["all"] for one in answer.json["ranges"])


async def test_the_ranges_of_a_time_are_narrow(
    start_broker: StartBroker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that only goes on, also after a restart: what is read in vain is two chunks at most."""
    monkeypatch.setattr(segment_module, "CHUNK_BYTES", 3_000)
    broker = await start_broker(**SMALL)
    producer = Client(broker)
    for _ in range(300):
        await producer.publish_many("t", numbered(10, 100))
        clock.advance(1)
    await synced(broker)
    for _ in range(2):
        async with HttpClient.connect(broker.http_address) as http:
            topic = broker.topics["t"]
            times = await published(http, topic)
            assert len(topic.log.segments) > 3
            begun = min(times.values())
            for since in range(begun, begun + 290 * SECOND, 7 * SECOND):
                for until in (since, since + 1, since + 3 * SECOND, since + 100 * SECOND):
                    answer = await http.get(f"/log/ranges?topic=t&since={since}&until={until}")
                    assert covered(answer.json["ranges"], times, since, until) <= 60
            # One step back spoils one file, and no other.
            answer = await http.get(f"/log/ranges?topic=t&since={begun + 400 * SECOND}")
            assert answer.json["ranges"] == []
        await broker.stop()
        broker = await start_broker(**SMALL)


async def test_one_step_of_the_clock_spoils_one_file(broker: Broker, http: HttpClient, clock: FakeClock) -> None:
    producer = Client(broker)
    for number in range(40):
        await producer.publish_many("t", numbered(100, 100))
        clock.advance(60)
        if number == 23:
            clock.step_wall(-100)
    topic = await synced(broker)
    assert len(topic.log.segments) > 3
    assert sum(not segment.ordered for segment in topic.log.segments) == 1
    times = await published(http, topic)
    answer = await http.get(f"/log/ranges?topic=t&since={clock.wall()}")
    [spoilt] = [segment for segment in topic.log.segments if not segment.ordered]
    assert [(one["from"], one["to"], one["all"]) for one in answer.json["ranges"]] == [
        (spoilt.base, spoilt.end, False)
    ], len(times)


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("topic=t&since=yesterday", 400, "INVALID_TIME"),
        ("topic=t&until=-5", 400, "INVALID_TIME"),
        ("topic=t&from=x", 400, "INVALID_ARG_FROM"),
        ("topic=t&to=9999999999999999", 416, "NOT_YET"),
        ("topic=t&from=1", 410, "GONE"),
        ("topic=u", 404, "TOPIC_NOT_FOUND"),
        ("", 400, "MISSING_ARG_TOPIC"),
    ],
)
async def test_wrong_questions_for_ranges(broker: Broker, http: HttpClient, query: str, status: int, code: str) -> None:
    await Client(broker).publish("t", b"one")
    await synced(broker)
    answer = await http.get(f"/log/ranges?{query}")
    assert (answer.status, answer.message.partition(":")[0]) == (status, code)


# --- Ranges -----------------------------------------------------------------------------------------------------------


async def test_any_range_can_be_read(broker: Broker, http: HttpClient) -> None:
    written = await filled(broker)
    topic = broker.topics["t"]
    assert len(topic.log.segments) > 4
    first, stop = min(written), max(written) + 1
    assert await read(http, first, stop) == written
    picker = random.Random(5)
    edges = [segment.base for segment in topic.log.segments]
    ranges = [tuple(sorted((picker.randint(first, stop), picker.randint(first, stop)))) for _ in range(40)]
    for a, b in [*ranges, (first, first), (stop, stop), (first, first + 1), (stop - 1, stop), *pairwise(edges)]:
        expected = {seq: body for seq, body in written.items() if a <= seq < b}
        assert await read(http, a, b, max_bytes=picker.choice([1, 300, 20_000, 70_000, 150_000, 10**9])) == expected


async def test_bodies_can_be_left_out(broker: Broker, http: HttpClient) -> None:
    """Frames without bodies: the same messages otherwise, in the same number of answers."""
    producer = Client(broker)
    for size in (1, 7, 300, 5_000, 70_000):
        await producer.publish_many("t", numbered(30, size))
    topic = await synced(broker)
    assert len(topic.log.segments) > 1
    first, stop = topic.log.first, topic.durable
    for most in (1, 1_000, 16 << 20):
        at = first
        while at < stop:
            whole, bare = (
                await fetch(http, at, stop, max_bytes=most),
                await fetch(http, at, stop, max_bytes=most, bodies="false"),
            )
            assert bare.headers["x-flintmq-next"] == whole.headers["x-flintmq-next"]
            assert len(bare.body) % 34 == 0
            heads = [decode_message(data) for _, data in FrameDecoder().feed(whole.body)]
            assert [decode_message(data) for _, data in FrameDecoder().feed(bare.body)] == [
                dataclasses.replace(message, body=b"") for message in heads
            ]
            at = int(whole.headers["x-flintmq-next"])


async def test_the_ends_have_names(broker: Broker, http: HttpClient) -> None:
    written = await filled(broker, 100)
    answer = await http.get("/log/fetch?topic=t&from=earliest&to=latest")
    assert messages(answer.body) == written
    assert answer.headers["x-flintmq-next"] == str(broker.topics["t"].durable)


async def test_an_answer_says_whose_it_is_and_how_far_it_goes(broker: Broker, http: HttpClient) -> None:
    written = await filled(broker, 100)
    first, stop = min(written), max(written) + 1
    answer = await fetch(http, first, stop)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-flintmq-node"] == broker.node.hex()
    assert answer.headers["x-flintmq-epoch"] == broker.topics["t"].epoch
    assert answer.headers["x-flintmq-next"] == str(stop)
    assert answer.headers["transfer-encoding"] == "chunked" and "server" not in answer.headers
    empty = await fetch(http, stop, stop)
    assert (empty.status, empty.headers["x-flintmq-next"], empty.body) == (200, str(stop), b"")
    assert (await http.get("/ping")).body == b"OK", "the connection goes on"


@pytest.mark.parametrize("most", [0, 1, 233, 234, 235, 1_000, 50_000, 99_999, 250_000])
async def test_an_answer_holds_no_more_than_asked_for_but_one_message(
    broker: Broker, http: HttpClient, most: int
) -> None:
    written = await filled(broker)
    first, stop = min(written), max(written) + 1
    answer = await fetch(http, first, stop, max_bytes=most)
    count = len(messages(answer.body))
    assert int(answer.headers["x-flintmq-next"]) == first + count
    assert count == 1 or len(answer.body) <= most
    assert len(answer.body) > most - 100_000, "and not much less"


async def test_messages_of_every_kind_are_there_from_when_they_were_published(
    broker: Broker, http: HttpClient, clock: FakeClock
) -> None:
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 10)
    producer = Client(broker)
    await producer.publish("t", b"plain")
    await producer.publish_later("t", b"deferred", 3600)
    large = [b"L" * 90_000, b"M" * 90_000, b"N" * 10]
    await producer.publish_many("t", large)
    await until(lambda: len(consumer.messages) == 4)
    consumer.requeue(consumer.messages[0])
    await until(lambda: len(consumer.messages) == 5)
    assert consumer.messages[-1].attempts == 2
    topic = await synced(broker)
    found = await read(http, topic.log.first, topic.durable)
    assert list(found.values()) == [b"plain", b"deferred", *large]


async def test_records_with_something_extra_are_read_as_any_other(broker: Broker, http: HttpClient) -> None:
    await Client(broker).publish("t", b"before")
    topic = broker.topics["t"]
    record = bytearray(b"\0\0\0\4with")
    topic.log.append(record, 0, len(record), 1, broker.clock.wall(), extra=b"x" * 300)
    await Client(broker).publish("t", b"after")
    await synced(broker)
    assert list((await read(http, topic.log.first, topic.durable)).values()) == [b"before", b"with", b"after"]


async def test_gaps_are_passed_over(start_broker: StartBroker) -> None:
    written: dict[int, bytes] = {}
    for number in range(3):
        broker = await start_broker(**SMALL)
        bodies = numbered(20, start=number * 20)
        await Client(broker).publish_many("t", bodies)
        topic = await synced(broker)
        written.update(enumerate(bodies, topic.log.end - 20))
        if number < 2:
            broker.kill()
    first, stop = min(written), max(written) + 1
    assert stop - first > 1_000_000
    async with HttpClient.connect(broker.http_address) as http:
        assert await read(http, first, stop) == written
        gap = sorted(written)[19] + 100
        assert await read(http, gap, stop) == {seq: body for seq, body in written.items() if seq > gap}
        answer = await fetch(http, gap, gap + 100)
        assert (answer.body, answer.headers["x-flintmq-next"]) == (b"", str(gap + 100))
        # What is left of the range after the last message is a gap: that is done, too.
        answer = await fetch(http, first, gap, max_bytes=20 * 84)
        assert (len(messages(answer.body)), answer.headers["x-flintmq-next"]) == (20, str(gap))


# --- What cannot be had -----------------------------------------------------------------------------------------------


async def test_only_what_is_durable_is_given(broker: Broker, http: HttpClient) -> None:
    producer = Client(broker)
    await producer.publish("t", b"one")
    topic = await synced(broker)
    await producer.publish("t", b"two")
    first = topic.log.first
    answer = await fetch(http, first, first + 2)
    assert (answer.status, answer.json["durable"]) == (416, first + 1)
    assert answer.message.startswith("NOT_YET: ")
    assert list((await read(http, first, first + 1)).values()) == [b"one"]
    await synced(broker)
    assert list((await read(http, first, first + 2)).values()) == [b"one", b"two"]


async def test_a_batch_is_given_whole_or_not_yet(broker: Broker, http: HttpClient) -> None:
    """A batch in slices is written before its last slice came, and may yet be cut back."""
    await Client(broker).publish("t", b"one")
    topic = await synced(broker)
    record = bytearray(b"\0\0\0\4half")
    topic.publish(record, 0, len(record), 1, more=True)
    await quiet(broker)
    topic.log.sync()
    await quiet(broker)
    assert topic.log.written == topic.log.first + 2 and topic.durable == topic.log.first + 1
    assert (await fetch(http, topic.log.first, topic.log.first + 2)).status == 416
    topic.publish(record, 0, len(record), 1)
    await synced(broker)
    assert len(await read(http, topic.log.first, topic.durable)) == 3


async def test_what_was_let_go_is_gone(broker: Broker, http: HttpClient) -> None:
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    written = await filled(broker, 2_000)
    first = min(written)
    await until(lambda: len(consumer.messages) == 2_000)
    consumer.finish(*consumer.messages)
    await quiet(broker)
    broker.upkeep.sync()
    topic = broker.topics["t"]
    await until(lambda: topic.log.first > first)
    answer = await fetch(http, first, topic.durable)
    assert (answer.status, answer.json["first"]) == (410, topic.log.first)
    assert answer.message.startswith("GONE: ")
    rest = await read(http, topic.log.first, topic.durable)
    assert rest == {seq: body for seq, body in written.items() if seq >= topic.log.first}


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("", "MISSING_ARG_TOPIC"),
        ("topic=t", "MISSING_ARG_FROM"),
        ("topic=t&from=1", "MISSING_ARG_TO"),
        ("topic=t&from=x&to=2", "INVALID_ARG_FROM"),
        ("topic=t&from=1&to=-2", "INVALID_ARG_TO"),
        ("topic=t&from=5&to=4", "INVALID_ARG_TO"),
        ("topic=t&from=1&to=2&max_bytes=many", "INVALID_ARG_MAX_BYTES"),
        ("topic=t&from=1&to=99999999999999999999", "INVALID_ARG_TO"),
    ],
)
async def test_a_wrong_question_is_refused(broker: Broker, http: HttpClient, query: str, code: str) -> None:
    broker.topic("t")
    answer = await http.get(f"/log/fetch?{query}")
    assert (answer.status, answer.message.partition(":")[0]) == (400, code)


async def test_what_has_no_log_says_so(start_broker: StartBroker) -> None:
    broker = await start_broker(**{**SMALL, "durability": "memory"})
    broker.topic("t")
    broker.topic("t#ephemeral")
    async with HttpClient.connect(broker.http_address) as http:
        for route in ("info?", "offset?time=1&", "fetch?from=1&to=2&"):
            for topic in ("t", "t%23ephemeral"):
                answer = await http.get(f"/log/{route}topic={topic}")
                assert (answer.status, answer.message.partition(":")[0]) == (400, "NO_LOG")
            answer = await http.get(f"/log/{route}topic=nothing")
            assert (answer.status, answer.message) == (404, "TOPIC_NOT_FOUND")


# --- Damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


async def test_damage_is_told_with_its_range(broker: Broker, http: HttpClient) -> None:
    producer = Client(broker)
    for body in numbered(30, 1_000):
        await producer.publish("t", body)
    topic = await synced(broker)
    first, stop = topic.log.first, topic.durable
    for record in (5, 6, 20):
        flip(topic.log.segments[0].path, FILE_HEADER + record * (RECORD_HEADER + 1_034) + 300)
    answer = await fetch(http, first, stop)
    assert list(messages(answer.body)) == list(range(first, first + 5))
    assert answer.headers["x-flintmq-next"] == str(first + 5)
    for start in (first + 5, first + 6):
        answer = await fetch(http, start, stop)
        assert (answer.status, answer.json["first"], answer.json["stop"]) == (500, start, first + 7)
        assert answer.message.startswith("DAMAGED: ")
    assert list(await read(http, first + 7, first + 20)) == list(range(first + 7, first + 20))
    assert (await fetch(http, first + 20, stop)).status == 500
    assert list(await read(http, first + 21, stop)) == list(range(first + 21, stop))


async def test_damage_further_on_cuts_the_answer(broker: Broker) -> None:
    """What arrived is whole and checked; asking on from there gives the reason."""
    written = await filled(broker, 2_000)
    first, stop = min(written), max(written) + 1
    damaged = broker.topics["t"].log.segments[2]
    flip(damaged.path, FILE_HEADER + RECORD_HEADER + 50)
    async with HttpClient.connect(broker.http_address) as http:
        http.send(request_of("GET", f"/log/fetch?topic=t&from={first}&to={stop}"))
        everything = await http.ended()
    head, _, body = everything.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and f"X-Flintmq-Next: {stop}".encode() in head
    assert not everything.endswith(b"\r\n0\r\n\r\n"), "no last chunk"
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        whole += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    arrived = messages(whole)
    assert arrived == {seq: body for seq, body in written.items() if seq < damaged.base}
    async with HttpClient.connect(broker.http_address) as http:
        answer = await fetch(http, damaged.base, stop)
        assert (answer.status, answer.json["first"]) == (500, damaged.base)
        assert await read(http, answer.json["stop"], stop) == {
            seq: body for seq, body in written.items() if seq >= answer.json["stop"]
        }


@pytest.mark.parametrize("what", ["a record", "the last record", "the header", "everything"])
async def test_what_was_lost_before_the_start_is_no_gap(start_broker: StartBroker, what: str) -> None:
    """Damage that is found while a segment is salvaged is remembered, also by the next start."""
    broker = await start_broker(**SMALL)
    written = await filled(broker, 1_200)
    topic = broker.topics["t"]
    first, stop = min(written), max(written) + 1
    broker.upkeep.sync()
    await quiet(broker)
    segment = topic.log.segments[-1] if what in ("a record", "the last record", "everything") else topic.log.segments[1]
    path, base, size = segment.path, segment.base, segment.size
    assert not topic.log.segments[-1].sealed
    broker.kill()
    content = bytearray(path.read_bytes())
    if what == "a record":
        content[FILE_HEADER + RECORD_HEADER + 50] ^= 1
    elif what == "the last record":
        content[size - 5] ^= 1
    elif what == "the header":
        content[:FILE_HEADER] = bytes(FILE_HEADER)
        content[FILE_HEADER] ^= 1
    else:
        content[FILE_HEADER:] = bytes(len(content) - FILE_HEADER)
    path.write_bytes(content)
    for _ in range(2):
        broker = await start_broker(**SMALL)
        async with HttpClient.connect(broker.http_address) as http:
            at, found, lost = first, {}, []
            while at < stop:
                answer = await fetch(http, at, stop)
                if answer.status == 500:
                    assert answer.json["first"] == at
                    lost.append((at, answer.json["stop"]))
                    at = answer.json["stop"]
                else:
                    found.update(messages(answer.body))
                    at = int(answer.headers["x-flintmq-next"])
            [(a, b)] = lost
            assert found == {seq: body for seq, body in written.items() if not a <= seq < b}
            assert base <= a < b <= stop and (b - a < 300 or what in ("the header", "everything"))
            assert (await http.get("/log/info?topic=t")).json["messages"] == len(found)
        await broker.stop()


async def test_a_file_that_cannot_be_read_now_is_no_damage(start_broker: StartBroker, tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(**SMALL, disk=disk)
    producer = Client(broker)
    producer.send(b"PUB t\n\0\0\0\3one")
    await settled(broker)
    topic = broker.topics["t"]
    topic.log.sync()
    await settled(broker)
    disk.fail("read", 5, path=".seg")
    async with HttpClient.connect(broker.http_address) as http:
        answer = await fetch(http, topic.log.first, topic.durable)
        assert answer.status == 503 and answer.message.startswith("UNREADABLE: ")
        assert list((await read(http, topic.log.first, topic.durable)).values()) == [b"one"]
    assert topic.log.damaged == []


# --- Beside everything else -------------------------------------------------------------------------------------------


async def test_a_slow_reader_holds_little_memory_and_no_one_else(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(**{**SMALL, "max_bytes_per_file": 5 << 20})
    written = await filled(broker, 4_000, 5_000)
    first, stop = min(written), max(written) + 1
    reads = 0
    real = broker.disk.read

    def counted(fd: int, size: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        return real(fd, size, offset)

    monkeypatch.setattr(broker.disk, "read", counted)
    async with HttpClient.connect(broker.http_address) as slow, HttpClient.connect(broker.http_address) as quick:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        slow.send(request_of("GET", f"/log/fetch?topic=t&from={first}&to={stop}&max_bytes={1 << 30}"))
        before = -1
        while reads != before:
            before = reads
            # As far as it gets: what both sockets hold, and two chunks.
            for _ in range(200):
                await asyncio.sleep(0)
            await quiet(broker)
            await asyncio.sleep(0.05)
        assert reads * (512 << 10) < 16 << 20, "of 20 MB"
        pinned = [segment for segment in broker.topics["t"].log.segments if segment.pins]
        assert len(pinned) == 1
        assert await read(quick, first, stop) == written
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await slow.answer()
        assert messages(answer.body) == written
    await until(lambda: not any(segment.pins for segment in broker.topics["t"].log.segments))


async def test_a_reader_that_takes_nothing_is_cut_off(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flintmq.http.connection.TAKE_SECONDS", 0.2)
    broker = await start_broker(**{**SMALL, "max_bytes_per_file": 5 << 20})
    written = await filled(broker, 4_000, 5_000)
    async with HttpClient.connect(broker.http_address) as http:
        http.writer.transport.pause_reading()  # type: ignore[attr-defined]
        http.send(request_of("GET", f"/log/fetch?topic=t&from={min(written)}&to={max(written)}&max_bytes={1 << 30}"))
        log = broker.topics["t"].log
        await until(lambda: any(segment.pins for segment in log.segments))
        await until(lambda: not any(segment.pins for segment in log.segments))


async def test_a_reader_that_hangs_up_leaves_nothing_behind(broker: Broker) -> None:
    written = await filled(broker)
    topic = broker.topics["t"]
    for _ in range(32):
        async with HttpClient.connect(broker.http_address) as http:
            http.send(request_of("GET", f"/log/fetch?topic=t&from={min(written)}&to={max(written)}"))
    async with HttpClient.connect(broker.http_address) as http:
        assert len(await read(http, min(written), max(written) + 1)) == len(written)
    await until(lambda: not any(segment.pins for segment in topic.log.segments))


async def test_more_readers_than_may_read_at_once_all_get_theirs(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = await filled(broker)

    async def one() -> dict[int, bytes]:
        async with HttpClient.connect(broker.http_address) as http:
            return await read(http, min(written), max(written) + 1, max_bytes=200_000)

    monkeypatch.setattr(fetch_module, "AT_ONCE", 16)
    # However long they wait for each other, they do not count as readers that take nothing.
    monkeypatch.setattr(fetch_module, "STALLED", 0.5)
    for found in await asyncio.gather(*(one() for _ in range(3 * fetch_module.AT_ONCE))):
        assert found == written


async def test_files_that_are_being_read_stay(broker: Broker) -> None:
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    written = await filled(broker, 2_000)
    topic = broker.topics["t"]
    await until(lambda: len(consumer.messages) == 2_000)
    reading = fetch_module.Fetch(fetch_module.Fetches(broker.disk), topic.log, min(written), topic.durable, 1 << 30)
    await reading.open()
    consumer.finish(*consumer.messages)
    for _ in range(3):
        await quiet(broker)
        broker.upkeep.sync()
    await quiet(broker)
    assert topic.log.first == min(written)
    body = b"".join([bytes(piece) async for piece in reading])
    assert messages(body) == written
    await reading.aclose()
    broker.upkeep.sync()
    await until(lambda: topic.log.first > min(written))


async def test_a_topic_that_is_deleted_cuts_its_readers(broker: Broker) -> None:
    written = await filled(broker, 2_000)
    topic = broker.topics["t"]
    reading = fetch_module.Fetch(fetch_module.Fetches(broker.disk), topic.log, min(written), topic.durable, 1 << 30)
    await reading.open()
    broker.delete_topic("t")
    await quiet(broker)
    with pytest.raises(ConnectionError):
        async for _ in reading:
            pass
    await reading.aclose()
    assert not list(Path(broker.path).glob("flintmq/topics/t@*"))


async def test_a_stop_does_not_wait_for_readers(broker: Broker) -> None:
    written = await filled(broker, 3_000, 3_000)
    async with HttpClient.connect(broker.http_address) as http:
        http.writer.transport.pause_reading()  # type: ignore[attr-defined]
        http.send(request_of("GET", f"/log/fetch?topic=t&from={min(written)}&to={max(written)}&max_bytes={1 << 30}"))
        await until(lambda: any(segment.pins for segment in broker.topics["t"].log.segments))
        await broker.stop()


async def test_publishing_consuming_and_reading_go_on_together(start_broker: StartBroker) -> None:
    broker = await start_broker(**{**SMALL, "sync_timeout": SECOND // 50, "mem_queue_size": 500})
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 300)
    topic = broker.topics["t"]
    first = topic.log.end
    bodies = numbered(20_000, 300)
    consumed: set[bytes] = set()
    found: dict[int, bytes] = {}

    async def publish() -> None:
        for i in range(0, len(bodies), 200):
            await producer.publish_many("t", bodies[i : i + 200])

    async def consume() -> None:
        # Slower than the reader, so that its files stay.
        while len(consumed) < len(bodies):
            some = await until(lambda: consumer.messages)
            consumer.take()
            consumed.update(message.body for message in some)
            # The reader has no position that would keep the files for it.
            await until(lambda: len(found) >= len(consumed))
            consumer.finish(*some)

    async def follow() -> None:
        at = first
        async with HttpClient.connect(broker.http_address) as http:
            while len(found) < len(bodies):
                stop = (await http.get("/log/info?topic=t")).json["durable"]
                found.update(await read(http, at, stop, max_bytes=300_000))
                at = stop

    await asyncio.gather(publish(), consume(), follow())
    assert list(found.values()) == bodies
    assert consumed == set(bodies)


@pytest.mark.parametrize("restarts", [[], ["kill"], ["stop"], ["kill", "stop", "kill"]])
@pytest.mark.parametrize("count", [1, 700])
@pytest.mark.parametrize("later", [True, False], ids=["messages follow", "nothing follows"])
async def test_a_gap_after_a_removed_file_is_not_gone(
    start_broker: StartBroker, restarts: list[str], count: int, later: bool
) -> None:
    """A reader has read everything before a crash; then the file goes. Nothing that it has not read is missing."""
    broker = await start_broker(**SMALL)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    stop = max(await filled(broker, count)) + 1
    await until(lambda: len(consumer.messages) == count)
    consumer.finish(*consumer.messages)
    await quiet(broker)
    broker.journal.flush()
    broker.kill()
    broker = await start_broker(**SMALL)
    if later:
        await Client(broker).publish("t", b"after")
        await synced(broker)
    for end in [None, *restarts]:
        if end is not None:
            broker.kill() if end == "kill" else await broker.stop()
            broker = await start_broker(**SMALL)
        topic = broker.topics["t"]
        for _ in range(2):
            broker.upkeep.sync()
            await quiet(broker)
        assert not topic.log.segments or topic.log.segments[0].base > stop, "the first file is removed"
        async with HttpClient.connect(broker.http_address) as http:
            answer = await fetch(http, stop, topic.durable)
            assert answer.status == 200, answer.body
            assert list(messages(answer.body).values()) == [b"after"] * later
            gone = await fetch(http, stop - 1, topic.durable)
            assert (gone.status, gone.json["first"]) == (410, stop)


@pytest.mark.parametrize("crashes", [1, 3])
async def test_a_reader_at_the_end_of_a_log_without_files_is_not_told_that_something_is_gone(
    start_broker: StartBroker, crashes: int
) -> None:
    """Numbers are left out after a crash. A reader that waits before them has missed nothing."""
    broker = await start_broker(**SMALL)
    await Client(broker).subscribe("t", "c", 0)
    await quiet(broker)
    stop = broker.topics["t"].durable
    async with HttpClient.connect(broker.http_address) as http:
        assert (await http.post(f"/log/position?topic=t&reader=r&to={stop}")).status == 200
    for number in range(crashes):
        broker.journal.flush()
        broker.kill()
        broker = await start_broker(**SMALL)
        await Client(broker).publish("t", b"after %d" % number)
        await synced(broker)
    topic = broker.topics["t"]
    assert topic.log.segments[0].base > stop, "numbers were left out"
    async with HttpClient.connect(broker.http_address) as http:
        answer = await fetch(http, stop, topic.durable)
        assert answer.status == 200, answer.body
        assert list(messages(answer.body).values()) == [b"after %d" % number for number in range(crashes)]
        assert (await fetch(http, stop - 1, topic.durable)).status == 410


async def test_a_mark_of_a_removed_file_does_not_outlive_the_next_one(start_broker: StartBroker) -> None:
    """The file after the gap goes, too: now something is missing, whatever a start finds."""
    broker = await start_broker(**SMALL)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    stop = max(await filled(broker, 10)) + 1
    await until(lambda: len(consumer.messages) == 10)
    consumer.finish(*consumer.messages)
    await quiet(broker)
    broker.journal.flush()
    broker.kill()
    broker = await start_broker(**SMALL)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    for body in numbered(3, 90_000):
        await Client(broker).publish("t", body)
        await synced(broker)
        broker.upkeep.sync()
        await quiet(broker)
    topic = broker.topics["t"]
    assert topic.log.first == stop
    await until(lambda: len(consumer.messages) == 3)
    consumer.finish(*consumer.messages[:2])
    await quiet(broker)
    broker.upkeep.sync()
    await quiet(broker)
    for end in ("", "kill", "stop"):
        if end:
            broker.kill() if end == "kill" else await broker.stop()
            broker = await start_broker(**SMALL)
        async with HttpClient.connect(broker.http_address) as http:
            answer = await fetch(http, stop, stop)
            assert answer.status == 410 and answer.json["first"] > stop


# --- Readers that do not read -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def stalled_readers(broker: Broker, written: dict[int, bytes], count: int) -> AsyncIterator[list[HttpClient]]:
    """So many readers that ask for all of it and take nothing of the answer."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(count):
            client = await stack.enter_async_context(HttpClient.connect(broker.http_address))
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            sock = client.writer.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            target = f"/log/fetch?topic=t&from={min(written)}&to={max(written)}&max_bytes={1 << 30}"
            client.send(request_of("GET", target))
            clients.append(client)
        yield clients


async def test_readers_that_take_nothing_keep_no_turn_from_others(broker: Broker) -> None:
    written = await filled(broker, 4_000, 3_000)
    async with stalled_readers(broker, written, 40), HttpClient.connect(broker.http_address) as http:
        async with asyncio.timeout(20):
            assert await read(http, min(written), max(written) + 1) == written


async def test_the_reader_that_takes_nothing_goes_when_others_wait(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "AT_ONCE", 4)
    monkeypatch.setattr(fetch_module, "STALLED", 0.05)
    written = await filled(broker, 4_000, 3_000)
    async with stalled_readers(broker, written, 4) as stalled, HttpClient.connect(broker.http_address) as http:
        async with asyncio.timeout(20):
            for _ in range(2):
                assert await read(http, min(written), max(written) + 1) == written
            # It is told by the end of its connection, not by an answer that looks whole.
            gone = 0
            for client in stalled:
                client.writer.transport.resume_reading()  # type: ignore[attr-defined]
                try:
                    await client.answer()
                except (asyncio.IncompleteReadError, ConnectionError):
                    gone += 1
            assert gone >= 1


async def test_a_reader_that_asks_how_far_the_log_is_makes_it_durable(broker: Broker, http: HttpClient) -> None:
    """It need not wait for ``--sync-timeout``, which is an hour here."""
    producer = Client(broker)
    for number in range(5):
        await producer.publish("t", b"%d" % number)
        await quiet(broker)
        end = broker.topics["t"].log.end
        async with asyncio.timeout(10):
            while (await http.get("/log/info?topic=t")).json["durable"] < end:
                broker.clock.advance(0.1)  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
