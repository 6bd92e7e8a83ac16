"""Making ``format("nsq")`` known to a session, also where flintmq is not installed on the executors."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flintmq.spark.shipped.offsets import log_offset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "given_up",
    "is_elsewhere",
    "is_remote",
    "lag",
    "nodes_read",
    "register",
    "shipping",
    "topics_read",
]


def register(spark: SparkSession, *, ship: bool = False) -> None:
    """Make ``format("nsq")`` known to a session, classic or Connect.

    Where flintmq is installed on every machine this is not needed: Spark finds the source by itself. With ``ship`` the
    code goes along with every query, and executors need nothing but pyspark and pyarrow. Spark's own ways of shipping
    (``addPyFile``, ``--py-files``) do not reach the process of a streaming source.
    """
    from flintmq.spark.source import NsqDataSource

    if not ship:
        spark.dataSource.register(NsqDataSource)
        return
    from pyspark import cloudpickle

    import flintmq.addresses
    import flintmq.errors
    import flintmq.spark

    modules = [flintmq.spark, flintmq.addresses, flintmq.errors]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        # Pickled here and now: afterwards nobody else's pickles need to know.
        spark.dataSource.register(NsqDataSource)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def is_remote(spark: SparkSession) -> bool:
    """Is this a session of Spark Connect?"""
    return type(spark).__module__.startswith("pyspark.sql.connect")


@contextlib.contextmanager
def shipping(spark: SparkSession) -> Iterator[None]:
    """Inside, functions given to Spark take our code along: it need not be installed where they run."""
    # On a Connect server that has no flintmq, what came with the query goes on with it by itself.
    package = sys.modules.get("flintmq")
    if package is None or not is_elsewhere(spark):
        yield
        return
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(package)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(package)


def is_elsewhere(spark: SparkSession) -> bool:
    """Do functions run where flintmq may not be installed?"""
    return is_remote(spark) or not spark.conf.get("spark.master", "").startswith(("local[", "local,"))


def lag(progress: Any) -> dict[tuple[str, str], int]:
    """How many messages a query is behind, by topic and node, from one of its progress reports.

    Numbers that no message has count too, so it is an upper bound after a crash of a broker. In spool mode the key is
    ``("", "")`` and what still waits in the channel is not counted.
    """
    found: dict[tuple[str, str], int] = {}
    for source in progress.sources:
        latest, end = _offset(source.latestOffset), _offset(source.endOffset)
        if latest is None or end is None or latest.get("mode") != end.get("mode"):
            continue
        if latest["mode"] == "spool":
            found["", ""] = found.get(("", ""), 0) + max(0, latest["o"] - end["o"])
            continue
        read = log_offset(end).marks
        for key, mark in log_offset(latest).marks.items():
            at = read.get(key)
            if at is not None and at.epoch == mark.epoch:
                found[key] = max(0, mark.seq - at.seq)
    return found


def nodes_read(progress: Any) -> frozenset[str] | None:
    """The nodes whose logs a query reads, from one of its progress reports; None if it does not say all of them."""
    offsets = [found for source in progress.sources if (found := _offset(source.endOffset)) is not None]
    if not offsets or any(found["mode"] != "log" for found in offsets):
        return None
    return frozenset(node for found in offsets for _, node in log_offset(found).marks)


def topics_read(progress: Any) -> tuple[list[str], list[str]]:
    """The topics that a query reads, and its names as a reader of logs, as far as a progress report has them."""
    topics: set[str] = set()
    readers: set[str] = set()
    for source in progress.sources:
        latest, end = _offset(source.latestOffset) or {}, _offset(source.endOffset) or {}
        if end.get("mode") == "log":
            read = log_offset(end)
            topics |= {topic for topic, _ in read.marks}
            readers |= {read.reader} - {""}
        # A spool says it only there.
        topics |= set(latest.get("topics") or ())
    return sorted(topics), sorted(readers)


def given_up(progress: Any) -> int:
    """How many messages, at most, this run of a query left out because their nodes are gone (failOnDataLoss=false)."""
    return sum((_offset(source.latestOffset) or {}).get("given_up", 0) for source in progress.sources)


def _offset(text: Any) -> dict[str, Any] | None:
    """An offset as progress reports hold it; None for another source's."""
    try:
        read = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return None
    return read if isinstance(read, dict) and read.get("mode") in ("log", "spool") and read.get("v") == 1 else None
