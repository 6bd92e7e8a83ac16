"""A daemon's routes, and NSQ's form of every answer: what all our HTTP servers share.

A daemon makes one ``Site``: its table of routes and who may use them (``tokens``). Handlers return data or raise
``HttpError``; the site turns that into bytes, as NSQ's own servers do. ``server`` serves a site on sockets,
``arguments`` reads what a request asks for. What a route does is the daemon's business.

The path of a request is decoded once, before anything looks at it, and the right that a request needs belongs to the
route that it ends up at. So no spelling of a path gets around a right.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import quote, unquote

import msgspec

from flintmq.errors import HttpError
from flintmq.http.arguments import ORIGIN, Arguments, parse_query, split_target
from flintmq.http.browsers import is_foreign
from flintmq.http.tokens import ADMIN, CONSUME, OPEN, PUBLISH, READ, Tokens

__all__ = [
    "ADMIN",
    "CONSUME",
    "CONTINUE",
    "JSON",
    "LINGER_SECONDS",
    "OPEN",
    "PROMETHEUS",
    "PUBLISH",
    "READ",
    "TEXT",
    "Answer",
    "HttpError",
    "Pieces",
    "Request",
    "Route",
    "Site",
    "date_now",
    "envelope",
    "json_bytes",
    "log_request",
    "metric_head",
    "parse_query",
    "render",
    "render_head",
    "split_target",
]

logger = logging.getLogger(__name__)

TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"
#: The text format that every Prometheus reads.
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
#: On the answers of every route but the plain ones, spelled as Go sends it.
VERSION_HEADER = {"X-Nsq-Content-Type": "nsq; version=1.0"}

#: What a client with ``Expect: 100-continue`` waits for before it sends its body.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

#: A body may pause for this long.
BODY_SECONDS = 30.0
#: What is left of a body that nobody wants is read for this long, so that the client gets to see the answer.
LINGER_SECONDS = 2.0
#: The bodies that most routes read and ignore.
IGNORED_BODY = 1 << 20
#: Slashes of a path that is looked for in other spellings.
MOST_SLASHES = 64


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
    #: connection is cut, so that nobody takes the beginning for the whole. HTTP/1.0 can have it only if a header
    #: `Content-Length` says how long it is.
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


def metric_head(name: str, kind: str, help: str) -> str:
    """Return the lines before the values of a metric, in Prometheus's text format."""
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n"


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


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
#: Statuses whose answers have no body, nor its length.
_BODYLESS = (204, 304)


def date_now() -> str:
    """Return the time as HTTP wants it: in English, whatever the locale."""
    now = time.gmtime()
    return time.strftime(f"{_DAYS[now.tm_wday]}, %d {_MONTHS[now.tm_mon - 1]} %Y %H:%M:%S GMT", now)


def render(answer: Answer, date: str, *, old: bool = False, bare: bool = False) -> bytes:
    """Return a whole answer as the bytes that go out.

    ``old`` is for a client that speaks HTTP/1.0: it closes unless it is told not to. ``bare`` leaves out the body, as
    after HEAD.
    """
    body = b"" if answer.status in _BODYLESS else answer.body
    # Where there is no body and could be none, there is no length either.
    framed = body or not (bare or answer.status in _BODYLESS)
    head = _head(answer, f"Content-Length: {len(body)}" if framed else "", date, old)
    return head if bare else head + body


def render_head(answer: Answer, date: str, *, old: bool, chunked: bool) -> bytes:
    """Return the head of an answer that comes in pieces; one that is not ``chunked`` says its length itself."""
    return _head(answer, "Transfer-Encoding: chunked" if chunked else "", date, old)


