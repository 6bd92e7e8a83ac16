"""One torture: nodes, load, faults, drain, and the report of what that cost.

A Run owns the nodes and their fronts (see ``front``). With nsqlookupds there is a cluster, too: producers and consumers
with the project's own client find the brokers through them (see ``cluster_load``), while the nsqlookupds are killed as
the brokers are, connections are cut, and consumers replaced. Moments are random and the kernel's scheduling is not
ours: a seed repeats the plan, and only roughly the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq import __version__
from flintmq.addresses import split
from flintmq.tools.torture.cluster_ledger import ClusterLedger
from flintmq.tools.torture.cluster_load import Publisher, Subscriber
from flintmq.tools.torture.front import CLOCK, CUT, DESCRIPTORS, DISK_FULL, FAULTS, STALL, Front
from flintmq.tools.torture.ledger import Ledger, Violations
from flintmq.tools.torture.node import Node, NodeFailed, patiently

if TYPE_CHECKING:
    import aiohttp

__all__ = ["DURABILITIES", "Costs", "Plan", "Report", "Run", "torture"]

DURABILITIES = ("os", "fsync", "memory")
#: Rules that a broker with durability ``memory`` may break when it is killed.
FORGIVEN = ("lost", "torn", "came back", "two bodies")

#: Topics of the cluster; a consumer for each, a channel may have several.
SUBSCRIPTIONS = (
    ("cluster-orders", "billing"),
    ("cluster-orders", "billing"),
    ("cluster-orders", "audit"),
    ("cluster-clicks", "count"),
)
#: Do they send again what may have been stored?
PUBLISHERS = (False, False, True, True)
#: Short, so that what was in flight on a connection that was cut is soon delivered again.
MSG_TIMEOUT = 5.0
#: Seconds that an nsqlookupd lives, and that it is down.
LIFE = (1.0, 6.0)
DEATH = (0.0, 1.5)
#: Seconds between two mishaps of the cluster's clients.
MISHAPS = (0.3, 2.0)
LOOKUPD_KILLED, CLIENT_CUT, REPLACED = "nsqlookupd killed", "client cut", "consumer replaced"

_FAKETIME = ("/usr/lib/*/faketime", "/usr/lib*/faketime", "/usr/local/lib/faketime")


@dataclass(frozen=True)
class Plan:
    seed: int
    folder: Path
    #: It ends after so many seconds, or after so many kills, whichever comes first. Without kills, brokers live on.
    seconds: float | None = None
    kills: int | None = None
    #: A broker for each.
    durabilities: tuple[str, ...] = ("os", "fsync")
    lookupds: int = 2
    #: Load on raw connections, broker by broker.
    raw: bool = True
    #: A life's mean length.
    seconds_between: float = 2.0
    faults: tuple[str, ...] = FAULTS
    against: tuple[str, ...] = ()


@dataclass
class Costs:
    """What became of the messages of one kind of broker."""

    brokers: int = 0
    kills: int = 0
    published: int = 0
    acknowledged: int = 0
    #: The connection was lost before the answer came.
    unknown: int = 0
    refused: int = 0
    deliveries: int = 0
    lost: int = 0
    #: Deliveries of what was delivered before, by cause; and those of them that had been finished.
    again: dict[str, int] = field(default_factory=dict)
    duplicates: int = 0
    early: int = 0
    #: Deferred messages that came more than a second late, and how late the worst came.
    late: int = 0
    latest_seconds: float = 0.0
    median_start_seconds: float = 0.0
    slowest_start_seconds: float = 0.0


@dataclass
class Report:
    seed: int
    version: str
    machine: str
    date: str
    against: list[str]
    seconds: float = 0.0
    #: It ran to its end: everything was drained, so that what is missing is lost.
    complete: bool = False
    faults: dict[str, int] = field(default_factory=dict)
    #: Faults that could not be done here, with the reason.
    left_out: dict[str, str] = field(default_factory=dict)
    #: By durability; ``cluster`` is the load that finds its brokers through nsqlookupd.
    costs: dict[str, Costs] = field(default_factory=dict)
    lost: int = 0
    violations: dict[str, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


class Run:
    def __init__(self, plan: Plan, broker: type[Node] = Node) -> None:
        """``broker``: what an nsqd of this run is, if it is more than a process that can be killed."""
        self.plan = plan
        self._broker = broker
        self._rng = random.Random(plan.seed)
        self.began = time.monotonic()
        self.phase = "starting"
        self.faults: Counter[str] = Counter()
        self.over = asyncio.Event()
        self.fronts: list[Front] = []
        self.lookupds: list[Node] = []
        self.cluster: ClusterLedger | None = None
        self._violations = Violations()
        self._kills_taken = self._kills_done = 0
        self._complete = False
        self._left_out: dict[str, str] = {}
        self._publishers: list[Publisher] = []
        self._subscribers: list[Subscriber] = []

    # --- What fronts ask ---------------------------------------------------------------------------------------------

    @property
    def seconds_between(self) -> float:
        return self.plan.seconds_between

    @property
    def progress(self) -> float:
        """How much of the faults is done, 0 … 1."""
        if self.over.is_set():
            return 1.0
        done = [0.0]
        if self.plan.kills:
            done.append(self._kills_done / self.plan.kills)
        if self.plan.seconds:
            done.append((time.monotonic() - self.began) / self.plan.seconds)
        return min(1.0, max(done))

    def take_kill(self) -> bool:
        if self.over.is_set() or (self.plan.kills is not None and self._kills_taken >= self.plan.kills):
            return False
        self._kills_taken += 1
        return True

    def killing(self, node: Node) -> None:
        if self.cluster is not None:
            self.cluster.killed(node.address, time.monotonic())

    def killed(self, node: Node) -> None:
        if self.cluster is not None:
            self.cluster.is_gone(node.address)
        self._kills_done += 1
        if self.plan.kills is not None and self._kills_done >= self.plan.kills:
            self.over.set()

    def prepare(self, node: Node, data_path: Path) -> None:
        """Called before the first start of a broker."""

    def buried(self, node: Node) -> None:
        """Called when a life is over and all that its broker had sent is read."""

    def disturbed(self, node: Node) -> None:
        if self.cluster is not None:
            self.cluster.disturbed(node.address, time.monotonic())

    # --- The run -----------------------------------------------------------------------------------------------------

    async def run(self) -> Report:
        """Run it to its end. When it is cancelled, ``report`` has the figures so far."""
        with self._listening_to_the_client():
            try:
                await self._make()
                self.phase = "torture"
                await self._torment()
                self.phase = "draining"
                await self._end()
                self.phase = "counting"
                await asyncio.to_thread(self._conclude)
                self._complete = all(front.ledger.is_drained for front in self.fronts)
            except* (NodeFailed, TimeoutError) as group:
                for exc in group.exceptions:
                    self._violations.add("ended", str(exc) or repr(exc))
            finally:
                self.close_books()
                # The clients first: they would try to reach nodes that are gone.
                await asyncio.gather(
                    *(publisher.abandon() for publisher in self._publishers),
                    *(subscriber.abandon() for subscriber in self._subscribers),
                )
                await asyncio.gather(
                    *(front.close() for front in self.fronts), *(node.close() for node in self.lookupds)
                )
        return self.report()

    def close_books(self) -> None:
        """Count nothing more: what happens while everything is being ended breaks no rule."""
        self._violations.is_closed = True
        for ledger in self._ledgers:
            ledger.abandoned = True
            ledger.violations.is_closed = True
        for node in self._nodes:
            node.is_heard = False

    def _conclude(self) -> None:
        for ledger in self._ledgers:
            ledger.conclude()

    @property
    def _ledgers(self) -> list[Ledger | ClusterLedger]:
        return [*(front.ledger for front in self.fronts), *([self.cluster] if self.cluster else [])]

    @contextlib.contextmanager
    def _listening_to_the_client(self) -> Iterator[None]:
        """Whatever the client itself calls an error is one: what it was put through it must be able to take."""
        violations = self._violations

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                violations.add("trouble", f"the client logged: {self.format(record)}")

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

    async def _make(self) -> None:
        plan = self.plan
        if plan.against:
            for fault in plan.faults:
                if fault not in (CUT, STALL):
                    self._left_out[fault] = "the server is not ours"
            prefix = f"torture-{plan.seed}-"
            self.fronts = [
                Front(
                    self,
                    self._fork(),
                    tuple(fault for fault in plan.faults if fault in (CUT, STALL)),
                    durability="unknown",
                    endpoint=split(address)[:2],
                    topic_prefix=prefix,
                )
                for address in plan.against
            ]
            await asyncio.gather(*(front.start() for front in self.fronts))
            return
        faults, faketime = self._possible()
        self.lookupds = [Node("nsqlookupd", "--broadcast-address=127.0.0.1") for _ in range(plan.lookupds)]
        await asyncio.gather(*(node.start() for node in self.lookupds))
        for number, durability in enumerate(plan.durabilities):
            folder = plan.folder / f"nsqd-{number}"
            folder.mkdir()
            clock = plan.folder / f"clock-{number}"
            clock.write_text("+0s\n")
            environment = {
                "LD_PRELOAD": faketime,
                "FAKETIME_TIMESTAMP_FILE": str(clock),
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_CACHE_DURATION": "1",
            }
            node = self._broker(
                "nsqd",
                f"--node-id={number}",
                "--max-heartbeat-interval=2h",
                "--broadcast-address=127.0.0.1",
                *(f"--lookupd-tcp-address={lookupd.address}" for lookupd in self.lookupds),
                environment=environment if CLOCK in faults else None,
            )
            self.prepare(node, folder)
            self.fronts.append(
                Front(
                    self,
                    self._fork(),
                    faults,
                    durability=durability,
                    node=node,
                    folder=folder,
                    clock_file=clock,
                    loaded=plan.raw,
                )
            )
        await asyncio.gather(*(front.start() for front in self.fronts))
        if self.lookupds:
            await self._make_cluster()

    def _possible(self) -> tuple[tuple[str, ...], str]:
        """The faults that can be done here, and where libfaketime is."""
        faketime = next((path for pattern in _FAKETIME for path in glob.glob(f"{pattern}/libfaketime.so.1")), "")
        if CLOCK in self.plan.faults and not faketime:
            self._left_out[CLOCK] = "libfaketime is not installed"
        if DESCRIPTORS in self.plan.faults and sys.platform != "linux":
            self._left_out[DESCRIPTORS] = "only Linux can change the limits of a running process"
        if DISK_FULL in self.plan.faults and not hasattr(os, "posix_fallocate"):
            self._left_out[DISK_FULL] = "this system cannot reserve space for a file"
        return tuple(fault for fault in self.plan.faults if fault not in self._left_out), faketime

    async def _make_cluster(self) -> None:
        self.cluster = ClusterLedger(list(dict.fromkeys(SUBSCRIPTIONS)), MSG_TIMEOUT)
        async with _http() as http:
            for front in self.fronts:
                assert front.node is not None
                # A second channel of a topic gets what is published after it was made: so make all of them first.
                for topic, channel in self.cluster.books:
                    for what in (f"topic/create?topic={topic}", f"channel/create?topic={topic}&channel={channel}"):
                        await http.post(f"http://{front.node.http_address}/{what}")
            for node in self.lookupds:
                # Polls, because they register when they get to it.
                while len((await _get(http, node, "nodes"))["producers"]) < len(self.fronts):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        looked_up = [node.http_address for node in self.lookupds]
        self._subscribers = [
            Subscriber(self.cluster, self._fork(), looked_up, topic, channel) for topic, channel in SUBSCRIPTIONS
        ]
        self._publishers = [
            Publisher(self.cluster, self._fork(), looked_up, self.cluster.topics, retries=retries)
            for retries in PUBLISHERS
        ]
        await asyncio.gather(
            *(subscriber.start() for subscriber in self._subscribers),
            *(publisher.start() for publisher in self._publishers),
        )

    def _fork(self) -> random.Random:
        return random.Random(self._rng.random())

    # --- Faults ------------------------------------------------------------------------------------------------------

    async def _torment(self) -> None:
        self.began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for front in self.fronts:
                group.create_task(front.torment())
            for node in self.lookupds:
                group.create_task(self._torment_lookupd(node, self._fork()))
            if self.cluster is not None:
                group.create_task(self._mishaps(self._fork()))
            await self._is_over_after(self.plan.seconds)
            self.over.set()

    async def _is_over_after(self, seconds: float | None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()
        return self.over.is_set()

    async def _torment_lookupd(self, node: Node, rng: random.Random) -> None:
        """Kill it again and again; when the time is over, it is up."""
        while not await self._is_over_after(rng.uniform(*LIFE)):
            if not node.running:
                self._violations.add("ended", f"{node} ended by itself:\n{node.log_tail()}")
            await node.kill()
            self.faults[LOOKUPD_KILLED] += 1
            await asyncio.sleep(rng.uniform(*DEATH))
            await node.start()

    async def _mishaps(self, rng: random.Random) -> None:
        while not await self._is_over_after(rng.uniform(*MISHAPS)):
            if rng.random() < 0.25:
                await rng.choice(self._subscribers).replace()
                self.faults[REPLACED] += 1
            else:
                wires = [client.wire for client in self._subscribers] + [client.wire for client in self._publishers]
                self.faults[CLIENT_CUT] += rng.choice(wires).cut(rng)

    # --- The end -----------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        await asyncio.gather(*(publisher.stop() for publisher in self._publishers))
        for subscriber in self._subscribers:
            subscriber.draining = True
        await asyncio.gather(*(front.drain() for front in self.fronts), self._drain_cluster())
        await asyncio.gather(*(subscriber.stop() for subscriber in self._subscribers))
        for node in self._nodes:
            if (status := await node.stop()) != 0:
                self._violations.add("ended", f"{node}: a clean stop ended with {status}:\n{node.log_tail()}")

    @property
    def _nodes(self) -> list[Node]:
        return [*(front.node for front in self.fronts if front.node is not None), *self.lookupds]

    async def _drain_cluster(self) -> None:
        """Until no node has a message left. Whether that is all there should have been, the ledger knows."""
        if self.cluster is None:
            return
        left: list[str] = []

        async def until_empty() -> None:
            nonlocal left
            async with _http() as http:
                while left := [text for front in self.fronts for text in await self._left(http, front)]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        try:
            await patiently(until_empty())
        except TimeoutError:
            self._violations.add("not drained", "; ".join(left))

    async def _left(self, http: aiohttp.ClientSession, front: Front) -> list[str]:
        assert self.cluster is not None
        assert front.node is not None
        stats = await _get(http, front.node, "stats?format=json&include_clients=false&include_mem=false")
        found = []
        for topic in stats["topics"]:
            if topic["topic_name"] not in self.cluster.topics:
                continue
            counts = [("topic", topic["depth"])]
            for channel in topic["channels"]:
                names = ("depth", "in_flight_count", "deferred_count")
                counts += [(f"{channel['channel_name']} {name}", channel[name]) for name in names]
            found += [f"{front.name} {topic['topic_name']} {name}: {count}" for name, count in counts if count]
        return found

    # --- The report --------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What happened so far."""
        report = Report(
            self.plan.seed,
            __version__,
            f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs, "
            f"Python {platform.python_version()}",
            datetime.now(UTC).isoformat(timespec="seconds"),
            list(self.plan.against),
            round(time.monotonic() - self.began, 1),
            self._complete,
            dict(self.faults),
            dict(self._left_out),
        )
        violations = Violations(Counter(self._violations.counts), list(self._violations.samples))
        for name in dict.fromkeys(front.durability for front in self.fronts):
            fronts = [front for front in self.fronts if front.durability == name]
            report.costs[name] = costs = _raw_costs(fronts)
            for front in fronts:
                _add(violations, front.ledger.violations, FORGIVEN if name == "memory" and front.kills else ())
            report.lost += costs.lost
        if self.cluster is not None:
            report.costs["cluster"] = costs = _cluster_costs(self.cluster, len(self.fronts))
            unsafe = any(front.durability == "memory" and front.kills for front in self.fronts)
            _add(violations, self.cluster.violations, FORGIVEN if unsafe else ())
            report.lost += costs.lost
        for node in self._nodes:
            for line in node.troubles:
                violations.add("trouble", line)
        report.violations = dict(violations.counts)
        report.samples = violations.samples
        return report


