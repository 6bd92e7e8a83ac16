"""What the tools under NSQ's own names share: Go's flags, go-nsq's options, signals, exit codes, a line of progress.

A tool is a class of options (`ToolOptions`) and a coroutine; `run_program` reads the command line as Go's flag package
does, runs the coroutine and turns its end into Go's exit codes: 0 after a clean end or a signal, 1 after a `Fatal`, 2
after a wrong command line. `client_options` translates `--consumer-opt` and `--producer-opt`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from flintmq import logs
from flintmq.client.connection import Connect
from flintmq.errors import FlintError, OptionError, file_reason
from flintmq.options import (
    BOOL,
    DURATION,
    FLOAT,
    INT,
    SECOND,
    STRING,
    STRINGS,
    Kind,
    Option,
    Options,
    help_text,
    nearest,
    option,
    option_table,
    read_flags,
)
from flintmq.protocol.wire import NSQ_VERSION
from flintmq.tools._output import open_standard_files

if TYPE_CHECKING:
    import ssl

    from flintmq.client import Consumer

__all__ = [
    "BOOL",
    "DURATION",
    "FLOAT",
    "INT",
    "STRING",
    "STRINGS",
    "Fatal",
    "Progress",
    "Source",
    "ToolOptions",
    "client_options",
    "connected",
    "event_loop",
    "option",
    "run_program",
    "seconds",
    "stop_on_signals",
]

logger = logging.getLogger(__name__)

#: Seconds that messages in flight may take after a signal, as in go-nsq.
STOP_SECONDS = 30.0
#: Seconds between two updates of the line of progress.
_PROGRESS_SECONDS = 1.0


class Fatal(Exception):
    """One line for standard error; the exit code is 1."""


@dataclass(frozen=True, kw_only=True)
class ToolOptions(Options):
    """Flags of a tool. There is no config file."""

    has_version: ClassVar[bool] = True
    #: Whether words that are no flags are an error; Go's flag package passes over them.
    refuses_words: ClassVar[bool] = False
    command_line_only: ClassVar[tuple[Option, ...]] = (
        Option("help", BOOL, "print this help", default=False),
        Option("version", BOOL, "print the version", default=False),
    )

    def check(self) -> None:
        """Raise Fatal for values that do not fit together."""


@dataclass(frozen=True, kw_only=True)
class Source(ToolOptions):
    """Flags of every tool that consumes."""

    nsqd_tcp_addresses: tuple[str, ...] = option(
        STRINGS, (), "nsqd to consume from, host:port (repeatable)", flag="nsqd-tcp-address"
    )
    lookupd_http_addresses: tuple[str, ...] = option(
        STRINGS, (), "nsqlookupd that knows the nsqds, host:port (repeatable)", flag="lookupd-http-address"
    )
    max_in_flight: int = option(INT, 200, "most messages in flight", minimum=1)
    consumer_opts: tuple[str, ...] = option(
        STRINGS, (), "option of the consumer, as name,value (repeatable)", flag="consumer-opt"
    )

    def check_source(self) -> None:
        if not self.nsqd_tcp_addresses and not self.lookupd_http_addresses:
            raise Fatal("--nsqd-tcp-address or --lookupd-http-address required")
        if self.nsqd_tcp_addresses and self.lookupd_http_addresses:
            raise Fatal("use --nsqd-tcp-address or --lookupd-http-address not both")

    def consumer_options(self) -> dict[str, Any]:
        """Keywords of a Consumer: addresses, what `--consumer-opt` says, and what overrides that."""
        return client_options("consumer-opt", self.consumer_opts) | {
            "nsqd": self.nsqd_tcp_addresses,
            "lookupd": self.lookupd_http_addresses,
            "max_in_flight": self.max_in_flight,
            "user_agent": user_agent(self.program),
            "stop_timeout": STOP_SECONDS,
        }


def user_agent(program: str) -> str:
    from flintmq import __version__

    return f"{program}/{NSQ_VERSION} flintmq/{__version__}"


def seconds(nanoseconds: int) -> float:
    return nanoseconds / SECOND


# --- Options of the client --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Opt:
    """An option of go-nsq: how it is read, what it is called here, and its range."""

    kind: Kind
    #: Empty: read and checked, but without effect here.
    name: str = ""
    least: float = float("-inf")
    most: float = float("inf")


_MINUTES = 60.0
_OPTS: dict[str, _Opt] = {
    "dial_timeout": _Opt(DURATION, "dial_timeout"),
    "read_timeout": _Opt(DURATION, "read_timeout", 0.1, 5 * _MINUTES),
    "write_timeout": _Opt(DURATION, "write_timeout", 0.1, 5 * _MINUTES),
    "local_addr": _Opt(STRING, "connect"),
    "lookupd_poll_interval": _Opt(DURATION, "lookupd_poll_interval", 0.01, 5 * _MINUTES),
    "lookupd_poll_jitter": _Opt(FLOAT, "lookupd_poll_jitter", 0, 1),
    "lookupd_poll_timeout": _Opt(DURATION, "lookupd_timeout"),
    "max_requeue_delay": _Opt(DURATION, "max_requeue_delay", 0, 60 * _MINUTES),
    "default_requeue_delay": _Opt(DURATION, "default_requeue_delay", 0, 60 * _MINUTES),
    "backoff_strategy": _Opt(STRING, "backoff_jitter"),
    "max_backoff_duration": _Opt(DURATION, "max_backoff_duration", 0, 60 * _MINUTES),
    "backoff_multiplier": _Opt(DURATION, "backoff_multiplier", 0, 60 * _MINUTES),
    "max_attempts": _Opt(INT, "max_attempts", 0, 65535),
    "low_rdy_idle_timeout": _Opt(DURATION, "low_rdy_idle_timeout", 1, 5 * _MINUTES),
    "low_rdy_timeout": _Opt(DURATION, "low_rdy_timeout", 1, 5 * _MINUTES),
    "rdy_redistribute_interval": _Opt(DURATION, "rdy_redistribute_interval", 0.001, 5),
    "client_id": _Opt(STRING, "client_id"),
    "hostname": _Opt(STRING, "hostname"),
    "user_agent": _Opt(STRING),
    "heartbeat_interval": _Opt(DURATION, "heartbeat_interval"),
    "sample_rate": _Opt(INT, "sample_rate", 0, 99),
    "tls_v1": _Opt(BOOL, "tls"),
    "tls_root_ca_file": _Opt(STRING),
    "tls_cert": _Opt(STRING),
    "tls_key": _Opt(STRING),
    "tls_insecure_skip_verify": _Opt(BOOL),
    "tls_min_version": _Opt(STRING),
    "deflate": _Opt(BOOL, "deflate"),
    "deflate_level": _Opt(INT, "deflate_level", 1, 9),
    "snappy": _Opt(BOOL, "snappy"),
    "output_buffer_size": _Opt(INT, "output_buffer_size"),
    "output_buffer_timeout": _Opt(DURATION, "output_buffer_timeout"),
    "max_in_flight": _Opt(INT, "", 0),
    "msg_timeout": _Opt(DURATION, "msg_timeout", 0),
    "auth_secret": _Opt(STRING, "auth_secret"),
    "skip_lookupd_authorization": _Opt(BOOL),
}
_CONSUMER_ONLY = frozenset(
    {"max_requeue_delay", "default_requeue_delay", "backoff_jitter", "max_backoff_duration", "backoff_multiplier"}
    | {"max_attempts", "low_rdy_idle_timeout", "low_rdy_timeout", "rdy_redistribute_interval"}
)


def client_options(flag: str, given: Sequence[str]) -> dict[str, Any]:
    """Return keywords of a Consumer, or of a Producer, for values of `--consumer-opt` or `--producer-opt`.

    OptionError for a name that go-nsq does not have, and for a value that it would refuse.
    """
    found: dict[str, Any] = {}
    for text in given:
        word, comma, value = text.partition(",")
        name = word.replace("-", "_")
        try:
            found[name] = _read_opt(name, value if comma else "true")
        except ValueError as exc:
            raise OptionError(f'invalid value "{text}" for flag -{flag}: {exc}') from exc
    files = {name: found.pop(name) for name in list(found) if name.startswith("tls_") and name != "tls_v1"}
    options = {_OPTS[name].name: value for name, value in found.items() if _OPTS[name].name}
    if flag == "producer-opt":
        options = {name: value for name, value in options.items() if name not in _CONSUMER_ONLY}
    if "backoff_jitter" in options:
        options["backoff_jitter"] = options["backoff_jitter"] == "full_jitter"
    if "connect" in options:
        options["connect"] = _connect_from(options["connect"])
    if options.get("msg_timeout") == 0:
        del options["msg_timeout"]
    if files and options.get("tls"):
        options["tls"] = _tls_context(files)
    return options


def _read_opt(name: str, text: str) -> Any:
    opt = _OPTS.get(name)
    if opt is None:
        meant = nearest(name, _OPTS)
        raise ValueError(f"invalid option {name}" + (f", did you mean {meant}?" if meant else ""))
    value = opt.kind.from_text(text)
    if opt.kind is DURATION:
        value = seconds(value)
    if opt.kind in (DURATION, INT, FLOAT) and not opt.least <= value <= opt.most:
        raise ValueError(f"invalid {name} ! {text} is not between {opt.least:g} and {opt.most:g}")
    if name == "backoff_strategy" and value not in ("", "exponential", "full_jitter"):
        raise ValueError(f'"{value}" is neither exponential nor full_jitter')
    return value


def _connect_from(local: str) -> Connect:
    """Return a way to connect that begins at an address of this machine."""
    from flintmq.addresses import split

    host, port, _ = split(local, listening=True, unix=False)
    here = (host or "0.0.0.0", port)

    async def connect(
        address: str, factory: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        far_host, far_port, _ = split(address, unix=False)
        return await asyncio.get_running_loop().create_connection(factory, far_host, far_port, local_addr=here)

    return connect


def _tls_context(files: dict[str, Any]) -> ssl.SSLContext:
    import ssl

    try:
        context = ssl.create_default_context(cafile=files.get("tls_root_ca_file") or None)
        if files.get("tls_insecure_skip_verify"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if files.get("tls_cert"):
            context.load_cert_chain(files["tls_cert"], files.get("tls_key") or None)
    except (OSError, ssl.SSLError) as exc:
        reason = file_reason(exc, *(files.get(name) for name in ("tls_root_ca_file", "tls_cert", "tls_key")))
        raise Fatal(f"cannot use the files of tls_root_ca_file, tls_cert and tls_key: {reason}") from exc
    versions = {"ssl3.0": "TLSv1", "tls1.0": "TLSv1", "tls1.1": "TLSv1_1", "tls1.2": "TLSv1_2", "tls1.3": "TLSv1_3"}
    if wanted := files.get("tls_min_version"):
        if wanted not in versions:
            raise OptionError(f'"{wanted}" is not a TLS version: use tls1.0, tls1.1, tls1.2 or tls1.3')
        context.minimum_version = getattr(ssl.TLSVersion, versions[wanted])
    return context


# --- Running ----------------------------------------------------------------------------------------------------------

_O = TypeVar("_O", bound=ToolOptions)


def run_program(
    options_class: type[_O], argv: Sequence[str] | None, main: Callable[[_O], Coroutine[Any, Any, int]]
) -> int:
    """Run a tool to its exit code."""
    open_standard_files()
    # A signal before anything has begun ends what is nothing.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    program = options_class.program
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        rest: list[str] = []
        flags = read_flags(options_class, words, rest)
        if flags.get("help"):
            _out(f"{help_text(options_class)}\n")
            return 0
        if flags.get("version") and options_class.has_version:
            _out(f"{program} v{NSQ_VERSION}\n")
            return 0
        for flag in ("consumer-opt", "producer-opt"):
            client_options(flag, flags.get(flag, ()))
        fields = {entry.key: flags[flag] for flag, entry in option_table(options_class).items() if flag in flags}
        options = options_class(**{key: value for key, value in fields.items() if key is not None})
        logs.setup(getattr(options, "log_prefix", ""), getattr(options, "log_level", "info"), program=program)
        if rest and options_class.refuses_words:
            raise Fatal(f"unknown arguments: [{' '.join(rest)}]")
        options.check()
        options.validate()
        with asyncio.Runner(loop_factory=event_loop()) as runner:
            return runner.run(main(options))
    except OptionError as exc:
        sys.stderr.write(f"{exc}\n{help_text(options_class)}\n")
        return 2
    except Fatal as exc:
        logger.critical("%s", exc)
    except OSError as exc:
        logger.critical("%s", f"{exc.filename}: {exc.strerror}" if exc.filename else exc)
    except FlintError as exc:
        logger.critical("%s", exc)
    except KeyboardInterrupt:
        return 0
    return 1


def _out(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(text)
        sys.stdout.flush()


def event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return how to make uvloop's event loop, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def stop_on_signals(stop: Callable[[], object], *more: signal.Signals) -> None:
    """Call `stop` at SIGINT, SIGTERM and any others, until the loop ends."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, *more):
        loop.add_signal_handler(number, stop)


