"""Log mode through Spark: the same offsets are the same rows, across restarts, lost commits and lost connections."""

from __future__ import annotations

import json
import re
import socket
import time
from datetime import UTC, datetime

import pytest

pytest.importorskip("pyspark")

from flintmq.spark.shipped.columns import SCHEMA

from .conftest import run_query, start_query, wait_for


def options(node, topic, **more):
    return {"nsq.nsqd.addresses": node.tcp, "subscribe": topic, **more}


def batch(spark, given):
    return spark.read.format("nsq").options(**given).load()


def numbers(rows):
    return [int(bytes(row.value)) for row in rows]


def publish(node, topic, numbers):
    """Published and durable: only such messages are offered."""
    node.publish(topic, (b"%d" % n for n in numbers))
    durable(node, topic)


def durable(node, topic):
    def is_durable():
        info = node.get("/log/info", topic=topic)
        return info["durable"] == info["end"] and info

    return wait_for(is_durable, "what was published is durable")


def to_parquet(spark, given, folder, **trigger):
    frame = spark.readStream.format("nsq").options(**given).load() if isinstance(given, dict) else given
    return (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .option("path", str(folder / "out"))
        .trigger(**(trigger or {"availableNow": True}))
        .start()
    )


def parquet(spark, folder):
    # Until there is a first row, Parquet has no schema to find.
    return spark.read.schema("value binary").parquet(str(folder / "out")).collect()


# --- Batches ----------------------------------------------------------------------------------------------------------


