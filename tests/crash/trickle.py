"""A little of everything that clients do, and an account of every message: what ``soak`` runs beside its main load.

Two topics. ``mixed`` is published to by PUB, MPUB and HTTP. Its channel ``careless`` has consumers that finish most
messages, requeue some and let some time out; ``visited`` has one that stays and many that come and go, with farewell
(CLS) or without; ``tail#ephemeral`` comes and goes itself, and so do channels of single visitors. ``deferred`` is
published to by DPUB.

A Book holds the numbers that are published and not finished, so its size is that of what is under way. A number that
arrives after it was finished is doubled; that is excused once for each FIN or REQ that came too late.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from flintmq.protocol.wire import (
    FRAME_ERROR,
    FRAME_MESSAGE,
    FRAME_RESPONSE,
    Message,
    decode_message,
    encode_command,
    encode_mpub,
)
from support.http_client import HttpClient
from support.nsq_client import NsqClient

from .broker import PATIENCE, BrokerProcess

__all__ = ["Amounts", "Book", "Totals", "Trickle"]

MIXED, DEFERRED = "mixed", "deferred"
NUMBER_BYTES = 8
LONGEST_BODY = 2_000
#: Seconds between two rounds of publishing.
ROUND = 0.1
BATCH = 10
#: Shares of the messages of the careless consumers.
REQUEUED, FORGOTTEN = 0.05, 0.02
#: Seconds that the ephemeral channel lives, and then does not.
TAIL_LIVES, TAIL_RESTS = 20.0, 2.0
#: Of the visitors, each of this number has an ephemeral channel of its own.
OWN_CHANNEL_EACH = 10


@dataclass(frozen=True)
class Amounts:
    #: Messages a second that are published by each of PUB, MPUB, HTTP and DPUB.
    rate: int = 100
    #: Connections a second that leave again.
    visits: int = 5
    #: Seconds.
    longest_delay: float = 30.0
    msg_timeout: float = 2.0


@dataclass
class Totals:
    published: int = 0
    delivered: int = 0
    requeued: int = 0
    let_time_out: int = 0
    #: Deliveries beyond the first that were asked for: requeued, timed out, or left behind by a visitor.
    redelivered: int = 0
    late: int = 0
    doubled: int = 0
    early: int = 0
    visits: int = 0
    tailed: int = 0


class Book:
    """The numbers of one topic that one channel has not finished, each with the time before which it may not come."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._open: dict[int, int] = {}
        self._begun: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, number: int, not_before: int = 0) -> None:
        self._open[number] = not_before

    def deliver(self, number: int) -> None:
        totals = self._totals
        totals.delivered += 1
        if number not in self._open:
            totals.doubled += 1
            return
        totals.early += time.monotonic_ns() < self._open[number]
        totals.redelivered += number in self._begun
        self._begun.add(number)

    def finish(self, number: int) -> None:
        self._open.pop(number, None)
        self._begun.discard(number)

    def some(self) -> list[int]:
        """Return a few of the numbers that it waits for."""
        return sorted(self._open)[:5]


class _Consumer(NsqClient):
    """A consumer that enters what it gets into a book; a FIN or REQ that is too late is counted."""

    book: Book
    totals: Totals

    @classmethod
    @asynccontextmanager
    async def of(cls, address: str, book: Book, totals: Totals, msg_timeout: float) -> AsyncIterator[_Consumer]:
        async with cls.to(address) as client:
            client.book, client.totals = book, totals
            await client.ask(encode_command(b"IDENTIFY", body=b'{"msg_timeout":%d}' % round(1_000 * msg_timeout)))
            yield client

    async def next(self) -> tuple[int, Message]:
        while True:
            kind, data = await self.frame()
            if kind == FRAME_MESSAGE:
                message = decode_message(data)
                number = int.from_bytes(message.body[:NUMBER_BYTES], "big")
                self.book.deliver(number)
                return number, message
            if kind == FRAME_ERROR:
                self._refused(data)

    def _refused(self, data: bytes) -> None:
        if not data.startswith((b"E_FIN_FAILED", b"E_REQ_FAILED")):
            raise ConnectionError(f"the broker answered {data!r}")
        self.totals.late += 1

    async def farewell(self) -> None:
        """CLS: its answer says that every FIN before it was handled."""
        self.send(b"CLS\n")
        while (frame := await self.frame()) != (FRAME_RESPONSE, b"CLOSE_WAIT"):
            if frame[0] == FRAME_ERROR:
                self._refused(frame[1])

    def finish_one(self, number: int, message: Message) -> None:
        self.book.finish(number)
        self.finish([message])


