"""A World: virtual time, one random generator, and the order in which everything happens.

A World owns the time, the events to come and the event loops of the simulated processes. It picks who runs next by its
seed, and moves the time when nobody has anything to do. With a ``tick`` turns take time too, and so do the calls of
processes that say so with ``pass_time``: what becomes due meanwhile happens in the middle of them. The same seed gives
the same run; ``trace`` is the hash of what was noted.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Busy", "NotYet", "Process", "Stuck", "World"]

#: Loop turns at one moment of virtual time; a program that needs more of them does not wait for anything.
_MOST_TURNS = 20_000
#: How deep things may happen inside one another.
_DEEPEST = 3


#: Above those of simulated machines, which have their own.
_FIRST_DESCRIPTOR = 3 << 29


class Stuck(AssertionError):
    """Nothing is left to happen, or the time is over, and the condition that was waited for is not true."""


class Busy(AssertionError):
    """A loop turns without end and never waits."""


class NotYet(Exception):
    """A thread cannot go on before others have finished."""


class Process(Protocol):
    """An event loop that the World steps."""

    def due(self) -> bool: ...
    def next_timer(self) -> int | None: ...
    def turn(self) -> None: ...


class Event:
    """Something that happens at a time, unless it is cancelled before."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action

    def cancel(self) -> None:
        self.action = None


class World:
    def __init__(self, seed: int | str, *, tick: int = 0) -> None:
        #: Nanoseconds that a turn takes.
        self.tick = tick
        #: Is a loop in its turn? Then none can be given another.
        self.turning = False
        self.trace = hashlib.blake2b(digest_size=8)
        self._depth = 0
        self.rng = random.Random(f"world {seed}")
        #: Nanoseconds.
        self.now = 1_000_000_000_000
        self.processes: list[Process] = []
        #: Whatever must not happen and did.
        self.violations: list[str] = []
        self.turns = 0
        self._events: list[tuple[int, int, Event]] = []
        self._order = itertools.count()
        self._descriptors: dict[int, Any] = {}
        #: Return the owner of a number, or None. It is asked more often than anything else: hence no method.
        self.descriptor = self._descriptors.get

    @property
    def seconds(self) -> float:
        return self.now / 1e9

    def after(self, seconds: float, action: Callable[[], object]) -> Event:
        event = Event(action)
        heapq.heappush(self._events, (self.now + max(0, round(seconds * 1e9)), next(self._order), event))
        return event

    def note(self, *words: object) -> None:
        """Something happened that must happen again with the same seed."""
        self.trace.update(repr((self.now, words)).encode())

    def violated(self, text: str) -> None:
        """Note what went wrong; the run goes on."""
        self.violations.append(f"at {self.seconds - 1000:.3f} s: {text}")

    # --- Descriptors: numbers that the real system does not know -----------------------------------------------------

    def open_descriptor(self, owner: Any) -> int:
        number = _FIRST_DESCRIPTOR
        while number in self._descriptors:
            number += 1
        self._descriptors[number] = owner
        return number

    def close_descriptor(self, number: int) -> None:
        del self._descriptors[number]

    def place_descriptor(self, number: int, owner: Any) -> None:
        """A machine has given this number to something of its own."""
        self._descriptors[number] = owner

    @property
    def descriptors(self) -> list[Any]:
        return list(self._descriptors.values())

    # --- Running -----------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], object], seconds: float = float("inf")) -> None:
        """Let things happen until something is true. Stuck if it is not after so many virtual seconds."""
        end = self.now + seconds * 1e9
        turns_now = 0
        while not until():
            due = [process for process in self.processes if process.due()]
            if due:
                turns_now += 1
                self.turns += 1
                if turns_now > _MOST_TURNS:
                    raise Busy(f"{turns_now} turns at {self.seconds - 1000:.3f} s")
                self.turning = True
                try:
                    (due[0] if len(due) == 1 else self.rng.choice(due)).turn()
                finally:
                    self.turning = False
                if self.tick:
                    self.pass_time(self.tick)
                continue
            while self._events and self._events[0][2].action is None:
                heapq.heappop(self._events)
            times = [when for process in self.processes if (when := process.next_timer()) is not None]
            if self._events:
                times.append(self._events[0][0])
            if not times:
                raise Stuck(f"nothing is left to happen at {self.seconds - 1000:.3f} s")
            soonest = max(min(times), self.now)
            if soonest > end:
                raise Stuck(f"not true after {seconds:g} s, at {end / 1e9 - 1000:.3f} s")
            if soonest > self.now:
                self.now = soonest
                turns_now = 0
            while self._events and self._events[0][0] <= self.now:
                action = heapq.heappop(self._events)[2].action
                if action is not None:
                    action()

    def pass_time(self, nanoseconds: int) -> None:
        """Time passes inside a call or a turn, and what is due happens."""
        self.now += nanoseconds
        if self._depth >= _DEEPEST or not self._events or self._events[0][0] > self.now:
            return
        self._depth += 1
        try:
            while self._events and self._events[0][0] <= self.now:
                action = heapq.heappop(self._events)[2].action
                if action is not None:
                    action()
        finally:
            self._depth -= 1

    def sleep(self, seconds: float) -> None:
        """A thread waits, and everybody else goes on; where that cannot be, only time passes."""
        if self.turning or self._depth >= _DEEPEST - 1:
            self.pass_time(round(min(seconds, 0.0001) * 1e9))
            return
        self._depth += 1
        try:
            self.run_for(seconds)
        finally:
            self._depth -= 1

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        over: list[None] = []
        self.after(seconds, lambda: over.append(None))
        self.run(lambda: over)
