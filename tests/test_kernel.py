"""The kernel, in both its forms: every test runs on the interpreted one, and on the compiled one where it was built."""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.machinery
import importlib.util
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from mmap import mmap
from operator import lt
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import flintmq.kernel
from flintmq.broker.storage.segment import CONTINUES, MORE, Entry, Record, encode_record, read_records
from flintmq.kernel import _cython, layout
from flintmq.protocol.wire import encode_mpub

PREFIX = 513 << 54
BASE = 7_000


MODULES = ("lane", "frames", "heap", "columns", "records", "spans")


def _together(modules: list[ModuleType]) -> SimpleNamespace:
    """The kernel's modules as one namespace; a name that one imports from another comes from the form in use."""
    return SimpleNamespace(**{name: value for module in reversed(modules) for name, value in vars(module).items()})


def _interpreted() -> SimpleNamespace:
    modules = []
    real = sys.modules.get("cython")
    sys.modules["cython"] = _cython
    try:
        for name in MODULES:
            path = Path(flintmq.__file__).parent / "kernel" / f"{name}.py"
            spec = importlib.util.spec_from_file_location(f"interpreted_{name}", path)
            assert spec is not None and spec.loader is not None
            modules.append(importlib.util.module_from_spec(spec))
            spec.loader.exec_module(modules[-1])
    finally:
        if real is None:
            del sys.modules["cython"]
        else:
            sys.modules["cython"] = real
    return _together(modules)


def _compiled() -> SimpleNamespace | None:
    modules = []
    for name in MODULES:
        used = importlib.import_module(f"flintmq.kernel.{name}")
        if not importlib.import_module("flintmq.kernel").COMPILED:
            spec = importlib.machinery.PathFinder.find_spec(f"flintmq.kernel.{name}", flintmq.kernel.__path__)
            if spec is None or not isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
                return None
            used = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(used)
        modules.append(used)
    return _together(modules)


FORMS: dict[str, SimpleNamespace | None] = {"py": _interpreted(), "c": _compiled()}


@pytest.fixture(params=["py", "c"], scope="module")
def kernel(request: pytest.FixtureRequest) -> Any:
    module = FORMS[request.param]
    if module is None:
        pytest.skip("the kernel was not compiled")
    assert bool(module.COMPILED) == (request.param == "c")
    # A simulated system of an earlier test may not be collected yet; it must not leave while another is in its place.
    gc.collect()
    return module


def records(*bodies: bytes) -> bytearray:
    return bytearray(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))


def frame(seq: int, body: bytes, timestamp: int = 1, attempts: int = 1) -> bytes:
    head = (len(body) + 30).to_bytes(4, "big") + (2).to_bytes(4, "big") + timestamp.to_bytes(8, "big")
    return head + attempts.to_bytes(2, "big") + b"%016x" % (PREFIX | seq) + body


def filled(kernel: Any, bodies: list[bytes], size: int = 1 << 16) -> Any:
    block = kernel.Block(size, BASE)
    data = records(*bodies)
    assert block.fill(data, 0, len(data), len(bodies), PREFIX | BASE, 1, 1, size) == len(bodies)
    return block


bodies_of_any_size = st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=200)


# --- Publishes --------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=40))
def test_messages_become_one_command(kernel: Any, bodies: list[bytes]) -> None:
    parts = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    size = 4 + len(parts)
    expected = b"MPUB t.1\n" + size.to_bytes(4, "big") + len(bodies).to_bytes(4, "big") + parts
    assert kernel.encode_mpub(b"MPUB t.1\n", bodies) == expected


@pytest.mark.parametrize("wrong", [None, 5, "text"])
def test_what_is_no_message_does_not_become_a_command(kernel: Any, wrong: Any) -> None:
    with pytest.raises(TypeError):
        kernel.encode_mpub(b"MPUB t\n", [b"good", wrong])


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=40))
def test_messages_are_measured(kernel: Any, bodies: list[bytes]) -> None:
    assert kernel.total_size(bodies) == sum(map(len, bodies))


class MyBytes(bytes):
    """May be anything: its own length, for one."""


