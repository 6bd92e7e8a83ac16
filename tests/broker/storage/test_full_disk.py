"""Starting and stopping on a disk that is full."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import StartBroker

from flintmq.errors import StorageError
from support.fakes import Client, CrampedDisk, quiet


@pytest.mark.parametrize("size", [100, 3_000, 300_000])
async def test_a_stop_that_cannot_write_what_is_in_memory_says_how_much_is_lost(
    start_broker: StartBroker, tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What fits is written, the exit status tells, and other topics are saved."""
    disk = CrampedDisk(tmp_path)
    broker = await start_broker(disk=disk, durability="memory", mem_queue_size=10_000, mem_queue_bytes=1 << 30)
    broker.topic("t").channel("c")
    broker.topic("u").channel("c")
    bodies = [b"%06d" % i + bytes(size) for i in range(6_000_000 // (size + 3_000))]
    for i in range(0, len(bodies), 100):
        await Client(broker).publish("t", *bodies[i : i + 100])
    await Client(broker).publish("u", b"small")
    await quiet(broker)
    disk.pages = disk.used() + 40 + 200_000 * (size > 3_000) // 4096 * 3
    await broker.stop()
    with pytest.raises(StorageError, match="cannot save everything"):
        await broker.wait_closed()
    again = await start_broker(durability="memory")
    got = {}
    for topic in ("t", "u"):
        client = Client(again)
        await client.subscribe(topic, "c", 2500)
        await quiet(again)
        got[topic] = client.bodies
    assert 0 < len(got["t"]) < len(bodies), "what fits is kept"
    assert got["t"] == bodies[: len(got["t"])]
    assert f"TOPIC(t): {len(bodies) - len(got['t'])} messages in memory could not be written" in caplog.text
