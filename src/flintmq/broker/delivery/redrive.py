"""The way back of dead letters: from the dead-letter topic to the channel that they came from.

A Redrive belongs to one channel and copies its dead letters back, to it alone: into the side log of its topic. A dead
letter is finished only when its copy is on the device; until then it is in no state in which it could be delivered, and
a crash brings it back. After a crash the files tell which copies there are (``finish_moved``), so that there is no
second one: a copy says in its record where it comes from.

    for which channel (4) | from which channel (4) | its seq there (8)
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.broker.delivery.dead_letters import LONGEST_QUEUE, SLICE, SLICE_BYTES, dead_letter_topic, record_of
from flintmq.broker.delivery.slices import Steps
from flintmq.broker.limits import Bucket
from flintmq.broker.storage.journal import NEVER, State
from flintmq.errors import DamageError, PublishError
from flintmq.protocol.seqs import seq_of

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic

__all__ = ["REDRIVE", "STOPPED", "Ended", "Redrive", "finish_moved", "nothing_to_redrive", "resume"]

logger = logging.getLogger(__name__)

#: The channel of a dead-letter topic from which dead letters are sent back, unless another one is named.
REDRIVE = "redrive"
#: Dead letters that are looked through for those of one channel before the loop is handed back.
LOOK_THROUGH = 1_000
#: Seconds of its rate that a redrive copies at once.
STRIDE = 0.05
#: The error of a redrive that an operator has ended.
STOPPED = "stopped"
#: Where the journal's row of a redrive says how many were moved, and whether it goes on.
MOVED, RUNS = 5, 6
#: Of a redriven message in a side log: for which channel, from which channel, its seq there.
_address = Struct(">IIQ")


class Redrive(Steps):
    """Copies dead letters back to the channel they came from: ``most`` of them, ``rate`` a second, 0 for any.

    With a ``reason`` only those that died of it. The journal knows how far it is, so that the next start goes on with
    it (``resume``), or reports how it ended.
    """

    def __init__(
        self,
        channel: Channel,
        source: Channel,
        most: int,
        rate: int,
        reason: str = "",
        *,
        moved: int = 0,
        stop: int = NEVER,
    ) -> None:
        """``moved`` were copied before a restart; dead letters from the seq ``stop`` on came after it had begun."""
        super().__init__(channel.broker)
        self._channel = channel
        self._source = source
        self.dead_letter_topic = source.topic.name
        self.reason = reason
        self.moved = moved
        #: False once its last copy has arrived, also where it ended early.
        self.running = True
        #: Why it copies nothing more before its time.
        self.error = ""
        self._most = most
        self._rate = rate
        self._bucket = Bucket(rate, self._broker.clock) if rate else None
        # Of what was there at the start: which ones were not looked at yet, how many, and the next of them.
        source.catch_up(source.topic.pumped)
        self._stop = stop = min(stop, source.seen)
        requeued = [seq for seq in source.requeued if seq < stop]
        self._seqs = _each(requeued, source.waiting.copy(), stop)
        self._left = len(requeued) + source.waiting.count_before(stop)
        self._next = -1
        # Copies that are not on the device yet: how many, and where the first of each slice is.
        self._under_way = 0
        self._places: deque[int] = deque()
        # Those before it were emptied.
        self._floor = 0
        # If the channel that it takes from was just made, no crash may forget it: copies say that they are from there.
        position = self._broker.journal.noted
        self._note()
        self._broker.journal.when_synced(position, self.go_on)

    def note(self) -> tuple[Any, ...]:
        """What the journal keeps: whence, how much, how far it is, and whether it goes on."""
        goes_on = self.running and not self.error
        about = (self._most, self._rate, self._stop, self.moved, goes_on, self.error, self.reason)
        return "redrive", self._channel.id, self._source.topic.name, self._source.name, *about

    def _note(self) -> None:
        ephemeral = any(c.ephemeral or c.topic.ephemeral for c in (self._channel, self._source))
        if not ephemeral and not self._channel.exiting:
            self._broker.journal.note(*self.note())

    @property
    def planned(self) -> int:
        """How many it will have moved, at most: of some it has to learn yet that they came from elsewhere."""
        return min(self._most, self.moved + self._under_way + self._left)

    @property
    def first_place(self) -> int:
        """The first of the side log's seqs that are for the channel and not yet known to it."""
        return self._places[0] if self._places else NEVER

    def emptied(self) -> None:
        """The channel was emptied: what is on its way does not arrive any more."""
        self._floor = self._channel.topic.side_end

    def stop(self) -> None:
        """Copy nothing more, and do not go on after a restart. Copies that are not on the device yet still arrive."""
        self._end(STOPPED)

    def _step(self) -> None:
        if not self.running or self.error or self._broker.stopping:
            return
        if self._channel.exiting or self._source.exiting or self._broker.refusing:
            self._end(self._broker.refusing or "a channel was deleted")
            return
        if self._source.seeking is not None:
            self._source.seeking.postpone(self.go_on)
            return
        if self._broker.store.congested:
            self._wait(self._broker.turns.when_relieved)
            return
        room = min(SLICE, self._most - self.moved - self._under_way, LONGEST_QUEUE - self._under_way)
        if self._bucket is not None:
            room = min(room, int(self._bucket.tokens))
        if room > 0:
            found = self._find(room)
            if found:
                self._copy(found)
        if self._left and self.moved + self._under_way < self._most and not self._planned:
            if self._bucket is not None:
                self._rest(max(STRIDE, (1 - self._bucket.tokens) / self._bucket.rate))
            elif self._under_way < LONGEST_QUEUE:
                self.go_on()
        self._end_if_done()

    def _find(self, room: int) -> dict[int, tuple[bytearray, int]]:
        """The next dead letters of the channel: frame and time of the first publish, by their seqs."""
        topic = self._source.topic
        found: dict[int, tuple[bytearray, int]] = {}
        size = looked = 0
        while self._left and len(found) < room and looked < LOOK_THROUGH and size < SLICE_BYTES:
            if self._next < 0:
                self._next = next(self._seqs)
            try:
                extra = topic.extra_of(self._next)
                dead = extra.get("dead") if extra else None
                mine = dead is not None and self._is_mine(dead)
                frame = topic.frame(self._next) if mine else None
            except DamageError:
                # Gone meanwhile, or lost: who consumes it learns that.
                pass
            else:
                if extra is None or (mine and frame is None):
                    self._wait(topic.when_read)
                    break
                if frame is not None and dead is not None:
                    found[self._next] = frame, dead["published"]
                    size += len(frame)
            self._next = -1
            self._left -= 1
            looked += 1
        return found

    def _is_mine(self, dead: dict[str, Any]) -> bool:
        if self.reason and dead["reason"] != self.reason:
            return False
        return (dead["topic"], dead["channel"]) == (self._channel.topic.name, self._channel.name)

    def _copy(self, found: dict[int, tuple[bytearray, int]]) -> None:
        # Some may have been delivered since they were counted.
        seqs = self._source.leaving.take_out(found)
        if not seqs:
            return
        try:
            side = self._channel.topic.side_log()
        except OSError as exc:
            self._source.leaving.stay(seqs, 0)
            self._end(exc.strerror or str(exc))
            return
        places = []
        failure = ""
        for seq in seqs:
            frame, published = found[seq]
            record = record_of(frame)
            address = _address.pack(self._channel.id, self._source.id, seq)
            try:
                places.append(side.append(record, 0, len(record), 1, published, extra=address))
            except PublishError as exc:
                failure = str(exc)
                self._source.leaving.stay(seqs[len(places) :], 0)
                seqs = seqs[: len(places)]
                break
        if not seqs:
            self._end(failure)
            return
        if self._bucket is not None:
            self._bucket.spend(len(seqs))
        self._under_way += len(seqs)
        self._places.append(places[0])
        self._source.leaving.copied(side, "side", self._channel.topic.incarnation)
        side.when_durable(side.end, partial(self._copied, seqs, places))
        side.write_all()
        if failure:
            self._end(failure)

    def _copied(self, seqs: list[int], places: list[int], error: Exception | None) -> None:
        self._under_way -= len(seqs)
        self._places.popleft()
        stopping = self._broker.stopping
        if error is not None or (self._channel.exiting and not stopping):
            if not stopping:
                self._source.leaving.stay(seqs, 0)
                self._end(str(error or "the channel was deleted"))
            return
        self._channel.receive(place for place in places if place >= self._floor)
        self._source.leaving.left(seqs)
        self.moved += len(seqs)
        # After what was finished, and in one write with it.
        self._note()
        if self._left:
            self.go_on()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not self.running or self._under_way:
            return
        if self.error:
            self.running = False
            message = "CHANNEL(%s): the redrive ended early, after %d - %s"
            logger.warning(message, self._channel.name, self.moved, self.error)
        elif not self._left or self.moved >= self._most:
            self.running = False
            self._note()
            logger.info(
                "CHANNEL(%s): %d dead letters came back from %s", self._channel.name, self.moved, self.dead_letter_topic
            )

    def _end(self, error: str) -> None:
        """Copy nothing more. It runs until what is under way has arrived: until then there must be no other one."""
        if self.running and not self.error:
            self.error = error
            self._note()
        self._end_if_done()