@pytest.mark.parametrize("wrong", [b"", None, "text", bytearray(b"x"), memoryview(b"x"), MyBytes(b"x")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_empty_messages_and_what_is_none_are_noticed(kernel: Any, wrong: Any, place: int) -> None:
    bodies: list[Any] = [b"a", b"b"]
    bodies.insert(place, wrong)
    assert kernel.total_size(bodies) == -1


# --- Lines ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([b"", b"\n", b"\r\n", b"a", b"bc", b"\0" * 300]), max_size=40), st.data())
def test_lines_become_records(kernel: Any, parts: list[bytes], draw: st.DataObject) -> None:
    data = bytearray(b"".join(parts))
    pos = draw.draw(st.integers(0, len(data)))
    stop = draw.draw(st.integers(pos, len(data)))
    lines = [line for line in bytes(data[pos:stop]).split(b"\n") if line]
    before = bytes(data)
    assert kernel.line_records(data, pos, stop) == (records(*lines), len(lines))
    assert data == before


@pytest.mark.parametrize(("pos", "stop"), [(-1, 3), (0, 4), (2, 1), (4, 4)])
def test_lines_outside_the_buffer_are_refused(kernel: Any, pos: int, stop: int) -> None:
    with pytest.raises(ValueError, match="beyond the buffer"):
        kernel.line_records(bytearray(b"a\nb"), pos, stop)


# --- BatchParser -----------------------------------------------------------------------------------------------------


@given(bodies_of_any_size, st.data())
def test_a_scan_in_pieces_finds_what_one_scan_finds(kernel: Any, bodies: list[bytes], draw: st.DataObject) -> None:
    data = records(*bodies)
    scan = kernel.BatchParser(0)
    stop = 0
    while stop < len(data):
        stop = draw.draw(st.integers(stop + 1, len(data)))
        status = scan.run(data, stop, len(bodies), 30)
        assert status == (kernel.PARSE_DONE if stop == len(data) else kernel.PARSE_MORE)
        assert scan.pos <= stop
        assert data[: scan.pos] == records(*bodies[: scan.index])
    assert (scan.pos, scan.index) == (len(data), len(bodies))


@pytest.mark.parametrize("size", [0, -1, -(1 << 31), 31, (1 << 31) - 1])
def test_a_scan_stops_at_a_size_out_of_range(kernel: Any, size: int) -> None:
    data = records(b"one", b"two") + size.to_bytes(4, "big", signed=True) + bytes(100)
    scan = kernel.BatchParser(0)
    assert scan.run(data, len(data), 3, 30) == kernel.PARSE_BAD
    assert (scan.index, scan.pos, scan.size) == (2, 14, size)


def test_a_scan_of_the_largest_size_allowed(kernel: Any) -> None:
    data = records(b"x" * 30)
    assert kernel.BatchParser(0).run(data, len(data), 1, 30) == kernel.PARSE_DONE


def test_a_scan_beyond_the_buffer_is_refused(kernel: Any) -> None:
    with pytest.raises(ValueError, match="beyond the buffer"):
        kernel.BatchParser(0).run(bytearray(10), 11, 1, 30)


# --- Block ------------------------------------------------------------------------------------------------------------


@given(bodies_of_any_size, st.integers(0, (1 << 63) - 1), st.integers(0, 65_535))
def test_frames_are_what_the_wire_wants(kernel: Any, bodies: list[bytes], timestamp: int, attempts: int) -> None:
    data = bytearray(b"junk") + records(*bodies) + b"junk"
    block = kernel.Block(1 << 16, BASE)
    done = block.fill(data, 4, len(data) - 4, len(bodies), PREFIX | BASE, timestamp, attempts, 1 << 16)
    assert done == len(bodies) == block.count
    assert block.pos == len(data) - 4
    frames = [frame(BASE + i, body, timestamp, attempts) for i, body in enumerate(bodies)]
    assert bytes(block.view[: block.used]) == b"".join(frames)
    for i, expected in enumerate(frames):
        start = block.find(BASE + i)
        assert start == block.start
        assert bytes(block.view[block.start : block.stop]) == expected


@given(bodies_of_any_size, st.integers(40, 2_000), st.integers(0, 2_000))
def test_a_fill_stops_when_the_block_or_the_budget_is_full(
    kernel: Any, bodies: list[bytes], size: int, budget: int
) -> None:
    data = records(*bodies)
    block = kernel.Block(size, BASE)
    pos = total = 0
    while total < len(bodies):
        used = block.used
        done = block.fill(data, pos, len(data), len(bodies) - total, PREFIX | (BASE + total), 1, 1, budget)
        room = size - used
        expected, taken = 0, 0
        for body in bodies[total:]:
            need = 34 + len(body)
            if taken + need > room or (expected and taken + need > budget):
                break
            expected, taken = expected + 1, taken + need
        assert done == expected
        if not done:
            break
        total += done
        pos = block.pos
        assert pos == len(records(*bodies[:total]))
    assert block.count == total
    assert bytes(block.view[: block.used]) == b"".join(frame(BASE + i, b) for i, b in enumerate(bodies[:total]))


def test_the_smallest_messages_fill_a_block_to_its_end(kernel: Any) -> None:
    """The table of offsets must have room for as many frames as the bytes have."""
    for size in (35, 34 * 64, 4_096, 35 * 1_000):
        count = size // 35
        data = records(*[b"x"] * (count + 1))
        block = kernel.Block(size, BASE)
        assert block.fill(data, 0, len(data), count + 1, PREFIX | BASE, 1, 1, size) == count
        assert block.find(BASE + count - 1) == 35 * (count - 1)


def test_a_fill_checks_its_input_before_it_trusts_it(kernel: Any) -> None:
    block = kernel.Block(1_000, BASE)
    data = records(b"one")
    for pos, stop, count, attempts in ((-1, 7, 1, 1), (0, 8, 1, 1), (0, 7, 1, -1), (0, 7, 1, 65_536), (0, 6, 1, 1)):
        with pytest.raises(ValueError, match="fill"):
            block.fill(data, pos, stop, count, PREFIX | BASE, 1, attempts, 1_000)
    with pytest.raises(ValueError, match="cut off"):
        block.fill(data, 0, 7, 2, PREFIX | BASE, 1, 1, 1_000)
    huge = bytearray(b"\xff\xff\xff\xff") + bytes(100)
    with pytest.raises(ValueError, match="cut off"):
        block.fill(huge, 0, len(huge), 1, PREFIX | BASE, 1, 1, 1_000)


@given(bodies_of_any_size, st.data())
def test_a_run_is_cut_by_count_and_bytes(kernel: Any, bodies: list[bytes], draw: st.DataObject) -> None:
    block = filled(kernel, bodies)
    first = draw.draw(st.integers(0, len(bodies) - 1))
    most = draw.draw(st.integers(1, 250))
    size = draw.draw(st.integers(0, 3_000))
    count = block.cut(BASE + first, most, size)
    expected, taken = 1, 34 + len(bodies[first])
    for body in bodies[first + 1 : first + most]:
        if taken + 34 + len(body) > size:
            break
        expected, taken = expected + 1, taken + 34 + len(body)
    assert count == expected
    run = b"".join(frame(BASE + i, bodies[i]) for i in range(first, first + count))
    assert bytes(block.view[block.start : block.stop]) == run


@pytest.mark.parametrize("seq", [BASE - 1, BASE + 3, 0, 1 << 60])
def test_a_seq_that_is_not_in_the_block_is_refused(kernel: Any, seq: int) -> None:
    block = filled(kernel, [b"a", b"b", b"c"])
    with pytest.raises(IndexError):
        block.find(seq)
    with pytest.raises(IndexError):
        block.cut(seq, 1, 1)


@given(bodies_of_any_size, st.data())
def test_a_block_is_cut_back_and_filled_again(kernel: Any, bodies: list[bytes], draw: st.DataObject) -> None:
    block = filled(kernel, bodies)
    keep = draw.draw(st.integers(0, len(bodies)))
    block.cut_back(keep)
    assert block.count == keep
    data = records(b"again")
    assert block.fill(data, 0, len(data), 1, PREFIX | (BASE + keep), 1, 1, 1_000) == 1
    kept = [frame(BASE + i, body) for i, body in enumerate(bodies[:keep])]
    assert bytes(block.view[: block.used]) == b"".join(kept) + frame(BASE + keep, b"again")
    block.find(BASE + keep)
    assert bytes(block.view[block.start : block.stop]) == frame(BASE + keep, b"again")


@given(bodies_of_any_size)
def test_frames_that_were_read_back_are_adopted(kernel: Any, bodies: list[bytes]) -> None:
    frames = bytearray(b"".join(frame(BASE + i, body) for i, body in enumerate(bodies)))
    block = kernel.Block(0, BASE, bytearray(frames))
    assert block.adopt(len(frames), len(bodies))
    for i, body in enumerate(bodies):
        block.find(BASE + i)
        assert bytes(block.view[block.start : block.stop]) == frame(BASE + i, body)
    assert not kernel.Block(0, BASE, bytearray(frames)).adopt(len(frames), len(bodies) + 1)
    assert not kernel.Block(0, BASE, bytearray(frames)).adopt(len(frames) - 1, len(bodies))
    assert not kernel.Block(0, BASE, bytearray(frames)).adopt(len(frames) + 1, len(bodies))


@given(st.binary(max_size=300))
def test_garbage_is_not_adopted(kernel: Any, data: bytes) -> None:
    sizes, at = 0, 0
    while at + 34 <= len(data) and (size := int.from_bytes(data[at : at + 4], "big")) >= 30:
        at += 4 + size
        sizes += 1
    block = kernel.Block(0, BASE, bytearray(data))
    assert bool(block.adopt(len(data), 3)) == (at == len(data) and sizes == 3)


def test_a_block_is_used_again_only_when_no_view_of_it_is_left(kernel: Any) -> None:
    def mapped() -> Any:
        block = kernel.Block(0, BASE, mmap(-1, 4_096))
        data = records(b"a", b"b")
        assert block.fill(data, 0, len(data), 2, PREFIX | BASE, 1, 1, 4_096) == 2
        return block

    block = mapped()
    block.find(BASE)
    view = block.view[block.start : block.stop]
    assert not block.recycle(BASE + 50)
    assert bytes(view) == frame(BASE, b"a")
    view.release()
    block = mapped()
    if not block.recycle(BASE + 50):
        pytest.skip("this system cannot tell whether a view is left")
    assert (block.used, block.count, block.base, block.size) == (0, 0, BASE + 50, 4_096)
    data = records(b"new")
    assert block.fill(data, 0, len(data), 1, PREFIX | (BASE + 50), 1, 1, 100) == 1
    assert bytes(block.view[: block.used]) == frame(BASE + 50, b"new")
    assert not filled(kernel, [b"a"]).recycle(BASE), "only mapped memory can be"


# --- Sockets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(5)]
    for one, other in made:
        one.setblocking(False)
        other.setblocking(False)
    yield made
    for one, other in made:
        one.close()
        other.close()


Pairs = list[tuple[socket.socket, socket.socket]]


class Desk:
    """An intake with a block to fill and, where wanted, a file to write to."""

    def __init__(self, kernel: Any, line: bytes = b"PUB t", size: int = 4_096, file: int = -1) -> None:
        self.kernel = kernel
        self.block = kernel.Block(size, BASE)
        self.data = bytearray(4_096)
        self.intake = kernel.Intake(self.data, line, b"OK", 100, 500 if line.startswith(b"MPUB") else 0)
        self.file = file
        self.offset = 0

    def run(
        self,
        fds: list[int],
        start: int = 0,
        *,
        write_at: int = 1_000,
        budget: int = 2_000,
        room: int = 0,
        answer: bool = False,
    ) -> tuple[int, list[int]]:
        """How it ended, and how many messages each socket brought."""
        counts = [0] * len(fds)
        tail = self.kernel.Tail(PREFIX, write_at)
        tail.block, tail.room, tail.seq, tail.budget = self.block, room, BASE + self.block.count, budget
        tail.file, tail.offset, tail.salt, tail.answer = self.file, self.offset, SALT, answer
        status = self.intake.run(tail, fds, counts, start, 1)
        self.offset += self.intake.wrote
        return status, counts

    @property
    def other(self) -> bytes:
        """What a socket brought that was something else."""
        return bytes(self.data[: self.intake.size])

    @property
    def frames(self) -> bytes:
        return bytes(self.block.view[: self.block.used])


SALT = 0x5A17_5A17


def pub(body: bytes) -> bytes:
    return b"PUB t\n" + len(body).to_bytes(4, "big") + body


def mpub(*bodies: bytes) -> bytes:
    return encode_mpub(b"t", bodies)


def test_batches_are_taken_from_sockets(kernel: Any, pairs: Pairs) -> None:
    fds = [one.fileno() for one, _ in pairs[:3]]
    pairs[0][1].send(mpub(b"a", b"bb", b"ccc"))
    pairs[1][1].send(mpub(b"d"))
    pairs[2][1].send(pub(b"not a batch"))
    desk = Desk(kernel, b"MPUB t")
    assert desk.run(fds) == (kernel.OTHER, [3, 1, 0])
    assert (desk.intake.index, desk.other) == (2, pub(b"not a batch"))
    bodies = [b"a", b"bb", b"ccc", b"d"]
    assert desk.frames == b"".join(frame(BASE + n, body) for n, body in enumerate(bodies))
    assert desk.intake.unanswered == [0, 1]


def test_nothing_is_read_once_enough_was_made(kernel: Any, pairs: Pairs) -> None:
    fds = [one.fileno() for one, _ in pairs]
    for _, other in pairs:
        other.send(pub(b"x" * 50))
    desk = Desk(kernel)
    assert desk.run(fds, write_at=100) == (kernel.FULL, [1, 1, 0, 0, 0])
    assert desk.run(fds, desk.intake.index) == (kernel.ALL, [0, 0, 1, 1, 1])


def test_nothing_is_read_into_a_block_that_is_nearly_full(kernel: Any, pairs: Pairs) -> None:
    pairs[0][1].send(pub(b"x"))
    desk = Desk(kernel)
    assert desk.run([pairs[0][0].fileno()], room=4_097) == (kernel.FULL, [0])
    assert desk.run([pairs[0][0].fileno()], room=4_096) == (kernel.FULL, [1])


def test_a_batch_that_the_block_has_no_room_for_is_left_to_the_session(kernel: Any, pairs: Pairs) -> None:
    pairs[0][1].send(mpub(b"x" * 50, b"y" * 50))
    desk = Desk(kernel, b"MPUB t", size=100)
    assert desk.run([pairs[0][0].fileno()]) == (kernel.OTHER, [0])
    assert (desk.block.count, desk.block.used) == (0, 0)
    assert desk.other == mpub(b"x" * 50, b"y" * 50)


def test_single_publishes_are_taken_from_sockets(kernel: Any, pairs: Pairs) -> None:
    fds = [one.fileno() for one, _ in pairs]
    for number in (0, 1, 3):
        pairs[number][1].send(pub(b"body %d" % number))
    pairs[4][1].send(b"NOP\n")
    desk = Desk(kernel)
    assert desk.run(fds) == (kernel.OTHER, [1, 1, 0, 1, 0])
    assert (desk.intake.index, desk.other) == (4, b"NOP\n")
    expected = [frame(BASE, b"body 0"), frame(BASE + 1, b"body 1"), frame(BASE + 2, b"body 3")]
    assert desk.frames == b"".join(expected)


@pytest.mark.parametrize(
    "other",
    [
        b"PUB u\n\0\0\0\1x",
        b"PUB t\n\0\0\0\2x",
        b"PUB t\n\0\0\0\1xx",
        b"PUB t\n\0\0\0\0",
        b"PUB t\n\xff\xff\xff\xff",
        b"PUB t\n\0\0\0\x65" + b"x" * 101,
        b"PUB t \n\0\0\0\1x",
        b"PUB t",
        b"P",
        mpub(b"x", b"y")[:-1],
        mpub(b"x", b"y") + b"z",
        mpub(b"x", b"y" * 101),
        mpub(b"x", b""),
        mpub(*[b"x" * 90] * 6),
        mpub(),
        b"MPUB t\n\0\0\0\x0d\0\0\0\x03\0\0\0\1x\0\0\0\1y",
        b"MPUB t\n\0\0\0\x0d\xff\xff\xff\xff\0\0\0\1x",
        b"MPUB t\n\xff\xff\xff\xff\0\0\0\1\0\0\0\1x",
    ],
)
def test_anything_else_is_left_to_the_session(kernel: Any, pairs: Pairs, other: bytes) -> None:
    pairs[0][1].send(other)
    desk = Desk(kernel, other[: other.index(b" ")] + b" t" if b" " in other else b"PUB t")
    assert desk.run([pairs[0][0].fileno()], answer=True) == (kernel.OTHER, [0])
    assert desk.other == other
    assert desk.block.count == 0


def test_an_ended_stream_and_a_full_block_stop_the_walk(kernel: Any, pairs: Pairs) -> None:
    fds = [one.fileno() for one, _ in pairs]
    pairs[0][1].send(pub(b"x" * 50))
    pairs[1][1].send(pub(b"y" * 50))
    desk = Desk(kernel, size=100)
    assert desk.run(fds[:2]) == (kernel.OTHER, [1, 0])
    assert desk.other == pub(b"y" * 50), "what was read is not lost"
    pairs[2][1].close()
    assert desk.run(fds, 2)[0] == kernel.OTHER
    assert (desk.intake.index, desk.intake.size) == (2, 0)
    closed = os.dup(0)
    os.close(closed)
    assert desk.run([closed])[0] == kernel.OTHER
    assert desk.intake.size < 0


def test_publishes_are_written_as_records_and_answered(kernel: Any, pairs: Pairs, tmp_path: Path) -> None:
    with open(tmp_path / "segment", "w+b") as file:
        desk = Desk(kernel, file=file.fileno())
        for _, other in pairs[:3]:
            other.send(pub(b"x" * 50))
        # -1 is nobody; the last has nothing to say.
        fds = [pairs[0][0].fileno(), -1, *(one.fileno() for one, _ in pairs[1:4])]
        assert desk.run(fds, write_at=100, answer=True) == (kernel.ALL, [1, 0, 1, 1, 0])
        assert (desk.intake.unanswered, desk.intake.left) == ([], [])
        assert [other.recv(10) for _, other in pairs[:3]] == [b"OK"] * 3
        data = file.read()
    found = list(read_records(data, SALT, 0, 0, True))
    assert [(entry.seq, entry.count) for entry in found if isinstance(entry, Entry)] == [(BASE, 2), (BASE + 2, 1)]
    assert len(found) == 2 and desk.intake.wrote == len(data)
    assert b"".join(data[e.frames_at : e.offset + e.size] for e in found if isinstance(e, Entry)) == desk.frames


def test_those_that_are_answered_are_read_again_up_to_a_limit(kernel: Any, pairs: Pairs) -> None:
    (one, other), (quiet, _) = pairs[:2]
    desk = Desk(kernel)
    for _ in range(3):
        # Sent one behind the other a stream would bring them in one read: each comes alone over this kind of socket.
        other.send(pub(b"x" * 50))
        assert desk.run([quiet.fileno(), one.fileno()], answer=True) == (kernel.ALL, [0, 1])
        assert other.recv(10) == b"OK"
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with left, right:
        left.setblocking(False)
        for _ in range(4):
            right.send(pub(b"x" * 50))
        assert desk.run([left.fileno()], write_at=50, budget=200, answer=True) == (kernel.FULL, [3])
        assert desk.run([left.fileno()], write_at=50, budget=200, answer=True) == (kernel.ALL, [1])
        assert [right.recv(10) for _ in range(4)] == [b"OK"] * 4


def test_what_cannot_be_written_is_not_answered(kernel: Any, pairs: Pairs, tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.touch()
    with open(path, "rb") as file:
        desk = Desk(kernel, file=file.fileno())
        pairs[0][1].send(pub(b"x"))
        assert desk.run([pairs[0][0].fileno()], answer=True) == (kernel.FAILED, [1])
        assert (desk.intake.unanswered, desk.intake.error) == ([0], errno.EBADF)
        assert (desk.intake.unwritten, desk.intake.wrote) == (0, 0)
        with pytest.raises(BlockingIOError):
            pairs[0][1].recv(10)


def test_an_answer_that_a_socket_does_not_take_is_reported(kernel: Any, pairs: Pairs) -> None:
    one, other = pairs[0]
    while True:
        try:
            one.send(bytes(65_536))
        except BlockingIOError:
            break
    other.send(pub(b"x"))
    desk = Desk(kernel)
    assert desk.run([one.fileno()], answer=True) == (kernel.ALL, [1])
    assert desk.intake.left == [(0, 0)]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1_023, 3_071, 3_072, 3_073, 50_000])
def test_a_checksum_is_crc_32c(kernel: Any, size: int) -> None:
    data = random.Random(size).randbytes(size + 3)
    block = kernel.Block(0, BASE, bytearray(data))
    assert block.checksum(0, 0, size) == google_crc32c.extend(0, data[:size])
    assert block.checksum(SALT, 3, size + 3) == google_crc32c.extend(SALT, data[3:])
    with pytest.raises(ValueError, match="checksum"):
        block.checksum(0, 0, size + 4)


def test_new_memory_stays_zero_when_pages_are_put_behind_it(kernel: Any) -> None:
    memory = mmap(-1, 65_536)
    kernel.populate([memory])
    assert bytes(memory) == bytes(65_536)


def test_a_frame_is_sent_to_each_socket(kernel: Any, pairs: Pairs) -> None:
    fds = [one.fileno() for one, _ in pairs]
    assert kernel.send_each(fds, b"frame") == []
    assert [other.recv(100) for _, other in pairs] == [b"frame"] * 5
    while True:
        try:
            pairs[1][0].send(bytes(65_536))
        except BlockingIOError:
            break
    assert kernel.send_each(fds, b"x" * 100_000)[0] in [(0, n) for n in range(100_000)] + [(1, 0)]
    left = dict(kernel.send_each(fds[1:2], b"frame"))
    assert left == {0: 0}


# --- Ring -------------------------------------------------------------------------------------------------------------


class RingMachine(RuleBasedStateMachine):
    """Against a plain dict of who holds what, and a list of what was finished."""

    kernel: Any

    def __init__(self) -> None:
        super().__init__()
        self.ring = self.kernel.Ring()
        self.ring.reset(BASE)
        self.held: dict[int, int] = {}
        self.next = BASE
        self.finished: list[int] = []

    @rule(gap=st.sampled_from([0, 0, 0, 1, 70]), count=st.integers(1, 100), owner=st.integers(1, 3))
    def deliver(self, gap: int, count: int, owner: int) -> None:
        first = self.next + gap
        self.ring.deliver(first, count, owner)
        self.held |= dict.fromkeys(range(first, first + count), owner)
        self.next = first + count

    @precondition(lambda self: self.held)
    @rule(data=st.data(), owner=st.integers(1, 3))
    def finish_run(self, data: st.DataObject, owner: int) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=30))
        text = bytearray(b"".join(b"FIN %016x\n" % (PREFIX | seq) for seq in seqs))
        good = 0
        for seq in seqs:
            if self.held.get(seq) != owner:
                break
            del self.held[seq]
            self.finished.append(seq)
            good += 1
        assert self.ring.finish_run(text, 0, len(text), owner, PREFIX) == 21 * good
        assert self.ring.finished == good

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.held)))
        self.ring.release(seq)
        del self.held[seq]

    @rule(seq=st.integers(BASE - 5, BASE + 500))
    def look(self, seq: int) -> None:
        assert self.ring.owner(seq) == self.held.get(seq, 0)
        if seq not in self.held:
            with pytest.raises(ValueError, match="nobody holds"):
                self.ring.release(seq)

    @rule(first=st.integers(0, 50), size=st.integers(1, 50))
    def add_done(self, first: int, size: int) -> None:
        self.ring.add_done(first, first + size)
        self.finished += range(first, first + size)

    @rule()
    def take_done(self) -> None:
        pairs = array("q", self.ring.take_done())
        found = [seq for i in range(0, len(pairs), 2) for seq in range(pairs[i], pairs[i + 1])]
        assert found == self.finished
        self.finished = []
        assert self.ring.take_done() == b""

    @rule()
    def reset(self) -> None:
        self.next += 10
        self.ring.reset(self.next)
        self.held.clear()

    @invariant()
    def is_the_same(self) -> None:
        assert self.ring.count == len(self.held)
        assert self.ring.hi <= self.next
        assert self.ring.window == self.ring.hi - self.ring.lo
        assert dict(self.ring.held(self.ring.lo, self.ring.hi)) == self.held
        for first in (self.ring.lo - 3, self.ring.lo + 1, self.ring.hi - 2):
            assert self.ring.holds(first, first + 3) == any(first <= seq < first + 3 for seq in self.held)
        if self.held:
            assert self.ring.lo <= min(self.held)


