"""`flintmq recover`: list what a broker set aside in its data path, and publish the messages in it again.

Without `--publish` it only lists. With it, the messages of each leftover are published to a running broker, in their
order, and a leftover whose messages are all confirmed is renamed to `….recovered`. One that is cut off stays: the next
run publishes it from its beginning, so that messages may come twice, but none is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from flintmq.protocol import wire
from flintmq.tools import Link, link_flags, print_json, print_line, run
from flintmq.usage import Parser

__all__ = ["main"]

# Well within the broker's default limits (5 MiB a command), and small enough to be confirmed often.
_BATCH_BYTES = 512 * 1024
_BATCH_MESSAGES = 500


class Leftover(Protocol):
    """Something that was set aside: see `flintmq.broker.leftovers`."""

    @property
    def path(self) -> Path: ...
    @property
    def topic(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def files(self) -> tuple[Path, ...]: ...
    @property
    def damage(self) -> list[str]: ...
    def messages(self) -> Iterator[bytes]: ...
    def put_away(self) -> Path: ...


def main(argv: Sequence[str], find: Callable[[Path], Sequence[Leftover]]) -> int:
    parser = Parser(
        prog="flintmq recover",
        description="List files that a broker set aside (.lost, .bad), and publish their messages again.",
    )
    parser.add_argument("data_path", metavar="DATA_PATH", type=Path, help="the broker's data path; the broker may run")
    parser.add_argument("--publish", action="store_true", help="publish the messages; without it they are only counted")
    parser.add_argument("--only", metavar="NAME", action="append", help="leave out all others (repeatable)")
    parser.add_argument("--topic", metavar="TOPIC", help="publish to this topic instead of the original one")
    parser.add_argument("--json", action="store_true", help="print one object per leftover")
    link_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.topic is not None and not wire.valid_name(arguments.topic):
        parser.error(f'"{arguments.topic}" is not a topic name: use 1 to 64 letters, digits, ".", "_" or "-"')
    return run("recover", lambda: _recover(arguments, find))


async def _recover(arguments: argparse.Namespace, find: Callable[[Path], Sequence[Leftover]]) -> int:
    leftovers = [left for left in find(arguments.data_path) if not arguments.only or left.path.name in arguments.only]
    if not leftovers and not arguments.json:
        print_line("nothing was set aside" if not arguments.only else "nothing of this name was set aside")
    link = await Link.open(arguments) if arguments.publish and any(left.files for left in leftovers) else None
    damaged = False
    try:
        for leftover in leftovers:
            topic = arguments.topic or leftover.topic
            facts = await _one(leftover, topic, link)
            damaged |= bool(facts["damage"])
            if arguments.json:
                print_json(facts)
            else:
                _print(facts)
    finally:
        if link is not None:
            await link.close()
    if leftovers and not arguments.publish and not arguments.json and any(left.files for left in leftovers):
        print_line("give --publish to publish these messages to a broker")
    return 1 if damaged and arguments.publish else 0


async def _one(leftover: Leftover, topic: str, link: Link | None) -> dict[str, Any]:
    """Count the messages of one leftover, and publish them where there is a link."""
    count = size = 0
    for batch in _batches(leftover.messages()):
        if link is not None:
            link.send(wire.encode_mpub(topic.encode(), batch))
            await link.response()
        count += len(batch)
        size += sum(map(len, batch))
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{leftover.path.name}: {count:,} messages")
    if count and sys.stderr.isatty():
        sys.stderr.write("\n")
    published = link is not None and bool(leftover.files)
    renamed = str(leftover.put_away()) if published else None
    return {
        "path": str(leftover.path),
        "kind": leftover.kind,
        "topic": topic,
        "messages": count,
        "bytes": size,
        "damage": list(leftover.damage),
        "published": published,
        "renamed_to": renamed,
    }


def _batches(messages: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for body in messages:
        if batch and (size + len(body) > _BATCH_BYTES or len(batch) == _BATCH_MESSAGES):
            yield batch
            batch, size = [], 0
        batch.append(body)
        size += len(body)
    if batch:
        yield batch


def _print(facts: dict[str, Any]) -> None:
    if facts["kind"] in ("journal", "keys"):
        print_line(f"{facts['path']}: a damaged {facts['kind']} file, kept for a look at it; no messages are in it")
        return
    plural = "" if facts["messages"] == 1 else "s"
    what = f"{facts['messages']:,} message{plural}, {facts['bytes']:,} bytes"
    if facts["published"]:
        print_line(f"{facts['path']}: {what} published to {facts['topic']}; renamed to {facts['renamed_to']}")
    else:
        print_line(f"{facts['path']}: {what} of topic {facts['topic']}")
    for line in facts["damage"]:
        print_line(f"  {line}")
