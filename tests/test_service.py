"""nsqd as a service: signals, systemd, the unit file. Real processes."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flintmq.broker.daemon import Broker
from flintmq.errors import FormatError
from flintmq.options import NsqadminOptions, NsqdOptions, parse, parse_duration, read_flags
from flintmq.protocol.wire import FRAME_MESSAGE, decode_message, encode_command
from support.nsq_client import BlockingNsqClient

# A guard against hanging, nowhere a measure.
PATIENCE = 90
ROOT = Path(__file__).resolve().parent.parent


class Process:
    """A running nsqd and what it said so far."""

    def __init__(self, data_path: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        command = [
            sys.executable, "-m", "flintmq", "nsqd", f"--data-path={data_path}", "--tcp-address=127.0.0.1:0",
            "--http-address=", "--https-address=", "--disk-reserve=0", *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0, env=os.environ | (env or {})
        )
        self.said = ""
        self.address = self.wait_for(r"TCP: listening on ([\d.]+:\d+)")[1]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """What matches in its log, from the beginning on."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.said)) is None:
            ready, _, _ = select.select([self.process.stderr], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self.process.stderr.fileno(), 65536) if ready else b""
            assert more, f"no {pattern!r} in {self.said!r}"
            self.said += more.decode()
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Its status; what it still had to say is in ``said``."""
        _, rest = self.process.communicate(timeout=PATIENCE)
        self.said += rest.decode()
        return self.process.returncode


@contextlib.contextmanager
def nsqd(data_path: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    running = Process(data_path, *flags, env=env)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def pub(body: bytes) -> bytes:
    return encode_command(b"PUB", b"t", body=body)


# --- Signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_even_with_messages_in_flight(tmp_path: Path, number: int) -> None:
    with nsqd(tmp_path) as running, BlockingNsqClient(running.address) as client:
        assert client.ask(b"SUB t c\n") == b"OK"
        client.socket.sendall(pub(b"m") + b"RDY 1\n")
        while client.frame()[0] != FRAME_MESSAGE:
            pass
        running.signal(number)
        assert running.ended() == 0
        assert "NSQ: bye" in running.said


def test_sigterm_may_ask_for_a_drain(tmp_path: Path) -> None:
    with nsqd(tmp_path, "--sigterm=drain") as running, BlockingNsqClient(running.address) as client:
        assert client.ask(b"SUB t c\n") == b"OK"
        assert client.ask(pub(b"m")) == b"OK"
        running.signal(signal.SIGTERM)
        running.wait_for("NSQ: draining, 1 messages are with consumers")
        with BlockingNsqClient(running.address) as other:
            assert other.ask(pub(b"x")) == b"E_PUB_FAILED PUB failed the node is being drained"
        client.socket.sendall(b"RDY 1\n")
        message = decode_message(client.frame()[1])
        client.socket.sendall(b"FIN %s\n" % message.id)
        assert running.ended() == 0
        assert "NSQ: drained, 0 messages stay for the next start" in running.said


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_drain_at_once(tmp_path: Path, second: int) -> None:
    with (
        nsqd(tmp_path, "--sigterm=drain", "--drain-timeout=0") as running,
        BlockingNsqClient(running.address) as client,
    ):
        assert client.ask(b"SUB t c\n") == b"OK"
        assert client.ask(pub(b"m")) == b"OK"
        running.signal(signal.SIGTERM)
        running.wait_for("NSQ: draining")
        running.signal(second)
        assert running.ended() == 0
    with nsqd(tmp_path) as running, BlockingNsqClient(running.address) as client:
        assert client.ask(b"SUB t c\nRDY 1\n") == b"OK"
        assert decode_message(client.frame()[1]).body == b"m"


def test_a_drain_ends_after_its_timeout(tmp_path: Path) -> None:
    with (
        nsqd(tmp_path, "--sigterm=drain", "--drain-timeout=50ms") as running,
        BlockingNsqClient(running.address) as client,
    ):
        assert client.ask(b"SUB t c\n") == b"OK"
        assert client.ask(pub(b"m")) == b"OK"
        running.signal(signal.SIGTERM)
        assert running.ended() == 0
        assert "WARNING: NSQ: not drained, 1 messages stay for the next start" in running.said


def test_sigint_stops_at_once_whatever_sigterm_means(tmp_path: Path) -> None:
    with (
        nsqd(tmp_path, "--sigterm=drain", "--drain-timeout=0") as running,
        BlockingNsqClient(running.address) as client,
    ):
        assert client.ask(b"SUB t c\n") == b"OK"
        assert client.ask(pub(b"m")) == b"OK"
        running.signal(signal.SIGINT)
        assert running.ended() == 0
        assert "drain" not in running.said


def test_sighup_reloads_and_disturbs_nobody(tmp_path: Path) -> None:
    with nsqd(tmp_path) as running, BlockingNsqClient(running.address) as client:
        assert client.ask(pub(b"1")) == b"OK"
        running.signal(signal.SIGHUP)
        running.wait_for("NSQ: reloading")
        assert client.ask(pub(b"2")) == b"OK"
        running.signal(signal.SIGTERM)
        assert running.ended() == 0


async def test_what_cannot_be_reloaded_stays_and_the_others_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reloaded: list[str] = []

    def fails_to_read() -> None:
        raise FileNotFoundError(2, "No such file or directory", "cert.pem")

    def fails_to_understand() -> None:
        raise FormatError("cert.pem is no certificate")

    async with Broker(data_path=tmp_path, disk_reserve=0) as broker:
        broker.reloaders += [fails_to_read, lambda: reloaded.append("a"), fails_to_understand]
        broker.reloaders.append(lambda: reloaded.append("b"))
        broker.reload()
    assert reloaded == ["a", "b"]
    errors = [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"]
    assert errors == [
        "NSQ: cannot reload, going on as before - [Errno 2] No such file or directory: 'cert.pem'",
        "NSQ: cannot reload, going on as before - cert.pem is no certificate",
    ]


# --- systemd ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_the_service_manager_is_told(tmp_path: Path, kind: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(PATIENCE)
        path = str(tmp_path / "notify")
        if kind == "path":
            manager.bind(path)
            name = path
        elif sys.platform == "linux":
            manager.bind("\0" + path)
            name = "@" + path
        else:
            pytest.skip("only Linux has abstract sockets")
        data = tmp_path / "data"
        data.mkdir()
        with nsqd(data, env={"NOTIFY_SOCKET": name}) as running:
            assert manager.recv(4096) == b"READY=1"
            running.signal(signal.SIGHUP)
            assert re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=\d+", manager.recv(4096))
            assert manager.recv(4096) == b"READY=1"
            running.signal(signal.SIGTERM)
            assert manager.recv(4096) == b"STOPPING=1"
            assert running.ended() == 0


def test_a_service_manager_that_is_gone_is_a_warning(tmp_path: Path) -> None:
    with nsqd(tmp_path, env={"NOTIFY_SOCKET": str(tmp_path / "nobody")}) as running:
        running.wait_for("WARNING: cannot tell the service manager READY=1 - ")
        running.signal(signal.SIGTERM)
        assert running.ended() == 0


def test_the_unit_file_starts_what_there_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "deploy" / "nsqd.service")
    service = unit["Service"]
    program, *argv = service["ExecStart"].split()
    assert Path(program).name == "nsqd"
    flags = read_flags(NsqdOptions, argv)
    assert set(flags) == {"config", "data-path"}
    assert flags["data-path"] == f"/var/lib/{service['StateDirectory']}"
    assert service["Type"] == "notify"
    # A drain must not be cut short by the one who asked for it.
    assert parse_duration(service["TimeoutStopSec"].replace("min", "m")) > NsqdOptions().drain_timeout


def test_the_unit_file_of_nsqadmin_starts_what_there_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "deploy" / "nsqadmin.service")
    service = unit["Service"]
    program, *argv = service["ExecStart"].split()
    assert Path(program).name == "nsqadmin"
    assert set(read_flags(NsqadminOptions, argv)) == {"config"}
    options = parse(NsqadminOptions, ["--strict-config", f"--config={ROOT / 'deploy' / 'nsqadmin.toml'}"])
    assert Path(options.action_log).parent == Path("/var/lib") / service["StateDirectory"]


# --- Log lines --------------------------------------------------------------------------------------------------------


def test_every_line_of_a_run_is_json_if_asked_for(tmp_path: Path) -> None:
    with nsqd(tmp_path, "--log-format=json", "--node-id=7") as running, BlockingNsqClient(running.address) as client:
        assert client.ask(pub(b"x")) == b"OK"
        running.signal(signal.SIGTERM)
        assert running.ended() == 0
    lines = [json.loads(line) for line in running.said.splitlines()]
    assert {line["program"] for line in lines} == {"nsqd"}
    assert [line["message"] for line in lines if line["message"].startswith("ID")] == ["ID: 7"]
    assert [line["topic"] for line in lines if line["message"].endswith(": created")] == ["t"]
    assert lines[-1]["message"] == "NSQ: bye"


def test_what_is_wrong_with_the_options_is_json_too(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flintmq", "nsqd", "--log-format=json", f"--config={tmp_path / 'missing'}"],
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 1
    line = json.loads(result.stderr)
    assert (line["level"], line["message"][:27]) == ("fatal", "failed to load config file ")
