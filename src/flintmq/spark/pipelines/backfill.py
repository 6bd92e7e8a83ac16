"""`flintmq pipeline backfill`: what an archive lacks of a time, out of the brokers' logs or out of another archive.

The time is cut into spans. Of each, the messages of the source are compared with the rows of the table by topic, node,
id and time of publishing, first without their bodies; those that are missing are then written, and one commit adds
them, under a query name of the backfill's own. A backfill that was stopped or killed is simply run again: it finds what
is still missing.

An archive query that runs beside it is not disturbed. Messages that it has yet to read are not missing, but waiting:
the table's own log says how far each query is and to which topics it subscribes. The rest of these topics is left to
it, with topics and nodes that it has not met yet. A commit is only taken if no
file with rows of the span came in since they were compared; if one did, the span is compared again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flintmq.errors import DataLossError, PipelineError
from flintmq.spark.decoding import Decoder
from flintmq.spark.pipelines import bodies, common
from flintmq.spark.pipelines.archive import (
    Target,
    check_archived,
    laid_out,
    read_files,
    table_files,
    target_of,
    write_batch,
)
from flintmq.spark.pipelines.given import check_unused
from flintmq.spark.pipelines.screen import Display, Silent
from flintmq.spark.pipelines.subscriptions import covers
from flintmq.spark.pipelines.tables import ParquetFolder, Table, format_of
from flintmq.spark.shipped.columns import COLUMNS, SCHEMA
from flintmq.spark.shipped.files import DataFile, describe
from flintmq.spark.shipped.offsets import Key, Mark, Marks, log_offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ArchiveSource", "Filled", "LogSource", "Span", "add_arguments", "backfill", "positions", "run"]

#: Messages of a span, about.
SPAN_MESSAGES = 1_000_000
#: What a message is known by. Offsets count anew in a topic that was deleted and created again, and mean rows in a
#: spool; the time tells such messages apart.
KEY = ("topic", "node", "id", "timestamp_ns")
#: How often a span is compared again because rows of its time came in meanwhile.
_ATTEMPTS = 5
_HOUR_NS = 3_600_000_000_000
_NAMES = uuid.UUID("6f0c3a52-7d0b-4e0c-9a55-1f6b1e0d2c11")


@dataclass(frozen=True)
class Span:
    """A part of the time: from a moment on, until before another, in ns since 1970."""

    since: int
    until: int

    def __str__(self) -> str:
        return f"{_shown(self.since)} to {_shown(self.until)}"


def _shown(ns: int) -> str:
    when = datetime.datetime.fromtimestamp(ns // 1_000_000_000, datetime.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Limits:
    """Up to where messages are taken: how far archive queries are. Of a topic that is not named here, all are."""

    marks: Mapping[Key, Mark] = field(default_factory=dict)
    #: Topics that queries subscribe to and have not met: all of their messages are left to them.
    left: Sequence[str] = ()
    #: Are messages of nodes taken that no query has met, in a topic that one has?
    others: bool = False

    def __bool__(self) -> bool:
        return bool(self.marks or self.left)

    def condition(self) -> str:
        """What is before the limits, in SQL."""
        known: dict[str, list[str]] = {topic: [] for topic in sorted({*self.left, *(topic for topic, _ in self.marks)})}
        terms = []
        for (topic, node), mark in self.marks.items():
            known[topic].append(node)
            terms.append(f"(topic = '{topic}' AND node = '{node}' AND offset < {mark.seq})")
        terms.append(f"(topic NOT IN ({', '.join(repr(topic) for topic in known)}))")
        if self.others:
            for topic, nodes in known.items():
                if topic not in self.left:
                    terms.append(f"(topic = '{topic}' AND node NOT IN ({', '.join(repr(node) for node in nodes)}))")
        return " OR ".join(terms)


# --- Where messages come from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogSource:
    """The logs of topics. Options as for `format("nsq")`."""

    topics: Sequence[str]
    options: Mapping[str, str]
    limits: Limits = Limits()
    #: The shortest part of the time, in ns, that is worth reading for itself.
    finest: ClassVar[int] = 1_000_000_000

    def limited(self, limits: Limits) -> LogSource:
        return LogSource(self.topics, self.options, limits)

    def count(self, spark: SparkSession, span: Span) -> int:
        """Count the messages of a span, by the index of the logs."""
        from flintmq.spark.counting import count

        return count(self._options(span))

    def read(self, spark: SparkSession, span: Span, columns: Sequence[str] = ()) -> DataFrame:
        common.register(spark)
        more = {"columns": ",".join(columns)} if columns else {}
        tasks = {"minPartitions": str(common.parallelism(spark))}
        found = spark.read.format("nsq").options(**tasks | self._options(span) | more).load()
        return found.select(*columns) if columns else found

    def waiting(self, spark: SparkSession, span: Span) -> int:
        """Count the messages of a span that are left to archive queries."""
        if not self.limits:
            return 0
        return max(0, LogSource(self.topics, self.options).count(spark, span) - self.count(spark, span))

    def _options(self, span: Span) -> dict[str, str]:
        kept = {key: value for key, value in self.options.items() if key.lower() != "where"}
        own = next((value for key, value in self.options.items() if key.lower() == "where"), "")
        terms = [f"timestamp_ns >= {span.since} AND timestamp_ns < {span.until}"]
        terms += [own] if own else []
        terms += [self.limits.condition()] if self.limits else []
        joined = " AND ".join(f"({term})" for term in terms)
        return {"subscribe": ",".join(self.topics), **kept, "where": joined}

    def current(self, limits: Limits) -> Limits:
        """The limits as they are for the logs that there are now: of a log that was made anew nothing was read."""
        from flintmq.spark.log_mode.topic_log import Planner
        from flintmq.spark.shipped.options import read_source_options

        planner = Planner(read_source_options({"subscribe": ",".join(self.topics), **self.options}, streaming=False))
        try:
            infos = planner.observe(strict=True)
        finally:
            planner.close()
        known = {topic for topic, _ in limits.marks}
        # A mark of a log that is not there now keeps its topic among those that are limited.
        found = dict(limits.marks)
        for key, info in infos.items():
            mark = limits.marks.get(key)
            if key[0] not in known or (mark is None and limits.others):
                continue
            if mark is None or mark.epoch not in ("", info.epoch):
                found[key] = Mark(info.epoch, 0)
        return replace(limits, marks=found)


@dataclass(frozen=True)
class ArchiveSource:
    """The messages of another archive."""

    target: Target
    topics: Sequence[str]
    limits: Limits = Limits()
    finest: ClassVar[int] = _HOUR_NS

    def limited(self, limits: Limits) -> ArchiveSource:
        return ArchiveSource(self.target, self.topics, limits)

    def count(self, spark: SparkSession, span: Span) -> int:
        """Count the rows of the files that have some of the span: no fewer than there are."""
        return sum(file.rows for file in self._files(spark, span))

    def waiting(self, spark: SparkSession, span: Span) -> int:
        """Count the messages of a span that are left to archive queries."""
        if not self.limits:
            return 0
        whole = ArchiveSource(self.target, self.topics).read(spark, span, (*KEY, "offset"))
        return int(whole.filter(f"NOT ({self.limits.condition()})").count())

    def read(self, spark: SparkSession, span: Span, columns: Sequence[str] = ()) -> DataFrame:
        table, files = self.target.open(), self._files(spark, span)
        if not files:
            return spark.createDataFrame([], SCHEMA).select(*(columns or COLUMNS))
        found = read_files(spark, table, files, columns=tuple(columns) or COLUMNS)
        found = found.filter(f"timestamp_ns >= {span.since} AND timestamp_ns < {span.until}")
        if self.limits and "offset" in found.columns:
            found = found.filter(self.limits.condition())
        # It may have a message twice.
        return found.dropDuplicates(list(KEY))

    def current(self, limits: Limits) -> Limits:
        return limits

    def _files(self, spark: SparkSession, span: Span) -> list[DataFile]:
        return overlapping(table_files(spark, self.target.open()), self.topics, span)


def overlapping(files: Sequence[DataFile], topics: Sequence[str], span: Span) -> list[DataFile]:
    """The files that may have rows of these topics and of this time; one that does not say its times may."""
    return [
        file
        for file in files
        if file.partition.get("topic", topics[0]) in topics
        and (file.oldest is None or file.newest is None or (file.oldest < span.until and file.newest >= span.since))
    ]


# --- How far archive queries are --------------------------------------------------------------------------------------


def positions(table: Table) -> Marks:
    """How far the archive queries of a table are, in each log, as its own log says. PipelineError if one has a spool.

    Of several queries, the one that is furthest.
    """
    found: Marks = {}
    # The newest first.
    for commit in table.last_commits().values():
        for mode, said in _offsets(commit.end):
            if mode == "spool":
                raise PipelineError(
                    f"{table.place} is filled from a channel, which may still have what is missing: give --complete if "
                    "no query fills it any more"
                )
            if mode != "log":
                continue
            try:
                marks = log_offset(said).marks
            except DataLossError:
                continue
            for key, mark in marks.items():
                known = found.setdefault(key, mark)
                if known.epoch == mark.epoch and mark.seq > known.seq:
                    found[key] = mark
    return found


def _offsets(end: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The offsets of an end that are this source's, each behind its mode."""
    for line in end:
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict) and isinstance(said.get("mode"), str):
                yield said["mode"], said


