"""Message bodies as an Arrow column: a struct with the fields of a schema, and the reason where there is none.

A *format* (`avro`, `protobuf`, `messagepack`) knows its schema. It says which type that is in Arrow, and opens a
function that turns one body into what `pyarrow.array` takes for that type. `Bodies` calls it for every row of a batch.
A body that is not what it should be is null in the column, and spoils no other row. All that is not the body's fault,
such as a registry that does not answer, is raised, so that Spark tries the task again.

The formats' libraries are imported where they are used: executors need those of the formats that they decode.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from flintmq.errors import PipelineError
from flintmq.spark.shipped.registry import FRAME, Registry, Schema, UnknownSchemaError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "NO_BODY",
    "UNFRAMED",
    "Bodies",
    "Convert",
    "Format",
    "Read",
    "Schemas",
    "Shape",
    "UndecodableError",
    "import_library",
    "reason_of",
    "schema_id",
]

#: Turns a value that a library gives into one that Arrow takes.
Convert = Callable[[Any], Any]
#: Turns a body into a dictionary.
Read = Callable[[bytes], Any]

#: Characters of a reason.
_REASON = 300
#: What is said of a body without a frame; JSON's parser in Spark says the same.
UNFRAMED = "the body does not begin with a zero and the id of a schema, as with a registry"
NO_BODY = "the message has no body"

#: Schemas that this process has asked a registry for. An id has one schema for ever.
_known: dict[tuple[Registry, int, bool], Schema] = {}


class UndecodableError(Exception):
    """A body is not what the schema says. The text says why."""


class Format(Protocol):
    """What `Bodies` needs to know of a format; it is pickled to executors."""

    def type(self) -> pa.DataType:
        """The struct that the schema describes. PipelineError if Spark has no such thing."""

    def open(self) -> Read:
        """What reads a body. It raises UndecodableError, or what its library raises, for one that it cannot read."""


@dataclass
class Shape:
    """What a schema, or a part of it, becomes."""

    type: pa.DataType
    #: None if a value stays as it is.
    convert: Convert | None = None


@dataclass
class Bodies:
    """Called with a column of bodies: returns a struct with `data`, and `error` where there is none."""

    format: Format
    #: Of `data`, as Spark wants it.
    type: pa.DataType
    _read: Read | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read": None}

    def __call__(self, values: pa.Array) -> pa.Array:
        import pyarrow as pa

        read = self._read = self._read or self.format.open()
        rows: list[Any] = []
        errors: list[str | None] = []
        for value in values.to_pylist():
            row = error = None
            try:
                if value is None:
                    raise UndecodableError(NO_BODY)
                row = read(value)
            except (PipelineError, MemoryError):
                raise
            except Exception as exc:
                error = _error(exc)
            rows.append(row)
            errors.append(error)
        data = pa.concat_arrays(self._arrays(rows, errors, 0))
        return pa.StructArray.from_arrays([data, pa.array(errors, pa.string())], ["data", "error"])

    def _arrays(self, rows: list[Any], errors: list[str | None], first: int) -> Iterable[pa.Array]:
        """Rows as Arrow has them, in parts. One that Arrow refuses is found by halves, and is null with its reason."""
        import pyarrow as pa

        try:
            yield pa.array(rows, self.type)
            return
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as exc:
            if len(rows) == 1:
                errors[first] = _error(exc)
                yield pa.nulls(1, self.type)
                return
        half = len(rows) // 2
        yield from self._arrays(rows[:half], errors, first)
        yield from self._arrays(rows[half:], errors, first + half)


class Schemas:
    """What a format makes of the schemas that bodies name by their ids, each once."""

    def __init__(
        self, registry: Registry, kind: str, make: Callable[[Schema], Any], *, serialized: bool = False
    ) -> None:
        self._registry = registry
        self._kind = kind
        self._make = make
        self._serialized = serialized
        self._made: dict[int, Any] = {}
        #: Why others are of no use. Not for ever: a registry may learn of an id.
        self._refused: dict[int, str] = {}

    def __getitem__(self, id: int) -> Any:
        if id not in self._made:
            if id in self._refused:
                raise UndecodableError(self._refused[id])
            try:
                self._made[id] = self._make(self._schema(id))
            except (UndecodableError, UnknownSchemaError) as exc:
                self._refused[id] = str(exc)
                raise UndecodableError(str(exc)) from exc
        return self._made[id]

    def _schema(self, id: int) -> Schema:
        key = self._registry, id, self._serialized
        if key not in _known:
            _known[key] = self._registry.by_id(id, serialized=self._serialized)
        found = _known[key]
        if found.kind != self._kind:
            raise UndecodableError(f"schema {id} is one of {found.kind}, not of {self._kind}")
        return found


def schema_id(body: bytes) -> int:
    """Return the id of a body's schema: the body begins with 00 and 4 bytes, the highest first."""
    if len(body) < FRAME or body[0]:
        raise UndecodableError(UNFRAMED)
    return int.from_bytes(body[1:FRAME], "big")


def _error(exc: BaseException) -> str:
    """What is said of a body; libraries' own words alone would not tell what they are about."""
    text = reason_of(exc)
    return text if isinstance(exc, UndecodableError) else f"the body does not fit the schema ({text})"


def reason_of(exc: BaseException) -> str:
    """Return what an error says, in one line that is not too long."""
    text = " ".join(str(exc).split())
    if not isinstance(exc, UndecodableError):
        text = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
    # Spark takes no text that is not UTF-8, and libraries quote what they choke on.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _REASON else f"{text[: _REASON - 1]}…"


def import_library(module: str, package: str) -> Any:
    """Import a module of a format's library. PipelineError, with what to install, if it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise PipelineError(
            f"{package} is not installed where messages are decoded ({exc}): pip install 'flintmq[decode]'"
        ) from exc
