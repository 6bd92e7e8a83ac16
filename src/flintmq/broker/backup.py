"""Backups of a data path, whether its broker runs or not: make one, check one, put one back.

``make`` only reads the data path and asks nothing of the broker. What it copies must fit together although the broker
goes on meanwhile, so it works in this order:

    1  Every segment is opened. From here on the broker may free what it likes: an open file stays readable. What is
       known of staged transactions is copied, and keys that outlived their segments.
    2  The journal is copied, up to its last whole batch. This is the moment the backup is of: what was finished
       later is not finished in it, topics and channels that were made later are not in it.
    3  The sizes of all segments are taken, those included that were begun meanwhile. If a staged transaction was
       decided since step 1, its rows may be in them: then all begins again.
    4  The segments are copied up to these sizes, but no number that the journal had not reserved. They are newer than
       the journal, which is what a power loss may leave too, so that the first start on the copy is at worst the one
       after an unclean stop.

A publish is in its file before it is answered (unless durability is ``memory``), and messages are finished in the
journal before their file goes. So whatever was answered before step 1 is in the backup, finished or to be delivered.

Every record and every batch is checked while it is copied. A backup is a folder: ``data`` with the files, and
``manifest.json``, written last, with the size and the SHA-256 of each and of itself. It has its name only once it is
whole. ``restore`` checks all of it again, gives the copy an identity of its own, and lets no number be used again that
the original may have used since.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath

import msgspec

from flintmq import __version__
from flintmq.broker.data_path import FORMAT, LOST, RECOVERED, RESTORING, has_metadata
from flintmq.broker.delivery.topic import RESERVE
from flintmq.broker.stage.rows import Attempt
from flintmq.broker.stage.state import APPLIED, PREPARED, STATE, encode_state, read_state
from flintmq.broker.stage.state import State as StageState
from flintmq.broker.storage.disk import Disk, SystemClock
from flintmq.broker.storage.ids import NODE_IDS
from flintmq.broker.storage.journal import FILE_HEADER as JOURNAL_HEADER
from flintmq.broker.storage.journal import NEVER, SIDE, Journal, State, read_batches, read_head
from flintmq.broker.storage.segment import (
    FILE_HEADER,
    RECORD_HEADER,
    Entry,
    guess_header,
    read_footer,
    read_header,
    read_records,
)
from flintmq.errors import UNREADABLE, BackupError, FormatError, permission_hint

__all__ = ["Manifest", "make", "restore", "verify"]

MANIFEST = "manifest.json"
DATA = "data"
_VERSION = 1
#: What is read at once.
_STEP = 4 << 20
#: How often a step is tried again that the broker spoilt: by rolling its journal, or by being started.
_TRIES = 20
#: Numbers that a topic may have used since the backup, per second: more than any broker can.
_NUMBERS_PER_SECOND = 2_000_000

#: Told how many bytes are done, and of how many.
Progress = Callable[[int, int], None]


class FileEntry(msgspec.Struct):
    path: str
    size: int
    sha256: str


class Manifest(msgspec.Struct):
    """What a backup is of, and what is in it."""

    version: int
    flintmq: str
    #: When it was begun, seconds since 1970.
    made: float
    #: The node it is of.
    node: str
    topics: int
    messages: int
    files: list[FileEntry]
    #: What could not be read whole in the data path, and so cannot be in the backup either.
    damage: list[str]
    #: What is no part of a backup: files that the broker itself set aside.
    left_out: list[str]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


class _Envelope(msgspec.Struct):
    sha256: str
    backup: msgspec.Raw


def _nothing(_done: int, _of: int) -> None:
    pass


# --- Making one -------------------------------------------------------------------------------------------------------


def make(data_path: Path, target: Path, progress: Progress = _nothing) -> Manifest:
    """Copy the data path to the new folder ``target``. BackupError says why not."""
    data_path, target = data_path.absolute(), target.absolute()
    with _translated(f"cannot write the backup to {target}"):
        if target.resolve().is_relative_to(data_path.resolve()):
            raise BackupError(f"{target} is inside the data path: a backup belongs elsewhere")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise BackupError(f"{target} is there already, and is not an empty folder: give another")
    node = _node_of(data_path)
    partial = target.with_name(target.name + ".partial")
    with _translated(f"cannot write the backup to {target}"), ExitStack() as stack:
        partial.mkdir(mode=0o700, exist_ok=True)
        if not _lock(partial, stack):
            raise BackupError(f"another backup to {target} is being made")
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        why = ""
        for _ in range(_TRIES):
            _clear(partial)
            copy = _Copy(data_path / "flintmq", partial, node, progress)
            try:
                manifest = copy.run()
            except _BeginAgain as exc:
                why = str(exc)
                continue
            _write_manifest(partial, manifest)
            _sync_tree(partial)
            os.rename(partial, target)
            _sync_folder(target.parent)
            return manifest
    raise BackupError(f"{why} in {data_path} again and again: try later")


class _BeginAgain(Exception):
    """What was copied does not fit together, because this happened meanwhile."""


class _Copy:
    def __init__(self, root: Path, target: Path, node: str, progress: Progress) -> None:
        self._root = root
        self.target = target
        self._progress = progress
        self._disk = Disk()
        #: Open segments by their path below the root.
        self._pins: dict[str, int] = {}
        self._done = self._total = 0
        self._node_ids = b""
        # Of each producer, the staged transactions that were decided.
        self._decided: dict[str, set[int]] = {}
        #: How much of each segment there was when the transactions were looked at again.
        self._sizes: dict[str, int] = {}
        self.manifest = Manifest(_VERSION, __version__, time.time(), node, 0, 0, [], [], [])

    def run(self) -> Manifest:
        try:
            self._pin(self._segments())
            self._copy_about()
            # Before the logs: what it calls applied is in them. Before the journal: their numbers are reserved in it.
            self._copy_stage()
            self._copy_keys()
            journals = self._copy_journal()
            state = _replay(self.target / DATA / "journal")
            self._measure()
            self._check_stage()
            self._copy_topics(state)
            if state.clean and self._newest_journal() != journals:
                # The journal says where each log ends, and they go on beyond it now.
                raise _BeginAgain("the broker was started")
            if self._read_node_ids() != self._node_ids:
                # The broker was started with another node id: some of what was copied has it.
                raise _BeginAgain("the broker was started")
            return self.manifest
        finally:
            for fd in self._pins.values():
                os.close(fd)

    # Segments are found and held.

    def _segments(self) -> list[str]:
        """Every segment file below the root."""
        found = []
        for folder in _names(self._root / "topics"):
            if folder.endswith((LOST, RECOVERED)):
                self._leave_out(f"topics/{folder}")
                continue
            for part in (f"topics/{folder}", f"topics/{folder}/side"):
                for name in _names(self._root / part):
                    if name.endswith(".seg"):
                        found.append(f"{part}/{name}")
                    elif name.endswith(".bad"):
                        self._leave_out(f"{part}/{name}")
        return found

    def _leave_out(self, path: str) -> None:
        if path not in self.manifest.left_out:
            self.manifest.left_out.append(path)

    def _pin(self, paths: list[str]) -> None:
        """Open them, as many as may be open. One that is gone is finished: the broker removes no other."""
        for path in paths:
            if path in self._pins:
                continue
            try:
                self._pins[path] = os.open(self._root / path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError as exc:
                if exc.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                # The rest is opened when its turn comes. Leave some room for that, and for the copies.
                for _, other in zip(range(16), list(self._pins), strict=False):
                    os.close(self._pins.pop(other))
                return

    # The journal.

    def _copy_about(self) -> None:
        folder = self.target / DATA
        folder.mkdir(mode=0o700)
        (folder / "journal").mkdir(mode=0o700)
        (folder / "topics").mkdir(mode=0o700)
        with _Output(self, "format.json") as out:
            out.write((self._root / "format.json").read_bytes())
        self._node_ids = self._read_node_ids()
        if self._node_ids:
            with _Output(self, NODE_IDS) as out:
                out.write(self._node_ids)

    def _read_node_ids(self) -> bytes:
        """The record of node ids; empty if there is none yet, and a start makes it from the messages."""
        try:
            return (self._root / NODE_IDS).read_bytes()
        except FileNotFoundError:
            return b""

    def _copy_stage(self) -> None:
        """What is known of staged transactions, and the rows of prepared ones. What is being staged is left out."""
        for name in _names(self._root / "stage"):
            for _ in range(_TRIES):
                if self._try_stage(f"stage/{name}"):
                    break
            else:
                raise BackupError(f"the staged rows in {self._root / 'stage' / name} change all the time: try later")

    def _try_stage(self, folder: str) -> bool:
        """Copy the files of one producer; False if some were deleted before they could be opened."""
        state = read_state(self._disk, self._root / folder)
        if state is None:
            return True
        self._decided[folder] = _decided(state)
        with ExitStack() as opened:
            rows: list[tuple[str, int]] = []
            for txn, found in state.sets.items():
                for attempt, chunks, _count in found.winners if found.state != APPLIED else ():
                    if not chunks:
                        continue
                    path = f"{folder}/{Attempt.file_name(found.epoch, txn, attempt)}"
                    try:
                        fd = os.open(self._root / path, os.O_RDONLY | os.O_CLOEXEC)
                    except FileNotFoundError:
                        # It was applied, or dropped, and the state says so now.
                        return False
                    opened.callback(os.close, fd)
                    rows.append((path, fd))
            for path, fd in rows:
                with _Output(self, path) as out:
                    while piece := os.pread(fd, _STEP, out.size):
                        out.write(piece)
            with _Output(self, f"{folder}/{STATE}") as out:
                out.write(encode_state(state))
        return True

    def _measure(self) -> None:
        """See how far each segment goes by now."""
        segments = self._segments()
        self._pin(segments)
        for path in self._pins.keys() | set(segments):
            try:
                self._sizes[path] = os.fstat(self._pins[path]).st_size if path in self._pins else self._size(path)
            except FileNotFoundError:
                # It is finished.
                continue

    def _size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def _check_stage(self) -> None:
        """Do the segments hold rows of a transaction that is not decided in the copy of what is known of them?

        There they would be staged, decided and published once more.
        """
        folders = {f"stage/{name}" for name in _names(self._root / "stage")}
        for folder in folders | self._decided.keys():
            state = read_state(self._disk, self._root / folder)
            known = self._decided.get(folder)
            if known is not None if state is None else _decided(state) - (known or set()):
                raise _BeginAgain("staged transactions were decided, or forgotten,")

    def _copy_keys(self) -> None:
        """The files with the keys of segments that are gone. What goes from here on is held, and has its own."""
        for folder in _names(self._root / "topics"):
            for name in _names(self._root / "topics" / folder):
                if folder.endswith((LOST, RECOVERED)) or not name.endswith(".keys"):
                    continue
                path = f"topics/{folder}/{name}"
                try:
                    content = (self._root / path).read_bytes()
                except FileNotFoundError:
                    # Its keys were too old.
                    continue
                with _Output(self, path) as out:
                    out.write(content)

    def _copy_journal(self) -> str:
        """Copy the newest snapshot and the journals from it on; the name of the newest of them."""
        files = self._open_journal()
        try:
            for name, fd in files:
                content = _whole_part(self._root / "journal" / name, fd)
                if content:
                    with _Output(self, f"journal/{name}") as out:
                        out.write(content)
        finally:
            for _, fd in files:
                os.close(fd)
        return files[-1][0]

    def _open_journal(self) -> list[tuple[str, int]]:
        """The files that tell the whole state, open: all but the last of them are written to the end."""
        folder = self._root / "journal"
        for _ in range(_TRIES):
            names = _names(folder)
            snapshots = sorted((name for name in names if re.fullmatch(r"snapshot-\d+", name)), key=_number)[-1:]
            first = _number(snapshots[0]) if snapshots else 0
            journals = [name for name in names if re.fullmatch(r"journal-\d+", name) and _number(name) >= first]
            journals.sort(key=_number)
            opened: list[tuple[str, int]] = []
            with ExitStack() as undo:
                try:
                    for name in [*snapshots, *journals]:
                        opened.append((name, os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)))
                        undo.callback(os.close, opened[-1][1])
                except FileNotFoundError:
                    # A newer snapshot has come, and the older files have gone.
                    continue
                if journals and (not first or _number(journals[0]) == first):
                    undo.pop_all()
                    return opened
        raise BackupError(f"{folder} holds no whole journal")

    def _newest_journal(self) -> str:
        return max((name for name in _names(self._root / "journal") if name.startswith("journal-")), key=_number)

    # The messages.

    def _copy_topics(self, state: State) -> None:
        ceilings = {f"{topic.name}@{topic.incarnation}": topic.ceiling for topic in state.topics.values()}
        # A topic that the journal did not know yet came later than the backup.
        paths = [path for path in self._sizes if path.split("/")[1] in ceilings]
        self._total = sum(self._sizes[path] for path in paths)
        self._progress(0, self._total)
        # Those that are not held first: they are the ones that may go.
        for path in sorted(paths, key=lambda path: (path in self._pins, path)):
            fd = self._pins.pop(path, -1)
            try:
                if fd < 0:
                    fd = os.open(self._root / path, os.O_RDONLY | os.O_CLOEXEC)
                is_side = "/side/" in path
                self._copy_segment(path, fd, NEVER if is_side else ceilings[path.split("/")[1]])
            except FileNotFoundError:
                continue
            finally:
                if fd >= 0:
                    os.close(fd)
        self.manifest.topics = len(ceilings)

    def _copy_segment(self, path: str, fd: int, limit: int) -> None:
        """Copy whole records, as far as their numbers stay below ``limit``, and the footer if that is all of it."""
        messages, damage, sealed = self._try_segment(path, fd, limit)
        if damage and not sealed:
            # A record that was being written just then looks like a damaged one. Now it is written.
            self.manifest.files.pop()
            messages, damage, sealed = self._try_segment(path, fd, limit)
        self.manifest.messages += messages
        self.manifest.damage.extend(damage)

    def _try_segment(self, path: str, fd: int, limit: int) -> tuple[int, list[str], bool]:
        source = self._root / path
        # A write that failed may have cut it back.
        size = min(self._sizes[path], os.fstat(fd).st_size)
        head = self._disk.read(fd, FILE_HEADER + RECORD_HEADER, 0)
        if len(head) < FILE_HEADER:
            # It is being made: nothing is in it yet.
            return 0, [], False
        segment = read_header(source, head) or guess_header(source, head)
        damage: list[str] = []
        messages = 0
        sealed = segment is not None and read_footer(self._disk, fd, size, segment) and segment.end <= limit
        with _Output(self, path) as out:
            out.write(head[:FILE_HEADER])
            if segment is None:
                damage.append(f"{source}: neither its header nor its first record can be read")
                stop, sealed = FILE_HEADER, True
            else:
                stop = segment.size if sealed else size
                for raw, entry in _walk(self._disk, fd, segment.salt, stop):
                    if entry.seq + entry.count > limit:
                        break
                    if len(raw) > entry.size:
                        at = entry.offset + entry.size - len(raw)
                        damage.append(f"{source}: {len(raw) - entry.size} damaged bytes at {at}")
                    messages += entry.count
                    out.write(raw)
                if sealed and out.size < stop:
                    damage.append(f"{source}: {stop - out.size} damaged bytes at {out.size}")
            # Damage stays where it is, so that the footer's index still fits.
            while sealed and (rest := self._disk.read(fd, min(_STEP, size - out.size), out.size)):
                out.write(rest)
        return messages, damage, sealed

    def wrote(self, count: int) -> None:
        self._done += count
        if self._total:
            self._progress(min(self._done, self._total), self._total)


class _Output:
    """A file of the backup: written, counted, put on the device, and entered in the manifest."""

    def __init__(self, copy: _Copy, path: str) -> None:
        self._copy = copy
        self._path = path
        self._hash = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> _Output:
        target = self._copy.target / DATA / self._path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = open(target, "wb", opener=_private)
        return self

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)
        self._copy.wrote(len(data))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                entry = FileEntry(f"{DATA}/{self._path}", self.size, self._hash.hexdigest())
                self._copy.manifest.files.append(entry)


def _walk(disk: Disk, fd: int, salt: int, stop: int) -> Iterator[tuple[bytes, Entry]]:
    """Each whole record, with all bytes since the one before: more than its own where damage lies between."""
    at, step = FILE_HEADER, _STEP
    while at < stop:
        data = disk.read(fd, min(step, stop - at), at)
        last = at + len(data) >= stop
        done = 0
        for entry in read_records(data, salt, 0, at, last):
            if isinstance(entry, Entry):
                end = entry.offset - at + entry.size
                yield data[done:end], entry
                done = end
        if last or not data:
            return
        # Not even one record: it is larger than what was read, or something damaged is.
        step = _STEP if done else 2 * step
        at += done


def _decided(state: StageState) -> set[int]:
    """The staged transactions that are decided: their rows may be in the logs."""
    applied = {txn for txn, found in state.sets.items() if found.state != PREPARED}
    return applied | state.decisions.keys() | ({state.applied} if state.applied >= 0 else set())


def _whole_part(path: Path, fd: int) -> bytes:
    """A journal's bytes up to the end of its last whole batch; none if even the header is not whole."""
    end = 0
    for _ in range(2):
        data = _read_all(fd)
        head = read_head(data, path)
        if head is None:
            return b""
        salt, _ = head
        end, last = JOURNAL_HEADER, b"-"
        for end, last in read_batches(data, salt):  # noqa: B007
            pass
        if path.name.startswith("snapshot-"):
            if last:
                break
            return data[:end]
        mark = salt.to_bytes(4, "big")
        later = data.find(mark, end)
        while later >= 0 and next(read_batches(data, salt, later), None) is None:
            later = data.find(mark, later + 1)
        if later < 0:
            return data[:end]
        # Something whole behind something that is not: it was being written while it was read, or it is damaged.
    raise BackupError(f"{path} is damaged at {end}; the broker writes a new one when it is started")


