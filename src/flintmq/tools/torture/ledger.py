"""The oracle of the torture: what was published and answered, what every channel got, and what must never be seen.

The Ledger owns the message numbers. Numbers are given in the order in which publishes are sent, so a channel that
existed before a publish is one whose first number is not larger. A ChannelBook is the ledger's page for one channel.
Whoever sends or receives tells them at once; they speak of nothing but numbers, and do no I/O.

What is a violation:

    lost          acknowledged, and a channel that existed before never got it
    torn          a batch without an answer that a channel got a part of
    ghost         refused, and delivered
    came back     finished, the broker had the time to write that down, and it was delivered again
    no reason     delivered again although it was not requeued, its time was not over and its connection was whole
    early         delivered before its delay was over
    two bodies    one id for two messages of a topic, or two ids for one message
    damaged       a body that nobody published
    attempts      less than 1
    dropped       a connection that ended although nobody killed, cut or closed it

Time is never compared with a limit to decide whether the broker "should have" written something down: consumers ask
it something and count its answers (see ``load.Consumer``). So a slow machine makes the oracle milder, never wrong.

Two connections are not read in the order in which the broker wrote to them. A delivery that timed out may be read after
the next one was read elsewhere and finished: it has fewer attempts, in the same life of the broker, and proves nothing.
And which of two channels was created first is unknown when both SUBs were under way at once.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from struct import Struct

__all__ = ["SMALLEST_BODY", "ChannelBook", "Ledger", "Line", "Violations"]

#: Samples kept in words, of each rule.
_MOST_SAMPLES = 20

# A body: number (8) | topic (1) | delay in ms (2) | filler | CRC-32 of all before (4)
_head = Struct(">QBH")
_crc = Struct(">I")
SMALLEST_BODY = _head.size + _crc.size
_FILLER = random.Random(0).randbytes(1 << 18)

#: The clocks of two processes on one machine agree; this is for rounding.
EARLY_TOLERANCE = 0.002

#: Seconds after which a deferred message counts as late, if its consumer was there all that time.
LATE = 1.0

# What the producer knows of a message.
_UNANSWERED, _ACKNOWLEDGED, _IN_DOUBT, _REFUSED = 0, 1, 2, 3

# What a channel's page says of a message.
_RECEIVED = 1
#: We said FIN.
_FINISHED = 2
#: The broker has answered something that we asked after the FIN: it knows.
_CERTAIN = 4


@dataclass
class Violations:
    """How often each rule was broken, and the first few times in words."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)
    #: The run is over: what happens while it is cleaned up breaks no rule.
    is_closed: bool = False

    def add(self, rule: str, text: str) -> None:
        if self.is_closed:
            return
        self.counts[rule] += 1
        if self.counts[rule] <= _MOST_SAMPLES:
            self.samples.append(f"{rule}: {text}")


@dataclass(eq=False, slots=True)
class Line:
    """One connection to a broker. Its cause is whatever ended it, or may have delayed what it carries."""

    opened: float
    #: Which life of the broker it was made in.
    life: int = 0
    cause: str = ""
    #: It was stalled: what comes may have been sent long ago.
    stale: bool = False
    #: We said goodbye ourselves.
    closing: bool = False


