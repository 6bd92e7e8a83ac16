"""Every file call of a busy run fails once, or a few times: nothing is lost, and the broker goes on or stops for good.

The n-th call on a file meets the error that it may meet: no descriptor, no room, an I/O error, a write that ends
half-way. The run goes on with it. Clients take an error for an answer, and are not told OK for what is not there. Then

- the fault is over: everything that is owed comes, publishing works, files that nobody needs are deleted; or
- the process is killed, or the power goes, some calls after the fault: what was promised is there at the next start.

Only a failed sync and a failed write of the journal may stop the broker, and a failed sync must.
``FLINTMQ_EXHAUSTIVE=1`` tries every call with every ending.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.delivery import commit as commit_module
from flintmq.broker.net import commands as commands_module
from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage import log as log_module
from flintmq.broker.storage import mover as mover_module
from flintmq.broker.storage import store as store_module
from flintmq.protocol.wire import FRAME_MESSAGE, Message, decode_message, encode_mpub
from support.fakes import SECOND, FakeClock, dpub, pub
from support.garbage import collect_if_grown
from support.loopback import Loopback
from support.power_loss import (
    EXHAUSTIVE,
    Ledger,
    World,
    copy_ledger,
    copy_of,
    frozen_time,
    inspect,
    rebooted,
    started,
    unexpected,
)
from support.simdisk import PowerLoss, SimDisk

#: Calls of one kind on one kind of file that the suite tries.
SOME = 1_000_000 if EXHAUSTIVE else 6
SOCKETS = ("recv", "send", "accept")
#: Tries to create the same file within the run, which is some seconds long.
MOST_TRIES = 8
OPTIONS: dict[str, Any] = {
    "max_bytes_per_file": 3_000,
    "mem_queue_size": 2,
    "cold_cache_bytes": 1,
    "msg_timeout": 900 * SECOND,
    "max_msg_timeout": 900 * SECOND,
}


class Stopped(Exception):
    """The broker has stopped by itself."""


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals roll, batches are several records, few files are open at a time, old messages are copied."""
    monkeypatch.setattr(journal_module, "ROLL_AT", 700)
    monkeypatch.setattr(log_module, "TAKE_AT_ONCE", 700)
    monkeypatch.setattr(log_module, "RECORD_BYTES", 900)
    monkeypatch.setattr(log_module, "WRITE_AT", 300)
    monkeypatch.setattr(commit_module, "SLICE", 4)
    monkeypatch.setattr(commands_module, "SLICED_FROM", 8)
    monkeypatch.setattr(mover_module, "FEW", 1)
    monkeypatch.setattr(mover_module, "LOOK_AGAIN", 0)


def _no_descriptor(kind: str) -> int:
    return {"write": errno.ENOSPC, "allocate": errno.ENOSPC, "make_folder": errno.ENOSPC}.get(
        kind, errno.EMFILE if kind in ("open", "create", "open_folder") else errno.EIO
    )


