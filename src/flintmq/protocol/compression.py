"""Compression of a connection's stream, as NSQ negotiates it: deflate and snappy, both directions, without I/O.

A Codec owns the state of one connection. Everything that is sent is flushed at once, because the peer waits for it.
What arrives is unpacked in bounded pieces, each only when it is asked for: a stream that swells a thousandfold costs
its connection, not the memory, and its reader decides how much of it one turn of the loop may take.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

import cramjam
import google_crc32c

from flintmq.errors import ProtocolError

__all__ = ["Codec", "Deflate", "Snappy", "Stack"]

#: What one step of unpacking yields, at most.
PIECE = 256 << 10
#: What one step of unpacking takes, at most: bytes of deflate, chunks of snappy. Blocks and chunks may be empty.
PACKED_PIECE = 8 << 10
CHUNKS_AT_ONCE = 64


class Codec(Protocol):
    def compress(self, data: bytes | memoryview) -> bytes:
        """Everything the peer needs to see ``data``."""

    def decompress(self, data: bytes) -> Iterator[bytes]:
        """Yield what ``data`` adds to the stream, in pieces. ProtocolError if it is not of this form.

        A piece may be empty: much was read that adds nothing, and the reader can look at the clock.
        """


class Stack:
    """Two layers of one stream: ``inner`` lies inside ``outer``, which is next to the wire."""

    def __init__(self, outer: Codec, inner: Codec) -> None:
        self._outer = outer
        self._inner = inner

    def compress(self, data: bytes | memoryview) -> bytes:
        return self._outer.compress(self._inner.compress(data))

    def decompress(self, data: bytes) -> Iterator[bytes]:
        for piece in self._outer.decompress(data):
            yield from self._inner.decompress(piece)
            # The inner layer may have made nothing of it.
            yield b""


class Deflate:
    """Raw deflate, one stream per direction, a sync flush after everything sent."""

    def __init__(self, level: int) -> None:
        self._out = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._in = zlib.decompressobj(-zlib.MAX_WBITS)

    def compress(self, data: bytes | memoryview) -> bytes:
        return self._out.compress(data) + self._out.flush(zlib.Z_SYNC_FLUSH)

    def decompress(self, data: bytes) -> Iterator[bytes]:
        try:
            pos = 0
            while pos < len(data):
                packed = data[pos : pos + PACKED_PIECE]
                piece = self._in.decompress(packed, PIECE)
                pos += len(packed) - len(self._in.unconsumed_tail)
                if piece or pos < len(data):
                    yield piece
                if self._in.eof:
                    # NSQ takes it for the end of the connection; what follows would only pile up in the unpacker.
                    raise ProtocolError("E_INVALID", "the deflate stream has ended")
        except zlib.error as exc:
            raise ProtocolError("E_INVALID", f"not deflate: {exc}") from exc


class Snappy:
    """Snappy's framing format: chunks of at most 64 KiB, each with a masked CRC-32C of what it holds.

    chunk    type (1) | length (3, little-endian) | masked crc (4, little-endian) | data
    """

    _IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
    _BLOCK = 65_536
    #: The largest chunk of any type, its checksum included: a block that does not pack grows by a sixth. NSQ too takes
    #: no larger ones, not even to pass over them.
    _LONGEST_CHUNK = 4 + 32 + _BLOCK + _BLOCK // 6

    def __init__(self) -> None:
        self._started = False
        self._greeted = False
        self._buffer = bytearray()

    def compress(self, data: bytes | memoryview) -> bytes:
        parts: list[bytes] = []
        if not self._started:
            self._started = True
            parts.append(self._IDENTIFIER)
        view = memoryview(data)
        for i in range(0, len(view), self._BLOCK):
            block = bytes(view[i : i + self._BLOCK])
            packed = bytes(cramjam.snappy.compress_raw(block))
            # Not worth unpacking if it saves less than an eighth.
            small = len(packed) < len(block) - len(block) // 8
            payload = packed if small else block
            head = (b"\x00" if small else b"\x01") + (len(payload) + 4).to_bytes(3, "little")
            parts.append(head + _masked_crc(block).to_bytes(4, "little") + payload)
        return b"".join(parts)

    def decompress(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        empty = 0
        while len(buffer) >= 4:
            kind = buffer[0]
            size = int.from_bytes(buffer[1:4], "little")
            if not self._greeted and kind != 0xFF:
                raise ProtocolError("E_INVALID", "not snappy: no stream identifier")
            if size > self._LONGEST_CHUNK:
                raise ProtocolError("E_INVALID", f"not snappy: a chunk of {size} bytes")
            if 0x02 <= kind <= 0x7F:
                raise ProtocolError("E_INVALID", f"not snappy: a chunk of type {kind}")
            if len(buffer) < 4 + size:
                return
            chunk = bytes(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            if kind == 0xFF:
                if chunk != self._IDENTIFIER[4:]:
                    raise ProtocolError("E_INVALID", "not snappy: a wrong stream identifier")
                self._greeted = True
            elif kind <= 0x01:
                yield self._block(kind, chunk)
                continue
            empty += 1
            if not empty % CHUNKS_AT_ONCE:
                yield b""

    def _block(self, kind: int, chunk: bytes) -> bytes:
        if len(chunk) < 4:
            raise ProtocolError("E_INVALID", "not snappy: a chunk without a checksum")
        block = chunk[4:]
        if kind == 0x00:
            try:
                if cramjam.snappy.decompress_raw_len(block) > self._BLOCK:
                    raise ProtocolError("E_INVALID", "not snappy: a block of more than 64 KiB")
                block = bytes(cramjam.snappy.decompress_raw(block))
            except cramjam.DecompressionError as exc:
                raise ProtocolError("E_INVALID", f"not snappy: {exc}") from exc
        if len(block) > self._BLOCK or _masked_crc(block) != int.from_bytes(chunk[:4], "little"):
            raise ProtocolError("E_INVALID", "not snappy: a checksum does not fit")
        return block


def _masked_crc(data: bytes) -> int:
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
