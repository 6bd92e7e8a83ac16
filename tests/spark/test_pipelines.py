"""The pipelines on real Spark, over messages from files: what is archived, judged, measured and queried.

The same columns as `format("nsq")` has, at times that the tests choose. With brokers they are in test_pipelines_broker.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import parquet

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import common, metrics, sql
from flintmq.spark.pipelines.audit import audit
from flintmq.spark.pipelines.store import Archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: 2026-11-16T02:00:00Z, in ns.
TWO_O_CLOCK = 1_794_794_400_000_000_000
SECOND = 1_000_000_000
NODE = "ab" * 16
COLUMNS = pa.schema(
    [
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("node", pa.string()),
        ("offset", pa.int64()),
        ("id", pa.string()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestamp_ns", pa.int64()),
        ("attempts", pa.int32()),
    ]
)


def body(offset: int) -> bytes:
    return json.dumps({"id": offset, "country": "de" if offset % 3 else "fr"}).encode()


class Messages:
    """A topic that is a folder of files: each call of `add` is a batch of a stream that takes one file at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._files = 0

    def add(
        self, first: int, stop: int, *, topic: str = "orders", body: Callable[[int], bytes] = body, step: int = SECOND
    ) -> None:
        offsets = range(first, stop)
        times = [TWO_O_CLOCK + offset * step for offset in offsets]
        columns = [
            [body(offset) for offset in offsets],
            [topic] * len(offsets),
            [NODE] * len(offsets),
            list(offsets),
            [f"{offset:016x}" for offset in offsets],
            [time // 1000 for time in times],
            times,
            [None] * len(offsets),
        ]
        table = pa.table(
            [pa.array(values, field.type) for values, field in zip(columns, COLUMNS, strict=True)], COLUMNS
        )
        parquet.write_table(table, self.folder / f"{self._files:04d}.parquet")
        self._files += 1

    def stream(self, spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema(self.batch(spark).schema).option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self.folder))

    def batch(self, spark: SparkSession) -> DataFrame:
        return spark.read.parquet(str(self.folder))


@pytest.fixture
def messages(tmp_path: Path) -> Messages:
    return Messages(tmp_path / "messages")


def offsets(table: DataFrame) -> list[tuple[str, int]]:
    return sorted((row["topic"], row["offset"]) for row in table.select("topic", "offset").collect())


