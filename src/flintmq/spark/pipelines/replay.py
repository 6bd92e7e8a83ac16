"""`flintmq pipeline replay`: what was archived, or what is still in a topic's log, published again.

A replay is cut into chunks before it begins, and the plan is written down with a name of its own. A chunk, or with a
rate several at once, is published by one batch write whose key is that name and the numbers of the chunks; which ones
is noted before, and that they are done after it. So a replay that was stopped goes on where it was; on our broker the
write that was under way is not published twice, because its rows are always the same.

Many tasks publish a chunk. Brokers that stage rows publish those of one task after those of the task before it, so that
the tasks only need to be in order: of a log each has a piece of a node's range, of an archive a piece of the time.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flintmq.errors import ConnectError, PipelineError
from flintmq.spark.pipelines import common
from flintmq.spark.pipelines.archive import Target, check_archived, read_files, table_files, target_of
from flintmq.spark.pipelines.given import DEFAULT_START, check_network_only, check_unused, names_target
from flintmq.spark.pipelines.loops import check_loop
from flintmq.spark.pipelines.replay_notes import Chunk, Notes
from flintmq.spark.pipelines.screen import Display, Silent
from flintmq.spark.pipelines.tables import ParquetFolder
from flintmq.spark.shipped.files import DataFile, Place, partition_of
from flintmq.spark.shipped.options import read_sink_options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from flintmq.spark.log_mode.index import Index
    from flintmq.spark.shipped.offsets import Range

__all__ = ["Chunk", "add_arguments", "archive_chunks", "log_chunks", "replay", "run", "terms_of"]

#: Messages of a chunk, where no rate asks for less; and of one that is sorted by one task.
CHUNK_MESSAGES = 1_000_000
ORDERED_CHUNK_MESSAGES = 200_000
#: A replay that is behind its rate catches up by no more than this.
_CATCH_UP = 1.03
#: Times the messages that are due which a write may have, before they are counted; and the chunks of the write before.
_SURPRISE = 1.5
_GROWTH = 8
#: By how much a write counts less than the one behind it.
_FADE = 0.7
#: Messages of an hour whose places are kept in memory at most: 16 bytes each, and as much again to sort them.
_MOST_PLACES = 10_000_000
#: How often the index of a log is asked where its messages are.
_MOST_QUESTIONS = 2_000
#: Seconds' worth of messages that a write has at least, and times the seconds that writes take.
_LEAST_SECONDS = 1.0
_SPARE = 2.0

#: Where messages are cut, in the order of their times: time in ns, offset.
Edge = tuple[int, int]
#: Options that cut ranges, or leave out what is published.
_CUTS = ("minpartitions", "maxrecordsperpartition", "columns")
_PLACE = ("timestamp_ns", "offset")
_BY_TIME = ("timestamp_ns", "topic", "node", "offset", "id")
_LEAST = -(2**63)
_HOUR_NS = 3_600_000_000_000


#: Gives the messages of a chunk, in any order.
ReadChunk = Callable[["SparkSession", Chunk], "DataFrame"]


@dataclass(frozen=True)
class LogReader:
    """Gives the messages of a chunk out of the topics' logs. Options as for `format("nsq")`."""

    options: Mapping[str, str]

    def __call__(self, spark: SparkSession, chunk: Chunk) -> DataFrame:
        return self.read(spark, chunk)

    def read(self, spark: SparkSession, chunk: Chunk, *, tasks: int = 0, columns: str = "") -> DataFrame:
        """The messages of each node in their order, over the partitions as they are numbered.

        There are `tasks` of them or more; without that each topic on each node is one. `columns` are those that are
        not null, all by default.
        """
        common.register(spark)
        dropped = ("starting", "ending", "where", *_CUTS)
        kept = {key: value for key, value in self.options.items() if not key.lower().startswith(dropped)}
        own = next((value for key, value in self.options.items() if key.lower() == "where"), "")
        # A node that has come since is not named by the chunk.
        named = " OR ".join(
            f"(topic = '{topic}' AND node = '{node}')" for topic, nodes in chunk.what["stop"].items() for node in nodes
        )
        more = {
            "startingOffsets": json.dumps(chunk.what["first"]),
            "endingOffsets": json.dumps(chunk.what["stop"]),
            "where": f"({own}) AND ({named})" if own else named,
        }
        if tasks:
            more["minPartitions"] = str(tasks)
        if columns:
            more["columns"] = columns
        return spark.read.format("nsq").options(**kept | more).load()


