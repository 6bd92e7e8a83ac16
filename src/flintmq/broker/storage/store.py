"""What all logs of a broker share: disk, clock, open files, spare memory, the cache of what was read back.

A Store owns the table of open segment files and keeps a few descriptors in reserve, so that storage can go on when
connections have taken all others. It knows how many bytes of all logs are not synced yet, and which logs have some: it
starts syncs by the total. It knows nothing of what the bytes mean.
"""

from __future__ import annotations

import errno
import functools
from collections import OrderedDict
from collections.abc import Callable
from mmap import MAP_ANON, MAP_PRIVATE, mmap
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.broker.storage.cold import Cold
from flintmq.broker.storage.complaints import Complaints
from flintmq.broker.storage.disk import SPARE, Clock, Disk
from flintmq.broker.storage.segment import Segment
from flintmq.kernel import Block, populate
from flintmq.options import NsqdOptions
from flintmq.system import shares_of_descriptors

if TYPE_CHECKING:
    from flintmq.broker.storage.syncer import Syncer

__all__ = ["LARGEST_BLOCK", "NO_DESCRIPTOR", "PAUSE_AT", "Store"]

#: Bytes of a large block; only blocks of this size are used again.
LARGEST_BLOCK = 1 << 20
#: Bytes of all logs for which no sync was started yet at which syncs of the largest are started, and those that may be
#: left then.
SYNC_TOTAL_AT, SYNC_TOTAL_LEAVES = 48 << 20, 16 << 20
#: Unsynced bytes of all logs at which publishers pause.
PAUSE_AT = 128 << 20
#: Large blocks that are kept for later use, and those that are prepared in a thread.
_POOL_BLOCKS = 8
_SPARE_BLOCKS = 12
#: Descriptors that are held open for the time when there are no others.
_RESERVE = 8
#: The process, or the system, has no descriptor left. That says nothing about the file.
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def _fresh_memory() -> list[mmap]:
    """Return memory for blocks whose pages are there already: a busy loop has no time to wait for them one by one."""
    spare = [_memory(LARGEST_BLOCK) for _ in range(_SPARE_BLOCKS)]
    populate(spare)
    return spare


def _memory(size: int) -> mmap:
    return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANON)


