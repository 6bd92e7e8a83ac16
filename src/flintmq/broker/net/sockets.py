"""Plain sockets on an epoll of their own inside the event loop: fewer steps per message than asyncio's transports.

A Poller owns the listening sockets and the plain client connections of a broker. All that is readable in one turn is
handed to the sessions, one after the other; then ``turned`` runs once, so that what they published together is
written and answered together. A ``SocketTransport`` behaves as asyncio's transports do, as far as a session asks, so
that a session does not know which of the two it has: systems without epoll have asyncio's.

No connection can keep the turn from the others. An exception in the handler of one is logged and closes that one. A
turn has a limit in time, after which asyncio's loop runs. A connection that has used up its share of a turn with
commands left over joins the ``Backlog``, which gives every member another share in the order in which they joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from flintmq.system import System, shares_of_descriptors

__all__ = ["Backlog", "Descriptors", "Poller", "SocketTransport", "available"]

logger = logging.getLogger(__name__)

#: Polls of the sockets, and seconds, after which asyncio's loop gets its turn.
_ROUNDS = 16
TURN_SECONDS = 0.002
_MOST_EVENTS = 256
#: Events of epoll. This module is also imported where there is none.
_READABLE: int = getattr(select, "EPOLLIN", 1)
_HUNG_UP: int = getattr(select, "EPOLLERR", 8) | getattr(select, "EPOLLHUP", 16)
_MOST_ACCEPTED = 64
#: What one system call takes.
_MOST_PARTS = 1000
#: Seconds between two log lines about connections that are refused.
LOG_AGAIN = 10.0
#: Empty polls before the loop sleeps, and turns that go without them after they were in vain again and again.
_LINGER_POLLS = 32
_MOST_PASSES = 1023
#: Instead of a mask of events: the socket is not registered with epoll.
_UNWATCHED = -1


def available() -> bool:
    return hasattr(select, "epoll")


class Receiver(Protocol):
    """A session, as a plain socket sees it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...

    lane: Any

    def receive(self) -> None:
        """Read what is there. EOFError or OSError when the connection has ended."""

    def eof_received(self) -> bool | None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class SocketTransport(asyncio.Transport):
    """One connection. Writes go out at once; what the peer does not take is kept, and the session told to wait."""

    def __init__(self, poller: Poller, sock: socket.socket, protocol: Receiver) -> None:
        super().__init__()
        self._poller = poller
        self.sock = sock
        self.fd = sock.fileno()
        self.protocol = protocol
        self._unsent = bytearray()
        self._reading = True
        self._closing = False
        self._lost = False
        self._eof_sent = False
        self._events = 0

    # --- Writing ---------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._closing or self._eof_sent:
            return
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as exc:
            self.fail(exc)
            return
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._watch()
            self.protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        """Several buffers in one go, without joining them first: some are large."""
        parts = list(list_of_data)
        if self._closing or self._eof_sent or self._unsent or len(parts) > _MOST_PARTS:
            self.write(b"".join(parts))
            return
        try:
            sent = self.sock.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as exc:
            self.fail(exc)
            return
        for part in parts:
            if sent < len(part):
                self._unsent += memoryview(part)[sent:]
            sent = max(0, sent - len(part))
        if self._unsent:
            self._watch()
            self.protocol.pause_writing()

    def flush(self) -> None:
        """Send more of what is unsent: the socket takes it."""
        if self._lost or not self._unsent:
            return
        try:
            sent = self.sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self.fail(exc)
            return
        del self._unsent[:sent]
        if self._unsent:
            return
        self._watch()
        if self._closing:
            self._lose(None)
            return
        if self._eof_sent:
            self._shut()
        try:
            self.protocol.resume_writing()
        except Exception:
            self.broken()

    def write_eof(self) -> None:
        if not self._eof_sent and not self._closing:
            self._eof_sent = True
            if not self._unsent:
                self._shut()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is nothing to set: a single unsent byte pauses the session."""

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    # --- Reading ---------------------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._watch()

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            self._watch()

    def is_reading(self) -> bool:
        return self._reading

    def _watch(self) -> None:
        events = (select.EPOLLIN if self._reading else 0) | (select.EPOLLOUT if self._unsent else 0)
        if events != self._events and not self._lost:
            if self._events == _UNWATCHED:
                self._poller.epoll.register(self.fd, events)
            else:
                self._poller.epoll.modify(self.fd, events)
            self._events = events

    def receive(self) -> None:
        """Let the protocol read from the socket. Never raises: an error in the protocol closes this connection."""
        if self._lost or not self._reading:
            # It was readable when it was asked about, and since then its session has stopped reading.
            return
        try:
            self.protocol.receive()
        except (BlockingIOError, InterruptedError):
            return
        except EOFError:
            self.ended()
        except OSError as exc:
            self.fail(exc)
        except Exception:
            self.broken()

    def hung_up(self) -> None:
        """Handle an error or the peer's hang-up: they are also reported of a socket that is not read."""
        if self._lost:
            return
        if self._reading:
            self.receive()
            return
        if self._unsent or self._closing:
            self.fail(ConnectionResetError(errno.ECONNRESET, "the peer is gone"))
            return
        # What the peer sent before may still be in the socket and in the session: it is served before the end. epoll
        # would report the hang-up again and again, so the socket is not watched until it is read again.
        self._poller.epoll.unregister(self.fd)
        self._events = _UNWATCHED

    def ended(self) -> None:
        """Handle the end of the peer's stream."""
        try:
            keep = self.protocol.eof_received()
        except Exception:
            self.broken()
            return
        if self._closing:
            return
        if keep:
            # Half open: answers may still go out, but an end that stays readable would spin the loop.
            self.pause_reading()
        else:
            self.close()

    # --- The end ---------------------------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return self.sock
        if name == "peername":
            try:
                return self.sock.getpeername()
            except OSError:
                return default
        return default

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self.pause_reading()
        if not self._unsent:
            self._poller.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._closing = True
        self._unsent.clear()
        if not self._lost:
            # Nothing more is handed to a protocol that may be broken.
            self.pause_reading()
            self._poller.loop.call_soon(self._lose, None)

    def broken(self) -> None:
        """Close the connection after an exception that nobody foresaw; called from its handler."""
        logger.exception("client(%s): unexpected error, the connection is closed", self._peer())
        self.abort()

    def _peer(self) -> str:
        peer = self.get_extra_info("peername")
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "@"

    def fail(self, exc: OSError) -> None:
        """The connection is gone; the session learns it in the next turn, never inside a write."""
        self._closing = True
        self._unsent.clear()
        self._poller.loop.call_soon(self._lose, exc)

    def _lose(self, exc: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._closing = True
        self._poller.forget(self)
        self.protocol.connection_lost(exc)


class Descriptors:
    """The connections' share of the process's file descriptors: storage opens its files with the rest.

    ``count`` returns how many connections there are, of all kinds. The numbers of descriptors say nothing about that.
    """

    def __init__(self, now: Callable[[], float], count: Callable[[], int]) -> None:
        self._now = now
        self._count = count
        _, self._most = shares_of_descriptors()
        self._refused = 0
        self._logged = -LOG_AGAIN

    def room(self) -> int:
        """Return how many more connections there is room for; less than 1 if there is none."""
        return self._most - self._count()

    def admit(self) -> bool:
        """Return whether there is room for one more connection; if not, it is logged now and then."""
        if self._count() < self._most:
            return True
        self._refused += 1
        now = self._now()
        if now - self._logged >= LOG_AGAIN:
            self._logged = now
            logger.error(
                "TCP: connections are refused, %d so far: %d are all that the limit of open files allows (ulimit -n)",
                self._refused,
                self._most,
            )
        return False


class Backlog:
    """Connections that have used up their share of a turn: each gets another one, in the order in which they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turned: Callable[[], None]) -> None:
        self._loop = loop
        self._turned = turned
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False

    @property
    def busy(self) -> bool:
        """Does a connection wait for its next share?"""
        return bool(self._waiting)

    def add(self, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` in one of the next turns of the loop."""
        self._waiting.append(go_on)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        now = self._loop.time
        deadline = now() + TURN_SECONDS
        waiting = self._waiting
        self._scheduled = False
        # Those that join while it runs have their next share in the next turn.
        for _ in range(len(waiting)):
            try:
                waiting.popleft()()
            except Exception:
                logger.exception("a connection failed in its share of the turn")
            if now() >= deadline:
                break
        self._turned()
        if waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)


