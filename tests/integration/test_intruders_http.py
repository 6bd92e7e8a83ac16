"""What somebody without a right could try over HTTP: all of it is refused, has no effect, and tells nothing.

The routes are those of the broker's own table, so that a new one is covered by itself. An attempt is the bytes of a
connection and the statuses that may come back. All attempts of a group meet one broker that holds something to take and
to break; afterwards it must stand as before. That the same words do work for somebody with the right is shown too, so
that a refusal means something. The same for TCP is in test_intruders.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from struct import pack
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.storage.journal import NEVER
from flintmq.http.site import ADMIN, CONSUME, OPEN, PUBLISH, READ, Route
from flintmq.protocol.seqs import format_id
from support.http_client import HttpClient
from support.secure import PATIENCE, STRANGERS, Certificates, strangers, until

AT_LEAST = 300
AT_A_TIME = 16
#: A machine that stands still for a while must not look like a client that does.
PATIENT = {"http_header_timeout": 600 * 10**9, "http_body_timeout": 600 * 10**9}

TOKENS = {
    "reader-1f0a": "read",
    "publisher-2e9b": "publish",
    "both-3d8c": "read,publish",
    "consumer-8831": "consume",
    "admin-4c7d": "admin",
    # These lose what they have.
    "removed-5b6e": "admin",
    "to-read-6a5f": "admin",
    "to-publish-7940": "admin",
}
GOOD = "admin-4c7d"
LATER = {**{token: TOKENS[token] for token in list(TOKENS)[:5]}, "to-read-6a5f": "read", "to-publish-7940": "publish"}
RIGHTS = {
    token: {READ, CONSUME, PUBLISH, ADMIN} if rights == "admin" else set(rights.split(","))
    for token, rights in TOKENS.items()
}


def bearer(token: str) -> str:
    return f"Authorization: Bearer {token}"


# --- What is asked for ------------------------------------------------------------------------------------------------


def path_of(route: Route) -> str:
    return re.sub(r"[:*]\w+", "log_level", route.path)


def is_end_of_redrive(route: Route) -> bool:
    return (route.method, route.path) == ("DELETE", "/channel/redrive")


def query_of(route: Route) -> str:
    """Arguments with which the route would have its effect. What is to be kept is ``kept``, or ``paused``."""
    topic = channel = "kept"
    if route.path.endswith("/unpause") or route.path == "/topic/empty" or is_end_of_redrive(route):
        topic = channel = "paused"
    elif route.path in ("/pub", "/mpub", "/topic/create"):
        topic = "made"
    elif route.path == "/channel/create":
        channel = "made"
    # Where to begin; of dead letters, from which channel.
    start = "" if route.path == "/channel/redrive" else "&from=earliest"
    there = f"time=1{start}&to=latest&reader=kept&producer={route.path.rpartition('/')[2]}"
    if route.path == "/stage/put":
        there += "&epoch=1&txn=0&attempt=a&chunk=0"
    return f"topic={topic}&channel={channel}&seconds=1&rate=1&id={AN_ID}&delay=60000&{there}"


#: Stands for the id of a message, which only its broker knows.
AN_ID = "AN-ID"
#: A message, a level of logging, and of no interest to the others.
BODY = b"debug"
#: For the two routes that know nothing else.
SETTINGS = b'{"max-defer": "1m"}'
#: Stands for the name of a staged set, which only its broker knows.
A_SET = "a-set-that-only-its-broker-knows"
#: What staged publishes are asked for; each by a producer of its own, which is as far as is needed.
STAGED: dict[str, dict[str, Any]] = {
    "open": {"run": "run", "job": "job", "txn": 0},
    "begin": {"epoch": 1, "txn": 0, "attempt": "b", "decided": None},
    "prepare": {"epoch": 1, "txn": 0, "winners": [["a", 1, 1]]},
    "decide": {"epoch": 1, "txn": 0, "nodes": {"here": "set"}, "print": None},
    "apply": {"txn": 0, "set": A_SET},
    "done": {"txn": 0},
    "abort": {"epoch": 1, "txn": 0},
}
CHUNK = pack(">iI3s", 1, 3, b"row")


def body_of(route: Route) -> bytes:
    if route.path == "/stage/put":
        return CHUNK
    if route.path == "/pipeline/report":
        return b'{"id": "made", "at": 1}'
    verb = route.path.removeprefix("/stage/")
    if verb in STAGED:
        return json.dumps({"producer": verb, **STAGED[verb]}).encode()
    return SETTINGS if route.path in ("/topic/config", "/channel/config") else BODY


async def stage(broker: Broker) -> str:
    """Bring each producer to where its call has an effect; the name of the set to apply."""
    name = ""
    for verb in ("begin", "put", "prepare", "decide", "apply", "done", "abort", "stage"):
        producer = broker.stage.producer(verb)
        await producer.open("run", "job", 0)
        await producer.begin(1, 0, "a", None)
        if verb != "put":
            await producer.put((1, 0, "a"), 0, "kept", 0, bytearray(CHUNK), len(CHUNK), 1)
        if verb in ("decide", "apply", "done"):
            found = (await producer.prepare(1, 0, [("a", 1, 1)]))["set"]
            if verb != "decide":
                await producer.decide(1, 0, {"here": found}, None)
            if verb == "apply":
                name = found
            if verb == "done":
                await producer.apply(0, found)
    return name


def request(
    route: Route,
    *headers: str,
    method: str = "",
    target: str = "",
    version: str = "HTTP/1.1",
    more: str = "",
    framing: tuple[str, ...] | None = None,
    body: bytes | None = None,
) -> bytes:
    """The bytes of a request for the route, or for something close to it."""
    method = method or route.method
    target = target or f"{path_of(route)}?{query_of(route)}{more}"
    if body is None:
        body = b"" if method == "GET" else body_of(route)
    if framing is None:
        framing = (f"Content-Length: {len(body)}",) if body else ()
    lines = [f"{method} {target} {version}".rstrip(), "Host: broker", *headers, *framing, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


#: Follows nearly every attempt, and is answered where the connection goes on: so it has an end in any case.
LAST = b"GET /ping HTTP/1.1\r\nHost: broker\r\nConnection: close\r\n\r\n"
#: After this a connection is the general server's, and no longer the lane's.
PING = b"GET /ping HTTP/1.1\r\nHost: broker\r\n\r\n"


@dataclass(frozen=True)
class Attempt:
    name: str
    words: bytes
    #: One of these is the answer.
    statuses: frozenset[int]
    #: What is allowed and comes before, with the number of its answers.
    before: bytes = b""
    allowed: int = 0
    #: HEAD: the answer has no body, whatever its length says.
    bodiless: bool = False
    #: What follows, in the same packet.
    after: bytes = LAST


def statuses(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


UNKNOWN = statuses(401)
WEAK = statuses(403)
BAD = statuses(400)


def both_ways(routes: Iterable[Route]) -> Iterator[tuple[Route, str, bytes, int]]:
    """Every route that needs a right. Publishes on the lane, and, behind something else, on the general server."""
    for route in routes:
        if route.right != OPEN:
            name = f"{route.method} {route.path}"
            yield route, name, b"", 0
            if route.right == PUBLISH:
                yield route, f"{name} behind /ping", PING, 1


# --- Who is asking ----------------------------------------------------------------------------------------------------


def _basic(text: str) -> str:
    return f"Authorization: Basic {base64.b64encode(text.encode()).decode()}"


STRANGE_CREDENTIALS: dict[str, tuple[str, ...]] = {
    "no token": (),
    "an empty header": ("Authorization:",),
    "no scheme": (f"Authorization: {GOOD}",),
    "a scheme alone": ("Authorization: Bearer",),
    "an empty token": ("Authorization: Bearer ",),
    "spaces": ("Authorization: Bearer    ",),
    "quotes": (bearer('""'),),
    "a wrong token": (bearer("guess"),),
    "the beginning of a token": (bearer(GOOD[:-1]),),
    "a token and more": (bearer(GOOD + "0"),),
    "a token in capitals": (bearer(GOOD.upper()),),
    "a token in quotes": (bearer(f'"{GOOD}"'),),
    "an encoded token": (bearer(GOOD.replace("-", "%2D")),),
    "two tokens in one": (bearer(f"guess {GOOD}"),),
    "a list of tokens": (bearer(f"guess, Bearer {GOOD}"),),
    "a comment sign": (bearer("#"),),
    "a right as a token": (bearer("admin"),),
    "a line of the file": (bearer(f"{GOOD} admin"),),
    "the digest of a token": (bearer(hashlib.sha256(GOOD.encode()).hexdigest()),),
    "a tab behind the scheme": (f"Authorization: Bearer\t{GOOD}",),
    "Basic with a name": (_basic(f"admin:{GOOD}"),),
    "Basic with a token": (_basic(GOOD),),
    "Basic as it is": (f"Authorization: Basic {GOOD}",),
    "Digest": (f'Authorization: Digest username="admin", response="{GOOD}"',),
    "Token": (f"Authorization: Token {GOOD}",),
    "Negotiate": ("Authorization: Negotiate YII=",),
    "bytes beyond ASCII": ("Authorization: Bearer \xff\xfe",),
    "a very long token": (bearer("x" * 8000),),
}
#: Where a token does not belong.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "a cookie": (f"Cookie: Authorization=Bearer {GOOD}; token={GOOD}",),
    "Proxy-Authorization": (f"Proxy-Authorization: Bearer {GOOD}",),
    "X-Authorization": (f"X-Authorization: Bearer {GOOD}",),
    "X-Api-Key": (f"X-Api-Key: {GOOD}", f"X-Auth-Token: {GOOD}"),
    "an underscore": (f"HTTP_AUTHORIZATION: Bearer {GOOD}",),
    "the agent": (f"User-Agent: Bearer {GOOD}", f"Referer: http://x/?token={GOOD}"),
}
#: What a proxy might say of a request; none of it is believed.
SPOOFED: dict[str, tuple[str, ...]] = {
    "X-Forwarded-For": ("X-Forwarded-For: 127.0.0.1",),
    "X-Real-IP": ("X-Real-IP: 127.0.0.1", "True-Client-IP: 127.0.0.1", "X-Client-IP: ::1"),
    "Forwarded": ('Forwarded: for="[::1]";proto=https;by=localhost',),
    "X-Forwarded-Proto": ("X-Forwarded-Proto: https", "X-Forwarded-Ssl: on", "X-Forwarded-Host: localhost"),
    "X-Original-URL": ("X-Original-URL: /ping",),
    "X-Rewrite-URL": ("X-Rewrite-URL: /ping", "X-Forwarded-Prefix: /ping", "X-Forwarded-Uri: /ping"),
    "X-HTTP-Method-Override": ("X-HTTP-Method-Override: GET", "X-Method-Override: GET", "X-HTTP-Method: GET"),
    "the user": ("X-Remote-User: admin", "Remote-User: admin", "X-Forwarded-User: admin", "X-User: admin"),
    "the certificate": ("X-SSL-Client-Verify: SUCCESS", "X-Client-Cert-CN: admin", "SSL-Client-Verify: SUCCESS"),
    "Origin": ("Origin: http://127.0.0.1", "Referer: http://127.0.0.1/ping"),
    "Via": ("Via: 1.1 localhost", "X-Internal: true", "X-Debug: 1", "X-Admin: true"),
    "another host": ("X-Host: localhost", "X-Forwarded-Server: localhost"),
}
#: Of two tokens nobody knows which one counts: that is refused even to those who have one.
TWICE: dict[str, tuple[str, ...]] = {
    "wrong, good": (bearer("guess"), bearer(GOOD)),
    "good, wrong": (bearer(GOOD), bearer("guess")),
    "weak, good": (bearer("reader-1f0a"), bearer(GOOD)),
    "good twice": (bearer(GOOD), bearer(GOOD)),
    "empty, good": ("Authorization:", bearer(GOOD)),
    "in another case": (bearer("guess"), f"AUTHORIZATION: bearer {GOOD}"),
}


def unknown(routes: Iterable[Route]) -> Iterator[Attempt]:
    """Without a token that is known."""
    for route, name, before, allowed in both_ways(routes):
        for what, headers in {**STRANGE_CREDENTIALS, **ELSEWHERE, **SPOOFED}.items():
            yield Attempt(f"{name}: {what}", request(route, *headers), UNKNOWN, before, allowed)
        in_query = {
            "in the query": f"&token={GOOD}&access_token={GOOD}&Authorization=Bearer%20{GOOD}",
            "behind the query": f"#{GOOD}",
        }
        for what, more in in_query.items():
            yield Attempt(f"{name}: {what}", request(route, more=more), UNKNOWN, before, allowed)
        body = f"access_token={GOOD}&token={GOOD}".encode()
        yield Attempt(f"{name}: in the body", request(route, body=body), UNKNOWN, before, allowed)
        target = f"http://admin:{GOOD}@broker{path_of(route)}?{query_of(route)}"
        yield Attempt(f"{name}: in the origin", request(route, target=target), UNKNOWN, before, allowed)
        for what, headers in TWICE.items():
            yield Attempt(f"{name}: two tokens, {what}", request(route, *headers), BAD, before, allowed)


def weak(routes: Iterable[Route]) -> Iterator[Attempt]:
    """With a token that is known, but lacks the right."""
    for route, name, before, allowed in both_ways(routes):
        for token, rights in RIGHTS.items():
            if route.right not in rights:
                words = request(route, bearer(token))
                yield Attempt(f"{name}: as {token}", words, WEAK, before, allowed)
                spoofed = request(route, bearer(token), *(line for lines in SPOOFED.values() for line in lines))
                yield Attempt(f"{name}: as {token}, spoofed", spoofed, WEAK, before, allowed)


# --- What is asked, and how it is spelled -----------------------------------------------------------------------------


def spellings(path: str) -> dict[str, str]:
    """Paths that somebody, somewhere, may take for this one."""
    first, rest = path[1], path[2:]
    escaped = "".join(f"%{ord(letter):02x}" for letter in path[1:])
    last = path.rstrip("/").rpartition("/")[2]
    return {
        "a slash behind": path + "/",
        "two slashes": "/" + path,
        "slashes inside": path.replace("/", "//"),
        "a dot": "/." + path,
        "dots": "/ping/.." + path,
        "dots behind": path + "/../" + last,
        "escaped dots": "/ping/%2e%2e" + path,
        "half escaped dots": "/ping/.%2E" + path,
        "an escaped dot": "/%2e" + path,
        "dots beyond the root": "/../.." + path,
        "escaped slashes": "/" + path[1:].replace("/", "%2F"),
        "an escaped slash in front": "/%2f" + path[1:],
        "an escaped letter": f"/%{ord(first):02x}{rest}",
        "all letters escaped": "/" + escaped,
        "escaped twice": "/" + escaped.replace("%", "%25"),
        "an overlong letter": f"/%c1%{ord(first) & 0x3F | 0x80:02x}{rest}",
        "a wide letter": f"/{quote(chr(ord(first) + 0xFEE0))}{rest}",
        "capitals": path.upper(),
        "a capital": f"/{first.upper()}{rest}",
        "parameters": path + ";x=y",
        "parameters in front": "/;x" + path,
        "another suffix": path + ".json",
        "a fragment": path + "#",
        "a fragment to /ping": "/ping#" + path,
        "an escaped query": path + "%3ftopic=kept",
        "an escaped NUL": path + "%00",
        "NUL and /ping": path + "%00/ping",
        "a NUL": path + "\0",
        "a backslash": "\\" + path[1:],
        "a backslash behind": path + "\\",
        "backslashes": path.replace("/", "\\"),
        "escaped backslashes": "/ping%5c.." + path,
        "a space": path + "%20",
        "a tab": path + "\t",
        "an escaped line": path + "%0d%0aX:%20y",
        "bad escapes": path + "%zz",
        "no slash": path[1:],
        "the whole URL": "http://broker" + path,
        "another host's URL": "http://example.com:1" + path,
        "another scheme": "file://" + path,
        "no origin": "http://" + path,
        "a user": "http://ping@broker" + path,
        "bytes beyond ASCII": path + "\xff",
        "/ping in front": "/ping" + path,
        "/ping behind": path + "/ping",
    }


#: A path that is no route, or one that is, with all its rights.
NOWHERE = statuses(301, 307, 400, 401, 404, 405)


def misspelled(routes: Iterable[Route]) -> Iterator[Attempt]:
    for route, name, before, allowed in both_ways(routes):
        for what, path in spellings(path_of(route)).items():
            target = path if "#" in path else f"{path}?{query_of(route)}"
            words = request(route, target=target)
            yield Attempt(f"{name}: {what}", words, NOWHERE, before, allowed)
            for token in ("reader-1f0a", "publisher-2e9b"):
                if route.right not in RIGHTS[token]:
                    words = request(route, bearer(token), target=target)
                    yield Attempt(f"{name}: {what} as {token}", words, (NOWHERE | WEAK) - UNKNOWN, before, allowed)


METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PURGE", "PROPFIND"]
METHODS += ["get", "post", "Put", "FETCH", "GET\0", "GET/", "POST\tGET", "\xff"]


def other_methods(routes: Iterable[Route]) -> Iterator[Attempt]:
    """Where the method is a route's, it needs that route's right; else there is nothing."""
    routes = list(routes)
    for route, name, before, allowed in both_ways(routes):
        for method in METHODS:
            if method == route.method:
                continue
            expected = statuses(400, 405, 404)
            if any(other.method == method and other.path == route.path for other in routes):
                expected = UNKNOWN
            elif method == "OPTIONS":
                # Says which methods there are, and nothing else.
                expected = statuses(200)
            # What follows CONNECT is not HTTP.
            body, after = (b"", b"") if method == "CONNECT" else (None, LAST)
            bodiless = method == "HEAD"
            for what, headers in {
                "": (),
                " overridden": (f"X-HTTP-Method-Override: {route.method}",),
            }.items():
                words = request(
                    route, *headers, *(["Connection: close"] if not after else []), method=method, body=body
                )
                yield Attempt(f"{name}: {method!r}{what}", words, expected, before, allowed, bodiless, after)


# --- How it is framed -------------------------------------------------------------------------------------------------

CHUNKS = b"5\r\ndebug\r\n0\r\n\r\n"
CHUNKED = ("Transfer-Encoding: chunked",)
#: Framings that two servers could read in two ways.
AMBIGUOUS: dict[str, tuple[str, ...]] = {
    "length and chunks": ("Content-Length: 5", "Transfer-Encoding: chunked"),
    "chunks and length": ("Transfer-Encoding: chunked", "Content-Length: 5"),
    "no length and chunks": ("Content-Length: 0", "Transfer-Encoding: chunked"),
    "two lengths": ("Content-Length: 5", "Content-Length: 0"),
    "the same length twice": ("Content-Length: 5", "Content-Length: 5"),
    "a list of lengths": ("Content-Length: 5, 0",),
    "a signed length": ("Content-Length: +5",),
    "a negative length": ("Content-Length: -5",),
    "a length in hex": ("Content-Length: 0x5",),
    "a length with a point": ("Content-Length: 5.0",),
    "a length with an underscore": ("Content-Length: 0_5",),
    "an enormous length": ("Content-Length: 18446744073709551621",),
    "a space before the colon": ("Content-Length : 5",),
    "a folded length": ("Content-Length:", " 5"),
    "a folded line": ("X: y", " Content-Length: 5"),
    "chunks before a colon with a space": ("Transfer-Encoding : chunked",),
    "another coding": ("Transfer-Encoding: xchunked",),
    "no coding": ("Transfer-Encoding: identity",),
    "a list of codings": ("Transfer-Encoding: chunked, identity",),
    "chunks twice": ("Transfer-Encoding: chunked, chunked",),
    "two codings": ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
    "a coding in quotes": ('Transfer-Encoding: "chunked"',),
    "a vertical tab": ("Transfer-Encoding: \x0bchunked",),
    "a folded coding": ("Transfer-Encoding:", " chunked"),
    "a hidden coding": ("X: y\nTransfer-Encoding: chunked",),
    "a hidden length": ("X: y\rContent-Length: 5",),
    "a NUL": ("X: y\0", "Content-Length: 5"),
    "no colon": ("Content-Length",),
    "no name": (": x",),
}
#: Bodies in chunks that two servers could end at two places.
AMBIGUOUS_CHUNKS: dict[str, bytes] = {
    "a line feed alone": b"5\ndebug\n0\n\n",
    "a line feed in an extension": b"5;x\ny\r\ndebug\r\n0\r\n\r\n",
    "a carriage return in an extension": b"5;x\ry\r\ndebug\r\n0\r\n\r\n",
    "a size in hex": b"0x5\r\ndebug\r\n0\r\n\r\n",
    "a signed size": b"+5\r\ndebug\r\n0\r\n\r\n",
    "a negative size": b"-5\r\ndebug\r\n0\r\n\r\n",
    "an underscore": b"0_5\r\ndebug\r\n0\r\n\r\n",
    "no size": b"\r\ndebug\r\n0\r\n\r\n",
    "an enormous size": b"10000000000000005\r\ndebug\r\n0\r\n\r\n",
    "too short a size": b"4\r\ndebug\r\n0\r\n\r\n",
    "no end of a chunk": b"5\r\ndebug0\r\n\r\n",
}
REFUSED = statuses(400, 401, 501)


def framed(routes: Iterable[Route]) -> Iterator[Attempt]:
    """Without a token, in every form that a request can have, and in many that it cannot."""
    for route, name, before, allowed in both_ways(routes):

        def attempt(
            what: str,
            expected: frozenset[int],
            words: bytes,
            *,
            _of: tuple[str, bytes, int] = (name, before, allowed),
        ) -> Attempt:
            name, before, allowed = _of
            return Attempt(f"{name}: {what}", words, expected, before, allowed)

        plain = request(route)
        yield attempt("chunked", UNKNOWN, request(route, framing=CHUNKED, body=CHUNKS))
        trailers = CHUNKS[:-2] + bearer(GOOD).encode() + b"\r\n\r\n"
        yield attempt("a token in the trailers", UNKNOWN, request(route, framing=CHUNKED, body=trailers))
        yield attempt("waiting to be told", UNKNOWN, request(route, "Expect: 100-continue", body=BODY))
        # Nothing may follow what ends the connection.
        yield replace(attempt("HTTP/1.0", UNKNOWN, request(route, version="HTTP/1.0")), after=b"")
        yield attempt("HTTP/1.0, kept", UNKNOWN, request(route, "Connection: keep-alive", version="HTTP/1.0"))
        yield attempt("HTTP/1.2", UNKNOWN, request(route, version="HTTP/1.2"))
        for version in ("", "HTTP/0.9", "HTTP/2.0", "HTTP/11", "http/1.1", "HTTP/1.1 x", "ICY/1.0"):
            yield attempt(f"version {version!r}", statuses(400, 505), request(route, version=version))
        yield attempt("websocket", UNKNOWN, request(route, "Upgrade: websocket", "Connection: Upgrade"))
        upgrade = ("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__", "Connection: Upgrade, HTTP2-Settings")
        yield attempt("h2c", UNKNOWN, request(route, *upgrade))
        yield attempt("HTTP/2", statuses(400, 505), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + plain)
        hidden = request(route, bearer(GOOD))
        yield attempt("a request in the body", UNKNOWN, request(route, body=hidden))
        for protocol in ("websocket", "h2c", "TLS/1.0"):
            headers = (f"Upgrade: {protocol}", "Connection: Upgrade")
            words = request(route, *headers, body=hidden)
            yield attempt(f"a request in the body, and a wish for {protocol}", UNKNOWN, words)
        yield attempt("an empty line in front", UNKNOWN | BAD, b"\r\n" + plain)
        yield attempt("a space in front", BAD, b" " + plain)
        yield attempt("two spaces", UNKNOWN | BAD, plain.replace(b" ", b"  ", 1))
        yield attempt("line feeds alone", UNKNOWN | BAD, plain.replace(b"\r\n", b"\n") + b"\r\n\r\n")
        yield attempt("carriage returns alone", BAD, plain.replace(b"\r\n", b"\r") + b"\r\n\r\n")
        yield attempt("too large a head", statuses(400, 431), request(route, "X: " + "y" * (80 << 10)))
        yield attempt("no host", UNKNOWN | BAD, plain.replace(b"Host: broker\r\n", b""))
        yield attempt("two hosts", UNKNOWN | BAD, request(route, "Host: localhost"))
        yield attempt("a host like /ping", UNKNOWN | BAD, plain.replace(b"Host: broker", b"Host: broker/ping?"))
        for what, framing in AMBIGUOUS.items():
            yield attempt(what, REFUSED, request(route, framing=framing, body=CHUNKS))


def smuggled(routes: Iterable[Route]) -> Iterator[Attempt]:
    """With a good token, as a proxy may add it; but what is a request and what a body can be read in two ways."""
    behind = b"POST /topic/create?topic=smuggled HTTP/1.1\r\nHost: broker\r\n" + bearer(GOOD).encode() + b"\r\n\r\n"
    for route, name, before, allowed in both_ways(routes):
        for what, framing in AMBIGUOUS.items():
            words = request(route, bearer(GOOD), framing=framing, body=CHUNKS) + behind
            yield Attempt(f"{name}: {what}", words, statuses(400, 501), before, allowed)
        if route.right == PUBLISH:
            for what, chunks in AMBIGUOUS_CHUNKS.items():
                words = request(route, bearer(GOOD), framing=CHUNKED, body=chunks) + behind
                yield Attempt(f"{name}: {what}", words, statuses(400, 500), before, allowed)


def pipelined(routes: Iterable[Route]) -> Iterator[Attempt]:
    """Behind something that is allowed, on the same connection, in the same packet: a right is not inherited."""
    [pub] = (route for route in routes if route.path == "/pub")
    allowed = "/pub?topic=allowed"
    fronts = {
        "publishes": request(pub, bearer("publisher-2e9b"), target=allowed) * 3,
        "publishes by an admin": request(pub, bearer(GOOD), target=allowed) * 3,
        "a chunked publish": request(pub, bearer(GOOD), target=allowed, framing=CHUNKED, body=CHUNKS) * 3,
        "questions": b"GET /info HTTP/1.1\r\nHost: broker\r\nAuthorization: Bearer reader-1f0a\r\n\r\n" * 3,
        "an admin's questions": b"GET /info HTTP/1.1\r\nHost: broker\r\nAuthorization: Bearer admin-4c7d\r\n\r\n" * 3,
        "a question and publishes": PING + request(pub, bearer(GOOD), target=allowed) * 2,
    }
    for route in routes:
        name = f"{route.method} {route.path}"
        for what, front in fronts.items() if route.right != OPEN else ():
            yield Attempt(f"{name} behind {what}: no token", request(route), UNKNOWN, front, 3)
            for token in ("reader-1f0a", "publisher-2e9b"):
                if route.right not in RIGHTS[token]:
                    words = request(route, bearer(token))
                    yield Attempt(f"{name} behind {what}: as {token}", words, WEAK, front, 3)


# --- In whose name ----------------------------------------------------------------------------------------------------

#: What a browser says of a request that a web page of somebody else has made.
FOREIGN: dict[str, tuple[str, ...]] = {
    "another origin": ("Origin: http://evil.example",),
    "another origin by HTTPS": ("Origin: https://evil.example",),
    "no origin": ("Origin: null",),
    "an empty origin": ("Origin:",),
    "another port": ("Origin: http://broker:3000",),
    "another name of this machine": ("Origin: http://localhost:4151",),
    "a longer name": ("Origin: http://broker.evil.example",),
    "a name in front": ("Origin: http://evil.example@broker",),
    "a longer origin": ("Origin: http://broker/.evil.example",),
    "a file": ("Origin: file://",),
    "an extension": ("Origin: chrome-extension://broker",),
    "our name alone": ("Origin: broker",),
    "ours and another one": ("Origin: http://broker", "Origin: http://evil.example"),
    "another one and ours": ("Origin: http://evil.example", "Origin: http://broker"),
    "both in one": ("Origin: http://broker http://evil.example",),
    "in another case": ("ORIGIN: HTTP://EVIL.EXAMPLE",),
    "another site": ("Sec-Fetch-Site: cross-site",),
    "another site in capitals": ("SEC-FETCH-SITE: Cross-Site",),
    "a neighbour": ("Sec-Fetch-Site: same-site",),
    "a site nobody has heard of": ("Sec-Fetch-Site: other",),
    "two sites": ("Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: cross-site"),
    "another site with our origin": ("Sec-Fetch-Site: cross-site", "Origin: http://broker"),
    "our site with another origin": ("Sec-Fetch-Site: same-origin", "Origin: http://evil.example"),
    "a form": (
        *("Origin: http://evil.example", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"),
        "Content-Type: application/x-www-form-urlencoded",
    ),
    "a beacon": ("Origin: http://evil.example", "Sec-Fetch-Mode: no-cors", "Content-Type: text/plain"),
}
#: Names that somebody else can make point to this machine.
REBOUND = {
    "another name": "evil.example",
    "with a port": "evil.example:4151",
    "a longer name": "localhost.evil.example",
    "a name like ours": "xlocalhost",
    "a name that begins like ours": "localhostx:4151",
    "an address in a name": "127.0.0.1.evil.example",
    "a name with ours as its port": "evil.example:localhost",
    "in capitals": "EVIL.EXAMPLE",
    "with a dot": "evil.example.",
    "brackets": "[evil.example]",
    "a short name": "evil",
}


def from_other_pages(routes: Iterable[Route]) -> Iterator[Attempt]:
    """With the best of tokens, and from a web page that is not ours; by one that asks for a name that is not ours."""
    for route, name, before, allowed in both_ways(routes):
        for what, headers in FOREIGN.items() if not route.is_plain_read else ():
            words = request(route, bearer(GOOD), *headers)
            yield Attempt(f"{name}: {what}", words, WEAK, before, allowed)
        for what, host in REBOUND.items():
            words = request(route, bearer(GOOD)).replace(b"Host: broker", f"Host: {host}".encode())
            yield Attempt(f"{name}: for {what}", words, WEAK, before, allowed)
    for what, host in REBOUND.items():
        yield Attempt(f"GET /ping: for {what}", LAST.replace(b"Host: broker", f"Host: {host}".encode()), WEAK)


GROUPS: dict[str, Callable[[Iterable[Route]], Iterator[Attempt]]] = {
    "unknown": unknown,
    "weak": weak,
    "misspelled": misspelled,
    "other methods": other_methods,
    "framed": framed,
    "smuggled": smuggled,
    "pipelined": pipelined,
    "from other pages": from_other_pages,
}


# --- Trying -----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def answers(received: bytes, *, allowed: int = 0, bodiless: bool = False) -> list[Answer]:
    """What a server said, taken apart. Status 0 is what is no answer at all."""
    found: list[Answer] = []
    while received:
        head, end, received = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = re.fullmatch(r"HTTP/1\.[01] (\d{3}) .*", first)
        if not end or status is None:
            return [*found, Answer(0, {}, head + end + received)]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        # An answer that ends with its connection has no length.
        until_end = len(received) if headers.get("connection") == "close" else 0
        length = 0 if bodiless and len(found) == allowed else int(headers.get("content-length", until_end))
        found.append(Answer(int(status[1]), headers, received[:length]))
        received = received[length:]
    return found


class Client(HttpClient):
    """A connection on which bytes are sent."""

    async def answer_as_it_came(self) -> bytes:
        """The next answer, of a connection that goes on."""
        async with asyncio.timeout(PATIENCE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)\r\n", head)
            return head + await self.reader.readexactly(int(length[1]) if length else 0)

    async def answer(self) -> Answer:
        [answer] = answers(await self.answer_as_it_came())
        return answer

    async def rest(self) -> bytes:
        """All that comes until the connection ends."""
        received = b""
        async with asyncio.timeout(PATIENCE):
            # Closed with our bytes unread; for a client the same as a close.
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while data := await self.reader.read(1 << 16):
                    received += data
        return received


async def converse(address: str, words: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    async with Client.connect(address, tls) as client:
        client.send(words)
        return await client.rest()


@dataclass
class Target:
    broker: Broker
    tokens: Path
    certificates: Certificates
    set: str
    routes: list[Route] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.broker.listeners.api is not None
        self.routes = list(self.broker.listeners.api.site.routes)

    def state(self) -> dict[str, Any]:
        """All that somebody could have changed."""
        topics = {
            name: (
                *(topic.message_count, topic.depth, topic.paused, topic.settings),
                {
                    other: (
                        *(channel.message_count, channel.depth, channel.paused, channel.settings),
                        channel.redrive is not None and channel.redrive.running,
                    )
                    for other, channel in topic.channels.items()
                },
            )
            for name, topic in self.broker.topics.items()
        }
        readers = {name: dict(topic.readers.positions) for name, topic in self.broker.topics.items() if topic.readers}
        return {
            "topics": topics,
            "readers": readers,
            "options": self.broker.options,
            "refusing": self.broker.refusing,
            "pipelines": self.broker.pipelines.describe(),
            "staged": {
                name: (
                    msgspec.to_builtins(producer.state) | {"time": 0},
                    sorted((key, attempt.rows) for key, attempt in producer.attempts.items()),
                )
                for name, producer in self.broker.stage.producers.items()
            },
        }

    def fill(self, words: bytes) -> bytes:
        """Put what only the broker knows where it belongs."""
        id = format_id(self.broker.options.id << 54, self.broker.topics["kept"].log.first)
        return words.replace(AN_ID.encode(), id).replace(A_SET.encode(), self.set.encode())

    def hand_out(self, tokens: dict[str, str]) -> None:
        self.tokens.write_text("".join(f"{token} {rights}\n" for token, rights in tokens.items()))
        self.tokens.chmod(0o600)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintmq.broker.http.lane.LINGER_SECONDS", 600.0)
    monkeypatch.setattr("flintmq.broker.http.api.HANDSHAKE_SECONDS", 600.0)


async def begin_redrive(channel: Channel) -> None:
    """Have a redrive run that never gets a whole token to send a dead letter back with."""
    dead = channel.broker.topic("paused.paused.dead")
    source, _ = dead.channel("redrive")
    about = {"topic": "paused", "channel": "paused", "reason": "requeued", "published": 0}
    dead.publish(bytearray(b"\0\0\0\1x"), 0, 5, 1, extra=msgspec.msgpack.encode({"dead": about}))
    await until(lambda: source.depth == 1)
    channel.begin_redrive(source, NEVER, 0.001)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def target(certificates: Certificates, path: Path, **options: Any) -> AsyncIterator[Target]:
    """A broker that holds something, and wants tokens. Nothing may get as far as the loop's last resort."""
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    path.mkdir(exist_ok=True)
    tokens = path / "tokens"
    tokens.write_text("".join(f"{token} {rights}\n" for token, rights in TOKENS.items()))
    tokens.chmod(0o600)
    options = {
        **PATIENT,
        **certificates.options,
        "tls_required": "tcp-https",
        "http_address": "127.0.0.1:0",
        "https_address": "127.0.0.1:0",
        "http_auth_token_file": str(tokens),
        "broadcast_address": "broker",
        **options,
    }
    async with Broker(data_path=path, disk_reserve=0, **options) as broker:
        for name in ("kept", "paused"):
            topic = broker.topic(name)
            topic.channel(name)
            topic.pause(name == "paused")
            topic.channels[name].pause(name == "paused")
            topic.readers.move(name, topic.log.first)
            for body in (b"one", b"two"):
                topic.publish(bytearray(len(body).to_bytes(4, "big") + body), 0, 7, 1)
        # For dead letters: to send them back makes a channel of it.
        broker.topic("kept.kept.dead")
        await begin_redrive(broker.topics["paused"].channels["paused"])
        here = Target(broker, tokens, certificates, await stage(broker))
        await until(lambda: broker.topics["kept"].channels["kept"].depth == 3)
        yield here
    assert raised == []


