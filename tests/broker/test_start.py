"""What a start makes of a data path that is not as it should be."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from support.fakes import Client, CountingDisk, pub, quiet


class FullDisk(CountingDisk):
    def allocate(self, fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_disk_too_full_to_allocate_space_ahead_is_started_on(start_broker: StartBroker) -> None:
    first = await start_broker()
    await Client(first).publish("t", b"kept")
    await first.stop()
    second = await start_broker(disk=FullDisk())
    consumer = Client(second)
    await consumer.subscribe("t", "c", 1)
    await quiet(second)
    assert consumer.bodies == [b"kept"]


async def test_a_stop_closes_the_disk_only_when_nobody_can_ask_it_for_more(start_broker: StartBroker) -> None:
    """It is closed in a thread. Whoever looked whether it is, on the loop, must not find it closed a moment later."""

    class Watched(CountingDisk):
        refused_before = False

        def close(self) -> None:
            self.refused_before = self.closing
            super().close()

    disk = Watched()
    broker = await start_broker(disk=disk)
    await Client(broker).publish("t", b"one")
    await broker.stop()
    assert disk.refused_before


async def test_clean_restarts_do_not_pile_up_journals(start_broker: StartBroker, tmp_path: Path) -> None:
    for _ in range(5):
        broker = await start_broker()
        await quiet(broker)
        await broker.stop()
    names = {path.name.partition("-")[0] for path in (tmp_path / "flintmq" / "journal").iterdir()}
    assert names == {"journal", "snapshot"}
    assert len(list((tmp_path / "flintmq" / "journal").iterdir())) <= 3


async def test_messages_of_a_topic_that_the_journal_never_heard_of_are_set_aside(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = await start_broker()
    await Client(broker).publish("known", b"one")
    await broker.stop()
    stranger = tmp_path / "flintmq" / "topics" / "stranger@77"
    stranger.mkdir()
    (stranger / "0000000000000001.seg").write_bytes(b"who knows")
    empty = tmp_path / "flintmq" / "topics" / "empty@78"
    empty.mkdir()
    deleted = tmp_path / "flintmq" / "topics" / "deleted@0"
    deleted.mkdir()
    (deleted / "0000000000000001.seg").write_bytes(b"of no use")
    again = await start_broker()
    assert set(again.topics) == {"known"}
    lost = tmp_path / "flintmq" / "topics" / "stranger@77.lost"
    assert (lost / "0000000000000001.seg").read_bytes() == b"who knows"
    await again.stop()
    await start_broker()
    assert lost.exists()
    assert not stranger.exists() and not empty.exists() and not deleted.exists()


@pytest.mark.parametrize("verb", ["PUB", "MPUB", "DPUB", "SUB"])
async def test_a_topic_that_cannot_be_made_is_an_answer_not_a_crash(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(broker.disk, "make_folder", refuse)
    client = Client(broker)
    commands = {
        "PUB": pub("t", b"x"),
        "MPUB": b"MPUB t\n\0\0\0\x09\0\0\0\1\0\0\0\1x",
        "DPUB": b"DPUB t 5\n\0\0\0\1x",
        "SUB": b"SUB t c\n",
    }
    client.send(commands[verb])
    assert client.errors == [f"E_{verb}_FAILED {verb} failed disk quota exceeded".encode()]
    assert client.is_over
    assert broker.health.startswith("NOK - cannot make a folder")
    monkeypatch.undo()
    await Client(broker).publish("t", b"fine again")
