"""A simulated network of stream sockets, with the methods of `socket.socket`, so that asyncio's transports run over it.

A connection is two Sockets and the Link between them: its delay, its window, and what is wrong with it. A link that is
*half open* swallows everything and tells nobody, as when a cable is pulled; one that is *cut* resets both ends.
Scripted peers set `on_data`; event loops see the sockets through their selector.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any, Protocol

from .world import World

__all__ = ["Link", "Listener", "Network", "Owner", "Socket"]

#: Bytes on their way or unread, beyond which a sender must wait.
WINDOW = 256 << 10

READ, WRITE = 1, 2


class Owner(Protocol):
    """A machine, as its sockets see it."""

    dead: bool
    stirred: bool

    def take_descriptor(self, owner: Any) -> int: ...

    def give_descriptor(self, number: int) -> None: ...

    def socket_call(self, kind: str) -> None:
        """A system call is made; it may fail, or be the last one."""

    def moved(self, kind: str, data: bytes) -> None:
        """So many bytes came, or went."""


class Link:
    """What both ends share."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.half_open = False
        self.window = WINDOW
        #: Share of the writes that arrive in pieces.
        self.fragments = 0.0


class Socket:
    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(self, world: World, name: tuple[str, int], link: Link) -> None:
        self.world = world
        self.name = name
        self.link = link
        self.peer: Socket | None = None
        self.inbox = bytearray()
        self.eof = False
        self.error = 0
        self.closed = False
        #: Its machine is gone: nobody answers, not even that it is closed.
        self.silent = False
        #: Bytes that the other side has not taken yet.
        self.outstanding = 0
        #: Called when something came, for peers that are no event loop; not while `paused`.
        self.on_data: Callable[[Socket], object] | None = None
        self.paused = False
        #: Sees every write of this end, at the moment it is made.
        self.tap: Callable[[bytes], object] | None = None
        self._shut = False
        self._gone = False
        self._arrives = 0
        self._fd = world.open_descriptor(self)
        #: The machine whose process has it; its calls are counted there, and none has an effect once it is dead.
        self.owner: Owner | None = None

    def adopt(self, owner: Owner) -> None:
        """It becomes a descriptor of a machine's process. OSError if there is none left."""
        number = owner.take_descriptor(self)
        self.world.close_descriptor(self._fd)
        self._fd = number
        self.owner = owner

    # --- As socket.socket --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.closed else self._fd

    def gettimeout(self) -> float:
        return 0.0

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *args: Any) -> None: ...

    def getsockopt(self, level: int, option: int, *rest: Any) -> int:
        return self.error if option == socket.SO_ERROR else 0

    def getsockname(self) -> tuple[str, int]:
        return self.name

    def getpeername(self) -> tuple[str, int]:
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.peer.name

    def recv(self, size: int) -> bytes:
        if self.owner is not None:
            self.owner.socket_call("recv")
        if self.inbox and not self.closed:
            # Also after a reset: what had come is there.
            data = bytes(self.inbox[:size])
            del self.inbox[:size]
            self._taken(len(data))
            if self.owner is not None:
                self.owner.moved("recv", data)
            return data
        if self.eof and not self.closed:
            return b""
        self._check()
        raise BlockingIOError(errno.EAGAIN, "nothing there")

    def recv_into(self, buffer: Any) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def send(self, data: Any) -> int:
        if self.owner is not None:
            self.owner.socket_call("send")
        self._check()
        if self._shut or self.peer is None:
            raise BrokenPipeError(errno.EPIPE, "shut down")
        room = self.link.window - self.outstanding
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "no room")
        piece = bytes(data[:room])
        self.outstanding += len(piece)
        if self.tap is not None:
            self.tap(piece)
        if self.owner is not None:
            self.owner.moved("send", piece)
        sent = len(piece)
        while self.link.fragments and len(piece) > 1 and self.world.rng.random() < self.link.fragments:
            cut = self.world.rng.randrange(1, len(piece))
            first, piece = piece[:cut], piece[cut:]
            self._later(lambda peer, first=first: peer._receive(first))  # type: ignore[misc]
        self._later(lambda peer: peer._receive(piece))
        return sent

    def sendmsg(self, buffers: Any) -> int:
        return self.send(b"".join(buffers))

    def shutdown(self, how: int) -> None:
        if self.owner is not None:
            self.owner.socket_call("shutdown")
        if self.error or self._gone:
            raise OSError(errno.ENOTCONN, "not connected")
        if how in (socket.SHUT_WR, socket.SHUT_RDWR) and not self._shut and not self.closed:
            self._shut = True
            self._later(Socket._end)

    def close(self) -> None:
        if self.closed:
            return
        if self.owner is not None:
            if self.owner.dead:
                return
            self.owner.socket_call("close")
            self.owner.give_descriptor(self._fd)
        else:
            self.world.close_descriptor(self._fd)
        self._close()

    def _close(self) -> None:
        self.closed = True
        if self.inbox:
            # With input unread a close is a reset.
            self._later(Socket._reset)
        elif not self._shut:
            self._shut = True
            self._later(Socket._end)

    # --- Faults ------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Reset both ends."""
        for end in (self, self.peer):
            if end is not None:
                end._reset()

    def resume(self) -> None:
        self.paused = False
        self._tell()

    # --- Inside ------------------------------------------------------------------------------------------------------

    def ready(self) -> int:
        """READ and WRITE, as an event loop asks."""
        if self.error:
            return READ | WRITE
        return (READ if self.inbox or self.eof else 0) | (WRITE if self.outstanding < self.link.window else 0)

    def _check(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, "closed")
        if self.error:
            # It is told once; from then on the connection is at its end.
            error, self.error = self.error, 0
            self.eof = self._shut = self._gone = True
            raise OSError(error, "reset by the simulation")

    def _later(self, action: Callable[[Socket], object]) -> None:
        """Something reaches the other side; in the order it was sent."""
        peer = self.peer
        if peer is None:
            return
        delay = self.link.delay * self.world.rng.uniform(0.5, 1.5)
        self._arrives = max(self._arrives, self.world.now + round(delay * 1e9))

        def arrive() -> None:
            if not self.link.half_open:
                action(peer)

        self.world.after((self._arrives - self.world.now) / 1e9, arrive)

    def _receive(self, data: bytes) -> None:
        if self.closed:
            # Nobody is there any more: the sender is told.
            if self.peer is not None and not self.silent:
                self._later(Socket._reset)
            return
        if self.error or self.eof:
            return
        self.inbox += data
        self._tell()

    def _end(self) -> None:
        if not self.closed and not self.error:
            self.eof = True
            self._tell()

    def _reset(self) -> None:
        if not self.closed and not self.error:
            self.error = errno.EPIPE if self.eof else errno.ECONNRESET
            self._tell()

    def _tell(self) -> None:
        if self.owner is not None:
            self.owner.stirred = True
        if self.on_data is not None and not self.paused and not self.closed:
            self.on_data(self)

    def _taken(self, size: int) -> None:
        peer = self.peer
        if peer is not None and not self.link.half_open:
            peer.outstanding -= size
            if peer.owner is not None:
                peer.owner.stirred = True


