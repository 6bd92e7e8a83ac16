"""Loads that are large in one way: many connections, many topics, much that waits.

    python -m tests.crash.load [idle|churn|topics|lagging|deferred|all] [--short] [--results FILE]

``idle``      10,000 idle connections beside 200 busy ones: the latency of the busy ones, with and without them
``churn``     connections come, subscribe, take a few messages and leave, for 10 minutes: nothing of them stays
``topics``    1,000 topics with 10 channels and traffic to all of them
``lagging``   100 channels whose consumers take one message at a time, of a backlog in files
``deferred``  10 million deferred messages and a ``kill -9``

Each runs an nsqd of its own. It is judged by counts, by bytes, and by ratios to a control in the same run. Times are
reported, but they depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench import load
from flintmq.addresses import split
from flintmq.protocol.wire import encode_command, encode_mpub
from support.command_line import conduct, seed_of, torture_parser
from support.http_client import HttpClient
from support.nsq_client import NsqClient
from support.revision import ENGINE, about

from .broker import PATIENCE, BrokerProcess
from .deferred import Connection
from .flow import Flow, FlowFailed, Reading, in_words
from .gauge import Gauge, depth_of, objects_of, raise_file_limit, stats_of, until

SOURCES = (*ENGINE, "tests/crash/load.py", "tests/crash/flow.py", "bench/load.c")
MIB = 1 << 20
BODY_BYTES = 200
#: Of a message's frame on the wire, before its body.
FRAME_HEAD_BYTES = 34
#: Seconds that a generator may take; each of them ends earlier by itself.
LONG = 3_600


@dataclass
class Outcome:
    what: str
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def require(self, so: bool, otherwise: str) -> None:
        if not so:
            self.failures.append(otherwise)


Progressed = Callable[[str], None]


@asynccontextmanager
async def _running(data_path: Path, *flags: str) -> AsyncIterator[BrokerProcess]:
    broker = await BrokerProcess.of(data_path, *flags)
    try:
        # It imports its general HTTP server soon after the start: that is no cost of what comes.
        await stats_of(broker)
        yield broker
    finally:
        await broker.kill()


class _Watch:
    """The memory of a broker over time."""

    def __init__(self, gauge: Gauge, every: float = 0.2) -> None:
        self.memory = array("d")
        self._task = asyncio.create_task(self._look(gauge, every))

    async def _look(self, gauge: Gauge, every: float) -> None:
        while True:
            self.memory.append(gauge.memory())
            await asyncio.sleep(every)

    async def __aenter__(self) -> _Watch:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def growth(self) -> float:
        """Return the bytes from the second to the fourth quarter, by medians: the first belongs to the start."""
        quarter = len(self.memory) // 4
        if not quarter:
            return 0.0
        return median(self.memory[-quarter:]) - median(self.memory[quarter : 2 * quarter])


def _mb(size: float) -> float:
    return round(size / MIB, 1)


# --- idle -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IdlePlan:
    idle: int = 10_000
    busy: int = 200
    #: Messages a second of all busy ones.
    rate: int = 2_000
    #: Of each measurement.
    seconds: int = 15
    #: Of the idle connections; a client that does not answer two of them is cut off.
    heartbeat_ms: int = 10_000
    #: Rounds of four measurements: without idle connections, with, with, without. More follow while it looks bad.
    rounds: int = 3
    most_rounds: int = 6

    @property
    def descriptors(self) -> int:
        return self.idle + self.busy + 512


#: Of the p99 of the busy ones with idle connections, to the one without.
MOST_RATIO = 2.0


async def idle(data_path: Path, plan: IdlePlan, progressed: Progressed) -> Outcome:
    outcome = Outcome("idle")
    binary = load.build()
    alone: list[float] = []
    beside: list[float] = []
    per_connection: list[float] = []
    heartbeats: list[int] = []

    def ratio() -> float:
        return median(beside) / median(alone)

    async with _running(data_path) as broker:
        port, gauge = broker.endpoint[1], Gauge(broker)

        async def p99() -> float:
            half = plan.busy // 2
            async with await Flow.start(
                *(binary, port),
                topic="busy",
                channel="worker",
                connections=half,
                consumers=plan.busy - half,
                batch=1,
                rate=plan.rate,
                rdy=10,
                size=BODY_BYTES,
                seconds=plan.seconds,
            ) as flow:
                reading = await flow.result()
                outcome.require(reading.messages == reading.published, "not everything was delivered")
                return flow.take_latencies().quantile(0.99) * 1e3

        await p99()
        for number in range(plan.most_rounds):
            if number >= plan.rounds and ratio() <= MOST_RATIO:
                break
            progressed(f"round {number + 1}")
            alone.append(await p99())
            before, quiet = gauge.memory(), gauge.descriptors()
            async with await Flow.start(
                *(binary, port, "idle"),
                topic="quiet",
                channel="nobody",
                connections=plan.idle,
                subscribed=True,
                seconds=LONG,
                identify=f'{{"heartbeat_interval":{plan.heartbeat_ms}}}',
            ) as crowd:
                outcome.require(crowd.last.connections == plan.idle, f"{crowd.last.connections:,} could connect")
                per_connection.append((gauge.memory() - before) / plan.idle)
                beside += [await p99(), await p99()]
                # It would have ended with an error if one of them had been cut off.
                crowd.check()
                heartbeats.append((await crowd.stop()).heartbeats)

            async def are_gone(quiet: int = quiet) -> bool:
                return gauge.descriptors() <= quiet

            outcome.require(await until(are_gone), "descriptors of idle connections are left")
            alone.append(await p99())
        outcome.figures = {
            "idle connections": plan.idle,
            "busy connections": plan.busy,
            "ms p99 without them": round(median(alone), 3),
            "ms p99 beside them": round(median(beside), 3),
            "times as long": round(ratio(), 2),
            "measurements": len(alone) + len(beside),
            "bytes an idle connection": round(per_connection[0]),
            "heartbeats answered": sum(heartbeats),
        }
        if 2_000 * plan.seconds > plan.heartbeat_ms:
            outcome.require(min(heartbeats) >= plan.idle, "not every idle connection was sent a heartbeat")
        outcome.require(ratio() <= MOST_RATIO, f"p99 is {ratio():.2f} times that of the control")
    return outcome


# --- churn ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChurnPlan:
    seconds: float = 600.0
    at_once: int = 20
    #: Visits before the first count of objects: what a first time costs is no leak.
    first: int = 500
    descriptors: int = 2_048


#: Objects and bytes that may be more than before, however many connections there were.
MOST_OBJECTS, MOST_GROWTH = 2_000, 16 * MIB


async def churn(data_path: Path, plan: ChurnPlan, progressed: Progressed) -> Outcome:
    outcome = Outcome("churn")
    async with _running(data_path, "--msg-timeout=1s") as broker:
        # It reports each half of a command as an error.
        broker.rough = True
        gauge = Gauge(broker)
        visitors = _Visitors(broker)
        async with NsqClient.to(broker.address) as client:
            await client.subscribe("visited", "worker")
        feeding = asyncio.create_task(visitors.feed())
        try:
            await visitors.come(plan.at_once, lambda: visitors.count < plan.first)
            objects, descriptors = await objects_of(broker), gauge.descriptors()
            counted, end = visitors.count, time.monotonic() + plan.seconds
            async with _Watch(gauge) as watch:
                await visitors.come(plan.at_once, lambda: not feeding.done() and time.monotonic() < end)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

        async def is_quiet() -> bool:
            topics = await stats_of(broker)
            channels = [channel for topic in topics for channel in topic["channels"]]
            names = {channel["channel_name"] for channel in channels}
            return (
                not any(channel["client_count"] for channel in channels)
                and names == {"worker"}
                and [topic["topic_name"] for topic in topics] == ["visited"]
                and gauge.descriptors() <= descriptors
            )

        left = f"clients, ephemeral channels or more than {descriptors} descriptors are left"
        outcome.require(await until(is_quiet, 20), left)
        more = await objects_of(broker) - objects
        growth = watch.growth()
        outcome.figures = {
            "connections": visitors.count,
            "messages taken": visitors.taken,
            "messages finished": visitors.finished,
            "connections without a word": visitors.silent,
            "objects more": more,
            "MB more": _mb(growth),
            "MB at most": _mb(max(watch.memory)),
        }
        outcome.require(visitors.count > counted, "nobody came")
        outcome.require(more < MOST_OBJECTS, f"{more:,} objects are left of {visitors.count - counted:,} connections")
        outcome.require(growth < MOST_GROWTH, f"memory grew by {_mb(growth)} MB")
        outcome.failures += broker.troubles[:5]
    return outcome


class _Visitors:
    """Connections that leave again, each in the way that its number says."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._address = broker.address
        self.count = self.taken = self.finished = self.silent = 0
        self._published = 0
        self._wanted = asyncio.Event()

    async def feed(self) -> None:
        """Keep a few hundred messages ahead of what is finished."""
        async with NsqClient.to(self._address) as client:
            while True:
                while self._published - self.finished < 500:
                    client.send(encode_mpub(b"visited", [bytes(BODY_BYTES)] * 100))
                    await client.answer()
                    self._published += 100
                self._wanted.clear()
                await self._wanted.wait()

    async def come(self, at_once: int, so_long: Callable[[], bool]) -> None:
        async def one_after_the_other() -> None:
            while so_long():
                self.count += 1
                await self._visit(self.count)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(one_after_the_other())

    async def _visit(self, number: int) -> None:
        async with NsqClient.to(self._address) as client:
            match number % 10:
                case 0:
                    # The end of half a command.
                    client.send(b"IDENTIFY\n\0\0")
                    self.silent += 1
                case 1:
                    await client.subscribe("visited", f"own-{number}#ephemeral", ready=1)
                case 2:
                    await client.subscribe(f"own-{number}#ephemeral", "own#ephemeral", ready=1)
                case way:
                    await client.subscribe("visited", "worker", ready=3)
                    messages = await client.messages(number % 3 + 1)
                    self.taken += len(messages)
                    # The others leave what they got: it comes again.
                    if way < 8:
                        client.finish(messages)
                        client.send(b"CLS\n")
                        while (await client.frame())[1] != b"CLOSE_WAIT":
                            pass
                        self.finished += len(messages)
                        self._wanted.set()


