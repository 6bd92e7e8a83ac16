"""A segment file: what its bytes mean, how they are written and read, what can be saved of one that was cut off.

Nothing here decides when to write or what to keep: that is the log's business.

A segment file is a header, records, and, once it is full or the broker stops, a footer:

    header   magic (8) | version (2) | reserved (2) | salt (4) | base seq (8) | boot id (16) | crc (4)
    record   mark (4) | length (4) | count (4) | base seq (8) | started (8) | delay ms (4) | flags (2) | extra (2)
             | crc of the frames (4) | crc of this header and the extra bytes (4) | extra bytes | frames
    footer   keys (keys.py) | body (MessagePack) | length of the body (4) | its crc (4) | magic (8)

All numbers are big-endian. ``mark`` and both checksums (CRC-32C) are salted with a random value of the file, so that
nothing inside a message body can pass for a record. ``started`` is the clock's now() of a deferred publish. A record
is at most about 64 KiB of frames; a batch that needs more is a group: all its records but the last carry MORE, all
but the first CONTINUES, and recovery drops a group that is not whole. Extra bytes in a topic's main log are a
MessagePack map: ``key`` is the digest of an idempotency key and ``of`` the content that it was used for, ``dead`` what
a dead letter was before it died. A footer holds the sparse index with its times and whether these are in order, the
spans of seqs, the deferrals, the keys and what was lost, so that a start reads only the files that have none.

Version 1. A later version must read every earlier one, and a file of a later version is refused, never guessed at.
"""

from __future__ import annotations

import errno
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import google_crc32c
import msgspec

from flintmq.broker.storage.disk import Disk, pack_numbers, unpack_numbers
from flintmq.broker.storage.keys import RESERVED, KeyBlock, key_in
from flintmq.errors import FormatError
from flintmq.kernel import Block, RecordParser, gather, resalted, whole_groups
from flintmq.system import System

_MAGIC = b"FLINTLOG"
_END_MAGIC = b"FLINTEND"
_VERSION = 1
_file_head = Struct(">8sHHIQ16s")
_record_head = Struct(">IIIQQIHHI")
_crc = Struct(">I")
_footer_end = Struct(">II8s")
FILE_HEADER = _file_head.size + 4
RECORD_HEADER = _record_head.size + 4

MORE = 1
DEFERRED = 2
CONTINUES = 4

#: A record's frames, at most (a single larger message makes a larger record).
RECORD_BYTES = 64 << 10
#: What is read back from a file at once; also the step of the sparse index.
CHUNK_BYTES = 512 << 10


