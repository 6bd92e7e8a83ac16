"""What Spark calls to write: ``df.write.format("nsq")`` and ``df.writeStream.format("nsq")``.

A writer is made on the driver for each execution of a batch, finds the brokers and is pickled to the tasks. With
brokers that can stage, tasks stage their rows and the driver's ``commit`` makes them visible: each row exactly once.
With others, tasks publish: at least once, and a warning says so when the writer is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from flintmq.errors import ConnectError, FlintError, HttpError, OptionError
from flintmq.spark.shipped.net import Cluster, Web
from flintmq.spark.shipped.options import SinkOptions
from flintmq.spark.sink.chunks import Chunks
from flintmq.spark.sink.commit import Commit, Staged
from flintmq.spark.sink.home import Checkpoint, choose, find, named
from flintmq.spark.sink.publisher import Publisher
from flintmq.spark.sink.staging import Attempt, Broker, Calls, Write, ranked

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BatchWriter", "Published", "StreamWriter"]

logger = logging.getLogger("flintmq.spark")

_AT_LEAST_ONCE = (
    "rows are published at least once, not exactly once: a task that is tried again publishes its rows again, "
    "because %s"
)
_NOT_NAMED = "the checkpoint cannot name the query's home ({}): brokers have to remember it"
_PAUSE = 0.5

T = TypeVar("T")

_said: set[str] = set()


class Published(WriterCommitMessage):
    """What a task did."""

    def __init__(self, rows: int, staged: Staged | None) -> None:
        self.rows = rows
        #: None: its rows are published.
        self.staged = staged


class Job:
    """What all tasks of a write share: the options, the brokers, and how rows get there."""

    def __init__(self, options: SinkOptions, columns: dict[str, str], overwrite: bool) -> None:
        if overwrite:
            raise OptionError(
                'a topic cannot be overwritten, only added to: say mode("append"), or outputMode("append")'
            )
        _check_columns(options, columns)
        self.options = options
        #: One execution of the write.
        self.id = uuid.uuid4().hex
        #: Those that can stage, if staging is wanted; rows go to them alone.
        self.brokers: list[Broker] = []
        #: Who did not answer, and why.
        self.silent: list[str] = []
        #: TCP addresses for publishing, where there is no staging.
        self.addresses: list[str] = []
        #: Who keeps the decisions; None is found out by the tasks.
        self.home: Broker | None = None
        self.trouble = ""

    def prepare(self, find_home: Callable[[], Broker | None], known_home: Callable[[], str]) -> None:
        """Ask for brokers and the home, for as long as an answer may take. Trouble is told by who needs them.

        ``known_home`` names the home if that is written somewhere; ``find_home`` finds it among the brokers.
        """

        def look() -> None:
            self._ask(known_home)
            if self.brokers:
                self.home = find_home()

        try:
            self._patiently(look)
        except (ConnectError, HttpError) as exc:
            self.trouble = str(exc)

    def _patiently(self, look: Callable[[], T]) -> T:
        """Return what ``look`` does when it fails no more because somebody does not answer, or its last error."""
        network = self.options.network
        give_up = time.monotonic() + (network.timeout if network.retries else 0.0)
        while True:
            try:
                return look()
            except (ConnectError, HttpError):
                if time.monotonic() + _PAUSE > give_up:
                    raise
            time.sleep(_PAUSE)

    def _ask(self, known_home: Callable[[], str]) -> None:
        options = self.options
        web = Web(options.network)
        try:
            cluster = Cluster(options.network, web)
            self.addresses = cluster.addresses()
            if options.idempotent == "false":
                _say_once(_AT_LEAST_ONCE % "idempotent=false is set")
                return
            found = cluster.survey()
        finally:
            web.close()
        self.silent = found.failures
        self.brokers = [Broker(one.node, one.http, one.tcp) for one in found.brokers if one.has_stage and one.http]
        plain = [one.tcp or one.http for one in found.brokers if not (one.has_stage and one.http)]
        if self.brokers:
            if plain:
                # Never some batches this way and some that way: a batch that runs again would not be recognised.
                _say_once(f"nsqd {', '.join(plain)} cannot stage rows: rows go to the other brokers")
            return
        if not plain:
            raise ConnectError("; ".join(found.failures) or "the nsqlookupds know no broker to publish to")
        if options.idempotent == "true":
            raise OptionError(
                f"nsqd {plain[0]} cannot stage rows, so that each is published exactly once: use a flintmq broker that "
                "can, or set idempotent=auto to publish at least once"
            )
        if (home := known_home()) or found.silent:
            # One that can stage may be among those: what it has committed would be published once more.
            who = f"{home} keeps the decisions of this query and does not answer" if home else "; ".join(found.silent)
            raise ConnectError(
                f"{who}. Rows are not published to {plain[0]} meanwhile, which cannot stage them: start the other "
                "broker, or set idempotent=false to publish at least once"
            )
        _say_once(_AT_LEAST_ONCE % f"nsqd {plain[0]} cannot stage them")

    def write(self, iterator: Iterator[pa.RecordBatch], write: Write, partition: int) -> Published:
        """Run a task."""
        if self.trouble:
            raise ConnectError(self.trouble)
        if not self.brokers:
            return self._publish(iterator, partition)
        calls = Calls(self.options)
        try:
            home = self.home or self._patiently(lambda: self._find(calls, write))
            attempt = Attempt(calls, write, home, ranked(self.brokers, str(partition)))
            chunks = Chunks(self.options, attempt.put)
            for batch in iterator:
                chunks.add(batch)
            chunks.finish()
        finally:
            calls.close()
        # The input may have ended because its upstream failed: then Spark drops this message, and so the attempt.
        return Published(
            chunks.rows, Staged(write, home, chunks.rows, attempt.epoch, attempt.broker, attempt.id, attempt.chunks)
        )

    def _find(self, calls: Calls, write: Write) -> Broker:
        """Ask brokers who is home, first those that the driver saw; when that fails, those that are there by now."""
        try:
            return find(calls, write, self.brokers, self.silent)
        except ConnectError:
            before = self.brokers
            with contextlib.suppress(ConnectError, HttpError):
                self._ask(lambda: "the broker that is looked for")
            self.brokers = self.brokers or before
            raise

    def _publish(self, iterator: Iterator[pa.RecordBatch], partition: int) -> Published:
        if not self.addresses:
            raise ConnectError("the nsqlookupds know no broker to publish to")
        # Each partition has an order of its own, so that the rows for a broker that is lost spread over the others.
        publisher = Publisher(self.options, _shuffled(self.addresses, str(partition)))
        try:
            chunks = Chunks(self.options, publisher.put)
            for batch in iterator:
                chunks.add(batch)
            chunks.finish()
            publisher.finish()
        finally:
            publisher.close()
        return Published(chunks.rows, None)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if staged := _staged(messages):
            calls = Calls(self.options)
            try:
                end = Commit(calls, staged, self.brokers)
                end.run(Checkpoint(self.options.checkpoint), skip=self.options.repeated_batch == "skip")
            finally:
                calls.close()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if staged := _staged(messages):
            calls = Calls(self.options)
            try:
                Commit(calls, staged, self.brokers).abort()
            except FlintError as exc:
                # Spark has an error to report already, and it is that one which people should see.
                logger.warning("what was staged could not be dropped: %s", exc)
            finally:
                calls.close()
        rows = sum(getattr(found, "rows", 0) for found in messages if found is not None) - sum(
            found.rows for found in staged
        )
        if rows:
            logger.warning("the write failed, and %d rows of it are published already: that cannot be undone", rows)


def _shuffled(addresses: Sequence[str], key: str) -> list[str]:
    return sorted(addresses, key=lambda one: hashlib.sha256(f"{key} {one}".encode()).digest())


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [found for message in messages if (found := getattr(message, "staged", None)) is not None]


def _say_once(text: str) -> None:
    """Warn, once in this process: a stream makes a writer for every batch."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def _check_columns(options: SinkOptions, columns: dict[str, str]) -> None:
    for name, kinds in {
        "value": ("binary", "string"),
        "topic": ("string",),
        "defer_ms": ("bigint", "int", "smallint", "tinyint"),
    }.items():
        if name in columns and columns[name] not in kinds:
            raise OptionError(f"the column {name} is {columns[name]}, and must be {' or '.join(kinds)}: cast it")
    if "value" not in columns:
        raise OptionError('there is no column "value" to publish: select what is to be the message under this name')
    if "topic" not in columns and not options.topic:
        raise OptionError('say where rows go: by the option topic, or by a column "topic"')
    if "topic" in columns and options.topic:
        _say_once(f'all rows go to {options.topic}, as the option topic says: the column "topic" is not looked at')
    # A frame that was read may be written as it is; other columns are somebody's mistake.
    ours = {"value", "topic", "defer_ms", "node", "offset", "id", "timestamp", "timestamp_ns", "attempts"}
    if unknown := columns.keys() - ours:
        raise OptionError(
            f"the column {', '.join(sorted(unknown))} would be lost: select value, topic and defer_ms only"
        )


