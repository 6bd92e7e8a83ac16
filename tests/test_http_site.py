"""What the HTTP servers share: envelope, routes, tokens, TLS, and a real server spoken to over real sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import trustme

from flintmq.errors import HttpError, OptionError
from flintmq.http import site as web
from flintmq.http.imports import load
from flintmq.http.server import Server
from flintmq.http.site import ADMIN, CONSUME, OPEN, PUBLISH, READ, Answer, Request, Route, Site
from flintmq.http.tls import server_tls
from flintmq.http.tokens import Tokens

PATIENCE = 30.0

# --- Words and answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "arguments"),
    [
        ("", {}),
        ("topic=a", {"topic": "a"}),
        ("topic=a&topic=b", {"topic": "a"}),
        ("topic", {"topic": ""}),
        ("&&a=1&&", {"a": "1"}),
        ("=x&b=2", {"": "x", "b": "2"}),
        ("a=1=2", {"a": "1=2"}),
        ("a=x+y%2Bz", {"a": "x y+z"}),
        ("%61=%C3%A9", {"a": "é"}),
        ("a=%ff", {"a": "\udcff"}),
    ],
)
def test_a_query_is_read_as_go_reads_it(query: str, arguments: dict[str, str]) -> None:
    assert web.parse_query(query) == arguments


@pytest.mark.parametrize("query", ["a=%", "a=%2", "a=%zz", "%zz=a", "a=1;b=2", ";", "a=1&b=%g0"])
def test_a_query_that_go_does_not_understand_is_refused(query: str) -> None:
    with pytest.raises(HttpError) as raised:
        web.parse_query(query)
    assert (raised.value.status, raised.value.code) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/ping", "/ping", ""),
        ("/a?b=c?d", "/a", "b=c?d"),
        ("/%70ing?%zz", "/ping", "%zz"),
        ("/a%2Fb", "/a/b", ""),
        ("/a#b?c", "/a#b", "c"),
        ("http://host:1/ping?x", "/ping", "x"),
        ("https://host", "/", ""),
    ],
)
def test_a_target_has_a_decoded_path_and_a_raw_query(target: str, path: str, query: str) -> None:
    assert web.split_target(target) == (path, query)


@pytest.mark.parametrize("target", ["ping", "", "*", "/a%", "/a%zz", "/a%2"])
def test_a_target_that_is_no_path_is_refused(target: str) -> None:
    with pytest.raises(HttpError) as raised:
        web.split_target(target)
    assert raised.value.status == 400


def test_json_is_written_as_go_writes_it() -> None:
    value = {"b": "<a href='x'>&\u2028\u2029é", "a": [1, 0.5, None, True]}
    written = '{"b":"\\u003ca href=\'x\'\\u003e\\u0026\\u2028\\u2029é","a":[1,0.5,null,true]}'
    assert web.json_bytes(value) == written.encode()


def test_data_gets_its_envelope() -> None:
    version = {"X-Nsq-Content-Type": "nsq; version=1.0"}
    assert web.envelope("OK") == Answer(b"OK", web.TEXT, headers=version)
    assert web.envelope(None) == Answer(headers=version)
    assert web.envelope("") == Answer(headers=version)
    assert web.envelope([]) == Answer(b"[]", web.JSON, headers=version)
    assert web.envelope(7) == Answer(b"7", web.JSON, headers=version)
    assert web.envelope(HttpError(404, "NOT_FOUND")) == Answer(b'{"message":"NOT_FOUND"}', web.JSON, 404, version)
    assert web.envelope(HttpError(500, "NOK - x"), plain=True) == Answer(b"NOK - x", web.TEXT, 500)
    assert web.envelope(Answer(b"x", "image/png", 201, {"A": "b"})) == Answer(
        b"x", "image/png", 201, {**version, "A": "b"}
    )


def test_an_answer_can_be_rendered_without_a_server() -> None:
    answer = Answer(b"OK", web.TEXT, 200, {"X": "y"}, close=True)
    assert web.render(answer, "now") == (
        b"HTTP/1.1 200 OK\r\nX: y\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 2\r\nDate: now\r\n"
        b"Connection: close\r\n\r\nOK"
    )


# --- A server ---------------------------------------------------------------------------------------------------------

LIMIT = 10


async def _ok(request: Request) -> str:
    return "OK"


async def _echo(request: Request) -> dict[str, object]:
    body = await request.body(LIMIT, "MSG_TOO_BIG")
    return {"body": body.decode(), "arguments": request.arguments(), **request.parameters}


async def _crash(request: Request) -> None:
    raise ValueError("a bug")


async def _read_config(request: Request) -> str:
    return request.parameters["opt"]


class _Pieces:
    """An answer in pieces; what became of it is noted."""

    def __init__(self, count: int, failure: Exception | None = None) -> None:
        self.count = count
        self.failure = failure
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number in range(self.count):
            yield b"%d," % number
        if self.failure is not None:
            raise self.failure

    async def aclose(self) -> None:
        self.closed += 1


STREAMS: list[_Pieces] = []


async def _stream(request: Request) -> Answer:
    failure = {"bug": ValueError("a bug"), "cut": ConnectionAbortedError("no more")}.get(request.query)
    STREAMS.append(_Pieces(3, failure))
    return Answer(content_type="a/b", headers={"X-Y": "z"}, pieces=STREAMS[-1])


ROUTES = [
    Route("GET", "/stream", _stream, READ),
    Route("GET", "/ping", _ok, OPEN, plain=True),
    Route("GET", "/stats", _ok, READ),
    Route("POST", "/pub", _echo, PUBLISH, unlogged=True),
    Route("GET", "/config/:opt", _read_config, READ),
    Route("PUT", "/config/:opt", _echo, ADMIN),
    Route("POST", "/topic/delete", _ok, ADMIN),
    Route("GET", "/static/*path", _echo, READ),
    Route("GET", "/crash", _crash, READ),
]

Serve = Callable[..., Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serve a site on some port, ``tls`` and ``tokens`` as wished; its address."""
    servers: list[Server] = []

    async def start(
        tokens: Tokens | None = None, tls: ssl.SSLContext | None = None, refusal: Answer | None = None
    ) -> str:
        sock = socket.create_server(("127.0.0.1", 0))
        server = Server(Site(ROUTES, tokens), refusal=refusal)
        await server.listen(sock, tls)
        servers.append(server)
        return f"127.0.0.1:{sock.getsockname()[1]}"

    yield start
    for server in servers:
        await server.close()


