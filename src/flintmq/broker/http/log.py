"""HTTP routes for what lies in a topic's log: reading ranges of it, readers' positions, sending a channel back.

What is read is ``fetch``'s business, what is kept for whom ``readers``'. Only what is durable is told and given, so
that the same offsets are the same messages for ever. A topic that keeps its messages in memory has no log to read: 400
``NO_LOG``.
"""

from __future__ import annotations

import asyncio
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from flintmq.broker.delivery.topic import Topic
from flintmq.broker.http.targets import existing_channel, existing_topic
from flintmq.broker.storage.fetch import Fetch, Fetches
from flintmq.broker.storage.readers import Readers
from flintmq.broker.storage.segment import TimeRange
from flintmq.errors import DamageError, FullError, HttpError, StorageError
from flintmq.http.arguments import LARGEST, Arguments, is_number
from flintmq.http.site import ADMIN, CONSUME, READ, Answer, Request, Route

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel

__all__ = ["routes"]

#: What one fetch gives if nothing else is asked for.
FETCH_BYTES = 16 << 20
_READER = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RFC3339 = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[Tt ](?P<time>\d\d:\d\d:\d\d)(\.(?P<fraction>\d{1,9}))?(?P<zone>[Zz]|[+ -]\d\d:\d\d)"
)


def routes(broker: Broker) -> list[Route]:
    api = _LogApi(broker)
    return [
        Route("GET", "/log/info", api.info, READ),
        Route("GET", "/log/offset", api.offset, READ),
        Route("GET", "/log/ranges", api.ranges, READ),
        Route("GET", "/log/fetch", api.fetch, CONSUME, unlogged=True),
        Route("GET", "/log/position", api.positions, READ),
        Route("POST", "/log/position", api.move, ADMIN),
        Route("DELETE", "/log/position", api.remove, ADMIN),
        Route("POST", "/channel/seek", api.seek, ADMIN),
    ]