class Run(World):
    """A run whose clients take errors for answers."""

    def __init__(self, disk: SimDisk, clock: FakeClock, **options: Any) -> None:
        super().__init__(disk, clock, Ledger(), loopback=True, **OPTIONS, **options)
        self.refused: set[bytes] = set()
        self._producers: dict[tuple[str, str], Loopback] = {}
        self._numbers = iter(range(10_000))
        #: What was published last, and by whom: the answer may have come when the process died.
        self._asked: list[tuple[Loopback, list[bytes]]] = []

    async def _turn(self) -> None:
        for client in self._clients:
            if client.lost:
                client.close()
        self._clients = [client for client in self._clients if not client.lost]
        await super()._turn()
        if self.broker._failure is not None:
            raise Stopped

    def body(self, size: int) -> bytes:
        return (b"message %d " % next(self._numbers)).ljust(size, b".")

    async def _wait(self, condition: Callable[[], object], why: str) -> None:
        """Retries take their time: the clock goes on meanwhile."""
        for _ in range(60):
            await self.settle()
            if condition():
                return
            await self.pass_time(0.5)
        raise AssertionError(why)

    async def try_publish(self, topic: str, verb: str, bodies: list[bytes]) -> bool:
        client = self._producer(topic, verb)
        self._asked = [(client, bodies)]
        if verb == "MPUB":
            self.ledger.batches.append((topic, bodies))
            client.send(encode_mpub(topic.encode(), bodies))
        else:
            client.send(dpub(topic, 200, bodies[0]) if verb == "DPUB" else pub(topic, bodies[0]))
        return await self._answer(topic, client, bodies)

    async def try_together(self, topic: str, sizes: list[int]) -> None:
        """Several publishers in one turn; they take lanes from the second time on, but for one."""
        self._asked = []
        for number, size in enumerate(sizes):
            client = self._producer(topic, f"together {number}")
            self._asked.append((client, [self.body(size)]))
        if len(sizes) > 2:
            client, bodies = self._asked[2]
            client.send(b"NOP\n")
        for client, bodies in self._asked:
            client.send(pub(topic, bodies[0]))
        for client, bodies in self._asked:
            await self._answer(topic, client, bodies)

    def _producer(self, topic: str, kind: str) -> Loopback:
        key = (topic, kind)
        if key not in self._producers or self._producers[key].lost:
            client = self.client()
            assert isinstance(client, Loopback)
            self._producers[key] = client
        return self._producers[key]

    def last_answers(self) -> None:
        """The process has died: whoever was refused knows it, if the answer was sent."""
        for client, bodies in self._asked:
            if any(data.startswith(b"E_") for _, data in client.frames):
                self.refused.update(bodies)

    async def _answer(self, topic: str, client: Loopback, bodies: list[bytes]) -> bool:
        await self._wait(lambda: client.frames or client.lost, f"a publish to {topic} has no answer")
        answers = [data for _, data in client.take()]
        if answers == [b"OK"]:
            self.ledger.published(topic, bodies)
            return True
        if answers:
            self.refused.update(bodies)
        return False

    async def try_subscribe(self, topic: str, channel: str) -> Loopback:
        for _ in range(40):
            client = self.client()
            assert isinstance(client, Loopback)
            client.send(f"SUB {topic} {channel}\n".encode())
            await self._wait(lambda client=client: client.frames or client.lost, f"SUB {topic} has no answer")  # type: ignore[misc]
            if [data for _, data in client.take()] == [b"OK"]:
                self.ledger.subscribed(topic, channel)
                return client
            await self.pass_time(1)
        raise AssertionError(f"nobody can subscribe to {topic}")

    async def take(self, client: Loopback, topic: str, ready: int, channel: str = "") -> list[Message]:
        client.send(b"RDY %d\n" % ready)
        await self.settle()
        await self.pass_time(0.3)
        client.send(b"RDY 0\n")
        await self.settle()
        messages = [decode_message(data) for kind, data in client.take() if kind == FRAME_MESSAGE]
        for message in messages:
            self.ledger.saw(topic, message.id, message.body)
            assert message.body not in self.refused, f"{message.body[:20]!r} was refused"
            # Whatever is delivered is stored, answered or not.
            self.ledger.owed.setdefault((topic, channel), set()).add(message.body)
        self.ledger.batches = [
            batch for batch in self.ledger.batches if not {message.body for message in messages} & set(batch[1])
        ]
        return messages

    async def busy(self) -> None:
        ledger, broker = self.ledger, self.broker
        holder, consumer = await self.try_subscribe("t", "a"), await self.try_subscribe("t", "a")
        other = await self.try_subscribe("u", "b")
        await self.try_publish("t", "PUB", [self.body(60)])
        await self.take(holder, "t", 1, "a")
        for number in range(3):
            # It gets messages while they are being published.
            consumer.send(b"RDY 3\n")
            await self.try_publish("t", "MPUB", [self.body(600) for _ in range(12)])
            for size in (30, 700):
                await self.try_publish("t", "PUB", [self.body(size)])
            await self.try_publish("u", "PUB", [self.body(500)])
            await self.try_together("t", [700, 30, 500])
            if number % 2:
                await self.try_publish("t", "DPUB", [self.body(20)])
            messages = await self.take(consumer, "t", 7, "a")
            if messages and not consumer.lost:
                ledger.finishing("t", "a", [message.body for message in messages[1:]])
                consumer.finish(*messages[1:])
                consumer.requeue(messages[0])
            messages = await self.take(other, "u", 2, "b")
            ledger.finishing("u", "b", [message.body for message in messages])
            other.finish(*messages)
            await self.settle()
            if consumer.lost:
                consumer = await self.try_subscribe("t", "a")
            if other.lost:
                other = await self.try_subscribe("u", "b")
            broker.turns.housekeeping()
            await self.settle()
            broker.upkeep.sync()
            await self.pass_time(0.5)
        holder.close()
        consumer.close()
        other.close()
        await self.settle()

    async def recover(self) -> None:
        """The fault is over: all is well again."""
        self.disk.system.fault_at = None
        self.disk.heal()
        await self.pass_time(1_000)
        for _ in range(4):
            await self.pass_time(30)
            self.broker.upkeep.sync()
            await self.settle()
        for topic, channel in (("t", "a"), ("u", "b")):
            assert await self.try_publish(topic, "PUB", [self.body(30)]), f"{topic} refuses a publish"
            assert await self.try_publish(topic, "MPUB", [self.body(400) for _ in range(5)]), f"{topic} refuses a batch"
            client = await self.try_subscribe(topic, channel)
            for _ in range(40):
                messages = await self.take(client, topic, 50, channel)
                client.finish(*messages)
                self.ledger.finishing(topic, channel, [message.body for message in messages])
                await self.settle()
                if not self.ledger.owed.get((topic, channel)):
                    break
            left = self.ledger.owed.get((topic, channel), set())
            assert not left, f"{len(left)} messages of {topic} do not come, as {next(iter(left))[:20]!r}"
        self.broker.turns.housekeeping()
        for _ in range(4):
            await self.pass_time(5)
            self.broker.upkeep.sync()
            await self.settle()
        for topic in self.broker.topics.values():
            kept = [segment.path.name for segment in topic.log.segments[:-1] if segment.end <= topic.first_kept()]
            assert kept == [], f"{topic.name} keeps files that nobody needs"
            assert topic.log.memory_count <= 2 + sum(block.count for block in topic.log.blocks[-2:])


