"""Five thousand clients that send a byte every ten seconds: nobody else notices, and nothing is left of them.

Three processes: the broker, one that holds the slow connections (slow_clients.py), and the test, which measures what a
producer and a consumer see. Time is compared only with time on the same machine a moment before.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import slow_clients
from slow_clients import CONNECTIONS, OPENINGS, PATIENCE

from flintmq.broker.daemon import Broker
from flintmq.wire import FRAME_MESSAGE, FrameDecoder, decode_message, encode_command

T = TypeVar("T")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HAS_HTTP = hasattr(Broker, "http_address")
KINDS = [kind for kind in OPENINGS if HAS_HTTP or not kind.startswith("http")]


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


class Pair:
    """A producer and a consumer: how long a message takes from one to the other."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._producer = socket.create_connection((host, int(port)), timeout=PATIENCE)
        self._consumer = socket.create_connection((host, int(port)), timeout=PATIENCE)
        for connection in (self._producer, self._consumer):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(b"  V2")
        self._consumer.sendall(b"SUB t c\nRDY 1\n")
        self._decoders = {self._producer: FrameDecoder(), self._consumer: FrameDecoder()}
        assert self._frame(self._consumer)[1] == b"OK"

    def _frame(self, connection: socket.socket) -> tuple[int, bytes]:
        while True:
            data = connection.recv(65536)
            assert data, "the broker closed the connection"
            for kind, body in self._decoders[connection].feed(data):
                if body == b"_heartbeat_":
                    connection.sendall(b"NOP\n")
                else:
                    return kind, body

    def p99(self, count: int = 1_000) -> float:
        """Of so many messages one after the other, the time that 99 of 100 stay below."""
        times = []
        command = encode_command(b"PUB", b"t", body=b"x" * 200)
        for _ in range(count):
            begun = time.perf_counter()
            self._producer.sendall(command)
            assert self._frame(self._producer)[1] == b"OK"
            kind, body = self._frame(self._consumer)
            times.append(time.perf_counter() - begun)
            assert kind == FRAME_MESSAGE
            self._consumer.sendall(b"FIN %s\n" % decode_message(body).id)
        return sorted(times)[count * 99 // 100]

    def close(self) -> None:
        self._producer.close()
        self._consumer.close()


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc, which is not here")
@pytest.mark.parametrize("kind", KINDS)
def test_slow_connections_cost_nobody_else_anything(tmp_path: Path, kind: str) -> None:
    http = "127.0.0.1:0" if kind.startswith("http") else ""
    flags = (f"--data-path={tmp_path}", "--tcp-address=127.0.0.1:0", f"--http-address={http}", "--https-address=")
    # To a file: thousands of connections that end in the middle of a command are thousands of lines.
    with (
        open(tmp_path / "log", "w+") as log,
        process("-m", "flintmq", "nsqd", *flags, stderr=log) as broker,
        contextlib.ExitStack() as stack,
    ):

        def listens(what: str) -> str:
            found = until(lambda: re.search(rf"{what}: listening on (\S+)\n", (tmp_path / "log").read_text()))
            return found[1]

        address = listens("TCP")
        pair = Pair(address)
        stack.callback(pair.close)
        pair.p99()
        # The best of some: what else happens on the machine makes times longer, never shorter.
        quiet = min(pair.p99() for _ in range(8))
        before = open_sockets(broker.pid)
        pipe = subprocess.PIPE
        slow = stack.enter_context(
            process(slow_clients.__file__, listens("HTTP") if http else address, kind, stdin=pipe, stdout=pipe)
        )
        assert slow.stdout is not None and slow.stdin is not None
        assert slow.stdout.readline() == "connected\n"
        until(lambda: open_sockets(broker.pid) >= before + CONNECTIONS)
        windows = []
        while len(windows) < 8 or not select.select([slow.stdout], [], [], 0)[0]:
            windows.append(pair.p99())
        assert slow.stdout.readline() == "each has sent\n"
        busy = min(windows)
        slow.stdin.close()
        assert slow.wait(PATIENCE) == 0
        assert busy <= 2 * quiet, f"p99 {busy * 1e6:.0f} µs with slow connections, {quiet * 1e6:.0f} µs without"
        # All of them have ended, the broker notices, and goes on as ever.
        until(lambda: open_sockets(broker.pid) == before)
        pair.p99()
        broker.terminate()
        assert broker.wait(PATIENCE) == 0