def _replay(folder: Path) -> State:
    return _journal(folder).recover()


def _journal(folder: Path) -> Journal:
    def fatal(error: BaseException) -> None:
        raise error

    return Journal(Disk(), SystemClock(), folder, fatal=fatal, later=lambda work: work(), snapshot=None)


# --- Checking one -----------------------------------------------------------------------------------------------------


def verify(source: Path, progress: Progress = _nothing) -> Manifest:
    """Read the whole backup and compare it with its manifest. BackupError names everything that is wrong."""
    manifest = _read_manifest(source)
    wrong = []
    done = 0
    with _translated(f"cannot read the backup {source}"):
        for file in manifest.files:
            problem = _check(source / file.path, file, lambda _: None)
            if problem:
                wrong.append(f"{source / file.path} {problem}")
            done += file.size
            progress(done, manifest.bytes)
    if wrong:
        raise BackupError("; ".join(wrong))
    return manifest


def _check(path: Path, file: FileEntry, take: Callable[[bytes], object]) -> str:
    """What is wrong with a file of a backup, empty if nothing is. ``take`` gets its bytes on the way."""
    digest = hashlib.sha256()
    size = 0
    try:
        with open(path, "rb", buffering=0, opener=_no_link) as content:
            while piece := content.read(_STEP):
                digest.update(piece)
                size += len(piece)
                take(piece)
    except FileNotFoundError:
        return "is missing"
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        return "is a link"
    if size != file.size:
        return f"has {size} bytes instead of {file.size}"
    return "" if digest.hexdigest() == file.sha256 else "does not match its checksum"


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    backup = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    envelope = _Envelope(hashlib.sha256(backup).hexdigest(), msgspec.Raw(backup))
    with open(folder / MANIFEST, "wb", opener=_private) as out:
        out.write(msgspec.json.encode(envelope) + b"\n")
        out.flush()
        os.fsync(out.fileno())


