"""NSQ's tools, ours beside the Go ones: the same flags, input, output and exit codes."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import signal
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flintmq import sync
from flintmq.testing import NsqBroker
from tools.programs import SIDES, Program, command, run, until

TOPIC = "orders"


@pytest.fixture(scope="module")
def broker() -> Iterator[NsqBroker]:
    with NsqBroker(max_msg_timeout="10m") as broker:
        yield broker


def filled(broker: NsqBroker, topic: str, channels: list[str], *bodies: bytes) -> None:
    """Channels that have these messages, in this order."""
    with sync.NodeClient(broker.http_address) as node:
        node.create_topic(topic)
        for channel in channels:
            node.create_channel(topic, channel)
    broker.publish(topic, *bodies)


def on_both(work: Any) -> Any:
    """What both sides give, where that is the same."""
    ours, go = work("ours"), work("go")
    assert ours == go
    return ours


# --- Command lines ----------------------------------------------------------------------------------------------------

SOURCE = "--nsqd-tcp-address=127.0.0.1:1"


@pytest.mark.parametrize(
    ("tool", "argv", "status"),
    [
        ("nsq_to_file", ["--nonsense"], 2),
        ("nsq_to_file", ["--max-in-flight=many"], 2),
        ("nsq_to_file", ["--topic=t", SOURCE, "stray"], 1),
        ("nsq_to_file", ["--topic=t", SOURCE, "--channel="], 1),
        ("nsq_to_file", ["--topic=t", SOURCE, "--gzip-level=10"], 1),
        ("nsq_to_file", ["--topic=t", SOURCE, "--lookupd-http-address=127.0.0.1:1"], 1),
        ("nsq_to_file", ["--topic-pattern=t", SOURCE], 1),
        ("nsq_to_file", ["-version"], 0),
        ("nsq_to_http", ["-topic", "t", SOURCE], 1),
        ("nsq_to_http", ["-topic", "t", SOURCE, "-post=http://x/", "-get=http://x/%s"], 1),
        ("nsq_to_http", ["-topic", "t", SOURCE, "-get=http://x/"], 1),
        ("nsq_to_http", ["-topic", "t", SOURCE, "-get=http://x/%s", "--content-type=a/b"], 1),
        ("nsq_to_http", ["-topic", "t", SOURCE, "-post=http://x/", "--header=nonsense"], 1),
        ("nsq_to_http", ["-topic", "t", SOURCE, "-post=http://x/", "--sample=1.5"], 1),
        ("nsq_to_http", ["-consumer-opt=nonsense,1"], 2),
        ("nsq_to_nsq", ["--topic=t", SOURCE], 1),
        ("nsq_to_nsq", ["--topic=not/valid", SOURCE], 1),
        ("nsq_to_nsq", ["--producer-opt=deflate_level,10"], 2),
        ("nsq_tail", ["--topic=t"], 1),
        ("nsq_tail", [SOURCE], 1),
        ("nsq_tail", ["--topic=t", SOURCE], 1),
        ("nsq_tail", ["-consumer-opt=sample-rate,100"], 2),
        ("nsq_tail", ["-n"], 2),
        ("nsq_stat", ["--topic=t"], 1),
        ("nsq_stat", ["--topic=t", "--channel=c", "--nsqd-http-address=http://127.0.0.1:1"], 1),
        ("nsq_stat", ["--topic=t", "--channel=c", "--nsqd-http-address=127.0.0.1:1", "--count=0"], 1),
        ("nsq_stat", ["--topic=t", "--channel=c", "--nsqd-http-address=127.0.0.1:1"], 1),
        ("to_nsq", ["--topic=t"], 1),
        ("to_nsq", ["--topic=t", SOURCE, "--delimiter=ab"], 1),
    ],
    ids=lambda value: " ".join(value)[-50:] if isinstance(value, list) else None,
)
def test_wrong_command_lines_end_as_with_the_go_tool(
    tool: str, argv: list[str], status: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ours = importlib.import_module(f"flintmq.tools.{tool}").main(argv)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capfd.readouterr()
    assert ours == status
    go = run("go", tool, *argv)
    assert go.returncode == status
    if argv == ["-version"]:
        assert said.out.split() == go.stdout.decode().split()
    if status == 1:
        # The same sentence, where it is about flags.
        sentence = go.stderr.decode().splitlines()[-1].split(" ", 2)[2]
        if "127.0.0.1" not in sentence and "key=value" not in sentence:
            assert sentence.rstrip(".") in said.err


# --- to_nsq -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", ["\n", ";"])
def test_to_nsq_publishes_the_same_records(broker: NsqBroker, delimiter: str) -> None:
    name = f"to_{ord(delimiter)}"
    stdin = b"one;two\n\n;;three;\xff\x00;%b;\nlast" % (b"x" * 100_000) + delimiter.encode()

    def work(side: str) -> list[bytes]:
        topic = f"{name}_{side}"
        done = run(
            side, "to_nsq", f"-topic={topic}", "-nsqd-tcp-address", broker.address, "-delimiter", delimiter, stdin=stdin
        )
        assert done.returncode == 0, done.stderr
        count = broker.stats(topic)["topics"][0]["message_count"]
        return broker.take(topic, count, channel="all")

    # The order too: each waits for its answer.
    assert len(on_both(work)) >= 3


def test_to_nsq_keeps_the_last_byte_of_a_record_without_a_delimiter(broker: NsqBroker) -> None:
    done = run("ours", "to_nsq", "-topic=unended", f"-nsqd-tcp-address={broker.address}", stdin=b"abc\ndef")
    assert (done.returncode, broker.take("unended", 2)) == (0, [b"abc", b"def"])


def peak(pid: int) -> int:
    """The most bytes of memory that a process has had; 0 where that cannot be read, or no longer."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) << 10 if found else 0
    return 0


