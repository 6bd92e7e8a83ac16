"""Pipelines that would read what they publish: each message comes back, without an end, so they are refused.

On other brokers a topic of the same name is another one. Brokers are told apart by their addresses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flintmq.errors import PipelineError
from flintmq.spark.pipelines.given import DEFAULT_NSQD
from flintmq.spark.shipped.options import NAME, NAME_RULE

__all__ = ["Reads", "check_loop", "target_of_topic"]

_TOPIC = "{topic}"
_ADDRESSES = ("nsq.lookupd.http.addresses", "nsq.nsqd.addresses")


@dataclass(frozen=True)
class Reads:
    """The topics that a source reads: these, or those that match a pattern."""

    names: tuple[str, ...] = ()
    pattern: str = ""
    #: Of the brokers that are published to.
    is_here: bool = False

    @staticmethod
    def of(source: Mapping[str, str], network: Mapping[str, str]) -> Reads:
        """Options of a source and of a sink, as for `format("nsq")`."""
        given = {key.lower(): value for key, value in source.items()}
        names = tuple(name.strip() for name in given.get("subscribe", "").split(",") if name.strip())
        is_here = _may_be_same(_addresses(source), _addresses(network))
        return Reads(names, given.get("subscribepattern", ""), is_here)

    def __contains__(self, topic: str) -> bool:
        return self.is_here and (topic in self.names or bool(self.pattern and re.fullmatch(self.pattern, topic)))

    def refusal(self, topic: str, to: str) -> str:
        """Return why a message of a topic is not to be published to another one; nothing if it may be."""
        target = target_of_topic(to, topic)
        if not NAME.fullmatch(target):
            return f"messages of {topic} would go to {target!r}, and that is no name of a topic: {NAME_RULE}"
        return _comes_back(target) if target in self else ""


def target_of_topic(to: str, topic: str) -> str:
    """Return where messages of a topic go, where ``{topic}`` stands for it."""
    return to.replace(_TOPIC, topic)


def check_loop(source: Mapping[str, str], to: str, network: Mapping[str, str], argument: str) -> None:
    """PipelineError if a source reads the topic that its messages, or what is made of them, would be published to."""
    reads = Reads.of(source, network)
    # Of a pattern no topic is known here.
    names = ("",) if _TOPIC not in to else reads.names
    back = [target for name in names if (target := target_of_topic(to, name)) in reads]
    if back or (to == _TOPIC and reads.is_here and reads.pattern):
        raise PipelineError(f"{argument} {to}: {_comes_back(back[0] if back else 'of a message')}: give another topic")


def _comes_back(topic: str) -> str:
    return f"the topic {topic} is one of those that are read, so that each message would come back without an end"


def _addresses(options: Mapping[str, str]) -> dict[str, set[str]]:
    given = {key.lower(): {one.strip() for one in value.split(",")} for key, value in options.items()}
    found = {key: given[key] for key in _ADDRESSES if key in given}
    return found or {"nsq.nsqd.addresses": {DEFAULT_NSQD}}


def _may_be_same(one: Mapping[str, set[str]], other: Mapping[str, set[str]]) -> bool:
    """Have they an address in common? nsqlookupds and nsqds cannot be compared."""
    return any(one[kind] & other[kind] for kind in one.keys() & other.keys())
