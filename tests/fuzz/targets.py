"""What reads bytes from elsewhere, as functions bytes -> None.

A target returns if the bytes were read or refused as they should be, and raises if not: another exception than the
reader's own, a piece larger than promised, an error that a guard caught and logged. A target is called thousands of
times in one process; what it needs is made once, and again now and then so that nothing piles up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flintmq import kernel
from flintmq.broker import takeover
from flintmq.broker.daemon import Broker
from flintmq.broker.storage.journal import Journal
from flintmq.broker.storage.keys import _MAGIC, KeyFiles, _crc, _head
from flintmq.errors import DataLossError, OptionError, ProtocolError, StartError, StorageError
from flintmq.options import NsqdOptions, resolve
from flintmq.protocol.compression import PIECE, Codec, Deflate, Snappy
from flintmq.protocol.wire import FRAME_MESSAGE, FrameDecoder, MessageDecoder, decode_message
from flintmq.spark.shipped.offsets import log_offset, ranges_between, read_offset
from support.fakes import Client, FakeClock
from support.log_rig import ROOT, Rig, numbered
from support.secure import Certificates
from support.simdisk import SimDisk, settled

__all__ = ["TARGETS", "Defect", "prepared"]

Target = Callable[[bytes], None]
#: Inputs after which a broker is made anew.
_PER_BROKER = 500


class Defect(AssertionError):
    """A reader did not keep its word."""


# --- Bytes alone ------------------------------------------------------------------------------------------------------


def frames(data: bytes) -> None:
    """Frames of a broker, as clients read them; the first byte says how they are cut."""
    size = data[0] if data else 0
    pieces = [data[1 + at : 1 + at + size] for at in range(0, len(data), size)] if size else [data[1:]]
    seen: list[tuple[int, bytes]] = []
    decoder = FrameDecoder(1 << 20)
    with contextlib.suppress(ProtocolError):
        for piece in pieces:
            seen += decoder.feed(piece)
    whole: list[tuple[int, bytes]] = []
    with contextlib.suppress(ProtocolError):
        whole = FrameDecoder(1 << 20).feed(data[1:])
    if whole and seen != whole:
        raise Defect("the same bytes in other pieces are other frames")
    for kind, payload in seen:
        if kind == FRAME_MESSAGE:
            with contextlib.suppress(ProtocolError):
                decode_message(payload)


def messages(data: bytes) -> None:
    """The same through the client's fast decoder, which is the kernel's."""
    from flintmq.client.connection import Message

    size = data[0] if data else 0
    decoder = MessageDecoder(Message, None, 1 << 20)
    with contextlib.suppress(ProtocolError):
        for at in range(1, len(data), size or 1 << 20):
            found, _ = decoder.feed(data[at : at + (size or 1 << 20)], 1.0)
            for message in found:
                if len(message.id) != 16 or len(message.body) > len(data):
                    raise Defect(f"a message that was not there: {message.id!r}")


def _unpack(codec: Codec, data: bytes, most: int) -> None:
    total = 0
    with contextlib.suppress(ProtocolError):
        for piece in codec.decompress(data):
            total += len(piece)
            if len(piece) > PIECE:
                raise Defect(f"a piece of {len(piece)} bytes")
            if total > most:
                return


def deflate(data: bytes) -> None:
    _unpack(Deflate(6), data, 1 << 22)


def snappy(data: bytes) -> None:
    _unpack(Snappy(), data, 1 << 22)


def columns(data: bytes) -> None:
    """Frames of a log, as Spark's executors turn them into columns; the first byte says how many at a time."""
    most = data[0] if data else 0
    data = data[1:]
    pos = 0
    with contextlib.suppress(ValueError):
        while True:
            rows, at, *_ = kernel.frame_columns(data, pos, len(data), most or 1 << 20, 1 << 16)
            if not pos <= at <= len(data) or rows > (at - pos) // 34:
                raise Defect(f"{rows} rows of {at - pos} bytes")
            if at == pos:
                return
            pos = at


