"""``python -m tests.crash.torture``: kill -9 a busy broker again and again, then see whether it kept its word.

    --kills 100 --durability os|fsync --seconds-between 0.5     the torture
    --startup [--assert-startup]                                a start after 1 million messages and a kill
    --memory waiting|idle                                       what a backlog, or many idle channels, cost

Several producers and consumers keep the broker busy (see ``load``); it is killed at random moments, sometimes while it
starts, and started again on the same data path. At the end everything is drained, and the ledger says what was lost,
came back or came early. Moments are random and the kernel's scheduling is not ours: a seed repeats the load, and only
roughly the run. Exit status 1 says that a rule was broken; the data path is kept then.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.command_line import conduct, seed_of, torture_parser

from . import limits
from .broker import PATIENCE, BrokerProcess
from .ledger import Ledger
from .load import LONGEST_DELAY, Connection, Consumer, Producer

#: Topics, and how often producers choose each.
TOPICS = {"orders": 4, "clicks": 3, "mails": 2, "late": 1}


@dataclass(frozen=True)
class Subscription:
    topic: str
    channel: str
    consumers: int
    #: Made when this part of the kills is done.
    after: float = 0.0


SUBSCRIPTIONS = (
    Subscription("orders", "billing", 2),
    Subscription("orders", "audit", 1),
    Subscription("clicks", "count", 2),
    Subscription("mails", "send", 1),
    Subscription("mails", "archive", 1, after=0.4),
    # The first channel of a topic gets what was published before there was any.
    Subscription("late", "first", 1, after=0.3),
    Subscription("late", "second", 1, after=0.6),
)
PRODUCERS = 4
#: First deliveries owed at which producers hold back: well beyond what the broker below keeps in memory.
MOST_OWED = 8_000
#: Small, so that every run reads back from files, begins new ones and frees old ones.
FLAGS = ("--mem-queue-size=1000", f"--max-bytes-per-file={2 << 20}", "--sync-timeout=250ms")
#: Of all kills, this part hits a broker that is still starting.
KILLED_WHILE_STARTING = 0.15
#: The end: nothing old came for longer than anything can be deferred, while every consumer was answered so often.
QUIET_SECONDS = LONGEST_DELAY / 1000 + 0.5
QUIET_ANSWERS = 10


@dataclass(frozen=True)
class Settings:
    kills: int
    durability: str
    seed: int
    seconds_between: float = 0.5


@dataclass
class Report:
    seed: int
    durability: str
    kills: int = 0
    kills_while_starting: int = 0
    seconds: float = 0.0
    published: int = 0
    acknowledged: int = 0
    deliveries: int = 0
    redeliveries: int = 0
    #: Deliveries of finished messages; and the most of them in one life of the broker.
    duplicates: int = 0
    most_duplicates_after_a_kill: int = 0
    median_start_seconds: float = 0.0
    longest_start_seconds: float = 0.0
    lost: int = 0
    violations: dict[str, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations


class Torture:
    """One run: the broker's lives, the load of each, the drain at the end."""

    def __init__(self, settings: Settings, data_path: Path, progressed: Callable[[Report], None]) -> None:
        self._settings = settings
        self._data_path = data_path
        self._progressed = progressed
        self._rng = random.Random(settings.seed)
        self._ledger = Ledger(TOPICS)
        self._report = Report(settings.seed, settings.durability)
        self._starts: list[float] = []

    async def run(self) -> Report:
        began = time.monotonic()
        report, settings = self._report, self._settings
        while report.kills < settings.kills:
            if self._starts and self._rng.random() < KILLED_WHILE_STARTING:
                await self._kill_while_starting()
            else:
                await self._life()
            report.kills += 1
            self._account(began)
            self._progressed(report)
        await self._drain()
        self._ledger.conclude()
        self._account(began)
        report.violations = dict(self._ledger.violations.counts)
        report.samples = self._ledger.violations.samples
        report.lost = report.violations.get("lost", 0)
        return report

    # --- Lives of the broker -----------------------------------------------------------------------------------------

    def _flags(self) -> tuple[str, ...]:
        return f"--durability={self._settings.durability}", *FLAGS

    async def _start(self) -> BrokerProcess:
        broker = await BrokerProcess.start(self._data_path, *self._flags())
        self._starts.append(broker.start_seconds)
        return broker

    async def _kill_while_starting(self) -> None:
        broker = await BrokerProcess.spawn(self._data_path, *self._flags())
        try:
            await asyncio.sleep(self._rng.uniform(0.3, 1.1) * self._starts[-1])
        finally:
            await self._kill(broker)
        self._report.kills_while_starting += 1

    async def _life(self) -> None:
        """Start, load, kill at a random moment."""
        broker = await self._start()
        connections: list[Connection] = [
            *self._consumers(draining=False),
            *(Producer(self._ledger, self._fork(), list(TOPICS.values()), MOST_OWED) for _ in range(PRODUCERS)),
        ]
        connecting = asyncio.gather(*(c.connect(broker.address) for c in connections), return_exceptions=True)
        try:
            await asyncio.sleep(self._settings.seconds_between * self._rng.uniform(0.2, 1.8))
        finally:
            await self._kill(broker)
        for failure in await connecting:
            # Killed before it was connected: that is a moment like any other.
            if isinstance(failure, BaseException) and not isinstance(failure, ConnectionError):
                raise failure
        # What the broker had sent is still to be read. Nothing of this life may be mistaken for one of the next.
        await asyncio.gather(*(connection.closed for connection in connections))

    async def _kill(self, broker: BrokerProcess) -> None:
        if not broker.running:
            self._ledger.violations.add("ended", f"the broker ended by itself:\n{broker.log_tail()}")
        await broker.kill()
        self._listen_to(broker)

    def _listen_to(self, broker: BrokerProcess) -> None:
        for line in broker.troubles:
            self._ledger.violations.add("trouble", f"the broker logged: {line}")

    def _fork(self) -> random.Random:
        return random.Random(self._rng.random())

    def _consumers(self, *, draining: bool) -> list[Consumer]:
        done = 1.0 if draining else self._report.kills / self._settings.kills
        return [
            Consumer(self._ledger, self._fork(), subscription.topic, subscription.channel, draining=draining)
            for subscription in SUBSCRIPTIONS
            if done >= subscription.after
            for _ in range(subscription.consumers)
        ]

    # --- The end -----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """One more life, without a kill: let every channel hand over what it has."""
        broker = await self._start()
        self._ledger.begin_drain()
        consumers = self._consumers(draining=True)
        try:
            await asyncio.wait_for(asyncio.gather(*(c.connect(broker.address) for c in consumers)), PATIENCE)
            await self._quiet(broker, consumers)
            # The questions were messages too.
            for consumer in consumers:
                consumer.silent = True
            give_up = time.monotonic() + PATIENCE
            while any(c.asking for c in consumers) or self._ledger.missing(self._ledger.drain_from):
                if time.monotonic() > give_up:
                    break
                await asyncio.sleep(0.02)
            for consumer in consumers:
                consumer.close()
            status = await broker.stop()
            if status != 0:
                self._ledger.violations.add("ended", f"a clean stop ended with {status}:\n{broker.log_tail()}")
        finally:
            await broker.kill()
            self._listen_to(broker)

    async def _quiet(self, broker: BrokerProcess, consumers: list[Consumer]) -> None:
        """Returns when nothing from before the drain can still come."""
        drained, since = -1, 0.0
        answers = [0] * len(consumers)
        while broker.running and not any(consumer.closed.done() for consumer in consumers):
            now = time.monotonic()
            if drained != self._ledger.drained:
                drained, since = self._ledger.drained, now
                answers = [consumer.answers for consumer in consumers]
            elif now - since > QUIET_SECONDS and all(
                consumer.answers - before >= QUIET_ANSWERS for consumer, before in zip(consumers, answers, strict=True)
            ):
                return
            elif now - since > PATIENCE:
                self._ledger.violations.add("ended", "the broker answers no more")
                return
            await asyncio.sleep(0.02)
        self._ledger.violations.add("ended", f"the broker left its consumers:\n{broker.log_tail()}")

    def _account(self, began: float) -> None:
        report, ledger = self._report, self._ledger
        books = ledger.books.values()
        report.seconds = round(time.monotonic() - began, 1)
        report.published = ledger.published
        report.acknowledged = ledger.acknowledged
        report.deliveries = sum(book.deliveries for book in books)
        report.redeliveries = sum(book.redeliveries for book in books)
        duplicates = sum(book.duplicates for book in books)
        report.most_duplicates_after_a_kill = max(report.most_duplicates_after_a_kill, duplicates - report.duplicates)
        report.duplicates = duplicates
        report.median_start_seconds = round(statistics.median(self._starts), 3)
        report.longest_start_seconds = round(max(self._starts), 3)
        report.violations = dict(ledger.violations.counts)


