"""`flintmq pipeline archive`: topics into a table, by topic, date and hour of publishing, each message exactly once.

Tasks write the files of each batch, wherever the table is, and tell the driver of them; the driver adds them by one
commit of the table's own log, which `tables` has the rules of. This module has the Spark side: which columns, JSON or
not, where the stream is; and reading a table back.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import FlintError, PipelineError
from flintmq.spark.decoding import Decoder, JsonDecoder, decoder
from flintmq.spark.pipelines import bodies, common
from flintmq.spark.pipelines.loops import Reads, check_loop, target_of_topic
from flintmq.spark.pipelines.screen import say
from flintmq.spark.pipelines.subscriptions import subscription_of
from flintmq.spark.pipelines.tables import DeltaTable, IcebergTable, ParquetFolder, Table, open_table
from flintmq.spark.shipped.columns import COLUMNS
from flintmq.spark.shipped.files import PARTITIONS, DataFile, FileReader, FileWriter, Place, describe, partition_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from flintmq.spark.decoding import AnySchema

__all__ = [
    "Aside",
    "BatchWriter",
    "Target",
    "add_arguments",
    "archive",
    "check_archived",
    "checkpoint_of",
    "compact",
    "laid_out",
    "query_id",
    "read",
    "read_files",
    "run",
    "table_files",
    "table_writer",
    "target_of",
    "vacuum",
    "write_batch",
]

_MEBIBYTE = 1 << 20
#: Mebibytes that a merged file may have at most: a tebibyte.
_MOST_MEBIBYTES = 1 << 20
#: Files of tasks that still run, and of readers that began before, are not older than this.
_LEAST_RETENTION = 3600.0
#: Where Spark's checkpoint is unless said, below the table.
_CHECKPOINT = "_checkpoint"
#: The file that says which plain folder and which checkpoint belong together.
_MARK = "_flintmq_query"
#: How the name of a folder says null, to Hive and to Spark.
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
#: Folders in a table that belong to its format.
_TABLE_LOGS = ("_delta_log", "_change_data", "_iceberg", "_spark_metadata")


@dataclass(frozen=True)
class Target:
    """Which table: where it is, its format if it is known, and what opens it."""

    place: Place
    format: str | None = None
    catalog: str | None = None
    catalog_options: Mapping[str, str] = field(default_factory=dict)
    table: str | None = None

    @staticmethod
    def of(where: str | Path | Target, **more: Any) -> Target:
        return where if isinstance(where, Target) else Target(Place.of(where), **more)

    def open(self) -> Table:
        return open_table(
            self.place,
            self.format,
            catalog=self.catalog,
            catalog_options=self.catalog_options,
            table=self.table,
        )


def archive(
    spark: SparkSession,
    source: common.Source,
    to: str | Path | Target,
    *,
    format: str | None = None,
    checkpoint: str | Path | Place | None = None,
    decode: bool | str | Decoder = False,
    schema: AnySchema = None,
    undecodable: Aside | None = None,
    once: bool = False,
    every: float = 10.0,
    new_query: bool = False,
    quiet: bool = True,
) -> common.Summary:
    """Archive what the source gives, until it ends (`once`) or a signal comes. PipelineError says why not.

    `decode` adds what the messages' JSON says, by `schema` (as in SQL: ``"id BIGINT, name STRING"``) or, without one,
    by what the first batch looks like; another format by its name and a `schema`, or by a decoder of
    ``flintmq.spark.decoding``. Messages that do not decode also go to `undecodable`. `checkpoint` is in the archive
    unless given; a table that has batches is only gone on with from the checkpoint that they came from, unless
    `new_query` says that this is another one.
    """
    common.check_whole(source, "an archive is to have")
    made = decode if isinstance(decode, Decoder) else None
    if made is None and (schema is not None or decode not in (True, False, "json")):
        made = decoder(decode if isinstance(decode, str) else "json", schema=schema)
    target = Target.of(to, format=format)
    if undecodable is not None:
        undecodable.check(target, common.options_of(source), is_decoded=bool(decode) or made is not None)
    at = checkpoint_of(target.place, checkpoint)
    common.check_hadoop(spark, at)
    writer = _MessageWriter(
        target=target,
        checkpoint=at,
        new_query=new_query,
        decode=bool(decode) or made is not None,
        decoder=made,
        undecodable=undecodable,
        subscription=subscription_of(source),
    )
    # Behind Spark Connect all files are the server's: the first batch will say what is wrong.
    is_plain = target.format == "parquet" if common.is_remote(spark) else writer.prepare().format == "parquet"
    if is_plain and undecodable is not None:
        raise PipelineError("plain Parquet is written by Spark alone: messages are only put aside beside other tables")
    try:
        if undecodable is not None and undecodable.topic:
            common.register(spark)
        messages = source(spark)
        if is_plain:
            stream = _plain_sink(spark, messages, writer)
        else:
            with common.shipping(spark):
                stream = messages.writeStream.foreachBatch(writer)
        stream = stream.queryName("flintmq archive").option("checkpointLocation", at.for_spark)
    except PipelineError:
        raise
    except Exception as exc:
        raise PipelineError(common.explain(exc)) from exc
    summary = common.run_stream(stream, "archive", once=once, every=every, quiet=quiet)
    if not is_plain and not common.is_remote(spark):
        # What Spark counts is what it read, which is more where a schema was inferred.
        summary.rows = sum(writer.written)
    return summary


def checkpoint_of(place: Place, checkpoint: str | Path | Place | None) -> Place:
    """Where Spark notes how far it is: beside the table's own log, which passes over such names, unless said.

    PipelineError if it is inside of the table under a name that belongs to the table's files or log.
    """
    if not checkpoint:
        return place / _CHECKPOINT
    found = Place.of(checkpoint, place.options)
    table, inside = (os.path.realpath(at.text) if at.is_local else at.text for at in (place, found))
    name = inside.removeprefix(f"{table}/").partition("/")[0] if found.is_inside(place) else None
    if name is not None and (not name.startswith("_") or name in _TABLE_LOGS):
        raise PipelineError(
            f"--checkpoint {found} is inside of the table {place}, whose files are deleted by a vacuum: take a place "
            f"outside of it, or a name that begins with an underscore, such as {place}/_checkpoint. A checkpoint that "
            "is in use can be moved there"
        )
    return found


def _plain_sink(spark: SparkSession, messages: DataFrame, writer: _MessageWriter) -> Any:
    """Spark's own sink of Parquet files."""
    common.check_hadoop(spark, writer.target.place)
    if writer.decode:
        if writer.decoder is None:
            raise PipelineError("plain Parquet has no table that keeps a schema: say it, by --schema")
        messages = bodies.decoded(messages, writer.decoder)
    laid_out = messages.select("*", *common.hour_columns()).writeStream.format("parquet")
    return laid_out.option("path", writer.target.place.for_spark).partitionBy(*PARTITIONS)


