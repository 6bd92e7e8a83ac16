"""Both codecs: round trips in any split, the bytes the Go daemon sends, bombs, and garbage."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from collections.abc import Callable

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.errors import ProtocolError
from flintmq.protocol.compression import PIECE, Codec, Deflate, Snappy, Stack
from flintmq.protocol.wire import OK_FRAME

NewCodec = Callable[[], Codec]

both = pytest.mark.parametrize("new", [Snappy, lambda: Deflate(6)], ids=["snappy", "deflate"])

IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"


def unpacked(codec: Codec, data: bytes) -> bytes:
    return b"".join(codec.decompress(data))


# --- Round trips


@both
@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_what_was_sent_comes_out_however_it_is_split(new: NewCodec, sent: list[bytes], data: st.DataObject) -> None:
    sender, receiver = new(), new()
    stream = b"".join(sender.compress(piece) for piece in sent)
    received = b""
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += unpacked(receiver, stream[:size])
        stream = stream[size:]
    assert received == b"".join(sent)


@both
def test_everything_sent_can_be_read_at_once(new: NewCodec) -> None:
    """Nothing may stay in the compressor: the peer waits for it."""
    sender, receiver = new(), new()
    for piece in (OK_FRAME, b"x", b"y" * 200_000, OK_FRAME):
        assert unpacked(receiver, sender.compress(piece)) == piece


@both
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 1 << 20])
def test_large_messages_pass(new: NewCodec, size: int) -> None:
    data = random.Random(size).randbytes(size // 2) + b"\0" * (size - size // 2)
    assert unpacked(new(), new().compress(memoryview(data))) == data


@pytest.mark.parametrize("level", range(1, 10))
def test_every_level_of_deflate_is_plain_raw_deflate(level: int) -> None:
    packed = Deflate(level).compress(b"hello " * 100)
    assert zlib.decompress(packed + b"\x03\x00", -15) == b"hello " * 100


# --- The Go daemon's bytes

OK_IN_SNAPPY = bytes.fromhex("ff060000734e61507059 010e0000 26982bcf 00000006000000004f4b")
OK_IN_DEFLATE = bytes.fromhex("6260606063606060f0f706000000ffff000000ffff")


def test_ok_in_snappy_is_what_the_go_daemon_sends() -> None:
    assert Snappy().compress(OK_FRAME) == OK_IN_SNAPPY
    assert unpacked(Snappy(), OK_IN_SNAPPY) == OK_FRAME


def test_ok_in_deflate_as_the_go_daemon_sends_it_is_read() -> None:
    assert unpacked(Deflate(6), OK_IN_DEFLATE) == OK_FRAME


def test_the_snappy_identifier_is_sent_once_and_may_come_again() -> None:
    codec = Snappy()
    assert codec.compress(b"a").startswith(IDENTIFIER)
    assert IDENTIFIER not in codec.compress(b"a")
    assert unpacked(Snappy(), OK_IN_SNAPPY + OK_IN_SNAPPY) == OK_FRAME + OK_FRAME


def test_snappy_packs_what_is_worth_it_and_leaves_the_rest() -> None:
    codec = Snappy()
    codec.compress(b"-")
    assert codec.compress(b"a" * 1000)[0] == 0x00
    assert codec.compress(random.Random(1).randbytes(1000))[0] == 0x01


def test_snappy_padding_and_skippable_chunks_are_passed_over() -> None:
    padding = b"\xfe\x03\x00\x00" + b"abc"
    skippable = b"\x80\x00\x00\x00"
    assert unpacked(Snappy(), IDENTIFIER + padding + skippable + OK_IN_SNAPPY[10:]) == OK_FRAME


# --- Bombs


def peak_of(codec: Codec, data: bytes) -> tuple[int, int]:
    """How much memory unpacking took at most, and how much came out, if nobody keeps it."""
    total = 0
    tracemalloc.start()
    try:
        for piece in codec.decompress(data):
            total += len(piece)
            del piece
        return tracemalloc.get_traced_memory()[1], total
    finally:
        tracemalloc.stop()


def test_a_deflate_bomb_comes_in_bounded_pieces() -> None:
    bomb = Deflate(9).compress(bytes(64 << 20))
    assert len(bomb) < 100_000
    peak, total = peak_of(Deflate(6), bomb)
    assert total == 64 << 20
    assert peak < 4 * PIECE
    assert all(len(piece) <= PIECE for piece in Deflate(6).decompress(bomb))


def test_a_snappy_bomb_comes_in_bounded_pieces() -> None:
    bomb = Snappy().compress(bytes(16 << 20))
    assert len(bomb) < 1 << 20
    peak, total = peak_of(Snappy(), bomb)
    assert total == 16 << 20
    assert peak < len(bomb) + (1 << 20)
    assert all(len(piece) <= 65_536 for piece in Snappy().decompress(bomb))


def test_a_snappy_block_that_says_it_is_larger_than_64_kib_is_refused_unread() -> None:
    # The length of the unpacked block stands in front: 1 GiB.
    block = b"\x80\x80\x80\x80\x04" + b"\x00a"
    chunk = b"\x00" + (len(block) + 4).to_bytes(3, "little") + bytes(4) + block
    with pytest.raises(ProtocolError, match="more than 64 KiB"):
        unpacked(Snappy(), IDENTIFIER + chunk)


def test_a_snappy_chunk_that_says_it_is_huge_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ProtocolError, match="a chunk of 16777215 bytes"):
        unpacked(Snappy(), IDENTIFIER + b"\x00\xff\xff\xff")


@pytest.mark.parametrize("kind", [0x80, 0xFD, 0xFE, 0xFF])
def test_a_chunk_to_be_passed_over_is_not_kept_to_its_end(kind: int) -> None:
    """It may say that it has 16 MiB; as in NSQ none may be larger than a chunk with data."""
    with pytest.raises(ProtocolError, match="a chunk of 16777215 bytes"):
        unpacked(Snappy(), IDENTIFIER + bytes([kind]) + b"\xff\xff\xff")


def test_the_largest_chunk_is_taken() -> None:
    codec = Snappy()
    assert unpacked(codec, IDENTIFIER + chunk(0xFE, bytes(76_494)) + OK_IN_SNAPPY) == OK_FRAME
    with pytest.raises(ProtocolError, match="a chunk of 76495 bytes"):
        unpacked(codec, chunk(0xFE, bytes(76_495)))


@both
def test_a_stream_of_single_bytes_takes_no_more_memory_than_its_largest_piece(new: NewCodec) -> None:
    stream = new().compress(random.Random(5).randbytes(70_000))
    codec = new()
    tracemalloc.start()
    try:
        size = sum(len(piece) for i in range(len(stream)) for piece in codec.decompress(stream[i : i + 1]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 70_000
    assert peak < 1 << 20


@pytest.mark.parametrize("new", [lambda: Stack(Deflate(6), Snappy()), lambda: Stack(Snappy(), Deflate(1))])
def test_layers_come_off_in_the_order_they_were_put_on(new: NewCodec) -> None:
    sender, receiver = new(), new()
    for piece in (OK_FRAME, b"y" * 200_000, OK_FRAME):
        stream = sender.compress(piece)
        assert b"".join(unpacked(receiver, stream[i : i + 100]) for i in range(0, len(stream), 100)) == piece
    bomb = Stack(Deflate(9), Deflate(9)).compress(bytes(64 << 20))
    peak, total = peak_of(Stack(Deflate(6), Deflate(6)), bomb)
    assert total == 64 << 20
    assert peak < 8 * PIECE


# --- Garbage


def chunk(kind: int, payload: bytes) -> bytes:
    return bytes([kind]) + len(payload).to_bytes(3, "little") + payload


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


WRONG = {
    "no identifier": chunk(1, masked(b"x") + b"x"),
    "a wrong identifier": chunk(0xFF, b"sNaPpy"),
    "a wrong checksum": IDENTIFIER + chunk(1, bytes(4) + b"x"),
    "a chunk without a checksum": IDENTIFIER + chunk(1, b"abc"),
    "a chunk of a reserved type": IDENTIFIER + chunk(2, b""),
    "a block that is no snappy": IDENTIFIER + chunk(0, bytes(4) + b"\xff\xff\xff\xff\xff\xff"),
    "a block that is empty": IDENTIFIER + chunk(0, bytes(4)),
    "more than 64 KiB that are not packed": IDENTIFIER + chunk(1, masked(bytes(65_537)) + bytes(65_537)),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_what_is_not_snappy_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not snappy"):
        unpacked(Snappy(), data)


def test_what_is_not_deflate_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not deflate"):
        unpacked(Deflate(6), b"\xff" * 20)


@both
@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_garbage_raises_only_a_protocol_error(new: NewCodec, pieces: list[bytes]) -> None:
    codec = new()
    try:
        for piece in pieces:
            unpacked(codec, piece)
    except ProtocolError as exc:
        assert exc.code == "E_INVALID"


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_garbage_behind_a_good_beginning_raises_only_a_protocol_error(pieces: list[bytes]) -> None:
    codec = Snappy()
    assert unpacked(codec, OK_IN_SNAPPY) == OK_FRAME
    try:
        for piece in pieces:
            unpacked(codec, piece)
    except ProtocolError as exc:
        assert exc.code == "E_INVALID"


def test_the_end_of_a_deflate_stream_is_the_end() -> None:
    """What follows it is refused: the unpacker would keep it all."""
    stream = zlib.compressobj(6, zlib.DEFLATED, -15)
    pieces = Deflate(6).decompress(stream.compress(b"last") + stream.flush() + b"more")
    assert next(pieces) == b"last"
    with pytest.raises(ProtocolError, match="has ended"):
        next(pieces)
