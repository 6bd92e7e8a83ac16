"""Real daemons for the client's tests, as processes: they can be killed and come back on the same ports."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from flintmq.protocol.wire import encode_command
from interop.processes import DEADLINE, PEERS, Output, end

LISTENING = re.compile(r"(TCP|HTTPS?): listening on (\S+)")


def command_of(kind: str, program: str) -> list[str]:
    """How to start a program of ours or of NSQ's; skips the test where it is not there."""
    if kind == "go":
        binary = PEERS / "bin" / program
        if not os.access(binary, os.X_OK):
            pytest.skip(f"no Go {program} at {binary}: run scripts/peers")
        return [str(binary)]
    if program == "nsqlookupd" and importlib.util.find_spec("flintmq.lookup") is None:
        pytest.skip("flintmq has no nsqlookupd yet")
    return [sys.executable, "-m", "flintmq", program]


class Daemon:
    """A process that says on standard error where it listens."""

    def __init__(self, kind: str, program: str, *flags: str, wants: tuple[str, ...] = ("TCP",)) -> None:
        self.kind = kind
        self.flags = flags
        #: Where it listens, by TCP and HTTP.
        self.at: dict[str, str] = {}
        self._command = command_of(kind, program)
        self._wants = wants
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Output | None = None

    @property
    def address(self) -> str:
        return self.at["TCP"]

    def start(self) -> None:
        """At the same addresses as before, if it ran before."""
        flags = [
            f"--{name.lower()}-address={self.at.get(name, '127.0.0.1:0')}"
            for name in ("TCP", "HTTP")
            if not any(flag.startswith(f"--{name.lower()}-address") for flag in self.flags)
        ]
        self._process = subprocess.Popen(
            [*self._command, *flags, *self.flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self._process.stderr is not None
        self._log = Output(self._process.stderr)
        give_up = time.monotonic() + DEADLINE
        found: dict[str, str] = {}
        while not found.keys() >= set(self._wants):
            try:
                line = self._log.next_line(give_up - time.monotonic())
            except queue.Empty:
                line = None
            if line is None:
                text = self._log.tail()
                self.stop()
                if "TLS is not supported" in text:
                    pytest.skip("flintmq's nsqd has no TLS yet")
                raise AssertionError(f"{self._command} does not listen:\n{text}")
            if match := LISTENING.search(line):
                found[match[1]] = match[2]
        self.at |= found

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            end(self._process)
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


class Nsqd(Daemon):
    def __init__(self, kind: str, data_path: Path, *flags: str) -> None:
        data_path.mkdir(exist_ok=True)
        super().__init__(
            kind,
            "nsqd",
            f"--data-path={data_path}",
            "--broadcast-address=127.0.0.1",
            # Not NSQ's own port, which another test may have.
            "--https-address=127.0.0.1:0",
            *flags,
        )


class Lookupd(Daemon):
    def __init__(self, kind: str) -> None:
        super().__init__(kind, "nsqlookupd", wants=("TCP", "HTTP"))

    @contextlib.asynccontextmanager
    async def registered(self, nsqd: Nsqd, topic: str) -> AsyncIterator[None]:
        """Say to it what an nsqd says, so that any nsqd can be found."""
        host, _, port = self.at["TCP"].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        about = {
            "version": "1.3.0",
            "tcp_port": int(nsqd.address.rpartition(":")[2]),
            "http_port": 1,
            "hostname": "localhost",
            "broadcast_address": "127.0.0.1",
        }
        writer.write(b"  V1" + encode_command(b"IDENTIFY", body=msgspec.json.encode(about)))
        await self._answer(reader)
        writer.write(encode_command(b"REGISTER", topic.encode()))
        assert await self._answer(reader) == b"OK"
        try:
            yield
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