def _claim(folder: ParquetFolder, checkpoint: Place, new_query: bool) -> None:
    """Note in a plain folder and in a checkpoint that they belong together. PipelineError if they do not.

    Spark's sink knows batches by their number alone: it would leave those of another query out.
    """
    place, rows = folder.place, folder.has_rows()
    ours, mark = _read_note(checkpoint, _MARK), _read_note(place, _MARK)
    # A folder with rows and without a note is of a version before the notes.
    is_inside = checkpoint == place / _CHECKPOINT and checkpoint.exists("metadata")
    is_ours = mark == ours if mark is not None else not rows or is_inside
    if is_ours and not (rows and new_query):
        done, kept = _newest_batch(checkpoint, "commits"), _newest_batch(place, "_spark_metadata")
        if done > kept:
            raise PipelineError(
                f"{checkpoint} has done batch {done}, and {place} "
                + (f"ends with batch {kept}" if kept >= 0 else "has none")
                + ": give the --to that the batches went to, or an empty --checkpoint and another --to to begin anew"
            )
        if ours is None:
            ours = uuid.uuid4().hex
            checkpoint.write_text(_MARK, ours)
        # Another process may have begun here at this moment.
        is_ours = _write_first(place, _MARK, ours) == ours
    if not is_ours or (rows and new_query):
        raise PipelineError(
            f"{place} is an archive of another checkpoint, and plain Parquet takes the rows of one alone: give that "
            "--checkpoint, or another --to"
        )


