"""Which brokers there are, and one connection to each, kept alive.

Brokers are named by the user, or found by asking nsqlookupds now and then, and every few seconds while a connection is
missing. A Keeper dials one of them, and when the connection is lost dials again, with growing pauses while that fails.
A broker that the lookupds no longer name is dialled for some minutes more: one that restarts is unregistered first.
What is said over the connections is their owner's business.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence

from flintmq.addresses import split
from flintmq.client.clock import Clock, Timer, sleep
from flintmq.client.connection import Connection, Owner, Settings
from flintmq.cluster.lookupds import Answer, Node
from flintmq.errors import ConnectError, FlintError, OptionError, ProtocolError

__all__ = ["Brokers", "Keeper"]

logger = logging.getLogger(__name__)

#: After a connection was lost the lookupds are asked at once, but not more often than this.
_EARLY_LOOK_SECONDS = 1.0
#: How often the lookupds are asked while there is no connection at all, or while one that was lost is missing.
_MISSING_LOOK_SECONDS = 2.0
#: How long a lost connection counts as missing.
_MISSING_SECONDS = 60.0
#: How long a broker is dialled that no lookupd names any more.
_FORGET_SECONDS = 300.0
#: How often a broker is dialled at least while a start waits for it.
_START_DIAL_SECONDS = 1.0
#: How often the same failure of the same broker is logged as a warning at most.
_REPEAT_SECONDS = 60.0
#: How long tasks may take to end after they were cancelled.
_CANCEL_SECONDS = 2.0


class Keeper:
    """Keeps a connection to one nsqd: dials, and when it is lost dials again, with growing pauses while that fails."""

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
        #: When a lookupd named it last, or a connection to it ended; and whether the last answer left it out.
        self.seen = clock.time()
        self.vanished = False
        #: When a connection to it was lost; None if there never was one.
        self.lost_at: float | None = None
        self._settings = settings
        self._clock = clock
        self._owner = owner
        self._subscribe = subscribe
        self._on_open = on_open
        self._on_failure = on_failure
        self._failures = 0
        self._now = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"flintmq connection to {address}")

    def dial_now(self, *, forgive: bool = True) -> None:
        """End the pause between two tries. The next pauses are short again, unless `forgive` is false."""
        if forgive:
            self._failures = 0
        self._now.set()

    async def _run(self) -> None:
        while True:
            try:
                connection = await Connection.open(
                    self.address, self._settings, self._clock, self._owner, self._subscribe
                )
            except FlintError as exc:
                await self._failed(exc)
            except KeyboardInterrupt:
                raise
            except BaseException as exc:
                # From a `connect` of the user's, unless somebody ends this task.
                task = asyncio.current_task()
                if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                error = ConnectError(f"{self.address}: {type(exc).__name__} {exc}".rstrip())
                error.__cause__ = exc
                await self._failed(error)
            else:
                await self._hold(connection)

    async def _failed(self, error: FlintError) -> None:
        self.error = error
        self._failures += 1
        self._on_failure(self.address, error)
        await self._pause(self._settings.reconnect_delay * 2.0 ** min(self._failures - 1, 64))

    async def _hold(self, connection: Connection) -> None:
        """Be there until a connection is lost."""
        opened = self._clock.time()
        self._failures = 0
        self.connection = connection
        self.error = None
        try:
            self._on_open(connection)
        except Exception as exc:
            # Whatever it is, the broker must be dialled again.
            logger.exception("connection to %s failed", self.address)
            connection.fail(ConnectError(f"{self.address}: {exc!r}"))
        await asyncio.shield(connection.lost)
        self.connection = None
        self.error = connection.reason
        self.seen = self.lost_at = self._clock.time()
        # A broker closes the connection after it has refused one command: that is no reason to keep others waiting.
        # But one that does so all the time, and answers nothing else, is not dialled all the time.
        is_refusal = isinstance(connection.reason, ProtocolError)
        is_old = self.lost_at - opened >= self._settings.reconnect_delay
        if not is_refusal or not (is_old or connection.is_wanted):
            await self._pause(self._settings.reconnect_delay)

    async def _pause(self, seconds: float) -> None:
        delay = min(seconds, self._settings.max_reconnect_delay)
        # Many clients lose the same broker at the same moment: let them not come back at the same moment.
        delay *= random.uniform(0.5, 1.0)
        self._now.clear()
        timer = self._clock.call_later(delay, self._now.set)
        try:
            await self._now.wait()
        finally:
            timer.cancel()


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
        on_error: Callable[[str, Exception], object],
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
        self._forbidden = False
        #: What was logged about each address last, when, and whether a broker refused a command with it.
        self._logged: dict[str, tuple[str, float, bool]] = {}
        #: Set whenever there is news of a connection.
        self._news = asyncio.Event()
        for address in fixed:
            self._keep(address)
        if look is not None:
            task = self._discover()
            self._discovery = asyncio.get_running_loop().create_task(task, name=f"flintmq discovery for {name}")

    async def first(self, seconds: float) -> None:
        """Wait for the first connection. ConnectError if there is none within so many seconds.

        Brokers that are not up yet are waited for; those that are up and refuse us would do so again.
        """
        over = False
        has_said = False
        dialling: Timer

        def give_up() -> None:
            nonlocal over
            over = True
            self._news.set()

        def dial() -> None:
            # Somebody waits: no pause grows beyond this.
            nonlocal dialling
            for keeper in self._keepers.values():
                keeper.dial_now(forgive=False)
            dialling = self._clock.call_later(_START_DIAL_SECONDS, dial)

        timer = self._clock.call_later(seconds, give_up)
        dialling = self._clock.call_later(_START_DIAL_SECONDS, dial)
        try:
            while not self._is_connected:
                if over or self._is_hopeless():
                    raise ConnectError(self.why_none())
                if not has_said and any(keeper.error for keeper in self._keepers.values()):
                    has_said = True
                    logger.warning("%s: waiting up to %g s for a broker", self._name, seconds)
                self._news.clear()
                await self._news.wait()
        finally:
            timer.cancel()
            dialling.cancel()

    def _is_hopeless(self) -> bool:
        errors = [keeper.error for keeper in self._keepers.values()]
        return self._look is None and all(error is not None and not _is_not_up(error) for error in errors)

    @property
    def _is_connected(self) -> bool:
        return any(keeper.connection for keeper in self._keepers.values())

    def why_none(self) -> str:
        """Return why there is no connection, for an error's text."""
        errors = {address: keeper.error for address, keeper in self._keepers.items() if keeper.error}
        # A refusal is in the broker's own words, without its address.
        is_refused = {address for address, error in errors.items() if isinstance(error, ProtocolError)}
        reasons = [f"{address}: {error}" if address in is_refused else str(error) for address, error in errors.items()]
        if self._lookup_error is not None:
            reasons.append(str(self._lookup_error))
        what = "no broker is connected" if is_refused else "no broker can be reached"
        return f"{what}: " + ("; ".join(reasons) or "the lookupds know of none")

    def add(self, address: str) -> None:
        """Add one that was named by the user: it is dialled until the end."""
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

    def abandon(self) -> None:
        """As `stop`, without waiting for anything."""
        self.forbid()
        for keeper in self._keepers.values():
            keeper.task.cancel()

    async def stop(self) -> None:
        """Neither look nor dial any more. Open connections are their owner's to close."""
        self.forbid()
        tasks = [keeper.task for keeper in self._keepers.values()]
        if self._discovery is not None:
            tasks.append(self._discovery)
        await self._end(tasks)

    async def _end(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Cancel tasks and wait for their ends, unless we are cancelled ourselves."""
        tasks = list(tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            done, late = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
            for task in late:
                logger.warning("%s: %s does not end", self._name, task.get_name())
            for task in done:
                if not task.cancelled() and (error := task.exception()):
                    logger.error("%s: %s failed", self._name, task.get_name(), exc_info=error)

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
        # The next loss is news again. A refusal says nothing of the connection.
        if not self._logged.get(connection.address, ("", 0.0, True))[2]:
            del self._logged[connection.address]
        self._news.set()
        self._on_open(connection)

    def _failed(self, address: str, error: Exception) -> None:
        text, now = str(error), self._clock.time()
        said, when, _ = self._logged.get(address, ("", 0.0, False))
        is_repeated = text == said and now - when < _REPEAT_SECONDS
        if not is_repeated:
            self._logged[address] = (text, now, isinstance(error, ProtocolError))
        logger.log(logging.DEBUG if is_repeated else logging.WARNING, "%s: %s", self._name, text)
        self._news.set()
        self._on_error(address, error)

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
            await self._follow([node.tcp_address for node in answer.value], is_whole=not answer.failures)

    async def _discover(self) -> None:
        while True:
            self._look_early.clear()
            try:
                await self.look()
            except Exception:
                # Whatever it is, it must not be the last look.
                logger.exception("%s: looking for brokers failed", self._name)
            # Clients that were started together should not ask together for ever.
            interval = self._poll_interval * (1 + random.random() * self._poll_jitter)
            if self._is_one_missing():
                interval = min(interval, _MISSING_LOOK_SECONDS * random.uniform(0.75, 1.0))
            early = min(interval, _EARLY_LOOK_SECONDS)
            await sleep(self._clock, early)
            timer = self._clock.call_later(interval - early, self._look_early.set)
            try:
                await self._look_early.wait()
            finally:
                timer.cancel()

    def _is_one_missing(self) -> bool:
        if not self._is_connected:
            return True
        since = self._clock.time() - _MISSING_SECONDS
        return any(
            keeper.connection is None and keeper.lost_at is not None and keeper.lost_at > since
            for keeper in self._keepers.values()
        )

    async def _follow(self, found: list[str], *, is_whole: bool) -> None:
        """Connect to those that are new; stop dialling those that have been neither named nor connected for long."""
        if self._forbidden:
            return
        now = self._clock.time()
        for address in found:
            try:
                # Only a path of this machine would be taken for a unix socket.
                split(address, unix=False)
            except OptionError as exc:
                self._failed(address, ConnectError(f"a lookupd names a broker at {exc}"))
            else:
                self._keep(address)
        forgotten: list[Keeper] = []
        for address, keeper in list(self._keepers.items()):
            if address in found:
                keeper.seen = now
                if keeper.vanished and keeper.connection is None:
                    # It has registered again, so it is up again.
                    keeper.dial_now()
                keeper.vanished = False
            else:
                keeper.vanished = True
                if not is_whole:
                    # A lookupd that did not answer may be the one that knows it.
                    keeper.seen = now
                elif address not in self._fixed and keeper.connection is None and now - keeper.seen >= _FORGET_SECONDS:
                    del self._keepers[address]
                    self._logged.pop(address, None)
                    forgotten.append(keeper)
        await self._end(keeper.task for keeper in forgotten)


def _is_not_up(error: Exception) -> bool:
    """Return whether a broker could not be reached at all, or closed the connection without a word."""
    cause = error.__cause__
    return isinstance(cause, OSError) and type(cause).__module__ != "ssl"
