"""`flintmq seek`: have a channel go on from another place of its topic's log."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from flintmq.tools import node_flags, place_of, print_json, print_line, run_on_node, split_source
from flintmq.usage import Parser

if TYPE_CHECKING:
    from flintmq.cluster.node import NodeClient

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "move a channel to another place in its topic's log"


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="flintmq seek",
        description="Move a channel to another place of its topic's log. Its present messages are dropped, those in "
        "flight and deferred too; messages from that place on are delivered, perhaps once more.",
    )
    parser.add_argument("source", metavar="TOPIC/CHANNEL")
    parser.add_argument(
        "to",
        metavar="PLACE",
        type=place_of,
        help="earliest, latest, the seq of a message, or a time such as 2030-01-31T12:00:00Z",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    node_flags(parser)
    arguments = parser.parse_args(argv)
    topic, channel = split_source(parser, arguments.source)
    return run_on_node("seek", arguments, lambda node: _seek(node, topic, channel, arguments))


async def _seek(node: NodeClient, topic: str, channel: str, arguments: argparse.Namespace) -> int:
    result = await node.seek(topic, channel, arguments.to)
    if arguments.json:
        print_json(msgspec.structs.asdict(result))
    else:
        plural = "" if result.messages == 1 else "s"
        print_line(f"{topic}/{channel} goes on at {result.offset}, {result.messages:,} message{plural} to deliver")
    return 0
