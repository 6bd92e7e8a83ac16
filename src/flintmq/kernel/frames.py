# cython: language_level=3
"""Frames and batches as bytes: publishes made and checked, lines cut into messages, what a client receives."""

from struct import Struct

import cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_FromStringAndSize
    from cython.cimports.flintmq.kernel.layout import (
        ATTEMPTS_AT,
        BODY_AT,
        FRAME_OVERHEAD,
        ID_AT,
        TIMESTAMP_AT,
        TYPE_AT,
        TYPE_MESSAGE,
    )
    from cython.cimports.flintmq.kernel.native import rd32, wr32
    from cython.cimports.libc.string import memchr, memcpy
else:
    from flintmq.kernel.layout import BODY_AT, FRAME_OVERHEAD, TIMESTAMP_AT, TYPE_AT, TYPE_MESSAGE

#: A walk ended: with the last message; because the buffer ends before the batch does; because of a size out of range.
PARSE_DONE, PARSE_MORE, PARSE_BAD = 0, 1, 2

_MASK = 0xFFFFFFFFFFFFFFFF
_u32 = Struct(">I")
_i32 = Struct(">i")
_sized = Struct(">II").unpack_from
_stamped = Struct(">qH16s").unpack_from


def line_records(data: bytearray, pos: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> tuple:
    """The lines of ``data[pos:stop]`` as records ``[4-byte size][body]``, and how many; empty lines are left out."""
    if not 0 <= pos <= stop <= len(data):
        raise ValueError("pos and stop lie beyond the buffer")
    count: cython.Py_ssize_t = 0
    total: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t
    size: cython.Py_ssize_t
    if cython.compiled:
        p: cython.p_uchar = data
        found: cython.p_uchar
        at = pos
        while at < stop:
            found = cython.cast(cython.p_uchar, memchr(p + at, 10, stop - at))
            size = (found - p if found != cython.NULL else stop) - at
            if size:
                count += 1
                total += 4 + size
            at += size + 1
        records: bytearray = bytearray(total)
        out: cython.p_uchar = records
        at = pos
        while at < stop:
            found = cython.cast(cython.p_uchar, memchr(p + at, 10, stop - at))
            size = (found - p if found != cython.NULL else stop) - at
            if size:
                wr32(out, cython.cast(cython.uint, size))
                memcpy(out + 4, p + at, size)
                out += 4 + size
            at += size + 1
        return records, count
    lines = list(filter(None, bytes(memoryview(data)[pos:stop]).split(b"\n")))
    sizes = map(_u32.pack, map(len, lines))
    return bytearray().join([part for pair in zip(sizes, lines, strict=True) for part in pair]), len(lines)


def sum_records(
    data: bytearray, pos: cython.Py_ssize_t, stop: cython.Py_ssize_t, count: cython.Py_ssize_t, seed: cython.ulonglong
) -> cython.ulonglong:
    """The sum, modulo 2**64, of a 64-bit hash (MurmurHash64A with ``seed``) of each of the ``count`` records' bodies.

    It does not depend on the order of the records, nor on where a batch of them is cut in two. The records
    ``[4-byte size][body]`` at ``data[pos:stop]`` were walked over by a ``BatchParser``: ValueError if they do not fit.
    """
    if not 0 <= pos <= stop <= len(data):
        raise ValueError("pos and stop lie beyond the buffer")
    if cython.compiled:
        p: cython.p_uchar = data
        total: cython.ulonglong = 0
        h: cython.ulonglong
        k: cython.ulonglong
        m: cython.ulonglong = 0xC6A4A7935BD1E995
        size: cython.Py_ssize_t
        i: cython.Py_ssize_t
        fits: cython.bint = True
        with cython.nogil:
            while count > 0:
                if stop - pos < 4:
                    fits = False
                    break
                size = rd32(p + pos)
                pos += 4
                if size > stop - pos:
                    fits = False
                    break
                h = seed ^ (cython.cast(cython.ulonglong, size) * m)
                i = size
                while i >= 8:
                    memcpy(cython.address(k), p + pos, 8)
                    k *= m
                    k ^= k >> 47
                    k *= m
                    h ^= k
                    h *= m
                    pos += 8
                    i -= 8
                if i:
                    k = 0
                    memcpy(cython.address(k), p + pos, i)
                    h ^= k
                    h *= m
                    pos += i
                h ^= h >> 47
                h *= m
                h ^= h >> 47
                total += h
                count -= 1
        if not fits:
            raise ValueError("the records do not fit")
        return total
    found = 0
    for _ in range(count):
        if stop - pos < 4:
            raise ValueError("the records do not fit")
        length = _u32.unpack_from(data, pos)[0]
        pos += 4
        if length > stop - pos:
            raise ValueError("the records do not fit")
        found += _murmur(bytes(memoryview(data)[pos : pos + length]), seed)
        pos += length
    return found & _MASK


def _murmur(body: bytes, seed):
    """MurmurHash64A, as its author wrote it for little-endian machines."""
    m = 0xC6A4A7935BD1E995
    whole = len(body) // 8 * 8
    h = seed ^ (len(body) * m & _MASK)
    for at in range(0, whole, 8):
        k = int.from_bytes(body[at : at + 8], "little") * m & _MASK
        k = (k ^ k >> 47) * m & _MASK
        h = (h ^ k) * m & _MASK
    if whole < len(body):
        h = (h ^ int.from_bytes(body[whole:], "little")) * m & _MASK
    h = (h ^ h >> 47) * m & _MASK
    return h ^ h >> 47


def total_size(bodies: list) -> cython.longlong:
    """The bytes of all messages of a publish; -1 if one of them is empty, or is no ``bytes``."""
    if cython.compiled:
        total: cython.longlong = 0
        size: cython.Py_ssize_t
        i: cython.Py_ssize_t
        for i in range(len(bodies)):
            if type(bodies[i]) is not bytes:
                return -1
            size = len(cython.cast(bytes, bodies[i]))
            if size == 0:
                return -1
            total += size
        return total
    if not set(map(type, bodies)) <= {bytes} or not all(bodies):
        return -1
    return sum(map(len, bodies))


def encode_mpub(line: bytes, bodies: list) -> bytes:
    """The command MPUB: its line, the size of what follows, the count, and each message behind its size."""
    count: cython.Py_ssize_t = len(bodies)
    total: cython.longlong = 4 + 4 * count
    if cython.compiled:
        body: bytes
        i: cython.Py_ssize_t
        size: cython.Py_ssize_t
        for i in range(count):
            body = bodies[i]
            total += len(body)
        if total > 0xFFFFFFFF:
            raise OverflowError("too much for one MPUB")
        size = len(line)
        command: bytes = PyBytes_FromStringAndSize(cython.NULL, size + 4 + total)
        start: cython.p_uchar = line
        out: cython.p_uchar = command
        memcpy(out, start, size)
        wr32(out + size, cython.cast(cython.uint, total))
        wr32(out + size + 4, cython.cast(cython.uint, count))
        out += size + 8
        for i in range(count):
            body = bodies[i]
            size = len(body)
            start = body
            wr32(out, cython.cast(cython.uint, size))
            memcpy(out + 4, start, size)
            out += 4 + size
        return command
    # Two parts a message, put in place without a step of ours per message.
    parts = [b""] * (2 * count)
    sizes = list(map(len, bodies))
    total += sum(sizes)
    if total > 0xFFFFFFFF:
        raise OverflowError("too much for one MPUB")
    parts[::2] = map(_u32.pack, sizes)
    parts[1::2] = bodies
    return line + _u32.pack(total) + _u32.pack(count) + b"".join(parts)


@cython.cclass
class BatchParser:
    """A walk over ``count`` records ``[4-byte size][body]``, which can stop at the end of a buffer and go on later.

    ``pos`` is where it stands, ``index`` how many messages it has passed, ``size`` the last size read.
    """

    pos = cython.declare(cython.Py_ssize_t, visibility="public")
    index = cython.declare(cython.Py_ssize_t, visibility="public")
    size = cython.declare(cython.longlong, visibility="public")

    def __init__(self, pos: cython.Py_ssize_t):
        self.pos = pos
        self.index = 0
        self.size = 0

    @cython.ccall
    def run(
        self, data: bytearray, stop: cython.Py_ssize_t, count: cython.Py_ssize_t, max_size: cython.longlong
    ) -> cython.int:
        """Walk on up to ``stop``. ``PARSE_DONE``, ``PARSE_MORE`` or ``PARSE_BAD`` (``size`` is not in 1 … max_size)."""
        pos: cython.Py_ssize_t = self.pos
        index: cython.Py_ssize_t = self.index
        size: cython.longlong
        if stop > len(data):
            raise ValueError("stop lies beyond the buffer")
        if cython.compiled:
            p: cython.p_uchar = data
            while index < count:
                if pos + 4 > stop:
                    break
                size = cython.cast(cython.int, rd32(p + pos))
                if size <= 0 or size > max_size:
                    self.pos = pos
                    self.index = index
                    self.size = size
                    return PARSE_BAD
                if pos + 4 + size > stop:
                    break
                pos += 4 + size
                index += 1
        else:
            unpack = _i32.unpack_from
            while index < count:
                if pos + 4 > stop:
                    break
                (size,) = unpack(data, pos)
                if size <= 0 or size > max_size:
                    self.pos = pos
                    self.index = index
                    self.size = size
                    return PARSE_BAD
                if pos + 4 + size > stop:
                    break
                pos += 4 + size
                index += 1
        self.pos = pos
        self.index = index
        return PARSE_DONE if index == count else PARSE_MORE


@cython.cclass
class Delivery:
    """A message as a client has it: what its frame held, the connection it came by, and until when it is the client's.

    ``deadline`` is the client's own time, ``answered`` says that FIN or REQ was sent, ``kept`` that whoever handles it
    answers by himself.
    """

    timestamp = cython.declare(cython.longlong, visibility="public")
    attempts = cython.declare(cython.int, visibility="public")
    id = cython.declare(bytes, visibility="public")
    body = cython.declare(bytes, visibility="public")
    source = cython.declare(object, visibility="public")
    deadline = cython.declare(cython.double, visibility="public")
    answered = cython.declare(cython.bint, visibility="public")
    kept = cython.declare(cython.bint, visibility="public")

    def __init__(self, timestamp: cython.longlong, attempts: cython.int, id: bytes, body: bytes):
        self.timestamp = timestamp
        self.attempts = attempts
        self.id = id
        self.body = body
        self.source = None
        self.deadline = float("inf")
        self.answered = False
        self.kept = False


def split_frames(
    data: bytes,
    max_size: cython.longlong,
    kind: type,
    source: object,
    deadline: cython.double,
    messages: list,
    others: list,
) -> int:
    """Cut whole frames off the front of ``data``; where the first that is not whole begins.

    Messages are added to ``messages`` as objects of ``kind``, a subclass of Delivery; other frames to ``others`` as
    pairs of type and payload. A frame that cannot be one raises ValueError(size, type).
    """
    pos: cython.Py_ssize_t = 0
    stop: cython.Py_ssize_t
    end: cython.Py_ssize_t = len(data)
    size: cython.longlong
    frame_type: cython.uint
    message: Delivery
    if not issubclass(kind, Delivery):
        raise TypeError("messages are Deliveries")
    if cython.compiled:
        p: cython.p_uchar = data
        i: cython.int
        stamp: cython.ulonglong
        while pos + 8 <= end:
            size = rd32(p + pos)
            frame_type = rd32(p + pos + TYPE_AT)
            if (
                size < (FRAME_OVERHEAD - 4 if frame_type == TYPE_MESSAGE else 4)
                or size > max_size
                or frame_type > TYPE_MESSAGE
            ):
                raise ValueError(size, frame_type)
            stop = pos + 4 + size
            if stop > end:
                break
            if frame_type == TYPE_MESSAGE:
                message = kind.__new__(kind)
                stamp = 0
                for i in range(8):
                    stamp = (stamp << 8) | p[pos + TIMESTAMP_AT + i]
                message.timestamp = cython.cast(cython.longlong, stamp)
                message.attempts = (p[pos + ATTEMPTS_AT] << 8) | p[pos + ATTEMPTS_AT + 1]
                message.id = p[pos + ID_AT : pos + BODY_AT]
                message.body = p[pos + BODY_AT : stop]
                message.source = source
                message.deadline = deadline
                messages.append(message)
            else:
                others.append((frame_type, p[pos + TYPE_AT + 4 : stop]))
            pos = stop
    else:
        while pos + 8 <= end:
            size, frame_type = _sized(data, pos)
            if (
                size < (FRAME_OVERHEAD - 4 if frame_type == TYPE_MESSAGE else 4)
                or size > max_size
                or frame_type > TYPE_MESSAGE
            ):
                raise ValueError(size, frame_type)
            stop = pos + 4 + size
            if stop > end:
                break
            if frame_type == TYPE_MESSAGE:
                timestamp, attempts, id = _stamped(data, pos + TIMESTAMP_AT)
                message = kind.__new__(kind)
                # Not kind(…): what a subclass wants to be made with is its own business.
                Delivery.__init__(message, timestamp, attempts, id, data[pos + BODY_AT : stop])
                message.source = source
                message.deadline = deadline
                messages.append(message)
            else:
                others.append((frame_type, data[pos + TYPE_AT + 4 : stop]))
            pos = stop
    return pos
