"""The command-line tools, one file each, and what they share: one connection to a broker, and how a tool ends.

A `Link` is a connection of the client's, with its TLS, AUTH, compression and heartbeats, for tools that say themselves
what is sent and in which order; `link_flags` are the flags it is opened by. What comes is kept until the tool asks for
it; what it means is the tool's business. Tools for operators ask a broker over HTTP instead: `node_flags` are the flags
by which they find it, and `run_on_node` runs them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import os
import re
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq import addresses
from flintmq.client.connection import Connection, Message, Settings, connect
from flintmq.errors import (
    ClosedError,
    ConnectError,
    FlintError,
    HttpError,
    OptionError,
    ProtocolError,
    file_reason,
    permission_hint,
    plain_reason,
    system_reason,
)
from flintmq.protocol import wire
from flintmq.tools._output import open_standard_files, output_error

if TYPE_CHECKING:
    import ssl

    from flintmq.cluster.node import NodeClient

__all__ = [
    "DEFAULT_NSQD",
    "DEFAULT_NSQD_HTTP",
    "INTERRUPTED",
    "Link",
    "body_fields",
    "check_name",
    "link_flags",
    "node_flags",
    "place_of",
    "print_json",
    "print_line",
    "read_token",
    "refuses_plain_http",
    "run",
    "run_on_node",
    "say_that_it_waits",
    "split_source",
    "tls_flags",
    "tls_of",
]

DEFAULT_NSQD = "127.0.0.1:4150"
DEFAULT_NSQD_HTTP = "127.0.0.1:4151"
#: Exit status of a command that ctrl-C or SIGTERM cut short.
INTERRUPTED = 130
# Seconds without a message after which a terminal is told that a tool waits.
_SILENCE = 2.0


def link_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which broker to connect to, and how."""
    group = parser.add_argument_group("the broker")
    group.add_argument(
        "--nsqd",
        metavar="ADDRESS",
        type=_nsqd_address,
        default=DEFAULT_NSQD,
        help="host:port or the path of a unix socket (default %(default)s)",
    )
    group.add_argument(
        "--auth-secret", metavar="SECRET", help="for a broker that requires it; other users can see it in ps"
    )
    group.add_argument("--tls", action="store_true", help="use TLS; implied by the other --tls options")
    tls_flags(group)
    compression = group.add_mutually_exclusive_group()
    compression.add_argument("--deflate", action="store_true", help="compress with deflate if the broker supports it")
    compression.add_argument("--snappy", action="store_true", help="compress with snappy if the broker supports it")


def _nsqd_address(text: str) -> str:
    """The address of --nsqd: without a host it is this machine, and a file in this folder may be a unix socket."""
    if text.startswith(":") and text.count(":") == 1:
        text = f"127.0.0.1{text}"
    elif ":" not in text and "/" not in text and os.path.exists(text):
        text = f"./{text}"
    try:
        addresses.split(text)
    except OptionError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return text


def tls_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tls-root-ca-file", metavar="FILE", help="the authority that signed the broker's certificate")
    group.add_argument("--tls-cert", metavar="FILE", help="client certificate, for a broker that requires one")
    group.add_argument("--tls-key", metavar="FILE", help="the key of --tls-cert")
    group.add_argument("--tls-insecure", action="store_true", help="accept any certificate")


