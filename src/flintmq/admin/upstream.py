"""Requests to nsqds and nsqlookupds, and the words of NSQ's nsqadmin for what goes wrong.

An ``Upstream`` owns the HTTP connections to all daemons of a cluster. A daemon that wants TLS says so with a 403 that
names its HTTPS port; the request is repeated there, and the port is remembered. ``many`` asks several at the same
time. The texts of errors end up in answers that scripts read, so they are those of the Go program.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote_plus, urlsplit, urlunsplit

import msgspec

from flintmq.addresses import host_of, http_url, join
from flintmq.cluster.shapes import check
from flintmq.errors import UNREADABLE, FlintError, OptionError, file_reason
from flintmq.http.tokens import read_token
from flintmq.options import NsqadminOptions

if TYPE_CHECKING:
    import ssl

    import aiohttp

__all__ = ["Partial", "Upstream", "UpstreamError", "client_tls", "many", "query_of"]

logger = logging.getLogger(__name__)

#: More than this is no answer of a daemon.
ANSWER_BYTES = 256 << 20
#: Bytes of a refusal that are repeated to others.
SHOWN_BYTES = 4096

T = TypeVar("T")
K = TypeVar("K")


class UpstreamError(FlintError):
    """A daemon gave no answer, or not the one that was asked for; the text is that of Go's nsqadmin."""

    def __init__(self, text: str, status: int = 0, body: bytes = b"", *, is_unsent: bool = False) -> None:
        self.status = status
        #: There was no connection, so that nothing was asked.
        self.is_unsent = is_unsent
        self.body = body
        super().__init__(text)


class Partial(msgspec.Struct):
    """The answers by daemon, and the errors of those that gave none, in the order in which they were asked."""

    answers: list[tuple[Any, Any]]
    errors: list[tuple[Any, UpstreamError]]

    @property
    def text(self) -> str:
        return "\n".join(str(error) for _, error in self.errors)


async def many(targets: Sequence[K], ask: Callable[[K], Awaitable[T]]) -> Partial:
    """Ask all targets at the same time. Never raises an UpstreamError: some may have answered."""
    found = await asyncio.gather(*map(ask, targets), return_exceptions=True)
    result = Partial([], [])
    for target, answer in zip(targets, found, strict=True):
        if isinstance(answer, UpstreamError):
            result.errors.append((target, answer))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            result.answers.append((target, answer))
    return result


class Upstream:
    """See the module's text. ``close`` at the end."""

    def __init__(self, options: NsqadminOptions) -> None:
        """OptionError if a file that the options name cannot be used."""
        self._tls = client_tls(options)
        self._connect_seconds = options.http_client_connect_timeout / 1e9
        self._seconds = options.http_client_request_timeout / 1e9
        self._tokens = {
            "nsqd": read_token(options.nsqd_http_token_file) if options.nsqd_http_token_file else "",
            "nsqlookupd": read_token(options.lookupd_http_token_file) if options.lookupd_http_token_file else "",
        }
        self._session: aiohttp.ClientSession | None = None
        #: HTTPS addresses of daemons that refuse plain HTTP.
        self._secure: dict[str, str] = {}

    @property
    def tls(self) -> ssl.SSLContext | bool:
        return self._tls

    def address(self, daemon: str) -> str:
        """Where a daemon is really asked: its HTTPS address, if it has refused plain HTTP."""
        return self._secure.get(daemon, daemon)

    @property
    def has_tokens(self) -> bool:
        return any(self._tokens.values())

    def token(self, kind: str) -> str:
        return self._tokens[kind]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, kind: str, address: str, path: str, query: str = "") -> Any:
        """The JSON that a daemon answers. ``kind`` is ``nsqd`` or ``nsqlookupd``: each is shown its own token."""
        body = await self.raw("GET", kind, address, path, query)
        try:
            answer = msgspec.json.decode(body) if body else {}
            check(kind, path, answer)
        except UNREADABLE as exc:
            raise UpstreamError(f"invalid answer of {address}: {exc}") from exc
        return answer

    async def post(self, kind: str, address: str, path: str, query: str = "") -> None:
        """Have a daemon do something. Arguments are in the query, the body is empty."""
        await self.raw("POST", kind, address, path, query)

    async def raw(
        self,
        method: str,
        kind: str,
        address: str,
        path: str,
        query: str = "",
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> bytes:
        """The body of a daemon's answer; UpstreamError if it is not a 200."""
        remembered = self._secure.get(address)
        base = remembered or base_url(address)
        for _ in range(3):
            url = f"{base}/{path}" + (f"?{query}" if query else "")
            try:
                status, body = await self._send(method, kind, url, data, headers, seconds)
            except UpstreamError as exc:
                if base != remembered:
                    raise
                # It may have got another port, or take plain HTTP again.
                self._secure.pop(address, None)
                if not exc.is_unsent:
                    raise
                remembered, base = None, base_url(address)
                continue
            if status == 200:
                return body
            if status == 403 and not base.startswith("https"):
                port = _https_port(body)
                if port:
                    base = f"https://{join(urlsplit(base).hostname or '', port)}"
                    self._secure[address] = base
                    continue
            break
        shown = body[:SHOWN_BYTES]
        raise UpstreamError(f"got response {status} {_phrase(status)} {go_quoted(shown)}", status, body)

    async def _send(
        self,
        method: str,
        kind: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str] | None,
        seconds: float | None,
    ) -> tuple[int, bytes]:
        import aiohttp
        from yarl import URL

        timeout = aiohttp.ClientTimeout(total=seconds or self._seconds, sock_connect=self._connect_seconds)
        sent = {"Accept": "application/vnd.nsq; version=1.0", **(headers or {})}
        if self._tokens.get(kind):
            sent["Authorization"] = f"Bearer {self._tokens[kind]}"
        verb = "Get" if method == "GET" else method.capitalize()
        try:
            async with self.session().request(
                method,
                URL(url, encoded=True),
                data=data,
                headers=sent,
                timeout=timeout,
                ssl=self._tls,
                allow_redirects=False,
            ) as response:
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > ANSWER_BYTES:
                        raise UpstreamError(f'{verb} "{url}": an answer without end')
                return response.status, bytes(body)
        except TimeoutError as exc:
            text = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
            raise UpstreamError(f'{verb} "{url}": {text}') from exc
        except aiohttp.ClientConnectorError as exc:
            text = f"dial tcp {exc.host}:{exc.port}: {_reason(exc)}"
            raise UpstreamError(f'{verb} "{url}": {text}', is_unsent=True) from exc
        except aiohttp.ServerDisconnectedError as exc:
            raise UpstreamError(f'{verb} "{url}": EOF') from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise UpstreamError(f'{verb} "{url}": {exc or type(exc).__name__}') from exc

    def session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            # One connection per request that is under way: a daemon that hangs must not hold up the others.
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=0)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session


