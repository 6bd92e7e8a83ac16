"""Bodies of every format, good ones and bad ones, become columns: by themselves, in Spark, and in the pipelines.

Schemas and values are made by generators, and encoded by the formats' own libraries. Registries are Apicurio's, where
it is there, and a small server over HTTP that answers the documented API (`schema_registry`).
"""

from __future__ import annotations

import datetime
import decimal
import importlib
import io
import itertools
import json
import pickle
import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")
pytest.importorskip("fastavro", reason="fastavro is not installed: pip install 'flintmq[decode]'")
pytest.importorskip("google.protobuf", reason="protobuf is not installed: pip install 'flintmq[decode]'")
pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'flintmq[spark]'")

import fastavro
import msgspec
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2, timestamp_pb2, wrappers_pb2

from flintmq.errors import PipelineError
from flintmq.spark import decode
from flintmq.spark.decoding import BodyDecoder, decoder
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import common, sql
from flintmq.spark.shipped.avro import Avro
from flintmq.spark.shipped.bodies import Bodies, Format
from flintmq.spark.shipped.messagepack import MessagePack
from flintmq.spark.shipped.protobuf import Protobuf, types_in
from flintmq.spark.shipped.registry import Registry, UnknownSchemaError

from .daemons import Node
from .schema_registry import SchemaRegistry, apicurio, framed, register, serve
from .test_pipelines import Messages, by_deltalake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def own_registry() -> Iterator[SchemaRegistry]:
    with serve() as found:
        yield found


@pytest.fixture(scope="module")
def apicurio_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with apicurio(tmp_path_factory.mktemp("apicurio")) as url:
        yield url


@pytest.fixture(params=["small", "apicurio"])
def registry(request: pytest.FixtureRequest, own_registry: SchemaRegistry) -> str:
    """The URL of a registry."""
    return own_registry.url if request.param == "small" else request.getfixturevalue("apicurio_registry")


@pytest.fixture
def subject() -> str:
    """A subject that no other test uses."""
    return f"{uuid.uuid4().hex}-value"


def read(format: Format, bodies: list[bytes | None], size: int | None = None) -> list[dict[str, Any]]:
    """What becomes of bodies, in batches of a size: as an executor does it, with what was pickled."""
    decoded: Bodies = pickle.loads(pickle.dumps(Bodies(format, format.type())))
    found: list[dict[str, Any]] = []
    for at in range(0, len(bodies), size or len(bodies) or 1):
        batch = decoded(pa.array(bodies[at : at + (size or len(bodies))], pa.binary()))
        batch.validate(full=True)
        found += batch.to_pylist()
    return found


# --- Avro -------------------------------------------------------------------------------------------------------------


class Typed(NamedTuple):
    """A schema, the values that it has, and what they become."""

    schema: Any
    values: st.SearchStrategy[Any]
    becomes: Callable[[Any], Any]


def same(value: Any) -> Any:
    return value


def items(value: dict[str, int]) -> list[tuple[str, int]]:
    return list(value.items())


def moment(value: int, unit: int) -> datetime.datetime:
    return EPOCH + datetime.timedelta(microseconds=value * unit)


def avro_leaf(draw: Any, names: Iterator[int]) -> Typed:
    micros = st.integers(-(10**15), 10**16)
    name = f"N{next(names)}"
    leaves = {
        "null": Typed("null", st.none(), same),
        "boolean": Typed("boolean", st.booleans(), same),
        "int": Typed("int", st.integers(-(2**31), 2**31 - 1), same),
        "long": Typed("long", st.integers(-(2**63), 2**63 - 1), same),
        "float": Typed("float", st.floats(width=32, allow_nan=False), same),
        "double": Typed("double", st.floats(allow_nan=False), same),
        "bytes": Typed("bytes", st.binary(max_size=9), same),
        "string": Typed({"type": "string", "avro.java.string": "String"}, st.text(max_size=9), same),
        "enum": Typed({"type": "enum", "name": name, "symbols": ["A", "B", "C"]}, st.sampled_from("ABC"), same),
        "fixed": Typed({"type": "fixed", "name": name, "size": 3}, st.binary(min_size=3, max_size=3), same),
        "date": Typed(
            {"type": "int", "logicalType": "date"},
            st.integers(-700_000, 2_900_000),
            lambda days: (EPOCH + datetime.timedelta(days=days)).date(),
        ),
        "millis": Typed(
            {"type": "long", "logicalType": "timestamp-millis"},
            st.integers(-(10**12), 10**13),
            lambda value: moment(value, 1000),
        ),
        "micros": Typed({"type": "long", "logicalType": "timestamp-micros"}, micros, lambda value: moment(value, 1)),
        "local": Typed(
            {"type": "long", "logicalType": "local-timestamp-micros"},
            micros,
            lambda value: moment(value, 1).replace(tzinfo=None),
        ),
        "decimal": Typed(
            {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 7},
            st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: decimal.Decimal(n).scaleb(-7, decimal.Context(50))),
            same,
        ),
    }
    return leaves[draw(st.sampled_from(sorted(leaves)))]


def avro_type(draw: Any, names: Iterator[int], depth: int) -> Typed:
    shape = draw(st.sampled_from(("leaf", "leaf", "optional", "array", "map", "record", "union"))) if depth else "leaf"
    if shape == "leaf":
        return avro_leaf(draw, names)
    if shape == "record":
        return avro_record(draw, names, depth - 1)
    if shape == "union":
        return avro_union(draw, names, depth - 1)
    inside = avro_type(draw, names, depth - 1)
    if shape == "array":
        return Typed(
            {"type": "array", "items": inside.schema},
            st.lists(inside.values, max_size=3),
            lambda values: [inside.becomes(value) for value in values],
        )
    if shape == "map":
        return Typed(
            {"type": "map", "values": inside.schema},
            st.dictionaries(st.text(max_size=3), inside.values, max_size=3),
            lambda values: [(key, inside.becomes(value)) for key, value in values.items()],
        )
    if isinstance(inside.schema, list) or inside.schema == "null":
        return inside
    kind = inside.schema if isinstance(inside.schema, str) else inside.schema.get("name", inside.schema["type"])
    return Typed(
        ["null", inside.schema],
        # So the writer need not find out which type it is.
        st.none() | inside.values.map(lambda value: (kind, value)),
        lambda value: None if value is None else inside.becomes(value[1]),
    )


def avro_record(draw: Any, names: Iterator[int], depth: int, least: int = 0) -> Typed:
    fields = {f"f{number}": avro_type(draw, names, depth) for number in range(draw(st.integers(least, 4)))}
    schema = {
        "type": "record",
        "name": f"R{next(names)}",
        "fields": [{"name": name, "type": field.schema} for name, field in fields.items()],
    }
    values = st.fixed_dictionaries({name: field.values for name, field in fields.items()})
    if not fields:
        return Typed(schema, values, lambda value: True)
    return Typed(schema, values, lambda value: {name: field.becomes(value[name]) for name, field in fields.items()})


def avro_union(draw: Any, names: Iterator[int], depth: int) -> Typed:
    """Some types in any order. Two of one kind are only told apart by their names, and one of them may have none."""
    number = next(names)
    enumeration = {"type": "enum", "name": f"E{number}", "symbols": ["A", "B"]}
    members = {
        "long": Typed("long", st.integers(-9, 9), same),
        "string": Typed("string", st.text(max_size=2) | st.sampled_from("AB"), same),
        "bytes": Typed("bytes", st.binary(max_size=2), same),
        "map": Typed({"type": "map", "values": "int"}, st.dictionaries(st.text(max_size=1), st.integers(0, 9)), items),
        f"E{number}": Typed(enumeration, st.sampled_from("AB"), same),
        f"X{number}": Typed(
            {"type": "fixed", "name": f"X{number}", "size": 2}, st.binary(min_size=2, max_size=2), same
        ),
    }
    members |= {
        one.schema["name"]: one for one in (avro_record(draw, names, depth, 1), avro_record(draw, names, depth))
    }
    chosen = draw(st.lists(st.sampled_from(sorted(members)), min_size=2, unique=True))

    def named(name: str) -> st.SearchStrategy[Any]:
        # So the writer is told which type it is.
        return members[name].values.map(lambda value: (name, value))

    def becomes(value: Any) -> Any:
        if value is None:
            return None
        name, value = value
        return dict.fromkeys(chosen) | {name: members[name].becomes(value)}

    schemas = [members[name].schema for name in chosen]
    return Typed(["null", *schemas], st.none() | st.one_of([named(name) for name in chosen]), becomes)


