"""Let messages of a channel fail: ``python -m support.die TOPIC CHANNEL COUNT``, against the broker of the examples."""

from __future__ import annotations

import asyncio
import sys

from flintmq import Consumer, Producer


async def main(topic: str, channel: str, count: int) -> None:
    nsqd = "127.0.0.1:4150"
    async with Producer(nsqd) as producer:
        await producer.publish_many(topic, [b"bad"] * count)
    failed = 0
    async with Consumer(topic, channel, nsqd=nsqd, max_in_flight=count, max_attempts=0) as consumer:
        async for message in consumer:
            message.requeue(0, backoff=False)
            failed += 1
            if failed == count:
                break


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