async def ask(address: str, data: bytes) -> bytes:
    """Send bytes, and read until the server closes the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def request_of(method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.[01] (\d+) ", answer)
    assert found is not None, answer
    return int(found[1])


async def test_an_answer_has_gos_headers_and_no_others(serve: Serve) -> None:
    answer = await ask(await serve(), request_of("GET", "/stats"))
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    assert (status, body) == ("HTTP/1.1 200 OK", b"OK")
    assert {header.partition(":")[0] for header in headers} == {
        "X-Nsq-Content-Type",
        "Content-Type",
        "Content-Length",
        "Date",
        "Connection",
    }


async def test_an_answer_may_come_in_pieces(serve: Serve) -> None:
    answer = await ask(await serve(), request_of("GET", "/stream"))
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = sorted(head.decode().split("\r\n"))
    assert status == "Connection: close" and "HTTP/1.1 200 OK" in headers
    assert {"Content-Type: a/b", "X-Y: z", "Transfer-Encoding: chunked"} < set(headers)
    assert not any(header.startswith(("Server", "Content-Length")) for header in headers)
    assert body == b"2\r\n0,\r\n2\r\n1,\r\n2\r\n2,\r\n0\r\n\r\n"
    assert STREAMS[-1].closed == 1


@pytest.mark.parametrize("failure", ["bug", "cut"])
async def test_an_answer_in_pieces_that_fails_is_cut_off(
    serve: Serve, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = await serve()
    answer = await ask(address, request_of("GET", f"/stream?{failure}").replace(b"Connection: close\r\n", b""))
    assert answer.endswith(b"2,\r\n"), "what came before is there, and no last chunk"
    assert STREAMS[-1].closed == 1
    assert ("ValueError: a bug" in caplog.text) == (failure == "bug")
    assert status_of(await ask(address, request_of("GET", "/ping"))) == 200


async def test_who_could_not_tell_a_part_from_the_whole_gets_no_pieces(serve: Serve) -> None:
    answer = await ask(await serve(), b"GET /stream HTTP/1.0\r\n\r\n")
    assert status_of(answer) == 505
    assert STREAMS[-1].closed == 1


async def test_parts_of_a_path_are_parameters(serve: Serve) -> None:
    address = await serve()
    async with aiohttp.ClientSession() as client:
        async with client.get(f"http://{address}/config/log%5Flevel") as response:
            assert await response.text() == "log_level"
        async with client.put(f"http://{address}/config/x?a=b", data=b"hello") as response:
            assert await response.json() == {"body": "hello", "arguments": {"a": "b"}, "opt": "x"}
        async with client.get(f"http://{address}/static/a/b.css") as response:
            assert (await response.json())["path"] == "a/b.css"
        for missing in ("/config/", "/config/a/b", "/config"):
            async with client.get(f"http://{address}{missing}") as response:
                assert response.status == 404


async def test_a_bug_in_a_handler_costs_one_request(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    address = await serve()
    async with aiohttp.ClientSession() as client:
        async with client.get(f"http://{address}/crash") as response:
            assert (response.status, await response.json()) == (500, {"message": "INTERNAL_ERROR"})
        async with client.get(f"http://{address}/stats") as response:
            assert response.status == 200
    assert "ValueError: a bug" in caplog.text


async def test_requests_are_logged_as_nsq_does(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flintmq.http.site")
    address = await serve()
    async with aiohttp.ClientSession() as client:
        for path in ("/stats?format=json", "/nothing"):
            await client.get(f"http://{address}{path}")
        await client.post(f"http://{address}/pub", data=b"x")
        await client.options(f"http://{address}/ping")
        await client.get(f"http://{address}/ping/", allow_redirects=False)
    lines = [record.getMessage() for record in caplog.records if record.name == "flintmq.http.site"]
    assert len(lines) == 2
    duration = r"[\d.]+(ns|µs|ms|s)"
    assert re.fullmatch(rf"200 GET /stats\?format=json \(127\.0\.0\.1:\d+\) {duration}", lines[0])
    assert re.fullmatch(rf"404 GET /nothing \(127\.0\.0\.1:\d+\) {duration}", lines[1])


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0ns"),
        (581, "581ns"),
        (1433, "1.433µs"),
        (26_380, "26.38µs"),
        (2_415_764, "2.415764ms"),
        (1_500_000_000, "1.5s"),
        (62_000_000_001, "1m2.000000001s"),
    ],
)
def test_durations_in_the_log_are_gos(nanoseconds: int, text: str) -> None:
    assert web._elapsed(nanoseconds) == text


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1])
@pytest.mark.parametrize("in_chunks", [False, True])
async def test_a_body_has_a_limit(serve: Serve, size: int, in_chunks: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(size):
            yield b"x"

    address = await serve()
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://{address}/pub", data=chunks() if in_chunks else b"x" * size) as response,
    ):
        if size <= LIMIT:
            assert (response.status, (await response.json())["body"]) == (200, "x" * size)
        else:
            assert (response.status, await response.json()) == (413, {"message": "MSG_TOO_BIG"})


async def test_a_body_that_is_not_wanted_does_not_stop_the_answer(serve: Serve) -> None:
    """The client sends far more than is read, and still gets to see why it is refused."""
    head = request_of("POST", "/pub", f"Content-Length: {1 << 22}")
    answer = await ask(await serve(), head + bytes(1 << 22))
    assert status_of(answer) == 413


async def test_a_body_that_ends_too_early_is_an_error_only_of_its_own(serve: Serve) -> None:
    address = await serve()
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(request_of("POST", "/pub", "Content-Length: 5") + b"he")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert status_of(await ask(address, request_of("GET", "/ping"))) == 200


async def test_a_body_that_stalls_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(web, "LINGER_SECONDS", 0.05)
    answer = await ask(await serve(), request_of("POST", "/pub", "Content-Length: 5") + b"he")
    assert status_of(answer) == 500


async def test_a_client_that_waits_to_be_told_is_told(serve: Serve) -> None:
    host, _, port = (await serve()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request_of("POST", "/pub", "Content-Length: 2", "Expect: 100-continue"))
    async with asyncio.timeout(PATIENCE):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert status_of(await reader.read()) == 200
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_waits_to_be_told_is_refused_without_its_body(serve: Serve) -> None:
    request = request_of("POST", "/pub", "Content-Length: 200", "Expect: 100-continue")
    answer = await ask(await serve(), request.replace(b"Connection: close\r\n", b""))
    assert status_of(answer) == 413


async def test_a_body_is_not_expanded(serve: Serve) -> None:
    """NSQ takes a body as it is, whatever its Content-Encoding says."""
    answer = await ask(await serve(), request_of("POST", "/pub", "Content-Encoding: gzip", body=b"no gzip"))
    assert b'"body":"no gzip"' in answer


async def test_a_listener_may_refuse_everything(serve: Serve) -> None:
    address = await serve(refusal=Answer(b"no", web.TEXT, 403))
    for target in ("/ping", "/nothing", "/stats"):
        answer = await ask(address, request_of("GET", target))
        assert (status_of(answer), answer.endswith(b"\r\n\r\nno")) == (403, True)


async def test_a_unix_socket_will_do(tmp_path: Path) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "http.sock"))
    server = Server(Site(ROUTES))
    await server.listen(sock)
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "http.sock"))) as client,
        client.get("http://nsqd/ping") as response,
    ):
        assert await response.text() == "OK"
    await server.close()


async def test_closing_lets_a_request_end() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> str:
        started.set()
        await go_on.wait()
        return "done"

    sock = socket.create_server(("127.0.0.1", 0))
    server = Server(Site([Route("GET", "/slow", slow, READ)]))
    await server.listen(sock)
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    answer = asyncio.create_task(ask(address, request_of("GET", "/slow")))
    await started.wait()
    closing = asyncio.create_task(server.close(PATIENCE))
    await asyncio.sleep(0)
    go_on.set()
    assert (await answer).endswith(b"done")
    await closing
    with pytest.raises(OSError):
        await ask(address, request_of("GET", "/slow"))


# --- Tokens -----------------------------------------------------------------------------------------------------------

TOKENS = """\
# who may do what
reader  read
writer  publish
both    read,publish
eater   consume