def _add(violations: Violations, more: Violations, forgiven: Sequence[str]) -> None:
    violations.counts.update({rule: count for rule, count in more.counts.items() if rule not in forgiven})
    violations.samples += [text for text in more.samples if text.partition(":")[0] not in forgiven]


def _raw_costs(fronts: list[Front]) -> Costs:
    ledgers = [front.ledger for front in fronts]
    books = [book for ledger in ledgers for book in list(ledger.books.values())]
    starts = [start for front in fronts if front.node is not None for start in front.node.starts]
    return Costs(
        brokers=len(fronts),
        kills=sum(front.kills for front in fronts),
        published=sum(ledger.published for ledger in ledgers),
        acknowledged=sum(ledger.acknowledged for ledger in ledgers),
        unknown=sum(ledger.in_doubt for ledger in ledgers),
        refused=sum(ledger.refused for ledger in ledgers),
        deliveries=sum(book.deliveries for book in books),
        lost=sum(ledger.violations.counts["lost"] for ledger in ledgers),
        again=dict(sum((book.again for book in books), Counter())),
        duplicates=sum(book.duplicates for book in books),
        early=sum(ledger.violations.counts["early"] for ledger in ledgers),
        late=sum(book.late for book in books),
        latest_seconds=round(max((book.latest for book in books), default=0.0), 3),
        median_start_seconds=round(statistics.median(starts), 3) if starts else 0.0,
        slowest_start_seconds=round(max(starts, default=0.0), 3),
    )


def _cluster_costs(ledger: ClusterLedger, brokers: int) -> Costs:
    books = list(ledger.books.values())
    return Costs(
        brokers=brokers,
        published=ledger.published,
        acknowledged=ledger.acknowledged,
        unknown=ledger.unknown,
        refused=ledger.refused,
        deliveries=sum(book.count for book in books),
        lost=ledger.violations.counts["lost"],
        again=dict(sum((book.again for book in books), Counter())),
    )


@contextlib.asynccontextmanager
async def _http() -> AsyncIterator[aiohttp.ClientSession]:
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), raise_for_status=True) as session:
        yield session


async def _get(http: aiohttp.ClientSession, node: Node, what: str) -> Any:
    async with http.get(f"http://{node.http_address}/{what}") as response:
        return msgspec.json.decode(await response.read())


async def torture(plan: Plan) -> Report:
    """Run it; ``plan.folder`` must exist and be empty."""
    return await Run(plan).run()