@st.composite
def avro_messages(draw: Any) -> tuple[Any, list[tuple[bytes, Any]]]:
    """A schema, and bodies with what they become: None for bad ones."""
    record = avro_record(draw, itertools.count(), 3, 1)
    rows = []
    for value in draw(st.lists(record.values, max_size=7)):
        body = avro_body(record.schema, value)
        damage = draw(st.sampled_from(("none", "none", "cut", "more")))
        if damage == "more":
            rows.append((body + b"\0", None))
        elif damage == "cut" and body:
            rows.append((body[: draw(st.integers(0, len(body) - 1))], None))
        else:
            rows.append((body, record.becomes(value)))
    return record.schema, rows


def avro_body(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


@QUICK
@given(avro_messages(), st.integers(1, 5))
def test_avro_of_any_schema_is_what_was_written(made: tuple[Any, list[tuple[bytes, Any]]], size: int) -> None:
    schema, rows = made
    found = read(Avro((json.dumps(schema),)), [body for body, _ in rows], size)
    assert [row["data"] for row in found] == [becomes for _, becomes in rows]
    assert [row["error"] is None for row in found] == [becomes is not None for _, becomes in rows]


@QUICK
@given(st.binary(max_size=40), avro_messages())
def test_no_bytes_stop_a_batch(noise: bytes, made: tuple[Any, list[tuple[bytes, Any]]]) -> None:
    schema, rows = made
    bodies = [body for body, _ in rows]
    found = read(Avro((json.dumps(schema),)), [noise, *bodies, None])
    assert [row["data"] for row in found[1:-1]] == [becomes for _, becomes in rows]
    assert found[-1] == {"data": None, "error": "the message has no body"}


def test_a_number_that_arrow_refuses_is_found_among_the_others() -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "n", "type": "int"}]}
    # Avro's int and long have the same bytes.
    wide = {"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]}
    bodies = [avro_body(wide, {"n": 2**40 if n in (3, 8, 9) else n}) for n in range(17)]
    found = read(Avro((json.dumps(schema),)), bodies)
    assert [n for n, row in enumerate(found) if row["error"]] == [3, 8, 9]
    assert [row["data"]["n"] for row in found if row["data"]] == [n for n in range(17) if n not in (3, 8, 9)]


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ('"long"', "is a record, and this one is a long"),
        ("{", "cannot be read"),
        ('{"type": "record", "name": "R", "fields": []}', "this one has none"),
        ('{"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]}', "a R inside of a R"),
        ('{"type": "record", "name": "R", "fields": [{"name": "r", "type": "Missing"}]}', "Missing"),
        (
            '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}, {"name": "A", "type": "int"}]}',
            "differ by case alone",
        ),
    ],
)
def test_a_schema_of_avro_that_is_no_table_is_refused_at_the_start(schema: str, sentence: str) -> None:
    with pytest.raises(PipelineError, match=sentence):
        decoder("avro", schema=schema)


# --- Protobuf ---------------------------------------------------------------------------------------------------------

F = descriptor_pb2.FieldDescriptorProto
SCALARS: dict[int, tuple[st.SearchStrategy[Any], Callable[[Any], Any]]] = {
    F.TYPE_DOUBLE: (st.floats(allow_nan=False), same),
    F.TYPE_FLOAT: (st.floats(width=32, allow_nan=False), same),
    F.TYPE_INT64: (st.integers(-(2**63), 2**63 - 1), same),
    F.TYPE_UINT64: (st.integers(0, 2**64 - 1), decimal.Decimal),
    F.TYPE_INT32: (st.integers(-(2**31), 2**31 - 1), same),
    F.TYPE_FIXED64: (st.integers(0, 2**64 - 1), decimal.Decimal),
    F.TYPE_FIXED32: (st.integers(0, 2**32 - 1), same),
    F.TYPE_BOOL: (st.booleans(), same),
    F.TYPE_STRING: (st.text(max_size=9), same),
    F.TYPE_BYTES: (st.binary(max_size=9), same),
    F.TYPE_UINT32: (st.integers(0, 2**32 - 1), same),
    F.TYPE_SFIXED32: (st.integers(-(2**31), 2**31 - 1), same),
    F.TYPE_SFIXED64: (st.integers(-(2**63), 2**63 - 1), same),
    F.TYPE_SINT32: (st.integers(-(2**31), 2**31 - 1), same),
    F.TYPE_SINT64: (st.integers(-(2**63), 2**63 - 1), same),
}


def proto_class(file: Any, name: str) -> Any:
    """A message type, by Protobuf's own means."""
    pool = descriptor_pool.DescriptorPool()
    for module in (timestamp_pb2, wrappers_pb2, struct_pb2):
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb))
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def descriptors(*files: Any) -> bytes:
    return bytes(descriptor_pb2.FileDescriptorSet(file=files).SerializeToString())


@st.composite
def proto_messages(draw: Any) -> tuple[Any, list[tuple[bytes, Any]]]:
    """A file of descriptors with a message type t.M, and bodies with what they become."""
    is_new = draw(st.booleans())
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", package="t", syntax="proto3" if is_new else "proto2")
    message = file.message_type.add(name="M")
    inner = message.nested_type.add(name="Inner")
    inner.field.add(name="n", number=1, type=F.TYPE_SINT32, label=F.LABEL_OPTIONAL)
    colour = message.enum_type.add(name="Colour")
    for number, name in enumerate(("RED", "GREEN")):
        colour.value.add(name=name, number=number)
    fields: dict[str, tuple[int, bool, Callable[[Any], Any]]] = {}
    values: dict[str, st.SearchStrategy[Any]] = {}
    for number in range(1, draw(st.integers(1, 6)) + 1):
        name, kind = f"f{number}", draw(st.sampled_from([*SCALARS, F.TYPE_MESSAGE, F.TYPE_ENUM]))
        is_many = draw(st.booleans())
        field = message.field.add(name=name, number=number, type=kind)
        field.label = F.LABEL_REPEATED if is_many else F.LABEL_OPTIONAL
        if kind == F.TYPE_MESSAGE:
            field.type_name = ".t.M.Inner"
            one: st.SearchStrategy[Any] = st.fixed_dictionaries({"n": st.integers(-9, 9)})
            becomes: Callable[[Any], Any] = same
        elif kind == F.TYPE_ENUM:
            field.type_name = ".t.M.Colour"
            one, becomes = st.sampled_from(("RED", "GREEN")), same
        else:
            one, becomes = SCALARS[kind]
        fields[name] = kind, is_many, becomes
        values[name] = st.lists(one, max_size=3) if is_many else st.none() | one
    made = proto_class(file, "t.M")

    def expected(value: dict[str, Any]) -> Any:
        found = {}
        for name, (kind, is_many, becomes) in fields.items():
            given = value[name]
            if is_many:
                found[name] = [becomes(one) for one in given]
            elif given is not None:
                found[name] = becomes(given)
            elif is_new and kind != F.TYPE_MESSAGE:
                # Without presence: what was not set is what the type begins with.
                zero = "RED" if kind == F.TYPE_ENUM else type(SCALARS[kind][1](0))()
                found[name] = {F.TYPE_STRING: "", F.TYPE_BYTES: b"", F.TYPE_BOOL: False}.get(kind, zero)
            else:
                found[name] = None
        return found

    rows = []
    for value in draw(st.lists(st.fixed_dictionaries(values), max_size=7)):
        body = made(**{name: one for name, one in value.items() if one is not None}).SerializeToString()
        if draw(st.sampled_from((True, True, False))):
            rows.append((body, expected(value)))
        else:
            # A field of 100 bytes that are not there.
            rows.append((body + b"\xfa\x3f\x64", None))
    return file, rows


@QUICK
@given(proto_messages(), st.integers(1, 5))
def test_protobuf_of_any_descriptor_is_what_was_written(made: tuple[Any, list[tuple[bytes, Any]]], size: int) -> None:
    file, rows = made
    found = read(Protobuf(descriptors(file)), [body for body, _ in rows], size)
    assert [row["data"] for row in found] == [becomes for _, becomes in rows]
    assert [row["error"] is None for row in found] == [becomes is not None for _, becomes in rows]