def _read_manifest(source: Path) -> Manifest:
    path = source / MANIFEST
    try:
        envelope = msgspec.json.decode(path.read_bytes(), type=_Envelope)
        manifest = msgspec.json.decode(envelope.backup, type=Manifest)
    except FileNotFoundError:
        raise BackupError(f"{source} is no backup: it has no {MANIFEST}") from None
    except OSError as exc:
        raise BackupError(f"cannot read {path} - {exc.strerror}{permission_hint(exc, path)}") from exc
    except UNREADABLE as exc:
        raise BackupError(f"{path} is damaged - {exc}") from exc
    if hashlib.sha256(envelope.backup).hexdigest() != envelope.sha256:
        raise BackupError(f"{path} does not match its checksum")
    if manifest.version > _VERSION:
        raise FormatError(f"{path} was written by a newer version of flintmq ({manifest.flintmq})")
    for file in manifest.files:
        parts = PurePosixPath(file.path).parts
        if parts[:1] != (DATA,) or ".." in parts:
            raise BackupError(f"{path} names a file outside the backup: {file.path}")
    return manifest


# --- Putting one back -------------------------------------------------------------------------------------------------


def restore(source: Path, data_path: Path, *, same_node: bool = False, progress: Progress = _nothing) -> Manifest:
    """Make the data path of a broker from a backup. Nothing is ever written over.

    With ``same_node`` it takes the place of the original, for those who read its log; else it is another node.
    """
    source, data_path = source.absolute(), data_path.absolute()
    manifest = _read_manifest(source)
    root, restoring = data_path / "flintmq", data_path / RESTORING
    with _translated(f"cannot restore to {data_path}"), ExitStack() as stack:
        data_path.mkdir(mode=0o700, exist_ok=True)
        if not _lock(data_path, stack):
            raise BackupError(f"{data_path} is in use by a broker")
        if root.exists() or has_metadata(data_path):
            raise BackupError(f"{data_path} holds data already: restore to an empty folder")
        if restoring.exists():
            # Of an earlier try that was cut off.
            shutil.rmtree(restoring)
        free = shutil.disk_usage(data_path).free
        if free < manifest.bytes:
            raise BackupError(f"{data_path} has {free} bytes free, the backup needs {manifest.bytes}")
        restoring.mkdir(mode=0o700)
        with _removed_on_error(restoring):
            _copy_back(source, restoring, manifest, progress)
            _go_on_beyond(restoring, manifest.made)
            if not same_node:
                _give_identity(restoring)
            _sync_tree(restoring)
        os.rename(restoring, root)
        _sync_folder(data_path)
    return manifest


