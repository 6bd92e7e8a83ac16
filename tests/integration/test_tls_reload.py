"""A reload renews what TLS listeners believe, on every one of them; and no session outlives it.

The four listeners with TLS: nsqd's TCP port (after IDENTIFY) and HTTPS, nsqlookupd's TCP and HTTP ports. All are asked
by clients with certificates of an authority that is accepted, of one that no longer is, and with sessions from before.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.lookup.daemon import Lookupd
from support.secure import TLS12, TLS13, Certificates, Peer, until

PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
#: What is said on each listener once TLS is there, and how the answer ends.
WORDS = {
    "nsqd tcp": (b"", b"OK"),
    "nsqd https": (PING, b"OK"),
    "nsqlookupd tcp": (b"  V1PING\n", b"OK"),
    "nsqlookupd http": (PING, b"OK"),
}
VERSIONS = {"1.2": TLS12, "1.3": TLS13}


@dataclass
class Daemons:
    broker: Broker
    lookupd: Lookupd
    certificates: Certificates

    def address(self, listener: str) -> str:
        return {
            "nsqd tcp": self.broker.tcp_address,
            "nsqd https": self.broker.https_address,
            "nsqlookupd tcp": self.lookupd.tcp_address,
            "nsqlookupd http": self.lookupd.http_address,
        }[listener]

    async def reload(self) -> None:
        before = self.broker.listeners.tls
        self.broker.reload()
        self.lookupd.reload()
        # One of them reads its files in a thread.
        await until(lambda: self.broker.listeners.tls is not before)

    async def served(
        self,
        listener: str,
        context: ssl.SSLContext,
        session: ssl.SSLSession | None = None,
        meanwhile: Callable[[ssl.SSLSession | None], Awaitable[None]] | None = None,
    ) -> tuple[ssl.SSLSession | None, bool] | None:
        """The session, and whether it was resumed, of a client that was served; None of one that was not."""
        words, expected = WORDS[listener]
        async with Peer.connect(self.address(listener), magic=b"  V2" if listener == "nsqd tcp" else b"") as peer:
            if listener == "nsqd tcp":
                assert (await peer.negotiate(tls_v1=True))["tls_v1"] is True
            try:
                await peer.encrypt(context, session)
                assert peer.tls is not None
                if words:
                    peer.send(words)
                # With TLS 1.3 a client learns only here what became of its certificate.
                while not peer._received.endswith(expected):
                    data = await peer._receive()
                    if not data:
                        return None
                    peer._feed(data)
            except (ssl.SSLError, EOFError):
                return None
            if meanwhile is not None:
                await meanwhile(peer.tls.session)
            return peer.tls.session, bool(peer.tls.session_reused)


@pytest.fixture
async def daemons(tmp_path: Path) -> AsyncIterator[Daemons]:
    certificates = Certificates(tmp_path)
    # The server's certificate stays, the clients' authority has a file of its own.
    clients = tmp_path / "clients.pem"
    certificates.authority.cert_pem.write_to_path(str(clients))
    options: dict[str, Any] = {**certificates.options, "tls_root_ca_file": str(clients)}
    async with contextlib.AsyncExitStack() as stack:
        broker = Broker(
            data_path=tmp_path, https_address="127.0.0.1:0", tls_client_auth_policy="require-verify", **options
        )
        await stack.enter_async_context(broker)
        lookupd = await stack.enter_async_context(Lookupd(**options))
        yield Daemons(broker, lookupd, certificates)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("listener", WORDS)
async def test_a_reload_renews_the_authorities_of_clients(daemons: Daemons, listener: str, version: str) -> None:
    certificates = daemons.certificates
    old = certificates.client(signed_by=certificates.authority, versions=VERSIONS[version])
    new = certificates.client(signed_by=certificates.stranger, versions=VERSIONS[version])
    before = await daemons.served(listener, old)
    assert before is not None
    assert await daemons.served(listener, new) is None
    certificates.stranger.cert_pem.write_to_path(daemons.broker.options.tls_root_ca_file)
    await daemons.reload()
    assert await daemons.served(listener, old) is None
    # Nor does anybody come back by a session from before.
    assert await daemons.served(listener, old, before[0]) is None
    assert await daemons.served(listener, new) is not None


@pytest.mark.parametrize("listener", WORDS)
async def test_no_session_is_resumed_by_a_ticket(daemons: Daemons, listener: str) -> None:
    certificates = daemons.certificates
    for versions in VERSIONS.values():
        client = certificates.client(signed_by=certificates.authority, versions=versions)
        first = await daemons.served(listener, client)
        assert first is not None
        assert first[0] is None or not first[0].has_ticket
        second = await daemons.served(listener, client, first[0] if first[0] and first[0].id else None)
        assert second is not None
        assert versions == TLS12 or not second[1]


@pytest.mark.parametrize("listener", WORDS)
async def test_an_expired_certificate_does_not_come_back_by_a_session(
    daemons: Daemons, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = daemons.certificates
    client = certificates.client(versions=TLS12)
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    certificates.authority.issue_cert("client.example", not_after=soon).configure_cert(client)

    # OpenSSL forgets the session of a connection that ends without a goodbye.
    async def come_back(session: ssl.SSLSession | None) -> None:
        again = await daemons.served(listener, client, session)
        assert again is not None
        assert again[1], "there is nothing to refuse"

    async def come_back_late(session: ssl.SSLSession | None) -> None:
        later = time.time() + 2 * 3600
        monkeypatch.setattr("flintmq.http.tls.time.time", lambda: later)
        assert await daemons.served(listener, client, session) is None

    assert await daemons.served(listener, client, None, come_back) is not None
    assert await daemons.served(listener, client, None, come_back_late) is not None


async def test_authorities_that_are_no_good_leave_all_as_it_was(
    daemons: Daemons, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = daemons.certificates
    client = certificates.client(signed_by=certificates.authority)
    Path(daemons.broker.options.tls_root_ca_file).write_text("nonsense")
    daemons.broker.reload()
    daemons.lookupd.reload()
    await until(lambda: "certificates are not replaced" in caplog.text)
    assert caplog.text.count("the certificate stays as it was") == 2
    for listener in WORDS:
        assert await daemons.served(listener, client) is not None


# --- Limits before trust ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listener", ["nsqd https", "nsqlookupd tcp", "nsqlookupd http"])
@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
async def test_connections_in_their_handshake_count(
    listener: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flintmq.http.tls.LINGER_SECONDS", 0.0)
    certificates = Certificates(tmp_path)
    options: dict[str, Any] = {**certificates.options, limit: 3}
    async with (
        Broker(data_path=tmp_path, https_address="127.0.0.1:0", **options) as broker,
        Lookupd(**options) as lookupd,
    ):
        here = Daemons(broker, lookupd, certificates)
        for _ in range(2):
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(3):
                    peer = await stack.enter_async_context(Peer.connect(here.address(listener), magic=b"\x16"))
                async with Peer.connect(here.address(listener), magic=b"") as one_too_many, asyncio.timeout(20):
                    assert await one_too_many.receive_raw() == b""
                # One that fails makes room, as far as its handshake went.
                peer.send_raw(b"nonsense")
                await peer.receive_raw()
                limit_of = broker.connections if listener == "nsqd https" else lookupd.admission
                if listener == "nsqlookupd http":
                    limit_of = lookupd._http_admission
                assert limit_of is not None
                await until(lambda limit_of=limit_of: len(limit_of._addresses) == 2)
                assert await here.served(listener, certificates.client()) is not None


@pytest.mark.parametrize("listener", ["nsqlookupd tcp", "nsqlookupd http", "nsqd http"])
async def test_silent_connections_count_and_are_closed(
    listener: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Broker(data_path=tmp_path, http_address="127.0.0.1:0", max_connections_per_address=2) as broker,
        Lookupd(max_connections_per_address=2) as lookupd,
    ):
        address = {
            "nsqlookupd tcp": lookupd.tcp_address,
            "nsqlookupd http": lookupd.http_address,
            "nsqd http": broker.http_address,
        }[listener]
        async with Peer.connect(address, magic=b""), Peer.connect(address, magic=b""), asyncio.timeout(20):
            async with Peer.connect(address, magic=b"") as one_too_many:
                received = await one_too_many.receive_raw()
                assert b"limit of 2 connections" in received if listener == "nsqd http" else received == b""
    # And in time.
    monkeypatch.setattr("flintmq.lookup.daemon.MAGIC_SECONDS", 0.05)
    monkeypatch.setattr("flintmq.http.connection.SILENT_SECONDS", 0.05)
    monkeypatch.setattr("flintmq.broker.http.lane.SILENT_SECONDS", 0.05)
    monkeypatch.setattr("flintmq.broker.http.lane.SWEEP_SECONDS", 0.02)
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker, Lookupd() as lookupd:
        address = {
            "nsqlookupd tcp": lookupd.tcp_address,
            "nsqlookupd http": lookupd.http_address,
            "nsqd http": broker.http_address,
        }[listener]
        async with Peer.connect(address, magic=b"") as peer, asyncio.timeout(20):
            assert await peer.receive_raw() == b""