def limits_of(spark: SparkSession, table: Table, topics: Sequence[str], *, unmet: bool = False) -> Limits:
    """Up to where messages of these topics are no longer the business of archive queries.

    PipelineError if the table does not tell whether one of its queries subscribes to a topic. `unmet` says that none
    is to read a topic or a node that none has met.
    """
    marks = positions(table)
    met = {topic for topic, _ in marks}
    commits = table.last_commits().values()
    queries = [commit for commit in commits if any(mode == "log" for mode, _ in _offsets(commit.end))]
    new = {topic: [covers(query.subscription, topic) for query in queries] for topic in topics if topic not in met}
    left = [topic for topic, found in new.items() if True in found and not unmet]
    # Rows may be of a query whose last batch is too long ago to be found.
    marks |= _newest_archived(spark, table, [topic for topic in new if topic not in left])
    met = {topic for topic, _ in marks}
    unsure = [topic for topic, found in new.items() if None in found and topic not in met and topic not in left]
    if unsure and not unmet:
        raise PipelineError(
            f"{table.place} does not tell whether its archive queries subscribe to {', '.join(unsure)}, which none of "
            "them has met yet: one that does would add the messages again. Run such a query first; if there is none, "
            "give --unmet"
        )
    return Limits({key: mark for key, mark in marks.items() if key[0] in topics}, left, others=unmet)