@pytest.mark.parametrize("size", [65 << 20, 400 << 20])
def test_to_nsq_refuses_a_record_without_end_before_it_fills_the_memory(broker: NsqBroker, size: int) -> None:
    """However much comes, no more of it is kept than the longest record has; and what came before is published."""
    topic = f"endless_{size >> 20}"
    words = [*command("ours", "to_nsq"), f"-topic={topic}", f"-nsqd-tcp-address={broker.address}", "-delimiter=;"]
    most = 0
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdin is not None and program.stderr is not None
        with contextlib.suppress(BrokenPipeError), program.stdin as stdin:
            stdin.write(b"one;two;")
            for _ in range(size >> 20):
                stdin.write(bytes(1 << 20))
                most = max(most, peak(program.pid))
        said = program.stderr.read().decode()
    assert program.returncode == 1
    line = said.splitlines()[-1]
    assert f"the record at byte 8 of standard input is longer than {64 << 20} bytes" in line and "';'" in line
    # The interpreter, the longest record, and the little that is read ahead.
    assert most < 200 << 20
    assert broker.take(topic, 2) == [b"one", b"two"]


def test_to_nsq_publishes_to_every_address(broker: NsqBroker) -> None:
    with NsqBroker() as other:
        addresses = [f"--nsqd-tcp-address={each.address}" for each in (broker, other)]
        assert run("ours", "to_nsq", "-topic=every", *addresses, "-rate=1000", stdin=b"a\nb\n").returncode == 0
        assert broker.take("every", 2) == other.take("every", 2) == [b"a", b"b"]


# --- nsq_tail ---------------------------------------------------------------------------------------------------------


