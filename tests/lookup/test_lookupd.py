"""nsqlookupd over its sockets: the TCP protocol where the recorded conversations do not reach, and every HTTP route.

``tests/conformance/test_lookup.py`` compares with the Go daemon; here is what only ours has, what needs a clock, and
what nobody may do to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from flintmq.errors import StartError
from flintmq.lookup import daemon, registry
from flintmq.lookup.daemon import Lookupd
from flintmq.system import System
from support.http_client import HttpClient
from support.secure import Certificates

from .nsqds import IDENTITY, Nsqd, StartLookupd, Time, connected, identify, until

PEER = {
    **IDENTITY,
    "topology_zone": "",
    "topology_region": "",
}


@dataclass
class Reply:
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def message(self) -> tuple[int, str]:
        return self.status, self.json["message"]


class Http:
    def __init__(self, lookupd: Lookupd, session: aiohttp.ClientSession) -> None:
        self._root = f"http://{lookupd.http_address}"
        self._session = session

    async def ask(self, method: str, path: str, **arguments: str) -> Reply:
        async with self._session.request(method, self._root + path, params=arguments) as response:
            return Reply(response.status, response.headers, await response.text())

    async def get(self, path: str, **arguments: str) -> Reply:
        return await self.ask("GET", path, **arguments)

    async def post(self, path: str, **arguments: str) -> Reply:
        return await self.ask("POST", path, **arguments)


@pytest.fixture
async def http(lookupd: Lookupd) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(lookupd, session)


def peer_of(nsqd: Nsqd, **changed: Any) -> dict[str, Any]:
    host, port = nsqd.writer.get_extra_info("sockname")[:2]
    return {"remote_address": f"{host}:{port}", **PEER, **changed}


# --- Registration, from both sides


async def test_identify_is_answered_with_the_real_ports(lookupd, nsqd):
    answer = await nsqd.identify()
    assert answer == {
        "broadcast_address": "127.0.0.1",
        "hostname": socket.gethostname(),
        "http_port": int(lookupd.http_address.rpartition(":")[2]),
        "tcp_port": int(lookupd.tcp_address.rpartition(":")[2]),
        "version": "1.3.0",
    }
    assert list(answer) == sorted(answer)


async def test_what_an_nsqd_registers_is_looked_up(nsqd, http):
    await nsqd.identify(topology_zone="z", topology_region="r", remote_address="liar:1")
    await nsqd.register("t", "c")
    await nsqd.register("u")
    assert (await http.get("/topics")).json == {"topics": ["t", "u"]}
    assert (await http.get("/channels", topic="t")).json == {"channels": ["c"]}
    assert (await http.get("/channels", topic="u")).json == {"channels": []}
    peer = peer_of(nsqd, topology_zone="z", topology_region="r")
    assert (await http.get("/lookup", topic="t")).json == {"channels": ["c"], "producers": [peer]}
    node = {**peer, "tombstones": [False, False], "topics": ["t", "u"]}
    assert (await http.get("/nodes")).json == {"producers": [node]}


async def test_a_connection_that_ends_takes_its_registrations_along(lookupd, nsqd, http):
    await nsqd.identify()
    await nsqd.register("t", "c")
    await nsqd.register("t", "gone#ephemeral")
    await nsqd.close()
    await until(lambda: not lookupd.registry.producers)
    assert (await http.get("/lookup", topic="t")).json == {"channels": ["c"], "producers": []}
    assert (await http.get("/nodes")).json == {"producers": []}
    assert (await http.get("/debug")).json == {}
    assert not lookupd.sessions


async def test_two_nsqds_with_one_address_are_two_producers(lookupd, nsqd, http):
    await nsqd.identify()
    await nsqd.register("t")
    async with connected(lookupd.tcp_address) as other:
        await other.identify()
        await other.register("t")
        found = (await http.get("/lookup", topic="t")).json["producers"]
        assert found == [peer_of(nsqd), peer_of(other)]


async def test_only_a_ping_keeps_an_nsqd_listed(nsqd, http, clock: Time):
    await nsqd.identify()
    await nsqd.register("t")
    clock.seconds += 301
    await nsqd.register("u")
    assert (await http.get("/lookup", topic="t")).json["producers"] == []
    assert (await http.get("/nodes")).json == {"producers": []}
    await nsqd.ping()
    assert (await http.get("/lookup", topic="t")).json["producers"] == [peer_of(nsqd)]


async def test_the_times_of_the_flags_count(start_lookupd: StartLookupd, clock: Time):
    lookupd = await start_lookupd(inactive_producer_timeout=10 * 10**9, tombstone_lifetime=5 * 10**9)
    async with connected(lookupd.tcp_address) as nsqd, aiohttp.ClientSession() as session:
        http = Http(lookupd, session)
        await nsqd.identify()
        await nsqd.register("t")
        await http.post("/topic/tombstone", topic="t", node="q1:4151")
        found = []
        for _ in range(3):
            found.append(len((await http.get("/lookup", topic="t")).json["producers"]))
            clock.seconds += 5.5
        assert found == [0, 1, 0]


async def test_a_tombstone_hides_from_lookup_and_shows_in_nodes(nsqd, http, clock: Time):
    await nsqd.identify()
    await nsqd.register("t")
    await nsqd.register("u")
    reply = await http.post("/topic/tombstone", topic="t", node="q1:4151")
    assert (reply.status, reply.text) == (200, "")
    assert (await http.get("/lookup", topic="t")).json["producers"] == []
    assert (await http.get("/lookup", topic="u")).json["producers"] == [peer_of(nsqd)]
    [node] = (await http.get("/nodes")).json["producers"]
    assert (node["topics"], node["tombstones"]) == (["t", "u"], [True, False])
    debug = (await http.get("/debug")).json
    assert debug["topic:t:"][0]["tombstoned"] and not debug["topic:u:"][0]["tombstoned"]
    clock.seconds += 46
    assert (await http.get("/lookup", topic="t")).json["producers"] == [peer_of(nsqd)]


# --- HTTP


async def test_answers_carry_nsq_s_headers(http):
    await http.post("/topic/create", topic="t")
    lookup = await http.get("/lookup", topic="t")
    # go-nsq believes the answer only with this header.
    assert lookup.headers["X-NSQ-Content-Type"] == "nsq; version=1.0"
    assert lookup.headers["Content-Type"] == "application/json; charset=utf-8"
    ping = await http.get("/ping")
    assert (ping.text, ping.headers.get("X-NSQ-Content-Type")) == ("OK", None)
    assert (await http.get("/info")).text == '{"version":"1.3.0"}'


@pytest.mark.parametrize("path", ["/topic/create", "/topic/delete", "/topic/tombstone"])
@pytest.mark.parametrize("name", ["*", "", "a b", "x" * 65, "#ephemeral"])
async def test_what_is_no_name_is_refused_before_it_does_harm(http, path, name):
    await http.post("/channel/create", topic="t", channel="c")
    assert (await http.post(path, topic=name, node="x:1")).message == (400, "INVALID_ARG_TOPIC")
    assert (await http.get("/topics")).json == {"topics": ["t"]}


async def test_a_star_is_no_wildcard(http):
    await http.post("/channel/create", topic="t", channel="c")
    assert (await http.get("/lookup", topic="*")).message == (404, "TOPIC_NOT_FOUND")
    assert (await http.get("/channels", topic="*")).json == {"channels": []}
    assert (await http.post("/channel/delete", topic="t", channel="*")).message == (400, "INVALID_ARG_CHANNEL")
    assert (await http.get("/channels", topic="t")).json == {"channels": ["c"]}


async def test_a_body_is_no_place_for_arguments(lookupd, http):
    async with aiohttp.ClientSession() as session:
        url = f"http://{lookupd.http_address}/topic/create"
        async with session.post(url, data={"topic": "t"}) as response:
            assert response.status == 400
            assert await response.json() == {"message": "MISSING_ARG_TOPIC"}
        async with session.post(url, params={"topic": "t"}, data=b"x" * 10_000) as response:
            assert response.status == 200
    assert (await http.get("/topics")).json == {"topics": ["t"]}


async def test_names_beyond_the_limit_are_refused_over_http_and_tcp(nsqd, http, monkeypatch):
    monkeypatch.setattr(registry, "MOST_NAMES", 2)
    await http.post("/channel/create", topic="t", channel="c")
    assert (await http.post("/topic/create", topic="u")).message == (503, "TOO_MANY_REGISTRATIONS")
    assert (await http.post("/channel/create", topic="t", channel="d")).message == (503, "TOO_MANY_REGISTRATIONS")
    await nsqd.identify()
    answer = await nsqd.ask(b"REGISTER u\n")
    assert answer == b"E_INVALID REGISTER too many topics and channels, 2 are allowed"
    # The connection stays: an nsqd that had to begin again would end up here again, for ever.
    await nsqd.register("t", "c")


async def test_metrics_count_what_is_there(nsqd, http, clock: Time):
    await nsqd.identify()
    await nsqd.register("t", "c")
    await nsqd.register("u")
    clock.seconds += 301
    reply = await http.get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain")
    values = dict(re.findall(r"^flintmq_nsqlookupd_(\w+) ([0-9.]+)$", reply.text, re.MULTILINE))
    assert values == {
        "connections": "1",
        "producers": "1",
        "active_producers": "0",
        "topics": "2",
        "channels": "1",
    }


async def test_large_answers_leave_room_for_others(lookupd, nsqd, http):
    """An nsqd waits one second for an answer: nobody's question may hold the loop for long."""
    answer = await nsqd.identify()
    assert answer
    producers = lookupd.registry
    for number in range(50):
        other = registry.Producer(
            f"10.0.0.1:{number}", broadcast_address="a", tcp_port=1, http_port=number + 1, version="1"
        )
        producers.add(other)
        for topic in range(400):
            producers.register(other, f"t{topic}", "c")
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    handler = lookupd._nodes
    before = turns
    answer = await handler(None)  # type: ignore[arg-type]
    assert turns - before >= 50 * 400 // (2 * daemon.SLICE)
    # What takes long to make takes long to send: each block is one turn.
    blocks = [block async for block in answer.pieces]
    assert len(json.loads(b"".join(blocks))["producers"]) == 51
    assert max(map(len, blocks)) < sum(map(len, blocks)) / 3
    # Topics that nobody has are passed over, which takes its time as well.
    for number in range(5 * daemon.SLICE):
        producers.make_topic(f"alone{number}")
    before = turns
    answer = await lookupd._debug(None)  # type: ignore[arg-type]
    assert turns - before >= 2 * 5
    await answer.pieces.aclose()
    counting.cancel()
    debug = (await http.get("/debug")).json
    assert len(debug["topic:t0:"]) == 50
    assert not any(name.startswith("topic:alone") for name in debug)