class Link:
    """One connection to a broker, after its handshake. It ends with `close`, or by an error that `news` raises."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._connection: Connection
        self._is_reached = False
        # Messages, answers, refusals, in the order they came; and why no more will.
        self._came: deque[Message | bytes | ProtocolError] = deque()
        self._something_came = asyncio.Event()
        self._end: Exception | None = None

    @classmethod
    async def open(cls, arguments: argparse.Namespace, subscribe: tuple[str, str] | None = None) -> Link:
        """Connect as the arguments say, and subscribe to a topic and channel where asked."""
        address: str = arguments.nsqd
        link = cls(address)
        tls = tls_of(arguments)
        settings = Settings(
            # Without a flag there is no context: then TLS is as the system has it, or none.
            tls=arguments.tls if tls is None else tls,
            auth_secret=arguments.auth_secret,
            deflate=arguments.deflate,
            snappy=arguments.snappy,
            connect=link._connect,
        )
        try:
            link._connection = await Connection.open(
                address, settings, asyncio.get_running_loop(), link, subscribe=subscribe
            )
        except ConnectError as exc:
            raise link._explained(exc) from exc
        return link

    async def _connect(
        self, address: str, factory: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        opened = await connect(address, factory)
        self._is_reached = True
        return opened

    def _explained(self, error: ConnectError) -> ConnectError:
        """What to do about it, where that is known."""
        cause = error.__cause__
        if not self._is_reached and isinstance(cause, Exception):
            # Where `flintmq up` would listen.
            is_default = self.address in (DEFAULT_NSQD, DEFAULT_NSQD.replace("127.0.0.1", "localhost"))
            remedy = "; start one with: flintmq up" if is_default else "; see --nsqd"
            if isinstance(cause, socket.gaierror):
                remedy = "; check the host name"
            elif isinstance(cause, PermissionError):
                # It runs, and is for others. Its option lets a group in.
                remedy = f"{permission_hint(cause, self.address)}; nsqd's --unix-socket-mode lets others connect"
            return ConnectError(f"cannot connect to a broker at {self.address} ({_reason(cause)}){remedy}")
        # No answer, no frames, no JSON: an HTTP port, for example.
        if isinstance(cause, TimeoutError | ProtocolError):
            reason = _reason(cause) if isinstance(cause, TimeoutError) else cause.text or cause.code
            return ConnectError(f"what listens at {self.address} does not answer like an NSQ broker ({reason})")
        if "no auth_secret" in str(error):
            return ConnectError(f"{self.address} asks for AUTH: give --auth-secret")
        return error

    @property
    def most_ready(self) -> int:
        """The highest RDY that the broker takes."""
        return self._connection.max_ready

    @property
    def message_seconds(self) -> float:
        """How long a message may be kept before the broker gives it to somebody else."""
        return self._connection.msg_timeout

    def waiting(self) -> list[Message]:
        """Messages that have arrived and are still to be seen in ``news``."""
        return [each for each in self._came if isinstance(each, Message)]

    def send(self, command: bytes) -> None:
        self._connection.write(command)

    def set_ready(self, count: int) -> None:
        """It goes out before the answers of this turn, so that they make no room for messages that are not wanted."""
        self._connection.set_ready(count)

    def say_goodbye(self) -> None:
        """CLS. The broker answers CLOSE_WAIT after the last message it had sent."""
        self._connection.say_goodbye()

    async def sleep(self, seconds: float) -> None:
        """Wait. What ends the connection meanwhile is raised."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._end is None:
            self._something_came.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._something_came.wait()
            except TimeoutError:
                return
        raise self._end

    async def news(self) -> list[Message | bytes | ProtocolError]:
        """Everything that has arrived: messages, answers and refusals, at least one of them."""
        while not self._came:
            if self._end is not None:
                raise self._end
            self._something_came.clear()
            await self._something_came.wait()
        came = list(self._came)
        self._came.clear()
        return came

    async def response(self) -> bytes:
        """The next answer. Raises ProtocolError where the broker refused."""
        if not self._came:
            self._came.extend(await self.news())
        came = self._came.popleft()
        if isinstance(came, ProtocolError):
            raise came
        if isinstance(came, Message):
            raise ConnectError(f"{self.address} sent a message where an answer was due")
        return came

    async def close(self) -> None:
        """What was sent still arrives."""
        await self._connection.close()

    # --- What the connection tells -----------------------------------------------------------------------------------

    def _keep(self, *news: Message | bytes | ProtocolError) -> None:
        self._came.extend(news)
        self._something_came.set()

    def _messages_came(self, connection: Connection, messages: list[Message]) -> None:
        self._keep(*messages)

    def _response_came(self, connection: Connection, payload: bytes) -> None:
        self._keep(payload)

    def _error_came(self, connection: Connection, error: ProtocolError) -> None:
        self._keep(error)

    def _connection_ended(self, connection: Connection, reason: Exception) -> None:
        self._end = reason if isinstance(reason, FlintError) else ClosedError(str(reason))
        self._something_came.set()

    def _heartbeat_came(self, connection: Connection) -> None: ...

    def _finished(self, connection: Connection, message: Message) -> None: ...

    def _requeued(self, connection: Connection, message: Message, backoff: bool) -> None: ...

    def _delay_of(self, message: Message) -> float:
        return 0.0


