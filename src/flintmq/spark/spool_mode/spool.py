"""Spool mode: what a channel delivers is written to Arrow files, synced, and only then finished.

A Spool is a folder of files named by the rows they hold, ``<first>-<stop>.arrow``; the rows are numbered without gaps
and these numbers are Spark's offsets. A file appears under its name when it is whole and synced, and goes when Spark
is past it, so a batch that was planned can be read again after any crash. See filling.py for who writes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flintmq.errors import OptionError, SpoolError
from flintmq.spark.shipped.columns import arrow_schema
from flintmq.spark.shipped.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Piece", "Source", "Spool", "default_location", "plan_rows", "read_pieces", "spool_id", "spool_rows"]

_FILE = re.compile(r"(\d{20})-(\d{20})\.arrow")
#: Somebody who was just told to stop may hold the folder for a moment.
_LOCK_PATIENCE = 15.0


def _private(path: str, flags: int) -> int:
    """Messages are in these files: they are their owner's alone."""
    return os.open(path, flags, 0o600)


class Piece(NamedTuple):
    """Rows of one file."""

    path: str
    skip: int
    rows: int


#: A topic and a node.
Source = tuple[str, str]


class _File(NamedTuple):
    first: int
    stop: int
    path: Path
    size: int


def _list_files(folder: Path) -> list[_File]:
    with os.scandir(folder) as entries:
        named = [(name, entry) for entry in entries if (name := _FILE.fullmatch(entry.name))]
        return sorted(
            _File(int(name[1]), int(name[2]), Path(entry.path), entry.stat().st_size) for name, entry in named
        )


def _read_state(folder: Path) -> dict[str, Any]:
    state = json.loads((folder / "spool.json").read_text())
    if state.get("v") != 1:
        raise SpoolError(f"the spool in {folder} was written by another version: take a new folder")
    return dict(state)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_synced(path: Path, data: bytes) -> None:
    """Put a file in place whole, or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb", opener=_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


class Spool:
    """The folder, opened by the one process that writes it."""

    def __init__(self, location: str) -> None:
        self.folder = Path(location)
        self._lock = -1
        # One thread appends, another forgets.
        self._books = threading.Lock()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            if not (self.folder / "spool.json").exists():
                if _list_files(self.folder):
                    raise SpoolError(f"the spool in {location} has lost its spool.json: take a new folder")
                self._write_state(os.urandom(16).hex(), 0)
            state = _read_state(self.folder)
            for leftover in self.folder.glob("*.tmp"):
                leftover.unlink()
            self._files = deque(_list_files(self.folder))
        except (OSError, ValueError) as exc:
            self.close()
            raise SpoolError(f"the spool in {location} cannot be used: {exc}") from exc
        except BaseException:
            self.close()
            raise
        self.id: str = state["spool"]
        #: Rows before this one are Spark's and gone.
        self.done: int = state["done"]
        self.end = self._files[-1].stop if self._files else self.done
        self.size = sum(file.size for file in self._files)

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise SpoolError(
                        f"another query uses the spool in {self.folder}: stop it, or set another spoolLocation"
                    ) from None
            time.sleep(0.1)

    def _write_state(self, id: str, done: int) -> None:
        _write_synced(self.folder / "spool.json", json.dumps({"v": 1, "spool": id, "done": done}).encode())

    def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Rows from ``end`` on; on the disk when this returns."""
        import pyarrow as pa

        rows = sum(batch.num_rows for batch in batches)
        path = self.folder / f"{self.end:020d}-{self.end + rows:020d}.arrow"
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb", opener=_private) as file:
            with pa.ipc.new_file(file, arrow_schema()) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
        _sync_folder(self.folder)
        with self._books:
            self._files.append(_File(self.end, self.end + rows, path, size))
            self.size += size
            self.end += rows

    def forget(self, upto: int) -> None:
        """Spark is past these rows: files that hold no others go."""
        if upto <= self.done:
            return
        if upto > self.end:
            raise SpoolError(f"the spool in {self.folder} ends at {self.end}, and Spark has read up to {upto}")
        # First written down, then removed: where rows begin must be known even when no file is left.
        self.done = upto
        self._write_state(self.id, upto)
        with self._books:
            while self._files and self._files[0].stop <= upto:
                file = self._files.popleft()
                file.path.unlink(missing_ok=True)
                self.size -= file.size

    def id_at(self, row: int) -> str:
        """Return the id of the message in a row; nothing where the row is gone."""
        import pyarrow as pa

        with self._books:
            file = next((file for file in self._files if file.first <= row < file.stop), None)
            if file is None:
                return ""
            source = pa.memory_map(str(file.path))
        at = row - file.first
        with source, pa.ipc.open_file(source) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                if at < batch.num_rows:
                    return str(batch.column("id")[at].as_py())
                at -= batch.num_rows
        return ""

    def newest_ids(self, count: int) -> Iterator[tuple[Source, bytes]]:
        """Topic and node of the newest rows, with their ids one behind the other; the newest file last."""
        import pyarrow as pa

        files: list[_File] = []
        for file in reversed(self._files):
            if count <= 0:
                break
            files.insert(0, file)
            count -= file.stop - file.first
        for file in files:
            with pa.memory_map(str(file.path)) as source, pa.ipc.open_file(source) as reader:
                for number in range(reader.num_record_batches):
                    # What was received at once is of one topic and node, and a batch.
                    batch = reader.get_batch(number)
                    if batch.num_rows:
                        row = batch.slice(0, 1).select(["topic", "node"]).to_pylist()[0]
                        ids = "".join(batch.column("id").to_pylist())
                        yield (row["topic"], row["node"]), ids.encode()

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def spool_id(location: str) -> str:
    """Return the identity of the spool in a folder, or nothing where there is none. Changes nothing."""
    folder = Path(location)
    if not (folder / "spool.json").exists():
        return ""
    try:
        return str(_read_state(folder)["spool"])
    except (OSError, ValueError, KeyError) as exc:
        raise SpoolError(f"the spool in {location} cannot be used: {exc}") from exc


