"""One broker under torture: its lives, its load, and what is done to it.

A Front owns a node, a proxy before it, producers and consumers on raw connections (see ``load``), half of them through
the proxy, and the ledger that hears of everything. The broker is killed at random moments, sometimes while it starts,
and started again on the same data path; in between a fault at a time is done to it and healed again. At the end it is
up, everything is drained, and the ledger says what was lost, came back or came early.

A front without a node (``--against``) has only what can be done to connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from flintmq.tools.torture.ledger import Ledger
from flintmq.tools.torture.load import LONGEST_DELAY, MSG_TIMEOUT, PUBLISH_REFUSED, Connection, Consumer, Producer
from flintmq.tools.torture.node import PATIENCE, Node, patiently
from flintmq.tools.torture.proxy import Pipe, Proxy

__all__ = ["CLOCK", "CUT", "DESCRIPTORS", "DISK_FULL", "FAULTS", "KILL", "KILL_STARTING", "STALL", "STOP", "Front"]

#: Topics, and how often producers choose each.
TOPICS = {"orders": 4, "clicks": 3, "mails": 2, "late": 1}


@dataclass(frozen=True)
class Subscription:
    topic: str
    channel: str
    consumers: int
    #: Made when this part of the run is over.
    after: float = 0.0


SUBSCRIPTIONS = (
    Subscription("orders", "billing", 2),
    Subscription("orders", "audit", 1),
    Subscription("clicks", "count", 2),
    Subscription("mails", "send", 1),
    Subscription("mails", "archive", 1, after=0.4),
    # The first channel of a topic gets what was published before there was any.
    Subscription("late", "first", 1, after=0.3),
    Subscription("late", "second", 1, after=0.6),
)
PRODUCERS = 4
#: First deliveries owed at which producers hold back: well beyond what the broker below keeps in memory.
MOST_OWED = 20_000
#: Small, so that every run reads back from files, begins new ones and frees old ones.
FLAGS = ("--mem-queue-size=1000", f"--max-bytes-per-file={2 << 20}", "--sync-timeout=250ms")
#: Of all kills, this part hits a broker that is still starting.
KILLED_WHILE_STARTING = 0.15
#: The end: nothing old came for longer than anything can be deferred, while every consumer was answered so often.
QUIET_SECONDS = LONGEST_DELAY / 1000 + 0.5
QUIET_ANSWERS = 10
#: Seconds before a connection that ended is made again.
RECONNECT = 0.05
#: The disk is "full" when the free space falls below what the broker is told to keep: this much less than there is at
#: its start. A file that large and more is then allocated, up to a limit.
MARGIN = 256 << 20
MOST_BALLAST = 16 << 30
#: Seconds by which the wall clock is moved.
STEPS = (3600, -3600, 86_400, -86_400)

KILL, KILL_STARTING = "kill -9", "kill -9 while starting"
STOP, CUT, STALL = "stop", "cut", "stall"
DISK_FULL, DESCRIPTORS, CLOCK = "disk full", "no descriptors", "clock step"
#: What can be done beside kills.
FAULTS = (STOP, CUT, STALL, DISK_FULL, DESCRIPTORS, CLOCK)


class Run(Protocol):
    """What a front asks of the run that it is part of."""

    #: Faults done so far.
    faults: Counter[str]
    #: Set when the time is over.
    over: asyncio.Event

    @property
    def seconds_between(self) -> float: ...
    @property
    def progress(self) -> float: ...
    def take_kill(self) -> bool: ...
    def killing(self, node: Node) -> None: ...
    def killed(self, node: Node) -> None: ...
    def buried(self, node: Node) -> None: ...
    def disturbed(self, node: Node) -> None: ...


class Front:
    def __init__(
        self,
        run: Run,
        rng: random.Random,
        faults: tuple[str, ...],
        *,
        durability: str,
        node: Node | None = None,
        folder: Path | None = None,
        endpoint: tuple[str, int] = ("", 0),
        topic_prefix: str = "",
        clock_file: Path | None = None,
        loaded: bool = True,
    ) -> None:
        self._run = run
        self._rng = rng
        # By chances of its own: whatever the load asks of the other one, a seed kills the same starts.
        self._start_rng = self._fork()
        self._faults = faults
        self.durability = durability
        self.node = node
        self._folder = folder
        self._endpoint = node.endpoint if node else endpoint
        self._prefix = topic_prefix
        self._clock_file = clock_file
        self._wall = 0
        self._loaded = loaded
        self._proxy = Proxy(self._endpoint)
        self.ledger = Ledger(
            [topic_prefix + topic for topic in TOPICS],
            MSG_TIMEOUT / 1000,
            strict=node is not None and node.keeps_finished and durability != "memory",
        )
        self.kills = 0
        # Faults still to be done before all have their turn again.
        self._next: list[str] = []
        #: What is being done now, for those who watch.
        self.fault = ""
        # Of the present life.
        self._connections: set[Connection] = set()
        self._seats: list[asyncio.Task[None]] = []
        self._dying = False
        self._ending = False
        self._is_full = False
        self._reserve = 0

    @property
    def name(self) -> str:
        return self.node.address if self.node else f"{self._endpoint[0]}:{self._endpoint[1]}"

    async def start(self) -> None:
        await self._proxy.start()
        await self._start_node()

    async def close(self) -> None:
        for seat in self._seats:
            seat.cancel()
        self._proxy.close()
        self._remove_ballast()
        if self.node is not None:
            await self.node.close()

    # --- Lives of the broker -----------------------------------------------------------------------------------------

    async def torment(self) -> None:
        """One life after the other until the run is over; at the end the broker is up, and nobody is connected."""
        while not self._run.over.is_set():
            kill = self.node is not None and self._run.take_kill()
            await self._life(kill=kill)
            while kill and self._start_rng.random() < KILLED_WHILE_STARTING and self._run.take_kill():
                await self._kill_while_starting()
            await self._start_node()

    async def _start_node(self) -> None:
        node = self.node
        if node is None or node.running:
            return
        self._reserve = max(0, self._free() - MARGIN) if DISK_FULL in self._faults else 0
        node.flags = (
            f"--durability={self.durability}",
            f"--data-path={self._folder}",
            f"--disk-reserve={self._reserve}",
            *FLAGS,
            *(flag for flag in node.flags if flag.startswith(("--lookupd", "--node-id", "--max-heart", "--broadcast"))),
        )
        await node.start()
        self.ledger.life += 1

    def _free(self) -> int:
        assert self._folder is not None
        stat = os.statvfs(self._folder)
        return stat.f_bavail * stat.f_frsize

    async def _kill_while_starting(self) -> None:
        assert self.node is not None
        await self.node.spawn()
        await asyncio.sleep(self._rng.uniform(0.3, 1.1) * self.node.starts[-1])
        await self._kill(KILL_STARTING)

    async def _life(self, *, kill: bool) -> None:
        """Load, faults, and at a random moment the end."""
        self._ending = self._dying = False
        self._seats = [asyncio.create_task(self._sit(make, proxied)) for make, proxied in self._makers()]
        nemesis = asyncio.create_task(self._nemesis())
        try:
            seconds = self._run.seconds_between * self._rng.uniform(0.2, 1.8)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds if kill else None):
                    await self._run.over.wait()
        finally:
            nemesis.cancel()
            await asyncio.wait([nemesis])
        self._ending = True
        if not nemesis.cancelled() and (failure := nemesis.exception()) is not None:
            raise failure
        if kill:
            await self._kill(KILL)
        else:
            for connection in list(self._connections):
                connection.close()
        # What the broker had sent is still to be read. Nothing of this life may be mistaken for one of the next.
        await patiently(self._all_read())
        if kill and self.node is not None:
            self._run.buried(self.node)

    async def _all_read(self) -> None:
        await asyncio.gather(*self._seats)

    async def _kill(self, kind: str) -> None:
        node = self.node
        assert node is not None
        if not node.running:
            self.ledger.violations.add("ended", f"{node} ended by itself:\n{node.log_tail()}")
        self._dying = True
        for connection in self._connections:
            connection.link.cause = connection.link.cause or KILL
        self._run.killing(node)
        await node.kill()
        self._run.killed(node)
        for pipe in list(self._proxy.pipes):
            pipe.flow()
        self.kills += 1
        self._run.faults[kind] += 1

    # --- Load --------------------------------------------------------------------------------------------------------

    def _makers(self) -> Iterator[tuple[Callable[[], Connection], bool]]:
        """How each connection of a life is made, and whether it goes through the proxy."""
        if not self._loaded:
            return
        for number in range(PRODUCERS):
            yield self._producer, number % 2 == 0
        number = 0
        for subscription in SUBSCRIPTIONS:
            if self._run.progress >= subscription.after:
                for _ in range(subscription.consumers):
                    number += 1
                    yield partial(self._consumer, subscription), number % 2 == 0

    def _producer(self) -> Producer:
        return Producer(self.ledger, self._fork(), list(TOPICS.values()), MOST_OWED, strict=self._is_strict)

    def _consumer(self, subscription: Subscription, *, draining: bool = False) -> Consumer:
        topic = self._prefix + subscription.topic
        consumer = Consumer(
            self.ledger, self._fork(), topic, subscription.channel, draining=draining, strict=self._is_strict
        )
        consumer.held = self._is_full
        return consumer

    @property
    def _is_strict(self) -> bool:
        return self.node is not None and not self.node.rough

    def _fork(self) -> random.Random:
        return random.Random(self._rng.random())

    async def _sit(self, make: Callable[[], Connection], proxied: bool) -> None:
        """Keep a place in the load taken: a connection that ends is followed by another one."""
        while not self._ending:
            connection = make()
            if self._dying:
                connection.link.cause = KILL
            self._connections.add(connection)
            try:
                # A broker that was killed or has no descriptors may not answer: that is a moment like any other.
                with contextlib.suppress(ConnectionError):
                    await connection.connect(self._proxy.endpoint if proxied else self._endpoint)
                # Whoever waits may be cancelled; the connection is not.
                await asyncio.shield(connection.closed)
            finally:
                self._connections.discard(connection)
            await asyncio.sleep(RECONNECT)

    # --- Faults ------------------------------------------------------------------------------------------------------

    async def _nemesis(self) -> None:
        acts = {
            STOP: self._stop,
            CUT: self._cut,
            STALL: self._stall,
            DISK_FULL: self._fill_disk,
            DESCRIPTORS: self._take_descriptors,
            CLOCK: self._step_clock,
        }
        while self._faults:
            await asyncio.sleep(self._run.seconds_between * self._rng.uniform(0.1, 0.6))
            # Each in its turn, in an order that changes: short lives go on where the last one ended.
            if not self._next:
                self._next = self._rng.sample(self._faults, len(self._faults))
            self.fault = self._next.pop()
            begun = True
            try:
                begun = await acts[self.fault]()
            finally:
                # One that the end of a life cut short was done, too.
                self._run.faults[self.fault] += begun
                self.fault = ""

    async def _stop(self) -> bool:
        assert self.node is not None
        self.node.freeze()
        try:
            await asyncio.sleep(self._rng.uniform(0.1, 1.5))
        finally:
            self.node.thaw()
        return True

    def _some_pipe(self) -> tuple[Pipe, Connection] | None:
        by_port = {connection.port: connection for connection in self._connections}
        pipes = sorted((pipe for pipe in self._proxy.pipes if pipe.port in by_port), key=lambda pipe: pipe.port)
        if not pipes:
            return None
        pipe = self._rng.choice(pipes)
        return pipe, by_port[pipe.port]

    async def _cut(self) -> bool:
        chosen = self._some_pipe()
        if chosen is None:
            return False
        pipe, connection = chosen
        connection.link.cause = connection.link.cause or CUT
        pipe.cut()
        return True

    async def _stall(self) -> bool:
        chosen = self._some_pipe()
        if chosen is None:
            return False
        pipe, connection = chosen
        connection.link.stale = True
        pipe.stall()
        try:
            await asyncio.sleep(self._rng.uniform(0.2, 2.0))
        finally:
            if self._rng.random() < 0.3:
                connection.link.cause = connection.link.cause or "stalled and cut"
                pipe.cut()
            else:
                pipe.flow()
        return True

    def _disturb(self) -> None:
        """From here on this life may log errors and drop connections."""
        assert self.node is not None
        self.node.rough = True
        for connection in self._connections:
            connection.strict = False
        self._run.disturbed(self.node)

    async def _fill_disk(self) -> bool:
        # Others use this disk, too.
        size = self._free() - self._reserve + MARGIN
        if not 0 < size < MOST_BALLAST:
            return False
        self._disturb()
        self._hold(True)
        try:
            fd = os.open(self._ballast, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)
            await asyncio.sleep(self._rng.uniform(1.5, 3.0))
        finally:
            self._remove_ballast()
            self._hold(False)
        # Until it has seen that there is room again.
        await asyncio.sleep(1.0)
        return True

    @property
    def _ballast(self) -> Path:
        assert self._folder is not None
        return self._folder.with_name(self._folder.name + ".ballast")

    def _remove_ballast(self) -> None:
        if self._folder is not None:
            self._ballast.unlink(missing_ok=True)

    def _hold(self, on: bool) -> None:
        # A publish that is refused ends its connection: here consumers are to go on.
        self._is_full = on
        for connection in self._connections:
            if isinstance(connection, Consumer):
                connection.held = on

    async def _take_descriptors(self) -> bool:
        assert self.node is not None
        self._disturb()
        self.node.limit_descriptors(self._rng.choice((0, 0, 1, 3)))
        try:
            # So that somebody needs one.
            await self._cut()
            await asyncio.sleep(self._rng.uniform(0.3, 1.5))
        finally:
            self.node.limit_descriptors(None)
        return True

    async def _step_clock(self) -> bool:
        assert self._clock_file is not None
        self._wall += self._rng.choice(STEPS)
        self._clock_file.write_text(f"{self._wall:+d}s\n")
        return True

    # --- The end -----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Let every channel hand over what it has, with no more faults."""
        self._dying = False
        if not self._loaded:
            return
        while not await self._drained():
            # Other programs may have filled the disk beyond what this life of the broker keeps free.
            self._is_full = True

    async def _drained(self) -> bool:
        """Drain once; False if the broker refused the consumers' questions, which are publishes while it has room."""
        self.ledger.begin_drain()
        consumers = [
            self._consumer(subscription, draining=True)
            for subscription in SUBSCRIPTIONS
            for _ in range(subscription.consumers)
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*(c.connect(self._endpoint) for c in consumers)), PATIENCE)
            trouble = await self._trouble_until_quiet(consumers)
            # The questions were messages too.
            for consumer in consumers:
                consumer.silent = True
            give_up = time.monotonic() + PATIENCE
            while any(c.asking for c in consumers) or self.ledger.missing(self.ledger.drain_from):
                if time.monotonic() > give_up or any(c.closed.done() for c in consumers):
                    break
                await asyncio.sleep(0.02)
        except OSError as exc:
            trouble = f"cannot be reached any more: {exc}"
        finally:
            for consumer in consumers:
                consumer.close()
        if not self._is_full and any(consumer.link.cause == PUBLISH_REFUSED for consumer in consumers):
            # One that was never connected has no end to wait for.
            await patiently(asyncio.wait([consumer.closed for consumer in consumers if consumer.port]))
            return False
        if trouble:
            # Nobody knows whether what is missing is lost.
            self.ledger.is_drained = False
            self.ledger.violations.add("ended", f"{self.name} {trouble}")
        return True

    async def _trouble_until_quiet(self, consumers: list[Consumer]) -> str:
        """Returns when nothing from before the drain can still come; why it cannot be said, if so."""
        drained, since = -1, 0.0
        answers = [0] * len(consumers)
        while not any(consumer.closed.done() for consumer in consumers):
            now = time.monotonic()
            if drained != self.ledger.drained:
                drained, since = self.ledger.drained, now
                answers = [consumer.answers for consumer in consumers]
            elif now - since > QUIET_SECONDS and all(
                consumer.answers - before >= QUIET_ANSWERS for consumer, before in zip(consumers, answers, strict=True)
            ):
                return ""
            elif now - since > PATIENCE:
                return "answers no more"
            await asyncio.sleep(0.02)
        causes = ", ".join(sorted({consumer.link.cause for consumer in consumers if consumer.closed.done()}))
        tail = f":\n{self.node.log_tail()}" if self.node else ""
        return f"left its consumers ({causes}){tail}"
