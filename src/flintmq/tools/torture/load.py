"""Producers and consumers over raw connections, which tell the ledger everything they send and see.

A Connection owns one socket to one life of the broker: when it ends, a new one takes its place. The load is closed: a
producer has a few commands under way and holds back while channels owe too much, so that the broker is always busy
and never buried.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from flintmq.protocol.wire import (
    FRAME_MESSAGE,
    FRAME_RESPONSE,
    HEARTBEAT,
    MAGIC_V2,
    FrameDecoder,
    Message,
    decode_message,
    encode_command,
    encode_mpub,
)
from flintmq.tools.torture.ledger import SMALLEST_BODY, ChannelBook, Ledger, Line

__all__ = ["LONGEST_DELAY", "MSG_TIMEOUT", "PUBLISH_REFUSED", "Connection", "Consumer", "Producer"]

#: Milliseconds; the shortest that the protocol allows, so that timeouts are part of every run.
MSG_TIMEOUT = 1000
LONGEST_DELAY = 2000
#: Why a connection ended.
PUBLISH_REFUSED = "publish refused"
RDY = 1_000
#: Seconds that a producer may wait after an answer.
_LONGEST_PAUSE = 0.02
#: Commands of a producer without an answer yet.
_UNDER_WAY = 6
#: A batch of more messages than this is cut into slices by the broker.
_HUGE_BATCH = 20_500
#: Of a producer, in one life of the broker.
_HUGE_BATCH_CHANCE = 0.02
#: Between two questions of a consumer.
_ASK_INTERVAL = 0.05
_REFUSED = re.compile(rb"E_(FIN|REQ|TOUCH)_FAILED \w+ ([0-9a-f]{16}) ")
#: No message has this id: a FIN of it is answered, and does nothing.
_NO_MESSAGE = b"f" * 16
_NOT_TAKEN = re.compile(rb"E_(PUB|MPUB|DPUB)_FAILED ")


class Connection(asyncio.Protocol):
    """The protocol's common ground: answers come in the order of their commands."""

    def __init__(self, ledger: Ledger, rng: random.Random, *, strict: bool = True) -> None:
        """``strict``: an end that nobody caused is a violation. A server that is not ours may have its reasons."""
        self.ledger = ledger
        self.rng = rng
        self.strict = strict
        self.link = Line(time.monotonic(), ledger.life)
        #: Our own end of the connection, by which a proxy knows it.
        self.port = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._out: list[bytes] = []
        # Commands without an answer yet; and of these the publishes: first number, count.
        self._awaited: deque[Callable[[bytes], None]] = deque()
        self._publishes: deque[tuple[int, int]] = deque()

    async def connect(self, address: tuple[str, int]) -> None:
        """Returns when the connection can do its work. ConnectionError: it ended before that."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, *address)
        except OSError:
            self.closed.set_result(None)
            raise

    def close(self) -> None:
        """What was sent still arrives; nothing more is expected."""
        self.link.closing = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.port = self._transport.get_extra_info("sockname")[1]
        self._transport.write(MAGIC_V2)

    def connection_lost(self, exc: Exception | None) -> None:
        for first, count in self._publishes:
            self.ledger.doubt(first, count)
        self._publishes.clear()
        if not self.link.cause:
            if self.strict and not self.link.closing:
                self.ledger.violations.add("dropped", f"a connection ended: {exc or 'closed by the peer'}")
            self.link.cause = "closed" if self.link.closing else "connection lost"
        self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        # Every moment is taken before the bytes are looked at. What arrives was there by then, so it may seem late,
        # but nothing seems earlier than it was.
        now = time.monotonic()
        for kind, payload in self._decoder.feed(data):
            if kind == FRAME_MESSAGE:
                self.on_message(decode_message(payload), now)
            elif kind != FRAME_RESPONSE:
                self.on_error(payload)
            elif payload == HEARTBEAT:
                self._out.append(b"NOP\n")
            else:
                self._awaited.popleft()(payload)
        self.flush()

    def on_message(self, message: Message, now: float) -> None:
        self.ledger.violations.add("refused", "a message for somebody who did not subscribe")

    def on_error(self, text: bytes) -> None:
        if _NOT_TAKEN.match(text) and self._publishes:
            # Answers keep their order: it is the oldest publish without one. The broker hangs up after it.
            self.ledger.refuse(*self._publishes.popleft())
            self._awaited.popleft()
            self.link.cause = self.link.cause or PUBLISH_REFUSED
        else:
            self.ledger.violations.add("refused", text.decode("utf-8", "replace"))

    def ask(self, command: bytes, then: Callable[[bytes], None]) -> None:
        """Send a command that has an answer, at the next flush."""
        self._out.append(command)
        self._awaited.append(then)

    def flush(self) -> None:
        if self._out and not self._transport.is_closing():
            out, self._out = self._out, []
            self._transport.write(b"".join(out))

    def publish(self, topic: int, sizes: Sequence[int], delay: int, then: Callable[[], None]) -> None:
        """One command for these messages; ``then`` runs when the broker has said OK."""
        first, bodies = self.ledger.publish(topic, time.monotonic(), sizes, delay)
        name = self.ledger.topics[topic].encode()

        def answered(answer: bytes) -> None:
            self._publishes.popleft()
            if answer == b"OK":
                self.ledger.acknowledge(first, len(bodies))
            else:
                self.ledger.violations.add("refused", f"a publish was answered {answer!r}")
            then()

        if len(bodies) > 1:
            command = encode_mpub(name, bodies)
        elif delay:
            command = encode_command(b"DPUB", name, str(delay).encode(), body=bodies[0])
        else:
            command = encode_command(b"PUB", name, body=bodies[0])
        self._publishes.append((first, len(bodies)))
        self.ask(command, answered)


class Producer(Connection):
    """Publishes as fast as it is answered: single messages, batches, deferred ones."""

    def __init__(
        self, ledger: Ledger, rng: random.Random, weights: Sequence[int], most_owed: int, *, strict: bool = True
    ) -> None:
        super().__init__(ledger, rng, strict=strict)
        self._weights = weights
        self._most_owed = most_owed
        self._huge_batch_due = rng.random() < _HUGE_BATCH_CHANCE
        self._stopped = False

    async def connect(self, address: tuple[str, int]) -> None:
        await super().connect(address)
        self._go_on()

    def stop(self) -> None:
        """Publish no more; what is under way is still answered."""
        self._stopped = True

    def _go_on(self) -> None:
        if self._stopped or self.closed.done():
            return
        if self.ledger.owed > self._most_owed:
            asyncio.get_running_loop().call_later(0.005, self._go_on)
            return
        while len(self._awaited) < _UNDER_WAY:
            self._publish_something()
        self.flush()

    def _answered(self) -> None:
        # Now and then with a pause: if all went on at once, publishes would hardly meet a sync that is under way.
        if self.rng.random() < 0.3:
            asyncio.get_running_loop().call_later(self.rng.uniform(0, _LONGEST_PAUSE), self._go_on)
        else:
            self._go_on()

    def _publish_something(self) -> None:
        rng = self.rng
        (topic,) = rng.choices(range(len(self._weights)), self._weights)
        kind = rng.random()
        if self._huge_batch_due:
            self._huge_batch_due = False
            self.publish(topic, [SMALLEST_BODY] * _HUGE_BATCH, 0, self._answered)
        elif kind < 0.6:
            self.publish(topic, [self._size()], 0, self._answered)
        elif kind < 0.9:
            count = rng.choice((2, 10, 30, 30, 100, 300))
            self.publish(topic, [self._size() for _ in range(count)], 0, self._answered)
        else:
            self.publish(topic, [self._size()], rng.randint(1, LONGEST_DELAY), self._answered)

    def _size(self) -> int:
        # Now and then one that fills a good part of a record by itself.
        return self.rng.randint(SMALLEST_BODY, 400 if self.rng.random() < 0.998 else 40_000)


class Consumer(Connection):
    """Finishes most of what it gets, puts some back, lets some time out.

    FIN and REQ have no answer. To know what the broker knows, a consumer asks it something every now and then, on the
    same connection: it publishes a message. The answer says that everything before it was read. A question is sent
    some time after the answer before it; so two answers later the broker's own timer, a few milliseconds long, has
    run out for certain, and what we said stands in its journal. Only then a kill must not undo it.

    A broker whose disk is full refuses publishes and hangs up. There the question is a FIN that must fail.
    """

    def __init__(
        self, ledger: Ledger, rng: random.Random, topic: str, channel: str, *, draining: bool, strict: bool = True
    ) -> None:
        super().__init__(ledger, rng, strict=strict)
        self.topic = topic
        self.channel = channel
        #: Finish everything.
        self.draining = draining
        #: How many questions were answered.
        self.answers = 0
        #: Ask no more.
        self.silent = False
        #: Publish nothing.
        self.held = False
        self.asking = False
        self._book: ChannelBook = cast(ChannelBook, None)
        # What we said of which message: (number, 0 for FIN, else when it may come back). Since the last question;
        # before a question under way; before the last two answers.
        self._said: list[tuple[int, float]] = []
        self._asked: list[tuple[int, float]] = []
        self._known: deque[list[tuple[int, float]]] = deque()
        # Messages about which the broker disagreed, since the last answer.
        self._refused: set[int] = set()

    async def connect(self, address: tuple[str, int]) -> None:
        await super().connect(address)
        subscribed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.closed.add_done_callback(lambda _: subscribed.cancel())

        def answered(answer: bytes) -> None:
            # At once: messages may stand right behind the answer.
            self._book = self.ledger.subscribed(self.topic, self.channel)
            subscribed.set_result(answer)

        self.ledger.subscribing(self.topic, self.channel)
        settings = json.dumps({"msg_timeout": MSG_TIMEOUT}).encode()
        self.ask(encode_command(b"IDENTIFY", body=settings), lambda _: None)
        self.ask(encode_command(b"SUB", self.topic.encode(), self.channel.encode()), answered)
        self.flush()
        try:
            await subscribed
        except asyncio.CancelledError:
            if self.closed.done():
                raise ConnectionResetError("the connection ended before SUB was answered") from None
            raise
        self._out.append(b"RDY %d\n" % RDY)
        self._question()

    def connection_lost(self, exc: Exception | None) -> None:
        for said in self._known:
            for number, _ in said:
                self._book.uncertain(number)
        super().connection_lost(exc)

    def on_message(self, message: Message, now: float) -> None:
        number = self._book.receive(message.body, int(message.id, 16), message.attempts, self.link, now)
        if number is None:
            return
        fate = self.rng.random()
        if self.draining or fate < 0.9:
            self._finish(number, message.id)
        elif fate < 0.93:
            self._book.requeued(number)
            self._out.append(b"REQ %b 0\n" % message.id)
        elif fate < 0.96:
            delay = self.rng.randint(1, LONGEST_DELAY)
            self._book.requeued(number)
            self._said.append((number, now + delay / 1000))
            self._out.append(b"REQ %b %d\n" % (message.id, delay))
        elif fate < 0.98:
            self._keep_busy(number, message.id)

    def _finish(self, number: int, message_id: bytes) -> None:
        self._book.finished(number)
        self._said.append((number, 0.0))
        self._out.append(b"FIN %b\n" % message_id)

    def _keep_busy(self, number: int, message_id: bytes) -> None:
        """Take longer than the timeout, and say so in between."""
        loop = asyncio.get_running_loop()

        def touch() -> None:
            self._out.append(b"TOUCH %b\n" % message_id)
            self.flush()

        def finish() -> None:
            if not self.closed.done():
                self._finish(number, message_id)
                self.flush()

        loop.call_later(0.7 * MSG_TIMEOUT / 1000, touch)
        loop.call_later(1.4 * MSG_TIMEOUT / 1000, finish)

    def on_error(self, text: bytes) -> None:
        found = _REFUSED.match(text)
        if found is None:
            super().on_error(text)
            return
        if found[2] == _NO_MESSAGE:
            self._awaited.popleft()(text)
            return
        number = self._book.number_of(int(found[2], 16))
        if number is not None and found[1] != b"TOUCH":
            self._refused.add(number)
            self._book.refused(number)

    def _question(self) -> None:
        self.asking = False
        if self.closed.done() or self.silent:
            return
        self.asking = True
        self._asked, self._said = self._said, []
        if self.held:
            self.ask(b"FIN %b\n" % _NO_MESSAGE, lambda _: self._answered())
        else:
            self.publish(self._book.topic, [SMALLEST_BODY], 0, self._answered)
        self.flush()

    def _answered(self) -> None:
        self.answers += 1
        certain = [(number, until) for number, until in self._asked if number not in self._refused]
        for number, until in certain:
            self._book.certain(number, until)
        self._asked = []
        self._refused.clear()
        self._known.append(certain)
        if len(self._known) > 2:
            for number, _ in self._known.popleft():
                self._book.settled(number)
        asyncio.get_running_loop().call_later(_ASK_INTERVAL, self._question)
