"""What our HTTP servers share: routes and their envelope, tokens, TLS, and a server that others hold a socket for.

A daemon makes one ``Site``: its table of routes, who may use them (``Tokens``), and NSQ's form of every answer.
Handlers return data or raise ``HttpError``; the site turns that into bytes, as NSQ's own servers do. A ``Server``
serves a site on sockets that the daemon has bound. What a route does is the daemon's business.

The path of a request is decoded once, before anything looks at it, and the right that a request needs belongs to the
route that it ends up at. So no spelling of a path gets around a right.

aiohttp is imported only when a server is made: it costs as much memory as all of an idle broker.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import socket
import stat
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, unquote_to_bytes

import msgspec

from flintmq.errors import HttpError, OptionError

if TYPE_CHECKING:
    import ssl

    from aiohttp import web as aio

__all__ = [
    "ADMIN",
    "JSON",
    "OPEN",
    "PUBLISH",
    "READ",
    "TEXT",
    "Answer",
    "HttpError",
    "Pieces",
    "Request",
    "Route",
    "Server",
    "Site",
    "Tokens",
    "envelope",
    "json_bytes",
    "parse_query",
    "reload_tls",
    "render",
    "server_tls",
    "split_target",
]

logger = logging.getLogger(__name__)

#: Rights. A route needs one of them; an open one needs none.
OPEN, READ, PUBLISH, ADMIN = "", "read", "publish", "admin"

TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"
#: On the answers of every route but the plain ones, spelled as Go sends it.
VERSION_HEADER = {"X-Nsq-Content-Type": "nsq; version=1.0"}

#: What a client with ``Expect: 100-continue`` waits for before it sends its body.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

#: The request line and each header; a client that needs more does not speak NSQ.
LONGEST_LINE = 64 << 10
#: A connection without a request is kept for this long, and this long a request line with its headers may take.
IDLE_SECONDS = 75.0
#: A body may pause for this long.
BODY_SECONDS = 30.0
#: How long the head of a request may take to arrive once it has begun.
HEAD_SECONDS = 30.0
#: A client that has sent all it will gets this long to be answered.
HALF_OPEN_SECONDS = 10.0
#: What is left of a body that nobody wants is read for this long, so that the client gets to see the answer.
LINGER_SECONDS = 2.0
#: What an answer in pieces may take: so long for each piece, and as much again for each MiB of it.
PIECE_SECONDS = 60.0
#: The bodies that most routes read and ignore.
IGNORED_BODY = 1 << 20


# --- Answers ----------------------------------------------------------------------------------------------------------


class Pieces(Protocol):
    """The body of an answer that is not at hand as a whole."""

    def __aiter__(self) -> AsyncIterator[bytes | memoryview]: ...

    async def aclose(self) -> None:
        """Nobody wants more; called once in any case, perhaps before the first piece."""


@dataclass(frozen=True)
class Answer:
    """A whole answer, for handlers that need more than data: another type, a status of their own, more headers."""

    body: bytes = b""
    content_type: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    #: The connection ends with this answer.
    close: bool = False
    #: Instead of the body: what comes, piece by piece, as fast as the client takes it. If it ends with an error the
    #: connection is cut, so that nobody takes the beginning for the whole.
    pieces: Pieces | None = None


def json_bytes(value: Any) -> bytes:
    """JSON as Go writes it: no spaces, keys in their order, and nothing that a browser could take for markup."""
    data = msgspec.json.encode(value)
    for character, escaped in _ESCAPED:
        if character in data:
            data = data.replace(character, escaped)
    return data


_ESCAPED = (
    (b"<", b"\\u003c"),
    (b">", b"\\u003e"),
    (b"&", b"\\u0026"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def envelope(result: Any, *, plain: bool = False) -> Answer:
    """What a handler returned or raised, as an answer.

    Text and bytes go out as they are, None as an empty body, everything else as JSON. A plain route has text for its
    errors too, and no version header.
    """
    headers = {} if plain else VERSION_HEADER
    if isinstance(result, Answer):
        return result if plain else replace(result, headers={**headers, **result.headers})
    if isinstance(result, HttpError):
        if result.status == 401:
            headers = {**headers, "WWW-Authenticate": "Bearer"}
        # A body that is too big was not read: what is left of it would pass for the next request.
        close = result.status == 413
        if plain:
            return Answer(result.code.encode("utf-8", "surrogateescape"), TEXT, result.status, headers, close)
        return Answer(json_bytes({"message": result.code, **result.details}), JSON, result.status, headers, close)
    if result is None or result == "" or result == b"":
        return Answer(headers=headers)
    if isinstance(result, str):
        return Answer(result.encode("utf-8", "surrogateescape"), TEXT, headers=headers)
    if isinstance(result, bytes):
        return Answer(result, TEXT, headers=headers)
    return Answer(json_bytes(result), JSON, headers=headers)


# --- Requests ---------------------------------------------------------------------------------------------------------

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?]*")


def split_target(target: str) -> tuple[str, str]:
    """The path, decoded, and the query, as it came, of a request line. HttpError if it is no path at all."""
    if not target.startswith("/"):
        # A proxy's form: the whole URL.
        origin = _ORIGIN.match(target)
        if origin is None:
            raise HttpError(400, "400 Bad Request")
        target = target[origin.end() :] or "/"
    raw, _, query = target.partition("?")
    if "%" not in raw:
        return raw, query
    if _BAD_ESCAPE.search(raw):
        raise HttpError(400, "400 Bad Request")
    return _decoded(raw), query


def parse_query(query: str) -> dict[str, str]:
    """The arguments of a query, of a repeated one the first. HttpError for what Go cannot parse: ``%zz``, a ``;``."""
    arguments: dict[str, str] = {}
    if not query:
        return arguments
    if ";" in query or _BAD_ESCAPE.search(query):
        raise HttpError(400, "INVALID_REQUEST")
    for pair in query.split("&"):
        if pair:
            key, _, value = pair.partition("=")
            arguments.setdefault(_decoded(key.replace("+", " ")), _decoded(value.replace("+", " ")))
    return arguments


def _decoded(text: str) -> str:
    if "%" not in text:
        return text
    return unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


class Request:
    """What a handler gets to see of a request."""

    def __init__(
        self,
        method: str,
        target: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
        remote: str,
        read: Callable[[], Awaitable[bytes]],
        length: int | None,
        body_seconds: float | None = None,
    ) -> None:
        self.method = method
        #: The target as it was sent.
        self.target = target
        #: The path, decoded.
        self.path = path
        #: The query, as it was sent.
        self.query = query
        self.headers = headers
        self.remote = remote
        #: The parts of the path that the route names.
        self.parameters: dict[str, str] = {}
        self._read = read
        self._length = length
        self._body_seconds = body_seconds

    def arguments(self) -> dict[str, str]:
        """The arguments of the query. HttpError ``INVALID_REQUEST`` if there is no making sense of it."""
        return parse_query(self.query)

    async def body(self, limit: int = IGNORED_BODY, too_big: str = "BODY_TOO_BIG") -> bytearray:
        """The whole body; HttpError 413 if it is larger than ``limit``, 500 if it does not come in whole."""
        if self._length is not None and self._length > limit:
            raise HttpError(413, too_big)
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds or BODY_SECONDS):
                while piece := await self._read():
                    body += piece
                    if len(body) > limit:
                        raise HttpError(413, too_big)
        except (TimeoutError, OSError) as exc:
            raise HttpError(500, "INTERNAL_ERROR") from exc
        return body


async def load(name: str) -> None:
    """Import a large module in a thread: reading so many files would hold up everybody for a third of a second."""
    if name not in sys.modules:
        await asyncio.get_running_loop().run_in_executor(None, import_module, name)


# --- Routes -----------------------------------------------------------------------------------------------------------

Handler = Callable[[Request], Awaitable[Any]]


@dataclass(frozen=True)
class Route:
    method: str
    #: ``/config/:opt`` has a part of any name, ``/static/*path`` a rest of any length.
    path: str
    handler: Handler
    #: The right that a token must have.
    right: str
    #: Text instead of NSQ's envelope.
    plain: bool = False
    #: Too frequent, or too long, for a line in the log.
    unlogged: bool = False


class Site:
    """A daemon's routes, and how a request becomes an answer."""

    def __init__(self, routes: Iterable[Route], tokens: Tokens | None = None) -> None:
        self.routes: Sequence[Route] = tuple(routes)
        self.tokens = tokens
        # By method: what is said in full, and the patterns by their parts.
        self._fixed: dict[str, dict[str, Route]] = {}
        self._patterns: dict[str, list[tuple[list[str], Route]]] = {}
        for route in self.routes:
            fixed = self._fixed.setdefault(route.method, {})
            patterns = self._patterns.setdefault(route.method, [])
            if ":" in route.path or "*" in route.path:
                patterns.append((route.path.split("/"), route))
            else:
                fixed[route.path] = route

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]] | None:
        """The route of a decoded path, and the parts of the path that it names."""
        route = self._fixed.get(method, {}).get(path)
        if route is not None:
            return route, {}
        parts = path.split("/")
        for pattern, candidate in self._patterns.get(method, ()):
            parameters = _match(pattern, parts)
            if parameters is not None:
                return candidate, parameters
        return None

    def _allowed(self, path: str) -> str:
        """The methods that a path has, for the header ``Allow``; empty if there is no such path."""
        methods = [method for method in self._fixed if self.find(method, path)]
        return ", ".join(sorted([*methods, "OPTIONS"])) if methods else ""

    def _elsewhere(self, method: str, path: str) -> str | None:
        """Where a path that is slightly wrong should have gone: a slash too many, other case, dots."""
        if path == "/" or method not in self._fixed:
            return None
        clean = _clean(path)
        for candidate in (clean, clean.rstrip("/"), clean + "/"):
            if candidate and candidate != path and self.find(method, candidate):
                return candidate
        # A route's own words in another case; what it leaves open stays as it is.
        parts = clean.rstrip("/").split("/")
        for route in self.routes:
            if route.method == method:
                pattern = route.path.rstrip("/").split("/")
                folded = [part if part[:1] in (":", "*") else part.lower() for part in pattern]
                if _match(folded, [part.lower() for part in parts]) is not None:
                    kept = [given if own[:1] in (":", "*") else own for own, given in zip(pattern, parts, strict=False)]
                    return "/".join([*kept, *parts[len(pattern) :]]) + ("/" if route.path.endswith("/") else "")
        return None

    async def answer(self, request: Request) -> Answer:
        """Route, check, run, and put the result into its envelope. Never raises."""
        started = time.perf_counter_ns()
        found = self.find(request.method, request.path)
        if found is None:
            return self._not_found(request, started)
        route, request.parameters = found
        try:
            if self.tokens is not None:
                self.tokens.check(request.headers.get("Authorization"), route.right)
            result = await route.handler(request)
        except HttpError as exc:
            result = exc
        except Exception:
            logger.exception("panic in HTTP handler - %s %s", request.method, request.target)
            result = HttpError(500, "INTERNAL_ERROR")
        answer = envelope(result, plain=route.plain)
        if not route.unlogged:
            log_request(answer.status, request.method, request.target, request.remote, started)
        return answer

    def _not_found(self, request: Request, started: int) -> Answer:
        elsewhere = self._elsewhere(request.method, request.path)
        if elsewhere is not None:
            return _redirect(request.method, elsewhere, request.query)
        allowed = self._allowed(request.path)
        if request.method == "OPTIONS" and allowed:
            return Answer(headers={"Allow": allowed})
        if allowed:
            answer = envelope(HttpError(405, "METHOD_NOT_ALLOWED"))
            answer = Answer(answer.body, answer.content_type, 405, {"Allow": allowed, **answer.headers})
        else:
            answer = envelope(HttpError(404, "NOT_FOUND"))
        log_request(answer.status, request.method, request.target, request.remote, started)
        return answer


