"""The user's functions: handlers and callbacks, plain or asynchronous, whatever they return or raise.

A coroutine function runs on the event loop; a plain function runs in a thread, so it may block. A `concurrent.futures`
future or an awaitable that a function returns is waited for. Generator functions are refused, because calling one runs
none of its code.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
from collections.abc import Callable
from typing import Any

from flintmq.errors import OptionError

__all__ = ["Calls", "check", "is_asynchronous", "result_of"]

logger = logging.getLogger(__name__)


def check(function: Callable[..., Any] | None, name: str) -> None:
    """Raise OptionError for a function whose code would not run when it is called."""
    if function is None:
        return
    if not callable(function):
        raise OptionError(f"{name} must be callable, not {function!r}")
    call = getattr(function, "__call__", None)  # noqa: B004
    for each in (function, call):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise OptionError(f"{name} is a generator function: its code would not run; use return in place of yield")


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """Return whether it is a coroutine function; an object may have one for its `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def result_of(returned: Any) -> Any:
    """Wait for the result of what a function returned. TypeError if it is a generator."""
    if isinstance(returned, concurrent.futures.Future):
        return await asyncio.wrap_future(returned)
    if inspect.isawaitable(returned):
        return await returned
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise TypeError("a generator was returned, whose code has not run")
    return returned


def _in_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except (StopIteration, SystemExit, KeyboardInterrupt) as exc:
        # No future can carry the first, and the others would end the event loop.
        raise RuntimeError(f"{type(exc).__name__} was raised: {exc}") from exc


class Calls:
    """Calls functions of the user, plain ones in at most `threads` threads."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, and wait for its result."""
        if is_asynchronous(function):
            returned = await function(*args)
        else:
            returned = await self.call_in_thread(function, *args)
        return returned if returned is None else await result_of(returned)

    async def call_in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a plain function in a thread; what it returns is not waited for."""
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(self._threads, f"flintmq-{self._name}")
        return await asyncio.get_running_loop().run_in_executor(self._pool, _in_thread, function, args)

    def tell(self, what: str, function: Callable[..., Any] | None, *args: Any) -> None:
        """Call a function without waiting for it; what it raises is logged."""
        if function is not None:
            task = asyncio.get_running_loop().create_task(self._tell(what, function, args), name=f"flintmq {what}")
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _tell(self, what: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            await self.call(function, *args)
        except Exception:
            logger.exception("%s: %s failed", self._name, what)

    async def close(self) -> None:
        """Take back the threads. What is under way there ends by itself, what is on the event loop is cancelled."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        if self._under_way:
            # Callbacks about the end itself should have been heard.
            _, late = await asyncio.wait(self._under_way, timeout=1.0)
            for task in late:
                task.cancel()
