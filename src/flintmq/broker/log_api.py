"""HTTP routes for those who read a topic's log: what is there, ranges of it, and where a time is in it.

What they read is ``fetch``'s business. Only what is durable is told and given, so that the same offsets are the same
messages for ever. A topic that keeps its messages in memory has no log to read: 400 ``NO_LOG``.
"""

from __future__ import annotations

import asyncio
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from flintmq.broker.fetch import Fetch, Fetches
from flintmq.broker.topic import Topic
from flintmq.errors import DamageError, HttpError, NotFoundError, StorageError
from flintmq.web import READ, Answer, Request, Route

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["routes"]

#: What one fetch gives if nothing else is asked for.
FETCH_BYTES = 16 << 20
#: Seqs and times, in ns, are no larger.
_DIGITS = 19
_RFC3339 = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[Tt ](?P<time>\d\d:\d\d:\d\d)(\.(?P<fraction>\d{1,9}))?(?P<zone>[Zz]|[+ -]\d\d:\d\d)"
)


def routes(broker: Broker) -> list[Route]:
    api = _LogApi(broker)
    return [
        Route("GET", "/log/info", api.info, READ),
        Route("GET", "/log/offset", api.offset, READ),
        Route("GET", "/log/fetch", api.fetch, READ, unlogged=True),
    ]


class _LogApi:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._fetches = Fetches(broker.disk)

    async def info(self, request: Request) -> dict[str, Any]:
        topic = self._topic(request.arguments())
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
        topic = self._topic(arguments)
        text = _argument(arguments, "time")
        time = int(text) if _is_number(text) else time_of(text)
        if time is None:
            raise HttpError(400, "INVALID_TIME: write it as 2026-11-16T02:00:00Z, or as nanoseconds since 1970")
        return {"offset": min(await self._seq_at(topic, time), topic.durable)}

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
        topic = self._topic(arguments)
        first, stop = (_offset(topic, arguments, name) for name in ("from", "to"))
        most = _number(arguments, "max_bytes") if "max_bytes" in arguments else FETCH_BYTES
        if arguments.get("epoch", topic.epoch) != topic.epoch:
            raise HttpError(409, "EPOCH_CHANGED: this log began anew, begin at its first message", epoch=topic.epoch)
        if stop < first:
            raise HttpError(400, "INVALID_ARG_TO: it lies before `from`")
        if first < topic.log.first:
            raise HttpError(
                410, f"GONE: the log begins at {topic.log.first}, what lies before it was let go", first=topic.log.first
            )
        if stop > topic.durable:
            raise HttpError(
                416,
                f"NOT_YET: only what lies before {topic.durable} is durable, ask again later",
                durable=topic.durable,
            )
        fetch = Fetch(self._fetches, topic.log, first, stop, most)
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

    def _topic(self, arguments: dict[str, str]) -> Topic:
        """The topic, which must have a log that can be read."""
        try:
            topic = self._broker.existing_topic(_argument(arguments, "topic"))
        except NotFoundError as exc:
            raise HttpError(404, "TOPIC_NOT_FOUND") from exc
        if topic.ephemeral:
            raise HttpError(400, "NO_LOG: an ephemeral topic keeps nothing in files")
        if topic.log.durability == "memory":
            raise HttpError(400, "NO_LOG: with durability `memory` a topic has no log to read, use `os` or `fsync`")
        return topic


def _unreadable(exc: BaseException) -> HttpError:
    return HttpError(503, f"UNREADABLE: {getattr(exc, 'strerror', None) or exc}, try again")


def _argument(arguments: dict[str, str], name: str) -> str:
    if name not in arguments:
        raise HttpError(400, f"MISSING_ARG_{name.upper()}")
    return arguments[name]


def _number(arguments: dict[str, str], name: str) -> int:
    text = _argument(arguments, name)
    if not _is_number(text):
        raise HttpError(400, f"INVALID_ARG_{name.upper()}: a whole number is needed")
    return int(text)


def _offset(topic: Topic, arguments: dict[str, str], name: str) -> int:
    """A seq, or ``earliest`` or ``latest``."""
    words = {"earliest": topic.log.first, "latest": topic.durable}
    text = _argument(arguments, name)
    if text in words:
        return words[text]
    if not _is_number(text):
        raise HttpError(400, f"INVALID_ARG_{name.upper()}: an offset, `earliest` or `latest` is needed")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS


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
