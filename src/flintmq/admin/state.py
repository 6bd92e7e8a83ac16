"""The cluster as it was a moment ago: what every page shows, asked for once for all viewers.

A ``State`` asks every node for its numbers: flintmq's nsqd every time, and only for what changed since the last time;
NSQ's own every fifth time, for everything. It owns the rows of topics, channels, nodes, readers and queries, with their
rates, and feeds the history. A node that does not answer keeps its row, is named in ``missing``, and is in no sum.

Every question is a task of its own, whose answer is taken in by the next sample after it has come: a daemon that hangs
holds up nobody. One process counts once, whatever names it is known by.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from flintmq.admin.aggregate import http_address, merge_nodes, node_at, version_key
from flintmq.admin.cluster import Cluster
from flintmq.admin.history import FIELDS, History
from flintmq.admin.problems import Watch
from flintmq.admin.upstream import Upstream, UpstreamError, many, query_of

__all__ = ["NodeState", "State"]

logger = logging.getLogger(__name__)

Row = dict[str, Any]

#: Every so many samples nodes are looked up again, and NSQ's own nsqds are asked.
SELDOM = 5
#: Every so many samples the history forgets what is gone.
FORGET = 100
#: Topics whose rows are made before the loop is handed back.
SLICE = 50
#: Seconds for which a node that nobody lists any more, and that does not answer, is shown as down.
GONE_SECONDS = 600.0
#: Seconds after which a node that answers, and that no nsqlookupd lists any more, is in no sum.
UNLISTED_SECONDS = 60.0
#: Seconds for which a sample waits for answers.
PATIENCE = 1.0
#: What is kept of a node's own words about itself.
INFO = ("version", "hostname", "broadcast_address", "tcp_port", "http_port", "topology_zone", "topology_region")
#: Seconds without a report after which a query that should run counts as silent: reports are renewed every 15 s.
SILENT_SECONDS = 60.0
#: Seconds over which growth is measured.
GROWTH_SECONDS = 60.0

#: What is shown of a query, as it reports it.
QUERY = (
    *("id", "at", "name", "state", "error", "host", "batch", "progress", "batch_seconds"),
    *("rows", "rows_per_second", "lag", "state_rows", "state_bytes"),
)
_SUMS = ("depth", "backend_depth", "in_flight", "deferred", "requeue_count", "timeout_count")
_MAYBE = ("dead_lettered_count", "expired_count")
_RATES = ("delivered", "requeued", "timed_out", "dead_lettered")
#: The numbers of topics, nodes and the cluster that are sums over channels.
NUMBERS = (
    *_SUMS,
    *_MAYBE,
    "message_count",
    "message_bytes",
    "clients",
    "channels",
    "topics",
    "published",
    "published_bytes",
    *_RATES,
    "growth",
)


def _rate(new: float | None, old: float | None, seconds: float) -> float | None:
    """Per second; None if it cannot be known. A counter that fell was begun anew."""
    if new is None or old is None or seconds <= 0:
        return None
    return round(max(0.0, new - old) / seconds, 3)


def _plus(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


class _Heard(NamedTuple):
    """What a node said, or why it said nothing, and when."""

    info: Row | None
    stats: Row | None
    error: str
    at: float


class _Listing(NamedTuple):
    """Which nodes there are, by address; of one that did not answer nothing is known."""

    nodes: dict[str, Row | None]
    #: Did everybody answer who lists nodes?
    is_whole: bool


class NodeState:
    """One node: what it last said, and since when it says nothing."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.described: Row = {}
        self.listed = True
        #: Seconds since 1970 at which every nsqlookupd answered, and none listed it any more; 0: it is listed.
        self.unlisted_since = 0.0
        #: The question that is not answered yet.
        self.asking: asyncio.Task[_Heard] | None = None
        self.up = False
        self.error: str | None = "no answer yet"
        #: Seconds since 1970 of the last answer, and of the first failure after it.
        self.seen = 0.0
        self.failed_since = 0.0
        #: None until it has said what it is.
        self.is_flintmq: bool | None = None
        self.cursor = ""
        self.sampled = 0.0
        #: By name: the numbers of its topics, each with ``channels`` by name.
        self.topics: dict[str, Row] = {}
        #: What streaming queries last reported to it.
        self.pipelines: list[Row] = []
        self.about: Row = {}
        self._moving: set[str] = set()

    @property
    def process(self) -> tuple[Any, ...] | None:
        """What two names of one process have in common; None if that cannot be said."""
        found = (self.described.get("hostname"), self.described.get("http_port"), self.about.get("start_time"))
        return found if all(found) else None

    def fail(self, text: str, at: float) -> None:
        if self.up or not self.failed_since:
            self.failed_since = at
        self.up, self.error, self.cursor, self.sampled = False, text, "", 0.0

    def ingest(self, document: Row, at: float) -> None:
        """Take in an answer of ``/stats``, whole or with changes only."""
        seconds = at - self.sampled if self.sampled else 0.0
        is_delta = document.get("delta") is True
        known = self.topics
        topics: dict[str, Row] = known if is_delta else {}
        moving: set[str] = set()
        if is_delta:
            # First: something of the same name may have been created since.
            removed = document.get("removed") or {}
            for name in removed.get("topics") or ():
                topics.pop(name, None)
            for name, channel in removed.get("channels") or ():
                if name in topics:
                    topics[name]["channels"].pop(channel, None)
        for stats in document.get("topics") or ():
            name = stats["topic_name"]
            topics[name] = self._topic(stats, known.get(name), seconds, is_delta)
            moving.add(name)
        if is_delta:
            # Nothing happened there since the last time.
            for name in self._moving - moving:
                if name in topics:
                    _stand_still(topics[name])
        self.topics, self._moving = topics, moving
        if not is_delta or "pipelines" in document:
            self.pipelines = document.get("pipelines") or []
        self.cursor = str(document.get("cursor") or "")
        self.sampled = at
        self.about = {
            "health": document.get("health"),
            "start_time": document.get("start_time"),
            "memory": document.get("memory") or {},
            "node": document.get("node") or {},
        }

    def _topic(self, stats: Row, old: Row | None, seconds: float, is_delta: bool) -> Row:
        count, size = stats.get("message_count") or 0, stats.get("message_bytes")
        row: Row = {
            "topic_depth": stats.get("depth") or 0,
            "topic_backend_depth": stats.get("backend_depth") or 0,
            "message_count": count,
            "message_bytes": size,
            "paused": bool(stats.get("paused")),
            "published": _rate(count, old["message_count"] if old else 0, seconds) if seconds else None,
            "published_bytes": _rate(size, old["message_bytes"] if old else 0, seconds) if seconds else None,
            "e2e": stats.get("e2e_processing_latency"),
            "readers": stats.get("readers") or (),
            "channels": dict(old["channels"]) if is_delta and old else {},
        }
        before = old["channels"] if old else {}
        changed = set()
        for one in stats.get("channels") or ():
            name = one["channel_name"]
            row["channels"][name] = _channel(one, before.get(name), seconds)
            changed.add(name)
        for name, channel in row["channels"].items():
            if name not in changed:
                _stand_still_channel(channel)
        return row


