"""Bodies that are messages of Protobuf, by the descriptors that protoc writes.

Protobuf resolves by the numbers of fields and needs no writer's schema. With a registry a body begins with the id of a
schema and the place of its message type in there, and the registry is asked whether that is the wanted type.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
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

__all__ = ["Protobuf", "descriptor_set", "types_in"]

_WRAPPERS = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
#: They hold whatever JSON holds, themselves too.
_JSON = frozenset(f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue"))
_TIMESTAMP = "google.protobuf.Timestamp"
#: Levels of message types inside of each other.
_MOST_LEVELS = 100


@dataclass
class Protobuf:
    """A message of Protobuf."""

    #: A FileDescriptorSet.
    files: bytes
    #: The full name of the message type; empty for the only one in the last file.
    message: str = ""
    registry: Registry | None = None

    def type(self) -> pa.DataType:
        return _message(self._descriptor(), (), ()).type

    def _descriptor(self) -> Any:
        try:
            files = _descriptors().FileDescriptorSet.FromString(self.files).file
        except Exception as exc:
            raise PipelineError(f"the schema is no set of Protobuf's descriptors: {reason_of(exc)}") from exc
        if not files:
            raise PipelineError("the set of Protobuf's descriptors is empty")
        pool = _pool(files)
        package = f"{files[-1].package}." if files[-1].package else ""
        there = [f"{package}{one.name}" for one in files[-1].message_type]
        if not self.message and len(there) != 1:
            raise PipelineError(
                f"say which message type bodies are, of {', '.join(there) or 'which the last file has none'}"
            )
        try:
            return pool.FindMessageTypeByName(self.message or there[0])
        except KeyError as exc:
            raise PipelineError(
                f"Protobuf's descriptors have no message type {self.message}, but {', '.join(there) or 'no other'}"
            ) from exc

    def open(self) -> Read:
        descriptor = self._descriptor()
        made = import_library("google.protobuf.message_factory", "protobuf").GetMessageClass(descriptor)
        convert, wanted = _message(descriptor, (), ()).convert, descriptor.full_name
        assert convert is not None
        writers = None
        if self.registry is not None:
            writers = Schemas(self.registry, "PROTOBUF", _types_of, serialized=True)

        def read(body: bytes) -> Any:
            if writers is not None:
                places, at = _places(body)
                found = _message_name(writers[schema_id(body)], places)
                if found != wanted:
                    raise UndecodableError(f"the message is of type {found}, not {wanted}")
                body = body[at:]
            message = made.FromString(body)
            if not message.IsInitialized():
                missing = ", ".join(message.FindInitializationErrors())
                raise UndecodableError(f"the message lacks what is required: {missing}")
            return convert(message)

        return read


# --- Descriptors ------------------------------------------------------------------------------------------------------


def _descriptors() -> Any:
    return import_library("google.protobuf.descriptor_pb2", "protobuf")


def _pool(files: Sequence[Any]) -> Any:
    """The descriptors of some files, in an order of their own."""
    pool = import_library("google.protobuf.descriptor_pool", "protobuf").DescriptorPool()
    waiting = {file.name: file for file in files}
    added: set[str] = set()

    def add(name: str) -> None:
        if name not in added:
            added.add(name)
            file = waiting.get(name) or _well_known(name)
            for other in file.dependency:
                add(other)
            pool.Add(file)

    try:
        for file in files:
            add(file.name)
    except PipelineError:
        raise
    except Exception as exc:
        raise PipelineError(f"Protobuf's descriptors do not fit together: {reason_of(exc)}") from exc
    return pool


def _well_known(name: str) -> Any:
    """The file of types that come with Protobuf itself, which nobody has to bring along."""
    if re.fullmatch(r"google/protobuf/\w+\.proto", name):
        module = import_library(f"{name.removesuffix('.proto').replace('/', '.')}_pb2", "protobuf")
        return _descriptors().FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    raise PipelineError(f"Protobuf's descriptors lack {name}: have protoc write them with --include_imports")


def descriptor_set(schema: Schema) -> bytes:
    """A registry's schema and those that it refers to, as a FileDescriptorSet. PipelineError if it gives none."""
    found = _descriptors().FileDescriptorSet()
    for name, text in schema.texts:
        file = _file(text)
        if file is None:
            raise PipelineError(
                "the registry does not give schemas of Protobuf as descriptors (format=serialized), but their source: "
                "give the descriptors yourself, as protoc --include_imports --descriptor_set_out writes them"
            )
        # Others refer to it by this name, whatever it was called where it was made.
        file.name = name or "message.proto"
        found.file.append(file)
    return bytes(found.SerializeToString())


