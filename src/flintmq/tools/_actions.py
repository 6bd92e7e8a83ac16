"""What `flintmq topic` and `flintmq channel` do: create, pause, unpause, empty, delete, on every nsqd that has it.

What cannot be taken back (empty, delete) first says how many messages it costs, and asks. Nsqlookupds are told too, as
nsqadmin does.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

from flintmq.cluster.node import NodeClient
from flintmq.errors import OptionError
from flintmq.tools import print_json, print_line, split_source
from flintmq.tools._cluster import Cluster, Sample, cluster_flags, run_on_cluster, warn
from flintmq.tools._show import new_parser

__all__ = ["ACTIONS", "main"]

ACTIONS = ("create", "pause", "unpause", "empty", "delete")
#: What is done, for the last line.
_DONE = {"create": "created", "pause": "paused", "unpause": "unpaused", "empty": "emptied", "delete": "deleted"}


def main(kind: str, argv: Sequence[str]) -> int:
    is_channel = kind == "channel"
    name = "orders/billing" if is_channel else "orders"
    about = (
        "Create, pause, unpause, empty or delete a channel on every nsqd that has its topic. Pausing stops deliveries; "
        "emptying drops all its messages, those in flight too; deleting disconnects its consumers."
        if is_channel
        else "Create, pause, unpause, empty or delete a topic on every nsqd that has it. Pausing keeps messages from "
        "its channels; emptying drops those that no channel has seen yet; deleting drops its channels and all messages."
    )
    parser = new_parser(
        kind,
        f"{about} Before messages are dropped, the command says how many and asks.",
        [
            f"flintmq {kind} create {name}",
            f"flintmq {kind} pause {name}",
            f"flintmq {kind} empty {name} --yes",
            f"flintmq {kind} delete {name} --lookupd-http-address 127.0.0.1:4161",
        ],
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("source", metavar="TOPIC/CHANNEL" if is_channel else "TOPIC")
    parser.add_argument("--yes", action="store_true", help="do not ask before messages are lost")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; then --yes is needed")
    cluster_flags(parser)
    arguments = parser.parse_args(argv)
    topic, channel = split_source(parser, arguments.source, channel=is_channel)
    return run_on_cluster(kind, arguments, lambda cluster: _act(cluster, kind, topic, channel, arguments))


async def _act(cluster: Cluster, kind: str, topic: str, channel: str, arguments: argparse.Namespace) -> int:
    action: str = arguments.action
    sample = await cluster.sample(topic)
    label = f"{topic}/{channel}" if channel else topic
    nodes = _nodes_with(sample, topic, channel)
    if action == "create":
        # On the nsqds that have the topic; if none has it, on those that were named.
        nodes = [address for address, topics in sample.nodes.items() if topic in topics] or cluster.nsqds
    elif not nodes:
        raise OptionError(f"no nsqd has the {kind} {label}; flintmq ls lists all")
    warn(kind, sample.failures)
    messages = _messages(sample, nodes, topic, channel, action)
    if action in ("empty", "delete") and not arguments.yes:
        _confirm(action, kind, label, messages, len(nodes), can_ask=not arguments.json)
    failures = dict(sample.failures)
    if cluster.lookupds and action in ("create", "delete"):
        query = {"topic": topic} | ({"channel": channel} if channel else {})
        if action == "create" and channel:
            failures |= await cluster.tell_lookupds("topic/create", topic=topic)
        failures |= await cluster.tell_lookupds(f"{kind}/{action}", **query)
    _, refused = await cluster.each(nodes, _call(action, kind, topic, channel))
    failures |= refused
    warn(kind, refused)
    done = [address for address in nodes if address not in refused]
    if arguments.json:
        print_json(
            {"action": action, "topic": topic, "channel": channel, "messages": messages, "nodes": done}
            | {"failures": failures}
        )
    else:
        where = f"on {len(done)} nsqd{'' if len(done) == 1 else 's'}"
        if cluster.lookupds and action in ("create", "delete"):
            where += f" and {len(cluster.lookupds)} nsqlookupd{'' if len(cluster.lookupds) == 1 else 's'}"
        lost = f", {messages:,} message{'' if messages == 1 else 's'} dropped" if action in ("empty", "delete") else ""
        if action == "create" and not nodes:
            # nsqlookupd alone: `flintmq ls`, which asks nsqds, does not show it yet.
            where = f"{where.removeprefix('on 0 nsqds and ')}; an nsqd creates it with the first message to {topic}"
            print_line(f"{label}: registered with {where}")
        else:
            print_line(f"{label}: {_DONE[action]} {where}{lost}")
    return 1 if failures else 0


def _nodes_with(sample: Sample, topic: str, channel: str) -> list[str]:
    return [
        address
        for address, topics in sample.nodes.items()
        if topic in topics and (not channel or channel in topics[topic].channels)
    ]


def _messages(sample: Sample, nodes: Sequence[str], topic: str, channel: str, action: str) -> int:
    """Return how many messages an action drops; for one that several channels have, it counts for each."""
    if action not in ("empty", "delete"):
        return 0
    total = 0
    for address in nodes:
        about = sample.nodes[address][topic]
        if not channel:
            total += about.depth
            if action == "empty":
                continue
        for label, each in about.channels.items():
            if not channel or label == channel:
                total += each.depth + each.in_flight_count + each.deferred_count
    return total


def _confirm(action: str, kind: str, label: str, messages: int, nodes: int, *, can_ask: bool) -> None:
    """Ask. OptionError if the answer is no, or nobody can be asked."""
    cost = f"{messages:,} message{'' if messages == 1 else 's'} will be lost"
    where = f"{nodes} nsqd{'' if nodes == 1 else 's'}"
    question = f"{action} the {kind} {label} on {where}: {cost}"
    if not can_ask or not sys.stdin.isatty():
        raise OptionError(f"{question}; give --yes to do it")
    sys.stderr.write(f"{question}. Type yes to go on: ")
    sys.stderr.flush()
    # asyncio would only note a ctrl-C, and wait for the answer.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        answer = sys.stdin.readline()
    finally:
        signal.signal(signal.SIGINT, before)
    if answer.strip().lower() not in ("yes", "y"):
        raise OptionError("nothing was changed")


def _call(action: str, kind: str, topic: str, channel: str) -> Callable[[NodeClient], Awaitable[None]]:
    async def call(node: NodeClient) -> None:
        if action == "create" and channel:
            await node.create_topic(topic)
        method = getattr(node, f"{action}_{kind}")
        await (method(topic, channel) if channel else method(topic))

    return call