def test_a_run_is_sent_and_its_fins_are_read_back(kernel: Any, pairs: Pairs) -> None:
    one, other = pairs[0]
    block = filled(kernel, [b"a", b"bb", b"ccc"])
    ring = kernel.Ring()
    ring.reset(BASE)
    assert ring.send_run(block, BASE, 2, 1_000, 7, one.fileno()) == 2
    assert (ring.sent, ring.count, ring.owner(BASE + 1)) == (block.stop - block.start, 2, 7)
    assert other.recv(1_000) == frame(BASE, b"a") + frame(BASE + 1, b"bb")
    assert ring.send_run(block, BASE + 2, 2, 1_000, 7, -1) == 1, "nowhere to send it to: that is the caller's business"
    assert (ring.sent, ring.count) == (0, 3)
    data = bytearray(1_000)
    fin = b"FIN %016x\n"
    other.send(fin % (PREFIX | BASE) + fin % (PREFIX | (BASE + 2)) + b"NOP\n")
    assert ring.finish_from_socket(one.fileno(), data, 7, PREFIX) == 42
    assert (ring.finished, ring.received, bytes(data[42:46])) == (2, 46, b"NOP\n")
    assert ring.finish_from_socket(one.fileno(), data, 7, PREFIX) == 0
    assert (ring.finished, ring.received) == (0, kernel.NOTHING)
    other.close()
    assert ring.finish_from_socket(one.fileno(), data, 7, PREFIX) == 0
    assert (ring.finished, ring.received) == (0, 0)


