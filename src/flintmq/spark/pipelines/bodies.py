"""What command lines of pipelines say about the bodies of messages: their format, and where their schema is."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError
from flintmq.spark.decoding import FORMATS, Decoder, JsonDecoder, content_of, decoder
from flintmq.spark.pipelines.common import pair
from flintmq.spark.shipped.registry import Registry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

__all__ = [
    "apart_by_path",
    "check_decoding",
    "decode_arguments",
    "decoded",
    "decoder_of",
    "is_found_out",
    "needs_spark",
]

#: Formats whose schema is in the language of Spark, which parses it.
_BY_SPARK = ("json", "msgpack")
#: A key of a JSON object, with its colon.
_KEY = r'"(?:[^"\\]|\\.)*"\s*:'


def decode_arguments(parser: argparse.ArgumentParser, *, by_topic: bool = False) -> None:
    """What bodies are, and where their schema is; `by_topic` where each topic has its own."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--decode",
        metavar="FORMAT",
        nargs="?",
        const="json",
        choices=FORMATS,
        help="decode messages into columns data and error: json (default), avro, protobuf or msgpack",
    )
    prefix = "TOPIC=" if by_topic else ""
    kind: dict[str, Any] = {"type": pair, "action": "append", "default": []} if by_topic else {}
    group.add_argument(
        "--schema",
        metavar=f"{prefix}SCHEMA",
        help="'id BIGINT, name STRING', Avro's JSON, or @FILE; for protobuf a descriptor set (default: inferred)",
        **kind,
    )
    group.add_argument("--message", metavar=f"{prefix}NAME", help="the message type of protobuf", **kind)
    group.add_argument(
        "--registry", metavar="URL", help="a schema registry: bodies begin with the id of their schema in it"
    )
    group.add_argument(
        "--registry-option",
        metavar="KEY=VALUE",
        type=pair,
        action="append",
        default=[],
        help="user, password, token, ca or timeout, for the registry; may be repeated",
    )
    group.add_argument(
        "--subject", metavar=f"{prefix}NAME", help="subject whose newest schema is used (default TOPIC-value)", **kind
    )


def check_decoding(arguments: argparse.Namespace) -> None:
    """PipelineError, before Spark starts, for arguments about decoding that mean nothing or do not fit."""
    for name in ("message", "registry", "registry_option", "subject"):
        if getattr(arguments, name) and not arguments.decode:
            raise PipelineError(f"--{name.replace('_', '-')} says how to decode: say what, by --decode FORMAT")
    if arguments.registry_option and not arguments.registry:
        raise PipelineError("--registry-option is for a --registry")
    given = arguments.schema or []
    for schema in [given] if isinstance(given, str) else [schema for _, schema in given]:
        content_of(_given(schema), arguments.decode or "json")


def decoder_of(
    arguments: argparse.Namespace, topics: Sequence[str], schema: str | None, message: str | None, subject: str | None
) -> Decoder:
    """What a command line says about the bodies of topics. Where Spark is to parse a schema, it must have started."""
    format = arguments.decode or "json"
    registry = Registry.of(arguments.registry, dict(arguments.registry_option)) if arguments.registry else None
    if registry is not None and schema is None and subject is None and format not in _BY_SPARK:
        if len(topics) != 1:
            raise PipelineError("several topics have one column data: name the --subject that it is of")
        subject = f"{topics[0]}-value"
    return decoder(format, schema=_given(schema), message=message, registry=registry, subject=subject)


def _given(schema: str | None) -> Path | str | None:
    """A schema of a command line, which may be in a file."""
    return Path(schema[1:]) if schema is not None and schema.startswith("@") else schema


def needs_spark(arguments: argparse.Namespace) -> bool:
    """Can the schema of a command line only be read when Spark has started?"""
    return (arguments.decode or "json") in _BY_SPARK


def is_found_out(arguments: argparse.Namespace, schema: str | None) -> bool:
    """Is it left to the messages what they look like, or nothing decoded at all?"""
    return schema is None and arguments.decode in (None, "json") and not arguments.registry


def apart_by_path(schema: StructType) -> StructType:
    """The schema, without fields that Iceberg takes for another: `a.b` is also the name of b inside of a.

    The field without the dot stays.
    """
    from pyspark.sql.types import StructField, StructType

    taken: set[str] = set()
    kept = {}
    for field in sorted(schema, key=lambda field: "." in field.name):
        kind = _apart(field.dataType)
        if taken.isdisjoint(paths := {path.lower() for path in _paths(field.name, kind)}):
            taken |= paths
            kept[field.name] = StructField(field.name, kind, field.nullable)
    return StructType([kept[name] for name in schema.names if name in kept])


def _apart(kind: DataType) -> DataType:
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(kind, ArrayType):
        return ArrayType(_apart(kind.elementType), kind.containsNull)
    return apart_by_path(kind) if isinstance(kind, StructType) else kind


def _paths(name: str, kind: DataType) -> Iterator[str]:
    """Yield the names by which Iceberg knows a field and all inside of it."""
    from pyspark.sql.types import ArrayType, StructType

    yield name
    if isinstance(kind, ArrayType):
        yield from _paths(f"{name}.element", kind.elementType)
    elif isinstance(kind, StructType):
        for field in kind:
            yield from _paths(f"{name}.{field.name}", field.dataType)


def decoded(messages: DataFrame, decoder: Decoder | None) -> DataFrame:
    """The messages with what a decoder says of them, and `_undecoded`, the bytes that would not decode.

    None stands for messages of which the first have no JSON values: only objects without any, such as {}, are right.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructType

    if decoder is None:
        # By the same parser, for a key that no message has; the column would be an empty one.
        judged = JsonDecoder(StructType().add(f"_{uuid.uuid4().hex}", StringType()))(messages).drop("data")
        has_values = ~f.regexp_replace(f.col("value").cast("string"), _KEY, "").rlike(r"^[\s{}\[\],]*$")
        error = f.when(
            f.col("error").isNotNull() | has_values, "none of the first messages is a JSON object with values"
        )
        found = judged.withColumn("error", error)
    else:
        found = decoder(messages)
    return found.withColumn("_undecoded", f.when(f.col("error").isNotNull(), f.col("value")))
