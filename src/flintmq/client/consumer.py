"""The consumer: finds the brokers of a topic, keeps connections to them, and hands out their messages.

A Consumer owns what it was sent and has not handed out yet; it is bounded by `max_in_flight`, so the reader never waits
for a handler and heartbeats are answered whatever handlers do. Who may send how much is its Flow's business, the
sockets are its Connections'. Handlers run in a fixed number of tasks, not in one per message.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from flintmq.addresses import split
from flintmq.client import tracing
from flintmq.client.brokers import Brokers
from flintmq.client.connection import Clock, Connection, Message, Settings, Timer, addresses
from flintmq.client.flow import Flow
from flintmq.cluster.lookupds import Lookupds
from flintmq.errors import ClosedError, OptionError, ProtocolError
from flintmq.protocol import wire

__all__ = ["Consumer", "Stats"]

logger = logging.getLogger(__name__)

#: How long handlers that never wait may have the event loop for themselves.
_SLICE_SECONDS = 0.005
_SLICE_MESSAGES = 1000

Handler = Callable[[Message], Any]


@dataclass
class Stats:
    """Counts since the start."""

    received: int = 0
    finished: int = 0
    requeued: int = 0
    #: Over `max_attempts`.
    given_up: int = 0
    #: Timed out before a handler was free; the broker delivers them again.
    expired: int = 0


class Consumer:
    """Messages of a channel, from every nsqd that has the topic.

        async with Consumer("orders", "billing", lookupd=["127.0.0.1:4161"]) as consumer:
            async for message in consumer:
                with message:              # finished at the end, requeued if the block raises
                    bill(message.body)

    or, with a handler, `await Consumer("orders", "billing", nsqd="127.0.0.1:4150", handler=bill).run()`.

    Size: half of it are the arguments, which are public; the rest is looked at for every message or batch of them, so
    it is flat.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        nsqd: str | Sequence[str] | None = None,
        lookupd: str | Sequence[str] | None = None,
        handler: Handler | None = None,
        concurrency: int = 1,
        max_in_flight: int | None = None,
        max_attempts: int = 5,
        on_give_up: Handler | None = None,
        on_error: Callable[[str, Exception], object] | None = None,
        on_heartbeat: Callable[[str], object] | None = None,
        default_requeue_delay: float = 90.0,
        max_requeue_delay: float = 900.0,
        auto_touch: bool = False,
        lookupd_poll_interval: float = 60.0,
        lookupd_poll_jitter: float = 0.3,
        lookupd_timeout: float = 5.0,
        lookupd_token: str | None = None,
        lookupd_tls: bool | Any = True,
        max_backoff_duration: float = 120.0,
        backoff_multiplier: float = 1.0,
        backoff_strategy: Callable[[int], float] | None = None,
        backoff_jitter: bool = False,
        low_rdy_idle_timeout: float = 1.0,
        low_rdy_timeout: float = 5.0,
        rdy_redistribute_interval: float = 0.5,
        stop_timeout: float = 30.0,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        """Other keywords are those of `Settings`."""
        if not wire.valid_name(topic):
            raise OptionError(f'"{topic}" is not a topic name')
        if not wire.valid_name(channel):
            raise OptionError(f'"{channel}" is not a channel name')
        if concurrency < 1:
            raise OptionError("concurrency must be at least 1")
        if not 0 <= max_attempts <= 65535:
            raise OptionError("max_attempts must be 0 (no limit) to 65535")
        if not 0 <= lookupd_poll_jitter <= 1:
            raise OptionError("lookupd_poll_jitter must be 0 to 1")
        self.topic = topic
        self.channel = channel
        self.stats = Stats()
        self._name = f"{topic}/{channel}"
        self._fixed = addresses(nsqd)
        for address in self._fixed:
            split(address)
        looked_up = addresses(lookupd)
        if not self._fixed and not looked_up:
            raise OptionError("a consumer needs nsqd or lookupd addresses")
        self._settings = Settings(**settings)
        self._lookupds = Lookupds(looked_up, timeout=lookupd_timeout, token=lookupd_token, tls=lookupd_tls)
        self._poll_interval = lookupd_poll_interval
        self._poll_jitter = lookupd_poll_jitter
        self._handler = handler
        self._concurrency = concurrency
        self._max_attempts = max_attempts
        self._on_give_up = on_give_up
        self._on_error = on_error
        self._on_heartbeat = on_heartbeat
        self._default_requeue_delay = default_requeue_delay
        self._max_requeue_delay = max_requeue_delay
        self._auto_touch = auto_touch
        self._stop_timeout = stop_timeout
        self._clock_or_loop = clock
        self._max_in_flight = concurrency if max_in_flight is None else max_in_flight
        self._flow_options = {
            "name": self._name,
            "max_backoff_duration": max_backoff_duration,
            "backoff_multiplier": backoff_multiplier,
            "backoff_strategy": backoff_strategy,
            "backoff_jitter": backoff_jitter,
            "low_rdy_idle_timeout": low_rdy_idle_timeout,
            "low_rdy_timeout": low_rdy_timeout,
            "rdy_redistribute_interval": rdy_redistribute_interval,
        }
        # Brokers.
        self._connections: set[Connection] = set()
        # Messages that nobody has taken, and who waits for one.
        self._queue: deque[Message] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._slice_end = 0.0
        self._slice_left = 0
        # Handlers.
        self._workers: list[asyncio.Task[None]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._touch_timer: Timer | None = None
        # The end.
        self._started = False
        self._stopping = False
        self._closed = False
        self._changed = asyncio.Event()

    # --- Start and stop ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Consumer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Begin. Brokers that cannot be reached are tried again until the end; `on_error` and the log hear of it."""
        if self._started:
            raise ClosedError("a consumer runs once")
        self._started = True
        self._loop = asyncio.get_running_loop()
        self._clock: Clock = self._clock_or_loop or self._loop
        self._time = self._clock.time
        self.flow = Flow(self._clock, self._max_in_flight, **self._flow_options)  # type: ignore[arg-type]
        if self._handler is not None:
            work = self._handler_coroutine(self._handler)
            self._workers = [
                self._loop.create_task(self._work(work), name=f"flintmq handler {number} of {self._name}")
                for number in range(self._concurrency)
            ]
        self._brokers = Brokers(
            f"CONSUMER({self._name})",
            self,
            self._settings,
            self._clock,
            fixed=self._fixed,
            look=(lambda: self._lookupds.producers(self.topic)) if self._lookupds.urls else None,
            poll_interval=self._poll_interval,
            poll_jitter=self._poll_jitter,
            on_open=self._opened,
            on_error=self._on_error,
            subscribe=(self.topic, self.channel),
        )
        if self._auto_touch:
            self._touch_timer = self._clock.call_later(0.25, self._touch_all)

    async def run(self, stop_on: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        """Handle messages until `stop` is called or one of these signals comes; then end in order."""
        if self._handler is None:
            raise OptionError("run needs a handler")
        loop = asyncio.get_running_loop()
        caught = stop_on if threading.current_thread() is threading.main_thread() else ()
        for number in caught:
            loop.add_signal_handler(number, self.stop)
        try:
            async with self:
                while not self._stopping:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Take nothing more. What is here is still handed out; then the iteration, or `run`, ends."""
        if self._stopping or not self._started:
            return
        self._stopping = True
        self.flow.stop()
        self._brokers.forbid()
        for connection in self._connections:
            connection.say_goodbye()
        self._something_changed()

    async def close(self) -> None:
        """Stop, wait for the handlers (at most `stop_timeout`), give back what was not answered, disconnect."""
        if self._closed or not self._started:
            return
        self._closed = True
        self.stop()
        try:
            await self._brokers.stop()
            await self._drain()
        finally:
            await self._end()

    async def _drain(self) -> None:
        """Until the brokers have confirmed and, where handlers work, all is answered; or the time is over."""
        time_over = False

        def give_up() -> None:
            nonlocal time_over
            time_over = True
            self._changed.set()

        timer = self._clock.call_later(self._stop_timeout, give_up)
        try:
            while not time_over and not self._is_drained():
                self._changed.clear()
                await self._changed.wait()
        finally:
            timer.cancel()
        if time_over:
            logger.warning("CONSUMER(%s): stopped after %g s with work left", self._name, self._stop_timeout)

    def _is_drained(self) -> bool:
        if self._handler is None:
            # Nobody will take what is here: back with it, now and as long as more comes.
            self._give_back()
        return all(connection.drained and not connection.unanswered for connection in self._connections)

    async def _end(self) -> None:
        if self._touch_timer is not None:
            self._touch_timer.cancel()
        for worker in self._workers:
            worker.cancel()
        # Theirs too: a handler that was cancelled has given its message back by now.
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._give_back()
        await asyncio.gather(*(connection.close() for connection in list(self._connections)))
        await self._lookupds.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        self._something_changed()

    def _give_back(self) -> None:
        self._queue.clear()
        for connection in self._connections:
            for message in list(connection.unanswered):
                message.requeue(0, backoff=False)

    def _something_changed(self) -> None:
        """Whoever waits for a message or for the end should look again."""
        self._changed.set()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)

    # --- Settings that may change ------------------------------------------------------------------------------------

    @property
    def max_in_flight(self) -> int:
        """Messages under way at a time, over all connections. 0 pauses."""
        return self.flow.max_in_flight if self._started else self._max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        if count < 0:
            raise OptionError("max_in_flight must not be below 0")
        self._max_in_flight = count
        if self._started:
            self.flow.max_in_flight = count

    @property
    def is_starved(self) -> bool:
        """Some connection has sent nearly all it may. Whoever gathers messages should work on what he has."""
        return self._started and self.flow.is_starved

    @property
    def connections(self) -> list[str]:
        """The brokers that we are connected to."""
        return sorted(connection.address for connection in self._connections)

    @property
    def in_flight(self) -> int:
        """Messages that came and were not answered."""
        return sum(connection.in_flight for connection in self._connections)

    # --- Brokers that come later -------------------------------------------------------------------------------------

    def add_nsqd(self, address: str) -> None:
        """Consume from one more broker. It is dialled until the end, as if it had been named at the start."""
        split(address)
        if not self._started:
            self._fixed = addresses([*self._fixed, address])
        else:
            self._brokers.add(address)

    async def look(self) -> None:
        """Ask the lookupds now, and not only when the poll interval is over. Those that fail, `on_error` hears of."""
        if not self._started:
            raise ClosedError("start the consumer first: async with Consumer(…) as consumer")
        await self._brokers.look()

    # --- Messages out ------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Message]:
        if self._handler is not None:
            raise OptionError("a consumer with a handler cannot be iterated over")
        return self

    async def __anext__(self) -> Message:
        if not self._started:
            raise ClosedError("start the consumer first: async with Consumer(…) as consumer")
        message = await self._next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def _next(self) -> Message | None:
        """The next message that is worth handling; None at the end."""
        queue = self._queue
        while True:
            while queue:
                now = self._time()
                self._slice_left -= 1
                if now >= self._slice_end or self._slice_left < 0:
                    # Others need the loop too: our own reader, for one.
                    await asyncio.sleep(0)
                    self._slice_end = self._time() + _SLICE_SECONDS
                    self._slice_left = _SLICE_MESSAGES
                    continue
                message = queue.popleft()
                if message.deadline <= now:
                    self._expire(message)
                elif 0 < self._max_attempts < message.attempts:
                    await self._give_up(message)
                else:
                    return message
            if self._stopping and all(connection.drained for connection in self._connections):
                return None
            if self._closed and self._handler is None:
                return None
            waiter = self._loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and queue:
                    self._wake(1)  # we were called for a message that somebody else must take now
                raise
            self._slice_end = self._time() + _SLICE_SECONDS
            self._slice_left = _SLICE_MESSAGES

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _expire(self, message: Message) -> None:
        """Its time was over before its turn came. The broker delivers it again, so to handle it would be twice."""
        self.stats.expired += 1
        message.answered = True
        connection = message.source
        if connection is not None:
            connection.unanswered.discard(message)
            self.flow.answered(connection)

    async def _give_up(self, message: Message) -> None:
        self.stats.given_up += 1
        try:
            if self._on_give_up is None:
                logger.warning(
                    "CONSUMER(%s): giving up on message %s after %d attempts",
                    self._name,
                    message.id.decode(errors="replace"),
                    message.attempts - 1,
                )
            else:
                result = self._on_give_up(message)
                if inspect.isawaitable(result):
                    await result
        except Exception:
            logger.exception("CONSUMER(%s): on_give_up failed; the message is requeued", self._name)
            message.requeue()
        except BaseException:
            message.requeue(0, backoff=False)
            raise
        if not message.kept:
            message.finish()

    # --- Handlers ----------------------------------------------------------------------------------------------------

    def _handler_coroutine(self, handler: Handler) -> Callable[[Message], Awaitable[Any]]:
        # An object may have a coroutine function for its __call__.
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004
            return tracing.traced_handler(handler, self.topic, self.channel)
        # In threads: one that blocks would hold up heartbeats and everything else.
        self._threads = ThreadPoolExecutor(self._concurrency, f"flintmq-{self.topic}-{self.channel}")

        async def in_thread(message: Message) -> None:
            result = await self._loop.run_in_executor(self._threads, handler, message)
            if inspect.isawaitable(result):
                await result

        return tracing.traced_handler(in_thread, self.topic, self.channel)

    async def _work(self, handler: Callable[[Message], Awaitable[Any]]) -> None:
        while (message := await self._next()) is not None:
            try:
                await handler(message)
            except Exception:
                logger.exception("CONSUMER(%s): the handler failed on message %s", self._name, message.id.decode())
                message.requeue()
            except BaseException:
                message.requeue(0, backoff=False)
                raise
            if not message.kept:
                message.finish()

    def _touch_all(self) -> None:
        """Automatic touch: nothing that we hold times out before the broker's own limit."""
        soonest = 60.0
        now = self._time()
        for connection in self._connections:
            timeout = connection.msg_timeout
            for message in connection.unanswered:
                if message.deadline - now < timeout / 2:
                    connection.touch(message)
            soonest = min(soonest, timeout / 4)
        self._touch_timer = self._clock.call_later(soonest, self._touch_all)

    # --- What connections tell ---------------------------------------------------------------------------------------

    def messages_came(self, connection: Connection, messages: list[Message]) -> None:
        self.stats.received += len(messages)
        if connection.counts_down:
            self.flow.received(connection, len(messages))
        self._queue.extend(messages)
        if self._closed and self._handler is None:
            self._changed.set()
        self._wake(len(messages))

    def response_came(self, connection: Connection, payload: bytes) -> None:
        if connection.drained:
            self._something_changed()

    def error_came(self, connection: Connection, error: ProtocolError) -> None:
        if not error.fatal:
            # Somebody answered too late; the broker had given the message away.
            logger.warning("CONSUMER(%s): %s: %s", self._name, connection.address, error)
        # A fatal one is reported with the connection's end.

    def heartbeat_came(self, connection: Connection) -> None:
        if self._on_heartbeat is not None:
            try:
                self._on_heartbeat(connection.address)
            except Exception:
                logger.exception("CONSUMER(%s): on_heartbeat failed", self._name)

    def finished(self, connection: Connection, message: Message) -> None:
        self.stats.finished += 1
        flow = self.flow
        if flow.level:
            flow.succeeded()
        self._answered(connection)

    def requeued(self, connection: Connection, message: Message, backoff: bool) -> None:
        self.stats.requeued += 1
        if backoff:
            self.flow.failed()
        else:
            self.flow.neither()
        self._answered(connection)

    def _answered(self, connection: Connection) -> None:
        if not connection.ready:
            self.flow.answered(connection)
            if self._stopping and not connection.unanswered:
                self._changed.set()

    def requeue_delay(self, message: Message) -> float:
        return min(self._default_requeue_delay * message.attempts, self._max_requeue_delay)

    def connection_lost(self, connection: Connection, reason: Exception) -> None:
        self._connections.discard(connection)
        self.flow.remove(connection)
        if self._queue:
            # Nobody could answer these any more.
            kept = [message for message in self._queue if message.source is not connection]
            self._queue.clear()
            self._queue.extend(kept)
        if not self._stopping:
            self._brokers.lost(connection, reason)
        self._something_changed()

    def _opened(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._stopping:
            connection.say_goodbye()
        else:
            self.flow.add(connection)
