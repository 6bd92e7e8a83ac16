"""A machine in memory that can lose power, be full, and fail: it stands under the broker's table of system calls.

A SimSystem keeps two versions of every file: what programs see, and what is on the device. Only a sync brings a file's
bytes, or a folder's entries, from the one to the other. ``after_power_loss`` gives the disk that the next start finds:
what was synced, and of the rest whatever a device may have got round to, page by page and entry by entry, in any
order. ``after_kill`` gives the one after kill -9: everything that was written is there, and still not on the device.

Every call is counted and may be the last one, the kernel's own included: its table is replaced by one that finds a
simulated file by its descriptor. Sockets are real; those that a broker accepted through a SimSystem belong to it, so
that recv and send count, can fail, and have no effect once the power is gone.

A SimDisk is a Disk on a SimSystem whose threads are simulated, too: submitted work runs on the event loop some turns
later, in an order that a seed decides, so that a run with the same seed makes the same calls.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flintmq import kernel
from flintmq.broker.daemon import Broker
from flintmq.broker.storage.disk import BACKGROUND, Disk
from flintmq.system import Buffer, System

__all__ = ["PowerLoss", "SimDisk", "SimSystem", "settled"]

PAGE = 4096
SECTOR = 512
#: A simulated descriptor is the system's number times this, plus the lowest free slot.
SLOTS = 1 << 20


class PowerLoss(BaseException):
    """The power is gone: no file call works any more. Not an error that a program could handle."""


class _Bytes:
    """A file's bytes. Zeros at the end, as ``fallocate`` makes them, are only counted."""

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self.data = bytearray(data)
        self.size = len(data)

    def change(self, offset: int, data: bytes | None) -> None:
        """Write ``data`` at ``offset``; None: ``offset`` is the new size."""
        if data is None:
            del self.data[offset:]
            self.size = offset
            return
        if len(self.data) < offset:
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data
        self.size = max(self.size, offset + len(data))

    def part(self, start: int, stop: int) -> bytes:
        """The bytes ``start`` … ``stop - 1``, as far as there are so many."""
        part = bytes(self.data[start:stop])
        return part + bytes(max(0, min(stop, self.size) - start - len(part)))

    def copy(self) -> _Bytes:
        copy = _Bytes(self.data)
        copy.size = self.size
        return copy