class Ledger:
    """``strict``: a message that comes back after its FIN was certainly written down breaks a rule, and so does one
    that was requeued with a delay and comes early.

    Without it (a server that makes no such promise, or that is not ours) these are duplicates.
    """

    def __init__(self, topics: Iterable[str], msg_timeout: float = 1.0, *, strict: bool = True) -> None:
        self.topics = list(topics)
        self.msg_timeout = msg_timeout
        self.strict = strict
        self.books: dict[tuple[str, str], ChannelBook] = {}
        # Channels that a SUB was sent for: they may exist before that is answered.
        self._asked_for: set[tuple[str, str]] = set()
        #: How often the broker was started again.
        self.life = 0
        self.violations = Violations()
        #: Set to end ``conclude`` early.
        self.abandoned = False
        # One entry per message, by number.
        self._topic = bytearray()
        self._delay = array("H")
        self._sent = array("d")
        self._answer = bytearray()
        self._id = array("Q")
        # Batches of more than one message: first number, count.
        self._batches: list[tuple[int, int]] = []
        #: First deliveries that channels still owe, as far as is known: producers hold back when there are many.
        self.owed = 0
        self.acknowledged = 0
        self.in_doubt = 0
        self.refused = 0
        #: Messages before this number were published before the drain; and how often one of them was delivered since.
        self.drain_from = 0
        self.drained = 0
        #: Was the drain carried to its end? If not, nobody knows what is lost.
        self.is_drained = True

    # --- Publishing --------------------------------------------------------------------------------------------------

    @property
    def published(self) -> int:
        """How many messages were sent; also the next one's number."""
        return len(self._topic)

    def publish(self, topic: int, now: float, sizes: Iterable[int], delay: int = 0) -> tuple[int, list[bytes]]:
        """New messages, about to be sent as one command at ``now``: the first one's number, and their bodies."""
        first = self.published
        bodies = []
        for size in sizes:
            number = len(self._topic)
            start = number * 31 % (len(_FILLER) // 2)
            content = _head.pack(number, topic, delay) + _FILLER[start : start + size - SMALLEST_BODY]
            bodies.append(content + _crc.pack(zlib.crc32(content)))
            self._topic.append(topic)
            self._delay.append(delay)
            self._sent.append(now)
            self._answer.append(_UNANSWERED)
            self._id.append(0)
        if len(bodies) > 1:
            self._batches.append((first, len(bodies)))
        self.owed += len(bodies) * self._channels_of(topic)
        return first, bodies

    def acknowledge(self, first: int, count: int) -> None:
        """The broker said OK."""
        self._answer[first : first + count] = bytes([_ACKNOWLEDGED]) * count
        self.acknowledged += count

    def doubt(self, first: int, count: int) -> None:
        """The broker died before it answered: these may be there or not."""
        self._answer[first : first + count] = bytes([_IN_DOUBT]) * count
        self.in_doubt += count
        self.owed -= count * self._channels_of(self._topic[first])

    def refuse(self, first: int, count: int) -> None:
        """The broker said that it does not take these: nobody may ever get them."""
        self._answer[first : first + count] = bytes([_REFUSED]) * count
        self.refused += count
        self.owed -= count * self._channels_of(self._topic[first])

    def forgive(self, since: int, kept: Container[int]) -> int:
        """Let the messages from ``since`` on be there or not, except those ``kept``; how many were acknowledged.

        A batch is kept as a whole or not at all; one that was delivered in part already may stay like that.
        """
        torn: set[int] = set()
        batches = []
        for first, count in self._batches:
            numbers = range(first, first + count)
            if first < since or all(number in kept for number in numbers):
                batches.append((first, count))
                continue
            torn.update(numbers)
            if not any(book.has(number) for book in self.books.values() for number in numbers):
                batches.append((first, count))
        self._batches = batches
        forgiven = 0
        for number in range(since, self.published):
            if self._answer[number] == _ACKNOWLEDGED and (number not in kept or number in torn):
                self._answer[number] = _IN_DOUBT
                forgiven += 1
        return forgiven

    def _channels_of(self, topic: int) -> int:
        return sum(book.topic == topic for book in self.books.values())

    # --- Channels ----------------------------------------------------------------------------------------------------

    def subscribing(self, topic: str, channel: str) -> None:
        """SUB is about to be sent."""
        self._asked_for.add((topic, channel))

    def subscribed(self, topic: str, channel: str) -> ChannelBook:
        """SUB was answered with OK. From here on, and for a topic's first channel from the beginning, it gets all."""
        self.subscribing(topic, channel)
        book = self.books.get((topic, channel))
        if book is None:
            number = self.topics.index(topic)
            # With another SUB under way, the broker may have created the other channel long before.
            is_first = not any(of == topic and other != channel for of, other in self._asked_for)
            book = ChannelBook(self, number, f"{topic}/{channel}", 0 if is_first else self.published)
            self.books[topic, channel] = book
            if is_first:
                self.owed += sum(
                    topic == number and answer < _IN_DOUBT
                    for topic, answer in zip(self._topic, self._answer, strict=True)
                )
        return book

    # --- What arrives ------------------------------------------------------------------------------------------------

    def identify(self, topic: int, body: bytes, message_id: int, where: str) -> int | None:
        """The number of a message that arrived, if it is what was published."""
        if len(body) < SMALLEST_BODY or zlib.crc32(body[:-4]) != _crc.unpack_from(body, len(body) - 4)[0]:
            self.violations.add("damaged", f"{where}: a body of {len(body)} bytes, id {message_id:016x}")
            return None
        number, published_to, _ = _head.unpack_from(body)
        if number >= self.published or published_to != topic:
            self.violations.add("damaged", f"{where}: message {number} was not published to this topic")
            return None
        known = self._id[number]
        if known != message_id:
            if known:
                self.violations.add("two bodies", f"{where}: {number} has the ids {known:016x} and {message_id:016x}")
                return None
            self._id[number] = message_id
        return int(number)

    def due(self, number: int) -> float:
        """A delivery before this moment is early."""
        return self._sent[number] + self._delay[number] / 1000

    def is_deferred(self, number: int) -> bool:
        return bool(self._delay[number])

    def sent(self, number: int) -> float:
        return self._sent[number]

    def first_delivery(self, number: int) -> None:
        if self._answer[number] < _IN_DOUBT:
            self.owed -= 1

    # --- The end -----------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        self.drain_from = self.published

    def missing(self, since: int = 0) -> int:
        """How many acknowledged messages, from number ``since`` on, channels still have to get."""
        return sum(len(book.missing(since)) for book in self.books.values())

    def is_acknowledged(self, number: int) -> bool:
        return self._answer[number] == _ACKNOWLEDGED

    def is_owed(self, number: int, topic: int) -> bool:
        return self._topic[number] == topic and self._answer[number] == _ACKNOWLEDGED

    def conclude(self) -> None:
        """Everything was drained: what is not there now is lost. If not everything was, it may still be there."""
        rule = "lost" if self.is_drained else "not drained"
        for book in self.books.values():
            for number in book.missing():
                self.violations.add(rule, f"{book.name} never got message {number}, {self._id[number]:016x}")
            for number in range(book.first, self.published):
                if self._answer[number] == _REFUSED and self._topic[number] == book.topic and book.has(number):
                    self.violations.add("ghost", f"{book.name} got message {number}, which was refused")
                if self.abandoned:
                    return
            for first, count in self._batches:
                if self._topic[first] == book.topic and first >= book.first and not self.is_owed(first, book.topic):
                    got = sum(map(book.has, range(first, first + count)))
                    if 0 < got < count:
                        self.violations.add("torn", f"{book.name} got {got} of the {count} messages from {first} on")
        for topic, name in enumerate(self.topics):
            if not self.abandoned:
                self._look_for_twins(topic, name)

    def _look_for_twins(self, topic: int, name: str) -> None:
        # Sorted at the end: a table of all ids would cost ten times the memory of this ledger.
        ids = sorted(
            (message_id, number)
            for number, (message_id, of) in enumerate(zip(self._id, self._topic, strict=True))
            if of == topic and message_id
        )
        for (before, first), (after, second) in pairwise(ids):
            if before == after:
                self.violations.add("two bodies", f"{name}: {before:016x} is the id of {first} and {second}")


@dataclass(eq=False, slots=True)
class _Delivery:
    """The last delivery of a message that may still come again."""

    id: int
    link: Line
    requeued: bool = False


class ChannelBook:
    """The ledger's page for one channel: which messages it got, finished, or was told to hold back."""

    def __init__(self, ledger: Ledger, topic: int, name: str, first: int) -> None:
        self._ledger = ledger
        self.topic = topic
        self.name = name
        #: Messages before this number were published before there was this channel.
        self.first = first
        self._state = bytearray()
        # Of the newest delivery by number: its attempts, and in which life of the broker it was read.
        self._attempts = array("H")
        self._life = array("L")
        self._held_until: dict[int, float] = {}
        # Deliveries that are not yet finished for certain, and their numbers by id.
        self._open: dict[int, _Delivery] = {}
        self._numbers: dict[int, int] = {}
        self.deliveries = 0
        #: Deliveries of what had come before, by cause; and those of them that we had finished.
        self.again: Counter[str] = Counter()
        self.duplicates = 0
        #: Deferred messages that came more than LATE seconds late, and the worst of all, in seconds.
        self.late = 0
        self.latest = 0.0

    @property
    def redeliveries(self) -> int:
        return self.again.total()

    def has(self, number: int) -> bool:
        return number < len(self._state) and bool(self._state[number] & _RECEIVED)

    def missing(self, since: int = 0) -> list[int]:
        ledger = self._ledger
        numbers = range(max(self.first, since), ledger.published)
        return [n for n in numbers if not self.has(n) and ledger.is_owed(n, self.topic)]

    def receive(self, body: bytes, message_id: int, attempts: int, link: Line, now: float) -> int | None:
        """A delivery arrived at ``now`` or a little before; its number, None if it is none of ours."""
        ledger = self._ledger
        number = ledger.identify(self.topic, body, message_id, self.name)
        if number is None:
            return None
        if number >= len(self._state):
            more = ledger.published - len(self._state)
            self._state.extend(bytes(more))
            self._attempts.extend(repeat(0, more))
            self._life.extend(repeat(0, more))
        state = self._state[number]
        self.deliveries += 1
        ledger.drained += number < ledger.drain_from
        if attempts < 1:
            ledger.violations.add("attempts", f"{self.name}: message {number} has attempts {attempts}")
        if state & _RECEIVED and self._life[number] == link.life and attempts < self._attempts[number]:
            self.duplicates += bool(state & _FINISHED)
            self.again["overtaken"] += 1
            return number
        self._attempts[number], self._life[number] = attempts, link.life
        if state & _CERTAIN and ledger.strict:
            ledger.violations.add("came back", f"{self.name}: message {number} was finished, attempts {attempts}")
        self._compare_times(number, link, now, first=not state & _RECEIVED)
        if state & _RECEIVED:
            self.duplicates += bool(state & _FINISHED)
            self._came_again(number, now)
        else:
            ledger.first_delivery(number)
        self._state[number] = state | _RECEIVED
        self._open[number] = _Delivery(message_id, link)
        self._numbers[message_id] = number
        return number

    def _compare_times(self, number: int, link: Line, now: float, *, first: bool) -> None:
        ledger = self._ledger
        due = ledger.due(number)
        if due - now > EARLY_TOLERANCE:
            early = f"came {(due - now) * 1000:.1f} ms before its time"
            ledger.violations.add("early", f"{self.name}: message {number} {early}")
        if not ledger.strict:
            return
        until = self._held_until.pop(number, 0.0)
        if until - now > EARLY_TOLERANCE:
            early = f"came {(until - now) * 1000:.1f} ms too soon"
            ledger.violations.add("early", f"{self.name}: {number}, requeued, {early}")
        if first and ledger.is_deferred(number) and not link.stale:
            late = now - max(due, link.opened)
            self.late += late > LATE
            self.latest = max(self.latest, late)

    def _came_again(self, number: int, now: float) -> None:
        ledger, before = self._ledger, self._open.get(number)
        if before is None:
            # Finished for certain, and come back: that has been said.
            cause = "came back"
        elif before.requeued:
            cause = "requeued"
        elif before.link.cause:
            cause = before.link.cause
        # It cannot have been sent before there was something to send, or a connection to send it on.
        elif now - max(ledger.sent(number), before.link.opened) >= ledger.msg_timeout:
            cause = "timed out"
        else:
            cause = "no reason"
            ledger.violations.add(cause, f"{self.name} got message {number} twice")
        self.again[cause] += 1

    def number_of(self, message_id: int) -> int | None:
        return self._numbers.get(message_id)

    def requeued(self, number: int) -> None:
        """REQ was sent."""
        if number in self._open:
            self._open[number].requeued = True

    def finished(self, number: int) -> None:
        """FIN was sent."""
        self._state[number] |= _FINISHED

    def refused(self, number: int) -> None:
        """FIN came too late: the message had timed out."""
        self._state[number] &= ~_FINISHED

    def certain(self, number: int, until: float) -> None:
        """The broker knows what we answered: FIN, or with ``until`` a REQ that defers it to then."""
        if until:
            self._held_until[number] = until
        else:
            self._state[number] |= _CERTAIN

    def settled(self, number: int) -> None:
        """Whatever happens to the broker now, the answer stands."""
        if self._state[number] & _CERTAIN and (before := self._open.pop(number, None)) is not None:
            self._numbers.pop(before.id, None)

    def uncertain(self, number: int) -> None:
        """The broker died before it certainly wrote that down."""
        self._held_until.pop(number, None)
        self._state[number] &= ~_CERTAIN