class Store:
    """See the module's text."""

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
        self.complaints = Complaints(clock)
        self.options = options
        self.prefix = options.id << 54
        #: Called when a sync failed: what is on the device is unknown from then on, so the broker must stop.
        self.fatal = fatal
        #: Calls a function after some seconds.
        self.delay = delay
        # Called when unsynced bytes fall below the mark at which publishers pause.
        self._relieved = relieved
        #: Called at the first write that succeeds after one failed (``ill``).
        self.recovered = recovered
        self.ill = False
        # Written and not synced: bytes of all logs, those for which no sync was started, the logs that have some.
        self.unsynced = 0
        self.unstarted = 0
        #: Bytes that logs may still write before the free space is to be looked at again.
        self.room = 1 << 62
        self.dirty: dict[Syncer, None] = {}
        # Syncs under way, and logs that wait for one.
        self._syncs = 0
        self._starting_syncs = False
        self._sync_queue: dict[Syncer, int] = {}
        # Open files, least recently used first; descriptors in reserve.
        self._files: OrderedDict[Segment, None] = OrderedDict()
        # Files open at once, unless more are in use.
        self._most_files, _ = shares_of_descriptors()
        self._most_syncs = max(2, self._most_files // 2)
        #: Does a commit wait a moment for more publishers? On a single CPU that would only keep them from running.
        self.gathers = disk.system.cpus() > 1
        self._reserve: list[int] = []
        self._reserve_folder: Path | None = None
        # Blocks that can be used again, memory for new ones.
        self._blocks: list[Block] = []
        self._spare: list[mmap] = []
        self._preparing = False
        self._busy = False
        #: What was read back.
        self.cold = Cold(options.cold_cache_bytes)

    # --- Unsynced bytes --------------------------------------------------------------------------------------------

    @property
    def congested(self) -> bool:
        return self.unsynced >= PAUSE_AT

    def expect_room(self, size: int) -> None:
        """The free space was looked at: another look is due when ``size`` bytes have been written."""
        self.room = size

    def note_health(self, *, ill: bool) -> None:
        """A write failed, or succeeded again: the broker says which."""
        self.ill = ill

    def synced(self, size: int) -> None:
        """Account for ``size`` bytes that are on the device now, or need not go there any more."""
        was = self.congested
        self.unsynced -= size
        if was and not self.congested:
            self._relieved()

    def sync_largest(self) -> None:
        """Start syncs of the logs with the most unsynced bytes, if those of all logs together are too many.

        Each log syncs by its own size too. But many logs with a little each would pause all publishers.
        """
        if self.unstarted < SYNC_TOTAL_AT:
            return
        for syncer in sorted(self.dirty, key=lambda syncer: syncer.bytes, reverse=True):
            if self.unstarted < SYNC_TOTAL_LEAVES:
                return
            if not syncer.running:
                syncer.sync()

    # --- Blocks ----------------------------------------------------------------------------------------------------

    def new_block(self, size: int, base: int) -> Block:
        if size == LARGEST_BLOCK:
            self._busy = True
            while self._blocks:
                block = self._blocks.pop()
                if block.recycle(base):
                    return block
            if len(self._spare) < _SPARE_BLOCKS and not self._preparing and not self.disk.closing:
                try:
                    self.disk.submit(_fresh_memory, self._prepared, SPARE)
                    self._preparing = True
                except RuntimeError:
                    # No thread can be started: it only saves time.
                    pass
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
        """Called now and then: fill the reserve of descriptors; free spare blocks and read ones that nobody needs."""
        if self._reserve_folder is not None:
            self.fill_reserve(self._reserve_folder)
        if not self._busy:
            self._drop_spare()
        self._busy = False
        self.cold.tidy(self.clock.now())

    def _drop_spare(self) -> None:
        self._blocks.clear()
        self._spare.clear()

    def close(self) -> None:
        """The broker has stopped: free all memory now, not when the garbage collector comes by.

        Files that are still open belong to nobody: to topics whose opening was cut off by an error.
        """
        for segment in list(self._files):
            self.close_file(segment)
        self._drop_spare()
        self.cold.clear()
        while self._release_one():
            pass

    # --- Open files ------------------------------------------------------------------------------------------------

    def file(self, segment: Segment) -> int:
        """Return the segment's open file. It may be closed by the next call, unless the segment is pinned."""
        if segment.fd >= 0:
            self._files.move_to_end(segment)
            return segment.fd
        self.adopt_file(segment, self.open(segment.path))
        return segment.fd

    def open(self, path: Path, *, create: bool = False) -> int:
        """Open a file; without a descriptor, close files that nobody uses, then give up one of the reserve."""
        while True:
            try:
                return self.disk.open(path, create=create)
            except OSError as exc:
                if exc.errno not in NO_DESCRIPTOR or not (self._close_files(0) or self._release_one()):
                    raise

    def begin_sync(self, syncer: Syncer, urgency: int) -> bool:
        """May a sync start? It pins files, so not all of a thousand logs can have one at once: the others queue up."""
        if self._syncs >= self._most_syncs:
            self._sync_queue[syncer] = urgency
            return False
        self._sync_queue.pop(syncer, None)
        self._syncs += 1
        return True

    def end_sync(self) -> None:
        """Let the next one start that waits for it."""
        self._syncs -= 1
        if self._starting_syncs:
            # One that could not start has ended at once: whoever started it goes on with the next.
            return
        self._starting_syncs = True
        try:
            while self._sync_queue and self._syncs < self._most_syncs:
                syncer = next(iter(self._sync_queue))
                syncer.sync(self._sync_queue.pop(syncer))
        finally:
            self._starting_syncs = False

    def sync_folder(self, path: Path) -> None:
        """Sync a folder's entries, which takes a descriptor. May be called in a thread."""
        while True:
            try:
                self.disk.sync_folder(path)
                return
            except OSError as exc:
                if exc.errno not in NO_DESCRIPTOR or not self._release_one():
                    raise

    def fill_reserve(self, folder: Path) -> None:
        """Hold some descriptors of a folder open, so that storage can have them when there are no others."""
        self._reserve_folder = folder
        try:
            while len(self._reserve) < _RESERVE:
                self._reserve.append(self.disk.spare_descriptor(folder))
        except OSError:
            # There are none: the time the reserve is for.
            pass

    def _release_one(self) -> bool:
        """Close a descriptor of the reserve; False if there is none. May be called in a thread."""
        try:
            fd = self._reserve.pop()
        except IndexError:
            return False
        self.disk.close_file(fd)
        return True

    def adopt_file(self, segment: Segment, fd: int) -> None:
        self._close_files(self._most_files - 1)
        segment.fd = fd
        self._files[segment] = None

    @property
    def crowded(self) -> bool:
        """Are more files open than there should be? They were all in use: one that no longer is should be closed."""
        return len(self._files) > self._most_files

    def _close_files(self, keep: int) -> bool:
        """Close files that are not pinned until ``keep`` are open; False if none was closed."""
        closed = False
        while len(self._files) > keep:
            # Nearly always the first one: the table is in the order of use.
            unused = next((segment for segment in self._files if not segment.pins), None)
            if unused is None:
                break
            self.close_file(unused)
            closed = True
        return closed

    def close_file(self, segment: Segment, *, deleted: bool = False) -> None:
        """Close the segment's file. Of one that was ``deleted`` the system frees the space now: in a thread."""
        if segment.fd < 0:
            return
        close = functools.partial(self.disk.close_file, segment.fd)
        segment.fd = -1
        self._files.pop(segment, None)
        if deleted and not self.disk.closing:
            self.disk.submit(close, _ignore)
        else:
            close()


def _ignore(_: None, error: BaseException | None) -> None:
    """A file that was deleted is closed; nobody minds whether that failed."""
