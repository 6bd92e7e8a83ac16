"""Work on large containers in slices: the event loop is handed back in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["Steps", "discard"]

#: What is awaited may never come, a read for lack of descriptors for example: it is asked for again, after seconds.
LOOK_AGAIN = 1.0
#: Objects that are freed before the loop is handed back.
FREE_AT_ONCE = 10_000


def discard(later: Callable[..., Any], spent: Sequence[dict[int, Any] | list[Any] | deque[Any]]) -> None:
    """Free containers that nobody uses any more. A million objects at once would hold the loop."""
    large = [container for container in spent if len(container) > FREE_AT_ONCE]
    if large:
        later(_free_some, later, large)


def _free_some(later: Callable[..., Any], large: list[Any]) -> None:
    container = large[-1]
    if isinstance(container, dict):
        for _ in range(min(FREE_AT_ONCE, len(container))):
            container.popitem()
    elif isinstance(container, deque):
        for _ in range(min(FREE_AT_ONCE, len(container))):
            container.pop()
    else:
        del container[-FREE_AT_ONCE:]
    if not container:
        large.pop()
    if large:
        later(_free_some, later, large)


class Steps:
    """Work that is done in slices, each in a loop turn of its own, or when what it waits for has come."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # Is the next step planned, or does it wait for something? Of those ever planned, which one is it?
        self._planned = False
        self._plans = 0

    def go_on(self) -> None:
        """There is something to do."""
        if not self._planned:
            self._broker.later(self._plan())

    def _rest(self, seconds: float) -> None:
        self._broker.store.delay(seconds, self._plan())

    def _wait(self, tell: Callable[[Callable[[], None]], None]) -> None:
        """Go on when ``tell`` calls back, or after a while: whichever comes first."""
        step = self._plan()
        self._broker.store.delay(LOOK_AGAIN, step)
        tell(step)

    def _plan(self) -> Callable[[], None]:
        """Return the next step. It is taken once, and not at all if another one is planned before."""
        self._planned = True
        self._plans += 1
        return partial(self._run, self._plans)

    def _run(self, plan: int) -> None:
        if self._planned and plan == self._plans:
            self._planned = False
            self._step()

    def _step(self) -> None:
        raise NotImplementedError
