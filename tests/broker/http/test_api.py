"""nsqd's HTTP API over real sockets: what the recorded conversations cannot show.

Publishes take one of two ways in, the lane and the general server, on plain, unix and TLS sockets; tests of publishing
run on all of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.commit import SLICED_FROM, Commit
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.http import debug
from flintmq.broker.http import lane as http_lane
from flintmq.broker.http import publish as http_publish
from flintmq.broker.http.api import Api
from flintmq.broker.storage.store import PAUSE_AT
from flintmq.errors import StartError
from support.fakes import PATIENCE, CountingDisk, until
from support.http_client import HttpClient, request_of

DOCUMENT = (Path(__file__).parents[3] / "docs" / "http.md").read_text()

Connect = Callable[[], AbstractAsyncContextManager[HttpClient]]


@pytest.fixture
def certificates(tmp_path: Path) -> tuple[dict[str, str], ssl.SSLContext]:
    """The options of a broker with TLS, and what a client trusts."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}, context


@pytest.fixture(params=["plain", "unix", "tls", "asyncio", "general"])
async def way(
    request: pytest.FixtureRequest,
    start_broker: StartBroker,
    tmp_path: Path,
    certificates: tuple[dict[str, str], ssl.SSLContext],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Awaitable[tuple[Broker, Connect]]]:
    """Start a broker with these options; it, and how to connect: one of the ways in."""

    async def start(**options: Any) -> tuple[Broker, Connect]:
        tls_options, trust = certificates
        kind = request.param
        if kind == "asyncio":
            monkeypatch.setattr("flintmq.broker.net.sockets.available", lambda: False)
        if kind == "unix":
            options["http_address"] = str(tmp_path / "http.sock")
        elif kind == "tls":
            options |= {"https_address": "127.0.0.1:0", **tls_options}
        else:
            options["http_address"] = "127.0.0.1:0"
        broker = await start_broker(**options)
        address = broker.https_address if kind == "tls" else broker.http_address

        @asynccontextmanager
        async def connect() -> AsyncIterator[HttpClient]:
            async with HttpClient.connect(address, trust if kind == "tls" else None) as client:
                if kind == "general":
                    # Whoever asks for anything else stays with the general server.
                    assert (await client.get("/ping")).status == 200
                yield client

        return broker, connect

    return start


Way = Callable[..., Awaitable[tuple[Broker, Connect]]]


def stored(broker: Broker, topic: str = "t") -> list[bytes]:
    """The bodies of a topic's messages, in order."""
    log = broker.topics[topic].log
    found = []
    for seq in range(log.first, log.end):
        frame = log.frame(seq)
        assert frame is not None
        found.append(bytes(frame[34:]))
    return found


@pytest.fixture
async def http(start_broker: StartBroker) -> AsyncIterator[tuple[Broker, HttpClient]]:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with HttpClient.connect(broker.http_address) as client:
        yield broker, client


# --- Publishing -------------------------------------------------------------------------------------------------------


async def test_messages_are_stored_as_they_came(way: Way) -> None:
    broker, connect = await way()
    bodies = [b"hello", bytes(range(256)), b"\r\n\r\n", b"x" * 70_000, b"hello"]
    async with connect() as client:
        for body in bodies:
            answer = await client.post("/pub?topic=t", body)
            assert (answer.status, answer.body) == (200, b"OK")
            assert answer.headers["x-nsq-content-type"] == "nsq; version=1.0"
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", answer.headers["date"])
    assert stored(broker) == bodies


