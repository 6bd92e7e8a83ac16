"""What the pipelines share: where messages come from, how a stream is followed to its end, what is shown meanwhile.

Every pipeline is a function that takes a SparkSession and a *source*, which is a function that gives a DataFrame with
the columns of `format("nsq")`. `Topics` makes such sources from topics of brokers. A pipeline's module adds to that
its arguments on the command line, and nothing here knows of any of them.

pyspark is imported inside functions, so that `flintmq pipeline --help` needs none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import ConnectError, HttpError, PipelineError
from flintmq.options import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

__all__ = [
    "Display",
    "Silent",
    "Source",
    "Summary",
    "Topics",
    "asked_to_stop",
    "batch_reader",
    "broker_arguments",
    "check_topics",
    "decode_json",
    "duration",
    "explain",
    "hour_columns",
    "infer_schema",
    "is_remote",
    "need_topics",
    "network_options",
    "open_session",
    "pair",
    "print_summary",
    "register",
    "run_stream",
    "say",
    "shipping",
    "source_arguments",
    "spark_arguments",
    "stream_arguments",
    "stream_reader",
    "temporary",
    "topics_of",
    "write_counted",
]

#: Gives a DataFrame with the columns of `format("nsq")`.
Source = Callable[["SparkSession"], "DataFrame"]

#: Where `flintmq up` puts it.
DEFAULT_NSQD = "127.0.0.1:4150"

# How often a query is asked how it stands; how often a line is written where nobody watches a terminal.
_POLL_SECONDS = 0.5
_LINE_SECONDS = 10.0
# A batch that is under way when we are told to stop gets this long to end. Nothing is lost if it does not.
_LAST_BATCH_SECONDS = 60.0
# A new Python gets ten seconds to call Spark back, and no setting changes that: a query that fails of it is started
# again, so often at most.
_NO_CALL_BACK = "failed to connect back"
_MOST_STARTS = 3
# So many messages say what their JSON looks like.
_INFERRED_FROM = 10_000


# --- Where messages come from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topics:
    """Topics of brokers, as a source. `options` are those of `format("nsq")`, as docs/spark.md lists them."""

    names: Sequence[str]
    options: Mapping[str, str] = field(default_factory=dict)

    def stream(self, spark: SparkSession) -> DataFrame:
        """The messages as they come."""
        return self._load(spark, spark.readStream, {})

    def batch(self, spark: SparkSession, **more: str) -> DataFrame:
        """The messages that are in the log now."""
        return self._load(spark, spark.read, more)

    def _load(self, spark: SparkSession, reader: Any, more: Mapping[str, str]) -> DataFrame:
        options = {"subscribe": ",".join(self.names), **self.options, **more}
        if "subscribePattern" in options:
            del options["subscribe"]
        register(spark)
        return reader.format("nsq").options(**options).load()


def temporary(source: Source) -> Source:
    """The source for a query whose checkpoint is deleted at its end: brokers keep no files for it afterwards."""
    topics = getattr(source, "__self__", None)
    if not isinstance(topics, Topics):
        return source
    return replace(topics, options={**topics.options, "temporaryReader": "true"}).stream


def source_arguments(parser: argparse.ArgumentParser, *, nargs: str = "+", flag: bool = False) -> None:
    """Which topics, of which brokers."""
    group = parser.add_argument_group("where messages come from")
    if flag:
        group.add_argument(
            "--topic", dest="topics", metavar="TOPIC", action="append", default=[], help="may be repeated"
        )
    else:
        group.add_argument(
            "topics", metavar="TOPIC", nargs=nargs, help="topics; a pattern with --option subscribePattern=…"
        )
    _broker_arguments(group)
    group.add_argument(
        "--channel", metavar="NAME", help="consume this channel of brokers that keep no log (NSQ's own nsqd)"
    )
    group.add_argument(
        "--from",
        dest="start",
        metavar="WHERE",
        default="earliest",
        help="where a first run begins: earliest (default), latest, a time (2026-11-16T00:00:00Z), offsets in JSON",
    )


def need_topics(arguments: argparse.Namespace) -> None:
    if not arguments.topics and not any(key == "subscribePattern" for key, _ in arguments.option):
        raise PipelineError("say which topics, or a pattern: --option subscribePattern=REGEX")


def broker_arguments(parser: argparse.ArgumentParser) -> None:
    """Which brokers."""
    _broker_arguments(parser.add_argument_group("where the brokers are"))


def _broker_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lookupd",
        metavar="ADDRESS",
        action="append",
        default=[],
        help="HTTP address of an nsqlookupd; may be repeated",
    )
    group.add_argument(
        "--nsqd", metavar="ADDRESS", action="append", default=[], help="TCP address of a broker; may be repeated"
    )
    group.add_argument(
        "--option",
        metavar="KEY=VALUE",
        type=pair,
        action="append",
        default=[],
        help="any option of the source, see docs/spark.md; may be repeated",
    )


def topics_of(arguments: argparse.Namespace) -> Topics:
    """The source that a command line asks for."""
    options = network_options(arguments)
    if arguments.channel:
        options["channel"] = arguments.channel
    if re.match(r"\d{4}-", arguments.start):
        options["startingTimestamp"] = arguments.start
    else:
        options["startingOffsets"] = arguments.start
    return Topics(arguments.topics, options | dict(arguments.option))


def check_topics(arguments: argparse.Namespace) -> int:
    """Say which topics of a command line no broker knows; PipelineError if that is all of them and none can still come,
    or if no broker answers at all.

    Returns the exit status of a run that does the rest. Where not everybody answers, or the brokers are for a Connect
    server to reach, nothing is said: the query itself will.
    """
    from flintmq.spark.session import check_pyspark
    from flintmq.spark.shipped.net import Cluster
    from flintmq.spark.shipped.options import read_source_options

    # Before anybody is asked: without it nothing can be done.
    check_pyspark()
    wanted = topics_of(arguments)
    if arguments.remote or "subscribePattern" in wanted.options:
        return 0
    options = read_source_options({"subscribe": ",".join(wanted.names), **wanted.options}, streaming=True)
    cluster = Cluster(options.network)
    try:
        found = cluster.survey()
        if not found.brokers and found.failures:
            raise PipelineError("; ".join(found.failures))
        brokers = found.brokers
        known = {topic for broker in brokers for topic in cluster.topics(broker)}
        if found.failures or not brokers:
            return 0
    except (ConnectError, HttpError):
        return 0
    finally:
        cluster.close()
    missing = [topic for topic in wanted.names if topic not in known]
    if not missing:
        return 0
    asked = ", ".join(sorted(broker.tcp or broker.http for broker in brokers))
    text = f"no broker knows the topic {', '.join(missing)}; asked were {asked}"
    if not getattr(arguments, "once", False) and not getattr(arguments, "batch", False):
        say(f"{text}. It is read when it appears")
        return 0
    if len(missing) == len(wanted.names):
        raise PipelineError(text)
    say(text)
    return 1


def stream_reader(arguments: argparse.Namespace) -> Source:
    return topics_of(arguments).stream


def batch_reader(arguments: argparse.Namespace) -> Source:
    return topics_of(arguments).batch


# --- Spark ------------------------------------------------------------------------------------------------------------


def spark_arguments(parser: argparse.ArgumentParser) -> None:
    """Which Spark."""
    group = parser.add_argument_group("Spark")
    group.add_argument("--master", metavar="URL", help="local[4], spark://…, yarn, k8s://… (default: all cores here)")
    group.add_argument("--remote", metavar="URL", help="a Spark Connect server, as sc://host:15002")
    group.add_argument(
        "--conf",
        metavar="KEY=VALUE",
        type=pair,
        action="append",
        default=[],
        help="a setting of Spark; may be repeated",
    )
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def stream_arguments(parser: argparse.ArgumentParser) -> None:
    """How a stream runs."""
    group = parser.add_argument_group("how it runs")
    group.add_argument("--checkpoint", metavar="DIR", help="where Spark notes how far it is; a run goes on from there")
    group.add_argument("--once", action="store_true", help="end when everything that is there now is done")
    group.add_argument(
        "--every",
        metavar="DURATION",
        type=duration,
        default=10.0,
        help="how often a batch begins, such as 1m (default 10s)",
    )


def pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def duration(text: str) -> float:
    try:
        seconds = parse_duration(text) / 1e9
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    if seconds < 0:
        raise argparse.ArgumentTypeError("a duration is not below 0")
    return seconds


def open_session(arguments: argparse.Namespace, app: str) -> SparkSession:
    """The session that a command line asks for; says on standard error that it starts."""
    from pyspark.logger import PySparkLogger

    from flintmq.spark.session import session

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        # They write each error of a query to standard error, with traceback and all; it is told in a sentence.
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    report = None if sys.stderr.isatty() else say
    return session(app, master=arguments.master, remote=arguments.remote, report=report, **dict(arguments.conf))


# --- Following a stream -----------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """What a pipeline did."""

    pipeline: str
    batches: int = 0
    rows: int = 0
    seconds: float = 0.0
    #: How many messages were still to be read at the end; None if the source does not say.
    lag: int | None = None
    #: How many messages were left out because their nodes are gone, with failOnDataLoss=false.
    given_up: int = 0
    #: What only this pipeline has to say.
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> str:
        facts = {"pipeline": self.pipeline, "batches": self.batches, "rows": self.rows}
        facts |= {"seconds": round(self.seconds, 3), "lag": self.lag} | self.details
        facts |= {"given_up": self.given_up} if self.given_up else {}
        return json.dumps(facts, default=str)

    def __str__(self) -> str:
        rate = f", {self.rows / self.seconds:,.0f} a second" if self.rows and self.seconds else ""
        lag = f"; {self.lag:,} still to be read" if self.lag else ""
        lag += f"; {self.given_up:,} given up with their nodes" if self.given_up else ""
        return f"{self.pipeline}: {self.rows:,} messages in {self.batches:,} batches, {self.seconds:.1f} s{rate}{lag}"


class Display:
    """What a person sees while a pipeline runs: one line that changes on a terminal, elsewhere one now and then."""

    def __init__(self, pipeline: str) -> None:
        self._pipeline = pipeline
        self._status: Any = None
        self._written = time.monotonic()

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status(
                f"{self._pipeline}: waiting for the first batch"
            )
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{self._pipeline}: {text}")
        elif time.monotonic() - self._written >= _LINE_SECONDS:
            self._written = time.monotonic()
            say(f"{self._pipeline}: {text}")


class Silent(Display):
    """For programs, which show what they like."""

    def __init__(self) -> None:
        super().__init__("")

    def __enter__(self) -> Display:
        return self

    def show(self, text: str) -> None:
        pass


def run_stream(writer: DataStreamWriter, pipeline: str, *, once: bool, every: float, quiet: bool = True) -> Summary:
    """Run a stream, a batch every so many seconds or all there is once, and show how it goes.

    SIGINT and SIGTERM end it after its batch.

    PipelineError says why it failed.
    """
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=f"{every:g} seconds")
    starts = 1
    while True:
        try:
            return _follow(_start(writer), pipeline, quiet)
        except PipelineError as exc:
            if _NO_CALL_BACK not in str(exc) or starts == _MOST_STARTS:
                raise
            starts += 1
            say(f"{pipeline}: Spark's Python did not start in time, as on a busy machine: once more")


def _start(writer: DataStreamWriter) -> StreamingQuery:
    try:
        return writer.start()
    except Exception as exc:
        raise PipelineError(explain(exc)) from exc


def _follow(query: StreamingQuery, pipeline: str, quiet: bool) -> Summary:
    from flintmq.spark.registration import given_up

    summary = Summary(pipeline)
    started = time.monotonic()
    seen = -1

    def look() -> str:
        nonlocal seen
        text = ""
        for progress in query.recentProgress:
            # Attributes and not keys: a Connect session fills only those.
            if progress.batchId > seen and progress.numInputRows is not None:
                rows = progress.numInputRows
                if rows or "addBatch" in progress.durationMs:
                    summary.batches += 1
                summary.rows += rows
                seen = progress.batchId
            summary.lag = _lag(progress)
            summary.given_up = max(summary.given_up, given_up(progress))
            text = _progress_line(progress, summary)
        return text

    with asked_to_stop() as asked, Silent() if quiet else Display(pipeline) as display:
        try:
            while not query.awaitTermination(_POLL_SECONDS):
                text = look()
                if text:
                    display.show(text)
                if asked.is_set():
                    _stop(query)
                    break
            look()
        except Exception as exc:
            with contextlib.suppress(Exception):
                query.stop()
            raise PipelineError(explain(exc)) from exc
    summary.seconds = time.monotonic() - started
    return summary


def _stop(query: StreamingQuery) -> None:
    give_up = time.monotonic() + _LAST_BATCH_SECONDS
    while query.status["isTriggerActive"] and time.monotonic() < give_up:
        time.sleep(0.1)
    query.stop()


def _progress_line(progress: Any, summary: Summary) -> str:
    parts = [
        f"batch {progress.batchId}",
        f"{summary.rows:,} messages",
        f"{progress.processedRowsPerSecond or 0:,.0f}/s",
    ]
    if (milliseconds := progress.durationMs.get("triggerExecution")) is not None:
        parts.append(f"last batch {milliseconds / 1000:.1f} s")
    if summary.lag is not None:
        parts.append(f"{summary.lag:,} behind")
    return " · ".join(parts)


def _lag(progress: Any) -> int | None:
    """How many messages lie between what was read and what there is; None where the source does not tell."""
    from flintmq.spark.registration import lag

    behind = lag(progress)
    return sum(behind.values()) if behind else None


@contextlib.contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set when a signal asks for the end. Outside of the main thread there are no signals to hear."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain(exc: BaseException) -> str:
    """What went wrong, in one line: our own error inside of Spark's many, else the first line."""
    text = str(exc)
    if ours := re.findall(r"flintmq\.errors\.\w+: (.+)", text):
        return str(ours[-1]).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Spark puts the class of error in front, and the last line of a Python traceback says most.
    if raised := re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception): .+)$", text, re.MULTILINE):
        return str(raised[-1]).strip()
    # [STREAM_FAILED] Query [id = …] terminated with exception: [REASON] why. SQLSTATE: 12345
    first = re.sub(r"^.*? terminated with exception: ", "", lines[0]) if lines else type(exc).__name__
    return re.sub(r"^\[[A-Z_.]+\] |\s*SQLSTATE: \w+.*$", "", first)


