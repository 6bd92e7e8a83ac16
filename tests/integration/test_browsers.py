"""What a web page can do to daemons without tokens, in the name of its visitor: it reads nothing, changes nothing.

Every route of both daemons, every header trick, and the names that DNS rebinding uses. That clients which are no
browsers, our own pages and allowed hosts are served is shown too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.http.browsers import Names, is_foreign
from flintmq.http.site import Route
from flintmq.lookup.daemon import Lookupd
from support.http_client import HttpClient
from support.secure import until

TRICKS: dict[str, tuple[str, ...]] = {
    "another origin": ("Origin: http://evil.example",),
    "no origin": ("Origin: null",),
    "another port": ("Origin: http://localhost:3000",),
    "another site": ("Sec-Fetch-Site: cross-site",),
    "a neighbour": ("Sec-Fetch-Site: same-site",),
    "two origins": ("Origin: http://localhost", "Origin: http://evil.example"),
    "a form": ("Origin: http://evil.example", "Sec-Fetch-Site: cross-site", "Content-Type: text/plain"),
}
REBOUND = ("evil.example", "evil.example:4151", "localhost.evil.example", "127.0.0.1.evil.example")
#: What the general server has seen first is not the lane's.
PING = b"GET /stats?format=json&topic=none HTTP/1.1\r\nHost: localhost\r\n\r\n"


def request(method: str, target: str, *headers: str, host: str = "localhost", body: bytes = b"x") -> bytes:
    sent = b"" if method == "GET" else body
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *headers, f"Content-Length: {len(sent)}", "", ""]
    return "\r\n".join(lines).encode() + sent


def target_of(route: Route) -> str:
    return route.path.replace(":opt", "log_level") + "?topic=kept&channel=kept&node=127.0.0.1:4151"


def cells(routes: Iterator[Route] | list[Route]) -> Iterator[tuple[str, bytes, bytes]]:
    """Every route by every trick: its name, its bytes, what it must be told."""
    for route in routes:
        name = f"{route.method} {route.path}"
        for what, headers in TRICKS.items() if not route.is_plain_read else ():
            yield f"{name}: {what}", request(route.method, target_of(route), *headers), b"FOREIGN_ORIGIN"
        for host in REBOUND:
            yield f"{name}: for {host}", request(route.method, target_of(route), host=host), b"UNKNOWN_HOST"
            own = f"Origin: http://{host}"
            yield f"{name}: by {host}", request(route.method, target_of(route), own, host=host), b"UNKNOWN_HOST"


async def try_all(address: str, attempts: Iterator[tuple[str, bytes, bytes]], *, first: bytes = b"") -> list[str]:
    """What was not refused as it has to be."""
    limit = asyncio.Semaphore(16)

    async def one(name: str, words: bytes, expected: bytes) -> str:
        async with limit, HttpClient.connect(address) as client:
            if first:
                client.send(first)
                await client.answer()
            client.send(words)
            status, _, body = await client.answer()
            return "" if status == 403 and expected in body else f"{name}: {status} {body[:80]!r}"

    found = await asyncio.gather(*(one(*attempt) for attempt in attempts))
    assert found
    return [wrong for wrong in found if wrong]


def state(broker: Broker) -> Any:
    channels = {
        (topic.name, channel.name): (channel.depth, channel.paused)
        for topic in broker.topics.values()
        for channel in topic.channels.values()
    }
    return {name: (t.message_count, t.paused) for name, t in broker.topics.items()}, channels, broker.refusing


async def kept(broker: Broker) -> None:
    topic = broker.topic("kept")
    topic.channel("kept")
    topic.publish(bytearray(b"\0\0\0\3one"), 0, 7, 1)
    await until(lambda: topic.channels["kept"].depth == 1)


@pytest.mark.parametrize("way", ["lane", "general"])
async def test_no_page_gets_anything_out_of_a_broker(way: str, tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        await kept(broker)
        assert broker.listeners.api is not None
        before = state(broker)
        attempts = cells(list(broker.listeners.api.site.routes))
        assert await try_all(broker.http_address, attempts, first=PING if way == "general" else b"") == []
        assert state(broker) == before


async def test_a_head_that_is_known_lets_no_page_in(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        async with HttpClient.connect(broker.http_address) as client:
            for _ in range(3):
                client.send(request("POST", "/pub?topic=t"))
                assert (await client.answer())[0] == 200
            client.send(request("POST", "/pub?topic=t", host="evil.example"))
            assert (await client.answer())[0] == 403
            client.send(request("POST", "/pub?topic=t"))
            assert (await client.answer())[0] == 200
        assert broker.topics["t"].message_count == 4


async def test_no_page_gets_anything_out_of_an_nsqlookupd() -> None:
    async with Lookupd() as lookupd:
        lookupd.registry.make_channel("kept", "kept")
        assert await try_all(lookupd.http_address, cells(list(lookupd._site().routes))) == []
        assert (list(lookupd.registry.topics), lookupd.registry.channels("kept")) == (["kept"], ["kept"])


#: What is served, although some of it comes from a browser: headers and the name that is asked for.
SERVED: dict[str, tuple[tuple[str, ...], str]] = {
    "a client": ((), "localhost"),
    "a client by address": ((), "127.0.0.1:4151"),
    "a client by another address": ((), "[::1]:4151"),
    "a client without a name": ((), ""),
    "a name below localhost": ((), "mq.localhost:4151"),
    "the broadcast address": ((), "mq-1.example:4151"),
    "an allowed name": ((), "MQ.example"),
    "a page of our own": (("Origin: http://localhost:4151", "Sec-Fetch-Site: same-origin"), "localhost:4151"),
    "a page of our own behind TLS": (("Origin: https://mq.example",), "mq.example:443"),
    "its user": (("Sec-Fetch-Site: none",), "localhost:4151"),
    "a page of an allowed host behind a proxy": (("Origin: https://mq.example",), "127.0.0.1:4151"),
}


@pytest.mark.parametrize("name", SERVED)
async def test_everybody_else_is_served(name: str, tmp_path: Path) -> None:
    headers, host = SERVED[name]
    options: dict[str, Any] = {"broadcast_address": "mq-1.example", "http_allowed_hosts": ("mq.example",)}
    async with (
        Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0, **options) as broker,
        Lookupd(**options) as lookupd,
    ):
        for address, target in (
            (broker.http_address, "/pub?topic=t"),
            (broker.http_address, "/topic/create?topic=u"),
            (lookupd.http_address, "/topic/create?topic=t"),
        ):
            async with HttpClient.connect(address) as client:
                client.send(request("POST", target, *headers, host=host))
                assert (await client.answer())[0] == 200, target
        assert broker.topics["t"].message_count == 1


async def test_a_page_may_ask_for_numbers_that_it_cannot_see(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        for target in ("/ping", "/stats?format=json", "/info"):
            async with HttpClient.connect(broker.http_address) as client:
                client.send(request("GET", target, *TRICKS["a form"]))
                status, headers, _ = await client.answer()
                assert status == 200
                assert not [header for header in headers if header.lower().startswith("access-control")]


async def test_names_are_not_looked_at_where_others_can_connect(tmp_path: Path) -> None:
    """Whoever listens for other machines has names that only its DNS knows."""
    async with Broker(data_path=tmp_path, http_address="0.0.0.0:0", disk_reserve=0) as broker:
        port = broker.http_address.rpartition(":")[2]
        async with HttpClient.connect(f"127.0.0.1:{port}") as client:
            client.send(request("POST", "/pub?topic=t", host="broker.example"))
            assert (await client.answer())[0] == 200
            client.send(request("POST", "/pub?topic=t", "Origin: http://evil.example", host="broker.example"))
            assert (await client.answer())[0] == 403


def test_names_are_compared_whole() -> None:
    names = Names(["Broker.example"], is_guarded=True)
    known = ["broker.example", "BROKER.example.:1", "localhost", "a.localhost:1", "10.0.0.1", "[fe80::1]:4151", ""]
    unknown = ["example", "xbroker.example", "broker.example.evil", "localhost.evil", "10.0.0.1.evil", "[x]", "1", ":"]
    assert [name for name in known if not names.knows(name)] == []
    assert [name for name in unknown if names.knows(name)] == []


def test_an_origin_is_ours_only_if_it_is_where_the_request_went() -> None:
    assert not is_foreign([], [], "a")
    assert not is_foreign(["http://a"], [], "a:80")
    assert not is_foreign(["https://a:443"], ["same-origin"], "a")
    assert is_foreign(["http://a:443"], [], "a")
    assert is_foreign(["ftp://a"], [], "a")
    assert is_foreign(["http://"], [], "")
