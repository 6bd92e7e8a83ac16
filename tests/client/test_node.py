"""The HTTP API of one nsqd, asked by the client; the broker is a real one in this process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme

from flintmq import Broker, Consumer, NodeClient, Producer, sync
from flintmq.cluster import node as node_module
from flintmq.errors import ConnectError, HttpError, OptionError
from flintmq.http.site import parse_query
from flintmq.protocol.wire import FrameDecoder, decode_message

from .daemons import Nsqd


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        yield broker


@pytest.fixture
async def node(broker: Broker) -> AsyncIterator[NodeClient]:
    async with NodeClient(broker.http_address) as node:
        yield node


@pytest.fixture
async def ids(broker: Broker, node: NodeClient) -> list[str]:
    """Three messages that wait in the channel c of the topic t."""
    await node.create_topic("t")
    await node.create_channel("t", "c")
    async with Producer(broker.tcp_address) as producer:
        await producer.publish_many("t", [b"one", b"two", b"three"])
    return [message.id for message in (await node.peek("t", "c")).messages]


# --- What every nsqd has ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flintmq", "go"])
async def test_topics_and_channels_of_any_nsqd(kind: str, tmp_path: Path) -> None:
    nsqd = Nsqd(kind, tmp_path)
    nsqd._wants = ("TCP", "HTTP")
    nsqd.start()
    try:
        async with NodeClient(nsqd.at["HTTP"]) as node:
            assert await node.ping() == "OK"
            assert (await node.info())["version"] == "1.3.0"
            await node.create_topic("t")
            await node.create_channel("t", "c")
            await node.pause_channel("t", "c")
            await node.pause_topic("t")
            [topic] = (await node.stats("t", clients=False))["topics"]
            assert (topic["paused"], topic["channels"][0]["paused"]) == (True, True)
            await node.unpause_channel("t", "c")
            await node.unpause_topic("t")
            await node.empty_topic("t")
            await node.empty_channel("t", "c")
            [topic] = (await node.stats("t", "c"))["topics"]
            assert (topic["paused"], topic["channels"][0]["paused"]) == (False, False)
            await node.delete_channel("t", "c")
            await node.delete_topic("t")
            assert (await node.stats())["topics"] == []
            with pytest.raises(HttpError) as caught:
                await node.delete_topic("t")
            assert (caught.value.status, caught.value.code) == (404, "TOPIC_NOT_FOUND")
            if kind == "go":
                with pytest.raises(HttpError) as caught:
                    await node.peek("t", "c")
                assert (caught.value.status, caught.value.code) == (404, "NOT_FOUND")
    finally:
        await asyncio.get_running_loop().run_in_executor(None, nsqd.stop)


# --- Messages ---------------------------------------------------------------------------------------------------------


async def test_messages_are_looked_at(broker: Broker, node: NodeClient, ids: list[str]) -> None:
    page = await node.peek("t", "c", limit=2, shown=2)
    assert [(m.body, m.size, m.truncated, m.attempts) for m in page.messages] == [
        (b"on", 3, True, 0),
        (b"tw", 3, True, 0),
    ]
    page = await node.peek("t", "c", limit=2, after=page.next, shown=None)
    assert ([m.body for m in page.messages], page.next) == ([b"three"], None)
    page = await node.peek_topic("t", limit=1)
    assert [m.body for m in page.messages] == [b"one"]
    page = await node.peek_topic("t", after=page.next, shown=None)
    assert ([m.body for m in page.messages], page.next) == ([b"two", b"three"], None)
    async with Consumer("t", "c", nsqd=broker.tcp_address, max_in_flight=3) as consumer:
        await anext(consumer)
        [first, *_] = (await node.peek("t", "c", "in_flight")).messages
        assert first.client is not None and first.client.remote_address.startswith("127.0.0.1:")
        assert first.deadline is not None and first.deadline > first.timestamp
        assert first.due is None


async def test_one_message_is_acted_on(node: NodeClient, ids: list[str]) -> None:
    await node.finish("t", "c", ids[0])
    await node.defer("t", "c", ids[1], 60)
    assert [m.body for m in (await node.peek("t", "c")).messages] == [b"three"]
    [deferred] = (await node.peek("t", "c", "deferred")).messages
    assert deferred.due is not None and deferred.due > deferred.timestamp + 59_000_000_000
    await node.requeue("t", "c", ids[1])
    assert {m.id for m in (await node.peek("t", "c")).messages} == set(ids[1:])
    await node.requeue("t", "c", ids[2], 0.5)
    assert {m.id for m in (await node.peek("t", "c")).messages} == {ids[1]}
    with pytest.raises(HttpError) as caught:
        await node.finish("t", "c", ids[0])
    assert caught.value.status == 404
    assert caught.value.code.startswith("MESSAGE_NOT_FOUND: ")


# --- Settings ---------------------------------------------------------------------------------------------------------


async def test_settings_are_read_and_changed(node: NodeClient, ids: list[str]) -> None:
    found = await node.topic_settings("t")
    assert (found.topic, found.set, found.source["ttl"]) == ("t", {}, "default")
    found = await node.set_topic_settings("t", {"ttl": "1h", "max-messages": 10})
    assert found.set == {"ttl": "1h0m0s", "max-messages": 10}
    found = await node.set_topic_settings("t", {"ttl": None})
    assert (found.set, found.settings["ttl"], found.settings["max-messages"]) == ({"max-messages": 10}, "0s", 10)
    found = await node.set_channel_settings("t", "c", {"max-attempts": 3})
    assert (found.channel, found.settings["max-attempts"], found.source["max-attempts"]) == ("c", 3, "live")
    assert await node.channel_settings("t", "c") == found
    with pytest.raises(HttpError) as caught:
        await node.set_topic_settings("t", {"ttl": "soon"})
    assert (caught.value.status, caught.value.code.partition(":")[0]) == (400, "INVALID_SETTING")


# --- Ways to it -------------------------------------------------------------------------------------------------------


async def test_tokens_and_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    (tmp_path / "tokens").write_text("letmein read\n")
    (tmp_path / "tokens").chmod(0o600)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    options: dict[str, Any] = {
        "https_address": "127.0.0.1:0",
        "tls_cert": str(tmp_path / "cert.pem"),
        "tls_key": str(tmp_path / "key.pem"),
        "http_auth_token_file": str(tmp_path / "tokens"),
    }
    async with Broker(data_path=tmp_path, disk_reserve=0, **options) as broker:
        address = f"https://{broker.https_address}"
        async with NodeClient(address, token="letmein", tls=context) as node:
            assert (await node.info())["version"] == "1.3.0"
            with pytest.raises(HttpError, match="403 FORBIDDEN"):
                await node.create_topic("t")
        async with NodeClient(address, tls=context) as node:
            with pytest.raises(HttpError, match="401 UNAUTHORIZED"):
                await node.info()
        async with NodeClient(address, token="letmein") as node:
            with pytest.raises(ConnectError, match="certificate verify failed"):
                await node.info()
        async with NodeClient(address, token="letmein", tls=False) as node:
            assert await node.ping() == "OK"


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "http.sock")
    async with Broker(data_path=tmp_path, disk_reserve=0, http_address=path), NodeClient(path) as node:
        assert await node.ping() == "OK"


async def test_what_is_wrong_with_a_node_is_told(broker: Broker, node: NodeClient) -> None:
    broker.unwell("the disk is gone")
    with pytest.raises(HttpError, match="500 NOK - the disk is gone"):
        await node.ping()


@pytest.mark.parametrize(
    "address", ["", "localhost", "ftp://localhost:1", "http://", "127.0.0.1:x", "h:1?x=y", "h:0x1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(OptionError, match="not an HTTP address of an nsqd"):
        NodeClient(address)


async def test_nobody_listens() -> None:
    async with NodeClient("127.0.0.1:1") as node:
        with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1 \(Connection refused\)"):
            await node.ping()


@contextlib.asynccontextmanager
async def answering(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """The address of something that answers as the test says; each connection is closed after that."""
    under_way: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way.add(asyncio.get_running_loop().create_task(handle(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
        await asyncio.gather(*under_way)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "does not answer like an nsqd"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"messages": [{}]}', "does not answer like an nsqd"),
        (b"E_INVALID what is this\r\n\r\n", "does not speak HTTP"),
        (b"", "cannot speak to an nsqd"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nhello", "cannot speak to an nsqd"),
    ],
)
async def test_what_is_no_nsqd_is_told(answer: bytes, error: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)

    async with answering(serve) as address, NodeClient(address) as node:
        with pytest.raises(ConnectError, match=error):
            await node.peek("t", "c")


async def test_a_silent_node_is_not_waited_for() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with answering(serve) as address, NodeClient(address, timeout=0.05) as node:
        with pytest.raises(ConnectError, match="does not answer"):
            await node.ping()


async def test_a_refusal_that_is_no_envelope_is_shown() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in (b"a proxy is unhappy", b""):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with answering(serve) as address, NodeClient(address) as node:
        with pytest.raises(HttpError, match="502 a proxy is unhappy"):
            await node.ping()
        with pytest.raises(HttpError, match="502 no reason given"):
            await node.ping()


@pytest.mark.parametrize("page", [b"<!DOCTYPE HTML>\n<html>", b"two\nlines", b"x" * 500, b"\x1b[2J"])
async def test_the_page_of_another_web_server_is_not_shown(page: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(page) + page)

    async with answering(serve) as address, NodeClient(address) as node:
        with pytest.raises(ConnectError) as caught:
            await node.stats()
    assert str(caught.value) == f"what listens at {address} does not answer like an nsqd (HTTP 404)"


# --- Reading the log --------------------------------------------------------------------------------------------------


async def durable(node: NodeClient, topic: str) -> node_module.LogInfo:
    """The log's marks, once all of it can be read."""
    async with asyncio.timeout(60):
        while True:
            info = await node.log_info(topic)
            if info.durable == info.end:
                return info
            await asyncio.sleep(0.01)


