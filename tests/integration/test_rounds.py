"""Consumers on plain sockets are read and sent to in rounds: what each of them gets is what it would get alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flintmq.addresses import split
from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.net import sockets
from flintmq.broker.net.session import Session
from flintmq.protocol.wire import FRAME_ERROR, Message, decode_message, encode_command
from support.fakes import until
from support.nsq_client import NsqClient

pytestmark = pytest.mark.skipif(not sockets.available(), reason="no epoll: there are no rounds")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with Broker(data_path=tmp_path) as broker:
        yield broker


async def connect(broker: Broker, receive_buffer: int = 0) -> NsqClient:
    """A client; with a small buffer its socket often takes a part of what it is sent."""
    host, port, _ = split(broker.tcp_address)
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, port))
    return NsqClient(*await asyncio.open_connection(sock=sock, limit=4_096 if receive_buffer else 1 << 16))


def channel_of(broker: Broker, topic: str = "t", channel: str = "c") -> Channel:
    return broker.topics[topic].channels[channel]


@pytest.mark.parametrize("seed", range(6))
async def test_every_message_comes_to_one_consumer_whole(broker: Broker, seed: int) -> None:
    dice = random.Random(seed)
    count = dice.choice([401, 1_203])
    bodies = [b"%d:" % i + dice.randbytes(dice.choice([0, 1, 30, 900, 20_000])) for i in range(count)]
    found: Counter[bytes] = Counter()

    async def consume(client: NsqClient, ready: int, manner: str) -> None:
        held: list[Message] = []
        while True:
            message = await client.message()
            assert message.attempts == 1
            found[message.body] += 1
            held.append(message)
            assert len(held) <= ready, "more in flight than RDY"
            if manner == "slow":
                await asyncio.sleep(0.002)
            if len(held) == ready or dice.random() < 0.7:
                dice.shuffle(held)
                some = [held.pop() for _ in range(dice.randint(1, len(held)))]
                extra = dice.choice([b"", b"", b"", b"NOP\n", b"RDY %d\n" % ready])
                # A command may be cut anywhere.
                data = b"".join(b"FIN %s\n" % message.id for message in some) + extra
                cut = dice.choice([0, 0, dice.randint(0, len(data))])
                client.send(data[:cut])
                if cut:
                    await asyncio.sleep(0)
                client.send(data[cut:])

    consumers: list[NsqClient] = []
    tasks: list[asyncio.Task[None]] = []
    for _ in range(dice.choice([2, 5, 70])):
        client = await connect(broker, dice.choice([0, 0, 2_048]))
        ready = dice.choice([1, 1, 2, 7, 50])
        await client.subscribe("t", "c", ready)
        consumers.append(client)
        tasks.append(asyncio.create_task(consume(client, ready, dice.choice(["quick", "quick", "slow"]))))
    for session in channel_of(broker).sessions.values():
        if dice.random() < 0.5:
            # The system doubles it: a few of the larger messages.
            session._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_000)
    async with NsqClient.to(broker.tcp_address) as producer:
        at = 0
        while at < count:
            some = bodies[at : at + dice.choice([1, 9, 200])]
            await producer.publish_many("t", *some)
            at += len(some)
    await until(lambda: len(found) == count or any(task.done() for task in tasks))
    for task in tasks:
        if task.done():
            task.result()
    assert found == Counter(bodies)
    for task in tasks:
        task.cancel()
    for client in consumers:
        await client.close()


@pytest.mark.parametrize(("consumers", "each"), [(2, 50), (7, 3), (100, 1), (100, 2)])
async def test_a_burst_is_shared_evenly(broker: Broker, consumers: int, each: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(NsqClient.to(broker.tcp_address)) for _ in range(consumers)]
        for client in clients:
            await client.subscribe("t", "c", 100)
        channel = channel_of(broker)
        await until(lambda: all(session.ready_count == 100 for session in channel.sessions.values()))
        producer = await stack.enter_async_context(NsqClient.to(broker.tcp_address))
        await producer.publish_many("t", *[b"%d" % i for i in range(consumers * each)])
        held = [session.in_flight for session in channel.sessions.values()]
        assert sum(held) == consumers * each
        # One less, or one more, where a block of messages ends.
        assert set(held) <= {each - 1, each, each + 1}
        assert held.count(each) >= consumers - 4
        for client, count in zip(clients, held, strict=True):
            assert len(await client.messages(count)) == count


async def test_messages_of_a_round_time_out_as_each_consumer_asked(broker: Broker) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for timeout in (60_000, 60_000, 1_000, 60_000, 1_000):
            client = await stack.enter_async_context(NsqClient.to(broker.tcp_address))
            await client.ask(encode_command(b"IDENTIFY", body=json.dumps({"msg_timeout": timeout}).encode()))
            await client.subscribe("t", "c", 1)
            clients.append(client)
        channel = channel_of(broker)
        await until(lambda: sum(session.ready_count for session in channel.sessions.values()) == 5)
        producer = await stack.enter_async_context(NsqClient.to(broker.tcp_address))
        await producer.publish_many("t", *[b"%d" % i for i in range(5)])
        first = [await client.message() for client in clients]
        assert sorted(message.body for message in first) == [b"%d" % i for i in range(5)]
        # Those two, and no other, come again: to each other, since nobody else has room.
        again = {(await clients[i].message()).body for i in (2, 4)}
        assert again == {first[2].body, first[4].body}
        assert channel.timeout_count == 2


async def test_fins_and_other_commands_of_one_turn_are_all_seen_to(broker: Broker) -> None:
    tails = [b"", b"NOP\n", b"", b"RDY 3\n", b"FIN 0123456789abcdef\n", b"", b"FIN 0", b"TOUCH 0123456789abcdef\n", b""]
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in tails:
            client = await stack.enter_async_context(NsqClient.to(broker.tcp_address))
            await client.subscribe("t", "c", 1)
            clients.append(client)
        producer = await stack.enter_async_context(NsqClient.to(broker.tcp_address))
        await producer.publish_many("t", *[b"%d" % i for i in range(len(tails))])
        held = [await client.message() for client in clients]
        # All of them before the broker's loop has its turn.
        for client, message, tail in zip(clients, held, tails, strict=True):
            client.send(b"FIN %s\n" % message.id + tail)
        channel = channel_of(broker)
        sessions = list(channel.sessions.values())
        await until(lambda: [session.finish_count for session in sessions] == [1] * len(tails))
        await until(lambda: sessions[3].ready_count == 3)
        for i in (4, 7):
            kind, text = await clients[i].frame()
            assert (kind, text.split()[0]) == (FRAME_ERROR, [b"E_FIN_FAILED", b"E_TOUCH_FAILED"][i == 7])
        # And all have room again.
        await producer.publish_many("t", *[b"%d" % i for i in range(len(tails))])
        for client in clients:
            kind, data = await client.frame()
            assert decode_message(data).attempts == 1, kind


async def test_a_backlog_in_fragments_costs_one_look_per_message(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, consumers = 400, 60
    async with contextlib.AsyncExitStack() as stack:
        producer = await stack.enter_async_context(NsqClient.to(broker.tcp_address))
        broker.topic("t").channel("c")
        await producer.publish_many("t", *[b"%d" % i for i in range(2 * count)])
        channel = channel_of(broker)
        channel.pause(True)
        clients = [await stack.enter_async_context(NsqClient.to(broker.tcp_address)) for _ in range(consumers)]
        for client in clients:
            await client.subscribe("t", "c", 20)
        await until(lambda: sum(session.ready_count for session in channel.sessions.values()) == 20 * consumers)
        channel.catch_up(channel.topic.pumped)
        # As after a restart that found every second message finished.
        first = channel.waiting.first
        for seq in range(first, first + 2 * count, 2):
            channel.waiting.remove(seq, seq + 1)
            channel.finished(seq, seq + 1)
        looks = 0
        room = Session.room.fget
        assert room is not None

        def counted(session: Session) -> int:
            nonlocal looks
            looks += 1
            return int(room(session))

        monkeypatch.setattr(Session, "room", property(counted))
        channel.pause(False)
        await until(lambda: channel.in_flight.count == count)
        assert looks <= 6 * count
        monkeypatch.undo()
        found = [
            message.body
            for client, session in zip(clients, channel.sessions.values(), strict=True)
            for message in await client.messages(session.in_flight)
        ]
        assert sorted(found) == sorted(b"%d" % i for i in range(1, 2 * count, 2))


async def test_an_error_in_a_lane_closes_its_connections(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(NsqClient.to(broker.tcp_address)) for _ in range(3)]
        for client in clients:
            await client.subscribe("t", "c", 1)
        producer = await stack.enter_async_context(NsqClient.to(broker.tcp_address))
        await producer.publish_many("t", *[b"%d" % i for i in range(9)])
        held = [await client.message() for client in clients]
        for client, message in zip(clients, held, strict=True):
            # Into the lane.
            client.finish([message])
        held = [await client.message() for client in clients]

        def fail(*_: object) -> int:
            raise RuntimeError("nobody thought of this")

        monkeypatch.setattr(Channel, "_prefix", fail)
        for client, message in zip(clients, held, strict=True):
            client.finish([message])
        for client in clients:
            assert await client.frame_or_end() is None
        monkeypatch.undo()
        await producer.publish_many("t", b"x")
        assert not channel_of(broker).sessions
        assert caplog.text.count("nobody thought of this") <= len(clients) * 2
