"""Plays conformance cases against daemons and writes down what came back.

Owns the daemon processes, the sockets, and the translation of frames into lines of text with placeholders. It never
judges: a missing answer or an unexpected close is part of the transcript, and whoever asked for it compares.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

import trustme

from .notation import (
    HEARTBEAT,
    TOPIC_LENGTH,
    Case,
    Closed,
    Connect,
    Deflate,
    Encrypt,
    EndInput,
    Gets,
    HangUp,
    Pass,
    Send,
    Step,
    Transcript,
    describe_body,
)

__all__ = ["Daemon", "Replay", "play"]

# How long an answer may take before the transcript says that none came. Only failures take that long: the slowest
# honest answer is a timeout on a new channel of the Go daemon, which may be noticed five seconds late.
DEADLINE = 20.0

MAGIC = b"  V2"

# Every connection that is still open at the end of a case gets this command. The answer to it is like no other, so
# that any frame before it is one too many.
LAST_COMMAND = b"end-of-case\n"
LAST_ANSWER = "error: E_INVALID invalid command end-of-case"


# --- frames as text ---------------------------------------------------------------------------------------------------


@dataclass
class _Names:
    """The placeholders of one run of one case."""

    topic: bytes
    started_ns: int = field(default_factory=time.time_ns)
    ids: list[bytes] = field(default_factory=list)
    timestamps: dict[bytes, int] = field(default_factory=dict)

    def fill_in(self, data: bytes) -> bytes:
        data = data.replace(b"<topic>", self.topic)
        for number, message_id in enumerate(self.ids, 1):
            data = data.replace(b"<id%d>" % number, message_id)
        return data

    def describe(self, frame_type: int, data: bytes) -> str:
        match frame_type:
            case 0:
                return "response: " + self._text(data)
            case 1:
                return "error: " + self._text(data)
            case 2 if len(data) >= 26:
                return self._message(data)
            case _:
                return f"frame type {frame_type}: {self._text(data)}"

    def _message(self, data: bytes) -> str:
        #  0         8         10        26
        #  timestamp attempts  id        body
        timestamp = int.from_bytes(data[:8], "big", signed=True)
        attempts = int.from_bytes(data[8:10], "big")
        message_id, body = data[10:26], data[26:]
        if not re.fullmatch(rb"[0-9a-f]{16}", message_id):
            return f"message with a malformed id {message_id!r}"
        if message_id not in self.ids:
            self.ids.append(message_id)
        number = self.ids.index(message_id) + 1
        when = f"<ts{number}>"
        if self.timestamps.setdefault(message_id, timestamp) != timestamp:
            when = "another timestamp than before"
        # An hour either way forgives any clock; a wrong unit or epoch is off by far more.
        if abs(timestamp - self.started_ns) > 3_600 * 10**9:
            when = f"timestamp {timestamp} is not now in nanoseconds"
        return f"message: <id{number}> {when} attempts={attempts} {describe_body(body)}"

    def _text(self, data: bytes) -> str:
        data = data.replace(self.topic, b"<topic>")
        for number, message_id in enumerate(self.ids, 1):
            data = data.replace(message_id, b"<id%d>" % number)
        return data.decode("latin-1")  # every byte has its character, whatever it is


# --- one connection ---------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """The case cannot go on: an answer did not come, or the connection is gone."""


class _Peer:
    """One client connection of a case."""

    def __init__(self, port: int, *, magic: bool) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._deflate: zlib._Compress | None = None
        self._inflate: zlib._Decompress | None = None
        self.ended = "open"
        if magic:
            self.send(MAGIC)

    def send(self, data: bytes) -> None:
        if self._deflate is not None:
            data = self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the daemon has closed already; what it said before that is still there to be read

    def frame(self) -> tuple[int, bytes] | None:
        """The next frame, or None at the end of the stream."""
        while True:
            if len(self._received) >= 8:
                size = int.from_bytes(self._received[:4], "big")
                if len(self._received) >= 4 + size:
                    frame_type = int.from_bytes(self._received[4:8], "big")
                    data = bytes(self._received[8 : 4 + size])
                    del self._received[: 4 + size]
                    return frame_type, data
            if not self._receive():
                torn = bytes(self._received)
                self._received.clear()
                return (-1, torn) if torn else None  # half a frame is worth a line in the transcript

    def _receive(self) -> bool:
        try:
            data = self._socket.recv(65536)
        except ConnectionResetError:
            data = b""  # closed with our bytes unread; for the client the same as a close
        except TimeoutError:
            self.ended = "silent"
            raise _Stopped from None
        if not data:
            self.ended = "closed"
            return False
        self._received += self._inflate.decompress(data) if self._inflate else data
        return True

    def start_deflate(self) -> None:
        self._deflate = zlib.compressobj(wbits=-15)
        self._inflate = zlib.decompressobj(wbits=-15)
        self._received = bytearray(self._inflate.decompress(bytes(self._received)))

    def start_tls(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            self._socket = context.wrap_socket(self._socket)
        except OSError:
            self.ended = "no TLS"
            raise _Stopped from None

    def end_input(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


# --- playing ----------------------------------------------------------------------------------------------------------

_topic_numbers = itertools.count(1)


def play(case: Case, port: int) -> Transcript:
    """Run one case against the daemon on that port."""
    topic = b"conf%06d" % next(_topic_numbers)
    assert len(topic) == TOPIC_LENGTH
    performance = _Performance(case, port, _Names(topic))
    try:
        performance.run()
    except _Stopped:
        pass  # the transcript says where and why
    finally:
        performance.close()
    return performance.transcript()


class _Performance:
    def __init__(self, case: Case, port: int, names: _Names) -> None:
        self._case = case
        self._port = port
        self._names = names
        self._peers: dict[str, _Peer] = {}
        self._lines: Transcript = {peer: [] for peer in case.peers()}

    def run(self) -> None:
        for step in self._case.steps:
            self._perform(step)
        for name, peer in self._peers.items():
            if peer.ended == "open":
                peer.send(LAST_COMMAND)
                while self._read_line(name, last=LAST_ANSWER) != LAST_ANSWER:
                    pass

    def _perform(self, step: Step) -> None:
        match step:
            case Pass(seconds):
                time.sleep(seconds)
            case Connect(name):
                self._peers[name] = _Peer(self._port, magic=False)
            case Send(name, data):
                self._peer(name).send(self._names.fill_in(data))
            case Gets(name, frames):
                for _ in frames:
                    self._read_line(name)
            case Closed(name):
                peer = self._peer(name)
                while peer.ended == "open":
                    self._read_line(name, end_is_near=True)
            case EndInput(name):
                self._peer(name).end_input()
            case HangUp(name):
                self._peer(name).close()
                self._peer(name).ended = "hung up"
            case Encrypt(name):
                self._peer(name).start_tls()
            case Deflate(name):
                self._peer(name).start_deflate()

    def _peer(self, name: str) -> _Peer:
        if name not in self._peers:
            self._peers[name] = _Peer(self._port, magic=True)
        return self._peers[name]

    def _read_line(self, name: str, *, last: str | None = None, end_is_near: bool = False) -> str | None:
        """Write down the next frame of a peer, unless it is the ``last`` one or a heartbeat that nobody asked for."""
        while True:
            frame = self._peer(name).frame()
            if frame is None:
                if end_is_near:
                    return None
                raise _Stopped
            line = self._names.describe(*frame)
            if line == HEARTBEAT and not self._case.heartbeats:
                continue
            if line != last:
                self._lines[name].append(line)
            return line

    def transcript(self) -> Transcript:
        return {
            name: [*lines, self._peers[name].ended if name in self._peers else "never opened"]
            for name, lines in self._lines.items()
        }

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


# --- the daemon -------------------------------------------------------------------------------------------------------


class Daemon:
    """A daemon process on a port of its own choice, with an empty data path that goes with it."""

    def __init__(
        self, command: Sequence[str], flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._data_path = tempfile.TemporaryDirectory(prefix="conformance-")
        files = {"<cert>": "cert.pem", "<key>": "key.pem"}
        if any(name in flag for name in files for flag in flags):
            issued = trustme.CA().issue_cert("127.0.0.1")
            issued.cert_chain_pems[0].write_to_path(os.path.join(self._data_path.name, files["<cert>"]))
            issued.private_key_pem.write_to_path(os.path.join(self._data_path.name, files["<key>"]))
            for name, file in files.items():
                flags = [flag.replace(name, os.path.join(self._data_path.name, file)) for flag in flags]
        self._process = subprocess.Popen(
            [
                *command,
                "--tcp-address=127.0.0.1:0",
                "--http-address=127.0.0.1:0",
                f"--data-path={self._data_path.name}",
                *flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self.data_path = self._data_path.name
        self.port = 0
        self._http_port = 0
        self._http_listening = threading.Event()
        self._last_words: deque[str] = deque(maxlen=60)
        self._listening_or_gone = threading.Event()
        self._reader = threading.Thread(target=self._read_log, name="daemon log", daemon=True)
        self._reader.start()
        self._listening_or_gone.wait(DEADLINE)
        if not self.port:
            self.stop()
            raise RuntimeError(f"{command[0]} does not listen; it said:\n{self.last_words()}")

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self._last_words.append(line)
            if not self.port and (found := re.search(r"TCP: listening on 127\.0\.0\.1:(\d+)", line)):
                self.port = int(found[1])
                self._listening_or_gone.set()
            if not self._http_port and (found := re.search(r"HTTP: listening on 127\.0\.0\.1:(\d+)", line)):
                self._http_port = int(found[1])
                self._http_listening.set()
        self._listening_or_gone.set()
        self._http_listening.set()

    def http_port(self) -> int:
        self._http_listening.wait(DEADLINE)
        return self._http_port

    def last_words(self) -> str:
        return "\n".join(list(self._last_words))

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._data_path.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


# --- many cases -------------------------------------------------------------------------------------------------------

# Cases mostly wait; their own topics and connections keep them apart.
AT_THE_SAME_TIME = 12


class Replay:
    """Plays cases against daemons of one kind: one process per set of flags, many cases at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._environment = environment
        self._daemons: dict[tuple[str, ...], Daemon] = {}
        self._answers: dict[str, Future[Transcript]] = {}
        self._cleanup = ExitStack()

    def start(self, cases: Iterable[Case]) -> None:
        cases = sorted(cases, key=lambda case: not case.waits)
        for flags in dict.fromkeys(case.flags for case in cases):
            self._daemons[flags] = self._cleanup.enter_context(Daemon(self._command, flags, self._environment))
        pool = self._cleanup.enter_context(ThreadPoolExecutor(AT_THE_SAME_TIME, "case"))
        self._cleanup.callback(pool.shutdown, cancel_futures=True)
        for case in cases:
            self._answers[case.name] = pool.submit(play, case, self._daemons[case.flags].port)

    def answer(self, case: Case) -> Transcript:
        return self._answers[case.name].result()

    def log(self, case: Case) -> str:
        """The last lines that the daemon of this case wrote."""
        return self._daemons[case.flags].last_words()

    def stop(self) -> None:
        self._cleanup.close()
