"""The NSQ protocol V2 without I/O: commands and frames as bytes, names, numbers, ids.

Used by both sides. The byte loops that must be fast are in ``kernel``; here is what is read once per command or
connection. Nothing in this module reads a socket, awaits or logs.

A frame, server to client:      size (4) | type (4) | data            size counts type and data
A message, the data of type 2:  timestamp (8) | attempts (2) | id (16) | body
A command, client to server:    words separated by single spaces, \\n, and for some a body: size (4) | bytes
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Generic, TypeVar

from flintmq import kernel
from flintmq.errors import ProtocolError

__all__ = [
    "FRAME_ERROR",
    "FRAME_MESSAGE",
    "FRAME_RESPONSE",
    "HEARTBEAT",
    "HEARTBEAT_FRAME",
    "MAGIC_LOOKUP",
    "MAGIC_V2",
    "OK_FRAME",
    "FrameDecoder",
    "Message",
    "MessageDecoder",
    "cut_frame",
    "decode_error",
    "decode_identify",
    "decode_message",
    "encode_command",
    "encode_fins",
    "encode_frame",
    "encode_mpub",
    "go_quote",
    "is_ephemeral",
    "parse_base10",
    "valid_key",
    "valid_name",
]

MAGIC_V2 = b"  V2"
#: What a connection to an nsqlookupd begins with.
MAGIC_LOOKUP = b"  V1"
FRAME_RESPONSE = 0
FRAME_ERROR = 1
FRAME_MESSAGE = 2
HEARTBEAT = b"_heartbeat_"
#: The version clients are told: they compare it.
NSQ_VERSION = "1.3.0"

_frame_head = Struct(">II")
_message_head = Struct(">qH16s")
_size = Struct(">I")
_name = re.compile(r"[.a-zA-Z0-9_-]+(?:#ephemeral)?")
_name_bytes = re.compile(rb"[.a-zA-Z0-9_-]+(?:#ephemeral)?")
_key = re.compile(rb"[!-~]{1,128}")


def encode_frame(kind: int, data: bytes) -> bytes:
    return _frame_head.pack(len(data) + 4, kind) + data


OK_FRAME = encode_frame(FRAME_RESPONSE, b"OK")
CLOSE_WAIT_FRAME = encode_frame(FRAME_RESPONSE, b"CLOSE_WAIT")
HEARTBEAT_FRAME = encode_frame(FRAME_RESPONSE, HEARTBEAT)


def encode_command(name: bytes, *params: bytes, body: bytes | None = None) -> bytes:
    line = b" ".join((name, *params)) + b"\n"
    return line if body is None else line + _size.pack(len(body)) + body


def encode_mpub(topic: bytes, bodies: Sequence[bytes], key: bytes = b"") -> bytes:
    line = b"MPUB " + topic + (b" " + key if key else b"") + b"\n"
    return kernel.encode_mpub(line, bodies if type(bodies) is list else list(bodies))


def encode_fins(ids: Sequence[bytes]) -> bytes:
    return b"FIN " + b"\nFIN ".join(ids) + b"\n" if ids else b""


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it arrives: ``timestamp`` in ns, ``attempts`` counts this delivery."""

    timestamp: int
    attempts: int
    id: bytes
    body: bytes


def decode_message(data: bytes) -> Message:
    if len(data) < _message_head.size:
        raise ProtocolError("E_BAD_MESSAGE", f"a message frame of {len(data)} bytes")
    timestamp, attempts, message_id = _message_head.unpack_from(data)
    return Message(timestamp, attempts, message_id, data[_message_head.size :])


class FrameDecoder:
    """Bytes from a server in, whole frames out, however the stream was split."""

    def __init__(self, max_size: int = 64 << 20) -> None:
        self._buffer = bytearray()
        self._max_size = max_size

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        buffer = self._buffer
        buffer += data
        frames: list[tuple[int, bytes]] = []
        at = 0
        while len(buffer) - at >= 8:
            size, kind = _frame_head.unpack_from(buffer, at)
            if not 4 <= size <= self._max_size or kind > FRAME_MESSAGE:
                raise ProtocolError("E_INVALID", f"a frame of size {size} and type {kind}")
            stop = at + 4 + size
            if len(buffer) < stop:
                break
            frames.append((kind, bytes(buffer[at + 8 : stop])))
            at = stop
        del buffer[:at]
        return frames


#: The only errors after which a broker goes on with the connection.
HARMLESS = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})


def decode_error(payload: bytes) -> ProtocolError:
    """The error of an error frame: its first word is the code, and some texts begin with a code once more."""
    code, _, text = payload.decode(errors="replace").partition(" ")
    return ProtocolError(code, text, fatal=code not in HARMLESS)


_D = TypeVar("_D", bound=kernel.Delivery)


class MessageDecoder(Generic[_D]):
    """What a consumer reads: bytes in; messages out as objects of the caller's class, made many at a time.

    ``source`` is what they came by. Memory is bounded by ``max_size``, the largest frame that is believed.
    """

    def __init__(self, kind: type[_D], source: object, max_size: int = 64 << 20) -> None:
        self._kind = kind
        self._source = source
        self._max_size = max_size
        self._rest = bytearray()
        # How much of a frame must be there before it makes sense to look again: a large one is not walked over and
        # over while it arrives.
        self._wanted = 0

    def feed(self, data: bytes, deadline: float) -> tuple[list[_D], list[tuple[int, bytes]]]:
        """The messages, and the other frames as pairs of type and payload. ProtocolError where the bytes are none."""
        messages: list[_D] = []
        others: list[tuple[int, bytes]] = []
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._wanted:
                return messages, others
            data = bytes(rest)
            rest.clear()
        try:
            used = kernel.split_frames(data, self._max_size, self._kind, self._source, deadline, messages, others)
        except ValueError as exc:
            raise bad_frame(*exc.args) from None
        if used < len(data):
            rest += memoryview(data)[used:]
            self._wanted = 8 if len(rest) < 4 else 4 + _size.unpack_from(rest)[0]
            if self._wanted > 4 + self._max_size:
                raise bad_frame(self._wanted - 4, 0)
        return messages, others


