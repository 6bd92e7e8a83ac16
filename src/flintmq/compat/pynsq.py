"""pynsq's Reader, Writer, Message and run, on our client: ``from flintmq.compat import pynsq as nsq``.

Names, arguments, defaults and what handlers may return are pynsq's. It runs on asyncio and needs no Tornado, but lives
with it, since Tornado runs on asyncio too. Handlers run in the event loop, as there: one that blocks holds up all.

Where pynsq would surprise, this does not: a Writer publishes once it is connected and does not fail before; the future
that `pub` returns is done when the broker has stored the message; `requeue(delay=0.5)` waits half a second; `mpub`
takes tuples; IPv6 addresses work; `run` ends with CLS and everything answered.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from struct import Struct
from typing import Any, ClassVar

import msgspec

from flintmq import client, wire
from flintmq.client.connection import split_address
from flintmq.errors import ConnectError, FlintError, PublishUnknownError

__all__ = [
    "FRAME_TYPE_ERROR",
    "FRAME_TYPE_MESSAGE",
    "FRAME_TYPE_RESPONSE",
    "BackoffTimer",
    "ConnectionClosedError",
    "Error",
    "IntegrityError",
    "Message",
    "Reader",
    "SendError",
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

log = logging.getLogger(__name__)

FRAME_TYPE_RESPONSE = wire.FRAME_RESPONSE
FRAME_TYPE_ERROR = wire.FRAME_ERROR
FRAME_TYPE_MESSAGE = wire.FRAME_MESSAGE

Callback = Callable[[Any, Any], object]


class Error(Exception):
    pass


class SendError(Error):
    def __init__(self, msg: str, error: Exception | None = None) -> None:
        self.msg = msg
        self.error = error
        super().__init__(msg, error)

    def __str__(self) -> str:
        return f"SendError: {self.msg} ({self.error})"


class ConnectionClosedError(Error):
    pass


class IntegrityError(Error):
    pass


# --- Messages -------------------------------------------------------------------------------------------------------


class Message:
    """A message that a Reader received. Answering it twice is an AssertionError."""

    def __init__(self, id: bytes, body: bytes, timestamp: int, attempts: int) -> None:
        self.id = id
        self.body = body
        self.timestamp = timestamp
        self.attempts = attempts
        self._async_enabled = False
        self._has_responded = False
        self._listeners: defaultdict[str, list[Callable[..., object]]] = defaultdict(list)

    def enable_async(self) -> None:
        """The handler's return does not answer it."""
        self._async_enabled = True

    def is_async(self) -> bool:
        return self._async_enabled

    def has_responded(self) -> bool:
        return self._has_responded

    def finish(self) -> None:
        self._respond()
        self.trigger("finish", message=self)

    def requeue(self, **kwargs: Any) -> None:
        """`delay` in seconds, or `time_ms`; -1 is a delay that grows with the attempts. `backoff=False`: no failure."""
        self._respond()
        delay = kwargs.get("delay", -1)
        if delay >= 0:
            kwargs["time_ms"] = round(delay * 1000)
        self.trigger("requeue", message=self, **kwargs)

    def touch(self) -> None:
        assert not self._has_responded
        self.trigger("touch", message=self)

    def _respond(self) -> None:
        assert not self._has_responded
        self._has_responded = True

    # Events.

    def on(self, name: str, callback: Callable[..., object]) -> None:
        self._listeners[name].append(callback)

    def off(self, name: str, callback: Callable[..., object]) -> None:
        self._listeners[name].remove(callback)

    def trigger(self, name: str, *args: Any, **kwargs: Any) -> None:
        for callback in list(self._listeners[name]):
            callback(*args, **kwargs)


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


# --- What runs ------------------------------------------------------------------------------------------------------

#: Readers and Writers that were made before there was an event loop; `run` starts them.
_waiting: list[_Client] = []
_running: set[_Client] = set()


class _Peer:
    """What callbacks and hooks are given for a connection."""

    def __init__(self, address: str) -> None:
        host, port = split_address(address)
        self.id = address
        self.host = host
        self.port = port

    def __str__(self) -> str:
        return self.id


