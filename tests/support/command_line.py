"""The command line of a torture: the flags that all have, its folder, its progress, its report.

A torture module makes its parser with ``torture_parser``, adds flags of its own, and gives the work to ``conduct``. The
exit status is 0 if the report passed, 1 if not (the broker's files are kept then), 130 after ctrl-C. A torture
that handles ctrl-C itself says so by ``interrupted`` in its report, which is printed then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["conduct", "print_report", "seed_of", "torture_parser"]


class Report(Protocol):
    """A dataclass with what happened."""

    @property
    def passed(self) -> bool: ...


R = TypeVar("R", bound=Report)
Progressed = Callable[[R], None]


def torture_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that every torture has."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--seed", type=int, help="of the load; by default a new one each time")
    parser.add_argument("--data-path", metavar="DIR", help="where the broker's files are made (default: a new one)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def seed_of(arguments: argparse.Namespace) -> int:
    """Return the seed that was given, or a new one, and keep it in the arguments."""
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(1 << 32)
    seed: int = arguments.seed
    return seed


def conduct(
    arguments: argparse.Namespace,
    name: str,
    work: Callable[[Path, Progressed[R]], Coroutine[Any, Any, R]],
    *,
    title: str = "",
    total: int | None = None,
    described: Callable[[R], tuple[int, str]] = lambda report: (0, ""),
    keep: bool = True,
) -> int:
    """Run a torture in a new folder and print its report; return the exit status.

    ``described`` tells how much of ``total`` is done, and in words what is going on; without a total there is no bar.
    """
    console = Console(stderr=True, highlight=False)
    if title:
        console.print(title)
    folder = Path(tempfile.mkdtemp(prefix=f"flintmq-{name}-", dir=arguments.data_path))
    passed = interrupted = False
    try:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=total is None) as progress:
            task = progress.add_task("", total=total)

            def progressed(report: R) -> None:
                completed, text = described(report)
                progress.update(task, completed=completed, description=text)

            report = asyncio.run(work(folder, progressed))
        passed = report.passed
        interrupted = getattr(report, "interrupted", False)
    except KeyboardInterrupt:
        keep = False
        return 130
    finally:
        if passed or interrupted or not keep:
            shutil.rmtree(folder)
        else:
            console.print(f"the broker's files are kept in {folder}")
    print_report({**asdict(report), "passed": passed}, arguments.json)  # type: ignore[call-overload]
    if interrupted:
        return 130
    return 0 if passed else 1


def print_report(report: dict[str, object], as_json: bool) -> None:
    """Print a report as JSON, or as lines for people."""
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    console = Console(highlight=False)
    for name, value in report.items():
        label = name.replace("_", " ")
        if isinstance(value, list):
            for item in value:
                console.print(f"  {item}", markup=False)
            continue
        if isinstance(value, dict):
            text = ", ".join(f"{count:,} {what}" for what, count in sorted(value.items())) or "none"
        elif isinstance(value, int) and not isinstance(value, bool) and name != "seed":
            text = f"{value:,}"
        else:
            # The seed is there to be copied.
            text = str(value)
        console.print(f"{label:30} {text}", markup=False)
