"""Limits that NSQ does not have: connections, what a topic may hold, how fast it may be filled and emptied.

Everything here is off by default, and then there is no object of it: whoever asks finds ``None`` and pays for nothing
else. With a limit, publishes to its topics leave the lane of many connections at once and are looked at one by
one. What exceeds a limit is refused with the reason (``LimitError``, ``RateError``) or, where the policy says so, makes
the oldest messages go. Nothing is ever made to wait here but deliveries, and those by a timer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flintmq.broker.storage.disk import Clock
from flintmq.errors import LimitError, RateError
from flintmq.http.admission import Admission
from flintmq.kernel import FRAME_OVERHEAD
from flintmq.options import NsqdOptions

if TYPE_CHECKING:
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic

__all__ = ["Bucket", "Connections", "Creation", "Pace", "TopicLimits"]

logger = logging.getLogger(__name__)

_SECOND = 1_000_000_000
#: Requeued messages that are looked through for the oldest at every publish; with more, now and then.
_LOOK_THROUGH = 1_000
_NOW_AND_THEN = 50_000_000
#: What it takes to look at one of them, in ns: looking takes at most a tenth of the time.
_LOOK_COST = 20
#: A paced channel is woken for as much as may be sent in this many seconds, not for each message.
_STRIDE = 0.01
#: The same complaint is logged again after this time.
_LOG_AGAIN = 10 * _SECOND


class Bucket:
    """A token bucket: ``rate`` messages a second, and up to one second's worth at once after a rest."""

    def __init__(self, rate: int, clock: Clock) -> None:
        self.rate = rate
        self._clock = clock
        self._tokens = float(rate)
        self._filled = clock.now()

    @property
    def tokens(self) -> float:
        now = self._clock.now()
        self._tokens = min(float(self.rate), self._tokens + (now - self._filled) * self.rate / _SECOND)
        self._filled = now
        return self._tokens

    def spend(self, count: int) -> None:
        self._tokens -= count

    def wait(self, count: int) -> float:
        """Return the seconds until ``take`` would spend ``count``."""
        return max(0.0, (min(count, self.rate) - self.tokens) / self.rate)

    def take(self, count: int) -> bool:
        """Spend ``count`` if they are there. A batch larger than the bucket passes when it is full, and is paid off."""
        if self.tokens < min(count, self.rate):
            return False
        self.spend(count)
        return True


class Connections(Admission):
    """Who is connected, from where, and whether one more may be."""

    def __init__(self, options: NsqdOptions, clock: Clock) -> None:
        super().__init__(options.max_connections, options.max_connections_per_address, clock.now)

    @classmethod
    def of(cls, options: NsqdOptions, clock: Clock) -> Connections | None:
        limited = options.max_connections or options.max_connections_per_address
        return cls(options, clock) if limited else None


class Creation:
    """How many topics and channels clients can make, and how fast. What the broker makes for itself does not count."""

    def __init__(self, options: NsqdOptions, clock: Clock, topics: Mapping[str, Topic]) -> None:
        self._most_topics = options.max_topics
        self._most_channels = options.max_channels
        self._bucket = Bucket(options.max_creation_rate, clock) if options.max_creation_rate else None
        self._topics = topics

    @classmethod
    def of(cls, options: NsqdOptions, clock: Clock, topics: Mapping[str, Topic]) -> Creation | None:
        limited = options.max_topics or options.max_channels or options.max_creation_rate
        return cls(options, clock, topics) if limited else None

    def check_topic(self, name: str) -> None:
        """LimitError if there can be no such topic, unless it is there."""
        if name in self._topics:
            return
        if self._most_topics and len(self._topics) >= self._most_topics:
            raise LimitError(f"limit of {self._most_topics} topics reached")
        self._check_rate()

    def check_channel(self, topic: Topic, name: str) -> None:
        """LimitError if the topic can have no such channel, unless it is there."""
        if name in topic.channels:
            return
        if self._most_channels and len(topic.channels) >= self._most_channels:
            raise LimitError(f"limit of {self._most_channels} channels of {topic.name} reached")
        self._check_rate()

    def _check_rate(self) -> None:
        if self._bucket is not None and not self._bucket.take(1):
            raise RateError(f"limit of {self._bucket.rate} new topics and channels a second reached")