def _read_note(place: Place, name: str) -> str | None:
    return place.read_text(name).strip() if place.exists(name) else None


def _write_first(place: Place, name: str, text: str) -> str:
    """Write a small file unless it is there. Its content; on a disk only one of two writers wins."""
    if (known := _read_note(place, name)) is not None:
        return known
    if not place.is_local:
        place.write_text(name, text)
        return place.read_text(name).strip()
    mine = f"{name}.{uuid.uuid4().hex}"
    place.write_text(mine, text)
    with contextlib.suppress(FileExistsError):
        os.link(Path(place.text) / mine, Path(place.text) / name)
    os.unlink(Path(place.text) / mine)
    return place.read_text(name).strip()


def _newest_batch(place: Place, folder: str) -> int:
    """Return the greatest number that files of one of Spark's logs have, or -1."""
    import pyarrow.fs

    found = place.files().get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True))
    numbers = [re.fullmatch(r"(\d+)(\.compact)?", info.base_name) for info in found]
    return max((int(number[1]) for number in numbers if number), default=-1)


@dataclass
class BatchWriter:
    """What Spark calls for each batch of a stream: brings its rows into a table, exactly once.

    It is pickled to the server where the session is a Connect one. This one writes the rows as they are.
    """

    target: Target
    checkpoint: Place
    #: May a query that has written nothing here yet add to a table that has rows?
    new_query: bool = False
    #: Rows of each batch that this run brought in.
    written: list[int] = field(default_factory=list)
    #: Are rows put into folders by topic, date and hour?
    partitioned: bool = False
    #: Topics that the query subscribes to, for the commits of the table; nothing if that is not known.
    subscription: str = ""
    #: Opened with the first batch, in the process that Spark calls it in.
    table: Table | None = None

    def prepare(self) -> Table:
        """Open the table. PipelineError if it is not to be written from this checkpoint."""
        if self.table is None:
            table = self.target.open()
            if isinstance(table, ParquetFolder):
                try:
                    _claim(table, self.checkpoint, self.new_query)
                except OSError as exc:
                    raise PipelineError(f"{table.place} cannot be begun from {self.checkpoint}: {exc}") from exc
            elif not self.checkpoint.exists("metadata") and not self.new_query and table.has_rows():
                raise table.unknown(str(self.checkpoint))
            self.table = table
        return self.table

    def __call__(self, rows: DataFrame, batch: int) -> None:
        table = self.prepare()
        query = query_id(self.checkpoint)
        end = self._end(batch)
        before = self._end(batch - 1) if batch else None
        checkpoint = str(self.checkpoint)
        if not table.wants(query, batch, end, before, checkpoint=checkpoint, new_query=self.new_query):
            return
        rows = self._laid_out(table, rows)
        files = write_batch(table, rows, f"{query}-{batch:010d}", partitioned=self.partitioned)
        self._before_commit(rows.sparkSession, table, files, query, batch, end)
        table.commit(query, batch, end, files, self.subscription)
        self.written.append(sum(file.rows for file in files))

    def _laid_out(self, table: Table, rows: DataFrame) -> DataFrame:
        """The rows as the table has them."""
        return rows

    def _before_commit(
        self, spark: SparkSession, table: Table, files: list[DataFile], query: str, batch: int, end: list[str]
    ) -> None:
        """Do what is to be done with the files of a batch before they are in. It may be done again."""

    def _end(self, batch: int) -> list[str]:
        """Where a batch ends, as Spark has written it down: a line for each source, behind a version and a header."""
        try:
            return (self.checkpoint / "offsets").read_text(str(batch)).splitlines()[2:]
        except OSError as exc:
            raise PipelineError(f"cannot read where batch {batch} ends, in {self.checkpoint}: {exc}") from exc


