"""How the numbers of several nsqds become those of a cluster, field for field as in NSQ's nsqadmin.

Everything here is a function of documents: nodes as nsqlookupds list them, topics and channels as ``/stats`` has them.
Aggregates are made of copies: what is told of one node is never touched by adding it to others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flintmq.addresses import host_of, join, port_of
from flintmq.errors import OptionError

__all__ = [
    "add_channel",
    "add_topic",
    "http_address",
    "merge_nodes",
    "new_channel",
    "new_topic",
    "node_of_channel",
    "node_of_topic",
    "sort_clients",
    "version_key",
]

_LOCALITIES = ("zone_local_msg_count", "region_local_msg_count", "global_msg_count")
_CHANNEL_SUMS = (
    "depth",
    "memory_depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "requeue_count",
    "timeout_count",
    "message_count",
    "client_count",
)
_TOPIC_SUMS = ("depth", "memory_depth", "backend_depth", "message_count")

# --- Nodes ------------------------------------------------------------------------------------------------------------

_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?")


def version_key(version: str) -> tuple[Any, ...]:
    """Return what semantic versions are ordered by; one that cannot be read counts as 0.0.0."""
    found = _VERSION.fullmatch(version)
    if found is None:
        return (0, 0, 0, 1, ())
    words = tuple(
        (0, int(word), "") if word.isdigit() else (1, 0, word) for word in (found[4] or "").split(".") if word
    )
    # A version without a word behind it comes after all that have one.
    return (int(found[1]), int(found[2]), int(found[3]), 0 if words else 1, words)


def http_address(node: Mapping[str, Any]) -> str:
    return join(node["broadcast_address"], node["http_port"])


def node(described: Mapping[str, Any], topics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A node as ``/api/nodes`` shows it, from what a daemon says about it."""
    result: dict[str, Any] = {
        "remote_addresses": [],
        "remote_address": described.get("remote_address") or "",
        "hostname": described.get("hostname") or "",
        "broadcast_address": described.get("broadcast_address") or "",
        "tcp_port": described.get("tcp_port") or 0,
        "http_port": described.get("http_port") or 0,
        "version": described.get("version") or "",
    }
    for name in ("topology_zone", "topology_region"):
        if described.get(name):
            result[name] = described[name]
    result["topics"] = sorted(topics, key=lambda topic: str(topic["topic"]))
    result["out_of_date"] = False
    return result


def node_at(address: str) -> dict[str, Any]:
    """A node of which nothing is known but where it is asked."""
    try:
        port = port_of(address)
    except OptionError:
        port = 0
    return node({"broadcast_address": host_of(address), "http_port": port}, ())


