"""Asking lookupds over HTTP: several at once, some of them down, old, slow or not lookupds at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from flintmq.cluster.lookupds import Lookupds, Node, lookupd_url
from flintmq.errors import ClusterError, OptionError

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def lookupd(answer: Answer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def knows(*hosts: str, **more: Any) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        producers = [
            {"broadcast_address": host, "hostname": "h", "tcp_port": 4150, "http_port": 4151} for host in hosts
        ]
        return web.json_response({"channels": ["c"], "producers": producers, **more})

    return answer


async def knows_nothing(request: web.Request) -> web.StreamResponse:
    return web.json_response({"message": "TOPIC_NOT_FOUND"}, status=404)


async def fails(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="on fire")


async def is_none(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>")


async def is_strange(request: web.Request) -> web.StreamResponse:
    return web.json_response({"producers": {"not": "a list"}})


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def found(*answers: Answer, **options: Any) -> tuple[list[str], list[str]]:
    """The brokers, and what the lookupds that failed said."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(lookupd(answer)) for answer in answers]
        lookupds = await stack.enter_async_context(Lookupds(addresses, **options))
        answer = await lookupds.producers("t")
        assert answer.failures.keys() <= {f"http://{address}" for address in addresses}
        return sorted(node.tcp_address for node in answer.value), list(answer.failures.values())


async def is_a_page(request: web.Request) -> web.StreamResponse:
    return web.Response(status=404, text="<!DOCTYPE HTML>\n<html>\n<h1>Error response</h1>")


async def test_the_page_of_another_web_server_is_not_shown() -> None:
    assert (await found(is_a_page, knows("one")))[1] == ["HTTP 404: not an nsqlookupd"]


async def test_a_port_without_http_is_told_in_plain_words() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\x0aE_INVALID\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with Lookupds([f"{host}:{port}"]) as lookupds:
            with pytest.raises(ClusterError, match=r"what listens there does not speak HTTP$"):
                await lookupds.nodes()


