"""The driver that ``python -m tests.spark.torture`` kills: a stream from topics to topics, through a shuffle.

    python torture_driver.py SPEC

SPEC is a JSON file: master, conf, reading and writing options, checkpoint, the file for progress, the files that make a
task fail or stand still, and whether to end when everything is written. Rows come in another order at each computation.
A filter drops a fifth of them, in blocks that are larger than a batch: some batches have no rows.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":
    # Who starts this file as a script has the tests of Spark, a package called "spark", in front of everything.
    sys.path.pop(0)

from pyspark.sql import SparkSession

OUT_TOPICS = 5
#: Rows of a block that is kept, or dropped.
BLOCK = 12_000


def is_dropped(number: int) -> bool:
    return number // BLOCK % 5 == 2


def transformation(fails_while, slow_while):
    def run(batches):
        import contextlib
        import os
        import random
        import time

        import pyarrow as pa

        for batch in batches:
            order = list(range(batch.num_rows))
            random.shuffle(order)
            values = batch.column("value").take(pa.array(order))
            # The number of a row is in its first 8 bytes.
            numbers = [int.from_bytes(value[:8]) for value in values.to_pylist()]
            kept = [at for at, number in enumerate(numbers) if not is_dropped(number)]
            values = values.take(pa.array(kept, pa.int64()))
            topics = pa.array([f"out-{numbers[at] % OUT_TOPICS}" for at in kept], pa.string())
            size = random.choice([61, 997, 5003])
            whole = pa.record_batch([values, topics], names=["value", "topic"])
            fails = is_slow = False
            if kept and os.path.exists(fails_while):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(fails_while)
                    fails = True
            if kept and os.path.exists(slow_while):
                # One of them alone: who makes the file that belongs to this time.
                with contextlib.suppress(FileNotFoundError, FileExistsError), open(slow_while) as file:
                    open(f"{slow_while}-{file.read()}", "x").close()
                    is_slow = True
            for first in range(0, whole.num_rows, size):
                yield whole.slice(first, size)
                if fails:
                    time.sleep(0.5)
                    raise RuntimeError("upstream fails")
                while is_slow and os.path.exists(slow_while):
                    time.sleep(0.05)

    return run


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    builder = SparkSession.builder.master(spec["master"]).appName("torture")
    for key, value in spec["conf"].items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    read = spark.readStream.format("nsq").options(**spec["reading"]).load().select("value")
    rows = read.repartition(spec["partitions"]).mapInArrow(
        transformation(spec["fails"], spec["is slow"]), "value binary, topic string"
    )
    writer = rows.writeStream.format("nsq").options(**spec["writing"]).option("checkpointLocation", spec["checkpoint"])
    writer = writer.trigger(availableNow=True) if spec["once"] else writer.trigger(processingTime="0 seconds")
    query = writer.start()
    ended = threading.Event()

    def tell() -> None:
        """Append (batch, rows) for every batch that is through."""
        told = -1
        while True:
            last = ended.is_set()
            with open(spec["progress"], "a") as file:
                for progress in query.recentProgress:
                    if progress.batchId > told and progress.numInputRows:
                        told = progress.batchId
                        file.write(f"{told} {progress.numInputRows}\n")
            if last:
                return
            time.sleep(0.2)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        query.awaitTermination()
    finally:
        ended.set()
        teller.join()
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
