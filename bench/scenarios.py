"""What is measured: one function per scenario, each a complete run against one daemon.

A scenario starts its own daemon on an empty data folder, so that no run sees what another one left behind, and returns
its figures by the names in METRICS. A run in which messages are missing or delivered again gives no figure: it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from .daemons import CLEAN_STOP_GRACE, Daemon, Side, data_folder, fresh, running
from .errors import BenchError
from .load import Load, Mode, Report

TOPIC = "bench"
CHANNEL = "bench"
BATCH = 200
SIZE = 200
# Requests under way on the connection that publishes to many topics: with 1,000 topics, one for each.
WINDOW = 1000
# Messages of a queue in memory where a scenario is about the rest, or has thousands of queues.
FEW_IN_MEMORY = 1000
DEFAULT_IDENTIFY = '{"feature_negotiation":true}'
# A size of -1 also switches the timer off: both daemons then send every message at once.
UNBUFFERED_IDENTIFY = '{"feature_negotiation":true,"output_buffer_size":-1}'
# A generator that used more of its core than this may be what was measured.
BUSY_LIMIT = 0.9


@dataclass(frozen=True)
class Metric:
    """One row of the result."""

    title: str
    unit: str
    better: Literal["higher", "lower"]


METRICS: dict[str, Metric] = {
    "mpub": Metric("MPUB ×200, 2 connections", "msg/s", "higher"),
    "consume": Metric("consume, 1 connection, RDY 2500", "msg/s", "higher"),
    "consume-rdy1": Metric("consume, 10 connections, RDY 1", "msg/s", "higher"),
    "both-publish": Metric("both at once: publish", "msg/s", "higher"),
    "both-consume": Metric("both at once: consume", "msg/s", "higher"),
    "pub": Metric("PUB one at a time, 10 connections", "msg/s", "higher"),
    "pub-1": Metric("PUB one at a time, 1 connection", "msg/s", "higher"),
    "pub-2": Metric("PUB one at a time, 2 connections", "msg/s", "higher"),
    "http-pub": Metric("HTTP /pub, 8 connections", "msg/s", "higher"),
    "http-pub-1": Metric("HTTP /pub, 1 connection", "msg/s", "higher"),
    "http-mpub": Metric("HTTP /mpub ×200, 2 connections", "msg/s", "higher"),
    "fanout-1": Metric("fan-out to 1 channel", "msg/s", "higher"),
    "fanout-10": Metric("fan-out to 10 channels", "msg/s", "higher"),
    "fanout-50": Metric("fan-out to 50 channels", "msg/s", "higher"),
    "drain": Metric("drain a backlog from disk", "msg/s", "higher"),
    "topics": Metric("PUB pipelined over 1,000 topics with 10 channels each", "msg/s", "higher"),
    "lagging": Metric("consume, 100 lagging channels, RDY 1", "msg/s", "higher"),
    "lagging-read": Metric("read from files per byte delivered, 100 lagging channels", "bytes", "lower"),
    "connect-1": Metric("connect, IDENTIFY, close: one at a time", "conn/s", "higher"),
    "connect-50": Metric("connect, IDENTIFY, close: 50 in parallel", "conn/s", "higher"),
    "latency-p50": Metric("latency at 1,000 msg/s, p50", "ms", "lower"),
    "latency-p99": Metric("latency at 1,000 msg/s, p99", "ms", "lower"),
    "latency-p99.9": Metric("latency at 1,000 msg/s, p99.9", "ms", "lower"),
    "latency-unbuffered-p50": Metric("latency without output buffering, p50", "ms", "lower"),
    "latency-unbuffered-p99": Metric("latency without output buffering, p99", "ms", "lower"),
    "latency-unbuffered-p99.9": Metric("latency without output buffering, p99.9", "ms", "lower"),
    "cpu-mpub": Metric("server CPU per message, MPUB", "µs", "lower"),
    "cpu-consume": Metric("server CPU per message, consume", "µs", "lower"),
    "cpu-consume-rdy1": Metric("server CPU per message, consume with RDY 1", "µs", "lower"),
    "cpu-pub": Metric("server CPU per message, PUB", "µs", "lower"),
    "cpu-pub-1": Metric("server CPU per message, PUB, 1 connection", "µs", "lower"),
    "cpu-pub-2": Metric("server CPU per message, PUB, 2 connections", "µs", "lower"),
    "cpu-topics": Metric("server CPU per message, PUB over 1,000 topics", "µs", "lower"),
    "cpu-lagging": Metric("server CPU per message, 100 lagging channels", "µs", "lower"),
    "cpu-connect-1": Metric("server CPU per connection, one at a time", "µs", "lower"),
    "cpu-connect-50": Metric("server CPU per connection, 50 in parallel", "µs", "lower"),
    "cpu-http-pub-1": Metric("server CPU per message, HTTP /pub, 1 connection", "µs", "lower"),
    "cpu-http-pub": Metric("server CPU per message, HTTP /pub", "µs", "lower"),
    "cpu-http-mpub": Metric("server CPU per message, HTTP /mpub", "µs", "lower"),
    "rss-message": Metric("memory per queued message", "bytes", "lower"),
    "rss-idle": Metric("memory after start", "MiB", "lower"),
    "ready": Metric("time until ready", "ms", "lower"),
    "rss-connection": Metric("memory per idle connection", "KiB", "lower"),
}


@dataclass(frozen=True)
class Sizes:
    """How much of everything. Message counts are multiples of the batch."""

    mpub: int = 2_000_000
    consume: int = 1_000_000
    consume_rdy1: int = 200_000
    pub: int = 1_000_000
    # Deliveries in all; each channel gets its share, so that 50 channels take about as long as one.
    fanout_deliveries: int = 2_000_000
    drain: int = 2_000_000
    topics: int = 1_000
    channels_per_topic: int = 10
    topics_pub: int = 100_000
    lagging_channels: int = 100
    # What each channel has less than the one before it.
    lagging_step: int = 400
    # What the last one has all the same, so that it does not run empty.
    lagging_tail: int = 10_000
    lagging_seconds: int = 5
    connects: int = 50_000
    queued: int = 1_000_000
    connections: int = 10_000
    publish_seconds: int = 5
    latency_seconds: int = 10
    # The most that a run may take to consume what it was promised.
    patience_seconds: int = 180


FULL = Sizes()
QUICK = Sizes(
    mpub=40_000,
    consume=40_000,
    consume_rdy1=4_000,
    pub=10_000,
    fanout_deliveries=100_000,
    drain=40_000,
    topics=20,
    channels_per_topic=2,
    topics_pub=10_000,
    lagging_channels=10,
    lagging_tail=2_000,
    lagging_seconds=1,
    connects=500,
    queued=40_000,
    connections=200,
    publish_seconds=2,
    latency_seconds=1,
    patience_seconds=60,
)

Figures = dict[str, float]


@dataclass
class Run:
    """What one run of a scenario needs, and what it leaves for the report besides its figures."""

    binary: Path
    sizes: Sizes
    side: Side
    loads: list[tuple[Mode, Report]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def start(self, daemon: Daemon, mode: Mode, **options: int | str | bool) -> Load:
        port = daemon.http_port if mode in ("hmpub", "hpub") else daemon.port
        return Load(self.binary, mode, port, topic=TOPIC, channel=CHANNEL, **options)

    def load(self, daemon: Daemon, mode: Mode, **options: int | str | bool) -> Report:
        """Run a generator to its end; its report counts for the result."""
        with self.start(daemon, mode, **options) as load:
            return self.keep(load.mode, load.result())

    def keep(self, mode: Mode, report: Report) -> Report:
        self.loads.append((mode, report))
        if mode in ("mpub", "pub", "sub", "hmpub", "hpub", "connect") and report.busy > BUSY_LIMIT:
            self.notes.append(f"the load generator ({mode}) was itself {report.busy:.0%} busy")
        return report

    def preload(self, daemon: Daemon, messages: int) -> None:
        """Publish exactly this many and let the daemon come to rest; not part of what is measured."""
        options = {"connections": 2, "batch": BATCH, "messages": messages, "seconds": self.sizes.patience_seconds}
        with Load(self.binary, "mpub", daemon.port, topic=TOPIC, **options) as load:
            _expect(load.result().messages, messages, "published")
        daemon.settle()

    def consume(self, daemon: Daemon, messages: int, *, connections: int, rdy: int) -> float:
        """Messages per second until 95 % of a backlog had arrived.

        Not until the last one: a daemon that fills output buffers holds the end back until a timer fires.
        """
        seconds = self.sizes.patience_seconds
        report = self.load(daemon, "sub", connections=connections, rdy=rdy, messages=messages, seconds=seconds)
        _expect(report.messages, messages, "consumed")
        _expect_no_redelivery(report)
        return report.marked_messages / (report.marked - report.started)


def mpub(run: Run) -> Figures:
    with fresh(run.side) as daemon:
        daemon.started()
        before = daemon.cpu_seconds()
        limits = {"messages": run.sizes.mpub, "seconds": run.sizes.publish_seconds}
        report = run.load(daemon, "mpub", connections=2, batch=BATCH, **limits)
        return {"mpub": report.rate, "cpu-mpub": _cpu_per_message(daemon, before, report.messages)}


def consume(run: Run) -> Figures:
    with fresh(run.side) as daemon:
        daemon.create_channel(TOPIC, CHANNEL)
        run.preload(daemon, run.sizes.consume)
        before = daemon.cpu_seconds()
        rate = run.consume(daemon, run.sizes.consume, connections=1, rdy=2500)
        return {"consume": rate, "cpu-consume": _cpu_per_message(daemon, before, run.sizes.consume)}


def consume_rdy1(run: Run) -> Figures:
    with fresh(run.side) as daemon:
        daemon.create_channel(TOPIC, CHANNEL)
        run.preload(daemon, run.sizes.consume_rdy1)
        before = daemon.cpu_seconds()
        rate = run.consume(daemon, run.sizes.consume_rdy1, connections=10, rdy=1)
        return {"consume-rdy1": rate, "cpu-consume-rdy1": _cpu_per_message(daemon, before, run.sizes.consume_rdy1)}


def both(run: Run) -> Figures:
    """Publish as in mpub while one consumer takes what it can; its rate is the one up to the last publish."""
    with fresh(run.side) as daemon, run.start(daemon, "sub", rdy=2500, seconds=run.sizes.patience_seconds) as consumer:
        consumer.ready()
        limits = {"messages": run.sizes.mpub, "seconds": run.sizes.publish_seconds}
        published = run.load(daemon, "mpub", connections=2, batch=BATCH, **limits)
        consumed = run.keep("sub", consumer.stop())
        if consumed.messages == 0:
            raise BenchError("nothing was consumed while publishing")
        rate = consumed.messages / (consumed.finished - published.started)
        return {"both-publish": published.rate, "both-consume": rate}


def pub(name: str, mode: Mode, connections: int, run: Run) -> Figures:
    with fresh(run.side) as daemon:
        daemon.started()
        before = daemon.cpu_seconds()
        limits = {"messages": run.sizes.pub, "seconds": run.sizes.publish_seconds}
        report = run.load(daemon, mode, connections=connections, **limits)
        return {name: report.rate, f"cpu-{name}": _cpu_per_message(daemon, before, report.messages)}


def http_mpub(run: Run) -> Figures:
    with fresh(run.side) as daemon:
        daemon.started()
        before = daemon.cpu_seconds()
        limits = {"messages": run.sizes.mpub, "seconds": run.sizes.publish_seconds}
        report = run.load(daemon, "hmpub", connections=2, batch=BATCH, **limits)
        return {"http-mpub": report.rate, "cpu-http-mpub": _cpu_per_message(daemon, before, report.messages)}


def fanout(channels: int, run: Run) -> Figures:
    """Every channel has one consumer and gets every message; the rate counts deliveries."""
    each = run.sizes.fanout_deliveries // channels
    options = {"connections": channels, "numbered_channels": True, "rdy": 2500, "messages": each * channels}
    seconds = run.sizes.patience_seconds
    with fresh(run.side) as daemon, run.start(daemon, "sub", **options, seconds=seconds) as consumers:
        consumers.ready()
        published = run.load(daemon, "mpub", connections=2, batch=BATCH, messages=each, seconds=seconds)
        consumed = run.keep("sub", consumers.result())
        _expect(published.messages, each, "published")
        _expect(consumed.least, each, "consumed on the slowest channel")
        _expect(consumed.most, each, "consumed on the fastest channel")
        _expect_no_redelivery(consumed)
        return {f"fanout-{channels}": consumed.marked_messages / (consumed.marked - published.started)}


def drain(run: Run) -> Figures:
    """A backlog that the daemon finds on its disk when it starts.

    A clean stop leaves the whole backlog in files on both sides (the Go daemon's in the disk queue of the channel, as
    all of it had reached the channel), and the new process has none of it in its memory.
    """
    with data_folder() as folder:
        with running(run.side, folder) as daemon:
            daemon.create_channel(TOPIC, CHANNEL)
            run.preload(daemon, run.sizes.drain)
            if not daemon.stop(CLEAN_STOP_GRACE):
                raise BenchError("the daemon did not stop cleanly")
        with running(run.side, folder) as daemon:
            return {"drain": run.consume(daemon, run.sizes.drain, connections=1, rdy=2500)}


def topics(run: Run) -> Figures:
    """One connection publishes round robin to many topics that have channels; their work counts as well."""
    sizes = run.sizes
    names = {f"{TOPIC}-{i:06d}": [f"channel-{j}" for j in range(sizes.channels_per_topic)] for i in range(sizes.topics)}
    # The Go daemon allots a channel's queue at once: 2 million entries each are more than any machine has.
    with fresh(run.side, mem_queue_size=FEW_IN_MEMORY, channels=names) as daemon:
        daemon.started()
        before = daemon.cpu_seconds()
        options = {"topics": sizes.topics, "window": WINDOW, "messages": sizes.topics_pub}
        report = run.load(daemon, "pub", **options, seconds=sizes.patience_seconds)
        _expect(report.messages, sizes.topics_pub, "published")
        daemon.settle()
        return {"topics": report.rate, "cpu-topics": _cpu_per_message(daemon, before, report.messages)}


def lagging(run: Run) -> Figures:
    """Consumers of many channels, each at a place of its own in a backlog that is mostly in files, with RDY 1."""
    sizes = run.sizes
    seconds = sizes.patience_seconds
    with fresh(run.side, mem_queue_size=FEW_IN_MEMORY) as daemon:
        for number in range(sizes.lagging_channels):
            daemon.create_channel(TOPIC, f"{CHANNEL}-{number}")
            options = {"batch": BATCH, "messages": sizes.lagging_step, "seconds": seconds}
            with Load(run.binary, "mpub", daemon.port, topic=TOPIC, **options) as load:
                _expect(load.result().messages, sizes.lagging_step, "published")
        run.preload(daemon, sizes.lagging_tail)
        cpu, read = daemon.cpu_seconds(), daemon.bytes_read()
        options = {"connections": sizes.lagging_channels, "numbered_channels": True, "rdy": 1}
        report = run.load(daemon, "sub", **options, seconds=sizes.lagging_seconds)
        _expect_no_redelivery(report)
        if report.least == 0:
            raise BenchError("a channel delivered nothing")
        return {
            "lagging": report.rate,
            "lagging-read": (daemon.bytes_read() - read) / (report.messages * SIZE),
            "cpu-lagging": _cpu_per_message(daemon, cpu, report.messages),
        }


def connect(parallel: int, run: Run) -> Figures:
    with fresh(run.side) as daemon:
        daemon.started()
        before = daemon.cpu_seconds()
        limits = {"messages": run.sizes.connects, "seconds": run.sizes.publish_seconds}
        report = run.load(daemon, "connect", connections=parallel, **limits)
        name = f"connect-{parallel}"
        return {name: report.rate, f"cpu-{name}": _cpu_per_message(daemon, before, report.messages)}


def latency(name: str, identify: str, run: Run) -> Figures:
    with fresh(run.side) as daemon:
        options = {"rate": 1000, "rdy": 2500, "identify": identify}
        report = run.load(daemon, "latency", **options, seconds=run.sizes.latency_seconds)
        return {
            f"{name}-p50": report.p50 * 1e3,
            f"{name}-p99": report.p99 * 1e3,
            f"{name}-p99.9": report.p999 * 1e3,
        }


def memory(run: Run) -> Figures:
    figures: Figures = {}
    with fresh(run.side, in_memory=True) as daemon:
        daemon.settle()
        idle = daemon.rss_bytes()
        figures["ready"] = daemon.ready_seconds * 1e3
        figures["rss-idle"] = idle / 2**20
        run.preload(daemon, run.sizes.queued)
        figures["rss-message"] = (daemon.rss_bytes() - idle) / run.sizes.queued
    with fresh(run.side) as daemon:
        daemon.settle()
        idle = daemon.rss_bytes()
        wanted = run.sizes.connections
        with run.start(daemon, "idle", connections=wanted, seconds=run.sizes.patience_seconds) as load:
            opened = load.ready().connections
            daemon.settle()
            figures["rss-connection"] = (daemon.rss_bytes() - idle) / opened / 2**10
            run.keep("idle", load.stop())
        if opened < wanted:
            run.notes.append(f"only {opened:,} of {wanted:,} idle connections could be opened")
    return figures


SCENARIOS: dict[str, Callable[[Run], Figures]] = {
    "mpub": mpub,
    "consume": consume,
    "consume-rdy1": consume_rdy1,
    "both": both,
    "pub": partial(pub, "pub", "pub", 10),
    "pub-1": partial(pub, "pub-1", "pub", 1),
    "pub-2": partial(pub, "pub-2", "pub", 2),
    "http-pub": partial(pub, "http-pub", "hpub", 8),
    "http-pub-1": partial(pub, "http-pub-1", "hpub", 1),
    "http-mpub": http_mpub,
    "fanout-1": partial(fanout, 1),
    "fanout-10": partial(fanout, 10),
    "fanout-50": partial(fanout, 50),
    "drain": drain,
    "topics": topics,
    "lagging": lagging,
    "connect-1": partial(connect, 1),
    "connect-50": partial(connect, 50),
    "latency": partial(latency, "latency", DEFAULT_IDENTIFY),
    "latency-unbuffered": partial(latency, "latency-unbuffered", UNBUFFERED_IDENTIFY),
    "memory": memory,
}

# Names that stand for several scenarios. CPU per message has no run of its own: these runs also yield it.
GROUPS: dict[str, tuple[str, ...]] = {
    "connect": ("connect-1", "connect-50"),
    "cpu": ("mpub", "consume", "pub"),
    "fanout": ("fanout-1", "fanout-10", "fanout-50"),
    "http": ("http-pub", "http-pub-1", "http-mpub"),
    "one-at-a-time": ("pub-1", "pub-2", "http-pub-1"),
}


def _cpu_per_message(daemon: Daemon, before: float, messages: int) -> float:
    return (daemon.cpu_seconds() - before) / messages * 1e6


def _expect(actual: int, expected: int, what: str) -> None:
    if actual != expected:
        raise BenchError(f"{actual:,} of {expected:,} messages were {what}")


def _expect_no_redelivery(report: Report) -> None:
    # Everything is finished at once: a second attempt means that a FIN was lost or a timeout fired early.
    if report.redelivered:
        raise BenchError(f"{report.redelivered:,} of {report.messages:,} messages were delivered again")
