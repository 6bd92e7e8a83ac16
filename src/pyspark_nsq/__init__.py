"""Where Spark looks for data sources by itself: it imports every top-level module called ``pyspark_…``.

An error here would take all of them away. So nothing is imported until Spark asks for ``DefaultSource``, and where
that cannot be had (another Python, half an installation) there is simply none.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "DefaultSource":
        try:
            from flintmq.spark.source import NsqDataSource
        except Exception as exc:
            raise AttributeError(f"format 'nsq' is not available: {exc}") from exc
        return NsqDataSource
    raise AttributeError(f"module 'pyspark_nsq' has no attribute {name!r}")
