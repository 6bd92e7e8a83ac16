"""One topic's log: appending, writing, and the marks that say how far each has come.

A Log owns its segment files and the marks ``first <= written <= end`` and ``durable <= written``. Only its topic
appends; channels read ranges. It does not know who needs which message: its topic tells it what it may forget.

Size: appending, writing and trimming change the same marks and the same records that wait to be written, so they stay
in one module. Its parts are apart: Memory holds the blocks, a Syncer brings what was written to the device, a
Reader reads back messages that are no longer in memory, a Removal deletes files, Recovery is what happens at a start.
What the files look like is ``segment``'s business.
"""

from __future__ import annotations

import functools
import logging
import os
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from flintmq.broker.storage.disk import BACKGROUND, COMMIT
from flintmq.broker.storage.keys import MOST_IN_SEGMENT, KeyBlock, is_reserved
from flintmq.broker.storage.memory import Memory, Pinned
from flintmq.broker.storage.reader import Reader
from flintmq.broker.storage.recovery import Recovery
from flintmq.broker.storage.removal import Removal
from flintmq.broker.storage.segment import (
    CONTINUES,
    DEFERRED,
    FILE_HEADER,
    MORE,
    RECORD_BYTES,
    RECORD_HEADER,
    Record,
    Segment,
    TimeRange,
    encode_record,
    file_header,
    hide_after,
    new_salt,
    timestamp_of,
)
from flintmq.broker.storage.store import LARGEST_BLOCK, NO_DESCRIPTOR, Store
from flintmq.broker.storage.syncer import Syncer
from flintmq.errors import PublishError, StorageError
from flintmq.kernel import FAILED, FRAME_OVERHEAD, Block, Intake, Tail

__all__ = ["NO_BLOCK", "TAKE_AT_ONCE", "WRITE_AT", "Log"]

logger = logging.getLogger(__name__)

#: Bytes of the first block of a quiet topic; each further one is twice as large, up to LARGEST_BLOCK.
SMALLEST_BLOCK = 4 << 10
#: Unsynced bytes of all logs at which writes move to a thread.
WRITE_IN_THREAD_AT = 64 << 20
#: Durability ``memory``: bytes of one write from which on a thread makes it, because the loop would be held until the
#: system has copied them.
LARGE_WRITE = 4 << 20
#: Bytes taken from sockets before they are written and answered: with few publishers, those who have their answer send
#: more while the others' batches are handled.
WRITE_AT = 32 << 10
#: Bytes taken from sockets, written and answered before the loop does anything else.
TAKE_AT_ONCE = 256 << 10
#: Bytes that a large block must have left for that.
TAKE_ROOM = 64 << 10
#: take_in() read nothing, because there is no block to read into.
NO_BLOCK = -1
#: Seconds until a write is tried again that somebody waits for, where the messages stay in memory meanwhile.
WRITE_AGAIN = 1.0


@dataclass(slots=True)
class _Piece:
    """What one write puts into one segment."""

    segment: Segment
    offset: int
    buffers: list[bytes | memoryview]
    first: int
    size: int = 0
    records: list[Record] = field(default_factory=list)


