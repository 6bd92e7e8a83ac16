"""Filling a spool: what a channel delivers is received, written, synced, and only then finished.

A Spooler fills a Spool in threads of its process: Feeds receive, several of a topic on a broker if much may be in
flight, and one thread writes and finishes. Works with any NSQ server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Mapping
from struct import unpack_from
from typing import TYPE_CHECKING, Any, NamedTuple

from flintmq.errors import ConnectError, FlintError, ProtocolError, SpoolError
from flintmq.spark.shipped.columns import BATCH_BYTES, Shape, frame_columns
from flintmq.spark.shipped.net import Cluster, Connection, Waiting
from flintmq.spark.shipped.options import SourceOptions
from flintmq.spark.spool_mode.spool import Source, Spool

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Spooler"]

logger = logging.getLogger("flintmq.spark")

#: How often lookupds are asked who has our topics.
_DISCOVERY_SECONDS = 15.0
#: A broker that is silent for longer is gone; heartbeats come every 30 s.
_SILENCE_SECONDS = 75.0
_LONGEST_PAUSE = 15.0
#: The newest ids, to know a message that is delivered again although it was spooled. Most repeats come at once, or
#: after a message timeout.
_REMEMBERED_IDS = 100_000
#: So much received and unwritten is written at once; with so much, feeds wait and brokers with them.
_FLUSH_BYTES = 8 << 20
_MOST_BYTES = 32 << 20
#: The RDY that brokers let a connection have unless they are told otherwise. Who may take more takes more connections.
_USUAL_READY = 2500
_MOST_CONNECTIONS = 8


class _Received(NamedTuple):
    """What came in one read, as columns."""

    feed: Feed
    connection: Connection
    shape: Shape
    node: str
    columns: tuple[int, int, Any, Any, Any, Any, Any, Any, Any]


class _Newest:
    """The newest ids, between ``count`` and twice as many of them. Ids of a topic and node are one behind the other."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers: dict[Source, bytes] = {}
        # Python's dicts are slow to forget their oldest entry: these forget half of all at once.
        self._new: dict[bytes, None] = {}
        self._old: dict[bytes, None] = {}

    def _keys(self, source: Source, ids: bytes) -> list[bytes]:
        number = self._numbers.setdefault(source, len(self._numbers).to_bytes(4, "big"))
        return [number + ids[at : at + 16] for at in range(0, len(ids), 16)]

    def fresh(self, source: Source, ids: bytes) -> list[int] | None:
        """Which of these are not known, by their number; None: all of them.

        One that is there twice, as after a timeout while nobody read, counts once.
        """
        keys = self._keys(source, ids)
        new, old = self._new, self._old
        # By key, the first row that has it.
        first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        if len(first) == len(keys) and new.keys().isdisjoint(keys) and old.keys().isdisjoint(keys):
            return None
        return sorted(row for key, row in first.items() if key not in new and key not in old)

    def add(self, source: Source, ids: bytes) -> None:
        if len(self._new) >= self._count:
            self._old, self._new = self._new, {}
        self._new.update(dict.fromkeys(self._keys(source, ids)))


