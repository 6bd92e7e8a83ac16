"""``python -m bench.durable``: sustained rates where each message is on the device before it is acknowledged.

flintmq with ``--durability fsync`` beside JetStream with ``sync_interval: always``, Kafka with ``flush.messages=1``
and Redis with ``appendfsync always``. 1, 8 and 64 publishers wait for each acknowledgement, and 2 publish batches of
200. Each run has a broker of its own with an empty folder, and the systems take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from . import charts
from .charts import number
from .daemons import data_folder, end_in_order_on_sigterm
from .errors import BenchError, StartError
from .peers import generator
from .peers.report import machine_line
from .peers.systems import SYSTEMS, System
from .report import Machine, inspect_machine

JSON = charts.FOLDER / "durable.json"
SIZE = 200
BATCH = 200
#: An fsync of one block, many times: what the device itself allows.
PROBES = 200
FULL, QUICK = 60.0, 1.0
#: Not a disk: an fsync there costs nothing.
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(frozen=True)
class Load:
    title: str
    publishers: int
    #: Messages that go out together; 1 is one at a time.
    batch: int


LOADS: dict[str, Load] = {
    "1": Load("1 publisher, one at a time", 1, 1),
    "8": Load("8 publishers, one at a time", 8, 1),
    "64": Load("64 publishers, one at a time", 64, 1),
    "batch": Load(f"2 publishers, batches of {BATCH}", 2, BATCH),
}
COMPARED = ("flintmq", "jetstream", "kafka", "redis")


class Sample(msgspec.Struct, frozen=True):
    system: str
    load: str
    messages: int
    seconds: float
    rate: float
    #: Of the server, in µs per message.
    cpu: float
    #: The median of fsyncs on the same folder just before, in ms: some disks change from minute to minute.
    fsync: float


class Result(msgspec.Struct):
    machine: Machine
    #: The type of file system of the data folder.
    file_system: str
    seconds: float
    #: System: title, version, settings.
    systems: dict[str, tuple[str, str, str]]
    missing: dict[str, str]
    samples: list[Sample]
    failures: list[tuple[str, str]]


def main() -> int:
    options = _parse_options()
    if options.redraw:
        _publish(msgspec.json.decode(JSON.read_bytes(), type=Result))
        return 0
    end_in_order_on_sigterm()
    folder = Path(tempfile.gettempdir())
    kind = file_system(folder)
    if kind in MEMORY_FILE_SYSTEMS and not options.quick:
        print(f"bench.durable: {folder} is in memory ({kind}); name a folder on a disk with TMPDIR", file=sys.stderr)
        return 1
    chosen = [SYSTEMS[name] for name in options.only]
    missing = {system.title: system.get for system in chosen if system.version() is None}
    for title, how in missing.items():
        print(f"{title} is missing: {how}", file=sys.stderr)
    present = [system for system in chosen if system.title not in missing]
    try:
        binary = generator.build()
        result = Result(
            machine=inspect_machine([]),
            file_system=kind,
            seconds=options.seconds,
            systems={s.name: (s.title, s.version() or "", s.settings_durable) for s in present},
            missing=missing,
            samples=[],
            failures=[],
        )
        if options.add and options.json and options.json.exists():
            earlier = msgspec.json.decode(options.json.read_bytes(), type=Result)
            result.samples, result.systems = earlier.samples, earlier.systems | result.systems
            result.machine.load_average_before = earlier.machine.load_average_before
        _measure(binary, present, options, result)
    except StartError as exc:
        print(f"bench.durable: {exc}", file=sys.stderr)
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


def _measure(binary: Path, systems: Sequence[System], options: argparse.Namespace, result: Result) -> None:
    for _ in range(options.repeat):
        for name in options.loads:
            for system in systems:
                print(f"{system.title}, {LOADS[name].title}", file=sys.stderr)
                try:
                    result.samples.append(run(binary, system, name, options.seconds))
                    # A long run may be cut short.
                    if options.json:
                        _write(result, options.json)
                except BenchError as exc:
                    result.failures.append((system.title, str(exc)))


def run(binary: Path, system: System, name: str, seconds: float) -> Sample:
    load = LOADS[name]
    with data_folder() as folder, system.running(folder, durable=True) as server:
        fsync = fsync_seconds(folder) * 1e3
        generator.run(binary, system.client, server.address, "setup", durable=True)
        server.settle()
        before = server.cpu_seconds()
        report = generator.run(
            binary,
            system.client,
            server.address,
            "one" if load.batch == 1 else "batch",
            publishers=load.publishers,
            batch=load.batch,
            # The next batch goes out when the last is acknowledged, as with MPUB on one connection.
            window=1,
            size=SIZE,
            seconds=seconds,
        )
        if report.messages == 0:
            raise BenchError(f"{system.title} acknowledged nothing")
        cpu = (server.cpu_seconds() - before) / report.messages * 1e6
        return Sample(system.name, name, report.messages, report.seconds, report.rate, cpu, fsync)


def file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on."""
    best, kind = "", "unknown"
    resolved = str(folder.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        # A later line hides an earlier one of the same place.
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def fsync_seconds(folder: Path) -> float:
    """Return the median time of an fdatasync after 4 KiB were appended."""
    times = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(PROBES):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def markdown(result: Result) -> str:
    titles = {name: title for name, (title, _, _) in result.systems.items()}
    lines = [
        f"| messages per second, {result.seconds:.0f} s each | {' | '.join(titles.values())} |",
        f"|---|{'---:|' * len(titles)}",
    ]
    for name, load in LOADS.items():
        rates = [[s.rate for s in result.samples if (s.system, s.load) == (system, name)] for system in titles]
        if any(rates):
            lines.append(f"| {load.title} | {' | '.join(_cell(found) for found in rates)} |")
    lines += ["", f"| server CPU per message, µs | {' | '.join(titles.values())} |", f"|---|{'---:|' * len(titles)}"]
    for name, load in LOADS.items():
        cpu = [[s.cpu for s in result.samples if (s.system, s.load) == (system, name)] for system in titles]
        if any(cpu):
            lines.append(f"| {load.title} | {' | '.join(_cell(found) for found in cpu)} |")
    lines += [
        "",
        "Settings: " + "; ".join(f"{title} {settings}" for title, _, settings in result.systems.values()) + ".",
        f"The data folder is on {result.file_system}. An fdatasync after 4 KiB, measured before each run, took "
        f"{_cell([s.fsync for s in result.samples])} ms.",
        machine_line(result.machine),
        f"Runs per figure: {_runs(result)}.",
    ]
    lines += [f"- {title} was not there: {get}" for title, get in result.missing.items()]
    lines += [f"- {title} failed: {' '.join(error.split())}" for title, error in result.failures]
    return "\n".join(lines) + "\n"


def _runs(result: Result) -> str:
    """Return the number, or the lowest and highest where a run was cut short."""
    counts = Counter((sample.system, sample.load) for sample in result.samples)
    low, high = min(counts.values(), default=0), max(counts.values(), default=0)
    return str(low) if low == high else f"{low} to {high}"


def _cell(found: list[float]) -> str:
    if not found:
        return "–"
    middle = number(statistics.median(found))
    return f"{middle} ({number(min(found))}–{number(max(found))})" if len(found) > 1 else middle


def _write(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def _publish(result: Result) -> None:
    _write(result, JSON)
    charts.replace_section("durable", markdown(result))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.durable",
        description="Sustained rates where each message is fsynced before it is acknowledged. TMPDIR names the disk.",
    )
    parser.add_argument("--seconds", metavar="S", type=float, help=f"of each run (default: {FULL:.0f}, --quick: 1)")
    parser.add_argument("--repeat", metavar="N", type=int, default=1, help="runs of each line (default: 1)")
    parser.add_argument(
        "--only",
        metavar="NAME,...",
        type=lambda text: _names(text, COMPARED),
        default=list(COMPARED),
        help=f"some of {', '.join(COMPARED)} (default: all)",
    )
    parser.add_argument(
        "--loads",
        metavar="NAME,...",
        type=lambda text: _names(text, LOADS),
        default=list(LOADS),
        help=f"some of {', '.join(LOADS)}: publishers one at a time, or 2 with batches (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="short runs, on any file system: a smoke test")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every sample")
    parser.add_argument("--add", action="store_true", help="add to the samples that are in the file of --json")
    parser.add_argument("--readme", action="store_true", help="write the table and the JSON into bench/")
    parser.add_argument("--redraw", action="store_true", help="only write the table of the JSON in bench/ again")
    options = parser.parse_args()
    options.seconds = options.seconds or (QUICK if options.quick else FULL)
    if options.add and not options.json:
        parser.error("--add needs --json")
    return options


def _names(text: str, known: Sequence[str] | dict[str, Load]) -> list[str]:
    wanted = text.split(",")
    for name in wanted:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return [name for name in known if name in wanted]


if __name__ == "__main__":
    sys.exit(main())
