"""Every exception flintmq raises.

FlintError
├── ProtocolError      the peer broke the NSQ protocol; the text is what goes on the wire
├── PublishError       a publish was refused: the topic is going away, the disk is full, a write failed
│   ├── LimitError     … or it would exceed a limit of its topic
│   │   └── RateError  … or of its rate
│   ├── KeyContentError  … or its key was used for another publish
│   ├── PublishUnknownError   sent, and nobody knows whether it was stored: the connection was lost before the answer
│   └── KeysUnsupportedError  a publish with a key, and no broker that knows keys
├── AuthError          no auth server could say what a client may do
├── ConnectError       no broker can be reached, or the one that was is not what it should be
├── ClosedError        this producer or consumer was closed
├── DecodeError        a message's body is not of the type that its consumer expects
├── ClusterError       nobody of those who were asked over HTTP gave an answer; carries what each said
├── NotFoundError      no such topic or channel
├── HttpError          a request over HTTP is refused: status and code of the answer
├── StageError         a call of a staged publish is refused: status, code and what to do
├── FullError          one more than we can keep; the text says of what
├── OptionError        a flag, a config file key or a value is wrong
├── StartError         a daemon cannot start: the data path is locked, an address is taken, …
├── PipelineError      a Spark pipeline cannot run; the text says what is missing or wrong
├── DataLossError      messages that were still to be read are gone; carries where
├── SpoolError         a spool of Spark's source cannot be used, or is not the one it should be
├── BackupError        a backup cannot be made, is damaged, or cannot be restored
└── StorageError       a file is not what it should be
    ├── FormatError    written by a newer or an unknown version
    └── DamageError    a checksum does not fit; carries the seqs that cannot be read
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import msgspec

__all__ = [
    "UNREADABLE",
    "AuthError",
    "BackupError",
    "ClosedError",
    "ClusterError",
    "ConnectError",
    "DamageError",
    "DataLossError",
    "DecodeError",
    "FlintError",
    "FormatError",
    "FullError",
    "HttpError",
    "KeyContentError",
    "KeysUnsupportedError",
    "LimitError",
    "NotFoundError",
    "OptionError",
    "PipelineError",
    "ProtocolError",
    "PublishError",
    "PublishUnknownError",
    "RateError",
    "SpoolError",
    "StageError",
    "StartError",
    "StorageError",
    "file_reason",
    "permission_hint",
    "plain_reason",
    "system_reason",
]

#: What msgspec raises where bytes are not what they should be: no JSON or msgpack, no text, or too deep.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class FlintError(Exception):
    """The root of the tree."""

    #: Would the same call have a chance later?
    retriable = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are unpickled by a call with `args`, which are not those of our constructors.
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[FlintError], args: tuple[Any, ...]) -> FlintError:
    return kind.__new__(kind, *args)


class ProtocolError(FlintError):
    """The peer broke the protocol. Sent as ``"<code> <text>"``; a fatal one also closes the connection."""

    def __init__(self, code: str, text: str = "", *, fatal: bool = True) -> None:
        self.code = code
        self.text = text
        self.fatal = fatal
        super().__init__(f"{code} {text}" if text else code)


class PublishError(FlintError):
    """A publish was refused; in the broker the text is the reason alone, as in ``E_PUB_FAILED PUB failed <reason>``.

    In the client it is the broker's whole answer, and ``code`` the first word of it.
    """

    retriable = True
    #: What it is over HTTP.
    http_status = 503

    def __init__(self, text: str = "", *, code: str = "", retriable: bool = True) -> None:
        self.code = code
        self.retriable = retriable
        super().__init__(text)


class LimitError(PublishError):
    """A publish would exceed a limit of its topic."""


class RateError(LimitError):
    """Publishes to the topic come faster than they may."""

    http_status = 429


class KeyContentError(PublishError):
    """The key of a publish was used for another one, of other size or content. Nothing was stored."""

    http_status = 409

    def __init__(self, text: str = "") -> None:
        super().__init__(text, code="E_KEY_CONTENT", retriable=False)


class PublishUnknownError(PublishError):
    """The publish was sent and the connection lost before its answer: it may be stored. A retry may store it twice."""


class KeysUnsupportedError(PublishError):
    """A publish with a key, and no broker that knows keys: NSQ's own would ignore it, and store repeats."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text, retriable=False)


class AuthError(FlintError):
    """No auth server could say what a client may do; the text is for the log, clients are only told that it failed."""

    retriable = True


class ConnectError(FlintError):
    """No broker can be reached, or what was reached is none; the text says which and why."""

    retriable = True


class ClosedError(FlintError):
    """The producer or consumer was closed."""


