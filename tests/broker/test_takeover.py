"""Reading a data path of the Go nsqd: what the real daemon leaves, hand-made damage, and moving the files aside.

``go_data/clean_stop`` was left by nsqd v1.3.0 after ``leave_backlog`` below; the same scenario runs live where the
daemon is at hand.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import tracemalloc
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.broker import takeover
from flintmq.broker.data_path import has_metadata
from flintmq.broker.storage.disk import Disk
from flintmq.broker.takeover import GoData, GoMessage, GoQueue, move_aside, read
from flintmq.errors import StartError
from support.peers import GO_NSQD, NO_GO_NSQD

MAX_MSG_SIZE = 1000
REPOSITORY = Path(__file__).parents[2]
CLEAN_STOP = Path(__file__).parent / "go_data" / "clean_stop"

needs_go_nsqd = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(NO_GO_NSQD), reason=NO_GO_NSQD),
]


# --- hand-made data paths


def message(number: int, body: bytes | None = None, attempts: int = 0) -> GoMessage:
    return GoMessage(1_700_000_000_000_000_000 + number, attempts, b"%016x" % number, body or b"body %d" % number)


def record(msg: GoMessage) -> bytes:
    return struct.pack(">iqH16s", 26 + len(msg.body), msg.timestamp, msg.attempts, msg.id) + msg.body


def records(messages: list[GoMessage]) -> bytes:
    return b"".join(map(record, messages))


MESSAGES = [message(number) for number in range(9)]


class DataPath:
    """Writes what the Go nsqd would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nsqd_dat(b'{"topics":[{"name":"t","paused":false,"channels":null}],"version":"1.3.0"}')

    def nsqd_dat(self, text: bytes) -> None:
        (self.path / "nsqd.dat").write_bytes(text)

    def data(self, number: int, content: bytes, queue: str = "t") -> Path:
        path = self.path / f"{queue}.diskqueue.{number:06d}.dat"
        path.write_bytes(content)
        return path

    def meta(
        self, depth: int, read_at: tuple[int, int] = (0, 0), write_at: tuple[int, int] = (0, 0), queue: str = "t"
    ) -> Path:
        path = self.path / f"{queue}.diskqueue.meta.dat"
        path.write_text(f"{depth}\n{read_at[0]},{read_at[1]}\n{write_at[0]},{write_at[1]}\n")
        return path

    def three_files(self) -> list[Path]:
        """MESSAGES, three in each of the files 0, 1 and 2, and the metadata of a clean stop."""
        paths = [self.data(number, records(MESSAGES[3 * number : 3 * number + 3])) for number in range(3)]
        self.meta(9, write_at=(2, paths[2].stat().st_size))
        return paths

    def read(self, max_msg_size: int = MAX_MSG_SIZE) -> GoData:
        return read(self.path, max_msg_size=max_msg_size)

    def queue(self, max_msg_size: int = MAX_MSG_SIZE) -> GoQueue:
        return self.read(max_msg_size).topics[0].queue


@pytest.fixture
def data_path(tmp_path: Path) -> DataPath:
    return DataPath(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# --- a real Go nsqd


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)
    return value


class GoNsqd:
    def __init__(self, data_path: Path, log: Path, *flags: str) -> None:
        addresses = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--https-address=")
        self.log = log
        with open(log, "wb") as stderr:
            self.process = subprocess.Popen(
                [GO_NSQD, f"--data-path={data_path}", *addresses, *flags], stderr=stderr, stdout=stderr
            )
        try:
            self.tcp_port = self._port("TCP")
            self.http_port = self._port("HTTP")
        except BaseException:
            self.kill()
            raise

    def _port(self, listener: str) -> int:
        pattern = re.compile(rf" {listener}: listening on 127\.0\.0\.1:(\d+)")

        def announced() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log.read_text()
            return pattern.search(self.log.read_text())

        return int(wait_until(announced, f"{listener} listener")[1])

    def call(self, path: str, body: bytes | None = None, **query: str) -> bytes:
        url = f"http://127.0.0.1:{self.http_port}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, data=body, timeout=30) as answer:
            return bytes(answer.read())

    def create(self, topic: str, *channels: str) -> None:
        self.call("/topic/create", b"", topic=topic)
        for channel in channels:
            self.call("/channel/create", b"", topic=topic, channel=channel)

    def publish(self, topic: str, *bodies: bytes) -> None:
        for body in bodies:
            self.call("/pub", body, topic=topic)

    def wait_for(self, topic: str, channel: str, key: str, value: int) -> None:
        def there() -> bool:
            stats = json.loads(self.call("/stats", format="json", topic=topic, channel=channel))
            return bool(stats["topics"][0]["channels"][0][key] == value)

        wait_until(there, f"{key} {value} of {topic}:{channel}")

    def subscribe(self, topic: str, channel: str) -> Subscriber:
        return Subscriber(self.tcp_port, topic, channel)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


