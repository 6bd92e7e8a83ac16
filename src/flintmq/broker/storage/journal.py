"""What happened to messages, topics and channels: one append-only file per broker, with snapshots.

The Journal owns its files and what is durable about everything but the messages' bytes. Owners append to it; only the
Broker replays it, at the start, into plain ``State`` objects. It knows nothing of sockets, blocks or segments.

A journal file ``journal-<n>`` is a header and batches, one per write:

    header   magic (8) | version (2) | reserved (2) | salt (4) | number (8) | boot id (16) | crc (4)
    batch    salt (4) | length (4) | crc of the entries (4) | entries
    entry    kind (1) | length (4) | payload

A snapshot ``snapshot-<n>`` has the same form and holds the state before ``journal-<n>``, so that everything older can
go. It is built in slices while ``journal-<n>`` is already being written; that is right because every entry states
what is, not what changed: replaying one that the snapshot already knows changes nothing.

Entries of kind DONE and BACK are numbers, because there are many; all others are MessagePack lists ``[verb, …]``.
Files have their space allocated ahead, so that finishing messages can free a full disk.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from typing import Any, Protocol

import google_crc32c

from flintmq.broker.storage.disk import BACKGROUND, COMMIT, Clock, Disk, pack_numbers, start_needs, unpack_numbers
from flintmq.broker.storage.notes import (
    ANOTHER_BOOT,
    NEVER,
    NOTES,
    SIDE,
    ChannelState,
    State,
    TopicState,
    decode,
    encode,
)
from flintmq.errors import FormatError, StorageError

__all__ = [
    "ANOTHER_BOOT",
    "NEVER",
    "SIDE",
    "ChannelState",
    "Journal",
    "State",
    "TopicState",
    "read_batches",
    "read_head",
]

logger = logging.getLogger(__name__)

_MAGIC = b"FLINTJNL"
#: 2 has notes that version 1 does not know: parts of a channel's state, redrives.
_VERSION = 2
_file_head = Struct(">8sHHIQ16s")
_batch_head = Struct(">III")
_entry_head = Struct(">BI")
_number = Struct(">I")
#: The header of a file with its checksum; batches follow.
FILE_HEADER = _file_head.size + 4

DONE, BACK, NOTE = 1, 2, 3
#: Bytes of the entry at the beginning of a batch that says up to where the file was on the device. It is a DONE of
#: channel 0, which no channel is: replaying it changes nothing.
MARK_SIZE = _entry_head.size + 4 + 16

#: A new file is begun at this size.
ROLL_AT = 8 << 20
_SPACE = ROLL_AT + (1 << 20)
#: Less is not allocated ahead.
_LEAST_SPACE = 64 << 10
#: Bytes that a start leaves free when it allocates ahead: it has a snapshot to write, and topics have files to begin.
_SPARE = 4 << 20
#: Nanoseconds until a new file is tried again that could not be begun; doubled each time, up to the other one.
FIRST_ROLL_DELAY = 1_000_000_000
LONGEST_ROLL_DELAY = 64_000_000_000
#: Notes that go into a snapshot before the loop is handed back.
_SLICE = 50
#: Notes that one part of a channel counts as, where it needs several.
_LARGE = 10


class Journalled(Protocol):
    """A channel, as the journal sees it."""

    id: int

    def take_done(self) -> bytes:
        """Finished since the last call: pairs (first, stop)."""

    def take_back(self) -> bytes:
        """Return what was requeued since the last call: rows (seq, attempts, due on the clock, due on the wall)."""


class Journal:
    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        folder: Path,
        *,
        fatal: Callable[[BaseException], None],
        later: Callable[[Callable[[], None]], Any],
        snapshot: Callable[[], Iterator[tuple[Any, ...]]] | None,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._folder = folder
        self._fatal = fatal
        #: Runs a function in the next loop turn.
        self._later = later
        #: Yields the notes that describe the whole broker, for a snapshot. None: nobody can, so that it never rolls.
        self._snapshot = snapshot
        self._number = 0
        # The newest file that is on the device from its beginning.
        self._settled = 0
        self._fd = -1
        self._salt = 0
        self._offset = 0
        self._buffer: list[bytes] = []
        self._dirty: dict[Journalled, None] = {}
        #: Positions count batches: ``noted`` is what was said, ``synced`` what is on the device.
        self.noted = 0
        self._written = 0
        self.synced = 0
        self._syncing = False
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._snapshotting = False
        # A new file could not be begun: on the clock, when to try again, and how long to wait after that.
        self._roll_after = 0
        self._roll_delay = FIRST_ROLL_DELAY
        # Of the present file: up to where it is on the device, and up to where it says so.
        self._safe = 0
        self._marked = 0
        # Found by ``recover``: what is damaged, in which files; is there no file at all?
        self.damage: list[str] = []
        self._damaged_files: dict[Path, None] = {}
        # Where what counts in each journal ends.
        self._ends: dict[Path, int] = {}
        self.is_new = False
        self.closed = False
        # Why nothing more is written, if a write or a sync has failed.
        self._failure: StorageError | None = None

    # --- Writing ---------------------------------------------------------------------------------------------------

    def note(self, verb: str, *args: Any) -> int:
        """Say that something is so; a position for ``when_synced``. It is written by the next ``flush``."""
        self._collect()
        self._buffer.append(_entry(NOTE, encode(NOTES[verb](*args))))
        self.noted += 1
        return self.noted

    def touch(self, channel: Journalled) -> None:
        """Messages of this channel were finished or requeued; it is asked at the next write."""
        self._dirty[channel] = None

    @property
    def size(self) -> int:
        """Bytes in the file that is being written."""
        return self._offset

    @property
    def pending(self) -> bool:
        return bool(self._buffer or self._dirty)

    def _collect(self) -> None:
        if not self._dirty:
            return
        channels, self._dirty = self._dirty, {}
        for channel in channels:
            # Back before done: what was requeued and then finished is finished.
            back = channel.take_back()
            done = channel.take_done()
            ident = _number.pack(channel.id)
            if back:
                self._buffer.append(_entry(BACK, ident + pack_numbers(back)))
                self.noted += 1
            if done:
                self._buffer.append(_entry(DONE, ident + pack_numbers(done)))
                self.noted += 1

    def forget(self, channel: Journalled) -> None:
        """The channel is going; what it had to say no longer matters."""
        self._dirty.pop(channel, None)

    def flush(self) -> None:
        """Write everything said so far. An error is fatal: without its journal the broker cannot keep its word."""
        self._collect()
        if not self._buffer or self.closed:
            return
        if self._safe > self._marked:
            # The first batch of every file says something, so that silence is known for that of an older version.
            self._marked = self._safe
            mark = pack_numbers(array("q", (self._safe, self._safe)))
            self._buffer.insert(0, _entry(DONE, _number.pack(0) + mark))
        entries = b"".join(self._buffer)
        self._buffer.clear()
        batch = _batch_head.pack(self._salt, len(entries), google_crc32c.extend(self._salt, entries))
        try:
            self._offset += self._disk.write(self._fd, [batch, entries], self._offset)
        except OSError as exc:
            self._fail(StorageError(f"cannot write the journal in {self._folder}: {exc}"))
            return
        self._written = self.noted
        self._roll_if_due()

    def _fail(self, failure: StorageError) -> None:
        """Nothing can be added behind what was not written, and no snapshot may say that it was."""
        self._failure = self._failure or failure
        self.closed = True
        self._fatal(failure)

    def _check(self) -> None:
        """StorageError if a write or a sync has failed, or storage elsewhere: what builds on it must not go on."""
        if self._failure is not None or self.closed:
            raise self._failure or StorageError(f"the journal in {self._folder} takes no more")

    # --- Syncing ---------------------------------------------------------------------------------------------------

    def when_synced(self, position: int, then: Callable[[], None]) -> None:
        """Call ``then`` as soon as everything up to ``position`` is on the device."""
        if position <= self.synced:
            then()
            return
        self._waiting.append((position, then))
        self.sync(COMMIT)

    def sync(self, urgency: int = BACKGROUND) -> None:
        self.flush()
        if self._syncing or self._written <= self.synced or self.closed or self._disk.closing:
            return
        self._syncing = True
        fd, mark = self._fd, self._written
        done = functools.partial(self._sync_done, mark, self._number, self._offset)
        self._disk.submit(lambda: self._disk.sync(fd), done, urgency)

    def _sync_done(self, mark: int, number: int, offset: int, _: None, error: BaseException | None) -> None:
        self._syncing = False
        if error is not None:
            self._fail(StorageError(f"cannot sync the journal in {self._folder}: {error}"))
            return
        if number == self._number:
            self._safe = offset
        # Here, too: where somebody always waits for a sync, one runs at every flush.
        self._roll_if_due()
        self._reached(mark)

    def _reached(self, mark: int) -> None:
        """Everything up to ``mark`` is on the device: tell those who wait for it."""
        self.synced = max(self.synced, mark)
        ready = [then for position, then in self._waiting if position <= mark]
        self._waiting = [pair for pair in self._waiting if pair[0] > mark]
        for then in ready:
            then()
        if self._waiting:
            self.sync(COMMIT)

    def sync_now(self) -> None:
        """Write and sync everything said so far, and wait for it: at the start, before anybody is served."""
        self.flush()
        self._check()
        self._disk.sync(self._fd)
        self._safe = self._offset
        self._reached(self._written)

    def save(self, *, clean: bool) -> None:
        """Write and sync everything; with ``clean`` the next start may trust that nothing came after it."""
        if not self.closed:
            self.flush()
            self._disk.sync(self._fd)
            if clean:
                self._safe = self._offset
                self.note("clean")
                self.flush()
                self._disk.sync(self._fd)

    def halt(self) -> None:
        """Write nothing from here on."""
        self.closed = True

    def close(self) -> None:
        """Close the file. What was not saved is lost."""
        self.closed = True
        if self._fd >= 0:
            self._disk.close_file(self._fd)
            self._fd = -1

    # --- Files -----------------------------------------------------------------------------------------------------

    def _begin(self, name: str, space: int = 0) -> tuple[int, int]:
        """A new file with its header, and ``space`` allocated ahead; (file, salt)."""
        salt = int.from_bytes(self._disk.system.randbytes(4), "big") or 1
        fd = self._disk.open(self._folder / name, create=True)
        try:
            if space:
                self._disk.allocate(fd, space)
            head = _file_head.pack(_MAGIC, _VERSION, 0, salt, self._number, self._clock.boot_id())
            self._disk.write(fd, [head, _number.pack(google_crc32c.extend(0, head))], 0)
        except OSError:
            # The name must be free for the next try.
            self._disk.close_file(fd)
            self._disk.remove(self._folder / name)
            raise
        return fd, salt

    def start(self, state: State) -> None:
        """Begin a new file after ``recover``. Everything up to here is on the device when this returns.

        After an unclean stop ``secure`` sees to that.
        """
        if state.clean:
            # A process that is killed at the very end of its stop leaves its last words in the page cache.
            last = self._disk.open(self._folder / f"journal-{self._number:08d}")
            try:
                self._disk.sync(last)
            finally:
                self._disk.close_file(last)
        state.clean = False
        self._number += 1
        name = f"journal-{self._number:08d}"
        space = _SPACE
        while True:
            try:
                if space > _LEAST_SPACE and self._disk.free(self._folder) < space + _SPARE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._fd, self._salt = self._begin(name, space)
                break
            except OSError as exc:
                # A full disk is no reason not to start: consumers can empty it.
                if space == _SPACE:
                    logger.warning("JOURNAL: cannot allocate space ahead, trying with less - %s", exc)
                if not space:
                    with start_needs(self._folder / name, _LEAST_SPACE):
                        raise
                space = space // 2 if space > _LEAST_SPACE else 0
        self._offset = self._safe = FILE_HEADER
        self.note("open", self._clock.boot_id())
        self.flush()
        self._check()
        self._disk.sync(self._fd)
        self._disk.sync_folder(self._folder)
        self._settled = self._number
        self.synced = self._written

    def _roll_if_due(self) -> None:
        if self._offset < ROLL_AT or self._snapshot is None or self.closed:
            return
        busy = self._snapshotting or self._syncing or self._disk.closing
        if not busy and self._clock.now() >= self._roll_after:
            self._roll()

    def _roll(self) -> None:
        """Go on in a new file and take a snapshot, so that the old one can go."""
        old = self._fd
        folder = -1
        self._number += 1
        try:
            # First of all: a new file whose entry cannot be synced, for want of a descriptor, would be the end.
            folder = self._disk.open_folder(self._folder)
            fd, salt = self._begin(f"journal-{self._number:08d}", _SPACE)
        except OSError as exc:
            # No room for a new file: go on in the old one, which still has some.
            if folder >= 0:
                self._disk.close_file(folder)
            self._number -= 1
            seconds = self._roll_delay // 1_000_000_000
            logger.warning(
                "JOURNAL: cannot begin a new file, going on with the old one, trying again in %d s - %s", seconds, exc
            )
            self._roll_after = self._clock.now() + self._roll_delay
            self._roll_delay = min(2 * self._roll_delay, LONGEST_ROLL_DELAY)
            return
        self._roll_delay = FIRST_ROLL_DELAY
        # The old file must be whole before the new one counts.
        self._fd, self._salt, self._offset = fd, salt, FILE_HEADER
        self._safe, self._marked = FILE_HEADER, 0
        self._syncing = True
        self.note("open", self._clock.boot_id())
        self.flush()
        mark = self._written

        def work() -> None:
            try:
                self._disk.sync(old)
                self._disk.sync(fd)
                self._disk.sync_entries(folder)
            finally:
                self._disk.close_file(old)
                self._disk.close_file(folder)

        number, offset = self._number, self._offset

        def done(result: None, error: BaseException | None) -> None:
            if error is None:
                self._settled = number
            # Whoever waited for this may write so much that the next file is begun.
            self._sync_done(mark, number, offset, result, error)
            if error is None:
                self.take_snapshot()

        self._disk.submit(work, done, COMMIT)

    def take_snapshot(self) -> None:
        """Write down the whole state, a slice per loop turn."""
        if self._snapshot is None or self._snapshotting or self.closed:
            return
        if self._settled != self._number:
            # Beside a snapshot of its number, a journal that does not begin whole is damaged. It takes its own, later.
            return
        self._snapshotting = True
        number = self._number
        notes = self._snapshot()
        entries: list[bytes] = [_encoded(("open", self._clock.boot_id()))]

        def give_up(error: BaseException) -> None:
            self._snapshotting = False
            logger.error("JOURNAL: cannot write a snapshot, keeping the old files - %s", error)

        def slice_() -> None:
            try:
                write_slice()
            except Exception as exc:
                give_up(exc)

        def write_slice() -> None:
            if self.closed or self._disk.closing:
                return
            # What the slice says must not be newer than what the journal says: a channel's finished messages
            # that are not written yet would otherwise be known to the snapshot alone. Harmless, they are finished.
            left = _SLICE
            while left > 0:
                note = next(notes, None)
                if note is None:
                    self._disk.submit(lambda: self._write_snapshot(number, entries), done)
                    return
                entries.append(_encoded(note))
                left -= _LARGE if note[0] == "channel_more" else 1
            self._later(slice_)

        def done(_: None, error: BaseException | None) -> None:
            self._snapshotting = False
            if error is not None:
                give_up(error)

        slice_()

    def secure(self) -> None:
        """Write the whole state down and wait for it: after an unclean start.

        What was read back may be in the page cache only, and all that comes after builds on it.
        """
        assert self._snapshot is not None
        self._check()
        entries = [_encoded(("open", self._clock.boot_id()))]
        entries += [_encoded(note) for note in self._snapshot()]
        with start_needs(self._folder / f"snapshot-{self._number:08d}", sum(map(len, entries))):
            self._write_snapshot(self._number, entries)

    def release(self) -> None:
        """Give back what was allocated ahead for the files that were read: a start on a full disk needs the room."""
        for path, end in self._ends.items():
            if path not in self._damaged_files:
                fd = self._disk.open(path)
                try:
                    if self._disk.size(fd) > end:
                        self._disk.truncate(fd, end)
                finally:
                    self._disk.close_file(fd)

    def _write_snapshot(self, number: int, entries: list[bytes]) -> None:
        name = f"snapshot-{number:08d}"
        temporary = self._folder / f"{name}.tmp"
        if self._disk.exists(temporary):
            self._disk.remove(temporary)
        fd, salt = self._begin(f"{name}.tmp")
        try:
            offset = FILE_HEADER
            for i in range(0, len(entries), 1000):
                some = b"".join(entries[i : i + 1000])
                head = _batch_head.pack(salt, len(some), google_crc32c.extend(salt, some))
                offset += self._disk.write(fd, [head, some], offset)
            end = _batch_head.pack(salt, 0, google_crc32c.extend(salt, b""))
            self._disk.write(fd, [end], offset)
            self._disk.sync(fd)
        finally:
            self._disk.close_file(fd)
        if self._failure is not None:
            raise self._failure
        self._disk.rename(temporary, self._folder / name)
        self._disk.sync_folder(self._folder)
        for other in self._disk.names(self._folder):
            kind, _, digits = other.removesuffix(".tmp").partition("-")
            if kind in ("journal", "snapshot") and digits.isdecimal() and int(digits) < number:
                self._disk.remove(self._folder / other)

    # --- Recovery --------------------------------------------------------------------------------------------------

    def recover(self, *, accept: bool = False) -> State:
        """Snapshot and journal, read back. StorageError if they are damaged, unless that is to be accepted.

        A torn tail is normal: the last writes before a crash. Damage is what must have been on the device and is not
        there. Then ``damage`` has a sentence for each place, and the state is what the rest of it says.
        """
        state = State()
        snapshots: list[int] = []
        journals: list[int] = []
        for name in self._disk.names(self._folder):
            if name.endswith(".tmp"):
                self._disk.remove(self._folder / name)
                continue
            kind, _, digits = name.partition("-")
            if digits.isdecimal():
                (snapshots if kind == "snapshot" else journals if kind == "journal" else []).append(int(digits))
        start = max(snapshots, default=0)
        last = max([start, *journals])
        self.is_new = not last
        if start:
            state.in_snapshot = True
            self._replay(f"snapshot-{start:08d}", state)
            state.snapshot_read()
        expected = max(start, 1)
        for number in [number for number in sorted(journals) if number >= expected]:
            self._check_missing(expected, number)
            self._replay(f"journal-{number:08d}", state, used=number == start)
            expected = number + 1
        self._check_missing(expected, last + 1)
        self._number = last
        if self.damage:
            if not accept:
                raise damaged(self.damage)
            state.clean = False
            self._keep_damaged()
        return state

    def _check_missing(self, first: int, stop: int) -> None:
        """The journals from ``first`` up to ``stop``, if there are any, are not there."""
        if first < stop:
            more = f" to journal-{stop - 1:08d} are" if stop - first > 1 else " is"
            self.damage.append(f"{self._folder / f'journal-{first:08d}'}{more} missing, and no snapshot stands for it")

    def _replay(self, name: str, state: State, *, used: bool = True) -> None:
        """Apply the batches of a file up to its end; where one that was on the device is not whole, note it.

        ``used``: its header and its first batch are known to have been on the device.
        """
        path = self._folder / name
        fd = self._disk.open(path)
        try:
            data = self._disk.read(fd, self._disk.size(fd), 0)
        finally:
            self._disk.close_file(fd)
        is_snapshot = name.startswith("snapshot-")
        head = read_head(data, path)
        if head is None:
            # The first batch begins with the salt.
            salt = int.from_bytes(data[FILE_HEADER : FILE_HEADER + 4], "big")
            if not is_snapshot and (not salt or next(read_batches(data, salt), None) is None):
                salt = find_salt(data)
                if not salt and not used:
                    # The power went while it was made. Nothing was in it yet: its header is synced before it is used.
                    self._ends[path] = 0
                    return
            self._damaged(path, "its header at offset 0 is unreadable")
            head = salt, bytes(16)
        salt, boot = head
        state.count_from(boot)
        at = FILE_HEADER
        while True:
            for stop, entries in read_batches(data, salt, at):
                if not entries:
                    return
                for what in apply_all(entries, state):
                    self._damaged(path, f"in the batch at offset {at} {what}")
                at = stop
                if not is_snapshot:
                    self._ends[path] = at
            following = find_batch(data, salt, at) if salt else -1
            if following < 0:
                if is_snapshot or (used and at == FILE_HEADER):
                    self._damaged(path, f"the batch at offset {at} is unreadable, and so is all that follows")
                return
            if not is_snapshot and is_marked(data, salt) and not synced_beyond(data, salt, following, at):
                # Not synced when the power went: such writes reach the device in any order.
                return
            count = sum(1 for _, entries in read_batches(data, salt, following) if entries)
            self._damaged(
                path,
                f"the batch at offset {at} is unreadable, and whole ones follow it from offset {following} on "
                f"({count} in a row)",
            )
            at = following

    def _damaged(self, path: Path, what: str) -> None:
        self.damage.append(f"{path}: {what}")
        self._damaged_files.setdefault(path)

    def _keep_damaged(self) -> None:
        """Copy the damaged files, for those who want to look: the next snapshot replaces them."""
        for line in self.damage:
            logger.error("JOURNAL: damaged, which was accepted - %s", line)
        for path in self._damaged_files:
            copy = path.with_name(f"{path.name}.bad")
            if self._disk.exists(copy):
                self._disk.remove(copy)
            source, target = self._disk.open(path), self._disk.open(copy, create=True)
            try:
                self._disk.write(target, [self._disk.read(source, self._disk.size(source), 0)], 0)
                self._disk.sync(target)
            finally:
                self._disk.close_file(source)
                self._disk.close_file(target)


def damaged(what: list[str]) -> StorageError:
    """The error that refuses a start."""
    return StorageError(
        f"the journal is damaged: {'; '.join(what)}. It knows topics, channels and which messages are finished: some "
        "of these may be missing. Restore the data path from a backup (flintmq restore), or start once with "
        "--accept-damaged-journal: everything that can be read is used, messages whose end was recorded there are "
        "delivered again, and topics that are no longer known are set aside as NAME@N.lost, from where "
        "flintmq recover brings their messages back"
    )


def read_head(data: bytes, path: Path) -> tuple[int, bytes] | None:
    """Salt and boot id of a journal or a snapshot, None if its header is not whole."""
    size = _file_head.size
    if len(data) < FILE_HEADER or _number.unpack_from(data, size)[0] != google_crc32c.extend(0, data[:size]):
        return None
    magic, version, _, salt, _, boot = _file_head.unpack_from(data)
    if magic != _MAGIC:
        raise FormatError(f"{path} is not a journal of flintmq")
    if version > _VERSION:
        raise FormatError(f"{path} was written by a newer version of flintmq (format {version}, known: {_VERSION})")
    return salt, boot


def read_batches(data: bytes, salt: int, at: int = FILE_HEADER) -> Iterator[tuple[int, bytes]]:
    """(where it ends, its entries) of each batch from ``at`` on, up to the first that is not whole.

    One without entries ends a snapshot: nothing comes after it.
    """
    while at + _batch_head.size <= len(data):
        mark, length, crc = _batch_head.unpack_from(data, at)
        at += _batch_head.size
        entries = data[at : at + length]
        if mark != salt or len(entries) < length or google_crc32c.extend(salt, entries) != crc:
            return
        at += length
        yield at, entries
        if not length:
            return


def find_batch(data: bytes, salt: int, at: int) -> int:
    """Where the next whole batch behind ``at`` begins, -1 if none does."""
    mark = salt.to_bytes(4, "big")
    at = data.find(mark, at + 1)
    while at >= 0 and next(read_batches(data, salt, at), None) is None:
        at = data.find(mark, at + 1)
    return at


def find_salt(data: bytes) -> int:
    """The salt of a file without header, by any batch which says that more than the header was on the device; or 0."""
    mark = _entry_head.pack(DONE, MARK_SIZE - _entry_head.size) + _number.pack(0)
    at = data.find(mark, FILE_HEADER + _batch_head.size)
    while at >= 0:
        start = at - _batch_head.size
        (salt,) = _number.unpack_from(data, start)
        _, entries = next(read_batches(data, salt, start), (0, b""))
        # The first batch of a file names the header before that is synced: it proves nothing.
        if salt and synced_mark(entries) > FILE_HEADER:
            return int(salt)
        at = data.find(mark, at + 1)
    return 0


def is_marked(data: bytes, salt: int) -> bool:
    """Was the file written by a version that notes what is on the device? Its first whole batch says so."""
    at = FILE_HEADER
    first = next(read_batches(data, salt, at), None)
    if first is None:
        at = find_batch(data, salt, at)
        # The first one is lost: any other will do.
        return at >= 0 and synced_beyond(data, salt, at, 0)
    return synced_mark(first[1]) > 0


def synced_beyond(data: bytes, salt: int, at: int, offset: int) -> bool:
    """Does any batch from ``at`` on say that the file was on the device beyond ``offset``?"""
    while at >= 0:
        for stop, entries in read_batches(data, salt, at):
            if synced_mark(entries) > offset:
                return True
            at = stop - 1
        at = find_batch(data, salt, at)
    return False


def synced_mark(entries: bytes) -> int:
    """Up to where the batch says that its file was on the device; 0 if it does not say."""
    if len(entries) < MARK_SIZE:
        return 0
    kind, length = _entry_head.unpack_from(entries)
    if kind != DONE or length != MARK_SIZE - _entry_head.size or _number.unpack_from(entries, _entry_head.size)[0]:
        return 0
    return unpack_numbers(entries[MARK_SIZE - 16 : MARK_SIZE])[0]


def _encoded(note: tuple[Any, ...]) -> bytes:
    verb, *args = note
    return _entry(NOTE, encode(NOTES[verb](*args)))


def _entry(kind: int, payload: bytes) -> bytes:
    return _entry_head.pack(kind, len(payload)) + payload


def apply_all(entries: bytes, state: State) -> list[str]:
    """Take up what a batch says; return what of it makes no sense, and was left out."""
    left_out: list[str] = []
    at = 0
    while at < len(entries):
        kind, length = _entry_head.unpack_from(entries, at)
        at += _entry_head.size
        payload = entries[at : at + length]
        at += length
        try:
            if kind == NOTE:
                state.apply(decode(payload))
                continue
            state.clean = False
            (channel,) = _number.unpack_from(payload)
            if kind == DONE:
                state.apply_done(channel, unpack_numbers(payload[4:]))
            elif kind == BACK:
                state.apply_back(channel, unpack_numbers(payload[4:]))
            else:
                raise FormatError(f"a journal entry of unknown kind {kind}")
        except ValueError as exc:
            left_out.append(f"an entry is unreadable: {exc}")
    return left_out
