"""Two promises with a number in them: a start after a kill is quick, and memory does not follow the backlog.

    python -m tests.crash.limits startup [--assert]        a start after 1 million messages and a kill
    python -m tests.crash.limits waiting|idle              what a backlog, or many idle channels, cost

Each function runs a broker of its own on the data path it is given, measures, stops it and reports. None of them
judges by time unless asked: that depends on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flintmq.protocol.wire import encode_mpub
from support.command_line import conduct, torture_parser
from support.nsq_client import NsqClient

from .broker import BrokerProcess

BODY_BYTES = 200
STARTUP_SECONDS = 2.0
#: How much more memory a backlog may cost than the messages that are meant to be there.
WAITING_GROWTH_BYTES = 64 << 20
IDLE_BYTES = 200 << 20
IDLE_TOPICS, IDLE_CHANNELS = 1_000, 10
#: nsqd's default of --mem-queue-size.
MEM_QUEUE_SIZE = 10_000

_BATCH = 1_000
_BATCHES_UNDER_WAY = 4
_CONNECTIONS_AT_ONCE = 50


@dataclass
class Startup:
    messages: int
    #: From the start of the process until SUB was answered, after the kill; and of a broker with nothing to read.
    seconds: float
    empty_seconds: float
    #: What is judged only if asked for.
    limit_seconds: float | None = None

    @property
    def passed(self) -> bool:
        return self.limit_seconds is None or self.seconds < self.limit_seconds


@dataclass
class Memory:
    before_bytes: int
    after_bytes: int
    most_bytes: int
    #: What is judged, and what it must stay below.
    judged_bytes: int
    limit_bytes: int
    #: In words, what the broker held.
    load: str

    @property
    def passed(self) -> bool:
        return self.judged_bytes < self.limit_bytes


class _Client(NsqClient):
    """A client that publishes very many messages."""

    async def publish_batches(self, topic: str, count: int) -> None:
        """Batches, a few of them under way, until ``count`` messages are acknowledged."""
        command = encode_mpub(topic.encode(), [b"x" * BODY_BYTES] * _BATCH)
        batches = -(-count // _BATCH)
        for number in range(batches + _BATCHES_UNDER_WAY):
            if number < batches:
                self.send(command)
                await self.drain()
            if number >= _BATCHES_UNDER_WAY:
                await self.answer()


async def _time_start(data_path: Path) -> float:
    began = time.monotonic()
    broker = await BrokerProcess.of(data_path)
    try:
        async with _Client.to(broker.address) as client:
            await client.subscribe("backlog", "reader")
            return round(time.monotonic() - began, 3)
    finally:
        await broker.kill()


async def startup(data_path: Path, messages: int, *, limited: bool = False) -> Startup:
    """Publish, kill -9 at once, and time the next start until it serves a client."""
    empty = data_path / "empty"
    full = data_path / "full"
    for path in (empty, full):
        path.mkdir()
    empty_seconds = await _time_start(empty)
    broker = await BrokerProcess.of(full)
    try:
        async with _Client.to(broker.address) as consumer, _Client.to(broker.address) as producer:
            await consumer.subscribe("backlog", "reader")
            await producer.publish_batches("backlog", messages)
            await broker.kill()
    finally:
        await broker.kill()
    return Startup(messages, await _time_start(full), empty_seconds, STARTUP_SECONDS if limited else None)


class _Memory:
    """Looks at a broker's memory from time to time."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self.most = self.now()
        self._task = asyncio.create_task(self._watch())

    def now(self) -> int:
        return self._broker.resident_bytes()

    async def _watch(self) -> None:
        while True:
            self.most = max(self.most, self.now())
            await asyncio.sleep(0.2)

    async def end(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def waiting_memory(data_path: Path, messages: int) -> Memory:
    """A backlog far beyond ``--mem-queue-size`` with a consumer that hardly moves."""
    broker = await BrokerProcess.of(data_path, f"--mem-queue-size={MEM_QUEUE_SIZE}")
    try:
        async with _Client.to(broker.address) as consumer, _Client.to(broker.address) as producer:
            await consumer.subscribe("backlog", "reader")
            # A few first, so that what every broker with a topic needs is there before.
            await producer.publish_batches("backlog", MEM_QUEUE_SIZE)
            memory = _Memory(broker)
            before = memory.now()
            finished = 0

            async def consume_slowly() -> None:
                nonlocal finished
                consumer.send(b"RDY 10\n")
                while True:
                    consumer.send(b"FIN %b\n" % (await consumer.message()).id)
                    finished += 1
                    await asyncio.sleep(0.005)

            slow = asyncio.create_task(consume_slowly())
            try:
                await producer.publish_batches("backlog", messages)
                after = memory.now()
            finally:
                slow.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await slow
                await memory.end()
    finally:
        await broker.kill()
    # The messages that are meant to be in memory are there before and after; only growth counts.
    load = f"{messages:,} messages of {BODY_BYTES} bytes waiting, {finished:,} finished meanwhile"
    return Memory(before, after, memory.most, max(after, memory.most) - before, WAITING_GROWTH_BYTES, load)


async def idle_memory(data_path: Path, _: int) -> Memory:
    """Many topics with channels, and nothing in them."""
    broker = await BrokerProcess.of(data_path)
    try:
        before = broker.resident_bytes()
        gate = asyncio.Semaphore(_CONNECTIONS_AT_ONCE)

        async def make(topic: int, channel: int) -> None:
            async with gate, _Client.to(broker.address) as client:
                await client.subscribe(f"topic-{topic}", f"channel-{channel}")

        for topic in range(IDLE_TOPICS):
            await asyncio.gather(*(make(topic, channel) for channel in range(IDLE_CHANNELS)))
        after = broker.resident_bytes()
    finally:
        await broker.kill()
    return Memory(before, after, after, after, IDLE_BYTES, f"{IDLE_TOPICS:,} topics with {IDLE_CHANNELS} channels each")


# --- The command line -------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = torture_parser("tests.crash.limits", "Measure a start after a kill, or memory.")
    parser.add_argument("what", choices=("startup", "waiting", "idle"))
    parser.add_argument("--assert", action="store_true", dest="limited", help="fail if a start took 2 s or more")
    parser.add_argument("--messages", type=int, metavar="N", help="how many, for startup and waiting")
    arguments = parser.parse_args(argv)
    if arguments.what == "startup":
        count = arguments.messages or 1_000_000
        return conduct(
            arguments, "crash", lambda folder, _: startup(folder, count, limited=arguments.limited), keep=False
        )
    measure = waiting_memory if arguments.what == "waiting" else idle_memory
    count = arguments.messages or 10_000_000
    return conduct(arguments, "crash", lambda folder, _: measure(folder, count), keep=False)


if __name__ == "__main__":
    sys.exit(main())
