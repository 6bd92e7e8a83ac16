"""Messages that nobody could handle: they go to a dead-letter topic, and from there back where they came from.

A DeadLetters belongs to one channel and copies what is leaving it to the channel's dead-letter topic, an ordinary topic
that is made when it is needed. A Redrive belongs to one channel as well and copies its dead letters back, to it alone:
into the side log of its topic. Neither decides who leaves; which messages are leaving is known to their channel.

Both keep one promise: a message is finished where it was only when its copy is on the device. Until then it is in no
state in which it could be delivered, and a crash brings it back. After a crash the files tell which copies there are
(``finish_moved``), so that there is no second one: a copy says in its record where it comes from.

    in the main log    {"dead": {"topic", "channel", "id", "attempts", "reason", "time", "published", "path"}}
    in the side log    for which channel (4) | from which channel (4) | its seq there (8)

``time`` is when it died and ``published`` when it was first published, in ns since 1970; ``path`` names the topics it
has been through.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.broker.limits import Bucket
from flintmq.broker.storage.journal import NEVER, State
from flintmq.broker.storage.segment import timestamp_of
from flintmq.errors import DamageError, HttpError, NotFoundError, PublishError
from flintmq.kernel import FRAME_OVERHEAD
from flintmq.protocol.seqs import seq_of
from flintmq.protocol.wire import is_ephemeral, valid_name

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic
    from flintmq.http.site import Request, Route

__all__ = [
    "EXPIRED",
    "LONGEST_QUEUE",
    "REDRIVE",
    "REQUEUED",
    "RETRY_DELAY",
    "TIMED_OUT",
    "DeadLetters",
    "Redrive",
    "dead_letter_topic",
    "finish_moved",
    "routes",
]

logger = logging.getLogger(__name__)

#: Why a message died.
REQUEUED, TIMED_OUT, EXPIRED = "requeued", "timed out", "expired"
#: The channel of a dead-letter topic from which dead letters are sent back, unless another one is named.
REDRIVE = "redrive"
#: What is copied before the loop is handed back: messages, bytes.
SLICE, SLICE_BYTES = 200, 1 << 20
#: So many messages of a channel may be leaving at a time.
LONGEST_QUEUE = 20_000
#: A message that cannot leave is put back for this long.
RETRY_DELAY = 60_000_000_000
#: So many dead letters are looked through for those of one channel before the loop is handed back.
LOOK_THROUGH = 1_000
#: So many dead-letter topics may follow each other.
LONGEST_PATH = 4
#: What is awaited may never come, a read for lack of descriptors for example: it is asked for again, after seconds.
LOOK_AGAIN = 1.0
#: A redrive with a rate copies as many at once as may be sent in so many seconds.
STRIDE = 0.05
#: The same complaint is logged again after this time.
_LOG_AGAIN = 10_000_000_000
_LONGEST_NAME = 64
_EPHEMERAL = "#ephemeral"
_u32 = Struct(">I")
#: Of a redriven message in a side log: for which channel, from which channel, its seq there.
_address = Struct(">IIQ")


def dead_letter_topic(channel: Channel) -> str:
    """The name of the topic that the channel's dead letters go to."""
    return channel.settings.dead_letter_topic or _own_topic(channel.topic.name, channel.name)


def _own_topic(topic: str, channel: str) -> str:
    """``TOPIC.CHANNEL.dead``; where that is too long, its beginning and a hash of both names."""
    suffix = _EPHEMERAL if is_ephemeral(topic) or is_ephemeral(channel) else ""
    begin = f"{topic.removesuffix(_EPHEMERAL)}.{channel.removesuffix(_EPHEMERAL)}"
    end = f".dead{suffix}"
    if len(begin) + len(end) > _LONGEST_NAME:
        # No name holds a slash: no two pairs of names are hashed as the same text.
        end = f".{hashlib.sha256(f'{topic}/{channel}'.encode()).hexdigest()[:12]}{end}"
        begin = begin[: _LONGEST_NAME - len(end)]
    return begin + end


def _read(topic: Topic, seq: int) -> tuple[bytearray, dict[str, Any]] | None:
    """A message's frame, and what is kept with it; None while either is being read back."""
    frame = topic.frame(seq)
    if frame is None:
        return None
    extra = topic.extra_of(seq)
    return None if extra is None else (frame, extra)


