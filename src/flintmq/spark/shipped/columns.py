"""Message frames as Arrow columns: the shape in which Spark takes them.

The kernel does the work where it can be imported. On an executor that has only what was shipped to it, a plain loop
does the same. The schema is one for all modes: every column is always there.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Collection
from struct import unpack_from
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "SCHEMA", "Shape", "arrow_schema", "frame_columns", "without"]

#: What every reader yields, as Spark writes a schema.
SCHEMA = (
    "value BINARY, topic STRING, node STRING, offset BIGINT, id STRING, timestamp TIMESTAMP, timestamp_ns BIGINT, "
    "attempts INT"
)
COLUMNS = tuple(part.split()[0] for part in SCHEMA.split(", "))
#: Arrow counts the bytes of a column in 31 bits; so much in one batch is plenty.
BATCH_BYTES = 64 << 20

_HEX = frozenset(b"0123456789abcdef")
_Columns = tuple[int, int, Any, Any, Any, Any, Any, Any, Any]


def arrow_schema() -> pa.Schema:
    """The same for Arrow; it must be just what Spark makes of the other."""
    import pyarrow as pa

    return pa.schema(
        [
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("node", pa.string()),
            ("offset", pa.int64()),
            ("id", pa.string()),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            ("timestamp_ns", pa.int64()),
            ("attempts", pa.int32()),
        ]
    )


def frame_columns() -> Callable[[Any, int, int, int, int], _Columns]:
    """The function that turns frames into columns: the kernel's where there is one, else the plain loop."""
    try:
        found: Callable[[Any, int, int, int, int], _Columns] = importlib.import_module("flintmq.kernel").frame_columns
    except (ImportError, AttributeError):
        return plain_columns
    return found


def plain_columns(data: Any, pos: int, stop: int, max_rows: int, max_bytes: int) -> _Columns:
    """What the kernel's ``frame_columns`` does, see there."""
    if not 0 <= pos <= stop <= len(data) or max_rows < 1:
        raise ValueError("the range does not lie in the buffer")
    seqs, stamps, micros, attempts, begins = array("q"), array("q"), array("q"), array("i"), array("i", [0])
    ids: list[bytes] = []
    bodies: list[bytes] = []
    rows = total = 0
    at = pos
    while rows < max_rows and at + 8 <= stop:
        size, kind = unpack_from(">II", data, at)
        if not 4 <= size <= 0x7FFFFFFF or (kind == 2 and size < 30):
            raise ValueError(f"a frame of {size} bytes is none")
        after = at + 4 + size
        if kind != 2 or after > stop or (rows and total + size - 30 > max_bytes):
            break
        stamp, tries, id = unpack_from(">qH16s", data, at + 8)
        seqs.append(int(id, 16) & ((1 << 54) - 1) if _HEX.issuperset(id) else -1)
        stamps.append(stamp)
        micros.append(stamp // 1000)
        attempts.append(tries)
        ids.append(id)
        bodies.append(data[at + 34 : after])
        total += size - 30
        begins.append(total)
        at = after
        rows += 1
    return rows, at, seqs, stamps, micros, attempts, b"".join(ids), begins, b"".join(bodies)


class Shape:
    """Makes batches of one topic on one node. What is the same in every row is made once and sliced.

    Columns that are not ``wanted`` are null.
    """

    def __init__(self, topic: str, node: str, batch_rows: int, wanted: Collection[str] = COLUMNS) -> None:
        import pyarrow as pa

        self._pa = pa
        self._schema = arrow_schema()
        self._wanted = frozenset(wanted)
        self._topic = pa.repeat(pa.scalar(topic, pa.string()), batch_rows)
        self._node = pa.repeat(pa.scalar(node, pa.string()), batch_rows)
        self._nulls = {
            field.name: pa.nulls(batch_rows, field.type)
            for field in self._schema
            if field.name not in self._wanted or field.name == "attempts"
        }
        if "id" in self._wanted:
            self._id_begins = pa.py_buffer(array("i", range(0, 16 * batch_rows + 1, 16)))

    def batch(self, columns: _Columns, *, offsets: Any = None, attempts: bool = False) -> pa.RecordBatch:
        """A batch; ``offsets`` in place of the seqs, ``attempts`` where they mean something."""
        pa = self._pa
        rows, _, seqs, stamps, micros, tries, ids, begins, bodies = columns

        def buffers(kind: Any, *data: Any) -> Any:
            return pa.Array.from_buffers(kind, rows, [None, *map(pa.py_buffer, data)])

        makers: dict[str, Callable[[], Any]] = {
            "value": lambda: buffers(pa.binary(), begins, bodies),
            "topic": lambda: self._topic.slice(0, rows),
            "node": lambda: self._node.slice(0, rows),
            "offset": lambda: buffers(pa.int64(), seqs if offsets is None else offsets),
            "id": lambda: buffers(pa.string(), self._id_begins, ids),
            "timestamp": lambda: buffers(pa.timestamp("us", tz="UTC"), micros),
            "timestamp_ns": lambda: buffers(pa.int64(), stamps),
            "attempts": lambda: buffers(pa.int32(), tries) if attempts else self._nulls["attempts"].slice(0, rows),
        }
        made = [make() if name in self._wanted else self._nulls[name].slice(0, rows) for name, make in makers.items()]
        return pa.record_batch(made, schema=self._schema)


def without(batch: pa.RecordBatch, wanted: Collection[str]) -> pa.RecordBatch:
    """The batch with null in all columns that are not wanted."""
    if all(name in wanted for name in batch.schema.names):
        return batch
    import pyarrow as pa

    rows = batch.num_rows
    made = [
        column if field.name in wanted else pa.nulls(rows, field.type)
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return pa.record_batch(made, schema=batch.schema)
