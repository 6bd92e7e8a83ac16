"""`nsq_tail`: print the messages of topics, by default through a channel of its own that goes with it.

A message is finished after its line was written. With `-n` the last one too, and those that came beyond it are given
back, so that a channel that stays loses nothing and gets nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flintmq.client import Batch, Consumer
from flintmq.protocol import wire
from flintmq.tools._output import Output
from flintmq.tools._program import (
    BOOL,
    INT,
    STRING,
    STRINGS,
    Failures,
    Fatal,
    Progress,
    Source,
    connected,
    option,
    run_program,
    stop_on_signals,
)

__all__ = ["ABOUT", "OPTIONS", "TailOptions", "main"]

#: The line of `flintmq --help`.
ABOUT = "print the messages of topics, with the flags of NSQ's nsq_tail"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TailOptions(Source):
    program: ClassVar[str] = "nsq_tail"

    topics: tuple[str, ...] = option(STRINGS, (), "topic to print (repeatable)", flag="topic")
    channel: str = option(STRING, "", "channel; by default a temporary one that is deleted at the end")
    total: int = option(INT, 0, "end after this many messages; 0: never", flag="n")
    print_topic: bool = option(BOOL, False, "begin each line with the topic")

    def check(self) -> None:
        self.check_source()
        if not self.topics:
            raise Fatal("--topic required")
        for topic in self.topics:
            if not wire.valid_name(topic):
                raise Fatal(f'--topic is invalid: "{topic}"')
        if self.channel and not wire.valid_name(self.channel):
            raise Fatal(f'--channel is invalid: "{self.channel}"')


OPTIONS = TailOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `nsq_tail`."""
    return run_program(TailOptions, argv, lambda options: _Tail(options).run())


def own_channel() -> str:
    """Return the name of a new channel that goes with its last consumer."""
    return f"tail{random.randrange(999_999):06d}#ephemeral"


class _Tail:
    def __init__(self, options: TailOptions) -> None:
        self._options = options
        self._channel = options.channel or own_channel()
        self._left = options.total if options.total > 0 else None
        self._consumers: list[Consumer[bytes]] = []
        self._failures = Failures()
        self._progress = Progress(options.program, "printed")
        self._is_over = False

    async def run(self) -> int:
        options = self._options
        output = Output()
        stop_on_signals(self._stop)
        given = options.consumer_options() | {"on_error": self._failures}
        if self._left is not None:
            # Never ask for more than is wanted.
            given["max_in_flight"] = min(options.max_in_flight, self._left)
        tasks = []
        try:
            with self._progress.shown():
                for topic in options.topics:
                    logger.info("Adding consumer for topic: %s", topic)
                    consumer: Consumer[bytes] = Consumer(topic, self._channel, **given)
                    self._consumers.append(consumer)
                    await consumer.start()
                    if self._is_over:
                        consumer.stop()
                    tasks.append(asyncio.create_task(self._print_all(consumer, output)))
                    await connected(consumer, options.nsqd_tcp_addresses, self._failures)
                await asyncio.gather(*tasks)
        except OSError as exc:
            raise Fatal(f"ERROR: failed to write to os.Stdout - {exc.strerror}") from exc
        finally:
            self._stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(consumer.close() for consumer in self._consumers))
        return 0

    def _stop(self) -> None:
        self._is_over = True
        for consumer in self._consumers:
            consumer.stop()

    async def _print_all(self, consumer: Consumer[bytes], output: Output) -> None:
        prefix = f"{consumer.topic} | ".encode() if self._options.print_topic else b""
        async for batch in consumer.batches(consumer.max_in_flight, wait=0):
            surplus = Batch[bytes]()
            if self._left is not None:
                batch, surplus = Batch(batch[: self._left]), Batch(batch[self._left :])
                self._left -= len(batch)
                if not self._left:
                    # Before the last is finished, or the broker would send more.
                    self._stop()
            await output.write(b"".join([prefix + message.body + b"\n" for message in batch]))
            batch.finish()
            surplus.requeue(0, backoff=False)
            self._progress.add(len(batch))
