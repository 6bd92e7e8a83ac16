"""Rows of Arrow batches, cut into chunks: the body of one MPUB each, for one topic and one delay.

A chunk holds at most ``mpubMaxMessages`` rows and about ``mpubMaxBytes`` bytes; a larger row is a chunk of its own.
Where a chunk ends means nothing to anybody: it depends on how Spark cut the rows, and may differ at each try.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
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
#: Sizes below this have their four bytes made once.
_KNOWN_SIZES = 4096
_SIZES = [pack(">I", size) for size in range(_KNOWN_SIZES)]


class Chunk(NamedTuple):
    """Some rows for one topic, in order."""

    topic: str
    #: Milliseconds until they are delivered; 0 is at once.
    delay: int
    rows: list[bytes]

    def too_large(self, said: str) -> str:
        """Return what to say of a chunk that a broker refused because of a size; ``said`` is what it said."""
        largest = max(map(len, self.rows))
        size = sum(map(len, self.rows)) + 4 * len(self.rows) + 4
        if "BODY" in said.partition(" ")[0] and len(self.rows) > 1:
            return (
                f"{len(self.rows)} rows for {self.topic}, {size} bytes together, are too much for one request: {said}. "
                "Set mpubMaxBytes below its --max-body-size, or raise that"
            )
        return (
            f"a row for {self.topic} has {largest} bytes, and that is too large for a message: {said}. Make such rows "
            "smaller or filter them, or raise --max-msg-size and --max-body-size of the broker"
        )

    def body(self) -> bytes:
        """Return the rows as ``/mpub?binary=true`` takes them.

        [4 bytes number of rows] [4 bytes size] [row] [4 bytes size] [row] ...
        """
        rows = self.rows
        parts = [b""] * (2 * len(rows) + 1)
        parts[0] = pack(">I", len(rows))
        parts[1::2] = [_SIZES[size] if size < _KNOWN_SIZES else pack(">I", size) for size in map(len, rows)]
        parts[2::2] = rows
        return b"".join(parts)


class Chunks:
    """Collects rows and hands on each chunk that is full. ``finish`` hands on the rest."""

    def __init__(self, options: SinkOptions, put: Callable[[Chunk], None]) -> None:
        self.rows = 0
        self._options = options
        self._put = put
        self._waiting: dict[tuple[str, int], list[bytes]] = {}
        self._sizes: dict[tuple[str, int], int] = {}
        self._held = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the rows of a batch; OptionError for a row that cannot be a message."""
        names = batch.schema.names
        bodies = _bodies(batch.column("value"))
        default = self._options.topic
        # The option is for all rows: a table that was read has a column that says where its rows came from.
        topics = batch.column("topic").to_pylist() if "topic" in names and not default else None
        delays = batch.column("defer_ms").to_pylist() if "defer_ms" in names else None
        self.rows += len(bodies)
        if topics is None and delays is None:
            self._extend((default, 0), bodies)
        else:
            groups: dict[tuple[str, int], list[bytes]] = {}
            for row, body in enumerate(bodies):
                topic = default if topics is None else topics[row] or ""
                delay = (delays[row] if delays is not None else None) or 0
                group = groups.get((topic, delay))
                if group is None:
                    group = groups[topic, delay] = []
                group.append(body)
            for key, group in groups.items():
                self._extend(key, group)
        if self._held > _HELD_BYTES or len(self._waiting) > _HELD_KEYS:
            self.finish()

    def finish(self) -> None:
        for key in list(self._waiting):
            self._cut(key, rest=True)

    def _extend(self, key: tuple[str, int], bodies: list[bytes]) -> None:
        if not all(bodies):
            what = "null" if None in bodies else "empty"
            raise OptionError(
                f"a row for {key[0]} has a value that is {what}, and NSQ takes no such message: filter it"
            )
        waiting = self._waiting.get(key)
        if waiting is None:
            _check(*key)
            waiting = self._waiting[key] = []
            self._sizes[key] = 0
        waiting += bodies
        size = sum(map(len, bodies)) + 4 * len(bodies)
        self._sizes[key] += size
        self._held += size
        if len(waiting) >= self._options.max_messages or self._sizes[key] >= self._options.max_bytes:
            self._cut(key)

    def _cut(self, key: tuple[str, int], rest: bool = False) -> None:
        """Hand on the full chunks of a topic, with ``rest`` all of it."""
        options = self._options
        waiting, size = self._waiting.pop(key), self._sizes.pop(key)
        first = 0
        while first < len(waiting):
            left = len(waiting) - first
            if not rest and left < options.max_messages and size < options.max_bytes:
                self._waiting[key], self._sizes[key] = waiting[first:], size
                return
            rows = waiting[first : first + options.max_messages]
            bytes_here = sum(map(len, rows)) + 4 * len(rows)
            while bytes_here > options.max_bytes and len(rows) > 1:
                rows = rows[: len(rows) // 2]
                bytes_here = sum(map(len, rows)) + 4 * len(rows)
            self._put(Chunk(key[0], key[1], rows))
            first += len(rows)
            size -= bytes_here
            self._held -= bytes_here


def _bodies(column: pa.Array) -> list[bytes]:
    """Return the values as bytes. Text is UTF-8 in Arrow already, and is not decoded."""
    import pyarrow as pa

    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    found: list[bytes] = column.to_pylist()
    return found


def _check(topic: str, delay: int) -> None:
    if not topic:
        raise OptionError("a row has no topic: fill the column, or set the option topic, which is for all rows")
    if not NAME.fullmatch(topic):
        raise OptionError(f'a row is for the topic "{topic[:80]}", and that is no name of a topic: {NAME_RULE}')
    if not 0 <= delay <= _LONGEST_DEFER:
        raise OptionError(f"a row for {topic} has defer_ms = {delay}: it is a number of milliseconds, 0 or more")
