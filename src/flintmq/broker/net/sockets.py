"""Plain sockets on an epoll of their own inside the event loop: fewer steps per message than asyncio's transports.

A Poller owns the listening sockets and the plain client connections of a broker. All that is readable in one turn is
handed to the sessions, one after the other; then ``turned`` runs once, so that what they published together is
written and answered together. A ``SocketTransport`` behaves as asyncio's transports do, as far as a session asks, so
that a session does not know which of the two it has: systems without epoll have asyncio's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import socket
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from flintmq.system import System

__all__ = ["Poller", "SocketTransport", "available"]

logger = logging.getLogger(__name__)

#: How often the sockets are looked at again before the rest of the loop gets its turn.
_ROUNDS = 16
_MOST_EVENTS = 256
_ACCEPT_AT_ONCE = 64
#: What one system call takes.
_MOST_PARTS = 1000


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
        """The socket takes more."""
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
        self.protocol.resume_writing()

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
            self._events = events
            self._poller.epoll.modify(self.fd, events)

    def receive(self) -> None:
        """The socket can be read."""
        if self._lost:
            return
        if not self._reading:
            # Only an error or the peer's end can bring us here.
            self.fail(ConnectionResetError(errno.ECONNRESET, "the peer is gone"))
            return
        try:
            self.protocol.receive()
        except (BlockingIOError, InterruptedError):
            return
        except EOFError:
            self.ended()
        except OSError as exc:
            self.fail(exc)

    def ended(self) -> None:
        """The peer sends no more."""
        keep = self.protocol.eof_received()
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
            self._poller.loop.call_soon(self._lose, None)

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


class Poller:
    def __init__(self, loop: asyncio.AbstractEventLoop, turned: Callable[[], None], system: System) -> None:
        self.loop = loop
        self._system = system
        self._turned = turned
        self.epoll = system.epoll()
        self._transports: dict[int, SocketTransport] = {}
        self._listeners: dict[int, tuple[socket.socket, Callable[[], Receiver]]] = {}
        #: Inside a turn: what becomes due is done at its end.
        self.turning = False
        self._paused = False
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
        """Hand on all that can be read, end the turn, and look again as long as there is more."""
        poll = self.epoll.poll
        for _ in range(_ROUNDS):
            events = poll(0, _MOST_EVENTS)
            if not events:
                return
            self._handle(events)
            self._turned()

    def _handle(self, events: list[tuple[int, int]]) -> None:
        transports = self._transports
        lanes: list[Any] = []
        self.turning = True
        try:
            for fd, event in events:
                transport = transports.get(fd)
                if transport is None:
                    if fd in self._listeners:
                        self._accept(*self._listeners[fd])
                    continue
                lane = transport.protocol.lane
                if lane is not None and event == select.EPOLLIN:
                    if lane.add(transport.protocol, transport):
                        lanes.append(lane)
                    continue
                if event & ~select.EPOLLOUT:
                    transport.receive()
                if event & select.EPOLLOUT and not transport._lost:
                    transport.flush()
            for lane in lanes:
                lane.run()
        finally:
            self.turning = False

    def _accept(self, listener: socket.socket, factory: Callable[[], Receiver]) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock = self._system.accept(listener)
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                # Out of descriptors: leave the rest in the queue for a while, everybody else is served.
                logger.error("TCP: cannot accept a connection - %s", exc)
                self._pause_accepting()
                return
            sock.setblocking(False)
            protocol = factory()
            transport = SocketTransport(self, sock, protocol)
            self._transports[transport.fd] = transport
            transport._events = select.EPOLLIN
            self.epoll.register(transport.fd, select.EPOLLIN)
            protocol.connection_made(transport)

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
            with contextlib.suppress(OSError, ValueError):
                self.epoll.unregister(transport.fd)

    def forget(self, transport: SocketTransport) -> None:
        self.release(transport)
        transport.sock.close()