# --- topics -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopicsPlan:
    topics: int = 1_000
    channels: int = 10
    #: Of each topic.
    messages: int = 500
    batch: int = 10

    @property
    def descriptors(self) -> int:
        return self.topics * (self.channels + 2) + 1_024


#: Bytes for each channel with its connection, for each topic, and besides.
CHANNEL_BYTES, TOPIC_BYTES, TOPICS_BYTES = 16 << 10, 128 << 10, 64 * MIB


async def topics(data_path: Path, plan: TopicsPlan, progressed: Progressed) -> Outcome:
    outcome = Outcome("topics")
    binary = load.build()
    count = plan.topics * plan.channels
    async with _running(data_path) as broker:
        port, gauge = broker.endpoint[1], Gauge(broker)
        before = gauge.memory()
        limit = before + count * CHANNEL_BYTES + plan.topics * TOPIC_BYTES + TOPICS_BYTES
        progressed("connects")
        async with await Flow.start(
            *(binary, port, "sub"),
            topic="many",
            channel="c",
            numbered_channels=True,
            topics=plan.topics,
            connections=count,
            rdy=100,
            messages=count * plan.messages,
            seconds=LONG,
            # The last of very many may connect a minute after the first.
            identify='{"heartbeat_interval":60000}',
        ) as consumers:
            connected = gauge.memory()
            progressed("publishes")
            async with _Watch(gauge) as watch:
                async with await Flow.start(
                    *(binary, port, "mpub"),
                    topic="many",
                    topics=plan.topics,
                    # Several would not share the topics evenly.
                    connections=1,
                    window=8,
                    batch=plan.batch,
                    size=BODY_BYTES,
                    messages=plan.topics * plan.messages,
                    seconds=LONG,
                ) as publisher:
                    published = await publisher.result()
                progressed("consumes")
                consumed = await consumers.result()
        _check_each(outcome, consumed, count, plan.messages)
        outcome.require(published.messages == plan.topics * plan.messages, "not everything was published")
        found = await stats_of(broker)
        outcome.require(len(found) == plan.topics, f"{len(found):,} topics are there")
        outcome.require(depth_of(found) == 0, f"{depth_of(found):,} messages are left")
        most = max(watch.memory)
        outcome.figures = {
            "topics": plan.topics,
            "channels": count,
            "published": published.messages,
            "delivered": consumed.messages,
            "MB before": _mb(before),
            "MB connected": _mb(connected),
            "MB at most": _mb(most),
            "delivered a second": round(consumed.messages / (consumed.finished - published.started)),
        }
        outcome.require(most < limit, f"{_mb(most)} MB of memory are more than {_mb(limit)}")
        outcome.failures += broker.troubles[:5]
    return outcome


