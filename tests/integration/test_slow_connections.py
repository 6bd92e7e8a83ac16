"""Five thousand clients that send a byte every ten seconds: nobody else notices, and nothing is left of them.

Three processes: the broker, one that holds the slow connections (slow_clients.py), and the test, which measures what a
producer and a consumer see. Time is compared only with time on the same machine a moment before.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flintmq.protocol.wire import FRAME_MESSAGE, FrameDecoder, decode_message, encode_command
from support import slow_clients
from support.slow_clients import OPENINGS, PATIENCE

T = TypeVar("T")

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400)]

CONNECTIONS = 5_000
#: Seconds between two bytes of a connection.
INTERVAL = 10.0


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Enough of them for this process and those it starts."""
    needed = CONNECTIONS + 1_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed:
        yield
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"{needed} descriptors are needed, the system allows {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def until(condition: Callable[[], T]) -> T:
    """The first true value of the condition, which is looked at again and again."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


@contextlib.contextmanager
def process(*command: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, *command], text=True, **streams) as running:
        try:
            yield running
        finally:
            running.kill()


def open_sockets(pid: int) -> int:
    """Not all descriptors: files of messages come and go."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return count


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Pair:
    """A producer, with ``http`` one by HTTP, and a consumer: how long a message takes from one to the other."""

    def __init__(self, tcp: str, http: str = "") -> None:
        self._http = bool(http)
        self._producer = connect(http or tcp)
        self._consumer = connect(tcp)
        self._decoders = {self._producer: FrameDecoder(), self._consumer: FrameDecoder()}
        self._consumer.sendall(b"  V2SUB t c\nRDY 1\n")
        assert self._frame(self._consumer)[1] == b"OK"
        body = b"x" * 200
        if http:
            self._publish = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200\r\n\r\n" + body
        else:
            self._publish = encode_command(b"PUB", b"t", body=body)
            self._producer.sendall(b"  V2")

    def _frame(self, connection: socket.socket) -> tuple[int, bytes]:
        while True:
            data = connection.recv(65536)
            assert data, "the broker closed the connection"
            for kind, body in self._decoders[connection].feed(data):
                if body == b"_heartbeat_":
                    connection.sendall(b"NOP\n")
                else:
                    return kind, body

    def _answer(self) -> None:
        answer = b""
        while not answer.endswith(b"\r\n\r\nOK"):
            data = self._producer.recv(65536)
            assert data, f"the broker closed the connection: {answer!r}"
            answer += data
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")

    def p99(self, count: int = 1_000) -> float:
        """Of so many messages one after the other, the time that 99 of 100 stay below."""
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            self._producer.sendall(self._publish)
            if self._http:
                self._answer()
            else:
                assert self._frame(self._producer)[1] == b"OK"
            kind, body = self._frame(self._consumer)
            times.append(time.perf_counter() - begun)
            assert kind == FRAME_MESSAGE
            self._consumer.sendall(b"FIN %s\n" % decode_message(body).id)
        return sorted(times)[count * 99 // 100]

    def close(self) -> None:
        self._producer.close()
        self._consumer.close()


@contextlib.contextmanager
def running(path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A broker in a process of its own, and where it listens: for TCP, for HTTP."""
    addresses = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--https-address=")
    # To a file: thousands of connections that end in the middle of a command are thousands of lines.
    with (
        open(path / "log", "w+") as log,
        process("-m", "flintmq", "nsqd", f"--data-path={path}", *addresses, *flags, stderr=log) as broker,
    ):

        def listens(what: str) -> str:
            found = until(lambda: re.search(rf"\b{what}: listening on (\S+)\n", (path / "log").read_text()))
            return found[1]

        yield broker, listens("TCP"), listens("HTTP")
        broker.terminate()
        assert broker.wait(PATIENCE) == 0


@contextlib.contextmanager
def slow(path: Path, address: str, kind: str, count: int, interval: float) -> Iterator[Callable[[str], bool]]:
    """So many connections, each of which sends a byte every ``interval`` seconds; yields: have they said this?"""
    command = (slow_clients.__file__, address, kind, str(count), str(interval))
    words = path / kind
    with words.open("w") as output, process(*command, stdin=subprocess.PIPE, stdout=output) as clients:

        def said(word: str) -> bool:
            return word in words.read_text().splitlines()

        until(lambda: said("connected"))
        yield said
        assert clients.stdin is not None
        clients.stdin.close()
        assert clients.wait(PATIENCE) == 0


counted = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc, which is not here"
)


@counted
@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("kind", OPENINGS)
def test_slow_connections_cost_nobody_else_anything(tmp_path: Path, kind: str) -> None:
    # They shall stay, all of them: the worst for the broker.
    lenient = ("--http-header-timeout=1h", "--http-body-timeout=1h")
    by_http = kind.startswith("http")
    with (
        running(tmp_path, *lenient) as (broker, tcp, http),
        contextlib.closing(Pair(tcp, http if by_http else "")) as pair,
    ):
        pair.p99()
        # The best of some: what else happens on the machine makes times longer, never shorter.
        quiet = min(pair.p99() for _ in range(8))
        before = open_sockets(broker.pid)
        with slow(tmp_path, http if by_http else tcp, kind, CONNECTIONS, INTERVAL) as said:
            until(lambda: open_sockets(broker.pid) >= before + CONNECTIONS)
            windows = []
            while len(windows) < 8 or not said("each has sent"):
                windows.append(pair.p99())
            busy = min(windows)
            assert open_sockets(broker.pid) >= before + CONNECTIONS, "some were cut, and cost nothing for that reason"
        assert busy <= 2 * quiet, f"p99 {busy * 1e6:.0f} µs with slow connections, {quiet * 1e6:.0f} µs without"
        # All of them have ended, the broker notices, and goes on as ever.
        until(lambda: open_sockets(broker.pid) == before)
        pair.p99()


@counted
def test_slow_requests_are_cut_by_their_deadlines(tmp_path: Path) -> None:
    """A head has ten seconds if nothing else is said. Bytes that come now and then win nobody more time."""
    # The default of a body is a minute, which is long for a test.
    with (
        running(tmp_path, "--http-body-timeout=10s") as (broker, tcp, http),
        contextlib.closing(Pair(tcp, http)) as pair,
    ):
        pair.p99()
        before = open_sockets(broker.pid)
        with (
            slow(tmp_path, http, "http header", 200, 2.0) as said_by_heads,
            slow(tmp_path, http, "http body", 200, 2.0) as said_by_bodies,
        ):
            until(lambda: said_by_heads("all were cut") and said_by_bodies("all were cut"))
            until(lambda: open_sockets(broker.pid) == before)
        pair.p99()
