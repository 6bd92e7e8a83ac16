"""Counters of a whole broker: connections, refused messages, messages of lanes, pauses of the garbage collector."""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass, field

from flintmq.system import Clock

__all__ = ["Counters", "Pauses"]

#: Pauses of the garbage collector that are remembered, as many as Go does.
_PAUSES = 256


class Pauses:
    """How long the garbage collector held everything up, the last times it ran."""

    def __init__(self) -> None:
        self._pauses: deque[int] = deque(maxlen=_PAUSES)
        self._began = 0

    def start(self) -> None:
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter_ns()
        else:
            self._pauses.append(time.perf_counter_ns() - self._began)

    def percentile(self, percent: int) -> int:
        """In ns, counted as Go counts it; 0 before the first."""
        pauses = sorted(self._pauses)
        return pauses[min(int(percent / 100 * len(pauses) + 0.5), len(pauses) - 1)] if pauses else 0


@dataclass
class Counters:
    """Counts of a whole broker since its start; topics, channels and sessions have their own."""

    #: When it started: in seconds since 1970, and by the clock that never steps.
    start_time: int = 0
    started: int = 0
    #: TCP connections.
    connection_count: int = 0
    #: Messages that could not be stored.
    refused_count: int = 0
    #: Messages published, and finished, through lanes.
    lane_published: int = 0
    lane_finished: int = 0
    #: Free space under the data path, at the last look.
    free_bytes: int = 0
    pauses: Pauses = field(default_factory=Pauses)

    def start(self, clock: Clock) -> None:
        self.start_time = clock.wall() // 1_000_000_000
        self.started = clock.now()
        self.pauses.start()

    def stop(self) -> None:
        self.pauses.stop()
