"""The dashboard of `flintmq top`: an app of textual.

`History` keeps what sparklines are drawn from; `Top` asks the cluster every interval and draws two tables, of all
topics and, after Enter, of the channels of one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, Input, Sparkline, Static

from flintmq.errors import FlintError
from flintmq.tools._cluster import ChannelStats, Cluster, Sample, TopicStats
from flintmq.tools._show import count, rate

__all__ = ["History", "Top", "sparkline"]

#: Updates that are kept, and drawn in a cell.
_KEPT = 120
_DRAWN = 16
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float], width: int = _DRAWN) -> str:
    """Return the course of some values in blocks, the newest on the right."""
    shown = list(values)[-width:]
    most = max(shown, default=0.0)
    if most <= 0:
        return ("▁" * len(shown)).rjust(width)
    return "".join(_BARS[min(7, int(value / most * 7.999))] for value in shown).rjust(width)


class History:
    """The last values of depth and rates: of the cluster, of topics and of channels."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], deque[float]] = {}

    def add(self, sample: Sample, rates: dict[tuple[str, str], tuple[float, float]]) -> None:
        seen = set()
        for name, topic in sample.topics.items():
            for label, depth in (("", topic.total_depth), *((k, c.depth) for k, c in topic.channels.items())):
                came, left = rates.get((name, label), (0.0, 0.0))
                for what, value in (("depth", float(depth)), ("in", came), ("out", left)):
                    seen.add((name, label, what))
                    self._values.setdefault((name, label, what), deque(maxlen=_KEPT)).append(value)
        for key in self._values.keys() - seen:
            del self._values[key]

    def of(self, topic: str, channel: str, what: str) -> list[float]:
        return list(self._values.get((topic, channel, what), ()))

    def total(self, what: str) -> list[float]:
        """Return the course of all topics together."""
        found = [list(values) for (_, channel, kind), values in self._values.items() if not channel and kind == what]
        longest = max(map(len, found), default=0)
        return [sum(row[place] for row in found if place >= -len(row)) for place in range(-longest, 0)]


_TOPIC_COLUMNS = ("topic", "depth", "in/s", "out/s", "in flight", "deferred", "clients", "channels", "depth over time")
_CHANNEL_COLUMNS = (
    "channel",
    "depth",
    "in/s",
    "out/s",
    "in flight",
    "deferred",
    "clients",
    "requeued",
    "timed out",
    "depth over time",
)