def _match(pattern: Sequence[str], parts: Sequence[str]) -> dict[str, str] | None:
    parameters: dict[str, str] = {}
    for i, wanted in enumerate(pattern):
        if wanted.startswith("*"):
            parameters[wanted[1:]] = "/".join(parts[i:])
            return parameters
        if i >= len(parts):
            return None
        if wanted.startswith(":"):
            if not parts[i]:
                return None
            parameters[wanted[1:]] = parts[i]
        elif wanted != parts[i]:
            return None
    return parameters if len(parts) == len(pattern) else None


def _clean(path: str) -> str:
    """``//a/./b/../c`` → ``/a/c``; a slash at the end stays."""
    kept: list[str] = []
    parts = path.split("/")
    for part in parts:
        if part == "..":
            del kept[-1:]
        elif part not in ("", "."):
            kept.append(part)
    slash = "/" if kept and parts[-1] in ("", ".", "..") else ""
    return "/" + "/".join(kept) + slash


def _redirect(method: str, path: str, query: str) -> Answer:
    location = quote(path, safe="/:@!$&'()*+,;=-._~", errors="surrogateescape") + (f"?{query}" if query else "")
    if method != "GET":
        return Answer(status=307, headers={"Location": location})
    shown = location.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&#34;")
    body = f'<a href="{shown}">Moved Permanently</a>.\n\n'.encode("utf-8", "surrogateescape")
    return Answer(body, "text/html; charset=utf-8", 301, {"Location": location})


