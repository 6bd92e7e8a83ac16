"""What one client may do: its secret, what the auth servers granted for it, and when that expires.

An Authorization belongs to one session of a broker that has auth servers. The conversation with them is in ``auth``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flintmq.errors import AuthError, ProtocolError

if TYPE_CHECKING:
    from flintmq.broker.net.auth import AuthServers, Grant
    from flintmq.broker.net.session import Session

__all__ = ["Authorization"]


class Authorization:
    def __init__(self, session: Session, servers: AuthServers, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._servers = servers
        self._loop = loop
        self._secret = b""
        self.grant: Grant | None = None
        #: None: what was granted has expired.
        self.expiry: asyncio.TimerHandle | None = None
        self.asked: asyncio.Task[Grant] | None = None

    def ask(self, secret: bytes) -> Grant | None:
        """Return what the secret is worth; None while the auth servers are asked: then the command is run again."""
        asked, self.asked = self.asked, None
        if asked is None:
            session = self._session
            common_name = session.upgrade.common_name if session.upgrade is not None else ""
            asked = self._servers.ask(session.identity.remote_ip, session.tls_info is not None, common_name, secret)
            self.asked = asked
            session.wait(lambda then: asked.add_done_callback(lambda _: then()))
            return None
        try:
            return asked.result()
        except AuthError as exc:
            # The reason is in the log: a client that has not proved who it is, is told nothing.
            raise ProtocolError("E_AUTH_FAILED", "AUTH failed") from exc

    def must_ask(self, verb: str, topic: str, channel: str) -> bool:
        """May the client do this? ProtocolError if not; True if that has to be asked first, and the command waits."""
        if self.grant is None:
            raise ProtocolError("E_AUTH_FIRST", f"AUTH required before {verb}")
        if self.expiry is None:
            grant = self.ask(self._secret)
            if grant is None:
                return True
            self.take(grant, self._secret)
        if not self.grant.allows(topic, channel):
            raise ProtocolError("E_UNAUTHORIZED", f'AUTH failed for {verb} on "{topic}" "{channel}"')
        return False

    def take(self, grant: Grant, secret: bytes) -> None:
        """Hold on to what was granted for a secret, until it expires."""
        self._secret = secret
        self.grant = grant
        if self.expiry is not None:
            self.expiry.cancel()
        until = self._loop.time() + grant.ttl
        self._session.trust_until(until)
        self.expiry = self._loop.call_at(until, self._session.grant_expired)

    def expire(self) -> None:
        """The auth servers are asked again before the next command that needs it."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def cancel(self) -> None:
        """The client is gone."""
        self.expire()
        if self.asked is not None:
            self.asked.cancel()
            self.asked = None
