"""One nsqd as its operators see it: what its HTTP API offers, as calls with typed answers.

    async with NodeClient("127.0.0.1:4151") as node:
        page = await node.peek("orders", "billing", "in_flight")
        await node.requeue("orders", "billing", page.messages[0].id, delay=30)

What NSQ's own nsqd has (``info``, ``stats``, topics and channels made, deleted, paused, emptied) works with any nsqd;
the rest needs flintmq's. Whoever wants to publish or consume takes ``Producer`` and ``Consumer``. To find nodes there
is ``flintmq.cluster``, whose ``Node`` is what a lookupd says about one.

A NodeClient owns its HTTP connections and nothing else; every answer is as old as the question. Delays are seconds,
times are ``datetime`` or nanoseconds since 1970.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from flintmq.addresses import http_url
from flintmq.cluster.shapes import short_text
from flintmq.errors import ConnectError, HttpError, permission_hint
from flintmq.protocol.seqs import seq_of
from flintmq.protocol.wire import FrameDecoder, decode_message

if TYPE_CHECKING:
    import ssl

    import aiohttp

__all__ = [
    "DeadLetter",
    "EffectiveSettings",
    "Fetch",
    "Holder",
    "LogInfo",
    "LogMessage",
    "LogRange",
    "NodeClient",
    "Page",
    "PeekedMessage",
    "Position",
    "Redrive",
    "Seek",
]

#: More than this is no answer but of ``log_fetch``, which comes in pieces.
_ANSWER_BYTES = 256 << 20
#: The largest message that a log can hold, more than any ``--max-msg-size``.
_FRAME_BYTES = (1 << 31) - 1
_CHUNK_BYTES = 256 << 10
#: A time that no message is published at.
_LATEST = 1 << 63

State = Literal["ready", "in_flight", "deferred"]

_T = TypeVar("_T")


class Holder(msgspec.Struct, frozen=True):
    """Who holds a message that is in flight."""

    client_id: str = ""
    remote_address: str = ""


class DeadLetter(msgspec.Struct, frozen=True):
    """Where a dead letter comes from and why it is one."""

    topic: str = ""
    channel: str = ""
    id: str = ""
    attempts: int = 0
    #: ``requeued``, ``timed out`` or ``expired``.
    reason: str = ""
    #: When it died, and when it was first published, in ns since 1970.
    time: int = 0
    published: int = 0
    #: The topics it has been in.
    path: tuple[str, ...] = ()


class PeekedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was looked at. ``body`` may be its beginning only: then ``truncated``."""

    id: str
    seq: int
    timestamp: int
    #: Deliveries so far.
    attempts: int
    size: int
    body: bytes
    truncated: bool = False
    #: Deferred: when it becomes ready, in ns since 1970.
    due: int | None = None
    #: In flight: when it times out, and who holds it unless he is gone.
    deadline: int | None = None
    client: Holder | None = None
    dead: DeadLetter | None = None
    #: Its file is damaged: nothing but its id is known.
    damaged: bool = False


class Page(msgspec.Struct, frozen=True):
    """Some messages, and what to give as ``after`` to see those that follow; None: that was all."""

    messages: list[PeekedMessage]
    next: str | None = None


class EffectiveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a topic or channel: what holds, what of it was set while the broker ran, where each is from."""

    topic: str
    channel: str = ""
    settings: dict[str, Any]
    set: dict[str, Any] = {}
    source: dict[str, str] = {}


class Redrive(msgspec.Struct, frozen=True):
    """How far dead letters have come on their way back."""

    dead_letter_topic: str = ""
    planned: int = 0
    moved: int = 0
    running: bool = False
    #: Why it ended early; ``stopped`` if somebody ended it.
    error: str = ""
    #: Only dead letters of this cause go back; empty: all of them; None: the node cannot do it by cause.
    reason: str | None = None


class Seek(msgspec.Struct, frozen=True):
    """Where a channel stands after a seek: the first message it will deliver, and how many wait."""

    topic: str
    channel: str
    offset: int
    messages: int


class LogInfo(msgspec.Struct, frozen=True):
    """A topic's log: messages ``first`` … ``durable - 1`` can be fetched; those up to ``end`` soon."""

    topic: str
    node: str
    epoch: str
    first: int
    durable: int
    end: int
    messages: int = 0
    bytes: int = 0


