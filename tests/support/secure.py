"""What tests of TLS and authorization need: certificates, a client with layers, an auth server, a real nsqd.

The client sees every byte itself (its TLS is a pump in memory), so that it can also do what no honest client does.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import re
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import trustme

from flintmq.protocol.compression import Codec
from flintmq.protocol.wire import FRAME_ERROR, FRAME_RESPONSE, HEARTBEAT, MAGIC_V2, encode_command
from support.peers import GO_NSQD

#: How long anything may take. Only failures take that long.
PATIENCE = 60.0
#: For brokers whose auth server is slow only because the whole machine is.
PATIENT = {"http_client_request_timeout": 600 * 10**9, "http_client_connect_timeout": 600 * 10**9}


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


# --- Certificates -----------------------------------------------------------------------------------------------------


@dataclass
class Certificates:
    """An authority with a server's certificate in files, and another authority that nobody trusts."""

    folder: Path
    authority: trustme.CA = field(default_factory=trustme.CA)
    stranger: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.cert = str(self.folder / "cert.pem")
        self.key = str(self.folder / "key.pem")
        self.ca = str(self.folder / "ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)
        self.issue()

    def issue(self) -> None:
        """A new certificate for the server, in the same files."""
        issued = self.authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(self.key)
        Path(self.cert).write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))

    @property
    def options(self) -> dict[str, Any]:
        return {"tls_cert": self.cert, "tls_key": self.key}

    def client(
        self,
        *,
        signed_by: trustme.CA | None = None,
        common_name: str | None = None,
        versions: tuple[ssl.TLSVersion, ssl.TLSVersion] | None = None,
    ) -> ssl.SSLContext:
        """A client that trusts the server; with a certificate of its own if ``signed_by`` says whose."""
        context = ssl.create_default_context(cafile=self.ca)
        if versions is not None:
            context.minimum_version, context.maximum_version = versions
        if signed_by is not None:
            signed_by.issue_cert("client.example", common_name=common_name).configure_cert(context)
        return context


TLS12 = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2)
TLS13 = (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3)
OLD = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
#: How many strangers there are.
STRANGERS = 10


def strangers(certificates: Certificates) -> Iterator[tuple[str, ssl.SSLContext]]:
    """Clients without a certificate that the authority vouches for."""
    for versions in (TLS12, TLS13):
        name = versions[0].name
        yield f"no certificate, {name}", certificates.client(versions=versions)
        yield f"another authority, {name}", certificates.client(signed_by=certificates.stranger, versions=versions)
        lapsed = certificates.client(versions=versions)
        certificates.authority.issue_cert("x", not_after=OLD).configure_cert(lapsed)
        yield f"expired, {name}", lapsed
        own = certificates.client(versions=versions)
        # An authority's own certificate is signed by itself.
        with certificates.stranger.private_key_pem.tempfile() as key, certificates.stranger.cert_pem.tempfile() as cert:
            own.load_cert_chain(cert, key)
        yield f"self-signed, {name}", own
        # Mine by name only.
        pretender = certificates.client(versions=versions)
        certificates.stranger.issue_cert("127.0.0.1", common_name="trusted").configure_cert(pretender)
        yield f"a borrowed name, {name}", pretender


# --- A client with layers ---------------------------------------------------------------------------------------------


def identify(**fields: Any) -> bytes:
    return encode_command(b"IDENTIFY", body=json.dumps({"feature_negotiation": True, **fields}).encode())


def auth(secret: bytes) -> bytes:
    return encode_command(b"AUTH", body=secret)


def pub(topic: bytes = b"t", body: bytes = b"x") -> bytes:
    return encode_command(b"PUB", topic, body=body)


