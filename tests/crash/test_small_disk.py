"""A real nsqd on a file system of its own that runs full, and on a device that fails.

The file systems are files, mounted as loop devices, the failing device is one of the device mapper: both need root and
tools that not every machine has, so that the tests are skipped with the reason where that is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from flintmq.protocol.wire import FRAME_ERROR, encode_mpub
from flintmq.tools.torture.node import Node
from support.nsq_client import NsqClient

pytestmark = pytest.mark.slow

#: Bytes of an image; the smallest that mkfs.xfs makes is 300 MiB.
SIZES = {"ext4": 48 << 20, "xfs": 300 << 20}
BODY = bytes(20_000)


def run(*command: str) -> str:
    """Run a command as root does; the test is skipped where it cannot be run."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} does not work here: {done.stderr.strip()}")
    return done.stdout.strip()


class Volume:
    """A device with a file system, mounted."""

    def __init__(self, device: str, point: Path) -> None:
        self.device = device
        self.point = point

    def mount(self) -> None:
        run("mount", self.device, str(self.point))

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.point)], check=False, capture_output=True)


@pytest.fixture
def loop_device(tmp_path: Path, kind: str) -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(SIZES[kind])
    device = run("losetup", "--find", "--show", str(image))
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)


def made(device: str, kind: str, point: Path) -> Volume:
    run(f"mkfs.{kind}", "-q", device)
    point.mkdir()
    volume = Volume(device, point)
    volume.mount()
    return volume


@contextlib.asynccontextmanager
async def nsqd(volume: Volume, *flags: str) -> AsyncIterator[Node]:
    # A consumer that leaves takes messages with it until their time is over.
    options = (f"--max-bytes-per-file={1 << 20}", "--sync-timeout=100ms", "--msg-timeout=1s")
    node = Node("nsqd", f"--data-path={volume.point}", *options, *flags)
    try:
        await node.start()
        yield node
    finally:
        await node.close()


async def publish_until_refused(node: Node) -> list[bytes]:
    """What was acknowledged before the first refusal."""
    acknowledged: list[bytes] = []
    async with NsqClient.to(node.address) as client:
        while True:
            bodies = [b"%d " % number + BODY for number in range(len(acknowledged), len(acknowledged) + 10)]
            client.send(encode_mpub(b"t", bodies))
            frame = await client.frame_or_end()
            if frame is None or frame[0] == FRAME_ERROR:
                return acknowledged
            acknowledged += bodies


async def drained(node: Node, count: int) -> list[bytes]:
    """The first messages of the channel, so many, finished."""
    found: list[bytes] = []
    async with NsqClient.to(node.address) as client:
        await client.subscribe("t", "c")
        client.send(b"RDY 10\n")
        while len(found) < count:
            message = await client.message()
            found.append(message.body)
            client.send(b"FIN %b\n" % message.id)
    return found


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("reserve", [4 << 20, 0])
async def test_a_file_system_that_runs_full_costs_only_what_is_refused(
    loop_device: str, kind: str, reserve: int, tmp_path: Path
) -> None:
    volume = made(loop_device, kind, tmp_path / "mount")
    try:
        async with nsqd(volume, f"--disk-reserve={reserve}") as node:
            acknowledged = await publish_until_refused(node)
            assert len(acknowledged) > 100
            assert node.running
            await node.kill()
            # A start on a full disk, and consumers that make room.
            await node.start()
            half = len(acknowledged) // 2
            found = await drained(node, half)
            async with asyncio.timeout(60):
                while not (more := await publish_until_taken(node)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            found += await drained(node, len(acknowledged) - half + len(more))
            assert set(found) == {*acknowledged, *more}
            assert await node.stop() == 0
    finally:
        volume.unmount()


async def publish_until_taken(node: Node) -> list[bytes]:
    async with NsqClient.to(node.address) as client:
        client.send(encode_mpub(b"t", [b"there is room again"]))
        frame = await client.frame_or_end()
        return [b"there is room again"] if frame is not None and frame[0] != FRAME_ERROR else []


@pytest.mark.parametrize("kind", ["ext4"])
async def test_a_device_that_fails_stops_the_broker_and_costs_nothing_acknowledged(
    loop_device: str, kind: str, tmp_path: Path
) -> None:
    name = f"flintmq-{os.getpid()}"
    sectors = SIZES[kind] // 512
    run("dmsetup", "create", name, "--table", f"0 {sectors} linear {loop_device} 0")
    volume = Volume("", tmp_path)
    try:
        volume = made(f"/dev/mapper/{name}", kind, tmp_path / "mount")
        async with nsqd(volume, "--durability=fsync") as node:
            async with NsqClient.to(node.address) as client:
                client.send(encode_mpub(b"t", [b"one", b"two"]))
                await client.answer()
                swap(name, f"0 {sectors} error")
                client.send(encode_mpub(b"t", [b"three"]))
                frame = await client.frame_or_end()
                assert frame is None or frame[0] == FRAME_ERROR
            assert node._process is not None
            assert await asyncio.wait_for(node._process.wait(), 60) == 1
            volume.unmount()
            swap(name, f"0 {sectors} linear {loop_device} 0")
            volume.mount()
            await node.start()
            assert await drained(node, 2) == [b"one", b"two"]
    finally:
        volume.unmount()
        remove(name)


def remove(name: str) -> None:
    subprocess.run(["dmsetup", "remove", "--retry", name], check=False, capture_output=True)


def swap(name: str, table: str) -> None:
    """Give a mapped device another table, while it is in use."""
    for command in (
        ["dmsetup", "suspend", "--noflush", "--nolockfs", name],
        ["dmsetup", "load", name, "--table", table],
        ["dmsetup", "resume", name],
    ):
        subprocess.run(command, check=True, capture_output=True)
