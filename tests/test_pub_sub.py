"""`flintmq pub` and `flintmq sub` over every kind of connection: encrypted, authorized, compressed. Real processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flintmq.testing import NsqBroker
from support.secure import AuthServer, Certificates, Question, grants

# A guard against hanging, nowhere a measure.
PATIENCE = 100


def run(*argv: str) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    done = subprocess.run(
        [sys.executable, "-m", "flintmq", *argv], capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def converse(broker: NsqBroker, *flags: str) -> None:
    """Both directions; the second message is large and cannot be compressed."""
    large = os.urandom(150_000).hex()
    assert run("pub", "t", "small", "--nsqd", broker.address, *flags)[::2] == (0, "")
    file = broker.data_path / "lines"
    file.write_text(f"{large}\n")
    assert run("pub", "t", "--file", str(file), "--nsqd", broker.address, *flags)[::2] == (0, "")
    status, printed, errors = run("sub", "t/c", "-n", "2", "--nsqd", broker.address, *flags)
    assert (status, errors) == (0, "")
    assert sorted(printed.splitlines()) == sorted(["small", large])
    broker.wait_until_empty("t", "c")


def refused(broker: NsqBroker, *flags: str) -> str:
    """What is said to somebody who is not let in: one line, and the same by both."""
    lines = []
    for tool, what in (("pub", ["t", "x"]), ("sub", ["t/c", "-n", "1", "--timeout", "60s"])):
        status, printed, errors = run(tool, *what, "--nsqd", broker.address, *flags)
        assert (status, printed) == (1, "")
        [line] = errors.splitlines()
        assert line.startswith(f"flintmq {tool}: ")
        lines.append(line.partition(": ")[2])
    assert len(set(lines)) == 1
    return lines[0]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def test_encrypted(certificates: Certificates, tmp_path: Path) -> None:
    with NsqBroker(**certificates.options, tls_required="tcp-https") as broker:
        converse(broker, "--tls", "--tls-root-ca-file", certificates.ca)
        converse(broker, "--tls-root-ca-file", certificates.ca, "--snappy")  # who names an authority wants TLS
        # The system's authorities do not know this one.
        assert refused(broker, "--tls").endswith("--tls-root-ca-file (--tls-insecure checks nothing)")
        for tool, what in (("pub", ("t", "x")), ("sub", ("t/c", "-n", "1"))):
            assert run(tool, *what, "--nsqd", broker.address)[2].endswith("(TLS required); give --tls\n")
        converse(broker, "--tls-insecure")
        (tmp_path / "nonsense").write_text("nonsense")
        for flag, file in (("--tls-root-ca-file", "missing.pem"), ("--tls-cert", str(tmp_path / "nonsense"))):
            assert refused(broker, flag, file).startswith("cannot use the files of --tls-root-ca-file, ")


def test_a_certificate_of_ones_own(certificates: Certificates, tmp_path: Path) -> None:
    issued = certificates.authority.issue_cert("client.example")
    issued.private_key_pem.write_to_path(tmp_path / "client-key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "client.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    trust = ("--tls-root-ca-file", certificates.ca)
    with NsqBroker(
        **certificates.options, tls_client_auth_policy="require-verify", tls_root_ca_file=certificates.ca
    ) as broker:
        converse(
            broker, *trust, "--tls-cert", str(tmp_path / "client.pem"), "--tls-key", str(tmp_path / "client-key.pem")
        )
        converse(broker, *trust, "--tls-cert", str(tmp_path / "both.pem"))
        refused(broker, *trust)
        # Not the key of this certificate, and none at all.
        refused(broker, *trust, "--tls-cert", str(tmp_path / "client.pem"), "--tls-key", certificates.key)
        refused(broker, *trust, "--tls-cert", str(tmp_path / "client.pem"))


def test_commands_over_http_are_told_where_https_is(certificates: Certificates) -> None:
    with NsqBroker(**certificates.options, tls_required="true", https_address="127.0.0.1:0") as broker:
        advice = r"refuses plain HTTP, use (https://127\.0\.0\.1:\d+); see --nsqd-http-address$"
        for command in (("peek", "t"), ("ls",)):
            status, _, errors = run(*command, "--nsqd-http-address", broker.http_address)
            found = re.search(advice, errors)
            assert (status, bool(found)) == (1, True), errors
        assert found is not None
        trust = ("--tls-root-ca-file", certificates.ca)
        assert run("ls", "--nsqd-http-address", found[1], *trust)[::2] == (0, "")


async def test_a_broker_without_tls_is_not_spoken_to_in_clear(nsq_broker: NsqBroker) -> None:
    line = await asyncio.to_thread(refused, nsq_broker, "--tls")
    assert line == f"{nsq_broker.address}: the broker does not offer TLS"


async def test_authorized() -> None:
    def decide(question: Question) -> Any:
        if "secret=open+sesame" in question.target or "secret=open%20sesame" in question.target:
            return grants("^t$")
        return 403, b"{}"

    async with AuthServer.start() as server:
        server.answer = decide
        with NsqBroker(
            auth_http_addresses=(server.address,),
            http_client_request_timeout="10m",
            http_client_connect_timeout="10m",
        ) as broker:
            await asyncio.to_thread(converse, broker, "--auth-secret", "open sesame")
            await asyncio.to_thread(converse, broker, "--auth-secret=open sesame", "--deflate")
            line = await asyncio.to_thread(refused, broker)
            assert line == f"{broker.address} asks for AUTH: give --auth-secret"
            line = await asyncio.to_thread(refused, broker, "--auth-secret", "wrong")
            assert "E_AUTH_FAILED" in line or "E_UNAUTHORIZED" in line
            # Let in, but not to this topic.
            nothing = ("--nsqd", broker.address, "--auth-secret=open sesame")
            for argv in (("pub", "other", "x"), ("sub", "other/c", "-n", "1")):
                status, _, errors = await asyncio.to_thread(run, *argv, *nothing)
                assert status == 1
                assert "E_UNAUTHORIZED" in errors


@pytest.mark.parametrize("compression", ["--deflate", "--snappy"])
def test_compressed(nsq_broker: NsqBroker, compression: str) -> None:
    converse(nsq_broker, compression)


def test_compression_that_is_not_granted_is_done_without() -> None:
    with NsqBroker(snappy=False, deflate=False) as broker:
        converse(broker, "--snappy")


def test_pub_without_words_asks_for_a_topic_alone() -> None:
    status, _, errors = run("pub")
    assert (status, errors.splitlines()[-1].rpartition(": ")[2]) == (2, "TOPIC")


def test_two_compressions_are_a_usage_error() -> None:
    status, _, errors = run("pub", "t", "x", "--deflate", "--snappy")
    assert status == 2
    assert "not allowed with" in errors


def test_deferred_messages_are_bounded_by_their_bytes_too(nsq_broker: NsqBroker, tmp_path: Path) -> None:
    lines = [f"{number} " + "x" * 100_000 for number in range(100)]
    (tmp_path / "lines").write_text("\n".join(lines))
    argv = ("pub", "t", "--file", str(tmp_path / "lines"), "--defer", "1h", "--nsqd", nsq_broker.address)
    assert run(*argv)[::2] == (0, "")
    nsq_broker.clock.advance(3600)
    found = nsq_broker.take("t", 100)
    assert sorted(found) == sorted(line.encode() for line in lines)


def test_a_broker_that_is_lost_ends_sub_with_the_reason(nsq_broker: NsqBroker) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "flintmq", "sub", "t/c", "--nsqd", nsq_broker.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as subscriber:
        try:
            nsq_broker.publish("t", b"x")
            assert subscriber.stdout is not None
            assert subscriber.stdout.readline() == b"x\n"
            nsq_broker.crash()
            _, errors = subscriber.communicate(timeout=PATIENCE)
        finally:
            subscriber.kill()
    assert subscriber.returncode == 1
    assert errors.decode().startswith(f"flintmq sub: {nsq_broker.address}: ")


@pytest.mark.parametrize("tool", ["pub", "sub"])
def test_a_tool_loads_only_what_it_needs(tool: str) -> None:
    program = f"import flintmq.tools.{tool}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE)
    loaded = set(done.stdout.split())
    assert f"flintmq.tools.{tool}" in loaded
    assert not loaded & {"aiohttp", "prometheus_client", "rich", "flintmq.broker", "flintmq.protocol.compression"}


# --- Who reads the output, and who writes the input -------------------------------------------------------------------


def start(*argv: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "flintmq", *argv], stderr=subprocess.PIPE, **options)


def attempts(broker: NsqBroker, count: int) -> list[int]:
    """How often the messages of t/c were delivered before: all come at once, none waits for a timeout."""
    status, printed, errors = run(
        "sub", "t/c", "-n", str(count), "--json", "--timeout", "20s", "--nsqd", broker.address
    )
    assert (status, errors) == (0, "")
    return [msgspec.json.decode(line)["attempts"] for line in printed.splitlines()]


def wait_for_in_flight(broker: NsqBroker, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not any(c["in_flight_count"] >= count for t in broker.stats()["topics"] for c in t["channels"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_full_disk_gives_messages_back_at_once(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", *[b"x" * 100] * 37)
    with open("/dev/full", "wb") as full:
        process = start("sub", "t/c", "--nsqd", nsq_broker.address, stdout=full)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert errors.decode().splitlines() == [
        "flintmq sub: cannot print - [Errno 28] No space left on device; what was not printed was given back to t/c"
    ]
    assert set(attempts(nsq_broker, 37)) <= {1, 2}


def test_a_closed_output_is_an_error_before_anything_is_taken(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", b"x")
    command = f"exec {sys.executable} -m flintmq sub t/c --nsqd {nsq_broker.address} >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert b"standard output is closed" in done.stderr
    assert attempts(nsq_broker, 1) == [1]


def test_a_reader_that_waits_keeps_neither_the_messages_nor_the_connection_from_living() -> None:
    with NsqBroker(msg_timeout="4s") as broker:
        broker.publish("t", *[b"x" * 50_000] * 7)
        process = start("sub", "t/c", "-n", "7", "--nsqd", broker.address, stdout=subprocess.PIPE)
        wait_for_in_flight(broker, 5)
        # Much longer than the messages' timeout.
        time.sleep(10)
        output, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (0, b"")
        assert output == (b"x" * 50_000 + b"\n") * 7
        broker.wait_until_empty("t", "c")
        [channel] = broker.stats()["topics"][0]["channels"]
        assert channel["timeout_count"] == 0


def test_ctrl_c_ends_it_although_nobody_reads() -> None:
    with NsqBroker() as broker:
        broker.publish("t", *[b"x" * 50_000] * 7)
        process = start("sub", "t/c", "--nsqd", broker.address, stdout=subprocess.PIPE)
        wait_for_in_flight(broker, 5)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 1
        assert process.stderr is not None and process.stdout is not None
        assert b"nobody reads the output" in process.stderr.read()
        whole = process.stdout.read().count(b"\n")
        process.stdout.close()
        process.stderr.close()
        assert len(attempts(broker, 7 - whole)) == 7 - whole


def test_a_non_blocking_output_is_waited_for(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", *[b"x" * 1_000] * 500)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = start("sub", "t/c", "-n", "500", "--nsqd", nsq_broker.address, stdout=writer)
    os.close(writer)
    time.sleep(2)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == (b"x" * 1_000 + b"\n") * 500
    assert process.wait(PATIENCE) == 0
    assert process.stderr is not None
    process.stderr.close()
    nsq_broker.wait_until_empty("t", "c")


def test_lines_that_are_out_are_finished_although_the_rest_is_given_back() -> None:
    with NsqBroker() as broker:
        broker.publish("t", *[b"x" * 10_000] * 50)
        process = start("sub", "t/c", "--nsqd", broker.address, stdout=subprocess.PIPE)
        wait_for_in_flight(broker, 40)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 1
        assert process.stderr is not None and process.stdout is not None
        whole = process.stdout.read().count(b"\n")
        process.stdout.close()
        process.stderr.close()
        [channel] = broker.stats()["topics"][0]["channels"]
        assert 0 < whole < 50
        assert whole + channel["depth"] == 50


def test_a_broker_that_is_lost_is_noticed_while_the_rate_is_waited_for(nsq_broker: NsqBroker) -> None:
    process = start(
        "pub", "t", "--rate", "0.01", "--nsqd", nsq_broker.address, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(b"first\nsecond\n")
    process.stdin.flush()
    while not any(topic["message_count"] for topic in nsq_broker.stats()["topics"]):
        time.sleep(0.05)
    time.sleep(1)  # until it has the answer, and waits
    nsq_broker.stop()
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert b"published 1 message" in output and b"not confirmed" not in output, errors


def test_a_rate_saves_no_idle_time_up(nsq_broker: NsqBroker) -> None:
    process = start(
        "pub", "t", "--rate", "20", "--nsqd", nsq_broker.address, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert process.stdin is not None
    process.stdin.write(b"first\n")
    process.stdin.flush()
    while not nsq_broker.stats()["topics"]:
        time.sleep(0.05)
    time.sleep(2)
    begin = time.monotonic()
    process.stdin.write(b"x\n" * 30)
    process.stdin.close()
    assert process.wait(PATIENCE) == 0
    # 30 messages at 20 a second; the two seconds before count for a tenth at most.
    assert time.monotonic() - begin > 1.2
    assert process.stderr is not None
    process.stderr.close()


def test_messages_on_the_command_line_need_no_standard_input(nsq_broker: NsqBroker) -> None:
    command = ["sh", "-c", '"$@" 0<&-', "sh", sys.executable, "-m", "flintmq", "pub", "t", "--nsqd", nsq_broker.address]
    done = subprocess.run([*command, "hello"], capture_output=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert nsq_broker.take("t") == [b"hello"]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 1 and b"standard input is closed" in done.stderr and b"Traceback" not in done.stderr


def test_a_dash_is_standard_input(nsq_broker: NsqBroker) -> None:
    command = [sys.executable, "-m", "flintmq", "pub", "t", "--file", "-", "--nsqd", nsq_broker.address]
    done = subprocess.run(command, input=b"one\ntwo\n", capture_output=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert nsq_broker.take("t", 2) == [b"one", b"two"]


def test_a_line_without_an_end_does_not_fill_the_memory(nsq_broker: NsqBroker, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    with file.open("wb") as lines:
        lines.write(b"first\nsecond\n")
        lines.truncate(1 << 30)  # with holes: it takes no room
    program = (
        "import re, sys; from flintmq.cli import main; status = main(sys.argv[1:]);"
        # Not ru_maxrss: a new process begins with that of the one it was forked from.
        "print(int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) // 1024); sys.exit(status)"
    )
    command = [sys.executable, "-c", program, "pub", "t", "--file", str(file), "--nsqd", nsq_broker.address]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 1 and b"line 3 is longer than 64 MiB" in done.stderr
    assert nsq_broker.take("t", 2) == [b"first", b"second"]
    assert int(done.stdout.split()[-1]) < 200, "MiB"