def _newest_archived(spark: SparkSession, table: Table, topics: Sequence[str]) -> Marks:
    """Up to where these topics are archived, by the rows themselves."""
    from pyspark.sql import functions as f

    files = [file for file in table.files() if file.partition.get("topic") in topics] if topics else []
    if not files:
        return {}
    rows = read_files(spark, table, files, columns=("topic", "node", "offset"))
    newest = rows.groupBy("topic", "node").agg(f.max("offset").alias("offset")).collect()
    # The epoch is not known.
    return {(row["topic"], row["node"]): Mark("", row["offset"] + 1) for row in newest if row["offset"] is not None}


# --- Filling ----------------------------------------------------------------------------------------------------------


@dataclass
class Filled:
    """What a backfill found and did."""

    #: Messages of the time that the source has, as far as they are not waiting; and those that the table lacks.
    found: int = 0
    missing: int = 0
    added: int = 0
    #: Messages that are left to archive queries, which have not read as far yet.
    waiting: int = 0
    spans: int = 0
    done: int = 0
    commits: int = 0
    seconds: float = 0.0
    dry_run: bool = False

    @property
    def is_whole(self) -> bool:
        return self.done == self.spans

    def as_json(self) -> str:
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps({"pipeline": "backfill", **facts, "seconds": round(self.seconds, 3)})

    def __str__(self) -> str:
        waiting = (
            f"; {self.waiting:,} are left to the archive query, which has not read them yet" if self.waiting else ""
        )
        rest = "" if self.is_whole else f"; stopped after {self.done:,} of {self.spans:,} parts: run it again"
        if self.dry_run:
            return f"backfill: {self.missing:,} of {self.found:,} messages are missing{waiting}{rest}"
        text = f"{self.added:,} of {self.found:,} messages were missing and are added, {self.seconds:.1f} s"
        return f"backfill: {text}{waiting}{rest}"


def backfill(
    spark: SparkSession,
    source: LogSource | ArchiveSource,
    to: str | Path | Target,
    span: Span,
    *,
    dry_run: bool = False,
    complete: bool = False,
    unmet: bool = False,
    decode: bool | Decoder = False,
    span_messages: int = SPAN_MESSAGES,
    name: str = "",
    quiet: bool = True,
) -> Filled:
    """Add to an archive what it lacks of a time, until it is done or a signal comes. PipelineError says why not.

    `complete` says that no archive query fills the table any more, so that what none has read yet is missing too;
    `unmet`, that none is to read a topic or a node that none has met. With `dry_run` it is only counted. Where the
    archive's messages are decoded `decode` says how: True for JSON, by the schema that the table keeps. `name` is that
    of the backfill in the table's transactions; the same for the same.
    """
    if span.until <= span.since:
        raise PipelineError("--until is a time after --since")
    if isinstance(source, LogSource):
        common.check_whole(source.options, "an archive is to have")
    table = _opened(Target.of(to), decode)
    if not complete:
        source = source.limited(source.current(limits_of(spark, table, source.topics, unmet=unmet)))
    filling = _Filling(spark, source, table, name or str(uuid.uuid4()), decode)
    done = Filled(dry_run=dry_run)
    started = time.monotonic()
    with common.asked_to_stop() as asked, Display("backfill") if not quiet else Silent() as display:
        display.show("looking for what there is")
        done.waiting = source.waiting(spark, span)
        spans = cut(span, lambda part: source.count(spark, part), span_messages, source.finest)
        done.spans = len(spans)
        for one in spans:
            if asked.is_set():
                break
            part = f"part {done.done + 1:,} of {done.spans:,}"
            display.show(f"{one}, {part}, so far {done.missing:,} missing, {done.added:,} added")
            filling.fill(one, done)
        if done.done < done.spans:
            asked.check()
    done.seconds = time.monotonic() - started
    return done