def test_a_run_that_would_make_the_window_too_wide_is_not_sent(kernel: Any, pairs: Pairs) -> None:
    ring = kernel.Ring()
    ring.limit = 100
    ring.deliver(BASE, 1, 7)
    block = kernel.Block(4_096, BASE + 102)
    data = records(b"far")
    block.fill(data, 0, len(data), 1, PREFIX | (BASE + 102), 1, 1, 100)
    one, other = pairs[0]
    assert ring.send_run(block, BASE + 102, 1, 1_000, 7, one.fileno()) == 0
    assert ring.count == 1
    with pytest.raises(BlockingIOError):
        other.recv(10)
    ring.release(BASE)
    assert ring.send_run(block, BASE + 102, 1, 1_000, 7, one.fileno()) == 1


def test_the_ring_knows_who_holds_what(kernel: Any) -> None:
    run_state_machine_as_test(type("Machine", (RingMachine,), {"kernel": kernel}))


@pytest.mark.parametrize(
    "line",
    [
        b"FIN %016x\r" % (PREFIX | BASE),
        b"FIN %016X\n" % (PREFIX | (BASE + 0xAB)),
        b"fin %016x\n" % (PREFIX | BASE),
        b"FIN  %015x\n" % BASE,
        b"FIN +%015x\n" % BASE,
        b"FIN 0x%014x\n" % BASE,
        b"FIN %07x_%08x\n" % (0, BASE),
        b"FIN %016x\n" % BASE,
        b"FIN %016x\n" % (PREFIX ^ (1 << 54) | BASE),
        b"FIN %016x\n" % (PREFIX | (BASE + 5_000)),
        b"FIN %016x\n" % (PREFIX | (BASE - 1)),
        b"FIN ffffffffffffffff\n",
        b"FIN %016x" % (PREFIX | BASE),
        b"TOUCH %014x\n" % BASE,
    ],
)
def test_only_a_usual_fin_is_applied(kernel: Any, line: bytes) -> None:
    """All 16 bytes of the id must match, in lower case."""
    ring = kernel.Ring()
    ring.deliver(BASE, 1_000, 7)
    data = bytearray(b"FIN %016x\n" % (PREFIX | (BASE + 1)) + line)
    assert ring.finish_run(data, 0, len(data), 7, PREFIX) == 21
    assert (ring.finished, ring.count) == (1, 999)


def test_many_single_fins_widen_the_list_of_what_is_finished(kernel: Any) -> None:
    ring = kernel.Ring()
    ring.deliver(BASE, 3_000, 7)
    data = bytearray(b"".join(b"FIN %016x\n" % (PREFIX | seq) for seq in range(BASE, BASE + 3_000, 2)))
    assert ring.finish_run(data, 0, len(data), 7, PREFIX) == len(data)
    pairs = array("q", ring.take_done())
    assert list(pairs[::2]) == list(range(BASE, BASE + 3_000, 2))
    assert ring.count == 1_500


def test_a_ring_refuses_what_would_break_it(kernel: Any) -> None:
    ring = kernel.Ring()
    ring.deliver(BASE, 10, 7)
    with pytest.raises(ValueError, match="before the window's end"):
        ring.deliver(BASE + 9, 1, 7)
    with pytest.raises(ValueError, match="does not lie in the buffer"):
        ring.finish_run(bytearray(21), 0, 22, 7, PREFIX)
    with pytest.raises(ValueError, match="does not lie in the buffer"):
        ring.finish_run(bytearray(21), -1, 21, 7, PREFIX)