chief   admin
"""


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(TOKENS)
    return path


@pytest.mark.parametrize(
    ("token", "rights"),
    [
        ("reader", {READ}),
        ("writer", {PUBLISH}),
        ("both", {READ, PUBLISH}),
        ("eater", {CONSUME}),
        ("chief", {READ, CONSUME, PUBLISH, ADMIN}),
    ],
)
def test_a_token_has_the_rights_of_its_line(token_file: Path, token: str, rights: set[str]) -> None:
    tokens = Tokens(str(token_file))
    for right in (READ, CONSUME, PUBLISH, ADMIN):
        if right in rights:
            tokens.check(f"Bearer {token}", right)
        else:
            with pytest.raises(HttpError) as raised:
                tokens.check(f"Bearer {token}", right)
            assert (raised.value.status, raised.value.code) == (403, "FORBIDDEN")
            assert raised.value.details == {"missing_right": right}


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer stranger", "Bearer reade", "Bearer readers", "reader", "Basic reader"],
)
def test_without_a_token_that_is_known_nothing_goes(token_file: Path, authorization: str | None) -> None:
    tokens = Tokens(str(token_file))
    with pytest.raises(HttpError) as raised:
        tokens.check(authorization, READ)
    assert (raised.value.status, raised.value.code) == (401, "UNAUTHORIZED")
    tokens.check(authorization, OPEN)


@pytest.mark.parametrize("line", ["secret", "secret root", "secret read,", "secret read publish", "secret read, admin"])
def test_a_line_that_is_wrong_is_named_and_not_shown(token_file: Path, line: str) -> None:
    token_file.write_text(f"# one\n{line}\n")
    with pytest.raises(OptionError, match="line 2") as raised:
        Tokens(str(token_file))
    assert "secret" not in str(raised.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        Tokens(str(tmp_path / "nothing"))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_warned_of(
    token_file: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    token_file.chmod(mode)
    Tokens(str(token_file))
    assert ("can be read by others" in caplog.text) == warned


def test_tokens_are_read_again_when_asked(token_file: Path) -> None:
    tokens = Tokens(str(token_file))
    told = []
    tokens.changed.append(lambda: told.append(True))
    token_file.write_text("fresh read\n")
    tokens.check("Bearer reader", READ)
    tokens.reload()
    tokens.check("Bearer fresh", READ)
    with pytest.raises(HttpError):
        tokens.check("Bearer reader", READ)
    assert told == [True]


def test_a_file_that_went_bad_leaves_the_tokens_as_they_were(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(str(token_file))
    token_file.write_text("fresh everything\n")
    tokens.reload()
    tokens.check("Bearer reader", READ)
    assert "the tokens stay as they were" in caplog.text


async def test_a_request_needs_its_token(serve: Serve, token_file: Path) -> None:
    address = await serve(Tokens(str(token_file)))

    async def asked(method: str, target: str, *headers: str) -> tuple[int, bytes]:
        answer = await ask(address, request_of(method, target, *headers))
        return status_of(answer), answer

    status, answer = await asked("GET", "/stats")
    assert status == 401
    assert b"\r\nWWW-Authenticate: Bearer\r\n" in answer
    assert answer.endswith(b'{"message":"UNAUTHORIZED"}')
    assert (await asked("GET", "/stats", "Authorization: Bearer nobody"))[0] == 401
    assert (await asked("GET", "/stats", "Authorization: Bearer reader"))[0] == 200
    assert (await asked("GET", "/stats", "authorization: bearer reader"))[0] == 200
    status, answer = await asked("POST", "/topic/delete", "Authorization: Bearer both")
    assert (status, answer.endswith(b'{"message":"FORBIDDEN","missing_right":"admin"}')) == (403, True)
    assert (await asked("POST", "/topic/delete", "Authorization: Bearer chief"))[0] == 200
    assert (await asked("GET", "/config/x", "Authorization: Bearer reader"))[0] == 200
    assert (await asked("PUT", "/config/x", "Authorization: Bearer reader"))[0] == 403
    # Whether the daemon is well is for everybody.
    assert (await asked("GET", "/ping"))[0] == 200


@pytest.mark.parametrize(
    "target",
    [
        "/topic/delete",
        "/topic/delete/",
        "//topic/delete",
        "/topic//delete",
        "/./topic/delete",
        "/ping/../topic/delete",
        "/topic/%64elete",
        "/topic%2Fdelete",
        "/%2e%2e/topic/delete",
        "/TOPIC/DELETE",
        "/topic/delete?x=/ping",
        "/topic/delete;/ping",
        "/topic/delete%00",
        "/topic/delete#/ping",
        "http://x/topic/delete",
        "/static/../topic/delete",
        "/topic\\delete",
    ],
)
async def test_no_spelling_of_a_path_gets_around_a_right(serve: Serve, token_file: Path, target: str) -> None:
    address = await serve(Tokens(str(token_file)))
    for token in ("reader", "writer", "both", ""):
        answer = await ask(address, request_of("POST", target, f"Authorization: Bearer {token}"))
        assert status_of(answer) in (307, 400, 401, 403, 404, 405), (token, answer)


# --- TLS --------------------------------------------------------------------------------------------------------------


class Certificates:
    """An authority, the server's certificate in files, and what clients need."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)
        self.cert, self.key = str(folder / "cert.pem"), str(folder / "key.pem")
        self.issue()

    def issue(self) -> None:
        issued = self.authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(self.key)
        issued.cert_chain_pems[0].write_to_path(self.cert)

    def client(self, authority: trustme.CA | None = None) -> ssl.SSLContext:
        """A client that trusts the server, with a certificate of its own by ``authority``."""
        context = ssl.create_default_context(cafile=self.ca)
        if authority is not None:
            authority.issue_cert("client@example.com").configure_cert(context)
        return context


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def ping(address: str, context: ssl.SSLContext) -> str:
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"https://{address}/ping", ssl=context, timeout=aiohttp.ClientTimeout(PATIENCE)) as response,
    ):
        return await response.text()


