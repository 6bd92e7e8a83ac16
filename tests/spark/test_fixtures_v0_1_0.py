"""What Spark left behind with 0.1.0 is gone on with by this version: an archive, a query over logs, one over a spool.

``tests/fixtures/v0_1_0/make.py`` wrote them, ``expected.json`` says what is in them. Nothing in them names a folder or
an address: both are given anew, and the broker is known by the identity in its data path.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow")

from flintmq.errors import PipelineError
from flintmq.spark.pipelines.archive import archive, read
from flintmq.spark.pipelines.audit import audit
from flintmq.spark.pipelines.common import Topics
from flintmq.spark.pipelines.upgrade import upgrade

from .conftest import run_query, wait_for
from .daemons import Node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "v0_1_0"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())["spark"]
TOPICS = ("orders", "clicks")
NEW = ["new 0", "new 1", "new 2"]

Batches = dict[int, list[dict[str, Any]]]


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    return folder


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A broker of this version, on a copy of the data path that all of them were read from."""
    found = Node("flintmq", unpack("data_path-spark", tmp_path / "data"), f"--node-id={EXPECTED['node_id']}")
    found.start()
    yield found
    found.stop()


def show(body: bytes) -> str:
    """A body as make.py writes it down."""
    if len(body) <= 120 and body.isascii() and body.decode("ascii").isprintable():
        return body.decode("ascii")
    return f"sha256:{hashlib.sha256(body).hexdigest()}:{len(body)}"


def row_of(row: Row) -> dict[str, Any]:
    found = {key: row[key] for key in ("topic", "offset", "id", "timestamp_ns", "attempts")}
    return {"body": show(bytes(row["value"])), **found}


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["topic"], row["offset"]))


def publish_new(node: Node, *topics: str) -> None:
    """Three messages more; they are on the device when this returns."""
    for topic in topics:
        node.publish(topic, [text.encode() for text in NEW])

        def is_durable(topic: str = topic) -> bool:
            info = node.get("/log/info", topic=topic)
            return bool(info["durable"] == info["end"])

        wait_for(is_durable, "all is on the device")


def go_on(spark: SparkSession, options: dict[str, str], checkpoint: Path) -> Batches:
    """What the query reads from its checkpoint on, by the number of the batch."""
    found: Batches = {}

    def keep(frame: DataFrame, number: int) -> None:
        found[number] = in_order([row_of(row) for row in frame.collect()])

    run_query(
        lambda: (
            spark.readStream.format("nsq")
            .options(**options)
            .load()
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
    )
    return {number: rows for number, rows in found.items() if rows}


def forget_last_commit(checkpoint: Path, number: int) -> None:
    """As after a kill: the last batch was planned, and nobody knows whether it was done."""
    for name in (str(number), f".{number}.crc"):
        (checkpoint / "commits" / name).unlink()


def test_an_archive_is_read_and_gone_on_with(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    root = unpack("archive", tmp_path / "archives") / "archive"
    with pytest.raises(PipelineError, match="archive --upgrade --to"):
        read(spark, root)
    assert upgrade(root) == (62, len(list(root.rglob("*.parquet"))))

    def rows() -> list[dict[str, Any]]:
        found = read(spark, root).collect()
        return in_order([{**row_of(row), "data": row["data"].asDict() if row["data"] else None} for row in found])

    assert len(EXPECTED["archive"]["rows"]) == 62
    assert rows() == EXPECTED["archive"]["rows"]

    topics = Topics(TOPICS, {"nsq.nsqd.addresses": node.tcp, "startingOffsets": "earliest"})
    publish_new(node, "orders")
    summary = archive(spark, topics.stream, root, schema="id BIGINT, country STRING", once=True)
    assert summary.rows == len(NEW)
    known = {(row["topic"], row["offset"]) for row in EXPECTED["archive"]["rows"]}
    assert [row["body"] for row in rows() if (row["topic"], row["offset"]) not in known] == NEW
    assert len(rows()) == 62 + len(NEW)
    report = audit(spark, topics.batch, lambda spark: read(spark, root), complete=True)
    assert report.passed, report.as_json()


def test_a_query_over_logs_goes_on(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    checkpoint = unpack("checkpoint", tmp_path / "checkpoints") / "log"
    number, last = EXPECTED["checkpoint"]["last"]
    options = {"nsq.nsqd.addresses": node.tcp, "subscribe": ",".join(TOPICS)}
    # Its position is there, and holds what the last batch may need again.
    for topic in TOPICS:
        positions = node.get("/log/position", topic=topic)["positions"]
        assert {row["reader"]: row["offset"] for row in positions} == EXPECTED["readers"][topic]
    # The last batch is run again: the same rows.
    forget_last_commit(checkpoint, number)
    batches = EXPECTED["checkpoint"]["batches"]
    assert go_on(spark, options, checkpoint) == {number: batches[str(number)]}

    publish_new(node, *TOPICS)
    found = go_on(spark, options, checkpoint)
    assert list(found) == [number + 1]
    assert [row["body"] for row in found[number + 1]] == [*NEW, *NEW]
    for topic in TOPICS:
        (mark,) = last["p"][topic].values()
        assert node.get("/log/position", topic=topic, reader=last["reader"])["offset"] == mark["o"]


def test_all_batches_of_a_query_are_read_again_the_same(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    """A new query over the same logs, and a batch, see what the old one saw."""
    options = {"nsq.nsqd.addresses": node.tcp, "subscribe": ",".join(TOPICS), "startingOffsets": "earliest"}
    expected = in_order([row for rows in EXPECTED["checkpoint"]["batches"].values() for row in rows])
    assert len(expected) == 62
    found = go_on(spark, options, tmp_path / "checkpoint")
    assert in_order([row for rows in found.values() for row in rows]) == expected
    rows = spark.read.format("nsq").options(**options).load().collect()
    assert in_order([row_of(row) for row in rows]) == expected
    assert {row["node"] for row in rows} == {EXPECTED["node"]}
    for topic in TOPICS:
        logged = [(row["body"], row["seq"], row["timestamp"]) for row in EXPECTED["logs"][topic]]
        assert [
            (row["body"], row["offset"], row["timestamp_ns"]) for row in expected if row["topic"] == topic
        ] == logged


def test_a_query_over_a_spool_goes_on(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    folder = unpack("spool", tmp_path / "spools")
    number, last = EXPECTED["spool"]["last"]
    options = {
        "nsq.nsqd.addresses": node.tcp,
        "subscribe": "clicks",
        "channel": "spark",
        "mode": "spool",
        "spoolLocation": str(folder / "spool"),
        "spool.flushIntervalMs": "100",
    }
    # The rows of the last batch are in the spool alone: the channel has finished them.
    assert node.depth("clicks", "spark") == 0
    forget_last_commit(folder / "checkpoint", number)
    batches = EXPECTED["spool"]["batches"]
    assert len(batches[str(number)]) == 10
    assert go_on(spark, options, folder / "checkpoint") == {number: batches[str(number)]}

    publish_new(node, "clicks")
    found = go_on(spark, options, folder / "checkpoint")
    rows = [row for number in sorted(found) for row in found[number]]
    assert min(found) == number + 1
    assert [(row["body"], row["offset"]) for row in rows] == list(
        zip(NEW, range(last["o"], last["o"] + 3), strict=True)
    )
    assert json.loads((folder / "spool" / "spool.json").read_text())["spool"] == last["spool"]
