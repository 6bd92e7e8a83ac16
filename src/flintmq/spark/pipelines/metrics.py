"""`flintmq pipeline metrics`: how much flows through topics, how large, how late, and which values are frequent.

For each topic and window of publish time: messages, bytes, quantiles of sizes and of the delay until Spark read them,
and the most frequent values at a path of the messages' JSON. On the screen and in a plot windows change until they are
over; a topic or a table gets each window once, when no more messages are expected for it.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import common
from flintmq.spark.pipelines.archive import BatchWriter
from flintmq.spark.pipelines.store import local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Board", "add_arguments", "measure", "metrics", "plot", "run"]

QUANTILES = (0.5, 0.9, 0.99)
#: So many windows of a topic are kept for the screen and the plot.
_KEPT_WINDOWS = 500
_SHOWN_WINDOWS = 12


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
    windows = f.window("timestamp", f"{window:g} seconds")
    measured = messages.withWatermark("timestamp", f"{lateness:g} seconds").groupBy(windows, "topic").agg(*numbers)
    columns = [f.col("window.start").alias("start"), f.col("window.end").alias("end"), "topic", "messages", "bytes"]
    columns.append((f.col("messages") / window).alias("rate"))
    for name in ("size", "delay_ms"):
        columns += [f.col(name)[place].alias(f"{name}_p{share * 100:g}") for place, share in enumerate(QUANTILES)]
    if path is not None:
        # Messages without a value there are no value.
        columns.append(f.filter("top", lambda entry: entry["item"].isNotNull()).alias("top"))
    return measured.select(*columns)


@dataclass
class Board:
    """The latest windows, kept by the driver for the screen and the plot. Spark calls it for each batch."""

    changed: Callable[[Board], None] = lambda board: None
    #: By topic and start of the window.
    rows: dict[tuple[str, Any], dict[str, Any]] = field(default_factory=dict)

    def __call__(self, measured: DataFrame, batch: int) -> None:
        for row in measured.collect():
            self.rows[row["topic"], row["start"]] = row.asDict(recursive=True)
        for topic in {topic for topic, _ in self.rows}:
            starts = sorted(start for name, start in self.rows if name == topic)
            for start in starts[:-_KEPT_WINDOWS]:
                del self.rows[topic, start]
        self.changed(self)

    def of(self, topic: str) -> list[dict[str, Any]]:
        return [row for (name, _), row in sorted(self.rows.items()) if name == topic]

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
    table: str | Path | None = None,
    network: Mapping[str, str] | None = None,
    board: Board | None = None,
    checkpoint: str | Path | None = None,
    new_query: bool = False,
    once: bool = False,
    every: float = 10.0,
    quiet: bool = True,
) -> common.Summary:
    """Measure what the source gives: to a topic as JSON, to a table (a folder of Parquet files), or to a Board."""
    from pyspark.sql import functions as f

    if sum(target is not None for target in (topic, table, board)) != 1:
        raise PipelineError("metrics go to a topic, to a table or to the screen: to one of them")
    if window <= 0:
        raise PipelineError("a window is longer than nothing")
    if board is not None and common.is_remote(spark):
        raise PipelineError("with --remote the driver is elsewhere and cannot draw here: give --to-topic or --to-table")
    if topic is not None and checkpoint is None:
        raise PipelineError("say where it notes how far it is, by --checkpoint: without it, it would begin anew")
    if checkpoint is None and table is None:
        source = common.temporary(source)
    measured = measure(source(spark), window=window, lateness=lateness, path=path, top=top)
    with tempfile.TemporaryDirectory(prefix="flintmq-metrics-") as scratch, contextlib.ExitStack() as stack:
        place = str(checkpoint) if checkpoint else f"{table}/_checkpoint" if table is not None else scratch
        if topic is not None:
            message = f.to_json(f.struct("*")).alias("value")
            writer = measured.select(message, f.lit(topic).alias("topic")).writeStream.format("nsq")
            writer = writer.options(**(network or {})).outputMode("append")
        elif table is not None:
            bring_in = stack.enter_context(BatchWriter(str(local_path(table)), place, new_query=new_query))
            with common.shipping(spark):
                writer = measured.writeStream.foreachBatch(bring_in)
            writer = writer.outputMode("append")
        else:
            writer = measured.writeStream.foreachBatch(board).outputMode("update")
        writer = writer.option("checkpointLocation", place)
        return common.run_stream(writer, "metrics", once=once, every=every, quiet=quiet)


# --- Seeing it --------------------------------------------------------------------------------------------------------


def screen(board: Board) -> Any:
    """The latest windows as a table for a terminal."""
    from rich.table import Table

    table = Table("topic", "window (UTC)", title="metrics")
    for name in ("messages", "per second", "bytes", "size p50 / p99", "delay p50 / p99"):
        table.add_column(name, justify="right")
    has_top = any(row.get("top") for row in board.rows.values())
    if has_top:
        table.add_column("most frequent")
    for topic in board.topics:
        for row in board.of(topic)[-_SHOWN_WINDOWS:]:
            cells = [
                topic,
                f"{row['start']:%H:%M:%S}",
                f"{row['messages']:,}",
                f"{row['rate']:,.1f}",
                f"{row['bytes']:,}",
            ]
            cells.append(f"{row['size_p50']:,} / {row['size_p99']:,}")
            cells.append(f"{row['delay_ms_p50'] / 1000:.2f} / {row['delay_ms_p99'] / 1000:.2f} s")
            if has_top:
                cells.append(", ".join(f"{entry['item']} ({entry['count']:,})" for entry in row.get("top") or []))
            table.add_row(*cells)
    return table


def plot(board: Board, target: str | Path) -> None:
    """Draw the windows to a PNG, SVG or HTML file, in one step, so that a viewer never finds half of it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise PipelineError("matplotlib is not installed: pip install 'flintmq[plot]'") from exc
    target = Path(target)
    kind = target.suffix.removeprefix(".").lower()
    if kind not in ("png", "svg", "html"):
        raise PipelineError(f"{target}: a plot is a .png, .svg or .html file")
    figure = Figure(figsize=(10, 8), layout="constrained")
    rate, size, delay = figure.subplots(3, 1, sharex=True)
    for topic in board.topics:
        rows = board.of(topic)
        times = [row["start"] for row in rows]
        rate.plot(times, [row["rate"] for row in rows], marker=".", label=topic)
        size.plot(times, [row["size_p50"] for row in rows], marker=".", label=f"{topic} p50")
        delay.plot(times, [row["delay_ms_p50"] / 1000 for row in rows], marker=".", label=f"{topic} p50")
        delay.plot(times, [row["delay_ms_p99"] / 1000 for row in rows], linestyle="--", label=f"{topic} p99")
    for axes, title in ((rate, "messages a second"), (size, "size, bytes"), (delay, "delay, seconds")):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if board.topics:
            axes.legend(fontsize=8, loc="upper left")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg" if kind == "html" else kind)
    data = drawn.getvalue()
    if kind == "html":
        data = _page(board, data.decode()).encode()
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_bytes(data)
    os.replace(partial, target)


