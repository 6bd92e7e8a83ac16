"""Ask the nsqlookupds of a cluster over HTTP, merge what they say, and report who did not answer.

All of them are asked at the same time; each knows only who registered with it, so the answers are joined. Some may be
down: the question fails only if nobody answered. Nothing is kept between questions but the HTTP connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from flintmq.addresses import http_url, join, split
from flintmq.cluster.shapes import short_text
from flintmq.errors import ClusterError, OptionError

if TYPE_CHECKING:
    import ssl

    import aiohttp

__all__ = ["Answer", "Lookupds", "Node", "lookupd_url"]

logger = logging.getLogger(__name__)

#: More than this is no answer of a lookupd.
_ANSWER_BYTES = 64 << 20

_T = TypeVar("_T")


class Node(msgspec.Struct, frozen=True):
    """An nsqd as a lookupd describes it."""

    broadcast_address: str = ""
    hostname: str = ""
    remote_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    topics: list[str] = []
    tombstones: list[bool] = []
    topology_region: str = ""
    topology_zone: str = ""

    @property
    def tcp_address(self) -> str:
        return join(self.broadcast_address or self.hostname, self.tcp_port)

    @property
    def http_address(self) -> str:
        return join(self.broadcast_address or self.hostname, self.http_port)


class _Producers(msgspec.Struct):
    #: Each is read for itself, so that one that is odd does not hide the others.
    producers: list[dict[str, Any]] | None = None


class Answer(msgspec.Struct, Generic[_T]):
    """What those who answered said together, and what the others said instead, by address."""

    value: _T
    failures: dict[str, str]


class Lookupds:
    """The lookupds of one cluster. `async with`, or `close` at the end."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout: float = 5.0,
        token: str | None = None,
        tls: bool | ssl.SSLContext = True,
    ) -> None:
        """`token` is sent as a bearer token; `tls` is the context for https addresses, False to believe any."""
        self.urls = [lookupd_url(address) for address in addresses]
        self._timeout = timeout
        self._headers = {"Accept": "application/vnd.nsq; version=1.0"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Lookupds:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def producers(self, topic: str, found: Callable[[list[Node]], None] | None = None) -> Answer[list[Node]]:
        """The nsqds that have a topic. One that a lookupd has not heard of has none: no failure.

        `found` is called with the nsqds of each lookupd as soon as it has answered: another one may take its time.
        """
        return await self._ask_all(lambda url: self._nodes(url, "lookup", topic=topic), found)

    async def nodes(self, found: Callable[[list[Node]], None] | None = None) -> Answer[list[Node]]:
        """Every nsqd; `found` as above."""
        return await self._ask_all(lambda url: self._nodes(url, "nodes"), found)

    async def _ask_all(
        self, ask: Callable[[str], Awaitable[list[Node]]], found_early: Callable[[list[Node]], None] | None
    ) -> Answer[list[Node]]:
        async def ask_one(url: str) -> list[Node]:
            nodes = await ask(url)
            if found_early is not None:
                found_early(nodes)
            return nodes

        answers = await asyncio.gather(*map(ask_one, self.urls), return_exceptions=True)
        found: dict[str, Node] = {}
        failures: dict[str, str] = {}
        for url, answer in zip(self.urls, answers, strict=True):
            if isinstance(answer, Exception):
                # Of any kind: a name that cannot be one is a ValueError. The others have answered.
                failures[url] = str(answer) or type(answer).__name__
            elif isinstance(answer, BaseException):
                raise answer
            else:
                for node in answer:
                    found.setdefault(node.tcp_address, node)
        if failures and len(failures) == len(self.urls):
            reasons = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
            raise ClusterError(f"no nsqlookupd answered: {reasons}", failures)
        return Answer(list(found.values()), failures)

    async def _nodes(self, url: str, what: str, **query: str) -> list[Node]:
        body = await self._get(_question(url, what, query))
        try:
            answer = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            # Before 1.0 the answer came in an envelope.
            data = answer["data"] if "data" in answer and "status_code" in answer else body
            described = msgspec.json.decode(data, type=_Producers).producers or []
        except msgspec.MsgspecError as exc:
            raise ClusterError(f"an answer that is not a lookupd's ({exc})", {}) from exc
        nodes = []
        for about in described:
            try:
                nodes.append(_node(about))
            except (ValueError, OptionError) as exc:
                logger.warning("nsqlookupd %s: an nsqd that cannot be one is passed over: %s", url, exc)
        return nodes

    async def _get(self, url: str) -> bytes:
        # Imported here: who names his brokers himself needs no HTTP.
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout), headers=self._headers
            )
        try:
            async with self._session.get(url, ssl=self._tls) as response:
                body = await _whole(response)
                if response.status == 404 and b"TOPIC_NOT_FOUND" in body:
                    return b'{"producers":[]}'
                if response.status != 200:
                    raise ClusterError(f"HTTP {response.status}: {short_text(body) or 'not an nsqlookupd'}", {})
                return body
        except aiohttp.ClientResponseError as exc:
            raise ClusterError("what listens there does not speak HTTP", {}) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise ClusterError(str(exc) or type(exc).__name__, {}) from exc


def _node(about: dict[str, Any]) -> Node:
    """Return what a lookupd says about an nsqd. ValueError or OptionError if nobody could connect to that."""
    # Go writes null for a list without entries.
    node = msgspec.convert({name: value for name, value in about.items() if value is not None}, Node)
    # Not a path: that would be a socket of this machine.
    split(node.tcp_address, unix=False)
    return node


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    # In the pieces it comes in: one read gives no more than what is there.
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _ANSWER_BYTES:
            raise ClusterError("an answer without end", {})
    return bytes(body)


def lookupd_url(address: str) -> str:
    """Return ``host:port`` or a URL as a URL. OptionError if it is neither."""
    return http_url(address, "an nsqlookupd", query=True)


def _question(url: str, what: str, query: dict[str, str]) -> str:
    """A path or a query that somebody gave stays, as where lookupds are behind a proxy."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/") + f"/{what}" if what == "nodes" or parts.path in ("", "/") else parts.path
    return urlunsplit(parts._replace(path=path, query=urlencode([*parse_qsl(parts.query), *query.items()])))
