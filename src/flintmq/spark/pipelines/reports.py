"""Reports of a pipeline's queries to the brokers, from the start of its session to the end of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flintmq.spark.reporting import QueryReporter

__all__ = ["begin", "end"]

_reporters: list[QueryReporter] = []


def begin(spark: SparkSession, options: Mapping[str, str], writes: Sequence[str] = ()) -> None:
    """Have brokers, and so nsqadmin, know of the queries of a session, until `end`."""
    from flintmq.spark.reporting import report_queries

    _reporters.append(report_queries(spark, options, writes=writes))


def end(error: str = "") -> None:
    """Tell the brokers, as far as they answer at once, that the queries have ended, or failed with an error."""
    while _reporters:
        _reporters.pop().close(error, detach=False)
