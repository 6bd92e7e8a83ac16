"""The HTTP routes for settings of topics and channels: look at them, change them while the broker runs.

What they mean and where they are kept is ``settings``' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.broker.settings import Names, is_pattern, valid_name_or_pattern
from flintmq.errors import UNREADABLE, HttpError, OptionError
from flintmq.http.site import ADMIN, READ, Request, Route

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["routes"]

#: All keys there are, with long values, take less than a tenth of it.
LARGEST_BODY = 64 << 10


def routes(broker: Broker) -> list[Route]:
    def reader(*kinds: str) -> Callable[[Request], Awaitable[Any]]:
        async def get(request: Request) -> Any:
            return broker.settings.describe(_names(broker, request, kinds))

        return get

    def writer(*kinds: str) -> Callable[[Request], Awaitable[Any]]:
        async def put(request: Request) -> Any:
            changes = _object(await request.body(LARGEST_BODY, "BODY_TOO_BIG"))
            names = _names(broker, request, kinds)
            try:
                broker.settings.change(names, changes)
            except OptionError as exc:
                raise HttpError(400, f"INVALID_SETTING: {exc}") from exc
            applied = asyncio.get_running_loop().create_future()
            broker.settings.when_applied(lambda: None if applied.done() else applied.set_result(None))
            await applied
            answer = broker.settings.describe(names)
            # Whatever the durability of messages: this is rare, and is not to be forgotten.
            await broker.synced()
            return answer

        return put

    return [
        Route("GET", "/topic/config", reader("topic"), READ),
        Route("PUT", "/topic/config", writer("topic"), ADMIN),
        Route("GET", "/channel/config", reader("topic", "channel"), READ),
        Route("PUT", "/channel/config", writer("topic", "channel"), ADMIN),
    ]


def _object(body: bytearray) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE as exc:
        raise HttpError(400, f"INVALID_SETTING: the body must be a JSON object of settings - {exc}") from exc


def _names(broker: Broker, request: Request, kinds: tuple[str, ...]) -> Names:
    """The topic, or topic and channel, that a request is about. One without a ``*`` must be there."""
    arguments = request.arguments()
    for kind in kinds:
        if not valid_name_or_pattern(arguments.text(kind)):
            # As the other routes of topics and of channels say it.
            raise HttpError(400, "INVALID_TOPIC" if len(kinds) == 1 else f"INVALID_ARG_{kind.upper()}")
    names = tuple(arguments[kind] for kind in kinds)
    if not is_pattern(names[0]):
        topic = broker.topics.get(names[0])
        if topic is None:
            raise HttpError(404, "TOPIC_NOT_FOUND")
        if len(names) == 2 and not is_pattern(names[1]) and names[1] not in topic.channels:
            raise HttpError(404, "CHANNEL_NOT_FOUND")
    return names
