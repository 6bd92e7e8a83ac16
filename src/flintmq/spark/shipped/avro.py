"""Bodies in Avro's binary encoding, read by fastavro.

With a registry a body begins with the id of the schema that it was written by, and Avro's rules resolve that into the
reader's schema. Without one it was written by the reader's schema.

Logical types are converted here: fastavro reads plain numbers and bytes, and the reader's schema says what they are.
"""

from __future__ import annotations

import decimal
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError
from flintmq.spark.shipped.bodies import (
    Convert,
    Read,
    Schemas,
    Shape,
    UndecodableError,
    import_library,
    reason_of,
    schema_id,
)
from flintmq.spark.shipped.registry import FRAME, Registry, Schema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Avro"]

#: Digits of Spark's and Arrow's decimals.
_DIGITS = 38
_EXACT = decimal.Context(prec=2 * _DIGITS + 2)
#: How the values of types look in Python: two types of one kind cannot be told apart by a value.
_KINDS: dict[str, type] = {
    "boolean": bool,
    "int": int,
    "long": int,
    "float": float,
    "double": float,
    "bytes": bytes,
    "fixed": bytes,
    "string": str,
    "enum": str,
    "array": list,
    "map": dict,
    "record": dict,
}
_NAMED = ("record", "enum", "fixed")


@dataclass
class Avro:
    """A record of Avro."""

    #: The reader's schema, after those that it refers to.
    texts: tuple[str, ...]
    registry: Registry | None = None

    def type(self) -> pa.DataType:
        return self._shapes().top().type

    def _shapes(self, *, is_tagged: bool = False, writer: _Writer | None = None) -> _Shapes:
        named: dict[str, Any] = {}
        return _Shapes(_parse(self.texts, named, plain=False), named, is_tagged, writer)

    def open(self) -> Read:
        read_one = import_library("fastavro", "fastavro").schemaless_reader
        shapes = self._shapes()
        convert = shapes.top().convert
        if shapes.is_ambiguous:
            convert = self._shapes(is_tagged=True).top().convert
        how = {"return_named_type": True} if shapes.is_ambiguous else {}
        named: dict[str, Any] = {}
        own = _parse(self.texts, named, plain=True)
        if shapes.is_ambiguous:
            _tag_defaults(named)

        def writer_of(schema: Schema) -> tuple[Any, Any, Convert | None]:
            texts = tuple(text for _, text in schema.texts)
            if texts == self.texts:
                return own, None, convert
            writer = _Writer.of(texts)
            if not shapes.is_ambiguous:
                return writer.schema, own, convert
            return writer.schema, own, self._shapes(is_tagged=True, writer=writer).top().convert

        writers = None if self.registry is None else Schemas(self.registry, "AVRO", writer_of)

        def read(body: bytes) -> Any:
            stream = io.BytesIO(body)
            writer, reader, change = own, None, convert
            if writers is not None:
                writer, reader, change = writers[schema_id(body)]
                stream.seek(FRAME)
            try:
                value = read_one(stream, writer, reader, **how)
            except EOFError as exc:
                raise UndecodableError("the body ends before the record does") from exc
            if left := len(body) - stream.tell():
                raise UndecodableError(f"{left} bytes are left behind the record: it was written by another schema")
            return value if change is None else change(value)

        return read


@dataclass(frozen=True)
class _Writer:
    """A schema that bodies were written by, and the types that it names."""

    schema: Any
    named: Mapping[str, Any]

    @staticmethod
    def of(texts: Sequence[str]) -> _Writer:
        named: dict[str, Any] = {}
        try:
            return _Writer(_parse(texts, named, plain=True), named)
        except PipelineError as exc:
            raise UndecodableError(f"the schema it names is of no use: {exc}") from exc

    def candidates(self, schema: Any) -> list[tuple[str, Any]]:
        """The types that a value of a schema may be of, with their definitions."""
        return [_kind(one, self.named) for one in (schema if isinstance(schema, list) else [schema])]


def _parse(texts: Sequence[str], named: dict[str, Any], *, plain: bool) -> Any:
    """Parse a schema after those that it refers to; the names that they define are added to `named`.

    `plain` leaves logical types away.
    """
    parse = import_library("fastavro", "fastavro").parse_schema
    parsed: Any = None
    try:
        for text in texts:
            read = json.loads(text)
            # A default of another type than its field's is not worth a failure: Java's readers let it pass, too.
            parsed = parse(_without_logical_types(read) if plain else read, named, _ignore_default_error=True)
    except Exception as exc:
        raise PipelineError(f"the Avro schema cannot be read: {reason_of(exc)}") from exc
    if isinstance(parsed, list):
        # A record brings the names along that it refers to, a union does not.
        hints = {"__fastavro_parsed": True, "__named_schemas": named}
        parsed = [{**named[one], **hints} if isinstance(one, str) and one in named else one for one in parsed]
    return parsed


