"""The producer: publishes to one of several brokers, many calls in one command, and tells what came of each.

A Producer owns the publishes that are not answered yet. Calls made in the same loop turn (or within `linger`) to one
topic go out as one MPUB; commands follow each other without waiting. Each call ends in exactly one way: stored (the
broker said OK), refused (PublishError), never sent (ConnectError), or unknown (PublishUnknownError).

A broker closes the connection after an error, and works on one command after the other. So what was sent behind a
refused one was never looked at and is sent again. Where a connection is lost with no word, nobody knows; but what has a
key can be sent again to the same broker, which stores it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from threading import get_ident
from types import TracebackType
from typing import Any, Unpack, cast

from flintmq import kernel
from flintmq.addresses import split
from flintmq.client import tracing
from flintmq.client.brokers import Brokers
from flintmq.client.callbacks import Calls
from flintmq.client.clock import Clock, Timer
from flintmq.client.codecs import Body, encode
from flintmq.client.connection import Connection, Message, addresses
from flintmq.client.options import ProducerOptions, ProducerSettings, parse
from flintmq.cluster.lookupds import Answer, Lookupds, Node
from flintmq.errors import (
    ClosedError,
    ConnectError,
    KeysUnsupportedError,
    OptionError,
    ProtocolError,
    PublishError,
    PublishUnknownError,
)
from flintmq.protocol import wire

__all__ = ["Producer"]

#: What goes into one MPUB of gathered calls: well within a broker's default limit of 5 MiB.
_BATCH_MESSAGES = 1000
_BATCH_BYTES = 1 << 20
#: A larger message goes alone: should it be over the broker's limit, no other is refused with it.
_ALONE_BYTES = 64 << 10

#: Refused for what it is: no other broker would take it, nor this one later.
_HOPELESS = frozenset({"E_BAD_TOPIC", "E_BAD_MESSAGE", "E_BAD_BODY", "E_INVALID", "E_KEY_CONTENT"})
#: Refused as a whole because of one message in it.
_ONE_IS_BAD = frozenset({"E_BAD_MESSAGE", "E_BAD_BODY"})
#: The broker cannot take it now; another may.
_TRY_ANOTHER = frozenset({"E_PUB_FAILED", "E_DPUB_FAILED"})
#: The same of an MPUB. NSQ's own nsqd may have stored a part of it by then; ours stores all of it or nothing.
_NONE_OR_SOME = "E_MPUB_FAILED"
#: ``E_BAD_MESSAGE MPUB message too big 2000 > 1024``, with the limit at the end.
_TOO_BIG = re.compile(r"message too big(?: [0-9]+ > ([0-9]{1,18}))?")


class _Command:
    """One PUB, MPUB or DPUB, and who waits for its answer."""

    __slots__ = (
        "bodies",
        "deadline",
        "delay",
        "futures",
        "home",
        "in_doubt",
        "key",
        "refusal",
        "refused_by",
        "sent_at",
        "settled",
        "size",
        "timer",
        "topic",
    )

    def __init__(self, topic: str, delay: int | None = None, key: str = "") -> None:
        self.topic = topic
        self.delay = delay
        #: With a key each broker stores it once, so once it may be stored it goes to no other node than that one.
        self.key = key
        self.home = ""
        self.bodies: list[bytes] = []
        # One for each message, or one for all where they were published together.
        self.futures: list[asyncio.Future[None]] = []
        self.size = 0
        #: When it was given to a connection; None while it waits for one.
        self.sent_at: float | None = None
        #: Sent before, on a connection that was lost: whatever comes of it now, it may be stored.
        self.in_doubt = False
        self.settled = False
        self.timer: Timer | None = None
        self.deadline = 0.0
        self.refused_by: set[str] = set()
        #: What the last broker said that could not take it.
        self.refusal: PublishError | None = None

    def encode(self) -> bytes:
        topic = self.topic.encode()
        key = self.key.encode()
        more = (key,) if key else ()
        if self.delay is not None:
            return wire.encode_command(b"DPUB", topic, b"%d" % self.delay, *more, body=self.bodies[0])
        if len(self.bodies) == 1:
            return wire.encode_command(b"PUB", topic, *more, body=self.bodies[0])
        return wire.encode_mpub(topic, self.bodies, key)

    @property
    def is_divisible(self) -> bool:
        """Return whether each message has somebody of its own who waits for it."""
        return len(self.futures) == len(self.bodies)

    def forget_cancelled(self) -> bool:
        """Leave out what nobody waits for any more. Whether anything is left."""
        if self.is_divisible:
            pairs = [pair for pair in zip(self.bodies, self.futures, strict=True) if not pair[1].done()]
            self.bodies = [body for body, _ in pairs]
            self.futures = [future for _, future in pairs]
            return bool(pairs)
        return not self.futures[0].done()

    def settle(self, error: Exception | None = None) -> None:
        self.settled = True
        if self.timer is not None:
            self.timer.cancel()
        self.bodies = []
        for future in self.futures:
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)


def _size_limit(error: ProtocolError, refused: _Command) -> int | None:
    """How large a message may be, if a broker has refused one for its size; None for any other reason."""
    match = _TOO_BIG.search(error.text) if error.code == "E_BAD_MESSAGE" else None
    if match is None:
        return None
    if match[1]:
        return int(match[1])
    # Not said: no larger one would be taken either.
    return len(refused.bodies[0]) - 1 if len(refused.bodies) == 1 else None


class _Outlet:
    """A connection and the commands it was sent, in the order of their answers to come."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.unanswered: deque[_Command] = deque()
        self.bytes = 0
        #: The broker has refused a command: what is behind it was never looked at.
        self.refused = False


