"""Our nsqlookupd with NSQ's own programs: each test runs where they are there, and says so where not.

The programs are those in $FLINTMQ_PEERS/bin or .peers/bin. Our nsqd with the Go nsqlookupd is in
``tests/broker/test_peers.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from flintmq.broker.daemon import Broker
from flintmq.lookup.daemon import Lookupd
from flintmq.protocol.wire import MAGIC_V2, OK_FRAME, encode_command
from support.peers import PEERS
from support.ports import held_port

pytestmark = pytest.mark.interop

PATIENCE = 60.0


def program(name: str) -> str:
    path = PEERS / "bin" / name
    if not os.access(path, os.X_OK):
        pytest.skip(f"no Go {name} at {path}")
    return str(path)


class Running:
    """A Go program; what it says is kept."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""
        self._readers = [asyncio.create_task(self._read(pipe)) for pipe in (process.stdout, process.stderr) if pipe]

    async def _read(self, pipe: asyncio.StreamReader) -> None:
        while chunk := await pipe.read(65536):
            self.output += chunk.decode("utf-8", "replace")

    async def says(self, pattern: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.output)) is None:
            # The end of a process may be known before its last words are read.
            ended = all(reader.done() for reader in self._readers)
            assert time.monotonic() < deadline and not ended, self.output
            await asyncio.sleep(0.005)
        return found[found.lastindex or 0]

    async def end(self, number: int = signal.SIGTERM) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        await self.process.wait()
        await asyncio.gather(*self._readers)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[Running] = []

    async def run(name: str, *flags: str) -> Running:
        process = await asyncio.create_subprocess_exec(
            program(name), *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        started.append(Running(process))
        return started[-1]

    yield run
    for running in started:
        await running.end(signal.SIGKILL)


@pytest.fixture
async def lookupd() -> AsyncIterator[Lookupd]:
    async with Lookupd() as lookupd:
        yield lookupd


async def go_nsqd(start: Start, lookupd: Lookupd, path: Path) -> tuple[Running, str]:
    """A Go nsqd that is registered with ours, and its HTTP address."""
    path.mkdir()
    running = await start(
        "nsqd",
        "--tcp-address=127.0.0.1:0",
        "--http-address=127.0.0.1:0",
        "--broadcast-address=127.0.0.1",
        f"--data-path={path}",
        f"--lookupd-tcp-address={lookupd.tcp_address}",
    )
    address = await running.says(r"HTTP: listening on (\S+)")
    await running.says(r"LOOKUPD\(\S+\): peer info")
    return running, address


async def ask(address: str, path: str, method: str = "GET", **arguments: Any) -> Any:
    async with aiohttp.ClientSession() as session:
        async with session.request(method, f"http://{address}{path}", **arguments) as response:
            text = await response.text()
            assert response.status == 200, text
            return await response.json(content_type=None) if text[:1] in ("{", "[") else text


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


def registered(lookupd: Lookupd) -> set[str]:
    return {name for name, _ in lookupd.registry.dump() if name != "client::"}


async def test_a_go_nsqd_registers_with_ours(start, lookupd, tmp_path):
    await ask(lookupd.http_address, "/channel/create?topic=t&channel=known", "POST")
    nsqd, address = await go_nsqd(start, lookupd, tmp_path / "data")
    await ask(address, "/pub?topic=t", "POST", data=b"hello")
    await ask(address, "/channel/create?topic=t&channel=c%23ephemeral", "POST")
    await until(lambda: registered(lookupd) == {"topic:t:", "channel:t:known", "channel:t:c#ephemeral"})
    # It asked us which channels there are before it handed out the first message.
    stats = await ask(address, "/stats?format=json")
    depths = {channel["channel_name"]: channel["depth"] for channel in stats["topics"][0]["channels"]}
    assert depths == {"known": 1, "c#ephemeral": 0}
    [producer] = (await ask(lookupd.http_address, "/lookup?topic=t"))["producers"]
    assert f"{producer['broadcast_address']}:{producer['http_port']}" == address

    await ask(address, "/topic/delete?topic=t", "POST")
    await until(lambda: not registered(lookupd))
    assert lookupd.registry.channels("t") == ["known"]
    await nsqd.end()
    await until(lambda: not lookupd.registry.producers)


async def test_a_go_nsqd_comes_back_to_ours_after_a_restart(start, tmp_path):
    program("nsqd")
    lookupd = Lookupd(tcp_address=f"127.0.0.1:{held_port()}")
    await lookupd.start()
    _, address = await go_nsqd(start, lookupd, tmp_path / "data")
    for path in ("/topic/create?topic=t", "/channel/create?topic=t&channel=c", "/topic/create?topic=u"):
        await ask(address, path, "POST")
    await until(lambda: registered(lookupd) == {"topic:t:", "channel:t:c", "topic:u:"})
    await lookupd.stop()
    async with Lookupd(tcp_address=lookupd.tcp_address) as again:
        # Its next PING or change finds the connection broken, the one after that makes a new one.
        for number in itertools.count():
            await ask(address, f"/topic/create?topic=v{number}", "POST")
            if {"topic:t:", "channel:t:c", "topic:u:"} <= registered(again):
                break
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["flintmq", "go"])
async def test_nsq_tail_finds_nsqds_through_ours(start, lookupd, tmp_path, kind):
    program("nsq_tail")
    async with contextlib.AsyncExitStack() as stack:
        if kind == "go":
            _, address = await go_nsqd(start, lookupd, tmp_path / "data")
            await ask(address, "/topic/create?topic=t", "POST")
        else:
            options = {"broadcast_address": "127.0.0.1", "broadcast_http_port": 4151, "disk_reserve": 0}
            options["nsqlookupd_tcp_addresses"] = [lookupd.tcp_address]
            broker = await stack.enter_async_context(Broker(data_path=tmp_path, **options))
            broker.topic("t")
        await until(lambda: "topic:t:" in registered(lookupd))
        flags = ("--topic=t", "--channel=tail", f"--lookupd-http-address={lookupd.http_address}", "-n=2")
        tail = await start("nsq_tail", *flags)
        # Its channel is there: it will miss nothing.
        await until(lambda: "channel:t:tail" in registered(lookupd))
        if kind == "go":
            await ask(address, "/mpub?topic=t", "POST", data=b"one\ntwo")
        else:
            host, _, port = broker.tcp_address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(MAGIC_V2)
            for body in (b"one", b"two"):
                writer.write(encode_command(b"PUB", b"t", body=body))
                assert await reader.readexactly(len(OK_FRAME)) == OK_FRAME
            writer.close()
            await writer.wait_closed()
        await tail.says(r"(?s)one\n.*two\n")
        await tail.end()


