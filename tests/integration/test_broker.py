"""A whole broker in this process, spoken to over real sockets, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.errors import StartError
from flintmq.protocol.wire import (
    FRAME_ERROR,
    FRAME_MESSAGE,
    FRAME_RESPONSE,
    HEARTBEAT,
    FrameDecoder,
    Message,
    decode_message,
    encode_command,
    encode_mpub,
)

Test = Callable[[], Coroutine[Any, Any, None]]
Run = Callable[[Test], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test on one of the event loops; a callback that raised fails it."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop

    def run_test(test: Test) -> None:
        raised: list[dict[str, Any]] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
            async with asyncio.timeout(60):
                await test()

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(watched())
        assert raised == []

    return run_test


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "127.0.0.1:0" if request.param == "tcp" else str(tmp_path / "nsqd.sock")


class Client:
    """The smallest client there is."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = FrameDecoder()
        self._frames: list[tuple[int, bytes]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, broker: Broker) -> AsyncIterator[Client]:
        address = broker.tcp_address
        if "/" in address:
            reader, writer = await asyncio.open_unix_connection(address)
        else:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"  V2")
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def frame(self) -> tuple[int, bytes] | None:
        """The next frame but heartbeats; None at the end of the stream."""
        while not self._frames:
            try:
                data = await self._reader.read(1 << 16)
            except ConnectionResetError:
                # Closed with our bytes unread; for a client the same as a close.
                return None
            if not data:
                return None
            self._frames = [f for f in self._decoder.feed(data) if f != (FRAME_RESPONSE, HEARTBEAT)]
        return self._frames.pop(0)

    async def ask(self, command: bytes) -> bytes:
        self.send(command)
        frame = await self.frame()
        assert frame is not None and frame[0] == FRAME_RESPONSE, frame
        return frame[1]

    async def publish(self, topic: str, *bodies: bytes) -> None:
        for body in bodies:
            assert await self.ask(encode_command(b"PUB", topic.encode(), body=body)) == b"OK"

    async def subscribe(self, topic: str, channel: str, ready: int) -> None:
        assert await self.ask(f"SUB {topic} {channel}\n".encode()) == b"OK"
        self.send(b"RDY %d\n" % ready)

    async def messages(self, count: int) -> list[Message]:
        found = []
        while len(found) < count:
            frame = await self.frame()
            assert frame is not None and frame[0] == FRAME_MESSAGE, frame
            found.append(decode_message(frame[1]))
        return found

    def finish(self, messages: list[Message]) -> None:
        self.send(b"".join(b"FIN %s\n" % message.id for message in messages))


