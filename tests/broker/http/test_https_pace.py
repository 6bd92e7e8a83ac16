"""Handshakes of HTTPS take turns with everything else: one is made per turn of the loop, however many clients ask."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flintmq.broker.daemon import Broker
from flintmq.http import tls as http_tls
from flintmq.lookup.daemon import Lookupd
from support.fakes import until
from support.http_client import HttpClient
from support.secure import Certificates

CLIENTS = 30


@pytest.fixture(params=["nsqd https", "nsqlookupd http", "nsqlookupd tcp"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[str, Certificates]]:
    made = Certificates(tmp_path)
    if request.param == "nsqd https":
        options = {"tls_cert": made.cert, "tls_key": made.key, "https_address": "127.0.0.1:0"}
        async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", **options) as broker:
            yield broker.https_address, made
    else:
        async with Lookupd(tls_cert=made.cert, tls_key=made.key) as lookupd:
            yield lookupd.tcp_address if request.param == "nsqlookupd tcp" else lookupd.http_address, made


def greeting() -> bytes:
    """Return the first bytes of a handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


class Turns:
    """Counts the turns of the loop, and in each the greetings that were answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.answered: Counter[int] = Counter()
        self._task = asyncio.create_task(self._count())
        outspoken = http_tls._outspoken()
        real = outspoken.do_handshake

        def counted(tls: ssl.SSLObject) -> None:
            is_new = not tls.shared_ciphers()
            try:
                real(tls)
            finally:
                if is_new and tls.shared_ciphers():
                    self.answered[self.now] += 1

        monkeypatch.setattr(outspoken, "do_handshake", counted)

    async def _count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._task.cancel()


def connect(stack: contextlib.ExitStack, address: str) -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    return [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(CLIENTS)]


@pytest.mark.parametrize("kind", ["whole", "in two parts", "in two records"])
async def test_one_handshake_is_made_per_turn(
    server: tuple[str, Certificates], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = greeting()
    if kind == "in two records":
        size = len(hello) - 5
        hello = (
            hello[:3] + (20).to_bytes(2, "big") + hello[5:25] + hello[:3] + (size - 20).to_bytes(2, "big") + hello[25:]
        )
    first = {"whole": len(hello), "in two parts": 100, "in two records": 25}[kind]
    turns = Turns(monkeypatch)
    with contextlib.ExitStack() as stack:
        peers = connect(stack, server[0])
        # The loop does not run meanwhile: all of them are there when it does.
        for peer in peers:
            peer.sendall(hello[:first])
        if first < len(hello):
            for _ in range(CLIENTS * 10):
                await asyncio.sleep(0)
            assert not turns.answered, "half a greeting costs nothing"
            for peer in peers:
                peer.sendall(hello[first:])
        await until(lambda: turns.answered.total() == CLIENTS)
        for peer in peers:
            peer.setblocking(False)
            assert peer.recv(1 << 16)[0] == 0x16, "a handshake of the server's"
    turns.stop()
    # asyncio may read two sockets in one turn that were given to it in two.
    assert max(turns.answered.values()) <= 3 < CLIENTS // 3


async def test_a_client_that_leaves_in_its_greeting_makes_room(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    options = {"tls_cert": made.cert, "tls_key": made.key, "https_address": "127.0.0.1:0"}
    async with Broker(
        data_path=tmp_path, http_address="127.0.0.1:0", max_connections_per_address=CLIENTS, **options
    ) as broker:
        trusting = ssl.create_default_context(cafile=made.ca)
        trusting.check_hostname = False
        hello = greeting()
        for ending in ("close", "end", "reset"):
            with contextlib.ExitStack() as stack:
                peers = connect(stack, broker.https_address)
                for peer in peers:
                    peer.sendall(hello[:-1])
                assert broker.connections is not None
                await until(lambda: len(broker.connections._addresses) == CLIENTS)
                for peer in peers:
                    if ending == "reset":
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    if ending == "end":
                        peer.shutdown(socket.SHUT_WR)
                    else:
                        peer.close()
                async with asyncio.timeout(9):
                    await until(lambda: not broker.connections._addresses)
        async with HttpClient.connect(broker.https_address, trusting) as client:
            assert (await client.get("/ping")).body == b"OK"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x16", False),
        (b"\x16\x03\x01", False),
        (b"\x16\x03\x01\x00\x05", False),
        (b"\x16\x03\x01\x00\x05\x01\0\0\x01", False),
        (b"\x16\x03\x01\x00\x05\x01\0\0\x01x", True),
        (b"\x16\x03\x01\x00\x02\x01\0\x16\x03\x01\x00\x03\0\x01x", True),
        (b"\x16\x03\x01\x00\x02\x01\0\x16\x03\x01\x00\x03\0\x01", False),
        (b"\x16\x03\x01\x00\x02\x01\0", False),
        # Nothing to wait for: it is no greeting, or longer than any.
        (b"GET / HTTP/1.1", True),
        (b"\x16nonsense", True),
        (b"\x16\x03\x01\xff\xff\x01", True),
        (b"\x16\x03\x01\x00\x05\x01\x01\0\0", True),
        (b"\x16\x03\x01\x00\x02\x01\0\x17", True),
        (b"\x16\x03\x01\x00\x00" * 7000, True),
    ],
)
def test_a_greeting_is_waited_for_as_long_as_it_can_be_one(data: bytes, expected: bool) -> None:
    assert http_tls._is_greeting(data) is expected
