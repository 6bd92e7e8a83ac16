"""One topic's log: blocks in memory, segment files on the disk, and the marks that say how far each has come.

A Log owns its blocks, its files and the marks ``first <= written <= end`` and ``durable <= written``. Only its topic
appends; channels read ranges. It does not know who needs which message: its topic tells it what may go.

What the files look like is ``segment``'s business.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from mmap import MAP_ANON, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any

from flintmq.broker.storage.disk import BACKGROUND, COMMIT, READ, SPARE, Clock, Disk
from flintmq.broker.storage.keys import MOST_IN_SEGMENT, KeyBlock
from flintmq.broker.storage.memory import Memory, Pinned, extra_of
from flintmq.broker.storage.segment import (
    CONTINUES,
    DEFERRED,
    FILE_HEADER,
    MORE,
    RECORD_BYTES,
    RECORD_HEADER,
    Entry,
    Record,
    Salvage,
    Segment,
    decode_chunk,
    encode_record,
    extras_in_chunk,
    file_header,
    guess_header,
    hide_after,
    new_salt,
    read_footer,
    read_header,
    read_keys,
    read_records,
    seq_in_chunk,
    timestamp_of,
)
from flintmq.errors import DamageError, StorageError
from flintmq.kernel import FAILED, FRAME_OVERHEAD, Block, Intake, populate
from flintmq.options import NsqdOptions

__all__ = ["Log", "Store"]

logger = logging.getLogger(__name__)


#: A block in memory: small for a quiet topic, large for a busy one.
SMALLEST_BLOCK, LARGEST_BLOCK = 4 << 10, 1 << 20
#: Unsynced bytes of all logs: a sync starts, writes move to a thread, publishers pause.
SYNC_AT, WRITE_IN_THREAD_AT, PAUSE_AT = 16 << 20, 64 << 20, 128 << 20
#: What is taken from sockets before it is written and answered: with few publishers, those who have their answer
#: send more while the others' batches are handled.
WRITE_AT = 32 << 10
#: What is taken from sockets, written and answered before the loop does anything else.
TAKE_AT_ONCE = 256 << 10
#: What a block must have left for that; so much of it may stay empty.
TAKE_ROOM = 64 << 10
#: take_in() read nothing, because there is no block to read into.
NO_BLOCK = -1
#: Background syncs of one log are at least this far apart: each costs the device the same, however small it is.
SYNC_SPACING = 100_000_000
#: How often, and how many seconds apart, a read that the device refuses is tried before its messages are given up.
READ_TRIES, READ_PAUSE = 10, 1.0
#: A write of what somebody waits for is tried again after so many seconds, where it stays in memory meanwhile.
WRITE_AGAIN = 1.0
_POOL_BLOCKS = 8
_SPARE_BLOCKS = 12
_MOST_FILES = 400
#: Chunks of a log whose extra bytes are remembered once they were read.
_EXTRA_CHUNKS = 4


#: Runs the first in a thread, then calls the second with its result or its error, as ``Disk.submit`` does.
Submit = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]


def _fresh_memory() -> list[mmap]:
    """Memory for blocks whose pages are there already: a busy loop has no time to wait for them one by one."""
    spare = [_memory(LARGEST_BLOCK) for _ in range(_SPARE_BLOCKS)]
    populate(spare)
    return spare


def _memory(size: int) -> mmap:
    return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANON)


@dataclass(slots=True)
class _Piece:
    """What one write puts into one segment."""

    segment: Segment
    offset: int
    buffers: list[bytes | memoryview]
    first: int
    size: int = 0
    records: list[Record] = field(default_factory=list)


class Store:
    """What all logs of a broker share: disk, clock, options, open files, the cache of what was read back."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        options: NsqdOptions,
        *,
        fatal: Callable[[BaseException], None],
        relieved: Callable[[], None],
        delay: Callable[[float, Callable[[], None]], object],
        recovered: Callable[[], None],
    ) -> None:
        self.disk = disk
        self.clock = clock
        self.options = options
        self.prefix = options.id << 54
        #: Called when a sync failed: what is on the device is unknown from then on, so the broker must stop.
        self.fatal = fatal
        #: Called when unsynced bytes fall below the mark at which publishers pause.
        self.relieved = relieved
        #: Calls a function after some seconds.
        self.delay = delay
        #: Called at the first write that succeeds after one failed (``ill``).
        self.recovered = recovered
        self.ill = False
        self.unsynced = 0
        self._files: OrderedDict[Segment, None] = OrderedDict()
        self._blocks: list[Block] = []
        self._spare: list[mmap] = []
        self._preparing = False
        self._busy = False
        self._cold: OrderedDict[Segment, dict[int, Block]] = OrderedDict()
        self._cold_order: OrderedDict[tuple[Segment, int], int] = OrderedDict()
        self._cold_bytes = 0
        self._lent = 0

    @property
    def congested(self) -> bool:
        return self.unsynced >= PAUSE_AT

    def synced(self, size: int) -> None:
        was = self.congested
        self.unsynced -= size
        if was and not self.congested:
            self.relieved()

    # --- Blocks ----------------------------------------------------------------------------------------------------

    def new_block(self, size: int, base: int) -> Block:
        if size == LARGEST_BLOCK:
            self._busy = True
            while self._blocks:
                block = self._blocks.pop()
                if block.recycle(base):
                    return block
            if len(self._spare) < _SPARE_BLOCKS and not self._preparing and not self.disk.closing:
                self._preparing = True
                self.disk.submit(_fresh_memory, self._prepared, SPARE)
            return Block(size, base, self._spare.pop() if self._spare else _memory(size))
        return Block(size, base)

    def _prepared(self, spare: list[mmap] | None, error: BaseException | None) -> None:
        self._preparing = False
        if not self.disk.closing:
            self._spare.extend(spare or ())

    def give_back(self, block: Block) -> None:
        """Nobody needs the block any more: keep it, because fresh memory costs page faults."""
        if block.size == LARGEST_BLOCK and len(self._blocks) < _POOL_BLOCKS:
            self._blocks.append(block)

    def tidy(self) -> None:
        """Called now and then: if no large block was needed since, give the spare ones back to the system."""
        if not self._busy:
            self._drop_spare()
        self._busy = False

    def _drop_spare(self) -> None:
        self._blocks.clear()
        self._spare.clear()

    def close(self) -> None:
        """The broker has stopped: give all memory back now, not when the garbage collector comes by."""
        self._drop_spare()
        self._cold.clear()
        self._cold_order.clear()
        self._cold_bytes = 0

    # --- Open files ------------------------------------------------------------------------------------------------

    def file(self, segment: Segment) -> int:
        """The segment's open file; opened, and others closed, as needed."""
        if segment.fd >= 0:
            self._files.move_to_end(segment)
            return segment.fd
        self.adopt_file(segment, self.open(segment.path))
        return segment.fd

    def open(self, path: Path, *, create: bool = False) -> int:
        try:
            return self.disk.open(path, create=create)
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # Out of descriptors: that says nothing about the file. Close what is not in use and try again.
            self._close_files(0)
            return self.disk.open(path, create=create)

    def adopt_file(self, segment: Segment, fd: int) -> None:
        self._close_files(_MOST_FILES - 1)
        segment.fd = fd
        self._files[segment] = None

    def _close_files(self, keep: int) -> None:
        if len(self._files) <= keep:
            return
        for segment in list(self._files):
            if not segment.pins:
                self.close_file(segment)
                if len(self._files) <= keep:
                    return

    def close_file(self, segment: Segment) -> None:
        if segment.fd >= 0:
            self.disk.close_file(segment.fd)
            segment.fd = -1
            self._files.pop(segment, None)

    # --- What was read back ----------------------------------------------------------------------------------------

    def cold(self, segment: Segment, chunk: int) -> Block | None:
        chunks = self._cold.get(segment)
        if chunks is None:
            return None
        block = chunks.get(chunk)
        if block is not None:
            self._cold_order.move_to_end((segment, chunk))
        return block

    def keep_cold(self, segment: Segment, chunk: int, block: Block) -> None:
        chunks = self._cold.setdefault(segment, {})
        old = chunks.get(chunk)
        if old is not None:
            self._cold_bytes -= old.size
        chunks[chunk] = block
        self._cold_order[segment, chunk] = block.size
        self._cold_order.move_to_end((segment, chunk))
        self._cold_bytes += block.size
        self._shrink_cold()

    def _shrink_cold(self) -> None:
        while self._cold_bytes + self._lent > self.options.cold_cache_bytes and len(self._cold_order) > 2:
            (other, number), size = self._cold_order.popitem(last=False)
            del self._cold[other][number]
            if not self._cold[other]:
                del self._cold[other]
            self._cold_bytes -= size

    def lend(self, before: int, size: int) -> bool:
        """May a log hold ``size`` bytes, more than its own limit? ``before``: what it was lent so far.

        What one log is lent another cannot have, nor the cache.
        """
        lent = self._lent - before + size
        if lent > self.options.cold_cache_bytes:
            return False
        self._lent = lent
        self._shrink_cold()
        return True

    def forget_cold(self, segment: Segment) -> None:
        for chunk in self._cold.pop(segment, {}):
            self._cold_bytes -= self._cold_order.pop((segment, chunk))