class Position(msgspec.Struct, frozen=True):
    """How far a reader of a log has come, what lies before it, and when it last moved (ns since 1970)."""

    reader: str
    offset: int
    lag: int = 0
    bytes: int = 0
    moved: int = 0


class _Positions(msgspec.Struct):
    positions: list[Position]


class LogRange(msgspec.Struct, frozen=True):
    """A range of a log, and how many messages it has. With ``all`` all of them are of the time that was asked for."""

    start: int = msgspec.field(name="from")
    stop: int = msgspec.field(name="to")
    messages: int
    all: bool


class _Ranges(msgspec.Struct):
    epoch: str
    ranges: list[LogRange]


class _Offset(msgspec.Struct):
    offset: int


class LogMessage(NamedTuple):
    """A message of a log."""

    seq: int
    timestamp: int
    id: str
    body: bytes


class Fetch:
    """The answer to ``log_fetch``: iterate over it for the raw frames, in pieces that end anywhere."""

    def __init__(self, response: aiohttp.ClientResponse, url: str) -> None:
        self._response = response
        self._url = url
        #: Whose log it is.
        self.node = response.headers.get("X-Flintmq-Node", "")
        self.epoch = response.headers.get("X-Flintmq-Epoch", "")
        #: The first message that is not in this answer: ask on from there.
        self.next = int(response.headers.get("X-Flintmq-Next", "0"))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """ConnectError if the answer ends early: the broker found damage, or is gone. Ask on, and it will say which."""
        with _translated(self._url):
            async for chunk in self._response.content.iter_chunked(_CHUNK_BYTES):
                yield chunk