async def test_a_large_answer_has_its_length_for_clients_of_any_age(lookupd, nsqd, http):
    await nsqd.identify()
    for number in range(2 * daemon.SLICE):
        lookupd.registry.register(next(iter(lookupd.registry.producers.values())), f"topic{number}")
    expected = (await http.get("/debug")).json
    assert len(expected) == 2 * daemon.SLICE + 1
    for version in (b"1.0", b"1.1"):
        reader, writer = await asyncio.open_connection(*lookupd.http_address.rsplit(":", 1))
        writer.write(b"GET /debug HTTP/%b\r\nHost: localhost\r\nConnection: close\r\n\r\n" % version)
        async with asyncio.timeout(60):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b" 200 OK" in head and b"Content-Length: %d" % len(body) in head
        assert json.loads(body) == expected


# --- What nobody may do to it


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"IDENTIFY\n\xff\xff\xff\xff", b"E_BAD_BODY IDENTIFY invalid body size -1"),
        (b"IDENTIFY\n\x80\x00\x00\x00", b"E_BAD_BODY IDENTIFY invalid body size -2147483648"),
        (b"IDENTIFY\n\x7f\xff\xff\xff", b"E_BAD_BODY IDENTIFY body too big 2147483647 > 65536"),
        (b"IDENTIFY\n\x00\x01\x00\x01", b"E_BAD_BODY IDENTIFY body too big 65537 > 65536"),
        (b"REGISTER " + b"x" * 4096, b"E_INVALID a command of more than 4096 bytes"),
    ],
)
async def test_lengths_that_lie_cost_the_liar_its_connection(lookupd, nsqd, data, text):
    assert await nsqd.ask(data) == text
    assert await nsqd.answer() is None
    await until(lambda: not lookupd.sessions)