def _record_of(frame: bytearray) -> bytearray:
    """The message as a record ``[size][body]`` to be appended elsewhere."""
    return bytearray(_u32.pack(len(frame) - FRAME_OVERHEAD)) + frame[FRAME_OVERHEAD:]


class _Steps:
    """Work that is done in slices, each in a loop turn of its own, or when what it waits for has come."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # Is the next step planned, or does it wait for something?
        self._planned = False

    def go_on(self) -> None:
        """There is something to do."""
        if not self._planned:
            self._planned = True
            self._broker.later(self._run)

    def _rest(self, seconds: float) -> None:
        self._planned = True
        self._broker.store.delay(seconds, self._run)

    def _wait(self, tell: Callable[[Callable[[], None]], None]) -> None:
        """Go on when ``tell`` calls back; a step too many does no harm."""
        tell(self._run)
        self._rest(LOOK_AGAIN)

    def _run(self) -> None:
        self._planned = False
        self._step()

    def _step(self) -> None:
        raise NotImplementedError


class DeadLetters(_Steps):
    """Copies what is leaving a channel to its dead-letter topic."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel.broker)
        self._channel = channel
        #: Seq and reason of those that have no copy yet.
        self._queue: deque[tuple[int, str]] = deque()
        self._logged = 0

    def add(self, seq: int, reason: str) -> None:
        """The message is leaving its channel."""
        self._queue.append((seq, reason))
        self.go_on()

    def _step(self) -> None:
        channel, queue = self._channel, self._queue
        if self._broker.stopping or channel.exiting:
            # They come back at the next start, or went with their channel.
            queue.clear()
            return
        if channel.expired and len(queue) < SLICE and len(channel.leaving) < LONGEST_QUEUE:
            queue.extend((seq, EXPIRED) for seq in channel.take_expired(SLICE))
        name = dead_letter_topic(channel)
        target: Topic | None = None
        copied: list[int] = []
        size = 0
        while queue and len(copied) < SLICE and size < SLICE_BYTES:
            seq, reason = queue[0]
            if seq not in channel.leaving:
                # Emptied meanwhile.
                queue.popleft()
                continue
            try:
                found = _read(channel.topic, seq)
                if found is None:
                    self._wait(channel.topic.when_read)
                    break
                frame, extra = found
                if reason == EXPIRED and "dead" in extra:
                    # What is too old for a dead letter is wanted by nobody.
                    channel.left([seq])
                    queue.popleft()
                    continue
                about = self._about(seq, reason, frame, extra.get("dead"), name)
                if target is None:
                    target = self._broker.topic(name)
                if target.busy or self._broker.store.congested:
                    self._wait(target.when_free if target.busy else self._broker.when_relieved)
                    break
                record = _record_of(frame)
                target.publish(record, 0, len(record), 1, extra=msgspec.msgpack.encode({"dead": about}))
            except DamageError as exc:
                logger.error("CHANNEL(%s): message %d cannot be read - %s", channel.name, seq, exc)
                channel.left([seq])
            except (PublishError, ValueError) as exc:
                self._refused([seq], name, exc)
            else:
                copied.append(seq)
                size += len(record)
            queue.popleft()
        if target is not None and copied:
            target.log.when_durable(target.log.end, partial(self._copied, target, copied))
        if queue or (channel.expired and len(channel.leaving) < LONGEST_QUEUE):
            self.go_on()

    def _about(
        self, seq: int, reason: str, frame: bytearray, before: dict[str, Any] | None, target: str
    ) -> dict[str, Any]:
        """What is kept with the copy. ``before`` is that of a dead letter. ValueError if it must not go there."""
        topic = self._channel.topic
        path = [*before["path"], topic.name] if before is not None else [topic.name]
        if target in path:
            raise ValueError("it has been there before")
        if len(path) > LONGEST_PATH:
            raise ValueError(f"it has been in {LONGEST_PATH} dead-letter topics already")
        return {
            "topic": topic.name,
            "channel": self._channel.name,
            "id": frame[18:34].decode(),
            "attempts": self._channel.leaving[seq],
            "reason": reason,
            "time": self._broker.clock.wall(),
            "published": before["published"] if before is not None else timestamp_of(frame),
            "path": path,
        }

    def _copied(self, target: Topic, seqs: list[int], error: Exception | None) -> None:
        channel, stopping = self._channel, self._broker.stopping
        if error is None and (stopping or not target.exiting):
            channel.dead_lettered_count += channel.left(seqs)
        elif not stopping:
            self._refused(seqs, target.name, error or NotFoundError("it was deleted"))
        if channel.expired:
            self.go_on()

    def _refused(self, seqs: list[int], name: str, error: Exception) -> None:
        """These have to stay: they are delivered once more, and if that fails it is tried again."""
        now = self._broker.clock.now()
        if not self._logged or now - self._logged >= _LOG_AGAIN:
            self._logged = now
            logger.warning(
                "CHANNEL(%s): a message of topic %s cannot go to its dead-letter topic %s and is put back - %s",
                self._channel.name,
                self._channel.topic.name,
                name,
                error,
            )
        self._channel.stay(seqs, RETRY_DELAY)