class _LogApi:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._fetches = Fetches(broker.disk)

    # --- The log ---------------------------------------------------------------------------------------------------

    async def info(self, request: Request) -> dict[str, Any]:
        topic = self._topic(request.arguments().topic())
        _sync_soon(topic)
        segments = topic.log.segments
        durable = topic.durable
        return {
            "topic": topic.name,
            "node": self._broker.node.hex(),
            "epoch": topic.epoch,
            "first": topic.log.first,
            "durable": durable,
            "end": topic.log.end,
            "messages": sum(stop - first for segment in segments for first, stop in segment.present(0, durable)),
            "bytes": sum(segment.size for segment in segments),
        }

    async def offset(self, request: Request) -> dict[str, int]:
        arguments = request.arguments()
        topic = self._topic(arguments.topic())
        time = _time(arguments, "time")
        return {"offset": min(await self._seq_at(topic, time), topic.durable)}

    async def ranges(self, request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        topic = self._topic(arguments.topic())
        first = _offset(topic, arguments, "from") if "from" in arguments else topic.log.first
        stop = _offset(topic, arguments, "to") if "to" in arguments else topic.durable
        if first < topic.log.first:
            raise _gone(topic)
        if stop > topic.durable:
            _sync_soon(topic)
            raise _not_yet(topic)
        if "since" in arguments or "until" in arguments:
            since = _time(arguments, "since") if "since" in arguments else -1
            until = _time(arguments, "until") if "until" in arguments else LARGEST + 1
            found = topic.log.between(since, until, first, stop)
        else:
            messages = sum(b - a for segment in topic.log.segments for a, b in segment.present(first, stop))
            found = [TimeRange(first, stop, messages, True)] if first < stop else []
        return {
            "topic": topic.name,
            "node": self._broker.node.hex(),
            "epoch": topic.epoch,
            "ranges": [{"from": one.first, "to": one.stop, "messages": one.messages, "all": one.all} for one in found],
        }

    async def _seq_at(self, topic: Topic, time: int) -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def then(seq: int, error: BaseException | None) -> None:
            if found.cancelled():
                return
            if error is None:
                found.set_result(seq)
            else:
                found.set_exception(error)

        topic.log.seq_at(time, then)
        try:
            return await found
        except (OSError, StorageError) as exc:
            raise _unreadable(exc) from exc

    async def fetch(self, request: Request) -> Answer:
        arguments = request.arguments()
        topic = self._topic(arguments.topic())
        first, stop = (_offset(topic, arguments, name) for name in ("from", "to"))
        most = arguments.number("max_bytes", FETCH_BYTES)
        if arguments.get("epoch", topic.epoch) != topic.epoch:
            raise HttpError(409, "EPOCH_CHANGED: this log began anew, begin at its first message", epoch=topic.epoch)
        if stop < first:
            raise HttpError(400, "INVALID_ARG_TO: it lies before `from`")
        if first < topic.log.first:
            raise _gone(topic)
        if stop > topic.durable:
            _sync_soon(topic)
            raise _not_yet(topic)
        fetch = Fetch(self._fetches, topic.log, first, stop, most, bodies=arguments.flag("bodies", True))
        try:
            await fetch.open()
        except BaseException as exc:
            await fetch.aclose()
            if isinstance(exc, DamageError):
                raise HttpError(
                    500,
                    f"DAMAGED: the messages {exc.first} to {exc.stop - 1} cannot be read, go on from {exc.stop}",
                    first=exc.first,
                    stop=exc.stop,
                ) from exc
            if isinstance(exc, (OSError, StorageError)):
                raise _unreadable(exc) from exc
            raise
        headers = {
            "X-Flintmq-Node": self._broker.node.hex(),
            "X-Flintmq-Epoch": topic.epoch,
            "X-Flintmq-Next": str(fetch.next),
        }
        return Answer(content_type="application/octet-stream", headers=headers, pieces=fetch)

    # --- Positions -------------------------------------------------------------------------------------------------

    async def positions(self, request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        readers = self._topic(arguments.topic()).readers
        if "reader" in arguments:
            return readers.describe(self._reader(readers, arguments))
        return {"positions": [readers.describe(name) for name in sorted(readers.positions)]}

    async def move(self, request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        topic = self._topic(arguments.topic())
        name = arguments.text("reader")
        if not _READER.fullmatch(name):
            raise HttpError(400, "INVALID_READER: 1 to 128 letters, digits or any of . _ : - are needed")
        offset = _offset(topic, arguments, "to")
        if offset < topic.log.first:
            raise _gone(topic)
        if offset > topic.durable:
            raise _not_yet(topic)
        try:
            topic.readers.move(name, offset)
        except FullError as exc:
            raise HttpError(409, f"TOO_MANY_READERS: {exc}, delete one") from exc
        await self._broker.synced()
        # It may be given up, or the topic deleted, while the disk is busy.
        return topic.readers.describe(self._reader(topic.readers, arguments))

    async def remove(self, request: Request) -> None:
        arguments = request.arguments()
        readers = self._topic(arguments.topic()).readers
        readers.remove(self._reader(readers, arguments))
        await self._broker.synced()

    def _reader(self, readers: Readers, arguments: Arguments) -> str:
        name = arguments.text("reader")
        if name not in readers.positions:
            raise HttpError(404, "READER_NOT_FOUND")
        return name

    # --- Channels --------------------------------------------------------------------------------------------------

    async def seek(self, request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        topic_name, channel_name = arguments.topic_and_channel()
        topic = self._topic(topic_name)
        channel = self._channel(topic, channel_name)
        text = arguments.text("to")
        time = time_of(text)
        if time is not None:
            start = await self._seq_at(topic, time)
            # Reading may have taken a while.
            channel = self._channel(self._topic(topic_name), channel_name)
        elif text == "latest":
            start = topic.log.end
        else:
            start = _offset(topic, arguments, "to", "an offset, a time as in RFC 3339, `earliest` or `latest`")
            if start < topic.log.first:
                raise _gone(topic)
        done = asyncio.Event()
        channel.seek(start, done.set)
        await done.wait()
        await self._broker.as_safe_as(topic)
        return {
            "topic": topic.name,
            "channel": channel.name,
            "offset": channel.first_unsent,
            "messages": channel.depth,
        }

    def _channel(self, topic: Topic, name: str) -> Channel:
        """Return a channel, which must be one that reads the log."""
        channel = existing_channel(topic, name)
        if channel.ephemeral:
            raise HttpError(400, "NO_LOG: an ephemeral channel gets nothing from files")
        return channel

    def _topic(self, name: str) -> Topic:
        """Return a topic, which must have a log that can be read."""
        topic = existing_topic(self._broker, name)
        if topic.ephemeral:
            raise HttpError(400, "NO_LOG: an ephemeral topic keeps nothing in files")
        if topic.log.durability == "memory":
            raise HttpError(400, "NO_LOG: with durability `memory` a topic has no log to read, use `os` or `fsync`")
        return topic


def _time(arguments: Arguments, name: str) -> int:
    """A time, in ns since 1970."""
    text = arguments.text(name)
    time = int(text) if is_number(text) else time_of(text)
    if time is None:
        raise HttpError(400, "INVALID_TIME: write it as 2026-11-16T02:00:00Z, or as nanoseconds since 1970")
    return time


def _sync_soon(topic: Topic) -> None:
    """A reader asks how far the log is: bring what was published to the device, so that it need not wait long.

    Readers share these syncs, which are at least 100 ms apart (``SYNC_SPACING``).
    """
    if topic.durable < topic.log.end:
        topic.log.syncer.sync_soon()


def _unreadable(exc: BaseException) -> HttpError:
    return HttpError(503, f"UNREADABLE: {getattr(exc, 'strerror', None) or exc}, try again")


def _gone(topic: Topic) -> HttpError:
    first = topic.log.first
    return HttpError(410, f"GONE: the log begins at {first}, what lies before it was let go", first=first)


def _not_yet(topic: Topic) -> HttpError:
    durable = topic.durable
    return HttpError(416, f"NOT_YET: only what lies before {durable} is durable, ask again later", durable=durable)


def _offset(topic: Topic, arguments: Arguments, name: str, needed: str = "an offset, `earliest` or `latest`") -> int:
    """A seq, or ``earliest`` or ``latest``."""
    words = {"earliest": topic.log.first, "latest": topic.durable}
    text = arguments.text(name)
    if text in words:
        return words[text]
    if not is_number(text):
        raise HttpError(400, f"INVALID_ARG_{name.upper()}: {needed} is needed")
    return int(text)


def time_of(text: str) -> int | None:
    """A time as RFC 3339 writes it, in ns since 1970. A ``+`` of its zone may have become a space in a query."""
    found = _RFC3339.fullmatch(text)
    if found is None:
        return None
    zone = found["zone"].replace(" ", "+").upper()
    try:
        moment = datetime.fromisoformat(f"{found['date']}T{found['time']}{zone}")
    except ValueError:
        return None
    return int(moment.timestamp()) * 1_000_000_000 + int((found["fraction"] or "").ljust(9, "0"))
