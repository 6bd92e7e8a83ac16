"""nsqd and nsqlookupd in processes of their own, to be killed and started again at the same addresses.

A Node owns two ports, which stay its own while it is down, the process of its present life, and what that writes to its
log. It knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flintmq.addresses import HeldPort, split
from flintmq.tools._fleet import end_with_parent

__all__ = ["PATIENCE", "Node", "NodeFailed", "awake", "patiently"]

#: Seconds for whatever must happen at last. A machine may be busy, or stand still for minutes: only those seconds count
#: in which we were awake ourselves.
PATIENCE = 100.0
_STEP = 0.25

_LISTENING = re.compile(r"(TCP|HTTP): listening on ")
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b")
# Part of the torture: nsqlookupds that are not there, answers after a message had timed out, a disk that is full for
# all brokers on it, and what a kill in the middle of a write leaves behind, which nobody was promised.
_EXPECTED = re.compile(
    r"LOOKUPD\([^)]*\): |no available nsqlookupd|client\([^)]*\): E_(FIN|REQ|TOUCH)_FAILED|were not written whole"
    r"|the disk is nearly full"
)

T = TypeVar("T")


async def patiently(work: Coroutine[Any, Any, T]) -> T:
    """Wait for something that must happen. TimeoutError if it does not within PATIENCE."""
    task = asyncio.create_task(work)
    try:
        for _ in range(round(PATIENCE / _STEP)):
            await asyncio.wait([task], timeout=_STEP)
            if task.done():
                return task.result()
    finally:
        task.cancel()
    raise TimeoutError(f"not within {PATIENCE:g} s")


async def awake(seconds: float) -> None:
    """Let so much time pass, as time passes for us."""
    for _ in range(round(seconds / _STEP)):
        await asyncio.sleep(_STEP)


class NodeFailed(Exception):
    """A node did not start, or did not stop."""


class Node:
    #: What was finished, and known to the broker to be so, stays finished when it is killed.
    keeps_finished = True

    def __init__(self, program: str, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self._program = program
        self._ports = [HeldPort(), HeldPort()]
        self.address, self.http_address = (port.address for port in self._ports)
        self._addresses = (f"--tcp-address={self.address}", f"--http-address={self.http_address}")
        #: Flags of the next start.
        self.flags = flags
        self._environment = {**os.environ, **environment} if environment else None
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._spawned = 0.0
        self._tail: deque[str] = deque(maxlen=40)
        #: Seconds from the start of the process until it listened, of each start.
        self.starts: list[float] = []
        #: Lines of its log that tell of something wrong, over all its lives.
        self.troubles: list[str] = []
        #: Something is done to this life that the broker may well report as an error.
        self.rough = False
        self.is_stopped = False
        #: Do lines of its log count as troubles?
        self.is_heard = True

    @property
    def endpoint(self) -> tuple[str, int]:
        return split(self.address)[:2]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def state(self) -> str:
        if not self.running:
            return "down"
        return "stopped" if self.is_stopped else "up" if self._listening.is_set() else "starting"

    async def spawn(self) -> None:
        """Begin a start; ``listening`` waits for its end."""
        self._listening = asyncio.Event()
        self._spawned = time.monotonic()
        self.rough = self.is_stopped = False
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flintmq", self._program, *self._addresses, *self.flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            # A ctrl-C of the terminal is for us alone.
            start_new_session=True,
            # No broker outlives a torture that is killed itself.
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
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
                    self.starts.append(time.monotonic() - self._spawned)
                    self._listening.set()
            elif not self.is_heard:
                pass
            elif "Traceback" in line or (not self.rough and _ERROR.search(line) and not _EXPECTED.search(line)):
                self.troubles.append(f"{self}: {line}")
        # Whoever waits for it should hear that it ended.
        await process.wait()
        self._listening.set()

    # --- What is done to it ------------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill(self) -> None:
        """kill -9; returns when the process is gone and its log is read."""
        if self._process is None or self._reader is None:
            return
        self.signal(signal.SIGKILL)
        await self._process.wait()
        await self._reader

    def freeze(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.is_stopped = False
        self.signal(signal.SIGCONT)

    def limit_descriptors(self, more: int | None) -> None:
        """Let the process open this many more files and sockets; None: as many as before."""
        if not self.running:
            return
        with contextlib.suppress(OSError):
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
            soft = hard if more is None else max(map(int, os.listdir(f"/proc/{self.pid}/fd"))) + 1 + more
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (min(soft, hard), hard))

    async def stop(self) -> int:
        """A clean stop; the exit status."""
        assert self._process is not None
        assert self._reader is not None
        self.signal(signal.SIGTERM)
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

    def resident_bytes(self) -> int:
        """The memory it holds now."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise NodeFailed("the system does not say how much memory the broker holds")

    def __str__(self) -> str:
        return f"{self._program} {self.address}"