def is_remote(spark: SparkSession) -> bool:
    """Is this a session of Spark Connect?"""
    return type(spark).__module__.startswith("pyspark.sql.connect")


@contextlib.contextmanager
def shipping(spark: SparkSession) -> Iterator[None]:
    """Inside, functions given to a Spark Connect server take our code along: it need not be installed there."""
    if not is_remote(spark):
        yield
        return
    from pyspark import cloudpickle

    import flintmq

    cloudpickle.register_pickle_by_value(flintmq)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(flintmq)


def register(spark: SparkSession) -> None:
    """Make `format("nsq")` known; with its code where executors or the server may not have it."""
    from flintmq.spark.registration import register as make_known

    elsewhere = is_remote(spark) or not spark.conf.get("spark.master", "").startswith(("local[", "local,"))
    make_known(spark, ship=elsewhere)


def network_options(arguments: argparse.Namespace, *, prefix: str = "") -> dict[str, str]:
    """Where the brokers are, as options of `format("nsq")`."""
    lookupd, nsqd = getattr(arguments, f"{prefix}lookupd"), getattr(arguments, f"{prefix}nsqd")
    options = {key: value for key, value in getattr(arguments, f"{prefix}option") if key.startswith("nsq.")}
    if lookupd:
        options["nsq.lookupd.http.addresses"] = ",".join(lookupd)
    if nsqd:
        options["nsq.nsqd.addresses"] = ",".join(nsqd)
    if not any(key.endswith(".addresses") for key in options):
        options["nsq.nsqd.addresses"] = DEFAULT_NSQD
    return options


