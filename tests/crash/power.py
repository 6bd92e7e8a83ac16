"""Power loss of a real nsqd, with its fast path: ``python -m tests.crash.power --losses 200 --seed 7``.

The daemon runs unmodified with a layer (``shim/shim.c``, built here) between it and its disk, which writes down every
change and every sync. When it is killed, what a device may hold in its place is made from that: what was synced, and of
the rest whatever it may have got round to, page by page and entry by entry, torn and in any order (the model of
``support.simdisk``). The next life starts from there.

Nothing that was acknowledged may be lost with durability ``fsync``. With ``os`` a loss is forgiven if no completed sync
covered the message's bytes when the power went, and it was published since the loss before. Finished messages may come
back. The load and the ledger are those of ``flintmq torture``.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flintmq.tools.torture.ledger import SMALLEST_BODY
from flintmq.tools.torture.node import Node
from flintmq.tools.torture.run import Plan, Run
from support.command_line import conduct, seed_of, torture_parser
from support.simdisk import _Bytes, _File, _Folder

SOURCE = Path(__file__).parent / "shim" / "shim.c"

#: An entry of the trace: size of all | kind | handle | offset | length of the first text.
_head = struct.Struct("=IIQqI")
OPEN, CREATE, WRITE, TRUNCATE, SYNC_BEGIN, SYNC_END, RENAME, UNLINK, MKDIR, RMDIR = range(1, 11)

# A message frame in a segment: size | type 2 | timestamp | attempts | id | body.
_FRAME = re.compile(rb"\x00\x00\x00\x02.{8}.{2}[0-9a-f]{16}", re.DOTALL)


def why_not() -> str:
    """Why the layer cannot be used here; empty if it can."""
    if sys.platform != "linux":
        return "the layer is written for Linux"
    if shutil.which("cc") is None:
        return "there is no C compiler to build the layer with"
    return ""


def build(folder: Path) -> Path:
    """Compile the layer, once per folder."""
    library = folder / "shim.so"
    if not library.exists():
        command = ["cc", "-O2", "-fPIC", "-shared", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
        subprocess.run(command, check=True, capture_output=True)
    return library


class Control(ctypes.Structure):
    """What can be changed while the daemon runs: ``struct control`` of the layer."""

    _fields_ = (
        ("wall_ns", ctypes.c_int64),
        ("sync_error", ctypes.c_int32),
        ("write_error", ctypes.c_int32),
        ("open_error", ctypes.c_int32),
        ("sync_micros", ctypes.c_int32),
        ("failed", ctypes.c_int32),
    )


class Layer:
    """The layer under one data path: how to put it in place, and how to control it."""

    def __init__(self, folder: Path, data_path: Path, *, traced: bool = True) -> None:
        self.data_path = data_path
        self.trace = folder / "trace"
        self._control_file = folder / "control"
        self._control_file.write_bytes(bytes(ctypes.sizeof(Control)))
        with self._control_file.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(Control))
        self.control = Control.from_buffer(self._map)
        self.environment = {
            "LD_PRELOAD": str(build(folder)),
            "FLINTMQ_SHIM_ROOT": str(data_path),
            "FLINTMQ_SHIM_CONTROL": str(self._control_file),
            **({"FLINTMQ_SHIM_TRACE": str(self.trace)} if traced else {}),
        }


# --- The device -------------------------------------------------------------------------------------------------------


class _Marked:
    """A node of the disk of which a sync covers what was changed before it began."""

    node: _File | _Folder

    def __init__(self, node: _File | _Folder) -> None:
        self.node = node
        #: Changes that a sync has brought to the device, ever.
        self.done = 0

    @property
    def changes(self) -> int:
        return self.done + len(self.node.changes)

    def sync(self, upto: int) -> None:
        count = upto - self.done
        if count <= 0:
            return
        node = self.node
        if isinstance(node, _File):
            for change in node.changes[:count]:
                node.synced.change(*change)
        else:
            for step in node.changes[:count]:
                for name, entry in step.items():
                    if entry is None:
                        node.synced.pop(name, None)
                    else:
                        node.synced[name] = entry
        del node.changes[:count]
        self.done = upto


class Device:
    """A disk as a trace tells of it: what programs saw, what was synced, and the changes in between."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = _load(root)
        self._marked: dict[int, _Marked] = {}
        self._handles: dict[int, _Marked] = {}
        self._syncs: dict[int, tuple[_Marked, int]] = {}
        self.syncs = 0
        self.writes = 0

    def _at(self, path: str) -> tuple[_Folder, str]:
        """The folder that a path is in, and its name there; the root itself has no name."""
        parts = Path(path).relative_to(self.root).parts
        folder = self.tree
        for part in parts[:-1]:
            entry = folder.entries[part]
            assert isinstance(entry, _Folder)
            folder = entry
        return folder, parts[-1] if parts else ""

    def _mark(self, node: _File | _Folder) -> _Marked:
        return self._marked.setdefault(id(node), _Marked(node))

    def replay(self, trace: bytes) -> None:
        """Let happen what the trace tells; an entry that was cut off by the kill did not happen."""
        offset = 0
        while offset + _head.size <= len(trace):
            size, kind, handle, where, first = _head.unpack_from(trace, offset)
            if offset + size > len(trace):
                break
            data = trace[offset + _head.size : offset + size]
            self._apply(kind, handle, where, data, first)
            offset += size

    def _apply(self, kind: int, handle: int, where: int, data: bytes, first: int) -> None:
        if kind in (OPEN, CREATE):
            folder, name = self._at(data.decode())
            if kind == CREATE:
                folder.change({name: _File()})
            node = folder.entries[name] if name else folder
            if where == 0 and isinstance(node, _File) and node.content.size:
                node.change(0, None)
            self._handles[handle] = self._mark(node)
        elif kind in (WRITE, TRUNCATE):
            node = self._handles[handle].node
            assert isinstance(node, _File)
            node.change(where, data if kind == WRITE else None)
            self.writes += 1
        elif kind == SYNC_BEGIN:
            marked = self._handles[where]
            self._syncs[handle] = (marked, marked.changes)
        elif kind == SYNC_END:
            marked, upto = self._syncs.pop(handle)
            marked.sync(upto)
            self.syncs += 1
        elif kind == RENAME:
            old, old_name = self._at(data[:first].decode())
            new, new_name = self._at(data[first:].decode())
            entry = old.entries[old_name]
            if old is new:
                old.change({old_name: None, new_name: entry})
            else:
                new.change({new_name: entry})
                old.change({old_name: None})
        elif kind in (UNLINK, RMDIR):
            folder, name = self._at(data.decode())
            folder.change({name: None})
        elif kind == MKDIR:
            folder, name = self._at(data.decode())
            folder.change({name: _Folder()})

    def lose_power(self, rng: random.Random) -> None:
        """Write to the root what the device holds, by chance, when the power is back."""
        # Now and then everything, or nothing, of what was not synced.
        kind = rng.random()
        after = self.tree.survivor(rng if kind < 0.8 else None, kind > 0.9)
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        _store(after, self.root)

    def synced_messages(self) -> set[int]:
        """The numbers of the ledger's messages that are on the device, whole and under a name, whatever it may hold."""
        return set(_messages(self.tree, lambda folder: folder.synced, lambda file: file.synced))

    def written_messages(self) -> set[int]:
        """The numbers of those that programs saw when the power went."""
        return set(_messages(self.tree, lambda folder: folder.entries, lambda file: file.content))


