"""One client connection: bytes in, commands run, frames out.

A Session owns its socket, its RDY count, what it was sent and has not answered, and the order of the protocol
(IDENTIFY before SUB, answers in the order of their commands). It does not know how messages are stored; it asks its
topic and its channel. Nothing that a client sends may raise out of here, block the loop or cost more than the limits.
What the commands do is in ``commands``: functions that act for a session. Cold parts have modules of their own: what
the client said of itself (``identity``), its one timer (``heartbeat``), its grant (``authorization``), TLS and
compression (``upgrade``).

What arrives lands in a buffer that all sessions share; only what is left of an unfinished command is kept by the
session. A command whose body is not all there is looked at again when more arrives, so checks come before any effect.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from math import inf
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from flintmq.broker.delivery.commit import Commit
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.net import commands
from flintmq.broker.net.authorization import Authorization
from flintmq.broker.net.commands import AGAIN, INIT, MORE
from flintmq.broker.net.heartbeat import Heartbeat
from flintmq.broker.net.identity import Identity
from flintmq.broker.net.lanes import FinishLane, PublishLane
from flintmq.broker.net.sockets import SocketTransport
from flintmq.broker.net.upgrade import Upgrade
from flintmq.errors import ProtocolError
from flintmq.protocol.compression import Codec
from flintmq.protocol.wire import (
    FRAME_ERROR,
    MAGIC_V2,
    OK_FRAME,
    encode_frame,
)

if TYPE_CHECKING:
    import ssl

    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.net.auth import Grant

__all__ = ["Session"]

logger = logging.getLogger(__name__)

_i32 = Struct(">i")
_MS = 1_000_000

#: A command line, its newline included.
LONGEST_LINE = 16_384
#: After an error frame the peer gets this long to read it before the connection goes.
LINGER = 1.0
#: Bytes that one loop turn unpacks of a compressed or encrypted stream: it may swell a thousandfold.
UNPACK_AT_ONCE = 256 << 10
#: Commands, and seconds, that a client gets of one loop turn; before IDENTIFY it gets fewer commands.
COMMANDS_AT_ONCE = 1024
COMMANDS_AT_FIRST = 256
SECONDS_AT_ONCE = 0.001
#: Commands between two looks at the clock; a power of two.
LOOK_EVERY = 16
#: For those who may not publish wherever they like.
_NO_LINES: dict[bytes, Topic] = {}
#: Answers that may wait for commits before no more commands are read.
MOST_ANSWERS = 8192


class Missing(NamedTuple):
    """What a command lacks: the error that it gets if the rest never comes, and how far an MPUB was parsed."""

    code: str
    text: str
    #: Bytes and messages behind the count.
    parsed: tuple[int, int]

    def error(self) -> ProtocolError:
        return ProtocolError(self.code, self.text)


class Session(asyncio.BufferedProtocol):
    """One client connection.

    Only the session and its commands assign here.

    Size: reading, answering and delivering look at nearly all of it for every read, command or run, so that it is
    flat: another object would be another lookup each time.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.ident = broker.next_ident()
        self.channel: Channel | None = None
        self.state = INIT
        # Set by IDENTIFY.
        self.identity = Identity(broker.options, broker.clock.wall() // 1_000_000_000)
        self.msg_timeout = broker.options.msg_timeout
        # Fixed by the first IDENTIFY: what deliveries go by.
        self.identified = False
        self.deliver_timeout = broker.options.msg_timeout
        self.sample_rate = 0
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
        # The connection.
        self.remote_address = ""
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._write: Callable[[bytes | memoryview], None] = _nowhere
        #: Every layer between the commands and the wire; None on a plain connection.
        self._codec: Codec | None = None
        self.upgrade: Upgrade | None = None
        self._loop = asyncio.get_running_loop()
        #: What the auth servers grant to this client; None without such servers.
        self.authorization: Authorization | None = None
        if broker.auth is not None:
            self.authorization = Authorization(self, broker.auth, self._loop)
        #: When that expires, by the loop's clock. The timer may be late, this is not.
        self.granted_until = inf
        #: The commands that are allowed: before TLS, where it is required, IDENTIFY is the only one.
        self.allowed = commands.COMMANDS if broker.options.tls_required == "false" else commands.BEFORE_TLS
        self._greeted = False
        self._closing = False
        #: After a fatal error: the end of the time that the peer has to read it.
        self._linger: asyncio.TimerHandle | None = None
        self.heartbeat = Heartbeat(self, self._loop)
        self.last_command = self._loop.time()
        self.blocked_since = 0.0
        # Input: what is left of an unfinished command, and what reading it waits for.
        self._held: bytearray | None = None
        self._fill = 0
        self._waiting = False
        #: The client does not read its answers: reading goes on when it has.
        self._unread = False
        #: What is still to be unpacked of the last reads.
        self._pieces: Iterator[bytes] | None = None
        #: What a command lacks that is not all there.
        self.missing: Missing | None = None
        #: The last publish, if the next one may be like it.
        self.publish_line = b""
        self.publish_topic: Topic | None = None
        #: Was the last publish like the one before it? True before the first one.
        self.steady = True
        #: The lane for what this client sends all the time: publishes like the last one, or FINs.
        self.lane: PublishLane | FinishLane | None = None
        self._single: Commit | None = None
        self._socket: socket.socket = cast(socket.socket, None)
        #: A plain socket that frames may be written to as they are; -1 where they must go through the transport.
        self.fd = -1
        # Output: frames of this turn, and answers that wait for a commit in front of them; a number there is a RDY.
        self._out: list[bytes] = []
        self.answers: deque[tuple[Commit, str] | bytes | int] = deque()
        #: How many RDYs wait there.
        self.readies = 0

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
            self.identity.came_from(str(peer[0]))
            self.remote_address = f"[{peer[0]}]:{peer[1]}" if ":" in str(peer[0]) else f"{peer[0]}:{peer[1]}"
            if sock is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self.remote_address = "@"
        self.heartbeat.await_magic()
        self.broker.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            logger.debug("client(%s): connection lost - %s", self.remote_address, exc)
        if self._linger is not None:
            # It would keep all that this connection holds, a quarter of a megabyte with deflate.
            self._linger.cancel()
        self._leave()

    def _leave(self) -> None:
        """No longer a consumer, no longer in the table; safe to call twice."""
        self.heartbeat.stop()
        if self.authorization is not None:
            self.authorization.cancel()
        if self.upgrade is not None:
            self.upgrade.cancel()
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
        if self.upgrade is not None and self._writable and (last := self.upgrade.goodbye()):
            self._transport.write(last)

    def pause_writing(self) -> None:
        self._writable = False
        self.blocked_since = self._loop.time()

    def resume_writing(self) -> None:
        self._writable = True
        self.blocked_since = 0.0
        if self._unread:
            self._unread = False
            self._resume()
        if self.channel is not None and not self._closing:
            self.channel.wake(self)
            self.channel.pump()

    @property
    def may_publish(self) -> bool:
        """May the client publish to any topic, without a question to anybody?"""
        return self.authorization is None and self.allowed is commands.COMMANDS

    @property
    def room(self) -> int:
        """How many more messages this client may be sent now: RDY is a level."""
        if not self._writable or self._closing:
            return 0
        return self.ready_count - self.in_flight

    def take_timeout(self, msg_timeout: int) -> None:
        """How long the channel gives its consumers; one that has asked for another time keeps that."""
        if not self.identity.own_timeout:
            self.msg_timeout = msg_timeout
        if not self.identity.own_deliver_timeout:
            self.deliver_timeout = msg_timeout

    def send_run(self, frames: memoryview) -> None:
        """Send message frames. Never raises, awaits or calls back into a channel."""
        self._write(frames)

    # --- Time ------------------------------------------------------------------------------------------------------

    @property
    def is_held_up(self) -> bool:
        """Does the client wait for us?"""
        return self._waiting or self._shaking_hands

    def heard(self, now: float) -> None:
        """The client is not silent."""
        self.last_command = now

    def time_out(self) -> None:
        """The client was silent for too long. One that has not sent all of a command is told so."""
        if self.missing is not None and self._held is not None and self._writable and not self._waiting:
            self._error(self.missing.error())
            self._flush()
        else:
            self.drop()

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
        """Is there nothing under way here, so that a publish can take a lane?"""
        return not (
            (self._single is not None and not self._single.done)
            or self._held is not None
            or self.answers
            or self._closing
            or not self._writable
        )

    def published(self, topic: Topic, count: int, commit: Commit | None, now: float) -> None:
        """A publish came a lane. Its answer comes with the commit; without one ``OK`` was sent already."""
        self.last_command = now
        self.steady = True
        self.publish_counts[topic.name] += count
        if commit is not None:
            self._single = commit
            commit.sessions.append(self)

    def refused(self, error: Exception | None) -> None:
        self._single = None
        if not self._closing and isinstance(self.lane, PublishLane):
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
        self.answers.append((commit, self.lane.verb if isinstance(self.lane, PublishLane) else "PUB"))

    def _unpack(self, codec: Codec, data: bytes) -> None:
        pieces = codec.decompress(data)
        self._pieces = pieces if self._pieces is None else chain(self._pieces, pieces)
        if self._waiting:
            return
        if self._shaking_hands:
            # A handshake costs as much as hundreds of commands: it has its share of a turn with the backlog, so that
            # many of them at once do not come before what others have sent.
            self.wait(self.broker.backlog.add)
        else:
            self._unpack_some()

    def _unpack_some(self) -> None:
        """Run what comes out of the layers, a bounded part per loop turn, and no more of it than commands ask for."""
        pieces, codec = self._pieces, self._codec
        if pieces is None:
            return
        room = UNPACK_AT_ONCE
        now = self._loop.time
        deadline = now() + SECONDS_AT_ONCE
        try:
            while not self._waiting:
                piece = next(pieces, None)
                if piece is None or self._closing:
                    break
                if not piece:
                    pass
                elif self._held is None:
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
                if self.upgrade is not None and self.upgrade.is_wasted(len(piece), self._progress):
                    self.drop()
                    break
                if not self._waiting and (room <= 0 or now() >= deadline):
                    self.wait(self.broker.backlog.add)
            else:
                return
        except EOFError:
            if not self.eof_received():
                self._transport.close()
        except ProtocolError as exc:
            if self._shaking_hands:
                self._handshake_failed(exc)
            else:
                logger.error("client(%s): %s", self.remote_address, exc)
                self.drop()
        self._pieces = None

    def _progress(self) -> int:
        return sum(self.publish_counts.values()) + self.finish_count + self.requeue_count

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
            if not self._writable:
                self._stop_while_unread()
        if len(self.answers) > MOST_ANSWERS and not self._waiting and not self._closing:
            self.wait(self.when_answered)
        if self.channel is not None and not self._closing:
            self.channel.pump()

    def _run(self, data: bytearray, stop: int) -> int:
        """Run whole commands from the start of ``data``; where the first unfinished one stands."""
        pos = 0
        now = self._loop.time
        began = now()
        count = 0
        if began >= self.granted_until:
            self.grant_expired()
        try:
            if not self._greeted:
                if stop < 4:
                    return 0
                if data[:4] != MAGIC_V2:
                    raise ProtocolError("E_BAD_PROTOCOL")
                self._greeted = True
                self.heartbeat.start()
                self.last_command = began
                pos = 4
            start = pos
            known = self.broker.publish_lines if self.may_publish else _NO_LINES
            most = COMMANDS_AT_ONCE if self.identified else COMMANDS_AT_FIRST
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
                    if line == self.publish_line:
                        self.steady = True
                        if self.lane is None and self.fd >= 0:
                            commands.take_lane(self, line)
                        after = commands.publish_again(self, line, data, newline + 1, stop)
                    elif line in known:
                        commands.publish_to(self, line, known[line])
                        after = commands.publish_again(self, line, data, newline + 1, stop)
                    else:
                        after = commands.run(self, line, data, newline + 1, stop)
                except ProtocolError as exc:
                    if exc.fatal:
                        raise
                    self._error(exc)
                    after = newline + 1
                if after < 0:
                    break
                self.missing = None
                pos = after
                count += 1
                if not count % LOOK_EVERY and (count >= most or now() - began >= SECONDS_AT_ONCE) and pos < stop:
                    # The others first; a command that waits for something goes on when that has happened.
                    if not self._waiting and not self._closing:
                        self.wait(self.broker.backlog.add)
                    break
            if pos != start:
                self.last_command = began
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
        if self.missing is not None and not self._closing and self._held is not None:
            self._error(self.missing.error())
            self._flush()
            return True
        if self.answers:
            # Commits are under way: their answers are still owed.
            self._closing = True
            return True
        return False

    def wait(self, until: Callable[[Callable[[], None]], object]) -> int:
        """Read no further until something has happened; the command is then run again."""
        self._waiting = True
        self._transport.pause_reading()
        until(self._resume)
        return AGAIN

    def _stop_while_unread(self) -> None:
        """Read no further while the client does not read its answers: they would pile up here."""
        if not self._waiting and not self._closing:
            self._unread = True
            self.wait(_by_resume_writing)

    def _resume(self) -> None:
        if not self._waiting:
            return
        self._waiting = False
        if self._closing:
            return
        try:
            self._go_on()
        except Exception:
            logger.exception("client(%s): unexpected error", self.remote_address)
            self.drop()

    def _go_on(self) -> None:
        if self._held is not None:
            self._take(self._held, self._fill)
        if self._pieces is not None and not self._waiting and not self._closing:
            self._unpack_some()
        # Nothing but what was waited for is known: it may have to wait again.
        if not self._waiting and not self._closing:
            self._transport.resume_reading()

    # --- Output ----------------------------------------------------------------------------------------------------

    def answer(self, frame: bytes) -> None:
        """An answer, behind those that still wait for a commit."""
        if self.answers:
            self.answers.append(frame)
        else:
            self._out.append(frame)

    def send(self, frame: bytes) -> None:
        self._flush()
        self._write(frame)

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._write(b"".join(out))

    def answer_when(self, commit: Commit | None, verb: str) -> None:
        """``OK`` as soon as the commit is done, at once without one."""
        if commit is None:
            self.answer(OK_FRAME)
            return
        if not self.answers:
            commit.waiters.append(self._committed)
        elif self.answers[-1] != (commit, verb):
            commit.waiters.append(self._committed)
        self.answers.append((commit, verb))

    def _committed(self) -> None:
        """Some commit was resolved: send the answers that wait for none any more."""
        # A client that publishes to many topics in one turn gets their answers in few writes. One that consumes as well
        # gets them before the messages that they are for.
        if self._closing or self.channel is not None or not self.broker.turns.answer_later(self):
            self.send_answers()

    def send_answers(self) -> None:
        """Send the answers that wait for no commit any more."""
        answers = self.answers
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
            elif isinstance(answer, int):
                answers.popleft()
                self.readies -= 1
                self._flush()
                commands.make_ready(self, answer)
                if self.channel is not None:
                    self.broker.later(self.channel.pump)
            else:
                answers.popleft()
                self._out.append(answer)
        if self._out:
            self._flush()
            if not self._writable:
                self._stop_while_unread()
        if not answers and self._closing:
            self._farewell()

    def _error(self, error: ProtocolError) -> None:
        logger.error("client(%s): %s", self.remote_address, error)
        if not error.fatal:
            self.answer(encode_frame(FRAME_ERROR, str(error).encode("utf-8", "surrogateescape")))
        elif self.answers:
            # What was published before must be answered first; nothing more is read.
            self._closing = True
            self.answers.append(encode_frame(FRAME_ERROR, str(error).encode("utf-8", "surrogateescape")))
            self._transport.pause_reading()
        else:
            self._refuse(error)

    def _refuse(self, error: ProtocolError) -> None:
        """A fatal error: the frame, then the end."""
        self._out.append(encode_frame(FRAME_ERROR, str(error).encode("utf-8", "surrogateescape")))
        self.answers.clear()
        self.readies = 0
        self._flush()
        self._farewell()

    def _farewell(self) -> None:
        """Send what is left, take no more, and give the peer a moment to read it.

        Closing at once with unread input in the socket would reset the connection and could cost the peer the error.
        """
        self._leave()
        if self._transport.is_closing() or self._linger is not None:
            return
        self._say_goodbye()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
            self._linger = self._loop.call_later(LINGER, self._transport.abort)
        else:
            self._transport.close()

    # --- Layers ----------------------------------------------------------------------------------------------------

    def start_upgrade(self, tls: ssl.SSLContext | None, inner: Codec | None) -> None:
        """Give both directions another form from here on. TLS begins with a handshake, compression at once."""
        self._flush()
        self._leave_lane()
        self.fd = -1
        if self.upgrade is None:
            self.upgrade = Upgrade(
                self._transport, self._loop, self._send_record, self._upgraded, self._handshake_failed
            )
        # Heartbeats, for instance, that become due during the handshake are dropped.
        self._write = _nowhere
        self._codec = self.upgrade.start(tls, inner)

    def _send_record(self, data: bytes) -> None:
        """Send what TLS itself has to say: a client can make it speak again and again, by key updates for instance."""
        self._transport.write(data)
        if not self._writable:
            self._stop_while_unread()

    def _upgraded(self, write: Callable[[bytes | memoryview], None]) -> None:
        """The new form holds."""
        self.last_command = self._loop.time()
        self._write = write
        if self.tls_info is not None:
            self.allowed = commands.COMMANDS

    def _handshake_failed(self, error: ProtocolError) -> None:
        """Said in the clear, as in NSQ: there is nothing else that both sides understand."""
        if self.upgrade is not None:
            self.upgrade.cancel()
        self.upgrade = self._codec = None
        self._write = self._transport.write
        self._error(error)

    @property
    def _shaking_hands(self) -> bool:
        return self.upgrade is not None and self.upgrade.under_way

    @property
    def deflate(self) -> bool:
        return self.upgrade is not None and self.upgrade.deflate

    @property
    def snappy(self) -> bool:
        return self.upgrade is not None and self.upgrade.snappy

    @property
    def tls_info(self) -> dict[str, Any] | None:
        """What the handshake agreed on, in the words of NSQ's /stats; None without TLS."""
        return self.upgrade.tls_info if self.upgrade is not None else None

    # --- For commands ------------------------------------------------------------------------------------------------

    def lacks(self, code: str, text: str, parsed: tuple[int, int] = (0, 0)) -> int:
        """The command is not all there: remember the error that it gets if the rest never comes."""
        self.missing = Missing(code, text, parsed)
        return MORE

    def _leave_lane(self) -> None:
        """The next publish is looked at from the beginning."""
        if isinstance(self.lane, PublishLane):
            self.lane = None
        self.publish_line = b""
        self.publish_topic = None

    def when_answered(self, then: Callable[[], None]) -> None:
        """``then`` as soon as the first of the answers that are still owed has gone out."""

        def answered() -> None:
            self.broker.later(then)

        owed = self.answers[0]
        assert isinstance(owed, tuple)
        owed[0].waiters.append(answered)

    def trust_until(self, when: float) -> None:
        """The auth servers have granted something until then, by the loop's clock."""
        self.granted_until = when

    def grant_expired(self) -> None:
        if self.authorization is not None:
            self.authorization.expire()
        self.granted_until = inf
        self._leave_lane()

    @property
    def _grant(self) -> Grant | None:
        return self.authorization.grant if self.authorization is not None else None

    @property
    def authed(self) -> bool:
        return self._grant is not None

    @property
    def auth_identity(self) -> str:
        return self._grant.identity if self._grant is not None else ""

    @property
    def auth_identity_url(self) -> str:
        return self._grant.identity_url if self._grant is not None else ""


def _by_resume_writing(_: Callable[[], None]) -> None:
    """Stand for an event that ``Session.resume_writing`` brings about itself."""


def _nowhere(_: bytes | memoryview) -> None:
    """Where a session writes before it has a connection, and during a handshake."""