def _check_each(outcome: Outcome, consumed: Reading, connections: int, messages: int) -> None:
    """Each connection has a channel of its own, and must have got everything in it once."""
    outcome.require(consumed.messages == connections * messages, f"{consumed.messages:,} messages were delivered")
    outcome.require(
        consumed.least == consumed.most == messages,
        f"a channel delivered {consumed.least:,} messages, another {consumed.most:,}, and not {messages:,}",
    )
    outcome.require(consumed.redelivered == 0, f"{consumed.redelivered:,} were delivered again")
    outcome.require(consumed.disordered == 0, f"{consumed.disordered:,} were out of order")


# --- lagging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaggingPlan:
    channels: int = 100
    messages: int = 100_000
    #: Bytes. All bodies are more than the broker's cache of what is read from files.
    body: int = 1_000
    #: Parts of the channels that begin one after the other, so that they read at several places.
    groups: int = 4
    mem_queue_size: int = 10_000
    descriptors: int = 2_048


#: Growth of memory: the cache of what is read from files, and its threads.
LAGGING_BYTES = 96 * MIB
#: Bytes read from files for each byte delivered: 1 if each channel read everything for itself.
MOST_READ = 1.5


async def lagging(data_path: Path, plan: LaggingPlan, progressed: Progressed) -> Outcome:
    outcome = Outcome("lagging")
    binary = load.build()
    flag = f"--mem-queue-size={plan.mem_queue_size}"
    each = plan.channels // plan.groups
    names = [[f"group-{group}-{number}" for number in range(each)] for group in range(plan.groups)]
    async with _running(data_path, flag) as broker:
        async with HttpClient.connect(broker.http_address) as http:
            await http.post("/topic/create?topic=backlog")
            for name in (name for group in names for name in group):
                await http.post(f"/channel/create?topic=backlog&channel={name}")
        progressed("publishes")
        async with await Flow.start(
            *(binary, broker.endpoint[1], "mpub"),
            topic="backlog",
            batch=200,
            size=plan.body,
            messages=plan.messages,
            seconds=LONG,
        ) as publisher:
            await publisher.result()
        await broker.stop()
    # Nothing of the backlog is in memory now.
    async with _running(data_path, flag) as broker:
        gauge = Gauge(broker)
        before, read = gauge.memory(), gauge.bytes_read()
        flows: list[Flow] = []
        began = time.monotonic()
        try:
            async with _Watch(gauge) as watch:
                for group, of_group in enumerate(names):
                    progressed(f"consumes, group {group + 1} of {plan.groups}")
                    flows.append(
                        await Flow.start(
                            *(binary, broker.endpoint[1], "sub"),
                            topic="backlog",
                            channel=f"group-{group}",
                            numbered_channels=True,
                            connections=each,
                            rdy=1,
                            messages=each * plan.messages,
                            seconds=LONG,
                        )
                    )

                    async def is_on_its_way(of_group: list[str] = of_group, flow: Flow = flows[-1]) -> bool:
                        """A part of the backlog is consumed: the next group finds none of its messages in memory."""
                        [topic] = await stats_of(broker)
                        left = sum(c["depth"] for c in topic["channels"] if c["channel_name"] in of_group)
                        return left < each * plan.messages * (1 - 1 / plan.groups)

                    await until(is_on_its_way, LONG)
                readings = [await flow.result() for flow in flows]
        finally:
            for flow in flows:
                await flow.close()
        delivered = sum(reading.messages for reading in readings)
        for reading in readings:
            _check_each(outcome, reading, each, plan.messages)
        ratio = (gauge.bytes_read() - read) / (delivered * (FRAME_HEAD_BYTES + plan.body))
        growth = max(watch.memory) - before
        outcome.figures = {
            "channels": plan.channels,
            "messages of each": plan.messages,
            "delivered": delivered,
            "delivered a second": round(delivered / (time.monotonic() - began)),
            "bytes read for each delivered": round(ratio, 4),
            "MB more at most": _mb(growth),
        }
        outcome.require(ratio < MOST_READ, f"{ratio:.2f} bytes were read for each delivered")
        outcome.require(growth < LAGGING_BYTES, f"memory grew by {_mb(growth)} MB")
        outcome.failures += broker.troubles[:5]
    return outcome


