"""The Python drivers' side of the line protocol (README.md): JSON lines in on stdin, JSON lines out on stdout.

Holds what the drivers share: reading commands, writing events, numbering deliveries, and turning whatever a client
library logs as an error into an event, so that no error of a library goes unseen. How commands are waited for
depends on the library's event loop; `serve_asyncio` is for those on asyncio, the gevent driver brings its own loop.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

# A body of 900 kB is a line of 1.2 MB.
LONGEST_LINE = 16 << 20


def write_event(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


class ErrorsToEvents(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        write_event("error", text=self.format(record))


def say_hello(*lacks: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger().addHandler(ErrorsToEvents())
    write_event("hello", lacks=lacks)


class Deliveries:
    """Messages as the library gave them to us, under the numbers by which the test answers them."""

    def __init__(self) -> None:
        self._messages: dict[int, Any] = {}
        self._last = 0

    def add(self, channel: str, message: Any) -> None:
        """All three libraries happen to use the same names for what a message holds."""
        self._last += 1
        self._messages[self._last] = message
        message_id = message.id if isinstance(message.id, str) else message.id.decode()
        write_event(
            "message",
            delivery=self._last,
            channel=channel,
            id=message_id,
            timestamp=str(message.timestamp),
            attempts=message.attempts,
            body=base64.b64encode(message.body).decode(),
        )

    def get(self, delivery: int) -> Any:
        return self._messages[delivery]

    def take(self, delivery: int) -> Any:
        return self._messages.pop(delivery)


@dataclass
class Command:
    number: int
    name: str
    arguments: dict[str, Any]

    @classmethod
    def from_line(cls, line: bytes) -> Command:
        arguments = json.loads(line)
        number, name = arguments.pop("command"), arguments.pop("do")
        if "body" in arguments:
            arguments["body"] = base64.b64decode(arguments["body"])
        if "bodies" in arguments:
            arguments["bodies"] = [base64.b64decode(body) for body in arguments["bodies"]]
        return cls(number, name, arguments)

    def done(self) -> None:
        write_event("done", command=self.number)

    def failed(self, exc: Exception) -> None:
        write_event("failed", command=self.number, error=repr(exc))


async def serve_asyncio(driver: object) -> None:
    """Run the driver's coroutine of the same name for each command, one after the other, until stdin ends."""
    commands = asyncio.StreamReader(limit=LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin.buffer)
    while line := await commands.readline():
        command = Command.from_line(line)
        perform: Callable[..., Awaitable[None]] = getattr(driver, command.name)
        try:
            await perform(**command.arguments)
        except Exception as exc:
            command.failed(exc)
        else:
            command.done()
