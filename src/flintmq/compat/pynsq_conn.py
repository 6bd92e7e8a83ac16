"""pynsq's lower half: errors, messages, commands, and the connections AsyncConn and SyncConn.

Programs find all of it in ``flintmq.compat.pynsq``. An AsyncConn is our client's Connection with pynsq's events; it has
no socket and no handshake of its own. A SyncConn is a socket, for scripts that speak the protocol themselves. What is
made before there is an event loop waits here until `run` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any, Self

import msgspec

from flintmq import addresses, client
from flintmq.client.connection import Connection, Settings, connect
from flintmq.errors import ClosedError, FlintError, ProtocolError
from flintmq.protocol import wire

logger = logging.getLogger(__name__)

FRAME_TYPE_RESPONSE = wire.FRAME_RESPONSE
FRAME_TYPE_ERROR = wire.FRAME_ERROR
FRAME_TYPE_MESSAGE = wire.FRAME_MESSAGE

_number = Struct(">l")
#: A larger frame is not believed.
_LARGEST_FRAME = Settings.max_frame_size
#: What is answered one message at a time, and RDY: the connection must know of it.
_KNOWN_COMMAND = re.compile(rb"(FIN|REQ|RDY) (\S+)(?: (\d+))?\n")


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


# --- Events and messages --------------------------------------------------------------------------------------------


class Events:
    """Whoever is interested is called."""

    def __init__(self) -> None:
        self._listeners: defaultdict[str, list[Callable[..., object]]] = defaultdict(list)

    def on(self, name: str, callback: Callable[..., object]) -> None:
        self._listeners[name].append(callback)

    def off(self, name: str, callback: Callable[..., object]) -> None:
        self._listeners[name].remove(callback)

    def trigger(self, name: str, *args: Any, **kwargs: Any) -> None:
        for callback in list(self._listeners[name]):
            callback(*args, **kwargs)


class Message(Events):
    """A message that was received. Answering it twice is an AssertionError."""

    def __init__(self, id: bytes, body: bytes, timestamp: int, attempts: int) -> None:
        super().__init__()
        self.id = id
        self.body = body
        self.timestamp = timestamp
        self.attempts = attempts
        self._async_enabled = False
        self._has_responded = False

    @classmethod
    def of(cls, received: client.Message, requeue_delay: int) -> Message:
        """With our client's message behind it, which it answers."""
        message = cls(received.id, received.body, received.timestamp, received.attempts)

        def requeue(message: Message, backoff: bool = True, time_ms: int = -1, **_: Any) -> None:
            delay = time_ms / 1000 if time_ms >= 0 else requeue_delay * message.attempts
            received.requeue(delay, backoff=backoff)

        message.on("finish", lambda message: received.finish())
        message.on("touch", lambda message: received.touch())
        message.on("requeue", requeue)
        return message

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


# --- What runs ------------------------------------------------------------------------------------------------------


class Runner:
    """Something that lives on an event loop: started at once where one runs, else by `run` or Tornado's own loop."""

    def _start_soon(self) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            waiting.append(self)
            tornado = tornado_loop()
            if tornado is not None:
                tornado.add_callback(self._start_if_waiting)
        else:
            self._start()

    def _start_if_waiting(self) -> None:
        if self in waiting:
            waiting.remove(self)
            self._start()

    def _start(self) -> None:
        running.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._look_at_start)

    def _look_at_start(self, task: asyncio.Task[None]) -> None:
        """Say that it cannot work, and let `run` end."""
        if not task.cancelled() and (error := task.exception()):
            logger.error("[%s] cannot start: %s", getattr(self, "name", self), str(error) or type(error).__name__)
            for tell in on_failed_start:
                tell(error)

    async def _run(self) -> None:
        raise NotImplementedError

    async def _stop(self) -> None:
        raise NotImplementedError


def tornado_loop() -> Any:
    """Return Tornado's loop of this thread, or None in a program that does not use Tornado.

    There is one as soon as a program has asked for it, as for a PeriodicCallback. Like pynsq's, our readers and
    writers are put on it, whoever starts it.
    """
    module = sys.modules.get("tornado.ioloop")
    return None if module is None else module.IOLoop.current()


#: Made before there was an event loop.
waiting: list[Runner] = []
running: set[Runner] = set()
#: Called with what keeps a Reader or Writer from working at all.
on_failed_start: list[Callable[[BaseException], None]] = []


# --- Options of a connection ----------------------------------------------------------------------------------------

#: pynsq's keywords and defaults, in its order.
CONNECTION_DEFAULTS: dict[str, Any] = {
    "timeout": 1.0,
    "heartbeat_interval": 30,
    "requeue_delay": 90,
    "tls_v1": False,
    "tls_options": None,
    "snappy": False,
    "deflate": False,
    "deflate_level": 6,
    "user_agent": Settings.user_agent,
    "output_buffer_size": 16 * 1024,
    "output_buffer_timeout": 250,
    "sample_rate": 0,
    "auth_secret": None,
    "msg_timeout": None,
    "hostname": None,
}


