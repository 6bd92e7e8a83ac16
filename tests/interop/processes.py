"""The two kinds of process an interop test talks to: a broker, and a client library inside its driver.

Both are real and run outside the test's own process. A broker is only an address and a log. A Client speaks the
line protocol of README.md with a driver: commands go in, answers and messages come out, and the messages that the
test has not answered yet are kept in `in_flight`. Every wait here ends at a deadline and then says what was seen.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import queue
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from support.peers import PEERS

HERE = Path(__file__).resolve().parent

# Long enough for a busy machine, and for the Go daemon's habit of looking at a new channel only after 5 seconds.
DEADLINE = 30.0
LISTENING = re.compile(r"TCP: listening on (\S+:\d+)")


class ProcessFailed(AssertionError):
    """A broker or driver did not do what was asked in time, died, or reported an error of its own."""


class Output:
    """The lines a process writes to one pipe, read by a thread so that the process never blocks on a full pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=60)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for raw in self._pipe:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            self._tail.append(line[:400])
            self._lines.put(line)
        self._lines.put(None)

    def next_line(self, timeout: float) -> str | None:
        """The next line, or None when the pipe is closed. Raises queue.Empty when there is none in time."""
        return self._lines.get(timeout=max(timeout, 0.001))

    def tail(self) -> str:
        return "\n".join(self._tail)

    def close(self) -> None:
        self._thread.join(DEADLINE)
        self._pipe.close()


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(DEADLINE)


@dataclass(frozen=True)
class BrokerKind:
    name: str
    command: list[str]
    # Why it cannot run here, or "" when it can.
    missing: str = ""
    # The config file it is started with.
    config: str = ""


# Everything that NSQ does not have is switched on for every topic and channel: none of it may show.
EVERYTHING = """
requeue_on_disconnect = true

[topic."*"]
durability = "fsync"
max-messages = 1000000
max-bytes = 1000000000
publish-rate = 1000000
max-defer = "2h"
retain-bytes = 100000000
retain-age = "24h"
ttl = "24h"
ttl-action = "dead-letter"
key-count = 1000
key-age = "1h"
reader-age = "1h"
reader-bytes = 1000000

[topic."*".channel."*"]
max-defer = "2h"
delivery-rate = 1000000
max-attempts = 50
"""


def broker_kind(name: str) -> BrokerKind:
    if name == "go":
        binary = PEERS / "bin" / "nsqd"
        missing = "" if os.access(binary, os.X_OK) else f"no Go nsqd at {binary}: run scripts/peers"
        return BrokerKind(name, [str(binary)], missing)
    missing = "" if importable("flintmq.cli") else "flintmq.cli cannot be imported"
    config = EVERYTHING if name == "flintmq-everything" else ""
    return BrokerKind(name, [sys.executable, "-m", "flintmq", "nsqd"], missing, config)


def importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class Broker:
    """A running broker with a data path of its own."""

    def __init__(self, kind: BrokerKind, data_path: Path, *flags: str) -> None:
        command = [
            *kind.command,
            "--tcp-address=127.0.0.1:0",
            "--http-address=127.0.0.1:0",
            f"--data-path={data_path}",
            *flags,
        ]
        if kind.config:
            config = data_path.with_suffix(".toml")
            config.write_text(kind.config)
            command.append(f"--config={config}")
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert self._process.stderr is not None
        self._log = Output(self._process.stderr)
        try:
            self.address = self._wait_for_address(command)
        except BaseException:
            self.close()
            raise

    def _wait_for_address(self, command: list[str]) -> str:
        give_up = time.monotonic() + DEADLINE
        while True:
            try:
                line = self._log.next_line(give_up - time.monotonic())
            except queue.Empty:
                raise ProcessFailed(f"{command} named no TCP address:\n{self._log.tail()}") from None
            if line is None:
                raise ProcessFailed(f"{command} ended before it listened:\n{self._log.tail()}")
            if found := LISTENING.search(line):
                return found[1]

    def create_channel(self, topic: str, channel: str) -> None:
        """Make the channel exist before anything is published, whenever the client library gets round to its SUB."""
        host, port = self.address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
            connection.sendall(f"  V2SUB {topic} {channel}\n".encode())
            with connection.makefile("rb") as answers:
                size, frame_type = struct.unpack(">ii", answers.read(8))
                answer = answers.read(size - 4)
        if (frame_type, answer) != (0, b"OK"):
            raise ProcessFailed(f"SUB {topic} {channel} was answered {frame_type} {answer!r}")

    def log_tail(self) -> str:
        return self._log.tail()

    def close(self) -> None:
        end(self._process)
        self._log.close()


@dataclass(frozen=True)
class ClientKind:
    name: str
    command: list[str]
    missing: str = ""
    environment: tuple[tuple[str, str], ...] = ()


def python_client(name: str, module: str) -> ClientKind:
    missing = "" if importable(module) else f"{name} is not installed: run scripts/peers"
    return ClientKind(name, [sys.executable, str(HERE / "drivers" / f"{name}_driver.py")], missing)


def nsqjs_client() -> ClientKind:
    node, modules = shutil.which("node"), PEERS / "nsqjs" / "node_modules"
    missing = "" if node else "no node"
    if node and not (modules / "nsqjs").is_dir():
        missing = f"no nsqjs in {modules}: run scripts/peers"
    return ClientKind(
        "nsqjs", [node or "node", str(HERE / "nsqjs" / "driver.js")], missing, (("NODE_PATH", str(modules)),)
    )


def gonsq_client() -> ClientKind:
    binary = PEERS / "bin" / "gonsq-driver"
    missing = "" if os.access(binary, os.X_OK) else f"no go-nsq driver at {binary}: run scripts/peers"
    return ClientKind("gonsq", [str(binary)], missing)


