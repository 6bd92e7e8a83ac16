"""The power goes, or the process is killed, at every system call of staged transactions: each row is there once.

The run commits two transactions as a producer would: several attempts, of which one loses, several topics, odd sizes.
After each crash a broker is started on what is left, and a new run of the producer goes on from the transaction that it
does not know to be committed, with rows in another order and in chunks of another size. Then each row of each
transaction is in its topic exactly once, nothing is left of what was staged, and so it is after one more crash. Before
the new run, a transaction is there whole or not at all, and only if it was decided.

In another run rows are consumed, and the files that they and their keys stood in deleted, while others of the same set
are still being applied: nobody ever gets a row under two ids.

Every call of a short run is tried with two kinds of loss, and every third call of a long one with one kind;
``FLINTMQ_EXHAUSTIVE=1`` tries every call of all of them with every kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flintmq.broker.delivery import commit as commit_module
from flintmq.broker.stage import apply as apply_module
from flintmq.broker.stage import producer as producer_module
from flintmq.broker.stage.state import Decision
from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage import log as log_module
from flintmq.errors import StageError
from flintmq.protocol.wire import FRAME_MESSAGE, decode_message
from support.fakes import Client, FakeClock
from support.garbage import collect_if_grown
from support.power_loss import EXHAUSTIVE, Ledger, World, copy_of, frozen_time, losses, rebooted, started, unexpected
from support.simdisk import PowerLoss, SimDisk
from support.stage_client import mpub_body

T = TypeVar("T")

TOPICS = ("t", "u")
#: Seconds of a test by the wall clock; the exhaustive form takes minutes of the processor, and it may not be alone.
LIMIT = 7200 if EXHAUSTIVE else 1800


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals roll, and attempts are synced in the background."""
    monkeypatch.setattr(journal_module, "ROLL_AT", 2_000)
    monkeypatch.setattr(producer_module, "SYNC_AT", 5_000)


#: What consumers got: the ids of each row, by topic and body.
Seen = dict[tuple[str, bytes], set[bytes]]
#: Rows of a transaction, and transactions before the crash.
LONG = (23, 2)
SHORT = (5, 1)


def rows(txn: int, count: int) -> list[tuple[str, bytes]]:
    """The rows of a transaction, always the same ones: topic and body."""
    choice = random.Random(txn)
    sizes = [1, 3, 40, 700, 5_000]
    return [(choice.choice(TOPICS), (b"%d-%d " % (txn, i)).ljust(choice.choice(sizes), b".")) for i in range(count)]