#: What Go's server says to those who speak HTTP without TLS to an HTTPS port.
NO_TLS = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
#: What may be said to somebody who is refused.
TELLS_NOTHING = re.compile(
    rb'|\{"message":"(UNAUTHORIZED|NOT_FOUND|METHOD_NOT_ALLOWED|INTERNAL_ERROR|FOREIGN_ORIGIN|UNKNOWN_HOST)"\}'
    rb'|\{"message":"FORBIDDEN","missing_right":"(read|consume|publish|admin)"\}'
    rb"|UNAUTHORIZED|FORBIDDEN|FOREIGN_ORIGIN"
    rb"|400 Bad Request(: (missing required|malformed) Host header|: invalid header name)?"
    rb"|431 Request Header Fields Too Large"
    rb"|Unsupported transfer encoding|505 HTTP Version Not Supported: unsupported protocol version"
)


def wrong_with(attempt: Attempt, received: bytes) -> str:
    """Empty if the attempt was refused as it has to be; else what happened instead."""
    found = answers(received, allowed=attempt.allowed, bodiless=attempt.bodiless)
    shown = f"{attempt.name}: {[(answer.status, answer.body[:200]) for answer in found]}"
    if [answer.status for answer in found[: attempt.allowed]] != [200] * attempt.allowed:
        return shown
    refusal, *after = found[attempt.allowed :] or [Answer(0, {}, b"")]
    # The connection may go on. Then what follows is the answer to LAST, which a publish never looks like; or bytes
    # behind the request are no request, and that is its end.
    is_last = bool(after) and after[0][::2] == (200, b"OK") and "x-nsq-content-type" not in after[0].headers
    is_end = bool(after) and after[0][::2] == (400, b"400 Bad Request")
    if after and (len(after) > 1 or not (is_last or is_end)):
        return shown
    if refusal.status not in attempt.statuses:
        return shown
    if refusal.status in (301, 307):
        elsewhere = refusal.headers["location"]
        return "" if re.match(r"/(?!/)", elsewhere) and (not refusal.body or b"<a href" in refusal.body) else shown
    return "" if TELLS_NOTHING.fullmatch(refusal.body) else shown


