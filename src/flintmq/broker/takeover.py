"""A data path left by the Go nsqd: read what is queued there, then put its files out of the way.

``read`` understands ``nsqd.dat`` and the disk queues beside it and changes nothing. A GoQueue streams its messages, so
that memory stays at one chunk and one message however large the files are. Nothing is left out without a word: what
cannot be read, or what the Go daemon itself would have skipped, is a line in ``damage``. An Importer writes what was
read in our own form. ``move_aside`` moves every Go file into one folder. When to do which, and locking the data path
meanwhile, is the broker's part.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from flintmq.broker.data_path import METADATA
from flintmq.broker.delivery.topic import RESERVE
from flintmq.broker.storage.disk import Clock, Disk
from flintmq.broker.storage.journal import SIDE, Journal
from flintmq.broker.storage.log import Log
from flintmq.broker.storage.store import Store
from flintmq.errors import StartError
from flintmq.options import NsqdOptions
from flintmq.protocol.wire import is_ephemeral, valid_name

__all__ = ["GoChannel", "GoData", "GoMessage", "GoQueue", "GoTopic", "Importer", "move_aside", "read"]

# A queue is called <topic> or <topic>:<channel> (";" on Windows). Topic names may hold dots and even ".diskqueue": the
# greedy name in front takes all it can, so that the rest is matched at the right end.
_QUEUE_NAME = r"(?P<queue>[.a-zA-Z0-9_#:;-]+)"
_DATA_FILE = re.compile(_QUEUE_NAME + r"\.diskqueue\.(?P<number>\d{6}|[1-9]\d{6,17})\.dat(?P<bad>\.bad)?", re.ASCII)
_META_FILE = re.compile(_QUEUE_NAME + r"\.diskqueue\.meta\.dat(?P<unfinished>\.\d+\.tmp)?", re.ASCII)
# Versions before 1.2 also keep nsqd.<node id>.dat, a link to nsqd.dat or a copy of it.
_NSQD_FILE = re.compile(r"nsqd(\.\d+)?\.dat(\.\d+\.tmp)?", re.ASCII)

# depth, read file and position, write file and position
_POSITIONS = re.compile(rb"(-?\d{1,18})\n(\d{1,18}),(\d{1,18})\n(\d{1,18}),(\d{1,18})")

# A record is
#   4 bytes  length of the rest, signed     8 bytes  publish time in ns
#   2 bytes  attempts                      16 bytes  id, lower-case hex digits      then the body
# all big-endian, with neither checksum nor marker.
_HEADER = struct.Struct(">iqH16s")
_LENGTH_SIZE = 4
_SHORTEST = _HEADER.size - _LENGTH_SIZE
_HEX_DIGITS = re.compile(rb"[0-9a-f]*")
_CHUNK = 256 * 1024


@dataclass(frozen=True, slots=True)
class GoMessage:
    timestamp: int  # ns
    attempts: int  # as stored: how often it had been delivered
    id: bytes  # 16 bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class GoChannel:
    name: str
    paused: bool
    queue: GoQueue


@dataclass(frozen=True, slots=True)
class GoTopic:
    name: str
    paused: bool
    queue: GoQueue  # messages not yet handed to channels
    channels: tuple[GoChannel, ...]


@dataclass(frozen=True, slots=True)
class GoData:
    """What a Go data path holds."""

    topics: tuple[GoTopic, ...]
    metadata: Path  # nsqd.dat
    files: tuple[Path, ...]  # every Go file, nsqd.dat last
    orphans: tuple[GoQueue, ...]  # queues whose topic or channel nsqd.dat does not know; the Go daemon ignores them
    damage: list[str]
    stopped: float  # when nsqd.dat was last written, unix time: the Go daemon does it at its stop


class GoQueue:
    """One disk queue: iterating yields its unread messages, oldest first. Without files it is empty.

    Every iteration starts anew, and fills ``damage`` anew with one line per place that cannot be read.
    """

    def __init__(self, name: str, files: tuple[Path, ...], *, max_msg_size: int) -> None:
        self.name = name
        self.files = files
        self.depth: int | None = None
        self.damage: list[str] = []
        self._longest = max_msg_size + _SHORTEST
        self._data: dict[int, Path] = {}
        self._set_aside: list[Path] = []
        self._doubt = ""  # why the recorded positions cannot be used
        self._positions: _Positions | None = None
        for path in files:
            if match := _DATA_FILE.fullmatch(path.name):
                if match["bad"]:
                    self._set_aside.append(path)
                else:
                    self._data[int(match["number"])] = path
            elif (match := _META_FILE.fullmatch(path.name)) and not match["unfinished"]:
                self._positions = self._read_positions(path)
        if self._positions is None and self._data:
            # The Go daemon would start again at file 0 and write over what is there.
            self._doubt = self._doubt or "there is no metadata file"
            self._positions = _Positions(min(self._data), 0, max(self._data), 0)

    def __iter__(self) -> Iterator[GoMessage]:
        self.damage.clear()
        self.damage.extend(f"{path.name}: set aside as bad by the Go nsqd, not read" for path in self._set_aside)
        count = 0
        for path, start, expected_size in self._unread_files():
            for message in self._records(path, start, expected_size):
                count += 1
                yield message
        # More than the recorded depth is normal after an unclean stop; fewer means that some are gone.
        if self.depth is not None and count < self.depth:
            self.damage.append(f"{self.name}: the metadata counts {self.depth} messages, {count} could be read")

    def _read_positions(self, path: Path) -> _Positions | None:
        try:
            with open(path, "rb") as file:
                match = _POSITIONS.match(file.read(256))
        except OSError as exc:
            raise _unreadable(path, exc) from exc
        if match is None:
            self._doubt = f"{path.name} is malformed"
            return None
        depth, *numbers = map(int, match.groups())
        positions = _Positions(*numbers)
        if positions.read > positions.write:
            # The Go daemon would delete what is left.
            self._doubt = f"{path.name} has the read position after the write position"
            return None
        self.depth = depth
        return positions

    def _unread_files(self) -> Iterator[tuple[Path, int, int]]:
        """The files to read, in order: where to start in each, and the size it has at least if all is well."""
        if self._doubt:
            self.damage.append(f"{self.name}: {self._doubt}; every data file is read from its start")
        if self._positions is None:
            return
        at = self._positions
        if at.read == at.write:
            last_expected = at.read_file - 1
        else:
            last_expected = at.write_file if at.write_pos else at.write_file - 1
        next_number = at.read_file
        for number, path in sorted(self._data.items()):
            if number < at.read_file:
                self.damage.append(f"{path.name}: lies before the read position, taken as delivered, not read")
                continue
            self._note_missing(next_number, min(number - 1, last_expected))
            next_number = number + 1
            if number > at.write_file:
                # Left by a second crash soon after a first: the daemon had begun this file and not yet said so.
                self.damage.append(f"{path.name}: the metadata does not know this file; it is read all the same")
            yield path, at.read_pos if number == at.read_file else 0, at.write_pos if number == at.write_file else 0
        self._note_missing(next_number, last_expected)

    def _note_missing(self, first: int, last: int) -> None:
        if first <= last:
            numbers = f"file {first:06d} is" if first == last else f"files {first:06d} to {last:06d} are"
            self.damage.append(f"{self.name}: data {numbers} missing")

    def _records(self, path: Path, position: int, expected_size: int) -> Iterator[GoMessage]:
        size = position
        try:
            with open(path, "rb", buffering=_CHUNK) as file:
                # The real size, not the recorded one: after an unclean stop the file goes on beyond it.
                size = os.fstat(file.fileno()).st_size
                expected = max(position, expected_size)
                if size < expected:
                    self.damage.append(f"{path.name}: ends at offset {size}, the metadata expects at least {expected}")
                file.seek(min(position, size))  # file systems refuse to seek very far beyond the end
                while position < size:
                    header = file.read(_HEADER.size)
                    if flaw := self._flaw(header, file.fileno(), position, size):
                        # Without a checksum or a marker nothing after this point can be trusted to be a record.
                        self._give_up(path, position, size, flaw)
                        return
                    length, timestamp, attempts, message_id = _HEADER.unpack(header)
                    body = file.read(length - _SHORTEST)
                    if len(body) != length - _SHORTEST:
                        self._give_up(path, position, size, "the file became shorter while it was read")
                        return
                    yield GoMessage(timestamp, attempts, message_id, body)
                    position += _LENGTH_SIZE + length
        except OSError as exc:
            # A bad sector costs the rest of the file. Anything else (most likely a file of another user) can be put
            # right, and must not pass for an empty queue.
            if exc.errno != errno.EIO:
                raise _unreadable(path, exc) from exc
            self._give_up(path, position, size, exc.strerror or str(exc))

    def _flaw(self, header: bytes, fd: int, position: int, size: int) -> str:
        """Why the record at ``position`` cannot be taken; empty if it can."""
        if len(header) < _HEADER.size:
            return "the last record is cut off"
        length, _, _, message_id = _HEADER.unpack(header)
        left = size - position - _LENGTH_SIZE
        if length < _SHORTEST or self._longest < length > left:
            return f"invalid record length {length}"
        if length > left:
            return f"the last record is cut off: {length} bytes announced, {left} there"
        # A longer message may be from a time with a larger --max-msg-size, and an odd id may be all that is wrong with
        # a record. Both are kept if what follows shows that the length is right.
        if length > self._longest or not _HEX_DIGITS.fullmatch(message_id):
            if not self._continues(fd, position + _LENGTH_SIZE + length, size):
                return f"no message with length {length} and id {message_id!r}"
        return ""

    def _continues(self, fd: int, position: int, size: int) -> bool:
        """Does a record, or the exact end of the file, follow at ``position``? A record that is cut off counts."""
        header = os.pread(fd, _HEADER.size, position)
        if len(header) < _LENGTH_SIZE:
            return True
        length = int.from_bytes(header[:_LENGTH_SIZE], "big", signed=True)
        longest = max(self._longest, size - position - _LENGTH_SIZE)
        return _SHORTEST <= length <= longest and _HEX_DIGITS.fullmatch(header, _HEADER.size - 16) is not None

    def _give_up(self, path: Path, position: int, size: int, why: str) -> None:
        self.damage.append(f"{path.name}: unreadable from offset {position} to its end at {size}: {why}")


class _Positions(NamedTuple):
    read_file: int
    read_pos: int
    write_file: int
    write_pos: int

    @property
    def read(self) -> tuple[int, int]:
        return self.read_file, self.read_pos

    @property
    def write(self) -> tuple[int, int]:
        return self.write_file, self.write_pos


def _unreadable(path: Path, exc: OSError) -> StartError:
    why = exc.strerror or str(exc)
    hint = " (the Go nsqd's files can be read only by the user it ran as)" if isinstance(exc, PermissionError) else ""
    return StartError(f"cannot read {path} - {why}{hint}")


# --- nsqd.dat


class _ChannelEntry(msgspec.Struct):
    name: str | None = None
    paused: bool | None = None


class _TopicEntry(msgspec.Struct):
    name: str | None = None
    paused: bool | None = None
    channels: list[_ChannelEntry | None] | None = None


class _Metadata(msgspec.Struct):
    topics: list[_TopicEntry | None] | None = None


@dataclass(slots=True)
class _TopicState:
    paused: bool = False
    channels: dict[str, bool] = field(default_factory=dict)  # name → paused


def _load_metadata(path: Path, damage: list[str]) -> dict[str, _TopicState]:
    """Topics by name. As in Go, ``null`` is the same as nothing, and a name that comes twice is one topic."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        why = exc.strerror or str(exc)
        raise StartError(f"failed to load metadata - failed to read metadata from {path} - {why}") from exc
    try:
        # As in Go, bytes that are not UTF-8 only spoil the name they are in.
        entries = msgspec.json.decode(data.decode(errors="replace"), type=_Metadata | None)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise StartError(
            f"failed to load metadata - failed to parse metadata in {path} - {exc} (restore the file, or write one "
            'that lists the topics and channels as {"topics":[{"name":"t","channels":[{"name":"c"}]}]}: '
            "the files t.diskqueue.* and t:c.diskqueue.* beside it tell the names)"
        ) from exc
    topics: dict[str, _TopicState] = {}
    for topic_entry in (entries and entries.topics) or ():
        topic_entry = topic_entry or _TopicEntry()
        topic_name = topic_entry.name or ""
        if not valid_name(topic_name):
            damage.append(f"{path.name}: skipping invalid topic name {topic_name!a}")
            continue
        topic = topics.setdefault(topic_name, _TopicState())
        topic.paused |= bool(topic_entry.paused)
        for channel_entry in topic_entry.channels or ():
            channel_entry = channel_entry or _ChannelEntry()
            name = channel_entry.name or ""
            if not valid_name(name):
                damage.append(f"{path.name}: skipping invalid channel name {name!a} of topic {topic_name}")
                continue
            topic.channels[name] = topic.channels.get(name, False) or bool(channel_entry.paused)
    return topics


