"""How commands for operators show numbers, trees and colours, and the parser that they share."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from flintmq.options import SECOND, parse_duration
from flintmq.usage import Parser

__all__ = [
    "BOLD",
    "DIM",
    "RED",
    "YELLOW",
    "count",
    "new_parser",
    "paint",
    "parse_count",
    "parse_seconds",
    "parse_timeout",
    "rate",
    "table",
]

BOLD, DIM, RED, YELLOW, GREEN = "1", "2", "31", "33", "32"


def new_parser(name: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command; its help ends with examples."""
    return Parser(
        prog=f"flintmq {name}",
        description=textwrap.fill(description, min(80, shutil.get_terminal_size().columns)),
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_seconds(text: str) -> float:
    """Read a duration as Go writes it, such as 500ms; a plain number is seconds."""
    try:
        value = float(text) if text.replace(".", "", 1).isdecimal() else parse_duration(text) / SECOND
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    if value < 0:
        raise argparse.ArgumentTypeError(f'"{text}" is below zero')
    return value


def parse_timeout(text: str) -> float:
    """Read a duration that is above 0."""
    value = parse_seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f'"{text}" is not above 0')
    return value


def parse_count(text: str) -> int:
    """Read how many of something there are to be: 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'"{text}" is not a number above 0')
    return int(text)


def count(number: int) -> str:
    return f"{number:,}"


def rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 or number == 0 else f"{number:.1f}"


def uses_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, *codes: str) -> str:
    """Return a text in colours, where standard output is a terminal that wants them."""
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes and uses_colour() else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> list[str]:
    """Return lines: the first column to the left, all others to the right. `styles`: a colour for each row, or none."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]).rstrip()

    lines = [paint(line(header), DIM)]
    for number, row in enumerate(rows):
        style = styles[number] if number < len(styles) else ""
        lines.append(paint(line(row), style) if style else line(row))
    return lines
