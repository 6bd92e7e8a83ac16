"""Bodies that are maps of MessagePack, by a schema of Spark's own. Keys that it does not name are passed over.

Values are taken as they are, or refused: Arrow alone would make 1 of 1.5, and a list of a text.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError
from flintmq.spark.shipped.bodies import Convert, Read, UndecodableError, import_library

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MessagePack"]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
#: A larger number would be infinite in 4 bytes.
_MOST_FLOAT = float.fromhex("0x1.fffffep+127")
#: Characters of a value that does not fit.
_SHOWN = 60
#: Arrow's types as a schema in SQL has them, and bits of whole numbers.
_SQL_NAMES = {"int8": "TINYINT", "int16": "SMALLINT", "int32": "INT", "int64": "BIGINT", "float": "FLOAT"}
_SQL_NAMES |= {"double": "DOUBLE", "string": "STRING", "binary": "BINARY", "bool": "BOOLEAN"}
_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


@dataclass
class MessagePack:
    """A map of MessagePack."""

    #: A struct.
    wanted: pa.DataType

    def type(self) -> pa.DataType:
        _fit(self.wanted, "")
        return self.wanted

    def open(self) -> Read:
        decode = import_library("msgspec.msgpack", "msgspec").decode
        convert = _fit(self.wanted, "")
        return lambda body: convert(decode(body))


def _fit(kind: pa.DataType, path: str) -> Convert:
    """What gives a value for a type, or refuses it. PipelineError for a type that MessagePack has nothing for."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return _struct(kind, path)
    if types.is_list(kind):
        item, check = _fit(kind.value_type, f"{path}[]"), _checked(list, path, "an array")
        return lambda value: [None if one is None else item(one) for one in check(value)]
    if types.is_map(kind):
        keys, values = _fit(kind.key_type, f"{path} (key)"), _fit(kind.item_type, f"{path}{{}}")
        check = _checked(dict, path, "a map")
        return lambda value: [(keys(key), None if one is None else values(one)) for key, one in check(value).items()]
    name = _SQL_NAMES.get(str(kind), str(kind))
    if str(kind) in _BITS:
        return _integer(1 << _BITS[str(kind)] - 1, path, name)
    if types.is_floating(kind):
        return _number(_MOST_FLOAT if types.is_float32(kind) else float("inf"), path, name)
    if types.is_timestamp(kind) and kind.tz is not None:
        moment = _checked(datetime.datetime, path, "a timestamp")
        return lambda value: (moment(value) - _EPOCH) // datetime.timedelta(microseconds=1)
    for is_kind, wanted in ((types.is_boolean, bool), (types.is_string, str), (types.is_binary, bytes)):
        if is_kind(kind):
            return _checked(wanted, path, name)
    raise PipelineError(
        f"{path or 'the body'} is a {name} in the schema, which MessagePack does not have: declare what it has "
        "(BIGINT, DOUBLE, STRING, BINARY, BOOLEAN, TIMESTAMP, ARRAY, MAP, STRUCT), and CAST that"
    )


def _refused(value: object, path: str, wanted: str) -> UndecodableError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
    return UndecodableError(f"{path or 'the body'} is {shown}, not {wanted}")


def _checked(kind: type, path: str, wanted: str) -> Convert:
    def same(value: Any) -> Any:
        # Not isinstance: True is a whole number to Python.
        if type(value) is not kind:
            raise _refused(value, path, wanted)
        return value

    return same


def _struct(kind: pa.DataType, path: str) -> Convert:
    fields = [(one.name, _fit(one.type, f"{path}.{one.name}" if path else one.name)) for one in kind]
    check = _checked(dict, path, "a map")

    def struct(value: Any) -> Any:
        found = check(value)
        return {name: None if found.get(name) is None else fit(found[name]) for name, fit in fields}

    return struct


def _integer(limit: int, path: str, wanted: str) -> Convert:
    check = _checked(int, path, wanted)

    def integer(value: Any) -> Any:
        if not -limit <= check(value) < limit:
            raise _refused(value, path, wanted)
        return value

    return integer


def _number(most: float, path: str, wanted: str) -> Convert:
    def number(value: Any) -> Any:
        if type(value) not in (int, float):
            raise _refused(value, path, wanted)
        found = float(value)
        if most < abs(found) < float("inf"):
            raise _refused(value, path, wanted)
        return found

    return number