class Subscriber:
    def __init__(self, port: int, topic: str, channel: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._stream = self._socket.makefile("rb")
        self.send(f"  V2SUB {topic} {channel}\n")

    def send(self, text: str) -> None:
        self._socket.sendall(text.encode())

    def next_message(self) -> GoMessage:
        while True:
            size, frame_type = struct.unpack(">ii", self._stream.read(8))
            frame = self._stream.read(size - 4)
            assert frame_type != 1, frame
            if frame_type == 2:
                timestamp, attempts, message_id = struct.unpack_from(">qH16s", frame)
                return GoMessage(timestamp, attempts, message_id, frame[26:])

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


StartGo = Callable[..., GoNsqd]


@pytest.fixture
def start_go(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartGo]:
    logs = tmp_path_factory.mktemp("logs")
    started: list[GoNsqd] = []

    def start(data_path: Path, *flags: str) -> GoNsqd:
        go = GoNsqd(data_path, logs / f"{len(started)}.log", *flags)
        started.append(go)
        return go

    yield start
    for go in started:
        if go.process.poll() is None:
            go.kill()


SMALL_FILES = ("--mem-queue-size=2", "--max-bytes-per-file=120", f"--max-msg-size={MAX_MSG_SIZE}")
ORDERS = [b"order %d" % number for number in range(10)]


def leave_backlog(go: GoNsqd) -> None:
    """Put something of every kind into a daemon started with SMALL_FILES, and stop it cleanly."""
    go.create("orders", "billing", "audit")
    go.call("/channel/pause", b"", topic="orders", channel="audit")
    go.publish("orders", *ORDERS)
    go.wait_for("orders", "billing", "depth", 10)
    go.wait_for("orders", "audit", "depth", 10)
    billing = go.subscribe("orders", "billing")
    billing.send("RDY 2\n")
    for _ in range(2):
        billing.next_message()

    go.create("retries", "worker")
    go.publish("retries", b"second attempt")
    worker = go.subscribe("retries", "worker")
    worker.send("RDY 1\n")
    worker.send(f"REQ {worker.next_message().id.decode()} 0\n")
    worker.next_message()

    go.create("later", "c")
    go.call("/pub", b"deferred", topic="later", defer="600000")
    go.wait_for("later", "c", "deferred_count", 1)

    go.create("halted.topic")
    go.call("/topic/pause", b"", topic="halted.topic")
    go.publish("halted.topic", b"1", b"2", b"3")

    go.create("..", "x.diskqueue")
    go.publish("..", b"dots")
    go.wait_for("..", "x.diskqueue", "depth", 1)

    go.create("brief#ephemeral", "c", "d#ephemeral")
    go.publish("brief#ephemeral", b"in no nsqd.dat")
    go.wait_for("brief#ephemeral", "c", "depth", 1)
    go.stop()
    billing.close()
    worker.close()


def stored(queue: GoQueue) -> dict[bytes, int]:
    """Attempts by body."""
    messages = list(queue)
    assert queue.damage == []
    attempts = {message.body: message.attempts for message in messages}
    assert len(attempts) == len(messages)
    return attempts


def check_backlog(data_path: Path) -> GoData:
    data = read(data_path, max_msg_size=MAX_MSG_SIZE)
    topics = {topic.name: topic for topic in data.topics}
    channels = {f"{topic.name}:{channel.name}": channel for topic in data.topics for channel in topic.channels}
    assert topics.keys() == {"orders", "retries", "later", "halted.topic", ".."}
    assert channels.keys() == {"orders:billing", "orders:audit", "retries:worker", "later:c", "..:x.diskqueue"}
    assert [name for name, topic in topics.items() if topic.paused] == ["halted.topic"]
    assert [name for name, channel in channels.items() if channel.paused] == ["orders:audit"]

    assert stored(channels["orders:audit"].queue) == dict.fromkeys(ORDERS, 0)
    billing = stored(channels["orders:billing"].queue)
    assert sorted(billing) == ORDERS
    assert sorted(billing.values()) == [0] * 8 + [1] * 2  # two were in flight
    assert stored(channels["retries:worker"].queue) == {b"second attempt": 2}
    assert stored(channels["later:c"].queue) == {b"deferred": 0}
    assert stored(channels["..:x.diskqueue"].queue) == {b"dots": 0}
    assert stored(topics["halted.topic"].queue) == {b"1": 0, b"2": 0, b"3": 0}
    assert stored(topics["orders"].queue) == {}
    assert channels["orders:audit"].queue.depth == 10
    assert len(channels["orders:audit"].queue.files) > 3  # so that rolled files were read

    assert [orphan.name for orphan in data.orphans] == ["brief#ephemeral:c"]
    assert stored(data.orphans[0]) == {b"in no nsqd.dat": 0}
    assert data.damage == ["brief#ephemeral:c: queue files of a topic or channel that nsqd.dat does not list"]
    assert {path.name for path in data.files} == contents(data_path).keys()
    return data


def test_a_stored_data_path_of_the_go_daemon_is_read_in_full() -> None:
    check_backlog(CLEAN_STOP)


class TestWithGoNsqd:
    pytestmark = needs_go_nsqd

    def test_a_clean_stop_is_read_in_full(self, tmp_path: Path, start_go: StartGo) -> None:
        before = time.time_ns()
        leave_backlog(start_go(tmp_path, *SMALL_FILES))
        data = check_backlog(tmp_path)
        queues = [channel.queue for topic in data.topics for channel in topic.channels]
        for message in (message for queue in queues for message in queue):
            assert before < message.timestamp < time.time_ns()
            assert re.fullmatch(rb"[0-9a-f]{16}", message.id)

    def test_messages_go_in_order_of_publishing_when_all_are_on_disk(self, tmp_path: Path, start_go: StartGo) -> None:
        go = start_go(tmp_path, "--mem-queue-size=0", "--max-bytes-per-file=100")
        go.create("t")
        go.publish("t", *ORDERS)
        go.stop()
        queue = read(tmp_path, max_msg_size=MAX_MSG_SIZE).topics[0].queue
        assert [message.body for message in queue] == ORDERS
        assert queue.damage == []

    def test_what_was_consumed_is_not_read_again(self, tmp_path: Path, start_go: StartGo) -> None:
        go = start_go(tmp_path, "--mem-queue-size=0", "--max-bytes-per-file=100")
        go.create("t", "c")
        go.publish("t", *ORDERS)
        go.wait_for("t", "c", "depth", 10)
        subscriber = go.subscribe("t", "c")
        subscriber.send("RDY 1\n")
        for _ in range(4):
            subscriber.send(f"FIN {subscriber.next_message().id.decode()}\n")
        in_flight = subscriber.next_message()
        go.stop()
        subscriber.close()
        queue = read(tmp_path, max_msg_size=MAX_MSG_SIZE).topics[0].channels[0].queue
        # The one in flight went to the end of the queue at the stop.
        assert [message.body for message in queue] == [*ORDERS[5:], ORDERS[4]]
        assert list(queue)[-1] == in_flight
        assert queue.damage == []

    def test_messages_written_after_the_last_sync_survive_a_kill(self, tmp_path: Path, start_go: StartGo) -> None:
        go = start_go(tmp_path, "--mem-queue-size=0")
        go.create("t")
        go.publish("t", *ORDERS[:5])
        go.stop()
        go = start_go(tmp_path, "--mem-queue-size=0", "--sync-every=1000000", "--sync-timeout=1h")
        go.publish("t", *ORDERS[5:])
        go.kill()
        queue = read(tmp_path, max_msg_size=MAX_MSG_SIZE).topics[0].queue
        assert queue.depth == 5
        assert [message.body for message in queue] == ORDERS
        assert queue.damage == []

    def test_a_second_kill_before_a_sync_loses_nothing(self, tmp_path: Path, start_go: StartGo) -> None:
        lazy = ("--mem-queue-size=0", "--sync-every=1000000", "--sync-timeout=1h")
        go = start_go(tmp_path, *lazy)
        go.create("t")
        go.publish("t", *ORDERS[:2])
        go.stop()
        for batch in (ORDERS[2:5], ORDERS[5:]):
            go = start_go(tmp_path, *lazy)
            go.publish("t", *batch)
            go.kill()
        queue = read(tmp_path, max_msg_size=MAX_MSG_SIZE).topics[0].queue
        assert [message.body for message in queue] == ORDERS
        assert queue.damage == ["t.diskqueue.000001.dat: the metadata does not know this file; it is read all the same"]

    def test_a_kill_before_the_first_sync_leaves_no_metadata(self, tmp_path: Path, start_go: StartGo) -> None:
        go = start_go(tmp_path, "--mem-queue-size=0", "--sync-every=1000000", "--sync-timeout=1h")
        go.create("t")
        go.publish("t", *ORDERS)
        wait_until(lambda: b'"t"' in (tmp_path / "nsqd.dat").read_bytes(), "topic t in nsqd.dat")
        go.kill()
        queue = read(tmp_path, max_msg_size=MAX_MSG_SIZE).topics[0].queue
        assert queue.depth is None
        assert [message.body for message in queue] == ORDERS
        assert queue.damage == ["t: there is no metadata file; every data file is read from its start"]

    def test_the_go_daemon_delivers_no_more_of_a_damaged_queue_than_we_read(
        self, tmp_path: Path, start_go: StartGo
    ) -> None:
        go = start_go(tmp_path, "--mem-queue-size=0", "--max-bytes-per-file=150")
        go.create("t", "c")
        go.publish("t", *ORDERS)
        go.wait_for("t", "c", "depth", 10)
        go.stop()
        damaged = tmp_path / "t:c.diskqueue.000001.dat"
        content = bytearray(damaged.read_bytes())
        second = 4 + int.from_bytes(content[:4], "big")
        content[second : second + 4] = b"\xff\xff\xff\xff"
        damaged.write_bytes(content)
        queue = read(tmp_path, max_msg_size=MAX_MSG_SIZE).topics[0].channels[0].queue
        ours = list(queue)
        assert len(queue.damage) == 2  # the place, and that messages are missing

        go = start_go(tmp_path, "--mem-queue-size=0", "--max-bytes-per-file=150")
        subscriber = go.subscribe("t", "c")
        subscriber.send("RDY 100\n")
        theirs = [subscriber.next_message() for _ in ours]
        subscriber.close()
        assert [message.body for message in theirs] == [message.body for message in ours]


# --- positions


def test_messages_of_all_files_come_in_order(data_path: DataPath) -> None:
    data_path.three_files()
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    assert (queue.depth, queue.damage) == (9, [])


def test_reading_starts_at_the_read_position(data_path: DataPath) -> None:
    data_path.three_files()[0].unlink()
    data_path.meta(5, read_at=(1, len(record(MESSAGES[3]))), write_at=(2, len(records(MESSAGES[6:]))))
    queue = data_path.queue()
    assert list(queue) == MESSAGES[4:]
    assert queue.damage == []


def test_a_queue_can_be_read_twice(data_path: DataPath) -> None:
    data_path.three_files()[1].write_bytes(b"garbage")
    queue = data_path.queue()
    first, damage = list(queue), list(queue.damage)
    assert list(queue) == first
    assert queue.damage == damage


def test_reading_changes_nothing(data_path: DataPath) -> None:
    data_path.three_files()[1].write_bytes(b"garbage")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in data_path.path.iterdir()}
    list(data_path.queue())
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in data_path.path.iterdir()} == before


