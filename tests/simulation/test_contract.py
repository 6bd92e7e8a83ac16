"""The simulated sockets, epoll and files behave as the real ones: the same calls give the same results."""

from __future__ import annotations

import errno
import os
import random
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flintmq import kernel
from flintmq.system import System

from .machine import Machine
from .network import Network
from .world import World

SEEDS = 60
WATCHED = select.EPOLLIN | select.EPOLLOUT


def result_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]


class Pair:
    """Two ends of a connection, an epoll, and time in which what was sent arrives."""

    def __init__(self, ends: tuple[Any, Any], epoll: Any, arrive: Callable[[], object]) -> None:
        self.ends = ends
        self.epoll = epoll
        self.arrive = arrive
        self.open = [True, True]
        for end in ends:
            epoll.register(end.fileno(), WATCHED)

    def do(self, end: int, kind: str, data: bytes) -> Any:
        sock = self.ends[end]
        result = None
        if kind == "send":
            result = result_of(lambda: sock.send(data))
        elif kind == "recv":
            result = result_of(lambda: sock.recv(len(data)))
        elif kind == "recv_into":
            buffer = bytearray(len(data))
            size = result_of(lambda: sock.recv_into(buffer))
            result = bytes(buffer[:size]) if isinstance(size, int) else size
        elif kind == "shutdown":
            result = result_of(lambda: sock.shutdown(socket.SHUT_WR))
        elif kind == "close":
            self.open[end] = False
            sock.close()
        self.arrive()
        events = dict(self.epoll.poll(0))
        shown = [
            events.get(sock.fileno(), 0) & ~select.EPOLLRDHUP if self.open[n] else None
            for n, sock in enumerate(self.ends)
        ]
        return kind, end, result, shown


def real_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
    for end in (near, far):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Pair((near, far), select.epoll(), lambda: None)


def simulated_pair() -> Pair:
    world = World(1)
    network = Network(world)
    machine = Machine(world, network, "10.0.0.1", Path("/simulated"), 1)
    listener = machine.listen("10.0.0.1:4150")
    near = network.connect(("10.0.0.1", 4150), "10.0.0.1")
    world.run_for(0.1)
    far = listener.accept()[0]
    near.adopt(machine)
    return Pair((near, far), machine.epoll(), lambda: world.run_for(0.1))


def calls_on_sockets(seed: int) -> list[tuple[int, str, bytes]]:
    rng = random.Random(seed)
    calls, closed = [], [False, False]
    for _ in range(14):
        end = rng.randrange(2)
        if closed[end]:
            continue
        kind = rng.choices(["send", "recv", "recv_into", "shutdown", "close"], [6, 5, 5, 1, 1])[0]
        closed[end] = kind == "close"
        calls.append((end, kind, b"x" * rng.choice([1, 10, 1000])))
    return calls


@pytest.fixture(autouse=True)
def table() -> Any:
    before = kernel.replace_calls(None)
    yield
    kernel.replace_calls(before)


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="there is no epoll")
def test_sockets_and_epoll() -> None:
    for seed in range(SEEDS):
        calls = calls_on_sockets(seed)
        real, simulated = real_pair(), simulated_pair()
        try:
            expected = [real.do(*call) for call in calls]
        finally:
            for end in real.ends:
                end.close()
            real.epoll.close()
        assert [simulated.do(*call) for call in calls] == expected, f"seed {seed}"


def calls_on_files(seed: int) -> list[tuple[str, str, int, bytes]]:
    rng = random.Random(seed)
    kinds = [
        "create",
        "open",
        "write",
        "read",
        "truncate",
        "cut",
        "size",
        "rename",
        "unlink",
        "list",
        "mkdir",
        "rmdir",
        "close",
    ]
    return [
        (rng.choice(kinds), rng.choice("abc"), rng.choice([0, 3, 5000]), rng.randbytes(rng.choice([1, 100, 9000])))
        for _ in range(40)
    ]


class Files:
    """A table of system calls and the folder it works in; descriptors are shown as the order of their opening."""

    def __init__(self, system: System, root: Path) -> None:
        self.system = system
        self.root = root
        self.files: list[int] = []

    def do(self, kind: str, name: str, offset: int, data: bytes) -> Any:
        system, path = self.system, self.root / name
        fd = self.files[-1] if self.files else -1

        def opened(flags: int) -> str:
            self.files.append(system.open(path, os.O_RDWR | flags))
            return "opened"

        calls: dict[str, Callable[[], Any]] = {
            "create": lambda: opened(os.O_CREAT | os.O_EXCL),
            "open": lambda: opened(0),
            "write": lambda: system.pwritev(fd, [data[:1], data[1:]], offset),
            "read": lambda: system.pread(fd, len(data), offset),
            "truncate": lambda: system.ftruncate(fd, offset),
            "cut": lambda: system.truncate(path, offset),
            "size": lambda: system.size(fd),
            "rename": lambda: system.rename(path, self.root / "c"),
            "unlink": lambda: system.unlink(path),
            "list": lambda: sorted(system.listdir(self.root)),
            "mkdir": lambda: system.mkdir(self.root / "d"),
            "rmdir": lambda: system.rmdir(self.root / "d"),
            "close": lambda: system.close(self.files.pop() if self.files else -1),
        }
        return kind, name, result_of(calls[kind])

    def end(self) -> None:
        for fd in self.files:
            self.system.close(fd)


def test_files(tmp_path: Path) -> None:
    for seed in range(SEEDS):
        root = tmp_path / str(seed)
        root.mkdir()
        world = World(1)
        real = Files(System(), root)
        simulated = Files(Machine(world, Network(world), "10.0.0.1", Path("/simulated"), 1), Path("/simulated"))
        calls = calls_on_files(seed)
        try:
            expected = [real.do(*call) for call in calls]
        finally:
            real.end()
        assert [simulated.do(*call) for call in calls] == expected, f"seed {seed}"


def test_descriptors_are_the_lowest_free_ones_and_leave_epoll_when_they_are_closed() -> None:
    world = World(1)
    network = Network(world)
    machine = Machine(world, network, "10.0.0.1", Path("/simulated"), 1)
    listener, epoll = machine.listen("10.0.0.1:4150"), machine.epoll()
    made = []
    for _ in range(3):
        network.connect(("10.0.0.1", 4150), "10.0.0.2")
        world.run_for(0.1)
        made.append(listener.accept()[0])
        epoll.register(made[-1].fileno(), select.EPOLLOUT)
    freed = made[1].fileno()
    made[1].close()
    assert freed not in dict(epoll.poll())
    network.connect(("10.0.0.1", 4150), "10.0.0.2")
    world.run_for(0.1)
    assert listener.accept()[0].fileno() == freed
    with pytest.raises(FileNotFoundError):
        epoll.modify(freed, 0)
