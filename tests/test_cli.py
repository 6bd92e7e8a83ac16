"""The commands as people run them: real processes, real sockets, exit statuses and what is printed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import importlib.util
import json
import os
import platform
import pty
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import flintmq
from flintmq import __main__ as programs
from flintmq import cli, kernel
from flintmq.errors import ConnectError, StartError
from flintmq.options import NsqdOptions, NsqlookupdOptions, option_table
from flintmq.tools import Link
from flintmq.tools._fleet import ports

ROOT = Path(__file__).parents[1]
# A guard against hanging, nowhere a measure.
PATIENCE = 60

needs_broker = pytest.mark.skipif(
    importlib.util.find_spec("flintmq.broker.daemon") is None, reason="the broker is not there"
)


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "flintmq", *argv]


def run(*argv: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*argv), input=stdin, capture_output=True, timeout=PATIENCE, env=os.environ | (env or {}), check=False
    )


@contextlib.contextmanager
def process(*argv: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on until it is told to end; killed at the end whatever happens."""
    running = subprocess.Popen(
        command(*argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=os.environ | (env or {}),
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def read_until(running: subprocess.Popen[bytes], stream: str, pattern: str) -> re.Match[str]:
    """Read a process's output up to what is looked for; fails with all of it when the process ends first."""
    source = getattr(running, stream)
    text = ""
    deadline = time.monotonic() + PATIENCE
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while (found := re.search(pattern, text)) is None:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            chunk = os.read(source.fileno(), 65536) if ready else b""
            assert chunk, f"no {pattern!r} in {text!r}"
            text += chunk.decode()
    return found


@contextlib.contextmanager
def broker(data_path: object, *argv: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A running nsqd and the address it listens on."""
    flags = (f"--data-path={data_path}", "--tcp-address=127.0.0.1:0", "--http-address=", "--https-address=")
    with process("nsqd", *flags, *argv) as running:
        yield running, read_until(running, "stderr", r"TCP: listening on (\S+)\n")[1]


@pytest.fixture
def nsqd(tmp_path):
    with broker(tmp_path) as (_, address):
        yield address


@pytest.fixture
def closed_port():
    """An address where nobody listens: bound, so that nobody else takes it meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


# --- Without a broker


def test_no_command_and_help_list_the_commands():
    for argv in ([], ["--help"], ["help"]):
        result = run(*argv)
        assert result.returncode == 0
        for name in (b"up", b"nsqd", b"nsqlookupd", b"pub", b"sub"):
            assert b"\n  " + name + b" " in result.stdout


def test_an_unknown_command_is_a_usage_error():
    result = run("nsqx")
    assert result.returncode == 2
    assert b"no command 'nsqx'" in result.stderr


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
@pytest.mark.parametrize("flag", ["--version", "-version", "--version=true"])
def test_the_version_of_a_daemon_names_nsq_s_and_ours(program, flag):
    form = "compiled" if kernel.COMPILED else "interpreted"
    result = run(program, flag)
    assert result.returncode == 0
    python = platform.python_version()
    assert result.stdout.decode() == f"{program} v1.3.0 (built w/python{python}) flintmq {flintmq.__version__} {form}\n"


def test_the_interpreted_kernel_can_be_asked_for():
    assert run("--version", env={"FLINTMQ_PURE": "1"}).stdout.decode() == f"flintmq {flintmq.__version__} interpreted\n"


@pytest.mark.parametrize("options", [NsqdOptions, NsqlookupdOptions], ids=lambda options: options.program)
def test_the_help_of_a_daemon_lists_every_flag(options):
    result = run(options.program, "--help")
    assert result.returncode == 0
    shown = re.findall(r"^  -([a-z0-9-]+)", result.stdout.decode(), re.MULTILINE)
    assert shown == sorted(option_table(options))


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_a_wrong_flag_ends_a_daemon_with_status_2_and_a_hint(program):
    result = run(program, "--nope")
    assert result.returncode == 2
    assert result.stderr.decode().splitlines() == [
        "flag provided but not defined: -nope",
        f"run '{program} --help' for a list of flags",
    ]


FATAL = r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} FATAL: "


def test_a_value_out_of_range_ends_nsqd_with_status_1_and_a_fatal_line():
    result = run("nsqd", "--node-id=5000")
    assert result.returncode == 1
    text = r"failed to instantiate nsqd - --node-id must be \[0,1024\)\n"
    assert re.fullmatch(r"\[nsqd\] " + FATAL + text, result.stderr.decode())


def test_a_missing_config_file_ends_nsqd_with_status_1_and_the_prefix_of_the_flags(tmp_path):
    path = tmp_path / "missing.cfg"
    result = run("nsqd", f"--config={path}", "--log-prefix=x ")
    assert result.returncode == 1
    text = f"failed to load config file {re.escape(str(path))} - No such file or directory\n"
    assert re.fullmatch("x " + FATAL + text, result.stderr.decode())


@pytest.mark.parametrize("argv", [["pub", "greetings", "hello"], ["sub", "greetings/printer"]])
def test_a_missing_broker_is_one_line_that_names_the_flag(argv, closed_port):
    result = run(*argv, "--nsqd", closed_port)
    assert result.returncode == 1
    (line,) = result.stderr.decode().splitlines()
    reason = f"cannot connect to a broker at {closed_port} (Connection refused); see --nsqd"
    assert line == f"flintmq {argv[0]}: {reason}"


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("127.0.0.1:4150", "; start one with: flintmq up"),
        ("localhost:4150", "; start one with: flintmq up"),
        ("localhost:1", "; see --nsqd"),
        ("10.0.0.5:4150", "; see --nsqd"),
    ],
)
def test_a_platform_is_offered_where_it_would_listen(address, remedy):
    refused = ConnectError(address)
    refused.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert str(Link(address)._explained(refused)).endswith(f"(Connection refused){remedy}")


