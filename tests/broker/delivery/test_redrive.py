"""A redrive that a stop or a crash interrupts goes on at the next start: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker import backup
from flintmq.broker.daemon import Broker
from support.fakes import Client, CountingDisk, FakeClock, pass_time, quiet, until
from support.http_client import HttpClient

REDRIVE = "/channel/redrive?topic=t&channel=c"


async def ask(broker: Broker, method: str, target: str) -> dict[str, Any]:
    async with HttpClient.connect(broker.http_address) as client:
        answer = await client.ask(method, target, b"" if method == "POST" else None)
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


async def with_dead_letters(broker: Broker, count: int) -> list[bytes]:
    channel, _ = broker.topic("t").channel("c")
    channel.settings = replace(channel.settings, max_attempts=1)
    bodies = [b"%d" % number for number in range(count)]
    await Client(broker).publish_many("t", bodies)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", count)
    await until(lambda: len(consumer.messages) >= count)
    for message in consumer.messages:
        consumer.requeue(message)
    await until(lambda: not channel.leaving)
    consumer.hang_up()
    await until(lambda: consumer.transport.lost)
    await quiet(broker)
    return bodies


async def all_of(broker: Broker, count: int) -> Counter[bytes]:
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 1_000)
    await until(lambda: len(consumer.messages) >= count)
    await quiet(broker)
    return Counter(message.body for message in consumer.messages)


@pytest.mark.parametrize("end", ["stop", "kill"])
# More is left than the first second's worth after the restart: that too goes at once.
@pytest.mark.parametrize(("count", "most", "moved"), [(30, 30, 10), (450, 450, 200), (450, 417, 200), (7, 7, 0)])
async def test_a_redrive_goes_on_after_a_restart(
    start_broker: StartBroker, clock: FakeClock, end: str, count: int, most: int, moved: int
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    bodies = await with_dead_letters(broker, count)
    # The first second's worth goes at once, then time stands still.
    rate = max(1, moved)
    await ask(broker, "POST", f"{REDRIVE}&count={most}&rate={rate}")
    await until(lambda: broker.topics["t"].channels["c"].redrive is not None)
    redrive = broker.topics["t"].channels["c"].redrive
    assert redrive is not None
    await until(lambda: redrive.moved == rate)
    if end == "stop":
        await broker.stop()
    else:
        broker.journal.flush()
        broker.kill()
    again = await start_broker(http_address="127.0.0.1:0")
    progress = await ask(again, "GET", REDRIVE)
    assert (progress["running"], progress["planned"]) == (True, most)
    assert progress["moved"] >= rate
    while (await ask(again, "GET", REDRIVE))["running"]:
        # It looks at the clock again after a real STRIDE.
        clock.advance(1)
        await asyncio.sleep(0.01)
    progress = await ask(again, "GET", REDRIVE)
    assert progress == {"dead_letter_topic": "t.c.dead", "reason": "", "planned": most, "moved": most, "running": False}
    found = await all_of(again, most)
    assert set(found.values()) == {1}
    assert len(found) == most
    left = again.topics["t.c.dead"].channels["redrive"].depth
    assert left == len(bodies) - most


@pytest.mark.parametrize("end", ["stop", "kill", "none"])
@pytest.mark.parametrize(("count", "rate"), [(30, 10), (450, 200), (7, 1)])
async def test_a_redrive_that_was_stopped_stays_so(
    start_broker: StartBroker, clock: FakeClock, end: str, count: int, rate: int
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, count)
    await ask(broker, "POST", f"{REDRIVE}&rate={rate}")
    redrive = broker.topics["t"].channels["c"].redrive
    assert redrive is not None
    await until(lambda: redrive.moved == rate)
    await ask(broker, "DELETE", REDRIVE)
    stopped = await ask(broker, "GET", REDRIVE)
    assert (stopped["running"], stopped["moved"], stopped["error"]) == (False, rate, "stopped")
    if end == "stop":
        await broker.stop()
    elif end == "kill":
        broker.kill()
    if end != "none":
        broker = await start_broker(http_address="127.0.0.1:0")
    clock.advance(100)
    await quiet(broker)
    again = await ask(broker, "GET", REDRIVE)
    assert (again["running"], again["moved"], again["error"]) == (False, rate, "stopped")
    assert broker.topics["t.c.dead"].channels["redrive"].depth == count - rate
    # Those that stayed can still be sent back, and nothing comes twice.
    await ask(broker, "POST", REDRIVE)
    found = await all_of(broker, count)
    assert (len(found), set(found.values())) == (count, {1})


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_how_a_redrive_ended_is_known_after_every_restart(start_broker: StartBroker, end: str) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 7)
    await ask(broker, "POST", f"{REDRIVE}&rate=2&reason=requeued")
    redrive = broker.topics["t"].channels["c"].redrive
    assert redrive is not None
    await until(lambda: redrive.moved == 2)
    await ask(broker, "DELETE", REDRIVE)
    for _ in range(3):
        await broker.stop() if end == "stop" else broker.kill()
        broker = await start_broker(http_address="127.0.0.1:0")
        told = await ask(broker, "GET", REDRIVE)
        assert (told["running"], told["moved"], told["error"], told["reason"]) == (False, 2, "stopped", "requeued")


async def test_a_redrive_that_found_no_dead_letter_topic_is_the_last_one_after_a_restart_too(
    start_broker: StartBroker,
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 3)
    await ask(broker, "POST", REDRIVE)
    await until(lambda: broker.topics["t"].channels["c"].depth == 3)
    await quiet(broker)
    assert (await ask(broker, "GET", REDRIVE))["moved"] == 3
    broker.delete_topic("t.c.dead")
    nothing = await ask(broker, "POST", f"{REDRIVE}&reason=expired")
    assert (nothing["reason"], nothing["moved"], nothing["running"]) == ("expired", 0, False)
    for _ in range(2):
        await broker.stop()
        broker = await start_broker(http_address="127.0.0.1:0")
        assert await ask(broker, "GET", REDRIVE) == nothing


async def test_a_redrive_is_stopped_while_copies_are_written(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 1_000)
    await ask(broker, "POST", REDRIVE)
    while (stopped := await ask(broker, "DELETE", REDRIVE))["running"]:
        # Until they have arrived there is no second one.
        async with HttpClient.connect(broker.http_address) as client:
            assert (await client.ask("POST", REDRIVE, b"")).status in (200, 409)
    left = broker.topics["t.c.dead"].channels["redrive"].depth
    assert broker.topics["t"].channels["c"].depth + left == 1_000
    assert stopped["running"] is False
    await ask(broker, "POST", REDRIVE)
    found = await all_of(broker, 1_000)
    assert (len(found), set(found.values())) == (1_000, {1})


async def test_dead_letters_that_cannot_go_back_are_there_for_who_waits(start_broker: StartBroker) -> None:
    disk = HeldDisk()
    broker = await start_broker(http_address="127.0.0.1:0", disk=disk)
    bodies = await with_dead_letters(broker, 5)
    source, _ = broker.topics["t.c.dead"].channel("redrive")
    disk.go_on.clear()
    await ask(broker, "POST", REDRIVE)
    await until(lambda: len(source.leaving) == 5)
    consumer = Client(broker)
    await consumer.subscribe("t.c.dead", "redrive", 100)
    async with HttpClient.connect(broker.http_address) as client:
        assert (await client.ask("POST", "/channel/delete?topic=t&channel=c", b"")).status == 200
    assert not consumer.messages
    disk.go_on.set()
    # Nothing else happens that could remind the channel of them.
    await until(lambda: len(consumer.messages) == 5)
    assert {message.body for message in consumer.messages} == set(bodies)


class HeldDisk(CountingDisk):
    """Syncs of segments wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    def sync(self, fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").resolve().suffix == ".seg":
            self.go_on.wait(10)
        super().sync(fd)


async def test_stopping_a_redrive_that_does_not_run_changes_nothing(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 3)
    nothing = {"dead_letter_topic": "t.c.dead", "reason": "", "planned": 0, "moved": 0, "running": False}
    assert await ask(broker, "DELETE", REDRIVE) == nothing
    await ask(broker, "POST", REDRIVE)
    await until(lambda: broker.topics["t"].channels["c"].depth == 3)
    done = await ask(broker, "GET", REDRIVE)
    assert await ask(broker, "DELETE", REDRIVE) == done
    async with HttpClient.connect(broker.http_address) as client:
        assert (await client.ask("DELETE", "/channel/redrive?topic=t&channel=nobody")).status == 404


async def with_two_causes(broker: Broker, clock: FakeClock, each: int) -> None:
    """Let messages die: those with an even number by a requeue, the others by a timeout."""
    channel, _ = broker.topic("t").channel("c")
    channel.settings = replace(channel.settings, max_attempts=1)
    await Client(broker).publish_many("t", [b"%d" % number for number in range(2 * each)])
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2 * each)
    await until(lambda: len(consumer.messages) >= 2 * each)
    for message in consumer.messages:
        if int(message.body) % 2 == 0:
            consumer.requeue(message)
    await pass_time(broker, clock, 61)
    await until(lambda: channel.leaving.dead_lettered_count == 2 * each)
    consumer.hang_up()
    await until(lambda: consumer.transport.lost)
    await quiet(broker)


