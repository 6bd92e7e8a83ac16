"""Syncs of a log: when its written bytes go to the device, and who waits for that.

A Syncer owns which segments of its log hold unsynced bytes, runs one sync of them at a time in a thread, and moves the
log's mark ``durable``. A failed fdatasync is fatal. A file that cannot be opened, or a missing descriptor, is not: then
nothing was tried, and the sync is tried again a little later.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.broker.storage.disk import BACKGROUND, COMMIT
from flintmq.broker.storage.segment import Segment
from flintmq.broker.storage.store import NO_DESCRIPTOR, SYNC_TOTAL_AT, Store
from flintmq.errors import StorageError

if TYPE_CHECKING:
    from flintmq.broker.storage.log import Log

__all__ = ["Syncer"]

logger = logging.getLogger(__name__)

#: Unsynced bytes of one log at which a sync starts.
SYNC_AT = 16 << 20
#: Background syncs of one log are at least this many ns apart: each costs the device the same, however small it is.
SYNC_SPACING = 100_000_000
#: Seconds until a sync is tried again for which a file or a folder could not be opened.
SYNC_RETRY = 0.1


class Syncer:
    # A dict of so many attributes is looked up in several places of memory; one object of many is rarely in the cache.
    __slots__ = (
        "__weakref__",
        "_again",
        "_awaited",
        "_count",
        "_entered",
        "_failing",
        "_last",
        "_log",
        "_planned",
        "_store",
        "bytes",
        "running",
        "segments",
    )

    def __init__(self, log: Log, store: Store) -> None:
        self._log = log
        self._store = store
        # Written and not synced: segments, bytes, messages.
        self.segments: list[Segment] = []
        self.bytes = 0
        self._count = 0
        # Under way; another one is wanted after it; one is planned; when the last one ended; is a retry under way?
        self.running = False
        self._again = False
        self._planned = False
        self._last = 0
        self._failing = False
        # Is the entry of the log's folder on the device?
        self._entered = False
        # Who waits for how much to be on the device, in order.
        self._awaited: deque[tuple[int, Callable[[Exception | None], None]]] = deque()

    @property
    def awaited(self) -> bool:
        """Does anybody wait for something to be on the device?"""
        return bool(self._awaited)

    def wrote(self, segment: Segment, size: int, count: int) -> None:
        """Account for a write that succeeded: ``size`` bytes and ``count`` messages that are not synced yet."""
        store = self._store
        if not self.segments or self.segments[-1] is not segment:
            self.note(segment)
        self.bytes += size
        self._count += count
        store.unsynced += size
        store.unstarted += size
        store.room -= size
        if store.ill:
            store.recovered()

    def note(self, segment: Segment) -> None:
        """The segment was written to: it needs a sync."""
        if segment not in self.segments:
            self.segments.append(segment)
            self._store.dirty[self] = None

    def sync_if_due(self) -> None:
        store = self._store
        if self._log.durability == "fsync":
            self.sync(COMMIT)
        elif self.bytes >= SYNC_AT or (
            self._count >= store.options.sync_every > 0 and store.clock.now() - self._last >= SYNC_SPACING
        ):
            self.sync()
        elif store.unstarted >= SYNC_TOTAL_AT:
            store.sync_largest()

    def sync(self, urgency: int = BACKGROUND) -> None:
        """Bring what was written to the device, in a thread; one sync at a time."""
        if self.running:
            self._again = True
            return
        log, disk = self._log, self._store.disk
        if not self.segments or log.closed or disk.closing or not self._store.begin_sync(self, urgency):
            return
        # A segment that was freed before it was ever synced needs no sync.
        wanted = [segment for segment in self.segments if segment in log.segments]
        files: list[int] = []
        try:
            for segment in wanted:
                files.append(log.pin(segment))  # noqa: PERF401  # those before the one that fails count
        except OSError as exc:
            if not files:
                self._try_later(exc)
                self._store.end_sync()
                return
        # Without a descriptor for each of them the others follow in a second sync, and only then is all of it durable.
        pinned, rest = wanted[: len(files)], wanted[len(files) :]
        size = 0 if rest else self.bytes
        mark = log.whole
        folder = log.folder if any(not segment.folder_synced for segment in pinned) else None

        def work() -> None:
            for fd in files:
                disk.sync(fd)
            if folder is not None:
                self._sync_folder(folder)

        def done(_: None, error: BaseException | None) -> None:
            self.running = False
            for segment in pinned:
                log.unpin(segment)
                segment.folder_synced |= error is None
            try:
                self._synced(pinned, size, None if rest else mark, error)
            finally:
                # Those in the queue come before the next one of this log.
                self._store.end_sync()

        try:
            disk.submit(work, done, urgency)
        except BaseException:
            for segment in pinned:
                log.unpin(segment)
            self._store.end_sync()
            raise
        self.running = True
        self._again = bool(rest)
        # A copy: what is written from here on joins these, and must not seem to be left over from this sync.
        self.segments = list(rest)
        if not rest:
            self._count = 0
            self._forget(size)

    def _forget(self, size: int) -> None:
        """These bytes no longer wait for a sync to start."""
        self.bytes -= size
        self._store.unstarted -= size
        if not self.segments:
            self._store.dirty.pop(self, None)

    def _synced(self, segments: list[Segment], size: int, mark: int | None, error: BaseException | None) -> None:
        log, store = self._log, self._store
        if log.closed:
            # The topic was deleted meanwhile, and its folder with it: whatever went wrong, nobody minds.
            store.synced(size)
            return
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
            # Only opening a folder fails like this: what was synced is, and all of it is synced again.
            for segment in segments:
                self.note(segment)
            self.bytes += size
            store.unstarted += size
            self._try_later(error)
            return
        if error is not None:
            # Never retried: after a failed sync the kernel may call the lost pages clean.
            store.fatal(StorageError(f"cannot sync {log.folder}: {error}"))
            return
        self._failing = False
        self._last = store.clock.now()
        store.synced(size)
        if mark is not None:
            log.made_durable(mark)
        if self._again or (log.durability == "fsync" and self.segments):
            self.sync(COMMIT if log.durability == "fsync" else BACKGROUND)
        store.sync_largest()

    def _try_later(self, exc: OSError) -> None:
        if not self._failing:
            self._failing = True
            logger.error("LOG(%s): cannot open what is to be synced, it is tried again - %s", self._log.name, exc)
        self._plan(SYNC_RETRY)

    def _sync_folder(self, folder: Path) -> None:
        self._store.sync_folder(folder)
        if not self._entered:
            # The folder's own entry; otherwise the power takes it with all that is in it.
            self._store.sync_folder(folder.parent)
            self._entered = True

    def sync_now(self) -> None:
        """Bring everything to the device and wait for it: a clean stop."""
        for segment in self.segments:
            if segment in self._log.segments:
                self._store.disk.sync(self._store.file(segment))
        self.drop()
        if self._log.folder is not None:
            self._sync_folder(self._log.folder)

    def drop(self) -> None:
        """Nothing of it needs a sync any more."""
        self.segments = []
        self._store.synced(self.bytes)
        self._forget(self.bytes)

    # --- Who waits -------------------------------------------------------------------------------------------------

    def when_durable(self, seq: int, then: Callable[[Exception | None], None]) -> None:
        """Call ``then`` when all before ``seq`` is on the device, or with the reason why it never can be."""
        self._awaited.append((seq, then))
        if seq <= self._log.written:
            self.sync_soon()

    def sync_soon(self) -> None:
        """Somebody waits for what was written: a sync, but not right after the last one."""
        pause = self._last + SYNC_SPACING - self._store.clock.now()
        if pause > 0:
            self._plan(pause / 1e9)
        elif not self._planned:
            self.sync()

    def _plan(self, seconds: float) -> None:
        if not self._planned:
            self._planned = True
            self._store.delay(seconds, self._sync_planned)

    def _sync_planned(self) -> None:
        self._planned = False
        self.sync(COMMIT if self._log.durability == "fsync" else BACKGROUND)

    def tell(self, durable: int) -> None:
        """Everything before ``durable`` is on the device, or need not go there."""
        while self._awaited and self._awaited[0][0] <= durable:
            self._awaited.popleft()[1](None)

    def give_up(self, seq: int, error: Exception) -> None:
        """What lies beyond ``seq`` will never be on the device."""
        lost = []
        while self._awaited and self._awaited[-1][0] > seq:
            lost.append(self._awaited.pop()[1])
        for then in reversed(lost):
            then(error)
