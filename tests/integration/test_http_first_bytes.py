"""What is no HTTP is refused by its first bytes, and lines may end with a line feed alone: as with Go's server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flintmq.broker.daemon import Broker
from flintmq.lookup.daemon import Lookupd
from flintmq.protocol.wire import encode_command
from support.http_client import HttpClient
from support.peers import GO_NSQD, NO_GO_NSQD


def refusal(status: str = "400 Bad Request") -> bytes:
    """As Go's server writes it, byte by byte."""
    lines = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n{status}"
    return lines.encode()


def hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


NO_REQUESTS = {
    "an NSQ client": b"  V2",
    "an NSQ client that introduces itself": b"  V2" + encode_command(b"IDENTIFY", body=b"{}"),
    "an nsqd": b"  V1PING\n",
    "a TLS hello": hello(),
    "zeros": bytes(10),
    "high bytes": b"\xff\xfe",
    "a line": b"garbage\n",
    "a line with CRLF": b"garbage\r\n",
    "an endless word": b"x" * 100,
    "an empty line": b"\r\n",
    "an empty line before a request": b"\r\nGET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no version": b"GET /ping\r\n\r\n",
    "no version, unfinished": b"GET /ping\n",
    "another protocol": b"OPTIONS rtsp://x RTSP/1.0\r\n",
    "two spaces": b"GET  /ping",
    "a control character": b"GET /\x01",
    "a header without a colon": b"GET /ping HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
    "a header without a name": b"GET /ping HTTP/1.1\r\nHost: localhost\r\n: y\r\n\r\n",
    "a negative length": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "a length with a sign": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: +3\r\n\r\nabc",
    "a length with a word": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3 x\r\n\r\nabc",
    "a huge length": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: %s\r\n\r\n" % (b"9" * 50),
}
OTHERS = {
    "HTTP/2": (b"GET /ping HTTP/2.0\r\n", "505 HTTP Version Not Supported: unsupported protocol version"),
    "no host": (b"GET /ping HTTP/1.1\r\n\r\n", "400 Bad Request: missing required Host header"),
    "a huge head": (b"GET /ping HTTP/1.1\r\nX: " + b"x" * (70 << 10), "431 Request Header Fields Too Large"),
}


@pytest.fixture(params=["nsqd", "nsqlookupd"])
async def address(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "nsqd":
        async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
            yield broker.http_address
    else:
        async with Lookupd() as lookupd:
            yield lookupd.http_address


@pytest.mark.parametrize("name", [*NO_REQUESTS, *OTHERS])
async def test_what_is_no_request_is_refused_at_once(address: str, name: str) -> None:
    data, status = OTHERS.get(name) or (NO_REQUESTS[name], "400 Bad Request")
    async with HttpClient.connect(address) as client, asyncio.timeout(10):
        client.send(data)
        assert await client.ended() == refusal(status)


@pytest.mark.parametrize("name", ["an NSQ client", "a line", "a negative length"])
async def test_so_it_is_behind_other_requests(address: str, name: str) -> None:
    async with HttpClient.connect(address) as client, asyncio.timeout(10):
        for _ in range(2):
            assert (await client.get("/ping")).body == b"OK"
        client.send(NO_REQUESTS[name])
        assert await client.ended() == refusal()


def bare(request: bytes) -> bytes:
    return request.replace(b"\r\n", b"\n")


@pytest.mark.parametrize("size", [0, 1, 7])
async def test_a_line_feed_alone_ends_a_line(address: str, size: int) -> None:
    ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with HttpClient.connect(address) as client, asyncio.timeout(30):
        for request in (bare(ping), ping, bare(ping)):
            for at in range(0, len(request), size or len(request)):
                client.send(request[at : at + size] if size else request)
                await client.writer.drain()
                await asyncio.sleep(0)
            assert (await client.answer()).body == b"OK"
        client.send(b"GET /ping HTTP/1.0\n\n")
        last = await client.ended()
        assert last.startswith(b"HTTP/1.0 200 OK\r\n") and last.endswith(b"\r\n\r\nOK")


@pytest.mark.parametrize("path", ["/pub", "/mpub"])
async def test_a_publish_may_end_its_lines_so(tmp_path: Path, path: str) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
        async with HttpClient.connect(broker.http_address) as client, asyncio.timeout(10):
            # Its body ends as a head would.
            body = b"one\r\n\r\n"
            head = b"POST %s?topic=t HTTP/1.1\nHost: localhost\nContent-Length: %d\n\n" % (path.encode(), len(body))
            client.send((head + body) * 2)
            for _ in range(2):
                assert (await client.answer()).body == b"OK"
            client.send(head + body + b"POST %s?topic=t HTTP/1.1\r\nHost: localhost\r\n" % path.encode())
            client.send(b"Content-Length: 1\r\n\r\nx")
            for _ in range(2):
                assert (await client.answer()).body == b"OK"
        assert broker.topics["t"].message_count == (4 if path == "/pub" else 3 * 2 + 1)


@pytest.mark.skipif(bool(NO_GO_NSQD), reason=NO_GO_NSQD)
@pytest.mark.parametrize("name", [*NO_REQUESTS, *OTHERS])
async def test_the_go_daemon_says_the_same(tmp_path: Path, name: str) -> None:
    data, status = OTHERS.get(name) or (NO_REQUESTS[name], "400 Bad Request")
    if b"\n" not in data or name == "a huge head":
        pytest.skip("the Go daemon waits for the end of the line")
    if name == "a negative length" or name == "HTTP/2":
        data += b"\r\n"
    process = await asyncio.create_subprocess_exec(
        GO_NSQD,
        f"--data-path={tmp_path}",
        "--tcp-address=127.0.0.1:0",
        "--http-address=127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            while b"HTTP: listening on " not in (line := await process.stderr.readline()):
                assert line, "it did not start"
        async with HttpClient.connect(line.split()[-1].decode()) as client, asyncio.timeout(10):
            client.send(data)
            assert await client.ended() == refusal(status)
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /ping HTTP/1.1\nHost: localhost\r\n\n",
        b"GET /ping HTTP/1.1\r\nHost: localhost\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /ping HTTP/1.1\nHost: localhost\n\r\n",
    ],
)
async def test_line_ends_of_both_kinds_in_one_head_are_refused(address: str, request_: bytes) -> None:
    """A proxy in front may read such a head in another way than we would."""
    async with HttpClient.connect(address) as client, asyncio.timeout(30):
        client.send(request_)
        assert (await client.reader.read()).startswith(b"HTTP/1.1 400 Bad Request\r\n")
