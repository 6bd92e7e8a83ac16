# cython: language_level=3
"""The path of a message: blocks of frames, publishes taken from sockets, first deliveries, FINs. It makes system calls.

The only kernel module that does: recv, send and pwritev, through the table in ``calls.h`` (interpreted: a ``Calls``),
which tests and simulations replace with ``replace_calls``.

Size: a Block's bytes are shared at the level of C: an Intake frames into them and writes them, a Ring
sends them, and none of it may cost a call between modules.
"""

import os
from array import array
from mmap import mmap
from struct import Struct

import cython

if cython.compiled:
    from cython.cimports.cpython.buffer import PyBUF_READ, PyBUF_WRITE
    from cython.cimports.cpython.memoryview import PyMemoryView_FromMemory
    from cython.cimports.flintmq.kernel.calls import (
        MSG_DONTWAIT,
        MSG_NOSIGNAL,
        calls,
        flintmq_one_arena,
        iovec,
        libc_calls,
        madvise,
    )
    from cython.cimports.flintmq.kernel.checksum import flintmq_crc32c
    from cython.cimports.flintmq.kernel.layout import (
        ATTEMPTS_AT,
        BODY_AT,
        FRAME_OVERHEAD,
        ID_AT,
        RECORD_HEADER,
        TIMESTAMP_AT,
        TYPE_AT,
        TYPE_MESSAGE,
    )
    from cython.cimports.flintmq.kernel.native import rd32, wr32
    from cython.cimports.libc.errno import EAGAIN, EINTR, EIO, ENOSPC
    from cython.cimports.libc.string import memcmp, memcpy, memset
else:
    from errno import EAGAIN, EINTR, EIO, ENOSPC

    import google_crc32c

    from flintmq.kernel.layout import FRAME_OVERHEAD, RECORD_HEADER, TYPE_MESSAGE

COMPILED = cython.compiled

#: How an Intake ended: no socket had more; so much was made that it is time for other work; a socket brought
#: something else; what was made could not be written.
ALL, FULL, OTHER, FAILED = 0, 1, 2, 3
#: There was nothing to read.
NOTHING = -(1 << 30)
_nothing = cython.declare(cython.Py_ssize_t, NOTHING)

_MARK_SHIFT = 6
#: Frames of one command that an Intake makes; a larger one goes another way.
_MOST_AT_ONCE = cython.declare(cython.Py_ssize_t, 64 << 10)
#: The two digits of every byte.
_PAIRS = cython.declare(bytes, b"".join(b"%02x" % n for n in range(256)))
_HEX = b"0123456789abcdef"
#: The value of every byte as a lower-case hex digit; 128 for one that is none.
_DIGITS = cython.declare(bytes, bytes(_HEX.find(n) if n in _HEX else 128 for n in range(256)))
_u32 = Struct(">I")
_i32 = Struct(">i")
_two = Struct(">ii")
_head = Struct(">IIQH16s")
_record = Struct(">IIIQQIHHI")


class Calls:
    """The kernel's system calls, made from Python: what the interpreted form uses, and what tests derive theirs from.

    An entry returns a count or minus the error number. It must not keep the buffers it is given. An exception in one
    cannot be raised through C: it is handed to ``failed``, and the caller sees EIO.
    """

    def __init__(self):
        #: What entries raised.
        self.failures: list = []

    def recv(self, fd, view):
        """Read from a non-blocking socket into ``view``; 0 at the end of the stream."""
        try:
            return os.readv(fd, [view])
        except OSError as exc:
            return -(exc.errno or EIO)

    def send(self, fd, view):
        """Write what the non-blocking socket takes of ``view``."""
        try:
            return os.write(fd, view)
        except OSError as exc:
            return -(exc.errno or EIO)

    def pwritev(self, fd, parts, offset):
        """Write the buffers ``parts`` to a file at ``offset``."""
        try:
            return os.pwritev(fd, parts, offset)
        except OSError as exc:
            return -(exc.errno or EIO)

    def failed(self, error: BaseException) -> None:
        """Record what an entry raised."""
        self.failures.append(error)


# The table that stands in the place of libc; None: none does.
_table: object = None

if cython.compiled:

    @cython.cfunc
    @cython.with_gil
    @cython.exceptval(check=False)
    def _table_recv(fd: cython.int, buf: cython.p_void, size: cython.size_t, flags: cython.int) -> cython.Py_ssize_t:
        table = _table
        try:
            return table.recv(fd, PyMemoryView_FromMemory(cython.cast(cython.p_char, buf), size, PyBUF_WRITE))
        except BaseException as exc:
            table.failed(exc)
            return -EIO

    @cython.cfunc
    @cython.with_gil
    @cython.exceptval(check=False)
    def _table_send(
        fd: cython.int, buf: cython.pointer(cython.const[cython.void]), size: cython.size_t, flags: cython.int
    ) -> cython.Py_ssize_t:
        table = _table
        try:
            return table.send(fd, PyMemoryView_FromMemory(cython.cast(cython.p_char, buf), size, PyBUF_READ))
        except BaseException as exc:
            table.failed(exc)
            return -EIO

    @cython.cfunc
    @cython.with_gil
    @cython.exceptval(check=False)
    def _table_pwritev(
        fd: cython.int, parts: cython.pointer(cython.const[iovec]), count: cython.int, offset: cython.longlong
    ) -> cython.Py_ssize_t:
        table = _table
        i: cython.int
        try:
            views: list = []
            for i in range(count):
                views.append(  # noqa: PERF401  # Cython makes no comprehension over pointers
                    PyMemoryView_FromMemory(cython.cast(cython.p_char, parts[i].iov_base), parts[i].iov_len, PyBUF_READ)
                )
            return table.pwritev(fd, views, offset)
        except BaseException as exc:
            table.failed(exc)
            return -EIO

