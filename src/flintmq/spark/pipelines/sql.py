"""`flintmq pipeline sql`: a query over topics, its result to a topic, a table or the screen.

Each topic is a table (a view of the session) with the columns of `format("nsq")`, `text` (the value as text) and, where
JSON is decoded, `data`. As a stream the query runs on and on, with the rules that Spark has for streams; as a batch it
runs once over what the logs hold now.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import common
from flintmq.spark.pipelines.archive import BatchWriter, check_schema, open_archive, query_id
from flintmq.spark.pipelines.store import local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = ["add_arguments", "batch", "run", "stream", "table_name", "tables"]

MODES = ("append", "update", "complete")


def table_name(topic: str) -> str:
    """What a topic is called in a query: letters, digits and underscores, for names with dots would need quoting."""
    return re.sub(r"\W", "_", topic)


def tables(
    spark: SparkSession,
    sources: Mapping[str, common.Source],
    schemas: Mapping[str, StructType | str | None] | None = None,
) -> None:
    """Make a table of each source. Those in `schemas` have their JSON decoded."""
    from pyspark.sql import functions as f

    for topic, source in sources.items():
        messages = source(spark).withColumn("text", f.col("value").cast("string"))
        if schemas is not None and topic in schemas:
            messages = common.decode_json(messages, schemas[topic])
        messages.createOrReplaceTempView(table_name(topic))


def stream(
    spark: SparkSession,
    query: str,
    *,
    topic: str | None = None,
    table: str | Path | None = None,
    network: Mapping[str, str] | None = None,
    checkpoint: str | Path | None = None,
    new_query: bool = False,
    mode: str = "append",
    once: bool = False,
    every: float = 10.0,
    quiet: bool = True,
) -> common.Summary:
    """Run a query over streams: to a topic, to a table (a folder of Parquet files), or to the screen."""
    rows = _query(spark, query)
    if not rows.isStreaming:
        raise PipelineError("the query reads no topic as a stream; to run it once, say --batch")
    if table is not None and mode != "append":
        raise PipelineError(f"a table only grows: output mode {mode} is for topics and the screen")
    with tempfile.TemporaryDirectory(prefix="flintmq-sql-") as scratch, contextlib.ExitStack() as stack:
        place = str(checkpoint) if checkpoint else f"{table}/_checkpoint" if table is not None else scratch
        if topic is not None and checkpoint is None:
            raise PipelineError(
                "say where the query notes how far it is, by --checkpoint: without it, it would begin anew"
            )
        if topic is not None and mode == "append":
            writer = as_messages(rows, topic).writeStream.format("nsq").options(**(network or {}))
        elif topic is not None:
            # A stream's sink in Python is not told which rows are new, and Spark has it overwrite or refuses it.
            local_path(place)
            common.register(spark)
            with common.shipping(spark):
                writer = rows.writeStream.foreachBatch(Publisher(topic, dict(network or {}), place))
        elif table is not None:
            bring_in = stack.enter_context(BatchWriter(str(local_path(table)), place, new_query=new_query))
            with common.shipping(spark):
                writer = rows.writeStream.foreachBatch(bring_in)
        else:
            writer = rows.writeStream.format("console").option("truncate", "false")
        writer = writer.outputMode(mode).option("checkpointLocation", place)
        return common.run_stream(writer, "sql", once=once, every=every, quiet=quiet)


@dataclass
class Publisher:
    """Publishes the rows of each batch, under a key of query and batch, so that a batch that is run again is known.

    For output modes whose batches are no mere additions: what has changed, or all there is.
    """

    topic: str
    network: dict[str, str]
    checkpoint: str

    def __call__(self, rows: DataFrame, batch: int) -> None:
        writer = as_messages(rows, self.topic).write.format("nsq").mode("append").options(**self.network)
        # One broker keeps the decisions of all batches, and the checkpoint names it.
        writer = writer.option("checkpointLocation", str(local_path(self.checkpoint)))
        writer.option("writeId", f"{query_id(self.checkpoint)}-{batch}").save()


def batch(
    spark: SparkSession,
    query: str,
    *,
    topic: str | None = None,
    table: str | Path | None = None,
    network: Mapping[str, str] | None = None,
) -> DataFrame:
    """Run a query once over what there is. The result, after it was published or written where that is wanted."""
    rows = _query(spark, query)
    try:
        if topic is not None:
            as_messages(rows, topic).write.format("nsq").mode("append").options(**(network or {})).save()
        elif table is not None:
            folder = open_archive(table)
            folder.prepare()
            name = uuid.uuid4().hex
            with contextlib.closing(folder):
                staged = folder.begin(name, 0)
                assert staged is not None  # nobody else has this name
                folder.commit(name, 0, staged, rows=common.write_counted(rows, staged))
    except PipelineError:
        raise
    except Exception as exc:
        raise PipelineError(common.explain(exc)) from exc
    return rows


def as_messages(rows: DataFrame, topic: str) -> DataFrame:
    """What is published: the column `value` if there is one, else each row as JSON."""
    from pyspark.sql import functions as f

    if "value" in rows.columns:
        wanted = [name for name in ("value", "topic", "defer_ms") if name in rows.columns]
        return rows.select(*wanted) if "topic" in wanted else rows.select(*wanted, f.lit(topic).alias("topic"))
    return rows.select(f.to_json(f.struct("*")).alias("value"), f.lit(topic).alias("topic"))


def _query(spark: SparkSession, query: str) -> DataFrame:
    try:
        return spark.sql(query.strip().rstrip(";"))
    except Exception as exc:
        raise PipelineError(f"the query is refused: {common.explain(exc)}") from exc


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a query over topics: each is a table of its name, with _ for anything but letters and digits. "
        "Columns: value, text, topic, node, offset, id, timestamp, timestamp_ns, and data where JSON is decoded."
    )
    parser.add_argument("query", metavar="FILE", help="a file with the query; - is standard input")
    parser.add_argument(
        "--to-topic", metavar="TOPIC", help="publish the rows: their column value, or all of it as JSON"
    )
    parser.add_argument("--to-table", metavar="DIR", help="write the rows to Parquet files, each exactly once")
    parser.add_argument("--new-query", action="store_true", help="add to a table that has rows of other queries")
    parser.add_argument("--mode", choices=MODES, default="append", help="what of a result is put out (default append)")
    parser.add_argument("--batch", action="store_true", help="run it once, over what the logs hold now")
    parser.add_argument("--decode", action="store_true", help="decode JSON, as the messages in the log look")
    parser.add_argument(
        "--schema",
        metavar="TOPIC=DDL",
        type=common.pair,
        action="append",
        default=[],
        help="decode JSON by this schema",
    )
    common.source_arguments(parser, flag=True)
    common.stream_arguments(parser)
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.topics:
        raise PipelineError("say which topics the query reads, by --topic")
    if arguments.to_topic and arguments.to_table:
        raise PipelineError("give --to-topic or --to-table, not both")
    query = _read(arguments.query)
    status = common.check_topics(arguments)
    spark = common.open_session(arguments, "flintmq sql")
    schemas: dict[str, StructType | str | None] = dict(arguments.schema)
    for ddl in schemas.values():
        check_schema(str(ddl))
    sources: dict[str, common.Source] = {}
    for topic in arguments.topics:
        one = common.topics_of(argparse.Namespace(**{**vars(arguments), "topics": [topic]}))
        sources[topic] = one.batch if arguments.batch else one.stream
        if not arguments.batch and not arguments.checkpoint and not arguments.to_table:
            # Its checkpoint goes with it.
            sources[topic] = common.temporary(one.stream)
        if arguments.decode and topic not in schemas:
            try:
                schemas[topic] = common.infer_schema(
                    common.Topics([topic], common.network_options(arguments)).batch(spark)
                )
            except Exception as exc:
                raise PipelineError(common.explain(exc)) from exc
    tables(spark, sources, schemas)
    network = common.network_options(arguments)
    if arguments.batch:
        rows = batch(spark, query, topic=arguments.to_topic, table=arguments.to_table, network=network)
        if not arguments.to_topic and not arguments.to_table:
            if arguments.json:
                for row in rows.toJSON().toLocalIterator() if not arguments.remote else rows.toJSON().collect():
                    sys.stdout.write(f"{row}\n")
            else:
                rows.show(1000, truncate=False)
        return status
    summary = stream(
        spark,
        query,
        topic=arguments.to_topic,
        table=arguments.to_table,
        network=network,
        checkpoint=arguments.checkpoint,
        new_query=arguments.new_query,
        mode=arguments.mode,
        once=arguments.once,
        every=arguments.every,
        quiet=False,
    )
    common.print_summary(summary, as_json=arguments.json)
    return status


def _read(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(os.path.expanduser(name)).read_text()
    except OSError as exc:
        raise PipelineError(f"the query cannot be read: {exc}") from exc
    if not text.strip():
        raise PipelineError(f"there is no query in {name}")
    return text
