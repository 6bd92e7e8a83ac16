"""Idempotent publish: which keys a topic has stored messages under, so that a repeat stores nothing again.

A publish may carry a key. Its digest stands in the record of the message, so it is exactly as durable as the message
and never known without it. Beside it stands what was published under the key, as one number: its size and checksum. The
same key with other content is an error. ``Keys`` belongs to one topic and owns the window of keys that are remembered,
the keys whose publishes are still being committed, and the files with the keys of segments that are gone. Appending is
the topic's business, segment files are the log's.

What is remembered: at least the newest ``key_count`` keys, none for less than ``key_age``; whichever comes first lets a
key go. A window is a row of tables, oldest first. A table is never made larger and never cleaned: when the newest is
full, another one is begun, and the oldest goes as a whole. So nothing here takes long, however many keys there are.

Reserved keys are those of staged publishes (``broker.stage``). No client can name one, because their digests are made
in another way. They are no part of the window: they are kept only while ``hold`` says so, which is as long as a staged
transaction is unfinished, and then none of them is forgotten for its age or number.

A file of keys, ``<seq of the first>.keys`` beside the segments, is written whole, synced and renamed before the
segment is deleted that its keys stood in. A small one is replaced by one that holds the next segment's keys as well:

    file     magic (8) | version (2) | reserved (2) | count (4) | crc of all before and of the keys (4) | keys
    keys     digests (16 each) | seqs (8 each) | timestamps (8 each) | contents (8 each; not in version 1)

Keys have the same form at the end of a sealed segment. Their numbers are little-endian, as in its footer.
"""

from __future__ import annotations

import errno
import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from mmap import MAP_ANON, MAP_PRIVATE, mmap
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

import google_crc32c
import msgspec

from flintmq.broker.storage.disk import Clock, Disk, pack_numbers, unpack_numbers
from flintmq.errors import FormatError, KeyContentError, LimitError
from flintmq.system import System

if TYPE_CHECKING:
    from flintmq.broker.delivery.commit import Commit
    from flintmq.broker.delivery.topic import Topic

__all__ = [
    "MOST_IN_SEGMENT",
    "RESERVED",
    "KeyBlock",
    "Keys",
    "Window",
    "content_of",
    "is_reserved",
    "key_extra",
    "key_in",
    "reserved_digest",
]

logger = logging.getLogger(__name__)

DIGEST = 16
#: Keys at which a segment ends, so that writing them takes no longer than a few milliseconds.
MOST_IN_SEGMENT = 1 << 16
#: A file of keys is added to up to this many.
MOST_IN_FILE = 1 << 16
#: The first table of a window; each one after it is up to twice as large.
SMALLEST_TABLE = 64
#: The largest table is one in so many of all keys, and no table collects for longer than one in so many of their age:
#: what goes at once is never more than that.
PARTS = 4

_MAGIC = b"FLINTKEY"
_VERSION = 2
_head = Struct(">8sHHI")
_crc = Struct(">I")
_words = Struct("=QQ")
_number = Struct(">q")
#: Bytes of a key in files: with its content, and as version 1 wrote it.
_ENTRY = DIGEST + 24
_OLD_ENTRY = DIGEST + 16
#: The content of a key that has none: stored by version 1.
UNKNOWN = 0
#: The content of a reserved key.
RESERVED = -1
#: The beginning of a record's extra bytes that hold a key and nothing else; without content, as 0.1.0 wrote them.
_EXTRA = msgspec.msgpack.encode({"of": bytes(8), "key": bytes(DIGEST)})
_OF_AT = _EXTRA.index(bytes(8))
_KEY_AT = len(_EXTRA) - DIGEST
_OLD_EXTRA = msgspec.msgpack.encode({"key": bytes(DIGEST)})[:-DIGEST]


def digest_of(key: bytes) -> bytes:
    return blake2b(key, digest_size=DIGEST).digest()


def reserved_digest(name: bytes) -> bytes:
    """The digest of a reserved key: of another function than those of clients' keys."""
    return blake2b(name, digest_size=DIGEST, person=b"flintmq-reserved").digest()


