"""Registration with nsqlookupds: real ones, ours and where it is there the Go daemon, and some that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from conftest import StartBroker

from flintmq.broker import peers as module
from flintmq.broker.daemon import Broker
from flintmq.broker.peers import Peers
from flintmq.errors import StartError
from flintmq.lookup.daemon import Lookupd
from support.fakes import SECOND, Client, until
from support.peers import PEERS
from support.ports import held_port

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries come at once, and nobody gives up because the machine is busy, unless the test is about that."""
    monkeypatch.setattr(Peers, "first_retry", 0.01)
    monkeypatch.setattr(Peers, "last_retry", 0.05)
    monkeypatch.setattr(Peers, "answer_timeout", 10 * PATIENCE)


@pytest.fixture
async def start(start_broker: StartBroker) -> StartBroker:
    """Start a broker that announces some HTTP port: without one no lookupd takes it."""

    async def start(*lookupds: str, **options: Any) -> Broker:
        patience = {"http_client_connect_timeout": 600 * SECOND, "http_client_request_timeout": 600 * SECOND}
        options = {"broadcast_address": "q1", "broadcast_http_port": 4151, **patience, **options}
        return await start_broker(nsqlookupd_tcp_addresses=lookupds, **options)

    return start


# --- Lookupds that are real


class Known:
    """What a running lookupd says over HTTP."""

    def __init__(self, tcp_address: str, http_address: str) -> None:
        self.tcp_address = tcp_address
        self.http_address = http_address

    async def ask(self, path: str, method: str = "GET", **arguments: str) -> Any:
        async with aiohttp.ClientSession() as session:
            url = f"http://{self.http_address}{path}"
            async with session.request(method, url, params=arguments) as response:
                text = await response.text()
                return json.loads(text) if text else None

    async def names(self) -> set[str]:
        """What somebody has: ``topic`` and ``topic/channel``."""
        found = set()
        for key in await self.ask("/debug"):
            category, topic, channel = key.split(":")
            if category != "client":
                found.add(f"{topic}/{channel}" if category == "channel" else topic)
        return found

    async def knows(self, *names: str) -> None:
        """Wait until exactly these are registered."""
        await eventually(self.names, set(names))


async def eventually(ask: Callable[[], Awaitable[Any]], expected: object) -> None:
    deadline = time.monotonic() + PATIENCE
    while (found := await ask()) != expected:
        assert time.monotonic() < deadline, f"{found}, not {expected}"
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def go_lookupd(*flags: str) -> Any:
    binary = PEERS / "bin" / "nsqlookupd"
    if not os.access(binary, os.X_OK):
        pytest.skip(f"no Go nsqlookupd at {binary}: run scripts/peers")
    command = [binary, "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--broadcast-address=127.0.0.1"]
    running = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE)
    assert running.stderr is not None
    addresses = {}
    try:
        while len(addresses) < 2:
            line = running.stderr.readline().decode()
            assert line, "it ended"
            if found := re.search(r"(TCP|HTTP): listening on (\S+)", line):
                addresses[found[1]] = found[2]
        yield Known(addresses["TCP"], addresses["HTTP"])
    finally:
        running.kill()
        running.communicate()


@pytest.fixture(params=["flintmq", pytest.param("go", marks=pytest.mark.interop)])
async def lookupd(request: pytest.FixtureRequest) -> AsyncIterator[Known]:
    if request.param == "go":
        with go_lookupd() as known:
            yield known
    else:
        async with Lookupd() as ours:
            yield Known(ours.tcp_address, ours.http_address)


# --- A lookupd that does what it is told


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


INFO = b'{"broadcast_address":"127.0.0.1","hostname":"h","http_port":1,"tcp_port":1,"version":"1.3.0"}'


