"""Rows of Arrow batches, cut into chunks: the body of one MPUB each, for one topic and one delay.

A chunk holds at most ``mpubMaxMessages`` rows and about ``mpubMaxBytes`` bytes; a larger row is a chunk of its own.
Where a chunk ends means nothing to anybody: it depends on how Spark cut the rows, and may differ at each try.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from struct import pack, unpack_from
from typing import TYPE_CHECKING, NamedTuple

from flintmq.errors import OptionError
from flintmq.spark.shipped.options import NAME, NAME_RULE, SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Chunk", "Chunks"]

#: Bytes of rows that wait for their chunks to fill, over all topics.
_HELD_BYTES = 32 << 20
#: Topics and delays that may wait at a time.
_HELD_KEYS = 4096
_LONGEST_DEFER = 365 * 86_400_000
#: Bytes of a column from which on Arrow counts in 64 bits: the sizes come on top.
_LARGE = 1 << 30


class Chunk(NamedTuple):
    """Some rows for one topic, in order."""

    topic: str
    #: Milliseconds until they are delivered; 0 is at once.
    delay: int
    messages: int
    #: As ``/mpub?binary=true`` takes them: [4 bytes number of rows] [4 bytes size] [row] [4 bytes size] [row] ...
    body: bytes

    @classmethod
    def of(cls, topic: str, delay: int, rows: Sequence[bytes]) -> Chunk:
        records = (part for row in rows for part in (pack(">I", len(row)), row))
        return cls(topic, delay, len(rows), b"".join([pack(">I", len(rows)), *records]))

    @property
    def rows(self) -> list[bytes]:
        found, at = [], 4
        for _ in range(self.messages):
            [size] = unpack_from(">I", self.body, at)
            found.append(self.body[at + 4 : at + 4 + size])
            at += 4 + size
        return found

    def too_large(self, said: str) -> str:
        """Return what to say of a chunk that a broker refused because of a size; ``said`` is what it said."""
        if "BODY" in said.partition(" ")[0] and self.messages > 1:
            return (
                f"{self.messages} rows for {self.topic}, {len(self.body)} bytes together, are too much for one "
                f"request: {said}. Set mpubMaxBytes below its --max-body-size, or raise that"
            )
        largest = max(map(len, self.rows))
        return (
            f"a row for {self.topic} has {largest} bytes, and that is too large for a message: {said}. Make such rows "
            "smaller or filter them, or raise --max-msg-size and --max-body-size of the broker"
        )


class _Waiting:
    """Rows for one topic and one delay that no chunk has yet: their records, in pieces."""

    def __init__(self) -> None:
        self.rows = 0
        self.bytes = 0
        #: Where its records begin in the data, and the last one ends; the data; the first row that is left.
        self._pieces: deque[tuple[memoryview[int], memoryview, int]] = deque()

    def add(self, begins: memoryview[int], data: memoryview) -> None:
        self._pieces.append((begins, data, 0))
        self.rows += len(begins) - 1
        self.bytes += begins[-1] - begins[0]

    def take(self, most_rows: int, most_bytes: int) -> tuple[int, list[memoryview]]:
        """Return so many rows at most, and no more bytes than that unless one row has more; and their records."""
        rows = size = 0
        records: list[memoryview] = []
        while self._pieces and rows < most_rows:
            begins, data, first = self._pieces[0]
            stop = min(len(begins) - 1, first + most_rows - rows)
            stop = bisect_right(begins, begins[first] + most_bytes - size, first, stop + 1) - 1
            if stop == first:
                if rows:
                    break
                stop += 1
            records.append(data[begins[first] : begins[stop]])
            rows += stop - first
            size += len(records[-1])
            if stop < len(begins) - 1:
                self._pieces[0] = (begins, data, stop)
                break
            self._pieces.popleft()
        self.rows -= rows
        self.bytes -= size
        return rows, records


class Chunks:
    """Collects rows and hands on each chunk that is full. ``finish`` hands on the rest."""

    def __init__(self, options: SinkOptions, put: Callable[[Chunk], None]) -> None:
        self.rows = 0
        self._options = options
        self._put = put
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._held = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the rows of a batch; OptionError for a row that cannot be a message."""
        names = batch.schema.names
        values = batch.column("value")
        default = self._options.topic
        # The option is for all rows: a table that was read has a column that says where its rows came from.
        topics: list[str | None] | None = None
        if "topic" in names and not default:
            if "defer_ms" not in names and (only := _only(batch.column("topic"))):
                default = only
            else:
                topics = batch.column("topic").to_pylist()
        delays = batch.column("defer_ms").to_pylist() if "defer_ms" in names else None
        self.rows += len(values)
        if topics is None and delays is None:
            self._extend((default, 0), values)
        else:
            groups: dict[tuple[str, int], array[int]] = {}
            for row in range(len(values)):
                topic = default if topics is None else topics[row] or ""
                delay = (delays[row] if delays is not None else None) or 0
                group = groups.get((topic, delay))
                if group is None:
                    group = groups[topic, delay] = array("q")
                group.append(row)
            for key, group in groups.items():
                self._extend(key, _taken(values, group))
        if self._held > _HELD_BYTES or len(self._waiting) > _HELD_KEYS:
            self.finish()

    def finish(self) -> None:
        for key in list(self._waiting):
            self._cut(key, rest=True)

    def _extend(self, key: tuple[str, int], values: pa.Array) -> None:
        if not len(values):
            return
        waiting = self._waiting.get(key)
        if waiting is None:
            _check(*key)
            waiting = self._waiting[key] = _Waiting()
        before = waiting.bytes
        waiting.add(*_records(values, key[0]))
        self._held += waiting.bytes - before
        self._cut(key)

    def _cut(self, key: tuple[str, int], rest: bool = False) -> None:
        """Hand on the full chunks of a topic, with ``rest`` all of it."""
        options, waiting = self._options, self._waiting[key]
        while waiting.rows and (rest or waiting.rows >= options.max_messages or waiting.bytes >= options.max_bytes):
            before = waiting.bytes
            count, records = waiting.take(options.max_messages, options.max_bytes)
            self._held -= before - waiting.bytes
            self._put(Chunk(*key, count, b"".join([pack(">I", count), *records])))
        if not waiting.rows:
            del self._waiting[key]


