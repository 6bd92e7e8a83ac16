"""A very large ``/mpub`` leaves the loop to others: how much is done between two of its turns is bounded."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.http import publish
from flintmq.broker.storage import log as log_module
from flintmq.broker.storage.disk import BACKGROUND
from flintmq.protocol.wire import encode_mpub
from support.fakes import Client, CountingDisk, until
from support.http_client import HttpClient

#: Messages of one byte each: as records they are many times what the loop may write or read in one go.
COUNT = 400_000
TEXT = b"a\n" * COUNT
BINARY = struct.pack(">I", COUNT) + b"\0\0\0\1a" * COUNT


class Work:
    """Counts what is done in each callback of the loop."""

    def __init__(self) -> None:
        self.now = self.most = self.total = 0

    def add(self, size: int) -> None:
        self.now += size
        self.total += size
        self.most = max(self.most, self.now)

    @contextmanager
    def watched(self) -> Iterator[None]:
        run = events.Handle._run

        def counted(handle: events.Handle) -> None:
            self.now = 0
            run(handle)

        events.Handle._run = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            events.Handle._run = run  # type: ignore[method-assign]


class WatchedDisk(CountingDisk):
    """Counts the bytes that are written, and those that the loop waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.on_loop = Work()
        self.total = 0
        self._loop_thread = threading.get_ident()

    def write(self, fd: int, buffers: Any, offset: int) -> int:
        size = sum(map(len, buffers))
        self.total += size
        if threading.get_ident() == self._loop_thread:
            self.on_loop.add(size)
        return super().write(fd, buffers, offset)


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
@pytest.mark.parametrize("form", ["text", "binary"])
@pytest.mark.parametrize("key", ["", "X-Flintmq-Key: k"])
async def test_a_batch_of_tiny_messages_is_not_written_in_one_go(
    tmp_path: Path, form: str, durability: str, key: str
) -> None:
    disk = WatchedDisk()
    target, body = ("/mpub?topic=t", TEXT) if form == "text" else ("/mpub?topic=t&binary=true", BINARY)
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0", durability=durability, disk=disk) as broker:
        with disk.on_loop.watched():
            async with HttpClient.connect(broker.http_address) as client:
                answer = await client.post(target, body, *filter(None, [key]))
                assert (answer.status, answer.body) == (200, b"OK")
            topic = broker.topics["t"]
            # What was written leaves the memory, less the block in use.
            await until(lambda: not disk.under_way and topic.log.memory_count < COUNT / 4)
        assert topic.depth == COUNT
        assert disk.total > 2 * log_module.LARGE_WRITE, "otherwise nothing is large here"
        assert disk.on_loop.most < log_module.LARGE_WRITE


