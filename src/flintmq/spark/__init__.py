"""Spark as the data pipeline: `session`, and what is ready to run in `flintmq.spark.pipelines`."""

from __future__ import annotations

from flintmq.spark.session import session

__all__ = ["session"]
