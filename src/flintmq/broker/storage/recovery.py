"""What a start finds in a log's folder: whole segments are taken up, unsealed ones are salvaged and sealed.

A Recovery reads one folder, before anything is appended. What may be in the page cache only is copied to a new file
and synced before it counts; what cannot be read is set aside, never guessed at. The log takes over what was found.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from flintmq.broker.storage.disk import NO_ROOM, start_needs
from flintmq.broker.storage.segment import (
    CHUNK_BYTES,
    FILE_HEADER,
    RECORD_HEADER,
    Salvage,
    Segment,
    file_header,
    guess_header,
    hide_after,
    new_salt,
    read_footer,
    read_header,
)
from flintmq.broker.storage.store import Store
from flintmq.kernel import RecordParser

__all__ = ["FIRST", "Recovery"]

logger = logging.getLogger(__name__)

#: The name of a segment that was set aside; with a number, where one that began at the same seq had been before.
SET_ASIDE = re.compile(r"([0-9a-f]{16})(-[0-9]+)?\.bad")
#: Those of a segment, and of a mark.
_OWN = re.compile(r"[0-9a-f]{16}\.(seg|first)")

#: A file named by a seq and this says that nothing from that seq up to the first segment was ever published: the
#: segment before the gap, which an unclean stop left, was removed.
FIRST = ".first"


class Recovery:
    """``run`` fills the attributes."""

    def __init__(self, store: Store, name: str, folder: Path, durability: str) -> None:
        self._store = store
        self._disk = store.disk
        self._name = name
        self._folder = folder
        self._durability = durability
        self.segments: list[Segment] = []
        #: Seqs of files that could not be made sense of at all.
        self.set_aside: list[tuple[int, int]] = []
        #: Seq and extra bytes of the records beyond what was known to be on the device.
        self.salvaged: list[tuple[int, bytes]] = []
        #: The lowest seq that was not removed; None if only the segments tell.
        self.first: int | None = None
        self._names_changed = False

    def run(self, durable: int) -> None:
        """Read the folder. ``durable``: everything before this seq is known to be on the device."""
        paths, firsts = [], []
        for name in self._disk.names(self._folder):
            path = self._folder / name
            if name.endswith(".tmp"):
                self._disk.remove(path)
            elif not _OWN.fullmatch(name):
                # Keys, what is set aside, and what somebody else put there.
                continue
            elif name.endswith(".seg"):
                paths.append(path)
            else:
                firsts.append(int(path.stem, 16))
        for i, path in enumerate(paths):
            self._recover_segment(path, paths[i + 1] if i + 1 < len(paths) else None, durable)
        if self._names_changed:
            # All that a start leaves is called durable. A file that came back later would be taken for whole.
            self._store.sync_folder(self._folder)
        for name in self._disk.names(self._folder):
            # Files of keys are set aside, too: no message was in them.
            if (match := SET_ASIDE.fullmatch(name)) is not None:
                first = int(match[1], 16)
                # If a segment begins at the same seq, nothing in the other file was known to be on the device: a log
                # goes on behind all that was.
                stop = min((segment.base for segment in self.segments if segment.base >= first), default=durable)
                if first < stop and (first, stop) not in self.set_aside:
                    self.set_aside.append((first, stop))
        for segment, later in zip(self.segments, self.segments[1:], strict=False):
            # A segment that could not be cut back is hidden by the one that was begun after it.
            if segment.end > later.base:
                hide_after(segment, later.base)
        self._read_marks(firsts)

    def _read_marks(self, firsts: list[int]) -> None:
        """Take the last mark, if its segment is removed; those that a crash left over must never count later."""
        if firsts and (not self.segments or firsts[-1] <= self.segments[0].base):
            self.first = firsts.pop()
        for first in firsts:
            self._disk.remove(self._folder / f"{first:016x}{FIRST}")
        if firsts:
            self._store.sync_folder(self._folder)

    def _recover_segment(self, path: Path, later: Path | None, durable: int) -> None:
        fd = self._store.open(path)
        try:
            size = self._disk.size(fd)
            head = self._disk.read(fd, FILE_HEADER + RECORD_HEADER, 0)
            segment = read_header(path, head) or guess_header(path, head)
            sealed = segment is not None and read_footer(self._disk, fd, size, segment)
        except OSError:
            self._disk.close_file(fd)
            raise
        if segment is None:
            self._disk.close_file(fd)
            if later is None and size < FILE_HEADER:
                # The power went while it was made: nothing was in it.
                self._remove(path)
                return
            logger.error("LOG(%s): the header of %s is damaged, the file is set aside", self._name, path)
            self._put_aside(path)
            return
        if sealed:
            if segment.end <= durable:
                self._store.adopt_file(segment, fd)
                segment.folder_synced = True
                self.segments.append(segment)
                return
            # It was sealed, but perhaps never synced: its footer may be there and what is before it not.
            segment = Segment(path, segment.base, segment.salt, segment.boot)
        self._store.adopt_file(segment, fd)
        # Other files are opened while it is read.
        segment.pins += 1
        segment.folder_synced = True
        # Where a write failed and could not be cut back, the next file holds what came instead.
        limit = int(later.stem, 16) if later is not None else sys.maxsize
        salvage = Salvage(self._disk, fd, size, segment, durable, limit)
        salvage.run()
        for first, stop in salvage.damage:
            logger.error("LOG(%s): seqs %d to %d in %s were not written whole", self._name, first, stop - 1, path)
        copy = self._copy(segment, salvage)
        segment.pins -= 1
        self._settle(segment, fd, salvage, copied=copy is not None)
        if copy is not None:
            self.segments.append(copy)

    def _lost(self, salvage: Salvage) -> list[tuple[int, int]]:
        # Of durability `memory` much never reaches a file.
        return salvage.lost if self._durability != "memory" else []

    def _copy(self, segment: Segment, salvage: Salvage) -> Segment | None:
        """Copy what may be in the page cache only to a new file, which is sealed and synced."""
        if not salvage.runs:
            return None
        base = salvage.runs[0].first
        # Of the whole file: then the copy takes its name.
        path = segment.path.with_name(f"{base:016x}.seg") if segment.spans else segment.path
        size = FILE_HEADER + sum(run.size for run in salvage.runs)
        with start_needs(path, size):
            return self._write_copy(segment, salvage, path)

    def _write_copy(self, segment: Segment, salvage: Salvage, path: Path) -> Segment:
        copy = Segment(path, salvage.runs[0].first, new_salt(self._disk.system), segment.boot)
        temporary = path.with_suffix(".tmp")
        out = self._store.open(temporary, create=True)
        try:
            self._fill_copy(copy, out, segment, salvage)
        except OSError:
            # Half a copy would only take the room that is missing.
            self._disk.close_file(out)
            self._disk.remove(temporary)
            raise
        # Adopted first: if its name cannot be changed or synced, the store closes it.
        self._store.adopt_file(copy, out)
        self._disk.rename(temporary, path)
        self._store.sync_folder(self._folder)
        copy.folder_synced = True
        return copy

    def _fill_copy(self, copy: Segment, out: int, segment: Segment, salvage: Salvage) -> None:
        self._disk.write(out, [file_header(copy)], 0)
        parser = RecordParser(copy.salt, copy.base, sys.maxsize, CHUNK_BYTES)
        for run in salvage.runs:
            records = salvage.records(run, copy.salt)
            self._disk.write(out, [records], copy.size)
            copy.note_records(parser, records, copy.size, run.first)
            self.salvaged.extend((seq, extra) for seq, _, _, extra in parser.extras)
        if not segment.spans:
            copy.lost = self._lost(salvage)
        self._disk.write(out, [copy.seal()], copy.size)
        self._disk.sync(out)

    def _seal(self, segment: Segment, fd: int) -> None:
        """Write the footer. Without room for it the next start reads the records again, as this one did."""
        size = segment.size
        try:
            self._disk.write(fd, [segment.seal()], size)
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
            logger.warning("LOG(%s): %s has no footer, the next start takes longer - %s", self._name, segment.path, exc)
            segment.sealed = False
            segment.size = size
            self._disk.truncate(fd, size)

    def _settle(self, segment: Segment, fd: int, salvage: Salvage, *, copied: bool) -> None:
        """Seal a segment that has no footer, or remove it if nothing was known to be on the device."""
        lost = self._lost(salvage)
        if segment.spans:
            segment.lost = lost
            self._disk.truncate(fd, segment.size)
            self._seal(segment, fd)
            self._disk.sync(fd)
            self.segments.append(segment)
            return
        self._store.close_file(segment)
        if copied:
            return
        if lost:
            logger.error("LOG(%s): nothing in %s can be read, it is set aside", self._name, segment.path)
            self._put_aside(segment.path)
        else:
            self._remove(segment.path)

    def _remove(self, path: Path) -> None:
        self._disk.remove(path)
        self._names_changed = True

    def _put_aside(self, path: Path) -> None:
        target, number = path.with_suffix(".bad"), 1
        while self._disk.exists(target):
            number += 1
            target = path.with_name(f"{path.stem}-{number}.bad")
        self._disk.rename(path, target)
        self._names_changed = True
