"""`to_nsq`: publish the records of standard input, each to every nsqd that was named.

Records go out in batches, in their order; the next batch is sent when every nsqd has confirmed the last. A final record
without a delimiter is published whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flintmq.client import Producer
from flintmq.errors import PublishError
from flintmq.protocol import wire
from flintmq.tools._program import (
    INT,
    STRING,
    STRINGS,
    Fatal,
    Progress,
    ToolOptions,
    client_options,
    option,
    run_program,
    stop_on_signals,
    user_agent,
)

__all__ = ["ABOUT", "OPTIONS", "ToNsqOptions", "main"]

#: The line of `flintmq --help`.
ABOUT = "publish the lines of standard input, with the flags of NSQ's to_nsq"

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
#: Chunks of input that are read before they are published.
_CHUNKS_AHEAD = 4
#: Most records and bytes in one command: well within a broker's default limit of 5 MiB.
_BATCH_RECORDS = 5000
_BATCH_BYTES = 1 << 20
#: Bytes of one record. A longer one is refused before it fills the memory; a broker takes 1 MiB by default.
_LONGEST_RECORD = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ToNsqOptions(ToolOptions):
    program: ClassVar[str] = "to_nsq"

    topic: str = option(STRING, "", "topic to publish to")
    nsqd_tcp_addresses: tuple[str, ...] = option(
        STRINGS, (), "nsqd to publish to, host:port; each gets every record (repeatable)", flag="nsqd-tcp-address"
    )
    delimiter: str = option(STRING, "\n", "the byte that ends a record")
    rate: int = option(INT, 0, "most records a second; 0: no limit")
    producer_opts: tuple[str, ...] = option(
        STRINGS, (), "option of the producer, as name,value (repeatable)", flag="producer-opt"
    )

    def check(self) -> None:
        if not self.topic:
            raise Fatal("--topic required")
        if not wire.valid_name(self.topic):
            raise Fatal(f'--topic is invalid: "{self.topic}"')
        if len(self.delimiter.encode(errors="surrogateescape")) != 1:
            raise Fatal("--delimiter must be a single byte")
        if not self.nsqd_tcp_addresses:
            raise Fatal("--nsqd-tcp-address required")


OPTIONS = ToNsqOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `to_nsq`."""
    return run_program(ToNsqOptions, argv, _main)


async def _main(options: ToNsqOptions) -> int:
    given = client_options("producer-opt", options.producer_opts) | {"user_agent": user_agent(options.program)}
    given.setdefault("timeout", 10.0)
    stopping = asyncio.Event()
    stop_on_signals(stopping.set)
    progress = Progress(options.program, "published")
    if options.rate >= 1:
        logger.info("Throttling messages rate to max:%d/second", options.rate)
    async with contextlib.AsyncExitStack() as stack:
        producers = []
        for address in dict.fromkeys(options.nsqd_tcp_addresses):
            producers.append(await _until(stopping, stack.enter_async_context(Producer(address, **given))))
            if stopping.is_set():
                return 0
        with progress.shown():
            publisher = _Publisher(options, [each for each in producers if each is not None], progress)
            delimiter = options.delimiter.encode(errors="surrogateescape")
            async for records in _records(_chunks(stopping), delimiter):
                await publisher.send(records, stopping)
                if stopping.is_set():
                    break
    return 0


