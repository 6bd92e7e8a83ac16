"""What answers of daemons look like, as far as it is used: whoever answers otherwise has not answered.

``check`` compares an answer with its shape. A daemon of another version, or none at all behind an address, then is one
that does not answer, and not an error somewhere in the sums over all of them. Everything but names may be missing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["check", "short_text"]

#: Bytes of an answer above which it is no sentence of a daemon.
_SENTENCE_BYTES = 200


def short_text(body: bytes) -> str:
    """Return an answer that is one line of text; empty for a web page and what else no daemon of NSQ's kind says."""
    text = body.decode(errors="replace").strip()
    is_line = len(body) <= _SENTENCE_BYTES and text.isprintable() and not text.startswith("<")
    return text if is_line else ""


Number = int | float | None
Text = str | None


class Latency(msgspec.Struct):
    count: Number = None
    percentiles: list[dict[str, Number]] | None = None


class Client(msgspec.Struct):
    connect_ts: Number = None
    hostname: Text = None
    remote_address: Text = None
    topology_zone: Text = None
    topology_region: Text = None
    node_topology_zone: Text = None
    node_topology_region: Text = None


class Counted(msgspec.Struct):
    """What topics and channels have."""

    depth: Number = None
    backend_depth: Number = None
    message_count: Number = None
    zone_local_msg_count: Number = None
    region_local_msg_count: Number = None
    global_msg_count: Number = None
    e2e_processing_latency: Latency | None = None


class Channel(Counted, kw_only=True):
    channel_name: str
    in_flight_count: Number = None
    deferred_count: Number = None
    requeue_count: Number = None
    timeout_count: Number = None
    dead_lettered_count: Number = None
    expired_count: Number = None
    client_count: Number = None
    position: int | None = None
    clients: list[Client] | None = None


class Reader(msgspec.Struct):
    reader: str
    offset: int
    lag: Number = None
    bytes: Number = None
    moved: Number = None


class Topic(Counted, kw_only=True):
    topic_name: str
    message_bytes: Number = None
    readers: list[Reader] | None = None
    channels: list[Channel] | None = None


class Removed(msgspec.Struct):
    topics: list[str] | None = None
    channels: list[tuple[str, str]] | None = None


class Extra(msgspec.Struct):
    connections: Number = None
    disk_free: Number = None
    disk_reserve: Number = None
    unsynced_bytes: Number = None


class Pipeline(msgspec.Struct):
    """What a streaming query reports of itself."""

    id: str
    at: int
    reported: int
    state: Literal["running", "ended", "failed"]
    name: Text = None
    error: Text = None
    host: Text = None
    topics: list[str] | None = None
    writes: list[str] | None = None
    readers: list[str] | None = None
    batch: Number = None
    progress: Number = None
    batch_seconds: Number = None
    rows: Number = None
    rows_per_second: Number = None
    lag: Number = None
    state_rows: Number = None
    state_bytes: Number = None


class Stats(msgspec.Struct):
    topics: list[Topic] | None = None
    pipelines: list[Pipeline] | None = None
    removed: Removed | None = None
    start_time: Number = None
    memory: dict[str, Any] | None = None
    node: Extra | None = None


class Info(msgspec.Struct):
    version: Text = None
    hostname: Text = None
    broadcast_address: Text = None
    tcp_port: int | None = None
    http_port: int | None = None
    start_time: Number = None
    topology_zone: Text = None
    topology_region: Text = None


class Producer(Info):
    remote_address: Text = None
    topics: list[str] | None = None
    tombstones: list[bool] | None = None


class Registered(msgspec.Struct):
    """``/nodes``, ``/topics``, ``/channels`` and ``/lookup`` of an nsqlookupd."""

    producers: list[Producer] | None = None
    topics: list[str] | None = None
    channels: list[str] | None = None


_SHAPES: dict[tuple[str, str], Any] = {
    ("nsqd", "stats"): Stats,
    ("nsqd", "info"): Info,
    ("nsqlookupd", "info"): Info,
    **{("nsqlookupd", path): Registered for path in ("nodes", "topics", "channels", "lookup")},
}


def check(kind: str, path: str, answer: Any) -> None:
    """msgspec.ValidationError if an answer of a daemon has another shape than it must have."""
    msgspec.convert(answer, _SHAPES.get((kind, path), dict[str, Any]))
