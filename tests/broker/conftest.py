"""A real broker in this process, with a clock that is moved by hand, for every test of the broker's rooms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from support.fakes import CountingDisk, FakeClock

StartBroker = Callable[..., Awaitable[Broker]]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def start_broker(tmp_path: Path, clock: FakeClock) -> AsyncIterator[StartBroker]:
    """Start a broker on the test's data path, with options by keyword; those still running are stopped at the end.

    A callback that raised fails the test: the event loop would only have logged it.
    """
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    brokers: list[Broker] = []

    async def start(**options: Any) -> Broker:
        options.setdefault("data_path", tmp_path)
        # Free space is a matter of the test's machine, unless the test is about it.
        options.setdefault("disk_reserve", 0)
        broker = Broker(clock=clock, disk=options.pop("disk", None) or CountingDisk(), **options)
        await broker.start()
        brokers.append(broker)
        return broker

    yield start
    for broker in brokers:
        await broker.stop()
    assert raised == []


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker()
