from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .fakes import FakeNsqd, MovableClock


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
async def fake() -> AsyncIterator[FakeNsqd]:
    """An nsqd that says what the test tells it to say."""
    async with FakeNsqd() as nsqd:
        yield nsqd
