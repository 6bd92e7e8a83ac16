"""``python -m bench.many``: what many channels that lag, and many topics that are published to, cost.

``lag`` runs a broker in this process. Its channels begin at different places of one topic's log, far behind its end,
and it counts the bytes that are read from files, where they reach the table of system calls, for each byte that
consumers get.

``topics`` starts nsqd and publishes to one topic after the other, many PUBs in each write, without waiting for their
answers. It reports the CPU time of nsqd per message. With ``--idle`` each channel has a consumer that is not ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

from .daemons import Side, fresh
from .errors import BenchError, StartError

OK = b"\0\0\0\6\0\0\0\0OK"


# --- Channels that lag ------------------------------------------------------------------------------------------------


def lag(arguments: argparse.Namespace) -> dict[str, float]:
    """Run a broker and its consumers; return what was read for what they got."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_lag(arguments, Path(folder)))


async def _lag(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.storage.disk import Disk
    from flintmq.system import System

    class CountingSystem(System):
        read = 0
        reads = 0

        def pread(self, fd: int, size: int, offset: int) -> bytes:
            data = super().pread(fd, size, offset)
            self.read += len(data)
            self.reads += 1
            return data

    system = CountingSystem()
    broker = Broker(
        disk=Disk(system),
        data_path=folder,
        tcp_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        mem_queue_size=10_000,
    )
    await broker.start()
    topic = broker.topic("lag")
    names = [f"c{number}{'#ephemeral' if arguments.ephemeral else ''}" for number in range(arguments.channels)]
    for name in names:
        topic.channel(name)
    frame = arguments.size + 34
    give = int(arguments.megabytes * 1e6) // frame
    count = give + int(arguments.apart * 1e6) * arguments.channels // frame
    body = struct.pack(">I", arguments.size) + bytes(arguments.size)
    batch = max(1, min(200, (1 << 20) // frame))
    for at in range(0, count, batch):
        some = min(batch, count - at)
        data = bytearray(body * some)
        topic.publish(data, 0, len(data), some)
        await asyncio.sleep(0)
    first = topic.log.first
    for number, name in enumerate(names):
        topic.channels[name].seek(first + (count - give) * number // arguments.channels)
    while any(topic.channels[name].seeking is not None for name in names):  # noqa: ASYNC110  # it tells nobody
        await asyncio.sleep(0.01)
    topic.trim()
    system.read = system.reads = 0
    resident = _resident()
    address = broker.tcp_address
    consumers = threading.Thread(target=_consume, args=(address, names, arguments.rdy, give))
    before = time.process_time()
    consumers.start()
    most = 0
    while consumers.is_alive():
        most = max(most, _resident())
        await asyncio.sleep(0.02)
    cpu = time.process_time() - before
    read, reads = system.read, system.reads
    await broker.stop()
    given = arguments.channels * give * frame
    return {
        "read": read,
        "reads": reads,
        "given": given,
        "ratio": read / given,
        "resident_growth": most - resident,
        "cpu_us": cpu / (arguments.channels * give) * 1e6,
    }


def _consume(address: str, names: list[str], rdy: int, give: int) -> None:
    """Consume so many messages of each channel, all of them at once; FIN each message."""
    import selectors

    host, port = address.split(":")
    selector = selectors.DefaultSelector()
    left: dict[socket.socket, int] = {}
    held: dict[socket.socket, bytes] = {}
    for name in names:
        sock = socket.create_connection((host, int(port)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(b"  V2" + f"SUB lag {name}\n".encode() + b"RDY %d\n" % min(rdy, give))
        left[sock], held[sock] = give, b""
        selector.register(sock, selectors.EVENT_READ)
    while left:
        for key, _ in selector.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            data = held[sock] + sock.recv(1 << 18)
            at, answers = 0, []
            while len(data) - at >= 8:
                size, kind = struct.unpack_from(">II", data, at)
                if len(data) - at - 4 < size:
                    break
                if kind == 2:
                    answers.append(b"FIN " + data[at + 18 : at + 34] + b"\n")
                at += 4 + size
            held[sock] = data[at:]
            left[sock] -= len(answers)
            if answers:
                sock.sendall((b"RDY 0\n" if left[sock] <= 0 else b"") + b"".join(answers))
            if left[sock] <= 0:
                selector.unregister(sock)
                del left[sock]
                sock.close()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- Many topics ------------------------------------------------------------------------------------------------------


def topics(arguments: argparse.Namespace) -> dict[str, float]:
    """Start nsqd, create topics and channels, publish to one topic after the other; return the CPU per message."""
    side = Side.ours(None, arguments.durability) if arguments.nsqd is None else Side.peer(arguments.nsqd, "os")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(fresh(side))
        names = [f"topic{number}" for number in range(arguments.topics)]
        idle = []
        for name in names:
            for channel in range(arguments.channels):
                sock = socket.create_connection(("127.0.0.1", daemon.port))
                sock.sendall(f"  V2SUB {name} channel{channel}\n".encode())
                _expect(sock, 1)
                if arguments.idle:
                    idle.append(stack.enter_context(sock))
                else:
                    sock.close()
        size = struct.pack(">I", arguments.size) + bytes(arguments.size)
        socks = [
            stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            for _ in range(arguments.connections)
        ]
        for sock in socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(b"  V2")
        commands = [b"PUB %s\n" % name.encode() + size for name in names]

        def publish(messages: int) -> None:
            at = 0
            for start in range(0, messages, arguments.batch * len(socks)):
                some = min(arguments.batch, max(1, (messages - start) // len(socks)))
                for sock in socks:
                    sock.sendall(b"".join(commands[(at + i) % len(commands)] for i in range(some)))
                    at += some
                for sock in socks:
                    _expect(sock, some)

        publish(2 * len(names))
        daemon.settle()
        before, began = daemon.cpu_seconds(), time.monotonic()
        publish(arguments.messages)
        took = time.monotonic() - began
        # Syncs follow.
        cpu = daemon.cpu_seconds() - before
        time.sleep(3)
        whole = daemon.cpu_seconds() - before
    return {
        "cpu_us": cpu / arguments.messages * 1e6,
        "cpu_us_with_what_follows": whole / arguments.messages * 1e6,
        "per_second": arguments.messages / took,
    }


def _expect(sock: socket.socket, count: int) -> None:
    """Read so many times OK."""
    left = count * len(OK)
    while left:
        data = sock.recv(left)
        if not data or (b"E_" in data):
            raise BenchError(f"nsqd answered {data!r}")
        left -= len(data)


def main() -> int:
    options = _parse_options()
    try:
        figures = options.run(options)
    except (BenchError, StartError) as exc:
        print(f"bench.many: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.many", description="Many channels, many topics.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("lag", help="channels that lag: bytes read per byte delivered")
    one.set_defaults(run=lag)
    one.add_argument("--channels", type=int, default=100)
    one.add_argument("--rdy", type=int, default=1)
    one.add_argument("--size", type=int, default=1000, help="bytes of a message")
    one.add_argument("--megabytes", type=float, default=2.0, help="what each channel reads")
    one.add_argument("--apart", type=float, default=1.0, help="megabytes between the places where two channels begin")
    one.add_argument("--ephemeral", action="store_true")
    two = commands.add_parser("topics", help="PUBs to one topic after the other: CPU time of nsqd per message")
    two.set_defaults(run=topics)
    two.add_argument("--topics", type=int, default=1000)
    two.add_argument("--channels", type=int, default=10)
    two.add_argument("--connections", type=int, default=1)
    two.add_argument("--batch", type=int, default=200, help="PUBs per write")
    two.add_argument("--messages", type=int, default=100_000)
    two.add_argument("--size", type=int, default=200, help="bytes of a message")
    two.add_argument("--idle", action="store_true", help="a consumer that is not ready on each channel")
    two.add_argument("--durability", choices=["os", "memory", "fsync"], default="os")
    two.add_argument("--nsqd", help="another nsqd to measure instead of ours")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
