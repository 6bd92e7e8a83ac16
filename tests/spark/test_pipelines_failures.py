"""Pipelines and tables in ordinary failures, on real Spark with a real broker: no row is lost or doubled in silence."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import common, metrics, sql
from flintmq.spark.pipelines.audit import audit
from flintmq.spark.session import session

from . import cluster as spark_cluster
from .conftest import wait_for
from .daemons import Node
from .test_pipelines import forget_last_commit
from .test_pipelines_broker import batch, bodies, hold, network, publish, rows_of, run, texts, topics


def newest(checkpoint: Path, folder: str) -> Path:
    return max((path for path in (checkpoint / folder).iterdir() if path.name.isdigit()), key=lambda p: int(p.name))


def roll_back(checkpoint: Path) -> None:
    """As after a power failure, or from a backup: Spark's notes of its last batch are not there."""
    for folder in ("offsets", "commits"):
        path = newest(checkpoint, folder)
        path.unlink()
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def archived(spark: Any, broker: Node, topic: str, root: Path) -> Any:
    return audit(spark, batch(broker, topic).batch, lambda spark: archiving.read(spark, root), complete=True)


# --- Archives ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_went_back_stops_and_says_how_to_go_on(spark, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 1000))
    root = tmp_path / "archive"
    source = topics(broker, topic, maxMessagesPerTrigger="371")
    assert archiving.archive(spark, source.stream, root, once=True).rows == 1000
    roll_back(root / "_checkpoint")
    # The same batch again is skipped.
    assert archiving.archive(spark, source.stream, root, once=True).rows == 0
    roll_back(root / "_checkpoint")
    publish(broker, topic, bodies(1000, 2000))
    with pytest.raises(PipelineError, match="the checkpoint has gone back") as caught:
        archiving.archive(spark, topics(broker, topic).stream, root, once=True)
    assert "\n" not in str(caught.value)
    # What it says to do works.
    [start] = re.findall("--from '(.*)'", str(caught.value))
    again = topics(broker, topic, startingOffsets=start)
    summary = archiving.archive(
        spark, again.stream, root, checkpoint=tmp_path / "checkpoint", new_query=True, once=True
    )
    assert summary.rows == 1000
    report = archived(spark, broker, topic, root)
    assert report.passed
    assert report.total("archived") == 2000


def test_files_that_vanish_while_a_batch_is_written_stop_it(
    spark, broker: Node, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 1234))
    root = tmp_path / "archive"
    check = archiving.check_files

    def robbed(place: Any, files: Any, *more: Any) -> Any:
        (root / files[0].path).unlink()
        return check(place, files, *more)

    source = topics(broker, topic, minPartitions="3")
    with monkeypatch.context() as patch:
        patch.setattr(archiving, "check_files", robbed)
        with pytest.raises(
            PipelineError, match=r"Spark wrote 1,234 rows in batch \S+-0000000000 and the files in .* hold"
        ):
            archiving.archive(spark, source.stream, root, once=True)
    assert archiving.archive(spark, source.stream, root, once=True).rows == 1234
    assert archived(spark, broker, topic, root).passed