class Top(App[None]):
    """The app. Its keys are in `BINDINGS`."""

    TITLE = "flintmq top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #totals { height: 5; padding: 0 1; }
    .total { width: 1fr; height: 5; padding: 0 1; }
    .figure { height: 1; }
    .total Sparkline { height: 3; width: 100%; margin-top: 0; }
    #where { height: 1; padding: 0 2; background: $panel; }
    #table { height: 1fr; }
    #filter { display: none; height: 3; }
    #filter.shown { display: block; }
    #trouble { height: auto; padding: 0 2; color: $warning; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("q", "quit", "quit"),
        Binding("enter", "open", "open", priority=False),
        Binding("escape", "back", "back"),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("p", "pause", "pause/unpause"),
        Binding("slash", "filter", "filter"),
    ]

    def __init__(
        self,
        cluster: Cluster,
        interval: float,
        topic: str = "",
        *,
        read_only: bool = False,
        first: Sample | None = None,
    ) -> None:
        super().__init__()
        self._cluster = cluster
        self._interval = interval
        self._read_only = read_only
        # What is looked at, and how.
        self._topic = topic
        self._needle = ""
        self._sorts = {"topics": (0, False), "channels": (0, False)}
        self._columns: tuple[str, ...] = ()
        # What is known.
        self._sample = first
        self._before: Sample | None = None
        self._rates: dict[tuple[str, str], tuple[float, float]] = {}
        self.history = History()
        self._trouble = ""
        self._is_asking = False

    def compose(self) -> Iterable[Any]:
        with Horizontal(id="totals"):
            for name in ("depth", "in", "out"):
                with Vertical(classes="total"):
                    yield Static("", id=f"figure-{name}", classes="figure")
                    yield Sparkline([], id=f"line-{name}")
        yield Static("", id="where")
        yield Input(placeholder="part of a name; Enter keeps the filter, Escape clears it", id="filter")
        yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
        yield Static("", id="trouble")
        yield Footer()

    async def on_mount(self) -> None:
        if self._sample is not None:
            self.history.add(self._sample, {})
        self._draw()
        self.query_one("#table").focus()
        self.set_interval(self._interval, self.update_now)

    async def update_now(self) -> None:
        """Ask the cluster and draw what it says. One question at a time, however slow the answers are."""
        if self._is_asking:
            return
        self._is_asking = True
        try:
            sample = await self._cluster.sample()
        except (FlintError, OSError) as exc:
            self._trouble = f"no answer: {exc}"
        else:
            self._before, self._sample = self._sample, sample
            self._rates = sample.rates(self._before)
            self.history.add(sample, self._rates)
            self._trouble = "; ".join(f"no answer from {each}" for each in sample.failures)
        finally:
            self._is_asking = False
        self._draw()

    # --- Drawing -----------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self._sample is None:
            return
        topics = self._sample.topics
        for name, label, shown in (("depth", "depth", count), ("in", "in/s", None), ("out", "out/s", None)):
            course = self.history.total(name)
            now = course[-1] if course else 0.0
            figure = shown(int(now)) if shown else rate(now)
            self.query_one(f"#figure-{name}", Static).update(Text.assemble((f"{figure} ", "bold"), (label, "dim")))
            self.query_one(f"#line-{name}", Sparkline).data = course or [0.0]
        nodes = len(self._sample.nodes)
        where = f"{len(topics)} topics on {nodes} nsqd{'' if nodes == 1 else 's'}"
        if self._topic:
            where = f"{self._topic}: {len(topics.get(self._topic, TopicStats()).channels)} channels"
            if self._topic in topics and topics[self._topic].paused:
                where += ", paused"
        place, is_reversed = self._sorts[self._view]
        columns = _CHANNEL_COLUMNS if self._topic else _TOPIC_COLUMNS
        where += f"   by {columns[place]}{' (reversed)' if is_reversed else ''}"
        if self._needle:
            where += f"   with “{self._needle}”"
        self.query_one("#where", Static).update(Text(f"{where}   {time.strftime('%H:%M:%S')}"))
        self.query_one("#trouble", Static).update(Text(self._trouble))
        self._fill(columns, self._rows(topics), place, is_reversed)

    @property
    def _view(self) -> str:
        return "channels" if self._topic else "topics"

    def _rows(self, topics: dict[str, TopicStats]) -> list[tuple[str, bool, list[Any]]]:
        """Return name, whether it is paused, and a value for each column but the first and the last."""
        rows: list[tuple[str, bool, list[Any]]] = []
        if self._topic:
            for name, channel in topics.get(self._topic, TopicStats()).channels.items():
                came, left = self._rates.get((self._topic, name), (0.0, 0.0))
                rows.append((name, channel.paused, [*_counts(channel, came, left), *_failed(channel)]))
        else:
            for name, topic in topics.items():
                came, left = self._rates.get((name, ""), (0.0, 0.0))
                total = ChannelStats(depth=topic.total_depth)
                for channel in topic.channels.values():
                    total.in_flight_count += channel.in_flight_count
                    total.deferred_count += channel.deferred_count
                    total.clients += channel.clients
                rows.append((name, topic.paused, [*_counts(total, came, left), len(topic.channels)]))
        return [row for row in rows if self._needle.lower() in row[0].lower()]

    def _fill(
        self, columns: tuple[str, ...], rows: list[tuple[str, bool, list[Any]]], place: int, is_reversed: bool
    ) -> None:
        table = self.query_one("#table", DataTable)
        chosen = self._chosen()
        if columns != self._columns:
            table.clear(columns=True)
            for column in columns:
                table.add_column(column, key=column)
            self._columns = columns
        else:
            table.clear()
        # By name upwards, by a number downwards.
        if 0 < place < len(columns) - 1:
            rows.sort(key=lambda row: (-row[2][place - 1], row[0]), reverse=is_reversed)
        else:
            rows.sort(key=lambda row: row[0], reverse=is_reversed)
        for name, is_paused, values in rows:
            course = self.history.of(*((self._topic, name) if self._topic else (name, "")), "depth")
            label = Text(f"{name} (paused)" if is_paused else name, style="yellow" if is_paused else "bold")
            figures = [
                Text(rate(value) if isinstance(value, float) else count(value), justify="right") for value in values
            ]
            table.add_row(label, *figures, Text(sparkline(course), style="cyan"), key=name)
        names = [name for name, _, _ in rows]
        if chosen in names:
            table.move_cursor(row=names.index(chosen), animate=False)

    def _chosen(self) -> str:
        """Return the name in the row of the cursor."""
        table = self.query_one("#table", DataTable)
        if not table.row_count or not table.is_valid_row_index(table.cursor_row):
            return ""
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    # --- Keys --------------------------------------------------------------------------------------------------------

    def on_data_table_row_selected(self, event: Any) -> None:
        self.action_open()

    def action_open(self) -> None:
        if not self._topic and (name := self._chosen()):
            self._topic, self._needle = name, ""
            self._draw()

    def action_back(self) -> None:
        if self.query_one("#filter").has_class("shown"):
            self._end_filter("")
        elif self._needle:
            self._end_filter("")
        elif self._topic:
            was, self._topic = self._topic, ""
            self._draw()
            table = self.query_one("#table", DataTable)
            table.move_cursor(row=table.get_row_index(was) if was in table.rows else 0, animate=False)

    def action_sort(self) -> None:
        place, _ = self._sorts[self._view]
        columns = _CHANNEL_COLUMNS if self._topic else _TOPIC_COLUMNS
        self._sorts[self._view] = ((place + 1) % (len(columns) - 1), False)
        self._draw()

    def action_reverse(self) -> None:
        place, is_reversed = self._sorts[self._view]
        self._sorts[self._view] = (place, not is_reversed)
        self._draw()

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("shown")
        box.value = self._needle
        box.focus()

    def on_input_changed(self, event: Any) -> None:
        self._needle = event.value
        self._draw()

    def on_input_submitted(self, event: Any) -> None:
        self._end_filter(event.value)

    def _end_filter(self, needle: str) -> None:
        box = self.query_one("#filter", Input)
        box.remove_class("shown")
        box.value = needle
        self._needle = needle
        self.query_one("#table").focus()
        self._draw()

    async def action_pause(self) -> None:
        """Pause or unpause the topic or channel of the cursor, on every nsqd that has it."""
        name = self._chosen()
        if not name or self._sample is None:
            return
        if self._read_only:
            self.notify("started with --read-only", severity="warning")
            return
        topic, channel = (self._topic, name) if self._topic else (name, "")
        about = self._sample.topics[topic]
        is_paused = about.channels[channel].paused if channel else about.paused
        nodes = [
            address
            for address, topics in self._sample.nodes.items()
            if topic in topics and (not channel or channel in topics[topic].channels)
        ]
        verb = "unpause" if is_paused else "pause"

        async def tell(node: Any) -> None:
            method = getattr(node, f"{verb}_{'channel' if channel else 'topic'}")
            await (method(topic, channel) if channel else method(topic))

        _, failures = await self._cluster.each(nodes, tell)
        label = f"{topic}/{channel}" if channel else topic
        for address, reason in failures.items():
            self.notify(f"{address}: {reason}", title=f"{label} was not {verb}d", severity="error")
        if len(failures) < len(nodes):
            self.notify(f"{label} is {verb}d")
        await self.update_now()


def _counts(channel: ChannelStats, came: float, left: float) -> list[Any]:
    return [channel.depth, came, left, channel.in_flight_count, channel.deferred_count, channel.clients]


def _failed(channel: ChannelStats) -> list[int]:
    return [channel.requeue_count, channel.timeout_count]
