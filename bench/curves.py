"""``python -m bench.curves``: how the daemon's CPU per message changes with the number and size of things.

Topics, channels, connections, backlog, message size and batch, ours beside the Go daemon, each with all else fixed.
The loads are those of ``load.c``. A point is one run against a fresh daemon; only the backlog grows in one daemon.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from . import charts, load
from .charts import Line, number
from .daemons import Daemon, Side, end_in_order_on_sigterm, fresh
from .errors import BenchError, StartError
from .load import Load, Mode, Report
from .peers.report import machine_line
from .report import Machine, inspect_machine

JSON = charts.FOLDER / "curves.json"
TOPIC, CHANNEL = "bench", "bench"
SIZE, BATCH = 200, 200
#: A curve whose highest point is at most this many times its lowest is called flat.
FLAT = 1.3
#: The default of both daemons. Where they keep all in memory instead, the curve says so.
MEM_QUEUE_SIZE = 10_000
PATIENCE = 300
WANTED_FILES = 20_000
#: Bytes of messages in one run of the curve of sizes, at most.
SIZE_BYTES = 256 << 20


class Sizes(msgspec.Struct, frozen=True):
    """The places on each x axis, and how many messages make a point."""

    topics: tuple[int, ...] = (1, 10, 100, 1_000)
    channels: tuple[int, ...] = (1, 3, 10, 30, 100)
    connections: tuple[int, ...] = (1, 10, 100, 1_000, 10_000)
    backlog: tuple[int, ...] = (0, 100_000, 1_000_000, 10_000_000, 50_000_000)
    size: tuple[int, ...] = (1, 32, 1_024, 32_768, 1_048_576)
    batch: tuple[int, ...] = (1, 10, 100, 1_000)
    messages: int = 200_000
    deliveries: int = 1_000_000
    batched: int = 1_000_000
    seconds: int = 4


FULL = Sizes()
QUICK = Sizes(
    topics=(1, 10),
    channels=(1, 3),
    connections=(1, 10),
    backlog=(0, 20_000),
    size=(1, 1_024),
    batch=(1, 100),
    messages=10_000,
    deliveries=30_000,
    batched=10_000,
    seconds=1,
)

#: x and µs per message.
Point = tuple[float, float]


@dataclass
class Run:
    """What the points of one curve on one side need."""

    binary: Path
    side: Side
    sizes: Sizes
    #: The largest backlog for this side.
    most: int

    def load(self, daemon: Daemon, mode: Mode, **options: int | str | bool) -> Report:
        options = {"topic": TOPIC, "channel": CHANNEL, "size": SIZE, "seconds": PATIENCE} | options
        with Load(self.binary, mode, daemon.port, **options) as running:
            return running.result()


def topics(run: Run) -> Iterator[Point]:
    for count in run.sizes.topics:
        channels = {f"{TOPIC}-{i:06d}" if count > 1 else TOPIC: [CHANNEL] for i in range(count)}
        # All in memory, and no more room than that: the Go daemon allots each queue at once.
        room = max(2 * run.sizes.messages // count, 100)
        with fresh(run.side, mem_queue_size=room, channels=channels) as daemon:
            daemon.started()
            before = daemon.cpu_seconds()
            report = run.load(daemon, "pub", topics=count, window=1_000, messages=run.sizes.messages)
            daemon.settle()
            yield count, _per_message(daemon, before, report.messages)


def channels(run: Run) -> Iterator[Point]:
    for count in run.sizes.channels:
        each = run.sizes.deliveries // count // BATCH * BATCH
        with fresh(run.side) as daemon:
            daemon.started()
            options = {"connections": count, "numbered_channels": True, "rdy": 2500, "messages": each * count}
            common: dict[str, int | str | bool] = {"topic": TOPIC, "channel": CHANNEL, "seconds": PATIENCE}
            with Load(run.binary, "sub", daemon.port, **common, **options) as consumers:
                consumers.ready()
                before = daemon.cpu_seconds()
                run.load(daemon, "mpub", connections=2, batch=BATCH, messages=each)
                report = consumers.result()
            yield count, _per_message(daemon, before, report.messages)


def connections(run: Run) -> Iterator[Point]:
    for count in run.sizes.connections:
        with fresh(run.side) as daemon:
            daemon.started()
            before = daemon.cpu_seconds()
            idle = run.load(daemon, "pub", connections=count, messages=1)
            daemon.settle()
            opened = daemon.cpu_seconds() - before
            before = daemon.cpu_seconds()
            limits = {"messages": max(run.sizes.messages, 20 * count), "seconds": run.sizes.seconds}
            report = run.load(daemon, "pub", connections=count, **limits)
            daemon.settle()
            # Opening and closing the connections is no message's cost.
            yield count, (daemon.cpu_seconds() - before - opened) / (report.messages - idle.messages) * 1e6


def backlog(run: Run) -> Iterator[Point]:
    """Publish and consume beside a backlog that grows."""
    with fresh(run.side, mem_queue_size=MEM_QUEUE_SIZE) as daemon:
        daemon.create_channel(TOPIC, CHANNEL)
        daemon.started()
        present = 0
        for count in run.sizes.backlog:
            if count > run.most:
                return
            if count > present:
                run.load(daemon, "mpub", connections=2, batch=BATCH, messages=count - present)
                daemon.settle()
            present = count
            before = daemon.cpu_seconds()
            messages = run.sizes.messages
            run.load(daemon, "mpub", connections=2, batch=BATCH, messages=messages)
            report = run.load(daemon, "sub", rdy=2500, messages=messages)
            daemon.settle()
            # The few messages that were in flight beyond the count return to the channel.
            yield count, _per_message(daemon, before, report.messages)


def size(run: Run) -> Iterator[Point]:
    for count in run.sizes.size:
        messages = max(100, min(run.sizes.messages, SIZE_BYTES // count))
        with fresh(run.side) as daemon:
            daemon.create_channel(TOPIC, CHANNEL)
            daemon.started()
            before = daemon.cpu_seconds()
            run.load(daemon, "pub", connections=2, window=10, messages=messages, size=count)
            report = run.load(daemon, "sub", rdy=100, messages=messages, size=count)
            yield count, _per_message(daemon, before, report.messages)


def batch(run: Run) -> Iterator[Point]:
    for count in run.sizes.batch:
        with fresh(run.side) as daemon:
            daemon.started()
            before = daemon.cpu_seconds()
            limits = {"messages": run.sizes.batched, "seconds": run.sizes.seconds}
            report = run.load(daemon, "mpub", connections=2, batch=count, **limits)
            yield count, _per_message(daemon, before, report.messages)


@dataclass(frozen=True)
class Curve:
    title: str
    x_title: str
    y_title: str
    method: str
    run: Callable[[Run], Iterator[Point]]


CURVES: dict[str, Curve] = {
    "topics": Curve(
        "Topics",
        "topics",
        "µs of CPU per message",
        "One connection publishes round robin to all topics with 1,000 PUBs under way; each topic has one channel, and "
        "all messages fit in memory.",
        topics,
    ),
    "channels": Curve(
        "Channels",
        "channels of one topic",
        "µs of CPU per delivery",
        "MPUB of 200 on two connections, and a consumer with RDY 2500 on each channel.",
        channels,
    ),
    "connections": Curve(
        "Connections",
        "connections",
        "µs of CPU per message",
        "Every connection publishes to the same topic with PUB and waits for each answer.",
        connections,
    ),
    "backlog": Curve(
        "Backlog",
        "messages that wait in the channel",
        "µs of CPU per message",
        "200,000 messages are published with MPUB of 200 and as many consumed from the old end with RDY 2500. Both "
        "daemons keep 10,000 messages in memory.",
        backlog,
    ),
    "size": Curve(
        "Message size",
        "bytes of a message",
        "µs of CPU per message",
        "PUB with 10 under way on each of two connections, then consumed with RDY 100.",
        size,
    ),
    "batch": Curve(
        "Batch",
        "messages of an MPUB",
        "µs of CPU per message",
        "MPUB on two connections, each sending the next when the last is answered, to a topic without channels.",
        batch,
    ),
}


class Sample(msgspec.Struct, frozen=True):
    curve: str
    side: str
    x: float
    value: float


class Result(msgspec.Struct):
    machine: Machine
    sizes: Sizes
    samples: list[Sample]
    failures: list[tuple[str, str]]

    def points(self, curve: str, side: str) -> list[tuple[float, float, float, float]]:
        """x, median, lowest and highest."""
        found: dict[float, list[float]] = {}
        for sample in self.samples:
            if (sample.curve, sample.side) == (curve, side):
                found.setdefault(sample.x, []).append(sample.value)
        return [(x, statistics.median(values), min(values), max(values)) for x, values in sorted(found.items())]


LABELS = {"ours": "flintmq", "peer": "Go nsqd"}


def main() -> int:
    options = _parse_options()
    if options.redraw:
        _publish(msgspec.json.decode(JSON.read_bytes(), type=Result))
        return 0
    end_in_order_on_sigterm()
    _raise_file_limit()
    sides = [Side.ours(None, "os")]
    if options.peer:
        sides.append(Side.peer(options.peer, "os"))
    try:
        binary = load.build()
        result = Result(inspect_machine(sides), QUICK if options.quick else FULL, [], [])
        if options.add and options.json and options.json.exists():
            earlier = msgspec.json.decode(options.json.read_bytes(), type=Result)
            result.samples = earlier.samples
            result.machine.load_average_before = earlier.machine.load_average_before
        _measure(binary, sides, options, result)
    except StartError as exc:
        print(f"bench.curves: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    result.machine.load_average_after = os.getloadavg()
    print(markdown(result))
    if options.json:
        _write(result, options.json)
    if options.readme:
        _publish(result)
    return 1 if result.failures else 0


def _measure(binary: Path, sides: Sequence[Side], options: argparse.Namespace, result: Result) -> None:
    for name in options.only:
        for repeat in range(options.repeat):
            for side in sides:
                most = options.backlog if side.name == "ours" else min(options.backlog, options.peer_backlog)
                print(f"{name}, {LABELS[side.name]}, run {repeat + 1}", file=sys.stderr)
                try:
                    for x, value in CURVES[name].run(Run(binary, side, result.sizes, most)):
                        result.samples.append(Sample(name, side.name, x, value))
                        # A long run may be cut short.
                        if options.json:
                            _write(result, options.json)
                except StartError:
                    raise
                except BenchError as exc:
                    result.failures.append((f"{name}, {LABELS[side.name]}", str(exc)))


def markdown(result: Result) -> str:
    parts = []
    for name, curve in CURVES.items():
        lines = {side: result.points(name, side) for side in LABELS}
        if not lines["ours"]:
            continue
        parts += [
            f"#### {curve.title}",
            "",
            f"![{curve.y_title} by {curve.x_title}](charts/curves-{name}.svg)",
            "",
            f"{curve.method} {' '.join(verdict(LABELS[side], points) for side, points in lines.items() if points)}",
            "",
        ]
    versions = {side: version for side, version in result.machine.versions.items() if version}
    parts += [
        "Points are medians, thin lines the lowest and highest run. "
        + " ".join(f"{LABELS[side]}: {version}." for side, version in versions.items()),
        machine_line(result.machine),
    ]
    parts += [f"- {what} failed: {' '.join(error.split())}" for what, error in result.failures]
    return "\n".join(parts) + "\n"


def verdict(label: str, points: Sequence[tuple[float, float, float, float]]) -> str:
    """Say whether a curve is flat, and what it does otherwise, in one sentence."""
    values = [value for _, value, _, _ in points]
    lowest, highest = min(values), max(values)
    if highest <= FLAT * lowest:
        return f"{label} is flat: {number(lowest)} to {number(highest)} µs."
    first, last = points[0], points[-1]
    middle = ""
    for word, value in (("lowest", lowest), ("highest", highest)):
        if value not in (first[1], last[1]):
            at = next(x for x, found, _, _ in points if found == value)
            middle += f", {word} {number(value)} at {at:,.0f}"
    verb = "rises" if last[1] > first[1] else "falls"
    return (
        f"**{label} is not flat:** it {verb} from {number(first[1])} µs at {first[0]:,.0f}"
        f" to {number(last[1])} µs at {last[0]:,.0f}{middle}."
    )


def chart(result: Result, name: str) -> str:
    curve = CURVES[name]
    lines = [Line(label, points) for side, label in LABELS.items() if (points := result.points(name, side))]
    return charts.lines(curve.title, curve.x_title, curve.y_title, lines)


def _write(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def _publish(result: Result) -> None:
    _write(result, JSON)
    for name in CURVES:
        if result.points(name, "ours"):
            (charts.FOLDER / f"curves-{name}.svg").write_text(chart(result, name))
    charts.replace_section("curves", markdown(result))


def _per_message(daemon: Daemon, before: float, messages: int) -> float:
    return (daemon.cpu_seconds() - before) / messages * 1e6


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.curves",
        description="The daemon's CPU per message against topics, channels, connections, backlog, size and batch.",
    )
    parser.add_argument("--peer", metavar="NSQD", help="the Go daemon; without it only ours is measured")
    parser.add_argument(
        "--only",
        metavar="NAME,...",
        type=_names,
        default=list(CURVES),
        help=f"some of {', '.join(CURVES)} (default: all)",
    )
    parser.add_argument("--repeat", metavar="N", type=int, default=3, help="runs of each curve (default: 3)")
    parser.add_argument(
        "--backlog",
        metavar="N",
        type=int,
        default=FULL.backlog[-1],
        help="the largest backlog; 50 million need 12 GB of disk (default: %(default)s)",
    )
    parser.add_argument(
        "--peer-backlog",
        metavar="N",
        type=int,
        default=10_000_000,
        help="the largest backlog of the Go daemon, which fills much more slowly (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke test, not a measurement")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every sample")
    parser.add_argument("--add", action="store_true", help="add to the samples that are in the file of --json")
    parser.add_argument("--readme", action="store_true", help="write the charts, the JSON and the section into bench/")
    parser.add_argument(
        "--redraw", action="store_true", help="only write charts and section of the JSON in bench/ again"
    )
    options = parser.parse_args()
    if options.add and not options.json:
        parser.error("--add needs --json")
    return options


def _names(text: str) -> list[str]:
    wanted = text.split(",")
    for name in wanted:
        if name not in CURVES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CURVES)}")
    return [name for name in CURVES if name in wanted]


if __name__ == "__main__":
    sys.exit(main())
