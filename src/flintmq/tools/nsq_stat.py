"""`nsq_stat`: one line of statistics per interval for a channel, summed over its nsqds.

An nsqd that does not answer is reported on standard error and left out of that line; NSQ's tool ends there. Rates are
taken over the nsqds that are in both polls, and over the time that really passed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flintmq.errors import ClusterError
from flintmq.options import SECOND
from flintmq.protocol import wire
from flintmq.tools._cluster import ChannelStats, Cluster, Sample
from flintmq.tools._program import (
    DURATION,
    INT,
    STRING,
    STRINGS,
    Fatal,
    ToolOptions,
    option,
    run_program,
    seconds,
    stop_on_signals,
)

__all__ = ["ABOUT", "OPTIONS", "StatOptions", "main"]

#: The line of `flintmq --help`.
ABOUT = "print statistics of a channel every few seconds, with the flags of NSQ's nsq_stat"

_HEADER = (
    "------rate------+----------------depth----------------+--------------metadata---------------\n"
    "ingress  egress |   total     mem    disk inflt   def |     req     t-o         msgs clients\n"
)
#: Polls between two headers.
_HEADER_EVERY = 25


@dataclass(frozen=True, kw_only=True)
class StatOptions(ToolOptions):
    program: ClassVar[str] = "nsq_stat"

    topic: str = option(STRING, "", "topic")
    channel: str = option(STRING, "", "channel")
    interval: int = option(DURATION, 2 * SECOND, "time between two lines")
    count: int | None = option(INT, None, "end after this many lines; by default never")
    http_client_connect_timeout: int = option(DURATION, 2 * SECOND, "time to connect to a daemon")
    http_client_request_timeout: int = option(DURATION, 5 * SECOND, "time for a daemon to answer")
    lookupd_http_addresses: tuple[str, ...] = option(
        STRINGS, (), "nsqlookupd that knows the nsqds, host:port (repeatable)", flag="lookupd-http-address"
    )
    nsqd_http_addresses: tuple[str, ...] = option(
        STRINGS, (), "nsqd to ask, host:port (repeatable)", flag="nsqd-http-address"
    )

    def check(self) -> None:
        if not self.topic or not self.channel:
            raise Fatal("--topic and --channel are required")
        for flag in ("interval", "http_client_connect_timeout", "http_client_request_timeout"):
            if getattr(self, flag) <= 0:
                raise Fatal(f"--{flag.replace('_', '-')} should be positive")
        if self.count is not None and self.count <= 0:
            raise Fatal("--count should be positive")
        if not self.nsqd_http_addresses and not self.lookupd_http_addresses:
            raise Fatal("--nsqd-http-address or --lookupd-http-address required")
        if self.nsqd_http_addresses and self.lookupd_http_addresses:
            raise Fatal("use --nsqd-http-address or --lookupd-http-address not both")
        for flag in ("nsqd_http_addresses", "lookupd_http_addresses"):
            if any(address.startswith("http") for address in getattr(self, flag)):
                name = flag.removesuffix("es").replace("_", "-")
                raise Fatal(f"--{name} error - address should not contain scheme")
        if not wire.valid_name(self.topic) or not wire.valid_name(self.channel):
            raise Fatal("--topic or --channel is invalid")


OPTIONS = StatOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `nsq_stat`."""
    return run_program(StatOptions, argv, _main)


async def _main(options: StatOptions) -> int:
    stopping = asyncio.Event()
    stop_on_signals(stopping.set, signal.SIGHUP)
    polling = asyncio.create_task(_poll(options))
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait({polling, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if polling.done():
        polling.result()
    polling.cancel()
    await asyncio.wait({polling})
    return 0


async def _poll(options: StatOptions) -> None:
    nsqds, lookupds = options.nsqd_http_addresses, options.lookupd_http_addresses
    loop = asyncio.get_running_loop()
    async with Cluster(nsqds, lookupds, timeout=seconds(options.http_client_request_timeout)) as cluster:
        before: Sample | None = None
        number = 0
        due = loop.time()
        while options.count is None or number <= options.count:
            try:
                sample = await cluster.sample(options.topic, options.channel)
            except ClusterError as exc:
                raise Fatal(f"ERROR: failed to get nsqd stats - {exc}") from exc
            for address, reason in sample.failures.items():
                sys.stderr.write(f"nsq_stat: left out of this line: {address}: {reason}\n")
            topic = sample.topics.get(options.topic)
            if topic is None or options.channel not in topic.channels:
                name, of = options.channel, options.topic
                raise Fatal(f"ERROR: failed to find channel({name}) in stats metadata for topic({of})")
            text = _HEADER if number % _HEADER_EVERY == 0 else ""
            if before is not None:
                text += _line(topic.channels[options.channel], *_change(sample, before, options))
            try:
                sys.stdout.write(text)
                sys.stdout.flush()
            except BrokenPipeError as exc:
                raise Fatal("nobody reads the output") from exc
            before = sample
            number += 1
            due += seconds(options.interval)
            if options.count is None or number <= options.count:
                await asyncio.sleep(max(0.0, due - loop.time()))


def _change(sample: Sample, before: Sample, options: StatOptions) -> tuple[int, int]:
    """Return how many messages came in and went out a second."""
    common = [address for address in sample.nodes if address in before.nodes]
    took = max(1e-9, sample.taken - before.taken)
    came = depth = 0
    for address in common:
        now, then = (each.nodes[address].get(options.topic) for each in (sample, before))
        if (
            now is not None
            and then is not None
            and options.channel in now.channels
            and options.channel in then.channels
        ):
            new, old = now.channels[options.channel], then.channels[options.channel]
            came += new.message_count - old.message_count
            depth += new.depth - old.depth
    return int(came / took), int((came - depth) / took)


def _line(channel: ChannelStats, ingress: int, egress: int) -> str:
    memory = channel.depth - channel.backend_depth
    return (
        f"{ingress:7d} {egress:7d} | "
        f"{channel.depth:7d} {memory:7d} {channel.backend_depth:7d} "
        f"{channel.in_flight_count:5d} {channel.deferred_count:5d} | "
        f"{channel.requeue_count:7d} {channel.timeout_count:7d} {channel.message_count:12d} {channel.clients:7d}\n"
    )
