"""Archives on a real S3 server: batches, fencing, audit and replay, and readers that know nothing of us."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")

import deltalake

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import common, replay
from flintmq.spark.pipelines.audit import audit
from flintmq.spark.pipelines.replay_notes import Notes
from flintmq.spark.pipelines.tables import DeltaTable, IcebergTable, open_table
from flintmq.spark.shipped.files import Place
from support.peers import PEERS

from . import cluster as spark_cluster
from . import object_store
from .conftest import wait_for
from .daemons import Node
from .object_store import Bucket
from .test_pipelines_broker import batch, bodies, hold, network, publish, run, texts, topics
from .test_tables import PER_BATCH, bring, end_at, rows, write


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with object_store.server(tmp_path_factory.mktemp("s3") / "weed") as found:
        yield found


@pytest.fixture
def place(bucket: Bucket, topic: str) -> Place:
    return Place.of(f"{bucket.uri}/{topic}/archive", bucket.options)


def values(place: Place) -> list[bytes]:
    """What one finds who reads the Delta table with deltalake alone."""
    table = deltalake.DeltaTable(place.text, storage_options=dict(place.options))
    return sorted(table.to_pyarrow_table(columns=["value"])["value"].to_pylist())


# --- Without Spark ----------------------------------------------------------------------------------------------------


def test_the_second_of_two_drivers_adds_nothing_and_stops(place: Place):
    race(place)


def race(place: Place) -> None:
    """Two drivers write one batch; merge and vacuum what they have left. On any store."""
    table = open_table(place)
    assert bring(table, 0)
    zombie, second = open_table(place), open_table(place)
    for driver in (zombie, second):
        assert driver.wants("q", 1, end_at(200), end_at(100), checkpoint="c", new_query=False)
    theirs = [write(driver, "q-1", rows(list(range(PER_BATCH, 2 * PER_BATCH)))) for driver in (zombie, second)]
    for written in theirs:
        archiving.check_files(place, written, PER_BATCH, "q-1")
    second.commit("q", 1, end_at(200), theirs[1])
    with pytest.raises(PipelineError, match="another process writes query q"):
        zombie.commit("q", 1, end_at(200), theirs[0])
    assert not bring(open_table(place), 1)
    with pytest.raises(PipelineError, match="the checkpoint has gone back"):
        bring(open_table(place), 1, end=201)
    assert len(values(place)) == 2 * PER_BATCH
    before, after = archiving.compact(archiving.Target(place), older_than=0)
    assert before > after
    assert len(values(place)) == 2 * PER_BATCH
    table = open_table(place)
    assert isinstance(table, DeltaTable)
    assert table.vacuum(0) == before
    assert len(values(place)) == 2 * PER_BATCH
    with pytest.raises(PipelineError, match="hold 0"):
        archiving.check_files(place / "elsewhere", theirs[0], PER_BATCH, "q-1")


def test_of_two_replays_from_one_folder_the_one_that_began_first_stops(place: Place):
    two_replays(place)


def two_replays(place: Place) -> None:
    """A store has no locks: the notes themselves keep two replays from putting different chunks into one write."""

    def plan() -> list[replay.Chunk]:
        return [replay.Chunk(10, {"number": number}) for number in range(6)]

    terms = {"to": "again"}
    first, second = Notes(place, terms), Notes(place, terms)
    assert first.check() == second.check() == {}
    assert first.begin(plan) == plan()
    with pytest.raises(PipelineError, match="is of another replay"):
        Notes(place, {"to": "elsewhere"}).begin(plan)
    first.begun(2)
    # The second goes on with the write that is under way, under the same name.
    assert second.begin(lambda: []) == plan()
    assert (second.name, second.done, second.under_way) == (first.name, 0, 2)
    second.begun(2)
    for change in (lambda: first.finished(2), lambda: first.begun(5)):
        with pytest.raises(PipelineError, match="another process replays from"):
            change()
    second.finished(2)
    second.begun(5)
    third = Notes(place, terms)
    assert third.begin(lambda: []) == plan()
    assert (third.done, third.under_way) == (2, 3)
    third.finished(5)
    # Two begin at the same time, and neither has found a plan: one of them is the replay.
    racers = [Notes(place / "race", {}) for _ in range(2)]
    assert [racer.check() for racer in racers] == [{}, {}]
    racers[0].begin(plan)
    with pytest.raises(PipelineError, match="another process replays from"):
        racers[1]._make(plan())
    assert Notes(place / "race", {}).check()["name"] == racers[0].name


def test_a_replay_whose_notes_are_files_of_a_store_goes_on(place: Place):
    """Versions before had them on stores, too."""
    known = {"name": "n", "terms": {"to": "again"}, "chunks": [[10, {"number": number}] for number in range(4)]}
    for name, text in {"plan": known, "done": 1, "doing": [1, 3]}.items():
        place.write_text(f"{name}.json", json.dumps(text))
    notes = Notes(place, {"to": "again"})
    assert len(notes.begin(list)) == 4
    assert (notes.name, notes.done, notes.under_way) == ("n", 1, 2)
    notes.finished(3)
    later = Notes(place, {"to": "again"})
    later.begin(list)
    assert (later.name, later.done, later.under_way) == ("n", 3, 1)


@pytest.mark.parametrize("kind", ["sql", "rest"])
def test_an_iceberg_table_on_a_store_is_exact_for_its_readers(place: Place, bucket: Bucket, tmp_path: Path, kind: str):
    """Its catalog is a database, or a server; what its readers need to open the store are options of the catalog."""
    for module in ("pyiceberg", "sqlalchemy"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install 'flintmq[lake]'")
    if kind == "rest":
        options = bucket.catalog_options("warehouse-of-sales")
    else:
        options = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"{bucket.uri}/warehouse"}
        options |= bucket.reader_options

    def opened() -> IcebergTable:
        table = open_table(place, "iceberg", catalog_options=options, table="sales.orders")
        assert isinstance(table, IcebergTable)
        return table

    assert bring(opened(), 0)
    zombie, second = opened(), opened()
    for driver in (zombie, second):
        assert driver.wants("q", 1, end_at(200), end_at(100), checkpoint="c", new_query=False)
    theirs = [write(driver, "q-1", rows(list(range(PER_BATCH, 2 * PER_BATCH)))) for driver in (zombie, second)]
    second.commit("q", 1, end_at(200), theirs[1])
    with pytest.raises(PipelineError, match="another process writes query q"):
        zombie.commit("q", 1, end_at(200), theirs[0])
    assert not bring(opened(), 1)
    found = opened()
    assert sum(file.rows for file in found.files()) == 2 * PER_BATCH
    assert sorted(found.load().scan().to_arrow()["offset"].to_pylist()) == list(range(2 * PER_BATCH))
    assert {tuple(file.partition) for file in found.files()} == {("topic", "date", "hour")}


def test_a_store_that_does_not_answer_is_told_in_a_line(bucket: Bucket):
    options = bucket.options | {"AWS_SECRET_ACCESS_KEY": "wrong", "max_retries": "0"}
    with pytest.raises(PipelineError, match=r"cannot be (read|opened)") as caught:
        open_table(Place.of(f"{bucket.uri}/wrong", options))
    assert "\n" not in str(caught.value)


# --- With Spark -------------------------------------------------------------------------------------------------------


def test_archive_audit_and_replay_on_a_store(spark, broker: Node, topic: str, place: Place, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 3000))
    target = archiving.Target(place)
    source = topics(broker, topic, maxMessagesPerTrigger="1000")
    with pytest.raises(PipelineError, match=r"s3a://.*add --packages, or keep the checkpoint on a disk"):
        archiving.archive(spark, source.stream, target, once=True)
    checkpoint = tmp_path / "checkpoint"
    assert archiving.archive(spark, source.stream, target, checkpoint=checkpoint, once=True).rows == 3000
    publish(broker, topic, bodies(3000, 4000))
    assert archiving.archive(spark, source.stream, target, checkpoint=checkpoint, once=True).rows == 1000
    report = audit(spark, batch(broker, topic).batch, lambda spark: archiving.read(spark, target), complete=True)
    assert report.passed
    assert report.total("archived") == len(values(place)) == 4000
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed: pip install duckdb")
    found = deltalake.DeltaTable(place.text, storage_options=dict(place.options)).to_pyarrow_table(columns=["value"])
    assert duckdb.sql("SELECT count(*), count(DISTINCT value) FROM found").fetchall() == [(4000, 4000)]
    assert found.num_rows == 4000
    # The plan of a replay may be there, too.
    again = f"{topic[:50]}.again"
    plan = Place.of(f"{place}-replay", place.options)
    for _ in range(2):
        replay.replay(
            spark,
            lambda: replay.archive_chunks(spark, target, size=1500),
            replay.archive_reader(target),
            again,
            network(broker),
            plan,
            where="get_json_object(text, '$.country') = 'fr'",
        )
    assert [json.loads(text)["id"] for text in texts(spark, broker, again)] == list(range(0, 4000, 3))


def test_a_checkpoint_on_a_store_needs_packages_alone(
    spark_environment, broker: Node, topic: str, place: Place, bucket: Bucket
):
    """Which take them from where they were downloaded to."""
    jars = PEERS / "s3a"
    packages = ",".join(common.hadoop_packages()[0])
    if not (jars / "packages").is_file() or (jars / "packages").read_text().strip() != packages:
        pytest.skip("no jars of S3A in $FLINTMQ_PEERS/s3a or .peers/s3a: run scripts/peers ENVIRONMENT")
    flags = ["--conf", "spark.driver.memory=1g", "--conf", f"spark.jars.ivy={jars.resolve()}"]
    flags += ["--master", "local[2,4]", "--packages", "--once", "--json", "--nsqd", broker.tcp, *bucket.flags]
    hold(broker, topic)
    for upto in (300, 500):
        # The second run goes on from the checkpoint, and reads no message again.
        publish(broker, topic, bodies(0 if upto == 300 else 300, upto))
        done = run("archive", topic, "--to", place.text, *flags)
        assert done.returncode == 0, done.stderr
        assert "Hadoop's jars are taken from Maven where they are not there yet: about 24 MB" in done.stderr
        assert values(place) == sorted(bodies(0, upto))
    assert json.loads(done.stdout)["rows"] == 200
    assert place.exists("_checkpoint/commits/1")


@pytest.mark.timeout(900)
def test_two_drivers_at_once_lose_and_double_nothing(
    spark_environment, broker: Node, topic: str, bucket: Bucket, place: Place, tmp_path: Path
):
    """Each has a copy of the checkpoint, as after a restore: nothing but the table can tell them apart."""

    def arguments(checkpoint: str) -> list[str]:
        flags = ["--conf", "spark.driver.memory=700m", "--master", "local[1,4]", "--nsqd", broker.tcp]
        return [topic, "--to", place.text, "--checkpoint", str(tmp_path / checkpoint), *flags, *bucket.flags]

    hold(broker, topic)
    publish(broker, topic, bodies(0, 2001))
    command = [sys.executable, "-m", "flintmq", "pipeline", "archive", *arguments("first"), "--every", "1s"]
    first = spark_cluster.Program(command, tmp_path / "first.log")
    try:
        noted = tmp_path / "first" / "commits" / "0"
        wait_for(lambda: noted.exists() or first.process.poll() is not None, "the first batch", patience=300)
        os.kill(first.process.pid, signal.SIGSTOP)
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        publish(broker, topic, bodies(2001, 3003))
        # In smaller batches: their numbers are those of the first one's, their ends are not.
        second = run("archive", *arguments("second"), "--once", "--json", "--option", "maxMessagesPerTrigger=400")
        assert second.returncode == 0, second.stderr
        publish(broker, topic, bodies(3003, 3010))
        os.kill(first.process.pid, signal.SIGCONT)
        wait_for(lambda: first.process.poll() is not None, "the zombie ends", patience=300)
        text = first.log.read_text()
        assert first.process.returncode == 1, text
        assert re.search("the checkpoint has gone back|another process writes query", text), text
    finally:
        first.kill()
    assert values(place) == sorted(bodies(0, 3003))
    again = run("archive", *arguments("second"), "--once", "--json")
    assert again.returncode == 0, again.stderr
    assert values(place) == sorted(bodies(0, 3010))
    judged = run("audit", topic, "--archive", place.text, "--complete", "--nsqd", broker.tcp, *bucket.flags, "--json")
    assert json.loads(judged.stdout)["nodes"][0]["archived"] == 3010, judged.stderr
    assert judged.returncode == 0
