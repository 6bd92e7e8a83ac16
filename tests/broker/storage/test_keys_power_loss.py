"""The power goes, or the process is killed, at every file call of a run with keys: nothing is lost and nothing doubled.

The run publishes under keys, in every way there is, and lets segments go. After each crash a broker is started on what
is left and everything is published again under the same keys, as a producer would do that does not know what became of
it. Then each message is there exactly once, unless it was finished: so a key is known if, and only if, its message is.

``FLINTMQ_EXHAUSTIVE=1`` tries every call with every kind of loss; otherwise every call, or every third, with one kind.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage import keys as keys_module
from flintmq.protocol.wire import FRAME_RESPONSE, encode_command, encode_mpub
from support.fakes import Client, FakeClock
from support.garbage import collect_if_grown
from support.power_loss import EXHAUSTIVE, Ledger, World, copy_of, frozen_time, losses, rebooted, started, unexpected
from support.simdisk import PowerLoss, SimDisk


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals roll; files of keys are added to, and also begun anew."""
    monkeypatch.setattr(journal_module, "ROLL_AT", 500)
    monkeypatch.setattr(keys_module, "MOST_IN_FILE", 12)


class Book:
    """What was published under which key, which of it was acknowledged, and which was asked to be finished."""

    def __init__(self) -> None:
        self.commands: dict[str, tuple[bytes, list[bytes]]] = {}
        self.acknowledged: set[str] = set()
        self.finishing: set[bytes] = set()

    def command(self, key: str, count: int, size: int, delay: int = 0) -> bytes:
        bodies = [b"%s %d ".ljust(size, b".") % (key.encode(), number) for number in range(count)]
        name = key.encode()
        if count > 1:
            command = encode_mpub(b"t", bodies, name)
        elif delay:
            command = encode_command(b"DPUB", b"t", b"%d" % delay, name, body=bodies[0])
        else:
            command = encode_command(b"PUB", b"t", name, body=bodies[0])
        self.commands[key] = (command, bodies)
        return command


def keyed(world: World) -> Client:
    client = world.client()
    client.send(encode_command(b"IDENTIFY", body=b'{"flintmq": true}'))
    assert client.take() == [(FRAME_RESPONSE, b"OK")]
    return client


async def keyed_run(world: World, book: Book) -> None:
    numbers = iter(range(1000))

    async def publish(count: int = 1, size: int = 40, delay: int = 0) -> None:
        key = f"key-{next(numbers)}"
        producer.send(book.command(key, count, size, delay))
        await world.settle()
        assert producer.take() == [(FRAME_RESPONSE, b"OK")]
        book.acknowledged.add(key)

    async def finish(count: int) -> None:
        messages = await world.receive(consumer, "t", count)
        book.finishing.update(message.body for message in messages)
        consumer.finish(*messages)
        await world.settle()
        world.broker.turns.housekeeping()
        await world.settle()

    await world.start()
    producer = keyed(world)
    # Single ones, a group of several records, a deferred one.
    await publish()
    await publish(20, 5_000)
    await publish(delay=20_000)
    consumer = await world.subscribe("t", "a")
    # Two keys in one turn, and a repeat of one that is under way.
    for key in ("one", "other"):
        producer.send(book.command(key, 1, 9_000))
    producer.send(book.commands["one"][0])
    await world.settle()
    assert producer.take() == [(FRAME_RESPONSE, b"OK")] * 3
    book.acknowledged |= {"one", "other"}
    await finish(15)
    await world.sync()
    for _ in range(4):
        await publish(3, 6_000)
        await publish()
    # Segments go, and their keys stay.
    for _ in range(3):
        await finish(20)
        await world.sync()
        await publish(1, 12_000)
        await publish(2, 12_000)
    # The deferred one, too.
    await world.pass_time(21)
    await finish(20)
    await world.sync()
    await world.sync()
    await publish()
    # A clean stop is part of it: it seals, and writes down where all ends.
    await asyncio.shield(world.broker.stop())


async def crash(
    folder: Path, power_off_at: int | None, *, seed: int, **options: Any
) -> tuple[SimDisk, Book, FakeClock]:
    """The run up to the n-th file call."""
    clock, book = FakeClock(), Book()
    disk = SimDisk(folder, seed=seed)
    disk.power_off_at = power_off_at
    world = World(disk, clock, Ledger(), **options)
    async with frozen_time(clock) as raised:
        try:
            await keyed_run(world, book)
        except PowerLoss:
            pass
        finally:
            await world.die()
    assert unexpected(raised) == []
    collect_if_grown()
    return disk, book, clock


