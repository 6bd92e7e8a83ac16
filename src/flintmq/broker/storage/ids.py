"""Message ids: which node id a topic's messages were published under, and the record of that in the data path.

A message's id on the wire is its node id (10 bits) and its seq (54 bits). A node's id may change from one start to the
next: the host name that supplies it does, or the data path is restored elsewhere. The messages that are stored keep
their ids. So the data path records, for each topic, from which seq on which node id was used, before the first message
is published under a new one. FIN, REQ and TOUCH accept exactly the id that was delivered.

    flintmq/node-ids.json    {"id": the last one, "used": [all of them], "topics": {incarnation: [[first seq, id], …]}}

Only topics that hold messages of more than the last id are listed. A data path without the record, written by 0.1.0,
has it made from the messages: a segment file is of one process, and so of one node id.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from flintmq.broker.storage.journal import SIDE
from flintmq.broker.storage.segment import Entry, read_records
from flintmq.errors import UNREADABLE
from flintmq.protocol.seqs import SEQ_BITS, format_id, parse_id

if TYPE_CHECKING:
    from flintmq.broker.storage.log import Log
    from flintmq.broker.storage.mover import Mover
    from flintmq.broker.storage.store import Store

__all__ = ["NODE_IDS", "Ids", "NodeIds"]

logger = logging.getLogger(__name__)

#: The record's file, in the folder ``flintmq``.
NODE_IDS = "node-ids.json"

#: From a seq on, this node id was used.
Step = tuple[int, int]


class Ids:
    """The ids of one topic's messages, those of its side log included."""

    __slots__ = ("_prefixes", "_starts", "single")

    def __init__(self, steps: Iterable[Step]) -> None:
        #: Have all messages the same node id? Its bits, at their place in an id; -1 if not.
        self.single = -1
        self.set(steps)

    def set(self, steps: Iterable[Step]) -> None:
        """Replace the steps. They ascend, and the first one holds for every seq before it as well."""
        starts: list[int] = []
        prefixes: list[int] = []
        for start, node in steps:
            prefix = node << SEQ_BITS
            if starts and starts[-1] == start:
                # No message is between them.
                starts.pop()
                prefixes.pop()
            if not prefixes or prefixes[-1] != prefix:
                starts.append(start)
                prefixes.append(prefix)
        self._starts, self._prefixes = starts, prefixes
        self.single = prefixes[0] if len(prefixes) == 1 else -1

    @property
    def steps(self) -> list[Step]:
        return [(start, prefix >> SEQ_BITS) for start, prefix in zip(self._starts, self._prefixes, strict=True)]

    def prefix(self, seq: int) -> int:
        """The node id of a message, at its place in the id."""
        return self._prefixes[max(0, bisect_right(self._starts, seq) - 1)]

    def last_step(self, seq: int) -> int:
        """The first seq that has the node id of ``seq`` and all between them as well."""
        return self._starts[max(0, bisect_right(self._starts, seq) - 1)]

    def text(self, seq: int) -> bytes:
        """A message's id on the wire."""
        return format_id(self.prefix(seq), seq)

    def seq(self, text: bytes) -> int:
        """The seq of the message with this id; -1 if no message of the topic can have it."""
        if self.single >= 0:
            return parse_id(text, self.single)
        for prefix in set(self._prefixes):
            seq = parse_id(text, prefix)
            if seq >= 0:
                return seq if self.prefix(seq) == prefix else -1
        return -1


class Identified(Protocol):
    """A topic, as far as it matters here."""

    incarnation: int
    ids: Ids
    log: Log
    side: Log | None
    mover: Mover

    @property
    def side_end(self) -> int: ...


class _Record(msgspec.Struct):
    id: int
    used: list[int]
    topics: dict[str, list[Step]]


class NodeIds:
    """The record, and the ids of every topic that is made or opened."""

    def __init__(self, store: Store, node: int) -> None:
        self._store = store
        self._disk = store.disk
        self._node = node
        self._record: _Record | None = None

    def read(self, root: Path) -> None:
        """Read the record of a data path, if it has one. One that is damaged is made again."""
        path = root / NODE_IDS
        if not self._disk.exists(path):
            return
        fd = self._disk.open(path)
        try:
            self._record = msgspec.json.decode(self._disk.read(fd, self._disk.size(fd), 0), type=_Record)
        except UNREADABLE as exc:
            logger.error("NSQ: %s is damaged and is made again from the messages - %s", path, exc)
        finally:
            self._disk.close_file(fd)

    def of(self, incarnation: int) -> Ids:
        """The ids of a topic as the record has them."""
        record = self._record
        if record is None:
            return Ids([(0, self._node)])
        return Ids(record.topics.get(str(incarnation)) or [(0, record.id)])

    def take_up(self, root: Path, topics: Sequence[Identified]) -> None:
        """After the logs were read, before anything is published: from their ends on, the present node id is used."""
        record = self._record
        if record is not None and record.id == self._node:
            return
        if record is None:
            for topic in topics:
                found = _stored(self._store, topic)
                # Of what is older, a copy at most is left, and its id is known from here alone.
                topic.ids.set([(0, found[0][1]), *found] if found else [(0, self._node)])
        used = set(record.used) if record is not None else set()
        new = _Record(self._node, [], {})
        for topic in topics:
            used.update(node for _, node in topic.ids.steps)
            topic.ids.set(self._steps(topic))
            if topic.ids.steps != [(0, self._node)]:
                new.topics[str(topic.incarnation)] = topic.ids.steps
        new.used = sorted({*used, self._node})
        self._write(root, new)
        if record is not None:
            logger.info("NSQ: new messages have node id %d, stored ones keep theirs (%d)", self._node, record.id)

    def _steps(self, topic: Identified) -> list[Step]:
        """The steps with the present node id from the logs' ends on, without those that no message is left of."""
        steps = topic.ids.steps
        result: list[Step] = []
        side_first = topic.side.first if topic.side is not None else SIDE
        first = min(topic.mover.first_copied, topic.log.first)
        for low, needed, end in ((0, first, topic.log.end), (SIDE, side_first, topic.side_end)):
            if needed < end:
                result.append((low, _node_at(steps, needed)))
                result += [(start, node) for start, node in steps if needed < start < end]
            result.append((end if needed < end else low, self._node))
        return result

    def _write(self, root: Path, record: _Record) -> None:
        self._disk.replace(root / NODE_IDS, [msgspec.json.encode(record)])
        self._record = record


def _node_at(steps: list[Step], seq: int) -> int:
    return steps[max(0, bisect_right(steps, seq, key=lambda step: step[0]) - 1)][1]


def _stored(store: Store, topic: Identified) -> list[Step]:
    """Each segment's first seq, and the node id of its first message that can be read."""
    found: list[Step] = []
    for log in (topic.log, topic.side):
        for segment in log.segments if log is not None else ():
            fd = store.file(segment)
            for chunk, start in enumerate(segment.index_offsets):
                last = chunk + 1 == len(segment.index_offsets)
                stop = segment.size if last else segment.index_offsets[chunk + 1]
                data = store.disk.read(fd, stop - start, start)
                records = read_records(data, segment.salt, 0, start, True)
                entry = next((entry for entry in records if isinstance(entry, Entry)), None)
                if entry is not None:
                    at = entry.frames_at + 18
                    found.append((segment.base, int(data[at : at + 16], 16) >> SEQ_BITS))
                    break
    return found
