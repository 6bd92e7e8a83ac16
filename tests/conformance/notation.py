"""The notation of a case: who sends what, and which frames answer it.

A case is a list of steps over named connections. Every connection begins with the magic, unless its first step says
otherwise, and every one that is still open at the end is asked one last thing, so that a frame too many is noticed.
A frame is one line of text, in which everything that differs from run to run is a placeholder, the same in what is
sent, expected and recorded:

``<topic>``  a topic of this case alone, always TOPIC_LENGTH bytes long
``<id1>``    the id of the first message the case saw, ``<id2>`` of the second, …
``<ts1>``    the timestamp that came with ``<id1>``: the same on every delivery of that message
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

TOPIC_LENGTH = 10

#: Per connection the frames as lines of text, and last one word: ``closed`` (by the daemon), ``open`` (it answered to
#: the end), ``hung up`` (by the case), ``silent`` (an answer was due and none came) or ``no TLS`` (no handshake).
Transcript = dict[str, list[str]]

# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """Open the connection without the magic; any other first step sends the magic by itself."""

    peer: str


@dataclass(frozen=True)
class Send:
    peer: str
    data: bytes


@dataclass(frozen=True)
class Gets:
    """Read as many frames as are listed here."""

    peer: str
    frames: tuple[str, ...]


@dataclass(frozen=True)
class Closed:
    """Read to the end of the stream; frames on the way there are written down."""

    peer: str


@dataclass(frozen=True)
class EndInput:
    """Send nothing more, but keep reading."""

    peer: str


@dataclass(frozen=True)
class HangUp:
    peer: str


@dataclass(frozen=True)
class Deflate:
    """From here on both directions are raw DEFLATE."""

    peer: str


@dataclass(frozen=True)
class Encrypt:
    """From here on both directions are TLS, whoever the server says it is."""

    peer: str


@dataclass(frozen=True)
class Pass:
    """Let time pass between two stimuli, where the distance of two deadlines is what the case is about."""

    seconds: float


Step = Connect | Send | Gets | Closed | EndInput | HangUp | Deflate | Encrypt | Pass


@dataclass(frozen=True)
class Ours:
    """Where our broker answers differently from the recording on purpose: the lines that stand instead, and why."""

    because: str
    lines: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Case:
    name: str
    steps: tuple[Step, ...]
    flags: tuple[str, ...] = ()
    #: Heartbeats are written down only where they are the subject: elsewhere they come when they come.
    heartbeats: bool = False
    #: Waits for some time to pass; such cases are started first, so that their waits overlap.
    waits: bool = False
    ours: Ours | None = None

    def peers(self) -> list[str]:
        return list(dict.fromkeys(step.peer for step in self.steps if not isinstance(step, Pass)))

    def expected(self) -> Transcript:
        """The transcript that the case itself foresees."""
        transcript: Transcript = {peer: [] for peer in self.peers()}
        ending = dict.fromkeys(transcript, "open")
        for step in self.steps:
            match step:
                case Gets(peer, frames):
                    transcript[peer] += frames
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

OK = "response: OK"
CLOSE_WAIT = "response: CLOSE_WAIT"
HEARTBEAT = "response: _heartbeat_"


def describe_body(body: bytes) -> str:
    if len(body) <= 200:
        return body.decode("latin-1")
    return f"{len(body)} bytes, sha256 {hashlib.sha256(body).hexdigest()}"


def message(number: int, body: bytes, attempts: int = 1) -> str:
    """The line of a message frame: the ``number``-th message of the case."""
    return f"message: <id{number}> <ts{number}> attempts={attempts} {describe_body(body)}"


def error(text: str) -> str:
    return "error: " + text


def size(number: int) -> bytes:
    """A length on the wire: four bytes, signed."""
    return number.to_bytes(4, "big", signed=True)


def sized(body: bytes) -> bytes:
    return size(len(body)) + body


def pub(body: bytes, topic: bytes = b"<topic>") -> bytes:
    return b"PUB " + topic + b"\n" + sized(body)


def dpub(milliseconds: bytes, body: bytes) -> bytes:
    return b"DPUB <topic> " + milliseconds + b"\n" + sized(body)


def batch(*bodies: bytes) -> bytes:
    """The body of an MPUB, without its own length."""
    return size(len(bodies)) + b"".join(sized(body) for body in bodies)


def mpub(*bodies: bytes) -> bytes:
    return b"MPUB <topic>\n" + sized(batch(*bodies))


def identify(body: str | bytes = "", /, **fields: object) -> bytes:
    """IDENTIFY with a literal body, or with these fields."""
    text = body or json.dumps(fields)
    return b"IDENTIFY\n" + sized(text.encode() if isinstance(text, str) else text)


def negotiate(**fields: object) -> bytes:
    return identify(**{"feature_negotiation": True, **fields})


def negotiated(**changed: object) -> str:
    """The answer of v1.3.0 to a negotiating IDENTIFY; keys in its order."""
    settings: dict[str, object] = {
        "max_rdy_count": 2500,
        "version": "1.3.0",
        "max_msg_timeout": 900000,
        "msg_timeout": 60000,
        "tls_v1": False,
        "deflate": False,
        "deflate_level": 6,
        "max_deflate_level": 6,
        "snappy": False,
        "sample_rate": 0,
        "auth_required": False,
        "output_buffer_size": 16384,
        "output_buffer_timeout": 250,
    }
    assert changed.keys() <= settings.keys()
    return "response: " + json.dumps({**settings, **changed}, separators=(",", ":"))


SUB = b"SUB <topic> ch\n"


@dataclass(frozen=True)
class Speaker:
    """A connection of a case, by name; its methods are steps."""

    name: str

    def connects(self) -> list[Step]:
        return [Connect(self.name)]

    def sends(self, *data: bytes) -> list[Step]:
        return [Send(self.name, piece) for piece in data]

    def gets(self, *frames: str) -> list[Step]:
        return [Gets(self.name, frames)]

    def asks(self, data: bytes, *answers: str) -> list[Step]:
        return [*self.sends(data), *self.gets(*answers)]

    def is_refused(self, data: bytes, text: str) -> list[Step]:
        """A fatal error: the frame, then the close."""
        return [*self.asks(data, error(text)), *self.is_closed()]

    def is_closed(self) -> list[Step]:
        return [Closed(self.name)]

    def ends_input(self) -> list[Step]:
        return [EndInput(self.name)]

    def hangs_up(self) -> list[Step]:
        return [HangUp(self.name)]

    def deflates(self) -> list[Step]:
        return [Deflate(self.name)]

    def encrypts(self) -> list[Step]:
        return [Encrypt(self.name)]

    def subscribes(self, rdy: int | None = None) -> list[Step]:
        return [*self.asks(SUB, OK), *(self.sends(b"RDY %d\n" % rdy) if rdy is not None else [])]

    def is_heard(self) -> list[Step]:
        """Whatever was sent so far has been carried out: commands of one connection run one after another."""
        return self.asks(pub(b"x", b"<topic>_other"), OK)

    def publishes(self, *bodies: bytes) -> list[Step]:
        return [step for body in bodies for step in self.asks(pub(body), OK)]


a, b, c = Speaker("a"), Speaker("b"), Speaker("c")


def time_passes(seconds: float) -> list[Step]:
    return [Pass(seconds)]


def case(
    name: str,
    *steps: list[Step],
    flags: tuple[str, ...] = (),
    heartbeats: bool = False,
    waits: bool = False,
    ours: Ours | None = None,
) -> Case:
    return Case(name, tuple(step for group in steps for step in group), flags, heartbeats, waits, ours)


def answered(name: str, data: bytes, *answers: str, flags: tuple[str, ...] = ()) -> Case:
    """A case of one question and its answers."""
    return case(name, a.asks(data, *answers), flags=flags)


def refused(name: str, data: bytes, text: str, *, flags: tuple[str, ...] = ()) -> Case:
    """A case of one question and a fatal error."""
    return case(name, a.is_refused(data, text), flags=flags)


def refused_subscriber(name: str, data: bytes, text: str, *, flags: tuple[str, ...] = ()) -> Case:
    return case(name, a.subscribes(), a.is_refused(data, text), flags=flags)


def cut_short(name: str, data: bytes, text: str) -> Case:
    """A case of a command that the end of input cuts off."""
    return case(name, a.sends(data), a.ends_input(), a.is_refused(b"", text))


# One daemon runs per distinct set of flags, so that there are few.
SMALL_LIMITS = (
    "--max-msg-size=100",
    "--max-body-size=200",
    "--max-rdy-count=5",
    "--max-req-timeout=1s",
    "--max-msg-timeout=6s",
    "--msg-timeout=4s",
    "--max-heartbeat-interval=10s",
    "--max-output-buffer-size=1024",
    "--min-output-buffer-timeout=50ms",
    "--max-output-buffer-timeout=1s",
    "--output-buffer-timeout=100ms",
    "--max-deflate-level=4",
    "--max-channel-consumers=2",
)
NO_COMPRESSION = ("--snappy=false", "--deflate=false")
ONLY_DEFLATE = ("--snappy=false",)
NO_MEMORY_QUEUE = ("--mem-queue-size=0",)
#: The daemon finds a certificate in these files.
TLS_REQUIRED = ("--tls-cert=<cert>", "--tls-key=<key>", "--tls-required=tcp-https", "--https-address=127.0.0.1:0")
#: Nobody listens on the port of the discard protocol.
AUTH_SERVER_GONE = ("--auth-http-address=127.0.0.1:9",)

NO_SUCH_ID = b"0123456789abcdef"