def _file(text: str) -> Any:
    """The descriptor that a registry gives in base64; None if it gives something else, such as the source."""
    try:
        return _descriptors().FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except PipelineError:
        raise
    except Exception:  # of base64, or Protobuf's own
        return None


@dataclass
class _Types:
    """A message type and those inside of it; or a file and its message types."""

    name: str
    inside: list[_Types]


def _types_of(schema: Schema) -> _Types:
    """The message types of a registry's schema, which is a descriptor or the source."""
    file = _file(schema.text)
    if file is None:
        return types_in(schema.text)

    def types(found: Any, inside: Any) -> _Types:
        return _Types(found, [types(one.name, one.nested_type) for one in inside])

    return types(file.package, file.message_type)


#: In a source: what is no code, the package, and whatever opens or closes a block or is a type of its own. A map is a
#: list of entries, and their type has a place among the others.
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
_PACKAGE = re.compile(r"\bpackage\s+([\w.\s]+);")
_BLOCKS = re.compile(r"\bmessage\s+(\w+)\s*\{|\bgroup\s+(\w+)\s*=[^{;]*\{|\bmap\s*<[^>]*>\s*(\w+)\s*=|[{}]")


def types_in(source: str) -> _Types:
    """The message types in a source, in their order. UndecodableError if it is none."""
    code = _NO_CODE.sub(" ", source)
    package = _PACKAGE.search(code)
    top = _Types("".join(package[1].split()) if package else "", [])
    # The blocks that are open, from the outermost: types, and None for an enumeration, a choice or a service.
    is_open: list[_Types | None] = [top]
    for found in _BLOCKS.finditer(code):
        if found[0] == "}":
            if len(is_open) == 1:
                raise UndecodableError("the schema that the body names is no source of Protobuf")
            is_open.pop()
            continue
        name = next((group for group in found.groups() if group), None)
        made = _Types(name, []) if name else None
        around = next(one for one in reversed(is_open) if one is not None)
        if made is not None:
            around.inside.append(made)
        if found[0].endswith("{"):
            is_open.append(made)
    return top


def _message_name(types: _Types, places: Sequence[int]) -> str:
    """The full name of a message type."""
    names = [types.name] if types.name else []
    for place in places:
        if not 0 <= place < len(types.inside):
            raise UndecodableError(f"the schema that the body names has no message type at {list(places)}")
        types = types.inside[place]
        names.append(types.name)
    return ".".join(names)


def _places(body: bytes) -> tuple[list[int], int]:
    """Return where in its file a message type is, by the place at each level, and where in the body the message begins.

        00  id (4 bytes)  levels  place at each level …  message

    A single 0 stands for one level and the place 0. Levels and places are varints with the sign in the lowest bit.
    """

    def number(at: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 35, 7):
            byte = body[at : at + 1]
            if not byte:
                break
            at += 1
            value |= (byte[0] & 0x7F) << shift
            if byte[0] < 0x80:
                return (value >> 1) ^ -(value & 1), at
        raise UndecodableError("the place of the message type is cut off or too long")

    levels, at = number(FRAME)
    if levels == 0:
        return [0], at
    if not 0 < levels <= _MOST_LEVELS:
        raise UndecodableError(f"a message type is not {levels} levels deep")
    places = []
    for _ in range(levels):
        place, at = number(at)
        places.append(place)
    return places, at


