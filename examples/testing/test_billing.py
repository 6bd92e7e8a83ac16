"""Tests of a program that bills orders. They need flintmq, pytest and pytest-asyncio, and nothing else runs."""

from collections.abc import Callable

import pytest

from flintmq import Consumer, Message, Producer, sync
from flintmq.errors import PublishError
from flintmq.testing import NsqBroker, NsqCluster

# What is tested.


async def bill(message: Message) -> None:
    if message.body == b"not paid" and message.attempts == 1:
        message.requeue(delay=3600, backoff=False)  # perhaps in an hour
    else:
        billed.append(message.body)


def order(broker: str, item: bytes) -> None:
    sync.publish("orders", item, nsqd=broker)


billed: list[bytes] = []


# The tests.


@pytest.fixture(autouse=True)
def nothing_billed_yet() -> None:
    billed.clear()


def test_an_order_is_published(nsq_broker: NsqBroker) -> None:
    order(nsq_broker.address, b"tea")

    assert nsq_broker.take("orders") == [b"tea"]


async def test_orders_are_billed(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("orders", b"tea", b"coffee")

    async with Consumer("orders", "billing", nsqd=nsq_broker.address, handler=bill):
        await nsq_broker.until_empty("orders", "billing")

    assert billed == [b"tea", b"coffee"]


async def test_an_order_that_is_not_paid_is_billed_an_hour_later(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("orders", b"not paid")

    async with Consumer("orders", "billing", nsqd=nsq_broker.address, handler=bill):
        await nsq_broker.until_empty("orders", "billing", deferred=1)
        assert billed == []

        nsq_broker.clock.advance(seconds=3600)
        await nsq_broker.until_empty("orders", "billing")

    assert billed == [b"not paid"]


async def test_billing_goes_on_after_a_crash(nsq_broker: NsqBroker) -> None:
    async with Consumer("orders", "billing", nsqd=nsq_broker.address, handler=bill):
        nsq_broker.publish("orders", b"tea")
        await nsq_broker.until_empty("orders", "billing")

        nsq_broker.crash()
        nsq_broker.restart()
        nsq_broker.publish("orders", b"coffee")
        await nsq_broker.until_empty("orders", "billing")

    assert b"coffee" in billed  # and the tea perhaps twice: delivery is at least once


async def test_a_full_disk_is_noticed(nsq_broker: NsqBroker) -> None:
    async with Producer(nsq_broker.address) as producer:
        nsq_broker.disk_full()
        with pytest.raises(PublishError):
            await producer.publish("orders", b"tea")


async def test_orders_are_billed_wherever_they_are(nsq_cluster: Callable[..., NsqCluster]) -> None:
    cluster = nsq_cluster(brokers=2, lookupds=1)
    for broker, item in zip(cluster.brokers, [b"tea", b"coffee"], strict=True):
        broker.publish("orders", item)
    cluster.wait_until_registered("orders")

    async with Consumer("orders", "billing", lookupd=cluster.lookupd_addresses, handler=bill, max_in_flight=2):
        for broker in cluster.brokers:
            await broker.until_empty("orders", "billing")

    assert sorted(billed) == [b"coffee", b"tea"]
