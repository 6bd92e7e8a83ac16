"""`flintmq redrive`: send the dead letters of a channel back to it, and watch how that goes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from flintmq.tools import node_flags, print_json, print_line, run_on_node, split_source
from flintmq.tools._show import parse_count
from flintmq.usage import Parser

if TYPE_CHECKING:
    from flintmq.cluster.node import NodeClient, Redrive

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "send the dead letters of a channel back to it"

# How often the broker is asked how far it is, in seconds.
_EVERY = 0.2
# Why messages die.
_REASONS = ("requeued", "timed out", "expired")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="flintmq redrive",
        description="Send the dead letters of a channel back to it. The broker does it by itself: "
        "ctrl-C ends the watching, not the work; --stop ends the work.",
    )
    parser.add_argument("source", metavar="TOPIC/CHANNEL", help="the channel that the dead letters came from")
    parser.add_argument("--count", metavar="N", type=parse_count, help="most messages to move")
    parser.add_argument("--rate", metavar="N", type=parse_count, help="most messages to move per second")
    parser.add_argument(
        "--from",
        dest="taken_from",
        metavar="CHANNEL",
        help="the channel of the dead-letter topic to take them from (default: redrive)",
    )
    parser.add_argument(
        "--reason", metavar="REASON", choices=_REASONS, help=f"only those that died of it: {', '.join(_REASONS)}"
    )
    parser.add_argument("--stop", action="store_true", help="stop the running redrive; the rest stay dead letters")
    parser.add_argument("--status", action="store_true", help="start nothing, show the progress")
    parser.add_argument("--no-wait", action="store_true", help="start, and do not wait for the end")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    node_flags(parser)
    arguments = parser.parse_args(argv)
    topic, channel = split_source(parser, arguments.source)
    starting = (arguments.count, arguments.rate, arguments.taken_from, arguments.reason, arguments.no_wait)
    for flag in ("status", "stop"):
        if getattr(arguments, flag) and any(starting):
            parser.error(f"--{flag} cannot be combined with --count, --rate, --from, --reason or --no-wait")
    if arguments.status and arguments.stop:
        parser.error("--status cannot be combined with --stop")
    return run_on_node("redrive", arguments, lambda node: _redrive(node, topic, channel, arguments))


async def _redrive(node: NodeClient, topic: str, channel: str, arguments: argparse.Namespace) -> int:
    if arguments.status:
        result = await node.redrive_progress(topic, channel)
    elif arguments.stop:
        result = await node.stop_redrive(topic, channel)
        while result.running:
            # Some copies are still being written.
            await asyncio.sleep(_EVERY)
            result = await node.redrive_progress(topic, channel)
    else:
        result = await node.redrive(
            topic,
            channel,
            count=arguments.count,
            rate=arguments.rate,
            source=arguments.taken_from,
            reason=arguments.reason,
        )
        if not arguments.no_wait:
            with _progress(result) as report:
                while result.running:
                    await asyncio.sleep(_EVERY)
                    result = await node.redrive_progress(topic, channel)
                    report(result)
    was_asked_for = arguments.stop and result.error == "stopped"
    status = 1 if result.error and not was_asked_for else 0
    if arguments.json:
        print_json(msgspec.structs.asdict(result))
        return status
    amount = f"{result.moved:,} of {result.planned:,} dead letters"
    if result.running:
        print_line(f"{amount} are back in {topic}/{channel}; it goes on")
    elif result.planned or result.moved:
        print_line(f"{amount} went from {result.dead_letter_topic} back to {topic}/{channel}")
    else:
        print_line(f"no dead letters of {topic}/{channel} in {result.dead_letter_topic}")
    if status:
        sys.stderr.write(f"flintmq redrive: it ended early: {result.error}\n")
    return status


@contextlib.contextmanager
def _progress(first: Redrive) -> Iterator[Callable[[Redrive], None]]:
    """A progress bar where someone watches."""
    if not sys.stderr.isatty():
        yield lambda result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("sending back"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=first.planned)
        yield lambda result: progress.update(task, completed=result.moved, total=result.planned)