class Log:
    """See the module's text. ``folder`` is None for an ephemeral topic: then nothing ever goes to a file."""

    def __init__(
        self,
        store: Store,
        name: str,
        folder: Path | None,
        base: int,
        durability: str,
        *,
        progressed: Callable[[], None],
        failed: Callable[[int, Exception], None],
        arrived: Callable[[], None],
    ) -> None:
        self._store = store
        self._disk = store.disk
        self.name = name
        self.folder = folder
        self.durability = durability if folder is not None else "memory"
        # Callbacks: a mark moved; a write failed, and what follows this seq is gone; a cold read came in.
        self._progressed = progressed
        self._failed = failed
        self._arrived = arrived
        # Marks.
        self.end = self.written = self.durable = base
        self.memory = Memory()
        #: What the store lets it hold beyond its limit.
        self._lent = 0
        self._block_size = SMALLEST_BLOCK
        # Deferred messages that channels have not seen yet: (seq, when due), in seq order.
        self.deferred: deque[tuple[int, int]] = deque()
        # Extra bytes of records that were read back, by segment and chunk: up to which seq, and those of each record.
        self._cold_extras: OrderedDict[tuple[Segment, int], tuple[int, list[tuple[int, int, bytes]]]] = OrderedDict()
        self._reading_extras: set[tuple[Segment, int]] = set()
        #: Seq and extra bytes of the records that a start found beyond what was known to be on the device.
        self.salvaged: list[tuple[int, bytes]] = []
        # Not yet written.
        self._pending: deque[Record] = deque()
        self._open_record: Record | None = None
        self._in_group = False
        #: Bytes of frames that the last take_in() made.
        self.last_bytes = 0
        # Is the last record that was laid out, or the last one written (where the group starts), in a group whose end
        # is still to come?
        self._group_planned = False
        self._group_written: tuple[Segment, int, int] | None = None
        self._writing = False
        # On the disk.
        self.segments: list[Segment] = []
        self._active: Segment | None = None
        #: Was the last block found in memory?
        self.from_memory = False
        self._reading: set[tuple[Segment, int]] = set()
        self._failed_reads: dict[tuple[Segment, int], int] = {}
        self.damaged: list[tuple[int, int]] = []
        # What stood in files that could not be made sense of at all.
        self._set_aside: list[tuple[int, int]] = []
        #: Called in a thread with the keys of a segment that may go, and how many are in those after it: keys outlive
        #: their messages. None: there are no keys.
        self.keep_keys: Callable[[KeyBlock, int], None] | None = None
        # Syncing.
        self._unsynced: list[Segment] = []
        self._unsynced_bytes = 0
        self._unsynced_count = 0
        self._last_sync = 0
        self._syncing = False
        self._sync_again = False
        self._sync_planned = False
        # Who waits for how much to be on the device, in order.
        self._awaited: deque[tuple[int, Callable[[Exception | None], None]]] = deque()
        self._entered = False
        self.closed = False

    # --- Appending -------------------------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The lowest seq that can still be read."""
        if self.segments:
            return self.segments[0].base
        blocks = self.memory.all_blocks()
        return blocks[0].base if blocks else self.end

    @property
    def blocks(self) -> list[Block]:
        """The blocks in memory that lead up to the end without a hole, oldest first."""
        return self.memory.blocks

    @property
    def memory_count(self) -> int:
        """Messages in memory."""
        return self.memory.count(self.end)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the blocks in memory."""
        return self.memory.bytes

    @property
    def oldest_sealed(self) -> Segment | None:
        """The oldest segment, if it is complete and another follows it."""
        if len(self.segments) < 2 or not self.segments[0].sealed or self.segments[0].pins:
            return None
        return self.segments[0]

    @property
    def committed(self) -> int:
        """Up to here a publish is as safe as it was promised to be."""
        if self.durability == "os":
            return self._whole
        return self.durable if self.durability == "fsync" else self.end

    @property
    def _whole(self) -> int:
        """Up to here everything is written, less a batch whose end is still to come: it may yet be cut back."""
        return self.written if self._group_written is None else self._group_written[2]

    @property
    def in_group(self) -> bool:
        """Is a batch being appended whose end is still to come?"""
        return self._in_group

    def append(
        self,
        data: bytearray,
        pos: int,
        stop: int,
        count: int,
        timestamp: int,
        *,
        delay: int = 0,
        attempts: int = 1,
        extra: bytes = b"",
        more: bool = False,
    ) -> int:
        """Append ``count`` records ``[size][body]`` at ``data[pos:stop]``; the first one's seq.

        ``delay`` in ns defers them. With ``more`` the batch goes on in the next call. Nothing is written yet.
        """
        first = self.end
        block = self.memory.active
        open_record = self._open_record
        need = stop - pos + (FRAME_OVERHEAD - 4) * count
        if (
            open_record is not None
            and block is open_record.block
            and not (delay or extra or more or self._in_group)
            and open_record.stop - open_record.start + need <= RECORD_BYTES
            and block.size - block.used >= need
        ):
            done = block.fill(data, pos, stop, count, self._store.prefix | first, timestamp, attempts, need)
            if done == count:
                open_record.stop = block.used
                open_record.count += count
                self.end = first + count
                return first
            # The block's own table was full: very small messages. The rest goes the long way.
            open_record.stop = block.used
            open_record.count += done
            self.end += done
            pos, count = block.pos, count - done
        record: Record | None = None
        flags = DEFERRED if delay else 0
        continues = CONTINUES if self._in_group else 0
        started = self._store.clock.now() if delay else 0
        while count:
            if block is None:
                block = self._new_block(pos, data)
            start = block.used
            done = block.fill(data, pos, stop, count, self._store.prefix | self.end, timestamp, attempts, RECORD_BYTES)
            if not done:
                block = self._new_block(pos, data)
                continue
            record = Record(
                block, start, block.used, self.end, done, flags | MORE | continues, delay // 1_000_000, started, extra
            )
            continues = CONTINUES
            self._pending.append(record)
            if extra:
                self.memory.extras.append((self.end, self.end + done, extra))
            if delay:
                self.deferred.extend((seq, started + delay) for seq in range(self.end, self.end + done))
            self.end += done
            pos = block.pos
            count -= done
        if record is not None and not more:
            record.flags &= ~MORE
        self._in_group = more
        self._open_record = record if record is not None and not (flags or extra or more) else None
        return first

    def take_in(
        self, intake: Intake, fds: list[int], counts: list[int], start: int, settled: bool, budget: int
    ) -> tuple[int, bool]:
        """Append publishes straight from sockets: see ``Intake.run``. How that ended, and whether they are answered.

        Without ``settled`` nothing may be answered yet; ``budget`` is what may be taken before the loop goes on. If a
        write failed, what was not written is gone again.
        """
        block = self.memory.active
        if block is None or self._in_group:
            return NO_BLOCK, False
        room = 0
        if block.size == LARGEST_BLOCK:
            room = TAKE_ROOM
            if block.size - block.used < room:
                block = self._add_block(LARGEST_BLOCK)
        store = self._store
        segment = self._active
        answer = settled and not self._writing and self.durability != "fsync"
        file = -1
        if answer and self.durability == "os":
            if (
                segment is None
                or self._pending
                or segment.size + 2 * TAKE_AT_ONCE > store.options.max_bytes_per_file
                or store.unsynced >= WRITE_IN_THREAD_AT
                or self._group_planned
                or self._group_written is not None
                or segment.end != self.end
            ):
                answer = False
            else:
                file = store.file(segment)
        first, used = block.count, block.used
        status = intake.run(
            block,
            fds,
            counts,
            start,
            store.prefix | self.end,
            store.clock.wall(),
            WRITE_AT,
            budget,
            room,
            file,
            segment.size if segment is not None else 0,
            segment.salt if segment is not None else 0,
            store.prefix,
            answer,
        )
        count = block.count - first
        if not count:
            return status, answer
        if file >= 0 and segment is not None:
            self._taken_in(segment, block, used, count, intake, status == FAILED)
        else:
            record = self._open_record
            if record is not None and record.block is block and record.stop - record.start < RECORD_BYTES:
                record.stop = block.used
                record.count += count
            else:
                record = self._open_record = Record(block, used, block.used, self.end, count)
                self._pending.append(record)
            self.end += count
        self.last_bytes = block.used - used
        return status, answer

    def _taken_in(self, segment: Segment, block: Block, start: int, count: int, intake: Intake, failed: bool) -> None:
        """The frames that were made, from ``start`` on, are in the file, less those of a write that failed."""
        seq, size = self.end, intake.wrote
        self.end += count
        if failed:
            written = block.index(intake.unwritten) - (block.count - count)
            lost = Record(block, intake.unwritten, block.used, seq + written, count - written)
            count = written
        if count:
            segment.note(seq, count, segment.size, size, block.view, start)
            if not self._unsynced or self._unsynced[-1] is not segment:
                self._note_unsynced(segment)
            self._unsynced_bytes += size
            self._store.unsynced += size
            self._unsynced_count += count
            self.written = seq + count
            if self._store.ill:
                self._store.recovered()
            self._sync_if_due()
        if failed:
            self._write_failed(
                [_Piece(segment, segment.size, [], lost.seq, 0, [lost])],
                OSError(intake.error, os.strerror(intake.error)),
            )

    def _new_block(self, pos: int, data: bytearray) -> Block:
        need = FRAME_OVERHEAD + int.from_bytes(data[pos : pos + 4], "big")
        block = self._add_block(max(self._block_size, need))
        self._block_size = min(self._block_size * 2, LARGEST_BLOCK)
        return block

    def _add_block(self, size: int) -> Block:
        block = self._store.new_block(size, self.end)
        self.memory.add(block)
        return block

    def _cut_back(self, seq: int) -> None:
        """Forget everything from ``seq`` on: it could not be written, and nobody has seen it."""
        self.memory.cut_back(seq)
        while self.deferred and self.deferred[-1][0] >= seq:
            self.deferred.pop()
        self._pending.clear()
        self._open_record = None
        self._in_group = False
        self.end = seq

    # --- Writing ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what was appended. Called once per loop turn for all publishers of the turn."""
        if self.folder is None or self._writing or not self._pending or self.closed:
            return
        if self.durability == "memory" and not self._awaited:
            return
        if len(self._pending) != 1 or not self._write_single(self._pending[0]):
            self._write_out(len(self._pending))

    def change_durability(self, durability: str) -> None:
        """From now on publishes are as safe as this. To and from ``memory`` only while everything has been written."""
        if self.folder is None or durability == self.durability:
            return
        self.durability = durability
        if durability == "fsync":
            self.sync(COMMIT)
        self._progressed()

    def write_all(self) -> None:
        """Write everything, whatever the durability: a clean stop."""
        if self.folder is not None and self._pending:
            self._open_record = None
            self._write_out(len(self._pending), last=True)

    def spill(self, limit: int, cap: int) -> None:
        """Durability ``memory``: write the oldest blocks so that they can leave the memory."""
        if self.folder is None or self._writing:
            return
        count, size, records = self.memory_count, self.memory.bytes, 0
        for block in self.blocks[:-1]:
            if count <= limit and size <= cap:
                break
            count -= block.count
            size -= block.size
            stop = block.base + block.count
            while records < len(self._pending) and self._pending[records].seq < stop:
                records += 1
        if records:
            if records == len(self._pending):
                self._open_record = None
            self._write_out(records)

    def _write_out(self, records: int, last: bool = False) -> None:
        pieces = self._plan(records)
        if self._store.unsynced >= WRITE_IN_THREAD_AT and not last and not self._disk.closing:
            self._write_in_thread(pieces)
            return
        try:
            for piece in pieces:
                self._write(piece)
        except OSError as exc:
            self._write_failed(pieces, exc)
        else:
            self._wrote(pieces, last)

    def _write_single(self, record: Record) -> bool:
        """Write a lone record to the segment in use: what most turns come to. False if it is not as simple as that."""
        segment = self._active
        store = self._store
        size = RECORD_HEADER + record.stop - record.start
        if (
            segment is None
            or record.flags
            or record.extra
            or record.seq != segment.end
            or segment.size + size > store.options.max_bytes_per_file
            or store.unsynced >= WRITE_IN_THREAD_AT
            or self._group_planned
            or self._group_written is not None
        ):
            return False
        self._pending.clear()
        self._open_record = None
        offset = segment.size
        head, frames = encode_record(record, segment.salt)
        segment.note(record.seq, record.count, offset, size, frames)
        try:
            self._disk.write(store.file(segment), (head, frames), offset)
        except OSError as exc:
            self._write_failed([_Piece(segment, offset, [head, frames], record.seq, size, [record])], exc)
            return True
        if not self._unsynced or self._unsynced[-1] is not segment:
            self._note_unsynced(segment)
        self._unsynced_bytes += size
        store.unsynced += size
        self._unsynced_count += record.count
        self.written = record.seq + record.count
        if store.ill:
            store.recovered()
        self._sync_if_due()
        self._progressed()
        return True

    def _write_in_thread(self, pieces: list[_Piece]) -> None:
        """The kernel throttles writers that run ahead of the device: let a thread wait for it."""
        try:
            # Files are opened, and the table of them changed, on the loop alone.
            files = [(self._file(piece.segment), piece) for piece in pieces]
        except OSError as exc:
            self._write_failed(pieces, exc)
            return
        self._writing = True
        for piece in pieces:
            piece.segment.pins += 1

        def work() -> None:
            for fd, piece in files:
                self._disk.write(fd, piece.buffers, piece.offset)

        self._disk.submit(work, functools.partial(self._written_in_thread, pieces), COMMIT)

    def _written_in_thread(self, pieces: list[_Piece], _: None, error: BaseException | None) -> None:
        self._writing = False
        for piece in pieces:
            self.unpin(piece.segment)
        if self.closed:
            return
        if error is None:
            self._wrote(pieces)
        elif isinstance(error, OSError):
            self._write_failed(pieces, error)
        else:
            self._store.fatal(error)
        self.flush()

    def _plan(self, records: int) -> list[_Piece]:
        """Lay the first pending records out in segments."""
        pieces: list[_Piece] = []
        piece: _Piece | None = None
        segment = self._active
        limit = self._store.options.max_bytes_per_file
        if records == len(self._pending):
            self._open_record = None
        for _ in range(records):
            record = self._pending.popleft()
            if self.durability == "memory":
                # It was answered and seen record by record, and the rest of its batch may never go to a file.
                record.flags &= DEFERRED
            size = RECORD_HEADER + len(record.extra) + record.stop - record.start
            if segment is not None and (
                record.seq != segment.end
                or (segment.size + size > limit and segment.size > FILE_HEADER and not self._group_planned)
                or (segment.key_count >= MOST_IN_SEGMENT and not self._group_planned)
            ):
                pieces.append(self._seal(segment))
                segment = piece = None
            if segment is None:
                assert self.folder is not None
                path = self.folder / f"{record.seq:016x}.seg"
                segment = Segment(path, record.seq, new_salt(), self._store.clock.boot_id())
                segment.created = False
                piece = None
            if piece is None:
                piece = _Piece(segment, segment.size, [], record.seq)
                pieces.append(piece)
            self._group_planned = bool(record.flags & MORE)
            header, frames = encode_record(record, segment.salt)
            piece.buffers.append(header)
            piece.buffers.append(frames)
            piece.records.append(record)
            piece.size += size
            segment.note(record.seq, record.count, segment.size, size, frames)
            if record.flags & DEFERRED:
                segment.deferrals.extend(
                    (record.seq, record.count, record.started, record.delay * 1_000_000, timestamp_of(frames))
                )
            if record.extra:
                segment.extras = True
                segment.note_key(record.extra, record.flags, record.seq, timestamp_of(frames))
        self._active = segment
        return pieces

    def _seal(self, segment: Segment) -> _Piece:
        footer = segment.seal()
        return _Piece(segment, segment.size, [footer], segment.end, len(footer))

    def _write(self, piece: _Piece) -> None:
        self._disk.write(self._file(piece.segment), piece.buffers, piece.offset)

    def _file(self, segment: Segment) -> int:
        """The segment's open file; one that is not there yet is made."""
        if not segment.created:
            try:
                fd = self._store.open(segment.path, create=True)
            except FileExistsError:
                if any(segment.path == other.path for other in self.segments):
                    raise
                # Of a write that failed, and then could not be removed either.
                self._disk.remove(segment.path)
                fd = self._store.open(segment.path, create=True)
            segment.created = True
            self._store.adopt_file(segment, fd)
            self.segments.append(segment)
            self._disk.write(fd, [file_header(segment)], 0)
        return self._store.file(segment)

    def _wrote(self, pieces: list[_Piece], last: bool = False) -> None:
        for piece in pieces:
            segment = piece.segment
            self._note_unsynced(segment)
            self._unsynced_bytes += piece.size
            self._store.unsynced += piece.size
            offset = piece.offset
            for record in piece.records:
                self._unsynced_count += record.count
                self.written = record.seq + record.count
                if not record.flags & MORE:
                    self._group_written = None
                elif self._group_written is None:
                    self._group_written = (segment, offset, record.seq)
                offset += RECORD_HEADER + len(record.extra) + record.stop - record.start
        if self._store.ill:
            self._store.recovered()
        if not last:
            self._sync_if_due()
        if self._awaited:
            self._sync_soon()
        self._progressed()

    def _note_unsynced(self, segment: Segment) -> None:
        if segment not in self._unsynced:
            self._unsynced.append(segment)

    def _sync_if_due(self) -> None:
        if self.durability == "fsync":
            self.sync(COMMIT)
        elif self._unsynced_bytes >= SYNC_AT or (
            self._unsynced_count >= self._store.options.sync_every > 0
            and self._store.clock.now() - self._last_sync >= SYNC_SPACING
        ):
            self.sync()

    def _write_failed(self, pieces: list[_Piece], exc: OSError) -> None:
        """Cut the file back to the last good offset; what was not written is gone, and its publishers are told.

        Durability ``memory`` has promised it already: then it stays in memory, to be written later.
        """
        failed = next(piece for piece in pieces if piece.records)
        segment, offset, seq = failed.segment, failed.offset, failed.first
        kept = self.durability == "memory"
        if self._group_written is not None and not kept:
            # The beginning of a batch is written, and its end will never be.
            segment, offset, seq = self._group_written
            self._group_written = None
        what = "it stays in memory" if kept else "its publishers are told"
        logger.error("LOG(%s): cannot write from seq %d on, %s - %s", self.name, seq, what, exc)
        self._active = None
        if segment in self.segments:
            self._cut_file(segment, seq, offset)
        for piece in pieces:
            if piece.segment in self.segments and piece.segment.base >= seq:
                self._remove_segment(piece.segment)
        self.written = min(self.written, seq)
        self._group_planned = self._group_written is not None
        if kept:
            self._pending.extendleft(reversed([record for piece in pieces for record in piece.records]))
            self._failed(self.end, exc)
            if self._awaited:
                self._store.delay(WRITE_AGAIN, self.flush)
            return
        self._cut_back(seq)
        self._failed(seq, exc)
        self._give_up(seq, exc)

    def _cut_file(self, segment: Segment, seq: int, offset: int) -> None:
        """The segment ends before ``seq``, at its last whole record; the next write begins a new one."""
        try:
            self._disk.truncate(self._store.file(segment), offset)
        except OSError as exc:
            # Its tail is unknown, and harmless: the next segment starts at the same seq and hides it.
            logger.error("LOG(%s): cannot cut %s back - %s", self.name, segment.path, exc)
        hide_after(segment, seq)
        segment.size = offset
        segment.sealed = False

    # --- Syncing ---------------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Is anything written that is not yet on the device?"""
        return bool(self._unsynced)

    def sync(self, urgency: int = BACKGROUND) -> None:
        """Bring what was written to the device, in a thread; one sync at a time."""
        if self._syncing:
            self._sync_again = True
            return
        if not self._unsynced or self.closed or self._disk.closing:
            return
        self._syncing = True
        self._sync_again = False
        segments, self._unsynced = self._unsynced, []
        size, self._unsynced_bytes = self._unsynced_bytes, 0
        self._unsynced_count = 0
        mark = self._whole
        files = []
        for segment in segments:
            # A segment that was freed before it was ever synced needs no sync.
            if segment in self.segments:
                files.append((segment, self._store.file(segment)))
                segment.pins += 1
        folder = self.folder if any(not s.folder_synced for s, _ in files) else None

        def work() -> None:
            for _, fd in files:
                self._disk.sync(fd)
            if folder is not None:
                self._sync_folder(folder)

        def done(_: None, error: BaseException | None) -> None:
            self._syncing = False
            for segment, _fd in files:
                segment.folder_synced = True
                self.unpin(segment)
            if self.closed:
                # The topic was deleted meanwhile, and its folder with it: whatever went wrong, nobody minds.
                self._store.synced(size)
                return
            if error is not None:
                # Never retried: after a failed sync the kernel may call the lost pages clean.
                self._store.fatal(StorageError(f"cannot sync {self.folder}: {error}"))
                return
            self._last_sync = self._store.clock.now()
            self._store.synced(size)
            if mark > self.durable:
                self.durable = mark
            self._tell()
            self._progressed()
            if self._sync_again or (self.durability == "fsync" and self._unsynced):
                self.sync(COMMIT if self.durability == "fsync" else BACKGROUND)

        self._disk.submit(work, done, urgency)

    def when_durable(self, seq: int, then: Callable[[Exception | None], None]) -> None:
        """Call ``then`` when all before ``seq`` is on the device, whatever the durability, or with why it never can be.

        What is not written yet is written by the next flush. Nothing of a log without files ever is on a device: there
        it is called at once.
        """
        if self.folder is None or seq <= self.durable:
            then(None)
            return
        self._awaited.append((seq, then))
        if seq <= self.written:
            self._sync_soon()

    def _sync_soon(self) -> None:
        """Somebody waits for what was written: a sync, but not right after the last one."""
        if self._sync_planned:
            return
        pause = self._last_sync + SYNC_SPACING - self._store.clock.now()
        if pause <= 0:
            self.sync()
        else:
            self._sync_planned = True
            self._store.delay(pause / 1e9, self._sync_now_planned)

    def _sync_now_planned(self) -> None:
        self._sync_planned = False
        self.sync()

    def _tell(self) -> None:
        while self._awaited and self._awaited[0][0] <= self.durable:
            self._awaited.popleft()[1](None)

    def _give_up(self, seq: int, error: Exception) -> None:
        """What lies beyond ``seq`` will never be on the device."""
        lost = []
        while self._awaited and self._awaited[-1][0] > seq:
            lost.append(self._awaited.pop()[1])
        for then in reversed(lost):
            then(error)

    def _sync_folder(self, folder: Path) -> None:
        self._disk.sync_folder(folder)
        if not self._entered:
            # The folder's own entry; otherwise the power takes it with all that is in it.
            self._disk.sync_folder(folder.parent)
            self._entered = True

    def pin(self, segment: Segment) -> int:
        """A thread is going to use the segment's file: it stays until ``unpin``. StorageError if it is too late."""
        if self.closed or self._disk.closing:
            raise StorageError(f"LOG({self.name}): closed")
        fd = self._store.file(segment)
        segment.pins += 1
        return fd

    def unpin(self, segment: Segment) -> None:
        """A thread no longer uses the segment's file."""
        segment.pins -= 1
        if segment.pins:
            return
        if self.closed or segment not in self.segments or (segment.sealed and segment is not self._active):
            self._store.close_file(segment)

    def sync_now(self) -> None:
        """Bring everything to the device and wait for it: a clean stop."""
        for segment in self._unsynced:
            if segment in self.segments:
                self._disk.sync(self._store.file(segment))
        self._unsynced = []
        self._store.synced(self._unsynced_bytes)
        self._unsynced_bytes = 0
        if self.folder is not None:
            self._sync_folder(self.folder)
        self.durable = max(self.durable, self._whole)
        self._tell()

    def close(self) -> None:
        """Seal the active segment and close the files. What was not written is not saved: call write_all() first."""
        if self._group_written is not None and self.durability != "memory":
            # The rest of this batch will never come.
            segment, offset, seq = self._group_written
            self._group_written = None
            self._cut_file(segment, seq, offset)
            self.end = self.written = seq
        if self._active is not None and not self.closed:
            piece = self._seal(self._active)
            if piece.segment not in self._unsynced:
                self._unsynced.append(piece.segment)
            try:
                self._write(piece)
            except OSError as exc:
                logger.warning(
                    "LOG(%s): %s has no footer, the next start takes longer - %s", self.name, self.folder, exc
                )
            self._active = None
            self.sync_now()
        self.abandon()

    def abandon(self) -> None:
        """Close the files and leave everything as it is."""
        self.closed = True
        for segment in self.segments:
            self._store.forget_cold(segment)
            if not segment.pins:
                self._store.close_file(segment)
        self.memory.clear()
        self._give_up_loan()
        self._give_up(-1, StorageError(f"LOG({self.name}): closed"))

    # --- Reading ---------------------------------------------------------------------------------------------------

    def block(self, seq: int) -> Block | None:
        """The block that holds ``seq``. None: it is being read back, and ``arrived`` will be called.

        DamageError says that it cannot be read, and up to where.
        """
        memory = self.memory
        i = bisect_right(memory.bases, seq) - 1
        if i >= 0:
            block = memory.blocks[i]
            if seq < block.base + block.count:
                self.from_memory = True
                return block
        if memory.pinned:
            pinned = memory.find_pinned(seq)
            if pinned is not None:
                self.from_memory = True
                return pinned
        self.from_memory = False
        segment, chunk = self._place(seq)
        found = self._store.cold(segment, chunk)
        if found is not None and seq < found.base + found.count:
            # Read ahead: by the time this block is sent the next one is there.
            self._read_ahead(segment, chunk)
            if seq >= found.base:
                return found
        self._read(segment, chunk, seq)
        return None

    def frame(self, seq: int) -> bytearray | None:
        """A copy of one frame, or None while it is being read back."""
        block = self.block(seq)
        if block is None:
            return None
        block.find(seq)
        return bytearray(block.view[block.start : block.stop])

    def extra(self, seq: int) -> bytes | None:
        """The extra bytes of the record that ``seq`` is in. None: as with ``block``. DamageError likewise."""
        if self.in_memory(seq):
            return self.memory.extra(seq)
        segment, chunk = self._place(seq)
        if not segment.extras:
            return b""
        known = self._cold_extras.get((segment, chunk))
        if known is not None and seq < known[0]:
            return extra_of(known[1], seq)
        self._read_extras(segment, chunk)
        return None

    def _read_extras(self, segment: Segment, chunk: int) -> None:
        key = segment, chunk
        if key in self._reading_extras:
            return
        offset, size, first, after = self.extent(segment, chunk)
        try:
            fd = self.pin(segment)
        except (OSError, StorageError) as exc:
            # Whoever wants it asks again.
            logger.error("LOG(%s): cannot open %s - %s", self.name, segment.path, exc)
            return
        self._reading_extras.add(key)

        def work() -> list[tuple[int, int, bytes]]:
            return extras_in_chunk(self._disk.read(fd, size, offset), segment.salt, first, after)

        def done(found: list[tuple[int, int, bytes]] | None, error: BaseException | None) -> None:
            self._reading_extras.discard(key)
            self.unpin(segment)
            if self.closed:
                return
            if error is not None:
                logger.error("LOG(%s): cannot read %s - %s", self.name, segment.path, error)
            self._cold_extras[key] = (after, found or [])
            self._cold_extras.move_to_end(key)
            while len(self._cold_extras) > _EXTRA_CHUNKS:
                self._cold_extras.popitem(last=False)
            self._arrived()

        self._disk.submit(work, done, READ)

    def seq_at(self, time: int, then: Callable[[int, BaseException | None], None]) -> None:
        """Call ``then`` with the first seq that was published at or after ``time``, ``end`` if there is none.

        At once if memory knows it, else when a thread has read the place; the error, if there is one, says why it
        could not. ``time`` is in ns since 1970. If the clock was set back, the first place counts that reaches it.
        """
        blocks = self.memory.all_blocks() if self.folder is None else [block for block in self.blocks if block.count]
        start = blocks[0].base if blocks else self.end
        # The chunk of the files that begins too early, right before one that does not or that is in memory.
        before: tuple[Segment, int] | None = None
        for segment in self.segments:
            cold = bisect_left(segment.index_seqs, start)
            late = bisect_left(segment.index_times, time, 0, cold)
            if late:
                before = segment, late - 1
            if late < cold:
                start = segment.index_seqs[late]
                break
        else:
            if blocks and (before is None or timestamp_of(blocks[0].view) < time):
                then(self._seq_in_memory(blocks, time), None)
                return
        if before is None:
            then(start, None)
            return
        segment, chunk = before
        offset, size, first, after = self.extent(segment, chunk)
        try:
            fd = self.pin(segment)
        except (OSError, StorageError) as exc:
            then(start, exc)
            return

        def work() -> int:
            seq = seq_in_chunk(self._disk.read(fd, size, offset), segment.salt, first, after, time)
            return seq if seq < min(after, start) else start

        def done(seq: int | None, error: BaseException | None) -> None:
            self.unpin(segment)
            then(start if seq is None else seq, error)

        self._disk.submit(work, done, READ)

    def _seq_in_memory(self, blocks: list[Block], time: int) -> int:
        i = bisect_left(blocks, time, key=lambda block: timestamp_of(block.view)) - 1
        if i < 0:
            return blocks[0].base
        block = blocks[i]
        seqs = range(block.base, block.base + block.count)
        return block.base + bisect_left(seqs, time, key=lambda seq: timestamp_of(block.view, block.find(seq)))

    def extent(self, segment: Segment, chunk: int) -> tuple[int, int, int, int]:
        """Where a chunk stands: its offset and size; and its seqs: the first, and the one after its last."""
        offset = segment.index_offsets[chunk]
        first = segment.index_seqs[chunk]
        if chunk + 1 == len(segment.index_offsets):
            return offset, segment.size - offset, first, segment.end
        return offset, segment.index_offsets[chunk + 1] - offset, first, segment.index_seqs[chunk + 1]

    def place_from(self, seq: int, stop: int) -> tuple[int, Segment, int] | None:
        """The first message from ``seq`` on and before ``stop``: its seq, segment and chunk. None if there is none.

        Seqs that no message ever had are passed over. DamageError if messages there are known to be lost, StorageError
        if the log is closed.
        """
        if self.closed:
            raise StorageError(f"LOG({self.name}): closed")
        found: tuple[int, Segment, int] | None = None
        for segment in self.segments[self._index(seq) :]:
            if segment.base >= stop:
                break
            k = bisect_right(segment.spans, seq)
            if k < len(segment.spans):
                first = seq if k % 2 else segment.spans[k]
                if first < stop:
                    found = first, segment, bisect_right(segment.index_seqs, first) - 1
                break
        lost = self.first_lost(seq, found[0] + 1 if found is not None else stop)
        if lost is not None:
            raise self._damage_error(lost[0], min(lost[1], stop))
        return found

    def _index(self, seq: int) -> int:
        """Which segment holds ``seq``, if any does."""
        return max(0, bisect_right(self.segments, seq, key=lambda segment: segment.base) - 1)

    def first_lost(self, first: int, stop: int) -> tuple[int, int] | None:
        """Of ``first`` … ``stop - 1`` the first messages that are known to be lost."""
        lost = list(self._set_aside)
        for segment in self.segments[self._index(first) :]:
            if segment.base >= stop:
                break
            if segment.damaged or segment.lost:
                lost += segment.damaged + segment.lost
        met = [(max(a, first), b) for a, b in lost if a < stop and b > first]
        return min(met) if met else None

    def _damage_error(self, first: int, stop: int) -> DamageError:
        return DamageError(f"LOG({self.name}): seqs {first} to {stop - 1} cannot be read", first, stop)

    def read_from(
        self,
        place: tuple[int, Segment, int],
        stop: int,
        submit: Submit,
        then: Callable[[Block | None, BaseException | None], None],
    ) -> None:
        """Read what ``place_from`` found, and what follows it in its chunk, checked, for somebody who is no channel.

        ``submit`` runs it in a thread. ``then`` gets a block that holds the message, or the error: a DamageError if
        it cannot be read. Nothing from ``stop`` on is looked at. OSError, StorageError: the file cannot be read now.
        """
        seq, segment, chunk = place
        offset, size, first, after = self.extent(segment, chunk)
        fd = self.pin(segment)

        def work() -> tuple[Block | None, list[tuple[int, int]]]:
            return decode_chunk(self._disk.read(fd, size, offset), segment.salt, first, after, seq)

        def done(result: tuple[Block | None, list[tuple[int, int]]] | None, error: BaseException | None) -> None:
            self.unpin(segment)
            if result is None:
                then(None, error)
                return
            block, damage = result
            self._note_damage(segment, damage, stop)
            if block is None or not block.base <= seq < block.base + block.count:
                last = next((b for a, b in damage if a <= seq < b), seq + 1)
                then(None, self._damage_error(seq, min(last, stop)))
            else:
                then(block, None)

        submit(work, done)

    def _note_damage(self, segment: Segment, damage: list[tuple[int, int]], stop: int) -> None:
        """These seqs, as far as they lie before ``stop``, could not be read: say so, and remember it."""
        for first, last in damage:
            for a, b in segment.present(first, min(last, stop)):
                if (a, b) not in segment.damaged:
                    logger.error(
                        "LOG(%s): seqs %d to %d in %s do not match their checksum", self.name, a, b - 1, segment.path
                    )
                    segment.damaged.append((a, b))
                    self.damaged.append((a, b))

    def _place(self, seq: int) -> tuple[Segment, int]:
        """In which segment and chunk ``seq`` is written; DamageError if in none."""
        low, high = 0, len(self.segments)
        while low < high:
            middle = (low + high) // 2
            if self.segments[middle].base <= seq:
                low = middle + 1
            else:
                high = middle
        after = self.segments[low].base if low < len(self.segments) else self.end
        if low == 0:
            raise DamageError(f"LOG({self.name}): seq {seq} is gone", seq, max(after, seq + 1))
        segment = self.segments[low - 1]
        for first, stop in segment.damaged:
            if first <= seq < stop:
                raise DamageError(f"LOG({self.name}): seq {seq} is damaged in {segment.path}", seq, stop)
        i = bisect_right(segment.spans, seq)
        if i % 2 == 0:
            stop = segment.spans[i] if i < len(segment.spans) else after
            raise DamageError(f"LOG({self.name}): seq {seq} was never written", seq, max(stop, seq + 1))
        return segment, bisect_right(segment.index_seqs, seq) - 1

    def _read_ahead(self, segment: Segment, chunk: int) -> None:
        if chunk + 1 < len(segment.index_seqs):
            if self._store.cold(segment, chunk + 1) is None:
                self._read(segment, chunk + 1, segment.index_seqs[chunk + 1])
        elif segment.sealed:
            i = self.segments.index(segment) + 1
            if i < len(self.segments) and self.segments[i].index_seqs and not self.in_memory(self.segments[i].base):
                if self._store.cold(self.segments[i], 0) is None:
                    self._read(self.segments[i], 0, self.segments[i].base)

    def in_memory(self, seq: int) -> bool:
        return self.memory.find(seq) is not None

    def _read(self, segment: Segment, chunk: int, seq: int) -> None:
        """Read the chunk, of which ``seq`` is wanted, in a thread."""
        if (segment, chunk) in self._reading or self.closed or self._disk.closing:
            return
        offset, size, first, after = self.extent(segment, chunk)
        # What a thread is still writing is not there yet, and is not damaged.
        written = self.written
        try:
            fd = self._store.file(segment)
        except OSError as exc:
            logger.error("LOG(%s): cannot open %s - %s", self.name, segment.path, exc)
            if exc.errno not in (errno.EMFILE, errno.ENFILE):
                segment.damaged.append((first, after))
            # Out of descriptors: whoever wants it asks again.
            return
        self._reading.add((segment, chunk))
        segment.pins += 1

        def work() -> tuple[Block | None, list[tuple[int, int]]]:
            return decode_chunk(self._disk.read(fd, size, offset), segment.salt, first, after, seq)

        def done(result: tuple[Block | None, list[tuple[int, int]]] | None, error: BaseException | None) -> None:
            self._reading.discard((segment, chunk))
            segment.pins -= 1
            if self.closed or segment not in self.segments:
                if not segment.pins:
                    self._store.close_file(segment)
                return
            if error is not None or result is None:
                logger.error("LOG(%s): cannot read %s - %s", self.name, segment.path, error)
                if not isinstance(error, OSError):
                    self._store.fatal(error or StorageError("no result"))
                    return
                self._failed_reads[segment, chunk] = failures = self._failed_reads.get((segment, chunk), 0) + 1
                if failures < READ_TRIES:
                    # It may pass: nothing is given up for it, whoever wants it waits.
                    self._reading.add((segment, chunk))
                    self._store.delay(READ_PAUSE, functools.partial(self._read_again, segment, chunk))
                    return
                segment.damaged.append((first, after))
            else:
                block, damage = result
                self._failed_reads.pop((segment, chunk), None)
                if block is not None:
                    self._store.keep_cold(segment, chunk, block)
                self._note_damage(segment, damage, written)
            self._arrived()

        self._disk.submit(work, done, READ)

    def _read_again(self, segment: Segment, chunk: int) -> None:
        self._reading.discard((segment, chunk))
        if not self.closed and segment in self.segments:
            self._arrived()

    def look(self, seq: int, then: Callable[[Block | None, BaseException | None], None]) -> Block | None:
        """The block that holds ``seq``, for those who only look around. None: ``then`` is handed it, or an error.

        What is read for it is kept nowhere, so that consumers still find what was read for them.
        """
        if self.in_memory(seq):
            return self.block(seq)
        segment, chunk = self._place(seq)
        found = self._store.cold(segment, chunk)
        if found is not None and found.base <= seq < found.base + found.count:
            return found
        offset, size, first, after = self.extent(segment, chunk)
        fd = self.pin(segment)

        def work() -> Block | None:
            return decode_chunk(self._disk.read(fd, size, offset), segment.salt, first, after, seq)[0]

        def done(block: Block | None, error: BaseException | None) -> None:
            self.unpin(segment)
            if error is None and (block is None or not block.base <= seq < block.base + block.count):
                error = DamageError(f"LOG({self.name}): seq {seq} is damaged in {segment.path}", seq, seq + 1)
            then(block, error)

        self._disk.submit(work, done, READ)
        return None

    # --- Letting go ------------------------------------------------------------------------------------------------

    def trim(
        self,
        limit: int,
        cap: int,
        needed: Callable[[int, int], bool],
        pinned: Callable[[int, int], bool],
        awaited: Callable[[int, int], bool] = lambda first, stop: False,
    ) -> None:
        """Let blocks leave the memory: those nobody needs, and the oldest beyond ``limit`` messages or ``cap`` bytes.

        ``needed(first, stop)``: does anybody still want one of these? ``pinned``: is memory the only place to get it
        from, because the one who wants it is ephemeral? Such a block stays behind, and newer ones leave. ``awaited``:
        are these the next that a consumer gets? Then they stay a little longer, if the store has memory to lend: a
        consumer that was held up for a moment would have to read everything from files from there on.
        """
        memory = self.memory
        if memory.pinned:
            for block in memory.unpin(needed if self.folder is None else pinned):
                self._store.give_back(block)
        blocks = memory.blocks
        count, size = memory.count(self.end), memory.bytes
        drop = lent = 0
        pins: list[Pinned] = []
        for block in blocks:
            stop = block.base + block.count
            last = block is memory.active
            if needed(block.base, stop) or (last and self.end > self.committed):
                if (count <= limit and size <= cap) or self._in_group:
                    break
                if self.folder is None:
                    if last:
                        break
                    pins.append(self._pin_unwritten(block))
                    drop += 1
                    continue
                if stop > self._whole:
                    break
                if limit and size <= cap and awaited(block.base, stop) and self._store.lend(self._lent, size):
                    self._lent = lent = size
                    break
                if pinned(block.base, stop):
                    if last:
                        # It is still being filled.
                        break
                    pins.append(Pinned(block))
                    drop += 1
                    continue
            elif stop > self.written:
                # Nobody wants it and it never went to a file: durability `memory`. It need not go there any more.
                if self.durability != "memory" or self._writing:
                    break
                self._drop_pending(stop)
                self.written = max(self.written, stop)
                self.durable = max(self.durable, stop)
            count -= block.count
            size -= block.size
            self._store.give_back(block)
            drop += 1
        if self._lent > lent:
            self._give_up_loan()
        if drop:
            memory.drop(drop, pins)
            if not blocks:
                self._open_record = None
                self._block_size = max(SMALLEST_BLOCK, self._block_size // 2)
            self._tell()

    def _drop_pending(self, stop: int) -> list[Record]:
        """Take the records before ``stop`` out of those that wait to be written."""
        dropped: list[Record] = []
        while self._pending and self._pending[0].seq < stop:
            record = self._pending.popleft()
            dropped.append(record)
            if record is self._open_record:
                self._open_record = None
        return dropped

    def _pin_unwritten(self, block: Block) -> Pinned:
        """A block of a log without files stays behind; what its records say about its messages stays with it."""
        delays: list[tuple[int, int]] = []
        for record in self._drop_pending(block.base + block.count):
            if record.flags & DEFERRED:
                due = timestamp_of(record.block.view, record.start) + record.delay * 1_000_000
                delays.extend((seq, due) for seq in range(record.seq, record.seq + record.count))
        return Pinned(block, delays=delays)

    def _give_up_loan(self) -> None:
        self._store.lend(self._lent, 0)
        self._lent = 0

    def measure(self, first: int, stop: int) -> tuple[int, int]:
        """How many messages of ``first`` … ``stop - 1`` are in the files, and about how many bytes they take there."""
        count = size = 0
        for segment in self.segments[self._index(first) :]:
            if segment.base >= stop:
                break
            count += sum(b - a for a, b in segment.present(first, stop))
            size += segment.offset_of(stop) - segment.offset_of(first)
        return count, size

    def boundary(self, seq: int) -> int:
        """Up to where files go if ``free(seq)`` is called; 0 if none does."""
        found = 0
        for segment, following in zip(self.segments, self.segments[1:], strict=False):
            if max(segment.end, following.base) > seq:
                break
            found = following.base
        return found

    def free(self, seq: int, first_kept: Callable[[], int]) -> None:
        """Remove the segment files that lie wholly before ``seq``. Call it only when durable state allows it.

        ``first_kept``: what has to stay by now, because somebody may have gone back in the log meanwhile.
        """
        if self._disk.closing:
            return
        removed = False
        seq = min(seq, first_kept())
        while self.segments and self.segments[0] is not self._active and not self.segments[0].pins:
            segment = self.segments[0]
            stop = self.segments[1].base if len(self.segments) > 1 else segment.end
            if max(segment.end, stop) > seq:
                break
            if segment.key_count and self.keep_keys is not None:
                self._save_keys(segment, self.keep_keys, functools.partial(self.free, seq, first_kept))
                break
            self._forget_segment(segment)
            # Giving a large file's blocks back takes the system a while.
            self._disk.submit(functools.partial(self._disk.remove, segment.path), self._removed)
            removed = True
        if removed and self.folder is not None:
            self._progressed()

    def _save_keys(self, segment: Segment, keep: Callable[[KeyBlock, int], None], go_on: Callable[[], None]) -> None:
        """The keys of the oldest segment go elsewhere, in a thread; then removing goes on."""
        try:
            fd = self._store.file(segment)
        except OSError as exc:
            logger.error("LOG(%s): cannot open %s - %s", self.name, segment.path, exc)
            return
        segment.pins += 1
        later = sum(other.key_count for other in self.segments[1:])

        def work() -> None:
            try:
                keys = self._keys_in(segment, fd)
            except OSError as exc:
                raise StorageError(f"the keys in {segment.path} cannot be read: {exc}") from exc
            keep(keys, later)

        def done(_: None, error: BaseException | None) -> None:
            self.unpin(segment)
            if self.closed or self._disk.closing:
                return
            if isinstance(error, StorageError):
                self._failed_reads[segment, -1] = failures = self._failed_reads.get((segment, -1), 0) + 1
                if failures >= READ_TRIES:
                    # It cannot stay for ever. What is published again with one of its keys is stored again.
                    logger.error("LOG(%s): %s, they are given up", self.name, error)
                    del self._failed_reads[segment, -1]
                    error = None
            if error is not None:
                logger.error("LOG(%s): %s stays for its keys - %s", self.name, segment.path, error)
                return
            segment.key_count = 0
            go_on()

        self._disk.submit(work, done)

    def _removed(self, _: None, error: BaseException | None) -> None:
        # It may have been removed already, with the whole topic.
        if error is not None and not isinstance(error, FileNotFoundError):
            logger.error("LOG(%s): cannot remove a segment - %s", self.name, error)

    def _remove_segment(self, segment: Segment) -> None:
        self._forget_segment(segment)
        try:
            self._disk.remove(segment.path)
        except OSError as exc:
            logger.error("LOG(%s): cannot remove %s - %s", self.name, segment.path, exc)

    def _forget_segment(self, segment: Segment) -> None:
        self.segments.remove(segment)
        self._store.forget_cold(segment)
        for key in [key for key in self._cold_extras if key[0] is segment]:
            del self._cold_extras[key]
        if not segment.pins:
            self._store.close_file(segment)

    def discard(self) -> None:
        """The topic is deleted: remove all files and the folder."""
        segments = list(self.segments)
        self.abandon()
        if self.folder is None:
            return
        for segment in segments:
            self._remove_segment(segment)
        self._store.synced(self._unsynced_bytes)
        self._unsynced_bytes = 0

    # --- Opening ---------------------------------------------------------------------------------------------------

    def recover(self, durable: int, after: int | None) -> None:
        """Read what is in the folder.

        ``durable``: everything before this seq is known to be on the device. ``after``: after an unclean stop the
        log goes on at this seq; None after a clean stop, when it goes on where it ended.
        """
        assert self.folder is not None
        paths = []
        for name in self._disk.names(self.folder):
            path = self.folder / name
            if name.endswith(".tmp"):
                self._disk.remove(path)
            elif name.endswith(".seg"):
                paths.append(path)
        for i, path in enumerate(paths):
            self._recover_segment(path, paths[i + 1] if i + 1 < len(paths) else None, durable)
        for name in self._disk.names(self.folder):
            if name.endswith(".bad"):
                first = int(name.removesuffix(".bad"), 16)
                stop = min((segment.base for segment in self.segments if segment.base > first), default=durable)
                self._set_aside.append((first, stop))
        for segment, later in zip(self.segments, self.segments[1:], strict=False):
            # A segment that could not be cut back is hidden by the one that was begun after it.
            if segment.end > later.base:
                hide_after(segment, later.base)
        end = max([segment.end for segment in self.segments], default=self.end)
        self.end = self.written = self.durable = max(end, self.end) if after is None else max(end, self.end, after)

    def _recover_segment(self, path: Path, later: Path | None, durable: int) -> None:
        fd = self._store.open(path)
        size = self._disk.size(fd)
        head = self._disk.read(fd, FILE_HEADER + RECORD_HEADER, 0)
        segment = read_header(path, head) or guess_header(path, head)
        if segment is None:
            self._disk.close_file(fd)
            if later is None and size < FILE_HEADER:
                # The power went while it was made: nothing was in it.
                self._disk.remove(path)
                return
            logger.error("LOG(%s): the header of %s is damaged, the file is set aside", self.name, path)
            self._disk.rename(path, path.with_suffix(".bad"))
            return
        if read_footer(self._disk, fd, size, segment):
            if segment.end <= durable:
                self._store.adopt_file(segment, fd)
                segment.folder_synced = True
                self.segments.append(segment)
                return
            # It was sealed, but perhaps never synced: its footer may be there and what is before it not.
            segment = Segment(path, segment.base, segment.salt, segment.boot)
        self._store.adopt_file(segment, fd)
        segment.folder_synced = True
        # Where a write failed and could not be cut back, the next file holds what came instead.
        limit = int(later.stem, 16) if later is not None else sys.maxsize
        salvage = Salvage(self._disk, fd, size, segment, durable, limit)
        salvage.run()
        for first, stop in salvage.damage:
            logger.error("LOG(%s): seqs %d to %d in %s were not written whole", self.name, first, stop - 1, path)
        self._settle(segment, fd, salvage)

    def _settle(self, segment: Segment, fd: int, salvage: Salvage) -> None:
        """Seal a segment that has no footer. What may be in the page cache only goes to a new file first."""
        known = bool(segment.spans)
        # Of durability `memory` much never reaches a file.
        lost = salvage.lost if self.durability != "memory" else []
        unknown = salvage.entries
        self.salvaged.extend((entry.seq, entry.extra) for entry in unknown if entry.extra)
        copy: Segment | None = None
        if unknown:
            base = unknown[0].seq
            if not known:
                # The whole file: the copy takes its name.
                path = segment.path
            else:
                path = segment.path.with_name(f"{base:016x}.seg")
            copy = Segment(path, base, new_salt(), segment.boot)
            temporary = path.with_suffix(".tmp")
            out = self._disk.open(temporary, create=True)
            self._disk.write(out, [file_header(copy)], 0)
            for entry in unknown:
                record, frames = salvage.record(entry, copy.salt)
                offset = copy.size
                self._disk.write(out, [record, frames], offset)
                copy.note_found(entry, offset, len(record) + len(frames))
            if not known:
                copy.lost = lost
            self._disk.write(out, [copy.seal()], copy.size)
            self._disk.sync(out)
            self._disk.rename(temporary, path)
            assert self.folder is not None
            self._disk.sync_folder(self.folder)
            copy.folder_synced = True
        if known or copy is None:
            if known:
                segment.lost = lost
                self._disk.truncate(fd, segment.size)
                self._disk.write(fd, [segment.seal()], segment.size)
                self._disk.sync(fd)
                self.segments.append(segment)
            else:
                self._store.close_file(segment)
                if lost:
                    logger.error("LOG(%s): nothing in %s can be read, it is set aside", self.name, segment.path)
                    self._disk.rename(segment.path, segment.path.with_suffix(".bad"))
                else:
                    self._disk.remove(segment.path)
        else:
            self._store.close_file(segment)
        if copy is not None:
            self._store.adopt_file(copy, out)
            self.segments.append(copy)

    def spans(self) -> list[tuple[int, int]]:
        """All seqs that can be read, as ranges in order."""
        found: list[tuple[int, int]] = []
        for segment in self.segments:
            for i in range(0, len(segment.spans), 2):
                first, stop = segment.spans[i], segment.spans[i + 1]
                if found and found[-1][1] == first:
                    found[-1] = (found[-1][0], stop)
                else:
                    found.append((first, stop))
        if self.folder is None:
            found.extend((pinned.block.base, pinned.block.base + pinned.block.count) for pinned in self.memory.pinned)
        if self.blocks:
            first = self.blocks[0].base
            if found and found[-1][1] >= first:
                found[-1] = (found[-1][0], self.end)
            else:
                found.append((first, self.end))
        return found

    def addressed(self) -> Iterator[tuple[int, int, bytes]]:
        """(first seq, count, extra bytes) of every record in the files: a side log says there whom it is for."""
        for segment in self.segments:
            for entry in self._entries(segment, self._store.file(segment)):
                yield entry.seq, entry.count, entry.extra

    def _entries(self, segment: Segment, fd: int) -> Iterator[Entry]:
        """Every record of a segment."""
        for chunk, start in enumerate(segment.index_offsets):
            last = chunk + 1 == len(segment.index_offsets)
            stop = segment.size if last else segment.index_offsets[chunk + 1]
            for entry in read_records(self._disk.read(fd, stop - start, start), segment.salt, 0, start, True):
                if isinstance(entry, Entry):
                    yield entry

    def keys(self) -> Iterator[KeyBlock]:
        """The keys in the files, of the newest segment first."""
        for segment in reversed(self.segments):
            if not segment.key_count:
                continue
            try:
                yield self._keys_in(segment, self._store.file(segment))
            except OSError as exc:
                # They are forgotten: what is published again with one of them is stored again.
                logger.error("LOG(%s): the keys in %s cannot be read - %s", self.name, segment.path, exc)

    def _keys_in(self, segment: Segment, fd: int) -> KeyBlock:
        keys = segment.keys
        if keys is None and segment.sealed:
            keys = read_keys(self._disk, fd, segment)
            if keys is None:
                logger.warning("LOG(%s): the keys in %s are read from its records", self.name, segment.path)
        if keys is None:
            # The records have them too.
            again = Segment(segment.path, segment.base, segment.salt, segment.boot)
            for entry in self._entries(segment, fd):
                if entry.extra:
                    again.note_key(entry.extra, entry.flags, entry.seq, entry.timestamp)
            keys = again.keys or KeyBlock()
        keys.cut(segment.end)
        return keys

    def delays(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """(seq, when due by the wall clock) of each deferred message from ``first`` up to ``stop``."""
        for segment in self.segments:
            d = segment.deferrals
            if not d or segment.end <= first or segment.base >= stop:
                continue
            records = range(len(d) // 5)
            for i in records[max(0, bisect_right(records, first, key=lambda i: d[5 * i]) - 1) :]:
                begin, count, _, delay, timestamp = d[5 * i : 5 * i + 5]
                if begin >= stop:
                    break
                for seq in range(max(first, begin), min(stop, begin + count)):
                    yield seq, timestamp + delay
        # And of those that are in no file yet.
        yield from self.memory.delays(first, stop)
        start = max(0, bisect_right(self._pending, first, key=lambda record: record.seq) - 1)
        for record in islice(self._pending, start, None):
            if record.seq >= stop:
                break
            if record.flags & DEFERRED:
                due = timestamp_of(record.block.view, record.start) + record.delay * 1_000_000
                for seq in range(max(first, record.seq), min(stop, record.seq + record.count)):
                    yield seq, due

    def deferrals(self, pumped: int = 0) -> Iterator[tuple[int, int]]:
        """(seq, when due) of deferred messages in the files, on this boot's clock.

        Those before ``pumped`` that are due are left out: they wait as any other.
        """
        now, wall = self._store.clock.now(), self._store.clock.wall()
        boot = self._store.clock.boot_id()
        for segment in self.segments:
            same = segment.boot == boot
            d = segment.deferrals
            for i in range(0, len(d), 5):
                first, count, started, delay, timestamp = d[i : i + 5]
                due = started + delay if same else now + (timestamp + delay - wall)
                if due <= now and first + count <= pumped:
                    continue
                for seq in range(first, first + count):
                    yield seq, due
