"""Where a broker listens: the TCP, HTTP and HTTPS ports, and the poller that reads their plain sockets.

Listeners owns what is bound, where, and the TLS context that new TCP connections get. Connections belong to sessions
and to the HTTP API once they are accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq import addresses
from flintmq.broker.net import sockets
from flintmq.errors import OptionError, StartError
from flintmq.http.browsers import is_exposed

if TYPE_CHECKING:
    import ssl

    from flintmq.broker.daemon import Broker
    from flintmq.broker.http.api import Api
    from flintmq.broker.net.session import Session

__all__ = ["Listeners"]

logger = logging.getLogger(__name__)

#: Connections that the system accepts before the broker does.
ACCEPT_QUEUE = 1024


class Listeners:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._server: asyncio.Server | None = None
        #: Reads plain sockets; None where the system has no epoll.
        self.poller: sockets.Poller | None = None
        self.api: Api | None = None
        #: Addresses as really bound; empty where nothing is.
        self.tcp = self.http = self.https = ""
        #: What TCP connections that ask for TLS get.
        self.tls: ssl.SSLContext | None = None

    # --- Start -----------------------------------------------------------------------------------------------------

    def load_certificates(self) -> None:
        """Read the certificates that the options name. StartError says why they are no good."""
        if self._broker.options.tls_cert:
            from flintmq.broker.net import tls

            try:
                self.tls = tls.server_context(self._broker.options)
            except OptionError as exc:
                raise StartError(str(exc)) from exc

    def reload_certificates(self) -> None:
        """Read the certificates again, for connections that come from now on. Bad ones leave all as it was."""
        broker = self._broker
        if self.tls is None or broker.stopping:
            return
        from flintmq.broker.net import tls

        def done(context: Any, error: BaseException | None) -> None:
            if error is not None:
                logger.error("TLS: the certificates are not replaced - %s", error)
            else:
                self.tls = context
                logger.info("TLS: the certificates were read again")

        broker.disk.submit(lambda: tls.server_context(broker.options), done)

    async def open(self, new_session: Callable[[], Session]) -> None:
        """Listen on every port that the options name."""
        broker = self._broker
        loop = asyncio.get_running_loop()
        self.descriptors = sockets.Descriptors(loop.time, self._connection_count)
        if sockets.available():
            self.poller = sockets.Poller(loop, broker.turns.end, broker.disk.system, self.descriptors)
            broker.turns.follow(self.poller)
        options = broker.options
        secure = options.https_address if options.tls_cert else ""
        # All that can fail comes before anybody is served: tokens that cannot be read, a port that is taken.
        if secure or options.http_address:
            # Late: a broker that only speaks TCP need not pay for it.
            from flintmq.broker.http.api import Api

            self.api = Api(broker)
        sock, https, http = self._bind_all(options.tcp_address, secure, options.http_address)
        self.tcp = addresses.text_of(sock.getsockname())
        if self.poller is not None:
            self.poller.listen(sock, new_session)
        elif sock.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(new_session, sock=sock, backlog=ACCEPT_QUEUE)
        else:
            self._server = await loop.create_server(new_session, sock=sock, backlog=ACCEPT_QUEUE)
        logger.info("TCP: listening on %s", self.tcp)
        if is_exposed(sock) and not options.auth_http_addresses and not options.tls_client_auth_policy:
            logger.warning(
                "TCP: %s can be reached by other machines, and whoever reaches it can read and publish messages%s; see "
                "docs/security.md",
                self.tcp,
                "" if options.tls_required != "false" else ", without TLS",
            )
        if self.api is not None:
            await self._serve_http(self.api, https, http)

    async def _serve_http(self, api: Api, https: socket.socket | None, http: socket.socket | None) -> None:
        if https is not None:
            # First: the plain port may have to name this one in its answers.
            self.https = addresses.text_of(https.getsockname())
            self._warn_of_http(https, self.https)
            await api.listen_tls(https)
        if http is not None:
            self.http = addresses.text_of(http.getsockname())
            await api.listen(http, self.poller)
            logger.info("HTTP: listening on %s", self.http)
            self._warn_of_http(http, self.http)
        if https is not None:
            logger.info("HTTPS: listening on %s", self.https)

    def _warn_of_http(self, sock: socket.socket, address: str) -> None:
        options = self._broker.options
        if options.http_auth_token_file or not is_exposed(sock):
            return
        if address == self.http and options.tls_required == "true":
            # It answers nobody.
            return
        if address == self.https and options.tls_client_auth_policy:
            return
        logger.warning(
            "HTTP: %s can be reached by other machines, and whoever reaches it can read messages and delete topics; "
            "see docs/security.md",
            address,
        )

    def _bind_all(
        self, tcp: str, https: str, http: str
    ) -> tuple[socket.socket, socket.socket | None, socket.socket | None]:
        """Return a listening socket for each address, None for an empty one of HTTP. With an error none is left."""
        mode = int(self._broker.options.unix_socket_mode, 8)
        listen = self._broker.disk.system.listen
        first = listen(tcp, mode=mode)
        found: list[socket.socket | None] = []
        try:
            for address in (https, http):
                found.append(listen(address, mode=mode) if address else None)  # noqa: PERF401
        except BaseException:
            for sock in (first, *found):
                if sock is not None:
                    sock.close()
            raise
        return first, found[0], found[1]

    def _connection_count(self) -> int:
        questions = 0 if self._broker.auth is None else self._broker.auth.under_way
        return len(self._broker.sessions) + questions + (0 if self.api is None else self.api.connection_count())

    # --- Stop ------------------------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        if self.poller is not None:
            self.poller.stop_listening()

    async def end_requests(self) -> None:
        """Take no more requests over HTTP; those that are under way get a moment to end."""
        if self.api is not None:
            await self.api.close()

    def drop(self) -> None:
        """Accept nothing more, and drop every HTTP connection at once."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.stop_accepting()
        if self.api is not None:
            self.api.drop()

    def close_poller(self) -> None:
        if self.poller is not None:
            self.poller.close()
            self.poller = None

    def remove_sockets(self) -> None:
        """Delete the files of unix sockets."""
        for bound in (self.tcp, self.http):
            if bound and addresses.split(bound, listening=True).path:
                with contextlib.suppress(OSError):
                    self._broker.disk.remove(Path(bound))