def well_known_file() -> Any:
    """A type with maps, a choice, and types of Protobuf's own."""
    file = descriptor_pb2.FileDescriptorProto(name="w.proto", package="shop", syntax="proto3")
    names = ("timestamp", "wrappers", "struct")
    file.dependency.extend(f"google/protobuf/{name}.proto" for name in names)
    message = file.message_type.add(name="Order")
    entry = message.nested_type.add(name="PricesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=F.TYPE_MESSAGE, type_name=".google.protobuf.Timestamp", label=F.LABEL_OPTIONAL
    )
    message.nested_type.add(name="Nothing")
    message.oneof_decl.add(name="choice")
    kinds = (
        ("at", ".google.protobuf.Timestamp", F.LABEL_OPTIONAL),
        ("note", ".google.protobuf.StringValue", F.LABEL_OPTIONAL),
        ("more", ".google.protobuf.Struct", F.LABEL_OPTIONAL),
        ("prices", ".shop.Order.PricesEntry", F.LABEL_REPEATED),
        ("nothing", ".shop.Order.Nothing", F.LABEL_OPTIONAL),
    )
    for number, (name, kind, label) in enumerate(kinds, 1):
        message.field.add(name=name, number=number, type=F.TYPE_MESSAGE, type_name=kind, label=label)
    message.field.add(name="a", number=8, type=F.TYPE_INT32, label=F.LABEL_OPTIONAL, oneof_index=0)
    message.field.add(name="b", number=9, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL, oneof_index=0)
    return file


def test_well_known_types_maps_and_choices_of_protobuf() -> None:
    file = well_known_file()
    made = proto_class(file, "shop.Order")
    empty, full = made(b=""), made(a=0)
    full.at.FromMicroseconds(-1_500_001)
    full.note.value = "x"
    full.more.update({"k": [1, None]})
    full.prices["p"].seconds = 7
    full.nothing.SetInParent()
    found = [
        row["data"] for row in read(Protobuf(descriptors(file)), [empty.SerializeToString(), full.SerializeToString()])
    ]
    absent = {"at": None, "note": None, "more": None, "prices": [], "nothing": None}
    assert found[0] == absent | {"a": None, "b": ""}
    assert found[1] == {
        "at": EPOCH - datetime.timedelta(microseconds=1_500_001),
        "note": "x",
        "more": '{"k": [1.0, null]}',
        "prices": [("p", EPOCH + datetime.timedelta(seconds=7))],
        "nothing": True,
        "a": 0,
        "b": None,
    }


def test_a_message_of_protobuf_without_what_is_required_is_undecodable() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="r.proto", syntax="proto2")
    message = file.message_type.add(name="R")
    message.field.add(name="id", number=1, type=F.TYPE_INT32, label=F.LABEL_REQUIRED)
    message.enum_type.add(name="E").value.add(name="ONE", number=1)
    [good, bad] = read(Protobuf(descriptors(file)), [b"\x08\x01", b""])
    assert good["data"] == {"id": 1}
    assert bad == {"data": None, "error": "the message lacks what is required: id"}


def test_a_number_that_an_enumeration_does_not_name_is_shown_as_a_number() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="e.proto", syntax="proto3")
    message = file.message_type.add(name="R")
    message.field.add(name="e", number=1, type=F.TYPE_ENUM, type_name=".R.E", label=F.LABEL_OPTIONAL)
    message.enum_type.add(name="E").value.add(name="ZERO", number=0)
    assert [row["data"]["e"] for row in read(Protobuf(descriptors(file)), [b"", b"\x08\x05"])] == ["ZERO", "5"]


def two_types() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="two.proto", package="t", syntax="proto3")
    for name in ("First", "Second"):
        message = file.message_type.add(name=name)
        message.field.add(name="id", number=1, type=F.TYPE_INT64, label=F.LABEL_OPTIONAL)
        inner = message.nested_type.add(name="Inner")
        inner.field.add(name="text", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    return file


def test_descriptors_that_do_not_say_enough_are_refused_at_the_start() -> None:
    two = descriptors(two_types())
    with pytest.raises(PipelineError, match=r"t\.First, t\.Second"):
        decoder("protobuf", schema=two)
    with pytest.raises(PipelineError, match=r"no message type t\.Third"):
        decoder("protobuf", schema=two, message="t.Third")
    for schema, sentence in ((b"nonsense", "no set of"), (b"", "is empty"), ("text", "--descriptor_set_out")):
        with pytest.raises(PipelineError, match=sentence):
            decoder("protobuf", schema=schema)
    lone = descriptor_pb2.FileDescriptorProto(name="l.proto", dependency=["other.proto"])
    with pytest.raises(PipelineError, match=r"lack other\.proto: .*--include_imports"):
        decoder("protobuf", schema=descriptors(lone))
    recursive = descriptor_pb2.FileDescriptorProto(name="r.proto", syntax="proto3")
    recursive.message_type.add(name="R").field.add(
        name="r", number=1, type=F.TYPE_MESSAGE, type_name=".R", label=F.LABEL_OPTIONAL
    )
    with pytest.raises(PipelineError, match="a R inside of a R"):
        decoder("protobuf", schema=descriptors(recursive))


# --- MessagePack ------------------------------------------------------------------------------------------------------

PACKED: list[tuple[Any, st.SearchStrategy[Any], Callable[[Any], Any]]] = [
    (pa.int8(), st.integers(-128, 127), same),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1), same),
    (pa.float64(), st.floats(allow_nan=False) | st.integers(-(2**53), 2**53), float),
    (pa.string(), st.text(max_size=9), same),
    (pa.binary(), st.binary(max_size=9), same),
    (pa.bool_(), st.booleans(), same),
    (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=3), max_size=3), same),
    (
        pa.map_(pa.int32(), pa.string()),
        st.dictionaries(st.integers(0, 9), st.none() | st.text(max_size=3), max_size=3),
        lambda value: list(value.items()),
    ),
    (pa.struct([("x", pa.int32())]), st.fixed_dictionaries({"x": st.none() | st.integers(0, 9)}), same),
    (
        pa.timestamp("us", "UTC"),
        st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2100, 1, 1)).map(
            lambda value: value.replace(tzinfo=datetime.UTC)
        ),
        same,
    ),
]


@QUICK
@given(st.data(), st.integers(1, 5))
def test_maps_of_messagepack_are_what_was_written(data: st.DataObject, size: int) -> None:
    columns = data.draw(st.lists(st.sampled_from(PACKED), min_size=1, max_size=5))
    kind = pa.struct([(f"f{number}", column[0]) for number, column in enumerate(columns)])
    bodies, expected = [], []
    for _ in range(data.draw(st.integers(0, 7))):
        value = {f"f{number}": data.draw(st.none() | column[1]) for number, column in enumerate(columns)}
        spoiled = data.draw(st.sampled_from((None, None, *value)))
        expected.append(
            {f"f{n}": None if value[f"f{n}"] is None else column[2](value[f"f{n}"]) for n, column in enumerate(columns)}
        )
        if spoiled is not None:
            # No column takes such a thing.
            value[spoiled] = msgspec.msgpack.Ext(5, b"x")
            expected[-1] = None
        left_out = data.draw(st.sampled_from((None, *(name for name in value if value[name] is None))))
        bodies.append(msgspec.msgpack.encode({name: one for name, one in value.items() if name != left_out} | {"z": 1}))
    found = read(MessagePack(kind), bodies, size)
    assert [row["data"] for row in found] == expected
    assert [row["error"] is None for row in found] == [one is not None for one in expected]


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (pa.int64(), 1.5, "f is 1.5, not BIGINT"),
        (pa.int64(), True, "f is True, not BIGINT"),
        (pa.int64(), 2**63, "f is 9223372036854775808, not BIGINT"),
        (pa.int8(), 128, "f is 128, not TINYINT"),
        (pa.float32(), 1e39, "f is 1e+39, not FLOAT"),
        (pa.float64(), "1", "f is '1', not DOUBLE"),
        (pa.string(), b"x", "f is b'x', not STRING"),
        (pa.list_(pa.string()), "ab", "f is 'ab', not an array"),
        (pa.struct([("x", pa.int32())]), {"x": "y"}, "f.x is 'y', not INT"),
        (pa.string(), 10**15, "f is 1000000000000000, not STRING"),
    ],
)
def test_a_value_of_another_type_is_told(kind: Any, value: Any, error: str) -> None:
    good = msgspec.msgpack.encode({})
    [bad, fine] = read(MessagePack(pa.struct([("f", kind)])), [msgspec.msgpack.encode({"f": value}), good])
    assert bad == {"data": None, "error": error}
    assert fine == {"data": {"f": None}, "error": None}


def test_bytes_that_are_no_map_of_messagepack_are_undecodable() -> None:
    bodies = [b"", b"\xc1", b"\x81\xa1f", b"\x81\xa1f\x01\x00", msgspec.msgpack.encode([1]), b"\x91" * 5000]
    found = read(MessagePack(pa.struct([("f", pa.int64())])), bodies)
    assert [row["data"] for row in found] == [None] * len(bodies)
    assert all(row["error"] for row in found)
    with pytest.raises(PipelineError, match="MessagePack does not have"):
        MessagePack(pa.struct([("f", pa.date32())])).type()


