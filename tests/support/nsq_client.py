"""The NSQ client of the tests: raw commands out, frames in, over a real socket.

It does nothing by itself but answer heartbeats, so that a test says exactly what is sent, and in which order.

    async with NsqClient.to(broker.tcp_address) as client:
        await client.publish("t", b"one")
        await client.subscribe("t", "c", ready=1)
        message = await client.message()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Self

from flintmq.addresses import split
from flintmq.protocol.wire import (
    FRAME_ERROR,
    FRAME_MESSAGE,
    FRAME_RESPONSE,
    HEARTBEAT,
    MAGIC_V2,
    FrameDecoder,
    Message,
    decode_message,
    encode_command,
    encode_mpub,
)

__all__ = ["BlockingNsqClient", "Frames", "NsqClient", "open_stream"]

#: Seconds; a guard against hanging, nowhere a measure.
PATIENCE = 60.0
RECEIVE_BYTES = 1 << 18


async def open_stream(
    address: str, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to ``host:port`` or to a unix socket."""
    host, port, path = split(address)
    return await (asyncio.open_unix_connection(path) if path else asyncio.open_connection(host, port, ssl=tls))


class Frames:
    """The bytes of a broker as frames; heartbeats are counted and left out."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder()
        self._frames: deque[tuple[int, bytes]] = deque()
        #: Heartbeats that nobody has answered yet.
        self.heartbeats = 0

    def feed(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            if frame == (FRAME_RESPONSE, HEARTBEAT):
                self.heartbeats += 1
            else:
                self._frames.append(frame)

    def next(self) -> tuple[int, bytes] | None:
        return self._frames.popleft() if self._frames else None

    def answer_heartbeats(self) -> bytes:
        """Return the NOPs that are owed."""
        owed, self.heartbeats = self.heartbeats, 0
        return b"NOP\n" * owed


class NsqClient:
    """One connection, used step by step. Errors of the broker are frames like others."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = Frames()
        self.send(MAGIC_V2)

    @classmethod
    async def connect(cls, address: str) -> Self:
        return cls(*await open_stream(address))

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, address: str) -> AsyncIterator[Self]:
        client = await cls.connect(address)
        try:
            yield client
        finally:
            await client.close()

    async def close(self) -> None:
        self._writer.close()
        # A broker that was killed meanwhile says goodbye with a reset.
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    async def frame_or_end(self) -> tuple[int, bytes] | None:
        """Return the next frame; None at the end of the stream, also if it was reset."""
        frame = self._frames.next()
        if frame is not None:
            # There may be thousands of them: no timer for each.
            return frame
        async with asyncio.timeout(PATIENCE):
            while (frame := self._frames.next()) is None:
                try:
                    data = await self._reader.read(RECEIVE_BYTES)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self._frames.feed(data)
                self.send(self._frames.answer_heartbeats())
        return frame

    async def frame(self) -> tuple[int, bytes]:
        frame = await self.frame_or_end()
        if frame is None:
            raise ConnectionError("the broker closed the connection")
        return frame

    async def answer(self, expected: bytes = b"OK") -> None:
        """Wait for an answer, which must be the expected one."""
        frame = await self.frame()
        if frame != (FRAME_RESPONSE, expected):
            raise ConnectionError(f"the broker answered {frame[1]!r}")

    async def ask(self, command: bytes) -> bytes:
        """Send a command and return what comes next, an error too."""
        self.send(command)
        return (await self.frame())[1]

    async def publish(self, topic: str, *bodies: bytes) -> None:
        """Publish each body by a PUB of its own, and wait for each answer."""
        for body in bodies:
            self.send(encode_command(b"PUB", topic.encode(), body=body))
            await self.answer()

    async def publish_many(self, topic: str, *bodies: bytes) -> None:
        """Publish all bodies by one MPUB."""
        self.send(encode_mpub(topic.encode(), list(bodies)))
        await self.answer()

    async def subscribe(self, topic: str, channel: str, ready: int = 0) -> None:
        self.send(encode_command(b"SUB", topic.encode(), channel.encode()))
        await self.answer()
        if ready:
            self.send(b"RDY %d\n" % ready)

    async def message(self) -> Message:
        """Return the next message; answers before it are passed over, errors are not."""
        while True:
            kind, data = await self.frame()
            if kind == FRAME_MESSAGE:
                return decode_message(data)
            if kind == FRAME_ERROR:
                raise ConnectionError(f"the broker answered {data!r}")

    async def messages(self, count: int) -> list[Message]:
        return [await self.message() for _ in range(count)]

    def finish(self, messages: Iterable[Message]) -> None:
        self.send(b"".join(b"FIN %s\n" % message.id for message in messages))


class BlockingNsqClient:
    """The same for tests without an event loop, as far as they need it."""

    def __init__(self, address: str) -> None:
        host, port, _ = split(address)
        self.socket = socket.create_connection((host, port), timeout=PATIENCE)
        self._frames = Frames()
        self.socket.sendall(MAGIC_V2)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def frame(self) -> tuple[int, bytes]:
        while (frame := self._frames.next()) is None:
            data = self.socket.recv(RECEIVE_BYTES)
            assert data, "the broker closed the connection"
            self._frames.feed(data)
            self.socket.sendall(self._frames.answer_heartbeats())
        return frame

    def ask(self, command: bytes) -> bytes:
        self.socket.sendall(command)
        return self.frame()[1]
