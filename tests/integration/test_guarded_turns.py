"""An error that belongs to one connection costs that connection; nobody else who is served in the same turn notices."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.http.lane import HttpConnection
from flintmq.broker.net import session as session_module
from flintmq.broker.net import sockets
from flintmq.broker.net.session import Session
from flintmq.protocol.wire import FrameDecoder, encode_command
from support.fakes import until
from support.http_client import HttpClient

pytestmark = pytest.mark.skipif(not sockets.available(), reason="no epoll: asyncio guards each connection")

HTTP_PUB = b"POST /pub?topic=%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
        yield broker


class Publisher:
    """A connection whose publishes go through a lane; what it sends arrives when the broker's loop runs next."""

    def __init__(self, broker: Broker, topic: bytes) -> None:
        host, port = broker.tcp_address.split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setblocking(False)
        self._topic = topic
        self._decoder = FrameDecoder()
        self.answers: list[bytes] = []
        self.over = False
        self._socket.sendall(b"  V2")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self._socket.sendall(encode_command(b"PUB", self._topic, body=b"x"))

    def look(self) -> int:
        """How many answers there are so far."""
        with contextlib.suppress(BlockingIOError):
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            self.over = self.over or not data
            self.answers += [body for _, body in self._decoder.feed(data)]
        return len(self.answers)

    def close(self) -> None:
        self._socket.close()


async def answered(publishers: list[Publisher], count: int) -> None:
    await until(lambda: all([publisher.look() >= count for publisher in publishers]))
    assert all(publisher.answers == [b"OK"] * count for publisher in publishers)


@contextlib.asynccontextmanager
async def publishers_of(broker: Broker, *topics: bytes) -> AsyncIterator[list[Publisher]]:
    publishers = [Publisher(broker, topic) for topic in topics for _ in range(3)]
    try:
        # Twice: from the second on they are in their lane.
        for times in (1, 2):
            for publisher in publishers:
                publisher.publish()
            await answered(publishers, times)
        yield publishers
    finally:
        for publisher in publishers:
            publisher.close()


@pytest.mark.parametrize("zeros", [33, 4300, 5000, 30_000])
@pytest.mark.parametrize("path", ["/pub?topic=a", "/mpub?topic=b", "/ping"])
async def test_no_content_length_keeps_the_turn_from_publishers(broker: Broker, zeros: int, path: str) -> None:
    async with publishers_of(broker, b"a", b"b") as publishers, HttpClient.connect(broker.http_address) as client:
        method = "GET" if path == "/ping" else "POST"
        client.send(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {'0' * zeros}\r\n\r\n".encode())
        for publisher in publishers:
            publisher.publish()
        await answered(publishers, 3)
        assert (await client.answer()).status == 400


# --- Whatever is wrong with one ---------------------------------------------------------------------------------------


class Unforeseen(Exception):
    pass


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]) -> list[int]:
    """Make a method raise an error that nobody foresees, the first time that ``when`` is true of its arguments."""
    real = getattr(owner, name)
    failed: list[int] = []

    def method(*args: Any, **kwargs: Any) -> Any:
        if not failed and when(*args):
            failed.append(1)
            raise Unforeseen("a bug")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)
    return failed


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Session, "buffer_updated"), (Session, "published"), (Topic, "take_in"), (HttpConnection, "buffer_updated")],
)
async def test_an_unforeseen_error_costs_one_lane_at_most(
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
) -> None:
    async with (
        publishers_of(broker, b"a", b"b") as publishers,
        HttpClient.connect(broker.http_address) as ours,
        HttpClient.connect(broker.http_address) as theirs,
    ):
        for client in (ours, theirs):
            client.send(HTTP_PUB % b"c")
            assert (await client.answer()).body == b"OK"
        victim = Publisher(broker, b"c")
        victim.publish()
        await answered([victim], 1)
        topic = broker.topics["c"]
        hit = {
            "buffer_updated": lambda subject, size: True,
            "published": lambda session, subject, *_: subject is topic,
            "take_in": lambda subject, *_: subject is topic,
        }[name]
        failed = fail_once(monkeypatch, owner, name, hit)
        with caplog.at_level(logging.ERROR):
            # Not a whole publish, which leaves the lane; a whole one of the topic that fails.
            if owner is HttpConnection:
                ours.send(b"POST /pub")
            elif name == "buffer_updated":
                victim._socket.sendall(b"PUB c")
            else:
                victim.publish()
            for publisher in publishers:
                publisher.publish()
            theirs.send(HTTP_PUB % b"c")
            await answered(publishers, 3)
            assert (await theirs.answer()).body == b"OK"
        assert failed, "the error was not met"
        assert any(record.exc_info and record.exc_info[0] is Unforeseen for record in caplog.records)
        # It happened on one connection, and that one is gone.
        if owner is HttpConnection:
            assert await ours.ended() == b""
        else:
            await until(lambda: victim.look() and victim.over)
        victim.close()
        # The topic itself goes on.
        after = Publisher(broker, b"c")
        after.publish(3)
        await answered([after], 3)
        after.close()


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_topic_that_cannot_flush_costs_no_other_topic_its_turn(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sockets, "_ROUNDS", 1)
    async with publishers_of(broker, b"a", b"b", b"c") as publishers:
        failed = fail_once(monkeypatch, Topic, "flush", lambda topic: topic.name == name)
        waiting: list[Topic] = []
        real = Topic.flush
        monkeypatch.setattr(Topic, "flush", lambda topic: (waiting.append(topic), real(topic))[1])
        for publisher in publishers:
            publisher.publish()
        await answered(publishers, 3)
        assert failed
        # All three were due in the turn in which the first of them failed.
        assert {topic.name for topic in waiting} == {"a", "b", "c"}


async def test_a_publisher_of_many_topics_gets_its_answers_in_few_writes(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "SECONDS_AT_ONCE", 60.0)
    names = [b"t%d" % number for number in range(100)]
    publisher = Publisher(broker, b"")
    publisher.send(b"".join(encode_command(b"PUB", name, body=b"x") for name in names))
    await answered([publisher], 100)
    writes = 0
    real = sockets.SocketTransport.write

    def counted(transport: sockets.SocketTransport, data: Any) -> None:
        nonlocal writes
        writes += 1
        real(transport, data)

    monkeypatch.setattr(sockets.SocketTransport, "write", counted)
    session = next(iter(broker.sessions.values()))
    session._write = session._transport.write
    publisher.send(b"".join(encode_command(b"PUB", name, body=b"x") for name in names))
    await answered([publisher], 200)
    publisher.close()
    # One for every TOPICS_PER_ANSWER of them and one for the rest, in each of the few reads that brought them.
    assert 1 <= writes <= 20


async def test_a_client_that_consumes_what_it_publishes_gets_the_answer_first(broker: Broker) -> None:
    client = Publisher(broker, b"")
    client.send(b"SUB a c\nRDY 10\n")
    await answered([client], 1)
    for round in range(1, 4):
        client.send(b"".join(encode_command(b"PUB", name, body=b"mine") for name in (b"a", b"b")))
        await until(lambda round=round: client.look() >= 1 + 3 * round)  # type: ignore[misc]
        first, *others = client.answers[1 + 3 * (round - 1) :]
        assert first == b"OK" and others.count(b"OK") == 1, client.answers
    client.close()
