"""Standard output for tools that print messages: written in a thread, all of it, with what went wrong as an error.

A reader that waits (`| less`) then holds up neither heartbeats nor ctrl-C. After a signal the writing is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import queue
import select
import sys
import threading

__all__ = ["Output", "open_standard_files", "output_error"]


def open_standard_files() -> None:
    """Put files in the place of standard ones that were closed at the start, where Python has None.

    Reading and writing then fail as they do for a file that is closed (EBADF), and no connection gets their numbers.
    What would go to standard error is dropped.
    """
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(os.open(os.devnull, os.O_WRONLY), "r"))
    if sys.stdout is None:
        # Unbuffered: what cannot be written must not be tried again at the end.
        raw = io.FileIO(os.open(os.devnull, os.O_RDONLY), "w")
        sys.stdout = io.TextIOWrapper(raw, write_through=True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def output_error() -> OSError | None:
    """Return why standard output cannot be written to, after an error of which that may be the cause."""
    if sys.stdout is None:
        return OSError(errno.EBADF, os.strerror(errno.EBADF))
    try:
        # What could not be written is still in its buffer. Where there is none, a closed file refuses even nothing.
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")
    except ValueError:
        return None  # a program has put something else in its place, or has closed it
    except OSError as exc:
        return exc
    return None


class Output:
    """Writes to standard output from one thread, in order."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[bytes, asyncio.Future[OSError | None]]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        # A daemon thread: when nobody reads, it must not keep the program from ending.
        threading.Thread(target=self._serve, name="output", daemon=True).start()

    async def write(self, data: bytes) -> None:
        """Return when all of it is written. OSError says why it cannot be."""
        written: asyncio.Future[OSError | None] = self._loop.create_future()
        self._work.put((data, written))
        error = await written
        if error is not None:
            raise error

    def _serve(self) -> None:
        while True:
            data, written = self._work.get()
            error = _write(data)
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                self._loop.call_soon_threadsafe(_tell, written, error)


def _tell(written: asyncio.Future[OSError | None], error: OSError | None) -> None:
    if not written.done():
        written.set_result(error)


def _write(data: bytes) -> OSError | None:
    # Not through sys.stdout, which writes only a part, and says nothing, where PYTHONUNBUFFERED is set.
    descriptor = sys.stdout.fileno()
    view = memoryview(data)
    try:
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                # Another program made the terminal or the pipe that we share non-blocking.
                select.select([], [descriptor], [])
    except OSError as exc:
        return exc
    return None