def base_url(address: str) -> str:
    """``host:port`` or a URL, as a URL without a slash at its end."""
    try:
        return http_url(address, "a daemon")
    except OptionError as exc:
        raise UpstreamError(f'parse "http://{address}": {exc}') from exc


def query_of(**arguments: str) -> str:
    """Arguments as Go writes them into a query."""
    return "&".join(f"{name}={quote_plus(value)}" for name, value in arguments.items())


def client_tls(options: NsqadminOptions) -> ssl.SSLContext | bool:
    """The TLS side of a client of daemons. OptionError, in Go's words, if the files do not fit."""
    wanted = (options.http_client_tls_root_ca_file, options.http_client_tls_cert)
    if not any(wanted) and not options.http_client_tls_insecure_skip_verify:
        return True
    import ssl

    context = ssl.create_default_context()
    if options.http_client_tls_insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if options.http_client_tls_cert:
        cert, key = options.http_client_tls_cert, options.http_client_tls_key
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ValueError) as exc:
            raise OptionError(f"failed to LoadX509KeyPair {cert}, {key} - {file_reason(exc, cert, key)}") from exc
    if options.http_client_tls_root_ca_file:
        path = options.http_client_tls_root_ca_file
        try:
            context.load_verify_locations(path)
        except FileNotFoundError as exc:
            raise OptionError(
                f"failed to read TLS root CA file {path} - open {path}: no such file or directory"
            ) from exc
        except (OSError, ValueError) as exc:
            raise OptionError(f"failed to AppendCertsFromPEM {path} - {file_reason(exc, path)}") from exc
    return context


def _https_port(body: bytes) -> int:
    try:
        port = msgspec.json.decode(body, type=dict[str, Any]).get("https_port")
    except UNREADABLE:
        return 0
    return port if isinstance(port, int) and 0 < port < 65_536 else 0


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _reason(exc: aiohttp.ClientConnectorError) -> str:
    number = exc.os_error.errno
    if number is not None and number > 0:
        return f"connect: {os.strerror(number).lower()}"
    if number is not None:
        return f"lookup {exc.host}: no such host"
    return str(exc.os_error) or str(exc)


_UNPRINTABLE = re.compile("[^ -~\u00a1-\u00ac\u00ae-\U0010ffff]")
_SHORT = {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}


def go_quoted(data: bytes) -> str:
    """Return bytes as Go's ``%q`` prints them."""
    parts = []
    for character in data.decode("utf-8", "surrogateescape"):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:
            parts.append(f"\\x{code - 0xDC00:02x}")
        elif character in '"\\':
            parts.append("\\" + character)
        elif character in _SHORT:
            parts.append(_SHORT[character])
        elif _UNPRINTABLE.match(character):
            parts.append(f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
        else:
            parts.append(character)
    return '"' + "".join(parts) + '"'


def without_password(url: str) -> str:
    """Return a URL that may be shown."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    port = f":{parts.port}" if parts.port else ""
    return urlunsplit(parts._replace(netloc=host_of(parts.hostname or "") + port))
