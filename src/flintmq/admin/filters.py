"""Which messages somebody means: by text, by a JSON path, by why they died, by how often they were delivered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from flintmq.cluster.node import PeekedMessage
from flintmq.errors import HttpError

__all__ = ["Filter", "parse_path"]

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|\[['\"]([^'\"]*)['\"]\]")
LONGEST = 1024


def parse_path(text: str) -> list[str | int]:
    """The steps of ``$.items[0].sku``. HttpError if it is none."""
    rest = text.removeprefix("$")
    steps: list[str | int] = []
    at = 0
    while at < len(rest):
        found = _STEP.match(rest, at)
        if found is None:
            raise HttpError(400, "INVALID_PATH: write a path such as $.items[0].sku")
        steps.append(int(found[2]) if found[2] is not None else found[1] if found[1] is not None else found[3])
        at = found.end()
    if not steps or len(text) > LONGEST:
        raise HttpError(400, "INVALID_PATH: write a path such as $.items[0].sku")
    return steps


class Filter:
    """Made of the arguments of a request, or of a job's description."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        def text(name: str) -> str:
            value = given.get(name)
            if (value is not None and not isinstance(value, str)) or len(value or "") > LONGEST:
                raise HttpError(400, f"INVALID_{name.upper()}: {name} must be a text of at most {LONGEST} characters")
            return value or ""

        self._text = text("filter").lower().encode("utf-8", "surrogateescape")
        self._path = parse_path(text("path")) if text("path") else []
        self._equals = given.get("equals")
        if self._equals is not None:
            self._equals = str(self._equals)
        self._reason = text("reason")
        try:
            self._attempts = int(given.get("min_attempts") or 0)
        except (TypeError, ValueError, OverflowError):
            raise HttpError(400, "INVALID_MIN_ATTEMPTS: min_attempts must be a number") from None

    @property
    def needs_bodies(self) -> bool:
        return bool(self._text or self._path)

    @property
    def is_empty(self) -> bool:
        return not (self.needs_bodies or self._reason or self._attempts)

    def fits(self, message: PeekedMessage) -> bool:
        if message.attempts < self._attempts:
            return False
        if self._reason and (message.dead is None or message.dead.reason != self._reason):
            return False
        if self._text and self._text not in message.body.lower():
            return False
        return not self._path or self._fits_path(message.body)

    def _fits_path(self, body: bytes) -> bool:
        try:
            value = msgspec.json.decode(body)
            for step in self._path:
                value = value[step] if not (isinstance(value, list) and isinstance(step, str)) else value[int(step)]
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError):
            return False
        if self._equals is None:
            return True
        if isinstance(value, str):
            return bool(value == self._equals)
        return bool(msgspec.json.encode(value).decode() == self._equals)
