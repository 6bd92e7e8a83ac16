"""A driver of its own: writes a topic, reads it as a batch and as a stream that is stopped and goes on.

    python scenario.py MASTER BROKER TOPIC FOLDER SOURCE SHIP

MASTER is a master's URL or ``sc://…`` for Spark Connect. SOURCE is where flintmq is: put on the path of this process
alone, so that nobody else has it unless it is shipped (SHIP is 1) or on PYTHONPATH. The last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

# Who starts this file as a script has the tests of Spark, a package called "spark", in front of everything.
sys.path.pop(0)

from pyspark.sql import SparkSession


def session(master: str, folder: Path) -> SparkSession:
    if master.startswith("sc://"):
        return SparkSession.builder.remote(master).getOrCreate()
    settings = {
        "spark.driver.memory": "1g",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"],
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    builder = SparkSession.builder.master(master).appName("scenario")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def can_import(batches):
    """Run on an executor: is flintmq there?"""
    import importlib.util

    import pyarrow as pa

    for _ in batches:
        pass
    yield pa.record_batch([pa.array([importlib.util.find_spec("flintmq") is not None])], names=["found"])


def main() -> None:
    master, broker, topic, folder, source, ship = sys.argv[1:]
    sys.path.insert(0, source)
    from flintmq.spark import register

    spark = session(master, Path(folder))
    if ship == "1":
        register(spark, ship=True)
    found = {}
    there = spark.range(2).repartition(2).mapInArrow(can_import, "found boolean").collect()
    found["executors have flintmq"] = sorted({row.found for row in there})

    where = {"nsq.nsqd.addresses": broker}
    rows = spark.range(3000).selectExpr("cast(id as string) as value").repartition(2)
    rows.write.format("nsq").options(**where, topic=topic).mode("append").save()

    options = {**where, "subscribe": topic, "startingOffsets": "earliest", "minPartitions": "2"}
    give_up = time.monotonic() + 120
    while True:
        # Only what is durable is read, and that takes a moment.
        table = spark.read.format("nsq").options(**options).load()
        values = sorted(int(bytes(row.value)) for row in table.select("value").collect())
        if len(values) >= 3000 or time.monotonic() > give_up:
            break
        time.sleep(0.2)
    found["batch"] = values == list(range(3000))

    def run() -> int:
        query = (
            spark.readStream.format("nsq")
            .options(**options, maxMessagesPerTrigger="1000")
            .load()
            .select("value")
            .writeStream.format("parquet")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .option("path", f"{folder}/out")
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except Exception as exc:
            if "failed to connect back" in str(exc):
                return run()
            raise
        return sum(progress.numInputRows for progress in query.recentProgress)

    found["stream"] = run()
    # A stream through the sink: it is read back in the second run of the first.
    query = (
        spark.readStream.schema("value binary")
        .parquet(f"{folder}/out")
        .writeStream.format("nsq")
        .options(**where, topic=topic)
        .option("checkpointLocation", f"{folder}/sink-checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    while spark.read.format("nsq").options(**options).load().count() < 6000 and time.monotonic() < give_up:
        time.sleep(0.2)
    found["stream after a restart"] = run()
    out = sorted(int(bytes(row.value)) for row in spark.read.parquet(f"{folder}/out").collect())
    found["out"] = out == sorted([*range(3000), *range(3000)])
    spark.stop()
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
