"""One run: a broker on an empty folder, and all figures from it, one phase after the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from bench.daemons import data_folder
from bench.errors import BenchError

from . import generator
from .generator import Report
from .systems import Server, System

SIZE = 200
BATCH = 200
#: Batches under way on each of the two publishers that publish in batches.
WINDOW = 4
PUBLISHERS = 2
#: Publishers that wait for each acknowledgement.
WAITING = 10
IN_FLIGHT = 2500
LATENCY_RATE = 1000
#: A publisher that reached less than this share of the rate it was to keep has not kept up.
KEPT_UP = 0.95


@dataclass(frozen=True)
class Metric:
    title: str
    unit: str
    better: Literal["higher", "lower"]


METRICS: dict[str, Metric] = {
    "batch": Metric("publish in batches", "msg/s", "higher"),
    "one-1": Metric("publish one at a time, 1 publisher", "msg/s", "higher"),
    "one": Metric(f"publish one at a time, {WAITING} publishers", "msg/s", "higher"),
    "consume": Metric("consume and acknowledge", "msg/s", "higher"),
    "through": Metric("publish and consume at once", "msg/s", "higher"),
    "latency-p50": Metric("latency at 1,000 msg/s, p50", "ms", "lower"),
    "latency-p99": Metric("latency at 1,000 msg/s, p99", "ms", "lower"),
    "half-rate": Metric("half of its maximum, publishing and consuming", "msg/s", "higher"),
    "half-p50": Metric("latency at half of its maximum, p50", "ms", "lower"),
    "half-p99": Metric("latency at half of its maximum, p99", "ms", "lower"),
    "cpu-batch": Metric("server CPU per message, batches", "µs", "lower"),
    "cpu-one": Metric("server CPU per message, one at a time", "µs", "lower"),
    "cpu-consume": Metric("server CPU per message, consume", "µs", "lower"),
    "client-batch": Metric("client CPU per message, batches", "µs", "lower"),
    "client-consume": Metric("client CPU per message, consume", "µs", "lower"),
    "rss-start": Metric("memory after start", "MiB", "lower"),
    "rss-end": Metric("memory at the end of the run", "MiB", "lower"),
}


class Sizes(msgspec.Struct, frozen=True):
    warm_seconds: float = 3
    one_seconds: float = 3
    batch_seconds: float = 4
    batch_messages: int = 1_000_000
    through_seconds: float = 4
    latency_seconds: float = 5


FULL = Sizes()
QUICK = Sizes(
    warm_seconds=1.5,
    one_seconds=0.3,
    batch_seconds=1,
    batch_messages=20_000,
    through_seconds=1.5,
    latency_seconds=1.5,
)


class Sample(msgspec.Struct, frozen=True):
    """All figures of one run of one system."""

    system: str
    repeat: int
    figures: dict[str, float]
    notes: list[str]
    #: Seconds of CPU that the load generator used, by phase.
    generator: dict[str, float]


class Client(msgspec.Struct, frozen=True):
    """The facts about one system that do not change from run to run."""

    system: str
    title: str
    version: str
    client: str
    client_settings: list[str]
    settings: str
    acknowledged: str


def describe(binary: Path, system: System) -> Client:
    told = generator.run(binary, system.client, "", "describe", batch=BATCH, window=WINDOW, in_flight=IN_FLIGHT)
    version = system.version() or ""
    return Client(system.name, system.title, version, told.client, told.settings, system.settings, system.acknowledged)


class _Run:
    """The phases share a server; each has a topic of its own."""

    def __init__(self, binary: Path, system: System, server: Server) -> None:
        self._binary = binary
        self._system = system
        self._server = server
        self.figures: dict[str, float] = {}
        self.notes: list[str] = []
        self.generator: dict[str, float] = {}

    def load(self, mode: generator.Mode, topic: str, *, new: bool = True, **options: int | float | bool) -> Report:
        if new:
            generator.run(self._binary, self._system.client, self._server.address, "setup", topic=topic)
        report = generator.run(
            self._binary,
            self._system.client,
            self._server.address,
            mode,
            topic=topic,
            size=SIZE,
            batch=BATCH,
            window=WINDOW,
            in_flight=IN_FLIGHT,
            **options,
        )
        self.generator[f"{mode} {topic}"] = report.cpu
        return report

    def with_cpu(
        self, mode: generator.Mode, topic: str, *, new: bool = True, **options: int | float | bool
    ) -> tuple[Report, float]:
        """The report, and the server's CPU per message in µs, until it rests again."""
        self._server.settle()
        before = self._server.cpu_seconds()
        report = self.load(mode, topic, new=new, **options)
        self._server.settle()
        if report.messages == 0:
            raise BenchError(f"{self._system.title}: no message in {mode}")
        return report, (self._server.cpu_seconds() - before) / report.messages * 1e6

    def all(self, sizes: Sizes) -> None:
        figures, server = self.figures, self._server
        server.settle()
        figures["rss-start"] = server.rss_bytes() / 2**20
        # A virtual machine compiles what it runs often; the first seconds would be those of another program.
        self.load("through", "warm", publishers=PUBLISHERS, seconds=sizes.warm_seconds)
        figures["one-1"] = self.load("one", "one-1", publishers=1, seconds=sizes.one_seconds).rate
        report, figures["cpu-one"] = self.with_cpu("one", "one", publishers=WAITING, seconds=sizes.one_seconds)
        figures["one"] = report.rate
        limits = {"seconds": sizes.batch_seconds, "messages": sizes.batch_messages}
        report, figures["cpu-batch"] = self.with_cpu("batch", "batch", publishers=PUBLISHERS, **limits)
        figures["batch"] = report.rate
        figures["client-batch"] = report.cpu / report.messages * 1e6
        report, figures["cpu-consume"] = self.with_cpu("consume", "batch", new=False, messages=report.messages)
        figures["consume"] = report.rate
        figures["client-consume"] = report.cpu / report.messages * 1e6
        options = {"rate": LATENCY_RATE, "seconds": sizes.latency_seconds, "unbuffered": True}
        self._latency("latency", self.load("latency", "slow", **options))
        figures["through"] = self.load("through", "through", publishers=PUBLISHERS, seconds=sizes.through_seconds).rate
        half = figures["half-rate"] = figures["through"] / 2
        report = self.load("latency", "half", rate=half, seconds=sizes.latency_seconds)
        self._latency("half", report)
        if report.rate < KEPT_UP * half:
            self.notes.append(f"published {report.rate:,.0f} instead of {half:,.0f} a second for the latency at half")
        figures["rss-end"] = server.rss_bytes() / 2**20

    def _latency(self, name: str, report: Report) -> None:
        self.figures[f"{name}-p50"] = report.p50 * 1e3
        self.figures[f"{name}-p99"] = report.p99 * 1e3


def measure(binary: Path, system: System, repeat: int, sizes: Sizes) -> Sample:
    with data_folder() as folder, system.running(folder) as server:
        run = _Run(binary, system, server)
        run.all(sizes)
        return Sample(system.name, repeat, run.figures, run.notes, run.generator)


def values(samples: Sequence[Sample], system: str, metric: str) -> list[float]:
    return [s.figures[metric] for s in samples if s.system == system and metric in s.figures]


def median(samples: Sequence[Sample], system: str, metric: str) -> float | None:
    found = values(samples, system, metric)
    return statistics.median(found) if found else None
