"""Traps of the Go daemon that neither a recorded conversation nor the tests of a single room show.

``docs/nsq-compatibility.md`` lists all of them, each with the test that stands for it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.net import heartbeat
from flintmq.broker.storage import store as store_module
from flintmq.protocol.compression import Codec, Deflate, Snappy
from flintmq.protocol.wire import OK_FRAME, FrameDecoder, encode_command, encode_frame
from support.fakes import PATIENCE, SECOND, Client, CountingDisk, FakeClock, pass_time, pub, quiet, until


def identify(**fields: Any) -> bytes:
    return encode_command(b"IDENTIFY", body=json.dumps(fields).encode())


def new_codec(name: str) -> Codec:
    return Snappy() if name == "snappy" else Deflate(6)


class Compressed:
    """A client that was granted compression; it speaks and reads through it."""

    def __init__(self, broker: Broker, codec: str, behind: bytes = b"") -> None:
        self._client = Client(broker)
        self._out, self._in = new_codec(codec), new_codec(codec)
        self._client.send(identify(feature_negotiation=True, **{codec: True}) + behind)
        received = self._client.transport.received
        # The answer to IDENTIFY is the last frame in plain bytes.
        size = 4 + int.from_bytes(received[:4], "big")
        answer = json.loads(received[8:size])
        assert answer[codec] is True
        del received[:size]

    def send(self, command: bytes) -> None:
        self._client.send(self._out.compress(command))

    def take(self) -> bytes:
        """What came since the last time, unpacked; not of this form raises."""
        received = self._client.transport.received
        data = b"".join(self._in.decompress(bytes(received)))
        received.clear()
        return data


# --- The connection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["snappy", "deflate"])
async def test_what_was_sent_behind_an_identify_that_compresses_is_dropped(broker: Broker, codec: str) -> None:
    client = Compressed(broker, codec, behind=pub("too-early", b"m"))
    await quiet(broker)
    assert client.take() == OK_FRAME
    assert broker.topics == {}
    # The connection is none the worse for it.
    client.send(pub("t", b"m"))
    await quiet(broker)
    assert client.take() == OK_FRAME
    assert list(broker.topics) == ["t"]


@pytest.mark.parametrize("codec", ["snappy", "deflate"])
async def test_a_later_identify_with_another_buffer_stays_inside_the_compression(broker: Broker, codec: str) -> None:
    client = Compressed(broker, codec)
    assert client.take() == OK_FRAME
    client.send(identify(output_buffer_size=4096))
    assert client.take() == OK_FRAME
    client.send(b"nonsense\n")
    assert client.take() == encode_frame(1, b"E_INVALID invalid command nonsense")


@pytest.mark.parametrize("milliseconds", [-1, 30_000])
async def test_no_buffer_setting_holds_a_message_back(broker: Broker, milliseconds: int) -> None:
    """The window stays open and no heartbeat comes: the Go daemon would keep the message in its buffer."""
    consumer = Client(broker)
    assert await consumer.ask(identify(output_buffer_size=65_536, output_buffer_timeout=milliseconds)) == b"OK"
    await consumer.subscribe("t", "c", 100)
    await Client(broker).publish("t", b"m")
    await quiet(broker)
    assert consumer.bodies == [b"m"]


async def test_a_connection_without_a_magic_does_not_hold_up_a_stop(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not its own deadline closes it here.
    monkeypatch.setattr(heartbeat, "MAGIC_TIMEOUT", 3600.0)
    host, _, port = broker.tcp_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await until(lambda: broker.sessions)
    async with asyncio.timeout(PATIENCE):
        await broker.stop()
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_a_write_that_fails_closes_the_connection_at_once(start_broker: StartBroker, tmp_path: Path) -> None:
    """The peer reads no more but does not hang up: nothing but the failed write tells that it is of no use."""
    address = tmp_path / "s"
    broker = await start_broker(tcp_address=str(address))
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setblocking(False)
        await loop.sock_connect(peer, str(address))
        await loop.sock_sendall(peer, b"  V2SUB t c\nRDY 1\n")
        assert FrameDecoder().feed(await loop.sock_recv(peer, 100)) == [(0, b"OK")]
        await until(lambda: broker.topics["t"].channels["c"].sessions)
        peer.shutdown(socket.SHUT_RD)
        await Client(broker).publish("t", b"m")
        channel = broker.topics["t"].channels["c"]
        # Long before the read side would notice: the client has a minute for its next command.
        await until(lambda: not channel.sessions)
        assert all(session.channel is None for session in broker.sessions.values())
    # As with any lost client, the message waits for its timeout.
    assert (channel.in_flight_count, channel.depth) == (1, 0)


async def test_an_answer_that_comes_during_the_stop_loses_no_message(start_broker: StartBroker) -> None:
    broker = await start_broker()
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2)
    await Client(broker).publish_many("t", [b"before the stop", b"during the stop"])
    await until(lambda: len(consumer.messages) == 2)
    before, during = consumer.messages
    consumer.ready(0)
    consumer.requeue(before)
    stop = asyncio.create_task(broker.stop())
    await until(lambda: broker.stopping)
    assert not stop.done()
    # Past the transport, which is closing: this is what was already on its way to the session.
    command = b"REQ %s 0\n" % during.id
    buffer = consumer.session.get_buffer(-1)
    buffer[: len(command)] = command
    consumer.session.buffer_updated(len(command))
    await stop

    again = Client(await start_broker())
    await again.subscribe("t", "c", 10)
    await until(lambda: len(again.messages) == 2)
    attempts = {message.body: message.attempts for message in again.messages}
    assert attempts == {b"before the stop": 2, b"during the stop": 2}


# --- Queues -----------------------------------------------------------------------------------------------------------


async def test_a_deferral_survives_leaving_the_memory(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(mem_queue_size=0)
    producer = Client(broker)
    await producer.publish_later("t", b"later", 60)
    for _ in range(5):
        await producer.publish_many("t", [b"x" * 1000] * 20)
    topic = broker.topics["t"]
    assert topic.backend_depth == topic.depth == 101, "all of it has left the memory"
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2500)
    await until(lambda: len(consumer.messages) == 100)
    consumer.finish(*consumer.messages)
    await pass_time(broker, clock, 59)
    assert b"later" not in consumer.bodies
    await pass_time(broker, clock, 1)
    await until(lambda: b"later" in consumer.bodies)


async def test_without_a_memory_queue_an_ephemeral_topic_only_hands_over(start_broker: StartBroker) -> None:
    broker = await start_broker(mem_queue_size=0)
    producer, consumer = Client(broker), Client(broker)
    await producer.publish("t#ephemeral", b"nobody is there")
    await consumer.subscribe("t#ephemeral", "c", 1)
    await producer.publish("t#ephemeral", b"somebody is ready")
    await producer.publish("t#ephemeral", b"nobody is ready")
    await quiet(broker)
    consumer.finish(*consumer.messages)
    await quiet(broker)
    assert consumer.bodies == [b"somebody is ready"]
    topic = broker.topics["t#ephemeral"]
    assert (topic.message_count, topic.depth, topic.channels["c"].depth) == (3, 0, 0)


async def test_a_durable_channel_of_an_ephemeral_topic_holds_what_fits_in_memory_and_no_file(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = await start_broker(mem_queue_size=3)
    topic = broker.topic("t#ephemeral")
    channel, _ = topic.channel("c")
    producer = Client(broker)
    for number in range(5):
        await producer.publish("t#ephemeral", b"%d" % number)
    await quiet(broker)
    assert (channel.depth, channel.backend_depth, channel.dropped_count) == (3, 0, 2)
    assert list((tmp_path / "flintmq" / "topics").iterdir()) == []
    consumer = Client(broker)
    await consumer.subscribe("t#ephemeral", "c", 10)
    await quiet(broker)
    assert consumer.bodies == [b"0", b"1", b"2"]


@pytest.mark.parametrize(("topic_name", "name"), [("t", "c#ephemeral"), ("t#ephemeral", "c")])
async def test_what_is_ephemeral_holds_as_many_deferred_messages_as_fit_in_memory(
    start_broker: StartBroker, clock: FakeClock, topic_name: str, name: str
) -> None:
    broker = await start_broker(mem_queue_size=3)
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe(topic_name, name)
    channel = broker.topics[topic_name].channels[name]
    for number in range(5):
        await producer.publish_later(topic_name, b"later %d" % number, 60)
        await producer.publish(topic_name, b"now %d" % number)
    await quiet(broker)
    assert (channel.depth, len(channel.deferred), channel.dropped_count) == (3, 3, 4)
    # When they come due they take the place of newer ones.
    await pass_time(broker, clock, 60)
    assert (channel.depth, len(channel.deferred), channel.dropped_count) == (3, 0, 7)
    consumer.ready(2)
    await quiet(broker)
    assert consumer.bodies == [b"later 0", b"later 1"]


async def test_what_a_consumer_defers_is_dropped_beyond_what_an_ephemeral_channel_holds(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(mem_queue_size=3)
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c#ephemeral", 1)
    channel = broker.topics["t"].channels["c#ephemeral"]
    for number in range(5):
        await producer.publish("t", b"%d" % number)
        await until(lambda number=number: len(consumer.messages) == number + 1)
        consumer.requeue(consumer.messages[-1], 60)
    await quiet(broker)
    assert (len(channel.deferred), channel.dropped_count, channel.in_flight_count) == (3, 2, 0)
    await pass_time(broker, clock, 60)
    assert consumer.bodies[5:] == [b"0"]


async def test_an_ephemeral_channel_with_a_delivery_rate_drops_what_does_not_fit_in_memory(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(mem_queue_size=10, max_delivery_rate=5)
    consumer = Client(broker)
    await consumer.subscribe("t", "c#ephemeral", 2_500)
    channel = broker.topics["t"].channels["c#ephemeral"]
    for _ in range(4):
        await Client(broker).publish_many("t", [b"x"] * 30)
        await quiet(broker)
    assert (len(consumer.messages), channel.depth, channel.dropped_count) == (5, 10, 105)
    clock.advance(1)
    await until(lambda: len(consumer.messages) == 10)


async def test_an_id_stands_for_a_message_of_its_topic_only(broker: Broker) -> None:
    consumers = {name: Client(broker) for name in ("t", "u")}
    for name, consumer in consumers.items():
        await consumer.subscribe(name, "c", 1)
        await Client(broker).publish(name, name.encode())
    await quiet(broker)
    [of_t], [of_u] = consumers["t"].messages, consumers["u"].messages
    # Both topics were made in the same moment: the clock stands still.
    assert (of_t.id, of_t.body, of_u.body) == (of_u.id, b"t", b"u")
    consumers["t"].finish(of_t)
    assert broker.topics["t"].channels["c"].in_flight_count == 0
    assert broker.topics["u"].channels["c"].in_flight_count == 1


# --- Files ------------------------------------------------------------------------------------------------------------


async def test_a_spoiled_nsqd_dat_beside_our_own_data_does_no_harm(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker()
    await Client(broker).publish("t", b"m")
    await broker.stop()
    (tmp_path / "nsqd.dat").write_bytes(b"")
    broker = await start_broker()
    assert {name: topic.depth for name, topic in broker.topics.items()} == {"t": 1}
    await until(lambda: (tmp_path / "nsqd.dat").read_bytes().startswith(b'{"topics":[{"name":"t"'))


async def test_sync_every_counts_what_is_written_and_an_idle_timer_syncs_nothing(start_broker: StartBroker) -> None:
    class Syncs(CountingDisk):
        count = 0

        def sync(self, fd: int) -> None:
            self.count += 1
            super().sync(fd)

    disk = Syncs()
    # The timer is called by hand.
    broker = await start_broker(disk=disk, sync_every=10, sync_timeout=3600 * SECOND, mem_queue_size=0)
    producer, consumer = Client(broker), Client(broker)
    await producer.publish_many("t", [b"x"] * 9)
    await quiet(broker)
    log = broker.topics["t"].log
    assert log.durable < log.end
    await producer.publish("t", b"the tenth")
    await quiet(broker)
    assert log.durable == log.end
    await consumer.subscribe("t", "c")
    broker.upkeep.sync()
    # nsqd.dat is written, and synced, a moment after the channel was made.
    await until(lambda: not (broker.upkeep._metadata_due or broker.upkeep._metadata_busy))
    await quiet(broker)
    before = disk.count
    consumer.ready(100)
    await until(lambda: len(consumer.messages) == 10)
    broker.upkeep.sync()
    await quiet(broker)
    assert disk.count == before


async def test_publishers_wait_while_too_much_is_not_synced(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(sync_timeout=3600 * SECOND)
    producer, other = Client(broker), Client(broker)
    await producer.publish("t", b"first")
    monkeypatch.setattr(store_module, "PAUSE_AT", 1)
    producer.send(pub("t", b"second") + pub("t", b"third"))
    other.send(pub("u", b"elsewhere"))
    await quiet(broker)
    assert (producer.frames, other.frames) == ([], [])
    assert not producer.transport.reading
    broker.upkeep.sync()
    await until(lambda: producer.responses and other.responses)
    await quiet(broker)
    # One of them filled the budget again: whoever still waits goes on after the next sync.
    broker.upkeep.sync()
    await until(lambda: len(producer.responses) == 2)
    assert producer.transport.reading
    assert (broker.topics["t"].depth, broker.topics["u"].depth) == (3, 1)
