"""Signals that end a program in order, for as many consumers as it has.

A signal has one handler per process, so consumers share it. It is installed for the first of them, and when the last
one has gone the handler from before is back. Handlers of an event loop (``loop.add_signal_handler``) are called too.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

__all__ = ["call_on", "is_shared"]


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
            signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)


_shared: dict[int, _Shared] = {}


def is_shared(number: int) -> bool:
    """Return whether the handler of a signal is ours at present."""
    return number in _shared and _shared[number].is_installed


def call_on(number: int, function: Callable[[], object]) -> Callable[[], None]:
    """Have a function called when a signal comes; the function that is returned ends it. Only for the main thread.

    It is called as every signal handler is, between any two instructions: ``loop.call_soon_threadsafe`` is safe there.
    """
    if not is_shared(number):
        _shared[number] = _Shared(number)
    shared = _shared[number]
    key = object()
    shared.functions[key] = function

    def release() -> None:
        if shared.functions.pop(key, None) is not None and not shared.functions:
            shared.restore()

    return release