async def try_all(address: str, attempts: Iterable[Attempt], tls: ssl.SSLContext | None = None) -> list[str]:
    """What did not go as it must."""
    limit = asyncio.Semaphore(AT_A_TIME)

    async def one(attempt: Attempt) -> str:
        async with limit, Client.connect(address, tls) as client:
            received = b""
            if attempt.before == PING:
                # First this, so that it is the general server that reads what follows.
                client.send(PING)
                received = await client.answer_as_it_came()
                client.send(attempt.words + attempt.after)
            else:
                client.send(attempt.before + attempt.words + attempt.after)
            return wrong_with(attempt, received + await client.rest())

    return [wrong for wrong in await asyncio.gather(*map(one, attempts)) if wrong]


@pytest.mark.parametrize("group", GROUPS)
async def test_nobody_gets_in_over_http(group: str, certificates: Certificates, tmp_path: Path) -> None:
    async with target(certificates, tmp_path) as here:
        attempts = list(GROUPS[group](here.routes))
        before = here.state()
        assert await try_all(here.broker.http_address, attempts) == []
        after = here.state()
        # What was allowed, and nothing else.
        published = sum(attempt.before.count(b"topic=allowed") for attempt in attempts)
        if published:
            *counts, _, channels = after["topics"].pop("allowed")
            assert (*counts, channels) == (published, published, False, {})
        assert after == before


