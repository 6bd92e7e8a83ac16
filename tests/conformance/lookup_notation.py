"""The notation of a case for nsqlookupd: who sends what over TCP, what is asked over HTTP, and the lines that answer.

Connections are named, as in ``notation``. Every one begins with the magic unless its first step is Connect, and every
one that is still open at the end is asked one last thing, so that an answer too many is noticed. All requests over HTTP
of a case are written down under the name ``http``, one line each: status, type of the content, NSQ's own header,
``Allow`` or ``Location``, body; what is not there is ``-``.

What differs from run to run is a placeholder, the same in what is sent, expected and recorded:

``<topic>``      a topic of this case alone; ``<topic>2`` … are others
``<node>``       the broadcast address of the nsqds of this case
``<a>``          where connection ``a`` comes from
``<hostname>``, ``<tcp>``, ``<http>``   of the daemon
``<time>``       any moment in nanoseconds

Many cases share a daemon. So answers that list everything are cut down to the topics and nodes of the case, and lists,
in which the Go daemon has no order, are sorted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from .notation import Closed, Connect, EndInput, Gets, HangUp, Ours, Send, Transcript, sized

HTTP = "http"


@dataclass(frozen=True)
class Ask:
    """A request over HTTP and the line that answers it. With ``until`` it is repeated until that line comes."""

    method: str
    target: str
    line: str
    body: bytes = b""
    until: bool = False


Step = Connect | Send | Gets | Closed | EndInput | HangUp | Ask


@dataclass(frozen=True)
class Case:
    name: str
    steps: tuple[Step, ...]
    ours: Ours | None = None

    def peers(self) -> list[str]:
        return list(dict.fromkeys(HTTP if isinstance(step, Ask) else step.peer for step in self.steps))

    def expected(self) -> Transcript:
        """The transcript that the case itself foresees."""
        transcript: Transcript = {peer: [] for peer in self.peers()}
        ending = {peer: "open" for peer in transcript if peer != HTTP}
        for step in self.steps:
            match step:
                case Ask():
                    transcript[HTTP].append(step.line)
                case Gets(peer, lines):
                    transcript[peer] += lines
                case Closed(peer):
                    ending[peer] = "closed"
                case HangUp(peer):
                    ending[peer] = "hung up"
                case _:
                    pass
        for peer, word in ending.items():
            transcript[peer].append(word)
        return transcript


# --- words to write cases with ----------------------------------------------------------------------------------------

JSON = "application/json; charset=utf-8"
DONE = "200 - nsq; version=1.0 - "
OK = "OK"
#: The answer to IDENTIFY; keys in the order of v1.3.0.
INFO = '{"broadcast_address":"127.0.0.1","hostname":"<hostname>","http_port":<http>,"tcp_port":<tcp>,"version":"1.3.0"}'

IDENTITY: dict[str, object] = {
    "broadcast_address": "<node>",
    "hostname": "h",
    "http_port": 4151,
    "tcp_port": 4150,
    "version": "1.3.0",
}


def identify(body: bytes | None = None, /, **changed: object) -> bytes:
    """IDENTIFY with a literal body, or with the usual fields, some of them changed; None leaves one out."""
    if body is None:
        fields = {key: value for key, value in {**IDENTITY, **changed}.items() if value is not None}
        body = json.dumps(fields).encode()
    return b"IDENTIFY\n" + sized(body)


def answered(value: object, status: int = 200) -> str:
    return f"{status} {JSON} nsq; version=1.0 - {json.dumps(value, separators=(',', ':'))}"


def refused(status: int, message: str) -> str:
    return answered({"message": message}, status)


def peer(connection: str, **changed: object) -> dict[str, object]:
    """An nsqd as ``/lookup`` shows it; keys in the order of v1.3.0."""
    return {
        "remote_address": f"<{connection}>",
        "hostname": "h",
        "broadcast_address": "<node>",
        "tcp_port": 4150,
        "http_port": 4151,
        "version": "1.3.0",
        **changed,
    }


def node(connection: str, **topics: bool) -> dict[str, object]:
    """An nsqd as ``/nodes`` shows it: every topic, ``t`` for ``<topic>``, and whether it has a tombstone."""
    names = [f"<topic>{name[1:]}" for name in topics]
    return {**peer(connection), "tombstones": list(topics.values()), "topics": names}


def record(connection: str, tombstoned_at: str = "-6795364578871345152") -> dict[str, object]:
    """An nsqd as ``/debug`` shows it."""
    return {
        "broadcast_address": "<node>",
        "hostname": "h",
        "http_port": 4151,
        "id": f"<{connection}>",
        "last_update": "<time>",
        "tcp_port": 4150,
        "tombstoned": tombstoned_at == "<time>",
        "tombstoned_at": tombstoned_at,
        "version": "1.3.0",
    }


@dataclass(frozen=True)
class Speaker:
    """A connection of a case, by name; its methods are steps."""

    name: str

    def connects(self) -> list[Step]:
        return [Connect(self.name)]

    def sends(self, *data: bytes) -> list[Step]:
        return [Send(self.name, piece) for piece in data]

    def asks(self, data: bytes, *answers: str) -> list[Step]:
        return [Send(self.name, data), Gets(self.name, answers)]

    def identifies(self, **changed: object) -> list[Step]:
        return self.asks(identify(**changed), INFO)

    def registers(self, *names: str) -> list[Step]:
        return [step for name in names for step in self.asks(f"REGISTER {name}\n".encode(), OK)]

    def unregisters(self, *names: str) -> list[Step]:
        return [step for name in names for step in self.asks(f"UNREGISTER {name}\n".encode(), OK)]

    def is_refused(self, data: bytes, text: str) -> list[Step]:
        """An error, then the close."""
        return [*self.asks(data, text), Closed(self.name)]

    def is_closed(self) -> list[Step]:
        return [Closed(self.name)]

    def ends_input(self) -> list[Step]:
        return [EndInput(self.name)]

    def hangs_up(self) -> list[Step]:
        return [HangUp(self.name)]


a, b = Speaker("a"), Speaker("b")


def get(target: str, line: str) -> list[Step]:
    return [Ask("GET", target, line)]


def post(target: str, line: str = DONE, body: bytes = b"") -> list[Step]:
    return [Ask("POST", target, line, body)]


def until(target: str, line: str) -> list[Step]:
    """Ask again and again: what is waited for has been set in motion by another connection."""
    return [Ask("GET", target, line, until=True)]


def case(name: str, *steps: list[Step], ours: Ours | None = None) -> Case:
    return Case(name, tuple(step for group in steps for step in group), ours)
