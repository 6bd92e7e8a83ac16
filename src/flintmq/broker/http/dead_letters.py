"""HTTP routes of dead letters: send them back, ask how far that is, end it. See docs/dead-letters.md."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flintmq.broker.delivery.dead_letters import EXPIRED, REQUEUED, TIMED_OUT, dead_letter_topic
from flintmq.broker.delivery.redrive import REDRIVE, nothing_to_redrive
from flintmq.broker.storage.journal import NEVER
from flintmq.errors import HttpError
from flintmq.http.site import ADMIN, READ, Request, Route
from flintmq.protocol.wire import valid_name

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker
    from flintmq.broker.delivery.channel import Channel

__all__ = ["routes"]

#: Seconds between two looks at a dead-letter topic that was just created.
LOOK_AGAIN = 0.01


def routes(broker: Broker) -> list[Route]:
    async def start(request: Request) -> dict[str, Any]:
        arguments = request.arguments()
        most, rate = _number(arguments, "count", NEVER), _number(arguments, "rate", 0)
        reason = arguments.get("reason", "")
        if reason not in ("", REQUEUED, TIMED_OUT, EXPIRED):
            raise HttpError(400, f"INVALID_ARG_REASON: it must be {REQUEUED}, {TIMED_OUT} or {EXPIRED}")
        await _opened(_idle(broker, arguments))
        # Somebody else may have begun one meanwhile.
        channel = _idle(broker, arguments)
        source = _source(channel, arguments.get("from", ""))
        if source is None:
            nothing_to_redrive(channel, reason)
        else:
            channel.begin_redrive(source, most, rate, reason)
        await broker.as_safe_as(channel.topic)
        return _progress(channel)

    async def stop(request: Request) -> dict[str, Any]:
        channel = _channel(broker, request.arguments())
        if channel.redrive is not None and channel.redrive.running:
            channel.redrive.stop()
            await broker.as_safe_as(channel.topic)
        return _progress(channel)

    async def progress(request: Request) -> dict[str, Any]:
        return _progress(_channel(broker, request.arguments()))

    return [
        Route("POST", "/channel/redrive", start, ADMIN),
        Route("GET", "/channel/redrive", progress, READ),
        Route("DELETE", "/channel/redrive", stop, ADMIN),
    ]


def _channel(broker: Broker, arguments: dict[str, str]) -> Channel:
    for kind in ("topic", "channel"):
        if not arguments.get(kind):
            raise HttpError(400, f"MISSING_ARG_{kind.upper()}")
        if not valid_name(arguments[kind]):
            raise HttpError(400, f"INVALID_ARG_{kind.upper()}")
    topic = broker.topics.get(arguments["topic"])
    if topic is None:
        raise HttpError(404, "TOPIC_NOT_FOUND")
    channel = topic.channels.get(arguments["channel"])
    if channel is None:
        raise HttpError(404, "CHANNEL_NOT_FOUND")
    return channel


def _idle(broker: Broker, arguments: dict[str, str]) -> Channel:
    channel = _channel(broker, arguments)
    if channel.redrive is not None and channel.redrive.running:
        raise HttpError(409, "ALREADY_RUNNING: ask GET /channel/redrive how far it is")
    return channel


async def _opened(channel: Channel) -> None:
    """Wait until a dead-letter topic that was just created hands its messages on to channels.

    That takes until the lookupds have said which channels it has elsewhere, and the journal knows of it. A redrive that
    is planned before finds nothing.
    """
    broker = channel.broker
    topic = broker.topics.get(dead_letter_topic(channel))
    if topic is None:
        return
    while topic.gated and not topic.exiting and not broker.stopping:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_AGAIN)
    await broker.synced()


def _number(arguments: dict[str, str], name: str, default: int) -> int:
    text = arguments.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 0 < int(text[:18]) and len(text) <= 18):
        raise HttpError(400, f"INVALID_ARG_{name.upper()}: it must be a whole number, at least 1")
    return int(text)


def _source(channel: Channel, name: str) -> Channel | None:
    """The channel of the dead-letter topic to take from; None if there is no such topic, and so no dead letter."""
    topic = channel.broker.topics.get(dead_letter_topic(channel))
    if topic is None:
        return None
    if name:
        if name not in topic.channels:
            raise HttpError(404, f"CHANNEL_NOT_FOUND: the dead-letter topic {topic.name} has no channel {name}")
        return topic.channels[name]
    if topic.channels and REDRIVE not in topic.channels:
        # A new channel would find nothing: what is there belongs to the others.
        raise HttpError(
            400, f"MISSING_ARG_FROM: {topic.name} has other channels, say from={min(topic.channels)} to take from one"
        )
    source, _ = topic.channel(REDRIVE)
    # If it is the first channel, what has piled up is handed to it now, not at the end of the turn.
    topic.flush()
    return source


def _progress(channel: Channel) -> dict[str, Any]:
    redrive = channel.redrive
    if redrive is None:
        name = dead_letter_topic(channel)
        return {"dead_letter_topic": name, "reason": "", "planned": 0, "moved": 0, "running": False}
    answer: dict[str, Any] = {
        "dead_letter_topic": redrive.dead_letter_topic,
        # Also where it is empty: it shows that this nsqd can do it by cause.
        "reason": redrive.reason,
        "planned": redrive.planned,
        "moved": redrive.moved,
        "running": redrive.running,
    }
    if redrive.error:
        answer["error"] = redrive.error
    return answer