def cut(span: Span, count: Callable[[Span], int], most: int, finest: int) -> list[Span]:
    """Halve a time until no part has more than so many messages, or is shorter than `finest`; leave out empty ones."""
    messages = count(span)
    if not messages:
        return []
    length = span.until - span.since
    if messages <= most or length < 2 * finest:
        return [span]
    middle = span.since + length // 2
    if length >= 4 * _HOUR_NS:
        # The files of a table are by hours.
        middle -= middle % _HOUR_NS
    halves = (Span(span.since, middle), Span(middle, span.until))
    return [part for half in halves for part in cut(half, count, most, finest)]


def _opened(target: Target, decode: bool | Decoder) -> Table:
    table = target.open()
    if isinstance(table, ParquetFolder):
        raise PipelineError(
            f"{table.place} is plain Parquet, whose list of files is that of Spark's own sink: nothing is added to it"
        )
    known = table.schema()
    if known is None:
        raise PipelineError(f"there is no archive at {target.place}: flintmq pipeline archive makes one, by --to")
    if lacking := [column for column in (*KEY, "value") if column not in known.names]:
        raise PipelineError(f"{target.place} is no archive of messages: it has no column {lacking[0]}")
    if "_undecoded" in known.names and not decode:
        raise PipelineError(f"the messages in {target.place} are decoded: give the --decode that its archive query has")
    if "_undecoded" not in known.names and decode:
        raise PipelineError(f"the messages in {target.place} are not decoded: leave --decode and --schema out")
    return table


