"""A log of its own, without an event loop and without a broker, on a simulated disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flintmq.broker.storage.log import Log
from flintmq.broker.storage.store import Store
from flintmq.errors import DamageError
from flintmq.options import NsqdOptions
from support.fakes import FakeClock
from support.simdisk import SimDisk

__all__ = ["BASE", "ROOT", "Rig", "numbered"]

BASE = 1_000
ROOT = Path("/data")


class Rig:
    """A log of its own, and whom it tells what."""

    def __init__(
        self,
        disk: SimDisk | None = None,
        *,
        inline: bool = True,
        durability: str = "os",
        clock: FakeClock | None = None,
        durable: int = BASE,
        after: int | None = None,
        folder: bool = True,
        **options: Any,
    ) -> None:
        self.clock = clock or FakeClock()
        self.folder = ROOT / "t"
        fresh = disk is None
        self.disk = disk or SimDisk(ROOT, inline=inline)
        self.posted: deque[Callable[[], None]] = deque()
        self.disk.attach(self.posted.append)
        self.durability = durability
        self.options = options
        self.fatal: list[BaseException] = []
        self.failed: list[tuple[int, Exception]] = []
        self.delayed: list[Callable[[], None]] = []
        self.arrived = 0
        self.store = Store(
            self.disk,
            self.clock,
            NsqdOptions(**options),
            fatal=self.fatal.append,
            relieved=lambda: None,
            delay=lambda _, work: self.delayed.append(work),
            recovered=lambda: None,
        )
        self.log = Log(
            self.store,
            "t",
            self.folder if folder else None,
            BASE,
            durability,
            progressed=lambda: None,
            failed=lambda seq, exc: self.failed.append((seq, exc)),
            arrived=self._note_arrival,
        )
        if fresh:
            self.disk.make_folder(self.folder)
            self.disk.sync_folder(ROOT)
        else:
            self.log.recover(durable, after)

    def _note_arrival(self, cursors: object) -> None:
        self.arrived += 1

    def append(self, *bodies: bytes, delay: int = 0, more: bool = False) -> int:
        data = bytearray(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
        return self.log.append(data, 0, len(data), len(bodies), self.clock.wall(), delay=delay, more=more)

    def publish(self, *bodies: bytes, delay: int = 0, more: bool = False) -> int:
        """One record, or one group of records, of its own."""
        seq = self.append(*bodies, delay=delay, more=more)
        self.log.flush()
        self.run()
        return seq

    def run(self) -> None:
        while self.posted:
            self.posted.popleft()()

    def forget(self) -> None:
        """Let everything leave the memory that is in a file."""
        self.log.trim(0, 0, lambda first, stop: True, lambda first, stop: False)

    def body(self, seq: int) -> bytes:
        """The message, read back if need be; DamageError if it cannot be."""
        for _ in range(4):
            frame = self.log.frame(seq)
            if frame is not None:
                assert int(frame[18:34], 16) & ((1 << 54) - 1) == seq
                return bytes(frame[34:])
            self.run()
        raise AssertionError(f"seq {seq} never arrives")

    def seqs(self) -> list[int]:
        return [seq for first, stop in self.log.spans() for seq in range(first, stop)]

    def bodies(self) -> dict[int, bytes]:
        """All that can be read."""
        found = {}
        for seq in self.seqs():
            try:
                found[seq] = self.body(seq)
            except DamageError as exc:
                assert exc.first == seq < exc.stop
        return found

    def reopened(self, disk: SimDisk | None = None, **overrides: Any) -> Rig:
        """A log on what is left after kill -9, or on this disk."""
        settings = {"durability": self.durability, "clock": self.clock, **self.options, **overrides}
        return Rig(disk or self.disk.after_kill(), **settings)

    def stop(self) -> None:
        """What a broker does at a clean stop."""
        self.log.write_all()
        self.log.sync_now()
        self.log.close()
        self.run()

    @property
    def files(self) -> list[Path]:
        return self.disk.paths(self.folder, ".seg")


def numbered(count: int, size: int = 20, start: int = 0) -> list[bytes]:
    return [(b"%d " % number).ljust(size, b"x") for number in range(start, start + count)]
