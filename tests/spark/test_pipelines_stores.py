"""Archives on a real HDFS, checkpoints and all, and on the emulator of Azure's store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import replay
from flintmq.spark.pipelines.audit import audit
from flintmq.spark.shipped.files import Place

from .azurite import Container, azurite
from .daemons import Node
from .hdfs import Hdfs, hdfs
from .test_pipelines_broker import batch, bodies, hold, network, publish, texts, topics
from .test_pipelines_s3 import race, two_replays, values


@pytest.fixture(scope="module")
def store(spark_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    with hdfs(tmp_path_factory.mktemp("hdfs")) as found:
        yield found


@pytest.fixture
def place(store: Hdfs, topic: str) -> Place:
    return Place.of(f"{store.uri}/{topic}/archive")


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with azurite(tmp_path_factory.mktemp("azure")) as found:
        yield found


# --- HDFS -------------------------------------------------------------------------------------------------------------


def test_the_second_of_two_drivers_on_hdfs_adds_nothing_and_stops(place: Place):
    race(place)


def test_of_two_replays_from_one_folder_on_hdfs_the_one_that_began_first_stops(place: Place):
    two_replays(place)


def test_archive_audit_and_replay_with_everything_on_hdfs(spark, broker: Node, topic: str, place: Place):
    """The table, the checkpoint beside it and the plan of the replay."""
    hold(broker, topic)
    publish(broker, topic, bodies(0, 3000))
    source = topics(broker, topic)
    assert archiving.archive(spark, source.stream, place.text, once=True).rows == 3000
    publish(broker, topic, bodies(3000, 4000))
    assert archiving.archive(spark, source.stream, place.text, once=True).rows == 1000
    report = audit(spark, batch(broker, topic).batch, lambda spark: archiving.read(spark, place.text), complete=True)
    assert report.passed
    assert report.total("archived") == len(values(place)) == 4000
    again = f"{topic[:50]}.again"
    for _ in range(2):
        replay.replay(
            spark,
            lambda: replay.archive_chunks(spark, place.text, size=1500),
            replay.archive_reader(place.text),
            again,
            network(broker),
            f"{place}-replay",
            where="get_json_object(text, '$.country') = 'fr'",
        )
    assert [json.loads(text)["id"] for text in texts(spark, broker, again)] == list(range(0, 4000, 3))


def test_plain_parquet_on_hdfs_belongs_to_its_checkpoint(spark, broker: Node, topic: str, place: Place):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 500))
    source = topics(broker, topic)
    for expected in (500, 0):
        assert archiving.archive(spark, source.stream, place.text, format="parquet", once=True).rows == expected
    report = audit(spark, batch(broker, topic).batch, lambda spark: archiving.read(spark, place.text), complete=True)
    assert report.passed
    assert report.total("archived") == 500
    with pytest.raises(PipelineError, match="an archive of another checkpoint"):
        archiving.archive(spark, source.stream, place.text, checkpoint=f"{place}-other", once=True)


# --- Azure ------------------------------------------------------------------------------------------------------------


def test_archive_and_audit_on_azure(spark, broker: Node, topic: str, container: Container, tmp_path: Path):
    """One batch, which is all that the emulator can: it does not know the parameter startFrom of a list, which
    deltalake finds later commits by. The checkpoint is on a disk: Hadoop's own client for Azure needs another API.
    """
    hold(broker, topic)
    publish(broker, topic, bodies(0, 1000))
    az, abfss = (Place.of(f"{uri}/{topic}/archive", container.options) for uri in container.uris)
    source = topics(broker, topic)
    with pytest.raises(PipelineError, match=r"Spark has no az://.*abfss://"):
        archiving.archive(spark, source.stream, archiving.Target(az), once=True)
    with pytest.raises(PipelineError, match=r"abfss://.*add --packages, or keep the checkpoint on a disk"):
        archiving.archive(spark, source.stream, archiving.Target(abfss), once=True)
    target = archiving.Target(az)
    assert archiving.archive(spark, source.stream, target, checkpoint=tmp_path / "checkpoint", once=True).rows == 1000
    report = audit(
        spark, batch(broker, topic).batch, lambda spark: archiving.read(spark, archiving.Target(abfss)), complete=True
    )
    assert report.passed
    assert report.total("archived") == 1000
