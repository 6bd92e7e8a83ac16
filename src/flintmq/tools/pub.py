"""`flintmq pub`: publish messages given as arguments, or the lines of a file or of standard input.

Lines that are there together go out together, in MPUBs of bounded size, a few of them under way at a time; a line typed
at a terminal goes out at once. Only what the broker has confirmed is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

import msgspec

from flintmq.errors import OptionError, ProtocolError
from flintmq.options import MILLISECOND, parse_duration
from flintmq.protocol import wire
from flintmq.tools import Link, check_name, link_flags, run
from flintmq.usage import Parser

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "publish messages"

# Well within the broker's default limits (5 MiB a command), and small enough to be confirmed often.
_BATCH_BYTES = 512 * 1024
_BATCH_MESSAGES = 500
_MESSAGES_UNDER_WAY = 8 * _BATCH_MESSAGES
_BYTES_UNDER_WAY = 8 * _BATCH_BYTES
_CHUNK_BYTES = 256 * 1024
# A longer line is refused before it fills the memory; a broker takes 1 MiB by default.
_LONGEST_LINE = 64 << 20
# With --rate: how far sending may lag behind and be made up for.
_CATCH_UP_SECONDS = 0.1


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.message and arguments.file:
        _parser().error("messages and --file exclude each other")
    check_name(_parser(), arguments.topic, "topic")
    if not all(arguments.message):
        _parser().error("a message cannot be empty")
    publisher = _Publisher(arguments.topic.encode(), arguments.defer, arguments.rate)
    status = run("pub", lambda: _publish(publisher, arguments))
    if status == 0 or publisher.messages or publisher.unconfirmed:
        _print_summary(publisher, arguments.topic, as_json=arguments.json)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="flintmq pub",
        description="Publish messages: the arguments, or each line of a file or of standard input.",
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("message", metavar="MESSAGE", nargs="*", type=os.fsencode, default=[])
    parser.add_argument(
        "--file", metavar="FILE", help="publish each line of this file (-: of standard input); empty lines are skipped"
    )
    parser.add_argument(
        "--defer", metavar="DURATION", type=_milliseconds, default=0, help="deliver only after this time, such as 10s"
    )
    parser.add_argument("--rate", metavar="N", type=_rate, default=0.0, help="publish at most N messages a second")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    link_flags(parser)
    return parser


def _milliseconds(text: str) -> int:
    try:
        milliseconds = parse_duration(text) // MILLISECOND
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    if milliseconds < 0:
        raise argparse.ArgumentTypeError("--defer must not be negative")
    return milliseconds


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is not a number above 0')
    return rate


async def _publish(publisher: _Publisher, arguments: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        if arguments.file and arguments.file != "-":
            # Opened before connecting: a wrong name should not look like a missing broker.
            descriptor = stack.enter_context(open(arguments.file, "rb", buffering=0)).fileno()  # noqa: ASYNC230
        elif arguments.message:
            descriptor = -1
        else:
            if sys.stdin is None:
                raise OptionError("standard input is closed: give messages as arguments, or --file")
            descriptor = sys.stdin.fileno()
            if os.isatty(descriptor):
                sys.stderr.write("reading messages from the terminal, one per line; end with ctrl-D\n")
        publisher.link = link = await Link.open(arguments)
        try:
            if arguments.message:
                await publisher.send_all(arguments.message)
                await publisher.settle()
            else:
                report = stack.enter_context(_progress(descriptor))
                await _publish_lines(publisher, descriptor, report)
        finally:
            await link.close()
    return 0


async def _publish_lines(publisher: _Publisher, descriptor: int, report: Callable[[int], None]) -> None:
    rest: list[bytes] = []  # the pieces of a line whose end has not come yet
    size = 0  # of them
    number = 1  # of the line
    async for chunk, is_last_for_now in _chunks(descriptor):
        report(len(chunk))
        *lines, tail = chunk.split(b"\n")
        if lines:
            rest.append(lines[0])
            lines[0] = b"".join(rest)
            rest = []
            size = 0
            number += len(lines)
        rest.append(tail)
        size += len(tail)
        if size > _LONGEST_LINE:
            await publisher.send_all(line for line in lines if line)
            await publisher.settle()
            raise OptionError(f"line {number} is longer than {_LONGEST_LINE >> 20} MiB: no broker takes such a message")
        await publisher.send_all(line for line in lines if line)
        if is_last_for_now:
            # The next line may be minutes away: do not keep what the broker says about these until then.
            await publisher.settle()
    await publisher.send_all(line for line in [b"".join(rest)] if line)
    await publisher.settle()


async def _chunks(descriptor: int) -> AsyncIterator[tuple[bytes, bool]]:
    """What can be read, as it comes, each with whether nothing more is at hand.

    Read in a thread, because neither files nor terminals can be polled everywhere. A daemon thread, and `os.read`
    rather than `sys.stdin`, because ctrl-C must end the program although the thread still waits for a line.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue(maxsize=4)

    def read() -> None:
        chunk: bytes | OSError = b"."
        # RuntimeError and CancelledError: the loop has ended and nobody wants the rest.
        with contextlib.suppress(RuntimeError, asyncio.CancelledError):
            while chunk and not isinstance(chunk, OSError):
                try:
                    chunk = os.read(descriptor, _CHUNK_BYTES)
                except OSError as exc:
                    chunk = exc
                asyncio.run_coroutine_threadsafe(queue.put(chunk), loop).result()

    threading.Thread(target=read, name="input", daemon=True).start()
    while chunk := await queue.get():
        if isinstance(chunk, OSError):
            raise chunk
        yield chunk, queue.empty()


