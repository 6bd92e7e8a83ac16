"""The server side of TLS, for every listener that speaks it.

``server_tls`` makes the context, a ``TlsListener`` accepts connections. asyncio's own listeners keep a connection whose
handshake has failed until their timeout, lose the alert, and make as many handshakes in one turn of the loop as there
are clients that ask for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from functools import cache, partial
from typing import TYPE_CHECKING

from flintmq.addresses import BACKLOG
from flintmq.errors import OptionError, file_reason
from flintmq.http.admission import address_of

if TYPE_CHECKING:
    import ssl

__all__ = ["TlsListener", "check_resumed", "server_tls"]

logger = logging.getLogger(__name__)

#: Connections that are accepted before the loop is handed back.
ACCEPT_AT_ONCE = 64
#: Seconds before the next attempt to accept, when there are no descriptors.
ACCEPT_AGAIN = 1.0
#: Seconds that a client has to read why its handshake failed.
LINGER_SECONDS = 2.0
#: Seconds that a client has at least for the rest of its handshake, however late its greeting was.
LEAST_SECONDS = 1.0
#: Seconds until a greeting is looked at again that is not all there, at first; each further wait is twice as long.
LOOK_AGAIN = 0.001
LOOK_AGAIN_AT_MOST = 0.25
#: Bytes of the longest greeting that is waited for. A longer one is left to OpenSSL as it comes.
LONGEST_GREETING = 32 << 10
#: The first byte of a record with a part of a handshake; bytes before what a record, and what a greeting, holds.
_HANDSHAKE = 0x16
_MAJOR = 3
_RECORD_HEAD = 5
_GREETING_HEAD = 4
#: What Go's server says, in the clear, to a client that speaks HTTP without TLS.
NO_TLS = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"

#: What to do when the handshake of this connection fails.
_failed: ContextVar[Callable[[ssl.SSLError], None] | None] = ContextVar("_failed", default=None)


class TlsListener:
    """Connections with TLS on a bound socket. ``factory`` makes the protocol of one, whose handshake has succeeded.

    A handshake that fails ends the connection at once: the client gets the alert, or Go's words if it speaks plain
    HTTP, and then the end of the stream. ``admit`` is asked, with the protocol and the peer's address, whether there is
    room for a connection before its handshake; one that is refused is closed without a word. ``release`` is told of
    those that were admitted and did not get through.

    A handshake costs as much as hundreds of requests, nearly all of it when the client's greeting is all there. So a
    connection waits for that in its socket, and then for its turn: one handshake is begun per turn of the loop.
    """

    def __init__(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        sock: socket.socket,
        context: ssl.SSLContext,
        seconds: float,
        admit: Callable[[Hashable, str], bool] = lambda protocol, address: True,
        release: Callable[[Hashable], None] = lambda protocol: None,
    ) -> None:
        self._factory = factory
        self._admit = admit
        self._release = release
        self._sock = sock
        self._context = context
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._shaking: set[asyncio.Task[None]] = set()
        #: Connections with a whole greeting, which wait for their turn.
        self._queue: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more, and drop the connections whose handshake is not over."""
        if self._sock.fileno() < 0:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._shaking:
            task.cancel()

    def renew(self, context: ssl.SSLContext) -> None:
        """Use this context for the connections that come from now on."""
        self._context = context

    def connection_count(self) -> int:
        """Return how many connections there are whose handshake is not over."""
        return len(self._shaking)

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                connection, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                logger.error("HTTPS: cannot accept a connection - %s", exc)
                self._loop.remove_reader(self._sock.fileno())
                self._timer = self._loop.call_later(ACCEPT_AGAIN, self._accept_again)
                return
            protocol = self._factory()
            if not self._admit(protocol, address_of(peer)):
                connection.close()
                continue
            connection.setblocking(False)
            task = self._loop.create_task(self._shake_hands(connection, protocol))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    def _accept_again(self) -> None:
        self._timer = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    async def _shake_hands(self, connection: socket.socket, protocol: asyncio.BaseProtocol) -> None:
        # Each connection has a task, and so a context, of its own.
        _failed.set(lambda error: self._end(connection, error))
        is_through = False
        deadline = self._loop.time() + self._seconds
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._greeting(connection)
                # Its wait for the others is not its fault.
                left = max(LEAST_SECONDS, deadline - self._loop.time())
                await self._turn()
            except BaseException:
                connection.close()
                raise
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=left
            )
            is_through = True
        except OSError as exc:
            # Also an SSLError, and a handshake that took too long.
            logger.debug("HTTPS: a handshake failed - %s", exc)
            # asyncio's frames hold the exception that holds them: all of the connection would wait for the collector.
            exc.__traceback__ = None
        except Exception:
            logger.exception("HTTPS: unexpected error, the connection is closed")
            connection.close()
        finally:
            if not is_through:
                self._release(protocol)

    async def _greeting(self, connection: socket.socket) -> None:
        """Wait until the client's greeting is all there, and leave it in the socket. OSError: it has gone."""
        wait = 0.0
        await self._readable(connection)
        while True:
            has_ended = _has_ended(connection)
            data = connection.recv(LONGEST_GREETING, socket.MSG_PEEK)
            if data and _is_greeting(data):
                _wake_at(connection, 1)
                return
            if has_ended or not data:
                raise ConnectionError("the client has gone before its handshake")
            if _wake_at(connection, len(data) + 1):
                await self._readable(connection)
            else:
                wait = wait or LOOK_AGAIN
            if wait:
                # Bytes that trickle in are not looked at one by one.
                await asyncio.sleep(wait)
            wait = min(max(LOOK_AGAIN, 2 * wait), LOOK_AGAIN_AT_MOST)

    async def _readable(self, connection: socket.socket) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(connection, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(connection)

    async def _turn(self) -> None:
        """Wait until those that came before have had their turn."""
        turn = self._loop.create_future()
        self._queue.append(turn)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        """Let one connection shake hands."""
        self._is_scheduled = False
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                break
        if self._queue:
            self._is_scheduled = True
            self._loop.call_soon(self._next)

    def _end(self, connection: socket.socket, error: ssl.SSLError) -> None:
        """End a connection whose handshake has failed, when asyncio has sent the alert."""
        self._loop.call_soon(self._say_goodbye, connection, NO_TLS if error.reason == "HTTP_REQUEST" else b"")

    def _say_goodbye(self, connection: socket.socket, last: bytes) -> None:
        # The socket is asyncio's. It closes it when it reads the end, which is the client's, or ours after a while.
        with contextlib.suppress(OSError):
            if last:
                connection.send(last)
            connection.shutdown(socket.SHUT_WR)
        self._loop.call_later(LINGER_SECONDS, partial(_shut, connection))


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _wake_at(connection: socket.socket, size: int) -> bool:
    """Let the socket be readable when it has ``size`` bytes, or has ended. False where the system cannot do that."""
    if sys.platform != "linux" or connection.family == socket.AF_UNIX:
        return False
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
    return True


def _has_ended(connection: socket.socket) -> bool:
    """Will the client send no more than is in the socket? False where the system does not say."""
    try:
        ended = select.POLLRDHUP
        poll = select.poll()
    except AttributeError:
        return False
    poll.register(connection, ended)
    return bool(poll.poll(0))


def _is_greeting(data: bytes) -> bool:
    """Is the first message of a handshake all there? Also True for anything that is none: OpenSSL finds out.

    Record: ``[0x16][version:2][size:2]``, the version from 3.0 on, and its part of the message. Message:
    ``[type:1][size:3]`` and its body.
    """
    message = bytearray()
    pos = 0
    while len(data) - pos >= _RECORD_HEAD and data[pos] == _HANDSHAKE:
        end = pos + _RECORD_HEAD + int.from_bytes(data[pos + 3 : pos + 5], "big")
        if data[pos + 1] != _MAJOR or end - pos > LONGEST_GREETING // 2 + _RECORD_HEAD:
            return True
        message += data[pos + _RECORD_HEAD : end]
        if len(message) >= _GREETING_HEAD:
            size = _GREETING_HEAD + int.from_bytes(message[1:_GREETING_HEAD], "big")
            if size > LONGEST_GREETING // 2 or len(message) >= size:
                return True
        if end > len(data):
            return False
        pos = end
    return len(data) >= LONGEST_GREETING or (pos < len(data) and data[pos] != _HANDSHAKE)


def server_tls(
    cert: str, key: str, *, client_ca: str = "", policy: str = "", min_version: str = "tls1.2"
) -> ssl.SSLContext:
    """The TLS side of a server. OptionError if the files do not fit.

    ``policy`` is what is asked of clients: nothing, ``require`` or ``require-verify``. In NSQ ``require`` takes any
    certificate without looking at it; here a certificate that is asked for is always checked, against ``client_ca``
    or else the authorities that the system trusts.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _outspoken()
    versions = {
        "tls1.0": ssl.TLSVersion.TLSv1,
        "tls1.1": ssl.TLSVersion.TLSv1_1,
        "tls1.2": ssl.TLSVersion.TLSv1_2,
        "tls1.3": ssl.TLSVersion.TLSv1_3,
    }
    with warnings.catch_warnings():
        # The old versions are there for those who ask for them by name.
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = versions[min_version]
    # A second handshake inside a connection costs us much and the peer little. Nor are there tickets: connections live
    # long, and a certificate that is no longer accepted must not come back by one. Sessions that OpenSSL knows by their
    # id, before TLS 1.3, end with the context: authorities are replaced by making a new one.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    if min_version in ("tls1.0", "tls1.1"):
        # OpenSSL's own level forbids what these versions sign with.
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
    try:
        context.load_cert_chain(cert, key)
        if policy:
            context.verify_mode = ssl.CERT_REQUIRED
            if client_ca:
                context.load_verify_locations(client_ca)
            else:
                context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
                if policy == "require":
                    logger.warning("TLS: client certificates must be signed by an authority that this system trusts")
    except (OSError, ValueError) as exc:
        raise OptionError(f"failed to build TLS config - {file_reason(exc, cert, key, client_ca)}") from exc
    return context


def check_resumed(tls: ssl.SSLObject) -> None:
    """SSLError if a client came back by the id of a session, and its certificate has expired since.

    OpenSSL does not look at the certificate again then, and knows ids for two hours.
    """
    import ssl

    if tls.session_reused and (certificate := tls.getpeercert()):
        if ssl.cert_time_to_seconds(str(certificate["notAfter"])) < time.time():
            raise ssl.SSLError(1, "the client's certificate has expired")


@cache
def _outspoken() -> type[ssl.SSLObject]:
    """Return asyncio's side of a connection, which says why a handshake failed: to the log, and to the peer.

    asyncio drops such a connection without a word, with the alert that OpenSSL made for the peer still unsent. It sends
    what there is to send when the handshake wants more input. So that is what it is told first, and the listener is
    told to end the connection; the error follows with the next bytes.
    """
    import ssl

    class Outspoken(ssl.SSLObject):
        #: Makes the error anew: one that was raised holds the frame, and so this object.
        _failure: Callable[[], ssl.SSLError] | None = None

        def do_handshake(self) -> None:
            if self._failure is not None:
                raise self._failure()
            try:
                super().do_handshake()
                check_resumed(self)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as exc:
                # Its text: who keeps the record would keep the exception, its frames and the connection.
                logger.error("TLS: a handshake failed - %s", str(exc))
                self._failure = partial(type(exc), *exc.args)
                failed = _failed.get()
                if failed is not None:
                    failed(exc)
                raise ssl.SSLWantReadError from exc

    return Outspoken
