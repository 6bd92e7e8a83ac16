"""``python -m bench``: which scenarios, on which daemons, how often; then the table.

The runs are interleaved (ours, peer, ours, peer, …), so that whatever else slows the machine down hits both sides.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import load, report
from .daemons import Side, end_in_order_on_sigterm
from .errors import BenchError, StartError
from .scenarios import FULL, GROUPS, QUICK, SCENARIOS, Run

# 10,000 idle connections need as many descriptors in the daemon and in the generator, which inherit our limit.
WANTED_FILES = 20_000
TABLE_WIDTH = 120


def main() -> int:
    if "--peers" in sys.argv[1:]:
        # A comparison of its own, with options of its own.
        from .peers.command import main as compare

        return compare([argument for argument in sys.argv[1:] if argument != "--peers"])
    options = _parse_options()
    console = Console(stderr=True)
    _raise_file_limit()
    end_in_order_on_sigterm()
    sides = [Side.ours(options.ours, options.durability)]
    if options.peer:
        sides.append(Side.peer(options.peer, options.durability))
    try:
        binary = load.build()
        result = report.Result(
            machine=report.inspect_machine(sides),
            settings={
                "repeat": options.repeat,
                "quick": options.quick,
                "durability": options.durability,
                **{f"{side.name}_command": " ".join(side.command) for side in sides},
            },
            sizes=QUICK if options.quick else FULL,
            samples=[],
            failures=[],
        )
        _measure(options.only, sides, binary, options.repeat, result, console)
    except StartError as exc:
        console.print(f"bench: {exc}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        # Before the first run: there is nothing to report.
        return 130
    result.machine.load_average_after = os.getloadavg()
    _publish(result, options, console)
    if result.interrupted:
        return 130
    return 1 if result.failures else 0


def _measure(
    names: list[str], sides: list[Side], binary: Path, repeats: int, result: report.Result, console: Console
) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(names) * repeats * len(sides))
        try:
            for name in names:
                broken: set[str] = set()
                for repeat in range(1, repeats + 1):
                    for side in sides:
                        progress.update(task, description=f"{name}, {side.name}, run {repeat} of {repeats}")
                        if side.name not in broken and not _run_once(name, side, repeat, binary, result):
                            # It would only use up its time limit again.
                            broken.add(side.name)
                        progress.advance(task)
        except KeyboardInterrupt:
            result.interrupted = True


def _run_once(name: str, side: Side, repeat: int, binary: Path, result: report.Result) -> bool:
    run = Run(binary, result.sizes, side)
    try:
        figures = SCENARIOS[name](run)
    except StartError:
        raise
    except BenchError as exc:
        result.failures.append(report.Failure(name, side.name, str(exc)))
        return False
    result.samples.append(report.Sample(name, side.name, repeat, figures, run.loads, run.notes))
    return True


def _publish(result: report.Result, options: argparse.Namespace, console: Console) -> None:
    # In a file or a pipe there is no screen to fit.
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(report.table(result))
    for note in result.notes():
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    if options.json:
        report.write_json(result, options.json)
    if options.markdown:
        options.markdown.write_text(report.markdown(result))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Our broker and a peer, side by side.")
    parser.add_argument("--peer", metavar="NSQD", help="the other daemon; without it only ours is measured")
    parser.add_argument("--ours", metavar="COMMAND", help="how to start ours: a command with {flags} and {durability}")
    parser.add_argument("--durability", choices=("os", "memory", "fsync"), default="os", help="of ours (default: os)")
    parser.add_argument("--only", metavar="NAME,...", type=_scenario_names, default=list(SCENARIOS))
    parser.add_argument("--repeat", metavar="N", type=_positive, help="runs per side (default: 3, with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke test, not a measurement")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every sample and the machine's facts")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the table as Markdown")
    parser.add_argument(
        "--peers", action="store_true", help="compare with other brokers instead; its options: --peers --help"
    )
    options = parser.parse_args()
    options.repeat = options.repeat or (1 if options.quick else 3)
    return options


def _scenario_names(text: str) -> list[str]:
    wanted: set[str] = set()
    for name in text.split(","):
        if name not in SCENARIOS and name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join([*SCENARIOS, *GROUPS])}")
        wanted.update(GROUPS.get(name, (name,)))
    return [name for name in SCENARIOS if name in wanted]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    # Short of the hard limit, the memory scenario opens fewer connections and its note says how many.
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
