"""The clients of the cluster, asked for when somebody looks at them.

There may be tens of thousands, and nobody looks most of the time: so they are in no sample. A ``Clients`` keeps what
nodes said for a few seconds, so that turning pages and sorting asks nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec

from flintmq.admin.lists import by_names
from flintmq.admin.state import State
from flintmq.admin.upstream import Upstream, UpstreamError, many, query_of
from flintmq.errors import UNREADABLE

__all__ = ["FIELDS", "NAMES", "Clients"]

#: Seconds for which an answer serves.
FRESH_SECONDS = 5.0
#: Questions whose answers are kept.
MOST_KEPT = 8
#: How they are sorted if nobody says.
ORDER = "hostname"
NAMES = ("client_id", "hostname", "remote_address", "user_agent", "topic", "channel", "node")


class _Client(msgspec.Struct):
    client_id: str = ""
    hostname: str = ""
    remote_address: str = ""
    user_agent: str = ""
    ready_count: int = 0
    in_flight_count: int = 0
    message_count: int = 0
    finish_count: int = 0
    requeue_count: int = 0
    connect_ts: int = 0
    tls: bool = False
    tls_version: str = ""
    deflate: bool = False
    snappy: bool = False
    sample_rate: int = 0
    auth_identity: str = ""
    topology_zone: str = ""
    topology_region: str = ""
    pub_counts: list[dict[str, Any]] | None = None


class _Channel(msgspec.Struct):
    channel_name: str = ""
    clients: list[_Client] | None = None


class _Topic(msgspec.Struct):
    topic_name: str = ""
    channels: list[_Channel] | None = None


class _Stats(msgspec.Struct):
    topics: list[_Topic] | None = None
    producers: list[_Client] | None = None


class Found(msgspec.Struct):
    at: float
    rows: list[dict[str, Any]]
    missing: list[str]


class Clients:
    def __init__(self, upstream: Upstream, state: State, wall: Callable[[], float]) -> None:
        self._upstream = upstream
        self._state = state
        self._wall = wall
        self._known: dict[tuple[str, str, str], Found] = {}
        self._asked: dict[tuple[str, str, str], asyncio.Task[Found]] = {}

    async def find(self, topic: str = "", channel: str = "", node: str = "") -> Found:
        """The clients of these; those who ask for the same at the same time share the question."""
        key = (topic, channel, node)
        found = self._known.get(key)
        if found is not None and 0 <= self._wall() - found.at < FRESH_SECONDS:
            return found
        task = self._asked.get(key)
        if task is None:
            task = self._begin(key)
        return await asyncio.shield(task)

    def known(self) -> Found | None:
        """All clients, if they were asked for a moment ago."""
        found = self._known.get(("", "", ""))
        return found if found is not None and 0 <= self._wall() - found.at < 6 * FRESH_SECONDS else None

    def ask_soon(self) -> None:
        key = ("", "", "")
        if key not in self._asked:
            self._begin(key)

    def _begin(self, key: tuple[str, str, str]) -> asyncio.Task[Found]:
        task = self._asked[key] = asyncio.create_task(self._ask(*key))
        # If it fails, somebody who has gone does not hear of it.
        task.add_done_callback(lambda done: (self._asked.pop(key, None), done.cancelled() or done.exception()))
        return task

    async def close(self) -> None:
        for task in list(self._asked.values()):
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)

    async def _ask(self, topic: str, channel: str, node: str) -> Found:
        arguments = {"format": "json", "include_mem": "false"}
        if topic:
            arguments["topic"] = topic
        if channel:
            arguments["channel"] = channel
        states = self._state.having(topic, channel) if topic else [n for n in self._state.nodes.values() if n.up]
        addresses = [one.address for one in states if not node or one.address == node]
        query = query_of(**arguments)

        async def ask(address: str) -> _Stats:
            body = await self._upstream.raw("GET", "nsqd", address, "stats", query)
            try:
                return msgspec.json.decode(body, type=_Stats)
            except UNREADABLE as exc:
                raise UpstreamError(f"invalid answer of {address}: {exc}") from exc

        answers = await many(addresses, ask)
        rows: list[dict[str, Any]] = []
        for address, stats in answers.answers:
            for one in stats.topics or ():
                for each in one.channels or ():
                    rows += [_row(client, address, one.topic_name, each.channel_name) for client in each.clients or ()]
                    await asyncio.sleep(0)
            if not channel:
                rows += [_producer(client, address) for client in stats.producers or () if _has(client, topic)]
        missing = [*self._state.missing, *(str(address) for address, _ in answers.errors)]
        # Once for all pages of the list.
        rows.sort(key=by_names((ORDER, *NAMES)))
        found = Found(self._wall(), rows, sorted(set(missing)))
        self._known[topic, channel, node] = found
        while len(self._known) > MOST_KEPT:
            del self._known[min(self._known, key=lambda key: self._known[key].at)]
        return found


def _has(client: _Client, topic: str) -> bool:
    return not topic or any(one.get("topic") == topic for one in client.pub_counts or ())


def _row(client: _Client, node: str, topic: str, channel: str) -> dict[str, Any]:
    return {
        "id": quote(f"{node}|{topic}|{channel}|{client.remote_address}", safe=""),
        "kind": "consumer",
        "client_id": client.client_id,
        "hostname": client.hostname,
        "remote_address": client.remote_address,
        "user_agent": client.user_agent,
        "node": node,
        "topic": topic,
        "channel": channel,
        "ready": client.ready_count,
        "in_flight": client.in_flight_count,
        "message_count": client.message_count,
        "finish_count": client.finish_count,
        "requeue_count": client.requeue_count,
        "connected_at": client.connect_ts * 1000,
        "tls": client.tls,
        "tls_version": client.tls_version,
        "deflate": client.deflate,
        "snappy": client.snappy,
        "sample_rate": client.sample_rate,
        "auth_identity": client.auth_identity,
        "zone": client.topology_zone,
        "region": client.topology_region,
    }


def _producer(client: _Client, node: str) -> dict[str, Any]:
    counts = client.pub_counts or [{}]
    row = _row(client, node, str(counts[0].get("topic", "")), "")
    return row | {"kind": "producer", "ready": 0, "in_flight": 0, "message_count": counts[0].get("count", 0)}


FIELDS = tuple(_row(_Client(), "", "", ""))