# --- Evolution --------------------------------------------------------------------------------------------------------

#: A field: its number in Protobuf, its type and its value. One version of a schema has it, another not, or other.
TYPES: dict[str, st.SearchStrategy[Any]] = {
    "long": st.integers(-(2**40), 2**40),
    "double": st.floats(-1e6, 1e6).map(lambda value: value + 0.5).filter(lambda value: value % 1 != 0),
    "string": st.text("xyz", min_size=1, max_size=3),
}
Version = dict[str, str]
versions = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(sorted(TYPES)), min_size=1)


def as_avro(version: Version) -> str:
    fields = [{"name": name, "type": ["null", kind], "default": None} for name, kind in sorted(version.items())]
    return json.dumps({"type": "record", "name": "R", "fields": fields})


def as_protobuf(version: Version) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="v.proto", syntax="proto2")
    message = file.message_type.add(name="R")
    kinds = {"long": F.TYPE_INT64, "double": F.TYPE_DOUBLE, "string": F.TYPE_STRING}
    for name, kind in sorted(version.items()):
        message.field.add(name=name, number=ord(name) - 96, type=kinds[kind], label=F.LABEL_OPTIONAL)
    return file


def as_arrow(version: Version) -> Any:
    kinds = {"long": pa.int64(), "double": pa.float64(), "string": pa.string()}
    return pa.struct([(name, kinds[kind]) for name, kind in sorted(version.items())])


@QUICK
@given(st.data(), versions, versions)
def test_messages_of_one_version_are_read_by_another(
    own_registry: SchemaRegistry, data: st.DataObject, writer: Version, reader: Version
) -> None:
    """As docs/decoding.md has it: new fields, removed fields, changed types."""
    value = {name: data.draw(TYPES[kind]) for name, kind in writer.items()}
    changed = {name: (writer[name], reader[name]) for name in writer.keys() & reader.keys()}
    kept = {name: value.get(name) for name in reader}
    widened = {name: float(one) if changed.get(name) == ("long", "double") else one for name, one in kept.items()}
    fits = all(kinds in (("long", "double"), (kinds[1],) * 2) for kinds in changed.values())

    # Avro, with the writer's schema from a registry: numbers are widened, other types are undecodable.
    id = register(own_registry.url, "any", as_avro(writer))
    body = framed(id, avro_body(json.loads(as_avro(writer)), value))
    [row] = read(Avro((as_avro(reader),), Registry.of(own_registry.url)), [body])
    assert row["data"] == (widened if fits else None)
    assert (row["error"] is None) == fits

    # Protobuf: a field of another type on the wire is an unknown field.
    body = proto_class(as_protobuf(writer), "R")(**value).SerializeToString()
    [row] = read(Protobuf(descriptors(as_protobuf(reader))), [body])
    assert row["data"] == {name: one if writer.get(name) == reader[name] else None for name, one in kept.items()}

    # MessagePack, by names: as Avro, without a schema of the writer.
    [row] = read(MessagePack(as_arrow(reader)), [msgspec.msgpack.encode(value)])
    assert row["data"] == (widened if fits else None)


def test_avro_resolves_defaults_aliases_and_enumerations(registry: str, subject: str) -> None:
    old = {
        "type": "record",
        "name": "shop.Order",
        "fields": [
            {"name": "id", "type": "int"},
            {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "LOST", "DONE"]}},
            {"name": "gone", "type": {"type": "array", "items": "string"}},
        ],
    }
    new = {
        "type": "record",
        "name": "shop.Order",
        "fields": [
            {"name": "number", "aliases": ["id"], "type": "double"},
            {
                "name": "state",
                "type": {"type": "enum", "name": "State", "symbols": ["NEW", "DONE", "OTHER"], "default": "OTHER"},
            },
            {"name": "raw", "type": "bytes", "default": "\u00ff\u0001"},
            {
                "name": "price",
                "type": {
                    "type": "record",
                    "name": "Price",
                    "fields": [
                        {
                            "name": "amount",
                            "type": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
                        }
                    ],
                },
                "default": {"amount": "\u0001\u0000"},
            },
        ],
    }
    old_id, new_id = register(registry, subject, json.dumps(old)), register(registry, f"{subject}-2", json.dumps(new))
    one = {"id": 7, "state": "LOST", "gone": ["x"]}
    two = {"number": 1.5, "state": "DONE", "raw": b"", "price": {"amount": decimal.Decimal("1.00")}}
    bodies = [framed(old_id, avro_body(old, one)), framed(new_id, avro_body(new, two))] * 2
    found = decoder("avro", registry=registry, subject=f"{subject}-2")
    assert isinstance(found, BodyDecoder)
    rows = read(found.bodies.format, bodies)
    price = {"amount": decimal.Decimal("2.56")}
    expected = [{"number": 7.0, "state": "OTHER", "raw": b"\xff\x01", "price": price}, two]
    # Twice: what stands in for what is missing stays as it is.
    assert [row["data"] for row in rows] == expected * 2
    [row] = read(decoder("avro", schema=old, registry=registry).bodies.format, bodies[1:2])  # type: ignore[attr-defined]
    assert row["data"] is None and "SchemaResolutionError" in row["error"]


def test_unions_of_records_are_resolved_too(own_registry: SchemaRegistry) -> None:
    def schema(*more: dict[str, Any]) -> dict[str, Any]:
        first = {"type": "record", "name": "A", "fields": [{"name": "x", "type": "int"}, *more]}
        second = {"type": "record", "name": "B", "fields": [{"name": "a", "type": ["null", "A"]}]}
        fields = [{"name": "u", "type": ["null", first, second]}, {"name": "v", "type": ["null", "B", "A"]}]
        return {"type": "record", "name": "R", "fields": fields}

    old, new = schema(), schema({"name": "y", "type": "string", "default": "new"})
    id = register(own_registry.url, "union", json.dumps(old))
    values = [{"u": ("A", {"x": 1}), "v": ("B", {"a": {"x": 2}})}, {"u": ("B", {"a": None}), "v": ("A", {"x": 3})}]
    bodies = [framed(id, avro_body(old, value)) for value in values]
    found = read(Avro((json.dumps(new),), Registry.of(own_registry.url)), bodies)
    assert [row["error"] for row in found] == [None, None]
    assert found[0]["data"] == {
        "u": {"A": {"x": 1, "y": "new"}, "B": None},
        "v": {"A": None, "B": {"a": {"x": 2, "y": "new"}}},
    }
    assert found[1]["data"] == {"u": {"A": None, "B": {"a": None}}, "v": {"A": {"x": 3, "y": "new"}, "B": None}}


@pytest.mark.parametrize("where", ["field", "array", "map", "union", "inner"])
def test_a_type_with_a_name_is_read_by_a_union_of_such_types(own_registry: SchemaRegistry, where: str) -> None:
    """The writer had no union, so that no value says which of the reader's types it is."""
    names = "abc"
    records = {
        name: {"type": "record", "name": name.upper(), "fields": [{"name": "x", "type": "long"}]} for name in names
    }
    enums = {
        name: {"type": "enum", "name": f"E{name}", "symbols": ["ONE", f"OF_{name}", "NONE"], "default": "NONE"}
        for name in names
    }

    def schema(of: Any) -> dict[str, Any]:
        kinds = {
            "field": of,
            "array": {"type": "array", "items": of},
            "map": {"type": "map", "values": of},
            "union": ["null", of] if isinstance(of, dict) else ["null", *of],
            "inner": {"type": "record", "name": "Inner", "fields": [{"name": "deep", "type": of}]},
        }
        return {"type": "record", "name": "Top", "fields": [{"name": "f", "type": kinds[where]}]}

    def around(value: Any) -> Any:
        return {"array": [value, value], "map": {"k": value}, "inner": {"deep": value}}.get(where, value)

    for types, value in ((records, {"x": 5}), (enums, "ONE")):
        reader = Avro((json.dumps(schema(list(types.values()))),), Registry.of(own_registry.url))
        for name, written in types.items():
            old = schema(written)
            id = register(own_registry.url, f"union-{where}-{name}-{type(value).__name__}", json.dumps(old))
            [row] = read(reader, [framed(id, avro_body(old, {"f": around(value)}))])
            assert row["error"] is None
            found = row["data"]["f"]
            if where == "array":
                found = found[1]
            elif where == "map":
                found = dict(found)["k"]
            elif where == "inner":
                found = found["deep"]
            label = name.upper() if types is records else f"E{name}"
            assert {key: one for key, one in found.items() if one is not None} == {label: value}, (where, name)


