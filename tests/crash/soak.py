"""A long mixed load on one nsqd: nothing is lost, and memory, descriptors and latency stay as they are.

    python -m tests.crash.soak --minutes 80 --results FILE --chart docs/images/soak.svg

The broker is a process of its own, as it is installed (durability ``os``). Its main load are two flows of the C
generator, of messages of 200 bytes:

``batches``   MPUBs of 100 on 2 connections; channel ``work``, and a lagging channel that reads from files
``singles``   PUBs on 4 connections; channel ``work``

The run begins with a calibration: both flows publish as fast as they are answered and consumed. The rate of each that
reaches its consumers then is its *maximum*: of this machine with the generator and everything else on it, not of the
broker alone. For the rest of the run each flow publishes at half of that. ``trickle`` adds a little of everything else:
HTTP, deferred messages, consumers that requeue or let messages time out, visitors, ephemeral channels.

Every number that was published must arrive, on each channel, once: more often only if it was requeued, timed out or was
left behind. Samples are taken every few seconds. After a warm-up their first and last quarter are compared, by medians:
memory, descriptors, threads, disk and p99 may not have grown. ctrl-C ends the load early and prints what there is; a
second one ends at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from statistics import linear_regression, median

from bench import charts, load
from support.command_line import conduct, seed_of, torture_parser
from support.http_client import HttpClient
from support.revision import ENGINE, about

from .broker import PATIENCE, BrokerProcess
from .flow import Flow, FlowFailed, Latencies, Reading, in_words
from .gauge import Gauge, depth_of, disk_bytes, objects_of, raise_file_limit, stats_of, until
from .trickle import Amounts, Trickle

SOURCES = (*ENGINE, "tests/crash/soak.py", "tests/crash/trickle.py", "tests/crash/flow.py", "bench/load.c")
BODY_BYTES = 200
BATCHES = {"batch": 100, "connections": 2, "consumers": 2, "window": 2}
SINGLES = {"batch": 1, "connections": 4, "consumers": 2, "window": 1}
#: Messages that publishers may be ahead of the consumers of ``work``.
AHEAD = 100_000
#: So much of the calibration does not count: the flows do not begin together.
UNCOUNTED = 0.25
FILES = 4_096
#: Samples that a run keeps, and that its line of results has.
MOST_SAMPLES, THINNED = 2_000, 160
#: Of the samples, each of this number is a line of a log: one a minute.
LOGGED_EACH = 12
MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    #: Of the load, after the calibration.
    seconds: float
    seed: int
    calibration: float = 20.0
    #: The part of the maximum at which the flows publish.
    share: float = 0.5
    #: Between two samples.
    every: float = 5.0
    #: Before the first sample that counts.
    warm_up: float = 600.0
    #: Messages that the lagging channel stays behind, at most.
    lag: int = 500_000
    #: Of the trickle.
    amounts: Amounts = field(default_factory=Amounts)


@dataclass(slots=True)
class Sample:
    #: Since the load began.
    seconds: float
    memory_mb: float
    #: Without its libraries.
    anonymous_mb: float
    descriptors: float
    threads: float
    disk_mb: float
    depth: float
    #: Cores that the broker used, and the machine's load average.
    cpu: float
    machine_load: float
    published_per_s: float
    delivered_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True)
class Trend:
    """One column: the medians of its first and last quarter, and the slope of the line through all of it."""

    name: str
    first: float
    last: float
    per_hour: float
    #: What the last quarter may be.
    limit: float

    @property
    def passed(self) -> bool:
        return self.last <= self.limit

    def __str__(self) -> str:
        verdict = "" if self.passed else ", GROWN"
        return (
            f"{self.name}: {self.first:,.1f} in the first quarter, {self.last:,.1f} in the last"
            f" (limit {self.limit:,.1f}), {self.per_hour:+,.1f} an hour{verdict}"
        )


#: What may grow by which factor, and by how much besides: a quarter of few samples has its chances. A lagging channel
#: keeps whole segment files of 100 MB; other work on the machine costs latency.
LIMITS = {
    "memory_mb": (1.05, 16.0),
    "descriptors": (1.0, 16.0),
    "threads": (1.0, 4.0),
    "disk_mb": (1.25, 200.0),
    "p99_ms": (2.0, 10.0),
}


@dataclass
class Report:
    seed: int
    seconds: float = 0.0
    #: Messages a second, by flow.
    maximum: dict[str, int] = field(default_factory=dict)
    rate: dict[str, int] = field(default_factory=dict)
    published: int = 0
    delivered: int = 0
    #: Due at the fixed rate, and left out because consumers were behind.
    skipped: int = 0
    #: By kind: what the trickle did.
    trickle: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    doubled: int = 0
    early: int = 0
    samples: int = 0
    #: Of Python, in the broker: whether what has grown is objects.
    objects: dict[str, int] = field(default_factory=dict)
    trends: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        return not self.failures and not self.interrupted


def judge(samples: Sequence[Sample], warm_up: float) -> list[Trend]:
    """Return a trend for each column that has a limit; none if there are too few samples."""
    counted = [sample for sample in samples if sample.seconds >= warm_up]
    quarter = len(counted) // 4
    if not quarter:
        return []
    trends = []
    for name, (factor, slack) in LIMITS.items():
        values = [getattr(sample, name) for sample in counted]
        first, last = median(values[:quarter]), median(values[-quarter:])
        slope = linear_regression([sample.seconds for sample in counted], values).slope
        trends.append(Trend(name, first, last, slope * 3_600, first * factor + slack))
    return trends


def thinned(samples: Sequence[Sample], most: int = THINNED) -> list[Sample]:
    """Return at most this many samples: the medians of neighbours, and of their longest latencies the longest."""
    step = -(-len(samples) // most)
    result = []
    for start in range(0, len(samples), max(step, 1)):
        group = samples[start : start + step]
        merged = Sample(*(round(median(column), 3) for column in zip(*map(astuple, group), strict=True)))
        merged.max_ms = max(sample.max_ms for sample in group)
        result.append(merged)
    return result


class Soak:
    def __init__(self, plan: Plan, data_path: Path, progressed: Callable[[Report], None] = lambda report: None) -> None:
        self._plan = plan
        self._data_path = data_path
        self._progressed = progressed
        self._over = asyncio.Event()
        self._binary: Path
        self._broker: BrokerProcess
        self.report = Report(plan.seed)
        self.samples: list[Sample] = []
        self.trends: list[Trend] = []

    def interrupt(self) -> None:
        """End the load early."""
        self.report.interrupted = True
        self._over.set()

    async def run(self) -> Report:
        plan = self._plan
        self._binary = load.build()
        self._broker = await BrokerProcess.of(self._data_path)
        trickle = Trickle(self._broker, plan.seed, plan.amounts)
        work = asyncio.create_task(trickle.run())
        try:
            self.report.maximum = await self._calibrate(work)
            self.report.rate = {name: max(round(rate * plan.share), 1) for name, rate in self.report.maximum.items()}
            await self._load(trickle, work)
            if not self.report.interrupted:
                trickle.stop()
                await asyncio.wait_for(work, 2 * PATIENCE)
                await self._end()
        except (FlowFailed, OSError, TimeoutError, ExceptionGroup) as exc:
            self.report.failures.append(in_words(exc))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._broker.kill()
        self._account(trickle)
        return self.report

    async def _flow(self, name: str, topic: str, **options: int) -> Flow:
        lag = self._plan.lag if name == "batches" else 0
        fixed = {"size": BODY_BYTES, "rdy": 2_500, "ahead": AHEAD, "lag": lag, "seconds": 86_400, "channel": "work"}
        of_kind = BATCHES if name == "batches" else SINGLES
        return await Flow.start(self._binary, self._broker.endpoint[1], topic=topic, **fixed, **of_kind, **options)

    async def _pause(self, seconds: float, work: asyncio.Task[None]) -> None:
        """Let the load run, and notice if the trickle fails."""
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait({over, work}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if work.done():
            work.result()

    async def _calibrate(self, work: asyncio.Task[None]) -> dict[str, int]:
        """Return the messages a second that each flow gets through when it is not held back."""
        plan = self._plan
        flows = {name: await self._flow(name, f"calibration-{name}", rate=0) for name in ("batches", "singles")}
        try:
            await self._pause(plan.calibration * UNCOUNTED, work)
            before = {name: flow.last for name, flow in flows.items()}
            await self._pause(plan.calibration * (1 - UNCOUNTED), work)
            after = {name: flow.last for name, flow in flows.items()}
            for flow in flows.values():
                flow.check()
            await self._stop(flows)
        finally:
            for flow in flows.values():
                await flow.close()
        async with HttpClient.connect(self._broker.http_address) as http:
            for name in flows:
                await http.post(f"/topic/delete?topic=calibration-{name}")
        return {name: _rate(before[name], after[name]) for name in flows}

    async def _load(self, trickle: Trickle, work: asyncio.Task[None]) -> None:
        plan, report = self._plan, self.report
        if self._over.is_set():
            return
        self._progressed(report)
        report.objects["before the load"] = await objects_of(self._broker)
        flows = {name: await self._flow(name, name, rate=rate) for name, rate in report.rate.items()}
        try:
            began = time.monotonic()
            every = max(plan.every, plan.seconds / MOST_SAMPLES)
            sampler = _Sampler(self._broker, self._data_path, flows, trickle)
            while not self._over.is_set() and report.seconds < plan.seconds:
                await self._pause(min(every, plan.seconds - report.seconds), work)
                report.seconds = time.monotonic() - began
                if not self._over.is_set():
                    self.samples.append(await sampler.take(report.seconds))
                    report.samples += 1
                self._progressed(report)
            trickle.stop()
            await self._stop(flows)
        finally:
            for flow in flows.values():
                await flow.close()

    async def _stop(self, flows: dict[str, Flow]) -> None:
        readings = await asyncio.gather(*(flow.stop() for flow in flows.values()))
        for name, reading in zip(flows, readings, strict=True):
            self._check_flow(name, reading)

    def _check_flow(self, name: str, reading: Reading) -> None:
        report = self.report
        channels = [reading.messages, reading.lagging] if name == "batches" else [reading.messages]
        report.published += reading.published
        report.delivered += sum(channels) + reading.again
        report.skipped += reading.skipped
        lost = sum(reading.published - arrived for arrived in channels)
        report.lost += lost
        report.doubled += max(reading.again - reading.late, 0)
        if reading.answered != reading.published:
            report.failures.append(f"{name}: {reading.published - reading.answered:,} publishes were not answered")

    async def _end(self) -> None:
        """Nothing is left, and the broker stops in order."""
        depth, ephemeral = 0, [""]

        async def is_quiet() -> bool:
            """The last clients have just closed their connections: the broker may not know it yet."""
            nonlocal depth, ephemeral
            topics = await stats_of(self._broker)
            names = [channel["channel_name"] for topic in topics for channel in topic["channels"]]
            depth, ephemeral = depth_of(topics), [name for name in names if name.endswith("#ephemeral")]
            return not depth and not ephemeral

        self.report.objects["after it"] = await objects_of(self._broker)
        if not await until(is_quiet, 20):
            self.report.failures.append(f"{depth:,} messages and the channels {ephemeral[:5]} are left")
        if status := await self._broker.stop():
            self.report.failures.append(f"the broker stopped with status {status}")

    def _account(self, trickle: Trickle) -> None:
        report, totals = self.report, trickle.totals
        report.trickle = asdict(totals)
        report.seconds = round(report.seconds, 1)
        report.published += totals.published
        report.delivered += totals.delivered
        report.early = totals.early
        report.doubled += max(totals.doubled - totals.late, 0)
        if not report.interrupted:
            report.failures += [f"trickle: {text}" for text in trickle.unfinished()]
        report.failures += self._broker.troubles[:5]
        for name in ("lost", "doubled", "early"):
            if found := getattr(report, name):
                report.failures.append(f"{found:,} messages were {name}")
        self.trends = judge(self.samples, self._plan.warm_up)
        report.trends = [str(trend) for trend in self.trends] or ["too few samples for a trend"]
        report.failures += [f"{trend.name} has grown" for trend in self.trends if not trend.passed]


class _Sampler:
    """Takes samples; rates are those since the last one."""

    def __init__(self, broker: BrokerProcess, data_path: Path, flows: dict[str, Flow], trickle: Trickle) -> None:
        self._broker = broker
        self._data_path = data_path
        self._flows = list(flows.values())
        self._trickle = trickle
        self._gauge = Gauge(broker)
        self._before = self._totals()

    def _totals(self) -> tuple[float, float, int, int]:
        last = [flow.last for flow in self._flows]
        published = sum(reading.published for reading in last) + self._trickle.totals.published
        delivered = sum(reading.messages + reading.lagging for reading in last) + self._trickle.totals.delivered
        return time.monotonic(), self._gauge.cpu_seconds(), published, delivered

    async def take(self, seconds: float) -> Sample:
        latencies = Latencies()
        for flow in self._flows:
            flow.check()
            latencies.merge(flow.take_latencies())
        before, self._before = self._before, self._totals()
        span, cpu, published, delivered = (new - old for new, old in zip(self._before, before, strict=True))
        gauge = self._gauge
        return Sample(
            seconds=round(seconds, 1),
            memory_mb=gauge.memory() / MIB,
            anonymous_mb=gauge.anonymous() / MIB,
            descriptors=gauge.descriptors(),
            threads=gauge.threads(),
            disk_mb=await asyncio.to_thread(disk_bytes, self._data_path) / MIB,
            depth=depth_of(await stats_of(self._broker)),
            cpu=cpu / span,
            machine_load=os.getloadavg()[0],
            published_per_s=published / span,
            delivered_per_s=delivered / span,
            p50_ms=latencies.quantile(0.5) * 1e3,
            p99_ms=latencies.quantile(0.99) * 1e3,
            max_ms=latencies.most * 1e3,
        )


def _rate(before: Reading, after: Reading) -> int:
    """Messages a second between two reports, of which the first may be that it is ready."""
    began = before.finished or after.started
    return round((after.messages - before.messages) / max(after.finished - began, 1e-9))


# --- Figures ----------------------------------------------------------------------------------------------------------


def chart(samples: Sequence[Sample]) -> str:
    """Draw memory and latency over time."""
    few = thinned(samples)

    def line(label: str, column: str) -> charts.Trace:
        return charts.Trace(label, [(sample.seconds / 60, getattr(sample, column)) for sample in few])

    return charts.over_time(
        "A soak of one nsqd",
        "minutes",
        [
            charts.Plot("Memory", "MB", [line("resident", "memory_mb")]),
            charts.Plot("Publish to delivery", "ms", [line("p99", "p99_ms"), line("p50", "p50_ms")], logarithmic=True),
        ],
    )


def result_line(soak: Soak, plan: Plan) -> str:
    """Return the line of a file of results: what ran where, the report, and its samples by column."""
    few = thinned(soak.samples)
    columns = {column.name: [getattr(sample, column.name) for sample in few] for column in fields(Sample)}
    report = {**asdict(soak.report), "trends": [asdict(trend) for trend in soak.trends], "passed": soak.report.passed}
    return json.dumps({**about(*SOURCES), "plan": asdict(plan), **report, "columns": columns})


# --- The command line -------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = torture_parser("tests.crash.soak", "A long mixed load on one nsqd; nothing may be lost, and nothing grow.")
    parser.add_argument("--minutes", type=float, default=80.0, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--share", type=float, default=0.5, metavar="X", help="the part of the maximum rate to publish at (default 0.5)"
    )
    parser.add_argument("--calibration", type=float, default=20.0, metavar="SECONDS", help="(default %(default)s)")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="append the figures to this file, as a line of JSON"
    )
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw memory and latency over time, as SVG")
    arguments = parser.parse_args(argv)
    if why := raise_file_limit(FILES):
        sys.exit(f"soak: {why}")
    seconds = arguments.minutes * 60
    plan = Plan(
        seconds,
        seed_of(arguments),
        calibration=arguments.calibration,
        share=arguments.share,
        warm_up=min(600.0, seconds / 6),
    )
    runs: list[Soak] = []
    finished: list[Soak] = []

    async def work(folder: Path, progressed: Callable[[Report], None]) -> Report:
        run = Soak(plan, folder, progressed)
        runs.append(run)
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            # The next one ends at once.
            loop.remove_signal_handler(signal.SIGINT)
            run.interrupt()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        report = await run.run()
        finished.append(run)
        return report

    status = conduct(
        arguments,
        "soak",
        work,
        title=f"seed {plan.seed}",
        total=round(plan.seconds),
        described=lambda report: (round(report.seconds), _state(runs[0])),
    )
    for run in finished:
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(result_line(run, plan) + "\n")
        if arguments.chart and run.samples:
            arguments.chart.write_text(chart(run.samples))
    return status


def _state(run: Soak) -> str:
    """Return how it stands, for the bar; a log, which has none, gets some of these as lines."""
    if run.samples:
        now = run.samples[-1]
        text = f"{now.memory_mb:.0f} MB, p99 {now.p99_ms:.1f} ms, {now.delivered_per_s:,.0f} delivered/s"
    else:
        text = "at most " + ", ".join(f"{rate:,} {name}/s" for name, rate in run.report.maximum.items())
    if not sys.stderr.isatty() and len(run.samples) % LOGGED_EACH == 0:
        sys.stderr.write(f"{run.report.seconds:.0f} s: {text}\n")
        sys.stderr.flush()
    return text


if __name__ == "__main__":
    sys.exit(main())
