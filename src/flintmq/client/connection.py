"""One connection to an nsqd, seen from the client: handshake, frames in, commands out.

A Connection owns its socket, what it has been sent and not yet answered, and the commands of this loop turn, which go
out in one write. It answers heartbeats by itself, whatever its owner is busy with, and ends itself when the broker is
silent, stops reading or talks nonsense. What messages and answers mean is its owner's business; that a lost one is
replaced, a Keeper's (brokers.py). Time comes from a Clock; an event loop is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

import msgspec

import flintmq
from flintmq import kernel
from flintmq.addresses import split
from flintmq.client.clock import Clock, Timer, limit
from flintmq.errors import ClosedError, ConnectError, OptionError, ProtocolError, plain_reason
from flintmq.protocol import wire

if TYPE_CHECKING:
    import ssl

    # With a default, so that `Message` alone means one of bytes.
    from typing_extensions import TypeVar

    from flintmq.protocol.compression import Codec

    T = TypeVar("T", default=bytes)
else:
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["Connection", "Message", "Owner", "Settings", "addresses"]

#: What a broker answers during the handshake is small.
_HANDSHAKE_BYTES = 1 << 20
#: How long a polite goodbye may take before the socket is simply closed.
_GOODBYE_SECONDS = 5.0
#: A broker that sends so many times RDY is broken, and would fill our memory. More than once RDY is possible: what
#: timed out there and is still worked on here comes again. Small messages may be more, up to the second.
_SURPLUS = 10
_SMALL_SURPLUS = 1000
#: A frame may take longer than `read_timeout` if at least so many bytes of it come in a second.
_SLOWEST_FRAME = 1024
#: A longer delay is the same to any broker; a much longer one would overflow there, and be none.
_LONGEST_DELAY = 365 * 86400.0
#: Brokers before this version count RDY down with every message they send; since then it is a level.
_RDY_IS_A_LEVEL = (0, 3, 0)


#: Opens the transport for a protocol to an address: for tests without a network, proxies, in-process brokers.
Connect = Callable[[str, Callable[[], asyncio.Protocol]], Awaitable[tuple[asyncio.BaseTransport, asyncio.BaseProtocol]]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How connections are made, for producers and consumers alike. Times are seconds, sizes bytes."""

    #: Shown by the broker's statistics. Default: the host's short and full name.
    client_id: str = ""
    hostname: str = ""
    user_agent: str = f"flintmq/{flintmq.__version__}"
    #: For connecting, and once more for the handshake.
    dial_timeout: float = 5.0
    #: A connection on which nothing arrives for so long is dead. Heartbeats come more often.
    read_timeout: float = 60.0
    #: A broker that does not read for so long is dead.
    write_timeout: float = 10.0
    heartbeat_interval: float = 30.0
    #: How long the broker waits for an answer before somebody else gets the message. Default: as it is set there.
    msg_timeout: float | None = None
    #: What the broker may gather before it sends. Default: as it is set there.
    output_buffer_size: int | None = None
    output_buffer_timeout: float | None = None
    #: Deliver about this percentage of the messages; the others are lost for the channel.
    sample_rate: int = 0
    #: True for the system's certificates, or a context. Without TLS on the other side the connection fails.
    tls: bool | ssl.SSLContext = False
    #: The name in the broker's certificate. Default: the host of the address.
    tls_hostname: str | None = None
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = 6
    auth_secret: str | bytes | None = field(default=None, repr=False)
    topology_region: str = ""
    topology_zone: str = ""
    #: A frame larger than this is not believed.
    max_frame_size: int = 64 << 20
    #: The pause after the first failure to connect; it doubles up to the second.
    reconnect_delay: float = 0.25
    max_reconnect_delay: float = 15.0
    #: Opens transports in place of TCP and unix sockets.
    connect: Connect | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.heartbeat_interval > self.read_timeout:
            raise OptionError("heartbeat_interval must not be longer than read_timeout")
        if self.heartbeat_interval < 1:
            raise OptionError("heartbeat_interval must be at least 1 second")
        if self.msg_timeout is not None and self.msg_timeout < 1:
            raise OptionError("msg_timeout must be at least 1 second")
        if not 0 <= self.sample_rate <= 99:
            raise OptionError("sample_rate must be 0 to 99")
        if self.snappy and self.deflate:
            raise OptionError("snappy and deflate exclude each other")
        if not 1 <= self.deflate_level <= 9:
            raise OptionError("deflate_level must be 1 to 9")
        for name in ("dial_timeout", "read_timeout", "write_timeout", "reconnect_delay", "max_reconnect_delay"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} must be above 0")

    def identify(self) -> dict[str, Any]:
        hostname = self.hostname or socket.gethostname()
        fields: dict[str, Any] = {
            "client_id": self.client_id or hostname.partition(".")[0],
            "hostname": hostname,
            "user_agent": self.user_agent,
            "feature_negotiation": True,
            "heartbeat_interval": _milliseconds(self.heartbeat_interval),
            "sample_rate": self.sample_rate,
            "tls_v1": self.tls is not False,
            "snappy": self.snappy,
            "deflate": self.deflate,
            "deflate_level": self.deflate_level,
        }
        if self.msg_timeout is not None:
            fields["msg_timeout"] = _milliseconds(self.msg_timeout)
        if self.output_buffer_size is not None:
            fields["output_buffer_size"] = self.output_buffer_size
        if self.output_buffer_timeout is not None:
            fields["output_buffer_timeout"] = _milliseconds(self.output_buffer_timeout)
        if self.topology_region or self.topology_zone:
            fields |= {"topology_region": self.topology_region, "topology_zone": self.topology_zone}
        return fields


