"""Numbered messages through a broker, by the C load generator: its mode ``flow``, seen from Python.

A Flow is one running generator. It reads the reports as they come, so that the generator never waits for us, and keeps
the newest one and the latencies since they were last taken. The account of the numbers is kept in C: see
``bench/load.c``.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

import msgspec
from bench.load import Mode

__all__ = ["Flow", "FlowFailed", "Latencies", "Reading", "in_words"]

#: Seconds in which a generator must have opened its connections, or ended when it was asked to.
PATIENCE = 240.0
#: As in load.c: 16 buckets for each power of two of nanoseconds.
_BUCKET_BITS = 4
_PER_POWER = 1 << _BUCKET_BITS
_BUCKETS = (64 - _BUCKET_BITS + 1) * _PER_POWER


class FlowFailed(Exception):
    """The generator ended with an error, which says what the broker did."""


def in_words(exc: BaseException) -> str:
    """Return what happened; of a group the first."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return f"{type(exc).__name__}: {exc}"


class Reading(msgspec.Struct, frozen=True):
    """One line of the generator: totals so far, and the latencies since the line before."""

    event: Literal["ready", "interval", "done"]
    connections: int
    #: Numbers that arrived, each counted once; on the lagging channel too.
    messages: int = 0
    lagging: int = 0
    #: Seconds of CLOCK_MONOTONIC, and of its own CPU.
    started: float = 0.0
    finished: float = 0.0
    cpu: float = 0.0
    published: int = 0
    answered: int = 0
    #: Due at the fixed rate, and left out because the consumers were too far behind.
    skipped: int = 0
    #: Numbers that arrived once more, and FINs that came after the message had timed out.
    again: int = 0
    late: int = 0
    #: Seconds.
    max: float = 0.0
    #: Of sub: deliveries that were not the first attempt; first attempts out of order; the spread over its connections.
    redelivered: int = 0
    disordered: int = 0
    least: int = 0
    most: int = 0
    #: Of idle: how many were answered.
    heartbeats: int = 0
    buckets: tuple[tuple[int, int], ...] = ()


class Latencies:
    """A histogram of times, exact to one part in 16."""

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * _BUCKETS))
        self.count = 0
        self.most = 0.0

    def add(self, buckets: Iterable[tuple[int, int]], most: float) -> None:
        for bucket, count in buckets:
            self._counts[bucket] += count
            self.count += count
        self.most = max(self.most, most)

    def merge(self, other: Latencies) -> None:
        self.add(((bucket, count) for bucket, count in enumerate(other._counts) if count), other.most)

    def quantile(self, share: float) -> float:
        """Return the seconds that this share of the messages did not exceed; 0 without messages."""
        left = share * self.count
        for bucket, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                return min(_upper_bound(bucket) * 1e-9, self.most)
        return 0.0


def _upper_bound(bucket: int) -> int:
    """The nanoseconds at which the next bucket begins."""
    if bucket < _PER_POWER:
        return bucket + 1
    power, part = divmod(bucket, _PER_POWER)
    return (_PER_POWER + part + 1) << (power - 1)


class Flow:
    """One generator. Leaving the ``async with`` block kills it, whatever it was doing."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ready = asyncio.Event()
        self._latencies = Latencies()
        self._reader = asyncio.create_task(self._read())
        self.last = Reading("ready", 0)

    @classmethod
    async def start(cls, binary: Path, port: int, mode: Mode = "flow", **options: int | str | bool) -> Self:
        """Start a generator, and wait until its connections stand."""
        words = [f"--mode={mode}", f"--port={port}"]
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            words.append(flag if value is True else f"{flag}={value}")
        process = await asyncio.create_subprocess_exec(
            *(str(binary), *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # A ctrl-C of the terminal is for us alone.
            process_group=0,
        )
        flow = cls(process)
        try:
            async with asyncio.timeout(PATIENCE):
                await flow._ready.wait()
                if flow._reader.done():
                    await flow._reader
        except BaseException:
            await flow.close()
            raise
        return flow

    async def _read(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            async for line in self._process.stdout:
                self.last = msgspec.json.decode(line, type=Reading)
                self._latencies.add(self.last.buckets, self.last.max)
                self._ready.set()
            errors = (await self._process.stderr.read()).decode(errors="replace").strip()
            if await self._process.wait() != 0:
                raise FlowFailed(errors or f"the load generator ended with status {self._process.returncode}")
        finally:
            self._ready.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def check(self) -> None:
        """Raise what it ended with, if it has ended with an error."""
        if self._reader.done():
            self._reader.result()

    def take_latencies(self) -> Latencies:
        """Return the latencies since the last call."""
        taken, self._latencies = self._latencies, Latencies()
        return taken

    async def stop(self) -> Reading:
        """Have it publish no more, and wait until everything has arrived; return its last report."""
        if self._process.returncode is None:
            self._process.terminate()
        return await self.result()

    async def result(self) -> Reading:
        """Wait for its end, and return its last report."""
        async with asyncio.timeout(PATIENCE):
            await asyncio.shield(self._reader)
        if self.last.event != "done":
            raise FlowFailed("the load generator ended without a report")
        return self.last

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        # What it ended with was raised where it was waited for.
        await asyncio.gather(self._reader, return_exceptions=True)
