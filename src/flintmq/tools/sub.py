"""`flintmq sub`: print the messages of a channel, and finish each after it was printed.

A message is finished only once its line has left this process, so `flintmq sub … | something` loses nothing when the
reader goes away or the disk is full: what was not written is given back to the channel. Lines are written in a thread:
a reader that waits (`| less`) holds up neither heartbeats nor ctrl-C, and its messages are TOUCHed meanwhile. Ctrl-C
stops the flow (CLS), prints what is already here and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import select
import signal
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from flintmq.client import Message
from flintmq.errors import ConnectError, ProtocolError
from flintmq.options import SECOND, parse_duration
from flintmq.tools import INTERRUPTED, Link, body_fields, link_flags, run, say_that_it_waits, split_source
from flintmq.tools._output import output_error
from flintmq.tools._show import parse_count
from flintmq.usage import Parser

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "print the messages of a channel"

# How long the broker may take to answer CLS.
_GOODBYE_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    topic, channel = split_source(parser, arguments.source)
    return run("sub", lambda: _subscribe(topic, channel, arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="flintmq sub", description="Print the messages of a channel, one per line, and finish them.")
    parser.add_argument("source", metavar="TOPIC/CHANNEL", help="both are created if they do not exist")
    parser.add_argument("-n", metavar="COUNT", dest="count", type=parse_count, help="end after COUNT messages")
    parser.add_argument(
        "--max-in-flight",
        metavar="N",
        type=parse_count,
        default=200,
        help="most messages in flight (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print id, timestamp, attempts and body as JSON")
    parser.add_argument(
        "--timeout",
        metavar="DURATION",
        type=_seconds,
        help="end when no message came for this time, such as 5s; with -n this is an error",
    )
    link_flags(parser)
    return parser


def _seconds(text: str) -> float:
    try:
        return parse_duration(text) / SECOND
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


async def _subscribe(topic: str, channel: str, arguments: argparse.Namespace) -> int:
    if (why := output_error()) is not None and why.errno == errno.EBADF:
        raise OSError("standard output is closed, there is nowhere to print to")
    link = await Link.open(arguments, subscribe=(topic, channel))
    try:
        printer = _Printer(link, arguments)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, printer.stop)
        say_that_it_waits(f"{topic}/{channel}", lambda: not printer.printed)
        await printer.run()
    finally:
        await link.close()
    if printer.failure is not None and not isinstance(printer.failure, BrokenPipeError):
        raise OSError(f"cannot print - {printer.failure}; what was not printed was given back to {topic}/{channel}")
    if not arguments.count or printer.printed >= arguments.count or printer.failure is not None:
        return 0
    if printer.timed_out:
        sys.stderr.write(f"flintmq sub: timed out after {printer.printed} of {arguments.count} messages\n")
        return 1
    return INTERRUPTED


class _Printer:
    """Prints what a subscribed link delivers until it is told to stop, has printed enough or waited too long."""

    def __init__(self, link: Link, arguments: argparse.Namespace) -> None:
        self.printed = 0
        self.timed_out = False
        self._link = link
        self._count: int | None = arguments.count
        self._as_json: bool = arguments.json
        self._timeout: float | None = arguments.timeout
        self._ready = min(arguments.max_in_flight, link.most_ready)
        if self._count:
            self._ready = min(self._ready, self._count)
        self._stopping = False
        self._closed = False
        #: Why nothing can be printed any more. After a broken pipe (`| head`) all is well.
        self.failure: OSError | None = None
        self._limit: asyncio.Timeout | None = None

    def stop(self) -> None:
        """Ask the broker for no more."""
        if self._stopping:
            return
        self._stopping = True
        self._link.say_goodbye()
        self._set_limit(_GOODBYE_SECONDS)

    async def run(self) -> None:
        self._link.set_ready(self._ready)
        seconds = self._timeout
        while not self._closed:
            try:
                await self._receive(seconds)
            except TimeoutError:
                if self.failure is not None:
                    return
                if self._stopping:
                    raise ConnectError(f"{self._link.address} does not answer") from None
                self.timed_out = True
                self.stop()
                seconds = _GOODBYE_SECONDS

    async def _receive(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds) as self._limit:
                while not self._closed:
                    await self._take(await self._link.news())
        finally:
            self._limit = None

    def _set_limit(self, seconds: float) -> None:
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + seconds)

    async def _take(self, news: list[Message | bytes | ProtocolError]) -> None:
        messages: list[Message] = []
        for each in news:
            if isinstance(each, Message):
                messages.append(each)
            elif isinstance(each, ProtocolError):
                if each.fatal:
                    raise each
                # Of a single command: the message will come again, the connection goes on.
                sys.stderr.write(f"flintmq sub: {each}\n")
            elif each == b"CLOSE_WAIT":
                self._closed = True
        if not messages:
            return
        if self.failure is None:
            output = _Output(messages, _json_line if self._as_json else _line)
            try:
                self.failure = await self._print(output)
            except asyncio.CancelledError:
                # Asked to end, and whoever reads our output does not.
                self.failure = TimeoutError(errno.ETIMEDOUT, "nobody reads the output")
                self._finish(output.take_printed())
                self._give_back(output.left + self._link.waiting())
                raise
            self._finish(output.take_printed())
            messages = output.left
        if self.failure is not None:
            self._give_back(messages)

    def _give_back(self, messages: list[Message]) -> None:
        """Or the broker would wait for their timeout. After CLS, or it would send them here again."""
        self.stop()
        for message in messages:
            message.requeue(0)

    async def _print(self, output: _Output) -> OSError | None:
        """Write the messages; return the error if that is impossible."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[OSError | None] = loop.create_future()
        # A daemon thread: when nobody reads, it must not keep the program from ending.
        arguments = (output, loop, written)
        threading.Thread(target=_write, args=arguments, name="output", daemon=True).start()
        if self._limit is not None and not self._stopping:
            # Only the broker's silence counts.
            self._limit.reschedule(None)
        while not written.done():
            await asyncio.wait([written], timeout=self._link.message_seconds / 3)
            if not written.done():
                self._finish(output.take_printed())
                for message in output.left + self._link.waiting():
                    message.touch()
        if self._timeout is not None and not self._stopping:
            self._set_limit(self._timeout)
        return written.result()

    def _finish(self, messages: list[Message]) -> None:
        self.printed += len(messages)
        if self._count and messages:
            # Never above what is still wanted: otherwise each FIN makes room for a message that we would give back.
            wanted = max(0, self._count - self.printed)
            if wanted < self._ready:
                self._ready = wanted
                self._link.set_ready(wanted)
        for message in messages:
            message.finish()
        if self._count and self.printed >= self._count:
            self.stop()