def merge_nodes(answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The nodes that nsqlookupds list, each once: what the first one says, with the addresses that all of them see."""
    found: dict[str, dict[str, Any]] = {}
    for address, answer in answers:
        for described in answer.get("producers") or ():
            key = join(described.get("broadcast_address") or "", described.get("tcp_port") or 0)
            if key not in found:
                names, tombstones = described.get("topics") or (), described.get("tombstones") or ()
                marks = [*tombstones, *[False] * len(names)]
                topics = [{"topic": name, "tombstoned": mark} for name, mark in zip(names, marks, strict=False)]
                found[key] = node(described, topics)
            found[key]["remote_addresses"].append(f"{address}/{described.get('remote_address') or 'N/A'}")
    newest = max((version_key(one["version"]) for one in found.values()), default=())
    for one in found.values():
        one["out_of_date"] = version_key(one["version"]) < newest
    return sorted(found.values(), key=lambda one: str(one["hostname"]))


# --- Topics and channels of one node ----------------------------------------------------------------------------------


def _localities(stats: Mapping[str, Any], result: dict[str, Any]) -> None:
    if total := sum(stats.get(name) or 0 for name in _LOCALITIES):
        result["delivery_msg_count"] = total
    for name in _LOCALITIES:
        if stats.get(name):
            result[name] = stats[name]


def node_of_channel(stats: Mapping[str, Any], topic: str, address: str, hostname: str, now: int) -> dict[str, Any]:
    """A channel on one node; ``now`` is in seconds since 1970."""
    depth, backend = stats.get("depth") or 0, stats.get("backend_depth") or 0
    name = stats.get("channel_name") or ""
    result: dict[str, Any] = {
        "node": address,
        "hostname": hostname,
        "topic_name": topic,
        "channel_name": name,
        "depth": depth,
        "memory_depth": depth - backend,
        "backend_depth": backend,
        "in_flight_count": stats.get("in_flight_count") or 0,
        "deferred_count": stats.get("deferred_count") or 0,
        "requeue_count": stats.get("requeue_count") or 0,
        "timeout_count": stats.get("timeout_count") or 0,
        "message_count": stats.get("message_count") or 0,
    }
    _localities(stats, result)
    clients = stats.get("clients") or []
    # A daemon older than 1.1 does not count them.
    count = stats.get("client_count")
    result["client_count"] = len(clients) if count is None else count
    result["nodes"] = []
    result["clients"] = [_client(client, address, now) for client in clients]
    result["paused"] = bool(stats.get("paused"))
    result["e2e_processing_latency"] = latency_of(stats.get("e2e_processing_latency"))
    return result


def node_of_topic(stats: Mapping[str, Any], address: str, hostname: str, now: int) -> dict[str, Any]:
    """A topic on one node, with its channels."""
    depth, backend = stats.get("depth") or 0, stats.get("backend_depth") or 0
    name = stats.get("topic_name") or ""
    result: dict[str, Any] = {
        "node": address,
        "hostname": hostname,
        "topic_name": name,
        "depth": depth,
        "memory_depth": depth - backend,
        "backend_depth": backend,
        "message_count": stats.get("message_count") or 0,
    }
    channels = [node_of_channel(one, name, address, hostname, now) for one in stats.get("channels") or ()]
    for locality in ("delivery_msg_count", *_LOCALITIES):
        if total := sum(one.get(locality, 0) for one in channels):
            result[locality] = total
    result["nodes"] = []
    result["channels"] = channels
    result["paused"] = bool(stats.get("paused"))
    result["e2e_processing_latency"] = latency_of(stats.get("e2e_processing_latency"))
    return result


_CLIENT_FIELDS: tuple[tuple[str, Any], ...] = (
    ("remote_address", ""),
    ("version", ""),
    ("client_id", ""),
    ("hostname", ""),
    ("user_agent", ""),
    ("connect_ts", 0),
    ("connected", 0),
    ("in_flight_count", 0),
    ("ready_count", 0),
    ("finish_count", 0),
    ("requeue_count", 0),
    ("message_count", 0),
    ("sample_rate", 0),
    ("deflate", False),
    ("snappy", False),
    ("authed", False),
    ("auth_identity", ""),
    ("auth_identity_url", ""),
    ("tls", False),
    ("tls_cipher_suite", ""),
    ("tls_version", ""),
    ("tls_negotiated_protocol", ""),
    ("tls_negotiated_protocol_is_mutual", False),
)
_TOPOLOGY = ("node_topology_region", "node_topology_zone", "topology_region", "topology_zone")


def _client(stats: Mapping[str, Any], address: str, now: int) -> dict[str, Any]:
    result: dict[str, Any] = {"node": address}
    for name, default in _CLIENT_FIELDS:
        value = stats.get(name)
        result[name] = default if value is None else value
    result["connected"] = max(0, now - result["connect_ts"]) * 1_000_000_000
    for name in _TOPOLOGY:
        if stats.get(name):
            result[name] = stats[name]
    return result


# --- Latencies --------------------------------------------------------------------------------------------------------


def latency_of(stats: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of one node; whose it is stands around it, and only sums say it themselves."""
    count = (stats or {}).get("count") or 0
    percentiles = []
    for one in (stats or {}).get("percentiles") or ():
        value = one.get("value") or 0
        same = {"min": value, "max": value, "average": value}
        percentiles.append({"quantile": one.get("quantile") or 0, "value": value, **same, "count": count})
    return {"count": count, "percentiles": percentiles, "topic": "", "channel": "", "host": ""}


def no_latency(topic: str, channel: str) -> dict[str, Any]:
    return {"count": 0, "percentiles": [], "topic": topic, "channel": channel, "host": "*"}


def add_latency(total: dict[str, Any], other: Mapping[str, Any]) -> None:
    total["host"] = "*"
    total["count"] += other["count"]
    known = {one["quantile"]: one for one in total["percentiles"]}
    for one in other["percentiles"]:
        mine = known.get(one["quantile"])
        if mine is None:
            total["percentiles"].append({name: value for name, value in one.items() if name != "value"})
            continue
        mine["min"] = min(mine["min"], one["min"])
        mine["max"] = max(mine["max"], one["max"])
        mine["count"] += one["count"]
        if mine["count"]:
            mine["average"] += (one["average"] - mine["average"]) * one["count"] / mine["count"]
        else:
            mine["average"] = 0
    total["percentiles"].sort(key=lambda one: -one["quantile"])


# --- Sums -------------------------------------------------------------------------------------------------------------


def new_topic(name: str) -> dict[str, Any]:
    """The aggregate of no node."""
    return {
        "node": "*",
        "hostname": "",
        "topic_name": name,
        **dict.fromkeys(_TOPIC_SUMS, 0),
        "nodes": [],
        "channels": [],
        "paused": False,
        "e2e_processing_latency": no_latency(name, ""),
    }


def new_channel(topic: str, name: str) -> dict[str, Any]:
    return {
        "node": "*",
        "hostname": "",
        "topic_name": topic,
        "channel_name": name,
        **dict.fromkeys(_CHANNEL_SUMS, 0),
        "nodes": [],
        "clients": [],
        "paused": False,
        "e2e_processing_latency": no_latency(topic, name),
    }


def _sum(total: dict[str, Any], other: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        total[name] += other[name]
    for name in ("delivery_msg_count", *_LOCALITIES):
        if other.get(name):
            total[name] = total.get(name, 0) + other[name]
    total["paused"] = total["paused"] or other["paused"]
    add_latency(total["e2e_processing_latency"], other["e2e_processing_latency"])


def add_channel(total: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add what one node says of a channel to the sum over nodes."""
    _sum(total, other, _CHANNEL_SUMS)
    total["nodes"].append(other)
    total["nodes"].sort(key=lambda one: one["hostname"])
    total["clients"] += other["clients"]


def add_topic(total: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add what one node says of a topic, and of its channels, to the sum over nodes."""
    _sum(total, other, _TOPIC_SUMS)
    known = {one["channel_name"]: one for one in total["channels"]}
    for channel in other["channels"]:
        name = channel["channel_name"]
        if name not in known:
            known[name] = new_channel(total["topic_name"], name)
            total["channels"].append(known[name])
        add_channel(known[name], channel)
    total["nodes"].append(other)
    total["nodes"].sort(key=lambda one: one["hostname"])


def sort_clients(clients: list[dict[str, Any]]) -> None:
    """By node; inside a node the near ones first: same zone, same region, then by region and zone."""

    def key(client: Mapping[str, Any]) -> tuple[Any, ...]:
        zone, region = client.get("topology_zone", ""), client.get("topology_region", "")
        is_zone = bool(zone) and zone == client.get("node_topology_zone", "")
        is_region = bool(region) and region == client.get("node_topology_region", "")
        return (client["node"], 0 if is_zone and is_region else 1 if is_region else 2, region, zone, client["hostname"])

    clients.sort(key=key)
