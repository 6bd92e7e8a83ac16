"""Offsets as they stand in a checkpoint, and how ranges of a log are shared out: plain values, no I/O.

A log's offset says, for each topic and node, up to where it was read, and in which life of that log:

    {"v":1, "mode":"log", "p":{"orders":{"<node>":{"e":"<epoch>","o":123}}}, "init":{…}, "reader":"spark-…"}

``init`` says where a range begins that has no end of an earlier batch to begin at: all of them in the first batch, a
topic that is new, one that skips what is gone. It is part of the batch's end, so that a batch which is run again
after a crash begins where it began the first time; nothing else may be trusted for that. The offset of a spool counts
its rows: ``{"v":1, "mode":"spool", "spool":"<id>", "o":123, "last":"<id of the message in row 122>"}``. A spool from a
backup that was filled again has other messages in the same rows, and so other offsets; 0.1.0 wrote no ``last``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from flintmq.errors import DataLossError

__all__ = ["Mark", "Offset", "Range", "cut", "ranges_between", "read_offset", "share"]

VERSION = 1


class Mark(NamedTuple):
    """A place in one life of a log."""

    epoch: str
    seq: int


#: A topic on a node.
Key = tuple[str, str]
Marks = dict[Key, Mark]


class Range(NamedTuple):
    """Messages ``first`` … ``stop - 1`` of a topic on a node, less the gaps."""

    topic: str
    node: str
    epoch: str
    first: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.first


class Offset(NamedTuple):
    """An offset of log mode."""

    marks: Marks
    init: Marks
    reader: str = ""

    def to_json(self) -> dict[str, Any]:
        """Always the same for the same offset: Spark compares the text."""
        found: dict[str, Any] = {"v": VERSION, "mode": "log", "p": _nest(self.marks)}
        if self.init:
            found["init"] = _nest(self.init)
        if self.reader:
            found["reader"] = self.reader
        return found


def read_offset(data: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """An offset of this mode. DataLossError if it is of another, of a version that we do not know, or none at all."""
    if not isinstance(data, Mapping):
        raise _unreadable(data)
    if data.get("v") != VERSION:
        raise DataLossError("the checkpoint was written by another version of this source: start with a new one")
    if data.get("mode") != mode:
        raise DataLossError(
            f"the checkpoint is one of {data.get('mode')} mode: set mode={data.get('mode')}, or start with a new one"
        )
    return dict(data)


def log_offset(data: Mapping[str, Any]) -> Offset:
    read = read_offset(data, "log")
    try:
        return Offset(_flatten(read["p"]), _flatten(read.get("init") or {}), str(read.get("reader") or ""))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
        raise _unreadable(data) from exc


def _unreadable(data: Any) -> DataLossError:
    return DataLossError(f"the checkpoint holds an offset that cannot be read, {str(data)[:200]}: start with a new one")


def _nest(marks: Marks) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (topic, node), mark in sorted(marks.items()):
        found.setdefault(topic, {})[node] = {"e": mark.epoch, "o": mark.seq}
    return found


def _flatten(data: Mapping[str, Any]) -> Marks:
    return {
        (topic, node): Mark(str(where["e"]), int(where["o"]))
        for topic, nodes in data.items()
        for node, where in nodes.items()
    }


def ranges_between(start: Offset, end: Offset) -> list[Range]:
    """What a batch from one offset to another reads, in a fixed order. Depends on nothing but the two."""
    found = []
    for (topic, node), stop in sorted(end.marks.items()):
        first = end.init.get((topic, node)) or start.marks.get((topic, node))
        if first is None or first.epoch != stop.epoch:
            raise DataLossError(
                f"the checkpoint does not say where reading of {topic} on node {node} began: start with a new one",
                topic=topic,
                node=node,
            )
        if first.seq < stop.seq:
            found.append(Range(topic, node, stop.epoch, first.seq, stop.seq))
    return found


def share(available: Mapping[Key, int], limit: int) -> dict[Key, int]:
    """Give each its part of ``limit``, by what it has; all of it where the limit is not reached.

    Whoever has something gets at least one, as long as the limit allows: a small topic is not starved by a large one.
    """
    total = sum(available.values())
    if total <= limit:
        return dict(available)
    parts = {key: min(count, limit * count // total) for key, count in available.items()}
    left = limit - sum(parts.values())
    # What rounding left over goes to those who got least of what they have.
    for key in sorted(available, key=lambda key: (parts[key] > 0, -available[key], key)):
        if left <= 0:
            break
        if parts[key] < available[key]:
            parts[key] += 1
            left -= 1
    return parts


def cut(ranges: list[Range], min_partitions: int = 0, max_records: int = 0) -> list[Range]:
    """Cut ranges into at least so many pieces, none larger than ``max_records``; both 0: as they are.

    Depends on nothing but its arguments: a batch that is run again is cut the same way.
    """
    total = sum(found.size for found in ranges)
    return [
        piece
        for found in ranges
        for piece in _split(found, max(_pieces(found, total, min_partitions), _least(found.size, max_records)))
    ]


def _pieces(found: Range, total: int, min_partitions: int) -> int:
    """Its part of the pieces wanted, rounded up: together they are never fewer."""
    return max(1, min(found.size, -(-min_partitions * found.size // total))) if total else 1


def _least(size: int, max_records: int) -> int:
    return -(-size // max_records) if max_records else 1


def _split(found: Range, count: int) -> Iterator[Range]:
    edges = [found.first + found.size * number // count for number in range(count + 1)]
    for first, stop in pairwise(edges):
        yield found._replace(first=first, stop=stop)
