"""NSQ's ``/stats``: what there is to say about a running broker, field for field and blank for blank.

Everything here is read at the moment somebody asks; the counters themselves belong to topics, channels and sessions.
``document`` is the JSON, ``text`` the layout for people. A broker may have ten thousand channels, and reading them all
takes longer than the event loop may be held up: ``survey`` and ``report`` are the same, and hand it back in between.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.addresses import port_of
from flintmq.broker.delivery.latency import quantiles
from flintmq.broker.observe.steps import Steps, at_once, by_name, in_turns
from flintmq.http.site import json_bytes
from flintmq.logs import printable
from flintmq.options import format_duration
from flintmq.protocol.wire import NSQ_VERSION

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic
    from flintmq.broker.net.session import Session

__all__ = ["document", "report", "survey", "survey_json", "text"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECOND = 1_000_000_000
#: Characters of what an auth server says of a client.
_LONGEST_TEXT = 256

# --- NSQ's document ---------------------------------------------------------------------------------------------------


def document(
    broker: Broker,
    *,
    topic: str = "",
    channel: str = "",
    include_clients: bool = True,
    include_mem: bool = True,
    extended: bool = False,
) -> dict[str, Any]:
    """``/stats?format=json``. ``topic`` and ``channel`` are exact names; topics without the channel are left out.

    With ``extended`` there is more than NSQ has.
    """
    return at_once(_document(broker, topic, channel, include_clients, include_mem, extended))


async def survey(
    broker: Broker,
    *,
    topic: str = "",
    channel: str = "",
    include_clients: bool = True,
    include_mem: bool = True,
    extended: bool = False,
) -> dict[str, Any]:
    """``document``, without holding up a broker that has very many channels."""
    return await in_turns(_document(broker, topic, channel, include_clients, include_mem, extended))


async def survey_json(
    broker: Broker,
    *,
    topic: str = "",
    channel: str = "",
    include_clients: bool = True,
    include_mem: bool = True,
    extended: bool = False,
) -> bytes:
    """``survey`` as the bytes of its JSON, which are made in slices too."""
    return await in_turns(_json(broker, topic, channel, include_clients, include_mem, extended))


def _json(
    broker: Broker, topic: str, channel: str, include_clients: bool, include_mem: bool, extended: bool
) -> Steps[bytes]:
    # From the leaves on: what is encoded once is only copied after that. And it is no object any more: ten thousand
    # channels as dicts would make the garbage collector go through everything that the broker has.
    stats = yield from _document(broker, topic, channel, include_clients, include_mem, extended, _encoded)
    return msgspec.json.encode(stats)


def _encoded(value: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(json_bytes(value))


def _as_it_is(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _document(
    broker: Broker,
    topic: str,
    channel: str,
    include_clients: bool,
    include_mem: bool,
    extended: bool = False,
    pack: Callable[[dict[str, Any]], Any] = _as_it_is,
) -> Steps[dict[str, Any]]:
    """Each client, channel and topic is handed through ``pack`` as soon as it is complete."""
    topics: list[Any] | None = None
    producers: list[Any] | None = None
    if not topic or topic in broker.topics:
        topics = []
        for one in by_name([broker.topics[topic]] if topic else broker.topics.values()):
            if one.exiting or (channel and channel not in one.channels):
                continue
            channels = []
            for each in [one.channels[channel]] if channel else by_name(one.channels.values()):
                if each.exiting:
                    continue
                stats = channel_stats(each)
                if include_clients:
                    stats["clients"] = clients = []
                    for session in list(each.sessions.values()):
                        clients.append(pack(_client(session, topic)))
                        yield 1
                if extended:
                    stats.update(more_of_channel(each))
                channels.append(pack(stats))
                yield 1
            stats = topic_stats(one, channels)
            if extended:
                stats.update(more_of_topic(one))
            topics.append(pack(stats))
        if include_clients:
            producers = []
            for session in list(broker.sessions.values()):
                # All that ever published, whatever the topic: only their counts are of the topic asked for.
                if session.publish_counts:
                    producers.append(pack(_client(session, topic)))
                    yield 1
    result: dict[str, Any] = {
        "version": NSQ_VERSION,
        "health": broker.health,
        "start_time": broker.counters.start_time,
        "topics": topics,
    }
    if include_mem:
        result["memory"] = memory(broker)
    result["producers"] = producers or None
    if extended:
        result["pipelines"] = broker.pipelines.describe()
        result["staging"] = broker.stage.summary() | (yield from broker.stage.describe())
        result["node"] = _node(broker)
    return result


def header(broker: Broker, *, include_mem: bool) -> dict[str, Any]:
    """Return what the extended document says about the node itself."""
    result: dict[str, Any] = {
        "version": NSQ_VERSION,
        "health": broker.health,
        "start_time": broker.counters.start_time,
        "node": _node(broker),
    }
    if include_mem:
        result["memory"] = memory(broker)
    return result


def _node(broker: Broker) -> dict[str, Any]:
    return {
        "connections": len(broker.sessions),
        "disk_free": broker.counters.free_bytes,
        "disk_reserve": broker.options.disk_reserve,
        "unsynced_bytes": broker.store.unsynced,
        "draining": broker.draining,
    }


def more_of_topic(topic: Topic) -> dict[str, Any]:
    """Return what NSQ does not tell of a topic."""
    readers = [topic.readers.describe(name) for name in sorted(topic.readers.positions)]
    return {"readers": readers, "expired_count": topic.expired_count}


def topic_stats(topic: Topic, channels: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what NSQ tells of a topic."""
    return {
        "topic_name": topic.name,
        "channels": channels,
        "depth": topic.depth,
        "backend_depth": topic.backend_depth,
        "message_count": topic.message_count,
        "message_bytes": topic.message_bytes,
        "paused": topic.paused,
        "e2e_processing_latency": _latency(topic.broker, topic.channels.values()),
    }


