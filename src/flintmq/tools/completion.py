"""`flintmq completion`: scripts that complete commands, flags, topics and channels in bash, zsh and fish.

The scripts know nothing themselves: at each Tab they call `flintmq completion --answer WORDS…`, so they fit whatever
version is installed. Topics and channels come from the nsqd or the nsqlookupds that the line names, within a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from flintmq import options
from flintmq.errors import FlintError
from flintmq.options import Options, option_table
from flintmq.tools import DEFAULT_NSQD_HTTP, print_json, print_line
from flintmq.tools._actions import ACTIONS
from flintmq.tools._cluster import Cluster
from flintmq.tools._show import new_parser

__all__ = ["ABOUT", "answers", "main"]

#: The line of `flintmq --help`.
ABOUT = "print a completion script for bash, zsh or fish"

_SECONDS = 1.0

_SCRIPTS = {
    "bash": r"""# flintmq: completion for bash. Put it into ~/.bashrc: eval "$(flintmq completion bash)"
_flintmq() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local -a words
    # Not COMP_WORDS: bash ends words at ":" and "=" too, and an address has a colon.
    read -ra words <<< "$line"
    if [[ $line == *[[:space:]] ]]; then words+=(""); fi
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <(flintmq completion --answer "${words[@]:1}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]]; then compopt -o nospace; fi
}
complete -o default -F _flintmq flintmq
""",
    "zsh": r"""#compdef flintmq
