"""The routes of NSQ's nsqadmin: ``/api/…``, ``/config``, ``/render``; field for field, without its faults.

What differs from the Go program: lists are never null, a topic without nodes is an empty aggregate and not an error, a
channel that does not exist is a 404 and not a crash, creating something without nsqlookupds is done on the nsqds, and
what is set over ``/config`` is checked. A ``NsqApi`` belongs to one daemon, whose parts it uses.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec

from flintmq import logs
from flintmq.admin import aggregate
from flintmq.admin.access import ADMIN, OPERATE, VIEW, Identity, peer_of
from flintmq.admin.cluster import Result, warning
from flintmq.admin.routes import Guarded
from flintmq.admin.upstream import without_password
from flintmq.errors import UNREADABLE, ClusterError, HttpError
from flintmq.http import site as web
from flintmq.options import LOG_LEVEL, option_table
from flintmq.protocol.wire import valid_name

if TYPE_CHECKING:
    from flintmq.admin.daemon import Admin

__all__ = ["NsqApi", "json_object"]

logger = logging.getLogger(__name__)

LONGEST_BODY = 1 << 20
#: Bytes of an image or a document of Graphite.
LONGEST_RENDERING = 32 << 20
_VERBS = ("pause", "unpause", "empty")


class NsqApi:
    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def routes(self) -> list[Guarded]:
        routes = [
            Guarded("GET", "/api/topics", self._topics, VIEW, is_nsq=True),
            Guarded("POST", "/api/topics", self._create, OPERATE, is_nsq=True),
            Guarded("GET", "/api/topics/:topic", self._topic, VIEW, is_nsq=True),
            # The role depends on the action, which is in the body.
            Guarded("POST", "/api/topics/:topic", self._topic_action, OPERATE, is_nsq=True),
            Guarded("DELETE", "/api/topics/:topic", self._delete_topic, ADMIN, is_nsq=True),
            Guarded("GET", "/api/topics/:topic/:channel", self._channel, VIEW, is_nsq=True),
            Guarded("POST", "/api/topics/:topic/:channel", self._channel_action, OPERATE, is_nsq=True),
            Guarded("DELETE", "/api/topics/:topic/:channel", self._delete_channel, ADMIN, is_nsq=True),
            Guarded("GET", "/api/nodes", self._nodes, VIEW, is_nsq=True),
            Guarded("GET", "/api/nodes/:node", self._node, VIEW, is_nsq=True),
            Guarded("DELETE", "/api/nodes/:node", self._tombstone, ADMIN, is_nsq=True),
            Guarded("GET", "/api/counter", self._counter, VIEW, is_nsq=True),
            Guarded("GET", "/api/graphite", self._graphite, VIEW, is_nsq=True),
            Guarded("GET", "/config/:opt", self._get_config, VIEW, is_nsq=True),
            Guarded("PUT", "/config/:opt", self._put_config, ADMIN, is_nsq=True),
        ]
        if self._admin.options.proxy_graphite:
            routes.append(Guarded("GET", "/render", self._render, VIEW, is_nsq=True, plain=True))
        return routes

    # --- Reads -----------------------------------------------------------------------------------------------------

    async def _topics(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        texts: list[str] = []
        cluster = self._admin.cluster
        topics: Any
        with _upstream():
            if request.arguments().get("inactive") == "true":
                topics = await cluster.inactive(texts)
            else:
                topics = await cluster.topics(texts)
        return {"topics": topics, "message": warning(texts)}

    async def _topic(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        texts: list[str] = []
        name = request.parameters["topic"]
        cluster = self._admin.cluster
        total = aggregate.new_topic(name)
        with _upstream():
            nodes = await cluster.producers(name, texts)
            for topic in await cluster.stats(nodes, texts, topic=name, clients=False):
                aggregate.add_topic(total, topic)
        return total | {"message": warning(texts)}

    async def _channel(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        texts: list[str] = []
        topic, name = request.parameters["topic"], request.parameters["channel"]
        cluster = self._admin.cluster
        total = aggregate.new_channel(topic, name)
        with _upstream():
            nodes = await cluster.producers(topic, texts)
            for one in await cluster.stats(nodes, texts, topic=topic, channel=name):
                for channel in one["channels"]:
                    if channel["channel_name"] == name:
                        aggregate.add_channel(total, channel)
        if not total["nodes"]:
            raise HttpError(404, "CHANNEL_NOT_FOUND")
        aggregate.sort_clients(total["clients"])
        return total | {"message": warning(texts)}

    async def _nodes(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        texts: list[str] = []
        with _upstream():
            nodes = await self._admin.cluster.nodes(texts)
        return {"nodes": nodes, "message": warning(texts)}

    async def _node(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        texts: list[str] = []
        name = request.parameters["node"]
        cluster = self._admin.cluster
        with _upstream():
            nodes = [node for node in await cluster.nodes(texts) if aggregate.http_address(node) == name]
            if not nodes:
                raise HttpError(404, "NODE_NOT_FOUND")
            topics = await cluster.stats(nodes[:1], texts)
        return {
            "node": name,
            "topics": topics,
            "total_messages": sum(topic["message_count"] for topic in topics),
            "total_clients": sum(len(channel["clients"]) for topic in topics for channel in topic["channels"]),
            "message": warning(texts),
        }

    async def _counter(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        texts: list[str] = []
        cluster = self._admin.cluster
        with _upstream():
            topics = await cluster.stats(await cluster.nodes(texts), texts, clients=False)
        counts = {}
        for topic in topics:
            for channel in topic["channels"]:
                key = f"{topic['topic_name']}:{channel['channel_name']}:{channel['node']}"
                counts[key] = {
                    "node": channel["node"],
                    "topic_name": topic["topic_name"],
                    "channel_name": channel["channel_name"],
                    "message_count": channel["message_count"],
                }
        return {"stats": counts, "message": warning(texts)}

    # --- Actions ---------------------------------------------------------------------------------------------------

    async def _done(
        self, request: web.Request, identity: Identity, action: str, result: Result, topic: str, channel: str, node: str
    ) -> dict[str, Any]:
        self._admin.record(request, identity, action, result, topic=topic, channel=channel, node=node)
        return {"message": result.message}

    async def _create(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        body = json_object(await request.body(LONGEST_BODY))
        topic, channel = _text(body, "topic"), _text(body, "channel")
        if not valid_name(topic):
            raise HttpError(400, "INVALID_TOPIC")
        if channel and not valid_name(channel):
            raise HttpError(400, "INVALID_CHANNEL")
        with _upstream():
            result = await self._admin.cluster.create(topic, channel)
        self._admin.record(request, identity, "create_topic", result, topic=topic)
        if channel:
            self._admin.record(request, identity, "create_channel", result, topic=topic, channel=channel)
        return {"message": result.message}

    async def _topic_action(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        return await self._act(request, identity, request.parameters["topic"], "")

    async def _channel_action(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        return await self._act(request, identity, request.parameters["topic"], request.parameters["channel"])

    async def _act(self, request: web.Request, identity: Identity, topic: str, channel: str) -> dict[str, Any]:
        verb = _text(json_object(await request.body(LONGEST_BODY)), "action")
        if verb not in _VERBS:
            raise HttpError(400, "INVALID_ACTION")
        if verb == "empty":
            self._admin.access.require(request, identity, ADMIN, is_nsq=True)
        action = f"{verb}_{'channel' if channel else 'topic'}"
        try:
            result = await self._admin.cluster.act(verb, topic, channel)
        except ClusterError as exc:
            # NSQ tells of these whether they succeeded or not.
            self._admin.record(request, identity, action, exc, topic=topic, channel=channel)
            raise HttpError(502, f"UPSTREAM_ERROR: {exc}") from exc
        return await self._done(request, identity, action, result, topic, channel, "")

    async def _delete_topic(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        topic = request.parameters["topic"]
        with _upstream():
            result = await self._admin.cluster.delete(topic)
        return await self._done(request, identity, "delete_topic", result, topic, "", "")

    async def _delete_channel(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        topic, channel = request.parameters["topic"], request.parameters["channel"]
        with _upstream():
            result = await self._admin.cluster.delete(topic, channel)
        return await self._done(request, identity, "delete_channel", result, topic, channel, "")

    async def _tombstone(self, request: web.Request, identity: Identity) -> dict[str, Any]:
        node = request.parameters["node"]
        try:
            topic = _text(json_object(await request.body(LONGEST_BODY)), "topic")
        except HttpError:
            raise HttpError(400, "INVALID_BODY") from None
        if not valid_name(topic):
            raise HttpError(400, "INVALID_TOPIC")
        with _upstream():
            result = await self._admin.cluster.tombstone(topic, node)
        return await self._done(request, identity, "tombstone_topic_producer", result, topic, "", node)

    # --- Graphite --------------------------------------------------------------------------------------------------

    async def _graphite(self, request: web.Request, identity: Identity) -> dict[str, str]:
        arguments = request.arguments()
        if arguments.get("metric") is None:
            raise HttpError(400, "INVALID_ARG_METRIC")
        if arguments["metric"] != "rate":
            raise HttpError(400, "INVALID_ARG_METRIC")
        if arguments.get("target") is None:
            raise HttpError(400, "INVALID_ARG_TARGET")
        options = self._admin.options
        seconds = options.statsd_interval // 1_000_000_000
        query = f"target={quote(arguments['target'], safe='')}&from=-{2 * seconds}sec&until=-{seconds}sec&format=json"
        status, _, body = await self._ask_graphite("/render", query)
        try:
            series = msgspec.json.decode(body) if status == 200 else None
        except UNREADABLE:
            series = None
        if not isinstance(series, list):
            raise HttpError(500, "INTERNAL_ERROR")
        try:
            value = series[0]["datapoints"][0][0]
        except (LookupError, TypeError):
            value = None
        if not isinstance(value, int | float) or value < 0:
            # NSQ's own program breaks where there is no point.
            return {"rate": "N/A"}
        return {"rate": f"{value / max(1, seconds):.2f}"}

    async def _render(self, request: web.Request, identity: Identity) -> web.Answer:
        status, content_type, body = await self._ask_graphite("/render", request.query)
        return web.Answer(body, content_type, status)

    async def _ask_graphite(self, path: str, query: str) -> tuple[int, str, bytes]:
        import aiohttp
        from yarl import URL

        parts = urlsplit(self._admin.options.graphite_url)
        if not parts.scheme or not parts.hostname:
            raise HttpError(500, "INTERNAL_ERROR")
        headers = {}
        if parts.username:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            headers["Authorization"] = "Basic " + base64.b64encode(login).decode()
        port = f":{parts.port}" if parts.port else ""
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        url = urlunsplit((parts.scheme, host + port, path, query, ""))
        upstream = self._admin.upstream
        try:
            timeout = aiohttp.ClientTimeout(total=self._admin.options.http_client_request_timeout / 1e9)
            async with upstream.session().get(
                URL(url, encoded=True), headers=headers, timeout=timeout, ssl=upstream.tls, allow_redirects=False
            ) as response:
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > LONGEST_RENDERING:
                        raise HttpError(502, "BAD_GATEWAY")
                return response.status, response.headers.get("Content-Type", ""), bytes(body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
            logger.error("graphite does not answer - %s", str(exc) or type(exc).__name__)
            raise HttpError(502, "BAD_GATEWAY") from exc

    # --- Options ---------------------------------------------------------------------------------------------------

    def _check_peer(self, request: web.Request) -> None:
        cidr = self._admin.options.allow_config_from_cidr
        if not cidr:
            return
        address = peer_of(request)
        if address is None:
            raise HttpError(400, "INVALID_REMOTE_ADDR")
        if address not in ipaddress.ip_network(cidr, strict=False):
            raise HttpError(403, "FORBIDDEN")

    async def _get_config(self, request: web.Request, identity: Identity) -> Any:
        self._check_peer(request)
        return self._option(request.parameters["opt"])

    def _option(self, key: str) -> Any:
        options = self._admin.options
        for entry in option_table(type(options)).values():
            if entry.key == key:
                value = getattr(options, key)
                if entry.secret:
                    # A URL that may hold a password, which NSQ's own program shows.
                    return without_password(value)
                if entry.kind is LOG_LEVEL:
                    return (entry.kind.words or {})[value]
                if isinstance(value, tuple):
                    return list(value)
                return value
        raise HttpError(400, "INVALID_OPTION")

    async def _put_config(self, request: web.Request, identity: Identity) -> Any:
        self._check_peer(request)
        if self._admin.options.admin_users:
            self._admin.access.require(request, identity, ADMIN, is_nsq=True)
        key = request.parameters["opt"]
        body = bytes(await request.body(LONGEST_BODY, "INVALID_VALUE"))
        if not body:
            raise HttpError(413, "INVALID_VALUE")
        if key == "nsqlookupd_http_addresses":
            try:
                addresses = msgspec.json.decode(body, type=list[str])
            except UNREADABLE:
                raise HttpError(400, "INVALID_VALUE") from None
            if self._admin.upstream.has_tokens and not {*addresses} <= {*self._admin.cluster.lookupds}:
                # Whoever chooses the nsqlookupds, and with them the nodes, is shown their tokens.
                self._admin.access.require(request, identity, ADMIN)
            await self._admin.set_lookupds(addresses)
        elif key == "log_level":
            level = body.decode("utf-8", "replace").lower()
            if level not in (LOG_LEVEL.words or {}):
                raise HttpError(400, "INVALID_VALUE")
            self._admin.options = replace(self._admin.options, log_level=level)
            logs.set_level(level)
        else:
            raise HttpError(400, "INVALID_OPTION")
        self._admin.record(
            request, identity, "set_option", None, detail=f"{key} = {body[:200].decode(errors='replace')}"
        )
        return self._option(key)


# --- Reading ----------------------------------------------------------------------------------------------------------


class _upstream:
    """Nobody answered: 502, in NSQ's words."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ClusterError):
            logger.error("%s", error)
            raise HttpError(502, f"UPSTREAM_ERROR: {error}") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise HttpError(400, f"INVALID_BODY: {text[:20]} is no number")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _without_surrogates(value: Any) -> Any:
    """Half a character becomes U+FFFD, as in Go."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(one) for one in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(one) for key, one in value.items()}
    return value


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """The object at the beginning of a body, as Go's decoder takes it. HttpError 400 with the reason."""
    text = body.decode("utf-8", "replace")
    if not text.strip():
        raise HttpError(400, "EOF")
    try:
        # What follows the first value is not looked at.
        value, _ = _DECODER.raw_decode(text.lstrip())
    except RecursionError:
        raise HttpError(400, "INVALID_BODY: it is nested too deeply") from None
    except ValueError as exc:
        raise HttpError(400, _go_json_error(text, exc)) from None
    if "\\ud" in text or "\\uD" in text:
        value = _without_surrogates(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HttpError(400, f"json: cannot unmarshal {_go_kind(value)} into Go value of type struct")
    return value


def _go_json_error(text: str, exc: ValueError) -> str:
    if isinstance(exc, json.JSONDecodeError) and exc.pos >= len(text.lstrip()):
        return "unexpected EOF"
    position = exc.pos if isinstance(exc, json.JSONDecodeError) else 0
    character = text.lstrip()[position : position + 1]
    where = "looking for beginning of value" if position == 0 else "in the object"
    return f"invalid character '{character}' {where}"


def _go_kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "number"


def _text(body: dict[str, Any], name: str) -> str:
    # Go's decoder takes keys in any case.
    found = body.get(name)
    if found is None:
        found = next((value for key, value in body.items() if key.lower() == name), None)
    if found is None:
        return ""
    if not isinstance(found, str):
        kind = "object" if isinstance(found, dict) else _go_kind(found)
        raise HttpError(400, f"json: cannot unmarshal {kind} into Go struct field .{name} of type string")
    return found