class Driver:
    """A producer's driver and its tasks, on one node, without HTTP."""

    def __init__(self, world: World, run: str, count: int) -> None:
        self.world = world
        self.run = run
        self.count = count
        self.name = "query"
        self._jobs = iter(range(1000))

    async def drive(self, work: Awaitable[T]) -> T:
        """Turn the loop, and the clock, until the work is done."""
        task = asyncio.ensure_future(work)
        turns = 0
        while not task.done():
            try:
                self.between(turns)
                await self.world._turn()
            except PowerLoss:
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
                raise
            turns += 1
            if turns % 40 == 0:
                self.world.clock.advance(0.2)
        return task.result()

    def between(self, turns: int) -> None:
        """What else happens, before each turn of the loop."""

    async def stage(
        self, epoch: int, txn: int, attempt: str, mine: list[tuple[str, bytes]], size: int, said: Any
    ) -> Any:
        """An attempt with these rows, in chunks of up to ``size``."""
        producer = self.world.broker.stage.producer(self.name)
        decided = Decision(**said) if said is not None else None
        begun = await producer.begin(epoch, txn, attempt, decided)
        assert begun["next"] == 0
        chunk = 0
        for topic in TOPICS:
            bodies = [body for name, body in mine if name == topic]
            for at in range(0, len(bodies), size):
                data = bytearray(mpub_body(bodies[at : at + size]))
                count = len(bodies[at : at + size])
                await producer.put((epoch, txn, attempt), chunk, topic, 0, data, len(data), count)
                chunk += 1
        return attempt, chunk, len(mine)

    async def commit(self, txn: int, choice: random.Random) -> None:
        """One execution of a batch: what Spark's driver and its tasks do."""
        producer = self.world.broker.stage.producer(self.name)
        opened = await producer.open(self.run, f"{self.run}-{next(self._jobs)}", txn)
        epoch, said = opened["epoch"], opened["decided"]
        if said is not None and not said["done"]:
            await producer.apply(said["txn"], said["nodes"]["n"])
            await producer.done(said["txn"])
        all_rows = rows(txn, self.count)
        choice.shuffle(all_rows)
        cut = choice.randrange(len(all_rows))
        winners = []
        for number, part in enumerate((all_rows[:cut], all_rows[cut:])):
            name = f"{self.run}-{epoch}-{number}"
            if choice.random() < 0.5:
                # One that loses, and staged less.
                await self.stage(epoch, txn, f"{name}-lost", part[: len(part) // 2], 3, said)
            winners.append(await self.stage(epoch, txn, name, part, choice.choice([1, 4, 50]), said))
        prepared = await producer.prepare(epoch, txn, winners)
        total = sum(found["sum"] for found in prepared["topics"].values()) % 2**64
        decided = await producer.decide(epoch, txn, {"n": prepared["set"]}, total)
        # The same rows in any order have the same sum.
        assert decided["decided"]["print"] == total
        if decided["repeat"]:
            with contextlib.suppress(StageError):
                await producer.abort(epoch, txn)
        await producer.apply(txn, decided["decided"]["nodes"]["n"])
        await producer.done(txn)


async def contents(world: World) -> Counter[tuple[str, bytes]]:
    found: Counter[tuple[str, bytes]] = Counter()
    for (topic, _), messages in (await world.contents()).items():
        found.update((topic, body) for body in messages.values())
    return found


async def crash(
    folder: Path, power_off_at: int | None, *, seed: int, of: tuple[int, int] = LONG, **options: Any
) -> tuple[SimDisk, int, FakeClock]:
    """The run up to the n-th call: the disk, and how many transactions the driver knows to be committed."""
    clock = FakeClock()
    disk = SimDisk(folder, seed=seed)
    disk.power_off_at = power_off_at
    world = World(disk, clock, Ledger(), **options)
    committed = 0
    async with frozen_time(clock) as raised:
        try:
            await world.start()
            count, transactions = of
            driver = Driver(world, "first", count)
            for txn in range(transactions):
                await driver.drive(driver.commit(txn, random.Random(seed + txn)))
                committed += 1
            await asyncio.shield(world.broker.stop())
        except PowerLoss:
            pass
        finally:
            await world.die()
    assert unexpected(raised) == []
    collect_if_grown()
    return disk, committed, clock


async def go_on(
    disk: SimDisk, committed: int, clock: FakeClock, seed: int, of: tuple[int, int] = LONG, **options: Any
) -> None:
    """A new run of the producer: it repeats even the last transaction that was committed, and one more follows."""
    count, transactions = of
    async with frozen_time(clock) as raised:
        for again in range(2):
            world = World(disk, clock, Ledger(), **options)
            await world.start()
            driver = Driver(world, f"next-{again}", count)
            await check_start(world, driver, committed, transactions + again)
            for txn in range(max(0, committed - 1), transactions + 1):
                await driver.drive(driver.commit(txn, random.Random(seed + 7 * txn + again)))
            committed = transactions + 1
            await world.settle()
            await world.sync()
            assert await contents(world) == Counter(row for txn in range(committed) for row in rows(txn, count))
            assert world.broker.stage.bytes == 0
            [name] = disk.names(disk.root / "flintmq" / "stage")
            assert disk.names(disk.root / "flintmq" / "stage" / name) == ["state"]
            world.broker.kill()
            await asyncio.sleep(0)
            disk = disk.after_power_loss("none")
    assert unexpected(raised) == []


async def check_start(world: World, driver: Driver, committed: int, transactions: int) -> None:
    """What is there before anybody asks for it: what is decided as far as it was applied, and nothing else."""
    staging = world.broker.stage
    if (producer := staging.producers.get(driver.name)) is not None:
        for apply in list(producer.applies.values()):
            # It was begun: it is done now, by itself.
            await driver.drive(apply.wait())
    seen = await contents(world)
    decision = producer.state.last_decision if producer is not None else None
    for txn in range(transactions):
        wanted = Counter(rows(txn, driver.count))
        there = Counter({row: seen[row] for row in wanted if seen[row]})
        assert not (txn < committed) or there == wanted, f"transaction {txn} is committed, and of it are there {there}"
        assert there in (wanted, Counter()), f"transaction {txn} is there by part: {there}"
        assert not there or (decision is not None and decision.txn >= txn), f"transaction {txn} was not decided"


async def try_every_call(
    folder: Path,
    seed: int,
    left_over: Callable[[SimDisk, int | str], SimDisk],
    step: int,
    *,
    of: tuple[int, int] = LONG,
    kinds: Callable[[int], Sequence[int | str]] = losses,
    **options: Any,
) -> None:
    whole, committed, _ = await crash(folder, None, seed=seed, of=of, **options)
    assert committed == of[1]
    for n in points(whole, seed, step):
        disk, committed, clock = await crash(folder, n, seed=seed, of=of, **options)
        for loss in kinds(n):
            try:
                await go_on(left_over(disk, loss), committed, rebooted(clock), n, of, **options)
            except BaseException as exc:
                exc.add_note(f"crash at call {n}, {disk.history[n - 1]}, what was not synced: {loss}")
                raise


def killed(n: int) -> list[int | str]:
    """After a kill all is there that was written: there is one kind of loss, however many are tried elsewhere."""
    return [n]


def points(whole: SimDisk, seed: int, step: int) -> range:
    """The calls at which to crash, counted from 1."""
    return range(1, whole.calls + 1) if EXHAUSTIVE else range(1 + seed % step, whole.calls + 1, step)


async def test_the_run_commits_and_a_new_run_repeats_it(tmp_path: Path) -> None:
    disk, committed, clock = await crash(tmp_path, None, seed=1)
    assert committed == 2
    assert any(name.endswith(".rows") and kind == "remove" for kind, name in disk.history)
    await go_on(disk.after_power_loss("none"), committed, copy_of(clock), 5)


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_power_loss_neither_loses_nor_doubles(tmp_path: Path, durability: str) -> None:
    await try_every_call(tmp_path, 1, SimDisk.after_power_loss, 3, durability=durability)


@pytest.mark.timeout(LIMIT)
async def test_a_short_transaction_is_there_whole_or_not_at_all_at_every_power_loss(tmp_path: Path) -> None:
    await try_every_call(tmp_path, 1, SimDisk.after_power_loss, 1, of=SHORT, kinds=lambda n: ["none", n])


@pytest.mark.timeout(LIMIT)
async def test_a_short_transaction_is_there_whole_or_not_at_all_at_every_kill(tmp_path: Path) -> None:
    await try_every_call(tmp_path, 2, lambda disk, _: disk.after_kill(), 1, of=SHORT, kinds=killed)


@pytest.mark.timeout(LIMIT)
async def test_kill_neither_loses_nor_doubles(tmp_path: Path) -> None:
    await try_every_call(tmp_path, 2, lambda disk, _: disk.after_kill(), 3, kinds=killed)


@pytest.mark.timeout(LIMIT)
async def test_kill_neither_loses_nor_doubles_what_goes_to_topics_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so little memory that chunks of many records leave it while they are applied."""
    monkeypatch.setattr(log_module, "RECORD_BYTES", 1_000)
    options = {"durability": "memory", "mem_queue_size": 3, "mem_queue_bytes": 4_000}
    await try_every_call(tmp_path, 2, lambda disk, _: disk.after_kill(), 29, kinds=killed, **options)


@pytest.mark.timeout(LIMIT)
async def test_what_a_start_finds_after_a_kill_outlives_a_power_loss(tmp_path: Path) -> None:
    """A process reads what the one before it had not synced. If it goes on with that, it must be on the device."""
    whole, _, _ = await crash(tmp_path, None, seed=2, of=SHORT, durability="fsync")
    for n in points(whole, 2, 1):
        disk, committed, clock = await crash(tmp_path, n, seed=2, of=SHORT, durability="fsync")
        for turns in (0, 2, 5, 9, 14, 20, 30, 60) if EXHAUSTIVE else (n % 3, 9 + n % 20):
            left = disk.after_kill()
            await started(left, copy_of(clock), turns=turns, durability="fsync")
            for loss in ("none", *losses(n)):
                try:
                    there = left.after_power_loss(loss)
                    await go_on(there, committed, rebooted(clock), n, SHORT, durability="fsync")
                except BaseException as exc:
                    what = f"{disk.history[n - 1]}, what was not synced: {loss}"
                    exc.add_note(f"kill at call {n}, power loss {turns} turns after the next start: {what}")
                    raise


# --- A start that meets an error --------------------------------------------------------------------------------------


@pytest.mark.timeout(LIMIT)
async def test_a_read_that_fails_at_a_start_doubles_nothing(tmp_path: Path) -> None:
    """What a start cannot read may be the keys of rows that are stored: then it ends, and the next one goes on."""
    whole, _, _ = await crash(tmp_path, None, seed=2, of=SHORT)
    calls = [(kind, name.rpartition(".")[2]) for kind, name in whole.history]
    stored = calls.index(("sync", "seg"))
    # All rows are stored, and the state does not say so yet.
    applied = next(n for n in range(stored, len(calls)) if whole.history[n] == ("write", "state.tmp"))
    for at in range(stored, applied + 1) if EXHAUSTIVE else [applied]:
        disk, committed, clock = await crash(tmp_path, at + 1, seed=2, of=SHORT)
        calm = disk.after_kill()
        await started(calm, copy_of(clock), turns=30)
        for number, (kind, name) in enumerate(calm.history, 1):
            if kind not in ("open", "read", "size"):
                continue
            error = (errno.EIO, errno.EMFILE)[kind == "open"]
            there = disk.after_kill()
            there.system.fault_at = (number, lambda _, error=error: error, (1, 20)[number % 2], 0)  # type: ignore[misc]
            try:
                await started(there, copy_of(clock), turns=30)
                await go_on(there.after_kill(), committed, copy_of(clock), number, SHORT)
            except BaseException as exc:
                exc.add_note(f"{errno.errorcode[error]} at call {number} of the start: {kind} {name}")
                raise


# --- Rows that are consumed while they are applied --------------------------------------------------------------------


class Consumed(Driver):
    """A driver whose rows have a consumer for each topic, and are deleted as soon as they may be."""

    def __init__(self, world: World, run: str, count: int, seen: Seen) -> None:
        super().__init__(world, run, count)
        self._seen = seen
        self._consumers = {topic: Client(world.broker) for topic in TOPICS}
        for topic, consumer in self._consumers.items():
            consumer.send(f"SUB {topic} c\nRDY 50\n".encode())

    def between(self, turns: int) -> None:
        for topic, consumer in self._consumers.items():
            for kind, data in consumer.take():
                if kind == FRAME_MESSAGE:
                    message = decode_message(data)
                    self._seen.setdefault((topic, message.body), set()).add(message.id)
                    consumer.finish(message)
        if turns % 5 == 4:
            self.world.broker.turns.housekeeping()
        if turns % 7 == 6:
            self.world.broker.upkeep.sync()

    async def consume_the_rest(self) -> None:
        for turn in range(35):
            self.between(turn)
            await self.world.settle()


async def consume(
    disk: SimDisk, clock: FakeClock, seen: Seen, run: str, first: int, seed: int, **options: Any
) -> tuple[int, dict[str, int]]:
    """Commit transactions from ``first`` on; how many are known to be committed, and what is left in channels."""
    count, transactions = LONG
    committed = first
    depths: dict[str, int] = {}
    world = World(disk, clock, Ledger(), max_bytes_per_file=3_000, **options)
    async with frozen_time(clock) as raised:
        try:
            await world.start()
            driver = Consumed(world, run, count, seen)
            for txn in range(first, transactions):
                await driver.drive(driver.commit(txn, random.Random(seed + txn)))
                committed += 1
            await driver.consume_the_rest()
            depths = {
                topic.name: channel.depth
                for topic in world.broker.topics.values()
                for channel in topic.channels.values()
            }
            await asyncio.shield(world.broker.stop())
        except PowerLoss:
            pass
        finally:
            await world.die()
    assert unexpected(raised) == []
    collect_if_grown()
    return committed, depths


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize(
    "durability, left_over, kinds",
    [
        ("os", lambda disk, _: disk.after_kill(), killed),
        ("memory", lambda disk, _: disk.after_kill(), killed),
        ("fsync", SimDisk.after_power_loss, losses),
    ],
    ids=["os, killed", "memory, killed", "fsync, power lost"],
)
async def test_a_row_that_was_consumed_while_others_were_applied_does_not_come_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    durability: str,
    left_over: Callable[[SimDisk, int | str], SimDisk],
    kinds: Callable[[int], list[int | str]],
) -> None:
    """Chunks are published one by one, and in slices as very large ones are."""
    monkeypatch.setattr(apply_module, "MESSAGES_AT_ONCE", 1)
    monkeypatch.setattr(apply_module, "READ_AHEAD", 1)
    monkeypatch.setattr(apply_module, "SLICED_FROM", 1)
    monkeypatch.setattr(commit_module, "SLICE", 1)
    options: dict[str, Any] = {"durability": durability}
    if durability == "memory":
        options |= {"mem_queue_size": 3, "mem_queue_bytes": 4_000}
    wanted = {row for txn in range(LONG[1]) for row in rows(txn, LONG[0])}
    whole = SimDisk(tmp_path, seed=1)
    await consume(whole, FakeClock(), {}, "first", 0, 1, **options)
    # Files go while rows are applied, and leave the keys of these behind.
    removed = [
        number for number, (kind, name) in enumerate(whole.history) if kind == "remove" and name.endswith(".seg")
    ]
    assert len(removed) > 5 and any(name.endswith(".keys") for _, name in whole.history[: removed[-1]])
    for n in points(whole, 1, 19):
        disk, clock = SimDisk(tmp_path, seed=1), FakeClock()
        before: Seen = {}
        disk.power_off_at = n
        committed, _ = await consume(disk, clock, before, "first", 0, 1, **options)
        for loss in kinds(n):
            at = f"crash at call {n}, {disk.history[n - 1]}, what was not synced: {loss}"
            seen = {row: set(ids) for row, ids in before.items()}
            first = max(0, committed - 1)
            _, depths = await consume(left_over(disk, loss), rebooted(clock), seen, "next", first, n, **options)
            assert {row: ids for row, ids in seen.items() if len(ids) > 1} == {}, at
            assert seen.keys() == wanted and not any(depths.values()), at