else:

    class _Guarded:
        """A table as the compiled form sees it: an entry that raises counts as EIO, and is recorded."""

        def __init__(self, table):
            self._table = table

        def recv(self, fd, view):
            try:
                return self._table.recv(fd, view)
            except BaseException as exc:
                self._table.failed(exc)
                return -EIO

        def send(self, fd, view):
            try:
                return self._table.send(fd, view)
            except BaseException as exc:
                self._table.failed(exc)
                return -EIO

        def pwritev(self, fd, parts, offset):
            try:
                return self._table.pwritev(fd, parts, offset)
            except BaseException as exc:
                self._table.failed(exc)
                return -EIO

    calls = Calls()


def use_one_arena() -> bool:
    """Let all threads of this process allocate from one arena; False if that cannot be had.

    What a thread reads from a file is given back by another one. With an arena for each thread that leaves holes, and a
    daemon grows by tens of megabytes an hour.
    """
    if cython.compiled:
        return flintmq_one_arena() != 0
    return False


def replace_calls(table: object) -> object:
    """Have every system call of the kernel go to ``table``, a Calls; None: to libc. Return the one before.

    For tests and simulations. There is one table per process: the descriptor tells whose call it is.
    """
    global _table, calls
    before = _table
    _table = table
    if cython.compiled:
        if table is None:
            calls.recv = libc_calls.recv
            calls.send = libc_calls.send
            calls.pwritev = libc_calls.pwritev
        else:
            calls.recv = _table_recv
            calls.send = _table_send
            calls.pwritev = _table_pwritev
    else:
        calls = Calls() if table is None else _Guarded(table)
    return before


def send_each(fds: list, frame: bytes) -> list:
    """Send ``frame`` to each of these sockets; the positions of those that did not take all of it, with what they took.

    A broken connection counts as one that took nothing: it is noticed when it is written to again.
    """
    left: list = []
    fd: cython.int
    i: cython.Py_ssize_t
    n: cython.Py_ssize_t
    size: cython.Py_ssize_t = len(frame)
    if cython.compiled:
        p: cython.p_uchar = frame
        for i in range(len(fds)):
            fd = fds[i]
            n = calls.send(fd, p, size, MSG_DONTWAIT | MSG_NOSIGNAL)
            if n < size:
                left.append((i, n if n > 0 else 0))
    else:
        for i, fd in enumerate(fds):
            n = calls.send(fd, frame)
            if n < size:
                left.append((i, max(n, 0)))
    return left


def populate(memory: list) -> None:
    """Have the system put pages behind new memory, which is all zeros; for a thread, the others go on meanwhile."""
    if cython.compiled:
        # All in one go: coming back to the interpreter in between would mean to wait for a busy loop each time.
        starts: list = []
        sizes: list = []
        whole: cython.uchar[::1]
        for piece in memory:
            whole = piece
            starts.append(cython.cast(cython.size_t, cython.address(whole[0])))
            sizes.append(whole.shape[0])
        table: cython.size_t[::1] = array("L", [*starts, *sizes])
        count: cython.Py_ssize_t = len(starts)
        i: cython.Py_ssize_t
        p: cython.p_uchar
        size: cython.Py_ssize_t
        at: cython.Py_ssize_t
        with cython.nogil:
            for i in range(count):
                p = cython.cast(cython.p_uchar, table[i])
                size = table[count + i]
                # Linux since 5.14 (MADV_POPULATE_WRITE); elsewhere each page is touched.
                if madvise(p, size, 23) != 0:
                    at = 0
                    while at < size:
                        p[at] = 0
                        at += 4096
    else:
        with open("/dev/zero", "rb", buffering=0) as zero:
            for piece in memory:
                zero.readinto(piece)


