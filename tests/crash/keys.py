"""Publishes with keys across kill -9: each is stored exactly once, however often it was sent.

    python -m tests.crash.keys --batches 10000 --kills 50
    python -m tests.crash.keys --batches 10000 --kills 50 --durability fsync --seed 7

Each batch has a key and is sent one to three times: some repeats in the same life of the broker, some in a later one,
and whatever was not answered when the broker was killed. Meanwhile a consumer finishes what it gets, so that segments
go and their keys have to outlive them. A message that is delivered again has the id that it had; one that was stored
twice has two ids. At the end every message has been seen, under one id. Exit status 1 says that it was not so.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from flintmq.protocol.wire import (
    FRAME_MESSAGE,
    FRAME_RESPONSE,
    HEARTBEAT,
    MAGIC_V2,
    FrameDecoder,
    decode_message,
    encode_command,
    encode_mpub,
)
from support.command_line import conduct, seed_of, torture_parser

from .broker import PATIENCE, BrokerProcess

TOPIC, CHANNEL = b"batches", b"reader"
#: Small, so that segments go all the time.
FLAGS = (f"--max-bytes-per-file={256 << 10}", "--sync-timeout=100ms", "--mem-queue-size=500")
PRODUCERS = 4
#: Commands of a producer without an answer yet.
UNDER_WAY = 5
RDY = 500


@dataclass(frozen=True)
class Settings:
    batches: int
    kills: int
    durability: str
    seed: int


@dataclass
class Report:
    seed: int
    durability: str
    batches: int = 0
    messages: int = 0
    #: Commands sent, those of them that were repeats of an answered one, and those that a kill left without an answer.
    sent: int = 0
    repeats: int = 0
    unanswered: int = 0
    kills: int = 0
    deliveries: int = 0
    seconds: float = 0.0
    violations: dict[str, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations


@dataclass
class Batch:
    number: int
    count: int
    size: int
    delay: int
    sends_left: int
    answered: bool = False

    @property
    def command(self) -> bytes:
        key = b"batch-%d" % self.number
        bodies = [b"%d %d ".ljust(self.size, b".") % (self.number, index) for index in range(self.count)]
        if self.count > 1:
            return encode_mpub(TOPIC, bodies, key)
        if self.delay:
            return encode_command(b"DPUB", TOPIC, b"%d" % self.delay, key, body=bodies[0])
        return encode_command(b"PUB", TOPIC, key, body=bodies[0])


class Run:
    """The broker's lives, what is still to be sent, and what was seen."""

    def __init__(self, settings: Settings, data_path: Path, progressed: Callable[[Report], None]) -> None:
        self.settings = settings
        self.report = Report(settings.seed, settings.durability)
        self._data_path = data_path
        self._progressed = progressed
        self.rng = random.Random(settings.seed)
        batches = [self._batch(number) for number in range(settings.batches)]
        self._todo = deque(batches)
        self._for_next_life: list[Batch] = []
        self._under_way = 0
        # How often a command was answered in this life.
        self.answers = 0
        self._ids: dict[tuple[int, int], int] = {}
        self._counts = {batch.number: batch.count for batch in batches}
        self._violations: Counter[str] = Counter()
        self.report.batches = len(batches)
        self.report.messages = sum(self._counts.values())

    def _batch(self, number: int) -> Batch:
        rng = self.rng
        count = rng.choice((1, 1, 2, 5, 10, 30))
        # Some need several records.
        size = rng.choice((20, 100, 400)) if rng.random() < 0.97 else 5_000
        delay = rng.randint(1, 500) if count == 1 and rng.random() < 0.2 else 0
        return Batch(number, count, size, delay, rng.choice((1, 2, 3)))

    async def run(self) -> Report:
        began = time.monotonic()
        lives = self.settings.kills + 1
        for life in range(lives):
            self._todo.extend(self._for_next_life)
            self._for_next_life.clear()
            left = sum(batch.sends_left for batch in self._todo)
            # An equal share for each life, more or less.
            share = left / (lives - life) * self.rng.uniform(0.5, 1.5) if life < lives - 1 else float("inf")
            await self._life(share)
            self.report.seconds = round(time.monotonic() - began, 1)
            self._progressed(self.report)
        self._conclude()
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    async def _life(self, share: float) -> None:
        broker = await BrokerProcess.of(self._data_path, f"--durability={self.settings.durability}", *FLAGS)
        self.answers = 0
        consumer = Consumer(self)
        producers = [Producer(self) for _ in range(PRODUCERS)]
        connections: list[Connection] = [consumer, *producers]
        last = share == float("inf")
        try:
            # The channel is there before anything is published.
            await consumer.connect(broker.endpoint)
            await asyncio.gather(*(producer.connect(broker.endpoint) for producer in producers))
            give_up = time.monotonic() + PATIENCE
            seen = -1
            while broker.running and self.answers < share and (self._todo or self._under_way):
                if seen != self.answers:
                    seen, give_up = self.answers, time.monotonic() + PATIENCE
                assert time.monotonic() < give_up, f"the broker answers no more:\n{broker.log_tail()}"
                await asyncio.sleep(0.001)
            if last:
                await self._drain(broker, consumer)
                for connection in connections:
                    connection.close()
                if await broker.stop():
                    self.violate("ended", f"a clean stop failed:\n{broker.log_tail()}")
            else:
                await asyncio.sleep(self.rng.uniform(0, 0.02))
                if not broker.running:
                    self.violate("ended", f"the broker ended by itself:\n{broker.log_tail()}")
                self.report.kills += 1
        finally:
            await broker.kill()
        for line in broker.troubles:
            self.violate("trouble", line)
        await asyncio.gather(*(connection.closed for connection in connections))

    async def _drain(self, broker: BrokerProcess, consumer: Consumer) -> None:
        """Returns when the broker says that there is nothing left to deliver."""
        give_up = time.monotonic() + PATIENCE
        while broker.running:
            reader, writer = await asyncio.open_connection("127.0.0.1", consumer.http_port)
            writer.write(b"GET /stats?format=json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            [topic] = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["topics"]
            writer.close()
            await writer.wait_closed()
            [channel] = topic["channels"]
            left = topic["depth"] + sum(channel[name] for name in ("depth", "in_flight_count", "deferred_count"))
            if not left:
                return
            assert time.monotonic() < give_up, f"{left} messages are not delivered"
            await asyncio.sleep(0.02)

    # --- What connections tell ---------------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        if not self._todo:
            return None
        self._under_way += 1
        batch = self._todo.popleft()
        self.report.sent += 1
        self.report.repeats += batch.answered
        return batch

    def answered(self, batch: Batch) -> None:
        self._under_way -= 1
        self.answers += 1
        batch.answered = True
        batch.sends_left -= 1
        if batch.sends_left:
            chance = self.rng.random()
            if chance < 0.5 and self.report.kills < self.settings.kills:
                self._for_next_life.append(batch)
            elif chance < 0.75:
                # At once.
                self._todo.appendleft(batch)
            else:
                self._todo.append(batch)

    def died(self, batch: Batch) -> None:
        """No answer: nobody knows. It is sent again."""
        self._under_way -= 1
        self.report.unanswered += 1
        self._todo.append(batch)

    def saw(self, body: bytes, message_id: int) -> None:
        self.report.deliveries += 1
        number, index = map(int, body.split()[:2])
        known = self._ids.setdefault((number, index), message_id)
        if known != message_id:
            self.violate("doubled", f"message {index} of batch {number} is {known:016x} and {message_id:016x}")

    def violate(self, rule: str, text: str) -> None:
        self._violations[rule] += 1
        self.report.violations = dict(self._violations)
        if self._violations[rule] <= 20:
            self.report.samples.append(f"{rule}: {text}")

    def _conclude(self) -> None:
        for number, count in self._counts.items():
            missing = [index for index in range(count) if (number, index) not in self._ids]
            if missing:
                self.violate("lost", f"{len(missing)} of the {count} messages of batch {number} were never delivered")


class Connection(asyncio.Protocol):
    """The protocol's common ground: answers come in the order of their commands."""

    def __init__(self, run: Run) -> None:
        self.run = run
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.http_port = 0
        self._awaited: deque[Callable[[bytes], None]] = deque([self._identified])
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)

    async def connect(self, address: tuple[str, int]) -> None:
        """Returns when the connection can do its work."""
        await asyncio.get_running_loop().create_connection(lambda: self, *address)
        await self.ready

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        about = json.dumps({"feature_negotiation": True, "flintmq": True}).encode()
        self._transport.write(MAGIC_V2 + encode_command(b"IDENTIFY", body=about))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConnectionResetError("the broker is gone"))
        self.closed.set_result(None)

    def close(self) -> None:
        self._transport.close()

    def say(self, command: bytes) -> None:
        # What the broker had sent is still read when it is dead.
        if not self._transport.is_closing():
            self._transport.write(command)

    def data_received(self, data: bytes) -> None:
        for kind, payload in self._decoder.feed(data):
            if kind == FRAME_MESSAGE:
                message = decode_message(payload)
                self.run.saw(message.body, int(message.id, 16))
                self.say(b"FIN %b\n" % message.id)
            elif kind != FRAME_RESPONSE:
                self.run.violate("refused", payload.decode(errors="replace"))
            elif payload == HEARTBEAT:
                self.say(b"NOP\n")
            else:
                self._awaited.popleft()(payload)

    def _identified(self, payload: bytes) -> None:
        self.http_port = json.loads(payload)["flintmq"]["http_port"]
        self._begin()

    def _begin(self) -> None:
        raise NotImplementedError


