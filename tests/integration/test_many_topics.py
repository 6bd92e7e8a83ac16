"""A client that publishes to many topics in turn, over sockets: a turn costs what its messages cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from test_guarded_turns import Publisher, answered

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.net import commands, sockets
from flintmq.broker.net import session as session_module
from flintmq.broker.storage.disk import Disk
from flintmq.protocol.wire import encode_command
from flintmq.system import System
from support.fakes import Client, until

pytestmark = pytest.mark.skipif(not sockets.available(), reason="no epoll: there are no lanes")

NAMES = [b"t%d" % number for number in range(50)]


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
        yield broker


def to_each(*names: bytes) -> bytes:
    return b"".join(encode_command(b"PUB", name, body=b"x") for name in names)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Collect the first argument of each call."""
    calls: list[Any] = []
    real = getattr(owner, name)

    def counted(first: Any, *rest: Any) -> Any:
        calls.append(first)
        return real(first, *rest)

    monkeypatch.setattr(owner, name, counted)
    return calls


async def test_a_publisher_that_changes_its_topic_takes_no_lane_for_each(broker: Broker) -> None:
    publisher = Publisher(broker, b"t7")
    for round in range(1, 5):
        publisher.send(to_each(*NAMES))
        await answered([publisher], 50 * round)
    assert len(broker._lanes) == 1
    (session,) = broker.sessions.values()
    assert session.lane is None
    # One that stays with a topic does.
    for number in range(3):
        publisher.publish()
        await answered([publisher], 201 + number)
    assert session.lane is broker.lane(broker.topics["t7"], "PUB")
    assert broker.counters.lane_published > 0
    assert [broker.topics[name.decode()].message_count for name in NAMES] == [4] * 7 + [7] + [4] * 42
    assert session.publish_counts == {name.decode(): 4 + 3 * (name == b"t7") for name in NAMES}
    publisher.close()


async def test_a_line_is_taken_apart_once_whoever_says_it(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    publishers = [Publisher(broker, b"") for _ in range(3)]
    runs = count_calls(monkeypatch, commands, "run")
    for round in range(1, 4):
        for publisher in publishers:
            publisher.send(to_each(*NAMES))
        await answered(publishers, 50 * round)
    assert len(runs) == 50
    assert len(broker.publish_lines) == 50
    for publisher in publishers:
        publisher.close()


async def test_a_topic_of_the_same_name_is_not_the_one_that_was_deleted(broker: Broker) -> None:
    publisher = Publisher(broker, b"")
    publisher.send(to_each(*NAMES))
    await answered([publisher], 50)
    old = {name: broker.topics[name.decode()] for name in NAMES}
    for name in NAMES:
        broker.delete_topic(name.decode())
    assert broker.publish_lines == {}
    publisher.send(to_each(*reversed(NAMES)) + to_each(*NAMES))
    await answered([publisher], 150)
    for name, topic in old.items():
        assert broker.topics[name.decode()] is not topic
        assert broker.topics[name.decode()].message_count == 2
        assert topic.message_count == 1
    publisher.close()


@pytest.mark.parametrize("why", ["TLS is required", "an auth server is asked"])
async def test_a_line_that_others_said_is_no_right_to_say_it(broker: Broker, why: str) -> None:
    first, other = Client(broker), Client(broker)
    await first.publish("t", b"one")
    assert list(broker.publish_lines) == [b"PUB t"]
    if why == "TLS is required":
        other.session.allowed = commands.BEFORE_TLS
    else:

        class Nobody:
            def must_ask(self, verb: str, topic: str, channel: str) -> bool:
                raise commands.ProtocolError("E_UNAUTHORIZED", f"{verb} {topic}")

            def cancel(self) -> None: ...

        other.session.authorization = Nobody()  # type: ignore[assignment]
    other.send(to_each(b"t"))
    await until(lambda: other.errors)
    assert other.errors[0].startswith(b"E_INVALID" if why == "TLS is required" else b"E_UNAUTHORIZED")
    assert broker.topics["t"].message_count == 1


async def test_channels_without_a_ready_consumer_are_not_looked_at(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        topic = broker.topic(name.decode())
        for number in range(10):
            topic.channel(f"c{number}")
    consumers = [Client(broker) for _ in range(2)]
    await consumers[0].subscribe("t3", "c4")
    await consumers[1].subscribe("t3", "c5", ready=2)
    pumps = count_calls(monkeypatch, Channel, "pump")
    publisher = Publisher(broker, b"")
    publisher.send(to_each(*NAMES))
    await answered([publisher], 50)
    busy = broker.topics["t3"].channels["c5"]
    assert set(pumps) == {busy}
    assert len(consumers[1].messages) == 1
    # One that becomes ready is, and again after it had enough.
    consumers[0].ready(1)
    assert len(consumers[0].messages) == 1
    publisher.send(to_each(b"t3", b"t3"))
    await answered([publisher], 52)
    await until(lambda: len(consumers[1].messages) == 2)
    consumers[1].finish(*consumers[1].messages)
    await until(lambda: len(consumers[1].messages) == 3)
    publisher.close()


async def test_bounded_channels_drop_what_is_too_much_without_a_consumer(broker: Broker) -> None:
    topic = broker.topic("t1")
    client, publisher = Client(broker), Publisher(broker, b"t1")
    await client.subscribe("t1", "brief#ephemeral")
    most = topic.settings.mem_queue_size
    for number in range(1, 5):
        publisher.send(b"MPUB t1\n" + mpub_body(most // 2))
        await answered([publisher], number)
    assert topic.channels["brief#ephemeral"].depth == most
    publisher.close()


def mpub_body(count: int) -> bytes:
    records = count.to_bytes(4, "big") + b"\0\0\0\1x" * count
    return len(records).to_bytes(4, "big") + records


async def test_answers_of_many_topics_are_looked_for_together(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SECONDS_AT_ONCE", 60.0)
    publisher = Publisher(broker, b"")
    publisher.send(to_each(*NAMES))
    # A new topic waits for the journal.
    await answered([publisher], 50)
    looks = count_calls(monkeypatch, session_module.Session, "send_answers")
    publisher.send(to_each(*NAMES))
    await answered([publisher], 100)
    assert len(looks) <= 10
    publisher.close()


async def test_files_stay_open_and_nobody_asks_what_can_be_deleted_of_a_single_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CountingSystem(System):
        opened = 0

        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            self.opened += path.suffix == ".seg"
            return super().open(path, flags, mode)

    system = CountingSystem()
    async with Broker(data_path=tmp_path, disk=Disk(system), http_address="127.0.0.1:0") as broker:
        publisher = Publisher(broker, b"")
        for round in range(1, 4):
            publisher.send(to_each(*NAMES))
            await answered([publisher], 50 * round)
        assert system.opened == 50
        asked = count_calls(monkeypatch, Topic, "first_needed")
        broker.upkeep.sync()
        await until(lambda: not broker.upkeep.freeing and not broker.store.unsynced)
        assert asked == []
        publisher.close()
