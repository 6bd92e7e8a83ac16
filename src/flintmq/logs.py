"""Log lines on standard error: as NSQ prints them, or one JSON object per line.

    [nsqd] 2024/05/01 12:30:00.123456 INFO: TOPIC(orders): created
    {"time":"2024-05-01T12:30:00.123456Z","level":"info","program":"nsqd","message":"TOPIC(orders): created",…}

Operators' tools match on the first form, so it is NSQ's own, in local time. The second is for tools that read fields:
its time is UTC, and what stands first in the message, the one it speaks of, is a field too (`topic`, `channel`,
`client`). What a peer has sent stands in a line with its control characters escaped: it can neither begin a line of its
own nor speak to a terminal. The same line again and again, whatever it speaks of, is written a limited number of times
a second, and then counted. Everything logged in the process takes the chosen form: ours from the chosen level on, what
libraries say from WARNING on.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any, TextIO

__all__ = ["JsonFormatter", "LimitedHandler", "LogFormatter", "printable", "set_level", "setup"]

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
#: Whom a message speaks of: it stands first, with a name that holds no brackets.
_ACTOR = re.compile(r"(TOPIC|CHANNEL|LOG|client)\(([^()]*)\): ")
_FIELDS = {"TOPIC": "topic", "LOG": "topic", "CHANNEL": "channel", "client": "client"}


#: Lines of one kind that are written in a second.
LINES_PER_SECOND = 500
#: Characters of a message that are written: much of it may be a peer's.
LONGEST_MESSAGE = 1024
#: Kinds that are kept count of.
_MOST_KINDS = 1000
#: What ends a line, moves a cursor, turns the direction of text, or is no character.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

#: Near the beginning of every entry.
_BEGINNING = re.compile("[0-9]{4}/[0-9]{2}/[0-9]{2} ")


def printable(text: str) -> str:
    """Return a text as part of one line, control characters as Python writes them."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def _cut(message: str) -> str:
    left_out = len(message) - LONGEST_MESSAGE
    return message if left_out <= 0 else f"{message[:LONGEST_MESSAGE]}... ({left_out} more characters)"


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Standard error. Of each kind of line a second gets so many; how many were left out is said afterwards."""

    def __init__(self) -> None:
        super().__init__()
        #: By where a line comes from: the second, the lines in it, and those left out since.
        self._kinds: dict[tuple[str, int], tuple[int, int, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        kind = (record.pathname, record.lineno)
        now = int(record.created)
        second, count, left_out = self._kinds.get(kind, (now, 0, 0))
        if now != second:
            if left_out:
                self._say(record, left_out)
            second, count, left_out = now, 0, 0
        is_written = count < LINES_PER_SECOND
        if kind not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (second, count + 1, left_out + (not is_written))
        if is_written:
            super().emit(record)

    def _say(self, record: logging.LogRecord, left_out: int) -> None:
        text = "%d lines like the next one were left out: there were more than %d in a second"
        about = logging.LogRecord(record.name, logging.WARNING, record.pathname, 0, text, None, None)
        about.args = (left_out, LINES_PER_SECOND)
        about.created = record.created
        super().emit(about)


class LogFormatter(logging.Formatter):
    """`<prefix>YYYY/MM/DD HH:MM:SS.ffffff <LEVEL>: <text>`, in local time; a traceback follows on lines of its own."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def formatMessage(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(record.created))
        level = "FATAL" if record.levelno >= logging.CRITICAL else record.levelname
        return f"{self.prefix}{when}.{_microseconds(record):06d} {level}: {printable(_cut(record.message))}"

    def formatException(self, ei: Any) -> str:
        """A traceback has lines, and the text of an exception may be a peer's."""
        lines = super().formatException(ei).split("\n")
        # None of them may look like the beginning of an entry.
        return "\n".join("  " + printable(line) if _BEGINNING.search(line) else printable(line) for line in lines)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, program, message; the actor's name; `error` is a traceback."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = _cut(record.getMessage())
        level = next((word for word, number in _LEVELS.items() if record.levelno <= number), "fatal")
        line = {
            "time": f"{when}.{_microseconds(record):06d}Z",
            "level": level,
            "program": self.program,
            "message": message,
        }
        actor = _ACTOR.match(message)
        if actor is not None:
            line[_FIELDS[actor[1]]] = actor[2]
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        # Only ASCII: whatever a client sent, the line is one line and one object.
        return json.dumps(line, separators=(",", ":"))


def _microseconds(record: logging.LogRecord) -> int:
    return int(record.created % 1 * 1_000_000)


def setup(prefix: str, level: str, format: str = "text", program: str = "nsqd") -> None:
    """Send log lines to standard error; `level` and `format` are words of their options. May be called again.

    The prefix is for text; in JSON the program has a field of its own.
    """
    handler = LimitedHandler()
    handler.setFormatter(JsonFormatter(program) if format == "json" else LogFormatter(prefix))
    logging.basicConfig(level=max(logging.WARNING, _LEVELS[level]), handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Another level from now on, and all else as it is."""
    logging.getLogger("flintmq").setLevel(_LEVELS[level])
