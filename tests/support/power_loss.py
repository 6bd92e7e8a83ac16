"""The power goes, or the process is killed, at every system call of a busy run: what was promised must still be there.

The run does everything that touches a file: publishes of all kinds, deliveries and their answers, channels and topics
that come and go, pauses, emptying, segments and journals that roll. Its clients are on real loopback connections, so
that most publishes and FINs go through the lanes, and the kernel's own calls are among those that are the last. A
Ledger writes down what the broker has promised. After each crash a broker is started on what is left, and everything
in it is compared with the ledger.

``FLINTMQ_EXHAUSTIVE=1`` tries every call with every kind of loss; otherwise every file call, and some of those on
sockets, are tried with one kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.topic import Topic
from flintmq.errors import StartError
from flintmq.protocol.wire import FRAME_ERROR, FRAME_MESSAGE, Message, decode_message, encode_mpub
from support.fakes import PATIENCE, Client, FakeClock, dpub, pub
from support.garbage import collect_if_grown
from support.loopback import Loopback
from support.simdisk import PowerLoss, SimDisk

EXHAUSTIVE = os.environ.get("FLINTMQ_EXHAUSTIVE") == "1"
#: By topic and channel (None: seen by no channel yet) the messages, by their seqs.
Contents = dict[tuple[str, str | None], dict[int, bytes]]


class Ledger:
    """What the broker has promised, and what it was asked to do away with."""

    def __init__(self) -> None:
        #: Whether what was acknowledged must be there after this kind of crash.
        self.binding = True
        #: Acknowledged for a channel, or (None) for the topic's first one, and not asked to be finished since.
        self.owed: dict[tuple[str, str | None], set[bytes]] = {}
        #: Known to be finished or emptied: must not come back.
        self.gone: set[tuple[str, str, bytes]] = set()
        self._going: set[tuple[str, str, bytes]] = set()
        #: Channels that were acknowledged, and topics whose deletion was.
        self.channels: set[tuple[str, str]] = set()
        #: Batches whose messages come together or not at all, as long as none was delivered.
        self.batches: list[tuple[str, list[bytes]]] = []
        #: Which message an id of a topic stands for.
        self.ids: dict[tuple[str, bytes], bytes] = {}
        #: Publishes that were refused: must not be there.
        self.refused: set[bytes] = set()

    def published(self, topic: str, bodies: list[bytes]) -> None:
        channels = [channel for name, channel in self.channels if name == topic]
        for channel in channels or [None]:
            self.owed.setdefault((topic, channel), set()).update(bodies)

    def subscribed(self, topic: str, channel: str) -> None:
        if not any(name == topic for name, _ in self.channels):
            # The first channel gets what has piled up.
            self.owed.setdefault((topic, channel), set()).update(self.owed.pop((topic, None), set()))
        self.channels.add((topic, channel))

    def finishing(self, topic: str, channel: str, bodies: list[bytes]) -> None:
        self.owed.get((topic, channel), set()).difference_update(bodies)
        self._going.update((topic, channel, body) for body in bodies)

    def synced(self) -> None:
        """All that was said so far is on the device."""
        self.gone |= self._going
        self._going.clear()

    def dropping(self, topic: str, channel: str | None = None) -> None:
        for key in [key for key in self.owed if key[0] == topic and channel in (None, key[1])]:
            del self.owed[key]
        self.channels -= {key for key in self.channels if key[0] == topic and channel in (None, key[1])}
        self.batches = [batch for batch in self.batches if batch[0] != topic]

    def saw(self, topic: str, ident: bytes, body: bytes) -> None:
        assert self.ids.setdefault((topic, ident), body) == body, f"the id {ident!r} was used twice"


class World:
    """A broker on a simulated disk, its clients, and the ledger of what it promised them.

    Clients are on fake transports, or with ``loopback`` on real connections.
    """

    def __init__(
        self, disk: SimDisk, clock: FakeClock, ledger: Ledger, *, loopback: bool = False, **options: Any
    ) -> None:
        self.disk = disk
        self.clock = clock
        self.ledger = ledger
        self.broker = Broker(
            disk=disk,
            clock=clock,
            data_path=disk.root,
            disk_reserve=0,
            **{"max_bytes_per_file": 30_000, "mem_queue_size": 80, "cold_cache_bytes": 1, **options},
        )
        self._loopback = loopback
        self._clients: list[Loopback] = []
        #: Messages that were asked to be published and finished.
        self.published = self.finished = 0

    async def start(self) -> None:
        await self.broker.start()
        await self.settle()

    def client(self) -> Client | Loopback:
        if not self._loopback:
            return Client(self.broker)
        client = Loopback(self.broker.tcp_address)
        self._clients.append(client)
        return client

    def close(self) -> None:
        """Hang up all clients."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    async def die(self) -> None:
        """End as by ``kill -9``: nothing more reaches the disk. Also after the power has gone."""
        self.disk.dead = True
        with contextlib.suppress(PowerLoss):
            self.broker.kill()
        for _ in range(5):
            await asyncio.sleep(0)
        self.close()

    async def settle(self) -> None:
        """Turn the loop until nothing is under way. Time stands still meanwhile."""
        calm = 0
        while calm < 5:
            await self._turn()
            busy = self.disk.under_way or self.broker.turns.busy
            calm = 0 if busy or any(client.unsent for client in self._clients) else calm + 1

    async def until(self, condition: Callable[[], object]) -> None:
        """Turn the loop until the condition holds: what goes over a connection may take its time."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            await self._turn()
            assert time.monotonic() < deadline, "waited in vain"

    async def _turn(self) -> None:
        for client in self._clients:
            client.pump()
        await asyncio.sleep(0)
        if self.disk.dead:
            raise PowerLoss

    async def barrier(self, client: Client | Loopback) -> None:
        """Return when the broker has done all that this consumer has sent, and all that it sent before is here."""
        client.send(b"FIN ffffffffffffffff\n")
        await self.until(lambda: any(kind == FRAME_ERROR for kind, _ in client.frames))
        client._frames[:] = [frame for frame in client.frames if frame[0] != FRAME_ERROR]
        await self.settle()

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self.settle()
        self.broker.scan.tick(self.clock.now)
        await self.settle()

    async def publish(
        self, client: Client | Loopback, command: bytes, topic: str, bodies: list[bytes], count: int = 1
    ) -> None:
        self.published += count
        client.send(command)
        await self.answered(client)
        self.ledger.published(topic, bodies)

    async def answered(self, client: Client | Loopback) -> None:
        """The client's last command is answered with OK."""
        await self.until(lambda: any(kind != FRAME_MESSAGE for kind, _ in client.frames))
        assert [data for kind, data in client.take() if kind != FRAME_MESSAGE] == [b"OK"]
        await self.settle()

    async def subscribe(self, topic: str, channel: str) -> Client | Loopback:
        client = self.client()
        client.send(f"SUB {topic} {channel}\n".encode())
        await self.answered(client)
        self.ledger.subscribed(topic, channel)
        return client

    async def receive(self, client: Client | Loopback, topic: str, count: int) -> list[Message]:
        client.send(b"RDY %d\n" % count)
        await self.barrier(client)
        client.send(b"RDY 0\n")
        await self.barrier(client)
        messages = [decode_message(data) for kind, data in client.take() if kind == FRAME_MESSAGE]
        for message in messages:
            self.ledger.saw(topic, message.id, message.body)
        self.ledger.batches = [
            batch for batch in self.ledger.batches if not {message.body for message in messages} & set(batch[1])
        ]
        return messages

    async def finish(self, client: Client | Loopback, topic: str, channel: str, messages: list[Message]) -> None:
        self.ledger.finishing(topic, channel, [message.body for message in messages])
        self.finished += len(messages)
        client.finish(*messages)
        await self.barrier(client)

    async def sync(self) -> None:
        """What the timer does: logs, journal, then files that may go."""
        self.broker.upkeep.sync()
        await self.settle()
        self.ledger.synced()

    # --- What is in it -----------------------------------------------------------------------------------------------

    async def body(self, topic: Topic, seq: int) -> bytes:
        while (frame := topic.frame(seq)) is None:
            await self.settle()
        self.ledger.saw(topic.name, bytes(frame[18:34]), bytes(frame[34:]))
        return bytes(frame[34:])

    async def contents(self) -> Contents:
        """Every message that each channel has, and (None) that no channel has seen."""
        found = {}
        for topic in self.broker.topics.values():
            backlog = [
                seq
                for first, stop in topic.log.spans()
                for seq in range(max(first, topic.pumped), stop)
                if seq >= topic.pumped
            ]
            found[topic.name, None] = {seq: await self.body(topic, seq) for seq in backlog}
            assert topic.depth == len(backlog)
            for channel in topic.channels.values():
                found[topic.name, channel.name] = {seq: await self.body(topic, seq) for seq in _seqs(channel)}
        return found