def _head(answer: Answer, framing: str, date: str, old: bool) -> bytes:
    lines = [f"HTTP/1.{0 if old else 1} {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += (f"{name}: {value}" for name, value in answer.headers.items())
    if answer.content_type:
        lines.append(f"Content-Type: {answer.content_type}")
    if framing:
        lines.append(framing)
    lines.append(f"Date: {date}")
    if answer.close != old and "Connection" not in answer.headers:
        lines.append("Connection: keep-alive" if old else "Connection: close")
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError(f"a header of an answer has a line end: {lines}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")


# --- Requests ---------------------------------------------------------------------------------------------------------


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
        #: The body was read to its end.
        self.is_read = False

    def is_foreign(self, pages: Collection[str]) -> bool:
        """Has a web page sent it that is neither ours nor on one of these hosts?"""
        headers = self.headers
        if "Origin" not in headers and "Sec-Fetch-Site" not in headers:
            return False
        origins, sites = _all_of(headers, "Origin"), _all_of(headers, "Sec-Fetch-Site")
        return is_foreign(origins, sites, headers.get("Host", ""), pages)

    def arguments(self) -> Arguments:
        """Return the arguments of the query. HttpError ``INVALID_REQUEST`` if there is no making sense of it."""
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
        self.is_read = True
        return body


def _all_of(headers: Mapping[str, str], name: str) -> list[str]:
    """Return every value of a header; a plain mapping has one at most."""
    every = getattr(headers, "getall", None)
    if every is not None:
        return list(every(name, ()))
    return [headers[name]] if name in headers else []


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

    @property
    def is_plain_read(self) -> bool:
        """Does it change nothing, cost little and tell no message, so that any web page may ask for it?"""
        return self.method == "GET" and self.right in (OPEN, READ)


class Site:
    """A daemon's routes, and how a request becomes an answer."""

    def __init__(self, routes: Iterable[Route], tokens: Tokens | None = None, pages: Iterable[str] = ()) -> None:
        self.routes: Sequence[Route] = tuple(routes)
        self.tokens = tokens
        #: Hosts whose web pages may do what clients may.
        self._pages = frozenset(page.lower() for page in pages)
        # By method: what is said in full, and the patterns by their parts.
        self._fixed: dict[str, dict[str, Route]] = {}
        self._patterns: dict[str, list[tuple[list[str], Route]]] = {}
        self._most_parts = max((route.path.count("/") for route in self.routes), default=0) + 1
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
        # A path may have thousands of parts: no more of them than a pattern has are told apart.
        parts = path.split("/", self._most_parts)
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
        if path == "/" or method not in self._fixed or path.count("/") > MOST_SLASHES:
            return None
        clean = _clean(path)
        for candidate in (clean, clean.rstrip("/"), clean + "/"):
            if candidate and candidate != path and self.find(method, candidate):
                return candidate
        # A route's own words in another case; what it leaves open stays as it is.
        parts = clean.rstrip("/").split("/")
        lower = [part.lower() for part in parts]
        for route in self.routes:
            if route.method == method:
                pattern = route.path.rstrip("/").split("/")
                folded = [part if part[:1] in (":", "*") else part.lower() for part in pattern]
                if _match(folded, lower) is not None:
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
            if not route.is_plain_read and request.is_foreign(self._pages):
                raise HttpError(403, "FOREIGN_ORIGIN")
            result = await route.handler(request)
        except HttpError as exc:
            result = exc
        except Exception:
            logger.exception("panic in HTTP handler - %s %s", request.method, _shown(request.target))
            result = HttpError(500, "INTERNAL_ERROR")
        answer = envelope(result, plain=route.plain)
        if isinstance(result, HttpError) and answer.close and request.is_read:
            answer = replace(answer, close=False)
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
    shown = (
        location.replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .replace('"', "&#34;")
        .replace("'", "&#39;")
    )
    body = f'<a href="{shown}">Moved Permanently</a>.\n\n'.encode("utf-8", "surrogateescape")
    return Answer(body, "text/html; charset=utf-8", 301, {"Location": location})


#: Words in the names of arguments that hold a secret; nothing here asks for one, but somebody may send it.
_SECRET_WORDS = ("token", "secret", "passw", "pwd", "auth", "bearer", "key", "credential", "signature")
_BETWEEN_ARGUMENTS = re.compile("([&;])")
#: Characters of a target that are logged.
LONGEST_SHOWN = 512


def log_request(status: int, method: str, target: str, remote: str, started: int) -> None:
    """One line per request, as NSQ prints it: ``200 GET /info (127.0.0.1:56106) 26.38µs``."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(
            "%d %s %s (%s) %s", status, method, _shown(target), remote, _elapsed(time.perf_counter_ns() - started)
        )


def _shown(target: str) -> str:
    """Return a target as part of a line in the log, without its secrets.

    Anybody may send any target: the work is linear in its length, and a long one is cut.
    """
    origin = ORIGIN.match(target)
    target = target[origin.end() if origin else 0 :]
    path, mark, query = target[:LONGEST_SHOWN].partition("?")
    cut = "..." if len(target) > LONGEST_SHOWN else ""
    return ascii(_without_secrets(path) + mark + _without_secrets(query) + cut)[1:-1]


def _without_secrets(text: str) -> str:
    return "".join(map(_without_secret, _BETWEEN_ARGUMENTS.split(text)))


def _without_secret(argument: str) -> str:
    name, sign, _ = argument.partition("=")
    word = unquote(name).lower()
    return f"{name}=***" if sign and any(each in word for each in _SECRET_WORDS) else argument


def _elapsed(nanoseconds: int) -> str:
    for unit, size in (("ns", 1), ("µs", 1_000), ("ms", 1_000_000)):
        if nanoseconds < 1000 * size:
            return f"{nanoseconds / size:.9g}{unit}"
    minutes, rest = divmod(nanoseconds, 60_000_000_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1_000_000_000:.11g}s"
