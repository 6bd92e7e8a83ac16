"""`flintmq pipeline archive`: topics into files, by topic, date and hour of publishing, each message exactly once.

Each batch of the stream is written by Spark to a staging folder and brought into the archive by the `store`, which has
the rules that make it exact. This module has the Spark side: which columns, which folders, JSON or not; and reading an
archive back through its manifest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import common
from flintmq.spark.pipelines.store import Archive, DataFile, Table, local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = [
    "BatchWriter",
    "add_arguments",
    "archive",
    "check_schema",
    "compact",
    "open_archive",
    "query_id",
    "read",
    "read_files",
    "run",
]

FORMATS = ("parquet", "delta", "iceberg")
_MEBIBYTE = 1 << 20


def archive(
    spark: SparkSession,
    source: common.Source,
    to: str | Path,
    *,
    format: str = "parquet",
    checkpoint: str | Path | None = None,
    decode: bool = False,
    schema: str | None = None,
    once: bool = False,
    every: float = 10.0,
    staging: str | Path | None = None,
    catalog: str | None = None,
    new_query: bool = False,
    quiet: bool = True,
) -> common.Summary:
    """Archive what the source gives, until it ends (`once`) or a signal comes. PipelineError says why not.

    `decode` adds what the messages' JSON says, by `schema` (as in SQL: ``"id BIGINT, name STRING"``) or, without one,
    by what the first batch looks like. `checkpoint` is in the archive unless given; an archive that has batches is only
    gone on with from the checkpoint that they came from, unless `new_query` says that this is another one.
    """
    if schema is not None:
        check_schema(schema)
    writer = _MessageWriter(
        root=str(local_path(to)),
        checkpoint=str(checkpoint or local_path(to) / "_checkpoint"),
        format=format,
        staging=str(staging) if staging else None,
        catalog=catalog,
        new_query=new_query,
        decode=decode or schema is not None,
        schema=schema,
    )
    with writer:
        if not common.is_remote(spark):
            # Behind Spark Connect all files are the server's: the first batch will say what is wrong.
            writer.prepare()
        try:
            stream = source(spark).writeStream.queryName("flintmq archive")
            stream = stream.option("checkpointLocation", writer.checkpoint)
            with common.shipping(spark):
                stream = stream.foreachBatch(writer)
        except Exception as exc:
            raise PipelineError(common.explain(exc)) from exc
        summary = common.run_stream(stream, "archive", once=once, every=every, quiet=quiet)
    if not common.is_remote(spark):
        # What Spark counts is what it read, which is more where a schema was inferred.
        summary.rows = sum(writer.written)
    return summary


@dataclass
class BatchWriter:
    """What Spark calls for each batch of a stream: brings its rows into a folder of the `store`, exactly once.

    It is pickled to the server where the session is a Connect one. This one writes the rows as they are. Used as a
    context, it lets other processes write the query at its end; the end of its process does that too.
    """

    root: str
    checkpoint: str
    format: str = "parquet"
    staging: str | None = None
    catalog: str | None = None
    #: May a query that has written nothing here yet add to an archive that has rows?
    new_query: bool = False
    #: Rows of each batch that this run brought in.
    written: list[int] = field(default_factory=list)
    #: Opened with the first batch, in the process that Spark calls it in.
    archive: Archive | None = None

    def open(self) -> Archive:
        return open_archive(self.root, format=self.format, staging=self.staging, catalog=self.catalog)

    def prepare(self) -> Archive:
        """Open the archive, and become its writer where the query is known already. PipelineError says why not."""
        if self.archive is None:
            archive = self.open()
            archive.prepare()
            archive.manifest.remember("format", self.format)
            if (local_path(self.checkpoint) / "metadata").exists():
                self._claim(archive)
            elif not self.new_query and archive.has_batches():
                raise self._unknown()
            self.archive = archive
        return self.archive

    def _claim(self, archive: Archive) -> str:
        query = query_id(self.checkpoint)
        if not archive.writes(query):
            if not self.new_query and not archive.knows(query) and archive.has_batches():
                raise self._unknown()
            archive.claim(query)
        return query

    def _unknown(self) -> PipelineError:
        return PipelineError(
            f"{self.root} has rows already, and {self.checkpoint} does not know of them: they would be archived twice; "
            "give the --checkpoint they came from, or --new-query if these are others"
        )

    def __enter__(self) -> BatchWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self.archive is not None:
            self.archive.close()
            self.archive = None

    def __call__(self, messages: DataFrame, batch: int) -> None:
        archive = self.prepare()
        query = self._claim(archive)
        end = self._end(batch)
        staged = archive.begin(query, batch, end)
        if staged is None:
            return
        rows = self._write(archive, messages, staged)
        files = archive.commit(query, batch, staged, end=end, rows=rows)
        self.written.append(sum(file.rows for file in files))

    def _write(self, archive: Archive, messages: DataFrame, staged: Path) -> int:
        """Write the files of a batch. How many rows Spark wrote to them."""
        return common.write_counted(messages, staged)

    def _end(self, batch: int) -> list[str]:
        """Where a batch ends, as Spark has written it down: a line for each source, behind a version and a header."""
        path = local_path(self.checkpoint) / "offsets" / str(batch)
        try:
            return path.read_text().splitlines()[2:]
        except OSError as exc:
            raise PipelineError(f"cannot read where batch {batch} ends: {exc.strerror} ({path})") from exc


@dataclass
class _MessageWriter(BatchWriter):
    """Writes messages to folders by topic, date and hour, with what their JSON says if that is wanted."""

    decode: bool = False
    schema: str | None = None

    def _write(self, archive: Archive, messages: DataFrame, staged: Path) -> int:
        if self.decode:
            messages = common.decode_json(messages, self._json_schema(archive, messages))
        folders = common.hour_columns()
        if self.format == "iceberg":
            # Iceberg knows a file's partition by the values in it: there the topic stays a column.
            laid_out = messages.select("*", messages["topic"].alias("_topic"), *folders)
            rows = common.write_counted(laid_out, staged, "_topic", "date", "hour")
            (staged / "_SUCCESS").unlink(missing_ok=True)
            for folder in list(staged.glob("_topic=*")):
                folder.rename(folder.with_name(folder.name.removeprefix("_")))
            return rows
        return common.write_counted(messages.select("*", *folders), staged, "topic", "date", "hour")

    def _json_schema(self, archive: Archive, messages: DataFrame) -> StructType | str | None:
        if self.schema is not None:
            return self.schema
        from pyspark.sql.types import StructType

        known = archive.manifest.snapshot().facts.get("schema")
        if known is None:
            found = common.infer_schema(messages)
            if found is None:
                return None
            # Kept, so that all files of the archive have the same columns.
            known = archive.manifest.remember("schema", found.jsonValue())
        return StructType.fromJson(known)


def query_id(checkpoint: str) -> str:
    """Spark's lasting name of a query: with a new checkpoint, batches count from 0 again under another name."""
    text = (local_path(checkpoint) / "metadata").read_text()
    return str(json.loads(text.splitlines()[-1])["id"])