# --- The registry -----------------------------------------------------------------------------------------------------


def test_bodies_that_no_schema_can_be_found_for_are_undecodable(registry: str, subject: str) -> None:
    schema = as_avro({"a": "long"})
    id = register(registry, subject, schema)
    body = avro_body(json.loads(schema), {"a": 1})
    bodies = [framed(id, body), body, b"\0\0\0", framed(2**31 - 1, body), framed(id, b""), framed(id, body + b"x")]
    found = read(decoder("avro", registry=registry, subject=subject).bodies.format, bodies, 4)  # type: ignore[attr-defined]
    assert found[0] == {"data": {"a": 1}, "error": None}
    assert [row["data"] for row in found[1:]] == [None] * 5
    assert "does not begin with a zero" in found[1]["error"] and found[2]["error"] == found[1]["error"]
    assert "/schemas/ids/2147483647" in found[3]["error"]
    with pytest.raises(PipelineError, match="nobody-value"):
        decoder("avro", registry=registry, subject="nobody-value")
    with pytest.raises(PipelineError, match="is one of AVRO, not of protobuf"):
        decoder("protobuf", registry=registry, subject=subject)


def test_an_id_is_asked_for_once(own_registry: SchemaRegistry, subject: str) -> None:
    schema = as_avro({"once": "string"})
    id = register(own_registry.url, subject, schema)
    format = Avro((as_avro({"once": "string", "c": "long"}),), Registry.of(own_registry.url))
    body = framed(id, avro_body(json.loads(schema), {"once": "x"}))
    own_registry.asked.clear()
    read(format, [body, framed(10**6, b"")] * 20, 7)
    read(format, [body] * 20, 3)
    assert own_registry.asked == [f"/schemas/ids/{id}", "/schemas/ids/1000000"]


def test_schemas_may_refer_to_others(registry: str, subject: str) -> None:
    money = {"type": "record", "name": "shop.Money", "fields": [{"name": "cents", "type": "long"}]}
    line = {"type": "record", "name": "shop.Line", "fields": [{"name": "price", "type": "shop.Money"}]}
    order = {
        "type": "record",
        "name": "shop.Order",
        "fields": [{"name": "lines", "type": {"type": "array", "items": "shop.Line"}}],
    }
    register(registry, f"{subject}-money", json.dumps(money))
    to_money = [{"name": "shop.Money", "subject": f"{subject}-money", "version": 1}]
    register(registry, f"{subject}-line", json.dumps(line), references=to_money)
    to_line = [{"name": "shop.Line", "subject": f"{subject}-line", "version": 1}]
    id = register(registry, subject, json.dumps(order), references=to_line)
    named: dict[str, Any] = {}
    for schema in (money, line):
        fastavro.parse_schema(schema, named)
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(order, named), {"lines": [{"price": {"cents": 5}}]})
    found = decoder("avro", registry=registry, subject=subject)
    [row] = read(found.bodies.format, [framed(id, stream.getvalue())])  # type: ignore[attr-defined]
    assert row == {"data": {"lines": [{"price": {"cents": 5}}]}, "error": None}


def test_protobuf_from_a_registry_is_decoded_by_its_message_type(own_registry: SchemaRegistry, subject: str) -> None:
    file = two_types()
    id = register(own_registry.url, subject, file.SerializeToString(), "PROTOBUF")
    first = proto_class(file, "t.First")(id=5).SerializeToString()
    inner = proto_class(file, "t.Second.Inner")(text="x").SerializeToString()

    def rows(message: str, *bodies: bytes) -> list[dict[str, Any]]:
        found = decoder("protobuf", registry=own_registry.url, subject=subject, message=message)
        return read(found.bodies.format, list(bodies))  # type: ignore[attr-defined]

    # One level, place 0, in two spellings; two levels, places 1 and 0, as numbers with a sign.
    short, long, nested = framed(id, first, b"\0"), framed(id, first, b"\x02\0"), framed(id, inner, b"\x04\x02\0")
    assert [row["data"] for row in rows("t.First", short, long)] == [{"id": 5}] * 2
    assert rows("t.Second.Inner", nested)[0]["data"] == {"text": "x"}
    [wrong] = rows("t.Second", short)
    assert wrong == {"data": None, "error": "the message is of type t.First, not t.Second"}
    for places in (b"", b"\x02", b"\x02\x0a", b"\x01", b"\xff\xff\xff\xff\xff\xff", b"\xff\xff\xff\x0f"):
        [row] = rows("t.First", framed(id, b"", places))
        assert row["data"] is None and row["error"], places
    # With a descriptor of one's own the registry still says which type it is.
    mine = decoder("protobuf", schema=descriptors(file), message="t.First", registry=own_registry.url)
    assert read(mine.bodies.format, [short])[0]["data"] == {"id": 5}  # type: ignore[attr-defined]


TWO_TYPES = """
syntax = "proto3"; // message None {
package t ;
option go_package = "message { \\"";
message First { int64 id = 1; message Inner { string text = 1; } }
/* } message None2 { */
message Second { int64 id = 1; oneof choice { int32 message = 3; } message Inner{string text=1;} }
"""


def test_a_registry_may_show_the_source_of_protobuf(registry: str, subject: str) -> None:
    """As Apicurio does. Descriptors are given, and the source says which type a message is of."""
    file = two_types()
    id = register(registry, subject, TWO_TYPES, "PROTOBUF")
    mine = decoder("protobuf", schema=descriptors(file), message="t.Second.Inner", registry=registry)
    inner = proto_class(file, "t.Second.Inner")(text="x").SerializeToString()
    places = (b"\x04\x02\0", b"\x04\0\0", b"\0", b"\x02\x04")
    found = read(mine.bodies.format, [framed(id, inner, one) for one in places])  # type: ignore[attr-defined]
    assert found[0] == {"data": {"text": "x"}, "error": None}
    assert [row["data"] for row in found[1:]] == [None] * 3
    assert found[1]["error"] == "the message is of type t.First.Inner, not t.Second.Inner"
    assert found[2]["error"] == "the message is of type t.First, not t.Second.Inner"
    assert "no message type at [2]" in found[3]["error"]
    with pytest.raises(PipelineError, match="give the descriptors yourself"):
        decoder("protobuf", registry=registry, subject=subject)


@st.composite
def proto_sources(draw: Any, depth: int = 3) -> tuple[str, list[Any]]:
    """What is in a block of a source, and the names of types in there, with those inside of them."""
    text, names = "", []
    for number in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("message", "map", "enum", "oneof", "field", "comment", "group")))
        name = f"{kind.capitalize()}{number}"
        inside, types = draw(proto_sources(depth - 1)) if depth and kind in ("message", "group") else ("", [])
        text += {
            "message": f"message\n{name} {{{inside}}} ",
            "group": f"optional group {name} = {number} [lazy = true] {{ {inside}}}",
            "map": f"map < string, .t.M > {name} = {number + 1};",
            "enum": f"enum {name} {{ message = 0; }}",
            "oneof": f"oneof {name} {{ string group = {number + 1}; }}",
            "field": f"message message_ = {number + 1} [default = '}} \\' message X {{'];",
            "comment": f"/* message {name} {{ */ // }}\n",
        }[kind]
        if kind in ("message", "map", "group"):
            names.append((name, types))
    return text, names


@QUICK
@given(proto_sources())
def test_the_types_of_any_source_are_found_at_their_places(made: tuple[str, list[Any]]) -> None:
    text, names = made

    def plain(found: Any) -> list[Any]:
        return [(one.name, plain(one)) for one in found.inside]

    found = types_in(f'syntax = "proto2"; package a . b;{text} service S {{ rpc R (A) returns (B) {{}} }}')
    assert (found.name, plain(found)) == ("a.b", names)


def test_protobuf_from_a_registry_brings_its_imports(own_registry: SchemaRegistry, subject: str) -> None:
    file = two_types()
    register(own_registry.url, f"{subject}-two", file.SerializeToString(), "PROTOBUF")
    user = descriptor_pb2.FileDescriptorProto(name="default", package="u", syntax="proto3")
    user.dependency.extend(["two.proto", "google/protobuf/timestamp.proto"])
    message = user.message_type.add(name="User")
    for number, kind in enumerate((".t.First", ".google.protobuf.Timestamp"), 1):
        message.field.add(name=f"f{number}", number=number, type=F.TYPE_MESSAGE, type_name=kind, label=F.LABEL_OPTIONAL)
    references = [{"name": "two.proto", "subject": f"{subject}-two", "version": 1}]
    id = register(own_registry.url, subject, user.SerializeToString(), "PROTOBUF", references)
    found = decoder("protobuf", registry=own_registry.url, subject=subject)
    [row] = read(found.bodies.format, [framed(id, b"\x0a\x02\x08\x05", b"\0")])  # type: ignore[attr-defined]
    assert row["data"] == {"f1": {"id": 5}, "f2": None}


