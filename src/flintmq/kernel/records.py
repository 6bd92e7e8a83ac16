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
    from cython.cimports.flintmq.kernel.native import rd32, wr32
    from cython.cimports.libc.string import memcpy
else:
    import google_crc32c

    from flintmq.kernel.layout import FRAME_OVERHEAD, RECORD_HEADER, TIMESTAMP_AT


#: A record's flags: its group goes on; its messages are deferred; it goes on with a group.
_MORE = cython.declare(cython.int, 1)
_DEFERRED = cython.declare(cython.int, 2)
_CONTINUES = cython.declare(cython.int, 4)
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


def whole_groups(data: bytes, salt: cython.uint, seq: cython.longlong, stop: cython.longlong) -> tuple:
    """How far ``data`` is nothing but whole groups of records from ``seq`` on, before ``stop``: (position, seq there).

    Most groups are of one record.
    """
    at: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t = len(data)
    whole: cython.Py_ssize_t = 0
    after: cython.longlong = seq
    flags: cython.int
    inside: cython.bint = False
    if cython.compiled:
        p: cython.p_uchar = data
        with cython.nogil:
            while _whole_record(p + at, size - at, salt, seq):
                flags = p[at + 33]
                if rd32(p + at + 8) < 1 or rd32(p + at + 4) < FRAME_OVERHEAD or ((flags & _CONTINUES) != 0) != inside:
                    break
                seq += rd32(p + at + 8)
                if seq > stop:
                    break
                at += _record_size(p + at)
                inside = flags & _MORE
                if not inside:
                    whole = at
                    after = seq
        return whole, after
    while (head := _head_of_whole(data, at, salt)) is not None:
        _, length, count, first, _, _, flags, extra, _ = head
        if count < 1 or length < FRAME_OVERHEAD or first != seq or bool(flags & _CONTINUES) != inside:
            break
        seq += count
        if seq > stop:
            break
        at += RECORD_HEADER + extra + length
        inside = bool(flags & _MORE)
        if not inside:
            whole, after = at, seq
    return whole, after


def resalted(data: bytes, salt: cython.uint, other: cython.uint) -> bytes | None:
    """The records in ``data`` as a file with another salt holds them; None if it is not whole records only."""
    out = bytearray(data)
    at: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t = len(data)
    extra: cython.Py_ssize_t
    length: cython.Py_ssize_t
    if cython.compiled:
        p: cython.p_uchar = out
        q: cython.p_uchar
        with cython.nogil:
            while at < size:
                q = p + at
                if not _whole_record(q, size - at, salt, _rd64(q + 12) if size - at >= RECORD_HEADER else 0):
                    break
                extra = (cython.cast(cython.int, q[34]) << 8) | q[35]
                length = rd32(q + 4)
                wr32(q, other)
                wr32(q + 36, flintmq_crc32c(other, q + RECORD_HEADER + extra, length))
                wr32(q + 40, flintmq_crc32c(flintmq_crc32c(other, q, 40), q + RECORD_HEADER, extra))
                at += RECORD_HEADER + extra + length
        return bytes(out) if at == size else None
    while (head := _head_of_whole(data, at, salt)) is not None:
        _, length, *middle, extra, _ = head
        frames = at + RECORD_HEADER + extra
        fresh = _record.pack(other, length, *middle, extra, google_crc32c.extend(other, data[frames : frames + length]))
        crc = google_crc32c.extend(google_crc32c.extend(other, fresh), data[at + RECORD_HEADER : frames])
        out[at : at + RECORD_HEADER] = fresh + _u32.pack(crc)
        at = frames + length
    return bytes(out) if at == size else None


