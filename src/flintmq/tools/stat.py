"""`flintmq stat`: one line of statistics per interval for a cluster, a topic or a channel."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from flintmq.errors import OptionError
from flintmq.tools import INTERRUPTED, print_json, print_line, split_source
from flintmq.tools._cluster import Cluster, Sample, cluster_flags, run_on_cluster, warn
from flintmq.tools._show import DIM, new_parser, paint, parse_count, parse_seconds, rate

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "print statistics of a cluster, a topic or a channel every few seconds"

_COLUMNS = ("in/s", "out/s", "depth", "in flight", "deferred", "requeued", "timed out", "messages", "clients")
_HEADER_EVERY = 25


def main(argv: Sequence[str]) -> int:
    parser = new_parser(
        "stat",
        "Print a line of statistics every interval: messages in and out a second, depth, in flight, deferred, requeued "
        "and timed out since the start of the nsqds, messages and clients. Without a topic: of the whole cluster.",
        [
            "flintmq stat",
            "flintmq stat orders --interval 5s",
            "flintmq stat orders/billing -n 3 --json",
        ],
    )
    parser.add_argument("source", metavar="TOPIC[/CHANNEL]", nargs="?", default="", help="all topics if left out")
    parser.add_argument(
        "--interval", metavar="DURATION", type=parse_seconds, default=2.0, help="time between two lines (default 2s)"
    )
    parser.add_argument("-n", metavar="COUNT", dest="count", type=parse_count, help="end after COUNT lines")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each line")
    cluster_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.interval <= 0:
        parser.error("--interval must be above 0")
    topic, channel = split_source(parser, arguments.source, channel=None) if arguments.source else ("", "")
    return run_on_cluster("stat", arguments, lambda cluster: _watch(cluster, topic, channel, arguments))


async def _watch(cluster: Cluster, topic: str, channel: str, arguments: argparse.Namespace) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    # With all channels of the topic: an nsqd that is asked for one that it lacks names no topic at all.
    before = await cluster.sample(topic)
    _find(before, topic, channel)
    printed = 0
    failing: dict[str, str] = {}
    due = loop.time()
    while not arguments.count or printed < arguments.count:
        if not arguments.json and printed % _HEADER_EVERY == 0:
            # Before the first interval: a user sees at once what is to come.
            print_line(paint("  ".join(f"{name:>9}" for name in _COLUMNS), DIM))
            sys.stdout.flush()
        due += arguments.interval
        try:
            await asyncio.wait_for(stopping.wait(), max(0.0, due - loop.time()))
            return INTERRUPTED if arguments.count else 0
        except TimeoutError:
            pass
        sample = await cluster.sample(topic, channel)
        if sample.failures != failing:
            failing = sample.failures
            warn("stat", failing)
        values = _values(sample, before, topic, channel)
        if arguments.json:
            print_json({"time": datetime.now(UTC).isoformat(), "topic": topic, "channel": channel, **values})
        else:
            shown = [rate(value) if isinstance(value, float) else f"{value:,}" for value in values.values()]
            print_line("  ".join(f"{text:>9}" for text in shown))
        sys.stdout.flush()
        before = sample
        printed += 1
    return 0


def _find(sample: Sample, topic: str, channel: str) -> None:
    """OptionError if there is no such topic or channel."""
    if not topic:
        return
    found = sample.topics.get(topic)
    if found is None:
        raise OptionError(f"no nsqd has a topic {topic}; flintmq ls lists all")
    if channel and channel not in found.channels:
        raise OptionError(f"the topic {topic} has no channel {channel}; flintmq ls {topic} lists its channels")


def _values(sample: Sample, before: Sample, topic: str, channel: str) -> dict[str, Any]:
    rates = sample.rates(before)
    topics = sample.topics
    chosen = {topic: topics[topic]} if topic in topics else topics if not topic else {}
    channels = [
        found for each in chosen.values() for label, found in each.channels.items() if not channel or label == channel
    ]
    came, left = (sum(rates.get((name, channel), (0.0, 0.0))[place] for name in chosen) for place in (0, 1))
    if channel:
        depth, messages = (sum(getattr(each, name) for each in channels) for name in ("depth", "message_count"))
    else:
        depth = sum(each.total_depth for each in chosen.values())
        messages = sum(each.message_count for each in chosen.values())
    return {
        "in_per_second": round(came, 2),
        "out_per_second": round(left, 2),
        "depth": depth,
        "in_flight": sum(each.in_flight_count for each in channels),
        "deferred": sum(each.deferred_count for each in channels),
        "requeued": sum(each.requeue_count for each in channels),
        "timed_out": sum(each.timeout_count for each in channels),
        "message_count": messages,
        "clients": sum(each.clients for each in channels),
    }
