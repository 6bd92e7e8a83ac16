"""The command-line tools, one file each, and what they share: one connection to a broker, and how a tool ends.

A `Link` speaks the client's side of the protocol on asyncio streams. It answers heartbeats by itself; what the other
frames mean is the tool's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from flintmq import wire
from flintmq.errors import FlintError, ProtocolError

__all__ = ["DEFAULT_NSQD", "Link", "refusal", "run"]

DEFAULT_NSQD = "127.0.0.1:4150"

# A broker that cannot take a connection or say goodbye in this time is as good as gone.
_PATIENCE_SECONDS = 5.0


class Link:
    """One connection to a broker, after IDENTIFY."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address = address
        #: What the broker answered to IDENTIFY: its limits and what it asks for.
        self.features: dict[str, Any] = {}
        self._reader = reader
        self._writer = writer
        self._decoder = wire.FrameDecoder()
        self._frames: deque[tuple[int, bytes]] = deque()

    @classmethod
    async def open(cls, address: str, **identify: Any) -> Link:
        """Connect and IDENTIFY; `identify` are fields of its body, such as `heartbeat_interval`."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                reader, writer = await _connect(address)
        except (OSError, ValueError) as exc:
            text = f"cannot connect to a broker at {address} ({_reason(exc)}); start one with: flintmq up"
            raise ConnectionError(text) from exc
        link = cls(address, reader, writer)
        host = socket.gethostname()
        body = {
            "client_id": host.partition(".")[0],
            "hostname": host,
            "user_agent": "flintmq",
            "feature_negotiation": True,
        }
        try:
            link.send(wire.MAGIC_V2 + wire.encode_command(b"IDENTIFY", body=msgspec.json.encode(body | identify)))
            async with asyncio.timeout(_PATIENCE_SECONDS):
                link.features = msgspec.json.decode(await link.response(), type=dict[str, Any])
            if link.features.get("auth_required"):
                raise ConnectionError(f"{address} asks for AUTH, which this tool cannot give")
        except BaseException as exc:
            writer.close()
            # No answer, no frames, no JSON: an HTTP port, for example.
            is_frame_error = isinstance(exc, ProtocolError) and exc.code == "E_INVALID"
            if is_frame_error or isinstance(exc, TimeoutError | msgspec.MsgspecError):
                raise ConnectionError(f"what listens at {address} does not answer like an NSQ broker") from exc
            raise
        return link

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait while more is buffered than a slow broker should be sent."""
        await self._writer.drain()

    async def frames(self) -> list[tuple[int, bytes]]:
        """Everything that has arrived, at least one frame. Heartbeats are answered and left out."""
        while not self._frames:
            data = await self._reader.read(256 * 1024)
            if not data:
                raise ConnectionError(f"{self.address} closed the connection")
            for kind, payload in self._decoder.feed(data):
                if kind == wire.FRAME_RESPONSE and payload == wire.HEARTBEAT:
                    self.send(wire.encode_command(b"NOP"))
                else:
                    self._frames.append((kind, payload))
        frames = list(self._frames)
        self._frames.clear()
        return frames

    async def response(self) -> bytes:
        """The next answer. Raises ProtocolError where the broker refused."""
        if not self._frames:
            self._frames.extend(await self.frames())
        kind, payload = self._frames.popleft()
        if kind == wire.FRAME_RESPONSE:
            return payload
        if kind == wire.FRAME_ERROR:
            raise refusal(payload)
        raise ConnectionError(f"{self.address} sent a message where an answer was due")

    async def close(self) -> None:
        """Close without losing what was sent: closing a socket with unread input would cut off our last commands."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._writer.drain()
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                while await self._reader.read(256 * 1024):
                    pass
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To `host:port`, or to a unix socket where the address is a path."""
    host, colon, port = address.rpartition(":")
    if "/" in address or not colon:
        return await asyncio.open_unix_connection(address)
    if not port.isdecimal():
        raise ValueError(f'"{port}" is not a port')
    return await asyncio.open_connection(host.strip("[]") or "127.0.0.1", int(port))


def _reason(exc: Exception) -> str:
    """Why a system call failed, in the system's own words: asyncio puts the address in their place."""
    if isinstance(exc, TimeoutError):
        return "no answer"
    number = exc.errno if isinstance(exc, OSError) else None
    # Failed look-ups of names have numbers of their own, which are negative.
    return os.strerror(number) if number is not None and number > 0 else str(exc)


def refusal(payload: bytes) -> ProtocolError:
    """The error of an error frame: `E_BAD_TOPIC …`."""
    code, _, text = payload.decode(errors="replace").partition(" ")
    return ProtocolError(code, text)


def run(tool: str, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a tool to its exit status; what ends it early is one line on standard error."""
    try:
        return asyncio.run(main())
    except KeyboardInterrupt:
        return 130
    except OSError as exc:
        reason = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    except FlintError as exc:
        reason = str(exc)
    sys.stderr.write(f"flintmq {tool}: {reason}\n")
    return 1
