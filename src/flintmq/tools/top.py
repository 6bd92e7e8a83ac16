"""`flintmq top`: show a dashboard of topics and channels in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from flintmq.errors import OptionError
from flintmq.tools import INTERRUPTED, print_json
from flintmq.tools._cluster import Cluster, cluster_flags, run_on_cluster, warn
from flintmq.tools._show import new_parser, parse_count, parse_seconds
from flintmq.tools.ls import described

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "show a dashboard of topics and channels in the terminal"


def main(argv: Sequence[str]) -> int:
    parser = new_parser(
        "top",
        "Show topics and channels with depth, rates and depth over time, live. Enter opens a topic, Escape goes back, "
        "s changes the order, r reverses it, p pauses or unpauses, / filters, q ends. Needs the extra tui.",
        [
            "flintmq top",
            "flintmq top orders --interval 500ms",
            "flintmq top --lookupd-http-address 127.0.0.1:4161",
            "flintmq top --json -n 1",
        ],
    )
    parser.add_argument("topic", metavar="TOPIC", nargs="?", default="", help="begin with the channels of this topic")
    parser.add_argument(
        "--interval", metavar="DURATION", type=parse_seconds, default=1.0, help="time between updates (default 1s)"
    )
    parser.add_argument("--read-only", action="store_true", help="do not pause or unpause")
    parser.add_argument("-n", metavar="COUNT", dest="count", type=parse_count, help="with --json: end after COUNT")
    parser.add_argument("--json", action="store_true", help="print a JSON object at each update, and no dashboard")
    cluster_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.interval <= 0:
        parser.error("--interval must be above 0")
    work = _print_updates if arguments.json else _show
    return run_on_cluster("top", arguments, lambda cluster: work(cluster, arguments))


async def _show(cluster: Cluster, arguments: argparse.Namespace) -> int:
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise OptionError("a terminal is needed; flintmq top --json prints updates, flintmq ls a list")
    try:
        from flintmq.tools._top import Top
    except ModuleNotFoundError as exc:
        raise OptionError(f"{exc.name} is not installed: pip install 'flintmq[tui]'") from exc
    # Before the screen is taken: an error now is a line that one can read.
    sample = await cluster.sample()
    app: Any = Top(cluster, arguments.interval, arguments.topic, read_only=arguments.read_only, first=sample)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.exit)
    await app.run_async()
    return 0


async def _print_updates(cluster: Cluster, arguments: argparse.Namespace) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    before = await cluster.sample(arguments.topic)
    printed = 0
    while not stopping.is_set() and (not arguments.count or printed < arguments.count):
        try:
            await asyncio.wait_for(stopping.wait(), arguments.interval)
            break
        except TimeoutError:
            pass
        sample = await cluster.sample(arguments.topic)
        rates = sample.rates(before)
        warn("top", sample.failures)
        topics = [
            described(name, topic, rates, has_rates=True, topics_only=False)
            for name, topic in sorted(sample.topics.items())
        ]
        print_json({"time": datetime.now(UTC).isoformat(), "topics": topics, "failures": sample.failures})
        sys.stdout.flush()
        before = sample
        printed += 1
    return INTERRUPTED if arguments.count and printed < arguments.count else 0