# --- Types ------------------------------------------------------------------------------------------------------------


def _message(descriptor: Any, path: tuple[str, ...], inside: tuple[str, ...]) -> Shape:
    """A message: a struct. A field that knows whether it was set is null where it was not."""
    import pyarrow as pa

    name = descriptor.full_name
    if path and name == _TIMESTAMP:
        return Shape(pa.timestamp("us", "UTC"), lambda message: message.seconds * 1_000_000 + message.nanos // 1000)
    if path and name in _WRAPPERS:
        wrapped = _value(descriptor.fields_by_name["value"], path, inside)
        change = wrapped.convert or _as_it_is
        return Shape(wrapped.type, lambda message: change(message.value))
    if path and name in _JSON:
        to_dict = import_library("google.protobuf.json_format", "protobuf").MessageToDict
        return Shape(pa.string(), lambda message: json.dumps(to_dict(message), ensure_ascii=False))
    if name in inside:
        raise PipelineError(f"the field {'.'.join(path)} is a {name} inside of a {name}: Spark has no such column")
    if not descriptor.fields and not path:
        raise PipelineError(f"the message type {name} has no fields")
    if not descriptor.fields:
        # Spark's files have no struct without fields. What is left to say is that it is there.
        return Shape(pa.bool_(), lambda message: True)
    types: list[tuple[str, Any]] = []
    getters: list[tuple[str, bool, Convert]] = []
    for one in descriptor.fields:
        found = _field(one, (*path, one.name), (*inside, name))
        types.append((one.name, found.type))
        getters.append((one.name, one.has_presence, found.convert or _as_it_is))

    def convert(message: Any) -> Any:
        return {
            name: None if has_presence and not message.HasField(name) else change(getattr(message, name))
            for name, has_presence, change in getters
        }

    return Shape(pa.struct(types), convert)


def _field(one: Any, path: tuple[str, ...], inside: tuple[str, ...]) -> Shape:
    """A field, which may have many values."""
    import pyarrow as pa

    if one.message_type is not None and one.message_type.GetOptions().map_entry:
        keys = _value(one.message_type.fields_by_name["key"], path, inside)
        values = _value(one.message_type.fields_by_name["value"], (*path, "{}"), inside)
        change = values.convert or _as_it_is
        return Shape(pa.map_(keys.type, values.type), lambda found: [(key, change(found[key])) for key in found])
    item = _value(one, path, inside)
    if not one.is_repeated:
        return item
    each = item.convert or _as_it_is
    return Shape(pa.list_(item.type), lambda found: [each(value) for value in found])


def _value(one: Any, path: tuple[str, ...], inside: tuple[str, ...]) -> Shape:
    """A single value of a field."""
    import pyarrow as pa

    if one.message_type is not None:
        return _message(one.message_type, path, inside)
    if one.enum_type is not None:
        # A number may have two names, of which the first is its own.
        names = {value.number: value.name for value in reversed(one.enum_type.values)}
        return Shape(pa.string(), lambda number: names.get(number, str(number)))
    if one.type == one.TYPE_BYTES:
        return Shape(pa.binary())
    kinds = {
        one.CPPTYPE_INT32: pa.int32(),
        one.CPPTYPE_INT64: pa.int64(),
        # Spark has no numbers without a sign: the next larger ones.
        one.CPPTYPE_UINT32: pa.int64(),
        one.CPPTYPE_UINT64: pa.decimal128(20, 0),
        one.CPPTYPE_FLOAT: pa.float32(),
        one.CPPTYPE_DOUBLE: pa.float64(),
        one.CPPTYPE_BOOL: pa.bool_(),
        one.CPPTYPE_STRING: pa.string(),
    }
    return Shape(kinds[one.cpp_type])


def _as_it_is(value: Any) -> Any:
    return value