@pytest.mark.parametrize("end", ["none", "kill"])
async def test_only_dead_letters_of_one_cause_go_back(start_broker: StartBroker, clock: FakeClock, end: str) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_two_causes(broker, clock, 10)
    started = await ask(broker, "POST", f"{REDRIVE}&reason=timed%20out&rate=4")
    assert (started["reason"], started["planned"]) == ("timed out", 20)
    redrive = broker.topics["t"].channels["c"].redrive
    assert redrive is not None
    await until(lambda: redrive.moved == 4)
    if end == "kill":
        broker.journal.flush()
        broker.kill()
        broker = await start_broker(http_address="127.0.0.1:0")
    while (progress := await ask(broker, "GET", REDRIVE))["running"]:
        clock.advance(1)
        await asyncio.sleep(0.01)
    assert (progress["reason"], progress["moved"], progress["planned"]) == ("timed out", 10, 10)
    found = await all_of(broker, 10)
    assert found == Counter(b"%d" % number for number in range(1, 20, 2))
    assert broker.topics["t.c.dead"].channels["redrive"].depth == 10


async def test_a_cause_that_is_none_is_refused(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 1)
    async with HttpClient.connect(broker.http_address) as client:
        answer = await client.ask("POST", f"{REDRIVE}&reason=bored", b"")
    assert (answer.status, answer.json["message"].partition(":")[0]) == (400, "INVALID_ARG_REASON")


