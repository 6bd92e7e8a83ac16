"""Values as message bodies: JSON and MessagePack, for msgspec structs, dataclasses, pydantic models and plain data.

    Consumer("orders", "billing", type=Order)          message.value is an Order
    producer.publish("orders", Order(…))

A Codec is two functions, so that programs can have their own. pydantic is used where a type is one of its models or
dataclasses, or mentions one, as ``list[Order]`` does; it need not be installed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec

from flintmq.errors import DecodeError, OptionError

__all__ = ["JSON", "Body", "Codec", "Json", "MessagePack", "Value", "check", "decode", "encode"]

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


# --- pydantic --------------------------------------------------------------------------------------------------------


def _is_model(kind: Any) -> bool:
    return hasattr(kind, "model_validate_json") and hasattr(kind, "model_dump_json")


def _is_pydantic_dataclass(kind: Any) -> bool:
    return hasattr(kind, "__pydantic_validator__") and hasattr(kind, "__dataclass_fields__")


def _mentions_pydantic(kind: Any, seen: set[int]) -> bool:
    if id(kind) in seen:
        return False
    seen.add(id(kind))
    if _is_model(kind) or _is_pydantic_dataclass(kind):
        return True
    parts: Iterable[Any] = get_args(kind)
    if hasattr(kind, "__annotations__") and isinstance(kind, type):
        # A name that is not known yet is for the decoder to refuse.
        with contextlib.suppress(NameError):
            parts = [*parts, *get_type_hints(kind).values()]
    return any(_mentions_pydantic(part, seen) for part in parts)


@functools.lru_cache(maxsize=256)
def _adapter(kind: Any) -> Any:
    """What reads a type with pydantic in it; None for others, and for those that pydantic cannot read either."""
    if not _mentions_pydantic(kind, set()):
        return None
    from pydantic import PydanticUserError, TypeAdapter

    if _is_model(kind) and not getattr(kind, "__pydantic_complete__", True):
        kind.model_rebuild()  # raises where a name is still unknown
    try:
        return TypeAdapter(kind)
    except PydanticUserError:
        return None


@functools.lru_cache(maxsize=256)
def _dump_options(kind: Any) -> dict[str, Any]:
    """How a model is written, so that it can be read again: by its aliases, if it is read by them."""
    fields = getattr(kind, "__pydantic_fields__", None)
    if fields is None:
        return {}
    config = getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None) or {}
    is_by_name = config.get("populate_by_name") or config.get("validate_by_name")
    for name, field in fields.items():
        alias = field.validation_alias
        known = set(getattr(alias, "choices", [name if alias is None else alias]))
        if (field.serialization_alias or name) not in known | ({name} if is_by_name else set()):
            return {"by_alias": False}
    return {"by_alias": True}


def _plain(value: Any, mode: str) -> Any:
    """A model inside a list, a dict or a dataclass."""
    kind: Any = type(value)
    if not _is_model(kind):
        raise TypeError(f"Encoding objects of type {kind.__name__} is unsupported")
    return value.model_dump(mode=mode, **_dump_options(kind))


# --- Codecs ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _json_decoder(kind: Any) -> Any:
    adapter = _adapter(kind)
    if adapter is not None:
        return adapter.validate_json
    return kind.model_validate_json if _is_model(kind) else msgspec.json.Decoder(kind).decode


@functools.lru_cache(maxsize=256)
def _message_pack_decoder(kind: Any) -> Any:
    adapter = _adapter(kind)
    if adapter is not None:
        return lambda body: adapter.validate_python(msgspec.msgpack.decode(body))
    if _is_model(kind):
        return lambda body: kind.model_validate(msgspec.msgpack.decode(body))
    return msgspec.msgpack.Decoder(kind).decode


class Json:
    """JSON, as RFC 8259 has it."""

    _encoder = msgspec.json.Encoder(enc_hook=lambda value: _plain(value, "json"))

    def encode(self, value: Any, /) -> bytes:
        kind: Any = type(value)
        if _is_model(kind):
            text: str = value.model_dump_json(**_dump_options(kind))
            return text.encode()
        if _is_pydantic_dataclass(kind):
            body: bytes = _adapter(kind).dump_json(value, **_dump_options(kind))
            return body
        return self._encoder.encode(value)

    def decode(self, body: bytes, kind: type[_T], /) -> _T:
        known: Any = kind
        value: _T = _json_decoder(known)(body)
        return value

    def check(self, kind: Any, /) -> None:
        """Raise if no body can be read as this type."""
        _check_decoder(_json_decoder, kind)


class MessagePack:
    """MessagePack: smaller, and it has bytes."""

    _encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: _plain(value, "python"))

    def encode(self, value: Any, /) -> bytes:
        kind: Any = type(value)
        if _is_model(kind):
            value = value.model_dump(**_dump_options(kind))
        elif _is_pydantic_dataclass(kind):
            value = _adapter(kind).dump_python(value, **_dump_options(kind))
        return self._encoder.encode(value)

    def decode(self, body: bytes, kind: type[_T], /) -> _T:
        known: Any = kind
        value: _T = _message_pack_decoder(known)(body)
        return value

    def check(self, kind: Any, /) -> None:
        """Raise if no body can be read as this type."""
        _check_decoder(_message_pack_decoder, kind)


#: What JSON and MessagePack have by themselves.
_PLAIN_VALUES: tuple[Any, ...] = (None, True, 1, 1.5, "", b"", [], {})


def _check_decoder(decoder_of: Callable[[Any], Any], kind: Any) -> None:
    decoder_of(kind)
    if _adapter(kind) is None and not _is_model(kind):
        about = msgspec.inspect.type_info(kind)
        while isinstance(about, msgspec.inspect.ListType):
            about = about.item_type
        unknown = _unknown_type(about, set())
        if unknown is not None:
            raise TypeError(f"msgspec cannot read {unknown.__qualname__}")


def _unknown_type(about: Any, seen: set[Any]) -> Any:
    """Return a class of which msgspec knows nothing, where each message must have one; else None."""
    if isinstance(about, msgspec.inspect.CustomType):
        return None if any(isinstance(value, about.cls) for value in _PLAIN_VALUES) else about.cls
    if isinstance(about, msgspec.inspect.UnionType):
        # One that can be read is enough.
        found = [_unknown_type(each, seen) for each in about.types]
        return found[0] if all(found) else None
    kind = getattr(about, "cls", None)
    if kind in seen:
        return None
    seen.add(kind)
    needed = (field for field in getattr(about, "fields", ()) if field.required)
    return next((found for field in needed if (found := _unknown_type(field.type, seen))), None)


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
    body = (codec or JSON).encode(value)
    if not isinstance(body, bytes):
        raise TypeError(f"{type(codec).__name__}.encode returned {type(body).__name__}, not bytes")
    return bytes(body)  # itself, if it is of no other class


def check(codec: Codec | None, kind: Any) -> None:
    """Raise OptionError if no body can be read as this type. A codec of the user's says so if it has a `check`."""
    of_codec = getattr(codec or JSON, "check", None)
    if of_codec is not None:
        try:
            of_codec(kind)
        except Exception as exc:
            raise OptionError(f"no message can be read as type={kind!r}: {exc}") from exc


def decode(codec: Codec | None, body: bytes, kind: type[_T]) -> _T:
    """Return the value in a body. DecodeError says why there is none."""
    try:
        return (codec or JSON).decode(body, kind)
    except Exception as exc:
        raise DecodeError(f"no {getattr(kind, '__name__', kind)}: {exc}") from exc