def _seqs(channel: Channel) -> list[int]:
    seqs = [seq for first, stop in channel.waiting for seq in range(first, stop)]
    seqs += range(channel.seen, channel.topic.pumped)
    seqs += channel.requeued
    seqs += channel.deferred.columns()[1]
    seqs += [seq for seq, _ in channel.ring.held(channel.ring.lo, channel.ring.hi)]
    seqs += channel.unusual
    assert len(seqs) == len(set(seqs)), "a message is in two places"
    return seqs


# --- The run --------------------------------------------------------------------------------------------------------


async def busy_run(world: World) -> None:
    """Everything that touches a file."""
    broker, ledger = world.broker, world.ledger
    numbers = iter(range(10_000))

    def body(size: int = 40) -> bytes:
        return (b"message %d " % next(numbers)).ljust(size, b".")

    def producer(topic: str, verb: str) -> Client | Loopback:
        """A connection that publishes in one way to one topic, so that it takes a lane from the second time on."""
        if (topic, verb) not in producers:
            producers[topic, verb] = world.client()
        return producers[topic, verb]

    async def publish(topic: str, count: int = 1, size: int = 40) -> None:
        for _ in range(count):
            one = body(size)
            await world.publish(producer(topic, "PUB"), pub(topic, one), topic, [one])

    async def publish_batch(topic: str, count: int, size: int) -> None:
        bodies = [body(size) for _ in range(count)]
        ledger.batches.append((topic, bodies))
        await world.publish(producer(topic, "MPUB"), encode_mpub(topic.encode(), bodies), topic, bodies, count)

    async def publish_together(topic: str, sizes: list[int], batch: int = 0) -> None:
        """Several publishers in one turn; with ``batch`` each publishes so many."""
        sent: list[tuple[Client | Loopback, list[bytes]]] = []
        for other, size in zip(others, sizes, strict=False):
            bodies = [body(size) for _ in range(batch or 1)]
            other.send(encode_mpub(topic.encode(), bodies) if batch else pub(topic, bodies[0]))
            if batch:
                ledger.batches.append((topic, bodies))
            world.published += len(bodies)
            sent.append((other, bodies))
        for other, bodies in sent:
            await world.answered(other)
            ledger.published(topic, bodies)

    await world.start()
    producers: dict[tuple[str, str], Client | Loopback] = {}
    # A backlog for the first channel; a batch of several records; several publishers in one turn.
    await publish("t", 2)
    await publish_batch("t", 40, 2_500)
    a = await world.subscribe("t", "a")
    others = [world.client() for _ in range(4)]
    for sizes in ([40, 40, 40], [10, 3_000, 40, 700], [40, 5_000, 5_000, 1]):
        await publish_together("t", sizes)
    for _ in range(4):
        await publish_together("t", [60, 20], 20)
    one = body()
    await world.publish(producer("t", "DPUB"), dpub("t", 20_000, one), "t", [one])
    # Answers: finished, requeued at once, requeued for later.
    messages = await world.receive(a, "t", 6)
    await world.finish(a, "t", "a", messages[:3])
    a.requeue(messages[3])
    a.requeue(messages[4], 90)
    await world.barrier(a)
    await world.sync()
    b = await world.subscribe("t", "b")
    await publish("t", 3, 12_000)
    # A paused topic keeps what is published; then it is emptied; then it goes on.
    topic = broker.topics["t"]
    topic.pause(True)
    await publish("t", 2)
    await world.sync()
    topic.pause(False)
    await world.settle()
    topic.pause(True)
    await world.settle()
    lost = body()
    await world.publish(producer("t", "PUB"), pub("t", lost), "t", [lost])
    for channel in ("a", "b"):
        ledger.finishing("t", channel, [lost])
    topic.empty()
    topic.pause(False)
    await world.sync()
    # A channel is emptied, paused, deleted.
    messages = await world.receive(b, "t", 2)
    await world.finish(b, "t", "b", messages[:1])
    ledger.finishing("t", "b", list(ledger.owed["t", "b"]))
    topic.channels["b"].empty()
    await world.sync()
    topic.channels["b"].pause(True)
    await publish("t", 1)
    await publish_batch("t", 30, 1_000)
    ledger.dropping("t", "b")
    topic.delete_channel("b")
    await world.sync()
    # A topic is deleted and made again; its seqs must not be used again.
    await publish("u", 3, 400)
    await world.subscribe("u", "c")
    await publish("u", 2)
    ledger.dropping("u")
    broker.delete_topic("u")
    await world.settle()
    await publish("u", 2)
    # All but the deferred ones are finished: segments go. Meanwhile the journal rolls.
    while messages := await world.receive(a, "t", 40):
        await world.finish(a, "t", "a", messages)
        broker.turns.housekeeping()
    await world.sync()
    await world.sync()
    await publish("t", 2)
    await world.subscribe("u", "c")
    await publish("u", 2, 9_000)
    await world.pass_time(21)
    await world.receive(a, "t", 2)
    await publish_batch("v", 5, 10)
    broker.upkeep.save_metadata()
    await world.settle()


