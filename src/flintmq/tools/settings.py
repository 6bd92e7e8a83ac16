"""`flintmq settings`: what a topic or channel does differently from the rest; shown, and changed while nsqd runs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.durations import parse_duration
from flintmq.errors import OptionError
from flintmq.tools import node_flags, print_json, run_on_node
from flintmq.usage import Parser

if TYPE_CHECKING:
    from flintmq.cluster.node import EffectiveSettings, NodeClient

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "show and change the settings of a topic or channel"

# A name, or a pattern for names.
_NAME = re.compile(r"[.a-zA-Z0-9_*-]{1,64}(#ephemeral)?")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="flintmq settings",
        description="Show the settings of a topic or channel, and change them while the broker runs.",
        epilog="The keys are in docs/settings.md. Durations are written as 250ms or 1h30m, sizes and counts as "
        "numbers.",
    )
    parser.add_argument(
        "source",
        metavar="TOPIC[/CHANNEL]",
        help="names, or patterns: 'orders.*' is for all topics of that kind, those to come included",
    )
    parser.add_argument("change", metavar="KEY=VALUE", nargs="*", type=_change, help="set this key, keep the others")
    parser.add_argument("--unset", metavar="KEY", action="append", default=[], help="remove what was set")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    node_flags(parser)
    arguments = parser.parse_intermixed_args(argv)
    topic, slash, channel = arguments.source.partition("/")
    if not _NAME.fullmatch(topic) or (slash and not _NAME.fullmatch(channel)):
        parser.error(f'"{arguments.source}" is not TOPIC or TOPIC/CHANNEL, such as orders or orders/billing')
    keys = [key for key, _ in arguments.change] + arguments.unset
    if twice := [key for key in keys if keys.count(key) > 1]:
        parser.error(f"{twice[0]} is given twice")
    changes: dict[str, Any] = dict(arguments.change) | dict.fromkeys(arguments.unset)
    return run_on_node("settings", arguments, lambda node: _settings(node, topic, channel, changes, arguments.json))


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f'"{text}" is not KEY=VALUE, such as max-attempts=5')
    return key, int(value) if re.fullmatch("[0-9]{1,18}", value, re.ASCII) else value


async def _check_units(node: NodeClient, topic: str, channel: str, changes: dict[str, Any]) -> None:
    """OptionError if a duration has no unit: over HTTP that is milliseconds, which hardly anybody means."""
    without_unit = [key for key, value in changes.items() if isinstance(value, int) and value]
    if not without_unit:
        return
    now = await (node.channel_settings(topic, channel) if channel else node.topic_settings(topic))
    for key in without_unit:
        if _is_duration(now.settings.get(key)):
            value = changes[key]
            raise OptionError(f'{key}: missing unit in duration "{value}", such as {value}ms or {value}s')


def _is_duration(value: object) -> bool:
    """Is this the value of a setting that is a duration? They are shown with units, counts and sizes are numbers."""
    if not isinstance(value, str):
        return False
    try:
        parse_duration(value)
    except ValueError:
        return False
    return True


async def _settings(node: NodeClient, topic: str, channel: str, changes: dict[str, Any], as_json: bool) -> int:
    await _check_units(node, topic, channel, changes)
    if changes and channel:
        result = await node.set_channel_settings(topic, channel, changes)
    elif changes:
        result = await node.set_topic_settings(topic, changes)
    elif channel:
        result = await node.channel_settings(topic, channel)
    else:
        result = await node.topic_settings(topic)
    if as_json:
        print_json(msgspec.structs.asdict(result))
    else:
        _print_table(result)
    return 0


def _print_table(found: EffectiveSettings) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("KEY", "VALUE", "FROM", box=box.SIMPLE, pad_edge=False)
    for key, value in found.settings.items():
        source = found.source.get(key, "")
        # What differs from the rest is what one looks for.
        style = "bold" if source not in ("", "default") else ""
        table.add_row(*(Text(str(cell), style) for cell in (key, "–" if value == "" else value, source)))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