def spool_rows(location: str) -> tuple[int, int]:
    """From which to which row a folder holds rows; without a lock, for who only reads. SpoolError if it is no spool."""
    folder = Path(location)
    try:
        done = int(_read_state(folder)["done"])
        files = _list_files(folder)
    except (OSError, ValueError, KeyError) as exc:
        raise SpoolError(f"there is no spool in {location}: {exc}") from exc
    return (max(done, files[0].first), files[-1].stop) if files else (done, done)


def plan_rows(location: str, first: int, stop: int) -> list[Piece]:
    """The pieces of files that hold these rows. SpoolError if some are not there."""
    pieces = []
    at = first
    for file in _list_files(Path(location)):
        if file.stop <= at or file.first >= stop:
            continue
        if file.first > at:
            break
        until = min(stop, file.stop)
        pieces.append(Piece(str(file.path), at - file.first, until - at))
        at = until
    if at < stop:
        raise SpoolError(f"the spool in {location} has no rows {at} to {stop - 1}: was something removed from it?")
    return pieces


def read_pieces(pieces: Sequence[Piece], batch_rows: int, planned_on: str) -> Iterator[pa.RecordBatch]:
    """The rows, on an executor."""
    import pyarrow as pa

    for piece in pieces:
        try:
            source = pa.memory_map(piece.path)
        except FileNotFoundError:
            here = socket.gethostname()
            raise SpoolError(
                f"{piece.path} was written on {planned_on} and is not there on {here}: set spoolLocation to a folder "
                "that the driver and all executors share"
            ) from None
        with source, pa.ipc.open_file(source) as reader:
            skip, left = piece.skip, piece.rows
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                while left and skip < batch.num_rows:
                    part = batch.slice(skip, min(left, batch_rows))
                    yield part
                    skip += part.num_rows
                    left -= part.num_rows
                skip = 0
                if not left:
                    break


def default_location(options: SourceOptions) -> str:
    """Where a spool is when nobody said. Only where one machine is all there is: elsewhere executors cannot read it."""
    if not _is_local_master():
        raise OptionError(
            "spool mode needs the option spoolLocation: a folder that the driver and all executors share, kept as "
            "carefully as the checkpoint"
        )
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    network = options.network
    who = (*network.lookupds, *network.nsqds, *options.topics, options.pattern, options.channel)
    return os.path.join(base, "flintmq", "spool", hashlib.sha256("\n".join(who).encode()).hexdigest()[:16])


def _is_local_master() -> bool:
    """Does Spark run on this machine alone? Read from the command line of the JVM that started us; in doubt, no."""
    pid = os.getpid()
    for _ in range(8):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            # The second field is a name in parentheses that may hold spaces; the parent is the second behind it.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
        for number, word in enumerate(words):
            value = word.removeprefix(b"spark.master=") if word.startswith(b"spark.master=") else b""
            if word == b"--master" and number + 1 < len(words):
                value = words[number + 1]
            if value:
                return value == b"local" or value.startswith(b"local[")
        if pid <= 1:
            return False
    return False