if not cython.compiled:

    def _head_of_whole(data, at, salt):
        """The numbers in the head of the undamaged record that stands there; None if none does."""
        if at + RECORD_HEADER > len(data):
            return None
        head = _record.unpack_from(data, at)
        mark, length, _, _, _, _, _, extra, crc = head
        frames = at + RECORD_HEADER + extra
        if (
            mark != salt
            or frames + length > len(data)
            or crc != google_crc32c.extend(salt, data[frames : frames + length])
        ):
            return None
        sums = google_crc32c.extend(salt, data[at : at + RECORD_HEADER - 4])
        sums = google_crc32c.extend(sums, data[at + RECORD_HEADER : frames])
        return head if _u32.unpack_from(data, at + RECORD_HEADER - 4)[0] == sums else None


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
    """Walks over the records of a segment that has no footer: whole, one after the other.

    Its user sets ``indexed``, and ``seq`` where some are left out.
    """

    # The seq that the next record must begin with; no record may reach beyond ``stop``.
    seq = cython.declare(cython.longlong, visibility="public")
    stop = cython.declare(cython.longlong, visibility="public")
    # The offset of the last record in the sparse index, -1 for none; a new one is due after ``step`` bytes.
    indexed = cython.declare(cython.longlong, visibility="public")
    # What the last parse() found: (seq, offset, timestamp) of records for the index; deferrals, see _NUMBERS;
    # (seq, flags, timestamp, extra bytes) of the records that have any.
    index = cython.declare(list, visibility="public")
    deferrals = cython.declare(object, visibility="public")
    extras = cython.declare(list, visibility="public")
    _salt = cython.declare(cython.uint)
    _step = cython.declare(cython.longlong)

    def __init__(self, salt: cython.uint, seq: cython.longlong, stop: cython.longlong, step: cython.longlong):
        self.seq = seq
        self.stop = stop
        self.indexed = -1
        self.index = []
        self.deferrals = array("q")
        self.extras = []
        self._salt = salt
        self._step = step

    def parse(self, data: bytes, offset: cython.longlong) -> cython.Py_ssize_t:
        """Walk over ``data``, which begins at ``offset``; where something else stands in it."""
        size: cython.Py_ssize_t = len(data)
        at: cython.Py_ssize_t = 0
        self.index = []
        self.extras = []
        count: cython.longlong
        length: cython.Py_ssize_t
        extra: cython.Py_ssize_t
        if cython.compiled:
            p: cython.p_uchar = data
            timestamp: cython.longlong
            # So many records there can be, and no more: each has a frame.
            room: cython.Py_ssize_t = size // (RECORD_HEADER + FRAME_OVERHEAD) + 1
            found = array("q", bytes(8 * _NUMBERS * room))
            numbers: cython.longlong[::1] = found
            out: cython.p_longlong = cython.address(numbers[0])
            used: cython.Py_ssize_t = 0
            while _whole_record(p + at, size - at, self._salt, self.seq):
                length = rd32(p + at + 4)
                count = rd32(p + at + 8)
                extra = (cython.cast(cython.int, p[at + 34]) << 8) | p[at + 35]
                if length < FRAME_OVERHEAD or count < 1 or self.seq + count > self.stop:
                    break
                timestamp = _rd64(p + at + RECORD_HEADER + extra + TIMESTAMP_AT)
                if self.indexed < 0 or offset + at + RECORD_HEADER + extra + length - self.indexed > self._step:
                    self.indexed = offset + at
                    self.index.append((self.seq, offset + at, timestamp))
                if p[at + 33] & _DEFERRED:
                    out[used] = self.seq
                    out[used + 1] = count
                    out[used + 2] = _rd64(p + at + 20)
                    out[used + 3] = cython.cast(cython.longlong, rd32(p + at + 28)) * 1_000_000
                    out[used + 4] = timestamp
                    used += _NUMBERS
                if extra:
                    self.extras.append((self.seq, p[at + 33], timestamp, (p + at + RECORD_HEADER)[:extra]))
                self.seq += count
                at += RECORD_HEADER + extra + length
            # An array that somebody looks at cannot shrink.
            del numbers
            self.deferrals = found[:used]
            return at
        self.deferrals = array("q")
        while (head := _head_of_whole(data, at, self._salt)) is not None:
            _, length, count, seq, started, delay, flags, extra, _ = head
            if seq != self.seq or length < FRAME_OVERHEAD or count < 1 or seq + count > self.stop:
                break
            frames = at + RECORD_HEADER + extra
            (stamp,) = _i64.unpack_from(data, frames + TIMESTAMP_AT)
            if self.indexed < 0 or offset + frames + length - self.indexed > self._step:
                self.indexed = offset + at
                self.index.append((seq, offset + at, stamp))
            if flags & _DEFERRED:
                self.deferrals.extend((seq, count, started, delay * 1_000_000, stamp))
            if extra:
                self.extras.append((seq, flags & 255, stamp, data[at + RECORD_HEADER : frames]))
            self.seq = seq + count
            at = frames + length
        return at
