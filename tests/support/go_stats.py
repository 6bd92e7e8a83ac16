"""One busy little scene, and what the Go daemon says about it in ``/stats`` and to statsd.

The scene is played to any nsqd over TCP. What differs from run to run (ports, times, memory) is replaced by words, so
that what the Go daemon said once can be kept in go_stats.json and compared with what ours says every time. To record it
again: ``FLINTMQ_PEERS=… python -m support.go_stats`` in ``tests``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from flintmq.protocol.compression import Deflate
from support.ports import held_port

HERE = Path(__file__).resolve().parent
NSQD = Path(os.environ.get("FLINTMQ_PEERS") or HERE.parents[1] / ".peers") / "bin" / "nsqd"
RECORDED = HERE / "go_stats.json"
#: How long something may take to come true. Only failures take that long.
PATIENCE = 60.0

PERCENTILES = (1.0, 0.999, 0.5)
#: Both daemons are told that this is where they are: it is in the names that statsd gets.
BROADCAST_HOST, BROADCAST_PORT = "node.example", 4151

#: What is asked of /stats: topic, channel, include_clients, include_mem.
QUESTIONS = [
    ("", "", True, True),
    ("", "", False, False),
    ("a", "", True, False),
    ("b", "", True, False),
    ("unknown", "", True, False),
    ("", "x", True, False),
    ("", "unknown", True, False),
    ("a", "y", False, True),
]

Document = Callable[..., Awaitable[Any]]
Operate = Callable[..., Awaitable[None]]


class Peer:
    """One connection, and the name that stands for its port."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._reader, self._writer = reader, writer
        self.port = writer.get_extra_info("sockname")[1]

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def frame(self) -> bytes:
        while True:
            (size,) = struct.unpack(">i", await self._reader.readexactly(4))
            data = await self._reader.readexactly(size)
            if data[4:] != b"_heartbeat_":
                return data[4:]

    async def ok(self, data: bytes) -> None:
        self.send(data)
        assert await self.frame() == b"OK"

    async def identify(self, **fields: Any) -> bytes:
        body = json.dumps(fields).encode()
        self.send(b"IDENTIFY\n" + struct.pack(">i", len(body)) + body)
        return await self.frame()

    async def publish(self, topic: str, body: bytes, verb: str = "PUB", more: str = "") -> None:
        await self.ok(f"{verb} {topic}{more}\n".encode() + struct.pack(">i", len(body)) + body)

    def close(self) -> None:
        self._writer.transport.abort()


