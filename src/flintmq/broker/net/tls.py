"""TLS of one client connection, without I/O: bytes from the wire in, the client's bytes out, and the other way round.

An Encryption is one more layer of a connection's stream, like compression, and other layers may lie inside it. So an
encrypted connection keeps its socket, its flow control and its session; nothing has to be handed over while bytes of
the peer are under way. What the handshake and the protocol itself have to say goes straight to ``send``.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from typing import Any

from flintmq.errors import ProtocolError
from flintmq.http.tls import check_resumed, server_tls
from flintmq.options import NsqdOptions

__all__ = ["Encryption", "HandshakeError", "server_context"]

#: One record holds at most 16 KiB.
_RECORD = 16 << 10
#: Every record of a handshake starts with this byte.
_HANDSHAKE = 0x16
#: By OpenSSL's names, those that NSQ knows by name; it prints the numbers of all others.
_SUITES = {
    "RC4-SHA": "TLS_RSA_WITH_RC4_128_SHA",
    "DES-CBC3-SHA": "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "AES128-SHA": "TLS_RSA_WITH_AES_128_CBC_SHA",
    "AES256-SHA": "TLS_RSA_WITH_AES_256_CBC_SHA",
    "ECDHE-ECDSA-RC4-SHA": "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "ECDHE-ECDSA-AES128-SHA": "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "ECDHE-ECDSA-AES256-SHA": "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "ECDHE-RSA-RC4-SHA": "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "ECDHE-RSA-DES-CBC3-SHA": "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "ECDHE-RSA-AES128-SHA": "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "ECDHE-RSA-AES256-SHA": "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "ECDHE-RSA-AES128-GCM-SHA256": "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-ECDSA-AES128-GCM-SHA256": "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
}


def server_context(options: NsqdOptions) -> ssl.SSLContext:
    """What the broker's TLS options ask for. OptionError if the files do not fit."""
    context = server_tls(
        options.tls_cert,
        options.tls_key,
        client_ca=options.tls_root_ca_file,
        policy=options.tls_client_auth_policy,
        min_version=options.tls_min_version,
    )
    # Here an Encryption sends the alert and the session logs the reason, with the peer.
    context.sslobject_class = ssl.SSLObject
    return context


class HandshakeError(ProtocolError):
    """The client and we do not come together. The connection is still plain, and is told so in the clear."""

    def __init__(self, reason: str) -> None:
        super().__init__("E_IDENTIFY_FAILED", f"IDENTIFY failed {reason}")


class Encryption:
    """A Codec whose first bytes are the handshake; ``established`` is called once, when it has succeeded."""

    def __init__(self, context: ssl.SSLContext, send: Callable[[bytes], None], established: Callable[[], None]) -> None:
        self._context = context
        self._send = send
        self._on_established = established
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._started = False
        self.established = False

    def compress(self, data: bytes | memoryview) -> bytes:
        """``data`` as records. Nothing, if the peer has broken the connection off: the socket will tell."""
        at = 0
        try:
            while at < len(data):
                at += self._tls.write(data[at:] if at else data)
        except ssl.SSLError:
            return b""
        return self._outgoing.read()

    def decompress(self, data: bytes) -> Iterator[bytes]:
        """What the client sent. EOFError at its goodbye, HandshakeError or ProtocolError when it breaks the rules."""
        if not self._started and data:
            if data[0] != _HANDSHAKE:
                # A client that speaks on in the clear: it would not understand an alert.
                raise HandshakeError("tls: first record does not look like a TLS handshake")
            self._started = True
        self._incoming.write(data)
        try:
            if not self.established:
                self._tls.do_handshake()
                check_resumed(self._tls)
                self._push()
                self.established = True
                self._on_established()
            while piece := self._tls.read(_RECORD):
                self._push()
                yield piece
            raise EOFError
        except ssl.SSLWantReadError:
            self._push()
        except ssl.SSLZeroReturnError:
            raise EOFError from None
        except ssl.SSLError as exc:
            # The peer is sent an alert first.
            self._push()
            reason = f"tls: {_reason(exc)}"
            raise (ProtocolError("E_INVALID", reason) if self.established else HandshakeError(reason)) from exc

    def _push(self) -> None:
        if self._outgoing.pending:
            self._send(self._outgoing.read())

    def goodbye(self) -> bytes:
        """The end of what we send, so that the peer can tell it from a connection that was cut."""
        if self.established:
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                # It waits for the peer's own goodbye; we do not.
                pass
        return self._outgoing.read()

    def info(self) -> dict[str, Any]:
        """What was agreed, in the words of NSQ's ``/stats``."""
        name, _, _ = self._tls.cipher() or ("", "", 0)
        suite = _SUITES.get(name)
        if suite is None:
            numbers = {cipher["name"]: int(cipher["id"]) & 0xFFFF for cipher in self._context.get_ciphers()}
            suite = f"Unknown {numbers.get(name, 0)}"
        return {
            "version": (self._tls.version() or "").replace("TLSv1.", "TLS1.").replace("TLSv1", "TLS1.0"),
            "cipher_suite": suite,
            "negotiated_protocol": self._tls.selected_alpn_protocol() or "",
            # Go says so whether or not there was anything to agree on.
            "negotiated_protocol_is_mutual": True,
        }

    @property
    def common_name(self) -> str:
        """Whom the client's certificate names; empty without one."""
        certificate: dict[str, Any] = self._tls.getpeercert() or {}
        names = [value for names in certificate.get("subject", ()) for kind, value in names if kind == "commonName"]
        # Of several, Go keeps the last.
        return str(names[-1]) if names else ""


def _reason(exc: ssl.SSLError) -> str:
    """OpenSSL's reason as a sentence."""
    return exc.reason.lower().replace("_", " ") if exc.reason else str(exc)
