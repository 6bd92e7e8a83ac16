"""The machine that a simulated broker runs on: its files, sockets, clock, threads and chance, and how it dies.

A Machine stands under one process as its table of system calls, and under the kernel's own calls. Descriptors of files
and sockets come from one row of numbers, the lowest free one first, as in Linux. Every call takes a little time, in
which packets arrive and threads work; every call may be the last one: it and all later ones have no effect then. What
is left is a tree of files, for the next process.

A Workers is a Disk whose threads are events of the World: work is done at a moment of the World's choice, and its
answer arrives at a later one. Syncs take their time, and what is written meanwhile is not covered by them.
"""

from __future__ import annotations

import errno
import os
import random
import re
import select
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flintmq import addresses
from flintmq.broker.storage.disk import BACKGROUND, SPARE, Disk
from flintmq.system import Buffer
from support.simdisk import PowerLoss, SimSystem

from .network import READ, Listener, Network, Socket
from .world import NotYet, World

__all__ = ["Machine", "Workers"]

#: Nanoseconds that a call takes.
_CALL = 2_000
#: Calls of a dead process, after which it is stuck in a loop that ignores every error.
_MOST_AFTER_DEATH = 5_000
_SOCKET = Path("socket")
#: Calls that tell what the broker is doing.
_STATES = {
    ("remove", ".seg"): "segment removed",
    ("read", ".seg"): "read back from the disk",
    ("rename", "snapshot"): "snapshot of the journal",
    ("create", ".keys"): "keys of a removed segment",
    ("make_folder", "side"): "side log",
}
_DATE = re.compile(rb"\r\nDate: [^\r]*")
#: What epoll calls READ and WRITE together.
_MASKS = (0, select.EPOLLIN, select.EPOLLOUT, select.EPOLLIN | select.EPOLLOUT)
#: Bytes of the trace that one packet or write may add.
_MOST_TRACED = 1 << 20


class _Clock:
    """``step`` is what somebody added to the date; ``booted`` is when the machine was switched on."""

    def __init__(self, world: World, booted: int, step: int) -> None:
        self.world = world
        self.booted = booted
        self.step = step

    def now(self) -> int:
        return self.world.now - self.booted + 10_000_000_000

    def wall(self) -> int:
        return 1_700_000_000_000_000_000 + self.world.now + self.step

    def boot_id(self) -> bytes:
        return self.booted.to_bytes(16, "big")


