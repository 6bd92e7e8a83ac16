"""Files of staged rows: one per attempt, only ever added to.

    file     magic (8) | version (2) | reserved (2) | salt (4) | crc (4) | chunks
    chunk    salt (4) | number (4) | count (4) | size of the records (4) | crc of the records (4) | sum (8)
             | delay in ms (8) | length of the topic's name (2) | crc of all before and of the name (4) | name | records

All numbers are big-endian. Records are ``[size][body]`` as in MPUB, so that a chunk is published as it stands. The
checksums (CRC-32C) are salted. A chunk that is not whole, and whatever is behind it, was never answered for, or was
lost with the power before it was synced: it is overwritten by the next one.

An ``Attempt`` knows which chunks its file holds. What may be written, and when files are deleted, its producer decides.
Everything here that touches a file is run in a thread of the disk.
"""

from __future__ import annotations

import asyncio
import os
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import google_crc32c

from flintmq.broker.stage.state import TopicSum
from flintmq.broker.storage.disk import Disk
from flintmq.errors import FormatError, StorageError
from flintmq.kernel import sum_records

__all__ = ["ROWS", "Attempt", "Chunk", "read_chunk", "seed_of"]

#: The suffix of a file of rows.
ROWS = ".rows"

_MAGIC = b"FLINTROW"
_VERSION = 1
_file_head = Struct(">8sHHI")
_chunk_head = Struct(">IIIIIQQH")
_crc = Struct(">I")
_FILE_HEADER = _file_head.size + _crc.size
_CHUNK_HEADER = _chunk_head.size + _crc.size
#: Bytes that are read at once where chunks are checked.
_READ_BYTES = 4 << 20


