"""A broker with options of its own, for one test or for all of a module."""

from collections.abc import Iterator

import pytest

from flintmq import sync
from flintmq.testing import NsqBroker, NsqdKeywords


@pytest.fixture
def nsq_options() -> NsqdKeywords:
    """The fixtures `nsq_broker` and `nsq_cluster` read it."""
    return {"msg_timeout": "5s", "max_msg_size": 1024}


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[NsqBroker]:
    """One for many tests; give each its own topic."""
    with NsqBroker(max_msg_size=1024) as broker:
        yield broker


def test_a_message_times_out_after_five_seconds(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("orders", b"tea")

    with sync.Consumer("orders", "slow", nsqd=nsq_broker.address, max_in_flight=2) as consumer:
        assert consumer.get(timeout=30).attempts == 1  # and is not answered
        nsq_broker.clock.advance(seconds=5)
        with consumer.get(timeout=30) as message:
            assert message.attempts == 2


@pytest.mark.parametrize("topic", ["orders", "returns"])
def test_every_topic_is_new(shared_broker: NsqBroker, topic: str) -> None:
    shared_broker.publish(topic, b"tea")

    assert shared_broker.take(topic) == [b"tea"]