@dataclass
class _MessageWriter(BatchWriter):
    """Writes messages to folders by topic, date and hour, with what their JSON says if that is wanted."""

    partitioned: bool = True
    decode: bool = False
    #: None if the schema is to be found out.
    decoder: Decoder | None = None
    undecodable: Aside | None = None

    def _laid_out(self, table: Table, rows: DataFrame) -> DataFrame:
        return bodies.decoded(rows, self.decoder or self._inferred(table, rows)) if self.decode else rows

    def _inferred(self, table: Table, messages: DataFrame) -> Decoder | None:
        if (known := _known_json(table)) is not None:
            return known
        found = common.infer_schema(messages)
        if found is not None and isinstance(table, IcebergTable):
            found = bodies.apart_by_path(found)
        return None if found is None else JsonDecoder(found)

    def _before_commit(
        self, spark: SparkSession, table: Table, files: list[DataFile], query: str, batch: int, end: list[str]
    ) -> None:
        # From the files, so that they are those that the archive has without data.
        if self.undecodable is not None and files:
            rows = read_files(spark, table, files)
            self.undecodable.put(rows.where("error IS NOT NULL"), self.checkpoint, query, batch, end)


def _known_json(table: Table) -> JsonDecoder | None:
    """What decodes JSON as it was for the rows of a table, which keeps the schema: all of its files have one."""
    known = table.schema()
    if known is None or "data" not in known.names:
        return None
    from pyspark.sql.pandas.types import from_arrow_type

    return JsonDecoder(from_arrow_type(known.field("data").type))


def laid_out(table: Table, messages: DataFrame, decode: bool | Decoder) -> DataFrame:
    """Messages with the columns that an archive has. `decode` is True for JSON, by the schema that the table keeps."""
    if not decode:
        return messages
    return bodies.decoded(messages, decode if isinstance(decode, Decoder) else _known_json(table))


@dataclass
class Aside:
    """Where messages go that do not decode, beside the archive, which has them too: a topic or a table.

    Each goes there once: before its batch is in the archive, and not again if the batch is written again.
    """

    #: `{topic}` in it stands for the topic that a message was in.
    topic: str = ""
    #: The brokers of the topic, as options of `format("nsq")`.
    network: Mapping[str, str] = field(default_factory=dict)
    #: By topic, date and hour, as an archive is, so that it can be replayed.
    target: Target | None = None
    #: The topics of the archive: nothing is published to them.
    reads: Reads = field(default_factory=Reads)
    #: Opened with the first batch, in the process that Spark calls it in.
    table: Table | None = None
    #: What was said of topics whose messages are not published.
    said: set[str] = field(default_factory=set)

    def check(
        self,
        archive: Target,
        source: Mapping[str, str] | None = None,
        *,
        is_decoded: bool,
        known: Iterable[str] = (),
    ) -> None:
        """PipelineError if nothing is decoded, if the table is not apart from the archive, or for a wrong topic.

        `source` are the options of the archive's source, and `known` are topics that match its pattern. Others are
        looked at in their batches.
        """
        if not is_decoded:
            raise PipelineError("--undecodable is for messages that are decoded: say what they are, by --decode FORMAT")
        if self.target is not None:
            place = self.target.place
            if place.is_inside(archive.place) or archive.place.is_inside(place):
                raise PipelineError(
                    f"--undecodable {self.target.place} and the archive {archive.place} are one inside of the other, "
                    "and a vacuum of a table deletes files in its folder: take a place beside it"
                )

        if self.topic:
            check_loop(source or {}, self.topic, self.network, "--undecodable topic")
            self.reads = Reads.of(source or {}, self.network)
            for topic in (*self.reads.names, *known) or ("x",):
                if why := self.reads.refusal(topic, self.topic):
                    raise PipelineError(f"--undecodable topic:{self.topic}: {why}")

    def put(self, rows: DataFrame, checkpoint: Place, query: str, batch: int, end: list[str]) -> None:
        """Put the messages of a batch aside, unless that was done."""
        if rows.isEmpty():
            return
        if self.target is not None:
            self._add(self.target, rows, query, batch, end)
        else:
            self._publish(rows, checkpoint, query, batch)

    def _add(self, target: Target, rows: DataFrame, query: str, batch: int, end: list[str]) -> None:
        self.table = table = self.table or target.open()
        if isinstance(table, ParquetFolder):
            raise PipelineError(f"{table.place} is a folder of plain Parquet: give another place for --undecodable")
        if table.has_batch(query, batch):
            return
        kept = rows.select(*COLUMNS, "error")
        files = write_batch(table, kept, f"{query}-{batch:010d}", partitioned=True)
        table.commit(query, batch, end, files)

    def _publish(self, rows: DataFrame, checkpoint: Place, query: str, batch: int) -> None:
        from pyspark.sql import functions as f

        targets: dict[str, str] = {}
        for row in rows.select("topic").distinct().collect():
            if not (why := self.reads.refusal(row["topic"], self.topic)):
                targets[row["topic"]] = target_of_topic(self.topic, row["topic"])
            elif why not in self.said:
                self.said.add(why)
                say(f"messages that do not decode stay in the archive alone: {why}")
        if not targets:
            return
        rows = rows.where(f.col("topic").isin(list(targets)))
        topic = f.replace(f.lit(self.topic), f.lit("{topic}"), f.col("topic")).alias("topic")
        writer = rows.select("value", topic).write.format("nsq").mode("append").options(**self.network)
        # With a schema that has changed meanwhile a repeated batch may have others: the first ones count.
        writer = writer.option("checkpointLocation", checkpoint.for_spark).option("repeatedBatch", "skip")
        writer.option("writeId", f"{query}-{batch}-undecodable").save()


