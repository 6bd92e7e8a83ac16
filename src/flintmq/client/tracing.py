"""Spans for OpenTelemetry, where its API is installed; where it is not, nothing at all.

NSQ messages have no headers, so a span of a delivery is not linked to the span of its publish.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from flintmq import __version__
from flintmq.client.callbacks import result_of
from flintmq.client.connection import Message

__all__ = ["publish_spans", "traced_handler"]

#: Makes the span of a publish: topic, number of messages.
Spans = Callable[[str, int], AbstractContextManager[Any]]


def _tracing() -> tuple[Any, Any] | None:
    """OpenTelemetry's trace module and a tracer."""
    try:
        trace: Any = importlib.import_module("opentelemetry.trace")
    except ImportError:
        return None
    return trace, trace.get_tracer("flintmq", __version__)


def publish_spans() -> Spans | None:
    found = _tracing()
    if found is None:
        return None
    trace, tracer = found

    def span(topic: str, count: int) -> AbstractContextManager[Any]:
        attributes = {
            "messaging.system": "nsq",
            "messaging.operation.type": "send",
            "messaging.destination.name": topic,
            "messaging.batch.message_count": count,
        }
        made: AbstractContextManager[Any] = tracer.start_as_current_span(
            f"send {topic}", kind=trace.SpanKind.PRODUCER, attributes=attributes
        )
        return made

    return span


def traced_handler(
    handler: Callable[[Message[Any]], Awaitable[Any]], topic: str, channel: str
) -> Callable[[Message[Any]], Awaitable[Any]]:
    """The handler inside a span per message; the handler itself where nobody traces."""
    found = _tracing()
    if found is None:
        return handler
    trace, tracer = found

    async def traced(message: Message[Any]) -> Any:
        attributes = {
            "messaging.system": "nsq",
            "messaging.operation.type": "process",
            "messaging.destination.name": topic,
            "messaging.consumer.group.name": channel,
            "messaging.message.id": message.id.decode(errors="replace"),
            "messaging.message.body.size": len(message.body),
            "messaging.nsq.attempts": message.attempts,
        }
        with tracer.start_as_current_span(f"process {topic}", kind=trace.SpanKind.CONSUMER, attributes=attributes):
            returned = await handler(message)
            # Inside the span: it is part of the work.
            return returned if returned is None else await result_of(returned)

    return traced