async def repeat_everything(disk: SimDisk, book: Book, clock: FakeClock, binding: bool, **options: Any) -> SimDisk:
    """Start, publish all of it again, and look what there is. Then once more, after another crash."""
    async with frozen_time(clock) as raised:
        for _ in range(2):
            world = World(disk, clock, Ledger(), **options)
            await world.start()
            producer = keyed(world)
            for key, (command, _) in book.commands.items():
                before = world.broker.topics["t"].message_count if "t" in world.broker.topics else 0
                producer.send(command)
                await world.settle()
                assert producer.take() == [(FRAME_RESPONSE, b"OK")]
                if key in book.acknowledged and binding:
                    assert world.broker.topics["t"].message_count == before, f"{key} was stored again"
            await world.sync()
            found = Counter(body for messages in (await world.contents()).values() for body in messages.values())
            for key, (_, bodies) in book.commands.items():
                for body in bodies:
                    times = found.pop(body, 0)
                    assert times <= 1, f"{key} is there {times} times"
                    assert times or body in book.finishing, f"{key} is lost"
            assert not found
            world.broker.kill()
            await asyncio.sleep(0)
            # All of it is on the device now: from here on nothing may be stored once more.
            disk = disk.after_power_loss("none")
            book.acknowledged.update(book.commands)
            binding = True
    assert unexpected(raised) == []
    return disk


async def try_every_call(
    folder: Path,
    seed: int,
    left_over: Callable[[SimDisk, int | str], SimDisk],
    binding: bool = True,
    step: int = 1,
    **options: Any,
) -> None:
    whole, _, _ = await crash(folder, None, seed=seed, **options)
    for n in range(1, whole.calls + 1, 1 if EXHAUSTIVE else step):
        disk, book, clock = await crash(folder, n, seed=seed, **options)
        for loss in losses(n):
            copy = Book()
            copy.commands = dict(book.commands)
            copy.acknowledged, copy.finishing = set(book.acknowledged), set(book.finishing)
            try:
                await repeat_everything(left_over(disk, loss), copy, rebooted(clock), binding, **options)
            except BaseException as exc:
                exc.add_note(f"crash at call {n}, {disk.history[n - 1]}, what was not synced: {loss}")
                raise


async def test_the_run_does_what_it_is_meant_to(tmp_path: Path) -> None:
    disk, book, clock = await crash(tmp_path, None, seed=1, durability="fsync")
    assert book.acknowledged == set(book.commands)
    assert any(kind == "remove" and name.endswith(".seg") for kind, name in disk.history), "segments must go"
    created = [name for kind, name in disk.history if kind == "create" and name.endswith(".keys.tmp")]
    assert len(created) > len(set(created)) > 1, "files of keys must be added to, and begun anew"
    await repeat_everything(disk.after_power_loss("none"), book, copy_of(clock), True, durability="fsync")


@pytest.mark.timeout(1800)
async def test_power_loss_neither_loses_nor_doubles(tmp_path: Path) -> None:
    await try_every_call(tmp_path, 1, SimDisk.after_power_loss, durability="fsync")


@pytest.mark.timeout(1800)
async def test_kill_neither_loses_nor_doubles(tmp_path: Path) -> None:
    await try_every_call(tmp_path, 2, lambda disk, _: disk.after_kill(), step=3, durability="os")


@pytest.mark.timeout(1800)
async def test_power_loss_may_cost_what_was_not_synced_but_a_repeat_makes_up_for_it(tmp_path: Path) -> None:
    """Durability `os`: what is lost takes its key along, so that it can be published again."""
    await try_every_call(tmp_path, 3, SimDisk.after_power_loss, binding=False, step=3, durability="os")


# --- The start --------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(1800)
async def test_an_error_at_any_call_of_a_start_costs_no_key(tmp_path: Path) -> None:
    """The start fails or not. At the next one every key is known: no file of keys was set aside that is whole."""
    disk, book, clock = await crash(tmp_path, None, seed=2, durability="fsync")
    calm = disk.after_kill()
    await started(calm, copy_of(clock), durability="fsync")
    for number, (kind, name) in enumerate(calm.history, 1):
        there, copy = disk.after_kill(), Book()
        copy.commands = dict(book.commands)
        copy.acknowledged, copy.finishing = set(book.acknowledged), set(book.finishing)
        # What a device cannot read counts as damaged.
        error = (
            (errno.EMFILE, errno.EACCES, errno.ENOMEM)[number % 3] if kind in ("open", "read", "size") else errno.EIO
        )
        there.system.fault_at = (number, lambda _, error=error: error, (1, 20)[number % 2], 25)  # type: ignore[misc]
        try:
            await started(there, copy_of(clock), durability="fsync")
            await repeat_everything(there.after_kill(), copy, copy_of(clock), True, durability="fsync")
        except BaseException as exc:
            exc.add_note(f"{errno.errorcode[error]} at call {number} of the start: {kind} {name}")
            raise