def table_writer(spark: SparkSession, target: Target, checkpoint: Place, new_query: bool) -> BatchWriter:
    """What brings the batches of any query into a table. PipelineError if that is not to be, as far as is known now."""
    if target.format == "parquet":
        raise PipelineError("the rows of a query go to a Delta or an Iceberg table; plain Parquet is for archives")
    writer = BatchWriter(target, checkpoint, new_query)
    if not common.is_remote(spark):
        writer.prepare()
    return writer


def write_batch(table: Table, rows: DataFrame, name: str, *, partitioned: bool) -> list[DataFile]:
    """Have the tasks write the rows to files, which are no part of the table yet. The files, when all are there.

    PipelineError if they do not hold the rows that Spark counted.
    """
    from pyspark.sql import functions as f

    schema = arrow_schema(rows.schema)
    try:
        table.make(schema, partitioned)
    except FlintError:
        raise
    except Exception as exc:  # a format lacks some of Spark's types
        raise PipelineError(f"the table {table.place} cannot be made: {common.explain(exc)}") from exc
    writer = FileWriter(table.place, name, schema, partitioned=partitioned, keeps_topic=isinstance(table, IcebergTable))
    counted = common.observation(rows)
    # Right before the write, in the same tasks: a task that is tried again counts once.
    observed = rows.observe(counted, f.count(f.lit(1)).alias("rows"))
    with common.shipping(rows.sparkSession):
        told = observed.mapInArrow(writer, "file string")
    files = [DataFile(**json.loads(row["file"])) for row in told.collect()]
    check_files(table.place, files, int(counted.get["rows"]), name)
    return files


def check_files(place: Place, files: Sequence[DataFile], rows: int, name: str) -> None:
    """PipelineError if files are missing or shorter than was told, or if they do not hold so many rows."""
    found = place.files().get_file_info([file.path for file in files]) if files else []
    there = [file for file, info in zip(files, found, strict=True) if info.is_file and info.size == file.bytes]
    held = sum(file.rows for file in there)
    if held != rows:
        raise PipelineError(
            f"Spark wrote {rows:,} rows in batch {name} and the files in {place} hold {held:,}: nothing of it was "
            "added. Find out what deletes files there; started again, the batch is written again"
        )


