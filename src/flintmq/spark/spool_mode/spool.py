"""Spool mode: what a channel delivers is written to Arrow files, synced, and only then finished.

A Spool is a folder of files named by the rows they hold, ``<first>-<stop>.arrow``; the rows are numbered without gaps
and these numbers are Spark's offsets. A file appears under its name when it is whole and synced, and goes when Spark
is past it, so a batch that was planned can be read again after any crash. A Spooler fills a Spool in threads of its
process: one Feed per topic and broker receives, one thread writes and finishes. Works with any NSQ server.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from struct import unpack_from
from typing import TYPE_CHECKING, Any, NamedTuple

from flintmq.errors import ConnectError, FlintError, OptionError, ProtocolError, SpoolError
from flintmq.spark.shipped.columns import BATCH_BYTES, Shape, arrow_schema, frame_columns
from flintmq.spark.shipped.net import Cluster, Connection
from flintmq.spark.shipped.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Piece", "Spool", "Spooler", "default_location", "plan_rows", "read_pieces", "spool_id", "spool_rows"]

logger = logging.getLogger("flintmq.spark")

_FILE = re.compile(r"(\d{20})-(\d{20})\.arrow")
#: Somebody who was just told to stop may hold the folder for a moment.
_LOCK_PATIENCE = 15.0
#: How often lookupds are asked who has our topics.
_DISCOVERY_SECONDS = 15.0
#: A broker that is silent for longer is gone; heartbeats come every 30 s.
_SILENCE_SECONDS = 75.0
_LONGEST_PAUSE = 15.0
#: The newest ids, to know a message that is delivered again although it was spooled. Most repeats come at once, or
#: after a message timeout.
_REMEMBERED_IDS = 100_000
#: Silences in a row after which messages that wait in the channel, and do not come, are left there.
_MOST_SILENCES = 10
#: So much received and unwritten is written at once.
_FLUSH_BYTES = 8 << 20


def _private(path: str, flags: int) -> int:
    """Messages are in these files: they are their owner's alone."""
    return os.open(path, flags, 0o600)


class Piece(NamedTuple):
    """Rows of one file."""

    path: str
    skip: int
    rows: int


class _File(NamedTuple):
    first: int
    stop: int
    path: Path
    size: int


# --- The folder -------------------------------------------------------------------------------------------------------


def _list_files(folder: Path) -> list[_File]:
    with os.scandir(folder) as entries:
        named = [(name, entry) for entry in entries if (name := _FILE.fullmatch(entry.name))]
        return sorted(
            _File(int(name[1]), int(name[2]), Path(entry.path), entry.stat().st_size) for name, entry in named
        )


