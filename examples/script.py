"""Without asyncio: publish once, and read what is there."""

import os

from flintmq import sync

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")

sync.publish("notes", b"first", b"second", nsqd=NSQD)

with sync.Consumer("notes", "reader", nsqd=NSQD) as consumer:
    for _ in range(2):
        with consumer.get(timeout=30) as message:
            print(message.body.decode())
