"""The protocol without I/O: literal bytes in, values out, and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq import kernel
from flintmq.errors import ProtocolError
from flintmq.protocol.seqs import SEQ_MASK, format_id, parse_id
from flintmq.protocol.wire import (
    CLOSE_WAIT_FRAME,
    FRAME_ERROR,
    FRAME_MESSAGE,
    FRAME_RESPONSE,
    HEARTBEAT_FRAME,
    OK_FRAME,
    FrameDecoder,
    Message,
    MessageDecoder,
    cut_frame,
    decode_error,
    decode_message,
    encode_command,
    encode_fins,
    encode_frame,
    encode_mpub,
    go_quote,
    is_ephemeral,
    parse_base10,
    valid_name,
)

# --- Frames and commands

frames = st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=50)), max_size=8)


def test_known_frames_are_these_bytes() -> None:
    assert OK_FRAME == bytes.fromhex("00000006 00000000 4f4b")
    assert HEARTBEAT_FRAME == bytes.fromhex("0000000f 00000000") + b"_heartbeat_"
    assert CLOSE_WAIT_FRAME == bytes.fromhex("0000000e 00000000") + b"CLOSE_WAIT"
    assert encode_frame(FRAME_ERROR, b"E_INVALID") == bytes.fromhex("0000000d 00000001") + b"E_INVALID"


def test_commands_are_these_bytes() -> None:
    assert encode_command(b"NOP") == b"NOP\n"
    assert encode_command(b"SUB", b"t", b"c") == b"SUB t c\n"
    assert encode_command(b"PUB", b"t", body=b"ab") == b"PUB t\n\x00\x00\x00\x02ab"
    assert encode_command(b"IDENTIFY", body=b"") == b"IDENTIFY\n\x00\x00\x00\x00"


def test_mpub_counts_its_messages_and_their_bytes() -> None:
    body = bytes.fromhex("00000002 00000001") + b"a" + bytes.fromhex("00000002") + b"bc"
    assert encode_mpub(b"t", [b"a", b"bc"]) == b"MPUB t\n" + len(body).to_bytes(4, "big") + body


@settings(deadline=None)
@given(frames, st.lists(st.integers(1, 20)))
def test_any_split_of_the_stream_gives_the_same_frames(expected: list[tuple[int, bytes]], sizes: list[int]) -> None:
    stream = b"".join(encode_frame(kind, data) for kind, data in expected)
    decoder = FrameDecoder()
    found = []
    for size in sizes:
        found += decoder.feed(stream[:size])
        stream = stream[size:]
    found += decoder.feed(stream)
    assert found == expected


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=10))
def test_garbage_in_place_of_frames_raises_only_a_protocol_error(pieces: list[bytes]) -> None:
    decoder = FrameDecoder(max_size=100)
    try:
        for piece in pieces:
            for kind, data in decoder.feed(piece):
                assert kind in (FRAME_RESPONSE, FRAME_ERROR, FRAME_MESSAGE)
                assert len(data) <= 96
    except ProtocolError as exc:
        assert exc.code == "E_INVALID"


@pytest.mark.parametrize("size", [0, 3, 101, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_frame_with_a_size_out_of_range_is_refused_before_its_bytes_come(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"size {size} "):
        FrameDecoder(max_size=100).feed(size.to_bytes(4, "big") + b"\0\0\0\0")


def test_a_frame_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(ProtocolError, match="type 3"):
        FrameDecoder().feed(encode_frame(3, b"x"))


def test_a_frame_at_the_limit_is_taken() -> None:
    assert FrameDecoder(max_size=100).feed(encode_frame(0, b"x" * 96)) == [(0, b"x" * 96)]


# --- Messages


def test_a_message_is_these_bytes() -> None:
    data = bytes.fromhex("17979cfe362a0000 0102") + b"0123456789abcdef" + b"body"
    assert decode_message(data) == Message(0x17979CFE362A0000, 0x0102, b"0123456789abcdef", b"body")


def test_a_message_may_have_a_time_before_1970_and_no_body() -> None:
    assert decode_message(b"\xff" * 10 + b"i" * 16) == Message(-1, 65_535, b"i" * 16, b"")


@pytest.mark.parametrize("size", [0, 1, 25])
def test_a_message_shorter_than_its_head_is_a_protocol_error(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"a message frame of {size} bytes"):
        decode_message(b"x" * size)


# --- Names

GOOD_NAMES = ["a", "..", "A-z_0.9", "x" * 64, "t#ephemeral", "x" * 54 + "#ephemeral", "-", "_"]
BAD_NAMES = ["", "x" * 65, "#ephemeral", "x" * 55 + "#ephemeral", "a#ephemeral#ephemeral", "a#Ephemeral", "a#", "a b"]
BAD_NAMES += ["a\n", "a#ephemeral\n", "\na", "ä", "a/b", "a:b", "a\0", "a#ephemeralx", "\u0661"]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_good_names(name: str) -> None:
    assert valid_name(name)
    assert valid_name(name.encode())


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(name: str) -> None:
    assert not valid_name(name)
    assert not valid_name(name.encode())


@settings(deadline=None)
@given(st.text(max_size=70))
def test_a_name_is_as_good_in_text_as_in_bytes(name: str) -> None:
    assert valid_name(name) == valid_name(name.encode("utf-8", "surrogatepass"))


def test_ephemeral_is_a_matter_of_the_suffix() -> None:
    assert is_ephemeral("t#ephemeral")
    assert not is_ephemeral("ephemeral")


# --- Numbers


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_digits_are_read_as_they_stand(number: int) -> None:
    assert parse_base10(b"%d" % number) == number
    assert parse_base10(b"000%d" % number) == number


def test_no_digits_at_all_are_zero() -> None:
    assert parse_base10(b"") == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=100), st.sampled_from([1, 2, 50, 100]))
def test_numbers_beyond_64_bits_wrap(digits: list[int], times: int) -> None:
    """Also those of many thousand digits, which int() would refuse."""
    number = 0
    for digit in digits * times:
        number = (10 * number + digit) % 2**64
    assert parse_base10(bytes(48 + digit for digit in digits) * times) == number


@pytest.mark.parametrize(
    "text", [b"-1", b"+1", b" 1", b"1 ", b"1.0", b"0x1", b"1_000", b"a", b"\t", b"\xd9\xa1", b"1" * 5000 + b"x"]
)
def test_anything_but_digits_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_base10(text)


# --- Ids


@settings(deadline=None)
@given(st.integers(0, 1023), st.integers(0, SEQ_MASK))
def test_an_id_leads_back_to_its_seq(node: int, seq: int) -> None:
    prefix = node << 54
    text = format_id(prefix, seq)
    assert len(text) == 16
    assert text == text.lower()
    assert parse_id(text, prefix) == seq


@settings(deadline=None)
@given(st.integers(0, 1023), st.integers(0, 1023), st.integers(0, SEQ_MASK))
def test_an_id_of_another_node_is_nobody_s(node: int, other: int, seq: int) -> None:
    found = parse_id(format_id(other << 54, seq), node << 54)
    assert found == (seq if node == other else -1)


@pytest.mark.parametrize("text", [b"0123456789ABCDEF", b"0123456789abcde", b"0123456789abcdef0", b"0x23456789abcdef"])
def test_other_texts_are_no_ids(text: bytes) -> None:
    assert parse_id(text, 0) == -1


def test_an_id_with_a_newline_behind_it_is_none() -> None:
    assert parse_id(b"0123456789abcde\n", 0) == -1


# --- Go's %q

QUOTED = [
    (b"", '""'),
    (b"plain name", '"plain name"'),
    (b'say "hi"', '"say \\"hi\\""'),
    (b"back\\slash", '"back\\\\slash"'),
    (b"\a\b\f\n\r\t\v", '"\\a\\b\\f\\n\\r\\t\\v"'),
    (b"\x00\x1f\x7f", '"\\x00\\x1f\\x7f"'),
    ("é☃😀".encode(), '"é☃😀"'),
    ("a\u00a0b\u200bc".encode(), '"a\\u00a0b\\u200bc"'),
    ("\U000f0000".encode(), '"\\U000f0000"'),
    ("\u2028\ufeff".encode(), '"\\u2028\\ufeff"'),
    (b"half \xc3", '"half \\xc3"'),
    (b"\xff\xfe", '"\\xff\\xfe"'),
    # A surrogate encoded in UTF-8 is three invalid bytes.
    (b"\xed\xb2\x80", '"\\xed\\xb2\\x80"'),
]


@pytest.mark.parametrize(("data", "quoted"), QUOTED)
def test_bytes_are_quoted_as_go_does(data: bytes, quoted: str) -> None:
    assert go_quote(data) == quoted.encode()


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_whatever_is_quoted_is_text_on_one_line(data: bytes) -> None:
    quoted = go_quote(data).decode("utf-8")
    assert quoted[0] == quoted[-1] == '"'
    assert quoted.isprintable()


# --- The client's side

_payloads = st.one_of(
    st.tuples(st.just(FRAME_MESSAGE), st.binary(min_size=26, max_size=60)),
    st.tuples(st.sampled_from([FRAME_RESPONSE, FRAME_ERROR]), st.binary(max_size=40)),
)


@settings(deadline=None)
@given(st.lists(_payloads, max_size=8), st.lists(st.integers(1, 40)))
def test_any_split_gives_the_same_messages(expected: list[tuple[int, bytes]], sizes: list[int]) -> None:
    stream = b"".join(encode_frame(kind, data) for kind, data in expected)
    decoder = MessageDecoder(kernel.Delivery, "here")
    messages: list[kernel.Delivery] = []
    others: list[tuple[int, bytes]] = []
    for size in [*sizes, len(stream)]:
        for into, came in zip((messages, others), decoder.feed(stream[:size], 5.0), strict=True):
            into.extend(came)  # type: ignore[arg-type]
        stream = stream[size:]
    assert others == [(kind, data) for kind, data in expected if kind != FRAME_MESSAGE]
    found = [Message(m.timestamp, m.attempts, m.id, m.body) for m in messages]
    assert found == [decode_message(data) for kind, data in expected if kind == FRAME_MESSAGE]
    assert all((m.source, m.deadline, m.answered, m.kept) == ("here", 5.0, False, False) for m in messages)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_garbage_raises_only_protocol_errors(pieces: list[bytes]) -> None:
    decoder = MessageDecoder(kernel.Delivery, None, max_size=1000)
    try:
        for piece in pieces:
            decoder.feed(piece, 0.0)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (bytes.fromhex("7fffffff"), "size 2147483647"),
        (bytes.fromhex("00000003 00000000"), "size 3"),
        (bytes.fromhex("0000001d 00000002"), "size 29 and type 2"),
        (bytes.fromhex("00000004 00000003"), "type 3"),
        (b"HTTP/1.1 400 Bad Request", "HTTP"),
    ],
)
def test_frames_that_cannot_be_are_refused_at_once(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        MessageDecoder(kernel.Delivery, None, max_size=1 << 20).feed(data, 0.0)


def test_one_frame_is_cut_and_what_follows_is_left_alone() -> None:
    buffer = bytearray(OK_FRAME[:7])
    assert cut_frame(buffer, 100) is None
    buffer += OK_FRAME[7:] + b"compressed"
    assert cut_frame(buffer, 100) == (FRAME_RESPONSE, b"OK")
    assert buffer == b"compressed"
    with pytest.raises(ProtocolError):
        cut_frame(bytearray(b"HTTP/1.1"), 100)


def test_errors_have_a_code_and_a_text() -> None:
    error = decode_error(b"E_BAD_TOPIC E_BAD_TOPIC MPUB topic name")
    assert (error.code, error.text, error.fatal) == ("E_BAD_TOPIC", "E_BAD_TOPIC MPUB topic name", True)
    assert not decode_error(b"E_TOUCH_FAILED TOUCH x failed").fatal
    assert decode_error(b"E_BAD_PROTOCOL").text == ""


def test_fins_are_written_together() -> None:
    assert encode_fins([]) == b""
    assert encode_fins([b"a"]) == b"FIN a\n"
    assert encode_fins([b"a", b"b"]) == b"FIN a\nFIN b\n"
