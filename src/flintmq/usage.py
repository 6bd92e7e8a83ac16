"""The parser of flintmq's own commands: argparse's, with better words for a wrong flag.

argparse complains of a missing argument before it looks at unknown flags, and it names everything that it did not
understand together. A misspelt flag is the more likely mistake, so it is named first and alone, with the flag that may
be meant. Programs under NSQ's names read their flags in `flintmq.options`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from flintmq.options import nearest

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """argparse's parser, which names a flag that it does not know before it complains of anything else."""

    #: The words that it reads, or read last.
    _words: Sequence[str] = ()
    #: Flags of other commands that are looked for here, and where they are.
    elsewhere: Mapping[str, str] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._remember(args)
        return super().parse_known_args(args, namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._remember(args)
        return super().parse_known_intermixed_args(args, namespace)

    def _remember(self, words: Sequence[str] | None) -> None:
        # Flags between arguments are read in two rounds: the second one has fewer words.
        if words is not None and len(words) > len(self._words):
            self._words = words

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is not None and value not in choices and (meant := nearest(str(value), map(str, choices))):
            raise argparse.ArgumentError(action, f"invalid choice: {str(value)!r}, did you mean {meant}?")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        if message.startswith(("the following arguments are required", "unrecognized arguments")):
            for action in self._actions:
                # A subcommand leaves the words that it does not know to its parent, which knows fewer flags.
                if isinstance(action, argparse._SubParsersAction) and self._words and self._words[0] in action.choices:
                    action.choices[self._words[0]].error(message)
                is_missing = message == f"the following arguments are required: {action.metavar}"
                if isinstance(action, argparse._SubParsersAction) and is_missing:
                    message += f", one of {', '.join(action.choices)}"
            message = self._unknown_flag() or message
        super().error(message)

    def _unknown_flag(self) -> str:
        """Return the text about the first unknown flag; empty if there is none."""
        known = [flag for action in self._actions for flag in action.option_strings]
        for word in self._words:
            flag = word.partition("=")[0]
            if flag == "--":
                break
            if len(flag) < 2 or flag[0] != "-":
                continue
            # The value of a letter may stand right behind it; a long flag may be cut short.
            is_known = any(each.startswith(flag) for each in known) if flag.startswith("--") else flag[:2] in known
            if not is_known and flag in self.elsewhere:
                return f"there is no flag {flag}, {self.elsewhere[flag]}"
            if not is_known:
                meant = nearest(flag, known)
                return f"there is no flag {flag}, {f'did you mean {meant}?' if meant else 'see --help'}"
        return ""