def _each(seqs: list[int], ranges: Iterable[tuple[int, int]], before: int) -> Iterator[int]:
    yield from seqs
    for first, stop in ranges:
        yield from range(first, min(stop, before))


# --- After a crash --------------------------------------------------------------------------------------------------


def finish_moved(topics: Iterable[Topic], state: State) -> None:
    """What has a copy elsewhere, and could not be finished before the crash, is finished now.

    Only records that were not known to be on the device have to be looked at: where that is known of a copy, the
    journal also knows that its message is finished, or that it was sought back since (see ``Seek``).
    """
    by_name = {topic.name: topic for topic in state.topics.values()}
    for topic in topics:
        for _, extra in topic.log.salvaged:
            about = msgspec.msgpack.decode(extra)
            dead = about.get("dead")
            origin = by_name.get(dead["topic"]) if dead is not None else None
            for channel in origin.channels.values() if origin is not None else ():
                # Another one of that name may have been made since.
                if channel.name == dead["channel"] and about.get("of", channel.id) == channel.id:
                    seq = seq_of(dead["id"])
                    channel.finish(seq, seq + 1)
        topic.log.salvaged.clear()
        if topic.side is None:
            continue
        for _, extra in topic.side.salvaged:
            if len(extra) == _address.size:
                ident, source, seq = _address.unpack(extra)
                if ident in state.channels and source in state.channels:
                    redrive = state.channels[ident].redrive
                    if redrive is not None and seq in state.channels[source].outstanding:
                        # Copied, and not counted yet.
                        redrive[MOVED] += 1
                    state.channels[source].finish(seq, seq + 1)
        topic.side.salvaged.clear()


