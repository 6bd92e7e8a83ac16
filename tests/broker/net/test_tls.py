"""TLS on the TCP port: the upgrade with every layer inside it, who is let in, and what a bad handshake costs."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import os
import re
import signal
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trustme
from conftest import StartBroker
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from flintmq.broker.daemon import Broker
from flintmq.broker.net import upgrade
from flintmq.errors import StartError
from flintmq.lookup.daemon import Lookupd
from flintmq.protocol.compression import Codec, Deflate, Snappy
from flintmq.protocol.wire import FRAME_ERROR, FRAME_MESSAGE, FRAME_RESPONSE, OK_FRAME, decode_message, encode_mpub
from support.fakes import Client
from support.secure import PATIENCE, Certificates, Peer, identify, pub, run_go, until

TLS12 = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2)
TLS13 = (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3)


HANDSHAKE_TIMEOUT = upgrade.HANDSHAKE_TIMEOUT


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a while must not look like a client that does."""
    monkeypatch.setattr(upgrade, "HANDSHAKE_TIMEOUT", 600.0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@contextlib.asynccontextmanager
async def encrypted(broker: Broker, context: ssl.SSLContext, **fields: Any) -> AsyncIterator[Peer]:
    """A connection that has TLS."""
    async with Peer.connect(broker.tcp_address) as peer:
        assert (await peer.negotiate(tls_v1=True, **fields))["tls_v1"] is True
        await peer.encrypt(context)
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        yield peer


# --- The upgrade ------------------------------------------------------------------------------------------------------


def layers() -> list[Any]:
    found: list[Any] = [pytest.param({}, None, id="nothing else"), pytest.param({"snappy": True}, Snappy, id="snappy")]
    for level in range(1, 10):
        fields = {"deflate": True, "deflate_level": level}
        found.append(pytest.param(fields, lambda level=level: Deflate(level), id=f"deflate {level}"))
    return found


@pytest.mark.parametrize(("fields", "codec"), layers())
@pytest.mark.parametrize("versions", [TLS12, TLS13], ids=["1.2", "1.3"])
async def test_each_layer_says_ok_inside_itself_and_carries_messages(
    start_broker: StartBroker,
    certificates: Certificates,
    versions: tuple[ssl.TLSVersion, ssl.TLSVersion],
    fields: dict[str, Any],
    codec: Callable[[], Codec] | None,
) -> None:
    broker = await start_broker(**certificates.options, max_deflate_level=9)
    async with encrypted(broker, certificates.client(versions=versions), **fields) as peer:
        if codec is not None:
            peer.compress(codec())
            assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        bodies = [os.urandom(size) + b"z" * size for size in (1, 1_000, 100_000)]
        assert await peer.ask(encode_mpub(b"t", bodies)) == b"OK"
        assert await peer.ask(pub(b"t", b"one more")) == b"OK"
        assert await peer.ask(pub(b"t", b"and the same line again")) == b"OK"
        assert await peer.ask(b"SUB t c\n") == b"OK"
        peer.send(b"RDY 10\n")
        received = []
        for _ in range(5):
            frame = await peer.frame()
            assert frame is not None and frame[0] == FRAME_MESSAGE
            message = decode_message(frame[1])
            received.append(message.body)
            peer.send(b"FIN %s\n" % message.id)
        assert received == [*bodies, b"one more", b"and the same line again"]
        [session] = broker.sessions.values()
        await until(lambda: session.finish_count == 5)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("epoll", [True, False], ids=["epoll", "transports"])
def test_tls_is_the_same_on_every_loop_and_kind_of_socket(
    loop: str, epoll: bool, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    if not epoll:
        monkeypatch.setattr("flintmq.broker.net.sockets.available", lambda: False)
    raised: list[dict[str, Any]] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        async with Broker(data_path=tmp_path, disk_reserve=0, **certificates.options) as broker:
            async with encrypted(broker, certificates.client(), snappy=True) as peer:
                peer.compress(Snappy())
                assert await peer.frame() == (FRAME_RESPONSE, b"OK")
                body = os.urandom(900_000)
                assert await peer.ask(pub(b"t", body)) == b"OK"
                assert await peer.ask(b"SUB t c\n") == b"OK"
                peer.send(b"RDY 1\n")
                frame = await peer.frame()
                assert frame is not None and decode_message(frame[1]).body == body
            async with Peer.connect(broker.tcp_address) as peer:
                await peer.negotiate(tls_v1=True)
                assert (await peer.error(b"no TLS at all")).startswith(b"E_IDENTIFY_FAILED IDENTIFY failed tls: ")
            await until(lambda: not broker.sessions)

    run(test(), factory)
    assert raised == []


def run(test: Coroutine[Any, Any, None], factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def watched() -> None:
        async with asyncio.timeout(PATIENCE):
            await test

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(watched())


async def test_tls_works_on_a_unix_socket(
    start_broker: StartBroker, certificates: Certificates, tmp_path: Path
) -> None:
    broker = await start_broker(**certificates.options, tcp_address=str(tmp_path / "nsqd.sock"))
    async with encrypted(broker, certificates.client()) as peer:
        assert await peer.ask(pub()) == b"OK"


async def test_without_a_certificate_or_negotiation_tls_is_not_granted(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = await start_broker()
    async with Peer.connect(broker.tcp_address) as peer:
        assert (await peer.negotiate(tls_v1=True))["tls_v1"] is False
        assert await peer.ask(pub()) == b"OK"
    await broker.stop()
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        assert (await peer.negotiate())["tls_v1"] is False
        assert await peer.ask(identify(tls_v1=True, feature_negotiation=False)) == b"OK"
        assert await peer.ask(pub()) == b"OK"


async def test_what_came_right_behind_identify_is_dropped(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    """Somebody on the way could have put it there, to be taken for the client's own words inside TLS."""
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        peer.send(identify(tls_v1=True) + pub(b"smuggled"))
        assert await peer.frame() is not None
        await peer.encrypt(certificates.client())
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        assert await peer.ask(pub(b"honest")) == b"OK"
    assert list(broker.topics) == ["honest"]


async def test_what_came_behind_an_identify_in_a_compressed_stream_is_dropped(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(snappy=True)
        peer.compress(codec := Snappy())
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        # Blocks of their own, so that each is a piece of its own.
        peer.send_raw(codec.compress(identify(tls_v1=True)) + codec.compress(pub(b"smuggled")) + codec.compress(b"N"))
        assert await peer.frame() is not None
        peer._codec = None
        await peer.encrypt(certificates.client())
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        assert await peer.ask(pub(b"honest")) == b"OK"
    assert list(broker.topics) == ["honest"]


async def test_commands_sent_with_the_end_of_the_handshake_are_run(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    """Inside TLS they are the client's own: it need not wait for the OK."""
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        await peer.encrypt(certificates.client(versions=TLS13))
        peer.send(pub() + pub())
        assert [await peer.frame() for _ in range(3)] == [(FRAME_RESPONSE, b"OK")] * 3


async def test_answers_that_are_owed_go_out_in_the_clear_before_the_upgrade(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        peer.send(pub() + pub(b"other") + identify(tls_v1=True, snappy=True))
        assert [await peer.frame() for _ in range(2)] == [(FRAME_RESPONSE, b"OK")] * 2
        frame = await peer.frame()
        assert frame is not None and json.loads(frame[1])["tls_v1"]
        await peer.encrypt(certificates.client())
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        peer.compress(Snappy())
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")


async def test_an_upgrade_ends_the_short_way_of_plain_publishes(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    """A producer's next PUB in the clear must not be taken once TLS was agreed on."""
    broker = await start_broker(**certificates.options)
    for fields in ({"tls_v1": True}, {"snappy": True}, {"deflate": True}):
        async with Peer.connect(broker.tcp_address) as peer:
            assert [await peer.ask(pub()) for _ in range(3)] == [b"OK"] * 3
            topic = broker.topics["t"]
            before = topic.message_count
            await peer.negotiate(**fields)
            peer.send_raw(pub())
            assert OK_FRAME not in await peer.receive_raw()
            assert topic.message_count == before


async def test_identify_may_come_again_inside_tls_but_not_ask_for_tls_again(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = await start_broker(**certificates.options)
    async with encrypted(broker, certificates.client()) as peer:
        assert (await peer.negotiate(snappy=True))["snappy"] is True
        peer.compress(Snappy())
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        assert await peer.ask(pub()) == b"OK"
        error = await peer.error(identify(tls_v1=True))
        assert error == b"E_IDENTIFY_FAILED IDENTIFY failed the connection is encrypted already"


async def test_a_client_that_takes_its_leave_gets_what_it_is_owed(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = await start_broker(**certificates.options)
    async with encrypted(broker, certificates.client()) as peer:
        peer.send(pub())
        assert peer.tls is not None
        with contextlib.suppress(ssl.SSLWantReadError):
            peer.tls.unwrap()
        peer.send_raw(peer._outgoing.read())
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        assert await peer.frame() is None
    await until(lambda: not broker.sessions)


async def test_the_end_of_a_connection_is_told_inside_tls(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    """So that a client can tell it from a connection that was cut."""
    broker = await start_broker(**certificates.options)
    async with encrypted(broker, certificates.client()) as peer:
        peer.send(b"nonsense\n")
        assert await peer.frame() == (FRAME_ERROR, b"E_INVALID invalid command nonsense")
        assert await peer.receive_raw() == b""
        # A connection that was cut would raise: there could be more.
        assert peer.tls is not None and peer.tls.read(1) == b""


async def test_a_slow_reader_keeps_its_messages_in_the_log(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    """Encrypted bytes that the peer does not take are no reason to make more of them."""
    broker = await start_broker(**certificates.options)
    producer = Client(broker)
    body = os.urandom(500_000)
    for _ in range(40):
        await producer.publish("t", body)
    async with encrypted(broker, certificates.client()) as peer:
        assert await peer.ask(b"SUB t c\n") == b"OK"
        peer.send(b"RDY 100\n")
        session = next(session for session in broker.sessions.values() if session.channel is not None)
        await until(lambda: not session._writable)
        assert session.in_flight < 40
        assert session._transport.get_write_buffer_size() < 2 << 20
        for _ in range(40):
            frame = await peer.frame()
            assert frame is not None and decode_message(frame[1]).body == body
        assert session.in_flight == 40


async def test_a_session_knows_what_was_agreed_in_go_s_words(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = await start_broker(**certificates.options)
    suite = certificates.client(versions=TLS12)
    suite.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    other = certificates.client(versions=TLS12)
    other.set_ciphers("ECDHE-ECDSA-AES256-GCM-SHA384")
    expected = [
        (suite, "TLS1.2", {"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"}),
        (other, "TLS1.2", {"Unknown 49196"}),
        (certificates.client(versions=TLS13), "TLS1.3", {"Unknown 4865", "Unknown 4866", "Unknown 4867"}),
    ]
    for context, version, suites in expected:
        async with encrypted(broker, context):
            [session] = broker.sessions.values()
            assert session.tls_info is not None
            assert session.tls_info.pop("cipher_suite") in suites
            assert session.tls_info == {
                "version": version,
                "negotiated_protocol": "",
                "negotiated_protocol_is_mutual": True,
            }
        await until(lambda: not broker.sessions)
    assert Client(broker).session.tls_info is None


# --- Handshakes that fail ---------------------------------------------------------------------------------------------


async def test_a_client_that_goes_on_in_the_clear_is_told_so_in_the_clear(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        expected = b"E_IDENTIFY_FAILED IDENTIFY failed tls: first record does not look like a TLS handshake"
        assert await peer.error(pub(b"smuggled")) == expected
    assert not broker.topics


@pytest.mark.parametrize(
    "record",
    [
        b"\x16\x03\x01\x00\x05hello",
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x16\x00\x00\x00\x00" * 100,
        b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(70_000),
    ],
    ids=["no hello", "too large", "empty records", "a hello of 16 MiB"],
)
async def test_a_handshake_of_garbage_costs_its_connection_only(
    start_broker: StartBroker, certificates: Certificates, record: bytes
) -> None:
    broker = await start_broker(**certificates.options)
    async with encrypted(broker, certificates.client()) as honest, Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        peer.send_raw(record)
        # An alert may come first.
        assert b"E_IDENTIFY_FAILED IDENTIFY failed tls: " in await peer.receive_raw()
        assert await honest.ask(pub()) == b"OK"
    await until(lambda: not broker.sessions)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "a little"])
async def test_a_handshake_has_a_deadline(
    start_broker: StartBroker, certificates: Certificates, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HANDSHAKE_TIMEOUT == 5.0
    monkeypatch.setattr(upgrade, "HANDSHAKE_TIMEOUT", 0.05)
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        assert await peer.error(sent) == b"E_IDENTIFY_FAILED IDENTIFY failed i/o timeout"
    await until(lambda: not broker.sessions)


async def test_no_heartbeat_gets_into_a_handshake(start_broker: StartBroker, certificates: Certificates) -> None:
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True, heartbeat_interval=1000)
        [session] = broker.sessions.values()
        due = session.heartbeat.next
        # Two intervals without a command would end any other connection.
        await until(lambda: session.heartbeat.next > due + 1.0)
        await peer.encrypt(certificates.client())
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")


async def test_a_client_that_leaves_during_the_handshake_leaves_nothing_behind(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        [session] = broker.sessions.values()
    await until(lambda: not broker.sessions)
    assert session.upgrade is not None and not session.upgrade.under_way


async def test_damage_inside_tls_ends_the_connection(start_broker: StartBroker, certificates: Certificates) -> None:
    broker = await start_broker(**certificates.options)
    async with encrypted(broker, certificates.client()) as peer:
        peer.send_raw(b"\x17\x03\x03\x00\x20" + os.urandom(32))
        assert await peer.receive_raw()  # an alert
    await until(lambda: not broker.sessions)


# --- Who is let in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["require", "require-verify"])
@pytest.mark.parametrize("versions", [TLS12, TLS13], ids=["1.2", "1.3"])
async def test_a_client_needs_a_certificate_of_the_authority(
    start_broker: StartBroker,
    certificates: Certificates,
    policy: str,
    versions: tuple[ssl.TLSVersion, ssl.TLSVersion],
) -> None:
    options = {**certificates.options, "tls_client_auth_policy": policy, "tls_root_ca_file": certificates.ca}
    broker = await start_broker(**options)
    good = certificates.client(signed_by=certificates.authority, common_name="Some Body", versions=versions)
    async with encrypted(broker, good) as peer:
        assert await peer.ask(pub(b"good")) == b"OK"
        [session] = broker.sessions.values()
        assert session.upgrade is not None and session.upgrade.common_name == "Some Body"
    for signer in (None, certificates.stranger):
        bad = certificates.client(signed_by=signer, versions=versions)
        async with Peer.connect(broker.tcp_address) as peer:
            await peer.negotiate(tls_v1=True)
            with contextlib.suppress(ssl.SSLError, EOFError):
                # In TLS 1.3 the client believes for a moment that it is in.
                await peer.encrypt(bad)
                peer.send(pub(b"bad"))
            assert OK_FRAME not in await peer.receive_raw()
    assert list(broker.topics) == ["good"]


async def test_a_self_signed_client_is_refused_even_by_require(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    """NSQ takes any certificate then; it proves nothing."""
    options = {**certificates.options, "tls_client_auth_policy": "require"}
    broker = await start_broker(**options)
    context = certificates.client()
    trustme.CA().issue_cert("x").configure_cert(context)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        with contextlib.suppress(ssl.SSLError, EOFError):
            await peer.encrypt(context)
            peer.send(pub(b"bad"))
        assert OK_FRAME not in await peer.receive_raw()
    assert not broker.topics


COMMANDS = [b"NOP\n", b"nope\n", b"\n", pub(), b"FIN x\n", b"AUTH\n\0\0\0\1x", b"identify\n", b"SUB a b\n", b"NOP \n"]


@pytest.mark.parametrize("required", ["true", "tcp-https"])
@pytest.mark.parametrize("command", COMMANDS)
async def test_before_tls_only_identify_is_taken_where_tls_is_required(
    start_broker: StartBroker, certificates: Certificates, required: str, command: bytes
) -> None:
    broker = await start_broker(**certificates.options, tls_required=required)
    word = command.split(b"\n")[0].split(b" ")[0]
    expected = b"E_INVALID cannot %s in current state (TLS required)" % word
    async with Peer.connect(broker.tcp_address) as peer:
        assert await peer.error(command) == expected
    async with Peer.connect(broker.tcp_address) as peer:
        assert (await peer.negotiate(snappy=True))["tls_v1"] is False
        peer.compress(Snappy())
        assert await peer.frame() == (FRAME_RESPONSE, b"OK")
        assert await peer.error(command) == expected
    assert not broker.topics
    async with encrypted(broker, certificates.client()) as peer:
        assert await peer.ask(pub()) == b"OK"


@pytest.mark.interop
@pytest.mark.parametrize("command", COMMANDS)
async def test_the_go_daemon_says_the_same_where_tls_is_required(certificates: Certificates, command: bytes) -> None:
    flags = (f"--tls-cert={certificates.cert}", f"--tls-key={certificates.key}", "--tls-required=tcp-https")
    word = command.split(b"\n")[0].split(b" ")[0]
    async with run_go(*flags) as address, Peer.connect(address) as peer:
        assert await peer.error(command) == b"E_INVALID cannot %s in current state (TLS required)" % word


@pytest.mark.interop
async def test_the_go_daemon_says_the_same_to_a_client_that_goes_on_in_the_clear(certificates: Certificates) -> None:
    flags = (f"--tls-cert={certificates.cert}", f"--tls-key={certificates.key}")
    async with run_go(*flags) as address, Peer.connect(address) as peer:
        await peer.negotiate(tls_v1=True)
        expected = b"E_IDENTIFY_FAILED IDENTIFY failed tls: first record does not look like a TLS handshake"
        assert await peer.error(pub(b"smuggled")) == expected


def old_hello(version: int) -> bytes:
    """The hello of a client that knows nothing newer: 0x0301 is TLS 1.0, 0x0302 TLS 1.1."""
    # Suites that TLS 1.0 has, and the groups and signatures that a server would want to know.
    suites = b"".join(struct.pack(">H", suite) for suite in (0xC009, 0xC00A, 0xC013, 0xC014, 0x002F, 0x0035))
    groups = struct.pack(">HHHH", 10, 4, 2, 0x0017)
    formats = struct.pack(">HHBB", 11, 2, 1, 0)
    body = struct.pack(">H", version) + os.urandom(32) + b"\0" + struct.pack(">H", len(suites)) + suites + b"\1\0"
    body += struct.pack(">H", len(groups + formats)) + groups + formats
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return struct.pack(">BHH", 0x16, 0x0301, len(message)) + message


@pytest.mark.parametrize("version", [0x0300, 0x0301, 0x0302], ids=["SSL 3.0", "TLS 1.0", "TLS 1.1"])
async def test_old_versions_are_refused_by_default(
    start_broker: StartBroker, certificates: Certificates, version: int
) -> None:
    broker = await start_broker(**certificates.options)
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        peer.send_raw(old_hello(version))
        answer = await peer.receive_raw()
        assert answer[:1] == b"\x15"  # an alert
        assert re.search(rb"E_IDENTIFY_FAILED IDENTIFY failed tls: (unsupported protocol|version too low)$", answer)


async def test_an_old_version_is_taken_where_it_is_asked_for(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = await start_broker(**certificates.options, tls_min_version="tls1.0")
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        peer.send_raw(old_hello(0x0301))
        assert (await peer._receive())[:3] == b"\x16\x03\x01"  # the server's hello


async def test_only_1_3_where_that_is_the_oldest(start_broker: StartBroker, certificates: Certificates) -> None:
    broker = await start_broker(**certificates.options, tls_min_version="tls1.3")
    async with Peer.connect(broker.tcp_address) as peer:
        await peer.negotiate(tls_v1=True)
        with pytest.raises(ssl.SSLError):
            await peer.encrypt(certificates.client(versions=TLS12))
    async with encrypted(broker, certificates.client()) as peer:
        assert await peer.ask(pub()) == b"OK"


# --- Certificates in files --------------------------------------------------------------------------------------------


async def test_a_start_without_a_usable_certificate_says_why(tmp_path: Path, certificates: Certificates) -> None:
    missing = {"tls_cert": str(tmp_path / "none.pem"), "tls_key": certificates.key}
    other = trustme.CA().issue_cert("other")
    other.private_key_pem.write_to_path(str(tmp_path / "other.pem"))
    mismatch = {"tls_cert": certificates.cert, "tls_key": str(tmp_path / "other.pem")}
    no_authority = {
        **certificates.options,
        "tls_client_auth_policy": "require-verify",
        "tls_root_ca_file": str(tmp_path / "none.pem"),
    }
    for options in (missing, mismatch, no_authority):
        with pytest.raises(StartError, match="failed to build TLS config - "):
            await Broker(data_path=tmp_path, **options).start()


async def test_new_connections_get_a_certificate_that_was_replaced(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    own = Certificates(tmp_path)
    broker = await start_broker(**own.options)

    async def serial() -> object:
        async with encrypted(broker, own.client()) as peer:
            assert peer.tls is not None
            certificate = peer.tls.getpeercert()
            assert certificate is not None
            return certificate["serialNumber"]

    first = await serial()
    async with encrypted(broker, own.client()) as old:
        own.issue()
        broker.listeners.reload_certificates()
        await until(lambda: "read again" in caplog.text)
        assert await serial() != first
        # Whoever was there stays.
        assert await old.ask(pub()) == b"OK"
    second = await serial()
    Path(own.cert).write_text("not a certificate")
    broker.listeners.reload_certificates()
    await until(lambda: "not replaced" in caplog.text)
    assert await serial() == second


async def test_a_hangup_signal_makes_nsqd_read_its_certificates_again(tmp_path: Path) -> None:
    own = Certificates(tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "flintmq", "nsqd", "--tcp-address=127.0.0.1:0", "--http-address="),
        *("--https-address=", f"--data-path={tmp_path}", f"--tls-cert={own.cert}", f"--tls-key={own.key}"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE):
            while not (found := re.search(rb"TCP: listening on (\S+)", await process.stderr.readline())):
                pass
            own.issue()
            # Whoever answers has started, and takes signals.
            async with Peer.connect(found[1].decode()) as peer:
                await peer.negotiate()
            process.send_signal(signal.SIGHUP)
            while b"certificates were read again" not in await process.stderr.readline():
                pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.communicate()
    assert process.returncode == 0


# --- Handshakes that OpenSSL refuses ----------------------------------------------------------------------------------


def weak_authority(folder: Path) -> tuple[str, str]:
    """The files of an authority whose key is too short for OpenSSL, and of a client's certificate signed by it."""
    day = datetime.timedelta(1)
    now = datetime.datetime.now(datetime.UTC)
    key, short = rsa.generate_private_key(65537, 2048), rsa.generate_private_key(65537, 1024)

    def certificate(name: str, public: rsa.RSAPublicKey, *, authority: bool) -> bytes:
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, "weak")]
        builder = x509.CertificateBuilder(names[1], names[0], public, x509.random_serial_number(), now - day, now + day)
        constraints = x509.BasicConstraints(ca=authority, path_length=None)
        signed = builder.add_extension(constraints, critical=True).sign(short, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    authority_file, client_file = folder / "weak.pem", folder / "client.pem"
    authority_file.write_bytes(certificate("weak", short.public_key(), authority=True))
    client_file.write_bytes(certificate("client", key.public_key(), authority=False) + pem)
    return str(authority_file), str(client_file)


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
@pytest.mark.parametrize("port", ["tcp", "https", "lookupd"])
async def test_a_handshake_that_openssl_refuses_gets_an_alert_and_a_log_line(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture, port: str, version: str
) -> None:
    authority, client = weak_authority(tmp_path)
    context = certificates.client()
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_cert_chain(client)
    tls = {**certificates.options, "tls_root_ca_file": authority}
    async with contextlib.AsyncExitStack() as stack:
        if port == "lookupd":
            lookupd = await stack.enter_async_context(Lookupd(**tls))
            address = lookupd.http_address
        else:
            options = {**tls, "tls_client_auth_policy": "require-verify", "https_address": "127.0.0.1:0"}
            broker = await stack.enter_async_context(Broker(data_path=tmp_path, **options))
            address = broker.https_address
        caplog.set_level(logging.INFO)
        # In TLS 1.3 the client learns of it when it reads.
        with pytest.raises(ssl.SSLError, match=r"(?i)alert|bad certificate|unknown ca"):
            if port == "tcp":
                async with Peer.connect(broker.tcp_address) as peer:
                    await peer.negotiate(tls_v1=True)
                    await peer.encrypt(context)
                    await peer.frame()
            else:
                host, _, number = address.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(number), ssl=context)
                try:
                    writer.write(b"GET /ping HTTP/1.0\r\n\r\n")
                    assert await reader.read() == b""
                finally:
                    writer.close()
    assert "certificate verify failed" in caplog.text.lower().replace("_", " ")
