"""What simulated clients know: what was sent, answered, delivered and finished, and what must follow from it.

A Book is one channel of one topic on one node, as its clients see it. ``owed`` are the messages that must still come;
``confirmed`` those that must not come again. A publish is owed from its answer on and released when its FIN is *sent*;
a FIN is confirmed when a later command of the same connection was answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .world import World

__all__ = ["Book", "Ledger", "Sent", "TopicBook"]

#: Seconds by which a client may see later, or earlier, what the broker did: packets are on their way so long at most.
LATENCY = 0.4
#: A killed process forgets answers of so many last seconds.
FORGOTTEN_BY_A_KILL = 0.05


@dataclass(slots=True)
class Sent:
    """One message, published once."""

    body: bytes
    node: str
    topic: str
    at: float
    #: Seconds that it was deferred for.
    delay: float = 0.0
    key: str = ""
    #: It may be delivered: not so for staged rows before their decision.
    visible: bool = True
    acknowledged: float | None = None
    generation: int = 0


@dataclass(slots=True)
class Delivery:
    consumer: Any
    at: float
    timeout: float


@dataclass
class Book:
    topic: TopicBook
    name: str
    since: float
    owed: dict[bytes, float] = field(default_factory=dict)
    confirmed: dict[bytes, float] = field(default_factory=dict)
    #: The attempts of the last delivery, and how steady things were.
    seen: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    held: dict[bytes, Delivery] = field(default_factory=dict)
    #: A FIN was sent for them.
    finished: set[bytes] = field(default_factory=set)
    not_before: dict[bytes, float] = field(default_factory=dict)
    #: Grows whenever a delivery may have been lost on its way.
    shaken: int = 0
    #: Somebody takes messages and is late, or silent, about it.
    unsteady: bool = False
    #: Grows whenever somebody empties it or sends it elsewhere.
    generation: int = 0
    changed_at: float = -1.0
    #: FINs sent while such a change is under way; None: none is.
    during: dict[bytes, None] | None = None
    paused_at: float | None = None

    def release(self, body: bytes) -> None:
        """A FIN is sent."""
        self.owed.pop(body, None)
        self.held.pop(body, None)
        self.finished.add(body)
        if self.during is not None:
            self.during[body] = None

    def clear_seen(self) -> None:
        self.seen.clear()
        self.held.clear()
        self.shaken += 1

    def clear(self) -> None:
        """Whatever was in it may be gone, or come again."""
        self.owed.clear()
        self.confirmed.clear()
        self.held.clear()
        self.seen.clear()
        self.not_before.clear()
        self.shaken += 1
        self.generation += 1


@dataclass
class TopicBook:
    node: str
    name: str
    #: What an OK means here.
    durability: str
    books: dict[str, Book] = field(default_factory=dict)
    #: Everything that was acknowledged, and when.
    acked: dict[bytes, float] = field(default_factory=dict)
    generation: int = 0
    #: Messages older than so many seconds do not come.
    ttl: float = 0.0
    #: Dead letters may have come back.
    redriven: bool = False
    #: What is released by being delivered in another topic.
    dead_letters_of: Book | None = None
    #: The date was changed, or a start may have counted delays by it.
    stepped: bool = False


class Ledger:
    def __init__(self, world: World) -> None:
        self.world = world
        self.sent: dict[bytes, Sent] = {}
        self.topics: dict[tuple[str, str], TopicBook] = {}
        #: By node: what an id stands for.
        self._bodies: dict[tuple[str, str, bytes], bytes] = {}
        self._ids: dict[tuple[str, str, bytes], bytes] = {}
        #: Nodes whose power was lost at least once.
        self.powerless: set[str] = set()
        self.deliveries = 0
        self.acknowledged = 0
        self.redelivered = 0
        self.dead_letters = 0
        self.checked_attempts = 0
        self.checked_early = 0

    def topic(self, node: str, name: str) -> TopicBook | None:
        return self.topics.get((node, name))

    def book(self, node: str, topic: str, channel: str) -> Book | None:
        found = self.topics.get((node, topic))
        return None if found is None else found.books.get(channel)

    def all_books(self) -> list[Book]:
        return [book for topic in self.topics.values() for book in topic.books.values()]

    def open(self, node: str, topic: str, channel: str, durability: str) -> Book:
        made = self.topics.setdefault((node, topic), TopicBook(node, topic, durability))
        return made.books.setdefault(channel, Book(made, channel, self.world.seconds))

    # --- Publishes ---------------------------------------------------------------------------------------------------

    def publish(self, sent: Sent) -> None:
        topic = self.topics.get((sent.node, sent.topic))
        sent.generation = 0 if topic is None else topic.generation
        self.sent[sent.body] = sent

    def acknowledge(self, sent: Sent, last_words: str = "") -> None:
        """An answer came; ``last_words`` says how the process has died that had sent it."""
        now = self.world.seconds
        self.acknowledged += 1
        if sent.acknowledged is None:
            sent.acknowledged = now
        topic = self.topics.get((sent.node, sent.topic))
        if topic is None or topic.generation != sent.generation or sent.body in topic.acked:
            return
        if last_words not in ("", "exit"):
            if topic.durability == "memory" or (last_words == "power" and topic.durability != "fsync"):
                return
        topic.acked[sent.body] = now
        for book in topic.books.values():
            # Not if it was emptied or sent elsewhere since: nobody can say which of them came first.
            if book.since <= sent.at and book.changed_at < sent.at and book.during is None:
                if sent.body not in book.finished:
                    book.owed[sent.body] = now

    # --- Deliveries --------------------------------------------------------------------------------------------------

    def delivered(
        self, node: str, topic_name: str, channel: str, consumer: Any, id: bytes, body: bytes, attempts: int
    ) -> None:
        world, now = self.world, self.world.seconds
        where = f"{node} {topic_name}/{channel}"
        self.deliveries += 1
        sent = self.sent.get(body)
        if sent is None:
            world.violated(f"invented: {where} delivers {body[:60]!r}")
            return
        topic = self.topics.get((node, topic_name))
        origin = topic.dead_letters_of if topic is not None else None
        if sent.node != node or (sent.topic != topic_name and (origin is None or sent.topic != origin.topic.name)):
            world.violated(f"astray: {where} delivers a message of {sent.node} {sent.topic}: {body[:60]!r}")
        if not sent.visible:
            world.violated(f"undecided: {where} delivers a staged row before its decision: {body[:60]!r}")
        if self._bodies.setdefault((node, topic_name, id), body) != body:
            world.violated(f"id: {where} delivers {body[:60]!r} under the id {id!r} of another message")
        known = self._ids.setdefault((node, topic_name, body), id)
        if known != id:
            # A key goes with its topic, and with its message if the power takes that; so may the note that a copy to a
            # dead-letter topic was made.
            excused = (
                topic is None or topic.redriven or (sent.key and (topic.generation or topic.durability == "memory"))
            )
            if node in self.powerless and topic is not None:
                excused = excused or origin is not None or topic.durability != "fsync"
            if not excused:
                world.violated(f"twice: {where} has {body[:60]!r} under two ids, {known!r} and {id!r}")
            self._ids[node, topic_name, body] = id
        if now < sent.at + sent.delay - 1e-6 and topic is not None and not topic.stepped:
            world.violated(f"early: {where} delivers {sent.at + sent.delay - now:.3f} s too early: {body[:60]!r}")
        if topic is None:
            return
        if topic.ttl and sent.acknowledged is not None and not topic.stepped and not consumer.disturbed:
            if now > sent.acknowledged + topic.ttl + 1 + LATENCY:
                world.violated(f"expired: {where} delivers after its time: {body[:60]!r}")
        if origin is not None:
            origin.owed.pop(body, None)
            self.dead_letters += 1
        book = topic.books.get(channel)
        if book is not None and not consumer.disturbed:
            self._check_book(where, book, consumer, sent, attempts)

    def _check_book(self, where: str, book: Book, consumer: Any, sent: Sent, attempts: int) -> None:
        world, now, body = self.world, self.world.seconds, sent.body
        # Else it may be from before somebody emptied it, or sent it elsewhere.
        settled = book.during is None and now > book.changed_at + LATENCY
        if body in book.confirmed:
            world.violated(
                f"finished: {where} delivers again what was finished {now - book.confirmed[body]:.3f} s before: "
                f"{body[:60]!r}"
            )
        if book.paused_at is not None and now > book.paused_at + LATENCY:
            world.violated(f"paused: {where} delivers {now - book.paused_at:.3f} s after it was paused")
        if now < book.not_before.get(body, 0.0) - 1e-6 and not book.topic.stepped:
            world.violated(f"early: {where} delivers what was requeued for later: {body[:60]!r}")
        if body in book.seen:
            self.redelivered += 1
            last, steady = book.seen[body]
            if steady == book.shaken and not book.unsteady and settled:
                self.checked_attempts += 1
                if attempts != last + 1:
                    world.violated(f"attempts: {where} says {attempts} after {last}: {body[:60]!r}")
        other = book.held.get(body)
        if other is not None and not other.consumer.over and not other.consumer.disturbed and settled:
            self.checked_early += 1
            if now < other.at + other.timeout - LATENCY:
                world.violated(
                    f"timeout: {where} delivers again {now - other.at:.3f} s after the last time, "
                    f"timeout {other.timeout} s: {body[:60]!r}"
                )
        book.seen[body] = (attempts, book.shaken)
        book.held[body] = Delivery(consumer, now, consumer.timeout)

    # --- Crashes -----------------------------------------------------------------------------------------------------

    def stopped(self, node: str) -> None:
        """A clean stop: all is kept."""
        for topic in self._of(node):
            for book in topic.books.values():
                book.shaken += 1
                book.held.clear()
                book.paused_at = None

    def killed(self, node: str) -> None:
        self._crashed(node, self.world.seconds - FORGOTTEN_BY_A_KILL, power=False)

    def lost_power(self, node: str, window: float) -> None:
        """``window``: so many seconds without a completed sync are possible."""
        self.powerless.add(node)
        self._crashed(node, self.world.seconds - window, power=True)

    def forgive_delays(self, node: str) -> None:
        """What was deferred may come at any time from now on."""
        for topic in self._of(node):
            for book in topic.books.values():
                book.owed = {
                    body: at
                    for body, at in book.owed.items()
                    if not self.sent[body].delay and body not in book.not_before
                }

    def _crashed(self, node: str, since: float, *, power: bool) -> None:
        for topic in self._of(node):
            if power:
                # Delays go by the date after a new start of the machine, which is good enough for seconds.
                topic.stepped = True
            gone = topic.durability == "memory" or (power and topic.durability == "os")
            from_then_on = -1.0 if topic.durability == "memory" else since
            if gone:
                topic.acked = {body: at for body, at in topic.acked.items() if at < from_then_on}
            for name, book in list(topic.books.items()):
                book.held.clear()
                book.shaken += 1
                book.paused_at = None
                # What was asked for may or may not have been done, or be forgotten.
                if book.during is not None or book.changed_at >= since:
                    book.clear()
                    book.during = None
                if gone:
                    book.owed = {body: at for body, at in book.owed.items() if at < from_then_on}
                if power and topic.durability != "fsync" and book.since >= since:
                    del topic.books[name]
                    continue
                book.confirmed = {body: at for body, at in book.confirmed.items() if at < since}
                book.not_before.clear()

    def _of(self, node: str) -> list[TopicBook]:
        return [topic for (owner, _), topic in self.topics.items() if owner == node]
