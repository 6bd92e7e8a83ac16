"""Odd HTTP requests get the answers of Go's server: status, headers, body, and whether the connection is kept.

One generator makes the requests. With the Go daemon at hand both are asked and compared; without it, what Go's server
said is written down for the kinds of requests that once got another answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flintmq.broker.daemon import Broker
from flintmq.lookup.daemon import Lookupd
from support.http_client import HttpClient
from support.peers import GO_NSQD, NO_GO_NSQD

REQUESTS = 400
LAST = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_DATE = re.compile(rb"Date: [^\r]+")
_TIME = re.compile(rb'"start_time":[0-9]+')

Parsed = tuple[bytes, tuple[bytes, ...], bytes]


async def conversation(address: str, request: bytes) -> list[Parsed]:
    """The answers to a request and to a /ping behind it, headers in the order of their names."""
    async with HttpClient.connect(address) as client:
        client.send(request + LAST)
        text = _TIME.sub(b"", _DATE.sub(b"Date: now", await client.ended()))
    answers = []
    for one in text.split(b"HTTP/1.")[1:]:
        head, _, body = one.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        answers.append((status, tuple(sorted(line.lower() for line in lines)), body))
    return answers


# --- The generator ----------------------------------------------------------------------------------------------------

METHODS = ("GET", "GET", "POST", "POST", "PUT", "HEAD", "DELETE", "OPTIONS", "PATCH", "TRACE", "FOO", "get", "M-SEARCH")
PATHS = (
    "/ping",
    "/pub?topic=t",
    "/mpub?topic=t",
    "/mpub?topic=t&binary=true",
    "/topic/create?topic=t",
    "/config/log_level",
    "/config/ü",
    "/none",
    "/",
    "/PING",
    "/ping/",
    "//ping",
    "/p%69ng",
    "/%zz",
    "/pub?%zz",
    "/pub?topic=t;x",
    "/pub?topic=ü",
    "/pïng",
    "/ping?x=ü",
    "/ping#x",
    "http://h/ping",
    "http://h",
    "ping",
    "/pub?topic=" + "t" * 65,
    "/pub?" + "&".join(f"a{number}=1" for number in range(300)),
)
VERSIONS = ("1.1", "1.1", "1.1", "1.0", "1.2", "1.9")
HEADERS = (
    "Connection: close",
    "Connection: keep-alive",
    "Connection: Upgrade\r\nUpgrade: websocket",
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x",
    "Host: 127.0.0.1",
    "X : a",
    "X: a\x01b",
    "X: ü",
    "X:",
    "X",
    ": x",
    "Accept: */*\r\nUser-Agent: odd",
    "Expect: tea",
)
HOSTS = (
    "Host: localhost",
    "Host: localhost",
    "Host: localhost",
    "Host: localhost",
    "Host:",
    "Host: a b",
    "Host: a/b",
    "Host: [::1]:80",
    "",
)
BODIES = (None, None, b"", b"x", b"a\nb\n\nc", b"\0\0\0\1\0\0\0\1x", b"\0\0\0\1\0\xff\xff\xffx", b"\r\n\r\n")


def request_of(chance: random.Random) -> bytes:
    """A request that is whole, however odd."""
    lines = [f"{chance.choice(METHODS)} {chance.choice(PATHS)} HTTP/{chance.choice(VERSIONS)}", chance.choice(HOSTS)]
    lines += chance.sample(HEADERS, chance.choice((0, 0, 0, 1, 1, 2)))
    body = chance.choice(BODIES)
    sent = body or b""
    if body is not None:
        form = chance.choice(("length", "length", "chunked", "gzip", "two lengths"))
        # A request behind a chunked one that asks for the end is not looked for, and refused.
        if form == "chunked" and "HTTP/1.0" not in lines[0] and "Connection: close" not in lines:
            lines.append("Transfer-Encoding: Chunked")
            sent = (b"%x;ext=1\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\nTrailer: x\r\n\r\n"
        elif form == "gzip" and "HTTP/1.0" not in lines[0]:
            lines.append("Transfer-Encoding: gzip")
        elif form == "two lengths":
            lines += [f"Content-Length: {len(body)}", f"Content-Length: {len(body) + 1}"]
        else:
            lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([line for line in lines if line] + ["", ""]).encode() + sent


# --- With the Go daemon -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def go_daemon(folder: Path) -> AsyncIterator[str]:
    """Run the Go daemon; its HTTP address."""
    process = await asyncio.create_subprocess_exec(
        GO_NSQD,
        f"--data-path={folder}",
        "--tcp-address=127.0.0.1:0",
        "--http-address=127.0.0.1:0",
        "--log-level=info",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            while b"HTTP: listening on " not in (line := await process.stderr.readline()):
                assert line, "it did not start"
        rest = asyncio.create_task(process.stderr.read())
        yield line.split()[-1].decode()
        rest.cancel()
    finally:
        process.kill()
        await process.wait()


@pytest.mark.skipif(bool(NO_GO_NSQD), reason=NO_GO_NSQD)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3))
async def test_odd_requests_get_the_answers_of_the_go_daemon(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    differences = []
    (tmp_path / "go").mkdir()
    (tmp_path / "ours").mkdir()
    async with go_daemon(tmp_path / "go") as theirs:
        async with Broker(data_path=tmp_path / "ours", http_address="127.0.0.1:0") as broker:
            for _ in range(REQUESTS):
                request = request_of(chance)
                expected, answered = await asyncio.gather(
                    conversation(theirs, request), conversation(broker.http_address, request)
                )
                if expected != answered:
                    differences.append(f"{request!r}\n  Go:   {expected}\n  ours: {answered}")
    assert not differences, "\n".join(differences)


# --- Without it -------------------------------------------------------------------------------------------------------


def of(line: str, *headers: str, host: bool = True, body: bytes = b"") -> bytes:
    return "\r\n".join([line, *(["Host: localhost"] if host else []), *headers, "", ""]).encode() + body


#: Requests, the status that Go's server answers, and whether it takes another request after that.
RECORDED = {
    "an unknown method": (of("FOO /ping HTTP/1.1"), 405, True),
    "an unknown method and path": (of("FOO /none HTTP/1.1"), 404, True),
    "a method in small letters": (of("get /ping HTTP/1.1"), 405, True),
    "a proxy's request": (of("CONNECT h:80 HTTP/1.1"), 404, True),
    "a target that is no ASCII": (of("GET /pïng HTTP/1.1"), 404, True),
    "a query that is no ASCII": (of("GET /ping?x=ü HTTP/1.1"), 200, True),
    "a later version": (of("GET /ping HTTP/1.2"), 200, True),
    "a later version without a host": (of("GET /ping HTTP/1.2", host=False), 400, False),
    "two lengths": (of("GET /ping HTTP/1.1", "Content-Length: 1", "Content-Length: 2", body=b"x"), 400, False),
    "another encoding": (of("GET /ping HTTP/1.1", "Transfer-Encoding: gzip"), 501, False),
    "two encodings": (of("GET /ping HTTP/1.1", *["Transfer-Encoding: chunked"] * 2), 501, False),
    "the wish for another protocol": (of("GET /ping HTTP/1.1", "Connection: Upgrade", "Upgrade: x"), 200, True),
    "two hosts": (of("GET /ping HTTP/1.1", "Host: 127.0.0.1"), 400, False),
    "a host that is none": (of("GET /ping HTTP/1.1", "Host: a b", host=False), 400, False),
    "a space before the colon": (of("GET /ping HTTP/1.1", "X : a"), 400, False),
    "a control character": (of("GET /ping HTTP/1.1", "X: a\x01b"), 400, False),
    "a path that is none": (of("GET ping HTTP/1.1"), 400, False),
    "a bad escape": (of("GET /%zz HTTP/1.1"), 400, False),
    "a last request with another behind it": (of("GET /none HTTP/1.1", "Connection: close"), 404, False),
}
#: Requests that are refused although Go's server takes them: a proxy in front may read them in another way.
STRICTER = {
    "a length and an encoding": of(
        "GET /ping HTTP/1.1", "Content-Length: 3", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"
    ),
    "an encoding and a length": of(
        "GET /ping HTTP/1.1", "Transfer-Encoding: chunked", "Content-Length: 3", body=b"0\r\n\r\n"
    ),
    "an encoding in HTTP/1.0": of("GET /ping HTTP/1.0", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "the same length twice": of("GET /ping HTTP/1.1", *["Content-Length: 1"] * 2, body=b"x"),
    "a folded line": of("GET /ping HTTP/1.1", "X: a", " b"),
    "no path": of("GET * HTTP/1.1"),
}


@pytest.fixture(params=["nsqd", "nsqlookupd"])
async def address(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "nsqd":
        async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
            yield broker.http_address
    else:
        async with Lookupd() as lookupd:
            yield lookupd.http_address


@pytest.mark.parametrize("name", RECORDED)
async def test_an_odd_request_is_answered_as_by_gos_server(address: str, name: str) -> None:
    request, status, is_kept = RECORDED[name]
    answers = await conversation(address, request)
    assert int(answers[0][0].split()[1]) == status
    assert len(answers) == (2 if is_kept else 1), answers
    if not is_kept:
        assert b"connection: close" in answers[0][1]


@pytest.mark.parametrize("name", STRICTER)
async def test_what_could_be_read_in_two_ways_is_refused(address: str, name: str) -> None:
    expected = (b"1 400 Bad Request", (b"connection: close", b"content-type: text/plain; charset=utf-8"))
    assert await conversation(address, STRICTER[name]) == [(*expected, b"400 Bad Request")]


@pytest.mark.parametrize("body", [b"", b"x"])
async def test_the_connection_is_kept_after_a_413_whose_body_was_read(tmp_path: Path, body: bytes) -> None:
    request = of("PUT /config/log_level HTTP/1.1", f"Content-Length: {len(body)}", body=body)
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
        answers = await conversation(broker.http_address, request)
    assert [answer[0][:5] for answer in answers] == [b"1 413" if not body else b"1 400", b"1 200"]
