# cython: language_level=3
"""Records of a segment file: found, checked, and their frames put together. ``broker.storage.segment`` draws them."""

import cython

from flintmq.kernel.lane import Block

if cython.compiled:
    from cython.cimports.cpython.bytearray import PyByteArray_FromStringAndSize
    from cython.cimports.flintmq.kernel.checksum import flintmq_crc32c
    from cython.cimports.flintmq.kernel.layout import RECORD_HEADER
    from cython.cimports.flintmq.kernel.native import rd32
    from cython.cimports.libc.string import memcpy


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