def connection_options(given: dict[str, Any]) -> dict[str, Any]:
    """All of pynsq's keywords. A wrong one is an AssertionError."""
    unknown = given.keys() - CONNECTION_DEFAULTS.keys()
    assert not unknown, f"Invalid keyword argument(s): {sorted(unknown)}"
    options = {**CONNECTION_DEFAULTS, **given}
    assert isinstance(options["requeue_delay"], int) and options["requeue_delay"] >= 0
    return options


def connection_settings(options: dict[str, Any]) -> dict[str, Any]:
    """The same in our client's words."""
    return {
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


def join_address(host: str, port: int) -> str:
    assert isinstance(host, str)
    assert isinstance(port, int)
    return addresses.join(host, port)


class Peer:
    """What callbacks and hooks of a Reader or Writer are given for a connection."""

    def __init__(self, address: str) -> None:
        host, port, _ = addresses.split(address)
        self.id = address
        self.host = host
        self.port = port

    def __str__(self) -> str:
        return self.id


# --- Connections ----------------------------------------------------------------------------------------------------


class AsyncConn(Events, Runner):
    """One connection to an nsqd, which tells by events what happens: `connect`, `identify`, `identify_response`,
    `auth`, `auth_response`, `ready`, `message`, `response`, `heartbeat`, `error`, `close`, and for every answer to a
    message `resume`, `backoff` or `continue`. All are given ``conn``. Commands may be sent from `ready` on.
    """

    def __init__(self, host: str, port: int, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.host = host
        self.port = port
        self.id = join_address(host, port)
        options = connection_options({**dict(zip(CONNECTION_DEFAULTS, args, strict=False)), **kwargs})
        self._requeue_delay: int = options["requeue_delay"]
        self.state = "INIT"
        self.max_rdy_count = 2500
        self.last_recv_timestamp = self.last_msg_timestamp = time.time()
        self._settings = Settings(**connection_settings(options), connect=self._dial)
        self._connection: Connection | None = None
        #: The listeners know already what is wrong.
        self._has_told = False

    def __str__(self) -> str:
        return self.id

    def connected(self) -> bool:
        return self.state == "CONNECTED"

    def connecting(self) -> bool:
        return self.state == "CONNECTING"

    def closed(self) -> bool:
        return self.state in ("INIT", "DISCONNECTED")

    @property
    def in_flight(self) -> int:
        return 0 if self._connection is None else self._connection.in_flight

    @property
    def rdy(self) -> int:
        return 0 if self._connection is None else self._connection.ready

    last_rdy = rdy

    # Opening and closing.

    def connect(self) -> None:
        if self.closed():
            self.state = "CONNECTING"
            self._has_told = False
            self._start_soon()

    async def _run(self) -> None:
        try:
            connection = await Connection.open(self.id, self._settings, asyncio.get_running_loop(), self)
        except FlintError as exc:
            self._ended(exc)
            return
        self._connection = connection
        self.max_rdy_count = connection.max_ready
        if connection.features:
            self._tell("identify_response", data=connection.features)
        if connection.grant:
            self._tell("auth", data=self._settings.auth_secret)
            with contextlib.suppress(msgspec.MsgspecError):
                self._tell("auth_response", data=msgspec.json.decode(connection.grant))
        self._tell("ready")

    async def _dial(
        self, address: str, factory: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        opened = await connect(address, factory)
        self.state = "CONNECTED"
        self._tell("connect")
        self._tell("identify", data=self._settings.identify())
        return opened

    def close(self) -> None:
        """What was sent before still goes out; then comes `close`."""
        if not self.closed():
            self._closing = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        elif not self.closed():
            self._task.cancel()
            await asyncio.wait([self._task])
            self._ended(ClosedError(f"{self.id}: closed"))

    def _ended(self, reason: Exception) -> None:
        running.discard(self)
        self._connection = None
        self.state = "DISCONNECTED"
        if not self._has_told and not isinstance(reason, ClosedError):
            kind = IntegrityError if isinstance(reason, ProtocolError) else ConnectionClosedError
            self._tell("error", error=kind(str(reason)))
        self._tell("close")

    def _tell(self, name: str, **kwargs: Any) -> None:
        """A listener that fails must not end the connection."""
        try:
            self.trigger(name, conn=self, **kwargs)
        except Exception:
            logger.exception("[%s] a listener to %s failed", self.id, name)

    # Commands.

    def send(self, data: bytes) -> None:
        connection = self._connection
        if connection is None:
            raise SendError("not connected")
        known = _KNOWN_COMMAND.fullmatch(data)
        if known is None:
            connection.write(data)
            return
        name, what, number = known.groups()
        if name == b"RDY":
            # Before it whatever was sent before: a SUB, for one.
            connection.flush()
            connection.set_ready(int(what))
            return
        for message in connection.unanswered:
            if message.id == what:
                if name == b"FIN":
                    message.finish()
                else:
                    message.requeue(int(number or 0) / 1000)
                return
        connection.write(data)  # to be told by the broker what is wrong with it

    def send_rdy(self, value: int) -> bool:
        if self._connection is None:
            return False
        if value != self.rdy:
            self.send(ready(value))
        return True

    # What the connection tells.

    def _messages_came(self, connection: Connection, messages: list[client.Message]) -> None:
        self.last_recv_timestamp = self.last_msg_timestamp = time.time()
        for received in messages:
            self._tell("message", message=Message.of(received, self._requeue_delay))

    def _response_came(self, connection: Connection, payload: bytes) -> None:
        self.last_recv_timestamp = time.time()
        self._tell("response", data=payload)

    def _error_came(self, connection: Connection, error: ProtocolError) -> None:
        self.last_recv_timestamp = time.time()
        self._has_told = error.fatal
        self._tell("error", error=Error(str(error)))

    def _heartbeat_came(self, connection: Connection) -> None:
        self.last_recv_timestamp = time.time()
        self._tell("heartbeat")

    def _connection_ended(self, connection: Connection, reason: Exception) -> None:
        self._ended(reason)

    def _finished(self, connection: Connection, message: client.Message) -> None:
        self._tell("resume")

    def _requeued(self, connection: Connection, message: client.Message, backoff: bool) -> None:
        self._tell("backoff" if backoff else "continue")

    def _delay_of(self, message: client.Message) -> float:
        return float(self._requeue_delay * message.attempts)


class SyncConn:
    """A socket to an nsqd that blocks: `connect`, then `send` commands and `read_response` frame by frame."""

    def __init__(self, timeout: float = 1.0) -> None:
        self.timeout = timeout
        self.buffer = bytearray()
        self.s: socket.socket | None = None

    def connect(self, host: str, port: int) -> None:
        assert isinstance(host, str)
        assert isinstance(port, int)
        self.s = socket.create_connection((host, port), self.timeout)
        self.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.s.sendall(wire.MAGIC_V2)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read_response(self) -> bytes:
        """The next frame without its size, for `unpack_response`. TimeoutError if none comes in time."""
        self._fill(4)
        [size] = _number.unpack_from(self.buffer)
        if not 4 <= size <= _LARGEST_FRAME:
            raise IntegrityError(f"a frame of {size} bytes")
        self._fill(4 + size)
        frame = bytes(self.buffer[4 : 4 + size])
        del self.buffer[: 4 + size]
        return frame

    def close(self) -> None:
        if self.s is not None:
            self.s.close()
            self.s = None
        self.buffer.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _socket(self) -> socket.socket:
        if self.s is None:
            raise SendError("not connected")
        return self.s

    def _fill(self, size: int) -> None:
        """Until so much is there. What came stays if the rest does not, for the next try."""
        while (missing := size - len(self.buffer)) > 0:
            piece = self._socket.recv(max(missing, 4096))
            if not piece:
                raise ConnectionClosedError(f"the broker closed the connection: {missing} bytes are missing")
            self.buffer += piece


# --- The protocol ---------------------------------------------------------------------------------------------------


def unpack_response(data: bytes) -> tuple[int, bytes]:
    """The type and the payload of a frame without its size."""
    return _number.unpack_from(data)[0], data[4:]


def decode_message(data: bytes) -> Message:
    message = wire.decode_message(data)
    return Message(message.id, message.body, message.timestamp, message.attempts)


def identify(data: dict[str, Any]) -> bytes:
    return wire.encode_command(b"IDENTIFY", body=msgspec.json.encode(data))


def subscribe(topic: str | bytes, channel: str | bytes) -> bytes:
    assert valid_topic_name(topic)
    assert valid_channel_name(channel)
    return wire.encode_command(b"SUB", text(topic).encode(), text(channel).encode())


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


def pub(topic: str | bytes, data: bytes) -> bytes:
    return wire.encode_command(b"PUB", text(topic).encode(), body=data)


def mpub(topic: str | bytes, data: Iterable[bytes]) -> bytes:
    return wire.encode_mpub(text(topic).encode(), list(data))


def valid_topic_name(topic: str | bytes) -> bool:
    return wire.valid_name(text(topic))


def valid_channel_name(channel: str | bytes) -> bool:
    return wire.valid_name(text(channel))


def text(name: str | bytes) -> str:
    """A topic or channel, which pynsq takes both as text and as bytes."""
    assert isinstance(name, str | bytes), f"a topic must be str or bytes, not {type(name).__name__}"
    return name if isinstance(name, str) else name.decode(errors="replace")
