"""Another node id, by option, host name or a restored copy, is for new messages: those that are stored keep theirs."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker import backup
from flintmq.broker.daemon import Broker
from flintmq.errors import StartError
from flintmq.protocol.wire import FRAME_ERROR, FRAME_MESSAGE, FrameDecoder, Message, decode_message, encode_mpub
from support.fakes import Client, FakeClock, pass_time, quiet, until

NODE_IDS = "node-ids.json"


class Connection:
    """A client on a real socket, so that FINs take the lanes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = FrameDecoder()
        self._frames: list[tuple[int, bytes]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, broker: Broker) -> AsyncIterator[Connection]:
        host, _, port = broker.tcp_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"  V2")
        yield cls(reader, writer)
        writer.close()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def frame(self) -> tuple[int, bytes]:
        async with asyncio.timeout(20):
            while not self._frames:
                data = await self._reader.read(1 << 18)
                assert data, "the broker closed the connection"
                self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    async def messages(self, count: int) -> list[Message]:
        found = []
        for _ in range(count):
            kind, data = await self.frame()
            assert kind == FRAME_MESSAGE, data
            found.append(decode_message(data))
        return found

    async def publish(self, topic: str, *bodies: bytes) -> None:
        self.send(encode_mpub(topic.encode(), list(bodies)))
        assert (await self.frame())[1] == b"OK"

    async def subscribe(self, topic: str, channel: str, ready: int) -> None:
        self.send(f"SUB {topic} {channel}\nRDY {ready}\n".encode())
        assert (await self.frame())[1] == b"OK"


def bodies(name: str, count: int) -> list[bytes]:
    return [f"{name}-{i}".encode() for i in range(count)]


def node_of(message: Message) -> int:
    return int(message.id, 16) >> 54


async def end(broker: Broker, how: str) -> None:
    if how == "stop":
        await broker.stop()
    else:
        broker.kill()


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_backlog_is_finished_under_another_node_id_and_is_gone_after_a_restart(
    start_broker: StartBroker, how: str, seed: int
) -> None:
    random.seed(seed)
    topics = [f"t{i}" for i in range(random.choice([1, 3]))]
    nodes = random.sample(range(1024), 3)
    wanted: dict[str, dict[bytes, int]] = {topic: {} for topic in topics}
    for node in nodes:
        broker = await start_broker(id=node)
        async with Connection.open(broker) as client:
            for topic in topics:
                new = bodies(f"{topic}-{node}", random.choice([1, 7, 64, 333]))
                if not wanted[topic]:
                    broker.topic(topic).channel("c")
                await client.publish(topic, *new)
                wanted[topic] |= dict.fromkeys(new, node)
        await quiet(broker)
        await end(broker, how)
    broker = await start_broker(id=random.choice([*nodes, 1000]))
    for topic in topics:
        channel = broker.topics[topic].channels["c"]
        async with Connection.open(broker) as client:
            await client.subscribe(topic, "c", 2500)
            found = await client.messages(len(wanted[topic]))
            assert {message.body: node_of(message) for message in found} == wanted[topic]
            if seed % 2:
                random.shuffle(found)
            client.send(b"".join(b"FIN %s\n" % message.id for message in found))
            await until(lambda: channel.in_flight_count == 0)  # noqa: B023
            client.send(b"FIN %s\n" % found[0].id)
            assert (await client.frame())[0] == FRAME_ERROR
    await quiet(broker)
    broker.journal.flush()
    await end(broker, how)
    broker = await start_broker(id=nodes[0])
    assert {topic: broker.topics[topic].channels["c"].depth for topic in topics} == dict.fromkeys(topics, 0)


async def test_an_id_must_be_that_of_the_delivery_in_all_its_digits(start_broker: StartBroker) -> None:
    broker = await start_broker(id=5)
    broker.topic("t").channel("c")
    await Client(broker).publish("t", b"old")
    await broker.stop()
    broker = await start_broker(id=6)
    await Client(broker).publish("t", b"new")
    channel = broker.topics["t"].channels["c"]
    async with Connection.open(broker) as client:
        await client.subscribe("t", "c", 10)
        old, new = await client.messages(2)
        assert (node_of(old), node_of(new)) == (5, 6)
        for message, other in ((old, 6), (new, 5), (old, 7)):
            wrong = b"%016x" % (int(message.id, 16) & (1 << 54) - 1 | other << 54)
            for command in (b"FIN %s\n", b"REQ %s 0\n", b"TOUCH %s\n"):
                client.send(command % wrong)
                kind, text = await client.frame()
                assert kind == FRAME_ERROR and text.endswith(b"%s failed ID not in flight" % wrong)
        assert channel.in_flight_count == 2
        client.send(b"FIN %s\nFIN %s\n" % (new.id, old.id))
        await until(lambda: channel.in_flight_count == 0)


