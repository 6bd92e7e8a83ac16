"""pynsq's names on our client: ``from flintmq.compat import pynsq as nsq``.

Names, arguments, defaults and what handlers may return are pynsq's. It runs on asyncio and needs no Tornado, but lives
with it, since Tornado runs on asyncio too. Handlers run in the event loop, as there: one that blocks holds up all.
Readers and Writers are here; messages, commands and single connections are in ``pynsq_conn``.

Where pynsq would surprise, this does not: a Writer publishes once it is connected and does not fail before; the future
that `pub` returns is done when the broker has stored the message; `requeue(delay=0.5)` waits half a second; `mpub`
takes tuples; IPv6 addresses work; `disabled` is heeded at any time; `run` ends with CLS and everything answered.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import warnings
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from flintmq import client
from flintmq.compat.pynsq_conn import (
    FRAME_TYPE_ERROR,
    FRAME_TYPE_MESSAGE,
    FRAME_TYPE_RESPONSE,
    AsyncConn,
    ConnectionClosedError,
    Error,
    IntegrityError,
    Message,
    Peer,
    Runner,
    SendError,
    SyncConn,
    connection_options,
    connection_settings,
    decode_message,
    finish,
    identify,
    join_address,
    mpub,
    nop,
    on_failed_start,
    pub,
    ready,
    requeue,
    running,
    subscribe,
    text,
    tornado_loop,
    touch,
    unpack_response,
    valid_channel_name,
    valid_topic_name,
    waiting,
)
from flintmq.errors import ConnectError, FlintError, PublishUnknownError

__all__ = [
    "FRAME_TYPE_ERROR",
    "FRAME_TYPE_MESSAGE",
    "FRAME_TYPE_RESPONSE",
    "AsyncConn",
    "BackoffTimer",
    "ConnectionClosedError",
    "Error",
    "IntegrityError",
    "LegacyReader",
    "Message",
    "Reader",
    "SendError",
    "SyncConn",
    "Writer",
    "decode_message",
    "finish",
    "identify",
    "mpub",
    "nop",
    "pub",
    "ready",
    "requeue",
    "run",
    "subscribe",
    "touch",
    "unpack_response",
    "valid_channel_name",
    "valid_topic_name",
]

logger = logging.getLogger(__name__)

#: How often `Reader.disabled` is asked.
_DISABLED_POLL_SECONDS = 5.0
#: Bytes of publishes that may wait while a Writer has no connection, and what each takes besides its messages.
_WAITING_BYTES = 64 << 20
_PUBLISH_BYTES = 2048

Callback = Callable[[Any, Any], object]


class BackoffTimer:
    """Two straight slopes: a steep one over the first failures, a flat one over the next few hundred."""

    def __init__(
        self,
        min_interval: float,
        max_interval: float,
        ratio: float = 0.25,
        short_length: int = 10,
        long_length: int = 250,
    ) -> None:
        self.min_interval = float(min_interval)
        self.max_interval = float(max_interval)
        span = self.max_interval - self.min_interval
        self.max_short_timer = span * ratio
        self.max_long_timer = span * (1 - ratio)
        self.short_unit = self.max_short_timer / short_length
        self.long_unit = self.max_long_timer / long_length
        self._short = self._long = 0.0

    def success(self) -> None:
        self._short = max(self._short - self.short_unit, 0.0)
        self._long = max(self._long - self.long_unit, 0.0)

    def failure(self) -> None:
        self._short = min(self._short + self.short_unit, self.max_short_timer)
        self._long = min(self._long + self.long_unit, self.max_long_timer)

    def get_interval(self) -> float:
        return self.min_interval + self._short + self._long


# --- Readers and Writers --------------------------------------------------------------------------------------------


class _Client(Runner):
    def __init__(self, kwargs: dict[str, Any]) -> None:
        options = connection_options(kwargs)
        self.conn_kwargs = kwargs
        self.requeue_delay: int = options["requeue_delay"]
        self._settings = connection_settings(options)
        self._start_soon()

    @property
    def _client(self) -> client.Consumer | client.Producer | None:
        raise NotImplementedError

    @property
    def conns(self) -> dict[str, Peer]:
        """The connections there are, by address."""
        return {address: Peer(address) for address in (self._client.connections if self._client else [])}

    def close(self) -> None:
        """Stop, in order, with everything answered that is under way."""
        self._closing = asyncio.ensure_future(self._stop())
        running.discard(self)

    def heartbeat(self, conn: Any) -> None:
        """Called when a heartbeat came; to be overridden."""


class Reader(_Client):
    """Calls `message_handler` for each message of a channel.

    It returns True to finish the message and False to requeue it, or is a coroutine that returns so, or calls
    `message.enable_async()` and answers later.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        message_handler: Callable[[Message], Any] | None = None,
        name: str | None = None,
        nsqd_tcp_addresses: str | Iterable[str] | None = None,
        lookupd_http_addresses: str | Iterable[str] | None = None,
        max_tries: int = 5,
        max_in_flight: int = 1,
        lookupd_poll_interval: int = 60,
        low_rdy_idle_timeout: float = 10,
        max_backoff_duration: float = 128,
        lookupd_poll_jitter: float = 0.3,
        lookupd_connect_timeout: int = 1,
        lookupd_request_timeout: int = 2,
        **kwargs: Any,
    ) -> None:
        assert isinstance(topic, str) and topic
        assert isinstance(channel, str) and channel
        assert isinstance(max_in_flight, int) and max_in_flight > 0
        assert isinstance(max_backoff_duration, int | float) and max_backoff_duration > 0
        assert isinstance(lookupd_poll_interval, int)
        assert isinstance(lookupd_poll_jitter, float) and 0 <= lookupd_poll_jitter <= 1
        self.topic = topic
        self.channel = channel
        self.name = name or f"{topic}:{channel}"
        self.nsqd_tcp_addresses = _listed(nsqd_tcp_addresses)
        self.lookupd_http_addresses = _listed(lookupd_http_addresses)
        assert self.nsqd_tcp_addresses or self.lookupd_http_addresses
        self.max_tries = max_tries
        self.max_in_flight = max_in_flight
        self.message_handler: Callable[[Message], Any] | None = None
        if message_handler:
            self.set_message_handler(message_handler)
        self._options: dict[str, Any] = {
            "lookupd_poll_interval": lookupd_poll_interval,
            "lookupd_poll_jitter": lookupd_poll_jitter,
            "lookupd_timeout": lookupd_connect_timeout + lookupd_request_timeout,
            "low_rdy_idle_timeout": low_rdy_idle_timeout,
            "max_backoff_duration": max_backoff_duration,
            "backoff_strategy": _two_slopes(max_backoff_duration),
        }
        self._consumer: client.Consumer | None = None
        self._is_disabled = False
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Future[Any]] = set()
        super().__init__(kwargs)

    @property
    def _client(self) -> client.Consumer | None:
        return self._consumer

    async def _run(self) -> None:
        assert self.message_handler, "you must specify the Reader's message_handler"
        self._look_if_disabled()
        self._consumer = client.Consumer(
            self.topic,
            self.channel,
            nsqd=self.nsqd_tcp_addresses,
            lookupd=self.lookupd_http_addresses,
            handler=self._receive,
            max_in_flight=self._allowed_in_flight,
            max_attempts=0,  # counted here
            on_heartbeat=self._on_heartbeat,
            **self._options,
            **self._settings,
        )
        await self._consumer.start()
        self._watch = asyncio.get_running_loop().create_task(self._watch_disabled())

    async def _stop(self) -> None:
        # Why it could not start was said before.
        await asyncio.wait([self._task])
        if self._watch is not None:
            self._watch.cancel()
        if self._consumer is not None:
            await self._consumer.close()

    # Handling.

    async def _receive(self, received: client.Message) -> None:
        received.answer_later()
        message = Message.of(received, self.requeue_delay)
        try:
            self._handle(message)
        except Exception:
            logger.exception("[%s] failed to handle message %r", self.name, message.id)

    def _handle(self, message: Message) -> None:
        result: Any = False
        try:
            if 0 < self.max_tries < message.attempts:
                self.giving_up(message)
                message.finish()
                return
            if not self.validate_message(self.preprocess_message(message)):
                message.finish()
                return
            result = self.process_message(message)
        except Exception:
            logger.exception("[%s] uncaught exception while handling message %r", self.name, message.id)
            if not message.has_responded():
                message.requeue()
            return
        if inspect.isawaitable(result):
            message.enable_async()
            task = asyncio.ensure_future(result)
            # The event loop itself would let it go.
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._answer(message, task))
        elif not message.is_async() and not message.has_responded():
            assert result is not None, "ambiguous return value for synchronous mode"
            if result:
                message.finish()
            else:
                message.requeue()

    def _answer(self, message: Message, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            is_good = False
        elif error := task.exception():
            logger.error("[%s] uncaught exception while handling message %r", self.name, message.id, exc_info=error)
            is_good = False
        else:
            is_good = bool(task.result())
        if not message.has_responded():
            if is_good:
                message.finish()
            else:
                message.requeue()

    async def _on_heartbeat(self, address: str) -> None:
        self.heartbeat(Peer(address))

    # For users.

    def set_message_handler(self, message_handler: Callable[[Message], Any]) -> None:
        assert callable(message_handler), "message_handler must be callable"
        self.message_handler = message_handler

    def set_max_in_flight(self, max_in_flight: int) -> None:
        """0 pauses."""
        assert isinstance(max_in_flight, int)
        self.max_in_flight = max_in_flight
        self._apply_max_in_flight()

    def is_starved(self) -> bool:
        return self._consumer is not None and self._consumer.is_starved

    def connect_to_nsqd(self, host: str, port: int) -> Peer | None:
        """One more broker, which is dialled until the end. None if it is one of ours already."""
        address = join_address(host, port)
        if address in self.nsqd_tcp_addresses or address in self.conns:
            return None
        self.nsqd_tcp_addresses.append(address)
        if self._consumer is not None:
            self._consumer.add_nsqd(address)
        return Peer(address)

    def query_lookupd(self) -> asyncio.Future[None]:
        """Ask the lookupds now. It need not be awaited."""
        assert self.lookupd_http_addresses
        task = asyncio.ensure_future(self._query_lookupd())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _query_lookupd(self) -> None:
        await asyncio.shield(self._task)
        if self._consumer is not None:
            await self._consumer.look()

    # Disabled or not.

    @property
    def _allowed_in_flight(self) -> int:
        return 0 if self._is_disabled else self.max_in_flight

    def _apply_max_in_flight(self) -> None:
        if self._consumer is not None:
            self._consumer.max_in_flight = self._allowed_in_flight

    def _look_if_disabled(self) -> None:
        try:
            is_disabled = bool(self.disabled())
        except Exception:
            logger.exception("[%s] disabled() failed", self.name)
            return
        if is_disabled != self._is_disabled:
            logger.info("[%s] %s", self.name, "disabled" if is_disabled else "enabled")
            self._is_disabled = is_disabled
            self._apply_max_in_flight()

    async def _watch_disabled(self) -> None:
        while True:
            await asyncio.sleep(_DISABLED_POLL_SECONDS)
            self._look_if_disabled()

    # To be overridden.

    def disabled(self) -> bool:
        """Should nothing be received for now? Asked at the start and every few seconds."""
        return False

    def process_message(self, message: Message) -> Any:
        assert self.message_handler is not None
        return self.message_handler(message)

    def giving_up(self, message: Message) -> None:
        logger.warning("[%s] giving up on message %r after %d tries", self.name, message.id, message.attempts)

    def validate_message(self, message: Message) -> bool:
        return True

    def preprocess_message(self, message: Message) -> Message:
        return message


class Writer(_Client):
    """Publishes to one of several brokers. Callbacks are given a connection, and b"OK" or an Error."""

    def __init__(
        self,
        nsqd_tcp_addresses: str | Iterable[str],
        reconnect_interval: float = 15.0,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.nsqd_tcp_addresses = _listed(nsqd_tcp_addresses)
        assert self.nsqd_tcp_addresses
        assert isinstance(reconnect_interval, int | float)
        self.reconnect_interval = reconnect_interval
        self.name = name or self.nsqd_tcp_addresses[0]
        self._producer: client.Producer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting_bytes = 0
        super().__init__(kwargs)

    @property
    def _client(self) -> client.Producer | None:
        return self._producer

    def _start(self) -> None:
        self._producer = client.Producer(
            self.nsqd_tcp_addresses, max_reconnect_delay=self.reconnect_interval, **self._settings
        )
        self._producer._begin()
        super()._start()

    async def _run(self) -> None:
        """Wait for the first connection, which is dialled more often than later ones."""
        assert self._producer is not None
        said = ""
        while True:
            try:
                await self._producer._brokers.first(self._producer._timeout)
                return
            except ConnectError as exc:
                if str(exc) != said:
                    said = str(exc)
                    logger.warning("[%s] %s", self.name, said)
                await asyncio.sleep(min(1.0, self.reconnect_interval))

    async def _stop(self) -> None:
        if self._producer is not None:
            closing = asyncio.ensure_future(self._producer.close())
            if not self._task.done():
                # It was never connected, so that nothing is to be waited for.
                self._task.cancel()
                await asyncio.sleep(0)
                self._producer._abandon()
            await closing
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def connect_to_nsqd(self, host: str, port: int) -> Peer | None:
        """Publish to one more broker too. None if it is one of ours already."""
        address = join_address(host, port)
        if address in self.nsqd_tcp_addresses:
            return None
        self.nsqd_tcp_addresses.append(address)
        if self._producer is not None:
            self._producer.add_nsqd(address)
        return Peer(address)

    def pub(self, topic: str | bytes, msg: bytes, callback: Callback | None = None) -> asyncio.Task[None]:
        name, [body] = text(topic), _bodies([msg])
        return self._publish("pub", len(body), lambda producer: producer.publish(name, body), callback)

    def mpub(
        self, topic: str | bytes, msg: bytes | Iterable[bytes], callback: Callback | None = None
    ) -> asyncio.Task[None]:
        name, bodies = text(topic), _bodies([msg] if isinstance(msg, bytes | bytearray | memoryview) else msg)
        size = sum(map(len, bodies))
        return self._publish("mpub", size, lambda producer: producer.publish_many(name, bodies), callback)

    def dpub(
        self, topic: str | bytes, delay_ms: int, msg: bytes, callback: Callback | None = None
    ) -> asyncio.Task[None]:
        assert isinstance(delay_ms, int), "dpub delay_ms must be an integer"
        name, [body] = text(topic), _bodies([msg])
        return self._publish("dpub", len(body), lambda producer: producer.defer(name, body, delay_ms / 1000), callback)

    def _publish(
        self, command: str, size: int, publish: Callable[[client.Producer], Awaitable[None]], callback: Callback | None
    ) -> asyncio.Task[None]:
        self._start_if_waiting()
        assert self._producer is not None
        is_too_much = self._waiting_bytes > _WAITING_BYTES and not self._producer.connections
        task = asyncio.get_running_loop().create_task(
            self._published(command, _refuse_waiting if is_too_much else publish, callback)
        )
        size += _PUBLISH_BYTES
        self._waiting_bytes += size
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._forget(task, size))
        return task

    def _forget(self, task: asyncio.Task[None], size: int) -> None:
        self._tasks.discard(task)
        self._waiting_bytes -= size
        # Whoever gave a callback is told by it and need not look at the future.
        if not task.cancelled():
            task.exception()

    async def _published(
        self, command: str, publish: Callable[[client.Producer], Awaitable[None]], callback: Callback | None
    ) -> None:
        assert self._producer is not None
        data: bytes | Error = b"OK"
        try:
            await publish(self._producer)
        except PublishUnknownError as exc:
            data = ConnectionClosedError(str(exc))
        except ConnectError as exc:
            data = SendError("no open connections", exc)
        except FlintError as exc:
            data = Error(str(exc))
        except Exception as exc:
            logger.exception("[%s] failed to %s", self.name, command)
            data = Error(repr(exc))
        if callback is not None:
            connections = self._producer.connections
            try:
                callback(Peer(connections[0]) if connections else None, data)
            except Exception:
                logger.exception("[%s] the callback of %s failed", self.name, command)
        elif isinstance(data, Error):
            logger.error("[%s] failed to %s: %s", self.name, command, data)
        if isinstance(data, Error):
            raise data


async def _refuse_waiting(producer: client.Producer) -> None:
    raise ConnectError(f"more than {_WAITING_BYTES >> 20} MiB wait for a connection")


class LegacyReader:
    """A Reader for each task: what pynsq had before version 0.5. With several, each has a channel of its own."""

    _positional = (
        "all_tasks",
        "topic",
        "channel",
        "nsqd_tcp_addresses",
        "lookupd_http_addresses",
        "max_tries",
        "max_in_flight",
        "requeue_delay",
        "lookupd_poll_interval",
        "low_rdy_idle_timeout",
        "heartbeat_interval",
        "max_backoff_duration",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "LegacyReader is for programs from before pynsq 0.5: use a Reader for each handler",
            DeprecationWarning,
            stacklevel=2,
        )
        options = {**dict(zip(self._positional, args, strict=False)), **kwargs}
        all_tasks = options.pop("all_tasks")
        channel = options.pop("channel")
        assert isinstance(all_tasks, dict)
        for name, handler in all_tasks.items():
            assert callable(handler), f"key {name} must have a callable value"
        self.readers = [
            Reader(channel=f"{channel}.{name}" if len(all_tasks) > 1 else channel, message_handler=handler, **options)
            for name, handler in all_tasks.items()
        ]


def run() -> None:
    """Start every Reader and Writer there is, and run until SIGTERM or SIGINT; then end in order.

    In a program that uses Tornado it is Tornado's loop that runs, with everything else that was put on it.
    """
    tornado = tornado_loop()
    if tornado is None:
        asyncio.run(_main())
    else:
        tornado.run_sync(_main)


async def _main() -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    hurry = asyncio.Event()
    failures: list[BaseException] = []

    def signalled() -> None:
        # The second time nothing is waited for any more.
        (hurry if stop.is_set() else stop).set()

    def failed(error: BaseException) -> None:
        failures.append(error)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    on_failed_start.append(failed)
    try:
        for each in list(waiting):
            each._start_if_waiting()
        await stop.wait()
        logger.info("stopping")
        await _stop_all(hurry)
    finally:
        on_failed_start.remove(failed)
        running.clear()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    if failures:
        raise failures[0]


async def _stop_all(hurry: asyncio.Event) -> None:
    """Stop in order; at once when there is no more time."""
    stopping = {asyncio.ensure_future(each._stop()) for each in list(running)}
    hurried = asyncio.ensure_future(hurry.wait())
    waiting_for: set[asyncio.Future[Any]] = set(stopping)
    while waiting_for and not hurry.is_set():
        done, _ = await asyncio.wait({*waiting_for, hurried}, return_when=asyncio.FIRST_COMPLETED)
        waiting_for -= done
    for task in [*waiting_for, hurried]:
        task.cancel()
    for result in await asyncio.gather(*stopping, return_exceptions=True):
        if isinstance(result, Exception):
            logger.error("stopping failed", exc_info=result)


# --- Small things ---------------------------------------------------------------------------------------------------


def _listed(given: str | Iterable[str] | None) -> list[str]:
    if given is None:
        return []
    return [given] if isinstance(given, str) else list(given)


def _bodies(given: Iterable[Any]) -> list[bytes]:
    bodies = list(given)
    for body in bodies:
        assert isinstance(body, bytes | bytearray | memoryview), f"a message must be bytes, not {type(body).__name__}"
    return list(map(bytes, bodies))


def _two_slopes(longest: float) -> Callable[[int], float]:
    def interval(level: int) -> float:
        timer = BackoffTimer(0, longest)
        return min(level * timer.short_unit, timer.max_short_timer) + min(level * timer.long_unit, timer.max_long_timer)

    return interval
