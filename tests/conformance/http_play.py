"""Plays HTTP cases against daemons and writes down what came back.

An answer is a list of lines: the status, the headers that matter to clients, and the body. In them, what differs from
run to run is a placeholder: ``<topic>``, ``<host>``, ``<tcp_port>``, ``<http_port>``, ``<time>``, ``<path>``, and
``<n>`` for a figure about memory.
"""

from __future__ import annotations

import http.client
import io
import itertools
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from .http_cases import Ask, HttpCase
from .play import DEADLINE, Daemon

__all__ = ["Answers", "HttpReplay"]

#: Per request the lines of its answer.
Answers = list[list[str]]

HEADERS = ("Allow", "Content-Type", "Location", "X-Nsq-Content-Type")

_topic_numbers = itertools.count(1)


class HttpReplay:
    """Plays cases against daemons of one kind, one process per set of flags."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._environment = environment
        self._daemons: dict[tuple[str, ...], Daemon] = {}
        self._cleanup = ExitStack()

    def answer(self, case: HttpCase) -> Answers:
        daemon = self._daemons.get(case.flags)
        if daemon is None:
            daemon = Daemon(self._command, case.flags, self._environment)
            self._daemons[case.flags] = self._cleanup.enter_context(daemon)
        return _play(case, daemon)

    def answers(self, cases: Iterable[HttpCase]) -> dict[str, Answers]:
        return {case.name: self.answer(case) for case in cases}

    def log(self, case: HttpCase) -> str:
        """The last lines that the daemon of this case wrote."""
        return self._daemons[case.flags].last_words()

    def stop(self) -> None:
        self._cleanup.close()


def _play(case: HttpCase, daemon: Daemon) -> Answers:
    topic = f"http{next(_topic_numbers):06d}"
    answers: Answers = []
    connection: socket.socket | None = None
    try:
        for ask in case.asks:
            if connection is None:
                connection = socket.create_connection(("127.0.0.1", daemon.http_port()), timeout=DEADLINE)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_request(ask).replace(b"<topic>", topic.encode()))
            lines, closed = _read(connection, ask.method)
            answers.append([_with_placeholders(line, topic, daemon) for line in lines])
            if closed:
                connection.close()
                connection = None
    finally:
        if connection is not None:
            connection.close()
    return answers


def _request(ask: Ask) -> bytes:
    if ask.raw or not ask.target:
        return ask.raw
    lines = [f"{ask.method} {ask.target} HTTP/1.1", "Host: localhost", *ask.headers]
    if ask.body is not None:
        lines.append(f"Content-Length: {len(ask.body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (ask.body or b"")


class _Unbuffered:
    """A connection that is read no further than an answer goes: the next one may follow at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def makefile(self, mode: str) -> io.RawIOBase:
        return self._connection.makefile("rb", buffering=0)


def _read(connection: socket.socket, method: str) -> tuple[list[str], bool]:
    """The lines of one answer, and whether the daemon will close the connection."""
    response = http.client.HTTPResponse(_Unbuffered(connection), method=method)  # type: ignore[arg-type]
    with response:
        response.begin()
        body = response.read()
    headers = [f"{name}: {response.headers[name]}" for name in HEADERS if name in response.headers]
    return [str(response.status), *headers, body.decode("latin-1")], response.will_close


def _with_placeholders(line: str, topic: str, daemon: Daemon) -> str:
    host = re.escape(socket.gethostname())
    dotless = re.sub(r"[.:]", "_", socket.gethostname())
    for pattern, placeholder in (
        (topic, "<topic>"),
        (re.escape(daemon.data_path), "<path>"),
        (rf"(?<=\"){host}(?=\")|^{host}$", "<host>"),
        (rf"(?<=^nsq\.){re.escape(dotless)}_{daemon.http_port()}(?=\.$)", "<host>_<http_port>"),
        (rf"\b{daemon.http_port()}\b", "<http_port>"),
        (rf"\b{daemon.port}\b", "<tcp_port>"),
        (r'(?<="start_time":)\d+', "<time>"),
    ):
        line = re.sub(pattern, placeholder, line)
    return re.sub(r'(?<="memory":)\{[^}]*\}', lambda found: re.sub(r"(?<=:)\d+", "<n>", found[0]), line)