@pytest.mark.parametrize("server", ["lane", "general", "chunked"])
async def test_the_content_of_a_long_text_under_a_key_is_read_in_slices(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work()
    real = publish.line_records

    def counted(data: bytearray, pos: int, stop: int) -> Any:
        work.add(stop - pos)
        return real(data, pos, stop)

    monkeypatch.setattr(publish, "line_records", counted)
    headers = ["X-Flintmq-Key: k"]
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
        async with HttpClient.connect(broker.http_address) as client:
            if server == "general":
                # The lane hands such a connection over, for good.
                assert (await client.get("/info")).status == 200
            for repeat in (None, "true", "true"):
                work.most = work.total = 0
                with work.watched():
                    if server == "chunked":
                        head = "POST /mpub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
                        client.send(f"{head}{headers[0]}\r\n\r\n{len(TEXT):x}\r\n".encode() + TEXT + b"\r\n0\r\n\r\n")
                        answer = await client.answer()
                    else:
                        answer = await client.post("/mpub?topic=t", TEXT, *headers)
                assert (answer.status, answer.headers.get("x-flintmq-repeat")) == (200, repeat)
                assert work.total >= len(TEXT)
                assert work.most <= publish.CONTENT_SLICE + 2 * publish.TEXT_SLICE < len(TEXT) / 2
            # The same messages in the other form are the same content, and others are not.
            binary = await client.post("/mpub?topic=t&binary=true", BINARY, *headers)
            assert binary.headers["x-flintmq-repeat"] == "true"
            other = await client.post("/mpub?topic=t", TEXT + b"b\n", *headers)
            assert other.status not in (200, 503)
        assert broker.topics["t"].depth == COUNT


async def test_requests_behind_a_long_text_under_a_key_are_served(tmp_path: Path) -> None:
    """The text moves in its connection's buffer between two slices of work, and the next request is behind it."""
    async with Broker(data_path=tmp_path, http_address="127.0.0.1:0") as broker:
        async with HttpClient.connect(broker.http_address) as client:
            heads = [f"Content-Length: {len(TEXT)}", "Host: localhost", "X-Flintmq-Key: k"]
            large = "\r\n".join(["POST /mpub?topic=t HTTP/1.1", *heads, "", ""]).encode() + TEXT
            small = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx"
            client.send(small + large + small + large + small)
            answers = [await client.answer() for _ in range(5)]
        assert [answer.status for answer in answers] == [200] * 5
        assert [answer.headers.get("x-flintmq-repeat") for answer in answers] == [None, None, None, "true", None]
        await asyncio.sleep(0)
        assert broker.topics["t"].depth == COUNT + 3


@pytest.mark.parametrize("count", [COUNT, COUNT // 2])
async def test_a_long_text_under_a_key_is_read_from_its_beginning_after_one_that_was_refused(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic is deleted in the middle of a text, and there is no room for a new one; the connection goes on."""
    options: dict[str, Any] = {"http_address": "127.0.0.1:0", "max_topics": 1}
    async with Broker(data_path=tmp_path, **options) as broker, HttpClient.connect(broker.http_address) as client:
        read = 0
        real = publish.line_records

        def counted(data: bytearray, pos: int, stop: int) -> Any:
            nonlocal read
            if read <= publish.CONTENT_SLICE < read + stop - pos:
                broker.delete_topic("t")
                broker.topic("u")
            read += stop - pos
            return real(data, pos, stop)

        monkeypatch.setattr(publish, "line_records", counted)
        refused = await client.post("/mpub?topic=t", TEXT, "X-Flintmq-Key: one")
        assert refused.status == 503 and read < len(TEXT)
        broker.delete_topic("u")
        monkeypatch.setattr(publish, "line_records", real)
        async with asyncio.timeout(20):
            answer = await client.post("/mpub?topic=t", b"b\n" * count, "X-Flintmq-Key: two")
        assert answer.status == 200
        body = struct.pack(">I", count) + b"\0\0\0\1b" * count
        again = await client.post("/mpub?topic=t&binary=true", body, "X-Flintmq-Key: two")
        assert (again.status, again.headers.get("x-flintmq-repeat")) == (200, "true")
        assert broker.topics["t"].depth == count


class SlowThreads(CountingDisk):
    """What threads are to do takes them a moment."""

    def submit(self, work: Any, done: Any, urgency: int = BACKGROUND) -> None:
        def slowly() -> Any:
            time.sleep(0.05)
            return work()

        super().submit(slowly, done, urgency)


async def test_a_batch_that_a_thread_writes_at_a_stop_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if publishers were ahead of the device.
    monkeypatch.setattr(log_module, "WRITE_IN_THREAD_AT", 0)
    bodies = [b"x" * 10_000] * (log_module.LARGE_WRITE // 9_500)
    options: dict[str, Any] = {"data_path": tmp_path, "durability": "os", "disk_reserve": 0}
    async with Broker(disk=SlowThreads(), **options) as broker:
        topic = broker.topic("t")
        topic.channel("c")
        client = Client(broker)
        client.send(encode_mpub(b"t", bodies))
        await until(lambda: topic.log.writing)
        await broker.stop()
        assert client.responses == [b"OK"]
    async with Broker(**options) as broker:
        assert broker.topics["t"].channels["c"].depth == len(bodies)


@pytest.mark.parametrize("count", [1, 3])
async def test_a_publish_that_waits_for_its_sync_at_a_stop_is_answered(tmp_path: Path, count: int) -> None:
    options: dict[str, Any] = {"data_path": tmp_path, "durability": "fsync", "disk_reserve": 0}
    async with Broker(disk=SlowThreads(), **options) as broker:
        clients = [Client(broker) for _ in range(count)]
        for number, client in enumerate(clients):
            client.send(encode_mpub(b"t%d" % number, [b"x"] * 7))
        await until(lambda: all(f"t{n}" in broker.topics and broker.topics[f"t{n}"].last_commit for n in range(count)))
        assert [client.responses for client in clients] == [[]] * count
        await broker.stop()
        assert [client.responses for client in clients] == [[b"OK"]] * count
    async with Broker(**options) as broker:
        assert [broker.topics[f"t{number}"].depth for number in range(count)] == [7] * count
