"""A short past of the cluster, in bounded memory.

A ``History`` keeps series of numbers by kind and name: a row of numbers every two or ten seconds, for an hour, and for
some kinds a row of means every minute, for a day. Rows are kept in chunks of 32-bit floats; when all chunks together
would take more memory than allowed, the oldest chunk of all is dropped. A number that is not known is NaN inside, None
outside.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["FIELDS", "History"]

_TRAFFIC = ("published", "delivered", "depth", "in_flight", "deferred", "requeued", "timed_out")
FIELDS: Mapping[str, tuple[str, ...]] = {
    "cluster": _TRAFFIC,
    "node": (*_TRAFFIC, "disk_free"),
    "topic": _TRAFFIC,
    "channel": ("handed", *_TRAFFIC[1:]),
    "reader": ("lag", "throughput"),
    "query": ("lag", "rows_per_second", "batch_seconds"),
}
#: Seconds between two rows, and how many seconds are kept.
LEVELS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "cluster": ((2, 3600), (60, 86_400)),
    "node": ((2, 3600), (60, 86_400)),
    "topic": ((2, 3600), (60, 86_400)),
    "channel": ((10, 3600),),
    "reader": ((10, 3600),),
    "query": ((10, 3600),),
}
#: Rows of a chunk.
CHUNK_ROWS = 60
#: Bytes that a chunk takes beside its numbers.
OVERHEAD = 200
_NAN = math.nan


class _Chunk:
    __slots__ = ("first", "level", "values")

    def __init__(self, level: _Level, first: int) -> None:
        self.level = level
        #: The number of its first row: seconds since 1970 by the step.
        self.first = first
        self.values = array("f")


class _Level:
    """The rows of one thing in one step."""

    __slots__ = ("chunks", "keep", "pending", "step", "width")

    def __init__(self, step: int, span: int, width: int) -> None:
        self.step = step
        self.keep = span // step
        self.width = width
        self.chunks: deque[_Chunk] = deque()
        #: The row that is being made: its number, sums, and counts.
        self.pending: tuple[int, list[float], list[int]] | None = None


class Range(NamedTuple):
    start: float
    step: int
    series: dict[str, list[float | None]]


class History:
    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.bytes = 0
        self._things: dict[tuple[str, str], list[_Level]] = {}
        # All chunks, the oldest first.
        self._chunks: deque[_Chunk] = deque()

    def add(self, kind: str, name: str, at: float, values: Sequence[float | None]) -> None:
        """Note the numbers of a moment, in the order of FIELDS; ``at`` is in seconds since 1970."""
        levels = self._things.get((kind, name))
        if levels is None:
            levels = [_Level(step, span, len(FIELDS[kind])) for step, span in LEVELS[kind]]
            self._things[kind, name] = levels
        for level in levels:
            number = int(at // level.step)
            if level.pending is None or level.pending[0] != number:
                self._write(level)
                level.pending = (number, [0.0] * level.width, [0] * level.width)
            _, sums, counts = level.pending
            for i, value in enumerate(values):
                if value is not None:
                    sums[i] += value
                    counts[i] += 1

    def _write(self, level: _Level) -> None:
        if level.pending is None:
            return
        number, sums, counts = level.pending
        chunks = level.chunks
        if chunks:
            last = chunks[-1]
            end = last.first + len(last.values) // level.width
            if number < end:
                # The clock was set back. What is there stays.
                return
            if number < last.first + CHUNK_ROWS:
                last.values.extend([_NAN] * ((number - end) * level.width))
                last.values.extend(_row(sums, counts))
                return
        chunk = _Chunk(level, number)
        chunk.values.extend(_row(sums, counts))
        chunks.append(chunk)
        self._chunks.append(chunk)
        self.bytes += _size(chunk)
        while len(chunks) > 1 and chunks[1].first <= number - level.keep:
            self._drop_first(level)
        while self.bytes > self._most and self._chunks:
            oldest = self._chunks.popleft()
            if oldest.level.chunks and oldest.level.chunks[0] is oldest:
                oldest.level.chunks.popleft()
                self.bytes -= _size(oldest)
        # What a level has let go by itself is skipped when its turn comes; not too many of those.
        while self._chunks and self._is_gone(self._chunks[0]):
            self._chunks.popleft()

    def _drop_first(self, level: _Level) -> None:
        self.bytes -= _size(level.chunks.popleft())

    @staticmethod
    def _is_gone(chunk: _Chunk) -> bool:
        return not chunk.level.chunks or chunk.first < chunk.level.chunks[0].first

    def forget(self, now: float) -> None:
        """Drop things of which nothing was noted for as long as anything of them is kept."""
        for key, levels in list(self._things.items()):
            if all(level.pending is None or level.pending[0] < now // level.step - level.keep for level in levels):
                for level in levels:
                    while level.chunks:
                        self._drop_first(level)
                del self._things[key]

    def __len__(self) -> int:
        """How many things are known."""
        return len(self._things)

    def last(self, kind: str, name: str, field: str, before: float) -> float | None:
        """The number of the latest row not after a time; None if there is none."""
        levels = self._things.get((kind, name))
        if not levels:
            return None
        level, column = levels[0], FIELDS[kind].index(field)
        number = int(before // level.step)
        for chunk in reversed(level.chunks):
            if chunk.first <= number:
                row = min(number - chunk.first, len(chunk.values) // level.width - 1)
                value = chunk.values[row * level.width + column]
                return None if math.isnan(value) else value
        return None

    def read(self, kind: str, name: str, now: float, seconds: int, points: int, fields: Sequence[str] = ()) -> Range:
        """The last ``seconds`` of a thing, in at most ``points`` steps, each the mean of what it covers."""
        wanted = tuple(fields) or FIELDS[kind]
        levels = self._things.get((kind, name))
        steps = LEVELS[kind]
        index = next((i for i, (_, span) in enumerate(steps) if span >= seconds), len(steps) - 1)
        step, span = steps[index]
        stop = int(now // step) + 1
        first = stop - min(seconds, span) // step
        factor = max(1, math.ceil((stop - first) / max(1, points)))
        # Steps begin at whole multiples, so that points do not wander from one answer to the next.
        first -= first % factor
        count = math.ceil((stop - first) / factor)
        result = Range(first * step, step * factor, {})
        rows: dict[int, Any] = {}
        if levels is not None:
            level = levels[index]
            for chunk in level.chunks:
                here = len(chunk.values) // level.width
                for row in range(max(0, first - chunk.first), min(here, stop - chunk.first)):
                    rows[chunk.first + row] = (chunk.values, row * level.width)
            if level.pending is not None and first <= level.pending[0] < stop:
                rows[level.pending[0]] = (_row(level.pending[1], level.pending[2]), 0)
        for field in wanted:
            column = FIELDS[kind].index(field)
            series: list[float | None] = []
            if levels is None:
                result.series[field] = series
                continue
            for i in range(count):
                total, known = 0.0, 0
                for number in range(first + i * factor, first + (i + 1) * factor):
                    found = rows.get(number)
                    if found is not None and not math.isnan(value := found[0][found[1] + column]):
                        total += value
                        known += 1
                series.append(round(total / known, 3) if known else None)
            result.series[field] = series
        return result


def _row(sums: Sequence[float], counts: Sequence[int]) -> list[float]:
    return [total / count if count else _NAN for total, count in zip(sums, counts, strict=True)]


def _size(chunk: _Chunk) -> int:
    return CHUNK_ROWS * chunk.level.width * 4 + OVERHEAD