class Chunk(NamedTuple):
    """One publish, as it stands in a file: ``size`` bytes of records at ``offset``."""

    topic: str
    delay: int
    rows: int
    size: int
    crc: int
    #: The sum of the messages' hashes, modulo 2**64.
    sum: int
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of the messages alone."""
        return self.size - 4 * self.rows


def seed_of(topic: str) -> int:
    """What the hash of a message begins with, so that the same message in another topic has another one."""
    return int.from_bytes(blake2b(topic.encode(), digest_size=8).digest(), "little")


class Attempt:
    """One attempt of a task: its file, and the chunks in it."""

    def __init__(self, path: Path, epoch: int, txn: int, name: str, now: int) -> None:
        self.path = path
        self.epoch = epoch
        self.txn = txn
        self.name = name
        self.chunks: list[Chunk] = []
        self.rows = 0
        #: What they hold, by topic.
        self.topics: dict[str, TopicSum] = {}
        #: Bytes of the file that are whole chunks; 0: there is no file yet.
        self.size = 0
        #: Bytes that were synced; is a sync under way?
        self.synced = 0
        self.syncing = False
        #: The clock's now() of the last call.
        self.touched = now
        #: One call at a time.
        self.turn = asyncio.Lock()
        #: No more chunks are taken; the reason, if it cannot be used any more.
        self.closed = False
        self.broken = ""
        # Were its chunks written by this process, or found and checked?
        self.checked = True
        self._salt = 0

    @classmethod
    def found(cls, disk: Disk, path: Path, now: int) -> Attempt | None:
        """An attempt whose file a start found; None if it is none."""
        epoch, _, rest = path.name.removesuffix(ROWS).partition("-")
        txn, _, name = rest.partition("-")
        if not (epoch.isdigit() and txn.isdigit() and name):
            return None
        attempt = cls(path, int(epoch), int(txn), name, now)
        attempt.checked = False
        fd = disk.open(path)
        try:
            attempt.size = disk.size(fd)
        finally:
            disk.close_file(fd)
        return attempt

    @staticmethod
    def file_name(epoch: int, txn: int, name: str) -> str:
        return f"{epoch}-{txn}-{name}{ROWS}"

    # --- In threads ------------------------------------------------------------------------------------------------

    def write(self, disk: Disk, topic: str, delay: int, count: int, data: bytearray, pos: int, stop: int) -> Chunk:
        """Write the next chunk: the records at ``data[pos:stop]``. OSError: nothing was added."""
        records = bytes(memoryview(data)[pos:stop])
        total = sum_records(data, pos, stop, count, seed_of(topic))
        offset = self.size
        parts: list[bytes] = []
        if not offset:
            self._salt = int.from_bytes(disk.system.randbytes(4), "big") or 1
            head = _file_head.pack(_MAGIC, _VERSION, 0, self._salt)
            parts.append(head + _crc.pack(google_crc32c.extend(0, head)))
        name = topic.encode()
        crc = google_crc32c.extend(self._salt, records)
        head = _chunk_head.pack(self._salt, len(self.chunks), count, len(records), crc, total, delay, len(name))
        parts.append(head + _crc.pack(google_crc32c.extend(google_crc32c.extend(self._salt, head), name)) + name)
        chunk = Chunk(topic, delay, count, len(records), crc, total, offset + sum(map(len, parts)))
        parts.append(records)
        if not offset and disk.exists(self.path):
            # Of a first write that failed.
            disk.remove(self.path)
        fd = disk.open(self.path, create=not offset)
        try:
            try:
                disk.write(fd, parts, offset)
            except OSError:
                disk.truncate(fd, offset)
                raise
        finally:
            disk.close_file(fd)
        return chunk

    def wrote(self, chunk: Chunk) -> None:
        """The chunk is in the file. Called on the loop, or in a thread while nobody else uses the attempt."""
        self.chunks.append(chunk)
        self.rows += chunk.rows
        self.topics.setdefault(chunk.topic, TopicSum()).add(chunk.rows, chunk.bytes, chunk.sum)
        self.size = chunk.offset + chunk.size

    def sync(self, disk: Disk) -> None:
        """Bring what was written to the device."""
        fd = disk.open(self.path)
        try:
            disk.sync(fd)
        finally:
            disk.close_file(fd)

    def check(self, disk: Disk, *, bodies: bool = True) -> None:
        """Find out which chunks a file holds that an earlier process wrote; what is not whole is cut off."""
        fd = disk.open(self.path)
        try:
            chunks, size = self._walk(disk, fd, disk.size(fd), bodies)
            if bodies and size < disk.size(fd):
                disk.truncate(fd, size)
        finally:
            disk.close_file(fd)
        self.chunks, self.rows, self.topics, self.size = [], 0, {}, 0
        for chunk in chunks:
            self.wrote(chunk)
        self.checked = True

    def _walk(self, disk: Disk, fd: int, stop: int, bodies: bool) -> tuple[list[Chunk], int]:
        chunks: list[Chunk] = []
        head = disk.read(fd, _FILE_HEADER, 0)
        if len(head) < _FILE_HEADER:
            return chunks, 0
        magic, version, _, salt = _file_head.unpack_from(head)
        if magic == _MAGIC and version > _VERSION:
            raise FormatError(
                f"{self.path} was written by a newer version of flintmq (format {version}, known: {_VERSION})"
            )
        if magic != _MAGIC or _crc.unpack_from(head, _file_head.size)[0] != google_crc32c.extend(
            0, head[: _file_head.size]
        ):
            return chunks, 0
        self._salt = salt
        offset = _FILE_HEADER
        while offset + _CHUNK_HEADER <= stop:
            chunk = _chunk_at(disk, fd, offset, stop, salt, len(chunks))
            if chunk is None or (bodies and _crc_of(disk, fd, chunk, salt) != chunk.crc):
                break
            chunks.append(chunk)
            offset = chunk.offset + chunk.size
        return chunks, offset if chunks else 0

    @property
    def salt(self) -> int:
        return self._salt


def _chunk_at(disk: Disk, fd: int, offset: int, stop: int, salt: int, number: int) -> Chunk | None:
    # Names are short: one read gets both.
    head = disk.read(fd, _CHUNK_HEADER + 255, offset)
    if len(head) < _CHUNK_HEADER:
        return None
    mark, found, count, size, crc, total, delay, length = _chunk_head.unpack_from(head)
    name = head[_CHUNK_HEADER : _CHUNK_HEADER + length]
    wanted = google_crc32c.extend(google_crc32c.extend(salt, head[: _chunk_head.size]), name)
    if mark != salt or found != number or _crc.unpack_from(head, _chunk_head.size)[0] != wanted:
        return None
    start = offset + _CHUNK_HEADER + length
    return Chunk(name.decode(), delay, count, size, crc, total, start) if start + size <= stop else None


def _crc_of(disk: Disk, fd: int, chunk: Chunk, salt: int) -> int:
    crc = salt
    for at in range(chunk.offset, chunk.offset + chunk.size, _READ_BYTES):
        crc = google_crc32c.extend(crc, disk.read(fd, min(_READ_BYTES, chunk.offset + chunk.size - at), at))
    return crc


def read_chunk(disk: Disk, attempt: Attempt, chunk: Chunk) -> bytearray:
    """The records of a chunk. StorageError if they are damaged."""
    fd = disk.open(attempt.path)
    try:
        data = disk.read(fd, chunk.size, chunk.offset)
    finally:
        disk.close_file(fd)
    if len(data) != chunk.size or google_crc32c.extend(attempt.salt, data) != chunk.crc:
        raise StorageError(f"{attempt.path} is damaged: the rows at {chunk.offset} do not match their checksum")
    return bytearray(data)


def remove_files(disk: Disk, paths: list[Path]) -> None:
    for path in paths:
        if disk.exists(path):
            disk.remove(path)


def sync_attempts(disk: Disk, attempts: list[Attempt]) -> None:
    """Bring the files of these attempts to the device, and their names."""
    for attempt in attempts:
        attempt.sync(disk)
    for folder in {attempt.path.parent for attempt in attempts}:
        disk.sync_folder(folder)
        disk.sync_folder(folder.parent)


def is_rows(name: str) -> bool:
    return os.path.splitext(name)[1] == ROWS