class DecodeError(FlintError):
    """A message's body is not of the type that its consumer expects; the text says why."""


class ClusterError(FlintError):
    """Nobody who was asked over HTTP gave an answer; ``failures`` has what each said instead, by address."""

    retriable = True

    def __init__(self, text: str, failures: dict[str, str]) -> None:
        self.failures = failures
        super().__init__(text)


class NotFoundError(FlintError):
    """No such topic or channel."""


class HttpError(FlintError):
    """A request over HTTP is refused. The code goes into the answer, as in ``{"message":"MISSING_ARG_TOPIC"}``.

    ``details`` stand beside it, for those who go on by them.
    """

    def __init__(self, status: int, code: str, **details: object) -> None:
        self.status = status
        self.code = code
        self.details = details
        super().__init__(f"{status} {code}")


class StageError(FlintError):
    """A call of a staged publish is refused; ``code`` is its first word, as in ``E_STAGE_FENCED …``.

    ``details`` stand beside it in the answer, such as ``retry_after``: seconds until the call would be taken.
    """

    def __init__(self, status: int, code: str, text: str, **details: object) -> None:
        self.status = status
        self.code = code
        self.details = details
        super().__init__(f"{code} {text}")


class FullError(FlintError):
    """One more than we can keep; the text says of what."""


class OptionError(FlintError):
    """A flag, a config file key or a value is wrong; the text says which and what would be right."""


class StartError(FlintError):
    """A daemon cannot start; the text says why."""


class PipelineError(FlintError):
    """A Spark pipeline cannot run, or Spark itself cannot start; the text says what to do about it."""


class DataLossError(FlintError):
    """Messages that were still to be read are gone, or cannot be read; the text says which and what to do."""

    def __init__(self, text: str, *, topic: str = "", node: str = "") -> None:
        self.topic = topic
        self.node = node
        super().__init__(text)


class SpoolError(FlintError):
    """A spool cannot be used: it is not where it should be, belongs to another query, or cannot be written."""


class BackupError(FlintError):
    """A backup cannot be made, is damaged, or cannot be restored; the text says which and why."""


class StorageError(FlintError):
    """A file is not what it should be."""


class FormatError(StorageError):
    """A file was written by a version that this one does not know."""


class DamageError(StorageError):
    """Some records do not match their checksums. The messages ``first`` … ``stop - 1`` cannot be read."""

    def __init__(self, text: str, first: int, stop: int) -> None:
        self.first = first
        self.stop = stop
        super().__init__(text)


def permission_hint(exc: BaseException, path: str | Path) -> str:
    """Return the end of a sentence that says what to do about a refused permission; empty for other errors."""
    if not isinstance(exc, PermissionError) or not hasattr(os, "geteuid"):
        return ""
    place = Path(path).absolute()
    # The first that lets itself be looked at is the one that refuses.
    for refusing in (place, *place.parents):
        try:
            about = os.stat(refusing)
        except OSError:
            continue
        mode = f"mode {stat.S_IMODE(about.st_mode):04o}"
        we, owner = _user(os.geteuid()), _user(about.st_uid)
        if we == owner:
            return f"; {refusing} has {mode}, change that with chmod"
        # Nobody should become root for want of a folder.
        advice = f"run it as {owner}, or chown it" if about.st_uid else "choose another path, or let root chown it"
        return f"; {refusing} belongs to {owner} ({mode}) and this process runs as {we}: {advice}"
    return ""


def plain_reason(exc: Exception) -> str:
    """Return why a connection failed, in the system's words: asyncio's hold the address, and the error's number."""
    # Numbers of TLS and of failed look-ups of names are others than the system's.
    if isinstance(exc, OSError) and exc.errno and exc.errno > 0 and type(exc).__module__ != "ssl":
        return os.strerror(exc.errno)
    return str(exc) or type(exc).__name__


def system_reason(exc: OSError) -> str:
    """Return what the system refused, and what to do about it where that is known."""
    if not exc.filename:
        return str(exc)
    return f"{exc.filename}: {exc.strerror}{permission_hint(exc, exc.filename)}"


def file_reason(exc: Exception, *paths: str | None) -> str:
    """Return why one of these files cannot be used. The SSL library does not say which: it is found by opening them."""
    given = [path for path in paths if path]
    for path in given:
        try:
            with open(path, "rb"):
                pass
        except OSError as refused:
            return f"{path}: {refused.strerror}{permission_hint(refused, path)}"
    return f"{', '.join(given)}: {exc}" if given else str(exc)


def _user(number: int) -> str:
    """Return a user's name, or the number of one without a name."""
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"the user {number}"