async def test_old_messages_are_requeued_touched_and_time_out_with_their_id(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(id=1)
    broker.topic("t").channel("c")
    await Client(broker).publish("t", b"a", b"b", b"c")
    await broker.stop()
    broker = await start_broker(id=2)
    await Client(broker).publish("t", b"d")
    client = Client(broker)
    await client.subscribe("t", "c", 10)
    await quiet(broker)
    first = {message.body: message for message in client.messages}
    client.take()
    client.touch(first[b"a"])
    client.requeue(first[b"b"])
    client.finish(first[b"c"])
    await quiet(broker)
    assert [(m.body, m.id, m.attempts) for m in client.messages] == [(b"b", first[b"b"].id, 2)]
    client.take()
    await pass_time(broker, clock, 61)
    again = {message.body: message for message in client.messages}
    assert {body: (m.id, m.attempts) for body, m in again.items()} == {
        b"a": (first[b"a"].id, 2),
        b"b": (first[b"b"].id, 3),
        b"d": (first[b"d"].id, 2),
    }
    client.finish(*again.values())
    await quiet(broker)
    assert client.errors == [] and broker.topics["t"].channels["c"].in_flight_count == 0


async def test_the_node_ids_of_a_data_path_without_a_record_are_read_from_its_messages(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """So it is for one that was written by 0.1.0, by whichever host names it had."""
    nodes = [3, 700, 3, 44]
    for i, node in enumerate(nodes):
        broker = await start_broker(id=node)
        broker.topic("t").channel("c")
        await Client(broker).publish("t", *bodies(f"{i}", 5))
        await broker.stop()
        (tmp_path / "flintmq" / NODE_IDS).unlink()
    broker = await start_broker(id=9)
    client = Client(broker)
    await client.subscribe("t", "c", 100)
    await quiet(broker)
    assert [node_of(message) for message in client.messages] == [node for node in nodes for _ in range(5)]
    client.finish(*client.messages)
    await quiet(broker)
    assert client.errors == []
    assert broker.topics["t"].channels["c"].in_flight_count == 0
    record = json.loads((tmp_path / "flintmq" / NODE_IDS).read_bytes())
    assert set(record["used"]) == {*nodes, 9}


async def test_a_restored_copy_under_another_node_id_is_finished(start_broker: StartBroker, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for node in (8, 9):
        broker = await start_broker(id=node, data_path=source)
        broker.topic("t").channel("c")
        await Client(broker).publish("t", *bodies(f"{node}", 3))
        if node == 8:
            await broker.stop()
    await quiet(broker)
    backup.make(source, tmp_path / "backup")
    backup.restore(tmp_path / "backup", tmp_path / "copy")
    copy = await start_broker(id=10, data_path=tmp_path / "copy")
    client = Client(copy)
    await Client(copy).publish("t", b"new")
    await client.subscribe("t", "c", 100)
    await quiet(copy)
    assert [node_of(message) for message in client.messages] == [8, 8, 8, 9, 9, 9, 10]
    client.finish(*client.messages)
    await quiet(copy)
    assert client.errors == [] and copy.topics["t"].channels["c"].in_flight_count == 0


async def test_the_record_stays_small_where_the_host_name_is_another_at_every_start(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    for node in range(40):
        broker = await start_broker(id=node)
        channel, _ = broker.topic("t").channel("c")
        await Client(broker).publish("t", b"x")
        client = Client(broker)
        await client.subscribe("t", "c", 10)
        await quiet(broker)
        client.finish(*client.messages)
        await quiet(broker)
        assert not client.errors
        assert channel.in_flight_count == 0
        broker.upkeep.sync()
        await quiet(broker)
        await broker.stop()
    record = json.loads((tmp_path / "flintmq" / NODE_IDS).read_bytes())
    assert sum(len(steps) for steps in record["topics"].values()) <= 4


async def test_a_damaged_record_of_node_ids_is_made_again(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker(id=1)
    broker.topic("t").channel("c")
    await Client(broker).publish("t", b"old")
    await broker.stop()
    (tmp_path / "flintmq" / NODE_IDS).write_bytes(b'{"id": ')
    broker = await start_broker(id=2)
    client = Client(broker)
    await client.subscribe("t", "c", 10)
    await quiet(broker)
    client.finish(*client.messages)
    await quiet(broker)
    assert client.errors == [] and broker.topics["t"].channels["c"].in_flight_count == 0


async def test_messages_are_finished_over_http_by_the_id_that_peek_shows(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    import aiohttp

    broker = await start_broker(id=1)
    broker.topic("t").channel("c")
    await Client(broker).publish("t", b"old")
    await broker.stop()
    broker = await start_broker(id=2, http_address="127.0.0.1:0")
    await Client(broker).publish("t", b"new")
    base = f"http://{broker.http_address}"
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{base}/channel/peek?topic=t&channel=c") as answer:
            page: dict[str, Any] = await answer.json()
        ids = [message["id"] for message in page["messages"]]
        assert [int(ident, 16) >> 54 for ident in ids] == [1, 2]
        for ident in ids:
            async with http.post(f"{base}/message/finish?topic=t&channel=c&id={ident}") as answer:
                assert answer.status == 200, await answer.text()
    assert broker.topics["t"].channels["c"].depth == 0


async def test_a_folder_of_our_name_that_is_no_data_is_refused_and_left_as_it_is(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """Such as a clone of this project, where nsqd is started beside it."""
    (tmp_path / "flintmq").mkdir()
    (tmp_path / "flintmq" / "README.md").write_text("# flintmq\n")
    with pytest.raises(StartError, match=r"flintmq is no data of a broker, .* choose another --data-path"):
        await start_broker()
    assert [path.name for path in (tmp_path / "flintmq").iterdir()] == ["README.md"]


async def test_an_older_version_refuses_a_newer_data_path_with_a_sentence(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = await start_broker()
    await broker.stop()
    about = tmp_path / "flintmq" / "format.json"
    content = json.loads(about.read_bytes())
    about.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(StartError, match=r"newer version of flintmq \(format 99, this one knows up to 2\)"):
        await start_broker()
    about.write_text(json.dumps(content))
    shutil.rmtree(tmp_path / "flintmq" / "topics")
    (tmp_path / "flintmq" / "topics").mkdir()
    await start_broker()
