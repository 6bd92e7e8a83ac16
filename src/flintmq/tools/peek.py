"""`flintmq peek`: look at the messages of a channel or a topic without taking them, or act on one of them by its id."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.options import SECOND, format_duration, parse_duration
from flintmq.tools import body_fields, node_flags, print_json, print_line, run_on_node, split_source
from flintmq.usage import Parser

if TYPE_CHECKING:
    from flintmq.cluster.node import NodeClient, Page, PeekedMessage

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "show messages without consuming them; finish, requeue or defer single ones"

# What a broker shows on one page, at most.
_PAGE = 1000
_VERBS = ("finish", "requeue", "defer")
#: Characters of a line that a table leaves for a body at least.
_LEAST_BODY = 12
#: Characters of a line that no terminal has.
_WIDEST = 10_000


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    topic, channel = split_source(parser, arguments.source, channel=None)
    acts = [(verb, id) for verb in _VERBS for id in getattr(arguments, verb)]
    if acts and not channel:
        parser.error("--finish, --requeue and --defer need a channel: write TOPIC/CHANNEL")
    if arguments.defer and arguments.delay is None:
        parser.error("--defer needs --delay, such as --delay 10m")
    if arguments.delay is not None and not (arguments.defer or arguments.requeue):
        parser.error("--delay needs --requeue or --defer")
    if arguments.state != "ready" and not channel:
        parser.error("--state needs a channel: write TOPIC/CHANNEL")
    if acts:
        return run_on_node("peek", arguments, lambda node: _act(node, topic, channel, acts, arguments))
    return run_on_node("peek", arguments, lambda node: _peek(node, topic, channel, arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="flintmq peek",
        description="Look at the messages of a channel, or of a topic's log, without taking them; "
        "or finish, requeue or defer single ones.",
    )
    parser.add_argument("source", metavar="TOPIC[/CHANNEL]", help="a topic alone: its log, from the oldest on")
    parser.add_argument(
        "--state",
        type=lambda text: text.replace("_", "-"),
        choices=("ready", "in-flight", "deferred"),
        default="ready",
        help="which messages of the channel (default %(default)s)",
    )
    parser.add_argument(
        "--limit", metavar="N", type=_count, default=20, help="how many (default %(default)s), or all", dest="limit"
    )
    parser.add_argument(
        "--bytes", metavar="N", type=_bytes, default=256, help="how much of each body (default %(default)s), or all"
    )
    parser.add_argument("--json", action="store_true", help="print each message as a line of JSON")
    actions = parser.add_argument_group("one message", "each may be given several times")
    actions.add_argument("--finish", metavar="ID", action="append", default=[], help="finish it, in any state")
    actions.add_argument(
        "--requeue", metavar="ID", action="append", default=[], help="requeue it: ready at once, or after --delay"
    )
    actions.add_argument("--defer", metavar="ID", action="append", default=[], help="deliver it after --delay")
    actions.add_argument("--delay", metavar="DURATION", type=_seconds, help="for --requeue and --defer, such as 30s")
    node_flags(parser)
    return parser


def _count(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'"{text}" is neither a number above 0 nor all')
    return int(text)


def _bytes(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'"{text}" is neither a whole number nor all')
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = parse_duration(text) / SECOND
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    if seconds < 0:
        raise argparse.ArgumentTypeError("--delay must not be negative")
    return seconds


async def _act(
    node: NodeClient, topic: str, channel: str, acts: list[tuple[str, str]], arguments: argparse.Namespace
) -> int:
    done = {"finish": "finished", "requeue": "put back", "defer": "deferred"}
    for verb, id in acts:
        if verb == "finish":
            await node.finish(topic, channel, id)
        elif verb == "requeue":
            await node.requeue(topic, channel, id, arguments.delay or 0)
        else:
            await node.defer(topic, channel, id, arguments.delay)
        if arguments.json:
            print_json({"id": id, "done": verb})
        else:
            print_line(f"{id}: {done[verb]}")
    return 0


async def _peek(node: NodeClient, topic: str, channel: str, arguments: argparse.Namespace) -> int:
    found: list[PeekedMessage] = []
    more = False
    async for message in _messages(node, topic, channel, arguments):
        if arguments.limit is not None and len(found) == arguments.limit:
            more = True
            break
        found.append(message)
        if arguments.json:
            # As they come: there may be many.
            print_json(_fields(message))
            if arguments.limit is None:
                found.clear()
    if arguments.json:
        return 0
    if not found:
        print_line(f"no {arguments.state.replace('-', ' ')} messages" if channel else "no messages")
        return 0
    _print_table(found)
    if more:
        print_line(f"more follow: --limit {len(found) * 10}, or --limit all")
    return 0


async def _messages(
    node: NodeClient, topic: str, channel: str, arguments: argparse.Namespace
) -> AsyncIterator[PeekedMessage]:
    after: str | None = None
    # One more than is shown, to know whether there is one.
    limit = _PAGE if arguments.limit is None else min(_PAGE, arguments.limit + 1)
    while True:
        page: Page
        if channel:
            page = await node.peek(
                topic, channel, arguments.state.replace("-", "_"), limit=limit, after=after, shown=arguments.bytes
            )
        else:
            page = await node.peek_topic(topic, limit=limit, after=after, shown=arguments.bytes)
        for message in page.messages:
            yield message
        if page.next is None:
            return
        after = page.next


def _fields(message: PeekedMessage) -> dict[str, Any]:
    fields = {key: value for key, value in msgspec.structs.asdict(message).items() if value is not None}
    del fields["body"]
    if not message.damaged:
        del fields["damaged"]
    return fields | body_fields(message.body)


def _print_table(messages: list[PeekedMessage]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    now = time.time_ns()
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("ID", "AGE", "ATTEMPTS", "BYTES"):
        table.add_column(name, no_wrap=True, justify="left" if name == "ID" else "right")
    # Columns for what these messages have.
    extras: list[tuple[str, Callable[[PeekedMessage], str]]] = []
    if any(message.due is not None for message in messages):
        extras.append(("DUE IN", lambda message: _span((message.due or now) - now)))
    if any(message.deadline is not None for message in messages):
        extras.append(("TIME LEFT", lambda message: _span((message.deadline or now) - now)))
        extras.append(("CLIENT", _client))
    if any(message.dead is not None for message in messages):
        extras.append(("DEAD", _dead))
    for name, _ in extras:
        table.add_column(name)
    table.add_column("BODY", overflow="fold", min_width=_LEAST_BODY)
    # As texts: a body may look like markup.
    rows: list[list[Text]] = []
    for message in messages:
        age = _span(now - message.timestamp) if message.timestamp else ""
        cells = [message.id, age, str(message.attempts), str(message.size)]
        rows.append([Text(cell) for cell in (*cells, *(tell(message) for _, tell in extras), _shown(message))])
        table.add_row(*rows[-1])
    # Somebody who reads it from a pipe has no width.
    console = Console(width=None if sys.stdout.isatty() else 200)
    # Asked for any width: otherwise the answer is never more than there is.
    anywhere = console.options.update(max_width=_WIDEST)
    if console.measure(table, options=anywhere).minimum <= console.width:
        console.print(table)
        return
    names = [str(column.header).lower() for column in table.columns]
    for row in rows:
        # All that a message has, however narrow the terminal is: its id is what other commands ask for.
        console.print(row[0], style="bold")
        for name, cell in zip(names[1:], row[1:], strict=True):
            console.print(Text(f"  {name} ").append(cell))


def _span(nanoseconds: int) -> str:
    """`1h2m3s`, and no more exactly than one can use."""
    unit = SECOND if abs(nanoseconds) >= SECOND else SECOND // 1000
    return format_duration(nanoseconds // unit * unit)


def _client(message: PeekedMessage) -> str:
    if message.client is None:
        return "gone"
    return f"{message.client.client_id} {message.client.remote_address}"


def _dead(message: PeekedMessage) -> str:
    dead = message.dead
    return "" if dead is None else f"{dead.reason} in {dead.topic}/{dead.channel}"


def _shown(message: PeekedMessage) -> str:
    """A body that may hold anything, as one line."""
    if message.damaged:
        return "(damaged: cannot be read)"
    text = message.body.decode(errors="backslashreplace")
    line = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return line + ("…" if message.truncated else "")
