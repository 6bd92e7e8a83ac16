"""Jobs for later: each is delivered when its time has come."""

import asyncio
import os
import time

from flintmq import Consumer, Producer

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")


async def main() -> None:
    start = time.monotonic()
    async with Producer(NSQD) as producer:
        await producer.defer("reminders", b"tea is ready", delay=0.3)
        await producer.defer("reminders", b"put the kettle on", delay=0.1)

    async with Consumer("reminders", "me", nsqd=NSQD, max_in_flight=10) as consumer:
        for _ in range(2):
            with await anext(consumer) as message:
                print(f"{time.monotonic() - start:.1f} s: {message.body.decode()}")


asyncio.run(main())