class _Filling:
    """Brings what is missing into one table, span by span."""

    def __init__(
        self,
        spark: SparkSession,
        source: LogSource | ArchiveSource,
        table: Table,
        name: str,
        decode: bool | Decoder,
    ) -> None:
        self._spark = spark
        self._decode = decode
        self._source = source
        self._table = table
        self._query = name

    def fill(self, span: Span, done: Filled) -> None:
        from pyspark.sql import functions as f

        for _ in range(_ATTEMPTS):
            known = self._table.files()
            found = self._source.read(self._spark, span, (*KEY, "offset"))
            counted = common.observation(found)
            found = found.observe(counted, f.count(f.lit(1)).alias("rows"))
            missing = self._missing(found, known, span)
            [row] = missing.agg(
                f.count(f.lit(1)).alias("rows"),
                f.min("timestamp_ns").alias("first"),
                f.max("timestamp_ns").alias("last"),
            ).collect()
            if not row["rows"] or done.dry_run:
                break
            # No more bodies are read than those of the gap.
            gap = Span(row["first"], row["last"] + 1)
            found = self._missing(self._source.read(self._spark, gap), known, gap)
            rows = laid_out(self._table, found, self._decode)
            last = self._table.position(self._query)
            batch = 0 if last is None else last.batch + 1
            files = write_batch(self._table, rows, f"{self._query}-{batch:010d}", partitioned=True)
            if not files or self._commit(batch, gap, known, files):
                done.added += sum(file.rows for file in files)
                done.commits += bool(files)
                break
        else:
            raise PipelineError(
                f"other rows of {span} came into {self._table.place} each of the {_ATTEMPTS} times that it was "
                "compared: run the backfill again when no other writes there"
            )
        done.found += int(counted.get["rows"])
        done.missing += row["rows"]
        done.done += 1

    def _missing(self, found: DataFrame, known: Sequence[DataFile], span: Span) -> DataFrame:
        """The rows that are not in the files."""
        files = overlapping(known, self._source.topics, span)
        if not files:
            return found
        there = read_files(self._spark, self._table, files, columns=KEY)
        there = there.filter(f"timestamp_ns >= {span.since} AND timestamp_ns < {span.until}")
        return found.join(there, list(KEY), "left_anti").select(*found.columns)

    def _commit(self, batch: int, gap: Span, known: Sequence[DataFile], files: Sequence[DataFile]) -> bool:
        """Add the files. False if others with rows of the same time came in since `known` was read."""
        paths = {file.path for file in known}

        def is_other(file: DataFile) -> bool:
            if file.path in paths or not overlapping([file], self._source.topics, gap):
                return False
            # An archive that runs beside it adds files to this very hour, of other minutes.
            exact = file if file.is_exact else describe(self._table.place, file.path, file.partition)
            return bool(overlapping([exact], self._source.topics, gap))

        end = [json.dumps({"mode": "backfill", "since": gap.since, "until": gap.until})]
        return self._table.commit_unless(self._query, batch, end, files, is_other)


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Add missing messages of a period to an archive, from the topics' logs or from another archive. Messages that "
        "are there are not added again, and an archive query may run beside it."
    )
    parser.add_argument("topics", metavar="TOPIC", nargs="+", help="topics")
    parser.add_argument("--to", metavar="URI", required=True, help="the archive to complete")
    parser.add_argument(
        "--since", metavar="TIME", type=common.moment, required=True, help="messages published then or later (RFC 3339)"
    )
    parser.add_argument("--until", metavar="TIME", type=common.moment, help="messages published before (default: now)")
    parser.add_argument("--archive", metavar="URI", help="take messages from this archive instead of the topics' logs")
    parser.add_argument("--dry-run", action="store_true", help="say how many messages are missing, and add none")
    parser.add_argument(
        "--complete",
        action="store_true",
        help="no archive query fills the table any more: add messages that none has read, too",
    )
    parser.add_argument(
        "--unmet",
        action="store_true",
        help="also add messages of topics and nodes that no archive query has met: none is to read them",
    )
    bodies.decode_arguments(parser)
    common.table_arguments(parser)
    common.broker_arguments(parser, reads=True)
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.remote:
        raise PipelineError("backfill adds files to the table from here: give a --master, not --remote")
    until = arguments.until or datetime.datetime.now(datetime.UTC)
    span = Span(common.nanoseconds(arguments.since), common.nanoseconds(until))
    if span.until <= span.since:
        raise PipelineError("--until is a time after --since")
    target = target_of(arguments, arguments.to)
    # What is wrong is said before Spark starts.
    common.check_places(arguments, "to")
    bodies.check_decoding(arguments)
    decode: bool | Decoder = arguments.decode is not None or arguments.schema is not None
    _opened(target, decode)
    source: LogSource | ArchiveSource
    topics = list(dict.fromkeys(arguments.topics))
    status = 0
    if arguments.archive:
        check_unused(arguments, ("nsqd", "lookupd", "option"), "with --archive, which asks no broker")
        other = Target(common.place_of(arguments, arguments.archive))
        if other.place.is_inside(target.place) and target.place.is_inside(other.place):
            raise PipelineError("--archive and --to are the same table")
        if format_of(other.place) is None:
            raise PipelineError(f"there is no archive at {other.place}")
        if not isinstance(opened := other.open(), ParquetFolder):  # of which only Spark knows the files
            check_archived(opened.place, opened.files(), topics)
        source = ArchiveSource(other, topics)
    else:
        named = argparse.Namespace(**{**vars(arguments), "topics": topics, "channel": None, "start": None})
        options = common.topics_of(named).options
        common.check_whole(options, "an archive is to have")
        source = LogSource(topics, options)
        status = common.check_topics(named, batch=True)
    if decode and not bodies.needs_spark(arguments):
        decode = bodies.decoder_of(arguments, topics, arguments.schema, arguments.message, arguments.subject)
    spark = common.open_session(arguments, "flintmq backfill")
    if decode is True and not bodies.is_found_out(arguments, arguments.schema):
        decode = bodies.decoder_of(arguments, topics, arguments.schema, arguments.message, arguments.subject)
    terms = [sorted(topics), span.since, arguments.until and span.until, arguments.archive and str(other.place)]
    try:
        done = backfill(
            spark,
            source,
            target,
            span,
            dry_run=arguments.dry_run,
            complete=arguments.complete,
            unmet=arguments.unmet,
            decode=decode,
            span_messages=SPAN_MESSAGES,
            name=str(uuid.uuid5(_NAMES, json.dumps(terms))),
            quiet=False,
        )
    except PipelineError:
        raise
    except Exception as exc:
        raise PipelineError(common.explain(exc)) from exc
    sys.stdout.write((done.as_json() if arguments.json else str(done)) + "\n")
    return status if done.is_whole else 1