# --- the data path


def read(data_path: Path, *, max_msg_size: int) -> GoData:
    """Everything the Go nsqd left in ``data_path``. Message data is read only when the queues are iterated.

    Messages longer than ``max_msg_size`` are kept where it is clear that they are messages.
    """
    metadata = data_path / METADATA
    damage: list[str] = []
    topics = _load_metadata(metadata, damage)
    files: list[Path] = []
    queue_files: dict[str, list[Path]] = {}
    try:
        stopped = metadata.stat().st_mtime
        with os.scandir(data_path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file())
    except OSError as exc:
        raise _unreadable(data_path, exc) from exc
    for name in names:
        if match := _DATA_FILE.fullmatch(name) or _META_FILE.fullmatch(name):
            queue_files.setdefault(match["queue"], []).append(data_path / name)
            files.append(data_path / name)
        elif name != METADATA and _NSQD_FILE.fullmatch(name):
            files.append(data_path / name)

    def queue(name: str) -> GoQueue:
        return GoQueue(name, tuple(queue_files.pop(name, ())), max_msg_size=max_msg_size)

    def topic_queue(topic: str) -> GoQueue:
        # An ephemeral topic has no disk queue; files of that name are not its own.
        return GoQueue(topic, (), max_msg_size=max_msg_size) if is_ephemeral(topic) else queue(topic)

    def channel_queue(topic: str, channel: str) -> GoQueue:
        name = f"{topic}:{channel}"
        if is_ephemeral(channel):
            return GoQueue(name, (), max_msg_size=max_msg_size)
        on_windows = f"{topic};{channel}"
        return queue(on_windows if name not in queue_files and on_windows in queue_files else name)

    known = tuple(
        GoTopic(
            topic,
            state.paused,
            topic_queue(topic),
            tuple(GoChannel(name, paused, channel_queue(topic, name)) for name, paused in state.channels.items()),
        )
        for topic, state in topics.items()
    )
    orphans = tuple(queue(name) for name in sorted(queue_files))
    damage.extend(f"{orphan.name}: queue files of a topic or channel that nsqd.dat does not list" for orphan in orphans)
    return GoData(known, metadata, (*files, metadata), orphans, damage, stopped)