def test_a_url_is_not_taken_for_a_unix_socket():
    result = run("pub", "topic", "x", "--nsqd", "tcp://127.0.0.1:4150")
    assert result.returncode == 2
    reason = '"tcp://127.0.0.1:4150" is not an address (it is a URL): write host:port, '
    assert reason in result.stderr.decode()


@pytest.mark.parametrize(
    "argv",
    [
        ["pub"],
        ["pub", "bad name", "x"],
        ["pub", "topic", ""],
        ["pub", "topic", "x", "--file", "y"],
        ["pub", "topic", "x", "--defer", "5"],
        ["pub", "topic", "x", "--defer", "-5s"],
        ["pub", "topic", "x", "--rate", "0"],
        ["sub", "topic"],
        ["sub", "topic/"],
        ["sub", "topic/bad name"],
        ["sub", "topic/channel", "-n", "0"],
        ["sub", "topic/channel", "--timeout", "5"],
    ],
)
def test_a_wrong_command_line_is_a_usage_error(argv, closed_port):
    result = run(*argv, "--nsqd", closed_port)
    assert result.returncode == 2
    assert b"usage: flintmq " + argv[0].encode() in result.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["pub", "t", "x", "--rate"],
        ["sub", "t/c", "-n"],
        ["sub", "t/c", "--max-in-flight"],
        ["peek", "t", "--limit"],
        ["peek", "t", "--bytes"],
        ["redrive", "t/c", "--count"],
        ["torture", "--minutes"],
        ["torture", "--kills"],
        ["up", "--nodes"],
    ],
)
def test_a_word_where_a_number_is_due_is_named(argv):
    result = run(*argv, "many")
    assert result.returncode == 2
    last = result.stderr.decode().splitlines()[-1]
    assert last.startswith(f'flintmq {argv[0]}: error: argument {argv[-1]}: "many" is n')


def test_a_number_below_zero_is_not_told_to_be_no_whole_number():
    result = run("torture", "--kills", "-1")
    assert result.stderr.decode().endswith('error: argument --kills: "-1" is not a whole number from 0 on\n')


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1", "the port is missing"), ("127.0.0.1:99999", '"99999" is not a port'), ("::1:4150", "brackets")],
)
def test_a_wrong_address_of_a_broker_is_a_usage_error(address, reason):
    result = run("pub", "topic", "x", "--nsqd", address)
    assert result.returncode == 2
    last = result.stderr.decode().splitlines()[-1]
    assert f'argument --nsqd: "{address}" is not an address (' in last
    assert reason in last


def test_an_unknown_host_is_named_without_advice_to_start_a_broker():
    result = run("pub", "topic", "x", "--nsqd", "no-such-host.invalid:4150")
    assert result.returncode == 1
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("flintmq pub: cannot connect to a broker at no-such-host.invalid:4150 (")
    assert line.endswith("; check the host name")
    assert "Errno" not in line


def test_pub_names_the_file_that_is_not_there(tmp_path, closed_port):
    result = run("pub", "topic", "--file", str(tmp_path / "missing"), "--nsqd", closed_port)
    assert result.returncode == 1
    assert result.stderr.decode() == f"flintmq pub: {tmp_path / 'missing'}: No such file or directory\n"


def test_something_that_is_no_broker_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        running = subprocess.Popen(command("pub", "topic", "x", "--nsqd", address), stderr=subprocess.PIPE)
        server.settimeout(PATIENCE)
        with server.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            _, stderr = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1
    reason = "an HTTP server answers there: is that the HTTP port of a broker?"
    told = f"flintmq pub: what listens at {address} does not answer like an NSQ broker ({reason})"
    assert stderr.decode().splitlines() == [told]


# --- nsqd


@needs_broker
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("event_loop", ["asyncio", "auto"])
def test_a_signal_ends_nsqd_cleanly(tmp_path, number, event_loop):
    with broker(tmp_path, f"--event-loop={event_loop}") as (running, _):
        running.send_signal(number)
        running.communicate(timeout=PATIENCE)
        assert running.returncode == 0


@needs_broker
def test_nsqd_says_who_it_is_in_nsq_s_words(tmp_path):
    with process(
        "nsqd", f"--data-path={tmp_path}", "--tcp-address=127.0.0.1:0", "--http-address=", "--node-id=7"
    ) as running:
        line = r"\[nsqd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} INFO: "
        first = rf"^{line}nsqd v1\.3\.0 \(built w/python[0-9.]+\S*\)\n{line}ID: 7\n"
        read_until(running, "stderr", first + rf"(?s:.*){line}TCP: listening on 127\.0\.0\.1:\d+\n")


@needs_broker
def test_a_missing_data_path_ends_nsqd_with_a_fatal_line(tmp_path):
    result = run("nsqd", f"--data-path={tmp_path / 'missing'}", "--tcp-address=127.0.0.1:0", "--http-address=")
    assert result.returncode == 1
    assert re.search(FATAL + "failed to instantiate nsqd - failed to lock data-path: ", result.stderr.decode())