def _reason(exc: Exception) -> str:
    """Return why there is no connection, in plain words."""
    if isinstance(exc, TimeoutError):
        return "no answer"
    if isinstance(exc, socket.gaierror):
        return str(exc.strerror)
    return plain_reason(exc)


def say_that_it_waits(source: str, is_silent: Callable[[], bool]) -> None:
    """Tell a terminal after two seconds what a tool waits for, if nothing was printed until then."""

    def say() -> None:
        if is_silent():
            sys.stderr.write(f"waiting for messages of {source}; end with ctrl-C\n")

    if sys.stderr is not None and sys.stderr.isatty():
        asyncio.get_running_loop().call_later(_SILENCE, say)


def run(tool: str, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a tool to its exit status; what ends it early is one line on standard error."""
    try:
        return asyncio.run(main())
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as exc:
        # The system's own words, and no file: it may be that of standard output.
        refused = output_error() if exc.errno is not None and not exc.filename else None
        reason = system_reason(exc) if refused is None else f"cannot write to standard output: {refused.strerror}"
    except FlintError as exc:
        reason = str(exc)
    sys.stderr.write(f"flintmq {tool}: {reason}{_tls_advice(reason)}\n")
    return 1


def _tls_advice(reason: str) -> str:
    """What to do about an error that has to do with TLS."""
    if "TLS required" in reason:
        return "; give --tls"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return "; name the authority of its certificate with --tls-root-ca-file (--tls-insecure checks nothing)"
    return ""


# --- Over HTTP --------------------------------------------------------------------------------------------------------


def node_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which broker to ask, and as whom."""
    group = parser.add_argument_group("the broker")
    group.add_argument(
        "--nsqd-http-address",
        metavar="ADDRESS",
        default=DEFAULT_NSQD_HTTP,
        help="host:port, an https:// URL or the path of a unix socket (default %(default)s)",
    )
    group.add_argument("--token", metavar="TOKEN", help="for a broker that asks for one; other users can see it in ps")
    group.add_argument("--token-file", metavar="FILE", help="read the token from this file")
    tls_flags(group)


def split_source(parser: argparse.ArgumentParser, source: str, *, channel: bool | None = True) -> tuple[str, str]:
    """Topic and channel of `TOPIC/CHANNEL`. `channel`: must there be one, or not, or is both well (None)?"""
    topic, slash, name = source.partition("/")
    if not topic or bool(slash) != bool(name) or "/" in name or (channel is not None and channel != bool(slash)):
        expected = {
            True: "TOPIC/CHANNEL, such as orders/billing",
            False: "a topic, such as orders",
            None: "TOPIC or TOPIC/CHANNEL, such as orders or orders/billing",
        }[channel]
        parser.error(f'"{source}" is not {expected}')
    check_name(parser, topic, "topic")
    if name:
        check_name(parser, name, "channel")
    return topic, name


def check_name(parser: argparse.ArgumentParser, name: str, kind: str) -> None:
    """End with a usage error if no topic or channel can have this name."""
    if not wire.valid_name(name):
        parser.error(f'"{name}" is not a {kind} name: use 1 to 64 letters, digits, ".", "_" or "-"')


def place_of(text: str) -> str | int | datetime:
    """A place in a log, from the command line: `earliest`, `latest`, a seq, or a time (without a zone: a local one)."""
    if text in ("earliest", "latest"):
        return text
    if text.isdecimal():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f'"{text}" is neither earliest, latest, a number nor a time such as 2030-01-31T12:00:00Z'
        ) from exc


def run_on_node(
    tool: str, arguments: argparse.Namespace, work: Callable[[NodeClient], Coroutine[Any, Any, int]]
) -> int:
    """Run a tool that asks one broker over HTTP, to its exit status."""
    open_standard_files()

    async def main() -> int:
        from flintmq.cluster.node import NodeClient

        address = arguments.nsqd_http_address
        async with NodeClient(address, token=read_token(arguments), tls=tls_of(arguments) or True) as node:
            try:
                status = await work(node)
                sys.stdout.flush()
                return status
            except BrokenPipeError:
                # `| head` has seen enough. What is still buffered has nowhere to go.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 0
            except ConnectError as exc:
                hint = "start one with: flintmq up" if address == DEFAULT_NSQD_HTTP else "see --nsqd-http-address"
                raise ConnectionError(f"{exc}; {hint}") from exc
            except HttpError as exc:
                raise ConnectionError(await _advice(node, exc, arguments)) from exc

    return run(tool, main)