def resume(broker: Broker, state: State) -> None:
    """Go on with redrives that a stop or a crash interrupted, and know how the others ended."""
    for topic in state.topics.values():
        for channel_state in topic.channels.values():
            if channel_state.redrive is None:
                continue
            channel = broker.topics[topic.name].channels[channel_state.name]
            name, source_name, most, rate, stop, moved, running, error, reason = channel_state.redrive
            target = broker.topics.get(name)
            source = target.channels.get(source_name) if target is not None else None
            if running and source is not None:
                logger.info("CHANNEL(%s): the redrive from %s goes on, after %d", channel.name, name, moved)
                channel.begin_redrive(source, most, rate, reason, moved=moved, stop=stop)
            else:
                ended = error or ("a channel was deleted" if running else "")
                channel.redrive_ended(Ended(channel.id, name, moved, ended, reason, (source_name, most, rate, stop)))


def nothing_to_redrive(channel: Channel, reason: str) -> None:
    """A redrive has begun and ended: the channel never had a dead letter, or they are gone with their topic."""
    ended = Ended(channel.id, dead_letter_topic(channel), 0, "", reason)
    channel.redrive_ended(ended)
    if not (channel.ephemeral or channel.topic.ephemeral):
        # Otherwise the one before it would be told of after a restart.
        channel.broker.journal.note(*ended.note())


@dataclass(frozen=True)
class Ended:
    """A redrive of before the last start, or one that had nothing to do."""

    channel: int
    dead_letter_topic: str
    moved: int
    error: str
    reason: str
    #: What it was to do: from which channel, how many, how fast, up to which seq.
    order: tuple[str, int, int, int] = (REDRIVE, NEVER, 0, NEVER)
    running = False
    first_place = NEVER

    @property
    def planned(self) -> int:
        return self.moved

    def note(self) -> tuple[Any, ...]:
        """What the journal keeps, as ``Redrive.note``: the next start knows of it too."""
        return "redrive", self.channel, self.dead_letter_topic, *self.order, self.moved, False, self.error, self.reason

    def emptied(self) -> None:
        """Do nothing: nothing is on its way."""

    def stop(self) -> None:
        """Do nothing: it has ended."""
