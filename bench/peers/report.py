"""From samples to the table, the chart and the JSON of the comparison."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import msgspec

from bench import charts
from bench.charts import Bar, Panel, number
from bench.report import Machine

from .measure import METRICS, Client, Sample, Sizes, values

JSON = charts.FOLDER / "peers.json"
CHART = charts.FOLDER / "peers.svg"
#: The panels of the chart.
CHARTED = (
    *("batch", "one", "consume", "through"),
    *("latency-p99", "half-p99", "cpu-batch", "cpu-consume", "rss-start", "rss-end"),
)


class Result(msgspec.Struct):
    """Everything that one comparison found, as it is in the JSON file."""

    machine: Machine
    sizes: Sizes
    clients: list[Client]
    #: System and how to install it.
    missing: dict[str, str]
    samples: list[Sample]
    #: System and what went wrong.
    failures: list[tuple[str, str]]

    def runs(self) -> str:
        """Say how many runs each system had; they differ where a comparison was cut short."""
        counts = {c.title: sum(s.system == c.system for s in self.samples) for c in self.clients}
        usual = max(counts.values(), default=0)
        fewer = [f"{title} {count}" for title, count in counts.items() if count != usual]
        return f"{usual} runs per system" + (f" (of {', '.join(fewer)})" if fewer else "")


def read(path: Path) -> Result:
    return msgspec.json.decode(path.read_bytes(), type=Result)


def write(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def markdown(result: Result) -> str:
    """Return the tables: figures, what an acknowledgement means, settings; then the machine."""
    clients = result.clients
    lines = [
        f"| | unit | {' | '.join(client.title for client in clients)} |",
        f"|---|---|{'---:|' * len(clients)}",
    ]
    for name, metric in METRICS.items():
        cells = [_cell(values(result.samples, client.system, name)) for client in clients]
        lines.append(f"| {metric.title} | {metric.unit} | {' | '.join(cells)} |")
    lines += [
        "",
        "**The systems do not promise the same.** The acknowledgement of a publish says that the message is:",
        "",
        "| | the message is … | settings of the server |",
        "|---|---|---|",
        *(f"| {client.title} | {client.acknowledged} | {client.settings} |" for client in clients),
        "",
        "| | server | client | settings of the client |",
        "|---|---|---|---|",
        *(
            f"| {client.title} | {_version(client.version)} | {client.client} | {'; '.join(client.client_settings)} |"
            for client in clients
        ),
        "",
        machine_line(result.machine),
        f"Medians of {result.runs()}, the lowest and highest in parentheses; the systems took turns.",
    ]
    lines += [f"- {title} was not there: {get}" for title, get in result.missing.items()]
    lines += [f"- {title} failed: {' '.join(error.split())}" for title, error in result.failures]
    titles = {client.system: client.title for client in clients}
    lines += [f"- {titles[s.system]}, run {s.repeat}: {note}" for s in result.samples for note in s.notes]
    return "\n".join(lines) + "\n"


def machine_line(machine: Machine) -> str:
    return (
        f"{machine.cores} cores ({machine.processor}), {machine.memory_mib:,} MiB, {machine.system}. "
        f"Load average before and after: {machine.load_average_before[0]:.2f}, {machine.load_average_after[0]:.2f}."
    )


def chart(result: Result) -> str:
    panels = []
    for name in CHARTED:
        metric = METRICS[name]
        bars = []
        for client in result.clients:
            found = values(result.samples, client.system, name)
            bars.append(
                Bar(client.title, statistics.median(found), min(found), max(found))
                if found
                else Bar(client.title, None)
            )
        panels.append(Panel(metric.title, f"{metric.unit}, {metric.better} is better", bars))
    return charts.bars("flintmq beside other brokers", panels)


def publish(result: Result) -> None:
    """Write the JSON and the chart, and put both into the README."""
    write(result, JSON)
    CHART.write_text(chart(result))
    image = f"![Rates, latencies, CPU and memory of {len(result.clients)} brokers](charts/{CHART.name})"
    charts.replace_section("peers", f"{image}\n\n{markdown(result)}")


def _cell(found: list[float]) -> str:
    if not found:
        return "–"
    middle = number(statistics.median(found))
    return f"{middle} ({number(min(found))}–{number(max(found))})" if len(found) > 1 else middle


def _version(text: str) -> str:
    """Return the first thing that looks like a version; ours comes after that of the NSQ it speaks."""
    found = re.search(r"(?<=flintmq )\d\S*", text) or re.search(r"v?\d+\.\d+\.\d+\S*", text)
    return found[0].removeprefix("v").rstrip(",") if found else text or "unknown"
