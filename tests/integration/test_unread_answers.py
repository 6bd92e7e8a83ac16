"""A client that does not read its answers is not read from: nothing piles up for it, however it asks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flintmq.broker.daemon import Broker
from flintmq.http.connection import Connection
from flintmq.lookup.daemon import Lookupd, Session
from flintmq.protocol.compression import Codec, Deflate, Snappy
from flintmq.protocol.wire import FrameDecoder, encode_command
from support.fakes import until
from support.secure import Certificates

#: A broker that is never blocked takes all of it. Unix sockets have small buffers: some 200 KB on each side.
FLOOD = 3 << 20
#: Bytes that the broker may hold for a connection: one read, and the answers to one share of a turn.
MOST = 1 << 20

IDENTIFY = encode_command(b"IDENTIFY", body=b'{"feature_negotiation":true}')


def repeated(words: bytes) -> bytes:
    return words * (65536 // len(words))


TCP = {
    "IDENTIFY": IDENTIFY,
    "IDENTIFY without negotiation": encode_command(b"IDENTIFY", body=b"{}"),
    "failing FIN": b"FIN 0123456789abcdef\n",
    "failing REQ": b"REQ 0123456789abcdef 0\n",
    "failing TOUCH": b"TOUCH 0123456789abcdef\n",
    "PUB": encode_command(b"PUB", b"t", body=b"x"),
    "PUB with another topic each": encode_command(b"PUB", b"t", body=b"x") + encode_command(b"PUB", b"u", body=b"x"),
    "MPUB": b"MPUB t\n" + bytes([0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 1, 120]),
    "DPUB": encode_command(b"DPUB", b"t", b"1000", body=b"x"),
}
HTTP = {
    "GET /ping": b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "GET /nothing": b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "GET /stats": b"GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "POST /pub": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx",
    "POST /pub of nothing": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
    "POST /pub in chunks": (
        b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
    ),
    "POST /mpub": b"POST /mpub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nx\ny",
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """A line for each error would take longer than all else."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(params=["os", "memory"])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Broker]:
    addresses = {"tcp_address": str(tmp_path / "tcp"), "http_address": str(tmp_path / "http")}
    async with Broker(data_path=tmp_path, durability=request.param, **addresses) as broker:
        yield broker


def unsent(broker: Broker) -> int:
    """The most that waits for a client to read it."""
    poller = broker.listeners.poller
    assert poller is not None
    return max(transport.get_write_buffer_size() for transport in poller._transports.values())


@contextlib.contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        sock.setblocking(False)
        yield sock


async def flood(sock: socket.socket, words: bytes) -> int:
    """Send again and again and read nothing; how many bytes were taken before no more were."""
    taken = at = 0
    idle = 0
    while taken < FLOOD and idle < 40:
        try:
            sent = sock.send(words[at:])
        except BlockingIOError:
            idle += 1
            await asyncio.sleep(0.005)
            continue
        idle = 0
        taken += sent
        at = (at + sent) % len(words)
        await asyncio.sleep(0)
    return taken


async def read_all(sock: socket.socket, size: int) -> bytes:
    """Read until nothing more has come for a while, or ``size`` bytes have."""
    received = bytearray()
    idle = 0
    while len(received) < size and idle < 40:
        try:
            data = sock.recv(1 << 18)
        except BlockingIOError:
            idle += 1
            await asyncio.sleep(0.005)
            continue
        assert data, "the connection was closed"
        idle = 0
        received += data
        await asyncio.sleep(0)
    return bytes(received)


@pytest.mark.parametrize("name", TCP)
async def test_a_client_that_reads_no_answer_is_not_read_from(broker: Broker, name: str) -> None:
    words = TCP[name]
    with connected(broker.tcp_address) as sock:
        await asyncio.get_running_loop().sock_sendall(sock, b"  V2")
        if name.startswith("failing"):
            await asyncio.get_running_loop().sock_sendall(sock, b"SUB t c\n")
        taken = await flood(sock, repeated(words))
        assert taken < FLOOD, "all was taken from a client that reads nothing"
        assert unsent(broker) < MOST
        # As soon as it reads, all that it sent is answered.
        whole = taken // len(words)
        frames: list[tuple[int, bytes]] = []
        decoder = FrameDecoder()
        wanted = whole * (2 if "another" in name else 1)
        async with asyncio.timeout(60):
            while len(frames) < wanted:
                frames += decoder.feed(await read_all(sock, 1))
        assert len(frames) - wanted <= 2


