"""What can be said about a running broker in numbers: for NSQ's tools, for people, for Prometheus, for statsd.

Everything here is read at the moment somebody asks; the counters themselves belong to topics, channels and sessions.
``document`` and ``text`` are NSQ's ``/stats``, field for field and blank for blank; ``metrics`` is ``/metrics``. A
Statsd pushes the same numbers to a statsd server by UDP; whatever happens to it, the broker goes on.

A broker may have ten thousand channels, and reading them all takes longer than the event loop may be held up. So each
of the three has a twin that hands the loop back every few milliseconds: ``survey``, ``report``, ``scrape``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import platform
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import datetime
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import flintmq
from flintmq import kernel
from flintmq.broker.delivery.latency import quantiles
from flintmq.options import format_duration
from flintmq.protocol.wire import NSQ_VERSION

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.delivery.topic import Topic
    from flintmq.broker.net.session import Session

__all__ = [
    "Collector",
    "Pauses",
    "Statsd",
    "document",
    "metrics",
    "report",
    "scrape",
    "statsd_prefix",
    "survey",
    "text",
]

logger = logging.getLogger(__name__)

#: How long one reading of many topics may keep the loop before other work gets its turn.
SLICE_SECONDS = 0.005
#: Pauses of the garbage collector that are remembered, as many as Go does.
_PAUSES = 256
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECOND = 1_000_000_000

T = TypeVar("T")
#: A long piece of work that can be left alone after each step. Topics and channels may come and go in between.
Steps = Generator[None, None, T]


def _at_once(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


async def _in_turns(steps: Steps[T]) -> T:
    """The same, but others have their turn every few milliseconds."""
    began = time.perf_counter()
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if time.perf_counter() - began > SLICE_SECONDS:
            await asyncio.sleep(0)
            began = time.perf_counter()


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
    return _at_once(_document(broker, topic, channel, include_clients, include_mem, extended))


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
    return await _in_turns(_document(broker, topic, channel, include_clients, include_mem, extended))


def _document(
    broker: Broker, topic: str, channel: str, include_clients: bool, include_mem: bool, extended: bool = False
) -> Steps[dict[str, Any]]:
    topics: list[dict[str, Any]] | None = None
    producers: list[dict[str, Any]] | None = None
    if not topic or topic in broker.topics:
        topics = []
        for one in _by_name([broker.topics[topic]] if topic else broker.topics.values()):
            if one.exiting or (channel and channel not in one.channels):
                continue
            channels = []
            for each in [one.channels[channel]] if channel else _by_name(one.channels.values()):
                if not each.exiting:
                    channels.append(_channel(each, include_clients, topic))
                    if extended:
                        channels[-1].update(_more_of_channel(each))
                    yield
            topics.append(_topic(one, channels))
            if extended:
                topics[-1]["readers"] = [one.readers.describe(name) for name in sorted(one.readers.positions)]
                topics[-1]["expired_count"] = one.expired_count
        if include_clients:
            producers = []
            for session in list(broker.sessions.values()):
                # All that ever published, whatever the topic: only their counts are of the topic asked for.
                if session.publish_counts:
                    producers.append(_client(session, topic))
                    yield
    result: dict[str, Any] = {
        "version": NSQ_VERSION,
        "health": broker.health,
        "start_time": broker.start_time,
        "topics": topics,
    }
    if include_mem:
        result["memory"] = _memory(broker)
    result["producers"] = producers or None
    return result


def _by_name(things: Iterable[T]) -> list[T]:
    return sorted(things, key=attrgetter("name"))


def _topic(topic: Topic, channels: list[dict[str, Any]]) -> dict[str, Any]:
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


def _channel(channel: Channel, include_clients: bool, topic: str = "") -> dict[str, Any]:
    stats: dict[str, Any] = {
        "channel_name": channel.name,
        "depth": channel.depth,
        "backend_depth": channel.backend_depth,
        "in_flight_count": channel.in_flight_count,
        "deferred_count": len(channel.deferred),
        "message_count": channel.message_count,
    }
    for name, count in zip(("zone_local", "region_local", "global"), channel.sent_from_memory, strict=True):
        if count:
            stats[f"{name}_msg_count"] = count
    stats["requeue_count"] = channel.requeue_count
    stats["timeout_count"] = channel.timeout_count
    stats["client_count"] = len(channel.sessions)
    clients = [_client(session, topic) for session in channel.sessions.values()] if include_clients else None
    stats["clients"] = clients
    stats["paused"] = channel.paused
    stats["e2e_processing_latency"] = _latency(channel.broker, (channel,))
    return stats


def _more_of_channel(channel: Channel) -> dict[str, Any]:
    """What NSQ does not have."""
    return {"dead_lettered_count": channel.dead_lettered_count, "expired_count": channel.expired_count}


def _client(session: Session, topic: str) -> dict[str, Any]:
    stats: dict[str, Any] = {
        "client_id": session.client_id,
        "hostname": session.hostname,
        "version": "V2",
        "remote_address": session.remote_address,
        "state": session.state,
        "ready_count": session.ready_count,
        "in_flight_count": session.in_flight,
        "message_count": session.message_count,
        "finish_count": session.finish_count,
        "requeue_count": session.requeue_count,
        "connect_ts": session.connected_at,
        "sample_rate": session.sample_rate,
        "deflate": session.deflate,
        "snappy": session.snappy,
        "user_agent": session.user_agent,
    }
    if session.authed:
        stats["authed"] = True
    if session.auth_identity:
        stats["auth_identity"] = session.auth_identity
    if session.auth_identity_url:
        stats["auth_identity_url"] = session.auth_identity_url
    stats["topology_zone"] = session.topology_zone
    stats["topology_region"] = session.topology_region
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


class Pauses:
    """How long the garbage collector held everything up, the last times it ran."""

    def __init__(self) -> None:
        self._pauses: deque[int] = deque(maxlen=_PAUSES)
        self._began = 0

    def start(self) -> None:
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter_ns()
        else:
            self._pauses.append(time.perf_counter_ns() - self._began)

    def percentile(self, percent: int) -> int:
        """In ns, counted as Go counts it; 0 before the first."""
        pauses = sorted(self._pauses)
        return pauses[min(int(percent / 100 * len(pauses) + 0.5), len(pauses) - 1)] if pauses else 0


def _memory(broker: Broker) -> dict[str, int]:
    """NSQ's names for Go's memory. What Python has no equal of is 0."""
    return {
        "heap_objects": sys.getallocatedblocks(),
        "heap_idle_bytes": 0,
        "heap_in_use_bytes": _resident_bytes(),
        "heap_released_bytes": 0,
        "gc_pause_usec_100": broker.pauses.percentile(100) // 1000,
        "gc_pause_usec_99": broker.pauses.percentile(99) // 1000,
        "gc_pause_usec_95": broker.pauses.percentile(95) // 1000,
        "next_gc_bytes": 0,
        "gc_total_runs": _collections(),
    }


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        # Not Linux: the most it ever was, in bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _open_files() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            # Less the one that lists them.
            return len(os.listdir(folder)) - 1
        except OSError:
            continue
    return 0


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


# --- NSQ's text -------------------------------------------------------------------------------------------------------


def text(
    broker: Broker, *, topic: str = "", channel: str = "", include_clients: bool = True, include_mem: bool = True
) -> str:
    """``/stats`` for people, in NSQ's layout."""
    return _at_once(_text(broker, topic, channel, include_clients, include_mem))


