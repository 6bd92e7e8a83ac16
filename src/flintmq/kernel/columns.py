# cython: language_level=3
"""Message frames as columns, for tables."""

from array import array
from struct import Struct

import cython

if cython.compiled:
    from cython.cimports.cpython.bytearray import PyByteArray_FromStringAndSize
    from cython.cimports.flintmq.kernel.layout import (
        ATTEMPTS_AT,
        BODY_AT,
        FRAME_OVERHEAD,
        ID_AT,
        TIMESTAMP_AT,
        TYPE_AT,
        TYPE_MESSAGE,
    )
    from cython.cimports.flintmq.kernel.native import rd32
    from cython.cimports.libc.string import memcpy
else:
    from flintmq.kernel.layout import BODY_AT, FRAME_OVERHEAD, TIMESTAMP_AT, TYPE_MESSAGE

_HEX = b"0123456789abcdef"
#: The value of every byte as a lower-case hex digit; 128 for one that is none.
_DIGITS = cython.declare(bytes, bytes(_HEX.find(n) if n in _HEX else 128 for n in range(256)))
_sized = Struct(">II").unpack_from
_stamped = Struct(">qH16s").unpack_from


def frame_columns(
    data: object,
    pos: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    max_rows: cython.Py_ssize_t,
    max_bytes: cython.Py_ssize_t,
) -> tuple:
    """Turn the message frames at ``data[pos:stop]`` into columns, up to ``max_rows`` and ``max_bytes`` of bodies.

    It stops at the first frame that is not whole or is no message; one row is made whatever its size. Returned are
    rows, the position after them, and the columns, each a buffer in the machine's byte order:

        seqs (8) | times in ns (8) | in µs (8) | attempts (4) | ids (16) | where bodies begin (4, one more) | bodies

    A seq is the lower 54 bits of its id, -1 for an id of another kind. A frame that cannot be one raises ValueError.
    """
    rows: cython.Py_ssize_t = 0
    total: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = pos
    size: cython.Py_ssize_t
    if not 0 <= pos <= stop <= len(data) or max_rows < 1 or max_bytes < 0 or max_bytes > 0x7FFFFFFF:
        raise ValueError("frame_columns: the range does not lie in the buffer")
    if cython.compiled:
        view: cython.const[cython.uchar][::1] = data
        p: cython.p_uchar = cython.NULL
        if stop:
            p = cython.cast(cython.p_uchar, cython.address(view[0]))
        bad: cython.Py_ssize_t = -1
        with cython.nogil:
            while rows < max_rows and at + 8 <= stop:
                size = rd32(p + at)
                if size < 4 or size > 0x7FFFFFFF:
                    bad = size
                    break
                if rd32(p + at + TYPE_AT) != TYPE_MESSAGE:
                    break
                if size < FRAME_OVERHEAD - 4:
                    bad = size
                    break
                if at + 4 + size > stop or (rows and total + size + 4 - FRAME_OVERHEAD > max_bytes):
                    break
                total += size + 4 - FRAME_OVERHEAD
                at += 4 + size
                rows += 1
        if bad >= 0:
            raise ValueError(f"a frame of {bad} bytes is none")
        seqs: bytearray = PyByteArray_FromStringAndSize(cython.NULL, 8 * rows)
        stamps: bytearray = PyByteArray_FromStringAndSize(cython.NULL, 8 * rows)
        micros: bytearray = PyByteArray_FromStringAndSize(cython.NULL, 8 * rows)
        tries: bytearray = PyByteArray_FromStringAndSize(cython.NULL, 4 * rows)
        ids: bytearray = PyByteArray_FromStringAndSize(cython.NULL, 16 * rows)
        begins: bytearray = PyByteArray_FromStringAndSize(cython.NULL, 4 * rows + 4)
        bodies: bytearray = PyByteArray_FromStringAndSize(cython.NULL, total)
        seq_out: cython.p_longlong = cython.cast(cython.p_longlong, cython.cast(cython.p_uchar, seqs))
        stamp_out: cython.p_longlong = cython.cast(cython.p_longlong, cython.cast(cython.p_uchar, stamps))
        micro_out: cython.p_longlong = cython.cast(cython.p_longlong, cython.cast(cython.p_uchar, micros))
        try_out: cython.p_int = cython.cast(cython.p_int, cython.cast(cython.p_uchar, tries))
        id_out: cython.p_uchar = ids
        begin_out: cython.p_int = cython.cast(cython.p_int, cython.cast(cython.p_uchar, begins))
        body_out: cython.p_uchar = bodies
        digits: cython.p_uchar = _DIGITS
        n: cython.Py_ssize_t
        k: cython.int
        digit: cython.uchar
        wrong: cython.uchar
        value: cython.ulonglong
        stamp: cython.longlong
        done: cython.Py_ssize_t = 0
        with cython.nogil:
            at = pos
            for n in range(rows):
                size = rd32(p + at) + 4 - FRAME_OVERHEAD
                stamp = cython.cast(
                    cython.longlong,
                    (cython.cast(cython.ulonglong, rd32(p + at + TIMESTAMP_AT)) << 32)
                    | rd32(p + at + TIMESTAMP_AT + 4),
                )
                stamp_out[n] = stamp
                micro_out[n] = stamp // 1000
                try_out[n] = (cython.cast(cython.int, p[at + ATTEMPTS_AT]) << 8) | p[at + ATTEMPTS_AT + 1]
                memcpy(id_out + 16 * n, p + at + ID_AT, 16)
                value = 0
                wrong = 0
                for k in range(16):
                    digit = digits[p[at + ID_AT + k]]
                    wrong |= digit
                    value = (value << 4) | (digit & 15)
                # The upper ten bits are the node's.
                seq_out[n] = -1 if wrong & 128 else cython.cast(cython.longlong, (value << 10) >> 10)
                begin_out[n] = cython.cast(cython.int, done)
                memcpy(body_out + done, p + at + BODY_AT, size)
                done += size
                at += FRAME_OVERHEAD + size
            begin_out[rows] = cython.cast(cython.int, done)
        return rows, at, seqs, stamps, micros, tries, ids, begins, bodies
    fields: list = []
    parts: list = []
    ends: list = [0]
    hexadecimal = frozenset(_HEX)
    while rows < max_rows and at + 8 <= stop:
        size, kind = _sized(data, at)
        if not 4 <= size <= 0x7FFFFFFF or (kind == TYPE_MESSAGE and size < FRAME_OVERHEAD - 4):
            raise ValueError(f"a frame of {size} bytes is none")
        if kind != TYPE_MESSAGE or at + 4 + size > stop or (rows and total + size + 4 - FRAME_OVERHEAD > max_bytes):
            break
        fields.append(_stamped(data, at + TIMESTAMP_AT))
        parts.append(data[at + BODY_AT : at + 4 + size])
        total += size + 4 - FRAME_OVERHEAD
        ends.append(total)
        at += 4 + size
        rows += 1
    return (
        rows,
        at,
        array("q", [int(id, 16) & 0x3FFFFFFFFFFFFF if hexadecimal.issuperset(id) else -1 for _, _, id in fields]),
        array("q", [stamp for stamp, _, _ in fields]),
        array("q", [stamp // 1000 for stamp, _, _ in fields]),
        array("i", [attempts for _, attempts, _ in fields]),
        b"".join([id for _, _, id in fields]),
        array("i", ends),
        b"".join(parts),
    )
