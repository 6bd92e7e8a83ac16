"""``python -m tests.cluster.torture`` kills nodes of a busy cluster and counts what that costs.

    python -m tests.cluster.torture --seconds 120 --seed 7

Three nsqds and two nsqlookupds, each in its own process, serve four producers and four consumers that find them through
the nsqlookupds (see ``load``). Every node lives for a while, is killed with -9, sometimes again while it starts, and
comes back; now and then a connection is cut, or a consumer replaced by another one. At the end all nodes are up,
everything is drained, and the ledger says what was lost or came twice for no reason. Moments are random and the
kernel's scheduling is not ours: a seed repeats the plan, and only roughly the run. Exit status 1 says that a rule was
broken; the nodes' files are kept then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from support.command_line import conduct, seed_of, torture_parser

from .ledger import Ledger
from .load import Publisher, Subscriber
from .nodes import Node, awake, lookupd, nsqd, patiently

BROKERS = 3
LOOKUPDS = 2
#: A consumer for each; a channel may have several.
SUBSCRIPTIONS = (("orders", "billing"), ("orders", "billing"), ("orders", "audit"), ("clicks", "count"))
#: Do they send again what may have been stored?
PUBLISHERS = (False, False, True, True)
#: Short, so that what was in flight on a connection that was cut is soon delivered again.
MSG_TIMEOUT = 5.0
#: Small, so that every run reads back from files, begins new ones and frees old ones.
FLAGS = ("--mem-queue-size=500", f"--max-bytes-per-file={1 << 20}", "--sync-timeout=250ms")
#: Seconds that a node lives, and that it is down.
LIFE = (1.0, 6.0)
DEATH = (0.0, 1.5)
KILLED_WHILE_STARTING = 0.15
#: Seconds between two smaller mishaps.
MISHAPS = (0.3, 2.0)


@dataclass
class Report:
    seed: int
    seconds: float = 0.0
    #: Of nsqd and nsqlookupd; the last while one was starting.
    kills: dict[str, int] = field(default_factory=dict)
    cuts: int = 0
    consumers_replaced: int = 0
    published: int = 0
    acknowledged: int = 0
    #: The connection was lost before the answer came.
    unknown: int = 0
    deliveries: int = 0
    #: Deliveries of what was delivered before, by reason.
    again: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    violations: dict[str, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations


class Torture:
    """One run: nodes, load, mishaps, drain."""

    def __init__(self, seconds: float, seed: int, folder: Path) -> None:
        self._seconds = seconds
        self._rng = random.Random(seed)
        self._folder = folder
        self._ledger = Ledger(list(dict.fromkeys(SUBSCRIPTIONS)), MSG_TIMEOUT)
        self._report = Report(seed)
        self._kills: Counter[str] = Counter()
        self._over = asyncio.Event()
        self._lookupds: list[Node] = []
        self._brokers: list[Node] = []

    @property
    def _nodes(self) -> list[Node]:
        return [*self._lookupds, *self._brokers]

    async def run(self) -> Report:
        began = time.monotonic()
        with self._listening_to_the_client():
            try:
                await self._start_nodes()
                await self._load()
                for node in self._nodes:
                    if (status := await node.stop()) != 0:
                        self._violated("ended", f"{node}: a clean stop ended with {status}:\n{node.log_tail()}")
            finally:
                await asyncio.gather(*(node.close() for node in self._nodes))
        for node in self._nodes:
            for line in node.troubles:
                self._violated("trouble", line)
        self._ledger.conclude()
        return self._account(began)

    def _violated(self, rule: str, text: str) -> None:
        self._ledger.violations.add(rule, text)

    @contextlib.contextmanager
    def _listening_to_the_client(self) -> Any:
        """Whatever the client itself calls an error is one: what it was put through it must be able to take."""
        torture = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                torture._violated("trouble", f"the client logged: {self.format(record)}")

        handler = Handler(logging.ERROR)
        # asyncio logs what nobody caught.
        loggers = [logging.getLogger(name) for name in ("flintmq", "asyncio")]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)

    # --- Nodes -------------------------------------------------------------------------------------------------------

    async def _start_nodes(self) -> None:
        for _ in range(LOOKUPDS):
            self._lookupds.append(lookupd())
        for number in range(BROKERS):
            self._brokers.append(nsqd(number, self._folder / f"nsqd-{number}", self._lookupds, *FLAGS))
        await asyncio.gather(*(node.start() for node in self._nodes))
        async with _http() as http:
            for broker in self._brokers:
                # A second channel of a topic gets what is published after it was made: so make all of them first.
                for topic, channel in self._ledger.books:
                    for what in (f"topic/create?topic={topic}", f"channel/create?topic={topic}&channel={channel}"):
                        await http.post(f"http://{broker.http_address}/{what}")
            for node in self._lookupds:
                # Polls, because they register when they get to it.
                while len((await _get(http, node, "nodes"))["producers"]) < BROKERS:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def _torment(self, node: Node, rng: random.Random) -> None:
        """Kill it again and again; when the time is over, it is up."""
        kind = "nsqlookupd" if node in self._lookupds else "nsqd"
        while not await self._is_over_after(rng.uniform(*LIFE)):
            await self._kill(node, kind)
            await asyncio.sleep(rng.uniform(*DEATH))
            while rng.random() < KILLED_WHILE_STARTING:
                await node.spawn()
                await asyncio.sleep(rng.uniform(0.05, 1.0))
                await self._kill(node, "while starting")
            await node.start()

    async def _is_over_after(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        return self._over.is_set()

    async def _kill(self, node: Node, kind: str) -> None:
        if not node.running:
            self._violated("ended", f"{node} ended by itself:\n{node.log_tail()}")
        self._kills[kind] += 1
        self._ledger.killed(node.address, time.monotonic())
        await node.kill()
        self._ledger.is_gone(node.address)

    # --- Load --------------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        looked_up = [node.http_address for node in self._lookupds]
        subscribers = [
            Subscriber(self._ledger, self._fork(), looked_up, topic, channel) for topic, channel in SUBSCRIPTIONS
        ]
        publishers = [
            Publisher(self._ledger, self._fork(), looked_up, self._ledger.topics, retries=retries)
            for retries in PUBLISHERS
        ]
        await asyncio.gather(*(client.start() for client in (*subscribers, *publishers)))
        async with asyncio.TaskGroup() as group:
            for node in self._nodes:
                group.create_task(self._torment(node, self._fork()))
            group.create_task(self._mishaps(subscribers, publishers, self._fork()))
            await awake(self._seconds)
            self._over.set()
        await asyncio.gather(*(publisher.stop() for publisher in publishers))
        for subscriber in subscribers:
            subscriber.draining = True
        await self._drain()
        await asyncio.gather(*(subscriber.stop() for subscriber in subscribers))

    async def _mishaps(self, subscribers: list[Subscriber], publishers: list[Publisher], rng: random.Random) -> None:
        while not await self._is_over_after(rng.uniform(*MISHAPS)):
            if rng.random() < 0.25:
                await rng.choice(subscribers).replace()
                self._report.consumers_replaced += 1
            else:
                self._report.cuts += rng.choice([*subscribers, *publishers]).wire.cut(rng)

    def _fork(self) -> random.Random:
        return random.Random(self._rng.random())

    # --- The end -----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Until no node has a message left. Whether that is all there should have been, the ledger knows."""
        left: list[str] = []

        async def until_empty() -> None:
            nonlocal left
            async with _http() as http:
                while left := [text for broker in self._brokers for text in await self._left(http, broker)]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        try:
            await patiently(until_empty())
        except TimeoutError:
            self._violated("not drained", "; ".join(left))

    async def _left(self, http: aiohttp.ClientSession, broker: Node) -> list[str]:
        stats = await _get(http, broker, "stats?format=json&include_clients=false&include_mem=false")
        found = []
        for topic in stats["topics"]:
            counts = [("topic", topic["depth"])]
            for channel in topic["channels"]:
                names = ("depth", "in_flight_count", "deferred_count")
                counts += [(f"{channel['channel_name']} {name}", channel[name]) for name in names]
            found += [f"{broker} {topic['topic_name']} {name}: {count}" for name, count in counts if count]
        return found

    def _account(self, began: float) -> Report:
        report, ledger = self._report, self._ledger
        report.seconds = round(time.monotonic() - began, 1)
        report.kills = dict(self._kills)
        report.published = ledger.published
        report.acknowledged = ledger.acknowledged
        report.unknown = ledger.unknown
        report.deliveries = sum(book.count for book in ledger.books.values())
        report.again = dict(sum((book.again for book in ledger.books.values()), Counter()))
        report.violations = dict(ledger.violations.counts)
        report.samples = ledger.violations.samples
        report.lost = report.violations.get("lost", 0)
        return report


@contextlib.asynccontextmanager
async def _http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), raise_for_status=True) as session:
        yield session


async def _get(http: aiohttp.ClientSession, node: Node, what: str) -> Any:
    async with http.get(f"http://{node.http_address}/{what}") as response:
        return msgspec.json.decode(await response.read())


async def torture(seconds: float, seed: int, folder: Path) -> Report:
    """Run it; ``folder`` must exist and be empty."""
    return await Torture(seconds, seed, folder).run()


# --- The command line -------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = torture_parser("tests.cluster.torture", "Kill nodes of a busy cluster, and count what that costs.")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="of kills (default %(default)s)")
    arguments = parser.parse_args(argv)
    seconds, seed = arguments.seconds, seed_of(arguments)
    return conduct(
        arguments,
        "cluster",
        lambda folder, _: torture(seconds, seed, folder),
        title=f"seed {seed}, {seconds:g} s of kills",
    )


if __name__ == "__main__":
    sys.exit(main())
