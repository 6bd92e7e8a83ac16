"""A device that fails, a disk that is full, a process without descriptors: what was acknowledged stays.

Twenty times each at a moment that a seed decides, with ``FLINTMQ_EXHAUSTIVE=1`` five hundred times; and once each in a
real process, by the layer of ``power``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.errors import StorageError
from flintmq.protocol.wire import FRAME_ERROR
from flintmq.tools.torture.node import Node
from support.fakes import Client, FakeClock, pub
from support.garbage import collect_if_grown
from support.nsq_client import NsqClient
from support.simdisk import SimDisk, settled

from .power import Layer, why_not

EXHAUSTIVE = os.environ.get("FLINTMQ_EXHAUSTIVE") == "1"
TIMES = 500 if EXHAUSTIVE else 20
OPTIONS: dict[str, Any] = {"disk_reserve": 0, "max_bytes_per_file": 4_000, "mem_queue_size": 10}


class Scene:
    """A broker on a simulated disk, a publisher, and what it was told."""

    def __init__(self, disk: SimDisk, durability: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = disk
        self.clock = FakeClock()
        self.broker = self._broker(durability)
        self.durability = durability
        self.acknowledged: list[bytes] = []
        self.refused: list[bytes] = []

    def _broker(self, durability: str) -> Broker:
        root = self.disk.root
        return Broker(disk=self.disk, clock=self.clock, data_path=root, durability=durability, **OPTIONS)

    async def publish(self, count: int) -> None:
        """One at a time, so that every answer has its message."""
        client: Client | None = None
        for _ in range(count):
            if client is None or client.is_over:
                client = Client(self.broker)
            body = b"%d " % (len(self.acknowledged) + len(self.refused)) + bytes(self.rng.choice((10, 300, 3_000)))
            before = len(client.frames)
            client.send(pub(f"t{self.rng.randrange(3)}", body))
            await settled(self.broker)
            answers = client.frames[before:]
            if answers and answers[0][0] != FRAME_ERROR:
                self.acknowledged.append(body)
            else:
                self.refused.append(body)
        if client is not None:
            client.hang_up()
            await settled(self.broker)

    async def delivered(self) -> list[bytes]:
        """Everything that is there, in any order."""
        found: list[bytes] = []
        for topic in list(self.broker.topics):
            client = Client(self.broker)
            await client.subscribe(topic, "c", ready=100)
            await settled(self.broker)
            seen = 0
            while len(client.messages) > seen:
                new = client.messages[seen:]
                seen += len(new)
                client.finish(*new)
                await settled(self.broker)
            found += client.bodies
            client.hang_up()
        return found

    async def restart(self, disk: SimDisk) -> None:
        self.disk = disk
        self.broker = self._broker(self.durability)
        await self.broker.start()
        await settled(self.broker)


@pytest.fixture(autouse=True)
def _collect() -> None:
    collect_if_grown()


async def test_a_failed_sync_stops_the_broker_and_costs_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    for seed in range(TIMES):
        scene = Scene(SimDisk(tmp_path, seed=seed), "fsync", seed)
        await scene.broker.start()
        await scene.publish(scene.rng.randrange(1, 12))
        scene.disk.fail("sync", errno.EIO, path=scene.rng.choice((".seg", "")))
        await scene.publish(12)
        with pytest.raises(StorageError):
            await asyncio.wait_for(scene.broker.wait_closed(), 20)
        # Nothing is tried again: the pages may be gone, and the next sync would call them safe.
        await scene.restart(scene.disk.after_power_loss("none"))
        there = await scene.delivered()
        assert set(scene.acknowledged) <= set(there), f"seed {seed}"
        await scene.broker.stop()


async def test_a_full_disk_refuses_publishes_keeps_the_rest_and_recovers(tmp_path: Path) -> None:
    refused = 0
    for seed in range(TIMES):
        scene = Scene(SimDisk(tmp_path, seed=seed), "os", seed)
        await scene.broker.start()
        await scene.publish(5)
        scene.disk.capacity = scene.disk.used + scene.rng.randrange(6_000)
        await scene.publish(10)
        refused += len(scene.refused)
        there = len(scene.refused)
        scene.disk.heal()
        scene.broker.upkeep.look_at_space()
        await scene.publish(5)
        assert len(scene.refused) == there, f"seed {seed}: refused although there is room"
        assert sorted(await scene.delivered()) == sorted(scene.acknowledged), f"seed {seed}"
        await scene.broker.stop()
    assert refused > TIMES


async def test_without_descriptors_the_broker_lives_and_loses_nothing(tmp_path: Path) -> None:
    short = 0
    for seed in range(TIMES):
        scene = Scene(SimDisk(tmp_path, seed=seed), "os", seed)
        await scene.broker.start()
        await scene.publish(5)
        scene.disk.most_files = len(scene.disk.open_files) + scene.rng.randrange(-3, 2)
        await scene.publish(12)
        there = len(scene.refused)
        short += bool(there) or len(scene.disk.open_files) >= scene.disk.most_files
        scene.disk.most_files = None
        # What could not be synced is tried again after a while, by the loop's clock.
        await scene.publish(5)
        assert len(scene.refused) == there, f"seed {seed}: refused although there are descriptors"
        assert set(scene.acknowledged) <= set(await scene.delivered()), f"seed {seed}"
        await scene.broker.stop()
    assert short > TIMES // 4


# --- A real process ---------------------------------------------------------------------------------------------------

real = pytest.mark.skipif(bool(why_not()), reason=why_not())


@asynccontextmanager
async def nsqd(folder: Path, *flags: str) -> AsyncIterator[tuple[Node, Layer]]:
    data_path = folder / "data"
    data_path.mkdir()
    layer = Layer(folder, data_path, traced=False)
    node = Node("nsqd", f"--data-path={data_path}", *flags, environment=layer.environment)
    try:
        await node.start()
        yield node, layer
    finally:
        await node.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def publishes(node: Node, body: bytes) -> bool:
    """Is a publish taken?"""
    async with NsqClient.to(node.address) as client:
        client.send(pub("t", body))
        frame = await client.frame_or_end()
        return frame is not None and frame[0] != FRAME_ERROR


@real
@pytest.mark.slow
async def test_a_real_process_stops_when_a_sync_fails(tmp_path: Path) -> None:
    async with nsqd(tmp_path, "--durability=fsync") as (node, layer):
        assert await publishes(node, b"one")
        layer.control.sync_error = errno.EIO
        assert not await publishes(node, b"two")
        assert node._process is not None
        assert await asyncio.wait_for(node._process.wait(), 60) == 1
        layer.control.sync_error = 0
        await node.start()
        async with NsqClient.to(node.address) as client:
            await client.subscribe("t", "c")
            client.send(b"RDY 1\n")
            assert (await client.message()).body == b"one"


@real
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["write", "open"])
async def test_a_real_process_survives_a_full_disk_and_missing_descriptors(fault: str, tmp_path: Path) -> None:
    async with nsqd(tmp_path) as (node, layer):
        async with NsqClient.to(node.address) as early:
            early.send(pub("t", b"early"))
            await early.answer()
            if fault == "write":
                layer.control.write_error = errno.ENOSPC
                assert not await publishes(node, b"no room")
            else:
                layer.control.open_error = errno.EMFILE
                # A connection that is there goes on.
                early.send(pub("t", b"early too"))
                await early.answer()
            assert node.running
        layer.control.write_error = layer.control.open_error = 0
        await until(lambda: publishes(node, b"late"))
        assert node.running
        assert layer.control.failed >= (fault == "write")
        async with NsqClient.to(node.address) as client:
            await client.subscribe("t", "c")
            client.send(b"RDY 10\n")
            bodies = [(await client.message()).body for _ in range(2 if fault == "write" else 3)]
            assert bodies == ([b"early", b"late"] if fault == "write" else [b"early", b"early too", b"late"])
