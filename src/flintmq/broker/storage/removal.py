"""Which segment files of a log are deleted, and what is kept of them.

A Removal owns the mark ``first``, the lowest seq that was not removed, and deletes files in a thread, oldest first. The
keys of a file are saved elsewhere before. Where a gap follows a deleted file, which an unclean stop left, a small file
named by a seq says that nothing was ever published between that seq and what is there (see ``recovery.FIRST``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.broker.storage.keys import KeyBlock
from flintmq.broker.storage.reader import READ_TRIES
from flintmq.broker.storage.recovery import FIRST
from flintmq.broker.storage.segment import Segment
from flintmq.broker.storage.store import Store
from flintmq.errors import StorageError

if TYPE_CHECKING:
    from flintmq.broker.storage.log import Log

__all__ = ["Removal"]

logger = logging.getLogger(__name__)


class Removal:
    def __init__(self, log: Log, store: Store, base: int, progressed: Callable[[], None]) -> None:
        self._log = log
        self._store = store
        # Called when files were removed.
        self._progressed = progressed
        #: The lowest seq that was not removed.
        self.first = base
        # Files are being deleted; what is to be deleted after them; who takes the keys.
        self._removing = False
        self._free_next: Callable[[], None] | None = None
        self._keep_keys: Callable[[KeyBlock, int], None] | None = None

    def begin_at(self, seq: int) -> None:
        """The log says: nothing from ``seq`` on was removed."""
        self.first = seq

    def resumed(self) -> None:
        """A start: the log goes on at its end. Without files nothing before that is left, unless a mark says so."""
        if not self._log.segments and self._mark_of(self.first) is None:
            self.first = self._log.end

    def keep_from(self, seq: int) -> None:
        """A start: a reader stands at ``seq``, and nothing was ever durable from there up to the first segment.

        A mark says so from now on: the next segment begins behind the gap.
        """
        folder = self._log.folder
        if folder is None or seq >= self.first:
            return
        self.first = seq
        # Without it the reader is told, after the next start, that something is gone.
        with contextlib.suppress(OSError):
            self._store.disk.close_file(self._store.disk.open(folder / f"{seq:016x}{FIRST}", create=True))
            self._store.sync_folder(folder)

    def _mark_of(self, seq: int) -> Path | None:
        """Return the file that marks ``seq``, if it exists."""
        folder = self._log.folder
        mark = folder / f"{seq:016x}{FIRST}" if folder is not None else None
        return mark if mark is not None and self._store.disk.exists(mark) else None

    def keep_keys_with(self, keep: Callable[[KeyBlock, int], None]) -> None:
        """Hand the keys of a segment to ``keep`` before it is removed, and how many are in those after it.

        It is called in a thread. Keys outlive their messages.
        """
        self._keep_keys = keep

    def free(self, seq: int, first_kept: Callable[[], int]) -> None:
        """Remove the segment files that lie wholly before ``seq``. Call it only when durable state allows it.

        ``first_kept``: what has to stay by now, because somebody may have gone back in the log meanwhile.
        """
        if self._store.disk.closing or self._log.closed:
            return
        if self._removing:
            self._free_next = functools.partial(self.free, seq, first_kept)
            return
        removed: list[Segment] = []
        seq = min(seq, first_kept())
        while self._log.segments and not self._log.is_active(self._log.segments[0]) and not self._log.segments[0].pins:
            segment = self._log.segments[0]
            stop = self._log.segments[1].base if len(self._log.segments) > 1 else segment.end
            if max(segment.end, stop) > seq:
                break
            if segment.key_count and self._keep_keys is not None:
                self._save_keys(segment, self._keep_keys, functools.partial(self.free, seq, first_kept))
                break
            removed.append(segment)
            self._log.forget(segment)
        if removed:
            self._remove_files(removed)
            self._progressed()

    def _remove_files(self, segments: list[Segment]) -> None:
        """Remove the files of segments that are forgotten, oldest first, in a thread: giving back space takes a while.

        Where a gap follows them, no message was ever there: a mark remembers where they ended.
        """
        assert self._log.folder is not None
        folder, disk = self._log.folder, self._store.disk
        old, self.first = self.first, segments[-1].end
        follows = self._log.segments[0].base if self._log.segments else self._log.end
        stale = self._mark_of(old)
        mark = folder / f"{self.first:016x}{FIRST}" if follows > self.first else None

        def work() -> None:
            if stale is not None:
                # It must not outlive the files: it would say that what was in them never was.
                disk.remove(stale)
                self._store.sync_folder(folder)
            if mark is not None and self._log.durability != "memory":
                # Without it readers are told that something is gone: no reason to keep the files.
                with contextlib.suppress(OSError):
                    disk.close_file(disk.open(mark, create=True))
            for segment in segments:
                # It may have been removed already, with the whole topic.
                with contextlib.suppress(FileNotFoundError):
                    disk.remove(segment.path)

        disk.submit(work, self._removed)
        self._removing = True

    def _removed(self, _: None, error: BaseException | None) -> None:
        self._removing = False
        if error is not None:
            logger.error("LOG(%s): cannot remove a segment - %s", self._log.name, error)
        following, self._free_next = self._free_next, None
        if following is not None:
            following()

    def _save_keys(self, segment: Segment, keep: Callable[[KeyBlock, int], None], go_on: Callable[[], None]) -> None:
        """Save the keys of the oldest segment elsewhere, in a thread; then removing goes on."""
        try:
            fd = self._log.pin(segment)
        except OSError as exc:
            logger.error("LOG(%s): cannot open %s - %s", self._log.name, segment.path, exc)
            return
        later = sum(other.key_count - other.reserved_keys for other in self._log.segments[1:])

        def work() -> None:
            try:
                keys = self._log.reader.keys_in(segment, fd)
            except OSError as exc:
                raise StorageError(f"the keys in {segment.path} cannot be read: {exc}") from exc
            keep(keys, later)

        def done(_: None, error: BaseException | None) -> None:
            self._log.unpin(segment)
            if self._log.closed or self._store.disk.closing:
                return
            if isinstance(error, StorageError):
                segment.key_failures += 1
                if segment.key_failures >= READ_TRIES:
                    # It cannot stay for ever. What is published again with one of its keys is stored again.
                    logger.error("LOG(%s): %s, they are given up", self._log.name, error)
                    error = None
            if error is not None:
                logger.error("LOG(%s): %s stays for its keys - %s", self._log.name, segment.path, error)
                return
            segment.key_count = 0
            go_on()

        try:
            self._store.disk.submit(work, done)
        except BaseException:
            self._log.unpin(segment)
            raise
