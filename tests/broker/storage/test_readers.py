"""What stays in a topic's files for others than its channels: readers by their positions, and retention."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker
from test_fetch import messages as frames_of

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage import readers as readers_module
from flintmq.broker.storage.journal import NEVER
from support.fakes import SECOND, Client, CountingDisk, FakeClock, quiet, until
from support.http_client import Answer, HttpClient
from support.simdisk import PowerLoss, SimDisk, settled

HOUR = 3600 * SECOND
DAY = 24 * HOUR
FILE = 20_000
SMALL: dict[str, Any] = {
    "http_address": "127.0.0.1:0",
    "max_bytes_per_file": FILE,
    "mem_queue_size": 50,
    "sync_timeout": 3600 * SECOND,
    "sync_every": 1_000_000,
}


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker(**SMALL)


@pytest.fixture
async def http(broker: Broker) -> AsyncIterator[HttpClient]:
    async with HttpClient.connect(broker.http_address) as client:
        yield client


def configure(topic: Topic, **settings: Any) -> None:
    topic.settings = dataclasses.replace(topic.settings, **settings)


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [(b"%d " % number).ljust(100, b".") for number in range(start, start + count)]


async def publish(broker: Broker, count: int = 500, start: int = 0) -> None:
    """Enough for some files."""
    producer = Client(broker)
    for i in range(start, start + count, 25):
        await producer.publish_many("t", numbered(25, i))


async def tidied(broker: Broker) -> None:
    """What a few seconds of syncing do, in no time."""
    for _ in range(4):
        await quiet(broker)
        broker.turns.housekeeping()
        broker.upkeep.sync()
    await quiet(broker)


async def finish_all(broker: Broker, count: int) -> None:
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    await until(lambda: len(consumer.messages) == count)
    consumer.finish(*consumer.messages)
    consumer.ready(0)
    await quiet(broker)


async def position(http: HttpClient, to: object, reader: str = "spark") -> Answer:
    return await http.post(f"/log/position?topic=t&reader={reader}&to={to}")


# --- Positions --------------------------------------------------------------------------------------------------------


async def test_a_position_is_registered_moved_shown_and_deleted(
    broker: Broker, http: HttpClient, clock: FakeClock
) -> None:
    await publish(broker)
    await tidied(broker)
    topic = broker.topics["t"]
    first = topic.log.first
    answer = await position(http, "earliest")
    assert (answer.json["reader"], answer.json["offset"], answer.json["lag"]) == ("spark", first, 500)
    assert answer.json["moved"] == clock.wall()
    assert abs(answer.json["bytes"] - sum(segment.size for segment in topic.log.segments)) < 1_000
    clock.advance(60)
    moved = (await position(http, first + 200)).json
    assert (moved["offset"], moved["lag"], moved["moved"]) == (first + 200, 300, clock.wall())
    assert abs(moved["bytes"] - 300 * 136) < FILE // 4, "by the index of the files, not to the byte"
    caught_up = (await position(http, "latest", "other:1.x_y-z")).json
    assert (caught_up["offset"], caught_up["lag"], caught_up["bytes"]) == (topic.log.end, 0, 0)
    everybody = (await http.get("/log/position?topic=t")).json
    assert everybody == {"positions": [caught_up, moved]}
    assert (await http.get("/log/position?topic=t&reader=spark")).json == moved
    assert (await position(http, first + 100)).json["offset"] == first + 100, "back is a way, too"
    assert (await http.ask("DELETE", "/log/position?topic=t&reader=spark")).status == 200
    for method in ("GET", "DELETE"):
        answer = await http.ask(method, "/log/position?topic=t&reader=spark")
        assert (answer.status, answer.message) == (404, "READER_NOT_FOUND")


async def test_a_position_holds_files_as_a_channel_does(broker: Broker, http: HttpClient) -> None:
    await publish(broker)
    topic = broker.topics["t"]
    await tidied(broker)
    first = topic.log.first
    await position(http, "earliest", "slow")
    await position(http, "earliest", "quick")
    await finish_all(broker, 500)
    await tidied(broker)
    assert topic.log.first == first
    await position(http, "latest", "quick")
    await position(http, first + 200, "slow")
    await tidied(broker)
    kept = topic.log.first
    assert first < kept <= first + 200
    answer = await http.get(f"/log/fetch?topic=t&from={first + 200}&to=latest")
    assert list(frames_of(answer.body).values()) == numbered(300, 200)
    answer = await position(http, first)
    assert (answer.status, answer.json["first"]) == (410, kept)
    await http.ask("DELETE", "/log/position?topic=t&reader=slow")
    await tidied(broker)
    assert topic.log.first > first + 200


async def test_wrong_positions_are_refused(broker: Broker, http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await publish(broker, 50)
    topic = broker.topics["t"]
    broker.topic("e#ephemeral")
    for query, status, code in [
        ("topic=t&reader=r", 400, "MISSING_ARG_TO"),
        ("topic=t&to=latest", 400, "MISSING_ARG_READER"),
        ("topic=t&reader=r&to=soon", 400, "INVALID_ARG_TO"),
        ("topic=t&reader=&to=latest", 400, "INVALID_READER"),
        ("topic=t&reader=a%20b&to=latest", 400, "INVALID_READER"),
        (f"topic=t&reader={'r' * 129}&to=latest", 400, "INVALID_READER"),
        (f"topic=t&reader=r&to={topic.log.end}", 416, "NOT_YET"),
        ("topic=t&reader=r&to=1", 410, "GONE"),
        ("topic=u&reader=r&to=latest", 404, "TOPIC_NOT_FOUND"),
        ("topic=e%23ephemeral&reader=r&to=latest", 400, "NO_LOG"),
    ]:
        answer = await http.post(f"/log/position?{query}")
        assert (answer.status, answer.message.partition(":")[0]) == (status, code), query
    assert not topic.readers
    monkeypatch.setattr(readers_module, "MOST_READERS", 2)
    assert [(await position(http, "latest", name)).status for name in ("a", "b", "c", "a")] == [200, 200, 409, 200]


async def test_positions_go_with_their_topic(start_broker: StartBroker) -> None:
    broker = await start_broker(**SMALL)
    async with HttpClient.connect(broker.http_address) as http:
        await publish(broker, 50)
        await position(http, "latest")
        broker.delete_topic("t")
        await publish(broker, 50)
        assert (await http.get("/log/position?topic=t")).json == {"positions": []}
    await broker.stop()
    broker = await start_broker(**SMALL)
    assert not broker.topics["t"].readers


@pytest.mark.parametrize("crash", [False, True])
async def test_positions_and_what_they_hold_survive(start_broker: StartBroker, crash: bool) -> None:
    broker = await start_broker(**SMALL)
    await publish(broker)
    await tidied(broker)
    await finish_all(broker, 500)
    first = broker.topics["t"].log.first
    async with HttpClient.connect(broker.http_address) as http:
        before = (await position(http, first + 300)).json
        await position(http, "latest", "quick")
        await position(http, "latest", "gone")
        await http.ask("DELETE", "/log/position?topic=t&reader=gone")
    if crash:
        broker.kill()
    else:
        await broker.stop()
    broker = await start_broker(**SMALL)
    await tidied(broker)
    async with HttpClient.connect(broker.http_address) as http:
        assert (await http.get("/log/position?topic=t&reader=spark")).json == before
        assert len((await http.get("/log/position?topic=t")).json["positions"]) == 2
        answer = await http.get(f"/log/fetch?topic=t&from={first + 300}&to=latest")
        assert list(frames_of(answer.body).values()) == numbered(200, 300)


async def test_a_topic_without_a_channel_is_freed_behind_its_slowest_reader(
    start_broker: StartBroker, clock: FakeClock
) -> None:
    """What would pile up for a first channel goes with its file; what is left in the files is still for it."""
    broker = await start_broker(**SMALL)
    await publish(broker)
    await tidied(broker)
    topic = broker.topics["t"]
    first, end = topic.log.first, topic.log.end
    assert topic.depth == 500
    async with HttpClient.connect(broker.http_address) as http:
        await position(http, first + 300, "slow")
        await position(http, "latest", "quick")
        await tidied(broker)
        kept = topic.log.first
        assert first < kept <= first + 300
        assert topic.pumped == kept and topic.depth == end - kept
        await broker.stop()
        broker = await start_broker(**SMALL)
        topic = broker.topics["t"]
        assert (topic.log.first, topic.depth) == (kept, end - kept)
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    await until(lambda: len(consumer.messages) == end - kept)
    assert consumer.bodies == numbered(end - kept, kept - first)
    assert topic.depth == 0


async def test_a_reader_that_does_not_move_is_given_up(
    broker: Broker, http: HttpClient, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(broker)
    await tidied(broker)
    topic = broker.topics["t"]
    configure(topic, reader_age=DAY)
    await position(http, "earliest", "stuck")
    await position(http, "earliest", "alive")
    for _ in range(5):
        clock.advance(6.5 * 3600)
        await position(http, "earliest", "alive")
        await tidied(broker)
    assert list(topic.readers.positions) == ["alive"]
    assert "the reader stuck is given up" in caplog.text and "did not move for 26h0m0s" in caplog.text
    configure(topic, reader_age=0)
    clock.advance(1_000 * 86_400)
    await tidied(broker)
    assert list(topic.readers.positions) == ["alive"], "0 is never"


@pytest.mark.parametrize("age", [0, DAY, 3600 * 10**9])
async def test_a_temporary_reader_is_given_up_within_minutes(
    broker: Broker, http: HttpClient, clock: FakeClock, age: int
) -> None:
    await publish(broker)
    await tidied(broker)
    topic = broker.topics["t"]
    configure(topic, reader_age=age)
    for name in ("spark", "temporary:killed", "temporary:alive", "not-temporary:x"):
        await position(http, "earliest", name)
    for _ in range(7):
        clock.advance(60)
        await position(http, "earliest", "temporary:alive")
        await tidied(broker)
    assert sorted(topic.readers.positions) == ["not-temporary:x", "spark", "temporary:alive"]


async def test_readers_have_time_to_come_back_after_a_long_pause(start_broker: StartBroker, clock: FakeClock) -> None:
    broker = await start_broker(**SMALL)
    await publish(broker, 50)
    async with HttpClient.connect(broker.http_address) as http:
        await position(http, "earliest")
    await broker.stop()
    clock.advance(30 * 86_400)
    broker = await start_broker(**SMALL)
    await tidied(broker)
    assert "spark" in broker.topics["t"].readers.positions, "it could not move while the broker was down"
    clock.advance(3_700)
    await tidied(broker)
    assert not broker.topics["t"].readers


async def test_a_reader_that_holds_too_much_is_given_up(
    broker: Broker, http: HttpClient, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(broker, 100)
    await tidied(broker)
    topic = broker.topics["t"]
    configure(topic, reader_bytes=100_000)
    await position(http, "earliest", "slow")
    await publish(broker, 400, 100)
    await position(http, "earliest", "slow")
    await tidied(broker)
    assert "slow" in topic.readers.positions
    await position(http, "latest", "quick")
    await publish(broker, 500, 500)
    await tidied(broker)
    assert list(topic.readers.positions) == ["quick"]
    assert "the reader slow is given up" in caplog.text and "holds more than 100000 bytes" in caplog.text


async def test_a_reader_keeps_files_that_old_messages_would_leave(
    broker: Broker, http: HttpClient, clock: FakeClock
) -> None:
    """Nothing is copied so that a file can go that has to stay anyway."""
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 2_500)
    await Client(broker).publish_later("t", b"in an hour", 3600)
    await position(http, "earliest")
    await publish(broker)
    await until(lambda: len(consumer.messages) == 500)
    consumer.finish(*consumer.messages)
    topic = broker.topics["t"]
    for _ in range(5):
        clock.advance(31)
        await tidied(broker)
    assert topic.side is None and len(topic.log.segments) > 2
    await position(http, "latest")
    for _ in range(5):
        clock.advance(31)
        await tidied(broker)
    assert topic.side is not None and len(topic.log.segments) <= 2


# --- Readers and the loss of power ------------------------------------------------------------------------------------


TINY: dict[str, Any] = {
    "max_bytes_per_file": 1_500,
    "mem_queue_size": 5,
    "sync_timeout": 3600 * SECOND,
    "disk_reserve": 0,
}


async def follow(broker: Broker, sure: dict[str, int], told: dict[int, bytes]) -> None:
    """A topic is published to and read by two; ``sure`` is what was answered, ``told`` what was durable."""
    disk = broker.disk
    assert isinstance(disk, SimDisk)

    async def calm() -> None:
        await settled(broker)
        if disk.dead:
            raise PowerLoss

    await broker.start()
    topic = broker.topic("t")
    topic.channel("c")
    configure(topic, retain_bytes=4_000)
    producer, consumer = Client(broker), Client(broker)
    consumer.send(b"SUB t c\nRDY 100\n")
    first = topic.log.first
    for number in range(12):
        bodies = numbered(5, 5 * number)
        producer.send(b"".join(b"PUB t\n\0\0\0\x64" + body for body in bodies))
        await calm()
        consumer.finish(*consumer.messages)
        consumer.take()
        broker.upkeep.sync()
        await calm()
        for seq in range(first + len(told), topic.durable):
            told[seq] = numbered(1, seq - first)[0]
        for name, behind in (("quick", 0), ("slow", 23)):
            offset = max(topic.log.first, topic.durable - behind)
            noted = topic.readers.move(name, offset)
            broker.journal.when_synced(noted, lambda name=name, offset=offset: sure.update({name: offset}))
        await calm()
    topic.readers.remove("quick")
    broker.journal.when_synced(broker.journal.noted, lambda: sure.pop("quick") and None)
    await calm()


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_no_position_goes_back_and_nothing_durable_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    monkeypatch.setattr(journal_module, "ROLL_AT", 900)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    options = {**TINY, "durability": durability}
    n = calls = 0
    while n <= calls:
        disk = SimDisk(tmp_path)
        disk.power_off_at = n or None
        sure: dict[str, int] = {}
        told: dict[int, bytes] = {}
        broker = Broker(disk=disk, clock=FakeClock(), data_path=disk.root, **options)
        with contextlib.suppress(PowerLoss):
            await follow(broker, sure, told)
        if not n:
            calls = disk.calls
            assert list(sure) == ["slow"] and len(told) == 60
            assert broker.topics["t"].log.first > min(told), "files must go"
        disk.dead = True
        with contextlib.suppress(PowerLoss):
            broker.kill()
        n += 3
        left = disk.after_power_loss(n % 7 if n % 2 else "none")
        again = Broker(disk=left, clock=FakeClock(), data_path=left.root, http_address="127.0.0.1:0", **options)
        await again.start()
        if sure:
            topic = again.topics["t"]
            found = {name: position.offset for name, position in topic.readers.positions.items()}
            for name, offset in sure.items():
                assert found.get(name, offset) >= offset, (n, name)
            assert set(sure) - set(found) <= {"quick"}, (n, sure, found)
            start = min(found.values())
            assert topic.log.first <= start and topic.durable >= max(told) + 1
            async with HttpClient.connect(again.http_address) as http:
                answer = await http.get(f"/log/fetch?topic=t&from={start}&to={max(told) + 1}")
                assert frames_of(answer.body) == {seq: body for seq, body in told.items() if seq >= start}, n
        await again.stop()


# --- Retention --------------------------------------------------------------------------------------------------------


async def test_without_retention_files_go_when_nobody_needs_them(broker: Broker) -> None:
    await publish(broker)
    await finish_all(broker, 500)
    await tidied(broker)
    topic = broker.topics["t"]
    assert len(topic.log.segments) == 1 and topic.retention.first == NEVER


async def test_so_many_bytes_are_kept(broker: Broker) -> None:
    await publish(broker)
    topic = broker.topics["t"]
    configure(topic, retain_bytes=45_000)
    everything = topic.log.first
    await tidied(broker)
    assert topic.log.first == everything, "a channel may still come for it"
    await finish_all(broker, 500)
    await tidied(broker)
    sizes = [segment.size for segment in topic.log.segments]
    assert topic.log.first > everything
    assert sum(sizes) >= 45_000 > sum(sizes[1:]), "as much as was asked for, and no file more"
    configure(topic, retain_bytes=0)
    await tidied(broker)
    assert len(topic.log.segments) == 1


async def test_what_is_younger_is_kept(broker: Broker, clock: FakeClock) -> None:
    topic = broker.topic("t")
    configure(topic, retain_age=HOUR)
    producer = Client(broker)
    for number in range(20):
        await producer.publish_many("t", numbered(25, 25 * number))
        clock.advance(600)
    await finish_all(broker, 500)
    await tidied(broker)
    kept = topic.log.segments
    assert len(kept) > 1
    now = clock.wall()
    # The first one has a message of the last hour, or it would be gone.
    assert kept[1].index_times[0] >= now - HOUR
    assert kept[0].index_times[0] < now - HOUR + 1200 * SECOND, "and one older than that is gone"
    clock.advance(7_200)
    await tidied(broker)
    assert len(topic.log.segments) == 1, "the file that is written to stays"


async def test_a_file_goes_when_it_is_beyond_either_limit(broker: Broker, clock: FakeClock) -> None:
    await publish(broker)
    topic = broker.topics["t"]
    await finish_all(broker, 500)
    for bytes_, age, many in [(1 << 40, HOUR, True), (1, HOUR, False)]:
        configure(topic, retain_bytes=bytes_, retain_age=age)
        await tidied(broker)
        assert (len(topic.log.segments) > 2) == many
    await publish(broker, 500, 500)
    await finish_all(broker, 500)
    configure(topic, retain_bytes=1 << 40, retain_age=HOUR)
    await tidied(broker)
    assert len(topic.log.segments) > 2
    clock.advance(3_700)
    await publish(broker, 25, 1_000)
    await tidied(broker)
    assert len(topic.log.segments) <= 2


async def test_a_clock_that_was_wrong_for_a_while_keeps_nothing_for_ever(broker: Broker, clock: FakeClock) -> None:
    topic = broker.topic("t")
    configure(topic, retain_age=HOUR)
    await publish(broker, 250)
    clock.step_wall(10 * 365 * 86_400)
    await publish(broker, 250, 250)
    clock.step_wall(-10 * 365 * 86_400)
    await publish(broker, 250, 500)
    await finish_all(broker, 750)
    await tidied(broker)
    first = topic.log.first
    assert len(topic.log.segments) > 4
    clock.advance(7_200)
    await publish(broker, 25, 750)
    await tidied(broker)
    assert topic.log.first > first + 500


@pytest.mark.parametrize("crash", [False, True])
async def test_what_is_kept_is_kept_across_a_restart(start_broker: StartBroker, crash: bool) -> None:
    broker = await start_broker(**SMALL)
    configure(broker.topic("t"), retain_bytes=45_000)
    await publish(broker)
    await finish_all(broker, 500)
    await tidied(broker)
    first = broker.topics["t"].log.first
    if crash:
        broker.kill()
    else:
        await broker.stop()
    broker = await start_broker(**SMALL)
    topic = broker.topics["t"]
    configure(topic, retain_bytes=45_000)
    assert topic.log.first == first
    assert topic.channels["c"].depth == 0, "what was finished stays finished"
    await tidied(broker)
    assert topic.log.first == first
    topic.channels["c"].seek(first)
    assert topic.channels["c"].depth > 250


async def test_a_limit_does_not_count_what_is_only_kept(start_broker: StartBroker) -> None:
    broker = await start_broker(**SMALL, max_topic_bytes=40_000, max_topic_messages=300)
    configure(broker.topic("t"), retain_bytes=1 << 40)
    broker.topics["t"].channel("c")
    for number in range(8):
        await publish(broker, 100, 100 * number)
        await finish_all(broker, 100)
        await tidied(broker)
    assert sum(segment.size for segment in broker.topics["t"].log.segments) > 80_000


async def test_retention_gives_way_before_the_disk_is_full(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    disk = CountingDisk()
    broker = await start_broker(**{**SMALL, "disk_reserve": 100_000}, disk=disk)
    topic = broker.topic("t")
    configure(topic, retain_bytes=1 << 40)
    topic.channel("c")
    topic.channel("behind")
    await publish(broker)
    await finish_all(broker, 500)
    behind = topic.channels["behind"]
    behind.seek(topic.log.first + 300)
    await tidied(broker)
    first = topic.log.first
    disk.free_bytes = 200_001
    broker.upkeep.look_at_space()
    await tidied(broker)
    assert topic.log.first == first
    disk.free_bytes = 185_000
    broker.upkeep.look_at_space()
    await tidied(broker)
    assert len(caplog.records) == 1 and "is deleted early" in caplog.text
    assert first < topic.log.first <= first + 300, "one file makes that much room"
    disk.free_bytes = 1_000
    broker.upkeep.look_at_space()
    await tidied(broker)
    assert broker.health.startswith("NOK")
    assert first + 150 < topic.log.first <= first + 300, "what a channel needs stays, whatever happens"
    assert behind.depth == 200
    disk.free_bytes = None
    broker.upkeep.look_at_space()
    assert broker.health == "OK"
    await tidied(broker)
    assert topic.log.first <= first + 300, "the rest is kept on"


async def test_the_log_of_memory_is_not_kept(start_broker: StartBroker) -> None:
    broker = await start_broker(**{**SMALL, "durability": "memory"})
    configure(broker.topic("t"), retain_bytes=1 << 40)
    await publish(broker)
    await finish_all(broker, 500)
    await tidied(broker)
    assert len(broker.topics["t"].log.segments) <= 1


# --- How they are doing -----------------------------------------------------------------------------------------------


async def test_readers_are_seen_in_the_numbers(broker: Broker, http: HttpClient) -> None:
    await publish(broker, 100)
    await tidied(broker)
    first = broker.topics["t"].log.first
    shown = (await position(http, first + 40)).json
    plain = (await http.get("/stats?format=json&topic=t")).json["topics"][0]
    assert "readers" not in plain, "only for those who ask"
    extended = (await http.get("/stats?format=json&topic=t&extended=true")).json["topics"][0]
    assert extended["readers"] == [shown]
    assert {key: value for key, value in extended.items() if key in plain} == plain
    metrics = (await http.get("/metrics")).body.decode()
    assert 'nsqd_reader_lag{topic="t",reader="spark"} 60\n' in metrics
    assert f'nsqd_reader_held_bytes{{topic="t",reader="spark"}} {shown["bytes"]}\n' in metrics
