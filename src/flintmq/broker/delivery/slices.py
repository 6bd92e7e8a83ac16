"""Work on large containers in slices: the event loop is handed back in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["discard"]

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