def open_archive(
    root: str | Path, *, format: str = "parquet", staging: str | Path | None = None, catalog: str | None = None
) -> Archive:
    """An archive of a format, as it is or to be made."""
    path = local_path(root)
    if format not in FORMATS:
        raise PipelineError(f"there is no format {format!r}, only {', '.join(FORMATS)}")
    table: Table | None = None
    if format == "delta":
        from flintmq.spark.pipelines.lake import DeltaLog

        table = DeltaLog(path)
    elif format == "iceberg":
        from flintmq.spark.pipelines.lake import IcebergTable

        table = IcebergTable(path, catalog)
    found = Archive(path, table=table, staging=staging)
    if (was := found.manifest.snapshot().facts.get("format", format)) != format:
        raise PipelineError(f"{path} is an archive of format {was}, not {format}")
    return found


def read(
    spark: SparkSession,
    root: str | Path,
    *,
    format: str = "parquet",
    catalog: str | None = None,
    wanted: Callable[[DataFile], bool] | None = None,
) -> DataFrame:
    """The messages of an archive: exactly the live files, with the columns topic, date and hour.

    What is live is decided by this call. `wanted` leaves files of a Parquet archive out before they are opened.
    """
    folder = open_archive(root, format=format, catalog=catalog)
    if format == "parquet":
        files = [file.path for file in folder.snapshot().files.values() if wanted is None or wanted(file)]
    else:
        files = folder.table.live()
    return read_files(spark, folder.root, files)


