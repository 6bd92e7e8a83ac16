"""Publishes of many plain connections in one turn: the short way, and everything that must leave it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.net import sockets
from flintmq.broker.storage.disk import Disk, SystemClock
from flintmq.protocol.wire import FRAME_ERROR, FRAME_MESSAGE, decode_message, encode_command, encode_mpub
from support.nsq_client import NsqClient

pytestmark = pytest.mark.skipif(not sockets.available(), reason="no epoll: every connection goes the ordinary way")


@pytest.fixture(params=["os", "memory", "fsync"])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Broker]:
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with Broker(data_path=tmp_path, durability=request.param) as broker:
        yield broker
    assert raised == []


@pytest.fixture
async def clients(broker: Broker) -> AsyncIterator[list[NsqClient]]:
    made = [await NsqClient.connect(broker.tcp_address) for _ in range(8)]
    yield made
    for client in made:
        await client.close()


def pub(body: bytes, topic: bytes = b"t") -> bytes:
    return encode_command(b"PUB", topic, body=body)


async def received(broker: Broker, count: int, topic: bytes = b"t") -> list[bytes]:
    consumer = await NsqClient.connect(broker.tcp_address)
    assert await consumer.ask(b"SUB %s c\n" % topic) == b"OK"
    consumer.send(b"RDY 2500\n")
    bodies = []
    while len(bodies) < count:
        kind, data = await consumer.frame()
        if kind == FRAME_MESSAGE:
            message = decode_message(data)
            bodies.append(message.body)
            consumer.send(b"FIN %s\n" % message.id)
    # Nothing else is there.
    assert broker.topics[topic.decode()].channels["c"].depth == 0
    await consumer.close()
    return bodies


async def test_many_publishers_at_once_each_get_their_answer(broker: Broker, clients: list[NsqClient]) -> None:
    sent = []
    for turn in range(30):
        commands = []
        for number, client in enumerate(clients):
            bodies = [b"%d/%d/%d" % (turn, number, k) for k in range(number % 3 + 1)]
            sent += bodies
            commands.append((client, pub(bodies[0]) if len(bodies) == 1 else encode_mpub(b"t", bodies)))
        assert await asyncio.gather(*(client.ask(command) for client, command in commands)) == [b"OK"] * len(clients)
    topic = broker.topics["t"]
    assert topic.message_count == len(sent)
    assert topic.message_bytes == sum(map(len, sent))
    counts = sum(session.publish_counts["t"] for session in broker.sessions.values())
    assert counts == len(sent)
    assert sorted(await received(broker, len(sent))) == sorted(sent)


async def test_large_batches_of_several_publishers_are_all_kept(broker: Broker, clients: list[NsqClient]) -> None:
    sent = []
    for turn in range(12):
        batches = [[b"%d/%d/%d" % (turn, n, k) + b"x" * 300 for k in range(150)] for n in range(len(clients))]
        sent += [body for batch in batches for body in batch]
        answers = await asyncio.gather(
            *(client.ask(encode_mpub(b"t", batch)) for client, batch in zip(clients, batches, strict=True))
        )
        assert answers == [b"OK"] * len(clients)
    assert sorted(await received(broker, len(sent))) == sorted(sent)


async def test_a_client_that_leaves_the_short_way_is_answered_in_order(
    broker: Broker, clients: list[NsqClient]
) -> None:
    client = clients[0]
    assert await client.ask(pub(b"arms it")) == b"OK"
    # Pipelined, split, mixed with other topics and other commands.
    client.send(pub(b"one") + pub(b"two") + b"NOP\n" + pub(b"three")[:8])
    client.send(pub(b"three")[8:] + pub(b"elsewhere", b"u") + encode_mpub(b"t", [b"four", b"five"]))
    assert [await client.frame() for _ in range(5)] == [(0, b"OK")] * 5
    assert await client.ask(pub(b"six")) == b"OK"
    client.send(pub(b"seven") + b"PUB bad!name\n\0\0\0\1x")
    assert await client.frame() == (0, b"OK")
    kind, text = await client.frame()
    assert (kind, text) == (FRAME_ERROR, b'E_BAD_TOPIC PUB topic name "bad!name" is not valid')
    bodies = [b"arms it", b"one", b"two", b"three", b"four", b"five", b"six", b"seven"]
    assert sorted(await received(broker, len(bodies))) == sorted(bodies)
    assert await received(broker, 1, b"u") == [b"elsewhere"]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"PUB t\n\0\0\0\0", b"E_BAD_MESSAGE PUB invalid message body size 0"),
        (b"PUB t\n\xff\xff\xff\xff", b"E_BAD_MESSAGE PUB invalid message body size -1"),
        (b"PUB t\n\x7f\xff\xff\xff", b"E_BAD_MESSAGE PUB message too big 2147483647 > 1048576"),
        (b"MPUB t\n\0\0\0\x09\0\0\0\x01\0\0\0\0x", b"E_BAD_MESSAGE MPUB invalid message(0) body size 0"),
    ],
)
async def test_bad_input_on_the_short_way_gets_the_same_error(
    broker: Broker, clients: list[NsqClient], command: bytes, error: bytes
) -> None:
    first, other = clients[:2]
    armed = pub(b"fine") if command.startswith(b"PUB") else encode_mpub(b"t", [b"fine"])
    assert await first.ask(armed) == b"OK"
    assert await other.ask(armed) == b"OK"
    first.send(command)
    assert await first.frame() == (FRAME_ERROR, error)
    assert await other.ask(armed) == b"OK"


async def test_a_publish_to_a_deleted_topic_makes_it_again(broker: Broker, clients: list[NsqClient]) -> None:
    assert await clients[0].ask(pub(b"gone")) == b"OK"
    broker.delete_topic("t")
    assert await clients[0].ask(pub(b"new")) == b"OK"
    assert await received(broker, 1) == [b"new"]


class HeldDisk(Disk):
    """Syncs of messages take as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    def sync(self, fd: int) -> None:
        self.go_on.wait(60)
        super().sync(fd)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


