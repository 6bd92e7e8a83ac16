"""Work on messages, ten at a time, until SIGTERM or ctrl-C; then finish what was begun and end."""

import asyncio
import os

from flintmq import Consumer, Message

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")


async def work(message: Message) -> None:
    await asyncio.sleep(0.01)  # ask a database, call a service
    if message.body == b"not yet" and message.attempts == 1:
        message.requeue(delay=0.1, backoff=False)  # no failure, only too early
        return
    print("done:", message.body.decode(), flush=True)


async def set_aside(message: Message) -> None:
    print("failed too often:", message.body.decode(), flush=True)


consumer = Consumer(
    "jobs",
    "workers",
    nsqd=NSQD,
    handler=work,
    concurrency=10,
    max_attempts=3,
    on_give_up=set_aside,
)
asyncio.run(consumer.run())
