"""``format("nsq")``: the data source that Spark knows, and its readers.

Spark makes readers in several processes and pickles them around. So a reader holds nothing but options until it is
asked for offsets; what it then opens (a Planner or a Spooler) stays in that process. What an executor needs is in the
partition. Planning a batch read asks and changes nothing: Spark does it again for a mere ``explain()``.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from flintmq.errors import OptionError, SpoolError
from flintmq.spark.log_mode.topic_log import Limits, Planner, fetch, reads_from
from flintmq.spark.shipped.columns import COLUMNS, SCHEMA
from flintmq.spark.shipped.net import Cluster, Web
from flintmq.spark.shipped.offsets import Range, cut, read_offset
from flintmq.spark.shipped.options import SourceOptions, check_names, read_sink_options, read_source_options
from flintmq.spark.shipped.where import chosen
from flintmq.spark.sink import BatchWriter, StreamWriter
from flintmq.spark.spool_mode.filling import Spooler
from flintmq.spark.spool_mode.spool import Spool, default_location, plan_rows, read_pieces, spool_id, spool_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["NsqDataSource"]

logger = logging.getLogger("flintmq.spark")

#: Seconds without a message after which AvailableNow asks whether the channel is empty, and seconds until it gives up.
_IDLE_SECONDS = 2.0
_DRAIN_SECONDS = 600.0


class NsqDataSource(DataSource):
    """Topics as tables: ``spark.readStream.format("nsq")``, ``spark.read``, ``df.write``, ``df.writeStream``."""

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> str:
        # Asked for when a table is loaded: the first moment at which a misspelt option can be told.
        check_names(self.options)
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(read_source_options(self.options, streaming=False), _names(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(read_source_options(self.options, streaming=True), _names(schema))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return BatchWriter(read_sink_options(self.options), _columns(schema), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return StreamWriter(read_sink_options(self.options), _columns(schema), overwrite)


def _columns(schema: StructType) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def _names(schema: StructType) -> tuple[str, ...]:
    """Return the columns that a table is to have: all of them, unless a user's schema names some."""
    known = dict(zip(COLUMNS, (part.split()[1].lower() for part in SCHEMA.split(", ")), strict=True))
    found = _columns(schema)
    if not found or any(known.get(name) != kind for name, kind in found.items()):
        raise OptionError(f'format "nsq" has the columns {SCHEMA}: a schema that is given names some or all of these')
    return tuple(found)


class LogPartition(InputPartition):
    """A range, and where to fetch it."""

    def __init__(self, range: Range, address: str, reader: str) -> None:
        self.range = range
        self.address = address
        self.reader = reader


class SpoolPartition(InputPartition):
    """Rows of a spool, and the machine that planned it."""

    def __init__(self, pieces: list[Any], planned_on: str) -> None:
        self.pieces = pieces
        self.planned_on = planned_on


