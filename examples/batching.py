"""Publish in batches, and store what comes in batches too."""

import asyncio
import os

from flintmq import Consumer, Message, Producer

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")
BATCH = 100


def store(rows: list[bytes]) -> None:
    print("stored", len(rows))


async def main() -> None:
    async with Producer(NSQD) as producer:
        # All of them are stored or none.
        await producer.publish_many("rows", [b"%d" % n for n in range(250)])
        # Single ones that are published at the same time go out together as well.
        await asyncio.gather(*(producer.publish("rows", b"%d" % n) for n in range(250, 300)))

    seen = 0
    batch: list[Message] = []
    async with Consumer("rows", "database", nsqd=NSQD, max_in_flight=BATCH) as consumer:
        async for message in consumer:
            batch.append(message)
            # Not len(batch) == BATCH: each of several brokers sends its share, and the shares may add up to less.
            if consumer.is_starved or seen + len(batch) == 300:
                store([message.body for message in batch])
                for message in batch:
                    message.finish()
                seen += len(batch)
                batch.clear()
            if seen == 300:
                break


asyncio.run(main())
