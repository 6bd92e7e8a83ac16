"""Publish in batches, and store what comes in batches too."""

import asyncio
import os

from flintmq import Consumer, Producer

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")


def store(rows: list[bytes]) -> None:
    print("stored", len(rows))


async def main() -> None:
    async with Producer(NSQD) as producer:
        # All of them are stored or none.
        await producer.publish_many("rows", [b"%d" % n for n in range(250)])
        # Single ones that are published at the same time go out together as well.
        await asyncio.gather(*(producer.publish("rows", b"%d" % n) for n in range(250, 300)))

    seen = 0
    async with Consumer("rows", "database", nsqd=NSQD, max_in_flight=200) as consumer:
        # A batch is handed out when it is full, or a second after its first message came.
        async for batch in consumer.batches(100, wait=1.0):
            with batch:  # all are finished at the end of the block, or requeued if it raises
                store([message.body for message in batch])
            seen += len(batch)
            if seen == 300:
                break


asyncio.run(main())