def cut_frame(buffer: bytearray, max_size: int) -> tuple[int, bytes] | None:
    """Take one frame off the front; None while it is not whole. What follows may be of another layer, and stays."""
    if len(buffer) < 8:
        return None
    size, kind = _frame_head.unpack_from(buffer)
    if not 4 <= size <= max_size or kind > FRAME_MESSAGE:
        raise bad_frame(size, kind)
    if len(buffer) < 4 + size:
        return None
    payload = bytes(buffer[8 : 4 + size])
    del buffer[: 4 + size]
    return kind, payload


def bad_frame(size: int, kind: int) -> ProtocolError:
    if size == 0x48545450:
        return ProtocolError("E_INVALID", "an HTTP server answers there: is that the HTTP port of a broker?")
    return ProtocolError("E_INVALID", f"a frame of size {size} and type {kind}")


# --- Words --------------------------------------------------------------------------------------------------------


def valid_name(name: str | bytes) -> bool:
    """Topic and channel names: 1–64 of ``.a-zA-Z0-9_-``, ``#ephemeral`` may follow and counts."""
    # fullmatch, because $ would let a trailing newline through.
    if isinstance(name, str):
        return 0 < len(name) <= 64 and _name.fullmatch(name) is not None
    return 0 < len(name) <= 64 and _name_bytes.fullmatch(name) is not None


def valid_key(key: str | bytes) -> bool:
    """The key of an idempotent publish: 1–128 printable ASCII characters without space. NSQ has none."""
    if isinstance(key, str):
        return key.isascii() and _key.fullmatch(key.encode()) is not None
    return _key.fullmatch(key) is not None


def is_ephemeral(name: str) -> bool:
    return name.endswith("#ephemeral")


def parse_base10(text: bytes) -> int:
    """Digits only: no sign, no space; nothing at all is 0; beyond 64 bits it wraps. ValueError otherwise."""
    if not text:
        return 0
    if not text.isdigit():
        raise ValueError(text)
    if len(text) > 4096:
        # int() refuses very long texts; only the value modulo 2^64 counts, and 2^64 divides 10^64.
        text = text[-64:]
    return int(text) & 0xFFFF_FFFF_FFFF_FFFF


_ESCAPES = {
    0x07: "\\a",
    0x08: "\\b",
    0x0C: "\\f",
    0x0A: "\\n",
    0x0D: "\\r",
    0x09: "\\t",
    0x0B: "\\v",
    0x22: '\\"',
    0x5C: "\\\\",
}


def go_quote(data: bytes) -> bytes:
    """``data`` as Go's ``%q`` prints it: the error texts that clients match on hold names in this form."""
    out: list[str] = ['"']
    # An invalid byte comes through as a lone surrogate U+DC80 … U+DCFF.
    for char in data.decode("utf-8", "surrogateescape"):
        code = ord(char)
        if code in _ESCAPES:
            out.append(_ESCAPES[code])
        elif 0xDC80 <= code <= 0xDCFF:
            out.append(f"\\x{code - 0xDC00:02x}")
        elif char.isprintable():
            out.append(char)
        elif code < 0x80:
            out.append(f"\\x{code:02x}")
        elif code < 0x10000:
            out.append(f"\\u{code:04x}")
        else:
            out.append(f"\\U{code:08x}")
    out.append('"')
    return "".join(out).encode()


# --- The JSON of IDENTIFY ---------------------------------------------------------------------------------------------


#: An IDENTIFY with more values than this is not read: each costs many times its bytes, and time.
MOST_VALUES = 10_000


class _Object(list[tuple[str, Any]]):
    """A JSON object as its pairs, in order: a repeated key must be seen."""


def decode_identify(body: str, known: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """IDENTIFY's JSON as Go reads it: keys in any case, null changes nothing, whole numbers have no fraction.

    ``known`` are the fields: ``string``, ``bool``, ``int`` or ``int32``, and the default. Others are passed over.
    """
    error = ProtocolError("E_BAD_BODY", "IDENTIFY failed to decode JSON body")
    if body.count(",") + body.count("[") + body.count("{") > MOST_VALUES:
        raise error
    try:
        decoded = _IDENTIFY.decode(body)
    except (ValueError, RecursionError):
        raise error from None
    fields = {name: default for name, (_, default) in known.items()}
    if decoded is None:
        return fields
    if not isinstance(decoded, _Object):
        raise error
    for key, value in decoded:
        name = key.lower()
        if name not in known or value is None:
            continue
        kind = known[name][0]
        if kind == "string":
            fits = isinstance(value, str)
        elif kind == "bool":
            fits = isinstance(value, bool)
        else:
            bits = 31 if kind == "int32" else 63
            fits = type(value) is int and -(1 << bits) <= value < 1 << bits
        if not fits:
            raise error
        # A half of a surrogate pair is no character: replaced, as Go does, so that it can be sent and logged.
        if kind == "string" and not value.isascii():
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        fields[name] = value
    return fields


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


#: Made once: it takes longer than to decode what clients send.
_IDENTIFY = json.JSONDecoder(object_pairs_hook=_Object, parse_constant=_no_constant)
