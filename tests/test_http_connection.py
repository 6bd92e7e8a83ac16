"""A connection of the general HTTP server, spoken to without a socket: any split of its input, slow ends, words."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flintmq.http import connection as module
from flintmq.http import site as web
from flintmq.http.connection import BODY_AHEAD, Connection, Headers
from flintmq.http.server import Server
from flintmq.http.site import OPEN, Answer, Request, Route, Site
from support.fakes import until

SOME_BYTES = 1 << 16


class Wire(asyncio.Transport):
    """The transport of a connection, and its client's side: what was written, whether it is read from."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.written = bytearray()
        self.reading = True
        self.ended = False
        self.closed = False
        #: Tells the connection to stop writing once it has written anything.
        self.is_slow = False
        self.unsent = 0
        connection.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 5000) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.ended, "nothing is written behind the end"
        self.written += data
        if self.is_slow:
            self.unsent += len(data)
            self.connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def take(self) -> None:
        """The client has read all there is, and wants more."""
        self.unsent = 0
        self.connection.resume_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    abort = close

    async def send(self, data: bytes) -> None:
        """Hand over what a client sends, as far as the connection is read from."""
        await until(lambda: self.reading or self.closed)
        if not self.closed:
            self.connection.data_received(data)

    async def answers(self, count: int) -> list[tuple[int, bytes]]:
        """Wait for so many answers: status and body."""
        await until(lambda: len(self.parsed()) >= count)
        return self.parsed()

    def parsed(self) -> list[tuple[int, bytes]]:
        found, rest = [], bytes(self.written)
        while rest:
            head, end, rest = rest.partition(b"\r\n\r\n")
            status = re.match(rb"HTTP/1\.[01] (\d{3}) ", head)
            assert status is not None, head
            length = re.search(rb"\r\nContent-Length: (\d+)", head)
            size = int(length[1]) if length else len(rest)
            if not end or len(rest) < size:
                break
            found.append((int(status[1]), rest[:size]))
            rest = rest[size:]
        return found


async def _echo(request: Request) -> Any:
    return Answer(bytes(await request.body(1 << 22)), web.TEXT)


async def _ignore(_: Request) -> Any:
    return "ignored"


#: Set by a test that wants a handler to wait before it reads.
go_on = asyncio.Event()


async def _slow(request: Request) -> Any:
    await go_on.wait()
    return str(len(await request.body(1 << 24)))


async def _unchanged(_: Request) -> Any:
    return Answer(b"never sent", status=304)


async def _pieces(_: Request) -> Any:
    return Answer(content_type="a/b", pieces=Endless())


class Endless:
    closed = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b"piece"
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        Endless.closed += 1


ROUTES = [
    Route("POST", "/echo", _echo, OPEN, unlogged=True),
    Route("POST", "/ignore", _ignore, OPEN, unlogged=True),
    Route("POST", "/slow", _slow, OPEN, unlogged=True),
    Route("GET", "/ignore", _ignore, OPEN, unlogged=True),
    Route("GET", "/unchanged", _unchanged, OPEN, unlogged=True),
    Route("GET", "/pieces", _pieces, OPEN, unlogged=True),
]


@contextlib.asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[Wire]:
    global go_on
    go_on = asyncio.Event()
    server = Server(Site(ROUTES), **options)
    wire = Wire(server.protocol())
    yield wire
    go_on.set()
    await server.close(0.01)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not server.connections


