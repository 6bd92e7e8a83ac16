"""Consumers nearby come first, with ``--enable-experiment=topology-aware-consumption``."""

from __future__ import annotations

import json

from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.protocol.wire import encode_command
from support.fakes import Client, quiet

HERE = {"topology_region": "north", "topology_zone": "n1"}
AWARE = {"enable_experiment": ("topology-aware-consumption",), **HERE}


async def consumer(broker: Broker, region: str, zone: str, ready: int) -> Client:
    client = Client(broker)
    fields = {"topology_region": region, "topology_zone": zone}
    client.send(encode_command(b"IDENTIFY", body=json.dumps(fields).encode()))
    await client.subscribe("t", "c", ready)
    return client


async def test_the_zone_comes_first_then_the_region_then_everybody(start_broker: StartBroker) -> None:
    broker = await start_broker(**AWARE)
    far = await consumer(broker, "south", "s1", 10)
    region = await consumer(broker, "north", "n2", 3)
    zone = await consumer(broker, "north", "n1", 2)
    await Client(broker).publish_many("t", [b"%d" % n for n in range(7)])
    await quiet(broker)
    assert [len(client.messages) for client in (zone, region, far)] == [2, 3, 2]
    assert broker.topics["t"].channels["c"].sent_from_memory == [2, 3, 2]


async def test_a_zone_that_can_take_everything_gets_everything(start_broker: StartBroker) -> None:
    broker = await start_broker(**AWARE)
    far = await consumer(broker, "south", "s1", 100)
    zone = await consumer(broker, "north", "n1", 100)
    producer = Client(broker)
    for n in range(20):
        await producer.publish("t", b"%d" % n)
    await quiet(broker)
    assert (len(zone.messages), len(far.messages)) == (20, 0)
    # As soon as nobody nearby takes more, the others get their turn.
    zone.ready(0)
    await producer.publish("t", b"one more")
    await quiet(broker)
    assert far.bodies == [b"one more"]


async def test_without_the_experiment_everybody_is_equal(start_broker: StartBroker) -> None:
    broker = await start_broker(**HERE)
    far = await consumer(broker, "south", "s1", 100)
    zone = await consumer(broker, "north", "n1", 100)
    await Client(broker).publish_many("t", [b"%d" % n for n in range(20)])
    await quiet(broker)
    assert (len(zone.messages), len(far.messages)) == (10, 10)
    assert broker.topics["t"].channels["c"].sent_from_memory == [0, 0, 20]


async def test_a_node_that_does_not_say_where_it_is_prefers_nobody(start_broker: StartBroker) -> None:
    broker = await start_broker(enable_experiment=AWARE["enable_experiment"])
    nowhere = await consumer(broker, "", "", 100)
    far = await consumer(broker, "south", "s1", 100)
    await Client(broker).publish_many("t", [b"%d" % n for n in range(20)])
    await quiet(broker)
    assert (len(nowhere.messages), len(far.messages)) == (10, 10)
    assert broker.topics["t"].channels["c"].sent_from_memory == [10, 0, 10]