def test_a_registry_that_is_away_is_not_the_fault_of_a_message(own_registry: SchemaRegistry, subject: str) -> None:
    schema = as_avro({"d": "long"})
    id = register(own_registry.url, subject, schema)
    with serve() as gone:
        pass
    body = framed(id, avro_body(json.loads(schema), {"d": 1}))
    with pytest.raises(PipelineError, match=rf"registry {gone.url} cannot be asked for /schemas/ids/{id}"):
        read(Avro((schema,), Registry.of(gone.url)), [body])
    # What passes is waited for; what does not is told.
    registry = Registry.of(own_registry.url)
    own_registry.failures = [503, 500]
    assert read(Avro((schema,), registry), [body])[0]["data"] == {"d": 1}
    own_registry.failures = [500] * 4
    with pytest.raises(PipelineError, match="500 Error in the backend datastore"):
        registry.latest(subject)
    assert own_registry.failures == []


def test_a_registry_may_ask_who_we_are() -> None:
    with serve() as found:
        register(found.url, "s", as_avro({"a": "long"}))
        host = found.url.removeprefix("http://")
        for where, options, header in (
            (f"http://me:p%40ss@{host}", {}, "Basic bWU6cEBzcw=="),
            (found.url, {"user": "me", "password": "p@ss"}, "Basic bWU6cEBzcw=="),
            (f"{found.url}/", {"token": "t0ken", "timeout": "5"}, "Bearer t0ken"),
        ):
            found.authorization = header
            known = Registry.of(where, options)
            assert known.latest("s").kind == "AVRO"
            assert "p@ss" not in repr(known) and "t0ken" not in repr(known)
            with pytest.raises(PipelineError, match="401 Unauthorized"):
                Registry.of(found.url).latest("s")
    for where, options, sentence in (
        ("registry:8081", {}, "is a URL"),
        ("http://r:port", {}, "no such port"),
        ("http://r", {"pasword": "x"}, "not pasword"),
        ("http://r", {"timeout": "soon"}, "in seconds"),
        ("http://r", {"timeout": "0"}, "greater than 0"),
    ):
        with pytest.raises(PipelineError, match=sentence):
            Registry.of(where, options)
    with pytest.raises(PipelineError) as caught:
        Registry.of("ftp://me:secret@r")
    assert "secret" not in str(caught.value)


def test_an_answer_of_something_else_is_told(own_registry: SchemaRegistry) -> None:
    with pytest.raises(PipelineError, match="refuses /subjects/s/versions/latest: 404"):
        Registry.of(f"{own_registry.url}/elsewhere").latest("s")
    with pytest.raises(UnknownSchemaError, match="Subject 'nobody' not found"):
        Registry.of(own_registry.url).latest("nobody")


@pytest.mark.parametrize(
    ("format", "options", "sentence"),
    [
        ("xml", {}, "no format 'xml'"),
        ("avro", {}, "a schema, or a registry"),
        ("avro", {"registry": "http://r"}, "the subject"),
        ("protobuf", {}, "a schema, or a registry"),
        ("avro", {"subject": "s"}, "say in which"),
        ("avro", {"schema": "{}", "message": "M"}, "has none"),
        ("msgpack", {"registry": "http://r"}, "no schemas of MessagePack"),
        ("avro", {"schema": Path("/nowhere/x.avsc")}, "No such file"),
    ],
)
def test_what_does_not_fit_together_is_told(format: str, options: Any, sentence: str) -> None:
    with pytest.raises(PipelineError, match=sentence):
        decoder(format, **options)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(PipelineError, match=r"fastavro is not installed .* pip install 'flintmq\[decode\]'"):
        decoder("avro", schema="{}")


# --- Spark ------------------------------------------------------------------------------------------------------------

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}], "default": None},
        {"name": "tags", "type": {"type": "array", "items": {"type": "map", "values": "double"}}, "default": []},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
            "default": "\u0000",
        },
    ],
}


def order(id: int) -> dict[str, Any]:
    at = None if id % 2 else 1_794_794_400_000 + id
    return {"id": id, "at": at, "tags": [{"k": id / 2}] * (id % 3), "price": decimal.Decimal(id).scaleb(-2)}


def is_bad(offset: int) -> bool:
    return offset % 5 == 3


@pytest.fixture
def messages(tmp_path: Path) -> Messages:
    return Messages(tmp_path / "messages")


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_avro_in_spark_is_the_same_in_batches_of_any_size(spark: SparkSession, messages: Messages, zone: str) -> None:
    count = 47
    messages.add(0, count, body=lambda offset: b"\1" if is_bad(offset) else avro_body(ORDER, order(offset)))
    before = {key: spark.conf.get(key) for key in ("spark.sql.session.timeZone",)}
    spark.conf.set("spark.sql.session.timeZone", zone)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    try:
        decoded = decode(messages.batch(spark), "avro", schema=ORDER)
        assert decoded.columns == [*messages.batch(spark).columns, "data", "error"]
        assert (
            decoded.schema["data"].dataType.simpleString()
            == "struct<id:bigint,at:timestamp,tags:array<map<string,double>>,price:decimal(9,2)>"
        )
        rows = (
            decoded.selectExpr("offset", "data.*", "unix_millis(data.at) AS millis", "error")
            .orderBy("offset")
            .collect()
        )
        # Spark may move a condition before the decoding: the same rows all the same.
        assert decoded.where("error IS NULL AND data.id > 10").count() == sum(not is_bad(n) for n in range(11, count))
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        for key, value in before.items():
            spark.conf.set(key, value)
    assert [row["offset"] for row in rows] == list(range(count))
    for row in rows:
        wanted = order(row["offset"])
        if is_bad(row["offset"]):
            assert (row["id"], row["error"]) == (None, "the body ends before the record does")
        else:
            assert (row["id"], row["millis"], row["tags"], row["error"]) == (
                wanted["id"],
                wanted["at"],
                wanted["tags"],
                None,
            )
            assert row["price"] == wanted["price"]


def test_protobuf_messagepack_and_json_in_spark(spark: SparkSession, messages: Messages) -> None:
    file = well_known_file()
    made = proto_class(file, "shop.Order")
    by_format: dict[str, tuple[Callable[[int], bytes], Any]] = {
        "protobuf": (
            lambda n: made(a=n, note={"value": "x"}).SerializeToString(),
            descriptors(file),
        ),
        "msgpack": (lambda n: msgspec.msgpack.encode({"a": n, "note": "x"}), "a INT, note STRING, b ARRAY<INT>"),
        "json": (lambda n: json.dumps({"a": n, "note": "x"}).encode(), "a INT, note STRING, b ARRAY<INT>"),
    }
    for format, (encode, schema) in by_format.items():
        messages.add(0, 20, topic=format, body=lambda n, encode=encode: b"\xff" if is_bad(n) else encode(n))
        table = decode(messages.batch(spark).where(f"topic = '{format}'"), format, schema=schema)
        rows = table.selectExpr("offset", "data.a", "data.note", "data IS NULL AS bad", "error").collect()
        assert len(rows) == 20
        for row in rows:
            if is_bad(row["offset"]):
                assert row["bad"] and row["error"], format
            else:
                assert (row["a"], row["note"], row["error"]) == (row["offset"], "x", None), format


