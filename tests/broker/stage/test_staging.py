"""Staged publishes over HTTP: nothing is seen before the decision, everything once after it."""

from __future__ import annotations

from collections import Counter

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from support.stage_client import Refused, StageClient, stored


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker(http_address="127.0.0.1:0")


CHUNKS = [[b"one", b"two"], [b"three"], [b"four" * 1000, b"five", b"one"]]
ROWS = Counter(body for chunk in CHUNKS for body in chunk)


async def test_rows_are_seen_once_they_are_decided_and_applied(broker: Broker) -> None:
    async with StageClient.connect(broker) as client:
        opened = await client.open(0)
        assert opened == {"epoch": 1, "decided": None}
        winner = await client.stage(1, 0, "a", CHUNKS)
        assert winner == ("a", 3, 6)
        assert "t" not in broker.topics
        prepared = await client.prepare(1, 0, [winner])
        assert prepared["topics"]["t"]["count"] == 6
        assert prepared["topics"]["t"]["bytes"] == sum(map(len, ROWS.elements()))
        decided = await client.decide(1, 0, {"n": prepared["set"]}, "print")
        assert decided["repeat"] is False
        assert "t" not in broker.topics
        assert await client.apply(0, prepared["set"]) == {"topics": {"t": 6}}
        assert stored(broker) == ROWS
        assert broker.topics["t"].durable == broker.topics["t"].log.end
        assert await client.done(0) == {}
        assert broker.stage.bytes == 0
        # All of it again changes nothing.
        assert (await client.prepare(1, 0, [winner]))["set"] == prepared["set"]
        again = await client.decide(1, 0, {"n": prepared["set"]}, "print")
        assert again["repeat"] is True and again["decided"]["done"] is True
        await client.apply(0, prepared["set"])
        await client.done(0)
        assert stored(broker) == ROWS


async def test_prepared_rows_survive_a_restart(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", CHUNKS)
        prepared = await client.prepare(1, 0, [winner])
        await client.decide(1, 0, {"n": prepared["set"]})
    broker.kill()
    broker = await start_broker(http_address="127.0.0.1:0")
    async with StageClient.connect(broker) as client:
        opened = await client.open(0, job="job-2")
        assert opened["epoch"] == 2 and opened["decided"]["txn"] == 0 and not opened["decided"]["done"]
        await client.apply(0, prepared["set"])
        assert stored(broker) == ROWS


async def test_a_fenced_job_can_do_nothing(broker: Broker) -> None:
    async with StageClient.connect(broker) as client:
        await client.open(0)
        winner = await client.stage(1, 0, "a", CHUNKS)
        prepared = await client.prepare(1, 0, [winner])
        assert (await client.open(0, run="run-2", job="job-2"))["epoch"] == 2
        for call in (
            client.open(0),
            client.begin(1, 0, "b"),
            client.put(1, 0, "b", 0, [b"x"]),
            client.prepare(1, 0, [winner]),
            client.decide(1, 0, {"n": prepared["set"]}),
        ):
            with pytest.raises(Refused, match="E_STAGE_FENCED") as refused:
                await call
            assert refused.value.status == 409
