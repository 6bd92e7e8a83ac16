"""`flintmq log`: a topic's log – how far it reaches, its messages, and who reads it.

Messages are read without a channel, as often as one likes; nothing is taken and nothing held back for us. Only what is
on the broker's disk for certain can be read: the newest messages may come a moment later.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.options import SECOND, format_duration
from flintmq.tools import body_fields, node_flags, place_of, print_json, print_line, run_on_node, split_source
from flintmq.usage import Parser

if TYPE_CHECKING:
    from flintmq.cluster.node import LogInfo, NodeClient, Position

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "show a topic's log: its range, its messages, its readers"


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    topic, _ = split_source(parser, arguments.source, channel=False)
    reads = arguments.start is not None or arguments.stop is not None or arguments.raw
    asked = [reads, arguments.time is not None, arguments.positions, arguments.set_position, arguments.delete_position]
    if sum(map(bool, asked)) > 1:
        parser.error("messages, --time and reader positions exclude each other")
    if _is_before(arguments.stop, arguments.start):
        parser.error("--to lies before --from")
    if arguments.raw == "-" and sys.stdout.isatty():
        parser.error("--raw writes binary frames: name a file, or redirect the output")
    if arguments.raw and arguments.json:
        parser.error("--raw and --json exclude each other")

    async def work(node: NodeClient) -> int:
        if reads:
            return await _read(node, topic, arguments)
        if arguments.time is not None:
            return await _offset(node, topic, arguments)
        if arguments.positions or arguments.set_position or arguments.delete_position:
            return await _positions(node, topic, arguments)
        return await _info(node, topic, arguments)

    return run_on_node("log", arguments, work)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="flintmq log",
        description="Show the range of a topic's log, or its messages, or its readers.",
    )
    parser.add_argument("source", metavar="TOPIC")
    places = "earliest, latest, the seq of a message, or a time such as 2030-01-31T12:00:00Z"
    parser.add_argument(
        "--from", dest="start", metavar="PLACE", type=place_of, help=f"print the messages from: {places}"
    )
    parser.add_argument(
        "--to", dest="stop", metavar="PLACE", type=place_of, help="print the messages before this place"
    )
    parser.add_argument(
        "--raw", metavar="FILE", help="save frames as they are on the wire instead; - is standard output"
    )
    parser.add_argument(
        "--time", metavar="TIME", type=_time, help="print the seq of the first message at or after this time"
    )
    parser.add_argument("--positions", action="store_true", help="list the readers with their positions")
    parser.add_argument(
        "--set-position",
        metavar=("READER", "PLACE"),
        nargs=2,
        help="register or move a reader: a seq, earliest or latest",
    )
    parser.add_argument(
        "--delete-position", metavar="READER", help="delete a reader; segments kept for it may be deleted"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one message or one thing a line")
    node_flags(parser)
    return parser


def _is_before(place: str | int | datetime | None, other: str | int | datetime | None) -> bool:
    """Tell whether a place lies before another one, as far as that is known without asking."""
    if isinstance(place, int) and isinstance(other, int):
        return place < other
    # A time without a zone is a local one.
    return (
        isinstance(place, datetime) and isinstance(other, datetime) and place.astimezone() < other.astimezone()
    ) or (place == "earliest" and other == "latest")


def _time(text: str) -> datetime:
    place = place_of(text)
    if not isinstance(place, datetime):
        raise argparse.ArgumentTypeError(f'"{text}" is not a time, such as 2030-01-31T12:00:00Z')
    return place


# --- How far it reaches -----------------------------------------------------------------------------------------------


async def _info(node: NodeClient, topic: str, arguments: argparse.Namespace) -> int:
    info = await node.log_info(topic)
    if arguments.json:
        print_json(msgspec.structs.asdict(info))
        return 0
    plural = "" if info.messages == 1 else "s"
    print_line(f"{topic} on {node.address}: {info.messages:,} message{plural}, {info.bytes:,} bytes")
    print_line(f"  first    {info.first}")
    print_line(f"  durable  {info.durable}  (messages before it can be read)")
    print_line(f"  end      {info.end}")
    print_line(f"  node     {info.node}")
    print_line(f"  epoch    {info.epoch}")
    return 0


async def _offset(node: NodeClient, topic: str, arguments: argparse.Namespace) -> int:
    offset = await node.log_offset(topic, arguments.time)
    if arguments.json:
        print_json({"offset": offset})
    else:
        print_line(str(offset))
    return 0


# --- Messages ---------------------------------------------------------------------------------------------------------


async def _read(node: NodeClient, topic: str, arguments: argparse.Namespace) -> int:
    info = await node.log_info(topic)
    start = await _seq(node, info, "earliest" if arguments.start is None else arguments.start)
    # What is not durable yet cannot be read, whoever asks for it.
    stop = min(await _seq(node, info, "latest" if arguments.stop is None else arguments.stop), info.durable)
    if arguments.raw:
        return await _save(node, info, start, stop, arguments.raw)
    async for message in node.log_messages(topic, start, stop, epoch=info.epoch):
        if arguments.json:
            about = {"seq": message.seq, "id": message.id, "timestamp": message.timestamp}
            print_json(about | body_fields(message.body))
        else:
            # Bytes as they are: a body need not be text.
            sys.stdout.buffer.write(message.body + b"\n")
    return 0


async def _seq(node: NodeClient, info: LogInfo, place: str | int | datetime) -> int:
    if isinstance(place, datetime):
        return await node.log_offset(info.topic, place)
    if isinstance(place, str):
        return info.first if place == "earliest" else info.durable
    return place


async def _save(node: NodeClient, info: LogInfo, start: int, stop: int, path: str) -> int:
    size = 0
    descriptor = (
        sys.stdout.fileno()
        if path == "-"
        else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    )
    try:
        first = start
        while start < stop:
            async with node.log_fetch(info.topic, start, stop, epoch=info.epoch) as fetch:
                async for chunk in fetch:
                    rest = memoryview(chunk)
                    while rest:
                        rest = rest[os.write(descriptor, rest) :]
                    size += len(chunk)
                start = fetch.next
    finally:
        if path != "-":
            os.close(descriptor)
    if path != "-":
        print_line(f"{path}: {size:,} bytes of frames, messages {first} to {stop - 1} of {info.topic}")
    return 0


# --- Who reads it -----------------------------------------------------------------------------------------------------


async def _positions(node: NodeClient, topic: str, arguments: argparse.Namespace) -> int:
    if arguments.delete_position:
        await node.delete_position(topic, arguments.delete_position)
        if not arguments.json:
            print_line(f"{arguments.delete_position}: forgotten")
        return 0
    if arguments.set_position:
        reader, place = arguments.set_position
        found = [await node.set_position(topic, reader, place)]
    else:
        found = await node.positions(topic)
    if arguments.json:
        for position in found:
            print_json(msgspec.structs.asdict(position))
    elif found:
        _print_positions(found)
    else:
        print_line(f"nobody reads the log of {topic}")
    return 0


def _print_positions(found: list[Position]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("READER", box=box.SIMPLE, pad_edge=False)
    for name in ("POSITION", "MESSAGES LEFT", "BYTES HELD", "MOVED"):
        table.add_column(name, justify="right")
    for position in found:
        cells: list[Any] = [position.reader, position.offset, f"{position.lag:,}", f"{position.bytes:,}"]
        moved = (time.time_ns() - position.moved) // SECOND * SECOND
        table.add_row(*(Text(str(cell)) for cell in cells), f"{format_duration(moved)} ago" if position.moved else "")
    Console(width=None if sys.stdout.isatty() else 200).print(table)