def test_nsq_tail_prints_the_same_bytes(broker: NsqBroker) -> None:
    bodies = [b"plain", b"two\nlines", b"\xff\x00", b"z" * 70_000]
    filled(broker, "tailed", list(SIDES), *bodies)

    def work(side: str) -> bytes:
        done = run(
            side, "nsq_tail", "-topic=tailed", f"-channel={side}", "-n=4", "-print-topic",
            f"-nsqd-tcp-address={broker.address}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert on_both(work) == b"".join(b"tailed | %b\n" % body for body in bodies)


def test_nsq_tail_finishes_the_last_message_and_gives_back_the_rest(broker: NsqBroker) -> None:
    filled(broker, "counted", ["c"], *(b"%d" % number for number in range(10)))
    done = run("ours", "nsq_tail", "-topic=counted", "-channel=c", "-n=3", f"-nsqd-tcp-address={broker.address}")
    assert (done.returncode, done.stdout) == (0, b"0\n1\n2\n")
    assert sorted(broker.take("counted", 7, channel="c")) == [b"%d" % number for number in range(3, 10)]


# --- nsq_stat ---------------------------------------------------------------------------------------------------------


def test_nsq_stat_prints_the_same_lines(broker: NsqBroker) -> None:
    filled(broker, "counts", ["c"], *(b"%d" % number for number in range(5)))
    argv = ["-topic=counts", "-channel=c", f"-nsqd-http-address={broker.http_address}", "-count=2", "-interval=20ms"]

    def work(side: str) -> bytes:
        done = run(side, "nsq_stat", *argv)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert len(on_both(work).splitlines()) == 4


def test_nsq_stat_goes_on_when_one_of_two_nsqds_is_down(broker: NsqBroker) -> None:
    filled(broker, "half", ["c"], b"one")
    addresses = [f"-nsqd-http-address={address}" for address in (broker.http_address, "127.0.0.1:1")]
    done = run("ours", "nsq_stat", "-topic=half", "-channel=c", "-count=1", "-interval=10ms", *addresses)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 3
    assert b"left out of this line: 127.0.0.1:1" in done.stderr


# --- nsq_to_nsq -------------------------------------------------------------------------------------------------------

OBJECTS = [
    b'{"b": 2.0, "a": "<&>\xe2\x80\xa8", "c": [1, 2.5], "drop": 1}',
    b'{"b": 1.5, "kind": "x"}',
    b'{"a": null, "b": 12345678, "kind": "y"}',
    b"no json",
    b"[1]",
    b"{}",
    b"null",
    b' { "b" : "caf\xe9 \xe2\x82 \xf0\x9f\x98\x80 \\ud83d\\ude00 \\ud83d\\n" , "\\ude00": 1 } ',
    b'{"b": {"x": ["\xff"]}, "a": {"y": "\xff"}}',
    b'{"b": ["\xff", 1 2]}',
    b'{"b": "\xff",}',
    b'{"b": "\xff"]',
    b'{"b": "\xff"} {',
    b'{"b": "\xff\x01"}',
    b'{"b": "\xff", "a" 1}',
    b'{"b": {"\xff": 01}}',
    b'{"b": %b, "a": 1}' % (b"[" * 5000 + b"]" * 5000),
    b'{"b": %b}' % (b"[" * 10_000 + b"]" * 10_000),
    b"[" * 100_000,
    b'{"b": ' * 100_000,
]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["-whitelist-json-field=a", "-whitelist-json-field=b"],
        ["-require-json-field=b"],
        ["-require-json-field=b", "-require-json-value=2", "-whitelist-json-field=c"],
    ],
    ids=["all", "whitelist", "field", "value"],
)
def test_nsq_to_nsq_republishes_the_same_bodies(broker: NsqBroker, tmp_path: Path, flags: list[str]) -> None:
    name = f"relay{abs(hash(tuple(flags))) % 10**9}"
    bodies = [body for body in OBJECTS if "-require-json-value=2" not in flags or b'"b"' in body]
    filled(broker, name, list(SIDES), *bodies)

    def work(side: str) -> list[bytes]:
        target = f"{name}_{side}"
        argv = [f"-topic={name}", f"-channel={side}", f"-nsqd-tcp-address={broker.address}"]
        argv += [f"-destination-topic={target}", f"-destination-nsqd-tcp-address={broker.address}", *flags]
        with Program(side, "nsq_to_nsq", argv, tmp_path) as program:
            broker.wait_until_empty(name, side)
            assert program.end(signal.SIGTERM) == 0
        topics = broker.stats(target)["topics"]
        return sorted(broker.take(target, topics[0]["message_count"])) if topics else []

    assert on_both(work)