def _read_state(folder: Path) -> dict[str, Any]:
    state = json.loads((folder / "spool.json").read_text())
    if state.get("v") != 1:
        raise SpoolError(f"the spool in {folder} was written by another version: take a new folder")
    return dict(state)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_synced(path: Path, data: bytes) -> None:
    """Put a file in place whole, or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb", opener=_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


class Spool:
    """The folder, opened by the one process that writes it."""

    def __init__(self, location: str) -> None:
        self.folder = Path(location)
        self._lock = -1
        # One thread appends, another forgets.
        self._books = threading.Lock()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            if not (self.folder / "spool.json").exists():
                if _list_files(self.folder):
                    raise SpoolError(f"the spool in {location} has lost its spool.json: take a new folder")
                self._write_state(os.urandom(16).hex(), 0)
            state = _read_state(self.folder)
            for leftover in self.folder.glob("*.tmp"):
                leftover.unlink()
            self._files = deque(_list_files(self.folder))
        except (OSError, ValueError) as exc:
            self.close()
            raise SpoolError(f"the spool in {location} cannot be used: {exc}") from exc
        except BaseException:
            self.close()
            raise
        self.id: str = state["spool"]
        #: Rows before this one are Spark's and gone.
        self.done: int = state["done"]
        self.end = self._files[-1].stop if self._files else self.done
        self.size = sum(file.size for file in self._files)

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise SpoolError(
                        f"another query uses the spool in {self.folder}: stop it, or set another spoolLocation"
                    ) from None
            time.sleep(0.1)

    def _write_state(self, id: str, done: int) -> None:
        _write_synced(self.folder / "spool.json", json.dumps({"v": 1, "spool": id, "done": done}).encode())

    def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Rows from ``end`` on; on the disk when this returns."""
        import pyarrow as pa

        rows = sum(batch.num_rows for batch in batches)
        path = self.folder / f"{self.end:020d}-{self.end + rows:020d}.arrow"
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb", opener=_private) as file:
            with pa.ipc.new_file(file, arrow_schema()) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
        _sync_folder(self.folder)
        with self._books:
            self._files.append(_File(self.end, self.end + rows, path, size))
            self.size += size
            self.end += rows

    def forget(self, upto: int) -> None:
        """Spark is past these rows: files that hold no others go."""
        if upto <= self.done:
            return
        if upto > self.end:
            raise SpoolError(f"the spool in {self.folder} ends at {self.end}, and Spark has read up to {upto}")
        # First written down, then removed: where rows begin must be known even when no file is left.
        self.done = upto
        self._write_state(self.id, upto)
        with self._books:
            while self._files and self._files[0].stop <= upto:
                file = self._files.popleft()
                file.path.unlink(missing_ok=True)
                self.size -= file.size

    def id_at(self, row: int) -> str:
        """Return the id of the message in a row; nothing where the row is gone."""
        import pyarrow as pa

        with self._books:
            file = next((file for file in self._files if file.first <= row < file.stop), None)
            if file is None:
                return ""
            source = pa.memory_map(str(file.path))
        at = row - file.first
        with source, pa.ipc.open_file(source) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                if at < batch.num_rows:
                    return str(batch.column("id")[at].as_py())
                at -= batch.num_rows
        return ""

    def newest_ids(self, count: int) -> Iterator[tuple[str, str, bytes]]:
        """Topic, node and id of the newest rows, the newest file first."""
        import pyarrow as pa

        for file in reversed(self._files):
            if count <= 0:
                return
            with pa.memory_map(str(file.path)) as source, pa.ipc.open_file(source) as reader:
                table = reader.read_all().select(["topic", "node", "id"])
                for topic, node, id in zip(*(column.to_pylist() for column in table.columns), strict=True):
                    yield topic, node, id.encode()
            count -= file.stop - file.first

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def spool_id(location: str) -> str:
    """Return the identity of the spool in a folder, or nothing where there is none. Changes nothing."""
    folder = Path(location)
    if not (folder / "spool.json").exists():
        return ""
    try:
        return str(_read_state(folder)["spool"])
    except (OSError, ValueError, KeyError) as exc:
        raise SpoolError(f"the spool in {location} cannot be used: {exc}") from exc


def spool_rows(location: str) -> tuple[int, int]:
    """From which to which row a folder holds rows; without a lock, for who only reads. SpoolError if it is no spool."""
    folder = Path(location)
    try:
        done = int(_read_state(folder)["done"])
        files = _list_files(folder)
    except (OSError, ValueError, KeyError) as exc:
        raise SpoolError(f"there is no spool in {location}: {exc}") from exc
    return (max(done, files[0].first), files[-1].stop) if files else (done, done)


def plan_rows(location: str, first: int, stop: int) -> list[Piece]:
    """The pieces of files that hold these rows. SpoolError if some are not there."""
    pieces = []
    at = first
    for file in _list_files(Path(location)):
        if file.stop <= at or file.first >= stop:
            continue
        if file.first > at:
            break
        until = min(stop, file.stop)
        pieces.append(Piece(str(file.path), at - file.first, until - at))
        at = until
    if at < stop:
        raise SpoolError(f"the spool in {location} has no rows {at} to {stop - 1}: was something removed from it?")
    return pieces