async def run_with(
    folder: Path, seed: int, fault: int, times: int, ending: str, durability: str
) -> tuple[SimDisk, Run, FakeClock, bool]:
    """The run in which the call ``fault`` fails; whether the broker has stopped by itself."""
    clock = FakeClock()
    disk = SimDisk(folder, seed=seed)
    run = Run(disk, clock, durability=durability)
    stopped = False
    async with frozen_time(clock) as raised:
        try:
            await run.start()
            begin = disk.calls
            disk.system.fault_at = (begin + fault, _no_descriptor, times, (0, 25, 400, 2_000)[fault % 4])
            if ending in ("kill", "power") and fault:
                disk.power_off_at = begin + fault + (1, 6, 25)[fault % 3]
            await run.busy()
            if ending == "alive" and fault:
                await run.recover()
            disk.heal()
            await asyncio.shield(run.broker.stop())
            assert disk.open_files == []
        except PowerLoss:
            run.last_answers()
        except Stopped:
            stopped = True
            for _ in range(20):
                await asyncio.sleep(0)
            if ending == "alive":
                assert disk.open_files == [], "stopped with open files"
        finally:
            await run.die()
    met = disk.system.met
    excused = [context for context in unexpected(raised) if not isinstance(context.get("exception"), OSError)]
    assert excused == []
    fatal = [
        each for each in met if each[0] in ("sync", "sync_folder") or (each[0], each[1][:7]) == ("write", "journal")
    ]
    assert fatal or not stopped, f"stopped because of {met}"
    failed = [each for each in met if each[0] == "sync" and each[1].endswith(".seg")]
    assert stopped or not failed or disk.power_off_at is not None, f"goes on after {failed}"
    tries = Counter(each for each in disk.history if each[0] == "create" and each[1].startswith("journal"))
    assert not tries or max(tries.values()) <= MOST_TRIES, f"tried again and again: {tries.most_common(1)}"
    collect_if_grown()
    return disk, run, clock, stopped


