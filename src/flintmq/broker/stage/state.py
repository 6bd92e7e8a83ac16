"""What a node knows of one producer's transactions, and the file that it is kept in.

    state    magic (8) | version (2) | reserved (2) | length (4) | crc of the body (4) | body (MessagePack)

The file is replaced as a whole: written beside the old one, synced, renamed, and the folder synced. Rows are not in it
(``rows``), nor is what is still being staged: a file of rows speaks for itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from struct import Struct

import google_crc32c
import msgspec

from flintmq.broker.storage.disk import Disk
from flintmq.errors import UNREADABLE, FormatError, StorageError
from flintmq.protocol.wire import valid_name

__all__ = [
    "APPLIED",
    "APPLYING",
    "PREPARED",
    "REMEMBERED",
    "STATE",
    "Decision",
    "Prepared",
    "State",
    "TopicSum",
    "encode_state",
    "read_state",
    "valid_attempt",
    "write_state",
]

#: The name of the file in a producer's folder.
STATE = "state"
#: Transactions of a producer that are remembered; unfinished ones always are.
REMEMBERED = 64
#: Runs, and jobs, of a producer that are known to be superseded.
SUPERSEDED = 256

PREPARED, APPLYING, APPLIED = "prepared", "applying", "applied"

_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAGIC = b"FLINTSTA"
_VERSION = 1
_head = Struct(">8sHHII")


class TopicSum(msgspec.Struct):
    """What a set holds of one topic: messages, their bytes, and the sum of their hashes modulo 2**64."""

    count: int = 0
    bytes: int = 0
    sum: int = 0

    def add(self, count: int, size: int, total: int) -> None:
        self.count += count
        self.bytes += size
        self.sum = (self.sum + total) & 0xFFFF_FFFF_FFFF_FFFF


class Prepared(msgspec.Struct):
    """A sealed set of rows of one transaction on this node."""

    epoch: int
    set: str
    #: Attempt, chunks, rows; empty once it is applied.
    winners: list[tuple[str, int, int]]
    topics: dict[str, TopicSum]
    state: str = PREPARED
    #: Bytes of its files, 0 once they are gone; and when it was prepared (wall).
    size: int = 0
    time: int = 0


class Decision(msgspec.Struct):
    """A transaction that is decided: which set of which node is part of it."""

    txn: int
    epoch: int
    nodes: dict[str, str]
    print: object = None
    done: bool = False


class State(msgspec.Struct):
    """All that is durable about one producer on one node. Only its ``Producer`` changes it."""

    producer: str
    #: The identity of the data path: a restored copy of it has another one.
    node: str
    #: The highest epoch that was granted, or seen; and is this node the home that grants them?
    epoch: int = 0
    home: bool = False
    run: str = ""
    job: str = ""
    superseded_runs: list[str] = []
    superseded_jobs: list[str] = []
    #: The highest epoch that something was staged in here.
    fence: int = 0
    #: The epoch that an abort closed: it decides nothing any more.
    closed: int = 0
    decisions: dict[int, Decision] = {}
    sets: dict[int, Prepared] = {}
    #: The highest transaction that was applied here, and the highest that was forgotten; -1: none.
    applied: int = -1
    forgotten: int = -1
    #: The highest transaction that a driver has told is decided, at the home; -1: none. A witness if the home forgets.
    told: int = -1
    #: When it was last written: by the wall clock, for people, and by ``Staging.age``.
    time: int = 0
    age: int = 0

    @property
    def last_decision(self) -> Decision | None:
        """The one that is not done, else the newest."""
        unfinished = [decision for decision in self.decisions.values() if not decision.done]
        if unfinished:
            return unfinished[-1]
        return self.decisions[max(self.decisions)] if self.decisions else None

    @property
    def unfinished(self) -> bool:
        """Is anything prepared, being applied, or decided and not done?"""
        return any(not decision.done for decision in self.decisions.values()) or any(
            found.state != APPLIED for found in self.sets.values()
        )

    @property
    def single(self) -> bool:
        """Has it nothing but transaction 0, as a producer that was made for one write has?"""
        return self.forgotten < 0 and self.applied <= 0 and not any(txn for txn in (*self.decisions, *self.sets))

    @property
    def repeatable(self) -> bool:
        """May another run come and ask what was decided here? Not if the producer is called like its run."""
        return self.home and self.run != self.producer

    def trim(self) -> None:
        """Forget what is more than is remembered."""
        done = sorted(txn for txn, decision in self.decisions.items() if decision.done)
        for txn in done[:-REMEMBERED]:
            del self.decisions[txn]
            self.forgotten = max(self.forgotten, txn)
        applied = sorted(txn for txn, found in self.sets.items() if found.state == APPLIED)
        for txn in applied[:-REMEMBERED]:
            del self.sets[txn]
        del self.superseded_runs[:-SUPERSEDED], self.superseded_jobs[:-SUPERSEDED]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)


def _checked(path: Path, body: bytes) -> State:
    """Return what a state file says. FormatError if it is no state, or names a file that is not in its folder."""
    try:
        state = _decoder.decode(body)
    except UNREADABLE as exc:
        raise FormatError(f"{path} cannot be understood - {exc}") from exc
    for found in state.sets.values():
        for attempt, _, _ in found.winners:
            if not valid_attempt(attempt):
                raise FormatError(f"{path} has the name of an attempt that cannot be one: {attempt[:80]!r}")
        for topic in found.topics:
            if not valid_name(topic):
                raise FormatError(f"{path} has the name of a topic that cannot be one: {topic[:80]!r}")
    return state


def valid_attempt(name: str) -> bool:
    """Return whether an attempt can have this name, which is a part of the name of its file."""
    return _ATTEMPT.fullmatch(name) is not None


def encode_state(state: State) -> bytes:
    body = _encoder.encode(state)
    return _head.pack(_MAGIC, _VERSION, 0, len(body), google_crc32c.extend(0, body)) + body


def write_state(disk: Disk, folder: Path, data: bytes) -> None:
    """Return when ``data`` is on the device as the producer's state. OSError: it may be the old one or the new one."""
    disk.replace(folder / STATE, [data])


def read_state(disk: Disk, folder: Path) -> State | None:
    """The state in a producer's folder; None if there is none. StorageError if it is damaged."""
    path = folder / STATE
    if not disk.exists(path):
        return None
    fd = disk.open(path)
    try:
        data = disk.read(fd, disk.size(fd), 0)
    finally:
        disk.close_file(fd)
    if len(data) >= _head.size:
        magic, version, _, length, crc = _head.unpack_from(data)
        if magic == _MAGIC and version > _VERSION:
            raise FormatError(f"{path} was written by a newer version of flintmq (format {version}, known: {_VERSION})")
        body = data[_head.size :]
        if magic == _MAGIC and len(body) == length and google_crc32c.extend(0, body) == crc:
            return _checked(path, body)
    raise StorageError(
        f"{path} is damaged: it says which staged transactions of a producer were committed. Restore it from a backup; "
        f"or move {folder} away to go on without: then the producer must not repeat a transaction"
    )
