"""Message bodies as columns: JSON, Avro, Protobuf and MessagePack, by a schema that is given or that a registry knows.

`decoder` reads the schema, once, and returns what adds two columns to any DataFrame with bodies: `data`, a struct with
the schema's fields, and `error`, the reason why there is none. `decode` does both in one step. The messages' own
columns stay, so that nothing is lost of a message that cannot be decoded.

JSON is parsed by Spark itself; the others by functions on the executors, which `shipped.bodies` has. A decoder is
pickled: to executors, and to the server of Spark Connect.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from flintmq.errors import PipelineError, system_reason
from flintmq.spark.registration import shipping
from flintmq.spark.shipped.avro import Avro
from flintmq.spark.shipped.bodies import NO_BODY, UNFRAMED, Bodies, Format
from flintmq.spark.shipped.files import expanded
from flintmq.spark.shipped.messagepack import MessagePack
from flintmq.spark.shipped.protobuf import Protobuf, descriptor_set
from flintmq.spark.shipped.registry import FRAME, Registry, Schema, UnknownSchemaError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

    #: Spark's own (JSON, MessagePack), Avro's JSON, Protobuf's descriptors, or the file that has it.
    AnySchema: TypeAlias = str | bytes | Path | StructType | Mapping[str, Any] | None

__all__ = ["FORMATS", "Decoder", "JsonDecoder", "decode", "decoder", "name_clashes"]

FORMATS = ("json", "avro", "protobuf", "msgpack")
#: The begin of a JSON object; and, in a text that may go on behind it: the end of an object, and a comma.
_BEGINS = r"^[ \t\r\n]*\{"
_GOES_ON = r"\}[ \t\r\n]*,"


def decode(
    messages: DataFrame,
    format: str,
    *,
    schema: AnySchema = None,
    message: str | None = None,
    registry: str | Registry | None = None,
    subject: str | None = None,
) -> DataFrame:
    """Add `data` and `error` to messages, a batch or a stream: what the column `value` holds, or why that is unknown.

    `format` is json, avro, protobuf or msgpack. `schema` is a `Path` to a file, or for JSON and MessagePack what Spark
    takes ("id BIGINT, name STRING"), for Avro its JSON, for Protobuf the bytes of a descriptor set, in which `message`
    names the message type. With a `registry`, a URL, bodies begin with the id of their schema; without a `schema` they
    are read by the newest one of `subject`. ``flintmq.spark.decoding.decoder`` makes a decoder for many DataFrames.
    """
    return decoder(format, schema=schema, message=message, registry=registry, subject=subject)(messages)


def decoder(
    format: str,
    *,
    schema: AnySchema = None,
    message: str | None = None,
    registry: str | Registry | None = None,
    subject: str | None = None,
) -> Decoder:
    """Read a schema, from where it is, and return what decodes by it. PipelineError says what is missing or wrong."""
    if format not in FORMATS:
        raise PipelineError(f"there is no format {format!r}, only {', '.join(FORMATS)}")
    if message is not None and format != "protobuf":
        raise PipelineError(f"a message type is one of Protobuf's: {format} has none")
    if registry is None and subject is not None:
        raise PipelineError(f"the subject {subject} is in a registry: say in which")
    asked = None if registry is None else Registry.of(registry)
    if asked is not None and format == "msgpack":
        raise PipelineError("registries have no schemas of MessagePack: give the schema alone")
    content = content_of(schema, format)
    if format == "json":
        return JsonDecoder(_spark_schema(content, format), is_framed=asked is not None)
    found: Format
    if format == "msgpack":
        found = MessagePack(_arrow_type(_spark_schema(content, format)))
    elif format == "avro":
        texts = _avro_texts(content) if content is not None else _newest(asked, subject, "AVRO", format).texts
        found = Avro(tuple(text for _, text in texts), asked)
    else:
        files = (
            _descriptors(content)
            if content is not None
            else descriptor_set(_newest(asked, subject, "PROTOBUF", format))
        )
        found = Protobuf(files, message or "", asked)
    return BodyDecoder.of(found)


class Decoder:
    """Adds `data` and `error` to messages."""

    def __call__(self, messages: DataFrame) -> DataFrame:
        raise NotImplementedError

    @staticmethod
    def _check(messages: DataFrame) -> None:
        """PipelineError for messages that have no body, or that have been decoded."""
        names = {name.lower() for name in messages.columns}
        if "value" not in names:
            raise PipelineError("there is no column value to decode")
        if taken := sorted(names & {"data", "error"}):
            raise PipelineError(
                f"the messages have a column {taken[0]}: drop it, or rename it, before they are decoded"
            )


@dataclass(frozen=True)
class BodyDecoder(Decoder):
    """Decodes by a function on the executors."""

    bodies: Bodies
    #: What the function gives: Spark's own JSON of a struct with `data` and `error`.
    result: str

    @staticmethod
    def of(format: Format) -> BodyDecoder:
        from pyspark.sql.pandas.types import from_arrow_type
        from pyspark.sql.types import StringType, StructType

        data = from_arrow_type(format.type())
        _refuse_clashes(data, "the schema")
        # As Spark itself names what is inside of arrays.
        return BodyDecoder(
            Bodies(format, _arrow_type(data)), StructType().add("data", data).add("error", StringType()).json()
        )

    def __call__(self, messages: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f
        from pyspark.sql.types import StructType

        self._check(messages)
        with shipping(messages.sparkSession):
            function = _loaded_there(self.bodies)
        kind = StructType.fromJson(json.loads(self.result))
        # Said to be nondeterministic: Spark would decode again for each condition that it moves before this.
        read = f.arrow_udf(function, kind).asNondeterministic()
        name = _free_name("_decoded", messages.columns)
        decoded = messages.withColumn(name, read(f.col("value").cast("binary")))
        return decoded.withColumns({"data": f.col(f"{name}.data"), "error": f.col(f"{name}.error")}).drop(name)


def _loaded_there(bodies: Bodies) -> Callable[[pa.Array], pa.Array]:
    """A function that brings along what it needs, however and whenever Spark pickles it.

    A session of Spark Connect does so when the query runs, which is after we have said that our code is to go along.
    """
    import pyarrow as pa
    from pyspark import cloudpickle

    data: bytes = cloudpickle.dumps(bodies)
    loaded: list[Any] = []

    def decode(values: Any) -> Any:
        if not loaded:
            loaded.append(pickle.loads(data))
        return loaded[0](values)

    # By these Spark knows what kind of function it is.
    decode.__annotations__ = {"values": pa.Array, "return": pa.Array}
    return decode


# --- JSON -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonDecoder(Decoder):
    """Decodes JSON objects, by Spark's own parser.

    A message is decoded whole or not at all: one value of another type than the schema's makes it undecodable.
    """

    schema: StructType
    #: Does the id of a schema stand before the text?
    is_framed: bool = False

    def __call__(self, messages: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f
        from pyspark.sql.types import BooleanType, StringType, StructType

        self._check(messages)
        # With a column for corrupt records Spark notes every message that does not fit, and not only broken JSON.
        corrupt = "corrupt"
        widened = _without_bytes(self.schema)
        wanted = StructType().add("body", widened).add("end", BooleanType()).add(corrupt, StringType())
        value = f.col("value")
        body = f.expr(f"substring(value, {FRAME + 1})") if self.is_framed else value
        # Spark's parser stops behind the first object: what follows in a body must not be passed over.
        body_text = body.cast("string")
        text = f.concat(f.lit('{"body":'), body_text, f.lit(',"end":true}'))
        # Behind an object and a comma there may be further keys, which would be those of the object around it. Of two
        # values an array says that they are two; one that a body closes by itself is not closed in that object.
        listed = f.from_json(f.concat(f.lit("["), body_text, f.lit("]")), "ARRAY<STRING>")
        is_one = body_text.rlike(_BEGINS) & f.when(body_text.rlike(_GOES_ON), f.size(listed) == 1).otherwise(
            f.lit(True)
        )
        parsed = f.from_json(text, wanted, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": corrupt})
        name = _free_name("_decoded", messages.columns)
        framed = (
            f.expr(f"length(value) >= {FRAME} AND substring(value, 1, 1) = X'00'") if self.is_framed else f.lit(True)
        )
        fits = f.col(f"{name}.body").isNotNull() & f.col(f"{name}.end") & f.col(f"{name}.{corrupt}").isNull() & is_one
        data = f.col(f"{name}.body")
        if widened != self.schema:
            narrow = data.try_cast(self.schema)
            # Maps can only be compared as texts.
            fits &= f.to_json(f.struct(data.alias("data"))) == f.to_json(f.struct(narrow.alias("data")))
            data = narrow
        error = (
            f.when(value.isNull(), NO_BODY)
            .when(~framed, UNFRAMED)
            # A cast makes replacement characters out of bytes that are not UTF-8: the JSON may still be well-formed.
            .when(~f.is_valid_utf8(body), "the body is not UTF-8")
            .when(
                ~f.coalesce(fits, f.lit(False)),
                "the body is no JSON object, or has a value of another type than the schema's",
            )
        )
        data = f.struct(*(data.getField(one).alias(one) for one in self.schema.names))
        found = messages.withColumn(name, parsed)
        return found.withColumns({"data": f.when(error.isNull(), data), "error": error}).drop(name)


def _without_bytes(kind: Any) -> Any:
    """The type, with SMALLINT for each TINYINT in it: to Spark's parser 200 is a TINYINT, of -56."""
    from pyspark.sql.types import ArrayType, ByteType, MapType, ShortType, StructField, StructType

    if isinstance(kind, StructType):
        fields = [StructField(one.name, _without_bytes(one.dataType), one.nullable, one.metadata) for one in kind]
        return StructType(fields)
    if isinstance(kind, ArrayType):
        return ArrayType(_without_bytes(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(_without_bytes(kind.keyType), _without_bytes(kind.valueType), kind.valueContainsNull)
    return ShortType() if isinstance(kind, ByteType) else kind


# --- Schemas ----------------------------------------------------------------------------------------------------------


def name_clashes(schema: DataType) -> list[str]:
    """Return names in a schema, and in the structs inside, that are there twice or differ by case alone."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(schema, ArrayType):
        return name_clashes(schema.elementType)
    if isinstance(schema, MapType):
        return name_clashes(schema.keyType) + name_clashes(schema.valueType)
    if not isinstance(schema, StructType):
        return []
    counts = Counter(name.lower() for name in schema.names)
    inside = [name for field in schema for name in name_clashes(field.dataType)]
    return [name for name in schema.names if counts[name.lower()] > 1] + inside


def _refuse_clashes(schema: DataType, what: str) -> None:
    if clashes := name_clashes(schema):
        raise PipelineError(f"{what} has a name twice, or names that differ by case alone: {', '.join(clashes)}")


def _free_name(name: str, taken: list[str]) -> str:
    while name in (one.lower() for one in taken):
        name += "_"
    return name


def content_of(schema: Any, format: str) -> Any:
    """What a file says, or what was given."""
    if not isinstance(schema, Path):
        return schema
    try:
        data = expanded(schema).read_bytes()
        return data if format == "protobuf" else data.decode()
    except OSError as exc:
        raise PipelineError(f"the schema cannot be read: {system_reason(exc)}") from exc
    except UnicodeDecodeError as exc:
        raise PipelineError(f"the schema in {schema} is not UTF-8, as one of {format} is") from exc


def _spark_schema(content: Any, format: str) -> StructType:
    """As in SQL ("id BIGINT, name STRING"), or the JSON that Spark has for it."""
    from pyspark.sql.types import StructType

    if content is None:
        raise PipelineError(f"{format} says no types: give the schema, such as 'id BIGINT, name STRING'")
    try:
        if isinstance(content, str):
            is_json = content.lstrip().startswith("{")
            content = StructType.fromJson(json.loads(content)) if is_json else StructType.fromDDL(content)
        if not isinstance(content, StructType) or not content.names:
            raise TypeError("it names no columns")
    except Exception as exc:
        why = next(iter(str(exc).splitlines()), type(exc).__name__)
        text = f"{str(content)[:200]!r} is not a schema such as 'id BIGINT, name STRING': {why}"
        raise PipelineError(text) from exc
    _refuse_clashes(content, f"the schema {content.simpleString()[:200]!r}")
    # NOT NULL is a promise that no message has given.
    return StructType.fromJson(_nullable(content.jsonValue()))


def _nullable(schema: Any) -> Any:
    """A schema in Spark's JSON, in which everything may be null."""
    if isinstance(schema, list):
        return [_nullable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    flags = dict.fromkeys(schema.keys() & {"nullable", "containsNull", "valueContainsNull"}, True)
    return {key: value if key == "metadata" else _nullable(value) for key, value in schema.items()} | flags


def _arrow_type(schema: DataType) -> pa.DataType:
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(schema, timezone="UTC")


def _avro_texts(content: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(content, Mapping):
        content = json.dumps(content)
    if not isinstance(content, str):
        raise PipelineError(f"a schema of Avro is JSON, as a text or in a file, not a {type(content).__name__}")
    return (("", content),)


def _descriptors(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    raise PipelineError(
        "a schema of Protobuf is a descriptor set, as bytes or in a file: protoc --include_imports "
        "--descriptor_set_out=FILE"
    )


def _newest(registry: Registry | None, subject: str | None, kind: str, format: str) -> Schema:
    """The schema that a subject has now."""
    if registry is None or subject is None:
        raise PipelineError(f"say what {format} is decoded by: a schema, or a registry and the subject in it")
    try:
        found = registry.latest(subject, serialized=kind == "PROTOBUF")
    except UnknownSchemaError as exc:
        raise PipelineError(f"{exc}; the registry is {registry.url}") from exc
    if found.kind != kind:
        raise PipelineError(f"the schema of {subject} is one of {found.kind}, not of {format}")
    return found