_FROM_MEMORY = ("zone_local_msg_count", "region_local_msg_count", "global_msg_count")


def channel_stats(channel: Channel) -> dict[str, Any]:
    """Return what NSQ tells of a channel; its clients are for others to fill in."""
    stats: dict[str, Any] = {
        "channel_name": channel.name,
        "depth": channel.depth,
        "backend_depth": channel.backend_depth,
        "in_flight_count": channel.in_flight_count,
        "deferred_count": len(channel.deferred),
        "message_count": channel.message_count,
    }
    if any(channel.sent_from_memory):
        counts = zip(_FROM_MEMORY, channel.sent_from_memory, strict=True)
        stats |= {name: count for name, count in counts if count}
    stats["requeue_count"] = channel.requeue_count
    stats["timeout_count"] = channel.timeout_count
    stats["client_count"] = len(channel.sessions)
    stats["clients"] = None
    stats["paused"] = channel.paused
    stats["e2e_processing_latency"] = _latency(channel.broker, (channel,))
    return stats


def more_of_channel(channel: Channel) -> dict[str, Any]:
    """Return what NSQ does not tell of a channel. ``position``: the first message that was never delivered."""
    return {
        "dead_lettered_count": channel.leaving.dead_lettered_count,
        "expired_count": channel.leaving.expired_count,
        "position": channel.waiting.first if channel.waiting else channel.seen,
    }


def _client(session: Session, topic: str) -> dict[str, Any]:
    stats: dict[str, Any] = {
        "client_id": session.identity.client_id,
        "hostname": session.identity.hostname,
        "version": "V2",
        "remote_address": session.remote_address,
        "state": session.state,
        "ready_count": session.ready_count,
        "in_flight_count": session.in_flight,
        "message_count": session.message_count,
        "finish_count": session.finish_count,
        "requeue_count": session.requeue_count,
        "connect_ts": session.identity.connected_at,
        "sample_rate": session.sample_rate,
        "deflate": session.deflate,
        "snappy": session.snappy,
        "user_agent": session.identity.user_agent,
    }
    if session.authed:
        stats["authed"] = True
    if session.auth_identity:
        stats["auth_identity"] = session.auth_identity[:_LONGEST_TEXT]
    if session.auth_identity_url:
        stats["auth_identity_url"] = session.auth_identity_url[:_LONGEST_TEXT]
    stats["topology_zone"] = session.identity.topology_zone
    stats["topology_region"] = session.identity.topology_region
    # One topic at most, as in NSQ: the one asked for, or any.
    name = topic or next(iter(session.publish_counts), "")
    if name in session.publish_counts:
        stats["pub_counts"] = [{"topic": name, "count": session.publish_counts[name]}]
    tls = session.tls_info or {}
    stats["tls"] = session.tls_info is not None
    stats["tls_cipher_suite"] = tls.get("cipher_suite", "")
    stats["tls_version"] = tls.get("version", "")
    stats["tls_negotiated_protocol"] = tls.get("negotiated_protocol", "")
    stats["tls_negotiated_protocol_is_mutual"] = tls.get("negotiated_protocol_is_mutual", False)
    return stats


_NO_LATENCY: dict[str, Any] = {"count": 0, "percentiles": None}