@needs_broker
def test_a_data_path_in_use_ends_the_second_nsqd(tmp_path):
    with broker(tmp_path):
        result = run("nsqd", f"--data-path={tmp_path}", "--tcp-address=127.0.0.1:0", "--http-address=")
    assert result.returncode == 1
    assert b"failed to lock data-path: " in result.stderr


@needs_broker
def test_messages_survive_a_restart(tmp_path):
    with broker(tmp_path) as (running, address):
        assert run("pub", "greetings", "hello", "--nsqd", address).returncode == 0
        running.terminate()
        running.communicate(timeout=PATIENCE)
    with broker(tmp_path) as (_, address):
        assert run("sub", "greetings/printer", "-n", "1", "--nsqd", address).stdout == b"hello\n"


# --- nsqlookupd

LINE = r"\[nsqlookupd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} INFO: "


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("event_loop", ["asyncio", "auto"])
def test_nsqlookupd_speaks_nsq_s_words_and_a_signal_ends_it_cleanly(number, event_loop):
    flags = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", f"--event-loop={event_loop}")
    with process("nsqlookupd", *flags) as running:
        version = rf"^{LINE}nsqlookupd v1\.3\.0 \(built w/python[0-9.]+\S*\)\n"
        found = read_until(
            running,
            "stderr",
            rf"{version}{LINE}HTTP: listening on (127\.0\.0\.1:\d+)\n{LINE}TCP: listening on 127\.0\.0\.1:\d+\n",
        )
        assert fetch(found[1], "/ping") == b"OK"
        running.send_signal(number)
        _, stderr = running.communicate(timeout=PATIENCE)
        assert running.returncode == 0
        assert b"TCP: closing " in stderr and b"Traceback" not in stderr


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_an_empty_tcp_address_is_refused(tmp_path, program):
    data = [f"--data-path={tmp_path}"] if program == "nsqd" else []
    result = run(program, "--tcp-address=", "--http-address=127.0.0.1:0", *data)
    assert result.returncode == 1
    text = rf'failed to instantiate {program} - listen \(\) failed - "" is not an address .*write host:port.*\n'
    assert re.search(FATAL + text, result.stderr.decode())
    assert b"Traceback" not in result.stderr


def test_nsqlookupd_on_a_busy_port_ends_with_a_fatal_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = run("nsqlookupd", f"--tcp-address={address}", "--http-address=127.0.0.1:0")
    assert result.returncode == 1
    text = rf"failed to instantiate nsqlookupd - listen \({address}\) failed - address already in use\n"
    assert re.search(FATAL + text, result.stderr.decode())


def test_nsqlookupd_reads_its_file(tmp_path):
    path = tmp_path / "nsqlookupd.cfg"
    path.write_text('tcp_address = "127.0.0.1:0"\nhttp_address = "127.0.0.1:0"\nlog_prefix = "[here] "\n')
    with process("nsqlookupd", f"--config={path}") as running:
        read_until(running, "stderr", r"\[here\] .* INFO: TCP: listening on 127\.0\.0\.1:\d+\n")