async def test_a_request_may_arrive_one_byte_at_a_time(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        for byte in request_of("POST", "/pub?topic=t", b"hello"):
            client.send(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200
    assert stored(broker) == [b"hello"]


async def test_chunks_may_be_cut_anywhere(way: Way) -> None:
    broker, connect = await way()
    head = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    request = head + b'2;name="value"\r\nhe\r\n3\r\nllo\r\n0\r\nTrailer: x\r\n\r\n'
    async with connect() as client:
        for cut in range(len(request)):
            client.send(request[:cut])
            await client.writer.drain()
            await asyncio.sleep(0)
            client.send(request[cut:])
            assert (await client.answer()).status == 200
    assert stored(broker) == [b"hello"] * len(request)


async def test_requests_may_be_sent_ahead_of_their_answers(way: Way) -> None:
    broker, connect = await way()
    bodies = [b"%d" % number * (number % 7 + 1) for number in range(300)]
    async with connect() as client:
        client.send(b"".join(request_of("POST", "/pub?topic=t", body) for body in bodies))
        for _ in bodies:
            assert (await client.answer()).body == b"OK"
    assert stored(broker) == bodies


async def test_answers_keep_the_order_of_their_requests(way: Way) -> None:
    _, connect = await way()
    async with connect() as client:
        client.send(
            request_of("POST", "/pub?topic=t", b"1")
            + request_of("POST", "/pub?topic=*", b"2")
            + request_of("POST", "/mpub?topic=t", b"3\n4")
            + request_of("GET", "/ping")
            + request_of("POST", "/pub?topic=t", b"")
            + request_of("POST", "/pub?topic=t", b"5")
        )
        answers = [await client.answer() for _ in range(6)]
    assert [answer.status for answer in answers] == [200, 400, 200, 200, 400, 200]


async def test_batches_are_stored_as_they_came(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        assert (await client.post("/mpub?topic=t", b"one\n\ntwo\r\n\nthree")).body == b"OK"
        binary = b"\0\0\0\2\0\0\0\3a\nb\0\0\0\1c"
        assert (await client.post("/mpub?topic=t&binary=true", binary)).body == b"OK"
    assert stored(broker) == [b"one", b"two\r", b"three", b"a\nb", b"c"]


@pytest.mark.parametrize("binary", [False, True])
async def test_a_large_batch_is_appended_in_slices_and_whole(
    way: Way, binary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, connect = await way(mem_queue_size=1_000_000)
    count = 2 * SLICED_FROM
    bodies = [b"%d" % number for number in range(count)]
    if binary:
        body = count.to_bytes(4, "big") + b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    else:
        body = b"\n".join(bodies)
    appended: list[tuple[int, bool]] = []
    publish = Topic.publish

    def noted(topic: Topic, data: bytearray, pos: int, stop: int, count: int, **options: Any) -> Commit | None:
        appended.append((count, options.get("more", False)))
        return publish(topic, data, pos, stop, count, **options)

    monkeypatch.setattr(Topic, "publish", noted)
    async with connect() as client:
        assert (await client.post(f"/mpub?topic=t&binary={str(binary).lower()}", body)).status == 200
        assert (await client.post("/pub?topic=t", b"after")).status == 200
    assert stored(broker) == [*bodies, b"after"]
    *slices, last, single = appended
    assert len(slices) > 2
    assert all(more for _, more in slices)
    assert (last[1], single) == (False, (1, False))


async def test_single_messages_never_get_into_the_middle_of_a_batch(way: Way) -> None:
    broker, connect = await way(mem_queue_size=1_000_000)
    bodies = [b"%d" % number for number in range(2 * SLICED_FROM)]
    async with connect() as first, connect() as second, connect() as third:
        for client in (first, second, third):
            assert (await client.post("/pub?topic=t", b"x")).status == 200
        # All in one turn of the loop, the batch between messages whose heads are known.
        first.send(request_of("POST", "/pub?topic=t", b"y"))
        second.send(request_of("POST", "/mpub?topic=t", b"\n".join(bodies)))
        third.send(request_of("POST", "/pub?topic=t", b"z"))
        assert [(await client.answer()).status for client in (first, second, third)] == [200] * 3
    found = stored(broker)
    start = found.index(b"0")
    assert found[start : start + len(bodies)] == bodies
    assert sorted(found[:start] + found[start + len(bodies) :]) == [b"x", b"x", b"x", b"y", b"z"]


async def test_a_publish_waits_for_a_large_batch_to_end(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        assert (await client.post("/pub?topic=t", b"1")).status == 200
        topic = broker.topics["t"]
        topic.hold(object())
        client.send(request_of("POST", "/pub?topic=t", b"2") + request_of("POST", "/mpub?topic=t", b"3"))
        await until(lambda: topic._waiting)
        assert stored(broker) == [b"1"]
        topic.release()
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
    assert stored(broker) == [b"1", b"2", b"3"]


async def test_lines_as_long_as_the_limit_may_cross_slices(way: Way) -> None:
    broker, connect = await way()
    bodies = [bytes([65 + number]) * (http_publish.TEXT_SLICE + number) for number in range(5)]
    async with connect() as client:
        assert (await client.post("/mpub?topic=t", b"\n\n".join(bodies))).status == 200
        assert (await client.post("/mpub?topic=t", b"short\n" + b"x" * (1 << 20) + b"y")).message == "MSG_TOO_BIG"
    assert stored(broker) == bodies


async def test_a_deferred_message_is_not_delivered_yet(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        await client.post("/topic/create?topic=t")
        await client.post("/channel/create?topic=t&channel=c")
        for _ in range(2):
            assert (await client.post("/pub?topic=t&defer=1000", b"later")).status == 200
        assert (await client.post("/pub?topic=t", b"now")).status == 200
    channel = broker.topics["t"].channels["c"]
    await until(lambda: (channel.depth, len(channel.deferred)) == (1, 2))


async def test_a_topic_that_was_deleted_is_made_anew(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        for _ in range(3):
            assert (await client.post("/pub?topic=t", b"x")).status == 200
            assert (await client.post("/pub?topic=t", b"x")).status == 200
            assert stored(broker) == [b"x", b"x"]
            broker.delete_topic("t")


async def test_an_ephemeral_topic_drops_what_nobody_hears(way: Way) -> None:
    broker, connect = await way(mem_queue_size=3)
    async with connect() as client:
        for _ in range(5):
            assert (await client.post("/pub?topic=t%23ephemeral", b"x")).status == 200
    assert broker.topics["t#ephemeral"].depth == 3


async def test_options_that_change_count_at_once(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        assert (await client.post("/pub?topic=t", b"x" * 20)).status == 200
        broker.change_options(max_msg_size=10)
        assert (await client.post("/pub?topic=t", b"x" * 10)).status == 200
        assert (await client.post("/pub?topic=t", b"x" * 20)).message == "MSG_TOO_BIG"


async def test_the_last_request_of_a_connection_is_answered_and_the_connection_closed(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        client.send(request_of("POST", "/pub?topic=t", b"x", "Connection: close"))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.ended() == b""
    assert stored(broker) == [b"x"]


async def test_a_message_that_is_too_big_is_refused_before_it_is_read(way: Way) -> None:
    broker, connect = await way(max_msg_size=100)
    async with connect() as client:
        # Far more than fits into the sockets: the answer must not be lost for that.
        client.send(request_of("POST", "/pub?topic=t", bytes(2_000_000)))
        answer = await client.answer()
        assert (answer.status, answer.message) == (413, "MSG_TOO_BIG")
        await client.ended()
    assert "t" not in broker.topics


async def test_a_client_that_waits_to_be_told_is_told(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        client.send(
            b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        assert (await client.answer()).status == 100
        client.send(b"hi")
        assert (await client.answer()).status == 200
    assert stored(broker) == [b"hi"]


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\nx\r\n0\r\n\r\n",
        b"\r\nx\r\n0\r\n\r\n",
        b"-1\r\nx\r\n0\r\n\r\n",
        b"1\r\nxyz0\r\n\r\n",
        b"0x1\r\nx\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\nx",
    ],
)
async def test_a_broken_chunk_ends_the_connection_and_stores_nothing(way: Way, chunks: bytes) -> None:
    broker, connect = await way()
    async with connect() as client:
        client.send(b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert (await client.answer()).status in (400, 413, 500)
        await client.ended()
    assert "t" not in broker.topics


async def test_chunks_that_are_mostly_words_about_them_are_refused(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    head = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.send(head + b"1;" + b"e" * http_lane.LONGEST_CHUNK_LINE)
    assert (await client.answer()).status == 500
    broker.change_options(max_msg_size=100)
    async with HttpClient.connect(broker.http_address) as other:
        other.send(head + (b"1;" + b"e" * 4000 + b"\r\nx\r\n") * 50)
        assert (await other.answer()).message == "MSG_TOO_BIG"
    assert "t" not in broker.topics


@pytest.mark.parametrize("before", [0, 1, 20, 60])
async def test_words_about_chunks_are_counted_from_the_start_of_their_body(
    http: tuple[Broker, HttpClient], monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Requests that came with it in the same read change nothing."""
    broker, client = http
    broker.change_options(max_msg_size=100)
    monkeypatch.setattr(http_lane, "SECONDS_AT_ONCE", PATIENCE)
    assert (await client.post("/pub?topic=t", b"x")).status == 200
    first = (
        b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nX-Pad: " + b"p" * 2_000 + b"\r\nContent-Length: 0\r\n\r\n"
    )
    head = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = first * before + head + (b"1;" + b"e" * 4_000 + b"\r\nx\r\n") * 20
    assert broker.listeners.api is not None
    [connection] = broker.listeners.api._lanes[0].connections
    view = connection.get_buffer(-1)
    view[: len(data)] = data
    connection.buffer_updated(len(data))
    for _ in range(before):
        assert (await client.answer()).message == "MSG_EMPTY"
    assert (await client.answer()).message == "MSG_TOO_BIG"


async def test_chunks_beyond_the_limit_are_refused(way: Way) -> None:
    broker, connect = await way(max_msg_size=100)
    async with connect() as client:
        client.send(b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.send(b"32\r\n" + b"x" * 50 + b"\r\n" + b"33\r\n" + b"y" * 51 + b"\r\n")
        assert (await client.answer()).message == "MSG_TOO_BIG"
    assert "t" not in broker.topics


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
async def test_an_answer_waits_for_what_durability_promises(way: Way, durability: str) -> None:
    broker, connect = await way(durability=durability)
    async with connect() as client:
        for number in range(20):
            assert (await client.post("/pub?topic=t", b"x")).status == 200
            log = broker.topics["t"].log
            kept = {"memory": log.end, "os": log.written, "fsync": log.durable}[durability]
            assert kept - log.first == number + 1


async def test_a_full_disk_refuses_publishes_and_makes_ping_unwell(way: Way) -> None:
    disk = CountingDisk()
    broker, connect = await way(disk=disk, disk_reserve=1000)
    async with connect() as client, connect() as doctor:
        assert (await client.post("/pub?topic=t", b"x")).status == 200
        disk.free_bytes = 10
        broker.upkeep.look_at_space()
        for target in ("/pub?topic=t", "/mpub?topic=t"):
            answer = await client.post(target, b"x")
            assert (answer.status, answer.message) == (503, "EXITING")
        sick = await doctor.get("/ping")
        assert sick.status == 500
        assert sick.body.startswith(b"NOK - the disk is nearly full")
        assert sick.headers["content-type"] == "text/plain; charset=utf-8"
        assert "x-nsq-content-type" not in sick.headers
        disk.free_bytes = None
        broker.upkeep.look_at_space()
        assert (await client.post("/pub?topic=t", b"y")).status == 200
        assert (await doctor.get("/ping")).body == b"OK"
    assert stored(broker) == [b"x", b"y"]


async def test_publishers_wait_while_the_disk_is_behind(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        assert (await client.post("/pub?topic=t", b"1")).status == 200
        broker.store.unsynced += PAUSE_AT
        client.send(request_of("POST", "/pub?topic=t", b"2") + request_of("POST", "/mpub?topic=t", b"3"))
        await until(lambda: broker.turns._stalled)
        assert stored(broker) == [b"1"]
        broker.store.synced(PAUSE_AT)
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
    assert stored(broker) == [b"1", b"2", b"3"]


async def test_many_producers_at_once(way: Way) -> None:
    broker, connect = await way(mem_queue_size=100_000)

    async def produce(number: int) -> None:
        async with connect() as client:
            for i in range(50):
                assert (await client.post(f"/pub?topic={'tu'[number % 2]}", b"%d:%d" % (number, i))).status == 200

    async with asyncio.TaskGroup() as producers:
        for number in range(12):
            producers.create_task(produce(number))
    for topic, numbers in (("t", range(0, 12, 2)), ("u", range(1, 12, 2))):
        found = stored(broker, topic)
        assert sorted(found) == sorted(b"%d:%d" % (number, i) for number in numbers for i in range(50))
        for number in numbers:
            mine = [body for body in found if body.startswith(b"%d:" % number)]
            assert mine == [b"%d:%d" % (number, i) for i in range(50)]


async def test_a_client_that_goes_away_harms_nobody(way: Way) -> None:
    broker, connect = await way(durability="fsync")
    for data in (
        b"",
        b"POST",
        b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf",
        request_of("POST", "/pub?topic=t", b"x"),
        request_of("POST", "/pub?topic=t", b"x") * 50,
        request_of("GET", "/stats"),
    ):
        async with connect() as client:
            client.send(data)
            await client.writer.drain()
            client.writer.transport.abort()
    async with connect() as client:
        assert (await client.post("/pub?topic=t", b"last")).status == 200
    # Of those who went, only what had come in whole is there.
    assert set(stored(broker)) <= {b"x", b"last"}
    assert stored(broker).count(b"last") == 1


async def test_a_client_that_has_sent_all_it_will_is_still_answered(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    client.send(request_of("POST", "/pub?topic=t", b"1") + request_of("POST", "/pub?topic=t", b"2"))
    client.writer.write_eof()
    answers = await client.ended()
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert stored(broker) == [b"1", b"2"]


async def test_a_question_is_answered_to_a_client_that_says_no_more(start_broker: StartBroker, tmp_path: Path) -> None:
    """As in ``printf … | nc -N``: the end of its input comes right behind the request."""
    for address in ("127.0.0.1:0", str(tmp_path / "http.sock")):
        broker = await start_broker(http_address=address, data_path=tmp_path)
        for _ in range(2):
            async with HttpClient.connect(broker.http_address) as client:
                client.send(request_of("GET", "/ping"))
                client.writer.write_eof()
                assert (await client.answer()).body == b"OK"
        await broker.stop()


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 1", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        ("Transfer-Encoding: gzip, chunked",),
        ("Content-Length: 1", "Content-Length: 1"),
        ("Content-Length: +1",),
        ("Content-Length : 1",),
        ("Content-Length: 1", " folded: 1"),
    ],
)
async def test_a_length_that_can_be_read_in_two_ways_is_refused(
    http: tuple[Broker, HttpClient], headers: tuple[str, ...]
) -> None:
    broker, client = http
    client.send("\r\n".join(["POST /pub?topic=t HTTP/1.1", "Host: localhost", *headers, "", ""]).encode())
    client.send(b"1\r\nx\r\n0\r\n\r\n" + request_of("POST", "/pub?topic=smuggled", b"x"))
    assert (await client.answer()).status in (400, 501)
    await client.ended()
    assert "smuggled" not in broker.topics


async def test_a_client_that_does_not_read_its_answers_is_not_read_from(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    request = request_of("POST", "/pub?topic=t", b"x")
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    client.send(request * 200_000)
    [lane] = broker.listeners.api._lanes  # type: ignore[union-attr]
    await until(lambda: lane.connections)
    [connection] = lane.connections
    await until(lambda: not connection._writable or connection._paused)
    assert connection._fill <= 2 * http_lane.READ_AHEAD + (512 << 10)
    # It has more to send than will ever be read.
    client.writer.transport.abort()


# --- Limits and deadlines ---------------------------------------------------------------------------------------------


async def test_a_head_without_end_is_refused(http: tuple[Broker, HttpClient]) -> None:
    _, client = http
    client.send(b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * (http_lane.LONGEST_HEAD + 1))
    assert (await client.answer()).status == 431
    await client.ended()


@pytest.mark.parametrize(
    "data", [b"P", b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhe"]
)
async def test_a_request_that_does_not_come_in_is_given_up(http: tuple[Broker, HttpClient], data: bytes) -> None:
    broker, client = http
    [lane] = broker.listeners.api._lanes  # type: ignore[union-attr]
    client.send(data)
    await until(lambda: lane.connections and next(iter(lane.connections))._held is not None)
    now = lane.loop.time()
    [connection] = lane.connections
    options = broker.options
    limit = (options.http_header_timeout if data == b"P" else options.http_body_timeout) / 1e9
    connection.look(connection._since + limit - 1)
    assert connection in lane.connections
    connection.look(now + limit + 1)
    assert await client.ended() == b""


async def test_an_idle_connection_is_kept_for_long_and_not_for_ever(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    [lane] = broker.listeners.api._lanes  # type: ignore[union-attr]
    assert (await client.post("/pub?topic=t", b"x")).status == 200
    [connection] = lane.connections
    now = lane.loop.time()
    connection.look(now)
    connection.look(now + http_lane.IDLE_SECONDS - 1)
    assert (await client.post("/pub?topic=t", b"x")).status == 200
    connection.look(now + http_lane.IDLE_SECONDS + 1)
    assert (await client.post("/pub?topic=t", b"x")).status == 200
    connection.look(now + http_lane.IDLE_SECONDS + 2)
    connection.look(now + 3 * http_lane.IDLE_SECONDS)
    assert await client.ended() == b""


async def test_what_is_remembered_of_heads_is_bounded(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    [lane] = broker.listeners.api._lanes  # type: ignore[union-attr]
    for number in range(2 * http_lane.REMEMBERED + 10):
        client.send(request_of("POST", f"/pub?topic=t&x={number}", b"x"))
        assert (await client.answer()).status == 200
        assert len(lane._heads) <= http_lane.REMEMBERED
        assert len(lane.publishing._orders) <= http_lane.REMEMBERED
    client.send(request_of("POST", "/pub?topic=t", b"x", f"X: {'y' * http_lane.LONGEST_REMEMBERED}"))
    before = len(lane._heads)
    assert (await client.answer()).status == 200
    assert len(lane._heads) == before


# --- Topics, channels, settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_what_was_made_is_there_after_a_kill(start_broker: StartBroker, durability: str, tmp_path: Path) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", durability=durability)
    async with HttpClient.connect(broker.http_address) as client:
        for target in (
            "/topic/create?topic=a",
            "/topic/create?topic=gone",
            "/channel/create?topic=a&channel=x",
            "/channel/create?topic=a&channel=gone",
            "/channel/pause?topic=a&channel=x",
            "/channel/delete?topic=a&channel=gone",
            "/topic/delete?topic=gone",
            "/topic/pause?topic=a",
        ):
            assert (await client.post(target)).status == 200
    broker.kill()
    again = await start_broker()
    assert list(again.topics) == ["a"]
    assert again.topics["a"].paused
    assert {name: channel.paused for name, channel in again.topics["a"].channels.items()} == {"x": True}


async def test_emptying_takes_effect(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    await client.post("/mpub?topic=t", b"1\n2\n3")
    assert broker.topics["t"].depth == 3
    assert (await client.post("/topic/empty?topic=t")).status == 200
    assert broker.topics["t"].depth == 0
    await client.post("/channel/create?topic=t&channel=c")
    await client.post("/mpub?topic=t", b"1\n2")
    channel = broker.topics["t"].channels["c"]
    await until(lambda: channel.depth == 2)
    assert (await client.post("/channel/empty?topic=t&channel=c")).status == 200
    assert channel.depth == 0


async def test_a_setting_that_changes_is_told_to_those_who_asked(http: tuple[Broker, HttpClient]) -> None:
    broker, client = http
    seen = []
    broker.options_changed.append(
        lambda: seen.append((broker.options.log_level, broker.options.nsqlookupd_tcp_addresses))
    )
    before = broker.options
    assert (await client.ask("PUT", "/config/log_level", b"error")).body == b"4"
    assert (await client.ask("PUT", "/config/nsqlookupd_tcp_addresses", b'["a:1"]')).json == ["a:1"]
    assert (await client.ask("PUT", "/config/log_level", b"loud")).message == "INVALID_VALUE"
    assert seen == [("error", ()), ("error", ("a:1",))]
    assert (before.log_level, before.nsqlookupd_tcp_addresses) == ("info", ())


@pytest.mark.parametrize(
    ("method", "target", "field", "code"),
    [
        ("POST", "/pipeline/report", b"id", "INVALID_REPORT"),
        ("POST", "/stage/open", b"producer", "INVALID_BODY"),
        ("PUT", "/topic/config?topic=*", b"ttl", "INVALID_SETTING"),
        ("PUT", "/config/nsqlookupd_tcp_addresses", b"", "INVALID_VALUE"),
    ],
)
@pytest.mark.parametrize(
    "value",
    [b'"\xff"', b'"a\xc3(b"', b'{"a":' * 3_000, b"[" * 12_000],
    ids=["no text", "broken text", "objects", "lists"],
)
async def test_json_that_no_program_would_send_is_the_clients_mistake(
    http: tuple[Broker, HttpClient], method: str, target: str, field: bytes, code: str, value: bytes
) -> None:
    _, client = http
    body = b"[%s]" % value if target.startswith("/config") else b'{"%s": %s}' % (field, value)
    answer = await client.ask(method, target, body)
    assert (answer.status, answer.message.partition(":")[0]) == (400, code)


async def test_info_tells_where_the_broker_really_is(way: Way) -> None:
    broker, connect = await way()
    async with connect() as client:
        info = (await client.get("/info")).json
    assert f"127.0.0.1:{info['tcp_port']}" == broker.tcp_address
    if broker.http_address.startswith("/"):
        assert info["http_port"] == -1
    elif broker.http_address:
        assert f"127.0.0.1:{info['http_port']}" == broker.http_address
    else:
        assert info["http_port"] == 0


# --- A look inside ----------------------------------------------------------------------------------------------------


async def test_a_profile_shows_where_the_time_goes(
    http: tuple[Broker, HttpClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = http
    monkeypatch.setattr(debug, "PROFILE_INTERVAL", 0.001)
    sampling, sample = threading.Event(), debug._profile

    def sampled(thread: int, seconds: int, over: threading.Event) -> str:
        sampling.set()
        return sample(thread, seconds, over)

    monkeypatch.setattr(debug, "_profile", sampled)
    client.send(request_of("GET", "/debug/pprof/profile?seconds=1"))
    async with HttpClient.connect(broker.http_address) as other:
        await until(sampling.is_set)
        second = await other.get("/debug/pprof/profile?seconds=1")
        assert (second.status, b"already in use" in second.body) == (500, True)
    answer = await client.answer()
    assert answer.status == 200
    assert all(re.fullmatch(r"\S.* \d+", line) for line in answer.body.decode().splitlines())
    assert b"test_a_profile_shows_where_the_time_goes" in answer.body or b"run_forever" in answer.body


@pytest.mark.parametrize("seconds", ["0", "-1", "301", "x", "1e9", ""])
async def test_a_profile_has_its_limits(http: tuple[Broker, HttpClient], seconds: str) -> None:
    assert (await http[1].get(f"/debug/pprof/profile?seconds={seconds}")).status == 400


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("goroutine", b"thread MainThread"),
        ("heap", b"objects that the collector knows"),
        ("cmdline", b""),
        ("symbol", b"num_symbols: 0"),
        ("block", b"has no meaning in Python"),
        ("threadcreate", b"has no meaning in Python"),
        ("", b"/debug/pprof/heap"),
    ],
)
async def test_every_profile_answers(http: tuple[Broker, HttpClient], name: str, text: bytes) -> None:
    answer = await http[1].get(f"/debug/pprof/{name}")
    assert answer.status == 200
    assert text in answer.body


async def test_metrics_are_served(http: tuple[Broker, HttpClient]) -> None:
    answer = await http[1].get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")


# --- Tokens -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text("r read\np publish\na admin\n")
    return path


async def test_publishing_needs_its_right(way: Way, tokens: Path) -> None:
    broker, connect = await way(http_auth_token_file=str(tokens))
    for target in ("/pub?topic=t", "/mpub?topic=t", "/%70ub?topic=t", "/PUB?topic=t", "/pub/?topic=t"):
        for header, status in (("X: y", 401), ("Authorization: Bearer x", 401), ("Authorization: Bearer r", 403)):
            async with connect() as client:
                assert (await client.post(target, b"x", header)).status in (status, 307)
    assert broker.topics == {}
    for token in ("p", "a"):
        async with connect() as client:
            for _ in range(3):
                assert (await client.post("/pub?topic=t", b"x", f"Authorization: Bearer {token}")).status == 200
    assert stored(broker) == [b"x"] * 6


async def test_a_token_that_was_taken_away_counts_no_more(way: Way, tokens: Path) -> None:
    broker, connect = await way(http_auth_token_file=str(tokens))
    async with connect() as client:
        for _ in range(3):
            assert (await client.post("/pub?topic=t", b"x", "Authorization: Bearer p")).status == 200
        tokens.write_text("fresh publish\n")
        broker.reload()
        assert (await client.post("/pub?topic=t", b"x", "Authorization: Bearer p")).status == 401
    async with connect() as client:
        assert (await client.post("/pub?topic=t", b"x", "Authorization: Bearer fresh")).status == 200
    assert stored(broker) == [b"x"] * 4


async def test_every_route_but_ping_needs_a_token(start_broker: StartBroker, tokens: Path) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", http_auth_token_file=str(tokens))
    assert broker.listeners.api is not None
    for route in broker.listeners.api.site.routes:
        async with HttpClient.connect(broker.http_address) as client:
            answer = await client.ask(route.method, route.path.replace(":opt", "log_level"), b"")
            assert answer.status == (200 if route.path == "/ping" else 401), route
    # What changes something is not for those who may only look.
    for route in broker.listeners.api.site.routes:
        assert route.method == "GET" or route.right in ("publish", "admin")


async def test_tokens_that_cannot_be_read_stop_the_start(start_broker: StartBroker, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot read the tokens"):
        await start_broker(http_address="127.0.0.1:0", http_auth_token_file=str(tmp_path / "none"))


# --- TLS --------------------------------------------------------------------------------------------------------------


async def test_where_tls_is_required_plain_http_tells_where_to_go(
    start_broker: StartBroker, certificates: tuple[dict[str, str], ssl.SSLContext]
) -> None:
    options, trust = certificates
    broker = await start_broker(http_address="127.0.0.1:0", https_address="127.0.0.1:0", tls_required="true", **options)
    port = broker.https_address.rpartition(":")[2]
    for method, target in (("GET", "/ping"), ("POST", "/pub?topic=t"), ("GET", "/nothing"), ("OPTIONS", "/ping")):
        async with HttpClient.connect(broker.http_address) as client:
            answer = await client.ask(method, target, b"x")
            assert answer.status == 403
            assert answer.body == f'{{"message": "TLS_REQUIRED", "https_port": {port}}}'.encode()
            assert answer.headers["content-type"] == "application/json; charset=utf-8"
            assert answer.headers["x-nsq-content-type"] == "nsq; version=1.0"
    async with HttpClient.connect(broker.https_address, trust) as client:
        assert (await client.post("/pub?topic=t", b"x")).status == 200
        assert (await client.get("/ping")).body == b"OK"
    assert stored(broker) == [b"x"]


async def test_tcp_https_leaves_plain_http_open(
    start_broker: StartBroker, certificates: tuple[dict[str, str], ssl.SSLContext]
) -> None:
    options, _ = certificates
    broker = await start_broker(
        http_address="127.0.0.1:0", https_address="127.0.0.1:0", tls_required="tcp-https", **options
    )
    async with HttpClient.connect(broker.http_address) as client:
        assert (await client.get("/ping")).body == b"OK"


async def test_a_certificate_is_replaced_on_reload(
    start_broker: StartBroker, certificates: tuple[dict[str, str], ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    options, _ = certificates
    broker = await start_broker(https_address="127.0.0.1:0", **options)
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    Path(options["tls_key"]).write_bytes(issued.private_key_pem.bytes())
    broker.reload()
    assert "the certificate stays as it was" in caplog.text
    Path(options["tls_cert"]).write_bytes(issued.cert_chain_pems[0].bytes())
    broker.reload()
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with HttpClient.connect(broker.https_address, trust) as client:
        assert (await client.get("/ping")).body == b"OK"


async def test_a_certificate_that_is_no_good_stops_the_start(start_broker: StartBroker, tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nonsense")
    with pytest.raises(StartError, match="failed to build TLS config"):
        await start_broker(
            https_address="127.0.0.1:0", tls_cert=str(tmp_path / "x.pem"), tls_key=str(tmp_path / "x.pem")
        )


# --- Start and stop ---------------------------------------------------------------------------------------------------


async def test_without_http_nothing_listens(broker: Broker) -> None:
    assert (broker.http_address, broker.https_address) == ("", "")


async def test_an_address_that_is_taken_stops_the_start_and_leaves_nothing_behind(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    first = await start_broker(http_address="127.0.0.1:0")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(StartError, match="address already in use"):
        await start_broker(data_path=other, http_address=first.http_address)
    again = await start_broker(data_path=other, http_address="127.0.0.1:0")
    async with HttpClient.connect(again.http_address) as client:
        assert (await client.get("/ping")).body == b"OK"


async def test_stopping_closes_connections_and_keeps_what_was_published(way: Way, start_broker: StartBroker) -> None:
    broker, connect = await way()
    async with connect() as idle, connect() as client:
        assert (await client.post("/pub?topic=t", b"x")).status == 200
        await broker.stop()
        assert await idle.ended() == b""
        assert await client.ended() == b""
    again = await start_broker()
    assert again.topics["t"].depth == 1


async def test_a_unix_socket_goes_with_the_broker(start_broker: StartBroker, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    broker = await start_broker(http_address=str(path))
    assert path.is_socket()
    await broker.stop()
    assert not path.exists()


async def test_first_requests_at_once_are_all_answered(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    broker = await start_broker(http_address="127.0.0.1:0")

    async def ask() -> int:
        async with HttpClient.connect(broker.http_address) as client:
            return (await client.get("/ping")).status

    assert await asyncio.gather(*(ask() for _ in range(10))) == [200] * 10
    assert caplog.text.count("200 GET /ping") == 10


def test_every_way_works_on_uvloop(tmp_path: Path, certificates: tuple[dict[str, str], ssl.SSLContext]) -> None:
    uvloop = pytest.importorskip("uvloop")
    options, trust = certificates
    raised: list[dict[str, Any]] = []

    async def scenario(**address: str) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        async with Broker(data_path=tmp_path, disk_reserve=0, **address, **options) as broker:
            where = broker.http_address or broker.https_address
            async with HttpClient.connect(where, None if broker.http_address else trust) as client:
                client.send(request_of("POST", "/pub?topic=t", b"1") + request_of("POST", "/mpub?topic=t", b"2\n3"))
                client.send(request_of("POST", "/pub?topic=t", b"4") + request_of("GET", "/ping"))
                client.send(request_of("POST", "/pub?topic=t", bytes(300_000)))
                assert [(await client.answer()).body for _ in range(5)] == [b"OK"] * 5
            assert broker.topics["t"].depth == 5
            broker.delete_topic("t")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for address in (
            {"http_address": "127.0.0.1:0"},
            {"http_address": str(tmp_path / "http.sock")},
            {"https_address": "127.0.0.1:0"},
        ):
            runner.run(scenario(**address))
    assert raised == []


@pytest.mark.parametrize(
    "step",
    [
        "_statsd.stop",
        "peers.stop",
        "listeners.stop_accepting",
        "listeners.end_requests",
        "listeners.api.close",
        "listeners.drop",
        "listeners.remove_sockets",
    ],
)
async def test_a_step_of_a_stop_that_fails_does_not_cost_the_messages(
    start_broker: StartBroker, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", durability="memory")
    async with HttpClient.connect(broker.http_address) as client:
        for number in range(7):
            assert (await client.post(f"/pub?topic=t{number % 3}", b"x")).status == 200
    *owners, name = step.split(".")
    owner: Any = broker
    for each in owners:
        owner = getattr(owner, each)
    real = getattr(owner, name)

    def fail() -> None:
        # Once: what is left open is closed by the last steps.
        monkeypatch.setattr(owner, name, real)
        raise RuntimeError("this step is broken")

    monkeypatch.setattr(owner, name, fail)
    async with asyncio.timeout(PATIENCE):
        await broker.stop()
    assert "this step is broken" in caplog.text
    await owner.stop() if name == "stop" else None
    broker = await start_broker(durability="memory")
    assert {name: topic.depth for name, topic in broker.topics.items()} == {"t0": 3, "t1": 2, "t2": 2}


# --- The document -----------------------------------------------------------------------------------------------------


async def test_every_route_is_in_the_document(broker: Broker) -> None:
    missing = [
        f"{route.method} {route.path}"
        for route in Api(broker).site.routes
        if f"`{route.method} {route.path}`" not in DOCUMENT
        or not re.search(rf"curl .*{re.escape(_example(route.path))}", DOCUMENT)
    ]
    assert missing == []


async def test_every_right_in_the_document_is_the_routes(broker: Broker) -> None:
    for route in Api(broker).site.routes:
        [row] = [line for line in DOCUMENT.splitlines() if line.startswith(f"| `{route.method} {route.path}` ")]
        assert row.split("|")[2].strip() == (route.right or "none"), row


def _example(path: str) -> str:
    return path.replace(":opt", "")


# --- Limits and draining, over HTTP -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "status", "reason"),
    [
        ({"max_topic_messages": 3}, 503, "limit of 3 messages in the topic reached"),
        ({"max_publish_rate": 3}, 429, "limit of 3 messages a second reached"),
    ],
)
async def test_a_limit_refuses_a_publish_with_its_reason(
    way: Callable[..., Awaitable[tuple[Broker, Connect]]], limits: dict[str, int], status: int, reason: str
) -> None:
    broker, connect = await way(**limits)
    async with connect() as client:
        for _ in range(3):
            assert (await client.post("/pub?topic=t", b"x")).status == 200
        answer = await client.post("/pub?topic=t", b"x")
        assert (answer.status, answer.message) == (status, reason)
        answer = await client.post("/mpub?topic=t", b"x\ny")
        assert (answer.status, answer.message) == (status, reason)
    assert broker.topics["t"].message_count == 3


async def test_connections_over_http_count_and_are_released(
    way: Callable[..., Awaitable[tuple[Broker, Connect]]],
) -> None:
    broker, connect = await way(max_connections=2)
    for _ in range(3):
        async with connect() as first, connect() as second:
            assert (await first.post("/pub?topic=t", b"x")).status == 200
            assert (await second.get("/stats")).status == 200
            host = broker.https_address or broker.http_address
            if ":" in host and not broker.https_address:
                async with HttpClient.connect(host) as third:
                    answer = await third.answer()
                    assert (answer.status, answer.message) == (503, "limit of 2 connections reached")
        assert broker.connections is not None
        await until(lambda: not broker.connections._addresses)


async def test_draining_is_asked_for_over_http(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with HttpClient.connect(broker.http_address) as client:
        assert (await client.post("/pub?topic=t", b"x")).status == 200
        assert (await client.post("/drain")).status == 200
    # Nobody consumes, so there is nothing to wait for.
    async with asyncio.timeout(PATIENCE):
        await broker.wait_closed()


async def test_a_head_that_never_ends_is_given_up_by_the_general_server_too(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", http_header_timeout=200_000_000)
    async with HttpClient.connect(broker.http_address) as client:
        assert (await client.get("/info")).status == 200
        client.send(b"GET /info HTT")
        await client.ended()