# --- Spans ------------------------------------------------------------------------------------------------------------

#: Where each range begins after the last one's end, and how long it is.
SPANS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=30)
SHIFT = st.integers(0, 20)


def spans(steps: list[tuple[int, int]], shift: int = 0) -> tuple[array[int], array[int]]:
    starts, stops = array("q"), array("q")
    at = shift
    for gap, length in steps:
        starts.append(at + gap)
        at += gap + length
        stops.append(at)
    return starts, stops


def numbers(found: tuple[array[int], array[int]]) -> set[int]:
    return {n for first, stop in zip(*found, strict=True) for n in range(first, stop)}


def is_joined(found: tuple[array[int], array[int]]) -> bool:
    starts, stops = found
    return all(map(lt, starts, stops)) and all(map(lt, stops, starts[1:]))


@given(SPANS, SPANS, SHIFT)
def test_spans_are_sets(kernel: Any, steps: list[tuple[int, int]], others: list[tuple[int, int]], shift: int) -> None:
    one, other = spans(steps), spans(others, shift)
    union = kernel.spans_union(*one, *other)
    assert numbers(union) == numbers(one) | numbers(other)
    assert is_joined(union)
    left = kernel.spans_without(*one, *other)
    assert numbers(left) == numbers(one) - numbers(other)
    assert is_joined(left)
    assert kernel.spans_total(*union) == len(numbers(union))
    seqs = array("q", range(0, 60, 2))
    assert list(kernel.spans_hold(*one, seqs)) == [seq in numbers(one) for seq in seqs]
    assert kernel.spans_of(array("q", sorted(numbers(union)))) == union


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=30))
def test_spans_that_overlap_are_joined_and_those_out_of_order_refused(
    kernel: Any, pairs: list[tuple[int, int]]
) -> None:
    starts, stops = array("q", (a for a, _ in pairs)), array("q", (a + n for a, n in pairs))
    empty = array("q")
    if list(starts) != sorted(starts):
        with pytest.raises(ValueError, match="not in order"):
            kernel.spans_union(starts, stops, empty, empty)
        return
    found = kernel.spans_union(starts, stops, empty, empty)
    assert is_joined(found)
    assert numbers(found) == numbers((starts, stops))


def test_spans_refuse_what_are_none(kernel: Any) -> None:
    one, two = array("q", [1]), array("q", [2, 3])
    for call in (kernel.spans_union, kernel.spans_without):
        with pytest.raises(ValueError, match="as many ends"):
            call(one, two, one, one)
        with pytest.raises(ValueError, match="as many ends"):
            call(one, one, one, two)
    with pytest.raises(ValueError, match="not in order"):
        kernel.spans_of(array("q", [3, 4, 4]))