def test_a_topic_without_files_has_an_empty_queue(data_path: DataPath) -> None:
    queue = data_path.queue()
    assert list(queue) == []
    assert (queue.depth, queue.files, queue.damage) == (None, (), [])


def test_metadata_alone_is_an_empty_queue(data_path: DataPath) -> None:
    meta = data_path.meta(0, read_at=(3, 0), write_at=(3, 0))
    queue = data_path.queue()
    assert list(queue) == []
    assert (queue.depth, queue.files, queue.damage) == (0, (meta,), [])


def test_the_write_file_is_read_to_its_real_end(data_path: DataPath) -> None:
    data_path.three_files()
    data_path.meta(7, write_at=(2, len(record(MESSAGES[6]))))
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    assert queue.damage == []


def test_a_fully_read_write_file_holds_nothing_more(data_path: DataPath) -> None:
    size = data_path.data(4, records(MESSAGES)).stat().st_size
    data_path.meta(0, read_at=(4, size), write_at=(4, size))
    queue = data_path.queue()
    assert list(queue) == []
    assert queue.damage == []


def test_file_numbers_may_have_more_than_six_digits(data_path: DataPath) -> None:
    data_path.data(999_999, records(MESSAGES[:4]))
    last = data_path.data(1_000_000, records(MESSAGES[4:]))
    data_path.meta(9, read_at=(999_999, 0), write_at=(1_000_000, last.stat().st_size))
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    assert queue.damage == []


