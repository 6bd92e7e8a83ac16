"""The request heads that the lane understands: publishes and ``GET /ping``.

``read_head`` parses a whole head and returns what the lane needs of it. Everything that is unusual, or that a proxy in
front might read in another way, is left to the general server. Rights and limits are the lane's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from flintmq.errors import HttpError
from flintmq.http.arguments import split_target
from flintmq.http.heads import MOST_DIGITS

if TYPE_CHECKING:
    from flintmq.broker.http.publish import Order

__all__ = ["Head", "read_head"]


class Head:
    """A request head that was understood, and how its body arrives."""

    __slots__ = (
        "authorization",
        "batch",
        "chunked",
        "expects",
        "host",
        "keep_alive",
        "key",
        "length",
        "old",
        "order",
        "ping",
        "query",
        "special",
        "target",
    )

    def __init__(self, query: str, *, batch: bool) -> None:
        self.query = query
        self.batch = batch
        self.length = 0
        self.chunked = False
        self.expects = False
        self.keep_alive = True
        #: ``GET /ping``, with its target as it was sent. ``old``: by a client that speaks HTTP/1.0.
        self.ping = False
        self.target = ""
        self.old = False
        #: Anything but a publish whose body has a length.
        self.special = False
        self.authorization = ""
        #: The name that it is for.
        self.host = ""
        #: Under which the body is published, at most once.
        self.key: bytes | None = None
        #: For the lane: a single message for a topic that exists, to be delivered at once.
        self.order: Order | None = None


class _Headers:
    """The receiver of the parser's calls."""

    def __init__(self) -> None:
        self.url = b""
        self.fields: dict[bytes, bytes] = {}
        self.repeated = False
        self.complete = False
        self.parser = HttpRequestParser(self)
        self.keep_alive = True

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.repeated |= name in self.fields
        self.fields[name] = value

    def on_headers_complete(self) -> None:
        self.complete = True
        # Without a body the parser is at the end of the request in a moment, and has forgotten it.
        self.keep_alive = self.parser.should_keep_alive()


_POST = {"/pub", "/mpub"}


def read_head(data: bytes) -> Head | None:
    """Return what a whole head says, None if it is for the general server."""
    headers = _Headers()
    parser = headers.parser
    try:
        parser.feed_data(data)
        target = headers.url.decode("utf-8", "surrogateescape")
        path, query = split_target(target)
    except (HttpParserError, HttpParserUpgrade, HttpError):
        return None
    method = parser.get_method()
    ping = method == b"GET" and path == "/ping"
    if not headers.complete or not (ping or (method == b"POST" and path in _POST)):
        return None
    fields = headers.fields
    encoding = fields.get(b"transfer-encoding", b"").lower()
    expectation = fields.get(b"expect", b"").lower()
    length = fields.get(b"content-length", b"0")
    version = parser.get_http_version()
    # The general server knows what to say to unusual requests. What could be read in two ways is not read here at all:
    # a proxy in front of us might read it the other way.
    if (
        not (version == "1.1" or (ping and version == "1.0"))
        or (version == "1.1" and b"host" not in fields)
        or headers.repeated
        or b"upgrade" in fields
        # A browser's, and perhaps of a page that may not do this.
        or b"origin" in fields
        or b"sec-fetch-site" in fields
        or not length.isdigit()
        or len(length) > MOST_DIGITS
        or encoding not in (b"", b"chunked")
        or (encoding and b"content-length" in fields)
        or expectation not in (b"", b"100-continue")
        or (ping and (encoding or expectation or int(length)))
    ):
        return None
    head = Head(query, batch=path == "/mpub")
    head.keep_alive = headers.keep_alive
    head.host = fields.get(b"host", b"").decode("utf-8", "surrogateescape")
    if ping:
        head.ping = head.special = True
        head.target = target
        head.old = version == "1.0"
        return head
    head.chunked = head.special = bool(encoding)
    head.expects = bool(expectation)
    head.key = fields.get(b"x-flintmq-key")
    head.authorization = fields.get(b"authorization", b"").decode("utf-8", "surrogateescape")
    if not head.chunked:
        head.length = int(length)
    return head