class Machine(SimSystem):
    def __init__(
        self, world: World, network: Network, host: str, root: Path, number: int, *, booted: int = 0, step: int = 0
    ) -> None:
        super().__init__(root, number)
        self.world = world
        self.network = network
        self.host = host
        self.name = host
        self.clock = _Clock(world, booted, step)
        self._rng = random.Random(f"machine {host} {world.rng.random()}")
        #: How it died.
        self.death = ""
        #: Called once when it dies.
        self.died: Callable[[], object] = lambda: None
        #: Seconds that a sync may take.
        self.sync_seconds = 0.002
        #: (kind, calls): the power goes so many calls after the next one of this kind.
        self.calls_after: tuple[str, int] | None = None
        #: The method of a connection or lane whose next call raises an error that nobody foresees.
        self.unforeseen = ""
        #: Every other try to open a file finds no descriptor.
        self.flaky = False
        #: Seconds that work may wait for a thread.
        self.work_seconds = 0.001
        self.reached: Counter[str] = Counter()
        #: Writes to files since somebody looked.
        self.writes = 0
        #: Seconds: when a call failed for the last time.
        self.failed_at = 0.0
        #: Files that could not be made: how often, in which second; and the highest of these numbers.
        self._tries: Counter[tuple[str, int]] = Counter()
        self.most_tries = 0
        self.stirred = True
        self.aside = 0
        self._epolls: list[_Epoll] = []
        self._after_death = 0

    # --- Calls -----------------------------------------------------------------------------------------------------

    def _call(self, kind: str, path: Path) -> bool:
        if self.dead:
            self._refuse()
        self.calls += 1
        self.stirred = True
        if (state := _STATES.get((kind, path.suffix or path.name[:8]))) is not None:
            self.reached[state] += 1
        self.world.note(self.name, kind, path.name)
        self.world.pass_time(_CALL)
        if self.dead:
            raise PowerLoss
        if self.calls == self.power_off_at:
            self.die()
            return True
        if kind not in ("write", "send"):
            fault = self._fault(kind, path)
            if fault is not None:
                self.reached[f"{errno.errorcode[fault.error]} at {kind}"] += 1
                self.failed_at = self.world.seconds
                self._tried(path)
                raise OSError(fault.error, os.strerror(fault.error), str(path))
        if kind != "sync":
            self._die_after(kind)
        return False

    def _fault(self, kind: str, path: Path) -> Any:
        if self.flaky and kind in ("open", "open_folder") and self._rng.random() < 0.5:
            return SimpleNamespace(error=errno.EMFILE, short=0)
        return super()._fault(kind, path)

    def _die_after(self, kind: str) -> None:
        if self.calls_after is not None and self.calls_after[0] == kind:
            self.power_off_at = self.calls + self.calls_after[1]
            self.calls_after = None

    def _refuse(self) -> None:
        self._after_death += 1
        if self._after_death == _MOST_AFTER_DEATH:
            self.world.violated(f"{self.name} goes on for {_MOST_AFTER_DEATH} calls after its death")
        raise PowerLoss

    def die(self) -> None:
        """No call has an effect from here on."""
        if not self.dead:
            self.dead = True
            self.world.note(self.name, "dies")
            self.world.after(0, self.died)

    def close_sockets(self, *, silently: bool) -> None:
        """What the system does when a process ends; ``silently`` if the machine is gone, too."""
        for slot, (what, _) in list(self._open.items()):
            if isinstance(what, (Socket, Listener)) and not what.closed:
                if silently and isinstance(what, Socket):
                    # What is on its way to others still arrives.
                    what.closed = what.silent = True
                else:
                    what._close()
            self._forget(self._base + slot)
        self._open.clear()

    # --- Files -----------------------------------------------------------------------------------------------------

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.world.note("bytes", fd - self._base, offset, b"".join(buffers)[:_MOST_TRACED])
        self.writes += 1
        try:
            return super().pwritev(fd, buffers, offset)
        except OSError as exc:
            self.reached[f"{errno.errorcode[exc.errno or 0]} at write"] += 1
            self.failed_at = self.world.seconds
            raise

    def fallocate(self, fd: int, size: int) -> None:
        try:
            super().fallocate(fd, size)
        except OSError:
            self.reached["ENOSPC at allocate"] += 1
            self._tried(self._opened(fd)[1])
            raise

    def _tried(self, path: Path) -> None:
        # Those of messages are tried once for every publish.
        if path.name.startswith(("journal", "snapshot-")):
            place = path.name, self.world.now // 1_000_000_000
            self._tries[place] += 1
            self.most_tries = max(self.most_tries, self._tries[place])

    def fdatasync(self, fd: int) -> None:
        node, path = self._opened(fd)
        covered = node.made
        try:
            last = self._call("sync" if hasattr(node, "content") else "sync_folder", path)
        except OSError:
            # As Linux does it: the pages count as clean from here on, and no later sync writes them.
            node.lose(covered)
            raise
        if last:
            raise PowerLoss
        covered = node.made
        self.world.sleep(self._rng.uniform(0, self.sync_seconds))
        if self.dead:
            raise PowerLoss
        if node.made > covered:
            self.reached["write during a sync"] += 1
        node.sync(covered)
        self._die_after("sync")

    fsync = fdatasync

    def _check_room(self, path: Path) -> None:
        try:
            super()._check_room(path)
        except OSError:
            self.reached["EMFILE"] += 1
            self.failed_at = self.world.seconds
            self._tried(path)
            raise

    def close(self, fd: int) -> None:
        if self.dead:
            return
        super().close(fd)
        self._forget(fd)

    # --- Sockets ---------------------------------------------------------------------------------------------------

    def take_descriptor(self, owner: Any) -> int:
        self._check_room(_SOCKET)
        number = self._enter(owner, _SOCKET)
        self.world.place_descriptor(number, owner)
        return number

    def give_descriptor(self, number: int) -> None:
        del self._open[number - self._base]
        self._forget(number)

    def _forget(self, number: int) -> None:
        if self.world.descriptor(number) is not None:
            self.world.close_descriptor(number)
        for epoll in self._epolls:
            epoll.members.pop(number, None)

    def socket_call(self, kind: str) -> None:
        if self._call(kind, _SOCKET):
            raise PowerLoss

    def moved(self, kind: str, data: bytes) -> None:
        self.world.note("bytes", kind, _DATE.sub(b"", data[:_MOST_TRACED]))

    def listen(self, address: str, *, unix: bool = True, mode: int | None = None) -> Any:
        host, port, _ = addresses.split(address, listening=True)
        if self._call("listen", _SOCKET):
            raise PowerLoss
        listener = self.network.listen((host, port))
        listener.adopt(self)
        return listener

    def accept(self, listener: Any) -> Any:
        return listener.accept()[0]

    def epoll(self) -> Any:
        if self._call("epoll", _SOCKET):
            raise PowerLoss
        made = _Epoll(self)
        self._epolls.append(made)
        return made

    def cpus(self) -> int:
        return 2

    def recv(self, fd: int, view: memoryview) -> int:
        sock, _ = self._opened(fd)
        self.reached["kernel recv"] += 1
        return int(sock.recv_into(view))

    def send(self, fd: int, view: bytes | memoryview) -> int:
        sock, _ = self._opened(fd)
        self.reached["kernel send"] += 1
        return int(sock.send(view))

    # --- Chance and names ------------------------------------------------------------------------------------------

    def randbytes(self, size: int) -> bytes:
        return self._rng.randbytes(size)

    def hostname(self) -> str:
        return self.name