# --- deferred ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeferredPlan:
    messages: int = 10_000_000
    #: Of those, the last ones become due after the kill, in this time; each hundredth before them while publishing.
    sample: int = 100_000
    soon: tuple[float, float] = (10.0, 60.0)
    body: int = 100
    seed: int = 0
    descriptors: int = 2_048


#: Bytes of memory for each deferred message, and besides.
DEFERRED_BYTES, DEFERRED_BESIDES = 160, 64 * MIB
#: All others are due in this time. No run takes as long.
LATER = (7_200.0, 14_400.0)
UNDER_WAY = 2_000
SHORT_EACH = 100


async def deferred(data_path: Path, plan: DeferredPlan, progressed: Progressed) -> Outcome:
    return await _Deferred(data_path, plan, progressed).run()


class _Deferred:
    def __init__(self, data_path: Path, plan: DeferredPlan, progressed: Progressed) -> None:
        self._data_path = data_path
        self._plan = plan
        self._progressed = progressed
        self._rng = random.Random(plan.seed)
        self._outcome = Outcome("deferred")
        # By message: the earliest moment at which it may come, and whether it came.
        self._due = array("q", bytes(8 * plan.messages))
        self._seen = bytearray(plan.messages)
        self._first_sample = plan.messages - plan.sample
        self._early = self._again = 0

    async def run(self) -> Outcome:
        plan, outcome = self._plan, self._outcome
        empty, full = self._data_path / "empty", self._data_path / "full"
        for path in (empty, full):
            path.mkdir()
        async with _running(empty) as broker:
            empty_start = broker.starts[-1]
        flag = f"--max-req-timeout={LATER[1]:g}s"
        async with _running(full, flag) as broker:
            gauge = Gauge(broker)
            before = gauge.memory()
            consumer = await self._consumer(broker)
            began = time.monotonic()
            await self._publish(broker)
            published = time.monotonic() - began
            after = gauge.memory()
            held = (await stats_of(broker))[0]["channels"][0]["deferred_count"]
            await broker.kill()
            consumer.close()
        self._progressed("starts again")
        async with _running(full, flag) as broker:
            start, gauge = broker.starts[-1], Gauge(broker)
            started = gauge.memory()
            consumer = await self._consumer(broker)
            soon = [*range(0, self._first_sample, SHORT_EACH), *range(self._first_sample, plan.messages)]

            async def has_come() -> bool:
                return all(map(self._seen.__getitem__, soon))

            self._progressed("waits for what is due soon")
            await until(has_come, plan.soon[1] + PATIENCE)
            await self._judge(broker, soon)
            consumer.close()
            outcome.failures += broker.troubles[:5]
        each = (after - before) / held
        outcome.figures = {
            "deferred": plan.messages,
            "held": held,
            "published a second": round(plan.messages / published),
            "bytes each": round(each),
            "bytes each after the start": round((started - before) / held),
            "seconds of the start after a kill": round(start, 2),
            "seconds of a start with nothing": round(empty_start, 2),
            "came": sum(self._seen),
            "early": self._early,
        }
        limit = DEFERRED_BYTES + DEFERRED_BESIDES / held
        for size in (each, (started - before) / held):
            outcome.require(size < limit, f"a deferred message costs {size:.0f} bytes, and not {limit:.0f} at most")
        return outcome

    async def _judge(self, broker: BrokerProcess, soon: list[int]) -> None:
        plan, outcome = self._plan, self._outcome
        missing = [number for number in soon if not self._seen[number]]
        outcome.require(not missing, f"{len(missing):,} messages did not come, such as {missing[:5]}")
        outcome.require(self._early == 0, f"{self._early:,} messages came early")

        async def are_held() -> bool:
            """What is not due yet is there; what came is finished."""
            [topic] = await stats_of(broker)
            [channel] = topic["channels"]
            waiting = channel["depth"] + channel["in_flight_count"]
            return (waiting, channel["deferred_count"]) == (0, plan.messages - len(soon))

        outcome.require(await until(are_held, 20), "the channel does not hold what is due later")

    async def _consumer(self, broker: BrokerProcess) -> Connection:
        consumer = await Connection.open(split(broker.address)[:2], self._received)
        consumer.send(b"SUB jobs worker\nRDY 2500\n")
        await consumer.answers(1)
        return consumer

    def _received(self, body: bytes) -> None:
        number = int.from_bytes(body[:4], "big")
        self._early += time.monotonic_ns() < self._due[number]
        self._seen[number] = 1

    async def _publish(self, broker: BrokerProcess) -> None:
        publisher = await Connection.open(split(broker.address)[:2], self._received)
        for first in range(0, self._plan.messages, UNDER_WAY):
            batch = range(first, min(first + UNDER_WAY, self._plan.messages))
            publisher.send(b"".join(map(self._command, batch)))
            # One batch is on its way while the next one is made.
            await publisher.answers(first)
            if first % (500 * UNDER_WAY) == 0:
                self._progressed(f"has published {first:,}")
        await publisher.answers(self._plan.messages)
        self._outcome.require(publisher.answered == self._plan.messages, "the broker closed the connection")
        publisher.close()

    def _command(self, number: int) -> bytes:
        span = LATER
        if number >= self._first_sample:
            span = self._plan.soon
        elif number % SHORT_EACH == 0:
            span = (0.0, self._plan.soon[0])
        delay = round(1_000 * self._rng.uniform(*span))
        self._due[number] = time.monotonic_ns() + delay * 1_000_000
        body = number.to_bytes(4, "big") + bytes(self._plan.body - 4)
        return encode_command(b"DPUB", b"jobs", b"%d" % delay, body=body)