class Poller:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, turned: Callable[[], None], system: System, descriptors: Descriptors
    ) -> None:
        self.loop = loop
        self._system = system
        self._turned = turned
        self.epoll = system.epoll()
        self._transports: dict[int, SocketTransport] = {}
        #: Events that the last turn had no time for.
        self._left: dict[int, int] = {}
        self._listeners: dict[int, tuple[socket.socket, Callable[[], Receiver]]] = {}
        self._accepted_at_once = 1
        #: Inside a turn: what becomes due is done at its end.
        self.turning = False
        self._paused = False
        self._descriptors = descriptors
        # Polling on in vain: turns that will not try it, and how many there will be after the next failure. On a single
        # CPU it would only keep the client from running.
        self._lingers = system.cpus() > 1
        self._passes = 0
        self._vain = 0
        loop.add_reader(self.epoll.fileno(), self._ready)

    def listen(self, sock: socket.socket, factory: Callable[[], Receiver]) -> None:
        self._listeners[sock.fileno()] = (sock, factory)
        self.epoll.register(sock.fileno(), select.EPOLLIN)

    def stop_listening(self) -> None:
        for fd, (sock, _) in self._listeners.items():
            if not self._paused:
                self.epoll.unregister(fd)
            sock.close()
        self._listeners.clear()

    def close(self) -> None:
        """No more connections; those that are left are closed by their sessions."""
        self.stop_listening()
        self.loop.remove_reader(self.epoll.fileno())
        for transport in list(self._transports.values()):
            transport.abort()
            transport._lose(None)
        self.epoll.close()

    def _ready(self) -> None:
        """Run turns: all that can be read, then what it leads to; again while there is more and there is time."""
        poll, now = self.epoll.poll, self.loop.time
        deadline = now() + TURN_SECONDS
        for _ in range(_ROUNDS):
            if self._left:
                events, self._left = list(self._left.items()), {}
            else:
                events = poll(0, _MOST_EVENTS) or self._linger()
                if not events:
                    return
            self._handle(events, deadline)
            self._turned()
            if now() >= deadline:
                return

    def _linger(self) -> list[tuple[int, int]]:
        """Poll on for some microseconds, and return what came.

        A client that waits for each answer sends its next command sooner than the loop falls asleep and wakes up. Where
        it did not, the next turns pass: one, three, seven, and so on.
        """
        if not self._lingers:
            return []
        if self._passes:
            self._passes -= 1
            return []
        poll = self.epoll.poll
        for _ in range(_LINGER_POLLS):
            events = poll(0, _MOST_EVENTS)
            if events:
                self._vain = 0
                return events
        self._vain = self._passes = min(2 * self._vain + 1, _MOST_PASSES)
        return []

    def _handle(self, events: list[tuple[int, int]], deadline: float) -> None:
        transports = self._transports
        lanes: list[Any] = []
        self.turning = True
        try:
            coming = iter(events)
            for fd, event in coming:
                transport = transports.get(fd)
                if transport is None:
                    if fd in self._listeners:
                        self._accept(*self._listeners[fd])
                    continue
                protocol = transport.protocol
                lane = protocol.lane
                if lane is not None and event == _READABLE:
                    arrived = lane.arrived
                    if not arrived:
                        lanes.append(lane)
                    arrived.append((protocol, transport))
                    continue
                if event & _HUNG_UP:
                    transport.hung_up()
                elif event & _READABLE:
                    transport.receive()
                if event & select.EPOLLOUT:
                    transport.flush()
                if self.loop.time() >= deadline:
                    self._left = dict(coming)
            for lane in lanes:
                try:
                    lane.run()
                except Exception:
                    logger.exception("%r: unexpected error", lane)
        finally:
            self.turning = False

    def _accept(self, listener: socket.socket, factory: Callable[[], Receiver]) -> None:
        # Counted once: each of them adds one at most.
        room = self._descriptors.room()
        # A connection that comes alone is not worth a second look; where more wait, the next turn takes twice as many.
        wanted, self._accepted_at_once = self._accepted_at_once, 1
        for _ in range(wanted):
            try:
                sock = self._system.accept(listener)
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                # Out of descriptors: leave the rest in the queue for a while, everybody else is served.
                logger.error("TCP: cannot accept a connection - %s", exc)
                self._pause_accepting()
                return
            room -= 1
            if room < 0 and not self._descriptors.admit():
                sock.close()
                continue
            sock.setblocking(False)
            protocol = factory()
            transport = SocketTransport(self, sock, protocol)
            self._transports[transport.fd] = transport
            transport._events = select.EPOLLIN
            self.epoll.register(transport.fd, select.EPOLLIN)
            try:
                protocol.connection_made(transport)
            except Exception:
                transport.broken()
        self._accepted_at_once = min(2 * wanted, _MOST_ACCEPTED)

    def _pause_accepting(self) -> None:
        if self._paused:
            return
        self._paused = True
        for fd in self._listeners:
            self.epoll.unregister(fd)

        def again() -> None:
            self._paused = False
            for fd in self._listeners:
                self.epoll.register(fd, select.EPOLLIN)

        self.loop.call_later(1.0, again)

    def release(self, transport: SocketTransport) -> None:
        if self._transports.pop(transport.fd, None) is not None:
            # The descriptor may be another connection's by the time they are handled.
            self._left.pop(transport.fd, None)
            with contextlib.suppress(OSError, ValueError):
                self.epoll.unregister(transport.fd)

    def forget(self, transport: SocketTransport) -> None:
        self.release(transport)
        transport.sock.close()