async def torture(
    settings: Settings, data_path: Path, progressed: Callable[[Report], None] = lambda report: None
) -> Report:
    """Run it; ``data_path`` must exist and be empty."""
    return await Torture(settings, data_path, progressed).run()


# --- The command line -------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = torture_parser("tests.crash.torture", "Kill a busy broker again and again, and see what is lost.")
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="how often (default %(default)s)")
    parser.add_argument("--durability", choices=("os", "fsync"), default="os", help="(default %(default)s)")
    parser.add_argument(
        "--seconds-between", type=float, default=0.5, metavar="S", help="a life's mean length (default %(default)s)"
    )
    parser.add_argument("--startup", action="store_true", help="instead: time a start after many messages and a kill")
    parser.add_argument("--assert-startup", action="store_true", help="fail if that start took 2 seconds or more")
    parser.add_argument("--memory", choices=("waiting", "idle"), help="instead: measure memory")
    parser.add_argument("--messages", type=int, metavar="N", help="how many for --startup and --memory=waiting")
    arguments = parser.parse_args(argv)
    if arguments.startup:
        count, limit = arguments.messages or 1_000_000, arguments.assert_startup
        return conduct(arguments, "crash", lambda folder, _: limits.startup(folder, count, limited=limit), keep=False)
    if arguments.memory:
        measure = limits.waiting_memory if arguments.memory == "waiting" else limits.idle_memory
        count = arguments.messages or 10_000_000
        return conduct(arguments, "crash", lambda folder, _: measure(folder, count), keep=False)
    settings = Settings(arguments.kills, arguments.durability, seed_of(arguments), arguments.seconds_between)
    return conduct(
        arguments,
        "crash",
        lambda folder, progressed: torture(settings, folder, progressed),
        title=f"seed {settings.seed}, durability {settings.durability}",
        total=settings.kills,
        described=_described,
    )


def _described(report: Report) -> tuple[int, str]:
    broken = sum(report.violations.values())
    text = f"kills · {report.acknowledged:,} acknowledged · {report.duplicates:,} duplicates"
    return report.kills, text + (f" · {broken} broken" if broken else "")


if __name__ == "__main__":
    sys.exit(main())