@pytest.mark.parametrize("way", ["https", "unix"])
async def test_nobody_gets_in_another_way(way: str, certificates: Certificates, tmp_path: Path) -> None:
    address = str(tmp_path / "http") if way == "unix" else "127.0.0.1:0"
    async with target(certificates, tmp_path / "data", http_address=address) as here:
        address = here.broker.https_address if way == "https" else here.broker.http_address
        before = here.state()
        attempts = [
            *(attempt for attempt in unknown(here.routes) if attempt.name.endswith((": no token", ": a wrong token"))),
            *(attempt for attempt in weak(here.routes) if "spoofed" not in attempt.name),
        ]
        assert len(attempts) >= 2 * len(here.routes)
        tls = certificates.client() if way == "https" else None
        assert await try_all(address, attempts, tls) == []
        assert here.state() == before


async def test_nobody_stays_in_when_his_token_is_taken_away(certificates: Certificates, tmp_path: Path) -> None:
    """Connections that were used with a token, and stay open, until it has been removed or has lost a right."""
    async with target(certificates, tmp_path) as here, contextlib.AsyncExitStack() as stack:
        prepared = []
        for route in here.routes:
            if route.right == OPEN:
                continue
            for token, expected in (
                ("removed-5b6e", 401),
                ("to-publish-7940" if route.right in (READ, CONSUME) else "to-read-6a5f", 403),
            ):
                client = await stack.enter_async_context(Client.connect(here.broker.http_address))
                words = here.fill(request(route, bearer(token)))
                allowed = b"GET /info HTTP/1.1\r\nHost: broker\r\n" + bearer(token).encode() + b"\r\n\r\n"
                for _ in range(3):
                    # The words themselves, where they do no harm: so the lane knows them.
                    client.send(words if route.right == PUBLISH else allowed)
                    assert (await client.answer()).status == 200
                prepared.append((route, token, expected, client, words))
        here.hand_out(LATER)
        here.broker.reload()
        before = here.state()
        for route, token, expected, client, words in prepared:
            client.send(words)
            answer = await client.answer()
            assert (answer.status, bool(TELLS_NOTHING.fullmatch(answer.body))) == (expected, True), (route, token)
        assert here.state() == before
        # And it is not that nobody gets in any more.
        async with Client.connect(here.broker.http_address) as client:
            client.send(b"GET /info HTTP/1.1\r\nHost: broker\r\n" + bearer(GOOD).encode() + b"\r\n\r\n")
            assert (await client.answer()).status == 200


