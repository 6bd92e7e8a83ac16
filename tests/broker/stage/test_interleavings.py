"""What can happen to a staged transaction, one test for each: retries, kills, zombies, nodes that are gone."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.system import Buffer
from support.fakes import SECOND, CountingDisk, FakeClock, replace_method, until
from support.simdisk import SimDisk
from support.stage_client import Refused, StageClient, stored

OPTIONS: dict[str, Any] = {"http_address": "127.0.0.1:0"}
Join = Callable[..., Awaitable[StageClient]]


def bodies(first: int, count: int) -> list[bytes]:
    return [b"row %d" % number for number in range(first, first + count)]


class Nodes:
    """Brokers with data paths of their own, and a client of each."""

    def __init__(self, start: StartBroker, root: Path, stack: AsyncExitStack) -> None:
        self._start = start
        self._root = root
        self._stack = stack
        self.brokers: dict[str, Broker] = {}
        self.clients: dict[str, StageClient] = {}

    async def start(self, name: str, **options: Any) -> StageClient:
        path = self._root / name
        path.mkdir(exist_ok=True)
        self.brokers[name] = await self._start(data_path=path, **OPTIONS, **options)
        self.clients[name] = await self._stack.enter_async_context(StageClient.connect(self.brokers[name]))
        return self.clients[name]

    async def restart(self, name: str, **options: Any) -> StageClient:
        self.brokers[name].kill()
        await asyncio.sleep(0)
        return await self.start(name, **options)

    def rows(self, topic: str = "t") -> Counter[bytes]:
        total: Counter[bytes] = Counter()
        for broker in self.brokers.values():
            total += stored(broker, topic)
        return total


@pytest.fixture
async def nodes(start_broker: StartBroker, tmp_path: Path) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        yield Nodes(start_broker, tmp_path, stack)


@pytest.fixture
async def home(nodes: Nodes) -> StageClient:
    return await nodes.start("n1")


async def refused(code: str, call: Awaitable[Any], status: int = 409) -> str:
    with pytest.raises(Refused) as exc:
        await call
    assert (exc.value.code, exc.value.status) == (f"E_STAGE_{code}", status)
    # A code, and a sentence that says what to do.
    assert len(str(exc.value)) > 60
    return str(exc.value)


async def test_a_short_first_attempt_is_not_named_and_dropped(nodes: Nodes, home: StageClient) -> None:
    await home.open()
    await home.stage(1, 0, "first", [bodies(0, 3)])
    winner = await home.stage(1, 0, "retry", [bodies(0, 2), bodies(2, 8)])
    prepared = await home.prepare(1, 0, [winner])
    assert prepared["topics"]["t"]["count"] == 10
    await home.decide(1, 0, {"n1": prepared["set"]})
    await home.apply(0, prepared["set"])
    assert nodes.rows() == Counter(bodies(0, 10))
    await until(lambda: not list((nodes.brokers["n1"].path / "flintmq").rglob("*.rows")))


async def test_a_speculative_loser_is_closed_after_prepare(home: StageClient) -> None:
    await home.open()
    winner = await home.stage(1, 0, "winner", [bodies(0, 3)])
    await home.stage(1, 0, "loser", [bodies(0, 2)])
    await home.prepare(1, 0, [winner])
    await refused("CLOSED", home.put(1, 0, "loser", 1, bodies(2, 1)))
    await refused("CLOSED", home.begin(1, 0, "another"))
    await refused("CLOSED", home.prepare(1, 0, [("loser", 1, 2)]))


async def test_a_chunk_whose_answer_was_lost_is_stored_once(nodes: Nodes, home: StageClient) -> None:
    await home.open()
    await home.stage(1, 0, "a", [bodies(0, 3)])
    await home.put(1, 0, "a", 0, bodies(0, 3))
    assert (await home.begin(1, 0, "a"))["next"] == 1
    await refused("CONTENT", home.put(1, 0, "a", 0, bodies(0, 2)))
    await refused("CONTENT", home.put(1, 0, "a", 0, bodies(1, 3)))
    await refused("CONTENT", home.put(1, 0, "a", 0, bodies(0, 3), "u"))
    await refused("GAP", home.put(1, 0, "a", 2, bodies(5, 1)))
    await refused("UNKNOWN", home.put(1, 0, "b", 0, bodies(5, 1)), 404)
    prepared = await home.prepare(1, 0, [("a", 1, 3)])
    assert prepared["topics"]["t"]["count"] == 3


async def test_staged_chunks_survive_a_kill(nodes: Nodes, home: StageClient) -> None:
    await home.open()
    await home.stage(1, 0, "ended", [bodies(0, 3)])
    await home.stage(1, 0, "going", [bodies(3, 2)])
    home = await nodes.restart("n1")
    assert (await home.begin(1, 0, "going"))["next"] == 1
    await home.put(1, 0, "going", 1, bodies(5, 5))
    prepared = await home.prepare(1, 0, [("ended", 1, 3), ("going", 2, 7)])
    await home.decide(1, 0, {"n1": prepared["set"]})
    await home.apply(0, prepared["set"])
    assert nodes.rows() == Counter(bodies(0, 10))


async def test_chunks_that_the_power_took_are_missed(nodes: Nodes, home: StageClient) -> None:
    await home.open()
    winner = await home.stage(1, 0, "a", [bodies(0, 3), bodies(3, 3)])
    [path] = (nodes.brokers["n1"].path / "flintmq").rglob("*.rows")
    nodes.brokers["n1"].kill()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    home = await nodes.start("n1")
    await refused("UNKNOWN", home.prepare(1, 0, [winner]), 404)
    assert (await home.begin(1, 0, "a"))["next"] == 1
    await home.put(1, 0, "a", 1, bodies(3, 3))
    await home.prepare(1, 0, [winner])


async def test_a_driver_that_dies_while_staging_leaves_nothing(nodes: Nodes, home: StageClient) -> None:
    await home.open()
    await home.stage(1, 0, "a", [bodies(0, 3)])
    opened = await home.open(run="run-2", job="job-2")
    assert opened == {"epoch": 2, "decided": None}
    winner = await home.stage(2, 0, "b", [bodies(0, 10)], decided=None)
    [producer] = nodes.brokers["n1"].stage.producers.values()
    assert [attempt.name for attempt in producer.attempts.values()] == ["b"]
    prepared = await home.prepare(2, 0, [winner])
    await home.decide(2, 0, {"n1": prepared["set"]})
    await home.apply(0, prepared["set"])
    assert nodes.rows() == Counter(bodies(0, 10))
    assert nodes.brokers["n1"].stage.bytes == 0


async def test_a_set_that_was_prepared_and_not_decided_is_dropped(nodes: Nodes, home: StageClient) -> None:
    """n1 prepared, n2 not: the driver dies."""
    other = await nodes.start("n2")
    await home.open()
    await home.prepare(1, 0, [await home.stage(1, 0, "a", [bodies(0, 5)])])
    prepared = await other.prepare(1, 0, [await other.stage(1, 0, "b", [bodies(5, 5)])])
    opened = await home.open(run="run-2", job="job-2")
    await home.begin(2, 0, "c", opened["decided"])
    assert (await other.abort(2, 0)) == {"decided": False}
    for name in ("n1", "n2"):
        await until(lambda name=name: not list((nodes.brokers[name].path / "flintmq").rglob("*.rows")))
        assert nodes.brokers[name].stage.bytes == 0
    await refused("UNKNOWN", other.apply(0, prepared["set"]), 404)


async def decided_on_two(nodes: Nodes, home: StageClient) -> dict[str, str]:
    """A transaction that is decided on two nodes, and applied on none."""
    other = nodes.clients.get("n2") or await nodes.start("n2")
    opened = await home.open()
    sets = {}
    for name, client, first in (("n1", home, 0), ("n2", other, 5)):
        winner = await client.stage(1, 0, f"a{name}", [bodies(first, 5)], decided=opened["decided"])
        sets[name] = (await client.prepare(1, 0, [winner]))["set"]
    await home.decide(1, 0, sets, "p")
    return sets


async def test_the_next_run_applies_what_was_decided(nodes: Nodes, home: StageClient) -> None:
    await decided_on_two(nodes, home)
    opened = await home.open(run="run-2", job="job-2")
    assert opened["decided"]["done"] is False
    # The batch runs again: each node first completes what was decided, then stages only to compare.
    for name, first in (("n1", 0), ("n2", 5)):
        client = nodes.clients[name]
        winner = await client.stage(2, 0, f"b{name}", [bodies(first, 5)], decided=opened["decided"])
        prepared = await client.prepare(2, 0, [winner])
        assert prepared["repeat"] is True
        assert prepared == await client.prepare(2, 0, [winner])
        assert prepared["topics"]["t"]["count"] == 5
    answer = await home.decide(2, 0, {"n1": "x", "n2": "y"}, "p")
    assert answer["repeat"] is True
    await home.done(0)
    assert nodes.rows() == Counter(bodies(0, 10))
    assert all(broker.stage.bytes == 0 for broker in nodes.brokers.values())


async def test_an_abort_after_the_decision_drops_nothing(nodes: Nodes, home: StageClient) -> None:
    sets = await decided_on_two(nodes, home)
    assert await home.abort(1, 0) == {"decided": True}
    for name, client in nodes.clients.items():
        await client.apply(0, sets[name])
    assert nodes.rows() == Counter(bodies(0, 10))


async def test_a_late_decision_after_an_abort_is_fenced(home: StageClient) -> None:
    await home.open()
    prepared = await home.prepare(1, 0, [await home.stage(1, 0, "a", [bodies(0, 5)])])
    assert await home.abort(1, 0) == {"decided": False}
    await refused("FENCED", home.decide(1, 0, {"n1": prepared["set"]}))


async def test_a_zombie_cannot_decide(nodes: Nodes, home: StageClient) -> None:
    await home.open()
    zombie = await home.prepare(1, 0, [await home.stage(1, 0, "a", [bodies(0, 5)])])
    await home.open(run="run-2", job="job-2")
    prepared = await home.prepare(2, 0, [await home.stage(2, 0, "b", [bodies(0, 5)])])
    await home.decide(2, 0, {"n1": prepared["set"]})
    await refused("FENCED", home.decide(1, 0, {"n1": zombie["set"]}))
    await refused("UNKNOWN", home.apply(0, zombie["set"]), 404)
    await home.apply(0, prepared["set"])
    assert nodes.rows() == Counter(bodies(0, 5))


async def test_a_zombie_that_decided_in_time_may_complete_it(nodes: Nodes, home: StageClient) -> None:
    await home.open()
    prepared = await home.prepare(1, 0, [await home.stage(1, 0, "a", [bodies(0, 5)])])
    sets = {"n1": prepared["set"]}
    await home.decide(1, 0, sets)
    opened = await home.open(run="run-2", job="job-2")
    await home.begin(2, 0, "b", opened["decided"])
    assert (await home.decide(1, 0, sets))["repeat"] is True
    assert await home.apply(0, prepared["set"]) == {"topics": {"t": 5}}
    assert nodes.rows() == Counter(bodies(0, 5))


async def test_what_a_zombie_stages_elsewhere_times_out(nodes: Nodes, home: StageClient, clock: FakeClock) -> None:
    other = await nodes.start("n2", stage_timeout=3600 * SECOND)
    await other.stage(1, 0, "a", [bodies(0, 5)])
    prepared = await other.prepare(1, 0, [("a", 1, 5)])
    await other.begin(1, 1, "b")
    await other.put(1, 1, "b", 0, bodies(5, 5))
    staging = nodes.brokers["n2"].stage
    clock.advance(3500)
    staging._sweep()
    assert [len(one.attempts) for one in staging.producers.values()] == [1]
    clock.advance(200)
    staging._sweep()
    assert [len(one.attempts) for one in staging.producers.values()] == [0]
    # Prepared sets never do.
    assert await other.apply(0, prepared["set"]) == {"topics": {"t": 5}}


async def test_who_is_not_home_decides_nothing(nodes: Nodes, home: StageClient) -> None:
    other = await nodes.start("n2")
    await home.open()
    prepared = await other.prepare(1, 0, [await other.stage(1, 0, "a", [bodies(0, 5)])])
    await refused("UNKNOWN", other.decide(1, 0, {"n2": prepared["set"]}), 404)


async def test_a_decision_is_the_same_after_home_was_killed(nodes: Nodes, home: StageClient) -> None:
    sets = await decided_on_two(nodes, home)
    home = await nodes.restart("n1")
    answer = await home.decide(1, 0, sets, "p")
    assert answer["repeat"] is True
    assert answer["decided"] == {"txn": 0, "epoch": 1, "nodes": sets, "print": "p", "done": False}


async def test_the_next_transaction_waits_for_a_node_that_is_down(nodes: Nodes, home: StageClient) -> None:
    sets = await decided_on_two(nodes, home)
    nodes.brokers["n2"].kill()
    await home.apply(0, sets["n1"])
    opened = await home.open(1, job="job-2")
    epoch = opened["epoch"]
    winner = await home.stage(epoch, 1, "b", [bodies(10, 5)], decided=opened["decided"])
    prepared = await home.prepare(epoch, 1, [winner])
    assert "n1, n2" in await refused("UNFINISHED", home.decide(epoch, 1, {"n1": prepared["set"]}))
    other = await nodes.start("n2")
    await other.apply(0, sets["n2"])
    await home.done(0)
    await home.decide(epoch, 1, {"n1": prepared["set"]})
    await home.apply(1, prepared["set"])
    await home.done(1)
    assert nodes.rows() == Counter(bodies(0, 15))


async def test_an_operator_gives_up_what_a_lost_node_had(nodes: Nodes, home: StageClient) -> None:
    sets = await decided_on_two(nodes, home)
    nodes.brokers["n2"].kill()
    await home.apply(0, sets["n1"])
    shown = await home.ask("GET", "/stage")
    assert shown["producers"][0]["decided"]["nodes"] == sets
    assert await home.ask("DELETE", "/stage?producer=query-1&txn=0") == {"dropped_rows": 0}
    opened = await home.open(1, job="job-2")
    assert opened["decided"]["done"] is True


async def test_an_operator_drops_a_prepared_set(nodes: Nodes, home: StageClient) -> None:
    await home.open()
    prepared = await home.prepare(1, 0, [await home.stage(1, 0, "a", [bodies(0, 5)])])
    [shown] = (await home.ask("GET", "/stage"))["producers"]
    assert [shown] == (await home.ask("GET", "/stage?producer=query-1"))["producers"]
    assert (await home.ask("GET", "/stage?producer=other"))["producers"] == []
    [found] = shown["sets"]
    assert (found["txn"], found["state"], found["topics"]) == (0, "prepared", {"t": 5})
    assert await home.ask("DELETE", "/stage?producer=query-1") == {"dropped_rows": 5}
    assert (await home.ask("GET", "/stage")) == {"bytes": 0, "max_bytes": 32 << 30, "producers": []}
    await refused("UNKNOWN", home.apply(0, prepared["set"]), 404)
    await refused("UNKNOWN", home.ask("DELETE", "/stage?producer=query-1"), 404)


async def test_begin_tells_what_home_may_have_forgotten(nodes: Nodes, home: StageClient) -> None:
    """Home restored from an old backup: what was applied elsewhere exceeds its last decision."""
    other = await nodes.start("n2")
    sets = await decided_on_two(nodes, home)
    assert (await other.begin(1, 1, "b"))["applied"] == -1
    await other.apply(0, sets["n2"])
    assert (await other.begin(1, 1, "b"))["applied"] == 0


async def test_a_node_that_was_told_of_a_decision_is_a_witness_of_it(nodes: Nodes, home: StageClient) -> None:
    """Home restored from an old backup, and the node that has the rows is down: any other knows, if it was told."""
    other = await nodes.start("n2")
    assert await other.call("abort", epoch=1, txn=3, told=3) == {"decided": False}
    # Somebody who is late tells less, or nothing.
    await other.call("abort", epoch=1, txn=2, told=2)
    await other.abort(1, 3)
    other = await nodes.restart("n2")
    [known] = (await other.ask("GET", "/stage?producer=query-1"))["producers"]
    assert (known["home"], known["applied"], known["told"]) == (False, -1, 3)
    assert (await other.begin(1, 4, "b"))["told"] == 3
    with pytest.raises(Refused, match="INVALID_BODY"):
        await other.call("abort", epoch=1, txn=3, told=1 << 53)


async def test_a_checkpoint_that_went_back_finds_its_decision(nodes: Nodes, home: StageClient) -> None:
    for txn in range(3):
        await home.commit(txn, [bodies(txn * 5, 5)], f"job-{txn}")
    opened = await home.open(1, run="run-2", job="job-9")
    assert opened["decided"]["txn"] == 2
    winner = await home.stage(opened["epoch"], 1, "again", [bodies(5, 3), bodies(8, 2)], decided=opened["decided"])
    prepared = await home.prepare(opened["epoch"], 1, [winner])
    answer = await home.decide(opened["epoch"], 1, {"n": prepared["set"]}, "other")
    assert answer["repeat"] is True and answer["decided"]["print"] == "p"
    assert nodes.rows() == Counter(bodies(0, 15))
    assert nodes.brokers["n1"].stage.bytes == 0


async def test_a_node_that_was_only_told_of_a_producer_remembers_it(nodes: Nodes, home: StageClient) -> None:
    other = await nodes.start("n2")
    await home.open()
    for _ in range(2):
        await other.begin(0, 0, "told")
    other = await nodes.restart("n2")
    [known] = (await other.ask("GET", "/stage?producer=query-1"))["producers"]
    assert (known["home"], known["epoch"], known["applied"]) == (False, 0, -1)
    # It can be used as any other, and is not told again.
    prepared = await other.prepare(1, 0, [await other.stage(1, 0, "a", [bodies(0, 5)])])
    await refused("FENCED", other.begin(0, 0, "told"))
    await home.decide(1, 0, {"n2": prepared["set"]})
    await other.apply(0, prepared["set"])
    assert nodes.rows() == Counter(bodies(0, 5))


async def test_a_number_that_was_passed_over_is_not_decided_later(nodes: Nodes, home: StageClient) -> None:
    """A checkpoint went back to a batch that left no decision: its rows may be those of a later one."""
    await home.commit(0, [bodies(0, 5)], "job-0")
    opened = await home.open(1, job="job-1")
    winner = await home.stage(opened["epoch"], 1, "early", [bodies(5, 5)], decided=opened["decided"])
    prepared = await home.prepare(opened["epoch"], 1, [winner])
    await home.commit(2, [bodies(5, 5)], "job-2")
    await refused("FENCED", home.decide(opened["epoch"], 1, {"n": prepared["set"]}))
    assert "checkpoint went back" in await refused("DECIDED", home.open(1, run="run-2", job="job-3"))
    # Who is refused supersedes nobody: the current job goes on. Nor can it decide such a number.
    current = await home.open(3, job="job-2")
    await refused("DECIDED", home.decide(current["epoch"], 1, {}))
    await home.commit(3, [bodies(10, 5)], "job-4")
    assert nodes.rows() == Counter(bodies(0, 15))


async def test_a_transaction_older_than_what_is_remembered_is_refused(home: StageClient) -> None:
    for txn in range(67):
        opened = await home.open(txn, job=f"job-{txn}")
        epoch = opened["epoch"]
        await home.decide(epoch, txn, {}, txn)
        await home.done(txn)
    await refused("DECIDED", home.open(1, job="job-again"))
    opened = await home.open(3, job="job-again-2")
    assert (await home.decide(opened["epoch"], 3, {}, "x"))["decided"]["print"] == 3


async def test_a_kill_while_it_is_applied_repeats_nothing(
    nodes: Nodes, home: StageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the topic remembers no keys at all."""
    sets = {}
    home = await nodes.restart("n1", mem_queue_size=1_000_000)
    await home.open()
    chunks = [bodies(100 * number, 100) for number in range(50)]
    winner = await home.stage(1, 0, "a", chunks)
    sets["n1"] = (await home.prepare(1, 0, [winner]))["set"]
    await home.decide(1, 0, sets)
    broker = nodes.brokers["n1"]
    published = 0
    original = broker.topic("t").publish

    def publish(*arguments: Any, **options: Any) -> Any:
        nonlocal published
        published += 1
        if published == 20:
            broker.later(broker.kill)
        return original(*arguments, **options)

    replace_method(monkeypatch, broker.topic("t"), "publish", publish)
    with pytest.raises((OSError, EOFError)):
        await home.apply(0, sets["n1"])
    await nodes.start("n1")
    broker = nodes.brokers["n1"]
    await until(lambda: not any(one.applies for one in broker.stage.producers.values()))
    log = broker.topics["t"].log
    assert sum(stop - first for first, stop in log.spans()) == 5_000
    assert await nodes.clients["n1"].apply(0, sets["n1"]) == {"topics": {"t": 5_000}}
    assert broker.topics["t"].keys is None or not broker.topics["t"].keys.reserved


