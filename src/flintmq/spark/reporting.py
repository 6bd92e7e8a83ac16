"""Streaming queries as brokers know them: each reports its batches, rows, lag and state, so that nsqadmin shows it.

`report_queries` adds a listener to a session. Spark calls it from a thread of its own, and it only notes what it is
told; another thread tells the brokers, one report of each query per second at most, and renews it while nothing
happens: brokers forget a query that is silent. A broker that does not answer, or refuses, is passed over, which is
logged once. Nothing here can disturb a query.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from flintmq.errors import ConnectError, FlintError, HttpError, OptionError
from flintmq.spark.registration import lag, nodes_read, topics_read
from flintmq.spark.shipped.net import Broker, Cluster, Web
from flintmq.spark.shipped.options import Network, read_sink_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["QueryReporter", "report_queries"]

logger = logging.getLogger("flintmq.spark")

#: Seconds after which a report that says nothing new is sent again, and the least between two reports of a query.
RENEW_SECONDS = 15.0
LEAST_SECONDS = 1.0
#: Seconds after which brokers are looked for again, also where a query reads from one that is not known, and after
#: which one that failed is asked again.
_DISCOVERY_SECONDS = 60.0
_UNKNOWN_SECONDS = 15.0
_AGAIN_SECONDS = 5.0
#: Seconds after which a broker of a version without reports is asked again.
_UNSUPPORTED_SECONDS = 600.0
#: Seconds for one answer, and for all last reports at the end.
_ANSWER_SECONDS = 2.0
_LAST_SECONDS = 3.0
#: What brokers take: names of a query, and characters of a text.
_MOST_NAMES = 64
_LONGEST = 128
_LONGEST_ERROR = 500
#: Ended queries that are still to be told of.
_MOST_ENDED = 100


@dataclass
class _Query:
    """What is known of one query; by the names that brokers have for it."""

    id: str
    name: str = ""
    state: str = "running"
    error: str = ""
    topics: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    batch: int | None = None
    progress: int | None = None
    batch_seconds: float | None = None
    rows: int = 0
    rows_per_second: float = 0.0
    lag: int | None = None
    state_rows: int = 0
    state_bytes: int = 0

    # Not told.
    #: The nodes that it reads; None: it does not say, and all are told.
    nodes: frozenset[str] | None = None
    is_new: bool = True
    #: When it was last told, by `time.monotonic`.
    told: float = 0.0

    def as_json(self, host: str, writes: Sequence[str]) -> bytes:
        facts = {key: value for key, value in vars(self).items() if key not in ("nodes", "is_new", "told")}
        more = {"at": int(time.time() * 1000), "host": host, "writes": list(writes)}
        return json.dumps(facts | more).encode()


class QueryReporter(StreamingQueryListener):
    """Reports the queries of a session to brokers, until ``close()``."""

    def __init__(self, network: Network, writes: Sequence[str] = ()) -> None:
        self._network = network
        self._writes = _names(writes)
        self._host = _line(socket.gethostname())
        self._queries: dict[str, _Query] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._session: SparkSession | None = None
        # Of the thread alone.
        self._web = Web(network, _ANSWER_SECONDS)
        self._cluster = Cluster(network, self._web, _ANSWER_SECONDS)
        self._brokers: list[Broker] = []
        #: When they were last looked for, and how long that holds.
        self._discovered = 0.0
        self._holds = 0.0
        #: By HTTP address: when it is asked again.
        self._resting: dict[str, float] = {}
        #: Who has failed, and was complained about.
        self._failing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="flintmq-reports", daemon=True)
        self._thread.start()

    def attach(self, spark: SparkSession) -> None:
        self._session = spark
        spark.streams.addListener(self)

    def close(self, error: str = "", *, detach: bool = True) -> None:
        """Tell the brokers that all queries have ended, or failed with an error; and stop. Takes seconds at most.

        Without ``detach`` Spark is not asked for anything, as at the end of a program.
        """
        session, self._session = self._session, None
        if session is not None and detach:
            try:
                session.streams.removeListener(self)
            except Exception as exc:  # Spark is gone already
                logger.debug("the listener of queries could not be removed: %s", exc)
        with self._lock:
            for query in self._queries.values():
                if query.state == "running":
                    _end(query, error)
        self._closing.set()
        self._wake.set()
        self._thread.join(_LAST_SECONDS)

    # --- What Spark says; never blocks, never raises ------------------------------------------------------------------

    def onQueryStarted(self, event: Any) -> None:
        with self._lock:
            self._queries[str(event.id)] = _Query(str(event.id), _line(event.name or ""))
        self._wake.set()

    def onQueryProgress(self, event: Any) -> None:
        try:
            self._note(event.progress)
        except Exception as exc:
            logger.warning("a progress report of Spark could not be read: %s: %s", type(exc).__name__, exc)
        self._wake.set()

    def onQueryIdle(self, event: Any) -> None:
        with self._lock:
            query = self._queries.get(str(event.id))
            if query is not None and query.rows_per_second:
                query.rows_per_second = 0.0
                query.is_new = True

    def onQueryTerminated(self, event: Any) -> None:
        with self._lock:
            query = self._queries.get(str(event.id))
            if query is not None:
                _end(query, event.exception or "")
            ended = [id for id, one in self._queries.items() if one.state != "running"]
            for id in ended[:-_MOST_ENDED]:
                del self._queries[id]
        self._wake.set()

    def _note(self, progress: Any) -> None:
        behind = lag(progress)
        nodes = nodes_read(progress)
        topics, readers = topics_read(progress)
        with self._lock:
            id = str(progress.id)
            query = self._queries.setdefault(id, _Query(id, _line(progress.name or "")))
            rows = int(progress.numInputRows or 0)
            if query.batch is None or progress.batchId > query.batch:
                query.rows += rows
            if rows or "addBatch" in progress.durationMs:
                query.progress = int(time.time() * 1000)
                if (milliseconds := progress.durationMs.get("triggerExecution")) is not None:
                    query.batch_seconds = max(0, milliseconds) / 1000
            query.batch = max(0, int(progress.batchId))
            speed = float(progress.processedRowsPerSecond or 0)
            query.rows_per_second = speed if 0 <= speed < 1e15 else 0.0
            query.lag = sum(behind.values()) if behind else query.lag
            query.state_rows = max(0, sum(state.numRowsTotal for state in progress.stateOperators))
            query.state_bytes = max(0, sum(state.memoryUsedBytes for state in progress.stateOperators))
            query.topics = _names(topics) or query.topics
            query.readers = _names(readers) or query.readers
            query.nodes = nodes if nodes is None or nodes else query.nodes
            query.is_new = True

    # --- What brokers are told; in a thread of its own ----------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(RENEW_SECONDS / 3)
            self._wake.clear()
            self._tell_all()
            # A query with many small batches does not report each of them.
            self._closing.wait(LEAST_SECONDS / 2)
        self._tell_all(is_last=True)
        self._web.close()

    def _tell_all(self, is_last: bool = False) -> None:
        try:
            give_up = time.monotonic() + _LAST_SECONDS if is_last else None
            for query, body in self._due(is_last):
                concerned = self._concerned(query)
                told = [self._tell(one, body) for one in concerned if give_up is None or time.monotonic() < give_up]
                if query.state != "running" and not all(told):
                    # Nothing else will be said of it.
                    query.is_new = True
        except Exception as exc:
            # Whatever it is: the queries go on.
            logger.warning("queries were not reported to the brokers: %s: %s", type(exc).__name__, exc)

    def _due(self, is_last: bool) -> list[tuple[_Query, bytes]]:
        """Take the reports that are to be sent now."""
        now = time.monotonic()
        found = []
        with self._lock:
            for query in list(self._queries.values()):
                wait = LEAST_SECONDS if query.is_new else RENEW_SECONDS
                has_ended = query.state != "running"
                if not (is_last and query.is_new) and now - query.told < wait and not (has_ended and query.is_new):
                    continue
                if has_ended and not query.is_new:
                    # It was told, and needs no renewal: brokers forget it.
                    del self._queries[query.id]
                    continue
                query.is_new, query.told = False, now
                found.append((query, query.as_json(self._host, self._writes)))
        return found

    def _concerned(self, query: _Query) -> list[Broker]:
        """Return the brokers that a query reads; all, where it does not say, or publishes too."""
        now = time.monotonic()
        is_unknown = query.nodes is not None and not query.nodes <= {broker.node for broker in self._brokers}
        if now - self._discovered >= (min(_UNKNOWN_SECONDS, self._holds) if is_unknown else self._holds):
            self._discover(now)
        if query.nodes is None or self._writes:
            return self._brokers
        return [broker for broker in self._brokers if broker.node in query.nodes]

    def _discover(self, now: float) -> None:
        self._discovered, self._holds = now, _AGAIN_SECONDS
        try:
            found = self._cluster.survey()
        except (ConnectError, HttpError) as exc:
            self._complain("brokers", exc)
            return
        known = {broker.node: broker for broker in self._brokers}
        # One that does not answer now may answer a report later.
        known |= {broker.node: broker for broker in found.brokers if broker.has_log and broker.http}
        self._brokers = list(known.values())
        if not found.failures:
            self._holds = _DISCOVERY_SECONDS
        self._failing.discard("brokers")

    def _tell(self, broker: Broker, body: bytes) -> bool:
        """Send a report. False if it may be worth another attempt."""
        address = broker.http
        if self._resting.get(address, 0.0) > time.monotonic():
            return False
        try:
            self._web.ask("POST", address, "/pipeline/report", body)
        except (FlintError, OSError) as exc:
            is_unsupported = isinstance(exc, HttpError) and exc.status == 404
            self._resting[address] = time.monotonic() + (_UNSUPPORTED_SECONDS if is_unsupported else _AGAIN_SECONDS)
            self._complain(address, exc)
            return is_unsupported
        if address in self._failing:
            logger.info("queries are reported to %s again", address)
            self._failing.discard(address)
        self._resting.pop(address, None)
        return True

    def _complain(self, who: str, exc: Exception) -> None:
        if who not in self._failing:
            self._failing.add(who)
            logger.info("queries are not reported to %s, which changes nothing for them: %s", who, exc)


def _end(query: _Query, error: str) -> None:
    query.state = "failed" if error else "ended"
    query.error = _reason(error)[:_LONGEST_ERROR]
    query.rows_per_second = 0.0
    query.is_new = True


def _reason(error: str) -> str:
    if not error:
        return ""
    from flintmq.spark.pipelines.common import explain

    return _line(explain(RuntimeError(error)), _LONGEST_ERROR)


def _line(text: str, longest: int = _LONGEST) -> str:
    """One line, without what brokers do not take in a name."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:longest]


def _names(names: Sequence[str]) -> list[str]:
    return [_line(name) for name in sorted(set(names)) if name][:_MOST_NAMES]


def report_queries(spark: SparkSession, options: Mapping[str, str], *, writes: Sequence[str] = ()) -> QueryReporter:
    """Report all streaming queries of a session to brokers, until ``close()``, so that nsqadmin shows them.

    ``options`` are those of ``format("nsq")`` that say where the brokers are: their names begin with ``nsq.``, and
    others are passed over. A query is reported to the brokers whose logs it reads, or to all if it reads none.
    ``writes`` are topics that the queries publish to, to be shown. OptionError for options that are wrong; nothing that
    happens later is an error of a query.
    """
    known = {key: value for key, value in options.items() if key.lower().startswith(("nsq.", "fetch."))}
    if not known:
        raise OptionError("say where the brokers are by nsq.lookupd.http.addresses or nsq.nsqd.addresses")
    reporter = QueryReporter(read_sink_options(known).network, writes)
    reporter.attach(spark)
    return reporter
