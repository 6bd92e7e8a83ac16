"""``/metrics``: every number about a broker, in the text format of Prometheus.

The tables of families say what there is and how it is read from a broker, a topic or a channel. ``metrics`` reads all
of it at once; ``scrape`` hands the event loop back in between.
"""

from __future__ import annotations

import platform
import re
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import flintmq
from flintmq import kernel
from flintmq.broker.delivery.latency import quantiles
from flintmq.broker.observe.stats import collections, open_files, resident_bytes
from flintmq.broker.observe.steps import Steps, at_once, by_name, in_turns
from flintmq.http.site import PROMETHEUS, metric_head
from flintmq.protocol.wire import NSQ_VERSION

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel

__all__ = ["Collector", "metrics", "scrape"]

_SECOND = 1_000_000_000


class Family(NamedTuple):
    """One metric: ``read`` gives its value for a broker, a topic or a channel."""

    name: str
    kind: str
    help: str
    read: Callable[[Any], float]


#: A family's name, how to read it, and its lines so far.
Lines = tuple[str, Callable[[Any], float], list[str]]

GAUGE, COUNTER, SUMMARY = "gauge", "counter", "summary"


def _logs(broker: Broker) -> Iterator[Any]:
    for topic in broker.topics.values():
        yield topic.log
        if topic.side is not None:
            yield topic.side


