"""Power loss and kill -9 at any system call: what was promised is still there afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage import log as log_module
from flintmq.protocol.wire import encode_mpub
from support.fakes import FakeClock
from support.power_loss import (
    EXHAUSTIVE,
    Contents,
    Ledger,
    World,
    crash,
    crash_points,
    crashed,
    frozen_time,
    inspect,
    losses,
    pub,
    try_every_call,
    unexpected,
)
from support.simdisk import SimDisk


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals roll; and small segments have room for what a lane writes."""
    monkeypatch.setattr(journal_module, "ROLL_AT", 500)
    monkeypatch.setattr(log_module, "TAKE_AT_ONCE", 2_000)


async def test_the_run_does_what_it_is_meant_to(tmp_path: Path) -> None:
    disk, ledger, clock = await crash(tmp_path, None, clean=True, durability="fsync")
    done = {kind for kind, _ in disk.history}
    assert done >= {"create", "write", "sync", "sync_folder", "rename", "remove", "remove_folder", "read"}
    created = [name for kind, name in disk.history if kind == "create"]
    assert sum(name.endswith(".seg") for name in created) > 5, "segments must roll"
    assert sum(name.startswith("journal") for name in created) > 2, "the journal must roll"
    assert sum(name.startswith("snapshot") for name in created) > 1, "snapshots must be taken"
    assert any(kind == "remove" and name.endswith(".seg") for kind, name in disk.history), "segments must be freed"
    await inspect(disk.after_power_loss("none"), ledger, clock, durability="fsync")


@pytest.mark.parametrize("durability", ["os", "fsync", "memory"])
async def test_most_publishes_and_finishes_of_the_run_go_through_the_lanes(tmp_path: Path, durability: str) -> None:
    """Else the crashes would say little about the path that nearly every message takes."""
    disk, world, _ = await crashed(tmp_path, None, clean=True, durability=durability)
    broker = world.broker
    assert disk.system.kernel_writes > 10 or durability != "os", "the kernel writes by itself"
    assert world.published > 200 and world.finished > 200
    assert broker.counters.lane_published > world.published / 2
    assert broker.counters.lane_finished > world.finished / 2


async def test_two_runs_make_the_same_calls(tmp_path: Path) -> None:
    """So that the n-th call of one is the n-th call of the other, and every one is tried."""
    runs = [await crash(tmp_path, None, clean=True, seed=5, durability="os") for _ in range(2)]
    first, second = ([kind for kind, _ in disk.history] for disk, _, _ in runs)
    assert [kind for kind in first if kind != "recv"] == [kind for kind in second if kind != "recv"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
async def test_power_loss_at_any_call_costs_nothing_that_was_promised(tmp_path: Path, seed: int) -> None:
    await try_every_call(tmp_path, seed, SimDisk.after_power_loss, durability="fsync")


@pytest.mark.timeout(1800)
async def test_kill_at_any_call_costs_nothing_that_was_answered(tmp_path: Path) -> None:
    await try_every_call(tmp_path, 3, lambda disk, _: disk.after_kill(), durability="os")


@pytest.mark.timeout(1800)
async def test_power_loss_may_cost_what_was_not_synced_but_no_id_stands_for_two_messages(tmp_path: Path) -> None:
    """Durability `os` delivers what may yet be lost: its seqs must not be used again. And no half batches, ever."""
    await try_every_call(tmp_path, 4, SimDisk.after_power_loss, binding=False, durability="os")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", ["kill", "power loss"])
async def test_what_a_start_after_a_crash_offers_survives_the_next_power_loss(tmp_path: Path, first: str) -> None:
    """After kill -9 much may be in the page cache only; after a power loss files are left that a start removes.

    Once a start has called something durable it must be, and what it has removed must not come back.
    """

    async def started(disk: SimDisk, ledger: Ledger, clock: FakeClock, *, publishes: bool = False) -> Contents:
        world = World(disk, clock, ledger, loopback=True, durability="fsync")
        await world.start()
        if publishes:
            for name in sorted(world.broker.topics):
                await world.publish(world.client(), pub(name, b"after the crash"), name, [])
        found = await world.contents()
        world.broker.kill()
        await asyncio.sleep(0)
        world.close()
        return found

    whole, _, _ = await crash(tmp_path, None, clean=True, durability="os")
    points = crash_points(whole)
    # The end of a stop is short, and all of it matters.
    for n in points if EXHAUSTIVE else [*points[:-30:3], *points[-30:]]:
        ended, ledger, clock = await crash(tmp_path, n, clean=True, durability="os")
        async with frozen_time(clock) as raised:
            disk = ended.after_kill() if first == "kill" else ended.after_power_loss(n)
            before = await started(disk, ledger, clock, publishes=bool(n % 2))
            # Nothing at all of what the start did and did not sync, or any of it.
            for loss in dict.fromkeys(["none", *losses(n)]):
                assert await started(disk.after_power_loss(loss), ledger, clock) == before, f"call {n}, {loss}"
        assert unexpected(raised) == []


@pytest.mark.parametrize("part", [0.7, 0.9, 0.9999])
async def test_a_file_that_a_start_removes_does_not_come_back(tmp_path: Path, part: float) -> None:
    """The end of its batch is missing. A start calls all before its own seqs durable, and durable batches are whole."""

    async def killed(disk: SimDisk) -> Contents:
        world = World(disk, clock, ledger)
        await world.start()
        found = await world.contents()
        world.broker.kill()
        await asyncio.sleep(0)
        return found

    clock, ledger, disk = FakeClock(), Ledger(), SimDisk(tmp_path)
    async with frozen_time(clock) as raised:
        world = World(disk, clock, ledger)
        await world.start()
        folder = world.broker.topic("t").log.folder
        assert folder is not None
        client = world.client()
        # The first fills a file, the other one is two records in the next.
        await world.publish(client, pub("t", bytes(30_000)), "t", [])
        await world.publish(client, encode_mpub(b"t", [bytes(2_500)] * 40), "t", [])
        world.broker.kill()
        await asyncio.sleep(0)
        after = disk.after_power_loss("all")
        _, path = after.paths(folder, ".seg")
        content = after.content(path)
        after.swap(path, content[: int(len(content) * part)])
        first = await killed(after)
        assert path not in after.paths(folder)
        assert await killed(after.after_power_loss("none")) == first
    assert unexpected(raised) == []
