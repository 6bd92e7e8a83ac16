"""``python -m bench.holds``: how long one answer can take while the broker does something large.

A process of its own asks ``/ping`` every 10 ms during each situation. The worst answer is reported beside that of an
idle control. The situations: a 2 GB topic is deleted, the journal's snapshot is taken with a million deferred messages,
eight clients send NOPs without end, and twenty topics are published to at full rate.

It also times the start of a broker that was killed with a million deferrals in an unsealed file, and of one with a
million scattered FINs in its journal.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import load
from .daemons import Daemon, Side, data_folder, running
from .errors import BenchError, StartError
from .load import Load

TOPIC, CHANNEL = "holds", "bench"
INTERVAL = 0.01
#: Worst answer that is accepted, in ms, and the longest start, in s.
WORST_MS, LONGEST_START = 100.0, 2.0
FLOODERS, TOPICS = 8, 20
_BODY = b"x" * 200


def main() -> int:
    options = _parse_options()
    if options.ping:
        return _ping(options.ping)
    if options.flood:
        return _flood(options.flood)
    flags = " --max-rdy-count=3000000 --max-bytes-per-file=1073741824 --max-body-size=67108864 --max-msg-timeout=2h"
    command = options.ours or f"{sys.executable} -m flintmq nsqd"
    side = Side.ours(f"{command} {{flags}} {{durability}}{flags}", "os")
    scale = 0.02 if options.quick else 1.0
    failed = False
    try:
        binary = load.build()
        for name, situation in SITUATIONS.items():
            if options.only and name not in options.only.split(","):
                continue
            result = situation(side, scale, binary)
            limit = LONGEST_START if "start" in result else WORST_MS
            value = result.get("start", result.get("worst_ms", 0.0))
            failed |= value > limit
            print(f"{name}: {json.dumps(result)}{'  OVER THE LIMIT' if value > limit else ''}", flush=True)
    except (BenchError, StartError) as exc:
        print(f"bench.holds: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 1 if failed else 0


# --- Processes of their own -------------------------------------------------------------------------------------------


def _ping(port: int) -> int:
    """Ask /ping every INTERVAL until SIGTERM; print the answers' times."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    # Ahead of the broker and its publishers when a core gets free: the broker is measured, not the scheduler.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times = []
    print("ready", flush=True)
    while not ended:
        begin = time.monotonic()
        # A broker that does not answer at all is as slow as the time limit.
        with contextlib.suppress(TimeoutError):
            connection.request("GET", "/ping")
            connection.getresponse().read()
        times.append(time.monotonic() - begin)
        time.sleep(max(0.0, INTERVAL - times[-1]))
    times.sort()
    middle = times[len(times) // 2] * 1e3 if times else 0.0
    print(json.dumps({"pings": len(times), "median_ms": round(middle, 2), "worst_ms": round(times[-1] * 1e3, 1)}))
    return 0


def _flood(port: int) -> int:
    """Send NOPs without end on FLOODERS connections until SIGTERM."""
    data = b"NOP\n" * (64 << 10)
    sockets = []
    for _ in range(FLOODERS):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(b"  V2")
        sock.setblocking(False)
        sockets.append(sock)
    print("ready", flush=True)
    while True:
        _, writable, _ = select.select([], sockets, [], 1.0)
        for sock in writable:
            with contextlib.suppress(BlockingIOError):
                sock.send(data)


@contextlib.contextmanager
def _child(mode: str, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.holds", f"--{mode}", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise BenchError(f"the {mode} process did not start")
            yield process
        finally:
            process.kill()


def _probe(daemon: Daemon, during: Callable[[], None], seconds: float) -> dict[str, float]:
    """Ping while ``during`` runs and for at least ``seconds``."""
    with _child("ping", daemon.http_port) as process:
        begin = time.monotonic()
        during()
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        process.terminate()
        assert process.stdout is not None
        found: dict[str, float] = json.loads(process.stdout.readline())
        return found


# --- Situations -------------------------------------------------------------------------------------------------------


def _post(daemon: Daemon, path: str, body: bytes = b"") -> None:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=120)
    connection.request("POST", path, body)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    if answer.status != 200:
        raise BenchError(f"POST {path} was answered with {answer.status}")


def _control(side: Side, scale: float, binary: Path) -> dict[str, float]:
    with data_folder() as folder, running(side, folder) as daemon:
        return _probe(daemon, lambda: None, 5.0)


def _delete(side: Side, scale: float, binary: Path) -> dict[str, float]:
    with data_folder() as folder, running(side, folder) as daemon:
        daemon.create_channel(TOPIC, CHANNEL)
        count = int(2000 * scale) or 1
        batch = struct.pack(">I", 16) + (struct.pack(">I", 65_000) + b"x" * 65_000) * 16
        for _ in range(count):
            _post(daemon, f"/mpub?topic={TOPIC}&binary=true", batch)
        daemon.settle()
        result = _probe(daemon, lambda: _post(daemon, f"/topic/delete?topic={TOPIC}"), 5.0)
        return {"bytes": count * len(batch), **result}


def _connect(daemon: Daemon, *lines: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", daemon.port), timeout=300)
    sock.sendall(b"  V2" + b"".join(lines))
    return sock


def _defer(daemon: Daemon, count: int) -> None:
    """Publish single deferred messages, many DPUBs under way at once."""
    daemon.create_channel(TOPIC, CHANNEL)
    command = f"DPUB {TOPIC} 3500000\n".encode() + struct.pack(">I", 20) + b"d" * 20
    with _connect(daemon) as sock:
        left = count
        answer = len(b"\0\0\0\6\0\0\0\0OK")
        while left:
            some = min(left, 2000)
            sock.sendall(command * some)
            wanted = answer * some
            while wanted:
                got = sock.recv(min(wanted, 1 << 16))
                if not got:
                    raise BenchError("the daemon closed the connection of DPUBs")
                wanted -= len(got)
            left -= some


def _snapshot(side: Side, scale: float, binary: Path) -> dict[str, float]:
    count = int(1_000_000 * scale)
    with data_folder() as folder:
        with running(side, folder) as daemon:
            _defer(daemon, count)
            if not daemon.stop(180.0):
                raise BenchError("the daemon did not stop cleanly")
        # The first thing that it does after a clean start is a snapshot, in slices.
        with running(side, folder) as daemon:
            return {"deferred": count, **_probe(daemon, lambda: None, 10.0)}


def _nops(side: Side, scale: float, binary: Path) -> dict[str, float]:
    with data_folder() as folder, running(side, folder) as daemon, _child("flood", daemon.port):
        return _probe(daemon, lambda: None, 10.0)


def _topics(side: Side, scale: float, binary: Path) -> dict[str, float]:
    with data_folder() as folder, running(side, folder) as daemon, contextlib.ExitStack() as stack:
        options = {"connections": 1, "batch": 200, "seconds": 10}

        def publish() -> None:
            names = [f"{TOPIC}-{i}" for i in range(TOPICS)]
            loads = [stack.enter_context(Load(binary, "mpub", daemon.port, topic=name, **options)) for name in names]
            for each in loads:
                each.result()

        return _probe(daemon, publish, 10.0)


def _start_deferred(side: Side, scale: float, binary: Path) -> dict[str, float]:
    count = int(1_000_000 * scale)
    with data_folder() as folder:
        with running(side, folder) as daemon:
            _defer(daemon, count)
            daemon.settle()
            daemon.stop(0.0)
        with running(side, folder) as daemon:
            return {"deferred": count, "start": round(daemon.ready_seconds, 2)}


def _start_scattered(side: Side, scale: float, binary: Path) -> dict[str, float]:
    """A million messages are finished, each between two that are not."""
    count = int(2_000_000 * scale)
    with data_folder() as folder:
        with running(side, folder) as daemon:
            daemon.create_channel(TOPIC, CHANNEL)
            options = {"connections": 2, "batch": 200, "messages": count, "seconds": 120}
            with Load(binary, "mpub", daemon.port, topic=TOPIC, **options) as publishing:
                publishing.result()
            _finish_every_second(daemon, count)
            daemon.settle()
            time.sleep(1.0)
            daemon.stop(0.0)
        with running(side, folder) as daemon:
            depth = _depth(daemon)
            if abs(depth - count // 2) > 1000:
                raise BenchError(f"{depth:,} messages are left of {count // 2:,}")
            return {"scattered": count // 2, "start": round(daemon.ready_seconds, 2)}


def _finish_every_second(daemon: Daemon, count: int) -> None:
    body = b'{"msg_timeout":3600000}'
    identify = b"IDENTIFY\n" + struct.pack(">I", len(body)) + body
    lines = identify, f"SUB {TOPIC} {CHANNEL}\nRDY {count}\n".encode()
    with _connect(daemon, *lines) as sock, sock.makefile("rb", buffering=1 << 20) as stream:
        seen = 0
        finished: list[bytes] = []
        while seen < count:
            size, kind = struct.unpack(">II", stream.read(8))
            frame = stream.read(size - 4)
            if kind != 2:
                if frame == b"_heartbeat_":
                    sock.sendall(b"NOP\n")
                continue
            seen += 1
            if seen % 2:
                finished.append(b"FIN " + frame[10:26] + b"\n")
            if len(finished) == 1000:
                sock.sendall(b"".join(finished))
                finished.clear()
        sock.sendall(b"".join(finished))
        # Its answers are none: the next question is answered after all of them.
        daemon.settle()


def _depth(daemon: Daemon) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=60)
    connection.request("GET", f"/stats?format=json&topic={TOPIC}&channel={CHANNEL}")
    found = json.loads(connection.getresponse().read())
    connection.close()
    channel = found["topics"][0]["channels"][0]
    return int(channel["depth"] + channel["deferred_count"] + channel["in_flight_count"])


SITUATIONS: dict[str, Callable[[Side, float, Path], dict[str, float]]] = {
    "idle": _control,
    "delete": _delete,
    "snapshot": _snapshot,
    "nops": _nops,
    "topics": _topics,
    "start-deferred": _start_deferred,
    "start-scattered": _start_scattered,
}


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.holds", description="The longest answers of a busy broker.")
    parser.add_argument("--ours", metavar="COMMAND", help="how to start the daemon")
    parser.add_argument("--only", metavar="NAME,...", help=f"of {', '.join(SITUATIONS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke test, not a measurement")
    parser.add_argument("--ping", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--flood", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