def content_of(*pieces: bytes | bytearray | memoryview, before: int = 0) -> int:
    """What is published under a key, as one number: the size of the records ``[size][body]`` and their checksum.

    ``before`` is the content of records that come first.
    """
    size, crc = before >> 32, before & 0xFFFF_FFFF
    for piece in pieces:
        crc = google_crc32c.extend(crc, bytes(piece))
        size += len(piece)
    return (size & 0x7FFF_FFFF) << 32 | crc


def key_extra(digest: bytes, content: int = UNKNOWN) -> bytes:
    """The extra bytes of a record with this key."""
    if content == UNKNOWN:
        return _OLD_EXTRA + digest
    return b"".join((_EXTRA[:_OF_AT], _number.pack(content), _EXTRA[_OF_AT + 8 : _KEY_AT], digest))


def is_reserved(extra: bytes) -> bool:
    """Do a record's extra bytes hold a reserved key?"""
    return len(extra) == len(_EXTRA) and _number.unpack_from(extra, _OF_AT)[0] == RESERVED and key_in(extra) is not None


def key_in(extra: bytes) -> tuple[bytes, int] | None:
    """The digest of the key in a record's extra bytes, and its content, if there is one."""
    if len(extra) == len(_EXTRA) and extra.startswith(_EXTRA[:_OF_AT]):
        return extra[_KEY_AT:], _number.unpack_from(extra, _OF_AT)[0]
    if len(extra) == len(_OLD_EXTRA) + DIGEST and extra.startswith(_OLD_EXTRA):
        return extra[len(_OLD_EXTRA) :], UNKNOWN
    if len(extra) <= len(_OLD_EXTRA) + DIGEST:
        # In a side log they are shorter, and something else.
        return None
    try:
        found = msgspec.msgpack.decode(extra, type=_Extra)
    except msgspec.DecodeError:
        return None
    if len(found.key) != DIGEST:
        return None
    return found.key, _number.unpack(found.of)[0] if len(found.of) == 8 else UNKNOWN


class _Extra(msgspec.Struct):
    key: bytes = b""
    of: bytes = b""


# --- Keys, packed -----------------------------------------------------------------------------------------------------


class KeyBlock:
    """Keys in the order in which they were stored: each digest, its first seq, when it came (wall), and its content."""

    __slots__ = ("contents", "digests", "seqs", "times")

    def __init__(self) -> None:
        self.digests = bytearray()
        self.seqs = array("q")
        self.times = array("q")
        self.contents = array("q")

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, digest: bytes, seq: int, time: int, content: int = UNKNOWN) -> None:
        self.digests += digest
        self.seqs.append(seq)
        self.times.append(time)
        self.contents.append(content)

    @property
    def last(self) -> bytes:
        return bytes(self.digests[-DIGEST:])

    def cut(self, seq: int) -> None:
        """Forget those from ``seq`` on."""
        kept = bisect_left(self.seqs, seq)
        del self.seqs[kept:], self.times[kept:], self.contents[kept:], self.digests[DIGEST * kept :]

    def skip(self, seq: int) -> None:
        """Forget those before ``seq``."""
        gone = bisect_left(self.seqs, seq)
        del self.seqs[:gone], self.times[:gone], self.contents[:gone], self.digests[: DIGEST * gone]

    def extend(self, other: KeyBlock) -> None:
        self.digests += other.digests
        self.seqs += other.seqs
        self.times += other.times
        self.contents += other.contents

    def split(self) -> tuple[KeyBlock, list[bytes]]:
        """Those of clients, and the digests of the reserved ones."""
        if RESERVED not in self.contents:
            return self, []
        kept, reserved = KeyBlock(), []
        for i, content in enumerate(self.contents):
            digest = bytes(self.digests[DIGEST * i : DIGEST * (i + 1)])
            if content == RESERVED:
                reserved.append(digest)
            else:
                kept.add(digest, self.seqs[i], self.times[i], content)
        return kept, reserved

    def encode(self) -> bytes:
        numbers = map(pack_numbers, (self.seqs, self.times, self.contents))
        return b"".join((self.digests, *numbers))

    @classmethod
    def decode(cls, data: bytes, count: int) -> KeyBlock:
        """The keys as ``encode`` gives them, or as version 1 wrote them: the length tells."""
        block = cls()
        seqs, times, contents = (length * count for length in (DIGEST, DIGEST + 8, DIGEST + 16))
        block.digests += memoryview(data)[:seqs]
        block.seqs = unpack_numbers(data[seqs:times])
        block.times = unpack_numbers(data[times:contents])
        if len(data) == _ENTRY * count:
            block.contents = unpack_numbers(data[contents:])
        else:
            block.contents = array("q", bytes(8 * count))
        return block

    @staticmethod
    def size(count: int, *, old: bool = False) -> int:
        """How many bytes so many keys take; ``old``: as version 1 wrote them."""
        return (_OLD_ENTRY if old else _ENTRY) * count


