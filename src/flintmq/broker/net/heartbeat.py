"""The time of one connection: the deadline of its first bytes, heartbeats, and silence that is too long.

A Heartbeat owns the connection's one timer. Its session says when the last command came and sends what is due.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from flintmq.protocol.wire import HEARTBEAT_FRAME

if TYPE_CHECKING:
    from flintmq.broker.net.session import Session

__all__ = ["MAGIC_TIMEOUT", "Heartbeat"]

logger = logging.getLogger(__name__)

#: Seconds that a connection may stay silent before it says which protocol it speaks.
MAGIC_TIMEOUT = 5.0
#: Milliseconds. NSQ's client timeout is a fixed minute; heartbeats come at half of it.
DEFAULT_HEARTBEAT = 30_000


class Heartbeat:
    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop
        #: Milliseconds; 0: no heartbeats, and silence is never too long.
        self.interval = DEFAULT_HEARTBEAT
        # As in NSQ only the first IDENTIFY reaches these.
        self._period = 0.0
        self.next = 0.0
        self.timer: asyncio.TimerHandle | None = None

    def await_magic(self) -> None:
        self.timer = self._loop.call_later(MAGIC_TIMEOUT, self.no_magic)

    def no_magic(self) -> None:
        logger.info("client(%s): no protocol magic within %g s", self._session.remote_address, MAGIC_TIMEOUT)
        self._session.drop()

    def start(self) -> None:
        """Send heartbeats at the interval that holds now."""
        self._period = max(self.interval, 0) / 1000
        self.next = self._loop.time() + self._period
        self.set_timer()

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def set_timer(self) -> None:
        """Set one timer for both: the next heartbeat, and the moment at which silence is too long."""
        self.stop()
        moments = []
        if self._period > 0:
            moments.append(self.next)
        if self.interval > 0:
            moments.append(self._too_late())
        if moments:
            self.timer = self._loop.call_at(min(moments), self.on_timer)

    def _too_late(self) -> float:
        """The moment at which silence is too long: one sum for both who ask, since another may be rounded otherwise."""
        return self._session.last_command + 2 * self.interval / 1000

    def on_timer(self) -> None:
        self.timer = None
        session = self._session
        now = self._loop.time()
        if self._period > 0 and now >= self.next:
            # Whether the client is busy or not, and whether it answers or not.
            self.next = max(self.next + self._period, now)
            session.send(HEARTBEAT_FRAME)
        if session.is_held_up:
            # It is not the client who is silent.
            session.heard(now)
        interval = self.interval / 1000
        silent = now - session.last_command
        stuck = session.blocked_since and now - session.blocked_since >= interval
        if interval > 0 and (now >= self._too_late() or stuck):
            logger.info("client(%s): no command for %g s", session.remote_address, silent)
            session.time_out()
            return
        self.set_timer()