@pytest.mark.parametrize("layer", ["snappy", "deflate", "tls"])
async def test_the_same_on_a_compressed_or_encrypted_connection(
    tmp_path: Path, certificates: Certificates, layer: str
) -> None:
    options: dict[str, Any] = {"tls_cert": certificates.cert, "tls_key": certificates.key} if layer == "tls" else {}
    async with Broker(data_path=tmp_path, tcp_address=str(tmp_path / "tcp"), **options) as broker:
        with connected(broker.tcp_address) as sock:
            wanted = {"feature_negotiation": True, {"tls": "tls_v1"}.get(layer, layer): True}
            opening = b"  V2" + encode_command(b"IDENTIFY", body=msgspec.json.encode(wanted))
            await asyncio.get_running_loop().sock_sendall(sock, opening)
            await read_all(sock, 100)
            packed = await in_tls(sock, certificates) if layer == "tls" else in_codec(layer)
            # A compressed stream cannot be cut and repeated: each piece is made anew.
            taken = 0
            while taken < FLOOD:
                before = taken
                taken += await send_some(sock, packed(repeated(IDENTIFY)))
                if taken == before:
                    break
            assert taken < FLOOD, "all was taken from a client that reads nothing"
            assert unsent(broker) < MOST


def in_codec(layer: str) -> Any:
    codec: Codec = Snappy() if layer == "snappy" else Deflate(6)
    return lambda data: b"".join(codec.compress(data[at : at + 1000]) for at in range(0, len(data), 1000))


async def in_tls(sock: socket.socket, certificates: Certificates) -> Any:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = certificates.client().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    loop = asyncio.get_running_loop()
    while True:
        try:
            tls.do_handshake()
            await loop.sock_sendall(sock, outgoing.read())
            break
        except ssl.SSLWantReadError:
            await loop.sock_sendall(sock, outgoing.read())
            incoming.write(await loop.sock_recv(sock, 65536))

    def packed(data: bytes) -> bytes:
        tls.write(data)
        return outgoing.read()

    return packed


async def send_some(sock: socket.socket, data: bytes) -> int:
    """Send as much of it as is taken within a moment."""
    at = idle = 0
    while at < len(data) and idle < 40:
        try:
            at += sock.send(data[at:])
            idle = 0
        except BlockingIOError:
            idle += 1
        await asyncio.sleep(0.002 if idle else 0)
    return at if at == len(data) else 0


@pytest.mark.parametrize("name", HTTP)
async def test_a_client_that_reads_no_http_answer_is_not_read_from(broker: Broker, name: str) -> None:
    words = HTTP[name]
    with connected(broker.http_address) as sock:
        taken = await flood(sock, repeated(words))
        assert taken < FLOOD, "all was taken from a client that reads nothing"
        assert unsent(broker) < MOST
        received = b""
        async with asyncio.timeout(60):
            while received.count(b"HTTP/1.1 ") < min(200, taken // len(words)):
                received += await read_all(sock, 1)


@pytest.mark.parametrize(("port", "words"), [("http", HTTP["GET /ping"]), ("tcp", b"PING\n")])
async def test_the_same_at_nsqlookupd(port: str, words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[asyncio.Transport] = []
    for kind in (Session, Connection):
        real = kind.connection_made

        def connection_made(self: Any, transport: Any, real: Any = real) -> None:
            # The system would take megabytes.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
            made.append(transport)
            real(self, transport)

        monkeypatch.setattr(kind, "connection_made", connection_made)
    async with Lookupd() as lookupd:
        host, _, number = (lookupd.tcp_address if port == "tcp" else lookupd.http_address).rpartition(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
            sock.connect((host, int(number)))
            sock.setblocking(False)
            if port == "tcp":
                sock.send(b"  V1")
            await flood(sock, repeated(words))
            assert made[0].get_write_buffer_size() < MOST


async def test_a_consumer_that_reads_no_messages_may_finish_those_it_has(broker: Broker) -> None:
    """Its FINs have no answers, so nothing piles up; waiting for it could be waiting for ever."""
    with connected(broker.tcp_address) as sock:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, b"  V2SUB t c\n")
        await read_all(sock, 10)
        publisher = await asyncio.open_unix_connection(broker.tcp_address)
        publisher[1].write(b"  V2" + encode_command(b"PUB", b"t", body=b"x" * 100) * 3)
        await publisher[0].readexactly(30)
        await loop.sock_sendall(sock, b"RDY 2500\n")
        frames = FrameDecoder().feed(await read_all(sock, 3 * 134))
        ids = [body[10:26] for _, body in frames]
        # Now it reads no more, and there is much to read.
        for _ in range(40):
            publisher[1].write(encode_command(b"PUB", b"t", body=b"x" * 500_000))
            await publisher[0].readexactly(10)
        channel = broker.topics["t"].channels["c"]
        session = next(iter(channel.sessions.values()))
        assert session.room == 0
        before = session.finish_count
        await loop.sock_sendall(sock, b"".join(b"FIN %s\n" % ident for ident in ids))
        await until(lambda: session.finish_count >= before + 3)
        publisher[1].close()
        await publisher[1].wait_closed()
