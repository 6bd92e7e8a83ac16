"""``python -m bench.lookup``: how long an nsqd waits for its PING while nsqlookupd works for another one.

A process of its own sends PING every 5 ms as one nsqd. Another nsqd registers 100,000 topics in one stream, asks for
everything, and disconnects; then a topic with 100,000 channels is deleted. The worst PING of each situation is
reported, for ours and for a peer, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .daemons import free_ports
from .errors import BenchError

INTERVAL = 0.005
NAMES = 100_000
START_SECONDS = 30.0
_IDENTITY = {"broadcast_address": "127.0.0.1", "hostname": "bench", "tcp_port": 1, "http_port": 2, "version": "1.3.0"}
_BODY = json.dumps(_IDENTITY).encode()
_HELLO = b"  V1IDENTIFY\n" + struct.pack(">I", len(_BODY)) + _BODY


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lookup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ours", default=f"{sys.executable} -m flintmq nsqlookupd", metavar="COMMAND")
    parser.add_argument("--peer", metavar="NSQLOOKUPD", help="the other daemon; without it only ours is measured")
    parser.add_argument("--names", type=int, default=NAMES, metavar="N", help=f"topics, channels (default {NAMES})")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs per side (default 3)")
    parser.add_argument("--ping", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ping:
        return _ping(options.ping)
    sides = {"ours": options.ours} | ({"peer": options.peer} if options.peer else {})
    worst: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    try:
        for _ in range(options.repeat):
            for name, command in sides.items():
                with _running(command) as (tcp, web):
                    for situation, value in _situations(tcp, web, options.names):
                        worst[name].setdefault(situation, []).append(value)
    except BenchError as exc:
        print(f"bench.lookup: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"worst PING of another nsqd in ms, {options.names} names, median of {options.repeat} (span)")
    for situation in worst["ours"]:
        cells = [
            f"{name} {statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"
            for name in sides
            for values in [worst[name][situation]]
        ]
        print(f"{situation:>22}: {', '.join(cells)}")
    return 0


def _ping(port: int) -> int:
    """Send PING every INTERVAL until SIGTERM; at each SIGUSR1 print the worst answer since the last one."""
    ended: list[int] = []
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    sock = _connect(port)
    print("ready", flush=True)
    worst = 0.0
    while not ended:
        begin = time.monotonic()
        sock.sendall(b"PING\n")
        _answers(sock, 1)
        took = time.monotonic() - begin
        worst = max(worst, took)
        if asked:
            asked.clear()
            print(worst * 1e3, flush=True)
            worst = 0.0
        time.sleep(max(0.0, INTERVAL - took))
    return 0


def _connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    sock.sendall(_HELLO)
    _answers(sock, 1)
    return sock


def _answers(sock: socket.socket, count: int) -> None:
    buffer = b""
    while count:
        data = sock.recv(1 << 16)
        if not data:
            raise BenchError("nsqlookupd closed the connection")
        buffer += data
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := int.from_bytes(buffer[:4], "big")):
            buffer = buffer[4 + size :]
            count -= 1


def _situations(tcp: int, web: int, names: int) -> Iterator[tuple[str, float]]:
    command = [sys.executable, "-m", "bench.lookup", "--ping", str(tcp)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as pings:
        assert pings.stdout is not None
        if pings.stdout.readline() != "ready\n":
            raise BenchError("the pinging process did not start")

        def worst(during: Callable[[], None], seconds: float = 1.0) -> float:
            begin = time.monotonic()
            during()
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            assert pings.stdout is not None
            pings.send_signal(signal.SIGUSR1)
            return float(pings.stdout.readline())

        try:
            yield "nothing", worst(lambda: None)
            one = _connect(tcp)
            yield "registers topics", worst(lambda: _register(one, [f"t{number}" for number in range(names)]))
            yield "asks for everything", worst(lambda: _ask(web, "GET", "/topics", "/nodes"))
            yield "disconnects", worst(one.close, 4.0)
            two = _connect(tcp)
            yield "registers channels", worst(lambda: _register(two, [f"t c{number}" for number in range(names)]))
            yield "looks up", worst(lambda: _ask(web, "GET", "/lookup?topic=t"))
            yield "unregisters a topic", worst(lambda: _unregister(two), 4.0)
            yield "deletes a topic", worst(lambda: _ask(web, "POST", "/topic/delete?topic=t"), 4.0)
            two.close()
        finally:
            pings.kill()


def _register(sock: socket.socket, names: list[str]) -> None:
    """Send REGISTERs in large pieces, reading the answers behind them."""
    sock.setblocking(True)
    for begin in range(0, len(names), 20_000):
        part = names[begin : begin + 20_000]
        sock.sendall("".join(f"REGISTER {name}\n" for name in part).encode())
        _answers(sock, len(part))


def _unregister(sock: socket.socket) -> None:
    sock.sendall(b"UNREGISTER t\n")
    _answers(sock, 1)


def _ask(port: int, method: str, *paths: str) -> None:
    for path in paths:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request(method, path)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status != 200:
            raise BenchError(f"{method} {path} was answered with {answer.status}")


@contextlib.contextmanager
def _running(command: str) -> Iterator[tuple[int, int]]:
    """Run an nsqlookupd, with its log in a file as it would be in production."""
    tcp, web = free_ports()
    with tempfile.TemporaryDirectory(prefix="flintmq-bench-") as folder, (Path(folder) / "log").open("wb") as log:
        flags = [f"--tcp-address=127.0.0.1:{tcp}", f"--http-address=127.0.0.1:{web}"]
        process = subprocess.Popen([*shlex.split(command), *flags], stdout=log, stderr=log, process_group=0)
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError):
                    _connect(tcp).close()
                    break
                if time.monotonic() > deadline or process.poll() is not None:
                    raise BenchError(f"{command} did not start")
                time.sleep(0.05)
            yield tcp, web
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