class Scripted:
    """Writes down what it is sent and answers with whatever ``answer`` gives for a command; None hangs up."""

    def __init__(self) -> None:
        self.connections: list[list[str]] = []
        self.identities: list[bytes] = []
        self.http_port = 0
        self.answer: Callable[[str], bytes | None] = self.good_answer
        self.writers: list[asyncio.StreamWriter] = []

    def good_answer(self, command: str) -> bytes | None:
        if command != "IDENTIFY":
            return framed(b"OK")
        info = json.loads(INFO)
        return framed(json.dumps({**info, "http_port": self.http_port}).encode())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        commands: list[str] = []
        self.connections.append(commands)
        try:
            if await reader.readexactly(4) != b"  V1":
                return
            while line := await reader.readline():
                if line == b"IDENTIFY\n":
                    self.identities.append(await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")))
                commands.append(line.decode().strip())
                answer = self.answer(commands[-1])
                if answer is None:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def said(self, *commands: str) -> bool:
        """Has the latest connection heard exactly this?"""
        return bool(self.connections) and self.connections[-1] == list(commands)


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    lookupd = Scripted()
    server = await asyncio.start_server(lookupd.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    lookupd.tcp_address = f"{host}:{port}"  # type: ignore[attr-defined]
    yield lookupd
    server.close()
    for writer in lookupd.writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class Website:
    """An HTTP server that answers ``/channels`` when it is let."""

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.open = asyncio.Event()
        self.body = b'{"channels":[]}'
        self.status = 200

    async def channels(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        self.topics.append(request.query["topic"])
        await self.open.wait()
        return aiohttp.web.Response(body=self.body, status=self.status)


@pytest.fixture
async def website(scripted: Scripted) -> AsyncIterator[Website]:
    from aiohttp import web

    site = Website()
    app = web.Application()
    app.router.add_get("/channels", site.channels)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    scripted.http_port = runner.addresses[0][1]
    yield site
    site.open.set()
    await runner.cleanup()


async def identified(broker: Broker) -> None:
    """Every lookupd has said where its HTTP is."""
    await until(lambda: all(peer.http_address for peer in broker.peers._peers.values()))


# --- Coming and going


async def test_topics_and_channels_are_registered_as_they_come_and_go(start, lookupd: Known):
    broker = await start(lookupd.tcp_address)
    await lookupd.knows()
    topic = broker.topic("t")
    await lookupd.knows("t")
    topic.channel("c")
    topic.channel("d#ephemeral")
    broker.topic("e#ephemeral")
    await lookupd.knows("t", "t/c", "t/d#ephemeral", "e#ephemeral")
    topic.delete_channel("d#ephemeral")
    broker.delete_topic("e#ephemeral")
    await lookupd.knows("t", "t/c")
    assert sorted((await lookupd.ask("/topics"))["topics"]) == ["t"]
    assert (await lookupd.ask("/channels", topic="t"))["channels"] == ["c"]
    broker.delete_topic("t")
    await lookupd.knows()


async def test_the_node_is_described_as_nsqd_does(start, lookupd: Known):
    broker = await start(lookupd.tcp_address)
    broker.topic("t")
    await lookupd.knows("t")
    [node] = (await lookupd.ask("/lookup", topic="t"))["producers"]
    assert node["broadcast_address"] == "q1"
    assert node["hostname"] == socket.gethostname()
    assert node["tcp_port"] == int(broker.tcp_address.rpartition(":")[2])
    assert node["http_port"] == 4151
    assert node["version"] == "1.3.0"


async def test_what_was_there_before_the_start_is_registered(start, lookupd: Known):
    broker = await start()
    broker.topic("t").channel("c")
    broker.topic("u")
    await broker.stop()
    await start(lookupd.tcp_address)
    await lookupd.knows("t", "t/c", "u")


async def test_a_stopped_broker_is_forgotten(start, lookupd: Known):
    broker = await start(lookupd.tcp_address)
    broker.topic("t").channel("c")
    await lookupd.knows("t", "t/c")
    await broker.stop()
    await lookupd.knows()
    assert (await lookupd.ask("/channels", topic="t"))["channels"] == ["c"]


async def test_a_killed_broker_is_forgotten(start, lookupd: Known):
    broker = await start(lookupd.tcp_address)
    broker.topic("t")
    await lookupd.knows("t")
    broker.kill()
    await lookupd.knows()


async def test_a_topic_that_was_deleted_and_made_again_loses_its_tombstone(start, lookupd: Known):
    broker = await start(lookupd.tcp_address)
    broker.topic("t").channel("c")
    await lookupd.knows("t", "t/c")
    await lookupd.ask("/topic/tombstone", "POST", topic="t", node="q1:4151")
    assert (await lookupd.ask("/lookup", topic="t"))["producers"] == []
    # In one turn: the lookupd must hear of both all the same.
    broker.delete_topic("t")
    broker.topic("t").channel("d")

    async def producers() -> int:
        return len((await lookupd.ask("/lookup", topic="t"))["producers"])

    await eventually(producers, 1)
    # The old channel is still known there, so the new topic gets it again.
    await lookupd.knows("t", "t/c", "t/d")


# --- The conversation


async def test_identify_has_the_fields_of_the_go_daemon_in_their_order(start, scripted: Scripted):
    options = {"broadcast_tcp_port": 1, "topology_region": "r", "topology_zone": "z"}
    await start(scripted.tcp_address, **options)
    await until(lambda: scripted.identities)
    identity = (
        f'{{"broadcast_address":"q1","hostname":"{socket.gethostname()}","http_port":4151,"tcp_port":1,'
        '"topology_region":"r","topology_zone":"z","version":"1.3.0"}'
    )
    assert scripted.identities == [identity.encode()]


async def test_everything_is_said_again_after_every_connect(start, scripted: Scripted):
    broker = await start(scripted.tcp_address)
    broker.topic("t").channel("c")
    broker.topic("t").channel("d")
    broker.topic("u")
    everything = ("IDENTIFY", "REGISTER t", "REGISTER t c", "REGISTER t d", "REGISTER u")
    await until(lambda: scripted.said(*everything) or scripted.said("IDENTIFY", *everything[2:]))
    for _ in range(3):
        count = len(scripted.connections)
        scripted.writers[-1].close()
        await until(lambda count=count: len(scripted.connections) == count + 1)
        # A topic is not named where its channels do.
        await until(lambda: scripted.said("IDENTIFY", "REGISTER t c", "REGISTER t d", "REGISTER u"))


async def test_a_change_is_said_once(start, scripted: Scripted):
    broker = await start(scripted.tcp_address)
    await until(lambda: scripted.said("IDENTIFY"))
    await until(lambda: next(iter(broker.peers._peers.values()))._settled)
    topic = broker.topic("t")
    topic.channel("c")
    await until(lambda: scripted.said("IDENTIFY", "REGISTER t", "REGISTER t c"))
    topic.delete_channel("c")
    await until(lambda: scripted.said("IDENTIFY", "REGISTER t", "REGISTER t c", "UNREGISTER t c"))
    broker.delete_topic("t")
    await until(lambda: scripted.connections[-1][-1] == "UNREGISTER t")


async def test_a_ping_is_sent_again_and_again(start, scripted: Scripted, monkeypatch):
    monkeypatch.setattr(Peers, "ping_interval", 0.01)
    await start(scripted.tcp_address)
    await until(lambda: scripted.connections and scripted.connections[-1].count("PING") >= 3)
    assert scripted.connections == [["IDENTIFY", *["PING"] * (len(scripted.connections[0]) - 1)]]


async def test_many_names_are_said_in_batches(start, scripted: Scripted):
    broker = await start()
    topic = broker.topic("t")
    for number in range(3 * module.BATCH + 1):
        topic.channel(f"c{number}")
    broker.peers.set_addresses([scripted.tcp_address])
    names = [f"REGISTER t c{number}" for number in range(3 * module.BATCH + 1)]
    await until(lambda: scripted.said("IDENTIFY", *names))


async def test_one_that_is_too_far_behind_is_told_everything_anew(start, scripted: Scripted, monkeypatch):
    monkeypatch.setattr(module, "MOST_PENDING", 10)
    broker = await start(scripted.tcp_address)
    await until(lambda: next(iter(broker.peers._peers.values()))._settled)
    topic = broker.topic("t")
    for number in range(20):
        topic.channel(f"c{number}")
    everything = [f"REGISTER t c{number}" for number in range(20)]
    await until(lambda: scripted.said("IDENTIFY", *everything))
    assert len(scripted.connections) == 2


# --- Lookupds that misbehave

MISBEHAVIOUR: dict[str, Callable[[str], bytes | None]] = {
    "hangs up on IDENTIFY": lambda command: None,
    "says nothing": lambda command: b"",
    "stops in the middle of an answer": lambda command: b"\0\0\0\5OK",
    "claims a huge answer": lambda command: b"\x7f\xff\xff\xffOK",
    "claims a negative answer": lambda command: b"\xff\xff\xff\xffOK",
    "speaks HTTP": lambda command: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "refuses IDENTIFY": lambda command: framed(b"E_BAD_BODY IDENTIFY missing fields"),
    "answers IDENTIFY with E_INVALID": lambda command: framed(b"E_INVALID"),
    "answers IDENTIFY with OK": lambda command: framed(b"OK"),
    "answers IDENTIFY with an array": lambda command: framed(b"[]"),
    "answers IDENTIFY with a wrong type": lambda command: framed(b'{"http_port":"x"}'),
    "answers IDENTIFY with no text": lambda command: framed(b'{"broadcast_address":"\xff"}'),
    "answers twice": lambda command: 2 * framed(INFO),
    "answers without end": lambda command: framed(INFO) + b"\0\0\0\1x" * 100_000,
    "hangs up on REGISTER": lambda command: framed(INFO) if command == "IDENTIFY" else None,
    "lies about REGISTER": lambda command: framed(INFO) if command == "IDENTIFY" else b"\x00\xff\xff\xff",
    "is silent on REGISTER": lambda command: framed(INFO) if command == "IDENTIFY" else b"",
}


@pytest.mark.parametrize("how", MISBEHAVIOUR)
async def test_a_lookupd_that_misbehaves_harms_nobody_and_may_come_to_its_senses(
    start, scripted: Scripted, how, monkeypatch, caplog
):
    monkeypatch.setattr(Peers, "answer_timeout", 0.1)
    scripted.answer = MISBEHAVIOUR[how]
    async with Lookupd() as good:
        broker = await start(scripted.tcp_address, good.tcp_address)
        broker.topic("t").channel("c")
        await Known(good.tcp_address, good.http_address).knows("t", "t/c")
        # It is tried again and again, with the reason in the log.
        await until(lambda: len(scripted.connections) >= 3)
        assert f"LOOKUPD({scripted.tcp_address}): " in caplog.text
        consumer, publisher = Client(broker), Client(broker)
        await consumer.subscribe("t", "c", 1)
        await publisher.publish("t", b"hello")
        await until(lambda: consumer.bodies == [b"hello"])
        scripted.answer = scripted.good_answer
        await until(lambda: scripted.said("IDENTIFY", "REGISTER t c"))


async def test_a_registration_that_is_refused_is_logged_and_the_others_stay(start, scripted: Scripted, caplog):
    refusal = framed(b"E_INVALID REGISTER too many\nregistrations")
    scripted.answer = lambda command: refusal if command == "REGISTER t" else scripted.good_answer(command)
    broker = await start(scripted.tcp_address)
    await until(lambda: next(iter(broker.peers._peers.values()))._settled)
    broker.topic("t")
    broker.topic("u")
    await until(lambda: scripted.said("IDENTIFY", "REGISTER t", "REGISTER u"))
    await until(lambda: "REGISTER t - E_INVALID REGISTER too many\\x0aregistrations" in caplog.text)
    assert len(scripted.connections) == 1


async def test_a_missing_http_port_is_explained(start, lookupd: Known, caplog):
    await start(lookupd.tcp_address, broadcast_http_port=0)
    await until(lambda: "IDENTIFY missing fields (it wants a TCP and an HTTP port: see" in caplog.text)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "host.invalid:4160", "127.0.0.1:x", "a..b:4160"])
async def test_an_address_that_is_none_harms_nobody(start, lookupd: Known, address, caplog):
    broker = await start(address, lookupd.tcp_address)
    broker.topic("t")
    await lookupd.knows("t")
    await until(lambda: f"LOOKUPD({address}): " in caplog.text)


@pytest.fixture
def closed_port():
    """An address where nobody listens: bound, so that nobody else takes it meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


async def test_a_bug_does_not_end_the_conversation(start, scripted: Scripted, monkeypatch, caplog):
    read_info = module._read_info
    failures = iter([RuntimeError("a bug"), RuntimeError("a bug")])

    def failing(answer: bytes) -> Any:
        for failure in failures:
            raise failure
        return read_info(answer)

    monkeypatch.setattr(module, "_read_info", failing)
    broker = await start(scripted.tcp_address)
    [peer] = broker.peers._peers.values()
    await until(lambda: peer._settled)
    assert len(scripted.connections) == 3
    assert caplog.text.count("RuntimeError: a bug") == 2


async def test_a_line_of_the_log_is_one_line_whatever_a_lookupd_says(start, scripted: Scripted, caplog):
    caplog.set_level(logging.INFO, "flintmq.broker.peers")
    info = json.dumps({"broadcast_address": "a\nFATAL: b", "http_port": 1, "version": "\x1b[31m"}).encode()
    scripted.answer = lambda command: framed(info)
    broker = await start(scripted.tcp_address)
    topic = broker.topic("t")
    await until(lambda: not topic.gated)
    assert "Version:\\x1b[31m BroadcastAddress:a\\x0aFATAL: b" in caplog.text
    assert not [line for line in caplog.messages if not line.isprintable()]


async def test_one_of_several_may_be_dead_and_come_back(start, lookupd: Known, closed_port, caplog):
    broker = await start(closed_port, lookupd.tcp_address)
    broker.topic("t")
    await lookupd.knows("t")
    await until(lambda: f"LOOKUPD({closed_port}): connection refused" in caplog.text)
    async with Lookupd(tcp_address=f"127.0.0.1:{held_port()}") as late:
        known = Known(late.tcp_address, late.http_address)
        await late.stop()
        broker.peers.set_addresses([late.tcp_address, lookupd.tcp_address])
        await until(lambda: f"LOOKUPD({late.tcp_address}): connection refused" in caplog.text)
        async with Lookupd(tcp_address=late.tcp_address) as back:
            await Known(back.tcp_address, back.http_address).knows("t")
    assert known.tcp_address == back.tcp_address


async def test_the_time_between_attempts_grows_and_starts_again_after_success(start, scripted: Scripted, monkeypatch):
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds >= 1:
            waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module.random, "uniform", lambda low, high: 1.0)
    monkeypatch.setattr(Peers, "first_retry", 1.0)
    monkeypatch.setattr(Peers, "last_retry", 10.0)
    monkeypatch.setattr(asyncio, "sleep", noted)
    scripted.answer = lambda command: None
    broker = await start(scripted.tcp_address)
    await until(lambda: len(waits) >= 6)
    assert waits[:6] == [1, 2, 4, 8, 10, 10]
    scripted.answer = scripted.good_answer
    [peer] = broker.peers._peers.values()
    await until(lambda: peer._settled)
    waits.clear()
    scripted.answer = lambda command: None
    scripted.writers[-1].close()
    await until(lambda: len(waits) >= 3)
    assert waits[:3] == [1, 2, 4]


# --- Other addresses


async def test_addresses_change_while_the_broker_runs(start, scripted: Scripted, lookupd: Known):
    broker = await start(scripted.tcp_address)
    broker.topic("t")
    await until(lambda: scripted.connections)
    broker.peers.set_addresses([scripted.tcp_address, lookupd.tcp_address])
    await lookupd.knows("t")
    assert len(scripted.connections) == 1
    broker.peers.set_addresses([lookupd.tcp_address])
    await until(lambda: scripted.writers[0].is_closing())
    broker.topic("u")
    await lookupd.knows("t", "u")
    assert len(scripted.connections) == 1
    broker.peers.set_addresses([])
    await lookupd.knows()


async def test_an_address_given_twice_is_one_lookupd(start, scripted: Scripted):
    broker = await start(scripted.tcp_address, scripted.tcp_address)
    await until(lambda: next(iter(broker.peers._peers.values()))._settled)
    assert len(scripted.connections) == 1


# --- Channels that a topic has elsewhere


async def test_a_new_topic_gets_the_channels_that_are_known_elsewhere(start, lookupd: Known):
    for channel in ("c", "d", "no#ephemeral"):
        await lookupd.ask("/channel/create", "POST", topic="t", channel=channel)
    broker = await start(lookupd.tcp_address)
    client = Client(broker)
    # At once: the lookupd has not even been reached yet.
    await client.publish("t", b"first")
    topic = broker.topic("t")
    await until(lambda: not topic.gated)
    assert sorted(topic.channels) == ["c", "d"]
    for channel in ("c", "d"):
        consumer = Client(broker)
        await consumer.subscribe("t", channel, 1)
        await until(lambda consumer=consumer: consumer.bodies == [b"first"])
    await lookupd.knows("t", "t/c", "t/d")


async def test_every_lookupd_is_asked_and_a_dead_one_missed(start, lookupd: Known, closed_port):
    async with Lookupd() as other:
        await lookupd.ask("/channel/create", "POST", topic="t", channel="c")
        await Known(other.tcp_address, other.http_address).ask("/channel/create", "POST", topic="t", channel="d")
        broker = await start(lookupd.tcp_address, closed_port, other.tcp_address)
        topic = broker.topic("t")
        await until(lambda: not topic.gated)
        assert sorted(topic.channels) == ["c", "d"]


async def test_the_publisher_does_not_wait_for_the_lookupds_and_consumers_do(start, scripted: Scripted, website):
    website.body = b'{"channels":["late"]}'
    broker = await start(scripted.tcp_address)
    await identified(broker)
    publisher, consumer = Client(broker), Client(broker)
    await publisher.publish("t", b"first")
    await consumer.subscribe("t", "c", 10)
    await publisher.publish("t", b"second")
    await until(lambda: website.topics == ["t"])
    topic = broker.topic("t")
    assert (topic.depth, consumer.bodies) == (2, [])
    website.open.set()
    await until(lambda: consumer.bodies == [b"first", b"second"])
    assert topic.channels["late"].depth == 2
    await publisher.publish("t", b"third")
    await until(lambda: len(consumer.bodies) == 3)
    assert website.topics == ["t"]


async def test_an_ephemeral_topic_is_asked_for_too_and_its_name_arrives_whole(start, scripted: Scripted, website):
    website.open.set()
    website.body = b'{"channels":["c"]}'
    broker = await start(scripted.tcp_address)
    topic = broker.topic("t#ephemeral")
    await until(lambda: not topic.gated)
    assert website.topics == ["t#ephemeral"]
    assert list(topic.channels) == ["c"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"message":"TOPIC_NOT_FOUND"}'),
        (500, b""),
        (200, b"not JSON"),
        (200, b'{"channels":[1]}'),
        (200, b"[]"),
        (200, b"\xff"),
        (200, b'{"channels":["' + b"x" * (5 << 20) + b'"]}'),
    ],
    ids=["not found", "an error", "no JSON", "no names", "no object", "no text", "too long"],
)
async def test_a_useless_answer_opens_the_gate(start, scripted: Scripted, website, status, body, caplog):
    website.open.set()
    website.status, website.body = status, body
    broker = await start(scripted.tcp_address)
    topic = broker.topic("t")
    await until(lambda: not topic.gated)
    assert not topic.channels
    assert "failed to query nsqlookupd for channels to pre-create for topic t - " in caplog.text


async def test_only_names_that_are_names_are_made_and_not_too_many(start, scripted: Scripted, website, monkeypatch):
    monkeypatch.setattr(module, "MOST_CHANNELS", 3)
    website.open.set()
    names = ["", "a b", "x" * 65, "*", "e#ephemeral", "c", "c", *(f"d{number}" for number in range(10))]
    website.body = json.dumps({"channels": names, "more": 1}).encode()
    broker = await start(scripted.tcp_address)
    topic = broker.topic("t")
    await until(lambda: not topic.gated)
    assert list(topic.channels) == ["c", "d0", "d1"]


async def test_one_that_does_not_answer_over_http_is_waited_for_once(
    start, scripted: Scripted, website, monkeypatch, caplog
):
    monkeypatch.setattr(Peers, "ping_interval", 10_000.0)
    broker = await start(scripted.tcp_address, http_client_request_timeout=50_000_000)
    await identified(broker)
    for name in ("t", "u"):
        topic = broker.topic(name)
        await until(lambda topic=topic: not topic.gated)
    assert "u" not in website.topics
    assert "for topic t - " in caplog.text and "timed out" in caplog.text


async def test_where_no_lookupd_can_be_reached_the_gate_opens_with_a_line_in_the_log(start, closed_port, caplog):
    broker = await start(closed_port)
    topic = broker.topic("t")
    await until(lambda: not topic.gated)
    assert "no available nsqlookupd to query for channels to pre-create for topic t" in caplog.text


async def test_without_lookupds_there_is_no_gate(start):
    broker = await start()
    assert not broker.topic("t").gated


async def test_many_new_topics_ask_a_few_at_a_time(start, scripted: Scripted, website):
    broker = await start(scripted.tcp_address)
    await identified(broker)
    topics = [broker.topic(f"t{number}") for number in range(50)]
    await until(lambda: len(website.topics) == module.MOST_QUESTIONS)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(website.topics) == module.MOST_QUESTIONS
    website.open.set()
    await until(lambda: not any(topic.gated for topic in topics))
    assert len(website.topics) == 50


async def test_a_topic_may_be_deleted_while_its_channels_are_asked_for(start, scripted: Scripted, website):
    website.body = b'{"channels":["c"]}'
    broker = await start(scripted.tcp_address)
    await identified(broker)
    old = broker.topic("t")
    await until(lambda: website.topics == ["t"])
    broker.delete_topic("t")
    new = broker.topic("t")
    website.open.set()
    await until(lambda: not new.gated)
    assert (list(old.channels), list(new.channels)) == ([], ["c"])


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_the_broker_ends_while_questions_are_open(start, scripted: Scripted, website, how):
    broker = await start(scripted.tcp_address)
    await identified(broker)
    client = Client(broker)
    await client.publish("t", b"kept")
    await until(lambda: website.topics == ["t"])
    if how == "stop":
        await broker.stop()
    else:
        broker.kill()
    again = await start()
    assert again.topic("t").depth == 1


async def test_what_was_published_behind_the_gate_survives_a_crash_for_a_channel_of_this_node(
    start, scripted: Scripted, website
):
    broker = await start(scripted.tcp_address)
    await identified(broker)
    client = Client(broker)
    await client.publish("t", b"kept")
    await client.subscribe("t", "c", 0)
    broker.kill()
    again = await start()
    consumer = Client(again)
    await consumer.subscribe("t", "c", 1)
    await until(lambda: consumer.bodies == [b"kept"])


# --- TLS


class Certificates:
    """An authority, and what it has signed, as files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        authority = trustme.CA()
        self.authority = str(folder / "ca.pem")
        authority.cert_pem.write_to_path(self.authority)
        server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("nsqd.example")
        self.server, self.client = (str(folder / "server.pem"), str(folder / "client.pem"))
        server.private_key_and_cert_chain_pem.write_to_path(self.server)
        client.private_key_and_cert_chain_pem.write_to_path(self.client)

    def lookupd(self, **options: Any) -> Lookupd:
        return Lookupd(tls_cert=self.server, tls_key=self.server, **options)

    @property
    def trusting(self) -> dict[str, Any]:
        return {"lookupd_tls": True, "lookupd_tls_root_ca_file": self.authority}


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


def registered(lookupd: Lookupd) -> set[str]:
    return {name for name, _ in lookupd.registry.dump() if name != "client::"}


@pytest.mark.parametrize("client_certificate", [False, True])
async def test_tls_covers_registration_and_the_question_for_channels(start, certificates, client_certificate):
    options = certificates.trusting
    required = {}
    if client_certificate:
        required = {"tls_root_ca_file": certificates.authority}
        options |= {"lookupd_tls_cert": certificates.client, "lookupd_tls_key": certificates.client}
    async with certificates.lookupd(**required) as lookupd:
        lookupd.registry.make_channel("t", "c")
        broker = await start(lookupd.tcp_address, **options)
        topic = broker.topic("t")
        await until(lambda: registered(lookupd) == {"topic:t:", "channel:t:c"})
        assert list(topic.channels) == ["c"]
        await broker.stop()
        await until(lambda: not lookupd.sessions)


async def test_a_lookupd_of_another_authority_is_not_spoken_to(start, certificates, tmp_path, caplog):
    other = Certificates(tmp_path / "other")
    async with other.lookupd() as lookupd:
        broker = await start(lookupd.tcp_address, **certificates.trusting)
        broker.topic("t")
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text)
        assert not lookupd.registry.producers


