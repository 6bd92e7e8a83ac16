"""nsqd and nsqlookupd in processes of their own, to be killed and started again at the same addresses.

A Node owns two ports, which stay its own while it is down, the process of its present life, and what that writes to its
log. It knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from flintmq.testing.nodes import HeldPort

#: Seconds for whatever must happen at last. A machine may be busy, or stand still for minutes: only those seconds count
#: in which we were awake ourselves.
PATIENCE = 100.0
_STEP = 0.25

_LISTENING = re.compile(r"(TCP|HTTP): listening on ")
_TROUBLE = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|Traceback")
# Part of the torture: nsqlookupds that are not there, answers after a message had timed out, and what a kill in the
# middle of a write leaves behind, which nobody was promised.
_EXPECTED = re.compile(
    r"LOOKUPD\([^)]*\): |no available nsqlookupd|client\([^)]*\): E_(FIN|REQ|TOUCH)_FAILED|were not written whole"
)


T = TypeVar("T")


async def patiently(work: Coroutine[Any, Any, T]) -> T:
    """Wait for something that must happen. TimeoutError if it does not within PATIENCE."""
    task = asyncio.create_task(work)
    for _ in range(round(PATIENCE / _STEP)):
        await asyncio.wait([task], timeout=_STEP)
        if task.done():
            return task.result()
    task.cancel()
    raise TimeoutError(f"not within {PATIENCE:g} s")


async def awake(seconds: float) -> None:
    """Let so much time pass, as time passes for us."""
    for _ in range(round(seconds / _STEP)):
        await asyncio.sleep(_STEP)


class NodeFailed(Exception):
    """A node did not start, or did not stop."""


class Node:
    def __init__(self, program: str, *flags: str) -> None:
        self._program = program
        self._ports = [HeldPort(), HeldPort()]
        self.address, self.http_address = (port.address for port in self._ports)
        self._flags = (f"--tcp-address={self.address}", f"--http-address={self.http_address}", *flags)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._tail: deque[str] = deque(maxlen=40)
        #: Lines of its log that tell of something wrong, over all its lives.
        self.troubles: list[str] = []

    async def spawn(self) -> None:
        """Begin a start; ``listening`` waits for its end."""
        self._listening = asyncio.Event()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flintmq", self._program, *self._flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def listening(self) -> None:
        try:
            await patiently(self._listening.wait())
        except TimeoutError:
            raise NodeFailed(f"{self} did not listen within {PATIENCE:g} s:\n{self.log_tail()}") from None
        if not self.running:
            raise NodeFailed(f"{self} ended before it listened:\n{self.log_tail()}")

    async def start(self) -> None:
        await self.spawn()
        await self.listening()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        heard: set[str] = set()
        async for raw in process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self._tail.append(line)
            if found := _LISTENING.search(line):
                heard.add(found[1])
                if len(heard) == 2:
                    self._listening.set()
            elif _TROUBLE.search(line) and not _EXPECTED.search(line):
                self.troubles.append(f"{self}: {line}")
        # Whoever waits for it should hear that it ended.
        await process.wait()
        self._listening.set()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def kill(self) -> None:
        """kill -9; returns when the process is gone and its log is read."""
        if self._process is None or self._reader is None:
            return
        if self.running:
            os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reader

    async def stop(self) -> int:
        """A clean stop; the exit status."""
        assert self._process is not None
        assert self._reader is not None
        if self.running:
            os.kill(self._process.pid, signal.SIGTERM)
        try:
            status = await patiently(self._process.wait())
        except TimeoutError:
            raise NodeFailed(f"{self} did not stop within {PATIENCE:g} s:\n{self.log_tail()}") from None
        await self._reader
        return status

    async def close(self) -> None:
        await self.kill()
        for port in self._ports:
            port.close()

    def log_tail(self) -> str:
        return "\n".join(self._tail)

    def __str__(self) -> str:
        return f"{self._program} {self.address}"


def lookupd() -> Node:
    return Node("nsqlookupd", "--broadcast-address=127.0.0.1")


def nsqd(number: int, data_path: Path, lookupds: list[Node], *flags: str) -> Node:
    data_path.mkdir()
    return Node(
        "nsqd",
        f"--data-path={data_path}",
        f"--node-id={number}",
        "--max-heartbeat-interval=2h",
        "--broadcast-address=127.0.0.1",
        *(f"--lookupd-tcp-address={lookupd.address}" for lookupd in lookupds),
        *flags,
    )