@cython.cclass
class Block:
    """A piece of a log in memory: finished frames of consecutive seqs, back to back, each

        size (4) | type 2 (4) | timestamp (8) | attempts (2) | id (16) | body

    with the id as 16 hex digits of ``prefix | seq``. The offset of every 64th frame is kept, so that any frame is
    found by a short walk. Frames are only ever added: a slice that was handed out stays as it is.
    """

    buf = cython.declare(object, visibility="public")
    view = cython.declare(object, visibility="public")
    size = cython.declare(cython.Py_ssize_t, visibility="public")
    used = cython.declare(cython.Py_ssize_t, visibility="public")
    base = cython.declare(cython.longlong, visibility="public")
    count = cython.declare(cython.Py_ssize_t, visibility="public")
    # Where fill() stopped in its input; what cut() and find() found.
    pos = cython.declare(cython.Py_ssize_t, visibility="public")
    start = cython.declare(cython.Py_ssize_t, visibility="public")
    stop = cython.declare(cython.Py_ssize_t, visibility="public")
    _marks = cython.declare(object)
    # Compiled: where both begin. Valid for ever, because neither is ever resized.
    _bytes = cython.declare(cython.p_uchar)
    _mark = cython.declare(cython.p_uint)
    _mark_room = cython.declare(cython.Py_ssize_t)
    # The last cut: from where, at most how many and how much, in a block of how many; and what came of it.
    _cut_seq = cython.declare(cython.longlong)
    _cut_most = cython.declare(cython.Py_ssize_t)
    _cut_bytes = cython.declare(cython.Py_ssize_t)
    _cut_of = cython.declare(cython.Py_ssize_t)
    _cut_start = cython.declare(cython.Py_ssize_t)
    _cut_stop = cython.declare(cython.Py_ssize_t)
    _cut_count = cython.declare(cython.Py_ssize_t)

    def __init__(self, size: cython.Py_ssize_t, base: cython.longlong, buf=None):
        """``buf`` may be any writable buffer; one that is to be recycled is an ``mmap``."""
        if buf is None:
            buf = bytearray(size)
        self.buf = buf
        self.size = len(buf)
        self.view = memoryview(buf)
        self.used = 0
        self.base = base
        self.count = 0
        self.pos = self.start = self.stop = 0
        self._cut_seq = -1
        self._cut_most = self._cut_bytes = self._cut_of = self._cut_start = self._cut_stop = self._cut_count = 0
        self._marks = array("I", bytes(4 * (self.size // (FRAME_OVERHEAD << _MARK_SHIFT) + 2)))
        if cython.compiled:
            marks: cython.uint[::1] = self._marks
            self._mark = cython.address(marks[0])
            self._mark_room = marks.shape[0] << 6
            if len(buf):
                whole: cython.uchar[::1] = buf
                self._bytes = cython.address(whole[0])

    def recycle(self, base: cython.longlong) -> bool:
        """Make this an empty block again; False if that cannot be, because somebody still holds a view of it."""
        if not isinstance(self.buf, mmap):
            return False
        self.view.release()
        try:
            # To the size it has: refused while a view is out, and nothing else happens.
            self.buf.resize(self.size)
        except (BufferError, SystemError):
            return False
        self.view = memoryview(self.buf)
        self.used = 0
        self.base = base
        self.count = 0
        self._cut_seq = -1
        return True

    @cython.ccall
    def fill(
        self,
        data: bytearray,
        pos: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        ident: cython.ulonglong,
        timestamp: cython.longlong,
        attempts: cython.int,
        max_bytes: cython.Py_ssize_t,
    ) -> cython.Py_ssize_t:
        """Make frames of up to ``count`` records ``[size][body]`` at ``data[pos:stop]``; how many were made.

        It stops where the block is full or ``max_bytes`` of frames were made (one frame is made whatever its size);
        ``self.pos`` says where. ``ident`` is the first message's id, prefix included.
        """
        done: cython.Py_ssize_t = 0
        used: cython.Py_ssize_t = self.used
        limit: cython.Py_ssize_t = self.size
        budget: cython.Py_ssize_t = used + max_bytes
        n: cython.Py_ssize_t = self.count
        size: cython.longlong
        if pos < 0 or stop > len(data) or attempts < 0 or attempts > 65535:
            raise ValueError("fill: the range does not lie in the buffer")
        if cython.compiled:
            k: cython.int
            v: cython.ulonglong
            src: cython.p_uchar = data
            dst: cython.p_uchar = self._bytes
            d: cython.p_uchar
            pairs: cython.p_uchar = _PAIRS
            digits: cython.uchar[16]
            high: cython.ulonglong = 0
            fresh: cython.bint = True
            marks: cython.p_uint = self._mark
            mark_room: cython.Py_ssize_t = self._mark_room
            while done < count:
                if pos + 4 > stop:
                    raise ValueError("fill: a record is cut off")
                size = rd32(src + pos)
                if pos + 4 + size > stop:
                    raise ValueError("fill: a record is cut off")
                if (
                    used + FRAME_OVERHEAD + size > limit
                    or (done and used + FRAME_OVERHEAD + size > budget)
                    or n >= mark_room
                ):
                    break
                if n & 63 == 0:
                    marks[n >> 6] = cython.cast(cython.uint, used)
                d = dst + used
                wr32(d, cython.cast(cython.uint, size + FRAME_OVERHEAD - 4))
                wr32(d + TYPE_AT, TYPE_MESSAGE)
                wr32(d + TIMESTAMP_AT, cython.cast(cython.uint, timestamp >> 32))
                wr32(d + TIMESTAMP_AT + 4, cython.cast(cython.uint, timestamp))
                d[ATTEMPTS_AT] = (attempts >> 8) & 255
                d[ATTEMPTS_AT + 1] = attempts & 255
                # Only the last digits change from one message to the next.
                v = ident + done
                if fresh or (v >> 8) != high:
                    fresh = False
                    high = v >> 8
                    for k in range(7):
                        memcpy(cython.address(digits[12 - 2 * k]), pairs + 2 * ((high >> (8 * k)) & 255), 2)
                memcpy(cython.address(digits[14]), pairs + 2 * (v & 255), 2)
                memcpy(d + ID_AT, cython.address(digits[0]), 16)
                memcpy(d + BODY_AT, src + pos + 4, size)
                used += FRAME_OVERHEAD + size
                pos += 4 + size
                n += 1
                done += 1
        else:
            unpack = _u32.unpack_from
            pack = _head.pack_into
            buf = self.buf
            table = self._marks
            while done < count:
                if pos + 4 > stop:
                    raise ValueError("fill: a record is cut off")
                (size,) = unpack(data, pos)
                after = pos + 4 + size
                if after > stop:
                    raise ValueError("fill: a record is cut off")
                at = used + FRAME_OVERHEAD
                if at + size > limit or (done and at + size > budget):
                    break
                if n & 63 == 0:
                    table[n >> 6] = used
                pack(buf, used, size + FRAME_OVERHEAD - 4, TYPE_MESSAGE, timestamp, attempts, b"%016x" % (ident + done))
                used = at + size
                buf[at:used] = data[pos + 4 : after]
                pos = after
                n += 1
                done += 1
        self.used = used
        self.count = n
        self.pos = pos
        return done

    @cython.ccall
    def checksum(self, value: cython.uint, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.uint:
        """The CRC-32C of what ``value`` is that of, followed by ``view[start:stop]``."""
        if start < 0 or stop < start or stop > self.size:
            raise ValueError("checksum: the range does not lie in the block")
        if cython.compiled:
            return flintmq_crc32c(value, self._bytes + start, stop - start)
        return google_crc32c.extend(value, bytes(self.view[start:stop]))

    @cython.ccall
    def adopt(self, used: cython.Py_ssize_t, count: cython.Py_ssize_t) -> cython.bint:
        """Take ``used`` bytes that are already in the buffer as ``count`` frames; False if they are not."""
        at: cython.Py_ssize_t = 0
        n: cython.Py_ssize_t = 0
        size: cython.longlong
        if used < 0 or used > self.size:
            return False
        if cython.compiled:
            p: cython.p_uchar = self._bytes
            marks: cython.p_uint = self._mark
            room: cython.Py_ssize_t = self._mark_room
            while at < used:
                if at + FRAME_OVERHEAD > used or n >= room:
                    return False
                if n & 63 == 0:
                    marks[n >> 6] = cython.cast(cython.uint, at)
                size = rd32(p + at)
                if size < FRAME_OVERHEAD - 4:
                    return False
                at += 4 + size
                n += 1
        else:
            unpack = _u32.unpack_from
            buf = self.buf
            table = self._marks
            while at < used:
                if at + FRAME_OVERHEAD > used:
                    return False
                if n & 63 == 0:
                    table[n >> 6] = at
                (size,) = unpack(buf, at)
                if size < FRAME_OVERHEAD - 4:
                    return False
                at += 4 + size
                n += 1
        if at != used or n != count:
            return False
        self.used = used
        self.count = n
        return True

    @cython.ccall
    def cut_back(self, count: cython.Py_ssize_t) -> cython.int:
        """Forget all frames after the first ``count``: their write failed and nobody has seen them."""
        if count < self.count:
            self.used = self.find(self.base + count)
            self.count = count
            self._cut_seq = -1
        return 0

    @cython.ccall
    def find(self, seq: cython.longlong) -> cython.Py_ssize_t:
        """The offset at which the frame of ``seq`` starts; ``self.stop`` is where it ends."""
        i: cython.longlong = seq - self.base
        at: cython.Py_ssize_t
        if i < 0 or i >= self.count:
            raise IndexError("the block does not hold this seq")
        if cython.compiled:
            p: cython.p_uchar = self._bytes
            at = self._mark[i >> 6]
            for _ in range(i & 63):
                at += 4 + rd32(p + at)
            self.stop = at + 4 + rd32(p + at)
        else:
            unpack = _u32.unpack_from
            buf = self.buf
            at = self._marks[i >> 6]
            for _ in range(i & 63):
                at += 4 + unpack(buf, at)[0]
            self.stop = at + 4 + unpack(buf, at)[0]
        self.start = at
        return at

    def index(self, offset: cython.Py_ssize_t) -> int:
        """Which frame starts at ``offset``, counted from 0; one past the last at the block's end."""
        n: cython.Py_ssize_t = 0
        at: cython.Py_ssize_t = 0
        while at < offset:
            at += 4 + _u32.unpack_from(self.buf, at)[0]
            n += 1
        return n

    @cython.ccall
    def cut(
        self, seq: cython.longlong, max_count: cython.Py_ssize_t, max_bytes: cython.Py_ssize_t
    ) -> cython.Py_ssize_t:
        """How many frames from ``seq`` on make up a run; ``view[self.start:self.stop]`` are its bytes."""
        if (
            seq == self._cut_seq
            and max_count == self._cut_most
            and max_bytes == self._cut_bytes
            and self.count == self._cut_of
        ):
            # Every channel of a topic wants the same run.
            self.start = self._cut_start
            self.stop = self._cut_stop
            return self._cut_count
        start: cython.Py_ssize_t = self.find(seq)
        at: cython.Py_ssize_t = self.stop
        left: cython.Py_ssize_t = self.base + self.count - seq
        n: cython.Py_ssize_t = 1
        size: cython.Py_ssize_t
        self._cut_seq = seq
        self._cut_most = max_count
        self._cut_bytes = max_bytes
        self._cut_of = self.count
        if left < max_count:
            max_count = left
        if left == max_count and self.used - start <= max_bytes:
            # All there is: nothing to count.
            n = left
            at = self.used
        # In strides from mark to mark, then one by one.
        first: cython.Py_ssize_t = seq - self.base
        stride: cython.Py_ssize_t = (first + n + 63) >> 6
        if cython.compiled:
            p: cython.p_uchar = self._bytes
            while n < max_count and stride << 6 < first + max_count:
                size = self._mark[stride]
                if size - start > max_bytes:
                    break
                at = size
                n = (stride << 6) - first
                stride += 1
            while n < max_count:
                size = 4 + rd32(p + at)
                if at + size - start > max_bytes:
                    break
                at += size
                n += 1
        else:
            unpack = _u32.unpack_from
            buf = self.buf
            while n < max_count and stride << 6 < first + max_count:
                size = self._marks[stride]
                if size - start > max_bytes:
                    break
                at = size
                n = (stride << 6) - first
                stride += 1
            while n < max_count:
                size = 4 + unpack(buf, at)[0]
                if at + size - start > max_bytes:
                    break
                at += size
                n += 1
        self.start = self._cut_start = start
        self.stop = self._cut_stop = at
        self._cut_count = n
        return n


@cython.cclass
class Tail:
    """The end of a log, where an Intake appends: the last block, and the file behind it."""

    # The last block, and how many of its bytes stay free.
    block = cython.declare(Block, visibility="public")
    room = cython.declare(cython.Py_ssize_t, visibility="public")
    # The next message's seq, and the node's part of its id.
    seq = cython.declare(cython.longlong, visibility="public")
    prefix = cython.declare(cython.ulonglong, visibility="public")
    # The file (-1: none), where to write in it, and its salt.
    file = cython.declare(cython.int, visibility="public")
    offset = cython.declare(cython.longlong, visibility="public")
    salt = cython.declare(cython.uint, visibility="public")
    # Bytes of frames after which a record is written, and after which an Intake stops; may publishers be answered?
    write_at = cython.declare(cython.Py_ssize_t, visibility="public")
    budget = cython.declare(cython.Py_ssize_t, visibility="public")
    answer = cython.declare(cython.bint, visibility="public")

    def __init__(self, prefix: cython.ulonglong, write_at: cython.Py_ssize_t):
        self.block = None
        self.room = 0
        self.seq = 0
        self.prefix = prefix
        self.file = -1
        self.offset = 0
        self.salt = 0
        self.write_at = self.budget = write_at
        self.answer = False


@cython.cclass
class Intake:
    """Publishes of one kind to one topic, straight from sockets: read, framed, written to a file, answered.

    A publish of the kind is ``line``, a newline, and a size and a body of that size; or, where ``max_body`` is given,
    a batch: a size up to that, a number of messages, and each with its size. Each has to come whole and alone: a
    client that waits for its answer sends nothing else.
    """

    # Where run() stopped; at OTHER, how many bytes that socket brought: 0 if its stream has ended, or else minus the
    # error's number.
    index = cython.declare(cython.Py_ssize_t, visibility="public")
    size = cython.declare(cython.Py_ssize_t, visibility="public")
    # Bytes written to the file; at FAILED the error's number, and from where on in the block frames were not written.
    wrote = cython.declare(cython.longlong, visibility="public")
    error = cython.declare(cython.int, visibility="public")
    unwritten = cython.declare(cython.Py_ssize_t, visibility="public")
    # Positions of the sockets that got no answer; and those that did not take all of it, with what they took.
    unanswered = cython.declare(list, visibility="public")
    left = cython.declare(list, visibility="public")
    _data = cython.declare(bytearray)
    _line = cython.declare(bytes)
    _ok = cython.declare(bytes)
    _max_size = cython.declare(cython.longlong)
    _max_body = cython.declare(cython.longlong)

    def __init__(self, data: bytearray, line: bytes, ok: bytes, max_size: cython.longlong, max_body: cython.longlong):
        self.index = self.size = self.unwritten = 0
        self.wrote = 0
        self.error = 0
        self.unanswered = []
        self.left = []
        self._data = data
        self._line = line + b"\n"
        self._ok = ok
        self._max_size = max_size
        self._max_body = max_body

    @cython.ccall
    def run(
        self, tail: Tail, fds: list, counts: list, start: cython.Py_ssize_t, timestamp: cython.longlong
    ) -> cython.int:
        """Take publishes from ``fds[start:]``; how many messages each brought is added to ``counts``. -1 is no socket.

        Without ``tail.answer`` every socket is read once, and the walk ends when ``tail.write_at`` bytes of frames were
        made. With it, publishes are written to the tail's file as records, one for at least every ``write_at`` bytes,
        and answered; and then the sockets are read again, for as long as they bring more and less than ``tail.budget``
        was made. Nothing is read when the block has less than ``tail.room`` left.
        """
        if tail is None or tail.block is None:
            raise ValueError("run: a tail with a block is needed")
        block: Block = tail.block
        ident: cython.ulonglong = tail.prefix | tail.seq
        write_at: cython.Py_ssize_t = tail.write_at
        budget: cython.Py_ssize_t = tail.budget
        answer: cython.bint = tail.answer
        i: cython.Py_ssize_t = start
        total: cython.Py_ssize_t = len(fds)
        quiet: cython.Py_ssize_t = 0
        status: cython.int = 0
        taken: cython.Py_ssize_t
        used: cython.Py_ssize_t = block.used
        count: cython.Py_ssize_t = block.count
        first: cython.Py_ssize_t = block.used
        origin: cython.Py_ssize_t = block.count
        self.wrote = 0
        self.error = 0
        self.unanswered = []
        self.left = []
        if len(counts) != total or start < 0:
            raise ValueError("run: as many counts as sockets")
        if not answer:
            budget = write_at
        last: cython.Py_ssize_t = block.size - tail.room
        while True:
            while status == 0 and i < total and quiet < total and block.used - used < write_at and block.used <= last:
                if fds[i] < 0:
                    taken = 0
                else:
                    taken = self._take(block, fds[i], ident + block.count - origin, timestamp)
                if taken > 0:
                    counts[i] += taken
                    self.unanswered.append(i)
                    quiet = 0
                elif taken == 0:
                    quiet += 1
                else:
                    status = 2
                    self.index = i
                i += 1
            if answer and block.used > used:
                if tail.file >= 0 and self._write(tail, used, block.count - count, tail.seq + count - origin):
                    self.unwritten = used
                    return FAILED
                self._answer(fds)
            used = block.used
            count = block.count
            if status:
                return OTHER
            if used - first >= budget or used > last:
                self.index = i
                return FULL
            if quiet >= total or (i == total and not answer):
                self.index = i
                return ALL
            if i == total:
                i = 0

    if cython.compiled:

        @cython.cfunc
        def _take(
            self, block: Block, fd: cython.int, ident: cython.ulonglong, timestamp: cython.longlong
        ) -> cython.Py_ssize_t:
            """Read one socket; how many messages came, 0 for none, -1 if it was something else (``self.size``)."""
            p: cython.p_uchar = self._data
            q: cython.p_uchar = self._line
            head: cython.Py_ssize_t = len(self._line)
            at: cython.Py_ssize_t = head
            n: cython.Py_ssize_t = calls.recv(fd, p, len(self._data), MSG_DONTWAIT)
            count: cython.longlong = 1
            left: cython.longlong
            size: cython.longlong
            self.size = n
            if n <= 0:
                return 0 if n == -EAGAIN or n == -EINTR else -1
            if n < head + 12 and (self._max_body or n < head + 5):
                return -1
            if memcmp(p, q, head) != 0:
                return -1
            if self._max_body:
                size = cython.cast(cython.int, rd32(p + at))
                count = cython.cast(cython.int, rd32(p + at + 4))
                if size <= 0 or size > self._max_body or count <= 0 or count > n:
                    return -1
                at += 8
            head = at
            left = count
            while left > 0:
                left -= 1
                if at + 4 > n:
                    return -1
                size = cython.cast(cython.int, rd32(p + at))
                if size <= 0 or size > self._max_size or at + 4 + size > n:
                    return -1
                at += 4 + size
            size = n - head + (FRAME_OVERHEAD - 4) * count
            if at != n or size > _MOST_AT_ONCE or block.used + size > block.size:
                return -1
            if block.count + count > block._mark_room:
                return -1
            block.fill(self._data, head, n, count, ident, timestamp, 1, size)
            return count

        @cython.cfunc
        def _write(
            self, tail: Tail, start: cython.Py_ssize_t, count: cython.Py_ssize_t, seq: cython.ulonglong
        ) -> cython.int:
            """Write the block's frames from ``start`` on as one record; the error's number, 0 if there was none."""
            block: Block = tail.block
            salt: cython.uint = tail.salt
            file: cython.int = tail.file
            offset: cython.longlong = tail.offset + self.wrote
            head: cython.uchar[44]
            parts: iovec[2]
            n: cython.Py_ssize_t
            size: cython.Py_ssize_t = block.used - start
            memset(cython.address(head[0]), 0, RECORD_HEADER)
            wr32(cython.address(head[0]), salt)
            wr32(cython.address(head[4]), cython.cast(cython.uint, size))
            wr32(cython.address(head[8]), cython.cast(cython.uint, count))
            wr32(cython.address(head[12]), cython.cast(cython.uint, seq >> 32))
            wr32(cython.address(head[16]), cython.cast(cython.uint, seq & 0xFFFFFFFF))
            wr32(cython.address(head[36]), flintmq_crc32c(salt, block._bytes + start, size))
            wr32(cython.address(head[40]), flintmq_crc32c(salt, cython.address(head[0]), 40))
            parts[0].iov_base = cython.address(head[0])
            parts[0].iov_len = RECORD_HEADER
            parts[1].iov_base = block._bytes + start
            parts[1].iov_len = size
            with cython.nogil:
                n = calls.pwritev(file, cython.address(parts[0]), 2, offset)
            if n != size + RECORD_HEADER:
                # Short: the disk is full, or nearly.
                self.error = -n if n < 0 else ENOSPC
                return self.error
            self.wrote += n
            return 0

        @cython.cfunc
        def _answer(self, fds: list) -> cython.int:
            p: cython.p_uchar = self._ok
            size: cython.Py_ssize_t = len(self._ok)
            n: cython.Py_ssize_t
            for i in self.unanswered:
                n = calls.send(fds[i], p, size, MSG_DONTWAIT | MSG_NOSIGNAL)
                if n < size:
                    self.left.append((i, n if n > 0 else 0))
            self.unanswered = []
            return 0

    else:

        def _take(self, block, fd, ident, timestamp):
            data = self._data
            line = self._line
            n = self.size = calls.recv(fd, memoryview(data))
            if n <= 0:
                return 0 if n in (-EAGAIN, -EINTR) else -1
            at = len(line)
            if n < at + (12 if self._max_body else 5) or data[:at] != line:
                return -1
            count = 1
            if self._max_body:
                size, count = _two.unpack_from(data, at)
                if not 0 < size <= self._max_body or not 0 < count <= n:
                    return -1
                at += 8
            head = at
            for _ in range(count):
                if at + 4 > n:
                    return -1
                (size,) = _i32.unpack_from(data, at)
                if not 0 < size <= self._max_size or at + 4 + size > n:
                    return -1
                at += 4 + size
            size = n - head + (FRAME_OVERHEAD - 4) * count
            if at != n or size > _MOST_AT_ONCE or block.used + size > block.size:
                return -1
            block.fill(data, head, n, count, ident, timestamp, 1, size)
            return count

        def _write(self, tail, start, count, seq):
            block, salt = tail.block, tail.salt
            size = block.used - start
            head = _record.pack(salt, size, count, seq, 0, 0, 0, 0, block.checksum(salt, start, block.used))
            head += _u32.pack(google_crc32c.extend(salt, head))
            n = calls.pwritev(tail.file, [head, block.view[start : block.used]], tail.offset + self.wrote)
            if n != size + RECORD_HEADER:
                self.error = -n if n < 0 else ENOSPC
                return self.error
            self.wrote += n
            return 0

        def _answer(self, fds):
            for i in self.unanswered:
                n = calls.send(fds[i], self._ok)
                if n < len(self._ok):
                    self.left.append((i, max(n, 0)))
            self.unanswered = []


@cython.cclass
class Ring:
    """Who holds which first delivery: an owner per seq in the window ``lo`` … ``hi - 1``, 0 where nobody does.

    What was finished is collected as ranges in ``_done`` until ``take_done()``. ``count`` is how many are held.
    """

    lo = cython.declare(cython.longlong, visibility="public")
    hi = cython.declare(cython.longlong, visibility="public")
    count = cython.declare(cython.Py_ssize_t, visibility="public")
    finished = cython.declare(cython.Py_ssize_t, visibility="public")
    # The window is kept to this, or to eight times what it holds.
    limit = cython.declare(cython.longlong, visibility="public")
    # What finish_from_socket() read, and how much of it were FINs; what send_run() sent.
    received = cython.declare(cython.Py_ssize_t, visibility="public")
    taken = cython.declare(cython.Py_ssize_t, visibility="public")
    sent = cython.declare(cython.Py_ssize_t, visibility="public")
    _owners = cython.declare(object)
    _mask = cython.declare(cython.longlong)
    _done = cython.declare(object)
    _done_used = cython.declare(cython.Py_ssize_t)
    # Compiled: where the two arrays begin. They are replaced, never resized.
    _owner = cython.declare(cython.p_uint)
    _range = cython.declare(cython.p_longlong)
    _range_room = cython.declare(cython.Py_ssize_t)

    def __init__(self):
        self.lo = self.hi = 0
        self.count = 0
        self.finished = 0
        self.limit = 1 << 16
        self.received = self.taken = self.sent = 0
        self._owners = None
        self._mask = -1
        self._done = None
        self._done_used = 0

    @property
    def window(self) -> int:
        return self.hi - self.lo

    def reset(self, seq: cython.longlong) -> None:
        """Hold nothing; the next delivery starts at or after ``seq``. What is in ``_done`` stays."""
        self.lo = self.hi = seq
        self.count = 0
        self._owners = None
        self._mask = -1

    @cython.ccall
    def deliver(self, first: cython.longlong, count: cython.Py_ssize_t, owner: cython.uint) -> cython.int:
        """``owner`` is sent ``first`` … ``first + count - 1``. ``first`` must not lie before ``hi``."""
        need: cython.longlong
        i: cython.longlong
        if first < self.hi:
            raise ValueError("deliver: a seq before the window's end")
        if self.count == 0:
            self.lo = self.hi = first
        need = first + count - self.lo
        if need > self._mask + 1:
            self._grow(need)
        if cython.compiled:
            ow: cython.p_uint = self._owner
            m: cython.longlong = self._mask
            for i in range(self.hi, first):
                ow[i & m] = 0
            for i in range(first, first + count):
                ow[i & m] = owner
        else:
            owners = self._owners
            mask = self._mask
            for i in range(self.hi, first):
                owners[i & mask] = 0
            for i in range(first, first + count):
                owners[i & mask] = owner
        self.hi = first + count
        self.count += count
        return 0

    @cython.ccall
    def send_run(
        self,
        block: Block,
        first: cython.longlong,
        max_count: cython.Py_ssize_t,
        max_bytes: cython.Py_ssize_t,
        owner: cython.uint,
        fd: cython.int,
    ) -> cython.Py_ssize_t:
        """Cut a run, mark it as delivered to ``owner`` and send it to the socket ``fd``; how many messages it has.

        ``self.sent`` says how much of ``block.start`` … ``block.stop`` the socket took: nothing if ``fd`` is -1. 0
        is returned, and nothing done, if the window would become too wide.
        """
        count: cython.Py_ssize_t = block.cut(first, max_count, max_bytes)
        n: cython.Py_ssize_t = 0
        if self.count > 0:
            if first - self.hi > self.limit:
                return 0
            if first + count - self.lo > self.limit and first + count - self.lo > 8 * self.count:
                return 0
        elif first < self.hi:
            # After a restart or a hole the cursor may stand before the old window.
            self.reset(first)
        self.deliver(first, count, owner)
        if fd >= 0:
            if cython.compiled:
                n = calls.send(fd, block._bytes + block.start, block.stop - block.start, MSG_DONTWAIT | MSG_NOSIGNAL)
            else:
                n = calls.send(fd, block.view[block.start : block.stop])
        # A broken connection took nothing: that is noticed when the rest is sent.
        self.sent = n if n > 0 else 0
        return count

    def send_each(
        self,
        block: Block,
        first: cython.longlong,
        stop: cython.longlong,
        limits: list[int],
        max_bytes: cython.Py_ssize_t,
        budget: cython.Py_ssize_t,
        owners: list[int],
        fds: list[int],
        counts: list[int],
    ) -> int:
        """Send a run to each of several sockets, one behind the other, from ``first`` on; how many bytes all have.

        How many messages each gets is added to ``counts``. It ends early where the block or the range ends, when
        ``budget`` bytes are spent, where ``send_run`` does nothing, and with a run of which a socket did not take all:
        that is the last one, and ``self.sent`` and the block say what is left of it.
        """
        i: cython.Py_ssize_t
        limit: cython.Py_ssize_t
        count: cython.Py_ssize_t
        size: cython.Py_ssize_t = 0
        if stop > block.base + block.count:
            stop = block.base + block.count
        for i in range(len(fds)):
            if first >= stop or size >= budget:
                break
            limit = limits[i]
            if limit > stop - first:
                limit = stop - first
            count = self.send_run(block, first, limit, max_bytes, owners[i], fds[i])
            if count == 0:
                # The block knows this run now, of which nothing was sent, and nothing is to be.
                self.sent = block.stop - block.start
                break
            counts.append(count)
            first += count
            size += block.stop - block.start
            if self.sent != block.stop - block.start:
                break
        return size

    @cython.cfunc
    def _grow(self, need: cython.longlong) -> cython.int:
        size: cython.longlong = 64
        while size < need:
            size *= 2
        new = array("I", bytes(4 * size))
        old = self._owners
        for i in range(self.lo, self.hi):
            new[i & (size - 1)] = old[i & self._mask]
        self._owners = new
        self._mask = size - 1
        if cython.compiled:
            view: cython.uint[::1] = new
            self._owner = cython.address(view[0])
        return 0

    @cython.ccall
    def owner(self, seq: cython.longlong) -> cython.uint:
        """Who holds ``seq``; 0 for nobody."""
        if seq < self.lo or seq >= self.hi:
            return 0
        return self._owners[seq & self._mask]

    @cython.ccall
    def release(self, seq: cython.longlong) -> cython.int:
        """``seq`` is no longer a first delivery: finished, requeued, or kept elsewhere from now on."""
        if seq < self.lo or seq >= self.hi or self._owners[seq & self._mask] == 0:
            raise ValueError("release: nobody holds this seq")
        self.count -= 1
        self._owners[seq & self._mask] = 0
        if seq == self.lo:
            self._advance()
        return 0

    @cython.cfunc
    def _advance(self) -> cython.int:
        lo: cython.longlong = self.lo
        if cython.compiled:
            ow: cython.p_uint = self._owner
            m: cython.longlong = self._mask
            while lo < self.hi and ow[lo & m] == 0:
                lo += 1
        else:
            owners = self._owners
            mask = self._mask
            while lo < self.hi and owners[lo & mask] == 0:
                lo += 1
        self.lo = lo
        return 0

    @cython.ccall
    def finish_run(
        self,
        data: bytearray,
        pos: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
        owner: cython.uint,
        prefix: cython.ulonglong,
    ) -> cython.Py_ssize_t:
        """Apply the ``FIN <id>\\n`` commands at ``data[pos:stop]``; where the first one of another kind stands.

        Usual: ``owner`` holds it in this ring. ``self.finished`` says how many were finished.
        """
        done: cython.Py_ssize_t = 0
        used: cython.Py_ssize_t
        v: cython.longlong
        if pos < 0 or stop > len(data):
            raise ValueError("finish_run: the range does not lie in the buffer")
        if self.count == 0:
            self.finished = 0
            return pos
        if self._done is None:
            self._set_done(array("q", bytes(16 * 64)))
        used = self._done_used
        if cython.compiled:
            src: cython.p_uchar = data
            p: cython.p_uchar
            ow: cython.p_uint = self._owner
            out: cython.p_longlong = self._range
            room: cython.Py_ssize_t = self._range_room
            m: cython.longlong = self._mask
            lo: cython.longlong = self.lo
            hi: cython.longlong = self.hi
            k: cython.int
            u: cython.ulonglong
            base: cython.ulonglong = 0
            high: cython.p_uchar = cython.NULL
            digits: cython.p_uchar = _DIGITS
            bad: cython.uint
            a: cython.uint
            b: cython.uint
            c: cython.uint
            x: cython.uint
            while stop - pos >= 21:
                p = src + pos
                if p[0] != 70 or p[1] != 73 or p[2] != 78 or p[3] != 32 or p[20] != 10:
                    break
                if high == cython.NULL or memcmp(p + 4, high, 12) != 0:
                    # A run of messages has the same first digits: they are read once.
                    high = p + 4
                    base = 0
                    bad = 0
                    for k in range(12):
                        x = digits[high[k]]
                        bad |= x
                        base = (base << 4) | x
                    base <<= 16
                    if bad & 128:
                        break
                a = digits[p[16]]
                b = digits[p[17]]
                c = digits[p[18]]
                x = digits[p[19]]
                if (a | b | c | x) & 128:
                    break
                u = base | (a << 12) | (b << 8) | (c << 4) | x
                v = cython.cast(cython.longlong, u ^ prefix)
                if v < lo or v >= hi or ow[v & m] != owner:
                    break
                ow[v & m] = 0
                done += 1
                pos += 21
                if used > 0 and out[used - 1] == v:
                    out[used - 1] = v + 1
                else:
                    if used == room:
                        self._widen()
                        out = self._range
                        room = self._range_room
                    out[used] = v
                    out[used + 1] = v + 1
                    used += 2
        else:
            owners = self._owners
            ranges = self._done
            mask = self._mask
            low = self.lo
            high = self.hi
            while stop - pos >= 21:
                line = bytes(data[pos : pos + 21])
                if line[:4] != b"FIN " or line[20] != 10:
                    break
                digits = line[4:20]
                if digits.strip(_HEX):
                    break
                v = int(digits, 16) ^ prefix
                if v < low or v >= high or owners[v & mask] != owner:
                    break
                owners[v & mask] = 0
                done += 1
                pos += 21
                if used and ranges[used - 1] == v:
                    ranges[used - 1] = v + 1
                else:
                    if used == len(ranges):
                        self._widen()
                        ranges = self._done
                    ranges[used] = v
                    ranges[used + 1] = v + 1
                    used += 2
        self._done_used = used
        self.count -= done
        self.finished = done
        if done:
            self._advance()
        return pos

    @cython.ccall
    def finish_from_socket(
        self, fd: cython.int, data: bytearray, owner: cython.uint, prefix: cython.ulonglong
    ) -> cython.Py_ssize_t:
        """Read from a socket into ``data`` and apply the FINs that come first; where something else stands.

        ``self.received`` is how much was read; 0: the stream has ended; less: minus the error's number, or ``NOTHING``.
        """
        n: cython.Py_ssize_t
        self.finished = 0
        if cython.compiled:
            p: cython.p_uchar = data
            n = calls.recv(fd, p, len(data), MSG_DONTWAIT)
        else:
            n = calls.recv(fd, memoryview(data))
        if n == -EAGAIN or n == -EINTR:
            n = _nothing
        self.received = n
        self.taken = self.finish_run(data, 0, n, owner, prefix) if n > 0 else 0
        return self.taken

    def finish_each(
        self,
        fds: list[int],
        owners: list[int],
        data: bytearray,
        prefix: cython.ulonglong,
        counts: list[int],
    ) -> int:
        """The same for several sockets, as long as they bring FINs and nothing else; how many did.

        What was finished for each is added to ``counts``: also for the first that is not as simple as that, of which
        ``self.received`` and ``self.taken`` tell.
        """
        i: cython.Py_ssize_t
        for i in range(len(fds)):
            self.finish_from_socket(fds[i], data, owners[i], prefix)
            counts.append(self.finished)
            if self.received <= 0 or self.taken != self.received:
                return i
        return len(fds)

    @cython.cfunc
    def _widen(self) -> cython.int:
        new = array("q", self._done)
        new.extend(array("q", bytes(8 * len(self._done))))
        self._set_done(new)
        return 0

    @cython.cfunc
    def _set_done(self, new) -> cython.int:
        self._done = new
        if cython.compiled:
            view: cython.longlong[::1] = new
            self._range = cython.address(view[0])
            self._range_room = view.shape[0]
        return 0

    def add_done(self, first: int, stop: int) -> None:
        """Collect a range that was finished in another way than by ``finish_run``."""
        if self._done is None:
            self._set_done(array("q", bytes(16 * 64)))
        used = self._done_used
        if used and self._done[used - 1] == first:
            self._done[used - 1] = stop
            return
        if used == len(self._done):
            self._widen()
        self._done[used] = first
        self._done[used + 1] = stop
        self._done_used = used + 2

    def take_done(self) -> bytes:
        """The collected ranges as 64-bit numbers in pairs (first, stop), in the machine's byte order; then none."""
        used = self._done_used
        if not used:
            return b""
        data = bytes(memoryview(self._done)[:used])
        self._done_used = 0
        if used > 4096:
            self._done = None
        return data

    def holds(self, first: cython.longlong, stop: cython.longlong) -> bool:
        """Is any first delivery in ``first`` … ``stop - 1`` still held?"""
        if first < self.lo:
            first = self.lo
        if stop > self.hi:
            stop = self.hi
        if first >= stop:
            return False
        seq: cython.longlong
        mask: cython.longlong = self._mask
        owners: cython.uint[::1] = self._owners
        for seq in range(first, stop):
            if owners[seq & mask]:
                return True
        return False

    def held(self, first: int, stop: int) -> list:
        """``(seq, owner)`` of each first delivery still held in ``first`` … ``stop - 1``."""
        if first < self.lo:
            first = self.lo
        if stop > self.hi:
            stop = self.hi
        owners = self._owners
        mask = self._mask
        found = []
        for seq in range(first, stop):
            owner = owners[seq & mask]
            if owner:
                found.append((seq, owner))
        return found