def test_a_topic_is_a_table(spark, broker, topic):
    before = time.time_ns()
    publish(broker, topic, range(25_000))
    info = broker.get("/log/info", topic=topic)
    frame = batch(spark, options(broker, topic))
    assert frame.schema.simpleString() == (
        "struct<value:binary,topic:string,node:string,offset:bigint,id:string,timestamp:timestamp,"
        "timestamp_ns:bigint,attempts:int>"
    )
    rows = sorted(frame.collect(), key=lambda row: row.offset)
    assert numbers(rows) == list(range(25_000))
    assert [row.offset for row in rows] == list(range(info["first"], info["durable"]))
    assert {(row.topic, row.node, row.attempts) for row in rows} == {(topic, info["node"], None)}
    assert all(int(row.id, 16) & ((1 << 54) - 1) == row.offset for row in rows)
    assert all(before <= row.timestamp_ns <= time.time_ns() for row in rows)
    naive = datetime.fromtimestamp(rows[0].timestamp_ns // 10**9, UTC).replace(tzinfo=None)
    seen = frame.selectExpr("date_format(min(timestamp), 'yyyy-MM-dd HH:mm:ss') as t").first().t
    assert seen == f"{naive:%Y-%m-%d %H:%M:%S}"
    # Reading makes no channel and moves nothing.
    stats = broker.get("/stats", format="json", topic=topic)["topics"][0]
    assert (stats["channels"], stats["depth"]) == ([], 25_000)


def test_the_example_of_the_readme_shows_messages(spark, broker, capfd):
    from test_readme import SPARK

    publish(broker, "orders", [1, 22])
    # With the address of a broker that is there; the session is the one that runs.
    exec(compile(SPARK.replace("127.0.0.1:4150", broker.tcp), "README.md", "exec"), {})
    assert re.findall(r"\|\s*(\d+)\|$", capfd.readouterr().out, re.MULTILINE) == ["1", "22"]


def test_a_range_is_cut_into_partitions(spark, broker, topic):
    publish(broker, topic, range(1000))
    whole = batch(spark, options(broker, topic))
    assert whole.rdd.getNumPartitions() == 1
    for more, expected in (({"minPartitions": "4"}, 4), ({"maxRecordsPerPartition": "150"}, 7)):
        frame = batch(spark, options(broker, topic, **more))
        assert frame.rdd.getNumPartitions() == expected
        assert sorted(numbers(frame.collect())) == list(range(1000))


def test_offsets_and_times_say_where_a_batch_begins_and_ends(spark, broker, topic):
    publish(broker, topic, range(100))
    # Later than any of these, and earlier than any of those.
    between = time.time_ns() // 1_000_000 + 1
    wait_for(lambda: time.time_ns() // 1_000_000 > between, "the next millisecond")
    publish(broker, topic, range(100, 250))
    info = broker.get("/log/info", topic=topic)
    node, first = info["node"], info["first"]

    def read(**more):
        return sorted(numbers(batch(spark, options(broker, topic, **more)).collect()))

    def at(offset):
        return json.dumps({topic: {node: offset}})

    assert read(startingOffsets=at(first + 10), endingOffsets=at(first + 20)) == list(range(10, 20))
    assert read(startingOffsets="latest") == []
    assert read(startingOffsets=at(-2), endingOffsets=at(-1)) == list(range(250))
    assert read(startingTimestamp=str(between)) == list(range(100, 250))
    text = datetime.fromtimestamp(between / 1000, UTC).isoformat()
    assert read(endingTimestamp=text) == list(range(100))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"subscribe": "no-such-topic"}, "no broker has the topic no-such-topic"),
        ({"nsq.nsqd.addresses": "127.0.0.1:1"}, "nsqd 127.0.0.1:1 cannot be reached"),
        ({"startingoffset": "latest"}, "did you mean startingOffsets"),
        ({"startingOffsets": '{"t": {"0123": 5}}', "subscribe": "here"}, "names t on node 0123, and no broker"),
        ({"subscribe": "gone#ephemeral"}, "an ephemeral topic keeps nothing in files"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_sentence(spark, broker, more, sentence):
    broker.post("/topic/create", topic="here")
    broker.post("/topic/create", topic="gone#ephemeral")
    with pytest.raises(Exception) as caught:
        batch(spark, {**options(broker, "t"), **more}).collect()
    assert sentence in str(caught.value)


@pytest.mark.parametrize("schema", ["body string", "offset int", "offset bigint, body string"])
def test_another_schema_is_refused(spark, broker, topic, schema):
    with pytest.raises(Exception, match="a schema that is given names some or all of these"):
        spark.read.format("nsq").schema(schema).options(**options(broker, topic)).load().collect()


def test_a_schema_of_some_columns_makes_a_table_of_them(spark, broker, topic, tmp_path):
    """In the order of the names. A condition may be on others, and `columns` has those null that it leaves out."""
    publish(broker, topic, range(100))
    whole = batch(spark, options(broker, topic)).orderBy("offset").collect()
    given = options(broker, topic, where=f"offset < {whole[60].offset}", minPartitions="2")
    for names in (["timestamp_ns", "offset"], ["node"], ["value", "id"]):
        schema = ", ".join(part for name in names for part in SCHEMA.split(", ") if part.startswith(f"{name} "))
        found = spark.read.format("nsq").schema(schema).options(**given).load()
        assert found.columns == names
        expected = [tuple(row[name] for name in names) for row in whole[:60]]
        assert sorted(map(tuple, found.collect())) == sorted(expected)
    found = spark.read.format("nsq").schema("value BINARY, offset BIGINT").options(**given, columns="offset").load()
    assert sorted(map(tuple, found.collect())) == [(None, row.offset) for row in whole[:60]]
    stream = spark.readStream.format("nsq").schema("offset BIGINT").options(**options(broker, topic))
    rows = stream.option("startingOffsets", "earliest").load().writeStream.format("parquet")
    rows = rows.option("path", str(tmp_path / "out")).option("checkpointLocation", str(tmp_path / "checkpoint"))
    run_query(lambda: rows.trigger(availableNow=True).start())
    assert sorted(map(tuple, spark.read.parquet(str(tmp_path / "out")).collect())) == [(row.offset,) for row in whole]


# --- Streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_goes_on_where_it_stopped(spark, broker, topic, tmp_path):
    publish(broker, topic, range(2000))
    given = options(broker, topic, startingOffsets="earliest", maxMessagesPerTrigger="300", minPartitions="2")
    query = run_query(lambda: to_parquet(spark, given, tmp_path))
    sizes = [progress.numInputRows for progress in query.recentProgress]
    assert sum(sizes) == 2000
    assert max(sizes) <= 300
    publish(broker, topic, range(2000, 2500))
    run_query(lambda: to_parquet(spark, given, tmp_path))
    assert sorted(numbers(parquet(spark, tmp_path))) == list(range(2500))
    # The last batch is committed by the run after it: so is its position.
    run_query(lambda: to_parquet(spark, given, tmp_path))
    (position,) = broker.get("/log/position", topic=topic)["positions"]
    assert position["reader"].startswith("spark-")
    end = json.loads((tmp_path / "checkpoint" / "offsets" / newest(tmp_path)).read_text().splitlines()[-1])
    assert end["reader"] == position["reader"]


def newest(folder):
    return str(max(int(path.name) for path in (folder / "checkpoint" / "offsets").iterdir() if path.name.isdigit()))


def test_the_first_batch_is_the_same_when_it_is_run_again(spark, broker, topic, tmp_path):
    """Spark asks once more where a query begins, and by then that is elsewhere: only the batch's end can be trusted."""
    publish(broker, topic, range(80))
    info = broker.get("/log/info", topic=topic)
    start = json.dumps({topic: {info["node"]: info["first"] + 50}})
    run_query(lambda: to_parquet(spark, options(broker, topic, startingOffsets=start), tmp_path))
    assert sorted(numbers(parquet(spark, tmp_path))) == list(range(50, 80))
    # As after a crash before the batch was done; what it wrote is gone, too.
    assert newest(tmp_path) == "0"
    for name in ("0", ".0.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    for path in sorted((tmp_path / "out").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    publish(broker, topic, range(80, 90))
    run_query(lambda: to_parquet(spark, options(broker, topic, startingOffsets="latest"), tmp_path))
    assert sorted(numbers(parquet(spark, tmp_path))) == list(range(50, 90))


def test_a_node_that_is_down_waits_for_nobody_else(spark, start_node, topic, tmp_path):
    from flintmq.spark import lag

    one, two = start_node(), start_node()
    publish(one, topic, range(100))
    publish(two, topic, range(1000, 1100))
    given = {
        "nsq.nsqd.addresses": f"{one.tcp},{two.tcp}",
        "subscribe": topic,
        "startingOffsets": "earliest",
        "fetch.timeoutMs": "5000",
    }
    query = start_query(lambda: to_parquet(spark, given, tmp_path, processingTime="0 seconds"))
    try:

        def seen(expected):
            if query.exception():
                raise query.exception()
            return (tmp_path / "out" / "_spark_metadata").exists() and set(
                numbers(parquet(spark, tmp_path))
            ) == expected

        first = {*range(100), *range(1000, 1100)}
        wait_for(lambda: seen(first), "both nodes")
        two.kill()
        publish(one, topic, range(100, 150))
        wait_for(lambda: seen(first | {*range(100, 150)}), "the node that is up")
        two.start()
        publish(two, topic, range(1100, 1200))
        wait_for(lambda: seen(first | {*range(100, 150), *range(1100, 1200)}), "the node that came back")
        rows = numbers(parquet(spark, tmp_path))
        assert len(rows) == len(set(rows))
        behind = lag(query.lastProgress)
        assert {key[0] for key in behind} == {topic}
        assert len(behind) == 2
    finally:
        query.stop()


def test_available_now_ends_while_others_go_on_publishing(spark, broker, topic, tmp_path):
    import threading

    publish(broker, topic, range(500))
    stop = threading.Event()

    def go_on():
        n = 500
        while not stop.is_set():
            broker.publish(topic, [b"%d" % n])
            n += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        given = options(broker, topic, startingOffsets="earliest", maxMessagesPerTrigger="100")
        run_query(lambda: to_parquet(spark, given, tmp_path))
    finally:
        stop.set()
        thread.join()
    rows = sorted(numbers(parquet(spark, tmp_path)))
    assert rows == list(range(len(rows)))
    assert len(rows) >= 500


def test_a_query_that_never_read_leaves_no_position(spark, broker, topic, tmp_path):
    """Spark ends the source by a signal and calls nobody: it cleans up all the same."""
    publish(broker, topic, range(5))
    frame = spark.readStream.format("nsq").options(**options(broker, topic)).load()

    def positions():
        return broker.get("/log/position", topic=topic)["positions"]

    # Of two sources the second is asked in vain, so no batch is ever planned.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        other = spark.readStream.format("nsq").options(**{"nsq.nsqd.addresses": address, "subscribe": topic}).load()
        query = start_query(lambda: to_parquet(spark, frame.union(other), tmp_path, processingTime="0 seconds"))
        try:
            wait_for(positions, "a position")
            wait_for(query.exception, "the query fails")
        finally:
            query.stop()
    wait_for(lambda: not positions(), "the position is gone")


def test_continuous_triggers_are_refused_by_spark_itself(spark, broker, topic, tmp_path):
    with pytest.raises(Exception, match=r"(?i)continuous"):
        to_parquet(spark, options(broker, topic), tmp_path, continuous="1 second").awaitTermination(60)
