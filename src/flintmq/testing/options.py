"""The options of nsqd and nsqlookupd as keywords of the classes for tests, for type checkers and editors.

`tests/test_testing.py` holds them together with the tables that the daemons read. Times are texts, as in a config file
and on a command line: ``"250ms"``, ``"5s"``, ``"1h30m"``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from flintmq.errors import OptionError
from flintmq.options import BOOL, DURATION, PERCENTILES, STRING, STRINGS, Kind, Options, nearest, option_table

__all__ = ["Duration", "NsqdKeywords", "NsqlookupdKeywords", "read"]

#: Of a time: a number and a unit. A number alone is refused: seconds are not what a config file would take it for.
Duration: TypeAlias = str


class NsqdKeywords(TypedDict, total=False):
    """Of `NsqBroker` and `NsqCluster`.

    Size: one key for each option of nsqd.
    """

    log_level: str
    log_prefix: str
    log_format: str
    id: int
    enable_experiment: Sequence[str]
    event_loop: str
    sigterm: str
    drain_timeout: Duration
    tcp_address: str
    http_address: str
    https_address: str
    http_auth_token_file: str
    http_allowed_hosts: Sequence[str]
    unix_socket_mode: str
    broadcast_address: str
    broadcast_tcp_port: int
    broadcast_http_port: int
    nsqlookupd_tcp_addresses: Sequence[str]
    lookupd_tls: bool
    lookupd_tls_root_ca_file: str
    lookupd_tls_cert: str
    lookupd_tls_key: str
    lookupd_token_file: str
    lookupd_registration_token_file: str
    topology_region: str
    topology_zone: str
    http_client_connect_timeout: Duration
    http_client_request_timeout: Duration
    durability: str
    accept_damaged_journal: bool
    mem_queue_size: int
    mem_queue_bytes: int
    cold_cache_bytes: int
    max_bytes_per_file: int
    sync_every: int
    sync_timeout: Duration
    disk_reserve: int
    max_staged_bytes: int
    stage_timeout: Duration
    queue_scan_interval: Duration
    queue_scan_refresh_interval: Duration
    queue_scan_selection_count: int
    queue_scan_worker_pool_max: int
    queue_scan_dirty_percent: float
    msg_timeout: Duration
    max_msg_timeout: Duration
    max_msg_size: int
    max_body_size: int
    max_req_timeout: Duration
    max_heartbeat_interval: Duration
    max_rdy_count: int
    max_output_buffer_size: int
    max_output_buffer_timeout: Duration
    min_output_buffer_timeout: Duration
    output_buffer_timeout: Duration
    max_channel_consumers: int
    requeue_on_disconnect: bool
    max_connections: int
    max_connections_per_address: int
    max_topics: int
    max_channels: int
    max_creation_rate: int
    max_topic_messages: int
    max_topic_bytes: int
    topic_limit_policy: str
    max_publish_rate: int
    max_delivery_rate: int
    http_header_timeout: Duration
    http_body_timeout: Duration
    tls_cert: str
    tls_key: str
    tls_client_auth_policy: str
    tls_root_ca_file: str
    tls_required: str
    tls_min_version: str
    deflate: bool
    max_deflate_level: int
    snappy: bool
    statsd_address: str
    statsd_prefix: str
    statsd_interval: Duration
    statsd_mem_stats: bool
    statsd_udp_packet_size: int
    statsd_exclude_ephemeral: bool
    e2e_processing_latency_percentiles: Sequence[float]
    e2e_processing_latency_window_time: Duration
    auth_http_addresses: Sequence[str]
    auth_http_request_method: str


class NsqlookupdKeywords(TypedDict, total=False):
    """Of `NsqLookupd`."""

    log_level: str
    log_prefix: str
    log_format: str
    event_loop: str
    tcp_address: str
    http_address: str
    http_auth_token_file: str
    http_allowed_hosts: Sequence[str]
    broadcast_address: str
    registration_token_file: str
    inactive_producer_timeout: Duration
    max_connections: int
    max_connections_per_address: int
    tombstone_lifetime: Duration
    tls_cert: str
    tls_key: str
    tls_root_ca_file: str
    tls_min_version: str


def read(options_class: type[Options], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as their daemon has them. TypeError for an unknown name, OptionError for a bad value."""
    kinds = {entry.key: entry.kind for entry in option_table(options_class).values() if entry.key is not None}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in kinds:
            near = nearest(name, kinds)
            hint = f"; did you mean {near}?" if near else ""
            raise TypeError(f"{options_class.program} has no option {name}{hint}")
        try:
            values[name] = _value(kinds[name], value)
        except (TypeError, ValueError) as exc:
            raise OptionError(f"{name}: {exc}") from exc
        if name in ("tcp_address", "http_address") and values[name].endswith(":0"):
            # It would be another one after a restart.
            raise OptionError(f"{name}: to have a free port, leave it out")
    options_class(**values).validate()
    return values


def _value(kind: Kind, given: Any) -> Any:
    """Return the value of an option: a text as on the command line, or an object of the right type."""
    if isinstance(given, os.PathLike):
        given = os.fspath(given)
    if isinstance(given, str):
        return kind.from_text(given)
    if kind is DURATION:
        # Milliseconds in a config file, nanoseconds in the daemon, seconds to most people.
        raise ValueError(f'a time needs a unit, as in "5s" or "250ms", not {given!r}')
    if kind is BOOL and not isinstance(given, bool):
        # A config file takes 0 for true, because NSQ does.
        raise ValueError(f"True or False, not {given!r}")
    if kind is STRING:
        raise ValueError(f"a text, not {given!r}")
    if kind in (STRINGS, PERCENTILES):
        given = list(given)
    try:
        return kind.from_toml(given)
    except TypeError:
        raise ValueError(f"a {type(given).__name__} cannot be its value") from None
