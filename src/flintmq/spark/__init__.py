"""Topics as Spark tables: ``format("nsq")``, batch and streaming, read and write.

This module names what is public; what is not small is imported when it is first used, so that ``import flintmq.spark``
costs nothing and needs neither pyspark nor Java.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Now and not later: it has the name of its module, which would take its place.
from flintmq.spark.session import session as session

if TYPE_CHECKING:
    from flintmq.spark.counting import count as count
    from flintmq.spark.decoding import decode as decode
    from flintmq.spark.draining import drain as drain
    from flintmq.spark.monitoring import serve_metrics as serve_metrics
    from flintmq.spark.registration import given_up as given_up
    from flintmq.spark.registration import lag as lag
    from flintmq.spark.registration import register as register
    from flintmq.spark.reporting import report_queries as report_queries

__all__ = ["count", "decode", "drain", "given_up", "lag", "register", "report_queries", "serve_metrics", "session"]

_PUBLIC = {
    "count": "flintmq.spark.counting",
    "decode": "flintmq.spark.decoding",
    "drain": "flintmq.spark.draining",
    "given_up": "flintmq.spark.registration",
    "lag": "flintmq.spark.registration",
    "register": "flintmq.spark.registration",
    "report_queries": "flintmq.spark.reporting",
    "serve_metrics": "flintmq.spark.monitoring",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        # Kept under its name: a module of the same name, just imported, would stand in its place.
        globals()[name] = found = getattr(importlib.import_module(_PUBLIC[name]), name)
        return found
    raise AttributeError(f"module 'flintmq.spark' has no attribute {name!r}")