def _channel(stats: Row, old: Row | None, seconds: float) -> Row:
    row: Row = {
        "depth": stats.get("depth") or 0,
        "backend_depth": stats.get("backend_depth") or 0,
        "in_flight": stats.get("in_flight_count") or 0,
        "deferred": stats.get("deferred_count") or 0,
        "message_count": stats.get("message_count") or 0,
        "requeue_count": stats.get("requeue_count") or 0,
        "timeout_count": stats.get("timeout_count") or 0,
        "dead_lettered_count": stats.get("dead_lettered_count"),
        "expired_count": stats.get("expired_count"),
        "clients": stats.get("client_count") or 0,
        "paused": bool(stats.get("paused")),
        "e2e": stats.get("e2e_processing_latency"),
        "position": stats.get("position"),
    }
    # Every delivery takes a message out of the depth; it comes back by a requeue, a timeout, or its time.
    row["sent"] = row["message_count"] - row["depth"] - row["deferred"] + row["requeue_count"] + row["timeout_count"]
    if seconds:
        last = old or dict.fromkeys(row, 0)
        row["handed"] = _rate(row["message_count"], last["message_count"], seconds)
        row["delivered"] = _rate(row["sent"], last["sent"], seconds)
        row["requeued"] = _rate(row["requeue_count"], last["requeue_count"], seconds)
        row["timed_out"] = _rate(row["timeout_count"], last["timeout_count"], seconds)
        row["dead_lettered"] = _rate(row["dead_lettered_count"], last["dead_lettered_count"], seconds)
    else:
        row |= dict.fromkeys(("handed", *_RATES))
    return row


