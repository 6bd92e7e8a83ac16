"""A cluster as operators' commands see it: nsqds named by address or found by nsqlookupds, asked all at once.

Every answer is merged over the nsqds that gave one; those that did not are reported beside it, never hidden. `Cluster`
owns the HTTP connections; `Sample` is what `/stats` said at one moment, and two of them make rates.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

import msgspec

from flintmq.addresses import join, split
from flintmq.cluster.lookupds import Lookupds, Node, lookupd_url
from flintmq.cluster.node import NodeClient
from flintmq.cluster.shapes import check, short_text
from flintmq.errors import UNREADABLE, ClusterError, ConnectError, FlintError, HttpError, OptionError
from flintmq.tools import DEFAULT_NSQD_HTTP, read_token, refuses_plain_http, run, tls_flags, tls_of
from flintmq.tools._output import open_standard_files
from flintmq.tools._show import parse_timeout

if TYPE_CHECKING:
    import ssl

    import aiohttp

__all__ = [
    "ChannelStats",
    "Cluster",
    "Sample",
    "TopicStats",
    "cluster_flags",
    "lookupd_topics",
    "run_on_cluster",
    "warn",
]

_T = TypeVar("_T")

_COUNTS = ("depth", "backend_depth", "message_count", "in_flight_count", "deferred_count", "requeue_count")


@dataclass
class ChannelStats:
    """A channel, summed over nsqds."""

    depth: int = 0
    backend_depth: int = 0
    message_count: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    clients: int = 0
    #: On how many nsqds it is, and on how many of these it is paused.
    nodes: int = 0
    paused_on: int = 0

    @property
    def paused(self) -> bool:
        return self.nodes > 0 and self.paused_on == self.nodes

    @property
    def finished(self) -> int:
        """Messages that have left the channel."""
        return self.message_count - self.depth - self.in_flight_count - self.deferred_count


@dataclass
class TopicStats:
    """A topic, summed over nsqds, with its channels."""

    depth: int = 0
    backend_depth: int = 0
    message_count: int = 0
    message_bytes: int = 0
    nodes: int = 0
    paused_on: int = 0
    channels: dict[str, ChannelStats] = field(default_factory=dict)

    @property
    def paused(self) -> bool:
        return self.nodes > 0 and self.paused_on == self.nodes

    @property
    def total_depth(self) -> int:
        """Messages that somebody still has to get: of the topic itself and of all channels."""
        return self.depth + sum(channel.depth for channel in self.channels.values())


def _merge(into: dict[str, TopicStats], about: dict[str, Any]) -> None:
    """Add what one nsqd says about a topic."""
    topic = into.setdefault(_name(about["topic_name"]), TopicStats())
    topic.nodes += 1
    topic.paused_on += bool(about.get("paused"))
    for name in ("depth", "backend_depth", "message_count", "message_bytes"):
        setattr(topic, name, getattr(topic, name) + int(about.get(name) or 0))
    for other in about.get("channels") or ():
        channel = topic.channels.setdefault(_name(other["channel_name"]), ChannelStats())
        channel.nodes += 1
        channel.paused_on += bool(other.get("paused"))
        for name in (*_COUNTS, "timeout_count"):
            setattr(channel, name, getattr(channel, name) + int(other.get(name) or 0))
        channel.clients += int(other.get("client_count") or len(other.get("clients") or ()))


def _name(name: Any) -> str:
    """Return the name of a topic or channel. ValueError for what no nsqd would have, and no terminal should get."""
    if not isinstance(name, str) or not name.isprintable():
        raise ValueError(f"{name!r} is no name")
    return name


@dataclass
class Sample:
    """What the nsqds said at one moment."""

    taken: float
    #: By address of the nsqd.
    nodes: dict[str, dict[str, TopicStats]]
    versions: dict[str, str]
    failures: dict[str, str]

    @property
    def topics(self) -> dict[str, TopicStats]:
        return _summed(self.nodes.values())

    def rates(self, before: Sample | None) -> dict[tuple[str, str], tuple[float, float]]:
        """Return messages in and out a second of each topic (with an empty channel) and channel since `before`.

        Only nsqds that are in both samples count: one that was not asked before would add all it ever had.
        """
        if before is None:
            return {}
        took = max(1e-9, self.taken - before.taken)
        common = [address for address in self.nodes if address in before.nodes]
        then = _summed(before.nodes[address] for address in common)
        now = _summed(self.nodes[address] for address in common)
        found: dict[tuple[str, str], tuple[float, float]] = {}
        for name, topic in now.items():
            old = then.get(name, TopicStats())
            out = 0.0
            for label, channel in topic.channels.items():
                was = old.channels.get(label, ChannelStats())
                # After a restart an nsqd counts from zero again.
                came = max(0.0, (channel.message_count - was.message_count) / took)
                left = max(0.0, (channel.finished - was.finished) / took)
                found[name, label] = (came, left)
                out += left
            found[name, ""] = (max(0.0, (topic.message_count - old.message_count) / took), out)
        return found


def _summed(nodes: Iterable[dict[str, TopicStats]]) -> dict[str, TopicStats]:
    total: dict[str, TopicStats] = {}
    for node in nodes:
        for name, topic in node.items():
            sum_ = total.setdefault(name, TopicStats())
            _add(sum_, topic, skip="channels")
            for label, channel in topic.channels.items():
                _add(sum_.channels.setdefault(label, ChannelStats()), channel)
    return total


def _add(into: Any, other: Any, skip: str = "") -> None:
    for entry in dataclasses.fields(into):
        if entry.name != skip:
            setattr(into, entry.name, getattr(into, entry.name) + getattr(other, entry.name))


class Cluster:
    """The nsqds and nsqlookupds that a command was given. `async with`."""

    def __init__(
        self,
        nsqds: Sequence[str] = (),
        lookupds: Sequence[str] = (),
        *,
        token: str | None = None,
        tls: bool | ssl.SSLContext = True,
        timeout: float = 5.0,
    ) -> None:
        self.nsqds = list(nsqds)
        self.lookupds = list(lookupds)
        self._token = token
        self._tls = tls
        self._timeout = timeout
        self._asked = Lookupds(self.lookupds, timeout=timeout, token=token, tls=tls)
        self._clients: dict[str, NodeClient] = {}
        self._session: aiohttp.ClientSession | None = None
        #: Failures of nsqlookupds when the nodes were looked up last.
        self.failures: dict[str, str] = {}
        #: An nsqd asked for a token, or for another one.
        self.needs_token = False

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._asked.close()
        for client in self._clients.values():
            await client.close()
        if self._session is not None:
            await self._session.close()

    def node(self, address: str) -> NodeClient:
        if address not in self._clients:
            self._clients[address] = NodeClient(address, token=self._token, tls=self._tls, timeout=self._timeout)
        return self._clients[address]

    async def find(self, topic: str = "") -> list[str]:
        """Return the HTTP addresses of all nsqds, or of those that have a topic as the nsqlookupds say."""
        self.failures = {}
        if not self.lookupds:
            return self.nsqds
        answer = await (self._asked.producers(topic) if topic else self._asked.nodes())
        self.failures = {f"nsqlookupd {url}": reason for url, reason in answer.failures.items()}
        return [node.http_address for node in answer.value if node.http_port]

    async def nodes(self) -> list[Node]:
        """Return what the nsqlookupds say about each nsqd; nothing without nsqlookupds."""
        answer = await self._asked.nodes()
        return answer.value

    async def each(
        self, addresses: Iterable[str], ask: Callable[[NodeClient], Awaitable[_T]]
    ) -> tuple[dict[str, _T], dict[str, str]]:
        """Ask every nsqd at once; return the answers, and what the others said instead. HttpError is a failure."""
        asked = list(dict.fromkeys(addresses))
        answers = await asyncio.gather(*(ask(self.node(address)) for address in asked), return_exceptions=True)
        found: dict[str, _T] = {}
        failures: dict[str, str] = {}
        for address, answer in zip(asked, answers, strict=True):
            if isinstance(answer, FlintError | OSError):
                failures[address] = self._refusal(address, answer) if isinstance(answer, HttpError) else str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[address] = answer
        return found, failures

    def _refusal(self, address: str, error: HttpError) -> str:
        """Return why an nsqd answers nothing else, for people."""
        if error.code == "TLS_REQUIRED":
            return refuses_plain_http(address, error)
        if error.code not in ("UNAUTHORIZED", "FORBIDDEN"):
            return error.code
        self.needs_token = True
        if error.code == "FORBIDDEN":
            right = error.details.get("missing_right")
            return f"the nsqd at {address} refuses it: the token lacks the right{f' {right}' if right else ''}"
        return f"the nsqd at {address} {'does not know this token' if self._token else 'asks for a token'}"

    async def sample(self, topic: str = "", channel: str = "") -> Sample:
        """Return the present `/stats` of all nsqds. ClusterError if none of them answers."""
        addresses = await self.find()
        found, failures = await self.each(addresses, lambda node: node.stats(topic, channel, clients=False))
        failures |= self.failures
        nodes: dict[str, dict[str, TopicStats]] = {}
        versions: dict[str, str] = {}
        for address, stats in found.items():
            topics: dict[str, TopicStats] = {}
            try:
                # Before 1.0 the answer came in an envelope.
                stats = stats.get("data", stats) if "status_code" in stats else stats
                check("nsqd", "stats", stats)
                for about in stats.get("topics") or ():
                    _merge(topics, about)
                version = str(stats.get("version", ""))
            except (msgspec.ValidationError, OverflowError, ValueError):
                # It spoils nobody else's answer.
                failures[address] = f"what {address} says at /stats is not what an nsqd says"
                continue
            nodes[address], versions[address] = topics, version
        if not nodes and failures:
            raise ClusterError("; ".join(failures.values()), failures)
        return Sample(time.monotonic(), nodes, versions, failures)

    async def tcp_addresses(self) -> list[str]:
        """Return where to consume from the nsqds that were named: their own host, and the port that they tell."""
        infos, failures = await self.each(self.nsqds, lambda node: node.info())
        if failures:
            raise ConnectError("; ".join(f"{reason}" for reason in failures.values()))
        found = []
        for address, info in infos.items():
            try:
                check("nsqd", "info", info)
            except msgspec.ValidationError:
                info = {}
            if not info.get("tcp_port"):
                raise ConnectError(f"what {address} says at /info is not what an nsqd says")
            host = _host_of(address) or info.get("broadcast_address") or "127.0.0.1"
            found.append(join(host, info["tcp_port"]))
        return found

    async def tell_lookupds(self, path: str, **query: str) -> dict[str, str]:
        """POST to every nsqlookupd; return the failures."""
        import aiohttp

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            timeout = aiohttp.ClientTimeout(total=self._timeout)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        session = self._session
        failures: dict[str, str] = {}

        async def tell(address: str) -> None:
            try:
                url = f"{lookupd_url(address).rstrip('/')}/{path}?{urlencode(query)}"
                async with session.post(url, ssl=self._tls) as response:
                    body = await response.read()
                    # What is not there need not be deleted.
                    if response.status not in (200, 404):
                        failures[address] = f"HTTP {response.status}: {short_text(body) or 'not an nsqlookupd'}"
            except aiohttp.ClientResponseError:
                failures[address] = "what listens there does not speak HTTP"
            except (aiohttp.ClientError, OSError, TimeoutError, OptionError) as exc:
                failures[address] = str(exc) or type(exc).__name__

        await asyncio.gather(*map(tell, self.lookupds))
        return failures


def _host_of(address: str) -> str:
    """Return the host of `host:port` or a URL; empty for the path of a unix socket."""
    _, scheme, rest = address.rpartition("://")
    try:
        return split(rest.partition("/")[0] if scheme else address)[0]
    except OptionError:
        return ""


# --- Commands ---------------------------------------------------------------------------------------------------------


def cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which cluster to ask, and as whom."""
    group = parser.add_argument_group("the cluster")
    daemons = group.add_mutually_exclusive_group()
    daemons.add_argument(
        "--lookupd-http-address",
        metavar="ADDRESS",
        action="append",
        default=[],
        help="nsqlookupd that knows the nsqds: host:port or a URL (repeatable)",
    )
    daemons.add_argument(
        "--nsqd-http-address",
        metavar="ADDRESS",
        action="append",
        default=[],
        help=f"nsqd: host:port, a URL or the path of a unix socket (repeatable; default {DEFAULT_NSQD_HTTP})",
    )
    group.add_argument(
        "--timeout", metavar="DURATION", type=parse_timeout, default=5.0, help="of each request (default 5s)"
    )
    group.add_argument("--token", metavar="TOKEN", help="for daemons that ask for one; other users can see it in ps")
    group.add_argument("--token-file", metavar="FILE", help="read the token from this file")
    tls_flags(group)


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    nsqds, lookupds = arguments.nsqd_http_address, arguments.lookupd_http_address
    return Cluster(
        nsqds or ([] if lookupds else [DEFAULT_NSQD_HTTP]),
        lookupds,
        token=read_token(arguments),
        tls=tls_of(arguments) or True,
        timeout=arguments.timeout,
    )