class Producer:
    """Publishes messages; a publish has returned when a broker has stored it.

    async with Producer("127.0.0.1:4150") as producer:
        await producer.publish("orders", b"one")
        await producer.publish_many("orders", [b"two", b"three"])
        await producer.defer("orders", b"later", delay=30)
    """

    def __init__(self, nsqd: str | Sequence[str] | None = None, **options: Unpack[ProducerOptions]) -> None:
        """Make a producer; `start` or ``async with`` connects it.

        With several brokers each command goes to the one with the least to do. All options are described in
        `flintmq.client.options.ProducerOptions`.
        """
        self._fixed = addresses(nsqd)
        for address in self._fixed:
            split(address)
        self._options, self._settings = parse(ProducerSettings, options)
        own = self._options
        looked_up = addresses(own.lookupd)
        if not self._fixed and not looked_up:
            raise OptionError("a producer needs nsqd or lookupd addresses")
        self._lookupds = Lookupds(looked_up, timeout=own.lookupd_timeout, token=own.lookupd_token, tls=own.lookupd_tls)
        self._calls = Calls("PRODUCER")
        self._linger = own.linger
        self._timeout = own.timeout
        self._retry_unknown = own.retry_unknown
        self._max_pending_bytes = own.max_pending_bytes
        self._spans = tracing.publish_spans()
        self._started = False
        self._closed = False
        self._closing: asyncio.Future[None] | None = None
        self._abandoned = False
        self._outlets: dict[Connection, _Outlet] = {}
        # Calls that may still be joined, by topic; commands that no broker could be given yet.
        self._gathering: dict[str, _Command] = {}
        self._gather_timer: Timer | None = None
        self._backlog: deque[_Command] = deque()
        # Everything that is not settled.
        self._pending_bytes = 0
        self._pending = 0
        self._waiting_for_room: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    # --- Start and stop ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Producer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect. ConnectError if no broker can be reached within `timeout`.

        A broker that is not up yet is waited for; one that is lost later is dialled again by itself.
        """
        self._begin()
        try:
            await self._brokers.first(self._timeout)
        except BaseException:
            await self.close()
            raise

    def _begin(self) -> None:
        """Dial, and wait for nobody: a publish waits for a broker itself."""
        if self._started:
            raise ClosedError("a producer runs once")
        self._started = True
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        own = self._options
        self._clock: Clock = own.clock or self._loop
        self._brokers = Brokers(
            "PRODUCER",
            self,
            self._settings,
            self._clock,
            fixed=self._fixed,
            look=self._look if self._lookupds.urls else None,
            poll_interval=own.lookupd_poll_interval,
            poll_jitter=own.lookupd_poll_jitter,
            on_open=self._opened,
            on_error=lambda address, error: self._calls.tell("on_error", own.on_error, address, error),
        )

    async def _look(self, found: Callable[[list[Node]], None]) -> Answer[list[Node]]:
        return await self._lookupds.nodes(found)

    async def flush(self) -> None:
        """Wait until every publish so far has ended, well or not."""
        if self._started:
            self._check_loop()
        self._send_gathered()
        await self._idle.wait()

    async def close(self) -> None:
        """Wait for what was published (each has its timeout), then disconnect. A second call waits for the first."""
        if not self._started:
            return
        if self._closing is not None and self._closing.done():
            return
        self._check_loop()
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self._loop.create_future()
        try:
            await self._close()
        finally:
            self._closing.set_result(None)

    async def _close(self) -> None:
        self._closed = True
        self._make_room()
        try:
            await self.flush()
            await self._brokers.stop()
            await asyncio.gather(*(connection.close() for connection in list(self._outlets)))
        finally:
            # Cancelled or not, nothing stays behind; and here nothing waits for a broker any more.
            self._abandon()
            await self._lookupds.close()
            await self._calls.close()

    def _abandon(self) -> None:
        """End what is left at once: after a `close` that was cancelled."""
        self._abandoned = True
        self._brokers.abandon()
        for command in [*self._gathering.values(), *self._backlog]:
            self._settle(command, ClosedError("the producer was closed"))
            self._release(command)
        self._gathering.clear()
        self._backlog.clear()
        for connection in list(self._outlets):
            connection.fail(ClosedError(f"{connection.address}: closed"))
        self._make_room()

    @property
    def connections(self) -> list[str]:
        """The brokers that we are connected to."""
        return sorted(connection.address for connection in self._outlets)

    def add_nsqd(self, address: str) -> None:
        """Publish to one more broker too. It is dialled until the end, as if it had been named at the start."""
        split(address)
        if not self._started:
            self._fixed = addresses([*self._fixed, address])
        else:
            self._brokers.add(address)

    # --- Publishing --------------------------------------------------------------------------------------------------

    async def publish(self, topic: str, body: Body, *, key: str | None = None) -> None:
        """Publish one message. Return when a broker has stored it.

        A struct, a dataclass, a pydantic model, a dict or a list is published as JSON, or as the `codec` has it.

        With a `key` a broker stores it once, however often it is published under this key. Where the connection is
        lost it is sent again to the same broker. KeysUnsupportedError if no broker knows keys.
        """
        if type(body) is not bytes:
            body = encode(self._options.codec, body)
        self._check(topic, body)
        if key is not None:
            await self._publish_command(topic, [body], len(body), None, key)
            return
        if self._pending_bytes >= self._max_pending_bytes or self._waiting_for_room:
            await self._room()
        if self._spans is not None:
            with self._spans(topic, 1):
                await self._gather(topic, body)
        else:
            await self._gather(topic, body)

    async def publish_many(self, topic: str, bodies: Sequence[Body], *, key: str | None = None) -> None:
        """Publish messages together, in one command: all are stored or none. One `key` stands for all of them."""
        if isinstance(bodies, bytes | bytearray | memoryview | str | Mapping):
            raise TypeError(f"publish_many takes a list of messages, not {type(bodies).__name__}")
        if not bodies:
            return
        encoded = cast(list[bytes], list(bodies))
        size = kernel.total_size(encoded)
        if size < 0:
            # Not all are bytes, or one is empty: the first of those stands for all.
            encoded = [body if type(body) is bytes else encode(self._options.codec, body) for body in bodies]
            size = sum(map(len, encoded))
            self._check(topic, next((body for body in encoded if not body), encoded[0]))
        else:
            self._check(topic, encoded[0])
        await self._publish_command(topic, encoded, size, None, key)

    async def defer(self, topic: str, body: Body, delay: float, *, key: str | None = None) -> None:
        """Publish one message that is delivered only after `delay` seconds."""
        if type(body) is not bytes:
            body = encode(self._options.codec, body)
        self._check(topic, body)
        # The broker would close the connection, and others' publishes with it.
        if not 0 <= delay <= self._options.max_defer:
            raise OptionError(
                f"a message can be deferred for 0 to {self._options.max_defer:g} seconds (max_defer), not {delay}"
            )
        await self._publish_command(topic, [body], len(body), round(delay * 1000), key)

    def _check(self, topic: str, body: bytes) -> None:
        if not self._started or self._closed:
            raise ClosedError("the producer is not open: async with Producer(…) as producer")
        if not body:
            raise OptionError("a message cannot be empty")
        if topic in self._gathering and get_ident() == self._thread:
            return  # all was checked for the first of this turn
        self._check_loop()
        if not isinstance(topic, str):
            raise TypeError(f"a topic is a str, not {type(topic).__name__}")
        if not wire.valid_name(topic):
            raise OptionError(f'"{topic}" is not a topic name')

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the producer belongs to another event loop: for several threads there is flintmq.sync")

    def _gather(self, topic: str, body: bytes) -> asyncio.Future[None]:
        command = self._gathering.get(topic)
        size = len(body)
        is_large = size > _ALONE_BYTES
        if command is None or is_large or len(command.bodies) >= _BATCH_MESSAGES or command.size + size > _BATCH_BYTES:
            if command is not None:
                # Before it, also if it is a large one that goes alone: order is kept.
                self._send(self._gathering.pop(topic))
            command = _Command(topic)
            self._pending += 1
            self._idle.clear()
            if not is_large:
                self._gathering[topic] = command
                if self._gather_timer is None:
                    if self._linger:
                        self._gather_timer = self._clock.call_later(self._linger, self._send_gathered)
                    else:
                        self._gather_timer = self._loop.call_soon(self._send_gathered)
        future = self._loop.create_future()
        command.bodies.append(body)
        command.futures.append(future)
        command.size += size
        self._pending_bytes += size
        if is_large:
            self._send(command)
        return future

    def _send_gathered(self) -> None:
        if self._gather_timer is not None:
            self._gather_timer.cancel()
            self._gather_timer = None
        commands = list(self._gathering.values())
        self._gathering.clear()
        for command in commands:
            self._send(command)

    async def _publish_command(
        self, topic: str, bodies: list[bytes], size: int, delay: int | None, key: str | None
    ) -> None:
        if key is not None and not isinstance(key, str):
            raise TypeError(f"a key is a str, not {type(key).__name__}")
        if key is not None and not wire.valid_key(key):
            raise OptionError(f"{key!r} is not a key: 1 to 128 printable ASCII characters without space")
        if self._pending_bytes >= self._max_pending_bytes or self._waiting_for_room:
            await self._room()
        if self._spans is not None:
            with self._spans(topic, len(bodies)):
                await self._queue_command(topic, bodies, size, delay, key)
        else:
            await self._queue_command(topic, bodies, size, delay, key)

    def _queue_command(
        self, topic: str, bodies: list[bytes], size: int, delay: int | None, key: str | None
    ) -> asyncio.Future[None]:
        if topic in self._gathering:
            # What was published before goes before.
            self._send(self._gathering.pop(topic))
        command = _Command(topic, delay, key or "")
        command.bodies = bodies
        command.size = size
        future = self._loop.create_future()
        command.futures.append(future)
        self._pending += 1
        self._idle.clear()
        self._pending_bytes += command.size
        self._send(command)
        return future

    async def _room(self) -> None:
        """Too much is unanswered: wait, or a slow broker would fill our memory. ConnectError after `timeout`."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting_for_room.append(waiter)
        timer = self._clock.call_later(self._timeout, self._no_room, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):
                self._waiting_for_room.remove(waiter)
            # The next may have room too; or this one was cancelled when its turn had come.
            self._loop.call_soon(self._make_room)
        if self._closed:
            raise ClosedError("the producer was closed")

    def _no_room(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            text = (
                f"not sent within {self._timeout:g} s: {self._pending_bytes} bytes are unanswered (max_pending_bytes)"
            )
            waiter.set_exception(ConnectError(text))
            self._fail_silent()

    def _make_room(self) -> None:
        """Let the first go on of those who wait for room: one at a time, and in their order."""
        if self._waiting_for_room and (self._closed or self._pending_bytes < self._max_pending_bytes):
            waiter = self._waiting_for_room[0]
            if not waiter.done():
                waiter.set_result(None)

    # --- Commands out, answers in ------------------------------------------------------------------------------------

    def _send(self, command: _Command) -> None:
        now = self._clock.time()
        if command.timer is None:
            left = self._timeout if not command.deadline else max(0.0, command.deadline - now)
            command.deadline = now + left
            command.timer = self._clock.call_later(left, self._time_over, command)
        size = command.size
        if not command.forget_cancelled():
            self._settle(command)
            self._release(command)
            return
        try:
            outlet = self._pick_for_key(command) if command.key else self._pick(command)
        except KeysUnsupportedError as exc:
            self._settle(command, exc)
            self._release(command)
            return
        if outlet is None:
            command.sent_at = None
            self._backlog.append(command)
            return
        try:
            data = command.encode()
        except Exception as exc:
            # It is not sent, so it must not have a place among those that are answered.
            self._settle(command, exc)
            self._release(command)
            return
        command.sent_at = now
        outlet.unanswered.append(command)
        outlet.bytes += size
        outlet.connection.write(data)

    def _pick(self, command: _Command) -> _Outlet | None:
        """The open connection with the least to do."""
        best: _Outlet | None = None
        for outlet in self._outlets.values():
            if outlet.refused or outlet.connection.address in command.refused_by or not outlet.connection.is_open:
                continue
            if best is None or outlet.bytes < best.bytes:
                best = outlet
        return best

    def _pick_for_key(self, command: _Command) -> _Outlet | None:
        """The connection that the key decides on, so that a repeat goes to the same broker. None: not connected."""
        outlets = [
            outlet
            for outlet in self._outlets.values()
            if not outlet.refused
            and outlet.connection.is_open
            and outlet.connection.address not in command.refused_by
            and command.home in ("", outlet.connection.node)
        ]
        knowing = [outlet for outlet in outlets if outlet.connection.knows_keys]
        if outlets and not knowing:
            names = ", ".join(outlet.connection.address for outlet in outlets)
            raise KeysUnsupportedError(f"no keys are known at {names}: only a flintmq nsqd knows them")

        def weight(outlet: _Outlet) -> bytes:
            return blake2b(f"{outlet.connection.node} {command.key}".encode()).digest()

        return max(knowing, key=weight, default=None)

    def _settle(self, command: _Command, error: Exception | None = None) -> None:
        if command.settled:
            return  # its time was over before
        if error is not None and command.in_doubt and not isinstance(error, PublishUnknownError):
            error = PublishUnknownError(f"sent before on a connection that was lost: it may be stored; now: {error}")
        command.settle(error)
        self._pending -= 1
        if not self._pending:
            self._idle.set()

    def _release(self, command: _Command) -> None:
        """Nothing of it is in memory any more, neither here nor on the way out."""
        self._pending_bytes -= command.size
        command.size = 0
        if self._waiting_for_room:
            self._make_room()

    def _time_over(self, command: _Command) -> None:
        if command.sent_at is None:
            with contextlib.suppress(ValueError):
                self._backlog.remove(command)
            text = f"not sent within {self._timeout:g} s: {self._brokers.why_none()}"
            self._settle(command, command.refusal or ConnectError(text))
            self._release(command)
            return
        # Its place in the queue of answers stays: the answer may still come, and belongs to nobody else. Its bytes
        # count until then, or a broker that reads and never answers would be given more and more.
        text = f"no answer within {self._timeout:g} s: it may or may not be stored"
        self._settle(command, PublishUnknownError(text))
        self._fail_silent()

    def _fail_silent(self) -> None:
        """End connections on which publishes are not answered, although heartbeats may come."""
        longest = max(self._timeout, self._settings.read_timeout)
        for outlet in list(self._outlets.values()):
            oldest = outlet.unanswered[0].sent_at if outlet.unanswered else None
            if oldest is not None and self._clock.time() - oldest >= longest:
                address = outlet.connection.address
                outlet.connection.fail(ConnectError(f"{address}: no publish was answered for {longest:g} s"))

    def _response_came(self, connection: Connection, payload: bytes) -> None:
        outlet = self._outlets[connection]
        if payload != b"OK" or not outlet.unanswered:
            connection.fail(ProtocolError("E_INVALID", f"{payload[:40]!r} where no such answer was due"))
            return
        command = outlet.unanswered.popleft()
        outlet.bytes -= command.size
        self._settle(command)
        self._release(command)

    def _error_came(self, connection: Connection, error: ProtocolError) -> None:
        outlet = self._outlets[connection]
        if not outlet.unanswered or not error.fatal:
            return  # it says nothing of a publish; a fatal one is reported with the connection's end
        outlet.refused = True
        refusal = PublishError(str(error), code=error.code, retriable=error.code not in _HOPELESS)
        limit = _size_limit(error, outlet.unanswered[0])
        if limit is not None and self._leave_out_large(outlet, limit, refusal):
            return
        command = outlet.unanswered.popleft()
        outlet.bytes -= command.size
        if command.settled:
            self._release(command)
            return
        if error.code in _ONE_IS_BAD and len(command.futures) > 1:
            self._take_apart(command, outlet)
            return
        is_busy = error.code in _TRY_ANOTHER or error.code == _NONE_OR_SOME
        if command.key and is_busy:
            # It also says that nothing is stored there under the key.
            command.in_doubt = False
            command.home = ""
        is_none = error.code in _TRY_ANOTHER or bool(command.key or connection.node)
        self._refuse(command, connection, refusal, may_try_another=is_busy and is_none)
        if is_busy:
            self._refuse_topic(outlet, command.topic, refusal)

    def _refuse(
        self, command: _Command, connection: Connection, refusal: PublishError, *, may_try_another: bool
    ) -> None:
        command.refused_by.add(connection.address)
        command.refusal = refusal
        others = {outlet.connection.address for outlet in self._outlets.values()}
        if may_try_another and others - command.refused_by:
            self._send(command)
        else:
            self._settle(command, refusal)
            self._release(command)

    def _refuse_topic(self, outlet: _Outlet, topic: str, refusal: PublishError) -> None:
        """The broker takes nothing for a topic now: commands behind the refused one need not be refused one by one.

        Each refusal costs a connection. They were not looked at, so that another broker may take them.
        """
        kept: deque[_Command] = deque()
        behind, outlet.unanswered = outlet.unanswered, kept
        for command in behind:
            if command.topic != topic or command.settled or command.key or command.in_doubt:
                kept.append(command)
            else:
                outlet.bytes -= command.size
                self._refuse(command, outlet.connection, refusal, may_try_another=True)

    def _leave_out_large(self, outlet: _Outlet, limit: int, refusal: PublishError) -> bool:
        """The broker has said how large a message may be: refuse all larger ones that were sent to it.

        The others go out again when the connection has ended. False if no message of the refused command is too large.
        """
        first = outlet.unanswered[0]
        if not first.settled and not any(len(body) > limit for body in first.bodies):
            return False
        for command in outlet.unanswered:
            if command.settled or not any(len(body) > limit for body in command.bodies):
                continue
            refused = command
            if command.is_divisible:
                pairs = list(zip(command.bodies, command.futures, strict=True))
                refused = _Command(command.topic)
                refused.in_doubt = command.in_doubt
                refused.futures = [future for body, future in pairs if len(body) > limit]
                refused.size = sum(len(body) for body, _ in pairs if len(body) > limit)
                command.bodies = [body for body, _ in pairs if len(body) <= limit]
                command.futures = [future for body, future in pairs if len(body) <= limit]
                command.size -= refused.size
                self._pending += 1
            outlet.bytes -= refused.size
            self._settle(refused, refusal)
            self._release(refused)
            if not command.futures:
                self._settle(command)
        return True

    def _take_apart(self, command: _Command, outlet: _Outlet) -> None:
        """One of the calls that we joined was refused, and all others with it: send each alone to find out which.

        They go out when the connection has ended, with what was sent behind them, and before it.
        """
        singles: list[_Command] = []
        for body, future in zip(command.bodies, command.futures, strict=True):
            single = _Command(command.topic)
            single.bodies = [body]
            single.futures = [future]
            single.size = len(body)
            single.in_doubt = command.in_doubt
            single.deadline = command.deadline
            single.sent_at = command.sent_at
            self._pending += 1
            self._pending_bytes += single.size
            outlet.bytes += single.size
            singles.append(single)
        outlet.unanswered.extendleft(reversed(singles))
        command.futures = []
        self._settle(command)
        self._release(command)

    def _connection_ended(self, connection: Connection, reason: Exception) -> None:
        outlet = self._outlets.pop(connection)
        again: list[_Command] = []
        for command in outlet.unanswered:
            if command.settled:
                self._release(command)
            elif self._abandoned:
                self._settle(command, PublishUnknownError("the producer was closed: it may or may not be stored"))
                self._release(command)
            elif command.key and not outlet.refused:
                command.in_doubt = True
                command.home = connection.node
                again.append(command)
            elif outlet.refused or self._retry_unknown:
                command.in_doubt |= not outlet.refused
                again.append(command)
            else:
                text = f"the connection was lost before the answer came ({reason}): it may or may not be stored"
                self._settle(command, PublishUnknownError(text))
                self._release(command)
        if again:
            # Before what was published meanwhile.
            self._backlog.extendleft(reversed(again))
            self._send_backlog()
        # Each refusal brings us on. Without a pause it is only tried while somebody waits for that.
        connection.is_wanted = outlet.refused and bool(self._backlog or self._gathering or self._waiting_for_room)
        if not self._closed:
            self._brokers.lost(connection, reason)

    def _send_backlog(self) -> None:
        # One by one: those that still find no broker go to the end, which keeps their order.
        for _ in range(len(self._backlog)):
            self._send(self._backlog.popleft())

    def _opened(self, connection: Connection) -> None:
        self._outlets[connection] = _Outlet(connection)
        self._send_backlog()

    def _heartbeat_came(self, connection: Connection) -> None: ...

    # --- What a producer is never sent -------------------------------------------------------------------------------

    def _messages_came(self, connection: Connection, messages: list[Message[Any]]) -> None:
        connection.fail(ProtocolError("E_INVALID", "a message to a producer"))

    def _finished(self, connection: Connection, message: Message[Any]) -> None: ...

    def _requeued(self, connection: Connection, message: Message[Any], backoff: bool) -> None: ...

    def _delay_of(self, message: Message[Any]) -> float:
        return 0.0