class Failures:
    """The first failure of each address: an `on_error` for a client."""

    def __init__(self) -> None:
        self.of: dict[str, Exception] = {}

    def __call__(self, address: str, error: Exception) -> None:
        self.of.setdefault(address, error)


async def connected(consumer: Consumer[bytes], addresses: Sequence[str], failures: Failures) -> None:
    """Wait until a consumer has tried every nsqd that the user named. Fatal if one of them failed.

    A consumer that was stopped meanwhile, by a signal or by the last message that was wanted, connects to nobody more.
    """
    waiting = set(addresses)
    while waiting and not consumer.is_stopping:
        waiting.difference_update(consumer.connections)
        for address in waiting & failures.of.keys():
            reason = str(failures.of[address]).removeprefix(f"{address}: ")
            raise Fatal(f"({address}) error connecting to nsqd - {reason}")
        if waiting:
            await asyncio.sleep(0.01)


# --- Progress ---------------------------------------------------------------------------------------------------------


class Progress:
    """A line on standard error, where that is a terminal: how much was done, and how fast."""

    def __init__(self, program: str, verb: str) -> None:
        self._program = program
        self._verb = verb
        self._began = self._last = time.monotonic()
        self.count = 0
        self.bytes = 0
        #: What else to say, asked at each update.
        self.more: Callable[[], str] = str
        self._counted = 0
        self._is_shown = False
        self.is_on = sys.stderr.isatty()

    def add(self, count: int, size: int = 0) -> None:
        self.count += count
        self.bytes += size

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show it while the block runs."""
        if not self.is_on:
            yield
            return
        for handler in logging.getLogger().handlers:
            # A log line must not stand behind a half of ours.
            handler.addFilter(self._clear)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._update())
        try:
            yield
        finally:
            task.cancel()
            self._clear()
            took = max(1e-9, time.monotonic() - self._began)
            self._write(f"{self._program}: {self._facts(self.count / took)}, {took:.1f} s in all\n")

    def _clear(self, record: logging.LogRecord | None = None) -> bool:
        if self._is_shown:
            self._is_shown = False
            self._write("\r\x1b[K")
        return True

    async def _update(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            now = time.monotonic()
            rate = (self.count - self._counted) / max(1e-9, now - self._last)
            self._last, self._counted = now, self.count
            self._write(f"\r\x1b[K{self._program}: {self._facts(rate)}")
            self._is_shown = True

    def _facts(self, rate: float) -> str:
        size = f", {self.bytes / 1e6:,.1f} MB" if self.bytes else ""
        more = self.more()
        return f"{self._verb} {self.count:,} messages{size}, {rate:,.0f}/s" + (f", {more}" if more else "")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