def _latency(broker: Broker, channels: Iterable[Channel]) -> dict[str, Any]:
    if not broker.options.e2e_processing_latency_percentiles:
        return _NO_LATENCY
    sketches = [channel.latency.sketch for channel in channels if channel.latency is not None]
    if not sketches:
        return _NO_LATENCY
    wanted = broker.options.e2e_processing_latency_percentiles
    count, values = quantiles(sketches, wanted, broker.clock.now())
    # Go prints whole numbers without a fraction.
    names = (int(q) if q == int(q) else q for q in wanted)
    percentiles = [{"quantile": q, "value": value} for q, value in zip(names, values, strict=True)]
    return {"count": count, "percentiles": percentiles}


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory(broker: Broker) -> dict[str, int]:
    """NSQ's names for Go's memory. What Python has no equal of is 0."""
    return {
        "heap_objects": sys.getallocatedblocks(),
        "heap_idle_bytes": 0,
        "heap_in_use_bytes": resident_bytes(),
        "heap_released_bytes": 0,
        "gc_pause_usec_100": broker.counters.pauses.percentile(100) // 1000,
        "gc_pause_usec_99": broker.counters.pauses.percentile(99) // 1000,
        "gc_pause_usec_95": broker.counters.pauses.percentile(95) // 1000,
        "next_gc_bytes": 0,
        "gc_total_runs": collections(),
    }


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        # Not Linux: the most it ever was, in bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def open_files() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            # Less the one that lists them.
            return len(os.listdir(folder)) - 1
        except OSError:
            continue
    return 0


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


# --- NSQ's text -------------------------------------------------------------------------------------------------------


def text(
    broker: Broker, *, topic: str = "", channel: str = "", include_clients: bool = True, include_mem: bool = True
) -> str:
    """``/stats`` for people, in NSQ's layout."""
    return at_once(_text(broker, topic, channel, include_clients, include_mem))


async def report(
    broker: Broker, *, topic: str = "", channel: str = "", include_clients: bool = True, include_mem: bool = True
) -> str:
    """``text``, without holding up a broker that has very many channels."""
    return await in_turns(_text(broker, topic, channel, include_clients, include_mem))


def _text(broker: Broker, topic: str, channel: str, include_clients: bool, include_mem: bool) -> Steps[str]:
    stats = yield from _document(broker, topic, channel, include_clients, include_mem)
    parts = []
    for part in _layout(stats, broker.clock.now() - broker.counters.started, broker.clock.wall() // _SECOND):
        parts.append(part)
        yield 1
    return "".join(parts)


def _layout(stats: dict[str, Any], uptime: int, now: int) -> Iterator[str]:
    from datetime import datetime

    start = datetime.fromtimestamp(stats["start_time"]).astimezone().isoformat().replace("+00:00", "Z")
    yield f"nsqd v{stats['version']} (built w/python{sys.version.split()[0]})\n"
    yield f"start_time {start}\nuptime {format_duration(uptime)}\n"
    yield f"\nHealth: {stats['health']}\n"
    if "memory" in stats:
        yield "\nMemory:\n"
        for name, value in stats["memory"].items():
            yield f"   {name:<25}\t{value}\n"
    yield "\nTopics:" if stats["topics"] else "\nTopics: None\n"
    for t in stats["topics"] or ():
        yield (
            f"\n{'*P ' if t['paused'] else '   '}[{t['topic_name']:<15}] depth: {t['depth']:<5} "
            f"be-depth: {t['backend_depth']:<5} msgs: {t['message_count']:<8} "
            f"e2e%: {_latency_text(t['e2e_processing_latency'])}\n"
        )
        for c in t["channels"]:
            yield (
                f"{'   *P ' if c['paused'] else '      '}[{c['channel_name']:<25}] depth: {c['depth']:<5} "
                f"be-depth: {c['backend_depth']:<5} inflt: {c['in_flight_count']:<4} def: {c['deferred_count']:<4} "
                f"re-q: {c['requeue_count']:<5} timeout: {c['timeout_count']:<5} msgs: {c['message_count']:<8} "
                f"e2e%: {_latency_text(c['e2e_processing_latency'])}\n"
            )
            for client in c["clients"] or ():
                yield f"        {_client_text(client, now)}\n"
    yield "\nProducers:\n" if stats["producers"] else "\nProducers: None\n"
    for client in stats["producers"] or ():
        yield f"   {_client_text(client, now)}\n"


def _client_text(client: dict[str, Any], now: int) -> str:
    port = port_of(client["remote_address"])
    # A line is a line, and a terminal shows it as it is, whatever a client calls itself.
    name = printable(f"{client['hostname']}:{port or ''} {client['user_agent']}")
    connected = f"connected: {format_duration((now - client['connect_ts']) * _SECOND)}"
    counts = client.get("pub_counts")
    if counts:
        topics = ",".join(f"{count['topic']}={count['count']}" for count in counts)
        total = sum(count["count"] for count in counts)
        return f"[{client['version']} {name:<21}] msgs: {total:<8} topics: {topics} {connected}"
    return (
        f"[{client['version']} {name:<21}] state: {client['state']} inflt: {client['in_flight_count']:<4} "
        f"rdy: {client['ready_count']:<4} fin: {client['finish_count']:<8} re-q: {client['requeue_count']:<8} "
        f"msgs: {client['message_count']:<8} {connected}"
    )


def _latency_text(latency: dict[str, Any]) -> str:
    return ", ".join(_humanised(item["value"]) for item in latency["percentiles"] or ())


def _humanised(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds > size:
            return f"{nanoseconds / size:.1f}{unit}"
    return f"{nanoseconds:.1f}ns"
