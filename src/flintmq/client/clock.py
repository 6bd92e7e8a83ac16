"""Where the client's time comes from, and waiting by it. Time is passed in, so that tests can move it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

__all__ = ["Clock", "Timer", "limit", "sleep"]


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Where the client's time comes from. An event loop will do; tests pass one that they can move.

    A clock that jumps may have an attribute `steady`, another clock. Connections go by that in judging whether the
    other side is silent: after a jump of an hour, no heartbeat is missing.
    """

    def time(self) -> float: ...
    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer: ...


async def sleep(clock: Clock, seconds: float) -> None:
    over = asyncio.Event()
    timer = clock.call_later(seconds, over.set)
    try:
        await over.wait()
    finally:
        timer.cancel()


@contextlib.asynccontextmanager
async def limit(clock: Clock, seconds: float) -> AsyncIterator[None]:
    """Limit the time of a block, as `asyncio.timeout` does, on a clock that tests can move."""
    task = asyncio.current_task()
    assert task is not None
    cancelled_before = task.cancelling()
    fired = False

    def fire() -> None:
        nonlocal fired
        fired = True
        task.cancel()

    timer = clock.call_later(seconds, fire)
    try:
        yield
    except asyncio.CancelledError:
        if fired and task.uncancel() <= cancelled_before:
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        raise
    finally:
        timer.cancel()
