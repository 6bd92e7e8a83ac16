"""What tests put in the place of time and sockets: a clock that is moved by hand, and clients without a network.

A ``Client`` drives a real Session through a fake transport: bytes go in by get_buffer and buffer_updated, split as the
test likes, and the frames that come out are collected. Everything behind the session is the real thing.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.net.session import Session
from flintmq.broker.storage.disk import BACKGROUND, Disk
from flintmq.protocol.wire import (
    FRAME_ERROR,
    FRAME_MESSAGE,
    FRAME_RESPONSE,
    HEARTBEAT,
    MAGIC_V2,
    FrameDecoder,
    Message,
    decode_message,
    encode_command,
    encode_mpub,
)
from flintmq.system import Buffer, System

SECOND = 1_000_000_000
#: How long a condition may take to come true. Only failures take that long.
PATIENCE = 30.0

T = TypeVar("T")


class FakeClock:
    """Stands still until it is moved. It starts at whole seconds, so that half seconds are never met by accident."""

    def __init__(self) -> None:
        self._now = 1_000 * SECOND
        self._wall = 1_700_000_000 * SECOND
        self._boot = 1

    def now(self) -> int:
        return self._now

    def wall(self) -> int:
        return self._wall

    def boot_id(self) -> bytes:
        return self._boot.to_bytes(16, "big")

    def advance(self, seconds: float) -> None:
        self._now += round(seconds * SECOND)
        self._wall += round(seconds * SECOND)

    def step_wall(self, seconds: float) -> None:
        """Somebody sets the machine's date."""
        self._wall += round(seconds * SECOND)

    def reboot(self, seconds: float = 0) -> None:
        """The machine was off for ``seconds``: the wall clock went on, the other one starts again."""
        self._boot += 1
        self._now = 10 * SECOND
        self._wall += round(seconds * SECOND)


class CountingDisk(Disk):
    """The real disk, which also knows whether any of its threads still has something to do or to say."""

    def __init__(self, system: System | None = None) -> None:
        super().__init__(system)
        self.under_way = 0
        #: What ``free`` says, if not the truth.
        self.free_bytes: int | None = None

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], urgency: int = BACKGROUND
    ) -> None:
        def counted(result: Any, error: BaseException | None) -> None:
            self.under_way -= 1
            done(result, error)

        super().submit(work, counted, urgency)
        self.under_way += 1

    def free(self, path: Any) -> int:
        return super().free(path) if self.free_bytes is None else self.free_bytes


