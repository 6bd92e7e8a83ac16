"""``python -m tests.fuzz.seeds`` writes the inputs that a corpus begins with: what a friendly peer would send."""

from __future__ import annotations

import contextlib
import json
import ssl
from pathlib import Path

from flintmq.broker.storage.keys import KeyBlock
from flintmq.protocol.compression import Deflate, Snappy
from flintmq.protocol.wire import encode_command, encode_frame, encode_mpub
from support.simdisk import SimDisk

from . import targets

CORPUS = Path(__file__).parent / "corpus"

_MESSAGE = (10**18).to_bytes(8, "big") + b"\x00\x01" + b"0123456789abcdef" + b"a body"
_FRAMES = (
    encode_frame(0, b"OK") + encode_frame(2, _MESSAGE) + encode_frame(1, b"E_INVALID no") + encode_frame(2, _MESSAGE)
)
_SESSION = b"".join(
    [
        b"  V2",
        encode_command(b"IDENTIFY", body=b'{"client_id":"c","feature_negotiation":true}'),
        encode_command(b"SUB", b"t", b"c"),
        b"RDY 2\n",
        encode_command(b"PUB", b"t", body=b"one"),
        encode_mpub(b"t", [b"two", b"three"]),
        encode_command(b"DPUB", b"t", b"100", body=b"later"),
        b"FIN 0123456789abcdef\nREQ 0123456789abcdef 10\nTOUCH 0123456789abcdef\nNOP\nCLS\n",
    ]
)


def seeds() -> dict[str, list[bytes]]:
    packed = Deflate(6).compress(_SESSION[4:])
    framed = Snappy().compress(_SESSION[4:])
    offset = {"v": 1, "mode": "log", "p": {"t": {"n": {"e": "e", "o": 5}}}, "init": {"t": {"n": {"e": "e", "o": 1}}}}
    record = (34).to_bytes(4, "big") + b"\x00" * 8 + b"\x00\x01" + b"0123456789abcdef" + b"the body"
    return {
        "frames": [b"\x00" + _FRAMES, b"\x03" + _FRAMES],
        "messages": [b"\x00" + _FRAMES, b"\x05" + _FRAMES],
        "deflate": [packed],
        "snappy": [framed, Snappy().compress(bytes(range(256)) * 4)],
        "columns": [b"\x00" + encode_frame(2, _MESSAGE) * 3, b"\x01" + encode_frame(2, _MESSAGE) * 3],
        "offsets": [json.dumps(offset).encode(), b'{"v":1,"mode":"spool","spool":"s","o":3}'],
        "config": [
            b'tcp_address = "0.0.0.0:4150"\nmem_queue_size = 10\nmsg_timeout = "60s"\n[topic."t"]\nttl = "1h"\n'
        ],
        "go_metadata": [
            b'{"topics":[{"channels":[{"name":"c","paused":true}],"name":"t","paused":false}],"version":"1.3.0"}'
        ],
        "go_queue": [b"2\n0,0\n0,76\n\x00" + record * 2],
        "segment": [_segment()],
        "journal": _journals(),
        "keys": [_keys()],
        "commands": [b"\x00" + _SESSION, b"\x07" + _SESSION],
        "identify": [
            b'{"client_id":"c","hostname":"h","feature_negotiation":true,"heartbeat_interval":1000,"msg_timeout":2000,'
            b'"output_buffer_size":1024,"output_buffer_timeout":250,"sample_rate":50,"deflate":true,"deflate_level":3}',
            b'{"snappy":true,"feature_negotiation":true,"user_agent":"u","tls_v1":true}',
        ],
        "deflated": [packed],
        "snappied": [framed],
        "handshake": [_client_hello()],
        "tls": [b"\x00" + _SESSION[4:], b"\x01\x17\x03\x03\x00\x20" + bytes(32), b"\x01\x15\x03\x03\x00\x02\x01\x00"],
        "lane": [b"PUB t\n\x00\x00\x00\x03two" * 2 + b"NOP\n", encode_mpub(b"t", [b"a", b"b"])],
        "http": [
            b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\none",
            b"POST /mpub?topic=t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\na\nb\r\n0\r\n\r\n",
            b"GET /stats?format=json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        ],
    }


def _segment() -> bytes:
    disk, path, _ = targets._segment()
    return disk.content(path)


def _journals() -> list[bytes]:
    found: list[bytes] = []
    for clean in (False, True):

        async def work(broker: targets.Broker, clean: bool = clean) -> None:
            client = targets.Client(broker)
            client.send(_SESSION[4:])
            await targets.settled(broker)
            assert isinstance(broker.disk, SimDisk)
            if clean:
                await broker.stop()
            paths = broker.disk.paths(broker.path / "flintmq" / "journal")
            found.extend(broker.disk.content(path).rstrip(b"\0") + bytes(8) for path in paths)

        world = targets._World()
        world.run(work)
    return found


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    peer = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        peer.do_handshake()
    return outgoing.read()


def _keys() -> bytes:
    block = KeyBlock()
    for number in range(3):
        block.add(bytes([number]) * 16, 1_000 + number, 10**18, 7)
    data = block.encode()
    head = targets._head.pack(targets._MAGIC, 2, 0, len(block))
    return targets._with_checksum(head + bytes(targets._crc.size) + data)


def main() -> None:
    for name, inputs in seeds().items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(inputs):
            (folder / f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    main()