def offsets(data: bytes) -> None:
    """Offsets in a checkpoint of Spark."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return
    with contextlib.suppress(DataLossError):
        offset = log_offset(found)
        ranges_between(offset, offset)
        if log_offset(offset.to_json()) != offset:
            raise Defect("an offset that is written is read as another one")
    with contextlib.suppress(DataLossError):
        read_offset(found, "spool")


# --- Files ------------------------------------------------------------------------------------------------------------


class _Scratch:
    """A folder of the real disk for readers that use it."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self.path = Path(tempfile.mkdtemp(prefix="flintmq-fuzz-", dir=memory if memory.is_dir() else None))

    def __del__(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


_scratch = _Scratch()


def config(data: bytes) -> None:
    """A config file of nsqd."""
    path = _scratch.path / "nsqd.toml"
    path.write_bytes(data)
    with contextlib.suppress(OptionError):
        resolve(NsqdOptions, {"config": str(path)}, lambda _: None).validate()


def go_metadata(data: bytes) -> None:
    """The nsqd.dat of a Go nsqd."""
    folder = _fresh("go-metadata")
    (folder / "nsqd.dat").write_bytes(data)
    with contextlib.suppress(StartError):
        takeover.read(folder, max_msg_size=1 << 20)


def go_queue(data: bytes) -> None:
    """A queue of a Go nsqd: the first line is its meta file, the rest its messages."""
    folder = _fresh("go-queue")
    meta, _, messages = data.partition(b"\x00")
    (folder / "nsqd.dat").write_bytes(b'{"topics":[{"name":"t","channels":[]}]}')
    (folder / "t.diskqueue.meta.dat").write_bytes(meta)
    (folder / "t.diskqueue.000000.dat").write_bytes(messages)
    with contextlib.suppress(StartError):
        found = takeover.read(folder, max_msg_size=1 << 20)
        total = sum(len(message.body) for message in found.topics[0].queue)
        if total > len(messages):
            raise Defect("more was read than there is")


def _fresh(name: str) -> Path:
    folder = _scratch.path / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _segment() -> tuple[SimDisk, Path, dict[int, bytes]]:
    rig = Rig(max_bytes_per_file=1 << 20)
    for body in numbered(6, size=30):
        rig.publish(body)
    rig.publish(*numbered(4, start=6))
    rig.publish(b"deferred", delay=10**12)
    rig.log.flush()
    rig.run()
    return rig.disk, rig.files[0], rig.bodies()


_segment_rig: tuple[SimDisk, Path, dict[int, bytes]] | None = None


def segment(data: bytes) -> None:
    """A segment file that is recovered and read; a message that is read is one that was written."""
    global _segment_rig
    _segment_rig = _segment_rig or _segment()
    disk, path, written = _segment_rig
    disk = disk.after_kill()
    disk.swap(path, data)
    with contextlib.suppress(StorageError):
        rig = Rig(disk)
        for seq, body in rig.bodies().items():
            if written.get(seq) != body:
                raise Defect(f"seq {seq} is {body!r}, and was {written.get(seq)!r}")
        rig.log.close()
        rig.run()


def journal(data: bytes) -> None:
    """A journal or snapshot file: read, refused as damaged, or read as far as it goes where that is accepted."""
    for name in ("journal-00000001", "snapshot-00000001"):
        disk = SimDisk(ROOT, inline=True)
        disk.attach(lambda work: work())
        disk.close_file(disk.open(ROOT / name, create=True))
        disk.swap(ROOT / name, data)
        for accept in (False, True):
            reader = Journal(
                disk,
                FakeClock(),
                ROOT,
                fatal=lambda error: None,
                later=lambda work: work(),
                snapshot=None,
            )
            with contextlib.suppress(StorageError):
                reader.recover(accept=accept)


def keys(data: bytes) -> None:
    """A file of keys, as it is and with a checksum that fits."""
    for content in (data, _with_checksum(data)):
        disk = SimDisk(ROOT, inline=True)
        path = ROOT / "0000000000000001.keys"
        disk.close_file(disk.open(path, create=True))
        disk.swap(path, content)
        with contextlib.suppress(StorageError):
            KeyFiles(disk, ROOT, "t").read()


def _with_checksum(data: bytes) -> bytes:
    import google_crc32c

    start = _head.size + _crc.size
    head, rest = _MAGIC + data[len(_MAGIC) : _head.size], data[start:]
    if len(head) < _head.size:
        return data
    return head + _crc.pack(google_crc32c.extend(google_crc32c.extend(0, head), rest)) + rest


# --- Connections ------------------------------------------------------------------------------------------------------


class _Heard(logging.Handler):
    """Keeps what a guard caught: whatever a client sends must raise nowhere."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.raised: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.raised.append(self.format(record))


class _World:
    """A broker on a simulated disk, and a loop to run it on."""

    def __init__(self) -> None:
        self.heard = _Heard()
        logging.getLogger("flintmq").addHandler(self.heard)
        logging.getLogger("asyncio").addHandler(self.heard)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.heard.raised.append(str(context)))
        self._used = 0
        self.broker: Broker | None = None

    def close(self) -> None:
        if self.broker is not None:
            self._loop.run_until_complete(self.broker.stop())
        self._loop.close()
        for name in ("flintmq", "asyncio"):
            logging.getLogger(name).removeHandler(self.heard)

    def run(self, work: Callable[[Broker], Any]) -> None:
        self._loop.run_until_complete(self._run(work))
        if self.heard.raised:
            raised, self.heard.raised = self.heard.raised, []
            raise Defect("\n".join(raised))

    async def _run(self, work: Callable[[Broker], Any]) -> None:
        if self._used % _PER_BROKER == 0:
            if self.broker is not None:
                await self.broker.stop()
            root = Path("/fuzz")
            options: dict[str, Any] = {"max_msg_size": 1 << 16, "max_body_size": 1 << 18, "mem_queue_size": 100}
            options |= {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", **certificates().options}
            self.broker = Broker(disk=SimDisk(root), clock=FakeClock(), data_path=root, disk_reserve=0, **options)
            await self.broker.start()
        self._used += 1
        assert self.broker is not None
        await work(self.broker)


_certificates: Certificates | None = None


def certificates() -> Certificates:
    global _certificates
    _certificates = _certificates or Certificates(_scratch.path)
    return _certificates


_world: _World | None = None


def world() -> _World:
    global _world
    _world = _world or _World()
    return _world


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Targets run in here: readers do not log what is wrong with each input, and at the end nothing is left."""
    global _world
    logger, silent = logging.getLogger("flintmq"), logging.NullHandler()
    before, logger.propagate = logger.propagate, False
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silent)
        if _world is not None:
            _world.close()
            _world = None