async def test_a_lookupd_without_tls_is_not_spoken_to(start, certificates, scripted: Scripted, caplog):
    await start(scripted.tcp_address, **certificates.trusting)
    await until(lambda: f"LOOKUPD({scripted.tcp_address}): " in caplog.text)
    assert scripted.identities == []


async def test_a_lookupd_with_tls_takes_nobody_without(start, certificates, caplog):
    async with certificates.lookupd() as lookupd:
        await start(lookupd.tcp_address)
        await until(lambda: caplog.text.count(f"LOOKUPD({lookupd.tcp_address}): ") >= 2)
        assert not lookupd.registry.producers


async def test_a_lookupd_that_wants_certificates_takes_nobody_without_one(start, certificates, caplog):
    async with certificates.lookupd(tls_root_ca_file=certificates.authority) as lookupd:
        await start(lookupd.tcp_address, **certificates.trusting)
        await until(lambda: caplog.text.count(f"LOOKUPD({lookupd.tcp_address}): ") >= 2)
        assert not lookupd.registry.producers


async def test_an_error_is_read_over_tls_too(certificates):
    async with certificates.lookupd() as lookupd:
        host, _, port = lookupd.tcp_address.rpartition(":")
        context = ssl.create_default_context(cafile=certificates.authority)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"  V2")
        async with asyncio.timeout(PATIENCE):
            assert await reader.read() == framed(b"E_BAD_PROTOCOL")
        writer.close()
        await writer.wait_closed()


