"""Messages that nobody could handle: they go to a dead-letter topic. The way back is in redrive.py.

A DeadLetters belongs to one channel and copies what is leaving it to the channel's dead-letter topic, an ordinary topic
that is created when it is needed. It does not decide who leaves: which messages are leaving is known to their channel.

A message is finished where it was only when its copy is on the device. Until then it is in no state in which it could
be delivered, and a crash brings it back. After a crash the files tell which copies there are (``finish_moved``), so
that there is no second one: a copy says in its record where it comes from.

    {"dead": {"topic", "channel", "id", "attempts", "reason", "time", "published", "path"}, "of": the channel's number}

``time`` is when it died and ``published`` when it was first published, in ns since 1970; ``path`` names the topics it
has been through.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Container
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.broker.delivery.slices import Steps
from flintmq.broker.storage.segment import timestamp_of
from flintmq.errors import DamageError, NotFoundError, PublishError
from flintmq.kernel import FRAME_OVERHEAD
from flintmq.protocol.wire import is_ephemeral

if TYPE_CHECKING:
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic

__all__ = [
    "EXPIRED",
    "LONGEST_QUEUE",
    "REQUEUED",
    "RETRY_DELAY",
    "SLICE",
    "SLICE_BYTES",
    "TIMED_OUT",
    "DeadLetters",
    "dead_letter_topic",
    "record_of",
]

logger = logging.getLogger(__name__)

#: Why a message died.
REQUEUED, TIMED_OUT, EXPIRED = "requeued", "timed out", "expired"
#: Messages and bytes that are copied before the loop is handed back.
SLICE, SLICE_BYTES = 200, 1 << 20
#: Messages of a channel that may be leaving at a time.
LONGEST_QUEUE = 20_000
#: A message that cannot leave is requeued with this delay, in ns.
RETRY_DELAY = 60_000_000_000
#: Dead-letter topics that may follow each other.
LONGEST_PATH = 4
#: The same complaint is logged again after this time.
_LOG_AGAIN = 10_000_000_000
_LONGEST_NAME = 64
_EPHEMERAL = "#ephemeral"
_u32 = Struct(">I")


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


def record_of(frame: bytearray) -> bytearray:
    """The message as a record ``[size][body]`` to be appended elsewhere."""
    return bytearray(_u32.pack(len(frame) - FRAME_OVERHEAD)) + frame[FRAME_OVERHEAD:]


class DeadLetters(Steps):
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

    def retain(self, seqs: Container[int]) -> None:
        """Only these are still leaving. Others may die once more, after a seek: an old entry would copy them twice."""
        self._queue = deque(entry for entry in self._queue if entry[0] in seqs)

    def _step(self) -> None:
        channel, queue = self._channel, self._queue
        if self._broker.stopping or channel.exiting:
            # They come back at the next start, or went with their channel.
            queue.clear()
            return
        if channel.seeking is not None:
            channel.seeking.postpone(self.go_on)
            return
        if channel.leaving.expired and len(queue) < SLICE and len(channel.leaving) < LONGEST_QUEUE:
            queue.extend((seq, EXPIRED) for seq in channel.leaving.take_expired(SLICE))
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
                    channel.leaving.left([seq])
                    queue.popleft()
                    continue
                about = self._about(seq, reason, frame, extra.get("dead"), name)
                if target is None:
                    target = self._broker.topic(name)
                if target.busy or self._broker.store.congested:
                    self._wait(target.when_free if target.busy else self._broker.turns.when_relieved)
                    break
                record = record_of(frame)
                target.publish(
                    record, 0, len(record), 1, extra=msgspec.msgpack.encode({"dead": about, "of": channel.id})
                )
            except DamageError as exc:
                logger.error("CHANNEL(%s): message %d cannot be read - %s", channel.name, seq, exc)
                channel.leaving.left([seq])
            except (PublishError, ValueError) as exc:
                self._refused([seq], name, exc)
            else:
                copied.append(seq)
                size += len(record)
            queue.popleft()
        if target is not None and copied:
            channel.leaving.copied(target.log, "durable", target.incarnation)
            target.log.when_durable(target.log.end, partial(self._copied, target, copied))
        if queue or (channel.leaving.expired and len(channel.leaving) < LONGEST_QUEUE):
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
            "attempts": self._channel.leaving.attempts[seq],
            "reason": reason,
            "time": self._broker.clock.wall(),
            "published": before["published"] if before is not None else timestamp_of(frame),
            "path": path,
        }

    def _copied(self, target: Topic, seqs: list[int], error: Exception | None) -> None:
        channel, stopping = self._channel, self._broker.stopping
        if error is None and (stopping or not target.exiting):
            channel.leaving.dead_lettered_count += channel.leaving.left(seqs)
        elif not stopping:
            self._refused(seqs, target.name, error or NotFoundError("it was deleted"))
        if channel.leaving.expired:
            self.go_on()

    def _refused(self, seqs: list[int], name: str, error: Exception) -> None:
        """These have to stay: they are delivered once more, and if that fails it is tried again."""
        now = self._broker.clock.now()
        if not self._logged or now - self._logged >= _LOG_AGAIN:
            self._logged = now
            logger.warning(
                "CHANNEL(%s): a message of topic %s cannot go to its dead-letter topic %s and is requeued - %s",
                self._channel.name,
                self._channel.topic.name,
                name,
                error,
            )
        self._channel.leaving.stay(seqs, RETRY_DELAY)
