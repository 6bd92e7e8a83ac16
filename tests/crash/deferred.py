"""Deferred messages across crashes: none is lost, none comes before its time, and a million of them fit into memory.

    python -m tests.crash.deferred                                  a million over a day, on a clock that is moved
    python -m tests.crash.deferred --real --over 60 --crashes 10    nsqd in a process of its own, in real time

A publisher defers each message by a random time; a consumer finishes what it gets. Some crashes come while messages
are published, the others while they become due. Early is what arrives before the moment of its publish plus its delay.
Exit status 1 says that something was not so.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import sys
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Protocol

from flintmq.addresses import split
from flintmq.protocol.wire import FRAME_MESSAGE, HEARTBEAT, MAGIC_V2, FrameDecoder, encode_command
from flintmq.testing import NsqBroker
from support.command_line import conduct, seed_of, torture_parser

from .broker import BrokerProcess

TOPIC, CHANNEL = b"jobs", b"worker"
_libc = ctypes.CDLL(None)
SECOND = 1_000_000_000
#: Publishes without an answer yet.
UNDER_WAY = 2_000
RDY = 2_500
#: The clock is moved so often to let all the time pass.
STEPS = 200
#: What is due by this margin must have come before the clock is moved again: it starts when the broker reads it.
MARGIN = 60 * SECOND
#: So long nothing may happen before what is missing counts as lost.
PATIENCE = 60.0


@dataclass(frozen=True)
class Plan:
    messages: int
    #: Seconds over which they become due.
    over: float
    crashes: int
    seed: int


@dataclass
class Report:
    seed: int
    messages: int
    acknowledged: int = 0
    deliveries: int = 0
    crashes: int = 0
    lost: int = 0
    early: int = 0
    #: The most memory seen, in MB: of the broker's process, or of this one where the broker is in it.
    resident_mb: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.lost and not self.early


class Rig(Protocol):
    """A broker that can crash, and its clock."""

    #: Does time pass only when it is told to?
    movable: bool

    async def start(self) -> tuple[str, int]: ...

    async def crash(self) -> None: ...

    async def stop(self) -> None: ...

    def now(self) -> int: ...

    def advance(self, seconds: float) -> None: ...

    def resident_mb(self) -> int: ...


class InProcess:
    movable = True

    def __init__(self, data_path: Path, longest: float) -> None:
        self._broker = NsqBroker(data_path, max_req_timeout=f"{longest:g}s")
        self.now = self._broker.clock.now
        self.advance = self._broker.clock.advance

    async def start(self) -> tuple[str, int]:
        self._broker.start()
        return split(self._broker.address)[:2]

    async def crash(self) -> None:
        self._broker.crash()
        # A process that is killed gives its memory back at once, also what glibc would keep for later.
        gc.collect()
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)

    async def stop(self) -> None:
        self._broker.close()

    def resident_mb(self) -> int:
        return _resident_mb("self")


class OwnProcess:
    movable = False

    def __init__(self, data_path: Path, longest: float) -> None:
        self._data_path = data_path
        self._flags = (f"--max-req-timeout={longest:g}s",)
        self._broker: BrokerProcess | None = None
        self.now = time.monotonic_ns

    def advance(self, seconds: float) -> None:
        raise RuntimeError("real time goes by itself")

    async def start(self) -> tuple[str, int]:
        self._broker = await BrokerProcess.of(self._data_path, *self._flags)
        return self._broker.endpoint

    async def crash(self) -> None:
        assert self._broker is not None
        await self._broker.kill()

    async def stop(self) -> None:
        if self._broker is not None:
            await self._broker.kill()

    def resident_mb(self) -> int:
        assert self._broker is not None
        return _resident_mb(str(self._broker.pid))


def _resident_mb(process: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) >> 10
    return 0


class Run:
    def __init__(self, plan: Plan, rig: Rig, progressed: Callable[[Report], None]) -> None:
        self._plan = plan
        self._rig = rig
        self._progressed = progressed
        self._rng = random.Random(plan.seed)
        self.report = Report(plan.seed, plan.messages)
        # By message: the earliest moment at which it may come (0: not sent yet), and whether it came.
        self._due = array("q", bytes(8 * plan.messages))
        self._seen = bytearray(plan.messages)
        self._seen_count = 0
        self._acknowledged = bytearray(plan.messages)
        # Nothing here holds a number per message as an object: in one process with the broker it would count as its.
        self._unsent = iter(range(plan.messages))
        self._again: deque[int] = deque()
        self._consumer: Connection | None = None
        self._publisher: Connection | None = None

    async def run(self) -> Report:
        began = time.monotonic()
        try:
            await self._connect()
            in_publishing = self._plan.crashes // 5
            await self._publish(in_publishing)
            await self._deliver(self._plan.crashes - in_publishing)
        finally:
            self._hang_up()
            await self._rig.stop()
        report = self.report
        report.acknowledged = sum(self._acknowledged)
        report.lost = sum(acked and not seen for acked, seen in zip(self._acknowledged, self._seen, strict=True))
        report.seconds = round(time.monotonic() - began, 1)
        return report

    async def _connect(self) -> None:
        address = await self._rig.start()
        # The channel is there before anything is published.
        self._consumer = await Connection.open(address, self._received)
        self._consumer.send(b"SUB %b %b\nRDY %d\n" % (TOPIC, CHANNEL, RDY))
        await self._consumer.answers(1)
        self._publisher = await Connection.open(address, self._received)

    def _hang_up(self) -> None:
        for connection in (self._consumer, self._publisher):
            if connection is not None:
                connection.close()

    async def _crash(self) -> None:
        self.report.resident_mb = max(self.report.resident_mb, self._rig.resident_mb())
        await self._rig.crash()
        self._hang_up()
        self.report.crashes += 1
        await self._connect()

    # --- Publishing --------------------------------------------------------------------------------------------------

    async def _publish(self, crashes: int) -> None:
        at = sorted(self._rng.sample(range(self._plan.messages), crashes))
        sent = 0
        while batch := self._next_batch():
            publisher = self._publisher
            assert publisher is not None
            publisher.send(b"".join(map(self._command, batch)))
            if at and at[0] < sent + len(batch):
                del at[0]
                # Some of them are answered, the others nobody knows: they are sent again.
                await publisher.answers(self._rng.randrange(len(batch)))
                await self._crash()
                self._again.extend(batch[publisher.answered :])
            else:
                await publisher.answers(len(batch))
            for number in batch[: publisher.answered]:
                self._acknowledged[number] = True
            sent += publisher.answered
            publisher.answered = 0
            self._progressed(self.report)

    def _next_batch(self) -> list[int]:
        batch = list(islice(self._unsent, UNDER_WAY))
        while self._again and len(batch) < UNDER_WAY:
            batch.append(self._again.popleft())
        return batch

    def _command(self, number: int) -> bytes:
        delay = self._rng.randrange(round(self._plan.over * 1_000))
        # Of one that is sent again the first counts: perhaps it was stored.
        due = self._rig.now() + delay * 1_000_000
        self._due[number] = min(due, self._due[number] or due)
        return encode_command(b"DPUB", TOPIC, b"%d" % delay, body=number.to_bytes(4, "big") + bytes(96))

    # --- Delivery ----------------------------------------------------------------------------------------------------

    def _received(self, body: bytes) -> None:
        number = int.from_bytes(body[:4], "big")
        self.report.deliveries += 1
        self.report.early += self._rig.now() < self._due[number]
        if not self._seen[number]:
            self._seen[number] = True
            self._seen_count += 1

    async def _deliver(self, crashes: int) -> None:
        moments = sorted(self._rng.sample(range(STEPS), min(crashes, STEPS)))
        began = self._rig.now()
        steps = [began + round(self._plan.over * SECOND) * (step + 1) // STEPS for step in range(STEPS + 2)]
        # How many are due by each step, less the margin.
        due_by = [0] * (len(steps) + 1)
        for due in self._due:
            due_by[bisect_left(steps, due + MARGIN)] += 1
        due_by = list(accumulate(due_by))
        for step, moment in enumerate(steps):
            if self._rig.movable:
                self._rig.advance(max(0, moment - self._rig.now()) / SECOND)
                await self._until(due_by[step])
            else:
                await asyncio.sleep(max(0, moment - self._rig.now()) / SECOND)
            if moments and moments[0] <= step:
                del moments[0]
                await self._crash()
            self.report.resident_mb = max(self.report.resident_mb, self._rig.resident_mb())
            self._progressed(self.report)
        await self._until(self._plan.messages)

    async def _until(self, count: int) -> None:
        """Until so many have come, or nothing comes any more."""
        seen, give_up = -1, 0.0
        while self._seen_count < count:
            if self._seen_count != seen:
                seen, give_up = self._seen_count, time.monotonic() + PATIENCE
            elif time.monotonic() > give_up:
                return
            await asyncio.sleep(0.005)


class Connection(asyncio.Protocol):
    """Finishes what it is sent, and counts answers."""

    def __init__(self, received: Callable[[bytes], None]) -> None:
        self._received = received
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport
        self._lost = False
        self._progress = asyncio.Event()
        self.answered = 0

    @classmethod
    async def open(cls, address: tuple[str, int], received: Callable[[bytes], None]) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(lambda: cls(received), *address)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(MAGIC_V2)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._progress.set()

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        finished = []
        for kind, payload in self._decoder.feed(data):
            if kind == FRAME_MESSAGE:
                self._received(payload[26:])
                finished.append(b"FIN %b\n" % payload[10:26])
            elif payload == HEARTBEAT:
                finished.append(b"NOP\n")
            elif payload == b"OK":
                self.answered += 1
            elif not payload.startswith(b"E_FIN_FAILED"):
                raise AssertionError(f"the broker refuses: {payload!r}")
        if finished:
            self._transport.write(b"".join(finished))
        self._progress.set()

    async def answers(self, count: int) -> None:
        """Until so many commands were answered, or the connection is lost."""
        while self.answered < count and not self._lost:
            self._progress.clear()
            await self._progress.wait()


async def deferred(plan: Plan, rig: Rig, progressed: Callable[[Report], None] = lambda report: None) -> Report:
    return await Run(plan, rig, progressed).run()


# --- The command line -------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = torture_parser("tests.crash.deferred", "Deferral across crashes.")
    parser.add_argument("--messages", type=int, default=1_000_000, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--over", type=float, default=86_400, metavar="SECONDS", help="the longest deferral (default %(default)s)"
    )
    parser.add_argument("--crashes", type=int, default=50, metavar="N", help="(default %(default)s)")
    parser.add_argument("--real", action="store_true", help="nsqd in a process of its own, killed, in real time")
    arguments = parser.parse_args(argv)
    plan = Plan(arguments.messages, arguments.over, arguments.crashes, seed_of(arguments))
    rig = OwnProcess if arguments.real else InProcess
    return conduct(
        arguments,
        "deferred",
        lambda folder, progressed: deferred(plan, rig(folder, plan.over), progressed),
        title=f"seed {plan.seed}",
        total=plan.crashes,
        described=lambda report: (report.crashes, "crashes"),
    )


if __name__ == "__main__":
    sys.exit(main())