async def test_a_log_is_read(node: NodeClient, ids: list[str]) -> None:
    info = await durable(node, "t")
    assert (info.topic, info.messages, info.end - info.first) == ("t", 3, 3)
    messages = [message async for message in node.log_messages("t", info.first, info.end, epoch=info.epoch)]
    assert [(m.seq, m.id, m.body) for m in messages] == [
        (info.first + i, id, body) for i, (id, body) in enumerate(zip(ids, [b"one", b"two", b"three"], strict=True))
    ]
    assert await node.log_offset("t", datetime(2001, 1, 1, tzinfo=UTC)) == info.first
    assert await node.log_offset("t", messages[-1].timestamp + 1) == info.end
    async with node.log_fetch("t", info.first, info.end, max_bytes=1) as fetch:
        frames = b"".join([chunk async for chunk in fetch])
        assert (fetch.node, fetch.epoch) == (info.node, info.epoch)
        assert fetch.next <= info.end
    assert decode_message(FrameDecoder().feed(frames)[0][1]).body == b"one"


async def test_a_log_is_counted(node: NodeClient, ids: list[str]) -> None:
    info = await durable(node, "t")
    messages = [message async for message in node.log_messages("t", info.first, info.end)]
    bare = [message async for message in node.log_messages("t", info.first, info.end, bodies=False)]
    assert bare == [message._replace(body=b"") for message in messages]
    times = [message.timestamp for message in messages]
    assert await node.log_count("t") == 3
    [whole] = await node.log_ranges("t")
    assert whole == node_module.LogRange(info.first, info.end, 3, True)
    for since in (0, *times, *(time + 1 for time in times)):
        for until in (*times, times[-1] + 1):
            expected = sum(since <= time < until for time in times)
            assert await node.log_count("t", since=since, until=until) == expected
            found = await node.log_ranges("t", since=since, until=until)
            assert sum(one.messages for one in found) >= expected
    assert await node.log_count("t", since=datetime(2001, 1, 1, tzinfo=UTC)) == 3
    assert await node.log_count("t", until=datetime(2001, 1, 1, tzinfo=UTC)) == 0


