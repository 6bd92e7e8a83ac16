"""Who may use a daemon's HTTP API: bearer tokens and the rights of each.

A ``Tokens`` owns one file of tokens. It knows rights, not routes: a route says which right it needs.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Callable

from flintmq.errors import HttpError, OptionError, permission_hint

__all__ = ["ADMIN", "CONSUME", "OPEN", "PUBLISH", "READ", "RIGHTS", "Passes", "Tokens", "read_secrets", "read_token"]

logger = logging.getLogger(__name__)

#: Rights. A route needs one of them; an open one needs none.
OPEN, READ, CONSUME, PUBLISH, ADMIN = "", "read", "consume", "publish", "admin"
#: Those that a token can have; the last one includes the others.
RIGHTS = (READ, CONSUME, PUBLISH, ADMIN)


class Tokens:
    """Who may do what: a file with one line per token, ``TOKEN RIGHTS``, and ``#`` before a comment.

    Rights are ``read`` (numbers and names), ``consume`` (messages), ``publish`` and ``admin``, with commas between
    them; ``admin`` includes the others, and no other one includes another. A request carries its token as
    ``Authorization: Bearer TOKEN``. Only digests are kept, and a token is compared with all of them, so that how long
    that takes tells nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        #: Called after every reload, for those who remember what was allowed.
        self.changed: list[Callable[[], None]] = []
        self._rights = self._read()

    def _read(self) -> list[tuple[bytes, frozenset[str]]]:
        found = []
        for number, words in read_secrets(self.path, "tokens", "tokens", "HTTP"):
            rights = frozenset(words[1].split(",")) if len(words) == 2 else frozenset[str]()
            if not rights or not rights <= frozenset(RIGHTS):
                # Never the line itself: it holds a secret.
                raise OptionError(f"{self.path}, line {number}: write TOKEN and its rights, such as read,publish")
            found.append((_digest(words[0]), frozenset(RIGHTS) if ADMIN in rights else rights))
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
        """HttpError 401 if the request has no token that we know, 403, with the right, if the token lacks it."""
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
            raise HttpError(403, "FORBIDDEN", missing_right=right)


class Passes:
    """Who may come in at all: a file with a token on each line, and ``#`` before a comment. OptionError if none is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._digests = self._read()

    def _read(self) -> list[bytes]:
        found = [_digest(words[0]) for _, words in read_secrets(self.path, "tokens", "tokens", "TCP")]
        if not found:
            raise OptionError(f"there is no token in {self.path}")
        return found

    def reload(self) -> None:
        """Read the file again. If that fails the old tokens stay."""
        try:
            self._digests = self._read()
        except OptionError as exc:
            logger.error("TCP: the tokens stay as they were - %s", exc)

    def is_good(self, token: str) -> bool:
        """Is it one of them? It is compared with all, so that how long that takes tells nothing."""
        digest = _digest(token)
        return sum([hmac.compare_digest(known, digest) for known in self._digests]) > 0


def read_secrets(path: str, things: str, secrets: str, actor: str) -> list[tuple[int, list[str]]]:
    """Return the lines of a file of ``things``, each with its number, as words; empty lines and comments are left out.

    OptionError if it cannot be read. That others can read the ``secrets`` in it is logged, with the ``actor`` first.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise OptionError(f"cannot read the {things} in {path} - {reason}{permission_hint(exc, path)}") from exc
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s: %s holds %s and can be read by others: chmod 600 it", actor, path, secrets)
    split = ((number, line.split()) for number, line in enumerate(lines, 1))
    return [(number, words) for number, words in split if words and not words[0].startswith("#")]


def read_token(path: str) -> str:
    """The token that somebody has to show, from his file: the first word that is no comment. OptionError if none."""
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                if (words := line.split()) and not words[0].startswith("#"):
                    return words[0]
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is no ASCII text"
        raise OptionError(f"cannot read the token in {path} - {reason}{permission_hint(exc, path)}") from exc
    raise OptionError(f"there is no token in {path}")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
