"""`python -m flintmq <command>`, and the first lines of every program: ctrl-C ends them quietly from here on.

A program's imports take most of its first moments, so they happen inside.
"""

from __future__ import annotations

import importlib
import sys

__all__ = [
    "flintmq",
    "nsq_stat",
    "nsq_tail",
    "nsq_to_file",
    "nsq_to_http",
    "nsq_to_nsq",
    "nsqadmin",
    "nsqd",
    "nsqlookupd",
    "to_nsq",
]

#: What a shell says of a program that SIGINT ended.
_INTERRUPTED = 130


def _run(module: str, function: str) -> int:
    try:
        status: int = getattr(importlib.import_module(module), function)()
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status


def flintmq() -> int:
    return _run("flintmq.cli", "main")


def nsqd() -> int:
    return _run("flintmq.cli", "nsqd")


def nsqlookupd() -> int:
    return _run("flintmq.cli", "nsqlookupd")


def nsqadmin() -> int:
    return _run("flintmq.cli", "nsqadmin")


def nsq_stat() -> int:
    return _run("flintmq.tools.nsq_stat", "main")


def nsq_tail() -> int:
    return _run("flintmq.tools.nsq_tail", "main")


def nsq_to_file() -> int:
    return _run("flintmq.tools.nsq_to_file", "main")


def nsq_to_http() -> int:
    return _run("flintmq.tools.nsq_to_http", "main")


def nsq_to_nsq() -> int:
    return _run("flintmq.tools.nsq_to_nsq", "main")


def to_nsq() -> int:
    return _run("flintmq.tools.to_nsq", "main")


if __name__ == "__main__":
    sys.exit(flintmq())