class Trickle:
    def __init__(self, broker: BrokerProcess, seed: int, amounts: Amounts) -> None:
        self._broker = broker
        self._rng = random.Random(seed)
        self._amounts = amounts
        self.totals = Totals()
        self._careless, self._visited, self._deferred = (Book(self.totals) for _ in range(3))
        self._mixed_numbers, self._deferred_numbers, self._visitors = count(), count(), count()
        self._over = asyncio.Event()

    def stop(self) -> None:
        """Have it publish no more; ``run`` returns when everything is finished."""
        self._over.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            consumers = [
                group.create_task(self._consume_carelessly()),
                group.create_task(self._consume_carelessly()),
                group.create_task(self._consume("visited", MIXED, self._visited)),
                group.create_task(self._consume("worker", DEFERRED, self._deferred)),
                group.create_task(self._tail()),
            ]
            # The channels are there before the first message.
            for topic, channel in ((MIXED, "careless"), (MIXED, "visited"), (DEFERRED, "worker")):
                async with NsqClient.to(self._broker.address) as client:
                    await client.subscribe(topic, channel)
            publishers = [
                group.create_task(work)
                for work in (
                    self._publish_singles(),
                    self._publish_batches(),
                    self._publish_over_http(),
                    self._publish_deferred(),
                    self._receive_visitors(),
                )
            ]
            await asyncio.wait(publishers)
            await self._until_empty()
            for consumer in consumers:
                consumer.cancel()

    def unfinished(self) -> list[str]:
        """Return, for each channel that waits for messages, a few of their numbers."""
        books = {"careless": self._careless, "visited": self._visited, "worker": self._deferred}
        return [f"{name}: {len(book):,} are missing, such as {book.some()}" for name, book in books.items() if book]

    async def _until_empty(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.unfinished() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    # --- Publishing --------------------------------------------------------------------------------------------------

    async def _rounds(self, per_second: float) -> AsyncIterator[int]:
        """Yield how many are due, round after round; a round that comes late is not made up for."""
        owed = 0.0
        while not self._over.is_set():
            owed += per_second * ROUND
            yield int(owed)
            owed -= int(owed)
            await asyncio.sleep(ROUND)

    def _mixed_body(self) -> bytes:
        number = next(self._mixed_numbers)
        self._careless.enter(number)
        self._visited.enter(number)
        return self._body(number)

    def _body(self, number: int) -> bytes:
        self.totals.published += 1
        return number.to_bytes(NUMBER_BYTES, "big") + bytes(self._rng.randrange(LONGEST_BODY))

    async def _publish_singles(self) -> None:
        async with NsqClient.to(self._broker.address) as one, NsqClient.to(self._broker.address) as other:
            async for due in self._rounds(self._amounts.rate / 2):
                for client in (one, other):
                    await client.publish(MIXED, *(self._mixed_body() for _ in range(due)))

    async def _publish_batches(self) -> None:
        async with NsqClient.to(self._broker.address) as client:
            async for due in self._rounds(self._amounts.rate / BATCH):
                for _ in range(due):
                    client.send(encode_mpub(MIXED.encode(), [self._mixed_body() for _ in range(BATCH)]))
                    await client.answer()

    async def _publish_over_http(self) -> None:
        async with HttpClient.connect(self._broker.http_address) as http:
            async for due in self._rounds(self._amounts.rate):
                for _ in range(due):
                    answer = await http.post(f"/pub?topic={MIXED}", self._mixed_body())
                    if answer.status != 200:
                        raise ConnectionError(f"/pub was answered with {answer.status} {answer.body!r}")

    async def _publish_deferred(self) -> None:
        async with NsqClient.to(self._broker.address) as client:
            async for due in self._rounds(self._amounts.rate):
                for _ in range(due):
                    delay = round(1_000 * self._rng.uniform(0, self._amounts.longest_delay))
                    number = next(self._deferred_numbers)
                    self._deferred.enter(number, time.monotonic_ns() + delay * 1_000_000)
                    client.send(encode_command(b"DPUB", DEFERRED.encode(), b"%d" % delay, body=self._body(number)))
                    await client.answer()

    # --- Consuming ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _consumer(self, topic: str, channel: str, ready: int, book: Book) -> AsyncIterator[_Consumer]:
        async with _Consumer.of(self._broker.address, book, self.totals, self._amounts.msg_timeout) as client:
            await client.subscribe(topic, channel, ready=ready)
            yield client

    async def _consume(self, channel: str, topic: str, book: Book) -> None:
        async with self._consumer(topic, channel, 100, book) as client:
            while True:
                client.finish_one(*await client.next())

    async def _consume_carelessly(self) -> None:
        totals = self.totals
        async with self._consumer(MIXED, "careless", 100, self._careless) as client:
            while True:
                number, message = await client.next()
                fate = self._rng.random()
                if fate < REQUEUED:
                    totals.requeued += 1
                    client.send(b"REQ %b %d\n" % (message.id, self._rng.choice((0, 500))))
                elif fate < REQUEUED + FORGOTTEN:
                    totals.let_time_out += 1
                else:
                    client.finish_one(number, message)

    async def _tail(self) -> None:
        while True:
            async with NsqClient.to(self._broker.address) as client:
                await client.subscribe(MIXED, "tail#ephemeral", ready=100)
                leaves = time.monotonic() + TAIL_LIVES
                while time.monotonic() < leaves:
                    client.finish([await client.message()])
                    self.totals.tailed += 1
            await asyncio.sleep(TAIL_RESTS)

    # --- Visitors ----------------------------------------------------------------------------------------------------

    async def _receive_visitors(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for due in self._rounds(self._amounts.visits):
                for _ in range(due):
                    group.create_task(self._visit(next(self._visitors)))

    async def _visit(self, number: int) -> None:
        if number % OWN_CHANNEL_EACH == 0:
            async with NsqClient.to(self._broker.address) as client:
                await client.subscribe(MIXED, f"visitor-{number}#ephemeral")
        else:
            async with self._consumer(MIXED, "visited", 3, self._visited) as client:
                taken = [await self._next_unless_over(client) for _ in range(self._rng.randrange(1, 4))]
                # The others leave without a word and finish nothing: a FIN just before the end may be lost.
                if number % 2:
                    for one in filter(None, taken):
                        client.finish_one(*one)
                    await client.farewell()
        self.totals.visits += 1

    async def _next_unless_over(self, client: _Consumer) -> tuple[int, Message] | None:
        """Return the next message, or None if no more are published and others may have the last ones."""
        message, over = asyncio.create_task(client.next()), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({message, over}, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else None
        finally:
            message.cancel()
            over.cancel()
            # Only one may read at a time.
            await asyncio.gather(message, over, return_exceptions=True)