async def test_an_answer_is_not_sent_to_a_descriptor_whose_connection_is_gone(tmp_path: Path) -> None:
    """The descriptor may be another connection's by then."""
    disk = HeldDisk()
    async with Broker(data_path=tmp_path, durability="fsync", disk=disk) as broker:
        first, second = await NsqClient.connect(broker.tcp_address), await NsqClient.connect(broker.tcp_address)
        try:
            assert await first.ask(pub(b"arms it")) == b"OK"
            assert await second.ask(pub(b"arms it")) == b"OK"
            disk.go_on.clear()
            first.send(pub(b"under way"))
            second.send(pub(b"under way too"))
            topic = broker.topics["t"]
            await until(lambda: topic.message_count == 4)
            # As a missed heartbeat does, or a broken connection.
            next(iter(broker.sessions.values())).drop()
            await until(lambda: len(broker.sessions) == 1)
            waiting = [session for commit in topic._commits for session in commit.sessions]
            assert waiting == list(broker.sessions.values())
        finally:
            disk.go_on.set()
        assert await second.frame() == (0, b"OK")
        await first.close()
        await second.close()


async def test_publishes_that_are_refused_say_why(broker: Broker, clients: list[NsqClient]) -> None:
    for client, command in zip(clients, [pub(b"a"), encode_mpub(b"t", [b"a"])], strict=False):
        assert await client.ask(command) == b"OK"
    broker.refusing = "the disk is nearly full"
    assert await clients[0].ask(pub(b"a")) == b"E_PUB_FAILED PUB failed the disk is nearly full"
    assert await clients[1].ask(encode_mpub(b"t", [b"a"])) == b"E_MPUB_FAILED MPUB failed the disk is nearly full"


async def test_a_write_that_fails_on_the_short_way_is_told_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path) as broker:
        clients = [await NsqClient.connect(broker.tcp_address) for _ in range(3)]
        for number, client in enumerate(clients):
            assert await client.ask(encode_mpub(b"t", [b"before %d" % number])) == b"OK"
        [segment] = broker.topics["t"].log.segments
        good = segment.fd
        # As a device that takes no more: every write to it fails.
        segment.fd = os.open(segment.path, os.O_RDONLY)
        for client in clients:
            client.send(encode_mpub(b"t", [b"lost"]))
        for client in clients:
            assert (await client.frame())[1].startswith(b"E_MPUB_FAILED MPUB failed "), "each is told"
            await client.close()
        assert broker.health.startswith("NOK")
        os.close(good)
        other = await NsqClient.connect(broker.tcp_address)
        assert await other.ask(encode_mpub(b"t", [b"after"])) == b"OK"
        assert broker.health == "OK"
        assert sorted(await received(broker, 4)) == [b"after", b"before 0", b"before 1", b"before 2"]
        await other.close()
    async with Broker(data_path=tmp_path) as broker:
        assert broker.topics["t"].depth + sum(c.depth for c in broker.topics["t"].channels.values()) <= 4


@pytest.mark.parametrize(
    ("limits", "accepted", "reason"),
    [
        ({"max_topic_messages": 50}, 50, b"limit of 50 messages in the topic reached"),
        ({"max_publish_rate": 50}, 50, b"limit of 50 messages a second reached"),
        ({"max_topic_messages": 50, "topic_limit_policy": "drop-oldest"}, 160, b""),
    ],
)
async def test_limits_hold_for_publishers_who_would_take_the_short_way(
    tmp_path: Path, limits: dict[str, int | str], accepted: int, reason: bytes
) -> None:
    clock = StillClock()
    async with Broker(data_path=tmp_path, clock=clock, disk_reserve=0, **limits) as broker:
        clients = [await NsqClient.connect(broker.tcp_address) for _ in range(8)]
        answers: list[bytes] = []

        async def publish(client: NsqClient, number: int) -> None:
            for k in range(20):
                answers.append(await client.ask(pub(b"%d/%d" % (number, k))))
                if answers[-1] != b"OK":
                    return

        await asyncio.gather(*(publish(client, number) for number, client in enumerate(clients)))
        assert answers.count(b"OK") == accepted
        assert set(answers) - {b"OK"} == ({b"E_PUB_FAILED PUB failed " + reason} if reason else set())
        topic = broker.topics["t"]
        await until(lambda: topic.depth == 50)
        assert topic.dropped_count == accepted - 50
        for client in clients:
            await client.close()


class StillClock(SystemClock):
    """Rates are of a moment that does not pass."""

    def __init__(self) -> None:
        super().__init__()
        moment = self.now()
        self.now = lambda: moment