def test_nsq_to_nsq_reads_numbers_of_any_length_and_lists_of_any_depth(broker: NsqBroker, tmp_path: Path) -> None:
    huge = b"1" + b"0" * 400
    deep = b"[" * 5000 + b"]" * 5000
    others = [b'{"b": %b}' % huge, b'{"b": %b}' % deep, b'{"b": [1' * 20_000]
    bodies = [b'{"b": 1, "c": %b}' % more for more in (b"1e999", huge * 20, deep)]
    filled(broker, "huge", ["c"], *others, *bodies)
    argv = ["-topic=huge", "-channel=c", f"-nsqd-tcp-address={broker.address}", "-destination-topic=huge_too"]
    argv += [f"-destination-nsqd-tcp-address={broker.address}", "-require-json-field=b", "-require-json-value=1"]
    with Program("ours", "nsq_to_nsq", argv, tmp_path) as program:
        broker.wait_until_empty("huge", "c")
        assert program.end(signal.SIGTERM) == 0, program.log
    assert sorted(broker.take("huge_too", 3)) == sorted(bodies)


def test_nsq_to_nsq_passes_on_the_others_when_one_is_refused(tmp_path: Path, broker: NsqBroker) -> None:
    filled(broker, "sizes", ["c"], b"small", b"x" * 2000, b"little")
    with NsqBroker(max_msg_size=1000) as small:
        argv = ["-topic=sizes", "-channel=c", f"-nsqd-tcp-address={broker.address}"]
        argv += [f"-destination-nsqd-tcp-address={small.address}", "-consumer-opt=default_requeue_delay,1m"]
        with Program("ours", "nsq_to_nsq", argv, tmp_path) as program:
            assert sorted(small.take("sizes", 2)) == [b"little", b"small"]
            # The other waits, and is not lost.
            until(lambda: broker.stats("sizes")["topics"][0]["channels"][0]["deferred_count"] == 1)
            assert program.end(signal.SIGINT) == 0


# --- nsq_to_http ------------------------------------------------------------------------------------------------------


class Recorder(ThreadingHTTPServer):
    """A web server that keeps what it was sent."""

    def __init__(self, status: int = 200) -> None:
        self.came: list[tuple[str, str, dict[str, str], bytes]] = []
        self.statuses = [status]
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        wanted = ("user-agent", "content-type", "x-token", "host", "authorization")
        headers = {name.lower(): value for name, value in self.headers.items() if name.lower() in wanted}
        self.server.came.append((self.command, self.path, headers, body))
        status = self.server.statuses.pop() if len(self.server.statuses) > 1 else self.server.statuses[0]
        if status == 200 and self.path == "/moved":
            status = 302
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: object) -> None: ...


@contextlib.contextmanager
def recorder(status: int = 200) -> Iterator[Recorder]:
    with Recorder(status) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["post", "get"])
def test_nsq_to_http_makes_the_same_requests(broker: NsqBroker, tmp_path: Path, kind: str) -> None:
    name = f"http_{kind}"
    filled(broker, name, list(SIDES), b"plain", b"a b&c=d/\xc3\xa9~*", b"\xff\x00")
    with recorder() as server:

        def work(side: str) -> list[Any]:
            server.came.clear()
            url = server.url.replace("//", "//ann%40x:s%3Acret@" if kind == "post" else "//ann:secret@")
            url += "/an é/in?x=1" if kind == "post" else "/in?m=%s&y=2"
            argv = [f"-topic={name}", f"-channel={side}", f"-nsqd-tcp-address={broker.address}", f"-{kind}={url}"]
            argv += ["--header=X-Token: a: b", *(["-content-type=text/x"] if kind == "post" else [])]
            with Program(side, "nsq_to_http", argv, tmp_path) as program:
                broker.wait_until_empty(name, side)
                assert program.end(signal.SIGTERM) == 0
            return sorted(server.came, key=str)

        assert len(on_both(work)) == 3