def _load(path: Path) -> _Folder:
    """A folder of the real disk, as one that is synced."""
    folder = _Folder()
    for entry in path.iterdir():
        folder.entries[entry.name] = _load(entry) if entry.is_dir() else _File(_Bytes(entry.read_bytes()))
    folder.synced = dict(folder.entries)
    return folder


def _store(folder: _Folder, path: Path) -> None:
    for name, node in folder.entries.items():
        if isinstance(node, _Folder):
            (path / name).mkdir(mode=0o700)
            _store(node, path / name)
        else:
            with (path / name).open("wb") as file:
                file.write(node.content.data)
                file.truncate(node.content.size)


def _messages(
    folder: _Folder, entries: Callable[[_Folder], dict[str, _File | _Folder]], bytes_of: Callable[[_File], _Bytes]
) -> Iterator[int]:
    for node in entries(folder).values():
        if isinstance(node, _Folder):
            yield from _messages(node, entries, bytes_of)
            continue
        content = bytes(bytes_of(node).data)
        for found in _FRAME.finditer(content):
            (size,) = struct.unpack_from(">I", content, found.start() - 4) if found.start() >= 4 else (0,)
            body = content[found.end() : found.start() + size]
            if len(body) >= SMALLEST_BODY and zlib.crc32(body[:-4]) == int.from_bytes(body[-4:], "big"):
                yield int.from_bytes(body[:8], "big")


# --- The torture ------------------------------------------------------------------------------------------------------


