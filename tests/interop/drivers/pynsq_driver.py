"""pynsq (tornado, callbacks) behind the line protocol."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

import nsq
from lines import Deliveries, say_hello, serve_asyncio


class PynsqDriver:
    def __init__(self, address: str) -> None:
        self._address = address
        self._writer = nsq.Writer([address])
        self._readers: list[nsq.Reader] = []
        self._deliveries = Deliveries()

    async def pub(self, topic: str, body: bytes) -> None:
        await self._publish("pub", topic, body)

    async def mpub(self, topic: str, bodies: list[bytes]) -> None:
        await self._publish("mpub", topic, bodies)

    async def dpub(self, topic: str, body: bytes, delay_ms: int) -> None:
        await self._publish("dpub", topic, delay_ms, body)

    async def _publish(self, command: str, *arguments: Any) -> None:
        # A Writer refuses to publish until it is connected, and offers no event to wait for.
        async with asyncio.timeout(10):
            while not self._writer.conns:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        answer = asyncio.get_running_loop().create_future()
        getattr(self._writer, command)(*arguments, callback=lambda _connection, data: answer.set_result(data))
        if (data := await answer) != b"OK":
            raise RuntimeError(f"{command} was answered {data!r}")

    async def subscribe(self, topic: str, channel: str, max_in_flight: int, msg_timeout_ms: int | None) -> None:
        reader = nsq.Reader(
            topic,
            channel,
            message_handler=functools.partial(self._on_message, channel),
            nsqd_tcp_addresses=[self._address],
            max_in_flight=max_in_flight,
            max_tries=0,
            msg_timeout=msg_timeout_ms / 1000 if msg_timeout_ms else None,
        )
        self._readers.append(reader)

    def _on_message(self, channel: str, message: nsq.Message) -> None:
        message.enable_async()
        self._deliveries.add(channel, message)

    async def fin(self, delivery: int) -> None:
        self._deliveries.take(delivery).finish()

    async def req(self, delivery: int, delay_ms: int) -> None:
        self._deliveries.take(delivery).requeue(time_ms=delay_ms, backoff=False)

    async def touch(self, delivery: int) -> None:
        self._deliveries.get(delivery).touch()


async def main() -> None:
    driver = PynsqDriver(sys.argv[1])
    say_hello()
    await serve_asyncio(driver)


asyncio.run(main())
