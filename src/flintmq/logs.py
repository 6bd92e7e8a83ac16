"""Log lines as NSQ prints them, on standard error: `[nsqd] 2024/05/01 12:30:00.123456 INFO: TCP: listening on …`.

Operators' tools match on these lines, so the form is NSQ's own. Everything logged in the process takes it: ours from
the chosen level on, what libraries say from WARNING on.
"""

from __future__ import annotations

import logging
import time

__all__ = ["LogFormatter", "setup"]

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


class LogFormatter(logging.Formatter):
    """`<prefix>YYYY/MM/DD HH:MM:SS.ffffff <LEVEL>: <text>`, in local time; a traceback follows on lines of its own."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def formatMessage(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(record.created))
        microseconds = int(record.created % 1 * 1_000_000)
        level = "FATAL" if record.levelno >= logging.CRITICAL else record.levelname
        return f"{self.prefix}{when}.{microseconds:06d} {level}: {record.message}"


def setup(prefix: str, level: str) -> None:
    """Send log lines to standard error; `level` is a word of `--log-level`. May be called again to change both."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(prefix))
    logging.basicConfig(level=max(logging.WARNING, _LEVELS[level]), handlers=[handler], force=True)
    logging.getLogger("flintmq").setLevel(_LEVELS[level])