class Redrive(_Steps):
    """Copies dead letters back to the channel they came from: ``most`` of them, ``rate`` a second, 0 for any."""

    def __init__(self, channel: Channel, source: Channel, most: int, rate: int) -> None:
        super().__init__(channel.broker)
        self._channel = channel
        self._source = source
        self.dead_letter_topic = source.topic.name
        self.moved = 0
        self.running = True
        #: Why it ended before its time.
        self.error = ""
        self._most = most
        self._bucket = Bucket(rate, self._broker.clock) if rate else None
        # Of what was there at the start: which ones were not looked at yet, how many, and the next of them.
        source.catch_up(source.topic.pumped)
        self._seqs = _each(list(source.requeued), list(source.waiting))
        self._left = len(source.requeued) + source.waiting.total
        self._next = -1
        # Copies that are not on the device yet: how many, and where the first of each slice is.
        self._under_way = 0
        self._places: deque[int] = deque()
        # Those before it were emptied.
        self._floor = 0
        # If the channel that it takes from was just made, no crash may forget it: copies say that they are from there.
        self._broker.journal.when_synced(self._broker.journal.noted, self.go_on)

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

    def _step(self) -> None:
        if not self.running or self._broker.stopping:
            return
        if self._channel.exiting or self._source.exiting or self._broker.refusing:
            self._end(self._broker.refusing or "a channel was deleted")
            return
        if self._broker.store.congested:
            self._wait(self._broker.when_relieved)
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
        return (dead["topic"], dead["channel"]) == (self._channel.topic.name, self._channel.name)

    def _copy(self, found: dict[int, tuple[bytearray, int]]) -> None:
        # Some may have been delivered since they were counted.
        seqs = self._source.take_out(found)
        if not seqs:
            return
        try:
            side = self._channel.topic.side_log()
        except OSError as exc:
            self._source.stay(seqs, 0)
            self._end(exc.strerror or str(exc))
            return
        places = []
        for seq in seqs:
            frame, published = found[seq]
            record = _record_of(frame)
            address = _address.pack(self._channel.id, self._source.id, seq)
            places.append(side.append(record, 0, len(record), 1, published, extra=address))
        if self._bucket is not None:
            self._bucket.spend(len(seqs))
        self._under_way += len(seqs)
        self._places.append(places[0])
        side.when_durable(side.end, partial(self._copied, seqs, places))
        side.write_all()

    def _copied(self, seqs: list[int], places: list[int], error: Exception | None) -> None:
        self._under_way -= len(seqs)
        self._places.popleft()
        stopping = self._broker.stopping
        if error is not None or (self._channel.exiting and not stopping):
            if not stopping:
                self._source.stay(seqs, 0)
                self._end(str(error or "the channel was deleted"))
            return
        self._channel.receive(place for place in places if place >= self._floor)
        self._source.left(seqs)
        self.moved += len(seqs)
        if self._left:
            self.go_on()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self.running and not self._under_way and (not self._left or self.moved >= self._most):
            self.running = False
            logger.info(
                "CHANNEL(%s): %d dead letters came back from %s", self._channel.name, self.moved, self.dead_letter_topic
            )

    def _end(self, error: str) -> None:
        if self.running:
            self.running = False
            self.error = error
            logger.warning("CHANNEL(%s): the redrive ended early, after %d - %s", self._channel.name, self.moved, error)


def _each(seqs: list[int], ranges: list[tuple[int, int]]) -> Iterator[int]:
    yield from seqs
    for first, stop in ranges:
        yield from range(first, stop)