class _Client:
    #: Keywords for connections, with pynsq's defaults.
    _connection: ClassVar[dict[str, Any]] = {
        "timeout": 1.0,
        "heartbeat_interval": 30,
        "requeue_delay": 90,
        "tls_v1": False,
        "tls_options": None,
        "snappy": False,
        "deflate": False,
        "deflate_level": 6,
        "user_agent": client.Settings.user_agent,
        "output_buffer_size": 16 * 1024,
        "output_buffer_timeout": 250,
        "sample_rate": 0,
        "auth_secret": None,
        "msg_timeout": None,
        "hostname": None,
    }

    def __init__(self, kwargs: dict[str, Any]) -> None:
        unknown = kwargs.keys() - self._connection.keys()
        assert not unknown, f"Invalid keyword argument(s): {sorted(unknown)}"
        self.conn_kwargs = kwargs
        options = {**self._connection, **kwargs}
        assert isinstance(options["requeue_delay"], int) and options["requeue_delay"] >= 0
        self.requeue_delay: int = options["requeue_delay"]
        self._settings: dict[str, Any] = {
            # pynsq gives a connection a second; ours has the handshake in it too.
            "dial_timeout": max(options["timeout"], 1.0) * 5,
            "heartbeat_interval": options["heartbeat_interval"],
            "read_timeout": 2 * options["heartbeat_interval"],
            "tls": _tls_context(options["tls_options"]) if options["tls_v1"] else False,
            "snappy": options["snappy"],
            "deflate": options["deflate"],
            "deflate_level": options["deflate_level"],
            "user_agent": options["user_agent"],
            # pynsq's 0 is the broker's -1: do not gather.
            "output_buffer_size": options["output_buffer_size"] or -1,
            "output_buffer_timeout": options["output_buffer_timeout"] / 1000 or -0.001,
            "sample_rate": options["sample_rate"],
            "auth_secret": options["auth_secret"],
            "msg_timeout": options["msg_timeout"],
            "hostname": options["hostname"] or socket.gethostname(),
        }
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            _waiting.append(self)
        else:
            self._start()

    def _start(self) -> None:
        _running.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        raise NotImplementedError

    async def _stop(self) -> None:
        raise NotImplementedError

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
        self._tasks: set[asyncio.Future[Any]] = set()
        super().__init__(kwargs)

    async def _run(self) -> None:
        assert self.message_handler, "you must specify the Reader's message_handler"
        self._consumer = client.Consumer(
            self.topic,
            self.channel,
            nsqd=self.nsqd_tcp_addresses,
            lookupd=self.lookupd_http_addresses,
            handler=self._receive,
            max_in_flight=self.max_in_flight,
            max_attempts=0,  # counted here
            on_heartbeat=self._on_heartbeat,
            **self._options,
            **self._settings,
        )
        await self._consumer.start()

    async def _stop(self) -> None:
        await self._task
        if self._consumer is not None:
            await self._consumer.close()

    def close(self) -> None:
        """Stop, in order; nothing more is handled once what is here was answered."""
        self._closing = asyncio.ensure_future(self._stop())
        _running.discard(self)

    # Handling.

    async def _receive(self, received: client.Message) -> None:
        received.answer_later()
        message = Message(received.id, received.body, received.timestamp, received.attempts)
        message.on("finish", lambda message: received.finish())
        message.on("touch", lambda message: received.touch())

        def requeue(message: Message, backoff: bool = True, time_ms: int = -1, **_: Any) -> None:
            delay = time_ms / 1000 if time_ms >= 0 else self.requeue_delay * message.attempts
            received.requeue(delay, backoff=backoff)

        message.on("requeue", requeue)
        try:
            self._handle(message)
        except Exception:
            log.exception("[%s] failed to handle message %r", self.name, message.id)

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
            log.exception("[%s] uncaught exception while handling message %r", self.name, message.id)
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
            log.error("[%s] uncaught exception while handling message %r", self.name, message.id, exc_info=error)
            is_good = False
        else:
            is_good = bool(task.result())
        if not message.has_responded():
            if is_good:
                message.finish()
            else:
                message.requeue()

    def _on_heartbeat(self, address: str) -> None:
        self.heartbeat(_Peer(address))

    # For users.

    def set_message_handler(self, message_handler: Callable[[Message], Any]) -> None:
        assert callable(message_handler), "message_handler must be callable"
        self.message_handler = message_handler

    def set_max_in_flight(self, max_in_flight: int) -> None:
        """0 pauses."""
        assert isinstance(max_in_flight, int)
        self.max_in_flight = max_in_flight
        if self._consumer is not None:
            self._consumer.max_in_flight = max_in_flight

    def is_starved(self) -> bool:
        return self._consumer is not None and self._consumer.is_starved

    # To be overridden.

    def process_message(self, message: Message) -> Any:
        assert self.message_handler is not None
        return self.message_handler(message)

    def giving_up(self, message: Message) -> None:
        log.warning("[%s] giving up on message %r after %d tries", self.name, message.id, message.attempts)

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
        self._connected: asyncio.Future[client.Producer] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(kwargs)

    def _start(self) -> None:
        self._connected = asyncio.get_running_loop().create_future()
        super()._start()

    async def _run(self) -> None:
        assert self._connected is not None
        while True:
            producer = client.Producer(
                self.nsqd_tcp_addresses, max_reconnect_delay=self.reconnect_interval, **self._settings
            )
            try:
                await producer.start()
            except ConnectError as exc:
                log.warning("[%s] %s", self.name, exc)
                await asyncio.sleep(min(1.0, self.reconnect_interval))
            else:
                self._producer = producer
                self._connected.set_result(producer)
                return

    async def _stop(self) -> None:
        if self._producer is None:
            self._task.cancel()
        else:
            await self._producer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Wait for what was published, then disconnect. pynsq has no such thing."""
        self._closing = asyncio.ensure_future(self._stop())
        _running.discard(self)

    def pub(self, topic: str, msg: bytes, callback: Callback | None = None) -> asyncio.Task[None]:
        return self._publish("pub", lambda producer: producer.publish(topic, bytes(msg)), callback)

    def mpub(self, topic: str, msg: bytes | Iterable[bytes], callback: Callback | None = None) -> asyncio.Task[None]:
        bodies = [msg] if isinstance(msg, bytes | bytearray | memoryview) else list(msg)
        return self._publish("mpub", lambda producer: producer.publish_many(topic, list(map(bytes, bodies))), callback)

    def dpub(self, topic: str, delay_ms: int, msg: bytes, callback: Callback | None = None) -> asyncio.Task[None]:
        assert isinstance(delay_ms, int), "dpub delay_ms must be an integer"
        return self._publish("dpub", lambda producer: producer.defer(topic, bytes(msg), delay_ms / 1000), callback)

    def _publish(
        self, command: str, publish: Callable[[client.Producer], Awaitable[None]], callback: Callback | None
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._published(command, publish, callback))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Whoever gave a callback is told by it and need not look at the future.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def _published(
        self, command: str, publish: Callable[[client.Producer], Awaitable[None]], callback: Callback | None
    ) -> None:
        assert self._connected is not None
        data: bytes | Error = b"OK"
        try:
            await publish(await asyncio.shield(self._connected))
        except PublishUnknownError as exc:
            data = ConnectionClosedError(str(exc))
        except ConnectError as exc:
            data = SendError("no open connections", exc)
        except FlintError as exc:
            data = Error(str(exc))
        if callback is not None:
            connections = self._producer.connections if self._producer else []
            callback(_Peer(connections[0]) if connections else None, data)
        elif isinstance(data, Error):
            log.error("[%s] failed to %s: %s", self.name, command, data)
        if isinstance(data, Error):
            raise data


def run() -> None:
    """Start every Reader and Writer there is, and run until SIGTERM or SIGINT; then end in order."""
    asyncio.run(_main())


async def _main() -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clients, _waiting[:] = list(_waiting), []
    for each in clients:
        each._start()
    await stop.wait()
    log.info("stopping")
    await asyncio.gather(*(each._stop() for each in list(_running)))
    _running.clear()


# --- The protocol ---------------------------------------------------------------------------------------------------

_number = Struct(">l")


def unpack_response(data: bytes) -> tuple[int, bytes]:
    """The type and the payload of a frame without its size."""
    return _number.unpack_from(data)[0], data[4:]


def decode_message(data: bytes) -> Message:
    message = wire.decode_message(data)
    return Message(message.id, message.body, message.timestamp, message.attempts)


def identify(data: dict[str, Any]) -> bytes:
    return wire.encode_command(b"IDENTIFY", body=msgspec.json.encode(data))


def subscribe(topic: str, channel: str) -> bytes:
    assert valid_topic_name(topic)
    assert valid_channel_name(channel)
    return wire.encode_command(b"SUB", topic.encode(), channel.encode())


def ready(count: int) -> bytes:
    assert isinstance(count, int) and count >= 0
    return wire.encode_command(b"RDY", b"%d" % count)


def finish(id: bytes) -> bytes:
    return wire.encode_command(b"FIN", id)


def requeue(id: bytes, time_ms: int = 0) -> bytes:
    assert isinstance(time_ms, int) and time_ms >= 0
    return wire.encode_command(b"REQ", id, b"%d" % time_ms)


def touch(id: bytes) -> bytes:
    return wire.encode_command(b"TOUCH", id)


def nop() -> bytes:
    return wire.encode_command(b"NOP")


def pub(topic: str, data: bytes) -> bytes:
    return wire.encode_command(b"PUB", topic.encode(), body=data)


def mpub(topic: str, data: Iterable[bytes]) -> bytes:
    return wire.encode_mpub(topic.encode(), list(data))


def valid_topic_name(topic: str) -> bool:
    return wire.valid_name(topic)


def valid_channel_name(channel: str) -> bool:
    return wire.valid_name(channel)


# --- Small things ---------------------------------------------------------------------------------------------------


def _listed(given: str | Iterable[str] | None) -> list[str]:
    if given is None:
        return []
    return [given] if isinstance(given, str) else list(given)


def _two_slopes(longest: float) -> Callable[[int], float]:
    def interval(level: int) -> float:
        timer = BackoffTimer(0, longest)
        return min(level * timer.short_unit, timer.max_short_timer) + min(level * timer.long_unit, timer.max_long_timer)

    return interval


def _tls_context(options: dict[str, Any] | None) -> Any:
    """From the keywords of the `ssl.wrap_socket` of old."""
    import ssl

    options = options or {}
    context = ssl.create_default_context(cafile=options.get("ca_certs"))
    if options.get("cert_reqs", ssl.CERT_REQUIRED) == ssl.CERT_NONE:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if options.get("certfile"):
        context.load_cert_chain(options["certfile"], options.get("keyfile"))
    return context