async def report(
    broker: Broker, *, topic: str = "", channel: str = "", include_clients: bool = True, include_mem: bool = True
) -> str:
    """``text``, without holding up a broker that has very many channels."""
    return await _in_turns(_text(broker, topic, channel, include_clients, include_mem))


def _text(broker: Broker, topic: str, channel: str, include_clients: bool, include_mem: bool) -> Steps[str]:
    stats = yield from _document(broker, topic, channel, include_clients, include_mem)
    parts = []
    for part in _layout(stats, broker.clock.now() - broker.started, broker.clock.wall() // _SECOND):
        parts.append(part)
        yield
    return "".join(parts)


def _layout(stats: dict[str, Any], uptime: int, now: int) -> Iterator[str]:
    start = datetime.fromtimestamp(stats["start_time"]).astimezone().isoformat().replace("+00:00", "Z")
    yield f"nsqd v{stats['version']} (built w/python{platform.python_version()})\n"
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
    port = client["remote_address"].rpartition(":")[2] if ":" in client["remote_address"] else ""
    name = f"{client['hostname']}:{port} {client['user_agent']}"
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


# --- Prometheus -------------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """One metric: ``read`` gives its value for a broker, a topic or a channel."""

    name: str
    kind: str
    help: str
    read: Callable[[Any], float]


#: A family's name, how to read it, and its lines so far.
Lines = tuple[str, Callable[[Any], float], list[str]]

GAUGE, COUNTER, SUMMARY = "gauge", "counter", "summary"
#: The text format that every Prometheus reads.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _logs(broker: Broker) -> Iterator[Any]:
    for topic in broker.topics.values():
        yield topic.log
        if topic.side is not None:
            yield topic.side


NODE_FAMILIES = (
    Family(
        "nsqd_start_time_seconds", GAUGE, "When the broker started, in seconds since 1970.", attrgetter("start_time")
    ),
    Family("nsqd_healthy", GAUGE, "1 if /ping says OK, else 0.", lambda b: int(b.health == "OK")),
    Family("nsqd_topics", GAUGE, "Topics.", lambda b: len(b.topics)),
    Family("nsqd_channels", GAUGE, "Channels.", lambda b: sum(len(t.channels) for t in b.topics.values())),
    Family("nsqd_connections", GAUGE, "TCP clients connected.", lambda b: len(b.sessions)),
    Family(
        "nsqd_connections_opened_total", COUNTER, "TCP connections since the start.", attrgetter("connection_count")
    ),
    Family("nsqd_refused_messages_total", COUNTER, "Messages that could not be stored.", attrgetter("refused_count")),
    Family(
        "nsqd_refusing_publishes", GAUGE, "1 while the disk is nearly full, else 0.", lambda b: int(bool(b.refusing))
    ),
    Family("nsqd_log_unsynced_bytes", GAUGE, "Written, not yet on the device.", attrgetter("store.unsynced")),
    Family("nsqd_log_segments", GAUGE, "Segment files.", lambda b: sum(len(log.segments) for log in _logs(b))),
    Family(
        "nsqd_log_segment_bytes",
        GAUGE,
        "Size of the segment files.",
        lambda b: sum(segment.size for log in _logs(b) for segment in log.segments),
    ),
    Family(
        "nsqd_log_memory_bytes", GAUGE, "Messages kept in memory.", lambda b: sum(log.memory_bytes for log in _logs(b))
    ),
    Family(
        "nsqd_log_damaged_ranges",
        GAUGE,
        "Parts of segment files that could not be read since the start.",
        lambda b: sum(len(log.damaged) for log in _logs(b)),
    ),
    Family("nsqd_journal_bytes", GAUGE, "Size of the journal since its last snapshot.", attrgetter("journal.size")),
    Family("nsqd_disk_free_bytes", GAUGE, "Free space under the data path.", attrgetter("free_bytes")),
    Family(
        "nsqd_disk_reserve_bytes", GAUGE, "Below this much, publishes are refused.", attrgetter("options.disk_reserve")
    ),
    Family("nsqd_gc_runs_total", COUNTER, "Runs of the garbage collector.", lambda b: _collections()),
    Family(
        "nsqd_gc_pause_seconds", GAUGE, "Longest of its last 256 runs.", lambda b: b.pauses.percentile(100) / _SECOND
    ),
    Family("process_resident_memory_bytes", GAUGE, "Resident memory.", lambda b: _resident_bytes()),
    Family("process_cpu_seconds_total", COUNTER, "User and system CPU time.", lambda b: time.process_time()),
    Family("process_open_fds", GAUGE, "Open file descriptors.", lambda b: _open_files()),
    Family(
        "process_max_fds",
        GAUGE,
        "Most file descriptors that can be open.",
        lambda b: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    ),
)
TOPIC_FAMILIES = (
    Family("nsqd_topic_depth", GAUGE, "Messages that no channel has seen yet.", attrgetter("depth")),
    Family("nsqd_topic_backend_depth", GAUGE, "Those of them that are only on disk.", attrgetter("backend_depth")),
    Family("nsqd_topic_messages_total", COUNTER, "Messages published.", attrgetter("message_count")),
    Family("nsqd_topic_message_bytes_total", COUNTER, "Bytes of their bodies.", attrgetter("message_bytes")),
    Family(
        "nsqd_topic_expired_messages_total",
        COUNTER,
        "Messages that got too old before any channel saw them.",
        attrgetter("expired_count"),
    ),
    Family("nsqd_topic_channels", GAUGE, "Channels of the topic.", lambda t: len(t.channels)),
    Family("nsqd_topic_keys", GAUGE, "Idempotency keys remembered.", lambda t: len(t.keys.window) if t.keys else 0),
    Family(
        "nsqd_topic_repeats_total",
        COUNTER,
        "Publishes under a key that was known: nothing was stored.",
        lambda t: t.keys.repeats if t.keys else 0,
    ),
    Family("nsqd_topic_paused", GAUGE, "1 while the topic is paused, else 0.", lambda t: int(t.paused)),
)
CHANNEL_FAMILIES = (
    Family("nsqd_channel_depth", GAUGE, "Messages waiting for a consumer.", attrgetter("depth")),
    Family("nsqd_channel_backend_depth", GAUGE, "Those of them that are only on disk.", attrgetter("backend_depth")),
    Family("nsqd_channel_in_flight", GAUGE, "Messages sent and not answered yet.", attrgetter("in_flight_count")),
    Family("nsqd_channel_deferred", GAUGE, "Messages that wait for their time.", lambda c: len(c.deferred)),
    Family("nsqd_channel_messages_total", COUNTER, "Messages that came from the topic.", attrgetter("message_count")),
    Family("nsqd_channel_requeues_total", COUNTER, "Messages put back by REQ.", attrgetter("requeue_count")),
    Family("nsqd_channel_timeouts_total", COUNTER, "Messages put back by timeout.", attrgetter("timeout_count")),
    Family(
        "nsqd_channel_dropped_messages_total",
        COUNTER,
        "Messages an ephemeral channel had no room for.",
        attrgetter("dropped_count"),
    ),
    Family(
        "nsqd_channel_dead_lettered_messages_total",
        COUNTER,
        "Messages that went to the dead-letter topic.",
        attrgetter("dead_lettered_count"),
    ),
    Family(
        "nsqd_channel_expired_messages_total",
        COUNTER,
        "Messages that got too old to be delivered.",
        attrgetter("expired_count"),
    ),
    Family("nsqd_channel_clients", GAUGE, "Consumers.", lambda c: len(c.sessions)),
    Family("nsqd_channel_paused", GAUGE, "1 while the channel is paused, else 0.", lambda c: int(c.paused)),
)
#: Of a reader as ``Readers.describe`` has it.
READER_FAMILIES = (
    Family("nsqd_reader_lag", GAUGE, "Messages that a reader of the log is behind.", itemgetter("lag")),
    Family("nsqd_reader_held_bytes", GAUGE, "Bytes of files that are kept for it.", itemgetter("bytes")),
    Family(
        "nsqd_reader_moved_seconds",
        GAUGE,
        "When it last moved, in seconds since 1970.",
        lambda reader: reader["moved"] / _SECOND,
    ),
)
INFO = Family("nsqd_build_info", GAUGE, "1; what runs here is in the labels.", lambda b: 1)
#: Only with --e2e-processing-latency-percentile. Quantiles are of its window, sum and count since the start.
TOPIC_LATENCY = Family("nsqd_topic_latency_seconds", SUMMARY, "Time from publish to FIN.", float)
CHANNEL_LATENCY = Family("nsqd_channel_latency_seconds", SUMMARY, "Time from publish to FIN.", float)


class _Exposition:
    """Prometheus's text format: the lines of each family, collected while the broker is read piece by piece.

    Not by ``prometheus_client``: that takes a second for ten thousand channels, this a tenth of it, and 14 MB more.
    Names of topics and channels, and what else stands in labels here, need no escaping.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._families: list[list[str]] = []
        about = {
            "version": flintmq.__version__,
            "nsq_version": NSQ_VERSION,
            "python_version": platform.python_version(),
            "kernel": "compiled" if kernel.COMPILED else "interpreted",
        }
        for family in (INFO, *NODE_FAMILIES):
            labels = ",".join(f'{name}="{value}"' for name, value in about.items()) if family is INFO else ""
            _write(self._begin([family]), labels, broker)
        self._topics = self._begin(TOPIC_FAMILIES)
        self._channels = self._begin(CHANNEL_FAMILIES)
        self._readers = self._begin(READER_FAMILIES)
        self._latency = bool(broker.options.e2e_processing_latency_percentiles)
        if self._latency:
            [(_, _, self._topic_latency)] = self._begin([TOPIC_LATENCY])
            [(_, _, self._channel_latency)] = self._begin([CHANNEL_LATENCY])

    def _begin(self, families: Iterable[Family]) -> list[Lines]:
        begun = []
        for family in families:
            lines = [f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n"]
            self._families.append(lines)
            begun.append((family.name, family.read, lines))
        return begun

    def body(self) -> Steps[bytes]:
        for topic in _by_name(self._broker.topics.values()):
            if topic.exiting:
                continue
            labels = f'topic="{topic.name}"'
            _write(self._topics, labels, topic)
            if self._latency:
                self._measure(TOPIC_LATENCY, labels, topic.channels.values(), self._topic_latency)
            yield
            for name in sorted(topic.readers.positions):
                _write(self._readers, f'{labels},reader="{name}"', topic.readers.describe(name))
            for channel in _by_name(topic.channels.values()):
                if channel.exiting:
                    continue
                labels = f'topic="{topic.name}",channel="{channel.name}"'
                _write(self._channels, labels, channel)
                if self._latency:
                    self._measure(CHANNEL_LATENCY, labels, (channel,), self._channel_latency)
                yield
        parts = []
        for lines in self._families:
            parts.append("".join(lines).encode())
            yield
        return b"".join(parts)

    def _measure(self, family: Family, labels: str, channels: Iterable[Channel], lines: list[str]) -> None:
        sketches = [channel.latency.sketch for channel in channels if channel.latency is not None]
        wanted = self._broker.options.e2e_processing_latency_percentiles
        count, values = quantiles(sketches, wanted, self._broker.clock.now())
        # Where nothing was finished there are no quantiles; 0 would be a lie.
        for q, value in zip(wanted, values, strict=True) if count else ():
            lines.append(f'{family.name}{{{labels},quantile="{q:g}"}} {value / _SECOND}\n')
        spent, ever = sum(sketch.spent for sketch in sketches), sum(sketch.ever for sketch in sketches)
        lines.append(f"{family.name}_sum{{{labels}}} {spent / _SECOND}\n{family.name}_count{{{labels}}} {ever}\n")


def _write(families: list[Lines], labels: str, thing: object) -> None:
    braced = f"{{{labels}}}" if labels else ""
    for name, read, lines in families:
        lines.append(f"{name}{braced} {read(thing)}\n")


def metrics(broker: Broker) -> tuple[bytes, str]:
    """``/metrics``: the body and its type."""
    return _at_once(_Exposition(broker).body()), CONTENT_TYPE


async def scrape(broker: Broker) -> tuple[bytes, str]:
    """``metrics``, without holding up a broker that has very many channels."""
    return await _in_turns(_Exposition(broker).body()), CONTENT_TYPE


class Collector:
    """The same metrics for a registry of ``prometheus_client``: for a broker inside a program that has one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> Iterable[Any]:
        """Nothing: a registry need not read a whole broker only to learn names."""
        return ()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(metrics(self._broker)[0].decode()):
            # The program has those of its process already.
            if not family.name.startswith("process_"):
                yield family


# --- Statsd -----------------------------------------------------------------------------------------------------------

#: Finding the server's address may take this long.
_LOOKUP_SECONDS = 1.0
#: Packets are spread over the interval less this, as in NSQ; none closer than that.
_MARGIN_SECONDS = 1.0
_SHORTEST_INTERVAL = 0.1

Line = tuple[str, str, int]


def statsd_prefix(broker: Broker) -> str:
    """``--statsd-prefix`` with this node's address in the place of ``%s``, and a dot at its end."""
    options = broker.options
    prefix = options.statsd_prefix
    if not prefix:
        return ""
    host = options.broadcast_address
    port = str(options.broadcast_http_port or broker.http_address.rpartition(":")[2])
    if not port.isdigit():
        # No HTTP, or a unix socket.
        port = "0"
    # An IPv6 address has brackets here, as wherever Go joins it with a port.
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    prefix = prefix.replace("%s", address.replace(".", "_").replace(":", "_"))
    return prefix if prefix.endswith(".") else f"{prefix}."


class Statsd:
    """Pushes to ``--statsd-address``, every ``--statsd-interval``. Counters go out as what they grew by."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        # What was sent last. A topic that was deleted and made again starts anew: hence its number beside its name.
        self._sent: dict[tuple[str, int], int] = {}

    def start(self) -> None:
        if self._broker.options.statsd_address:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="statsd")

    async def stop(self) -> None:
        """What is under way goes out at once."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        interval = max(self._broker.options.statsd_interval / _SECOND, _SHORTEST_INTERVAL)
        due = loop.time() + interval
        while not await self._stops_before(due):
            address = self._broker.options.statsd_address
            try:
                await self._push(address, interval - _MARGIN_SECONDS)
            except (OSError, ValueError) as exc:
                logger.error("STATSD: failed to create UDP socket to statsd(%s) - %s", address, exc)
            except Exception:
                # A bug here costs this report and no more.
                logger.exception("STATSD: failed to push stats to %s", address)
            while due <= loop.time():
                due += interval
        logger.info("STATSD: closing")

    async def _stops_before(self, moment: float) -> bool:
        """Wait until then, or until the broker stops."""
        try:
            async with asyncio.timeout_at(moment):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    async def _push(self, address: str, spread: float) -> None:
        """One report. OSError or ValueError if the server's address is of no use."""
        loop = asyncio.get_running_loop()
        host, _, port = address.rpartition(":")
        if not 0 < int(port) < 1 << 16:
            raise ValueError(f"{port} is no port")
        async with asyncio.timeout(_LOOKUP_SECONDS):
            found = await loop.getaddrinfo(host.strip("[]") or "127.0.0.1", int(port), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setblocking(False)
            sock.connect(where)
            logger.info("STATSD: pushing stats to %s", address)
            packets = await _in_turns(self._packets())
            failures: list[OSError] = []
            began = loop.time()
            for number, packet in enumerate(packets, 1):
                try:
                    sock.send(packet)
                except OSError as exc:
                    # Nobody listens, or the socket is full: as with every lost UDP packet, the next report will tell.
                    failures.append(exc)
                if self._stopping.is_set() or spread <= 0:
                    if number % 100 == 0:
                        await asyncio.sleep(0)
                else:
                    await self._stops_before(began + spread * number / len(packets))
            if failures:
                logger.warning(
                    "STATSD: %d of %d packets to %s failed - %s", len(failures), len(packets), address, failures[0]
                )

    def _packets(self) -> Steps[list[bytes]]:
        """As many whole lines in each as fit."""
        prefix = statsd_prefix(self._broker)
        limit = self._broker.options.statsd_udp_packet_size
        packets: list[bytes] = []
        packet = bytearray()
        for name, kind, value in self._lines():
            line = f"{prefix}{name}:{value}|{kind}\n".encode()
            if packet and len(packet) + len(line) > limit:
                packets.append(bytes(packet))
                packet.clear()
            packet += line
            yield
        if packet:
            packets.append(bytes(packet))
        return packets

    def _lines(self) -> Iterator[Line]:
        """(name, ``c`` or ``g``, value) of everything, in NSQ's order."""
        broker = self._broker
        sent: dict[tuple[str, int], int] = {}

        def grown(name: str, number: int, value: int) -> Line:
            sent[name, number] = value
            return name, "c", value - self._sent.get((name, number), 0)

        def latencies(name: str, latency: dict[str, Any]) -> Iterator[Line]:
            for item in latency["percentiles"] or ():
                yield f"{name}.e2e_processing_latency_{item['quantile'] * 100:.0f}", "g", item["value"]

        without_ephemeral = broker.options.statsd_exclude_ephemeral
        for topic in _by_name(broker.topics.values()):
            if topic.exiting or (topic.ephemeral and without_ephemeral):
                continue
            t = f"topic.{topic.name}"
            stats = _topic(topic, [])
            yield grown(f"{t}.message_count", topic.incarnation, stats["message_count"])
            yield grown(f"{t}.message_bytes", topic.incarnation, stats["message_bytes"])
            yield f"{t}.depth", "g", stats["depth"]
            yield f"{t}.backend_depth", "g", stats["backend_depth"]
            yield from latencies(t, stats["e2e_processing_latency"])
            for channel in _by_name(topic.channels.values()):
                if channel.exiting or (channel.ephemeral and without_ephemeral):
                    continue
                c = f"{t}.channel.{channel.name}"
                stats = _channel(channel, include_clients=False)
                yield grown(f"{c}.message_count", channel.id, stats["message_count"])
                for name in ("depth", "backend_depth", "in_flight_count", "deferred_count"):
                    yield f"{c}.{name}", "g", stats[name]
                yield grown(f"{c}.requeue_count", channel.id, stats["requeue_count"])
                yield grown(f"{c}.timeout_count", channel.id, stats["timeout_count"])
                yield f"{c}.clients", "g", stats["client_count"]
                yield from latencies(c, stats["e2e_processing_latency"])
        if broker.options.statsd_mem_stats:
            memory = _memory(broker)
            runs = memory.pop("gc_total_runs")
            for name, value in memory.items():
                yield f"mem.{name}", "g", value
            yield grown("mem.gc_runs", 0, runs)
        self._sent = sent