async def test_what_cannot_be_read_is_told_with_the_marks(node: NodeClient, ids: list[str]) -> None:
    info = await durable(node, "t")
    for start, stop, status, code, mark in (
        (info.first - 1, info.end, 410, "GONE", {"first": info.first}),
        (info.first, info.end + 1, 416, "NOT_YET", {"durable": info.durable}),
    ):
        with pytest.raises(HttpError) as caught:
            async with node.log_fetch("t", start, stop):
                pass
        assert (caught.value.status, caught.value.code.partition(":")[0]) == (status, code)
        assert caught.value.details == mark
    with pytest.raises(HttpError) as caught:
        [message async for message in node.log_messages("t", info.first, info.end, epoch="another")]
    assert caught.value.status == 409


async def test_a_log_is_read_on_after_a_cut(broker: Broker, node: NodeClient, ids: list[str]) -> None:
    """What came whole counts, and is not asked for again."""
    info = await durable(node, "t")
    raw = b""
    async with node.log_fetch("t", info.first, info.end) as fetch:
        raw = b"".join([chunk async for chunk in fetch])
    asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        start = int(parse_query(line.partition("?")[2])["from"])
        asked.append(start)
        head = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Flintmq-Next: {info.end}\r\n\r\n"
        rest = raw[37 * (start - info.first) :]
        # Two messages at a time, and a piece of the next.
        piece, end = (rest[:80], b"") if len(rest) > 80 else (rest, b"0\r\n\r\n")
        writer.write(head.encode() + b"%x\r\n" % len(piece) + piece + b"\r\n" + end)

    async with answering(serve) as address, NodeClient(address) as cut:
        found = [message.body async for message in cut.log_messages("t", info.first, info.end)]
    assert found == [b"one", b"two", b"three"]
    assert asked == [info.first, info.first + 2]