def read_files(spark: SparkSession, root: Path, files: Sequence[str]) -> DataFrame:
    """The messages of some files of an archive."""
    from pyspark.sql.types import DateType, IntegerType, StringType, StructType

    if not files:
        raise PipelineError(f"{root} has no messages, or none of the wanted time")
    # Given, not inferred: a topic called 2026 is a text. The newest file has the newest columns.
    newest = max(files, key=lambda path: (root / path).stat().st_mtime_ns)
    written = spark.read.parquet(str(root / newest)).schema
    schema = StructType([field for field in written if field.name not in ("topic", "date", "hour")])
    schema = schema.add("topic", StringType()).add("date", DateType()).add("hour", IntegerType())
    paths = [str(root / path) for path in sorted(files)]
    return spark.read.schema(schema).option("basePath", str(root)).parquet(*paths)


def compact(
    root: str | Path,
    *,
    format: str = "parquet",
    target_bytes: int = 128 * _MEBIBYTE,
    older_than: float = 7200.0,
    staging: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[int, int]:
    """Merge the small files of hours that ended `older_than` seconds ago. How many files became how many."""
    if format == "iceberg":
        raise PipelineError("small files of an Iceberg table are merged by an engine that can rewrite it, not by this")
    folder = open_archive(root, format=format, staging=staging)
    folder.prepare()
    if format == "delta":
        from flintmq.spark.pipelines.lake import DeltaLog

        return DeltaLog(folder.root).compact(target_bytes)
    closed = datetime.datetime.fromtimestamp(time.time() - older_than, datetime.UTC)
    return folder.merge(target_bytes, closed, progress)


def check_schema(schema: str) -> None:
    from pyspark.sql.types import StructType

    try:
        StructType.fromDDL(schema)
    except Exception as exc:
        text = f"--schema {schema!r} is not a schema such as 'id BIGINT, name STRING': {common.explain(exc)}"
        raise PipelineError(text) from exc


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Archive topics: files by topic, date and hour of publishing, each message exactly once."
    parser.add_argument("--to", metavar="DIR", required=True, help="the archive, made where missing")
    parser.add_argument("--format", choices=FORMATS, default="parquet", help="of the archive (default %(default)s)")
    parser.add_argument("--decode", action="store_true", help="also keep what the messages' JSON says, as column data")
    parser.add_argument(
        "--schema", metavar="DDL", help="of that JSON, as 'id BIGINT, name STRING' (default: as found first)"
    )
    parser.add_argument("--staging", metavar="DIR", help="where files are written first (default: beside the archive)")
    parser.add_argument(
        "--catalog", metavar="NAME", help="of pyiceberg's configuration (default: a file in the archive)"
    )
    parser.add_argument(
        "--new-query", action="store_true", help="add to an archive that has messages, from a checkpoint of its own"
    )
    parser.add_argument(
        "--compact", action="store_true", help="merge small files of closed hours instead of archiving; needs no Spark"
    )
    parser.add_argument(
        "--compact-size", metavar="MIB", type=int, default=128, help="of merged files (default %(default)s MiB)"
    )
    parser.add_argument(
        "--compact-after",
        metavar="DURATION",
        type=common.duration,
        default=7200.0,
        help="how long ago an hour must have ended (default 2h)",
    )
    common.source_arguments(parser, nargs="*")
    common.stream_arguments(parser)
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.compact:
        return _run_compact(arguments)
    common.need_topics(arguments)
    status = common.check_topics(arguments)
    spark = common.open_session(arguments, "flintmq archive")
    summary = archive(
        spark,
        common.stream_reader(arguments),
        arguments.to,
        format=arguments.format,
        checkpoint=arguments.checkpoint,
        decode=arguments.decode,
        schema=arguments.schema,
        once=arguments.once,
        every=arguments.every,
        staging=arguments.staging,
        catalog=arguments.catalog,
        new_query=arguments.new_query,
        quiet=False,
    )
    if arguments.format == "parquet" and not arguments.remote:
        live = Archive(arguments.to).snapshot()
        summary.details = {"archive": str(local_path(arguments.to)), "files": len(live.files)}
        summary.details |= {"archived": live.rows, "bytes": live.bytes}
    common.print_summary(summary, as_json=arguments.json)
    return status


def _run_compact(arguments: argparse.Namespace) -> int:
    with common.Display("compact") as display:
        before, after = compact(
            arguments.to,
            format=arguments.format,
            target_bytes=arguments.compact_size * _MEBIBYTE,
            older_than=arguments.compact_after,
            staging=arguments.staging,
            progress=lambda done, of: display.show(f"{done} of {of} folders"),
        )
    if arguments.json:
        sys.stdout.write(json.dumps({"pipeline": "compact", "merged": before, "into": after}) + "\n")
    else:
        sys.stdout.write(f"compact: {before:,} files became {after:,}\n" if before else "compact: nothing to merge\n")
    return 0