def _stand_still(topic: Row) -> None:
    topic["published"] = topic["published_bytes"] = 0.0
    for channel in topic["channels"].values():
        _stand_still_channel(channel)


def _stand_still_channel(channel: Row) -> None:
    for name in ("handed", *_RATES):
        if channel[name] is not None:
            channel[name] = 0.0


class State:
    def __init__(
        self, upstream: Upstream, cluster: Cluster, history: History, wall: Callable[[], float], interval: float
    ) -> None:
        self._upstream = upstream
        self._cluster = cluster
        self.history = history
        self._wall = wall
        self._interval = interval
        self.nodes: dict[str, NodeState] = {}
        self.lookupds: dict[str, str | None] = {}
        self.inactive: set[str] = set()
        self.tombstones: list[Row] = []
        self._count = 0
        #: Seconds since 1970 of the last sample.
        self.at = 0.0
        # The rows, made anew by each sample.
        self.topics: dict[str, Row] = {}
        self.channels: dict[tuple[str, str], Row] = {}
        #: Of channels with messages on nodes where nobody consumes them: how many nodes, and how many messages.
        self.unserved: dict[tuple[str, str], tuple[int, int]] = {}
        self.node_rows: dict[str, Row] = {}
        self.totals: Row = dict.fromkeys(NUMBERS)
        self.readers: dict[str, Row] = {}
        #: Streaming queries by id, each once, whatever number of nodes it reports to.
        self.queries: dict[str, Row] = {}
        self._offsets: dict[tuple[str, str, str], tuple[float, int]] = {}
        self.watch = Watch()
        self.problems: list[Row] = []
        #: Called after each sample.
        self.followers: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[_Listing | None] | None = None
        #: Seconds; None: a sample that somebody asks for waits for everybody.
        self._patience = min(interval, PATIENCE) if interval > 0 else None
        #: What the nsqds of the options call themselves.
        self._names: dict[str, str] = {}
        self._sampling = asyncio.Lock()

    # --- Sampling --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._interval > 0:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        asking = [node.asking for node in self.nodes.values()]
        tasks = [task for task in (self._task, self._finding, *asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def forget(self) -> None:
        """It is another cluster from now on: nothing of this one may be shown, or acted on."""
        async with self._sampling:
            for task in (self._finding, *(node.asking for node in self.nodes.values())):
                if task is not None:
                    task.cancel()
            self._finding = None
            self.nodes.clear()
            self._names.clear()
            self._count = 0
            self.at = 0.0

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self.sample()
            except Exception:
                logger.exception("a sample of the cluster failed")
            await asyncio.sleep(max(0.05, self._interval - (loop.time() - began)))

    async def fresh(self) -> None:
        """Have a sample, if there is none yet."""
        if not self.at:
            await self.sample()

    async def sample(self) -> None:
        """Ask every node, and make all rows anew."""
        async with self._sampling:
            is_seldom = self._count % SELDOM == 0 or not self.nodes
            self._count += 1
            if is_seldom or self._finding is not None:
                await self._find()
            for node in self.nodes.values():
                if node.asking is None and (is_seldom or node.is_flintmq is not False):
                    node.asking = asyncio.create_task(self._ask(node.address, node.cursor, node.is_flintmq, node.up))
            asked = [node.asking for node in self.nodes.values() if node.asking is not None]
            if asked:
                await asyncio.wait(asked, timeout=self._patience)
            now = self._wall()
            for node in self.nodes.values():
                if node.asking is not None and node.asking.done():
                    done, node.asking = node.asking, None
                    self._take(node, done.result(), now)
            self._drop(now)
            self.at = now
            await self._make_rows()
        for follow in self.followers:
            follow()

    async def _find(self) -> None:
        """Learn which nodes there are, if whoever is asked answers in time; later otherwise."""
        if self._finding is None:
            self._finding = asyncio.create_task(self._by_lookupds() if self._cluster.lookupds else self._by_nsqds())
        # Before the first answer there is nothing to show.
        await asyncio.wait([self._finding], timeout=self._patience if self.nodes else None)
        if not self._finding.done():
            return
        done, self._finding = self._finding, None
        found = done.result()
        if found is None:
            return
        now = self._wall()
        for address, described in found.nodes.items():
            node = self.nodes.get(address)
            if node is None:
                node = self.nodes[address] = NodeState(address)
                node.described = node_at(address) if described is None else described
            elif described is not None:
                node.described = {**node.described, **described}
        for node in self.nodes.values():
            node.listed = node.address in found.nodes
            if node.listed:
                node.unlisted_since = 0.0
            elif found.is_whole:
                node.unlisted_since = node.unlisted_since or now

    async def _by_lookupds(self) -> _Listing | None:
        lookupds = self._cluster.lookupds
        answers, names = await asyncio.gather(
            many(lookupds, lambda address: self._upstream.get("nsqlookupd", address, "nodes")),
            many(lookupds, lambda address: self._upstream.get("nsqlookupd", address, "topics")),
        )
        self.lookupds = {address: None for address, _ in answers.answers}
        self.lookupds |= {address: str(error) for address, error in answers.errors}
        if not answers.answers:
            return None
        found = merge_nodes(answers.answers)
        active = {one["topic"] for node in found for one in node["topics"] if not one["tombstoned"]}
        known = {name for _, answer in names.answers for name in answer.get("topics") or ()}
        self.inactive = known - active
        self.tombstones = [
            {"node": http_address(node), "topic": one["topic"]}
            for node in found
            for one in node["topics"]
            if one["tombstoned"]
        ]
        return _Listing({http_address(node): node for node in found}, not answers.errors)

    async def _by_nsqds(self) -> _Listing:
        self.lookupds, self.inactive, self.tombstones = {}, set(), []
        seconds = self._patience

        async def ask(address: str) -> Row:
            try:
                async with asyncio.timeout(seconds):
                    info: Row = await self._upstream.get("nsqd", address, "info")
            except TimeoutError:
                raise UpstreamError("no answer yet") from None
            return info

        nodes: dict[str, Row | None] = {}
        answers = await many(self._cluster.nsqds, ask)
        for given, info in answers.answers:
            # Before 0.3.8 they did not say it.
            name = http_address(info) if info.get("broadcast_address") and info.get("http_port") else given
            self._names[given] = name
            nodes[name] = {field: info[field] for field in INFO if field in info}
        for given, _ in answers.errors:
            # One that is down is known by the name that it had, or by the address that was given.
            nodes.setdefault(self._names.get(given, given), None)
        return _Listing(nodes, is_whole=True)

    async def _ask(self, address: str, cursor: str, is_flintmq: bool | None, is_up: bool) -> _Heard:
        info: Row | None = None
        try:
            if is_flintmq is None or not is_up:
                info = await self._upstream.get("nsqd", address, "info", "extended=true")
                is_flintmq = "flintmq" in info
            arguments = {"format": "json", "include_clients": "false"}
            if is_flintmq:
                arguments |= {"extended": "true", "since": cursor}
            stats = await self._upstream.get("nsqd", address, "stats", query_of(**arguments))
        except UpstreamError as exc:
            return _Heard(None, None, str(exc), self._wall())
        return _Heard(info, stats, "", self._wall())

    def _take(self, node: NodeState, heard: _Heard, now: float) -> None:
        if heard.stats is None:
            node.fail(heard.error, heard.at)
            return
        if node.unlisted_since and now - node.unlisted_since > UNLISTED_SECONDS:
            node.fail("it answers, but no nsqlookupd lists it any more", heard.at)
            return
        if heard.info is not None:
            node.is_flintmq = "flintmq" in heard.info
            node.described = {**node.described, **{name: heard.info[name] for name in INFO if name in heard.info}}
        node.ingest(heard.stats, heard.at)
        node.up, node.error, node.seen, node.failed_since = True, None, heard.at, 0.0

    def _drop(self, now: float) -> None:
        """Forget the nodes that are gone, and the old names of those that have new ones."""
        listed = {node.process for node in self.nodes.values() if node.listed and node.up} - {None}
        for node in [node for node in self.nodes.values() if not node.listed]:
            if not self._cluster.lookupds or node.process in listed or (not node.up and _is_gone(node, now)):
                if node.asking is not None:
                    node.asking.cancel()
                del self.nodes[node.address]

    # --- Rows ------------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> list[str]:
        return sorted(node.address for node in self.nodes.values() if not node.up)

    def having(self, topic: str, channel: str = "") -> list[NodeState]:
        """The nodes that are up and have a topic, or a channel of it."""
        return [
            node
            for node in self.nodes.values()
            if node.up and topic in node.topics and (not channel or channel in node.topics[topic]["channels"])
        ]

    async def _make_rows(self) -> None:
        where: dict[str, list[NodeState]] = {}
        for node in self.nodes.values():
            if node.up:
                for name in node.topics:
                    where.setdefault(name, []).append(node)
        topics: dict[str, Row] = {}
        channels: dict[tuple[str, str], Row] = {}
        self.unserved = {}
        for number, (name, nodes) in enumerate(where.items()):
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            of_topic = self._channels_of(name, nodes)
            for channel, row in of_topic.items():
                channels[name, channel] = row
            topics[name] = self.topic_of(name, [node.topics[name] for node in nodes], of_topic)
        self.topics, self.channels = topics, channels
        self._sum_up()
        self._make_readers()
        self._make_queries()
        problems = self.watch.look(self)
        for problem in problems:
            key = (problem["topic"], problem["channel"])
            if problem["topic"] in topics:
                row = topics[problem["topic"]]
                row["trouble"] = max(row["trouble"], problem["level"])
            if key in channels:
                channels[key]["trouble"] = max(channels[key]["trouble"], problem["level"])
            if problem["node"] in self.node_rows:
                row = self.node_rows[problem["node"]]
                row["trouble"] = max(row["trouble"], problem["level"])
        self.problems = problems
        self._remember()

    def _channels_of(self, topic: str, nodes: list[NodeState]) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        for node in nodes:
            for name, stats in node.topics[topic]["channels"].items():
                row = rows.get(name)
                if row is None:
                    row = rows[name] = {
                        "topic": topic,
                        "channel": name,
                        "paused": False,
                        "trouble": 0,
                        "nodes": 0,
                        **dict.fromkeys(_SUMS, 0),
                        **dict.fromkeys(_MAYBE),
                        "message_count": 0,
                        "clients": 0,
                        **dict.fromkeys((*_RATES, "handed")),
                    }
                row["nodes"] += 1
                row["paused"] = row["paused"] or stats["paused"]
                if stats["depth"] and not stats["clients"]:
                    count, depth = self.unserved.get((topic, name), (0, 0))
                    self.unserved[topic, name] = count + 1, depth + stats["depth"]
                for field in (*_SUMS, "message_count", "clients"):
                    row[field] += stats[field]
                for field in (*_MAYBE, *_RATES, "handed"):
                    row[field] = _plus(row[field], stats[field])
        for name, row in rows.items():
            row["growth"] = self._growth("channel", f"{topic}/{name}", row["depth"])
        return rows

    def topic_of(self, name: str, parts: list[Row], channels: dict[str, Row]) -> Row:
        row: Row = {"topic": name, "paused": False, "trouble": 0, "nodes": len(parts), "channels": len(channels)}
        own = sum(part["topic_depth"] for part in parts)
        row["topic_depth"] = own
        for field in _SUMS:
            row[field] = sum(channel[field] for channel in channels.values())
        row["depth"] += own
        row["backend_depth"] += sum(part["topic_backend_depth"] for part in parts)
        for field in (*_MAYBE, *_RATES):
            row[field] = None
            for channel in channels.values():
                row[field] = _plus(row[field], channel[field])
        row["clients"] = sum(channel["clients"] for channel in channels.values())
        for field in ("message_count", "message_bytes", "published", "published_bytes"):
            row[field] = None
            for part in parts:
                row[field] = _plus(row[field], part[field])
        if not channels and row["published"] is not None:
            for field in _RATES:
                row[field] = 0.0
        row["paused"] = any(part["paused"] for part in parts)
        row["growth"] = self._growth("topic", name, row["depth"])
        return row

    def _growth(self, kind: str, name: str, depth: int) -> float | None:
        before = self.history.last(kind, name, "depth", self.at - GROWTH_SECONDS)
        return None if before is None else round((depth - before) / GROWTH_SECONDS, 3)

    def _sum_up(self) -> None:
        totals: Row = dict.fromkeys(NUMBERS)
        for row in self.topics.values():
            for field in NUMBERS:
                if field != "topics":
                    totals[field] = _plus(totals[field], row[field])
        for field in (*_SUMS, "message_count", "clients", "channels"):
            totals[field] = totals[field] or 0
        totals["topics"] = len(self.topics)
        if not self.topics and any(node.up for node in self.nodes.values()):
            totals |= dict.fromkeys(("published", "published_bytes", *_RATES, "growth"), 0.0)
        self.totals = totals
        newest = max((version_key(node.described.get("version") or "") for node in self.nodes.values()), default=())
        self.node_rows = {node.address: self._node_row(node, newest) for node in self.nodes.values()}

    def _node_row(self, node: NodeState, newest: tuple[Any, ...]) -> Row:
        described, about, extra = node.described, node.about, node.about.get("node") or {}
        started = about.get("start_time")
        row: Row = {
            "node": node.address,
            "hostname": described.get("hostname") or "",
            "broadcast_address": described.get("broadcast_address") or "",
            "tcp_port": described.get("tcp_port") or 0,
            "http_port": described.get("http_port") or 0,
            "version": described.get("version") or "",
            "kind": None if node.is_flintmq is None else "flintmq" if node.is_flintmq else "nsq",
            "up": node.up,
            "error": node.error,
            "seen": node.seen * 1000 if node.seen else None,
            "started": started * 1000 if started else None,
            "health": about.get("health"),
            "zone": described.get("topology_zone") or "",
            "region": described.get("topology_region") or "",
            "lookupds": [text.partition("/")[0] for text in described.get("remote_addresses") or ()],
            "out_of_date": version_key(described.get("version") or "") < newest,
            "trouble": 0,
            "memory_bytes": about.get("memory", {}).get("heap_in_use_bytes"),
            "connections": extra.get("connections"),
            "disk_free": extra.get("disk_free"),
            "disk_reserve": extra.get("disk_reserve"),
            "disk_full_in": self._full_in(node.address, extra),
            "unsynced_bytes": extra.get("unsynced_bytes"),
            "draining": extra.get("draining"),
            **dict.fromkeys(NUMBERS),
        }
        for field in (*_SUMS, "message_count", "clients", "channels"):
            row[field] = 0
        if node.up:
            row |= dict.fromkeys(("published", "published_bytes", *_RATES))
            for topic in node.topics.values():
                part = part_of_topic(topic)
                for field in NUMBERS:
                    if field not in ("topics", "growth"):
                        row[field] = _plus(row[field], part[field])
        row["topics"] = len(node.topics)
        before = self.history.last("node", node.address, "depth", self.at - GROWTH_SECONDS)
        row["growth"] = None if before is None else round((row["depth"] - before) / GROWTH_SECONDS, 3)
        return row

    def _full_in(self, address: str, extra: Row) -> float | None:
        free, reserve = extra.get("disk_free"), extra.get("disk_reserve")
        before = self.history.last("node", address, "disk_free", self.at - 600)
        if free is None or reserve is None or before is None or before <= free:
            return None
        return round((free - reserve) / ((before - free) / 600)) if free > reserve else 0

    def _make_readers(self) -> None:
        readers: dict[str, Row] = {}
        seen: dict[tuple[str, str, str], tuple[float, int]] = {}
        for node in self.nodes.values():
            if not node.up:
                continue
            for topic, stats in node.topics.items():
                for one in stats["readers"]:
                    name = one["reader"]
                    key = (name, topic, node.address)
                    last = self._offsets.get(key)
                    seconds = self.at - last[0] if last else 0
                    throughput = _rate(one["offset"], last[1], seconds) if last and seconds > 0 else None
                    seen[key] = (self.at, one["offset"])
                    row = readers.setdefault(
                        name,
                        {
                            "reader": name,
                            "topics": [],
                            "lag": 0,
                            "bytes": 0,
                            "throughput": None,
                            "moved": 0.0,
                            "temporary": name.startswith("temporary:"),
                            "orphaned": False,
                            "positions": [],
                        },
                    )
                    moved = (one.get("moved") or 0) / 1e6
                    row["positions"].append(
                        {
                            "topic": topic,
                            "node": node.address,
                            "offset": one["offset"],
                            "lag": one.get("lag") or 0,
                            "bytes": one.get("bytes") or 0,
                            "moved": moved,
                            "throughput": throughput,
                        }
                    )
                    row["lag"] += one.get("lag") or 0
                    row["bytes"] += one.get("bytes") or 0
                    row["moved"] = max(row["moved"], moved)
                    row["throughput"] = _plus(row["throughput"], throughput)
        for row in readers.values():
            row["topics"] = sorted({position["topic"] for position in row["positions"]})
            row["orphaned"] = bool(row["lag"]) and self.at * 1000 - row["moved"] > 3_600_000
        self.readers, self._offsets = readers, seen

    def _make_queries(self) -> None:
        heard: dict[str, list[tuple[Row, str]]] = {}
        for node in self.nodes.values():
            for one in node.pipelines if node.up else ():
                heard.setdefault(one["id"], []).append((one, node.address))
        queries: dict[str, Row] = {}
        for id, reports in heard.items():
            # The newest words of the query itself count, wherever they were heard.
            newest = max((one for one, _ in reports), key=lambda one: int(one["at"]))
            row = queries[id] = {field: newest.get(field) for field in QUERY}
            for field in ("topics", "writes", "readers"):
                row[field] = sorted(newest.get(field) or ())
            row["reported"] = max(one["reported"] for one, _ in reports) / 1e6
            # Elsewhere it has reported once, and does not any more.
            row["nodes"] = sorted(
                address for one, address in reports if newest["at"] - one["at"] <= SILENT_SECONDS * 1000
            )
        names = Counter(row["name"] or row["id"] for row in queries.values())
        for id, row in queries.items():
            name = row["name"] or id
            # What tells it from others of its name.
            row["label"] = name if names[name] == 1 else f"{name} {id[:8]}"
            if row["state"] == "running" and self.at * 1000 - row["reported"] > SILENT_SECONDS * 1000:
                row["state"] = "silent"
        # What needs attention first.
        order = ("failed", "silent", "running", "ended")
        self.queries = dict(sorted(queries.items(), key=lambda one: (order.index(one[1]["state"]), one[1]["label"])))

    def _remember(self) -> None:
        add, at = self.history.add, self.at
        if self._count % FORGET == 0:
            self.history.forget(at)
        fields = FIELDS["topic"]
        add("cluster", "", at, [self.totals[field] for field in fields])
        for name, row in self.node_rows.items():
            if row["up"]:
                add("node", name, at, [*(row[field] for field in fields), row["disk_free"]])
        for name, row in self.topics.items():
            add("topic", name, at, [row[field] for field in fields])
        names = FIELDS["channel"]
        for (topic, channel), row in self.channels.items():
            add("channel", f"{topic}/{channel}", at, [row[field] for field in names])
        for name, row in self.readers.items():
            add("reader", name, at, [row["lag"], row["throughput"]])
        for id, row in self.queries.items():
            if row["state"] == "running":
                add("query", id, at, [row["lag"], row["rows_per_second"], row["batch_seconds"]])


def part_of_topic(topic: Row) -> Row:
    """A topic on one node, with the sums over its channels there."""
    channels = topic["channels"].values()
    part: Row = {field: sum(channel[field] for channel in channels) for field in _SUMS}
    part["depth"] += topic["topic_depth"]
    part["backend_depth"] += topic["topic_backend_depth"]
    for field in (*_MAYBE, *_RATES):
        part[field] = None
        for channel in channels:
            part[field] = _plus(part[field], channel[field])
    part["clients"] = sum(channel["clients"] for channel in channels)
    part["channels"] = len(channels)
    for field in ("topic_depth", "message_count", "message_bytes", "published", "published_bytes", "paused"):
        part[field] = topic[field]
    return part


def _is_gone(node: NodeState, now: float) -> bool:
    return not node.up and now - (node.failed_since or now) > GONE_SECONDS
