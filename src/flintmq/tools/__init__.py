"""The command-line tools, one file each, and what they share: one connection to a broker, and how a tool ends.

A `Link` speaks the client's side of the protocol on asyncio streams. It answers heartbeats by itself; what the other
frames mean is the tool's business. Tools for operators ask a broker over HTTP instead: `node_flags` are the flags by
which they find it, and `run_on_node` runs them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq import wire
from flintmq.errors import ConnectError, FlintError, HttpError, OptionError, ProtocolError

if TYPE_CHECKING:
    import ssl

    from flintmq.client.node import NodeClient

__all__ = [
    "DEFAULT_NSQD",
    "DEFAULT_NSQD_HTTP",
    "Link",
    "body_fields",
    "node_flags",
    "place_of",
    "print_json",
    "print_line",
    "refusal",
    "run",
    "run_on_node",
    "split_source",
]

DEFAULT_NSQD = "127.0.0.1:4150"
DEFAULT_NSQD_HTTP = "127.0.0.1:4151"

# A broker that cannot take a connection or say goodbye in this time is as good as gone.
_PATIENCE_SECONDS = 5.0


class Link:
    """One connection to a broker, after IDENTIFY."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address = address
        #: What the broker answered to IDENTIFY: its limits and what it asks for.
        self.features: dict[str, Any] = {}
        self._reader = reader
        self._writer = writer
        self._decoder = wire.FrameDecoder()
        self._frames: deque[tuple[int, bytes]] = deque()

    @classmethod
    async def open(cls, address: str, **identify: Any) -> Link:
        """Connect and IDENTIFY; `identify` are fields of its body, such as `heartbeat_interval`."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                reader, writer = await _connect(address)
        except (OSError, ValueError) as exc:
            text = f"cannot connect to a broker at {address} ({_reason(exc)}); start one with: flintmq up"
            raise ConnectionError(text) from exc
        link = cls(address, reader, writer)
        host = socket.gethostname()
        body = {
            "client_id": host.partition(".")[0],
            "hostname": host,
            "user_agent": "flintmq",
            "feature_negotiation": True,
        }
        try:
            link.send(wire.MAGIC_V2 + wire.encode_command(b"IDENTIFY", body=msgspec.json.encode(body | identify)))
            async with asyncio.timeout(_PATIENCE_SECONDS):
                link.features = msgspec.json.decode(await link.response(), type=dict[str, Any])
            if link.features.get("auth_required"):
                raise ConnectionError(f"{address} asks for AUTH, which this tool cannot give")
        except BaseException as exc:
            writer.close()
            # No answer, no frames, no JSON: an HTTP port, for example.
            is_frame_error = isinstance(exc, ProtocolError) and exc.code == "E_INVALID"
            if is_frame_error or isinstance(exc, TimeoutError | msgspec.MsgspecError):
                raise ConnectionError(f"what listens at {address} does not answer like an NSQ broker") from exc
            raise
        return link

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait while more is buffered than a slow broker should be sent."""
        await self._writer.drain()

    async def frames(self) -> list[tuple[int, bytes]]:
        """Everything that has arrived, at least one frame. Heartbeats are answered and left out."""
        while not self._frames:
            data = await self._reader.read(256 * 1024)
            if not data:
                raise ConnectionError(f"{self.address} closed the connection")
            for kind, payload in self._decoder.feed(data):
                if kind == wire.FRAME_RESPONSE and payload == wire.HEARTBEAT:
                    self.send(wire.encode_command(b"NOP"))
                else:
                    self._frames.append((kind, payload))
        frames = list(self._frames)
        self._frames.clear()
        return frames

    async def response(self) -> bytes:
        """The next answer. Raises ProtocolError where the broker refused."""
        if not self._frames:
            self._frames.extend(await self.frames())
        kind, payload = self._frames.popleft()
        if kind == wire.FRAME_RESPONSE:
            return payload
        if kind == wire.FRAME_ERROR:
            raise refusal(payload)
        raise ConnectionError(f"{self.address} sent a message where an answer was due")

    async def close(self) -> None:
        """Close without losing what was sent: closing a socket with unread input would cut off our last commands."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._writer.drain()
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                while await self._reader.read(256 * 1024):
                    pass
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To `host:port`, or to a unix socket where the address is a path."""
    host, colon, port = address.rpartition(":")
    if "/" in address or not colon:
        return await asyncio.open_unix_connection(address)
    if not port.isdecimal():
        raise ValueError(f'"{port}" is not a port')
    return await asyncio.open_connection(host.strip("[]") or "127.0.0.1", int(port))


