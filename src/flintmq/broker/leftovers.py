"""What a broker set aside in its data path, and the messages in it, for ``flintmq recover``.

    topics/NAME@N.lost           a topic that a damaged journal does not know any more
    topics/NAME@N/*.bad          a segment whose header and first record are unreadable
    topics/NAME@N/*.keys.bad     idempotency keys: no messages
    journal/*.bad                a damaged journal or snapshot that was accepted: no messages

``find`` only reads, whether a broker runs or not. ``Leftover.messages`` yields every message of a whole record, in the
order of the log. ``Leftover.put_away`` renames it, so that it is not found again; nothing is deleted here.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flintmq.broker.data_path import LOST, RECOVERED
from flintmq.broker.storage.segment import FILE_HEADER, RECORD_HEADER, Entry, guess_header, read_header, read_records
from flintmq.errors import StorageError

__all__ = ["Leftover", "find"]

BAD = ".bad"
#: Bytes of a frame before its body: size, type, timestamp, attempts, id.
_BODY = 34


@dataclass(frozen=True, slots=True)
class Leftover:
    path: Path
    #: The topic that it was a part of; empty if it is of none.
    topic: str
    kind: str
    #: Segment files in it that may hold messages, in order.
    files: tuple[Path, ...]
    #: Filled by ``messages``: a line for each place that cannot be read.
    damage: list[str] = field(default_factory=list)

    def messages(self) -> Iterator[bytes]:
        """The bodies of all messages that can be read."""
        self.damage.clear()
        for path in self.files:
            yield from self._messages_of(path)

    def _messages_of(self, path: Path) -> Iterator[bytes]:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= FILE_HEADER:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                salt, start = _salt_of(path, data)
                if not salt:
                    self.damage.append(f"{path}: no whole record is in it")
                    return
                if start > FILE_HEADER:
                    self.damage.append(f"{path}: unreadable up to offset {start}")
                at = start
                # mmap has the parts of bytes that are used: slices, find, the buffer.
                for entry in read_records(data, salt, start, 0, True):  # type: ignore[arg-type]
                    if not isinstance(entry, Entry):
                        continue
                    if entry.offset > at:
                        self.damage.append(f"{path}: unreadable from offset {at} to {entry.offset}")
                    at = entry.offset + entry.size
                    yield from _bodies(data[entry.frames_at : at])

    def put_away(self) -> Path:
        """Rename it: its messages are safe elsewhere."""
        target = self.path.with_name(self.path.name + RECOVERED)
        if target.exists():
            raise StorageError(f"{target} is there already: move it elsewhere")
        os.rename(self.path, target)
        return target


def find(data_path: Path) -> list[Leftover]:
    """All leftovers of a data path. StorageError if it is none."""
    root = data_path / "flintmq"
    if not (root / "format.json").is_file():
        raise StorageError(f"there is no data of flintmq in {data_path}")
    found = [Leftover(path, "", "journal", ()) for path in sorted((root / "journal").glob(f"*{BAD}"))]
    for folder in sorted((root / "topics").iterdir()):
        topic = folder.name.removesuffix(LOST).rpartition("@")[0]
        if folder.name.endswith(LOST):
            files = [*_sorted(folder, f"*{BAD}", "*.seg"), *_sorted(folder / "side", f"*{BAD}", "*.seg")]
            found.append(Leftover(folder, topic, "topic", tuple(files)))
        elif not folder.name.endswith(RECOVERED):
            for path in [*_sorted(folder, f"*{BAD}"), *_sorted(folder / "side", f"*{BAD}")]:
                is_keys = path.name.endswith(f".keys{BAD}")
                found.append(Leftover(path, topic, "keys" if is_keys else "segment", () if is_keys else (path,)))
    return found


def _sorted(folder: Path, *patterns: str) -> list[Path]:
    paths = (path for pattern in patterns for path in folder.glob(pattern))
    return sorted(path for path in paths if not path.name.endswith(f".keys{BAD}"))


def _salt_of(path: Path, data: mmap.mmap) -> tuple[int, int]:
    """The salt of a segment's records, and where the first whole one stands. (0, 0): there is none."""
    head = data[: FILE_HEADER + RECORD_HEADER]
    segment = read_header(path, head) or guess_header(path, head)
    if segment is not None:
        return segment.salt, FILE_HEADER
    # A record begins with the salt: so does the first one that is whole.
    for at in range(FILE_HEADER, len(data) - RECORD_HEADER):
        salt = int.from_bytes(data[at : at + 4], "big")
        length = int.from_bytes(data[at + 4 : at + 8], "big")
        if salt and RECORD_HEADER + length <= len(data) - at:
            if isinstance(next(read_records(data, salt, at, 0, True), None), Entry):  # type: ignore[arg-type]
                return salt, at
    return 0, 0


def _bodies(frames: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(frames):
        stop = at + 4 + int.from_bytes(frames[at : at + 4], "big")
        yield frames[at + _BODY : stop]
        at = stop
