"""The oracle of the cluster: what was published and answered, what came, and why it may have come twice.

A ClusterLedger owns the message numbers. A NodeLink is one connection as the clients see it: when it was opened, and
what ended it if somebody did. Whoever publishes, receives, kills or cuts tells the ledger at once. It does no I/O.

What is a violation:

    lost          acknowledged, and a channel of its topic never got it
    torn          a batch that a channel got a part of
    ghost         never sent, or refused, and delivered
    stored twice  two ids for one message, though its producer had no reason to send it again
    no reason     delivered again although its node was not killed, its connection not cut, its time not over, and its
                  handler did not put it back
    damaged       a body that nobody published to this topic
    dropped       a connection that ended although nobody killed, cut or closed it

Times are compared only where that makes the oracle milder on a slow machine, never wrong: a message may have timed out
if so long has passed since it can have been sent at the earliest.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct

from flintmq.tools.torture.ledger import Violations

__all__ = ["ClusterBook", "ClusterLedger", "NodeLink", "Publish"]

# A body: number (8) | topic (1) | CRC-32 of all before and the filler (4) | filler
_head = Struct(">QBI")


@dataclass(eq=False)
class NodeLink:
    """One connection of a client to a node. A cause is whatever the torture did that ends it."""

    node: str
    opened: float
    cause: float | None = None
    #: The client itself said goodbye.
    closing: bool = False
    lost: float | None = None


@dataclass(eq=False, slots=True)
class _Delivery:
    link: NodeLink
    put_back: bool = False


@dataclass(eq=False, slots=True)
class Publish:
    """One call of a producer: messages ``first`` … ``first + count - 1``, which are stored together or not at all."""

    topic: int
    first: int
    count: int
    began: float
    #: acknowledged, unknown, or not there (never sent, or refused); empty while it is under way.
    outcome: str = ""
    #: The producer had a reason to send it again: it may be there twice.
    resent: bool = False


class ClusterLedger:
    def __init__(self, channels: Sequence[tuple[str, str]], msg_timeout: float) -> None:
        """``channels`` are topic and channel; they must be there before the first publish, or be a topic's only one."""
        self.msg_timeout = msg_timeout
        self.topics = list(dict.fromkeys(topic for topic, _ in channels))
        self.books = {
            (topic, channel): ClusterBook(self, self.topics.index(topic), f"{topic}/{channel}")
            for topic, channel in channels
        }
        self.violations = Violations()
        self.links: list[NodeLink] = []
        self._dying: set[str] = set()
        # Nodes that may drop connections, because something is done to them.
        self._disturbed: set[str] = set()
        self.acknowledged = 0
        self.unknown = 0
        self.refused = 0
        #: Set to end ``conclude`` early.
        self.abandoned = False
        self._acknowledged_of: Counter[int] = Counter()
        self._publishes: list[Publish] = []
        # By message number: which publish it belongs to, and under which ids it was stored.
        self._publish_of: list[Publish] = []
        self._ids: dict[int, set[bytes]] = {}

    # --- Links -------------------------------------------------------------------------------------------------------

    def opened(self, node: str, now: float) -> NodeLink:
        link = NodeLink(node, now)
        if node in self._dying or node in self._disturbed:
            # It may still have been taken in by a process that was dead already.
            link.cause = now
        self.links.append(link)
        return link

    def killed(self, node: str, now: float) -> None:
        """To be told right before it is done."""
        self._dying.add(node)
        for link in self.links:
            if link.node == node and link.lost is None and link.cause is None:
                link.cause = now

    def is_gone(self, node: str) -> None:
        """The killed process is no more."""
        self._dying.discard(node)
        self._disturbed.discard(node)

    def disturbed(self, node: str, now: float) -> None:
        """Until it is killed, this node may have to drop connections."""
        self._disturbed.add(node)
        for link in self.links:
            if link.node == node and link.lost is None and link.cause is None:
                link.cause = now

    def lost(self, link: NodeLink, now: float, text: str = "") -> None:
        link.lost = now
        if link.cause is None and not link.closing:
            self.violations.add("dropped", f"a connection to {link.node} ended for no reason: {text}")

    # --- Publishing --------------------------------------------------------------------------------------------------

    @property
    def published(self) -> int:
        return len(self._publish_of)

    def publish(self, topic: str, sizes: Iterable[int], now: float) -> tuple[Publish, list[bytes]]:
        """New messages that are published together, and their bodies."""
        publish = Publish(self.topics.index(topic), self.published, 0, now)
        bodies = []
        for size in sizes:
            number = self.published
            self._publish_of.append(publish)
            publish.count += 1
            filler = b"%d " % number * (size // 8)
            checksum = zlib.crc32(filler, number << 1 & 0xFFFF_FFFF)
            bodies.append(_head.pack(number, publish.topic, checksum) + filler)
        self._publishes.append(publish)
        return publish, bodies

    def acknowledge(self, publish: Publish, *, resent: bool = False) -> None:
        publish.outcome = "acknowledged"
        publish.resent = resent
        self.acknowledged += publish.count
        self._acknowledged_of[publish.topic] += publish.count

    def doubt(self, publish: Publish, *, resent: bool = False) -> None:
        """Nobody knows whether it was stored."""
        publish.outcome = "unknown"
        publish.resent = resent
        self.unknown += publish.count

    def refuse(self, publish: Publish) -> None:
        """It was never sent, or the broker said that it is not stored."""
        publish.outcome = "not there"
        self.refused += publish.count

    # --- What arrives ------------------------------------------------------------------------------------------------

    def identify(self, topic: int, body: bytes, message_id: bytes, where: str) -> int | None:
        """The number of a message that came, if it is what was published."""
        if len(body) >= _head.size:
            number, published_to, checksum = _head.unpack_from(body)
            whole = zlib.crc32(body[_head.size :], number << 1 & 0xFFFF_FFFF) == checksum
            if whole and published_to == topic and number < self.published:
                self._ids.setdefault(number, set()).add(message_id)
                return int(number)
        self.violations.add("damaged", f"{where}: {body[:40]!r}, id {message_id!r}")
        return None

    def published_at(self, number: int) -> float:
        return self._publish_of[number].began

    # --- The end -----------------------------------------------------------------------------------------------------

    @property
    def owed(self) -> int:
        """How many first deliveries are still to come, roughly: what nobody knows about may have come too."""
        return sum(self._acknowledged_of[book.topic] - len(book.deliveries) for book in self.books.values())

    def conclude(self) -> None:
        """Everything was drained: what did not come by now is lost."""
        for publish in self._publishes:
            if self.abandoned:
                return
            numbers = range(publish.first, publish.first + publish.count)
            for book in self.books.values():
                if book.topic == publish.topic:
                    self._judge(publish, numbers, book)
            if publish.resent or publish.outcome == "":
                continue
            for number in numbers:
                if len(self._ids.get(number, ())) > 1:
                    self.violations.add("stored twice", f"message {number} has the ids {self._ids[number]}")

    def _judge(self, publish: Publish, numbers: range, book: ClusterBook) -> None:
        got = sum(number in book.deliveries for number in numbers)
        if publish.outcome == "acknowledged":
            for number in numbers:
                if number not in book.deliveries:
                    self.violations.add("lost", f"{book.name} never got message {number}")
        elif publish.outcome == "not there" and got:
            self.violations.add("ghost", f"{book.name} got {got} messages from {publish.first} on, which are not there")
        elif 0 < got < publish.count:
            self.violations.add("torn", f"{book.name} got {got} of {publish.count} messages from {publish.first} on")


class ClusterBook:
    """The ledger's page for one channel: the last delivery of every message under each of its ids."""

    def __init__(self, ledger: ClusterLedger, topic: int, name: str) -> None:
        self._ledger = ledger
        self.topic = topic
        self.name = name
        #: By number, then by id.
        self.deliveries: dict[int, dict[bytes, _Delivery]] = {}
        self.count = 0
        #: Why messages came again.
        self.again: Counter[str] = Counter()

    def receive(self, body: bytes, message_id: bytes, link: NodeLink, now: float) -> _Delivery | None:
        """A handler was given a message. What it does with it is to be told to the delivery."""
        ledger = self._ledger
        self.count += 1
        number = ledger.identify(self.topic, body, message_id, self.name)
        if number is None:
            return None
        delivery = _Delivery(link)
        deliveries = self.deliveries.setdefault(number, {})
        before = deliveries.get(message_id)
        if before is not None:
            self._came_again(number, before, now)
        elif deliveries:
            self.again["stored twice"] += 1
        deliveries[message_id] = delivery
        return delivery

    def _came_again(self, number: int, before: _Delivery, now: float) -> None:
        ledger, link = self._ledger, before.link
        # It cannot have been sent before there was something to send, or a connection to send it on.
        sent = max(ledger.published_at(number), link.opened)
        if before.put_back:
            reason = "put back"
        elif link.cause is not None and link.cause <= now:
            reason = "killed or cut"
        elif now - sent >= ledger.msg_timeout:
            reason = "timed out"
        else:
            reason = "no reason"
            ledger.violations.add(reason, f"{self.name} got message {number} of {link.node} twice")
        self.again[reason] += 1
