"""Requests of a client that has sent all it will, and heads that are meant to be expensive: nsqd and nsqlookupd."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.http.request_heads import read_head
from flintmq.http import connection, heads
from flintmq.http.connection import Headers
from flintmq.http.heads import LONGEST_HEAD, BadHead, Body, end_of_head, looked_at, tidy
from flintmq.lookup.daemon import Lookupd
from support.http_client import HttpClient, request_of

#: Longer than any test waits: nothing here ends by it.
NEVER = 3600.0
#: Seconds of CPU that one head may cost: ten times what it does.
SECONDS = 0.15


@pytest.fixture(params=["nsqd", "nsqlookupd"])
async def address(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "nsqd":
        async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
            yield broker.http_address
    else:
        async with Lookupd() as lookupd:
            yield lookupd.http_address


# --- The end of a client's input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("path", ["/ping", "/info", "/debug/nothing"])
async def test_an_answered_client_that_says_no_more_is_let_go_at_once(
    address: str, path: str, count: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HALF_OPEN_SECONDS", NEVER)
    async with HttpClient.connect(address) as client, asyncio.timeout(20):
        client.send(request_of("GET", path) * count)
        # The end comes before the request, in the middle of it, or after its answer.
        for _ in range(turns):
            await asyncio.sleep(0)
        client.writer.write_eof()
        answers = await client.ended()
    assert answers.count(b"HTTP/1.1 ") == count


async def test_a_client_that_says_no_more_after_its_answer_is_let_go_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HALF_OPEN_SECONDS", NEVER)
    async with HttpClient.connect(address) as client, asyncio.timeout(20):
        for _ in range(3):
            assert (await client.get("/info")).status == 200
        client.writer.write_eof()
        assert await client.ended() == b""


async def test_many_requests_in_one_go_are_all_answered(address: str) -> None:
    async with HttpClient.connect(address) as client, asyncio.timeout(30):
        client.send(request_of("GET", "/info") * 500)
        for _ in range(500):
            assert (await client.answer()).status == 200


# --- The cost of a head -----------------------------------------------------------------------------------------------


def filled(line: Callable[[int], bytes], end: bytes = b"\n", size: int = LONGEST_HEAD) -> bytes:
    """A head as long as it may be, of lines of one kind."""
    made = [b"GET /ping HTTP/1.1", b"Host: localhost"]
    left = size - sum(len(one) + len(end) for one in made) - len(end)
    for number in itertools.count():
        left -= len(line(number)) + len(end)
        if left < 0:
            return end.join([*made, b"", b""])
        made.append(line(number))
    raise AssertionError


def half_of_each(number: int) -> bytes:
    return b"connection:%x" % number if number < 2300 else b"a:"


LINES: dict[str, Callable[[int], bytes]] = {
    "different connections": lambda number: b"connection:%x" % number,
    "connections and others": half_of_each,
    "equal connections": lambda number: b"Connection: close",
    "names of a byte": lambda number: b"a:",
    "different names": lambda number: b"x%x:" % number,
    "upgrades": lambda number: b"upgrade:%x" % number,
    "names with a blank": lambda number: b"connection :%x" % number,
    "expectations": lambda number: b"expect:%x" % number,
    "authorizations": lambda number: b"authorization:%x" % number,
    "hosts": lambda number: b"host:%x" % number,
    "lengths": lambda number: b"content-length:%d" % number,
    "encodings": lambda number: b"transfer-encoding:%d" % number,
}


def cheapest(work: Callable[[], object]) -> float:
    costs = []
    for _ in range(3):
        started = time.thread_time()
        work()
        costs.append(time.thread_time() - started)
    return min(costs)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", LINES)
def test_a_head_of_many_lines_costs_as_much_as_its_bytes(name: str, end: bytes) -> None:
    head = filled(LINES[name], end)

    def work() -> None:
        try:
            body = end_of_head(head, 0, len(head))
            text = tidy(head[:body])
        except BadHead:
            return
        Body(Headers(text.split(b"\r\n")[1:-2]), old=False)
        read_head(text)

    assert cheapest(work) < SECONDS


async def test_one_head_does_not_hold_up_the_others(address: str) -> None:
    head = filled(half_of_each, size=60_000)
    async with HttpClient.connect(address) as client:
        await client.get("/info")
    costs = []
    for _ in range(3):
        async with HttpClient.connect(address) as client, asyncio.timeout(30):
            # Client and server are in this thread.
            started = time.thread_time()
            client.send(head)
            assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.")
            costs.append(time.thread_time() - started)
    assert min(costs) < SECONDS


BEGINNINGS = [
    *(filled(line, end, 300) for line in LINES.values() for end in (b"\n", b"\r\n")),
    b"GET /" + b"a" * 200 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /" + b"a" * 200 + b" HTTP/1.1\nHost: localhost\n\n",
    b"GET /" + b"a" * 60 + b"\x00" + b"a" * 60,
    b"GET /" + b"a" * 60 + b" HTTQ/1.1\r\n",
    b"GET /" + b"a" * 60 + b" HTTP/1.1 x\r\n",
    b"GET /" + b"a" * 60 + b" HTTP/1.1\rx\r\n",
    b"GET /" + b"a" * 60 + b"  HTTP/1.1\r\n",
    b"GET /" + b"a" * 60 + b" HTTP/2.0\r\nHost: localhost\r\n\r\n",
    b"x" * 32 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"x" * 32 + b" /" + b"a" * 60 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"x" * 33 + b" / HTTP/1.1\r\n",
    b"x" * 31 + b"  / HTTP/1.1\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\n\r\n\n",
    b"GET / HTTP/1.1\r\nA: b\n\r\n",
    b"G" * 100,
]


def outcome(data: bytes, looked: int = 0) -> int | bytes:
    try:
        return end_of_head(data, 0, len(data), looked)
    except BadHead as exc:
        return exc.answer


@pytest.mark.parametrize("seed", range(20))
def test_a_head_that_trickles_in_is_read_as_in_one_go(seed: int) -> None:
    random_numbers = random.Random(seed)
    for data in BEGINNINGS:
        most = random_numbers.choice((1, 2, 5, 20, 100))
        looked = at = 0
        while at < len(data):
            at = min(len(data), at + random_numbers.randint(1, most))
            expected = outcome(data[:at])
            assert outcome(data[:at], looked) == expected, (data, at, looked)
            if expected != -1:
                break
            looked = looked_at(at)


class Counting:
    """A pattern that adds up the bytes it is given."""

    def __init__(self, pattern: object) -> None:
        self.pattern = pattern
        self.seen = 0

    def fullmatch(self, data: bytes, start: int, stop: int) -> object:
        self.seen += stop - start
        return self.pattern.fullmatch(data, start, stop)  # type: ignore[attr-defined]


@pytest.mark.parametrize("parts", [(60_000, 0), (20, 20_000), (30_000, 20_000)])
async def test_each_byte_of_a_long_head_is_matched_once(
    address: str, parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target, and the headers behind it, arrive in small packets."""
    counting = []
    for name in ("_BEGINNING", "_TARGET_ON", "_REQUEST_LINE"):
        counting.append(Counting(getattr(heads, name)))
        monkeypatch.setattr(heads, name, counting[-1])
    target, header = parts
    data = b"GET /" + b"a" * target + b" HTTP/1.1\r\nHost: localhost\r\nX: " + b"b" * header + b"\r\n\r\n"
    async with HttpClient.connect(address) as client, asyncio.timeout(60):
        for at in range(0, len(data), 200):
            client.send(data[at : at + 200])
            await client.writer.drain()
            for _ in range(4):
                await asyncio.sleep(0)
        assert (await client.answer()).status == 404
    # Each packet overlaps a little with the one before, and the line is matched as a whole once for each parser.
    assert sum(each.seen for each in counting) < 4 * len(data) + 100 * len(data) // 200


