"""The routes under ``/api/v2`` that show numbers: see docs/nsqadmin-api.md. ``messages`` has those about messages."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import msgspec

from flintmq import __version__
from flintmq.admin import aggregate, history
from flintmq.admin.access import ADMIN, NOBODY, OPERATE, VIEW, Identity, rank
from flintmq.admin.actions import Action
from flintmq.admin.clients import FIELDS as CLIENT_FIELDS
from flintmq.admin.clients import NAMES as CLIENT_NAMES
from flintmq.admin.clients import ORDER as CLIENT_ORDER
from flintmq.admin.cluster import Result
from flintmq.admin.hub import channel_part
from flintmq.admin.lists import matching, page
from flintmq.admin.nsq_api import json_object
from flintmq.admin.routes import Guarded
from flintmq.admin.state import part_of_topic
from flintmq.admin.upstream import UpstreamError, many, query_of
from flintmq.errors import ClusterError, HttpError
from flintmq.http import site as web
from flintmq.protocol.wire import NSQ_VERSION, valid_name

if TYPE_CHECKING:
    from flintmq.admin.daemon import Admin

__all__ = ["PagesApi"]

MOST_PROBLEMS = 20
MOST_SPARKLINES = 200
RANGES = {"1h": 3600, "15m": 900, "6h": 6 * 3600, "24h": 86_400}
EVENTS = "text/event-stream"
LONGEST_BODY = 1 << 20
#: What a page may do by its name, and the role that it needs.
ACTION_ROLES = {
    "create_topic": OPERATE,
    "create_channel": OPERATE,
    "pause_topic": OPERATE,
    "unpause_topic": OPERATE,
    "pause_channel": OPERATE,
    "unpause_channel": OPERATE,
    "empty_topic": ADMIN,
    "empty_channel": ADMIN,
    "delete_topic": ADMIN,
    "delete_channel": ADMIN,
    "tombstone_topic_producer": ADMIN,
    "drain_node": ADMIN,
}
#: The actions on one node; every other is done wherever the topic is.
ON_ONE_NODE = ("drain_node", "tombstone_topic_producer")


def typed(arguments: Any, name: str) -> str:
    return str(arguments.get(name) or "")


class PagesApi:
    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._state = admin.state

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/api/v2/session", self._session, NOBODY),
            Guarded("POST", "/api/v2/login", self._login, NOBODY),
            Guarded("POST", "/api/v2/logout", self._logout, NOBODY),
            Guarded("GET", "/api/v2/events", self._events, VIEW, unlogged=True, is_private=True),
            Guarded("GET", "/api/v2/overview", self._overview, VIEW),
            Guarded("GET", "/api/v2/problems", self._problems, VIEW),
            Guarded("GET", "/api/v2/topics", self._topics, VIEW),
            Guarded("GET", "/api/v2/topics/:topic", self._topic, VIEW),
            Guarded("GET", "/api/v2/channels", self._channels, VIEW),
            Guarded("GET", "/api/v2/topics/:topic/:channel", self._channel, VIEW),
            Guarded("GET", "/api/v2/nodes", self._nodes, VIEW),
            Guarded("GET", "/api/v2/nodes/:node", self._node, VIEW),
            Guarded("GET", "/api/v2/clients", self._clients, VIEW),
            Guarded("GET", "/api/v2/client", self._client, VIEW),
            Guarded("GET", "/api/v2/lookupds", self._lookupds, VIEW),
            Guarded("GET", "/api/v2/history", self._history, VIEW),
            Guarded("GET", "/api/v2/sparklines", self._sparklines, VIEW),
            Guarded("GET", "/api/v2/search", self._search, VIEW),
            Guarded("GET", "/api/v2/pipelines", self._pipelines, VIEW),
            Guarded("GET", "/api/v2/actions", self._actions, VIEW),
            Guarded("GET", "/api/v2/preview", self._preview, VIEW),
            # The role depends on the action, which is in the body; what follows checks it.
            Guarded("POST", "/api/v2/actions", self._act, OPERATE, is_nsq=True),
        ]

    # --- Session ---------------------------------------------------------------------------------------------------

    def _about(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        options = self._admin.options
        role = identity.role
        return {
            "user": identity.user,
            "role": role,
            "login": self._admin.access.way,
            "csrf": identity.csrf,
            "version": __version__,
            "nsq_version": NSQ_VERSION,
            "mode": "lookupd" if options.nsqlookupd_http_addresses else "nsqd",
            "lookupds": list(options.nsqlookupd_http_addresses),
            "base_path": options.base_path,
            "boot": self._admin.boot,
            "nsq_actions": identity.acl_admin or rank(role) >= rank(OPERATE),
            "insecure": options.insecure,
            "interval": options.refresh_interval // 1_000_000,
            "graphite": self._admin.graphite if rank(role) else "",
        }

    async def _session(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        return self._about(request, await self._admin.access.identify(request))

    async def _login(self, request: web.Request, identity: Identity) -> web.Answer:
        body = json_object(await request.body(LONGEST_BODY))
        user, password = body.get("user"), body.get("password")
        if not isinstance(user, str) or not isinstance(password, str):
            raise HttpError(400, "INVALID_BODY: give user and password")
        found, cookie = await self._admin.access.log_in(request, user, password)
        self._admin.record(request, found, "login", None)
        return web.Answer(web.json_bytes(self._about(request, found)), web.JSON, headers={"Set-Cookie": cookie})

    async def _logout(self, request: web.Request, identity: Identity) -> web.Answer:
        cookie = self._admin.access.log_out(request)
        self._admin.hub.sampled()
        nobody = Identity(None, None, self._admin.access.way)
        return web.Answer(web.json_bytes(self._about(request, nobody)), web.JSON, headers={"Set-Cookie": cookie})

    async def _events(self, request: web.Request, identity: Identity) -> web.Answer:
        await self._state.fresh()
        scopes = [unquote(scope) for scope in typed(request.arguments(), "scope").split(",")]
        access = self._admin.access
        who = identity.user or access.address_of(request)
        stream = self._admin.hub.listen(scopes, who, lambda role: access.still_may(identity, role))
        return web.Answer(content_type=EVENTS, headers={"X-Accel-Buffering": "no"}, pieces=stream)

    # --- Numbers ---------------------------------------------------------------------------------------------------

    async def _overview(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        state = self._state
        await state.fresh()
        fields = ("published", "delivered", "depth", "in_flight", "requeued", "timed_out")
        past = state.history.read("cluster", "", state.at, 3600, 60, fields)
        return {
            "at": state.at * 1000,
            "totals": state.totals,
            "nodes": {"total": len(state.nodes), "up": sum(node.up for node in state.nodes.values())},
            "lookupds": {"total": len(state.lookupds), "up": sum(error is None for error in state.lookupds.values())},
            "problems": state.problems[:MOST_PROBLEMS],
            "problem_count": len(state.problems),
            "sparklines": {"step": past.step, "from": past.start * 1000, "series": past.series},
            "missing": state.missing,
        }

    async def _problems(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        return {"at": self._state.at * 1000, "problems": self._state.problems, "missing": self._state.missing}

    async def _topics(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        state = self._state
        await state.fresh()
        rows = list(state.topics.values())
        return page(
            rows,
            request.arguments(),
            names=("topic",),
            default="-trouble,-published,-depth",
            fields=rows[0] if rows else ("topic", "trouble", "published", "depth"),
            at=state.at,
            missing=state.missing,
        )

    async def _channels(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        state = self._state
        await state.fresh()
        arguments = request.arguments()
        topic = typed(arguments, "topic")
        rows = [row for row in state.channels.values() if not topic or row["topic"] == topic]
        return page(
            rows,
            arguments,
            names=("topic", "channel"),
            default="-trouble,-delivered,-depth",
            fields=rows[0] if rows else ("topic", "channel", "trouble", "delivered", "depth"),
            at=state.at,
            missing=state.missing,
        )

    async def _nodes(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        state = self._state
        await state.fresh()
        rows = list(state.node_rows.values())
        return page(
            rows,
            request.arguments(),
            names=("node", "hostname"),
            default="-trouble,node",
            fields=rows[0] if rows else ("node", "trouble"),
            at=state.at,
            missing=state.missing,
        )

    def _capabilities(self, nodes: list[Any]) -> dict[str, bool]:
        can = any(node.is_flintmq for node in nodes)
        return {"peek": can, "log": can, "settings": can}

    def _problems_of(self, **names: str) -> list[dict[str, Any]]:
        return [one for one in self._state.problems if all(one[key] == name for key, name in names.items())]

    async def _topic(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        state, name = self._state, request.parameters["topic"]
        await state.fresh()
        row = state.topics.get(name)
        if row is None:
            return await self._inactive(name)
        nodes = state.having(name)
        return {
            "at": state.at * 1000,
            "topic": row,
            "nodes": [
                {
                    "node": node.address,
                    "hostname": node.described.get("hostname") or "",
                    **part_of_topic(node.topics[name]),
                }
                for node in nodes
            ],
            "channels": [row for (topic, _), row in sorted(state.channels.items()) if topic == name],
            "e2e": _e2e([node.topics[name]["e2e"] for node in nodes]),
            "problems": self._problems_of(topic=name),
            "readers": [
                {"reader": reader, **position}
                for reader, one in state.readers.items()
                for position in one["positions"]
                if position["topic"] == name
            ],
            "capabilities": self._capabilities(nodes),
            "inactive": False,
            "missing": state.missing,
        }

    async def _inactive(self, name: str) -> dict[str, Any]:
        """A topic that nobody has. nsqlookupds may know it all the same."""
        state, cluster = self._state, self._admin.cluster
        answers = await many(
            cluster.lookupds,
            lambda address: self._admin.upstream.get("nsqlookupd", address, "lookup", query_of(topic=name)),
        )
        if not answers.answers:
            raise HttpError(404, "TOPIC_NOT_FOUND")
        channels = sorted({channel for _, answer in answers.answers for channel in answer.get("channels") or ()})
        row = state.topic_of(name, [], {}) | {"message_count": 0, "published": 0.0}
        return {
            "at": state.at * 1000,
            "topic": row,
            "nodes": [],
            "channels": [{"topic": name, "channel": channel, "nodes": 0} for channel in channels],
            "e2e": None,
            "problems": [],
            "readers": [],
            "capabilities": self._capabilities([]),
            "inactive": True,
            "missing": state.missing,
        }

    async def _channel(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        state = self._state
        topic, name = request.parameters["topic"], request.parameters["channel"]
        await state.fresh()
        if topic not in state.topics:
            raise HttpError(404, "TOPIC_NOT_FOUND")
        row = state.channels.get((topic, name))
        if row is None:
            raise HttpError(404, "CHANNEL_NOT_FOUND")
        nodes = state.having(topic, name)
        parts = [(node, node.topics[topic]["channels"][name]) for node in nodes]
        clients = await self._admin.clients.find(topic, name)
        return {
            "at": state.at * 1000,
            "channel": row,
            "nodes": [
                {"node": node.address, "hostname": node.described.get("hostname") or "", **channel_part(part)}
                for node, part in parts
            ],
            "e2e": _e2e([part["e2e"] for _, part in parts]),
            "ready": sum(client["ready"] for client in clients.rows),
            "problems": self._problems_of(topic=topic, channel=name),
            "capabilities": self._capabilities(nodes),
            "dead_letter_topic": await self._admin.dead_letter_topic(topic, name),
            "missing": state.missing,
        }

    async def _node(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        state, name = self._state, request.parameters["node"]
        await state.fresh()
        node = state.nodes.get(name)
        if node is None:
            raise HttpError(404, "NODE_NOT_FOUND")
        tombstoned = {one["topic"] for one in state.tombstones if one["node"] == name}
        return {
            "at": state.at * 1000,
            "node": state.node_rows[name],
            "topics": [
                {"topic": topic, "tombstoned": topic in tombstoned, **part_of_topic(stats)}
                for topic, stats in sorted(node.topics.items())
            ],
            "problems": self._problems_of(node=name),
            "missing": state.missing,
        }

    async def _clients(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        found = await self._admin.clients.find(*(typed(arguments, name) for name in ("topic", "channel", "node")))
        return page(
            found.rows,
            arguments,
            names=CLIENT_NAMES,
            default=CLIENT_ORDER,
            fields=CLIENT_FIELDS,
            at=found.at,
            missing=found.missing,
            is_ordered=True,
        )

    async def _client(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        wanted = unquote(request.arguments().text("id"))
        node, topic, channel, address = [*wanted.split("|"), "", "", ""][:4]
        found = await self._admin.clients.find(topic, channel, node)
        for row in found.rows:
            if row["remote_address"] == address and row["topic"] == topic and row["node"] == node:
                return {"at": found.at * 1000, "client": row}
        raise HttpError(404, "CLIENT_NOT_FOUND")

    async def _lookupds(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        upstream, cluster = self._admin.upstream, self._admin.cluster

        async def ask(address: str) -> dict[str, Any]:
            row: dict[str, Any] = {
                "address": address,
                "up": True,
                "error": None,
                "version": "",
                "nodes": 0,
                "topics": 0,
            }
            try:
                row["version"] = (await upstream.get("nsqlookupd", address, "info")).get("version") or ""
                row["nodes"] = len((await upstream.get("nsqlookupd", address, "nodes")).get("producers") or ())
                row["topics"] = len((await upstream.get("nsqlookupd", address, "topics")).get("topics") or ())
            except UpstreamError as exc:
                row |= {"up": False, "error": str(exc)}
            return row

        rows = [row for _, row in (await many(cluster.lookupds, ask)).answers]
        try:
            inactive = await cluster.inactive([])
        except ClusterError:
            inactive = {}
        return {
            "at": self._state.at * 1000,
            "lookupds": rows,
            "inactive": inactive,
            "tombstones": self._state.tombstones,
        }

    # --- History and search ----------------------------------------------------------------------------------------

    async def _history(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        kind = arguments.word("kind", tuple(history.FIELDS))
        seconds = RANGES[arguments.word("range", tuple(RANGES))]
        points = arguments.number("points", 600, lowest=1, highest=2000)
        name = "" if kind == "cluster" else arguments.text("name")
        past = self._state.history.read(kind, name, self._state.at, seconds, points)
        return {"kind": kind, "name": name, "from": past.start * 1000, "step": past.step, "series": past.series}

    async def _sparklines(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        arguments = request.arguments()
        kind = arguments.word("kind", tuple(history.FIELDS))
        names = [name for name in typed(arguments, "names").split(",") if name][:MOST_SPARKLINES]
        series = [name for name in typed(arguments, "series").split(",") if name] or ["depth"]
        if unknown := [name for name in series if name not in history.FIELDS[kind]]:
            raise HttpError(400, f"INVALID_SERIES: there is no series {unknown[0][:80]}")
        seconds = RANGES[arguments.word("range", tuple(RANGES))]
        points = arguments.number("points", 30, lowest=1, highest=200)
        items = {}
        past = self._state.history.read("cluster", "", self._state.at, seconds, points)
        for name in names:
            past = self._state.history.read(kind, name, self._state.at, seconds, points, series)
            items[name] = past.series
        return {"from": past.start * 1000, "step": past.step, "items": items}

    async def _search(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        state = self._state
        await state.fresh()
        arguments = request.arguments()
        text = typed(arguments, "q").lower().strip()
        limit = arguments.number("limit", 20, lowest=1, highest=100)
        if not text:
            return {"results": [], "clients": "ready"}
        results: list[tuple[int, str, dict[str, Any]]] = []

        def add(kind: str, name: str, detail: str, link: str, also: str = "") -> None:
            low = name.lower()
            if text in low or text in also.lower():
                place = 0 if low.startswith(text) else 1 if text in low else 2
                results.append((place, name, {"kind": kind, "name": name, "detail": detail, "link": link}))

        for name, row in state.topics.items():
            detail = f"{row['channels']} channel{'' if row['channels'] == 1 else 's'}, depth {row['depth']:,}"
            add("topic", name, detail, f"/topics/{quote(name, safe='')}")
        for (topic, channel), row in state.channels.items():
            link = f"/topics/{quote(topic, safe='')}/{quote(channel, safe='')}"
            add("channel", channel, f"of {topic}, depth {row['depth']:,}", link, f"{topic}/{channel}")
        for name, row in state.node_rows.items():
            detail = f"{row['hostname']}, {row['topics']} topics"
            add("node", name, detail, f"/nodes/{quote(name, safe=':[]')}", row["hostname"])
        for name, row in state.readers.items():
            add("reader", name, f"lag {row['lag']}", "/pipelines")
        for row in state.queries.values():
            add("query", row["label"], f"{row['state']}, reads {', '.join(row['topics']) or 'no topic'}", "/pipelines")
        known = self._admin.clients.known()
        if known is None:
            self._admin.clients.ask_soon()
        for row in known.rows if known is not None else ():
            detail = f"{row['hostname']} {row['remote_address']}, {row['topic']}/{row['channel']}"
            name = row["client_id"] or row["remote_address"]
            add("client", name, detail, f"/clients?id={row['id']}", f"{row['hostname']} {row['remote_address']}")
        results.sort(key=lambda one: one[:2])
        return {"results": [one for _, _, one in results[:limit]], "clients": "ready" if known else "loading"}

    async def _pipelines(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        state = self._state
        await state.fresh()
        topic = typed(request.arguments(), "topic")
        readers = [row for _, row in sorted(state.readers.items()) if not topic or topic in row["topics"]]
        queries = [
            row for row in state.queries.values() if not topic or topic in row["topics"] or topic in row["writes"]
        ]
        return {
            "at": state.at * 1000,
            "queries": queries,
            "readers": readers,
            "unsupported": sorted(node.address for node in state.nodes.values() if node.up and not node.is_flintmq),
            "missing": state.missing,
        }

    # --- Actions ---------------------------------------------------------------------------------------------------

    async def _actions(self, request: web.Request, identity: Identity) -> Any:
        arguments = request.arguments()
        rows = [msgspec.to_builtins(entry) for entry in self._admin.actions.entries]
        form = arguments.word("format", ("json", "csv", "jsonl"))
        fields = [field.name for field in msgspec.structs.fields(Action)]
        names = ("user", "action", "topic", "channel", "node", "remote", "detail")
        if form != "json":
            # All that the page would show on its pages, in its order.
            found = sorted(matching(rows, arguments, names), key=lambda row: -row["time"])
            if form == "jsonl":
                return web.Answer(b"".join(web.json_bytes(row) + b"\n" for row in found), "application/x-ndjson")
            text = io.StringIO()
            writer = csv.writer(text)
            writer.writerow(fields)
            # A cell that begins so is a formula to a spreadsheet.
            writer.writerows([[_cell(row[field]) for field in fields] for row in found])
            return web.Answer(text.getvalue().encode(), "text/csv; charset=utf-8")
        return page(rows, arguments, names=names, default="-time", fields=fields, at=self._admin.wall())

    @staticmethod
    def _action(given: Any) -> str:
        action = given.get("action")
        if not isinstance(action, str) or action not in ACTION_ROLES:
            raise HttpError(400, f"INVALID_ACTION: action must be one of {', '.join(ACTION_ROLES)}")
        return action

    def _target(self, given: Any) -> tuple[str, str, str, str]:
        action = self._action(given)
        topic, channel, node = (given.get(name) or "" for name in ("topic", "channel", "node"))
        if action != "drain_node" and not (isinstance(topic, str) and valid_name(topic)):
            raise HttpError(400, "INVALID_TOPIC: give the name of a topic")
        if action.endswith("_channel") and not (isinstance(channel, str) and valid_name(channel)):
            raise HttpError(400, "INVALID_CHANNEL: give the name of a channel")
        if not isinstance(node, str):
            raise HttpError(400, "INVALID_NODE: give the address of a node")
        if action not in ON_ONE_NODE:
            if node:
                # Whoever names one node must not hit all of them.
                raise HttpError(400, f"INVALID_NODE: {action} is done on every node, give none")
        elif node not in self._state.nodes:
            raise HttpError(404, "NODE_NOT_FOUND")
        return action, topic, channel if action.endswith("_channel") else "", node

    async def _count(self, action: str, topic: str, channel: str, node: str) -> dict[str, Any]:
        """What an action would hit, asked now."""
        cluster, texts = self._admin.cluster, list[str]()
        result: dict[str, Any] = {
            "action": action,
            **dict.fromkeys(("messages", "in_flight", "deferred", "channels", "clients"), 0),
            "nodes": [],
            "confirm": None,
            "missing": self._state.missing,
        }
        if action.startswith("create"):
            return result
        try:
            # Those that the action itself finds: a sample may be older than a topic.
            nodes = [aggregate.node_at(node)] if node else await cluster.producers(topic, texts)
            if not nodes:
                return result
            topics = await cluster.stats(nodes, texts, topic=topic, channel=channel, clients=False)
        except ClusterError as exc:
            raise HttpError(502, f"UPSTREAM_ERROR: {exc}") from exc
        having = {one["node"] for one in topics if not channel or one["channels"]}
        result["nodes"] = [node] if node else sorted(having)
        names = set()
        for one in topics:
            if not channel:
                result["messages"] += one["depth"]
            # Emptying a topic leaves what its channels have.
            for each in one["channels"] if action != "empty_topic" else ():
                if channel and each["channel_name"] != channel:
                    continue
                names.add((one["topic_name"], each["channel_name"]))
                result["in_flight"] += each["in_flight_count"]
                result["deferred"] += each["deferred_count"]
                result["clients"] += each["client_count"]
                result["messages"] += each["depth"] + each["in_flight_count"] + each["deferred_count"]
        result["channels"] = len(names)
        if action == "delete_topic" and (result["messages"] or texts):
            # Of a node that did not answer nobody knows what it has.
            result["confirm"] = topic
        return result

    async def _preview(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        return await self._count(*self._target(request.arguments()))

    async def _act(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        await self._state.fresh()
        body = json_object(await request.body(LONGEST_BODY))
        action = self._action(body)
        # NSQ knows them all but one.
        self._admin.access.require(request, identity, ACTION_ROLES[action], is_nsq=action != "drain_node")
        action, topic, channel, node = self._target(body)
        cluster = self._admin.cluster
        if action == "delete_topic":
            counted = await self._count(action, topic, channel, node)
            if counted["confirm"] is not None and body.get("confirm") != counted["confirm"]:
                count = counted["messages"]
                raise HttpError(400, f"CONFIRM: {count} messages will be lost, give the topic's name as confirm")
        try:
            if action.startswith("create"):
                result = await cluster.create(topic, channel)
            elif action.startswith("delete"):
                result = await cluster.delete(topic, channel)
            elif action == "tombstone_topic_producer":
                result = await cluster.tombstone(topic, node)
            elif action == "drain_node":
                result = Result()
                await cluster.post("nsqd", [node], "drain", "", result)
            else:
                result = await cluster.act(action.partition("_")[0], topic, channel)
        except ClusterError as exc:
            self._admin.record(request, identity, action, exc, topic=topic, channel=channel, node=node)
            raise HttpError(502, f"UPSTREAM_ERROR: {exc}") from exc
        self._admin.record(request, identity, action, result, topic=topic, channel=channel, node=node)
        outcomes = [{"target": target, "error": error or None} for target, error in result.outcomes]
        return {"message": result.message, "results": outcomes}


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _e2e(parts: list[Any]) -> dict[str, Any] | None:
    """Quantiles over nodes, in milliseconds; None if nobody measures."""
    if not any(part and part.get("percentiles") for part in parts):
        return None
    total = aggregate.no_latency("", "")
    for part in parts:
        aggregate.add_latency(total, aggregate.latency_of(part))
    quantiles = [
        {
            "quantile": one["quantile"],
            **{name: round(one[name] / 1e6, 3) for name in ("min", "max", "average")},
        }
        for one in total["percentiles"]
    ]
    return {"count": total["count"], "quantiles": quantiles}