def _tag_defaults(named: Mapping[str, Any]) -> None:
    """Put the name of its type beside each default that is of a union, and so of the union's first type."""
    for record in named.values():
        for one in record.get("fields", ()):
            first = one["type"][0] if isinstance(one["type"], list) and one["type"] else None
            name = first.get("name") if isinstance(first, dict) else first
            if "default" in one and name in named and not isinstance(one["default"], tuple):
                one["default"] = (name, one["default"])


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_logical_types(one) for one in schema]
    if isinstance(schema, dict):
        return {
            key: value if key == "default" else _without_logical_types(value)
            for key, value in schema.items()
            if key != "logicalType"
        }
    return schema


def _kind(schema: Any, named: Mapping[str, Any]) -> tuple[str, Any]:
    """The type of a schema, and its definition where it is a name."""
    if isinstance(schema, list):
        return "union", schema
    if isinstance(schema, str):
        schema = named.get(schema, schema)
    kind = schema["type"] if isinstance(schema, dict) else schema
    return "record" if kind == "error" else kind, schema


class _Shapes:
    """What the types of a schema become in Arrow.

    With `is_tagged` a value from a union has the name of its type beside it, if that is a type with a name. A value
    that was written without a union has none: there `writer` tells which type it is of.
    """

    def __init__(self, schema: Any, named: Mapping[str, Any], is_tagged: bool, writer: _Writer | None = None) -> None:
        self._schema = schema
        self._named = named
        self._is_tagged = is_tagged
        self._writer = writer
        #: Is there a union with two branches whose values look alike? It needs tags.
        self.is_ambiguous = False

    def top(self) -> Shape:
        kind, _ = self._kind(self._schema)
        if kind != "record":
            raise PipelineError(f"the Avro schema of a message is a record, and this one is a {kind}")
        return self._of(self._schema, (), (), None if self._writer is None else self._writer.schema)

    def _kind(self, schema: Any) -> tuple[str, Any]:
        return _kind(schema, self._named)

    def _written(self, schema: Any, writer: Any) -> Any:
        """Of what a writer's schema allows, the definition of what is read as this type; None if nothing is known."""
        if self._writer is None or writer is None:
            return None
        kind, about = self._kind(schema)
        names = {one.rpartition(".")[2] for one in (about["name"], *about.get("aliases", ()))} if kind in _NAMED else ()
        for other, found in self._writer.candidates(writer):
            if other == kind and (not names or found["name"].rpartition(".")[2] in names):
                return found
        return None

    def _of(self, schema: Any, path: tuple[str, ...], inside: tuple[str, ...], writer: Any) -> Shape:
        import pyarrow as pa

        kind, schema = self._kind(schema)
        if kind == "union":
            return self._union(schema, path, inside, writer)
        written = self._written(schema, writer)
        if kind == "record":
            name = schema["name"]
            if name in inside:
                raise PipelineError(
                    f"the field {'.'.join(path)} is a {name} inside of a {name}: Spark has no such column"
                )
            fields = {
                one["name"]: self._of(one["type"], (*path, one["name"]), (*inside, name), _field_type(written, one))
                for one in schema["fields"]
            }
            return self._record(fields, path)
        if kind == "array":
            found = self._of(schema["items"], (*path, "[]"), inside, written and written["items"])
            return Shape(pa.list_(found.type), _each(found.convert))
        if kind == "map":
            found = self._of(schema["values"], (*path, "{}"), inside, written and written["values"])
            return Shape(pa.map_(pa.string(), found.type), _each_value(found.convert))
        return self._scalar(kind, schema if isinstance(schema, dict) else {})

    def _scalar(self, kind: str, about: Mapping[str, Any]) -> Shape:
        import pyarrow as pa

        logical, digits = about.get("logicalType"), about.get("precision") or 0
        if logical == "decimal" and kind in ("bytes", "fixed") and 0 < digits <= _DIGITS:
            scale = about.get("scale") or 0
            return Shape(pa.decimal128(digits, scale), lambda value: _decimal(value, scale))
        zoned, local = pa.timestamp("us", "UTC"), pa.timestamp("us")
        logicals = {
            ("int", "date"): Shape(pa.date32()),
            ("long", "timestamp-millis"): Shape(zoned, _thousandfold),
            ("long", "timestamp-micros"): Shape(zoned),
            ("long", "local-timestamp-millis"): Shape(local, _thousandfold),
            ("long", "local-timestamp-micros"): Shape(local),
        }
        plain = {
            # Spark's files have no column of nothing but nulls.
            "null": Shape(pa.string()),
            "boolean": Shape(pa.bool_()),
            "int": Shape(pa.int32()),
            "long": Shape(pa.int64()),
            "float": Shape(pa.float32()),
            "double": Shape(pa.float64()),
            "bytes": Shape(pa.binary(), _bytes),
            "fixed": Shape(pa.binary(), _bytes),
            "string": Shape(pa.string()),
            "enum": Shape(pa.string(), _bare if self._is_tagged else None),
        }
        return logicals.get((kind, str(logical))) or plain[kind]

    def _record(self, fields: Mapping[str, Shape], path: Sequence[str]) -> Shape:
        import pyarrow as pa

        if not fields and not path:
            raise PipelineError("the Avro schema of a message has fields, and this one has none")
        if not fields:
            # Spark's files have no struct without fields. What is left to say is that it is there.
            return Shape(pa.bool_(), lambda value: True)
        changes = [(name, found.convert) for name, found in fields.items() if found.convert is not None]

        def convert(value: Any) -> Any:
            value = _bare(value)
            # Not in its place: a default of the schema is one object for all rows.
            changed = {name: change(value[name]) for name, change in changes if value.get(name) is not None}
            return {**value, **changed}

        kind = pa.struct([(name, found.type) for name, found in fields.items()])
        return Shape(kind, convert if changes or self._is_tagged else None)

    def _union(self, union: list[Any], path: tuple[str, ...], inside: tuple[str, ...], writer: Any) -> Shape:
        """One branch beside null is that branch. Several are a struct with a field for each, of which one is set."""
        import pyarrow as pa

        branches = {self._name(one): one for one in union if one != "null" and self._kind(one)[0] != "null"}
        # A value does not say which of the two it was, and the wider one holds both.
        for narrow, wide in (("int", "long"), ("float", "double")):
            if narrow in branches and wide in branches:
                del branches[narrow]
        if not branches:
            return self._scalar("null", {})
        if len(branches) == 1:
            [only] = branches.values()
            return self._of(only, path, inside, writer)
        fields: dict[str, Shape] = {}
        by_full_name: dict[str, str] = {}
        by_kind: dict[type, str] = {}
        untagged: str | None = None
        # A value without a tag is of a type without a name, if there is one of its kind.
        for full, one in sorted(branches.items(), key=lambda branch: self._kind(branch[1])[0] in _NAMED):
            by_kind.setdefault(_KINDS[self._kind(one)[0]], full.rpartition(".")[2])
        for full, one in branches.items():
            name = full.rpartition(".")[2]
            fields[name] = self._of(one, (*path, name), inside, writer)
            by_full_name[full] = name
            # Without a union around it the writer has no tag: this is the only named type that it can be.
            is_named = self._kind(one)[0] in _NAMED and not isinstance(writer, list)
            if is_named and untagged is None and self._written(one, writer) is not None:
                untagged = name
        if len(fields) < len(branches):
            raise PipelineError(f"the union {'.'.join(path)} has two types with one name: {', '.join(branches)}")
        if len(by_kind) < len(fields):
            self.is_ambiguous = True

        def choose(value: Any) -> Any:
            if isinstance(value, tuple):
                name, value = by_full_name[value[0]], value[1]
            else:
                name = untagged or by_kind[type(value)]
            change = fields[name].convert
            return {name: value if change is None else change(value)}

        return Shape(pa.struct([(name, found.type) for name, found in fields.items()]), choose)

    def _name(self, schema: Any) -> str:
        """What a branch of a union is called."""
        kind, about = self._kind(schema)
        return str(about["name"]) if kind in _NAMED else kind


def _field_type(record: Any, field: Mapping[str, Any]) -> Any:
    """The type of a reader's field in the record of a writer; None if it has no such field."""
    names = (field["name"], *field.get("aliases", ()))
    return next((one["type"] for one in (record or {}).get("fields", ()) if one["name"] in names), None)


def _bare(value: Any) -> Any:
    """The value, without the name of its type."""
    return value[1] if isinstance(value, tuple) else value


def _bytes(value: Any) -> Any:
    value = _bare(value)
    # A default in a schema's JSON: one character for each byte.
    return value.encode("latin-1") if isinstance(value, str) else value


def _decimal(value: Any, scale: int) -> decimal.Decimal:
    return decimal.Decimal(int.from_bytes(_bytes(value), "big", signed=True)).scaleb(-scale, _EXACT)


def _thousandfold(value: int) -> int:
    return value * 1000


def _each(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda values: [None if value is None else convert(value) for value in values]


def _each_value(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda values: {key: None if value is None else convert(value) for key, value in values.items()}
