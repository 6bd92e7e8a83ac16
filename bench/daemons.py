"""The daemons under test: how each side is started, watched through /proc, and stopped.

A Side is a recipe (our broker, or the peer); a Daemon is one running process of it with its own ports and data folder.
Nothing here needs HTTP: channels are made by SUB, and what the process costs is read from the kernel.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .errors import BenchError, StartError

MEM_QUEUE_SIZE = 2_000_000
MEM_QUEUE_BYTES = 2 << 30
START_TIMEOUT = 30.0
# Data that nobody will read again may be flushed for this long; then the process is killed.
THROW_AWAY_GRACE = 5.0
CLEAN_STOP_GRACE = 180.0
SETTLE_TIMEOUT = 120.0
START_ATTEMPTS = 3
# Our broker begins to import its general HTTP server a tenth of a second after its start.
AFTER_START = 0.3

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
_IDENTIFY_BODY = b'{"feature_negotiation":true}'
_HELLO = b"  V2IDENTIFY\n" + struct.pack(">I", len(_IDENTIFY_BODY)) + _IDENTIFY_BODY


@dataclass(frozen=True)
class Side:
    """How to start one of the two daemons.

    ``{flags}`` in the command stands for the flags that every NSQ daemon knows, ``{durability}`` for those that only
    ours has. A command without ``{flags}`` gets them at its end. The peer keeps everything in memory
    (``--mem-queue-size``); ours, and a peer that is another version of it, runs as it is installed, except where a
    scenario is about memory.
    """

    name: str
    command: tuple[str, ...]
    durability: str

    @classmethod
    def ours(cls, command: str | None, durability: str) -> Side:
        if command is None:
            return cls("ours", (sys.executable, "-m", "flintmq", "nsqd", "{flags}", "{durability}"), durability)
        return cls("ours", tuple(shlex.split(command)), durability)

    @classmethod
    def peer(cls, path: str, durability: str) -> Side:
        side = cls("peer", (path, "{flags}"), "")
        if "flintmq" in (side.version() or ""):
            # Another version of ours: it runs as ours does, or the two would be measured at different work.
            return cls("peer", (path, "{flags}", "{durability}"), durability)
        return side

    def arguments(self, flags: list[str], in_memory: bool, mem_queue_size: int | None = None) -> list[str]:
        words = self.command if "{flags}" in self.command else (*self.command, "{flags}")
        if mem_queue_size is not None:
            flags = [*flags, f"--mem-queue-size={mem_queue_size}"]
        elif "{durability}" not in self.command or in_memory or self.durability == "memory":
            flags = [*flags, f"--mem-queue-size={MEM_QUEUE_SIZE}"]
            if "{durability}" in self.command:
                flags.append(f"--mem-queue-bytes={MEM_QUEUE_BYTES}")
        arguments: list[str] = []
        for word in words:
            if word == "{flags}":
                arguments += flags
            else:
                arguments.append(word.replace("{durability}", f"--durability={self.durability}"))
        return arguments

    def version(self) -> str | None:
        """What ``--version`` prints, or None where that does not work."""
        program = [word for word in self.command if word not in ("{flags}", "{durability}")]
        try:
            answer = subprocess.run([*program, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() or None if answer.returncode == 0 else None


class Daemon:
    """One running daemon that has answered an IDENTIFY."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, http_port: int, ready_seconds: float, log: Path
    ) -> None:
        self.port = port
        self.http_port = http_port
        self.ready_seconds = ready_seconds
        self._process = process
        self._log = log

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        """Return the user and system time of all its threads so far, also of those that have ended."""
        # The ticks in /proc are 10 ms each: a tenth of a whole run of consuming. The clock of the process is exact.
        return time.clock_gettime(cpu_clock(self._process.pid))

    def rss_bytes(self) -> int:
        return int(self._proc("statm").split()[1]) * PAGE_SIZE

    def bytes_read(self) -> int:
        """Return the bytes that its reads of files returned so far, whether a device or the page cache had them.

        Sockets count where they are read with read(2), as in Go, and not where it is recv(2).
        """
        return int(dict(line.split(": ") for line in self._proc("io").splitlines())["rchar"])

    def settle(self) -> None:
        """Wait until it has nothing left to do, such as moving messages from a topic to its channel."""
        settle(self.cpu_seconds)

    def started(self) -> None:
        """Wait until it has done all that belongs to its start: ours goes on importing for a while."""
        time.sleep(AFTER_START)
        self.settle()

    def create_channel(self, topic: str, channel: str) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=START_TIMEOUT) as connection:
            connection.sendall(b"  V2" + f"SUB {topic} {channel}\n".encode())
            answer = _read_frame(connection)
            if answer != b"\0\0\0\0OK":
                raise BenchError(f"SUB {topic} {channel} was answered with {answer!r}")

    def stop(self, grace: float) -> bool:
        """SIGTERM, then SIGKILL when the grace is over. True if it stopped by itself with status 0."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(grace)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also when an impatient second ctrl-C ends the waiting: never leave a daemon behind.
            self._process.kill()
            self._process.wait()
        return self._process.returncode == 0

    def last_words(self) -> str:
        """The end of what it logged, if it died on its own."""
        if self._process.poll() is None:
            return ""
        return f"\nthe daemon ended with status {self._process.returncode}:\n{tail(self._log)}"

    def _proc(self, name: str) -> str:
        try:
            return Path(f"/proc/{self._process.pid}/{name}").read_text()
        except (FileNotFoundError, ProcessLookupError) as exc:
            raise BenchError("the daemon is gone") from exc


@contextmanager
def data_folder() -> Iterator[Path]:
    """A folder for one run; it is gone afterwards, also after ctrl-C."""
    folder = Path(tempfile.mkdtemp(prefix="flintmq-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running(side: Side, folder: Path, in_memory: bool = False, mem_queue_size: int | None = None) -> Iterator[Daemon]:
    """Start a daemon on a data folder and stop it at the end, whatever happened in between."""
    daemon = _start(side, folder, in_memory, mem_queue_size)
    try:
        yield daemon
    except BenchError as exc:
        raise type(exc)(f"{exc}{daemon.last_words()}") from exc
    finally:
        daemon.stop(THROW_AWAY_GRACE)


@contextmanager
def fresh(
    side: Side,
    in_memory: bool = False,
    *,
    mem_queue_size: int | None = None,
    channels: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Daemon]:
    """Start a daemon on an empty data folder and wait until it rests.

    ``in_memory``: ours too keeps all in memory. ``mem_queue_size``: both keep this many messages there instead.
    ``channels``: the names of the channels of each topic that it begins with.
    """
    with data_folder() as folder:
        if channels:
            _write_metadata(folder, channels)
        with running(side, folder, in_memory, mem_queue_size) as daemon:
            # Ours imports its general HTTP server behind the first answers: that is no message's cost.
            daemon.settle()
            yield daemon


def _write_metadata(folder: Path, channels: Mapping[str, Sequence[str]]) -> None:
    """Write the nsqd.dat that a Go daemon would have left; ours takes it over.

    Creating channels one by one takes minutes where there are thousands: the Go daemon writes this file at each one.
    """
    topics = [
        {"name": topic, "paused": False, "channels": [{"name": name, "paused": False} for name in names]}
        for topic, names in channels.items()
    ]
    data = folder / "data"
    data.mkdir()
    (data / "nsqd.dat").write_text(json.dumps({"version": "1.3.0", "topics": topics}))


def _start(side: Side, folder: Path, in_memory: bool, mem_queue_size: int | None) -> Daemon:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    log = folder / "log"
    # Somebody else may take a port between our finding it free and the daemon's bind: then try others.
    for _ in range(START_ATTEMPTS):
        tcp_port, http_port = free_ports()
        flags = [
            f"--tcp-address=127.0.0.1:{tcp_port}",
            f"--http-address=127.0.0.1:{http_port}",
            f"--data-path={data}",
            "--max-rdy-count=2500",
            "--log-level=error",
        ]
        before = time.monotonic()
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    side.arguments(flags, in_memory, mem_queue_size),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
            except OSError as exc:
                raise StartError(f"{side.name} cannot be started: {exc}") from exc
        daemon = Daemon(process, tcp_port, http_port, 0.0, log)
        try:
            while process.poll() is None and time.monotonic() < before + START_TIMEOUT:
                if _answers(tcp_port):
                    daemon.ready_seconds = time.monotonic() - before
                    return daemon
                time.sleep(0.001)
        except BaseException:
            daemon.stop(0.0)
            raise
        if process.poll() is None:
            daemon.stop(0.0)
            raise StartError(f"{side.name} did not answer within {START_TIMEOUT:.0f} s:\n{tail(log)}")
    command = shlex.join(side.arguments(flags, in_memory, mem_queue_size))
    raise StartError(f"{side.name} does not start: {command}\n{tail(log)}")


def _answers(port: int) -> bool:
    """Ready means more than an open port: IDENTIFY is answered."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=START_TIMEOUT) as connection:
            connection.sendall(_HELLO)
            return len(_read_frame(connection)) > 4
    except OSError:
        return False


def _read_frame(connection: socket.socket) -> bytes:
    """The type and payload of one frame; empty or cut short if the daemon hangs up."""
    with connection.makefile("rb") as stream:
        size = int.from_bytes(stream.read(4), "big")
        return stream.read(size)


def end_in_order_on_sigterm() -> None:
    """Clean up after a plain kill as after ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def settle(cpu_seconds: Callable[[], float]) -> None:
    """Wait until processes with this CPU time rest."""
    deadline = time.monotonic() + SETTLE_TIMEOUT
    quiet = 0
    before = cpu_seconds()
    while quiet < 2:
        time.sleep(0.2)
        after = cpu_seconds()
        quiet = quiet + 1 if after - before <= 0.02 else 0
        before = after
        if time.monotonic() > deadline:
            raise BenchError(f"the daemon was still busy after {SETTLE_TIMEOUT:.0f} s")


def cpu_clock(pid: int) -> int:
    """Return the id of a process's CPU clock (what clock_getcpuclockid gives; Python has it for threads only)."""
    return (~pid << 3) | 2


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-10:])