async def _talk(broker: Broker, data: bytes, sizes: tuple[int, ...] = (), *, plain: bool = True) -> None:
    client = Client(broker, magic=False)
    client.send(data, sizes=sizes)
    await settled(broker)
    client.deliver()
    await settled(broker)
    if plain:
        # What it answered are frames, or nothing.
        _ = client.frames
    await _forget(broker, client)


async def _forget(broker: Broker, client: Client) -> None:
    """Nothing of an input is left for the next one."""
    client.hang_up()
    await settled(broker)
    for topic in list(broker.topics.values()):
        broker.delete_topic(topic.name)
    await settled(broker)


def commands(data: bytes) -> None:
    """What a client sends from its first byte on; the first byte here says how it is cut."""
    size = data[0] if data else 0
    sizes = (size,) * min(200, len(data)) if size else ()
    world().run(lambda broker: _talk(broker, data[1:], sizes))


def identify(data: bytes) -> None:
    """The JSON of an IDENTIFY, and what comes after it on the same connection."""
    body = len(data).to_bytes(4, "big") + data
    stream = b"  V2IDENTIFY\n" + body + b"SUB t c\nRDY 1\nPUB t\n\x00\x00\x00\x01x"
    world().run(lambda broker: _talk(broker, stream, plain=False))


def deflated(data: bytes) -> None:
    """A connection with deflate, after the upgrade."""
    _upgraded(b'{"feature_negotiation":true,"deflate":true}', data)


def snappied(data: bytes) -> None:
    """A connection with snappy, after the upgrade."""
    _upgraded(b'{"feature_negotiation":true,"snappy":true}', data)


def _upgraded(wish: bytes, data: bytes) -> None:
    async def work(broker: Broker) -> None:
        client = Client(broker)
        client.send(b"IDENTIFY\n" + len(wish).to_bytes(4, "big") + wish)
        await settled(broker)
        client.send(data)
        await settled(broker)
        await _forget(broker, client)

    world().run(work)


_TLS = b'{"feature_negotiation":true,"tls_v1":true}'


def handshake(data: bytes) -> None:
    """TLS records in the place of a handshake."""
    _upgraded(_TLS, data)


def tls(data: bytes) -> None:
    """What comes after a handshake: an even first byte sends the rest through TLS, an odd one as it is."""

    async def work(broker: Broker) -> None:
        client = Client(broker)
        client.send(b"IDENTIFY\n" + len(_TLS).to_bytes(4, "big") + _TLS)
        await settled(broker)
        client.take()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        peer = certificates().client().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        client.transport.received.clear()
        for _ in range(6):
            with contextlib.suppress(ssl.SSLWantReadError):
                peer.do_handshake()
            client.send(outgoing.read())
            await settled(broker)
            incoming.write(bytes(client.transport.received))
            client.transport.received.clear()
        if data and data[0] % 2 == 0:
            peer.write(data[1:] or b"NOP\n")
            client.send(outgoing.read())
        else:
            client.send(data[1:])
        await settled(broker)
        await _forget(broker, client)

    world().run(work)


def lane(data: bytes) -> None:
    """What a client sends over a real connection, after publishes that brought it onto the lane."""

    async def work(broker: Broker) -> None:
        await _over_socket(broker, broker.tcp_address, b"  V2" + b"PUB t\n\x00\x00\x00\x01x" * 3, data)

    world().run(work)


def http(data: bytes) -> None:
    """A request to the HTTP port; one that is like the one before it goes to the lane's parser."""

    async def work(broker: Broker) -> None:
        warm = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx"
        await _over_socket(broker, broker.http_address, warm * 2, data)

    world().run(work)


async def _over_socket(broker: Broker, address: str, first: bytes, data: bytes) -> None:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    sock = socket.create_connection((host, int(port)))
    sock.setblocking(False)
    try:
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(sock, first)
            await settled(broker)
            await loop.sock_sendall(sock, data)
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(10):
                while await loop.sock_recv(sock, 1 << 16):
                    pass
    except TimeoutError:
        raise Defect("the connection is neither answered nor closed") from None
    except OSError:
        # The broker has hung up.
        pass
    finally:
        sock.close()
    await settled(broker)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        frames,
        messages,
        deflate,
        snappy,
        columns,
        offsets,
        config,
        go_metadata,
        go_queue,
        segment,
        journal,
        keys,
        commands,
        identify,
        deflated,
        snappied,
        handshake,
        tls,
        lane,
        http,
    )
}
