"""From samples to something to read: medians and ratios as a table, as Markdown, and everything as JSON."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

from .daemons import Side
from .load import Mode, Report
from .scenarios import METRICS, Figures, Metric, Sizes


class Sample(msgspec.Struct, frozen=True):
    """One run of one scenario on one side."""

    scenario: str
    side: str
    repeat: int
    figures: Figures
    loads: list[tuple[Mode, Report]]
    notes: list[str]


class Failure(msgspec.Struct, frozen=True):
    scenario: str
    side: str
    error: str


class Row(msgspec.Struct, frozen=True):
    """One figure on both sides. Ratio: the median of ours divided by the peer's, whichever way is better."""

    metric: str
    title: str
    unit: str
    better: str
    ours: list[float]
    peer: list[float]
    ours_median: float | None
    peer_median: float | None
    ratio: float | None


class Machine(msgspec.Struct):
    """The facts that a reader needs to judge the figures."""

    cores: int
    processor: str
    memory_mib: int
    system: str
    python: str
    kernel_form: str | None
    versions: dict[str, str | None]
    load_average_before: tuple[float, float, float]
    load_average_after: tuple[float, float, float]


@dataclass
class Result:
    """All samples so far; the rest is derived."""

    machine: Machine
    settings: dict[str, str | int | bool | None]
    sizes: Sizes
    samples: list[Sample]
    failures: list[Failure]
    interrupted: bool = False

    def rows(self) -> list[Row]:
        rows = (self._row(name, metric) for name, metric in METRICS.items())
        return [row for row in rows if row.ours or row.peer]

    def notes(self) -> list[str]:
        """Each remark once, with the runs it was made for."""
        told = (f"{s.scenario}, {s.side}, run {s.repeat}: {note}" for s in self.samples for note in s.notes)
        failed = (f"{f.scenario}, {f.side}: failed: {f.error}" for f in self.failures)
        return [*told, *failed, *(["interrupted: the remaining runs were not made"] if self.interrupted else [])]

    def _row(self, name: str, metric: Metric) -> Row:
        ours = self._values(name, "ours")
        peer = self._values(name, "peer")
        ours_median = statistics.median(ours) if ours else None
        peer_median = statistics.median(peer) if peer else None
        # A quick run may use less CPU than the kernel's clock can show: no ratio to zero.
        ratio = ours_median / peer_median if ours_median is not None and peer_median else None
        return Row(name, metric.title, metric.unit, metric.better, ours, peer, ours_median, peer_median, ratio)

    def _values(self, name: str, side: str) -> list[float]:
        return [sample.figures[name] for sample in self.samples if sample.side == side and name in sample.figures]


def inspect_machine(sides: Iterable[Side]) -> Machine:
    versions = {side.name: side.version() for side in sides}
    form = re.search(r"\b(compiled|interpreted)\b", versions.get("ours") or "")
    load_average = os.getloadavg()
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=_processor(),
        memory_mib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        kernel_form=form.group(1) if form else None,
        versions=versions,
        load_average_before=load_average,
        load_average_after=load_average,
    )


def table(result: Result) -> Table:
    table = Table(title="ours and the peer: medians, with the lowest and highest run")
    table.add_column("", no_wrap=True)
    for heading in ("unit", "ours", "min–max", "peer", "min–max", "ours/peer"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows():
        style = ""
        if row.ratio is not None:
            style = "green" if (row.ratio >= 1) == (row.better == "higher") else "red"
        *cells, ratio = _cells(row)
        table.add_row(*cells, f"[{style}]{ratio}[/]" if style else ratio)
    return table


def markdown(result: Result) -> str:
    machine = result.machine
    lines = [
        "| | unit | ours | min–max | peer | min–max | ours/peer |",
        "|---|---|---:|---:|---:|---:|---:|",
        *("| " + " | ".join(_cells(row)) + " |" for row in result.rows()),
        "",
        f"{machine.cores} cores ({machine.processor}), {machine.memory_mib:,} MiB, {machine.system}, {machine.python}.",
        f"Ours: {machine.versions.get('ours') or 'version unknown'}; kernel {machine.kernel_form or 'form unknown'}; "
        f"durability {result.settings['durability']}. Peer: {machine.versions.get('peer') or 'none'}.",
        f"Runs per figure: {result.settings['repeat']}. Load average before and after: "
        f"{machine.load_average_before[0]:.2f}, {machine.load_average_after[0]:.2f}.",
    ]
    lines += [f"- {' '.join(note.split())}" for note in result.notes()]
    return "\n".join(lines) + "\n"


def write_json(result: Result, path: Path) -> None:
    document = {
        "machine": result.machine,
        "settings": result.settings,
        "sizes": result.sizes,
        "results": result.rows(),
        "samples": result.samples,
        "failures": result.failures,
        "interrupted": result.interrupted,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def _cells(row: Row) -> list[str]:
    ratio = "–" if row.ratio is None else f"{row.ratio:.2f}×"
    ours = [_number(row.ours_median), _spread(row.ours)]
    return [row.title, row.unit, *ours, _number(row.peer_median), _spread(row.peer), ratio]


def _spread(values: list[float]) -> str:
    return f"{_number(min(values))}–{_number(max(values))}" if values else "–"


def _number(value: float | None) -> str:
    """Three digits are as many as a run repeats."""
    if value is None:
        return "–"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        # 9,995 and up: where rounding to three digits gives the next power of ten.
        if abs(value) >= 0.9995 * size and abs(value) >= 9995:
            return f"{_three_digits(value / size)}{unit}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else "unknown"
