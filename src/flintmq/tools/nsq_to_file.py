"""`nsq_to_file`: write the messages of topics to files, and finish each after its bytes are on the disk.

One `Archive` per topic owns a consumer and a `RotatingFile`. Messages are written as they come and finished after an
fsync of the file (and, for a new file, of its directory), so that neither kill -9 nor a power failure loses one. Files,
names, rotation and flags are those of NSQ's nsq_to_file. The differences, all of them where it loses messages or time,
are in docs/nsq-tools.md.

Files are written in threads: a slow disk holds up neither heartbeats nor other topics.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from flintmq.client import Batch, Consumer, Message
from flintmq.errors import ClosedError, FlintError
from flintmq.options import LOG_LEVEL, MINUTE, SECOND
from flintmq.protocol import wire
from flintmq.tools._program import (
    BOOL,
    DURATION,
    INT,
    STOP_SECONDS,
    STRING,
    STRINGS,
    Failures,
    Fatal,
    Progress,
    Source,
    connected,
    option,
    run_program,
    seconds,
    stop_on_signals,
)

__all__ = ["ABOUT", "OPTIONS", "FileOptions", "RotatingFile", "main"]

#: The line of `flintmq --help`.
ABOUT = "write the messages of topics to files, with the flags of NSQ's nsq_to_file"

logger = logging.getLogger(__name__)

#: zlib's word for "write a gzip header and trailer".
_GZIP_WINDOW = 31

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class FileOptions(Source):
    program: ClassVar[str] = "nsq_to_file"
    refuses_words: ClassVar[bool] = True

    topics: tuple[str, ...] = option(STRINGS, (), "topic to write (repeatable)", flag="topic")
    topic_pattern: str = option(STRING, "", "only topics that match this regular expression; alone: all of them")
    topic_refresh: int = option(DURATION, MINUTE, "how often nsqlookupds are asked for topics, without --topic")
    channel: str = option(STRING, "nsq_to_file", "channel")
    output_dir: str = option(STRING, "/tmp", "directory of the files")
    work_dir: str = option(STRING, "", "directory of files that are being written; by default the output directory")
    datetime_format: str = option(STRING, "%Y-%m-%d_%H", "strftime format of <DATETIME>")
    filename_format: str = option(
        STRING,
        "<TOPIC>.<HOST><REV>.<DATETIME>.log",
        "file names; <TOPIC>, <HOST>, <PID>, <DATETIME> and <REV> are replaced",
    )
    host_identifier: str = option(STRING, "", "value of <HOST>; may contain <SHORT_HOST> and <HOSTNAME>")
    gzip: bool = option(BOOL, False, "compress files")
    gzip_level: int = option(INT, 6, "compression level, 1 (fast) to 9 (small)")
    skip_empty_files: bool = option(BOOL, False, "open a file only when there is a message for it")
    rotate_size: int = option(INT, 0, "begin a new file when one has more bytes than this, before compression")
    rotate_interval: int = option(DURATION, 0, "begin a new file this long after the last was opened")
    sync_interval: int = option(DURATION, 30 * SECOND, "longest time until messages are synced and finished")
    http_client_connect_timeout: int = option(DURATION, 2 * SECOND, "time to connect to an nsqlookupd for topics")
    http_client_request_timeout: int = option(DURATION, 5 * SECOND, "time for an nsqlookupd to answer about topics")
    log_level: str = option(LOG_LEVEL, "info", "least level that is logged: debug, info, warn, error or fatal")
    log_prefix: str = option(STRING, "[nsq_to_file] ", "prefix of every log line")

    def check(self) -> None:
        if not self.channel:
            raise Fatal("--channel is required")
        for flag in ("http_client_connect_timeout", "http_client_request_timeout"):
            if getattr(self, flag) <= 0:
                raise Fatal(f"--{flag.replace('_', '-')} should be positive")
        self.check_source()
        if not 1 <= self.gzip_level <= 9:
            raise Fatal(f"invalid --gzip-level value ({self.gzip_level}), should be 1-9")
        if not self.topics and not self.topic_pattern:
            raise Fatal("--topic or --topic-pattern required")
        if not self.topics and not self.lookupd_http_addresses:
            raise Fatal("--lookupd-http-address must be specified when no --topic specified")
        for topic in self.topics:
            if not wire.valid_name(topic):
                raise Fatal(f'--topic is invalid: "{topic}"')
        if not wire.valid_name(self.channel):
            raise Fatal(f'--channel is invalid: "{self.channel}"')
        try:
            re.compile(self.topic_pattern)
        except re.error as exc:
            raise Fatal(f"--topic-pattern is not a regular expression: {exc}") from exc
        if self.sync_interval <= 0:
            raise Fatal("--sync-interval should be positive")
        if not self.topics and self.topic_refresh <= 0:
            raise Fatal("--topic-refresh should be positive")
        # A name without <REV> would fail for every topic: say so at once.
        name_format(self, "topic")


OPTIONS = FileOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `nsq_to_file`."""
    return run_program(FileOptions, argv, _main)


