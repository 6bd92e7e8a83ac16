"""The arguments of an HTTP request: taken out of its target, and read as what a route needs.

Every route of every daemon reads its arguments here, so that the same mistake gets the same answer everywhere. Where
NSQ has an error for it, the answer is NSQ's, letter for letter: ``MISSING_ARG_TOPIC``, ``INVALID_TOPIC`` on routes of a
topic, ``INVALID_ARG_TOPIC`` on routes of a channel. A route's own mistakes have a sentence after the code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from flintmq.errors import HttpError
from flintmq.protocol.wire import valid_name

__all__ = ["Arguments", "parse_query", "split_target"]

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?]*")


#: Arguments that a query may have. Go has no limit; no client of NSQ sends more than a dozen.
MOST_ARGUMENTS = 1000


def split_target(target: str) -> tuple[str, str]:
    """The path, decoded, and the query, as it came, of a request line. HttpError if it is no path at all."""
    if not target.startswith("/"):
        # A proxy's form: the whole URL.
        origin = ORIGIN.match(target)
        if origin is None:
            raise HttpError(400, "400 Bad Request")
        target = target[origin.end() :] or "/"
    raw, _, query = target.partition("?")
    if "%" not in raw:
        return raw, query
    if _BAD_ESCAPE.search(raw):
        raise HttpError(400, "400 Bad Request")
    return _decoded(raw), query


def parse_query(query: str) -> Arguments:
    """Return the arguments of a query, of a repeated one the first.

    HttpError for what Go cannot parse, ``%zz`` and a ``;``, and for more than MOST_ARGUMENTS.
    """
    arguments = Arguments()
    if not query:
        return arguments
    if query.count("&") >= MOST_ARGUMENTS or ";" in query or _BAD_ESCAPE.search(query):
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


class Arguments(dict[str, str]):
    """The arguments of one request by name, of a repeated one the first. Methods raise HttpError 400."""

    def text(self, name: str, hint: str = "") -> str:
        """Return an argument that must be there. ``hint`` says what to give."""
        if name not in self:
            raise HttpError(400, f"MISSING_ARG_{name.upper()}{hint and f': {hint}'}")
        return self[name]

    def name(self, kind: str, *, code: str = "") -> str:
        """Return the name of a topic or channel; one that cannot exist is ``code``, or ``INVALID_ARG_KIND``."""
        name = self.text(kind)
        if not valid_name(name):
            raise HttpError(400, code or f"INVALID_ARG_{kind.upper()}")
        return name

    def topic(self) -> str:
        """Return the topic of a route that is about a topic alone."""
        return self.name("topic", code="INVALID_TOPIC")

    def topic_and_channel(self) -> tuple[str, str]:
        """Return the names of a route that is about a channel."""
        return self.name("topic"), self.name("channel")

    def flag(self, name: str, default: bool = False) -> bool:
        """Return whether an argument is on. As in NSQ everything but ``false`` and ``0`` is."""
        return self[name] not in ("false", "0") if name in self else default

    def word(self, name: str, words: Sequence[str], *, code: str = "") -> str:
        """Return one of a few words, the first of them if none is given."""
        word = self.get(name, words[0])
        if word not in words:
            *others, last = words
            raise HttpError(
                400, f"{code or f'INVALID_ARG_{name.upper()}'}: {name} must be {', '.join(others)} or {last}"
            )
        return word

    def number(
        self,
        name: str,
        default: int | None = None,
        *,
        lowest: int = 0,
        highest: int | None = None,
        code: str = "",
        what: str = "a whole number",
        hint: str = "",
    ) -> int:
        """Return a whole number in decimal digits; without a default it must be there. ``what`` names its unit."""
        if default is not None and name not in self:
            return default
        text = self.text(name, hint)
        value = int(text) if is_number(text) else -1
        if not lowest <= value <= (LARGEST if highest is None else highest):
            limits = f"from {lowest} on" if highest is None else f"from {lowest} to {highest}"
            raise HttpError(400, f"{code or f'INVALID_ARG_{name.upper()}'}: {name} must be {what} {limits}")
        return value


#: Seqs, and times in nanoseconds, fit in 64 bits with a sign.
LARGEST = (1 << 63) - 1


def is_number(text: str) -> bool:
    """Return whether a text is a whole number, in ASCII digits, that may fit in 64 bits."""
    return text.isascii() and text.isdecimal() and len(text) <= 19