class _File:
    """Bytes as programs see them, as they were at the last sync, and the changes in between."""

    def __init__(self, content: _Bytes | None = None) -> None:
        self.content = content or _Bytes()
        self.synced = self.content.copy()
        # (offset, bytes) of a write; (size, None) of a change of the size.
        self.changes: list[tuple[int, bytes | None]] = []
        #: How many changes were synced before these.
        self.before = 0

    def change(self, offset: int, data: bytes | None) -> None:
        self.content.change(offset, data)
        self.changes.append((offset, data))

    @property
    def made(self) -> int:
        """How many changes there were so far."""
        return self.before + len(self.changes)

    def sync(self, up_to: int | None = None) -> None:
        """Bring the changes to the device; with ``up_to`` only the first so many of all that there ever were."""
        count = len(self.changes) if up_to is None else max(0, up_to - self.before)
        for change in self.changes[:count]:
            self.synced.change(*change)
        del self.changes[:count]
        self.before += count

    def lose(self, up_to: int) -> None:
        """A sync of the first so many changes has failed: programs still see them, no later sync writes them."""
        count = max(0, up_to - self.before)
        del self.changes[:count]
        self.before += count

    def copy(self) -> _File:
        copy = _File()
        copy.content, copy.synced, copy.changes = self.content.copy(), self.synced.copy(), list(self.changes)
        return copy

    def survivor(self, choice: random.Random | None, everything: bool) -> _File:
        """The file as a device may hold it when the power goes."""
        if everything:
            return _File(self.content.copy())
        if choice is None or not self.changes:
            return _File(self.synced.copy())
        versions = self._versions()
        result = _Bytes()
        result.size = versions[choice.randrange(len(versions))].size
        for start in range(0, min(result.size, max(len(version.data) for version in versions)), PAGE):
            stop = min(start + PAGE, result.size)
            page = _padded(versions[choice.randrange(len(versions))], start, stop)
            if choice.random() < 0.2:
                # A torn page: its first sectors are of one version, the others of another.
                cut = choice.randrange(0, PAGE, SECTOR)
                page = page[:cut] + _padded(versions[choice.randrange(len(versions))], start, stop)[cut:]
            result.data[start:stop] = page
        return _File(result)

    def _versions(self) -> list[_Bytes]:
        # Of many versions a few tell the story: the oldest, the newest, and some between.
        step = max(1, len(self.changes) // 6)
        versions = [self.synced.copy()]
        current = self.synced.copy()
        for number, change in enumerate(self.changes, 1):
            current.change(*change)
            if number % step == 0 or number == len(self.changes):
                versions.append(current.copy())
        return versions


def _padded(content: _Bytes, start: int, stop: int) -> bytes:
    part = content.part(start, stop)
    return part + bytes(stop - start - len(part))


class _Folder:
    """Entries as programs see them, as they were at the last sync, and the changes in between."""

    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}
        # Each change is one step: what becomes of which names (None: gone). A rename is two names in one step.
        self.changes: list[dict[str, _File | _Folder | None]] = []
        self.before = 0

    @property
    def made(self) -> int:
        return self.before + len(self.changes)

    def change(self, step: dict[str, _File | _Folder | None]) -> None:
        _step(self.entries, step)
        self.changes.append(step)

    def sync(self, up_to: int | None = None) -> None:
        count = len(self.changes) if up_to is None else max(0, up_to - self.before)
        for step in self.changes[:count]:
            _step(self.synced, step)
        del self.changes[:count]
        self.before += count

    def lose(self, up_to: int) -> None:
        """A sync has failed. Names are kept in a journal by file systems: a later sync writes them after all."""

    def copy(self, copies: dict[_File | _Folder, _File | _Folder]) -> _Folder:
        """The same folder, with copies of everything in it; a file that stands in several places is one copy."""

        def twin(node: _File | _Folder) -> _File | _Folder:
            if node not in copies:
                copies[node] = node.copy(copies) if isinstance(node, _Folder) else node.copy()
            return copies[node]

        copy = _Folder()
        copy.entries = {name: twin(node) for name, node in self.entries.items()}
        copy.synced = {name: twin(node) for name, node in self.synced.items()}
        copy.changes = [
            {name: None if node is None else twin(node) for name, node in step.items()} for step in self.changes
        ]
        return copy

    def write_to(self, path: Path) -> None:
        """Make a real folder of it, with the bytes that programs see."""
        path.mkdir()
        for name, node in self.entries.items():
            if isinstance(node, _Folder):
                node.write_to(path / name)
            else:
                with (path / name).open("wb") as file:
                    file.write(node.content.data)
                    file.truncate(node.content.size)

    @classmethod
    def read_from(cls, path: Path) -> _Folder:
        """The same as a real folder; everything in it is on the device."""
        folder = cls()
        for child in sorted(path.iterdir()):
            made = cls.read_from(child) if child.is_dir() else _File(_Bytes(child.read_bytes()))
            folder.entries[child.name] = folder.synced[child.name] = made
        return folder

    def survivor(self, choice: random.Random | None, everything: bool) -> _Folder:
        entries = dict(self.entries if everything else self.synced)
        if not everything and choice is not None:
            for step in self.changes:
                if choice.random() < 0.5:
                    _step(entries, step)
        result = _Folder()
        for name, node in sorted(entries.items()):
            result.entries[name] = node.survivor(choice, everything)
        result.synced = dict(result.entries)
        return result


def _step(entries: dict[str, _File | _Folder], step: dict[str, _File | _Folder | None]) -> None:
    for name, node in step.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class _Fault:
    def __init__(self, kind: str, error: int, times: int, path: str, short: int, skip: int) -> None:
        self.kind = kind
        self.error = error
        self.times = times
        self.path = path
        self.short = short
        self.skip = skip


