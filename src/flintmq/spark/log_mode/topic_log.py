"""Log mode: ranges of a topic's log, planned by the driver and fetched by executors.

A Planner lives in the driver's process of a query (or plans one batch read): it knows which brokers have which topics,
how far their logs are durable, and where the query stands; it keeps a reader position at each broker, so that
nothing is removed before it was read. ``fetch`` reads one range on an executor. Only what is durable is ever offered:
the same offsets are the same rows, always.

Size: a range is planned and fetched by the same rules of what is lost and what is waited for, which are read together.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from flintmq.errors import ConnectError, DataLossError, HttpError, OptionError
from flintmq.spark.log_mode.index import Index
from flintmq.spark.shipped.columns import BATCH_BYTES, COLUMNS, Shape, frame_columns
from flintmq.spark.shipped.net import Broker, Cluster, Refused, Web
from flintmq.spark.shipped.offsets import Key, Mark, Marks, Offset, Range, cut, log_offset, ranges_between, share
from flintmq.spark.shipped.options import SourceOptions, Start
from flintmq.spark.shipped.where import chosen

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Limits", "Planner", "fetch", "reads_from"]

logger = logging.getLogger("flintmq.spark")

#: Who has which topics is asked again after so long; a broker that did not answer is left alone for so long.
_DISCOVERY_SECONDS = 10.0
_DOWN_SECONDS = 3.0
#: Spark asks every few milliseconds whether there is news: brokers are asked less often.
_FRESH_SECONDS = 0.1
#: A reader position that does not move for days is given up: an idle query says so often that it is still there.
_ALIVE_SECONDS = 3600.0
#: Brokers give up the position of a reader with such a name within five minutes: it says more often that it is there.
_TEMPORARY = "temporary:"
_TEMPORARY_ALIVE_SECONDS = 60.0
#: What was published becomes durable within --sync-timeout (2 s by default): so long a read waits for it.
_DURABLE_SECONDS = 10.0
#: A small question is answered soon or never; one silent broker must not hold up the others.
_QUESTION_SECONDS = 5.0
_FETCH_BYTES = 16 << 20
#: Times as much is asked for without bodies: brokers count as if they were there.
_BARE_FETCH = 8
#: What the index tells of a range that has no gaps: if only these are wanted, no message is fetched.
_BY_INDEX = frozenset({"offset", "topic", "node"})
_READ_BYTES = 4 << 20
_MOST_READ_BYTES = 64 << 20
_FRAME_HEAD = 34


class Info(NamedTuple):
    """What a broker says of a topic's log."""

    topic: str
    node: str
    address: str
    epoch: str
    first: int
    durable: int
    end: int
    messages: int
    bytes: int

    @property
    def key(self) -> Key:
        return self.topic, self.node

    @property
    def mean_bytes(self) -> float:
        return self.bytes / self.messages if self.messages else 0.0


class Limits(NamedTuple):
    """What one micro-batch may hold; 0 is "no limit"."""

    rows: int = 0
    bytes: int = 0
    least: int = 0


