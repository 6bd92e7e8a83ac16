import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

from stopwatch import Reading, Stopwatch

from flintmq import Consumer, Message, Producer

SCENARIO, ADDRESS, MESSAGES = sys.argv[1], sys.argv[2], int(sys.argv[3])
BODY = b"x" * 200


async def consume() -> Reading:
    handled = 0
    watch: Stopwatch | None = None
    done = asyncio.Event()

    async def handler(message: Message) -> None:
        nonlocal handled, watch
        if not handled:
            watch = Stopwatch()
        handled += 1
        if handled == MESSAGES:
            done.set()

    async with Consumer("bench", "clients", nsqd=ADDRESS, handler=handler, max_in_flight=1000):
        await done.wait()
        assert watch is not None
        return watch.read()


async def batches() -> Reading:
    return await publish(lambda producer: producer.publish_many("published", [BODY] * 200), MESSAGES // 200, 10)


async def singles() -> Reading:
    return await publish(lambda producer: producer.publish("published", BODY), MESSAGES, 100)


async def publish(send: Callable[[Producer], Awaitable[None]], calls: int, under_way: int) -> Reading:
    async def repeat() -> None:
        for _ in range(calls // under_way):
            await send(producer)

    async with Producer(ADDRESS) as producer:
        watch = Stopwatch()
        await asyncio.gather(*(repeat() for _ in range(under_way)))
        return watch.read()


json.dump(asyncio.run({"consume": consume, "batches": batches, "singles": singles}[SCENARIO]()), sys.stdout)