class NodeClient:
    """See the module's text. `async with`, or `close` at the end.

    ``address`` is ``host:port``, a URL or the path of a unix socket; ``token`` is sent as a bearer token. ``tls`` is
    the context for https addresses, False to believe any; ``timeout`` is how many seconds an answer may take to begin,
    and to go on.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:4151",
        *,
        token: str | None = None,
        tls: bool | ssl.SSLContext = True,
        timeout: float = 30.0,
    ) -> None:
        self.address = address
        self._socket = address if address.startswith(("/", "./")) else ""
        self._url = "http://localhost" if self._socket else http_url(address, "an nsqd")
        self._tls = tls
        self._timeout = timeout
        self._headers = {"Accept": "application/vnd.nsq; version=1.0"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> NodeClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- How it is doing -------------------------------------------------------------------------------------------

    async def ping(self) -> str:
        """``OK``; HttpError 500 says what is wrong."""
        return (await self._ask("GET", "ping", {})).decode(errors="replace")

    async def info(self, *, extended: bool = False) -> dict[str, Any]:
        """Version, ports, limits; ``extended`` adds what only flintmq has, under ``flintmq``."""
        return await self._get(dict[str, Any], "info", extended="true" if extended else None)

    async def stats(
        self, topic: str = "", channel: str = "", *, clients: bool = True, extended: bool = False
    ) -> dict[str, Any]:
        """Topics, channels and their clients, in the form of NSQ's ``/stats?format=json``."""
        return await self._get(
            dict[str, Any],
            "stats",
            format="json",
            topic=topic or None,
            channel=channel or None,
            include_clients="true" if clients else "false",
            extended="true" if extended else None,
        )

    # --- Topics and channels ---------------------------------------------------------------------------------------

    async def create_topic(self, topic: str) -> None:
        await self._post("topic/create", topic=topic)

    async def delete_topic(self, topic: str) -> None:
        """Its channels and messages go with it."""
        await self._post("topic/delete", topic=topic)

    async def empty_topic(self, topic: str) -> None:
        """Drop what no channel has seen yet."""
        await self._post("topic/empty", topic=topic)

    async def pause_topic(self, topic: str) -> None:
        """Hand nothing on to the channels."""
        await self._post("topic/pause", topic=topic)

    async def unpause_topic(self, topic: str) -> None:
        await self._post("topic/unpause", topic=topic)

    async def create_channel(self, topic: str, channel: str) -> None:
        await self._post("channel/create", topic=topic, channel=channel)

    async def delete_channel(self, topic: str, channel: str) -> None:
        """Its consumers are disconnected."""
        await self._post("channel/delete", topic=topic, channel=channel)

    async def empty_channel(self, topic: str, channel: str) -> None:
        """Drop all its messages, those in flight too."""
        await self._post("channel/empty", topic=topic, channel=channel)

    async def pause_channel(self, topic: str, channel: str) -> None:
        """Deliver nothing."""
        await self._post("channel/pause", topic=topic, channel=channel)

    async def unpause_channel(self, topic: str, channel: str) -> None:
        await self._post("channel/unpause", topic=topic, channel=channel)

    # --- Settings --------------------------------------------------------------------------------------------------

    async def topic_settings(self, topic: str) -> EffectiveSettings:
        """``topic`` may be a pattern with ``*``: what holds for all topics like it."""
        return await self._get(EffectiveSettings, "topic/config", topic=topic)

    async def set_topic_settings(self, topic: str, settings: Mapping[str, Any]) -> EffectiveSettings:
        """Set these and leave the others; None takes back what was set. If one is wrong nothing is changed."""
        return await self._put(EffectiveSettings, "topic/config", settings, topic=topic)

    async def channel_settings(self, topic: str, channel: str) -> EffectiveSettings:
        return await self._get(EffectiveSettings, "channel/config", topic=topic, channel=channel)

    async def set_channel_settings(self, topic: str, channel: str, settings: Mapping[str, Any]) -> EffectiveSettings:
        return await self._put(EffectiveSettings, "channel/config", settings, topic=topic, channel=channel)

    # --- Messages --------------------------------------------------------------------------------------------------

    async def peek(
        self,
        topic: str,
        channel: str,
        state: State = "ready",
        *,
        limit: int = 100,
        after: str | None = None,
        shown: int | None = 256,
    ) -> Page:
        """Look at messages of a channel without taking them. ``shown``: bytes of each body, None for all."""
        return await self._get(
            Page, "channel/peek", topic=topic, channel=channel, state=state, limit=limit, after=after, bytes=_all(shown)
        )

    async def peek_topic(
        self, topic: str, *, limit: int = 100, after: str | None = None, shown: int | None = 256
    ) -> Page:
        """The same for a topic's log, from its first kept message on."""
        return await self._get(Page, "topic/peek", topic=topic, limit=limit, after=after, bytes=_all(shown))

    async def finish(self, topic: str, channel: str, id: str) -> None:
        """Finish one message, whatever its state; HttpError 404 if the channel does not have it."""
        await self._post("message/finish", topic=topic, channel=channel, id=id)

    async def requeue(self, topic: str, channel: str, id: str, delay: float = 0) -> None:
        """Put one message back: ready now, or after ``delay`` seconds."""
        await self._post("message/requeue", topic=topic, channel=channel, id=id, delay=_milliseconds(delay))

    async def defer(self, topic: str, channel: str, id: str, delay: float) -> None:
        """Have one message come after ``delay`` seconds, whatever its state."""
        await self._post("message/defer", topic=topic, channel=channel, id=id, delay=_milliseconds(delay))

    async def redrive(
        self,
        topic: str,
        channel: str,
        *,
        count: int | None = None,
        rate: int | None = None,
        source: str | None = None,
        reason: str | None = None,
    ) -> Redrive:
        """Begin to send a channel's dead letters back to it: all, or ``count`` of them, ``rate`` a second at most.

        ``source`` is the channel of the dead-letter topic to take them from, if it is not ``redrive``. With a
        ``reason`` (``requeued``, ``timed out`` or ``expired``) only those that died of it go back.
        """
        if reason and (await self.redrive_progress(topic, channel)).reason is None:
            # It would take no notice of the argument.
            raise HttpError(501, f"NOT_IMPLEMENTED: {self.address} is too old to redrive by cause")
        more = {"count": count, "rate": rate, "from": source, "reason": reason}
        body = await self._post("channel/redrive", topic=topic, channel=channel, **more)
        return _decoded(Redrive, body, self.address)

    async def redrive_progress(self, topic: str, channel: str) -> Redrive:
        """How far that has come."""
        return await self._get(Redrive, "channel/redrive", topic=topic, channel=channel)

    async def stop_redrive(self, topic: str, channel: str) -> Redrive:
        """End it. Dead letters that are not on their way yet stay where they are."""
        body = await self._ask("DELETE", "channel/redrive", {"topic": topic, "channel": channel})
        return _decoded(Redrive, body, self.address)

    async def seek(self, topic: str, channel: str, to: str | int | datetime) -> Seek:
        """Have a channel go on at ``earliest``, ``latest``, a message's seq, or a time. What it has now is dropped."""
        body = await self._post("channel/seek", topic=topic, channel=channel, to=_place(to))
        return _decoded(Seek, body, self.address)

    # --- Reading the log -------------------------------------------------------------------------------------------

    async def log_info(self, topic: str) -> LogInfo:
        return await self._get(LogInfo, "log/info", topic=topic)

    async def log_offset(self, topic: str, time: datetime | int) -> int:
        """The seq of the first message published at or after a time; ``durable`` if there is none yet."""
        return (await self._get(_Offset, "log/offset", topic=topic, time=_place(time))).offset

    async def log_ranges(
        self, topic: str, *, since: datetime | int | None = None, until: datetime | int | None = None
    ) -> list[LogRange]:
        """Where messages are that were published at or after ``since`` and before ``until``: all of them are there."""
        return (await self._ranges(topic, since, until)).ranges

    async def _ranges(self, topic: str, since: datetime | int | None, until: datetime | int | None) -> _Ranges:
        times = {name: None if time is None else _place(time) for name, time in (("since", since), ("until", until))}
        return await self._get(_Ranges, "log/ranges", topic=topic, **times)

    async def log_count(
        self, topic: str, *, since: datetime | int | None = None, until: datetime | int | None = None
    ) -> int:
        """How many messages of the log were published at or after ``since`` and before ``until``, as far as durable.

        Counted by the index; what it cannot tell is fetched, without the bodies.
        """
        first = 0 if since is None else _nanoseconds(since)
        last = _LATEST if until is None else _nanoseconds(until)
        found = await self._ranges(topic, since, until)
        total = sum(one.messages for one in found.ranges if one.all)
        for one in found.ranges:
            if not one.all:
                heads = self.log_messages(topic, one.start, one.stop, epoch=found.epoch, bodies=False)
                async with contextlib.aclosing(heads):
                    async for message in heads:
                        total += first <= message.timestamp < last
        return total

    @contextlib.asynccontextmanager
    async def log_fetch(
        self,
        topic: str,
        start: int,
        stop: int,
        *,
        max_bytes: int | None = None,
        epoch: str | None = None,
        bodies: bool = True,
    ) -> AsyncIterator[Fetch]:
        """The frames of messages ``start`` … ``stop - 1``, or of the first of them: see ``Fetch``.

        Without ``bodies`` these are empty, where the node knows how. One request, for those who take frames as they
        are; ``log_messages`` goes on until it has all.
        """
        query: dict[str, str | float | None] = {"topic": topic, "from": start, "to": stop, "max_bytes": max_bytes}
        query |= {"epoch": epoch, "bodies": None if bodies else "false"}
        response = await self._send("GET", "log/fetch", query)
        try:
            if response.status != 200:
                raise _refusal(response.status, await _whole(response, self.address), self.address)
            yield Fetch(response, self.address)
        finally:
            # Whoever has seen enough of it does not want the rest.
            response.close()

    async def log_messages(
        self, topic: str, start: int, stop: int, *, epoch: str | None = None, bodies: bool = True
    ) -> AsyncGenerator[LogMessage, None]:
        """The messages ``start`` … ``stop - 1`` of a topic's log, those of them that there are."""
        while start < stop:
            began = start
            async with self.log_fetch(topic, start, stop, epoch=epoch, bodies=bodies) as fetch:
                decoder = FrameDecoder(_FRAME_BYTES)
                try:
                    async for chunk in fetch:
                        for _, frame in decoder.feed(chunk):
                            message = decode_message(frame)
                            seq = seq_of(message.id)
                            start = seq + 1
                            yield LogMessage(seq, message.timestamp, message.id.decode(), message.body)
                except ConnectError:
                    # Cut off. What came whole counts; asked on from there, the broker says what is wrong.
                    if start == began:
                        raise
                else:
                    start = max(fetch.next, began + 1)

    async def positions(self, topic: str) -> list[Position]:
        """How far the readers of a log have come."""
        return (await self._get(_Positions, "log/position", topic=topic)).positions

    async def position(self, topic: str, reader: str) -> Position:
        return await self._get(Position, "log/position", topic=topic, reader=reader)

    async def set_position(self, topic: str, reader: str, to: int | str) -> Position:
        """Register a reader or move it: what lies from there on is kept for it. On the disk when this returns."""
        body = await self._post("log/position", topic=topic, reader=reader, to=to)
        return _decoded(Position, body, self.address)

    async def delete_position(self, topic: str, reader: str) -> None:
        await self._ask("DELETE", "log/position", {"topic": topic, "reader": reader})

    # --- Asking ----------------------------------------------------------------------------------------------------

    async def _get(self, kind: type[_T], path: str, **query: str | float | None) -> _T:
        return _decoded(kind, await self._ask("GET", path, query), self.address)

    async def _put(self, kind: type[_T], path: str, body: object, **query: str | float | None) -> _T:
        return _decoded(kind, await self._ask("PUT", path, query, msgspec.json.encode(body)), self.address)

    async def _post(self, path: str, **query: str | float | None) -> bytes:
        return await self._ask("POST", path, query)

    async def _ask(
        self, method: str, path: str, query: Mapping[str, str | float | None], body: bytes | None = None
    ) -> bytes:
        """The whole answer; HttpError with the node's own words if it refuses."""
        async with await self._send(method, path, query, body) as response:
            answer = await _whole(response, self.address)
        if response.status != 200:
            raise _refusal(response.status, answer, self.address)
        return answer

    async def _send(
        self, method: str, path: str, query: Mapping[str, str | float | None], body: bytes | None = None
    ) -> aiohttp.ClientResponse:
        # Imported here: most programs never ask a node anything over HTTP.
        import aiohttp

        if self._session is None:
            limit = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=self._timeout)
            connector = aiohttp.UnixConnector(self._socket) if self._socket else None
            self._session = aiohttp.ClientSession(connector=connector, timeout=limit, headers=self._headers)
        given = {key: str(value) for key, value in query.items() if value is not None}
        with _translated(self.address):
            return await self._session.request(
                method, f"{self._url}/{path}", params=given, data=body, ssl=self._tls, allow_redirects=False
            )


