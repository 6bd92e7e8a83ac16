"""``python -m bench.tools``: NSQ's command-line tools, ours and the Go ones, in turns on the same broker.

Each run has a topic of its own on one nsqd of ours, with messages of 200 bytes. The time counts from the first message
that a tool takes (to_nsq: from its start) to the last that it has finished.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flintmq import sync
from flintmq.client import Producer

from .daemons import free_ports
from .errors import BenchError

SIZE = 200
PATIENCE = 120.0
TOOLS = ("to_nsq", "nsq_tail", "nsq_to_file", "nsq_to_file-2500", "nsq_to_nsq", "nsq_to_http")


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[tuple[str, str]]:
    tcp, http = (f"127.0.0.1:{port}" for port in free_ports()[:2])
    flags = [f"--tcp-address={tcp}", f"--http-address={http}", f"--data-path={folder}", "--log-level=error"]
    process = subprocess.Popen([sys.executable, "-m", "flintmq", "nsqd", *flags])
    try:
        _until(lambda: _answers(http))
        yield tcp, http
    finally:
        process.terminate()
        process.wait()


def _answers(http: str) -> bool:
    with contextlib.suppress(Exception), sync.NodeClient(http) as node:
        return node.ping() == "OK"
    return False


def _until(condition: Callable[[], bool], pause: float = 0.005) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise BenchError("a tool does not get on")
        time.sleep(pause)


class Sink:
    """A web server that answers 200 to every request on keep-alive connections."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        threading.Thread(target=self._run, args=(serve,), daemon=True).start()
        ready.wait()

    def _run(self, serve: Callable[[], object]) -> None:
        self.loop.run_until_complete(serve())  # type: ignore[arg-type]
        self.loop.run_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK")


def measure(tool: str, command: list[str], count: int, tcp: str, http: str, topic: str, folder: Path) -> float:
    """Return messages a second."""
    body = b"x" * SIZE
    if tool == "to_nsq":
        began = time.monotonic()
        subprocess.run(
            [*command, f"--topic={topic}", f"--nsqd-tcp-address={tcp}"],
            input=(body + b"\n") * count,
            check=True,
            stderr=subprocess.DEVNULL,
        )
        return count / (time.monotonic() - began)
    with sync.NodeClient(http) as node:
        node.create_topic(topic)
        node.create_channel(topic, "c")
        asyncio.run(_fill(tcp, topic, body, count))
        argv = [f"--topic={topic}", "--channel=c", f"--nsqd-tcp-address={tcp}"]
        name = tool.partition("-")[0]
        if name == "nsq_to_file":
            argv += [f"--output-dir={folder}"] + (["--max-in-flight=2500"] if tool.endswith("2500") else [])
            argv += ["--sync-interval=1s"]
        elif name == "nsq_to_nsq":
            argv += [f"--destination-topic={topic}_copy", f"--destination-nsqd-tcp-address={tcp}"]
        elif name == "nsq_to_http":
            argv += [f"--post=http://127.0.0.1:{Sink().port}/"]

        def left() -> int:
            [channel] = node.stats(topic, "c", clients=False)["topics"][0]["channels"]
            return int(channel["depth"]) + int(channel["in_flight_count"]) + int(channel["deferred_count"])

        process = subprocess.Popen([*command, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _until(lambda: left() < count, 0.001)
            first, began = left(), time.monotonic()
            # To 95 %: what is left then may wait for a timer of the tool.
            _until(lambda: left() <= count * 0.05)
            return (first - left()) / (time.monotonic() - began)
        finally:
            process.terminate()
            process.wait()


async def _fill(tcp: str, topic: str, body: bytes, count: int) -> None:
    async with Producer(tcp) as producer:
        for start in range(0, count, 2000):
            await producer.publish_many(topic, [body] * min(2000, count - start))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tools", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", metavar="DIR", help="where the Go tools are; without it only ours are measured")
    parser.add_argument("--only", metavar="NAME,...", default=",".join(TOOLS), help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--messages", type=int, default=100_000, metavar="N", help="per run; nsq_to_http: a fifth")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs per side (default 3)")
    options = parser.parse_args()
    print("| Tool | ours, messages/s | Go, messages/s | ours/Go |\n|---|---|---|---|")
    number = 0
    for tool in options.only.split(","):
        name = tool.partition("-")[0]
        sides = {"ours": [sys.executable, "-m", "flintmq", name]}
        if options.peers:
            sides["go"] = [str(Path(options.peers) / name)]
        rates: dict[str, list[float]] = {side: [] for side in sides}
        count = options.messages // 5 if name == "nsq_to_http" else options.messages
        for _ in range(options.repeat):
            for side, command in sides.items():
                number += 1
                folder = Path(tempfile.mkdtemp(prefix="flintmq-bench-"))
                try:
                    with broker(folder) as (tcp, http):
                        rates[side].append(measure(tool, command, count, tcp, http, f"t{number}", folder / "out"))
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        ours = statistics.median(rates["ours"])
        shown = [_span(rates["ours"]), "", ""]
        if "go" in rates:
            shown[1:] = [_span(rates["go"]), f"{ours / statistics.median(rates['go']):.1f}"]
        print(f"| `{tool}` | {' | '.join(shown)} |", flush=True)
    return 0


def _span(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"


if __name__ == "__main__":
    sys.exit(main())
