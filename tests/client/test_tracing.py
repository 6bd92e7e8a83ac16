"""Spans, where OpenTelemetry is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.client import Consumer, Message, Producer, tracing

from .fakes import until


async def handler(message: Message) -> None:
    if message.body == b"bad":
        raise ZeroDivisionError


def test_without_opentelemetry_there_is_nothing_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert tracing.publish_spans() is None
    assert tracing.traced_handler(handler, "t", "c") is handler


async def test_publishes_and_handlers_have_spans(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the OpenTelemetry SDK is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    async with Broker(data_path=tmp_path) as broker:
        async with Producer(broker.tcp_address) as producer:
            await producer.publish("t", b"good")
            await producer.publish_many("t", [b"good", b"bad"])
        async with Consumer("t", "c", nsqd=broker.tcp_address, handler=handler, max_in_flight=3) as consumer:
            await until(lambda: consumer.stats.finished + consumer.stats.requeued == 3)
    spans = exporter.get_finished_spans()
    assert [(span.name, span.attributes["messaging.batch.message_count"]) for span in spans[:2]] == [
        ("send t", 1),
        ("send t", 2),
    ]
    assert [span.name for span in spans[2:]] == ["process t"] * 3
    assert sorted(span.status.is_ok for span in spans[2:]).count(False) >= 1
    assert all(span.attributes["messaging.consumer.group.name"] == "c" for span in spans[2:])
