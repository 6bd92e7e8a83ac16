"""Work on large containers in slices: the event loop is handed back in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
        # Is the next step planned, or does it wait for something?
        self._planned = False

    def go_on(self) -> None:
        """There is something to do."""
        if not self._planned:
            self._planned = True
            self._broker.later(self._run)

    def _rest(self, seconds: float) -> None:
        self._planned = True
        self._broker.store.delay(seconds, self._run)

    def _wait(self, tell: Callable[[Callable[[], None]], None]) -> None:
        """Go on when ``tell`` calls back; a step too many does no harm."""
        tell(self._run)
        self._rest(LOOK_AGAIN)

    def _run(self) -> None:
        self._planned = False
        self._step()

    def _step(self) -> None:
        raise NotImplementedError