class SimSystem(System):
    """The system calls of a simulated machine. Only paths below ``root`` exist; ``root`` itself always does."""

    def __init__(self, root: Path, number: int = 0) -> None:
        """``number`` decides what its descriptors are; 0: the lowest that is free."""
        super().__init__()
        self.root = root
        self.tree = _Folder()
        #: By slot: what is open there.
        self._open: dict[int, tuple[Any, Path]] = {}
        self._locked: set[Path] = set()
        # Faults.
        self.calls = 0
        self.power_off_at: int | None = None
        self.dead = False
        self.history: list[tuple[str, str]] = []
        self._faults: list[_Fault] = []
        #: (call, error by the kind of call, times, bytes of a write that are written): what fails from that call on.
        self.fault_at: tuple[int, Callable[[str], int], int, int] | None = None
        #: The calls that failed because of a fault that was asked for.
        self.met: list[tuple[str, str]] = []
        #: A write that stopped half-way: its file, where it would go on, and the error that it meets there.
        self._broken: tuple[_File, int, int] | None = None
        self.capacity: int | None = None
        #: At most so many files and folders may be open at once.
        self.most_files: int | None = None
        #: Writes that the kernel made by itself.
        self.kernel_writes = 0
        self._base = _TABLE.enter(self, number) * SLOTS

    # --- Faults ----------------------------------------------------------------------------------------------------

    def fail(self, kind: str, error: int, *, times: int = 1, path: str = "", short: int = 0, skip: int = 0) -> _Fault:
        """The next ``times`` calls of this kind on paths with ``path`` in them fail, after ``skip`` that do not.

        A write fails after ``short`` bytes; a send takes that many, and fails only if it is none.
        """
        fault = _Fault(kind, error, times, path, short, skip)
        self._faults.append(fault)
        return fault

    def heal(self) -> None:
        self._faults.clear()
        self.capacity = None

    @property
    def used(self) -> int:
        return sum(file.content.size for file in self._files(self.tree))

    def _files(self, folder: _Folder) -> list[_File]:
        found: list[_File] = []
        for node in folder.entries.values():
            found.extend(self._files(node) if isinstance(node, _Folder) else [node])
        return found

    def _call(self, kind: str, path: Path) -> bool:
        """Count a call; True if it is the one during which the power goes. A fault that was asked for is raised."""
        if self.dead:
            raise PowerLoss
        self.calls += 1
        self.history.append((kind, path.name))
        if self.calls == self.power_off_at:
            self.dead = True
            return True
        if self.fault_at is not None and self.calls == self.fault_at[0]:
            _, error, times, short = self.fault_at
            self.fail(kind, error(kind), times=times, short=short)
        if kind not in ("write", "send"):
            fault = self._fault(kind, path)
            if fault is not None:
                raise OSError(fault.error, os.strerror(fault.error), str(path))
        return False

    def _fault(self, kind: str, path: Path) -> _Fault | None:
        for fault in self._faults:
            if fault.kind == kind and fault.times and fault.path in str(path):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                self.met.append((kind, path.name))
                return fault
        return None

    # --- Files -----------------------------------------------------------------------------------------------------

    def _folder(self, path: Path) -> _Folder:
        node: _File | _Folder = self.tree
        try:
            parts = path.relative_to(self.root).parts
        except ValueError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        for part in parts:
            if not isinstance(node, _Folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            if part not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = node.entries[part]
        if not isinstance(node, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return node

    def _node(self, path: Path) -> _File | _Folder:
        if path == self.root:
            return self.tree
        folder = self._folder(path.parent)
        if path.name not in folder.entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return folder.entries[path.name]

    def _change(self, path: Path, step: dict[str, _File | _Folder | None], last: bool) -> None:
        self._folder(path.parent).change(step)
        if last:
            raise PowerLoss

    def _opened(self, fd: int) -> tuple[Any, Path]:
        try:
            return self._open[fd - self._base]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def _file(self, fd: int) -> tuple[_File, Path]:
        node, path = self._opened(fd)
        if not isinstance(node, _File):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return node, path

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        create, folder = bool(flags & os.O_CREAT), bool(flags & os.O_DIRECTORY)
        last = self._call("create" if create else "open_folder" if folder else "open", path)
        self._check_room(path)
        node: _File | _Folder
        if create:
            if path.name in self._folder(path.parent).entries:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            node = _File()
            self._change(path, {path.name: node}, last)
        else:
            if last:
                raise PowerLoss
            node = self._folder(path) if folder else self._node(path)
            if isinstance(node, _Folder) and not folder:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return self._enter(node, path)

    def _check_room(self, path: Path) -> None:
        if self.most_files is not None and len(self._open) >= self.most_files:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    def _enter(self, what: Any, path: Path) -> int:
        """Return a descriptor for it."""
        # The lowest free number, at once, as on Linux: one that was closed too early is another file's soon.
        slot = next(number for number in range(len(self._open) + 1) if number not in self._open)
        self._open[slot] = (what, path)
        return self._base + slot

    def close(self, fd: int) -> None:
        if not self.dead:
            _, path = self._opened(fd)
            del self._open[fd - self._base]
            self._locked.discard(path)

    @property
    def open_files(self) -> list[str]:
        """The names of the files that are open: none, once a broker has stopped."""
        return sorted(path.name for _, path in self._open.values())

    def path_of(self, fd: int) -> Path:
        return self._opened(fd)[1]

    def lock(self, fd: int) -> None:
        path = self.path_of(fd)
        if self._call("lock", path):
            raise PowerLoss
        if path in self._locked:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
        self._locked.add(path)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        file, path = self._file(fd)
        last = self._call("write", path)
        broken, self._broken = self._broken, None
        if not last and broken is not None and broken[:2] == (file, offset):
            raise OSError(broken[2], os.strerror(broken[2]), str(path))
        data = b"".join(buffers)
        fault = None if last else self._fault("write", path)
        room = len(data)
        if self.capacity is not None:
            growth = max(0, offset + len(data) - file.content.size)
            room = max(0, room - max(0, self.used + growth - self.capacity))
        if fault is not None:
            room = min(room, fault.short)
        if room:
            file.change(offset, data[:room])
        if last:
            raise PowerLoss
        if room == len(data):
            return room
        error = fault.error if fault is not None else errno.ENOSPC
        if not room:
            raise OSError(error, os.strerror(error), str(path))
        self._broken = (file, offset + room, error)
        return room

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        file, path = self._file(fd)
        if self._call("read", path):
            raise PowerLoss
        return file.content.part(offset, offset + size)

    def ftruncate(self, fd: int, size: int) -> None:
        file, path = self._file(fd)
        last = self._call("truncate", path)
        file.change(size, None)
        if last:
            raise PowerLoss

    def truncate(self, path: Path, size: int) -> None:
        last = self._call("truncate", path)
        file = self._node(path)
        if isinstance(file, _Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        file.change(size, None)
        if last:
            raise PowerLoss

    def fallocate(self, fd: int, size: int) -> None:
        file, path = self._file(fd)
        last = self._call("allocate", path)
        growth = size - file.content.size
        if self.capacity is not None and self.used + growth > self.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if growth > 0:
            file.change(size, None)
        if last:
            raise PowerLoss

    def fdatasync(self, fd: int) -> None:
        node, path = self._opened(fd)
        if self._call("sync_folder" if isinstance(node, _Folder) else "sync", path):
            raise PowerLoss
        node.sync()

    fsync = fdatasync

    def size(self, fd: int) -> int:
        file, path = self._file(fd)
        if self._call("size", path):
            raise PowerLoss
        return file.content.size

    # --- Names -----------------------------------------------------------------------------------------------------

    def mkdir(self, path: Path) -> None:
        last = self._call("make_folder", path)
        if path.name in self._folder(path.parent).entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._change(path, {path.name: _Folder()}, last)

    def exists(self, path: Path) -> bool:
        if self._call("exists", path):
            raise PowerLoss
        try:
            self._node(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def listdir(self, path: Path) -> list[str]:
        if self._call("names", path):
            raise PowerLoss
        return list(self._folder(path).entries)

    def rename(self, old: Path, new: Path) -> None:
        last = self._call("rename", new)
        assert old.parent == new.parent, "a rename is one step only within a folder"
        self._change(new, {old.name: None, new.name: self._node(old)}, last)

    def unlink(self, path: Path) -> None:
        last = self._call("remove", path)
        if isinstance(self._node(path), _Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        self._change(path, {path.name: None}, last)

    def rmdir(self, path: Path) -> None:
        last = self._call("remove_folder", path)
        if self._folder(path).entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        self._change(path, {path.name: None}, last)

    def free(self, path: Path) -> int:
        if self.dead:
            raise PowerLoss
        return 1 << 40 if self.capacity is None else max(0, self.capacity - self.used)

    # --- Sockets ---------------------------------------------------------------------------------------------------

    def accept(self, listener: socket.socket) -> socket.socket:
        sock = super().accept(listener)
        _TABLE.accepted(self, sock)
        return sock

    def recv(self, fd: int, view: memoryview) -> int:
        """For the kernel's table: a count, or minus the error number."""
        if self._call("recv", _SOCKET):
            raise PowerLoss
        return _LIBC.recv(fd, view)

    def send(self, fd: int, view: bytes | memoryview) -> int:
        if self._call("send", _SOCKET):
            raise PowerLoss
        fault = self._fault("send", _SOCKET)
        if fault is None:
            return _LIBC.send(fd, view)
        return _LIBC.send(fd, view[: fault.short]) if fault.short else -fault.error


class _Table(kernel.Calls):
    """The kernel's system calls, handed to the simulated system that the descriptor belongs to; else to the real one.

    It is in place as long as there is a simulated system.
    """

    def __init__(self) -> None:
        super().__init__()
        self._systems: weakref.WeakValueDictionary[int, SimSystem] = weakref.WeakValueDictionary()
        #: By descriptor. A socket that is closed is nobody's: its number may be a real broker's by now.
        self._sockets: dict[int, tuple[weakref.ref[SimSystem], weakref.ref[socket.socket]]] = {}

    def enter(self, system: SimSystem, number: int = 0) -> int:
        """Return the system's number."""
        kernel.replace_calls(self)
        if number:
            self._systems[number] = system
            weakref.finalize(system, self._left)
            return number
        # A descriptor has 31 bits.
        if len(self._systems) > SLOTS >> 10:
            gc.collect()
        number = next(number for number in range(1, 1 << 11) if number not in self._systems)
        self._systems[number] = system
        weakref.finalize(system, self._left)
        return number

    def _left(self) -> None:
        if not self._systems:
            self._sockets.clear()
            # Somebody else may have put a table of his own there meanwhile.
            before = kernel.replace_calls(None)
            if before is not self:
                kernel.replace_calls(before)

    def accepted(self, system: SimSystem, sock: socket.socket) -> None:
        self._sockets[sock.fileno()] = (weakref.ref(system), weakref.ref(sock))

    def _owner(self, fd: int) -> SimSystem | None:
        if fd not in self._sockets:
            return None
        system, sock = (each() for each in self._sockets[fd])
        return system if sock is not None and sock.fileno() == fd else None

    def recv(self, fd: int, view: memoryview) -> int:
        owner = self._owner(fd) if fd < SLOTS else self._systems[fd // SLOTS]
        return super().recv(fd, view) if owner is None else _result(lambda: owner.recv(fd, view))

    def send(self, fd: int, view: bytes | memoryview) -> int:
        owner = self._owner(fd) if fd < SLOTS else self._systems[fd // SLOTS]
        return super().send(fd, view) if owner is None else _result(lambda: owner.send(fd, view))

    def pwritev(self, fd: int, parts: list[bytes | memoryview], offset: int) -> int:
        if fd < SLOTS:
            return super().pwritev(fd, parts, offset)
        system = self._systems[fd // SLOTS]
        system.kernel_writes += 1
        return _result(lambda: system.pwritev(fd, parts, offset))


def _result(call: Callable[[], int]) -> int:
    """What a call comes to in the kernel's table; when the power is gone it has no effect."""
    try:
        return call()
    except OSError as exc:
        return -(exc.errno or errno.EIO)
    except PowerLoss:
        return -errno.EIO


_SOCKET = Path("socket")
_LIBC = kernel.Calls()
_TABLE = _Table()


def _of_system(name: str) -> Any:
    def get(disk: SimDisk) -> Any:
        return getattr(disk.system, name)

    def put(disk: SimDisk, value: Any) -> None:
        setattr(disk.system, name, value)

    return property(get, put)


class SimDisk(Disk):
    """A Disk on a simulated system, whose work is done on the event loop; and all that tests want of both."""

    system: SimSystem

    def __init__(self, root: Path, *, seed: int = 0, inline: bool = False) -> None:
        super().__init__(SimSystem(root))
        self.root = root
        self.seed = seed
        # Work: run at once when it is submitted, or some turns later.
        self._inline = inline
        self._random = random.Random(seed)
        self._queue: list[tuple[int, int, Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []
        self._loop_thread = 0
        self._held = False
        #: Submitted, and its ``done`` not yet called.
        self.under_way = 0

    # --- The system ------------------------------------------------------------------------------------------------

    calls = _of_system("calls")
    power_off_at = _of_system("power_off_at")
    dead = _of_system("dead")
    history = _of_system("history")
    capacity = _of_system("capacity")
    most_files = _of_system("most_files")
    used = _of_system("used")
    open_files = _of_system("open_files")
    fail = _of_system("fail")
    heal = _of_system("heal")
    path_of = _of_system("path_of")

    def after_power_loss(self, choice: int | str) -> SimDisk:
        """The disk that the next start finds. ``choice``: "none" or "all" of what was not synced, or a seed."""
        after = SimDisk(self.root, seed=self.seed, inline=self._inline)
        picker = random.Random(choice) if isinstance(choice, int) else None
        after.system.tree = self.system.tree.survivor(picker, choice == "all")
        return after

    def after_kill(self) -> SimDisk:
        """The disk after kill -9: all that was written can be read; what was not synced may still be lost later."""
        after = SimDisk(self.root, seed=self.seed, inline=self._inline)
        after.system.tree = self.system.tree.copy({})
        return after

    def content(self, path: Path) -> bytes:
        node = self.system._node(path)
        assert isinstance(node, _File)
        return node.content.part(0, node.content.size)

    def swap(self, path: Path, content: bytes) -> None:
        """Put other bytes into a file, behind everybody's back; they are on the device."""
        folder = self.system._folder(path.parent)
        folder.entries[path.name] = folder.synced[path.name] = _File(_Bytes(content))

    def paths(self, folder: Path, suffix: str = "") -> list[Path]:
        """The files of a folder, in order."""
        return sorted(folder / name for name in self.system._folder(folder).entries if name.endswith(suffix))

    # --- Work ------------------------------------------------------------------------------------------------------

    def attach(self, post: Callable[[Callable[[], None]], Any]) -> None:
        super().attach(post)
        self._loop_thread = threading.get_ident()

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], urgency: int = BACKGROUND
    ) -> None:
        if self._stopping:
            raise RuntimeError("the disk was closed")
        self.under_way += 1
        if self._inline:
            self._finish(work, done, 0)
            return
        self._order += 1
        self._queue.append((urgency, self._order, work, done))
        self._later(self._work_on, self._random.randrange(3))

    def _later(self, work: Callable[[], None], turns: int) -> None:
        assert self._post is not None
        self._post(work if turns == 0 else lambda: self._later(work, turns - 1))

    def _work_on(self) -> None:
        if self._held or not self._queue:
            return
        # Commits first; of the rest any may come next: several threads take from the queue.
        self._queue.sort(key=lambda item: item[:2])
        urgent = sum(item[0] == self._queue[0][0] for item in self._queue)
        _, _, work, done = self._queue.pop(self._random.randrange(urgent))
        self._finish(work, done, self._random.randrange(2))

    def _finish(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], turns: int) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as exc:
            error = exc

        def answer() -> None:
            self.under_way -= 1
            done(result, error)

        self._later(answer, turns)

    def hold(self) -> None:
        """Let submitted work wait until ``release``: a slow device."""
        self._held = True

    def release(self) -> None:
        self._held = False
        for _ in self._queue:
            self._later(self._work_on, 0)

    def close(self) -> None:
        if threading.get_ident() == self._loop_thread or self._post is None:
            self._drain()
            return
        # The broker waits for this in another thread; everything happens on the loop all the same.
        finished = threading.Event()

        def drain() -> None:
            self._drain()
            finished.set()

        self._post(drain)
        finished.wait()

    def _drain(self) -> None:
        self._stopping = True
        while self._queue:
            _, _, work, done = self._queue.pop(0)
            self._finish(work, done, 0)


async def settled(broker: Broker) -> None:
    """Turn the loop until nothing is under way. Work that is held does not count."""
    disk = broker.disk
    assert isinstance(disk, SimDisk)
    calm = 0
    while calm < 8:
        await asyncio.sleep(0)
        busy = (disk.under_way and not disk._held) or broker.turns.busy
        calm = 0 if busy else calm + 1
