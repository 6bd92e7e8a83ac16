"""The head of an HTTP request, before a parser sees it: where it ends, and whether it can be one at all.

Bytes that are no HTTP (an NSQ client on the wrong port, a TLS hello) are known by the first of them, so they are
refused at once, in the words of Go's server. Heads that Go's server takes and our parsers do not are brought into the
form that they take: lines that end with a line feed alone, HTTP/1.2, bytes in the target that are no ASCII, methods
that nobody has heard of. What Go refuses is refused here, with its answer.

Stricter than Go's server: a proxy in front may read these requests in another way, so they are refused: a length
together with a transfer encoding, two lengths (also the same one twice), a transfer encoding in HTTP/1.0, folded lines,
line ends of both kinds in one head. So is ``*``, but for OPTIONS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flintmq.errors import FlintError

__all__ = [
    "LONGEST_HEAD",
    "MOST_DIGITS",
    "BadHead",
    "Body",
    "check_trailer",
    "chunk_size",
    "end_of_head",
    "looked_at",
    "tidy",
]

#: Bytes of a request line with all its headers.
LONGEST_HEAD = 64 << 10
#: Digits of a Content-Length: more than any body can have, fewer than ``int`` refuses.
MOST_DIGITS = 32
#: What Go's server takes for a length.
_LARGEST_LENGTH = (1 << 63) - 1
#: Bytes of a method: there is none that is longer, and no reason to wait for its end.
_LONGEST_METHOD = 32
#: Lines of a head, the empty one at its end included: each costs far more than its bytes.
MOST_LINES = 128

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
#: What may follow the target as far as it has arrived, and more bytes than that has.
_VERSION_BEGINNING = rb"(?: (?:H(?:T(?:T(?:P(?:/(?:[0-9](?:\.(?:[0-9]\r?)?)?)?)?)?)?)?)?)?"
_VERSION_BYTES = 12
#: What a request line may look like as far as it has arrived.
_BEGINNING = re.compile(_TOKEN + rb"{0,%d}(?: (?:[^\x00-\x20\x7f]+%s)?)?" % (_LONGEST_METHOD, _VERSION_BEGINNING))
#: The same, from somewhere in the target on.
_TARGET_ON = re.compile(rb"[^\x00-\x20\x7f]*" + _VERSION_BEGINNING)
_REQUEST_LINE = re.compile(_TOKEN + rb"{1,%d} [^\x00-\x20\x7f]+ HTTP/([0-9])\.([0-9])" % _LONGEST_METHOD)
_NAME = re.compile(_TOKEN + rb"+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_HOST = re.compile(rb"[0-9A-Za-z!$%&()*+,\-.:;='\[\]_~]*")
_BEYOND_ASCII = re.compile(rb"[\x80-\xff]")
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_ORIGIN = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*://")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_LONGEST_CHUNK_LINE = 4096
_DIGITS = re.compile(rb"[0-9]{1,%d}" % MOST_DIGITS)
#: Methods that reach the routes under their own name. Others have no route, but may be unknown to a parser.
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"PATCH"))


class BadHead(FlintError):
    """Bytes that are no request. ``answer`` is all that is to be sent before the connection is closed."""

    def __init__(self, status: str = "400 Bad Request", body: str = "") -> None:
        super().__init__(status)
        # As Go's server writes it: no date, no length, the connection's end is the body's.
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"
        self.answer = (head + (body or status)).encode()


def looked_at(size: int) -> int:
    """Return how many of the ``size`` bytes of an unfinished head need no second look: its end may have begun."""
    return max(0, size - 3)


def end_of_head(data: bytearray | bytes, pos: int, stop: int, looked: int = 0) -> int:
    """Return where the body of the request at ``data[pos:stop]`` starts, -1 if its head is not all there.

    ``looked`` bytes of it were there at an earlier call, which returned -1: see ``looked_at``. BadHead as soon as the
    bytes cannot become the head of a request.
    """
    stop_at = min(stop, pos + LONGEST_HEAD)
    newline = data.find(b"\n", pos, stop_at)
    if newline < 0:
        _check_beginning(data, pos, stop_at, looked)
    else:
        if newline >= pos + looked:
            _check_request_line(data, pos, newline)
        start = max(newline, pos + looked)
        end = data.find(b"\n\r\n", start, stop_at)
        bare = data.find(b"\n\n", start, end if end >= 0 else stop_at)
        if bare >= 0:
            return bare + 2
        if end >= 0:
            return end + 3
    if stop - pos >= LONGEST_HEAD:
        raise BadHead("431 Request Header Fields Too Large")
    return -1


def _check_beginning(data: bytearray | bytes, pos: int, stop: int, looked: int) -> None:
    """BadHead if the bytes are not the beginning of a request line. Only what is new of a long one is matched."""
    start = pos + looked - _VERSION_BYTES
    # Behind the first byte of the target: all before was looked at, but for a version that has begun.
    in_target = start > pos + _LONGEST_METHOD + 1
    if (_TARGET_ON.fullmatch(data, start, stop) if in_target else _BEGINNING.fullmatch(data, pos, stop)) is None:
        raise BadHead


def _check_request_line(data: bytearray | bytes, pos: int, newline: int) -> None:
    line = _REQUEST_LINE.fullmatch(data, pos, newline - (data[newline - 1 : newline] == b"\r"))
    if line is None:
        raise BadHead
    if line[1] != b"1":
        raise BadHead("505 HTTP Version Not Supported: unsupported protocol version")


def tidy(head: bytes) -> bytes:
    """Return a whole head in the form that every parser takes. BadHead if it is none.

    Lines may end in LF alone, but then all of them do: a proxy in front that knows CRLF only would see other headers
    in a head with both, and so another request.
    """
    count = head.count(b"\n")
    if count > MOST_LINES:
        raise BadHead("431 Request Header Fields Too Large")
    if head.count(b"\r\n") not in (0, count):
        raise BadHead
    request_line, *lines = [line.removesuffix(b"\r") for line in head.split(b"\n")[:-2]]
    method, target, version = request_line.split(b" ")
    is_old = version == b"HTTP/1.0"
    kept = [_request_line(method, target, is_old)]
    hosts, connections = [], []
    length = encoding = b""
    is_named = True
    unfit: BadHead | None = None
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or _CONTROL.search(value) is not None:
            raise BadHead
        if _NAME.fullmatch(name) is None:
            if _NAME.fullmatch(name.rstrip(b" ")) is None:
                raise BadHead
            is_named = False
        name = name.lower()
        value = value.strip(b" \t")
        if name == b"host":
            hosts.append(value)
        elif name == b"content-length":
            if length or _DIGITS.fullmatch(value) is None or int(value) > _LARGEST_LENGTH:
                unfit = unfit or BadHead()
            length = value
        elif name == b"transfer-encoding":
            if encoding or value.lower() != b"chunked":
                unfit = BadHead("501 Not Implemented", "Unsupported transfer encoding")
            encoding = value
        elif name == b"connection":
            connections.append(line)
            continue
        elif name == b"upgrade":
            # There is no other protocol here.
            continue
        kept.append(line)
    # In the order in which Go's server looks at them.
    if len(hosts) > 1:
        raise BadHead
    if unfit is not None:
        raise unfit
    if encoding and (length or is_old):
        raise BadHead
    if not hosts and not is_old:
        raise BadHead("400 Bad Request: missing required Host header")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise BadHead("400 Bad Request: malformed Host header")
    if not is_named:
        raise BadHead("400 Bad Request: invalid header name")
    if len(connections) > 1:
        # Any of them may say it.
        wish = b"keep-alive" if is_old else b"close"
        says = any(wish in line.lower() for line in connections)
        connections = [b"Connection: " + wish] * says
    return b"\r\n".join([*kept, *connections, b"", b""])


def _request_line(method: bytes, target: bytes, is_old: bool) -> bytes:
    if method == b"CONNECT" and not target.startswith(b"/"):
        # A proxy's request, for a host: there is no such path.
        target = b"/"
    elif not target.startswith(b"/") and _ORIGIN.match(target) is None and (method, target) != (b"OPTIONS", b"*"):
        raise BadHead
    if _BAD_ESCAPE.search(target.partition(b"?")[0]) is not None:
        raise BadHead
    if method not in _METHODS:
        method = b"PATCH"
    target = _BEYOND_ASCII.sub(lambda found: b"%%%02X" % ord(found[0]), target)
    return b"%s %s HTTP/1.%d" % (method, target, 0 if is_old else 1)


#: Which line comes next in a body of chunks: a size, the end behind a chunk's bytes, a trailer.
_SIZE, _DATA_END, _TRAILERS = range(3)


class Body:
    """The body of the request with these headers: what of it has arrived, and where it ends."""

    def __init__(self, headers: Mapping[str, str], *, old: bool) -> None:
        wishes = {wish.strip(" \t") for wish in headers.get("connection", "").lower().split(",")}
        #: Is it the last request of its connection?
        self.closes = "keep-alive" not in wishes if old else "close" in wishes
        self.is_chunked = "transfer-encoding" in headers
        #: As the client says, if it does.
        self.length = int(headers["content-length"]) if "content-length" in headers else None
        #: What its handler has not taken yet.
        self.arrived = bytearray()
        self.has_begun = False
        # Bytes of the body, or of a chunk, that are still to come; the lines of trailers that may follow.
        self._left = self.length or 0
        self._state = _SIZE
        self._lines_left = MOST_LINES
        self.is_over = not self.is_chunked and not self._left

    @classmethod
    def empty(cls) -> Body:
        return cls({}, old=False)

    def take(self, data: bytearray, stop: int) -> int:
        """Take what belongs to the body from ``data[:stop]``; return how many bytes that are. BadHead: a bad chunk."""
        self.has_begun = True
        at = 0
        while at < stop and not self.is_over:
            if self._left:
                step = min(self._left, stop - at)
                self.arrived += memoryview(data)[at : at + step]
                at += step
                self._left -= step
                self.is_over = not self.is_chunked and not self._left
                continue
            newline = data.find(b"\n", at, stop)
            if newline < 0:
                if stop - at > _LONGEST_CHUNK_LINE:
                    raise BadHead
                break
            line = bytes(data[at : newline + 1])
            at = newline + 1
            if not line.endswith(b"\r\n"):
                # Others may take a line feed alone for the end of the line, and some do not.
                raise BadHead
            self._take_line(line[:-2])
        return at

    def _take_line(self, line: bytes) -> None:
        if self._state == _DATA_END:
            if line:
                raise BadHead
            self._state = _SIZE
        elif self._state == _SIZE:
            self._left = chunk_size(line)
            self._state = _DATA_END if self._left else _TRAILERS
        else:
            self._lines_left -= 1
            if not self._lines_left:
                raise BadHead("431 Request Header Fields Too Large")
            if line:
                check_trailer(line)
            self.is_over = not line


def chunk_size(line: bytes) -> int:
    """Return the size in a chunk's first line, which is given without its end. BadHead if there is none."""
    size = line.partition(b";")[0].rstrip(b" \t")
    # Others may take a line feed, or a carriage return, alone for the end of the line.
    if _CHUNK_SIZE.fullmatch(size) is None or _CONTROL.search(line) is not None:
        raise BadHead
    return int(size, 16)


def check_trailer(line: bytes) -> None:
    """BadHead if this is no header; it means nothing behind a body."""
    name, colon, value = line.partition(b":")
    if not colon or _NAME.fullmatch(name) is None or _CONTROL.search(value) is not None:
        raise BadHead
