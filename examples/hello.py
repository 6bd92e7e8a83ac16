"""Publish a message and receive it."""

import asyncio
import os

from flintmq import Consumer, Producer

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")


async def main() -> None:
    async with Producer(NSQD) as producer:
        await producer.publish("greetings", b"hello")

    async with Consumer("greetings", "printer", nsqd=NSQD) as consumer:
        async for message in consumer:
            with message:  # finished at the end of the block, requeued if it raises
                print(message.body.decode())
            break


asyncio.run(main())
