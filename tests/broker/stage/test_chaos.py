"""Several nodes, drivers that are killed and drivers that should be, nodes that are killed: every row is there once.

A driver commits one transaction after the other, as Spark's would, on three nodes. At random moments a new driver takes
over, while the old one goes on for a while (a zombie), and at random moments a node is killed and started again. Some
transactions have no rows, and now and then the checkpoint loses its newest ones. What the drivers know of each other is
what the nodes tell them. In the end the rows of every transaction are in the topics
exactly once, and nothing is left of what was staged.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.stage.state import Decision
from flintmq.errors import StageError
from support.fakes import until
from support.stage_client import mpub_body, stored

T = TypeVar("T")

TRANSACTIONS = 6
ROWS = 40


class Failed(Exception):
    """A call went wrong: the batch has to run again."""


class World:
    def __init__(self, start: StartBroker, root: Path, choice: random.Random) -> None:
        self._start = start
        self._root = root
        self.choice = choice
        self.nodes: dict[str, Broker] = {}
        #: The next transaction, as the checkpoint has it.
        self.next = 0
        #: Transactions without rows.
        self.empty = {txn for txn in range(TRANSACTIONS) if choice.random() < 0.3}
        #: No answer is lost any more.
        self.calm = False
        self.kills = self.takeovers = self.fenced = 0

    def rows(self, txn: int) -> list[bytes]:
        return [] if txn in self.empty else [b"%d-%d" % (txn, number) for number in range(ROWS)]

    async def start(self, name: str) -> None:
        path = self._root / name
        path.mkdir(exist_ok=True)
        self.nodes[name] = await self._start(data_path=path, mem_queue_size=100_000)

    async def kill(self, name: str) -> None:
        self.kills += 1
        self.nodes[name].kill()
        await asyncio.sleep(0)
        await self.start(name)


class Driver:
    def __init__(self, world: World, run: int) -> None:
        self.world = world
        self.run = f"run-{run}"
        self._attempts = 0
        self._jobs = 0

    async def call(self, node: str, method: str, *arguments: Any) -> Any:
        """One request. Its answer may be lost, and what comes of a request to a node that dies is unknown."""
        choice = self.world.choice
        for _ in range(choice.randrange(3)):
            await asyncio.sleep(0)
        producer = self.world.nodes[node].stage.producer("q")
        answer = await self._tried(getattr(producer, method)(*arguments))
        if not self.world.calm and choice.random() < 0.03:
            raise Failed("the answer was lost")
        return answer

    async def _tried(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(20):
                return await work
        except StageError as exc:
            if exc.code == "E_STAGE_FENCED":
                self.world.fenced += 1
            raise Failed(str(exc)) from exc
        except (OSError, RuntimeError, TimeoutError) as exc:
            raise Failed(repr(exc)) from exc

    async def commit_all(self) -> None:
        """Until all is committed. A batch that failed is run again, as a new job."""
        world = self.world
        while world.next < TRANSACTIONS:
            txn = world.next
            try:
                await self.commit(txn)
            except Failed:
                await asyncio.sleep(0)
                continue
            world.next = max(world.next, txn + 1)
            if not world.calm and world.choice.random() < 0.1:
                world.next = max(0, world.next - 3)

    async def commit(self, txn: int) -> None:
        world, home = self.world, "n1"
        self._jobs += 1
        opened = await self.call(home, "open", self.run, f"{self.run}-{self._jobs}", txn)
        epoch, said = opened["epoch"], opened["decided"]
        if said is not None and not said["done"]:
            await self.complete(said)
        rows = world.rows(txn)
        world.choice.shuffle(rows)
        used = world.choice.sample(sorted(world.nodes), world.choice.randint(1, 3)) if rows else []
        sets: dict[str, str] = {}
        total = 0
        for number, node in enumerate(used):
            winners = [await self.task(node, epoch, txn, rows[number :: len(used)], said)]
            prepared = await self.call(node, "prepare", epoch, txn, winners)
            sets[node] = prepared["set"]
            total += sum(found["sum"] for found in prepared["topics"].values())
        decided = await self.call(home, "decide", epoch, txn, sets, total % 2**64)
        assert decided["decided"]["print"] == total % 2**64, "other rows under the same number"
        await self.complete(decided["decided"])
        if decided["repeat"]:
            for node in used:
                await self.call(node, "abort", epoch, txn)

    async def complete(self, decided: dict[str, Any]) -> None:
        for node, name in decided["nodes"].items():
            await self.call(node, "apply", decided["txn"], name)
        await self.call("n1", "done", decided["txn"])

    async def task(self, node: str, epoch: int, txn: int, rows: list[bytes], said: Any) -> tuple[str, int, int]:
        """Attempts until one ends; the others stay behind with less."""
        choice = self.world.choice
        decided = Decision(**said) if said is not None else None
        while True:
            self._attempts += 1
            name = f"{self.run}-{self._attempts}"
            begun = await self.call(node, "begin", epoch, txn, name, decided)
            assert begun["applied"] <= (said["txn"] if said is not None else -1)
            size, chunk = choice.randint(1, 15), 0
            for at in range(0, len(rows), size):
                data = bytearray(mpub_body(rows[at : at + size]))
                count = len(rows[at : at + size])
                await self.call(node, "put", (epoch, txn, name), chunk, "t", 0, data, len(data), count)
                chunk += 1
            if choice.random() > 0.1:
                return name, chunk, len(rows)


async def chaos(world: World, drivers: list[asyncio.Task[None]]) -> None:
    """New drivers, killed drivers, killed nodes; then calm."""
    choice = world.choice
    for _ in range(25):
        for _ in range(choice.randrange(60)):
            await asyncio.sleep(0)
        await asyncio.sleep(choice.random() * 0.02)
        what = choice.random()
        if what < 0.5:
            await world.kill(choice.choice(sorted(world.nodes)))
        elif what < 0.8:
            world.takeovers += 1
            drivers.append(asyncio.create_task(Driver(world, len(drivers)).commit_all()))
        elif drivers:
            choice.choice(drivers).cancel()
    # All but a last one are gone at last.
    for driver in drivers:
        driver.cancel()
    await asyncio.gather(*drivers, return_exceptions=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
async def test_every_row_is_there_once(start_broker: StartBroker, tmp_path: Path, seed: int) -> None:
    world = World(start_broker, tmp_path, random.Random(seed))
    for name in ("n1", "n2", "n3"):
        await world.start(name)
    drivers = [asyncio.create_task(Driver(world, 0).commit_all())]
    await chaos(world, drivers)
    for driver in drivers:
        with contextlib.suppress(asyncio.CancelledError):
            assert driver.exception() is None
    world.calm = True
    # The checkpoint may be one behind what was committed.
    world.next = max(0, world.next - 1)
    await Driver(world, 1000).commit_all()
    # A last transaction tells every node that what is older can go.
    final = Driver(world, 1001)
    opened = await final.call("n1", "open", "last", "last", TRANSACTIONS)
    for node in world.nodes:
        await final.call(node, "begin", opened["epoch"], TRANSACTIONS, "last", Decision(**opened["decided"]))
    for name in world.nodes:
        await world.kill(name)
    wanted = Counter(row for txn in range(TRANSACTIONS) for row in world.rows(txn))
    found: Counter[bytes] = Counter()
    for broker in world.nodes.values():
        found += await contents(broker)
        assert broker.stage.bytes == 0
    assert found == wanted, (found - wanted, wanted - found)
    assert world.kills > 3


async def contents(broker: Broker) -> Counter[bytes]:
    """All messages of the topic, read back from its files."""
    if "t" not in broker.topics:
        return Counter()
    topic = broker.topics["t"]
    found = stored(broker)
    memory = topic.log.blocks[0].base if topic.log.blocks else topic.log.end
    for first, stop in topic.log.spans():
        for seq in range(first, min(stop, memory)):
            await until(partial(topic.frame, seq))
            frame = topic.frame(seq)
            assert frame is not None
            found[bytes(frame[34:])] += 1
    return found
