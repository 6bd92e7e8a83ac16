import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

import ansq
import ansq.tcp.writer
from stopwatch import Reading, Stopwatch

SCENARIO, ADDRESS, MESSAGES = sys.argv[1], sys.argv[2], int(sys.argv[3])
BODY = b"x" * 200


async def consume() -> Reading:
    handled = 0
    watch: Stopwatch | None = None
    reader = await ansq.create_reader("bench", "clients", [ADDRESS])
    for connection in reader.connections:
        await connection.rdy(1000)
    async for message in reader.messages():
        if not handled:
            watch = Stopwatch()
        handled += 1
        await message.fin()
        if handled == MESSAGES:
            break
    assert watch is not None
    return watch.read()


async def batches() -> Reading:
    return await publish(lambda writer: writer.mpub("published", *[BODY] * 200), MESSAGES // 200, 10)


async def singles() -> Reading:
    return await publish(lambda writer: writer.pub("published", BODY), MESSAGES, 100)


async def publish(send: Callable[[ansq.tcp.writer.Writer], Awaitable[object]], calls: int, under_way: int) -> Reading:
    async def repeat() -> None:
        for _ in range(calls // under_way):
            await send(writer)

    writer = await ansq.create_writer([ADDRESS])
    watch = Stopwatch()
    await asyncio.gather(*(repeat() for _ in range(under_way)))
    return watch.read()


json.dump(asyncio.run({"consume": consume, "batches": batches, "singles": singles}[SCENARIO]()), sys.stdout)
