"""Spool mode on any NSQ server: nothing is finished before it is on the disk, and a planned batch can be read again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from .conftest import run_query, start_query, wait_for

BROKERS = ["go_broker", "broker"]


@pytest.fixture(params=BROKERS)
def nsqd(request):
    return request.getfixturevalue(request.param)


def options(nsqd, topic, folder, **more):
    return {
        "nsq.nsqd.addresses": nsqd.tcp,
        "nsq.nsqd.http.addresses": nsqd.http,
        "subscribe": topic,
        "channel": "spark",
        "mode": "spool",
        "spoolLocation": str(folder / "spool"),
        "spool.flushIntervalMs": "100",
        **more,
    }


def stream(spark, given):
    return spark.readStream.format("nsq").options(**given).load()


def rows_of(spark, path):
    return spark.read.parquet(str(path)).collect()


def run_available(spark, given, folder):
    """Everything that is there, into Parquet."""
    return run_query(
        lambda: (
            stream(spark, given)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(folder / "checkpoint"))
            .option("path", str(folder / "out"))
            .trigger(availableNow=True)
            .start()
        )
    )


def test_a_channel_becomes_rows(spark, nsqd, topic, tmp_path):
    nsqd.publish(topic, (b"message %d" % n for n in range(5000)))
    before = time.time()
    run_available(spark, options(nsqd, topic, tmp_path), tmp_path)
    rows = rows_of(spark, tmp_path / "out")
    assert sorted(bytes(row.value) for row in rows) == sorted(b"message %d" % n for n in range(5000))
    assert sorted(row.offset for row in rows) == list(range(5000))
    assert {row.topic for row in rows} == {topic}
    assert {row.attempts for row in rows} == {1}
    assert len({row.id for row in rows}) == 5000
    assert all(len(row.id) == 16 for row in rows)
    assert all(abs(row.timestamp_ns / 1e9 - before) < 600 for row in rows)
    assert nsqd.depth(topic, "spark") == 0
    # The next run goes on where this one stopped, and lets go of what is done.
    nsqd.publish(topic, [b"later"])
    run_available(spark, options(nsqd, topic, tmp_path), tmp_path)
    rows = rows_of(spark, tmp_path / "out")
    assert len(rows) == 5001
    assert sorted(row.offset for row in rows) == list(range(5001))


def test_messages_stream_in_bounded_batches_and_files_go_after_the_commit(spark, nsqd, topic, tmp_path):
    given = options(nsqd, topic, tmp_path, maxMessagesPerTrigger="700", minPartitions="2")
    query = start_query(
        lambda: (
            stream(spark, given)
            .writeStream.format("memory")
            .queryName("bounded_" + nsqd.kind)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
    )
    try:
        for part in range(4):
            nsqd.publish(topic, (b"%d" % n for n in range(part * 1000, part * 1000 + 1000)))
        table = f"select value from bounded_{nsqd.kind}"
        wait_for(lambda: query.exception() or spark.sql(table).count() == 4000, "all rows")
        assert query.exception() is None
        assert {int(bytes(row.value)) for row in spark.sql(table).collect()} == set(range(4000))
        sizes = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
        assert max(sizes) <= 700
        latest = query.recentProgress[-1].sources[0].latestOffset
        assert '"mode": "spool"' in str(latest) or '"mode":"spool"' in str(latest)
        # One batch more, so that the last of these is committed.
        nsqd.publish(topic, [b"4000"])
        wait_for(lambda: spark.sql(table).count() == 4001, "the last row")
        wait_for(lambda: len(list((tmp_path / "spool").glob("*.arrow"))) <= 2, "spool files go after the commit")
    finally:
        query.stop()


def test_a_full_spool_stops_the_channel_and_goes_on_by_itself(spark, nsqd, topic, tmp_path):
    # Each batch takes all there is; Spark commits one only when it plans the next, which a full spool must not prevent.
    given = options(nsqd, topic, tmp_path, spoolMaxBytes="200k", **{"spool.maxInFlight": "100"})
    nsqd.publish(topic, (b"%06d" % n * 20 for n in range(10_000)))
    query = start_query(
        lambda: (
            stream(spark, given)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .option("path", str(tmp_path / "out"))
            .start()
        )
    )
    largest = 0

    def done():
        nonlocal largest
        # Files go while they are looked at.
        with contextlib.suppress(FileNotFoundError):
            largest = max(largest, sum(file.stat().st_size for file in (tmp_path / "spool").glob("*.arrow")))
        return query.exception() or (nsqd.depth(topic, "spark") == 0 and query.recentProgress)

    try:
        wait_for(done, "the channel is empty")
        assert query.exception() is None
        wait_for(lambda: len(rows_of(spark, tmp_path / "out")) >= 10_000, "all rows")
    finally:
        query.stop()
    assert len({bytes(row.value) for row in rows_of(spark, tmp_path / "out")}) == 10_000
    assert largest < 400_000


def test_a_batch_of_a_plain_nsqd_is_refused_and_drain_reads_it(spark, go_broker, topic, tmp_path):
    import flintmq.spark

    go_broker.publish(topic, (b"%d" % n for n in range(1000)))
    given = {"nsq.nsqd.addresses": go_broker.tcp, "subscribe": topic}
    with pytest.raises(Exception, match=r"flintmq\.spark\.drain\(\)"):
        spark.read.format("nsq").options(**given).load().count()
    assert go_broker.depth(topic, "spark") == 0
    frame = flintmq.spark.drain(spark, {**given, "channel": "spark", "spoolLocation": str(tmp_path)})
    assert frame.count() == 1000
    assert {int(bytes(row.value)) for row in frame.collect()} == set(range(1000))
    assert go_broker.depth(topic, "spark") == 0


def test_explaining_a_batch_consumes_nothing(spark, go_broker, topic, tmp_path):
    import flintmq.spark

    go_broker.publish(topic, (b"%d" % n for n in range(10)))
    given = {"nsq.nsqd.addresses": go_broker.tcp, "subscribe": topic, "channel": "c", "spoolLocation": str(tmp_path)}
    frame = flintmq.spark.drain(spark, given)
    go_broker.publish(topic, (b"%d" % n for n in range(10)))
    frame.explain()
    frame.explain()
    assert go_broker.depth(topic, "c") == 10
    assert frame.count() == 10


DRIVER = """
    import os, sys
    sys.path.insert(0, sys.argv[4])
    from pathlib import Path
    from spark.conftest import small_session, start_query
    folder, tcp, topic = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    spark = small_session("local[2,4]", folder / "scratch")
    start = lambda: (
        spark.readStream.format("nsq")
        .options(**{
            "nsq.nsqd.addresses": tcp, "subscribe": topic, "channel": "spark", "mode": "spool",
            "spoolLocation": str(folder / "spool"), "maxMessagesPerTrigger": "400", "spool.flushIntervalMs": "50",
        })
        .load().writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint")).option("path", str(folder / "out"))
        .start()
    )
    start_query(start).awaitTermination()