CLIENT_KINDS: dict[str, Callable[[], ClientKind]] = {
    "pynsq": lambda: python_client("pynsq", "nsq"),
    "gnsq": lambda: python_client("gnsq", "gnsq"),
    "ansq": lambda: python_client("ansq", "ansq"),
    "nsqjs": nsqjs_client,
    "gonsq": gonsq_client,
}


@dataclass(frozen=True)
class Delivery:
    """One arrival of a message at a consumer. The same message requeued is another delivery with the same id."""

    number: int
    channel: str
    id: str
    timestamp: int
    attempts: int
    body: bytes
    arrived: float


class Client:
    """A client library in its driver process, connected to one broker."""

    def __init__(self, kind: ClientKind, broker_address: str) -> None:
        self.name = kind.name
        self._process = subprocess.Popen(
            [*kind.command, broker_address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **dict(kind.environment)},
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._commands = self._process.stdin
        self._events = Output(self._process.stdout)
        self._log = Output(self._process.stderr)
        self._command_number = 0
        self._waiting: deque[Delivery] = deque()
        # Deliveries the test has seen and not yet finished or requeued.
        self.in_flight: dict[int, Delivery] = {}

        try:
            hello = self._answer_event("start")
        except BaseException:
            self.close()
            raise
        # What this library has no call for, so that a test can go round it ("msg_timeout": gnsq).
        self.lacks: set[str] = set(hello["lacks"])

    # Publishing: returns when the broker has answered OK.

    def pub(self, topic: str, body: bytes) -> None:
        self._call("pub", topic=topic, body=encoded(body))

    def mpub(self, topic: str, bodies: list[bytes]) -> None:
        self._call("mpub", topic=topic, bodies=[encoded(body) for body in bodies])

    def dpub(self, topic: str, body: bytes, delay_ms: int) -> None:
        self._call("dpub", topic=topic, body=encoded(body), delay_ms=delay_ms)

    # Consuming.

    def subscribe(self, topic: str, channel: str, *, max_in_flight: int = 1, msg_timeout_ms: int | None = None) -> None:
        """Start a consumer. The library may still be connecting when this returns."""
        if "msg_timeout" in self.lacks:
            msg_timeout_ms = None
        self._call(
            "subscribe", topic=topic, channel=channel, max_in_flight=max_in_flight, msg_timeout_ms=msg_timeout_ms
        )

    def next_message(self, timeout: float = DEADLINE) -> Delivery:
        delivery = self.poll_message(timeout)
        if delivery is None:
            raise ProcessFailed(
                f"{self.name}: no message in {timeout} s, {len(self.in_flight)} in flight{self._said()}"
            )
        return delivery

    def poll_message(self, timeout: float) -> Delivery | None:
        """The next message, or None when there is none in time."""
        give_up = time.monotonic() + timeout
        while not self._waiting:
            try:
                event = self._read_event(give_up)
            except queue.Empty:
                return None
            if event is not None:
                raise ProcessFailed(f"{self.name}: unexpected event {event}{self._said()}")
        delivery = self._waiting.popleft()
        self.in_flight[delivery.number] = delivery
        return delivery

    def fin(self, delivery: Delivery) -> None:
        self._answer("fin", delivery)

    def req(self, delivery: Delivery, delay_ms: int = 0) -> None:
        self._answer("req", delivery, delay_ms=delay_ms)

    def touch(self, delivery: Delivery) -> None:
        self._call("touch", delivery=delivery.number)

    def forget(self, delivery: Delivery) -> None:
        """The broker took it back by timeout: it is no longer ours to answer."""
        del self.in_flight[delivery.number]

    def close(self) -> None:
        self._commands.close()
        end(self._process)
        self._events.close()
        self._log.close()

    # The line protocol.

    def _answer(self, command: str, delivery: Delivery, **arguments: Any) -> None:
        del self.in_flight[delivery.number]
        self._call(command, delivery=delivery.number, **arguments)

    def _call(self, command: str, **arguments: Any) -> None:
        self._command_number += 1
        line = json.dumps({"command": self._command_number, "do": command, **arguments})
        try:
            self._commands.write(line.encode() + b"\n")
            self._commands.flush()
        except BrokenPipeError:
            raise ProcessFailed(f"{self.name}: the driver has ended{self._said()}") from None
        event = self._answer_event(command)
        if event["event"] != "done" or event["command"] != self._command_number:
            raise ProcessFailed(f"{self.name}: {command} failed: {event}{self._said()}")

    def _answer_event(self, command: str) -> dict[str, Any]:
        give_up = time.monotonic() + DEADLINE
        try:
            while (event := self._read_event(give_up)) is None:
                pass
        except queue.Empty:
            raise ProcessFailed(f"{self.name}: {command} was not done in {DEADLINE} s{self._said()}") from None
        return event

    def _read_event(self, give_up: float) -> dict[str, Any] | None:
        """Read one event: a message is put with those waiting for the test (None), anything else is returned."""
        line = self._events.next_line(give_up - time.monotonic())
        if line is None:
            raise ProcessFailed(f"{self.name}: the driver has ended{self._said()}")
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "error":
            raise ProcessFailed(f"{self.name}: {event['text']}{self._said()}")
        if event["event"] != "message":
            return event
        self._waiting.append(
            Delivery(
                number=event["delivery"],
                channel=event["channel"],
                id=event["id"],
                timestamp=int(event["timestamp"]),
                attempts=event["attempts"],
                body=base64.b64decode(event["body"]),
                arrived=time.monotonic(),
            )
        )
        return None

    def _said(self) -> str:
        return f"\ndriver's log:\n{self._log.tail()}"


def encoded(body: bytes) -> str:
    return base64.b64encode(body).decode()