def _points(calls: list[tuple[str, str]]) -> list[tuple[int, int]]:
    """(call, times) of those that fail, calls counted from 1. Rare ones, as opening a file, are all tried both ways."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, (kind, name) in enumerate(calls, 1):
        if kind not in SOCKETS:
            kinds.setdefault((kind, name.partition(".")[2] or name[:7]), []).append(number)
    points = []
    for found in kinds.values():
        for index, number in enumerate(found[:: -(-len(found) // SOME)]):
            both = EXHAUSTIVE or len(found) <= 3
            points += [(number, times) for times in ((1, 20) if both else ((1, 20)[index % 2],))]
    return sorted(points)


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("durability", "ending", "seed"),
    [("os", "alive", 1), ("fsync", "alive", 2), ("os", "kill", 3), ("fsync", "power", 5)],
)
async def test_an_error_at_any_call_costs_nothing(
    tmp_path: Path, durability: str, ending: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "shares_of_descriptors", lambda: (1 if seed % 2 else 3, 50))
    whole, _, _, _ = await run_with(tmp_path, seed, 0, 0, ending, durability)
    calls = whole.history[next(n for n, (kind, _) in enumerate(whole.history) if kind == "recv") :]
    for fault, times in _points(calls):
        try:
            disk, run, clock, stopped = await run_with(tmp_path, seed, fault, times, ending, durability)
            if ending == "power":
                after = disk.after_power_loss(("none", fault, "all")[fault % 3])
                await inspect(after, run.ledger, rebooted(clock), durability=durability, **OPTIONS)
            elif ending == "kill" or stopped:
                if not any(kind == "truncate" for kind, _ in disk.system.met):
                    run.ledger.refused = run.refused
                await inspect(disk.after_kill(), run.ledger, clock, durability=durability, **OPTIONS)
        except BaseException as exc:
            exc.add_note(f"error at call {fault}, {times} times")
            raise


# --- The start --------------------------------------------------------------------------------------------------------


class Frozen(Run):
    """Like a run, beside a topic whose only channel ends with its consumer: the next start has something to note."""

    async def busy(self) -> None:
        ephemeral = self.client()
        ephemeral.send(b"SUB v e#ephemeral\n" + pub("v", b"for nobody who is still there"))
        await self.settle()
        await super().busy()


async def killed(folder: Path, seed: int, after: int, durability: str) -> tuple[SimDisk, Run, FakeClock]:
    """A busy run that is killed after so many calls, or the calls of a whole one."""
    clock = FakeClock()
    disk = SimDisk(folder, seed=seed)
    run = Frozen(disk, clock, durability=durability)
    async with frozen_time(clock):
        try:
            await run.start()
            disk.power_off_at = disk.calls + after if after else None
            await run.busy()
        except PowerLoss:
            pass
        finally:
            await run.die()
    return disk, run, clock


def _io_error(kind: str) -> int:
    return errno.EIO


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(("durability", "power", "seed"), [("os", False, 7), ("fsync", False, 8), ("fsync", True, 9)])
async def test_an_error_at_any_call_of_a_start_costs_nothing(
    tmp_path: Path, durability: str, power: bool, seed: int
) -> None:
    """The start fails or not; it is killed, or the power goes; at the next one all is there that was promised."""
    whole, _, _ = await killed(tmp_path, seed, 0, durability)
    disk, run, clock = await killed(tmp_path, seed, len(whole.history) * 2 // 3, durability)

    def left() -> SimDisk:
        return disk.after_power_loss("none") if power else disk.after_kill()

    def date() -> FakeClock:
        return rebooted(clock) if power else copy_of(clock)

    calm = left()
    assert await started(calm, date(), loopback=True, durability=durability, **OPTIONS) == ""
    for number, (kind, name) in enumerate(calm.history, 1):
        for error in (_no_descriptor, _io_error):
            if kind in SOCKETS or (error is _io_error and not (EXHAUSTIVE or kind in ("write", "sync", "sync_folder"))):
                continue
            there, now = left(), date()
            there.system.fault_at = (number, error, (1, 20)[number % 2], (0, 25, 400)[number % 3])
            try:
                await started(there, now, loopback=True, durability=durability, **OPTIONS)
                assert there.system.met or error is _no_descriptor, "nothing failed"
                after = there.after_power_loss(("none", number, "all")[number % 3]) if power else there.after_kill()
                await inspect(after, copy_ledger(run.ledger), now, durability=durability, **OPTIONS)
            except BaseException as exc:
                exc.add_note(f"{error.__name__} at call {number} of the start: {kind} {name}")
                raise
    collect_if_grown()