class BatchWriter(DataSourceArrowWriter):
    """``df.write.format("nsq")``."""

    def __init__(self, options: SinkOptions, columns: dict[str, str], overwrite: bool) -> None:
        self._job = job = Job(options, columns, overwrite)
        # Made anew, nobody can have committed it before.
        self._write = Write(options.write_id or job.id, job.id, job.id, 0)
        # Writes with ids that belong together, as the batches of a query in foreachBatch, may have one place for it.
        checkpoint = Checkpoint(options.checkpoint if options.write_id else "")
        job.prepare(lambda: self._find_home(checkpoint), lambda: options.home or checkpoint.read_home())

    def _find_home(self, checkpoint: Checkpoint) -> Broker:
        job = self._job
        if job.options.home:
            return named(job.options.home, job.brokers)
        if not job.options.write_id:
            return choose(self._write.producer, job.brokers)
        if node := checkpoint.read_home():
            return named(node, job.brokers)
        home = self._remembered()
        if checkpoint.is_there:
            try:
                return named(checkpoint.write_home(home.node), job.brokers)
            except OSError as exc:
                _say_once(_NOT_NAMED.format(exc))
        return home

    def _remembered(self) -> Broker:
        job = self._job
        calls = Calls(job.options)
        try:
            return find(calls, self._write, job.brokers, job.silent)
        finally:
            calls.close()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        return self._job.write(iterator, self._write, _task().partitionId())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._job.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._job.abort(messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """``df.writeStream.format("nsq")``; made once for the tasks of a batch, and once more for its commit."""

    def __init__(self, options: SinkOptions, columns: dict[str, str], overwrite: bool) -> None:
        if options.write_id:
            raise OptionError("writeId is for batch writes: a stream has its own id, kept in the checkpoint")
        self._job = Job(options, columns, overwrite)
        checkpoint = Checkpoint(options.checkpoint)
        self._job.prepare(
            lambda: self._find_home(checkpoint), lambda: options.home or (checkpoint.query and checkpoint.read_home())
        )

    def _find_home(self, checkpoint: Checkpoint) -> Broker | None:
        job = self._job
        if job.options.home:
            return named(job.options.home, job.brokers)
        if not (query := checkpoint.query):
            return None
        try:
            node = checkpoint.read_home() or checkpoint.write_home(self._remembered(checkpoint, query).node)
        except OSError as exc:
            # Not writable here, or without hard links: as good as a checkpoint that Python cannot reach.
            _say_once(_NOT_NAMED.format(exc))
            return None
        return named(node, job.brokers)

    def _remembered(self, checkpoint: Checkpoint, query: str) -> Broker:
        """Return the home of a query whose checkpoint does not name it: a new one, or a copy without that file."""
        job = self._job
        calls = Calls(job.options)
        try:
            write = Write(query, job.id, job.id, 0)
            return find(calls, write, job.brokers, job.silent, is_new=checkpoint.is_new)
        finally:
            calls.close()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        job, task = self._job, _task()
        query = task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        run = task.getLocalProperty("spark.jobGroup.id")
        if query is None or batch is None:
            logger.warning("Spark does not say which batch this is: if it runs again, it is not recognised")
            write = Write(job.id, job.id, job.id, 0)
        else:
            write = Write(query, run or job.id, job.id, int(batch))
        return job.write(iterator, write, task.partitionId())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._job.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._job.abort(messages)


def _task() -> Any:
    from pyspark import TaskContext

    return TaskContext.get()
