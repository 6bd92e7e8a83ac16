"""The Poller over real sockets, with receivers that do what sessions do in rare moments."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flintmq.broker.net import sockets
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


class CountedPolls(System):
    """A system that counts the polls that found nothing, and does something then."""

    def __init__(self, cpus: int = 2) -> None:
        super().__init__()
        self._cpus = cpus
        self.empty = 0
        self.on_empty: Callable[[], None] = lambda: None

    def cpus(self) -> int:
        return self._cpus

    def epoll(self) -> Any:
        return _Counted(self, select.epoll())


class _Counted:
    def __init__(self, system: CountedPolls, epoll: select.epoll) -> None:
        self._system = system
        self._epoll = epoll

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        events = self._epoll.poll(timeout, most)
        if not events:
            self._system.empty += 1
            self._system.on_empty()
        return events


class OneClient:
    """A connection whose every command is a byte, and the turns in which it was heard."""

    def __init__(self, poller: Poller, session: Receiver, sock: socket.socket) -> None:
        self.poller = poller
        self.session = session
        self.sock = sock
        self.wakes: list[int] = []
        real = poller._ready

        def ready() -> None:
            before = len(session.received)
            real()
            self.wakes.append(len(session.received) - before)

        poller.loop.remove_reader(poller.epoll.fileno())
        poller.loop.add_reader(poller.epoll.fileno(), ready)

    async def say(self) -> None:
        """Send a command and wait until it was heard."""
        heard = len(self.session.received) + 1
        self.sock.sendall(b"x")
        await until(lambda: len(self.session.received) >= heard)


@asynccontextmanager
async def one_client(system: System) -> AsyncIterator[OneClient]:
    loop = asyncio.get_running_loop()
    poller = Poller(loop, lambda: None, system, Descriptors(loop.time, lambda: 0))
    sessions: list[Receiver] = []

    def accepted() -> Receiver:
        sessions.append(Receiver(lambda: None))
        return sessions[-1]

    listener = system.listen("127.0.0.1:0")
    poller.listen(listener, accepted)
    with socket.create_connection(listener.getsockname()) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await until(lambda: bool(sessions))
        try:
            yield OneClient(poller, sessions[0], sock)
        finally:
            poller.close()


@pytest.mark.parametrize("polls", [1, 5, 20])
async def test_a_client_that_sends_on_at_once_is_heard_before_the_loop_sleeps(
    polls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a turn may be over before the client has sent on.
    monkeypatch.setattr(sockets, "TURN_SECONDS", 60)
    system = CountedPolls()
    async with one_client(system) as client:
        empty = sent = 0

        def send_on() -> None:
            nonlocal empty, sent
            empty += 1
            if empty % polls == 0 and sent < 8:
                sent += 1
                client.sock.sendall(b"x")

        # Its last command came as soon.
        client.poller._passes = client.poller._vain = 0
        system.on_empty = send_on
        await client.say()
        await until(lambda: len(client.session.received) == 9)
        assert max(client.wakes) == 9, client.wakes


async def test_polling_on_in_vain_becomes_rare() -> None:
    system = CountedPolls()
    async with one_client(system) as client:
        for _ in range(300):
            await client.say()
            # Whatever is still under way ends before the next command.
            await asyncio.sleep(0)
        before, turns = system.empty, len(client.wakes)
        for _ in range(300):
            await client.say()
            await asyncio.sleep(0)
        # An empty poll ends every turn; polling on adds few.
        assert system.empty - before < 1.2 * (len(client.wakes) - turns)


async def test_nobody_polls_on_where_the_client_needs_the_cpu() -> None:
    system = CountedPolls(cpus=1)
    async with one_client(system) as client:
        before = system.empty
        for _ in range(10):
            await client.say()
        assert system.empty - before <= len(client.wakes)
