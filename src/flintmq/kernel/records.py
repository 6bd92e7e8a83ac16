# cython: language_level=3
"""Records of a segment file: found, checked, and their frames put together. ``broker.storage.segment`` draws them."""

from array import array
from struct import Struct

import cython

from flintmq.kernel.lane import Block

if cython.compiled:
    from cython.cimports.cpython.bytearray import PyByteArray_FromStringAndSize
    from cython.cimports.flintmq.kernel.checksum import flintmq_crc32c
    from cython.cimports.flintmq.kernel.layout import FRAME_OVERHEAD, RECORD_HEADER, TIMESTAMP_AT
    from cython.cimports.flintmq.kernel.native import rd32
    from cython.cimports.libc.string import memcpy
else:
    import google_crc32c

    from flintmq.kernel.layout import FRAME_OVERHEAD, RECORD_HEADER, TIMESTAMP_AT


#: A record's flag: its messages are deferred.
_DEFERRED = cython.declare(cython.int, 2)
#: Numbers per deferred record: first seq, count, started, delay in ns, timestamp.
_NUMBERS = cython.declare(cython.Py_ssize_t, 5)
_record = Struct(">IIIQQIHHI")
_u32 = Struct(">I")
_i64 = Struct(">q")


def gather(data: bytes, salt: cython.uint, first: cython.longlong, after: cython.longlong):
    """The frames ``first`` … ``after - 1`` as a block, from the records in ``data``; None if they are not just that.

    For a thread: the others go on while sums are checked and bytes are copied.
    """
    if not cython.compiled:
        return None
    p: cython.p_uchar = data
    size: cython.Py_ssize_t = len(data)
    at: cython.Py_ssize_t = 0
    total: cython.Py_ssize_t = 0
    expected: cython.longlong = first
    good: cython.bint = True
    with cython.nogil:
        while at < size and good:
            good = _whole_record(p + at, size - at, salt, expected)
            if good:
                total += rd32(p + at + 4)
                expected += rd32(p + at + 8)
                at += _record_size(p + at)
    if not good or expected != after:
        return None
    frames: bytearray = PyByteArray_FromStringAndSize(cython.NULL, total)
    out: cython.p_uchar = frames
    with cython.nogil:
        at = 0
        while at < size:
            total = rd32(p + at + 4)
            at += _record_size(p + at)
            memcpy(out, p + at - total, total)
            out += total
    block = Block(0, first, frames)
    return block if block.adopt(len(frames), after - first) else None


if cython.compiled:

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _record_size(p: cython.p_uchar) -> cython.Py_ssize_t:
        return RECORD_HEADER + ((cython.cast(cython.int, p[34]) << 8) | p[35]) + rd32(p + 4)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _rd64(p: cython.p_uchar) -> cython.longlong:
        return cython.cast(cython.longlong, (cython.cast(cython.ulonglong, rd32(p)) << 32) | rd32(p + 4))

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _whole_record(
        p: cython.p_uchar, left: cython.Py_ssize_t, salt: cython.uint, seq: cython.longlong
    ) -> cython.bint:
        """Does an undamaged record that begins with ``seq`` stand here? See segment.py for what it looks like."""
        extra: cython.Py_ssize_t
        size: cython.Py_ssize_t
        found: cython.ulonglong
        if left < RECORD_HEADER or rd32(p) != salt or _record_size(p) > left:
            return False
        found = (cython.cast(cython.ulonglong, rd32(p + 12)) << 32) | rd32(p + 16)
        extra = (cython.cast(cython.int, p[34]) << 8) | p[35]
        size = rd32(p + 4)
        if found != cython.cast(cython.ulonglong, seq):
            return False
        if rd32(p + 40) != flintmq_crc32c(flintmq_crc32c(salt, p, 40), p + RECORD_HEADER, extra):
            return False
        return rd32(p + 36) == flintmq_crc32c(salt, p + RECORD_HEADER + extra, size)