def log_request(status: int, method: str, target: str, remote: str, started: int) -> None:
    """One line per request, as NSQ prints it: ``200 GET /info (127.0.0.1:56106) 26.38µs``."""
    if logger.isEnabledFor(logging.INFO):
        origin = _ORIGIN.match(target)
        shown = ascii(target[origin.end() if origin else 0 :])[1:-1]
        logger.info("%d %s %s (%s) %s", status, method, shown, remote, _elapsed(time.perf_counter_ns() - started))


def _elapsed(nanoseconds: int) -> str:
    for unit, size in (("ns", 1), ("µs", 1_000), ("ms", 1_000_000)):
        if nanoseconds < 1000 * size:
            return f"{nanoseconds / size:.9g}{unit}"
    minutes, rest = divmod(nanoseconds, 60_000_000_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1_000_000_000:.11g}s"


# --- Tokens -----------------------------------------------------------------------------------------------------------


class Tokens:
    """Who may do what: a file with one line per token, ``TOKEN RIGHTS``, and ``#`` before a comment.

    Rights are ``read``, ``publish`` and ``admin``, with commas between them; ``admin`` includes the others. A request
    carries its token as ``Authorization: Bearer TOKEN``. Only digests are kept, and a token is compared with all of
    them, so that how long that takes tells nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        #: Called after every reload, for those who remember what was allowed.
        self.changed: list[Callable[[], None]] = []
        self._rights = self._read()

    def _read(self) -> list[tuple[bytes, frozenset[str]]]:
        try:
            with open(self.path, encoding="utf-8") as file:
                mode = os.fstat(file.fileno()).st_mode
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise OptionError(f"cannot read the tokens in {self.path} - {reason}") from exc
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            logger.warning("HTTP: %s holds tokens and can be read by others: chmod 600 it", self.path)
        found = []
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            rights = frozenset(words[1].split(",")) if len(words) == 2 else frozenset[str]()
            if not rights or not rights <= {READ, PUBLISH, ADMIN}:
                # Never the line itself: it holds a secret.
                raise OptionError(f"{self.path}, line {number}: write TOKEN and its rights, such as read,publish")
            found.append((_digest(words[0]), frozenset((READ, PUBLISH, ADMIN)) if ADMIN in rights else rights))
        return found

    def reload(self) -> None:
        """Read the file again. If that fails the old tokens stay: a typing error must not open or close the door."""
        try:
            self._rights = self._read()
        except OptionError as exc:
            logger.error("HTTP: the tokens stay as they were - %s", exc)
            return
        logger.info("HTTP: %d tokens in %s", len(self._rights), self.path)
        for changed in self.changed:
            changed()

    def check(self, authorization: str | None, right: str) -> None:
        """HttpError 401 if the request has no token that we know, 403 if the token lacks the right."""
        if right == OPEN:
            return
        scheme, _, token = (authorization or "").strip().partition(" ")
        digest = _digest(token.strip())
        rights: frozenset[str] | None = None
        for known, its_rights in self._rights:
            if hmac.compare_digest(known, digest):
                rights = its_rights
        if rights is None or scheme.lower() != "bearer":
            raise HttpError(401, "UNAUTHORIZED")
        if right not in rights:
            raise HttpError(403, "FORBIDDEN")


def read_token(path: str) -> str:
    """The token that somebody has to show, from his file: the first word that is no comment. OptionError if none."""
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                if (words := line.split()) and not words[0].startswith("#"):
                    return words[0]
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is no ASCII text"
        raise OptionError(f"cannot read the token in {path} - {reason}") from exc
    raise OptionError(f"there is no token in {path}")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


# --- TLS --------------------------------------------------------------------------------------------------------------


def server_tls(
    cert: str, key: str, *, client_ca: str = "", policy: str = "", min_version: str = "tls1.2"
) -> ssl.SSLContext:
    """The TLS side of a server. OptionError if the files do not fit.

    ``policy`` is what is asked of clients: nothing, ``require`` or ``require-verify``. In NSQ ``require`` takes any
    certificate without looking at it; here a certificate that is asked for is always checked, against ``client_ca``
    or else the authorities that the system trusts.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    versions = {
        "tls1.0": ssl.TLSVersion.TLSv1,
        "tls1.1": ssl.TLSVersion.TLSv1_1,
        "tls1.2": ssl.TLSVersion.TLSv1_2,
        "tls1.3": ssl.TLSVersion.TLSv1_3,
    }
    with warnings.catch_warnings():
        # The old versions are there for those who ask for them by name.
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = versions[min_version]
    if min_version in ("tls1.0", "tls1.1"):
        # OpenSSL's own level forbids what these versions sign with.
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
    try:
        context.load_cert_chain(cert, key)
        if policy:
            context.verify_mode = ssl.CERT_REQUIRED
            if client_ca:
                context.load_verify_locations(client_ca)
            else:
                context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
                if policy == "require":
                    logger.warning("TLS: client certificates must be signed by an authority that this system trusts")
    except (OSError, ValueError) as exc:
        raise OptionError(f"failed to build TLS config - {exc}") from exc
    return context