def run_on_cluster(
    tool: str, arguments: argparse.Namespace, work: Callable[[Cluster], Coroutine[Any, Any, int]]
) -> int:
    """Run a command that asks a cluster, to its exit status."""
    open_standard_files()

    async def main() -> int:
        async with cluster_of(arguments) as cluster:
            try:
                status = await work(cluster)
                sys.stdout.flush()
                return status
            except BrokenPipeError:
                # `| head` has seen enough. What is still buffered has nowhere to go.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 0
            except ClusterError as exc:
                raise ConnectionError(f"{exc}; {_hint(cluster)}") from exc

    return run(tool, main)


def _hint(cluster: Cluster) -> str:
    if cluster.needs_token:
        return "see --token-file"
    if cluster.lookupds:
        return "see --lookupd-http-address"
    return "start one with: flintmq up" if cluster.nsqds == [DEFAULT_NSQD_HTTP] else "see --nsqd-http-address"


def warn(tool: str, failures: dict[str, str]) -> None:
    """Say who did not answer, or refused: what is shown, or done, is without them."""
    for address, reason in failures.items():
        sys.stderr.write(f"flintmq {tool}: {address} is left out: {reason}\n")


async def lookupd_topics(
    addresses: Sequence[str], connect_seconds: float, request_seconds: float
) -> tuple[list[str], dict[str, str]]:
    """Return the topics that any of the nsqlookupds knows, and who did not answer."""
    import aiohttp

    topics: set[str] = set()
    failures: dict[str, str] = {}
    timeout = aiohttp.ClientTimeout(total=request_seconds, connect=connect_seconds)
    async with aiohttp.ClientSession(
        timeout=timeout, headers={"Accept": "application/vnd.nsq; version=1.0"}
    ) as session:

        async def ask(address: str) -> None:
            try:
                async with session.get(f"{lookupd_url(address).rstrip('/')}/topics") as response:
                    answer = msgspec.json.decode(await response.read(), type=dict[str, Any])
                    data = answer.get("data") if "status_code" in answer else answer
                    topics.update((data or {}).get("topics") or ())
            except (aiohttp.ClientError, OSError, *UNREADABLE) as exc:
                failures[address] = str(exc) or type(exc).__name__

        await asyncio.gather(*map(ask, addresses))
    return sorted(topics), failures