class Spooler:
    """Consumes into a Spool, until it is closed or fails. ``check`` raises what went wrong."""

    def __init__(self, options: SourceOptions, spool: Spool) -> None:
        self.spool = spool
        #: What brokers know our connections by: theirs alone, so that messages in flight to us can be told from others.
        self.client_id = f"flintmq-spark-spool-{os.urandom(4).hex()}"
        self._options = options
        self._cluster = Cluster(options.network)
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._feeds: dict[tuple[str, str, int], Feed] = {}
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
        self._known = _Newest(_REMEMBERED_IDS)
        self._next_discovery = 0.0
        # TCP addresses by the HTTP addresses of brokers that were found; only the writing thread assigns.
        self._sides: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="nsq-spool", daemon=True)

    def start(self) -> None:
        for source, ids in self.spool.newest_ids(_REMEMBERED_IDS):
            self._known.add(source, ids)
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
                problems = dict.fromkeys(feed.problem for feed in feeds if feed.problem)
                raise ConnectError("; ".join(problems) or f"no broker took a connection in {patience:g} s")

    def wait_idle(self, seconds: float, limit: float) -> None:
        """Wait until nothing has come for a while and no broker has messages for us, or until the limit; then hold.

        A full spool ends it too. Silence alone is not enough: a busy machine is silent for seconds. ConnectError if a
        broker that we are connected to does not say what waits, or what waits does not come, for the network's timeout.
        """
        give_up = time.monotonic() + limit
        end, since = self.spool.end, time.monotonic()
        while self._wait_for_silence(seconds, give_up):
            waiting, silent = self._waiting()
            if not waiting and not silent:
                break
            if self.spool.end != end:
                end, since = self.spool.end, time.monotonic()
            elif time.monotonic() - since >= self._options.network.timeout and self._is_over(waiting, silent):
                break
        with self._changed:
            self._held = True
            self._share_ready()

    def _is_over(self, waiting: int, silent: Mapping[str, str]) -> bool:
        """Nothing has come for too long: return True if only brokers that are away have messages, or raise."""
        channel, seconds = self._options.channel, self._options.network.timeout
        if waiting:
            raise ConnectError(
                f"{waiting} messages wait in channel {channel} and did not come for {seconds:g} s: start the query "
                "again, or pause the channel if they are to stay there"
            )
        with self._changed:
            connected = {feed.address for feed in self._feeds.values() if feed.connection is not None}
        for address, why in silent.items():
            if not address or self._sides.get(address, address) in connected:
                raise ConnectError(
                    f"nobody knows whether channel {channel} has more messages, for {seconds:g} s: {why}. Start the "
                    "query again when its HTTP side answers, or raise fetch.timeoutMs"
                )
            logger.warning("%s is away, and what waits there stays: %s", address, why)
        return True

    def _wait_for_silence(self, seconds: float, give_up: float) -> bool:
        """Return True after a silence, False if waiting for one makes no sense any more."""
        with self._changed:
            self._last_arrival = time.monotonic()
            while True:
                self.check()
                now = time.monotonic()
                if now >= give_up or self._full:
                    return False
                # A slow disk is silent, too, while it writes what came.
                is_written = not self._received and not any(feed.unwritten for feed in self._feeds.values())
                if now - self._last_arrival >= seconds and is_written:
                    return True
                self._changed.wait(min(0.1, max(0.01, give_up - now)))

    def _waiting(self) -> Waiting:
        """Return what the brokers still have for us, as far as they can be asked over HTTP."""
        # A connection of its own: the writing thread uses the other one.
        cluster = Cluster(self._options.network)
        try:
            return cluster.waiting(self._options.channel or "", self._options.wants, self.client_id)
        except (FlintError, OSError) as exc:
            logger.info("what waits is not known now: %s", exc)
            return Waiting(0, {"": str(exc)})
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
            self._changed.wait_for(lambda: self._received_bytes < _MOST_BYTES or self._closing)
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
            self._changed.notify_all()
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
        rows, ids = item.columns[0], bytes(item.columns[6])
        source = (item.feed.topic, item.node)
        # Attempts tell nothing here: a broker that was killed counts them from 1 again.
        fresh = self._known.fresh(source, ids)
        self._known.add(source, ids)
        if fresh is None:
            return item.shape.batch(item.columns, offsets=array("q", range(first, first + rows)), attempts=True)
        import pyarrow as pa

        logger.info("%s: %d messages came again and are in the spool already", item.feed.topic, rows - len(fresh))
        left = item.shape.batch(item.columns, attempts=True).take(pa.array(fresh, pa.int64()))
        return left.set_column(3, "offset", pa.array(range(first, first + len(fresh)), pa.int64()))

    def _discover(self) -> None:
        """Feeds for every topic on every broker. Who is gone is tried again by its feeds as long as he is named."""
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
        connections = -(-self._options.spool_in_flight // (_USUAL_READY * max(1, len(wanted))))
        numbers = range(min(connections, _MOST_CONNECTIONS))
        with self._changed:
            keys = {(address, topic, number) for address, topic in wanted for number in numbers}
            new = {key: Feed(self, key[0], key[1], self._options) for key in keys - self._feeds.keys()}
            # With more brokers than before each needs fewer connections, but what is in flight on those stays there.
            gone = {key: feed for key, feed in self._feeds.items() if key[:2] not in wanted}
            for key in gone:
                del self._feeds[key]
            self._feeds |= new
            self._discovered = True
            self._changed.notify_all()
        for feed in gone.values():
            feed.close()
        for feed in new.values():
            feed.start()

    def _wanted(self) -> set[tuple[str, str]]:
        options = self._options
        if options.topics and not options.network.lookupds and options.network.nsqds:
            return {(address, topic) for address in options.network.nsqds for topic in options.topics}
        brokers = self._cluster.brokers()
        self._sides = {broker.http: broker.tcp for broker in brokers}
        return {
            (broker.tcp, topic) for broker in brokers for topic in self._cluster.topics(broker) if options.wants(topic)
        }


class Feed:
    """A connection for one topic on one broker: connects, again and again, and hands on what comes."""

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
                connection = Connection(self.address, self._options.network, client_id=self._spooler.client_id)
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
