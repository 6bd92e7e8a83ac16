"""What tests of nsqlookupd use: a clock that is moved by hand, and nsqds that are spoken by hand over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from flintmq.lookup.daemon import Lookupd
from flintmq.protocol.wire import encode_command

SECOND = 1_000_000_000
#: How long anything may take. Only failures take that long.
PATIENCE = 60.0

IDENTITY: dict[str, Any] = {
    "broadcast_address": "q1",
    "hostname": "h1",
    "http_port": 4151,
    "tcp_port": 4150,
    "version": "1.3.0",
}

StartLookupd = Callable[..., Awaitable[Lookupd]]


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def now(self) -> int:
        return round(self.seconds * SECOND)

    def wall(self) -> int:
        return round((1_700_000_000 + self.seconds) * SECOND)


class Nsqd:
    """The smallest nsqd there is: one connection, spoken by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> bytes | None:
        """The next answer, None at the end of the stream."""
        async with asyncio.timeout(PATIENCE):
            try:
                size = int.from_bytes(await self.reader.readexactly(4), "big")
                return await self.reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionResetError) as exc:
                assert not getattr(exc, "partial", b""), exc
                return None

    async def ask(self, data: bytes) -> bytes | None:
        self.send(data)
        return await self.answer()

    async def identify(self, **fields: Any) -> dict[str, Any]:
        answer = await self.ask(identify(**fields))
        assert answer is not None
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    async def register(self, *names: str) -> None:
        assert await self.ask(" ".join(("REGISTER", *names)).encode() + b"\n") == b"OK"

    async def unregister(self, *names: str) -> None:
        assert await self.ask(" ".join(("UNREGISTER", *names)).encode() + b"\n") == b"OK"

    async def ping(self) -> None:
        assert await self.ask(b"PING\n") == b"OK"

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def identify(**fields: Any) -> bytes:
    return encode_command(b"IDENTIFY", body=json.dumps(IDENTITY | fields).encode())


@contextlib.asynccontextmanager
async def connected(address: str, magic: bytes = b"  V1") -> AsyncIterator[Nsqd]:
    host, _, port = address.rpartition(":")
    nsqd = Nsqd(*await asyncio.open_connection(host, int(port)))
    nsqd.send(magic)
    try:
        yield nsqd
    finally:
        await nsqd.close()


async def until(condition: Callable[[], object]) -> None:
    """Wait for the condition, which is looked at again and again."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)
