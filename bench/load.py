"""The load generator as seen from Python: compile ``load.c`` once, run it, read its report.

What it does on the wire is described at the top of ``load.c``. Here are only its command line and its JSON lines.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, NoReturn, Self

import msgspec

from .errors import BenchError, StartError

Mode = Literal["mpub", "pub", "sub", "latency", "idle", "hmpub", "hpub", "connect", "flow"]

SOURCE = Path(__file__).with_name("load.c")
COMPILER_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")


class Report(msgspec.Struct, frozen=True):
    """One JSON line of the load generator. Times are CLOCK_MONOTONIC seconds, the clock of ``time.monotonic()``."""

    event: Literal["ready", "done"]
    connections: int
    # In every final report.
    messages: int = 0
    started: float = 0.0
    finished: float = 0.0
    cpu: float = 0.0
    # sub: how many were not a first attempt; how many first attempts had an id that is not above the last one of their
    # connection; the first message; when 95 % had arrived, and how many those were; the spread over its connections.
    redelivered: int = 0
    disordered: int = 0
    first: float = 0.0
    marked: float = 0.0
    marked_messages: int = 0
    least: int = 0
    most: int = 0
    # latency, in seconds.
    p50: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    max: float = 0.0

    @property
    def rate(self) -> float:
        """Messages per second from the first request to the last answer."""
        return self.messages / (self.finished - self.started)

    @property
    def busy(self) -> float:
        """The share of one core that the generator itself used: near 1, it is what was measured."""
        return self.cpu / max(self.finished - self.started, 1e-9)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flintmq-bench"


def build() -> Path:
    """The compiled generator; its file name carries a hash of source and compiler, so that a change builds anew."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    key = hashlib.sha256(repr((compiler, COMPILER_FLAGS)).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    binary = cache_folder() / f"load-{key}"
    if binary.exists():
        return binary
    try:
        binary.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
            fresh = Path(folder) / "load"
            command = [*compiler, *COMPILER_FLAGS, "-o", str(fresh), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            # Two benchmarks may build at once: each renames a whole file into place.
            fresh.replace(binary)
    except subprocess.CalledProcessError as exc:
        raise StartError(f"the load generator does not compile:\n{exc.stderr}") from exc
    except OSError as exc:
        raise StartError(f"the load generator cannot be built (a C compiler is needed): {exc}") from exc
    return binary


class Load:
    """One running load generator. Leaving the ``with`` block ends it, whatever it was doing."""

    def __init__(self, binary: Path, mode: Mode, port: int, **options: int | str | bool) -> None:
        self.mode = mode
        command = [str(binary), f"--mode={mode}", f"--port={port}"]
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                command.append(flag)
            elif value is not False:
                command.append(f"{flag}={value}")
        # Its own process group: ctrl-C is for the benchmark, which then ends its children in order.
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._stdout.close()
        self._stderr.close()

    def ready(self) -> Report:
        """Wait until all connections stand (sub and idle)."""
        line = self._stdout.readline()
        if not line:
            self._fail()
        return self._decode(line)

    def stop(self) -> Report:
        """Ask sub or idle to end now, and return their report."""
        self._process.terminate()
        return self.result()

    def result(self) -> Report:
        """Wait for the end. The generator limits its own time, so this cannot hang."""
        # Not communicate(): it would miss what readline() in ready() has already read ahead.
        lines = self._stdout.read().splitlines()
        if self._process.wait() != 0:
            self._fail()
        return self._decode(lines[-1])

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def _stderr(self) -> IO[str]:
        assert self._process.stderr is not None
        return self._process.stderr

    @staticmethod
    def _decode(line: str) -> Report:
        return msgspec.json.decode(line, type=Report)

    def _fail(self) -> NoReturn:
        errors = self._stderr.read().strip()
        raise BenchError(f"{self.mode}: {errors or f'status {self._process.wait()}'}")