async def test_a_redrive_waits_until_a_new_dead_letter_topic_hands_its_messages_on(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 3)
    # As it is while lookupds are asked which channels it has elsewhere.
    broker.topics["t.c.dead"].gate(True)
    async with HttpClient.connect(broker.http_address) as client:
        request = asyncio.create_task(client.ask("POST", REDRIVE, b""))
        for _ in range(3):
            # What is asked after it is answered: it has been read.
            assert (await ask(broker, "GET", REDRIVE))["running"] is False
        assert not request.done()
        broker.topics["t.c.dead"].gate(False)
        assert (await request).json["planned"] == 3
    await until(lambda: broker.topics["t"].channels["c"].depth == 3)


async def test_how_a_redrive_ended_is_known_after_a_restart(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 12)
    await ask(broker, "POST", f"{REDRIVE}&count=5")
    await until(lambda: getattr(broker.topics["t"].channels["c"].redrive, "moved", 0) == 5)
    ended = await ask(broker, "GET", REDRIVE)
    await broker.stop()
    again = await start_broker(http_address="127.0.0.1:0")
    assert await ask(again, "GET", REDRIVE) == ended


async def test_a_redrive_whose_source_is_gone_after_a_restart_is_reported(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    await with_dead_letters(broker, 12)
    await ask(broker, "POST", f"{REDRIVE}&rate=2")
    redrive = broker.topics["t"].channels["c"].redrive
    assert redrive is not None
    await until(lambda: redrive.moved == 2)
    broker.delete_topic("t.c.dead")
    broker.journal.flush()
    broker.kill()
    again = await start_broker(http_address="127.0.0.1:0")
    progress = await ask(again, "GET", REDRIVE)
    assert (progress["running"], progress["moved"], progress["error"]) == (False, 2, "a channel was deleted")


async def test_a_redriven_message_that_was_deferred_keeps_its_time_and_its_file_through_a_seek(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", max_bytes_per_file=3_000, mem_queue_size=10)
    channel, _ = broker.topic("t").channel("c")
    channel.settings = replace(channel.settings, max_attempts=1)
    broker.topics["t"].settings = replace(broker.topics["t"].settings, retain_bytes=1 << 40)
    bodies = [b"%d " % number + bytes(900) for number in range(20)]
    await Client(broker).publish_many("t", bodies)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 20)
    await until(lambda: len(consumer.messages) == 20)
    for message in consumer.messages:
        consumer.requeue(message)
    await until(lambda: "t.c.dead" in broker.topics and not channel.leaving)
    consumer.hang_up()
    await ask(broker, "POST", REDRIVE)
    await until(lambda: channel.side.total == 20)
    first = channel.side.first
    async with HttpClient.connect(broker.http_address) as http:
        about = f"topic=t&channel=c&id={broker.topics['t'].ids.text(first).decode()}"
        assert (await http.post(f"/message/defer?{about}&delay=60000", b"")).status == 200
        assert (await http.post("/channel/seek?topic=t&channel=c&to=earliest", b"")).status == 200
        await quiet(broker)
        assert (channel.depth, len(channel.deferred)) == (39, 1)
    # All the others are finished, and the files of the side log go as far as they can.
    other = Client(broker)
    await other.subscribe("t", "c", 100)
    await until(lambda: len(other.messages) == 39)
    other.finish(*other.messages)
    other.take()
    for _ in range(3):
        await quiet(broker)
        broker.upkeep.sync()
    await pass_time(broker, clock, 61)
    await until(lambda: other.messages)
    assert [message.body for message in other.messages] == [bodies[0]]


async def ids_of(broker: Broker, *bodies: bytes) -> list[bytes]:
    """Let messages die and bring them back: their ids then."""
    channel, _ = broker.topic("t").channel("c")
    channel.settings = replace(channel.settings, max_attempts=1)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", len(bodies))
    await Client(broker).publish_many("t", list(bodies))
    await until(lambda: len(consumer.messages) == len(bodies))
    for message in consumer.messages:
        consumer.requeue(message)
    consumer.take()
    await until(lambda: not channel.in_flight_count and not channel.leaving)
    await quiet(broker)
    await ask(broker, "POST", REDRIVE)
    await until(lambda: len(consumer.messages) == len(bodies))
    messages = consumer.messages
    consumer.finish(*messages)
    await quiet(broker)
    broker.journal.flush()
    consumer.hang_up()
    return [message.id for message in messages]


async def test_ids_of_redriven_messages_are_not_used_again_by_a_topic_of_the_same_name(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    first = await ids_of(broker, b"one", b"two")
    for name in ("t", "t.c.dead"):
        broker.delete_topic(name)
    await quiet(broker)
    # Even if the clock goes back.
    clock.step_wall(-3_600)
    second = await ids_of(broker, b"three", b"four")
    await broker.stop()
    broker = await start_broker(http_address="127.0.0.1:0")
    third = await ids_of(broker, b"five")
    assert len({*first, *second, *third}) == 5


@pytest.mark.parametrize("same_node", [False, True])
async def test_ids_of_redriven_messages_are_not_used_again_by_a_restored_copy(
    start_broker: StartBroker, tmp_path: Path, same_node: bool
) -> None:
    (tmp_path / "data").mkdir()
    broker = await start_broker(http_address="127.0.0.1:0", data_path=tmp_path / "data", id=7)
    used = await ids_of(broker, b"one")
    backup.make(tmp_path / "data", tmp_path / "copy")
    used += await ids_of(broker, b"two", b"three")
    await broker.stop()
    backup.restore(tmp_path / "copy", tmp_path / "new", same_node=same_node)
    broker = await start_broker(http_address="127.0.0.1:0", data_path=tmp_path / "new", id=7)
    used += await ids_of(broker, b"four", b"five")
    assert len(set(used)) == 5


# --- Snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [0, 3], ids=["new topic", "known topic"])
@pytest.mark.parametrize("back", [False, True], ids=["dead letters", "redriven"])
async def test_a_snapshot_calls_no_copy_durable_whose_message_it_calls_unfinished(
    start_broker: StartBroker, there: int, back: bool
) -> None:
    """It is taken in slices, and messages leave between two of them; the power may take what was said of that."""
    broker = await start_broker(http_address="127.0.0.1:0")
    channel, _ = broker.topic("t").channel("c")
    if there:
        await with_dead_letters(broker, there)
    if back and there:
        await ask(broker, "POST", REDRIVE)
        await until(lambda: channel.depth == there)
    if back:
        await with_dead_letters(broker, 4)
    # The topic from which they leave comes first, and the channel that they leave.
    origin = "t.c.dead" if back else "t"
    broker.topics = dict(sorted(broker.topics.items(), key=lambda each: each[0] != origin))
    notes = broker._snapshot()
    seen = [next(notes)]
    while seen[-1][0] != "channel_state":
        seen.append(next(notes))
    if back:
        await ask(broker, "POST", REDRIVE)
        source = broker.topics["t.c.dead"].channels["redrive"]
        await until(lambda: not (source.depth or source.leaving))
    else:
        await with_dead_letters(broker, 4)
    await quiet(broker)
    target = broker.topics["t" if back else "t.c.dead"]
    log = target.side if back else target.log
    assert log is not None and log.durable == log.end
    kind = "side" if back else "durable"
    known = [note[2] for note in [*seen, *notes] if note[:2] == (kind, target.incarnation)]
    # Without a mark all of it is looked at after a crash.
    assert log.durable - (known[0] if known else log.first) >= 4
