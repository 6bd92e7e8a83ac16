"""What the pipelines share: where messages come from, and how a stream is followed to its end.

Every pipeline is a function that takes a SparkSession and a *source*, which is a function that gives a DataFrame with
the columns of `format("nsq")`. `Topics` makes such sources from topics of brokers. A pipeline's module adds to that
its arguments on the command line, and nothing here knows of any of them.

pyspark is imported inside functions, so that `flintmq pipeline --help` needs none.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import ConnectError, HttpError, PipelineError
from flintmq.options import parse_duration
from flintmq.spark.decoding import name_clashes
from flintmq.spark.pipelines import reports
from flintmq.spark.pipelines.given import check_network_only, network_options, sink_options, source_options
from flintmq.spark.pipelines.screen import Display, Screen, Silent, say, words_of_java
from flintmq.spark.pipelines.stopping import asked_to_stop, end_quietly, is_program
from flintmq.spark.registration import is_elsewhere, is_remote, shipping
from flintmq.spark.shipped.files import Place
from flintmq.spark.shipped.reasons import reason

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import DataType, StructField, StructType

    from flintmq.spark.shipped.options import SourceOptions

__all__ = [
    "Source",
    "Summary",
    "Topics",
    "asked_to_stop",
    "batch_reader",
    "broker_arguments",
    "check_hadoop",
    "check_network_only",
    "check_places",
    "check_topics",
    "check_whole",
    "duration",
    "explain",
    "hadoop_packages",
    "hadoop_settings",
    "hour_columns",
    "infer_schema",
    "interval",
    "is_remote",
    "known_topics",
    "moment",
    "nanoseconds",
    "need_topics",
    "network_options",
    "observation",
    "open_session",
    "options_of",
    "pair",
    "parallelism",
    "place_of",
    "print_summary",
    "register",
    "run_stream",
    "shipping",
    "sink_options",
    "source_arguments",
    "spark_arguments",
    "stream_arguments",
    "stream_reader",
    "table_arguments",
    "temporary",
    "topics_of",
]

#: Gives a DataFrame with the columns of `format("nsq")`.
Source = Callable[["SparkSession"], "DataFrame"]

# How often a query is asked how it stands.
_POLL_SECONDS = 0.5
# How often one that is to end is asked whether its batch is done: the less of the next one is done in vain.
_BATCH_POLL_SECONDS = 0.02
# A batch that is under way when we are told to stop gets this long to end. Nothing is lost if it does not.
_LAST_BATCH_SECONDS = 60.0
# One that is cut short gets this long to be told so.
_SHORT_SECONDS = 0.6
# A new Python gets ten seconds to call Spark back, and no setting changes that: a query that fails of it is started
# again, so often at most.
_NO_CALL_BACK = "failed to connect back"
_MOST_STARTS = 3
# A stream's batch is about so much at most, and a task of it so many messages, unless options say otherwise.
_BATCH_BYTES = "1g"
_TASK_MESSAGES = 250_000
_LIMITS = {"maxmessagespertrigger", "maxoffsetspertrigger", "maxbytespertrigger"}
_CUTS = {"minpartitions", "maxrecordsperpartition"}
# A Connect server does not say how many tasks it runs at once.
_CONNECT_TASKS = 8
# So many messages say what their JSON looks like.
_INFERRED_FROM = 10_000


# --- Where messages come from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topics:
    """Topics of brokers, as a source. `options` are those of `format("nsq")`, as docs/spark.md lists them."""

    names: Sequence[str]
    options: Mapping[str, str] = field(default_factory=dict)

    def stream(self, spark: SparkSession) -> DataFrame:
        """The messages as they come. A long backlog is cut into batches, and a batch into tasks, by its size."""
        known = {key.lower() for key in self.options}
        more = {"maxRecordsPerPartition": str(_TASK_MESSAGES)} if known.isdisjoint(_CUTS) else {}
        if known.isdisjoint(_LIMITS):
            more["maxBytesPerTrigger"] = _BATCH_BYTES
        return self._load(spark, spark.readStream, more)

    def batch(self, spark: SparkSession, **more: str) -> DataFrame:
        """The messages that are in the log now, read by as many tasks as run at once."""
        if {key.lower() for key in (*self.options, *more)}.isdisjoint(_CUTS):
            more["minPartitions"] = str(parallelism(spark))
        return self._load(spark, spark.read, more)

    def _load(self, spark: SparkSession, reader: Any, more: Mapping[str, str]) -> DataFrame:
        register(spark)
        return reader.format("nsq").options(**self.all_options, **more).load()

    @property
    def all_options(self) -> dict[str, str]:
        """The options, and the names as one of them."""
        return {**({"subscribe": ",".join(self.names)} if self.names else {}), **self.options}


def check_whole(source: Source | Mapping[str, str], what: str, *more: str) -> None:
    """PipelineError if options of a source leave something out that a pipeline needs: bodies, or parts of the log.

    `what` says what would be wrong, and `more` are options that leave out too much beside `columns`.
    """
    for key in source if isinstance(source, Mapping) else options_of(source):
        if key.lower() in ("columns", *more):
            raise PipelineError(f"the option {key} leaves out what {what}: take it away")


def options_of(source: Source) -> dict[str, str]:
    """The options of a source that `Topics` has made, the topics among them; of any other nothing is known."""
    topics = getattr(source, "__self__", None)
    return topics.all_options if isinstance(topics, Topics) else {}


def temporary(source: Source) -> Source:
    """The source for a query whose checkpoint is deleted at its end: brokers keep no files for it afterwards."""
    topics = getattr(source, "__self__", None)
    if not isinstance(topics, Topics):
        return source
    return replace(topics, options={**topics.options, "temporaryReader": "true"}).stream


def source_arguments(parser: argparse.ArgumentParser, *, nargs: str = "+", flag: bool = False) -> None:
    """Which topics, of which brokers."""
    group = parser.add_argument_group("the source")
    parser.set_defaults(topics_by="--topic" if flag else "TOPIC")
    if flag:
        group.add_argument(
            "--topic", dest="topics", metavar="TOPIC", action="append", default=[], help="may be repeated"
        )
    else:
        group.add_argument(
            "topics", metavar="TOPIC", nargs=nargs, help="topics; a pattern with --option subscribePattern=…"
        )
    _broker_arguments(group, reads=True)
    group.add_argument(
        "--channel", metavar="NAME", help="consume this channel of brokers without a log (NSQ's own nsqd)"
    )
    group.add_argument(
        "--from",
        dest="start",
        metavar="WHERE",
        help="start of a first run: earliest (default), latest, a time (2026-11-16T00:00:00Z), offsets in JSON",
    )


def need_topics(arguments: argparse.Namespace) -> None:
    if not arguments.topics and "subscribePattern" not in source_options(arguments):
        raise PipelineError("say which topics, or a pattern: --option subscribePattern=REGEX")


def broker_arguments(parser: argparse.ArgumentParser, *, reads: bool = False) -> None:
    """Which brokers; with `reads`, any option of the source may be given."""
    _broker_arguments(parser.add_argument_group("the brokers"), reads=reads)


def _broker_arguments(group: argparse._ArgumentGroup, *, reads: bool) -> None:
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
        help=f"{'option of the source' if reads else 'option nsq.… or fetch.…'}, see docs/spark.md; may be repeated",
    )


def topics_of(arguments: argparse.Namespace) -> Topics:
    """The source that a command line asks for."""
    return Topics(arguments.topics, source_options(arguments))


def check_topics(arguments: argparse.Namespace, *, batch: bool) -> int:
    """Say which topics of a command line no broker knows: a stream without --once reads them when they appear.

    Return the exit status of a run that does the rest. PipelineError if no broker answers, if no topic is known and
    none can still appear, or if a batch, which reads all or nothing, lacks one. Nothing is said where some brokers do
    not answer, or where only a Connect server reaches them: the query itself will.
    """
    from flintmq.spark.session import check_pyspark
    from flintmq.spark.shipped.options import read_source_options

    # Before anybody is asked: without it nothing can be done.
    check_pyspark()
    wanted = topics_of(arguments)
    if arguments.remote:
        return 0
    options = read_source_options(wanted.all_options, streaming=not batch)
    if batch and options.channel:
        raise PipelineError("a channel is consumed by streams alone, and here logs are read: leave out --channel")
    if options.pattern:
        return 0
    if batch and options.mode == "spool":
        return 0  # it reads files and asks nobody
    known, asked = _survey(options)
    if not asked:
        return 0
    missing = [topic for topic in wanted.names if topic not in known]
    if not missing:
        return 0
    text = f"no broker knows the topic {', '.join(missing)}; asked were {', '.join(asked)}"
    if not batch and not arguments.once:
        say(f"{text}. It is read when it appears")
        return 0
    if batch or len(missing) == len(wanted.names):
        raise PipelineError(text)
    say(text)
    return 1


def known_topics(arguments: argparse.Namespace) -> list[str]:
    """The topics of brokers that fit a command line, as far as all brokers say now."""
    from flintmq.spark.session import check_pyspark
    from flintmq.spark.shipped.options import read_source_options

    check_pyspark()
    options = read_source_options(topics_of(arguments).all_options, streaming=True)
    return [] if arguments.remote else sorted(filter(options.wants, _survey(options)[0]))


def _survey(options: SourceOptions) -> tuple[set[str], list[str]]:
    """Return the topics of all brokers, and who was asked; nobody, where some do not answer.

    PipelineError if none does.
    """
    from flintmq.spark.shipped.net import Cluster

    cluster = Cluster(options.network)
    try:
        found = cluster.survey()
        if not found.brokers and found.failures:
            raise PipelineError("; ".join(found.failures))
        known = {topic for broker in found.brokers for topic in cluster.topics(broker)}
        if found.failures:
            return set(), []
        return known, sorted(broker.tcp or broker.http for broker in found.brokers)
    except (ConnectError, HttpError):
        return set(), []
    finally:
        cluster.close()


def check_places(arguments: argparse.Namespace, *names: str) -> None:
    """PipelineError if this process may not write to a place that an argument names.

    It is called before Spark starts. Behind Spark Connect all files are the server's, and nothing is known of them.
    """
    for name in names:
        given = getattr(arguments, name)
        if not given or arguments.remote:
            continue
        place = place_of(arguments, given)
        if why := place.refusal(writes=True):
            raise PipelineError(f"cannot write to {place}: {why}; choose another with --{name.replace('_', '-')}")
        place.check_credentials()


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
    group.add_argument(
        "--packages",
        action="store_true",
        help="download Hadoop's jars for checkpoints and plain Parquet on s3a:// or abfss://; announces the size",
    )
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def table_arguments(parser: argparse.ArgumentParser, *, format: str = "--format") -> None:
    """Which table, beside where it is."""
    group = parser.add_argument_group("the table")
    group.add_argument(
        format, dest="format", choices=("delta", "iceberg", "parquet"), help="default: the existing format, else delta"
    )
    group.add_argument(
        "--storage-option",
        metavar="KEY=VALUE",
        type=pair,
        action="append",
        default=[],
        help="option of the store, as deltalake names it, such as AWS_ENDPOINT_URL=…; may be repeated",
    )
    group.add_argument("--catalog", metavar="NAME", help="Iceberg catalog in pyiceberg's configuration")
    group.add_argument(
        "--catalog-option",
        metavar="KEY=VALUE",
        type=pair,
        action="append",
        default=[],
        help="option of Iceberg's catalog, as pyiceberg names it; may be repeated",
    )
    group.add_argument(
        "--table", metavar="NAMESPACE.NAME", help="name in Iceberg's catalog (default flintmq.<last part>)"
    )


def place_of(arguments: argparse.Namespace, where: str) -> Place:
    """A place that a command line names, with the options of its store."""
    return Place.of(where, dict(arguments.storage_option))


def stream_arguments(parser: argparse.ArgumentParser) -> None:
    """How a stream runs."""
    group = parser.add_argument_group("the stream")
    group.add_argument(
        "--checkpoint", metavar="URI", help="where Spark records its progress; a run continues from there"
    )
    group.add_argument("--once", action="store_true", help="end when all present messages are processed")
    group.add_argument(
        "--every",
        metavar="DURATION",
        type=duration,
        default=10.0,
        help="time between batches, such as 1m (default 10s)",
    )
    group.add_argument(
        "--metrics-address", metavar="HOST:PORT", help="serve the query's numbers there at /metrics, for Prometheus"
    )
    group.add_argument("--no-report", action="store_true", help="do not report the query to the brokers, for nsqadmin")


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


def interval(seconds: float) -> str:
    """A duration as Spark reads it: it takes no exponents, and a text of a float may have one."""
    return f"{round(seconds * 1e6)} microseconds"


def moment(text: str) -> datetime.datetime:
    """A time of a command line; in UTC where it says no zone."""
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 2026-11-16T08:00:00Z") from exc
    return when if when.tzinfo else when.replace(tzinfo=datetime.UTC)


def nanoseconds(when: datetime.datetime) -> int:
    """A time in ns since 1970."""
    return (when - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1) * 1000


def open_session(arguments: argparse.Namespace, app: str) -> SparkSession:
    """The session that a command line asks for; says on standard error that it starts."""
    from pyspark.logger import PySparkLogger

    from flintmq.spark.session import session

    conf = dict(arguments.conf)
    for key, argument in (("spark.master", "--master"), ("spark.remote", "--remote")):
        if key in conf:
            raise PipelineError(f"--conf {key}: give {argument} {conf[key]} instead")
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        # They write each error of a query to standard error, with traceback and all; it is told in a sentence.
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    conf = hadoop_settings(dict(getattr(arguments, "storage_option", []))) | conf
    if arguments.packages:
        packages, excluded, size = hadoop_packages()
        say(f"Hadoop's jars are taken from Maven where they are not there yet: about {size} MB")
        for key, names in (("spark.jars.packages", packages), ("spark.jars.excludes", excluded)):
            conf[key] = ",".join([*names, *filter(None, [conf.get(key)])])
    end_quietly()
    with Screen() as screen, words_of_java():
        spark = session(app, master=arguments.master, remote=arguments.remote, report=screen.report, **conf)
    end_quietly()  # Spark has put a handler of its own there
    if where := getattr(arguments, "metrics_address", None):
        say(f"metrics are at http://{reports.serve(spark, where)}/metrics")
    if not getattr(arguments, "no_report", True) and not is_remote(spark):
        # Behind Spark Connect the brokers are those of the server's network.
        topic = getattr(arguments, "to_topic", None)
        reports.begin(spark, network_options(arguments), [topic] if topic else [])
    return spark


#: Hadoop's file systems of stores, which pyspark does not bring along.
_HADOOP = {
    "s3": "org.apache.hadoop.fs.s3a.S3AFileSystem",
    "abfss": "org.apache.hadoop.fs.azurebfs.SecureAzureBlobFileSystem",
    "gs": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
}
_AWS_SDK = "2.35.4"


def hadoop_packages() -> tuple[list[str], list[str], int]:
    """The Maven coordinates of Hadoop's S3 and Azure for the Hadoop of this pyspark, what to leave out, and MB."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    found = [re.fullmatch(r"hadoop-client-api-(.+)\.jar", path.name) for path in jars.glob("hadoop-client-api-*.jar")]
    version = next((match[1] for match in found if match), None)
    if version is None:
        raise PipelineError("--packages: this pyspark has no Hadoop, so that its version is not known")
    # Amazon's SDK comes in one jar of 690 MB; the parts that S3A calls are a thirtieth of it.
    parts = ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")
    packages = [f"org.apache.hadoop:hadoop-aws:{version}", f"org.apache.hadoop:hadoop-azure:{version}"]
    packages += [f"software.amazon.awssdk:{part}:{_AWS_SDK}" for part in parts]
    return packages, ["software.amazon.awssdk:bundle"], _PACKAGES_MB