async def test_a_command_may_arrive_one_byte_at_a_time(nsqd, http):
    for byte in identify() + b"REGISTER t c\n":
        nsqd.send(bytes([byte]))
        await nsqd.writer.drain()
        await asyncio.sleep(0)
    assert (await nsqd.answer() or b"").startswith(b"{")
    assert await nsqd.answer() == b"OK"
    assert (await http.get("/channels", topic="t")).json == {"channels": ["c"]}


async def test_many_commands_may_arrive_at_once(nsqd, http):
    nsqd.send(identify() + b"".join(b"REGISTER t%d\n" % number for number in range(1_000)))
    assert (await nsqd.answer() or b"").startswith(b"{")
    for _ in range(1_000):
        assert await nsqd.answer() == b"OK"
    assert len((await http.get("/topics")).json["topics"]) == 1_000


@pytest.mark.parametrize(
    "command", [b"PING\n", b"REGISTER t c\n", b"UNREGISTER t c\n"], ids=["PING", "REGISTER", "UNREGISTER"]
)
async def test_a_flood_of_commands_is_worked_off_in_shares(lookupd, nsqd, monkeypatch, command):
    """One turn of the loop runs at most a share of what one read brings; others are served between two shares."""
    await nsqd.identify()
    [session] = lookupd.sessions
    ran: list[int] = [0]
    run = session._command

    def counted(verb: bytes, params: list[bytes]) -> bytes | None:
        ran[-1] += 1
        return run(verb, params)

    monkeypatch.setattr(session, "_command", counted)
    count = 5_000
    session.data_received(command * count)
    while sum(ran) < count:
        ran.append(0)
        await asyncio.sleep(0)
    assert max(ran) <= daemon.COMMANDS_AT_ONCE
    for _ in range(count):
        assert await nsqd.answer() == b"OK"
    await nsqd.ping()


