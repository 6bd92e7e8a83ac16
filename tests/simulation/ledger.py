"""What simulated clients know: what was sent, answered, delivered and finished, and what must follow from it.

A Book is one channel of one topic on one node, as its clients see it. ``owed`` are the messages that must still come;
``confirmed`` those that must not come again. A publish is owed from its answer on and released when its FIN is *sent*;
a FIN is confirmed when a later command of the same connection was answered.

It is as strict as the docs, but for these:

- A message is released by a FIN that was sent, although the broker may never have got it: then it may come again, and
  need not. The client cannot know.
- A consumer whose connection is delayed, cut or not read is *disturbed*: what it sees may be seconds old. It is only
  asked what holds at any time: ids, bodies, nothing invented, nothing early, nothing long finished.
- While a channel is emptied, or sent elsewhere, and when such a request has no answer, nobody can say what it holds.
- What was refused may be there after a power loss, if no sync was completed between the two: a file that was cut back
  behind a failed write may be as long as before.
- A slow or failing disk widens the window of a power loss to when that began: no sync need have been completed since.
- Not owed are messages with a time to live, and those of ephemeral and sampled channels: whether they are dropped too
  soon is asked at the end alone, of one message of each topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flintmq.broker.storage.keys import digest_of

from .world import World

if TYPE_CHECKING:
    from .actors import Consumer

__all__ = ["Book", "Ledger", "Sent", "TopicBook"]

#: Seconds by which a client may see later, or earlier, what the broker did: a packet of an undisturbed connection is on
#: its way for a third of a millisecond, and the broker's turns and the pieces of a packet add some.
LATENCY = 0.02
#: Seconds that a packet of a disturbed connection may be on its way, or unread.
LONGEST_DELAY = 6.0
#: A killed process forgets FIN, REQ and timeouts of so many last seconds: the docs say 5 ms, a turn or two come on top.
FORGOTTEN_BY_A_KILL = 0.008


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
    #: Its process died with the key in memory alone: a repeat may be stored, until one was answered.
    key_lost: bool = False
    #: It was repeated after that.
    stored_anew: bool = False
    #: It may be delivered: not so for staged rows before their decision.
    visible: bool = True
    acknowledged: float | None = None
    generation: int = 0
    #: The answer was an error: it must never be delivered.
    refused: bool = False
    refused_at: float = 0.0
    #: Seconds that had been added to the node's date when it was published.
    step: float = 0.0
    #: All messages of the same command.
    batch: list[Sent] = field(default_factory=list)


@dataclass(slots=True)
class Delivery:
    consumer: Consumer
    at: float
    timeout: float


@dataclass(slots=True)
class Seen:
    """The last delivery of a message that somebody saw."""

    attempts: int
    #: Of the Book, at that time.
    shaken: int
    at: float
    #: The process has died since then.
    crashed: bool = False


class Unpauses:
    """Requests to go on. A pause that is asked for or answered while one is under way may have been before it."""

    def __init__(self) -> None:
        self._asked = self._open = 0

    @property
    def known(self) -> int:
        """Changes with each request; 0 while one is under way."""
        return 0 if self._open else self._asked + 1

    def ask(self) -> Callable[[int], None]:
        self._asked += 1
        self._open += 1
        return self._answered

    def _answered(self, status: int) -> None:
        # Without an answer it may be heard at any time.
        self._open -= status != 0


@dataclass
class Book:
    topic: TopicBook
    name: str
    since: float
    owed: dict[bytes, float] = field(default_factory=dict)
    confirmed: dict[bytes, float] = field(default_factory=dict)
    seen: dict[bytes, Seen] = field(default_factory=dict)
    #: Everything that was ever delivered, and when for the first time; 0 if its process was dead when it arrived.
    ever: dict[bytes, float] = field(default_factory=dict)
    held: dict[bytes, Delivery] = field(default_factory=dict)
    #: They were delivered as dead letters.
    dead: set[bytes] = field(default_factory=set)
    #: A FIN was sent for them.
    finished: set[bytes] = field(default_factory=set)
    #: (when, and when that was asked for) of what was requeued for later.
    not_before: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    #: When that was asked for, of those that a crash may have made the broker forget.
    maybe_later: dict[bytes, float] = field(default_factory=dict)
    #: Who asked last that it comes later.
    asked_by: dict[bytes, Consumer] = field(default_factory=dict)
    #: Attempts after which a message dies; 0: no limit.
    max_attempts: int = 0
    #: Of ``not_before``: those requeued at their last attempt, which are on their way to the dead-letter topic.
    dying: set[bytes] = field(default_factory=set)
    #: Grows whenever a delivery may have been lost on its way.
    shaken: int = 0
    #: Somebody takes messages and is late, or silent, about it: attempts may grow by more than one from here on.
    unsteady: bool = False
    #: Grows whenever somebody empties it or sends it elsewhere.
    generation: int = 0
    changed_at: float = -1.0
    #: FINs sent while such a change is under way; None: none is.
    during: dict[bytes, None] | None = None
    paused_at: float | None = None
    unpauses: Unpauses = field(default_factory=Unpauses)

    def unpause(self) -> Callable[[int], None]:
        """It is asked to go on. To be called with the status of the answer."""
        self.paused_at = None
        return self.unpauses.ask()

    def release(self, body: bytes) -> None:
        """A FIN is sent."""
        self.owed.pop(body, None)
        self.held.pop(body, None)
        self.finished.add(body)
        if self.during is not None:
            self.during[body] = None

    def requeue(self, body: bytes, at: float, seconds: float, by: Consumer) -> None:
        """A REQ is sent by who holds it."""
        self.not_before[body] = (at + seconds, at)
        self.asked_by[body] = by
        seen = self.seen.get(body)
        if self.max_attempts and seen is not None and seen.attempts >= self.max_attempts:
            self.dying.add(body)
        else:
            self.dying.discard(body)

    def revive(self) -> None:
        """The process has ended: messages without a dead letter on the device come back.

        The delay of a REQ at the last attempt is ignored, so they may come at once.
        """
        for body in self.dying & self.not_before.keys():
            self.maybe_later[body] = self.not_before.pop(body)[1]
        self.dying.clear()

    def forget(self, body: bytes) -> None:
        """It may be stored anew: with another id, not yet delivered, and not finished."""
        self.confirmed.pop(body, None)
        self.seen.pop(body, None)
        self.not_before.pop(body, None)

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
        self.maybe_later.clear()
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
    #: Messages that are published later do not come.
    paused_at: float | None = None
    unpauses: Unpauses = field(default_factory=Unpauses)
    #: Of the last redrive: how many dead letters had gone back, and when that was said.
    redrive: tuple[int, float] = (0, 0.0)
    #: Redrives that were asked for and not answered.
    redrives_unheard: int = 0
    #: Answers to requests that begin one.
    redrives_begun: int = 0
    #: Who reads its log.
    reader: LogReader | None = None

    def unpause(self) -> Callable[[int], None]:
        """It is asked to go on. To be called with the status of the answer."""
        self.paused_at = None
        return self.unpauses.ask()


@dataclass
class LogReader:
    """One that reads a log from its position on, which the broker has promised to keep."""

    epoch: str
    #: Of the topic: how often it was deleted.
    generation: int
    #: What was published after this is read some day.
    since: float
    at: int
    read: set[bytes] = field(default_factory=set)


class Ledger:
    def __init__(self, world: World) -> None:
        self.world = world
        self.sent: dict[bytes, Sent] = {}
        self.topics: dict[tuple[str, str], TopicBook] = {}
        #: By node: what an id stands for.
        self._bodies: dict[tuple[str, str, bytes], bytes] = {}
        self._ids: dict[tuple[str, str, bytes], bytes] = {}
        #: By node: when its power was lost for the last time, and when its date was changed for the last time.
        self.powerless: dict[str, float] = {}
        self.stepped: dict[str, float] = {}
        #: Nodes whose date was set back: a message expires there with those before it, which have later timestamps.
        self.set_back: set[str] = set()
        #: By node: seconds that were added to its date.
        self.steps: dict[str, float] = {}
        #: Messages whose delay spans a new start of the machine and a change of its date: they may come at any time.
        self.loose: set[bytes] = set()
        #: Everything that was delivered anywhere.
        self.came: set[bytes] = set()
        self.deliveries = 0
        self.acknowledged = 0
        self.redelivered = 0
        self.dead_letters = 0
        self.checked_attempts = 0
        self.checked_early = 0
        self.checked_batches = 0
        self.timed_out = 0
        self.attempts_after_a_crash = 0

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
        sent.step = self.steps.get(sent.node, 0.0)
        self.sent[sent.body] = sent
        if sent.key_lost:
            sent.stored_anew = True
            for book in () if topic is None else topic.books.values():
                book.forget(sent.body)

    def acknowledge(self, sent: Sent, last_words: str = "") -> None:
        """An answer came; ``last_words`` says how the process has died that had sent it."""
        now = self.world.seconds
        self.acknowledged += 1
        if not last_words:
            sent.key_lost = False
        if sent.acknowledged is None:
            sent.acknowledged = now
            # The date may have changed since it was sent.
            sent.step = max(sent.step, self.steps.get(sent.node, 0.0))
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
                # An answer may be late: it was delivered as a dead letter meanwhile.
                if sent.body not in book.finished and sent.body not in book.dead:
                    book.owed[sent.body] = now

    def refuse(self, sent: Sent) -> None:
        """The answer was an error. A key may be used again, and be taken then."""
        if not sent.key and sent.acknowledged is None:
            sent.refused = True
            sent.refused_at = self.world.seconds
            if sent.body in self.came:
                self.world.violated(f"refused: {sent.node} {sent.topic} has delivered it before: {sent.body[:60]!r}")

    # --- Deliveries --------------------------------------------------------------------------------------------------

    def delivered(
        self, node: str, topic_name: str, channel: str, consumer: Consumer, id: bytes, body: bytes, attempts: int
    ) -> None:
        world, now = self.world, self.world.seconds
        where = f"{node} {topic_name}/{channel}"
        self.deliveries += 1
        self.came.add(body)
        sent = self.sent.get(body)
        if sent is None:
            world.violated(f"invented: {where} delivers {body[:60]!r}")
            return
        topic = self.topics.get((node, topic_name))
        origin = topic.dead_letters_of if topic is not None else None
        if sent.node != node or (sent.topic != topic_name and (origin is None or sent.topic != origin.topic.name)):
            world.violated(f"astray: {where} delivers a message of {sent.node} {sent.topic}: {body[:60]!r}")
        if sent.refused:
            world.violated(f"refused: {where} delivers what was refused: {body[:60]!r}")
        if not sent.visible:
            world.violated(f"undecided: {where} delivers a staged row before its decision: {body[:60]!r}")
        if self._bodies.setdefault((node, topic_name, id), body) != body:
            world.violated(f"id: {where} delivers {body[:60]!r} under the id {id!r} of another message")
        known = self._ids.setdefault((node, topic_name, body), id)
        if known != id:
            # The same body was stored twice. A redrive does that, also if what it sent back dies again; and a publish
            # with a key that was repeated after its first message was lost with its topic or within its durability.
            excused = topic is None or topic.redriven or (origin is not None and origin.topic.redriven)
            if sent.key and topic is not None:
                unsynced = node in self.powerless and topic.durability != "fsync"
                excused = excused or sent.stored_anew or topic.generation > 0 or unsynced
            if not excused:
                world.violated(f"twice: {where} has {body[:60]!r} under two ids, {known!r} and {id!r}")
            self._ids[node, topic_name, body] = id
        if now < sent.at + sent.delay - 1e-6 and body not in self.loose:
            world.violated(f"early: {where} delivers {sent.at + sent.delay - now:.3f} s too early: {body[:60]!r}")
        if topic is None:
            return
        if topic.ttl and sent.acknowledged is not None and not consumer.disturbed and node not in self.set_back:
            # The age goes by the date, and is looked at once more before each delivery. What was on its way when the
            # date changed had not expired.
            on_its_way = now < self.stepped.get(node, -1.0) + LATENCY
            if not on_its_way and now + self.steps.get(node, 0.0) > sent.acknowledged + sent.step + topic.ttl + LATENCY:
                world.violated(f"expired: {where} delivers after its time: {body[:60]!r}")
        if topic.paused_at is not None and sent.topic == topic_name and sent.at > topic.paused_at:
            world.violated(f"paused: {where} delivers what was published after its topic was paused: {body[:60]!r}")
        if origin is not None:
            origin.owed.pop(body, None)
            origin.dead.add(body)
            origin.ever.setdefault(body, 0.0 if consumer.last_words else now)
            self.dead_letters += 1
        book = topic.books.get(channel)
        if book is None:
            return
        book.ever.setdefault(body, 0.0 if consumer.last_words else now)
        if not consumer.disturbed:
            self._check_book(where, book, consumer, sent, attempts)
        elif now > book.confirmed.get(body, now) + LONGEST_DELAY:
            world.violated(f"finished: {where} delivers to a slow consumer what was finished long before: {body!r}")

    def _early(self, book: Book, body: bytes, text: str) -> None:
        """It was asked for later; unless its consumer does not know yet that it is hung up on, and was not heard."""
        by = book.asked_by.get(body)
        if by is None or self.world.seconds > book.not_before[body][1] + LATENCY:
            self.world.violated(text)
        else:
            self.world.after(LATENCY, lambda: by.over or self.world.violated(text))

    def _check_book(self, where: str, book: Book, consumer: Consumer, sent: Sent, attempts: int) -> None:
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
        if book.topic.redriven and attempts == 1:
            # The copy of a dead letter that was sent back, whose attempts begin anew, is not bound by a delay.
            book.not_before.pop(body, None)
        if now < book.not_before.get(body, (0.0, 0.0))[0] - 1e-6 and settled:
            self._early(book, body, f"early: {where} delivers what was requeued for later: {body[:60]!r}")
        if body in book.seen:
            self.redelivered += 1
            last = book.seen[body]
            if settled and not book.topic.redriven:
                self.checked_attempts += 1
                self.attempts_after_a_crash += last.crashed
                # Deliveries that nobody saw are counted, too.
                exactly = last.shaken == book.shaken and not book.unsteady
                if attempts <= last.attempts or (exactly and attempts != last.attempts + 1):
                    world.violated(f"attempts: {where} says {attempts} after {last.attempts}: {body[:60]!r}")
        other = book.held.get(body)
        if other is not None and not other.consumer.gave_back and not other.consumer.disturbed and settled:
            self.checked_early += 1
            self.timed_out += now >= other.at + other.timeout - LATENCY
            if now < other.at + other.timeout - LATENCY:
                world.violated(
                    f"timeout: {where} delivers again {now - other.at:.3f} s after the last time, "
                    f"timeout {other.timeout} s: {body[:60]!r}"
                )
        words = consumer.last_words
        if words in ("", "exit"):
            book.seen[body] = Seen(attempts, book.shaken, now)
        if words:
            # The process that sent it is gone, and what was in flight with it.
            return
        book.held[body] = Delivery(consumer, now, consumer.timeout)

    def read(self, topic: TopicBook, reader: LogReader, id: bytes, body: bytes) -> None:
        """A message was read from the log."""
        where = f"the log of {topic.node} {topic.name}"
        sent = self.sent.get(body)
        if sent is None or sent.node != topic.node or sent.topic != topic.name:
            self.world.violated(f"log: {where} has what was not published there: {body[:60]!r}")
            return
        if sent.refused or not sent.visible:
            self.world.violated(f"log: {where} has what was refused, or not decided: {body[:60]!r}")
        if self._bodies.setdefault((topic.node, topic.name, id), body) != body:
            self.world.violated(f"id: {where} has {body[:60]!r} under the id {id!r} of another message")
        if body in reader.read and not topic.redriven and not sent.key:
            self.world.violated(f"twice: {where} has {body[:60]!r} in two places")
        reader.read.add(body)

    def redriven(self, topic: TopicBook, moved: int, *, new: bool) -> None:
        """A redrive tells how many dead letters have gone back so far."""
        if new:
            topic.redrives_unheard -= 1
        elif moved < topic.redrive[0] and topic.redrives_unheard:
            # Of one that was asked for without an answer: it may have begun at any time since.
            topic.redrives_unheard -= 1
        elif moved < topic.redrive[0]:
            self.world.violated(f"redrive: {topic.node} {topic.name} says {moved} are back after {topic.redrive[0]}")
        topic.redrive = (moved, self.world.seconds)

    def check_logs(self) -> None:
        """At the end: whoever reads a log has read everything that was acknowledged since it began."""
        for topic in self.topics.values():
            reader = topic.reader
            if reader is None or reader.generation != topic.generation:
                continue
            for body in topic.acked:
                if body not in reader.read and self.sent[body].at > reader.since:
                    self.world.violated(f"log: {topic.node} {topic.name} has not {body[:60]!r} for those who read it")
                    break

    def check_batches(self) -> None:
        """At the end: a batch is stored as a whole or not at all."""
        for book, batch, came in self.parts_of_batches():
            sent = batch[0]
            self.world.violated(
                f"batch: {sent.node} {sent.topic}/{book.name} has {came} of {len(batch)} messages of one batch, for "
                f"example not {next(s.body for s in batch if s.body not in book.ever)[:60]!r}"
            )

    def parts_of_batches(self) -> Iterator[tuple[Book, list[Sent], int]]:
        """Batches of which a channel has delivered a part, and how many messages that is."""
        self.checked_batches = 0
        for sent in self.sent.values():
            topic = self.topics.get((sent.node, sent.topic))
            if topic is None or len(sent.batch) < 2 or sent is not sent.batch[0] or sent.key:
                continue
            if topic.durability not in ("os", "fsync"):
                continue
            # What is lost within its durability may have been seen before.
            lost = self.powerless.get(sent.node, -1.0) if topic.durability == "os" else -1.0
            if topic.generation != sent.generation or topic.dead_letters_of is not None:
                continue
            for book in topic.books.values():
                if book.generation or book.since > sent.at:
                    continue
                if any(book.ever.get(other.body, lost + 1) <= lost for other in sent.batch):
                    continue
                came = sum(other.body in book.ever for other in sent.batch)
                self.checked_batches += 1
                if came not in (0, len(sent.batch)):
                    yield book, sent.batch, came

    # --- Crashes -----------------------------------------------------------------------------------------------------

    def stopped(self, node: str) -> None:
        """A clean stop: all is kept."""
        for topic in self._of(node):
            for book in topic.books.values():
                book.shaken += 1
                book.held.clear()
                book.revive()
        self.loosen(node)

    def killed(self, node: str, pauses: float, stored: dict[str, set[bytes]], keys: dict[str, set[bytes]]) -> None:
        """``pauses``: so many seconds may pass before the journal says that something is paused.

        ``stored``: by topic, how the bodies begin that had left the memory for a file: these outlive a kill.
        ``keys``: by topic, the digests of keys that outlive it although their messages are deleted.
        """
        now = self.world.seconds
        self._crashed(node, now - FORGOTTEN_BY_A_KILL, now - pauses, power=False, stored=stored, keys=keys)

    def lost_power(self, node: str, window: float) -> None:
        """``window``: so many seconds without a completed sync are possible."""
        self.powerless[node] = now = self.world.seconds
        for sent in self.sent.values():
            # What was written of it was cut off again, and a power loss may undo that.
            if sent.refused and sent.node == node and sent.refused_at >= now - window:
                sent.refused = False
        self._crashed(node, now - window, now - window, power=True)

    def unreliable(self, node: str, since: float) -> bool:
        """Does a delay from then span a new start of the machine and a change of its date?"""
        return self.powerless.get(node, -1.0) >= since and self.stepped.get(node, -1.0) >= since

    def loosen(self, node: str) -> None:
        """The next start goes by the date with delays from before the last start of the machine."""
        if node not in self.powerless or node not in self.stepped:
            return
        for sent in self.sent.values():
            if sent.node == node and sent.delay and self.unreliable(node, sent.at):
                self.loose.add(sent.body)
        for topic in self._of(node):
            for book in topic.books.values():
                for body, (_, asked) in list(book.not_before.items()):
                    if self.unreliable(node, asked):
                        del book.not_before[body]
                        book.owed.pop(body, None)
                for body, asked in book.maybe_later.items():
                    if self.unreliable(node, asked):
                        book.owed.pop(body, None)
                for body in self.loose & book.owed.keys():
                    del book.owed[body]

    def _crashed(
        self,
        node: str,
        since: float,
        pauses: float,
        *,
        power: bool,
        stored: dict[str, set[bytes]] | None = None,
        keys: dict[str, set[bytes]] | None = None,
    ) -> None:
        self.loosen(node)
        for topic in self._of(node):
            if topic.paused_at is not None and topic.paused_at >= pauses:
                topic.paused_at = None
            if topic.durability == "memory" or topic.redrive[1] >= since:
                topic.redrive = (0, 0.0)
            gone = topic.durability == "memory" or (power and topic.durability == "os")
            from_then_on = -1.0 if topic.durability == "memory" else since
            files = (stored or {}).get(topic.name, set())

            def kept(body: bytes, at: float, files: set[bytes] = files, until: float = from_then_on) -> bool:
                return at < until or body[: body.find(b">") + 1] in files

            if topic.durability == "memory":
                known = (keys or {}).get(topic.name, set())
                for sent in self.sent.values():
                    if sent.key and (sent.node, sent.topic) == (node, topic.name) and not kept(sent.body, sent.at):
                        sent.key_lost = sent.key_lost or digest_of(sent.key.encode()) not in known
            if gone:
                topic.acked = {body: at for body, at in topic.acked.items() if kept(body, at)}
            for name, book in list(topic.books.items()):
                book.held.clear()
                book.shaken += 1
                book.revive()
                if book.paused_at is not None and book.paused_at >= pauses:
                    book.paused_at = None
                # Only the delivery that was under way is not counted.
                book.seen = {
                    body: Seen(seen.attempts - (not seen.crashed), seen.shaken, seen.at, True)
                    for body, seen in book.seen.items()
                    if seen.at < since
                }
                # What was asked for may or may not have been done, or be forgotten.
                if book.during is not None or book.changed_at >= since:
                    book.clear()
                    book.during = None
                if gone:
                    book.owed = {body: at for body, at in book.owed.items() if kept(body, at)}
                if power and topic.durability != "fsync" and book.since >= since:
                    del topic.books[name]
                    continue
                book.confirmed = {body: at for body, at in book.confirmed.items() if at < since}
                forgotten = {body: asked for body, (_, asked) in book.not_before.items() if asked >= since}
                book.not_before = {body: times for body, times in book.not_before.items() if body not in forgotten}
                book.maybe_later.update(forgotten)

    def _of(self, node: str) -> list[TopicBook]:
        return [topic for (owner, _), topic in self.topics.items() if owner == node]