@pytest.mark.parametrize(
    ("metadata", "doubt"),
    [
        (None, "there is no metadata file"),
        (b"", "t.diskqueue.meta.dat is malformed"),
        (b"9\n0,0\n2", "t.diskqueue.meta.dat is malformed"),
        (b"9\n0,-1\n2,5\n", "t.diskqueue.meta.dat is malformed"),
        (b"9\n0,0\n2," + b"9" * 5000, None),
        (b"9" * 5000, "t.diskqueue.meta.dat is malformed"),
        (b"9\n3,0\n2,5\n", "t.diskqueue.meta.dat has the read position after the write position"),
        (b"9\n2,6\n2,5\n", "t.diskqueue.meta.dat has the read position after the write position"),
    ],
)
def test_without_usable_metadata_everything_is_read(
    data_path: DataPath, metadata: bytes | None, doubt: str | None
) -> None:
    data_path.three_files()
    path = data_path.path / "t.diskqueue.meta.dat"
    if metadata is None:
        path.unlink()
    else:
        path.write_bytes(metadata)
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    if doubt is not None:
        assert queue.damage == [f"t: {doubt}; every data file is read from its start"]
        assert queue.depth is None


def test_missing_files_are_named(data_path: DataPath) -> None:
    paths = data_path.three_files()
    paths[0].unlink()
    paths[2].unlink()
    queue = data_path.queue()
    assert list(queue) == MESSAGES[3:6]
    assert queue.damage == [
        "t: data file 000000 is missing",
        "t: data file 000002 is missing",
        "t: the metadata counts 9 messages, 3 could be read",
    ]


def test_absurd_file_numbers_cost_neither_time_nor_memory(data_path: DataPath) -> None:
    data_path.three_files()
    data_path.meta(9, write_at=(10**17, 5))
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    assert queue.damage == [f"t: data files 000003 to {10**17} are missing"]


def test_a_file_before_the_read_position_is_not_read_but_said(data_path: DataPath) -> None:
    data_path.three_files()
    data_path.meta(6, read_at=(1, 0), write_at=(2, len(records(MESSAGES[6:]))))
    queue = data_path.queue()
    assert list(queue) == MESSAGES[3:]
    assert queue.damage == ["t.diskqueue.000000.dat: lies before the read position, taken as delivered, not read"]


def test_a_file_beyond_the_write_file_is_read_and_said(data_path: DataPath) -> None:
    data_path.three_files()
    data_path.meta(6, write_at=(1, len(records(MESSAGES[3:6]))))
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    assert queue.damage == ["t.diskqueue.000002.dat: the metadata does not know this file; it is read all the same"]


def test_numbers_after_the_write_file_are_not_missed(data_path: DataPath) -> None:
    data_path.data(0, records(MESSAGES[:5]))
    data_path.meta(5, write_at=(0, len(records(MESSAGES[:5]))))
    data_path.data(7, records(MESSAGES[5:]))
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    assert queue.damage == ["t.diskqueue.000007.dat: the metadata does not know this file; it is read all the same"]


def test_a_write_file_that_was_just_begun_need_not_be_there(data_path: DataPath) -> None:
    data_path.three_files()
    data_path.meta(9, write_at=(3, 0))
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    assert queue.damage == []


# --- damage inside files


@pytest.mark.parametrize("length", [-1, 0, 25, MAX_MSG_SIZE + 27, 2**31 - 1])
def test_a_bad_length_costs_the_rest_of_its_file_only(data_path: DataPath, length: int) -> None:
    middle = data_path.three_files()[1]
    first = record(MESSAGES[3])
    middle.write_bytes(first + struct.pack(">i", length) + record(MESSAGES[4])[4:] + record(MESSAGES[5]))
    queue = data_path.queue()
    assert list(queue) == MESSAGES[:4] + MESSAGES[6:]
    size = middle.stat().st_size
    assert queue.damage == [
        f"{middle.name}: unreadable from offset {len(first)} to its end at {size}: invalid record length {length}",
        "t: the metadata counts 9 messages, 7 could be read",
    ]


