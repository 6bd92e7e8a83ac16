"""A file of Spark's classes, loaded and checked once: a JVM of the tests maps it and starts in two thirds of the time.

Java calls it a dynamic archive (class data sharing). A JVM with other classes than the archive's just does without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from pathlib import Path

#: Where the archive is, for this process and those that it starts.
_VARIABLE = "FLINTMQ_TEST_READY_CLASSES"
#: A stream, files, shuffles, and Python at work on rows: what the tests do, in small.
_PROGRAM = """
import sys, tempfile
from pyspark.sql import SparkSession, functions as F

def batch(frame, number):
    frame.write.mode("append").parquet(folder + "/rows")

def same(batches):
    yield from batches

with tempfile.TemporaryDirectory() as folder:
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", "2")
    builder = builder.config("spark.ui.enabled", "false").config("spark.driver.bindAddress", "127.0.0.1")
    spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    rows = spark.createDataFrame([(number, b"body", str(number)) for number in range(100)], ["offset", "body", "topic"])
    rows.write.parquet(folder + "/table")
    table = spark.read.parquet(folder + "/table")
    table.mapInArrow(same, table.schema).groupBy("topic").agg(F.count("*"), F.max("offset")).collect()
    table.join(table.withColumnRenamed("body", "other"), ["offset", "topic"]).orderBy("offset").toPandas()
    stream = spark.readStream.schema(table.schema).parquet(folder + "/table")
    plain = stream.writeStream.format("parquet").option("path", folder + "/out")
    for writer in (stream.writeStream.foreachBatch(batch), plain):
        writer = writer.option("checkpointLocation", folder + "/" + str(id(writer)))
        writer.trigger(availableNow=True).start().awaitTermination()
    counts = stream.groupBy("topic").count().writeStream.outputMode("complete").format("noop")
    counts.option("checkpointLocation", folder + "/counts").trigger(availableNow=True).start().awaitTermination()
    spark.stop()
"""


def options() -> str:
    """What a JVM is told about the archive, if there is one."""
    archive = os.environ.get(_VARIABLE, "")
    # A JVM whose classes differ would say so on its standard output.
    return f" -XX:SharedArchiveFile={archive} -Xlog:disable -Xlog:all=error:stderr" if archive else ""


def make(folder: Path, java_options: str) -> None:
    """Make the archive in ``folder``, or find the one that is there."""
    import pyspark

    from flintmq.spark import java

    archive = folder / f"spark-{pyspark.__version__}-java-{java.find().version}.jsa"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            making = folder / "making.jsa"
            making.unlink(missing_ok=True)
            told = f"{java_options} -XX:ArchiveClassesAtExit={making} -Xlog:disable"
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [sys.executable, "-c", _PROGRAM],
                    env={**os.environ, "SPARK_SUBMIT_OPTS": told},
                    capture_output=True,
                    timeout=300,
                    check=False,
                )
            # The JVM outlives its Python and writes the archive last; run() waits for both, who share their output.
            if making.exists():
                making.rename(archive)
    if archive.exists():
        os.environ[_VARIABLE] = str(archive)
