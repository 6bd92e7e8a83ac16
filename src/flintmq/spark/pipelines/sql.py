"""`flintmq pipeline sql`: a query over topics, its result to a topic, a table or the screen.

Each topic is a table (a view of the session) with the columns of `format("nsq")`, `text` (the value as text) and, where
it is decoded, `data` and `error`. As a stream the query runs on and on, with the rules that Spark has for streams; as a
batch it runs once over what the logs hold now.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.errors import PipelineError, system_reason
from flintmq.spark.decoding import Decoder, decoder
from flintmq.spark.pipelines import bodies, common
from flintmq.spark.pipelines.archive import (
    Target,
    checkpoint_of,
    query_id,
    table_writer,
    target_of,
    write_batch,
)
from flintmq.spark.pipelines.loops import Reads, check_loop
from flintmq.spark.pipelines.tables import ParquetFolder
from flintmq.spark.shipped.files import Place

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
    schemas: Mapping[str, StructType | str | Decoder | None] | None = None,
) -> None:
    """Make a table of each source. Those in `schemas` are decoded: JSON by a schema, or anything by a decoder."""
    from pyspark.sql import functions as f

    names: dict[str, str] = {}
    for topic in sources:
        # Spark's names of tables have no case.
        if (other := names.setdefault(table_name(topic).lower(), topic)) != topic:
            raise PipelineError(
                f"the topics {other} and {topic} are both called {table_name(topic)} in a query: read one of them at a "
                "time"
            )
    for topic, source in sources.items():
        messages = source(spark).withColumn("text", f.col("value").cast("string"))
        if schemas is not None and topic in schemas:
            found = schemas[topic]
            if found is not None and not isinstance(found, Decoder):
                found = decoder("json", schema=found)
            messages = bodies.decoded(messages, found)
        messages.createOrReplaceTempView(table_name(topic))


def stream(
    spark: SparkSession,
    query: str,
    *,
    topic: str | None = None,
    table: str | Path | Target | None = None,
    network: Mapping[str, str] | None = None,
    checkpoint: str | Path | Place | None = None,
    new_query: bool = False,
    mode: str = "append",
    once: bool = False,
    every: float = 10.0,
    reads: Reads | None = None,
    quiet: bool = True,
) -> common.Summary:
    """Run a query over streams: to a topic, to a table, or to the screen. It stops at a row for a topic of `reads`."""
    rows = _query(spark, query)
    if not rows.isStreaming:
        raise PipelineError("the query reads no topic as a stream; to run it once, say --batch")
    _check(topic, table, checkpoint, mode)
    with tempfile.TemporaryDirectory(prefix="flintmq-sql-") as scratch:
        target = None if table is None else Target.of(table)
        at = checkpoint_of(target.place, checkpoint) if target is not None else Place.of(checkpoint or scratch)
        common.check_hadoop(spark, at)
        if topic is not None and mode == "append":
            writer = as_messages(rows, topic, reads).writeStream.format("nsq").options(**(network or {}))
        elif topic is not None:
            # A stream's sink in Python is not told which rows are new, and Spark has it overwrite or refuses it.
            common.register(spark)
            with common.shipping(spark):
                writer = rows.writeStream.foreachBatch(Publisher(topic, dict(network or {}), at, reads))
        elif target is not None:
            with common.shipping(spark):
                writer = rows.writeStream.foreachBatch(table_writer(spark, target, at, new_query))
        else:
            writer = rows.writeStream.format("console").option("truncate", "false")
        writer = writer.outputMode(mode).option("checkpointLocation", at.for_spark)
        return common.run_stream(writer, "sql", once=once, every=every, quiet=quiet)


def _check(topic: str | None, table: object, checkpoint: object, mode: str) -> None:
    """PipelineError for a stream that cannot be, whatever the query says."""
    if table is not None and mode != "append":
        raise PipelineError(f"a table only grows: output mode {mode} is for topics and the screen")
    if topic is not None and not checkpoint:
        raise PipelineError("say where the query notes how far it is, by --checkpoint: without it, it would begin anew")


@dataclass
class Publisher:
    """Publishes the rows of each batch, under a key of query and batch, so that a batch that is run again is known.

    For output modes whose batches are no mere additions: what has changed, or all there is.
    """

    topic: str
    network: dict[str, str]
    checkpoint: Place
    reads: Reads | None = None

    def __call__(self, rows: DataFrame, batch: int) -> None:
        writer = as_messages(rows, self.topic, self.reads).write.format("nsq").mode("append").options(**self.network)
        # One broker keeps the decisions of all batches, and the checkpoint names it.
        writer = writer.option("checkpointLocation", self.checkpoint.for_spark)
        writer.option("writeId", f"{query_id(self.checkpoint)}-{batch}").save()


def batch(
    spark: SparkSession,
    query: str,
    *,
    topic: str | None = None,
    table: str | Path | Target | None = None,
    network: Mapping[str, str] | None = None,
) -> DataFrame:
    """Run a query once over what there is. The result, after it was published or written where that is wanted."""
    rows = _query(spark, query)
    try:
        if topic is not None:
            as_messages(rows, topic).write.format("nsq").mode("append").options(**(network or {})).save()
        elif table is not None:
            target = Target.of(table)
            found = target.open()
            if isinstance(found, ParquetFolder):
                rows.write.mode("append").parquet(target.place.for_spark)
            else:
                name = uuid.uuid4().hex
                found.commit(name, 0, [], write_batch(found, rows, name, partitioned=False))
    except PipelineError:
        raise
    except Exception as exc:
        raise PipelineError(common.explain(exc)) from exc
    return rows


def as_messages(rows: DataFrame, topic: str, reads: Reads | None = None) -> DataFrame:
    """What is published: the column `value` if there is one, else each row as JSON.

    A column `topic` says where a row goes: an error if that is read, too.
    """
    from pyspark.sql import functions as f

    if "value" not in rows.columns:
        return rows.select(f.to_json(f.struct("*")).alias("value"), f.lit(topic).alias("topic"))
    wanted = [f.col(name) for name in ("value", "defer_ms") if name in rows.columns]
    target = f.col("topic") if "topic" in rows.columns else f.lit(topic)
    if "topic" in rows.columns and reads is not None and reads.is_here:
        text = f.concat(
            f.lit("the column topic of the query says where its rows go, and the topic "),
            target,
            f.lit(" is read, too, so that each row would come back without an end: leave the column out, or rename it"),
        )
        target = f.when(target.isin(list(reads.names)), f.raise_error(text)).otherwise(target)
    return rows.select(*wanted, target.alias("topic"))


def _query(spark: SparkSession, query: str) -> DataFrame:
    try:
        return spark.sql(query.strip().rstrip(";"))
    except Exception as exc:
        raise PipelineError(f"the query is refused: {common.explain(exc)}") from exc


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a query over topics: each is a table of its name, with _ for anything but letters and digits. "
        "Columns: value, text, topic, node, offset, id, timestamp, timestamp_ns; data and error with --decode."
    )
    parser.add_argument("query", metavar="FILE", help="a file with the query; - is standard input")
    parser.add_argument(
        "--to-topic", metavar="TOPIC", help="publish the rows: their column value, or whole rows as JSON"
    )
    parser.add_argument("--to-table", metavar="URI", help="add the rows to a table, each exactly once")
    common.table_arguments(parser)
    parser.add_argument("--new-query", action="store_true", help="add to a table that has rows of other queries")
    parser.add_argument("--mode", choices=MODES, default="append", help="output mode (default append)")
    parser.add_argument("--batch", action="store_true", help="run it once, over the present content of the logs")
    bodies.decode_arguments(parser, by_topic=True)
    common.source_arguments(parser, flag=True)
    common.stream_arguments(parser)
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.topics:
        raise PipelineError("say which topics the query reads, by --topic")
    if arguments.to_topic and arguments.to_table:
        raise PipelineError("give --to-topic or --to-table, not both")
    if not arguments.batch:
        _check(arguments.to_topic, arguments.to_table, arguments.checkpoint, arguments.mode)
        if arguments.to_topic:
            # What a batch publishes it does not read.
            options, network = common.topics_of(arguments).all_options, common.network_options(arguments)
            check_loop(options, arguments.to_topic, network, "--to-topic")
    bodies.check_decoding(arguments)
    query = _read(arguments.query)
    common.check_places(arguments, "to_table", "checkpoint")
    status = common.check_topics(arguments, batch=arguments.batch)
    schemas: dict[str, StructType | str | Decoder | None] = {}
    if not bodies.needs_spark(arguments):
        schemas |= {topic: _decoder_of(arguments, topic) for topic in arguments.topics}
    spark = common.open_session(arguments, "flintmq sql")
    if bodies.needs_spark(arguments):
        known = dict(arguments.schema)
        said = [topic for topic in arguments.topics if not bodies.is_found_out(arguments, known.get(topic))]
        schemas |= {topic: _decoder_of(arguments, topic) for topic in said}
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
    table = target_of(arguments, arguments.to_table) if arguments.to_table else None
    if arguments.batch:
        rows = batch(spark, query, topic=arguments.to_topic, table=table, network=network)
        if not arguments.to_topic and not arguments.to_table:
            if arguments.json:
                from pyspark.sql import functions as f

                for row in rows.select(f.to_json(f.struct("*"))).toLocalIterator():
                    sys.stdout.write(f"{row[0]}\n")
            else:
                rows.show(1000, truncate=False)
        return status
    summary = stream(
        spark,
        query,
        topic=arguments.to_topic,
        table=table,
        network=network,
        checkpoint=common.place_of(arguments, arguments.checkpoint) if arguments.checkpoint else None,
        new_query=arguments.new_query,
        mode=arguments.mode,
        reads=Reads.of(common.topics_of(arguments).all_options, network),
        once=arguments.once,
        every=arguments.every,
        quiet=False,
    )
    common.print_summary(summary, as_json=arguments.json)
    return status


def _decoder_of(arguments: argparse.Namespace, topic: str) -> Decoder:
    schema, message, subject = (
        dict(given).get(topic) for given in (arguments.schema, arguments.message, arguments.subject)
    )
    return bodies.decoder_of(arguments, [topic], schema, message, subject)


def _read(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(os.path.expanduser(name)).read_text()
    except OSError as exc:
        raise PipelineError(f"the query cannot be read: {system_reason(exc)}") from exc
    if not text.strip():
        raise PipelineError(f"there is no query in {name}")
    return text