async def test_a_log_that_is_cut_before_anything_came_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Flintmq-Next: 5\r\n\r\n")

    async with answering(serve) as address, NodeClient(address) as node:
        with pytest.raises(ConnectError):
            [message async for message in node.log_messages("t", 1, 5)]


async def test_readers_have_positions(node: NodeClient, ids: list[str]) -> None:
    info = await durable(node, "t")
    position = await node.set_position("t", "spark", info.first + 1)
    assert (position.reader, position.offset, position.lag) == ("spark", info.first + 1, 2)
    assert await node.position("t", "spark") == position
    assert (await node.set_position("t", "other", "latest")).lag == 0
    assert {p.reader: p.offset for p in await node.positions("t")} == {"spark": info.first + 1, "other": info.end}
    await node.delete_position("t", "spark")
    with pytest.raises(HttpError) as caught:
        await node.position("t", "spark")
    assert (caught.value.status, caught.value.code.partition(":")[0]) == (404, "READER_NOT_FOUND")


async def test_a_channel_goes_on_elsewhere(node: NodeClient, ids: list[str]) -> None:
    info = await durable(node, "t")
    assert (await node.seek("t", "c", "latest")).messages == 0
    result = await node.seek("t", "c", info.first + 1)
    assert (result.topic, result.channel, result.offset, result.messages) == ("t", "c", info.first + 1, 2)
    assert (await node.seek("t", "c", datetime(2001, 1, 1, tzinfo=UTC))).messages == 3
    assert [m.id for m in (await node.peek("t", "c")).messages] == ids


async def test_the_twin_reads_a_log(broker: Broker, node: NodeClient, ids: list[str]) -> None:
    info = await durable(node, "t")

    def work() -> None:
        with sync.NodeClient(broker.http_address) as twin:
            found = twin.log_messages("t", info.first, info.end)
            assert next(found).body == b"one"
            found.close()
            assert [m.body for m in twin.log_messages("t", info.first, info.end)] == [b"one", b"two", b"three"]

    await asyncio.get_running_loop().run_in_executor(None, work)


# --- Without asyncio --------------------------------------------------------------------------------------------------


def public(kind: type) -> dict[str, list[inspect.Parameter]]:
    """Every public method with its parameters."""
    return {
        name: list(inspect.signature(method).parameters.values())
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_twin_has_the_same_methods_with_the_same_arguments() -> None:
    ours, twin = public(NodeClient), public(sync.NodeClient)
    # Raw frames are for those who have an event loop.
    del ours["log_fetch"]
    assert {name: [(p.name, p.kind, p.default) for p in found] for name, found in twin.items()} == {
        name: [(p.name, p.kind, p.default) for p in found] for name, found in ours.items()
    }


async def test_the_twin_works_in_a_thread(broker: Broker, ids: list[str]) -> None:
    def work() -> None:
        with sync.NodeClient(broker.http_address) as node:
            assert node.ping() == "OK"
            node.finish("t", "c", ids[0])
            page = node.peek("t", "c", shown=None)
            assert [message.body for message in page.messages] == [b"two", b"three"]
            with pytest.raises(HttpError):
                node.finish("t", "c", ids[0])

    await asyncio.get_running_loop().run_in_executor(None, work)


def test_everything_public_is_named() -> None:
    named = set(node_module.__all__)
    found = {
        name
        for name, value in vars(node_module).items()
        if inspect.isclass(value) and value.__module__ == node_module.__name__ and not name.startswith("_")
    }
    assert found == named
