"""What the routes about messages share: which nodes can show them, and how they are looked at, page by page.

Only flintmq's nsqd can show its messages; NSQ's own nodes are named in ``unsupported``.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from flintmq.admin.state import NodeState
from flintmq.cluster.node import NodeClient, Page, PeekedMessage
from flintmq.errors import ConnectError, HttpError
from flintmq.protocol.wire import valid_name

if TYPE_CHECKING:
    from flintmq.admin.daemon import Admin

__all__ = ["PAGE", "STATES", "Looking", "asked", "is_of", "shown_message"]

T = TypeVar("T")

STATES = ("ready", "in_flight", "deferred", "dead", "log")
#: Messages of one request to a node.
PAGE = 500


class Looking:
    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._state = admin.state

    # --- Nodes -----------------------------------------------------------------------------------------------------

    def able(self, topic: str, channel: str = "", node: str = "") -> tuple[list[NodeState], list[str]]:
        """The nodes that have it and can show messages, and those that cannot. HttpError 404 if nobody has it."""
        having = self._state.having(topic, channel)
        if not having:
            raise HttpError(404, "CHANNEL_NOT_FOUND" if channel and self._state.having(topic) else "TOPIC_NOT_FOUND")
        if node:
            having = [one for one in having if one.address == node]
            if not having:
                raise HttpError(404, "NODE_NOT_FOUND")
        able = sorted((one for one in having if one.is_flintmq), key=lambda one: one.address)
        return able, sorted(one.address for one in having if not one.is_flintmq)

    def client(self, node: NodeState) -> NodeClient:
        return self._admin.client(node.address)

    def names(self, given: Mapping[str, Any], *, channel: bool) -> tuple[str, str]:
        names = []
        for kind in ("topic", "channel")[: 2 if channel else 1]:
            name = given.get(kind)
            if not isinstance(name, str) or not valid_name(name):
                raise HttpError(400, f"INVALID_{kind.upper()}: give the name of a {kind}")
            names.append(name)
        return names[0], names[1] if channel else ""

    # --- Looking ---------------------------------------------------------------------------------------------------

    async def where(self, topic: str, channel: str, state: str) -> tuple[str, str, str]:
        """Topic, channel and state in which nsqd shows what somebody calls ``state``; no channel: the log."""
        if state == "dead":
            dead = await self._admin.dead_letter_topic(topic, channel)
            if dead is None or not self._state.having(dead):
                return "", "", ""
            # The channel that a redrive takes from has what is left; without it the topic has everything.
            return (dead, "redrive", "ready") if self._state.having(dead, "redrive") else (dead, "", "log")
        return (topic, "", "log") if state == "log" else (topic, channel, state)

    async def page(
        self, node: NodeState, topic: str, channel: str, state: str, limit: int, after: str | None, shown: int | None
    ) -> Page:
        client = self.client(node)
        if state == "log":
            return await asked(client.peek_topic(topic, limit=limit, after=after, shown=shown))
        kind: Any = state
        return await asked(client.peek(topic, channel, kind, limit=limit, after=after, shown=shown))

    def total(self, where: tuple[str, str, str], nodes: list[NodeState]) -> int:
        topic, channel, state = where
        field = {"ready": "depth", "in_flight": "in_flight", "deferred": "deferred"}.get(state, "topic_depth")
        count = 0
        for node in nodes:
            stats = node.topics.get(topic, {})
            part = stats.get("channels", {}).get(channel, {}) if channel else stats
            count += part.get(field) or 0
        return count

    async def scan(
        self, where: tuple[str, str, str], nodes: list[NodeState], shown: int | None
    ) -> AsyncIterator[tuple[NodeState, list[PeekedMessage]]]:
        """All messages, page by page."""
        for node in nodes:
            after: str | None = None
            while True:
                part = await self.page(node, *where, PAGE, after, shown)
                yield node, part.messages
                after = part.next
                if after is None:
                    break


# --- Helpers ----------------------------------------------------------------------------------------------------------


async def asked(question: Awaitable[T]) -> T:
    """The answer of a node; that it gives none is a 502, that it refuses is what it says."""
    try:
        return await question
    except ConnectError as exc:
        raise HttpError(502, f"UPSTREAM_ERROR: {exc}") from exc


def shown_message(message: PeekedMessage, node: str, shown: int | None) -> dict[str, Any]:
    """A message as pages get it; times are milliseconds since 1970."""
    body = message.body if shown is None else message.body[:shown]

    def milliseconds(nanoseconds: int | None) -> float | None:
        return None if nanoseconds is None else nanoseconds / 1e6

    dead = None
    if message.dead is not None:
        dead = msgspec.to_builtins(message.dead)
        dead["time"], dead["published"] = milliseconds(dead["time"]), milliseconds(dead["published"])
    return {
        "node": node,
        "id": message.id,
        "seq": message.seq,
        "time": milliseconds(message.timestamp),
        "attempts": message.attempts,
        "size": message.size,
        "body": base64.b64encode(body).decode(),
        "truncated": message.truncated or len(body) < len(message.body),
        "due": milliseconds(message.due),
        "deadline": milliseconds(message.deadline),
        "client": None if message.client is None else msgspec.to_builtins(message.client),
        "dead": dead,
        "damaged": message.damaged,
    }


def is_of(message: PeekedMessage, topic: str, channel: str, state: str) -> bool:
    """Several channels may share a dead-letter topic."""
    if state != "dead":
        return True
    return message.dead is not None and message.dead.topic == topic and message.dead.channel == channel