# --- Heap -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-5, 20), st.integers(0, 40)) | st.none(), max_size=200))
def test_a_heap_gives_the_earliest_first(kernel: Any, steps: list[tuple[int, int] | None]) -> None:
    heap = kernel.Heap()
    model: list[tuple[int, int]] = []
    for step in steps:
        if step is not None:
            heap.push(*step)
            model = sorted([*model, step])
        elif model:
            assert heap.pop() == model.pop(0)[1]
        assert len(heap) == len(model)
        assert sorted(zip(*heap.columns(), strict=True)) == model
        if model:
            assert heap.first_due() == model[0][0]
            assert heap.first_seq() == min(seq for _, seq in model)
            seqs = sorted(seq for _, seq in model)
            middle = seqs[len(seqs) // 2]
            assert heap.first_seq(middle) == middle
            assert heap.count_between(middle, seqs[-1]) == sum(middle <= seq < seqs[-1] for seq in seqs)
            assert sorted(heap.between(middle, seqs[-1])) == sorted(p for p in model if middle <= p[1] < seqs[-1])
    heap.clear()
    assert len(heap) == 0


@given(
    st.dictionaries(st.integers(0, 10_000), st.integers(0, 20), max_size=300),
    st.randoms(use_true_random=False),
    st.integers(0, 40),
)
def test_any_message_can_be_taken_out_of_a_heap(kernel: Any, dues: dict[int, int], random: Any, count: int) -> None:
    heap = kernel.Heap()
    for seq, due in dues.items():
        heap.push(due, seq)
    seqs = sorted(dues)
    random.shuffle(seqs)
    for seq in seqs:
        left = sorted((due, number) for number, due in dues.items())
        after = random.choice([(-1, -1), *left])
        assert heap.earliest(count, *after) == [pair for pair in left if pair > after][:count]
        if left and random.random() < 0.2:
            # In between the earliest goes as usual: the order was kept.
            assert heap.pop() == left[0][1]
            del dues[left[0][1]]
        assert heap.remove(seq) == dues.pop(seq, -1)
        assert heap.remove(seq) == -1
        assert sorted(zip(*heap.columns(), strict=True)) == sorted((due, number) for number, due in dues.items())
    assert len(heap) == 0


def test_an_empty_heap_has_nothing_to_give(kernel: Any) -> None:
    heap = kernel.Heap()
    assert (heap.remove(1), heap.earliest(10, -1, -1)) == (-1, [])
    assert (heap.first_seq(), heap.count_between(0, 100), heap.between(0, 100)) == (-1, 0, [])
    for ask in (heap.pop, heap.first_due):
        with pytest.raises(IndexError):
            ask()
    assert list(zip(*heap.columns(), strict=True)) == []


# --- Records read back ------------------------------------------------------------------------------------------------


def chunk_of(kernel: Any, batches: list[list[bytes]], extra: bytes = b"") -> tuple[bytes, bytes]:
    """Records of these batches as they stand in a file, and their frames."""
    data, frames, seq = b"", b"", BASE
    for bodies in batches:
        block = kernel.Block(1 << 16, seq)
        source = records(*bodies)
        block.fill(source, 0, len(source), len(bodies), PREFIX | seq, 1, 1, 1 << 16)
        head, body = encode_record(Record(block, 0, block.used, seq, len(bodies), extra=extra), SALT)
        data += head + body
        frames += bytes(body)
        seq += len(bodies)
    return data, frames


def test_whole_records_are_gathered_into_a_block(kernel: Any) -> None:
    if not kernel.COMPILED:
        assert kernel.gather(b"", SALT, BASE, BASE) is None, "the interpreter reads them one by one"
        return
    for extra in (b"", b"\0\0\0\7"):
        data, frames = chunk_of(kernel, [[b"a", b"bb"], [b"c" * 4_000], [b"d"] * 70], extra)
        block = kernel.gather(data, SALT, BASE, BASE + 73)
        assert (block.base, block.count, bytes(block.view[: block.used])) == (BASE, 73, frames)
        assert block.cut(BASE + 2, 1, 1 << 16) == 1


def test_anything_unusual_is_not_gathered(kernel: Any) -> None:
    data, _ = chunk_of(kernel, [[b"a", b"bb"], [b"ccc"]])
    assert kernel.gather(data, SALT, BASE, BASE + 4) is None
    assert kernel.gather(data, SALT, BASE + 1, BASE + 3) is None
    assert kernel.gather(data, SALT + 1, BASE, BASE + 3) is None
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        assert kernel.gather(bytes(damaged), SALT, BASE, BASE + 3) is None, at
        assert kernel.gather(data[:at], SALT, BASE, BASE + 3) is None, at


# --- Frames to messages


def test_frames_become_messages_of_the_callers_class(kernel: Any) -> None:
    class Mine(kernel.Delivery):  # type: ignore[name-defined, misc]
        __slots__ = ()

        def __init__(self) -> None:
            raise AssertionError("how a subclass is made is its own business")

    ok = bytes.fromhex("00000006 00000000") + b"OK"
    data = frame(7, b"one", timestamp=5, attempts=65535) + ok + frame(8, b"") + frame(9, b"cut off")[:-1]
    messages: list[Any] = []
    others: list[tuple[int, bytes]] = []
    used = kernel.split_frames(data, 1000, Mine, "source", 2.5, messages, others)
    assert used == len(data) - len(frame(9, b"cut off")) + 1
    assert others == [(0, b"OK")]
    assert [(m.timestamp, m.attempts, m.id, m.body) for m in messages] == [
        (5, 65535, b"%016x" % (PREFIX | 7), b"one"),
        (1, 1, b"%016x" % (PREFIX | 8), b""),
    ]
    assert all(type(m) is Mine for m in messages)
    assert (messages[0].source, messages[0].deadline, messages[0].answered, messages[0].kept) == ("source", 2.5, 0, 0)


def test_a_timestamp_may_be_negative(kernel: Any) -> None:
    data = (30).to_bytes(4, "big") + (2).to_bytes(4, "big") + (-5).to_bytes(8, "big", signed=True) + bytes(18)
    messages: list[Any] = []
    kernel.split_frames(data, 1000, kernel.Delivery, None, 0.0, messages, [])
    assert messages[0].timestamp == -5


@pytest.mark.parametrize(
    ("size", "kind"), [(3, 0), (29, 2), (4, 3), (1001, 0), (0xFFFFFFFF, 0), (0x80000000, 2), (0, 0), (4, 0xFFFFFFFF)]
)
def test_a_frame_that_cannot_be_is_refused(kernel: Any, size: int, kind: int) -> None:
    with pytest.raises(ValueError) as caught:
        kernel.split_frames(size.to_bytes(4, "big") + kind.to_bytes(4, "big"), 1000, kernel.Delivery, None, 0.0, [], [])
    assert caught.value.args == (size, kind)


def test_messages_must_be_deliveries(kernel: Any) -> None:
    with pytest.raises(TypeError):
        kernel.split_frames(b"", 1000, dict, None, 0.0, [], [])


# --- Frames to columns


def columns_of(found: tuple[Any, ...]) -> dict[str, list[Any]]:
    """The columns as lists of Python's own values."""
    rows, _, seqs, stamps, micros, attempts, ids, begins, bodies = found
    ends = array("i", bytes(begins)).tolist()
    assert len(ends) == rows + 1
    return {
        "seq": array("q", bytes(seqs)).tolist(),
        "ns": array("q", bytes(stamps)).tolist(),
        "us": array("q", bytes(micros)).tolist(),
        "attempts": array("i", bytes(attempts)).tolist(),
        "id": [bytes(ids)[16 * n : 16 * n + 16] for n in range(rows)],
        "body": [bytes(bodies)[ends[n] : ends[n + 1]] for n in range(rows)],
    }


@given(
    st.lists(
        st.tuples(st.integers(0, (1 << 54) - 1), st.binary(max_size=40), st.integers(0, 2**62), st.integers(0, 65535)),
        max_size=50,
    ),
    st.integers(1, 60),
    st.integers(0, 400),
    st.integers(0, 80),
)
def test_frames_become_columns(
    kernel: Any, messages: list[tuple[int, bytes, int, int]], max_rows: int, max_bytes: int, cut: int
) -> None:
    whole = b"".join(frame(seq, body, stamp, tries) for seq, body, stamp, tries in messages)
    data = b"xyz" + whole
    stop = max(3, len(data) - cut)
    expected = []
    at, total = 3, 0
    for message in messages:
        size = len(message[1])
        if at + 34 + size > stop or len(expected) == max_rows or (expected and total + size > max_bytes):
            break
        expected.append(message)
        at += 34 + size
        total += size
    for buffer in (data, bytearray(data), memoryview(data)):
        found = kernel.frame_columns(buffer, 3, stop, max_rows, max_bytes)
        assert found[:2] == (len(expected), at)
        assert columns_of(found) == {
            "seq": [seq for seq, _, _, _ in expected],
            "ns": [stamp for _, _, stamp, _ in expected],
            "us": [stamp // 1000 for _, _, stamp, _ in expected],
            "attempts": [tries for _, _, _, tries in expected],
            "id": [b"%016x" % (PREFIX | seq) for seq, _, _, _ in expected],
            "body": [body for _, body, _, _ in expected],
        }


def test_columns_end_where_another_frame_stands(kernel: Any) -> None:
    heartbeat = bytes.fromhex("0000000f 00000000") + b"_heartbeat_"
    data = frame(7, b"one") + heartbeat + frame(8, b"two")
    rows, pos, *_ = kernel.frame_columns(data, 0, len(data), 10, 100)
    assert (rows, pos) == (1, len(frame(7, b"one")))
    assert kernel.frame_columns(data, pos, len(data), 10, 100)[:2] == (0, pos)


def test_columns_of_ids_that_are_not_ours_and_of_times_before_the_epoch(kernel: Any) -> None:
    head = (31).to_bytes(4, "big") + (2).to_bytes(4, "big") + (-1500).to_bytes(8, "big", signed=True) + bytes(2)
    ids = [b"0123456789ABCDEF", b"0123456789abcdeg", b"0x23456789abcdef", b"ffffffffffffffff", b"________________"]
    found = columns_of(kernel.frame_columns(b"".join(head + id + b"b" for id in ids), 0, 35 * 5, 10, 100))
    assert found["seq"] == [-1, -1, -1, (1 << 54) - 1, -1]
    assert (found["id"], found["ns"][0], found["us"][0]) == (ids, -1500, -2)


@pytest.mark.parametrize(("size", "kind"), [(3, 0), (29, 2), (0x80000000, 2), (0xFFFFFFFF, 0), (0, 0)])
def test_a_frame_that_cannot_be_has_no_columns(kernel: Any, size: int, kind: int) -> None:
    data = frame(7, b"one") + size.to_bytes(4, "big") + kind.to_bytes(4, "big")
    with pytest.raises(ValueError, match=f"a frame of {size} bytes"):
        kernel.frame_columns(data, 0, len(data), 10, 100)


@pytest.mark.parametrize(("pos", "stop", "rows", "size"), [(-1, 3, 1, 1), (0, 4, 1, 1), (2, 1, 1, 1), (0, 3, 0, 1)])
def test_columns_outside_the_buffer_are_refused(kernel: Any, pos: int, stop: int, rows: int, size: int) -> None:
    with pytest.raises(ValueError, match="does not lie in the buffer"):
        kernel.frame_columns(b"abc", pos, stop, rows, size)


# --- The table of system calls ----------------------------------------------------------------------------------------


@pytest.fixture
def replaced(kernel: Any) -> Iterator[Any]:
    """A table in the place of libc: it writes down its calls, and its answers can be told beforehand."""

    class Recorder(kernel.Calls):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.made: list[tuple[Any, ...]] = []
            self.answers: dict[str, Any] = {}

        def _answer(self, name: str, real: Any) -> Any:
            answer = self.answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return real() if answer is None else answer

        def recv(self, fd: int, view: memoryview) -> int:
            self.made.append(("recv", fd, len(view)))
            return int(self._answer("recv", lambda: kernel.Calls.recv(self, fd, view)))

        def send(self, fd: int, view: bytes | memoryview) -> int:
            self.made.append(("send", fd, bytes(view)))
            return int(self._answer("send", lambda: kernel.Calls.send(self, fd, view)))

        def pwritev(self, fd: int, parts: list[bytes | memoryview], offset: int) -> int:
            self.made.append(("pwritev", fd, b"".join(parts), offset))
            return int(self._answer("pwritev", lambda: kernel.Calls.pwritev(self, fd, parts, offset)))

    table = Recorder()
    before = kernel.replace_calls(table)
    yield table
    assert kernel.replace_calls(before) is table


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    with here, there:
        yield here, there


def taken(kernel: Any, here: socket.socket, file: int, block: Any) -> tuple[int, Any]:
    intake = kernel.Intake(bytearray(1 << 12), b"PUB t", b"OK", 1 << 10, 0)
    tail = kernel.Tail(PREFIX, 1 << 10)
    tail.block, tail.seq, tail.budget = block, BASE, 1
    tail.file, tail.offset, tail.salt, tail.answer = file, 7, 99, True
    status = intake.run(tail, [here.fileno()], [0], 0, 1)
    return status, intake


def test_publishes_go_through_the_table(
    kernel: Any, replaced: Any, pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    here, there = pair
    there.send(b"PUB t\n\0\0\0\x05hello")
    with open(tmp_path / "file", "wb") as file:
        block = kernel.Block(1 << 10, BASE)
        status, intake = taken(kernel, here, file.fileno(), block)
        assert status == kernel.FULL and intake.wrote == 44 + block.used
        record = (tmp_path / "file").read_bytes()[7:]
        assert replaced.made == [
            ("recv", here.fileno(), 1 << 12),
            ("pwritev", file.fileno(), record, 7),
            ("send", here.fileno(), b"OK"),
        ]
    assert there.recv(100) == b"OK"
    assert [entry.seq for entry in read_records(record, 99, 0, 7, True)] == [BASE]


def test_deliveries_and_finishes_go_through_the_table(
    kernel: Any, replaced: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    here, there = pair
    block, ring = filled(kernel, [b"a", b"bc"]), kernel.Ring()
    assert ring.send_run(block, BASE, 10, 1 << 20, 5, here.fileno()) == 2
    frames = there.recv(1000)
    assert frames == bytes(block.view[: block.used]) and ring.sent == len(frames)
    there.send(b"FIN %016x\n" % (PREFIX | BASE))
    data = bytearray(100)
    assert ring.finish_from_socket(here.fileno(), data, 5, PREFIX) == 21
    assert ring.finish_from_socket(here.fileno(), data, 5, PREFIX) == 0 and ring.received == kernel.NOTHING
    assert kernel.send_each([here.fileno()], b"all") == []
    assert replaced.made == [
        ("send", here.fileno(), frames),
        ("recv", here.fileno(), 100),
        ("recv", here.fileno(), 100),
        ("send", here.fileno(), b"all"),
    ]


class _Sockets:
    """A table for any number of sockets: what each still takes, what it was sent, what it brings when it is read."""

    def __init__(self, kernel: Any, room: list[int], brings: list[bytes | int]) -> None:
        outer = self
        self.sent = [b""] * len(room)
        self.room, self.brings = room, brings

        class Table(kernel.Calls):  # type: ignore[name-defined,misc]
            def send(self, fd: int, view: bytes | memoryview) -> int:
                taken = min(len(view), outer.room[fd])
                outer.sent[fd] += bytes(view[:taken])
                outer.room[fd] -= taken
                return taken or -errno.EAGAIN

            def recv(self, fd: int, view: memoryview) -> int:
                brought = outer.brings[fd]
                if isinstance(brought, int):
                    return brought
                view[: len(brought)] = brought
                return len(brought)

        self.kernel, self.table = kernel, Table()

    def __enter__(self) -> _Sockets:
        self._before = self.kernel.replace_calls(self.table)
        return self

    def __exit__(self, *_: object) -> None:
        self.kernel.replace_calls(self._before)


@settings(max_examples=500)
@given(bodies_of_any_size, st.data())
def test_runs_to_several_sockets_are_those_that_would_be_sent_one_by_one(
    kernel: Any, bodies: list[bytes], draw: st.DataObject
) -> None:
    block = filled(kernel, bodies)
    sockets = draw.draw(st.integers(1, 12))
    most = draw.draw(st.sampled_from([1, 3, 40]))
    limits = draw.draw(st.lists(st.integers(1, most), min_size=sockets, max_size=sockets))
    room = draw.draw(st.lists(st.sampled_from([0, 1, 40, 100, 1 << 20, 1 << 20]), min_size=sockets, max_size=sockets))
    first = BASE + draw.draw(st.integers(0, len(bodies) - 1))
    stop = draw.draw(st.integers(first + 1, BASE + len(bodies) + 5))
    most, budget = draw.draw(st.sampled_from([40, 300, 1 << 18])), draw.draw(st.sampled_from([1, 500, 1 << 20]))
    owners = [100 + i for i in range(sockets)]
    ring, counts = kernel.Ring(), []
    ring.limit = draw.draw(st.sampled_from([1, 100, 1_000]))
    held = draw.draw(st.sampled_from([0, 1, 300]))
    if draw.draw(st.booleans()):
        # Somebody has held a message for long: the window becomes too wide for the next run, or for one after it.
        held, ring.limit = 100 - draw.draw(st.integers(0, 6)), 100
        limits, room = [1] * sockets, [1 << 20] * sockets
    if held:
        ring.deliver(first - held, 1, 99)
    with _Sockets(kernel, list(room), [0] * sockets) as found:
        size = ring.send_each(block, first, stop, limits, most, budget, owners, list(range(sockets)), counts)
    left = block.stop - block.start - ring.sent if counts else 0
    end = block.stop
    # The same by single runs.
    single, wanted, total, seq = kernel.Ring(), [], 0, first
    single.limit = ring.limit
    if held:
        single.deliver(first - held, 1, 99)
    with _Sockets(kernel, list(room), [0] * sockets) as expected:
        for i in range(sockets):
            if seq >= min(stop, BASE + len(bodies)) or total >= budget:
                break
            count = single.send_run(block, seq, min(limits[i], stop - seq), most, owners[i], i)
            if not count:
                break
            wanted.append(count)
            seq += count
            total += block.stop - block.start
            if single.sent != block.stop - block.start:
                break
    assert (counts, size, found.sent) == (wanted, total, expected.sent)
    assert (ring.lo, ring.hi, ring.count) == (single.lo, single.hi, single.count)
    assert [ring.owner(n) for n in range(first, seq)] == [single.owner(n) for n in range(first, seq)]
    if counts:
        # Nothing is missing but what the last socket did not take, and the block says where that is.
        assert b"".join(found.sent) + bytes(block.view[end - left : end]) == bytes(
            block.view[block.find(first) :][:size]
        )


@given(
    st.lists(st.lists(st.sampled_from(["fin", "other's", "NOP\n", "part"]), max_size=5), min_size=1, max_size=8),
    st.data(),
)
def test_fins_of_several_sockets_are_applied_up_to_the_first_that_brings_something_else(
    kernel: Any, scripts: list[list[str]], draw: st.DataObject
) -> None:
    held = 6
    block = filled(kernel, [b"x"] * (held * len(scripts)))
    ring = kernel.Ring()
    for i in range(len(scripts)):
        ring.deliver(BASE + held * i, held, 100 + i)
    fin = b"FIN %016x\n"
    brings: list[bytes | int] = []
    expected: list[int] = []
    read = 0
    for i, script in enumerate(scripts):
        own, text, done, usual = BASE + held * i, b"", 0, True
        for word in script:
            if word == "fin":
                text += fin % (PREFIX | own)
                own, done = own + 1, done + usual
                continue
            usual = False
            text += {"other's": fin % (PREFIX | 7), "NOP\n": b"NOP\n", "part": b"FIN 00"}[word]
        brings.append(text or draw.draw(st.sampled_from([0, -errno.EAGAIN, -errno.ECONNRESET])))
        if read == i and len(expected) == i:
            expected.append(done)
            read += bool(text) and usual
    data, counts = bytearray(4_096), []
    owners, fds = [100 + i for i in range(len(scripts))], list(range(len(scripts)))
    with _Sockets(kernel, [0] * len(scripts), brings):
        assert ring.finish_each(fds, owners, data, PREFIX, counts) == read
    assert counts == expected
    assert ring.count == held * len(scripts) - sum(expected)
    if read < len(scripts):
        brought = brings[read]
        if isinstance(brought, int):
            nothing = brought == -errno.EAGAIN
            assert (ring.received, ring.taken) == (kernel.NOTHING if nothing else brought, 0)
        else:
            assert (ring.received, ring.taken) == (len(brought), 21 * expected[read])
            assert bytes(data[: len(brought)]) == brought
    assert block.count == held * len(scripts)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR, errno.ECONNRESET, errno.EBADF])
def test_errors_of_the_table_are_errors_of_the_socket(
    kernel: Any, replaced: Any, pair: tuple[socket.socket, socket.socket], error: int
) -> None:
    replaced.answers = {"recv": -error, "send": -error}
    here, _ = pair
    nothing = error in (errno.EAGAIN, errno.EINTR)
    status, intake = taken(kernel, here, -1, kernel.Block(1 << 10, BASE))
    assert (status, intake.size) == (kernel.ALL if nothing else kernel.OTHER, -error)
    ring = kernel.Ring()
    assert ring.finish_from_socket(here.fileno(), bytearray(100), 5, PREFIX) == 0
    assert ring.received == (kernel.NOTHING if nothing else -error)
    assert kernel.send_each([here.fileno()], b"all") == [(0, 0)]
    assert ring.send_run(filled(kernel, [b"a"]), BASE, 1, 100, 5, here.fileno()) == 1 and ring.sent == 0


@pytest.mark.parametrize(("answer", "error"), [(-errno.EIO, errno.EIO), (20, errno.ENOSPC), (0, errno.ENOSPC)])
def test_a_write_that_the_table_fails_or_cuts_short_is_not_answered(
    kernel: Any, replaced: Any, pair: tuple[socket.socket, socket.socket], answer: int, error: int
) -> None:
    here, there = pair
    there.send(b"PUB t\n\0\0\0\x05hello")
    replaced.answers = {"pwritev": answer}
    status, intake = taken(kernel, here, 1 << 20, kernel.Block(1 << 10, BASE))
    assert (status, intake.error, intake.unanswered, intake.wrote) == (kernel.FAILED, error, [0], 0)
    assert [call[0] for call in replaced.made] == ["recv", "pwritev"]


@pytest.mark.parametrize("name", ["recv", "send", "pwritev"])
def test_what_an_entry_raises_is_recorded_and_counts_as_an_error(
    kernel: Any, replaced: Any, pair: tuple[socket.socket, socket.socket], name: str
) -> None:
    here, there = pair
    there.send(b"PUB t\n\0\0\0\x05hello")
    failure = KeyboardInterrupt(name)
    replaced.answers = {"pwritev": 44 + 34 + 5, name: failure}
    status, intake = taken(kernel, here, 1 << 20, kernel.Block(1 << 10, BASE))
    assert replaced.failures == [failure]
    expected = {"recv": (kernel.OTHER, -errno.EIO), "send": (kernel.FULL, 15), "pwritev": (kernel.FAILED, 15)}
    assert (status, intake.size) == expected[name]
    assert intake.left == ([(0, 0)] if name == "send" else [])


def test_without_a_table_calls_go_to_libc(
    kernel: Any, replaced: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    here, there = pair
    assert kernel.replace_calls(None) is replaced
    assert kernel.send_each([here.fileno()], b"all") == []
    assert there.recv(100) == b"all" and replaced.made == []
    kernel.replace_calls(replaced)


#: The module with the table of system calls.
TABLE_OWNER = "lane"
# Of this Python: those of others may stand beside them.
EXTENSIONS = sorted((Path(flintmq.__file__).parent / "kernel").glob("*" + importlib.machinery.EXTENSION_SUFFIXES[0]))


@pytest.mark.skipif(not EXTENSIONS, reason="the kernel was not compiled")
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_only_the_extension_with_the_table_makes_system_calls() -> None:
    """The table is a static struct: an extension that called libc by itself, or had its own copy, would escape it."""
    makes_calls = []
    for path in EXTENSIONS:
        found = subprocess.run(["nm", "-D", "-u", path], capture_output=True, text=True, check=True).stdout
        symbols = {line.split()[-1].partition("@")[0] for line in found.splitlines()}
        if symbols & {
            "recv",
            "recvfrom",
            "send",
            "sendto",
            "sendmsg",
            "write",
            "writev",
            "pwrite64",
            "pwritev",
            "pwritev64",
        }:
            makes_calls.append(path.name.partition(".")[0])
    assert makes_calls == [TABLE_OWNER]


def test_both_forms_have_the_same_layout() -> None:
    folder = Path(flintmq.kernel.__file__).parent
    in_c = dict(re.findall(r"^    (\w+) = (\d+)$", (folder / "layout.pxd").read_text(), re.MULTILINE))
    in_python = {name: str(value) for name, value in vars(layout).items() if name.isupper()}
    assert in_c == in_python


def test_the_layout_is_that_of_a_frame() -> None:
    whole = frame(BASE, b"body", timestamp=77, attempts=3)
    assert whole[layout.TYPE_AT : layout.TIMESTAMP_AT] == layout.TYPE_MESSAGE.to_bytes(4, "big")
    assert whole[layout.TIMESTAMP_AT : layout.ATTEMPTS_AT] == (77).to_bytes(8, "big")
    assert whole[layout.ATTEMPTS_AT : layout.ID_AT] == (3).to_bytes(2, "big")
    assert whole[layout.ID_AT : layout.BODY_AT] == b"%016x" % (PREFIX | BASE)
    assert whole[layout.BODY_AT :] == b"body" and len(whole) == layout.FRAME_OVERHEAD + 4


# --- Records of a segment file ----------------------------------------------------------------------------------------


@st.composite
def segment_files(draw: st.DrawFn) -> tuple[bytes, int]:
    """The records of a file, some deferred, some with extra bytes, some damaged; and a seq up to which to read."""
    data, seq = b"", BASE
    for _ in range(draw(st.integers(0, 12))):
        bodies = draw(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3))
        block = filled(flintmq.kernel, bodies)
        flags = draw(st.sampled_from([0, 0, 1, 1, 2, 4, 4, 5, 6]))
        delay, started = (draw(st.integers(0, 1 << 31)), draw(st.integers(0, 1 << 62))) if flags & 2 else (0, 0)
        extra = draw(st.sampled_from([b"", b"", b"", b"extra"]))
        record = Record(block, 0, block.used, seq, len(bodies), flags, delay, started, extra)
        encoded = bytearray(b"".join(encode_record(record, SALT)))
        if draw(st.integers(0, 9)) == 0:
            encoded[draw(st.integers(0, len(encoded) - 1))] ^= 1
        data += encoded
        seq += len(bodies) + draw(st.sampled_from([0, 0, 0, 0, 5]))
    data = data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data
    return data, draw(st.integers(BASE, seq + 1))


@given(segment_files(), st.integers(1, 400), st.integers(0, 1 << 40))
def test_records_are_parsed_up_to_the_first_that_does_not_follow(
    kernel: Any, file: tuple[bytes, int], step: int, offset: int
) -> None:
    data, stop = file
    parser = kernel.RecordParser(SALT, BASE, stop, step)
    at, seq, indexed = 0, BASE, -1
    index: list[tuple[int, int, int]] = []
    deferrals: list[int] = []
    extras: list[tuple[int, int, int, bytes]] = []
    for entry in read_records(data, SALT, 0, offset, True):
        if not isinstance(entry, Entry) or entry.seq != seq or seq + entry.count > stop:
            break
        if indexed < 0 or entry.offset + entry.size - indexed > step:
            indexed = entry.offset
            index.append((entry.seq, entry.offset, entry.timestamp))
        if entry.flags & 2:
            deferrals += [entry.seq, entry.count, entry.started, entry.delay, entry.timestamp]
        if entry.extra:
            extras.append((entry.seq, entry.flags, entry.timestamp, entry.extra))
        at, seq = entry.offset - offset + entry.size, seq + entry.count
    assert parser.parse(data, offset) == at
    assert (parser.seq, parser.indexed, parser.index, list(parser.deferrals)) == (seq, indexed, index, deferrals)
    assert parser.extras == extras
    # It goes on where it is told to, and finds nothing in what is left of it.
    assert parser.parse(data[at:], offset + at) == 0
    assert (parser.seq, list(parser.deferrals), parser.extras) == (seq, [], [])


@given(segment_files())
def test_whole_groups_end_before_the_first_that_is_not_whole(kernel: Any, file: tuple[bytes, int]) -> None:
    data, stop = file
    whole, after = 0, BASE
    seq, inside = BASE, False
    for entry in read_records(data, SALT, 0, 0, True):
        follows = isinstance(entry, Entry) and entry.seq == seq and seq + entry.count <= stop
        if not follows or bool(entry.flags & CONTINUES) != inside:
            break
        seq += entry.count
        inside = bool(entry.flags & MORE)
        if not inside:
            whole, after = entry.offset + entry.size, seq
    assert kernel.whole_groups(data, SALT, BASE, stop) == (whole, after)


@given(segment_files(), st.integers(1, (1 << 32) - 1))
def test_records_get_another_salt_or_are_refused(kernel: Any, file: tuple[bytes, int], salt: int) -> None:
    data, _ = file
    found = list(read_records(data, SALT, 0, 0, True))
    whole = all(isinstance(entry, Entry) for entry in found) and sum(entry.size for entry in found) == len(data)
    copy = kernel.resalted(data, SALT, salt)
    assert (copy is not None) == whole
    if whole:
        assert list(read_records(copy, salt, 0, 0, True)) == found
        assert kernel.resalted(copy, salt, SALT) == data


def test_threads_share_one_arena_in_the_compiled_form_of_a_daemon() -> None:
    """What a thread reads is given back by another one: in arenas of their own that leaves holes."""
    program = """
import threading, sys
from flintmq import kernel
print(kernel.use_one_arena() if sys.argv[1] == "1" else False)
kept = [None] * 4
def fill(i):
    kept[i] = [bytes(100_000) for _ in range(4)]
threads = [threading.Thread(target=fill, args=(i,)) for i in range(4)]
for each in threads: each.start()
for each in threads: each.join()
arenas = [line for line in open("/proc/self/maps") if line.split("-")[0].endswith("000000") and line.startswith("7f")
          and "rw-p 00000000 00:00 0" in line and int(line.split("-")[0], 16) % (64 << 20) == 0]
print(len(arenas))
"""
    found = []
    for wanted in "01":
        command = [sys.executable, "-c", program, wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found.append(done.stdout.split())
    if found[1][0] == "False":
        pytest.skip("interpreted, or no glibc")
    assert int(found[0][1]) > 0 == int(found[1][1])
