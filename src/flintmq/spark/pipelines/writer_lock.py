"""A lock for the lifetime of a writer: a file that says who holds it, locked by the file system.

The system frees the lock when its process ends, however it ends, so a dead writer never blocks a new one. A process
that is only suspended keeps it. Works on local disks and on network file systems that have flock.

Only the standard library, as in `store`.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from flintmq.errors import PipelineError

__all__ = ["WriterLock", "is_locked"]

#: Seconds that a writer waits for the lock of another, which may just be ending.
_LOCK_PATIENCE = 15.0


class WriterLock:
    """The right of one process to write something, held until `release` or the end of the process.

    The file of a process that was killed stays, and locks nobody out.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._what = what
        self._descriptor = -1

    def acquire(self) -> None:
        """Take the lock. PipelineError, after some patience, says who has it and what to do."""
        give_up = time.monotonic() + _LOCK_PATIENCE
        while not self._try():
            if time.monotonic() >= give_up:
                raise PipelineError(
                    f"{self._what} is being written by another process ({self._holder()}): stop that one, or wait for "
                    "its end, and start this one again"
                )
            time.sleep(0.1)

    def _try(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise PipelineError(f"cannot lock {self._what}: {exc.strerror} ({exc.filename})") from exc
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one that had it may have deleted the file between our open and our lock: then it locks nothing.
            if not _is_file(descriptor, self._path):
                os.close(descriptor)
                return False
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": round(time.time())}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as exc:
            os.close(descriptor)
            raise PipelineError(
                f"cannot lock {self._what}: its file system has no file locks ({exc.strerror}), and without them two "
                "writers could lose rows: use a local disk, or a network file system with flock"
            ) from exc
        self._descriptor = descriptor
        return True

    def _holder(self) -> str:
        try:
            who = json.loads(self._path.read_text())
            since = datetime.datetime.fromtimestamp(who["since"], datetime.UTC)
            return f"pid {who['pid']} on {who['host']}, since {since:%Y-%m-%dT%H:%M:%SZ}"
        except (OSError, ValueError, KeyError, TypeError):
            return "which has not said its name"

    def release(self) -> None:
        if self._descriptor < 0:
            return
        # Deleted while it is held: the next one that opens the old file notices.
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


def is_locked(path: Path) -> bool:
    """Does a process that lives hold this lock file?"""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_file(descriptor: int, path: Path) -> bool:
    """Is this path the file that is open?"""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