def reload_tls(context: ssl.SSLContext, cert: str, key: str) -> None:
    """New connections get the certificate that is in the files now. OptionError, and no change, if it is no good."""
    import ssl

    try:
        # On the side first: a half that was loaded would stay.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as exc:
        raise OptionError(f"failed to reload the certificate - {exc}") from exc


# --- The server -------------------------------------------------------------------------------------------------------


def address_of(peer: Any) -> str:
    """``host:port`` of a peer's address; ``@`` for one on a unix socket, as Go prints it."""
    if isinstance(peer, tuple):
        return f"[{peer[0]}]:{peer[1]}" if ":" in str(peer[0]) else f"{peer[0]}:{peer[1]}"
    return "@"


class Server:
    """A site on listening sockets. ``protocol()`` makes the protocol of one connection, for those who accept it.

    A connection without a request is kept for ``idle`` seconds; the head of a request, and its body, may take ``head``
    and ``body`` seconds. ``refusal`` is given instead of every answer, on a listener that is not to be used.
    """

    def __init__(
        self,
        site: Site,
        *,
        idle: float = IDLE_SECONDS,
        head: float = HEAD_SECONDS,
        body: float | None = None,
        refusal: Answer | None = None,
    ) -> None:
        from aiohttp import web as aio

        self.site = site
        self._idle = idle
        self._head_seconds = head
        self._body_seconds = body
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._broken_body = aio.RequestPayloadError
        self._listeners: list[asyncio.Server] = []
        self._server = aio.Server(self._handle)

    def protocol(self, gone: Callable[[], None] | None = None) -> asyncio.Protocol:
        """The protocol of one connection; ``gone`` is called when it has ended."""
        settings: dict[str, Any] = {
            "access_log": None,
            "keepalive_timeout": self._idle,
            "max_line_size": LONGEST_LINE,
            "max_field_size": LONGEST_LINE,
            "lingering_time": LINGER_SECONDS,
            # NSQ takes a body as it is, whatever its Content-Encoding.
            "auto_decompress": False,
        }
        protocol: Any = _classes()[0](self._server, loop=self._loop, **settings)
        protocol.head_seconds = self._head_seconds
        protocol.gone = gone
        made: asyncio.Protocol = protocol
        return made

    async def listen(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve connections to a bound socket, which may be one of the unix kind."""
        if sock.family == getattr(socket, "AF_UNIX", None):
            listener = await self._loop.create_unix_server(lambda: self.protocol(), sock=sock, ssl=tls, backlog=1024)
        else:
            listener = await self._loop.create_server(lambda: self.protocol(), sock=sock, ssl=tls, backlog=1024)
        self._listeners.append(listener)

    def abort(self) -> None:
        """Close every connection at once, whatever is under way."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in self._server.connections:
            connection.force_close()

    async def close(self, grace: float = 1.0) -> None:
        """Accept no more, let requests that are under way end within ``grace`` seconds, close every connection."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._server.pre_shutdown()
        await self._server.shutdown(grace)

    async def _handle(self, raw: aio.BaseRequest) -> aio.StreamResponse:
        # HEAD is no method of any route, so nothing here is ever without its body.
        target = raw.raw_path
        transport = raw.transport
        if transport is None:
            raise ConnectionError("the client is gone")
        if self._refusal is not None:
            return _response(self._refusal)
        if target == "*" and raw.method == "OPTIONS":
            return _response(Answer())
        try:
            path, query = split_target(target)
        except HttpError as exc:
            return _response(Answer(exc.code.encode(), TEXT, exc.status, close=True))
        if len(raw.headers.getall("Authorization", ())) > 1:
            # Which of them counts? A proxy in front of us may have looked at the other one.
            return _response(Answer(b"400 Bad Request", TEXT, 400, close=True))
        if raw.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
            return _response(Answer(b"Unsupported transfer encoding", TEXT, 501, close=True))
        expectation = raw.headers.get("Expect", "").lower()
        if expectation not in ("", "100-continue"):
            return _response(Answer(status=417, close=True))

        async def read() -> bytes:
            nonlocal expectation
            if expectation:
                # The client waits for a word before it sends the body. It gets it from whoever wants the body.
                expectation = ""
                if not raw.content.total_bytes and raw.version >= (1, 1):
                    transport.write(CONTINUE)
            try:
                return await raw.content.readany()
            except self._broken_body as exc:
                raise ConnectionError(str(exc)) from exc

        remote = address_of(transport.get_extra_info("peername"))
        length, patience = raw.content_length, self._body_seconds
        request = Request(raw.method, target, path, query, raw.headers, remote, read, length, patience)
        answer = await self.site.answer(request)
        # Nobody said that the body may come: whether it does is not known. Nor is what follows a wish for another
        # protocol, and aiohttp loses some of it.
        if (expectation and raw.content_length) or "Upgrade" in raw.headers:
            answer = replace(answer, close=True)
        if answer.pieces is not None:
            return await self._stream(raw, transport, answer, answer.pieces)
        return _response(answer)

    async def _stream(
        self, raw: aio.BaseRequest, transport: asyncio.Transport, answer: Answer, pieces: Pieces
    ) -> aio.StreamResponse:
        try:
            if raw.version < (1, 1):
                # It could not tell an answer that was cut off from a whole one.
                return _response(Answer(b"505 HTTP Version Not Supported", TEXT, 505, close=True))
            response = _response(answer)
            response.enable_chunked_encoding()
            await response.prepare(raw)
            async for piece in pieces:
                async with asyncio.timeout(PIECE_SECONDS * (1 + len(piece) / (1 << 20))):
                    await response.write(piece)
            await response.write_eof()
        except TimeoutError as exc:
            # What it has not taken would be kept for it for ever.
            transport.abort()
            raise ConnectionError("the client takes no more") from exc
        except ConnectionError:
            raise
        except Exception as exc:
            logger.exception("an answer was cut off - %s %s", raw.method, raw.raw_path)
            raise ConnectionError("cut off") from exc
        finally:
            await pieces.aclose()
        return response


def render(answer: Answer, date: str) -> bytes:
    """An answer as the bytes that go out, for those who speak HTTP/1.1 without aiohttp."""
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    if answer.content_type:
        lines.append(f"Content-Type: {answer.content_type}")
    lines += (f"{name}: {value}" for name, value in answer.headers.items())
    lines += (f"Date: {date}", f"Content-Length: {len(answer.body)}")
    if answer.close:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body


def _response(answer: Answer) -> aio.StreamResponse:
    headers = dict(answer.headers)
    if answer.content_type:
        headers["Content-Type"] = answer.content_type
    _, whole, streamed = _classes()
    response: aio.StreamResponse
    if answer.pieces is None:
        response = whole(status=answer.status, headers=headers, body=answer.body)
    else:
        response = streamed(status=answer.status, headers=headers)
    if answer.close:
        response.force_close()
    return response


@cache
def _classes() -> tuple[Any, type[aio.Response], type[aio.StreamResponse]]:
    """aiohttp's own, less talkative."""
    from aiohttp import web as aio

    class Streamed(aio.StreamResponse):
        async def _prepare_headers(self) -> None:
            await super()._prepare_headers()
            # Go's servers do not say what they are made of. Should aiohttp rename this method, ours will say it.
            self.headers.pop("Server", None)

    class Response(Streamed, aio.Response):
        pass

    class Connection(aio.RequestHandler):
        head_seconds = HEAD_SECONDS
        gone: Callable[[], None] | None = None
        _deadline: asyncio.TimerHandle | None = None

        def data_received(self, data: bytes) -> None:
            """aiohttp waits for the rest of a head as long as it takes, if only a byte comes now and then."""
            super().data_received(data)
            if self._messages or self._current_request is not None:
                self._end_deadline()
            elif self._deadline is None:
                self._deadline = asyncio.get_running_loop().call_later(self.head_seconds, self.force_close)

        def connection_lost(self, exc: BaseException | None) -> None:
            super().connection_lost(exc)
            self._end_deadline()
            if self.gone is not None:
                self.gone()

        def _end_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def eof_received(self) -> bool:  # type: ignore[override]
            """The client sends no more. aiohttp would hang up, with the answer still to come."""
            if self.ssl_context is not None:
                # There is no such thing as half a TLS connection.
                return False
            if self._waiter is not None and not self._messages:
                # It waits for a request, and none can come.
                return False
            asyncio.get_running_loop().call_later(HALF_OPEN_SECONDS, self.force_close)
            return True

        def handle_error(
            self,
            request: aio.BaseRequest,
            status: int = 500,
            exc: BaseException | None = None,
            message: str | None = None,
        ) -> aio.StreamResponse:
            """What cannot be parsed is its sender's business: no line in the log, and Go's words as the answer."""
            if request.writer.output_size > 0:
                raise ConnectionError("a part of the answer is sent already")
            return _response(Answer(f"{status} {HTTPStatus(status).phrase}".encode(), TEXT, status, close=True))

    return Connection, Response, Streamed
