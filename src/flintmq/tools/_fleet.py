"""Several nsqds on one machine, each in a process of its own: how one cluster uses more than one core.

A Fleet owns the processes, their ports and their data paths, which are folders of one folder. It starts all nodes,
starts a node again that ended by itself, and stops them. A node says that it is ready as it would say it to systemd.
The fleet knows nothing of messages: nsqlookupd tells clients where the nodes are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flintmq.addresses import HeldPort, join, split
from flintmq.errors import StartError

__all__ = ["MOST_NODES", "Fleet", "check_data_path", "end_with_parent", "ports"]

logger = logging.getLogger(__name__)

MOST_NODES = 64
#: Seconds until a node that ended by itself is started again; doubled each time, up to the other one.
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
#: Seconds after which a node counts as healthy: the next pause is the first one again.
HEALTHY = 60.0

_FOLDER = re.compile(r"node-([1-9]\d*)")
#: The folder in a data path that holds everything of a broker.
_CONTENT = "flintmq"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int) -> None:
    """Have the system send this process a signal when its parent ends, where it can. Called in the child."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)


def ports(tcp: str, http: str, count: int, taken: Sequence[str]) -> list[tuple[str, str]]:
    """Return the addresses of ``count`` nodes: the given ports and every second one after them, less those taken."""
    tcp_host, tcp_port = split(tcp, listening=True, unix=False)[:2]
    http_host, http_port = split(http, listening=True, unix=False)[:2]
    used = {split(address, listening=True, unix=False).port for address in taken} - {0}
    found: list[tuple[str, str]] = []
    step = 0
    while len(found) < count:
        pair = [port + step if port else 0 for port in (tcp_port, http_port)]
        step += 2
        if max(pair) > 65_535:
            raise StartError(f"there are not enough ports after {tcp} and {http} for {count} nodes")
        if used.isdisjoint(pair) and (pair[0] != pair[1] or not pair[0]):
            used.update(port for port in pair if port)
            found.append((join(tcp_host, pair[0]), join(http_host, pair[1])))
    return found


def check_data_path(folder: Path, count: int) -> None:
    """StartError if starting ``count`` nodes on a folder would leave messages in it that nobody serves."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder)
        found = sorted(int(match[1]) for name in names if (match := _FOLDER.fullmatch(name)) is not None)
        served = [number for number in found if (folder / f"node-{number}" / _CONTENT).exists()]
        if count == 1 and served:
            raise StartError(f"the data path {folder} is that of {served[-1]} nodes: give --nodes {served[-1]}")
        if count > 1 and _CONTENT in names:
            raise StartError(
                f"the data path {folder} is that of a single node: give another --data-path, or move its content to "
                f"{folder / 'node-1'}"
            )
        if served and served[-1] > count:
            raise StartError(
                f"the data path {folder} is that of {served[-1]} nodes: give --nodes {served[-1]}. To use fewer, let "
                f"consumers empty the last ones, then delete their folders"
            )


@dataclass(eq=False)
class _Node:
    number: int
    tcp_address: str
    http_address: str
    folder: Path
    ports: list[HeldPort]
    process: asyncio.subprocess.Process | None = None
    #: Where it says that it is ready.
    listener: socket.socket | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __str__(self) -> str:
        return f"nsqd {self.number} ({self.tcp_address})"


class Fleet:
    """``flags`` are those of every node. ``async with``: all nodes are ready; at the end they are stopped."""

    def __init__(self, folder: Path, addresses: Sequence[tuple[str, str]], first_id: int, flags: Sequence[str]) -> None:
        self._flags = flags
        self._first_id = first_id
        self._nodes = [self._node(folder, number, *pair) for number, pair in enumerate(addresses, 1)]
        self._keepers: list[asyncio.Task[None]] = []
        self._sockets = tempfile.TemporaryDirectory(prefix="flintmq-")

    @staticmethod
    def _node(folder: Path, number: int, tcp: str, http: str) -> _Node:
        held: list[HeldPort] = []

        def chosen(address: str) -> str:
            host, port = split(address, listening=True, unix=False)[:2]
            if port:
                return address
            # It must be the same at every start of the node.
            held.append(HeldPort())
            return join(host, split(held[-1].address).port)

        return _Node(number, chosen(tcp), chosen(http), folder / f"node-{number}", held)

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """TCP and HTTP address of each node."""
        return [(node.tcp_address, node.http_address) for node in self._nodes]

    # --- Start and stop --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Fleet:
        starting = asyncio.gather(*map(self._first_start, self._nodes), return_exceptions=True)
        try:
            failures = [failure for failure in await starting if failure is not None]
            if failures:
                raise failures[0]
        except BaseException:
            await self._end()
            raise
        self._keepers = [asyncio.create_task(self._keep(node)) for node in self._nodes]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _first_start(self, node: _Node) -> None:
        node.folder.mkdir(parents=True, exist_ok=True)
        await self._spawn(node)
        assert node.process is not None
        ended, ready = asyncio.create_task(node.process.wait()), asyncio.create_task(node.ready.wait())
        try:
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise StartError(
                    f"{node} ended with status {node.process.returncode} before it was ready; its lines above say why"
                )
        finally:
            ended.cancel()
            ready.cancel()

    async def _end(self) -> None:
        """Stop all nodes cleanly, and wait for it however long they have to write."""
        for keeper in self._keepers:
            keeper.cancel()
        self.signal(signal.SIGTERM)
        await asyncio.gather(*(node.process.wait() for node in self._nodes if node.process is not None))
        for node in self._nodes:
            self._stop_listening(node)
            for port in node.ports:
                port.close()
        self._sockets.cleanup()

    def signal(self, number: int) -> None:
        """Send a signal to all nodes that run."""
        for node in self._nodes:
            if node.process is not None and node.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    node.process.send_signal(number)

    # --- One node --------------------------------------------------------------------------------------------------

    async def _spawn(self, node: _Node) -> None:
        node.ready.clear()
        node.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flintmq", "nsqd"),
            f"--tcp-address={node.tcp_address}",
            f"--http-address={node.http_address}",
            f"--data-path={node.folder}",
            f"--node-id={(self._first_id + node.number - 1) % 1024}",
            f"--log-prefix=[nsqd-{node.number}] ",
            *self._flags,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "NOTIFY_SOCKET": self._listen(node)},
            # A ctrl-C of the terminal is for us alone, who stop the nodes in order.
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )

    def _listen(self, node: _Node) -> str:
        """Listen for the word of a node that it is ready; the path of the socket."""
        self._stop_listening(node)
        path = os.path.join(self._sockets.name, f"node-{node.number}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        node.listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.setblocking(False)
        listener.bind(path)

        def heard() -> None:
            with contextlib.suppress(BlockingIOError):
                if b"READY=1" in listener.recv(4096):
                    node.ready.set()

        asyncio.get_running_loop().add_reader(listener.fileno(), heard)
        return path

    def _stop_listening(self, node: _Node) -> None:
        if node.listener is not None:
            asyncio.get_running_loop().remove_reader(node.listener.fileno())
            node.listener.close()
            node.listener = None

    async def _keep(self, node: _Node) -> None:
        """Start a node again whenever it ends by itself."""
        clock = asyncio.get_running_loop().time
        pause = FIRST_PAUSE
        while True:
            began = clock()
            assert node.process is not None
            status = await node.process.wait()
            if clock() - began >= HEALTHY:
                pause = FIRST_PAUSE
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            logger.warning("%s %s, it is started again in %g s", node, how, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                await self._spawn(node)
            except OSError as exc:
                logger.error("%s cannot be started - %s", node, exc)
