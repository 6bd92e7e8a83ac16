"""The sink on real brokers, through Spark: every row arrives where and when it should."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

pytest.importorskip("pyspark")

from flintmq.errors import ConnectError, PublishError
from flintmq.spark.shipped.options import read_sink_options
from flintmq.spark.sink import BatchWriter, writers
from flintmq.spark.sink.chunks import Chunk
from flintmq.spark.sink.publisher import Publisher
from flintmq.spark.sink.staging import Broker, ranked

from .conftest import run_query
from .sink_tools import consume, count_of, to, write

BROKERS = ["go_broker", "broker"]


@pytest.fixture(params=BROKERS)
def nsqd(request):
    return request.getfixturevalue(request.param)


def test_rows_become_messages(spark, nsqd, topic):
    frame = spark.range(2500).selectExpr("cast(id as string) as value").repartition(3)
    write(frame, to(nsqd, topic=topic, mpubMaxMessages="300"))
    assert count_of(nsqd, topic) == 2500
    assert sorted(map(int, consume(nsqd, topic, 2500))) == list(range(2500))


def test_a_column_says_where_rows_go_and_the_option_is_for_all_of_them(spark, nsqd, topic):
    frame = spark.range(100).selectExpr(
        "cast(cast(id as string) as binary) as value", f"concat('{topic}-', if(id % 2 = 0, 'even', 'odd')) as topic"
    )
    write(frame, to(nsqd))
    assert (count_of(nsqd, f"{topic}-even"), count_of(nsqd, f"{topic}-odd")) == (50, 50)
    assert {int(body) % 2 for body in consume(nsqd, f"{topic}-odd", 50)} == {1}
    write(frame, to(nsqd, topic=f"{topic}-all"))
    assert [count_of(nsqd, f"{topic}-{name}") for name in ("even", "odd", "all")] == [50, 50, 100]


def test_rows_may_be_deferred(spark, nsqd, topic):
    frame = spark.range(20).selectExpr("cast(id as string) as value", "if(id < 5, 3600000L, 0L) as defer_ms")
    nsqd.post("/topic/create", topic=topic)
    nsqd.post("/channel/create", topic=topic, channel="test")
    write(frame, to(nsqd, topic=topic))
    assert sorted(map(int, consume(nsqd, topic, 15))) == list(range(5, 20))
    stats = nsqd.get("/stats", format="json", topic=topic)
    assert stats["topics"][0]["channels"][0]["deferred_count"] == 5


def test_a_stream_is_published(spark, nsqd, topic, tmp_path):
    source = tmp_path / "in"
    spark.range(700).selectExpr("cast(id as string) as value").write.parquet(str(source))
    run_query(
        lambda: (
            spark.readStream.schema("value string")
            .parquet(str(source))
            .writeStream.format("nsq")
            .options(**to(nsqd, topic=topic))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
    )
    assert count_of(nsqd, topic) == 700


@pytest.mark.parametrize(
    ("select", "options", "sentence"),
    [
        ("id as value", {"topic": "t"}, "the column value is bigint, and must be binary or string"),
        ("'a' as body", {"topic": "t"}, 'no column "value"'),
        ("'a' as value", {}, "say where rows go: by the option topic"),
        ("'a' as value; 5 as topic", {}, "the column topic is int"),
        ("'a' as value; 'later' as defer_ms", {"topic": "t"}, "the column defer_ms is string"),
        ("'a' as value; 1 as priority", {"topic": "t"}, "the column priority would be lost"),
        ("cast(null as string) as value", {"topic": "t"}, "a value that is null"),
        ("'' as value", {"topic": "t"}, "a value that is empty"),
        ("'a' as value; 'no topic' as topic", {}, "no name of a topic"),
        ("'a' as value; cast(null as string) as topic", {}, "a row has no topic"),
        ("'a' as value; -5 as defer_ms", {"topic": "t"}, "defer_ms = -5"),
        ("'a' as value", {"topic": "t", "mpubMaxByte": "5"}, "did you mean mpubMaxBytes"),
        ("'a' as value", {"topic": "t", "nsq.nsqd.addresses": "127.0.0.1:1"}, "127.0.0.1:1 cannot be reached"),
    ],
)
def test_a_wrong_write_is_told_in_one_sentence(spark, broker, select, options, sentence):
    with pytest.raises(Exception) as caught:
        write(spark.range(1).selectExpr(*select.split("; ")), to(broker, **{"fetch.numRetries": "0", **options}))
    assert sentence in str(caught.value)


def test_a_topic_cannot_be_overwritten(spark, broker, topic):
    frame = spark.range(1).selectExpr("'a' as value")
    with pytest.raises(Exception, match="a topic cannot be overwritten"):
        frame.write.format("nsq").options(**to(broker, topic=topic)).mode("overwrite").save()
    assert count_of(broker, topic) == 0


class Cutter:
    """A way to a broker that is cut after so many answers, each time; it counts what it let through."""

    def __init__(self, address, answers, cuts):
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._answers = answers
        self.cuts_left = cuts
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client):
        broker = socket.create_connection(self._target)

        def up():
            try:
                while data := client.recv(65536):
                    broker.sendall(data)
            except OSError:
                pass
            broker.close()

        threading.Thread(target=up, daemon=True).start()
        seen = 0
        try:
            while data := broker.recv(65536):
                if self.cuts_left and seen >= self._answers:
                    # The broker has stored it, and nobody hears of it.
                    self.cuts_left -= 1
                    break
                seen += 1
                client.sendall(data)
        except OSError:
            pass
        client.close()
        broker.close()

    def close(self):
        self._server.close()


def test_without_staging_a_lost_answer_is_asked_for_again_and_nothing_is_lost(spark, nsqd, topic):
    cutter = Cutter(nsqd.tcp, answers=3, cuts=3)
    try:
        frame = spark.range(3000).selectExpr("cast(id as string) as value").coalesce(1)
        options = to(nsqd, topic=topic, mpubMaxMessages="100", idempotent="false")
        write(
            frame, {**options, "nsq.nsqd.addresses": cutter.address, "fetch.numRetries": "5", "fetch.timeoutMs": "5000"}
        )
    finally:
        cutter.close()
    assert cutter.cuts_left == 0
    published = count_of(nsqd, topic)
    assert {int(body) for body in consume(nsqd, topic, published)} == set(range(3000))
    # The MPUBs whose answers were lost are there twice.
    assert published > 3000


@pytest.mark.parametrize("kind", ["go", "flintmq"])
def test_without_staging_a_write_goes_on_without_one_of_the_brokers(spark, start_node, topic, kind):
    gone, there = start_node(kind), start_node(kind)
    gone.kill()
    both = {"nsq.nsqd.addresses": f"{gone.tcp},{there.tcp}", "topic": topic, "idempotent": "false"}
    # More tasks than brokers: some of them begin with the one that is gone.
    write(spark.range(3000).selectExpr("cast(id as string) as value").repartition(7), both)
    assert count_of(there, topic) == 3000
    assert {int(body) for body in consume(there, topic, 3000)} == set(range(3000))


@pytest.mark.parametrize("kind", ["go", "flintmq"])
def test_without_staging_a_broker_that_is_lost_within_a_task_is_followed_by_another(start_node, topic, kind, caplog):
    nodes = [start_node(kind), start_node(kind)]
    options = read_sink_options(
        {"nsq.nsqd.addresses": ",".join(node.tcp for node in nodes), "topic": topic, "idempotent": "false"}
    )
    publisher = Publisher(options, [node.tcp for node in nodes])
    try:
        for number in range(100):
            if number == 50:
                nodes[0].kill()
            publisher.put(Chunk.of(topic, 0, [b"%d" % (10 * number + row) for row in range(10)]))
        publisher.finish()
    finally:
        publisher.close()
    assert f"nsqd {nodes[0].tcp} is lost for now" in caplog.text
    later = {int(body) for body in consume(nodes[1], topic, count_of(nodes[1], topic))}
    assert later >= set(range(500, 1000))
    # At most the publishes that were not answered are sent again.
    assert len(later) == count_of(nodes[1], topic) <= 500 + 10 * 5
    if kind == "flintmq":  # NSQ's own has lost what it had in memory
        nodes[0].start()
        kept = nodes[0].get("/stats", format="json", topic=topic)["topics"][0]["depth"]
        before = {int(body) for body in consume(nodes[0], topic, kept)}
        assert before | later == set(range(1000))


def test_without_staging_a_broker_that_takes_nothing_more_is_followed_by_another(start_node, topic):
    """Its disk is full, or it ends: E_MPUB_FAILED."""
    answers = FailingBroker()
    there = start_node("flintmq")
    options = read_sink_options({"nsq.nsqd.addresses": there.tcp, "topic": topic, "fetch.numRetries": "1"})
    try:
        publisher = Publisher(options, [answers.address, there.tcp])
        publisher.put(Chunk.of(topic, 0, [b"1", b"2"]))
        publisher.finish()
        publisher.close()
        assert count_of(there, topic) == 2
        alone = Publisher(options, [answers.address])
        with pytest.raises(PublishError, match=r"refused a publish .*E_MPUB_FAILED"):
            alone.put(Chunk.of(topic, 0, [b"1"]))
            alone.finish()
        alone.close()
        there.stop()
        both = Publisher(options, [answers.address, there.tcp])
        with pytest.raises(ConnectError, match=rf"none of the nsqds {answers.address}, {there.tcp}"):
            both.put(Chunk.of(topic, 0, [b"1"]))
            both.finish()
        both.close()
    finally:
        answers.close()


class FailingBroker:
    """A broker that stores nothing and says so."""

    def __init__(self):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client):
        with client:
            frames = [(0, b"OK"), *[(1, b"E_MPUB_FAILED MPUB failed disk full")] * 100]
            try:
                for kind, data in frames:
                    if not client.recv(65536):
                        return
                    client.sendall(struct.pack(">II", 4 + len(data), kind) + data)
            except OSError:
                return

    def close(self):
        self._server.close()


def failing_once(frame, nsqd, topic):
    """The same rows, in tasks that fail at the end of their first try, when some of their rows are published."""
    url = f"http://{nsqd.http}/stats?format=json&topic={topic}"

    def fail_once(batches):
        import json
        import time
        import urllib.request

        from pyspark import TaskContext

        yield from batches
        if TaskContext.get().attemptNumber() == 0:
            for _ in range(600):
                with urllib.request.urlopen(url) as answer:
                    topics = json.load(answer)["topics"]
                if topics and topics[0]["message_count"]:
                    raise RuntimeError("the first try fails")
                time.sleep(0.1)

    return frame.mapInArrow(fail_once, "value string")


def test_on_other_brokers_a_task_that_is_tried_again_publishes_again(spark, go_broker, topic):
    frame = spark.range(50_000).selectExpr("lpad(cast(id as string), 20, '0') as value").coalesce(1)
    write(failing_once(frame, go_broker, topic), to(go_broker, topic=topic))
    assert count_of(go_broker, topic) > 50_000
    with pytest.raises(Exception, match=r"cannot stage rows.*set idempotent=auto"):
        write(frame, to(go_broker, topic=topic, idempotent="true"))


def test_a_batch_write_with_an_id_may_be_repeated(spark, broker, topic):
    frame = spark.range(1000).selectExpr("cast(id as string) as value").repartition(2)
    for _ in range(2):
        write(frame, to(broker, topic=topic, writeId="report-2026-01"))
    assert count_of(broker, topic) == 1000
    write(frame, to(broker, topic=topic, writeId="report-2026-02"))
    assert count_of(broker, topic) == 2000
    # Without one, each write is another one.
    write(frame, to(broker, topic=topic))
    assert count_of(broker, topic) == 3000


def test_deferred_rows_are_stored_once_too(spark, broker, topic):
    frame = spark.range(40).selectExpr("cast(id as string) as value", "id * 1000 as defer_ms").coalesce(1)
    for _ in range(2):
        write(frame, to(broker, topic=topic, writeId="w"))
    assert count_of(broker, topic) == 40


def test_a_batch_of_a_stream_that_is_run_again_stores_its_rows_once(spark, broker, topic, tmp_path):
    source = tmp_path / "in"
    spark.range(500).selectExpr("cast(id as string) as value").write.parquet(str(source))

    def run():
        return run_query(
            lambda: (
                spark.readStream.schema("value string")
                .parquet(str(source))
                .writeStream.format("nsq")
                .options(**to(broker, topic=topic))
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
        )

    run()
    assert count_of(broker, topic) == 500
    # As after a crash between the publishes and Spark's note that they are done.
    commits = tmp_path / "checkpoint" / "commits"
    for name in ("0", ".0.crc"):
        (commits / name).unlink(missing_ok=True)
    run()
    assert (commits / "0").exists()
    assert count_of(broker, topic) == 500


def test_partitions_keep_their_broker_when_others_come_and_go():
    def choice(nodes):
        brokers = [Broker(node, f"{node}:1") for node in nodes]
        return [ranked(brokers, str(partition))[0].node for partition in range(200)]

    three = choice("abc")
    assert {three.count(node) > 40 for node in "abc"} == {True}
    assert choice("cab") == three
    without = choice("ab")
    assert all(now == before for now, before in zip(without, three, strict=True) if before != "c")


@pytest.mark.parametrize(("kind", "options"), [("go_broker", {}), ("broker", {"idempotent": "false"})])
def test_at_least_once_is_said_once_at_the_start(request, caplog, monkeypatch, kind, options):
    nsqd = request.getfixturevalue(kind)
    monkeypatch.setattr(writers, "_said", set())
    for _ in range(2):
        writer = BatchWriter(read_sink_options(to(nsqd, topic="t", **options)), {"value": "string"}, overwrite=False)
    assert caplog.text.count("at least once, not exactly once") == 1
    writer.commit([writers.Published(5, None)])
    writer.abort([writers.Published(5, None), None])
    assert "5 rows of it are published already" in caplog.text


def test_exactly_once_says_nothing(broker, caplog, monkeypatch):
    monkeypatch.setattr(writers, "_said", set())
    BatchWriter(read_sink_options(to(broker, topic="t")), {"value": "string"}, overwrite=False)
    assert not caplog.records


def test_rows_go_to_the_brokers_that_can_stage(broker, go_broker, caplog, monkeypatch):
    monkeypatch.setattr(writers, "_said", set())
    where = {"nsq.nsqd.addresses": f"{go_broker.tcp},{broker.tcp}", "topic": "t", "idempotent": "true"}
    writer = BatchWriter(read_sink_options(where), {"value": "string"}, overwrite=False)
    assert [found.tcp for found in writer._job.brokers] == [broker.tcp]
    assert f"nsqd {go_broker.tcp} cannot stage rows" in caplog.text