@pytest.mark.parametrize("end", [b"", b"PING", b"IDENTIFY\n\0"], ids=["whole", "half a line", "half a body"])
async def test_what_was_sent_before_the_end_of_the_stream_is_answered(lookupd, nsqd, end):
    nsqd.send(b"PING\n" * 3_000 + end)
    nsqd.writer.write_eof()
    for _ in range(3_000):
        assert await nsqd.answer() == b"OK"
    if end.startswith(b"IDENTIFY"):
        assert await nsqd.answer() == b"E_BAD_BODY IDENTIFY failed to read body size"
    assert await nsqd.answer() is None
    await until(lambda: not lookupd.sessions)


@pytest.mark.parametrize("before", [0, 1_000])
async def test_an_error_is_read_even_by_one_who_goes_on_sending(lookupd, nsqd, before):
    nsqd.send(b"PING\n" * before + b"nonsense\n" + b"PING\n" * 100_000)
    for _ in range(before):
        assert await nsqd.answer() == b"OK"
    assert await nsqd.answer() == b"E_INVALID invalid command nonsense"
    assert await nsqd.answer() is None


async def test_one_who_does_not_read_its_answers_is_not_read_either(lookupd, nsqd):
    """What piles up is bounded by what fits in sockets, not by what the peer sends."""
    [session] = lookupd.sessions
    nsqd.writer.transport.set_write_buffer_limits(high=1 << 16)
    nsqd.reader._transport.pause_reading()  # type: ignore[union-attr]
    transport = session._transport
    async with asyncio.timeout(60):
        while transport.is_reading():
            nsqd.send(b"PING\n" * 10_000)
            await asyncio.sleep(0)
    assert transport.get_write_buffer_size() < 2 << 20
    nsqd.reader._transport.resume_reading()  # type: ignore[union-attr]
    await until(transport.is_reading)
    assert await nsqd.answer() == b"OK"