async def test_a_restored_copy_drops_what_was_prepared(nodes: Nodes, home: StageClient) -> None:
    await home.open()
    prepared = await home.prepare(1, 0, [await home.stage(1, 0, "a", [bodies(0, 5)])])
    broker = nodes.brokers["n1"]
    broker.kill()
    about = broker.path / "flintmq" / "format.json"
    about.write_text(about.read_text().replace(broker.node.hex(), "ab" * 16))
    home = await nodes.start("n1")
    await refused("UNKNOWN", home.apply(0, prepared["set"]), 404)
    assert nodes.brokers["n1"].stage.bytes == 0


async def test_a_node_that_was_made_a_home_by_mistake_applies_what_the_home_decided(
    nodes: Nodes, home: StageClient
) -> None:
    """A driver that did not see the home chose another one, and was told better before it staged anything."""
    other = await nodes.start("n2")
    await other.open(job="mistaken")
    decided = None
    for txn in range(3):
        epoch = (await home.open(txn, job=f"job-{txn}"))["epoch"]
        winner = await other.stage(epoch, txn, "a", [bodies(5 * txn, 5)], decided=decided)
        prepared = await other.prepare(epoch, txn, [winner])
        # Without a word on who decided it, it is its own business, and not decided here.
        await refused("UNKNOWN", other.apply(txn, prepared["set"]), 404)
        decided = (await home.decide(epoch, txn, {"n2": prepared["set"]}))["decided"]
        home_node = nodes.brokers["n1"].node.hex()
        assert await other.call("apply", txn=txn, set=prepared["set"], home=home_node) == {"topics": {"t": 5}}
        await home.done(txn)
    assert nodes.rows() == Counter(bodies(0, 15))


