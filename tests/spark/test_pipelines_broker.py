"""The pipelines with a real broker: from topics, to topics, and as commands."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from flintmq.cli import main
from flintmq.errors import PipelineError
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import common, dead_letters, metrics, replay, sql
from flintmq.spark.pipelines.audit import audit

from . import cluster as spark_cluster
from .conftest import wait_for
from .daemons import Node

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def topics(broker: Node, *names: str, **options: str) -> common.Topics:
    return common.Topics(names, {"nsq.nsqd.addresses": broker.tcp, "startingOffsets": "earliest", **options})


def batch(broker: Node, *names: str) -> common.Topics:
    return common.Topics(names, {"nsq.nsqd.addresses": broker.tcp})


def network(broker: Node) -> dict[str, str]:
    return {"nsq.nsqd.addresses": broker.tcp}


def hold(broker: Node, topic: str) -> None:
    """A channel that nobody reads keeps the log."""
    broker.post("/topic/create", topic=topic)
    broker.post("/channel/create", topic=topic, channel="holder")


def publish(broker: Node, topic: str, messages: list[bytes]) -> None:
    """Publish, and wait until it is on the device: readers of a log are shown nothing else."""
    broker.publish(topic, messages)

    def is_durable() -> bool:
        info = broker.get("/log/info", topic=topic)
        return bool(info["durable"] == info["end"])

    wait_for(is_durable, "all is on the device")


def texts(spark: Any, broker: Node, topic: str) -> list[str]:
    rows = batch(broker, topic).batch(spark).orderBy("offset").selectExpr("cast(value AS string) AS text").collect()
    return [row["text"] for row in rows]


def bodies(first: int, stop: int) -> list[bytes]:
    return [
        json.dumps({"id": number, "country": "de" if number % 3 else "fr"}).encode() for number in range(first, stop)
    ]


# --- From and to topics -----------------------------------------------------------------------------------------------


def test_archive_audit_and_replay_of_a_topic(spark, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 3000))
    root = tmp_path / "archive"
    source = topics(broker, topic, maxMessagesPerTrigger="1000")
    summary = archiving.archive(spark, source.stream, root, once=True)
    assert summary.rows == 3000
    assert summary.batches >= 3
    assert summary.lag == 0
    publish(broker, topic, bodies(3000, 4000))
    assert archiving.archive(spark, source.stream, root, once=True).rows == 1000
    report = audit(spark, batch(broker, topic).batch, lambda spark: archiving.read(spark, root), complete=True)
    assert report.passed
    assert (report.total("published"), report.total("archived")) == (4000, 4000)

    # Out of the archive, with a filter, stopped half-way and gone on with.
    again = f"{topic[:50]}.again"
    where = "get_json_object(text, '$.country') = 'fr'"
    chunks = replay.archive_chunks(root, size=1000)
    assert len(chunks) >= 4
    stops = iter([False, True])

    def read(spark: Any, chunk: replay.Chunk) -> Any:
        if next(stops, False):
            raise PipelineError("stopped here")
        return replay.archive_reader(root)(spark, chunk)

    for reader in (read, replay.archive_reader(root)):
        try:
            replay.replay(spark, lambda: chunks, reader, again, network(broker), tmp_path / "replay", where=where)
        except PipelineError as exc:
            assert str(exc) == "stopped here"
    assert [json.loads(text)["id"] for text in texts(spark, broker, again)] == list(range(0, 4000, 3))

    # The chunk that was under way when it was stopped is not published twice.
    (tmp_path / "replay" / "done.json").write_text(str(len(chunks) - 1))
    replay.replay(
        spark, lambda: [], replay.archive_reader(root), again, network(broker), tmp_path / "replay", where=where
    )
    assert len(texts(spark, broker, again)) == len(range(0, 4000, 3))
    with pytest.raises(PipelineError, match="another replay"):
        replay.replay(spark, lambda: [], replay.archive_reader(root), "elsewhere", network(broker), tmp_path / "replay")


def test_archive_of_a_channel_of_a_plain_nsqd(spark, go_broker: Node, topic: str, tmp_path: Path):
    go_broker.post("/topic/create", topic=topic)
    go_broker.post("/channel/create", topic=topic, channel="archive")
    go_broker.publish(topic, bodies(0, 500))
    parser = argparse.ArgumentParser()
    common.source_arguments(parser)
    flags = ["--nsqd", go_broker.tcp, "--channel", "archive", "--option", f"spoolLocation={tmp_path / 'spool'}"]
    source = common.stream_reader(parser.parse_args([topic, *flags]))
    assert archiving.archive(spark, source, tmp_path / "archive", once=True).rows == 500
    assert go_broker.depth(topic, "archive") == 0


def test_replay_of_a_log_keeps_a_rate(spark, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 300))
    options = {**network(broker), "subscribe": topic}
    chunks = replay.log_chunks(options, size=100)
    assert [chunk.rows for chunk in chunks] == [100, 100, 100]
    summary = replay.replay(
        spark, lambda: chunks, replay.log_reader(options), "{topic}.b", network(broker), tmp_path / "replay", rate=200
    )
    assert summary.rows == 300
    assert summary.seconds >= 300 / 200
    assert texts(spark, broker, f"{topic}.b") == [body.decode() for body in bodies(0, 300)]


def test_metrics_and_a_query_to_topics(spark, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 300))
    board = metrics.Board()
    metrics.metrics(spark, topics(broker, topic).stream, window=3600, path="$.country", board=board, once=True)
    assert sum(row["messages"] for row in board.of(topic)) == 300
    assert board.of(topic)[0]["top"][0] == {"item": "de", "count": board.of(topic)[0]["top"][0]["count"]}

    sql.tables(spark, {topic: topics(broker, topic).stream}, {topic: "id BIGINT, country STRING"})
    query = f"SELECT data.id, data.country FROM {sql.table_name(topic)} WHERE data.country = 'fr'"
    out = f"{topic[:50]}.out"
    for _ in range(2):
        sql.stream(spark, query, topic=out, network=network(broker), checkpoint=tmp_path / "sql", once=True)
    found = [json.loads(text) for text in texts(spark, broker, out)]
    assert sorted(row["id"] for row in found) == list(range(0, 300, 3))
    assert found[0].keys() == {"id", "country"}


def test_dead_letters_are_reported_and_sent_back_by_a_filter(spark, broker: Node, topic: str):
    letters = dead_letters.Letters(topic, "billing", network(broker))
    broker.post("/topic/create", topic=topic)
    broker.post("/channel/create", topic=topic, channel="billing")
    try:
        broker.put("/channel/config", {"max-attempts": 1}, topic=topic, channel="billing")
        broker.get("/channel/redrive", topic=topic, channel="billing")
    except urllib.error.HTTPError as exc:
        pytest.skip(f"this broker has no dead letters: {exc}")
    publish(broker, topic, bodies(0, 30))
    fail_all(broker, topic, "billing", 30)
    table = dead_letters.as_table(spark, letters)
    [group] = dead_letters.report(table)
    assert (group["messages"], group["reason"], group["channel"]) == (30, "requeued", "billing")
    fits = "get_json_object(text, '$.country') = 'fr'"
    assert sum(group["messages"] for group in dead_letters.report(table, fits)) == 10
    assert dead_letters.redrive(spark, letters, where=fits) == (10, 20)
    wait_for(lambda: broker.depth(topic, "billing") == 10, "ten came back")
    assert dead_letters.as_table(spark, letters).count() == 20
    assert dead_letters.redrive(spark, letters) == (20, 0)
    wait_for(lambda: broker.depth(topic, "billing") == 30, "all came back")
    with pytest.raises(PipelineError, match="--where"):
        dead_letters.report(table, "no such column")


def fail_all(broker: Node, topic: str, channel: str, count: int) -> None:
    """Take every message and put it back: its one attempt has failed."""
    from flintmq import sync

    with sync.Consumer(topic, channel, nsqd=broker.tcp, max_in_flight=50) as consumer:
        for _ in range(count):
            consumer.get(timeout=60).requeue()
        wait_for(lambda: broker.depth(topic, channel) == 0, "all have died")


# --- As commands ------------------------------------------------------------------------------------------------------


def run(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flintmq", "pipeline", *argv],
        env=spark_cluster.environment(**variables),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_commands_end_to_end_and_their_exit_status(spark_environment, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 500))
    small = ("--nsqd", broker.tcp, "--conf", "spark.driver.memory=1g", "--master", "local[2,4]")
    archive = str(tmp_path / "archive")
    done = run("archive", topic, "--to", archive, "--once", *small)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^archive: 500 messages in 1 batches", done.stdout)
    assert f"archive: {archive}" in done.stdout
    assert "starting Spark" in done.stderr
    # One file less is noticed.
    next(Path(archive).rglob("*.parquet")).rename(tmp_path / "aside")
    bad = run("audit", topic, "--archive", archive, "--json", *small)
    assert bad.returncode == 1
    assert "Traceback" not in bad.stderr


def test_brokers_that_nobody_answers_for_are_named_without_starting_spark(topic: str, tmp_path: Path, capsys):
    address = f"127.0.0.1:{unused_port()}"
    assert main(["pipeline", "archive", topic, "--to", str(tmp_path / "other"), "--once", "--nsqd", address]) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(f"flintmq pipeline archive: nsqd {address} cannot be reached: .*\n", told), told


@pytest.mark.parametrize("pipeline", ["archive", "metrics", "sql"])
def test_topics_that_no_broker_knows_are_named_and_fail_a_run_that_ends(
    broker: Node, topic: str, tmp_path: Path, capsys, pipeline: str
):
    query = tmp_path / "query.sql"
    query.write_text("SELECT 1")
    where = {"archive": [topic, "--to", str(tmp_path / "archive")], "metrics": [topic]}
    argv = where.get(pipeline, [str(query), "--topic", topic])
    assert main(["pipeline", pipeline, *argv, "--nsqd", broker.tcp, "--once"]) == 1
    sentence = f"flintmq pipeline {pipeline}: no broker knows the topic {topic}; asked were {broker.tcp}\n"
    assert capsys.readouterr().err == sentence, "and Spark was not started for it"


def test_what_is_known_is_done_where_another_topic_is_not(spark, broker: Node, topic: str, tmp_path: Path, capsys):
    publish(broker, topic, bodies(0, 3))
    argv = [topic, f"{topic}-not", "--to", str(tmp_path / "archive"), "--nsqd", broker.tcp, "--once"]
    assert main(["pipeline", "archive", *argv]) == 1
    told = capsys.readouterr()
    assert f"no broker knows the topic {topic}-not; asked" in told.err
    assert "archive: 3 messages in 1 batches" in told.out


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("SELEC 1", "the query is refused: "),
        ("SELECT * FROM nowhere", "the query is refused: .*nowhere"),
        ("SELECT cast(text AS int) FROM {table}", "a word"),
    ],
)
def test_a_query_that_cannot_run_ends_with_a_sentence(
    spark, broker: Node, topic: str, tmp_path: Path, capsys, query: str, sentence: str
):
    publish(broker, topic, [b"a word"])
    file = tmp_path / "query.sql"
    file.write_text(query.format(table=sql.table_name(topic)))
    assert main(["pipeline", "sql", str(file), "--topic", topic, "--nsqd", broker.tcp, "--batch"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert re.match(f"flintmq pipeline sql: .*{sentence}", told[-1]), told
    assert not [line for line in told if "Traceback" in line]


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_declarative_example_runs(spark_environment, broker: Node, topic: str, tmp_path: Path):
    pytest.importorskip("yaml", reason="spark-pipelines needs PyYAML: pip install 'flintmq[spark]'")
    hold(broker, topic)
    orders = [json.dumps({"id": n, "country": "de" if n % 3 else "fr", "amount": 2.5}).encode() for n in range(30)]
    publish(broker, topic, orders)
    project = tmp_path / "project"
    shutil.copytree(REPOSITORY / "examples" / "declarative", project)
    spec = (project / "spark-pipeline.yml").read_text()
    spec = spec.replace("file:///tmp/flintmq-declarative", (tmp_path / "storage").as_uri())
    spec = spec.replace("127.0.0.1:4150", broker.tcp).replace("flintmq.topic: orders", f"flintmq.topic: {topic}")
    (project / "spark-pipeline.yml").write_text(spec)
    # A catalog that outlives the process, in the project's folder, so that the second run goes on with the tables.
    conf = {"spark.sql.warehouse.dir": tmp_path / "warehouse", "spark.sql.catalogImplementation": "hive"}
    flags = [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    program = str(spark_cluster.spark_home() / "bin" / "spark-pipelines")
    for expected in (30, 40):
        done = subprocess.run(
            [program, *flags, "run", "--spec", str(project / "spark-pipeline.yml")],
            env=spark_cluster.environment(),
            cwd=project,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        from pyarrow import dataset

        table = dataset.dataset(str(tmp_path / "warehouse" / "orders"), format="parquet").to_table()
        assert table.num_rows == expected
        sales = dataset.dataset(str(tmp_path / "warehouse" / "sales"), format="parquet").to_table().to_pylist()
        assert sum(row["orders"] for row in sales) == expected
        publish(broker, topic, orders[:10])


def test_archive_behind_spark_connect_without_our_code_there(
    spark_environment, bare_python: str, broker: Node, topic: str, tmp_path: Path
):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 400))
    port = unused_port()
    server = spark_cluster.Program(
        [
            str(spark_cluster.spark_home() / "bin" / "spark-submit"),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", "local[2,4]"),
            *(
                "--conf",
                f"spark.connect.grpc.binding.port={port}",
                "--conf",
                "spark.connect.grpc.binding.address=127.0.0.1",
            ),
            *("--conf", "spark.driver.memory=1g", "--conf", "spark.ui.enabled=false", "spark-internal"),
        ],
        tmp_path / "server.log",
        PYTHONPATH="",
        PYSPARK_PYTHON=bare_python,
        PYSPARK_DRIVER_PYTHON=bare_python,
    )
    try:
        wait_for(lambda: is_open(port) or server.process.poll() is not None, "the server listens")
        archive = tmp_path / "archive"
        variables = {"SPARK_HOME": "", "JAVA_HOME": "/nowhere"}
        command = ("archive", topic, "--to", str(archive), "--once", "--nsqd", broker.tcp)
        command = (*command, "--remote", f"sc://127.0.0.1:{port}")
        done = run(*command, **variables)
        assert done.returncode == 0, done.stderr + server.log.read_text()[-3000:]
        assert archiving.Archive(archive).snapshot().rows == 400
        # The files are the server's, and so is the judgement that a checkpoint is missing.
        shutil.rmtree(archive / "_checkpoint")
        lost = run(*command, **variables)
        assert lost.returncode == 1, lost.stdout
        assert "archived twice" in lost.stderr.splitlines()[-1]
        assert archiving.Archive(archive).snapshot().rows == 400
        added = run(*command, "--new-query", **variables)
        assert added.returncode == 0, added.stderr
        assert archiving.Archive(archive).snapshot().rows == 800
        refused = run(
            "metrics", topic, "--nsqd", broker.tcp, "--once", "--remote", f"sc://127.0.0.1:{port}", **variables
        )
        assert refused.returncode == 1
        assert "--to-topic or --to-table" in refused.stderr
    finally:
        server.kill()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