def _reason(exc: Exception) -> str:
    """Why a system call failed, in the system's own words: asyncio puts the address in their place."""
    if isinstance(exc, TimeoutError):
        return "no answer"
    number = exc.errno if isinstance(exc, OSError) else None
    # Failed look-ups of names have numbers of their own, which are negative.
    return os.strerror(number) if number is not None and number > 0 else str(exc)


def refusal(payload: bytes) -> ProtocolError:
    """The error of an error frame: `E_BAD_TOPIC …`."""
    code, _, text = payload.decode(errors="replace").partition(" ")
    return ProtocolError(code, text)


def run(tool: str, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a tool to its exit status; what ends it early is one line on standard error."""
    try:
        return asyncio.run(main())
    except KeyboardInterrupt:
        return 130
    except OSError as exc:
        reason = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    except FlintError as exc:
        reason = str(exc)
    sys.stderr.write(f"flintmq {tool}: {reason}\n")
    return 1


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
    group.add_argument("--token", metavar="TOKEN", help="for a broker that asks for one; others can see it in ps")
    group.add_argument("--token-file", metavar="FILE", help="read the token from this file")
    group.add_argument("--tls-root-ca-file", metavar="FILE", help="the authority that signed the broker's certificate")
    group.add_argument("--tls-cert", metavar="FILE", help="our own certificate, for a broker that asks for one")
    group.add_argument("--tls-key", metavar="FILE", help="the key of --tls-cert")
    group.add_argument("--tls-insecure", action="store_true", help="believe any certificate")


def split_source(parser: argparse.ArgumentParser, source: str, *, channel: bool | None = True) -> tuple[str, str]:
    """Topic and channel of `TOPIC/CHANNEL`. `channel`: must there be one, or not, or is both well (None)?"""
    topic, slash, name = source.partition("/")
    is_good = wire.valid_name(topic) and (not slash or wire.valid_name(name))
    if not is_good or (channel is not None and channel != bool(slash)):
        expected = {
            True: "TOPIC/CHANNEL, such as orders/billing",
            False: "a topic, such as orders",
            None: "TOPIC or TOPIC/CHANNEL, such as orders or orders/billing",
        }[channel]
        parser.error(f'"{source}" is not {expected}')
    return topic, name


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

    async def main() -> int:
        from flintmq.client.node import NodeClient

        address = arguments.nsqd_http_address
        async with NodeClient(address, token=_token(arguments), tls=_tls(arguments)) as node:
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
    if error.status in (401, 403):
        right = "the token lacks the right for this" if error.status == 403 else "it asks for a token"
        return f"{node.address} refuses ({error.code}): {right}; give one that has it with --token-file"
    if error.code == "NOT_FOUND":
        return f"the nsqd at {node.address} cannot do this: it is NSQ's own, or an older version of flintmq"
    if error.code in ("TOPIC_NOT_FOUND", "CHANNEL_NOT_FOUND"):
        with contextlib.suppress(FlintError):
            stats = await node.stats(topic if error.code.startswith("CHANNEL") else "", clients=False)
            topics: list[dict[str, Any]] = stats.get("topics") or []
            if error.code == "TOPIC_NOT_FOUND":
                return f"{node.address} has no topic {topic}; {_choice([t['topic_name'] for t in topics], 'topic')}"
            channels = [c["channel_name"] for t in topics for c in t["channels"]]
            return f"the topic {topic} has no channel {channel}; {_choice(channels, 'channel')}"
    return error.code


def _choice(names: list[str], kind: str) -> str:
    if not names:
        return f"it has no {kind} at all"
    shown = ", ".join(sorted(names)[:10])
    return f"it has {shown}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _token(arguments: argparse.Namespace) -> str | None:
    if not arguments.token_file:
        token: str | None = arguments.token
        return token
    with open(arguments.token_file, encoding="utf-8") as file:
        words = file.read().split()
    if len(words) != 1:
        raise OptionError(f"{arguments.token_file} must hold one token and nothing else")
    return words[0]


def _tls(arguments: argparse.Namespace) -> bool | ssl.SSLContext:
    if not (arguments.tls_root_ca_file or arguments.tls_cert or arguments.tls_key):
        return not arguments.tls_insecure
    import ssl

    try:
        context = ssl.create_default_context(cafile=arguments.tls_root_ca_file)
        if arguments.tls_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if arguments.tls_cert or arguments.tls_key:
            context.load_cert_chain(arguments.tls_cert or arguments.tls_key, arguments.tls_key)
    except (OSError, ValueError) as exc:
        raise OptionError(f"cannot use the files of --tls-root-ca-file, --tls-cert and --tls-key - {exc}") from exc
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
