"""What follows a pipeline's queries from the start of its session to the end of the program.

These are the reports to the brokers, and the metrics of a Spark Connect session: Spark's thread that listens to its
server would keep the program from ending.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flintmq.spark.reporting import QueryReporter

__all__ = ["begin", "end", "serve"]

logger = logging.getLogger("flintmq.spark")

_reporters: list[QueryReporter] = []


def serve(spark: SparkSession, address: str) -> str:
    """Serve the numbers of a session's queries until `end`. Return where."""
    from flintmq.spark import monitoring

    server = monitoring.serve_metrics(spark, address)
    monitoring.until_end.append(server)
    return server.address


def begin(spark: SparkSession, options: Mapping[str, str], writes: Sequence[str] = ()) -> None:
    """Have brokers, and so nsqadmin, know of the queries of a session, until `end`."""
    from flintmq.spark.reporting import report_queries

    _reporters.append(report_queries(spark, options, writes=writes))


def end(error: str = "") -> None:
    """Tell the brokers, as far as they answer at once, that the queries have ended, or failed with an error."""
    while _reporters:
        _reporters.pop().close(error, detach=False)
    # Not imported here: this module goes along with functions to Spark's server, and its servers cannot.
    monitoring = sys.modules.get("flintmq.spark.monitoring")
    while monitoring is not None and monitoring.until_end:
        try:
            monitoring.until_end.pop().end()
        except Exception as exc:  # Spark's server may be gone
            logger.info("the listener of queries could not be removed: %s", exc)
