"""`flintmq pipeline replay`: what was archived, or what is still in a topic's log, published again.

A replay is cut into chunks before it begins, and the plan is written down with a name of its own. A chunk is published
by one batch write whose key is that name and the chunk's number, and then noted as done. So a replay that was stopped
goes on where it was; on our broker the chunk that was under way is not published twice, because the rows of a chunk and
their order are always the same.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import common
from flintmq.spark.pipelines.archive import read_files
from flintmq.spark.pipelines.store import Archive, DataFile, hour_of, local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Chunk", "add_arguments", "archive_chunks", "log_chunks", "replay", "run"]

#: So many messages make a chunk, where no rate asks for less.
CHUNK_MESSAGES = 200_000


#: A place among messages in the order of their times: time in ns, offset.
Place = tuple[int, int]
_LEAST = -(2**63)


@dataclass(frozen=True)
class Chunk:
    """A part of a replay."""

    #: At most so many messages, before the filter.
    rows: int
    #: What is needed to read it again: plain values.
    what: dict[str, Any]


#: Gives the messages of a chunk.
ReadChunk = Callable[["SparkSession", Chunk], "DataFrame"]


def archive_chunks(
    root: str | Path,
    *,
    topics: Sequence[str] = (),
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    size: int = CHUNK_MESSAGES,
) -> list[Chunk]:
    """The messages of an archive, hour by hour; long hours are cut, by time and offset."""
    since_ns, until_ns = _ns(since, 0), _ns(until, 2**63 - 1)
    hours: dict[datetime.datetime, list[DataFile]] = {}
    for file in Archive(root).snapshot().files.values():
        if topics and file.partition["topic"] not in topics:
            continue
        if file.oldest is not None and file.newest is not None and file.oldest < until_ns and file.newest >= since_ns:
            hours.setdefault(hour_of(file), []).append(file)
    chunks = []
    folder = local_path(root)
    for _, files in sorted(hours.items()):
        edges: list[Place] = [(since_ns, _LEAST), *_cuts(folder, files, size), (until_ns, _LEAST)]
        for first, stop in itertools.pairwise(edge for edge in edges if since_ns <= edge[0] <= until_ns):
            touched = [file for file in files if (file.oldest or 0) <= stop[0] and (file.newest or 0) >= first[0]]
            if touched:
                rows = min(size, sum(file.rows for file in touched))
                paths = sorted(file.path for file in touched)
                chunks.append(Chunk(rows, {"files": paths, "first": list(first), "stop": list(stop)}))
    return chunks


def _cuts(root: Path, files: Sequence[DataFile], size: int) -> list[Place]:
    """Where to cut the messages of some files, so that about `size` of them are between two cuts."""
    if sum(file.rows for file in files) <= size:
        return []
    import pyarrow
    import pyarrow.parquet as parquet

    columns = ["timestamp_ns", "offset"]
    # Not as one dataset: its folders would be read as columns.
    parts = [parquet.ParquetFile(root / file.path).read(columns=columns) for file in files]
    places = pyarrow.concat_tables(parts).sort_by([(name, "ascending") for name in columns])
    return [tuple(row.values()) for row in places.take(list(range(size, len(places), size))).to_pylist()]


def archive_reader(root: str | Path) -> ReadChunk:
    def read(spark: SparkSession, chunk: Chunk) -> DataFrame:
        folder = local_path(root)
        gone = [path for path in chunk.what["files"] if not (folder / path).exists()]
        if gone:
            raise PipelineError(f"{gone[0]} was merged with others since the replay began: begin it anew")
        (after, first), (before, stop) = chunk.what["first"], chunk.what["stop"]
        messages = read_files(spark, folder, chunk.what["files"])
        # The plain conditions on times let Parquet pass over what lies outside.
        return messages.filter(
            f"timestamp_ns >= {after} AND (timestamp_ns > {after} OR offset >= {first}) "
            f"AND timestamp_ns <= {before} AND (timestamp_ns < {before} OR offset < {stop})"
        )

    return read


def log_chunks(options: Mapping[str, str], *, size: int = CHUNK_MESSAGES) -> list[Chunk]:
    """What the log holds now, of the time that the options say: all nodes in step. Options as for `format("nsq")`."""
    from flintmq.spark.log_mode.topic_log import Planner
    from flintmq.spark.shipped.options import read_source_options

    planner = Planner(read_source_options(options, streaming=False))
    try:
        ranges = [found for found, _ in planner.snapshot()]
    finally:
        planner.close()
    parts = max((math.ceil(found.size / size) for found in ranges), default=0)
    chunks = []
    for part in range(parts):
        first: dict[str, dict[str, int]] = {}
        stop: dict[str, dict[str, int]] = {}
        rows = 0
        for found in ranges:
            begin, end = (found.first + found.size * edge // parts for edge in (part, part + 1))
            first.setdefault(found.topic, {})[found.node] = begin
            stop.setdefault(found.topic, {})[found.node] = end
            rows += end - begin
        chunks.append(Chunk(rows, {"first": first, "stop": stop}))
    return chunks


def log_reader(options: Mapping[str, str]) -> ReadChunk:
    kept = {key: value for key, value in options.items() if not key.startswith(("starting", "ending"))}

    def read(spark: SparkSession, chunk: Chunk) -> DataFrame:
        common.register(spark)
        ends = {
            name: json.dumps(chunk.what[key]) for name, key in (("startingOffsets", "first"), ("endingOffsets", "stop"))
        }
        messages = spark.read.format("nsq").options(**kept, **ends).load()
        # A node that has come since is not named by the chunk.
        named = [
            f"(topic = '{topic}' AND node = '{node}')" for topic, nodes in chunk.what["stop"].items() for node in nodes
        ]
        return messages.filter(" OR ".join(named))

    return read


def replay(
    spark: SparkSession,
    plan: Callable[[], list[Chunk]],
    read: ReadChunk,
    to: str,
    network: Mapping[str, str],
    checkpoint: str | Path,
    *,
    where: str | None = None,
    rate: float = 0.0,
    quiet: bool = True,
) -> common.Summary:
    """Publish the chunks of a plan to a topic; `{topic}` in its name stands for the one a message was in.

    `plan` is only asked if the checkpoint has none. `where` is a condition in SQL over the columns of `format("nsq")`,
    and `text`, the value as text. `rate` is messages a second. PipelineError says why not.
    """
    from pyspark.sql import functions as f

    common.register(spark)
    notes = _Notes(local_path(checkpoint), {"to": to, "where": where})
    chunks = notes.begin(plan)
    summary = common.Summary("replay")
    started = time.monotonic()
    total = sum(chunk.rows for chunk in chunks)
    topic = f.lit(to) if "{topic}" not in to else f.regexp_replace(f.lit(to), r"\{topic\}", f.col("topic"))
    with common.asked_to_stop() as asked, common.Display("replay") if not quiet else common.Silent() as display:
        for number in range(notes.done, len(chunks)):
            if asked.is_set():
                break
            # One broker keeps the decisions of all chunks, and the folder of the plan names it.
            sink = {**network, "writeId": f"{notes.name}-{number}", "checkpointLocation": str(notes.folder)}
            rows = _publish(spark, read, chunks[number], topic, where, sink)
            notes.finished(number + 1)
            summary.rows += rows
            summary.batches += 1
            remaining = sum(chunk.rows for chunk in chunks[number + 1 :])
            seconds = time.monotonic() - started
            display.show(
                f"{summary.rows:,} published, {summary.rows / seconds:,.0f}/s, {remaining:,} of {total:,} to go"
            )
            if rate:
                # Chunks are about a second's worth: pausing between them keeps the rate.
                asked.wait(max(0.0, summary.rows / rate - (time.monotonic() - started)))
    summary.seconds = time.monotonic() - started
    summary.lag = sum(chunk.rows for chunk in chunks[notes.done :])
    summary.details = {"chunks": len(chunks), "done": notes.done}
    return summary


def _publish(
    spark: SparkSession, read: ReadChunk, chunk: Chunk, topic: Any, where: str | None, sink: dict[str, str]
) -> int:
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    messages = read(spark, chunk).withColumn("text", f.col("value").cast("string"))
    if where:
        try:
            messages = messages.filter(where)
        except Exception as exc:
            raise PipelineError(f"--where {where!r}: {common.explain(exc)}") from exc
    seen = Observation()
    # One task, in a fixed order: the same chunk gives the same publishes under the same keys.
    ordered = messages.coalesce(1).sortWithinPartitions("timestamp_ns", "topic", "node", "offset", "id")
    published = ordered.select("value", topic.alias("topic")).observe(seen, f.count(f.lit(1)).alias("rows"))
    try:
        published.write.format("nsq").mode("append").options(**sink).save()
    except Exception as exc:
        raise PipelineError(common.explain(exc)) from exc
    return int(seen.get["rows"])


class _Notes:
    """How far a replay is, in its checkpoint folder: the plan, and how many chunks of it are done."""

    def __init__(self, folder: Path, terms: dict[str, Any]) -> None:
        self.folder = folder
        self._terms = terms
        self.name = ""
        self.done = 0

    def begin(self, plan: Callable[[], list[Chunk]]) -> list[Chunk]:
        """The chunks of the plan that is there, or of a new one."""
        path = self.folder / "plan.json"
        if not path.exists():
            chunks = [[chunk.rows, chunk.what] for chunk in plan()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write("plan.json", {"name": uuid.uuid4().hex, "terms": self._terms, "chunks": chunks})
        known = json.loads(path.read_text())
        if known["terms"] != self._terms:
            raise PipelineError(
                f"{self.folder} is of another replay ({json.dumps(known['terms'])}): say the same, or take another"
            )
        self.name = known["name"]
        if (self.folder / "done.json").exists():
            self.done = json.loads((self.folder / "done.json").read_text())
        return [Chunk(rows, what) for rows, what in known["chunks"]]

    def finished(self, done: int) -> None:
        self.done = done
        self._write("done.json", done)

    def _write(self, name: str, value: Any) -> None:
        partial = self.folder / f".{name}"
        with open(partial, "w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.folder / name)


def _ns(when: datetime.datetime | None, default: int) -> int:
    if when is None:
        return default
    return (when - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1) * 1000


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Publish again what was archived, or what a topic's log still has."
    parser.add_argument("--archive", metavar="DIR", help="replay an archive; without it, the topics' logs")
    parser.add_argument("--to", metavar="TOPIC", required=True, help="{topic} in it stands for a message's own")
    parser.add_argument("--since", metavar="TIME", type=_time, help="only what was published then or later (RFC 3339)")
    parser.add_argument("--until", metavar="TIME", type=_time, help="only what was published before (RFC 3339)")
    parser.add_argument(
        "--where", metavar="SQL", help="only messages that fit, such as \"get_json_object(text, '$.id') > 7\""
    )
    parser.add_argument("--rate", metavar="N", type=float, default=0.0, help="at most N messages a second")
    parser.add_argument(
        "--checkpoint", metavar="DIR", required=True, help="where it notes how far it is; it goes on from there"
    )
    parser.add_argument("--to-lookupd", metavar="ADDRESS", action="append", default=[], help="publish to its brokers")
    parser.add_argument("--to-nsqd", metavar="ADDRESS", action="append", default=[], help="publish to this broker")
    parser.add_argument(
        "--to-option", metavar="KEY=VALUE", type=common.pair, action="append", default=[], help="any option of the sink"
    )
    common.source_arguments(parser, nargs="*")
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.archive and not arguments.topics:
        raise PipelineError("say what to replay: topics, or --archive DIR")
    if arguments.rate < 0 or not math.isfinite(arguments.rate):
        raise PipelineError("--rate is a number above 0")
    size = max(1, min(CHUNK_MESSAGES, int(arguments.rate))) if arguments.rate else CHUNK_MESSAGES
    plan: Callable[[], list[Chunk]]
    if arguments.archive:
        plan, read = (
            lambda: archive_chunks(
                arguments.archive, topics=arguments.topics, since=arguments.since, until=arguments.until, size=size
            ),
            archive_reader(arguments.archive),
        )
    else:
        source = common.topics_of(arguments)
        options = {"subscribe": ",".join(source.names), **source.options, **dict(_times(arguments))}
        if "startingTimestamp" in options:
            options.pop("startingOffsets", None)
        plan, read = lambda: log_chunks(options, size=size), log_reader(options)
    elsewhere = arguments.to_nsqd or arguments.to_lookupd or arguments.to_option
    spark = common.open_session(arguments, "flintmq replay")
    summary = replay(
        spark,
        plan,
        read,
        arguments.to,
        common.network_options(arguments, prefix="to_" if elsewhere else ""),
        arguments.checkpoint,
        where=arguments.where,
        rate=arguments.rate,
        quiet=False,
    )
    common.print_summary(summary, as_json=arguments.json)
    return 0


def _times(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if arguments.since:
        yield "startingTimestamp", arguments.since.isoformat()
    if arguments.until:
        yield "endingTimestamp", arguments.until.isoformat()


def _time(text: str) -> datetime.datetime:
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 2026-11-16T08:00:00Z") from exc
    return when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