def test_nsq_to_http_requeues_what_is_refused_and_follows_redirects(broker: NsqBroker, tmp_path: Path) -> None:
    filled(broker, "refused", ["c"], b"one")
    with recorder() as server:
        server.statuses = [200, 500]  # the last first
        argv = ["-topic=refused", "-channel=c", f"-nsqd-tcp-address={broker.address}", f"-post={server.url}/moved"]
        argv += [
            "--consumer-opt=default_requeue_delay,0s",
            "--consumer-opt=max_backoff_duration,0s",
            "--mode=round-robin",
        ]
        with Program("ours", "nsq_to_http", argv, tmp_path) as program:
            until(lambda: len(server.came) >= 4)
            broker.wait_until_empty("refused", "c")
            assert program.end(signal.SIGTERM) == 0
        assert "got status code 500; the message is requeued (attempt 1)" in program.log
    assert [(method, path) for method, path, _, _ in server.came] == [
        ("POST", "/moved"), ("POST", "/moved"), ("POST", "/moved"), ("GET", "/elsewhere"),
    ]  # fmt: skip


class Raw(socketserver.ThreadingTCPServer):
    """A web server that answers each message with the bytes that it is given, and closes if there are no more."""

    daemon_threads = True

    def __init__(self, answers: dict[bytes, list[bytes]]) -> None:
        self.answers = answers
        self.came: list[bytes] = []
        self.meeting = threading.Barrier(5)
        super().__init__(("127.0.0.1", 0), RawHandler)


class RawHandler(socketserver.StreamRequestHandler):
    server: Raw

    def handle(self) -> None:
        while True:
            size = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            if not line:
                return
            body = self.rfile.read(size)
            self.server.came.append(body)
            if body == b"together":
                self.server.meeting.wait(20)
            answers = self.server.answers.get(body, [])
            answer = answers.pop(0) if answers else OK
            self.wfile.write(answer)
            if not answer.endswith(OK):
                return


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
#: Answers, and how often a message is sent that has got one of them first.
ANSWERS = {
    b"": 2,
    b"HTTP/1.1 2": 2,
    b"HTTP/1.1 200": 2,
    b"HTTP/1.0 200 OK\r\n": 2,
    b"HTTP/1.1 200 OK\r\nConnection: close\r\n": 2,
    b"HTTP/1.1 100 Continue\r\n\r\n": 2,
    b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK: 1,
    b"HTTP/1.1 200 OK\r\n\r\nup to the end": 1,
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100\r\n\r\nshort": 1,
}


@pytest.mark.parametrize("side", SIDES)
def test_nsq_to_http_finishes_a_message_only_after_the_whole_head_of_an_answer(
    broker: NsqBroker, tmp_path: Path, side: str
) -> None:
    bodies = [b"%d" % number for number in range(len(ANSWERS))]
    with Raw({body: [answer] for body, answer in zip(bodies, ANSWERS, strict=True)}) as server:
        send(broker, f"cut_off_{side}", side, bodies, server, tmp_path)
        assert [server.came.count(body) for body in bodies] == list(ANSWERS.values())


@pytest.mark.parametrize("side", SIDES)
def test_nsq_to_http_posts_a_message_once_per_attempt(broker: NsqBroker, tmp_path: Path, side: str) -> None:
    # Nobody knows whether a server that closes has done something.
    with Raw({b"fatal": [b"", b""]}) as server:
        send(broker, f"fatal_{side}", side, [*[b"together"] * 5, b"fatal"], server, tmp_path)
        [topic] = broker.stats(f"fatal_{side}")["topics"]
        assert (server.came.count(b"fatal"), topic["channels"][0]["requeue_count"]) == (3, 2)


def send(broker: NsqBroker, topic: str, side: str, bodies: list[bytes], server: Raw, folder: Path) -> None:
    """Send messages, each again at once where it fails."""
    filled(broker, topic, ["c"], *bodies)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    argv = [f"-topic={topic}", "-channel=c", f"-nsqd-tcp-address={broker.address}"]
    argv += [f"-post=http://127.0.0.1:{server.server_address[1]}/", "-n=5", "-max-in-flight=5"]
    argv += ["--consumer-opt=default_requeue_delay,0s", "--consumer-opt=max_backoff_duration,0s"]
    try:
        with Program(side, "nsq_to_http", argv, folder) as program:
            broker.wait_until_empty(topic, "c")
            assert program.end(signal.SIGTERM) == 0
    finally:
        server.shutdown()
        thread.join()


# --- nsq_to_file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--filename-format=<TOPIC>.<HOST>.<DATETIME>.log", "--datetime-format=%Y-%m-%d%%%q"],
        ["--rotate-size=1000", "--filename-format=deep/<TOPIC><REV>.log", "--max-in-flight=7"],
        ["--gzip", "--filename-format=<TOPIC><REV>.txt", "--work-dir={folder}/work"],
    ],
    ids=["plain", "rotated", "gzip"],
)
def test_nsq_to_file_writes_the_same_files(broker: NsqBroker, tmp_path: Path, flags: list[str]) -> None:
    name = f"file{abs(hash(tuple(flags))) % 10**9}"
    filled(broker, name, list(SIDES), *(b"message %d %b" % (number, b"x" * (number % 50)) for number in range(300)))

    def work(side: str) -> dict[str, bytes]:
        folder = tmp_path / side
        (folder / "work").mkdir(parents=True)
        argv = [f"--topic={name}", f"--channel={side}", f"--nsqd-tcp-address={broker.address}"]
        argv += ["--host-identifier=<SHORT_HOST>-x", f"--output-dir={folder}/out", "--sync-interval=20ms"]
        argv += [flag.format(folder=folder) for flag in flags]
        with Program(side, "nsq_to_file", argv, tmp_path) as program:
            broker.wait_until_empty(name, side)
            assert program.end(signal.SIGTERM) == 0, program.log
        assert not any((folder / "work").iterdir())
        files = sorted(path for path in (folder / "out").rglob("*") if path.is_file())
        return {
            str(path.relative_to(folder)): gzip.decompress(path.read_bytes())
            if path.suffix == ".gz"
            else path.read_bytes()
            for path in files
        }

    files = on_both(work)
    assert b"".join(files.values()).count(b"\n") == 300
    assert len(files) == (10 if "rotate" in flags[0] else 1) or len(files) > 5


def test_nsq_to_file_consumes_topics_like_a_pattern_at_once(tmp_path: Path) -> None:
    from flintmq.testing import NsqCluster

    with NsqCluster(1, 1) as cluster:
        [broker] = cluster.brokers
        for topic in ("logs_a", "logs_b", "other"):
            broker.publish(topic, topic.encode())
        until(lambda: json.dumps(cluster_topics(cluster)) == json.dumps(["logs_a", "logs_b", "other"]))
        argv = [f"--lookupd-http-address={cluster.lookupds[0].http_address}", "--topic-pattern=^logs_"]
        argv += [f"--output-dir={tmp_path}/out", "--filename-format=<TOPIC>.log", "--sync-interval=20ms"]
        with Program("ours", "nsq_to_file", argv, tmp_path) as program:
            for topic in ("logs_a", "logs_b"):
                until(lambda topic=topic: broker.stats(topic)["topics"][0]["channels"])
                broker.wait_until_empty(topic, "nsq_to_file")
            assert program.end(signal.SIGTERM) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        "logs_a.log": "logs_a\n",
        "logs_b.log": "logs_b\n",
    }


def cluster_topics(cluster: Any) -> list[str]:
    import urllib.request

    with urllib.request.urlopen(f"http://{cluster.lookupds[0].http_address}/topics") as answer:
        return sorted(json.load(answer)["topics"])