# flintmq: completion for zsh. Put it into ~/.zshrc after compinit: eval "$(flintmq completion zsh)"
_flintmq() {
    local -a found
    found=("${(@f)$(flintmq completion --answer "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=("${(@)found:#}")
    if (( ${#found} )); then compadd -Q -- "${found[@]}"; else _files; fi
}
compdef _flintmq flintmq
""",
    "fish": r"""# flintmq: completion for fish. Run: flintmq completion fish > ~/.config/fish/completions/flintmq.fish
function __flintmq_complete
    set -l words (commandline -opc) (commandline -ct)
    flintmq completion --answer $words[2..-1] 2>/dev/null
end
complete -c flintmq -a '(__flintmq_complete)'
""",
}

#: What the first words of a command are: a topic, a topic and its channel, or one of some words.
_WORDS: dict[str, tuple[str, ...]] = {
    "channel": ("action", "channel"),
    "log": ("topic",),
    "ls": ("topics",),
    "peek": ("channel",),
    "pub": ("topic",),
    "redrive": ("channel",),
    "seek": ("channel", "place"),
    "settings": ("channel",),
    "stat": ("channel",),
    "sub": ("channel",),
    "tail": ("topics",),
    "topic": ("action", "topic"),
    "completion": ("shell",),
}
_FIXED = {"action": ACTIONS, "place": ("earliest", "latest"), "shell": tuple(_SCRIPTS)}


def main(argv: Sequence[str], commands: Sequence[str], run: Callable[[list[str]], object]) -> int:
    """`commands` are all that there are, and `run` runs one of them."""
    if argv[:1] == ["--answer"]:
        for word in answers(argv[1:], commands, run):
            print_line(word)
        return 0
    parser = new_parser(
        "completion",
        "Print a script that completes commands, flags, topics and channels.",
        [
            'eval "$(flintmq completion bash)"                                   # in ~/.bashrc',
            'eval "$(flintmq completion zsh)"                                    # in ~/.zshrc, after compinit',
            "flintmq completion fish > ~/.config/fish/completions/flintmq.fish",
        ],
    )
    parser.add_argument("shell", metavar="bash|zsh|fish", choices=tuple(_SCRIPTS), help="bash, zsh or fish")
    parser.add_argument("--json", action="store_true", help="print the script as JSON")
    arguments = parser.parse_args(argv)
    if arguments.json:
        print_json({"shell": arguments.shell, "script": _SCRIPTS[arguments.shell]})
    else:
        print_line(_SCRIPTS[arguments.shell].rstrip())
    return 0


# --- Answers ----------------------------------------------------------------------------------------------------------


def answers(words: Sequence[str], commands: Sequence[str], run: Callable[[list[str]], object]) -> list[str]:
    """Return what the last of the words behind `flintmq` may become."""
    *before, last = words or [""]
    if not before:
        return _beginning(commands, last)
    command, *rest = before
    flags = _flags(command, run)
    if last.startswith("-"):
        return _beginning(flags, last)
    if rest and rest[-1] in flags and flags[rest[-1]]:
        return []  # its value: a file, an address, a number
    kind = _kind(command, rest, flags)
    if kind in _FIXED:
        return _beginning(_FIXED[kind], last)
    if kind in ("topic", "topics", "channel"):
        return _names(rest, last, wants_channel=kind == "channel")
    return []


def _beginning(words: Sequence[str] | dict[str, bool], last: str) -> list[str]:
    return sorted(word for word in words if word.startswith(last))


class _Caught(Exception):
    """The parser of a command, at the moment when it would read the words."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _flags(command: str, run: Callable[[list[str]], object]) -> dict[str, bool]:
    """Return the flags of a command, each with whether it takes a value."""
    known = _options_class(command)
    if known is not None:
        return {f"--{flag}": not entry.kind.bare for flag, entry in option_table(known).items()}
    try:
        with _catching():
            run([command])
    except _Caught as caught:
        actions = caught.parser._actions
        return {
            flag: action.nargs != 0
            for action in actions
            for flag in action.option_strings
            if flag.startswith("--") or flag == "-n"
        }
    except Exception:
        # A command that does more than that before it reads its words is completed without its flags.
        return {}
    return {}


def _options_class(command: str) -> type[Options] | None:
    daemons = {"nsqd": options.NsqdOptions, "nsqlookupd": options.NsqlookupdOptions}
    if command in daemons:
        return daemons[command]
    if command.startswith("nsq_") or command == "to_nsq":
        with contextlib.suppress(ImportError, AttributeError):
            found: type[Options] = importlib.import_module(f"flintmq.tools.{command}").OPTIONS
            return found
    return None


@contextlib.contextmanager
def _catching() -> Iterator[None]:
    """Have every parser end where it would read the words."""

    def catch(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise _Caught(parser)

    # Commands whose flags may stand between their arguments read them by the second.
    names = ("parse_args", "parse_intermixed_args")
    real = {name: getattr(argparse.ArgumentParser, name) for name in names}
    try:
        for name in names:
            setattr(argparse.ArgumentParser, name, catch)
        yield
    finally:
        for name in names:
            setattr(argparse.ArgumentParser, name, real[name])


def _kind(command: str, rest: Sequence[str], flags: dict[str, bool]) -> str:
    """Return what the next word of a command is that is no flag."""
    place = 0
    is_value = False
    for word in rest:
        if is_value:
            is_value = False
        elif word.startswith("-"):
            is_value = "=" not in word and flags.get(word, False)
        else:
            place += 1
    kinds = _WORDS.get(command, ())
    if kinds and kinds[-1] == "topics":
        return "topics"
    return kinds[place] if place < len(kinds) else ""


def _names(rest: Sequence[str], last: str, *, wants_channel: bool) -> list[str]:
    """Return topics, or the channels of one, from the daemons that the line names."""
    lookupds = _given(rest, "--lookupd-http-address")
    nsqds = _given(rest, "--nsqd-http-address") or ([] if lookupds else [DEFAULT_NSQD_HTTP])

    async def ask() -> list[str]:
        async with asyncio.timeout(_SECONDS), Cluster(nsqds, lookupds, timeout=_SECONDS) as cluster:
            topics = (await cluster.sample()).topics
        topic, slash, _ = last.partition("/")
        if slash and wants_channel:
            return [f"{topic}/{name}" for name in topics[topic].channels] if topic in topics else []
        return [f"{name}/" if wants_channel else name for name in topics]

    try:
        return _beginning(asyncio.run(ask()), last)
    except (FlintError, OSError, TimeoutError):
        return []


def _given(words: Sequence[str], flag: str) -> list[str]:
    found = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return found + [value for name, value in itertools.pairwise(words) if name == flag]
