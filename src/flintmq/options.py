"""One table of options per program: Go-style flags, the TOML file, `--help` and `/config` all read it.

A program's options are a frozen dataclass. Each field is one option: the field's name is the key in the config file,
and its metadata hold the flag, the kind and the line of help (`option_table` gathers them). A flag wins over the file,
the file over the default. Durations are whole nanoseconds, lists are tuples, words such as `tcp-https` stay words.

Reading happens in three steps, because a program ends differently after each: `read_flags` (a wrong flag is a usage
error), `resolve` (a wrong file) and `Options.validate` (values that do not fit together). `parse` is all three.

Every start of a program reads its table, and few read a file or misspell a flag: what only those need is imported
where it is used.

Size: most of it is the three tables, and who reads one wants all of it in one place.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from flintmq.durations import (
    HOUR,
    MICROSECOND,
    MILLISECOND,
    MINUTE,
    SECOND,
    format_duration,
    parse_duration,
)
from flintmq.errors import OptionError, permission_hint

__all__ = [
    "MICROSECOND",
    "MILLISECOND",
    "MINUTE",
    "SECOND",
    "NsqadminOptions",
    "NsqdOptions",
    "NsqlookupdOptions",
    "Option",
    "Options",
    "changes",
    "default_node_id",
    "format_duration",
    "help_text",
    "nearest",
    "option_table",
    "parse",
    "parse_duration",
    "read_flags",
    "read_tables",
    "resolve",
]

logger = logging.getLogger(__name__)

_INT64_MAX = 2**63 - 1
#: The log keeps the delay of a deferred message in 32 bits of milliseconds.
LONGEST_DEFER = (2**32 - 1) * MILLISECOND


# --- Kinds of values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How values of one sort are read from a flag, read from TOML and shown."""

    #: The word after the flag in `--help`; empty for flags that need no value.
    placeholder: str
    #: From the text of a flag. Raises ValueError with the reason.
    from_text: Callable[[str], Any]
    #: From a TOML value that is not a string. Raises TypeError where such a value has no meaning.
    from_toml: Callable[[Any], Any]
    #: The text `--help` and the docs show for a default.
    to_text: Callable[[Any], str] = str
    #: Given bare, a flag of this kind means true, and it never takes the next word.
    bare: bool = False
    #: May be given many times; values are tuples and each flag adds to them.
    repeatable: bool = False
    #: The words allowed, each with the number `/config` shows for it (None: the word itself).
    words: Mapping[str, int | None] | None = None

    def read(self, found: Any) -> Any:
        """The value that a TOML file or a JSON object gives. ValueError with the reason."""
        try:
            if not isinstance(found, str):
                return self.from_toml(found)
        except TypeError:
            raise ValueError(f"a {type(found).__name__} cannot be its value") from None
        return tuple(_split(found)) if self is STRINGS else self.from_text(found)


_BOOLEANS = {word: True for word in ("1", "t", "T", "TRUE", "true", "True")} | {
    word: False for word in ("0", "f", "F", "FALSE", "false", "False")
}


def _bool_from_text(text: str) -> bool:
    if text not in _BOOLEANS:
        raise ValueError(f'"{text}" is neither true nor false')
    return _BOOLEANS[text]