async def _main(options: FileOptions) -> int:
    return await _Archiver(options).run()


# --- Names ------------------------------------------------------------------------------------------------------------

_STRFTIME = re.compile("%([AaBbdHIMmpSYyZz%])")


def moment(format: str, now: float) -> str:
    """Return a local time in a strftime format that knows the letters of NSQ's tool; others stay as they are."""
    local = time.localtime(now)
    return _STRFTIME.sub(lambda found: time.strftime(found[0], local), format)


def name_format(options: FileOptions, topic: str) -> str:
    """Return the names of a topic's files, where <DATETIME> and <REV> are still to be filled in."""
    hostname = socket.gethostname()
    short = hostname.partition(".")[0]
    host = options.host_identifier.replace("<SHORT_HOST>", short).replace("<HOSTNAME>", hostname) or short
    name = options.filename_format
    if options.gzip or options.rotate_size > 0 or options.rotate_interval > 0 or _moves(options):
        if "<REV>" not in name:
            raise Fatal("missing <REV> in --filename-format when gzip, rotation, or work dir enabled")
    else:
        name = name.replace("<REV>", "")
    name = name.replace("<TOPIC>", topic).replace("<HOST>", host).replace("<PID>", str(os.getpid()))
    return f"{name}.gz" if options.gzip and not name.endswith(".gz") else name


def _moves(options: FileOptions) -> bool:
    return bool(options.work_dir) and options.work_dir != options.output_dir


# --- Files ------------------------------------------------------------------------------------------------------------


