"""A TCP proxy in front of a broker, whose connections can be cut and stalled.

A Proxy owns its port and the pipes that it carries. A Pipe is known by the port of the client's end.
"""

from __future__ import annotations

import asyncio
from typing import cast

__all__ = ["Pipe", "Proxy"]


class _End(asyncio.Protocol):
    """One of a pipe's two sockets; what it reads is written to the other."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        # Read before the other end was there.
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self is self._pipe.near:
            self._pipe.opened(self.transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def join(self, other: _End) -> None:
        self.other = other
        assert other.transport is not None
        for data in self._early:
            other.transport.write(data)
        self._early.clear()

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None and not self._pipe.stalled:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pipe.ended(self)


class Pipe:
    """A connection of a client, and the one to the broker that belongs to it."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.near = _End(self)
        self.far: _End | None = None
        self.port = 0
        self.stalled = False

    def _transports(self) -> list[asyncio.Transport]:
        return [end.transport for end in (self.near, self.far) if end is not None and end.transport is not None]

    def opened(self, transport: asyncio.Transport) -> None:
        self.port = transport.get_extra_info("peername")[1]
        self._proxy.dial(self)

    async def connect(self, address: tuple[str, int]) -> None:
        far = _End(self)
        try:
            await asyncio.get_running_loop().create_connection(lambda: far, *address)
        except OSError:
            self.cut()
            return
        self.far = far
        if self.near.transport is None or self.near.transport.is_closing():
            self.cut()
            return
        self.near.join(far)
        far.join(self.near)

    def cut(self) -> None:
        """End both connections at once, as a network would: what is on its way is gone."""
        for transport in self._transports():
            transport.abort()

    def stall(self) -> None:
        """Carry nothing any more, in either direction, until ``flow``; the system's buffers still take some."""
        self.stalled = True
        for transport in self._transports():
            transport.pause_reading()

    def flow(self) -> None:
        self.stalled = False
        for transport in self._transports():
            if not transport.is_closing():
                transport.resume_reading()

    def ended(self, end: _End) -> None:
        self._proxy.pipes.discard(self)
        for transport in self._transports():
            # What was read before the end is still written.
            transport.close()


class Proxy:
    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.pipes: set[Pipe] = set()
        self.endpoint = ("", 0)
        self._server: asyncio.Server | None = None
        self._dials: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._accept, "127.0.0.1", 0)
        self.endpoint = self._server.sockets[0].getsockname()[:2]

    def _accept(self) -> asyncio.Protocol:
        return Pipe(self).near

    def dial(self, pipe: Pipe) -> None:
        """Make the connection to the broker that a new pipe needs."""
        self.pipes.add(pipe)
        task = asyncio.create_task(pipe.connect(self._target))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for pipe in list(self.pipes):
            pipe.cut()