@cython.cclass
class RecordParser:
    """Walks over the plain records of a segment that has no footer: whole, one after the other, without extra bytes.

    Its user handles what is not plain, sets ``seq`` and ``indexed`` accordingly, and lets it go on.
    """

    # The seq that the next record must begin with; no record may reach beyond ``stop``.
    seq = cython.declare(cython.longlong, visibility="public")
    stop = cython.declare(cython.longlong, visibility="public")
    # The offset of the last record in the sparse index, -1 for none; a new one is due after ``step`` bytes.
    indexed = cython.declare(cython.longlong, visibility="public")
    # What the last parse() found: (seq, offset, timestamp) of records for the index; deferrals, see _NUMBERS.
    index = cython.declare(list, visibility="public")
    deferrals = cython.declare(object, visibility="public")
    _salt = cython.declare(cython.uint)
    _step = cython.declare(cython.longlong)

    def __init__(self, salt: cython.uint, seq: cython.longlong, stop: cython.longlong, step: cython.longlong):
        self.seq = seq
        self.stop = stop
        self.indexed = -1
        self.index = []
        self.deferrals = array("q")
        self._salt = salt
        self._step = step

    def parse(self, data: bytes, at: cython.Py_ssize_t, offset: cython.longlong) -> cython.Py_ssize_t:
        """Walk from ``at`` on; where the first record that is not plain stands. ``data`` begins at ``offset``."""
        size: cython.Py_ssize_t = len(data)
        if not 0 <= at <= size:
            raise ValueError("parse: the position does not lie in the buffer")
        self.index = []
        count: cython.longlong
        length: cython.Py_ssize_t
        if cython.compiled:
            p: cython.p_uchar = data
            timestamp: cython.longlong
            # So many records there can be, and no more: each has a frame.
            room: cython.Py_ssize_t = (size - at) // (RECORD_HEADER + FRAME_OVERHEAD) + 1
            found = array("q", bytes(8 * _NUMBERS * room))
            numbers: cython.longlong[::1] = found
            out: cython.p_longlong = cython.address(numbers[0])
            used: cython.Py_ssize_t = 0
            while _whole_record(p + at, size - at, self._salt, self.seq):
                length = rd32(p + at + 4)
                count = rd32(p + at + 8)
                if p[at + 34] or p[at + 35] or length < FRAME_OVERHEAD or count < 1 or self.seq + count > self.stop:
                    break
                timestamp = _rd64(p + at + RECORD_HEADER + TIMESTAMP_AT)
                if self.indexed < 0 or offset + at + RECORD_HEADER + length - self.indexed > self._step:
                    self.indexed = offset + at
                    self.index.append((self.seq, offset + at, timestamp))
                if p[at + 33] & _DEFERRED:
                    out[used] = self.seq
                    out[used + 1] = count
                    out[used + 2] = _rd64(p + at + 20)
                    out[used + 3] = cython.cast(cython.longlong, rd32(p + at + 28)) * 1_000_000
                    out[used + 4] = timestamp
                    used += _NUMBERS
                self.seq += count
                at += RECORD_HEADER + length
            # An array that somebody looks at cannot shrink.
            del numbers
            self.deferrals = found[:used]
            return at
        self.deferrals = array("q")
        while at + RECORD_HEADER <= size:
            mark, length, count, seq, started, delay, flags, extra, crc = _record.unpack_from(data, at)
            frames = at + RECORD_HEADER
            if (
                (mark, seq, extra) != (self._salt, self.seq, 0)
                or length < FRAME_OVERHEAD
                or count < 1
                or seq + count > self.stop
                or frames + length > size
                or _u32.unpack_from(data, frames - 4)[0] != google_crc32c.extend(mark, data[at : frames - 4])
                or crc != google_crc32c.extend(mark, data[frames : frames + length])
            ):
                break
            (stamp,) = _i64.unpack_from(data, frames + TIMESTAMP_AT)
            if self.indexed < 0 or offset + frames + length - self.indexed > self._step:
                self.indexed = offset + at
                self.index.append((seq, offset + at, stamp))
            if flags & _DEFERRED:
                self.deferrals.extend((seq, count, started, delay * 1_000_000, stamp))
            self.seq = seq + count
            at = frames + length
        return at
