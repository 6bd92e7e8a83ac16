"""The options of producers and consumers: their names and types, defaults and checks.

The TypedDicts are what type checkers and editors know of ``Producer(…)`` and ``Consumer(…)``, asyncio and sync alike.
The dataclasses have the defaults and refuse what cannot be. `tests/client/test_options.py` holds both together.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from flintmq.client.callbacks import check
from flintmq.client.clock import Clock
from flintmq.client.codecs import Codec
from flintmq.client.connection import Connect, Settings
from flintmq.errors import OptionError

if TYPE_CHECKING:
    import ssl

__all__ = ["ConsumerOptions", "ConsumerSettings", "ProducerOptions", "ProducerSettings", "parse"]


class ConnectionOptions(TypedDict, total=False):
    """Of every connection. Times are seconds, sizes bytes. Defaults are in `Settings`."""

    #: Shown by the broker's statistics. Default: the host's short and full name.
    client_id: str
    hostname: str
    user_agent: str
    #: For connecting, and once more for the handshake.
    dial_timeout: float
    #: A connection on which nothing arrives for so long is dead. Heartbeats come more often.
    read_timeout: float
    #: A broker that does not read for so long is dead.
    write_timeout: float
    heartbeat_interval: float
    #: How long the broker waits for an answer before somebody else gets the message. Default: as it is set there.
    msg_timeout: float | None
    #: What the broker may gather before it sends. Default: as it is set there.
    output_buffer_size: int | None
    output_buffer_timeout: float | None
    #: Deliver about this percentage of the messages; the others are lost for the channel.
    sample_rate: int
    #: True for the system's certificates, or a context. Without TLS on the other side the connection fails.
    tls: bool | ssl.SSLContext
    #: The name in the broker's certificate. Default: the host of the address.
    tls_hostname: str | None
    snappy: bool
    deflate: bool
    deflate_level: int
    auth_secret: str | bytes | None
    topology_region: str
    topology_zone: str
    #: A frame larger than this is not believed.
    max_frame_size: int
    #: The pause after the first failure to connect; it doubles up to the second.
    reconnect_delay: float
    max_reconnect_delay: float
    #: Opens transports in place of TCP and unix sockets.
    connect: Connect | None


class ClientOptions(ConnectionOptions, total=False):
    """Of producers and consumers."""

    #: Addresses of nsqlookupds, in place of those of brokers or besides them.
    lookupd: str | Sequence[str] | None
    #: How often the lookupds are asked, and the share of it that is added at random.
    lookupd_poll_interval: float
    lookupd_poll_jitter: float
    lookupd_timeout: float
    #: Sent as a bearer token.
    lookupd_token: str | None
    lookupd_tls: bool | ssl.SSLContext
    #: Called with an address and an exception for every broker or lookupd that fails; they are tried again.
    on_error: Callable[[str, Exception], object] | None
    #: How values become bytes, and bytes values. Default: JSON.
    codec: Codec | None
    #: Where the time comes from. Default: the event loop.
    clock: Clock | None


class ProducerOptions(ClientOptions, total=False):
    """Keywords of `Producer`."""

    #: Seconds to wait for more calls to join one command.
    linger: float
    #: Of a publish, and of the first connection.
    timeout: float
    #: Send again what may have been stored: at least once in place of an error, perhaps twice.
    retry_unknown: bool
    #: Bytes that may be unanswered; beyond them `publish` waits.
    max_pending_bytes: int
    #: The longest delay that brokers take (``--max-req-timeout``).
    max_defer: float


class ConsumerOptions(ClientOptions, total=False):
    """Keywords of `Consumer`."""

    #: Addresses of brokers: ``host:port``, ``[v6]:port``, the path of a unix socket.
    nsqd: str | Sequence[str] | None
    #: How many handlers may run at a time.
    concurrency: int
    #: Messages that may be here and unanswered, over all brokers. Default: `concurrency`. 0 pauses.
    max_in_flight: int | None
    #: A message that comes more often is given up. 0 is no limit.
    max_attempts: int
    #: Called with an address.
    on_heartbeat: Callable[[str], object] | None
    #: Of a failed message: the first times the attempts, at most the second.
    default_requeue_delay: float
    max_requeue_delay: float
    #: Touch everything that is here before its time is over.
    auto_touch: bool
    #: Backoff: `backoff_multiplier` × 2ⁿ seconds, at most `max_backoff_duration`; 0 switches it off.
    max_backoff_duration: float
    backoff_multiplier: float
    #: A function of the level, in place of the exponential one.
    backoff_strategy: Callable[[int], float] | None
    #: Draw each wait between zero and its length.
    backoff_jitter: bool
    #: With more brokers than `max_in_flight`: when one that is idle, or has had its turn, makes place for the next.
    low_rdy_idle_timeout: float
    low_rdy_timeout: float
    rdy_redistribute_interval: float
    #: How long `close` waits for handlers.
    stop_timeout: float


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    lookupd: str | Sequence[str] | None = None
    lookupd_poll_interval: float = 60.0
    lookupd_poll_jitter: float = 0.3
    lookupd_timeout: float = 5.0
    lookupd_token: str | None = None
    lookupd_tls: bool | ssl.SSLContext = True
    on_error: Callable[[str, Exception], object] | None = None
    codec: Codec | None = None
    clock: Clock | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.lookupd_poll_jitter <= 1:
            raise OptionError("lookupd_poll_jitter must be 0 to 1")
        if not self.lookupd_poll_interval >= 0.01:
            raise OptionError(f"lookupd_poll_interval must be at least 0.01 seconds, not {self.lookupd_poll_interval}")
        check(self.on_error, "on_error")


@dataclass(frozen=True, kw_only=True)
class ProducerSettings(ClientSettings):
    linger: float = 0.0
    timeout: float = 30.0
    retry_unknown: bool = False
    max_pending_bytes: int = 64 << 20
    max_defer: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.linger >= 0 or not self.timeout > 0:
            raise OptionError("linger must not be below 0, timeout must be above 0")
        if not self.max_pending_bytes > 0:
            raise OptionError("max_pending_bytes must be above 0")


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings(ClientSettings):
    nsqd: str | Sequence[str] | None = None
    concurrency: int = 1
    max_in_flight: int | None = None
    max_attempts: int = 5
    on_heartbeat: Callable[[str], object] | None = None
    default_requeue_delay: float = 90.0
    max_requeue_delay: float = 900.0
    auto_touch: bool = False
    max_backoff_duration: float = 120.0
    backoff_multiplier: float = 1.0
    backoff_strategy: Callable[[int], float] | None = None
    backoff_jitter: bool = False
    low_rdy_idle_timeout: float = 1.0
    low_rdy_timeout: float = 5.0
    rdy_redistribute_interval: float = 0.5
    stop_timeout: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.concurrency < 1:
            raise OptionError("concurrency must be at least 1")
        if not 0 <= self.max_attempts <= 65535:
            raise OptionError("max_attempts must be 0 (no limit) to 65535")
        for name in (
            "max_in_flight",
            "default_requeue_delay",
            "max_requeue_delay",
            "max_backoff_duration",
            "backoff_multiplier",
            "low_rdy_idle_timeout",
            "low_rdy_timeout",
            "stop_timeout",
        ):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise OptionError(f"{name} must not be below 0")
        if not self.rdy_redistribute_interval > 0:
            raise OptionError("rdy_redistribute_interval must be above 0")
        check(self.on_heartbeat, "on_heartbeat")


_S = TypeVar("_S", bound=ClientSettings)
_CONNECTION = frozenset(field.name for field in dataclasses.fields(Settings))


def parse(kind: type[_S], given: Mapping[str, Any]) -> tuple[_S, Settings]:
    """Return the client's own settings and those of its connections. TypeError for a name that is neither."""
    own = {field.name for field in dataclasses.fields(kind)}
    for name in given:
        if name not in own and name not in _CONNECTION:
            near = difflib.get_close_matches(name, own | _CONNECTION, 1)
            raise TypeError(f"there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    connection = {name: value for name, value in given.items() if name in _CONNECTION}
    return kind(**{name: value for name, value in given.items() if name in own}), Settings(**connection)