class _Logged(logging.Handler):
    """Collects the exceptions that were logged with their traceback."""

    def __init__(self, raised: list[dict[str, Any]]) -> None:
        super().__init__()
        self._raised = raised

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._raised.append({"message": record.getMessage(), "exception": record.exc_info[1]})


@contextlib.asynccontextmanager
async def frozen_time(clock: FakeClock) -> AsyncIterator[list[dict[str, Any]]]:
    """The event loop's timers go by the test's clock, so that runs are the same; yields what callbacks raised.

    That includes what the broker caught and logged, so that it costs one topic or channel and not all of them.
    """
    loop = asyncio.get_running_loop()
    raised: list[dict[str, Any]] = []
    logged = _Logged(raised)
    logging.getLogger("flintmq").addHandler(logged)
    real = loop.time
    loop.set_exception_handler(lambda _, context: raised.append(context))
    loop.time = lambda: clock.now() / 1e9  # type: ignore[method-assign]
    try:
        yield raised
    finally:
        # Else what died here waits for ever, with all that it holds.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for handle in loop._scheduled:  # type: ignore[attr-defined]
            handle.cancel()
        logging.getLogger("flintmq").removeHandler(logged)
        loop.time = real  # type: ignore[method-assign]


def unexpected(raised: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [context for context in raised if not isinstance(context.get("exception"), PowerLoss)]


async def crash(
    folder: Path, power_off_at: int | None, *, seed: int = 0, clean: bool = False, **options: Any
) -> tuple[SimDisk, Ledger, FakeClock]:
    """The run up to the n-th system call."""
    disk, world, clock = await crashed(folder, power_off_at, seed=seed, clean=clean, **options)
    return disk, world.ledger, clock


async def crashed(
    folder: Path, power_off_at: int | None, *, seed: int = 0, clean: bool = False, **options: Any
) -> tuple[SimDisk, World, FakeClock]:
    clock = FakeClock()
    disk = SimDisk(folder, seed=seed)
    disk.power_off_at = power_off_at
    world = World(disk, clock, Ledger(), loopback=True, **options)
    async with frozen_time(clock) as raised:
        try:
            await busy_run(world)
            await asyncio.shield(world.broker.stop())
        except PowerLoss:
            pass
        finally:
            died = disk.dead
            await world.die()
    assert unexpected(raised) == []
    assert died or clean, f"the run has only {disk.calls} calls"
    collect_if_grown()
    return disk, world, clock


async def started(disk: SimDisk, clock: FakeClock, *, turns: int = 0, loopback: bool = False, **options: Any) -> str:
    """Start, work for some turns of the loop, and end as by a kill. Why it did not start, if it did not."""
    async with frozen_time(clock):
        world = World(disk, clock, Ledger(), loopback=loopback, **options)
        try:
            await world.start()
            for _ in range(turns):
                await world._turn()
        except StartError as exc:
            assert disk.open_files == [], "no start, but open files"
            return str(exc)
        finally:
            await world.die()
    return ""


def check(found: Contents, ledger: Ledger) -> None:
    held = {key: set(messages.values()) for key, messages in found.items()}
    for topic, channel in ledger.channels if ledger.binding else ():
        assert (topic, channel) in held, f"the channel {channel} of {topic} is lost"
    for (topic, channel), owed in ledger.owed.items() if ledger.binding else ():
        if channel is None:
            # A channel that nobody was told of may have been made, and has the backlog then.
            here = set().union(*(bodies for (name, _), bodies in held.items() if name == topic))
        else:
            here = held[topic, channel] | held[topic, None]
        assert not owed - here, f"{len(owed - here)} messages of {topic}/{channel} are lost"
    for topic, channel, body in ledger.gone:
        assert body not in held.get((topic, channel), ()), f"{body[:12]!r} of {topic}/{channel} came back"
    for (topic, _), here in held.items():
        assert not here & ledger.refused, f"{next(iter(here & ledger.refused))[:20]!r} of {topic} was refused"
    for topic, bodies in ledger.batches:
        for (name, _), here in held.items():
            if name == topic:
                assert len(here & set(bodies)) in (0, len(bodies)), f"a part of a batch is in {topic}"


async def inspect(disk: SimDisk, ledger: Ledger, clock: FakeClock, **options: Any) -> SimDisk:
    """Start on what is left: all that was promised is there; publish more; stop; start again: the same is there."""
    async with frozen_time(clock) as raised:
        world = World(disk, clock, ledger, loopback=True, **options)
        await world.start()
        check(await world.contents(), ledger)
        for name in [*world.broker.topics, "w"]:
            # The second one takes the lane.
            producer = world.client()
            for number in range(2):
                body = b"after the crash, %d to %s" % (number, name.encode())
                await world.publish(producer, pub(name, body), name, [])
        before = await world.contents()
        check(before, ledger)
        await world.broker.stop()
        world.close()
        assert disk.open_files == []
        after_stop = disk.after_power_loss("none")
        again = World(after_stop, clock, ledger, **options)
        await again.start()
        assert await again.contents() == before
        await again.broker.stop()
    assert unexpected(raised) == []
    return after_stop


# --- The tests ------------------------------------------------------------------------------------------------------


def losses(n: int) -> list[int | str]:
    kinds: list[int | str] = ["none", n, "all", n + 100_000, n + 200_000]
    return kinds if EXHAUSTIVE else [kinds[n % len(kinds)]]


async def try_every_call(
    folder: Path, seed: int, left_over: Callable[[SimDisk, int | str], SimDisk], binding: bool = True, **options: Any
) -> None:
    """Crash at each call; start on what ``left_over`` says is left."""
    whole, _, _ = await crash(folder, None, seed=seed, clean=True, **options)
    for n in crash_points(whole):
        disk, ledger, clock = await crash(folder, n, seed=seed, clean=True, **options)
        ledger.binding = binding
        for loss in losses(n):
            try:
                await inspect(left_over(disk, loss), copy_ledger(ledger), rebooted(clock), **options)
            except BaseException as exc:
                exc.add_note(f"crash at call {n}, {disk.history[-1]}, what was not synced: {loss}")
                raise


def crash_points(whole: SimDisk) -> list[int]:
    """The calls at which to crash, counted from 1: those on files, and some of those on sockets.

    After a recv or send the files are as they were: they differ in what clients know.
    """
    points = []
    for number, (kind, _) in enumerate(whole.history, 1):
        if EXHAUSTIVE or kind not in ("recv", "send") or number % 4 == 0:
            points.append(number)
    return points


def rebooted(clock: FakeClock) -> FakeClock:
    copy = copy_of(clock)
    copy.reboot(20)
    return copy


def copy_of(clock: FakeClock) -> FakeClock:
    copy = FakeClock()
    copy.__dict__.update(clock.__dict__)
    return copy


def copy_ledger(ledger: Ledger) -> Ledger:
    copy = Ledger()
    copy.binding = ledger.binding
    copy.owed = {key: set(bodies) for key, bodies in ledger.owed.items()}
    copy.gone = set(ledger.gone)
    copy.channels = set(ledger.channels)
    copy.batches = list(ledger.batches)
    copy.ids = dict(ledger.ids)
    copy.refused = set(ledger.refused)
    return copy
