"""NSQ's own tools against a broker with the default configuration: they work as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flintmq.broker.daemon import Broker
from support.secure import until

from .processes import PEERS

pytestmark = pytest.mark.interop
PATIENCE = 60.0


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", disk_reserve=0) as broker:
        yield broker


async def start(name: str, *words: str) -> asyncio.subprocess.Process:
    tool = PEERS / "bin" / name
    if not tool.exists():
        pytest.skip(f"no {name} at {tool}: run scripts/peers")
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        str(tool), *words, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )


async def said(process: asyncio.subprocess.Process, words: bytes = b"") -> str:
    try:
        async with asyncio.timeout(PATIENCE):
            output, _ = await process.communicate(words)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_to_nsq_publishes_and_nsq_tail_shows(broker: Broker) -> None:
    address = f"--nsqd-tcp-address={broker.tcp_address}"
    await said(await start("to_nsq", address, "--topic=lines"), b"one\ntwo\nthree\n")
    assert broker.topics["lines"].message_count == 3
    output = await said(await start("nsq_tail", address, "--topic=lines", "--channel=c", "-n", "3"))
    assert {"one", "two", "three"} <= set(output.split())


async def test_nsq_to_nsq_copies_a_topic(broker: Broker) -> None:
    broker.topic("from").channel("copy")
    broker.topic("from").publish(bytearray(b"\0\0\0\5hello"), 0, 9, 1)
    addresses = (f"--nsqd-tcp-address={broker.tcp_address}", f"--destination-nsqd-tcp-address={broker.tcp_address}")
    process = await start("nsq_to_nsq", *addresses, "--topic=from", "--destination-topic=to", "--channel=copy")
    try:
        await until(lambda: "to" in broker.topics and broker.topics["to"].message_count == 1)
        await until(lambda: broker.topics["from"].channels["copy"].depth == 0)
    finally:
        process.terminate()
        await said(process)


async def test_nsq_to_file_writes_what_was_published(broker: Broker, tmp_path: Path) -> None:
    broker.topic("lines").channel("files")
    broker.topic("lines").publish(bytearray(b"\0\0\0\5hello"), 0, 9, 1)
    (tmp_path / "out").mkdir()
    words = (f"--output-dir={tmp_path / 'out'}", "--topic=lines", "--channel=files", "--sync-interval=100ms")
    process = await start("nsq_to_file", f"--nsqd-tcp-address={broker.tcp_address}", *words)
    try:
        await until(lambda: any(path.read_bytes() == b"hello\n" for path in (tmp_path / "out").glob("*")))
    finally:
        process.terminate()
        await said(process)


async def test_nsq_stat_shows_a_channel(broker: Broker) -> None:
    broker.topic("lines").channel("c")
    broker.topic("lines").publish(bytearray(b"\0\0\0\5hello"), 0, 9, 1)
    words = ("--topic=lines", "--channel=c", "--count=1", "--interval=100ms")
    output = await said(await start("nsq_stat", f"--nsqd-http-address={broker.http_address}", *words))
    assert "depth" in output and "1" in output.splitlines()[-1].split()