def request(target: str, body: bytes | None = None, chunks: list[int] | None = None, *headers: str) -> bytes:
    """A POST with a body, in chunks of these sizes if there are any; else a GET."""
    lines = [f"{'GET' if body is None else 'POST'} {target} HTTP/1.1", "Host: localhost", *headers]
    if body is None:
        return "\r\n".join([*lines, "", ""]).encode()
    if not chunks:
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
    text = "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode()
    at = 0
    for size in chunks:
        piece = body[at : at + size]
        at += size
        if piece:
            text += b"%x\r\n%b\r\n" % (len(piece), piece)
    rest = body[at:]
    return text + (b"%X;x=y\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\nTrailer: x\r\n\r\n"


# --- Any split --------------------------------------------------------------------------------------------------------

sizes = st.sampled_from([0, 1, 2, 7, 100, 2047, 2048, 2049, 5_000, BODY_AHEAD - 1, BODY_AHEAD + 1, 300_000])
requests = st.lists(
    st.tuples(st.sampled_from(["/echo", "/ignore"]), sizes, st.lists(st.integers(1, 3_000), max_size=40)), max_size=6
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(plan=requests, seed=st.integers(0, 1 << 32), largest=st.sampled_from([1, 3, 50, 4_096, SOME_BYTES, 1 << 20]))
def test_any_split_of_requests_gives_the_same_answers(
    plan: list[tuple[str, int, list[int]]], seed: int, largest: int
) -> None:
    chance = random.Random(seed)
    expected, stream = [], b""
    for target, size, chunks in plan:
        body = chance.randbytes(min(size, largest * 2_000))
        stream += request(target, body, chunks)
        expected.append((200, body if target == "/echo" else b"ignored"))

    async def scenario() -> None:
        async with connected() as wire:
            at = 0
            while at < len(stream):
                step = chance.randint(1, largest)
                await wire.send(stream[at : at + step])
                at += step
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
            assert await wire.answers(len(expected)) == expected
            assert not wire.closed

    asyncio.run(scenario())


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    before=st.sampled_from([b"", request("/echo", b"abc"), request("/ignore", b"x" * 9, [4])]),
    garbage=st.one_of(
        st.binary(min_size=1, max_size=300),
        st.text("GETPOS /HT1.0:\r\n0123456789abcdef;", min_size=1, max_size=200).map(str.encode),
        st.text("0123456789abcdef;\r\n x", min_size=1, max_size=200).map(
            lambda text: request("/echo", b"", [])[:-21] + b"Transfer-Encoding: chunked\r\n\r\n" + text.encode()
        ),
    ),
    cut=st.integers(0, 400),
    end=st.booleans(),
)
def test_no_bytes_are_an_unexpected_error(before: bytes, garbage: bytes, cut: int, end: bool) -> None:
    raised: list[dict[str, Any]] = []
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        async with connected() as wire:
            stream = before + garbage
            for piece in (stream[:cut], stream[cut:]):
                if piece:
                    wire.connection.data_received(piece)
                    await asyncio.sleep(0)
            if end and not wire.closed and not wire.connection.eof_received():
                wire.close()
            for _ in range(10):
                await asyncio.sleep(0)
            assert wire.closed or wire.ended or not end, "who says no more is let go"
            if before:
                assert wire.parsed()[0][0] == 200

    logging.getLogger("flintmq").addHandler(handler)
    try:
        asyncio.run(scenario())
    finally:
        logging.getLogger("flintmq").removeHandler(handler)
    assert raised == []
    assert [record for record in logged if record.levelno >= logging.ERROR] == []


# --- Slow ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[], [50_000] * 100])
async def test_no_more_of_a_body_is_read_than_its_handler_can_soon_take(chunks: list[int]) -> None:
    size = 1 << 21
    stream = request("/slow", bytes(size), chunks)
    async with connected() as wire:
        sent = 0
        while wire.reading and sent < len(stream):
            wire.connection.data_received(stream[sent : sent + SOME_BYTES])
            sent += SOME_BYTES
            for _ in range(40):
                await asyncio.sleep(0)
        assert sent < BODY_AHEAD + 3 * SOME_BYTES
        go_on.set()
        for at in range(sent, len(stream), SOME_BYTES):
            await wire.send(stream[at : at + SOME_BYTES])
        assert await wire.answers(1) == [(200, str(size).encode())]


async def test_a_client_that_takes_no_answer_is_not_read_from() -> None:
    async with connected() as wire:
        wire.is_slow = True
        wire.connection.data_received(request("/ignore") * 50)
        await wire.answers(1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (len(wire.parsed()), wire.reading) == (1, False)
        wire.is_slow = False
        wire.take()
        assert await wire.answers(50) == [(200, b"ignored")] * 50


@pytest.mark.parametrize("target", ["/echo", "/ignore"])
@pytest.mark.parametrize(
    "chunk", [b"zz\r\n", b"1\nx\r\n", b"1\r\nxx\r\n", b"0\r\nno trailer\r\n\r\n", b"0\r\nX: a\n\n"]
)
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_request_whose_body_is_none_gets_one_answer_and_it_is_its_own(
    target: str, chunk: bytes, at_once: bool
) -> None:
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    async with connected() as wire:
        text = head + chunk + request("/ignore") + b"\r\n\r\n"
        for piece in (text,) if at_once else (head, chunk, text[len(head + chunk) :]):
            wire.connection.data_received(piece)
            if not at_once:
                await asyncio.sleep(0)
        answer = (500, b'{"message":"INTERNAL_ERROR"}') if target == "/echo" else (200, b"ignored")
        assert await wire.answers(1) == [answer]
        await until(lambda: wire.closed or wire.ended)
        assert wire.parsed() == [answer]


async def test_a_bad_chunk_does_not_write_into_an_answer_in_pieces() -> None:
    async with connected() as wire:
        await wire.send(b"GET /pieces HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await until(lambda: b"piece" in wire.written)
        wire.connection.data_received(b"zz\r\n")
        for _ in range(5):
            await asyncio.sleep(0)
        assert wire.written.count(b"HTTP/1.") == 1


@pytest.mark.parametrize("chunks", [[], [3]])
async def test_a_client_that_was_not_told_to_send_its_body_is_told_that_this_is_the_end(chunks: list[int]) -> None:
    async with connected() as wire:
        text = request("/ignore", b"0123456789", chunks, "Expect: 100-continue")
        await wire.send(text[: text.index(b"\r\n\r\n") + 4])
        assert await wire.answers(1) == [(200, b"ignored")]
        assert b"Connection: close" in wire.written and wire.ended


async def test_a_half_closed_client_that_goes_on_reading_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HALF_OPEN_SECONDS", 0.02)
    async with connected() as wire:
        await wire.send(request("/pieces"))
        assert wire.connection.eof_received()
        for _ in range(10):
            before = len(wire.written)
            await asyncio.sleep(0.01)
            assert len(wire.written) > before and not wire.closed
        wire.is_slow = True
        await until(lambda: wire.closed)


async def test_a_slow_reader_has_time_as_long_as_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKE_SECONDS", 0.02)
    async with connected() as wire:
        wire.is_slow = True
        await wire.send(request("/pieces"))
        for _ in range(10):
            await asyncio.sleep(0.01)
            wire.unsent -= 1
            assert not wire.closed
        await until(lambda: wire.closed)


@pytest.mark.parametrize("chunks", [[], [3]])
async def test_a_body_that_is_cut_off_is_an_error_at_once(chunks: list[int]) -> None:
    async with connected() as wire:
        wire.connection.data_received(request("/echo", b"0123456789", chunks)[:-9])
        await asyncio.sleep(0)
        assert wire.connection.eof_received()
        assert await wire.answers(1) == [(500, b'{"message":"INTERNAL_ERROR"}')]


@pytest.mark.parametrize("behind", [b"", b"GET /ig", request("/ignore"), request("/ignore") + b"GET"])
async def test_a_client_that_says_no_more_is_let_go_after_its_answers(behind: bytes) -> None:
    async with connected() as wire:
        wire.connection.data_received(request("/slow", b"abc") + behind)
        await asyncio.sleep(0)
        assert wire.connection.eof_received()
        assert wire.parsed() == []
        go_on.set()
        assert await wire.answers(1 + behind.count(b"/ignore")) == [(200, b"3")] + [(200, b"ignored")] * (
            behind.count(b"/ignore")
        )
        # At once, and not after HALF_OPEN_SECONDS.
        for _ in range(5):
            await asyncio.sleep(0)
        assert wire.closed


async def test_what_nobody_wants_of_a_body_is_read_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "LINGER_SECONDS", 0.05)
    async with connected() as wire:
        text = request("/ignore", bytes(300_000))
        await wire.send(text[:1_000])
        assert await wire.answers(1) == [(200, b"ignored")]
        for at in range(1_000, len(text), SOME_BYTES):
            await wire.send(text[at : at + SOME_BYTES])
        await wire.send(request("/ignore"))
        assert await wire.answers(2) == [(200, b"ignored")] * 2
        # The rest of this one never comes.
        await wire.send(text[:1_000])
        await until(lambda: wire.closed)


async def test_an_answer_in_pieces_ends_with_its_client() -> None:
    before = Endless.closed
    async with connected() as wire:
        await wire.send(request("/pieces"))
        await until(lambda: wire.written.count(b"5\r\npiece\r\n") >= 3)
        wire.close()
        await until(lambda: Endless.closed == before + 1)


async def test_an_answer_that_is_not_taken_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKE_SECONDS", 0.05)
    before = Endless.closed
    async with connected() as wire:
        wire.is_slow = True
        await wire.send(request("/pieces"))
        await until(lambda: wire.closed)
        assert Endless.closed == before + 1


@pytest.mark.parametrize("sent", [b"", b"GET /ig", request("/ignore"), request("/ignore") + b"GET"])
async def test_each_step_of_a_client_has_its_time(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.05)
    async with connected(idle=0.05, head=0.05) as wire:
        if sent:
            await wire.send(sent)
        await until(lambda: wire.closed)
        assert len(wire.parsed()) == sent.count(b"/ignore")


# --- Words ------------------------------------------------------------------------------------------------------------


async def test_an_answer_to_head_and_one_without_a_change_have_no_body() -> None:
    async with connected() as wire:
        await wire.send(b"HEAD /ignore HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: wire.written.endswith(b"\r\n\r\n"))
        assert b" 405 " in wire.written and b"Content-Length: 32" in wire.written
        wire.written.clear()
        await wire.send(request("/unchanged"))
        await until(lambda: wire.written.endswith(b"\r\n\r\n"))
        assert b" 304 " in wire.written and b"Content-Length" not in wire.written
        wire.written.clear()
        await wire.send(request("/ignore"))
        assert await wire.answers(1) == [(200, b"ignored")]


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        (b"HTTP/1.0\r\n", False),
        (b"HTTP/1.0\r\nConnection: keep-alive\r\n", True),
        (b"HTTP/1.1\r\nHost: x\r\n", True),
        (b"HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", False),
        (b"HTTP/1.1\r\nHost: x\r\nConnection: Keep-Alive, CLOSE\r\n", False),
    ],
)
async def test_a_connection_goes_on_as_its_client_wishes(words: bytes, stays: bool) -> None:
    async with connected() as wire:
        await wire.send(b"GET /ignore " + words + b"\r\n")
        await wire.answers(1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert wire.closed is not stays
        head = bytes(wire.written)
        assert head.startswith(b"HTTP/1.0" if b"1.0" in words else b"HTTP/1.1")
        assert (b"Connection: close" in head) == (not stays and b"1.1" in words)
        assert (b"Connection: keep-alive" in head) == (stays and b"1.0" in words)


def test_headers_are_found_in_any_case_and_in_order() -> None:
    headers = Headers([b"X-One: 1", b"x-one:2", b"Name:  caf\xc3\xa9\xff "])
    assert headers["X-ONE"] == "1"
    assert headers.getall("X-One") == ["1", "2"]
    assert headers.get("name") == "caf\u00e9\udcff"
    assert "nothing" not in headers and headers.getall("nothing") == []
    assert len(headers) == 2


@pytest.mark.parametrize("text", ["a\r\nSet-Cookie: x", "a\nb"])
def test_a_header_of_an_answer_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="line end"):
        web.render(Answer(headers={"Location": text}), "")
