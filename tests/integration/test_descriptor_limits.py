"""Running out of descriptors: connections are refused while there are some left for the files of messages."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flintmq.broker.net import sockets
from flintmq.protocol.wire import encode_command
from support.secure import Certificates

pytestmark = pytest.mark.skipif(not sockets.available(), reason="no epoll: asyncio accepts connections")

LIMIT = 128


@contextlib.contextmanager
def daemon(path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """A broker that may open few files, and where it listens: for TCP, for HTTP."""
    addresses = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--https-address=")
    command = [sys.executable, "-m", "flintmq", "nsqd", f"--data-path={path}", *addresses, *flags]
    log = path / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stderr=output,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 30
            while len(found := re.findall(r"(?:TCP|HTTP): listening on (\S+)", log.read_text())) < 2:
                assert time.monotonic() < deadline and process.poll() is None, log.read_text()
                time.sleep(0.01)
            yield process, found[0], found[1]
        finally:
            process.kill()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("port", ["tcp", "http", "https"])
def test_hundreds_of_connections_leave_descriptors_for_new_topics(tmp_path: Path, durability: str, port: str) -> None:
    secure: tuple[str, ...] = ()
    if port == "https":
        made = Certificates(tmp_path)
        secure = (f"--tls-cert={made.cert}", f"--tls-key={made.key}", "--https-address=127.0.0.1:0")
    with daemon(tmp_path, f"--durability={durability}", "--sync-timeout=50ms", *secure) as (process, tcp, http):
        if port == "https":
            while not (found := re.search(r"HTTPS: listening on (\S+)", (tmp_path / "log").read_text())):
                time.sleep(0.01)
            http = found[1]
        with connect(tcp) as publisher, contextlib.ExitStack() as stack:
            publisher.sendall(b"  V2")
            number = 0

            def publish() -> None:
                nonlocal number
                number += 1
                publisher.sendall(encode_command(b"PUB", b"topic-%d" % number, body=b"x" * 100))
                assert publisher.recv(100) == b"\0\0\0\6\0\0\0\0OK", (tmp_path / "log").read_text()[-2000:]

            publish()
            kept = 0
            for _ in range(3 * LIMIT):
                sock = stack.enter_context(connect(tcp if port == "tcp" else http))
                if port != "https":
                    sock.sendall(b"  V2" if port == "tcp" else b"GET")
                kept += 1
                if kept % 16 == 0:
                    publish()
            # Each of them creates a folder, a file, and syncs both.
            for _ in range(20):
                publish()
            time.sleep(0.2)
            publish()
            assert process.poll() is None
        text = (tmp_path / "log").read_text()
        assert "FATAL" not in text and "Too many open files" not in text
        # Said once in a while, not for each.
        assert text.count("connections are refused") == 1, text[-2000:]
        # They are gone: there is room again.
        deadline = time.monotonic() + 30
        while True:
            with connect(tcp) as again, contextlib.suppress(OSError):
                again.sendall(b"  V2" + encode_command(b"PUB", b"after", body=b"x"))
                if again.recv(100) == b"\0\0\0\6\0\0\0\0OK":
                    break
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_files_of_many_topics_are_no_flood_of_connections(tmp_path: Path) -> None:
    with daemon(tmp_path, "--sync-timeout=50ms") as (process, tcp, http):
        with connect(tcp) as publisher:
            publisher.sendall(b"  V2")
            for _ in range(3):
                topics = range(LIMIT)
                publisher.sendall(b"".join(encode_command(b"PUB", b"topic-%d" % i, body=b"x") for i in topics))
                answers = b""
                while len(answers) < 10 * LIMIT:
                    part = publisher.recv(10 * LIMIT - len(answers))
                    assert part, (tmp_path / "log").read_text()[-2000:]
                    answers += part
                assert answers == b"\0\0\0\6\0\0\0\0OK" * LIMIT
                time.sleep(0.2)
        # What storage holds open is its own share again.
        deadline = time.monotonic() + 30
        while True:
            links = [link.readlink() for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.is_symlink()]
            if sum(link.suffix == ".seg" for link in links) <= LIMIT // 4:
                break
            assert time.monotonic() < deadline, links
            time.sleep(0.05)
        for _ in range(LIMIT // 4):
            with connect(tcp) as client:
                client.sendall(b"  V2" + encode_command(b"PUB", b"topic-1", body=b"x"))
                assert client.recv(100) == b"\0\0\0\6\0\0\0\0OK", (tmp_path / "log").read_text()[-2000:]
            with connect(http) as client:
                client.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 200")
