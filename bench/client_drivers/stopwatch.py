"""What every driver measures: time, and the time that its own process had the processor."""

from __future__ import annotations

import time

Reading = dict[str, float]


class Stopwatch:
    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._processor = time.process_time()

    def read(self) -> Reading:
        return {"seconds": time.perf_counter() - self._start, "cpu": time.process_time() - self._processor}
