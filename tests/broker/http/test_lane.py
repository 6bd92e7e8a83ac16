"""The lane of the HTTP port: health checks, requests behind others, and when the general server is imported."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.http import lane as http_lane
from flintmq.broker.http import publish
from flintmq.broker.http.publish import LONGEST_REMEMBERED
from support.http_client import HttpClient, request_of

DATE = re.compile(rb"Date: [^\r]+")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
        yield broker


# --- Health checks ----------------------------------------------------------------------------------------------------


def pings() -> dict[str, bytes]:
    """Requests for /ping of every kind, by a name."""
    made = {}
    kinds = itertools.product(
        ("GET", "HEAD", "POST", "OPTIONS"),
        ("/ping", "/ping?x=1&y", "/p%69ng", "http://h/ping", "/PING"),
        ("1.1", "1.0"),
        ("", "close", "keep-alive"),
        ("", "Authorization: Bearer no-token", "Content-Length: 0", "Content-Length: 3"),
    )
    for method, target, version, connection, more in kinds:
        lines = [f"{method} {target} HTTP/{version}", "Host: localhost"]
        lines += [f"Connection: {connection}"] if connection else []
        lines += [more] if more else []
        name = " ".join([method, target, version, connection, more])
        made[name] = "\r\n".join([*lines, "", ""]).encode() + (b"abc" if more.endswith("3") else b"")
    return made


async def conversation(address: str, request: bytes) -> bytes:
    """Everything that comes back for a request, and for a /ping behind it if the connection is kept."""
    is_kept = b"keep-alive" in request or (b"HTTP/1.1" in request and b": close" not in request)
    async with HttpClient.connect(address) as client:
        client.send(request + (request_of("GET", "/ping", None, "Connection: close") if is_kept else b""))
        return DATE.sub(b"Date: now", await client.ended())


@pytest.mark.parametrize("health", ["", "disk full"])
@pytest.mark.parametrize("tokens", [False, True])
async def test_a_ping_of_the_lane_has_the_bytes_of_the_general_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: bool, health: str
) -> None:
    options = {}
    if tokens:
        file = tmp_path / "tokens"
        file.write_text("secret admin\n")
        file.chmod(0o600)
        options["http_auth_token_file"] = str(file)
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", **options) as broker:
        broker._illness = health
        requests = pings()
        ours = {name: await conversation(broker.http_address, request) for name, request in requests.items()}
        monkeypatch.setattr(http_lane, "read_head", lambda data: None)
        for lane in broker.listeners.api._lanes:  # type: ignore[union-attr]
            lane.forget()
        general = {name: await conversation(broker.http_address, request) for name, request in requests.items()}
    assert ours == general
    expected = b"\r\n\r\nNOK - disk full" if health else b"\r\n\r\nOK"
    assert all(expected in answer for name, answer in ours.items() if name.startswith("GET /ping 1"))


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_ping_never_waits_for_the_general_server(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    handed = []
    for lane in broker.listeners.api._lanes:  # type: ignore[union-attr]
        monkeypatch.setattr(lane, "hand_over", lambda transport, data: handed.append(data))
    async with HttpClient.connect(broker.http_address) as client, asyncio.timeout(30):
        for split in (0, 1, 9):
            request = f"GET /ping HTTP/{version}\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n".encode()
            client.send(request[:split])
            await client.writer.drain()
            await asyncio.sleep(0)
            client.send(request[split:])
            assert (await client.answer()).body == b"OK"
    assert handed == []


async def test_a_port_that_is_not_to_be_used_answers_no_ping(tmp_path: Path) -> None:
    from support.secure import Certificates

    made = Certificates(tmp_path)
    options = {"tls_cert": made.cert, "tls_key": made.key, "https_address": "127.0.0.1:0", "tls_required": "true"}
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", **options) as broker:
        async with HttpClient.connect(broker.http_address) as client:
            answer = await client.get("/ping")
    assert answer.status == 403 and b"TLS_REQUIRED" in answer.body


async def test_a_ping_is_logged_as_by_the_general_server(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="flintmq.http.site"):
        async with HttpClient.connect(broker.http_address) as client:
            await client.get("/ping?a=b")
            name = "{}:{}".format(*client.writer.get_extra_info("sockname"))
    assert any(record.getMessage().startswith(f"200 GET /ping?a=b ({name}) ") for record in caplog.records)


@pytest.mark.parametrize("way", ["lane", "general"])
@pytest.mark.parametrize(
    ("end", "is_taken"),
    [
        (b"0\r\n\r\n", True),
        (b"0\r\nX: a\r\n\r\n", True),
        (b"0 ;x=y\r\nX: a\r\nY:\r\n\r\n", True),
        (b"0\r\nX: a\n\n", False),
        (b"0\r\nno header\r\n\r\n", False),
        (b"0\r\n X: folded\r\n\r\n", False),
        (b" 0\r\n\r\n", False),
        (b"0\rx\r\n\r\n", False),
    ],
)
async def test_a_body_in_chunks_ends_at_the_same_place_for_everybody(
    broker: Broker, way: str, end: bytes, is_taken: bool
) -> None:
    """A message behind it that looks like a request is a message."""
    inner = b"POST /topic/create?topic=evil HTTP/1.1\r\nHost: localhost\r\n\r\n"
    publish = b"POST /pub?topic=first HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
    async with HttpClient.connect(broker.http_address) as client:
        if way == "general":
            await client.get("/info")
        client.send(publish + end + request_of("POST", "/pub?topic=second", inner))
        assert (await client.answer()).status == (200 if is_taken else 500)
        if is_taken:
            assert (await client.answer()).status == 200
        else:
            assert await client.ended() == b""
    assert set(broker.topics) == ({"first", "second"} if is_taken else set())


async def test_a_long_query_is_not_remembered(broker: Broker) -> None:
    assert broker.listeners.api is not None
    remembered = broker.listeners.api._publishing._orders
    async with HttpClient.connect(broker.http_address) as client:
        for size in (1, LONGEST_REMEMBERED + 1, 50_000):
            answer = await client.post(f"/pub?topic=t&x={'y' * size}", b"body")
            assert answer.status == 200
    assert sum(len(query) for _, query in remembered) <= LONGEST_REMEMBERED


# --- Requests behind others -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["memory", "os"])
@pytest.mark.parametrize("count", [2, 3, 7])
async def test_a_request_behind_an_answered_one_is_served_although_its_client_sends_no_more(
    tmp_path: Path, durability: str, count: int
) -> None:
    """The end of the input may be noticed between an answer and the next look at what came behind its request."""
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", durability=durability) as broker:
        assert broker.listeners.api is not None
        for kind in ("/pub?topic=t", "/mpub?topic=t"):
            async with HttpClient.connect(broker.http_address) as client:
                await client.post(kind, b"first")
                (connection,) = broker.listeners.api._lanes[0].connections
                settled = connection.settled

                def seen(connection: http_lane.HttpConnection = connection, settled=settled) -> None:  # type: ignore[no-untyped-def]
                    # The end is the next thing that happens after an answer.
                    settled()
                    if not connection._pending:
                        connection.transport.ended()  # type: ignore[attr-defined]

                connection.settled = seen  # type: ignore[method-assign]
                client.send(request_of("POST", kind, b"next") * count)
                client.writer.write_eof()
                assert (await client.ended()).count(b"\r\n\r\nOK") == count
        assert broker.topics["t"].message_count == 2 * (count + 1)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("path", ["/pub?topic=t", "/mpub?topic=t", "/mpub?topic=t&binary=true", "/pub"])
@pytest.mark.parametrize("body", [None, b"", b"x"])
async def test_a_publish_that_asks_for_the_end_gets_it(
    broker: Broker, path: str, body: bytes | None, version: str
) -> None:
    async with HttpClient.connect(broker.http_address) as client:
        request = request_of("POST", path, body, "Connection: close")
        client.send(request.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1))
        answer = await client.ended()
    assert answer.startswith(f"HTTP/{version} ".encode())
    assert (b"\r\nConnection: close\r\n" in answer) is (version == "1.1")


@pytest.mark.parametrize("body", [b"\n" * 300_000, b"\n" * 200_000 + b"a" + b"\n" * 200_000 + b"b\n"])
def test_every_piece_of_a_text_has_a_message(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop gets its turn after each piece, so that none may take long that holds nothing but empty lines."""
    looked = 0
    real = publish.line_records

    def counted(data: bytearray, pos: int, stop: int) -> Any:
        nonlocal looked
        looked += 1
        return real(data, pos, stop)

    monkeypatch.setattr(publish, "line_records", counted)
    pieces = list(publish._lines(bytearray(body), 0, len(body)))
    assert sum(count for _, _, _, count in pieces) == len(body.split())
    assert looked == len(pieces)
