"""Segment files that are missing at a start: it is said, once, and never when a crash or a deletion explains it."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import StartBroker

from support.fakes import Client, FakeClock, quiet


def folder(path: Path, topic: str) -> Path:
    (found,) = (path / "flintmq" / "topics").glob(f"{topic}@*")
    return found


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("what", ["first", "middle", "last", "folder"])
async def test_messages_whose_files_are_missing_are_reported(
    start_broker: StartBroker, tmp_path: Path, what: str, how: str, restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await start_broker(max_bytes_per_file=5_000)
    for topic in ("t", "u"):
        broker.topic(topic).channel("c")
    if restarted:
        await Client(broker).publish("t", b"before a crash")
        broker.kill()
        broker = await start_broker(max_bytes_per_file=5_000)
    bodies = [b"%06d" % i + bytes(random.Random(i).randrange(400)) for i in range(200)]
    for topic in ("t", "u"):
        for body in bodies:
            await Client(broker).publish(topic, body)
    for _ in range(2):
        # The second one notes what the first one synced.
        broker.upkeep.sync()
        await quiet(broker)
    if how == "stop":
        await broker.stop()
    else:
        broker.kill()
    files = sorted(folder(tmp_path, "t").glob("*.seg"))
    assert len(files) > 5
    if what == "folder":
        shutil.rmtree(folder(tmp_path, "t"))
    else:
        files[{"first": 0, "middle": 4, "last": -1}[what]].unlink()
    caplog.clear()
    again = await start_broker(max_bytes_per_file=5_000)
    got = {}
    for topic in ("t", "u"):
        client = Client(again)
        await client.subscribe(topic, "c", 1000)
        await quiet(again)
        got[topic] = client.bodies
    found = re.search(
        rf"TOPIC\(t\): (\d+) messages are lost, their files in {tmp_path}.*are missing \(seqs \d", caplog.text
    )
    assert got["u"] == bodies and "TOPIC(u)" not in caplog.text
    assert found is not None
    assert int(found[1]) + len(got["t"]) == 200 + restarted
    await again.stop()
    caplog.clear()
    await start_broker()
    assert "are missing" not in caplog.text


@pytest.mark.parametrize("seed", range(8))
async def test_gaps_of_crashes_and_deleted_files_are_nothing_to_report(
    start_broker: StartBroker, tmp_path: Path, seed: int, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    for _ in range(7):
        broker = await start_broker(max_bytes_per_file=3_000)
        topic = broker.topic("t")
        for _ in range(rng.randrange(8)):
            step = rng.randrange(6)
            if step == 0:
                topic.channel(f"c{rng.randrange(3)}")
            elif step == 1 and topic.channels:
                client = Client(broker)
                await client.subscribe("t", rng.choice(list(topic.channels)), 50)
                await quiet(broker)
                for message in client.messages[: rng.randrange(60)]:
                    client.send(b"FIN %s\n" % message.id)
                client.hang_up()
            elif step == 2:
                topic.pause(rng.random() < 0.5)
            elif step == 3 and topic.channels:
                rng.choice(list(topic.channels.values())).seek(topic.log.first)
            else:
                await Client(broker).publish("t", *(bytes(rng.randrange(1, 500)) for _ in range(rng.randrange(1, 20))))
            broker.upkeep.sync()
            await quiet(broker)
        if rng.random() < 0.5:
            broker.kill()
        else:
            await broker.stop()
        assert "are missing" not in caplog.text


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("what", ["file", "folder"])
async def test_messages_of_a_missing_side_log_are_reported(
    start_broker: StartBroker, tmp_path: Path, what: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The queues of channels that were taken over are nowhere else."""
    shutil.copytree(Path(__file__).parent.parent / "go_data" / "clean_stop", tmp_path, dirs_exist_ok=True)
    broker = await start_broker()
    await quiet(broker)
    if how == "stop":
        await broker.stop()
    else:
        broker.kill()
    side = folder(tmp_path, "orders") / "side"
    if what == "folder":
        shutil.rmtree(side)
    else:
        for path in side.glob("*.seg"):
            path.unlink()
    caplog.clear()
    again = await start_broker()
    assert re.findall(r"TOPIC\((\w+)\): (\d+) messages are lost, their files in (\S+) are missing", caplog.text) == [
        ("orders", "20", str(side))
    ]
    # It is said until a snapshot knows it.
    await quiet(again)
    await again.stop()
    caplog.clear()
    await start_broker()
    assert "are missing" not in caplog.text


@pytest.mark.parametrize("seed", range(6))
async def test_what_was_redriven_and_finished_is_nothing_to_report(
    start_broker: StartBroker, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        broker = await start_broker(max_bytes_per_file=3_000)
        topic = broker.topic("t")
        for _ in range(6):
            channel, _ = topic.channel(f"c{rng.randrange(2)}")
            channel.settings = replace(channel.settings, max_attempts=1)
            await Client(broker).publish("t", *(bytes(rng.randrange(1, 500)) for _ in range(rng.randrange(1, 20))))
            client = Client(broker)
            await client.subscribe("t", channel.name, 50)
            await quiet(broker)
            for message in client.messages[: rng.randrange(40)]:
                client.send(b"%s %s%s\n" % rng.choice([(b"FIN", message.id, b""), (b"REQ", message.id, b" 0")]))
            await quiet(broker)
            client.hang_up()
            dead = broker.topics.get(f"t.{channel.name}.dead")
            running = channel.redrive is not None and channel.redrive.running
            if dead is not None and not running and rng.random() < 0.6:
                source, _ = dead.channel("redrive")
                channel.begin_redrive(source, 1000, 0, "")
            if rng.random() < 0.6:
                broker.upkeep.sync()
                broker.turns.housekeeping()
            await quiet(broker)
        if rng.random() < 0.5:
            broker.kill()
        else:
            await broker.stop()
        assert "are missing" not in caplog.text