def archive_chunks(
    spark: SparkSession,
    root: str | Path | Target,
    *,
    topics: Sequence[str] = (),
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    size: int = CHUNK_MESSAGES,
) -> list[Chunk]:
    """The messages of an archive, hour by hour; long hours are cut, by time and offset."""
    since_ns, until_ns = _ns(since, 0), _ns(until, 2**63 - 1)
    hours: dict[int, list[DataFile]] = {}
    table = Target.of(root).open()
    found = table_files(spark, table)
    check_archived(table.place, found, topics)
    for file in found:
        if file.oldest is None:
            raise PipelineError(f"{table.place} is no archive of messages: {file.path} does not say their times")
        # One that another engine has written may have several topics.
        if topics and file.partition.get("topic", topics[0]) not in topics:
            continue
        if file.oldest is not None and file.newest is not None and file.oldest < until_ns and file.newest >= since_ns:
            hours.setdefault(file.oldest // _HOUR_NS, []).append(file)
    chunks = []
    for _, files in sorted(hours.items()):
        # A message of the very time of --until is not wanted, and no cut is there.
        cuts = [edge for edge in _cuts(table.place, files, size) if since_ns <= edge[0] < until_ns]
        edges: list[Edge] = [(since_ns, _LEAST), *cuts, (until_ns, _LEAST)]
        for first, stop in itertools.pairwise(edges):
            touched = [file for file in files if (file.oldest or 0) <= stop[0] and (file.newest or 0) >= first[0]]
            if touched:
                rows = min(size, sum(file.rows for file in touched))
                named = [asdict(file) for file in sorted(touched, key=lambda file: file.path)]
                what = {"files": named, "first": list(first), "stop": list(stop)}
                chunks.append(Chunk(rows, what | ({"topics": sorted(topics)} if topics else {})))
    return chunks


def _cuts(place: Place, files: Sequence[DataFile], size: int) -> list[Edge]:
    """Where to cut the messages of some files, so that about `size` of them are between two cuts.

    Of very many, every so manyth is looked at: the others are in the same places.
    """
    rows = sum(file.rows for file in files)
    if rows <= size:
        return []
    step = math.ceil(rows / _MOST_PLACES)
    places = _places_of(place, files, step).sort_by([(name, "ascending") for name in _PLACE])
    between = max(1, size // step)
    return [tuple(row.values()) for row in places.take(list(range(between, len(places), between))).to_pylist()]


def _places_of(place: Place, files: Sequence[DataFile], step: int) -> pa.Table:
    """Return where the first message of some files is, and each that is `step` behind another."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    # Not as one dataset: its folders would be read as columns.
    store = place.files()
    parts, seen = [], 0
    for file in files:
        with store.open_input_file(file.path) as opened:
            for batch in parquet.ParquetFile(opened).iter_batches(columns=list(_PLACE)):
                parts.append(batch.take(pa.array(range(-seen % step, len(batch), step), pa.int64())))
                seen += len(batch)
    return pa.Table.from_batches(parts)


def archive_reader(root: str | Path | Target) -> ReadChunk:
    table = Target.of(root).open()

    def read(spark: SparkSession, chunk: Chunk) -> DataFrame:
        if "parts" in chunk.what:
            parts = [read(spark, Chunk(0, what)) for what in chunk.what["parts"]]
            return functools.reduce(lambda one, other: one.unionByName(other), parts)
        # A plan of 0.1.0 has the paths alone.
        files = [
            DataFile(file, 0, 0, partition=partition_of(file)) if isinstance(file, str) else DataFile(**file)
            for file in chunk.what["files"]
        ]
        found = table.place.files().get_file_info([file.path for file in files])
        if gone := [file.path for file, info in zip(files, found, strict=True) if not info.is_file]:
            raise PipelineError(f"{gone[0]} was vacuumed away since the replay began: begin it anew")
        (after, first), (before, stop) = chunk.what["first"], chunk.what["stop"]
        messages = read_files(spark, table, files)
        if wanted := chunk.what.get("topics"):
            messages = messages.filter(messages["topic"].isin(wanted))
        # The plain conditions on times let Parquet pass over what lies outside.
        return messages.filter(
            f"timestamp_ns >= {after} AND (timestamp_ns > {after} OR offset >= {first}) "
            f"AND timestamp_ns <= {before} AND (timestamp_ns < {before} OR offset < {stop})"
        )

    return read


def log_chunks(options: Mapping[str, str], *, size: int = CHUNK_MESSAGES) -> list[Chunk]:
    """What the log holds now, of the time that the options say: all nodes in step. Options as for `format("nsq")`."""
    from flintmq.spark.log_mode.index import Index
    from flintmq.spark.log_mode.topic_log import Planner
    from flintmq.spark.shipped.net import Web
    from flintmq.spark.shipped.options import read_source_options

    # A chunk has one range of each log.
    whole = {key: value for key, value in options.items() if key.lower() not in _CUTS}
    read = read_source_options(whole, streaming=False)
    planner, web = Planner(read), Web(read.network)
    logs: dict[tuple[str, str], list[_Piece]] = {}
    try:
        # A condition may leave out some of a log in between, and a crash of its broker millions of numbers.
        for found, address in planner.snapshot():
            logs.setdefault((found.topic, found.node), []).extend(_dense(Index(web), found, address, size))
    finally:
        planner.close()
        web.close()
    messages = {key: sum(piece.messages for piece in pieces) for key, pieces in logs.items()}
    parts = max((math.ceil(count / size) for count in messages.values()), default=0)
    edges = {key: _places(pieces, parts) for key, pieces in logs.items() if messages[key]}
    chunks = []
    for part in range(parts):
        first: dict[str, dict[str, int]] = {}
        stop: dict[str, dict[str, int]] = {}
        for (topic, node), places in edges.items():
            first.setdefault(topic, {})[node], stop.setdefault(topic, {})[node] = places[part : part + 2]
        rows = sum(messages[key] * (part + 1) // parts - messages[key] * part // parts for key in edges)
        chunks.append(Chunk(rows, {"first": first, "stop": stop}))
    return chunks


class _Piece(NamedTuple):
    """A part of a log, and how many messages it has."""

    first: int
    stop: int
    messages: int


def _dense(index: Index, found: Range, address: str, size: int) -> list[_Piece]:
    """Halve a range until no part lacks more numbers than a chunk has messages; those without messages are left out."""
    pieces = []
    waiting = [found]
    for asked in itertools.count():
        if not waiting:
            break
        part = waiting.pop()
        count = index.messages(part, address)
        # A broker that cannot say has one at each number, as far as anybody knows.
        count = part.size if count is None else count
        if part.size - count > size and count and asked < _MOST_QUESTIONS:
            middle = part.first + part.size // 2
            # From the back: the lower half is next.
            waiting += [part._replace(first=middle), part._replace(stop=middle)]
        elif count:
            pieces.append(_Piece(part.first, part.stop, count))
    return pieces


def _places(pieces: Sequence[_Piece], parts: int) -> list[int]:
    """Where to cut a log into parts with as many messages each: its begin, the places between, and its end."""
    total = sum(piece.messages for piece in pieces)
    places = [pieces[0].first]
    left = iter(pieces)
    piece, before = next(left), 0
    for part in range(1, parts):
        wanted = total * part // parts
        while before + piece.messages <= wanted:
            before += piece.messages
            piece = next(left)
        places.append(piece.first + (piece.stop - piece.first) * (wanted - before) // piece.messages)
    return [*places, pieces[-1].stop]


def log_reader(options: Mapping[str, str]) -> LogReader:
    return LogReader(options)


def replay(
    spark: SparkSession,
    plan: Callable[[], list[Chunk]],
    read: ReadChunk,
    to: str,
    network: Mapping[str, str],
    checkpoint: str | Path | Place,
    *,
    where: str | None = None,
    rate: float = 0.0,
    ordered: bool = False,
    what: Mapping[str, Any] | None = None,
    quiet: bool = True,
) -> common.Summary:
    """Publish the chunks of a plan to a topic; `{topic}` in its name stands for the one a message was in.

    `plan` is only asked if the checkpoint has none. `where` is a condition in SQL over the columns of `format("nsq")`,
    and `text`, the value as text. `rate` is messages a second. With `ordered` one task publishes all messages in the
    order of their times. `what` names what is replayed, in plain values: a checkpoint that was begun with another one
    is refused. PipelineError says why not.
    """
    common.register(spark)
    notes = Notes(Place.of(checkpoint), {"to": to, "where": where, **(what or {})})
    with notes.alone():
        return _replay(spark, notes, notes.begin(plan), read, to, network, where, rate, ordered, quiet)


def _replay(
    spark: SparkSession,
    notes: Notes,
    chunks: Sequence[Chunk],
    read: ReadChunk,
    to: str,
    network: Mapping[str, str],
    where: str | None,
    rate: float,
    ordered: bool,
    quiet: bool,
) -> common.Summary:
    summary = common.Summary("replay")
    started = time.monotonic()
    total = sum(chunk.rows for chunk in chunks)
    # Without staging rows are published as tasks come to them.
    stages = not ordered and _all_stage(spark, network)
    writer = _Writer(spark, read, to, where, ordered=ordered, stages=stages)
    pace = _Pace(rate)
    # The write that was under way is the same one again.
    under_way = notes.under_way
    with common.asked_to_stop() as asked, Display("replay") if not quiet else Silent() as display:
        while notes.done < len(chunks):
            first = notes.done
            left = chunks[first:]
            stop = first + pace.take(left, under_way, functools.partial(writer.count, left))
            under_way = 0
            pace.wait(asked)
            if asked.is_set():
                break
            notes.begun(stop)
            # One broker keeps the decisions of all chunks, and the folder of the plan names it.
            numbers = f"{first}" if stop == first + 1 else f"{first}-{stop}"
            sink = {**network, "writeId": f"{notes.name}-{numbers}", "checkpointLocation": notes.place.for_spark}
            begun = time.monotonic()
            rows = writer.publish(_joined(chunks[first:stop]), sink)
            pace.wrote(begun, time.monotonic(), rows)
            notes.finished(stop)
            summary.rows += rows
            summary.batches += 1
            remaining = sum(chunk.rows for chunk in chunks[stop:])
            seconds = time.monotonic() - started
            display.show(
                f"{summary.rows:,} published, {summary.rows / seconds:,.0f}/s, {remaining:,} of {total:,} to go"
            )
        if notes.done < len(chunks):
            asked.check()
    summary.seconds = time.monotonic() - started
    summary.lag = sum(chunk.rows for chunk in chunks[notes.done :])
    summary.details = {"chunks": len(chunks), "done": notes.done, **pace.details()}
    return summary


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks that follow each other as one."""
    if len(chunks) == 1:
        return chunks[0]
    rows = sum(chunk.rows for chunk in chunks)
    if "files" in chunks[0].what:
        return Chunk(rows, {"parts": [chunk.what for chunk in chunks]})
    return Chunk(rows, {"first": chunks[0].what["first"], "stop": chunks[-1].what["stop"]})


def _all_stage(spark: SparkSession, network: Mapping[str, str]) -> bool:
    """Can all brokers that rows may go to stage them?"""
    from flintmq.spark.shipped.net import Cluster

    sink = read_sink_options(network)
    if common.is_remote(spark) or sink.idempotent == "false":
        # Behind Spark Connect the brokers are those of the server's network.
        return False
    cluster = Cluster(sink.network)
    try:
        found = cluster.survey()
    except ConnectError:
        return False
    finally:
        cluster.close()
    return not found.failures and all(broker.has_stage and broker.http for broker in found.brokers)


class _Pace:
    """When the next write begins, and how much it takes, so that a rate is kept. Without a rate: at once, a chunk.

    A write makes all its rows visible at its end, and takes a while however few they are. So writes have as many
    seconds' worth of messages as leaves them time to spare, and begin so early that the quickest of them would end when
    its rows are due. The clock starts at the end of the first write, for which Spark starts its processes.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        #: The next write does not begin before this, by `time.monotonic`.
        self.next = 0.0
        # Seconds that writes lately took: at least, as far as is known, and at most.
        self._shortest, self._longest = 0.0, _LEAST_SECONDS / _SPARE
        # Messages that were published; those that are read for the next write.
        self._rows = self._reading = 0
        # Messages that were read, and those of them that were published: the last writes count most.
        self._lately = (0.0, 0.0)
        # Chunks of the last write.
        self._chunks = 1
        # The end of the first write and of the last one, and the rows that were published by then.
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def take(self, chunks: Sequence[Chunk], count: int = 0, fitting: Callable[[int], int] | None = None) -> int:
        """Return how many of the next chunks to publish by one write, ``count`` if that is decided; sets ``next``.

        ``fitting`` counts the messages of so many chunks that would be published. It is asked where a condition has
        left few so far, and may leave all of the next.
        """
        rows: float | None = None
        if not count:
            count = min(self._together(chunks), _GROWTH * self._chunks)
            most = _SURPRISE * self._due
            while fitting and self._rate and count > 1 and sum(chunk.rows for chunk in chunks[:count]) > most:
                rows = fitting(count)
                if rows <= most:
                    break
                count, rows = max(1, int(count * self._due / rows)), None
        self._chunks = count
        self._reading = sum(chunk.rows for chunk in chunks[:count])
        if self._first is not None:
            rows = self._reading * self._part if rows is None else rows
            (start, before), (ended, _) = self._first, self._last
            due = start + (self._rows - before + rows) / self._rate
            self.next = max(due, ended + rows / (self._rate * _CATCH_UP)) - self._shortest
        return count

    @property
    def _due(self) -> float:
        """Messages that a write should have."""
        return self._rate * max(_LEAST_SECONDS, _SPARE * self._longest)

    @property
    def _part(self) -> float:
        """Of the messages that are read, the part that is published, as far as the last writes tell."""
        read, published = self._lately
        return published / read if read else 1.0

    def _together(self, chunks: Sequence[Chunk]) -> int:
        if not self._rate:
            return 1
        left = self._due
        for number, chunk in enumerate(chunks):
            left -= chunk.rows * self._part
            if left < 0:
                return max(1, number)
        return len(chunks)

    def wait(self, asked: threading.Event) -> None:
        asked.wait(max(0.0, self.next - time.monotonic()))

    def wrote(self, begun: float, ended: float, rows: int) -> None:
        """The write is done."""
        read, published = self._lately
        self._lately = (_FADE * read + self._reading, _FADE * published + rows)
        self._rows += rows
        self._last = (ended, self._rows)
        if not self._rate:
            return
        if self._first is None:
            self._first = self._last
            return
        took = ended - begun
        self._shortest = min(took, self._shortest * 1.1 or took)
        self._longest = max(took, self._longest * 0.8)

    def details(self) -> dict[str, Any]:
        """Messages a second, from the end of the first write to that of the last."""
        if self._first is None or self._last == self._first:
            return {}
        (start, before), (end, after) = self._first, self._last
        return {"rate": round((after - before) / (end - start), 1)}


class _Writer:
    """Publishes chunks, each by one batch write."""

    def __init__(
        self, spark: SparkSession, read: ReadChunk, to: str, where: str | None, *, ordered: bool, stages: bool
    ) -> None:
        self._spark = spark
        self._read = read
        self._to = to
        self._where = where
        self._ordered = ordered
        self._stages = stages
        self._tasks = common.parallelism(spark)

    def publish(self, chunk: Chunk, sink: Mapping[str, str]) -> int:
        """Publish a chunk; how many messages it had."""
        from pyspark.sql import functions as f

        messages = self._messages(chunk)
        seen = common.observation(messages)
        options = dict(sink)
        columns = [f.col("value")]
        if "{topic}" in self._to:
            columns.append(f.regexp_replace(f.lit(self._to), r"\{topic\}", f.col("topic")).alias("topic"))
        else:
            options["topic"] = self._to
        published = messages.select(*columns).observe(seen, f.count(f.lit(1)).alias("rows"))
        try:
            published.write.format("nsq").mode("append").options(**options).save()
        except Exception as exc:
            raise PipelineError(common.explain(exc)) from exc
        return int(seen.get["rows"])

    def count(self, chunks: Sequence[Chunk], count: int) -> int:
        """Count the messages of the first so many chunks that would be published."""
        read, chunk = self._read, _joined(chunks[:count])
        try:
            if isinstance(read, LogReader):
                columns = "" if self._where else "offset"
                return int(self._fitting(read.read(self._spark, chunk, tasks=self._tasks, columns=columns)).count())
            return int(self._fitting(read(self._spark, chunk)).count())
        except PipelineError:
            raise
        except Exception as exc:
            raise PipelineError(common.explain(exc)) from exc

    def _messages(self, chunk: Chunk) -> DataFrame:
        """The messages to publish, in partitions that are in order."""
        read = self._read
        if isinstance(read, LogReader) and not self._ordered:
            columns = "" if self._where else "value,topic"
            return self._fitting(
                read.read(self._spark, chunk, tasks=self._tasks if self._stages else 0, columns=columns)
            )
        messages = self._fitting(read(self._spark, chunk))
        if self._ordered:
            return messages.coalesce(1).sortWithinPartitions(*_BY_TIME)
        if self._stages:
            return messages.orderBy(*_BY_TIME)
        # The messages of a node are all in one task.
        return messages.repartition(self._tasks, "topic", "node").sortWithinPartitions(*_BY_TIME)

    def _fitting(self, messages: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f

        if not self._where:
            return messages
        try:
            return messages.withColumn("text", f.col("value").cast("string")).filter(self._where)
        except Exception as exc:
            raise PipelineError(f"--where {self._where!r}: {common.explain(exc)}") from exc


def _ns(when: datetime.datetime | None, default: int) -> int:
    return default if when is None else common.nanoseconds(when)


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Publish messages of an archive, or of a topic's log, again."
    parser.add_argument("--archive", metavar="URI", help="replay an archive; without it, the topics' logs")
    common.table_arguments(parser)
    parser.add_argument(
        "--to", metavar="TOPIC", required=True, help="target topic; {topic} in it stands for a message's own"
    )
    parser.add_argument(
        "--since", metavar="TIME", type=common.moment, help="only what was published then or later (RFC 3339)"
    )
    parser.add_argument("--until", metavar="TIME", type=common.moment, help="only what was published before (RFC 3339)")
    parser.add_argument(
        "--where", metavar="SQL", help="only messages that match, such as \"get_json_object(text, '$.id') > 7\""
    )
    parser.add_argument("--rate", metavar="N", type=float, default=0.0, help="N messages a second")
    parser.add_argument("--ordered", action="store_true", help="publish with one task in the order of times; slower")
    parser.add_argument(
        "--checkpoint", metavar="URI", required=True, help="where it records its progress; it continues from there"
    )
    parser.add_argument("--to-lookupd", metavar="ADDRESS", action="append", default=[], help="publish to its brokers")
    parser.add_argument("--to-nsqd", metavar="ADDRESS", action="append", default=[], help="publish to this broker")
    parser.add_argument(
        "--to-option", metavar="KEY=VALUE", type=common.pair, action="append", default=[], help="any option of the sink"
    )
    common.source_arguments(parser, nargs="*")
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.archive and not arguments.topics and "subscribePattern" not in common.topics_of(arguments).options:
        raise PipelineError("say what to replay: topics, or --archive DIR")
    _check_meaning(arguments)
    network = common.sink_options(arguments)
    read_sink_options(network)
    if arguments.rate < 0 or not math.isfinite(arguments.rate):
        raise PipelineError("--rate is a number above 0")
    size = ORDERED_CHUNK_MESSAGES if arguments.ordered else CHUNK_MESSAGES
    if arguments.rate:
        size = max(1, min(size, int(arguments.rate)))
    plan: Callable[[], list[Chunk]]
    if arguments.archive:
        target = target_of(arguments, arguments.archive)
        plan, read = (
            lambda: archive_chunks(
                spark, target, topics=arguments.topics, since=arguments.since, until=arguments.until, size=size
            ),
            archive_reader(target),
        )
    else:
        options = _log_options(arguments)
        plan, read = lambda: log_chunks(options, size=size), log_reader(options)
    checkpoint, terms = common.place_of(arguments, arguments.checkpoint), terms_of(arguments)
    # Before Spark starts.
    common.check_places(arguments, "checkpoint")
    known = Notes(checkpoint, {"to": arguments.to, "where": arguments.where, **terms}).check()
    if arguments.archive and not known and not arguments.remote and not target.open().exists:
        raise PipelineError(f"there is no archive at {target.place}: flintmq pipeline archive makes one, by --to")
    if arguments.archive and not known and not arguments.remote:
        table = target.open()
        if not isinstance(table, ParquetFolder):  # of which only Spark knows the files
            check_archived(table.place, table.files(), arguments.topics)
    if not arguments.archive and not known:
        check_loop(common.topics_of(arguments).all_options, arguments.to, network, "--to")
    status = 0 if arguments.archive else common.check_topics(arguments, batch=True)
    spark = common.open_session(arguments, "flintmq replay")
    summary = replay(
        spark,
        plan,
        read,
        arguments.to,
        network,
        checkpoint,
        where=arguments.where,
        rate=arguments.rate,
        ordered=arguments.ordered,
        what=terms,
        quiet=False,
    )
    common.print_summary(summary, as_json=arguments.json)
    return 1 if summary.lag else status


def _check_meaning(arguments: argparse.Namespace) -> None:
    """PipelineError for what a command line says and nothing would read."""
    if not arguments.archive:
        check_unused(arguments, ("format", "catalog", "catalog_option", "table"), "without --archive")
        return
    check_unused(arguments, ("start",), "with --archive, whose messages are chosen by --since and --until")
    check_unused(arguments, ("channel",), "with --archive")
    if names_target(arguments):
        why = "with --archive and brokers to publish to, which --to-nsqd, --to-lookupd and --to-option name"
        check_unused(arguments, ("nsqd", "lookupd", "option"), why)
    # Those of brokers say where to publish.
    check_network_only(arguments)


def terms_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what a command line replays, in plain values that are the same for the same messages.

    The addresses of brokers may change while a replay is stopped, and are left out.
    """
    pattern = None if arguments.archive else common.topics_of(arguments).options.get("subscribePattern")
    return {
        "archive": str(common.place_of(arguments, arguments.archive)) if arguments.archive else None,
        "table": [arguments.catalog, arguments.table] if arguments.archive else None,
        "topics": sorted(set(arguments.topics)),
        "pattern": pattern,
        "from": None if arguments.archive else arguments.start or DEFAULT_START,
        "since": _in_utc(arguments.since),
        "until": _in_utc(arguments.until),
    }


def _in_utc(when: datetime.datetime | None) -> str | None:
    return None if when is None else when.astimezone(datetime.UTC).isoformat()


def _log_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the options of the source of a replay out of logs."""
    options = common.topics_of(arguments).all_options
    named = arguments.start or any(key.lower().startswith("starting") for key, _ in arguments.option)
    if arguments.since:
        if named:
            raise PipelineError("--since and --from, or an option that says where to start, exclude each other")
        options.pop("startingOffsets", None)
        options["startingTimestamp"] = arguments.since.isoformat()
    if arguments.until:
        if not {"endingOffsets", "endingTimestamp"}.isdisjoint(options):
            raise PipelineError("--until and an option that says where to end exclude each other")
        options["endingTimestamp"] = arguments.until.isoformat()
    return options
