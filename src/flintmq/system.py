"""The table of system calls: everything the broker asks of files, folders, sockets, the clock and chance.

A System makes these calls and does nothing else; errors are plain ``OSError``. Tests and simulations pass in another
one: it fails, is full, loses power after the n-th call, and the broker above it is the one that runs in production.
The calls that the kernel makes by itself (recv, send, pwritev on the message path) have their own table, which is
replaced with ``flintmq.kernel.replace_calls``.

Retries, order and threads are not its business: see ``broker.storage.disk``.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from flintmq import addresses

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None  # type: ignore[assignment]

__all__ = ["Buffer", "Clock", "System", "SystemClock", "shares_of_descriptors"]

Buffer = bytes | bytearray | memoryview

#: Descriptors for the files of messages: at most, and those that are enough of them where there are few in all.
_FOR_STORAGE, _ENOUGH_FOR_STORAGE = 4096, 400
#: Descriptors for all that is no connection, at least; and those of them that are not for files of messages.
_RESERVED, _FOR_OTHERS = 512, 112


def shares_of_descriptors() -> tuple[int, int]:
    """Return how many of the process's descriptors are for the files of storage, and how many for connections."""
    limit = 1 << 20
    if resource is not None and (soft := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) != resource.RLIM_INFINITY:
        limit = soft
    storage = max(min(_ENOUGH_FOR_STORAGE, limit // 4), min(_FOR_STORAGE, limit // 8))
    return storage, limit - min(max(_RESERVED, storage + _FOR_OTHERS), limit // 2)


class Clock(Protocol):
    """Time is passed in, so that tests can move it. Both are in nanoseconds."""

    def now(self) -> int:
        """Time since the machine started, sleep included: never steps back. Deadlines and delays count on it."""

    def wall(self) -> int:
        """Time since 1970: what a message's timestamp says. May step."""

    def boot_id(self) -> bytes:
        """16 bytes that are the same as long as ``now()`` counts from the same moment."""


class SystemClock:
    def __init__(self) -> None:
        # Called for every run and every publish: attributes, so that nothing stands between them and the system call.
        self.now: Callable[[], int] = functools.partial(
            time.clock_gettime_ns, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        )
        self.wall: Callable[[], int] = time.time_ns
        try:
            text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
            self._boot = bytes.fromhex(text)
        except (OSError, ValueError):
            # Unknown: then every start counts as a new boot, and delays go by the wall clock.
            self._boot = os.urandom(16)

    def boot_id(self) -> bytes:
        return self._boot


class System:
    """The system calls of this machine."""

    def __init__(self) -> None:
        self.clock: Clock = SystemClock()

    # --- Files -----------------------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes: fewer at the file's end, or because the system says so."""
        return os.pread(fd, size, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Return how many bytes were written: possibly not all."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def ftruncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def fallocate(self, fd: int, size: int) -> None:
        """Reserve the file's first ``size`` bytes on the disk, where the system offers that."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def lock(self, fd: int) -> None:
        """Lock an open file or folder for this process; BlockingIOError if another one has it."""
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    # --- Names -----------------------------------------------------------------------------------------------------

    def mkdir(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)

    def exists(self, path: Path) -> bool:
        """Is there such a file? OSError: nobody knows. ``Path.exists`` may say no then."""
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder; a file that has the new name already is replaced."""
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def free(self, path: Path) -> int:
        """Return the free bytes of the file system that ``path`` is on."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    # --- Sockets ---------------------------------------------------------------------------------------------------

    def listen(self, address: str, *, unix: bool = True, mode: int | None = None) -> socket.socket:
        """Return a listening, non-blocking socket, as ``addresses.bind`` does."""
        return addresses.bind(address, unix=unix, mode=mode)

    def accept(self, listener: socket.socket) -> socket.socket:
        """Return the next connection; BlockingIOError if there is none."""
        return listener.accept()[0]

    def epoll(self) -> select.epoll:
        return select.epoll()

    def cpus(self) -> int:
        """Return how many CPUs this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    # --- Chance and names ------------------------------------------------------------------------------------------

    def randbytes(self, size: int) -> bytes:
        return os.urandom(size)

    def hostname(self) -> str:
        return socket.gethostname()
