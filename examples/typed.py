"""Publish values and consume values: dataclasses here; msgspec structs and pydantic models work the same way."""

import asyncio
import os
from dataclasses import dataclass

from flintmq import Consumer, Producer

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")


@dataclass
class Order:
    item: str
    amount: int = 1


async def main() -> None:
    async with Producer(NSQD) as producer:
        await producer.publish("typed_orders", Order("tea", amount=2))

    async with Consumer("typed_orders", "billing", nsqd=NSQD, type=Order) as consumer:
        async for message in consumer:
            with message:
                print(message.value.amount, message.value.item)
            break


asyncio.run(main())
