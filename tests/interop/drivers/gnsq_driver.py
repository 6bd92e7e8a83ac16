"""gnsq (gevent) behind the line protocol."""

from __future__ import annotations

import functools
import sys
from typing import Any

import gnsq
from gevent.fileobject import FileObject
from lines import Command, Deliveries, say_hello, write_event

# Only here because gnsq takes an idle connection's RDY away; no test is idle for that long.
NEVER = 3600


class GnsqDriver:
    def __init__(self, address: str) -> None:
        self._address = address
        self._producer: gnsq.Producer | None = None
        self._consumers: list[gnsq.Consumer] = []
        self._deliveries = Deliveries()

    def _started_producer(self) -> gnsq.Producer:
        if self._producer is None:
            self._producer = gnsq.Producer(self._address)
            self._producer.start()
        return self._producer

    def pub(self, topic: str, body: bytes) -> None:
        self._started_producer().publish(topic, body)

    def mpub(self, topic: str, bodies: list[bytes]) -> None:
        self._started_producer().multipublish(topic, bodies)

    def dpub(self, topic: str, body: bytes, delay_ms: int) -> None:
        self._started_producer().publish(topic, body, defer=delay_ms)

    def subscribe(self, topic: str, channel: str, max_in_flight: int, msg_timeout_ms: None) -> None:
        consumer = gnsq.Consumer(
            topic,
            channel,
            self._address,
            message_handler=functools.partial(self._on_message, channel),
            max_in_flight=max_in_flight,
            max_tries=0,
            low_ready_idle_timeout=NEVER,
        )
        consumer.on_error.connect(self._on_error)
        consumer.start(block=False)
        self._consumers.append(consumer)

    def _on_message(self, channel: str, _consumer: gnsq.Consumer, message: gnsq.Message) -> None:
        message.enable_async()
        self._deliveries.add(channel, message)

    def _on_error(self, consumer: gnsq.Consumer, error: Exception) -> None:
        write_event("error", text=f"gnsq: {consumer.name}: {error!r}")

    def fin(self, delivery: int) -> None:
        self._deliveries.take(delivery).finish()

    def req(self, delivery: int, delay_ms: int) -> None:
        self._deliveries.take(delivery).requeue(delay_ms, backoff=False)

    def touch(self, delivery: int) -> None:
        self._deliveries.get(delivery).touch()


def main() -> None:
    driver = GnsqDriver(sys.argv[1])
    say_hello("msg_timeout")
    commands: Any = FileObject(sys.stdin.buffer, "rb")
    for line in commands:
        command = Command.from_line(line)
        try:
            getattr(driver, command.name)(**command.arguments)
        except Exception as exc:
            command.failed(exc)
        else:
            command.done()


main()
