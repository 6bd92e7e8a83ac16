"""The command-line tools, one file each, and what they share: one connection to a broker, and how a tool ends.

A `Link` is a connection of the client's, with its TLS, AUTH, compression and heartbeats, for tools that say themselves
what is sent and in which order. What comes is kept until the tool asks for it; what it means is the tool's business.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from flintmq.client.connection import Connection, Message, Settings, connect
from flintmq.errors import ClosedError, ConnectError, FlintError, ProtocolError

__all__ = ["DEFAULT_NSQD", "Link", "add_connection_arguments", "run"]

DEFAULT_NSQD = "127.0.0.1:4150"


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """How to reach the broker; `Link.open` reads them."""
    group = parser.add_argument_group("the connection")
    group.add_argument("--nsqd", metavar="ADDRESS", default=DEFAULT_NSQD, help="the broker (default %(default)s)")
    group.add_argument("--tls", action="store_true", help="encrypt; also if one of the files below is given")
    group.add_argument(
        "--tls-root-ca-file", metavar="FILE", help="believe the certificates of this authority, not the system's"
    )
    group.add_argument("--tls-cert", metavar="FILE", help="our own certificate, where the broker asks for one")
    group.add_argument("--tls-key", metavar="FILE", help="its key, if it is in a file of its own")
    group.add_argument("--auth-secret", metavar="SECRET", help="sent where the broker asks for it")
    compression = group.add_mutually_exclusive_group()
    compression.add_argument("--deflate", action="store_true", help="compress, where the broker does")
    compression.add_argument("--snappy", action="store_true", help="the same, faster and less")


def _settings(arguments: argparse.Namespace, connect: Any) -> Settings:
    return Settings(
        tls=_tls(arguments),
        auth_secret=arguments.auth_secret,
        deflate=arguments.deflate,
        snappy=arguments.snappy,
        connect=connect,
    )


def _tls(arguments: argparse.Namespace) -> Any:
    """A context, or False."""
    if not (arguments.tls or arguments.tls_root_ca_file or arguments.tls_cert or arguments.tls_key):
        return False
    import ssl

    if arguments.tls_key and not arguments.tls_cert:
        raise ConnectError("--tls-key is the key of a certificate: give --tls-cert too")
    file = arguments.tls_root_ca_file
    try:
        context = ssl.create_default_context(cafile=file)
        if arguments.tls_cert:
            file = arguments.tls_cert
            context.load_cert_chain(file, arguments.tls_key)
    except ssl.SSLError as exc:
        raise ConnectError(f"{file}: {exc}") from exc
    except OSError as exc:
        # Which of the two files it is, the error does not say.
        names = " or ".join(filter(None, [file, arguments.tls_key if file == arguments.tls_cert else None]))
        raise ConnectError(f"{names}: {exc.strerror}") from exc
    return context


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
        settings = _settings(arguments, link._connect)
        if address.startswith(":"):
            address = f"127.0.0.1{address}"
        elif ":" not in address and "/" not in address:
            address = f"./{address}"  # a unix socket in this folder
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
            text = f"cannot connect to a broker at {self.address} ({_reason(cause)}); start one with: flintmq up"
            return ConnectError(text)
        # No answer, no frames, no JSON: an HTTP port, for example.
        if isinstance(cause, TimeoutError | ProtocolError):
            return ConnectError(f"what listens at {self.address} does not answer like an NSQ broker ({cause})")
        if "no auth_secret" in str(error):
            return ConnectError(f"{self.address} asks for AUTH: give --auth-secret")
        return error

    @property
    def most_ready(self) -> int:
        """The highest RDY that the broker takes."""
        return self._connection.max_ready

    def send(self, command: bytes) -> None:
        self._connection.write(command)

    def set_ready(self, count: int) -> None:
        """It goes out before the answers of this turn, so that they make no room for messages that are not wanted."""
        self._connection.set_ready(count)

    def say_goodbye(self) -> None:
        """CLS. The broker answers CLOSE_WAIT after the last message it had sent."""
        self._connection.say_goodbye()

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

    def messages_came(self, connection: Connection, messages: list[Message]) -> None:
        self._keep(*messages)

    def response_came(self, connection: Connection, payload: bytes) -> None:
        self._keep(payload)

    def error_came(self, connection: Connection, error: ProtocolError) -> None:
        self._keep(error)

    def connection_lost(self, connection: Connection, reason: Exception) -> None:
        self._end = reason if isinstance(reason, FlintError) else ClosedError(str(reason))
        self._something_came.set()

    def heartbeat_came(self, connection: Connection) -> None: ...

    def finished(self, connection: Connection, message: Message) -> None: ...

    def requeued(self, connection: Connection, message: Message, backoff: bool) -> None: ...

    def requeue_delay(self, message: Message) -> float:
        return 0.0


def _reason(exc: Exception) -> str:
    """Why a system call failed, in the system's own words: asyncio puts the address in their place."""
    if isinstance(exc, TimeoutError):
        return "no answer"
    number = exc.errno if isinstance(exc, OSError) else None
    # Failed look-ups of names have numbers of their own, which are negative.
    return os.strerror(number) if number is not None and number > 0 else str(exc)


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
