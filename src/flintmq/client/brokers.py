"""Which brokers there are, and one connection to each, kept alive.

Brokers are named by the user, or found by asking nsqlookupds now and then. A Keeper dials one of them, and when the
connection is lost dials again, with growing pauses. A lookupd that is down or has forgotten a broker costs no open
connection. What is said over the connections is their owner's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from flintmq.client.connection import Clock, Connection, Owner, Settings, sleep
from flintmq.cluster.lookupds import Answer, Node
from flintmq.errors import ConnectError, FlintError

__all__ = ["Brokers", "Keeper"]

logger = logging.getLogger(__name__)

#: After a connection was lost the lookupds are asked at once, but not more often than this.
_EARLY_LOOK_SECONDS = 1.0


class Keeper:
    """Keeps a connection to one nsqd: dials, and when it is lost dials again, with growing pauses."""

    def __init__(
        self,
        address: str,
        settings: Settings,
        clock: Clock,
        owner: Owner,
        *,
        subscribe: tuple[str, str] | None = None,
        on_open: Callable[[Connection], None],
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        self.address = address
        self.connection: Connection | None = None
        #: Why there is no connection; None before the first try has ended.
        self.error: Exception | None = None
        self._settings = settings
        self._clock = clock
        self._owner = owner
        self._subscribe = subscribe
        self._on_open = on_open
        self._on_failure = on_failure
        self._failures = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"flintmq connection to {address}")

    async def _run(self) -> None:
        while True:
            try:
                connection = await Connection.open(
                    self.address, self._settings, self._clock, self._owner, self._subscribe
                )
            except FlintError as exc:
                self.error = exc
                self._on_failure(self.address, exc)
            else:
                since = self._clock.time()
                self.connection = connection
                self.error = None
                self._on_open(connection)
                await asyncio.shield(connection.lost)
                self.connection = None
                self.error = connection.reason
                if self._clock.time() - since >= self._settings.max_reconnect_delay:
                    self._failures = 0
            await self._pause()

    async def _pause(self) -> None:
        self._failures += 1
        # Beyond this it is at its most anyway; and 2.0 ** 2000 is an error.
        longest = self._settings.reconnect_delay * 2.0 ** min(self._failures - 1, 64)
        delay = min(longest, self._settings.max_reconnect_delay)
        # Many clients lose the same broker at the same moment: let them not come back at the same moment.
        delay *= random.uniform(0.5, 1.0)
        await sleep(self._clock, delay)

    async def stop(self) -> None:
        """No more dialling. An open connection is left to its owner."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class Brokers:
    """All brokers of a producer or consumer."""

    def __init__(
        self,
        name: str,
        owner: Owner,
        settings: Settings,
        clock: Clock,
        *,
        fixed: Sequence[str],
        look: Callable[[], Awaitable[Answer[list[Node]]]] | None,
        poll_interval: float,
        poll_jitter: float,
        on_open: Callable[[Connection], None],
        on_error: Callable[[str, Exception], object] | None,
        subscribe: tuple[str, str] | None = None,
    ) -> None:
        """`look` asks the lookupds. `on_error` hears of every broker and lookupd that fails, with its address."""
        self._name = name
        self._owner = owner
        self._settings = settings
        self._clock = clock
        self._fixed = set(fixed)
        self._look = look
        self._poll_interval = poll_interval
        self._poll_jitter = poll_jitter
        self._on_open = on_open
        self._on_error = on_error
        self._subscribe = subscribe
        self._keepers: dict[str, Keeper] = {}
        self._look_early = asyncio.Event()
        self._discovery: asyncio.Task[None] | None = None
        #: What the lookupds said last, if it was nothing good; empty before the first answer.
        self._lookup_error: FlintError | None = None
        self._has_looked = look is None
        self._forbidden = False
        #: Set whenever there is news.
        self._news = asyncio.Event()
        for address in fixed:
            self._keep(address)
        if look is not None:
            task = self._discover()
            self._discovery = asyncio.get_running_loop().create_task(task, name=f"flintmq discovery for {name}")

    async def first(self) -> None:
        """Wait for the first connection. ConnectError if every broker there is was tried in vain."""
        while not any(keeper.connection for keeper in self._keepers.values()):
            if self._has_looked and all(keeper.error for keeper in self._keepers.values()):
                raise ConnectError(self.why_none())
            self._news.clear()
            await self._news.wait()

    def why_none(self) -> str:
        """Why there is no connection, for an error's text."""
        reasons = [str(keeper.error) for keeper in self._keepers.values() if keeper.error]
        if self._lookup_error is not None:
            reasons.append(str(self._lookup_error))
        return "no broker can be reached: " + ("; ".join(reasons) or "the lookupds know of none")

    def add(self, address: str) -> None:
        """One more that was named by the user: it is dialled until the end."""
        if self._forbidden:
            return
        self._fixed.add(address)
        self._keep(address)

    def lost(self, connection: Connection, reason: Exception) -> None:
        """One connection has ended: perhaps the lookupds know why."""
        self._failed(connection.address, reason)
        self._look_early.set()

    def forbid(self) -> None:
        """Look for no more brokers."""
        self._forbidden = True
        if self._discovery is not None:
            self._discovery.cancel()

    async def stop(self) -> None:
        """Neither look nor dial any more. Open connections are their owner's to close."""
        self.forbid()
        if self._discovery is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._discovery
        for keeper in self._keepers.values():
            await keeper.stop()

    def _keep(self, address: str) -> None:
        if address not in self._keepers:
            self._keepers[address] = Keeper(
                address,
                self._settings,
                self._clock,
                self._owner,
                subscribe=self._subscribe,
                on_open=self._opened,
                on_failure=self._failed,
            )

    def _opened(self, connection: Connection) -> None:
        logger.info("%s: connected to %s", self._name, connection.address)
        self._news.set()
        self._on_open(connection)

    def _failed(self, address: str, error: Exception) -> None:
        logger.warning("%s: %s", self._name, error)
        self._news.set()
        if self._on_error is not None:
            try:
                self._on_error(address, error)
            except Exception:
                logger.exception("%s: on_error failed", self._name)

    async def look(self) -> None:
        """Ask the lookupds now, and dial those that are new."""
        if self._look is None or self._forbidden:
            return
        try:
            answer = await self._look()
        except FlintError as exc:
            self._lookup_error = exc
            self._failed("nsqlookupd", exc)
        else:
            self._lookup_error = None
            for url, reason in answer.failures.items():
                self._failed(url, ConnectError(f"nsqlookupd {url}: {reason}"))
            if not answer.value:
                logger.info("%s: the lookupds know of no nsqd yet", self._name)
            await self._follow([node.tcp_address for node in answer.value])
        self._has_looked = True
        self._news.set()

    async def _discover(self) -> None:
        while True:
            self._look_early.clear()
            await self.look()
            # Clients that were started together should not ask together for ever.
            interval = self._poll_interval * (1 + random.random() * self._poll_jitter)
            early = min(interval, _EARLY_LOOK_SECONDS)
            await sleep(self._clock, early)
            timer = self._clock.call_later(interval - early, self._look_early.set)
            try:
                await self._look_early.wait()
            finally:
                timer.cancel()

    async def _follow(self, found: list[str]) -> None:
        """Connect to those that are new; stop dialling those that are neither known any more nor connected."""
        if self._forbidden:
            return
        for address in found:
            self._keep(address)
        for address, keeper in list(self._keepers.items()):
            if address not in found and address not in self._fixed and keeper.connection is None:
                # Two looks may come to the same end.
                if self._keepers.get(address) is keeper:
                    del self._keepers[address]
                await keeper.stop()