class Segment:
    """One file of a log: where it is, which seqs it holds, and where in it they are."""

    __slots__ = (
        "base",
        "boot",
        "created",
        "damaged",
        "deferrals",
        "end",
        "extras",
        "fd",
        "folder_synced",
        "index_offsets",
        "index_seqs",
        "index_times",
        "key_bytes",
        "key_count",
        "key_crc",
        "key_failures",
        "keys",
        "lost",
        "newest",
        "ordered",
        "path",
        "pins",
        "reserved_keys",
        "salt",
        "sealed",
        "size",
        "spans",
    )

    def __init__(self, path: Path, base: int, salt: int, boot: bytes) -> None:
        self.path = path
        self.base = base
        self.salt = salt
        self.boot = boot
        self.created = True
        self.end = base
        self.size = FILE_HEADER
        self.sealed = False
        # Sparse index: at which offset the record with this base seq starts, and when its first message was published.
        self.index_seqs = array("q")
        self.index_offsets = array("q")
        self.index_times = array("q")
        # Is it known that no message in it is earlier than the one before, and a time that none of them is later than.
        # A file that was read without its footer, or whose footer is of 0.1.0, says nothing of it.
        self.ordered = False
        self.newest = 0
        # Which seqs it holds: pairs (first, stop); nearly always one.
        self.spans = array("q")
        # Of each deferred record: first seq, count, started, delay in ns, timestamp.
        self.deferrals = array("q")
        # Has any of its records extra bytes?
        self.extras = False
        # What of them was found to be unreadable, and what was missing already when the file was last salvaged.
        self.damaged: list[tuple[int, int]] = []
        self.lost: list[tuple[int, int]] = []
        # The idempotency keys in it: here until it is sealed, then in the file, with their checksum.
        self.keys: KeyBlock | None = None
        self.key_count = 0
        self.key_crc = 0
        self.key_bytes = 0
        # How many of them are reserved (keys.py).
        self.reserved_keys = 0
        # How often they could not be read.
        self.key_failures = 0
        # The open file, how many threads use it, and whether its name is on the device.
        self.fd = -1
        self.pins = 0
        self.folder_synced = False

    def note(
        self, seq: int, count: int, offset: int, size: int, frames: bytes | memoryview | None = None, at: int = 0
    ) -> None:
        """A record of ``count`` messages from ``seq`` on stands at ``offset``; the first one is at ``frames[at:]``.

        Without frames the caller adds the time, where the index has grown.
        """
        if not self.index_offsets or offset + size - self.index_offsets[-1] > CHUNK_BYTES:
            self.index_seqs.append(seq)
            self.index_offsets.append(offset)
            if frames is not None:
                self.index_times.append(timestamp_of(frames, at))
        if self.spans and self.spans[-1] == seq:
            self.spans[-1] = seq + count
        else:
            self.spans.extend((seq, seq + count))
        self.end = seq + count
        self.size = offset + size

    def offset_of(self, seq: int) -> int:
        """About where in the file ``seq`` stands, by the index; its end for one that comes later."""
        if seq >= self.end:
            return self.size
        chunk = bisect_right(self.index_seqs, seq) - 1
        if chunk < 0:
            return FILE_HEADER
        last = chunk + 1 == len(self.index_seqs)
        start, stop = self.index_offsets[chunk], self.size if last else self.index_offsets[chunk + 1]
        first, after = self.index_seqs[chunk], self.end if last else self.index_seqs[chunk + 1]
        return start + (stop - start) * (seq - first) // (after - first)

    def present(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """What of ``first`` … ``stop - 1`` it holds."""
        for i in range(0, len(self.spans), 2):
            a, b = max(first, self.spans[i]), min(stop, self.spans[i + 1])
            if a < b:
                yield a, b

    def between(self, since: int, until: int) -> Iterator[tuple[int, int, bool | None]]:
        """Tell of all its seqs, in order, as (first, stop, fits), which were published from ``since`` up to ``until``.

        ``fits`` is True where all of them were, None where none was, False where the index does not say.
        """
        times = self.index_times
        chunks = len(times)
        if not chunks:
            return
        if not self.ordered:
            yield self.index_seqs[0], self.end, False
            return
        # The times of a chunk lie between its own and the next one's, those of the last one up to the newest.
        late = bisect_left(times, since)
        early = bisect_left(times, until)
        begin = chunks if self.newest < since else max(0, late - 1)
        stop = max(begin, early)
        whole = min(max(late, begin), stop)
        whole_stop = max(whole, stop if early == chunks and self.newest < until else min(stop, early - 1))
        edges = (0, begin, whole, whole_stop, stop, chunks)
        seqs = [self.index_seqs[edge] if edge < chunks else self.end for edge in edges]
        for (first, after), fits in zip(pairwise(seqs), (None, False, True, False, None), strict=True):
            if first < after:
                yield first, after, fits

    def note_key(self, extra: bytes, flags: int, seq: int, timestamp: int) -> None:
        """A record with these extra bytes stands in it. All records of a batch have the same key, which counts once."""
        key = key_in(extra)
        if key is None:
            return
        digest, content = key
        if self.keys is None:
            self.keys = KeyBlock()
        again = len(self.keys) and self.keys.last == digest
        if not (again and (flags & CONTINUES or self.keys.times[-1] == timestamp)):
            self.keys.add(digest, seq, timestamp, content)
            self.key_count = len(self.keys)
            self.reserved_keys += content == RESERVED

    def note_records(self, parser: RecordParser, data: bytes, offset: int, first: int) -> int:
        """The records from ``first`` on, in ``data``, stand at ``offset``; where in it something else stands."""
        parser.seq = first
        parser.indexed = self.index_offsets[-1] if self.index_offsets else -1
        size = parser.parse(data, offset)
        if not size:
            return 0
        for seq, at, timestamp in parser.index:
            self.index_seqs.append(seq)
            self.index_offsets.append(at)
            self.index_times.append(timestamp)
        self.deferrals.extend(parser.deferrals)
        for seq, flags, timestamp, extra in parser.extras:
            self.extras = True
            self.note_key(extra, flags, seq, timestamp)
        if self.spans and self.spans[-1] == first:
            self.spans[-1] = parser.seq
        else:
            self.spans.extend((first, parser.seq))
        self.end = parser.seq
        self.size = offset + size
        return size

    def seal(self) -> bytes:
        """No more records: the footer."""
        keys = b""
        fields = {
            "end": self.end,
            "seqs": pack_numbers(self.index_seqs),
            "offsets": pack_numbers(self.index_offsets),
            "times": pack_numbers(self.index_times),
            "ordered": self.ordered,
            "newest": self.newest,
            "spans": pack_numbers(self.spans),
            "deferrals": pack_numbers(self.deferrals),
            "extras": self.extras,
            "lost": pack_numbers(array("q", chain.from_iterable(self.lost))),
            "size": self.size,
        }
        if self.keys is not None and self.key_count:
            keys = self.keys.encode()
            self.key_crc, self.key_bytes = google_crc32c.extend(self.salt, keys), len(keys)
            fields["keys"] = [self.key_count, self.key_crc, self.key_bytes, self.reserved_keys]
        self.keys = None
        self.sealed = True
        body = msgspec.msgpack.encode(fields)
        # A million deferrals make 40 MB, and this would be the fourth time.
        fields.clear()
        return keys + body + _footer_end.pack(len(body), google_crc32c.extend(self.salt, body), _END_MAGIC)


class TimeRange(NamedTuple):
    """A range of seqs with messages that may have been published in a time; with ``all``, all of them were."""

    first: int
    stop: int
    messages: int
    all: bool


@dataclass(slots=True)
class Record:
    """A piece of a block that becomes one record of a file."""

    block: Block
    start: int
    stop: int
    seq: int
    count: int
    flags: int = 0
    delay: int = 0
    started: int = 0
    extra: bytes = b""


# --- Records as bytes -----------------------------------------------------------------------------------------------


def new_salt(system: System) -> int:
    return int.from_bytes(system.randbytes(4), "big") or 1


def timestamp_of(frames: bytes | bytearray | memoryview, at: int = 0) -> int:
    """When the message whose frame begins at ``at`` was published."""
    return int.from_bytes(frames[at + 8 : at + 16], "big")


def file_header(segment: Segment) -> bytes:
    head = _file_head.pack(_MAGIC, _VERSION, 0, segment.salt, segment.base, segment.boot)
    return head + _crc.pack(google_crc32c.extend(0, head))


def read_header(path: Path, head: bytes) -> Segment | None:
    if len(head) < FILE_HEADER:
        return None
    magic, version, _, salt, base, boot = _file_head.unpack_from(head)
    if magic != _MAGIC or _crc.unpack_from(head, _file_head.size)[0] != google_crc32c.extend(
        0, head[: _file_head.size]
    ):
        return None
    if version > _VERSION:
        raise FormatError(f"{path} was written by a newer version of flintmq (format {version}, known: {_VERSION})")
    return Segment(path, base, salt, boot)


def guess_header(path: Path, head: bytes) -> Segment | None:
    """A damaged header, from what is known otherwise: the file's name, and the mark that its first record begins with.

    Of the boot nothing is known then, so that deferrals go by the wall clock.
    """
    if len(head) < FILE_HEADER + RECORD_HEADER:
        return None
    (salt,) = _crc.unpack_from(head, FILE_HEADER)
    stop = FILE_HEADER + _record_head.size
    if not salt or _crc.unpack_from(head, stop)[0] != google_crc32c.extend(salt, head[FILE_HEADER:stop]):
        return None
    return Segment(path, int(path.name[:16], 16), salt, bytes(16))


def encode_record(record: Record, salt: int) -> tuple[bytes, memoryview]:
    start, stop = record.start, record.stop
    frames_crc = record.block.checksum(salt, start, stop)
    extra = record.extra
    head = _record_head.pack(
        salt, stop - start, record.count, record.seq, record.started, record.delay, record.flags, len(extra), frames_crc
    )
    head_crc = google_crc32c.extend(salt, head)
    if extra:
        head_crc = google_crc32c.extend(head_crc, extra)
    return head + _crc.pack(head_crc) + extra, record.block.view[start:stop]


@dataclass(slots=True)
class Entry:
    """A whole record found in a file. ``timestamp`` is its first message's."""

    offset: int
    size: int
    seq: int
    count: int
    flags: int
    started: int
    delay: int
    extra: bytes
    frames_at: int
    timestamp: int


def read_records(data: bytes, salt: int, at: int, offset: int, last: bool) -> Iterator[Entry | int]:
    """Walk over the records in ``data``, which starts at ``offset`` of the file, from ``at`` on.

    Yields each whole record, and in between the position at which something else stands (an int). A record cut off by
    the end of ``data`` ends the walk, unless this is the ``last`` of the file.
    """
    mark = _crc.pack(salt)
    size = len(data)
    while at < size:
        entry = _entry_at(data, salt, at, offset)
        if entry is not None:
            yield entry
            at = entry.offset - offset + entry.size
            continue
        if not last and size - at < RECORD_HEADER + 65535 + 4 * RECORD_BYTES:
            return
        yield at
        # Something else stands here: find the next record. The mark is random, so there is little to try.
        at = data.find(mark, at + 1)
        while at >= 0 and _entry_at(data, salt, at, offset) is None:
            at = data.find(mark, at + 1)
        if at < 0:
            return


def _entry_at(data: bytes, salt: int, at: int, offset: int) -> Entry | None:
    if at + RECORD_HEADER > len(data):
        return None
    mark, length, count, seq, started, delay, flags, extra_size, crc = _record_head.unpack_from(data, at)
    if mark != salt:
        return None
    head_stop = at + _record_head.size
    extra_at = head_stop + 4
    extra = data[extra_at : extra_at + extra_size]
    head_crc = google_crc32c.extend(salt, data[at:head_stop])
    if extra_size:
        head_crc = google_crc32c.extend(head_crc, extra)
    if _crc.unpack_from(data, head_stop)[0] != head_crc:
        return None
    frames_at = extra_at + extra_size
    if frames_at + length > len(data):
        return None
    if google_crc32c.extend(salt, data[frames_at : frames_at + length]) != crc:
        return None
    size = RECORD_HEADER + extra_size + length
    timestamp = int.from_bytes(data[frames_at + 8 : frames_at + 16], "big")
    return Entry(offset + at, size, seq, count, flags, started, delay * 1_000_000, extra, frames_at, timestamp)


def decode_chunk(
    data: bytes, salt: int, first: int, after: int, wanted: int
) -> tuple[Block | None, list[tuple[int, int]]]:
    """The frames of a chunk as a block, and which seqs of ``first`` … ``after - 1`` cannot be read.

    A block holds no holes: where some cannot be read, it is the block of the messages around ``wanted``.
    """
    whole = gather(data, salt, first, after)
    if whole is not None:
        return whole, []
    parts: list[bytes] = []
    damage: list[tuple[int, int]] = []
    base = expected = first
    count = 0
    for entry in read_records(data, salt, 0, 0, True):
        if isinstance(entry, int) or entry.seq < expected or entry.seq + entry.count > after:
            # Not a record, or one that was copied into a message's body, which lies open where it is damaged.
            continue
        if entry.seq != expected:
            damage.append((expected, entry.seq))
            if parts and wanted < entry.seq:
                break
            parts.clear()
            base = entry.seq
            count = 0
        length = entry.size - (entry.frames_at - entry.offset)
        parts.append(data[entry.frames_at : entry.frames_at + length])
        count += entry.count
        expected = entry.seq + entry.count
    else:
        if expected < after:
            damage.append((expected, after))
    if not parts:
        return None, damage
    frames = bytearray().join(parts)
    block = Block(0, base, frames)
    if not block.adopt(len(frames), count):
        return None, [(first, after)]
    return block, damage


def record_size(data: bytes) -> int:
    """How many bytes the record that ``data`` begins with says it has; 0 if not even its head is there."""
    if len(data) < RECORD_HEADER:
        return 0
    _, length, _, _, _, _, _, extra, _ = _record_head.unpack_from(data)
    return RECORD_HEADER + int(extra + length)


def records_in(
    data: bytes, salt: int, first: int, after: int, offset: int, step: int
) -> tuple[int, list[tuple[int, int]]]:
    """How many bytes of ``data``, which stands at ``offset``, are whole records from ``first`` on, before ``after``.

    And where some of them begin, as seq and offset: a record every ``step`` bytes, and at last the end of all of them.
    """
    parser = RecordParser(salt, first, after, step)
    size = parser.parse(data, offset)
    return size, [(seq, at) for seq, at, _ in parser.index] + [(parser.seq, offset + size)]


def part_of(block: Block, seq: int, size: int, marks: list[tuple[int, int]]) -> Block:
    """About ``size`` bytes of a block from ``seq`` on, up to one of the marks if possible: a record begins there."""
    if block.size <= size + size // 8:
        return block
    last = block.base + block.count
    count = block.cut(seq, last - seq, size)
    i = bisect_right(marks, seq + count, key=_seq_of) - 1
    if i >= 0 and marks[i][0] > seq:
        count = marks[i][0] - seq
        block.cut(seq, count, block.size)
    frames = bytearray(block.view[block.start : block.stop])
    part = Block(0, seq, frames)
    part.adopt(len(frames), count)
    return part


def _seq_of(mark: tuple[int, int]) -> int:
    return mark[0]


def extras_in_chunk(data: bytes, salt: int, first: int, after: int) -> list[tuple[int, int, bytes]]:
    """(first seq, the seq after the last, extra bytes) of each record of a chunk that has any, in order."""
    return [
        (entry.seq, entry.seq + entry.count, entry.extra)
        for entry in read_records(data, salt, 0, 0, True)
        if isinstance(entry, Entry) and entry.extra and first <= entry.seq and entry.seq + entry.count <= after
    ]


def seq_in_chunk(data: bytes, salt: int, first: int, after: int, time: int) -> int:
    """The first seq of a chunk that was published at or after ``time``; ``after`` if none was."""
    earlier: Entry | None = None
    found = after
    for entry in read_records(data, salt, 0, 0, True):
        if isinstance(entry, int) or entry.seq < first or entry.seq + entry.count > after:
            continue
        if timestamp_of(data, entry.frames_at) >= time:
            found = entry.seq
            break
        earlier = entry
    if earlier is None:
        return found
    # Its first message is too early; another one of it may not be.
    at = earlier.frames_at
    for seq in range(earlier.seq, earlier.seq + earlier.count):
        if timestamp_of(data, at) >= time:
            return seq
        at += 4 + _crc.unpack_from(data, at)[0]
    return found


def read_footer(disk: Disk, fd: int, size: int, segment: Segment) -> bool:
    if size < FILE_HEADER + _footer_end.size:
        return False
    length, crc, magic = _footer_end.unpack(disk.read(fd, _footer_end.size, size - _footer_end.size))
    start = size - _footer_end.size - length
    if magic != _END_MAGIC or start < FILE_HEADER:
        return False
    body = disk.read(fd, length, start)
    if google_crc32c.extend(segment.salt, body) != crc:
        return False
    footer = msgspec.msgpack.decode(body)
    del body
    if "times" not in footer or "lost" not in footer:
        # Of a version that did not write them: it is read as if it had no footer, and gets a new one.
        return False
    segment.end = footer["end"]
    segment.size = footer["size"]
    segment.index_seqs = unpack_numbers(footer["seqs"])
    segment.index_offsets = unpack_numbers(footer["offsets"])
    segment.index_times = unpack_numbers(footer["times"])
    # 0.1.0 did not write them.
    segment.ordered = footer.get("ordered", False)
    segment.newest = footer.get("newest", 0)
    segment.spans = unpack_numbers(footer["spans"])
    segment.deferrals = unpack_numbers(footer["deferrals"])
    lost = unpack_numbers(footer["lost"])
    segment.lost = list(zip(lost[::2], lost[1::2], strict=True))
    # 0.1.0 wrote keys without what they stand for, and did not say how long they are.
    segment.key_count, segment.key_crc, *more = footer.get("keys", (0, 0))
    segment.key_bytes, segment.reserved_keys = more or (KeyBlock.size(segment.key_count, old=True), 0)
    # Without a word about them it is of a time when there were none.
    segment.extras = footer.get("extras", False)
    segment.sealed = True
    return True


def read_keys(disk: Disk, fd: int, segment: Segment) -> KeyBlock | None:
    """The keys of a sealed segment, as they stand before its footer; None if they are damaged."""
    data = disk.read(fd, segment.key_bytes, segment.size)
    if google_crc32c.extend(segment.salt, data) != segment.key_crc:
        return None
    return KeyBlock.decode(data, segment.key_count)


def hide_after(segment: Segment, seq: int) -> None:
    """The segment holds nothing from ``seq`` on."""
    while segment.index_seqs and segment.index_seqs[-1] >= seq:
        segment.index_seqs.pop()
        segment.index_offsets.pop()
        segment.index_times.pop()
    while segment.spans and segment.spans[-2] >= seq:
        del segment.spans[-2:]
    if segment.spans and segment.spans[-1] > seq:
        segment.spans[-1] = seq
    while segment.deferrals and segment.deferrals[-5] >= seq:
        del segment.deferrals[-5:]
    if segment.keys is not None:
        segment.keys.cut(seq)
        segment.key_count = len(segment.keys)
        segment.reserved_keys = segment.keys.contents.count(RESERVED)
    segment.end = max(segment.base, min(segment.end, seq))


@dataclass(slots=True)
class Run:
    """Whole records, one after the other, that stand at ``offset`` of a file."""

    offset: int
    size: int
    first: int
    stop: int


class Salvage:
    """Reads a segment that has no footer: which whole records are in it, less groups that are not whole.

    Those that were on the device are noted in the segment at once. The others are ``runs``.
    """

    STEP = 4 << 20

    def __init__(self, disk: Disk, fd: int, size: int, segment: Segment, durable: int, limit: int) -> None:
        self._disk = disk
        self._fd = fd
        self._size = size
        self._segment = segment
        # What lies before the one was on the device, groups with their ends; nothing counts from the other on.
        self._durable = durable
        self._limit = limit
        self.runs: list[Run] = []
        # Which run an unfinished group began with; none: -1.
        self._group = -1
        self._known_end = self._expected = segment.base
        self._parser = RecordParser(segment.salt, segment.base, durable, CHUNK_BYTES)
        self.damage: list[tuple[int, int]] = []

    def run(self) -> None:
        offset, step = FILE_HEADER, self.STEP
        while offset < self._size:
            data = self._disk.read(self._fd, step, offset)
            last = offset + len(data) >= self._size
            done = self._take_whole(data, offset)
            if not done or last:
                # Something else stands there: each record by itself.
                for entry in read_records(data, self._segment.salt, done, offset, last):
                    if isinstance(entry, Entry):
                        self._take(entry, data, offset)
                        done = entry.offset - offset + entry.size
            if last:
                break
            # Not even one record: it is larger than what was read, or something damaged is.
            step = self.STEP if done else 2 * step
            offset += done
        self._drop_group()

    def _take_whole(self, data: bytes, offset: int) -> int:
        """Take whole groups, one after the other; where in ``data`` they end."""
        first = self._expected
        if self._group >= 0:
            return 0
        if self._known_end == first < self._durable:
            self._parser.stop = min(self._durable, self._limit)
            done = self._segment.note_records(self._parser, data, offset, first)
            if done:
                self._known_end = self._expected = self._segment.end
                return done
        done, self._expected = whole_groups(data, self._segment.salt, first, self._limit)
        if done:
            self.runs.append(Run(offset, done, first, self._expected))
        return done

    def _take(self, entry: Entry, data: bytes, offset: int) -> None:
        if entry.seq < self._expected or entry.seq >= self._limit:
            # Only a record that was cut off earlier can be here: a later one took its seqs. Or it was copied into a
            # message's body, which lies open where it is damaged.
            return
        missing = entry.seq > self._expected
        if missing:
            self.damage.append((self._expected, entry.seq))
        self._expected = entry.seq + entry.count
        if self._expected <= self._durable:
            self._parser.stop = self._durable
            at = entry.offset - offset
            self._segment.note_records(self._parser, data[at : at + entry.size], entry.offset, entry.seq)
            self._known_end = self._expected
            return
        if missing or not entry.flags & CONTINUES:
            self._drop_group()
        if entry.flags & CONTINUES and self._group < 0:
            # The beginning of its group is missing.
            return
        if not entry.flags & MORE:
            self._group = -1
        elif self._group < 0:
            self._group = len(self.runs)
        self.runs.append(Run(entry.offset, entry.size, entry.seq, self._expected))

    def _drop_group(self) -> None:
        if self._group >= 0:
            del self.runs[self._group :]
            self._group = -1

    @property
    def lost(self) -> list[tuple[int, int]]:
        """What was on the device and is not there any more. What never was may just have come too late."""
        end = self.runs[-1].stop if self.runs else self._known_end
        missing = [*self.damage, (end, self._limit)]
        return [(first, min(stop, self._durable)) for first, stop in missing if first < min(stop, self._durable)]

    def records(self, run: Run, salt: int) -> bytes:
        """The records of a run, for a file with another salt."""
        records = resalted(self._disk.read(self._fd, run.size, run.offset), self._segment.salt, salt)
        if records is None:
            raise OSError(errno.EIO, "what was read a moment ago reads differently now", str(self._segment.path))
        return records
