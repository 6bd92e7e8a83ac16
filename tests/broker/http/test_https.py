"""HTTPS: a handshake that fails ends the connection at once, with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flintmq.broker.daemon import Broker
from flintmq.http import tls as http_tls
from flintmq.lookup.daemon import Lookupd
from support.fakes import until
from support.http_client import HttpClient
from support.secure import Certificates

#: Longer than any test waits: nothing here ends by it.
NEVER = 3600.0
NO_TLS = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
PLAIN = {
    "a request": b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a publish": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
    "another method": b"PUT /config/log_level HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
GARBAGE = {
    "an NSQ client": b"  V2IDENTIFY\n\0\0\0\2{}",
    "zeros": bytes(100),
    "a record that is none": b"\x16\x03\x01\x00\x05hello",
    "high bytes": b"\xff" * 2000,
}


@pytest.fixture(params=["nsqd", "nsqlookupd"])
async def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, Certificates]]:
    monkeypatch.setattr("flintmq.broker.http.api.HANDSHAKE_SECONDS", NEVER)
    monkeypatch.setattr("flintmq.http.server.HANDSHAKE_SECONDS", NEVER, raising=False)
    made = Certificates(tmp_path)
    if request.param == "nsqd":
        options = {"tls_cert": made.cert, "tls_key": made.key, "https_address": "127.0.0.1:0"}
        async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", **options) as broker:
            yield broker.https_address, made
    else:
        async with Lookupd(tls_cert=made.cert, tls_key=made.key) as lookupd:
            yield lookupd.http_address, made


@pytest.mark.parametrize("name", PLAIN)
async def test_plain_http_on_the_https_port_is_told_so_at_once(server: tuple[str, Certificates], name: str) -> None:
    async with HttpClient.connect(server[0]) as client, asyncio.timeout(20):
        client.send(PLAIN[name])
        assert (await client.ended()).endswith(NO_TLS)


@pytest.mark.parametrize("name", GARBAGE)
async def test_a_handshake_that_fails_ends_at_once(server: tuple[str, Certificates], name: str) -> None:
    async with HttpClient.connect(server[0]) as client, asyncio.timeout(20):
        client.send(GARBAGE[name])
        answer = await client.ended()
    # An alert, unless OpenSSL has none for it.
    assert answer == b"" or answer[0] == 0x15


async def test_the_socket_of_a_failed_handshake_is_closed(
    server: tuple[str, Certificates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its client neither reads nor closes."""
    monkeypatch.setattr(http_tls, "LINGER_SECONDS", 0.0)
    async with HttpClient.connect(server[0]) as client, asyncio.timeout(20):
        client.send(PLAIN["a request"])
        await client.ended()
        while True:
            try:
                client.send(b"x")
                await client.writer.drain()
                await asyncio.sleep(0.001)
            except OSError:
                break


async def test_others_are_served_between_failed_handshakes(server: tuple[str, Certificates]) -> None:
    address, made = server
    trusting = ssl.create_default_context(cafile=made.ca)
    trusting.check_hostname = False
    async with asyncio.timeout(60):
        for failing in (*PLAIN.values(), *GARBAGE.values()):
            async with HttpClient.connect(address) as client:
                client.send(failing)
                async with HttpClient.connect(address, trusting) as other:
                    assert (await other.get("/ping")).body == b"OK"
                await client.ended()


async def test_connections_count_before_their_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintmq.broker.http.api.HANDSHAKE_SECONDS", NEVER)
    made = Certificates(tmp_path)
    trusting = ssl.create_default_context(cafile=made.ca)
    trusting.check_hostname = False
    options = {"tls_cert": made.cert, "tls_key": made.key, "https_address": "127.0.0.1:0"}
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", **options) as broker, asyncio.timeout(60):
        broker.listeners.descriptors._most = 5
        for _ in range(3):
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(4):
                    await stack.enter_async_context(HttpClient.connect(broker.https_address))
                # The last one that there is room for is served, and there is no room for another of any kind.
                last = await stack.enter_async_context(HttpClient.connect(broker.https_address, trusting))
                assert (await last.get("/ping")).body == b"OK"
                assert (await last.get("/info")).status == 200
                for address in (broker.https_address, broker.http_address, broker.tcp_address):
                    async with HttpClient.connect(address) as refused:
                        refused.send(b"\x16\x03\x01")
                        assert await refused.ended() == b""
            await until(lambda: broker.listeners._connection_count() == 0)
        async with HttpClient.connect(broker.https_address, trusting) as client:
            assert (await client.get("/info")).status == 200


@pytest.mark.parametrize("name", [*PLAIN, *GARBAGE])
async def test_a_failed_handshake_leaves_nothing_to_the_collector(server: tuple[str, Certificates], name: str) -> None:
    """Neither while the connection lives, nor in a cycle afterwards."""

    def left() -> int:
        return sum(isinstance(each, ssl.SSLObject) for each in gc.get_objects())

    gc.collect()
    before = left()
    gc.disable()
    try:
        for _ in range(5):
            async with HttpClient.connect(server[0]) as client, asyncio.timeout(20):
                client.send({**PLAIN, **GARBAGE}[name])
                await client.ended()
        await until(lambda: left() <= before)
    finally:
        gc.enable()


async def test_a_client_that_says_nothing_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintmq.broker.http.api.HANDSHAKE_SECONDS", 0.05)
    made = Certificates(tmp_path)
    options = {"tls_cert": made.cert, "tls_key": made.key, "https_address": "127.0.0.1:0"}
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", **options) as broker:
        async with HttpClient.connect(broker.https_address) as client, asyncio.timeout(20):
            assert await client.ended() == b""


async def test_a_stop_drops_handshakes_that_are_under_way(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    options = {"tls_cert": made.cert, "tls_key": made.key, "https_address": "127.0.0.1:0"}
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", **options) as broker, asyncio.timeout(20):
        async with HttpClient.connect(broker.https_address) as client:
            client.send(b"\x16\x03\x01")
            await asyncio.sleep(0)
            await broker.stop()
            assert await client.ended() == b""
