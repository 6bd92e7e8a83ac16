"""Work on many messages, in the background: a count, and then an action on exactly what was counted.

``Jobs`` owns the jobs of a daemon, and forgets each an hour after its end. A ``Job`` knows how far it is; what it does
is a coroutine of somebody else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from flintmq.errors import FlintError, HttpError

__all__ = ["Job", "Jobs"]

logger = logging.getLogger(__name__)

MOST_RUNNING = 8
#: Messages that a count remembers, and jobs that are kept.
MOST_FOUND = 100_000
MOST_KEPT = 100
KEPT_SECONDS = 3600.0
MOST_ERRORS = 10


class Job:
    def __init__(self, kind: str, topic: str, channel: str, user: str | None, jobs: Jobs) -> None:
        self.id = secrets.token_hex(8)
        self.kind = kind
        self.topic = topic
        self.channel = channel
        self.user = user
        self.state = "running"
        self.scanned = self.total = self.matched = self.done = self.failed = self.gone = 0
        self.errors: list[str] = []
        self.is_complete = True
        self.started = jobs.wall()
        self.ended: float | None = None
        #: Where a count looks: topic, channel, state.
        self.where = ("", "", "")
        #: What it has found: node and id.
        self.found: list[tuple[str, str]] = []
        self._jobs = jobs
        self._task: asyncio.Task[None] | None = None
        self._followers: list[Callable[[], None]] = []

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            self.state = "done"
        except asyncio.CancelledError:
            self.state = "stopped"
        except FlintError as exc:
            self.state = "failed"
            self.errors.append(str(exc))
        except Exception:
            logger.exception("JOB(%s): failed", self.id)
            self.state = "failed"
            self.errors.append("INTERNAL_ERROR")
        self.ended = self._jobs.wall()
        for follow in self._followers:
            follow()
        self.changed()

    def ended_with(self, follow: Callable[[], None]) -> None:
        """Have a function called at the end."""
        self._followers.append(follow)

    def add(self, node: str, identifier: str) -> bool:
        """Remember a message that fits; False if there are too many."""
        if len(self.found) >= MOST_FOUND:
            self.is_complete = False
            return False
        self.found.append((node, identifier))
        self.matched += 1
        return True

    def fail(self, text: str) -> None:
        self.failed += 1
        if len(self.errors) < MOST_ERRORS and text not in self.errors:
            self.errors.append(text)

    def changed(self) -> None:
        self._jobs.told(self)

    def stop(self) -> None:
        if self._task is not None and self.state == "running":
            self._task.cancel()

    async def wait(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    def describe(self) -> dict[str, Any]:
        names = ("id", "kind", "topic", "channel", "state", "scanned", "total", "matched", "done", "failed", "gone")
        return {
            **{name: getattr(self, name) for name in names},
            "errors": self.errors,
            "complete": self.is_complete,
            "user": self.user,
            "started": self.started * 1000,
            "ended": None if self.ended is None else self.ended * 1000,
        }


class Jobs:
    def __init__(self, wall: Callable[[], float], told: Callable[[Job], None]) -> None:
        self.wall = wall
        self.told = told
        self._jobs: dict[str, Job] = {}

    def start(self, kind: str, topic: str, channel: str, user: str | None) -> Job:
        now = self.wall()
        for job in [job for job in self._jobs.values() if job.ended is not None and now - job.ended > KEPT_SECONDS]:
            del self._jobs[job.id]
        ended = [job for job in self._jobs.values() if job.ended is not None]
        for job in ended[: max(0, len(self._jobs) - MOST_KEPT)]:
            del self._jobs[job.id]
        if sum(job.state == "running" for job in self._jobs.values()) >= MOST_RUNNING:
            raise HttpError(429, f"TOO_MANY_JOBS: {MOST_RUNNING} are running")
        job = Job(kind, topic, channel, user, self)
        self._jobs[job.id] = job
        return job

    def get(self, identifier: str) -> Job:
        job = self._jobs.get(identifier)
        if job is None:
            raise HttpError(404, "JOB_NOT_FOUND")
        return job

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    async def close(self) -> None:
        for job in self._jobs.values():
            job.stop()
        for job in self._jobs.values():
            await job.wait()