class RotatingFile:
    """The file that a topic is written to, and the next one when its time has come. Not for two threads at once."""

    def __init__(
        self,
        options: FileOptions,
        topic: str,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        #: For names.
        self._clock = clock
        #: For ages: it goes on when the clock is set back.
        self._elapsed = elapsed
        self._label = f"{topic}/{options.channel}"
        self._format = name_format(options, topic)
        self._folder = options.work_dir or options.output_dir
        self._moves = _moves(options)
        # The open file.
        self._file: int | None = None
        self._path = ""
        self._gzip: Any = None
        self._is_clean = True
        #: Bytes before compression; in a file that is appended to, also those from before.
        self._size = 0
        self._opened_at = 0.0
        # Of its name.
        self._name = ""
        self._revision = 0
        #: Files that were closed, for the line of progress.
        self.finished = 0

    @property
    def is_open(self) -> bool:
        return self._file is not None

    @property
    def path(self) -> str:
        """The file that is open, or was last."""
        return self._path

    def write(self, bodies: Iterable[bytes]) -> bool:
        """Write messages, a newline after each; return whether a file was closed meanwhile."""
        has_rotated = False
        if self.needs_rotation():
            has_rotated = self.is_open
            self.rotate()
        if not self._options.rotate_size:
            self._put(b"\n".join((*bodies, b"")))
            return has_rotated
        pieces: list[bytes] = []
        size = self._size
        for body in bodies:
            if size > self._options.rotate_size:
                self._put(b"".join(pieces))
                self._log_size()
                self.rotate()
                has_rotated = True
                pieces, size = [], self._size
            pieces += (body, b"\n")
            size += len(body) + 1
        self._put(b"".join(pieces))
        return has_rotated

    def _put(self, data: bytes) -> None:
        if not data:
            return
        self._size += len(data)
        self._is_clean = False
        self._write_out(data if self._gzip is None else self._gzip.compress(data))

    def _write_out(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def sync(self) -> None:
        """Return when everything written is on the disk. A gzip member ends here, so that it can be read."""
        if self._file is None or self._is_clean:
            return
        if self._gzip is not None:
            self._write_out(self._gzip.flush())
            self._gzip = self._new_gzip()
        os.fsync(self._file)
        self._is_clean = True

    def needs_rotation(self) -> bool:
        """Return whether the next message needs another file than the one that is open."""
        if self._file is None:
            return True
        name = self._current_name()
        if name != self._name:
            logger.info("[%s] new filename %s, rotating...", self._label, name)
            return True
        interval = seconds(self._options.rotate_interval)
        age = self._elapsed() - self._opened_at
        if 0 < interval < age:
            logger.info("[%s] %.3fs since last open, rotating...", self._label, age)
            return True
        if 0 < self._options.rotate_size < self._size:
            self._log_size()
            return True
        return False

    def _log_size(self) -> None:
        limit = self._options.rotate_size
        logger.info("[%s] %s currently %d bytes (> %d), rotating...", self._label, self._path, self._size, limit)

    def _current_name(self) -> str:
        return self._format.replace("<DATETIME>", moment(self._options.datetime_format, self._clock()))

    def rotate(self) -> None:
        """Close the file and open the next."""
        self.close()
        name = self._current_name()
        # The same name again is the next revision of it.
        self._revision = self._revision + 1 if name == self._name else 0
        self._name = name
        self._opened_at = self._elapsed()
        while not self._open_revision():
            self._revision += 1

    def _open_revision(self) -> bool:
        """Open the file of the present revision; return whether it can be used."""
        options = self._options
        path = os.path.join(self._folder, self._revised(self._name, self._revision))
        self._make_folders(os.path.dirname(path))
        if self._moves:
            final = self._final_path(path)
            self._make_folders(os.path.dirname(final))
            if os.path.lexists(final):
                logger.warning("[%s] output file already exists: %s", self._label, final)
                return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND
        is_new = True
        try:
            file = os.open(path, flags | os.O_EXCL, 0o666)
        except FileExistsError:
            if options.gzip or options.rotate_interval > 0:
                logger.warning("[%s] working file already exists: %s", self._label, path)
                return False
            file, is_new = os.open(path, flags, 0o666), False
        if self._moves and not _claim(file, path, is_new):
            os.close(file)
            logger.warning("[%s] working file is in use: %s", self._label, path)
            return False
        size = os.fstat(file).st_size
        if 0 < options.rotate_size < size:
            os.close(file)
            logger.info("[%s] %s currently %d bytes (> %d), rotating...", self._label, path, size, options.rotate_size)
            return False
        logger.info("[%s] opening %s", self._label, path)
        self._file, self._path, self._size = file, path, size
        self._gzip = self._new_gzip() if options.gzip else None
        self._is_clean = True
        # Its name must outlive a power failure too, before a message in it is finished.
        _sync_folder(os.path.dirname(path))
        if size and not self._ends_a_line():
            # Whoever wrote here was killed half-way through a message, which comes again: on a line of its own.
            self._put(b"\n")
        return True

    def _ends_a_line(self) -> bool:
        with open(self._path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _new_gzip(self) -> Any:
        return zlib.compressobj(self._options.gzip_level, zlib.DEFLATED, _GZIP_WINDOW)

    @staticmethod
    def _revised(name: str, revision: int) -> str:
        return name.replace("<REV>", f"-{revision:06d}")

    @staticmethod
    def _make_folders(folder: str) -> None:
        if not os.path.isdir(folder):
            os.makedirs(folder, 0o770, exist_ok=True)
            parent = os.path.dirname(os.path.abspath(folder))
            if os.path.isdir(parent):
                _sync_folder(parent)

    def _final_path(self, path: str) -> str:
        return os.path.join(self._options.output_dir, os.path.relpath(path, self._folder))

    def close(self) -> None:
        """Sync the file, close it, and move it to the output directory where it was written elsewhere."""
        if self._file is None:
            return
        if self._gzip is not None:
            self._write_out(self._gzip.flush())
            self._is_clean = False
        if not self._is_clean:
            os.fsync(self._file)
        # Whatever happens now, this descriptor is not to be used again.
        file, self._file = self._file, None
        self._gzip = None
        self._is_clean = True
        self.finished += 1
        try:
            if self._moves:
                self._move()
        finally:
            # Only now: nobody else may write to a file that is being moved.
            os.close(file)

    def _move(self) -> None:
        source = self._path
        target = self._final_path(source)
        logger.info("[%s] moving finished file %s to %s", self._label, source, target)
        revision = self._revision
        while not _move_exclusively(source, target):
            logger.warning("[%s] destination file already exists: %s", self._label, target)
            revision += 1
            target = os.path.join(self._options.output_dir, self._revised(self._name, revision))


#: What file systems say that cannot do a thing at all.
_CANNOT = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL})


def _claim(file: int, path: str, is_new: bool) -> bool:
    """Lock a work file until it is closed; return False if another writer has it, or has just moved it away."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        if exc.errno not in _CANNOT:
            raise
        # Without locks, whoever made the file has it.
        return is_new
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _move_exclusively(source: str, target: str) -> bool:
    """Move a file; return False, and change nothing, if the target exists. Both may be on different file systems."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno != errno.EXDEV and exc.errno not in _CANNOT:
            raise
        if not _copy_exclusively(source, target):
            return False
    # First the new name, then the old one: a power failure must not leave it with neither.
    _sync_folder(os.path.dirname(target))
    os.unlink(source)
    return True


def _copy_exclusively(source: str, target: str) -> bool:
    if os.path.lexists(target):
        return False
    temporary = f"{target}.{secrets.token_hex(8)}.tmp"
    try:
        with open(source, "rb") as old, open(temporary, "xb") as new:
            shutil.copyfileobj(old, new, 1 << 20)
            new.flush()
            os.fsync(new.fileno())
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as exc:
            if exc.errno not in _CANNOT:
                raise
            # A file system without hard links: whoever makes the name has it.
            try:
                os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except FileExistsError:
                return False
            os.rename(temporary, target)
        return True
    except OSError as exc:
        if exc.filename is None:
            exc.filename = target
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _sync_folder(folder: str) -> None:
    fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        # Some network file systems cannot, and need not.
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


# --- Topics -----------------------------------------------------------------------------------------------------------


class _Archive:
    """One topic: its consumer, its file, and the messages that are written and not finished yet."""

    def __init__(self, options: FileOptions, topic: str, failures: Failures, progress: Progress) -> None:
        self.topic = topic
        self._options = options
        self._progress = progress
        self._label = f"{topic}/{options.channel}"
        self.file = RotatingFile(options, topic)
        given = options.consumer_options()
        # Nothing is wrong with a message that comes for the sixth time: whoever had it was killed.
        given.setdefault("max_attempts", 0)
        given["on_error"] = failures
        self.consumer: Consumer[bytes] = Consumer(topic, options.channel, **given)
        self._unsynced: list[Message[bytes]] = []
        # Whoever uses the file has it.
        self._turn = asyncio.Lock()
        self._is_over = False
        self._must_reopen = asyncio.Event()
        #: What ended the use of the file. A later sync may succeed, and yet not have what an earlier one lost.
        self._error: OSError | None = None

    async def run(self) -> None:
        """Write messages until the consumer has stopped; OSError says what is wrong with the files."""
        ticks = asyncio.create_task(self._tick(), name=f"sync of {self._label}")
        writing = asyncio.create_task(self._write_all(), name=f"files of {self._label}")
        reopening = asyncio.create_task(self._reopen_when_told(), name=f"signals of {self._label}")
        tasks = {ticks, writing, reopening}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Do something with the file, unless something has failed before."""
        if self._error is not None:
            raise self._error
        try:
            return await asyncio.to_thread(work)
        except OSError as exc:
            if exc.filename is None:
                exc.filename = self.file.path
            self._error = exc
            raise

    async def _write_all(self) -> None:
        async for batch in self.consumer.batches(self._options.max_in_flight, wait=0):
            async with self._turn:
                await self._write(batch)
        async with self._turn:
            await self._sync()
            await self._in_thread(self.file.close)
            # Within the turn: a tick that waits for it must not open the next file.
            self._is_over = True
        await self.consumer.close()

    async def _write(self, batch: Batch[bytes]) -> None:
        self._unsynced += batch
        bodies = [message.body for message in batch]
        is_due = len(self._unsynced) >= self._options.max_in_flight or self.consumer.is_starved

        def work() -> bool:
            must_sync = self.file.write(bodies) or is_due
            if must_sync:
                self.file.sync()
            return must_sync

        if await self._in_thread(work):
            self._finish()
        self._progress.add(len(bodies), sum(map(len, bodies)) + len(bodies))

    async def _sync(self) -> None:
        if self._unsynced:
            await self._in_thread(self.file.sync)
            self._finish()

    def _finish(self) -> None:
        logger.debug("[%s] synced %d records to disk", self._label, len(self._unsynced))
        for message in self._unsynced:
            message.finish()
        self._unsynced.clear()

    async def _tick(self) -> None:
        """Sync and rotate every so often, and before a message would time out."""
        interval = seconds(self._options.sync_interval)
        loop = asyncio.get_running_loop()
        due = loop.time() + interval
        while not self._is_over:
            # Half of a message's time is for the sync itself, and for those before it.
            deadlines = [
                message.deadline - message.source.msg_timeout / 2
                for message in self._unsynced[:1]
                if message.source is not None
            ]
            now = loop.time()
            wanted = min(due, *deadlines) if deadlines else due
            if now < wanted:
                await asyncio.sleep(min(wanted - now, 0.5))
                continue
            async with self._turn:
                await self._sync()
                if due <= loop.time() and not self._is_over:
                    due = loop.time() + interval
                    await self._in_thread(self._rotate)

    def _rotate(self) -> None:
        if not self.file.needs_rotation():
            return
        if self._options.skip_empty_files:
            self.file.close()
        else:
            self.file.rotate()

    def reopen(self) -> None:
        """Sync, finish and close soon: the next message opens a file."""
        self._must_reopen.set()

    async def _reopen_when_told(self) -> None:
        while True:
            await self._must_reopen.wait()
            self._must_reopen.clear()
            async with self._turn:
                await self._sync()
                await self._in_thread(self.file.close)


class _Archiver:
    """All topics, and the signals."""

    def __init__(self, options: FileOptions) -> None:
        self._options = options
        self._failures = Failures()
        self._progress = Progress(options.program, "wrote")
        self._archives: dict[str, _Archive] = {}
        self._running: dict[asyncio.Task[None], _Archive] = {}
        self._skipped: set[str] = set()
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        stop_on_signals(self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reopen)
        self._progress.more = self._files
        with self._progress.shown():
            try:
                await self._follow()
            except OSError as exc:
                raise Fatal(f"{exc.filename or 'file'}: {exc.strerror}") from exc
            finally:
                await self._end()
        return 0

    def _files(self) -> str:
        count = sum(archive.file.finished + archive.file.is_open for archive in self._archives.values())
        return f"{count} files of {len(self._archives)} topics"

    def _stop(self) -> None:
        self._stopping.set()
        for archive in self._archives.values():
            archive.consumer.stop()

    def _reopen(self) -> None:
        for archive in self._archives.values():
            archive.reopen()

    async def _follow(self) -> None:
        """Write all topics that there are until a signal comes and everything is finished."""
        await self._add(self._options.topics)
        looking: asyncio.Task[None] | None = None
        if not self._options.topics:
            looking = asyncio.create_task(self._look_for_topics())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                waiting: set[asyncio.Task[Any]] = {stopping, *self._running}
                if looking is not None:
                    waiting.add(looking)
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                self._check(done)
        finally:
            stopping.cancel()
            if looking is not None:
                looking.cancel()
        if self._running:
            done, late = await asyncio.wait(self._running, timeout=STOP_SECONDS)
            for task in late:
                logger.warning("[%s] not all messages were finished in time", self._running[task].topic)
            self._check(done)

    def _check(self, done: Iterable[asyncio.Task[Any]]) -> None:
        """Forget topics that have ended; raise what one of them ended with."""
        for task in done:
            self._running.pop(task, None)
            task.result()

    async def _end(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await asyncio.gather(*(archive.consumer.close() for archive in self._archives.values()))

    async def _add(self, topics: Iterable[str]) -> None:
        pattern = re.compile(self._options.topic_pattern)
        for topic in topics:
            if topic in self._archives or self._stopping.is_set():
                continue
            if not pattern.search(topic):
                if topic not in self._skipped:
                    self._skipped.add(topic)
                    logger.warning("skipping topic %s (doesn't match pattern %s)", topic, pattern.pattern)
                continue
            try:
                archive = _Archive(self._options, topic, self._failures, self._progress)
            except FlintError as exc:
                raise Fatal(f"couldn't create logger for new topic {topic}: {exc}") from exc
            self._archives[topic] = archive
            await archive.consumer.start()
            self._running[asyncio.create_task(archive.run(), name=f"archive of {topic}")] = archive
            await connected(archive.consumer, self._options.nsqd_tcp_addresses, self._failures)

    async def _look_for_topics(self) -> None:
        from flintmq.tools._cluster import lookupd_topics

        options = self._options
        limits = (seconds(options.http_client_connect_timeout), seconds(options.http_client_request_timeout))
        while True:
            # At once, and not only after the first period.
            topics, failures = await lookupd_topics(options.lookupd_http_addresses, *limits)
            for address, reason in failures.items():
                logger.error("could not retrieve topic list of %s: %s", address, reason)
            with contextlib.suppress(ClosedError):
                await self._add(topics)
            await asyncio.sleep(seconds(options.topic_refresh))
