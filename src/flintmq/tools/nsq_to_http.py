"""`nsq_to_http`: send each message of a topic to HTTP addresses, as a POST or a GET.

A message is finished when the answer is a success (any 2xx for POST, 200 for GET) and requeued, with backoff, when it
is not. `Endpoint` is a small HTTP/1.1 client for one address with connections that are used again; what it cannot do
itself (redirects) aiohttp does.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import select
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, quote_plus, unquote_to_bytes, urlsplit

import httptools

from flintmq.client import Consumer, Message
from flintmq.errors import ConnectError
from flintmq.options import SECOND
from flintmq.protocol import wire
from flintmq.protocol.wire import NSQ_VERSION
from flintmq.tools._hosts import MODES, HostPool, Status
from flintmq.tools._program import (
    DURATION,
    FLOAT,
    INT,
    STRING,
    STRINGS,
    Failures,
    Fatal,
    Progress,
    Source,
    connected,
    option,
    run_program,
    seconds,
    stop_on_signals,
)

if TYPE_CHECKING:
    import ssl

    import aiohttp

__all__ = ["ABOUT", "OPTIONS", "HttpOptions", "main"]

#: The line of `flintmq --help`.
ABOUT = "send the messages of a topic to HTTP addresses, with the flags of NSQ's nsq_to_http"

logger = logging.getLogger(__name__)

_CONTENT_TYPE = "application/octet-stream"
#: Of this are redirects, which a client follows.
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, kw_only=True)
class HttpOptions(Source):
    program: ClassVar[str] = "nsq_to_http"

    topic: str = option(STRING, "", "topic")
    channel: str = option(STRING, "nsq_to_http", "channel")
    posts: tuple[str, ...] = option(STRINGS, (), "URL to POST messages to (repeatable)", flag="post")
    gets: tuple[str, ...] = option(
        STRINGS, (), "URL to GET; %s in it is replaced by the escaped message (repeatable)", flag="get"
    )
    mode: str = option(
        STRING, "hostpool", "how a URL is chosen: round-robin, hostpool, epsilon-greedy; any other word: send to all"
    )
    n: int = option(INT, 100, "most concurrent requests", minimum=1)
    sample: float = option(FLOAT, 1.0, "share of messages that is sent, 0 to 1; the others are finished")
    status_every: int = option(INT, 250, "results between two status lines; 0: none")
    content_type: str = option(STRING, _CONTENT_TYPE, "Content-Type of POST requests")
    headers: tuple[str, ...] = option(STRINGS, (), 'header of every request, "Name: value" (repeatable)', flag="header")
    http_client_connect_timeout: int = option(DURATION, 2 * SECOND, "time to connect to a URL")
    http_client_request_timeout: int = option(DURATION, 20 * SECOND, "time for a whole request")

    def check(self) -> None:
        self.named_headers()
        if not self.topic or not self.channel:
            raise Fatal("--topic and --channel are required")
        if not wire.valid_name(self.topic) or not wire.valid_name(self.channel):
            raise Fatal("--topic or --channel is invalid")
        if self.content_type != _CONTENT_TYPE:
            if not self.posts:
                raise Fatal("--content-type only used with --post")
            if not self.content_type:
                raise Fatal("--content-type requires a value when used")
        self.check_source()
        if not self.gets and not self.posts:
            raise Fatal("--get or --post required")
        if self.gets and self.posts:
            raise Fatal("use --get or --post not both")
        if any(url.count("%s") != 1 for url in self.gets):
            raise Fatal("invalid GET address - must be a printf string")
        if not 0 <= self.sample <= 1:
            raise Fatal("ERROR: --sample must be between 0.0 and 1.0")
        for flag in ("http_client_connect_timeout", "http_client_request_timeout"):
            if getattr(self, flag) <= 0:
                raise Fatal(f"--{flag.replace('_', '-')} should be positive")
        for url in (*self.posts, *self.gets):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise Fatal(f'"{url}" is not a URL such as http://127.0.0.1:8080/path')

    def named_headers(self) -> dict[str, str]:
        found = {}
        for text in self.headers:
            name, _, value = text.partition(":")
            name, value = name.strip(), value.strip()
            if not name or not value or not (name + value).isprintable() or " " in name:
                raise Fatal(f'--header value format should be "Name: value", not "{text}"')
            found[name] = value
        return found


OPTIONS = HttpOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `nsq_to_http`."""
    return run_program(HttpOptions, argv, lambda options: _Sender(options).run())


