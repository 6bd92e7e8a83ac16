"""ansq (asyncio) behind the line protocol."""

from __future__ import annotations

import asyncio
import logging
import sys

import ansq
from ansq.tcp.reader import Reader
from ansq.tcp.types import NSQErrorSchema, NSQResponseSchema
from ansq.tcp.writer import Writer
from lines import Deliveries, say_hello, serve_asyncio, write_event


class AnsqDriver:
    def __init__(self, address: str) -> None:
        self._address = address
        self._writer: Writer | None = None
        self._consuming: list[asyncio.Task[None]] = []
        self._deliveries = Deliveries()

    def _options(self, msg_timeout_ms: int | None) -> ansq.ConnectionOptions:
        features = ansq.ConnectionFeatures(msg_timeout=msg_timeout_ms) if msg_timeout_ms else ansq.ConnectionFeatures()
        # A lost connection has to end the test, not be mended behind its back. ansq's own logger keeps errors to
        # itself; this one passes them on.
        return ansq.ConnectionOptions(features=features, auto_reconnect=False, logger=logging.getLogger("ansq"))

    async def _connected_writer(self) -> Writer:
        if self._writer is None:
            self._writer = await ansq.create_writer([self._address], self._options(None))
        return self._writer

    async def pub(self, topic: str, body: bytes) -> None:
        accept(await (await self._connected_writer()).pub(topic, body))

    async def mpub(self, topic: str, bodies: list[bytes]) -> None:
        accept(await (await self._connected_writer()).mpub(topic, *bodies))

    async def dpub(self, topic: str, body: bytes, delay_ms: int) -> None:
        accept(await (await self._connected_writer()).dpub(topic, body, delay_ms))

    async def subscribe(self, topic: str, channel: str, max_in_flight: int, msg_timeout_ms: int | None) -> None:
        reader = await ansq.create_reader(
            topic, channel, [self._address], connection_options=self._options(msg_timeout_ms)
        )
        # The Reader offers no max_in_flight of its own yet, only RDY on its connections.
        for connection in reader.connections:
            await connection.rdy(max_in_flight)
        self._consuming.append(asyncio.create_task(self._consume(reader)))

    async def _consume(self, reader: Reader) -> None:
        async for message in reader.messages():
            self._deliveries.add(reader.channel, message)
        write_event("error", text="ansq: the consumer's connection was lost")

    async def fin(self, delivery: int) -> None:
        await self._deliveries.take(delivery).fin()

    async def req(self, delivery: int, delay_ms: int) -> None:
        await self._deliveries.take(delivery).req(delay_ms)

    async def touch(self, delivery: int) -> None:
        await self._deliveries.get(delivery).touch()


def accept(response: NSQResponseSchema | NSQErrorSchema | None) -> None:
    """ansq returns the broker's errors instead of raising them."""
    if response is None or not response.is_ok:
        raise RuntimeError(f"publish was answered {response!r}")


async def main() -> None:
    driver = AnsqDriver(sys.argv[1])
    say_hello()
    await serve_asyncio(driver)


asyncio.run(main())
