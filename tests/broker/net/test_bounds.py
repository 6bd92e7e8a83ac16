"""Bounds on what one client can cost: bodies that are held, streams that swell, queries and chunks that are many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from struct import pack
from typing import Any

import msgspec
import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.net import commands
from flintmq.http import connection as http_connection
from flintmq.http.arguments import MOST_ARGUMENTS
from flintmq.protocol.compression import Deflate, Snappy
from flintmq.protocol.wire import FRAME_ERROR, encode_mpub
from support.fakes import until
from support.http_client import HttpClient, request_of
from support.nsq_client import NsqClient, open_stream


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", durability="memory") as broker:
        yield broker


# --- Bodies that are held ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["IDENTIFY", "AUTH"])
@pytest.mark.parametrize("size", [(64 << 10) + 1, 1_000_000, 5 << 20])
async def test_a_long_body_is_refused_before_it_is_sent(broker: Broker, verb: str, size: int) -> None:
    async with NsqClient.to(broker.tcp_address) as client, asyncio.timeout(30):
        client.send(verb.encode() + b"\n" + pack(">I", size))
        expected = f"E_BAD_BODY {verb} body too big {size} > 65536"
        assert await client.frame_or_end() == (FRAME_ERROR, expected.encode())
        assert await client.frame_or_end() is None


async def test_the_longest_identify_is_taken(broker: Broker) -> None:
    body = msgspec.json.encode({"client_id": "x"})
    body += b" " * ((64 << 10) - len(body))
    async with NsqClient.to(broker.tcp_address) as client:
        assert await client.ask(b"IDENTIFY\n" + pack(">I", len(body)) + body) == b"OK"


# --- Streams that swell -----------------------------------------------------------------------------------------------


async def compressed(broker: Broker, layer: str) -> tuple[asyncio.StreamWriter, Deflate | Snappy]:
    """A connection whose answers nobody reads, and what packs its commands."""
    _, writer = await open_stream(broker.tcp_address)
    body = msgspec.json.encode({"feature_negotiation": True, layer: True})
    writer.write(b"  V2IDENTIFY\n" + pack(">I", len(body)) + body)
    await until(lambda: any(getattr(session, layer) for session in broker.sessions.values()))
    return writer, Snappy() if layer == "snappy" else Deflate(9)


@pytest.mark.parametrize("word", [b"NOP\n", b"RDY 0\n"])
@pytest.mark.parametrize("layer", ["deflate", "snappy"])
async def test_commands_of_a_client_that_has_left_are_not_run_for_ever(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, layer: str, word: bytes
) -> None:
    ran = 0
    real = commands.run

    def counted(session: Any, *rest: Any) -> int:
        nonlocal ran
        ran += 1
        return real(session, *rest)

    monkeypatch.setattr(commands, "run", counted)
    writer, codec = await compressed(broker, layer)
    count = 4_000_000
    # Deflate makes a thousandth of them.
    writer.write(codec.compress((b"SUB t c\n" if word == b"RDY 0\n" else b"") + word * count))
    await writer.drain()
    writer.close()
    await until(lambda: not broker.sessions)
    assert ran < count // 4


@pytest.mark.parametrize("layer", ["deflate", "snappy"])
async def test_messages_of_a_client_that_sends_no_more_are_all_published(broker: Broker, layer: str) -> None:
    batches, bodies = 300, [b"x" * 1000] * 100
    writer, codec = await compressed(broker, layer)
    writer.write(codec.compress(encode_mpub(b"t", bodies) * batches))
    writer.write_eof()
    await until(lambda: not broker.sessions)
    assert broker.topics["t"].message_count == batches * len(bodies)
    writer.close()


# --- Queries and chunks that are many ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/stats", "/topic/create", "/pub", "/mpub"])
async def test_a_query_has_a_limited_number_of_arguments(broker: Broker, target: str) -> None:
    method = "GET" if target == "/stats" else "POST"
    async with HttpClient.connect(broker.http_address) as client:
        for count, expected in ((MOST_ARGUMENTS, 200), (MOST_ARGUMENTS + 1, 400), (9_000, 400), (MOST_ARGUMENTS, 200)):
            query = "&".join(["topic=t", *["a=1"] * (count - 1)])
            answer = await client.ask(method, f"{target}?{query}", b"x" if method == "POST" else None)
            assert answer.status == expected, answer
            if expected == 400:
                assert answer.message == "INVALID_REQUEST"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("target", ["/pub?topic=t", "/config/log_level"])
async def test_small_chunks_are_parsed_in_turns(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, target: str, size: int
) -> None:
    """On the general server: others have their turns while it goes through one read."""
    monkeypatch.setattr(http_connection, "SECONDS_AT_ONCE", 0.0)
    count = 5_000
    async with HttpClient.connect(broker.http_address) as client, asyncio.timeout(60):
        # From here on it is the general server that answers.
        await client.get("/info")
        ticks = 0
        is_over = False

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            if not is_over:
                asyncio.get_running_loop().call_soon(tick)

        method = "PUT" if "config" in target else "POST"
        chunks = b"%x\r\n%s\r\n" % (size, b"x" * size) * count
        (connection,) = broker.listeners.api._general[0].server.connections  # type: ignore[union-attr]
        tick()
        head = request_of(method, target, None, "Transfer-Encoding: chunked")
        connection.data_received(head + chunks + b"0\r\n\r\n")
        began = ticks
        answer = await client.answer()
        is_over = True
        assert answer.status == (200 if method == "POST" else 400)
    assert ticks - began >= len(chunks) // http_connection.FEED_BYTES - 2
    if method == "POST":
        assert broker.topics["t"].message_count == 1


async def test_a_request_in_small_chunks_is_whole_although_its_client_sends_no_more(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "SECONDS_AT_ONCE", 0.0)
    async with HttpClient.connect(broker.http_address) as client, asyncio.timeout(60):
        await client.get("/info")
        client.send(request_of("POST", "/pub?topic=t", None, "Transfer-Encoding: chunked"))
        client.send(b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        client.writer.write_eof()
        assert (await client.answer()).status == 200
    assert broker.topics["t"].message_count == 1


async def test_large_bodies_arrive_on_the_general_server(broker: Broker) -> None:
    """Its parser holds back what comes faster than it is read, and goes on when it is asked to."""

    async def publish(number: int) -> None:
        async with HttpClient.connect(broker.http_address) as client:
            await client.get("/info")
            for size in range(40):
                answer = await client.ask("POST", f"/pub?topic=t{number}", b"x" * (300_000 + 17_013 * size))
                assert answer.status == 200

    async with asyncio.timeout(100):
        await asyncio.gather(publish(1), publish(2))
    assert [topic.message_count for topic in broker.topics.values()] == [40, 40]
