"""The pipelines on real Spark, over messages from files: what is archived, judged, measured and queried.

The same columns as `format("nsq")` has, at times that the tests choose. With brokers they are in test_pipelines_broker.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")

import deltalake
import pyarrow as pa
from pyarrow import parquet

from flintmq.errors import PipelineError
from flintmq.spark.decoding import decoder
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import common, metrics, replay, sql
from flintmq.spark.pipelines.audit import audit
from flintmq.spark.pipelines.tables import IcebergTable
from flintmq.spark.shipped.files import Place

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


def by_deltalake(root: Path) -> list[tuple[str, int]]:
    """What one finds who knows nothing of us and reads the Delta table."""
    rows = deltalake.DeltaTable(str(root)).to_pyarrow_table(columns=["topic", "offset"]).to_pylist()
    return sorted((row["topic"], row["offset"]) for row in rows)


def by_duckdb(root: Path) -> list[tuple[str, int]]:
    """The same with another engine, over the files that the table names; its own reader of Delta is a download."""
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed: pip install duckdb")
    files = deltalake.DeltaTable(str(root)).file_uris()
    return sorted(duckdb.sql(f'SELECT topic, "offset" FROM read_parquet({files}, hive_partitioning=true)').fetchall())


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
    assert offsets(archiving.read(spark, root)) == by_deltalake(root) == by_duckdb(root) == expected
    folders = {path.parent.relative_to(root).as_posix() for path in root.rglob("*.parquet")}
    hours = {f"topic=orders/date=2026-11-16/hour={hour:02d}" for hour in (2, 3, 4)}
    assert folders == {*hours, "topic=clicks.web/date=2026-11-16/hour=02"}

    # It goes on from its checkpoint; a batch that Spark runs again changes nothing.
    messages.add(1500, 1600)
    forget_last_commit(root / "_checkpoint")
    version = deltalake.DeltaTable(str(root)).version()
    assert archiving.archive(spark, messages.stream, root, once=True).rows == 100
    assert deltalake.DeltaTable(str(root)).version() == version + 1
    expected = sorted([*expected, *(("orders", offset) for offset in range(1500, 1600))])
    assert offsets(archiving.read(spark, root)) == by_deltalake(root) == expected

    # Small files of closed hours are merged without Spark, and nothing else changes.
    reader = archiving.read(spark, root)
    before, after = archiving.compact(root, older_than=-1e9)
    assert before > after > 0
    assert offsets(archiving.read(spark, root)) == by_deltalake(root) == by_duckdb(root) == expected
    assert offsets(reader) == expected, "a reader that began before"
    forget_last_commit(root / "_checkpoint")
    archiving.archive(spark, messages.stream, root, once=True)
    assert by_deltalake(root) == expected
    report = audit(spark, messages.batch, lambda spark: archiving.read(spark, root), complete=True)
    assert report.passed
    assert report.total("published") == report.total("archived") == 1800


def test_vacuum_deletes_what_is_no_part_and_spares_the_rest(spark, messages: Messages, tmp_path: Path):
    for first in range(0, 30, 10):
        messages.add(first, first + 10)
    root = tmp_path / "archive"
    archiving.archive(spark, messages.stream, root, once=True)
    # As a task that failed leaves it.
    known = next(root.rglob("*.parquet"))
    orphan = known.with_stem(known.stem[:-16] + 16 * "0")
    shutil.copy(known, orphan)
    archiving.compact(root, older_than=-1e9)
    kept = sorted(path for path in root.rglob("*") if path.is_file())
    assert archiving.vacuum(root) == 0
    with pytest.raises(PipelineError, match="at least 1h"):
        archiving.vacuum(root, retain=0)
    assert sorted(path for path in root.rglob("*") if path.is_file()) == kept
    for path in root.rglob("*.parquet"):
        os.utime(path, (0, 0))
    assert archiving.vacuum(root) == 1, "nobody ever needed it"
    assert not orphan.exists()
    assert archiving.vacuum(root, retain=3600) == 0, "what was merged a moment ago is still read"
    # It goes on: the checkpoint is in the same folder.
    messages.add(30, 40)
    assert archiving.archive(spark, messages.stream, root, once=True).rows == 10
    assert len(by_deltalake(root)) == 40


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


def test_objects_without_fields_are_not_called_undecodable(spark, messages: Messages, tmp_path: Path):
    bodies = [b"{}", b' { "a" : { } }\n', b'{"a\\":": [{}]}', b"[1]", b'{"a": }', b"", b'{"a": {}} {}']
    messages.add(0, len(bodies), body=lambda offset: bodies[offset])
    root = tmp_path / "archive"
    archiving.archive(spark, messages.stream, root, decode=True, once=True)
    rows = archiving.read(spark, root).orderBy("offset").collect()
    assert [row["error"] is None for row in rows] == [True, True, True, False, False, False, False]
    assert [row["_undecoded"] and bytes(row["_undecoded"]) for row in rows] == [None, None, None, *bodies[3:]]
    # The first that has some tells what they look like.
    messages.add(len(bodies), len(bodies) + 1, body=lambda offset: b'{"a": 1}')
    archiving.archive(spark, messages.stream, root, decode=True, once=True)
    rows = archiving.read(spark, root).orderBy("offset").collect()
    assert rows[-1]["data"].asDict() == {"a": 1}
    assert (rows[0]["data"], rows[0]["error"]) == (None, None)


def test_names_that_iceberg_takes_for_paths_do_not_stop_an_archive(spark, messages: Messages, tmp_path: Path):
    pytest.importorskip("pyiceberg")
    bodies = [b'{"a.b": 1, "a": {"b": 2, "c.d": 3, "c": {"d": 4}}, "e.f": 5}', b'{"g": [{"h": 6}], "g.element.h": 7}']
    messages.add(0, len(bodies), body=lambda offset: bodies[offset])
    root = tmp_path / "archive"
    archiving.archive(spark, messages.stream, root, decode=True, once=True, format="iceberg")
    rows = [row["data"].asDict(recursive=True) for row in archiving.read(spark, root).orderBy("offset").collect()]
    assert rows[0] == {"a": {"b": 2, "c": {"d": 4}}, "e.f": 5, "g": None}
    assert rows[1]["g"] == [{"h": 6}]


def test_names_that_spark_finds_ambiguous_do_not_stop_an_archive(spark, messages: Messages, tmp_path: Path):
    bodies = [
        b'{"a": 1, "A": 2}',
        b'{"a": 3, "a": 4}',
        b'{"_corrupt_record_": 1, "b": {"c": 1, "C": 2}}',
        b'{"_corrupt_record": "x", "d": [{"e": 1, "E": 2}]}',
        b"no json",
    ]
    messages.add(0, len(bodies), body=lambda offset: bodies[offset])
    root = tmp_path / "archive"
    archiving.archive(spark, messages.stream, root, decode=True, once=True)
    rows = {row["offset"]: row for row in archiving.read(spark, root).collect()}
    assert [bytes(rows[offset]["value"]) for offset in range(len(bodies))] == bodies
    assert {rows[0]["data"]["a"], rows[1]["data"]["a"]} <= {1, 3, 4}, "of a and A the one that more messages have"
    assert "A" not in rows[0]["data"]
    assert rows[2]["data"]["_corrupt_record_"] == 1
    assert rows[2]["data"]["b"].asDict() in ({"c": 1}, {"C": 2})
    assert rows[3]["data"]["_corrupt_record"] == "x"
    assert (rows[4]["data"], bytes(rows[4]["_undecoded"])) == (None, bodies[4])
    assert all(row["_undecoded"] is None for offset, row in rows.items() if offset < 4)
    assert len(by_deltalake(root)) == len(bodies)
    for schema in ("a INT, A INT", "a STRUCT<b: INT, B: INT>"):
        with pytest.raises(PipelineError, match="differ by case alone"):
            decoder("json", schema=schema)


def test_an_iceberg_archive_is_exact(spark, messages: Messages, tmp_path: Path):
    for module in ("pyiceberg", "sqlalchemy"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install 'flintmq[lake]'")

    messages.add(0, 300, step=30 * SECOND)
    messages.add(300, 400, topic="a-b.c")
    root = tmp_path / "archive"
    assert archiving.archive(spark, messages.stream, root, format="iceberg", once=True).rows == 400
    forget_last_commit(root / "_checkpoint")
    messages.add(400, 450)
    archiving.archive(spark, messages.stream, root, once=True)
    table = IcebergTable(Place.of(root))
    rows = table.load().scan().to_arrow().to_pylist()
    assert sorted(row["offset"] for row in rows) == list(range(450))
    only = table.load().scan(row_filter="topic = 'a-b.c'").to_arrow()
    assert only.num_rows == 100
    assert {file.partition["topic"] for file in table.files()} == {"orders", "a-b.c"}
    assert min(file.oldest or 0 for file in table.files()) == TWO_O_CLOCK
    report = audit(spark, messages.batch, lambda spark: archiving.read(spark, root), complete=True)
    assert report.passed
    with pytest.raises(PipelineError, match="of format iceberg, not delta"):
        archiving.archive(spark, messages.stream, root, format="delta", once=True)
    with pytest.raises(PipelineError, match="by an engine of that format"):
        archiving.compact(root)


def test_a_plain_parquet_archive_is_written_by_spark_itself(spark, messages: Messages, tmp_path: Path):
    messages.add(0, 300, step=30 * SECOND)
    messages.add(300, 400, topic="2026")
    root = tmp_path / "archive"
    archiving.archive(spark, messages.stream, root, format="parquet", once=True)
    forget_last_commit(root / "_checkpoint")
    messages.add(400, 450)
    archiving.archive(spark, messages.stream, root, once=True)
    assert (root / "_spark_metadata").is_dir()
    rows = offsets(archiving.read(spark, root))
    assert sorted(offset for _, offset in rows) == list(range(450))
    assert {topic for topic, _ in rows} == {"orders", "2026"}
    report = audit(spark, messages.batch, lambda spark: archiving.read(spark, root), complete=True)
    assert report.passed
    files = archiving.table_files(spark, archiving.Target.of(root).open())
    assert sum(file.rows for file in files) == 450
    # Spark takes a batch of another checkpoint for one that it has, by its number: that must not begin.
    for more in ({}, {"new_query": True}):
        with pytest.raises(PipelineError, match="another checkpoint"):
            archiving.archive(spark, messages.stream, root, checkpoint=tmp_path / "other", once=True, **more)
    # Nor by a checkpoint that has begun elsewhere: its batches would not be in any folder.
    elsewhere = Messages(tmp_path / "elsewhere")
    elsewhere.add(0, 10, topic="other")
    begun = {"format": "parquet", "checkpoint": tmp_path / "begun", "once": True}
    archiving.archive(spark, elsewhere.stream, tmp_path / "q", **begun)
    elsewhere.add(10, 20, topic="other")
    with pytest.raises(PipelineError, match="another checkpoint"):
        archiving.archive(spark, elsewhere.stream, root, **begun)
    with pytest.raises(PipelineError, match=r"has done batch 0, and .* has none"):
        archiving.archive(spark, elsewhere.stream, tmp_path / "empty", **begun)
    assert not (tmp_path / "empty").exists()
    archiving.archive(spark, elsewhere.stream, tmp_path / "q", **begun)
    assert len(offsets(archiving.read(spark, tmp_path / "q"))) == 20
    assert len(offsets(archiving.read(spark, root))) == 450
    with pytest.raises(PipelineError, match="--schema"):
        archiving.archive(spark, messages.stream, tmp_path / "b", format="parquet", decode=True, once=True)


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_names_that_mean_something_to_spark_are_read_as_they_are(
    spark, messages: Messages, tmp_path: Path, format: str
):
    """A path with brackets is no pattern, and the topic that is called like Hive's null is a topic."""
    null = "__HIVE_DEFAULT_PARTITION__"
    messages.add(0, 5, topic=null)
    root = tmp_path / "a[1]{b}*"
    archiving.archive(spark, messages.stream, root, format=format, once=True)
    expected = [(null, offset) for offset in range(5)]
    assert offsets(archiving.read(spark, root)) == expected
    [chunk] = replay.archive_chunks(spark, root, topics=[null])
    found = replay.archive_reader(root)(spark, chunk)
    assert offsets(found) == expected
    assert {(str(row["date"]), row["hour"]) for row in found.collect()} == {("2026-11-16", 2)}


