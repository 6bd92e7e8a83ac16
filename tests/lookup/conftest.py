"""An nsqlookupd in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flintmq.lookup.daemon import Lookupd

from .nsqds import Nsqd, StartLookupd, Time, connected


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
async def start_lookupd(clock: Time) -> AsyncIterator[StartLookupd]:
    """Start an nsqlookupd with options by keyword. A callback that raised fails the test."""
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    started: list[Lookupd] = []

    async def start(**options: Any) -> Lookupd:
        lookupd = Lookupd(now=clock.now, wall=clock.wall, **options)
        await lookupd.start()
        started.append(lookupd)
        return lookupd

    yield start
    for lookupd in started:
        await lookupd.stop()
    assert raised == []


@pytest.fixture
async def lookupd(start_lookupd: StartLookupd) -> Lookupd:
    return await start_lookupd()


@pytest.fixture
async def nsqd(lookupd: Lookupd) -> AsyncIterator[Nsqd]:
    async with connected(lookupd.tcp_address) as nsqd:
        yield nsqd
