"""Values as message bodies: JSON and MessagePack, for msgspec structs, dataclasses, pydantic models and plain data.

    Consumer("orders", "billing", type=Order)          message.value is an Order
    producer.publish("orders", Order(…))

A Codec is two functions, so that programs can have their own. pydantic is used where a type is one of its models, and
need not be installed.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import msgspec

from flintmq.errors import DecodeError

__all__ = ["JSON", "Body", "Codec", "Json", "MessagePack", "Value", "decode", "encode"]

_T = TypeVar("_T")


class Codec(Protocol):
    """How values become bytes, and bytes values."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, body: bytes, kind: type[_T], /) -> _T:
        """Return the value. Any exception means that the body is none of this kind."""


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class _Model(Protocol):
    """A model of pydantic's."""

    def model_dump_json(self) -> str: ...


#: What can be published besides bytes.
Value: TypeAlias = msgspec.Struct | _Dataclass | _Model | dict[str, Any] | list[Any]
Body: TypeAlias = bytes | Value


def _is_model(kind: Any) -> bool:
    return hasattr(kind, "model_validate_json") and hasattr(kind, "model_dump_json")


@functools.lru_cache(maxsize=256)
def _json_decoder(kind: Any) -> Any:
    return kind.model_validate_json if _is_model(kind) else msgspec.json.Decoder(kind).decode


@functools.lru_cache(maxsize=256)
def _message_pack_decoder(kind: Any) -> Any:
    if _is_model(kind):
        return lambda body: kind.model_validate(msgspec.msgpack.decode(body))
    return msgspec.msgpack.Decoder(kind).decode


class Json:
    """JSON, as RFC 8259 has it."""

    def encode(self, value: Any, /) -> bytes:
        if _is_model(type(value)):
            text: str = value.model_dump_json()
            return text.encode()
        return msgspec.json.encode(value)

    def decode(self, body: bytes, kind: type[_T], /) -> _T:
        known: Any = kind
        value: _T = _json_decoder(known)(body)
        return value


class MessagePack:
    """MessagePack: smaller, and it has bytes."""

    def encode(self, value: Any, /) -> bytes:
        if _is_model(type(value)):
            value = value.model_dump()
        return msgspec.msgpack.encode(value)

    def decode(self, body: bytes, kind: type[_T], /) -> _T:
        known: Any = kind
        value: _T = _message_pack_decoder(known)(body)
        return value


JSON = Json()


def encode(codec: Codec | None, value: Any) -> bytes:
    """Return a value as a body. TypeError for what is no value and no bytes either.

    Without a codec of the user's, a text or a number is taken for a mistake, and so is anything that can change.
    """
    kind = type(value)
    plain = kind in (dict, list) or isinstance(value, msgspec.Struct) or hasattr(kind, "__dataclass_fields__")
    if codec is None and not plain and not _is_model(kind):
        raise TypeError(
            f"a message is bytes, a dict, a list, or a struct, dataclass or pydantic model, not {kind.__name__}"
        )
    return (codec or JSON).encode(value)


def decode(codec: Codec | None, body: bytes, kind: type[_T]) -> _T:
    """Return the value in a body. DecodeError says why there is none."""
    try:
        return (codec or JSON).decode(body, kind)
    except Exception as exc:
        raise DecodeError(f"no {getattr(kind, '__name__', kind)}: {exc}") from exc