def test_how_many_tasks_run_at_once_is_known_without_a_setting(spark):
    """Spark has settings whose default it does not accept when it is asked for them."""
    assert common.parallelism(spark) == spark.sparkContext.defaultParallelism >= 1


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


def test_a_plain_folder_belongs_to_one_checkpoint(tmp_path: Path):
    def begin(to: str, checkpoint: Path, **more: Any) -> None:
        target = archiving.Target.of(tmp_path / to, format="parquet")
        archiving.BatchWriter(target, Place.of(checkpoint), **more).prepare()

    def batch(number: int, checkpoint: Path, to: str) -> None:
        for log in (checkpoint / "commits", tmp_path / to / "_spark_metadata"):
            log.mkdir(parents=True, exist_ok=True)
            (log / str(number)).touch()

    one, two = tmp_path / "one", tmp_path / "two"
    for to, checkpoint in (("p", one), ("q", two)):
        begin(to, checkpoint)
        begin(to, checkpoint)  # it was killed before its first batch
        batch(0, checkpoint, to)
        begin(to, checkpoint)
    for checkpoint, more in ((two, {}), (tmp_path / "new", {}), (one, {"new_query": True})):
        with pytest.raises(PipelineError, match="of another checkpoint"):
            begin("p", checkpoint, **more)
    with pytest.raises(PipelineError, match="has done batch 0"):
        begin("empty", one)
    assert not (tmp_path / "empty").exists()
    (one / "commits" / "1").touch()
    with pytest.raises(PipelineError, match=r"has done batch 1, and .*ends with batch 0"):
        begin("p", one)
    # As written before there were notes.
    inside = tmp_path / "old" / "_checkpoint"
    batch(0, inside, "old")
    with pytest.raises(PipelineError, match="of another checkpoint"):
        begin("old", tmp_path / "third")
    (inside / "metadata").touch()
    begin("old", inside)


