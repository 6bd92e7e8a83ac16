"""What was done, by whom and when: the action log, and the notifications that NSQ's nsqadmin sends.

An ``ActionLog`` keeps the last actions in memory and appends each to a file, if one is named. A ``Notifier`` posts
actions to an HTTP endpoint, one at a time and in their order; what becomes of a post is logged and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from flintmq.admin.upstream import Upstream, without_password
from flintmq.errors import StartError, permission_hint

__all__ = ["Action", "ActionLog", "Notifier"]

logger = logging.getLogger(__name__)

#: Actions that are kept in memory.
MOST_ACTIONS = 5_000
#: Notifications that wait for the endpoint; beyond, the oldest are dropped.
MOST_WAITING = 1_000


class Action(msgspec.Struct, kw_only=True):
    """One line of the log. ``time`` is in milliseconds since 1970."""

    time: float
    user: str | None
    role: str | None
    remote: str
    action: str
    topic: str = ""
    channel: str = ""
    node: str = ""
    detail: str = ""
    #: ``ok``, ``partly`` or ``failed``.
    result: str = "ok"
    message: str = ""


class ActionLog:
    def __init__(self, path: str = "") -> None:
        self.entries: deque[Action] = deque(maxlen=MOST_ACTIONS)
        #: Called with each new entry.
        self.followers: list[Callable[[Action], None]] = []
        self._file: int | None = None
        self._path = path
        if path:
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._file = os.open(path, flags, 0o640)
            except OSError as exc:
                hint = permission_hint(exc, path)
                raise StartError(f"cannot write the action log {path} - {exc.strerror}{hint}") from exc

    def add(self, entry: Action) -> None:
        self.entries.append(entry)
        logger.info(
            "ACTION(%s): %s%s by %s (%s) - %s",
            entry.action,
            "/".join(filter(None, (entry.topic, entry.channel))) or entry.node,
            f" on {entry.node}" if entry.node and entry.topic else "",
            entry.user or "nobody in particular",
            entry.remote,
            entry.result,
        )
        if self._file is not None:
            try:
                os.write(self._file, msgspec.json.encode(entry) + b"\n")
            except OSError as exc:
                logger.error("ACTION: cannot append to %s - %s", self._path, exc.strerror)
        for follow in self.followers:
            follow(entry)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Notifier:
    """Without an endpoint it does nothing."""

    def __init__(self, upstream: Upstream, endpoint: str) -> None:
        self._upstream = upstream
        self._endpoint = endpoint
        self._via = socket.gethostname()
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    def send(
        self,
        action: str,
        topic: str,
        channel: str,
        node: str,
        *,
        user: str,
        timestamp: int,
        remote: str,
        user_agent: str,
        url: str,
    ) -> None:
        if not self._endpoint:
            return
        document: dict[str, Any] = {"action": action, "topic": topic}
        document |= {name: text for name, text in (("channel", channel), ("node", node)) if text}
        document["timestamp"] = timestamp
        if user:
            document["user"] = user
        document |= {"remote_ip": remote, "user_agent": user_agent, "url": url, "via": self._via}
        self._waiting.append(document)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        import aiohttp

        while self._waiting:
            document = self._waiting.popleft()
            try:
                timeout = aiohttp.ClientTimeout(total=10)
                async with self._upstream.session().post(
                    self._endpoint,
                    data=msgspec.json.encode(document),
                    headers={"Content-Type": "application/json"},
                    timeout=timeout,
                    ssl=self._upstream.tls,
                ) as response:
                    await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
                # NSQ's own program ends here.
                reason = str(exc) or type(exc).__name__
                logger.error("failed to POST notification to %s - %s", without_password(self._endpoint), reason)

    async def drain(self) -> None:
        """Wait until everything is sent."""
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
