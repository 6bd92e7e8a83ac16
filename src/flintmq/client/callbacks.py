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
import queue
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from flintmq.errors import OptionError

__all__ = ["Calls", "Threads", "check", "is_asynchronous", "is_the_end", "result_of"]

logger = logging.getLogger(__name__)

#: Calls of one callback that may be under way; beyond them the events are only logged.
_MOST_UNDER_WAY = 100

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
        return await _from_thread(asyncio.wrap_future(returned))
    if inspect.isawaitable(returned):
        return await returned
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise TypeError("a generator was returned, whose code has not run")
    return returned


async def _from_thread(waited: asyncio.Future[Any]) -> Any:
    """Wait for a result that a thread gives. The event loop has run first whatever the thread had asked it to run."""
    if waited.done() and not waited.cancelled():
        # Since Python 3.14 a result that is there already is passed on at once, ahead of a message's touch().
        waited.exception()  # So that an exception is not called unseen where this wait is cancelled.
        await asyncio.sleep(0)
    return await waited


def _in_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except (StopIteration, SystemExit, KeyboardInterrupt) as exc:
        # No future can carry the first, and the others would end the event loop.
        raise RuntimeError(f"{type(exc).__name__} was raised: {exc}") from exc


def is_the_end(exc: RuntimeError) -> bool:
    """Tell whether a thread did not start because the program ends: since Python 3.12 `atexit` functions start none."""
    return "shutdown" in str(exc)


class Threads(ThreadPoolExecutor):
    """An executor of at most `count` daemon threads.

    Python's own pool has two habits that programs suffer from: it keeps a program from ending while a function runs, be
    it for ever, and it takes nothing once the program ends, so that an `atexit` function cannot resolve a host name.
    """

    def __init__(self, name: str, count: int) -> None:
        super().__init__(1)
        self._name = name
        self._most = count
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0
        self._is_closed = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> concurrent.futures.Future[_R]:
        future: concurrent.futures.Future[_R] = concurrent.futures.Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(result)

        with self._lock:
            if self._is_closed:
                raise RuntimeError("the threads were taken back")
            self._work.put(work)
            if self._idle:
                self._idle -= 1
                return future
            if self._started == self._most:
                return future
            try:
                self._start_one()
            except RuntimeError as exc:
                if not is_the_end(exc):
                    # A later thread must not run what the caller takes for refused.
                    future.cancel()
                    raise
                self._work.get_nowait()
            else:
                return future
        # The program ends, and there is no thread: the caller has nothing better to do than to wait.
        work()
        return future

    def _start_one(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}_{self._started}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system has no more. The threads that there are will do.
            if not self._started:
                raise
        else:
            self._started += 1

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # It would keep a message, or a connection, alive until the next one comes.
            del work
            with self._lock:
                self._idle += 1
        # For the next thread.
        self._work.put(None)

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Take nothing more. The functions that were submitted still run; nobody waits for them."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._work.put(None)


class Calls:
    """Calls functions of the user, plain ones in at most `threads` threads."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self._pool: Threads | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._told: Counter[str] = Counter()

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
            self._pool = Threads(f"flintmq-{self._name}", self._threads)
        loop = asyncio.get_running_loop()
        return await _from_thread(loop.run_in_executor(self._pool, _in_thread, function, args))

    def tell(self, what: str, function: Callable[..., Any] | None, *args: Any) -> None:
        """Call a function without waiting for it; what it raises is logged.

        A function that is slower than its events misses some: those beyond a hundred calls under way.
        """
        if function is None:
            return
        if self._told[what] >= _MOST_UNDER_WAY:
            logger.warning("%s: %s is too slow: not called with %s", self._name, what, args)
            return
        self._told[what] += 1
        task = asyncio.get_running_loop().create_task(self._tell(what, function, args), name=f"flintmq {what}")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _tell(self, what: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            await self.call(function, *args)
        except Exception:
            logger.exception("%s: %s failed", self._name, what)
        finally:
            self._told[what] -= 1

    async def close(self) -> None:
        """Take back the threads. What is under way there ends by itself, what is on the event loop is cancelled."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        # The caller may be one of them.
        others = self._under_way - {asyncio.current_task()}
        if others:
            # Callbacks about the end itself should have been heard.
            _, late = await asyncio.wait(others, timeout=1.0)
            for task in late:
                task.cancel()