def _read(partition: InputPartition, options: SourceOptions, names: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition with these columns."""
    wanted = frozenset(names) if options.columns is None else options.columns & frozenset(names)
    found: Iterator[pa.RecordBatch] = iter(())
    if isinstance(partition, LogPartition):
        found = fetch(partition.range, partition.address, replace(options, columns=wanted), partition.reader)
    elif isinstance(partition, SpoolPartition):
        pieces = read_pieces(partition.pieces, options.batch_rows, partition.planned_on)
        found = (part for batch in pieces for part in chosen(batch, options.where, wanted))
    # Where there is nothing to read, Spark makes a partition of its own that stands for nothing.
    for batch in found:
        yield batch if names == COLUMNS else batch.select(names)


def _log_partitions(planned: list[tuple[Range, str]], reader: str = "") -> list[InputPartition]:
    return [LogPartition(found, address, reader) for found, address in planned]


def _spool_partitions(location: str, first: int, stop: int, options: SourceOptions) -> list[InputPartition]:
    if first >= stop:
        return []
    here = socket.gethostname()
    return [
        SpoolPartition(plan_rows(location, piece.first, piece.stop), here)
        for piece in cut([Range("", "", "", first, stop)], options.min_partitions, options.max_records)
    ]


def _find_mode(options: SourceOptions) -> str:
    """``mode=auto``: log, if every broker has one. Where lookupds tell the topics, brokers with others do not count."""
    if options.mode != "auto":
        return options.mode
    web = Web(options.network)
    try:
        brokers = Cluster(options.network, web).brokers()
    finally:
        web.close()
    concerned = [broker for broker in brokers if reads_from(options, broker)] or brokers
    plain = [broker for broker in concerned if not broker.has_log]
    if not plain:
        return "log"
    if not options.channel:
        raise OptionError(
            f"nsqd {plain[0].tcp or plain[0].http} keeps no log that can be read by offsets, so it is consumed into a "
            "spool: name a channel by the option channel"
        )
    return "spool"


# --- Batches ----------------------------------------------------------------------------------------------------------


class BatchReader(DataSourceReader):
    """``spark.read``: everything between two offsets, as it is when the query is planned."""

    def __init__(self, options: SourceOptions, names: tuple[str, ...] = COLUMNS) -> None:
        self._options = options
        self._names = names

    def partitions(self) -> list[InputPartition]:
        options = self._options
        if options.mode == "spool":
            first, stop = spool_rows(options.spool_location)
            return _spool_partitions(options.spool_location, first, stop, options)
        planner = Planner(options)
        try:
            return _log_partitions(planner.snapshot())
        finally:
            planner.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._options, self._names)


# --- Streams ----------------------------------------------------------------------------------------------------------


class SpoolReader:
    """The stream of a spool, in the process that fills it.

    Nothing is consumed before the spool is known to be the checkpoint's. Spark shows its checkpoint late: where a
    query begins is asked before, of one that has not finished its first batch. So consuming begins when the end of a
    batch is asked for, with a start that is an offset of this spool.
    """

    def __init__(self, options: SourceOptions, offset: Mapping[str, Any] | None = None) -> None:
        if not options.channel:
            raise OptionError("spool mode consumes a channel: name it by the option channel")
        if options.starting is not None and options.starting.kind != "earliest":
            raise OptionError("spool mode has no startingOffsets but earliest: a channel knows where it stands")
        self._options = options
        self._location = options.spool_location or default_location(options)
        if offset is not None and spool_id(self._location) != (wanted := read_offset(offset, "spool")["spool"]):
            # Told before the folder is made, if it is not there.
            raise self._another(wanted)
        self._spool = Spool(self._location)
        self._spooler = Spooler(options, self._spool)
        self._started = False
        # With trigger AvailableNow: to be found out, and what it is.
        self._wants_target = False
        self._target: int | None = None
        self._last_batch = time.monotonic()

    def initial_offset(self) -> dict[str, Any]:
        return self._offset(self._spool.done)

    def fix_target(self) -> None:
        self._wants_target = True

    def _consume(self) -> None:
        """Begin to fill the spool, if that was not done; with a target, until it has all there is."""
        if not self._started:
            self._started = True
            self._spooler.start()
            self._spooler.wait_connected(self._options.network.timeout)
        if self._wants_target:
            self._wants_target = False
            self._spooler.wait_idle(max(_IDLE_SECONDS, 2 * self._options.spool_flush_interval), _DRAIN_SECONDS)
            self._target = self._spool.end

    def latest_offset(self, start: dict[str, Any], limits: Limits | None) -> dict[str, Any]:
        at = self._row(start)
        self._consume()
        self._spooler.check()
        end = self._spool.end if self._target is None else min(self._spool.end, self._target)
        if self._spooler.is_full and at == end:
            # Spark commits a batch when it plans the next one, and there will be none: the spool takes nothing more
            # until something goes. But who asks for the next batch has finished the last.
            self._spooler.forget(at)
        if limits is not None:
            waited = time.monotonic() - self._last_batch
            if self._target is None and end - at < limits.least and waited < self._options.max_delay:
                return start
            if limits.rows:
                end = min(end, at + limits.rows)
            if limits.bytes and self._spool.end > self._spool.done:
                mean = max(1.0, self._spool.size / (self._spool.end - self._spool.done))
                end = min(end, at + max(1, int(limits.bytes / mean)))
        if end <= at:
            return start
        self._last_batch = time.monotonic()
        return {**self._offset(end), "last": self._spool.id_at(end - 1)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        stop, last = self._row(end), str(end.get("last") or "")
        found = self._spool.id_at(stop - 1)
        if last and found and found != last:
            raise SpoolError(
                f"the spool in {self._location} has other messages in its rows up to {stop} than when the batch was "
                "planned: it was restored from a backup. Restore the checkpoint of the same time, or start with a new "
                "checkpoint and a new spool"
            )
        return _spool_partitions(self._location, self._row(start), stop, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        self._spooler.forget(self._row(end))

    def report(self) -> dict[str, Any] | None:
        # Nothing else of the progress says what a spool is filled from.
        return {**self._offset(self._spool.end), "topics": list(self._options.topics)}

    def close(self) -> None:
        self._spooler.close()
        self._spool.close()

    def _offset(self, row: int) -> dict[str, Any]:
        return {"v": 1, "mode": "spool", "spool": self._spool.id, "o": row}

    def _row(self, offset: Mapping[str, Any]) -> int:
        read = read_offset(offset, "spool")
        if read["spool"] != self._spool.id:
            raise self._another(read["spool"])
        return int(read["o"])

    def _another(self, wanted: str) -> SpoolError:
        return SpoolError(
            f"the checkpoint belongs to another spool than the one in {self._location}: set spoolLocation to the "
            f"folder of spool {wanted}, or start with a new checkpoint"
        )


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """``spark.readStream``: one of these answers Spark's questions, others of its kind read partitions."""

    def __init__(self, options: SourceOptions, names: tuple[str, ...] = COLUMNS) -> None:
        self._options = options
        self._names = names
        self._engine: Planner | SpoolReader | None = None
        self._available_now = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark ends this process by SIGTERM and calls nobody. This is the first it asks for, in the main thread.
        _stop_on_sigterm()
        options = self._options
        if options.max_messages:
            return ReadMaxRows(options.max_messages)
        if options.max_bytes:
            return ReadMaxBytes(options.max_bytes)
        return ReadMinRows(options.min_messages) if options.min_messages else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        # The checkpoint, which Spark shows later, says what kind of source it is: the target is set then.
        self._available_now = True

    def initialOffset(self) -> dict[str, Any]:
        return self._open(None).initial_offset()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        engine = self._open(start)
        if isinstance(limit, ReadAllAvailable):
            return engine.latest_offset(start, None)
        options = self._options
        # Spark knows one limit at a time; the options may set several.
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else options.max_messages
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else options.max_bytes
        return engine.latest_offset(start, Limits(rows, size, options.min_messages))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._engine is None else self._engine.report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        engine = self._open(end)
        if isinstance(engine, Planner):
            return _log_partitions(engine.partitions(start, end), engine.reader)
        return engine.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._options, self._names)

    def commit(self, end: dict[str, Any]) -> None:
        self._open(end).commit(end)

    def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _open(self, offset: Mapping[str, Any] | None) -> Planner | SpoolReader:
        """What answers for this query, opened at the first question; its kind is the checkpoint's, if there is one."""
        if self._engine is None:
            mode = str(offset.get("mode")) if offset and self._options.mode == "auto" else _find_mode(self._options)
            self._engine = SpoolReader(self._options, offset) if mode == "spool" else Planner(self._options)
        if self._available_now:
            self._available_now = False
            self._engine.fix_target()
        return self._engine


def _stop_on_sigterm() -> None:
    """Have Spark's worker run its ``finally`` when it is told to end, so that ``stop()`` is called."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_exit)


def _raise_exit(number: int, frame: object) -> None:
    # Once is enough: the second must not break off what the first has begun.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)