def arrow_schema(schema: StructType) -> pa.Schema:
    """As the files have it: times in UTC, and no notes of Spark's own."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    found = to_arrow_schema(schema, timezone="UTC")
    return pa.schema([pa.field(column.name, column.type) for column in found])


def query_id(checkpoint: Place) -> str:
    """Spark's lasting name of a query: with a new checkpoint, batches count from 0 again under another name."""
    return str(json.loads(checkpoint.read_text("metadata").splitlines()[-1])["id"])


# --- Reading ----------------------------------------------------------------------------------------------------------


def read(
    spark: SparkSession,
    root: str | Path | Target,
    *,
    format: str | None = None,
    columns: Sequence[str] = (),
) -> DataFrame:
    """The rows of a table, as they are in at this call; messages have the columns topic, date and hour too.

    `columns` are all that is wanted, where not all are.
    """
    target = Target.of(root, format=format)
    table = target.open()
    if isinstance(table, ParquetFolder):
        if not table.has_rows():
            raise PipelineError(f"{table.place} is no table: it has no messages")
        common.check_hadoop(spark, target.place)
        found = _plain(spark, table.place)
        return found.select(*columns) if columns else found
    return read_files(spark, table, table.files(), columns=columns)


def _plain(spark: SparkSession, place: Place) -> DataFrame:
    """What Spark's own sink has written, with a topic that is a text, whatever it looks like."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import DateType, IntegerType, StringType, StructType

    written = spark.read.parquet(place.for_spark).schema
    schema = StructType([column for column in written if column.name not in PARTITIONS])
    if set(PARTITIONS) <= set(written.names):
        schema = schema.add("topic", StringType()).add("date", DateType()).add("hour", IntegerType())
    found = spark.read.schema(schema).parquet(place.for_spark)
    # No message is without a topic: the folder of this name is taken for null.
    return found.withColumn("topic", f.coalesce("topic", f.lit(_HIVE_NULL))) if "topic" in schema.names else found


def table_files(spark: SparkSession, table: Table) -> list[DataFile]:
    """All files of a table, with the times that they hold."""
    if isinstance(table, ParquetFolder):
        return table.files_of(_plain(spark, table.place).inputFiles()) if table.has_rows() else []
    # Who else writes to the table need not note the times.
    return [
        file if file.oldest is not None else describe(table.place, file.path, file.partition) for file in table.files()
    ]


def check_archived(place: Place, files: Sequence[DataFile], topics: Sequence[str]) -> None:
    """PipelineError if an archive has no messages of some topics. A file without the topic in its folder may have any.

    It says which topics there are.
    """
    there = {file.partition.get("topic") for file in files}
    missing = [topic for topic in topics if topic not in there]
    if missing and None not in there:
        known = ", ".join(sorted(topic for topic in there if topic))
        has = f"it has {known}" if known else "it is empty"
        raise PipelineError(f"the archive {place} has no messages of the topic {', '.join(missing)}: {has}")


def read_files(
    spark: SparkSession, table: Table, files: Sequence[DataFile], *, columns: Sequence[str] = ()
) -> DataFrame:
    """The rows of some files of a table."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    place = table.place
    if not files:
        raise PipelineError(f"{place} has no messages, or none of the wanted time")
    if isinstance(table, ParquetFolder):
        schema = _plain(spark, place).schema
    else:
        known = table.schema()
        assert known is not None  # it has files
        # What the folders' names say is a column too, in a table that has it in its files as well.
        more = [(name, kind) for name, kind in (("date", pa.date32()), ("hour", pa.int32())) if files[0].partition]
        known = pa.schema([*known, *(pa.field(*column) for column in more if column[0] not in known.names)])
        schema = from_arrow_schema(known)
    wanted = StructType([column for column in schema if not columns or column.name in columns])
    # Spark takes brackets in a path for a pattern, and this value in the name of a folder for null.
    named = all(
        partition_of(file.path) == file.partition and _HIVE_NULL not in file.partition.values() for file in files
    )
    is_pattern = re.search(r"[][{}*?\\]", place.text) is not None
    if named and not is_pattern and (place.is_local or place.scheme == "hdfs"):
        paths = [(place / file.path).for_spark for file in files]
        folders = [column for column in schema if column.name in files[0].partition]
        rest = [column for column in schema if column.name not in files[0].partition]
        found = spark.read.schema(StructType([*rest, *folders])).option("basePath", place.for_spark).parquet(*paths)
        return found.select(*wanted.names)
    reader = FileReader(place, arrow_schema(wanted))
    lines = [(json.dumps(file.__dict__),) for file in sorted(files, key=lambda file: file.path)]
    tasks = min(len(lines), 4 * common.parallelism(spark))
    with common.shipping(spark):
        return spark.createDataFrame(lines, "file string").repartition(tasks).mapInArrow(reader, wanted)


