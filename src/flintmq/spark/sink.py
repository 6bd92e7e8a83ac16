"""Rows out: each task publishes its rows in MPUBs over TCP, to one broker.

Which broker depends on the task's partition alone, and so does what each MPUB holds. On our broker an MPUB carries a
key (query, batch, partition, number of the MPUB): sent again, by a retry of ours or of Spark's, it is stored once. On
others the same retries store it again. Spark cannot take back what was published: there is no commit.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Iterator
from struct import pack
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from flintmq.errors import ConnectError, HttpError, OptionError, ProtocolError, PublishError
from flintmq.spark.shipped.net import Cluster, Connection, Web
from flintmq.spark.shipped.options import NAME, SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BatchWriter", "Published", "StreamWriter"]

logger = logging.getLogger("flintmq.spark")

#: MPUBs that may be on their way before the first of them is answered.
_OUTSTANDING = 4
#: Rows for many topics at once are held back until they fill an MPUB, up to so many bytes together.
_HELD_BYTES = 32 << 20
_LONGEST_DEFER = 365 * 86_400_000

_NOT_IDEMPOTENT = (
    "rows were published at least once, not exactly once: a task that is tried again publishes its rows again, because "
    "the broker knows no idempotent publish (or idempotent=false is set)"
)


class Published(WriterCommitMessage):
    """What a task did."""

    def __init__(self, rows: int, idempotent: bool) -> None:
        self.rows = rows
        self.idempotent = idempotent


class _Job:
    """What all tasks of a write share; made by the driver, pickled to them."""

    def __init__(self, options: SinkOptions, columns: dict[str, str], overwrite: bool) -> None:
        if overwrite:
            raise OptionError(
                'a topic cannot be overwritten, only added to: say mode("append"), or outputMode("append")'
            )
        _check_columns(options, columns)
        self.options = options
        self.nodes: list[str] = []
        self.trouble = ""
        # Asked once, here: every try of a task must see the same brokers, or its rows would go to different ones.
        # That nobody answers is told by the tasks: Spark makes this once more just to say that a batch is done.
        web = Web(options.network)
        try:
            self.nodes = Cluster(options.network, web).addresses()
        except (ConnectError, HttpError) as exc:
            self.trouble = str(exc)
        finally:
            web.close()

    def node(self, partition: int) -> str:
        """The broker of a partition; when brokers come and go, few partitions change theirs."""
        if not self.nodes:
            raise ConnectError(self.trouble or "the nsqlookupds know no broker to publish to")
        return max(self.nodes, key=lambda node: hashlib.sha256(f"{partition} {node}".encode()).digest())

    def write(self, iterator: Iterator[pa.RecordBatch], job: str, partition: int) -> Published:
        publisher = _Publisher(self.options, self.node(partition), f"{job}:{partition}" if job else "")
        try:
            for batch in iterator:
                publisher.add(batch)
            publisher.finish()
        finally:
            publisher.close()
        return Published(publisher.rows, publisher.idempotent)

    def committed(self, messages: list[WriterCommitMessage | None]) -> None:
        if any(isinstance(message, Published) and message.rows and not message.idempotent for message in messages):
            logger.warning("%s", _NOT_IDEMPOTENT)


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
    # A frame that was read may be written as it is; other columns are somebody's mistake.
    ours = {"value", "topic", "defer_ms", "node", "offset", "id", "timestamp", "timestamp_ns", "attempts"}
    if unknown := columns.keys() - ours:
        raise OptionError(
            f"the column {', '.join(sorted(unknown))} would be lost: select value, topic and defer_ms only"
        )


class BatchWriter(DataSourceArrowWriter):
    """``df.write.format("nsq")``."""

    def __init__(self, options: SinkOptions, columns: dict[str, str], overwrite: bool) -> None:
        self._job = _Job(options, columns, overwrite)
        self._id = options.write_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        return self._job.write(iterator, self._id, _task().partitionId())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._job.committed(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _aborted(messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """``df.writeStream.format("nsq")``."""

    def __init__(self, options: SinkOptions, columns: dict[str, str], overwrite: bool) -> None:
        if options.write_id:
            raise OptionError("writeId is for batch writes: a stream has its own id, kept in the checkpoint")
        self._job = _Job(options, columns, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        task = _task()
        query = task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            logger.warning("Spark does not say which batch this is: it is published without a key")
        job = f"{query}:{batch}" if query is not None and batch is not None else ""
        return self._job.write(iterator, job, task.partitionId())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._job.committed(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _aborted(messages)


def _task() -> Any:
    from pyspark import TaskContext

    return TaskContext.get()


def _aborted(messages: list[WriterCommitMessage | None]) -> None:
    rows = sum(message.rows for message in messages if isinstance(message, Published))
    if rows:
        logger.warning("the write failed, and %d rows of it are published already: that cannot be undone", rows)


class _Command(NamedTuple):
    """A publish: everything before its key, everything after, and what it is for."""

    head: bytes
    body: bytes
    topic: str
    #: Its number in this task, counted by topic.
    number: int

    def encode(self, prefix: str) -> bytes:
        key = f" {prefix}:{self.number}".encode() if prefix else b""
        return self.head + key + b"\n" + self.body


class _Publisher:
    """One task's publishes to one broker, in order, and sent again as long as they are not answered."""

    def __init__(self, options: SinkOptions, address: str, prefix: str) -> None:
        self.rows = 0
        #: Did every publish carry a key?
        self.idempotent = bool(prefix) and options.idempotent != "false"
        self._options = options
        self._address = address
        self._prefix = prefix if self.idempotent else ""
        self._connection: Connection | None = None
        self._outstanding: deque[_Command] = deque()
        self._failures = 0
        # By topic: what waits for its MPUB, how many bytes that is, and the number of the next command.
        self._waiting: dict[str, list[bytes]] = {}
        self._sizes: dict[str, int] = {}
        self._held = 0
        self._numbers: dict[str, int] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        values = batch.column("value").to_pylist()
        names = batch.schema.names
        topics = batch.column("topic").to_pylist() if "topic" in names else None
        delays = batch.column("defer_ms").to_pylist() if "defer_ms" in names else None
        default = self._options.topic
        for row, value in enumerate(values):
            topic = (topics[row] if topics is not None else None) or default
            if not topic:
                raise OptionError("a row has no topic: fill the column, or set the option topic for such rows")
            if not value:
                what = "null" if value is None else "empty"
                raise OptionError(
                    f"a row for {topic} has a value that is {what}, and NSQ takes no such message: filter it"
                )
            body = value if isinstance(value, bytes) else value.encode()
            delay = delays[row] if delays is not None else None
            if delay:
                self._defer(topic, body, delay)
            else:
                self._gather(topic, body)
        self.rows += len(values)

    def finish(self) -> None:
        self._publish_held()
        while self._outstanding:
            self._settle()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _gather(self, topic: str, body: bytes) -> None:
        options = self._options
        waiting = self._waiting.get(topic)
        if waiting is None:
            if not NAME.fullmatch(topic):
                raise OptionError(f'a row is for the topic "{topic[:80]}", and that is no name of a topic')
            waiting = self._waiting[topic] = []
            self._sizes[topic] = 0
        size = len(body) + 4
        # Where one MPUB ends depends on the rows alone, never on how Spark cut them into batches.
        if waiting and (len(waiting) >= options.max_messages or self._sizes[topic] + size > options.max_bytes):
            self._publish_waiting(topic)
        self._waiting[topic].append(body)
        self._sizes[topic] += size
        self._held += size
        if self._held > _HELD_BYTES:
            self._publish_held()

    def _publish_held(self) -> None:
        for topic in list(self._waiting):
            if self._waiting[topic]:
                self._publish_waiting(topic)

    def _publish_waiting(self, topic: str) -> None:
        bodies, self._waiting[topic] = self._waiting[topic], []
        self._held -= self._sizes[topic]
        self._sizes[topic] = 0
        packed = b"".join([part for body in bodies for part in (pack(">I", len(body)), body)])
        body = pack(">II", len(packed) + 4, len(bodies)) + packed
        self._publish(_Command(b"MPUB " + topic.encode(), body, topic, self._number(topic)))

    def _defer(self, topic: str, body: bytes, delay: int) -> None:
        if not NAME.fullmatch(topic):
            raise OptionError(f'a row is for the topic "{topic[:80]}", and that is no name of a topic')
        if not 0 <= delay <= _LONGEST_DEFER:
            raise OptionError(f"a row for {topic} has defer_ms = {delay}: it is a number of milliseconds, 0 or more")
        head = b"DPUB %b %d" % (topic.encode(), delay)
        self._publish(_Command(head, pack(">I", len(body)) + body, topic, self._number(topic)))

    def _number(self, topic: str) -> int:
        number = self._numbers.get(topic, 0)
        self._numbers[topic] = number + 1
        return number

    # Sending.

    def _publish(self, command: _Command) -> None:
        while len(self._outstanding) >= _OUTSTANDING:
            self._settle()
        self._outstanding.append(command)
        if self._connection is None:
            self._connect()
            return
        try:
            self._connection.send(command.encode(self._prefix))
        except OSError as exc:
            self._lost(exc)

    def _settle(self) -> None:
        """One more answer."""
        if self._connection is None:
            self._connect()
        assert self._connection is not None
        try:
            kind, data = self._connection.next_frame()
        except (OSError, ProtocolError) as exc:
            self._lost(exc)
            return
        if kind != 0:
            command = self._outstanding[0]
            raise PublishError(
                f"nsqd {self._address} refused a publish to {command.topic}: {data.decode(errors='replace')}",
                code=data.partition(b" ")[0].decode(errors="replace"),
            )
        self._outstanding.popleft()
        self._failures = 0

    def _lost(self, exc: BaseException) -> None:
        self.close()
        logger.warning("the connection to nsqd %s was lost: %s", self._address, exc)
        self._failed(exc)
        self._connect()

    def _failed(self, exc: BaseException) -> None:
        self._failures += 1
        if self._failures > self._options.network.retries:
            raise ConnectError(
                f"nsqd {self._address} could not be published to in {self._failures} tries: {exc}"
            ) from exc
        time.sleep(min(5.0, 0.1 * 2**self._failures))

    def _connect(self) -> None:
        """Connect to the same broker, and send again what it did not answer."""
        while True:
            try:
                self._connection = Connection(self._address, self._options.network, client_id="flintmq-spark-sink")
                self._choose_keys(self._connection)
                for command in self._outstanding:
                    self._connection.send(command.encode(self._prefix))
                return
            except (ConnectError, OSError) as exc:
                self.close()
                self._failed(exc)

    def _choose_keys(self, connection: Connection) -> None:
        if not self._prefix or connection.flintmq.get("keys"):
            return
        if self._options.idempotent == "true":
            raise OptionError(
                f"nsqd {self._address} knows no idempotent publish: set idempotent=auto to publish at least once there"
            )
        # Nothing was sent with a key yet, or it was sent to a broker that has just become another one.
        self._prefix = ""
        self.idempotent = False