def test_where_batches_are_written_elsewhere_a_lost_checkpoint_is_noticed_too(
    spark, broker: Node, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Behind Spark Connect this process sees no files, and the writer of the batches has to judge."""
    monkeypatch.setattr(common, "is_remote", lambda spark: True)
    hold(broker, topic)
    publish(broker, topic, bodies(0, 100))
    root = tmp_path / "archive"
    source = topics(broker, topic)
    archiving.archive(spark, source.stream, root, once=True)
    shutil.rmtree(root / "_checkpoint")
    for _ in range(2):
        with pytest.raises(PipelineError, match="archived twice"):
            archiving.archive(spark, source.stream, root, once=True)
    assert rows_of(root) == 100
    archiving.archive(spark, source.stream, root, new_query=True, once=True)
    assert rows_of(root) == 200


def test_a_table_of_a_query_is_not_added_to_without_its_checkpoint(spark, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 100))
    sql.tables(spark, {topic: topics(broker, topic).stream})
    query = f"SELECT text FROM {sql.table_name(topic)}"
    table = tmp_path / "table"
    sql.stream(spark, query, table=table, once=True)
    shutil.rmtree(table / "_checkpoint")
    with pytest.raises(PipelineError, match="archived twice"):
        sql.stream(spark, query, table=table, once=True)
    assert rows_of(table) == 100
    sql.stream(spark, query, table=table, new_query=True, once=True)
    assert rows_of(table) == 200


# --- Readers for a while ----------------------------------------------------------------------------------------------


def test_metrics_on_the_screen_leave_no_reader_position(spark, broker: Node, topic: str):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 300))
    board = metrics.Board()
    metrics.metrics(spark, topics(broker, topic).stream, window=3600, board=board, once=True)
    assert sum(row["messages"] for row in board.of(topic)) == 300

    def positions() -> list[Any]:
        found: list[Any] = broker.get("/log/position", topic=topic)["positions"]
        return found

    wait_for(lambda: not positions(), "the position is gone", patience=60)


# --- Queries to topics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_a_result_that_changes_is_published(spark, broker: Node, topic: str, tmp_path: Path, mode: str):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 30))
    out = f"{topic[:50]}.out"
    sql.tables(spark, {topic: topics(broker, topic).stream}, {topic: "id BIGINT, country STRING"})
    query = f"SELECT data.country, count(*) AS n FROM {sql.table_name(topic)} GROUP BY ALL"

    def once() -> None:
        options: dict[str, Any] = {"network": network(broker), "checkpoint": tmp_path / "sql", "mode": mode}
        sql.stream(spark, query, topic=out, once=True, **options)

    once()
    publish(broker, topic, [json.dumps({"id": 1, "country": "fr"}).encode()])
    once()
    # A batch that Spark runs again is published once.
    forget_last_commit(tmp_path / "sql")
    once()
    found = [(row["country"], row["n"]) for row in map(json.loads, texts(spark, broker, out))]
    second = [("fr", 11)] if mode == "update" else [("de", 20), ("fr", 11)]
    assert sorted(found) == sorted([("fr", 10), ("de", 20), *second])


# --- Tables of the catalog --------------------------------------------------------------------------------------------


def test_topics_are_tables_of_the_catalog(spark, broker: Node, topic: str):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 7))
    common.register(spark)
    where = f"`nsq.nsqd.addresses` '{broker.tcp}'"
    name = sql.table_name(topic)[-30:]
    spark.sql(
        f"CREATE TABLE {name} USING nsq OPTIONS ({where}, subscribe '{topic}') COMMENT 'orders' "
        "TBLPROPERTIES ('made.by' = 'somebody')"
    )
    given = f"`nsq.nsqd.addresses` = '{broker.tcp}'"
    try:
        read = f"SELECT * FROM {name} WITH ({given}, subscribe = '{topic}')"
        assert spark.sql(read).count() == 7
        assert spark.read.options(**network(broker), subscribe=topic).table(name).count() == 7
        spark.sql(f"INSERT INTO {name} WITH ({given}) {read}")
        assert spark.sql(read).count() == 14
        # Spark keeps a table's options to itself: that is said, and what to do.
        for statement in (f"SELECT count(*) FROM {name}", f"INSERT INTO {name} {read}"):
            with pytest.raises(Exception, match=r"SELECT … FROM t WITH .*TEMPORARY VIEW"):
                spark.sql(statement).collect()
    finally:
        spark.sql(f"DROP TABLE {name}")
    options = {**network(broker), "subscribe": topic}
    try:
        assert spark.catalog.createTable(f"{name}_c", source="nsq", **options).columns[0] == "value"
    finally:
        spark.sql(f"DROP TABLE IF EXISTS {name}_c")
    spark.sql(f"CREATE TEMPORARY VIEW {name}_v USING nsq OPTIONS ({where}, subscribe '{topic}')")
    assert spark.sql(f"SELECT * FROM {name}_v").count() == 14
    spark.sql(f"CREATE TEMPORARY VIEW {name}_w USING nsq OPTIONS ({where}, topic '{topic}')")
    spark.sql(f"INSERT INTO {name}_w (value) SELECT cast('one more' AS binary)")
    assert texts(spark, broker, topic)[-1] == "one more"
    # A view, as any DataFrame, is what the topic held when it was first read.
    assert spark.sql(f"SELECT * FROM {name}_v").count() == 14
    with pytest.raises(Exception, match="did you mean subscribe"):
        spark.sql(f"CREATE TABLE {name}_x USING nsq OPTIONS ({where}, subscribee '{topic}')")
    with pytest.raises(Exception, match="takes no path"):
        spark.read.format("nsq").options(**options).load("/some/path").collect()


# --- The session ------------------------------------------------------------------------------------------------------


def test_a_session_that_runs_keeps_its_settings(spark):
    kept = {
        "spark.sql.session.timeZone": "Asia/Kathmandu",
        "spark.sql.parquet.outputTimestampType": "INT96",
        "spark.sql.shuffle.partitions": "17",
    }
    before = {key: spark.conf.get(key) for key in kept}
    for key, value in kept.items():
        spark.conf.set(key, value)
    try:
        again = session("another")
        assert {key: again.conf.get(key) for key in kept} == kept
        assert again.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
        session("another", **{"spark.sql.session.timeZone": "Europe/Berlin"})
        assert spark.conf.get("spark.sql.session.timeZone") == "Europe/Berlin", "said here"
    finally:
        for key, value in before.items():
            spark.conf.set(key, value)


# --- Two drivers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def first_driver(broker: Node, topic: str, tmp_path: Path) -> Iterator[spark_cluster.Program]:
    """A driver that archives a topic until it is told to stop."""
    command = [sys.executable, "-m", "flintmq", "pipeline", "archive", *arguments(broker, topic, tmp_path)]
    program = spark_cluster.Program([*command, "--every", "1s"], tmp_path / "first.log")
    yield program
    program.kill()


def arguments(broker: Node, topic: str, folder: Path) -> list[str]:
    flags = ["--conf", "spark.driver.memory=700m", "--master", "local[1,4]", "--nsqd", broker.tcp]
    return [topic, "--to", str(folder / "archive"), *flags]


@pytest.mark.timeout(900)
def test_two_drivers_and_a_zombie_lose_nothing(
    spark_environment, broker: Node, topic: str, tmp_path: Path, request: pytest.FixtureRequest
):
    root = tmp_path / "archive"
    hold(broker, topic)
    publish(broker, topic, bodies(0, 5001))
    first: spark_cluster.Program = request.getfixturevalue("first_driver")
    wait_for(lambda: rows_of(root) == 5001, "the first batch", patience=300)
    # It stands still while another takes over, and wakes when that one is done.
    pid = first.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        publish(broker, topic, bodies(5001, 9003))
        done = run("archive", *arguments(broker, topic, tmp_path), "--once", "--json")
        assert done.returncode == 0, done.stderr
        assert rows_of(root) == 9003
        publish(broker, topic, bodies(9003, 9010))
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: first.process.poll() is not None, "the zombie notices and ends", patience=300)
    assert first.process.returncode == 1, first.log.read_text()
    assert "Traceback" not in first.log.read_text()
    again = run("archive", *arguments(broker, topic, tmp_path), "--once", "--json")
    assert again.returncode == 0, again.stderr
    # Each message once, as a reader finds it who knows nothing of us.
    import deltalake

    found = deltalake.DeltaTable(str(root)).to_pyarrow_table(columns=["value"])
    assert sorted(found["value"].to_pylist()) == sorted(bodies(0, 9010))
