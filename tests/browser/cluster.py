"""Three brokers, an nsqlookupd and an nsqadmin in this process, with topics, channels, consumers and dead letters."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession

from flintmq.admin.daemon import Admin
from flintmq.broker.daemon import Broker
from flintmq.broker.storage.disk import Disk
from flintmq.client import Consumer, NodeClient, Producer
from flintmq.lookup.daemon import Lookupd
from flintmq.options import MILLISECOND
from flintmq.system import System

__all__ = ["Cluster", "until"]

PATIENCE = 20.0


async def until(is_so: Callable[[], Any | Awaitable[Any]], what: str, patience: float = PATIENCE) -> Any:
    """Wait until something holds, and return it; fail with ``what`` if it takes too long."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience
    while True:
        found = is_so()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        assert loop.time() < end, f"not within {patience} s: {what}"
        await asyncio.sleep(0.05)


class _Named(System):
    """A machine with a name that is the same wherever the tests run."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def hostname(self) -> str:
        return self._name


SETTINGS: dict[str, Any] = {
    "orders": {"retain-age": "24h", "channel": {"billing": {}, "archive": {}}},
    "refunds": {"retain-age": "24h", "channel": {"bank": {"max-attempts": 2}}},
    "payments": {"retain-age": "24h", "channel": {"ledger": {}}},
    "clicks": {"retain-age": "24h", "channel": {"counter": {}}},
}


class Cluster:
    """``async with Cluster(folder) as cluster`` starts everything; ``fill`` puts something into it."""

    def __init__(
        self, folder: Path, *, count: int = 3, interval: int = 500, settings: Any = SETTINGS, **admin: Any
    ) -> None:
        self.folder = folder
        self.count = count
        self.interval = interval
        self.settings = settings
        self.admin_options = admin
        self.brokers: list[Broker] = []
        self.lookupd: Lookupd
        self.admin: Admin
        self._address = ""
        self._stopped: set[int] = set()
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Cluster:
        self.lookupd = await self._stack.enter_async_context(Lookupd())
        for number in range(self.count):
            self.brokers.append(await self._start_broker(number))
        await self.start_admin()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.admin.stop()
        for number in range(self.count):
            await self.stop_broker(number)
        await self._stack.aclose()

    async def _start_broker(self, number: int, http_address: str = "127.0.0.1:0") -> Broker:
        broker = Broker(
            data_path=str(self.folder / f"nsqd-{number + 1}"),
            id=number + 1,
            http_address=http_address,
            broadcast_address="127.0.0.1",
            nsqlookupd_tcp_addresses=(self.lookupd.tcp_address,),
            e2e_processing_latency_percentiles=(0.99, 0.95, 0.5),
            topic=self.settings,
            disk=Disk(_Named(f"nsqd-{number + 1}.example")),
        )
        self.folder.joinpath(f"nsqd-{number + 1}").mkdir(parents=True, exist_ok=True)
        await broker.start()
        return broker

    async def stop_broker(self, number: int) -> None:
        if number not in self._stopped:
            self._stopped.add(number)
            await self.brokers[number].stop()

    async def start_admin(self) -> None:
        """Start nsqadmin, at the address where it was before."""
        self.admin = Admin(
            http_address=self._address or "127.0.0.1:0",
            nsqlookupd_http_addresses=(self.lookupd.http_address,),
            refresh_interval=self.interval * MILLISECOND,
            **self.admin_options,
        )
        await self.admin.start()
        self._address = self.admin.http_address
        await self.admin.state.fresh()

    @property
    def url(self) -> str:
        return f"http://{self._address}{self.admin.options.base_path.rstrip('/')}"

    def node(self, number: int) -> str:
        return f"127.0.0.1:{self.brokers[number].http_address.rpartition(':')[2]}"

    def client(self, number: int = 0) -> NodeClient:
        return NodeClient(f"http://{self.brokers[number].http_address}")

    @asynccontextmanager
    async def admin_client(self) -> AsyncIterator[Callable[[str, Any], Awaitable[Any]]]:
        """Ask nsqadmin to do something, as a script does."""
        async with ClientSession() as session:

            async def ask(path: str, body: Any) -> Any:
                async with session.post(f"{self.url}/api/v2{path}", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    return await answer.json()

            yield ask

    async def publish(self, topic: str, bodies: list[bytes], number: int = 0, delay: float = 0) -> None:
        async with Producer(self.brokers[number].tcp_address) as producer:
            if delay:
                for body in bodies:
                    await producer.defer(topic, body, delay=delay)
            else:
                await producer.publish_many(topic, bodies)

    # --- Something to see --------------------------------------------------------------------------------------------

    async def fill(self, *, orders: int = 300) -> None:
        """Topics with a past: messages that wait, are in flight, deferred, dead, and a reader of a log."""
        random.seed(7)
        for number in range(self.count):
            await self.publish("orders", [order(number * orders + i) for i in range(orders)], number)
            await self.publish("payments", [payment(i) for i in range(40)], number)
            await self.publish("clicks", [msgspec.msgpack.encode(click(i)) for i in range(20)], number)
            await self.publish("audit.trail", [b"login ann", b"logout ann"], number)
        await self.publish("orders", [order(90_000 + i) for i in range(5)], delay=1800)
        await self.publish("payments", [bytes(range(256)), b"plain text, no JSON at all"])
        async with self.client() as client:
            await client.create_channel("audit.trail", "siem")
            await client.pause_channel("payments", "ledger")
            await client.set_position("orders", "spark-orders-hourly", "earliest")
            await client.set_position("clicks", "spark-clicks", "latest")
        await self.report_query(batch=41, rows=9_000, lag=120)
        hour = {"id": "b7e0", "name": "orders by hour", "writes": ["audit.trail"], "batch_seconds": 12.5}
        await self.report_query(**hour, state_rows=4_200, state_bytes=9_400_000, lag=0)
        clicks = {"id": "c90f", "name": "clicks by page", "topics": ["clicks"], "rows_per_second": 0}
        await self.report_query(**clicks, lag=20, state="failed", error="disk full")
        await self.make_dead(4)

    async def report_query(self, *numbers: int, **said: Any) -> None:
        """Have a query report itself to some nodes, or to all, as Spark's listener does."""
        now = int(time.time() * 1000)
        about = {"id": "a1f5", "name": "orders archive", "topics": ["orders"], "readers": ["spark-orders-hourly"]}
        about |= {"at": now, "progress": now, "batch": 0, "batch_seconds": 0.8, "rows_per_second": 340.5, **said}
        async with ClientSession() as session:
            for number in numbers or range(self.count):
                target = f"http://{self.node(number)}/pipeline/report"
                async with session.post(target, json=about) as answer:
                    assert answer.status == 200, await answer.text()

    async def make_dead(self, count: int, number: int = 0) -> None:
        """Publish to refunds, where every message fails twice, which is one time too many for its channel bank."""
        before = await self.dead(number)
        await self.publish("refunds", [payment(i) for i in range(count)], number)
        consumer = Consumer(
            "refunds",
            "bank",
            nsqd=self.brokers[number].tcp_address,
            handler=lambda message: message.requeue(0),
            max_attempts=0,
            max_backoff_duration=0,
            max_in_flight=100,
        )
        task = asyncio.create_task(consumer.run())
        try:
            for _ in range(int(PATIENCE / 0.05)):
                if await self.dead(number) >= before + count:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"no {count} dead letters")
        finally:
            await consumer.close()
            await asyncio.gather(task, return_exceptions=True)

    async def dead(self, number: int = 0) -> int:
        async with self.client(number) as client:
            stats = await client.stats(topic="refunds", channel="bank", extended=True)
        return sum(int(one["dead_lettered_count"]) for topic in stats["topics"] for one in topic["channels"])

    async def consume(self, topic: str, channel: str, workers: int = 1, **options: Any) -> None:
        """Consumers on all brokers that finish everything, until the end."""
        for number in range(workers):
            consumer = Consumer(
                topic,
                channel,
                nsqd=[broker.tcp_address for broker in self.brokers],
                handler=lambda message: None,
                max_in_flight=30,
                client_id=f"{channel}-{number + 1}",
                hostname=f"worker-{number + 1}.example",
                **options,
            )
            self._tasks.append(asyncio.create_task(consumer.run()))
        await asyncio.sleep(0)

    def keep_publishing(self, topic: str, rate: int, make: Callable[[int], bytes]) -> None:
        """Publish about ``rate`` messages a second, spread over the brokers, until the end."""

        addresses = [broker.tcp_address for broker in self.brokers]

        async def run() -> None:
            async with Producer(addresses, hostname="shop.example", client_id="shop") as producer:
                number = 0
                while True:
                    share = max(1, round(rate / 10 * random.uniform(0.8, 1.2)))
                    await producer.publish_many(topic, [make(number + i) for i in range(share)])
                    number += share
                    await asyncio.sleep(0.1)

        self._tasks.append(asyncio.create_task(run()))


CITIES = ("Lisbon", "Oslo", "Graz", "Turin", "Ghent")


def order(number: int) -> bytes:
    return json.dumps(
        {
            "id": number,
            "customer": {"name": f"customer {number % 97}", "city": CITIES[number % 5], "vip": number % 11 == 0},
            "items": [{"sku": f"A-{number % 40:03}", "count": 1 + number % 3, "price": 9.5}],
            "note": None,
        }
    ).encode()


def payment(number: int) -> bytes:
    return json.dumps({"order": number, "amount": round(number * 1.25, 2), "currency": "EUR"}).encode()


def click(number: int) -> dict[str, Any]:
    return {"page": f"/p/{number}", "at": number * 1000, "tags": ["a", "b"], "raw": b"\x00\x01"}
