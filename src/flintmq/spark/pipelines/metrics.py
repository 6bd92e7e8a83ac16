"""`flintmq pipeline metrics`: how much flows through topics, how large, how late, and which values are frequent.

For each topic and window of publish time: messages, bytes, quantiles of sizes and of the delay until Spark read them,
and the most frequent values at a path of the messages' JSON. On the screen and in a plot windows change until they are
over; a topic or a table gets each window once, when no more messages are expected for it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError, permission_hint
from flintmq.spark.pipelines import common
from flintmq.spark.pipelines.archive import Target, checkpoint_of, table_writer, target_of
from flintmq.spark.pipelines.loops import check_loop
from flintmq.spark.shipped.files import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Board", "add_arguments", "measure", "metrics", "plot", "run"]

QUANTILES = (0.5, 0.9, 0.99)
#: Windows of a topic that are kept for the screen and the plot.
_KEPT_WINDOWS = 500
#: Windows of a topic on the screen.
_SHOWN_WINDOWS = 12
#: Columns of a terminal from which on all of the table fits.
_WIDE = 125
#: Seconds that a batch may need from its plan until its windows are told: what ended before may still lack messages.
_BATCH_SLACK = 10.0


def measure(messages: DataFrame, *, window: float, lateness: float, path: str | None = None, top: int = 5) -> DataFrame:
    """The numbers of each topic and window. `lateness` is how long a window waits for messages that come late."""
    from pyspark.sql import functions as f

    size = f.length("value")
    # In a stream the time is that of the batch, the same for all of its rows.
    # A column of its own: an aggregate takes no function that is not the same each time.
    delay = (f.unix_micros(f.current_timestamp()) - f.unix_micros("timestamp")) / 1000
    messages = messages.withColumn("_delay", delay)
    numbers = [
        f.count(f.lit(1)).alias("messages"),
        f.sum(size).alias("bytes"),
        f.percentile_approx(size, list(QUANTILES), 1000).alias("size"),
        f.percentile_approx("_delay", list(QUANTILES), 1000).alias("delay_ms"),
    ]
    if path is not None:
        value = f.get_json_object(f.col("value").cast("string"), path)
        numbers.append(f.expr(f"approx_top_k(_found, {int(top)})").alias("top"))
        messages = messages.withColumn("_found", value)
    windows = f.window("timestamp", common.interval(window))
    measured = messages.withWatermark("timestamp", common.interval(lateness)).groupBy(windows, "topic").agg(*numbers)
    columns = [f.col("window.start").alias("start"), f.col("window.end").alias("end"), "topic", "messages", "bytes"]
    columns.append((f.col("messages") / window).alias("rate"))
    for name in ("size", "delay_ms"):
        columns += [f.col(name)[place].alias(f"{name}_p{share * 100:g}") for place, share in enumerate(QUANTILES)]
    if path is not None:
        # Messages without a value there are no value.
        columns.append(f.filter("top", lambda entry: entry["item"].isNotNull()).alias("top"))
    return measured.select(*columns)


#: Where the page has its data.
_DATA = '<script id="data" type="application/json">null</script>'


@dataclass
class Board:
    """The latest windows, kept by the driver for the screen and the plot. Spark calls it for each batch."""

    changed: Callable[[Board], None] = lambda board: None
    #: By topic and start of the window. Times are in UTC.
    rows: dict[tuple[str, Any], dict[str, Any]] = field(default_factory=dict)
    # Set by `metrics`.
    window: float = 60.0
    #: Seconds between the starts of two batches; None: all that there is, once.
    every: float | None = None
    path: str | None = None
    #: No more batches will come.
    ended: bool = False
    #: When the last batch was told, in seconds since 1970.
    read: float = 0.0

    def __call__(self, measured: DataFrame, batch: int) -> None:
        self.read = time.time()
        for row in measured.collect():
            found = row.asDict(recursive=True)
            # pyspark gives the local time of this process, without its zone.
            found |= {name: found[name].astimezone(UTC) for name in ("start", "end")}
            self.rows[found["topic"], found["start"]] = found
        for topic in {topic for topic, _ in self.rows}:
            starts = sorted(start for name, start in self.rows if name == topic)
            for start in starts[:-_KEPT_WINDOWS]:
                del self.rows[topic, start]
        self.changed(self)

    def of(self, topic: str) -> list[dict[str, Any]]:
        return [row for (name, _), row in sorted(self.rows.items()) if name == topic]

    def is_open(self, row: dict[str, Any]) -> bool:
        """Tell whether messages of this window may not have been read yet, as it is not over or only just."""
        if any(name == row["topic"] and start > row["start"] for name, start in self.rows):
            return False
        slack = 0.0 if self.every is None else _BATCH_SLACK + self.every
        end: float = row["end"].timestamp()
        return end > self.read - slack

    def rate(self, row: dict[str, Any]) -> float:
        """Return the messages a second of a window; of one that is open, so far."""
        begun: float = row["start"].timestamp()
        elapsed = min(self.window, max(1.0, self.read - begun))
        return float(row["messages"] / elapsed if self.is_open(row) else row["rate"])

    @property
    def topics(self) -> list[str]:
        return sorted({topic for topic, _ in self.rows})


def metrics(
    spark: SparkSession,
    source: common.Source,
    *,
    window: float = 60.0,
    lateness: float = 60.0,
    path: str | None = None,
    top: int = 5,
    topic: str | None = None,
    table: str | Path | Target | None = None,
    network: Mapping[str, str] | None = None,
    board: Board | None = None,
    checkpoint: str | Path | Place | None = None,
    new_query: bool = False,
    once: bool = False,
    every: float = 10.0,
    quiet: bool = True,
) -> common.Summary:
    """Measure what the source gives: to a topic as JSON, to a table, or to a Board."""
    from pyspark.sql import functions as f

    if sum(target is not None for target in (topic, table, board)) != 1:
        raise PipelineError("metrics go to a topic, to a table or to the screen: to one of them")
    common.check_whole(source, "is measured")
    if topic is not None:
        check_loop(common.options_of(source), topic, network or {}, "--to-topic")
    _check(window, topic, checkpoint, draws_elsewhere=board is not None and common.is_remote(spark))
    if board is not None:
        board.window, board.path, board.every = window, path, None if once else every
    if checkpoint is None and table is None:
        source = common.temporary(source)
    measured = measure(source(spark), window=window, lateness=lateness, path=path, top=top)
    with tempfile.TemporaryDirectory(prefix="flintmq-metrics-") as scratch:
        target = None if table is None else Target.of(table)
        at = checkpoint_of(target.place, checkpoint) if target is not None else Place.of(checkpoint or scratch)
        common.check_hadoop(spark, at)
        if topic is not None:
            message = f.to_json(f.struct("*")).alias("value")
            writer = measured.select(message, f.lit(topic).alias("topic")).writeStream.format("nsq")
            writer = writer.options(**(network or {})).outputMode("append")
        elif target is not None:
            with common.shipping(spark):
                writer = measured.writeStream.foreachBatch(table_writer(spark, target, at, new_query))
            writer = writer.outputMode("append")
        else:
            writer = measured.writeStream.foreachBatch(board).outputMode("update")
        writer = writer.option("checkpointLocation", at.for_spark)
        summary = common.run_stream(writer, "metrics", once=once, every=every, quiet=quiet)
    if board is not None:
        board.ended = True
        board.changed(board)
    return summary


# --- Seeing it --------------------------------------------------------------------------------------------------------


def screen(board: Board, width: int = _WIDE) -> Any:
    """The latest windows as a table for a terminal; a narrow one has fewer columns."""
    from rich import box
    from rich.table import Table

    is_wide = width >= _WIDE
    table = Table(title="metrics", box=box.HEAVY_HEAD if is_wide else box.SIMPLE)
    sizes = ("bytes", "size p50 / p99") if is_wide else ()
    for name in ("topic", "window (UTC)", *(("messages",) if is_wide else ()), "per second", *sizes, "delay p50 / p99"):
        # The last column alone gives way.
        header = name if is_wide else name.replace(" (", "\n(").replace(" p50", "\np50")
        table.add_column(header, justify="left" if name in ("topic", "window (UTC)") else "right", no_wrap=True)
    has_top = any(row.get("top") for row in board.rows.values())
    if has_top:
        table.add_column("most frequent")
    for topic in board.topics:
        for row in board.of(topic)[-_SHOWN_WINDOWS:]:
            cells = [
                topic,
                f"{row['start']:%H:%M:%S}",
                *([f"{row['messages']:,}"] if is_wide else []),
                f"{board.rate(row):,.1f}" + (" so far" if board.is_open(row) else ""),
            ]
            if is_wide:
                cells += [f"{row['bytes']:,}", f"{row['size_p50']:,} / {row['size_p99']:,}"]
            cells.append(f"{row['delay_ms_p50'] / 1000:.2f} / {row['delay_ms_p99'] / 1000:.2f} s")
            if has_top:
                cells.append(", ".join(f"{entry['item']} ({entry['count']:,})" for entry in row.get("top") or []))
            table.add_row(*cells)
    return table


def plot(board: Board, target: str | Path) -> None:
    """Draw the windows to a PNG, SVG or HTML file, in one step, so that a viewer never finds half of it."""
    target = Path(target)
    kind = target.suffix.removeprefix(".").lower()
    if kind not in ("png", "svg", "html"):
        raise PipelineError(f"{target}: a plot is a .png, .svg or .html file")
    data = _page(board) if kind == "html" else _picture(board, kind)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        os.replace(partial, target)
    except OSError as exc:
        why = f"{exc.strerror}{permission_hint(exc, target)}"
        raise PipelineError(f"cannot write {target}: {why}; choose another file with --plot") from exc


def _picture(board: Board, kind: str) -> bytes:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError as exc:
        hint = "pip install 'flintmq[plot]', or plot to a .html file"
        raise PipelineError(f"matplotlib is not installed: {hint}") from exc
    figure = Figure(figsize=(10, 8), layout="constrained")
    rate, size, delay = figure.subplots(3, 1, sharex=True)
    for number, topic in enumerate(board.topics):
        rows = board.of(topic)
        closed = [row for row in rows if not board.is_open(row)]
        # Dotted, with a ring: this one is still filling.
        opened = [*closed[-1:], rows[-1]] if len(closed) < len(rows) else []
        values: tuple[tuple[Any, str, str, Callable[[dict[str, Any]], float]], ...] = (
            (rate, topic, "-", board.rate),
            (size, f"{topic} p50", "-", lambda row: float(row["size_p50"])),
            (delay, f"{topic} p50", "-", lambda row: float(row["delay_ms_p50"]) / 1000),
            (delay, f"{topic} p99", "--", lambda row: float(row["delay_ms_p99"]) / 1000),
        )
        for axes, label, style, value in values:
            colour, times = f"C{number % 10}", [row["start"] for row in closed]
            axes.plot(times, [value(row) for row in closed], style, marker=".", color=colour, label=label)
            axes.plot([row["start"] for row in opened], [value(row) for row in opened], ":", color=colour)
            axes.plot(
                [row["start"] for row in opened[-1:]],
                [value(row) for row in opened[-1:]],
                "o",
                mfc="none",
                color=colour,
            )
    titles = ("messages a second", "size, bytes", "delay until Spark read it, seconds (includes its batching)")
    for axes, title in zip((rate, size, delay), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if board.topics:
            axes.legend(fontsize=8, loc="upper left")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind)
    return drawn.getvalue()


def _page(board: Board) -> bytes:
    """Return a page that needs no other file, with the windows as JSON in it."""
    data = {
        "window": board.window,
        "every": board.every,
        "path": board.path,
        "live": not board.ended,
        "drawn": round(time.time(), 3),
        "topics": [{"name": topic, "rows": [_row(board, row) for row in board.of(topic)]} for topic in board.topics],
    }
    # Nothing that a topic or a value is called may end the script.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    page = resources.files(__package__).joinpath("metrics.html").read_text(encoding="utf-8")
    return page.replace(_DATA, _DATA.replace("null", text), 1).encode("utf-8", "replace")


def _row(board: Board, row: dict[str, Any]) -> dict[str, Any]:
    names = [f"p{share * 100:g}" for share in QUANTILES]
    return {
        "start": row["start"].timestamp(),
        "open": board.is_open(row),
        "messages": row["messages"],
        "bytes": row["bytes"],
        "rate": board.rate(row),
        "size": [row[f"size_{name}"] for name in names],
        "delay": [row[f"delay_ms_{name}"] / 1000 for name in names],
        "top": [[entry["item"], entry["count"]] for entry in row.get("top") or []],
    }


def _check(window: float, topic: str | None, checkpoint: object, *, draws_elsewhere: bool) -> None:
    """PipelineError for what cannot be, whatever Spark says."""
    if window <= 0:
        raise PipelineError("--window must be greater than 0")
    if draws_elsewhere:
        raise PipelineError("with --remote the driver is elsewhere and cannot draw here: give --to-topic or --to-table")
    if topic is not None and not checkpoint:
        raise PipelineError("say where it notes how far it is, by --checkpoint: without it, it would begin anew")


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure topics: messages, bytes, sizes, delays, frequent values; by default on the screen."
    parser.add_argument(
        "--window", metavar="DURATION", type=common.duration, default=60.0, help="length of a window (default 1m)"
    )
    parser.add_argument(
        "--lateness",
        metavar="DURATION",
        type=common.duration,
        default=60.0,
        help="time that a window stays open for late messages (default 1m)",
    )
    parser.add_argument("--path", metavar="JSONPATH", help="count the values at this path, such as $.country")
    parser.add_argument(
        "--top", metavar="N", type=int, default=5, help="values to show of a window (default %(default)s)"
    )
    parser.add_argument("--to-topic", metavar="TOPIC", help="publish each window as JSON when it ends")
    parser.add_argument("--to-table", metavar="URI", help="add each window to a table when it is over")
    common.table_arguments(parser)
    parser.add_argument("--new-query", action="store_true", help="add to a table that has rows of other queries")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the windows to a .png, .svg or .html file after each batch"
    )
    common.source_arguments(parser, nargs="*")
    common.stream_arguments(parser)
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    common.need_topics(arguments)
    common.check_whole(common.stream_reader(arguments), "is measured")
    if arguments.to_topic and arguments.to_table:
        raise PipelineError("give --to-topic or --to-table, not both")
    live = not arguments.to_topic and not arguments.to_table
    _check(arguments.window, arguments.to_topic, arguments.checkpoint, draws_elsewhere=live and bool(arguments.remote))
    if arguments.plot and not live:
        raise PipelineError("a plot shows windows as they change: leave --to-topic and --to-table away")
    if arguments.plot:
        plot(Board(), arguments.plot)  # now, and not after Spark has started, it turns out that it cannot be
    board, show = (Board(), None)
    if live:
        board, show = _live(arguments)
    if arguments.to_topic:
        options = common.topics_of(arguments).all_options
        check_loop(options, arguments.to_topic, common.network_options(arguments), "--to-topic")
    common.check_places(arguments, "to_table", "checkpoint")
    status = common.check_topics(arguments, batch=False)
    spark = common.open_session(arguments, "flintmq metrics")
    summary = metrics(
        spark,
        common.stream_reader(arguments),
        window=arguments.window,
        lateness=arguments.lateness,
        path=arguments.path,
        top=arguments.top,
        topic=arguments.to_topic,
        table=target_of(arguments, arguments.to_table) if arguments.to_table else None,
        network=common.network_options(arguments),
        board=board if live else None,
        checkpoint=common.place_of(arguments, arguments.checkpoint) if arguments.checkpoint else None,
        new_query=arguments.new_query,
        once=arguments.once,
        every=arguments.every,
        quiet=live,
    )
    if show is not None:
        show(board)
    if live and arguments.json:
        summary.details = {"windows": [row for topic in board.topics for row in board.of(topic)]}
    common.print_summary(summary, as_json=arguments.json)
    return status


def _live(arguments: argparse.Namespace) -> tuple[Board, Callable[[Board], None] | None]:
    """A board that draws itself after each batch, and what draws it a last time."""
    from rich.console import Console

    console = Console()

    def changed(board: Board) -> None:
        if arguments.plot:
            plot(board, arguments.plot)
        if console.is_terminal and not arguments.json:
            console.clear()
            console.print(screen(board, console.width))

    return Board(changed), None if arguments.json else lambda board: console.print(screen(board, console.width))