async def _until(stopping: asyncio.Event, work: Coroutine[Any, Any, Producer]) -> Producer | None:
    """Wait for a producer to connect, or for a signal; None for the latter."""
    connecting = asyncio.ensure_future(work)
    signalled = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({connecting, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            return connecting.result()
        connecting.cancel()
        await asyncio.wait({connecting})
        return None
    finally:
        signalled.cancel()


# --- Input ------------------------------------------------------------------------------------------------------------


async def _chunks(stopping: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield what standard input brings, up to its end or a signal. It is read in a thread: it may never end."""
    loop = asyncio.get_running_loop()
    came: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_CHUNKS_AHEAD)

    def read() -> None:
        data: bytes | OSError = b"."
        while data and not isinstance(data, OSError):
            room.acquire()
            try:
                data = os.read(sys.stdin.fileno(), _READ_BYTES)
            except OSError as exc:
                data = exc
            try:
                loop.call_soon_threadsafe(came.put_nowait, data)
            except RuntimeError:
                return

    threading.Thread(target=read, name="input", daemon=True).start()
    signalled = asyncio.ensure_future(stopping.wait())
    try:
        while True:
            getting = asyncio.ensure_future(came.get())
            await asyncio.wait({getting, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                return
            data = getting.result()
            room.release()
            if isinstance(data, OSError):
                raise Fatal(f"read standard input: {data.strerror}")
            if not data:
                return
            yield data
    finally:
        signalled.cancel()


async def _records(chunks: AsyncIterator[bytes], delimiter: bytes) -> AsyncIterator[list[bytes]]:
    """Yield the records of each chunk that end in it, without those that are empty."""
    rest: list[bytes] = []
    size = 0  # of them
    start = 0  # where the record begins that they belong to
    async for chunk in chunks:
        first, found, more = chunk.partition(delimiter)
        rest.append(first)
        size += len(first)
        if size > _LONGEST_RECORD:
            raise Fatal(
                f"the record at byte {start} of standard input is longer than {_LONGEST_RECORD} bytes: is "
                f"--delimiter={_shown(delimiter)} the byte that ends a record? Longer ones must be split before"
            )
        if not found:
            continue
        *whole, tail = more.split(delimiter)
        records = [record for record in (b"".join(rest), *whole) if record]
        start += size + len(delimiter) + len(more) - len(tail)
        rest = [tail]
        size = len(tail)
        if records:
            yield records
    if last := b"".join(rest):
        yield [last]


def _shown(delimiter: bytes) -> str:
    """Return a byte as people would write it: ``'\\n'``, ``';'``."""
    return repr(delimiter)[1:]


# --- Output -----------------------------------------------------------------------------------------------------------


class _Publisher:
    def __init__(self, options: ToNsqOptions, producers: Sequence[Producer], progress: Progress) -> None:
        self._topic = options.topic
        self._rate = options.rate
        self._producers = producers
        self._progress = progress
        # Records that may go out now; saved up for at most a second.
        self._balance = 1.0
        self._filled = asyncio.get_running_loop().time()

    async def send(self, records: list[bytes], stopping: asyncio.Event) -> None:
        """Publish records to all nsqds, as fast as may be. A signal ends it after the batch that is under way."""
        position = 0
        while position < len(records) and not stopping.is_set():
            count = await self._allowed(stopping)
            batch = _batch(records, position, count)
            position += len(batch)
            if batch:
                await asyncio.gather(*(self._publish(producer, batch) for producer in self._producers))
                self._progress.add(len(batch), sum(map(len, batch)))

    async def _publish(self, producer: Producer, batch: list[bytes]) -> None:
        try:
            await producer.publish_many(self._topic, batch)
        except PublishError:
            if len(batch) == 1:
                raise
            # One of them is refused, and so were all: those before it are published, as if each had gone alone.
            for record in batch:
                await producer.publish(self._topic, record)

    async def _allowed(self, stopping: asyncio.Event) -> int:
        """Wait until the rate allows a record; return how many it allows."""
        if self._rate < 1:
            return _BATCH_RECORDS
        loop = asyncio.get_running_loop()
        while not stopping.is_set():
            now = loop.time()
            self._balance = min(float(self._rate), self._balance + (now - self._filled) * self._rate)
            self._filled = now
            if self._balance >= 1:
                count = min(int(self._balance), _BATCH_RECORDS)
                self._balance -= count
                return count
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), (1 - self._balance) / self._rate)
        return 0


def _batch(records: Sequence[bytes], position: int, count: int) -> list[bytes]:
    """Return the next records for one command: at least one, if `count` is not 0."""
    batch = list(records[position : position + min(count, _BATCH_RECORDS)])
    size = 0
    for number, record in enumerate(batch):
        size += len(record) + 4
        if size > _BATCH_BYTES:
            return batch[: max(1, number)]
    return batch
