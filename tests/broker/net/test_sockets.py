"""The Poller over real sockets, with receivers that do what sessions do in rare moments."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from flintmq.broker.net.sockets import Descriptors, Poller, SocketTransport
from flintmq.system import System
from support.fakes import until


class Receiver:
    """A session that does what it is told to when something can be read."""

    lane = None

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self.transport: SocketTransport
        self.received = b""
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, SocketTransport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def receive(self) -> None:
        data = self.transport.sock.recv(100)
        if not data:
            raise EOFError
        self.received += data
        self._act()

    def eof_received(self) -> bool | None:
        return False

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


async def test_a_session_that_stops_reading_in_a_turn_keeps_its_connection() -> None:
    """It was readable when the turn began; then it was sent more than its client takes, and reads no further."""
    loop = asyncio.get_running_loop()
    poller = Poller(loop, lambda: None, System(), Descriptors(loop.time, lambda: 0))
    sessions: list[Receiver] = []

    def stop_the_others() -> None:
        for other in sessions:
            if not other.received and other.transport.is_reading():
                other.transport.write(bytes(8 << 20))
                other.transport.pause_reading()

    def accepted() -> Receiver:
        sessions.append(Receiver(stop_the_others))
        return sessions[-1]

    listener = System().listen("127.0.0.1:0")
    poller.listen(listener, accepted)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    try:
        await until(lambda: len(sessions) == len(clients))
        for client in clients:
            client.sendall(b"ping")
        await until(lambda: any(session.received for session in sessions))
        stopped = [session for session in sessions if not session.received]
        # Also where the turn had no time for them, and another one sees to what was left.
        for client in clients:
            client.sendall(b"ping")
        await until(lambda: any(len(session.received) == 8 for session in sessions))
        await asyncio.sleep(0.05)
        assert [session.lost for session in stopped] == [[], []]
        # One that is gone is noticed all the same.
        for client in clients:
            client.close()
        await until(lambda: all(session.lost for session in sessions))
    finally:
        poller.close()