async def test_silence_before_the_magic_ends_the_connection_and_silence_after_it_does_not(
    start_lookupd: StartLookupd, monkeypatch
):
    monkeypatch.setattr(daemon, "MAGIC_SECONDS", 0.05)
    lookupd = await start_lookupd()
    async with connected(lookupd.tcp_address) as patient, connected(lookupd.tcp_address, b"  V") as silent:
        await patient.ping()
        assert await silent.answer() is None
        assert await patient.ask(b"PING\n") == b"OK"


async def test_a_connection_that_is_no_nsqds_is_ended(start_lookupd: StartLookupd, monkeypatch):
    monkeypatch.setattr(daemon, "IDENTIFY_SECONDS", 0.05)
    lookupd = await start_lookupd()
    async with connected(lookupd.tcp_address) as nsqd, connected(lookupd.tcp_address) as stranger:
        await nsqd.identify()
        await stranger.ping()
        assert await stranger.answer() is None
        assert await nsqd.ask(b"PING\n") == b"OK"


@pytest.mark.parametrize("field", ["broadcast_address", "hostname", "version", "topology_zone"])
async def test_what_an_nsqd_says_of_itself_has_a_limit(lookupd, field):
    async with connected(lookupd.tcp_address) as nsqd:
        assert await nsqd.ask(identify(**{field: "<" * 257})) == (
            f"E_BAD_BODY IDENTIFY {field} has more than 256 characters".encode()
        )
    async with connected(lookupd.tcp_address) as nsqd:
        assert not (await nsqd.ask(identify(**{field: "<" * 256}))).startswith(b"E_")


async def test_neither_port_takes_the_descriptors_of_the_other(start_lookupd: StartLookupd, monkeypatch, caplog):
    monkeypatch.setattr(daemon, "shares_of_descriptors", lambda: (0, 8))
    lookupd = await start_lookupd()
    async with contextlib.AsyncExitStack() as stack:
        nsqds = [await stack.enter_async_context(connected(lookupd.tcp_address)) for _ in range(5)]
        for nsqd in nsqds[:4]:
            await nsqd.ping()
        assert await nsqds[4].answer() is None
        async with HttpClient.connect(lookupd.http_address) as client:
            assert (await client.get("/ping")).status == 200
    assert "limit of 4 connections reached" in caplog.text


async def test_a_bug_costs_one_connection(lookupd, nsqd, monkeypatch, caplog):
    async with connected(lookupd.tcp_address) as other:
        await other.identify()
        monkeypatch.setattr(lookupd.registry, "add", None)
        nsqd.send(identify())
        assert await nsqd.answer() is None
        assert "TypeError" in caplog.text
        await other.ping()


# --- Start and stop


async def test_stopping_closes_every_connection(start_lookupd: StartLookupd):
    lookupd = await start_lookupd()
    async with connected(lookupd.tcp_address) as nsqd:
        await nsqd.identify()
        await lookupd.stop()
        assert await nsqd.answer() is None
        assert not lookupd.sessions and not lookupd.registry.producers
    for address in (lookupd.tcp_address, lookupd.http_address):
        host, _, port = address.rpartition(":")
        with pytest.raises(OSError):
            await asyncio.open_connection(host, int(port))
    await lookupd.stop()


@pytest.mark.parametrize("which", ["tcp_address", "http_address"])
async def test_an_address_in_use_is_named(which):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(StartError, match=rf"listen \({re.escape(address)}\) failed - address already in use"):
            await Lookupd(**{which: address}).start()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:99999", "no.such.host.:1"])