def test_a_hangup_makes_nsqlookupd_read_its_tokens_again(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("old read\n")
    flags = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", f"--http-auth-token-file={tokens}")
    with process("nsqlookupd", *flags) as running:
        address = read_until(running, "stderr", r"HTTP: listening on (\S+)\n(?s:.*)TCP: listening on \S+\n")[1]
        assert ask(address, "GET", "/ping")[0] == 200
        assert ask(address, "GET", "/nodes")[0] == 401
        assert ask(address, "GET", "/nodes", Authorization="Bearer old")[0] == 200
        tokens.write_text("new read\n")
        running.send_signal(signal.SIGHUP)
        read_until(running, "stderr", r"HTTP: 1 tokens in")
        assert ask(address, "GET", "/nodes", Authorization="Bearer new")[0] == 200
        assert ask(address, "GET", "/nodes", Authorization="Bearer old")[0] == 401


def fetch(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=PATIENCE) as response:
        body: bytes = response.read()
    return body


# --- pub and sub


@needs_broker
def test_arguments_are_published_and_printed(nsqd):
    result = run("pub", "greetings", "hello", "wörld", "--nsqd", nsqd)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith(b"published 2 messages (11 bytes) to greetings in ")
    result = run("sub", "greetings/printer", "-n", "2", "--nsqd", nsqd)
    assert (result.returncode, result.stdout, result.stderr) == (0, "hello\nwörld\n".encode(), b"")


@needs_broker
def test_options_may_stand_between_messages(nsqd):
    assert run("pub", "t", "a", "--nsqd", nsqd, "b", "--", "-c").returncode == 0
    assert run("sub", "t/c", "-n", "3", "--nsqd", nsqd).stdout == b"a\nb\n-c\n"


@needs_broker
def test_lines_of_standard_input_are_published_and_empty_ones_left_out(nsqd):
    result = run("pub", "t", "--json", "--nsqd", nsqd, stdin=b"a\n\nb\r\nc")
    summary = json.loads(result.stdout)
    assert (summary["topic"], summary["messages"], summary["bytes"], summary["unconfirmed"]) == ("t", 3, 4, 0)
    assert run("sub", "t/c", "-n", "3", "--nsqd", nsqd).stdout == b"a\nb\r\nc\n"


@needs_broker
def test_nothing_on_standard_input_publishes_nothing(nsqd):
    result = run("pub", "t", "--nsqd", nsqd)
    assert (result.returncode, result.stdout[:20]) == (0, b"published 0 messages")


@needs_broker
def test_a_line_is_published_while_the_next_is_not_there_yet(nsqd):
    publisher = subprocess.Popen(command("pub", "t", "--nsqd", nsqd), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert publisher.stdin is not None
    publisher.stdin.write(b"first\nsec")
    publisher.stdin.flush()
    assert run("sub", "t/c", "-n", "1", "--nsqd", nsqd).stdout == b"first\n"
    stdout, _ = publisher.communicate(b"ond\n", timeout=PATIENCE)
    assert stdout.startswith(b"published 2 messages")
    assert run("sub", "t/c", "-n", "1", "--nsqd", nsqd).stdout == b"second\n"


@needs_broker
def test_a_long_file_arrives_whole(nsqd, tmp_path):
    lines = [b"%d %s" % (number, b"x" * (number % 300)) for number in range(20_000)]
    path = tmp_path / "lines"
    path.write_bytes(b"\n".join(lines))
    assert run("pub", "t", "--file", str(path), "--nsqd", nsqd).returncode == 0
    printed = run("sub", "t/c", "-n", str(len(lines)), "--nsqd", nsqd).stdout.splitlines()
    assert sorted(printed) == sorted(lines)


@needs_broker
def test_deferred_and_paced_messages_arrive(nsqd):
    assert run("pub", "t", "later", "--defer", "20ms", "--nsqd", nsqd).returncode == 0
    assert run("pub", "t", "a", "b", "--rate", "1000", "--nsqd", nsqd).returncode == 0
    printed = run("sub", "t/c", "-n", "3", "--nsqd", nsqd).stdout.splitlines()
    assert sorted(printed) == [b"a", b"b", b"later"]


@needs_broker
def test_a_refused_publish_is_reported_with_the_broker_s_words(nsqd):
    result = run("pub", "t", "--nsqd", nsqd, stdin=b"x" * 1_100_000)
    assert result.returncode == 1
    assert result.stderr.startswith(b"flintmq pub: E_BAD_MESSAGE ")


@needs_broker
def test_json_shows_what_a_message_carries(nsqd):
    run("pub", "t", "--nsqd", nsqd, stdin=b"text\n\xff\xfe")
    lines = run("sub", "t/c", "-n", "2", "--json", "--nsqd", nsqd).stdout.splitlines()
    text, binary = map(json.loads, lines)
    assert (text["body"], text["attempts"]) == ("text", 1)
    assert re.fullmatch("[0-9a-f]{16}", text["id"])
    assert text["timestamp"] > 0
    assert binary["body_base64"] == "//4="


@needs_broker
def test_sub_takes_no_more_than_it_was_asked_for(nsqd):
    run("pub", "t", *map(str, range(10)), "--nsqd", nsqd)
    first = run("sub", "t/c", "-n", "4", "--nsqd", nsqd).stdout
    rest = run("sub", "t/c", "-n", "6", "--json", "--nsqd", nsqd).stdout
    assert first == b"0\n1\n2\n3\n"
    # A message that had been sent to the first and given back would show a second attempt.
    assert [json.loads(line)["attempts"] for line in rest.splitlines()] == [1] * 6


@needs_broker
def test_sub_tells_a_terminal_what_it_waits_for_and_nobody_else(nsqd):
    here, there = pty.openpty()
    try:
        argv = command("sub", "t/c", "--timeout", "3s", "--nsqd", nsqd)
        result = subprocess.run(argv, stdout=subprocess.PIPE, stderr=there, timeout=PATIENCE, check=False)
        assert os.read(here, 1000) == b"waiting for messages of t/c; end with ctrl-C\r\n"
    finally:
        os.close(here)
        os.close(there)
    assert (result.returncode, result.stdout) == (0, b"")
    result = run("sub", "t/c", "--timeout", "3s", "--nsqd", nsqd)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


@needs_broker
def test_sub_ends_after_a_time_without_messages(nsqd):
    run("pub", "t", "x", "--nsqd", nsqd)
    result = run("sub", "t/c", "--timeout", "200ms", "--nsqd", nsqd)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"x\n", b"")
    result = run("sub", "t/c", "-n", "1", "--timeout", "200ms", "--nsqd", nsqd)
    assert (result.returncode, result.stderr) == (1, b"flintmq sub: timed out after 0 of 1 messages\n")


@needs_broker
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_sub_cleanly_and_what_was_printed_is_finished(nsqd, number):
    with process("sub", "t/c", "--nsqd", nsqd) as consumer:
        run("pub", "t", "x", "--nsqd", nsqd)
        read_until(consumer, "stdout", "x\n")
        consumer.send_signal(number)
        _, stderr = consumer.communicate(timeout=PATIENCE)
        assert (consumer.returncode, stderr) == (0, b"")
    assert run("sub", "t/c", "--timeout", "200ms", "--nsqd", nsqd).stdout == b""


@needs_broker
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_last_message_that_was_asked_for_has_status_130(nsqd, number):
    with process("sub", "t/c", "-n", "2", "--nsqd", nsqd) as consumer:
        run("pub", "t", "x", "--nsqd", nsqd)
        read_until(consumer, "stdout", "x\n")
        consumer.send_signal(number)
        _, stderr = consumer.communicate(timeout=PATIENCE)
        assert (consumer.returncode, stderr) == (130, b"")


@needs_broker
def test_messages_nobody_read_from_the_pipe_come_back(nsqd):
    # Each is larger than a pipe holds, so a message is printed only if someone reads it.
    bodies = [b"%d" % number + b"x" * 150_000 for number in range(10)]
    run("pub", "t", "--nsqd", nsqd, stdin=b"\n".join(bodies))
    with process("sub", "t/c", "--nsqd", nsqd) as consumer:
        assert consumer.stdout is not None
        assert consumer.stdout.read(1) == b"0"
        consumer.stdout.close()
        assert consumer.wait(PATIENCE) == 0
        consumer.stdout = None  # so that nobody reads it again
    again = run("sub", "t/c", "-n", "10", "--timeout", "10s", "--nsqd", nsqd).stdout.splitlines()
    assert sorted(again) == bodies


# --- HTTP


def ask(address: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


@contextlib.contextmanager
def http_broker(data_path: object, *argv: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A running nsqd and the address of its HTTP API."""
    flags = (f"--data-path={data_path}", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
    with process("nsqd", *flags, *argv) as running:
        yield running, read_until(running, "stderr", r"HTTP: listening on (\S+)\n")[1]


@needs_broker
def test_a_hangup_reads_the_tokens_again(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("old read\n")
    with http_broker(tmp_path, f"--http-auth-token-file={tokens}") as (running, address):
        assert ask(address, "GET", "/info", Authorization="Bearer old")[0] == 200
        assert ask(address, "GET", "/info", Authorization="Bearer new")[0] == 401
        tokens.write_text("new read\n")
        running.send_signal(signal.SIGHUP)
        read_until(running, "stderr", r"HTTP: 1 tokens in")
        assert ask(address, "GET", "/info", Authorization="Bearer new")[0] == 200
        assert ask(address, "GET", "/info", Authorization="Bearer old")[0] == 401


def daemon_flags(program: str, tmp_path: Path) -> list[str]:
    data = ["--disk-reserve=0", f"--data-path={tmp_path}", "--https-address="] if program == "nsqd" else []
    return [program, "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", *data]


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_a_misspelt_key_of_the_config_file_is_a_warning_and_with_strict_config_an_error(program, tmp_path):
    path = tmp_path / "daemon.cfg"
    path.write_text('broadcast_adress = "10.0.0.1"\nlog_prefix = "[mine] "\n')
    flags = [*daemon_flags(program, tmp_path), f"--config={path}"]
    with process(*flags) as running:
        said = f"[mine] .* WARNING: config file {path}: unknown key broadcast_adress is ignored, did you mean "
        read_until(running, "stderr", re.escape(said).replace(r"\.\*", ".*") + r"broadcast_address\?\n(?s:.*)listening")
    result = run(*flags, "--strict-config")
    assert result.returncode == 1
    assert b"FATAL: failed to load config file" in result.stderr
    assert b"unknown key broadcast_adress, did you mean broadcast_address?" in result.stderr


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_a_hangup_names_the_changed_keys_that_need_a_restart(program, tmp_path):
    path = tmp_path / "daemon.cfg"
    path.write_text('broadcast_address = "a"\ntls_min_version = "tls1.2"\n')
    flags = daemon_flags(program, tmp_path)
    with process(*flags, f"--config={path}", "--log-level=info") as running:
        read_until(running, "stderr", r"TCP: listening on \S+\n" if program == "nsqlookupd" else r"HTTP: listening")
        # What a flag sets, the file does not change.
        path.write_text(
            'broadcast_address = "b"\ntls_min_version = "tls1.3"\nlog_level = "debug"\nbroadcast_adres = 1\n'
        )
        running.send_signal(signal.SIGHUP)
        text = read_until(running, "stderr", r"(?s:.*)tls_min_version.*\n")[0]
        assert "WARNING: CONFIG: broadcast_address was changed from a to b: restart" in text
        assert "WARNING: CONFIG: tls_min_version was changed from tls1.2 to tls1.3: restart" in text
        assert "unknown key broadcast_adres is ignored, did you mean broadcast_address?" in text
        assert "log_level" not in text
        # A file that is no good is reported, and all stays as it was.
        path.write_text("broadcast_address = [1]\n")
        running.send_signal(signal.SIGHUP)
        read_until(running, "stderr", r"ERROR: CONFIG: failed to load config file .* - broadcast_address")
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == 0


@needs_broker
def test_a_hangup_shows_no_secrets(tmp_path):
    path = tmp_path / "nsqd.cfg"
    path.write_text('auth_http_addresses = "http://me:first@127.0.0.1:1/"\n')
    with process(*daemon_flags("nsqd", tmp_path), f"--config={path}") as running:
        read_until(running, "stderr", "HTTP: listening")
        path.write_text('auth_http_addresses = "http://me:second@127.0.0.1:1/"\nmax_rdy_count = 7\n')
        running.send_signal(signal.SIGHUP)
        text = read_until(running, "stderr", r"(?s:.*)auth_http_addresses.*\n")[0]
        assert "CONFIG: auth_http_addresses was changed (values hidden): restart nsqd to apply it" in text
        assert "CONFIG: max_rdy_count was changed from 2500 to 7: restart nsqd to apply it" in text
        assert "first" not in text and "second" not in text


@needs_broker
def test_the_level_of_logs_is_changed_while_it_runs(tmp_path):
    with http_broker(tmp_path) as (running, address):
        assert ask(address, "PUT", "/config/log_level", b"error") == (200, b"4")
        assert ask(address, "GET", "/info?unseen")[0] == 200
        assert ask(address, "PUT", "/config/log_level", b"info") == (200, b"2")
        assert ask(address, "GET", "/info?seen")[0] == 200
        running.terminate()
        _, stderr = running.communicate(timeout=PATIENCE)
    assert b"GET /info?seen" in stderr
    assert b"unseen" not in stderr


# --- nsqadmin


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "--nsqd-http-address or --lookupd-http-address required"),
        (
            ["--lookupd-http-address=127.0.0.1:1", "--nsqd-http-address=127.0.0.1:2"],
            "use --nsqd-http-address or --lookupd-http-address not both",
        ),
        (
            ["--lookupd-http-address=127.0.0.1:1", "--allow-config-from-cidr=zz"],
            "failed to parse --allow-config-from-cidr (zz) - invalid CIDR address: zz",
        ),
        (
            ["--lookupd-http-address=127.0.0.1", "--http-address=127.0.0.1:0"],
            "failed to resolve --lookupd-http-address (127.0.0.1) - address 127.0.0.1: missing port in address",
        ),
    ],
)
def test_nsqadmin_refuses_to_start_in_the_words_of_nsq_s(flags, reason):
    result = run("nsqadmin", *flags)
    assert result.returncode == 1
    assert f"failed to instantiate nsqadmin - {reason}\n" in result.stderr.decode()


# --- up


FREE_PORTS = [
    f"--{name}=127.0.0.1:0"
    for name in ("tcp-address", "http-address", "lookupd-tcp-address", "lookupd-http-address", "admin-http-address")
]


@needs_broker
def test_up_registers_its_broker_with_its_nsqlookupd(tmp_path):
    with process("up", "--data-path", str(tmp_path), *FREE_PORTS) as running:
        pattern = (
            r"in your browser +http://(\S+)\nnsqd \(TCP\) +\S+:(\d+)\n(?s:.*)nsqlookupd \(HTTP\) +(\S+)\n(?s:.*)hello"
        )
        admin, port, lookupd = read_until(running, "stdout", pattern).groups()
        deadline = time.monotonic() + PATIENCE
        while not (producers := json.loads(fetch(lookupd, "/nodes"))["producers"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        [producer] = producers
        assert (producer["broadcast_address"], producer["tcp_port"]) == ("127.0.0.1", int(port))
        [node] = json.loads(fetch(admin, "/api/nodes"))["nodes"]
        assert node["tcp_port"] == int(port)
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=PATIENCE)
        assert (running.returncode, stderr) == (0, b"")


@needs_broker
def test_up_makes_its_folder_and_prints_an_example_that_works(tmp_path):
    path = tmp_path / "made" / "here"
    with process("up", "--data-path", str(path), *FREE_PORTS) as running:
        example = r'flintmq (sub \S+ --nsqd \S+)\nflintmq (pub \S+ )"hello"( --nsqd \S+)\n'
        address, sub, *pub = read_until(running, "stdout", rf"nsqd \(HTTP\) +(\S+)\n[^$]*{example}").groups()
        assert path.is_dir()
        assert ask(address, "GET", "/ping") == (200, b"OK")
        assert run(*pub[0].split(), "hello", *pub[1].split()).returncode == 0
        assert run(*sub.split(), "-n", "1").stdout == b"hello\n"
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=PATIENCE)
        assert (running.returncode, stderr) == (0, b"")


@pytest.mark.parametrize("serve", [cli._serve_all, partial(cli._serve_fleet, 2)], ids=["one", "fleet"])
def test_up_that_is_stopped_while_it_starts_does_not_say_that_it_is_up(tmp_path, monkeypatch, capsys, serve):
    def hear_at_once(stop, *_numbers):
        # As a ctrl-C during the imports: the handler has run, and the loop has not yet.
        asyncio.get_running_loop().call_soon(stop)

    monkeypatch.setattr(cli, "_hear", hear_at_once)
    options = NsqdOptions(data_path=str(tmp_path), tcp_address="127.0.0.1:0", http_address="127.0.0.1:0")
    lookupd_options = NsqlookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0")
    with asyncio.Runner() as runner:
        assert runner.run(serve(options, lookupd_options, "127.0.0.1:0")) == 0
    assert "is up" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@needs_broker
@pytest.mark.parametrize("on_path", [True, False])
def test_up_says_how_to_activate_the_environment_where_its_programs_are_not_on_the_path(tmp_path, on_path):
    folder = Path(sys.executable).parent
    path = f"{folder}:/usr/bin" if on_path else "/usr/bin"
    with process("up", "--data-path", str(tmp_path), *FREE_PORTS, env={"PATH": path}) as running:
        text = read_until(running, "stdout", r"(?s:.*)hello").group()
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=PATIENCE)
    assert (f"source {folder / 'activate'}\n" in text) is (not on_path)


@needs_broker
@pytest.mark.parametrize("flag", ["tcp-address", "lookupd-tcp-address", "lookupd-http-address", "admin-http-address"])
def test_up_on_a_busy_port_says_what_to_do(tmp_path, flag):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = run("up", "--data-path", str(tmp_path), *FREE_PORTS, f"--{flag}", address)
    assert result.returncode == 1
    text = result.stderr.decode()
    assert address in text
    assert f"flintmq up --{flag} " in text
    assert "Traceback" not in text


def test_up_that_cannot_make_its_folder_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("up", "--data-path", str(tmp_path / "file" / "data"))
    assert result.returncode == 1
    assert result.stderr.startswith(b"flintmq up: cannot create the directory ")


# --- up with several nodes


def children(running):
    """The brokers of a fleet."""
    return [int(pid) for pid in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()]


def eventually(question):
    deadline = time.monotonic() + PATIENCE
    while not (found := question()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def is_gone(pid):
    """Did the process end? One that nobody has waited for counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="it looks for child processes in /proc")


@needs_broker
@needs_proc
def test_up_with_several_nodes_keeps_them_running(tmp_path):
    with process("up", "--nodes=3", "--data-path", str(tmp_path), *FREE_PORTS) as running:
        pattern = r"nsqd \(TCP\) +([^\n]+)\n(?s:.*)nsqlookupd \(HTTP\) +(\S+)\n(?s:.*)hello"
        tcp, lookupd = read_until(running, "stdout", pattern).groups()
        eventually(lambda: len(json.loads(fetch(lookupd, "/nodes"))["producers"]) == 3)
        for number, address in enumerate(tcp.split()):
            assert run("pub", "t", f"message {number}", "--nsqd", address).returncode == 0
        before = children(running)
        flags = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in before]
        assert len({flag for of in flags for flag in of if flag.startswith("--node-id=")}) == 3, "ids must differ"
        os.kill(before[1], signal.SIGKILL)
        assert (
            b"was ended by signal 9, it is started again" in read_until(running, "stderr", r"[^\n]+").group().encode()
        )
        eventually(lambda: len(after := children(running)) == 3 and after != before)
        port = tcp.split()[1]
        eventually(lambda: run("pub", "t", "again", "--nsqd", port).returncode == 0)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=PATIENCE)
        assert running.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node-1", "node-2", "node-3"]
    with process("up", "--nodes=3", "--data-path", str(tmp_path), *FREE_PORTS) as running:
        [http] = read_until(running, "stdout", r"nsqd \(HTTP\) +([^\n]+)\n(?s:.*)hello").groups()
        stats = [json.loads(fetch(address, "/stats?format=json"))["topics"] for address in http.split()]
        assert [[topic["depth"] for topic in topics] for topics in stats] == [[1], [2], [1]]
        # Whoever ends the fleet the hard way ends the nodes too.
        brokers = children(running)
        running.kill()
        running.communicate(timeout=PATIENCE)
        eventually(lambda: all(map(is_gone, brokers)))


