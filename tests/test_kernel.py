"""The kernel, in both its forms: every test runs on the interpreted one, and on the compiled one where it was built."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import socket
import sys
from array import array
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import flintmq
from flintmq import _cython
from flintmq.wire import encode_mpub

PREFIX = 513 << 54
BASE = 7_000


def _interpreted() -> ModuleType:
    path = Path(flintmq.__file__).with_name("kernel.py")
    spec = importlib.util.spec_from_file_location("interpreted_kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    real = sys.modules.get("cython")
    sys.modules["cython"] = _cython
    try:
        spec.loader.exec_module(module)
    finally:
        if real is None:
            del sys.modules["cython"]
        else:
            sys.modules["cython"] = real
    return module


def _compiled() -> ModuleType | None:
    used = importlib.import_module("flintmq.kernel")
    if used.COMPILED:
        return used
    spec = importlib.machinery.PathFinder.find_spec("flintmq.kernel", flintmq.__path__)
    if spec is None or not isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FORMS: dict[str, ModuleType | None] = {"py": _interpreted(), "c": _compiled()}


@pytest.fixture(params=["py", "c"], scope="module")
def kernel(request: pytest.FixtureRequest) -> Any:
    module = FORMS[request.param]
    if module is None:
        pytest.skip("the kernel was not compiled")
    assert bool(module.COMPILED) == (request.param == "c")
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


# --- Scan -------------------------------------------------------------------------------------------------------------


@given(bodies_of_any_size, st.data())
def test_a_scan_in_pieces_finds_what_one_scan_finds(kernel: Any, bodies: list[bytes], draw: st.DataObject) -> None:
    data = records(*bodies)
    scan = kernel.Scan(0)
    stop = 0
    while stop < len(data):
        stop = draw.draw(st.integers(stop + 1, len(data)))
        status = scan.run(data, stop, len(bodies), 30)
        assert status == (kernel.SCAN_DONE if stop == len(data) else kernel.SCAN_MORE)
        assert scan.pos <= stop
        assert data[: scan.pos] == records(*bodies[: scan.index])
    assert (scan.pos, scan.index) == (len(data), len(bodies))


@pytest.mark.parametrize("size", [0, -1, -(1 << 31), 31, (1 << 31) - 1])
def test_a_scan_stops_at_a_size_out_of_range(kernel: Any, size: int) -> None:
    data = records(b"one", b"two") + size.to_bytes(4, "big", signed=True) + bytes(100)
    scan = kernel.Scan(0)
    assert scan.run(data, len(data), 3, 30) == kernel.SCAN_BAD
    assert (scan.index, scan.pos, scan.size) == (2, 14, size)


def test_a_scan_of_the_largest_size_allowed(kernel: Any) -> None:
    data = records(b"x" * 30)
    assert kernel.Scan(0).run(data, len(data), 1, 30) == kernel.SCAN_DONE


def test_a_scan_beyond_the_buffer_is_refused(kernel: Any) -> None:
    with pytest.raises(ValueError, match="beyond the buffer"):
        kernel.Scan(0).run(bytearray(10), 11, 1, 30)


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


def publish(
    block: Any, fds: list[int], data: bytearray, start: int = 0, *, line: bytes = b"PUB t", room: int = 1_000
) -> tuple[int, list[int]]:
    """Where it stopped, and how many messages each socket brought."""
    counts = [0] * len(fds)
    most = 500 if line.startswith(b"MPUB") else 0
    number = PREFIX | (BASE + block.count)
    return block.fill_from_sockets(fds, counts, start, data, line, number, 1, 100, most, room), counts


def pub(body: bytes) -> bytes:
    return b"PUB t\n" + len(body).to_bytes(4, "big") + body


def mpub(*bodies: bytes) -> bytes:
    return encode_mpub(b"t", bodies)


def test_batches_are_taken_from_sockets(kernel: Any, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    fds = [one.fileno() for one, _ in pairs[:3]]
    pairs[0][1].send(mpub(b"a", b"bb", b"ccc"))
    pairs[1][1].send(mpub(b"d"))
    pairs[2][1].send(pub(b"not a batch"))
    block, data = kernel.Block(4_096, BASE), bytearray(4_096)
    assert publish(block, fds, data, line=b"MPUB t") == (2, [3, 1, 0])
    assert data[: block.pos] == pub(b"not a batch")
    bodies = [b"a", b"bb", b"ccc", b"d"]
    assert bytes(block.view[: block.used]) == b"".join(frame(BASE + n, body) for n, body in enumerate(bodies))


def test_nothing_is_read_once_enough_was_made(kernel: Any, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    fds = [one.fileno() for one, _ in pairs]
    for _, other in pairs:
        other.send(pub(b"x" * 50))
    block, data = kernel.Block(4_096, BASE), bytearray(4_096)
    assert publish(block, fds, data, room=100) == (2, [1, 1, 0, 0, 0])
    assert block.pos == kernel.FULL
    assert publish(block, fds, data, 2) == (5, [0, 0, 1, 1, 1])


def test_a_batch_that_the_block_has_no_room_for_is_left_to_the_session(
    kernel: Any, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    pairs[0][1].send(mpub(b"x" * 50, b"y" * 50))
    block, data = kernel.Block(100, BASE), bytearray(4_096)
    assert publish(block, [pairs[0][0].fileno()], data, line=b"MPUB t") == (0, [0])
    assert (block.count, block.used) == (0, 0)
    assert data[: block.pos] == mpub(b"x" * 50, b"y" * 50)


def test_single_publishes_are_taken_from_sockets(kernel: Any, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    fds = [one.fileno() for one, _ in pairs]
    for number in (0, 1, 3):
        pairs[number][1].send(pub(b"body %d" % number))
    pairs[4][1].send(b"NOP\n")
    block, data = kernel.Block(4_096, BASE), bytearray(4_096)
    assert publish(block, fds, data) == (4, [1, 1, 0, 1, 0])
    assert data[: block.pos] == b"NOP\n"
    assert [fd < 0 for fd in fds] == [False, False, True, False, False], "nothing came there"
    expected = [frame(BASE, b"body 0"), frame(BASE + 1, b"body 1"), frame(BASE + 2, b"body 3")]
    assert bytes(block.view[: block.used]) == b"".join(expected)


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
def test_anything_else_is_left_to_the_session(
    kernel: Any, pairs: list[tuple[socket.socket, socket.socket]], other: bytes
) -> None:
    pairs[0][1].send(other)
    block, data = kernel.Block(4_096, BASE), bytearray(4_096)
    line = other[: other.index(b" ")] + b" t" if b" " in other else b"PUB t"
    assert publish(block, [pairs[0][0].fileno()], data, line=line) == (0, [0])
    assert data[: block.pos] == other
    assert block.count == 0


def test_an_ended_stream_and_a_full_block_stop_the_walk(
    kernel: Any, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    fds = [one.fileno() for one, _ in pairs]
    pairs[0][1].send(pub(b"x" * 50))
    pairs[1][1].send(pub(b"y" * 50))
    block, data = kernel.Block(100, BASE), bytearray(4_096)
    assert publish(block, fds[:2], data) == (1, [1, 0])
    assert data[: block.pos] == pub(b"y" * 50), "what was read is not lost"
    pairs[2][1].close()
    assert publish(block, fds, data, 2)[0] == 2
    assert block.pos == 0
    closed = os.dup(0)
    os.close(closed)
    assert publish(block, [closed], data)[0] == 0
    assert block.pos < 0


def test_a_frame_is_sent_to_each_socket(kernel: Any, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
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
    def shrink(self) -> None:
        self.ring.shrink()

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
        if self.held:
            assert self.ring.lo <= min(self.held)


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
        assert sorted(heap.items()) == model
        if model:
            assert heap.first_due() == model[0][0]
            assert heap.first_seq() == min(seq for _, seq in model)
    heap.clear()
    assert len(heap) == 0


def test_an_empty_heap_has_nothing_to_give(kernel: Any) -> None:
    heap = kernel.Heap()
    for ask in (heap.pop, heap.first_due, heap.first_seq):
        with pytest.raises(IndexError):
            ask()
    assert heap.items() == []