async def test_a_prepare_that_could_not_be_noted_at_first_leaves_no_losers(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(http_address="127.0.0.1:0", disk=disk)
    async with StageClient.connect(broker) as client:
        await client.open()
        winner = await client.stage(1, 0, "a", [bodies(0, 5)])
        await client.stage(1, 0, "loser", [bodies(0, 3)])
        disk.fail("write", 28, times=1, path="state")
        await refused("FULL", client.prepare(1, 0, [winner]), 507)
        prepared = await client.prepare(1, 0, [winner])
        producer = broker.stage.producers["query-1"]
        assert producer.attempts == {}
        await client.decide(1, 0, {"n": prepared["set"]})
        await client.apply(0, prepared["set"])
        await client.done(0)
        assert broker.stage.bytes == 0
        assert producer.idle
    assert stored(broker) == Counter(bodies(0, 5))


async def test_a_call_that_is_meant_for_another_node_is_refused(nodes: Nodes, home: StageClient) -> None:
    mine, other = nodes.brokers["n1"].node.hex(), "ab" * 16
    calls: dict[str, dict[str, Any]] = {
        "open": {"run": "run-1", "job": "job-1", "txn": 0},
        "begin": {"epoch": 1, "txn": 0, "attempt": "a", "decided": None},
        "prepare": {"epoch": 1, "txn": 0, "winners": []},
        "decide": {"epoch": 1, "txn": 0, "nodes": {}},
        "apply": {"txn": 0, "set": ""},
        "done": {"txn": 0},
        "abort": {"epoch": 1, "txn": 0},
    }
    for verb, fields in calls.items():
        assert other in await refused("NODE", home.call(verb, node=other, **fields), 421)
    assert nodes.brokers["n1"].stage.producers == {}
    assert await home.call("open", node=mine, **calls["open"]) == {"epoch": 1, "decided": None}


class FailingState(CountingDisk):
    """Cannot write a state, and says so when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.tried, self.go_on = False, threading.Event(), threading.Event()

    def replace(self, path: Path, content: Sequence[Buffer]) -> None:
        if self.fails:
            self.tried.set()
            self.go_on.wait(10)
            raise OSError(errno.EIO, "Input/output error")
        super().replace(path, content)


async def test_a_state_that_cannot_be_written_for_somebody_who_has_gone_is_no_unhandled_error(
    start_broker: StartBroker,
) -> None:
    disk = FailingState()
    broker = await start_broker(disk=disk, **OPTIONS)
    async with StageClient.connect(broker) as client:
        await client.open(0)
        disk.fails = True
        asked = asyncio.create_task(broker.stage.producer("another").open("run-1", "job-1", 0))
        await until(disk.tried.is_set)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        disk.go_on.set()
        with pytest.raises(Refused, match="507 E_STAGE_FULL the state cannot be written"):
            await client.open(0, run="run-2")
        disk.fails = False
        await client.open(0, run="run-2")
    # What a task raised that nobody asked is told when it is collected: the fixture fails then.
    gc.collect()