@pytest.mark.parametrize("kept", [1, 3, 4, 29, 30, 33])
def test_a_record_cut_off_at_the_end_is_left_out(data_path: DataPath, kept: int) -> None:
    last = data_path.three_files()[2]
    whole = records(MESSAGES[6:8])
    last.write_bytes(whole + record(MESSAGES[8])[:kept])
    queue = data_path.queue()
    assert list(queue) == MESSAGES[:8]
    assert queue.damage[0].startswith("t.diskqueue.000002.dat: ends at offset ")
    assert queue.damage[1].startswith(f"t.diskqueue.000002.dat: unreadable from offset {len(whole)} to its end at ")
    assert "cut off" in queue.damage[1]


def test_zeros_after_an_unclean_stop_are_not_messages(data_path: DataPath) -> None:
    path = data_path.data(0, records(MESSAGES) + bytes(4096))
    data_path.meta(9, write_at=(0, len(records(MESSAGES))))
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    assert queue.damage == [
        f"{path.name}: unreadable from offset {len(records(MESSAGES))} to its end at {path.stat().st_size}: "
        "invalid record length 0"
    ]


def test_a_length_that_leads_into_the_middle_of_a_body_is_noticed(data_path: DataPath) -> None:
    # What lies there has a valid length by chance; that it is no message shows in its id.
    inside = struct.pack(">i", 40) + b"x" * 60
    victim = message(3, inside)
    wrong = struct.pack(">i", 26) + record(victim)[4:]
    path = data_path.data(0, wrong + records(MESSAGES))
    data_path.meta(10, write_at=(0, path.stat().st_size))
    queue = data_path.queue()
    assert list(queue) == [GoMessage(victim.timestamp, 0, victim.id, b"")]
    assert "no message with length 40" in queue.damage[0]


def test_a_record_with_an_odd_id_is_kept_if_records_follow(data_path: DataPath) -> None:
    odd = GoMessage(1, 0, b"ABCDEFGHIJKLMNOP", b"body")
    path = data_path.data(0, record(odd) + records(MESSAGES))
    data_path.meta(10, write_at=(0, path.stat().st_size))
    queue = data_path.queue()
    assert list(queue) == [odd, *MESSAGES]
    assert queue.damage == []


@pytest.mark.parametrize(
    "tail", [b"", record(MESSAGES[0]), record(MESSAGES[0])[:2], record(MESSAGES[0])[:20], record(MESSAGES[0])[:33]]
)
def test_a_message_above_the_present_size_limit_is_kept(data_path: DataPath, tail: bytes) -> None:
    large = [message(10, b"x" * 5000), message(11, b"y" * 400_000)]
    path = data_path.data(0, records(large) + tail)
    data_path.meta(2, write_at=(0, path.stat().st_size))
    queue = data_path.queue(max_msg_size=100)
    assert list(queue)[:2] == large
    assert len(queue.damage) == (tail not in (b"", record(MESSAGES[0])))


@pytest.mark.parametrize(
    "follows",
    [
        pytest.param(b"plain text " * 20, id="text"),
        pytest.param(b"0123456789abcdef" * 20, id="hex digits, where a length would be huge"),
        pytest.param(bytes(14) + b"0" * 100, id="zeros, then what could be an id"),
        pytest.param(struct.pack(">i", 30) + b"x" * 60, id="what could be a length, but no id"),
    ],
)
def test_a_too_large_length_is_not_believed_when_no_record_follows(data_path: DataPath, follows: bytes) -> None:
    path = data_path.data(0, struct.pack(">i", 300) + record(message(1, b"x" * 274))[4:] + follows)
    data_path.meta(9, write_at=(0, path.stat().st_size))
    queue = data_path.queue(max_msg_size=100)
    assert list(queue) == []
    assert "no message with length 300" in queue.damage[0]


def test_an_empty_body_and_the_highest_attempts_are_kept(data_path: DataPath) -> None:
    messages = [GoMessage(-1, 65535, b"0" * 16, b""), message(1)]
    path = data_path.data(0, records(messages))
    data_path.meta(2, write_at=(0, path.stat().st_size))
    assert list(data_path.queue()) == messages


@pytest.mark.parametrize("beyond", [1, 10**17])
def test_a_read_position_beyond_the_file_is_said(data_path: DataPath, beyond: int) -> None:
    path = data_path.three_files()[0]
    size = path.stat().st_size
    data_path.meta(6, read_at=(0, size + beyond), write_at=(2, len(records(MESSAGES[6:]))))
    queue = data_path.queue()
    assert list(queue) == MESSAGES[3:]
    assert queue.damage == [f"{path.name}: ends at offset {size}, the metadata expects at least {size + beyond}"]


def test_bad_files_of_the_go_daemon_are_listed_but_not_read(data_path: DataPath) -> None:
    paths = data_path.three_files()
    bad = data_path.path / "t.diskqueue.000000.dat.bad"
    bad.write_bytes(records(MESSAGES))
    unfinished = data_path.path / "t.diskqueue.meta.dat.5577006791947779410.tmp"
    unfinished.write_bytes(b"9\n2,0\n")
    queue = data_path.queue()
    assert list(queue) == MESSAGES
    assert set(queue.files) == {*paths, bad, unfinished, data_path.path / "t.diskqueue.meta.dat"}
    assert queue.damage == ["t.diskqueue.000000.dat.bad: set aside as bad by the Go nsqd, not read"]


