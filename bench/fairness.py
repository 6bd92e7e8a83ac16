"""``python -m bench.fairness``: how long others wait while hostile connections do their worst.

A process of its own is hostile, in one way and with so many connections: it sends commands without end, holds
deflate bombs open, or shakes hands again and again. Meanwhile this process publishes one message at a time over TCP and
asks for ``/ping``, and reports the p50 and the p99 of both, for ours and for a peer. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import selectors
import shlex
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from .daemons import free_ports
from .errors import BenchError

KINDS = ("nop", "nop-tls", "identify", "pub", "deflate", "tls", "https", "http")
COUNTS = (1, 8, 40)
SECONDS = 2.0
#: Between two questions of those who wait.
INTERVAL = 0.01
START_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ours", default=f"{sys.executable} -m flintmq nsqd", metavar="COMMAND")
    parser.add_argument("--peer", metavar="NSQD", help="the other daemon; without it only ours is measured")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, metavar="N")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="per cell (default %(default)s)")
    parser.add_argument("--attack", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        kind, *numbers = options.attack
        return _attack(kind, *map(int, numbers))
    sides = {"ours": options.ours} | ({"peer": options.peer} if options.peer else {})
    print(
        "| Hostile | Connections | "
        + " | ".join(f"{name}: PUB p50, p99 | {name}: /ping p50, p99" for name in sides)
        + " |"
    )
    print("|---" * (2 + 2 * len(sides)) + "|", flush=True)
    try:
        for kind, count in [("nobody", 0), *((kind, count) for kind in options.kinds for count in options.counts)]:
            cells = [_cell(command, kind, count, options.seconds) for command in sides.values()]
            print(f"| {kind} | {count} | " + " | ".join(cells) + " |", flush=True)
    except BenchError as exc:
        print(f"bench.fairness: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


# --- Those who wait ---------------------------------------------------------------------------------------------------


def _cell(command: str, kind: str, count: int, seconds: float) -> str:
    """Both pairs of numbers for one situation on a fresh daemon."""
    with _running(command) as (tcp, web, secure):
        publishes: list[float] = []
        pings: list[float] = []
        with contextlib.ExitStack() as stack:
            if count:
                numbers = map(str, (count, tcp, web, secure))
                words = [sys.executable, "-m", "bench.fairness", "--attack", kind, *numbers]
                hostile = subprocess.Popen(words, stdout=subprocess.PIPE)
                stack.callback(hostile.wait)
                stack.callback(hostile.kill)
                assert hostile.stdout is not None
                hostile.stdout.readline()
            stop = time.monotonic() + seconds
            threads = [
                threading.Thread(target=_publish, args=(tcp, stop, publishes)),
                threading.Thread(target=_ping, args=(web, stop, pings)),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return f"{_two(publishes)} | {_two(pings)}"


def _two(times: list[float]) -> str:
    if not times:
        return "no answer"
    times.sort()
    p50, p99 = times[len(times) // 2], times[min(len(times) - 1, int(len(times) * 0.99))]
    return f"{p50 * 1000:.1f}, {p99 * 1000:.1f} ms"


def _publish(port: int, stop: float, times: list[float]) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(b"  V2")
        while time.monotonic() < stop:
            begun = time.perf_counter()
            sock.sendall(b"PUB others\n" + struct.pack(">I", 5) + b"hello")
            _read_frame(sock)
            times.append(time.perf_counter() - begun)
            time.sleep(INTERVAL)


def _ping(port: int, stop: float, times: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while time.monotonic() < stop:
        begun = time.perf_counter()
        connection.request("GET", "/ping")
        connection.getresponse().read()
        times.append(time.perf_counter() - begun)
        time.sleep(INTERVAL)
    connection.close()


def _read_frame(sock: socket.socket) -> bytes:
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        piece = sock.recv(65536)
        if not piece:
            raise BenchError("the daemon closed the connection")
        data += piece
    return data


@contextlib.contextmanager
def _running(command: str) -> Iterator[tuple[int, int, int]]:
    (tcp, web), (secure, _) = free_ports(), free_ports()
    with tempfile.TemporaryDirectory() as folder:
        cert, key = _certificate(Path(folder))
        words = [
            *shlex.split(command),
            *(f"--tcp-address=127.0.0.1:{tcp}", f"--http-address=127.0.0.1:{web}"),
            f"--https-address=127.0.0.1:{secure}",
            *(f"--data-path={folder}", f"--tls-cert={cert}", f"--tls-key={key}", "--log-level=error"),
        ]
        with open(Path(folder) / "log", "wb") as log:
            daemon = subprocess.Popen(words, stderr=log, stdout=log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", web), timeout=1).close()
                    break
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise BenchError(f"{command} does not start: {(Path(folder) / 'log').read_text()[-300:]}")
                time.sleep(0.05)
            # What it still has to prepare is not the hostile one's doing.
            time.sleep(0.5)
            yield tcp, web, secure
        finally:
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _certificate(folder: Path) -> tuple[str, str]:
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2"]
    try:
        subprocess.run([*words, "-subj", "/CN=bench"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise BenchError(f"openssl cannot make a certificate: {exc}") from exc
    return cert, key


# --- Those who do not -------------------------------------------------------------------------------------------------


def _attack(kind: str, count: int, tcp: int, web: int, secure: int) -> int:
    if kind in ("tls", "nop-tls", "https"):
        for _ in range(count):
            thread = (
                threading.Thread(target=_shake_hands_at_once, args=(secure,), daemon=True)
                if kind == "https"
                else threading.Thread(target=_shake_hands, args=(tcp, kind == "nop-tls"), daemon=True)
            )
            thread.start()
        print("begun", flush=True)
        threading.Event().wait()
    body = json.dumps({"client_id": "x", "feature_negotiation": True, "deflate": kind == "deflate"}).encode()
    identify = b"IDENTIFY\n" + struct.pack(">I", len(body)) + body
    floods = {
        "nop": b"NOP\n" * 16384,
        "identify": identify * 500,
        "pub": (b"PUB hostile\n" + struct.pack(">I", 1) + b"x") * 4000,
        "http": b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000,
        "deflate": b"",
    }
    selector = selectors.DefaultSelector()
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", web if kind == "http" else tcp))
        flood = floods[kind]
        if kind != "http":
            sock.sendall(b"  V2")
        if kind == "deflate":
            sock.sendall(identify)
            # The answer, and the OK inside the compression.
            _read_frame(sock)
            bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
            # Each block is what the one before has led up to: the same bytes mean the same again.
            flood = bomb.compress(b"NOP\n" * (1 << 20)) + bomb.flush(zlib.Z_FULL_FLUSH)
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, [flood, 0])
    print("begun", flush=True)
    while selector.get_map():
        for chosen, events in selector.select():
            sock, state = chosen.fileobj, chosen.data
            assert isinstance(sock, socket.socket)
            try:
                if events & selectors.EVENT_READ and not sock.recv(1 << 18):
                    selector.unregister(sock)
                    continue
                if events & selectors.EVENT_WRITE:
                    flood, at = state
                    state[1] = (at + sock.send(memoryview(flood)[at : at + 65536])) % len(flood)
            except BlockingIOError:
                continue
            except OSError:
                selector.unregister(sock)
    return 0


def _shake_hands_at_once(port: int) -> None:
    """Shake hands again and again where nothing comes before it: with HTTPS."""
    context = _trusting()
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
            context.wrap_socket(sock).close()


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _shake_hands(port: int, is_flood: bool) -> None:
    """Shake hands again and again; for a flood once, and then send NOPs without end."""
    context = _trusting()
    body = b'{"tls_v1":true,"feature_negotiation":true}'
    while True:
        with contextlib.suppress(OSError, BenchError), socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"  V2IDENTIFY\n" + struct.pack(">I", len(body)) + body)
            _read_frame(sock)
            with context.wrap_socket(sock) as secure:
                while is_flood:
                    secure.sendall(b"NOP\n" * 4096)


if __name__ == "__main__":
    sys.exit(main())