class Planner:
    """Where the logs stand, and what to read next."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        timeout = min(_QUESTION_SECONDS, options.network.timeout)
        self._web = Web(options.network, timeout)
        self._cluster = Cluster(options.network, self._web, timeout)
        # Brokers by node, and the topics of each.
        self._brokers: dict[str, Broker] = {}
        self._topics: dict[str, list[str]] = {}
        self._down: dict[str, float] = {}
        self._next_discovery = 0.0
        # What they said last.
        self._infos: dict[Key, Info] = {}
        self._asked = 0.0
        # The query.
        self._initial: Offset | None = None
        self._target: Marks | None = None
        self._last_batch = time.monotonic()
        # Reader positions: where each was set to last; those nobody needs if no batch was ever planned.
        self._reader = options.reader_name
        if options.temporary_reader:
            self._reader = f"{_TEMPORARY}{self._reader or _new_name()}"
        self._alive: _Alive | None = None
        self._positions: dict[Key, int] = {}
        self._told: dict[Key, float] = {}
        self._made: set[Key] = set()
        self._planned = False
        # What was planned on nodes that are gone, and is not read.
        self._given_up: set[Range] = set()

    # --- A stream -----------------------------------------------------------------------------------------------------

    def initial_offset(self) -> dict[str, Any]:
        """Where a new query begins. Asked twice, the answer is the same, whatever was published in between."""
        if self._initial is None:
            self._reader = self._reader or _new_name()
            start = self._options.starting or Start("latest")
            marks = {}
            for info in self.observe(strict=start.kind == "offsets").values():
                # Where the first message is may change until it is held, so the broker says where that was.
                seq = None if start.kind == "earliest" else self._place(info, start, "startingOffsets")
                marks[info.key] = Mark(info.epoch, self._hold(info, seq))
            self._check_named(start, "startingOffsets")
            self._initial = Offset(marks, dict(marks), self._reader)
        return self._initial.to_json()

    def fix_target(self) -> None:
        """From now on nothing newer than this is offered (trigger AvailableNow)."""
        if self._target is None:
            self._target = {key: Mark(info.epoch, info.durable) for key, info in self._observe_durable().items()}

    def latest_offset(self, start: dict[str, Any], limits: Limits | None) -> dict[str, Any]:
        """How far the next batch goes; ``start`` itself if there is nothing new. No limits: all there is."""
        offset = log_offset(start)
        self._reader = self._reader or offset.reader
        infos = self.observe()
        begins: Marks = {}
        stops: dict[Key, int] = {}
        for key, info in infos.items():
            stop = info.durable
            if self._target is not None:
                target = self._target.get(key)
                if target is None or target.epoch != info.epoch:
                    continue
                stop = min(stop, target.seq)
            try:
                begin = self._begin(info, offset.marks.get(key))
                self._stay_alive(info)
            except ConnectError as exc:
                self._stands_still(info.node, exc)
                continue
            if begin.seq < stop:
                begins[key], stops[key] = begin, stop
        available = {key: stops[key] - begin.seq for key, begin in begins.items()}
        if limits is not None and self._target is None and self._must_wait(sum(available.values()), limits):
            return start
        if limits is not None and (limits.rows or limits.bytes):
            available, begins = self._limit(infos, begins, stops, available, limits)
        if not any(available.values()):
            return start
        marks = dict(offset.marks)
        # In the first batch nothing but its end says where it began.
        init = dict(offset.marks) if offset.init == offset.marks else {}
        for key, count in available.items():
            if count:
                if begins[key] != offset.marks.get(key):
                    init[key] = begins[key]
                marks[key] = Mark(begins[key].epoch, begins[key].seq + count)
        self._last_batch = time.monotonic()
        return Offset(marks, init, self._reader).to_json()

    @property
    def reader(self) -> str:
        return self._reader

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[Range, str]]:
        """The ranges between two offsets, each with the address of its node.

        With failOnDataLoss=false those of nodes that are gone are left out, counted and logged.
        """
        self._planned = True
        stop = log_offset(end)
        self._reader = self._reader or stop.reader
        whole = ranges_between(log_offset(start), stop)
        if not self._options.fail_on_data_loss:
            whole = self._without_gone_nodes(whole)
        ranges = cut(whole, self._options.min_partitions, self._options.max_records)
        return [(found, self._address(found)) for found in ranges]

    def _without_gone_nodes(self, ranges: list[Range]) -> list[Range]:
        gone: dict[str, ConnectError] = {}
        for found in ranges:
            if found.node not in gone:
                try:
                    self._address(found)
                except ConnectError as exc:
                    gone[found.node] = exc
        for found in ranges:
            if found.node in gone and found not in self._given_up:
                self._given_up.add(found)
                logger.warning(
                    "node %s is gone: messages %d to %d of %s there are given up because of failOnDataLoss=false; "
                    "%d messages at most so far",
                    found.node,
                    found.first,
                    found.stop - 1,
                    found.topic,
                    self._count_given_up(),
                )
        return [found for found in ranges if found.node not in gone]

    def _count_given_up(self) -> int:
        return sum(found.size for found in self._given_up)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark will not ask for anything before this again: the brokers may let it go."""
        offset = log_offset(end)
        self._reader = self._reader or offset.reader
        for key, mark in offset.marks.items():
            broker = self._brokers.get(key[1])
            if broker is None or self._positions.get(key, -1) >= mark.seq:
                continue
            try:
                self._post_position(key, broker.http, mark.seq)
            except ConnectError as exc:
                # It only keeps files for longer: the next commit moves it on.
                logger.warning("the reader position of %s on node %s was not moved: %s", *key, exc)

    def report(self) -> dict[str, Any] | None:
        """The newest of everything, for the query's progress."""
        if not self._infos:
            return None
        newest = Offset({key: Mark(info.epoch, info.durable) for key, info in self._infos.items()}, {}).to_json()
        # Sources have no metrics of their own in the progress.
        return {**newest, "given_up": self._count_given_up()} if self._given_up else newest

    def close(self) -> None:
        if self._alive is not None:
            self._alive.close()
            self._alive = None
        unneeded: set[Key] = set()
        if self._options.temporary_reader:
            unneeded = set(self._positions)
        elif not self._planned and not self._options.reader_name:
            # No batch was written down: the next start makes a new reader, and nobody would move this one.
            unneeded = self._made
        for key in unneeded:
            broker = self._brokers.get(key[1])
            if broker is not None:
                try:
                    self._web.ask("DELETE", broker.http, "/log/position", topic=key[0], reader=self._reader)
                except (ConnectError, HttpError) as exc:
                    logger.info("the reader position of %s on node %s stays until it expires: %s", *key, exc)
        self._made.clear()
        self._positions.clear()
        self._web.close()

    # --- A batch ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[tuple[Range, str]]:
        """What a batch read reads; asks, and changes nothing anywhere. Everybody must answer, or it is no snapshot."""
        options = self._options
        infos = self._observe_durable(strict=options.fail_on_data_loss)
        if missing := set(options.topics) - {topic for topic, _ in infos}:
            who = ", ".join(sorted(broker.http for broker in self._brokers.values()))
            raise OptionError(f"no broker has the topic {', '.join(sorted(missing))}; asked were {who}")
        ranges = []
        starting, ending = options.starting or Start("earliest"), options.ending or Start("latest")
        for key, info in sorted(infos.items()):
            first = self._place(info, starting, "startingOffsets")
            stop = self._place(info, ending, "endingOffsets", missing=info.durable)
            if stop > info.durable:
                raise OptionError(
                    f"endingOffsets: {key[0]} on node {key[1]} ends at {info.durable}, and {stop} was asked for"
                )
            if first < stop:
                ranges.append(Range(*key, info.epoch, first, stop))
        self._check_named(starting, "startingOffsets")
        self._check_named(ending, "endingOffsets")
        if options.where is not None:
            index = Index(self._web)
            ranges = [
                piece
                for found in ranges
                for piece in index.within(found, self._address(found), options.where.boxes(found.topic, found.node))
            ]
        return [(found, self._address(found)) for found in cut(ranges, options.min_partitions, options.max_records)]

    # --- Who is there, and how far ------------------------------------------------------------------------------------

    def observe(self, strict: bool = False) -> dict[Key, Info]:
        """The logs of all topics on all brokers that answer; with ``strict`` everybody must."""
        now = time.monotonic()
        if not strict and self._infos and now - self._asked < _FRESH_SECONDS:
            return self._infos
        if now >= self._next_discovery:
            self._discover(strict)
        infos: dict[Key, Info] = {}
        for node, broker in self._brokers.items():
            if not strict and self._down.get(node, 0.0) > now:
                continue
            try:
                for topic in self._topics.get(node, ()):
                    info = self._info(broker, topic)
                    if info is not None:
                        infos[info.key] = info
            except ConnectError as exc:
                if strict:
                    raise
                self._stands_still(node, exc)
        self._infos = infos
        self._asked = time.monotonic()
        return infos

    def _observe_durable(self, strict: bool = False) -> dict[Key, Info]:
        """The logs, once all is durable that they hold now: who has just published something expects to read it."""
        infos = self.observe(strict)
        ends = {(key, info.epoch): info.end for key, info in infos.items()}
        give_up = time.monotonic() + _DURABLE_SECONDS
        while waiting := [info for key, info in infos.items() if info.durable < ends.get((key, info.epoch), 0)]:
            if time.monotonic() >= give_up:
                logger.warning("%s on node %s has newer messages, not durable yet", waiting[0].topic, waiting[0].node)
                break
            time.sleep(_FRESH_SECONDS)
            infos = self.observe(strict)
        return infos

    def _stands_still(self, node: str, exc: ConnectError) -> None:
        """A node does not answer: its messages have to wait, the others go on."""
        logger.warning("node %s does not answer, its messages have to wait: %s", node, exc)
        self._down[node] = time.monotonic() + _DOWN_SECONDS
        # It may have moved.
        self._next_discovery = min(self._next_discovery, self._down[node])

    def _discover(self, strict: bool) -> None:
        self._next_discovery = time.monotonic() + _DISCOVERY_SECONDS
        try:
            brokers = self._cluster.brokers(strict)
        except ConnectError as exc:
            if strict or not self._brokers:
                raise
            logger.warning("no broker answers now, everything has to wait: %s", exc)
            self._next_discovery = time.monotonic() + _DOWN_SECONDS
            return
        for broker in brokers:
            if not broker.has_log:
                if self._options.network.lookupds and not reads_from(self._options, broker):
                    # It was found, not named, and has nothing that is read.
                    continue
                raise OptionError(
                    f"nsqd {broker.tcp or broker.http} keeps no log that can be read by offsets: set mode=spool and a "
                    "channel for a stream, or read a batch by flintmq.spark.drain()"
                )
            self._brokers[broker.node] = broker
            self._down.pop(broker.node, None)
            topics = list(self._options.topics)
            try:
                self._topics[broker.node] = topics or [
                    topic for topic in self._cluster.topics(broker) if self._options.wants(topic)
                ]
            except ConnectError as exc:
                if strict:
                    raise
                self._stands_still(broker.node, exc)

    def _info(self, broker: Broker, topic: str) -> Info | None:
        try:
            said = self._web.ask("GET", broker.http, "/log/info", topic=topic)
        except Refused as exc:
            if exc.status == 404:
                return None
            if exc.code == "NO_LOG":
                if topic in self._options.topics:
                    raise OptionError(f"{topic} on {broker.http} cannot be read by offsets: {exc.reason}") from exc
                logger.warning("%s on %s is left out: %s", topic, broker.http, exc.reason)
                return None
            if exc.status in (401, 403):
                raise OptionError(
                    f"{broker.http} refuses to tell about its logs: nsq.http.token needs the right read"
                ) from exc
            raise ConnectError(f"{broker.http} answers {exc}") from exc
        node = str(said["node"])
        if node != broker.node:
            raise ConnectError(f"{broker.http} is now another node")
        return Info(
            topic,
            node,
            broker.http,
            str(said["epoch"]),
            int(said["first"]),
            int(said["durable"]),
            int(said["end"]),
            int(said.get("messages") or 0),
            int(said.get("bytes") or 0),
        )

    def _address(self, found: Range) -> str:
        """Where a node is; waited for, since a batch that was written down can be read nowhere else."""
        give_up = time.monotonic() + self._options.network.timeout
        while found.node not in self._brokers:
            try:
                self._discover(strict=False)
            except ConnectError as exc:
                logger.warning("%s", exc)
            if found.node in self._brokers:
                break
            if time.monotonic() >= give_up:
                raise ConnectError(
                    f"node {found.node}, which has messages {found.first} to {found.stop - 1} of {found.topic}, is not "
                    "there: start it, and the query goes on where it stopped; if it is gone for good, "
                    "failOnDataLoss=false goes on without them"
                )
            time.sleep(0.5)
        return self._brokers[found.node].http

    # --- Where to begin -----------------------------------------------------------------------------------------------

    def _begin(self, info: Info, mark: Mark | None) -> Mark:
        """Where reading of a log goes on; where it begins, if it is new to the query."""
        if mark is None:
            # A topic that appeared while the query runs is read from its first message on.
            if info.key not in self._positions:
                return Mark(info.epoch, self._hold(info, None))
            return Mark(info.epoch, max(info.first, self._positions[info.key]))
        if mark.epoch != info.epoch:
            self._lost(info, f"{info.topic} on node {info.node} was deleted and made anew")
            return Mark(info.epoch, self._hold(info, None))
        if mark.seq > info.end:
            # A log never ends before what was durable in it.
            self._gone_back(info, mark.seq)
            return Mark(info.epoch, self._hold(info, None))
        if info.key not in self._positions:
            self._resume(info, mark.seq)
        if mark.seq < info.first:
            if not nothing_lost(self._web, info.address, info.topic, self._reader, mark.seq):
                self._lost(
                    info, f"messages {mark.seq} to {info.first - 1} of {info.topic} on node {info.node} are gone"
                )
            return Mark(info.epoch, self._hold(info, None))
        return mark

    def _lost(self, info: Info, what: str) -> None:
        text = (
            f"{what} before they were read: to go on with what is there, set failOnDataLoss=false; to keep files for "
            "as long as a query may be down, set retain-age or retain-bytes of the topic"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(text, topic=info.topic, node=info.node)
        logger.warning("%s", text)

    def _gone_back(self, info: Info, seq: int) -> None:
        text = (
            f"{info.topic} on node {info.node} was read up to {seq} and ends at {info.end}: its broker runs on an "
            "older copy of its data path, and new messages have numbers that others had. Restore backups by flintmq "
            "restore; failOnDataLoss=false reads all that is there, some of it for the second time"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(text, topic=info.topic, node=info.node)
        logger.warning("%s", text)

    def _place(self, info: Info, start: Start, name: str, missing: int | None = None) -> int:
        """The seq that an option means for a log."""
        if start.kind == "earliest":
            return info.first
        if start.kind == "latest":
            return info.durable
        if start.kind == "time":
            said = self._ask(info, "GET", "/log/offset", topic=info.topic, time=start.time)
            return max(info.first, min(int(said["offset"]), info.durable))
        given = (start.offsets or {}).get(info.topic, {}).get(info.node)
        if given is None:
            return info.first if missing is None else missing
        if given in (-1, -2):
            return info.durable if given == -1 else info.first
        if given < info.first and name == "startingOffsets":
            self._lost(info, f"messages {given} to {info.first - 1} of {info.topic} on node {info.node} are gone")
            return info.first
        return given

    def _check_named(self, start: Start, name: str) -> None:
        for topic, nodes in (start.offsets or {}).items():
            for node in nodes:
                if (topic, node) not in self._infos:
                    raise OptionError(f"{name} names {topic} on node {node}, and no broker that answers has it")

    def _must_wait(self, available: int, limits: Limits) -> bool:
        if not limits.least or available >= limits.least:
            return False
        return time.monotonic() - self._last_batch < self._options.max_delay

    def _limit(
        self,
        infos: dict[Key, Info],
        begins: Marks,
        stops: dict[Key, int],
        available: dict[Key, int],
        limits: Limits,
    ) -> tuple[dict[Key, int], Marks]:
        """Take no more than a batch may hold, from each its part."""
        begins = dict(begins)
        parts = share(available, limits.rows) if limits.rows else dict(available)
        if limits.bytes:
            parts = self._limit_bytes(infos, parts, limits.bytes)
        for key, count in parts.items():
            info = infos[key]
            if 0 < count < available[key] and info.durable - info.first > info.messages:
                # Numbers are missing somewhere, many after a crash of the broker. A batch of them would be empty, so
                # it begins at the next message that there is.
                seq = self._next_message(info, begins[key].seq)
                begins[key] = begins[key]._replace(seq=seq)
                parts[key] = min(count, stops[key] - seq)
        return parts, begins

    def _limit_bytes(self, infos: dict[Key, Info], parts: dict[Key, int], limit: int) -> dict[Key, int]:
        expected = sum(count * infos[key].mean_bytes for key, count in parts.items())
        if expected <= limit:
            return parts
        rows = max(1, int(sum(parts.values()) * limit / expected))
        return share(parts, rows)

    def _next_message(self, info: Info, seq: int) -> int:
        """The number of the first message from ``seq`` on."""
        try:
            response = self._web.request(
                "GET",
                info.address,
                "/log/fetch",
                topic=info.topic,
                to=info.durable,
                epoch=info.epoch,
                max_bytes=1,
                **{"from": seq},
            )
            head = response.read(_FRAME_HEAD)
        except (OSError, http.client.HTTPException, ConnectError, HttpError) as exc:
            logger.info("what follows %d of %s is not known: %s", seq, info.topic, exc)
            return seq
        finally:
            # The rest is nobody's.
            self._web.drop(info.address)
        if len(head) < _FRAME_HEAD:
            return info.durable
        return max(seq, int(head[18:], 16) & ((1 << 54) - 1))

    # --- Reader positions ---------------------------------------------------------------------------------------------

    def _hold(self, info: Info, seq: int | None) -> int:
        """Have a broker keep everything from here on (None: from the first there is); from where it does."""
        said = self._post_position(info.key, info.address, "earliest" if seq is None else seq)
        self._made.add(info.key)
        return int(said["offset"]) if seq is None else seq

    def _resume(self, info: Info, seq: int) -> None:
        """A query goes on: its position should still be there."""
        if not self._reader:
            return
        try:
            said = self._web.ask("GET", info.address, "/log/position", topic=info.topic, reader=self._reader)
            self._positions[info.key] = int(said["offset"])
        except Refused as exc:
            if exc.status != 404:
                raise ConnectError(f"{info.address} answers {exc}") from exc
            logger.warning("the reader position of %s on node %s had expired", info.topic, info.node)
            if seq >= info.first:
                self._post_position(info.key, info.address, seq)

    def _stay_alive(self, info: Info) -> None:
        if self._options.temporary_reader:
            return  # a thread does it, also during a batch
        at = self._positions.get(info.key)
        if at is not None and time.monotonic() - self._told.get(info.key, 0.0) > _ALIVE_SECONDS:
            self._post_position(info.key, info.address, max(at, info.first))

    def _post_position(self, key: Key, address: str, to: int | str) -> dict[str, Any]:
        try:
            said = self._web.ask("POST", address, "/log/position", topic=key[0], reader=self._reader, to=to)
        except Refused as exc:
            if exc.status in (401, 403):
                raise OptionError(f"{address} refuses to keep a reader position: nsq.http.token needs admin") from exc
            raise ConnectError(f"{address} answers {exc.reason} when a reader position is to be set") from exc
        self._positions[key] = int(said["offset"])
        self._told[key] = time.monotonic()
        if self._options.temporary_reader:
            self._alive = self._alive or _Alive(self._options, self._reader)
            self._alive.positions[key] = (address, self._positions[key])
        return said

    def _ask(self, info: Info, method: str, path: str, **query: object) -> dict[str, Any]:
        try:
            return self._web.ask(method, info.address, path, **query)
        except Refused as exc:
            raise ConnectError(f"{info.address} answers {exc} to {path}") from exc


class _Alive:
    """A thread that tells brokers the positions of a temporary reader again and again, until it is closed.

    Spark asks a source nothing while a batch runs, and a batch may take longer than such positions last.
    """

    def __init__(self, options: SourceOptions, reader: str) -> None:
        #: Where each position was set to last, and at which address; the planner's.
        self.positions: dict[Key, tuple[str, int]] = {}
        self._options = options
        self._reader = reader
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nsq-alive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(2 * _QUESTION_SECONDS)

    def _run(self) -> None:
        web = Web(self._options.network, min(_QUESTION_SECONDS, self._options.network.timeout))
        while not self._ended.wait(_TEMPORARY_ALIVE_SECONDS):
            for key, (address, at) in list(self.positions.items()):
                if self._ended.is_set():
                    break
                try:
                    web.ask("POST", address, "/log/position", topic=key[0], reader=self._reader, to=at)
                except (ConnectError, HttpError) as exc:
                    logger.info("the reader position of %s on node %s was not kept alive: %s", *key, exc)
        web.close()


def _new_name() -> str:
    return f"spark-{os.urandom(6).hex()}"


def reads_from(options: SourceOptions, broker: Broker) -> bool:
    """Has a broker that a lookupd told us of a topic that is read?"""
    return any(options.wants(topic) for topic in broker.topics)


def nothing_lost(web: Web, address: str, topic: str, reader: str, seq: int) -> bool:
    """A log that begins behind ``seq``: are there just no messages in between, as after a crash of the broker?

    That is certain while a reader position stands there: it would have kept them.
    """
    if not reader:
        return False
    try:
        said = web.ask("GET", address, "/log/position", topic=topic, reader=reader)
    except Refused:
        return False
    return int(said["offset"]) <= seq


# --- On an executor ---------------------------------------------------------------------------------------------------


def fetch(found: Range, address: str, options: SourceOptions, reader: str = "") -> Iterator[pa.RecordBatch]:
    """The messages of a range, in order. A lost connection is made again, and reading goes on where it stopped."""
    web = Web(options.network)
    where = options.where and options.where.at(found.topic, found.node)
    wanted = frozenset(COLUMNS) if options.columns is None else options.columns
    needed = wanted | where.columns if where is not None else wanted
    shape = Shape(found.topic, found.node, options.batch_rows, needed)
    # Brokers that do not know this send bodies, and nobody looks at them.
    leave_out = {} if "value" in wanted else {"bodies": "false"}
    most = _FETCH_BYTES * _BARE_FETCH if leave_out else _FETCH_BYTES
    to_columns = frame_columns()
    at = found.first
    failures = 0
    try:
        if needed <= _BY_INDEX and _is_whole(found, address, web):
            for batch in _numbered(found, shape, options.batch_rows):
                yield from chosen(batch, where, wanted)
            return
        while at < found.stop:
            begin = at
            try:
                response = web.request(
                    "GET",
                    address,
                    "/log/fetch",
                    topic=found.topic,
                    to=found.stop,
                    epoch=found.epoch,
                    max_bytes=most,
                    **{"from": at},
                    **leave_out,
                )
                if response.headers.get("X-Flintmq-Node") != found.node:
                    raise ConnectError(f"{address} is now another node than {found.node}")
                after = int(response.headers["X-Flintmq-Next"])
                for last, batch in _batches(response, found, shape, to_columns, options.batch_rows):
                    at = last + 1
                    failures = 0
                    yield from chosen(batch, where, wanted)
                if not max(at, begin + 1) <= after <= found.stop:
                    raise ConnectError(f"{address} says that {found.topic} goes on at {after} after {at}")
                at = after
            except Refused as exc:
                if (
                    exc.status in (429, 500, 502, 503, 504, 416)
                    and exc.code != "DAMAGED"
                    and failures < options.network.retries
                ):
                    failures += 1
                    time.sleep(_pause(failures))
                    continue
                if exc.status == 410 and nothing_lost(web, address, found.topic, reader, at):
                    at = max(at, min(found.stop, int(exc.details["first"])))
                else:
                    at = _refused(exc, found, at, address, options)
            except (OSError, http.client.HTTPException, ConnectError) as exc:
                web.drop(address)
                failures += 1
                if failures > options.network.retries:
                    raise ConnectError(
                        f"messages {at} to {found.stop - 1} of {found.topic} could not be fetched from {address} (node "
                        f"{found.node}) in {failures} tries: {exc}"
                    ) from exc
                time.sleep(_pause(failures))
    finally:
        web.close()


def _is_whole(found: Range, address: str, web: Web) -> bool:
    """Is there a message at each offset of a range, by the index of its broker?"""
    try:
        return Index(web).messages(found, address) == found.size
    except (OSError, http.client.HTTPException, ConnectError):
        # Reading tries again, and says what is wrong.
        web.drop(address)
        return False


def _numbered(found: Range, shape: Shape, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of a range of which nothing is wanted that its messages would have to tell."""
    import pyarrow as pa
    import pyarrow.compute as compute

    steps = pa.array(range(min(batch_rows, found.size)), pa.int64())
    for first in range(found.first, found.stop, batch_rows):
        seqs = compute.add(steps.slice(0, min(batch_rows, found.stop - first)), first)
        yield shape.batch((len(seqs), 0, seqs.buffers()[1], None, None, None, None, None, None))


def _pause(failures: int) -> float:
    return float(min(5.0, 0.1 * 2**failures))


def _batches(
    response: http.client.HTTPResponse, found: Range, shape: Shape, to_columns: Callable[..., Any], batch_rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """What an answer holds, each batch with the seq of its last row."""
    left = b""
    while True:
        more = response.read(_missing(left))
        data = left + more if left else more
        at = 0
        while True:
            try:
                columns = to_columns(data, at, len(data), batch_rows, BATCH_BYTES)
            except ValueError as exc:
                raise ConnectError(f"what came is no log: {exc}") from exc
            if not columns[0]:
                break
            at = columns[1]
            first, last = _edges(columns[2])
            if not found.first <= first <= last < found.stop:
                raise ConnectError(f"asked for messages {found.first} to {found.stop - 1}, got {first} to {last}")
            yield last, shape.batch(columns)
        left = data[at:]
        if not more:
            if left:
                raise ConnectError("an answer ended within a message")
            return


def _missing(left: bytes) -> int:
    """How much to read behind a part of a frame: what it lacks, where that is more, so that it is not copied again."""
    size = int.from_bytes(left[:4], "big") if len(left) >= 4 else 0
    return min(max(_READ_BYTES, size + 4 - len(left)), _MOST_READ_BYTES)


def _edges(seqs: Any) -> tuple[int, int]:
    numbers = memoryview(seqs).cast("B").cast("q")
    return numbers[0], numbers[-1]


def _refused(exc: Refused, found: Range, at: int, address: str, options: SourceOptions) -> int:
    """What cannot be read is lost: fail, or say where to go on."""
    where = f"{found.topic} on node {found.node}"
    if exc.status == 410:
        after = min(found.stop, int(exc.details.get("first") or found.stop))
        what = f"messages {at} to {after - 1} of {where} are gone"
    elif exc.code == "DAMAGED":
        after = min(found.stop, int(exc.details.get("stop") or found.stop))
        what = f"messages {at} to {after - 1} of {where} are damaged"
    elif exc.status in (404, 409):
        after = found.stop
        what = f"{where} was deleted or made anew, messages {at} to {after - 1} are gone"
    elif exc.status == 416:
        after = found.stop
        what = f"{where} ends before {found.stop}, as after a restored backup: messages are gone"
    elif exc.status in (401, 403):
        raise OptionError(f"{address} refuses to give its messages: nsq.http.token needs the right consume") from exc
    else:
        raise ConnectError(f"{address} answers {exc} to /log/fetch") from exc
    if after <= at:
        raise ConnectError(f"{address} answers {exc} to /log/fetch, which cannot be") from exc
    text = f"{what}: to go on with what is there, set failOnDataLoss=false"
    if options.fail_on_data_loss:
        raise DataLossError(text, topic=found.topic, node=found.node) from exc
    logger.warning("%s", text)
    return after