BEHIND = {
    "two lengths": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
    "encodings": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "old chunks": b"POST /pub?topic=t HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two hosts": b"GET /info HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    "line feeds": b"GET /info HTTP/1.1\nHost: localhost\n\n",
    "no method": b"FOO /info HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "folded": b"GET /info HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    "fine": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx",
}
FIRST = {
    "length": b"POST /topic/create?topic=made HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nok",
    "chunks": b"POST /topic/create?topic=made HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2;x=y\r\nok\r\n1\r\n\n\r\n0\r\nTrailer: t\r\n\r\n",
    "no body": b"GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", BEHIND)
async def test_a_request_behind_another_is_treated_as_one_by_itself(name: str, first: str, tmp_path: Path) -> None:
    """In the same packet, or in any pieces: both get the answers that they would get alone."""
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker, asyncio.timeout(30):

        async def statuses(*pieces: bytes, count: int) -> list[bytes]:
            reader, writer = await asyncio.open_connection(*broker.http_address.split(":"))
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            found: list[bytes] = []
            data = b""
            while len(found) < count:
                piece = await reader.read(65536)
                assert piece, data
                data += piece
                found = re.findall(rb"HTTP/1\.[01] (\d{3}) ", data)
            writer.close()
            return found

        [alone] = await statuses(BEHIND[name], count=1)
        both = FIRST[first] + BEHIND[name]
        assert await statuses(both, count=2) == [b"200", alone]
        half = len(FIRST[first]) + 9
        assert await statuses(both[:half], both[half:], count=2) == [b"200", alone]
        assert ("made" in broker.topics) is (first != "no body")


async def test_half_a_head_behind_a_request_has_its_deadline(tmp_path: Path) -> None:
    options = {"http_address": "127.0.0.1:0", "disk_reserve": 0, "http_header_timeout": 10**8}
    async with Broker(data_path=tmp_path, **options) as broker, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*broker.http_address.split(":"))
        writer.write(b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\nGET /info HT")
        # The answer, and then the end of the connection.
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1
        writer.close()