# --- Maintenance ------------------------------------------------------------------------------------------------------


def compact(
    root: str | Path | Target, *, target_bytes: int = 128 * _MEBIBYTE, older_than: float = 7200.0
) -> tuple[int, int]:
    """Merge the small files of hours that ended `older_than` seconds ago. How many files became how many.

    The old files stay for readers that began before, until `vacuum`.
    """
    if target_bytes <= 0:
        raise PipelineError(f"the size of merged files must be greater than 0, not {target_bytes}")
    closed = datetime.datetime.fromtimestamp(time.time() - older_than, datetime.UTC)
    return _delta(root, "small files of it are merged").compact(target_bytes, closed)


def vacuum(root: str | Path | Target, *, retain: float = 168 * 3600.0) -> int:
    """Delete files that are no part of the table any more, or never were, and are older than `retain` seconds."""
    if retain < _LEAST_RETENTION:
        raise PipelineError("--retain is at least 1h: files that are being written or read now would be deleted")
    return _delta(root, "what it no longer needs is deleted").vacuum(retain)


def _delta(root: str | Path | Target, what: str) -> DeltaTable:
    table = Target.of(root).open()
    if not isinstance(table, DeltaTable):
        raise PipelineError(f"{table.place} is a table of format {table.format}: {what} by an engine of that format")
    return table


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Archive topics: a table by topic, date and hour of publishing, each message exactly once."
    parser.add_argument("--to", metavar="URI", required=True, help="the table, created if missing: a path or a URI")
    common.table_arguments(parser)
    bodies.decode_arguments(parser)
    parser.add_argument(
        "--undecodable",
        metavar="WHERE",
        help="also write messages that do not decode to a table (a path or a URI) or a topic (topic:NAME)",
    )
    parser.add_argument(
        "--new-query", action="store_true", help="add to a table that has messages, from a checkpoint of its own"
    )
    care = parser.add_argument_group("maintenance instead of archiving, without Spark")
    one = care.add_mutually_exclusive_group()
    one.add_argument("--compact", action="store_true", help="merge small files of closed hours")
    one.add_argument("--vacuum", action="store_true", help="delete files that no version of the last days needs")
    one.add_argument("--upgrade", action="store_true", help="convert an archive of version 0.1.0 to a table")
    care.add_argument(
        "--compact-size", metavar="MIB", type=_size, default=128, help="of merged files (default %(default)s MiB)"
    )
    care.add_argument(
        "--compact-after",
        metavar="DURATION",
        type=common.duration,
        default=7200.0,
        help="least age of a merged hour (default 2h)",
    )
    care.add_argument(
        "--retain",
        metavar="DURATION",
        type=common.duration,
        default=168 * 3600.0,
        help="time for which files are kept for running readers (default 168h)",
    )
    common.source_arguments(parser, nargs="*")
    common.stream_arguments(parser)
    common.spark_arguments(parser)


