"""The same conversation over every kind of connection: plain, compressed, encrypted, unix sockets; and AUTH."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from flintmq.broker.daemon import Broker
from flintmq.client import Consumer, Producer
from flintmq.errors import ConnectError, PublishError

from .daemons import Nsqd
from .fakes import FakeConnection, FakeNsqd, until

PLAIN: list[dict[str, Any]] = [{}, {"snappy": True}, {"deflate": True, "deflate_level": 3}]


def name_of(options: dict[str, Any]) -> str:
    return "+".join(options) or "plain"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(params=["flintmq", "go"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def running(nsqd: Nsqd) -> Any:
    nsqd.start()
    try:
        yield nsqd
    finally:
        nsqd.stop()


def certificate_flags(authority: trustme.CA, folder: Path) -> list[str]:
    certificate = authority.issue_cert("127.0.0.1", "broker.example")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    return [f"--tls-cert={folder / 'cert.pem'}", f"--tls-key={folder / 'key.pem'}"]


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def converse(address: str, **options: Any) -> None:
    """Small and large, single and many, both directions."""
    noise = random.Random(1).randbytes(700_000)
    bodies = {b"small", noise, *(b"%d" % n * 50 for n in range(300))}
    async with Producer(address, **options) as producer:
        await asyncio.gather(*(producer.publish("t", body) for body in bodies))
    async with Consumer("t", "c", nsqd=address, max_in_flight=50, **options) as consumer:
        found = set()
        async for message in consumer:
            with message:
                found.add(message.body)
            if len(found) == len(bodies):
                break
        assert found == bodies
        assert consumer.stats.received == len(bodies)


@pytest.mark.parametrize("options", PLAIN, ids=name_of)
async def test_plain_and_compressed(kind: str, tmp_path: Path, options: dict[str, Any]) -> None:
    with running(Nsqd(kind, tmp_path / "data")) as nsqd:
        await converse(nsqd.address, **options)


@pytest.mark.parametrize("options", PLAIN, ids=name_of)
async def test_encrypted(kind: str, tmp_path: Path, options: dict[str, Any], authority: trustme.CA) -> None:
    with running(
        Nsqd(kind, tmp_path / "data", *certificate_flags(authority, tmp_path), "--tls-required=tcp-https")
    ) as nsqd:
        await converse(nsqd.address, tls=trusting(authority), **options)
        with pytest.raises(ConnectError, match="certificate"):
            await Producer(nsqd.address, tls=True).start()
        with pytest.raises(ConnectError, match=r"broker\.elsewhere"):
            await Producer(nsqd.address, tls=trusting(authority), tls_hostname="broker.elsewhere").start()
        async with Producer(nsqd.address, tls=trusting(authority), tls_hostname="broker.example") as producer:
            await producer.publish("t", b"x")


async def test_unix_sockets(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "nsqd.sock")
    flags = (f"--tcp-address={path}", f"--http-address={tmp_path / 'http.sock'}")
    with running(Nsqd(kind, tmp_path / "data", *flags)):
        await converse(path, snappy=True)


async def test_uvloop(tmp_path: Path, authority: trustme.CA) -> None:
    uvloop = pytest.importorskip("uvloop")

    def talk(**options: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(converse(nsqd.address, **options))

    with running(Nsqd("flintmq", tmp_path / "data")) as nsqd:
        await asyncio.to_thread(talk)
        await asyncio.to_thread(talk, deflate=True)


async def test_uvloop_with_tls(kind: str, tmp_path: Path, authority: trustme.CA) -> None:
    uvloop = pytest.importorskip("uvloop")

    def talk() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(converse(nsqd.address, tls=trusting(authority), snappy=True))

    with running(Nsqd(kind, tmp_path / "data", *certificate_flags(authority, tmp_path))) as nsqd:
        await asyncio.to_thread(talk)


async def test_a_connect_of_ones_own(tmp_path: Path) -> None:
    """A user may open the transport: here to a broker whose name he alone knows."""
    async with Broker(data_path=tmp_path) as broker:
        host, _, port = broker.tcp_address.rpartition(":")

        async def connect(address: str, factory: Any) -> Any:
            assert address == "the.broker:1"
            return await asyncio.get_running_loop().create_connection(factory, host, int(port))

        await converse("the.broker:1", connect=connect)


async def test_compressed_answers_may_come_with_the_answer_to_identify(fake: FakeNsqd) -> None:
    """The broker does not wait before it says OK through the compression."""
    from flintmq.protocol.compression import Deflate
    from flintmq.protocol.wire import OK_FRAME, encode_frame

    codec = Deflate(6)

    async def together(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        connection.write(encode_frame(0, b'{"deflate":true,"deflate_level":6}') + codec.compress(OK_FRAME))
        fake.on_command = silence

    async def silence(connection: FakeConnection, command: tuple[bytes, ...]) -> None: ...

    fake.on_command = together
    async with Producer(fake.address, deflate=True) as producer:
        assert producer.connections == [fake.address]


@pytest.mark.parametrize("noise", [b"\xff" * 100, b"\x00" * 100, b"sNaPpY"])
async def test_compressed_nonsense_is_reported(fake: FakeNsqd, noise: bytes) -> None:
    from flintmq.protocol.wire import encode_frame

    async def nonsense(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        connection.write(encode_frame(0, b'{"snappy":true}') + noise)
        connection.close()

    fake.on_command = nonsense
    with pytest.raises(ConnectError):
        await Producer(fake.address, snappy=True, timeout=0.2).start()


# --- AUTH


@contextlib.asynccontextmanager
async def auth_server() -> AsyncIterator[str]:
    """Lets `secret` publish and subscribe to topics that begin with t."""

    async def auth(request: web.Request) -> web.Response:
        if request.query.get("secret") != "secret":
            return web.json_response({"message": "NOT_AUTHORIZED"}, status=403)
        rights = {"topic": "^t.*$", "channels": [".*"], "permissions": ["subscribe", "publish"]}
        return web.json_response({"ttl": 3600, "identity": "somebody", "identity_url": "", "authorizations": [rights]})

    app = web.Application()
    app.router.add_get("/auth", auth)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_auth(kind: str, tmp_path: Path) -> None:
    async with auth_server() as address:
        with running(Nsqd(kind, tmp_path / "data", f"--auth-http-address={address}")) as nsqd:
            await converse(nsqd.address, auth_secret="secret")
            with pytest.raises(ConnectError, match="asks for AUTH"):
                await Producer(nsqd.address).start()
            with pytest.raises(ConnectError, match=r"E_AUTH_FAILED|E_UNAUTHORIZED"):
                await Producer(nsqd.address, auth_secret="wrong").start()
            async with Producer(nsqd.address, auth_secret=b"secret", reconnect_delay=0.01) as producer:
                results = await asyncio.gather(
                    *(producer.publish(topic, b"x") for topic in ("t1", "not_allowed", "t2")), return_exceptions=True
                )
                assert (results[0], results[2]) == (None, None)
                assert isinstance(results[1], PublishError) and results[1].code == "E_UNAUTHORIZED"
            reported: list[Exception] = []
            async with Consumer(
                "not_allowed",
                "c",
                nsqd=nsqd.address,
                auth_secret="secret",
                on_error=lambda _, error: reported.append(error),
            ):
                await until(lambda: reported)
            assert "E_UNAUTHORIZED" in str(reported[0])


class Resetting(threading.Thread):
    """A server that greets one client, and resets the connection when it is told to."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._told = threading.Event()

    def run(self) -> None:
        with self._listener, self._listener.accept()[0] as sock:
            features = json.dumps({"max_rdy_count": 2500, "version": "1.3.0", "max_msg_timeout": 900_000}).encode()
            received = b""
            for command, answer in ((b"IDENTIFY\n", features), (b"SUB ", b"OK")):
                while command not in received:
                    received += sock.recv(4096)
                sock.sendall(struct.pack(">II", len(answer) + 4, 0) + answer)
            self._told.wait(30)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def reset(self) -> None:
        """Return when the connection is reset. The event loop stands still meanwhile, and knows nothing of it."""
        self._told.set()
        self.join(30)


async def test_close_of_a_connection_that_was_just_reset_ends_quietly() -> None:
    server = Resetting()
    server.start()
    async with Consumer("t", "c", nsqd=server.address) as consumer:
        await until(lambda: consumer.connections == [server.address])
        [connection] = consumer._connections
        connection.flush()
        server.reset()
        await connection.close()