# --- TLS and certificates ---------------------------------------------------------------------------------------------


def in_the_clear(routes: Iterable[Route]) -> Iterator[tuple[str, bytes]]:
    """With the best of tokens, where nothing at all is to be had; /ping is no exception."""
    for route in routes:
        name = f"{route.method} {route.path}"
        yield name, request(route, bearer(GOOD))
        yield f"{name} without a token", request(route)
        yield f"{name} in chunks", request(route, bearer(GOOD), framing=CHUNKED, body=CHUNKS)
        yield f"{name} by HTTP/1.0", request(route, bearer(GOOD), version="HTTP/1.0")
        yield f"{name} as if by HTTPS", request(route, bearer(GOOD), *SPOOFED["X-Forwarded-Proto"])
        yield f"{name} with the whole URL", request(route, bearer(GOOD), target=f"https://broker{path_of(route)}")
        yield f"{name} twice", request(route, bearer(GOOD)) * 2


@pytest.mark.parametrize("why", ["tls_required", "tls_client_auth_policy"])
async def test_nobody_gets_in_in_the_clear(why: str, certificates: Certificates, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tls_required": "true"}
    if why == "tls_client_auth_policy":
        # It switches the other one on.
        options = {"tls_required": "false", why: "require-verify", "tls_root_ca_file": certificates.ca}
    async with target(certificates, tmp_path, **options) as here:
        before = here.state()
        port = int(here.broker.https_address.rpartition(":")[2])
        refusal = (403, b'{"message": "TLS_REQUIRED", "https_port": %d}' % port)
        attempts = list(in_the_clear(here.routes))
        for name, words in attempts:
            found = answers(await converse(here.broker.http_address, words + (b"" if b"HTTP/1.0" in words else LAST)))
            assert {(answer.status, answer.body) for answer in found} == {refusal}, name

        async def misdirected(name: str, words: bytes) -> None:
            """To the port of HTTPS, but not in its language."""
            received = await converse(here.broker.https_address, words + LAST)
            # Methods that OpenSSL does not know as HTTP's get an alert, or nothing.
            assert received in (b"", NO_TLS) or received[0] == 0x15, name

        await asyncio.gather(*(misdirected(name, words) for name, words in attempts))
        assert here.state() == before


@pytest.mark.parametrize("policy", ["require", "require-verify"])
async def test_nobody_gets_in_by_https_without_a_certificate(
    policy: str, certificates: Certificates, tmp_path: Path
) -> None:
    options = {"tls_client_auth_policy": policy, "tls_root_ca_file": certificates.ca}
    async with target(certificates, tmp_path, **options) as here:
        before = here.state()
        # One of every kind: what is published, what is changed, what is told, what is open.
        chosen = list({route.right: route for route in here.routes}.values())
        assert {route.right for route in chosen} == {OPEN, READ, CONSUME, PUBLISH, ADMIN}
        tried = 0
        for name, context in strangers(certificates):
            for route in chosen:
                received = b""
                with contextlib.suppress(ssl.SSLError, ConnectionError):
                    # In TLS 1.3 the client learns of it only later.
                    received = await converse(here.broker.https_address, request(route, bearer(GOOD)) + LAST, context)
                assert received == b"", (name, route.path)
                tried += 1
        assert tried == 5 * STRANGERS
        assert here.state() == before
        good = certificates.client(signed_by=certificates.authority)
        assert answers(await converse(here.broker.https_address, LAST, good))[0].status == 200


# --- The attempts mean something --------------------------------------------------------------------------------------

#: Routes that only look, or tidy up, whatever their right.
WITHOUT_EFFECT = re.compile("/debug/.*")


async def test_the_same_requests_work_with_the_right(certificates: Certificates, tmp_path: Path) -> None:
    """Each on a broker of its own: what it takes away, the next one needs."""
    async with target(certificates, tmp_path / "routes") as here:
        routes = here.routes
    for number, route in enumerate(routes):
        async with target(certificates, tmp_path / str(number)) as here:
            before = here.state()
            token = next(token for token, rights in RIGHTS.items() if route.right in {*rights, OPEN})
            async with Client.connect(here.broker.http_address) as client:
                client.send(here.fill(request(route, bearer(token))))
                assert (await client.answer()).status == 200, route
            changed = here.state() != before
            assert changed == (route.right in (PUBLISH, ADMIN) and not WITHOUT_EFFECT.fullmatch(route.path)), route


async def test_messages_are_told_to_those_who_may_consume(certificates: Certificates, tmp_path: Path) -> None:
    """Every body that lies here is looked for in all that each token gets to see."""
    async with target(certificates, tmp_path, durability="fsync") as here:
        topic = here.broker.topics["kept"]
        topic.publish(bytearray(b"\0\0\0\6s3cr3t"), 0, 10, 1)
        await until(lambda: topic.channels["kept"].depth == 4 and topic.log.durable == topic.log.end)
        told: dict[str, set[str]] = {}
        for route in here.routes:
            if route.method == "GET" and not route.path.startswith("/debug/pprof/profile"):
                for token in TOKENS:
                    words = here.fill(request(route, bearer(token)) + LAST)
                    received = await converse(here.broker.http_address, words)
                    if re.search(rb"s3cr3t|czNjcjN0", received.partition(b"\r\n\r\n")[2]):
                        told.setdefault(route.path, set()).add(TOKENS[token])
        assert told == {key: {"consume", "admin"} for key in ("/channel/peek", "/topic/peek", "/log/fetch")}


async def test_a_refusal_names_the_right_that_is_missing(certificates: Certificates, tmp_path: Path) -> None:
    async with target(certificates, tmp_path) as here, Client.connect(here.broker.http_address) as client:
        for path, token, right in (
            ("/topic/peek?topic=kept", "reader-1f0a", "consume"),
            ("/stats", "consumer-8831", "read"),
            ("/drain", "both-3d8c", "admin"),
        ):
            method = "POST" if path == "/drain" else "GET"
            client.send(f"{method} {path} HTTP/1.1\r\nHost: broker\r\n{bearer(token)}\r\n\r\n".encode())
            status, _, body = await client.answer()
            assert (status, json.loads(body)) == (403, {"message": "FORBIDDEN", "missing_right": right})
        client.send(request(next(r for r in here.routes if r.path == "/pub"), bearer("reader-1f0a")))
        assert json.loads((await client.answer()).body) == {"message": "FORBIDDEN", "missing_right": "publish"}


async def test_ping_is_the_only_open_route(certificates: Certificates, tmp_path: Path) -> None:
    async with target(certificates, tmp_path) as here:
        assert [(route.method, route.path) for route in here.routes if route.right == OPEN] == [("GET", "/ping")]


async def test_there_are_enough_attempts_and_each_is_another_one(certificates: Certificates, tmp_path: Path) -> None:
    async with target(certificates, tmp_path) as here:
        names = [(group, attempt.name) for group, make in GROUPS.items() for attempt in make(here.routes)]
    assert len(set(names)) == len(names) >= AT_LEAST
    # Every route has its share.
    for route in here.routes:
        if route.right != OPEN:
            own = f"{route.method} {route.path}"
            assert sum(re.match(rf"{re.escape(own)}( behind.*)?: ", name) is not None for _, name in names) >= 100, own
