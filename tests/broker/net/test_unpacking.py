"""Compressed streams that swell: what they cost is bounded, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.net.session import UNPACK_AT_ONCE
from flintmq.protocol.compression import Codec, Deflate, Snappy
from flintmq.protocol.wire import encode_command
from support.fakes import Client, until

MOST = 16 << 20
#: Bytes that a bomb unpacks to.
BOMB = 1 << 30 if os.environ.get("FLINTMQ_EXHAUSTIVE") == "1" else 100 << 20

both = pytest.mark.parametrize("name", ["deflate", "snappy"])


def compressed(broker: Broker, name: str) -> tuple[Client, Codec]:
    client = Client(broker)
    body = b'{"feature_negotiation":true,"%s":true}' % name.encode()
    client.send(encode_command(b"IDENTIFY", body=body))
    client.transport.received.clear()
    return client, Deflate(9) if name == "deflate" else Snappy()


@contextmanager
def bounded() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST, f"{peak >> 20} MiB"


def swollen(codec: Codec, start: bytes, piece: bytes, size: int) -> list[bytes]:
    """A stream that unpacks to ``size`` bytes: a start, then the piece again and again, as few bytes as can be."""
    stream = [codec.compress(start)] if start else []
    return stream + [codec.compress(piece * ((1 << 20) // len(piece))) for _ in range(size >> 20)]


async def feed(client: Client, stream: list[bytes]) -> None:
    """As a network would: no more than the session takes."""
    for data in stream:
        client.send(data)
        await until(lambda: not client._unread or client.is_over)
        if client.is_over:
            return


@both
@pytest.mark.parametrize(
    "start",
    [b"", b"PUB t\n\0\x0f\xff\xff", b"MPUB t\n\0\x4f\xff\xff\0\0\xff\xff", b"IDENTIFY\n\0\x4f\xff\xff", b"AUTH\n\x7f"],
    ids=["no command", "PUB", "MPUB", "IDENTIFY", "AUTH"],
)
async def test_a_bomb_costs_at_most_16_mib_and_its_connection(broker: Broker, name: str, start: bytes) -> None:
    client, codec = compressed(broker, name)
    other = Client(broker)
    stream = swollen(codec, start, b"\0", BOMB)
    with bounded():
        await feed(client, stream)
        await until(lambda: client.is_over)
    await other.publish("u", b"all is well")


@both
async def test_a_batch_that_lies_about_its_size_is_held_to_the_limit_unpacked(broker: Broker, name: str) -> None:
    """Messages come for as long as they are read; the body size said 5 MiB."""
    client, codec = compressed(broker, name)
    message = b"\0\x0f\x00\x00" + bytes(0x0F0000)
    stream = [codec.compress(b"MPUB t\n\0\x4f\xff\xff\0\0\xff\xff"), *(codec.compress(message) for _ in range(64))]
    with bounded():
        await feed(client, stream)
        await until(lambda: client.is_over)
    assert broker.topics["t"].message_count == 0


@both
async def test_a_stream_that_swells_to_many_commands_leaves_the_loop_to_others(broker: Broker, name: str) -> None:
    client, codec = compressed(broker, name)
    size = 4 << 20
    stream = b"".join(swollen(codec, b"", b"NOP\n", size))
    other = Client(broker)
    answers = 0
    client.send(stream)
    turns = 0
    while client.session._pieces is not None or client._unread:
        if other.take():
            answers += 1
        other.send(encode_command(b"PUB", b"t", body=b"x"))
        turns += 1
        await asyncio.sleep(0)
    assert turns >= size // UNPACK_AT_ONCE - 1
    # Others were served meanwhile.
    assert answers > turns // 4
    assert not client.is_over
    client.send(codec.compress(b"SUB t c\n"))
    await until(lambda: client.session.channel is not None)


@both
async def test_what_waits_is_not_unpacked(broker: Broker, name: str) -> None:
    client, codec = compressed(broker, name)
    await Client(broker).publish("t", b"x")
    topic = broker.topics["t"]
    topic.hold(self := object())
    body = bytes(900_000)
    stream = b"".join(codec.compress(encode_command(b"PUB", b"t", body=body)) for _ in range(100))
    with bounded():
        client.send(stream)
        await until(lambda: client.session._waiting and not client.transport.reading)
        # One command waits, and at most one read is there in its packed form.
        assert client.session._fill < 2 << 20
    assert topic._holder is self
    topic.release()
    await until(lambda: topic.message_count == 101)


async def test_bytes_that_drip_are_added_in_place(broker: Broker) -> None:
    """A body of megabytes must not be copied for every byte that comes."""
    client, codec = compressed(broker, "deflate")
    client.send(codec.compress(b"MPUB t\n\0\x40\0\0\0\0\0\x08" + (b"\0\x07\0\0" + bytes(0x70000)) * 5 + b"\0\x07\0\0"))
    await until(lambda: not client.session._waiting)
    session = client.session
    held = session._held
    assert held is not None and session._fill > 2_000_000
    for _ in range(300):
        client.send(codec.compress(b"\0"))
        assert session._held is held
    assert session._fill == len(held)


def _empty_blocks() -> bytes:
    """Return blocks of deflate that hold nothing, each with a code of its own that has to be built."""
    bits: list[int] = []

    def put(value: int, count: int) -> None:
        bits.extend(value >> i & 1 for i in range(count))

    # Not the last, dynamic; 257 + 0 and 1 + 0 codes, whose lengths are written with 18 codes: only 18 and 1 are used.
    put(0b100, 3)
    put(0, 10)
    put(14, 4)
    for symbol in (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1):
        put(symbol in (18, 1), 3)
    # 138 + 118 times zero, then 1 for the end of the block, and 1 for the only distance.
    put(1, 1)
    put(127, 7)
    put(1, 1)
    put(107, 7)
    # The end of the block is the code 0.
    put(0, 3)
    bits *= 8
    return bytes(sum(bits[i + j] << j for j in range(8)) for i in range(0, len(bits), 8))


IDENTIFIER = b"\xff\x06\0\0sNaPpY"
EMPTY = {
    "snappy padding": ("snappy", IDENTIFIER, b"\xfe\0\0\0"),
    "snappy skippable": ("snappy", IDENTIFIER, b"\x80\0\0\0" + b"\x91\x01\0\0x"),
    "snappy identifiers": ("snappy", IDENTIFIER, IDENTIFIER),
    "deflate stored": ("deflate", b"", b"\0\0\0\xff\xff"),
    "deflate dynamic": ("deflate", b"", _empty_blocks()),
}


@pytest.mark.parametrize("kind", EMPTY)
async def test_a_stream_that_unpacks_to_nothing_leaves_the_loop_to_others(broker: Broker, kind: str) -> None:
    name, start, unit = EMPTY[kind]
    client, codec = compressed(broker, name)
    # The clock moves by a millisecond with each look at it: every look ends a share of the turn.
    looks = 0
    session = client.session

    class Clock:
        def __getattr__(self, attribute: str) -> object:
            return getattr(loop, attribute)

        def time(self) -> float:
            nonlocal looks
            looks += 1
            return looks / 1e3

    loop, session._loop = session._loop, Clock()  # type: ignore[assignment]
    client.send(start + unit * ((256 << 10) // len(unit)))
    turns = 0
    while session._pieces is not None or client._unread:
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 20, turns
    assert not client.is_over
    packed = codec.compress(b"SUB t c\n")
    client.send(packed)
    await until(lambda: session.channel is not None)


async def test_a_refused_client_that_has_gone_leaves_nothing_behind(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    # An error that is kept in a record knows where it was raised.
    caplog.set_level("CRITICAL", "flintmq")
    sessions = []
    for _ in range(3):
        client, codec = compressed(broker, "deflate")
        sessions.append(weakref.ref(client.session))
        client.send(codec.compress(b"THIS IS NO COMMAND\n"))
        await until(lambda client=client: client.is_over)
        client.hang_up()
        await until(lambda client=client: client.transport.lost)
        del client
    gc.collect()
    assert [session() for session in sessions] == [None] * 3