def test_json_is_decoded_whole_or_not_at_all(spark: SparkSession, messages: Messages) -> None:
    bodies = {
        b'{"id": 1, "name": "a", "more": 5}': {"id": 1, "name": "a", "price": None},
        b'{"name": 5, "price": 2}': {"id": None, "name": "5", "price": 2.0},
        b'{"id": 1.5}': None,
        b'{"id": "1"}': None,
        b'{"id": 1': None,
        b"[1]": None,
        b"5": None,
        b"": None,
        b'{"id": 1, "name": "\xff"}': None,
    }
    texts = list(bodies)
    messages.add(0, len(texts), body=lambda offset: texts[offset])
    schema = "id BIGINT, name STRING, price DOUBLE"
    rows = decode(messages.batch(spark), "json", schema=schema).collect()
    assert {bytes(row["value"]): row["data"] and row["data"].asDict() for row in rows} == bodies
    assert all((row["data"] is None) == (row["error"] is not None) for row in rows)
    assert [row["error"] for row in rows if b"\xff" in row["value"]] == ["the body is not UTF-8"]
    # Behind the id of a schema of a registry, which is not asked.
    behind = Messages(messages.folder.parent / "framed")
    behind.add(0, len(texts), body=lambda offset: framed(7, texts[offset]))
    behind.add(50, 51, body=lambda offset: b'{"id": 1}')
    rows = decode(behind.batch(spark), "json", schema=schema, registry="http://nowhere").collect()
    assert {
        bytes(row["value"][5:]): row["data"] and row["data"].asDict() for row in rows if row["offset"] < 50
    } == bodies
    [unframed] = [row["error"] for row in rows if row["offset"] == 50]
    assert "does not begin with a zero" in unframed
    for wrong in (Path("/nowhere/s"), "id NUMBERISH", '{"type": "no"}', None, "a INT, A INT"):
        with pytest.raises(PipelineError):
            decoder("json", schema=wrong)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("TINYINT", {"127": 127, "-128": -128, "128": None, "200": None, "255": None, "256": None, "-129": None}),
        ("SMALLINT", {"32767": 32767, "-32768": -32768, "32768": None, "65535": None}),
        ("INT", {"2147483647": 2147483647, "2147483648": None}),
        ("BIGINT", {"9223372036854775807": 9223372036854775807, "9223372036854775808": None}),
        ("DECIMAL(4, 2)", {"99.99": decimal.Decimal("99.99"), "100": None}),
        ("ARRAY<TINYINT>", {"[1, null, -1]": [1, None, -1], "[1, 200]": None}),
        ("MAP<STRING, TINYINT>", {'{"a": 1}': {"a": 1}, '{"a": 200}': None}),
        ("STRUCT<n: ARRAY<STRUCT<b: TINYINT, s: STRING>>>", {'{"n": [{"b": 200}]}': None}),
    ],
)
def test_a_number_of_json_that_its_column_cannot_hold_is_undecodable(
    spark: SparkSession, kind: str, values: dict[str, Any]
) -> None:
    """Spark's parser takes 200 for a TINYINT, of -56."""
    bodies = {f'{{"f": {text}}}': wanted for text, wanted in values.items()}
    rows = decode(
        spark.createDataFrame([(text.encode(),) for text in bodies], "value BINARY"), "json", schema=f"f {kind}"
    ).collect()
    assert {row["value"].decode(): row["data"] and row["data"]["f"] for row in rows} == bodies
    assert all((row["data"] is None) == (row["error"] is not None) for row in rows)


def test_columns_of_small_numbers_are_what_the_schema_says(spark: SparkSession) -> None:
    bodies = spark.createDataFrame([(b'{"n": {"b": 7}}',), (b"{}",), (b"no",)], "value BINARY")
    found = decode(bodies, "json", schema="n STRUCT<b: TINYINT>, t TINYINT")
    assert found.schema["data"].dataType.simpleString() == "struct<n:struct<b:tinyint>,t:tinyint>"
    assert sorted(str(row["data"] and row["data"].asDict(True)) for row in found.collect()) == [
        "None",
        "{'n': None, 't': None}",
        "{'n': {'b': 7}, 't': None}",
    ]


def test_what_follows_an_object_is_not_passed_over(spark: SparkSession) -> None:
    """Objects and whatever may follow them: decoded if Python's parser takes the body for one object, and only then."""
    dice = random.Random(7)
    objects = ['{"id": 1}', '{"id": 2, "in": {"x": [{"y": "}]"}]}}', "{}", "[]", "null", "7", ""]
    tails = ["", " ", "\n", ",", "]", "}", " rubbish", '"', ",,", "]}", "}]", '}, "end": true}', "\n\n"]
    # Keys of the object that is put around a body.
    tails += [
        ', "x": 2',
        ',"body": {"id": 9}',
        '\n,"x": {"id": 9}',
        ', "end": true',
        "], [2",
        ', "x": [',
        ', {"id": 9}',
    ]
    texts = {"".join(dice.choices([*objects, *tails], k=dice.randint(1, 4))) for _ in range(500)}
    texts |= {first + tail for first in objects for tail in tails} | {'{"id": 1, "in": {"x": NaN}, "y": {}}'}
    expected = {}
    for text in texts:
        try:
            read = json.loads(text)
        except ValueError:
            read = None
        expected[text] = (read.get("id"),) if isinstance(read, dict) else None
    assert sum(found is not None for found in expected.values()) > 10
    rows = decode(spark.createDataFrame([(text.encode(),) for text in texts], "value BINARY"), "json", schema="id INT")
    assert {row["value"].decode(): row["data"] and tuple(row["data"]) for row in rows.collect()} == expected


def test_a_field_of_which_a_schema_says_that_it_is_never_null_may_be_missing(spark: SparkSession) -> None:
    schema = "id BIGINT NOT NULL, l ARRAY<STRUCT<x: INT NOT NULL>>"
    encode = {"json": lambda value: json.dumps(value).encode(), "msgpack": msgspec.msgpack.encode}
    for format, encoded in encode.items():
        bodies = [(encoded(value),) for value in ({"l": [{}]}, {"id": 1, "l": []})]
        rows = decode(spark.createDataFrame(bodies, "value BINARY"), format, schema=schema)
        assert sorted(str(row["data"].asDict(True)) for row in rows.collect()) == [
            "{'id': 1, 'l': []}",
            "{'id': None, 'l': [{'x': None}]}",
        ]
        assert rows.where("data.id IS NULL").count() == 1