class Consumer(Connection):
    def _begin(self) -> None:
        self._awaited.append(lambda _: self.ready.set_result(None))
        self.say(b"SUB %b %b\nRDY %d\n" % (TOPIC, CHANNEL, RDY))


class Producer(Connection):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._unanswered: deque[Batch] = deque()

    def _begin(self) -> None:
        self.ready.set_result(None)
        self._go_on()

    def _go_on(self) -> None:
        while len(self._unanswered) < UNDER_WAY and not self._transport.is_closing():
            batch = self.run.next_batch()
            if batch is None:
                if not self._unanswered:
                    # Another producer may get one back.
                    asyncio.get_running_loop().call_later(0.005, self._go_on)
                return
            self._unanswered.append(batch)
            self._awaited.append(self._answered)
            self.say(batch.command)

    def _answered(self, payload: bytes) -> None:
        if payload != b"OK":
            self.run.violate("refused", f"a publish was answered {payload!r}")
        self.run.answered(self._unanswered.popleft())
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        for batch in self._unanswered:
            self.run.died(batch)
        self._unanswered.clear()
        super().connection_lost(exc)


async def keys(
    settings: Settings, data_path: Path, progressed: Callable[[Report], None] = lambda report: None
) -> Report:
    """Run it; ``data_path`` must exist and be empty."""
    return await Run(settings, data_path, progressed).run()


# --- The command line -------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = torture_parser("tests.crash.keys", "Keys across kill -9.")
    parser.add_argument("--batches", type=int, default=10_000, metavar="N", help="(default %(default)s)")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="how often (default %(default)s)")
    parser.add_argument("--durability", choices=("os", "fsync"), default="os", help="(default %(default)s)")
    arguments = parser.parse_args(argv)
    settings = Settings(arguments.batches, arguments.kills, arguments.durability, seed_of(arguments))
    return conduct(
        arguments,
        "keys",
        lambda folder, progressed: keys(settings, folder, progressed),
        title=f"seed {settings.seed}, durability {settings.durability}",
        total=settings.kills,
        described=lambda report: (report.kills, "kills"),
    )


if __name__ == "__main__":
    sys.exit(main())