async def test_an_answer_may_come_in_pieces() -> None:
    whole = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"producers": [{"broadcast_address": "one", "tcp_port": 4150}')
        # The client has read what there is before the rest comes.
        await whole.wait()
        await response.write(b', {"broadcast_address": "two", "tcp_port": 4150}]}')
        return response

    async with lookupd(answer) as address, Lookupds([address]) as lookupds:
        asking = asyncio.create_task(lookupds.producers("t"))
        await asyncio.wait([asking], timeout=0.2)
        whole.set()
        assert [node.broadcast_address for node in (await asking).value] == ["one", "two"]


async def test_answers_are_joined() -> None:
    assert await found(knows("a", "b"), knows("b", "c")) == (["a:4150", "b:4150", "c:4150"], [])


async def test_a_topic_that_nobody_knows_is_no_failure() -> None:
    assert await found(knows_nothing, knows("a")) == (["a:4150"], [])
    assert await found(knows_nothing) == ([], [])


@pytest.mark.parametrize(
    ("bad", "text"),
    [(fails, "on fire"), (is_none, "not a lookupd's"), (is_strange, "not a lookupd's"), (hangs, "imeout")],
)
async def test_one_that_fails_is_reported_and_the_others_count(bad: Answer, text: str) -> None:
    brokers, failures = await found(bad, knows("a"), timeout=0.5)
    assert brokers == ["a:4150"]
    assert len(failures) == 1 and text in failures[0]


async def test_if_all_fail_the_question_fails() -> None:
    async with lookupd(fails) as address, Lookupds([address, "127.0.0.1:1"]) as lookupds:
        with pytest.raises(ClusterError, match="no nsqlookupd answered") as caught:
            await lookupds.producers("t")
    assert caught.value.failures.keys() == {f"http://{address}", "http://127.0.0.1:1"}


async def test_lookupds_before_1_0_had_an_envelope() -> None:
    async def old(request: web.Request) -> web.StreamResponse:
        producer = {"broadcast_address": "", "address": "x", "hostname": "old", "tcp_port": 1, "http_port": 2}
        return web.json_response({"status_code": 200, "status_txt": "OK", "data": {"producers": [producer]}})

    assert await found(old) == (["old:1"], [])


@pytest.mark.parametrize(
    "odd",
    [
        {"tcp_port": "4150"},
        {"tcp_port": 99999},
        {"tcp_port": 1 << 70},
        {"tcp_port": None},
        {"broadcast_address": "/tmp/a-socket-of-this-machine"},
        {"broadcast_address": "two words"},
        {"broadcast_address": "a\nb"},
        {"broadcast_address": "", "hostname": ""},
        {"broadcast_address": None, "hostname": None},
        {"topics": [1]},
    ],
)
async def test_an_odd_nsqd_does_not_hide_the_others(odd: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    whole = {"broadcast_address": "odd", "hostname": "h", "tcp_port": 4150}
    good = {"broadcast_address": "good", "tcp_port": 4150, "topics": None, "tombstones": None, "version": None}
    assert await found(knows(producers=[{**whole, **odd}, good])) == (["good:4150"], [])
    assert "passed over" in caplog.text


async def test_each_answer_is_told_as_it_comes() -> None:
    told: list[str] = []

    async def waits(request: web.Request) -> web.StreamResponse:
        while not told:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return await knows("b")(request)

    async with lookupd(waits) as one, lookupd(knows("a")) as two, Lookupds([one, two]) as lookupds:
        answer = await lookupds.producers("t", lambda nodes: told.extend(node.tcp_address for node in nodes))
        assert told == ["a:4150", "b:4150"]
        assert {node.tcp_address for node in answer.value} == set(told)


async def test_null_is_an_empty_list() -> None:
    assert await found(knows(producers=None)) == ([], [])


async def test_what_is_asked() -> None:
    asked: list[tuple[str, dict[str, str], str | None, str | None]] = []

    async def note(request: web.Request) -> web.StreamResponse:
        asked.append(
            (
                request.path,
                dict(request.query),
                request.headers.get("Accept"),
                request.headers.get("Authorization"),
            )
        )
        return web.json_response({"producers": []})

    accept = "application/vnd.nsq; version=1.0"
    async with lookupd(note) as address:
        async with Lookupds([address], token="secret") as lookupds:
            await lookupds.producers("a b&c")
            await lookupds.nodes()
        async with Lookupds([f"http://{address}/proxy/lookup?dc=1"]) as lookupds:
            await lookupds.producers("t")
    assert asked == [
        ("/lookup", {"topic": "a b&c"}, accept, "Bearer secret"),
        ("/nodes", {}, accept, "Bearer secret"),
        ("/proxy/lookup", {"dc": "1", "topic": "t"}, accept, None),
    ]


def test_addresses_of_nodes() -> None:
    assert Node(broadcast_address="::1", tcp_port=1, http_port=2).tcp_address == "[::1]:1"
    assert Node(broadcast_address="host", tcp_port=1, http_port=2).http_address == "host:2"
    assert Node(hostname="host", tcp_port=1).tcp_address == "host:1"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:4161", "http://127.0.0.1:4161"),
        ("[::1]:4161", "http://[::1]:4161"),
        ("https://lookup.example", "https://lookup.example"),
        ("http://host:4161/path?x=1", "http://host:4161/path?x=1"),
    ],
)
def test_addresses_of_lookupds(address: str, url: str) -> None:
    assert lookupd_url(address) == url


@pytest.mark.parametrize(
    "address", ["", "host", "http://host", "ftp://host:1", "host:port", "host:99999", "http://:4161"]
)
def test_wrong_addresses_are_refused(address: str) -> None:
    with pytest.raises(OptionError, match="not an HTTP address of an nsqlookupd"):
        lookupd_url(address)