class Owner(Protocol):
    """What a connection tells; all of it in plain calls that must not wait."""

    def _messages_came(self, connection: Connection, messages: list[Message[Any]]) -> None: ...
    def _response_came(self, connection: Connection, payload: bytes) -> None: ...
    def _error_came(self, connection: Connection, error: ProtocolError) -> None: ...
    def _heartbeat_came(self, connection: Connection) -> None: ...
    def _connection_ended(self, connection: Connection, reason: Exception) -> None: ...
    def _finished(self, connection: Connection, message: Message[Any]) -> None: ...
    def _requeued(self, connection: Connection, message: Message[Any], backoff: bool) -> None: ...
    def _delay_of(self, message: Message[Any]) -> float: ...


class Message(kernel.Delivery, Generic[T]):
    """A message, ours until it is answered or its time is over.

    ``body`` and ``id`` are bytes, ``timestamp`` is the time of the publish in ns, ``attempts`` counts this delivery.
    ``value`` is what a consumer with a ``type`` has read from the body. Answers may be given from any thread; only the
    first counts. As a context manager (``with message:``) it is finished at the end of the block and requeued if the
    block raises.
    """

    __slots__ = ("_batch_end", "_value")

    source: Connection | None
    _value: T
    #: When the batch is to be handed out that it was put into; only there if nobody has got that batch.
    _batch_end: float

    def __init__(
        self,
        body: bytes = b"",
        *,
        id: bytes = b"0" * 16,
        timestamp: int = 0,
        attempts: int = 1,
        value: T | None = None,
    ) -> None:
        """For tests of handlers: a message that came from nowhere. Its answers are noted and go nowhere."""
        super().__init__(timestamp, attempts, id, body)
        if value is not None:
            self._value = value

    @property
    def value(self) -> T:
        """The body as the consumer's `type`; the body itself without one. DecodeError if it is none."""
        try:
            return self._value
        except AttributeError:
            decode = None if self.source is None else self.source.decode
            self._value = cast(T, self.body) if decode is None else decode(self.body)
            return self._value

    def finish(self) -> None:
        """It is done: the channel forgets it."""
        if not self.answered:
            self.answered = True
            if self.source is not None:
                self.source.finish(self)

    def requeue(self, delay: float | None = None, *, backoff: bool = True) -> None:
        """Give it back, to be delivered again after `delay` seconds; by default longer with every attempt.

        It is a failure and slows the consumer down, unless `backoff` is false.
        """
        if delay is not None and not delay >= 0:
            raise ValueError(f"a message cannot be requeued for {delay} seconds")
        if not self.answered:
            self.answered = True
            if self.source is not None:
                self.source.requeue(self, delay, backoff)

    def touch(self) -> None:
        """Ask for more time: its timeout starts anew."""
        if not self.answered and self.source is not None:
            self.source.touch(self)

    def answer_later(self) -> None:
        """The handler's return does not answer it: whoever keeps it will."""
        self.kept = True

    @property
    def address(self) -> str:
        """The nsqd it came from."""
        return "" if self.source is None else self.source.address

    def __enter__(self) -> Message[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            if not self.kept:
                self.finish()
        elif issubclass(kind, Exception):
            self.requeue()
        else:
            # Cancelled, or the program ends: no sign that the next message would fail.
            self.requeue(0, backoff=False)

    def __repr__(self) -> str:
        body = self.body if len(self.body) <= 40 else self.body[:40] + b"..."
        return f"<Message {self.id.decode(errors='replace')} attempts={self.attempts} {body!r}>"


class Connection(asyncio.Protocol):
    """A connection after its handshake. Made by `open`; `close` or the peer ends it, and the owner hears of it once.

    Size: one object is a protocol of asyncio, with both directions and what is under way in each; every read and every
    flush looks at most of it, so it is flat.
    """

    def __init__(self, address: str, settings: Settings, clock: Clock, owner: Owner) -> None:
        self.address = address
        #: What the broker answered to IDENTIFY; empty from very old ones.
        self.features: dict[str, Any] = {}
        #: What it answered to AUTH, where it asked for that.
        self.grant = b""
        #: The RDY that the broker was told last.
        self.ready = 0
        self.max_ready = 2500
        #: Which node of flintmq it is, whatever its address, and whether it stores once what is published under a key.
        self.node = ""
        self.knows_keys = False
        #: RDY is no level there: the broker counts it down with each message, and so do we.
        self.counts_down = False
        self.credit = 0
        #: How long the broker waits for an answer; without limit where it did not say.
        self.msg_timeout = float("inf")
        self.last_message = clock.time()
        #: Messages that came and were not answered.
        self.unanswered: set[Message[Any]] = set()
        #: Reads a body; None where nobody wants more than bytes.
        self.decode: Callable[[bytes], Any] | None = None
        #: Whoever waits for the end.
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: CLS was sent; the broker has confirmed it.
        self.closing = False
        self.drained = False
        #: Why it ended; and whether somebody waits for the next one, and had an answer on this one.
        self.reason: Exception | None = None
        self.is_wanted = False
        self._settings = settings
        self._clock = clock
        self._steady: Clock = getattr(clock, "steady", clock)
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._transport: asyncio.Transport | None = None
        self._codec: Codec | None = None
        # Handshake: one frame at a time, since what follows may be TLS or compressed.
        self._shaking = True
        self._inbox = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        # Afterwards.
        self._decoder: wire.MessageDecoder[Message[Any]] = wire.MessageDecoder(Message, self, settings.max_frame_size)
        # The commands of this turn. RDY is apart because it goes first: sent after a FIN, it would come too late for
        # the message that the FIN makes room for.
        self._out: list[bytes] = []
        self._fins: list[bytes] = []
        self._ready_out: int | None = None
        self._flush_due = False
        # Beyond this the broker does not keep to RDY: messages of any size, and those that are small together.
        self._most_unanswered = _SURPLUS
        self._most_small = _SMALL_SURPLUS
        # Silence.
        self._last_received = self._steady.time()
        # Bytes of a frame that is not whole yet, and when the one before it was.
        self._unfinished = 0
        self._last_frame = self._steady.time()
        self._read_timer: Timer | None = None
        # Bytes given to the transport, and how many of them had left it when that was looked at last.
        self._written = 0
        self._left = 0
        self._write_timer: Timer | None = None

    # --- Opening ----------------------------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls, address: str, settings: Settings, clock: Clock, owner: Owner, subscribe: tuple[str, str] | None = None
    ) -> Connection:
        """Connect, IDENTIFY, upgrade, AUTH, and SUB where asked. ConnectError says why not."""
        connection = cls(address, settings, clock, owner)
        try:
            async with limit(connection._steady, settings.dial_timeout):
                await (settings.connect or connect)(address, lambda: connection)
            async with limit(connection._steady, settings.dial_timeout):
                await connection._shake_hands(subscribe)
        except BaseException as exc:
            connection._abandon()
            # Whatever it is, also from a `connect` of the user's: it must not end the tries.
            if isinstance(exc, Exception) and not isinstance(exc, ConnectError):
                raise ConnectError(f"{address}: {plain_reason(exc)}") from exc
            raise
        connection._start()
        return connection

    async def _shake_hands(self, subscribe: tuple[str, str] | None) -> None:
        settings = self._settings
        about = settings.identify()
        if subscribe is None:
            # Publishes may have keys, where the broker answers that it knows them. Others ignore the question.
            about["flintmq"] = True
        self._send(wire.MAGIC_V2 + wire.encode_command(b"IDENTIFY", body=msgspec.json.encode(about)))
        answer = await self._answer()
        if answer != b"OK":  # said by brokers that know no features
            try:
                self.features = msgspec.json.decode(answer, type=dict[str, Any])
            except msgspec.MsgspecError as exc:
                raise ProtocolError("E_INVALID", "the answer to IDENTIFY is no JSON object") from exc
        self._read_features()
        if settings.tls is not False:
            await self._start_tls()
        if settings.snappy and self.features.get("snappy"):
            from flintmq.protocol.compression import Snappy

            await self._start_codec(Snappy())
        elif settings.deflate and self.features.get("deflate"):
            from flintmq.protocol.compression import Deflate

            level = self.features.get("deflate_level")
            await self._start_codec(Deflate(level if isinstance(level, int) and 1 <= level <= 9 else 6))
        if self.features.get("auth_required"):
            if not settings.auth_secret:
                raise ConnectError(f"{self.address}: the broker asks for AUTH, and no auth_secret is set")
            secret = settings.auth_secret
            self._send(wire.encode_command(b"AUTH", body=secret.encode() if isinstance(secret, str) else secret))
            self.grant = await self._answer()
        if subscribe is not None:
            topic, channel = subscribe
            self._send(wire.encode_command(b"SUB", topic.encode(), channel.encode()))
            await self._answer_ok("SUB")

    def _read_features(self) -> None:
        features = self.features
        version = str(features.get("version", "0"))
        self.counts_down = _numbers(version) < _RDY_IS_A_LEVEL
        most = features.get("max_rdy_count")
        if isinstance(most, int) and most > 0:
            self.max_ready = most
        timeout = features.get("msg_timeout")
        if isinstance(timeout, int) and timeout > 0:
            self.msg_timeout = timeout / 1000
        more = features.get("flintmq")
        if isinstance(more, dict):
            self.node = str(more.get("node", self.address))
            self.knows_keys = more.get("keys") is True

    async def _start_tls(self) -> None:
        import ssl

        # To go on in clear would betray whoever asked for TLS.
        if not self.features.get("tls_v1"):
            raise ConnectError(f"{self.address}: the broker does not offer TLS")
        if self._inbox:
            raise ProtocolError("E_INVALID", "something in clear between IDENTIFY and TLS")
        context = self._settings.tls
        if not isinstance(context, ssl.SSLContext):
            context = ssl.create_default_context()
        name = self._settings.tls_hostname
        if name is None:
            name = split(self.address).host
        assert self._transport is not None
        self._transport = await self._loop.start_tls(self._transport, self, context, server_hostname=name)
        await self._answer_ok("TLS")

    async def _start_codec(self, codec: Codec) -> None:
        # The broker's OK may have come together with its answer to IDENTIFY, and is compressed.
        early = bytes(self._inbox)
        self._inbox.clear()
        self._codec = codec
        if early:
            self.data_received(early)
        await self._answer_ok("compression")

    async def _answer(self) -> bytes:
        """The next response of the handshake."""
        while True:
            frame = wire.cut_frame(self._inbox, _HANDSHAKE_BYTES)
            if frame is None:
                if self.lost.done() or self.reason is not None:
                    raise self.reason or ConnectionError("the broker closed the connection")
                self._waiter = self._loop.create_future()
                await self._waiter
                continue
            kind, payload = frame
            if kind == wire.FRAME_ERROR:
                # In the broker's own words. What is no frame at all is a ProtocolError.
                raise ConnectError(f"{self.address}: {wire.decode_error(payload)}")
            if kind == wire.FRAME_MESSAGE:
                raise ProtocolError("E_INVALID", "a message before it was asked for")
            if payload == wire.HEARTBEAT:
                self._send(b"NOP\n")
                continue
            return payload

    async def _answer_ok(self, what: str) -> None:
        answer = await self._answer()
        if answer != b"OK":
            raise ProtocolError("E_INVALID", f"{answer[:40]!r} in answer to {what}")

    def _start(self) -> None:
        """The handshake is over: from here on the owner is told."""
        self._shaking = False
        self._last_frame = self._steady.time()
        self._read_timer = self._steady.call_later(self._settings.read_timeout, self._look_for_silence)
        if self._inbox:
            # In the next turn: the owner does not know us yet.
            self._loop.call_soon(self._receive, bytes(self._inbox))
            self._inbox.clear()
        if self.lost.done():
            self._loop.call_soon(self._tell_lost)

    def _abandon(self) -> None:
        if self.reason is None:
            self.reason = ClosedError(f"{self.address}: given up")
        if self._transport is not None:
            self._transport.abort()
        self._stop_timers()

    # --- What the event loop tells ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does it too; a `connect` of somebody else's may not.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._last_received = self._steady.time()
        if self._codec is None:
            self._receive(data)
            return
        try:
            for piece in self._codec.decompress(data):
                self._receive(piece)
        except ProtocolError as exc:
            self.fail(exc)

    def _receive(self, data: bytes) -> None:
        if self._shaking:
            self._inbox += data
            if len(self._inbox) > _HANDSHAKE_BYTES + 8:
                self.fail(ProtocolError("E_INVALID", "too much in answer to the handshake"))
            self._wake()
            return
        now = self._last_received if self._steady is self._clock else self._clock.time()
        try:
            messages, others = self._decoder.feed(data, now + self.msg_timeout)
        except ProtocolError as exc:
            self.fail(exc)
            return
        if messages or others:
            self._last_frame = self._last_received
            self._unfinished = 0
        else:
            self._unfinished += len(data)
        if messages:
            self.last_message = now
            self.unanswered.update(messages)
            if len(self.unanswered) > self._most_unanswered and self._is_too_much():
                self.fail(ProtocolError("E_INVALID", "many more messages than were asked for"))
                return
            self._owner._messages_came(self, messages)
        for kind, payload in others:
            if kind == wire.FRAME_ERROR:
                self._refused(wire.decode_error(payload))
            elif payload == wire.HEARTBEAT:
                self._send(b"NOP\n")
                self._owner._heartbeat_came(self)
            elif payload == b"CLOSE_WAIT" and self.closing:
                self.drained = True
                self._owner._response_came(self, payload)
            else:
                self._owner._response_came(self, payload)

    def _is_too_much(self) -> bool:
        """Return whether the broker has sent more than it may, without those that nobody answered in time."""
        if len(self.unanswered) > self._most_small:
            now = self._clock.time()
            self.unanswered = {message for message in self.unanswered if message.deadline > now}
            if len(self.unanswered) > self._most_small:
                return True
        if len(self.unanswered) <= self._most_unanswered:
            return False
        return sum(len(message.body) for message in self.unanswered) > self._settings.max_frame_size

    def _refused(self, error: ProtocolError) -> None:
        if self.reason is not None:
            return  # we are leaving already
        if not error.fatal:
            self._take_back(error)
        self._owner._error_came(self, error)
        if error.fatal:
            # The broker closes after it. So do we, should it not.
            self.fail(error)

    def _take_back(self, error: ProtocolError) -> None:
        """A command for a message failed, as in ``TOUCH <id> failed ID not in flight``: it is the broker's again."""
        words = error.text.encode().split()
        for message in self.unanswered:
            if message.id in words[1:2]:
                message.deadline = float("-inf")

    def pause_writing(self) -> None:
        self._left = self._bytes_left()
        self._write_timer = self._steady.call_later(self._settings.write_timeout, self._look_at_writes)

    def _look_at_writes(self) -> None:
        if self._bytes_left() == self._left:
            self.fail(ConnectError(f"{self.address}: the broker does not read"))
        else:
            # Slowly, but it goes on.
            self.pause_writing()

    def _bytes_left(self) -> int:
        assert self._transport is not None
        return self._written - self._transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def eof_received(self) -> None:
        """The broker has closed; so does the transport."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        if self.reason is None:
            why = plain_reason(exc) if exc else "the broker closed the connection"
            self.reason = ConnectError(f"{self.address}: {why}")
        if not self.lost.done():
            self.lost.set_result(None)
        self._wake()
        if not self._shaking:
            self._tell_lost()

    def _tell_lost(self) -> None:
        assert self.reason is not None
        self.ready = 0
        self.unanswered.clear()
        self._owner._connection_ended(self, self.reason)

    def _look_for_silence(self) -> None:
        now = self._steady.time()
        quiet = now - self._last_received
        waited = now - self._last_frame
        left = self._settings.read_timeout - quiet
        if left <= 0:
            self.fail(ConnectError(f"{self.address}: nothing came for {quiet:.0f} s"))
        elif waited >= self._settings.read_timeout and self._unfinished < waited * _SLOWEST_FRAME:
            # With a wrong length everything that follows looks like a piece of the same frame: heartbeats too.
            self.fail(ConnectError(f"{self.address}: no frame was whole for {waited:.0f} s"))
        else:
            self._read_timer = self._steady.call_later(left, self._look_for_silence)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop_timers(self) -> None:
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    # --- Commands ---------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.reason is None and not self.lost.done()

    @property
    def in_flight(self) -> int:
        return len(self.unanswered)

    def in_flight_at(self, now: float) -> int:
        """Return how many messages are ours at that time: the broker has taken back those whose time is over."""
        return sum(message.deadline > now for message in self.unanswered)

    def finish(self, message: Message[Any]) -> None:
        if get_ident() != self._thread:
            self._from_thread(self.finish, message)
            return
        try:
            self.unanswered.remove(message)
        except KeyError:
            return  # its connection is gone, and the broker gives it to somebody else
        # The answer first: whatever the owner makes of it, the broker is told.
        self._fins.append(message.id)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)
        self._owner._finished(self, message)

    def requeue(self, message: Message[Any], delay: float | None, backoff: bool) -> None:
        if get_ident() != self._thread:
            self._from_thread(self.requeue, message, delay, backoff)
            return
        if message not in self.unanswered:
            return
        self.unanswered.remove(message)
        if delay is None:
            delay = self._owner._delay_of(message)
        self.write(b"REQ %b %d\n" % (message.id, _milliseconds(min(delay, _LONGEST_DELAY))))
        self._owner._requeued(self, message, backoff)

    def touch(self, message: Message[Any]) -> None:
        if get_ident() != self._thread:
            self._from_thread(self.touch, message)
            return
        now = self._clock.time()
        # Too late, the broker has taken it back: it would only refuse.
        if message in self.unanswered and message.deadline > now:
            message.deadline = now + self.msg_timeout
            self.write(b"TOUCH %b\n" % message.id)

    def _from_thread(self, command: Callable[..., None], *args: object) -> None:
        # A loop that has ended has no connection left that could be told anything.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(command, *args)

    def set_ready(self, count: int) -> None:
        """Tell the broker how many messages may be under way to us at a time."""
        self.ready = self.credit = count
        self._most_unanswered = max(self._most_unanswered, _SURPLUS * count)
        self._most_small = max(self._most_small, self._most_unanswered)
        if not self.closing:
            self._ready_out = count
            self._schedule()

    def say_goodbye(self) -> None:
        """CLS: the broker sends what it has already sent, then CLOSE_WAIT, then nothing. Answers still count."""
        # A second CLS would be an error.
        if not self.closing and self.is_open:
            self.write(b"CLS\n")
            self.closing = True
            self.ready = 0

    def write(self, command: bytes) -> None:
        """Send with what else this turn brings."""
        if self._fins:
            self._out.append(wire.encode_fins(self._fins))
            self._fins = []
        self._out.append(command)
        self._schedule()

    def _schedule(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._flush_due = False
        if self._fins:
            self._out.append(wire.encode_fins(self._fins))
            self._fins = []
        if self._ready_out is not None:
            self._out.insert(0, b"RDY %d\n" % self._ready_out)
            self._ready_out = None
        if self._out:
            out, self._out = self._out, []
            if len(out) > 1 and self._codec is None and self.reason is None and self._transport is not None:
                self._written += sum(map(len, out))
                # Since Python 3.12 this sends the pieces as they are, without a copy of all of them.
                self._transport.writelines(out)
            else:
                self._send(b"".join(out))

    def _send(self, data: bytes) -> None:
        # After the goodbye nothing may be written, but heartbeats may still come.
        if self.reason is None and self._transport is not None and not self._transport.is_closing():
            if self._codec is not None:
                data = self._codec.compress(data)
            self._written += len(data)
            self._transport.write(data)

    def fail(self, reason: Exception) -> None:
        """End it at once, for this reason."""
        if self.reason is None:
            self.reason = reason
            if self._transport is not None:
                self._transport.abort()

    async def close(self) -> None:
        """End it without losing what was sent: with input unread, a plain close would cut off our last commands."""
        if self.reason is None:
            self.flush()
            self.reason = ClosedError(f"{self.address}: closed")
            assert self._transport is not None
            if self._transport.can_write_eof():
                with contextlib.suppress(OSError):  # reset by the peer, which the event loop is about to notice
                    self._transport.write_eof()
            else:
                self._transport.close()
        timer = self._steady.call_later(_GOODBYE_SECONDS, self._abandon)
        try:
            await asyncio.shield(self.lost)
        except asyncio.CancelledError:
            # Whoever waited has no more time: the socket must not stay open.
            self._abandon()
            raise
        finally:
            timer.cancel()


# --- Addresses ------------------------------------------------------------------------------------------------------


async def connect(
    address: str, factory: Callable[[], asyncio.Protocol]
) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
    loop = asyncio.get_running_loop()
    host, port, path = split(address)
    if path:
        return await loop.create_unix_connection(factory, path)
    return await loop.create_connection(factory, host, port)


def addresses(given: str | Iterable[str] | None) -> list[str]:
    """One address or several, each once, in the order given. OptionError for what is no text."""
    if given is None:
        return []
    several = given if isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray) else [given]
    found = list(dict.fromkeys(several))
    for address in found:
        if not isinstance(address, str):
            raise OptionError(f"{address!r} is not an address: it is a {type(address).__name__}, not a str")
    return found


# --- Small things ---------------------------------------------------------------------------------------------------


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of ``0.3.0-alpha``."""
    numbers: list[int] = []
    for word in version.replace("-", ".").split("."):
        if not word.isdecimal():
            break
        numbers.append(int(word))
    return tuple(numbers)