def read_pieces(pieces: Sequence[Piece], batch_rows: int, planned_on: str) -> Iterator[pa.RecordBatch]:
    """The rows, on an executor."""
    import pyarrow as pa

    for piece in pieces:
        try:
            source = pa.memory_map(piece.path)
        except FileNotFoundError:
            here = socket.gethostname()
            raise SpoolError(
                f"{piece.path} was written on {planned_on} and is not there on {here}: set spoolLocation to a folder "
                "that the driver and all executors share"
            ) from None
        with source, pa.ipc.open_file(source) as reader:
            skip, left = piece.skip, piece.rows
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                while left and skip < batch.num_rows:
                    part = batch.slice(skip, min(left, batch_rows))
                    yield part
                    skip += part.num_rows
                    left -= part.num_rows
                skip = 0
                if not left:
                    break


def default_location(options: SourceOptions) -> str:
    """Where a spool is when nobody said. Only where one machine is all there is: elsewhere executors cannot read it."""
    if not _is_local_master():
        raise OptionError(
            "spool mode needs the option spoolLocation: a folder that the driver and all executors share, kept as "
            "carefully as the checkpoint"
        )
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    network = options.network
    who = (*network.lookupds, *network.nsqds, *options.topics, options.pattern, options.channel)
    return os.path.join(base, "flintmq", "spool", hashlib.sha256("\n".join(who).encode()).hexdigest()[:16])


def _is_local_master() -> bool:
    """Does Spark run on this machine alone? Read from the command line of the JVM that started us; in doubt, no."""
    pid = os.getpid()
    for _ in range(8):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            # The second field is a name in parentheses that may hold spaces; the parent is the second behind it.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
        for number, word in enumerate(words):
            value = word.removeprefix(b"spark.master=") if word.startswith(b"spark.master=") else b""
            if word == b"--master" and number + 1 < len(words):
                value = words[number + 1]
            if value:
                return value == b"local" or value.startswith(b"local[")
        if pid <= 1:
            return False
    return False


# --- Filling it -------------------------------------------------------------------------------------------------------


class _Received(NamedTuple):
    """What came in one read, as columns."""

    feed: Feed
    connection: Connection
    shape: Shape
    node: str
    columns: tuple[int, int, Any, Any, Any, Any, Any, Any, Any]


