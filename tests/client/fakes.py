"""What the tests of the client can command: a clock that they move, and an nsqd that says what it is told to say."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from flintmq.addresses import HeldPort, port_of
from flintmq.protocol.wire import FRAME_ERROR, FRAME_MESSAGE, FRAME_RESPONSE, encode_frame

#: Long enough for a machine that stands still for a while; a test that passes never waits for it.
DEADLINE = 90.0

WITH_BODY = {b"IDENTIFY", b"AUTH", b"PUB", b"MPUB", b"DPUB"}


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is true. Polls, because what it waits for happens on the other side of a socket."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class MovableTimer:
    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class MovableClock:
    """Time stands still until the test moves it."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[tuple[float, int, MovableTimer]] = []
        self._number = itertools.count()

    def time(self) -> float:
        return self._now

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> MovableTimer:
        timer = MovableTimer(callback, args)
        heapq.heappush(self._timers, (self._now + delay, next(self._number), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Run everything that is due on the way, each at its own time."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end + 1e-9:
            due, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, due)
            if not timer.cancelled:
                timer.callback(*timer.args)
        self._now = end


class FakeConnection:
    """One client, as a broker sees it. Everything it said is in `commands`."""

    def __init__(self, nsqd: FakeNsqd, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.nsqd = nsqd
        self.reader = reader
        self.writer = writer
        self.commands: list[tuple[bytes, ...]] = []
        self.identify: dict[str, Any] = {}
        self.is_over = False

    def said(self, name: bytes) -> list[tuple[bytes, ...]]:
        return [command for command in self.commands if command[0] == name]

    @property
    def ready(self) -> int | None:
        """The RDY that was said last."""
        said = self.said(b"RDY")
        return int(said[-1][1]) if said else None

    def write(self, data: bytes) -> None:
        if not self.is_over:
            self.writer.write(data)

    def respond(self, payload: bytes) -> None:
        self.write(encode_frame(FRAME_RESPONSE, payload))

    def refuse(self, text: str) -> None:
        self.write(encode_frame(FRAME_ERROR, text.encode()))

    def deliver(self, *bodies: bytes, attempts: int = 1) -> list[bytes]:
        """Send messages in one write; their ids."""
        ids = [b"%016x" % next(self.nsqd.numbers) for _ in bodies]
        heads = (struct.pack(">qH16s", 1_700_000_000_000_000_000, attempts, id) for id in ids)
        self.write(b"".join(encode_frame(FRAME_MESSAGE, head + body) for head, body in zip(heads, bodies, strict=True)))
        return ids

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()

    async def serve(self) -> None:
        assert await self.reader.readexactly(4) == b"  V2"
        while line := await self.reader.readline():
            words = tuple(line.rstrip(b"\n").split(b" "))
            if words[0] in WITH_BODY:
                size = int.from_bytes(await self.reader.readexactly(4), "big")
                words = (*words, await self.reader.readexactly(size))
            self.commands.append(words)
            await self.nsqd.on_command(self, words)


class FakeNsqd:
    """Behaves well by default; a test replaces `on_command` or speaks through `connections` itself."""

    def __init__(self, **features: Any) -> None:
        self.features: dict[str, Any] = {"version": "1.3.0", "max_rdy_count": 2500, "msg_timeout": 60000, **features}
        self.connections: list[FakeConnection] = []
        self.numbers = itertools.count(1)
        self.on_command: Callable[[FakeConnection, tuple[bytes, ...]], Awaitable[None]] = self.behave
        self.address = ""
        self._port: HeldPort
        self._server: asyncio.Server | None = None

    async def behave(self, connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        name = command[0]
        if name == b"IDENTIFY":
            connection.identify = msgspec.json.decode(command[1])
            connection.respond(msgspec.json.encode(self.features))
        elif name in (b"SUB", b"PUB", b"MPUB", b"DPUB"):
            connection.respond(b"OK")
        elif name == b"AUTH":
            connection.respond(b'{"identity":"","identity_url":"","permission_count":1}')
        elif name == b"CLS":
            connection.respond(b"CLOSE_WAIT")

    @property
    def last(self) -> FakeConnection:
        return self.connections[-1]

    async def subscribed(self, number: int = 1) -> FakeConnection:
        """The connection that came as this number, once it has been told RDY."""
        await until(lambda: len(self.connections) >= number and self.connections[number - 1].said(b"RDY"))
        return self.connections[number - 1]

    async def start(self) -> None:
        """On the port of before, if it was stopped."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port_of(self.address))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in self.connections:
                connection.abort()
            await until(lambda: all(connection.is_over for connection in self.connections))
            await self._server.wait_closed()
            self._server = None

    async def __aenter__(self) -> FakeNsqd:
        self._port = HeldPort()
        self.address = self._port.address
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self._port.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = FakeConnection(self, reader, writer)
        self.connections.append(connection)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await connection.serve()
        finally:
            connection.is_over = True
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def several(count: int, **features: Any) -> AsyncIterator[list[FakeNsqd]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeNsqd(**features)) for _ in range(count)]
