"""A cluster in this process: three nsqds, an nsqlookupd and an nsqadmin, which looks when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flintmq.admin.daemon import Admin
from flintmq.broker.daemon import Broker
from flintmq.lookup.daemon import Lookupd
from support.http_client import Answer, HttpClient

PATIENCE = 30.0


async def until(condition: Callable[[], object]) -> None:
    """Wait for the condition, which is looked at again and again."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


class Wall:
    """Seconds since 1970, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1_800_000_000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Cluster:
    lookupd: Lookupd
    brokers: list[Broker]
    admin: Admin
    wall: Wall
    stack: contextlib.AsyncExitStack
    clients: dict[str, HttpClient] = field(default_factory=dict)

    async def _to(self, address: str) -> HttpClient:
        if address not in self.clients:
            self.clients[address] = await self.stack.enter_async_context(HttpClient.connect(address))
        return self.clients[address]

    async def nsqd(self, number: int, target: str, body: bytes = b"") -> Answer:
        answer = await (await self._to(self.brokers[number].http_address)).post(target, body)
        assert answer.status == 200, answer
        return answer

    async def get(self, target: str, *headers: str) -> Answer:
        return await (await self._to(self.admin.http_address)).get(target, *headers)

    async def ask(self, method: str, target: str, body: bytes | None = None, *headers: str) -> Answer:
        return await (await self._to(self.admin.http_address)).ask(method, target, body, *headers)

    async def sample(self, seconds: float = 2.0) -> None:
        self.wall.seconds += seconds
        await self.admin.state.sample()

    async def registered(self, *topics: str) -> None:
        """Wait until nsqlookupd knows these on every node that has them."""

        def is_known() -> bool:
            for topic in topics:
                having = sum(topic in broker.topics for broker in self.brokers)
                found = self.lookupd.registry.lookup(topic)
                if found is None or len(found) != having:
                    return False
            return True

        await until(is_known)

    def node(self, number: int) -> str:
        return self.brokers[number].http_address


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(count: int = 3, **options: Any) -> Cluster:
            lookupd = await stack.enter_async_context(Lookupd())
            brokers = []
            for number in range(count):
                path = tmp_path / str(number)
                path.mkdir()
                broker = Broker(
                    data_path=path,
                    http_address="127.0.0.1:0",
                    broadcast_address="127.0.0.1",
                    nsqlookupd_tcp_addresses=[lookupd.tcp_address],
                    disk_reserve=0,
                )
                brokers.append(await stack.enter_async_context(broker))
            wall = Wall()
            await until(lambda: len(lookupd.registry.producers) >= count)
            given = {"nsqlookupd_http_addresses": [lookupd.http_address], "refresh_interval": 0, **options}
            admin = await stack.enter_async_context(Admin(wall=wall, **given))
            return Cluster(lookupd, brokers, admin, wall, stack)

        yield start


@pytest.fixture
async def cluster(start: Callable[..., Any]) -> Cluster:
    """Topic ``orders`` with channels ``billing`` and ``mail`` on all nodes, and some messages."""
    found: Cluster = await start()
    for number in range(3):
        await found.nsqd(number, "/topic/create?topic=orders")
        for channel in ("billing", "mail"):
            await found.nsqd(number, f"/channel/create?topic=orders&channel={channel}")
        lines = b"\n".join(b'{"node":%d,"n":%d}' % (number, n) for n in range(10))
        await found.nsqd(number, "/mpub?topic=orders", lines)
    await found.registered("orders")
    return found