"""


def test_a_killed_driver_loses_nothing_and_repeats_nothing_from_the_spool(spark, go_broker, topic, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    tests = Path(__file__).resolve().parent.parent
    command = [sys.executable, str(script), str(tmp_path), go_broker.tcp, topic, str(tests)]
    go_broker.publish(topic, (b"%d" % n for n in range(6000)))
    batches = tmp_path / "checkpoint" / "commits"
    with open(tmp_path / "log", "wb") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            # In the middle: some batches are done, others are planned or only spooled.
            wait_for(
                lambda: driver.poll() is not None or (batches.exists() and (batches / "2").exists()),
                "three batches",
            )
            assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
        finally:
            # The JVM and its Python processes too.
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    spooled = len(list((tmp_path / "spool").glob("*.arrow")))
    assert spooled
    run_available(spark, options(go_broker, topic, tmp_path), tmp_path)
    rows = rows_of(spark, tmp_path / "out")
    # Numbers of the spool are exact, whatever the channel delivered twice.
    assert sorted(row.offset for row in rows) == list(range(len(rows)))
    values = [int(bytes(row.value)) for row in rows]
    assert set(values) | {int(m) for m in left_over(spark, go_broker, topic, tmp_path)} == set(range(6000))


def left_over(spark, nsqd, topic, folder):
    """What was in flight when the driver was killed and timed out later."""
    import flintmq.spark

    frame = flintmq.spark.drain(
        spark,
        {
            "nsq.nsqd.addresses": nsqd.tcp,
            "subscribe": topic,
            "channel": "spark",
            "spoolLocation": str(folder / "rest"),
        },
    )
    return [bytes(row.value) for row in frame.collect()]