@contextlib.contextmanager
def _translated(address: str) -> Iterator[None]:
    """What goes wrong on the way is a ConnectError."""
    import aiohttp

    try:
        yield
    except TimeoutError as exc:
        raise ConnectError(f"the nsqd at {address} does not answer") from exc
    except aiohttp.ClientResponseError as exc:
        raise ConnectError(f"what listens at {address} does not speak HTTP") from exc
    except (aiohttp.ClientError, OSError) as exc:
        # Numbers of TLS are other ones, and failed look-ups of names have theirs, which are negative.
        number = exc.errno if isinstance(exc, OSError) and not isinstance(exc, aiohttp.ClientSSLError) else None
        reason = os.strerror(number) if number is not None and number > 0 else str(exc) or type(exc).__name__
        hint = ""
        if number == errno.EACCES and address.startswith(("/", "./")):
            # A unix socket that is there, and for others. The nsqd's option lets a group in.
            hint = f"{permission_hint(PermissionError(), address)}; nsqd's --unix-socket-mode lets others connect"
        raise ConnectError(f"cannot speak to an nsqd at {address} ({reason}){hint}") from exc


async def _whole(response: aiohttp.ClientResponse, address: str) -> bytes:
    body = bytearray()
    with _translated(address):
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > _ANSWER_BYTES:
                raise ConnectError(f"the nsqd at {address} answers without end")
    return bytes(body)


def _refusal(status: int, body: bytes, address: str) -> HttpError | ConnectError:
    """The error of an answer: ``{"message":"CODE: a sentence"}``, perhaps with more beside it; or plain text.

    ConnectError for anything else, such as the page of another web server or of a proxy.
    """
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
        error = HttpError(status, str(answer.pop("message")))
        error.details |= answer
        return error
    except (msgspec.MsgspecError, KeyError):
        text = short_text(body)
        if body and not text:
            return ConnectError(f"what listens at {address} does not answer like an nsqd (HTTP {status})")
        return HttpError(status, text or "no reason given")


def _decoded(kind: type[_T], body: bytes, address: str) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as exc:
        raise ConnectError(f"what listens at {address} does not answer like an nsqd of flintmq ({exc})") from exc


def _all(shown: int | None) -> str:
    return "all" if shown is None else str(shown)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _nanoseconds(time: datetime | int) -> int:
    """A time since 1970, as a node reads what ``_place`` says of it."""
    if isinstance(time, int):
        return time
    return (time.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000


def _place(place: str | int | datetime) -> str:
    if isinstance(place, datetime):
        return place.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return str(place)
