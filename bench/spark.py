"""``python -m bench.spark``: how fast Spark reads and writes topics, beside what its Python sources can do at most.

The ceiling is a source of the same shape that makes its rows in the reader: no broker, no network. Each scenario runs
on all its sides in turn, round after round, so that whatever else slows the machine down hits all of them. CPU is that
of all processes, Spark's and the broker's: on a machine that others use, too, it says more than rates. Needs pyspark,
pyarrow and Java. Spark is started once, with as many cores as the machine has.

``--latency SECONDS`` measures something else: how long a message takes from its PUB to a function of foreachBatch, at
a steady rate, with the defaults of the broker and of the source. Beside it, in turn, is a source without a broker: its
rows exist from the moment that the rate says, and take what Spark's own batches take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming import DataStreamWriter
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from flintmq.spark.pipelines.common import pair
from flintmq.spark.shipped.files import Place

from .daemons import Daemon, Side, fresh

BATCH_ROWS = 10_000
#: The part of a topic that is asked for by its time.
LAST = 0.005
SCHEMA = (
    "value BINARY, topic STRING, node STRING, offset BIGINT, id STRING, timestamp TIMESTAMP, timestamp_ns BIGINT, "
    "attempts INT"
)


# --- The ceiling ------------------------------------------------------------------------------------------------------


class Slice(InputPartition):
    def __init__(self, first: int, stop: int) -> None:
        self.first = first
        self.stop = stop


def generated_rows(part: Slice, size: int) -> Iterator[Any]:
    """Rows as ours are: random bodies, numbers that go up, the rest constant."""
    import numpy
    import pyarrow as pa

    bodies = numpy.random.default_rng(part.first).integers(0, 256, BATCH_ROWS * size, dtype=numpy.uint8).tobytes()
    begins = pa.py_buffer(numpy.arange(0, (BATCH_ROWS + 1) * size, size, dtype=numpy.int32))
    topic, node = pa.repeat("orders", BATCH_ROWS), pa.repeat("0" * 32, BATCH_ROWS)
    id_begins = pa.py_buffer(numpy.arange(0, (BATCH_ROWS + 1) * 16, 16, dtype=numpy.int32))
    nothing = pa.nulls(BATCH_ROWS, pa.int32())
    names = [field.split()[0] for field in SCHEMA.split(", ")]
    for first in range(part.first, part.stop, BATCH_ROWS):
        rows = min(BATCH_ROWS, part.stop - first)
        seqs = numpy.arange(first, first + rows, dtype=numpy.int64)
        ids = b"".join([b"%016x" % seq for seq in range(first, first + rows)])
        times = numpy.full(rows, 1_770_000_000_000_000_000, dtype=numpy.int64)
        yield pa.record_batch(
            [
                pa.Array.from_buffers(pa.binary(), rows, [None, begins, pa.py_buffer(bodies)]),
                topic.slice(0, rows),
                node.slice(0, rows),
                pa.array(seqs),
                pa.Array.from_buffers(pa.string(), rows, [None, id_begins, pa.py_buffer(ids)]),
                pa.array(times // 1000, pa.timestamp("us", tz="UTC")),
                pa.array(times),
                nothing.slice(0, rows),
            ],
            names=names,
        )


def slices(first: int, stop: int, count: int) -> list[InputPartition]:
    return [Slice(first + (stop - first) * n // count, first + (stop - first) * (n + 1) // count) for n in range(count)]


class GeneratedReader(DataSourceReader):
    def __init__(self, rows: int, partitions: int, size: int) -> None:
        self._rows, self._partitions, self._size = rows, partitions, size

    def partitions(self) -> list[InputPartition]:
        return slices(0, self._rows, self._partitions)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Slice)
        return generated_rows(partition, self._size)


class GeneratedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, rows: int, per_batch: int, partitions: int, size: int) -> None:
        self._rows, self._per_batch, self._partitions, self._size = rows, per_batch, partitions, size

    def initialOffset(self) -> dict[str, int]:
        return {"o": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"o": min(self._rows, start["o"] + self._per_batch)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return slices(start["o"], end["o"], self._partitions) if start != end else []

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Slice)
        return generated_rows(partition, self._size)


class ClockStream(DataSourceStreamReader):
    """Rows that exist from the moment that a rate says; each begins with that moment."""

    def __init__(self, rate: int, size: int) -> None:
        self._rate, self._size = rate, size

    def initialOffset(self) -> dict[str, int]:
        return {"o": int(time.time() * self._rate)}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"o": int(time.time() * self._rate)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [Slice(start["o"], end["o"])] if start != end else []

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Slice)
        import pyarrow as pa

        moments = (number / self._rate for number in range(partition.first, partition.stop))
        values = pa.array([struct.pack(">d", moment).ljust(self._size, b".") for moment in moments], pa.binary())
        empty = {field.split()[0]: field.split()[1] for field in SCHEMA.split(", ")}
        kinds = {"STRING": pa.string(), "BIGINT": pa.int64(), "INT": pa.int32(), "TIMESTAMP": pa.timestamp("us", "UTC")}
        rest = [pa.nulls(len(values), kinds[kind]) for name, kind in empty.items() if name != "value"]
        yield pa.record_batch([values, *rest], names=list(empty))


class DiscardingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for batch in iterator:
            batch.column("value").to_pylist()
        return WriterCommitMessage()


class DiscardingStream(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for batch in iterator:
            batch.column("value").to_pylist()
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass


class Generated(DataSource):
    @classmethod
    def name(cls) -> str:
        return "generated"

    def schema(self) -> str:
        return SCHEMA

    def _numbers(self, *names: str) -> list[int]:
        return [int(self.options[name]) for name in names]

    def reader(self, schema: Any) -> DataSourceReader:
        return GeneratedReader(*self._numbers("rows", "partitions", "size"))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        if "rate" in self.options:
            return ClockStream(*self._numbers("rate", "size"))
        return GeneratedStream(*self._numbers("rows", "perBatch", "partitions", "size"))

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        return DiscardingWriter()

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:
        return DiscardingStream()


# --- The scenarios ----------------------------------------------------------------------------------------------------


class Bench:
    """One session, one broker with a full topic, and the same rows as Parquet."""

    def __init__(self, options: argparse.Namespace, spark: SparkSession, daemon: Daemon, folder: Path) -> None:
        self._rows, self._size, self._cores = options.rows, options.size, options.cores
        self._spark, self._daemon, self._folder = spark, daemon, folder
        self._names = 0
        # Another place for archives, or none.
        self._elsewhere = Place.of(options.to, dict(options.storage_option)) if options.to else None
        # What the last part of the topic is, and how many rows it has.
        self._edge = ""
        self._late_rows = 0

    def prepare(self) -> None:
        """Fill the topic through the sink, wait until it is durable, and write the same rows as Parquet."""
        # It keeps the log: else files go once the first stream is past them.
        self._daemon.create_channel("orders", "holder")
        self._publish(self._generated(), "orders")
        self._wait_durable()
        self._topic().write.parquet(str(self._folder / "source"))

    def scenarios(self) -> dict[str, dict[str, Callable[[], float]]]:
        """By scenario and side: run it once, and say how long it took."""
        per_batch = max(1, self._rows // 5)
        return {
            "batch read, noop": {
                "topic": lambda: self._timed(lambda: self._noop(self._topic())),
                "ceiling": lambda: self._timed(lambda: self._noop(self._generated())),
                "parquet": lambda: self._timed(lambda: self._noop(self._parquet())),
            },
            "batch read, to Parquet": {
                "topic": lambda: self._timed(lambda: self._to_parquet(self._topic())),
                "ceiling": lambda: self._timed(lambda: self._to_parquet(self._generated())),
                "parquet": lambda: self._timed(lambda: self._to_parquet(self._parquet())),
            },
            "batch write": {
                "topic": lambda: self._timed(lambda: self._publish(self._generated(), self._new_name())),
                "at least once": lambda: self._timed(
                    lambda: self._publish(self._generated(), self._new_name(), idempotent="false")
                ),
                "ceiling": lambda: self._timed(lambda: self._discard(self._generated())),
            },
            "last of a topic, count": {
                "where": lambda: self._timed(lambda: self._count(self._topic(where=self._late()))),
                "count()": lambda: self._timed(lambda: self._by_index(self._late())),
                "whole": lambda: self._timed(lambda: self._count(self._topic().where(self._late()))),
            },
            "largest offset": {
                "columns": lambda: self._timed(lambda: self._largest(self._topic(columns="offset"))),
                "schema": lambda: self._timed(lambda: self._largest(self._topic("offset BIGINT"))),
                "whole": lambda: self._timed(lambda: self._largest(self._topic())),
            },
            "replay": {
                "tasks": lambda: self._timed(self._replay),
                "ordered": lambda: self._timed(lambda: self._replay(ordered=True)),
                "whole": lambda: self._timed(lambda: self._publish(self._topic(), self._new_name())),
            },
            "stream, noop": {
                "topic": lambda: self._stream("nsq", {**self._where(), "maxMessagesPerTrigger": str(per_batch)}),
                "ceiling": lambda: self._stream("generated", {**self._shape(), "perBatch": str(per_batch)}),
            },
            "archive, Delta": self._archives(self._folder / "archives"),
            **({"archive, Delta at --to": self._archives(self._elsewhere)} if self._elsewhere else {}),
            "stream write": {
                side: lambda to=to: self._stream("generated", {**self._shape(), "perBatch": str(per_batch)}, *to())
                for side, to in {
                    "topic": lambda: ("nsq", self._target(self._new_name())),
                    "at least once": lambda: ("nsq", {**self._target(self._new_name()), "idempotent": "false"}),
                    "ceiling": lambda: ("generated", {}),
                }.items()
            },
        }

    def _archives(self, to: Path | Place) -> dict[str, Callable[[], float]]:
        """A topic into a new Delta table, as ``flintmq pipeline archive --once`` does it, and rows without a broker."""
        per_batch = max(1, self._rows // 5)
        topic = {**self._where(), "maxMessagesPerTrigger": str(per_batch)}
        shape = {**self._shape(), "perBatch": str(per_batch)}

        def stream(name: str, options: dict[str, str]) -> Callable[[SparkSession], DataFrame]:
            return lambda spark: spark.readStream.format(name).options(**options).load()

        return {
            "topic": lambda: self._timed(lambda: self._archive(stream("nsq", topic), to)),
            "ceiling": lambda: self._timed(lambda: self._archive(stream("generated", shape), to)),
            "Spark's Parquet sink": lambda: self._timed(
                lambda: self._archive(stream("generated", shape), self._folder / "archives", "parquet")
            ),
        }

    def _archive(self, source: Callable[[SparkSession], DataFrame], to: Path | Place, format: str = "delta") -> None:
        from flintmq.spark.pipelines.archive import Target, archive

        name = self._new_name()
        target = Target(Place.of(to / name) if isinstance(to, Path) else to / name, format)
        checkpoint = self._folder / f"checkpoint-{name}"
        summary = archive(self._spark, source, target, checkpoint=checkpoint, once=True)
        if summary.rows != self._rows:
            raise SystemExit(f"bench: {summary.rows} rows were archived, not {self._rows}")
        if isinstance(to, Path):
            shutil.rmtree(to / name)
        shutil.rmtree(checkpoint)

    def _where(self) -> dict[str, str]:
        return {
            "nsq.nsqd.addresses": f"127.0.0.1:{self._daemon.port}",
            "subscribe": "orders",
            "startingOffsets": "earliest",
            "minPartitions": str(self._cores),
        }

    def _shape(self) -> dict[str, str]:
        return {"rows": str(self._rows), "partitions": str(self._cores), "size": str(self._size)}

    def _topic(self, schema: str = "", **more: str) -> DataFrame:
        reader = self._spark.read.format("nsq").options(**self._where(), **more)
        return (reader.schema(schema) if schema else reader).load()

    def _late(self) -> str:
        """The condition for the last part of the topic, by the time."""
        if not self._edge:
            first = self._topic().selectExpr("min(offset) AS first").collect()[0]["first"]
            row = self._topic(where=f"offset = {first + round(self._rows * (1 - LAST))}").collect()[0]
            self._edge = f"timestamp_ns >= {row['timestamp_ns']}"
        return self._edge

    def _count(self, frame: DataFrame) -> None:
        found = frame.count()
        self._late_rows = self._late_rows or found
        if not 0 < found == self._late_rows:
            raise SystemExit(f"bench: {found} rows are late, and not {self._late_rows}")

    def _by_index(self, where: str) -> None:
        from flintmq.spark import count

        found = count({**self._where(), "where": where})
        if found != self._late_rows:
            raise SystemExit(f"bench: {found} rows are late, and not {self._late_rows}")

    def _largest(self, frame: DataFrame) -> None:
        frame.selectExpr("max(offset)").collect()

    def _replay(self, ordered: bool = False) -> None:
        from flintmq.spark.pipelines import replay

        source = {key: value for key, value in self._where().items() if key != "startingOffsets"}
        checkpoint = self._folder / self._new_name()
        size = replay.ORDERED_CHUNK_MESSAGES if ordered else replay.CHUNK_MESSAGES
        summary = replay.replay(
            self._spark,
            lambda: replay.log_chunks({**source, "minPartitions": "1"}, size=size),
            replay.log_reader(source),
            self._new_name(),
            {"nsq.nsqd.addresses": source["nsq.nsqd.addresses"]},
            checkpoint,
            ordered=ordered,
        )
        if summary.rows != self._rows:
            raise SystemExit(f"bench: {summary.rows} rows were replayed, not {self._rows}")
        shutil.rmtree(checkpoint)

    def _generated(self) -> DataFrame:
        return self._spark.read.format("generated").options(**self._shape()).load()

    def _parquet(self) -> DataFrame:
        return self._spark.read.parquet(str(self._folder / "source"))

    def _new_name(self) -> str:
        self._names += 1
        return f"out-{self._names}"

    def _timed(self, run: Callable[[], None]) -> float:
        before = time.monotonic()
        run()
        return time.monotonic() - before

    def _noop(self, frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def _to_parquet(self, frame: DataFrame) -> None:
        path = self._folder / self._new_name()
        frame.write.parquet(str(path))
        shutil.rmtree(path)

    def _target(self, topic: str) -> dict[str, str]:
        return {"nsq.nsqd.addresses": f"127.0.0.1:{self._daemon.port}", "topic": topic}

    def _publish(self, frame: DataFrame, topic: str, **options: str) -> None:
        frame.select("value").write.format("nsq").options(**self._target(topic), **options).mode("append").save()

    def _discard(self, frame: DataFrame) -> None:
        frame.select("value").write.format("generated").mode("append").save()

    def _stream(
        self, name: str, options: dict[str, str], sink: str = "noop", sink_options: dict[str, str] | None = None
    ) -> float:
        """The time its batches took, without what comes once: the start of a query takes seconds."""
        checkpoint = self._folder / self._new_name()
        frame = self._spark.readStream.format(name).options(**options).load()
        query = (
            (frame if sink == "noop" else frame.select("value"))
            .writeStream.format(sink)
            .options(**(sink_options or {}))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        shutil.rmtree(checkpoint, ignore_errors=True)
        progress = [found for found in query.recentProgress if found.numInputRows]
        rows = sum(found.numInputRows for found in progress)
        if rows != self._rows:
            raise SystemExit(f"bench: the stream had {rows} rows, not {self._rows}")
        return sum(found.durationMs["triggerExecution"] for found in progress) / 1000

    def _wait_durable(self) -> None:
        give_up = time.monotonic() + 120
        while self._topic().count() != self._rows:
            if time.monotonic() > give_up:
                raise SystemExit("bench: the topic does not hold what was published")
            time.sleep(0.5)


# --- Latency ----------------------------------------------------------------------------------------------------------


#: Seconds, and batches, before a latency counts: a JVM has to compile what a batch runs.
WARM_UP = 10.0
WARM_BATCHES = 30


def publish_steadily(port: int, rate: int, size: int, over: Event) -> None:
    """Publish messages one by one until it is over, at the moments that the rate says; each begins with its time."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"  V2")
        begun = time.monotonic()
        sent = 0
        while not over.is_set():
            now = time.monotonic() - begun
            while sent < now * rate:
                body = struct.pack(">d", time.time()).ljust(size, b".")
                connection.sendall(b"PUB latency\n" + struct.pack(">I", len(body)) + body)
                sent += 1
            connection.setblocking(False)
            try:
                # Answers are of no interest, but must not pile up.
                while connection.recv(1 << 16):
                    pass
            except BlockingIOError:
                pass
            connection.setblocking(True)
            time.sleep(0.0005)


