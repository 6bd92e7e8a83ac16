"""Plays the cases for nsqlookupd against a daemon and writes down what came back.

Owns the daemon process, the sockets, and the translation of answers into lines with placeholders. It never judges.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from .lookup_notation import HTTP, Ask, Case, Step
from .notation import Closed, Connect, EndInput, Gets, HangUp, Send, Transcript

__all__ = ["Replay"]

# How long an answer may take before the transcript says that none came. Only failures take that long.
DEADLINE = 60.0
MAGIC = b"  V1"
# Every connection that is still open at the end of a case gets this command. The answer to it is like no other, so
# that any answer before it is one too many.
LAST_COMMAND = b"end-of-case\n"
LAST_ANSWER = "E_INVALID invalid command end-of-case"
AT_THE_SAME_TIME = 8

_numbers = itertools.count(1)


class _Stopped(Exception):
    """The case cannot go on: an answer did not come, or the connection is gone."""


class _Peer:
    """One connection of a case."""

    def __init__(self, port: int, *, magic: bool) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self.ended = "open"
        host, its_port = self._socket.getsockname()
        self.address = f"{host}:{its_port}"
        if magic:
            self.send(MAGIC)

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the daemon has closed already; what it said before that is still there to be read

    def answer(self) -> bytes | None:
        """The next answer, or None at the end of the stream."""
        while True:
            if len(self._received) >= 4:
                size = int.from_bytes(self._received[:4], "big")
                if len(self._received) >= 4 + size:
                    data = bytes(self._received[4 : 4 + size])
                    del self._received[: 4 + size]
                    return data
            try:
                data = self._socket.recv(65536)
            except ConnectionResetError:
                data = b""  # closed with our bytes unread; for the client the same as a close
            except TimeoutError:
                self.ended = "silent"
                raise _Stopped from None
            if not data:
                self.ended = "closed"
                torn = bytes(self._received)
                self._received.clear()
                return torn or None  # half an answer is worth a line in the transcript
            self._received += data

    def end_input(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


class _Performance:
    def __init__(self, case: Case, daemon: Daemon) -> None:
        self._case = case
        self._daemon = daemon
        number = next(_numbers)
        # The node stands in bodies whose size is sent before them: it is as long as its placeholder.
        self._topic, self._node = f"conf{number:06d}", f"n{number:05d}"
        self._peers: dict[str, _Peer] = {}
        self._lines: Transcript = {peer: [] for peer in case.peers()}

    def run(self) -> Transcript:
        try:
            for step in self._case.steps:
                self._perform(step)
            for name, peer in self._peers.items():
                if peer.ended == "open":
                    peer.send(LAST_COMMAND)
                    while self._read_line(name, last=LAST_ANSWER) != LAST_ANSWER:
                        pass
        except _Stopped:
            pass  # the transcript says where and why
        finally:
            for peer in self._peers.values():
                peer.close()
        endings = {name: peer.ended for name, peer in self._peers.items()}
        return {
            name: [*lines, *([] if name == HTTP else [endings.get(name, "never opened")])]
            for name, lines in self._lines.items()
        }

    def _perform(self, step: Step) -> None:
        match step:
            case Connect(name):
                self._peers[name] = _Peer(self._daemon.tcp_port, magic=False)
            case Send(name, data):
                self._peer(name).send(self._fill_in(data))
            case Gets(name, lines):
                for _ in lines:
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
            case Ask():
                self._lines[HTTP].append(self._ask(step))

    def _peer(self, name: str) -> _Peer:
        if name not in self._peers:
            self._peers[name] = _Peer(self._daemon.tcp_port, magic=True)
        return self._peers[name]

    def _read_line(self, name: str, *, last: str | None = None, end_is_near: bool = False) -> str | None:
        answer = self._peer(name).answer()
        if answer is None:
            if end_is_near:
                return None
            raise _Stopped
        line = self._text(answer.decode("latin-1"))
        if line != last:
            self._lines[name].append(line)
        return line

    # --- HTTP ----------------------------------------------------------------------------------------------------

    def _ask(self, step: Ask) -> str:
        give_up = time.monotonic() + DEADLINE
        while True:
            line = self._request(step)
            if not step.until or line == step.line or time.monotonic() > give_up:
                return line
            time.sleep(0.005)

    def _request(self, step: Ask) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._daemon.http_port, timeout=DEADLINE)
        try:
            target = self._fill_in(step.target.encode()).decode()
            connection.request(step.method, target, self._fill_in(step.body) or None)
            response = connection.getresponse()
            body = response.read().decode("latin-1")
        finally:
            connection.close()
        words = [
            response.getheader("Content-Type") or "-",
            response.getheader("X-NSQ-Content-Type") or "-",
            response.getheader("Allow") or response.getheader("Location") or "-",
        ]
        if body.startswith("{"):
            body = json.dumps(self._cut_down(json.loads(body)), separators=(",", ":"))
        return self._text(f"{response.status} {' '.join(words)} {body}")

    def _cut_down(self, answer: Any) -> Any:
        """What concerns this case alone, in an order of its own."""
        if isinstance(answer.get("topics"), list):
            answer["topics"] = sorted(name for name in answer["topics"] if name.startswith(self._topic))
        if isinstance(answer.get("channels"), list):
            answer["channels"].sort()
        if isinstance(answer.get("producers"), list):
            mine = [self._ours(p) for p in answer["producers"] if p["broadcast_address"] == self._node]
            answer["producers"] = sorted(mine, key=self._order)
        if any(key.count(":") == 2 for key in answer):
            answer = {key: self._records(records) for key, records in sorted(answer.items())}
            answer = {key: records for key, records in answer.items() if records}
        return answer

    def _ours(self, producer: dict[str, Any]) -> dict[str, Any]:
        """A node with its topics, and each topic's flag, in order; without the keys that are newer than v1.3.0."""
        if "topics" in producer:
            both = sorted(zip(producer["topics"], producer["tombstones"], strict=True))
            producer["topics"], producer["tombstones"] = [name for name, _ in both], [flag for _, flag in both]
        return self._without_newer_keys(producer)

    def _records(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        mine = [record for record in records if record["broadcast_address"] == self._node]
        for record in mine:
            for key in ("last_update", "tombstoned_at"):
                # An hour either way forgives any clock; a wrong unit or epoch is off by far more.
                recent = abs(record[key] - time.time_ns()) < 3_600 * 10**9
                record[key] = "<time>" if recent else str(record[key])
        return sorted((self._without_newer_keys(record) for record in mine), key=self._order)

    def _without_newer_keys(self, record: dict[str, Any]) -> dict[str, Any]:
        if self._daemon.newer:
            for key in ("topology_zone", "topology_region"):
                assert record.pop(key) == ""
        return record

    def _order(self, record: dict[str, Any]) -> int:
        address = record.get("remote_address") or record.get("id")
        return [peer.address for peer in self._peers.values()].index(str(address))

    # --- placeholders --------------------------------------------------------------------------------------------

    def _fill_in(self, data: bytes) -> bytes:
        return data.replace(b"<topic>", self._topic.encode()).replace(b"<node>", self._node.encode())

    def _text(self, text: str) -> str:
        text = text.replace(self._topic, "<topic>").replace(self._node, "<node>")
        for name, peer in self._peers.items():
            text = text.replace(f'"{peer.address}"', f'"<{name}>"')
        text = text.replace(f'"hostname":"{socket.gethostname()}"', '"hostname":"<hostname>"')
        text = text.replace(f'"tcp_port":{self._daemon.tcp_port},', '"tcp_port":<tcp>,')
        return text.replace(f'"http_port":{self._daemon.http_port},', '"http_port":<http>,')


class Daemon:
    """An nsqlookupd process on ports of its own choice. ``newer`` ones have keys that v1.3.0 has not."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, newer: bool) -> None:
        self.newer = newer
        self._process = subprocess.Popen(
            [
                *command,
                "--tcp-address=127.0.0.1:0",
                "--http-address=127.0.0.1:0",
                "--broadcast-address=127.0.0.1",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.tcp_port = self.http_port = 0
        self._last_words: deque[str] = deque(maxlen=200)
        self._listening_or_gone = threading.Event()
        self._reader = threading.Thread(target=self._read_log, name="daemon log", daemon=True)
        self._reader.start()
        self._listening_or_gone.wait(DEADLINE)
        if not (self.tcp_port and self.http_port):
            self.stop()
            raise RuntimeError(f"{command[0]} does not listen; it said:\n{self.last_words()}")

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self._last_words.append(line)
            if found := re.search(r"(TCP|HTTP): listening on 127\.0\.0\.1:(\d+)", line):
                setattr(self, f"{found[1].lower()}_port", int(found[2]))
                if self.tcp_port and self.http_port:
                    self._listening_or_gone.set()
        self._listening_or_gone.set()

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


class Replay:
    """Plays cases against one daemon, many at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, newer: bool) -> None:
        self._cleanup = ExitStack()
        self._daemon = Daemon(command, environment, newer=newer)
        self._cleanup.callback(self._daemon.stop)
        self._answers: dict[str, Future[Transcript]] = {}

    def start(self, cases: Iterable[Case]) -> None:
        pool = self._cleanup.enter_context(ThreadPoolExecutor(AT_THE_SAME_TIME, "case"))
        self._cleanup.callback(pool.shutdown, cancel_futures=True)
        for case in cases:
            self._answers[case.name] = pool.submit(_Performance(case, self._daemon).run)

    def answer(self, case: Case) -> Transcript:
        return self._answers[case.name].result()

    def log(self) -> str:
        return self._daemon.last_words()

    def stop(self) -> None:
        self._cleanup.close()
