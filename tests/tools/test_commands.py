"""`flintmq ls`, `stat`, `tail`, `topic`, `channel`, `top`, `doctor`, `completion`: on a real cluster, in a pty."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flintmq import cli, sync
from flintmq.options import option_table
from flintmq.testing import NsqBroker, NsqCluster
from flintmq.tools import _cluster, doctor
from flintmq.tools.completion import answers
from flintmq.tools.doctor import clock_finding
from tools.programs import PATIENCE, until

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def cluster() -> Iterator[NsqCluster]:
    with NsqCluster(2, 1) as cluster:
        for number, broker in enumerate(cluster.brokers):
            with sync.NodeClient(broker.http_address) as node:
                for channel in ("billing", "shipping"):
                    node.create_topic("orders")
                    node.create_channel("orders", channel)
            broker.publish("orders", *(b"%d" % place for place in range(5 * (number + 1))))
        yield cluster


@pytest.fixture
def where(cluster: NsqCluster) -> list[str]:
    return ["--lookupd-http-address", cluster.lookupds[0].http_address]


def flintmq(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capfd.readouterr()
    status = cli.main(argv)
    said = capfd.readouterr()
    return status, said.out, said.err


def test_ls_shows_a_tree_of_all_nsqds(capfd: pytest.CaptureFixture[str], where: list[str]) -> None:
    status, out, err = flintmq(capfd, "ls", "orders", "--interval", "10ms", *where)
    assert (status, err) == (0, "")
    header, topic, *channels = out.splitlines()
    assert header.split()[:3] == ["TOPIC", "/", "CHANNEL"]
    assert topic.split() == ["orders", "0", "0", "0"]
    assert [line.split()[:3] for line in channels] == [["├─", "billing", "15"], ["└─", "shipping", "15"]]


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_ls_of_a_topic_that_is_missing_fails(
    capfd: pytest.CaptureFixture[str], where: list[str], more: tuple[str, ...]
) -> None:
    status, out, err = flintmq(capfd, "ls", "nosuch", "other*", "--interval", "0", *where, *more)
    told = "flintmq ls: no nsqd has a topic nosuch or other*; flintmq ls lists all\n"
    assert (status, out, err) == (1, "", told)


def test_ls_prints_json(capfd: pytest.CaptureFixture[str], cluster: NsqCluster) -> None:
    address = cluster.brokers[0].http_address
    _, out, _ = flintmq(capfd, "ls", "or*", "--json", "--interval", "0", "--nsqd-http-address", address)
    [topic] = map(json.loads, out.splitlines())
    assert (topic["topic"], topic["nodes"], topic["channels"][0]["depth"]) == ("orders", 1, 5)


def test_an_nsqd_that_is_down_is_named_and_the_others_are_shown(
    capfd: pytest.CaptureFixture[str], cluster: NsqCluster
) -> None:
    addresses = [cluster.brokers[0].http_address, "127.0.0.1:1"]
    argv = [word for address in addresses for word in ("--nsqd-http-address", address)]
    status, out, err = flintmq(capfd, "ls", "--interval", "0", *argv)
    assert status == 1
    assert "billing" in out
    assert "127.0.0.1:1 is left out: cannot speak to an nsqd" in err


@pytest.mark.parametrize(
    "answer",
    [
        b"null",
        b'{"topics": [{}]}',
        b'{"topics": "x"}',
        b'{"topics": [{"topic_name": "t", "depth": "deep"}]}',
        b'{"topics": [{"topic_name": "t", "depth": 1e999}]}',
        b'{"topics": [{"topic_name": "\\u001b[2Jt"}]}',
    ],
    ids=["null", "no name", "text", "no number", "no finite number", "an escape sequence"],
)
def test_an_nsqd_that_says_nonsense_spoils_nobody_else_s_answer(
    capfd: pytest.CaptureFixture[str], cluster: NsqCluster, answer: bytes
) -> None:
    class Nonsense(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        odd = f"127.0.0.1:{server.server_address[1]}"
        argv = [f"--nsqd-http-address={address}" for address in (odd, cluster.brokers[0].http_address)]
        try:
            status, out, err = flintmq(capfd, "ls", "--interval", "0", *argv)
            alone = flintmq(capfd, "stat", "orders", "-n", "1", argv[0])
        finally:
            server.shutdown()
            thread.join()
    assert (status, "billing" in out, f"{odd} is left out: " in err) == (1, True, True)
    assert (alone[0], alone[1], odd in alone[2]) == (1, "", True)
    assert "\x1b" not in out + err


def closed(file: str, *argv: str) -> tuple[int, str, str]:
    """Run a command whose standard input, output or error is closed."""
    words = ["bash", "-c", f'"$@" {file}', "bash", sys.executable, "-m", "flintmq", *argv]
    done = subprocess.run(words, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_standard_file_that_is_closed_is_an_error_or_does_not_matter() -> None:
    with NsqBroker() as broker:
        source = f"--nsqd-tcp-address={broker.address}"
        status, _, err = closed("<&-", "to_nsq", "--topic=unseen", source)
        assert (status, "read standard input: Bad file descriptor" in err, "Traceback" in err) == (1, True, False)
        broker.publish("unseen", b"one")
        status, _, err = closed(">&-", "nsq_tail", "--topic=unseen", "--channel=c", source)
        assert (status, "Bad file descriptor" in err, "Traceback" in err) == (1, True, False)
        # Nobody has seen it, so it is still there.
        assert broker.take("unseen", 1, channel="c") == [b"one"]
        argv = ["ls", "--interval=0", f"--nsqd-http-address={broker.http_address}"]
        assert closed(">&-", *argv) == (1, "", "flintmq ls: cannot write to standard output: Bad file descriptor\n")
        status, out, _ = closed("2>&-", *argv)
        assert (status, "unseen" in out) == (0, True)


def test_stat_prints_lines(capfd: pytest.CaptureFixture[str], where: list[str]) -> None:
    status, out, _ = flintmq(capfd, "stat", "orders/billing", "-n", "2", "--interval", "10ms", "--json", *where)
    assert status == 0
    assert [json.loads(line)["depth"] for line in out.splitlines()] == [15, 15]
    status, _, err = flintmq(capfd, "stat", "nothing", "-n", "1", *where)
    assert (status, "no nsqd has a topic nothing" in err) == (1, True)
    status, _, err = flintmq(capfd, "stat", "nothing/billing", "-n", "1", *where)
    assert (status, "no nsqd has a topic nothing" in err) == (1, True)


def test_a_topic_that_nsqlookupds_alone_know_is_called_registered(capfd: pytest.CaptureFixture[str]) -> None:
    with NsqCluster(1, 1) as cluster:
        where = ["--lookupd-http-address", cluster.lookupds[0].http_address]
        status, out, _ = flintmq(capfd, "channel", "create", "later/c", *where)
        assert (status, out.partition(";")[0]) == (0, "later/c: registered with 1 nsqlookupd")
        assert "with the first message to later" in out
        cluster.brokers[0].publish("later", b"one")
        status, out, _ = flintmq(capfd, "channel", "create", "later/d", *where)
        assert (status, out) == (0, "later/d: created on 1 nsqd and 1 nsqlookupd\n")


def test_nsqds_and_nsqlookupds_together_are_a_wrong_command_line(
    capfd: pytest.CaptureFixture[str], where: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        flintmq(capfd, "ls", "--nsqd-http-address", "127.0.0.1:4151", *where)
    assert ended.value.code == 2
    assert "not allowed with" in capfd.readouterr().err


def test_stat_of_a_channel_that_is_missing_names_the_channel(
    capfd: pytest.CaptureFixture[str], where: list[str]
) -> None:
    status, _, err = flintmq(capfd, "stat", "orders/nothing", "-n", "1", *where)
    assert (status, "the topic orders has no channel nothing; flintmq ls orders lists" in err) == (1, True)


@pytest.mark.parametrize(
    "argv",
    [
        *(
            [command, *topic, f"-n={number}"]
            for command, *topic in (["stat"], ["top", "--json"], ["tail", "orders"])
            for number in ("0", "-1", "x")
        ),
        *(["ls", f"--timeout={seconds}"] for seconds in ("0", "-1", "nan", "inf", "x")),
    ],
    ids=" ".join,
)
def test_numbers_that_make_no_sense_are_refused_by_their_flag(
    capfd: pytest.CaptureFixture[str], where: list[str], argv: list[str]
) -> None:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([*argv, *where])
    assert ended.value.code == 2
    assert f"argument {argv[-1].partition('=')[0]}: " in capfd.readouterr().err


def test_a_token_that_is_missing_wrong_or_too_weak_is_what_is_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("all admin\nsome read\n")
    tokens.chmod(0o600)
    with NsqBroker(http_auth_token_file=tokens) as broker:
        here = ["--nsqd-http-address", broker.http_address]
        for given, said in (([], "asks for a token"), (["--token", "x"], "does not know this token")):
            status, _, err = flintmq(capfd, "ls", "--interval", "0", *here, *given)
            line = f"flintmq ls: the nsqd at {broker.http_address} {said}; see --token-file\n"
            assert (status, err) == (1, line)
        status, _, err = flintmq(capfd, "topic", "create", "t", *here, "--token", "some")
        assert (status, "refuses it: the token lacks the right admin" in err) == (1, True)
        assert flintmq(capfd, "topic", "create", "t", *here, "--token", "all")[0] == 0
        status, out, _ = flintmq(capfd, "doctor", "--data-path", str(tmp_path), *here)
        assert (status, "give a token with the right read: --token-file" in out) == (1, True)
    for token in ("a\nb", "a b", "", "\u00e9"):
        status, _, err = flintmq(capfd, "ls", *here, "--token", token)
        assert (status, err) == (1, "flintmq ls: --token must be one word of printable ASCII characters\n")


def test_what_loses_messages_is_not_done_without_a_yes(capfd: pytest.CaptureFixture[str]) -> None:
    with NsqBroker() as broker:
        where = ["--nsqd-http-address", broker.http_address]
        assert flintmq(capfd, "channel", "create", "t/c", *where)[0] == 0
        broker.publish("t", b"one", b"two")
        for kind, name in (("channel", "t/c"), ("topic", "t")):
            status, _, err = flintmq(capfd, kind, "delete", name, *where)
            assert (status, "2 messages will be lost; give --yes" in err) == (1, True)
        assert flintmq(capfd, "channel", "pause", "t/c", *where)[0] == 0
        assert broker.stats("t", "c")["topics"][0]["channels"][0]["paused"]
        assert flintmq(capfd, "channel", "unpause", "t/c", *where)[0] == 0
        status, out, _ = flintmq(capfd, "channel", "empty", "t/c", "--yes", "--json", *where)
        assert (status, json.loads(out)["messages"]) == (0, 2)
        assert flintmq(capfd, "topic", "delete", "t", "--yes", *where)[0] == 0
        assert broker.stats()["topics"] == []


def test_doctor_finds_the_daemons_and_names_what_is_wrong(
    capfd: pytest.CaptureFixture[str], where: list[str], tmp_path: Path
) -> None:
    _, out, _ = flintmq(capfd, "doctor", "--json", "--data-path", str(tmp_path), *where)
    findings = [json.loads(line) for line in out.splitlines()]
    assert {"version", "ports", "disk", "limits", "java", "lookupds", "nsqds", "clock"} <= {
        finding["check"] for finding in findings
    }
    assert any("knows 2 nsqds" in finding["text"] for finding in findings)
    assert all(finding["advice"] for finding in findings if finding["level"] != "ok")
    assert list(tmp_path.iterdir()) == []
    status, out, _ = flintmq(capfd, "doctor", "--lookupd-http-address", "127.0.0.1:1", "--data-path", "/nowhere")
    assert status == 1
    assert "✗ disk       /nowhere is not a directory" in out
    assert "✗ lookupds   127.0.0.1:1: " in out


def test_doctor_tells_its_daemons_from_other_programs_at_their_ports(
    cluster: NsqCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None: ...

    names = ["nsqd (TCP)", "nsqd (HTTP)", "nsqlookupd (TCP)", "nsqlookupd (HTTP)"]
    broker, lookupd = cluster.brokers[0], cluster.lookupds[0]
    ours = [broker.address, broker.http_address, lookupd.address, lookupd.http_address]
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 5.0)
    ports = {int(address.rpartition(":")[2]): name for address, name in zip(ours, names, strict=True)}
    monkeypatch.setattr(doctor, "_PORTS", ports)
    assert {finding.level for finding in doctor._ports()} == {"ok"}
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Files)) for _ in names]
        monkeypatch.setattr(
            doctor, "_PORTS", {each.server_address[1]: name for each, name in zip(others, names, strict=True)}
        )
        threads = [threading.Thread(target=each.serve_forever, args=(0.01,)) for each in others]
        for thread in threads:
            thread.start()
        findings = list(doctor._ports())
        monkeypatch.setattr(_cluster, "DEFAULT_NSQD_HTTP", f"127.0.0.1:{others[0].server_address[1]}")
        status, out, _ = flintmq(capfd, "doctor", "--data-path", str(tmp_path), "--json")
        for each, thread in zip(others, threads, strict=True):
            each.shutdown()
            thread.join()
    assert [finding.level for finding in findings] == ["warning"] * 4
    assert all("another program listens there" in finding.text and finding.advice for finding in findings)
    [nsqds] = [about for about in map(json.loads, out.splitlines()) if about["check"] == "nsqds"]
    assert (status, nsqds["level"]) == (0, "warning")
    assert nsqds["text"].endswith("does not answer like an nsqd (HTTP 404)")


def test_clocks_that_differ_are_a_warning() -> None:
    told = "Thu, 01 Jan 1970 00:01:40 GMT"
    for now, level in ((100.9, "ok"), (99.0, "ok"), (104.0, "warning"), (90.0, "warning")):
        finding = clock_finding("x", told, now)
        assert finding is not None
        assert finding.level == level
    assert clock_finding("x", "nonsense", 0.0) is None


# --- Completion -------------------------------------------------------------------------------------------------------


def completed(*words: str) -> list[str]:
    return answers(words, ["ls", "nsqd", "channel"], cli.main)


def test_completion_knows_commands_flags_actions_topics_and_channels(where: list[str]) -> None:
    assert completed("n") == ["nsqd"]
    assert completed("channel", "un") == ["unpause"]
    assert completed("ls", "--inter") == ["--interval"]
    assert completed("pub", "--fi") == ["--file"]
    assert completed("settings", "--un") == ["--unset"]
    assert "--mem-queue-size" in completed("nsqd", "--mem")
    assert "--rotate-size" in completed("nsq_to_file", "--rot")
    assert completed("tail", *where, "") == ["orders"]
    assert completed("channel", "pause", *where, "ord") == ["orders/"]
    assert completed("channel", "pause", *where, "orders/s") == ["orders/shipping"]
    assert completed("ls", "--interval", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_complete_in_their_shells(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "flintmq"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m flintmq "$@"\n')
    program.chmod(0o755)
    ask = {
        "bash": 'eval "$(flintmq completion bash)"; COMP_LINE="flintmq channel unp"; COMP_POINT=${#COMP_LINE}; '
        '_flintmq; echo "${COMPREPLY[@]}"',
        # Without a terminal there is no line to complete: the function is called with words of its own.
        "zsh": 'compdef() { :; }; compadd() { shift 2; print -- "$@"; }; eval "$(flintmq completion zsh)"; '
        "words=(flintmq channel unp); CURRENT=3; _flintmq",
        "fish": "flintmq completion fish | source; complete -C 'flintmq channel unp'",
    }[shell]
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run([shell, *flags, "-c", ask], capture_output=True, timeout=PATIENCE, env=environment)
    assert done.stdout.decode().split() == ["unpause"], done.stderr


def test_bash_completes_topics_and_channels_of_the_address_in_the_line(where: list[str], tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    program = tmp_path / "flintmq"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m flintmq "$@"\n')
    program.chmod(0o755)
    setup = tmp_path / "setup"
    setup.write_text(f'PATH="{tmp_path}:$PATH"; PS1="ready> "; eval "$(flintmq completion bash)"\n')
    with Terminal("--rcfile", str(setup), "-i", program=bash) as terminal:
        terminal.wait_for("ready> ")
        terminal.type(f"flintmq channel pause {' '.join(where)} ord")
        terminal.press_until("\t", f"{where[1]} orders/")
        terminal.type("sh")
        terminal.press_until("\t", "orders/shipping")


# --- In a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """A program in a terminal of 30 lines."""

    def __init__(self, *argv: str, program: str = "", columns: int = 120) -> None:
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "30"}
            command = [program] if program else [sys.executable, "-m", "flintmq"]
            os.execv(command[0], [*command, *argv])
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.seen = ""
        self.status: int | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 0.05)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the program has closed its end
            return False
        self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode(errors="replace"))
        return bool(data)

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert self._read() and time.monotonic() < end, f"no {text!r} in {self.seen[-2000:]!r}"

    def press_until(self, key: str, text: str) -> None:
        """Press a key, and again if the text does not come: a completion gives up on a broker that takes long."""
        end = time.monotonic() + PATIENCE
        pressed = 0.0
        while text not in self.seen:
            now = time.monotonic()
            if now > pressed + 3:
                self.type(key)
                pressed = now
            assert self._read() and now < end, f"no {text!r} in {self.seen[-2000:]!r}"

    def end(self) -> int:
        """Wait for its end; return the exit code."""
        end = time.monotonic() + PATIENCE
        while self._read():
            assert time.monotonic() < end, self.seen[-2000:]
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
                break
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(self.status)


def test_ls_in_a_terminal(where: list[str]) -> None:
    with Terminal("ls", "--interval", "10ms", *where) as terminal:
        terminal.wait_for("└─ shipping")
        assert terminal.end() == 0


@pytest.mark.parametrize("columns", [40, 120])
def test_peek_shows_ids_and_bodies_however_narrow_the_terminal_is(columns: int) -> None:
    with NsqBroker() as broker:
        broker.publish("t", b"[bold]tea", b"coffee")
        with sync.NodeClient(broker.http_address) as node:
            ids = [message.id for message in node.peek_topic("t").messages]
        with Terminal("peek", "t", "--nsqd-http-address", broker.http_address, columns=columns) as terminal:
            assert terminal.end() == 0
        assert all(text in terminal.seen for text in (*ids, "[bold]tea", "coffee"))
        assert max(len(line) for line in terminal.seen.splitlines()) <= columns


def test_tail_in_a_terminal_ends_at_ctrl_c_and_leaves_no_channel() -> None:
    with NsqBroker() as broker:
        with sync.NodeClient(broker.http_address) as node:
            node.create_topic("t")
            with Terminal("tail", "t", "--nsqd-http-address", broker.http_address) as terminal:
                until(lambda: broker.stats("t")["topics"][0]["channels"])
                broker.publish("t", b"hello")
                terminal.wait_for("hello")
                terminal.type("\x03")
                assert terminal.end() == 0
            until(lambda: not broker.stats("t")["topics"][0]["channels"], "the channel stays")


def test_top_in_a_terminal_opens_a_topic_sorts_pauses_and_ends(cluster: NsqCluster, where: list[str]) -> None:
    pytest.importorskip("textual")

    def paused() -> list[bool]:
        return [
            bool(broker.stats("orders", "billing")["topics"][0]["channels"][0]["paused"]) for broker in cluster.brokers
        ]

    with Terminal("top", "--interval", "200ms", *where) as terminal:
        terminal.wait_for("orders")
        terminal.wait_for("by topic")
        terminal.type("s")
        terminal.wait_for("by depth")
        terminal.type("\r")
        terminal.wait_for("orders: 2 channels")
        terminal.wait_for("shipping")
        terminal.type("p")
        until(lambda: paused() == [True, True])
        # Only when it knows that too does the key mean the contrary.
        terminal.wait_for("(paused)")
        terminal.type("p")
        until(lambda: paused() == [False, False])
        terminal.type("q")
        assert terminal.end() == 0


def test_the_sentences_of_a_help_fit_a_narrow_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    capfd.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["ls", "--help"])
    _, about, *_ = capfd.readouterr().out.split("\n\n")
    assert about.startswith("List the topics") and max(map(len, about.splitlines())) <= 40


def test_top_without_a_terminal_says_what_to_run(capfd: pytest.CaptureFixture[str], where: list[str]) -> None:
    status, _, err = flintmq(capfd, "top", *where)
    assert (status, "flintmq top --json prints updates" in err) == (1, True)
    status, out, _ = flintmq(capfd, "top", "--json", "-n", "1", "--interval", "10ms", *where)
    assert (status, json.loads(out)["topics"][0]["topic"]) == (0, "orders")


# --- The documents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["ls", "stat", "tail", "topic", "channel", "top", "doctor", "completion"])
def test_every_flag_of_a_command_is_in_the_document_and_help_has_examples(
    tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([tool, "--help"])
    text = capsys.readouterr().out
    flags = set(re.findall(r"--[a-z][a-z-]+", text.partition("examples:")[0])) - {"--help"}
    document = (DOCS / "tools.md").read_text()
    assert "--json" in flags
    assert f"  flintmq {tool}" in text.partition("examples:")[2] or "flintmq completion" in text
    assert sorted(flag for flag in flags if f"`{flag}" not in document) == []
    assert f"`flintmq {tool}`" in document


@pytest.mark.parametrize("tool", ["nsq_to_file", "nsq_to_http", "nsq_to_nsq", "nsq_tail", "nsq_stat", "to_nsq"])
def test_every_flag_of_nsq_s_tools_is_in_the_document(tool: str) -> None:
    document = (DOCS / "nsq-tools.md").read_text()
    section = document.partition(f"\n## {tool}\n")[2].partition("\n## ")[0]
    shared = document.partition("\n## Flags of all tools\n")[2].partition("\n## ")[0]
    options: Any = importlib.import_module(f"flintmq.tools.{tool}").OPTIONS
    assert sorted(flag for flag in option_table(options) if f"`--{flag}`" not in section + shared) == []