class Listener:
    """A listening socket: `on_accept` is called with each connection, or an event loop accepts them."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM

    def __init__(
        self, network: Network, address: tuple[str, int], on_accept: Callable[[Socket], object] | None
    ) -> None:
        self.network = network
        self.address = address
        self.on_accept = on_accept
        self.backlog: list[Socket] = []
        self.closed = False
        self.owner: Owner | None = None
        self._fd = network.world.open_descriptor(self)
        network.listeners[address] = self

    def adopt(self, owner: Owner) -> None:
        number = owner.take_descriptor(self)
        self.network.world.close_descriptor(self._fd)
        self._fd = number
        self.owner = owner

    def setblocking(self, flag: bool) -> None: ...

    def listen(self, backlog: int = 0) -> None: ...

    def fileno(self) -> int:
        return self._fd

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        if self.owner is not None:
            self.owner.socket_call("accept")
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "nobody there")
        made = self.backlog[0]
        if self.owner is not None:
            made.adopt(self.owner)
        del self.backlog[0]
        return made, made.getpeername()

    def ready(self) -> int:
        return READ if self.backlog else 0

    def close(self) -> None:
        if not self.closed:
            if self.owner is not None:
                if self.owner.dead:
                    return
                self.owner.socket_call("close")
                self.owner.give_descriptor(self._fd)
            else:
                self.network.world.close_descriptor(self._fd)
            self._close()

    def _close(self) -> None:
        """Nobody is called here any more; those that wait are turned away."""
        if not self.closed:
            self.closed = True
            for sock in self.backlog:
                sock.cut()
            self.backlog.clear()
            if self.network.listeners.get(self.address) is self:
                del self.network.listeners[self.address]

    def _arrived(self, sock: Socket) -> None:
        if self.closed:
            sock.cut()
        elif self.on_accept is not None:
            self.on_accept(sock)
            if sock.inbox or sock.eof or sock.error:
                sock._tell()  # it came before
        else:
            self.backlog.append(sock)
            if self.owner is not None:
                self.owner.stirred = True


class Network:
    """Who listens where, who is called what, and which addresses swallow every packet."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.names: dict[str, str] = {}
        #: Nobody answers there, not even with a refusal.
        self.black_holes: set[tuple[str, int]] = set()
        #: Seconds one way, by host.
        self.delays: dict[str, float] = {}
        self._port = 30_000

    def listen(self, address: tuple[str, int], on_accept: Callable[[Socket], object] | None = None) -> Listener:
        if address in self.listeners:
            raise OSError(errno.EADDRINUSE, f"{address} is taken")
        return Listener(self, address, on_accept)

    def resolve(self, host: str) -> str:
        """As getaddrinfo: the same errors for names that cannot be, and for those that nobody knows."""
        host.encode("idna")
        if host in self.names:
            return self.names[host]
        if host.replace(".", "").isdigit():
            return host
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def delay(self, host: str) -> float:
        return self.delays.get(host, 0.0002)

    def connect(self, address: tuple[str, int], host: str) -> Socket:
        """The near end of a new connection, once the far end has agreed."""
        listener = self.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"connection to {address} refused")
        link = Link(self.delay(address[0]))
        self._port += 1
        near = Socket(self.world, (host, self._port), link)
        far = Socket(self.world, address, link)
        near.peer, far.peer = far, near
        self.world.after(link.delay, lambda: listener._arrived(far))
        return near
