"""The cluster as NSQ's nsqadmin sees it: which daemons are asked for what, and what becomes of failures.

A ``Cluster`` knows how nodes are found: through nsqlookupds, or by a list of nsqds. Nothing is kept between two
questions. Reads fail (``ClusterError``) only if nobody answered; everything else that went wrong is a warning. Actions
ask one daemon after the other, and never fail but for reads that must come before them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flintmq.addresses import split
from flintmq.admin import aggregate
from flintmq.admin.aggregate import http_address
from flintmq.admin.upstream import Partial, Upstream, UpstreamError, many, query_of
from flintmq.errors import ClusterError, HttpError

__all__ = ["Cluster", "Result"]

Node = dict[str, Any]


@dataclass
class Result:
    """What an action did: warnings as NSQ words them, and the outcome for each daemon."""

    warnings: list[str] = field(default_factory=list)
    #: Daemon and error; no error: it was done there.
    outcomes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def message(self) -> str:
        return warning(self.warnings)


def warning(texts: Sequence[str]) -> str:
    return "WARNING: " + "; ".join(texts) if texts else ""


class Cluster:
    def __init__(
        self,
        upstream: Upstream,
        lookupds: Sequence[str],
        nsqds: Sequence[str],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._upstream = upstream
        self._wall = wall
        #: Changed by ``/config``.
        self.lookupds = tuple(lookupds)
        self.nsqds = tuple(nsqds)

    # --- Reads -----------------------------------------------------------------------------------------------------

    async def _ask(self, kind: str, targets: Sequence[str], path: str, query: str, texts: list[str]) -> Partial:
        found = await many(targets, lambda address: self._upstream.get(kind, address, path, query))
        return self._checked(found, kind, texts)

    @staticmethod
    def _checked(found: Partial, kind: str, texts: list[str]) -> Partial:
        if found.errors and not found.answers:
            failures = {str(target): str(error) for target, error in found.errors}
            raise ClusterError(f"failed to query any {kind}: {found.text}", failures)
        if found.errors:
            texts.append(found.text)
        return found

    async def topics(self, texts: list[str]) -> list[str]:
        """The names of all topics, sorted."""
        names: set[str] = set()
        if self.lookupds:
            for _, answer in (await self._ask("nsqlookupd", self.lookupds, "topics", "", texts)).answers:
                names.update(answer.get("topics") or ())
        else:
            query = query_of(format="json", include_clients="false")
            for _, answer in (await self._ask("nsqd", self.nsqds, "stats", query, texts)).answers:
                names.update(topic["topic_name"] for topic in answer.get("topics") or ())
        return sorted(names)

    async def inactive(self, texts: list[str]) -> dict[str, list[str]]:
        """The topics that nsqlookupds know and no node has, with their channels. One question for all topics."""
        topics = await self.topics(texts)
        if not self.lookupds:
            return {}
        active = {
            topic["topic"] for node in await self.nodes([]) for topic in node["topics"] if not topic["tombstoned"]
        }
        result: dict[str, list[str]] = {}
        for topic in topics:
            if topic not in active:
                answers = await self._ask("nsqlookupd", self.lookupds, "channels", query_of(topic=topic), [])
                channels = {name for _, answer in answers.answers for name in answer.get("channels") or ()}
                result[topic] = sorted(channels)
        return result

    async def nodes(self, texts: list[str]) -> list[Node]:
        """Every node, by host name."""
        if self.lookupds:
            found = await self._ask("nsqlookupd", self.lookupds, "nodes", "", texts)
            return aggregate.merge_nodes(found.answers)
        asked = await many(self.nsqds, lambda address: self._described(address, ""))
        nodes = [node for _, node in self._checked(asked, "nsqd", texts).answers if node is not None]
        return sorted(nodes, key=lambda node: str(node["hostname"]))

    async def producers(self, topic: str, texts: list[str]) -> list[Node]:
        """The nodes that have a topic."""
        if not self.lookupds:
            asked = await many(self.nsqds, lambda address: self._described(address, topic))
            return [node for _, node in self._checked(asked, "nsqd", texts).answers if node is not None]
        found: dict[str, Node] = {}
        for _, answer in (await self._ask("nsqlookupd", self.lookupds, "lookup", query_of(topic=topic), texts)).answers:
            for described in answer.get("producers") or ():
                node = aggregate.node(described, ())
                found.setdefault(http_address(node), node)
        return list(found.values())

    async def _described(self, address: str, topic: str) -> Node | None:
        """An nsqd by its own words; None if it does not have the topic."""
        info = await self._upstream.get("nsqd", address, "info") if not topic else None
        arguments = {"format": "json", **({"topic": topic} if topic else {}), "include_clients": "false"}
        stats = await self._upstream.get("nsqd", address, "stats", query_of(**arguments))
        names = [one["topic_name"] for one in stats.get("topics") or ()]
        if topic and topic not in names:
            return None
        if info is None:
            info = await self._upstream.get("nsqd", address, "info")
        if not info.get("broadcast_address"):
            # Before 0.3.8.
            host, port, _ = split(address)
            info |= {"broadcast_address": host, "http_port": port, "hostname": info.get("hostname") or host}
        return aggregate.node(info, [{"topic": name, "tombstoned": False} for name in names])

    async def stats(
        self, nodes: Sequence[Node], texts: list[str], *, topic: str = "", channel: str = "", clients: bool = True
    ) -> list[dict[str, Any]]:
        """Each topic on each of these nodes, sorted by host name; no node, no topics."""
        arguments = {"format": "json"}
        if topic:
            arguments["topic"] = topic
        if channel:
            arguments["channel"] = channel
        if not clients:
            arguments["include_clients"] = "false"
        by_address = {http_address(node): node for node in nodes}
        found = await self._ask("nsqd", list(by_address), "stats", query_of(**arguments), texts)
        now = int(self._wall())
        result = []
        for address, answer in found.answers:
            hostname = by_address[address]["hostname"]
            result += [
                aggregate.node_of_topic(one, address, hostname, now)
                for one in answer.get("topics") or ()
                if not topic or one.get("topic_name") == topic
            ]
        return sorted(result, key=lambda one: str(one["hostname"]))

    # --- Actions ---------------------------------------------------------------------------------------------------

    async def post(self, kind: str, targets: Sequence[str], path: str, query: str, result: Result) -> None:
        errors = []
        for address in targets:
            try:
                await self._upstream.post(kind, address, path, query)
                result.outcomes.append((address, ""))
            except UpstreamError as exc:
                errors.append(str(exc))
                result.outcomes.append((address, str(exc)))
        if errors:
            result.warnings.append("\n".join(errors))

    async def create(self, topic: str, channel: str) -> Result:
        """Make a topic, and a channel if one is named, known to nsqlookupds; without any, make it on the nsqds."""
        result = Result()
        if not self.lookupds:
            await self.post("nsqd", self.nsqds, "topic/create", query_of(topic=topic), result)
            if channel:
                await self.post("nsqd", self.nsqds, "channel/create", query_of(topic=topic, channel=channel), result)
            return result
        await self.post("nsqlookupd", self.lookupds, "topic/create", query_of(topic=topic), result)
        if channel:
            query = query_of(topic=topic, channel=channel)
            await self.post("nsqlookupd", self.lookupds, "channel/create", query, result)
            nodes = await self.producers(topic, result.warnings)
            await self.post("nsqd", [http_address(node) for node in nodes], "channel/create", query, result)
        return result

    async def delete(self, topic: str, channel: str = "") -> Result:
        """Delete a topic or a channel. Nodes are looked up first: afterwards nobody would know them."""
        result = Result()
        nodes = await self.producers(topic, result.warnings)
        path = "channel/delete" if channel else "topic/delete"
        query = query_of(topic=topic, channel=channel) if channel else query_of(topic=topic)
        await self.post("nsqlookupd", self.lookupds, path, query, result)
        await self.post("nsqd", [http_address(node) for node in nodes], path, query, result)
        return result

    async def act(self, verb: str, topic: str, channel: str = "") -> Result:
        """``pause``, ``unpause`` or ``empty`` on every node that has it."""
        result = Result()
        nodes = await self.producers(topic, result.warnings)
        path = f"channel/{verb}" if channel else f"topic/{verb}"
        query = query_of(topic=topic, channel=channel) if channel else query_of(topic=topic)
        await self.post("nsqd", [http_address(node) for node in nodes], path, query, result)
        return result

    async def has(self, address: str, texts: list[str]) -> bool:
        """Is it the HTTP address of a node of this cluster? Nobody may have us send requests, and tokens, elsewhere."""
        if not self.lookupds and address in self.nsqds:
            return True
        return any(http_address(node) == address for node in await self.nodes(texts))

    async def tombstone(self, topic: str, node: str) -> Result:
        """Hide a topic of one node, which must be one of this cluster, from consumers, and delete it there."""
        result = Result()
        if not await self.has(node, result.warnings):
            raise HttpError(404, "NODE_NOT_FOUND")
        await self.post("nsqlookupd", self.lookupds, "topic/tombstone", query_of(topic=topic, node=node), result)
        # Does it answer at all? If not, that is an error, as in NSQ.
        self._checked(await many([node], lambda address: self._described(address, "")), "nsqd", result.warnings)
        # To the address that was asked for, whatever the node says of itself.
        await self.post("nsqd", [node], "topic/delete", query_of(topic=topic), result)
        return result