async def _advice(node: NodeClient, error: HttpError, arguments: argparse.Namespace) -> str:
    """What a refusal means, and what to do now."""
    topic, _, channel = str(getattr(arguments, "source", "")).partition("/")
    if error.code == "TLS_REQUIRED":
        return f"{refuses_plain_http(node.address, error)}; see --nsqd-http-address"
    if error.status in (401, 403):
        right = "it asks for a token"
        if error.status == 403:
            missing = error.details.get("missing_right")
            right = f"the token lacks the right {missing}" if missing else "the token lacks the right for this"
        return f"{node.address} refuses ({error.code}): {right}; give one that has it with --token-file"
    if error.code == "NOT_FOUND":
        return f"the nsqd at {node.address} cannot do this: it is NSQ's own, or an older version of flintmq"
    if error.status == 410 and "first" in error.details:
        first = error.details["first"]
        return f"{node.address} has deleted the messages of {topic} before {first}: begin there, or at earliest"
    if error.code in ("TOPIC_NOT_FOUND", "CHANNEL_NOT_FOUND"):
        with contextlib.suppress(FlintError):
            stats = await node.stats(topic if error.code.startswith("CHANNEL") else "", clients=False)
            topics: list[dict[str, Any]] = stats.get("topics") or []
            if error.code == "TOPIC_NOT_FOUND":
                return f"{node.address} has no topic {topic}; {_choice([t['topic_name'] for t in topics], 'topic')}"
            channels = [c["channel_name"] for t in topics for c in t["channels"]]
            return f"the topic {topic} has no channel {channel}; {_choice(channels, 'channel')}"
    return error.code


def refuses_plain_http(address: str, error: HttpError) -> str:
    """Return what it means that an nsqd answers TLS_REQUIRED, with the address to use in its place."""
    port = error.details.get("https_port")
    host = addresses.host_of(address.removeprefix("http://").rstrip("/"))
    where = f", use https://{addresses.join(host, port)}" if isinstance(port, int) else ""
    return f"the nsqd at {address} refuses plain HTTP{where}"


def _choice(names: list[str], kind: str) -> str:
    if not names:
        return f"it has no {kind} at all"
    shown = ", ".join(sorted(names)[:10])
    return f"it has {shown}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")


#: A header of HTTP carries it.
_TOKEN = re.compile("[!-~]+")


def read_token(arguments: argparse.Namespace) -> str | None:
    if not arguments.token_file:
        token: str | None = arguments.token
        if token is not None and not _TOKEN.fullmatch(token):
            raise OptionError("--token must be one word of printable ASCII characters")
        return token
    with open(arguments.token_file, encoding="utf-8") as file:
        words = file.read().split()
    if len(words) != 1 or not _TOKEN.fullmatch(words[0]):
        raise OptionError(f"{arguments.token_file} must hold one token and nothing else")
    return words[0]


def tls_of(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """What the flags say about TLS; None if nothing."""
    if not (arguments.tls_root_ca_file or arguments.tls_cert or arguments.tls_key or arguments.tls_insecure):
        return None
    import ssl

    try:
        context = ssl.create_default_context(cafile=arguments.tls_root_ca_file)
        if arguments.tls_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if arguments.tls_cert or arguments.tls_key:
            context.load_cert_chain(arguments.tls_cert or arguments.tls_key, arguments.tls_key)
    except (OSError, ValueError) as exc:
        reason = file_reason(exc, arguments.tls_root_ca_file, arguments.tls_cert, arguments.tls_key)
        raise OptionError(f"cannot use the files of --tls-root-ca-file, --tls-cert and --tls-key - {reason}") from exc
    return context


# --- What is printed --------------------------------------------------------------------------------------------------


def body_fields(body: bytes) -> dict[str, str]:
    """A body for JSON: text under `body`; what is none as base64 under `body_base64`, since JSON has no bytes."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")


def print_json(value: Any) -> None:
    """In one line."""
    print_line(msgspec.json.encode(value).decode())