def print_summary(summary: Summary, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(summary.as_json() + "\n")
        return
    sys.stdout.write(f"{summary}\n")
    for name, value in summary.details.items():
        sys.stdout.write(f"  {name}: {value:,}\n" if isinstance(value, int) else f"  {name}: {value}\n")


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


# --- Columns ----------------------------------------------------------------------------------------------------------

_HOUR_NS = 3_600_000_000_000


def hour_columns() -> tuple[Column, Column]:
    """The date and the hour a message was published, in UTC whatever zone the session has."""
    from pyspark.sql import functions as f

    hours = f.expr(f"timestamp_ns div {_HOUR_NS}")
    date = f.date_format(f.expr("date_from_unix_date(cast(timestamp_ns div 86400000000000 as int))"), "yyyy-MM-dd")
    return date.alias("date"), f.lpad(f.pmod(hours, f.lit(24)).cast("string"), 2, "0").alias("hour")


def decode_json(messages: DataFrame, schema: StructType | str | None) -> DataFrame:
    """The messages with `data`, what their JSON says, and `_undecoded`, the bytes that would not decode.

    A message is decoded whole or not at all: one value of another type than the schema's is enough for `_undecoded`.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructType

    if schema is None:
        return messages.withColumn("_undecoded", f.col("value"))
    fields = schema if isinstance(schema, StructType) else StructType.fromDDL(schema)
    corrupt = "_corrupt_record_"
    # With a column for corrupt records Spark notes every message that does not fit, and not only broken JSON.
    wanted = StructType(list(fields)).add(corrupt, StringType())
    text = f.col("value").cast("string")
    parsed = f.from_json(text, wanted, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": corrupt})
    named = messages.withColumn("_parsed", parsed)
    # A cast makes replacement characters out of bytes that are not UTF-8, and the JSON may still be well-formed.
    decoded = f.col("_parsed").isNotNull() & f.col(f"_parsed.{corrupt}").isNull() & f.expr("is_valid_utf8(value)")
    data = f.struct(*(f.col("_parsed").getField(name).alias(name) for name in fields.names))
    return named.withColumns({"data": f.when(decoded, data), "_undecoded": f.when(~decoded, f.col("value"))}).drop(
        "_parsed"
    )


def write_counted(rows: DataFrame, folder: Path, *partitions: str) -> int:
    """Write Parquet files to a new folder. How many rows the tasks that made them have seen."""
    from pyspark.sql import functions as f

    if type(rows).__module__.startswith("pyspark.sql.connect"):
        from pyspark.sql.connect.observation import Observation
    else:
        from pyspark.sql.observation import Observation
    counted = Observation()
    # Right before the write, in the same tasks: a task that is tried again counts once.
    observed = rows.observe(counted, f.count(f.lit(1)).alias("rows"))
    observed.write.partitionBy(*partitions).parquet(str(folder))
    return int(counted.get["rows"])


def infer_schema(messages: DataFrame) -> StructType | None:
    """What the JSON of these messages looks like; None if none of them is an object."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    text = messages.select(f.col("value").cast("string").alias("value")).limit(_INFERRED_FROM)
    found = messages.sparkSession.read.json(text).schema
    fields = [field for field in found if field.name != "_corrupt_record"]
    return StructType(fields) if fields else None
