"""The layers between a client's commands and the wire: TLS, snappy, deflate, and how a connection comes to have them.

An Upgrade belongs to one connection that asked for a layer by IDENTIFY. It owns the TLS handshake and its deadline, and
makes the codec that bytes from the wire go through and the function that frames are written with. An ``OK`` inside each
new layer tells the client that it holds. Sessions on plain connections have none.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flintmq.errors import ProtocolError
from flintmq.protocol.compression import Codec, Deflate, Snappy, Stack
from flintmq.protocol.wire import OK_FRAME

if TYPE_CHECKING:
    import ssl

    from flintmq.broker.net.tls import Encryption

__all__ = ["HANDSHAKE_TIMEOUT", "Upgrade", "Write"]

#: Seconds that a TLS handshake may take.
HANDSHAKE_TIMEOUT = 5.0

#: Bytes that a stream may unpack to, without any effect, before it is asked whether its client is still there.
IDLE_BYTES = 1 << 20

Write = Callable[["bytes | memoryview"], None]


class Upgrade:
    """What a connection has between its commands and its socket.

    ``send`` sends what TLS itself has to say; ``upgraded`` gets the new way to write frames, ``failed`` the reason why
    there is none.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[bytes], None],
        upgraded: Callable[[Write], None],
        failed: Callable[[ProtocolError], None],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._send = send
        self._upgraded = upgraded
        self._failed = failed
        self._tls: Encryption | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.deflate = self.snappy = False
        self._unpacked = self._progress = 0
        #: What the handshake agreed on, in the words of NSQ's /stats; None without TLS.
        self.tls_info: dict[str, Any] | None = None

    @property
    def under_way(self) -> bool:
        """Is the handshake not over yet?"""
        return self._deadline is not None

    def start(self, tls: ssl.SSLContext | None, inner: Codec | None) -> Codec:
        """Return the codec for what arrives from here on. TLS begins with a handshake, compression at once."""
        self.deflate, self.snappy = isinstance(inner, Deflate), isinstance(inner, Snappy)
        if tls is not None:
            from flintmq.broker.net.tls import Encryption

            self._tls = Encryption(tls, self._send, lambda: self._established(inner))
            self._deadline = self._loop.call_later(HANDSHAKE_TIMEOUT, self._timed_out)
        layers = [layer for layer in (self._tls, inner) if layer is not None]
        if tls is None:
            self._established(inner)
        return layers[0] if len(layers) == 1 else Stack(*layers)

    def _established(self, inner: Codec | None) -> None:
        write: Write = self._transport.write
        if self._tls is not None:
            write = _through(self._tls, write)
            if self._deadline is not None:
                self.cancel()
                self.tls_info = self._tls.info()
                write(OK_FRAME)
        if inner is not None:
            write = _through(inner, write)
            write(OK_FRAME)
        self._upgraded(write)

    def _timed_out(self) -> None:
        from flintmq.broker.net.tls import HandshakeError

        self._failed(HandshakeError("i/o timeout"))

    def cancel(self) -> None:
        """Forget the handshake's deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def is_wasted(self, size: int, progress: Callable[[], int]) -> bool:
        """Count unpacked bytes. Return whether many of them had no effect, and the client has left meanwhile.

        A few bytes may unpack to millions of commands, which nobody reads an answer to. ``progress`` returns a number
        that grows with every command that has an effect: those are run, whether the client has left or not.
        """
        self._unpacked += size
        if self._unpacked < IDLE_BYTES:
            return False
        self._unpacked = 0
        before, self._progress = self._progress, progress()
        return self._progress == before and self._has_left()

    def _has_left(self) -> bool:
        """Return whether the client sends no more, although there may be more to read."""
        sock = self._transport.get_extra_info("socket")
        if sock is None or not hasattr(select, "POLLRDHUP"):
            return False
        if self._transport.is_closing() or sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    @property
    def common_name(self) -> str:
        """Whom the client's certificate names; empty without one."""
        return self._tls.common_name if self._tls is not None else ""

    def goodbye(self) -> bytes:
        """Return the end of what we send, so that the peer can tell it from a connection that was cut."""
        return self._tls.goodbye() if self._tls is not None else b""


def _through(codec: Codec, write: Callable[[bytes | memoryview], None]) -> Callable[[bytes | memoryview], None]:
    """Write what the codec makes of it, if anything."""

    def packed(data: bytes | memoryview) -> None:
        if out := codec.compress(data):
            write(out)

    return packed