def test_a_checkpoint_is_not_kept_among_the_files_of_a_table(tmp_path: Path):
    root = tmp_path / "archive"
    for inside in ("checkpoint", ".", "_delta_log/x", "_x/../checkpoint"):
        with pytest.raises(PipelineError, match="is inside of the table"):
            archiving.checkpoint_of(Place.of(root), f"{root}/{inside}")
    for fine in (root / "_checkpoint", root / "_mine" / "one", tmp_path / "archive2", tmp_path):
        assert archiving.checkpoint_of(Place.of(root), fine).text == str(fine)
    store = Place.of("s3://bucket/archive")
    with pytest.raises(PipelineError, match="is inside of the table"):
        archiving.checkpoint_of(store, "s3a://bucket/archive/checkpoint")
    assert archiving.checkpoint_of(store, "s3a://bucket/archived").text == "s3://bucket/archived"


def test_an_error_of_a_store_says_why_and_tells_no_secret():
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = (
                b"<Error><Code>AccessDenied</Code><Message>No.</Message><StringToSign>hidden</StringToSign></Error>"
            )
            self.send_response(403)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    options = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "x", "AWS_ACCESS_KEY_ID": "key", "max_retries": "0"}
    options |= {"AWS_SECRET_ACCESS_KEY": "secret"}

    def failure(port: int) -> str:
        place = Place.of("s3://bucket/archive", options | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
        with pytest.raises(PipelineError) as caught:
            place.exists("_delta_log")
        return str(caught.value)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        refused = failure(server.server_port)
        server.shutdown()
    assert "403 Forbidden: AccessDenied: No." in refused
    nobody = failure(server.server_port)
    assert "Connection refused" in nobody
    assert f"127.0.0.1:{server.server_port}/bucket" in nobody
    for text in (refused, nobody):
        assert not re.search(r"\n|\x1b|hidden|secret|\?", text)
    causes = [
        "OSError: Generic S3 error",
        "  ↳ Error performing GET http://h/b?sig=x in 1s",
        "  ↳ no route",
        "  at java",
    ]
    inside = common.explain(Exception("\n".join(["Job aborted", *causes])))
    assert inside == "OSError: Generic S3 error: Error performing GET http://h/b: no route"


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
    rows = archiving.read(spark, table).orderBy("start").collect()
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
    rows = archiving.read(spark, table).collect()
    assert sorted(row["id"] for row in rows if row["country"] == "fr") == list(range(0, 120, 3))
    assert sum(row["country"] == "web" for row in rows) == 30

    sql.tables(spark, {"orders": messages.batch}, {"orders": common.infer_schema(messages.batch(spark))})
    result = sql.batch(
        spark, "SELECT data.country, count(*) AS n FROM orders GROUP BY ALL ORDER BY n", table=tmp_path / "once"
    )
    assert [tuple(row) for row in result.collect()] == [("fr", 40), ("de", 80)]
    assert archiving.read(spark, tmp_path / "once").count() == 2


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


@pytest.mark.parametrize("names", [("a.b", "a_b"), ("a-b", "a.b"), ("Orders", "orders")])
def test_topics_that_a_query_cannot_tell_apart_are_refused(names: tuple[str, str]):
    with pytest.raises(PipelineError, match=f"the topics {names[0]} and {names[1]} are both called"):
        sql.tables(None, dict.fromkeys(names))  # type: ignore[arg-type]


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
    assert not list((tmp_path / "archive").rglob("*.parquet"))


# --- Command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "status", "text"),
    [
        (["archive"], 2, "--to"),
        (["archive", "--to", "x"], 1, "say which topics"),
        (["replay", "--to", "x", "--checkpoint", "y"], 1, "say what to replay"),
        (["sql", "nowhere.sql"], 1, "--topic"),
        (["sql", "nowhere.sql", "--topic", "t"], 1, "cannot be read"),
        (["sql", "nowhere.sql", "--topic", "t", "--to-topic", "a"], 1, "by --checkpoint"),
        (["sql", "nowhere.sql", "--topic", "t", "--to-table", "a", "--mode", "update"], 1, "a table only grows"),
        (["metrics", "t", "--to-topic", "a", "--to-table", "b"], 1, "not both"),
        (["metrics", "t", "--to-topic", "a"], 1, "by --checkpoint"),
        (["metrics", "t", "--window", "0s"], 1, "--window must be greater than 0"),
        (["metrics", "t", "--remote", "sc://nowhere"], 1, "cannot draw here"),
        (["nothing"], 2, "invalid choice"),
        (["archive", "--to", "x", "--compact", "--vacuum"], 2, "not allowed with"),
        (["archive", "--to", "x", "--compact", "--compact-size", "0"], 2, "not between 1 and"),
        (["archive", "--to", "x", "--compact", "--compact-size=-5"], 2, "not between 1 and"),
        (["archive", "--to", "x", "--compact", "--compact-size", "big"], 2, "no whole number"),
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


def test_a_replay_goes_on_with_what_it_was_begun_with(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from flintmq.cli import main

    def no_session(*_: Any) -> Any:
        raise PipelineError("here Spark would start")

    def ended(**changed: str | None) -> str:
        said = {
            "--archive": str(tmp_path / "archive"),
            "--since": "2026-11-16T00:00:00Z",
            "--until": "2026-11-17T00:00:00Z",
            "--where": "offset > 1",
        } | {f"--{name}": value for name, value in changed.items() if name != "topic"}
        argv = [part for flag, value in said.items() if value is not None for part in (flag, value)]
        fixed = ["--to", "again", "--checkpoint", str(tmp_path / "checkpoint"), changed.get("topic") or "orders"]
        assert main(["pipeline", "replay", *argv, *fixed]) == 1
        return capsys.readouterr().err

    monkeypatch.setattr(common, "open_session", no_session)
    terms = {
        "to": "again",
        "where": "offset > 1",
        "archive": str(tmp_path / "archive"),
        "table": [None, None],
        "topics": ["orders"],
        "pattern": None,
        "from": None,
        "since": "2026-11-16T00:00:00+00:00",
        "until": "2026-11-17T00:00:00+00:00",
    }
    plan = Place.of(tmp_path / "checkpoint")
    for known in (terms, {"to": "again", "where": "offset > 1"}):  # 0.1.0 noted no more
        plan.write_text("plan.json", json.dumps({"name": "n", "terms": known, "chunks": []}))
        assert "here Spark would start" in ended()
        assert "here Spark would start" in ended(since="2026-11-16T01:00:00+01:00")
    plan.write_text("plan.json", json.dumps({"name": "n", "terms": terms, "chunks": []}))
    for changed in (
        {"archive": str(tmp_path / "other")},
        {"archive": None},
        {"since": "2026-11-16T00:00:01Z"},
        {"since": None},
        {"until": "2026-11-18T00:00:00Z"},
        {"topic": "clicks"},
        {"where": None},
    ):
        assert "is of another replay" in ended(**changed), changed
