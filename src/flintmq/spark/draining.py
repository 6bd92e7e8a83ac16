"""Reading what waits in a channel as a batch, from any NSQ server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flintmq.errors import OptionError
from flintmq.spark.shipped.options import read_source_options
from flintmq.spark.spool_mode.filling import Spooler
from flintmq.spark.spool_mode.spool import Spool

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["drain"]


def drain(
    spark: SparkSession, options: Mapping[str, str], *, idle_seconds: float = 2.0, limit_seconds: float = 3600.0
) -> DataFrame:
    """Consume what waits in a channel into a folder, and read that.

    ``options`` are those of ``format("nsq")`` in spool mode: where brokers are, ``subscribe``, ``channel`` and
    ``spoolLocation``, in which a new folder is made. It consumes here and now, in this process, until nothing has come
    for ``idle_seconds`` and no broker has messages left, as far as it has an HTTP side; every message is on the disk
    before it is finished. The folder stays until somebody removes it: the table that is returned can be read again and
    again, also later by

        spark.read.format("nsq").option("mode", "spool").option("spoolLocation", folder).load()
    """
    read = read_source_options({**options, "mode": "spool"}, streaming=True)
    if not read.spool_location:
        raise OptionError("drain() needs the option spoolLocation: a folder that all of Spark's machines share")
    folder = os.path.join(read.spool_location, f"drain-{time.strftime('%Y%m%dT%H%M%S')}-{os.urandom(4).hex()}")
    spool = Spool(folder)
    try:
        spooler = Spooler(read, spool)
        spooler.start()
        try:
            spooler.wait_connected(read.network.timeout)
            spooler.wait_idle(max(idle_seconds, 2 * read.spool_flush_interval), limit_seconds)
        finally:
            spooler.close()
        spooler.check()
    finally:
        spool.close()
    reader: Any = spark.read.format("nsq").option("mode", "spool").option("spoolLocation", folder)
    for name in ("minPartitions", "maxRecordsPerPartition", "arrowBatchRows"):
        for key, value in options.items():
            if key.lower() == name.lower():
                reader = reader.option(name, value)
    frame: DataFrame = reader.load()
    return frame