#: As downloaded for Hadoop 3.5.0.
_PACKAGES_MB = 24


def hadoop_settings(options: Mapping[str, str]) -> dict[str, str]:
    """What Hadoop's S3 must be told where a store's options are given and are not of the environment."""
    known = {key.lower().removeprefix("aws_"): value for key, value in options.items()}
    settings = {}
    for ours, names in {
        "access.key": ("access_key_id",),
        "secret.key": ("secret_access_key",),
        "session.token": ("session_token", "token"),
        "endpoint": ("endpoint_url", "endpoint"),
        "endpoint.region": ("region", "default_region"),
    }.items():
        if value := next((known[name] for name in names if name in known), None):
            settings[f"spark.hadoop.fs.s3a.{ours}"] = value
    if "spark.hadoop.fs.s3a.endpoint" in settings:
        settings["spark.hadoop.fs.s3a.path.style.access"] = "true"
    return settings


def check_hadoop(spark: SparkSession, place: Place) -> None:
    """PipelineError, with what to do, if Spark itself is to use a place and has no jars for it."""
    if place.scheme == "az":
        raise PipelineError(
            f"{place}: Spark has no az:// for checkpoints and plain Parquet: name it abfss://CONTAINER@ACCOUNT.dfs.core."
            "windows.net/…, with --packages, or keep the checkpoint on a disk, by --checkpoint DIR"
        )
    wanted = _HADOOP.get(place.scheme)
    if wanted is None or is_remote(spark):
        return
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        spark._jvm.java.lang.Class.forName(wanted, False, loader)
    except Exception as exc:
        raise PipelineError(
            f"{place.for_spark}: Spark keeps checkpoints and plain Parquet there with Hadoop's jars, which are not "
            "here: add --packages, or keep the checkpoint on a disk, by --checkpoint DIR"
        ) from exc


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


