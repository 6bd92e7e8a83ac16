"""`flintmq ls`: topics and channels of a cluster as a tree, with depth and rates."""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
from collections.abc import Sequence
from typing import Any

from flintmq.errors import OptionError
from flintmq.tools import print_json, print_line
from flintmq.tools._cluster import Cluster, Sample, TopicStats, cluster_flags, run_on_cluster, warn
from flintmq.tools._show import BOLD, YELLOW, count, new_parser, parse_seconds, rate, table

__all__ = ["ABOUT", "described", "main"]

#: The line of `flintmq --help`.
ABOUT = "list topics and channels with depth and rates"

_SORTS = ("name", "depth", "in", "out")


def main(argv: Sequence[str]) -> int:
    parser = new_parser(
        "ls",
        "List the topics and channels of a cluster as a tree: depth, messages in flight and deferred, messages in and "
        "out a second, clients.",
        [
            "flintmq ls",
            "flintmq ls 'orders*' --sort depth",
            "flintmq ls --interval 0 --json                      # without rates, at once",
            "flintmq ls --lookupd-http-address 127.0.0.1:4161    # all nsqds that it knows",
        ],
    )
    parser.add_argument("patterns", metavar="TOPIC", nargs="*", help="only these topics; * and ? stand for any text")
    parser.add_argument(
        "--interval",
        metavar="DURATION",
        type=parse_seconds,
        default=1.0,
        help="time over which rates are measured (default 1s); 0: no rates",
    )
    parser.add_argument("--sort", choices=_SORTS, default="name", help="order of topics (default %(default)s)")
    parser.add_argument("--topics-only", action="store_true", help="leave out channels")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each topic")
    cluster_flags(parser)
    arguments = parser.parse_args(argv)
    return run_on_cluster("ls", arguments, lambda cluster: _list(cluster, arguments))


async def _list(cluster: Cluster, arguments: argparse.Namespace) -> int:
    before: Sample | None = None
    if arguments.interval:
        before = await cluster.sample()
        await asyncio.sleep(arguments.interval)
    sample = await cluster.sample()
    rates = sample.rates(before)
    topics = {
        name: topic
        for name, topic in sample.topics.items()
        if not arguments.patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in arguments.patterns)
    }
    warn("ls", sample.failures)
    names = _sorted(topics, rates, arguments.sort)
    if arguments.json:
        for name in names:
            print_json(
                described(name, topics[name], rates, has_rates=before is not None, topics_only=arguments.topics_only)
            )
    elif names:
        for line in _tree(names, topics, rates, bool(before), arguments.topics_only):
            print_line(line)
    elif not arguments.patterns:
        print_line("no topics")
    if arguments.patterns and not names:
        raise OptionError(f"no nsqd has a topic {' or '.join(arguments.patterns)}; flintmq ls lists all")
    return 1 if sample.failures else 0


def _sorted(topics: dict[str, TopicStats], rates: dict[tuple[str, str], tuple[float, float]], by: str) -> list[str]:
    def key(name: str) -> tuple[float, str]:
        value = {
            "depth": float(topics[name].total_depth),
            "in": rates.get((name, ""), (0.0, 0.0))[0],
            "out": rates.get((name, ""), (0.0, 0.0))[1],
        }.get(by, 0.0)
        return -value, name

    return sorted(topics, key=key)


def described(
    name: str,
    topic: TopicStats,
    rates: dict[tuple[str, str], tuple[float, float]],
    *,
    has_rates: bool,
    topics_only: bool,
) -> dict[str, Any]:
    """Return a topic and its channels as an object for JSON."""

    def rated(channel: str) -> dict[str, float]:
        came, left = rates.get((name, channel), (0.0, 0.0))
        return {"in_per_second": round(came, 2), "out_per_second": round(left, 2)} if has_rates else {}

    about: dict[str, Any] = {
        "topic": name,
        "depth": topic.depth,
        "message_count": topic.message_count,
        "message_bytes": topic.message_bytes,
        "paused": topic.paused,
        "nodes": topic.nodes,
        **rated(""),
    }
    if not topics_only:
        about["channels"] = [
            {
                "channel": label,
                "depth": channel.depth,
                "in_flight": channel.in_flight_count,
                "deferred": channel.deferred_count,
                "requeued": channel.requeue_count,
                "timed_out": channel.timeout_count,
                "message_count": channel.message_count,
                "clients": channel.clients,
                "paused": channel.paused,
                **rated(label),
            }
            for label, channel in sorted(topic.channels.items())
        ]
    return about


def _tree(
    names: Sequence[str],
    topics: dict[str, TopicStats],
    rates: dict[tuple[str, str], tuple[float, float]],
    has_rates: bool,
    topics_only: bool,
) -> list[str]:
    header = ["TOPIC / CHANNEL", "DEPTH", "IN FLIGHT", "DEFERRED", "IN/s", "OUT/s", "CLIENTS"]
    rows: list[list[str]] = []
    styles: list[str] = []

    def shown(name: str, channel: str) -> list[str]:
        if not has_rates:
            return ["-", "-"]
        came, left = rates.get((name, channel), (0.0, 0.0))
        return [rate(came), rate(left)]

    for name in names:
        topic = topics[name]
        label = f"{name} (paused)" if topic.paused else name
        rows.append([label, count(topic.depth), "", "", *shown(name, ""), ""])
        styles.append(YELLOW if topic.paused else BOLD)
        channels = [] if topics_only else sorted(topic.channels.items())
        for number, (title, channel) in enumerate(channels):
            branch = "└─ " if number == len(channels) - 1 else "├─ "
            label = f"{branch}{title} (paused)" if channel.paused else f"{branch}{title}"
            counts = (channel.depth, channel.in_flight_count, channel.deferred_count)
            rows.append([label, *map(count, counts), *shown(name, title), count(channel.clients)])
            # A channel that nobody reads, with messages in it, is what one looks for.
            is_stuck = channel.paused or (channel.depth > 0 and channel.clients == 0)
            styles.append(YELLOW if is_stuck else "")
    return table(header, rows, styles)
