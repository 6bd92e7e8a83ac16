"""nsq_to_file loses nothing: not when it is killed, not when files are in its way, not when the disk is another one."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import signal
import tempfile
from pathlib import Path

import pytest

from flintmq import sync
from flintmq.testing import NsqBroker
from flintmq.tools.nsq_to_file import FileOptions, RotatingFile, moment
from tools.kills import kill_again_and_again, lines_of
from tools.programs import Program, until


def options(folder: Path, **more: object) -> FileOptions:
    given = {"output_dir": str(folder / "out"), "filename_format": "<TOPIC><REV>.log", "nsqd_tcp_addresses": ("x:1",)}
    return FileOptions(**{**given, "topics": ("t",), **more})  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("flags", [[], ["--gzip"]], ids=["plain", "gzip"])
def test_five_kills_lose_nothing(tmp_path: Path, flags: list[str]) -> None:
    kills = 3 if flags else 2
    assert kill_again_and_again(kills, 2000, flags, tmp_path) == set()


def test_a_line_that_was_torn_by_a_kill_ends_before_the_next_begins(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "t.log").write_bytes(b"whole\nto")
    file = RotatingFile(options(tmp_path), "t")
    file.write([b"torn", b"next"])
    file.close()
    assert files(tmp_path) == {"out/t.log": b"whole\nto\ntorn\nnext\n"}


def test_a_file_is_synced_and_so_is_its_name_before_messages_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    file = RotatingFile(options(tmp_path), "t")
    file.write([b"one"])
    assert synced[-1] == "out"
    file.sync()
    assert synced[-1] == "t.log"
    # Nothing new: nothing to wait for.
    count = len(synced)
    file.sync()
    assert len(synced) == count
    file.close()


def test_what_is_synced_of_a_gzip_file_can_be_read_before_its_end(tmp_path: Path) -> None:
    file = RotatingFile(options(tmp_path, gzip=True), "t")
    file.write([b"one", b"two"])
    file.sync()
    [path] = (tmp_path / "out").iterdir()
    assert path.name == "t-000000.log.gz"
    assert gzip.decompress(path.read_bytes()) == b"one\ntwo\n"
    file.write([b"three"])
    file.close()
    assert gzip.decompress(path.read_bytes()) == b"one\ntwo\nthree\n"


def test_a_finished_file_never_overwrites_another(tmp_path: Path) -> None:
    file = RotatingFile(options(tmp_path, work_dir=str(tmp_path / "work")), "t")
    file.write([b"ours"])
    (tmp_path / "out" / "t-000000.log").write_bytes(b"somebody else's\n")
    (tmp_path / "out" / "t-000001.log").write_bytes(b"too\n")
    file.close()
    assert files(tmp_path)["out/t-000002.log"] == b"ours\n"
    assert files(tmp_path)["out/t-000000.log"] == b"somebody else's\n"
    assert not any((tmp_path / "work").iterdir())


def test_a_work_directory_may_be_on_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: str, target: str) -> None:
        if os.path.dirname(source) != os.path.dirname(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    file = RotatingFile(options(tmp_path, work_dir=str(tmp_path / "work")), "t")
    for number in range(2):
        file.write([b"%d" % number])
        file.close()
    assert files(tmp_path) == {"out/t-000000.log": b"0\n", "out/t-000001.log": b"1\n"}


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_nothing_is_overwritten_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(source: str, target: str) -> None:
        # Just now somebody else takes the name.
        (tmp_path / "out" / "t-000000.log").write_bytes(b"somebody else's\n")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    file = RotatingFile(options(tmp_path, work_dir=str(tmp_path / "work")), "t")
    file.write([b"ours"])
    file.close()
    assert files(tmp_path) == {"out/t-000000.log": b"somebody else's\n", "out/t-000001.log": b"ours\n"}


@pytest.mark.parametrize("processes", [1, 2])
def test_no_two_writers_share_a_file_that_is_moved(tmp_path: Path, processes: int) -> None:
    # On another file system where there is one: there the file is copied, and what is written to it later is lost.
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(NsqBroker())
        work = stack.enter_context(tempfile.TemporaryDirectory(dir=shared))
        argv = [f"--nsqd-tcp-address={broker.address}", f"--work-dir={work}", f"--output-dir={tmp_path}/out"]
        argv += ["--filename-format=all<REV>.log", "--rotate-size=10", "--max-in-flight=1"]
        topics = ["--topic=calm", "--topic=busy"]
        programs = [
            stack.enter_context(Program("ours", "nsq_to_file", [*argv, *topics[place::processes]], tmp_path))
            for place in range(processes)
        ]
        sent = [("calm", b"first"), ("busy", b"x" * 20), ("busy", b"y" * 20), ("calm", b"second"), ("busy", b"z")]
        for topic, body in sent:
            broker.publish(topic, body)
            until(lambda topic=topic: broker.stats(topic)["topics"][0]["channels"])
            broker.wait_until_empty(topic, "nsq_to_file")
        assert [program.end(signal.SIGTERM) for program in programs] == [0] * processes, programs[0].log
        assert os.listdir(work) == []
    assert sorted(lines_of(tmp_path / "out")) == sorted(body for _, body in sent)


def test_a_file_that_a_killed_writer_left_in_the_work_directory_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "t-000000.log").write_bytes(b"before\n")
    file = RotatingFile(options(tmp_path, work_dir=str(tmp_path / "work")), "t")
    file.write([b"after"])
    file.close()
    assert files(tmp_path) == {"out/t-000000.log": b"before\nafter\n"}


def test_files_rotate_by_time_and_by_name(tmp_path: Path) -> None:
    now = [1_000_000_000.0]
    given = options(
        tmp_path, rotate_interval=10 * 10**9, filename_format="<TOPIC>.<DATETIME><REV>.log", datetime_format="%S"
    )
    file = RotatingFile(given, "t", clock=lambda: now[0], elapsed=lambda: now[0])
    file.write([b"first"])
    now[0] += 9
    file.write([b"other name"])
    now[0] += 60
    file.write([b"that name again, but later"])
    file.close()
    assert sorted(files(tmp_path)) == ["out/t.40-000000.log", "out/t.49-000000.log", "out/t.49-000001.log"]


def test_a_clock_that_is_set_back_does_not_keep_files_from_rotating(tmp_path: Path) -> None:
    now = [1_000_000_000.0, 50.0]
    file = RotatingFile(options(tmp_path, rotate_interval=10**9), "t", clock=lambda: now[0], elapsed=lambda: now[1])
    file.write([b"before"])
    now[:] = [now[0] - 3600, now[1] + 1.5]
    file.write([b"after"])
    file.close()
    assert files(tmp_path) == {"out/t-000000.log": b"before\n", "out/t-000001.log": b"after\n"}


def test_datetime_formats_know_the_letters_of_nsq_and_leave_the_others() -> None:
    assert moment("%Y-%m-%d %%q %q %", 86400.0 * 365) == "1971-01-01 %q %q %"


def test_sighup_reopens_files_also_in_a_work_directory(tmp_path: Path) -> None:
    with NsqBroker() as broker, sync.NodeClient(broker.http_address) as node:
        node.create_topic("t")
        node.create_channel("t", "nsq_to_file")
        argv = ["--topic=t", f"--nsqd-tcp-address={broker.address}", f"--output-dir={tmp_path}/out"]
        argv += [f"--work-dir={tmp_path}/work", "--filename-format=<TOPIC><REV>.log", "--sync-interval=10ms"]
        with Program("ours", "nsq_to_file", argv, tmp_path) as program:
            for number in range(2):
                broker.publish("t", b"%d" % number)
                broker.wait_until_empty("t", "nsq_to_file")
                program.process.send_signal(signal.SIGHUP)
                until(lambda number=number: (tmp_path / "out" / f"t-00000{number}.log").exists())
            broker.publish("t", b"2")
            broker.wait_until_empty("t", "nsq_to_file")
            assert program.end(signal.SIGTERM) == 0
        assert lines_of(tmp_path / "out") == [b"0", b"1", b"2"]


def test_a_file_that_cannot_be_moved_at_sighup_ends_it(tmp_path: Path) -> None:
    with NsqBroker() as broker:
        broker.publish("t", b"one")
        argv = ["--topic=t", f"--nsqd-tcp-address={broker.address}", f"--output-dir={tmp_path}/out"]
        argv += [f"--work-dir={tmp_path}/work", "--filename-format=<TOPIC><REV>.log", "--max-in-flight=1"]
        with Program("ours", "nsq_to_file", argv, tmp_path) as program:
            until(lambda: broker.stats("t")["topics"][0]["channels"])
            broker.wait_until_empty("t", "nsq_to_file")
            (tmp_path / "out").rmdir()
            (tmp_path / "out").write_bytes(b"not a directory")
            program.process.send_signal(signal.SIGHUP)
            assert program.process.wait(20) == 1
        assert f"FATAL: {tmp_path}/work/t-000000.log: Not a directory" in program.log
        assert "Traceback" not in program.log
    # It is still where it was.
    assert files(tmp_path / "work") == {"t-000000.log": b"one\n"}


def test_messages_are_finished_before_they_time_out_however_long_the_sync_interval_is(tmp_path: Path) -> None:
    with NsqBroker(msg_timeout="2s") as broker:
        broker.publish("t", b"one")
        argv = ["--topic=t", f"--nsqd-tcp-address={broker.address}", f"--output-dir={tmp_path}/out"]
        with Program("ours", "nsq_to_file", [*argv, "--sync-interval=1h"], tmp_path) as program:
            until(lambda: broker.stats("t")["topics"][0]["channels"])
            broker.wait_until_empty("t", "nsq_to_file")
            assert program.end(signal.SIGINT) == 0
        [channel] = broker.stats("t")["topics"][0]["channels"]
        assert channel["timeout_count"] == 0
    assert lines_of(tmp_path / "out") == [b"one"]


def test_a_disk_that_cannot_be_written_ends_it_and_the_message_stays(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"not a directory")
    with NsqBroker() as broker:
        broker.publish("t", b"one")
        argv = ["--topic=t", f"--nsqd-tcp-address={broker.address}", f"--output-dir={tmp_path}/out"]
        with Program("ours", "nsq_to_file", argv, tmp_path) as program:
            assert program.process.wait(60) == 1
        assert "FATAL" in program.log
        assert broker.take("t", 1, channel="nsq_to_file") == [b"one"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_is_written(tmp_path: Path, number: int) -> None:
    with NsqBroker() as broker:
        broker.publish("t", *(b"%d" % place for place in range(100)))
        argv = ["--topic=t", f"--nsqd-tcp-address={broker.address}", f"--output-dir={tmp_path}/out"]
        with Program("ours", "nsq_to_file", argv, tmp_path) as program:
            until(lambda: (tmp_path / "out").exists() and len(lines_of(tmp_path / "out")) == 100)
            assert program.end(number) == 0
        broker.wait_until_empty("t", "nsq_to_file", timeout=1)
    assert len(lines_of(tmp_path / "out")) == 100