class Scene:
    """Producers and consumers in every state that /stats tells apart; they stay connected until it is closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.peers: list[Peer] = []

    async def _connect(self, name: str) -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        peer = Peer(name, reader, writer)
        self.peers.append(peer)
        peer.send(b"  V2")
        return peer

    async def play(self, operate: Operate, document: Document) -> None:
        producer = await self._connect("PRODUCER")
        for size in (10, 20, 30, 40):
            await producer.publish("a", b"x" * size)
        other = await self._connect("OTHER")
        await other.publish("b", b"hello")
        # One message finished, one put back for later, one put back at once, one kept.
        consumer = await self._connect("CONSUMER")
        about = {"client_id": "id", "hostname": "host", "user_agent": "agent/1 <x>", "msg_timeout": 900_000}
        await consumer.identify(**about, feature_negotiation=True)
        await consumer.ok(b"SUB a x\n")
        consumer.send(b"RDY 1\n")
        for answer in (b"FIN %s\n", b"REQ %s 600000\n", b"REQ %s 0\n"):
            message = await consumer.frame()
            consumer.send(answer % message[10:26])
        await consumer.frame()
        # Publishes where it subscribes.
        both = await self._connect("BOTH")
        await both.ok(b"SUB a y\n")
        await both.publish("a", b"z")
        await both.publish("a", b"later", "DPUB", " 600000")
        closing = await self._connect("CLOSING")
        await closing.identify(client_id="c", hostname="", user_agent="", sample_rate=42)
        await closing.ok(b"SUB e#ephemeral c#ephemeral\n")
        closing.send(b"CLS\n")
        assert await closing.frame() == b"CLOSE_WAIT"
        packed = await self._connect("PACKED")
        await packed.identify(client_id="packed", hostname="packed", feature_negotiation=True, deflate=True)
        packed.send(Deflate(6).compress(b"SUB d-1.2_3 channel\nRDY 5\n"))
        await operate("pause", "b", "")
        await operate("pause", "a", "y")

        async def settled() -> bool:
            topics = {topic["topic_name"]: topic for topic in (await document())["topics"] or ()}
            channels = {c["channel_name"]: c for topic in topics.values() for c in topic["channels"]}
            packed = channels.get("channel", {"clients": []})["clients"]
            return bool(
                len(channels) == 4
                and [client["ready_count"] for client in packed] == [5]
                and (channels["x"]["requeue_count"], channels["x"]["in_flight_count"]) == (2, 1)
                and (channels["x"]["deferred_count"], channels["y"]["deferred_count"]) == (2, 1)
            )

        deadline = time.monotonic() + PATIENCE
        while not await settled():
            assert time.monotonic() < deadline, await document()
            await asyncio.sleep(0.02)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    # --- Without what differs from run to run ----------------------------------------------------------------------

    def plain_document(self, stats: dict[str, Any]) -> dict[str, Any]:
        """The document with words for ports, times and sizes, clients in the order of their names."""
        text = json.dumps(stats)
        for peer in self.peers:
            text = text.replace(f"127.0.0.1:{peer.port}", peer.name)
        plain: dict[str, Any] = json.loads(text)
        plain["start_time"] = "TIME"
        for name, value in plain.get("memory", {}).items():
            assert isinstance(value, int) and value >= 0
            plain["memory"][name] = "SIZE"
        for topic in plain["topics"] or ():
            _plain_latency(topic)
            for channel in topic["channels"]:
                _plain_latency(channel)
                for client in channel["clients"] or ():
                    client["connect_ts"] = "TIME"
        for client in plain["producers"] or ():
            client["connect_ts"] = "TIME"
        (plain["producers"] or []).sort(key=lambda client: client["remote_address"])
        return plain

    def plain_text(self, text: str) -> list[str]:
        """The lines likewise. A port has its own width, and so has what fills up behind it."""
        for peer in self.peers:
            text = re.sub(
                rf"\[V2 (\S*):{peer.port} ([^\]]*?) *\]",
                lambda m, name=peer.name: f"[V2 {m[1]}:{name} {m[2]}]{'PADDED' if len(m[0]) >= 26 else 'SHORT'}",
                text,
            )
        text = re.sub(r"(?m)^start_time \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)$", "start_time TIME", text)
        text = re.sub(r"(?m)^uptime [\dhm]*[\d.]+(ms|s)$", "uptime DURATION", text)
        text = re.sub(r"connected: [\dhm]*\d+s$", "connected: DURATION", text, flags=re.MULTILINE)
        text = re.sub(r"\(built w/\S+\)", "(built w/RUNTIME)", text)
        text = re.sub(r"(?m)^(   \w+ *)\t\d+$", "\\1\tSIZE", text)
        text = re.sub(r"[1-9]\d*\.\d(s|ms|us)\b", "LATENCY", text)
        lines = text.split("\n")
        # Producers come in any order.
        last = lines.index("Producers:") + 1 if "Producers:" in lines else len(lines)
        return lines[:last] + sorted(lines[last:])


def _plain_latency(stats: dict[str, Any]) -> None:
    for item in stats["e2e_processing_latency"]["percentiles"] or ():
        item["value"] = "LATENCY" if item["value"] else 0


# --- Statsd -----------------------------------------------------------------------------------------------------------


class StatsdServer(asyncio.DatagramProtocol):
    """Takes packets, and tells whole reports apart: each ends with the same line."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []

    @classmethod
    async def open(cls) -> tuple[StatsdServer, int]:
        transport, server = await asyncio.get_running_loop().create_datagram_endpoint(cls, local_addr=("127.0.0.1", 0))
        server.transport = transport
        return server, transport.get_extra_info("sockname")[1]

    transport: asyncio.DatagramTransport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.packets.append(data)

    @property
    def lines(self) -> list[str]:
        return b"".join(self.packets).decode().splitlines()

    async def whole_reports(self, count: int, last: str) -> list[list[str]]:
        """The next so many reports that begin after now; ``last`` is in the last line of each."""
        seen = sum(last in line for line in self.lines)
        deadline = time.monotonic() + PATIENCE
        # The one that may be under way does not count.
        while sum(last in line for line in self.lines) < seen + count + 1:
            assert time.monotonic() < deadline, self.lines[-20:]
            await asyncio.sleep(0.02)
        reports: list[list[str]] = [[]]
        for line in self.lines:
            reports[-1].append(line)
            if last in line:
                reports.append([])
        return reports[seen + 1 : seen + 1 + count]