# --- The window -------------------------------------------------------------------------------------------------------


class _Table:
    """Digests in open addressing. ``first`` and ``last`` are when its oldest and its newest key came."""

    __slots__ = ("contents", "count", "first", "last", "mask", "room", "words")

    def __init__(self, room: int, now: int) -> None:
        # From a third to two thirds full in the end.
        slots = 1 << (room * 3 // 2).bit_length()
        size = (DIGEST + 8) * slots
        # Of a large one the system gives the pages one by one as they are used: none of it is cleared beforehand.
        memory = bytearray(size) if size <= 1 << 16 else mmap(-1, size, flags=MAP_PRIVATE | MAP_ANON)
        self.words = memoryview(memory)[: DIGEST * slots].cast("Q")
        self.contents = memoryview(memory)[DIGEST * slots :].cast("q")
        self.mask = slots - 1
        self.room = room
        self.count = 0
        self.first = self.last = now

    def find(self, low: int, high: int, spot: int) -> int | None:
        """The content of a key; None if it is not here."""
        words, mask = self.words, self.mask
        i = spot & mask
        while word := words[2 * i]:
            if word == low and words[2 * i + 1] == high:
                return self.contents[i]
            i = (i + 1) & mask
        return None

    def put(self, low: int, high: int, spot: int, content: int) -> None:
        words, mask = self.words, self.mask
        i = spot & mask
        while words[2 * i]:
            i = (i + 1) & mask
        words[2 * i] = low
        words[2 * i + 1] = high
        self.contents[i] = content
        self.count += 1


class Window:
    """The keys that are remembered. Times are the clock's ``now()``; limits are given by whoever asks."""

    def __init__(self, system: System) -> None:
        self._tables: list[_Table] = []
        self._count = 0
        # Whoever chooses keys must not be able to choose where they land.
        self._secret = int.from_bytes(system.randbytes(8), "big") | 1

    def __len__(self) -> int:
        return self._count

    @property
    def memory(self) -> int:
        """Bytes that it takes."""
        return sum(table.words.nbytes + table.contents.nbytes for table in self._tables)

    def knows(self, digest: bytes) -> bool:
        return self.find(digest) is not None

    def find(self, digest: bytes) -> int | None:
        """What was published under a key; None if it is not known."""
        low, high = _words.unpack(digest)
        # 0 is an empty place.
        low = low or 1
        spot = low * self._secret >> 64
        # A repeat nearly always follows soon.
        for table in reversed(self._tables):
            content = table.find(low, high, spot)
            if content is not None:
                return content
        return None

    def add(self, digest: bytes, now: int, count: int, age: int, content: int = UNKNOWN) -> None:
        table = self._tables[-1] if self._tables else None
        if table is None or table.count == table.room or (age and now - table.first > age // PARTS):
            table = self._begin(now, count, 2 * table.count if table is not None else 0)
            self.trim(now, count, age)
        low, high = _words.unpack(digest)
        low = low or 1
        table.put(low, high, low * self._secret >> 64, content)
        table.last = now
        self._count += 1

    def _begin(self, now: int, count: int, wanted: int) -> _Table:
        largest = max(SMALLEST_TABLE, -(-count // PARTS))
        table = _Table(min(largest, max(SMALLEST_TABLE, wanted)), now)
        self._tables.append(table)
        return table

    def trim(self, now: int, count: int, age: int) -> None:
        """Forget the tables whose keys are all too many or too old."""
        tables = self._tables
        while tables and ((age and now - tables[0].last > age) or self._count - tables[0].count >= count):
            self._count -= tables[0].count
            del tables[0]

    def load(self, block: KeyBlock, now: int, wall: int, count: int, age: int, more: int) -> None:
        """Add keys that were read back, ``more`` of which are to follow. All before them are older."""
        words = memoryview(block.digests).cast("Q")
        table = self._tables[-1] if self._tables else None
        for i, time in enumerate(block.times):
            # A date from the future is as good as today's.
            came = now - max(0, wall - time)
            if age and now - came > age:
                continue
            if table is None or table.count == table.room or (age and came - table.first > age // PARTS):
                table = self._begin(came, count, len(block) - i + more)
            low = words[2 * i] or 1
            table.put(low, words[2 * i + 1], low * self._secret >> 64, block.contents[i])
            table.last = max(table.last, came)
            self._count += 1

    def digests(self) -> list[tuple[int, bytearray, array[int]]]:
        """All of them by table: when the newest came, the digests, in no order, and their contents."""
        found = []
        for table in self._tables:
            words = table.words
            digests = bytearray()
            contents = array("q")
            for i in range(0, len(words), 2):
                if words[i]:
                    digests += _words.pack(words[i], words[i + 1])
                    contents.append(table.contents[i // 2])
            found.append((table.last, digests, contents))
        return found


# --- Files ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _File:
    path: Path
    count: int
    #: The last seq in it, and when its newest key came (wall).
    last: int
    newest: int


class KeyFiles:
    """The keys of segments that are gone. One call at a time: at the start, or in a thread of the disk."""

    def __init__(self, disk: Disk, folder: Path, name: str) -> None:
        self._disk = disk
        self._folder = folder
        self._name = name
        self._files: list[_File] = []

    @property
    def last(self) -> int:
        """The last seq whose key is in a file; -1 if there is none."""
        return self._files[-1].last if self._files else -1

    def read(self, *, strict: bool = False) -> list[KeyBlock]:
        """All that there are, oldest first. One that is damaged is set aside: what it held is forgotten.

        With ``strict`` an error of the device is raised.
        """
        blocks = []
        names = [name for name in self._disk.names(self._folder) if name.endswith(".keys")]
        if names:
            # One may have been renamed just before a crash. Segments whose keys are in it are deleted from now on.
            self._disk.sync_folder(self._folder)
        for name in names:
            path = self._folder / name
            block = self._read(path, strict=strict)
            if block is None or not len(block):
                logger.error(
                    "KEYS(%s): %s is damaged and set aside, what is repeated with one of its keys is stored again",
                    self._name,
                    path,
                )
                self._disk.rename(path, path.with_name(f"{name}.bad"))
                continue
            self._files.append(_File(path, len(block), block.seqs[-1], max(block.times)))
            blocks.append(block)
        return blocks

    def _read(self, path: Path, *, strict: bool = False) -> KeyBlock | None:
        """The keys in a file; None if it is damaged, missing, or the device cannot read it.

        OSError: it cannot be read now, and may be whole.
        """
        try:
            fd = self._disk.open(path)
            try:
                data = self._disk.read(fd, self._disk.size(fd), 0)
            finally:
                self._disk.close_file(fd)
        except OSError as exc:
            if strict or exc.errno not in (errno.EIO, errno.ENOENT):
                raise
            logger.error("KEYS(%s): cannot read %s - %s", self._name, path, exc)
            return None
        start = _head.size + _crc.size
        if len(data) < start:
            return None
        magic, version, _, count = _head.unpack_from(data)
        if magic == _MAGIC and version > _VERSION:
            raise FormatError(f"{path} was written by a newer version of flintmq (format {version}, known: {_VERSION})")
        crc = google_crc32c.extend(google_crc32c.extend(0, data[: _head.size]), data[start:])
        size = KeyBlock.size(count, old=version < 2)
        if magic != _MAGIC or _crc.unpack_from(data, _head.size)[0] != crc or len(data) != start + size:
            return None
        return KeyBlock.decode(data[start:], count)

    def save(self, keys: KeyBlock) -> None:
        """Returns when the keys are on the device. OSError: they are not, and nothing has changed."""
        keys.skip(self.last + 1)
        if not len(keys):
            return
        last = self._files[-1] if self._files else None
        if last is not None and last.count + len(keys) <= MOST_IN_FILE:
            old = self._read(last.path)
            if old is not None:
                old.extend(keys)
                self._write(last.path, old)
                self._files[-1] = _File(last.path, len(old), old.seqs[-1], max(old.times))
                return
            logger.error("KEYS(%s): %s is damaged, it is not added to", self._name, last.path)
        path = self._folder / f"{keys.seqs[0]:016x}.keys"
        self._write(path, keys)
        self._files.append(_File(path, len(keys), keys.seqs[-1], max(keys.times)))

    def _write(self, path: Path, keys: KeyBlock) -> None:
        body = keys.encode()
        head = _head.pack(_MAGIC, _VERSION, 0, len(keys))
        crc = google_crc32c.extend(google_crc32c.extend(0, head), body)
        self._disk.replace(path, [head, _crc.pack(crc), body])

    def replace(self, keys: KeyBlock) -> None:
        """The same, with these in place of all that there were."""
        path = self._folder / f"{keys.seqs[0]:016x}.keys"
        self._write(path, keys)
        old, self._files = self._files, [_File(path, len(keys), keys.seqs[-1], max(keys.times))]
        for file in old:
            if file.path != path:
                self._remove(file.path)

    def expire(self, wall: int, count: int, age: int, later: int) -> None:
        """Remove the files whose keys are all too old, or too many: ``later`` keys are newer than any file."""
        files = self._files
        while files and (
            (age and wall - files[0].newest > age) or later + sum(file.count for file in files[1:]) >= count
        ):
            self._remove(files.pop(0).path)

    def _remove(self, path: Path) -> None:
        try:
            self._disk.remove(path)
        except OSError as exc:
            # The next start tries again.
            logger.error("KEYS(%s): cannot remove %s - %s", self._name, path, exc)


# --- A topic's keys ---------------------------------------------------------------------------------------------------


class Keys:
    """The keys of one topic. Made by the first publish with a key, or by a start that finds some."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._clock: Clock = topic.broker.clock
        self.window = Window(topic.broker.disk.system)
        #: How many publishes were repeats.
        self.repeats = 0
        # Publishes that are being committed, and their contents, by digest; and the digests by commit.
        self._pending: dict[bytes, tuple[Commit, int]] = {}
        self._committing: dict[Commit, list[bytes]] = {}
        # Staged transactions that are unfinished, and the reserved keys that a start found.
        self._holds = 0
        self.reserved: set[bytes] = set()
        # Some keys may be in no file: they came while the durability was ``memory``.
        self._unwritten = False
        self._files: KeyFiles | None = None
        if topic.folder is not None:
            self._files = KeyFiles(topic.broker.disk, topic.folder, topic.name)
            topic.log.keep_keys_with(self._keep)

    # --- Publishing ------------------------------------------------------------------------------------------------

    def once(
        self, key: bytes, publish: Callable[[bytes], Commit | None], content: int = UNKNOWN
    ) -> tuple[Commit | None, bool]:
        """Publish, unless it was done before under this key: what to wait for (None: nothing), and was it?

        ``publish`` is given the extra bytes for its records. If it raises, or its commit fails, the key is free again.
        KeyContentError if other ``content`` was published under the key.
        """
        settings = self._topic.settings
        if settings.key_count <= 0:
            raise LimitError("no keys are remembered for this topic (key-count is 0)")
        self.trim()
        digest = digest_of(key)
        commit, stored = self._pending.get(digest) or (None, self.window.find(digest))
        if stored is not None:
            _compare(key, stored, content)
            self.repeats += 1
            return commit, True
        commit = publish(key_extra(digest, content))
        if commit is None:
            self._remember(digest, content)
        else:
            self._pending[digest] = (commit, content)
            together = self._committing.get(commit)
            if together is None:
                together = self._committing[commit] = []
                # Before anybody who waits for it too: whoever hears that it is done may publish again.
                commit.waiters.insert(0, lambda: self._committed(commit))
            together.append(digest)
        return commit, False

    def _committed(self, commit: Commit) -> None:
        for digest in self._committing.pop(commit):
            _, content = self._pending.pop(digest)
            if commit.error is None:
                self._remember(digest, content)

    def _remember(self, digest: bytes, content: int) -> None:
        settings = self._topic.settings
        self.window.add(digest, self._clock.now(), settings.key_count, settings.key_age, content)
        self._unwritten |= settings.durability == "memory"

    def trim(self) -> None:
        """Forget what is too old, or too many."""
        settings = self._topic.settings
        self.window.trim(self._clock.now(), settings.key_count, settings.key_age)

    # --- Reserved keys ---------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """A staged transaction begins: forget no reserved key from here on, until ``release``."""
        self._holds += 1

    def release(self) -> None:
        """A staged transaction is finished."""
        self._holds -= 1
        if not self._holds:
            self.reserved = set()

    # --- What outlives a segment, and the process --------------------------------------------------------------------

    def _keep(self, keys: KeyBlock, later: int) -> None:
        """In a thread: a segment is about to be deleted. ``later`` more keys are in the segments after it."""
        assert self._files is not None
        settings = self._topic.settings
        if self._holds:
            self._files.save(keys)
            return
        self._files.save(keys.split()[0])
        self._files.expire(self._clock.wall(), settings.key_count, settings.key_age, later)

    def restore(self) -> bool:
        """Read back what a start finds; False if that is nothing, and nothing is held."""
        assert self._files is not None
        settings = self._topic.settings
        now, wall = self._clock.now(), self._clock.wall()
        # What is not known of an unfinished staged transaction would be published once more.
        strict = self._holds > 0
        saved = self._files.read(strict=strict)
        # From the newest on, and no more of them than count.
        blocks: list[KeyBlock] = []
        total = 0
        for found in self._topic.log.keys(strict=strict):
            found.skip(self._files.last + 1)
            block, reserved = found.split()
            if self._holds:
                self.reserved.update(reserved)
            elif total >= settings.key_count:
                break
            if total < settings.key_count:
                blocks.append(block)
                total += len(block)
        if not self._holds:
            self._files.expire(wall, settings.key_count, settings.key_age, total)
        for found in reversed(saved):
            block, reserved = found.split()
            if self._holds:
                self.reserved.update(reserved)
            elif total >= settings.key_count:
                break
            if total < settings.key_count:
                blocks.append(block)
                total += len(block)
        more = total
        for block in reversed(blocks):
            more -= len(block)
            self.window.load(block, now, wall, settings.key_count, settings.key_age, more)
        self.trim()
        return bool(total or self._holds)

    def close(self) -> None:
        """A clean stop. With durability ``memory`` much was never in a file, so the window itself is saved."""
        window, self.window = self.window, Window(self._topic.broker.disk.system)
        if self._files is None or not self._unwritten or not len(window):
            return
        now, wall = self._clock.now(), self._clock.wall()
        keys = KeyBlock()
        for last, digests, contents in window.digests():
            keys.digests += digests
            keys.contents += contents
            keys.times += array("q", [wall - (now - last)]) * (len(digests) // DIGEST)
        # Nothing that the segments say of keys counts beside them, so those of unfinished transactions belong to them.
        for digest in self.reserved if self._holds else ():
            keys.add(digest, 0, wall, RESERVED)
        # Each stands for all that was stored so far.
        keys.seqs = array("q", [self._topic.log.end - 1]) * len(keys.times)
        self._files.replace(keys)


def _compare(key: bytes, stored: int, content: int) -> None:
    """KeyContentError if both are known, and differ."""
    if UNKNOWN in (stored, content) or stored == content:
        return
    sizes = stored >> 32, content >> 32
    how = f"{sizes[0]} bytes then, {sizes[1]} now" if sizes[0] != sizes[1] else f"{sizes[0]} bytes, with other content"
    raise KeyContentError(
        f"key {key.decode('ascii', 'replace')} was used for another publish ({how}): nothing was stored. "
        "Use a new key for every publish, and repeat one unchanged"
    )
