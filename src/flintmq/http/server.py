"""The general HTTP server: a site on sockets that the daemon has bound.

A ``Server`` knows its listeners and its connections; what a request means is its site's business.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from flintmq.addresses import BACKLOG
from flintmq.http.admission import Admission
from flintmq.http.browsers import Names
from flintmq.http.connection import Connection
from flintmq.http.site import Answer, Site
from flintmq.http.tls import TlsListener

if TYPE_CHECKING:
    import ssl

__all__ = ["Server"]

#: A connection without a request is kept for this long.
IDLE_SECONDS = 75.0
#: How long the head of a request may take to arrive once it has begun.
HEAD_SECONDS = 30.0
#: Seconds that a TLS handshake may take.
HANDSHAKE_SECONDS = 10.0


class Server:
    """A site on listening sockets. ``protocol()`` makes the protocol of one connection, for those who accept it.

    A connection without a request is kept for ``idle`` seconds; the head of a request, and its body, may take ``head``
    and ``body`` seconds. ``refusal`` is given instead of every answer, on a listener that is not to be used; those who
    ask for a name that ``names`` does not know are refused. ``admission`` says how many connections there may be, those
    in their TLS handshake included.
    """

    def __init__(
        self,
        site: Site,
        *,
        idle: float = IDLE_SECONDS,
        head: float = HEAD_SECONDS,
        body: float | None = None,
        refusal: Answer | None = None,
        names: Names | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.site = site
        self.idle_seconds = idle
        self.head_seconds = head
        self.body_seconds = body
        self.refusal = refusal
        self.names = names or Names()
        self.admission = admission
        self.connections: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._listeners: list[asyncio.Server | TlsListener] = []

    def protocol(self, gone: Callable[[], None] | None = None) -> Connection:
        """Return the protocol of one connection; ``gone`` is called when it has ended."""
        return Connection(self, gone)

    async def listen(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve connections to a bound socket, which may be one of the unix kind."""
        listener: asyncio.Server | TlsListener
        if tls is not None:
            listener = TlsListener(self.protocol, sock, tls, HANDSHAKE_SECONDS, self._admit, self._release)
        elif sock.family == getattr(socket, "AF_UNIX", None):
            listener = await self._loop.create_unix_server(self.protocol, sock=sock, backlog=BACKLOG)
        else:
            listener = await self._loop.create_server(self.protocol, sock=sock, backlog=BACKLOG)
        self._listeners.append(listener)

    def _admit(self, protocol: Hashable, address: str) -> bool:
        return self.admission is None or not self.admission.admit(protocol, address)

    def _release(self, protocol: Hashable) -> None:
        if self.admission is not None:
            self.admission.release(protocol)

    def renew_tls(self, context: ssl.SSLContext) -> None:
        """Use this context for the connections that come from now on."""
        for listener in self._listeners:
            if isinstance(listener, TlsListener):
                listener.renew(context)

    def connection_count(self) -> int:
        return len(self.connections)

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def abort(self) -> None:
        """Close every connection at once, whatever is under way."""
        self._stop_listening()
        for connection in list(self.connections):
            connection.cancel()

    async def close(self, grace: float = 1.0) -> None:
        """Accept no more, let requests that are under way end within ``grace`` seconds, close every connection."""
        self._stop_listening()
        for connection in list(self.connections):
            connection.end()
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        for connection in list(self.connections):
            connection.cancel()
        if tasks:
            await asyncio.wait(tasks)
