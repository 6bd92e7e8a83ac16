"""A disk in memory that can lose power, be full, and fail: what the storage tests put in the place of the real one.

A SimDisk keeps two versions of everything: what programs see, and what is on the device. Only a sync brings a file's
bytes, or a folder's entries, from the one to the other. ``after_power_loss`` gives the disk that the next start finds:
what was synced, and of the rest whatever a device may have got round to, page by page and entry by entry, in any
order. ``after_kill`` gives the one after kill -9: everything that was written is there, and still not on the device.

Every file call is counted and may be the last one. Submitted work runs on the event loop some turns later, in an order
that a seed decides, so that a run with the same seed makes the same calls.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flintmq.broker.daemon import Broker
from flintmq.broker.storage.disk import BACKGROUND, Disk

__all__ = ["PowerLoss", "SimDisk", "settled"]

PAGE = 4096
SECTOR = 512

Buffer = bytes | bytearray | memoryview


class PowerLoss(BaseException):
    """The power is gone: no file call works any more. Not an error that a program could handle."""


class _File:
    """Bytes as programs see them, as they were at the last sync, and the changes in between."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.synced = bytes(content)
        # (offset, bytes) of a write; (size, None) of a change of the size.
        self.changes: list[tuple[int, bytes | None]] = []

    def write(self, data: bytes, offset: int) -> None:
        _apply(self.content, (offset, data))
        self.changes.append((offset, data))

    def resize(self, size: int) -> None:
        _apply(self.content, (size, None))
        self.changes.append((size, None))

    def sync(self) -> None:
        self.synced = bytes(self.content)
        self.changes.clear()

    def copy(self) -> _File:
        copy = _File()
        copy.content, copy.synced, copy.changes = bytearray(self.content), self.synced, list(self.changes)
        return copy

    def survivor(self, choice: random.Random | None, everything: bool) -> bytes:
        """What a device may hold of it when the power goes."""
        if everything:
            return bytes(self.content)
        if choice is None or not self.changes:
            return self.synced
        versions = self._versions()
        size = len(versions[choice.randrange(len(versions))])
        result = bytearray(size)
        for start in range(0, size, PAGE):
            stop = min(start + PAGE, size)
            page = _part(versions[choice.randrange(len(versions))], start, stop)
            if choice.random() < 0.2:
                # A torn page: its first sectors are of one version, the others of another.
                cut = choice.randrange(0, PAGE, SECTOR)
                page = page[:cut] + _part(versions[choice.randrange(len(versions))], start, stop)[cut:]
            result[start:stop] = page
        return bytes(result)

    def _versions(self) -> list[bytes]:
        versions = [self.synced]
        current = bytearray(self.synced)
        for change in self.changes:
            _apply(current, change)
            versions.append(bytes(current))
        # Of many versions a few tell the story: the oldest, the newest, and some between.
        return versions if len(versions) <= 8 else [*versions[:: len(versions) // 6], versions[-1]]


def _apply(content: bytearray, change: tuple[int, bytes | None]) -> None:
    offset, data = change
    if data is None:
        if offset < len(content):
            del content[offset:]
        else:
            content.extend(bytes(offset - len(content)))
    else:
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data


def _part(content: bytes, start: int, stop: int) -> bytes:
    part = content[start:stop]
    return part + bytes(stop - start - len(part))


class _Folder:
    """Entries as programs see them, as they were at the last sync, and the changes in between."""

    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}
        # Each change is one step: what becomes of which names (None: gone). A rename is two names in one step.
        self.changes: list[dict[str, _File | _Folder | None]] = []

    def change(self, step: dict[str, _File | _Folder | None]) -> None:
        _step(self.entries, step)
        self.changes.append(step)

    def sync(self) -> None:
        self.synced = dict(self.entries)
        self.changes.clear()

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

    def survivor(self, choice: random.Random | None, everything: bool) -> _Folder:
        entries = dict(self.entries if everything else self.synced)
        if not everything and choice is not None:
            for step in self.changes:
                if choice.random() < 0.5:
                    _step(entries, step)
        result = _Folder()
        for name, node in sorted(entries.items()):
            result.entries[name] = (
                node.survivor(choice, everything)
                if isinstance(node, _Folder)
                else _File(node.survivor(choice, everything))
            )
        result.synced = dict(result.entries)
        return result


def _step(entries: dict[str, _File | _Folder], step: dict[str, _File | _Folder | None]) -> None:
    for name, node in step.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class _Fault:
    def __init__(self, kind: str, error: int, times: int, path: str, short: int) -> None:
        self.kind = kind
        self.error = error
        self.times = times
        self.path = path
        self.short = short


class SimDisk(Disk):
    """A file system in memory. Only paths below ``root`` exist; ``root`` itself always does."""

    def __init__(self, root: Path, *, seed: int = 0, inline: bool = False) -> None:
        super().__init__()
        self.root = root
        self.seed = seed
        self._tree = _Folder()
        self._open_files: dict[int, tuple[_File, Path]] = {}
        self._next_fd = 1_000
        # Faults.
        self.calls = 0
        self.power_off_at: int | None = None
        self.dead = False
        self.history: list[tuple[str, str]] = []
        self._faults: list[_Fault] = []
        self.capacity: int | None = None
        #: At most so many files may be open at once.
        self.most_files: int | None = None
        # Work: run at once when it is submitted, or some turns later.
        self._inline = inline
        self._random = random.Random(seed)
        self._queue: list[tuple[int, int, Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []
        self._loop_thread = 0
        self._held = False
        #: Submitted, and its ``done`` not yet called.
        self.under_way = 0

    # --- Faults ----------------------------------------------------------------------------------------------------

    def fail(self, kind: str, error: int, *, times: int = 1, path: str = "", short: int = 0) -> None:
        """The next ``times`` calls of this kind on paths with ``path`` in them fail; a write after ``short`` bytes."""
        self._faults.append(_Fault(kind, error, times, path, short))

    def heal(self) -> None:
        self._faults.clear()
        self.capacity = None

    @property
    def used(self) -> int:
        return sum(len(file.content) for file in self._files(self._tree))

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
        if kind != "write":
            fault = self._fault(kind, path)
            if fault is not None:
                raise OSError(fault.error, os.strerror(fault.error), str(path))
        return False

    def _fault(self, kind: str, path: Path) -> _Fault | None:
        for fault in self._faults:
            if fault.kind == kind and fault.times and fault.path in str(path):
                fault.times -= 1
                return fault
        return None

    def after_power_loss(self, choice: int | str) -> SimDisk:
        """The disk that the next start finds. ``choice``: "none" or "all" of what was not synced, or a seed."""
        after = SimDisk(self.root, seed=self.seed, inline=self._inline)
        picker = random.Random(choice) if isinstance(choice, int) else None
        after._tree = self._tree.survivor(picker, choice == "all")
        return after

    def after_kill(self) -> SimDisk:
        """The disk after kill -9: all that was written can be read; what was not synced may still be lost later."""
        after = SimDisk(self.root, seed=self.seed, inline=self._inline)
        after._tree = self._tree.copy({})
        return after

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

    # --- Files -----------------------------------------------------------------------------------------------------

    def _folder(self, path: Path) -> _Folder:
        node: _File | _Folder = self._tree
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
        folder = self._folder(path.parent)
        if path.name not in folder.entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return folder.entries[path.name]

    def _change(self, path: Path, step: dict[str, _File | _Folder | None], last: bool) -> None:
        self._folder(path.parent).change(step)
        if last:
            raise PowerLoss

    def open(self, path: Path, *, create: bool = False) -> int:
        last = self._call("create" if create else "open", path)
        if self.most_files is not None and len(self._open_files) >= self.most_files:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        if create:
            if path.name in self._folder(path.parent).entries:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            file = _File()
            self._change(path, {path.name: file}, last)
        else:
            if last:
                raise PowerLoss
            node = self._node(path)
            if isinstance(node, _Folder):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            file = node
        self._next_fd += 1
        self._open_files[self._next_fd] = (file, path)
        return self._next_fd

    def close_file(self, fd: int) -> None:
        if not self.dead:
            del self._open_files[fd]

    @property
    def open_files(self) -> list[str]:
        """The names of the files that are open: none, once a broker has stopped."""
        return sorted(path.name for _, path in self._open_files.values())

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        file, path = self._open_files[fd]
        last = self._call("write", path)
        data = b"".join(buffers)
        fault = None if last else self._fault("write", path)
        room = len(data)
        if self.capacity is not None:
            growth = max(0, offset + len(data) - len(file.content))
            room -= max(0, self.used + growth - self.capacity)
        if fault is not None:
            room = min(room, fault.short)
        if room > 0:
            file.write(data[:room], offset)
        if last:
            raise PowerLoss
        if room < len(data):
            error = fault.error if fault is not None else errno.ENOSPC
            raise OSError(error, os.strerror(error), str(path))
        return len(data)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        file, path = self._open_files[fd]
        if self._call("read", path):
            raise PowerLoss
        return bytes(file.content[offset : offset + size])

    def truncate(self, fd: int, size: int) -> None:
        file, path = self._open_files[fd]
        last = self._call("truncate", path)
        file.resize(size)
        if last:
            raise PowerLoss

    def allocate(self, fd: int, size: int) -> None:
        file, path = self._open_files[fd]
        last = self._call("allocate", path)
        growth = size - len(file.content)
        if self.capacity is not None and self.used + growth > self.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if growth > 0:
            file.resize(size)
        if last:
            raise PowerLoss

    def sync(self, fd: int) -> None:
        file, path = self._open_files[fd]
        if self._call("sync", path):
            raise PowerLoss
        file.sync()

    def size(self, fd: int) -> int:
        file, path = self._open_files[fd]
        if self._call("size", path):
            raise PowerLoss
        return len(file.content)

    # --- Folders ---------------------------------------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        last = self._call("make_folder", path)
        if path.name in self._folder(path.parent).entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._change(path, {path.name: _Folder()}, last)

    def exists(self, path: Path) -> bool:
        if self._call("exists", path):
            raise PowerLoss
        try:
            self._node(path)
        except FileNotFoundError:
            return False
        return True

    def names(self, path: Path) -> list[str]:
        if self._call("names", path):
            raise PowerLoss
        return sorted(self._folder(path).entries)

    def rename(self, old: Path, new: Path) -> None:
        last = self._call("rename", new)
        assert old.parent == new.parent, "a rename is one step only within a folder"
        self._change(new, {old.name: None, new.name: self._node(old)}, last)

    def remove(self, path: Path) -> None:
        last = self._call("remove", path)
        if isinstance(self._node(path), _Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        self._change(path, {path.name: None}, last)

    def remove_folder(self, path: Path) -> None:
        last = self._call("remove_folder", path)
        if self._folder(path).entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        self._change(path, {path.name: None}, last)

    def sync_folder(self, path: Path) -> None:
        folder = self._folder(path)
        if self._call("sync_folder", path):
            raise PowerLoss
        folder.sync()

    def free(self, path: Path) -> int:
        if self.dead:
            raise PowerLoss
        return 1 << 40 if self.capacity is None else max(0, self.capacity - self.used)

    # --- For tests -------------------------------------------------------------------------------------------------

    def content(self, path: Path) -> bytes:
        node = self._node(path)
        assert isinstance(node, _File)
        return bytes(node.content)

    def replace(self, path: Path, content: bytes) -> None:
        """Put other bytes into a file, behind everybody's back; they are on the device."""
        self._folder(path.parent).entries[path.name] = self._folder(path.parent).synced[path.name] = _File(content)

    def paths(self, folder: Path, suffix: str = "") -> list[Path]:
        """The files of a folder, in order."""
        return sorted(folder / name for name in self._folder(folder).entries if name.endswith(suffix))


async def settled(broker: Broker) -> None:
    """Turn the loop until nothing is under way. Work that is held does not count."""
    disk = broker.disk
    assert isinstance(disk, SimDisk)
    calm = 0
    while calm < 8:
        await asyncio.sleep(0)
        busy = (disk.under_way and not disk._held) or broker.turns.busy
        calm = 0 if busy else calm + 1
