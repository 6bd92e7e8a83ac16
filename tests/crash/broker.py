"""A broker in a process of its own, on a data path that outlives it.

A BrokerProcess owns the process and what it writes to its log. It can be killed at any moment, also while it starts. It
knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections import deque
from pathlib import Path

#: A start after a kill may have much to read; a machine may be busy.
PATIENCE = 100.0

_LISTENING = re.compile(r"TCP: listening on (\S+):(\d+)")
_TROUBLE = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|Traceback")
# Part of the load: answers that came too late, after a message had timed out. And what a kill in the middle of a write
# leaves behind, which nobody was promised.
_EXPECTED = re.compile(r"client\([^)]*\): E_(FIN|REQ|TOUCH)_FAILED|were not written whole")


class BrokerFailed(Exception):
    """The broker did not start, or ended by itself."""


class BrokerProcess:
    """``await BrokerProcess.start(…)`` returns when clients can connect to ``address``."""

    def __init__(self, process: asyncio.subprocess.Process, spawned: float) -> None:
        self._process = process
        self._spawned = spawned
        self._tail: deque[str] = deque(maxlen=40)
        self._address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())
        self.address = ("", 0)
        #: From the start of the process until it listened.
        self.start_seconds = 0.0
        #: Lines of its log that tell of something wrong.
        self.troubles: list[str] = []

    @classmethod
    async def spawn(cls, data_path: Path, *flags: str) -> BrokerProcess:
        """Begin a start; ``listening`` waits for its end."""
        spawned = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "flintmq",
            "nsqd",
            "--tcp-address=127.0.0.1:0",
            "--http-address=127.0.0.1:0",
            "--https-address=",
            f"--data-path={data_path}",
            *flags,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        return cls(process, spawned)

    @classmethod
    async def start(cls, data_path: Path, *flags: str) -> BrokerProcess:
        broker = await cls.spawn(data_path, *flags)
        try:
            await broker.listening()
        except BaseException:
            await broker.kill()
            raise
        return broker

    async def listening(self) -> None:
        try:
            self.address = await asyncio.wait_for(asyncio.shield(self._address), PATIENCE)
        except TimeoutError:
            raise BrokerFailed(f"the broker did not listen within {PATIENCE:g} s:\n{self.log_tail()}") from None
        self.start_seconds = time.monotonic() - self._spawned

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self._tail.append(line)
            if not self._address.done() and (found := _LISTENING.search(line)):
                self._address.set_result((found[1], int(found[2])))
            elif _TROUBLE.search(line) and not _EXPECTED.search(line):
                self.troubles.append(line)
        if not self._address.done():
            self._address.set_exception(BrokerFailed(f"the broker ended before it listened:\n{self.log_tail()}"))
            # Whoever kills it while it starts does not ask for the address.
            self._address.exception()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def log_tail(self) -> str:
        return "\n".join(self._tail)

    async def kill(self) -> None:
        """kill -9; returns when the process is gone and its log is read."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reader

    async def stop(self) -> int:
        """A clean stop; the exit status."""
        if self.running:
            os.kill(self.pid, signal.SIGTERM)
        try:
            status = await asyncio.wait_for(self._process.wait(), PATIENCE)
        except TimeoutError:
            await self.kill()
            raise BrokerFailed(f"the broker did not stop within {PATIENCE:g} s:\n{self.log_tail()}") from None
        await self._reader
        return status

    def resident_bytes(self) -> int:
        """The memory it holds now."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise BrokerFailed("the system does not say how much memory the broker holds")