def _line(message: Message) -> bytes:
    return message.body + b"\n"


def _json_line(message: Message) -> bytes:
    line: dict[str, Any] = {
        "id": message.id.decode(),
        "timestamp": message.timestamp,
        "attempts": message.attempts,
    }
    return msgspec.json.encode(line | body_fields(message.body)) + b"\n"


class _Output:
    """Lines that are being written, and how far that is."""

    def __init__(self, messages: list[Message], line: Callable[[Message], bytes]) -> None:
        self._messages = messages
        lines = list(map(line, messages))
        self.data = b"".join(lines)
        self._ends = list(accumulate(map(len, lines)))
        #: Bytes that are written; a thread counts them.
        self.written = 0
        self._taken = 0

    def take_printed(self) -> list[Message]:
        """Those whose whole line was written since the last call."""
        first, self._taken = self._taken, bisect_right(self._ends, self.written)
        return self._messages[first : self._taken]

    @property
    def left(self) -> list[Message]:
        """Those that ``take_printed`` has not returned yet."""
        return self._messages[self._taken :]


def _write(output: _Output, loop: asyncio.AbstractEventLoop, written: asyncio.Future[OSError | None]) -> None:
    """Write all of it to standard output, then tell; runs in a thread."""
    failure: OSError | None = None
    # Not through sys.stdout, which writes only a part, and says nothing, where PYTHONUNBUFFERED is set.
    descriptor = sys.stdout.fileno()
    rest = memoryview(output.data)
    try:
        while output.written < len(rest):
            try:
                # In pieces that a pipe takes whole or not at all: a long write returns only when everything was read.
                output.written += os.write(descriptor, rest[output.written : output.written + select.PIPE_BUF])
            except BlockingIOError:
                # Another program made the terminal or the pipe that we share non-blocking.
                select.select([], [descriptor], [])
    except OSError as exc:
        failure = exc

    def tell() -> None:
        if not written.done():
            written.set_result(failure)

    with contextlib.suppress(RuntimeError):  # The loop has ended, and nobody waits any more.
        loop.call_soon_threadsafe(tell)
