"""Every file call of log and journal, and the broker's only threads.

All storage goes through a Disk, so that a test can put another one in its place: one that fails, one that is full, one
that loses power after the n-th call. It knows nothing of what the bytes mean.

Work that may wait for the device (syncs, reads of what is no longer in memory, writes when the kernel throttles) is
handed to a few threads with ``submit``; the answer comes back on the event loop. Commits go before everything else.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "BACKGROUND",
    "COMMIT",
    "FETCH",
    "READ",
    "SPARE",
    "Clock",
    "Disk",
    "SystemClock",
    "pack_numbers",
    "unpack_numbers",
]

#: The order in which waiting work is taken up; ``FETCH`` is for those who read a log without being its channel. What
#: can be done without goes last: it has a thread for itself, which steps aside for everything else on the machine.
COMMIT, READ, BACKGROUND, FETCH, SPARE = 0, 1, 2, 3, 4

# writev takes at most 1024 buffers on Linux.
_MOST_BUFFERS = 1000
_THREADS = 4

Buffer = bytes | bytearray | memoryview


def pack_numbers(values: array[int] | bytes) -> bytes:
    """64-bit numbers as they stand in a file: little-endian, on every machine."""
    if sys.byteorder == "big":
        swapped = array("q", values)
        swapped.byteswap()
        return swapped.tobytes()
    return values if isinstance(values, bytes) else values.tobytes()


def unpack_numbers(data: bytes) -> array[int]:
    values = array("q", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


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


class Disk:
    """The real file system. Errors are plain ``OSError``."""

    def __init__(self) -> None:
        self._post: Callable[[Callable[[], None]], Any] | None = None
        self._work: list[tuple[int, int, Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []
        self._order = 0
        self._wake = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._stopping = False

    # --- Threads ---------------------------------------------------------------------------------------------------

    def attach(self, post: Callable[[Callable[[], None]], Any]) -> None:
        """``post`` runs a function on the event loop, called from any thread."""
        self._post = post

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], urgency: int = BACKGROUND
    ) -> None:
        """Run ``work`` in a thread, then ``done(result, error)`` on the event loop."""
        with self._wake:
            if self._stopping:
                raise RuntimeError("the disk was closed")
            if urgency == SPARE:
                self._start(f"flintmq-spare-{self._order}", functools.partial(self._serve_aside, work, done))
                return
            self._order += 1
            heapq.heappush(self._work, (urgency, self._order, work, done))
            if len(self._threads) < _THREADS and len(self._work) > 0:
                self._threads.append(self._start(f"flintmq-disk-{len(self._threads)}", self._serve))
            self._wake.notify()

    def _start(self, name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    @property
    def closing(self) -> bool:
        """No more work is taken; what is still to be done must be done at once."""
        return self._stopping

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._work:
                    if self._stopping:
                        return
                    self._wake.wait()
                _, _, work, done = heapq.heappop(self._work)
            self._do(work, done)

    def _serve_aside(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        if sys.platform == "linux":
            # Of this thread alone, there.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        self._do(work, done)

    def _do(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as exc:
            error = exc
        post = self._post
        if post is not None:
            # The loop may be gone when the broker is stopped the hard way: nobody waits for the answer then.
            with contextlib.suppress(RuntimeError):
                post(lambda: done(result, error))

    def refuse_work(self) -> None:
        """From here on ``closing``. Called on the loop: nobody there asks, and then submits, while ``close`` runs."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def close(self) -> None:
        """Finish what was submitted and end the threads. Answers still arrive, if the loop still runs."""
        self.refuse_work()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    # --- Files -----------------------------------------------------------------------------------------------------

    @property
    def direct(self) -> bool:
        """May files be written to without calling ``write``? Not where somebody has put another one in its place."""
        return type(self).write is Disk.write

    def open(self, path: Path, *, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        return os.open(path, flags, 0o600)

    def close_file(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all of it at ``offset``; how many bytes. On an error some may have been written: cut the file back."""
        if len(buffers) == 2:
            # A lone record: its header and its frames.
            size = len(buffers[0]) + len(buffers[1])
            if os.pwritev(fd, buffers, offset) == size:
                return size
        total = 0
        for i in range(0, len(buffers), _MOST_BUFFERS):
            some = list(buffers[i : i + _MOST_BUFFERS])
            left = sum(map(len, some))
            while left:
                n = os.pwritev(fd, some, offset + total)
                total += n
                left -= n
                if left:
                    # Cut off what went out and go on: a signal or a nearly full disk makes writes short.
                    while n >= len(some[0]):
                        n -= len(some.pop(0))
                    some[0] = memoryview(some[0])[n:]
        return total

    def read(self, fd: int, size: int, offset: int) -> bytes:
        data = os.pread(fd, size, offset)
        while data and len(data) < size:
            more = os.pread(fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """Make sure that ``size`` bytes can be written even when the disk is full, where the system offers that."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)

    def sync(self, fd: int) -> None:
        """Returns when the file's bytes are on the device."""
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    # --- Folders ---------------------------------------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        """Returns when the folder's entries are on the device: creations, renames, removals."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free(self, path: Path) -> int:
        """Free bytes on the file system that ``path`` is on."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize
