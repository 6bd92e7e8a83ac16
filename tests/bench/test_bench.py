"""The benchmark itself: a small run of it, and the load generator's manners towards a daemon."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 60
HELLO = b'  V2IDENTIFY\n\0\0\0\x1c{"feature_negotiation":true}'

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compile into a folder of the test's own, with the compiler that needs_compiler has looked for."""
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "CC": "cc"}


@pytest.fixture(scope="module")
def generator(environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", "from bench.load import build; print(build())"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=TIMEOUT
    ).stdout.strip()


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", 4 + len(data), kind) + data


def read_exactly(connection: socket.socket, size: int) -> bytes:
    with connection.makefile("rb", buffering=0) as stream:
        data = b""
        while len(data) < size and (more := stream.read(size - len(data))):
            data += more
        return data


@contextmanager
def one_connection_of(generator: str, *options: str) -> Iterator[tuple[socket.socket, subprocess.Popen[str]]]:
    """A generator that has connected to us and had its IDENTIFY answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        command = [generator, f"--port={server.getsockname()[1]}", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(TIMEOUT)
                    assert read_exactly(connection, len(HELLO)) == HELLO
                    connection.sendall(frame(0, b"{}"))
                    yield connection, process
            finally:
                process.kill()


@needs_compiler
def test_generator_answers_a_heartbeat(generator: str) -> None:
    with one_connection_of(generator, "--mode=idle", "--seconds=60") as (connection, process):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"event": "ready", "connections": 1}
        connection.sendall(frame(0, b"_heartbeat_"))
        assert read_exactly(connection, 4) == b"NOP\n"
        process.terminate()
        assert json.loads(process.stdout.readline())["event"] == "done"
        assert process.wait(TIMEOUT) == 0


@needs_compiler
def test_generator_fails_with_the_text_of_an_error_frame(generator: str) -> None:
    with one_connection_of(generator, "--mode=pub", "--size=8", "--topic=orders") as (connection, process):
        request = b"PUB orders\n\0\0\0\x08aaaaaaaa"
        assert read_exactly(connection, len(request)) == request
        connection.sendall(frame(1, b"E_PUB_FAILED no space"))
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 1
        assert "E_PUB_FAILED no space" in errors


@contextmanager
def one_request_of(generator: str, *options: str) -> Iterator[tuple[socket.socket, subprocess.Popen[str]]]:
    """A generator over HTTP that has connected to us."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        command = [generator, f"--port={server.getsockname()[1]}", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(TIMEOUT)
                    yield connection, process
            finally:
                process.kill()


def read_request(connection: socket.socket) -> tuple[str, bytes]:
    """The request line and the body."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += read_exactly(connection, 1)
    line, *headers = head.decode().split("\r\n")
    [length] = [header.partition(": ")[2] for header in headers if header.startswith("Content-Length:")]
    return line, read_exactly(connection, int(length))


@needs_compiler
@pytest.mark.parametrize(
    ("mode", "line", "body"),
    [
        ("hpub", "POST /pub?topic=orders HTTP/1.1", b"aaaaaaaa"),
        ("hmpub", "POST /mpub?topic=orders HTTP/1.1", b"aaaaaaaa\nbbbbbbbb"),
    ],
)
def test_generator_publishes_over_http_and_waits_for_each_answer(
    generator: str, mode: str, line: str, body: bytes
) -> None:
    options = (f"--mode={mode}", "--size=8", "--batch=2", "--topic=orders", "--seconds=60")
    count = 2 if mode == "hpub" else 4
    with one_request_of(generator, *options, f"--messages={count}") as (connection, process):
        for _ in range(2):
            assert read_request(connection) == (line, body)
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"
            # Cut in the middle: the rest comes in another read.
            connection.sendall(answer[:20])
            connection.sendall(answer[20:])
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert json.loads(output)["messages"] == count


@needs_compiler
def test_generator_fails_with_the_text_of_an_http_error(generator: str) -> None:
    with one_request_of(generator, "--mode=hpub", "--size=8", "--seconds=60") as (connection, process):
        read_request(connection)
        connection.sendall(b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 21\r\n\r\n{"message":"EXITING"}')
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 1
        assert "EXITING" in errors


@needs_compiler
def test_generator_finishes_every_message_it_gets(generator: str) -> None:
    ids = [b"%016x" % number for number in range(20)]
    attempts = [1] * 19 + [2]
    messages = b"".join(
        frame(2, struct.pack(">qH", 0, attempt) + id + b"body") for id, attempt in zip(ids, attempts, strict=True)
    )
    options = ("--mode=sub", "--topic=orders", "--channel=billing", "--rdy=25", "--messages=20", "--seconds=60")
    with one_connection_of(generator, *options) as (connection, process):
        assert read_exactly(connection, 19) == b"SUB orders billing\n"
        connection.sendall(frame(0, b"OK"))
        assert read_exactly(connection, 7) == b"RDY 25\n"
        # Cut in the middle of a frame: the rest comes in another read.
        connection.sendall(messages[:100])
        assert read_exactly(connection, 21 * 2) == b"".join(b"FIN %s\n" % id for id in ids[:2])
        connection.sendall(messages[100:])
        assert read_exactly(connection, 21 * 18) == b"".join(b"FIN %s\n" % id for id in ids[2:])
        assert read_exactly(connection, 4) == b"CLS\n"
        connection.sendall(frame(0, b"CLOSE_WAIT"))
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        report = json.loads(output.splitlines()[-1])
        assert report["messages"] == report["least"] == report["most"] == 20
        assert report["started"] <= report["first"] <= report["marked"] <= report["finished"]
        assert report["marked_messages"] >= 19
        assert report["redelivered"] == 1


@needs_compiler
def test_generator_keeps_a_window_of_requests_under_way_round_robin_over_topics(generator: str) -> None:
    options = ("--mode=pub", "--topic=t", "--topics=3", "--window=4", "--size=1", "--messages=6", "--seconds=60")
    requests = [b"PUB t-%06d\n\0\0\0\x01a" % (number % 3) for number in range(6)]
    with one_connection_of(generator, *options) as (connection, process):
        assert read_exactly(connection, 4 * len(requests[0])) == b"".join(requests[:4])
        connection.sendall(frame(0, b"OK") * 3)
        # Three answers leave room for three, and six are all.
        assert read_exactly(connection, 2 * len(requests[0])) == b"".join(requests[4:])
        connection.sendall(frame(0, b"OK") * 3)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert json.loads(output)["messages"] == 6


@needs_compiler
def test_generator_connects_again_when_its_identify_is_answered(generator: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        options = ("--mode=connect", "--messages=3", "--seconds=60")
        command = [generator, f"--port={server.getsockname()[1]}", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                for _ in range(3):
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(TIMEOUT)
                        assert read_exactly(connection, len(HELLO)) == HELLO
                        connection.sendall(frame(0, b"{}"))
                        # The end of the stream: it closes in order.
                        assert connection.recv(1) == b""
                output, _ = process.communicate(timeout=TIMEOUT)
            finally:
                process.kill()
        assert process.returncode == 0
        assert json.loads(output)["messages"] == 3


@needs_compiler
def test_generator_sends_the_identify_that_it_is_given(generator: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        identify = '{"output_buffer_size":-1}'
        command = [generator, f"--port={server.getsockname()[1]}", "--mode=idle", f"--identify={identify}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(TIMEOUT)
                    expected = b"  V2IDENTIFY\n" + struct.pack(">I", len(identify)) + identify.encode()
                    assert read_exactly(connection, len(expected)) == expected
            finally:
                process.kill()


def test_unknown_scenario_is_refused_with_the_known_names() -> None:
    command = [sys.executable, "-m", "bench", "--only", "mpub,nonsense"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert answer.returncode == 2
    assert "'nonsense' is none of mpub, consume" in answer.stderr


def quick_run(environment: dict[str, str], folder: Path, only: str) -> tuple[Any, str, str]:
    """The result, what was printed, and the table in Markdown."""
    cli = pytest.importorskip("flintmq.cli", exc_type=ImportError)
    # The benchmark starts the broker by module name: let it find the package that this test runs with.
    paths = [str(Path(cli.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    output = folder / "result.json"
    table = folder / "result.md"
    options = ["--only", only, "--quick", "--json", str(output), "--markdown", str(table)]
    answer = subprocess.run(
        [sys.executable, "-m", "bench", *options],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result = json.loads(output.read_text())
    assert result["failures"] == []
    return result, answer.stdout, table.read_text()


@needs_compiler
def test_quick_run_measures_many_topics_lagging_channels_connects_and_unbuffered_latency(
    environment: dict[str, str], tmp_path: Path
) -> None:
    result, _, _ = quick_run(environment, tmp_path, "pub-1,pub-2,topics,lagging,connect,latency-unbuffered")
    rows = {row["metric"]: row["ours_median"] for row in result["results"]}
    assert list(rows) == [
        *("pub-1", "pub-2", "topics", "lagging", "lagging-read", "connect-1", "connect-50"),
        *("latency-unbuffered-p50", "latency-unbuffered-p99", "latency-unbuffered-p99.9"),
        *("cpu-pub-1", "cpu-pub-2", "cpu-topics", "cpu-lagging", "cpu-connect-1", "cpu-connect-50"),
    ]
    assert all(value > 0 for value in rows.values())
    loads = {sample["scenario"]: dict(sample["loads"]) for sample in result["samples"]}
    assert loads["topics"]["pub"]["messages"] == result["sizes"]["topics_pub"]
    assert loads["lagging"]["sub"]["connections"] == result["sizes"]["lagging_channels"]
    assert loads["connect-50"]["connect"]["connections"] == 50


@needs_compiler
def test_quick_run_measures_our_broker(environment: dict[str, str], tmp_path: Path) -> None:
    result, printed, table = quick_run(environment, tmp_path, "mpub,consume,http")
    rows = {row["metric"]: row for row in result["results"]}
    assert list(rows) == [
        *("mpub", "consume", "http-pub", "http-pub-1", "http-mpub"),
        *("cpu-mpub", "cpu-consume", "cpu-http-pub-1", "cpu-http-pub", "cpu-http-mpub"),
    ]
    assert rows["http-pub"]["ours_median"] > 0
    assert rows["http-mpub"]["ours_median"] > 0
    assert rows["mpub"]["ours_median"] > 0
    assert rows["consume"]["ours_median"] > 0
    assert all(row["peer"] == [] and row["ratio"] is None for row in rows.values())
    loads = {sample["scenario"]: dict(sample["loads"]) for sample in result["samples"]}
    assert loads["consume"]["sub"]["messages"] == result["sizes"]["consume"]
    assert loads["mpub"]["mpub"]["messages"] <= result["sizes"]["mpub"]
    assert result["machine"]["cores"] >= 1
    assert len(result["machine"]["load_average_after"]) == 3
    assert "MPUB ×200" in printed
    assert "| MPUB ×200" in table


@needs_compiler
def test_a_reader_of_the_log_gets_every_byte_beside_publishing_and_consuming(
    environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "bench.log_fetch", "--quick", "--repeat=1", f"--json={tmp_path / 'result.json'}"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * TIMEOUT)
    assert run.returncode == 0, run.stderr
    assert "every byte as published" in run.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ratio"] > 0
    [with_reader] = result["runs"]["true"]
    assert with_reader["read"] > 0