async def test_nsqadmin_works_with_ours(start, lookupd, tmp_path):
    program("nsqadmin")
    _, address = await go_nsqd(start, lookupd, tmp_path / "data")
    await ask(address, "/topic/create?topic=t", "POST")
    await ask(address, "/channel/create?topic=t&channel=c", "POST")
    await until(lambda: registered(lookupd) == {"topic:t:", "channel:t:c"})
    admin = await start("nsqadmin", "--http-address=127.0.0.1:0", f"--lookupd-http-address={lookupd.http_address}")
    web = await admin.says(r"HTTP: listening on (\S+)")

    assert (await ask(web, "/api/topics"))["topics"] == ["t"]
    nodes = (await ask(web, "/api/nodes"))["nodes"]
    assert [node["hostname"] != "" and [t["topic"] for t in node["topics"]] for node in nodes] == [["t"]]
    topic = await ask(web, "/api/topics/t")
    assert [channel["channel_name"] for channel in topic["channels"]] == ["c"]

    # Made in advance, everywhere.
    await ask(web, "/api/topics", "POST", json={"topic": "u", "channel": "d"})
    assert lookupd.registry.channels("u") == ["d"]
    # Taking a topic off one node: a tombstone here, a deletion there.
    await ask(web, f"/api/nodes/{address}", "DELETE", json={"topic": "t"})
    await until(lambda: "topic:t:" not in registered(lookupd))
    assert (await ask(lookupd.http_address, "/lookup?topic=t"))["producers"] == []
    # Deleting it for good.
    await ask(web, "/api/topics/t", "DELETE")
    assert "t" not in lookupd.registry.topics
    await ask(web, "/api/topics/u/d", "DELETE")
    assert lookupd.registry.channels("u") == []