class _Publisher:
    """Sends batches and keeps count of what the broker has confirmed."""

    def __init__(self, topic: bytes, defer_milliseconds: int, rate: float) -> None:
        self.link: Link | None = None
        #: Confirmed by the broker.
        self.messages = 0
        self.bytes = 0
        self.started = time.monotonic()
        self._topic = topic
        self._defer = b"%d" % defer_milliseconds if defer_milliseconds else b""
        self._rate = rate
        self._batch_messages = _BATCH_MESSAGES
        if rate:
            # Small batches look like an even flow: ten a second, at least.
            self._batch_messages = max(1, min(_BATCH_MESSAGES, int(rate / 10)))
        #: When the next batch may go.
        self._due = self.started
        # Messages and bytes of each command whose answer is still to come.
        self._under_way: deque[tuple[int, int]] = deque()
        self.unconfirmed = 0
        self._unconfirmed_bytes = 0

    async def send_all(self, bodies: Iterable[bytes]) -> None:
        for batch in _batches(bodies, self._batch_messages):
            await self._send(batch)

    async def _send(self, batch: Sequence[bytes]) -> None:
        assert self.link is not None
        if self._rate:
            wait = self._due - time.monotonic()
            if wait > 0:
                await self.settle()
                await self.link.sleep(wait)
            # A sleep that was too long is made up for; time in which there was nothing to send is not.
            self._due = max(self._due, time.monotonic() - _CATCH_UP_SECONDS) + len(batch) / self._rate
        if self._defer:
            # NSQ has no deferred MPUB.
            for body in batch:
                self.link.send(wire.encode_command(b"DPUB", self._topic, self._defer, body=body))
                self._note(1, len(body))
        else:
            self.link.send(wire.encode_mpub(self._topic, batch))
            self._note(len(batch), sum(map(len, batch)))
        await self.settle(_MESSAGES_UNDER_WAY, _BYTES_UNDER_WAY)

    def _note(self, messages: int, size: int) -> None:
        self._under_way.append((messages, size))
        self.unconfirmed += messages
        self._unconfirmed_bytes += size

    async def settle(self, messages: int = 0, size: int = 0) -> None:
        """Wait until at most so many messages, and so many bytes, are unanswered."""
        assert self.link is not None
        while self.unconfirmed > messages or self._unconfirmed_bytes > size:
            refusal: ProtocolError | None = None
            try:
                await self.link.response()
            except ProtocolError as exc:
                refusal = exc
            count, length = self._under_way.popleft()
            self.unconfirmed -= count
            self._unconfirmed_bytes -= length
            if refusal is not None:
                raise refusal  # and nothing is unknown about it
            self.messages += count
            self.bytes += length


def _batches(bodies: Iterable[bytes], most: int) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for body in bodies:
        if batch and (len(batch) == most or size + len(body) > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(body)
        size += len(body)
    if batch:
        yield batch


@contextlib.contextmanager
def _progress(descriptor: int) -> Iterator[Callable[[int], None]]:
    """A progress bar where someone watches and does not type the messages; calls take the bytes read since the last."""
    if not sys.stderr.isatty() or os.isatty(descriptor):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (TextColumn("publishing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        # A pipe has no size; the bar then only moves.
        task = progress.add_task("", total=os.fstat(descriptor).st_size or None)
        yield lambda count: progress.advance(task, count)


def _print_summary(publisher: _Publisher, topic: str, *, as_json: bool) -> None:
    seconds = time.monotonic() - publisher.started
    if as_json:
        summary = {
            "topic": topic,
            "messages": publisher.messages,
            "bytes": publisher.bytes,
            "unconfirmed": publisher.unconfirmed,
            "seconds": round(seconds, 6),
        }
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
        return
    amount = f"{_count(publisher.messages, 'message')} ({_count(publisher.bytes, 'byte')})"
    line = f"published {amount} to {topic} in {seconds:.2f} s"
    if publisher.messages > 1:
        line += f", {publisher.messages / seconds:,.0f} a second"
    if publisher.unconfirmed:
        line += f"; {publisher.unconfirmed:,} more were sent and not confirmed"
    sys.stdout.write(line + "\n")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