def move_aside(data: GoData, data_path: Path, disk: Disk) -> Path:
    """Move every Go file into one folder inside ``data_path``, durably, and return the folder.

    Call it before an nsqd.dat of our own is written. The folder is named after the time of the Go daemon's nsqd.dat and
    that file goes last: after a crash half-way, ``read`` and this call again finish the same folder.
    """
    name = time.strftime("go-nsqd-%Y%m%dT%H%M%SZ", time.gmtime(data.stopped))
    left = [path for path in data.files if os.path.lexists(path)]
    folder = data_path / name
    # A file is in both places only if someone copied an old folder back: never write over the older copy.
    copies = 1
    while any(os.path.lexists(folder / path.name) for path in left):
        copies += 1
        folder = data_path / f"{name}-{copies}"
    try:
        if not disk.exists(folder):
            disk.make_folder(folder)
        disk.sync_folder(data_path)
        for path in left:
            if path == data.metadata:
                disk.sync_folder(folder)
                disk.sync_folder(data_path)
            disk.rename(path, folder / path.name)
        # First where the names are now, then where they were: they may show up twice, but never nowhere.
        disk.sync_folder(folder)
        disk.sync_folder(data_path)
    except OSError as exc:
        raise StartError(f"cannot move the files of the Go nsqd to {folder} - {exc.strerror or exc}") from exc
    return folder