NODE_FAMILIES = (
    Family(
        "nsqd_start_time_seconds",
        GAUGE,
        "When the broker started, in seconds since 1970.",
        attrgetter("counters.start_time"),
    ),
    Family("nsqd_healthy", GAUGE, "1 if /ping says OK, else 0.", lambda b: int(b.health == "OK")),
    Family("nsqd_topics", GAUGE, "Topics.", lambda b: len(b.topics)),
    Family("nsqd_channels", GAUGE, "Channels.", lambda b: sum(len(t.channels) for t in b.topics.values())),
    Family("nsqd_connections", GAUGE, "TCP clients connected.", lambda b: len(b.sessions)),
    Family(
        "nsqd_connections_opened_total",
        COUNTER,
        "TCP connections since the start.",
        attrgetter("counters.connection_count"),
    ),
    Family(
        "nsqd_refused_messages_total",
        COUNTER,
        "Messages that could not be stored.",
        attrgetter("counters.refused_count"),
    ),
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
    Family("nsqd_disk_free_bytes", GAUGE, "Free space under the data path.", attrgetter("counters.free_bytes")),
    Family(
        "nsqd_disk_reserve_bytes", GAUGE, "Below this much, publishes are refused.", attrgetter("options.disk_reserve")
    ),
    Family("nsqd_staged_bytes", GAUGE, "Staged publishes that are not committed yet.", attrgetter("stage.bytes")),
    Family("nsqd_staged_attempts", GAUGE, "Attempts that are being staged.", lambda b: b.stage.summary()["attempts"]),
    Family(
        "nsqd_staged_oldest_seconds",
        GAUGE,
        "How long ago the oldest of them was added to.",
        lambda b: b.stage.summary()["oldest_attempt_seconds"],
    ),
    Family("nsqd_staged_sets", GAUGE, "Prepared, not applied yet.", lambda b: b.stage.summary()["sets"]),
    Family(
        "nsqd_staged_sets_oldest_seconds",
        GAUGE,
        "How long ago the oldest of them was prepared.",
        lambda b: b.stage.summary()["oldest_set_seconds"],
    ),
    Family("nsqd_staged_commits_total", COUNTER, "Sets that were applied.", attrgetter("stage.applied_sets")),
    Family("nsqd_staged_messages_total", COUNTER, "Messages that they held.", attrgetter("stage.applied_rows")),
    Family(
        "nsqd_staged_dropped_bytes_total",
        COUNTER,
        "Bytes of rows that were dropped without being applied.",
        attrgetter("stage.dropped_bytes"),
    ),
    Family("nsqd_gc_runs_total", COUNTER, "Runs of the garbage collector.", lambda b: collections()),
    Family(
        "nsqd_gc_pause_seconds",
        GAUGE,
        "Longest of its last 256 runs.",
        lambda b: b.counters.pauses.percentile(100) / _SECOND,
    ),
    Family("process_resident_memory_bytes", GAUGE, "Resident memory.", lambda b: resident_bytes()),
    Family("process_cpu_seconds_total", COUNTER, "User and system CPU time.", lambda b: time.process_time()),
    Family("process_open_fds", GAUGE, "Open file descriptors.", lambda b: open_files()),
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
    Family("nsqd_channel_requeues_total", COUNTER, "Messages requeued by REQ.", attrgetter("requeue_count")),
    Family("nsqd_channel_timeouts_total", COUNTER, "Messages requeued by timeout.", attrgetter("timeout_count")),
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
        attrgetter("leaving.dead_lettered_count"),
    ),
    Family(
        "nsqd_channel_expired_messages_total",
        COUNTER,
        "Messages that got too old to be delivered.",
        attrgetter("leaving.expired_count"),
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
            lines = [metric_head(family.name, family.kind, family.help)]
            self._families.append(lines)
            begun.append((family.name, family.read, lines))
        return begun

    def body(self) -> Steps[bytes]:
        for topic in by_name(self._broker.topics.values()):
            if topic.exiting:
                continue
            labels = f'topic="{topic.name}"'
            _write(self._topics, labels, topic)
            if self._latency:
                self._measure(TOPIC_LATENCY, labels, topic.channels.values(), self._topic_latency)
            yield 1
            for name in sorted(topic.readers.positions):
                _write(self._readers, f'{labels},reader="{name}"', topic.readers.describe(name))
            for channel in by_name(topic.channels.values()):
                if channel.exiting:
                    continue
                labels = f'topic="{topic.name}",channel="{channel.name}"'
                _write(self._channels, labels, channel)
                if self._latency:
                    self._measure(CHANNEL_LATENCY, labels, (channel,), self._channel_latency)
                yield 1
        parts = []
        for lines in self._families:
            parts.append("".join(lines).encode())
            # A line costs a fraction of what reading its value did.
            yield 1 + len(lines) // 10
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
    return at_once(_Exposition(broker).body()), PROMETHEUS


async def scrape(broker: Broker) -> tuple[bytes, str]:
    """``metrics``, without holding up a broker that has very many channels."""
    return await in_turns(_Exposition(broker).body()), PROMETHEUS


class Sample(NamedTuple):
    """One value, with the attributes that ``prometheus_client`` reads."""

    name: str
    labels: dict[str, str]
    value: float
    timestamp: None = None
    exemplar: None = None
    native_histogram: None = None


@dataclass(frozen=True)
class Metric:
    """A family with its samples, with the attributes that ``prometheus_client`` reads."""

    name: str
    type: str
    documentation: str
    samples: list[Sample]
    unit: str = ""

    def _restricted_metric(self, names: Iterable[str]) -> Metric | None:
        """Return only the samples of these names; a registry asks for it when a scrape names what it wants."""
        samples = [sample for sample in self.samples if sample.name in names]
        return replace(self, samples=samples) if samples else None


class Collector:
    """The same metrics for a registry of ``prometheus_client``: for a broker inside a program that has one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> Iterable[Any]:
        """Nothing: a registry need not read a whole broker only to learn names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        # The families of the process belong to the program.
        for block in re.split("(?m)^# HELP ", metrics(self._broker)[0].decode())[1:]:
            if not block.startswith("process_"):
                help, kind, *lines = block.splitlines()
                name = help.partition(" ")[0]
                name = name.removesuffix("_total") if kind.endswith(" counter") else name
                yield Metric(name, kind.rpartition(" ")[2], help.partition(" ")[2], list(map(_sample, lines)))


_LABEL = re.compile(r'(\w+)="([^"]*)"')


def _sample(line: str) -> Sample:
    """Return a line of our own text, in which nothing is escaped, as what it says."""
    text, _, value = line.rpartition(" ")
    name, _, labels = text.partition("{")
    return Sample(name, dict(_LABEL.findall(labels)), float(value))