class PoweredNode(Node):
    """An nsqd of which a kill is a power loss."""

    keeps_finished = False

    def __init__(self, program: str, *flags: str, environment: Any = None) -> None:
        super().__init__(program, *flags, environment=environment)
        self.layer: Layer | None = None
        self.rng = random.Random()
        self.losses = 0
        self.last_device: Device | None = None

    def under(self, layer: Layer, rng: random.Random) -> None:
        self.layer = layer
        self.rng = rng
        self._environment = {**os.environ, **layer.environment}

    async def spawn(self) -> None:
        assert self.layer is not None
        # What the last life left is on the device: this one begins there.
        self.layer.trace.write_bytes(b"")
        self._before = Device(self.layer.data_path)
        await super().spawn()
        # It may well report what it finds: files that were never synced can be anything.
        self.rough = True

    async def kill(self) -> None:
        was_running = self.running
        await super().kill()
        if was_running and self.layer is not None:
            self._before.replay(self.layer.trace.read_bytes())
            self._before.lose_power(self.rng)
            self.last_device = self._before
            self.losses += 1

    async def close(self) -> None:
        self.layer = None
        await super().close()


@dataclass
class Report:
    seed: int
    durability: str
    losses: int = 0
    acknowledged: int = 0
    deliveries: int = 0
    #: Acknowledged, and not covered by a sync when the power went; none is counted with ``fsync``.
    unsynced: int = 0
    lost: int = 0
    writes: int = 0
    syncs: int = 0
    violations: dict[str, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations


class PowerRun(Run):
    """A torture whose kills are power losses."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, broker=PoweredNode)
        self.counts = Report(plan.seed, plan.durabilities[0])
        self._since = 0

    def prepare(self, node: Node, data_path: Path) -> None:
        assert isinstance(node, PoweredNode)
        layer = Layer(self.plan.folder, data_path)
        # Long enough for writes to come between a sync's beginning and its end.
        layer.control.sync_micros = 20_000
        node.under(layer, self._fork())

    def buried(self, node: Node) -> None:
        assert isinstance(node, PoweredNode)
        device = node.last_device
        assert device is not None
        (front,) = self.fronts
        self.counts.writes += device.writes
        self.counts.syncs += device.syncs
        synced = device.synced_messages()
        if front.durability == "os":
            self.counts.unsynced += front.ledger.forgive(self._since, synced)
        else:
            # Whether it was delivered before, or survived by chance, is no matter.
            for number in sorted(device.written_messages() - synced):
                if front.ledger.is_acknowledged(number):
                    front.ledger.violations.add("not synced", f"message {number} was acknowledged too soon")
        self._since = front.ledger.published

    def figures(self) -> Report:
        report, counts = self.report(), self.counts
        costs = report.costs[counts.durability]
        counts.losses = costs.kills
        counts.acknowledged, counts.deliveries, counts.lost = costs.acknowledged, costs.deliveries, costs.lost
        counts.violations, counts.samples = report.violations, report.samples
        return counts


async def power(
    losses: int,
    durability: str,
    seed: int,
    folder: Path,
    progressed: Callable[[Report], None] = lambda report: None,
    seconds_between: float = 0.5,
) -> Report:
    """Run it; ``folder`` must exist and be empty."""
    plan = Plan(
        seed, folder, kills=losses, durabilities=(durability,), lookupds=0, seconds_between=seconds_between, faults=()
    )
    run = PowerRun(plan)

    async def show() -> None:
        while True:
            await asyncio.sleep(0.5)
            if run.fronts:
                progressed(run.figures())

    showing = asyncio.create_task(show())
    try:
        await run.run()
    finally:
        showing.cancel()
    return run.figures()


# --- The command line -------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = torture_parser("tests.crash.power", "Let a busy broker lose its power again and again.")
    parser.add_argument("--losses", type=int, default=200, metavar="N", help="how often (default %(default)s)")
    parser.add_argument("--durability", choices=("os", "fsync"), default="fsync", help="(default %(default)s)")
    arguments = parser.parse_args(argv)
    if reason := why_not():
        parser.error(reason)
    seed = seed_of(arguments)
    return conduct(
        arguments,
        "power",
        lambda folder, progressed: power(arguments.losses, arguments.durability, seed, folder, progressed),
        title=f"seed {seed}, durability {arguments.durability}",
        total=arguments.losses,
        described=lambda report: (report.losses, f"losses · {report.acknowledged:,} acknowledged"),
    )


if __name__ == "__main__":
    sys.exit(main())