def test_a_schema_may_be_in_a_file(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.sql.types import StructType

    schema = "a INT, b STRUCT<c: ARRAY<STRING>>"
    wanted = StructType.fromDDL(schema)
    (tmp_path / "s.ddl").write_text(schema)
    (tmp_path / "s.json").write_text(wanted.json())
    for name in ("s.ddl", "s.json"):
        assert decoder("json", schema=tmp_path / name).schema == wanted  # type: ignore[attr-defined]
        assert decoder("msgpack", schema=tmp_path / name)
    (tmp_path / "s.avsc").write_text(json.dumps(ORDER))
    assert decoder("avro", schema=tmp_path / "s.avsc") == decoder("avro", schema=json.dumps(ORDER))
    (tmp_path / "s.desc").write_bytes(descriptors(well_known_file()))
    assert decoder("protobuf", schema=tmp_path / "s.desc")


def test_other_columns_stay_and_a_text_is_taken_for_its_bytes(spark: SparkSession) -> None:
    table = spark.createDataFrame([('{"a": 1}', 5), ("\x81\xa1a\x01", 6)], "value STRING, `x.y` INT")
    for format, good in (("json", 5), ("msgpack", None)):
        decoded = decode(table, format, schema="a INT")
        assert decoded.columns == ["value", "x.y", "data", "error"]
        rows = decoded.collect()
        assert [row["x.y"] for row in rows if row["data"]] == ([good] if good else [])
    # A byte of 65 is Avro's -33.
    schema = {"type": "record", "name": "R", "fields": [{"name": "n", "type": "int"}]}
    [row] = decode(spark.sql("SELECT 'A' AS value"), "avro", schema=schema).collect()
    assert row["data"]["n"] == -33


def test_columns_that_are_in_the_way_are_told(spark: SparkSession, messages: Messages) -> None:
    messages.add(0, 1)
    for table in (messages.batch(spark).withColumnRenamed("id", "Error"), messages.batch(spark).drop("value")):
        with pytest.raises(PipelineError, match="column"):
            decode(table, "avro", schema=ORDER)


def test_a_task_fails_where_the_registry_is_away(spark: SparkSession, messages: Messages) -> None:
    with serve() as gone:
        id = register(gone.url, "orders-value", json.dumps(ORDER))
        found = decoder("avro", registry=gone.url, subject="orders-value")
    messages.add(0, 2, body=lambda offset: framed(id, avro_body(ORDER, order(offset))))
    with pytest.raises(Exception, match="cannot be asked for /schemas/ids/") as caught:
        found(messages.batch(spark)).select("error").collect()
    assert common.explain(caught.value).startswith(f"the registry {gone.url} cannot be asked")


# --- Pipelines --------------------------------------------------------------------------------------------------------


def test_an_archive_follows_the_schema_of_a_registry(
    spark: SparkSession, messages: Messages, registry: str, subject: str, tmp_path: Path
) -> None:
    wider = {**ORDER, "fields": [*ORDER["fields"], {"name": "note", "type": ["null", "string"], "default": None}]}
    narrower = {**wider, "fields": [field for field in wider["fields"] if field["name"] != "tags"]}
    root, aside = tmp_path / "archive", tmp_path / "bad"
    bad = archiving.Aside(target=archiving.Target.of(aside))
    first = 0
    for schema in (ORDER, wider, narrower):
        id = register(registry, subject, json.dumps(schema))

        def body(offset: int, id: int = id, schema: Any = schema) -> bytes:
            value = {**order(offset), "note": "n"}
            return b"{}" if is_bad(offset) else framed(id, avro_body(schema, value))

        messages.add(first, first + 20, body=body)
        first += 20
        found = decoder("avro", registry=registry, subject=subject)
        archiving.archive(spark, messages.stream, root, decode=found, undecodable=bad, once=True)
    rows = {row["offset"]: row for row in archiving.read(spark, root).collect()}
    assert sorted(rows) == list(range(60))
    for offset, row in rows.items():
        if is_bad(offset):
            assert (row["data"], bytes(row["_undecoded"])) == (None, b"{}") and row["error"]
            continue
        assert (row["error"], row["_undecoded"], row["data"]["id"]) == (None, None, offset)
        assert row["data"]["price"] == order(offset)["price"]
        assert row["data"]["note"] == (None if offset < 20 else "n")
        assert row["data"]["tags"] == (order(offset)["tags"] if offset < 40 else None)
    assert sorted(by_deltalake(aside)) == [("orders", offset) for offset in range(60) if is_bad(offset)]
    # A table of messages, that can be replayed.
    kept = archiving.read(spark, aside)
    assert {bytes(row["value"]) for row in kept.collect()} == {b"{}"}
    assert {"date", "hour", "error"} <= set(kept.columns) and "data" not in kept.columns


def test_messages_are_put_aside_once_when_a_batch_is_written_again(
    spark: SparkSession, messages: Messages, tmp_path: Path, broker: Node, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver ends between what is put aside and the commit of the archive, and its batch runs again."""
    from flintmq.spark.pipelines.tables import DeltaTable

    network = {"nsq.nsqd.addresses": broker.tcp}
    messages.add(0, 30, topic=topic, body=lambda offset: b"{}" if is_bad(offset) else avro_body(ORDER, order(offset)))
    real = DeltaTable.commit
    found = decoder("avro", schema=ORDER)
    for name, aside in (
        ("table", archiving.Aside(target=archiving.Target.of(tmp_path / "bad"))),
        ("topic", archiving.Aside(topic="{topic}.bad", network=network)),
    ):
        root = tmp_path / name

        def killed(table: DeltaTable, *arguments: Any, root: Path = root) -> None:
            if table.place.text == str(root):
                raise PipelineError("ended here")
            real(table, *arguments)

        def run(root: Path = root, aside: archiving.Aside = aside) -> None:
            archiving.archive(spark, messages.stream, root, decode=found, undecodable=aside, once=True)

        monkeypatch.setattr(DeltaTable, "commit", killed)
        with pytest.raises(PipelineError, match="ended here"):
            run()
        assert not archiving.Target.of(root).open().has_rows()
        monkeypatch.setattr(DeltaTable, "commit", real)
        run()
        messages.add(100, 101, topic=topic, body=lambda offset: avro_body(ORDER, order(offset)))
        run()
        assert sorted(offset for _, offset in by_deltalake(root))[:30] == list(range(30))
    bad = [offset for offset in range(30) if is_bad(offset)]
    assert sorted(offset for _, offset in by_deltalake(tmp_path / "bad")) == bad
    read = spark.read.format("nsq").options(**network).option("subscribe", f"{topic}.bad").load()
    assert [bytes(row["value"]) for row in read.collect()] == [b"{}"] * len(bad)


def test_what_cannot_be_put_aside_is_told(spark: SparkSession, messages: Messages, tmp_path: Path) -> None:
    messages.add(0, 1)
    root = tmp_path / "archive"
    inside = archiving.Aside(target=archiving.Target.of(root / "bad"))
    with pytest.raises(PipelineError, match="one inside of the other"):
        archiving.archive(spark, messages.stream, root, decode=True, undecodable=inside)
    beside = archiving.Aside(topic="bad")
    with pytest.raises(PipelineError, match="--decode"):
        archiving.archive(spark, messages.stream, root, undecodable=beside)
    with pytest.raises(PipelineError, match="a schema, or a registry"):
        archiving.archive(spark, messages.stream, root, decode="avro")
    with pytest.raises(PipelineError, match="plain Parquet"):
        archiving.archive(spark, messages.stream, root, format="parquet", schema="id INT", undecodable=beside)


def test_a_query_names_fields_of_avro_and_sends_bad_messages_elsewhere(
    spark: SparkSession, messages: Messages, tmp_path: Path
) -> None:
    messages.add(0, 30, body=lambda offset: b"" if is_bad(offset) else avro_body(ORDER, order(offset)))
    sql.tables(spark, {"orders": messages.stream}, {"orders": decoder("avro", schema=ORDER)})
    query = "SELECT data.id, data.price FROM orders WHERE data.id % 2 = 0"
    sql.stream(spark, query, table=tmp_path / "even", once=True)
    sql.stream(spark, "SELECT offset, error FROM orders WHERE error IS NOT NULL", table=tmp_path / "bad", once=True)
    even = archiving.read(spark, tmp_path / "even").collect()
    assert sorted(row["id"] for row in even) == [n for n in range(0, 30, 2) if not is_bad(n)]
    bad = archiving.read(spark, tmp_path / "bad").collect()
    assert sorted(row["offset"] for row in bad) == [n for n in range(30) if is_bad(n)]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["archive", "t", "--to", "x", "--registry", "http://r"], "say what, by --decode FORMAT"),
        (["archive", "t", "--to", "x", "--decode", "avro", "--registry-option", "a=b"], "is for a --registry"),
        (["archive", "t", "--to", "x", "--undecodable", "topic:bad"], "by --decode FORMAT"),
        (["archive", "t", "--to", "x", "--decode", "--undecodable", "topic:"], "names a topic"),
        (["archive", "t", "--to", "x", "--decode", "--undecodable", "x/y"], "one inside of the other"),
        (["sql", "q", "--topic", "t", "--message", "t=M"], "say what, by --decode FORMAT"),
    ],
)
def test_a_wrong_command_line_is_answered_without_starting_spark(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    from flintmq.cli import main

    assert main(["pipeline", *argv]) == 1
    assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["pipeline", "archive", "--to", "x", "--decode", "orders"])
    assert "invalid choice: 'orders'" in capsys.readouterr().err


def test_the_command_line_decodes(
    spark: SparkSession,
    broker: Node,
    topic: str,
    own_registry: SchemaRegistry,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`archive` and `sql`, by a schema in a file and by a registry whose subject has the topic's name."""
    from flintmq.cli import main

    registry = own_registry.url
    monkeypatch.chdir(tmp_path)
    Path("order.avsc").write_text(json.dumps(ORDER))
    id = register(registry, f"{topic}-value", json.dumps(ORDER))
    for offset in range(10):
        broker.publish(topic, [framed(id, avro_body(ORDER, order(offset))) if not is_bad(offset) else b"bad"])
        broker.publish(f"{topic}.plain", [avro_body(ORDER, order(offset))])
    where = ["--nsqd", broker.tcp, "--json", "--once"]
    good = [n for n in range(10) if not is_bad(n)]
    flags = ["--decode", "avro", "--registry", registry, "--undecodable", f"topic:{topic}.bad"]
    assert main(["pipeline", "archive", topic, "--to", "a", *flags, *where]) == 0, capsys.readouterr().err
    rows = archiving.read(spark, tmp_path / "a").select("data.id").collect()
    assert sorted(row["id"] for row in rows if row["id"] is not None) == good
    assert len(rows) == 10
    bad = spark.read.format("nsq").option("nsq.nsqd.addresses", broker.tcp).option("subscribe", f"{topic}.bad").load()
    assert [bytes(row["value"]) for row in bad.collect()] == [b"bad"] * 2
    flags = ["--decode", "avro", "--schema", "@order.avsc", "--undecodable", "aside"]
    assert main(["pipeline", "archive", f"{topic}.plain", "--to", "b", *flags, *where]) == 0, capsys.readouterr().err
    assert archiving.read(spark, tmp_path / "b").where("data.id >= 0").count() == 10
    Path("q.sql").write_text(f"SELECT max(data.id) AS most, count(error) AS bad FROM {sql.table_name(topic)}")
    capsys.readouterr()
    argv = ["sql", "q.sql", "--topic", topic, "--decode", "avro", "--registry", registry, "--batch", *where]
    assert main(["pipeline", *argv]) == 0
    assert json.loads(capsys.readouterr().out) == {"most": 9, "bad": 2}
    shutil.rmtree("a")