async def test_https_is_served(serve: Serve, certificates: Certificates) -> None:
    address = await serve(tls=server_tls(certificates.cert, certificates.key))
    assert await ping(address, certificates.client()) == "OK"


@pytest.mark.parametrize("policy", ["require", "require-verify"])
async def test_client_certificates_can_be_required(serve: Serve, certificates: Certificates, policy: str) -> None:
    tls = server_tls(certificates.cert, certificates.key, client_ca=certificates.ca, policy=policy)
    address = await serve(tls=tls)
    assert await ping(address, certificates.client(certificates.authority)) == "OK"
    for stranger in (None, trustme.CA()):
        with pytest.raises((aiohttp.ClientError, OSError)):
            await ping(address, certificates.client(stranger))


def test_without_an_authority_clients_are_checked_against_the_systems(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    context = server_tls(certificates.cert, certificates.key, policy="require")
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert "an authority that this system trusts" in caplog.text


@pytest.mark.parametrize(
    ("word", "version"),
    [
        ("tls1.0", "TLSv1"),
        ("tls1.1", "TLSv1_1"),
        ("tls1.2", "TLSv1_2"),
        ("tls1.3", "TLSv1_3"),
    ],
)
def test_the_oldest_version_is_as_asked(certificates: Certificates, word: str, version: str) -> None:
    context = server_tls(certificates.cert, certificates.key, min_version=word)
    assert context.minimum_version.name == version


@pytest.mark.parametrize("broken", ["cert", "key", "ca"])
def test_files_that_are_no_good_are_named_as_the_reason(certificates: Certificates, broken: str) -> None:
    Path(getattr(certificates, broken)).write_text("nonsense")
    with pytest.raises(OptionError, match="failed to build TLS config"):
        server_tls(certificates.cert, certificates.key, client_ca=certificates.ca, policy="require-verify")


FAILING_IMPORT = """
import asyncio, errno, sys
from flintmq.http.imports import load

failing, opened = True, 0

def hook(event, arguments):
    global opened
    if failing and event == "open" and "site-packages" in str(arguments[0]):
        opened += 1
        if opened >= int(sys.argv[1]):
            raise OSError(errno.EMFILE, "Too many open files")

async def attempts():
    global failing
    for _ in range(2):
        try:
            await load("aiohttp.web")
        except (OSError, ImportError):
            print("failed", end=" ")
            failing = False
    import aiohttp.web
    print(aiohttp.hdrs.HOST, aiohttp.web_protocol.RequestHandler.__name__)

sys.addaudithook(hook)
asyncio.run(attempts())
"""


@pytest.mark.parametrize("count", [1, 7, 30, 60])
def test_an_import_that_failed_can_be_tried_again(count: int) -> None:
    command = [sys.executable, "-c", FAILING_IMPORT, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "failed Host RequestHandler\n"


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    program = "import sys, flintmq.http.site, flintmq.http.server; print('aiohttp' in sys.modules)"
    paths = os.pathsep.join(filter(None, [str(Path(web.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    answer = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert answer.stdout == "False\n", answer.stderr


async def test_a_module_and_its_package_can_be_loaded_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python itself would begin with the module, and find half of its package."""
    package = tmp_path / "two_at_once"
    package.mkdir()
    (package / "__init__.py").write_text("import time\ntime.sleep(0.1)\nis_whole = True\n")
    (package / "web.py").write_text("import sys\nfound = vars(sys.modules['two_at_once']).get('is_whole')\n")
    monkeypatch.syspath_prepend(tmp_path)
    await asyncio.gather(load("two_at_once"), load("two_at_once.web"))
    assert sys.modules["two_at_once.web"].found is True


async def test_modules_of_a_package_that_failed_are_known_to_it_after_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "second_time_lucky"
    package.mkdir()
    (package / "__init__.py").write_text("import second_time_lucky.whole\nimport second_time_lucky.part\n")
    (package / "whole.py").write_text("name = 'whole'\n")
    (package / "part.py").write_text("import pathlib\npathlib.Path(__file__).with_name('there').read_bytes()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OSError, match="there"):
        await load("second_time_lucky")
    (package / "there").touch()
    await load("second_time_lucky")
    assert sys.modules["second_time_lucky"].whole.name == "whole"