async def test_what_is_no_address_is_a_start_error(address):
    with pytest.raises(StartError, match="listen "):
        await Lookupd(tcp_address=address).start()


async def test_ipv6_addresses_have_brackets():
    try:
        lookupd = Lookupd(tcp_address="[::1]:0", http_address="[::1]:0")
        await lookupd.start()
    except StartError as exc:
        pytest.skip(str(exc))
    assert re.fullmatch(r"\[::1\]:\d+", lookupd.tcp_address)
    reader, writer = await asyncio.open_connection("::1", int(lookupd.tcp_address.rpartition(":")[2]))
    nsqd = Nsqd(reader, writer)
    nsqd.send(b"  V1")
    await nsqd.identify()
    assert [producer.id for producer in lookupd.registry.producers.values()] == [
        f"[::1]:{writer.get_extra_info('sockname')[1]}"
    ]
    await nsqd.close()
    await lookupd.stop()


def test_every_route_is_in_the_docs():
    page = (Path(__file__).resolve().parents[2] / "docs" / "nsqlookupd.md").read_text()
    routes = [f"`{route.method} {route.path}`" for route in Lookupd()._site().routes]
    assert [route for route in routes if route not in page] == []


def test_options_are_given_whole_or_by_keyword():
    with pytest.raises(TypeError):
        Lookupd(Lookupd().options, tcp_address="127.0.0.1:1")


async def test_the_log_has_nsq_s_lines(start_lookupd: StartLookupd, caplog, clock: Time):
    caplog.set_level(logging.INFO, "flintmq")
    lookupd = await start_lookupd()
    async with connected(lookupd.tcp_address) as nsqd, aiohttp.ClientSession() as session:
        await nsqd.identify()
        await nsqd.register("t", "c")
        clock.seconds += 1.5
        await nsqd.ping()
        await nsqd.unregister("t")
        await Http(lookupd, session).post("/channel/create", topic="t", channel="d")
        me = peer_of(nsqd)["remote_address"]
    await until(lambda: not lookupd.sessions)
    await lookupd.stop()
    lines = [re.sub(r"\(127\.0\.0\.1:\d+\) [0-9.]+\S+$", "(ADDRESS) TIME", line) for line in caplog.messages]
    assert lines == [
        f"HTTP: listening on {lookupd.http_address}",
        f"TCP: listening on {lookupd.tcp_address}",
        f"TCP: new client({me})",
        f"CLIENT({me}): desired protocol magic '  V1'",
        f"CLIENT({me}): IDENTIFY Address:q1 TCP:4150 HTTP:4151 Version:1.3.0",
        f"DB: client({me}) REGISTER category:client key: subkey:",
        f"DB: client({me}) REGISTER category:channel key:t subkey:c",
        f"DB: client({me}) REGISTER category:topic key:t subkey:",
        f"CLIENT({me}): pinged (last ping 1.5s)",
        f"client({me}) unexpected UNREGISTER category:channel key:t subkey:c",
        f"DB: client({me}) UNREGISTER category:topic key:t subkey:",
        "DB: adding channel(d) in topic(t)",
        "DB: adding topic(t)",
        "200 POST /channel/create?topic=t&channel=d (ADDRESS) TIME",
        f"PROTOCOL(V1): [{me}] exiting ioloop",
        f"DB: client({me}) UNREGISTER category:client key: subkey:",
        f"client({me}) - EOF",
        f"TCP: closing {lookupd.tcp_address}",
        f"HTTP: closing {lookupd.http_address}",
    ]


async def test_a_line_of_the_log_is_one_line_whatever_a_peer_calls_itself(lookupd, nsqd, caplog):
    caplog.set_level(logging.INFO, "flintmq")
    await nsqd.identify(broadcast_address="a\nFATAL: b", version="\x1b[31m")
    assert await nsqd.ask(b"x\x07\xff\n") == b"E_INVALID invalid command x\x07\xff"
    assert not [line for line in caplog.messages if not line.isprintable()]


# --- Who may ask, and what is read again