def forget_last_commit(checkpoint: Path) -> None:
    """As after a kill between the end of a batch and Spark's note of it: the batch is run again."""
    commits = sorted(
        (path for path in (checkpoint / "commits").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    commits[-1].unlink()
    (checkpoint / "commits" / f".{commits[-1].name}.crc").unlink(missing_ok=True)


# --- Archive ----------------------------------------------------------------------------------------------------------


def test_an_archive_has_each_message_once_in_the_folder_of_its_hour(spark, messages: Messages, tmp_path: Path):
    messages.add(0, 1000, step=5 * SECOND)
    messages.add(1000, 1500, step=5 * SECOND)
    messages.add(0, 200, topic="clicks.web")
    root = tmp_path / "archive"
    summary = archiving.archive(spark, messages.stream, root, once=True)
    assert (summary.rows, summary.batches) == (1700, 3)
    expected = sorted(
        [("orders", offset) for offset in range(1500)] + [("clicks.web", offset) for offset in range(200)]
    )
    assert offsets(archiving.read(spark, root)) == expected
    # A reader who knows nothing of the manifest finds the same.
    assert offsets(spark.read.parquet(str(root))) == expected
    folders = {path.parent.relative_to(root).as_posix() for path in root.rglob("*.parquet")}
    hours = {f"topic=orders/date=2026-11-16/hour={hour:02d}" for hour in (2, 3, 4)}
    assert folders == {*hours, "topic=clicks.web/date=2026-11-16/hour=02"}

    # It goes on from its checkpoint; a batch that Spark runs again changes nothing.
    messages.add(1500, 1600)
    forget_last_commit(root / "_checkpoint")
    assert archiving.archive(spark, messages.stream, root, once=True).rows == 100
    expected = sorted([*expected, *(("orders", offset) for offset in range(1500, 1600))])
    assert offsets(archiving.read(spark, root)) == offsets(spark.read.parquet(str(root))) == expected

    # Small files are merged without Spark, and nothing else changes.
    before, after = archiving.compact(root, older_than=-1e9)
    assert before > after > 0
    assert offsets(archiving.read(spark, root)) == offsets(spark.read.parquet(str(root))) == expected
    forget_last_commit(root / "_checkpoint")
    archiving.archive(spark, messages.stream, root, once=True)
    assert offsets(archiving.read(spark, root)) == expected
    report = audit(spark, messages.batch, lambda spark: archiving.read(spark, root), complete=True)
    assert report.passed
    assert report.total("published") == report.total("archived") == 1800


def test_json_is_decoded_and_what_is_none_is_kept_aside(spark, messages: Messages, tmp_path: Path):
    bodies = [
        b'{"id": 1, "name": "a"}',
        b"no json",
        b'{"id": 2, "name": "b"}',
        b'{"id": "\xff"}',
        b"[1]",
        b'{"id": "x"}',
    ]
    messages.add(0, 2, body=lambda offset: bodies[0])
    root = tmp_path / "inferred"
    archiving.archive(spark, messages.stream, root, decode=True, once=True)
    messages.add(0, len(bodies), body=lambda offset: bodies[offset])
    archiving.archive(spark, messages.stream, root, decode=True, once=True)
    rows = archiving.read(spark, root).orderBy("offset").collect()
    by_body = {bytes(row["value"]): row for row in rows}
    assert by_body[bodies[2]]["data"].asDict() == {"id": 2, "name": "b"}
    assert by_body[bodies[2]]["_undecoded"] is None
    for bad in (bodies[1], bodies[3], bodies[4], bodies[5]):
        assert by_body[bad]["data"] is None
        assert bytes(by_body[bad]["_undecoded"]) == bad

    root = tmp_path / "given"
    archiving.archive(spark, messages.stream, root, schema="id STRING, none INT", once=True)
    rows = archiving.read(spark, root).collect()
    decoded = {bytes(row["value"]): row["data"] and row["data"].asDict() for row in rows}
    assert decoded[bodies[5]] == {"id": "x", "none": None}
    assert decoded[bodies[1]] is None
    with pytest.raises(PipelineError, match="is not a schema"):
        archiving.archive(spark, messages.stream, tmp_path / "wrong", schema="id NUMBERISH", once=True)


def test_a_delta_archive_is_exact(spark, messages: Messages, tmp_path: Path):
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'flintmq[lake]'")
    messages.add(0, 300, step=30 * SECOND)
    messages.add(300, 400, topic="a-b.c")
    root = tmp_path / "archive"
    assert archiving.archive(spark, messages.stream, root, format="delta", once=True).rows == 400
    forget_last_commit(root / "_checkpoint")
    messages.add(400, 450)
    archiving.archive(spark, messages.stream, root, format="delta", once=True)
    table = deltalake.DeltaTable(str(root))
    rows = table.to_pyarrow_table(columns=["topic", "offset", "hour"]).to_pylist()
    assert sorted(row["offset"] for row in rows) == list(range(450))
    assert {row["topic"] for row in rows} == {"orders", "a-b.c"}
    assert offsets(archiving.read(spark, root, format="delta")) == sorted((row["topic"], row["offset"]) for row in rows)
    before, after = archiving.compact(root, format="delta")
    assert before > after
    assert len(offsets(archiving.read(spark, root, format="delta"))) == 450
    with pytest.raises(PipelineError, match="of format delta"):
        archiving.archive(spark, messages.stream, root, once=True)


def test_an_iceberg_archive_is_exact(spark, messages: Messages, tmp_path: Path):
    for module in ("pyiceberg", "sqlalchemy"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install 'flintmq[lake]'")
    from flintmq.spark.pipelines.lake import IcebergTable

    messages.add(0, 300, step=30 * SECOND)
    messages.add(300, 400, topic="a-b.c")
    root = tmp_path / "archive"
    assert archiving.archive(spark, messages.stream, root, format="iceberg", once=True).rows == 400
    forget_last_commit(root / "_checkpoint")
    messages.add(400, 450)
    archiving.archive(spark, messages.stream, root, format="iceberg", once=True)
    rows = IcebergTable(root).load().scan().to_arrow().to_pylist()
    assert sorted(row["offset"] for row in rows) == list(range(450))
    only = IcebergTable(root).load().scan(row_filter="topic = 'a-b.c'").to_arrow()
    assert only.num_rows == 100
    report = audit(spark, messages.batch, lambda spark: archiving.read(spark, root, format="iceberg"), complete=True)
    assert report.passed


def test_an_archive_without_its_checkpoint_is_not_added_to(spark, messages: Messages, tmp_path: Path):
    messages.add(0, 10)
    root = tmp_path / "archive"
    archiving.archive(spark, messages.stream, root, once=True)
    shutil.rmtree(root / "_checkpoint")
    with pytest.raises(PipelineError, match="archived twice"):
        archiving.archive(spark, messages.stream, root, once=True)
    assert len(offsets(archiving.read(spark, root))) == 10
    archiving.archive(spark, messages.stream, root, new_query=True, once=True)
    report = audit(spark, messages.batch, lambda spark: archiving.read(spark, root))
    assert report.total("duplicated") == 10


# --- Audit ------------------------------------------------------------------------------------------------------------


def test_an_audit_finds_every_kind_of_disagreement(spark, messages: Messages, tmp_path: Path):
    from pyspark.sql import functions as f

    messages.add(0, 100)
    root = tmp_path / "archive"
    archiving.archive(spark, messages.stream, root, once=True)

    def archived(spark: SparkSession) -> DataFrame:
        rows = archiving.read(spark, root).filter("offset >= 10 AND offset NOT IN (50, 51) AND offset < 95")
        rows = rows.withColumn("hour", f.when(f.col("offset") == 60, 23).otherwise(f.col("hour")))
        rows = rows.withColumn("value", f.when(f.col("offset") == 61, f.lit(b"other")).otherwise(f.col("value")))
        return rows.union(rows.filter("offset IN (70, 71)"))

    def published(spark: SparkSession) -> DataFrame:
        return messages.batch(spark).filter("offset >= 5 AND offset != 80")

    report = audit(spark, published, archived)
    [verdict] = report.verdicts
    assert (verdict.topic, verdict.node, verdict.published, verdict.archived) == ("orders", NODE, 94, 85)
    assert (verdict.lost, verdict.duplicated, verdict.changed, verdict.late, verdict.unexpected) == (2, 2, 1, 1, 1)
    assert (verdict.gone, verdict.waiting, verdict.before) == (0, 5, 5)
    assert report.examples["lost"] == [("orders", NODE, 50), ("orders", NODE, 51)]
    assert report.examples["late"] == [("orders", NODE, 60)]
    assert not report.passed
    assert audit(spark, published, archived, complete=True).total("lost") == 12

    shorter = audit(spark, lambda spark: published(spark).filter("offset >= 90"), archived)
    assert (shorter.total("gone"), shorter.total("lost"), shorter.total("waiting")) == (78, 0, 5)
    assert json.loads(report.as_json())["nodes"][0]["lost"] == 2


# --- Metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_of_windows_with_frequent_values_and_a_plot(spark, messages: Messages, tmp_path: Path):
    messages.add(0, 300)
    messages.add(300, 330, topic="clicks", body=lambda offset: b"x" * offset)
    drawn: list[int] = []
    board = metrics.Board(lambda board: drawn.append(len(board.rows)))
    summary = metrics.metrics(spark, messages.stream, window=60, path="$.country", top=2, board=board, once=True)
    assert summary.rows == 330
    assert drawn
    windows = board.of("orders")
    assert [row["messages"] for row in windows] == [60] * 5
    assert {row["rate"] for row in windows} == {1.0}
    assert sum(row["bytes"] for row in windows) == sum(len(body(offset)) for offset in range(300))
    assert [(entry["item"], entry["count"]) for entry in windows[0]["top"]] == [("de", 40), ("fr", 20)]
    [clicks] = board.of("clicks")
    assert (clicks["size_p50"], clicks["size_p99"], clicks["top"]) == (314, 329, [])
    assert clicks["delay_ms_p50"] <= clicks["delay_ms_p99"]

    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'flintmq[plot]'")
    for name, begins in (("m.png", b"\x89PNG"), ("m.svg", b"<?xml"), ("m.html", b"<!doctype html>")):
        metrics.plot(board, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)
    assert "clicks" in (tmp_path / "m.html").read_text()
    assert not list(tmp_path.glob(".m.*"))
    with pytest.raises(PipelineError, match=r"\.png"):
        metrics.plot(board, tmp_path / "m.gif")


def test_a_table_gets_each_window_once_when_it_is_over(spark, messages: Messages, tmp_path: Path):
    messages.add(0, 300)
    messages.add(300, 600)
    table = tmp_path / "table"
    for _ in range(2):
        metrics.metrics(spark, messages.stream, window=60, lateness=30, table=table, once=True)
        messages.add(600, 630)
    rows = spark.read.parquet(str(table)).orderBy("start").collect()
    assert [row["messages"] for row in rows] == [60] * len(rows)
    assert len({row["start"] for row in rows}) == len(rows) >= 9


# --- SQL --------------------------------------------------------------------------------------------------------------


def test_a_query_over_two_topics_to_a_table(spark, messages: Messages, tmp_path: Path):
    messages.add(0, 90)
    clicks = Messages(tmp_path / "clicks")
    clicks.add(0, 30, topic="clicks-web")
    sql.tables(
        spark,
        {"orders": messages.stream, "clicks-web": clicks.stream},
        {"orders": "id BIGINT, country STRING", "clicks-web": "id BIGINT"},
    )
    query = (
        "SELECT data.id, data.country, text FROM orders WHERE data.country = 'fr' "
        "UNION ALL SELECT data.id, 'web', text FROM clicks_web;"
    )
    table = tmp_path / "table"
    sql.stream(spark, query, table=table, once=True)
    messages.add(90, 120)
    sql.stream(spark, query, table=table, once=True)
    rows = spark.read.parquet(str(table)).collect()
    assert sorted(row["id"] for row in rows if row["country"] == "fr") == list(range(0, 120, 3))
    assert sum(row["country"] == "web" for row in rows) == 30

    sql.tables(spark, {"orders": messages.batch}, {"orders": common.infer_schema(messages.batch(spark))})
    result = sql.batch(
        spark, "SELECT data.country, count(*) AS n FROM orders GROUP BY ALL ORDER BY n", table=tmp_path / "once"
    )
    assert [tuple(row) for row in result.collect()] == [("fr", 40), ("de", 80)]
    assert spark.read.parquet(str(tmp_path / "once")).count() == 2


@pytest.mark.parametrize(
    ("query", "options", "sentence"),
    [
        ("SELECT nothing FROM orders", {}, "the query is refused: .*nothing"),
        ("SELECT 1", {}, "no topic as a stream"),
        ("SELECT topic, count(*) FROM orders GROUP BY topic", {"table": "t", "mode": "complete"}, "only grows"),
        ("SELECT value FROM orders", {"topic": "t"}, "--checkpoint"),
    ],
)
def test_a_query_that_cannot_run_is_refused_in_a_sentence(
    spark, messages: Messages, tmp_path: Path, query, options, sentence
):
    messages.add(0, 1)
    sql.tables(spark, {"orders": messages.stream})
    if "table" in options:
        options = {**options, "table": tmp_path / options["table"]}
    with pytest.raises(PipelineError, match=sentence) as caught:
        sql.stream(spark, query, **options)
    assert "\n" not in str(caught.value)


def test_an_error_inside_of_spark_comes_out_as_one_line(spark, messages: Messages, tmp_path: Path):
    messages.add(0, 1)

    def broken(spark: SparkSession) -> DataFrame:
        from pyspark.sql import functions as f

        return messages.stream(spark).withColumn(
            "offset", f.raise_error(f.lit("something is wrong here")).cast("bigint")
        )

    with pytest.raises(PipelineError, match="something is wrong here") as caught:
        archiving.archive(spark, broken, tmp_path / "archive", once=True)
    assert "\n" not in str(caught.value)
    assert Archive(tmp_path / "archive").snapshot().files == {}


# --- Command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "status", "text"),
    [
        (["archive"], 2, "--to"),
        (["archive", "--to", "x"], 1, "say which topics"),
        (["replay", "--to", "x", "--checkpoint", "y"], 1, "say what to replay"),
        (["sql", "nowhere.sql"], 1, "--topic"),
        (["sql", "nowhere.sql", "--topic", "t"], 1, "cannot be read"),
        (["metrics", "t", "--to-topic", "a", "--to-table", "b"], 1, "not both"),
        (["nothing"], 2, "invalid choice"),
        (["archive", "t", "--to", "x", "--every", "soon"], 2, "soon"),
        (["replay", "t", "--to", "x", "--checkpoint", "y", "--since", "noon"], 2, "is no time"),
    ],
)
def test_a_wrong_command_line_is_answered_without_starting_spark(capsys, argv: list[str], status: int, text: str):
    from flintmq.cli import main

    try:
        ended: Any = main(["pipeline", *argv])
    except SystemExit as exc:
        ended = exc.code
    assert ended == status
    assert text in capsys.readouterr().err