class TopicLimits:
    """What one topic may hold, and how fast it may be published to."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._clock = topic.broker.clock
        self._bucket: Bucket | None = None
        self._read_settings()
        # How much more there was room for when it was last looked at, less what came since: what consumers finished
        # meanwhile only adds to it. Too little at first, so that it is looked at.
        self._room_messages = -1
        self._room_bytes = -1
        # Bytes published so far, and how many they were at some seqs: what the messages from a seq on take up.
        self._published = 0
        self._marks: deque[tuple[int, int]] = deque()
        self._next_look = 0
        self._looking_later = False
        self._logged = 0
        # The oldest are dropped in slices, and the next one is planned.
        self._trimming = False

    @classmethod
    def of(cls, topic: Topic) -> TopicLimits | None:
        settings = topic.settings
        limited = settings.max_messages or settings.max_bytes or settings.publish_rate
        return cls(topic) if limited else None

    def _read_settings(self) -> None:
        settings = self._topic.settings
        self._most_messages = settings.max_messages
        self._most_bytes = settings.max_bytes
        self._refuse = settings.limit_policy == "refuse"
        rate = settings.publish_rate
        if rate != (self._bucket.rate if self._bucket is not None else 0):
            self._bucket = Bucket(rate, self._clock) if rate else None

    def changed(self) -> TopicLimits | None:
        """The topic's settings have changed; None if there is no limit any more."""
        limited_bytes = self._most_bytes
        self._read_settings()
        if not (self._most_messages or self._most_bytes or self._bucket):
            return None
        if not limited_bytes:
            # What came meanwhile was not counted.
            self._marks.clear()
            self._published = 0
        # Too little, so that it is looked at, and at once.
        self._room_messages = self._room_bytes = -1
        self._next_look = 0
        return self

    def admit(self, count: int, body_bytes: int, admitted: bool = False) -> None:
        """``count`` messages are about to be published. LimitError if they may not be.

        The later slices of a large batch belong to what was let in already: they only count. So does what was
        ``admitted`` before, by ``check``.
        """
        size = body_bytes + FRAME_OVERHEAD * count
        begun = admitted or self._topic.log.in_group
        if not begun:
            self.check(count, body_bytes)
        if self._bucket is not None and not admitted:
            if begun:
                self._bucket.spend(count)
            elif not self._bucket.take(count):
                raise RateError(f"limit of {self._bucket.rate} messages a second reached")
        self._room_messages -= count
        self._room_bytes -= size
        if self._most_bytes:
            self._mark(size)

    def wait(self, count: int) -> float:
        """Return the seconds until ``count`` messages may be published by the topic's rate."""
        return self._bucket.wait(count) if self._bucket is not None else 0.0

    def pay(self, count: int) -> None:
        """Count messages against the rate that will be published later, without being asked for it."""
        if self._bucket is not None:
            self._bucket.spend(count)

    def check(self, count: int, body_bytes: int) -> None:
        """LimitError if so many more messages are more than the topic may hold."""
        size = body_bytes + FRAME_OVERHEAD * count
        if not self._refuse:
            return
        if self._most_messages and count > self._room_messages:
            self._room_messages = self._most_messages - self.held_messages
            if count > self._room_messages:
                raise LimitError(f"limit of {self._most_messages} messages in the topic reached")
        if self._most_bytes and size > self._room_bytes:
            self._look_at_bytes()
            if size > self._room_bytes:
                raise LimitError(f"limit of {self._most_bytes} bytes in the topic reached")

    # --- What is there ---------------------------------------------------------------------------------------------

    @property
    def held_messages(self) -> int:
        """Messages that the topic keeps: its backlog, and what its fullest channel has not finished."""
        channels = self._topic.channels.values()
        return self._topic.depth + max(
            (channel.depth + channel.in_flight_count + len(channel.deferred) for channel in channels), default=0
        )

    @property
    def held_bytes(self) -> int:
        """Bytes from the oldest message on that somebody still needs: what the topic's files cannot do without."""
        if not self._marks:
            self._find_marks()
        oldest = self._topic.pumped
        for channel in self._topic.channels.values():
            oldest = min(oldest, channel.needed.first())
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.popleft()
        if self._topic.log.end <= oldest or not self._marks:
            return 0
        return self._published - self._marks[0][1]

    def _look_at_bytes(self) -> bool:
        """Find how much room there is; False if it is too early to look through so many messages once more."""
        now = self._clock.now()
        requeued = sum(
            len(channel.requeued) + len(channel.unusual) + len(channel.deferred)
            for channel in self._topic.channels.values()
        )
        if requeued > _LOOK_THROUGH and now < self._next_look:
            return False
        self._next_look = now + max(_NOW_AND_THEN, 9 * _LOOK_COST * requeued)
        self._room_bytes = self._most_bytes - self.held_bytes
        return True

    def _mark(self, size: int) -> None:
        if not self._marks:
            self._find_marks()
        if not self._marks or self._published - self._marks[-1][1] >= self._most_bytes // 64:
            self._marks.append((self._topic.log.end, self._published))
        self._published += size

    def _find_marks(self) -> None:
        """What is there already, after a start or when the limit is new: the files' own index, then what is in none."""
        written = 0
        for segment in self._topic.log.segments:
            for seq, offset in zip(segment.index_seqs, segment.index_offsets, strict=True):
                self._marks.append((seq, self._published + offset))
            self._published += segment.size
            written = segment.end
        for block in self._topic.log.blocks:
            if block.base >= written:
                self._marks.append((block.base, self._published))
                self._published += block.used

    # --- The oldest go ---------------------------------------------------------------------------------------------

    def trim(self) -> None:
        """The end of a turn. With policy ``drop-oldest`` the oldest make room for what came."""
        if self._refuse:
            return
        if self._most_messages and self._room_messages < 0:
            topic = self._topic
            if self.held_messages > self._most_messages:
                # Never all of the backlog: what is beyond the limit, counted from its oldest.
                backlog = max(0, topic.depth - self._most_messages)
                self._drop(self._excess_of, topic.log.end, topic.beyond_backlog(backlog))
            self._room_messages = self._most_messages - self.held_messages
        if self._most_bytes and self._room_bytes < 0:
            if not self._look_at_bytes():
                self._look_later()
            elif self._room_bytes < 0:
                too_much = self._published - self._most_bytes
                fitting = next((seq for seq, before in self._marks if before >= too_much), self._topic.log.end)
                if self._drop(lambda channel: channel.depth, fitting, fitting):
                    self._room_bytes = self._most_bytes - self.held_bytes

    def _excess_of(self, channel: Channel) -> int:
        held = channel.depth + channel.in_flight_count + len(channel.deferred)
        return max(0, held + self._topic.depth - self._most_messages)

    def _drop(self, how_many: Callable[[Channel], int], before: int, backlog_before: int) -> int:
        """Drop what waits in the channels, then in the topic itself; what is in flight or deferred stays.

        Return how many were dropped.
        """
        topic = self._topic
        dropped = 0
        whole = True
        for channel in topic.channels.values():
            try:
                count, all_of_them = channel.drop_oldest(how_many(channel), before)
            except Exception:
                logger.exception("TOPIC(%s): channel %s failed", topic.name, channel.name)
                continue
            dropped += count
            whole = whole and all_of_them
        dropped += topic.drop_backlog(backlog_before)
        if dropped and not whole and not self._trimming:
            self._trimming = True
            topic.broker.later(self._trim_on)
        now = self._clock.now()
        if dropped and (not self._logged or now - self._logged >= _LOG_AGAIN):
            self._logged = now
            logger.warning("TOPIC(%s): its limit is reached, the oldest messages are dropped", topic.name)
        return dropped

    def _look_later(self) -> None:
        """Trim when it is time to look again, also if nothing is published until then."""
        if not self._looking_later:
            self._looking_later = True
            self._topic.broker.store.delay((self._next_look - self._clock.now()) / _SECOND, self._look_again)

    def _look_again(self) -> None:
        self._looking_later = False
        if self._topic.limits is self and not self._topic.exiting:
            self.trim()

    def _trim_on(self) -> None:
        self._trimming = False
        if self._topic.limits is self and not self._topic.exiting:
            self._room_messages = self._room_bytes = -1
            self._next_look = 0
            self.trim()


class Pace:
    """How fast one channel may deliver."""

    def __init__(self, channel: Channel, rate: int) -> None:
        self._channel = channel
        self._bucket = Bucket(rate, channel.broker.clock)
        self._resting = False

    @classmethod
    def of(cls, channel: Channel) -> Pace | None:
        rate = channel.settings.delivery_rate
        return cls(channel, rate) if rate else None

    @property
    def allowance(self) -> int:
        """How many messages may be sent now. If none, the channel is pumped again as soon as some may."""
        tokens = self._bucket.tokens
        if tokens < 1 and not self._resting:
            self._resting = True
            self._channel.broker.store.delay(max(_STRIDE, (1 - tokens) / self._bucket.rate), self._go_on)
        return max(0, int(tokens))

    def spend(self, count: int) -> None:
        self._bucket.spend(count)

    def _go_on(self) -> None:
        self._resting = False
        self._channel.pump()