class _Epoll:
    """As ``select.epoll``, level-triggered. A descriptor that is closed leaves it, as in Linux."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.members: dict[int, int] = {}
        self._fd = machine.take_descriptor(self)

    def fileno(self) -> int:
        return self._fd

    def register(self, fd: int, mask: int) -> None:
        self._check(fd)
        if fd in self.members:
            raise FileExistsError(errno.EEXIST, "registered already")
        self.members[fd] = mask

    def modify(self, fd: int, mask: int) -> None:
        self._check(fd)
        if fd not in self.members:
            raise FileNotFoundError(errno.ENOENT, "not registered")
        self.members[fd] = mask

    def unregister(self, fd: int) -> None:
        self._check(fd)
        if fd not in self.members:
            raise FileNotFoundError(errno.ENOENT, "not registered")
        del self.members[fd]

    def _check(self, fd: int) -> None:
        self._machine.stirred = True
        if self._machine.dead:
            raise PowerLoss
        if self._machine.world.descriptor(fd) is None:
            raise OSError(errno.EBADF, "bad descriptor")

    def _found(self) -> Iterator[tuple[int, int]]:
        """Yield the descriptors about which there is something to say, with what there is."""
        descriptor = self._machine.world.descriptor
        for fd, wanted in self.members.items():
            end = descriptor(fd)
            if end is None:
                continue
            mask = _MASKS[end.ready()] & wanted
            if isinstance(end, Socket):
                if end.error:
                    mask |= select.EPOLLERR | select.EPOLLHUP
                elif end.eof and end._shut:
                    mask |= select.EPOLLHUP
            if mask:
                yield fd, mask

    def poll(self, timeout: float = 0, most: int = 256) -> list[tuple[int, int]]:
        self._machine.socket_call("poll")
        found = list(self._found())
        if len(found) > 1:
            self._machine.world.rng.shuffle(found)
        return found[:most]

    def ready(self) -> int:
        return READ if any(self._found()) else 0

    def close(self) -> None:
        if not self._machine.dead:
            self._machine.give_descriptor(self._fd)


class Workers(Disk):
    """A Disk on a Machine, whose threads are events of the World."""

    system: Machine

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._queue: list[tuple[int, int, Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []
        #: Of work that is done, and not yet on the loop.
        self._answers: list[Callable[[], None]] = []
        #: Work that a thread has begun.
        self.running = 0
        #: Submitted, and its ``done`` not yet called.
        self.under_way = 0

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], urgency: int = BACKGROUND
    ) -> None:
        if self._stopping:
            raise RuntimeError("the disk was closed")
        machine = self.system
        machine.reached["written in a thread"] += "_write_in_thread" in getattr(work, "__qualname__", "")
        self._order += 1
        self.under_way += 1
        self._queue.append((urgency, self._order, work, done))
        slow = 10 if urgency == SPARE else 1
        machine.world.after(machine._rng.uniform(0, slow * machine.work_seconds), self._serve)

    @property
    def closes(self) -> int:
        """Files that were deleted, and wait for a thread that closes them."""
        return sum(getattr(work, "func", None) == self.close_file for _, _, work, _ in self._queue)

    def _serve(self) -> None:
        if self.system.dead or not self._queue:
            return
        # The most urgent ones first; of those any: several threads take from the queue.
        first = min(item[0] for item in self._queue)
        number = self.system._rng.choice([n for n, item in enumerate(self._queue) if item[0] == first])
        _, _, work, done = self._queue.pop(number)
        self._finish(work, done)

    def _finish(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        machine, post = self.system, self._post
        result: Any = None
        error: BaseException | None = None
        self.running += 1
        try:
            result = work()
        except BaseException as exc:
            error = exc
        self.running -= 1

        def answer() -> None:
            self.under_way -= 1
            done(result, error)

        if not machine.dead and post is not None:
            if self._stopping:
                post(answer)
            else:
                self._answers.append(answer)
                machine.world.after(machine._rng.uniform(0, machine.work_seconds), lambda: self._deliver(answer))

    def _deliver(self, answer: Callable[[], None]) -> None:
        if answer in self._answers and not self.system.dead and self._post is not None:
            self._answers.remove(answer)
            self._post(answer)

    def close(self) -> None:
        self.refuse_work()
        for answer in list(self._answers):
            self._deliver(answer)
        while self._queue and not self.system.dead:
            _, _, work, done = self._queue.pop(0)
            self._finish(work, done)
        if self.running and self.system.aside:
            raise NotYet
