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
#: Files that are opened, synced and closed in one go: a log of small files may have thousands to sync.
FILES_AT_ONCE = 32
#: Turns of the loop without a new publish after which a commit stops waiting for more.
QUIET_TURNS = 48


class _Sync:
    """A sync under way: what it covers, and which files are still to come."""

    __slots__ = ("began", "bytes", "count", "left", "mark", "urgency")

    def __init__(self, left: deque[Segment], size: int, count: int, mark: int, began: int, urgency: int) -> None:
        self.left = left
        self.bytes = size
        self.count = count
        #: Everything before is on the device when all files are.
        self.mark = mark
        self.began = began
        self.urgency = urgency


class Syncer:
    # A dict of so many attributes is looked up in several places of memory; one object of many is rarely in the cache.
    __slots__ = (
        "__weakref__",
        "_again",
        "_awaited",
        "_count",
        "_entered",
        "_expected",
        "_failing",
        "_gathering",
        "_last",
        "_log",
        "_looking",
        "_now",
        "_planned",
        "_quiet",
        "_seen",
        "_store",
        "_until",
        "bytes",
        "segments",
    )

    def __init__(self, log: Log, store: Store) -> None:
        self._log = log
        self._store = store
        # Written and not synced: segments, bytes, messages.
        self.segments: dict[Segment, None] = {}
        self.bytes = 0
        self._count = 0
        # Under way; another one is wanted after it; one is planned; when the last one ended; is a retry under way?
        self._now: _Sync | None = None
        self._again = False
        self._planned = False
        self._last = 0
        self._failing = False
        # With fsync, publishers that were answered together publish again within microseconds, one by one. The next
        # sync waits a moment for them: for how many messages, until when; is it waiting, will it be looked at in the
        # next turn; how many messages there were at the last look, and turns without another one.
        self._expected = 0
        self._until = 0
        self._gathering = False
        self._looking = False
        self._seen = 0
        self._quiet = 0
        # Is the entry of the log's folder on the device?
        self._entered = False
        # Who waits for how much to be on the device, in order.
        self._awaited: deque[tuple[int, Callable[[Exception | None], None]]] = deque()

    @property
    def running(self) -> bool:
        """Is a sync under way?"""
        return self._now is not None

    @property
    def awaited(self) -> bool:
        """Does anybody wait for something to be on the device?"""
        return bool(self._awaited)

    def wrote(self, segment: Segment, size: int, count: int) -> None:
        """Account for a write that succeeded: ``size`` bytes and ``count`` messages that are not synced yet."""
        store = self._store
        if segment not in self.segments:
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
        self.segments[segment] = None
        self._store.dirty[self] = None

    def sync_if_due(self) -> None:
        store = self._store
        if self._log.durability == "fsync":
            if self._now is not None or not self._gathers():
                self.sync(COMMIT)
        elif self.bytes >= SYNC_AT or (
            self._count >= store.options.sync_every > 0 and store.clock.now() - self._last >= SYNC_SPACING
        ):
            self.sync()
        elif store.unstarted >= SYNC_TOTAL_AT:
            store.sync_largest()

    def sync(self, urgency: int = BACKGROUND) -> None:
        """Bring what was written to the device, in a thread; one sync at a time."""
        if self._now is not None:
            self._again = True
            return
        log, disk = self._log, self._store.disk
        if not self.segments or log.closed or disk.closing or not self._store.begin_sync(self, urgency):
            return
        self._now = sync = _Sync(
            deque(self.segments), self.bytes, self._count, log.whole, self._store.clock.now(), urgency
        )
        self._gathering = False
        self._again = False
        # What is written from here on joins others, and must not seem to be left over from this sync.
        self.segments = {}
        self._count = 0
        self._forget(sync.bytes)
        try:
            self._go_on(sync)
        except BaseException:
            self._put_back(sync)
            self._store.end_sync()
            raise

    def _go_on(self, sync: _Sync) -> None:
        """Sync the next files of it in a thread."""
        log, disk = self._log, self._store.disk
        pinned: list[Segment] = []
        files: list[int] = []
        try:
            while sync.left and len(files) < FILES_AT_ONCE:
                segment = sync.left[0]
                # One that was freed before it was ever synced needs no sync.
                if log.holds(segment):
                    files.append(log.pin(segment))
                    pinned.append(segment)
                sync.left.popleft()
        except OSError as exc:
            if not files:
                self._end(sync, exc, opening=True)
                return
            # Those that could be opened come first.
        folder = log.folder if any(not segment.folder_synced for segment in pinned) else None

        def work() -> None:
            for fd in files:
                disk.sync(fd)
            if folder is not None:
                self._sync_folder(folder)

        def done(_: None, error: BaseException | None) -> None:
            for segment in pinned:
                log.unpin(segment)
                segment.folder_synced |= error is None
            if error is not None:
                # Where a folder could not be opened all of it is synced again.
                sync.left.extendleft(reversed(pinned))
                self._end(sync, error, opening=isinstance(error, OSError) and error.errno in NO_DESCRIPTOR)
            elif not sync.left or log.closed or disk.closing:
                self._end(sync, None)
            else:
                try:
                    self._go_on(sync)
                except BaseException as exc:
                    self._end(sync, exc)

        try:
            disk.submit(work, done, sync.urgency)
        except BaseException:
            for segment in pinned:
                log.unpin(segment)
            sync.left.extendleft(reversed(pinned))
            raise

    def _put_back(self, sync: _Sync) -> None:
        """The files that are left of a sync wait for another one."""
        self._now = None
        for segment in sync.left:
            self.note(segment)
        self.bytes += sync.bytes
        self._store.unstarted += sync.bytes

    def _end(self, sync: _Sync, error: BaseException | None, *, opening: bool = False) -> None:
        """A sync has ended. ``opening``: not all of it was tried, for want of a file or a descriptor."""
        self._expect(sync.count, sync.began)
        try:
            self._synced(sync, error, opening)
        finally:
            # Those in the queue come before the next one of this log.
            self._store.end_sync()

    def _expect(self, count: int, began: int) -> None:
        """A sync of ``count`` messages has ended: their publishers are likely to join those that wait already."""
        now = self._store.clock.now()
        self._expected = count + self._count
        self._until = now + (now - began) // 2

    def _gathers(self) -> bool:
        """Return whether a commit waits for more publishers: at most half as long as the last sync took."""
        store = self._store
        if self._count >= self._expected or store.clock.now() >= self._until or not store.gathers:
            return False
        if not self._gathering:
            self._gathering = True
            self._seen = self._count
            self._quiet = 0
            self._look_soon()
        return True

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._store.delay(0, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        if not self._gathering:
            # All that were expected came, and their sync has begun.
            return
        self._quiet = self._quiet + 1 if self._count == self._seen else 0
        self._seen = self._count
        if self._quiet < QUIET_TURNS and self._store.clock.now() < self._until:
            self._look_soon()
            return
        self._gathering = False
        self.sync(COMMIT)

    def _forget(self, size: int) -> None:
        """These bytes no longer wait for a sync to start."""
        self.bytes -= size
        self._store.unstarted -= size
        if not self.segments:
            self._store.dirty.pop(self, None)

    def _synced(self, sync: _Sync, error: BaseException | None, opening: bool) -> None:
        log, store = self._log, self._store
        if opening and not log.closed:
            assert isinstance(error, OSError)
            self._put_back(sync)
            self._try_later(error)
            return
        if sync.left and error is None and not log.closed:
            # The broker stops: it syncs what is left when no thread works any more.
            self._put_back(sync)
            return
        self._now = None
        if log.closed:
            # The topic was deleted meanwhile, and its folder with it: whatever went wrong, nobody minds.
            store.synced(sync.bytes)
            return
        if error is not None:
            # Never retried: after a failed sync the kernel may call the lost pages clean.
            store.fatal(StorageError(f"cannot sync {log.folder}: {error}"))
            return
        self._failing = False
        self._last = store.clock.now()
        store.synced(sync.bytes)
        log.made_durable(sync.mark)
        if log.durability == "fsync":
            if (self._again or self.segments) and not self._gathers():
                self.sync(COMMIT)
        elif self._again:
            self.sync()
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
        for segment in (*(self._now.left if self._now is not None else ()), *self.segments):
            if self._log.holds(segment):
                self._store.disk.sync(self._store.file(segment))
        self.drop()
        if self._log.folder is not None:
            self._sync_folder(self._log.folder)

    def drop(self) -> None:
        """Nothing of it needs a sync any more."""
        self.segments = {}
        self._gathering = False
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
