"""`flintmq channel`: create, pause, unpause, empty or delete a channel."""

from __future__ import annotations

from collections.abc import Sequence

from flintmq.tools import _actions

__all__ = ["ABOUT", "main"]

#: The line of `flintmq --help`.
ABOUT = "create, pause, unpause, empty or delete a channel"


def main(argv: Sequence[str]) -> int:
    return _actions.main("channel", argv)
