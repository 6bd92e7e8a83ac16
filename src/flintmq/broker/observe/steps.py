"""Reading a broker in steps, so that one with very many channels is not held up by somebody who looks at it.

A reading is a generator that yields the number of things it has looked at since it last did. ``at_once`` runs it to its
end; ``in_turns`` hands the event loop back each time ``SLICE`` things were looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from operator import attrgetter
from typing import TypeVar

__all__ = ["SLICE", "Steps", "at_once", "by_name", "in_turns"]

#: Topics, channels and clients that are read before the loop is handed back: a few milliseconds.
SLICE = 100

T = TypeVar("T")
#: A long piece of work that can be left alone after each step. Topics and channels may come and go in between.
Steps = Generator[int, None, T]


def at_once(steps: Steps[T]) -> T:
    """Run a reading to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


async def in_turns(steps: Steps[T]) -> T:
    """Run a reading to its end and return its result; others have their turn in between."""
    seen = 0
    while True:
        try:
            seen += next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if seen >= SLICE:
            seen = 0
            await asyncio.sleep(0)


def by_name(things: Iterable[T]) -> list[T]:
    """Return topics or channels in the order in which everything shows them."""
    return sorted(things, key=attrgetter("name"))