# --- The command line -------------------------------------------------------------------------------------------------

Plan = IdlePlan | ChurnPlan | TopicsPlan | LaggingPlan | DeferredPlan

FULL: dict[str, Plan] = {
    "idle": IdlePlan(),
    "churn": ChurnPlan(),
    "topics": TopicsPlan(),
    "lagging": LaggingPlan(),
    "deferred": DeferredPlan(),
}
#: What the suite runs.
SHORT: dict[str, Plan] = {
    "idle": IdlePlan(idle=2_000, busy=50, rate=500, seconds=1, heartbeat_ms=10_000, rounds=1, most_rounds=4),
    "churn": ChurnPlan(seconds=1.0, first=200),
    "topics": TopicsPlan(topics=50, channels=4, messages=200),
    "lagging": LaggingPlan(channels=12, messages=1_600, body=200, groups=3, mem_queue_size=100),
    "deferred": DeferredPlan(messages=20_000, sample=200, soon=(0.5, 1.0)),
}
FORMS: dict[str, Callable[[Path, Any, Progressed], Awaitable[Outcome]]] = {
    "idle": idle,
    "churn": churn,
    "topics": topics,
    "lagging": lagging,
    "deferred": deferred,
}


async def run(what: str, plan: Plan, data_path: Path, progressed: Progressed = lambda text: None) -> Outcome:
    began = time.monotonic()
    try:
        outcome = await FORMS[what](data_path, plan, progressed)
    except (FlowFailed, OSError, TimeoutError, ExceptionGroup) as exc:
        outcome = Outcome(what, failures=[in_words(exc)])
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def result_line(outcome: Outcome, plan: Plan) -> str:
    """Return the line of a file of results."""
    return json.dumps({**about(*SOURCES), "plan": asdict(plan), **asdict(outcome), "passed": outcome.passed})


