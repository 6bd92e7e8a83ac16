"""The smallest HTTP client there is: bytes out, whole answers in, and nothing hidden between them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Self

import msgspec

from support.nsq_client import open_stream

PATIENCE = 30.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def message(self) -> str:
        found: str = self.json["message"]
        return found


class HttpClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, address: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Self]:
        reader, writer = await open_stream(address, tls)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(self, method: str, target: str, body: bytes | None = None, *headers: str) -> Answer:
        self.send(request_of(method, target, body, *headers))
        return await self.answer()

    async def get(self, target: str, *headers: str) -> Answer:
        return await self.ask("GET", target, None, *headers)

    async def post(self, target: str, body: bytes = b"", *headers: str) -> Answer:
        return await self.ask("POST", target, body, *headers)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        async with asyncio.timeout(PATIENCE):
            status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if headers.get("transfer-encoding") == "chunked":
                body = await self.chunks()
            else:
                body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(status.split()[1]), headers, body)

    async def chunks(self) -> bytes:
        """A body in chunks; IncompleteReadError if the connection ends before its last one."""
        body = bytearray()
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return bytes(body)

    async def ended(self) -> bytes:
        """All that comes until the server closes the connection."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


def request_of(method: str, target: str, body: bytes | None = None, *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")
