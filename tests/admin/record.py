"""Writes ``recorded.json``: what Go's nsqadmin answers, and what the daemons had told it, over several states.

``python -m admin.record`` (in ``tests``, with ``.peers/bin``).

Go daemons run behind small proxies that write down each answer, so that a test can play the same cluster to our
nsqadmin without any of them. Ports are placeholders, ``@n1@`` for the first node's, and so are the times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from support.ports import held_port

PEERS = Path(__file__).resolve().parents[2] / ".peers" / "bin"
RECORDING = Path(__file__).with_name("recorded.json")
NODES, LOOKUPDS = ("n1", "n2", "n3"), ("l1", "l2")

#: Method, target and body. ``@n1@`` is the port of a node.
READS = [
    ("GET", "/api/topics", ""),
    ("GET", "/api/topics?inactive=true", ""),
    ("GET", "/api/topics?inactive=false", ""),
    ("GET", "/api/nodes", ""),
    ("GET", "/api/counter", ""),
    *[
        ("GET", f"/api/topics/{name}", "")
        for name in ("orders", "audit", "idle", "eph%23ephemeral", "none", "bad%20name")
    ],
    *[
        ("GET", f"/api/topics/{name}", "")
        for name in ("orders/billing", "orders/mail", "audit/all", "eph%23ephemeral/c%23ephemeral", "orders/none")
    ],
    *[("GET", f"/api/nodes/127.0.0.1:@{name}@", "") for name in NODES],
    ("GET", "/api/nodes/127.0.0.1:1", ""),
]
ALWAYS = [
    ("GET", "/ping", ""),
    ("GET", "/nope", ""),
    ("GET", "/api/nope", ""),
    ("PUT", "/api/topics", ""),
    ("POST", "/api/nodes", ""),
    ("GET", "/api/graphite", ""),
    ("GET", "/api/graphite?metric=depth", ""),
    ("GET", "/api/graphite?metric=rate", ""),
    ("GET", "/config/log_level", ""),
    ("GET", "/config/http_client_request_timeout", ""),
    ("GET", "/config/acl_http_header", ""),
    ("GET", "/config/base_path", ""),
    ("GET", "/config/statsd_interval", ""),
    ("GET", "/config/admin_users", ""),
    ("GET", "/config/proxy_graphite", ""),
    ("GET", "/config/nope", ""),
    ("PUT", "/config/nope", "x"),
    ("PUT", "/config/log_level", ""),
    ("PUT", "/config/log_level", "loud"),
    ("PUT", "/config/log_level", "warn"),
    ("PUT", "/config/nsqlookupd_http_addresses", "x"),
    ("POST", "/api/topics", ""),
    ("POST", "/api/topics", "{"),
    ("POST", "/api/topics", '{"topic":""}'),
    ("POST", "/api/topics", '{"topic":"bad name"}'),
    ("POST", "/api/topics", '{"topic":"good","channel":"bad channel"}'),
    ("POST", "/api/topics/orders", ""),
    ("POST", "/api/topics/orders", '{"action":"explode"}'),
    ("POST", "/api/topics/orders/billing", '{"action":""}'),
    ("DELETE", "/api/nodes/127.0.0.1:@n1@", ""),
    ("DELETE", "/api/nodes/127.0.0.1:@n1@", "[]"),
    ("DELETE", "/api/nodes/127.0.0.1:@n1@", '{"topic":"bad name"}'),
]
ACTIONS = [
    ("POST", "/api/topics", '{"topic":"made"}'),
    ("POST", "/api/topics", '{"topic":"orders","channel":"made"}'),
    ("POST", "/api/topics", '{"topic":"fresh","channel":"made"}'),
    ("POST", "/api/topics/orders", '{"action":"pause"}'),
    ("POST", "/api/topics/orders", '{"action":"unpause"}'),
    ("POST", "/api/topics/orders/billing", '{"action":"pause"}'),
    ("POST", "/api/topics/orders/billing", '{"action":"unpause"}'),
    ("POST", "/api/topics/orders/none", '{"action":"pause"}'),
    ("POST", "/api/topics/none", '{"action":"pause"}'),
    ("POST", "/api/topics/orders/mail", '{"action":"empty"}'),
    ("POST", "/api/topics/idle", '{"action":"empty"}'),
    ("DELETE", "/api/topics/orders/mail", ""),
    ("DELETE", "/api/topics/idle", ""),
    ("DELETE", "/api/topics/none", ""),
    ("DELETE", "/api/nodes/127.0.0.1:@n1@", '{"topic":"orders"}'),
    ("DELETE", "/api/nodes/127.0.0.1:1", '{"topic":"orders"}'),
]


class Recorder:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        # Of the proxies, which are what everybody is told; and behind them.
        self.ports = {name: held_port() for name in (*NODES, *LOOKUPDS)}
        self.real = {name: held_port() for name in self.ports}
        self.tcp = {name: held_port() for name in self.ports}
        self.admin_port = 0
        self.heard: dict[str, list[Any]] = {}
        self.acted: list[str] = []

    def placeholders(self, text: str) -> str:
        for name, port in (*self.ports.items(), *((f"{name}t", port) for name, port in self.tcp.items())):
            text = re.sub(rf"(?<!\d){port}(?!\d)", f"@{name}@", text)
        text = text.replace(socket.gethostname(), "@host@").replace(str(self.admin_port), "@admin@")
        text = re.sub(r'"(start_time|connect_ts|connected)":\d+', r'"\1":0', text)
        return re.sub(
            r'"remote_address(es)?":(\[?)"([^"]*?127\.0\.0\.1:)\d{4,5}"', r'"remote_address\1":\2"\g<3>9"', text
        )

    async def proxy(self, name: str) -> web.AppRunner:
        async def handle(request: web.Request) -> web.Response:
            target = request.raw_path
            try:
                async with self.session.request(
                    request.method, f"http://127.0.0.1:{self.real[name]}{target}", headers=request.headers
                ) as answer:
                    # What it says of itself is its real port.
                    body = (await answer.read()).replace(str(self.real[name]).encode(), str(self.ports[name]).encode())
            except OSError:
                # It is down: those who ask see the connection end.
                if request.transport is not None:
                    request.transport.abort()
                return web.Response()
            key = f"{request.method} {name} {target}"
            if request.method == "POST":
                self.acted.append(self.placeholders(key))
            self.heard[self.placeholders(key)] = [answer.status, self.placeholders(body.decode())]
            return web.Response(status=answer.status, body=body, headers={"X-NSQ-Content-Type": "nsq; version=1.0"})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.ports[name]).start()
        return runner

    def run(self, name: str, *command: str) -> None:
        self.processes[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        process.wait()

    async def until_up(self, port: int) -> None:
        for _ in range(2000):
            with contextlib.suppress(OSError):
                async with self.session.get(f"http://127.0.0.1:{port}/ping") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.01)
        raise SystemExit(f"nothing listens on {port}")

    async def post(self, name: str, target: str, body: str = "") -> None:
        async with self.session.post(f"http://127.0.0.1:{self.real[name]}{target}", data=body) as answer:
            assert answer.status == 200, (name, target, await answer.text())

    async def ask(self, method: str, target: str, body: str) -> list[Any]:
        for name, port in self.ports.items():
            target, body = target.replace(f"@{name}@", str(port)), body.replace(f"@{name}@", str(port))
        url = f"http://127.0.0.1:{self.admin_port}{target}"
        from yarl import URL

        async with self.session.request(method, URL(url, encoded=True), data=body) as answer:
            text = self.placeholders((await answer.read()).decode())
            return [answer.status, answer.headers.get("Content-Type", ""), text]

    async def state(self, requests: list[tuple[str, str, str]]) -> dict[str, Any]:
        self.heard = {}
        cases = []
        for method, target, body in requests:
            self.acted = []
            answer = await self.ask(method, target, body)
            cases.append({"ask": [method, target, body], "answer": answer, "acted": sorted(self.acted)})
        return {"heard": self.heard, "cases": cases}

    @contextlib.asynccontextmanager
    async def admin(self, *flags: str) -> AsyncIterator[None]:
        self.admin_port = held_port()
        self.run("admin", str(PEERS / "nsqadmin"), f"--http-address=127.0.0.1:{self.admin_port}", *flags)
        await self.until_up(self.admin_port)
        yield
        self.end("admin")

    async def consumer(self, name: str, topic: str, channel: str, ready: int) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.tcp[name])
        identity = json.dumps({"client_id": f"c-{name}", "hostname": f"h-{name}", "user_agent": "recorder/1"}).encode()
        writer.write(b"  V2IDENTIFY\n" + struct.pack(">I", len(identity)) + identity)
        writer.write(f"SUB {topic} {channel}\n".encode())
        for _ in range(2):
            size = int.from_bytes(await reader.readexactly(4), "big")
            await reader.readexactly(size)
        writer.write(f"RDY {ready}\n".encode())
        for _ in range(ready):
            size = int.from_bytes(await reader.readexactly(4), "big")
            frame = await reader.readexactly(size)
            # The first one is finished, the second requeued, the others are held.
            identifier = frame[14:30]
            if _ == 0:
                writer.write(b"FIN " + identifier + b"\n")
            elif _ == 1:
                writer.write(b"REQ " + identifier + b" 600000\n")
        return writer

    async def record(self) -> dict[str, Any]:
        self.session = ClientSession()
        runners = [await self.proxy(name) for name in self.ports]
        for name in LOOKUPDS:
            self.run(
                name,
                str(PEERS / "nsqlookupd"),
                f"--tcp-address=127.0.0.1:{self.tcp[name]}",
                f"--http-address=127.0.0.1:{self.real[name]}",
                "--broadcast-address=127.0.0.1",
            )
            await self.until_up(self.real[name])
        for name in NODES:
            path = Path(self.folder) / name
            path.mkdir()
            self.run(
                name,
                str(PEERS / "nsqd"),
                f"--tcp-address=127.0.0.1:{self.tcp[name]}",
                f"--http-address=127.0.0.1:{self.real[name]}",
                f"--broadcast-http-port={self.ports[name]}",
                "--broadcast-address=127.0.0.1",
                f"--data-path={path}",
                "--e2e-processing-latency-percentile=1.0,0.99,0.5",
                *[f"--lookupd-tcp-address=127.0.0.1:{self.tcp[lookupd]}" for lookupd in LOOKUPDS],
            )
            await self.until_up(self.real[name])
        states: dict[str, Any] = {}
        lookupds = [f"--lookupd-http-address=127.0.0.1:{self.ports[name]}" for name in LOOKUPDS]
        nsqds = [f"--nsqd-http-address=127.0.0.1:{self.ports[name]}" for name in NODES]
        await asyncio.sleep(1)
        async with self.admin(*lookupds):
            states["empty"] = await self.state([*READS, *ALWAYS])
            await self.post("n1", "/topic/create?topic=idle")
            for name, count in (("n1", 9), ("n2", 5)):
                await self.post(name, "/channel/create?topic=orders&channel=billing".replace("/channel", "/topic"))
                for channel in ("billing", "mail"):
                    await self.post(name, f"/channel/create?topic=orders&channel={channel}")
                await self.post(name, "/mpub?topic=orders", "\n".join(map(str, range(count))))
            await self.post("n3", "/topic/create?topic=audit")
            await self.post("n3", "/channel/create?topic=audit&channel=all")
            await self.post("n3", "/mpub?topic=audit", "a\nb\nc")
            await self.post("n3", "/pub?topic=audit&defer=3600000", "later")
            await self.post("n2", "/pub?topic=idle", "x")
            await asyncio.sleep(1)
            states["messages"] = await self.state(READS)
            writers = [
                await self.consumer("n1", "orders", "billing", 4),
                await self.consumer("n2", "orders", "billing", 2),
            ]
            writers.append(await self.consumer("n3", "eph#ephemeral", "c#ephemeral", 0))
            await asyncio.sleep(1)
            states["consumers"] = await self.state(READS)
            await self.post("n1", "/topic/pause?topic=orders")
            await self.post("n2", "/channel/pause?topic=orders&channel=mail")
            await asyncio.sleep(0.5)
            states["paused"] = await self.state(READS)
        async with self.admin(*nsqds):
            states["nsqds"] = await self.state([*READS, *ALWAYS])
        for writer in writers:
            writer.close()
        await asyncio.sleep(1)
        async with self.admin(*lookupds):
            for number, action in enumerate(ACTIONS):
                # Each changes what is heard afterwards.
                states[f"action {number + 1}"] = await self.state([action])
            states["afterwards"] = await self.state(READS)
            self.end("n3")
            await asyncio.sleep(0.5)
            states["node down"] = await self.state(READS)
            self.end("l2")
            await asyncio.sleep(0.5)
            states["lookupd down"] = await self.state(READS)
        states["nsqds"]["mode"] = "nsqds"
        for runner in runners:
            await runner.cleanup()
        await self.session.close()
        return states


async def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder)
        try:
            states = await recorder.record()
        finally:
            for name in list(recorder.processes):
                recorder.end(name)
    count = sum(len(state["cases"]) for state in states.values())
    RECORDING.write_text(json.dumps({"nsqadmin": "1.3.0", "states": states}, separators=(",", ":")) + "\n")
    sys.stdout.write(f"{count} answers over {len(states)} states\n")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
