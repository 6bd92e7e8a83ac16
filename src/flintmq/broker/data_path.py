"""The data path: its lock, its format, its first start, and the take-over of a Go nsqd's files.

    flintmq/format.json        format version, the node's random identity
    flintmq/node-ids.json      which node ids the messages were published under (ids.py)
    flintmq/journal/           what happened (journal.py)
    flintmq/topics/NAME@N/     a topic's segment files (segment.py); N is its incarnation; ``side`` its side log;
                               keys of deleted segments (keys.py)
    flintmq/stage/             staged publishes (stage/staging.py)
    flintmq/topics/NAME@N.lost a topic that the journal does not know, after damage to it
    flintmq.tmp                a first start that was cut off
    flintmq.restoring          a backup that is being restored: no broker starts beside it

Beside them is ``nsqd.dat``, for those who read it (upkeep.py). What is inside the folder is brought back by opening.py.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import msgspec

from flintmq.broker.storage.disk import Clock, Disk
from flintmq.errors import FormatError, StartError, permission_hint
from flintmq.options import NsqdOptions

__all__ = ["FORMAT", "LOST", "METADATA", "RECOVERED", "RESTORING", "DataPath", "has_metadata", "reason", "remove_tree"]

logger = logging.getLogger(__name__)

#: The format of the data path. 2: snapshots in pieces, redrives that go on, recorded node ids, keys with their content,
#: staged publishes.
FORMAT = 2
#: What is appended to the name of a topic's folder that is set aside.
LOST = ".lost"
#: What is appended to the name of something set aside whose messages were brought back.
RECOVERED = ".recovered"
#: A backup that is being restored (backup.py); it is renamed once it is whole.
RESTORING = "flintmq.restoring"
#: NSQ's file of topics and channels, beside our folder.
METADATA = "nsqd.dat"


class _About(msgspec.Struct):
    format: int
    node: str


class DataPath:
    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self.root = path / "flintmq"
        self._disk = disk
        self._lock = -1
        #: The node's random identity, once it is open.
        self.node = b""

    def lock(self, *, create: bool = False) -> None:
        """Keep others out. StartError if somebody is in, or if there is no such folder and it is not to be created."""
        try:
            fd = self._open(create=create)
        except OSError as exc:
            raise StartError(
                f"failed to lock data-path: open {self.path}: {reason(exc)}{permission_hint(exc, self.path)}"
            ) from exc
        try:
            self._disk.system.lock(fd)
        except OSError as exc:
            self._disk.system.close(fd)
            raise StartError(
                f"failed to lock data-path: cannot flock directory {self.path} - {reason(exc)} "
                "(possibly in use by another instance of nsqd)"
            ) from exc
        self._lock = fd

    def _open(self, *, create: bool) -> int:
        try:
            return self._disk.system.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if not create:
                raise
        self._disk.make_folder(self.path)
        return self._disk.system.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def unlock(self) -> None:
        if self._lock >= 0:
            self._disk.system.close(self._lock)
            self._lock = -1

    def open(self, options: NsqdOptions, clock: Clock) -> None:
        """Create the folder, from the files of a Go nsqd if there are any, or check it."""
        disk, root = self._disk, self.root
        pending = self.path / "flintmq.tmp"
        moving = root / "takeover-pending"
        if disk.exists(self.path / RESTORING):
            # Starting with nothing would look as if the backup had been empty.
            raise StartError(f"{self.path / RESTORING} is a restore that was cut off: run it again, or remove it")
        if not disk.exists(root):
            remove_tree(disk, pending)
            self._make_root(pending)
            if has_metadata(self.path):
                self._take_over(pending, options, clock)
            disk.rename(pending, root)
        # Also when it was there: a kill may have come right after the rename.
        disk.sync_folder(self.path)
        if disk.exists(moving):
            # The old files are ours now: out of the way with them, also after a crash half-way.
            if has_metadata(self.path):
                from flintmq.broker import takeover

                data = takeover.read(self.path, max_msg_size=options.max_msg_size)
                aside = takeover.move_aside(data, self.path, disk)
                logger.info("NSQ: the files of the old nsqd were moved to %s", aside)
            disk.remove(moving)
            disk.sync_folder(root)
        self.node = self._read_identity(root / "format.json")

    def _read_identity(self, path: Path) -> bytes:
        try:
            fd = self._disk.open(path)
        except FileNotFoundError as exc:
            # Such as a clone of this project, in the folder where nsqd was started.
            raise StartError(
                f"{path.parent} is no data of a broker, as it has no {path.name}: choose another --data-path"
            ) from exc
        try:
            about = msgspec.json.decode(self._disk.read(fd, 4096, 0), type=_About)
            node = bytes.fromhex(about.node)
        except (msgspec.MsgspecError, ValueError) as exc:
            raise FormatError(f"{path} is damaged - {exc}") from exc
        finally:
            self._disk.close_file(fd)
        if about.format > FORMAT:
            raise FormatError(
                f"{path.parent} was written by a newer version of flintmq (format {about.format}, this one knows up to "
                f"{FORMAT}): start that version, or restore a backup made by this one"
            )
        if about.format < FORMAT:
            self._write_identity(path, _About(FORMAT, about.node))
            logger.info("NSQ: %s is now of format %d, older versions can no longer open it", path.parent, FORMAT)
        return node

    def _write_identity(self, path: Path, about: _About) -> None:
        """Replace ``format.json`` durably: before the first file is written that an older version cannot read."""
        self._disk.replace(path, [msgspec.json.encode(about)])

    def _make_root(self, root: Path) -> None:
        for folder in (root, root / "journal", root / "topics"):
            self._disk.make_folder(folder)
        for folder in (root / "journal", root / "topics"):
            self._disk.sync_folder(folder)
        self._write_identity(root / "format.json", _About(FORMAT, self._disk.system.randbytes(16).hex()))

    def _take_over(self, root: Path, options: NsqdOptions, clock: Clock) -> None:
        """Build our files from those of a Go nsqd; nothing of its own is touched yet."""
        # Few starts are the first one after a Go nsqd.
        from flintmq.broker import takeover

        data = takeover.read(self.path, max_msg_size=options.max_msg_size)
        logger.info("NSQ: taking over the data path of another nsqd, %d topics", len(data.topics))
        importer = takeover.Importer(self._disk, clock, options, root)
        try:
            importer.start()
            for topic in data.topics:
                importer.topic(topic)
            importer.finish()
        finally:
            importer.close()
        for line in data.damage:
            logger.error("NSQ: %s", line)
        for topic in data.topics:
            for queue in (topic.queue, *(channel.queue for channel in topic.channels)):
                for line in queue.damage:
                    logger.error("NSQ: %s", line)
        fd = self._disk.open(root / "takeover-pending", create=True)
        try:
            self._disk.sync(fd)
        finally:
            self._disk.close_file(fd)
        self._disk.sync_folder(root)


def has_metadata(data_path: Path) -> bool:
    """Is there an ``nsqd.dat``? We write one too: the caller knows whether there is flintmq data beside it."""
    try:
        return stat.S_ISREG((data_path / METADATA).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def remove_tree(disk: Disk, path: Path) -> None:
    """Delete a folder and all that is in it, if it is there."""
    if not disk.exists(path):
        return
    for name in disk.names(path):
        child = path / name
        try:
            disk.remove(child)
        except FileNotFoundError:
            # A thread was quicker.
            continue
        except (IsADirectoryError, PermissionError):
            remove_tree(disk, child)
    disk.remove_folder(path)


def reason(exc: BaseException) -> str:
    """The operating system's own words, in lower case as Go prints them."""
    if isinstance(exc, OSError) and exc.errno is not None and exc.errno in errno.errorcode:
        return os.strerror(exc.errno).lower()
    return str(exc)