def main(argv: Sequence[str] | None = None) -> int:
    parser = torture_parser("tests.crash.load", "Loads that are large in one way.")
    parser.add_argument("what", nargs="?", default="all", choices=(*FORMS, "all"), help="(default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="as in the suite")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="append the figures to this file, a line for each run"
    )
    arguments = parser.parse_args(argv)
    seed_of(arguments)
    worst = 0
    for what in FORMS if arguments.what == "all" else (arguments.what,):
        status = _run(what, arguments)
        worst = max(worst, status)
        if status == 130:
            break
    return worst


def _run(what: str, arguments: argparse.Namespace) -> int:
    plan = (SHORT if arguments.short else FULL)[what]
    if isinstance(plan, DeferredPlan):
        plan = replace(plan, seed=arguments.seed)
    if why := raise_file_limit(plan.descriptors):
        sys.exit(f"load: {what}: {why}")
    outcomes: list[Outcome] = []

    def say(text: str) -> None:
        sys.stderr.write(f"{what}: {text}\n")

    async def work(folder: Path, _: object) -> Outcome:
        outcomes.append(await run(what, plan, folder, say))
        return outcomes[0]

    status = conduct(arguments, "load", work)
    if arguments.results and outcomes:
        with arguments.results.open("a") as file:
            file.write(result_line(outcomes[0], plan) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
