"""NSQ's tools in processes: ours, and the Go ones where `scripts/peers` has built them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from support.peers import PEERS

__all__ = ["PATIENCE", "SIDES", "Program", "command", "run", "until"]

#: A guard against hanging, nowhere a measure.
PATIENCE = 60.0
SIDES = ("ours", "go")


def command(side: str, tool: str) -> list[str]:
    """The words that start a tool; the test is skipped where the Go one is missing."""
    if side == "ours":
        return [sys.executable, "-m", "flintmq", tool]
    path = PEERS / "bin" / tool
    if not os.access(path, os.X_OK):
        pytest.skip(f"no Go {tool} in $FLINTMQ_PEERS/bin or .peers/bin: run scripts/peers")
    return [str(path)]


def run(side: str, tool: str, *argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*command(side, tool), *argv], input=stdin, capture_output=True, timeout=PATIENCE)


def until(condition: Callable[[], object], what: str = "") -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what or "it never happened"
        time.sleep(0.01)


class Program:
    """A tool that runs until it is told to end. Its standard error is in a file."""

    def __init__(self, side: str, tool: str, argv: Sequence[str], folder: Path) -> None:
        self._log = folder / f"{tool}.{side}.log"
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen([*command(side, tool), *argv], stderr=log, stdout=log)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def end(self, number: int) -> int:
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)
