"""Ask the nsqlookupds of a cluster over HTTP, merge what they say, and report who did not answer.

All of them are asked at the same time; each knows only who registered with it, so the answers are joined. Some may be
down: the question fails only if nobody answered. Nothing is kept between questions but the HTTP connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from flintmq.addresses import http_url, join
from flintmq.errors import ClusterError

if TYPE_CHECKING:
    import ssl

    import aiohttp

__all__ = ["Answer", "Lookupds", "Node", "lookupd_url"]

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
    producers: list[Node] | None = None
    channels: list[str] | None = None


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

    async def producers(self, topic: str) -> Answer[list[Node]]:
        """The nsqds that have a topic. One that a lookupd has not heard of has none: no failure."""
        return await self._ask_all(lambda url: self._nodes(url, "lookup", topic=topic))

    async def nodes(self) -> Answer[list[Node]]:
        """Every nsqd."""
        return await self._ask_all(lambda url: self._nodes(url, "nodes"))

    async def _ask_all(self, ask: Callable[[str], Awaitable[list[Node]]]) -> Answer[list[Node]]:
        answers = await asyncio.gather(*map(ask, self.urls), return_exceptions=True)
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
            return msgspec.json.decode(data, type=_Producers).producers or []
        except msgspec.MsgspecError as exc:
            raise ClusterError(f"an answer that is not a lookupd's ({exc})", {}) from exc

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
                    raise ClusterError(f"HTTP {response.status}: {body[:200].decode(errors='replace')}", {})
                return body
        except (aiohttp.ClientError, OSError) as exc:
            raise ClusterError(str(exc) or type(exc).__name__, {}) from exc


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
