"""What NSQ's tools share: the wait for the first connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flintmq import Broker, Consumer
from flintmq.tools._program import Failures, Fatal, connected


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with Broker(data_path=tmp_path) as broker:
        yield broker


async def test_the_first_connections_are_waited_for(broker: Broker) -> None:
    async with Consumer("t", "c", nsqd=[broker.tcp_address]) as consumer:
        await connected(consumer, [broker.tcp_address], Failures())
        assert consumer.connections == [broker.tcp_address]


async def test_a_broker_that_cannot_be_reached_is_fatal() -> None:
    failures = Failures()
    async with Consumer("t", "c", nsqd=["127.0.0.1:1"], on_error=failures) as consumer:
        with pytest.raises(Fatal, match=r"^\(127\.0\.0\.1:1\) error connecting to nsqd - Connection refused$"):
            await connected(consumer, ["127.0.0.1:1"], failures)


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_consumer_that_was_stopped_is_not_waited_for(broker: Broker, is_closed: bool) -> None:
    """A signal, or the last message that is wanted, may come before anybody has looked at the connection."""
    consumer = Consumer("t", "c", nsqd=[broker.tcp_address])
    await consumer.start()
    consumer.stop()
    if is_closed:
        await consumer.close()
    async with asyncio.timeout(10):
        await connected(consumer, [broker.tcp_address], Failures())
    await consumer.close()
