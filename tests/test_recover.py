"""`flintmq recover`: what was set aside is listed, and its messages come back."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.protocol.wire import FRAME_MESSAGE, FrameDecoder, decode_message, encode_mpub


async def ask(broker: Broker, command: bytes, count: int) -> list[bytes]:
    """Send commands on a connection of its own; the payloads of so many frames."""
    host, _, port = broker.tcp_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"  V2" + command)
    decoder = FrameDecoder()
    frames: list[tuple[int, bytes]] = []
    async with asyncio.timeout(30):
        while len(frames) < count:
            frames += decoder.feed(await reader.read(1 << 18))
    writer.close()
    return [decode_message(data).body if kind == FRAME_MESSAGE else data for kind, data in frames]


def recover(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flintmq", "recover", str(path), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


async def in_thread(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return await asyncio.get_running_loop().run_in_executor(None, lambda: recover(*arguments))


def objects(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    return path


async def filled(path: Path, bodies: dict[str, list[bytes]]) -> None:
    async with Broker(data_path=path, disk_reserve=0, max_bytes_per_file=5_000) as broker:
        for topic, some in bodies.items():
            broker.topic(topic).channel("c")
            for i in range(0, len(some), 7):
                assert await ask(broker, encode_mpub(topic.encode(), some[i : i + 7]), 1) == [b"OK"]


@pytest.mark.parametrize("seed", range(3))
async def test_a_topic_that_was_lost_with_the_journal_comes_back(data_path: Path, seed: int) -> None:
    random.seed(seed)
    wanted = {
        name: [
            f"{name}-{i}-".encode() + random.randbytes(random.randrange(300)) for i in range(random.randrange(1, 90))
        ]
        for name in ("orders", "a.b-c")
    }
    await filled(data_path, wanted)
    for file in (data_path / "flintmq" / "journal").iterdir():
        file.unlink()
    async with Broker(data_path=data_path, disk_reserve=0, accept_damaged_journal=True) as broker:
        assert not broker.topics
        listed = objects(await in_thread(data_path, "--json"))
        assert {(one["kind"], one["topic"], one["messages"], one["published"]) for one in listed} == {
            ("topic", name, len(bodies), False) for name, bodies in wanted.items()
        }
        text = (await in_thread(data_path)).stdout
        assert "orders@" in text and "--publish" in text
        done = objects(await in_thread(data_path, "--json", "--publish", "--nsqd", broker.tcp_address))
        assert all(one["published"] and Path(one["renamed_to"]).is_dir() for one in done)
        for name, bodies in wanted.items():
            found = await ask(broker, f"SUB {name} c\nRDY 2500\n".encode(), len(bodies) + 1)
            assert found == [b"OK", *bodies]
        assert objects(await in_thread(data_path, "--json", "--publish", "--nsqd", broker.tcp_address)) == []
    # And the broker does not mind what is left.
    async with Broker(data_path=data_path, disk_reserve=0) as broker:
        assert set(broker.topics) == set(wanted)
        assert all(Path(one["renamed_to"]).is_dir() for one in done)


async def test_a_bad_segment_gives_what_can_be_read_of_it(data_path: Path) -> None:
    bodies = [f"{i:04d}".encode() * 20 for i in range(40)]
    await filled(data_path, {"t": bodies})
    segment = min((data_path / "flintmq" / "topics").glob("t@*/*.seg"))
    data = bytearray(segment.read_bytes())
    # The header and the first record's.
    data[20] ^= 1
    data[44 + 9] ^= 1
    segment.write_bytes(data)
    async with Broker(data_path=data_path, disk_reserve=0) as broker:
        bad = segment.with_suffix(".bad")
        assert bad.exists()
        done = await in_thread(
            data_path, "--publish", "--only", bad.name, "--topic", "again", "--json", "--nsqd", broker.tcp_address
        )
        assert done.returncode == 1
        (one,) = objects(done)
        assert one["kind"] == "segment" and one["topic"] == "again" and one["damage"]
        found = await ask(broker, b"SUB again c\nRDY 100\n", one["messages"] + 1)
        assert found[1:] == bodies[7 : 7 + one["messages"]]
        assert not bad.exists()


async def test_bad_segments_that_began_at_one_offset_are_all_read(data_path: Path) -> None:
    bodies = [f"{i:04d}".encode() * 20 for i in range(40)]
    await filled(data_path, {"t": bodies})
    segment = min((data_path / "flintmq" / "topics").glob("t@*/*.seg"))
    data = bytearray(segment.read_bytes())
    data[20] ^= 1
    # Of the first one the header alone is damaged.
    segment.with_name(f"{segment.stem}-2.bad").write_bytes(data)
    data[44 + 9] ^= 1
    segment.write_bytes(data)
    async with Broker(data_path=data_path, disk_reserve=0):
        found = objects(await in_thread(data_path, "--json"))
        assert {Path(one["path"]).name for one in found} == {f"{segment.stem}.bad", f"{segment.stem}-2.bad"}
        assert {one["messages"] for one in found} == {33, 40}


async def test_nothing_is_renamed_when_the_broker_cannot_be_reached(data_path: Path) -> None:
    await filled(data_path, {"t": [b"one"]})
    folder = next((data_path / "flintmq" / "topics").glob("t@*"))
    lost = folder.with_name(folder.name + ".lost")
    folder.rename(lost)
    done = await in_thread(data_path, "--publish", "--nsqd", "127.0.0.1:1")
    assert done.returncode == 1 and "cannot connect to a broker" in done.stderr
    assert lost.is_dir()


async def test_a_folder_that_is_no_data_path_is_an_error_in_words(tmp_path: Path) -> None:
    done = await in_thread(tmp_path)
    assert done.returncode == 1 and done.stderr == f"flintmq recover: there is no data of flintmq in {tmp_path}\n"
    async with Broker(data_path=tmp_path, disk_reserve=0):
        pass
    done = await in_thread(tmp_path)
    assert (done.returncode, done.stdout) == (0, "nothing was set aside\n")
