"""`flintmq tail`: print the messages of topics as they come, without leaving a channel behind.

It consumes through a channel of its own that goes with it: nobody else gets a message less.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import signal
from collections.abc import Sequence
from typing import Any

import msgspec

from flintmq.client import Batch, Consumer, Message
from flintmq.errors import OptionError
from flintmq.tools import INTERRUPTED, body_fields, say_that_it_waits
from flintmq.tools._cluster import Cluster, cluster_flags, run_on_cluster, warn
from flintmq.tools._output import Output
from flintmq.tools._show import DIM, new_parser, paint, parse_count
from flintmq.tools.nsq_tail import own_channel

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "print the messages of topics as they arrive, through a temporary channel"

_MAX_IN_FLIGHT = 1000


def main(argv: Sequence[str]) -> int:
    parser = new_parser(
        "tail",
        "Print the messages of topics as they come, one a line, until ctrl-C. They are read through a channel that "
        "goes when this command ends, so that no other consumer misses one.",
        [
            "flintmq tail orders",
            "flintmq tail 'orders*' -n 10 --json",
            "flintmq tail orders --grep refund --lookupd-http-address 127.0.0.1:4161",
        ],
    )
    parser.add_argument("topics", metavar="TOPIC", nargs="+", help="topics that exist; * and ? stand for any text")
    parser.add_argument("-n", metavar="COUNT", dest="count", type=parse_count, help="end after COUNT messages")
    parser.add_argument("--grep", metavar="TEXT", help="only messages that contain this text")
    parser.add_argument(
        "--print-topic", action="store_true", help="begin each line with the topic (always so with several topics)"
    )
    parser.add_argument("--json", action="store_true", help="print topic, id, timestamp, attempts and body as JSON")
    parser.add_argument(
        "--auth-secret", metavar="SECRET", help="for brokers that ask for it; other users can see it in ps"
    )
    cluster_flags(parser)
    arguments = parser.parse_args(argv)
    return run_on_cluster("tail", arguments, lambda cluster: _Tail(cluster, arguments).run())


class _Tail:
    def __init__(self, cluster: Cluster, arguments: argparse.Namespace) -> None:
        self._cluster = cluster
        self._arguments = arguments
        self._left: int | None = arguments.count
        self._needle = arguments.grep.encode() if arguments.grep else b""
        self._consumers: list[Consumer[bytes]] = []
        self._stopping = asyncio.Event()
        self._has_printed = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        topics = await self._topics()
        self._names_topics = self._arguments.print_topic or len(topics) > 1
        output = Output()
        given: dict[str, Any] = {"max_in_flight": _MAX_IN_FLIGHT, "auth_secret": self._arguments.auth_secret}
        if self._cluster.lookupds:
            given |= {"lookupd": self._cluster.lookupds}
        else:
            given |= {"nsqd": await self._cluster.tcp_addresses()}
        channel = own_channel()
        tasks = []
        try:
            for topic in topics:
                consumer: Consumer[bytes] = Consumer(topic, channel, **given)
                self._consumers.append(consumer)
                await consumer.start()
                tasks.append(asyncio.create_task(self._print_all(consumer, output)))
            if self._stopping.is_set():
                self._stop()
            say_that_it_waits(", ".join(topics), lambda: not self._has_printed)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(consumer.close() for consumer in self._consumers))
        return INTERRUPTED if self._left else 0

    async def _topics(self) -> list[str]:
        """Return the topics that are meant. OptionError for a name that there is not: it would be created."""
        sample = await self._cluster.sample()
        warn("tail", sample.failures)
        known = sorted(sample.topics)
        found: dict[str, None] = {}
        for pattern in self._arguments.topics:
            matching = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
            if not matching:
                there = ", ".join(known[:10]) or "none at all"
                raise OptionError(f"no topic is called {pattern}; there are {there}")
            found |= dict.fromkeys(matching)
        return list(found)

    def _stop(self) -> None:
        self._stopping.set()
        for consumer in self._consumers:
            consumer.stop()

    async def _print_all(self, consumer: Consumer[bytes], output: Output) -> None:
        async for batch in consumer.batches(_MAX_IN_FLIGHT, wait=0):
            shown = [message for message in batch if self._needle in message.body]
            if self._left is not None:
                shown = shown[: self._left]
                self._left -= len(shown)
                if not self._left:
                    self._stop()
            if shown:
                self._has_printed = True
                await output.write(b"".join([self._line(consumer.topic, message) for message in shown]))
            # The channel is ours alone: there is nobody to give a message back to.
            Batch(batch).finish()

    def _line(self, topic: str, message: Message[bytes]) -> bytes:
        if self._arguments.json:
            about = {
                "topic": topic,
                "id": message.id.decode(),
                "timestamp": message.timestamp,
                "attempts": message.attempts,
            }
            return msgspec.json.encode(about | body_fields(message.body)) + b"\n"
        prefix = paint(f"{topic} | ", DIM).encode() if self._names_topics else b""
        return prefix + message.body + b"\n"