def plain_lines(lines: list[str]) -> list[str]:
    """Statsd's lines without what differs from run to run."""
    plain = []
    for line in lines:
        name, value, kind = re.fullmatch(r"(.*):(-?\d+)\|(.)", line).groups()  # type: ignore[union-attr]
        if ".mem." in name or (".e2e_processing_latency" in name and value != "0"):
            value = "VALUE"
        plain.append(f"{name}:{value}|{kind}")
    return plain


def totals(lines: list[str]) -> dict[str, int]:
    """What all counters have grown by together."""
    grown: dict[str, int] = {}
    for line in lines:
        name, value, kind = re.fullmatch(r"(.*):(-?\d+)\|(.)", line).groups()  # type: ignore[union-attr]
        if kind == "c" and ".mem." not in name:
            grown[name] = grown.get(name, 0) + int(value)
    return grown


# --- The Go daemon ----------------------------------------------------------------------------------------------------


class GoDaemon:
    def __init__(self, folder: str, *flags: str) -> None:
        self.tcp, self.http = held_port(), held_port()
        self._log = open(f"{folder}/log", "wb")
        self._process = subprocess.Popen(
            [
                NSQD,
                f"--data-path={folder}",
                f"--tcp-address=127.0.0.1:{self.tcp}",
                f"--http-address=127.0.0.1:{self.http}",
                f"--broadcast-address={BROADCAST_HOST}",
                f"--broadcast-http-port={BROADCAST_PORT}",
                *flags,
            ],
            stderr=self._log,
        )

    async def start(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                await self.get("/ping")
                return
            except OSError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    async def get(self, path: str, method: str = "GET") -> str:
        def ask() -> str:
            request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", method=method)
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return str(response.read().decode())

        return await asyncio.to_thread(ask)

    async def document(self, topic: str = "", channel: str = "", clients: bool = True, mem: bool = True) -> Any:
        query = f"format=json&topic={topic}&channel={channel}&include_clients={clients}&include_mem={mem}".lower()
        return json.loads(await self.get(f"/stats?{query}"))

    async def text(self, topic: str, channel: str, clients: bool, mem: bool) -> str:
        query = f"topic={topic}&channel={channel}&include_clients={clients}&include_mem={mem}".lower()
        return await self.get(f"/stats?{query}")

    async def operate(self, verb: str, topic: str, channel: str) -> None:
        kind = "channel" if channel else "topic"
        await self.get(f"/{kind}/{verb}?topic={topic}&channel={channel}", "POST")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._log.close()


async def ask_go() -> dict[str, Any]:
    """Everything that go_stats.json holds, from the real daemon."""
    with tempfile.TemporaryDirectory() as folder:
        server, port = await StatsdServer.open()
        flags = [f"--e2e-processing-latency-percentile={q}" for q in PERCENTILES]
        go = GoDaemon(folder, f"--statsd-address=127.0.0.1:{port}", "--statsd-interval=2s", *flags)
        try:
            await go.start()
            scene = Scene(go.tcp)
            await scene.play(go.operate, go.document)
            result = {
                "documents": [scene.plain_document(await go.document(*question)) for question in QUESTIONS],
                "texts": [scene.plain_text(await go.text(*question)) for question in QUESTIONS],
            }
            [report] = await server.whole_reports(1, "mem.gc_runs")
            result["statsd"] = plain_lines(report)
            result["totals"] = totals(server.lines)
            scene.close()
            return result
        finally:
            go.stop()
            server.transport.close()


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(asyncio.run(ask_go()), indent=1) + "\n")
