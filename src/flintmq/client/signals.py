"""Signals that end a program in order, for as many consumers as it has.

A signal has one handler per process, so consumers share it. It is installed for the first of them, and when the last
one has gone the handler from before is back. Handlers of an event loop (``loop.add_signal_handler``) are called too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

__all__ = ["call_on_interrupt", "calling_on"]


class _Shared:
    """One signal, and the functions to call when it comes."""

    def __init__(self, number: int) -> None:
        self.functions: dict[object, Callable[[], object]] = {}
        self._number = number
        self._handler = self._called
        self._before = signal.signal(number, self._handler)

    @property
    def is_installed(self) -> bool:
        return signal.getsignal(self._number) is self._handler

    def _called(self, number: int, frame: object) -> None:
        for function in list(self.functions.values()):
            # An event loop may have been closed without a word to us.
            with contextlib.suppress(RuntimeError):
                function()

    def restore(self) -> None:
        """Bring back the handler from before, unless somebody else has replaced ours."""
        if self.is_installed:
            before = signal.SIG_DFL if self._before is None else self._before
            task = _task_of(before)
            if task is not None and task.done():
                # asyncio.run is over and has found ours instead of its own: it could not put this one back.
                before = signal.default_int_handler
            signal.signal(self._number, before)


_shared: dict[int, _Shared] = {}


@contextlib.contextmanager
def calling_on(numbers: Iterable[int], function: Callable[[], object]) -> Iterator[None]:
    """Have a function called on the running event loop when one of these signals comes.

    Only the main thread can have signals; elsewhere it is never called.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as caught:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                caught.callback(_share(number, lambda: loop.call_soon_threadsafe(function)))
        yield


def call_on_interrupt(function: Callable[[], object]) -> Callable[[], None] | None:
    """Have ctrl-C call a function once, where it would cancel this very task; the second ctrl-C is as ever.

    The function that is returned takes it back. None where ctrl-C means something else.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    # Shared: another consumer of this program catches it, and should not be the only one that stops.
    if not _is_shared(signal.SIGINT) and not _is_for_this_task():
        return None
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        release()
        loop.call_soon_threadsafe(function)

    release = _share(signal.SIGINT, interrupt)
    return release


def _is_shared(number: int) -> bool:
    return number in _shared and _shared[number].is_installed


def _is_for_this_task() -> bool:
    """Whether ctrl-C would cancel the current task, as the main one of ``asyncio.run``."""
    task = _task_of(signal.getsignal(signal.SIGINT))
    return task is not None and task is asyncio.current_task()


def _task_of(handler: object) -> asyncio.Task[object] | None:
    """Return the main task of ``asyncio.run``, if this is its handler of ctrl-C."""
    if isinstance(handler, functools.partial) and isinstance(getattr(handler.func, "__self__", None), asyncio.Runner):
        task: asyncio.Task[object] | None = handler.keywords.get("main_task")
        return task
    return None


def _share(number: int, function: Callable[[], object]) -> Callable[[], None]:
    """Have a function called when a signal comes, between any two instructions; return what takes it back."""
    if not _is_shared(number):
        _shared[number] = _Shared(number)
    shared = _shared[number]
    key = object()
    shared.functions[key] = function

    def release() -> None:
        if shared.functions.pop(key, None) is not None and not shared.functions:
            shared.restore()

    return release
