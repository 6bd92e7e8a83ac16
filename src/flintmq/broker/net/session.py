"""One client connection: bytes in, commands run, frames out.

A Session owns its socket, its RDY count, what it was sent and has not answered, and the order of the protocol
(IDENTIFY before SUB, answers in the order of their commands). It does not know how messages are stored; it asks its
topic and its channel. Nothing that a client sends may raise out of here, block the loop or cost more than the limits.

What arrives lands in a buffer that all sessions share; only what is left of an unfinished command is kept by the
session. A command whose body is not all there is looked at again when more arrives, so checks come before any effect.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, Any, cast

import msgspec

from flintmq.broker.delivery.commit import SLICED_FROM, Commit, slices
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.net.sockets import SocketTransport
from flintmq.broker.storage.log import NO_BLOCK
from flintmq.errors import AuthError, ProtocolError, PublishError
from flintmq.kernel import FULL, NOTHING, OTHER, SCAN_BAD, SCAN_MORE, Intake, Scan
from flintmq.protocol.compression import Codec, Deflate, Snappy, Stack
from flintmq.protocol.wire import (
    CLOSE_WAIT_FRAME,
    FRAME_ERROR,
    FRAME_RESPONSE,
    HEARTBEAT_FRAME,
    MAGIC_V2,
    NSQ_VERSION,
    OK_FRAME,
    decode_identify,
    encode_frame,
    go_quote,
    parse_base10,
    valid_key,
    valid_name,
)

if TYPE_CHECKING:
    import ssl

    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.net.auth import Grant
    from flintmq.broker.net.tls import Encryption

__all__ = ["Session"]

logger = logging.getLogger(__name__)

_i32 = Struct(">i")
_MS = 1_000_000

#: A command line, its newline included.
LONGEST_LINE = 16_384
#: How long a connection may stay silent before it says which protocol it speaks.
MAGIC_TIMEOUT = 5.0
#: After an error frame the peer gets this long to read it before the connection goes.
LINGER = 1.0
#: A TLS handshake may take this long.
HANDSHAKE_TIMEOUT = 5.0
#: What one loop turn unpacks of a compressed or encrypted stream: it may swell a thousandfold.
UNPACK_AT_ONCE = 256 << 10
#: NSQ's client timeout is a fixed minute; heartbeats come at half of it.
DEFAULT_HEARTBEAT = 30_000
#: A batch whose body size lies may be twice the limit, and what one read brings.
RECEIVE_SLACK = 256 << 10

#: So many publishers that were heard of in the last turn are looked at again without being asked to.
MOST_REGULARS = 16

INIT, SUBSCRIBED, CLOSING = 0, 3, 4

#: A command's body is not all there; or it has to wait for something else and is run again then.
_MORE, _AGAIN = -1, -2

_IDENTIFY_FIELDS: dict[str, tuple[str, Any]] = {
    "client_id": ("string", ""),
    "hostname": ("string", ""),
    "user_agent": ("string", ""),
    "feature_negotiation": ("bool", False),
    "heartbeat_interval": ("int", 0),
    "output_buffer_timeout": ("int", 0),
    "output_buffer_size": ("int", 0),
    "sample_rate": ("int32", 0),
    "msg_timeout": ("int", 0),
    "tls_v1": ("bool", False),
    "deflate": ("bool", False),
    "deflate_level": ("int", 0),
    "snappy": ("bool", False),
    "topology_region": ("string", ""),
    "topology_zone": ("string", ""),
    "flintmq": ("bool", False),
}


class Session(asyncio.BufferedProtocol):
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.ident = broker.next_ident()
        self.channel: Channel | None = None
        self.state = INIT
        # Set by IDENTIFY.
        self.client_id = self.hostname = self.user_agent = ""
        self.topology_region = self.topology_zone = ""
        self.heartbeat_interval = DEFAULT_HEARTBEAT
        self.output_buffer_size = 16_384
        self.output_buffer_timeout = broker.options.output_buffer_timeout // _MS
        self.msg_timeout = broker.options.msg_timeout
        # Has the client asked for a time of its own? Otherwise its channel says how long it is.
        self._own_timeout = False
        # Fixed by the first IDENTIFY: what deliveries go by.
        self._identified = False
        self._own_deliver_timeout = False
        self.deliver_timeout = broker.options.msg_timeout
        self.sample_rate = 0
        #: The client knows what NSQ does not: a further word of a publish is its key.
        self.keyed = False
        #: 0: a client of the node's own zone, 1: of its region, 2: any other, and everybody without the experiment.
        self.locality = 2
        #: The same, as far as it gives precedence.
        self.nearness = 2
        # Flow control.
        self.ready_count = 0
        self.in_flight = 0
        self.listed = False
        self._writable = True
        # Counters.
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0
        self.publish_counts: dict[str, int] = {}
        self.connected_at = broker.clock.wall() // 1_000_000_000
        # The connection.
        self.remote_address = ""
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._write: Callable[[bytes | memoryview], None] = _nowhere
        self._remote_ip = ""
        #: Every layer between the commands and the wire; None on a plain connection.
        self._codec: Codec | None = None
        self.deflate = self.snappy = False
        self._tls: Encryption | None = None
        self._handshake: asyncio.TimerHandle | None = None
        #: What the handshake agreed on, in the words of NSQ's /stats; None without TLS.
        self.tls_info: dict[str, Any] | None = None
        # Before TLS, where it is required, IDENTIFY is the only command.
        self._commands = _COMMANDS if broker.options.tls_required == "false" else _BEFORE_TLS
        # What the auth server grants to this client, until it expires.
        self._secret = b""
        self._grant: Grant | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._asked: asyncio.Task[Grant] | None = None
        self._loop = asyncio.get_running_loop()
        self._greeted = False
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat_period = 0.0
        self._next_heartbeat = 0.0
        self._last_command = self._loop.time()
        self._blocked_since = 0.0
        # Input: what is left of an unfinished command, and what reading it waits for.
        self._held: bytearray | None = None
        self._fill = 0
        self._waiting = False
        #: What is still to be unpacked of the last reads.
        self._pieces: Iterator[bytes] | None = None
        self._scanned = (0, 0)
        self._missing = ""
        self._publish_line = b""
        self._publish_topic: Topic | None = None
        #: The short way for what this client sends all the time: publishes like the last one, or FINs.
        self.lane: Lane | FinishLane | None = None
        self._single: Commit | None = None
        self._socket: socket.socket = cast(socket.socket, None)
        #: A plain socket that frames may be written to as they are; -1 where they must go through the transport.
        self.fd = -1
        # Output: frames of this turn, and answers that wait for a commit in front of them.
        self._out: list[bytes] = []
        self._answers: deque[tuple[Commit, str] | bytes] = deque()

    # --- The connection --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._write = self._transport.write
        # The least unsent byte makes this session not ready: what is not sent yet stays in the log, not in memory.
        self._transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            self._socket = sock
        if isinstance(transport, SocketTransport):
            self.fd = transport.fd
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.client_id = self.hostname = self._remote_ip = str(peer[0])
            self.remote_address = f"[{peer[0]}]:{peer[1]}" if ":" in str(peer[0]) else f"{peer[0]}:{peer[1]}"
            if sock is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self.remote_address = "@"
        self._timer = self._loop.call_later(MAGIC_TIMEOUT, self._no_magic)
        self.broker.connected(self)

    def _no_magic(self) -> None:
        logger.info("client(%s): no protocol magic within %g s", self.remote_address, MAGIC_TIMEOUT)
        self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            logger.debug("client(%s): connection lost - %s", self.remote_address, exc)
        self._leave()

    def _leave(self) -> None:
        """No longer a consumer, no longer in the table; safe to call twice."""
        for timer in (self._timer, self._handshake, self._expiry):
            if timer is not None:
                timer.cancel()
        self._timer = self._handshake = self._expiry = None
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None
        self._closing = True
        if self._single is not None:
            # Its descriptor may soon be another connection's, which must not get this one's answer.
            if not self._single.done:
                self._single.sessions.remove(self)
            self._single = None
        if self.channel is not None:
            self.channel.remove(self)
        self.broker.disconnected(self)

    def drop(self) -> None:
        """Close without a word: a deleted channel, a missed deadline, the end of the broker."""
        self._leave()
        if self._transport is not None:
            self._say_goodbye()
            self._transport.abort() if not self._writable else self._transport.close()

    def turn_away(self, reason: str) -> None:
        """One connection too many. It gets the reason, but no time to read it: descriptors are what is short."""
        self._write(encode_frame(FRAME_ERROR, f"E_TOO_MANY_CONNECTIONS {reason}".encode()))
        self.drop()

    def _say_goodbye(self) -> None:
        if self._tls is not None and self._writable and (last := self._tls.goodbye()):
            self._transport.write(last)

    def pause_writing(self) -> None:
        self._writable = False
        self._blocked_since = self._loop.time()

    def resume_writing(self) -> None:
        self._writable = True
        self._blocked_since = 0.0
        if self.channel is not None and not self._closing:
            self.channel.wake(self)
            self.channel.pump()

    @property
    def room(self) -> int:
        """How many more messages this client may be sent now: RDY is a level."""
        if not self._writable or self._closing:
            return 0
        return self.ready_count - self.in_flight

    def take_timeout(self, msg_timeout: int) -> None:
        """How long the channel gives its consumers; one that has asked for another time keeps that."""
        if not self._own_timeout:
            self.msg_timeout = msg_timeout
        if not self._own_deliver_timeout:
            self.deliver_timeout = msg_timeout

    def send_run(self, frames: memoryview) -> None:
        """Send message frames. Never raises, awaits or calls back into a channel."""
        self._write(frames)

    # --- Time ------------------------------------------------------------------------------------------------------

    def _start_heartbeats(self) -> None:
        self._heartbeat_period = max(self.heartbeat_interval, 0) / 1000
        self._next_heartbeat = self._loop.time() + self._heartbeat_period
        self._set_timer()

    def _set_timer(self) -> None:
        """One timer for both: the next heartbeat, and the moment at which the client has been silent for too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moments = []
        if self._heartbeat_period > 0:
            moments.append(self._next_heartbeat)
        if self.heartbeat_interval > 0:
            moments.append(self._last_command + 2 * self.heartbeat_interval / 1000)
        if moments:
            self._timer = self._loop.call_at(min(moments), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._heartbeat_period > 0 and now >= self._next_heartbeat:
            # Whether the client is busy or not, and whether it answers or not.
            self._next_heartbeat = max(self._next_heartbeat + self._heartbeat_period, now)
            self._send(HEARTBEAT_FRAME)
        if self._waiting or self._handshake is not None:
            # It is not the client who is silent.
            self._last_command = now
        interval = self.heartbeat_interval / 1000
        silent = now - self._last_command
        stuck = self._blocked_since and now - self._blocked_since >= interval
        if interval > 0 and (silent >= 2 * interval or stuck):
            logger.info("client(%s): no command for %g s", self.remote_address, silent)
            if self._missing and self._held is not None and self._writable and not self._waiting:
                code, _, text = self._missing.partition(" ")
                self._error(ProtocolError(code, text))
                self._flush()
            else:
                self.drop()
            return
        self._set_timer()

    # --- Input -----------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        held = self._held
        if held is None or self._codec is not None:
            return self.broker.receive_view
        if self._fill == len(held):
            # Grows as bytes arrive, never by what a length field promises.
            self._held = held = held + bytes(len(held))
        return memoryview(held)[self._fill :]

    def buffer_updated(self, size: int) -> None:
        if self._closing:
            return
        if self._codec is not None:
            self._unpack(self._codec, bytes(self.broker.receive_view[:size]))
        elif self._held is None:
            self._take(self.broker.receive_buffer, size)
        else:
            self._fill += size
            self._take(self._held, self._fill)

    def receive(self) -> None:
        """Read from the plain socket. EOFError or OSError when the connection has ended."""
        size = self._socket.recv_into(self.get_buffer(-1))
        if not size:
            raise EOFError
        self.buffer_updated(size)

    @property
    def quiet(self) -> bool:
        """Is there nothing under way here, so that a publish can take the short way?"""
        return not (
            (self._single is not None and not self._single.done)
            or self._held is not None
            or self._answers
            or self._closing
            or not self._writable
        )

    @property
    def open_to_finish(self) -> bool:
        """Is nothing held back here, so that what arrives can be looked at as it is?"""
        return self._held is None and not (self._waiting or self._closing)

    def finished(self, now: float) -> None:
        """FINs came the short way."""
        self._last_command = now

    def published(self, topic: Topic, count: int, commit: Commit | None, now: float) -> None:
        """A publish came the short way. Its answer comes with the commit; without one ``OK`` was sent already."""
        self._last_command = now
        self.publish_counts[topic.name] += count
        if commit is not None:
            self._single = commit
            commit.sessions.append(self)

    def refused(self, error: Exception | None) -> None:
        self._single = None
        if not self._closing and isinstance(self.lane, Lane):
            verb = self.lane.verb
            self._error(ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {error}"))
            self._flush()

    def _queue_single(self, commit: Commit) -> None:
        """More came before the answer to a single PUB: from now on answers have an order to keep."""
        self._single = None
        if commit.done:
            return
        commit.sessions.remove(self)
        commit.waiters.append(self._committed)
        self._answers.append((commit, self.lane.verb if isinstance(self.lane, Lane) else "PUB"))

    def _unpack(self, codec: Codec, data: bytes) -> None:
        pieces = codec.decompress(data)
        self._pieces = pieces if self._pieces is None else chain(self._pieces, pieces)
        if not self._waiting:
            self._unpack_some()

    def _unpack_some(self) -> None:
        """Run what comes out of the layers, a bounded part per loop turn, and no more of it than commands ask for."""
        pieces, codec = self._pieces, self._codec
        if pieces is None:
            return
        room = UNPACK_AT_ONCE
        try:
            while not self._waiting:
                piece = next(pieces, None)
                if piece is None or self._closing:
                    break
                if self._held is None:
                    self._take(bytearray(piece), len(piece))
                else:
                    # In place: what is held may be large, and the pieces a byte each.
                    held = self._held
                    del held[self._fill :]
                    held += piece
                    self._take(held, len(held))
                if self._closing or self._codec is not codec:
                    # Nothing that was sent before an upgrade is taken for what comes after it.
                    break
                room -= len(piece)
                if room <= 0 and not self._waiting:
                    self._wait(self.broker.later)
            else:
                return
        except EOFError:
            if not self.eof_received():
                self._transport.close()
        except ProtocolError as exc:
            if self._handshake is not None:
                self._handshake_failed(exc)
            else:
                logger.error("client(%s): %s", self.remote_address, exc)
                self.drop()
        self._pieces = None

    def _take(self, data: bytearray, stop: int) -> None:
        """Run the commands in ``data[:stop]`` and keep the rest."""
        if self._single is not None:
            self._queue_single(self._single)
        pos = self._run(data, stop) if not self._waiting else 0
        left = stop - pos
        if not left or (self._closing and not self._waiting):
            self._held = None
        elif self._held is not data:
            held = bytearray(max(2 * left, 512))
            held[:left] = data[pos:stop]
            self._held = held
        elif pos:
            data[:left] = data[pos:stop]
        self._fill = left
        if self._out:
            out, self._out = self._out, []
            self._write(out[0] if len(out) == 1 else b"".join(out))
        if self.channel is not None and not self._closing:
            self.channel.pump()

    def _run(self, data: bytearray, stop: int) -> int:
        """Run whole commands from the start of ``data``; where the first unfinished one stands."""
        pos = 0
        try:
            if not self._greeted:
                if stop < 4:
                    return 0
                if data[:4] != MAGIC_V2:
                    raise ProtocolError("E_BAD_PROTOCOL")
                self._greeted = True
                self._start_heartbeats()
                self._last_command = self._loop.time()
                pos = 4
            start = pos
            while pos < stop and not self._closing and not self._waiting:
                if data[pos] == 70 and self.channel is not None:
                    after = self.channel.finish_run(self, data, pos, stop)
                    if after != pos:
                        pos = after
                        continue
                newline = data.find(b"\n", pos, min(stop, pos + LONGEST_LINE))
                if newline < 0:
                    if stop - pos >= LONGEST_LINE:
                        logger.info("client(%s): a command line without end", self.remote_address)
                        self.drop()
                        return stop
                    break
                line = bytes(data[pos:newline])
                try:
                    if line == self._publish_line:
                        after = self._publish_again(line, data, newline + 1, stop)
                    else:
                        after = self._command(line, data, newline + 1, stop)
                except ProtocolError as exc:
                    if exc.fatal:
                        raise
                    self._error(exc)
                    after = newline + 1
                if after < 0:
                    break
                self._missing = ""
                pos = after
            if pos != start:
                self._last_command = self._loop.time()
        except ProtocolError as exc:
            self._error(exc)
            return stop
        except Exception:
            # A bug of ours must not cost more than the connection it happened on.
            logger.exception("client(%s): unexpected error", self.remote_address)
            self.drop()
            return stop
        return pos

    def eof_received(self) -> bool:
        """The client sends no more. A command that was cut off gets its error; then the connection goes."""
        if self._single is not None:
            self._queue_single(self._single)
        if self._missing and not self._closing and self._held is not None:
            code, _, text = self._missing.partition(" ")
            self._error(ProtocolError(code, text))
            self._flush()
            return True
        if self._answers:
            # Commits are under way: their answers are still owed.
            self._closing = True
            return True
        return False

    def _wait(self, until: Callable[[Callable[[], None]], object]) -> int:
        """Read no further until something has happened; the command is then run again."""
        self._waiting = True
        self._transport.pause_reading()
        until(self._resume)
        return _AGAIN

    def _resume(self) -> None:
        if not self._waiting:
            return
        self._waiting = False
        if self._closing:
            return
        if self._held is not None:
            self._take(self._held, self._fill)
        if self._pieces is not None and not self._waiting and not self._closing:
            self._unpack_some()
        # Nothing but what was waited for is known: it may have to wait again.
        if not self._waiting and not self._closing:
            self._transport.resume_reading()

    # --- Output ----------------------------------------------------------------------------------------------------

    def _answer(self, frame: bytes) -> None:
        """An answer, behind those that still wait for a commit."""
        if self._answers:
            self._answers.append(frame)
        else:
            self._out.append(frame)

    def _send(self, frame: bytes) -> None:
        self._flush()
        self._write(frame)

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._write(b"".join(out))

    def _answer_when(self, commit: Commit | None, verb: str) -> None:
        """``OK`` as soon as the commit is done, at once without one."""
        if commit is None:
            self._answer(OK_FRAME)
            return
        if not self._answers:
            commit.waiters.append(self._committed)
        elif self._answers[-1] != (commit, verb):
            commit.waiters.append(self._committed)
        self._answers.append((commit, verb))

    def _committed(self) -> None:
        """Some commit was resolved: send the answers that wait for none any more."""
        answers = self._answers
        while answers:
            answer = answers[0]
            if isinstance(answer, tuple):
                commit, verb = answer
                if not commit.done:
                    break
                answers.popleft()
                if commit.error is not None:
                    self._refuse(ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {commit.error}"))
                    return
                self._out.append(OK_FRAME)
            else:
                answers.popleft()
                self._out.append(answer)
        if self._out:
            self._flush()
        if not answers and self._closing:
            self._farewell()

    def _error(self, error: ProtocolError) -> None:
        logger.error("client(%s): %s", self.remote_address, error)
        if not error.fatal:
            self._answer(encode_frame(FRAME_ERROR, str(error).encode("utf-8", "surrogateescape")))
        elif self._answers:
            # What was published before must be answered first; nothing more is read.
            self._closing = True
            self._answers.append(encode_frame(FRAME_ERROR, str(error).encode("utf-8", "surrogateescape")))
            self._transport.pause_reading()
        else:
            self._refuse(error)

    def _refuse(self, error: ProtocolError) -> None:
        """A fatal error: the frame, then the end."""
        self._out.append(encode_frame(FRAME_ERROR, str(error).encode("utf-8", "surrogateescape")))
        self._answers.clear()
        self._flush()
        self._farewell()

    def _farewell(self) -> None:
        """Send what is left, take no more, and give the peer a moment to read it.

        Closing at once with unread input in the socket would reset the connection and could cost the peer the error.
        """
        self._leave()
        if self._transport.is_closing():
            return
        self._say_goodbye()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
            self._loop.call_later(LINGER, self._transport.abort)
        else:
            self._transport.close()

    # --- Commands --------------------------------------------------------------------------------------------------

    def _command(self, line: bytes, data: bytearray, at: int, stop: int) -> int:
        """Run one command; where the next one starts."""
        params = (line[:-1] if line.endswith(b"\r") else line).split(b" ")
        handler = self._commands.get(params[0])
        if handler is None:
            if self._commands is _BEFORE_TLS:
                raise ProtocolError("E_INVALID", f"cannot {_text(params[0])} in current state (TLS required)")
            raise ProtocolError("E_INVALID", f"invalid command {_text(params[0])}")
        after = handler(self, params, data, at, stop)
        if after >= 0 and params[0] in (b"PUB", b"MPUB") and len(params) == 2:
            # A producer says the same line again and again: it need not be taken apart each time. The topic is
            # remembered here and nowhere else: a DPUB to another one must not come between a line and its topic.
            # Where an authorization expires, a timer ends all that is short.
            topic = self._publish_topic = self.broker.topics.get(params[1].decode("ascii"))
            self._publish_line = line
            verb = params[0].decode("ascii")
            plain = self.fd >= 0 and self.channel is None and line == b" ".join(params)
            if plain and topic is not None:
                self.lane = self.broker.lane(topic, verb)
        return after

    def _publish_again(self, line: bytes, data: bytearray, at: int, stop: int) -> int:
        topic = self._publish_topic
        if topic is None or topic.exiting:
            self._publish_line = b""
            return self._command(line, data, at, stop)
        if line[0] == 80:
            return self._pub_body(topic, data, at, stop, "PUB", 0)
        return self._mpub_body(topic, data, at, stop)

    def _size(self, data: bytearray, at: int, stop: int) -> int | None:
        return int(_i32.unpack_from(data, at)[0]) if stop - at >= 4 else None

    def _body(self, data: bytearray, at: int, stop: int, verb: str) -> slice | None:
        """Where the body of IDENTIFY or AUTH is, None if it is not all there."""
        limit = self.broker.options.max_body_size
        size = self._size(data, at, stop)
        if size is None:
            self._missing = f"E_BAD_BODY {verb} failed to read body size"
            return None
        if size > limit:
            raise ProtocolError("E_BAD_BODY", f"{verb} body too big {size} > {limit}")
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"{verb} invalid body size {size}")
        if stop - at - 4 < size:
            self._missing = f"E_BAD_BODY {verb} failed to read body"
            return None
        return slice(at + 4, at + 4 + size)

    def _identify(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state != INIT:
            raise ProtocolError("E_INVALID", "cannot IDENTIFY in current state")
        body = self._body(data, at, stop, "IDENTIFY")
        if body is None:
            return _MORE
        if self._answers:
            return self._wait(self._when_answered)
        # Not copied once more: it may be large.
        fields = decode_identify(str(memoryview(data)[body], "utf-8", "replace"), _IDENTIFY_FIELDS)
        self._apply_identify(fields)
        options = self.broker.options
        if not fields["feature_negotiation"]:
            self._answer(OK_FRAME)
            return int(body.stop)
        deflate = options.deflate and fields["deflate"]
        snappy = options.snappy and fields["snappy"]
        if deflate and snappy:
            raise ProtocolError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
        tls = self.broker.tls if fields["tls_v1"] else None
        if tls is not None and self._tls is not None:
            # NSQ would begin a second handshake beside the first, in the clear.
            raise ProtocolError("E_IDENTIFY_FAILED", "IDENTIFY failed the connection is encrypted already")
        level = min(6, options.max_deflate_level)
        if deflate and fields["deflate_level"] > 0:
            level = min(fields["deflate_level"], options.max_deflate_level)
        response = {
            "max_rdy_count": options.max_rdy_count,
            "version": NSQ_VERSION,
            "max_msg_timeout": options.max_msg_timeout // _MS,
            "msg_timeout": self.msg_timeout // _MS,
            "tls_v1": tls is not None,
            "deflate": deflate,
            "deflate_level": level,
            "max_deflate_level": options.max_deflate_level,
            "snappy": snappy,
            "sample_rate": fields["sample_rate"],
            "auth_required": bool(options.auth_http_addresses),
            "output_buffer_size": self.output_buffer_size,
            "output_buffer_timeout": self.output_buffer_timeout,
            "topology_region": options.topology_region,
            "topology_zone": options.topology_zone,
        }
        if self.keyed:
            response["flintmq"] = self.broker.about() | {"http_port": self.broker.http_port}
        self._answer(encode_frame(FRAME_RESPONSE, msgspec.json.encode(response)))
        if tls is None and not deflate and not snappy:
            return int(body.stop)
        self._upgrade(tls, Snappy() if snappy else Deflate(level) if deflate else None)
        self.deflate, self.snappy = deflate, snappy
        # What the client sent behind IDENTIFY is dropped, as in NSQ: it must wait for the answer.
        return stop

    def _when_answered(self, then: Callable[[], None]) -> None:
        """``then`` as soon as the first of the answers that are still owed has gone out."""

        def answered() -> None:
            self.broker.later(then)

        commit = self._answers[0][0]
        assert isinstance(commit, Commit)
        commit.waiters.append(answered)

    def _upgrade(self, tls: ssl.SSLContext | None, inner: Codec | None) -> None:
        """From here on both directions have another form. TLS begins with a handshake, compression at once."""
        self._flush()
        self._end_short_way()
        self.fd = -1
        if tls is not None:
            from flintmq.broker.net.tls import Encryption

            self._tls = Encryption(tls, self._transport.write, lambda: self._upgraded(inner))
            # Heartbeats, for instance, that become due during the handshake.
            self._write = _nowhere
            self._handshake = self._loop.call_later(HANDSHAKE_TIMEOUT, self._handshake_timed_out)
        layers = [layer for layer in (self._tls, inner) if layer is not None]
        self._codec = layers[0] if len(layers) == 1 else Stack(*layers)
        if tls is None:
            self._upgraded(inner)

    def _upgraded(self, inner: Codec | None) -> None:
        """The new form holds. An ``OK`` for each layer that is new, inside it, says so."""
        write: Callable[[bytes | memoryview], None] = self._transport.write
        if self._tls is not None:
            write = _through(self._tls, write)
            if self._handshake is not None:
                self._handshake.cancel()
                self._handshake = None
                self._last_command = self._loop.time()
                self.tls_info = self._tls.info()
                self._commands = _COMMANDS
                write(OK_FRAME)
        if inner is not None:
            write = _through(inner, write)
            write(OK_FRAME)
        self._write = write

    def _handshake_timed_out(self) -> None:
        from flintmq.broker.net.tls import HandshakeError

        self._handshake_failed(HandshakeError("i/o timeout"))

    def _handshake_failed(self, error: ProtocolError) -> None:
        """Said in the clear, as in NSQ: there is nothing else that both sides understand."""
        self._tls = self._codec = None
        self._write = self._transport.write
        self._error(error)

    def _end_short_way(self) -> None:
        """The next publish is looked at from the beginning."""
        if isinstance(self.lane, Lane):
            self.lane = None
        self._publish_line = b""
        self._publish_topic = None

    def _apply_identify(self, fields: dict[str, Any]) -> None:
        options = self.broker.options
        heartbeat = fields["heartbeat_interval"]
        if heartbeat != 0 and heartbeat != -1 and not 1000 <= heartbeat <= options.max_heartbeat_interval // _MS:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY heartbeat interval ({heartbeat}) is invalid")
        buffer_timeout = fields["output_buffer_timeout"]
        shortest, longest = options.min_output_buffer_timeout // _MS, options.max_output_buffer_timeout // _MS
        if buffer_timeout not in (0, -1) and not shortest <= buffer_timeout <= longest:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY output buffer timeout ({buffer_timeout}) is invalid")
        buffer_size = fields["output_buffer_size"]
        if buffer_size not in (0, -1) and not 64 <= buffer_size <= options.max_output_buffer_size:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY output buffer size ({buffer_size}) is invalid")
        sample_rate = fields["sample_rate"]
        if not 0 <= sample_rate <= 99:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY sample rate ({sample_rate}) is invalid")
        msg_timeout = fields["msg_timeout"]
        if msg_timeout != 0 and not 1000 <= msg_timeout <= options.max_msg_timeout // _MS:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY msg timeout ({msg_timeout}) is invalid")
        self.client_id = fields["client_id"]
        self.hostname = fields["hostname"]
        self.user_agent = fields["user_agent"]
        self.topology_region = fields["topology_region"]
        self.topology_zone = fields["topology_zone"]
        if heartbeat:
            self.heartbeat_interval = max(heartbeat, 0)
        if buffer_timeout:
            self.output_buffer_timeout = max(buffer_timeout, 0)
        if buffer_size == -1:
            self.output_buffer_size, self.output_buffer_timeout = 1, 0
        elif buffer_size:
            self.output_buffer_size = buffer_size
        if msg_timeout:
            self.msg_timeout = msg_timeout * _MS
            self._own_timeout = True
        self.keyed = fields["flintmq"]
        if not self._identified:
            # As in NSQ only the first IDENTIFY reaches deliveries and the heartbeat timer.
            self._identified = True
            self.deliver_timeout = self.msg_timeout
            self._own_deliver_timeout = self._own_timeout
            self.sample_rate = sample_rate
            if self.broker.topology_aware:
                same_region = self.topology_region == options.topology_region
                same_zone = self.topology_zone == options.topology_zone
                self.locality = 0 if same_zone else 1 if same_region else 2
                # A node that does not say where it is prefers nobody, though it counts as NSQ does.
                if same_zone and options.topology_zone:
                    self.nearness = 0
                elif same_region and options.topology_region:
                    self.nearness = 1
            self._start_heartbeats()
        else:
            self._set_timer()

    def _auth(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state != INIT:
            raise ProtocolError("E_INVALID", "cannot AUTH in current state")
        if len(params) != 1:
            raise ProtocolError("E_INVALID", "AUTH invalid number of parameters")
        body = self._body(data, at, stop, "AUTH")
        if body is None:
            return _MORE
        if self._grant is not None:
            raise ProtocolError("E_INVALID", "AUTH already set")
        if self.broker.auth is None:
            raise ProtocolError("E_AUTH_DISABLED", "AUTH disabled")
        if self._answers:
            return self._wait(self._when_answered)
        secret = bytes(data[body])
        grant = self._ask_auth_server(secret)
        if grant is None:
            return _AGAIN
        if not grant.count:
            raise ProtocolError("E_UNAUTHORIZED", "AUTH no authorizations found")
        self._secret = secret
        self._take_grant(grant)
        self._answer(encode_frame(FRAME_RESPONSE, grant.response()))
        return int(body.stop)

    def _ask_auth_server(self, secret: bytes) -> Grant | None:
        """What the secret is worth; None while the auth servers are asked: then the command is run again."""
        asked, self._asked = self._asked, None
        if asked is None:
            assert self.broker.auth is not None
            common_name = self._tls.common_name if self._tls is not None else ""
            asked = self.broker.auth.ask(self._remote_ip, self.tls_info is not None, common_name, secret)
            self._asked = asked
            self._wait(lambda then: asked.add_done_callback(lambda _: then()))
            return None
        try:
            return asked.result()
        except AuthError as exc:
            # The reason is in the log: whoever has not proved who he is, is told nothing.
            raise ProtocolError("E_AUTH_FAILED", "AUTH failed") from exc

    def _take_grant(self, grant: Grant) -> None:
        self._grant = grant
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_later(grant.ttl, self._grant_expired)

    def _grant_expired(self) -> None:
        self._expiry = None
        self._end_short_way()

    @property
    def authed(self) -> bool:
        return self._grant is not None

    @property
    def auth_identity(self) -> str:
        return self._grant.identity if self._grant is not None else ""

    @property
    def auth_identity_url(self) -> str:
        return self._grant.identity_url if self._grant is not None else ""

    def _must_ask(self, verb: str, topic: str, channel: str = "") -> bool:
        """May the client do this? ProtocolError if not; True if that has to be asked first, and the command waits."""
        if self.broker.auth is None:
            return False
        if self._grant is None:
            raise ProtocolError("E_AUTH_FIRST", f"AUTH required before {verb}")
        if self._expiry is None:
            grant = self._ask_auth_server(self._secret)
            if grant is None:
                return True
            self._take_grant(grant)
        if not self._grant.allows(topic, channel):
            raise ProtocolError("E_UNAUTHORIZED", f'AUTH failed for {verb} on "{topic}" "{channel}"')
        return False

    def _topic(self, name: str, verb: str) -> Topic:
        try:
            return self.broker.topic(name)
        except PublishError as exc:
            raise ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {exc}") from exc

    def _sub(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state != INIT:
            raise ProtocolError("E_INVALID", "cannot SUB in current state")
        if self.heartbeat_interval <= 0:
            raise ProtocolError("E_INVALID", "cannot SUB with heartbeats disabled")
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "SUB insufficient number of parameters")
        topic_name = _name(params[1], "E_BAD_TOPIC", "SUB topic")
        channel_name = _name(params[2], "E_BAD_CHANNEL", "SUB channel")
        if self._must_ask("SUB", topic_name, channel_name):
            return _AGAIN
        topic = self._topic(topic_name, "SUB")
        if topic.exiting:
            raise ProtocolError("E_SUB_FAILED", "SUB failed exiting")
        channel, position = topic.channel(channel_name)
        limit = self.broker.options.max_channel_consumers
        if limit and len(channel.sessions) >= limit:
            text = f"SUB failed consumers for {topic_name}:{channel_name} exceeds limit of {limit}"
            raise ProtocolError("E_SUB_FAILED", text)
        channel.add(self)
        self.channel = channel
        self.state = SUBSCRIBED
        self.lane = self.broker.finish_lane(channel) if self.fd >= 0 else None
        if position and topic.settings.durability == "fsync":
            # The channel must be on the device before the client may count on it.
            commit = Commit()
            self._answer_when(commit, "SUB")
            self.broker.journal.when_synced(position, commit.resolve)
        else:
            self.broker.journal.flush()
            self._answer(OK_FRAME)
        return at

    def _pub(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "PUB insufficient number of parameters")
        name = _name(params[1], "E_BAD_TOPIC", "PUB topic")
        return self._pub_body(name, data, at, stop, "PUB", 0, self._key(params, 2))

    def _dpub(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "DPUB insufficient number of parameters")
        name = _name(params[1], "E_BAD_TOPIC", "DPUB topic")
        try:
            delay = parse_base10(params[2])
        except ValueError:
            raise ProtocolError("E_INVALID", f"DPUB could not parse timeout {_text(params[2])}") from None
        topic = self.broker.topics.get(name)
        settings = topic.settings if topic is not None else self.broker.settings.topic(name)
        if not 0 <= _signed_ns(delay) <= settings.max_defer:
            raise ProtocolError("E_INVALID", f"DPUB timeout {delay} out of range 0-{settings.max_defer // _MS}")
        return self._pub_body(name, data, at, stop, "DPUB", _signed_ns(delay), self._key(params, 3))

    def _key(self, params: list[bytes], index: int) -> bytes:
        """The key of a publish; empty without one. NSQ ignores words that it does not ask for."""
        if len(params) <= index or not self.keyed:
            return b""
        key = b" ".join(params[index:])
        if not valid_key(key):
            text = f"{_text(params[0])} bad key {_text(go_quote(key[:128]))}: 1 to 128 printable characters, no space"
            raise ProtocolError("E_INVALID", text)
        return key

    def _pub_body(
        self, target: Topic | str, data: bytearray, at: int, stop: int, verb: str, delay: int, key: bytes = b""
    ) -> int:
        limit = self.broker.options.max_msg_size
        if stop - at < 4:
            self._missing = f"E_BAD_MESSAGE {verb} failed to read message body size"
            return _MORE
        size = int(_i32.unpack_from(data, at)[0])
        if size <= 0:
            raise ProtocolError("E_BAD_MESSAGE", f"{verb} invalid message body size {size}")
        if size > limit:
            raise ProtocolError("E_BAD_MESSAGE", f"{verb} message too big {size} > {limit}")
        after = at + 4 + size
        if after > stop:
            self._missing = f"E_BAD_MESSAGE {verb} failed to read message body"
            return _MORE
        if isinstance(target, str):
            if self._must_ask(verb, target):
                return _AGAIN
            target = self._topic(target, verb)
        if self.broker.store.congested or target.busy:
            return self._wait(target.when_free if target.busy else self.broker.when_relieved)
        try:
            if key:
                commit = self._once(target, key, 1, partial(_publish, target, data, at, after, 1, delay))
            else:
                commit = target.publish(data, at, after, 1, delay=delay)
                self._count(target, 1)
        except PublishError as exc:
            raise ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {exc}") from exc
        self._answer_when(commit, verb)
        return after

    def _once(self, topic: Topic, key: bytes, count: int, publish: Callable[[bytes], Commit | None]) -> Commit | None:
        commit, is_repeat = topic.once(key, publish)
        if not is_repeat:
            self._count(topic, count)
        return commit

    def _mpub(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "MPUB insufficient number of parameters")
        # NSQ says the code twice here, and clients know it so.
        name = _name(params[1], "E_BAD_TOPIC", "E_BAD_TOPIC MPUB topic")
        key = self._key(params, 2)
        if self._must_ask("MPUB", name):
            return _AGAIN
        return self._mpub_body(self._topic(name, "MPUB"), data, at, stop, key)

    def _mpub_body(self, topic: Topic, data: bytearray, at: int, stop: int, key: bytes = b"") -> int:
        """``[body size][count]{[size][body]}``: the sizes inside count, the body size is only held to its limit."""
        options = self.broker.options
        size = self._size(data, at, stop)
        if size is None:
            self._missing = "E_BAD_BODY MPUB failed to read body size"
            return _MORE
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid body size {size}")
        if size > options.max_body_size:
            raise ProtocolError("E_BAD_BODY", f"MPUB body too big {size} > {options.max_body_size}")
        count = self._size(data, at + 4, stop)
        if count is None:
            self._missing = "E_BAD_BODY MPUB failed to read message count"
            return _MORE
        if not 0 < count <= (options.max_body_size - 4) // 5:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid message count {count}")
        first = at + 8
        passed, index = self._scanned
        scan = Scan(first + passed)
        scan.index = index
        status = scan.run(data, stop, count, options.max_msg_size)
        read = scan.pos - at - 4
        if max(read, stop - at if status == SCAN_MORE else 0) > 2 * options.max_body_size + RECEIVE_SLACK:
            # NSQ would read on as long as messages come; here memory has a limit.
            raise ProtocolError("E_BAD_BODY", f"MPUB body too big {read} > {options.max_body_size}")
        if status == SCAN_MORE:
            self._scanned = (scan.pos - first, scan.index)
            whole = stop - scan.pos >= 4
            self._missing = (
                "E_BAD_MESSAGE MPUB failed to read message body"
                if whole
                else f"E_BAD_MESSAGE MPUB failed to read message({scan.index}) body size"
            )
            return _MORE
        if status == SCAN_BAD:
            if scan.size <= 0:
                text = f"MPUB invalid message({scan.index}) body size {scan.size}"
            else:
                text = f"MPUB message too big {scan.size} > {options.max_msg_size}"
            raise ProtocolError("E_BAD_MESSAGE", text)
        if self.broker.store.congested or topic.busy:
            return self._wait(topic.when_free if topic.busy else self.broker.when_relieved)
        self._scanned = (0, 0)
        try:
            if key:
                commit = self._once(topic, key, count, partial(_publish, topic, data, first, scan.pos, count, 0))
            else:
                self._count(topic, count)
                commit = _publish(topic, data, first, scan.pos, count, 0, b"")
        except PublishError as exc:
            raise ProtocolError("E_MPUB_FAILED", f"MPUB failed {exc}") from exc
        self._answer_when(commit, "MPUB")
        return scan.pos

    def _count(self, topic: Topic, count: int) -> None:
        counts = self.publish_counts
        counts[topic.name] = counts.get(topic.name, 0) + count

    def _rdy(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state == CLOSING:
            return at
        if self.state != SUBSCRIBED or self.channel is None:
            raise ProtocolError("E_INVALID", "cannot RDY in current state")
        count = 1
        if len(params) > 1:
            try:
                count = parse_base10(params[1])
            except ValueError:
                raise ProtocolError("E_INVALID", f"RDY could not parse count {_text(params[1])}") from None
        limit = self.broker.options.max_rdy_count
        # Go reads it into a signed number.
        count = count - (1 << 64) if count >= 1 << 63 else count
        if not 0 <= count <= limit:
            raise ProtocolError("E_INVALID", f"RDY count {count} out of range 0-{limit}")
        self.ready_count = count
        self.channel.wake(self)
        return at

    def _message(self, params: list[bytes], verb: str, least: int) -> tuple[Channel, int]:
        """The channel and the seq that FIN, REQ or TOUCH speak of; -1 for an id that no message here can have."""
        if self.state not in (SUBSCRIBED, CLOSING) or self.channel is None:
            raise ProtocolError("E_INVALID", f"cannot {verb} in current state")
        if len(params) < least:
            raise ProtocolError("E_INVALID", f"{verb} insufficient number of params")
        if len(params[1]) != 16:
            raise ProtocolError("E_INVALID", "invalid message ID")
        return self.channel, self.channel.topic.ids.seq(params[1])

    def _unknown(self, params: list[bytes], verb: str) -> ProtocolError:
        return ProtocolError(f"E_{verb}_FAILED", f"{verb} {_text(params[1])} failed ID not in flight", fatal=False)

    def _fin(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        channel, seq = self._message(params, "FIN", 2)
        if seq < 0:
            raise self._unknown(params, "FIN")
        channel.finish(self, seq)
        return at

    def _req(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        channel, seq = self._message(params, "REQ", 3)
        try:
            delay = _signed_ns(parse_base10(params[2]))
        except ValueError:
            raise ProtocolError("E_INVALID", f"REQ could not parse timeout {_text(params[2])}") from None
        longest = channel.settings.max_defer
        if not 0 <= delay <= longest:
            logger.info("client(%s): REQ timeout %d out of range 0-%d, clamped", self.remote_address, delay, longest)
            delay = min(max(delay, 0), longest)
        if seq < 0:
            raise self._unknown(params, "REQ")
        channel.requeue(self, seq, delay)
        return at

    def _touch(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        channel, seq = self._message(params, "TOUCH", 2)
        if seq < 0:
            raise self._unknown(params, "TOUCH")
        channel.touch(self, seq)
        return at

    def _cls(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        if self.state != SUBSCRIBED:
            raise ProtocolError("E_INVALID", "cannot CLS in current state")
        self.ready_count = 0
        self.state = CLOSING
        self._answer(CLOSE_WAIT_FRAME)
        return at

    def _nop(self, params: list[bytes], data: bytearray, at: int, stop: int) -> int:
        return at


def _publish(topic: Topic, data: bytearray, pos: int, stop: int, count: int, delay: int, extra: bytes) -> Commit | None:
    """Append records, very many in slices."""
    if count > SLICED_FROM:
        batch = data[pos:stop]
        return topic.publish_slices(slices(batch, 0, len(batch), count), extra)
    return topic.publish(data, pos, stop, count, delay=delay, extra=extra)


def _nowhere(_: bytes | memoryview) -> None:
    """Where a session writes before it has a connection, and during a handshake."""


def _through(codec: Codec, write: Callable[[bytes | memoryview], None]) -> Callable[[bytes | memoryview], None]:
    """Write what the codec makes of it, if anything."""

    def packed(data: bytes | memoryview) -> None:
        if out := codec.compress(data):
            write(out)

    return packed


class Lane:
    """The short way for PUBs, or for MPUBs, of many clients to one topic: those of a turn are read and framed together.

    A connection takes it if its socket is a plain one and its last publish was of this kind and to this topic. It is
    for one whole command in one read; whatever else a client sends goes the ordinary way.
    """

    def __init__(self, broker: Broker, topic: Topic, verb: str) -> None:
        self._broker = broker
        self.topic = topic
        self.verb = verb
        options = broker.options
        self._intake = Intake(
            broker.receive_buffer,
            f"{verb} {topic.name}".encode(),
            OK_FRAME,
            options.max_msg_size,
            options.max_body_size if verb == "MPUB" else 0,
        )
        self._arrived: list[tuple[Session, SocketTransport]] = []
        self._regulars: dict[Session, SocketTransport] = {}

    def add(self, session: Session, transport: SocketTransport) -> bool:
        """The session's socket can be read; True if it is the first of this turn."""
        self._arrived.append((session, transport))
        return len(self._arrived) == 1

    def run(self) -> None:
        arrived, self._arrived = self._arrived, []
        topic = self.topic
        # Those that published a moment ago may well have the next one under way: they are read too, after the others.
        others, self._regulars = self._regulars, {}
        short: list[tuple[Session, SocketTransport]] = []
        for pair in arrived:
            others.pop(pair[0], None)
            if topic.open and pair[0].quiet:
                short.append(pair)
            else:
                pair[1].receive()
        if others and topic.open:
            short.extend((session, transport) for session, transport in others.items() if session.quiet)
        fds = [transport.fd for _, transport in short]
        start = 0
        while start < len(fds):
            start = self._take_in(short, fds, start)

    def _take_in(self, short: list[tuple[Session, SocketTransport]], fds: list[int], start: int) -> int:
        """Take in publishes until something has to be done about one of them; where to go on."""
        topic, intake = self.topic, self._intake
        counts = [0] * len(fds)
        status, commit = topic.take_in(intake, fds, counts, start)
        if status == NO_BLOCK:
            # Nothing was read: the log gets a block the ordinary way.
            short[start][1].receive()
            return start + 1
        for i, sent in intake.left:
            short[i][0].send_run(memoryview(OK_FRAME)[sent:])
        now = self._broker.now()
        if commit is not None and commit.done:
            for i in intake.unanswered:
                short[i][0].refused(commit.error)
            commit = None
        self._broker.lane_published += sum(counts)
        for i, count in enumerate(counts):
            if count:
                session, transport = short[i]
                session.published(topic, count, commit, now)
                if len(self._regulars) < MOST_REGULARS:
                    self._regulars[session] = transport
        if status == OTHER:
            # What is in the buffer there must be seen to before the buffer is used again; then the others go on.
            i, size = intake.index, intake.size
            fds[i] = -1
            self._other(*short[i], size)
            return i + 1 if commit is not None else start
        if status == FULL and commit is not None:
            topic.flush()
            return intake.index
        return len(fds)

    def _other(self, session: Session, transport: SocketTransport, size: int) -> None:
        """Something else came, or nothing at all: ``size`` bytes are in the buffer."""
        if size > 0:
            session.buffer_updated(size)
        elif size == 0:
            transport.ended()
        else:
            transport.fail(OSError(-size, "the connection is broken"))


class FinishLane:
    """The short way for FINs of a channel's consumers on plain sockets: all of a turn, and one pump at its end."""

    def __init__(self, broker: Broker, channel: Channel) -> None:
        self._broker = broker
        self._channel = channel
        self._arrived: list[tuple[Session, SocketTransport]] = []

    def add(self, session: Session, transport: SocketTransport) -> bool:
        """The session's socket can be read; True if it is the first of this turn."""
        self._arrived.append((session, transport))
        return len(self._arrived) == 1

    def run(self) -> None:
        arrived, self._arrived = self._arrived, []
        channel = self._channel
        ring = channel.ring
        data = self._broker.receive_buffer
        now = self._broker.now()
        finished = 0
        for session, transport in arrived:
            if not session.open_to_finish:
                transport.receive()
                continue
            pos = channel.finish_from_socket(session, transport.fd, data)
            size = ring.received
            finished += ring.finished
            if size > 0:
                if pos:
                    session.finished(now)
                if pos != size:
                    data[: size - pos] = data[pos:size]
                    session.buffer_updated(size - pos)
            elif size == 0:
                transport.ended()
            elif size != NOTHING:
                transport.fail(OSError(-size, "the connection is broken"))
        self._broker.lane_finished += finished
        self._broker.answered(channel)


_Handler = Callable[[Session, list[bytes], bytearray, int, int], int]
_COMMANDS: dict[bytes, _Handler] = {
    b"IDENTIFY": Session._identify,
    b"AUTH": Session._auth,
    b"SUB": Session._sub,
    b"PUB": Session._pub,
    b"MPUB": Session._mpub,
    b"DPUB": Session._dpub,
    b"RDY": Session._rdy,
    b"FIN": Session._fin,
    b"REQ": Session._req,
    b"TOUCH": Session._touch,
    b"CLS": Session._cls,
    b"NOP": Session._nop,
}
_BEFORE_TLS: dict[bytes, _Handler] = {b"IDENTIFY": Session._identify}


def _text(data: bytes) -> str:
    """Bytes of a client inside an error text: they go back as they came."""
    return data.decode("utf-8", "surrogateescape")


def _name(data: bytes, code: str, what: str) -> str:
    if not valid_name(data):
        raise ProtocolError(code, f"{what} name {_text(go_quote(data))} is not valid")
    return data.decode("ascii")


def _signed_ns(milliseconds: int) -> int:
    """Milliseconds as nanoseconds in 64 signed bits: very large ones wrap, as in Go."""
    value = (milliseconds * _MS) & 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >= 1 << 63 else value