def _page(board: Board, drawing: str) -> str:
    """One file that shows itself anew every few seconds."""
    cells = ("topic", "start", "messages", "bytes", "rate", "size_p50", "size_p99", "delay_ms_p50", "delay_ms_p99")
    rows = [row for topic in board.topics for row in board.of(topic)[-_SHOWN_WINDOWS:]]
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(row[name]))}</td>" for name in cells) + "</tr>" for row in rows
    )
    head = "".join(f"<th>{name}</th>" for name in cells)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="10">'
        "<title>flintmq metrics</title><style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 10px;"
        "text-align:right}svg{max-width:100%;height:auto}</style></head>\n"
        f"<body><h1>flintmq metrics</h1>\n{drawing[drawing.index('<svg') :]}\n"
        f"<table><tr>{head}</tr>\n{body}\n</table></body></html>\n"
    )


def _cell(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure topics: messages, bytes, sizes, delays, frequent values; on the screen unless told otherwise."
    )
    parser.add_argument("--window", metavar="DURATION", type=common.duration, default=60.0, help="default 1m")
    parser.add_argument(
        "--lateness",
        metavar="DURATION",
        type=common.duration,
        default=60.0,
        help="how long a window stays open (default 1m)",
    )
    parser.add_argument("--path", metavar="JSONPATH", help="count the values there, as $.country")
    parser.add_argument("--top", metavar="N", type=int, default=5, help="so many of them (default %(default)s)")
    parser.add_argument("--to-topic", metavar="TOPIC", help="publish each window as JSON when it is over")
    parser.add_argument("--to-table", metavar="DIR", help="write each window to Parquet files when it is over")
    parser.add_argument("--new-query", action="store_true", help="add to a table that has rows of other queries")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the windows to a .png, .svg or .html file after each batch"
    )
    common.source_arguments(parser, nargs="*")
    common.stream_arguments(parser)
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    common.need_topics(arguments)
    if arguments.to_topic and arguments.to_table:
        raise PipelineError("give --to-topic or --to-table, not both")
    live = not arguments.to_topic and not arguments.to_table
    if arguments.plot and not live:
        raise PipelineError("a plot shows windows as they change: leave --to-topic and --to-table away")
    if arguments.plot:
        plot(Board(), arguments.plot)  # now, and not after Spark has started, it turns out that it cannot be
    board, show = (Board(), None)
    if live:
        board, show = _live(arguments)
    status = common.check_topics(arguments)
    spark = common.open_session(arguments, "flintmq metrics")
    summary = metrics(
        spark,
        common.stream_reader(arguments),
        window=arguments.window,
        lateness=arguments.lateness,
        path=arguments.path,
        top=arguments.top,
        topic=arguments.to_topic,
        table=arguments.to_table,
        network=common.network_options(arguments),
        board=board if live else None,
        checkpoint=arguments.checkpoint,
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
            console.print(screen(board))

    return Board(changed), None if arguments.json else lambda board: console.print(screen(board))