class Log:
    """See the module's text. ``folder`` is None for an ephemeral topic: then nothing ever goes to a file.

    Size: marks, the batch that is being appended and what is planned or written of it change together, append by append
    and write by write, so they are flat.
    """

    # A dict of so many attributes is looked up in several places of memory; one object of many is rarely in the cache.
    __slots__ = (
        "__weakref__",
        "_active",
        "_block_size",
        "_disk",
        "_doomed",
        "_failed",
        "_group_first",
        "_group_planned",
        "_group_written",
        "_held",
        "_last_time",
        "_lent",
        "_newest",
        "_open_record",
        "_pending",
        "_progressed",
        "_resting",
        "_spilled",
        "_steps_back",
        "_store",
        "_tail",
        "_writing",
        "closed",
        "deferred",
        "durability",
        "durable",
        "end",
        "folder",
        "from_memory",
        "in_group",
        "last_bytes",
        "memory",
        "name",
        "reader",
        "removal",
        "salvaged",
        "segments",
        "syncer",
        "written",
    )

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
        arrived: Callable[[Collection[object] | None], None],
    ) -> None:
        self._store = store
        self._disk = store.disk
        self.name = name
        self.folder = folder
        self.durability = durability if folder is not None else "memory"
        # Callbacks: a mark moved; a write failed, and what follows this seq is gone.
        self._progressed = progressed
        self._failed = failed
        # Marks.
        self.end = self.written = self.durable = base
        # Parts.
        self.memory = Memory()
        self.syncer = Syncer(self, store)
        self.reader = Reader(self, store, arrived)
        self.removal = Removal(self, store, base, progressed)
        # Bytes that the store lets it hold beyond its limit; the size of its next block.
        self._lent = 0
        self._block_size = SMALLEST_BLOCK
        # Deferred messages that channels have not seen yet: (seq, when due), in seq order.
        self.deferred: deque[tuple[int, int]] = deque()
        #: Seq and extra bytes of the records that a start found beyond what was known to be on the device.
        self.salvaged: list[tuple[int, bytes]] = []
        # Not yet written; the last of them, if more can be added to it; is a batch being appended that goes on?
        self._pending: deque[Record] = deque()
        self._open_record: Record | None = None
        self.in_group = False
        # Times: the latest of all messages, that of the last one, and the first and last seq that was published at an
        # earlier time than the one before it, among those that are not laid out in a segment yet.
        self._newest = 0
        self._last_time = 0
        self._steps_back: tuple[int, int] | None = None
        # Where that batch begins, and why it will never be whole although a thread still writes some of it.
        self._group_first = base
        self._doomed: PublishError | None = None
        # Durability `memory`: the first seq under a reserved key that waits to be written, -1 if there is none.
        self._held = -1
        #: Bytes of frames that the last take_in() made.
        self.last_bytes = 0
        self._tail = Tail(store.prefix, WRITE_AT)
        # Is the last record that was laid out, or the last one written (where the group starts), in a group whose end
        # is still to come? Is a thread writing?
        self._group_planned = False
        self._group_written: tuple[Segment, int, int] | None = None
        self._writing = False
        # Durability `memory`: has a write failed that is tried again soon, and not before?
        self._resting = False
        # Called when a thread has written something after a spill.
        self._spilled: Callable[[], None] | None = None
        # On the disk; the one that is written to.
        self.segments: list[Segment] = []
        self._active: Segment | None = None
        #: Was the last block found in memory?
        self.from_memory = False
        self.closed = False

    # --- Marks -----------------------------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The lowest seq that was not removed."""
        if self.durability != "memory":
            return self.removal.first
        if self.segments:
            return self.segments[0].base
        blocks = self.memory.all_blocks()
        return blocks[0].base if blocks else self.end

    @property
    def committed(self) -> int:
        """Up to here a publish is as safe as it was promised to be."""
        if self.durability == "os":
            # ``whole``, without asking for it: this is looked at for every publish.
            group = self._group_written
            return self.written if group is None else group[2]
        if self.durability == "fsync":
            return self.durable
        # A batch whose end is still to come may yet be cut back. What is under a reserved key has to outlive a kill
        # once anybody has seen it.
        end = self._group_first if self.in_group else self.end
        return end if self._held < 0 else min(end, self._held)

    @property
    def whole(self) -> int:
        """Up to here everything is written, less a batch whose end is still to come: it may yet be cut back."""
        return self.written if self._group_written is None else self._group_written[2]

    def resume_at(self, seq: int) -> None:
        """A start: go on at ``seq``, or where the log ends if that is later."""
        self.end = self.written = self.durable = max(seq, self.end)
        self.removal.resumed()

    def made_durable(self, seq: int) -> None:
        """The syncer says: everything before ``seq`` is on the device."""
        if seq > self.durable:
            self.durable = seq
        self.syncer.tell(self.durable)
        self._progressed()

    @property
    def blocks(self) -> list[Block]:
        """The blocks in memory that lead up to the end without a hole, oldest first."""
        return self.memory.blocks

    @property
    def writing(self) -> bool:
        """Is a thread writing?"""
        return self._writing

    @property
    def memory_count(self) -> int:
        """Messages in memory."""
        return self.memory.count(self.end)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the blocks in memory."""
        return self.memory.bytes

    @property
    def damaged(self) -> list[tuple[int, int]]:
        """Seqs that could not be read."""
        return self.reader.damaged

    @property
    def has_complete_files(self) -> bool:
        """Is there a file that nothing is written to any more?"""
        return bool(self.segments) and self.segments[0] is not self._active

    @property
    def oldest_sealed(self) -> Segment | None:
        """The oldest segment, if it is complete and another follows it."""
        if len(self.segments) < 2 or not self.segments[0].sealed or self.segments[0].pins:
            return None
        return self.segments[0]

    # --- Appending -------------------------------------------------------------------------------------------------

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
        PublishError: there is no memory for it. Then nothing of it is there, nor of what came before in its batch.
        """
        if self._doomed is not None:
            raise self._doomed
        record = self._open_record
        known = (record.stop, record.count) if record is not None else (0, 0)
        first = self.end
        if timestamp >= self._newest:
            self._newest = self._last_time = timestamp
        else:
            self._note_earlier(timestamp)
        try:
            return self._append(data, pos, stop, count, timestamp, delay, attempts, extra, more)
        except BaseException as exc:
            if record is not None:
                record.stop, record.count = known
            self._forget(first)
            error = PublishError(exc.strerror or str(exc) if isinstance(exc, OSError) else "out of memory")
            if self.in_group:
                self._give_up_batch(error)
            if isinstance(exc, (OSError, MemoryError)):
                raise error from exc
            raise

    def _append(
        self,
        data: bytearray,
        pos: int,
        stop: int,
        count: int,
        timestamp: int,
        delay: int,
        attempts: int,
        extra: bytes,
        more: bool,
    ) -> int:
        first = self.end
        block = self.memory.active
        open_record = self._open_record
        need = stop - pos + (FRAME_OVERHEAD - 4) * count
        if (
            open_record is not None
            and block is open_record.block
            and not (delay or extra or more or self.in_group)
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
        continues = CONTINUES if self.in_group else 0
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
        if more and not self.in_group:
            self._group_first = first
        self.in_group = more
        if extra and self._held < 0 and self.durability == "memory" and self.folder is not None and is_reserved(extra):
            self._held = first
        self._open_record = record if record is not None and not (flags or extra or more) else None
        return first

    def end_batch(self) -> None:
        """Nothing more is coming of the batch that is being appended: what is there is all of it."""
        self.in_group = False
        if self._pending:
            self._pending[-1].flags &= ~MORE

    def take_in(
        self, intake: Intake, fds: list[int], counts: list[int], start: int, settled: bool, budget: int
    ) -> tuple[int, bool]:
        """Append publishes straight from sockets: see ``Intake.run``. How that ended, and whether they are answered.

        Without ``settled`` nothing may be answered yet; ``budget`` is what may be taken before the loop goes on. If a
        write failed, what was not written is gone again.
        """
        block = self.memory.active
        if block is None or self.in_group:
            return NO_BLOCK, False
        room = 0
        if block.size == LARGEST_BLOCK:
            room = TAKE_ROOM
            if block.size - block.used < room:
                try:
                    block = self._add_block(LARGEST_BLOCK)
                except (OSError, MemoryError):
                    # Who publishes on the long way is told.
                    return NO_BLOCK, False
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
                try:
                    file = store.file(segment)
                except OSError:
                    # The write at the end of the turn finds out, and its publishers are told.
                    answer = False
        first, used = block.count, block.used
        tail = self._tail
        tail.block, tail.room, tail.seq, tail.budget = block, room, self.end, budget
        tail.file, tail.answer = file, answer
        if segment is not None:
            tail.offset, tail.salt = segment.size, segment.salt
        timestamp = store.clock.wall()
        status = intake.run(tail, fds, counts, start, timestamp)
        # Else it would hold the block's memory when the log does not.
        tail.block = None
        count = block.count - first
        if not count:
            return status, answer
        if timestamp >= self._newest:
            self._newest = self._last_time = timestamp
        else:
            self._note_earlier(timestamp)
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
        seq = self.end
        self.end += count
        if failed:
            written = block.index(intake.unwritten) - (block.count - count)
            lost = Record(block, intake.unwritten, block.used, seq + written, count - written)
            count = written
        if count:
            segment.note(seq, count, segment.size, intake.wrote, block.view, start)
            segment.newest = self._newest
            if self._steps_back is not None:
                self._note_order(segment, seq, count)
            self.written = seq + count
            self.syncer.wrote(segment, intake.wrote, count)
            self.syncer.sync_if_due()
        if failed:
            self._write_failed(
                [_Piece(segment, segment.size, [], lost.seq, 0, [lost])],
                OSError(intake.error, os.strerror(intake.error)),
            )

    def _note_earlier(self, timestamp: int) -> None:
        """Messages come with a time before the newest. If appending fails, too many steps back are known: no harm."""
        if timestamp < self._last_time:
            # What is known may be of messages that were cut off since: then their seqs are used again.
            first = self.end if self._steps_back is None else min(self.end, self._steps_back[0])
            self._steps_back = (first, self.end)
        self._last_time = timestamp

    def _note_order(self, segment: Segment, seq: int, count: int) -> None:
        """Messages from ``seq`` on were laid out in a segment, some perhaps earlier than those before them."""
        assert self._steps_back is not None
        first, last = self._steps_back
        if first < seq + count and seq <= last and not first == last == segment.base:
            segment.ordered = False
        if last < seq + count:
            self._steps_back = None

    def _new_block(self, pos: int, data: bytearray) -> Block:
        need = FRAME_OVERHEAD + int.from_bytes(data[pos : pos + 4], "big")
        block = self._add_block(max(self._block_size, need))
        self._block_size = min(self._block_size * 2, LARGEST_BLOCK)
        return block

    def _add_block(self, size: int) -> Block:
        block = self._store.new_block(size, self.end)
        empty = self.memory.add(block)
        if empty is not None:
            self._store.give_back(empty)
        return block

    def _cut_back(self, seq: int) -> None:
        """Forget everything from ``seq`` on: it could not be written, and nobody has seen it."""
        self._forget(seq)
        self._pending.clear()
        self.in_group = False
        self._doomed = None

    def _forget(self, seq: int) -> None:
        """Take everything from ``seq`` on out of the memory, and of what waits to be written."""
        self.memory.cut_back(seq)
        while self.deferred and self.deferred[-1][0] >= seq:
            self.deferred.pop()
        while self._pending and self._pending[-1].seq >= seq:
            self._pending.pop()
        self._open_record = None
        self.end = seq
        if self._held >= seq:
            self._held = -1

    def _give_up_batch(self, error: PublishError) -> None:
        """The batch that is being appended will never be whole: forget what there is of it."""
        if self._writing and self.durability != "memory":
            # Some of it may be on its way to the file.
            self._doomed = error
            return
        self._doomed = None
        self.in_group = False
        first = self._group_first
        if self._group_written is not None:
            segment, offset, seq = self._group_written
            self._group_written = None
            self._group_planned = False
            self._active = None
            self._cut_file(segment, seq, offset)
        self._forget(first)
        self._failed(first, error)
        self.syncer.give_up(first, error)

    # --- Writing ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what was appended. Called once per loop turn for all publishers of the turn."""
        if self.folder is None or self._writing or not self._pending or self.closed:
            return
        if self.durability == "memory" and (self._resting or (not self.syncer.awaited and self._held < 0)):
            return
        records = self._writable(len(self._pending))
        if records and (records != 1 or not self._write_single(self._pending[0])):
            self._write_out(records)

    def _flush_again(self) -> None:
        self._resting = False
        self.flush()

    def change_durability(self, durability: str) -> None:
        """From now on publishes are as safe as this. To and from ``memory`` only while everything has been written."""
        if self.folder is None or durability == self.durability:
            return
        self.removal.begin_at(self.first)
        self.durability = durability
        if durability == "fsync":
            self.syncer.sync(COMMIT)
        self._progressed()

    def write_all(self) -> None:
        """Write everything, whatever the durability: a clean stop."""
        if self.durability == "memory" and self.in_group:
            self._give_up_batch(PublishError("exiting"))
        if self.folder is not None and self._pending:
            self._open_record = None
            self._write_out(len(self._pending), last=True)
            left = 0
            while self._pending and len(self._pending) != left:
                # Durability `memory`, and not all of it fits: record by record, up to the first that does not.
                left = len(self._pending)
                self._write_out(self._writable(1), last=True)

    def unwritten(self, needed: Callable[[int, int], bool]) -> int:
        """Return how many messages that are ``needed(first, stop)`` wait to be written to a file."""
        if self.folder is None:
            return 0
        return sum(
            needed(seq, seq + 1) for record in self._pending for seq in range(record.seq, record.seq + record.count)
        )

    def spill(self, limit: int, cap: int, spilled: Callable[[], None] | None = None) -> None:
        """Durability ``memory``: write the oldest blocks so that they can leave the memory.

        ``spilled`` is called later if a thread has written them, and not if they are written at once.
        """
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
        records = self._writable(records)
        if records:
            if records == len(self._pending):
                self._open_record = None
            self._spilled = spilled
            self._write_out(records)

    def _writable(self, records: int) -> int:
        """How many of the pending records to write where so many are to be.

        With durability ``memory`` a batch is written once it is whole, and one that has a key in one go: the key in a
        file says that all of it is stored.
        """
        pending = self._pending
        if self.durability != "memory":
            return records
        if self.in_group:
            records = min(records, bisect_left(pending, self._group_first, key=lambda record: record.seq))
        while 0 < records < len(pending) and pending[records - 1].extra and pending[records - 1].flags & MORE:
            records += 1
        return records

    def _write_out(self, records: int, last: bool = False) -> None:
        pieces = self._plan(records)
        is_slow = self._store.unsynced >= WRITE_IN_THREAD_AT
        if self.durability == "memory" and sum(piece.size for piece in pieces) >= LARGE_WRITE:
            # Written all at once when the memory is full; else a turn has no more than its own publishes to write.
            is_slow = True
        if is_slow and not (last or self._disk.in_a_hurry or self._disk.closing):
            try:
                self._write_in_thread(pieces)
                return
            except OSError as exc:
                if exc.errno not in NO_DESCRIPTOR:
                    self._write_failed(pieces, exc)
                    return
                # A thread needs all files open at once, the loop writes them one after the other.
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
        segment.newest = self._newest
        if self._steps_back is not None:
            self._note_order(segment, record.seq, record.count)
        try:
            self._disk.write(store.file(segment), (head, frames), offset)
        except OSError as exc:
            self._write_failed([_Piece(segment, offset, [head, frames], record.seq, size, [record])], exc)
            return True
        self.written = record.seq + record.count
        self.syncer.wrote(segment, size, record.count)
        self.syncer.sync_if_due()
        self._progressed()
        return True

    def _write_in_thread(self, pieces: list[_Piece]) -> None:
        """Let a thread write: the system throttles writers that run ahead of the device. OSError: not begun."""
        files: list[tuple[int, _Piece]] = []
        try:
            for piece in pieces:
                # Files are opened, and the table of them changed, on the loop alone. Each is pinned before the next is
                # opened, which may close others.
                files.append((self._file(piece.segment), piece))
                piece.segment.pins += 1

            def work() -> None:
                for fd, piece in files:
                    self._disk.write(fd, piece.buffers, piece.offset)

            self._disk.submit(work, functools.partial(self._written_in_thread, pieces), COMMIT)
        except BaseException:
            for _, piece in files:
                self.unpin(piece.segment, keep_open=True)
            raise
        self._writing = True

    def _written_in_thread(self, pieces: list[_Piece], _: None, error: BaseException | None) -> None:
        self._writing = False
        for piece in pieces:
            self.unpin(piece.segment)
        if self.closed:
            return
        spilled, self._spilled = self._spilled, None
        if error is None:
            self._wrote(pieces)
            if spilled is not None:
                spilled()
        elif isinstance(error, OSError):
            self._write_failed(pieces, error)
        else:
            self._store.fatal(error)
        if self._doomed is not None:
            self._give_up_batch(self._doomed)
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
            if self.durability == "memory" and not record.extra:
                # It was answered and seen record by record, and the rest of its batch may never go to a file.
                record.flags &= DEFERRED
            elif not self._group_planned:
                # With durability `memory` what comes before it in its batch may be finished without ever being written.
                record.flags &= ~CONTINUES
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
                segment = Segment(path, record.seq, new_salt(self._store.disk.system), self._store.clock.boot_id())
                segment.created = False
                segment.ordered = True
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
            segment.newest = self._newest
            if self._steps_back is not None:
                self._note_order(segment, record.seq, record.count)
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
            count = 0
            offset = piece.offset
            for record in piece.records:
                count += record.count
                self.written = record.seq + record.count
                if not record.flags & MORE:
                    self._group_written = None
                elif self._group_written is None:
                    self._group_written = (segment, offset, record.seq)
                offset += RECORD_HEADER + len(record.extra) + record.stop - record.start
            self.syncer.wrote(segment, piece.size, count)
        if 0 <= self._held < self.written:
            self._held = next((record.seq for record in self._pending if is_reserved(record.extra)), -1)
        if not last:
            self.syncer.sync_if_due()
        if self.syncer.awaited:
            self.syncer.sync_soon()
        self._progressed()

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
        if self._store.complaints.due("write", self.name):
            logger.error("LOG(%s): cannot write from seq %d on, %s - %s", self.name, seq, what, exc)
        self._active = None
        if segment in self.segments:
            self._cut_file(segment, seq, offset)
        for piece in pieces:
            if piece.segment in self.segments and piece.segment.base >= seq:
                self._remove_segment(piece.segment)
        self._group_planned = self._group_written is not None
        if kept:
            self._pending.extendleft(reversed([record for piece in pieces for record in piece.records]))
            # Which of them step back was forgotten when they were laid out.
            self._steps_back = (seq, self.end)
            self._failed(self.end, exc)
            if (self.syncer.awaited or self._held >= 0) and not self._resting:
                self._resting = True
                self._store.delay(WRITE_AGAIN, self._flush_again)
            return
        self._cut_back(seq)
        self._failed(seq, exc)
        self.syncer.give_up(seq, exc)

    def _cut_file(self, segment: Segment, seq: int, offset: int) -> None:
        """The segment ends before ``seq``, at its last whole record; the next write begins a new one."""
        # The mark first: nothing counts as written that is not in its file, also if the process ends at the next call.
        self.written = min(self.written, seq)
        try:
            # By its name: the file may have been closed, perhaps for the sake of the one that could not be made.
            self._disk.cut(segment.path, offset)
        except OSError as exc:
            # Its tail is unknown until the next segment starts at the same seq and hides it.
            if self._store.complaints.due("cut", self.name):
                logger.error("LOG(%s): cannot cut %s back - %s", self.name, segment.path, exc)
        hide_after(segment, seq)
        segment.size = offset
        segment.sealed = False

    # --- Syncing, and the files that threads use --------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Is anything written that is not yet on the device?"""
        return bool(self.syncer.segments)

    def sync(self, urgency: int = BACKGROUND) -> None:
        """Bring what was written to the device, in a thread."""
        self.syncer.sync(urgency)

    def when_durable(self, seq: int, then: Callable[[Exception | None], None]) -> None:
        """Call ``then`` when all before ``seq`` is on the device, whatever the durability, or with why it never can be.

        What is not written yet is written by the next flush. Nothing of a log without files ever is on a device: there
        it is called at once.
        """
        if self.folder is None or seq <= self.durable:
            then(None)
        else:
            self.syncer.when_durable(seq, then)

    def holds(self, segment: Segment) -> bool:
        """Is the segment still one of this log's?"""
        segments = self.segments
        i = bisect_left(segments, segment.base, key=lambda other: other.base)
        return i < len(segments) and segments[i] is segment

    def pin(self, segment: Segment) -> int:
        """A thread is going to use the segment's file: it stays until ``unpin``. StorageError if it is too late."""
        if self.closed or self._disk.closing:
            raise StorageError(f"LOG({self.name}): closed")
        fd = self._store.file(segment)
        segment.pins += 1
        return fd

    def unpin(self, segment: Segment, *, keep_open: bool = False) -> None:
        """A thread no longer uses the segment's file. ``keep_open``: it will be used again soon."""
        segment.pins -= 1
        if segment.pins:
            return
        if self.closed or not self.holds(segment):
            self._store.close_file(segment, deleted=True)
        elif self._store.crowded or (segment.sealed and segment is not self._active and not keep_open):
            self._store.close_file(segment)

    def sync_now(self) -> None:
        """Bring everything to the device and wait for it: a clean stop."""
        self.syncer.sync_now()
        self.durable = max(self.durable, self.whole)
        self.syncer.tell(self.durable)

    def close(self) -> None:
        """Seal the active segment and close the files. What was not written is not saved: call write_all() first."""
        if self._group_written is not None and self.durability != "memory":
            # The rest of this batch will never come.
            segment, offset, seq = self._group_written
            self._group_written = None
            self._cut_file(segment, seq, offset)
            self.end = seq
        if self._active is not None and not self.closed:
            piece = self._seal(self._active)
            self.syncer.note(piece.segment)
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
        self.halt()
        for segment in self.segments:
            self._store.cold.forget(segment)
            if not segment.pins:
                self._store.close_file(segment)
        self.memory.clear()
        self._give_up_loan()
        self.syncer.give_up(-1, StorageError(f"LOG({self.name}): closed"))

    def halt(self) -> None:
        """Storage cannot be trusted any more: touch nothing from now on."""
        self.closed = True

    def discard(self) -> None:
        """The topic is deleted: close all files. The caller deletes them, in a thread."""
        self.abandon()
        self.syncer.drop()

    # --- Reading ---------------------------------------------------------------------------------------------------

    def block(self, seq: int, cursor: object = None) -> Block | None:
        """The block that holds ``seq``. None: it is being read back, and ``arrived`` will be called.

        ``cursor`` is whoever goes on from there in order: see ``Cold``. DamageError says that it cannot be read, and up
        to where.
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
        return self.reader.block(seq, cursor)

    def leave(self, cursor: object) -> None:
        """The cursor reads no further."""
        self.reader.leave(cursor)

    def frame(self, seq: int) -> bytearray | None:
        """A copy of one frame, or None while it is being read back."""
        block = self.block(seq)
        if block is None:
            return None
        block.find(seq)
        return bytearray(block.view[block.start : block.stop])

    def extra(self, seq: int) -> bytes | None:
        """The extra bytes of the record that ``seq`` is in. None: as with ``block``. DamageError likewise."""
        return self.memory.extra(seq) if self.in_memory(seq) else self.reader.extra(seq)

    def look(self, seq: int, then: Callable[[Block | None, BaseException | None], None]) -> Block | None:
        """The block that holds ``seq``, for those who only look around. None: ``then`` is handed it, or an error."""
        return self.block(seq) if self.in_memory(seq) else self.reader.look(seq, then)

    def in_memory(self, seq: int) -> bool:
        return self.memory.find(seq) is not None

    def seq_at(self, time: int, then: Callable[[int, BaseException | None], None]) -> None:
        """Call ``then`` with the first seq that was published at or after ``time``, ``end`` if there is none.

        At once if memory knows it, else when a thread has read the place; the error, if there is one, says why it
        could not. ``time`` is in ns since 1970. If the clock was set back, the first place counts that reaches it.
        """
        blocks = self.memory.all_blocks() if self.folder is None else [block for block in self.blocks if block.count]
        self.reader.seq_at(time, blocks, then)

    def between(self, since: int, until: int, first: int, stop: int) -> list[TimeRange]:
        """Where in the files from ``first`` up to ``stop`` messages may be that were published in a time, by the index.

        In ns since 1970: at or after ``since``, and before ``until``. Every such message is in one of the ranges,
        whatever the clock did; they are in order.
        """
        found: list[TimeRange] = []
        # Does the range that is found next follow the last one, with nothing left out in between?
        joined = False
        for segment in self.segments:
            if segment.end <= first or segment.base >= stop:
                continue
            for begin, end, fits in segment.between(since, until):
                begin, end = max(begin, first), min(end, stop)
                if begin >= end:
                    continue
                if fits is None:
                    joined = False
                    continue
                messages = sum(b - a for a, b in segment.present(begin, end))
                if joined and found[-1].all == fits:
                    last = found[-1]
                    found[-1] = TimeRange(last.first, end, last.messages + messages, fits)
                else:
                    found.append(TimeRange(begin, end, messages, fits))
                joined = True
        return found

    def addressed(self) -> Iterator[tuple[int, int, bytes]]:
        """(first seq, count, extra bytes) of every record in the files: a side log says there whom it is for."""
        return self.reader.addressed()

    def keys(self, *, strict: bool = False) -> Iterator[KeyBlock]:
        """The keys in the files, of the newest segment first: see ``Reader.keys``."""
        return self.reader.keys(strict=strict)

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
        pending: Iterator[Record] = islice(self._pending, start, None)
        if stop - first == 1 and self._pending:
            # One of perhaps very many: those before it are not gone through.
            pending = iter((self._pending[start],))
        for record in pending:
            if record.seq >= stop:
                break
            if record.flags & DEFERRED:
                due = timestamp_of(record.block.view, record.start) + record.delay * 1_000_000
                for seq in range(max(first, record.seq), min(stop, record.seq + record.count)):
                    yield seq, due

    def deferrals(self, pumped: int = 0) -> Iterator[tuple[array[int], array[int]]]:
        """Seqs of deferred messages in the files, and when they are due: see ``Reader.deferrals``."""
        return self.reader.deferrals(pumped)

    # --- Forgetting ------------------------------------------------------------------------------------------------

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
                if (count <= limit and size <= cap) or self.in_group:
                    break
                if self.folder is None:
                    if last:
                        break
                    pins.append(self._pin_unwritten(block))
                    drop += 1
                    continue
                if stop > self.whole:
                    break
                if limit and size <= cap and awaited(block.base, stop) and self._store.cold.lend(self._lent, size):
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
            self.syncer.tell(self.durable)

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
        self._store.cold.lend(self._lent, 0)
        self._lent = 0

    def measure(self, first: int, stop: int) -> tuple[int, int]:
        """How many messages of ``first`` … ``stop - 1`` are in the files, and about how many bytes they take there."""
        return self.reader.measure(first, stop)

    def boundary(self, seq: int) -> int:
        """Up to where files go if ``free(seq)`` is called; 0 if none does."""
        found = 0
        for segment, following in zip(self.segments, self.segments[1:], strict=False):
            if max(segment.end, following.base) > seq:
                break
            found = following.base
        return found

    # --- Deleting files --------------------------------------------------------------------------------------------

    def free(self, seq: int, first_kept: Callable[[], int]) -> None:
        """Delete the segment files that lie wholly before ``seq``. Call it only when durable state allows it.

        ``first_kept``: what has to stay by now, because somebody may have gone back in the log meanwhile.
        """
        self.removal.free(seq, first_kept)

    def keep_keys_with(self, keep: Callable[[KeyBlock, int], None]) -> None:
        """Hand the keys of a segment to ``keep`` before it is deleted: see ``Removal``."""
        self.removal.keep_keys_with(keep)

    def forget(self, segment: Segment) -> None:
        """The segment's file is going to be deleted."""
        self.segments.remove(segment)
        self.reader.forget(segment)
        if not segment.pins:
            self._store.close_file(segment)

    def is_active(self, segment: Segment) -> bool:
        """Is the segment the one that is written to?"""
        return segment is self._active

    def _remove_segment(self, segment: Segment) -> None:
        """Remove the file of a write that failed, at once: the next write may begin one of the same name."""
        self.forget(segment)
        try:
            self._disk.remove(segment.path)
        except OSError as exc:
            logger.error("LOG(%s): cannot remove %s - %s", self.name, segment.path, exc)

    # --- Opening ---------------------------------------------------------------------------------------------------

    def remove_before(self, seq: int) -> None:
        """A start: files before ``seq`` were removed, and some are there again."""
        for segment in [segment for segment in self.segments if segment.base < seq]:
            self._remove_segment(segment)
        self.removal.begin_at(seq)

    def recover(self, durable: int, after: int | None) -> None:
        """Read what is in the folder.

        ``durable``: everything before this seq is known to be on the device. ``after``: after an unclean stop the
        log goes on at this seq; None after a clean stop, when it goes on where it ended.
        """
        assert self.folder is not None
        found = Recovery(self._store, self.name, self.folder, self.durability)
        found.run(durable)
        self.segments = found.segments
        self.salvaged = found.salvaged
        self.reader.set_aside = found.set_aside
        if found.first is not None:
            self.removal.begin_at(found.first)
        elif self.segments:
            self.removal.begin_at(self.segments[0].base)
        self.resume_at(max([segment.end for segment in self.segments] + ([] if after is None else [after]), default=0))