def _copy_back(source: Path, restoring: Path, manifest: Manifest, progress: Progress) -> None:
    (restoring / "journal").mkdir(mode=0o700)
    (restoring / "topics").mkdir(mode=0o700)
    done = 0
    for file in manifest.files:
        target = restoring / PurePosixPath(file.path).relative_to(DATA)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(target, "wb", opener=_private) as out:
            problem = _check(source / file.path, file, out.write)
            if problem:
                raise BackupError(f"{source / file.path} {problem}; nothing was restored")
            out.flush()
            os.fsync(out.fileno())
        done += file.size
        progress(done, manifest.bytes)


def _go_on_beyond(root: Path, made: float) -> None:
    """Reserve, for each topic, more numbers than the original can have used since the backup was made.

    Its messages have ids and places in the log that consumers and readers have seen: here they must mean nothing else.
    """
    journal = _journal(root / "journal")
    state = journal.recover()
    journal.start(state)
    used = RESERVE + round(max(0.0, time.time() - made) * _NUMBERS_PER_SECOND)
    for topic in state.topics.values():
        journal.note("ceiling", topic.incarnation, topic.ceiling + used)
        # Its side log may have gone on beyond what the journal knew, or have been begun since, where time had got to.
        side = max(topic.side_next, SIDE + time.time_ns() // 1000)
        for name in _names(root / f"topics/{topic.name}@{topic.incarnation}/side"):
            if name.endswith(".seg"):
                side = max(side, int(name.removesuffix(".seg"), 16))
        journal.note("side", topic.incarnation, topic.side_end, side + used)
    journal.sync_now()
    journal.close()


def _give_identity(root: Path) -> None:
    path = root / "format.json"
    about = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    about["node"] = secrets.token_hex(16)
    with open(path, "wb", opener=_private) as out:
        out.write(msgspec.json.encode(about))
        out.flush()
        os.fsync(out.fileno())


# --- Files ------------------------------------------------------------------------------------------------------------


def _node_of(data_path: Path) -> str:
    """The identity of the broker that the data path is of. Also the check that there is one to be read."""
    path = data_path / "flintmq" / "format.json"
    try:
        about = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        raise BackupError(f"there is no data of flintmq in {data_path}") from None
    except OSError as exc:
        raise BackupError(f"cannot read {path} - {exc.strerror}{permission_hint(exc, path)}") from exc
    except UNREADABLE as exc:
        raise BackupError(f"{path} is damaged - {exc}") from exc
    version, node = about.get("format"), about.get("node")
    if not isinstance(version, int) or not isinstance(node, str):
        raise BackupError(f"{path} is damaged")
    if version > FORMAT:
        raise FormatError(f"{path} was written by a newer version of flintmq (format {version})")
    return node


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        # A topic that was deleted meanwhile, or one that has no such folder.
        return []


def _number(name: str) -> int:
    return int(name.partition("-")[2])


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return Disk().read(fd, size, 0)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _lock(folder: Path, stack: ExitStack) -> bool:
    """Hold the folder until the stack is left; False if somebody else does."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _clear(folder: Path) -> None:
    for name in os.listdir(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync_tree(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        _sync_folder(Path(path))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        remedy = permission_hint(exc, exc.filename) if exc.filename else ""
        raise BackupError(f"{what} - {where}{exc.strerror or exc}{remedy}") from exc
