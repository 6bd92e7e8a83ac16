"""Log lines on standard error: as NSQ prints them, or one JSON object per line.

    [nsqd] 2024/05/01 12:30:00.123456 INFO: TOPIC(orders): created
    {"time":"2024-05-01T12:30:00.123456Z","level":"info","program":"nsqd","message":"TOPIC(orders): created",…}

Operators' tools match on the first form, so it is NSQ's own, in local time. The second is for tools that read fields:
its time is UTC, and what stands first in the message, the one it speaks of, is a field too (`topic`, `channel`,
`client`). Everything logged in the process takes the chosen form: ours from the chosen level on, what libraries say
from WARNING on.
"""

from __future__ import annotations

import json
import logging
import re
import time

__all__ = ["JsonFormatter", "LogFormatter", "set_level", "setup"]

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


class LogFormatter(logging.Formatter):
    """`<prefix>YYYY/MM/DD HH:MM:SS.ffffff <LEVEL>: <text>`, in local time; a traceback follows on lines of its own."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def formatMessage(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(record.created))
        level = "FATAL" if record.levelno >= logging.CRITICAL else record.levelname
        return f"{self.prefix}{when}.{_microseconds(record):06d} {level}: {record.message}"


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, program, message; the actor's name; `error` is a traceback."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage()
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
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(program) if format == "json" else LogFormatter(prefix))
    logging.basicConfig(level=max(logging.WARNING, _LEVELS[level]), handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Another level from now on, and all else as it is."""
    logging.getLogger("flintmq").setLevel(_LEVELS[level])