# --- After a crash --------------------------------------------------------------------------------------------------


def finish_moved(topics: Iterable[Topic], state: State) -> None:
    """What has a copy elsewhere, and could not be finished before the crash, is finished now.

    Only records that were not known to be on the device have to be looked at: where that is known of a copy, the
    journal also knows that its message is finished.
    """
    by_name = {topic.name: topic for topic in state.topics.values()}
    for topic in topics:
        for _, extra in topic.log.salvaged:
            dead = msgspec.msgpack.decode(extra).get("dead")
            origin = by_name.get(dead["topic"]) if dead is not None else None
            for channel in origin.channels.values() if origin is not None else ():
                if channel.name == dead["channel"]:
                    seq = seq_of(dead["id"])
                    channel.finish(seq, seq + 1)
        topic.log.salvaged.clear()
        if topic.side is None:
            continue
        for _, extra in topic.side.salvaged:
            if len(extra) == _address.size:
                ident, source, seq = _address.unpack(extra)
                if ident in state.channels and source in state.channels:
                    state.channels[source].finish(seq, seq + 1)
        topic.side.salvaged.clear()


# --- HTTP -----------------------------------------------------------------------------------------------------------


def routes(broker: Broker) -> list[Route]:
    """See docs/dead-letters.md."""
    from flintmq.http.site import ADMIN, READ, Route

    async def start(request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        channel = _channel(broker, arguments)
        if channel.redrive is not None and channel.redrive.running:
            raise HttpError(409, "ALREADY_RUNNING: ask GET /channel/redrive how far it is")
        most, rate = _number(arguments, "count", NEVER), _number(arguments, "rate", 0)
        source = _source(channel, arguments.get("from", ""))
        channel.redrive = Redrive(channel, source, most, rate) if source is not None else None
        return _progress(channel)

    async def progress(request: Request) -> dict[str, Any]:
        return _progress(_channel(broker, request.arguments()))

    return [
        Route("POST", "/channel/redrive", start, ADMIN),
        Route("GET", "/channel/redrive", progress, READ),
    ]


def _channel(broker: Broker, arguments: dict[str, str]) -> Channel:
    for kind in ("topic", "channel"):
        if not arguments.get(kind):
            raise HttpError(400, f"MISSING_ARG_{kind.upper()}")
        if not valid_name(arguments[kind]):
            raise HttpError(400, f"INVALID_ARG_{kind.upper()}")
    topic = broker.topics.get(arguments["topic"])
    if topic is None:
        raise HttpError(404, "TOPIC_NOT_FOUND")
    channel = topic.channels.get(arguments["channel"])
    if channel is None:
        raise HttpError(404, "CHANNEL_NOT_FOUND")
    return channel


def _number(arguments: dict[str, str], name: str, default: int) -> int:
    text = arguments.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 0 < int(text[:18]) and len(text) <= 18):
        raise HttpError(400, f"INVALID_ARG_{name.upper()}: it must be a whole number, at least 1")
    return int(text)


def _source(channel: Channel, name: str) -> Channel | None:
    """The channel of the dead-letter topic to take from; None if there is no such topic, and so no dead letter."""
    topic = channel.broker.topics.get(dead_letter_topic(channel))
    if topic is None:
        return None
    if name:
        if name not in topic.channels:
            raise HttpError(404, f"CHANNEL_NOT_FOUND: the dead-letter topic {topic.name} has no channel {name}")
        return topic.channels[name]
    if topic.channels and REDRIVE not in topic.channels:
        # A new channel would find nothing: what is there belongs to the others.
        raise HttpError(
            400, f"MISSING_ARG_FROM: {topic.name} has other channels, say from={min(topic.channels)} to take from one"
        )
    source, _ = topic.channel(REDRIVE)
    # If it is the first channel, what has piled up is handed to it now, not at the end of the turn.
    topic.flush()
    return source


def _progress(channel: Channel) -> dict[str, Any]:
    redrive = channel.redrive
    if redrive is None:
        return {"dead_letter_topic": dead_letter_topic(channel), "planned": 0, "moved": 0, "running": False}
    answer: dict[str, Any] = {
        "dead_letter_topic": redrive.dead_letter_topic,
        "planned": redrive.planned,
        "moved": redrive.moved,
        "running": redrive.running,
    }
    if redrive.error:
        answer["error"] = redrive.error
    return answer
