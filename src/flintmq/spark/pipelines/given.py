"""What a command line says of topics and brokers, as options of `format("nsq")`.

Topics, brokers, a channel and the start of a first run have arguments of their own, and are options too. One that is
given both ways is refused: whichever won, the other would be passed over without a word.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

from flintmq.errors import PipelineError
from flintmq.spark.shipped.options import OPTIONS

__all__ = [
    "DEFAULT_NSQD",
    "DEFAULT_START",
    "check_network_only",
    "check_unused",
    "names_target",
    "network_options",
    "sink_options",
    "source_options",
]

#: Where `flintmq up` puts it.
DEFAULT_NSQD = "127.0.0.1:4150"
#: Where a first run starts.
DEFAULT_START = "earliest"

_NAMES = {option.name.lower(): option.name for option in OPTIONS}
#: Options, the arguments that say the same, and how these are written.
_OF_BROKERS = {"nsq.lookupd.http.addresses": ("lookupd", "--lookupd"), "nsq.nsqd.addresses": ("nsqd", "--nsqd")}
_OF_SOURCE = {
    **_OF_BROKERS,
    "channel": ("channel", "--channel"),
    "startingOffsets": ("start", "--from"),
    "startingTimestamp": ("start", "--from"),
}
#: Of these a stream, a query or a write has its own, which arguments set, or the pipeline.
_OF_QUERIES = {
    "checkpointlocation": "give --checkpoint",
    "queryname": "leave it out",
    "outputmode": "leave it out",
    "path": "leave it out",
}
#: Arguments whose flag has another name.
_FLAGS = {"start": "from"}
_OF_REPLAYS = {"topic": "give --to", "writeid": "leave it out"}


def source_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the options that a command line gives for the source, but for its topics.

    PipelineError if one is given twice, or as an argument too.
    """
    said = _pairs(arguments.option, "--option", _OF_QUERIES)
    by = getattr(arguments, "topics_by", "TOPIC")
    if "subscribe" in said:
        raise PipelineError(f"--option subscribe: name topics by {by} instead")
    if "subscribePattern" in said and arguments.topics:
        raise PipelineError(f"--option subscribePattern and {by} exclude each other: give one of them")
    _check(arguments, said, "--option", _OF_SOURCE)
    options = _network(arguments, said)
    if arguments.channel:
        options["channel"] = arguments.channel
    if said.keys().isdisjoint(("startingOffsets", "startingTimestamp")):
        start = arguments.start or DEFAULT_START
        options["startingTimestamp" if re.match(r"\d{4}-", start) else "startingOffsets"] = start
    return options | said


def network_options(arguments: argparse.Namespace, *, prefix: str = "") -> dict[str, str]:
    """Return where the brokers are, and how they are asked."""
    flag = _flag(prefix)
    said = _pairs(getattr(arguments, f"{prefix}option"), flag, _OF_QUERIES)
    _check(arguments, said, flag, _OF_BROKERS, prefix)
    return _network(arguments, said, prefix)


def check_network_only(arguments: argparse.Namespace) -> None:
    """PipelineError for options of a source, where nothing is read by one."""
    for name in _pairs(arguments.option, "--option", _OF_QUERIES):
        if not _is_of_network(name):
            raise PipelineError(f"--option {name}: only options of brokers are taken here, nsq.… and fetch.…")


def check_unused(arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """PipelineError for an argument that is given although nothing reads it; ``why`` says why nothing does."""
    for name in names:
        if getattr(arguments, name, None):
            raise PipelineError(f"--{_FLAGS.get(name, name).replace('_', '-')} has no meaning {why}: leave it out")


def sink_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the options that a command line gives for the sink, by --to-…; where that names no brokers, the source's.

    PipelineError if one is given twice, or as an argument too.
    """
    said = _pairs(arguments.to_option, "--to-option", _OF_QUERIES | _OF_REPLAYS)
    _check(arguments, said, "--to-option", _OF_BROKERS, "to_")
    network = _network(arguments, said, "to_") if names_target(arguments) else network_options(arguments)
    return network | said


def names_target(arguments: argparse.Namespace) -> bool:
    """Does a command line name brokers to publish to, beside those that it reads from?"""
    said = _pairs(arguments.to_option, "--to-option", _OF_QUERIES | _OF_REPLAYS)
    return bool(arguments.to_nsqd or arguments.to_lookupd or any(name.endswith(".addresses") for name in said))


def _flag(prefix: str) -> str:
    return f"--{prefix.replace('_', '-')}option"


def _pairs(given: Iterable[tuple[str, str]], flag: str, refused: dict[str, str]) -> dict[str, str]:
    """Return what an argument says that may be repeated, by the names of docs/spark.md. Spark's have no case."""
    found: dict[str, str] = {}
    for key, value in given:
        name = _NAMES.get(key.lower(), key)
        if (instead := refused.get(key.lower())) is not None:
            raise PipelineError(f"{flag} {key}: it is set by the pipeline itself: {instead}")
        # The values may be secrets.
        if found.setdefault(name, value) != value:
            raise PipelineError(f"{flag} {name} is given twice, with two values: give it once")
    return found


def _check(
    arguments: argparse.Namespace,
    said: dict[str, str],
    flag: str,
    known: dict[str, tuple[str, str]],
    prefix: str = "",
) -> None:
    for name, (attribute, argument) in known.items():
        if name in said and getattr(arguments, f"{prefix}{attribute}", None):
            argument = argument.replace("--", f"--{prefix.replace('_', '-')}")
            raise PipelineError(f"{flag} {name} and {argument} say the same: give one of them")


def _network(arguments: argparse.Namespace, said: dict[str, str], prefix: str = "") -> dict[str, str]:
    options = {name: value for name, value in said.items() if _is_of_network(name)}
    if lookupd := getattr(arguments, f"{prefix}lookupd"):
        options["nsq.lookupd.http.addresses"] = ",".join(lookupd)
    if nsqd := getattr(arguments, f"{prefix}nsqd"):
        options["nsq.nsqd.addresses"] = ",".join(nsqd)
    if not any(name.endswith(".addresses") for name in options):
        options["nsq.nsqd.addresses"] = DEFAULT_NSQD
    return options


def _is_of_network(name: str) -> bool:
    return name.startswith(("nsq.", "fetch."))