def measure_latency(
    spark: SparkSession, daemon: Daemon, folder: Path, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Seconds from PUB until foreachBatch is called, and until its function has the rows: median and the like."""
    daemon.create_channel("latency", "holder")
    topic = {"nsq.nsqd.addresses": f"127.0.0.1:{daemon.port}", "subscribe": "latency"}
    clock = {"rate": str(options.rate), "size": str(options.size)}
    found: dict[str, list[float]] = {}
    for turn in range(options.repeat):
        for side, name, where in (("topic", "nsq", topic), ("ceiling", "generated", clock)):
            query = spark.readStream.format(name).options(**where).load().writeStream
            called, read = one_latency(query, daemon, folder / f"latency-{side}-{turn}", options, side == "topic")
            found.setdefault(f"{side}, it is called", []).extend(called)
            found.setdefault(f"{side}, it has the rows", []).extend(read)
    result = {}
    for name, times in found.items():
        cuts = statistics.quantiles(times, n=100)
        result[name] = {"count": len(times), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(times)}
    return result


def one_latency(
    writer: DataStreamWriter, daemon: Daemon, checkpoint: Path, options: argparse.Namespace, publishes: bool
) -> tuple[list[float], list[float]]:
    called: list[float] = []
    read: list[float] = []
    since = float("inf")
    batches = 0

    def take(rows: DataFrame, batch: int) -> None:
        nonlocal batches
        at = time.time()
        batches = batch + 1
        bodies = [bytes(row.value) for row in rows.select("value").collect()]
        had = time.time()
        published = [float(struct.unpack_from(">d", body)[0]) for body in bodies]
        called.extend(at - sent for sent in published if sent >= since)
        read.extend(had - sent for sent in published if sent >= since)

    query = writer.foreachBatch(take).option("checkpointLocation", str(checkpoint)).start()
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    publisher = context.Process(target=publish_steadily, args=(daemon.port, options.rate, options.size, over))
    if publishes:
        publisher.start()
    time.sleep(WARM_UP)
    give_up = time.monotonic() + 300
    while batches < WARM_BATCHES and time.monotonic() < give_up and query.isActive:
        time.sleep(0.1)
    since = time.time()
    time.sleep(options.latency)
    over.set()
    if publishes:
        publisher.join()
    give_up = time.monotonic() + 60
    expected = 0.9 * options.rate * options.latency
    while len(read) < expected and time.monotonic() < give_up and query.isActive:
        time.sleep(0.5)
    query.stop()
    if len(read) < expected:
        raise SystemExit(f"bench: of {expected:.0f} messages {len(read)} came")
    return called, read


def report_latency(found: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    table = Table(title=f"from PUB to foreachBatch, {options.rate:,} messages/s of {options.size} bytes, seconds")
    for column in ("until", "messages", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if column == "until" else "right")
    for name, numbers in found.items():
        shown = [f"{numbers[key]:.2f}" for key in ("p50", "p90", "p99", "max")]
        table.add_row(name, f"{numbers['count']:,}", *shown)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    if options.json:
        options.json.write_text(json.dumps({"latency": found, "rate": options.rate}, indent=1))


def main() -> int:
    options = parse_options()
    console = Console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix="flintmq-bench-spark-"))
    try:
        with console.status("starting Spark"):
            spark = make_session(options.cores, options.executors, folder)
        with fresh(Side.ours(None, "os")) as daemon:
            if options.latency:
                with console.status(f"{options.rate} messages a second for {options.latency:g} s"):
                    found = measure_latency(spark, daemon, folder, options)
                spark.stop()
                report_latency(found, options)
                return 0
            bench = Bench(options, spark, daemon, folder)
            if any(not name.endswith("write") for name in bench.scenarios() if options.only in name):
                with console.status(f"publishing {options.rows} messages of {options.size} bytes"):
                    bench.prepare()
            samples = measure(bench, options, console)
        spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(samples, options)
    return 0


def make_session(cores: int, executors: int, folder: Path) -> SparkSession:
    """``executors``: so many processes with one core each. None: Spark's tasks are threads of this one."""
    from flintmq.spark import register

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    source = str(Path(__file__).resolve().parent.parent / "src")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    spark: SparkSession = (
        SparkSession.builder.master(f"local-cluster[{executors},1,1536]" if executors else f"local[{cores},4]")
        .appName("flintmq bench")
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        # A busy machine is slow to start a Python.
        .config("spark.python.authenticate.socketTimeout", "180s")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(Generated)
    register(spark)
    return spark


def measure(bench: Bench, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """All sides of a scenario in turn, once to warm up and then ``repeat`` times."""
    scenarios = {name: sides for name, sides in bench.scenarios().items() if options.only in name}
    samples: list[dict[str, Any]] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=(options.repeat + 1) * sum(map(len, scenarios.values())))
        for name, sides in scenarios.items():
            for number in range(options.repeat + 1):
                for side, run in sides.items():
                    progress.update(task, description=f"{name}, {side}, run {number} of {options.repeat}")
                    before = cpu_seconds()
                    seconds = run()
                    used = cpu_seconds() - before
                    if number:
                        found = {"rate": options.rows / seconds, "cpu": used / options.rows * 1e6}
                        samples.append({"scenario": name, "side": side, "run": number, **found})
                    progress.advance(task)
    return samples


def cpu_seconds() -> float:
    """CPU of this process and of all that it started, Spark and the broker, also of those that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            # Its own, and that of children that have ended and were waited for.
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sum(ticks.get(pid, 0) for pid in found) / os.sysconf("SC_CLK_TCK")


def report(samples: list[dict[str, Any]], options: argparse.Namespace) -> None:
    rates: dict[str, dict[str, list[float]]] = {}
    cpu: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        rates.setdefault(sample["scenario"], {}).setdefault(sample["side"], []).append(sample["rate"])
        cpu.setdefault(sample["scenario"], {}).setdefault(sample["side"], []).append(sample["cpu"])
    table = Table(title=f"{options.rows:,} messages of {options.size} bytes, {options.cores} cores, rows/s")
    for column in ("", "side", "median", "best", "of ceiling, whole", "CPU, s/million", "by CPU"):
        table.add_column(column, justify="left" if column in ("", "side") else "right")
    for name, sides in rates.items():
        reference = "ceiling" if "ceiling" in sides else "whole"
        ceiling, least = statistics.median(sides[reference]), statistics.median(cpu[name][reference])
        for side, found in sides.items():
            median = statistics.median(found)
            used = statistics.median(cpu[name][side])
            by_rate, by_cpu = f"{median / ceiling:.2f}", f"{least / used:.2f}"
            table.add_row(name, side, f"{median:,.0f}", f"{max(found):,.0f}", by_rate, f"{used:.2f}", by_cpu)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    if options.json:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "load_average": os.getloadavg()}
        settings = {"rows": options.rows, "size": options.size, "cores": options.cores}
        options.json.write_text(json.dumps({**facts, **settings, "samples": samples}, indent=1))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.spark", description="Spark on topics, beside its ceiling.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="messages (default: a million)")
    parser.add_argument("--size", type=int, default=200, help="bytes of a message (default: 200)")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 2, help="of Spark (default: all)")
    parser.add_argument("--executors", type=int, default=0, help="processes with one core each, instead of --cores")
    parser.add_argument("--repeat", type=int, default=3, help="runs per side, after one to warm up (default: 3)")
    parser.add_argument(
        "--latency", type=float, default=0.0, metavar="SECONDS", help="measure that instead, for so long"
    )
    parser.add_argument("--rate", type=int, default=1000, help="messages a second for --latency (default: 1000)")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios with this in their names")
    parser.add_argument("--to", metavar="URI", help="measure archives there, too, such as s3://bucket/folder")
    parser.add_argument(
        "--storage-option", metavar="KEY=VALUE", type=pair, action="append", default=[], help="for the store of --to"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample")
    options = parser.parse_args()
    options.cores = options.executors or options.cores
    return options


if __name__ == "__main__":
    sys.exit(main())