class Spooler:
    """Consumes into a Spool, until it is closed or fails. ``check`` raises what went wrong."""

    def __init__(self, options: SourceOptions, spool: Spool) -> None:
        self.spool = spool
        self._options = options
        self._cluster = Cluster(options.network)
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._feeds: dict[tuple[str, str], Feed] = {}
        self._received: list[_Received] = []
        self._received_bytes = 0
        self._oldest = 0.0
        self._urgent = False
        self._held = False
        self._full = False
        self._closing = False
        self._failure: BaseException | None = None
        self._discovered = False
        self._problem = ""
        self._last_arrival = time.monotonic()
        # Of the writing thread alone.
        self._ids: dict[tuple[str, str, bytes], None] = {}
        self._next_discovery = 0.0
        self._thread = threading.Thread(target=self._run, name="nsq-spool", daemon=True)

    def start(self) -> None:
        for topic, node, id in self.spool.newest_ids(_REMEMBERED_IDS):
            self._ids[topic, node, id] = None
        self._full = self.spool.size > self._options.spool_max_bytes
        self._thread.start()

    def close(self) -> None:
        """What was received and not written goes back to the channel: it was not finished."""
        with self._changed:
            self._closing = True
            feeds = list(self._feeds.values())
            self._changed.notify_all()
        for feed in feeds:
            feed.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(10)
        self._cluster.close()

    def check(self) -> None:
        if self._failure is not None:
            raise SpoolError(f"the spool in {self.spool.folder} cannot be filled: {self._failure}") from self._failure

    def wait_connected(self, patience: float) -> None:
        """Wait until every broker was tried. ConnectError if none could be reached."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or (self._discovered and all(feed.tried for feed in self._feeds.values())),
                patience,
            )
            self.check()
            feeds = list(self._feeds.values())
            if self._problem and not feeds:
                raise ConnectError(self._problem)
            if feeds and not any(feed.connection for feed in feeds):
                raise ConnectError("; ".join(dict.fromkeys(feed.problem for feed in feeds if feed.problem)))

    def wait_idle(self, seconds: float, limit: float) -> None:
        """Wait until nothing has come for a while and nothing waits at the brokers, or until the limit; then hold.

        A full spool ends it too. Silence alone is not enough: a busy machine is silent for seconds.
        """
        give_up = time.monotonic() + limit
        end, silences = self.spool.end, 0
        while self._wait_for_silence(seconds, give_up) and (waiting := self._waiting()):
            end, silences = (end, silences + 1) if self.spool.end == end else (self.spool.end, 1)
            if silences == _MOST_SILENCES:
                logger.warning("%d messages wait in the channel and do not come: going on without them", waiting)
                break
        with self._changed:
            self._held = True
            self._share_ready()

    def _wait_for_silence(self, seconds: float, give_up: float) -> bool:
        """Return True after a silence, False if waiting for one makes no sense any more."""
        with self._changed:
            self._last_arrival = time.monotonic()
            while True:
                self.check()
                now = time.monotonic()
                if now >= give_up or self._full:
                    return False
                if now - self._last_arrival >= seconds and not self._received:
                    return True
                self._changed.wait(min(0.1, max(0.01, give_up - now)))

    def _waiting(self) -> int:
        """Messages that the brokers still have for the channel, as far as they can be asked over HTTP."""
        # A connection of its own: the writing thread uses the other one.
        cluster = Cluster(self._options.network)
        try:
            return cluster.waiting(self._options.channel or "", self._options.wants)
        except (FlintError, OSError) as exc:
            logger.info("what waits is not known now: %s", exc)
            return 0
        finally:
            cluster.close()

    def resume(self) -> None:
        with self._changed:
            self._held = False
            self._share_ready()

    def forget(self, upto: int) -> None:
        with self._changed:
            self.spool.forget(upto)
            if self._full and self.spool.size <= self._options.spool_max_bytes * 0.9:
                self._full = False
                self._share_ready()

    @property
    def is_full(self) -> bool:
        return self._full

    # What feeds call.

    def feed_changed(self) -> None:
        with self._changed:
            self._share_ready()
            self._changed.notify_all()

    def take(self, received: _Received) -> None:
        with self._changed:
            self._last_arrival = time.monotonic()
            if not self._received:
                self._oldest = self._last_arrival
            self._received.append(received)
            self._received_bytes += len(received.columns[8])
            feed = received.feed
            feed.unwritten += received.columns[0]
            # Half of what a broker may send is here: written now, the other half comes meanwhile.
            if 2 * feed.unwritten >= feed.ready or self._received_bytes >= _FLUSH_BYTES:
                self._urgent = True
            if self._urgent or len(self._received) == 1:
                self._changed.notify_all()

    def _share_ready(self) -> None:
        """Tell every broker how much it may send. Called with the lock held."""
        live = [feed for feed in self._feeds.values() if feed.connection is not None]
        stopped = self._held or self._full or self._closing
        for feed in live:
            feed.set_ready(0 if stopped else max(1, self._options.spool_in_flight // len(live)))

    # The writing thread.

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as exc:
            logger.error("the spool in %s cannot be filled: %s", self.spool.folder, exc)
            with self._changed:
                self._failure = exc
                self._closing = True
                feeds = list(self._feeds.values())
                self._changed.notify_all()
            for feed in feeds:
                feed.close()

    def _step(self) -> bool:
        if time.monotonic() >= self._next_discovery:
            self._discover()
        interval = self._options.spool_flush_interval
        with self._changed:
            while not self._closing and not self._urgent:
                now = time.monotonic()
                until = self._next_discovery
                if self._received:
                    until = min(until, self._oldest + interval)
                if now >= until:
                    break
                self._changed.wait(until - now)
            if self._closing:
                return False
            batch, self._received = self._received, []
            self._received_bytes = 0
            self._urgent = False
        if batch:
            self._write(batch)
        return True

    def _write(self, received: list[_Received]) -> None:
        """Into a file, synced; then, and only then, finished."""
        batches = []
        end = self.spool.end
        for item in received:
            batch = self._without_repeats(item, end)
            if batch is not None and batch.num_rows:
                batches.append(batch)
                end += batch.num_rows
        if batches:
            self.spool.append(batches)
        for item in received:
            item.feed.finish(item.connection, item.columns[6])
        with self._changed:
            for item in received:
                item.feed.unwritten -= item.columns[0]
            if not self._full and self.spool.size > self._options.spool_max_bytes:
                self._full = True
                logger.warning("the spool in %s is full: the channel waits until Spark has read on", self.spool.folder)
                self._share_ready()
            self._changed.notify_all()

    def _without_repeats(self, item: _Received, first: int) -> pa.RecordBatch | None:
        """The rows of an item, less those that are in the spool already."""
        rows, _, _, _, _, _, ids, _, _ = item.columns
        topic, node, known = item.feed.topic, item.node, self._ids
        keys = [(topic, node, bytes(ids[16 * row : 16 * row + 16])) for row in range(rows)]
        fresh = None
        # Attempts tell nothing here: a broker that was killed counts them from 1 again.
        if not known.keys().isdisjoint(keys):
            fresh = [row for row, key in enumerate(keys) if key not in known]
            logger.info("%s: %d messages came again and are in the spool already", topic, rows - len(fresh))
        known.update(dict.fromkeys(keys))
        while len(known) > _REMEMBERED_IDS:
            del known[next(iter(known))]
        if fresh is None:
            return item.shape.batch(item.columns, offsets=array("q", range(first, first + rows)), attempts=True)
        import pyarrow as pa

        left = item.shape.batch(item.columns, attempts=True).take(pa.array(fresh, pa.int64()))
        return left.set_column(3, "offset", pa.array(range(first, first + len(fresh)), pa.int64()))

    def _discover(self) -> None:
        """A feed for every topic on every broker. Who is gone is tried again by its feed as long as he is named."""
        self._next_discovery = time.monotonic() + _DISCOVERY_SECONDS
        try:
            wanted = self._wanted()
            self._problem = ""
        except (FlintError, OSError) as exc:
            self._problem = str(exc)
            logger.warning("who has the topics is not known now: %s", exc)
            with self._changed:
                self._discovered = True
                self._changed.notify_all()
            return
        with self._changed:
            new = [Feed(self, address, topic, self._options) for address, topic in wanted - self._feeds.keys()]
            gone = [feed for key, feed in self._feeds.items() if key not in wanted]
            for feed in gone:
                del self._feeds[feed.address, feed.topic]
            for feed in new:
                self._feeds[feed.address, feed.topic] = feed
            self._discovered = True
            self._changed.notify_all()
        for feed in gone:
            feed.close()
        for feed in new:
            feed.start()

    def _wanted(self) -> set[tuple[str, str]]:
        options = self._options
        if options.topics and not options.network.lookupds and options.network.nsqds:
            return {(address, topic) for address in options.network.nsqds for topic in options.topics}
        return {
            (broker.tcp, topic)
            for broker in self._cluster.brokers()
            for topic in self._cluster.topics(broker)
            if options.wants(topic)
        }


class Feed:
    """One topic on one broker: connects, again and again, and hands on what comes."""

    def __init__(self, spooler: Spooler, address: str, topic: str, options: SourceOptions) -> None:
        self.address = address
        self.topic = topic
        #: There, or None while there is none.
        self.connection: Connection | None = None
        #: Was it tried at least once, and what went wrong last?
        self.tried = False
        self.problem = ""
        #: The RDY that the broker was told, and what it sent that is not written yet; the spooler's.
        self.ready = 0
        self.unwritten = 0
        self._spooler = spooler
        self._options = options
        self._most_ready = 2500
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nsq-{topic}@{address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        connection = self.connection
        if connection is not None:
            connection.close()

    def set_ready(self, count: int) -> None:
        count = min(count, self._most_ready)
        if count != self.ready:
            self.ready = count
            self._send(self.connection, b"RDY %d\n" % count)

    def finish(self, connection: Connection, ids: Any) -> None:
        """On the connection they came by; one that is gone has given them back already."""
        if connection is self.connection:
            data = bytes(ids)
            self._send(connection, b"".join([b"FIN %b\n" % data[at : at + 16] for at in range(0, len(data), 16)]))

    def _send(self, connection: Connection | None, data: bytes) -> None:
        if connection is None:
            return
        with self._writing, contextlib.suppress(OSError):
            # The receiving side notices a lost connection.
            connection.send(data)

    def _run(self) -> None:
        pause = 0.25
        while not self._stop.is_set():
            connection = None
            try:
                connection = Connection(self.address, self._options.network, client_id="flintmq-spark-spool")
                connection.subscribe(self.topic, self._options.channel)
                connection.set_timeout(_SILENCE_SECONDS)
                self._most_ready = int(connection.features.get("max_rdy_count") or 2500)
                self._attach(connection)
                pause = 0.25
                self._receive(connection)
            except (FlintError, OSError, ValueError, zlib.error) as exc:
                self.problem = f"{self.topic} on nsqd {self.address}: {exc}"
                if not self._stop.is_set():
                    logger.warning("%s", self.problem)
            finally:
                self._detach()
                if connection is not None:
                    connection.close()
            self._stop.wait(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)

    def _attach(self, connection: Connection) -> None:
        self.ready = 0
        self.problem = ""
        self.connection = connection
        self.tried = True
        if self._stop.is_set():
            connection.close()
        self._spooler.feed_changed()

    def _detach(self) -> None:
        self.connection = None
        self.tried = True
        self._spooler.feed_changed()

    def _receive(self, connection: Connection) -> None:
        node = str(connection.flintmq.get("node") or self.address)
        rows = max(1, self._most_ready)
        shape = Shape(self.topic, node, rows)
        to_columns: Callable[..., Any] = frame_columns()
        buffer = bytearray(connection.leftover())
        while True:
            at = 0
            while True:
                columns = to_columns(buffer, at, len(buffer), rows, BATCH_BYTES)
                if columns[0]:
                    at = columns[1]
                    self._spooler.take(_Received(self, connection, shape, node, columns))
                    continue
                after = self._other_frame(connection, buffer, at)
                if after == at:
                    break
                at = after
            del buffer[:at]
            data = connection.receive()
            if not data:
                raise ConnectionError("the broker has closed the connection")
            buffer += data

    def _other_frame(self, connection: Connection, buffer: bytearray, at: int) -> int:
        """Heartbeats and errors; the position behind the frame, or the same where it is not whole."""
        if len(buffer) < at + 8:
            return at
        size, kind = unpack_from(">II", buffer, at)
        if len(buffer) < at + 4 + size or kind == 2:
            return at
        data = bytes(buffer[at + 8 : at + 4 + size])
        if kind == 0 and data == b"_heartbeat_":
            self._send(connection, b"NOP\n")
        elif kind == 1 and not data.startswith((b"E_FIN_FAILED", b"E_TOUCH_FAILED", b"E_REQ_FAILED")):
            raise ProtocolError(data.decode(errors="replace"))
        return int(at + 4 + size)