def test_a_bad_sector_costs_the_rest_of_its_file_only(data_path: DataPath, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = data_path.three_files()[1]

    class BadSector(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open_file(path: Path, mode: str, buffering: int = -1) -> io.BufferedReader:
        raw = BadSector(path) if path == broken else io.FileIO(path)
        return io.BufferedReader(raw, buffering if buffering > 0 else io.DEFAULT_BUFFER_SIZE)

    monkeypatch.setattr(takeover, "open", open_file, raising=False)
    queue = data_path.queue()
    assert list(queue) == MESSAGES[:3] + MESSAGES[6:]
    assert queue.damage[0].startswith(f"{broken.name}: unreadable from offset 0 to its end at ")
    assert queue.damage[0].endswith(os.strerror(errno.EIO))


def test_a_file_that_cannot_be_opened_stops_the_start(data_path: DataPath) -> None:
    paths = data_path.three_files()
    queue = data_path.queue()
    paths[1].unlink()
    with pytest.raises(StartError, match=re.escape(f"cannot read {paths[1]} - No such file or directory")):
        list(queue)


def test_files_of_another_user_stop_the_start_with_a_hint(data_path: DataPath) -> None:
    path = data_path.three_files()[0]
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")
    with pytest.raises(StartError, match="only by the user it ran as"):
        list(data_path.queue())


def test_large_files_are_streamed(data_path: DataPath) -> None:
    one = record(message(1, b"x" * 1000))
    path = data_path.data(0, one * 16_000)
    data_path.meta(16_000, write_at=(0, path.stat().st_size))
    queue = data_path.queue()
    tracemalloc.start()
    try:
        assert sum(1 for _ in queue) == 16_000
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024 < path.stat().st_size
    finally:
        tracemalloc.stop()


# --- any damage

bodies = st.binary(min_size=1, max_size=60)
files_of_bodies = st.lists(st.lists(bodies, min_size=1, max_size=4), min_size=1, max_size=4)


def build(path: Path, files: list[list[bytes]]) -> tuple[DataPath, list[list[GoMessage]]]:
    data_path = DataPath(path)
    numbers = iter(range(1000))
    messages = [[message(next(numbers), body) for body in file] for file in files]
    for number, of_file in enumerate(messages):
        data_path.data(number, records(of_file))
    data_path.meta(sum(map(len, files)), write_at=(len(files) - 1, len(records(messages[-1]))))
    return data_path, messages


@settings(deadline=None, max_examples=300)
@given(files_of_bodies, st.data())
def test_whatever_happens_to_a_file_the_messages_before_and_the_other_files_are_read(
    files: list[list[bytes]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data_path, messages = build(Path(folder), files)
        number = data.draw(st.integers(0, len(files) - 1))
        path = data_path.path / f"t.diskqueue.{number:06d}.dat"
        content = path.read_bytes()
        start = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(start, len(content)))
        instead = data.draw(st.one_of(st.binary(max_size=40), st.integers(0, 200).map(bytes)))
        rest = data.draw(st.sampled_from([content[stop:], b""]))
        path.write_bytes(content[:start] + instead + rest)

        queue = data_path.queue()
        result = list(queue)

    before = [msg for of_file in messages[:number] for msg in of_file]
    end = 0
    for msg in messages[number]:
        end += len(record(msg))
        if end <= start:
            before.append(msg)
    after = [msg for of_file in messages[number + 1 :] for msg in of_file]
    assert result[: len(before)] == before
    assert result[len(result) - len(after) :] == after
    assert len(result) >= len(before) + len(after)
    if not instead and not rest:
        assert len(result) == len(before) + len(after)
    if len(result) < sum(map(len, files)):
        assert queue.damage


@settings(deadline=None, max_examples=300)
@given(
    files_of_bodies, st.one_of(st.binary(max_size=60), st.from_regex(rb"\A-?[0-9]+\n[0-9]+,[0-9]+\n[0-9]+,[0-9]+\n"))
)
def test_no_metadata_of_a_queue_makes_reading_fail(files: list[list[bytes]], metadata: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data_path, messages = build(Path(folder), files)
        (data_path.path / "t.diskqueue.meta.dat").write_bytes(metadata)
        queue = data_path.queue()
        result = list(queue)
    if queue.depth is None:
        assert result == [msg for of_file in messages for msg in of_file]
        assert queue.damage


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_nsqd_dat_is_read_or_refused_in_words(data: st.DataObject) -> None:
    valid = b'{"topics":[{"name":"t","paused":false,"channels":[{"name":"c","paused":true}]}],"version":"1.3.0"}'
    start = data.draw(st.integers(0, len(valid)))
    stop = data.draw(st.integers(start, len(valid)))
    text = valid[:start] + data.draw(st.binary(max_size=10)) + valid[stop:]
    with tempfile.TemporaryDirectory() as folder:
        data_path = DataPath(Path(folder))
        data_path.nsqd_dat(text)
        try:
            topics = data_path.read().topics
        except StartError as exc:
            assert str(exc).startswith("failed to load metadata - failed to parse metadata in ")
        else:
            assert all(re.fullmatch(r"[.a-zA-Z0-9_-]+(#ephemeral)?", topic.name) for topic in topics)


# --- nsqd.dat and file names


def names(data: GoData) -> dict[str, list[str]]:
    return {topic.name: [channel.name for channel in topic.channels] for topic in data.topics}


@pytest.mark.parametrize(
    ("text", "topics"),
    [
        (b'{"topics":null,"version":"1.3.0"}', {}),
        (b'{"topics":[],"version":"1.3.0"}', {}),
        (b"null", {}),
        (b'{"topics":[{"name":"a","channels":null},{"name":"b","channels":[]}]}', {"a": [], "b": []}),
        (b'{"topics":[{"name":"a","paused":null,"more":[1]}],"later":{}}', {"a": []}),
        (
            b'{"topics":[{"name":"a","channels":[{"name":"c"}]},{"name":"a","channels":[{"name":"d"}]}]}',
            {"a": ["c", "d"]},
        ),
    ],
)
def test_topics_and_channels_are_those_of_nsqd_dat(
    data_path: DataPath, text: bytes, topics: dict[str, list[str]]
) -> None:
    data_path.nsqd_dat(text)
    data = data_path.read()
    assert names(data) == topics
    assert data.damage == []


def test_pause_flags_are_kept(data_path: DataPath) -> None:
    data_path.nsqd_dat(
        b'{"topics":[{"name":"a","paused":true,"channels":[{"name":"c","paused":true},{"name":"d","paused":false}]},'
        b'{"name":"b","paused":false,"channels":[]},{"name":"a","paused":false,"channels":[{"name":"c"}]}]}'
    )
    a, b = data_path.read().topics
    assert (a.paused, b.paused) == (True, False)
    assert {channel.name: channel.paused for channel in a.channels} == {"c": True, "d": False}


def test_invalid_names_are_skipped_and_said(data_path: DataPath) -> None:
    data_path.nsqd_dat(
        json.dumps(
            {
                "topics": [
                    {"name": "no spaces", "channels": []},
                    {"name": "line\n", "channels": []},
                    {"name": "x" * 65},
                    {"name": "#ephemeral"},
                    {},
                    None,
                    {"name": "t", "channels": [{"name": "é"}, {"name": "c"}, None]},
                    {"name": "not utf-8: ?"},
                ]
            }
        )
        .encode()
        .replace(b"?", b"\xff")
    )
    data = data_path.read()
    assert names(data) == {"t": ["c"]}
    assert data.damage == [
        "nsqd.dat: skipping invalid topic name 'no spaces'",
        "nsqd.dat: skipping invalid topic name 'line\\n'",
        f"nsqd.dat: skipping invalid topic name '{'x' * 65}'",
        "nsqd.dat: skipping invalid topic name '#ephemeral'",
        "nsqd.dat: skipping invalid topic name ''",
        "nsqd.dat: skipping invalid topic name ''",
        "nsqd.dat: skipping invalid channel name '\\xe9' of topic t",
        "nsqd.dat: skipping invalid channel name '' of topic t",
        "nsqd.dat: skipping invalid topic name 'not utf-8: \\ufffd'",
    ]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"topics":[{"name":5}]}', b'{"topics":{}}', b"{} {}", b'{"more":' + b"[" * 100_000]
)
def test_a_malformed_nsqd_dat_stops_the_start_with_a_hint(data_path: DataPath, text: bytes) -> None:
    data_path.nsqd_dat(text)
    with pytest.raises(StartError) as caught:
        data_path.read()
    file = data_path.path / "nsqd.dat"
    assert str(caught.value).startswith(f"failed to load metadata - failed to parse metadata in {file} - ")
    assert "restore the file, or write one that lists the topics and channels" in str(caught.value)


def test_a_data_path_is_found_by_its_nsqd_dat(data_path: DataPath) -> None:
    assert has_metadata(data_path.path)
    (data_path.path / "nsqd.dat").unlink()
    assert not has_metadata(data_path.path)
    with pytest.raises(StartError, match="failed to load metadata - failed to read metadata from "):
        data_path.read()


def test_names_with_dots_and_diskqueue_in_them_keep_their_own_files(data_path: DataPath) -> None:
    queues = ["..", "a.b", "a.b.diskqueue", "a.b.diskqueue.000000.dat", "a.b.diskqueue.meta.dat"]
    queues += [f"{topic}:{channel}" for topic in queues for channel in ("c", "c.diskqueue.000001")]
    topics: dict[str, list[dict[str, str]]] = {}
    for number, queue in enumerate(queues):
        topic, _, channel = queue.partition(":")
        topics.setdefault(topic, []).extend([{"name": channel}] if channel else [])
        path = data_path.data(0, record(message(number)), queue=queue)
        data_path.meta(1, write_at=(0, path.stat().st_size), queue=queue)
    data_path.nsqd_dat(
        json.dumps({"topics": [{"name": name, "channels": channels} for name, channels in topics.items()]}).encode()
    )
    data = data_path.read()
    found_queues = {topic.name: topic.queue for topic in data.topics}
    found_queues |= {f"{topic.name}:{c.name}": c.queue for topic in data.topics for c in topic.channels}
    assert {name: list(queue) for name, queue in found_queues.items()} == {
        queue: [message(number)] for number, queue in enumerate(queues)
    }
    assert data.orphans == ()
    assert data.damage == []


def test_queues_that_nsqd_dat_does_not_list_are_orphans(data_path: DataPath) -> None:
    data_path.three_files()
    for number, queue in enumerate(["gone", "t:gone"]):
        data_path.data(0, record(message(number)), queue=queue)
    data = data_path.read()
    assert {orphan.name: list(orphan) for orphan in data.orphans} == {"gone": [message(0)], "t:gone": [message(1)]}
    assert data.damage == [
        "gone: queue files of a topic or channel that nsqd.dat does not list",
        "t:gone: queue files of a topic or channel that nsqd.dat does not list",
    ]


def test_ephemeral_names_have_no_files(data_path: DataPath) -> None:
    data_path.nsqd_dat(b'{"topics":[{"name":"e#ephemeral"},{"name":"t","channels":[{"name":"e#ephemeral"}]}]}')
    data_path.data(0, record(message(0)), queue="e#ephemeral")
    data_path.data(0, record(message(1)), queue="t:e#ephemeral")
    data = data_path.read()
    assert names(data) == {"e#ephemeral": [], "t": ["e#ephemeral"]}
    assert list(data.topics[0].queue) == list(data.topics[1].channels[0].queue) == []
    assert [orphan.name for orphan in data.orphans] == ["e#ephemeral", "t:e#ephemeral"]


def test_files_from_windows_have_another_separator(data_path: DataPath) -> None:
    data_path.nsqd_dat(b'{"topics":[{"name":"t","channels":[{"name":"c"}]}]}')
    data_path.data(0, record(message(0)), queue="t;c")
    data_path.meta(1, write_at=(0, len(record(message(0)))), queue="t;c")
    data = data_path.read()
    assert list(data.topics[0].channels[0].queue) == [message(0)]
    assert data.orphans == ()


def test_only_files_of_the_go_daemon_are_listed(data_path: DataPath) -> None:
    go_files = {*data_path.three_files(), data_path.path / "nsqd.dat", data_path.path / "t.diskqueue.meta.dat"}
    for name in ("nsqd.dat.123.tmp", "nsqd.617.dat", "t.diskqueue.000000.dat.bad"):
        (data_path.path / name).write_bytes(b"")
        go_files.add(data_path.path / name)
    for name in ("notes.txt", "t.diskqueue.1.dat", "t.diskqueue.0000001.dat", ".diskqueue.000000.dat", "nsqd.log"):
        (data_path.path / name).write_bytes(b"")
    (data_path.path / "t.diskqueue.000009.dat").mkdir()
    data = data_path.read()
    assert set(data.files) == go_files
    assert data.files[-1] == data.metadata == data_path.path / "nsqd.dat"


# --- moving aside


@pytest.fixture
def full_path(tmp_path: Path) -> DataPath:
    shutil.copytree(CLEAN_STOP, tmp_path, dirs_exist_ok=True)
    os.utime(tmp_path / "nsqd.dat", (1_700_000_000, 1_700_000_000))
    (tmp_path / "notes.txt").write_text("not ours")
    data_path = DataPath.__new__(DataPath)
    data_path.path = tmp_path
    return data_path


def test_every_go_file_is_moved_into_one_folder(full_path: DataPath) -> None:
    folder = move_aside(full_path.read(), full_path.path, Disk())
    assert folder == full_path.path / "go-nsqd-20231114T221320Z"
    assert contents(folder) == contents(CLEAN_STOP)
    assert contents(full_path.path) == {"notes.txt": b"not ours"}
    assert not has_metadata(full_path.path)


def test_moving_aside_again_does_nothing(full_path: DataPath) -> None:
    data = full_path.read()
    folder = move_aside(data, full_path.path, Disk())
    assert move_aside(data, full_path.path, Disk()) == folder
    assert contents(folder) == contents(CLEAN_STOP)


class Crash(BaseException):
    pass


@pytest.mark.parametrize("moved", range(len(list(CLEAN_STOP.iterdir()))))
def test_a_crash_while_moving_is_finished_by_the_next_start(
    full_path: DataPath, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    renames = iter(range(moved))
    rename = os.replace

    def rename_until_the_crash(source: Path, target: Path) -> None:
        if next(renames, None) is None:
            raise Crash
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", rename_until_the_crash)
        with pytest.raises(Crash):
            move_aside(full_path.read(), full_path.path, Disk())
    assert has_metadata(full_path.path)  # nsqd.dat goes last: as long as it is there, there is something to do

    folder = move_aside(full_path.read(), full_path.path, Disk())
    assert contents(folder) == contents(CLEAN_STOP)
    assert contents(full_path.path) == {"notes.txt": b"not ours"}
    assert [path for path in full_path.path.iterdir() if path.is_dir()] == [folder]


def test_an_older_copy_is_never_written_over(full_path: DataPath) -> None:
    first = move_aside(full_path.read(), full_path.path, Disk())
    shutil.copytree(first, full_path.path, dirs_exist_ok=True)  # keeps the times, as `cp -a` does
    (full_path.path / "orders.diskqueue.meta.dat").write_bytes(b"0\n7,0\n7,0\n")
    second = move_aside(full_path.read(), full_path.path, Disk())
    assert second == first.with_name(first.name + "-2")
    assert contents(first) == contents(CLEAN_STOP)
    assert contents(second) == contents(CLEAN_STOP) | {"orders.diskqueue.meta.dat": b"0\n7,0\n7,0\n"}


def test_a_folder_that_cannot_be_made_stops_the_start(full_path: DataPath) -> None:
    (full_path.path / "go-nsqd-20231114T221320Z").write_bytes(b"a file is in the way")
    before = contents(full_path.path)
    with pytest.raises(StartError, match=r"cannot move the files of the Go nsqd to .*go-nsqd-20231114T221320Z - "):
        move_aside(full_path.read(), full_path.path, Disk())
    assert contents(full_path.path) == before
