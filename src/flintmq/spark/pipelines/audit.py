"""`flintmq pipeline audit`: what was published against what was archived, message by message.

Both sides are joined by topic, node and offset, and each message gets one verdict. The archive's list of files is read
before the log, so that what is published meanwhile is waiting and not missing.

 lost         in the log, and the archive has older and newer ones of its node but not this one
 duplicated   more than once in the archive (counted: all but the first)
 changed      another body than in the log
 late         in the folder of another hour than it was published in
 unexpected   in the archive, and the log, which reaches back that far, has no such message
 gone         in the archive, and no longer in the log, or before the part of it that is read: nothing can be said
 waiting      in the log, newer than anything archived of its node
 before       in the log, older than anything archived of its node: the archive began later

The first five are errors. `complete` says that the archive must have everything: then what is waiting or
before is lost.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import common
from flintmq.spark.pipelines.archive import read, target_of
from flintmq.spark.pipelines.given import DEFAULT_START
from flintmq.spark.pipelines.screen import working
from flintmq.spark.shipped.options import read_source_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Report", "Verdict", "add_arguments", "audit", "run"]

ERRORS = ("lost", "duplicated", "changed", "late", "unexpected")
#: What of an archive is compared.
COLUMNS = ("value", "topic", "node", "offset", "timestamp_ns", "date", "hour")
#: So many offsets of each error are told.
_EXAMPLES = 5


@dataclass(frozen=True)
class Verdict:
    """What is said of one topic on one node."""

    topic: str
    node: str
    published: int
    archived: int
    lost: int
    duplicated: int
    changed: int
    late: int
    unexpected: int
    gone: int
    waiting: int
    before: int


@dataclass
class Report:
    verdicts: list[Verdict]
    #: Some offsets of each kind of error: (topic, node, offset).
    examples: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)

    def total(self, kind: str) -> int:
        return sum(getattr(verdict, kind) for verdict in self.verdicts)

    @property
    def passed(self) -> bool:
        return not any(self.total(kind) for kind in ERRORS)

    def as_json(self) -> str:
        nodes = [asdict(verdict) for verdict in self.verdicts]
        return json.dumps({"pipeline": "audit", "passed": self.passed, "nodes": nodes, "examples": self.examples})


def audit(spark: SparkSession, published: common.Source, archived: common.Source, *, complete: bool = False) -> Report:
    """Compare the messages of a log with those of an archive, as `archive.read` gives them."""
    from pyspark.sql import functions as f

    _check(published)
    key = ["topic", "node", "offset"]
    date, hour = common.hour_columns()
    misplaced = (f.date_format("date", "yyyy-MM-dd") != date) | (f.col("hour") != hour.cast("int"))
    body = f.xxhash64("value")
    in_archive = (
        archived(spark)
        .select(*key, body.alias("body"), misplaced.cast("int").alias("misplaced"))
        .groupBy(*key)
        .agg(
            f.count("*").alias("copies"),
            f.min("body").alias("least"),
            f.max("body").alias("most"),
            f.sum("misplaced").alias("misplaced"),
        )
        .withColumn("is_archived", f.lit(True))
    )
    in_log = published(spark).select(*key, body.alias("body")).withColumn("is_published", f.lit(True))

    both = in_log.join(in_archive, key, "full").fillna(False, ["is_published", "is_archived"])
    of_node = both.groupBy("topic", "node").agg(
        f.min(f.when(f.col("is_published"), f.col("offset"))).alias("log_first"),
        f.min(f.when(f.col("is_archived"), f.col("offset"))).alias("archive_first"),
        f.max(f.when(f.col("is_archived"), f.col("offset"))).alias("archive_last"),
    )
    # Nodes are few: their limits go to every task.
    rows = both.join(f.broadcast(of_node), ["topic", "node"])
    missing = f.col("is_published") & ~f.col("is_archived")
    before = missing & (f.col("offset") < f.col("archive_first"))
    waiting = missing & (f.col("archive_last").isNull() | (f.col("offset") > f.col("archive_last")))
    alone = f.col("is_archived") & ~f.col("is_published")
    gone = alone & (f.col("log_first").isNull() | (f.col("offset") < f.col("log_first")))
    counts: dict[str, Any] = {
        "published": f.col("is_published").cast("int"),
        "archived": f.coalesce("copies", f.lit(0)),
        "lost": (missing if complete else missing & ~_true(before) & ~_true(waiting)).cast("int"),
        "duplicated": f.coalesce(f.col("copies") - 1, f.lit(0)),
        "changed": (
            f.col("is_published")
            & f.col("is_archived")
            & ((f.col("least") != f.col("body")) | (f.col("most") != f.col("body")))
        ).cast("int"),
        "late": f.coalesce("misplaced", f.lit(0)),
        "unexpected": (alone & ~_true(gone)).cast("int"),
        "gone": _true(gone).cast("int"),
        "waiting": (f.lit(False) if complete else _true(waiting)).cast("int"),
        "before": (f.lit(False) if complete else _true(before)).cast("int"),
    }
    judged = rows.select(*key, *(count.alias(name) for name, count in counts.items()))
    sums = [f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in counts]
    totals = judged.groupBy("topic", "node").agg(*sums).orderBy("topic", "node").collect()
    report = Report([Verdict(**{name: row[name] for name in row.__fields__}) for row in totals])
    if not report.passed:
        any_error = reduce(lambda one, other: one | other, (f.col(name) > 0 for name in ERRORS))
        for row in judged.filter(any_error).orderBy(*key).limit(_EXAMPLES * len(ERRORS)).collect():
            for name in ERRORS:
                found = report.examples.setdefault(name, []) if row[name] else []
                if row[name] and len(found) < _EXAMPLES:
                    found.append((row["topic"], row["node"], row["offset"]))
    return report


def _check(published: common.Source) -> None:
    """PipelineError if not all of the log is compared: what is left out would seem to be changed, or unexpected."""
    common.check_whole(published, "is compared with the archive", "where", "endingoffsets", "endingtimestamp")


def _true(condition: Any) -> Any:
    """Null is no."""
    from pyspark.sql import functions as f

    return f.coalesce(condition, f.lit(False))


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compare an archive with the logs of its topics. Exit status 1: they differ."
    parser.add_argument("--archive", metavar="URI", required=True, help="the table: a path or a URI")
    common.table_arguments(parser)
    parser.add_argument(
        "--complete",
        action="store_true",
        help="all messages in the log must be archived, including the oldest and the newest",
    )
    common.source_arguments(parser, nargs="*")
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    common.need_topics(arguments)
    _check(common.batch_reader(arguments))
    target = target_of(arguments, arguments.archive)
    # What is wrong with it is said before Spark starts.
    table = None if arguments.remote else target.open()
    status = common.check_topics(arguments, batch=True)
    if table is not None and not table.exists:
        raise PipelineError(f"there is no archive at {target.place}: flintmq pipeline archive makes one, by --to")
    spark = common.open_session(arguments, "flintmq audit")
    from pyspark.sql import functions as f

    given = common.topics_of(arguments)
    try:
        tracker = None if common.is_remote(spark) else spark.sparkContext.statusTracker()
        with working("audit", "comparing archive and log", tracker):
            archived = read(spark, target, columns=COLUMNS)
            topics = given.names
            if not topics:
                # Of other topics the log was not read.
                wants = read_source_options(given.all_options, streaming=False).wants
                there = [row["topic"] for row in archived.select("topic").distinct().collect()]
                topics = list(filter(wants, there))
            report = audit(
                spark,
                common.batch_reader(arguments),
                lambda spark: archived.filter(f.col("topic").isin(list(topics))),
                complete=arguments.complete,
            )
    except PipelineError:
        raise
    except Exception as exc:
        raise PipelineError(common.explain(exc)) from exc
    if arguments.json:
        sys.stdout.write(report.as_json() + "\n")
    else:
        print_report(report, is_part=given.all_options.get("startingOffsets") != DEFAULT_START)
    return status if report.passed else 1


def print_report(report: Report, *, is_part: bool = False) -> None:
    """Print a report. `is_part`: the log was not read from its begin."""
    from rich.console import Console
    from rich.table import Table

    table = Table("topic", "node", title="audit")
    # Only what there is: a table of zeros would not fit on a screen, and hide the rest.
    names = [name for name in Verdict.__dataclass_fields__ if name not in ("topic", "node")]
    kinds = [name for name in names if name in ("published", "archived") or report.total(name)]
    for kind in kinds:
        table.add_column(kind, justify="right")
    for verdict in report.verdicts:
        values = [getattr(verdict, kind) for kind in kinds]
        cells = [
            f"[red]{value:,}[/red]" if value and kind in ERRORS else f"{value:,}"
            for kind, value in zip(kinds, values, strict=True)
        ]
        table.add_row(verdict.topic, verdict.node[:8], *cells)
    console = Console()
    console.print(table)
    for kind, places in report.examples.items():
        for topic, node, offset in places:
            console.print(f"{kind}: {topic}, node {node}, offset {offset}", highlight=False)
    if report.passed:
        gone = report.total("gone")
        where = "were published before the part of the log that was read" if is_part else "are no longer in the log"
        unknown = f"; {gone:,} {where}, so that nothing can be said of them" if gone else ""
        console.print(f"every message that must be archived is, once{unknown}", highlight=False)
    else:
        console.print("the archive and the log do not agree", style="bold red", highlight=False)