def _taken(values: pa.Array, rows: array[int]) -> pa.Array:
    import pyarrow as pa

    return values.take(pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)]))


def _records(values: pa.Array, topic: str) -> tuple[memoryview[int], memoryview]:
    """Return where records begin, with the end of the last, and the records: ``[4-byte size][row]`` each.

    Arrow puts them together. Text is UTF-8 in Arrow already, and is not decoded.
    """
    import pyarrow as pa
    import pyarrow.compute as compute

    if values.null_count:
        raise _no_message(topic, "null")
    is_large = values.nbytes > _LARGE or pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    kind, number = (pa.large_binary(), "q") if is_large else (pa.binary(), "i")
    values = values.cast(kind)
    sizes = array("i", _numbers(compute.binary_length(values).cast(pa.int32()), 0))
    if 0 in sizes:
        raise _no_message(topic, "empty")
    sizes.byteswap()
    begins = array(number, range(0, 4 * len(sizes) + 1, 4))
    heads = pa.Array.from_buffers(kind, len(sizes), [None, pa.py_buffer(begins), pa.py_buffer(sizes)])
    records = compute.binary_join_element_wise(heads, values, pa.scalar(b"", kind))
    return _numbers(records, 1, is_large), memoryview(records.buffers()[2])


def _numbers(column: pa.Array, more: int, is_large: bool = False) -> memoryview[int]:
    """The numbers of a column, or where its rows begin: one for each row and so many more."""
    found = memoryview(column.buffers()[1]).cast("B")
    numbers = found.cast("q") if is_large else found.cast("i")
    return numbers[column.offset : column.offset + len(column) + more]


def _no_message(topic: str, what: str) -> OptionError:
    return OptionError(f"a row for {topic} has a value that is {what}, and NSQ takes no such message: filter it")


def _only(column: pa.Array) -> str | None:
    """Return the text that all rows have, if they do."""
    import pyarrow.compute as compute

    if not len(column) or not compute.all(compute.equal(column, column[0]), skip_nulls=False).as_py():
        return None
    found: str | None = column[0].as_py()
    return found


def _check(topic: str, delay: int) -> None:
    if not topic:
        raise OptionError("a row has no topic: fill the column, or set the option topic, which is for all rows")
    if not NAME.fullmatch(topic):
        raise OptionError(f'a row is for the topic "{topic[:80]}", and that is no name of a topic: {NAME_RULE}')
    if not 0 <= delay <= _LONGEST_DEFER:
        raise OptionError(f"a row for {topic} has defer_ms = {delay}: it is a number of milliseconds, 0 or more")