# --- Writing it in our form ------------------------------------------------------------------------------------------


class Importer:
    """Writes what was read from a Go data path in our form, into a folder that is not in use yet."""

    def __init__(self, disk: Disk, clock: Clock, options: NsqdOptions, root: Path) -> None:
        self._disk = disk
        self._clock = clock
        self._options = options
        self._root = root
        # However long it gets, it is one file: there is no broker yet that could take a snapshot.
        self._journal = Journal(disk, clock, root / "journal", fatal=_raise, later=lambda work: work(), snapshot=None)
        self._stores: list[Store] = []
        self._incarnation = 0
        self._channel = 0

    def start(self) -> None:
        """Begin. From here on ``close`` gives back what is open, also after an error."""
        self._journal.start(self._journal.recover())

    def close(self) -> None:
        for store in self._stores:
            store.close()
        self._journal.close()

    def topic(self, source: GoTopic) -> None:
        self._incarnation += 1
        folder = self._root / "topics" / f"{source.name}@{self._incarnation}"
        self._disk.make_folder(folder)
        base = self._clock.wall() // 1000
        self._journal.note("topic", self._incarnation, source.name, base, base + RESERVE)
        self._journal.note("pause", self._incarnation, source.paused)
        main = self._new_log(source.name, folder, base)
        for message in source.queue:
            _append(main, message.timestamp, 1, message.body, b"")
        _finish_log(main)
        side: Log | None = None
        for channel in source.channels:
            self._channel += 1
            # The topic's backlog is for every channel; what each had already is for it alone.
            self._journal.note("channel", self._incarnation, self._channel, channel.name, base, SIDE)
            self._journal.note("channel_pause", self._channel, channel.paused)
            for message in channel.queue:
                if side is None:
                    self._disk.make_folder(folder / "side")
                    side = self._new_log(source.name, folder / "side", SIDE)
                attempts = min(message.attempts + 1, 65_535)
                _append(side, message.timestamp, attempts, message.body, self._channel.to_bytes(4, "big"))
        if side is not None:
            _finish_log(side)
        frozen = base if source.paused or not source.channels else None
        self._journal.note("frozen", self._incarnation, frozen)
        ceiling = max(main.end, base) + RESERVE
        self._journal.note("ceiling", self._incarnation, ceiling)
        self._journal.note("durable", self._incarnation, main.end)
        self._journal.note("end", self._incarnation, main.end, side.end if side is not None else SIDE)
        self._disk.sync_folder(folder)
        self._journal.flush()

    def finish(self) -> None:
        self._disk.sync_folder(self._root / "topics")
        self._journal.save(clean=True)
        self._journal.close()
        self._disk.sync_folder(self._root / "journal")

    def _new_log(self, name: str, folder: Path, base: int) -> Log:
        store = Store(
            self._disk,
            self._clock,
            self._options,
            fatal=_raise,
            relieved=lambda: None,
            delay=lambda _, work: work(),
            recovered=lambda: None,
        )
        self._stores.append(store)
        # In memory until we say so: many messages go into one record, and one sync serves many records.
        return Log(store, name, folder, base, "memory", progressed=lambda: None, failed=_failed, arrived=lambda _: None)


def _append(target: Log, timestamp: int, attempts: int, body: bytes, extra: bytes) -> None:
    data = bytearray(len(body).to_bytes(4, "big") + body)
    target.append(data, 0, len(data), 1, timestamp, attempts=attempts, extra=extra)
    if target.memory_bytes > 8 << 20:
        _drain(target)


def _drain(target: Log) -> None:
    target.write_all()
    target.sync_now()
    target.trim(0, 0, lambda first, stop: False, lambda first, stop: False)


def _finish_log(target: Log) -> None:
    _drain(target)
    target.close()


def _raise(error: BaseException) -> None:
    raise error


def _failed(_: int, error: Exception) -> None:
    raise error