def _size(text: str) -> int:
    try:
        size = int(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from exc
    if not 0 < size <= _MOST_MEBIBYTES:
        raise argparse.ArgumentTypeError(f"{size} is not between 1 and {_MOST_MEBIBYTES:,}")
    return size


def run(arguments: argparse.Namespace) -> int:
    target = target_of(arguments, arguments.to)
    if arguments.compact or arguments.vacuum or arguments.upgrade:
        return _take_care(arguments, target)
    common.need_topics(arguments)
    common.check_whole(common.stream_reader(arguments), "an archive is to have")
    bodies.check_decoding(arguments)
    aside = _aside_of(arguments)
    if aside is not None:
        source = common.topics_of(arguments)
        # Of names nobody has to be asked.
        known = [] if source.names or not aside.topic else common.known_topics(arguments)
        is_decoded = bool(arguments.decode or arguments.schema)
        aside.check(target, source.all_options, is_decoded=is_decoded, known=known)
    common.check_places(arguments, "to", "checkpoint")
    status = common.check_topics(arguments, batch=False)
    if not arguments.remote:
        target.open()  # what is wrong with it is said before Spark starts
    decode: bool | Decoder = bool(arguments.decode)
    if not bodies.needs_spark(arguments):
        decode = _decoder_of(arguments)
    spark = common.open_session(arguments, "flintmq archive")
    if bodies.needs_spark(arguments) and not bodies.is_found_out(arguments, arguments.schema):
        decode = _decoder_of(arguments)
    summary = archive(
        spark,
        common.stream_reader(arguments),
        target,
        checkpoint=common.place_of(arguments, arguments.checkpoint) if arguments.checkpoint else None,
        decode=decode,
        undecodable=aside,
        once=arguments.once,
        every=arguments.every,
        new_query=arguments.new_query,
        quiet=False,
    )
    if not arguments.remote:
        table = target.open()
        summary.details = {"archive": str(target.place), "format": table.format}
        if not isinstance(table, ParquetFolder):
            files = table.files(may_lack_rows=True)
            summary.details |= {"files": len(files), "archived": sum(file.rows for file in files)}
            summary.details |= {"bytes": sum(file.bytes for file in files)}
    common.print_summary(summary, as_json=arguments.json)
    return status


def _decoder_of(arguments: argparse.Namespace) -> Decoder:
    return bodies.decoder_of(arguments, arguments.topics, arguments.schema, arguments.message, arguments.subject)


def _aside_of(arguments: argparse.Namespace) -> Aside | None:
    where = arguments.undecodable
    if not where:
        return None
    kind, colon, name = where.partition(":")
    if colon and kind == "topic":
        if not name:
            raise PipelineError("--undecodable topic:NAME names a topic")
        return Aside(topic=name, network=common.network_options(arguments))
    common.check_places(arguments, "undecodable")
    return Aside(target=Target(common.place_of(arguments, where)))


def target_of(arguments: argparse.Namespace, where: str) -> Target:
    """The table that a command line names."""
    return Target(
        common.place_of(arguments, where),
        arguments.format,
        arguments.catalog,
        dict(arguments.catalog_option),
        arguments.table,
    )


def _take_care(arguments: argparse.Namespace, target: Target) -> int:
    done: dict[str, Any]
    if arguments.upgrade:
        from flintmq.spark.pipelines.upgrade import upgrade

        rows, files = upgrade(target)
        done, text = {"pipeline": "upgrade", "rows": rows, "files": files}, f"upgrade: {rows:,} rows in {files:,} files"
    elif arguments.compact:
        before, after = compact(
            target, target_bytes=arguments.compact_size * _MEBIBYTE, older_than=arguments.compact_after
        )
        done = {"pipeline": "compact", "merged": before, "into": after}
        text = f"compact: {before:,} files became {after:,}" if before else "compact: nothing to merge"
    else:
        gone = vacuum(target, retain=arguments.retain)
        done, text = {"pipeline": "vacuum", "deleted": gone}, f"vacuum: {gone:,} files deleted"
    sys.stdout.write((json.dumps(done) if arguments.json else text) + "\n")
    return 0
