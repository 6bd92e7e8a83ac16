"""What `flintmq torture` shows: a live view on a terminal, and the report at the end."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from flintmq.tools.torture.run import Costs, Report, Run

__all__ = ["print_report", "watch"]

#: Seconds between two pictures.
_INTERVAL = 0.25
#: Of a report, samples of broken rules that people are shown.
_SAMPLES = 10


async def watch(run: Run, *, quiet: bool) -> None:
    """Show the run until this is cancelled; a line with the seed where nobody watches."""
    console = Console(stderr=True, highlight=False)
    console.print(f"seed {run.plan.seed}, files in {run.plan.folder}", soft_wrap=True)
    if quiet or not console.is_terminal:
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_picture(run), refresh=True)
            await asyncio.sleep(_INTERVAL)


def _picture(run: Run) -> RenderableType:
    brokers = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("broker", "state", "fault"):
        brokers.add_column(title)
    for title in ("kills", "acked", "delivered", "again", "broken"):
        brokers.add_column(title, justify="right")
    for front in run.fronts:
        ledger = front.ledger
        books = list(ledger.books.values())
        broken = sum(ledger.violations.counts.values())
        brokers.add_row(
            front.durability if front.node else front.name,
            front.node.state if front.node else "",
            front.fault,
            f"{front.kills:,}",
            f"{ledger.acknowledged:,}",
            f"{sum(book.deliveries for book in books):,}",
            f"{sum(book.redeliveries for book in books):,}",
            Text(str(broken), style="bold red" if broken else "green"),
        )
    lines: list[RenderableType] = [brokers]
    if run.cluster is not None:
        cluster = run.cluster
        states = ", ".join(node.state for node in run.lookupds)
        delivered = sum(book.count for book in cluster.books.values())
        lines.append(
            f"cluster: {cluster.acknowledged:,} acknowledged, {delivered:,} delivered; nsqlookupds {states}; "
            f"{sum(cluster.violations.counts.values())} broken"
        )
    lines.append(Text(_counts(dict(run.faults)), style="dim"))
    seconds = time.monotonic() - run.began
    lines.append(f"{run.phase}, {run.progress:.0%}, {seconds:.0f} s. Ctrl-C ends it with the figures so far.")
    return Group(*lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())) or "none"


def print_report(report: Report) -> None:
    """Print a report for people, on standard output."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in report.costs:
        table.add_column(name, justify="right")
    for title, values in _rows(list(report.costs.values()), complete=report.complete):
        table.add_row(title, *values)
    console.print(table)
    for name, costs in report.costs.items():
        console.print(f"delivered again, {name}: {_counts(costs.again)}", markup=False)
    console.print(f"faults: {_counts(report.faults)}", markup=False)
    for fault, reason in report.left_out.items():
        console.print(f"left out: {fault}, {reason}", markup=False)
    for text in report.samples[:_SAMPLES]:
        console.print(f"  {text}", markup=False)
    if report.violations:
        console.print(f"broken: {_counts(report.violations)}", style="bold red", markup=False)
    seconds = f"{report.seconds:g} s, seed {report.seed}"
    if not report.complete:
        console.print(f"stopped after {seconds}: not drained, so that nobody knows what is lost")
    elif report.passed:
        console.print(f"nothing that must not happen has happened, in {seconds}", style="green")
    else:
        console.print(f"failed after {seconds}")
    sys.stdout.flush()


def _rows(costs: list[Costs], *, complete: bool) -> list[tuple[str, list[str]]]:
    def row(title: str, name: str) -> tuple[str, list[str]]:
        return title, [f"{getattr(one, name):,}" for one in costs]

    rows = [
        row("brokers", "brokers"),
        row("killed", "kills"),
        row("acknowledged", "acknowledged"),
        row("answer unknown", "unknown"),
        row("refused", "refused"),
        row("delivered", "deliveries"),
        row("finished, delivered again", "duplicates"),
        row("early", "early"),
        row("more than 1 s late", "late"),
        row("latest, s", "latest_seconds"),
        row("slowest start, s", "slowest_start_seconds"),
    ]
    lost = row("lost", "lost") if complete else ("lost", ["?"] * len(costs))
    return [*rows[:3], lost, *rows[3:]]