# --- HTTP -------------------------------------------------------------------------------------------------------------


class RequestError(Exception):
    """A request had no answer."""


class _Exchange(asyncio.Protocol):
    """A connection: one request after the other, each with its answer's status."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[int] | None = None
        self._parser: Any = None
        #: Whether the head of the answer is there, up to its empty line.
        self._has_head = False
        self.is_open = False
        self.has_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.is_open = True

    def send(self, request: bytes) -> asyncio.Future[int]:
        self._answer = asyncio.get_running_loop().create_future()
        self.has_answered = self._has_head = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self.has_answered = True
        if self._answer is None or self._answer.done():
            # Nobody has asked for this.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(RequestError(f"the answer is not HTTP: {exc}"))
        except httptools.HttpParserUpgrade:
            self._fail(RequestError("the server wants another protocol"))

    def is_stale(self) -> bool:
        """Return whether the server has closed it, or said something that nobody asked for."""
        if not self.is_open:
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def on_headers_complete(self) -> None:
        # After 100 Continue or 103 Early Hints the answer itself follows.
        self._has_head = self._parser.get_status_code() >= 200

    def on_message_complete(self) -> None:
        if not self._has_head:
            return
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(status)

    def eof_received(self) -> None:
        # An answer without a length ends here. One whose head is cut off is none.
        if (
            self._answer is not None
            and not self._answer.done()
            and self._has_head
            and not self._parser.should_keep_alive()
        ):
            self._answer.set_result(self._parser.get_status_code())

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(RequestError(str(exc) if exc else "the server closed the connection"))

    def _fail(self, error: RequestError) -> None:
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()


class Endpoint:
    """One URL, and connections to its server."""

    def __init__(self, url: str, method: str, headers: dict[str, str], options: HttpOptions) -> None:
        self._method = method
        self._headers = headers
        self._connect_seconds = seconds(options.http_client_connect_timeout)
        self._request_seconds = seconds(options.http_client_request_timeout)
        self._is_ok = range(200, 300) if method == "POST" else range(200, 201)
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        host = f"[{self._host}]" if ":" in self._host else self._host
        place = host + (f":{parts.port}" if parts.port else "")
        named = {name.lower() for name in headers}
        if parts.username is not None and "authorization" not in named:
            # As Go's client: a name and a password in the URL are for the server.
            known = unquote_to_bytes(parts.username) + b":" + unquote_to_bytes(parts.password or "")
            self._headers = headers | {"Authorization": f"Basic {base64.b64encode(known).decode()}"}
        lines = [f"Host: {place}"] if "host" not in named else []
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        self._lines = "".join(f"{line}\r\n" for line in lines).encode()
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._target = quote(target, safe=string.punctuation)
        #: For people.
        self.name = url if parts.password is None else url.replace(f":{parts.password}@", ":***@", 1)
        #: Without the name and the password.
        self._url = f"{parts.scheme}://{place}{self._target}"
        self._idle: list[_Exchange] = []
        self._tls: ssl.SSLContext | None = None
        self._session: aiohttp.ClientSession | None = None

    async def send(self, body: bytes) -> None:
        """Send one message. RequestError if there is no answer, or one that is not a success."""
        try:
            async with asyncio.timeout(self._request_seconds):
                status = await self._send(self._request(body))
                if status in _REDIRECTS:
                    status = await self._follow(body)
        except TimeoutError:
            raise RequestError(f"no answer within {self._request_seconds:g} s") from None
        except OSError as exc:
            raise RequestError(str(exc)) from exc
        if status not in self._is_ok:
            raise RequestError(f"got status code {status}")

    def _request(self, body: bytes) -> bytes:
        if self._method == "POST":
            head = f"POST {self._target} HTTP/1.1\r\n".encode()
            return b"%b%bContent-Length: %d\r\n\r\n%b" % (head, self._lines, len(body), body)
        target = self._target.replace("%s", quote_plus(body, safe="-_.~"))
        return f"GET {target} HTTP/1.1\r\n".encode() + self._lines + b"\r\n"

    async def _send(self, request: bytes) -> int:
        while self._idle:
            exchange = self._idle.pop()
            if exchange.is_stale():
                exchange.close()
                continue
            try:
                return await self._on(exchange, request)
            except RequestError:
                # The server may have closed it while this was on its way, or may have died of it: nobody knows. As Go's
                # client, a GET is tried once more. A POST may have been done; the message comes again, as an attempt.
                if exchange.has_answered or self._method != "GET":
                    raise
                break
        return await self._on(await self._open(), request)

    async def _on(self, exchange: _Exchange, request: bytes) -> int:
        try:
            status = await exchange.send(request)
        except BaseException:
            exchange.close()
            raise
        if exchange.is_open:
            self._idle.append(exchange)
        return status

    async def _open(self) -> _Exchange:
        if self._is_tls and self._tls is None:
            import ssl

            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, exchange = await loop.create_connection(_Exchange, self._host, self._port, ssl=self._tls)
                return exchange
        except TimeoutError:
            raise RequestError(f"cannot connect within {self._connect_seconds:g} s") from None

    async def _follow(self, body: bytes) -> int:
        """Send it again with a client that follows redirects."""
        import aiohttp
        import yarl

        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        is_post = self._method == "POST"
        url = self._url if is_post else self._url.replace("%s", quote_plus(body, safe="-_.~"))
        try:
            async with self._session.request(
                self._method, yarl.URL(url, encoded=True), data=body if is_post else None
            ) as response:
                await response.read()
                return response.status
        except aiohttp.ClientError as exc:
            raise RequestError(str(exc)) from exc

    async def close(self) -> None:
        for exchange in self._idle:
            exchange.close()
        if self._session is not None:
            await self._session.close()


# --- Messages ---------------------------------------------------------------------------------------------------------


class _Sender:
    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        method = "POST" if options.posts else "GET"
        headers = {"User-Agent": f"nsq_to_http v{NSQ_VERSION}"}
        if method == "POST":
            headers["Content-Type"] = options.content_type
        for name, value in options.named_headers().items():
            # They replace ours, however they are spelt.
            headers = {known: old for known, old in headers.items() if known.lower() != name.lower()} | {name: value}
        addresses = list(dict.fromkeys(options.posts or options.gets))
        self._endpoints = {url: Endpoint(url, method, headers, options) for url in addresses}
        self._sends_to_all = options.mode not in MODES
        self._pool = HostPool(addresses, options.mode)
        several = len(addresses) > 1
        self._status = Status(options.status_every, "[aggregate]:")
        self._statuses = {
            url: Status(options.status_every if several else 0, f"[{endpoint.name}]" + ":")
            for url, endpoint in self._endpoints.items()
        }
        self._progress = Progress(options.program, "sent")
        self._failures = Failures()

    async def run(self) -> int:
        options = self._options
        given = options.consumer_options() | {"on_error": self._failures, "concurrency": options.n}
        consumer: Consumer[bytes] = Consumer(options.topic, options.channel, handler=self._handle, **given)
        stopping = asyncio.Event()
        stop_on_signals(stopping.set)
        try:
            with self._progress.shown():
                await consumer.start()
                connecting = asyncio.create_task(
                    connected(consumer, options.nsqd_tcp_addresses, self._failures), name="first connections"
                )
                signalled = asyncio.create_task(stopping.wait())
                await asyncio.wait({connecting, signalled}, return_when=asyncio.FIRST_COMPLETED)
                if connecting.done():
                    connecting.result()
                connecting.cancel()
                await signalled
        except ConnectError as exc:
            raise Fatal(str(exc)) from exc
        finally:
            await consumer.close()
            for endpoint in self._endpoints.values():
                await endpoint.close()
        return 0

    async def _handle(self, message: Message[bytes]) -> None:
        if self._options.sample < 1 and random.random() > self._options.sample:
            return
        began = time.monotonic()
        urls = list(self._endpoints) if self._sends_to_all else [self._pool.choose()]
        for url in urls:
            start = time.monotonic()
            try:
                await self._endpoints[url].send(message.body)
            except RequestError as exc:
                if not self._sends_to_all:
                    self._pool.mark(url, False)
                name = self._endpoints[url].name
                logger.error("%s: %s; the message is requeued (attempt %d)", name, exc, message.attempts)
                message.requeue()
                return
            took = time.monotonic() - start
            if not self._sends_to_all:
                self._pool.mark(url, True, took)
            self._statuses[url].add(took)
        self._status.add(time.monotonic() - began)
        self._progress.add(1, len(message.body))
