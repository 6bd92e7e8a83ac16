"""Streaming queries in numbers: what Spark reports of every batch, as Prometheus reads it.

`serve_metrics` adds a listener to a session and opens a port; `/metrics` there has the last progress of each query of
the session: batches, rows, times, how far behind it is, the size of its state. Spark tells of a batch when it is done.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from flintmq.addresses import join, split
from flintmq.errors import PipelineError
from flintmq.spark.registration import is_remote, lag

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["QueryMetrics", "serve_metrics", "until_end"]

#: Queries that have ended are forgotten beyond this number, the oldest first.
_ENDED = 100

#: Name, kind and help of each number; all begin with flintmq_query_.
_NUMBERS = {
    "active": ("gauge", "Whether the query runs"),
    "batch": ("gauge", "Number of the last batch"),
    "batches_total": ("counter", "Batches with rows since the query was started here"),
    "rows_total": ("counter", "Rows read since the query was started here"),
    "rows_per_second": ("gauge", "Rows of the last batch by the time that it took"),
    "batch_seconds": ("gauge", "Time that the last batch took"),
    "progress_timestamp_seconds": ("gauge", "When Spark last told of the query, since 1970"),
    "lag_messages": ("gauge", "Messages that are durable at the brokers and not read"),
    "state_rows": ("gauge", "Rows of the query's state"),
    "state_bytes": ("gauge", "Memory that the query's state takes up"),
}


class _Query:
    """The numbers of one query."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen = -1
        #: By name and labels.
        self.numbers: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.set("active", 1)
        self.set("batches_total", 0)
        self.set("rows_total", 0)

    def set(self, name: str, value: float, **labels: str) -> None:
        self.numbers[name, tuple(labels.items())] = value

    def add(self, name: str, value: float) -> None:
        self.numbers[name, ()] += value


class QueryMetrics(StreamingQueryListener):
    """What the queries of a session last said. Spark calls it from a thread of its own."""

    def __init__(self) -> None:
        self._queries: dict[str, _Query] = {}
        self._lock = threading.Lock()

    def onQueryStarted(self, event: Any) -> None:
        with self._lock:
            self._queries.pop(str(event.id), None)
            self._query(str(event.id), event.name)

    def onQueryProgress(self, event: Any) -> None:
        progress = event.progress
        with self._lock:
            query = self._query(str(progress.id), progress.name)
            if progress.batchId > query.seen:
                query.seen = progress.batchId
                query.add("rows_total", progress.numInputRows or 0)
                query.add("batches_total", bool(progress.numInputRows))
            query.set("batch", progress.batchId)
            query.set("rows_per_second", progress.processedRowsPerSecond or 0)
            if (milliseconds := progress.durationMs.get("triggerExecution")) is not None:
                query.set("batch_seconds", milliseconds / 1000)
            query.set("progress_timestamp_seconds", time.time())
            for (topic, node), messages in lag(progress).items():
                query.set("lag_messages", messages, topic=topic, node=node)
            query.set("state_rows", sum(state.numRowsTotal for state in progress.stateOperators))
            query.set("state_bytes", sum(state.memoryUsedBytes for state in progress.stateOperators))

    def onQueryIdle(self, event: Any) -> None:
        with self._lock:
            if (query := self._queries.get(str(event.id))) is not None:
                query.set("progress_timestamp_seconds", time.time())

    def onQueryTerminated(self, event: Any) -> None:
        with self._lock:
            if (query := self._queries.get(str(event.id))) is not None:
                query.set("active", 0)
            ended = [id for id, query in self._queries.items() if not query.numbers["active", ()]]
            for id in ended[:-_ENDED]:
                del self._queries[id]

    def _query(self, id: str, name: str | None) -> _Query:
        return self._queries.setdefault(id, _Query(name or id))

    def text(self) -> str:
        """All numbers, as Prometheus reads them."""
        with self._lock:
            return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for name, (kind, about) in _NUMBERS.items():
            lines = [
                f"flintmq_query_{name}{{{_labels(query.name, id, labels)}}} {value:.16g}\n"
                for id, query in self._queries.items()
                for (found, labels), value in query.numbers.items()
                if found == name
            ]
            if lines:
                yield f"# HELP flintmq_query_{name} {about}.\n# TYPE flintmq_query_{name} {kind}\n"
                yield from lines


def _labels(name: str, id: str, more: tuple[tuple[str, str], ...]) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return ",".join(f'{key}="{quoted(value)}"' for key, value in (("query", name), ("id", id), *more))


class MetricsServer(ThreadingHTTPServer):
    """`/metrics`, until it is closed."""

    daemon_threads = True

    def __init__(self, spark: SparkSession, metrics: QueryMetrics, host: str, port: int) -> None:
        self._spark = spark
        self.metrics = metrics
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, name="flintmq-metrics", daemon=True)
        self._thread.start()
        spark.streams.addListener(metrics)

    @property
    def address(self) -> str:
        return join(str(self.server_address[0]), int(self.server_address[1]))

    def close(self) -> None:
        """Stop listening to Spark, and close the port. A program with a session of Spark Connect ends only after it."""
        self._spark.streams.removeListener(self.metrics)
        self.shutdown()
        self.server_close()
        self._thread.join()

    def end(self) -> None:
        """Do what is needed at the end of a program: a JVM of this program is not asked for anything any more."""
        if is_remote(self._spark):
            self.close()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        found = self.path.partition("?")[0] == "/metrics"
        body = self.server.metrics.text().encode() if found else b"see /metrics\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8" if found else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody wants to read who asked."""


#: Those of a command line, which closes them at its end.
until_end: list[MetricsServer] = []


def serve_metrics(spark: SparkSession, address: str = "127.0.0.1:9464") -> MetricsServer:
    """Serve the numbers of all streaming queries of a session at ``http://ADDRESS/metrics``, until ``close()``."""
    where = split(address, listening=True, unix=False)
    try:
        return MetricsServer(spark, QueryMetrics(), where.host, where.port)
    except OSError as exc:
        raise PipelineError(f"{address} cannot be opened for metrics: {exc.strerror or exc}") from exc
