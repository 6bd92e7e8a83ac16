"""The head of an HTTP request, before a parser sees it: where it ends, and whether it can be one at all.

Bytes that are no HTTP (an NSQ client on the wrong port, a TLS hello) are known by the first of them, so they are
refused at once, in the words of Go's server. Lines may end with a line feed alone, as Go's server takes them; a parser
that insists on CRLF gets them so. Only what Go refuses and parsers disagree about is checked here.
"""

from __future__ import annotations

import re

from flintmq.errors import FlintError

__all__ = ["LONGEST_HEAD", "BadHead", "end_of_head", "tidy"]

#: Bytes of a request line with all its headers.
LONGEST_HEAD = 64 << 10
#: Digits of a Content-Length: more than any body can have, fewer than ``int`` refuses.
MOST_DIGITS = 32
#: Bytes of a method: there is none that is longer, and no reason to wait for its end.
_LONGEST_METHOD = 32

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
#: What a request line may look like as far as it has arrived.
_BEGINNING = re.compile(
    _TOKEN
    + rb"{0,%d}(?: (?:[^\x00-\x20\x7f]+(?: (?:H(?:T(?:T(?:P(?:/(?:[0-9](?:\.(?:[0-9]\r?)?)?)?)?)?)?)?)?)?)?)?"
    % _LONGEST_METHOD
)
_REQUEST_LINE = re.compile(_TOKEN + rb"{1,%d} [^\x00-\x20\x7f]+ HTTP/([0-9])\.([0-9])" % _LONGEST_METHOD)
_HEADER = re.compile(_TOKEN + rb"+[ \t]*:")
_DIGITS = re.compile(rb"[0-9]{1,%d}" % MOST_DIGITS)


class BadHead(FlintError):
    """Bytes that are no request. ``answer`` is all that is to be sent before the connection is closed."""

    def __init__(self, status: str = "400 Bad Request") -> None:
        super().__init__(status)
        # As Go's server writes it: no date, no length, the connection's end is the body's.
        self.answer = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n{status}"
        ).encode()


def end_of_head(data: bytearray | bytes, pos: int, stop: int) -> int:
    """Return where the body of the request at ``data[pos:stop]`` starts, -1 if its head is not all there.

    BadHead as soon as the bytes cannot become the head of a request.
    """
    stop_at = min(stop, pos + LONGEST_HEAD)
    newline = data.find(b"\n", pos, stop_at)
    if newline < 0:
        if _BEGINNING.fullmatch(data, pos, stop_at) is None:
            raise BadHead
    else:
        line = _REQUEST_LINE.fullmatch(data, pos, newline - (data[newline - 1 : newline] == b"\r"))
        if line is None:
            raise BadHead
        if line[1] != b"1":
            raise BadHead("505 HTTP Version Not Supported: unsupported protocol version")
        end = data.find(b"\n\r\n", newline, stop_at)
        bare = data.find(b"\n\n", newline, end if end >= 0 else stop_at)
        if bare >= 0:
            return bare + 2
        if end >= 0:
            return end + 3
    if stop - pos >= LONGEST_HEAD:
        raise BadHead("431 Request Header Fields Too Large")
    return -1


def tidy(head: bytes) -> bytes:
    """Return a whole head with CRLF at the end of every line. BadHead if its headers are none.

    Lines may end in LF alone, but then all of them do: a proxy in front that knows CRLF only would see other headers
    in a head with both, and so another request.
    """
    if head.count(b"\r\n") not in (0, head.count(b"\n")):
        raise BadHead
    lines = [line.removesuffix(b"\r") for line in head.split(b"\n")]
    has_host = False
    for line in lines[1:-2]:
        if _HEADER.match(line) is None:
            # A line that continues the one before is for the parser to judge.
            if line[:1] in (b" ", b"\t") and line is not lines[1]:
                continue
            raise BadHead
        name, _, value = line.partition(b":")
        name = name.lower()
        if name == b"content-length" and _DIGITS.fullmatch(value.strip(b" \t")) is None:
            raise BadHead
        has_host = has_host or name == b"host"
    if not has_host and lines[0].endswith(b"HTTP/1.1"):
        raise BadHead("400 Bad Request: missing required Host header")
    return b"\r\n".join(lines)