def run_stream(writer: DataStreamWriter, pipeline: str, *, once: bool, every: float, quiet: bool = True) -> Summary:
    """Run a stream, a batch every so many seconds or all there is once, and show how it goes.

    SIGTERM ends it after its batch. So does ctrl-C; pressed again, and on a command line soon after, it raises
    KeyboardInterrupt, as it does where `once` is not done.

    PipelineError says why it failed.
    """
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=interval(every))
    starts = 1
    while True:
        try:
            return _follow(_start(writer), pipeline, once, quiet)
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


def _follow(query: StreamingQuery, pipeline: str, once: bool, quiet: bool) -> Summary:
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
                    if once:
                        asked.check()
                        raise PipelineError("a signal ended it before all messages were read: the next run continues")
                    break
            look()
        except KeyboardInterrupt:
            _cut_short(query)
            raise
        except PipelineError:
            raise
        except Exception as exc:
            _stop_quietly(query)
            if asked.is_set():
                # Java has heard the signal, too, as where a service manager sends it to all processes of a service.
                asked.check()
                raise PipelineError("a signal ended Spark within a batch: the next run repeats it") from exc
            raise PipelineError(explain(exc)) from exc
    summary.seconds = time.monotonic() - started
    return summary


def _stop(query: StreamingQuery) -> None:
    """Stop a query after the batch that is under way.

    The batches of a backlog follow each other at once, so that hardly ever none is seen to be under way: the next one,
    which has just begun, is given up. The next run repeats it.
    """
    give_up = time.monotonic() + _LAST_BATCH_SECONDS
    under_way = _finished(query)
    while query.status["isTriggerActive"] and _finished(query) == under_way and time.monotonic() < give_up:
        time.sleep(_BATCH_POLL_SECONDS)
    query.stop()


