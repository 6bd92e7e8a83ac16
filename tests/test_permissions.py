"""Where the system refuses, a program says in one line what is in the way, whose it is, and what to do.

The programs run as users do: root without its privileges, where the tests run as root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flintmq.cli import main
from flintmq.errors import permission_hint

PATIENCE = 60
#: Nothing of a root's privileges is left; files that are closed to their owner are closed to it.
AS_A_USER = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []

pytestmark = pytest.mark.skipif(bool(AS_A_USER) and shutil.which("setpriv") is None, reason="needs setpriv")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """What is closed: a folder, one that is read-only, a file. And a data path and a text that are open."""
    for name in ("closed", "read-only", "open"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("x = 1\n")
    (tmp_path / "text").write_text("x = 1\n")
    (tmp_path / "file").chmod(0)
    (tmp_path / "closed").chmod(0)
    (tmp_path / "read-only").chmod(0o555)
    yield tmp_path
    for name in ("closed", "read-only", "file"):
        (tmp_path / name).chmod(0o755)


def run(folder: Path, line: str) -> str:
    """Run a command that must fail, and return the end of what it said."""
    words = [word.replace("DIR", str(folder)) for word in line.split()]
    command = [*AS_A_USER, sys.executable, "-m", "flintmq", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "[Errno" not in done.stderr
    return done.stderr.strip().splitlines()[-1].replace(str(folder), "DIR")


FREE = "--tcp-address 127.0.0.1:0 --http-address 127.0.0.1:0"
ALL_FREE = (
    f"{FREE} --lookupd-tcp-address 127.0.0.1:0 --lookupd-http-address 127.0.0.1:0 --admin-http-address 127.0.0.1:0"
)


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        (
            "up --data-path DIR/read-only/new",
            "cannot create the directory DIR/read-only/new",
            "DIR/read-only has mode 0555",
        ),
        (
            f"nsqd --data-path DIR/read-only {FREE}",
            "DIR/read-only/flintmq.tmp: Permission denied",
            "DIR/read-only has mode 0555",
        ),
        (f"nsqd --data-path DIR/closed {FREE}", "open DIR/closed: permission denied", "DIR/closed has mode 0000"),
        (f"nsqd --data-path DIR/closed/x {FREE}", "open DIR/closed/x: permission denied", "DIR/closed has mode 0000"),
        ("nsqd --config DIR/file", "failed to load config file DIR/file", "DIR/file has mode 0000"),
        ("nsqlookupd --config DIR/file", "failed to load config file DIR/file", "DIR/file has mode 0000"),
        (
            "nsqd --data-path DIR/open --http-address 127.0.0.1:0 --tcp-address DIR/read-only/sock",
            "listen (DIR/read-only/sock) failed - permission denied",
            "DIR/read-only has mode 0555",
        ),
        (
            "nsqd --data-path DIR/open --http-address 127.0.0.1:0 --tcp-address 127.0.0.1:80",
            "listen (127.0.0.1:80) failed - permission denied",
            "ports below 1024 need a privilege (CAP_NET_BIND_SERVICE)",
        ),
        (
            f"nsqd --data-path DIR/open --http-auth-token-file DIR/file {FREE}",
            "cannot read the tokens in DIR/file",
            "DIR/file has mode 0000",
        ),
        (
            "nsqadmin --http-address 127.0.0.1:0 --lookupd-http-address 127.0.0.1:4161 --action-log DIR/closed/log",
            "cannot write the action log DIR/closed/log",
            "DIR/closed has mode 0000",
        ),
        ("backup DIR/copy --data-path DIR/closed", "cannot read DIR/closed", "DIR/closed has mode 0000"),
        (
            "backup DIR/read-only/copy --data-path DIR/made",
            "DIR/read-only/copy.partial: Permission denied",
            "DIR/read-only has mode 0555",
        ),
        (
            "backup DIR/closed/copy --data-path DIR/made",
            "DIR/closed/copy: Permission denied",
            "DIR/closed has mode 0000",
        ),
        ("backup DIR/closed --data-path DIR/made", "DIR/closed: Permission denied", "DIR/closed has mode 0000"),
        ("backup DIR/closed/copy --verify", "cannot read DIR/closed/copy/", "DIR/closed has mode 0000"),
        (
            "restore DIR/backup --data-path DIR/closed/new",
            "DIR/closed/new: Permission denied",
            "DIR/closed has mode 0000",
        ),
        (
            "restore DIR/backup --data-path DIR/read-only/new",
            "DIR/read-only/new: Permission denied",
            "DIR/read-only has mode 0555",
        ),
        (
            "up --data-path DIR/closed",
            "DIR/closed: Permission denied",
            "DIR/closed has mode 0000",
        ),
        (
            f"up --nodes 2 --data-path DIR/read-only {ALL_FREE}",
            "DIR/read-only/node-1: Permission denied",
            "DIR/read-only has mode 0555",
        ),
        (
            f"nsqd --data-path DIR/open --tls-cert DIR/file --tls-key DIR/file {FREE}",
            "failed to build TLS config - DIR/file: Permission denied",
            "DIR/file has mode 0000",
        ),
        (
            f"nsqd --data-path DIR/open --tls-cert DIR/text --tls-key DIR/file {FREE}",
            "failed to build TLS config - DIR/file: Permission denied",
            "DIR/file has mode 0000",
        ),
        (
            f"nsqd --data-path DIR/open --lookupd-tls --lookupd-tls-root-ca-file DIR/file {FREE}",
            "failed to build TLS config for nsqlookupd - DIR/file: Permission denied",
            "DIR/file has mode 0000",
        ),
        (
            f"nsqlookupd --tls-cert DIR/text --tls-key DIR/file {FREE}",
            "failed to build TLS config - DIR/file: Permission denied",
            "DIR/file has mode 0000",
        ),
        (
            "nsqadmin --http-address 127.0.0.1:0 --lookupd-http-address 127.0.0.1:4161 "
            "--http-client-tls-cert DIR/text --http-client-tls-key DIR/file",
            "failed to LoadX509KeyPair DIR/text, DIR/file - DIR/file: Permission denied",
            "DIR/file has mode 0000",
        ),
        (
            "pub t x --tls-cert DIR/text --tls-key DIR/file",
            "cannot use the files of --tls-root-ca-file, --tls-cert and --tls-key - DIR/file: Permission denied",
            "DIR/file has mode 0000",
        ),
        (
            "ls --tls-root-ca-file DIR/file",
            "cannot use the files of --tls-root-ca-file, --tls-cert and --tls-key - DIR/file: Permission denied",
            "DIR/file has mode 0000",
        ),
        ("pub t --file DIR/file", "DIR/file: Permission denied", "DIR/file has mode 0000"),
        ("torture --data-path DIR/read-only", "DIR/read-only/flintmq-torture-", "DIR/read-only has mode 0555"),
        (
            "peek t --nsqd-http-address DIR/closed/sock",
            "cannot speak to an nsqd at DIR/closed/sock (Permission denied)",
            "DIR/closed has mode 0000",
        ),
        (
            "ls --nsqd-http-address DIR/closed/sock",
            "cannot speak to an nsqd at DIR/closed/sock (Permission denied)",
            "DIR/closed has mode 0000",
        ),
        (
            "pipeline archive t --to DIR/read-only/table --once",
            "cannot write to DIR/read-only/table: Permission denied",
            "DIR/read-only has mode 0555",
        ),
        (
            "pipeline archive t --to DIR/open/table --checkpoint DIR/closed/at --once",
            "cannot write to DIR/closed/at: Permission denied",
            "DIR/closed has mode 0000",
        ),
        (
            "pipeline metrics t --to-topic m --checkpoint DIR/read-only/at",
            "cannot write to DIR/read-only/at: Permission denied",
            "DIR/read-only has mode 0555",
        ),
        (
            "pipeline metrics t --plot DIR/read-only/plot.html",
            "cannot write DIR/read-only/plot.html: Permission denied",
            "DIR/read-only has mode 0555",
        ),
        (
            "pipeline sql DIR/text --topic t --to-table DIR/read-only/table",
            "cannot write to DIR/read-only/table: Permission denied",
            "DIR/read-only has mode 0555",
        ),
        ("pipeline sql DIR/file --topic t", "the query cannot be read: DIR/file", "DIR/file has mode 0000"),
        (
            "pipeline replay t --to again --checkpoint DIR/read-only/at",
            "cannot write to DIR/read-only/at: Permission denied",
            "DIR/read-only has mode 0555",
        ),
        (
            "pipeline audit t --archive DIR/closed",
            "DIR/closed cannot be read: Permission denied",
            "DIR/closed has mode 0000",
        ),
        (
            "pipeline status --checkpoint DIR/closed/at",
            "DIR/closed/at cannot be read: Permission denied",
            "DIR/closed has mode 0000",
        ),
        ("pub t x --nsqd DIR/closed/sock", "cannot connect to a broker at DIR/closed/sock", "DIR/closed has mode 0000"),
    ],
)
def test_a_refusal_says_what_is_in_the_way(folder: Path, line: str, what: str, hint: str) -> None:
    if "127.0.0.1:80" in line and Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text().strip() != "1024":
        pytest.skip("every port is free to use here")
    if "DIR/made" in line or "DIR/backup" in line:
        from flintmq.testing import NsqBroker

        (folder / "made").mkdir()
        with NsqBroker(data_path=folder / "made") as broker:
            broker.publish("t", b"x")
        if "DIR/backup" in line:
            main(["backup", str(folder / "backup"), "--data-path", str(folder / "made")])
    said = run(folder, line)
    assert what in said and hint in said, said
    assert "chmod" in said or "choose a higher one" in said


def test_a_socket_of_another_user_says_how_to_let_others_connect(folder: Path) -> None:
    path = folder / "open" / "sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        path.chmod(0)
        said = run(folder, f"sub t/c --nsqd {path}")
    assert "DIR/open/sock has mode 0000" in said
    assert "--unix-socket-mode" in said and "start one" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_of_another_users_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    assert permission_hint(PermissionError(13, "no"), path / "x") == (
        f"; {path} belongs to nobody (mode 0700) and this process runs as root: run it as nobody, or chown it"
    )
    os.chown(path, 54321, 54321)
    assert "belongs to the user 54321" in permission_hint(PermissionError(13, "no"), path)


def test_nobody_is_told_to_become_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    about = os.stat("/")
    assert permission_hint(PermissionError(13, "no"), "/") == (
        f"; / belongs to root (mode {about.st_mode & 0o7777:04o}) and this process runs as nobody: "
        "choose another path, or let root chown it"
    )


def test_other_errors_have_no_hint(tmp_path: Path) -> None:
    assert permission_hint(FileNotFoundError(2, "no"), tmp_path) == ""
    assert permission_hint(ValueError("no"), tmp_path) == ""
