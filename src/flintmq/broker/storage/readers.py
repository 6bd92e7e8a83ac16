"""Who else keeps a topic's files: readers of its log, by their positions, and the topic's retention.

Channels keep what they have not finished. A reader is not connected to anything: it has a name and a position, says
where it has got to, and everything from there on stays for it. One that is forgotten must not fill the disk, so a
position that does not move for long, or that holds too much, is given up. Retention keeps the newest files whether
anybody needs them or not; where the disk gets full it gives way.

Both only say what has to stay. What goes, and when, is the broker's business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from flintmq.broker.storage.journal import NEVER
from flintmq.broker.storage.segment import Segment
from flintmq.errors import FullError
from flintmq.options import format_duration

if TYPE_CHECKING:
    from flintmq.broker.delivery.topic import Topic

__all__ = ["MOST_READERS", "Position", "Readers", "Retention"]

logger = logging.getLogger(__name__)

#: Positions of one topic.
MOST_READERS = 1_000
#: While the broker was down nobody could move: after its start readers have this long to come back.
GRACE = 3600 * 1_000_000_000
#: A reader whose name begins like this is there for a while only: it expires after this many ns without a move.
TEMPORARY = "temporary:"
TEMPORARY_AGE = 300 * 1_000_000_000


class Position(NamedTuple):
    #: The first seq that it has not read yet.
    offset: int
    #: When it last moved, ns since 1970.
    moved: int


class Readers:
    """The positions of one topic, by the readers' names."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self.positions: dict[str, Position] = {}

    def __bool__(self) -> bool:
        return bool(self.positions)

    @property
    def first(self) -> int:
        """The lowest seq that one of them still wants."""
        return min((position.offset for position in self.positions.values()), default=NEVER)

    def move(self, name: str, offset: int) -> int:
        """Everything before ``offset`` is read; a reader of a new name is registered.

        The journal's position at which that is known. FullError if there are too many.
        """
        if name not in self.positions and len(self.positions) >= MOST_READERS:
            raise FullError(f"a topic has at most {MOST_READERS} readers")
        moved = self._topic.broker.clock.wall()
        self.positions[name] = Position(offset, moved)
        return self._topic.broker.journal.note("reader", self._topic.incarnation, name, offset, moved)

    def remove(self, name: str) -> int:
        """The journal's position at which it is known that the reader is gone. KeyError if there is none."""
        del self.positions[name]
        return self._topic.broker.journal.note("unreader", self._topic.incarnation, name)

    def restore(self, positions: Mapping[str, tuple[int, int]]) -> None:
        self.positions = {name: Position(*position) for name, position in positions.items()}

    def notes(self) -> Iterator[tuple[Any, ...]]:
        """For a snapshot of the journal."""
        for name, position in list(self.positions.items()):
            yield ("reader", self._topic.incarnation, name, *position)

    def describe(self, name: str) -> dict[str, Any]:
        """How far a reader is, in messages and in bytes of files behind what is durable."""
        position = self.positions[name]
        messages, size = self._topic.log.measure(position.offset, self._topic.durable)
        return {"reader": name, "offset": position.offset, "lag": messages, "bytes": size, "moved": position.moved}

    def expire(self) -> None:
        """Give up positions that did not move for too long, or hold too much."""
        if not self.positions:
            return
        topic = self._topic
        reader_age, most = topic.settings.reader_age, topic.settings.reader_bytes
        wall = topic.broker.clock.wall()
        up = topic.broker.clock.now() - topic.broker.counters.started
        for name, position in list(self.positions.items()):
            reason = ""
            age = min(reader_age or TEMPORARY_AGE, TEMPORARY_AGE) if name.startswith(TEMPORARY) else reader_age
            back = up >= min(age, GRACE)
            if age and back and wall - position.moved > age:
                reason = f"it did not move for {format_duration(wall - position.moved)}"
            elif most and topic.log.measure(position.offset, topic.log.end)[1] > most:
                reason = f"it holds more than {most} bytes"
            if reason:
                logger.warning(
                    "TOPIC(%s): the reader %s is given up at %d: %s", topic.name, name, position.offset, reason
                )
                self.remove(name)


class Retention:
    """What a topic keeps of its files whether anybody needs them or not: ``retain_bytes``, ``retain_age``.

    A file is deleted when it is beyond either limit: when the newer ones alone hold that many bytes, or when its last
    message is older than that. So a little more than the limits is kept, never less. A file that is still written to
    stays.
    """

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        # Before this the disk needed the room.
        self._given_up = 0

    @property
    def first(self) -> int:
        """The lowest seq that is kept."""
        settings, storage = self._topic.settings, self._topic.log
        if not (settings.retain_bytes or settings.retain_age) or storage.durability == "memory":
            return NEVER
        wall = self._topic.broker.clock.wall()
        first, size, ended = NEVER, 0, wall
        for segment in reversed(storage.segments):
            if settings.retain_bytes and size >= settings.retain_bytes:
                break
            if settings.retain_age and wall - ended > settings.retain_age:
                break
            first = segment.base
            size += segment.size
            # It had its last message when the next one had its first. A time that is still to come says nothing.
            if segment.index_times and segment.index_times[0] <= wall:
                ended = segment.index_times[0]
        return max(first, self._given_up)

    def spare(self) -> Iterator[tuple[Segment, int]]:
        """The files that are kept by retention alone, oldest first, and where each one ends."""
        storage = self._topic.log
        needed = min(self._topic.first_needed(), self._topic.readers.first)
        if self.first == NEVER:
            return
        for segment, following in zip(storage.segments, storage.segments[1:], strict=False):
            if following.base > needed:
                return
            if segment.base >= self._given_up:
                yield segment, following.base

    def give_up(self, stop: int) -> None:
        """The disk needs the room: nothing before ``stop`` is kept any more."""
        self._given_up = max(self._given_up, stop)
