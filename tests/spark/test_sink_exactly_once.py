"""Ordinary failures between Spark and the sink: each row of a write that succeeded is in its topic exactly once.

Row sizes, row counts and limits are odd on purpose: numbers that divide each other hide short chunks. The ledger is
the topic itself, consumed row by row.
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("pyspark")

from .conftest import run_query, start_query, wait_for
from .sink_tools import EXACT, ROWS, ledger, odd_rows, to, write


def failing(after, *, while_exists=None, shuffled=False):
    """A function for mapInArrow that fails after so many rows: at a task's first try, or while a file exists."""

    def run(batches):
        import os
        import random
        import time

        import pyarrow as pa
        from pyspark import TaskContext

        fails = os.path.exists(while_exists) if while_exists else TaskContext.get().attemptNumber() == 0
        seen = 0
        for batch in batches:
            if shuffled:
                order = list(range(batch.num_rows))
                random.shuffle(order)
                batch = batch.take(pa.array(order))
            if fails and seen + batch.num_rows > after:
                yield batch.slice(0, after - seen)
                # The sink has its rows when this fails.
                time.sleep(2)
                raise RuntimeError("upstream fails")
            seen += batch.num_rows
            yield batch

    return run


@pytest.mark.parametrize("shuffled", [False, True], ids=["same order", "another order"])
def test_a_task_is_tried_again_after_its_upstream_failed(spark, broker, topic, shuffled):
    frame = odd_rows(spark).mapInArrow(failing(15_737, shuffled=shuffled), "value string")
    write(frame, to(broker, topic=topic))
    assert ledger(broker, topic) == EXACT


def stream_of(spark, source, checkpoint, nsqd, topic, upstream, **options):
    """Start a stream from Parquet files to a topic; it ends when they are written."""
    return (
        spark.readStream.schema("value string")
        .parquet(str(source))
        .mapInArrow(upstream, "value string")
        .writeStream.format("nsq")
        .options(**to(nsqd, topic=topic, **options))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


@pytest.mark.parametrize(("before", "after"), [("500", "2000"), ("2000", "500")])
def test_a_failed_batch_is_run_again_with_other_limits(spark, broker, topic, tmp_path, before, after):
    odd_rows(spark).write.parquet(str(tmp_path / "in"))
    flag = tmp_path / "fail"
    flag.touch()
    upstream = failing(15_737, while_exists=str(flag))
    files = (tmp_path / "in", tmp_path / "checkpoint")
    with pytest.raises(Exception, match="upstream fails"):
        run_query(lambda: stream_of(spark, *files, broker, topic, upstream, mpubMaxMessages=before))
    flag.unlink()
    run_query(lambda: stream_of(spark, *files, broker, topic, upstream, mpubMaxMessages=after))
    assert ledger(broker, topic) == EXACT


def topic_to_topic(spark, source, target, name, checkpoint, upstream, reading=None, writing=None):
    """Start a stream from a topic to the topic ``name``; it ends when it has all that is there now."""
    reading = {"subscribe": "source", "startingOffsets": "earliest", **(reading or {})}
    return (
        spark.readStream.format("nsq")
        .options(**{"nsq.nsqd.addresses": source.tcp}, **reading)
        .load()
        .selectExpr("cast(value as string) as value")
        .mapInArrow(upstream, "value string")
        .writeStream.format("nsq")
        .options(**to(target, topic=name, **(writing or {})))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


@pytest.fixture
def source(start_node):
    """A broker with a topic of 160 MB: more than fits between its log and the sink."""
    node = start_node()
    node.post("/topic/create", topic="source")
    node.post("/channel/create", topic="source", channel="holder")
    node.publish("source", (b"%d:%b" % (number, b"x" * (number * 7919 % 13_001)) for number in range(ROWS)))
    return node


def test_a_failed_batch_is_run_again_with_other_partitions(spark, broker, source, topic, tmp_path):
    flag = tmp_path / "fail"
    flag.touch()
    upstream = failing(15_737, while_exists=str(flag))

    def start(partitions):
        reading = {"minPartitions": partitions}
        return topic_to_topic(spark, source, broker, topic, tmp_path / "checkpoint", upstream, reading)

    with pytest.raises(Exception, match="upstream fails"):
        run_query(lambda: start("1"))
    flag.unlink()
    run_query(lambda: start("4"))
    assert ledger(broker, topic) == EXACT


def test_the_broker_of_the_source_is_killed_in_the_middle_of_a_batch(spark, broker, source, topic, tmp_path):
    started, go = tmp_path / "started", tmp_path / "go"
    flags = (str(started), str(go))

    def gate(batches):
        import os
        import time

        for number, batch in enumerate(batches):
            yield batch
            if number == 0 and not os.path.exists(flags[1]):
                open(flags[0], "w").close()
                while not os.path.exists(flags[1]):
                    time.sleep(0.05)

    def start():
        # Small pieces: the rest of the range is still with the broker when it is killed.
        reading = {"fetch.numRetries": "0", "arrowBatchRows": "1009"}
        return topic_to_topic(spark, source, broker, topic, tmp_path / "checkpoint", gate, reading)

    query = start_query(start)
    wait_for(started.exists, "the first rows are read")
    source.kill()
    go.touch()
    # The first try sees a dead broker. The others may see it alive again, or fail as well.
    time.sleep(1)
    source.start()
    try:
        query.awaitTermination(120)
    except Exception:
        run_query(start)
    query.stop()
    assert ledger(broker, topic) == EXACT