def _finished(query: StreamingQuery) -> tuple[int, str] | None:
    """Return the number and the begin of the last batch that is done."""
    progress = query.lastProgress
    return None if progress is None else (progress.batchId, progress.timestamp)


def _cut_short(query: StreamingQuery) -> None:
    """Stop a query at once. Its batch is not done, and the next run repeats it."""
    if not is_program():
        _stop_quietly(query)
    elif type(query).__module__.startswith("pyspark.sql.connect"):
        # Java would end with the command line, and this server goes on.
        ending = threading.Thread(target=_stop_quietly, args=(query,), daemon=True)
        ending.start()
        ending.join(_SHORT_SECONDS)


def _stop_quietly(query: StreamingQuery) -> None:
    with contextlib.suppress(Exception):
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


def explain(exc: BaseException) -> str:
    """What went wrong, in one line: our own error inside of Spark's many, else the first line and a store's reason."""
    text = str(exc)
    if ours := re.findall(r"flintmq\.errors\.\w+: (.+)", text):
        return str(ours[-1]).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Spark puts the class of error in front, and the last line of a Python traceback says most.
    if raised := list(re.finditer(r"^(?:: )?(?:\w+\.)*(\w*(?:Error|Exception): .+)$", text, re.MULTILINE)):
        return reason(text[raised[-1].start(1) :]).removeprefix("Exception: ")
    # [STREAM_FAILED] Query [id = …] terminated with exception: [REASON] why. SQLSTATE: 12345
    first = re.sub(r"^.*? terminated with exception: ", "", lines[0]) if lines else type(exc).__name__
    return re.sub(r"^\[[A-Z_.]+\] |\s*SQLSTATE: \w+.*$", "", first)


