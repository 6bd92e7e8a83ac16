"""What clients may do: the conversation with auth servers, and what they grant.

AuthServers asks over HTTP, one server after the other until one answers, and reads the answer strictly: whatever is
not understood grants nothing. A Grant is what one client got; it says for how long, and whether a topic or a channel
is covered. When to ask, and what happens to a client meanwhile, is the session's business.

The question:   remote_ip, tls, common_name (of the client's certificate), secret (the body of AUTH)
The answer:     {"ttl": seconds, "identity": "…", "identity_url": "…", "authorizations": [
                    {"topic": regex, "channels": [regex, …], "permissions": ["subscribe", "publish"]}, …]}
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit, urlunsplit

from flintmq import addresses
from flintmq.broker.net.guesses import Guesses
from flintmq.broker.net.patterns import Pattern, PatternError
from flintmq.errors import AuthError
from flintmq.http.imports import load
from flintmq.http.site import json_bytes
from flintmq.options import NsqdOptions

if TYPE_CHECKING:
    import ssl

    import aiohttp

__all__ = ["AuthServers", "Grant", "read_grant"]

logger = logging.getLogger(__name__)

#: An answer may be this large.
LARGEST_ANSWER = 256 << 10
#: An answer larger than this is read in a thread.
_LARGE_ANSWER = 8 << 10
#: All patterns of one answer together: a check takes that many steps per character of a name, at most.
MOST_STEPS = 20_000
#: Decisions that are remembered per client.
_REMEMBERED = 256
#: Nobody is trusted for longer without a question; timers take no more.
_LONGEST_TTL = 10 * 365 * 86_400
_ACCEPT = "application/vnd.nsq; version=1.0"


# --- Grants -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    topic: Pattern
    channels: tuple[Pattern, ...]
    subscribe: bool
    publish: bool

    def covers(self, topic: str, channel: str) -> bool:
        # For a publish the channel is empty, and as in NSQ a pattern for channels has to match that too.
        if not (self.subscribe if channel else self.publish) or not self.topic.found_in(topic):
            return False
        return any(pattern.found_in(channel) for pattern in self.channels)


@dataclass(frozen=True)
class Grant:
    """What a client may do, for ``ttl`` seconds."""

    ttl: int
    identity: str
    identity_url: str
    entries: tuple[_Entry, ...]
    _decided: dict[tuple[str, str], bool] = field(default_factory=dict, repr=False, compare=False)

    @property
    def count(self) -> int:
        return len(self.entries)

    def response(self) -> bytes:
        """The answer to AUTH."""
        return json_bytes(
            {"identity": self.identity, "identity_url": self.identity_url, "permission_count": self.count}
        )

    def allows(self, topic: str, channel: str) -> bool:
        """May the client subscribe to the channel, or publish to the topic if there is none?"""
        decided = self._decided.get((topic, channel))
        if decided is None:
            if len(self._decided) >= _REMEMBERED:
                self._decided.clear()
            decided = any(entry.covers(topic, channel) for entry in self.entries)
            self._decided[topic, channel] = decided
        return decided


def read_grant(body: bytes) -> Grant:
    """The answer of an auth server. AuthError says what is wrong with it."""
    try:
        answer = _fields(json.loads(body, parse_constant=_no_constant), "the answer")
        ttl = _of_type(answer.get("ttl"), int, 0, "ttl")
        if ttl <= 0:
            raise AuthError(f"invalid TTL {ttl} (must be >0)")
        room = MOST_STEPS
        entries = []
        for item in _of_type(answer.get("authorizations"), list, [], "authorizations"):
            entry = _entry(_fields(item, "an authorization"))
            room -= entry.topic.size + sum(pattern.size for pattern in entry.channels)
            if room < 0:
                raise AuthError("its regular expressions are too large")
            entries.append(entry)
        return Grant(
            min(ttl, _LONGEST_TTL),
            _text(answer.get("identity"), "identity"),
            _text(answer.get("identity_url"), "identity_url"),
            tuple(entries),
        )
    except RecursionError as exc:
        raise AuthError("its JSON nests too deeply") from exc
    except ValueError as exc:
        raise AuthError(f"cannot read its answer: {exc}") from exc


def _entry(item: Mapping[str, Any]) -> _Entry:
    permissions = [_text(word, "a permission") for word in _of_type(item.get("permissions"), list, [], "permissions")]
    for word in permissions:
        if word not in ("subscribe", "publish"):
            raise AuthError(f"unknown permission {word}")
    channels = _of_type(item.get("channels"), list, [], "channels")
    return _Entry(
        _pattern(item.get("topic"), "topic"),
        tuple(_pattern(channel, "a channel") for channel in channels),
        "subscribe" in permissions,
        "publish" in permissions,
    )


def _pattern(source: Any, what: str) -> Pattern:
    text = _text(source, what)
    try:
        return Pattern(text)
    except PatternError as exc:
        raise AuthError(f"unable to compile {what} {text[:100]!r}: {exc}") from exc


def _fields(value: Any, what: str) -> Mapping[str, Any]:
    """A JSON object by its keys in lower case: Go takes them in any."""
    return {key.lower(): item for key, item in _of_type(value, dict, {}, what).items() if item is not None}


def _of_type(value: Any, kind: type, default: Any, what: str) -> Any:
    # A boolean is a whole number to Python, and null leaves the default to Go.
    if value is None:
        return default
    if type(value) is not kind:
        raise ValueError(f"{what} is of a wrong type")
    return value


def _text(value: Any, what: str) -> str:
    text: str = _of_type(value, str, "", what)
    # Half of a surrogate pair is no character, and could not be sent on.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class RefusedError(AuthError):
    """An auth server has looked at the secret, and grants nothing."""


# --- Servers ----------------------------------------------------------------------------------------------------------


class AuthServers:
    """The servers of ``--auth-http-address``."""

    def __init__(self, options: NsqdOptions) -> None:
        self._addresses = options.auth_http_addresses
        self._post = options.auth_http_request_method == "post"
        self._connect_seconds = options.http_client_connect_timeout / 1e9
        self._request_seconds = options.http_client_request_timeout / 1e9
        self._options = options
        self._tls: ssl.SSLContext | None = None
        self._guesses: Guesses | None = None
        #: Questions that are being asked: each has a connection of its own.
        self.under_way = 0

    def ask(self, remote_ip: str, tls: bool, common_name: str, secret: bytes) -> asyncio.Task[Grant]:
        """What this client may do. The task ends with a Grant or an AuthError; it may be cancelled."""
        question: dict[str, str | bytes] = {
            "common_name": common_name,
            "remote_ip": remote_ip,
            "secret": secret,
            "tls": "true" if tls else "false",
        }
        loop = asyncio.get_running_loop()
        self._guesses = self._guesses or Guesses(loop.time)
        task = loop.create_task(self._ask_with_care(self._guesses, remote_ip, question))
        # Nobody may be left to look at an error: the client can be gone by then.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _ask_with_care(self, guesses: Guesses, remote_ip: str, question: Mapping[str, str | bytes]) -> Grant:
        """Ask, unless the same was refused a moment ago, and not too often for one address."""
        parts = [value.encode() if isinstance(value, str) else value for value in question.values()]
        key = guesses.key(*parts)
        async with guesses.place(remote_ip, key):
            if guesses.is_refused(key):
                raise AuthError("it was refused a moment ago")
            pause = guesses.wait(remote_ip, key)
            if pause is None:
                raise AuthError("too many secrets from its address were refused")
            if pause:
                await asyncio.sleep(pause)
                if guesses.is_refused(key):
                    raise AuthError("it was refused a moment ago")
            self.under_way += 1
            try:
                grant = await self._ask_any(question)
            except RefusedError:
                guesses.refused(remote_ip, key)
                raise
            finally:
                self.under_way -= 1
            if grant.entries:
                guesses.granted(key)
            else:
                guesses.refused(remote_ip, key)
            return grant

    async def _ask_any(self, question: Mapping[str, str | bytes]) -> Grant:
        await load("aiohttp")
        import aiohttp

        # From anywhere on: all servers get their share, and one that is down costs the others nothing.
        start = random.randrange(len(self._addresses))
        # Every conversation has its own connection, as in NSQ: they are rare.
        timeout = aiohttp.ClientTimeout(total=self._request_seconds, sock_connect=self._connect_seconds)
        async with aiohttp.ClientSession(timeout=timeout, headers={"Accept": _ACCEPT}) as client:
            is_refused = False
            for address in self._addresses[start:] + self._addresses[:start]:
                try:
                    return await self._ask(client, address, question)
                except AuthError as exc:
                    is_refused |= isinstance(exc, RefusedError)
                    logger.error("AUTH: failed auth against %s - %s", address, exc)
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
                    logger.error("AUTH: failed auth against %s - %s", address, _reason(exc))
        if is_refused:
            raise RefusedError("no auth server grants anything")
        raise AuthError("no auth server could be asked")

    async def _ask(self, client: aiohttp.ClientSession, address: str, question: Mapping[str, str | bytes]) -> Grant:
        url = address if "://" in address else f"http://{address}/auth"
        status, body = await self._request(client, url, question)
        if status == 403 and not url.startswith("https"):
            # A server of NSQ's own kind that wants TLS says so, and on which port.
            url = _over_https(url, body)
            status, body = await self._request(client, url, question)
        if status != 200:
            # A server that fails, or sends us elsewhere, has not looked at the secret.
            kind = RefusedError if 400 <= status < 500 else AuthError
            raise kind(f"got response {status} {body[:100]!r}")
        if len(body) > _LARGE_ANSWER:
            return await asyncio.to_thread(read_grant, body)
        return read_grant(body)

    async def _request(
        self, client: aiohttp.ClientSession, url: str, question: Mapping[str, str | bytes]
    ) -> tuple[int, bytes]:
        from yarl import URL

        tls = await self._client_tls() if url.startswith("https") else True
        if self._post:
            values = {key: [_decoded(value)] for key, value in question.items()}
            request = client.post(
                URL(url),
                data=json_bytes(values),
                headers={"Content-Type": "application/json"},
                ssl=tls,
                allow_redirects=False,
            )
        else:
            # Encoded here, and as Go does it: a secret is any bytes.
            request = client.get(URL(f"{url}?{urlencode(question)}", encoded=True), ssl=tls, allow_redirects=False)
        async with request as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > LARGEST_ANSWER:
                    raise AuthError(f"its answer is larger than {LARGEST_ANSWER} bytes")
            return response.status, bytes(body)

    async def _client_tls(self) -> ssl.SSLContext:
        if self._tls is None:
            import ssl

            # The system's authorities are a large file.
            context = await asyncio.to_thread(ssl.create_default_context, cafile=self._options.tls_root_ca_file or None)
            # Never older than 1.2, whatever old clients are allowed.
            if self._options.tls_min_version == "tls1.3":
                context.minimum_version = ssl.TLSVersion.TLSv1_3
            self._tls = context
        return self._tls


def _over_https(url: str, body: bytes) -> str:
    try:
        port = _fields(json.loads(body), "the answer").get("https_port")
    except ValueError as exc:
        raise RefusedError(f"got response 403 {body[:100]!r}") from exc
    if type(port) is not int or not 0 < port < 65_536:
        raise RefusedError(f"got response 403 {body[:100]!r}")
    parts = urlsplit(url)
    return urlunsplit(("https", addresses.join(parts.hostname or "", port), *parts[2:]))


def _reason(exc: Exception) -> str:
    """Return why a server could not be asked. Many of aiohttp's texts hold the URL, and so the secret."""
    import aiohttp

    if isinstance(exc, aiohttp.ClientResponseError):
        return f"{exc.status} {exc.message.partition(chr(10))[0]}"
    if isinstance(exc, aiohttp.ClientConnectorError):
        return f"cannot connect: {exc.strerror or type(exc.os_error).__name__}"
    return type(exc).__name__


def _decoded(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