def test_what_is_published_is_consumed(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with Broker(data_path=tmp_path, tcp_address=address) as broker:
            async with Client.connect(broker) as producer, Client.connect(broker) as consumer:
                await producer.publish("t", b"one", b"two")
                await consumer.subscribe("t", "c", 10)
                many = [b"%d" % number for number in range(5000)]
                assert await producer.ask(encode_mpub(b"t", many)) == b"OK"
                received: list[Message] = []
                while len(received) < 5002:
                    received += await consumer.messages(1)
                    consumer.finish(received[-1:])
                assert [message.body for message in received] == [b"one", b"two", *many]
                assert [message.attempts for message in received] == [1] * 5002
                channel = broker.topics["t"].channels["c"]
                # A publish that is answered proves that the FINs before it have been read.
                assert await consumer.ask(encode_command(b"PUB", b"other", body=b"x")) == b"OK"
                assert (channel.depth, channel.in_flight_count) == (0, 0)

    run(test)


def test_a_large_message_passes_both_ways(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        body = os.urandom(1 << 20)
        async with Broker(data_path=tmp_path, tcp_address=address) as broker, Client.connect(broker) as client:
            await client.subscribe("t", "c", 3)
            client.send(encode_command(b"PUB", b"t", body=body) * 3)
            frames = [await client.frame() for _ in range(6)]
            received = [decode_message(frame[1]).body for frame in frames if frame and frame[0] == FRAME_MESSAGE]
            assert received == [body] * 3

    run(test)


def test_ten_channels_each_get_everything(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with Broker(data_path=tmp_path, tcp_address=address) as broker, contextlib.AsyncExitStack() as stack:
            consumers = [await stack.enter_async_context(Client.connect(broker)) for _ in range(10)]
            for number, consumer in enumerate(consumers):
                await consumer.subscribe("t", f"c{number}", 100)
            producer = await stack.enter_async_context(Client.connect(broker))
            bodies = [b"%d" % number for number in range(100)]
            assert await producer.ask(encode_mpub(b"t", bodies)) == b"OK"
            received = await asyncio.gather(*(consumer.messages(100) for consumer in consumers))
            assert all([message.body for message in messages] == bodies for messages in received)
            assert len({message.id for messages in received for message in messages}) == 100

    run(test)


def test_many_connections_publish_at_once(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with Broker(data_path=tmp_path, tcp_address=address) as broker:

            async def publish(number: int) -> None:
                async with Client.connect(broker) as client:
                    await client.publish("t", *(b"%d-%d" % (number, at) for at in range(20)))

            await asyncio.gather(*(publish(number) for number in range(40)))
            assert broker.topics["t"].depth == 800
            async with Client.connect(broker) as consumer:
                await consumer.subscribe("t", "c", 2500)
                received = [message.body for message in await consumer.messages(800)]
            assert len(set(received)) == 800
            # Each publisher's own messages are in its order.
            for number in range(40):
                mine = [body for body in received if body.startswith(b"%d-" % number)]
                assert mine == [b"%d-%d" % (number, at) for at in range(20)]

    run(test)


def test_a_restart_keeps_everything(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with Broker(data_path=tmp_path, tcp_address=address) as broker, Client.connect(broker) as client:
            await client.publish("t", b"one", b"two", b"three")
            await client.subscribe("t", "c", 2)
            one, _ = await client.messages(2)
            client.finish([one])
            # RDY 2 lets the third one through: the FIN has been read.
            await client.messages(1)
        async with Broker(data_path=tmp_path, tcp_address=address) as broker, Client.connect(broker) as client:
            await client.subscribe("t", "c", 10)
            messages = await client.messages(2)
            assert [(message.body, message.attempts) for message in messages] == [(b"two", 2), (b"three", 2)]

    run(test)


def test_a_stop_closes_every_connection_and_frees_the_address(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        broker = Broker(data_path=tmp_path, tcp_address=address)
        await broker.start()
        where = broker.tcp_address
        async with Client.connect(broker) as consumer, Client.connect(broker) as idle:
            await consumer.subscribe("t", "c", 1)
            waiting = asyncio.ensure_future(broker.wait_closed())
            await broker.stop()
            await waiting
            assert await consumer.frame() is None
            assert await idle.frame() is None
        assert "nsqd.sock" not in os.listdir(tmp_path)
        async with Broker(data_path=tmp_path, tcp_address=where) as broker:
            assert broker.tcp_address == where

    run(test)


def test_a_client_that_sends_nonsense_reads_the_error_before_the_end(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with Broker(data_path=tmp_path, tcp_address=address) as broker, Client.connect(broker) as client:
            # With more behind it: the broker must not reset the connection over what it leaves unread.
            client.send(b"nonsense\n" + b"x" * 500_000)
            assert await client.frame() == (FRAME_ERROR, b"E_INVALID invalid command nonsense")
            assert await client.frame() is None

    run(test)


def test_a_reader_that_stops_reading_holds_no_memory(run: Run, address: str, tmp_path: Path) -> None:
    """Forty megabytes for a client that reads none of them: they stay in the log."""

    async def test() -> None:
        async with Broker(data_path=tmp_path, tcp_address=address) as broker:
            async with Client.connect(broker) as consumer, Client.connect(broker) as producer:
                await consumer.subscribe("t", "c", 2500)
                consumer._writer.transport.pause_reading()  # type: ignore[attr-defined]
                for _ in range(20):
                    assert await producer.ask(encode_mpub(b"t", [b"x" * 20_000] * 100)) == b"OK"
                channel = broker.topics["t"].channels["c"]
                # Only what the sockets' own buffers and one run hold is out.
                assert channel.in_flight_count < 1000
                assert channel.depth == 2000 - channel.in_flight_count
                consumer._writer.transport.resume_reading()  # type: ignore[attr-defined]
                assert len(await consumer.messages(2000)) == 2000

    run(test)


def test_two_brokers_run_side_by_side(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with Broker(data_path=tmp_path / "a") as one, Broker(data_path=tmp_path / "b") as other:
            assert one.tcp_address != other.tcp_address
            async with Client.connect(one) as client:
                await client.publish("t", b"m")
            assert "t" in one.topics
            assert "t" not in other.topics

    run(test)


def test_an_address_that_is_taken_is_said_so(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with Broker(data_path=tmp_path / "a") as broker:
            other = Broker(data_path=tmp_path / "b", tcp_address=broker.tcp_address)
            with pytest.raises(StartError, match=rf"listen \({broker.tcp_address}\) failed - .*address already in use"):
                await other.start()
            # The path is free again: the start gave everything back.
            async with Broker(data_path=tmp_path / "b"):
                pass

    run(test)


def test_an_error_inside_the_with_block_stops_the_broker_cleanly(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(RuntimeError, match="mine"):
            async with Broker(data_path=tmp_path) as broker, Client.connect(broker) as client:
                await client.publish("t", b"m")
                raise RuntimeError("mine")
        async with Broker(data_path=tmp_path) as broker:
            assert broker.topics["t"].depth == 1

    run(test)