def replace_method(patch: pytest.MonkeyPatch, target: object, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of this one object, also where objects of its class have no attributes beside their slots."""
    original = getattr(type(target), name)

    def chosen(self: object, *args: Any, **options: Any) -> Any:
        return replacement(*args, **options) if self is target else original(self, *args, **options)

    patch.setattr(type(target), name, chosen)


class CrampedDisk(CountingDisk):
    """A disk with room for so many pages of files below a folder; None: for all."""

    PAGE = 4096

    def __init__(self, root: Path, pages: int | None = None) -> None:
        super().__init__()
        self._root = root
        self.pages = pages

    def used(self) -> int:
        """Pages of all files."""
        return sum(self._pages(file.stat().st_size) for file in self._root.rglob("*") if file.is_file())

    def _pages(self, size: int) -> int:
        return -(-size // self.PAGE)

    def _grow(self, fd: int, size: int) -> None:
        more = self._pages(size) - self._pages(self.size(fd))
        if self.pages is not None and more > 0 and self.used() + more > self.pages:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._grow(fd, offset + sum(map(len, buffers)))
        return super().write(fd, buffers, offset)

    def allocate(self, fd: int, size: int) -> None:
        self._grow(fd, size)
        super().allocate(fd, size)


class FakeTransport(asyncio.Transport):
    """Takes what a session writes. Stalled, it is a peer that does not read: what is written stays unsent."""

    def __init__(self, client: Client, peer: tuple[str, int] | str) -> None:
        super().__init__()
        self._client = client
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self.received = bytearray()
        self.unsent = 0
        self.stalled = False
        self.reading = True
        self.closing = False
        self.aborted = False
        self.ended = False
        self.lost = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._peer if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0, "the least unsent byte must make the session not ready"

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert len(data), "an empty write"
        if self.closing:
            return
        assert not self.ended, "written after write_eof"
        self.received += data
        if self.stalled:
            first = self.unsent == 0
            self.unsent += len(data)
            if first:
                self._client.session.pause_writing()

    def read_again(self) -> None:
        """The peer has read everything and goes on doing so."""
        self.stalled = False
        if self.unsent:
            self.unsent = 0
            self._client.session.resume_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            if not self.unsent:
                self._loop.call_soon(self._lose)

    def abort(self) -> None:
        self.aborted = True
        self.closing = True
        self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            self._client.session.connection_lost(None)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        self._loop.call_soon(self._client.deliver)

    def is_reading(self) -> bool:
        return self.reading


class Client:
    """One connection: ``send`` bytes, look at the frames that came."""

    def __init__(self, broker: Broker, *, magic: bool = True, peer: tuple[str, int] | str = ("127.0.0.1", 4)) -> None:
        self.broker = broker
        self.session = Session(broker)
        self.transport = FakeTransport(self, peer)
        self._unread = bytearray()
        self._decoder = FrameDecoder()
        self._frames: list[tuple[int, bytes]] = []
        self.session.connection_made(self.transport)
        if magic:
            self.send(MAGIC_V2)

    # --- In --------------------------------------------------------------------------------------------------------

    def send(self, data: bytes, *, sizes: Iterable[int] = ()) -> None:
        """The bytes arrive in pieces of these sizes; the rest as large as the session takes them."""
        at = 0
        for size in sizes:
            self._unread += data[at : at + size]
            self.deliver()
            at += size
        self._unread += data[at:]
        self.deliver()

    def deliver(self) -> None:
        while self._unread and self.transport.reading and not self.transport.closing:
            buffer = self.session.get_buffer(-1)
            size = min(len(buffer), len(self._unread))
            assert size, "a session must take at least one byte"
            buffer[:size] = self._unread[:size]
            del self._unread[:size]
            # The buffer is still held here, as event loops do: the session must not resize what it lent.
            self.session.buffer_updated(size)

    def end_input(self) -> None:
        """The peer sends no more; a transport closes then, unless the session wants to go on."""
        if not self.session.eof_received():
            self.transport.close()

    def hang_up(self) -> None:
        self.transport.abort()

    # --- Out -------------------------------------------------------------------------------------------------------

    @property
    def frames(self) -> list[tuple[int, bytes]]:
        """All frames so far, without heartbeats."""
        if self.transport.received:
            data = bytes(self.transport.received)
            self.transport.received.clear()
            new = self._decoder.feed(data)
            self._frames += [frame for frame in new if frame != (FRAME_RESPONSE, HEARTBEAT)]
        return self._frames

    def take(self) -> list[tuple[int, bytes]]:
        """The frames since the last time."""
        frames = self.frames
        self._frames = []
        return frames

    @property
    def responses(self) -> list[bytes]:
        return [data for kind, data in self.frames if kind == FRAME_RESPONSE]

    @property
    def errors(self) -> list[bytes]:
        return [data for kind, data in self.frames if kind == FRAME_ERROR]

    @property
    def messages(self) -> list[Message]:
        return [decode_message(data) for kind, data in self.frames if kind == FRAME_MESSAGE]

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    @property
    def is_over(self) -> bool:
        """Nothing more will be said on this connection: it is closed, or half of it after an error."""
        return self.transport.closing or self.transport.ended

    # --- Commands --------------------------------------------------------------------------------------------------

    async def ask(self, command: bytes) -> bytes:
        """Send a command and wait for its answer, the only frame that comes meanwhile."""
        before = len(self.frames)
        self.send(command)
        await until(lambda: len(self.frames) > before or self.transport.closing)
        assert len(self.frames) == before + 1, self.frames[before:]
        return self.frames.pop()[1]

    async def publish(self, topic: str, *bodies: bytes) -> None:
        for body in bodies:
            assert await self.ask(pub(topic, body)) == b"OK"

    async def publish_many(self, topic: str, bodies: list[bytes]) -> None:
        assert await self.ask(encode_mpub(topic.encode(), bodies)) == b"OK"

    async def publish_later(self, topic: str, body: bytes, seconds: float) -> None:
        assert await self.ask(dpub(topic, round(seconds * 1000), body)) == b"OK"

    async def subscribe(self, topic: str, channel: str, ready: int = 0) -> None:
        before = len(self.responses)
        self.send(f"SUB {topic} {channel}\n".encode() + (f"RDY {ready}\n".encode() if ready else b""))
        await until(lambda: len(self.responses) > before or self.transport.closing)
        assert self.responses[-1:] == [b"OK"], self.frames
        self._frames.remove((FRAME_RESPONSE, b"OK"))

    def ready(self, count: int) -> None:
        self.send(b"RDY %d\n" % count)

    def finish(self, *messages: Message) -> None:
        self.send(b"".join(b"FIN %s\n" % message.id for message in messages))

    def requeue(self, message: Message, seconds: float = 0) -> None:
        self.send(b"REQ %s %d\n" % (message.id, round(seconds * 1000)))

    def touch(self, message: Message) -> None:
        self.send(b"TOUCH %s\n" % message.id)


def pub(topic: str, body: bytes) -> bytes:
    return encode_command(b"PUB", topic.encode(), body=body)


def dpub(topic: str, milliseconds: int, body: bytes) -> bytes:
    return encode_command(b"DPUB", topic.encode(), b"%d" % milliseconds, body=body)


# --- Waiting without sleeping -----------------------------------------------------------------------------------------


async def until(condition: Callable[[], T]) -> T:
    """The first true value of the condition, which is looked at again and again."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        if time.monotonic() > deadline - PATIENCE + 0.05:
            # Not asyncio's sleep: the loop's own clock may stand still, and this would wait for ever.
            time.sleep(0.0002)  # noqa: ASYNC251
        await asyncio.sleep(0)
    return value


def _busy(broker: Broker) -> bool:
    disk = broker.disk
    assert isinstance(disk, CountingDisk)
    if disk.under_way or broker.turns.busy or broker.backlog.busy or broker.scan._rounds_under_way:
        return True
    return any(
        topic._pumping
        or any(
            channel.seeking is not None or (channel.giving_back is not None and channel.giving_back.busy)
            for channel in topic.channels.values()
        )
        for topic in broker.topics.values()
    )


async def quiet(broker: Broker) -> None:
    """Everything that was set in motion has come to rest: no thread works, no channel has more to send."""
    calm = 0
    deadline = time.monotonic() + PATIENCE
    while calm < 3:
        calm = 0 if _busy(broker) else calm + 1
        assert time.monotonic() < deadline, "the broker does not come to rest"
        await asyncio.sleep(0)


async def pass_time(broker: Broker, clock: FakeClock, seconds: float) -> None:
    """Move the clock, and let the queue scan notice."""
    await quiet(broker)
    clock.advance(seconds)
    broker.scan.tick(clock.now)
    await quiet(broker)


# --- Looking inside ---------------------------------------------------------------------------------------------------


def places(channel: Channel, seq: int) -> list[str]:
    """Every place of the channel in which the message is; there must be one, or none if it is finished."""
    found = []
    if seq in channel.waiting or channel.seen <= seq < channel.topic.pumped or seq in channel.side:
        found.append("waiting")
    if channel.ring.owner(seq):
        found.append("in flight")
    if seq in channel.unusual:
        found.append("in flight, unusual")
    if seq in channel.leaving:
        found.append("leaving")
    found += ["requeued"] * list(channel.requeued).count(seq)
    found += ["deferred"] * channel.deferred.columns()[1].count(seq)
    return found