def register(spark: SparkSession) -> None:
    """Make `format("nsq")` known; with its code where executors or the server may not have it."""
    from flintmq.spark.registration import register as make_known

    make_known(spark, ship=is_elsewhere(spark))


def parallelism(spark: SparkSession) -> int:
    """How many tasks run at once, as far as that is known."""
    return _CONNECT_TASKS if is_remote(spark) else int(spark.sparkContext.defaultParallelism)


def print_summary(summary: Summary, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(summary.as_json() + "\n")
        return
    sys.stdout.write(f"{summary}\n")
    for name, value in summary.details.items():
        sys.stdout.write(f"  {name}: {value:,}\n" if isinstance(value, int) else f"  {name}: {value}\n")


# --- Columns ----------------------------------------------------------------------------------------------------------

_HOUR_NS = 3_600_000_000_000


def hour_columns() -> tuple[Column, Column]:
    """The date and the hour a message was published, in UTC whatever zone the session has."""
    from pyspark.sql import functions as f

    # Rounded down: `div` rounds times before 1970 up.
    hours = f.expr(f"(timestamp_ns - pmod(timestamp_ns, {_HOUR_NS})) div {_HOUR_NS}")
    days = (hours - f.pmod(hours, f.lit(24))) / 24
    date = f.date_format(f.date_from_unix_date(days.cast("int")), "yyyy-MM-dd")
    return date.alias("date"), f.lpad(f.pmod(hours, f.lit(24)).cast("string"), 2, "0").alias("hour")


def observation(rows: DataFrame) -> Any:
    """What counts rows as they pass, of the kind that fits a DataFrame."""
    if type(rows).__module__.startswith("pyspark.sql.connect"):
        from pyspark.sql.connect.observation import Observation
    else:
        from pyspark.sql.observation import Observation
    return Observation()


def infer_schema(messages: DataFrame) -> StructType | None:
    """What the JSON of these messages looks like; None if none of them is an object."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    # No message has a key of this name.
    corrupt = f"_corrupt_{uuid.uuid4().hex}"
    text = messages.select(f.col("value").cast("string").alias("value")).limit(_INFERRED_FROM)
    found = messages.sparkSession.read.option("columnNameOfCorruptRecord", corrupt).json(text).schema
    fields = StructType([field for field in found if field.name != corrupt])
    if name_clashes(fields):
        # Of two keys that differ by case alone, the one that more messages have.
        keys = text.select(f.explode(f.expr("json_object_keys(value)")).alias("key")).groupBy("key").count()
        counts = {row["key"]: row["count"] for row in keys.collect()}
        often = sorted(fields, key=lambda field: -counts.get(field.name, 0))
        kept = {field.name.lower(): field for field in reversed(often)}
        fields = StructType([_unambiguous(field) for field in fields if kept[field.name.lower()] is field])
    return fields if fields.names else None


def _unambiguous(field: StructField) -> StructField:
    """The field, without those inside of it whose name another one has, whatever its case."""
    from pyspark.sql.types import ArrayType, StructField, StructType

    def of(kind: DataType) -> DataType:
        if isinstance(kind, ArrayType):
            return ArrayType(of(kind.elementType), kind.containsNull)
        if isinstance(kind, StructType):
            first = {inner.name.lower(): inner for inner in reversed(kind.fields)}
            return StructType([_unambiguous(inner) for inner in kind if first[inner.name.lower()] is inner])
        return kind

    return StructField(field.name, of(field.dataType), field.nullable)