async def test_files_that_hold_no_certificate_are_a_start_error(start, certificates, tmp_path):
    (tmp_path / "nothing.pem").write_text("")
    nothing = str(tmp_path / "nothing.pem")
    for options in ({"lookupd_tls_root_ca_file": nothing}, {"lookupd_tls_cert": nothing, "lookupd_tls_key": nothing}):
        with pytest.raises(StartError, match="failed to build TLS config for nsqlookupd - "):
            await start("127.0.0.1:1", lookupd_tls=True, **options)
    with pytest.raises(StartError, match="failed to build TLS config - "):
        await Lookupd(tls_cert=nothing, tls_key=nothing).start()


# --- Tokens


def write_tokens(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


async def test_a_lookupd_that_asks_for_a_token_is_shown_one(start, tmp_path, caplog):
    known, mine = tmp_path / "known", tmp_path / "mine"
    write_tokens(known, "right read\n")
    write_tokens(mine, "# for the lookupds\n\n  wrong\n")
    async with Lookupd(http_auth_token_file=str(known)) as lookupd:
        for name in ("first", "second", "third"):
            lookupd.registry.make_channel(name, "c")
        broker = await start(lookupd.tcp_address, lookupd_token_file=str(mine))
        await until(lambda: lookupd.registry.producers)
        first = broker.topic("first")
        await until(lambda: "got response 401" in caplog.text)
        assert not first.channels
        write_tokens(mine, "right\n")
        broker.reload()
        second = broker.topic("second")
        await until(lambda: list(second.channels) == ["c"])
        # Nothing in it: the one before stays.
        write_tokens(mine, "# nothing\n")
        broker.reload()
        assert f"there is no token in {mine}" in caplog.text
        third = broker.topic("third")
        await until(lambda: list(third.channels) == ["c"])


async def test_a_token_that_cannot_be_read_is_a_start_error(start, tmp_path):
    with pytest.raises(StartError, match=r"cannot read the token in .* - No such file"):
        await start("127.0.0.1:1", lookupd_token_file=str(tmp_path / "missing"))
    (tmp_path / "text").write_bytes(b"\xff\n")
    with pytest.raises(StartError, match="no ASCII text"):
        await start("127.0.0.1:1", lookupd_token_file=str(tmp_path / "text"))


# --- On the other event loop


def test_registration_on_uvloop(tmp_path):
    uvloop = pytest.importorskip("uvloop")

    async def scenario() -> None:
        raised: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        async with Lookupd() as lookupd:
            known = Known(lookupd.tcp_address, lookupd.http_address)
            await known.ask("/channel/create", "POST", topic="t", channel="c")
            options = {"nsqlookupd_tcp_addresses": [lookupd.tcp_address], "broadcast_http_port": 1, "disk_reserve": 0}
            async with Broker(data_path=tmp_path, **options) as broker:
                topic = broker.topic("t")
                await known.knows("t", "t/c")
                assert list(topic.channels) == ["c"]
                await lookupd.stop()
                await until(lambda: not next(iter(broker.peers._peers.values())).http_address)
        assert raised == []

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


async def test_the_log_has_nsq_s_lines(start, caplog):
    caplog.set_level(logging.INFO, "flintmq.broker.peers")
    async with Lookupd() as lookupd:
        broker = await start(lookupd.tcp_address)
        await identified(broker)
        await until(lambda: next(iter(broker.peers._peers.values()))._settled)
        topic = broker.topic("t")
        await until(lambda: not topic.gated)
        topic.channel("c")
        await Known(lookupd.tcp_address, lookupd.http_address).knows("t", "t/c")
        broker.peers.set_addresses([])
    tcp, http = lookupd.tcp_address, lookupd.http_address
    ports = [address.rpartition(":")[2] for address in (tcp, http)]
    info = f"{{TCPPort:{ports[0]} HTTPPort:{ports[1]} Version:1.3.0 BroadcastAddress:127.0.0.1}}"
    assert {
        f"LOOKUP({tcp}): adding peer",
        f"LOOKUP connecting to {tcp}",
        f"LOOKUPD({tcp}): peer info {info}",
        f"CI: querying nsqlookupd http://{http}/channels?topic=t",
        f"LOOKUPD({tcp}): topic REGISTER t",
        f"LOOKUPD({tcp}): channel REGISTER t c",
        f"LOOKUP({tcp}): removing peer",
    } == {record.getMessage() for record in caplog.records if record.name == "flintmq.broker.peers"}