class Peer:
    """One connection; ``frame`` is None at its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        #: What was received, free of all layers, and not looked at yet.
        self._received = bytearray()
        self._codec: Codec | None = None
        self.tls: ssl.SSLObject | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, address: str, *, magic: bytes = MAGIC_V2) -> AsyncIterator[Peer]:
        if "/" in address:
            reader, writer = await asyncio.open_unix_connection(address)
        else:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(magic)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def send(self, data: bytes) -> None:
        if self._codec is not None:
            data = self._codec.compress(data)
        self.send_encrypted(data)

    def send_encrypted(self, data: bytes) -> None:
        """Without the compression that was agreed on."""
        if self.tls is not None:
            self.tls.write(data)
            data = self._outgoing.read()
        self.send_raw(data)

    def send_raw(self, data: bytes) -> None:
        """As it is, whatever was agreed on."""
        self._writer.write(data)

    def end_input(self) -> None:
        self._writer.write_eof()

    async def _receive(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            try:
                return await self._reader.read(1 << 16)
            except ConnectionResetError:
                # Closed with our bytes unread; for a client the same as a close.
                return b""

    async def receive_raw(self) -> bytes:
        """Everything up to the end, as it is."""
        received = b""
        while data := await self._receive():
            received += data
        return received

    async def frame(self) -> tuple[int, bytes] | None:
        """The next frame but heartbeats. Only one is taken at a time: what follows may have another form."""
        while True:
            size = 4 + int.from_bytes(self._received[:4], "big")
            if len(self._received) >= 8 and len(self._received) >= size:
                frame = int.from_bytes(self._received[4:8], "big"), bytes(self._received[8:size])
                del self._received[:size]
                if frame != (FRAME_RESPONSE, HEARTBEAT):
                    return frame
                continue
            data = await self._receive()
            if not data:
                assert not self._received, f"half a frame: {bytes(self._received)!r}"
                return None
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        if self.tls is not None:
            self._incoming.write(data)
            data = b""
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                while piece := self.tls.read(1 << 16):
                    data += piece
        self._received += b"".join(self._codec.decompress(data)) if self._codec is not None else data

    async def ask(self, command: bytes) -> bytes:
        """The answer to a command, an error included."""
        self.send(command)
        frame = await self.frame()
        return frame[1] if frame is not None else b"closed"

    async def error(self, command: bytes = b"") -> bytes:
        """Send the command; the error that comes back, and nothing else, before the end."""
        self.send(command)
        frame = await self.frame()
        assert frame is not None, "closed without an error"
        assert frame[0] == FRAME_ERROR, frame
        assert await self.frame() is None
        return frame[1]

    async def negotiate(self, **fields: Any) -> dict[str, Any]:
        answer = await self.ask(identify(**fields))
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    async def encrypt(self, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> None:
        """The client's side of the handshake. ssl.SSLError if it fails, EOFError if the server hangs up."""
        tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1", session=session)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._writer.write(self._outgoing.read())
                data = await self._receive()
                if not data:
                    raise EOFError from None
                self._incoming.write(data)
        self._writer.write(self._outgoing.read())
        self.tls = tls
        # What came right behind the handshake.
        self._feed(b"")

    def compress(self, codec: Codec) -> None:
        """From the next byte on both directions are compressed."""
        self._codec = codec
        self._received = bytearray(b"".join(codec.decompress(bytes(self._received))))


# --- An auth server ---------------------------------------------------------------------------------------------------


def grants(
    topic: str = ".*",
    channels: Sequence[str] = (".*",),
    permissions: Sequence[str] = ("subscribe", "publish"),
    *,
    ttl: Any = 3600,
    **more: Any,
) -> dict[str, Any]:
    """An answer with one authorization."""
    entry = {"topic": topic, "channels": list(channels), "permissions": list(permissions)}
    return {"ttl": ttl, "identity": "someone", "identity_url": "http://example", "authorizations": [entry], **more}


@dataclass
class Question:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, list[str]]:
        if self.body:
            decoded: dict[str, list[str]] = json.loads(self.body)
            return decoded
        return parse_qs(self.target.partition("?")[2], keep_blank_values=True)


class AuthServer:
    """Answers every question with ``answer``: JSON, bytes, or what a function makes of the question.

    A status other than 200 is a pair: ``(403, b"…")``. None is no answer at all, as long as the client waits.
    """

    def __init__(self) -> None:
        self.answer: Any = grants()
        self.questions: list[Question] = []
        self.address = ""
        self.listener: asyncio.Server

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, tls: ssl.SSLContext | None = None) -> AsyncIterator[AuthServer]:
        server = cls()
        server.listener = await asyncio.start_server(server._serve, "127.0.0.1", 0, ssl=tls)
        server.address = f"127.0.0.1:{server.listener.sockets[0].getsockname()[1]}"
        try:
            yield server
        finally:
            server.listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._converse(reader, writer)
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        question = Question(method, target, headers, body)
        self.questions.append(question)
        answer = self.answer(question) if callable(self.answer) else self.answer
        if answer is None:
            await reader.read()
            return
        status, content, *location = answer if isinstance(answer, tuple) else (200, answer)
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        more = "".join(f"Location: {url}\r\n" for url in location).encode()
        writer.write(b"HTTP/1.1 %d Whatever\r\n%bContent-Length: %d\r\n\r\n" % (status, more, len(content)) + content)
        await writer.drain()


# --- A real nsqd ------------------------------------------------------------------------------------------------------


def go_nsqd() -> str:
    """The path of NSQ's own daemon; skips the test where there is none."""
    path = GO_NSQD
    if not path.exists():
        pytest.skip("no Go nsqd in $FLINTMQ_PEERS/bin or .peers/bin")
    return str(path)


@contextlib.asynccontextmanager
async def run_go(*flags: str) -> AsyncIterator[str]:
    """NSQ's own daemon, with an empty data path; its TCP address."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--https-address=127.0.0.1:0")
        process = await asyncio.create_subprocess_exec(
            go_nsqd(), *addresses, f"--data-path={folder}", *flags, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(PATIENCE):
                while line := await process.stderr.readline():
                    if found := re.search(rb"TCP: listening on (127\.0\.0\.1:\d+)", line):
                        break
                else:
                    pytest.fail("the Go nsqd does not listen")
            reading = asyncio.create_task(process.stderr.read())
            yield found[1].decode()
        finally:
            process.kill()
            await process.wait()
        await reading