def _bool_from_toml(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Inverted, and not by mistake here: the Go daemon reads 0 as true, and files in the field were made to fit.
        return value == 0
    raise TypeError


def _int_from_text(text: str) -> int:
    # Go reads C notation: 0x1f, 0b11, 0o17 and also 017, with underscores between digits.
    digits = text.replace("0", "0o", 1) if re.fullmatch(r"[+-]?0[0-9_]+", text) else text
    try:
        value = int(digits, 0)
    except ValueError:
        raise ValueError(f'"{text}" is not a whole number') from None
    if not -_INT64_MAX - 1 <= value <= _INT64_MAX:
        raise ValueError(f"{text} does not fit in 64 bits")
    return value


def _int_from_toml(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TypeError


def _float_from_text(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a number') from None


def _float_from_toml(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise TypeError


def _string_from_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    raise TypeError


def _strings_from_toml(value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise TypeError


def _floats_from_text(text: str) -> tuple[float, ...]:
    return tuple(_float_from_text(item) for item in _split(text))


def _floats_from_toml(value: Any) -> tuple[float, ...]:
    if isinstance(value, list):
        return tuple(_float_from_toml(item) for item in value)
    raise TypeError


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _words(words: Mapping[str, int | None], *, bare: bool = False) -> Kind:
    """One of a few words, in any case; where true and false are among them, everything that reads as a boolean."""

    def from_text(text: str) -> str:
        word = text.lower()
        if "true" in words and word in _BOOLEANS:
            word = str(_BOOLEANS[word]).lower()
        if word not in words:
            raise ValueError(f'"{text}" is none of {", ".join(words)}')
        return word

    return Kind(
        "" if bare else "word", from_text, lambda value: from_text(_string_from_toml(value)), words=words, bare=bare
    )


STRING = Kind("string", str, _string_from_toml)
INT = Kind("int", _int_from_text, _int_from_toml)
FLOAT = Kind("float", _float_from_text, _float_from_toml)
BOOL = Kind("", _bool_from_text, _bool_from_toml, to_text=lambda value: str(value).lower(), bare=True)
# A whole number in a file means milliseconds, as in NSQ.
DURATION = Kind("duration", parse_duration, lambda value: _int_from_toml(value) * MILLISECOND, to_text=format_duration)
# Commas separate values in a file only: on the command line the flag is given again.
STRINGS = Kind("string", lambda text: (text,), _strings_from_toml, to_text=", ".join, repeatable=True)
PERCENTILES = Kind(
    "float", _floats_from_text, _floats_from_toml, to_text=lambda value: ", ".join(map(str, value)), repeatable=True
)
LOG_LEVEL = _words({"debug": 1, "info": 2, "warn": 3, "error": 4, "fatal": 5})
TLS_REQUIRED = _words({"false": 0, "tcp-https": 1, "true": 2}, bare=True)
TLS_VERSION = _words({"tls1.0": 769, "tls1.1": 770, "tls1.2": 771, "tls1.3": 772})
DURABILITY = _words({"memory": None, "os": None, "fsync": None})
EVENT_LOOP = _words({"auto": None, "asyncio": None, "uvloop": None})
LOG_FORMAT = _words({"text": None, "json": None})
TOPIC_LIMIT_POLICY = _words({"refuse": None, "drop-oldest": None})
SIGTERM = _words({"stop": None, "drain": None})
TTL_ACTION = _words({"drop": None, "dead-letter": None})
NEW_CHANNEL = _words({"backlog": None, "earliest": None, "latest": None})


# --- The table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One line of a program's table."""

    flag: str
    kind: Kind
    help: str
    #: The key in the config file and the name of the field; None for what can only be said on the command line.
    key: str | None = None
    default: Any = None
    #: Numbers below it are refused.
    minimum: int | None = None
    #: The value may hold a password, and is in no log line.
    secret: bool = False


def option(
    kind: Kind,
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    minimum: int | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is an option; a callable default is asked for each new object."""
    metadata = {"kind": kind, "help": help, "flag": flag, "minimum": minimum, "secret": secret}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Options:
    """What every program's options have in common."""

    program: ClassVar[str]
    #: Flags that are not settings: they are in no config file and in no object.
    command_line_only: ClassVar[tuple[Option, ...]] = (
        Option("config", STRING, "read settings from this TOML file", default=""),
        Option("strict-config", BOOL, "refuse to start if the config file has unknown keys", default=False),
        Option("help", BOOL, "print this help", default=False),
        Option("version", BOOL, "print the version", default=False),
    )

    def __post_init__(self) -> None:
        # Callers may pass lists; a frozen object must not hold something that can change.
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))

    # Once for all tables: a dataclass would compile its own for each of them, at every start of every program.
    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self) if field.compare]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __hash__(self) -> int:
        fields = [field for field in dataclasses.fields(self) if (field.compare if field.hash is None else field.hash)]
        return hash(tuple(getattr(self, field.name) for field in fields))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def validate(self) -> None:
        """Raise OptionError for the first value that is out of range or does not fit the others."""
        for entry in option_table(type(self)).values():
            if entry.key is None:
                continue
            value = getattr(self, entry.key)
            if entry.kind.words is not None and value not in entry.kind.words:
                raise OptionError(f"--{entry.flag} must be one of {', '.join(entry.kind.words)}")
            if entry.minimum is not None and value < entry.minimum:
                raise OptionError(f"--{entry.flag} must be at least {entry.kind.to_text(entry.minimum)}")


def option_table(options_class: type[Options]) -> Mapping[str, Option]:
    """Every flag of a program by name: its settings in the order of the class, then what is no setting."""
    table = {}
    for field in dataclasses.fields(options_class):
        if "kind" not in field.metadata:
            continue  # no option, but what else a config file says
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        meta = field.metadata
        flag = meta["flag"] or field.name.replace("_", "-")
        table[flag] = Option(flag, meta["kind"], meta["help"], field.name, default, meta["minimum"], meta["secret"])
    table |= {entry.flag: entry for entry in options_class.command_line_only}
    return table


def default_node_id(hostname: str) -> int:
    """The node id of a host nobody gave one: a hash of its name, the same that the Go daemon takes."""
    from hashlib import md5

    return zlib.crc32(md5(hostname.encode(), usedforsecurity=False).digest()) % 1024


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NsqdOptions(Options):
    """Settings of the broker. Also made by hand: `NsqdOptions(data_path=path, tcp_address="127.0.0.1:0")`.

    Size: one field is one flag, one key of the config file and one line of help, and nsqd has that many.
    """

    program: ClassVar[str] = "nsqd"
    command_line_only: ClassVar[tuple[Option, ...]] = (
        *Options.command_line_only,
        Option("verbose", BOOL, "deprecated, has no effect: use --log-level", default=False),
        Option("worker-id", BOOL, "deprecated, has no effect: use --node-id", default=False),
    )

    # Basic.
    log_level: str = option(LOG_LEVEL, "info", "least level that is logged: debug, info, warn, error or fatal")
    log_prefix: str = option(STRING, "[nsqd] ", "prefix of every log line")
    log_format: str = option(LOG_FORMAT, "text", "log lines as NSQ writes them (text), or one object per line (json)")
    id: int = option(
        INT,
        lambda: default_node_id(socket.gethostname()),
        "this node's part of message ids, from 0 to 1023; by default a hash of the host name",
        flag="node-id",
    )
    enable_experiment: tuple[str, ...] = option(
        STRINGS,
        (),
        "switch on an experiment, such as topology-aware-consumption; unknown names are ignored (repeatable)",
    )
    event_loop: str = option(EVENT_LOOP, "auto", "auto, asyncio or uvloop; auto is uvloop if it is installed")
    sigterm: str = option(SIGTERM, "stop", "action on SIGTERM: stop, or drain first")
    drain_timeout: int = option(
        DURATION, 5 * MINUTE, "time after which a drain stops the node even if messages are left; 0: never", minimum=0
    )

    # Addresses.
    tcp_address: str = option(
        STRING, "0.0.0.0:4150", "address for TCP clients: host:port, or the path of a unix socket"
    )
    http_address: str = option(
        STRING, "0.0.0.0:4151", "address for HTTP clients: host:port, or the path of a unix socket; empty: no HTTP"
    )
    https_address: str = option(
        STRING, "0.0.0.0:4152", "address for HTTPS clients: host:port; empty or without --tls-cert: no HTTPS"
    )
    http_auth_token_file: str = option(
        STRING,
        "",
        "path of the tokens that HTTP requests must carry, with their rights; empty: no tokens needed",
    )
    http_allowed_hosts: tuple[str, ...] = option(
        STRINGS,
        (),
        "host name that HTTP requests to a loopback address may use; its pages may make changes (repeatable)",
        flag="http-allowed-host",
    )
    unix_socket_mode: str = option(STRING, "0600", "octal mode of unix sockets, such as 0660 to let a group connect")
    broadcast_address: str = option(
        STRING, socket.gethostname, "address that is registered with nsqlookupd; by default the host name"
    )
    broadcast_tcp_port: int = option(
        INT, 0, "TCP port that is registered with nsqlookupd; 0: the port listened on", minimum=0
    )
    broadcast_http_port: int = option(
        INT, 0, "HTTP port that is registered with nsqlookupd; 0: the port listened on", minimum=0
    )
    nsqlookupd_tcp_addresses: tuple[str, ...] = option(
        STRINGS, (), "TCP address of an nsqlookupd to register with (repeatable)", flag="lookupd-tcp-address"
    )
    lookupd_tls: bool = option(BOOL, False, "use TLS to every nsqlookupd, over TCP and HTTP")
    lookupd_tls_root_ca_file: str = option(
        STRING, "", "path of the authorities that nsqlookupds are verified against (PEM); empty: those of the system"
    )
    lookupd_tls_cert: str = option(STRING, "", "path of the client certificate for nsqlookupds (PEM)")
    lookupd_tls_key: str = option(STRING, "", "path of that certificate's key (PEM)")
    lookupd_token_file: str = option(
        STRING, "", "path of the file whose first word is the token sent to every nsqlookupd over HTTP; empty: none"
    )
    lookupd_registration_token_file: str = option(
        STRING, "", "path of a file whose first word is the token for every nsqlookupd, sent in IDENTIFY; empty: none"
    )
    topology_region: str = option(STRING, "", "the region this node is in, for topology-aware-consumption")
    topology_zone: str = option(STRING, "", "the zone this node is in, for topology-aware-consumption")
    http_client_connect_timeout: int = option(
        DURATION, 2 * SECOND, "timeout of a connection to nsqlookupd or an auth server", minimum=1
    )
    http_client_request_timeout: int = option(
        DURATION, 5 * SECOND, "timeout of a whole request to nsqlookupd or an auth server", minimum=1
    )

    # Storage.
    data_path: str = option(
        STRING, "", "directory of logs, journal and metadata; it must exist; empty: the current one"
    )
    durability: str = option(
        DURABILITY, "os", "meaning of the OK of a publish: memory (kept in memory), os (written), fsync (on the disk)"
    )
    accept_damaged_journal: bool = option(
        BOOL,
        False,
        "start with the readable part of a damaged journal; unknown topics are renamed to .lost",
    )
    mem_queue_size: int = option(INT, 10_000, "messages kept in memory per topic", minimum=0)
    mem_queue_bytes: int = option(INT, 256 << 20, "most bytes of messages kept in memory per topic", minimum=0)
    cold_cache_bytes: int = option(
        INT, 32 << 20, "bytes of the cache for messages read from files, shared by all topics", minimum=0
    )
    max_bytes_per_file: int = option(INT, 100 << 20, "bytes at which a topic starts a new segment file", minimum=1)
    sync_every: int = option(INT, 2500, "messages after which files are synced in the background", minimum=0)
    sync_timeout: int = option(DURATION, 2 * SECOND, "time after which files are synced in the background", minimum=1)
    disk_reserve: int = option(INT, 64 << 20, "free bytes kept on the disk: below it publishes are refused", minimum=0)

    max_staged_bytes: int = option(
        INT, 32 << 30, "most bytes of uncommitted staged publishes, of all producers", minimum=0
    )
    stage_timeout: int = option(
        DURATION, 24 * HOUR, "time without additions or a commit after which staged rows are dropped", minimum=1
    )

    # Queue scan.
    queue_scan_interval: int = option(
        DURATION, 100 * MILLISECOND, "time between two scans for messages that timed out or are due", minimum=1
    )
    queue_scan_refresh_interval: int = option(
        DURATION, 5 * SECOND, "accepted for compatibility: the list of channels is always fresh", minimum=1
    )
    queue_scan_selection_count: int = option(INT, 20, "channels checked in one round", minimum=1)
    queue_scan_worker_pool_max: int = option(INT, 4, "channels checked before other work gets its turn", minimum=1)
    queue_scan_dirty_percent: float = option(
        FLOAT, 0.25, "share of channels with something due above which the next round follows at once", minimum=0
    )

    # Limits of messages and commands.
    msg_timeout: int = option(
        DURATION, MINUTE, "time a consumer has to finish a message, unless it asks for another", minimum=1
    )
    max_msg_timeout: int = option(
        DURATION, 15 * MINUTE, "longest message timeout, with TOUCH or by a consumer's request", minimum=1
    )
    max_msg_size: int = option(INT, 1 << 20, "largest message body in bytes", minimum=1)
    max_body_size: int = option(INT, 5 << 20, "largest body of one command in bytes", minimum=1)
    max_req_timeout: int = option(DURATION, HOUR, "longest delay of a deferred or requeued message", minimum=0)

    # What clients can ask for.
    max_heartbeat_interval: int = option(
        DURATION, MINUTE, "longest time between heartbeats a client can ask for", minimum=1
    )
    max_rdy_count: int = option(INT, 2500, "largest RDY count of a client", minimum=0)
    max_output_buffer_size: int = option(
        INT, 64 << 10, "largest output buffer in bytes a client can ask for", minimum=0
    )
    max_output_buffer_timeout: int = option(
        DURATION, 30 * SECOND, "longest wait before output is sent that a client can ask for", minimum=0
    )
    min_output_buffer_timeout: int = option(
        DURATION, 25 * MILLISECOND, "shortest wait before output is sent that a client can ask for", minimum=0
    )
    output_buffer_timeout: int = option(
        DURATION, 250 * MILLISECOND, "longest wait before output is sent, unless a client asks for another", minimum=0
    )
    max_channel_consumers: int = option(INT, 0, "most consumers of one channel; 0: no limit", minimum=0)
    requeue_on_disconnect: bool = option(
        BOOL, False, "requeue a client's messages at once when its connection ends, instead of at their timeout"
    )

    # Limits of the node, which NSQ does not have.
    max_connections: int = option(INT, 0, "most client connections; 0: no limit", minimum=0)
    max_connections_per_address: int = option(
        INT, 0, "most client connections from one address; 0: no limit", minimum=0
    )
    max_topics: int = option(INT, 0, "most topics, beyond which clients cannot create more; 0: no limit", minimum=0)
    max_channels: int = option(
        INT, 0, "most channels of one topic, beyond which clients cannot create more; 0: no limit", minimum=0
    )
    max_creation_rate: int = option(
        INT, 0, "most topics and channels per second that clients can create; 0: no limit", minimum=0
    )
    max_topic_messages: int = option(INT, 0, "most messages that a topic may hold; 0: no limit", minimum=0)
    max_topic_bytes: int = option(INT, 0, "most bytes of messages that a topic may hold; 0: no limit", minimum=0)
    topic_limit_policy: str = option(
        TOPIC_LIMIT_POLICY, "refuse", "at a topic's limit refuse publishes (refuse), or drop the oldest (drop-oldest)"
    )
    max_publish_rate: int = option(
        INT, 0, "most messages a second that may be published to one topic; 0: no limit", minimum=0
    )
    max_delivery_rate: int = option(INT, 0, "most messages a second that one channel delivers; 0: no limit", minimum=0)
    http_header_timeout: int = option(
        DURATION, 10 * SECOND, "time in which the header of an HTTP request must arrive", minimum=1
    )
    http_body_timeout: int = option(
        DURATION, MINUTE, "time in which the body of an HTTP request must arrive", minimum=1
    )

    # TLS and compression.
    tls_cert: str = option(STRING, "", "path of the certificate (PEM)")
    tls_key: str = option(STRING, "", "path of the certificate's key (PEM)")
    tls_client_auth_policy: str = option(STRING, "", "policy for client certificates: require or require-verify")
    tls_root_ca_file: str = option(
        STRING, "", "path of the authorities that client certificates are verified against (PEM)"
    )
    tls_required: str = option(
        TLS_REQUIRED, "false", "refuse clients without TLS: true, false, or tcp-https (plain HTTP stays allowed)"
    )
    tls_min_version: str = option(
        TLS_VERSION, "tls1.2", "oldest version of TLS accepted: tls1.0, tls1.1, tls1.2 or tls1.3"
    )
    deflate: bool = option(BOOL, True, "let clients ask for deflate compression")
    max_deflate_level: int = option(INT, 6, "highest deflate level a client can ask for, from 1 to 9")
    snappy: bool = option(BOOL, True, "let clients ask for snappy compression")

    # Statsd and latency.
    statsd_address: str = option(STRING, "", "UDP host:port of a statsd server; empty: none")
    statsd_prefix: str = option(STRING, "nsq.%s", "prefix of statsd keys; %s becomes this node's address")
    statsd_interval: int = option(DURATION, MINUTE, "time between two reports to statsd", minimum=1)
    statsd_mem_stats: bool = option(BOOL, True, "report memory to statsd too")
    statsd_udp_packet_size: int = option(INT, 508, "largest statsd packet in bytes", minimum=1)
    statsd_exclude_ephemeral: bool = option(BOOL, False, "leave ephemeral topics and channels out of statsd reports")
    e2e_processing_latency_percentiles: tuple[float, ...] = option(
        PERCENTILES,
        (),
        "percentile to keep of the time from publish to finish, in (0, 1], such as 0.99 (repeatable, or with commas)",
        flag="e2e-processing-latency-percentile",
    )
    e2e_processing_latency_window_time: int = option(
        DURATION, 10 * MINUTE, "time window of those percentiles", minimum=1
    )

    # Auth server.
    auth_http_addresses: tuple[str, ...] = option(
        STRINGS,
        (),
        "host:port or URL of an auth server (repeatable); none: no authorization",
        flag="auth-http-address",
        secret=True,
    )
    auth_http_request_method: str = option(STRING, "get", "HTTP method of requests to auth servers: get or post")

    # No options: the config file, and its tables of what single topics and channels do differently, as they stand
    # there. What they mean is the broker's business (broker/settings.py).
    config: str = dataclasses.field(default="", compare=False)
    topic: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        percentiles = tuple(sorted(self.e2e_processing_latency_percentiles, reverse=True))
        object.__setattr__(self, "e2e_processing_latency_percentiles", percentiles)
        # Asking clients for certificates makes no sense for those who may come without TLS.
        if self.tls_client_auth_policy and self.tls_required == "false":
            object.__setattr__(self, "tls_required", "true")

    def validate(self) -> None:
        super().validate()
        if not 1 <= self.max_deflate_level <= 9:
            raise OptionError("--max-deflate-level must be [1,9]")
        if not 0 <= self.id < 1024:
            raise OptionError("--node-id must be [0,1024)")
        if self.max_req_timeout > LONGEST_DEFER:
            raise OptionError(f"--max-req-timeout must be at most {format_duration(LONGEST_DEFER)}")
        if max(self.broadcast_tcp_port, self.broadcast_http_port) > 65535:
            raise OptionError("--broadcast-tcp-port and --broadcast-http-port must be [0,65535]")
        if self.tls_client_auth_policy not in ("", "require", "require-verify"):
            # The Go daemon takes an unknown word for "ask for nothing": too dangerous to copy.
            raise OptionError("--tls-client-auth-policy must be require or require-verify")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise OptionError("failed to build TLS config - --tls-cert and --tls-key must be given together")
        if self.tls_required != "false" and not self.tls_cert:
            raise OptionError("cannot require TLS client connections without TLS key and cert")
        if re.fullmatch("0?[0-7]{3}", self.unix_socket_mode) is None:
            raise OptionError("--unix-socket-mode must be an octal mode, such as 0660")
        if bool(self.lookupd_tls_cert) != bool(self.lookupd_tls_key):
            raise OptionError("--lookupd-tls-cert and --lookupd-tls-key must be given together")
        if (self.lookupd_tls_cert or self.lookupd_tls_root_ca_file) and not self.lookupd_tls:
            # Somebody believes that this is encrypted.
            raise OptionError("--lookupd-tls-cert and --lookupd-tls-root-ca-file need --lookupd-tls")
        if self.auth_http_request_method not in ("get", "post"):
            raise OptionError("--auth-http-request-method must be post or get")
        for percentile in self.e2e_processing_latency_percentiles:
            if not 0 < percentile <= 1:
                raise OptionError(f"invalid E2E processing latency percentile: {percentile:g}")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NsqlookupdOptions(Options):
    """Settings of nsqlookupd."""

    program: ClassVar[str] = "nsqlookupd"
    command_line_only: ClassVar[tuple[Option, ...]] = (
        *Options.command_line_only,
        Option("verbose", BOOL, "deprecated, has no effect: use --log-level", default=False),
    )

    log_level: str = option(LOG_LEVEL, "info", "least level that is logged: debug, info, warn, error or fatal")
    log_prefix: str = option(STRING, "[nsqlookupd] ", "prefix of every log line")
    log_format: str = option(LOG_FORMAT, "text", "log lines as NSQ writes them (text), or one object per line (json)")
    event_loop: str = option(EVENT_LOOP, "auto", "auto, asyncio or uvloop; auto is uvloop if it is installed")
    tcp_address: str = option(STRING, "0.0.0.0:4160", "address for nsqds: host:port")
    http_address: str = option(STRING, "0.0.0.0:4161", "address for HTTP requests: host:port")
    http_auth_token_file: str = option(
        STRING,
        "",
        "path of the tokens that HTTP requests must carry, with their rights; empty: no tokens needed",
    )
    http_allowed_hosts: tuple[str, ...] = option(
        STRINGS,
        (),
        "host name that HTTP requests to a loopback address may use; its pages may make changes (repeatable)",
        flag="http-allowed-host",
    )
    broadcast_address: str = option(
        STRING, socket.gethostname, "address that nsqds use for HTTP; by default the host name"
    )
    registration_token_file: str = option(
        STRING,
        "",
        "path of the tokens, one per line, of which an nsqd must send one in IDENTIFY; empty: no token needed",
    )
    inactive_producer_timeout: int = option(
        DURATION, 5 * MINUTE, "time without a PING after which an nsqd is no longer listed", minimum=0
    )
    max_connections: int = option(
        INT,
        0,
        "most connections of nsqds, and as many of HTTP clients; 0: half of the descriptors (`ulimit -n`) each",
        minimum=0,
    )
    max_connections_per_address: int = option(
        INT, 0, "most connections of either kind from one address; 0: no limit", minimum=0
    )
    tombstone_lifetime: int = option(
        DURATION, 45 * SECOND, "time for which a tombstone hides a topic of one nsqd", minimum=0
    )
    tls_cert: str = option(STRING, "", "path of the certificate (PEM); if given, both addresses accept only TLS")
    tls_key: str = option(STRING, "", "path of the certificate's key (PEM)")
    tls_root_ca_file: str = option(
        STRING, "", "path of authorities (PEM); if given, all clients need a certificate signed by one of them"
    )
    tls_min_version: str = option(
        TLS_VERSION, "tls1.2", "oldest version of TLS accepted: tls1.0, tls1.1, tls1.2 or tls1.3"
    )

    def validate(self) -> None:
        super().validate()
        if bool(self.tls_cert) != bool(self.tls_key):
            raise OptionError("failed to build TLS config - --tls-cert and --tls-key must be given together")
        if self.tls_root_ca_file and not self.tls_cert:
            raise OptionError("cannot ask for client certificates without TLS key and cert")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NsqadminOptions(Options):
    """Settings of nsqadmin.

    Size: one table, as NSQ's program has it, and what is ours after it.
    """

    program: ClassVar[str] = "nsqadmin"
    command_line_only: ClassVar[tuple[Option, ...]] = (
        *Options.command_line_only,
        Option("verbose", BOOL, "deprecated, has no effect: use --log-level", default=False),
        Option(
            "hash-password", BOOL, "read a password from standard input, print its line for --users-file", default=False
        ),
    )

    log_level: str = option(LOG_LEVEL, "info", "least level that is logged: debug, info, warn, error or fatal")
    log_prefix: str = option(STRING, "[nsqadmin] ", "prefix of every log line")
    log_format: str = option(LOG_FORMAT, "text", "log lines as NSQ writes them (text), or one object per line (json)")
    event_loop: str = option(EVENT_LOOP, "auto", "auto, asyncio or uvloop; auto is uvloop if it is installed")
    # Whom it asks.
    nsqlookupd_http_addresses: tuple[str, ...] = option(
        STRINGS, (), "HTTP address of an nsqlookupd (repeatable)", flag="lookupd-http-address"
    )
    nsqd_http_addresses: tuple[str, ...] = option(
        STRINGS, (), "HTTP address of an nsqd, if there is no nsqlookupd (repeatable)", flag="nsqd-http-address"
    )
    lookupd_http_token_file: str = option(
        STRING, "", "path of the file whose first word is the token sent to every nsqlookupd; empty: none"
    )
    nsqd_http_token_file: str = option(
        STRING, "", "path of the file whose first word is the token sent to every nsqd; empty: none"
    )
    http_client_connect_timeout: int = option(DURATION, 2 * SECOND, "timeout of a connection to a daemon", minimum=1)
    http_client_request_timeout: int = option(DURATION, 5 * SECOND, "timeout of an answer of a daemon", minimum=1)
    http_client_tls_insecure_skip_verify: bool = option(BOOL, False, "accept any certificate of a daemon")
    http_client_tls_root_ca_file: str = option(
        STRING, "", "path of the authorities that daemons are verified against (PEM); empty: those of the system"
    )
    http_client_tls_cert: str = option(STRING, "", "path of the client certificate for daemons (PEM)")
    http_client_tls_key: str = option(STRING, "", "path of that certificate's key (PEM)")
    # Who asks it.
    http_address: str = option(STRING, "0.0.0.0:4171", "address for browsers and scripts: host:port")
    base_path: str = option(STRING, "/", "path prefix of every route")
    dev_static_dir: str = option(STRING, "", "directory of the pages' files, instead of the built-in ones")
    http_allowed_hosts: tuple[str, ...] = option(
        STRINGS,
        (),
        "host name that HTTP requests to a loopback address may use; its pages may make changes (repeatable)",
        flag="http-allowed-host",
    )
    tls_cert: str = option(STRING, "", "path of the certificate (PEM); if given, only HTTPS is accepted")
    tls_key: str = option(STRING, "", "path of the certificate's key (PEM)")
    tls_min_version: str = option(
        TLS_VERSION, "tls1.2", "oldest version of TLS accepted: tls1.0, tls1.1, tls1.2 or tls1.3"
    )
    acl_http_header: str = option(STRING, "X-Forwarded-User", "header in which a proxy names the authenticated user")
    admin_users: tuple[str, ...] = option(
        STRINGS,
        (),
        "user in that header with the role admin; if any is given, all others may only view (repeatable)",
        flag="admin-user",
    )
    trusted_proxy_cidrs: tuple[str, ...] = option(
        STRINGS,
        (),
        "network of trusted proxies; none: every client's header is trusted for NSQ's actions, as in NSQ (repeatable)",
        flag="trusted-proxy-cidr",
    )
    users_file: str = option(
        STRING, "", "path of the users who may log in, with their roles and argon2 hashes; empty: no login"
    )
    session_lifetime: int = option(DURATION, 12 * HOUR, "lifetime of a login", minimum=SECOND)
    insecure: bool = option(
        BOOL, False, "allow everything without a login, also beyond loopback and including messages"
    )
    allow_config_from_cidr: str = option(
        STRING, "127.0.0.1/8", "network from which /config may be used; empty: from everywhere"
    )
    # What it keeps and tells.
    refresh_interval: int = option(
        DURATION,
        2 * SECOND,
        "time between two samples of the cluster; NSQ's own nsqds are asked every fifth time",
        minimum=0,
    )
    history_memory: int = option(
        INT, 64 << 20, "bytes of memory for the history; the oldest samples are dropped", minimum=0
    )
    action_log: str = option(STRING, "", "path of a file to which every action is appended, a JSON object per line")
    notification_http_endpoint: str = option(
        STRING, "", "URL that every action is posted to, as NSQ does it; empty: none", secret=True
    )
    # Graphite.
    graphite_url: str = option(STRING, "", "URL of a Graphite; empty: none", secret=True)
    proxy_graphite: bool = option(BOOL, False, "answer /render by forwarding it to Graphite")
    statsd_counter_format: str = option(
        STRING, "stats.counters.%s.count", "statsd's format of counter names; %s is the key"
    )
    statsd_gauge_format: str = option(STRING, "stats.gauges.%s", "statsd's format of gauge names; %s is the key")
    statsd_interval: int = option(DURATION, MINUTE, "nsqd's --statsd-interval", minimum=1)
    statsd_prefix: str = option(STRING, "nsq.%s", "nsqd's --statsd-prefix; %s is the host's key")

    def validate(self) -> None:
        import ipaddress

        super().validate()
        if not self.nsqlookupd_http_addresses and not self.nsqd_http_addresses:
            raise OptionError("--nsqd-http-address or --lookupd-http-address required")
        if self.nsqlookupd_http_addresses and self.nsqd_http_addresses:
            raise OptionError("use --nsqd-http-address or --lookupd-http-address not both")
        if self.http_client_tls_cert and not self.http_client_tls_key:
            raise OptionError("--http-client-tls-key must be specified with --http-client-tls-cert")
        if self.http_client_tls_key and not self.http_client_tls_cert:
            raise OptionError("--http-client-tls-cert must be specified with --http-client-tls-key")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise OptionError("failed to build TLS config - --tls-cert and --tls-key must be given together")
        for flag, cidrs in (
            ("allow-config-from-cidr", (self.allow_config_from_cidr,)),
            ("trusted-proxy-cidr", self.trusted_proxy_cidrs),
        ):
            for cidr in filter(None, cidrs):
                try:
                    if "/" not in cidr:
                        raise ValueError
                    ipaddress.ip_network(cidr, strict=False)
                except ValueError:
                    raise OptionError(f"failed to parse --{flag} ({cidr}) - invalid CIDR address: {cidr}") from None


# --- Reading ----------------------------------------------------------------------------------------------------------

OptionsT = TypeVar("OptionsT", bound=Options)


def parse(options_class: type[OptionsT], argv: Sequence[str]) -> OptionsT:
    """Options from the words of a command line and the file it names; raises OptionError."""
    options = resolve(options_class, read_flags(options_class, argv))
    options.validate()
    return options


def read_flags(options_class: type[Options], argv: Sequence[str], rest: list[str] | None = None) -> dict[str, Any]:
    """The values given on a command line, by flag name. Like Go's flag package, it ends at the first other word.

    `-x v`, `-x=v`, `--x v` and `--x=v` are the same. A flag that can stand bare never takes the next word. Words from
    the end of the flags on are added to `rest`.
    """
    table = option_table(options_class)
    values: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            if rest is not None:
                rest += [*([] if word == "--" else [word]), *words]
            break
        name, equals, text = word.removeprefix("-").removeprefix("-").partition("=")
        if not name or name.startswith("-"):
            raise OptionError(f"bad flag syntax: {word}")
        entry = table.get("help" if name == "h" else name)
        if entry is None:
            meant = nearest(name, table)
            hint = f", did you mean -{meant}?" if meant else ""
            raise OptionError(f"flag provided but not defined: -{name}{hint}")
        if not equals:
            given = "true" if entry.kind.bare else next(words, None)
            if given is None:
                raise OptionError(f"flag needs an argument: -{name}")
            text = given
        try:
            value = entry.kind.from_text(text)
        except ValueError as exc:
            raise OptionError(f'invalid value "{text}" for flag -{name}: {exc}') from exc
        values[entry.flag] = values.get(entry.flag, ()) + value if entry.kind.repeatable else value
    return values


def resolve(
    options_class: type[OptionsT], flags: Mapping[str, Any], warn: Callable[[str], None] = logger.warning
) -> OptionsT:
    """Return the options of `read_flags` and, beneath them, of the config file they name.

    Unknown keys of the file are ignored, as NSQ does, because files outlive versions; but each is a sentence for
    `warn`, and with `--strict-config` they are an OptionError.
    """
    table = option_table(options_class)
    path = flags.get("config", "")
    values: dict[str, Any] = {}
    if path:
        content = _load(path)
        unknown = list(_unknown_keys(options_class, content))
        if unknown and flags.get("strict-config"):
            found = "; ".join(f"{what}{hint}" for what, hint in unknown)
            raise OptionError(f"failed to load config file {path} - {found} (--strict-config is set)")
        values = _read_file(options_class, path, content)
        for what, hint in unknown:
            warn(f"config file {path}: {what} is ignored{hint}")
    values |= {key: flags[flag] for flag, entry in table.items() if (key := entry.key) is not None and flag in flags}
    return options_class(**values)


def _load(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise OptionError(f"failed to load config file {path} - {reason}{permission_hint(exc, path)}") from exc


def read_tables(path: str) -> Mapping[str, Any]:
    """The tables `[topic."name"]` of a config file, as they stand there; raises OptionError."""
    return _tables(_load(path), path)


def _tables(content: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    tables = content.get("topic", {})
    if not isinstance(tables, dict):
        raise OptionError(f'failed to load config file {path} - topic: write a table, such as [topic."orders"]')
    return tables


def _unknown_keys(options_class: type[Options], content: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield what the program does not know in a config file, and the question that names what was probably meant."""
    # By every name that somebody may take for the key: its own, and that of its flag.
    known: dict[str, str] = {}
    for flag, entry in option_table(options_class).items():
        if entry.key is not None:
            known[flag.replace("-", "_")] = known[entry.key] = entry.key
    # Keys that NSQ has given up, and files still have, are no mistakes.
    ignored = {entry.flag.replace("-", "_") for entry in options_class.command_line_only if "deprecated" in entry.help}
    tables = ["topic"] if issubclass(options_class, NsqdOptions) else []
    for key, value in content.items():
        if key in known.values() or key in tables or key in ignored:
            continue
        if isinstance(value, dict):
            meant = nearest(key, tables)
            yield f"unknown table [{key}]", f", did you mean [{meant}]?" if meant else ""
        else:
            meant = nearest(key, known)
            yield f"unknown key {key}", f", did you mean {known[meant]}?" if meant else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that a misspelt one is most like; empty if it is like none of them."""
    import difflib

    spelt = {name.lower().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), spelt, n=1, cutoff=0.7)
    return spelt[found[0]] if found else ""


def changes(running: Options, wanted: Options) -> list[str]:
    """Return one sentence for each option whose value is not what a new start would give it."""
    found = []
    for entry in option_table(type(running)).values():
        if entry.key is None:
            continue
        old, new = getattr(running, entry.key), getattr(wanted, entry.key)
        if old != new:
            shown = f"from {_shown(entry, old)} to {_shown(entry, new)}" if not entry.secret else "(values hidden)"
            found.append(f"{entry.key} was changed {shown}: restart {running.program} to apply it")
    return found


def _shown(entry: Option, value: Any) -> str:
    return entry.kind.to_text(value) or "nothing"


def _read_file(options_class: type[Options], path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if issubclass(options_class, NsqdOptions):
        values = {"config": path, "topic": _tables(content, path)}
    for entry in option_table(options_class).values():
        if entry.key is None or entry.key not in content:
            continue
        found = content[entry.key]
        if entry.kind.words is not None and found == "":
            continue  # an empty word leaves the default
        try:
            values[entry.key] = entry.kind.read(found)
        except ValueError as exc:
            raise OptionError(f"failed to load config file {path} - {entry.key}: {exc}") from exc
    return values


# --- Help -------------------------------------------------------------------------------------------------------------


def help_text(options_class: type[Options]) -> str:
    """Every flag with its default and its line of help, in Go's layout and alphabetical order."""
    lines = [f"Usage of {options_class.program}:"]
    for flag, entry in sorted(option_table(options_class).items()):
        lines.append(f"  -{flag} {entry.kind.placeholder}".rstrip())
        default = entry.kind.to_text(entry.default)
        # As Go does: a switch that is off needs no words.
        if entry.default == "" or entry.default is False or not default:
            shown = ""
        else:
            shown = f' (default "{default}")' if entry.kind is STRING else f" (default {default})"
        lines.append(f"    \t{entry.help}{shown}")
    return "\n".join(lines)
