"""Channels of very many messages: what the journal's snapshot says of them, and how long it holds the loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery import snapshot
from flintmq.broker.storage.ranges import Ranges
from support.fakes import Client, FakeClock, dpub, quiet, until


async def snapshot_taken(broker: Broker) -> None:
    broker.journal.flush()
    journal = broker.journal
    journal._roll()
    # It is taken once the new journal is on the device.
    path = journal._folder / f"snapshot-{journal._number:08d}"
    await until(lambda: path.exists() and not journal._snapshotting)
    await quiet(broker)


def picture(broker: Broker) -> dict[str, Any]:
    """What a channel still has to deliver, and how often each was delivered."""
    channel = broker.topics["t"].channels["c"]
    channel.catch_up(channel.topic.pumped)
    attempts = {seq: count for seq, count in channel.attempts.items() if count}
    attempts |= {seq: message.attempts - 1 for seq, message in channel.unusual.items() if message.attempts > 1}
    waiting = {seq for first, stop in channel.waiting for seq in range(first, stop)}
    in_flight = {seq for seq, _ in channel.ring.held(channel.ring.lo, channel.ring.hi)}
    deferred = {seq: due for due, seq in zip(*channel.deferred.columns(), strict=True)}
    return {
        "outstanding": waiting | in_flight | set(channel.requeued) | set(channel.unusual) | set(deferred),
        "deferred": deferred,
        "attempts": attempts,
    }


@pytest.mark.parametrize("seed", range(6))
async def test_a_snapshot_in_pieces_says_what_the_channel_holds(
    start_broker: StartBroker, clock: FakeClock, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    random.seed(seed)
    monkeypatch.setattr(snapshot, "PART", random.choice([1, 3, 64]))
    monkeypatch.setattr(snapshot, "CHUNK", random.choice([1, 4, 100]))
    broker = await start_broker()
    producer, consumer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 40)
    for i in range(120):
        if random.random() < 0.3:
            producer.send(dpub("t", random.randrange(60_000, 90_000), b"later %d" % i))
        else:
            await producer.publish("t", b"%d" % i)
        await quiet(broker)
        messages = consumer.messages
        consumer.take()
        for message in messages:
            chance = random.random()
            if chance < 0.5:
                consumer.finish(message)
            elif chance < 0.6:
                consumer.requeue(message)
            elif chance < 0.7:
                consumer.requeue(message, random.randrange(1, 50))
            elif chance < 0.75:
                consumer.touch(message)
        if random.random() < 0.1:
            await snapshot_taken(broker)
    await quiet(broker)
    await snapshot_taken(broker)
    before = picture(broker)
    broker.kill()
    # Only the snapshot and what came after it is left.
    assert len(list((tmp_path / "flintmq" / "journal").glob("snapshot-*"))) == 1
    after = picture(await start_broker())
    assert after["outstanding"] == before["outstanding"]
    assert after["deferred"] == before["deferred"]
    # One in flight counts when it comes back.
    assert after["attempts"] == before["attempts"]


async def test_scattered_finishes_are_taken_out_together_at_a_start(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself would move all ranges behind it: minutes, for a million."""
    broker = await start_broker()
    topic = broker.topic("t")
    channel, _ = topic.channel("c")
    data = bytearray(b"\0\0\0\1x" * 1000)
    for _ in range(20):
        topic.publish(data, 0, len(data), 1000)
        broker.turns.flush()
    await quiet(broker)
    channel.catch_up(topic.pumped)
    seqs = list(range(topic.log.first, topic.log.end, 2))
    random.Random(1).shuffle(seqs)
    for i, seq in enumerate(seqs):
        channel.ring.add_done(seq, seq + 1)
        if not i % 10:
            broker.journal.touch(channel)
            broker.journal.flush()
    broker.journal.touch(channel)
    broker.journal.flush()
    wanted = set(range(topic.log.first, topic.log.end)) - set(seqs)
    broker.kill()
    removed = 0
    remove = Ranges.remove

    def counted(self: Ranges, first: int, stop: int) -> int:
        nonlocal removed
        removed += 1
        return remove(self, first, stop)

    monkeypatch.setattr(Ranges, "remove", counted)
    again = await start_broker()
    assert picture(again)["outstanding"] == wanted
    assert removed < 100