def write_tokens(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


async def status(lookupd: Lookupd, method: str, path: str, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    arguments = {"topic": "t", "channel": "c", "node": "127.0.0.1:1"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.request(method, f"http://{lookupd.http_address}{path}", params=arguments) as response:
            await response.read()
            return response.status


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    write_tokens(path, "looks read\npublishes publish\nrules admin\n")
    return path


async def test_every_route_but_ping_needs_a_token_with_its_right(start_lookupd: StartLookupd, tokens: Path):
    lookupd = await start_lookupd(http_auth_token_file=str(tokens))
    lookupd.registry.make_channel("t", "c")
    for route in lookupd._site().routes:
        found = [
            await status(lookupd, route.method, route.path, token) for token in ("", "unknown", "looks", "publishes")
        ]
        if route.path == "/ping":
            assert found == [200] * 4
        elif route.method == "GET":
            assert found[:2] == [401, 401], route
            assert found[2] in (200, 404), route  # nobody has the topic
            assert found[3] == 403, route
        else:
            assert found == [401, 401, 403, 403], route
            assert await status(lookupd, route.method, route.path, "rules") in (200, 404), route
    # What an nsqd registers is none of their business.
    async with connected(lookupd.tcp_address) as nsqd:
        await nsqd.identify()
        await until(lambda: lookupd.registry.producers)


async def test_a_reload_reads_the_tokens_again(start_lookupd: StartLookupd, tokens: Path, caplog):
    lookupd = await start_lookupd(http_auth_token_file=str(tokens))
    write_tokens(tokens, "sees read\n")
    lookupd.reload()
    assert await status(lookupd, "GET", "/topics", "sees") == 200
    assert await status(lookupd, "GET", "/topics", "looks") == 401
    write_tokens(tokens, "nonsense\n")
    lookupd.reload()
    assert "the tokens stay as they were" in caplog.text
    assert "nonsense" not in caplog.text
    assert await status(lookupd, "GET", "/topics", "sees") == 200


async def test_tokens_that_cannot_be_read_are_a_start_error(tmp_path: Path):
    with pytest.raises(StartError, match="cannot read the tokens"):
        await Lookupd(http_auth_token_file=str(tmp_path / "missing")).start()


async def test_a_reload_reads_the_certificate_again(start_lookupd: StartLookupd, tmp_path: Path, caplog):
    certificates = Certificates(tmp_path)
    lookupd = await start_lookupd(**certificates.options)

    async def shown() -> list[bytes]:
        """The certificates that the two ports show."""
        found = []
        for address in (lookupd.tcp_address, lookupd.http_address):
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port), ssl=certificates.client())
            found.append(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return found

    first = await shown()
    assert len(set(first)) == 1
    assert await shown() == first
    certificates.issue()
    lookupd.reload()
    second = await shown()
    assert len(set(second)) == 1
    assert second != first
    Path(certificates.key).write_text("nonsense")
    lookupd.reload()
    assert "the certificate stays as it was" in caplog.text
    assert await shown() == second


async def test_a_reload_with_nothing_to_read_harms_nothing(lookupd, http):
    lookupd.reload()
    assert (await http.get("/ping")).text == "OK"


class Sockets(System):
    """Remembers the sockets that it has bound."""

    def __init__(self) -> None:
        super().__init__()
        self.bound: list[socket.socket] = []

    def listen(self, address: str, *, unix: bool = True, mode: int | None = None) -> socket.socket:
        self.bound.append(super().listen(address, unix=unix, mode=mode))
        return self.bound[-1]


@pytest.mark.parametrize("steps", range(4))
async def test_a_start_that_is_cancelled_gives_its_ports_back(steps: int) -> None:
    system = Sockets()
    lookupd = Lookupd(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", system=system)
    starting = asyncio.create_task(lookupd.start())
    for _ in range(steps):
        await asyncio.sleep(0)
    was_cancelled = starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    if not (was_cancelled and starting.cancelled()):
        # It was up already.
        await lookupd.stop()
    assert [sock.fileno() for sock in system.bound] == [-1] * len(system.bound)
