"""The real disk: buffers in any number, short writes, work in threads. And that the simulated one behaves the same."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flintmq import kernel
from flintmq.broker.storage import disk as disk_module
from flintmq.broker.storage.disk import BACKGROUND, COMMIT, READ, Disk, SystemClock
from support.simdisk import PowerLoss, SimDisk

PATIENCE = 30.0


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    disk = Disk() if request.param == "real" else SimDisk(tmp_path)
    yield disk
    disk.close()


# --- Both are the same ----------------------------------------------------------------------------------------------


def test_what_is_written_is_read(disk: Disk, tmp_path: Path) -> None:
    fd = disk.open(tmp_path / "file", create=True)
    assert disk.write(fd, [b"hello ", memoryview(b"world"), bytearray(b"!")], 0) == 12
    assert disk.write(fd, [b"far"], 20) == 3
    assert disk.read(fd, 100, 0) == b"hello world!" + bytes(8) + b"far"
    assert disk.read(fd, 5, 6) == b"world"
    assert disk.read(fd, 5, 100) == b""
    assert disk.size(fd) == 23
    disk.truncate(fd, 5)
    assert disk.read(fd, 100, 0) == b"hello"
    disk.truncate(fd, 7)
    assert disk.read(fd, 100, 0) == b"hello\0\0"
    disk.cut(tmp_path / "file", 6)
    assert disk.read(fd, 100, 0) == b"hello\0"
    disk.allocate(fd, 1_000)
    assert disk.size(fd) == 1_000
    assert disk.read(fd, 5, 0) == b"hello"
    disk.allocate(fd, 10)
    assert disk.size(fd) == 1_000
    disk.sync(fd)
    disk.close_file(fd)
    fd = disk.open(tmp_path / "file")
    assert disk.read(fd, 5, 0) == b"hello"
    disk.close_file(fd)


def test_files_and_folders_come_and_go(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert not disk.exists(folder)
    disk.make_folder(folder)
    with pytest.raises(FileExistsError):
        disk.make_folder(folder)
    disk.close_file(disk.open(folder / "b", create=True))
    disk.close_file(disk.open(folder / "a", create=True))
    with pytest.raises(FileExistsError):
        disk.open(folder / "a", create=True)
    with pytest.raises(FileNotFoundError):
        disk.open(folder / "c")
    with pytest.raises(FileNotFoundError):
        disk.open(tmp_path / "nowhere" / "c", create=True)
    assert disk.names(folder) == ["a", "b"]
    disk.sync_folder(folder)
    disk.rename(folder / "a", folder / "b")
    assert disk.names(folder) == ["b"]
    with pytest.raises(OSError, match="not empty"):
        disk.remove_folder(folder)
    with pytest.raises((IsADirectoryError, PermissionError)):
        disk.remove(folder)
    disk.remove(folder / "b")
    with pytest.raises(FileNotFoundError):
        disk.remove(folder / "b")
    disk.remove_folder(folder)
    assert not disk.exists(folder)
    with pytest.raises(FileNotFoundError):
        disk.names(folder)
    with pytest.raises(FileNotFoundError):
        disk.sync_folder(folder)
    assert disk.free(tmp_path) > 0


def test_a_removed_file_can_be_read_while_it_is_open(disk: Disk, tmp_path: Path) -> None:
    fd = disk.open(tmp_path / "file", create=True)
    disk.write(fd, [b"still here"], 0)
    disk.remove(tmp_path / "file")
    assert disk.read(fd, 100, 0) == b"still here"
    disk.sync(fd)
    disk.close_file(fd)


# --- The real one ---------------------------------------------------------------------------------------------------


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    disk = Disk()
    fd = disk.open(tmp_path / "file", create=True)
    buffers = [b"%d," % number for number in range(2_500)]
    assert disk.write(fd, buffers, 3) == len(b"".join(buffers))
    assert disk.read(fd, 1 << 20, 3) == b"".join(buffers)
    disk.close_file(fd)


@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    real = os.pwritev

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        return real(fd, [b"".join(buffers)[:most]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    disk = Disk()
    fd = disk.open(tmp_path / "file", create=True)
    buffers = [b"a" * 5, b"", b"b", b"c" * 10, b""]
    assert disk.write(fd, buffers, 0) == 16
    assert disk.read(fd, 100, 0) == b"aaaaabcccccccccc"
    disk.close_file(fd)


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread
    disk = Disk()
    fd = disk.open(tmp_path / "file", create=True)
    disk.write(fd, [b"0123456789"], 0)
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: real(fd, min(size, 3), offset))
    assert disk.read(fd, 8, 1) == b"12345678"
    assert disk.read(fd, 100, 0) == b"0123456789"
    disk.close_file(fd)


class Loop:
    """What an event loop does with what threads post."""

    def __init__(self) -> None:
        self._posted: queue.Queue[Callable[[], None]] = queue.Queue()

    def post(self, work: Callable[[], None]) -> None:
        self._posted.put(work)

    def run(self, count: int) -> None:
        for _ in range(count):
            self._posted.get(timeout=PATIENCE)()


def test_work_is_done_in_threads_and_answered_on_the_loop() -> None:
    disk, loop = Disk(), Loop()
    disk.attach(loop.post)
    answers: list[tuple[Any, str, int]] = []

    def answer(result: Any, error: BaseException | None) -> None:
        answers.append((result, str(error), threading.get_ident()))

    def fail() -> None:
        raise OSError("broken")

    disk.submit(threading.get_ident, answer)
    loop.run(1)
    disk.submit(fail, answer)
    loop.run(1)
    (thread, no_error, here), (nothing, error, _) = answers
    assert thread != here == threading.get_ident()
    assert (no_error, nothing, error) == ("None", None, "broken")
    disk.close()


def test_commits_go_before_everything_else() -> None:
    disk, loop = Disk(), Loop()
    disk.attach(loop.post)
    gate, busy = threading.Semaphore(0), threading.Semaphore(0)
    order: list[int] = []

    def block() -> None:
        busy.release()
        assert gate.acquire(timeout=PATIENCE)

    def done(result: Any, error: BaseException | None) -> None:
        assert error is None

    # Every thread is busy, so that the rest has to queue; then one of them goes on.
    assert disk_module._THREADS > 1, "a commit must not wait behind one background sync"
    for _ in range(disk_module._THREADS):
        disk.submit(block, done)
        assert busy.acquire(timeout=PATIENCE)
    for urgency in (BACKGROUND, READ, COMMIT, BACKGROUND, COMMIT):
        disk.submit(lambda urgency=urgency: order.append(urgency), done, urgency)  # type: ignore[misc]
    gate.release()
    loop.run(1 + 5)
    assert order == [COMMIT, COMMIT, READ, BACKGROUND, BACKGROUND]
    for _ in range(disk_module._THREADS):
        gate.release()
    disk.close()


def test_closing_finishes_what_was_submitted_and_takes_no_more() -> None:
    disk, loop = Disk(), Loop()
    disk.attach(loop.post)
    results: list[int] = []
    assert not disk.closing
    for number in range(20):
        disk.submit(lambda number=number: number, lambda result, error: results.append(result))  # type: ignore[misc]
    disk.close()
    assert disk.closing
    with pytest.raises(RuntimeError, match="closed"):
        disk.submit(lambda: None, lambda result, error: None)
    loop.run(20)
    assert sorted(results) == list(range(20))


def test_an_answer_to_a_loop_that_is_gone_is_dropped() -> None:
    disk = Disk()

    def gone(work: Callable[[], None]) -> None:
        raise RuntimeError("Event loop is closed")

    disk.attach(gone)
    disk.submit(lambda: 1, lambda result, error: None)
    disk.close()


def test_the_clock_counts_on() -> None:
    clock = SystemClock()
    assert clock.now() <= clock.now()
    assert clock.wall() > 1_600_000_000 * 10**9
    assert len(clock.boot_id()) == 16
    assert clock.boot_id() == clock.boot_id()


# --- The simulated one ----------------------------------------------------------------------------------------------


def written(disk: SimDisk, path: Path, data: bytes, *, sync: bool) -> None:
    fd = disk.open(path, create=True)
    disk.write(fd, [data], 0)
    if sync:
        disk.sync(fd)
    disk.close_file(fd)


def test_only_what_was_synced_survives_a_power_loss_for_certain(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    written(disk, tmp_path / "kept", b"kept", sync=True)
    disk.sync_folder(tmp_path)
    written(disk, tmp_path / "no entry", b"synced, but not in its folder", sync=True)
    fd = disk.open(tmp_path / "kept")
    disk.write(fd, [b"KEPT, and more"], 0)
    disk.make_folder(tmp_path / "folder")
    after = disk.after_power_loss("none")
    assert after.names(tmp_path) == ["kept"]
    assert after.content(tmp_path / "kept") == b"kept"
    after = disk.after_power_loss("all")
    assert after.names(tmp_path) == ["folder", "kept", "no entry"]
    assert after.content(tmp_path / "kept") == b"KEPT, and more"
    killed = disk.after_kill()
    assert killed.content(tmp_path / "kept") == b"KEPT, and more"
    assert killed.after_power_loss("none").content(tmp_path / "kept") == b"kept"


def test_what_was_not_synced_survives_in_any_mixture(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    written(disk, tmp_path / "file", b"a" * 3 * 4096, sync=True)
    disk.sync_folder(tmp_path)
    fd = disk.open(tmp_path / "file")
    disk.write(fd, [b"b" * 3 * 4096], 4096)
    contents = {disk.after_power_loss(seed).content(tmp_path / "file") for seed in range(60)}
    assert {len(content) for content in contents} == {3 * 4096, 4 * 4096}
    pages = {tuple(content[at : at + 1] for at in range(0, len(content), 4096)) for content in contents}
    assert {(b"a", b"a", b"a"), (b"a", b"b", b"a"), (b"a", b"a", b"b"), (b"a", b"b", b"b", b"b")} <= pages
    assert (b"a", b"b", b"b", b"\0") in pages, "a hole"
    assert all(content[:4096] == b"a" * 4096 for content in contents)


def test_renames_and_removals_may_or_may_not_have_happened(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    for name in ("old", "gone"):
        written(disk, tmp_path / name, name.encode(), sync=True)
    disk.sync_folder(tmp_path)
    disk.rename(tmp_path / "old", tmp_path / "new")
    disk.remove(tmp_path / "gone")
    found = {tuple(disk.after_power_loss(seed).names(tmp_path)) for seed in range(40)}
    assert found == {("new",), ("old",), ("gone", "new"), ("gone", "old")}


def test_the_power_goes_at_the_call_it_is_told(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    disk.power_off_at = 3
    fd = disk.open(tmp_path / "file", create=True)
    disk.write(fd, [b"one"], 0)
    with pytest.raises(PowerLoss):
        disk.sync(fd)
    with pytest.raises(PowerLoss):
        disk.exists(tmp_path)
    assert disk.after_power_loss("none").names(tmp_path) == []
    assert disk.after_power_loss("all").content(tmp_path / "file") == b"one"


def test_a_descriptor_of_a_simulated_machine_is_free_once_it_is_closed(tmp_path: Path) -> None:
    """Without power its connections fail; a real one that gets the same number later does not."""
    ends = socket.socketpair()
    disk = SimDisk(tmp_path)
    table = kernel.replace_calls(None)
    kernel.replace_calls(table)
    assert isinstance(table, kernel.Calls)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted = disk.system.accept(listener)
        disk.system.dead = True
        number = accepted.fileno()
        assert table.recv(number, memoryview(bytearray(5))) < 0
        accepted.close()
    try:
        os.dup2(ends[0].fileno(), number)
        ends[1].send(b"hello")
        room = bytearray(5)
        assert table.recv(number, memoryview(room)) == 5
        assert room == b"hello"
    finally:
        os.close(number)
        for end in ends:
            end.close()
    disk.close()
