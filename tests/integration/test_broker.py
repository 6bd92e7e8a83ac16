"""A whole broker in this process, spoken to over real sockets, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trustme

from flintmq.addresses import HeldPort
from flintmq.broker.daemon import Broker
from flintmq.errors import StartError
from flintmq.protocol.wire import (
    FRAME_ERROR,
    FRAME_MESSAGE,
    Message,
    decode_message,
    encode_command,
    encode_mpub,
)
from support.nsq_client import NsqClient, open_stream

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


def test_what_is_published_is_consumed(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with Broker(data_path=tmp_path, tcp_address=address) as broker:
            async with NsqClient.to(broker.tcp_address) as producer, NsqClient.to(broker.tcp_address) as consumer:
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
        async with (
            Broker(data_path=tmp_path, tcp_address=address) as broker,
            NsqClient.to(broker.tcp_address) as client,
        ):
            await client.subscribe("t", "c", 3)
            client.send(encode_command(b"PUB", b"t", body=body) * 3)
            frames = [await client.frame() for _ in range(6)]
            received = [decode_message(frame[1]).body for frame in frames if frame and frame[0] == FRAME_MESSAGE]
            assert received == [body] * 3

    run(test)


def test_ten_channels_each_get_everything(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with Broker(data_path=tmp_path, tcp_address=address) as broker, contextlib.AsyncExitStack() as stack:
            consumers = [await stack.enter_async_context(NsqClient.to(broker.tcp_address)) for _ in range(10)]
            for number, consumer in enumerate(consumers):
                await consumer.subscribe("t", f"c{number}", 100)
            producer = await stack.enter_async_context(NsqClient.to(broker.tcp_address))
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
                async with NsqClient.to(broker.tcp_address) as client:
                    await client.publish("t", *(b"%d-%d" % (number, at) for at in range(20)))

            await asyncio.gather(*(publish(number) for number in range(40)))
            assert broker.topics["t"].depth == 800
            async with NsqClient.to(broker.tcp_address) as consumer:
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
        async with (
            Broker(data_path=tmp_path, tcp_address=address) as broker,
            NsqClient.to(broker.tcp_address) as client,
        ):
            await client.publish("t", b"one", b"two", b"three")
            await client.subscribe("t", "c", 2)
            one, _ = await client.messages(2)
            client.finish([one])
            # RDY 2 lets the third one through: the FIN has been read.
            await client.messages(1)
        async with (
            Broker(data_path=tmp_path, tcp_address=address) as broker,
            NsqClient.to(broker.tcp_address) as client,
        ):
            await client.subscribe("t", "c", 10)
            messages = await client.messages(2)
            assert [(message.body, message.attempts) for message in messages] == [(b"two", 2), (b"three", 2)]

    run(test)


def test_a_stop_closes_every_connection_and_frees_the_address(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        broker = Broker(data_path=tmp_path, tcp_address=address)
        await broker.start()
        where = broker.tcp_address
        async with NsqClient.to(broker.tcp_address) as consumer, NsqClient.to(broker.tcp_address) as idle:
            await consumer.subscribe("t", "c", 1)
            waiting = asyncio.ensure_future(broker.wait_closed())
            await broker.stop()
            await waiting
            assert await consumer.frame_or_end() is None
            assert await idle.frame_or_end() is None
        assert "nsqd.sock" not in os.listdir(tmp_path)
        async with Broker(data_path=tmp_path, tcp_address=where) as broker:
            assert broker.tcp_address == where

    run(test)


def test_a_client_that_sends_nonsense_reads_the_error_before_the_end(run: Run, address: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            Broker(data_path=tmp_path, tcp_address=address) as broker,
            NsqClient.to(broker.tcp_address) as client,
        ):
            # With more behind it: the broker must not reset the connection over what it leaves unread.
            client.send(b"nonsense\n" + b"x" * 500_000)
            assert await client.frame() == (FRAME_ERROR, b"E_INVALID invalid command nonsense")
            assert await client.frame_or_end() is None

    run(test)


def test_a_reader_that_stops_reading_holds_no_memory(run: Run, address: str, tmp_path: Path) -> None:
    """Forty megabytes for a client that reads none of them: they stay in the log."""

    async def test() -> None:
        async with Broker(data_path=tmp_path, tcp_address=address) as broker:
            async with NsqClient.to(broker.tcp_address) as consumer, NsqClient.to(broker.tcp_address) as producer:
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
            async with NsqClient.to(one.tcp_address) as client:
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


@pytest.mark.parametrize("taken", ["http_address", "https_address"])
def test_a_port_that_is_taken_ends_the_start_before_anybody_is_let_in(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, taken: str
) -> None:
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    both = str(tmp_path / "both.pem")

    async def test() -> None:
        with socket.socket() as other, contextlib.closing(HeldPort()) as port:
            other.bind(("127.0.0.1", 0))
            other.listen()
            busy: dict[str, Any] = {taken: f"127.0.0.1:{other.getsockname()[1]}"}
            broker = Broker(data_path=tmp_path, tcp_address=port.address, tls_cert=both, tls_key=both, **busy)
            with caplog.at_level("INFO"), pytest.raises(StartError, match="already in use"):
                await broker.start()
            assert "listening" not in caplog.text
            with pytest.raises(ConnectionRefusedError):
                await open_stream(port.address)

    run(test)


def test_an_error_inside_the_with_block_stops_the_broker_cleanly(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(RuntimeError, match="mine"):
            async with Broker(data_path=tmp_path) as broker, NsqClient.to(broker.tcp_address) as client:
                await client.publish("t", b"m")
                raise RuntimeError("mine")
        async with Broker(data_path=tmp_path) as broker:
            assert broker.topics["t"].depth == 1

    run(test)
