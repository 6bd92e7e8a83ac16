"""Files as log and journal use them, and the broker's only threads.

A Disk turns system calls into whole operations: a write that goes on where a short one stopped, a synced folder.
It makes them through a ``System``, so that a test can put another one underneath: one that fails, one that is full, one
that loses power after the n-th call. The kernel writes to the same descriptors. A Disk knows nothing of what the bytes
mean.

Work that may wait for the device (syncs, reads of what is no longer in memory, writes when the kernel throttles) is
handed to a few threads with ``submit``; the answer comes back on the event loop. Commits go before everything else.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flintmq.errors import StorageError
from flintmq.system import Buffer, Clock, System, SystemClock

__all__ = [
    "BACKGROUND",
    "COMMIT",
    "FETCH",
    "NO_ROOM",
    "READ",
    "SPARE",
    "Clock",
    "Disk",
    "SystemClock",
    "pack_numbers",
    "start_needs",
    "unpack_numbers",
]

#: The order in which waiting work is taken up; ``FETCH`` is for those who read a log without being its channel. What
#: can be done without goes last: it has a thread for itself, which steps aside for everything else on the machine.
COMMIT, READ, BACKGROUND, FETCH, SPARE = 0, 1, 2, 3, 4

# writev takes at most 1024 buffers on Linux.
_MOST_BUFFERS = 1000
_THREADS = 4


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


#: There is no room, or no more of it for this user.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def start_needs(path: Path, size: int) -> Iterator[None]:
    """Say what to do when a start finds no room for the ``size`` bytes that it must write to a file."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in NO_ROOM:
            raise
        raise StorageError(
            f"cannot write {path}: {exc.strerror}, {size} bytes are needed. Nothing is lost: free some space, then "
            "start again"
        ) from exc


class Disk:
    """Files and folders, and threads for what may wait. Errors are plain ``OSError``."""

    def __init__(self, system: System | None = None) -> None:
        self.system = system or System()
        self._post: Callable[[Callable[[], None]], Any] | None = None
        self._work: list[tuple[int, int, Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []
        self._order = 0
        self._wake = threading.Condition()
        self._threads: list[threading.Thread] = []
        #: The broker stops: publishers wait for their last answers, so no log leaves a write to a thread any more.
        self.in_a_hurry = False
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
            if len(self._threads) < _THREADS:
                try:
                    self._threads.append(self._start(f"flintmq-disk-{len(self._threads)}", self._serve))
                except RuntimeError:
                    if not self._threads:
                        raise
                    # Those that there are take longer.
            self._order += 1
            heapq.heappush(self._work, (urgency, self._order, work, done))
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

    def open(self, path: Path, *, create: bool = False) -> int:
        return self.system.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0))

    def spare_descriptor(self, folder: Path) -> int:
        """Open a descriptor that is of no use but to be closed when one is needed."""
        return self.system.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def close_file(self, fd: int) -> None:
        self.system.close(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all of it at ``offset``; how many bytes. On an error some may have been written: cut the file back."""
        pwritev = self.system.pwritev
        if len(buffers) == 2:
            # A lone record: its header and its frames.
            left = len(buffers[0]) + len(buffers[1])
            total = pwritev(fd, buffers, offset)
            if total == left:
                return total
            buffers = _rest(buffers, total)
        else:
            total = 0
        for i in range(0, len(buffers), _MOST_BUFFERS):
            some = buffers[i : i + _MOST_BUFFERS]
            left = sum(map(len, some))
            while left:
                n = pwritev(fd, some, offset + total)
                total += n
                left -= n
                if left:
                    some = _rest(some, n)
        return total

    def read(self, fd: int, size: int, offset: int) -> bytes:
        pread = self.system.pread
        data = pread(fd, size, offset)
        while data and len(data) < size:
            more = pread(fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def truncate(self, fd: int, size: int) -> None:
        self.system.ftruncate(fd, size)

    def cut(self, path: Path, size: int) -> None:
        """Truncate a file by its name, which takes no descriptor."""
        self.system.truncate(path, size)

    def allocate(self, fd: int, size: int) -> None:
        """Make sure that ``size`` bytes can be written even when the disk is full, where the system offers that."""
        self.system.fallocate(fd, size)

    def sync(self, fd: int) -> None:
        """Return when the file's bytes are on the device."""
        self.system.fdatasync(fd)

    def size(self, fd: int) -> int:
        return self.system.size(fd)

    # --- Folders ---------------------------------------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        self.system.mkdir(path)

    def exists(self, path: Path) -> bool:
        return self.system.exists(path)

    def names(self, path: Path) -> list[str]:
        return sorted(self.system.listdir(path))

    def rename(self, old: Path, new: Path) -> None:
        self.system.rename(old, new)

    def replace(self, path: Path, content: Sequence[Buffer]) -> None:
        """Write a file, or write it anew, durably: after a crash it is the old one or the new one."""
        temporary = path.with_name(f"{path.name}.tmp")
        if self.exists(temporary):
            # Of a try that was cut off.
            self.remove(temporary)
        fd = self.open(temporary, create=True)
        try:
            self.write(fd, content, 0)
            self.sync(fd)
        except OSError:
            # Half a file would only take the room that is missing.
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise
        finally:
            self.close_file(fd)
        self.rename(temporary, path)
        self.sync_folder(path.parent)

    def remove(self, path: Path) -> None:
        self.system.unlink(path)

    def remove_folder(self, path: Path) -> None:
        self.system.rmdir(path)

    def open_folder(self, path: Path) -> int:
        """Return a descriptor of the folder, for ``sync_entries``."""
        return self.system.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def sync_entries(self, fd: int) -> None:
        """Return when the entries of an open folder are on the device: creations, renames, removals."""
        self.system.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Open the folder, return when its entries are on the device."""
        fd = self.open_folder(path)
        try:
            self.sync_entries(fd)
        finally:
            self.system.close(fd)

    def free(self, path: Path) -> int:
        """Return the free bytes of the file system that ``path`` is on."""
        return self.system.free(path)


def _rest(buffers: Sequence[Buffer], n: int) -> list[Buffer]:
    """Return what is left of the buffers after their first ``n`` bytes: a full disk or a signal makes writes short."""
    rest = list(buffers)
    while n >= len(rest[0]):
        n -= len(rest.pop(0))
    rest[0] = memoryview(rest[0])[n:]
    return rest