@needs_broker
def test_up_beside_another_platform_moves_every_port_that_is_taken(tmp_path):
    names = ("tcp", "http", "lookupd-tcp", "lookupd-http", "admin-http")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        ports = [server.getsockname()[1] for server in servers]
        flags = [f"--{name}-address=127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)]
        result = run("up", "--data-path", str(tmp_path), *flags)
    assert result.returncode == 1
    advice = result.stderr.decode().splitlines()[-1].split()
    assert advice[:2] == ["flintmq", "up"]
    assert advice[2::2] == [f"--{name}-address" for name in names]
    moved = [int(address.split(":")[1]) for address in advice[3::2]]
    assert [abs(new - old) for new, old in zip(moved, ports, strict=True)] == [1000] * len(names)


@needs_broker
def test_up_with_a_node_that_cannot_start_ends_all_of_them(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        addresses = [*FREE_PORTS, f"--http-address=127.0.0.1:{port - 2}"]
        result = run("up", "--nodes=2", "--data-path", str(tmp_path), *addresses)
    assert result.returncode == 1
    text = result.stderr.decode()
    assert f"listen (127.0.0.1:{port}) failed" in text
    assert re.search(
        r"flintmq up: nsqd 2 \(\S+\) ended with status 1 before it was ready; its lines above say why\n", text
    )
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("there", "nodes", "advice"),
    [
        (["flintmq"], 2, "is that of a single node: give another --data-path, or move its content to "),
        (["node-1/flintmq", "node-2/flintmq"], 1, "is that of 2 nodes: give --nodes 2"),
        (["node-1/flintmq", "node-3/flintmq"], 2, "is that of 3 nodes: give --nodes 3. To use fewer, "),
    ],
)
def test_up_leaves_no_messages_behind(tmp_path, there, nodes, advice):
    for name in there:
        (tmp_path / name).mkdir(parents=True)
    result = run("up", f"--nodes={nodes}", "--data-path", str(tmp_path), *FREE_PORTS)
    assert (result.returncode, advice in result.stderr.decode()) == (1, True)


@pytest.mark.parametrize("nodes", ["0", "-1", "65", "two"])
def test_up_takes_a_sensible_number_of_nodes(tmp_path, nodes):
    result = run("up", f"--nodes={nodes}", "--data-path", str(tmp_path))
    assert (result.returncode, b"--nodes" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("tcp", "http", "count", "found"),
    [
        ("h:4150", "h:4151", 2, [(4150, 4151), (4152, 4153)]),
        ("h:4150", "h:4151", 7, [*((4150 + 2 * i, 4151 + 2 * i) for i in range(5)), (4162, 4163), (4164, 4165)]),
        ("h:4168", "h:4169", 2, [(4168, 4169), (4172, 4173)]),
        ("h:10", "h:12", 3, [(10, 12), (14, 16), (18, 20)]),
        ("h:0", "h:0", 2, [(0, 0), (0, 0)]),
        ("h:0", "h:70", 2, [(0, 70), (0, 72)]),
    ],
)
def test_nodes_have_consecutive_ports_that_nobody_else_has(tcp, http, count, found):
    taken = ("h:4160", "h:4161", "h:4171")
    assert ports(tcp, http, count, taken) == [(f"h:{a}", f"h:{b}") for a, b in found]


def test_there_may_be_too_few_ports():
    with pytest.raises(StartError, match="not enough ports after h:65534 and h:1 for 2 nodes"):
        ports("h:65534", "h:1", 2, ())


@needs_broker
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process cannot be set here")
def test_a_stop_that_loses_messages_has_status_1(tmp_path):
    with http_broker(tmp_path, "--durability=memory") as (running, address):
        for _ in range(20):
            assert ask(address, "POST", "/pub?topic=t", bytes(50_000))[0] == 200
        # No file can grow beyond this from here on.
        resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        running.terminate()
        _, stderr = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1
    assert re.search(rb"FATAL: cannot save everything: TOPIC\(t\): \d+ messages in memory could not be written", stderr)


def test_every_script_ends_quietly_when_ctrl_c_comes_during_its_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    imported = []

    def interrupt(name: str) -> None:
        imported.append(name)
        raise KeyboardInterrupt

    assert set(scripts) == set(programs.__all__)
    assert set(scripts.values()) == {f"flintmq.__main__:{name}" for name in scripts}
    monkeypatch.setattr(importlib, "import_module", interrupt)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert [getattr(programs, name)() for name in scripts] == [130] * len(scripts)
    assert all(importlib.util.find_spec(name) is not None for name in imported)


@pytest.mark.parametrize("program", ["flintmq", "nsqd", "nsqlookupd", "nsqadmin"])
def test_a_reader_that_has_read_enough_is_no_error(program: str) -> None:
    read, write = os.pipe()
    os.close(read)
    call = (
        f"import sys; from flintmq.__main__ import {program}; sys.argv = ['{program}', '--help']; sys.exit({program}())"
    )
    with open(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", call], stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    ("file", "reason"), [(">/dev/full", b"No space left on device"), (">&-", b"Bad file descriptor")]
)
@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["nsqd", "--help"], ["completion", "bash"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line_and_a_failure(
    argv: list[str], file: str, reason: bytes, buffered: bool
) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    words = ["bash", "-c", f'"$@" {file}', "bash", *command(*argv)]
    done = subprocess.run(words, capture_output=True, timeout=PATIENCE, env=environment, check=False)
    assert (done.returncode, done.stderr) == (1, b"cannot write to standard output: " + reason + b"\n")


@pytest.mark.parametrize("flag", ["tcp", "http", "lookupd-tcp", "lookupd-http", "admin-http"])
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1", "the port is missing"),
        ("127.0.0.1:99999", '"99999" is not a port'),
        ("::1:5150", "needs brackets"),
    ],
)
def test_a_wrong_address_of_the_platform_is_a_usage_error(flag: str, address: str, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    done = run("up", "--data-path", str(folder), f"--{flag}-address", address)
    assert (done.returncode, folder.exists()) == (2, False)
    error = done.stderr.decode().splitlines()[-1]
    assert error.startswith(f'flintmq up: error: --{flag}-address: "{address}" is not an address')
    assert reason in error


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_help_fits_the_terminal_and_names_each_command_once(columns: int) -> None:
    done = run("--help", env={"COLUMNS": str(columns)})
    lines = done.stdout.decode().splitlines()
    assert max(map(len, lines[1:-1])) <= columns
    named = [line.split()[0] for line in lines if re.match(r"  \w", line)]
    assert sorted(named) == sorted([*cli._COMMANDS, *cli._tools()])
    assert "others:" not in lines, "a new command needs a group in flintmq.cli._GROUPS"


@pytest.mark.parametrize("coding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("argv", [["--help"], ["up", "--help"], ["nsqd", "--help"], ["pub", "--help"]], ids=" ".join)
def test_a_terminal_of_another_encoding_is_no_error(argv: list[str], coding: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": coding}
    done = subprocess.run(command(*argv), capture_output=True, timeout=PATIENCE, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout) > 500


@pytest.mark.parametrize("coding", ["ascii", "utf-8"])
def test_a_data_path_with_a_name_of_another_encoding_is_shown(coding: str, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(odd)
    environment = os.environ | {"PYTHONIOENCODING": coding}
    words = [*command("recover"), odd]
    done = subprocess.run(words, capture_output=True, timeout=PATIENCE, env=environment, check=False)
    assert b"caf" in done.stdout + done.stderr
    assert b"Traceback" not in done.stderr


@needs_broker
def test_a_publish_whose_report_cannot_be_written_says_so(nsqd):
    words = ["bash", "-c", '"$@" >/dev/full', "bash", *command("pub", "full", "x", "--nsqd", nsqd)]
    done = subprocess.run(words, capture_output=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (1, b"cannot write to standard output: No space left on device\n")
    assert run("sub", "full/c", "-n", "1", "--nsqd", nsqd).stdout == b"x\n"
