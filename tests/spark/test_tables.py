"""Tables as archives: each batch by one commit, one writer of a query, no batch taken for another, kill -9 at any time.

No Spark here: the writer of the tasks is called as Spark would call it, and commits are the driver's.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
deltalake = pytest.importorskip("deltalake")

import pyarrow.compute as pc  # noqa: E402

from flintmq.errors import PipelineError  # noqa: E402
from flintmq.spark.pipelines import archive as archiving  # noqa: E402
from flintmq.spark.pipelines import common, replay, tables  # noqa: E402
from flintmq.spark.pipelines.tables import Table, open_table  # noqa: E402
from flintmq.spark.shipped import files  # noqa: E402
from flintmq.spark.shipped.files import DataFile, FileReader, FileWriter, Place  # noqa: E402
from support.ports import held_port  # noqa: E402

#: The beginning of an hour, ns.
HOUR = 1_794_794_400_000_000_000
PER_BATCH = 40
SCHEMA = pa.schema(
    [
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestamp_ns", pa.int64()),
    ]
)


def rows(offsets: list[int], topic: str = "orders", times: list[int] | None = None) -> Any:
    """Messages as the source gives them: an even offset in the first hour, an odd one in the second."""
    times = times or [HOUR + offset % 2 * 3_600_000_000_000 + offset for offset in offsets]
    columns = [[b"x"] * len(offsets), [topic] * len(offsets), offsets, [time // 1000 for time in times], times]
    arrays = [pa.array(column, kind.type) for column, kind in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def write(table: Table, name: str, *batches: Any) -> list[DataFile]:
    """What the tasks of a batch do."""
    table.make(SCHEMA, True)
    task = FileWriter(table.place, name, SCHEMA, partitioned=True, keeps_topic=table.format == "iceberg")
    return [DataFile(**json.loads(line)) for told in task(batches) for line in told.column(0).to_pylist()]


def end_at(offset: int) -> list[str]:
    """The end of a batch, as the source writes it into a checkpoint."""
    return [json.dumps({"v": 1, "mode": "log", "p": {"orders": {"ab": {"e": "ee", "o": offset}}}})]


def bring(table: Table, batch: int, end: int = -1, before: int = -1, query: str = "q", **more: Any) -> bool:
    """What the driver does with a batch."""
    end = 100 * (batch + 1) if end < 0 else end
    before = 100 * batch if before < 0 else before
    flags = {"checkpoint": "/checkpoint", "new_query": False} | more
    if not table.wants(query, batch, end_at(end), end_at(before) if batch else None, **flags):
        return False
    offsets = list(range(batch * PER_BATCH, (batch + 1) * PER_BATCH))
    table.commit(query, batch, end_at(end), write(table, f"{query}-{batch:010d}", rows(offsets)))
    return True


def offsets(table: Table) -> list[int]:
    """What a reader of the format finds."""
    if table.format == "iceberg":
        return sorted(table.load().scan().to_arrow()["offset"].to_pylist())  # type: ignore[attr-defined]
    found = deltalake.DeltaTable(table.place.text).to_pyarrow_table(columns=["offset"])
    return sorted(found["offset"].to_pylist())


@pytest.fixture(params=["delta", "iceberg"])
def format(request: pytest.FixtureRequest) -> str:
    if request.param == "iceberg":
        for module in ("pyiceberg", "sqlalchemy"):
            pytest.importorskip(module, reason=f"{module} is not installed: pip install 'flintmq[lake]'")
    return str(request.param)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.of(tmp_path / "table")


@pytest.fixture
def table(place: Place, format: str) -> Table:
    return open_table(place, format)


# --- Ordinary life ----------------------------------------------------------------------------------------------------


def test_a_table_that_another_engine_made_with_its_rows_is_not_taken_for_empty(place: Place):
    """As a copy of an archive is: all rows are in version 0."""
    deltalake.write_deltalake(place.text, pa.Table.from_batches([rows([1, 2])]), partition_by=["topic"])
    table = open_table(place)
    assert table.has_rows()
    with pytest.raises(PipelineError, match="has rows already"):
        bring(table, 0)


#: What rows of a query may have under the names of an archive's columns.
KINDS = {
    "numbers": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "small numbers": (pa.int32(), st.integers(-5, 5)),
    "texts": (pa.string(), st.text(max_size=5)),
    "bytes": (pa.binary(), st.binary(max_size=5)),
    "fractions": (pa.float64(), st.floats()),
    "days": (pa.date32(), st.dates()),
    "times": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(datetime.UTC))),
    "decimals": (pa.decimal128(9, 2), st.decimals(-999, 999, places=2)),
    "structs": (pa.struct([("offset", pa.int64())]), st.fixed_dictionaries({"offset": st.integers(-5, 5)})),
}


@st.composite
def query_rows(draw: Any) -> Any:
    names = draw(st.lists(st.sampled_from(["offset", "timestamp_ns", "data", "x"]), min_size=1, unique=True))
    count = draw(st.integers(1, 5))
    columns = {}
    for name in names:
        kind, values = KINDS[draw(st.sampled_from(sorted(KINDS)))]
        nullable = st.none() | values if draw(st.booleans()) else values
        columns[name] = pa.array(draw(st.lists(nullable, min_size=count, max_size=count)), kind)
    return pa.table(columns)


def conditions(draw: Any, rows: Any) -> Any:
    """A condition on a column, with a value that it has or not, if there is an order."""
    name = draw(st.sampled_from(rows.column_names))
    field, kind = pc.field(name), rows.schema.field(name).type
    values = [value for value in rows[name].to_pylist() if value is not None]
    ways = ["is null", "is valid", *(["=", "<", ">"] if values and not pa.types.is_struct(kind) else [])]
    way = draw(st.sampled_from(ways))
    if way.startswith("is"):
        return field.is_null() if way == "is null" else field.is_valid()
    value = pa.scalar(draw(st.sampled_from(values)), kind)
    return {"=": field == value, "<": field < value, ">": field > value}[way]


@settings(max_examples=60, deadline=None)
@given(query_rows(), st.data())
def test_whatever_readers_ask_for_they_find(wanted: Any, data: st.DataObject):
    """Of any rows of a query, by any condition: readers pass over files by what the table's log says of them."""
    with tempfile.TemporaryDirectory() as folder:
        table = open_table(Place.of(folder))
        table.make(wanted.schema, False)
        task = FileWriter(table.place, "a" * 32, wanted.schema, partitioned=False, keeps_topic=False)
        written = [DataFile(**json.loads(line)) for told in task(wanted.to_batches()) for line in told[0].to_pylist()]
        table.commit("q", 0, [], written)
        assert sum(file.rows for file in table.files()) == len(wanted)
        found = deltalake.DeltaTable(folder).to_pyarrow_dataset()
        for _ in range(5):
            condition = conditions(data.draw, wanted)
            assert len(found.to_table(filter=condition)) == len(wanted.filter(condition)), condition


def test_a_reader_of_messages_finds_them_by_any_column(place: Place):
    table = open_table(place)
    bring(table, 0)
    found = deltalake.DeltaTable(place.text).to_pyarrow_dataset()
    half = datetime.datetime.fromtimestamp(HOUR // 10**9 + 1800, datetime.UTC)
    assert len(found.to_table(filter=pc.field("timestamp") > half)) == PER_BATCH // 2
    assert len(found.to_table(filter=pc.field("offset") < 7)) == 7
    assert len(found.to_table(filter=pc.field("value") == b"x")) == PER_BATCH


def nested(kind: Any, how: str) -> Any:
    return {"list": lambda: pa.list_(kind), "map": lambda: pa.map_(pa.string(), kind), "struct": lambda: kind}[how]()


@pytest.mark.parametrize("how", ["struct", "list", "map"])
def test_fields_that_differ_by_case_alone_are_refused_at_any_depth(table: Table, how: str):
    """Of one run or of two: Spark could not read the table any more."""

    def schema(*names: str) -> Any:
        inner = nested(pa.struct([(name, pa.int64()) for name in names]), how)
        return pa.schema([*SCHEMA, ("data", pa.struct([("x", inner)]))])

    for refused in (schema("id", "ID"), pa.schema([*SCHEMA, ("Value", pa.int64())])):
        with pytest.raises(PipelineError, match="take for the same: name it alike"):
            table.make(refused, True)
    assert table.schema() is None
    table.make(schema("id"), True)
    with pytest.raises(PipelineError, match=r"data\.x\..*id.* has data\.x\..*ID"):
        table.make(schema("ID"), True)
    table.make(schema("id", "other"), True)


@pytest.mark.parametrize("inner", [pa.struct([("b", pa.int64())]), pa.list_(pa.struct([("b", pa.int64())]))])
def test_a_name_with_a_dot_that_is_the_path_of_another_is_refused_by_name(tmp_path: Path, inner: Any):
    pytest.importorskip("pyiceberg")
    dotted = "a.b" if pa.types.is_struct(inner) else "a.element.b"
    wanted = pa.schema([*SCHEMA, ("data", pa.struct([("a", inner), (dotted, pa.int64())]))])
    with pytest.raises(PipelineError, match=f"two fields are data.{dotted} to Iceberg, .* --schema, or"):
        open_table(Place.of(tmp_path / "table"), "iceberg").make(wanted, True)
    assert not open_table(Place.of(tmp_path / "table"), "iceberg").exists
    # A dot alone is no harm, and Delta's names are no paths.
    for format, kind in (("iceberg", pa.struct([("a", inner), ("a.c", pa.int64())])), ("delta", wanted[-1].type)):
        open_table(Place.of(tmp_path / format), format).make(pa.schema([*SCHEMA, ("data", kind)]), True)
    # Nor is one of them added to the other.
    with pytest.raises(PipelineError, match=f"two fields are data.{dotted} to Iceberg"):
        open_table(Place.of(tmp_path / "iceberg")).make(wanted, True)


def test_a_batch_is_one_commit_that_names_query_number_and_end(table: Table):
    assert bring(table, 0)
    assert bring(table, 1)
    assert offsets(table) == list(range(2 * PER_BATCH))
    again = open_table(table.place)
    assert again.format == table.format
    assert again.position("q") == tables.Position(1, tables.digest(end_at(200)))
    assert again.ends("q") == {0: end_at(100), 1: end_at(200)}
    assert again.position("other") is None


def test_files_say_rows_times_and_folders(table: Table):
    bring(table, 0)
    first, second = sorted(table.files(), key=lambda file: file.path)
    assert first.rows == second.rows == PER_BATCH // 2
    # Delta's log says no more than the hour.
    assert (first.oldest, first.newest) == (HOUR, HOUR + (38 if table.format == "iceberg" else 3_600_000_000_000 - 1))
    assert first.is_exact == (table.format == "iceberg")
    assert first.partition == {"topic": "orders", "date": "2026-11-16", "hour": "02"}
    assert second.partition["hour"] == "03"
    assert first.bytes == (Path(table.place.text) / first.path).stat().st_size


def test_a_batch_without_rows_is_remembered_too(table: Table):
    assert table.wants("q", 0, end_at(1), None, checkpoint="c", new_query=False)
    table.commit("q", 0, end_at(1), write(table, "q-0"))
    assert not table.wants("q", 0, end_at(1), None, checkpoint="c", new_query=False)
    assert offsets(table) == []
    assert bring(table, 1, before=1)


def test_new_columns_are_added_to_the_table(table: Table):
    bring(table, 0)
    more = SCHEMA.append(pa.field("data", pa.struct([("id", pa.int64())])))
    table.make(more, True)
    found = table.schema()
    assert found is not None
    assert "data" in found.names
    assert bring(table, 1)


# --- Columns and folders ----------------------------------------------------------------------------------------------


def add_with(table: Table, batch: int, kind: Any, value: Any, name: str = "data") -> None:
    """A batch of one row with a column more."""
    one = rows([batch])
    schema = SCHEMA.append(pa.field(name, kind))
    wider = pa.RecordBatch.from_arrays([*one.columns, pa.array([value], kind)], schema=schema)
    table.make(schema, True)
    task = FileWriter(table.place, f"q-{batch}", schema, partitioned=True, keeps_topic=table.format == "iceberg")
    written = [DataFile(**json.loads(line)) for told in task([wider]) for line in told.column(0).to_pylist()]
    table.commit("q", batch, end_at(batch + 1), written)


def column(table: Table, name: str) -> list[Any]:
    """By offset."""
    if table.format == "iceberg":
        found = table.load().scan().to_arrow()  # type: ignore[attr-defined]
    else:
        found = deltalake.DeltaTable(table.place.text).to_pyarrow_table()
    return list(found.sort_by("offset")[name].to_pylist())


def test_a_field_that_a_struct_lacks_is_added_at_any_depth(table: Table):
    inner = pa.struct([("x", pa.int64())])
    wider = pa.struct([("y", pa.string()), ("x", pa.int64())])
    add_with(table, 0, pa.struct([("id", pa.int64()), ("list", pa.list_(inner))]), {"id": 1, "list": [{"x": 2}]})
    add_with(table, 2, pa.struct([("list", pa.list_(wider)), ("n", pa.string())]), {"list": [{"y": "z"}], "n": "n"})
    expected = [
        {"id": 1, "list": [{"x": 2, "y": None}], "n": None},
        {"id": None, "list": [{"x": None, "y": "z"}], "n": "n"},
    ]
    assert column(table, "data") == expected
    known = table.schema()
    assert known is not None
    lines = pa.RecordBatch.from_arrays(
        [pa.array([json.dumps(file.__dict__) for file in table.files()])], names=["file"]
    )
    reader = FileReader(table.place, pa.schema([known.field("data")]))
    found = [row["data"] for batch in reader([lines]) for row in batch.to_pylist()]
    assert sorted(found, key=str) == sorted(expected, key=str)
    if isinstance(table, tables.DeltaTable):
        assert table.compact(1 << 20, LATER) == (2, 1)
        assert column(table, "data") == expected


def test_a_column_of_another_type_is_refused_before_anything_is_written(table: Table):
    add_with(table, 0, pa.struct([("id", pa.int64())]), {"id": 1})
    root = Path(table.place.text)
    there = sorted(root.rglob("*"))
    listed = pa.list_(pa.int64())
    for kind, value, name in (
        (pa.struct([("id", pa.string())]), {"id": "abc"}, r"data\.id"),
        (pa.struct([("id", pa.int32())]), {"id": 1}, r"data\.id"),
        (pa.struct([("id", listed)]), {"id": [1]}, r"data\.id"),
        (pa.string(), "abc", "data"),
    ):
        with pytest.raises(PipelineError, match=rf"column {name} of .* is of type .*, and what is to be written has"):
            add_with(table, 2, kind, value)
    with pytest.raises(PipelineError, match="has a column data, and what is to be written has Data"):
        add_with(table, 2, pa.string(), "abc", "Data")
    assert sorted(root.rglob("*")) == there
    assert column(table, "data") == [{"id": 1}]
    add_with(table, 2, pa.struct([("id", pa.int64())]), {"id": 2})


def test_small_numbers_and_all_else_that_spark_has_fit_again(table: Table):
    kinds = {
        "small": (pa.int16(), 7),
        "number": (pa.decimal128(10, 2), None),
        "map": (pa.map_(pa.string(), pa.int32()), [("a", 1)]),
        "day": (pa.date32(), datetime.date(2026, 11, 16)),
        "real": (pa.float64(), 0.5),
    }
    kind = pa.struct([(name, kind) for name, (kind, _) in kinds.items()])
    for batch in range(2):
        add_with(table, 2 * batch, kind, {name: value for name, (_, value) in kinds.items()})
    assert len(column(table, "data")) == 2


def test_rows_of_a_query_and_messages_do_not_go_to_one_table(table: Table, tmp_path: Path, format: str):
    bring(table, 0)
    with pytest.raises(PipelineError, match=r"is partitioned by .*: give another --to-table"):
        table.make(SCHEMA, False)
    plain = open_table(Place.of(tmp_path / "plain"), format)
    plain.make(SCHEMA, False)
    task = FileWriter(plain.place, "q-0", SCHEMA, partitioned=False, keeps_topic=True)
    written = [DataFile(**json.loads(line)) for told in task([rows([0])]) for line in told.column(0).to_pylist()]
    plain.commit("q", 0, [], written)
    with pytest.raises(PipelineError, match="is a table without folders, not an archive"):
        plain.make(SCHEMA, True)
    assert offsets(table) == list(range(PER_BATCH))
    assert offsets(plain) == [0]


def test_two_writers_that_add_a_column_at_the_same_time_both_have_it(table: Table):
    bring(table, 0)
    more = SCHEMA.append(pa.field("_undecoded", pa.binary()))
    writers = [open_table(table.place) for _ in range(2)]
    for writer in writers:
        writer.make(more, True)
        found = writer.schema()
        assert found is not None
        assert found.names.count("_undecoded") == 1


# --- Another batch under the same number ------------------------------------------------------------------------------


def test_a_batch_number_that_comes_again_with_another_end_stops(table: Table):
    for batch in range(3):
        assert bring(table, batch)
    assert not bring(table, 2)
    assert not bring(table, 1)
    for batch, end in ((2, 350), (2, 250), (1, 300), (0, 1)):
        with pytest.raises(PipelineError, match="the checkpoint has gone back") as caught:
            bring(table, batch, end)
        assert "--new-query" in str(caught.value)
        assert """--from '{"orders":{"ab":300}}'""" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert offsets(table) == list(range(3 * PER_BATCH))
    assert bring(table, 3)


def test_batches_that_are_missing_in_the_table_stop_it(table: Table):
    for batch in range(3):
        assert bring(table, batch)
    with pytest.raises(PipelineError, match="ends with batch 2 of this query, and Spark goes on with batch 5"):
        bring(table, 5)
    assert bring(table, 3)


def restore(table: Table, version: int) -> None:
    """Back to a version, by another program: of Delta its number, of Iceberg that of the snapshot."""
    if table.format == "delta":
        deltalake.DeltaTable(table.place.text).restore(version)
    else:
        opened = table.load()  # type: ignore[attr-defined]
        opened.manage_snapshots().set_current_snapshot(opened.snapshots()[version].snapshot_id).commit()


def test_a_table_that_was_restored_to_before_a_batch_stops_its_query(table: Table, format: str):
    versions = []
    for batch in range(3):
        bring(table, batch)
        versions.append(deltalake.DeltaTable(table.place.text).version() if format == "delta" else batch)
    # Not one that has all batches of it.
    bring(table, 0, query="other", new_query=True)
    restore(table, versions[2])
    table = open_table(table.place)
    assert bring(table, 3)
    restore(table, versions[0])
    table = open_table(table.place)
    assert offsets(table) == list(range(PER_BATCH))
    # Neither with the next batch nor with one that comes again, which the table says is in.
    for batch in (4, 3):
        with pytest.raises(PipelineError, match=r"restored to an older version.* batches 1 to 3 .* pipeline backfill"):
            bring(table, batch)
    assert offsets(table) == list(range(PER_BATCH))
    with pytest.raises(PipelineError, match="no rows of batch 0 of this query"):
        bring(table, 1, query="other")
    # New queries write here, and once it was told to go on this one does.
    assert bring(table, 0, query="new", new_query=True)
    assert bring(table, 4, new_query=True)
    assert bring(table, 5)
    wanted = {*range(PER_BATCH), *range(4 * PER_BATCH, 6 * PER_BATCH)}
    assert set(offsets(table)) == wanted


@pytest.mark.parametrize("back", [{"version": "1"}, {"version": None, "timestamp": "2020-01-01 00:00:00"}, {}])
def test_a_restore_by_another_engine_is_known_by_any_of_its_forms(
    place: Place, monkeypatch: pytest.MonkeyPatch, back: dict[str, Any]
):
    table = delta(place)
    for batch in range(2):
        bring(table, batch)
    history = table._commits
    newest = {"version": 99, "timestamp": 2**50, "operation": "RESTORE", "operationParameters": back}
    monkeypatch.setattr(table, "_commits", lambda limit=9: [newest, *history(limit)])
    with pytest.raises(PipelineError, match="restored to an older version"):
        bring(table, 2)


def test_a_batch_that_does_not_begin_where_the_last_one_ended_stops(table: Table):
    """Two drivers wrote one checkpoint: its notes are of the one, and the table has the batch of the other."""
    bring(table, 0)
    for before in (90, 110):
        with pytest.raises(PipelineError, match="ends elsewhere in /checkpoint than in"):
            bring(table, 1, before=before)
    assert bring(table, 1)


def test_a_query_that_is_not_known_is_not_begun_in_a_table_with_rows(table: Table):
    bring(table, 0)
    with pytest.raises(PipelineError, match="archived twice"):
        bring(table, 0, query="other")
    assert bring(table, 0, query="other", new_query=True)
    assert bring(table, 1, query="other")


def test_a_checkpoint_that_is_far_and_a_table_that_is_empty_do_not_belong_together(table: Table):
    with pytest.raises(PipelineError, match="has nothing of the 7 batches"):
        bring(table, 7)
    assert bring(table, 7, new_query=True)
    assert bring(table, 8)


# --- Two writers ------------------------------------------------------------------------------------------------------


def test_the_second_of_two_drivers_adds_nothing_and_stops(table: Table):
    """Both have written the files of the same batch: a driver that was suspended, and the one that took over."""
    bring(table, 0)
    zombie, second = open_table(table.place), open_table(table.place)
    for driver in (zombie, second):
        assert driver.wants("q", 1, end_at(200), end_at(100), checkpoint="c", new_query=False)
    batch = rows(list(range(PER_BATCH, 2 * PER_BATCH)))
    theirs = [write(driver, "q-1", batch) for driver in (zombie, second)]
    second.commit("q", 1, end_at(200), theirs[1])
    for _ in range(2):
        with pytest.raises(PipelineError, match="another process writes query q"):
            zombie.commit("q", 1, end_at(200), theirs[0])
    # Also when the other is far ahead.
    assert bring(second, 2)
    with pytest.raises(PipelineError, match="another process writes query q"):
        zombie.commit("q", 1, end_at(200), theirs[0])
    assert offsets(table) == list(range(3 * PER_BATCH))
    assert open_table(table.place).position("q") == tables.Position(2, tables.digest(end_at(300)))


def test_the_second_of_two_queries_that_begin_at_once_stops(table: Table):
    """Both have found a table without rows; nobody said --new-query."""
    other = open_table(table.place, table.format)
    for writer, query in ((table, "one"), (other, "two")):
        assert writer.wants(query, 0, end_at(1), None, checkpoint=f"/{query}", new_query=False)
    theirs = [write(writer, "q-0", rows([0, 1])) for writer in (table, other)]
    table.commit("one", 0, end_at(1), theirs[0])
    with pytest.raises(PipelineError, match="has rows already, and /two does not know of them"):
        other.commit("two", 0, end_at(1), theirs[1])
    assert offsets(table) == [0, 1]
    assert other.wants("two", 0, end_at(1), None, checkpoint="/two", new_query=True)
    other.commit("two", 0, end_at(1), theirs[1])
    assert offsets(table) == [0, 0, 1, 1]


def test_an_empty_batch_of_a_zombie_does_not_set_the_table_back(table: Table):
    bring(table, 0)
    zombie = open_table(table.place)
    assert zombie.wants("q", 1, end_at(100), end_at(100), checkpoint="c", new_query=False)
    second = open_table(table.place)
    for batch in (1, 2):
        assert second.wants("q", batch, end_at(100), end_at(100), checkpoint="c", new_query=False)
        second.commit("q", batch, end_at(100), [])
    with pytest.raises(PipelineError, match="another process writes query q"):
        zombie.commit("q", 1, end_at(100), [])
    last = open_table(table.place).position("q")
    assert last is not None
    assert last.batch == 2


def test_queries_do_not_stop_each_other(table: Table):
    """Each writes its own batches at the same time as the other."""
    table.make(SCHEMA, True)
    errors: list[BaseException] = []

    def work(query: str) -> None:
        try:
            mine = open_table(table.place)
            for batch in range(5):
                assert bring(mine, batch, query=query, new_query=True)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(query,)) for query in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert offsets(table) == sorted(2 * list(range(5 * PER_BATCH)))


def test_a_commit_whose_answer_was_lost_is_not_made_again(table: Table, monkeypatch: pytest.MonkeyPatch):
    bring(table, 0)
    add = type(table)._add
    lost = []

    def answer_lost(self: Table, *arguments: Any) -> None:
        add(self, *arguments)
        if not lost:
            lost.append(True)
            raise tables._Conflict("the connection was closed")

    monkeypatch.setattr(type(table), "_add", answer_lost)
    assert bring(table, 1)
    assert lost
    assert offsets(table) == list(range(2 * PER_BATCH))


# --- Merging ----------------------------------------------------------------------------------------------------------

LATER = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
MEBIBYTE = 1 << 20


def delta(place: Place) -> tables.DeltaTable:
    found = open_table(place, "delta")
    assert isinstance(found, tables.DeltaTable)
    return found


def test_merged_files_hold_the_same_rows_in_the_same_folders(place: Place):
    table = delta(place)
    for batch in range(3):
        bring(table, batch)
    day = datetime.datetime(2026, 11, 16, tzinfo=datetime.UTC)
    assert table.compact(MEBIBYTE, day.replace(hour=2)) == (0, 0)
    assert table.compact(MEBIBYTE, day.replace(hour=3)) == (3, 1)
    assert table.compact(MEBIBYTE, LATER) == (3, 1)
    assert table.compact(MEBIBYTE, LATER) == (0, 0)
    assert offsets(table) == list(range(3 * PER_BATCH))
    first, second = sorted(table.files(), key=lambda file: file.path)
    exact = files.describe(place, first.path, first.partition)
    assert (first.rows, exact.oldest, exact.newest) == (60, HOUR, HOUR + 118)
    assert [file.partition["hour"] for file in (first, second)] == ["02", "03"]
    assert read_back(table, [second])[0] == ("orders", 1, "2026-11-16", 3)
    assert bring(table, 3)
    # No larger than is wanted.
    assert table.compact(first.bytes, LATER) == (0, 0)
    with pytest.raises(PipelineError, match="at least 1 MiB"):
        table.compact(0, LATER)


@pytest.mark.parametrize("other", ["merge", "optimize", "batch"])
def test_a_merge_beside_another_commit_doubles_and_loses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, other: str
):
    """The other comes in after the files were chosen, and before the merged ones are put in their place."""
    table, second = delta(place), delta(place)
    for batch in range(3):
        bring(table, batch)
    merge = tables.DeltaTable._merge
    begun = []

    def beside(self: tables.DeltaTable, old: Any) -> DataFile:
        if self is table and not begun:
            begun.append(True)
            if other == "merge":
                assert second.compact(MEBIBYTE, LATER) == (6, 2)
            elif other == "optimize":
                deltalake.DeltaTable(place.text).optimize.compact()
            else:
                assert bring(second, 3)
        return merge(self, old)

    monkeypatch.setattr(tables.DeltaTable, "_merge", beside)
    assert table.compact(MEBIBYTE, LATER) == ((6, 2) if other == "batch" else (0, 0))
    assert begun
    assert offsets(table) == list(range((4 if other == "batch" else 3) * PER_BATCH))
    # Those that came too late are deleted again.
    assert len(list(Path(place.text).rglob("merged-*.parquet"))) == (0 if other == "optimize" else 2)
    assert bring(table, 4 if other == "batch" else 3)


def test_files_whose_names_are_quoted_in_the_log_are_read_and_merged(place: Place):
    """As archives of the form before had them."""
    table = delta(place)
    taken = []
    for number in range(2):
        [file] = write(table, "q-0", rows([2 * number], "a#ephemeral"))
        path = f"topic=a%23ephemeral/date=2026-11-16/hour=02/part {number}.parquet"
        (Path(place.text) / path).parent.mkdir(parents=True, exist_ok=True)
        (Path(place.text) / file.path).rename(Path(place.text) / path)
        taken.append(dataclasses.replace(file, path=path))
    table.adopt(taken, {"q": (0, end_at(100))})
    assert sorted(file.path for file in table.files()) == [file.path for file in taken]
    assert offsets(table) == [0, 2]
    assert table.compact(MEBIBYTE, LATER) == (2, 1)
    assert offsets(table) == [0, 2]
    assert [file.partition["topic"] for file in table.files()] == ["a#ephemeral"]
    time.sleep(0.01)
    assert table.vacuum(0) == 2
    assert not any((Path(place.text) / file.path).exists() for file in taken)
    assert offsets(table) == [0, 2]


def test_files_that_hold_other_than_the_table_says_are_not_merged(place: Place, monkeypatch: pytest.MonkeyPatch):
    table = delta(place)
    for batch in range(2):
        bring(table, batch)
    monkeypatch.setattr(FileReader, "rows_of", lambda self, source, partition: iter(()))
    with pytest.raises(
        PipelineError, match=r"0 rows were found in files of .* of which the table says that they hold 40"
    ):
        table.compact(MEBIBYTE, LATER)
    assert offsets(table) == list(range(2 * PER_BATCH))


MERGER = """
import sys
from spark import test_tables as tests
from flintmq.spark.shipped.files import Place

table = tests.delta(Place.of(sys.argv[1]))
print("ready", flush=True)
merged = 0
for _ in range(int(sys.argv[2])):
    merged += table.compact(tests.MEBIBYTE, tests.LATER)[0]
print(merged, flush=True)
"""


def test_three_processes_merge_beside_a_writer(place: Place):
    table = delta(place)
    for batch in range(4):
        bring(table, batch)
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
    mergers = [
        subprocess.Popen(
            [sys.executable, "-c", MERGER, place.text, "15"],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for merger in mergers:
        assert merger.stdout is not None
        assert merger.stdout.readline() == "ready\n"
    for batch in range(4, 16):
        assert bring(table, batch)
    merged = [int(merger.communicate(timeout=120)[0]) for merger in mergers]
    assert [merger.returncode for merger in mergers] == [0, 0, 0]
    assert sum(merged) > 0
    assert offsets(table) == list(range(16 * PER_BATCH))


# --- Deleting ---------------------------------------------------------------------------------------------------------

DAY = 86400


def age(root: Path, days: float) -> None:
    for path in root.rglob("*"):
        if path.is_file() and "_delta_log" not in path.parts:
            os.utime(path, (time.time() - days * DAY,) * 2)


def test_vacuum_deletes_only_what_the_table_had_and_what_its_tasks_left(place: Place):
    query = "6f1c2a80-0000-4000-8000-00000000abcd"
    table = delta(place)
    for batch in range(2):
        bring(table, batch, query=query)
    # What a task that failed leaves: of a batch that is in, of one that may be written now, of a query that ran once.
    left = write(table, f"{query}-{1:010d}", rows([1])) + write(table, "0" * 32, rows([1]))
    running = write(table, f"{query}-{2:010d}", rows([1]))
    root = Path(place.text)
    foreign = ["notes.parquet", "data.csv", "checkpoint/offsets/0", "topic=orders/part-0.parquet", "a/b/c.parquet"]
    nested = delta(place / "nested")
    bring(nested, 0, query=query)
    foreign += [str((root / "nested" / file.path).relative_to(root)) for file in nested.files()]
    orphan = write(nested, f"{query}-{0:010d}", rows([1]))
    foreign += [f"nested/{file.path}" for file in orphan]
    for name in foreign:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if not (root / name).exists():
            (root / name).write_text("mine")
    age(root, 6)
    assert table.vacuum(5 * DAY) == 1
    assert not (root / left[0].path).exists()
    age(root, 8)
    os.utime(root / running[0].path)
    assert table.vacuum(5 * DAY) == 1
    assert not (root / left[1].path).exists()
    assert all((root / name).exists() for name in foreign)
    assert (root / running[0].path).exists()
    assert offsets(table) == list(range(2 * PER_BATCH))
    # What was merged a moment ago is still read, however old its files are.
    assert table.compact(MEBIBYTE, LATER) == (4, 2)
    age(root, 30)
    assert table.vacuum(3600) == 1, "of the batch that was never added"
    assert offsets(table) == list(range(2 * PER_BATCH))


def test_a_vacuum_spares_the_files_of_a_batch_that_is_about_to_be_added(place: Place):
    query = "6f1c2a80-0000-4000-8000-00000000abcd"
    table = delta(place)
    bring(table, 0, query=query)
    assert table.wants(query, 1, end_at(200), end_at(100), checkpoint="c", new_query=False)
    written = write(table, f"{query}-{1:010d}", rows(list(range(PER_BATCH, 2 * PER_BATCH))))
    age(Path(place.text), 2)
    assert archiving.vacuum(place.text, retain=3600) == 0
    table.commit(query, 1, end_at(200), written)
    assert offsets(table) == list(range(2 * PER_BATCH))


def test_what_is_to_be_kept_is_not_rounded_down(place: Place):
    query = "6f1c2a80-0000-4000-8000-00000000abcd"
    table = delta(place)
    bring(table, 0, query=query)
    [left] = write(table, f"{query}-{0:010d}", rows([2]))
    path = Path(place.text) / left.path
    for minutes, deleted in ((75, 0), (125, 1)):
        os.utime(path, (time.time() - minutes * 60,) * 2)
        assert archiving.vacuum(place.text, retain=80 * 60) == deleted


# --- kill -9 ----------------------------------------------------------------------------------------------------------

WRITER = """
import sys
from spark import test_tables as tests
from flintmq.spark.pipelines.tables import open_table
from flintmq.spark.shipped.files import Place

table = open_table(Place.of(sys.argv[1]), sys.argv[2])
for batch in range(int(sys.argv[3])):
    tests.bring(table, batch)
    print(batch, flush=True)
"""


def test_a_kill_at_any_moment_costs_and_doubles_nothing(table: Table, format: str):
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
    batches = 12
    chance = random.Random(7)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, table.place.text, format, str(batches)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        # From its first batch on, which it skips or writes.
        process.stdout.readline()
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
        found = offsets(open_table(table.place))
        assert found == list(range(len(found)))
        assert len(found) % PER_BATCH == 0
        if len(found) == batches * PER_BATCH:
            break
    for batch in range(batches):
        bring(table, batch)
    assert offsets(table) == list(range(batches * PER_BATCH))


def test_rows_and_names_are_on_the_device_before_the_commit(place: Place, monkeypatch: pytest.MonkeyPatch):
    synced: set[str] = set()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not say which file a descriptor is")
    monkeypatch.setattr(os, "fsync", noted)
    table = open_table(place)
    bring(table, 0)
    root = Path(place.text)
    for file in table.files():
        path = root / file.path
        assert str(path) in synced
        for folder in path.relative_to(root).parents:
            assert str(root / folder) in synced
    newest = max((root / "_delta_log").glob("*.json"))
    assert {str(newest), str(newest.parent)} <= synced


# --- Rows that are missing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gone", "cut short", "not told"])
def test_a_batch_whose_files_hold_other_than_was_written_is_not_added(place: Place, kind: str):
    table = open_table(place)
    written = write(table, "q-0", rows(list(range(PER_BATCH))))
    archiving.check_files(place, written, PER_BATCH, "q-0")
    path = Path(place.text) / written[0].path
    if kind == "gone":
        path.unlink()
    elif kind == "cut short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        written.pop()
    with pytest.raises(PipelineError, match=f"Spark wrote {PER_BATCH} rows in batch q-0 and the files in .* hold 20"):
        archiving.check_files(place, written, PER_BATCH, "q-0")


# --- The files of tasks -----------------------------------------------------------------------------------------------


def read_back(table: Table, written: list[DataFile]) -> list[tuple[str, int, str, int]]:
    wanted = pa.schema([("topic", pa.string()), ("offset", pa.int64()), ("date", pa.date32()), ("hour", pa.int32())])
    lines = pa.RecordBatch.from_arrays([pa.array([json.dumps(file.__dict__) for file in written])], names=["file"])
    found = [tuple(row.values()) for batch in FileReader(table.place, wanted)([lines]) for row in batch.to_pylist()]
    return sorted((topic, offset, date.isoformat(), hour) for topic, offset, date, hour in found)


def test_rows_go_to_the_folder_of_their_topic_and_hour(place: Place):
    table = open_table(place)
    hour = 3_600_000_000_000
    # The last ns of an hour, the first of the next, the beginning of time and before it.
    times = [HOUR - 1, HOUR, HOUR + hour - 1, HOUR + 30 * hour, 0, -1]
    written = write(
        table,
        "q-0",
        rows(list(range(6)), "orders", times),
        rows([6], "a#ephemeral", [HOUR]),
        rows([7], "2026", [HOUR]),
    )
    assert read_back(table, written) == [
        ("2026", 7, "2026-11-16", 2),
        ("a#ephemeral", 6, "2026-11-16", 2),
        ("orders", 0, "2026-11-16", 1),
        ("orders", 1, "2026-11-16", 2),
        ("orders", 2, "2026-11-16", 2),
        ("orders", 3, "2026-11-17", 8),
        ("orders", 4, "1970-01-01", 0),
        ("orders", 5, "1969-12-31", 23),
    ]
    table.commit("q", 0, end_at(1), written)
    found = deltalake.DeltaTable(place.text).to_pyarrow_table(columns=["topic", "offset"]).to_pylist()
    assert {row["topic"] for row in found if row["offset"] in (6, 7)} == {"a#ephemeral", "2026"}


@pytest.mark.parametrize("most", [10_000_000, 9])
@pytest.mark.parametrize("seed", range(10))
def test_chunks_of_an_archive_hold_each_message_of_the_time_once(
    place: Place, seed: int, most: int, monkeypatch: pytest.MonkeyPatch
):
    """Messages with equal times, and a time that ends among them, or at one: all before the end, and no other."""
    monkeypatch.setattr(replay, "_MOST_PLACES", most)
    dice = random.Random(seed)
    times = sorted(HOUR + dice.randrange(5) * 1000 for _ in range(40))
    table = open_table(place)
    table.commit("q", 0, end_at(1), write(table, "q-0", rows(list(range(40)), times=times)))
    begin = datetime.datetime.fromtimestamp(HOUR // 10**9, datetime.UTC)
    since, until = (begin + datetime.timedelta(microseconds=dice.randrange(*edges)) for edges in ((0, 3), (2, 6)))
    size = dice.choice([3, 7, 100])
    chunks = replay.archive_chunks(None, place.text, since=since, until=until, size=size)  # type: ignore[arg-type]
    messages = [(time, offset) for offset, time in enumerate(times)]
    found = [
        message
        for chunk in chunks
        for message in messages
        if tuple(chunk.what["first"]) <= message < tuple(chunk.what["stop"])
    ]
    ends = [common.nanoseconds(edge) for edge in (since, until)]
    assert found == [message for message in messages if ends[0] <= message[0] < ends[1]]


def test_chunks_of_very_many_messages_are_about_as_large_as_asked(place: Place, monkeypatch: pytest.MonkeyPatch):
    """Of which not all places are held in memory."""
    table = open_table(place)
    for batch in range(3):
        numbers = list(range(500 * batch, 500 * batch + 500))
        written = write(table, f"q-{batch}", rows(numbers, times=[HOUR + number * 7919 % 1500 for number in numbers]))
        table.commit("q", batch, end_at(batch), written)
    monkeypatch.setattr(replay, "_MOST_PLACES", 200)
    chunks = replay.archive_chunks(None, place.text, size=100)  # type: ignore[arg-type]
    assert len(replay._places_of(place, table.files(), 8)) == 188
    assert len(chunks) in (15, 16)
    edges = [chunk.what["first"][0] for chunk in chunks][1:]
    assert all(90 <= after - before <= 110 for before, after in itertools.pairwise(edges))


def test_a_task_holds_few_files_open_and_few_rows(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "_OPEN_FILES", 3)
    monkeypatch.setattr(files, "_ROW_GROUP_BYTES", 100)
    monkeypatch.setattr(files, "_HELD_BYTES", 200)
    table = open_table(place)
    batches = [rows([offset], f"topic-{offset % 7}", [HOUR]) for offset in range(50)]
    written = write(table, "q-0", *batches)
    assert len(written) > 7
    assert sum(file.rows for file in written) == 50
    assert sorted(row[1] for row in read_back(table, written)) == list(range(50))
    assert len({file.path for file in written}) == len(written)


@pytest.mark.parametrize(
    ("where", "text", "for_spark"),
    [
        ("/data/archive/", "/data/archive", "/data/archive"),
        ("file:///data/a%20b", "/data/a b", "/data/a b"),
        ("file:/data/a", "/data/a", "/data/a"),
        ("file://localhost/data/a", "/data/a", "/data/a"),
        ("file:///data/a#b?c", "/data/a#b?c", "/data/a#b?c"),
        ("s3a://bucket/a/", "s3://bucket/a", "s3a://bucket/a"),
        ("s3://bucket/a", "s3://bucket/a", "s3a://bucket/a"),
        ("gs://bucket/a", "gs://bucket/a", "gs://bucket/a"),
        ("abfss://c@account.dfs.core.windows.net/a", "abfss://c@account.dfs.core.windows.net/a", None),
        ("hdfs://name:8020/a", "hdfs://name:8020/a", None),
    ],
)
def test_places_are_paths_and_uris(where: str, text: str, for_spark: str | None):
    place = Place.of(where)
    assert (place.text, place.for_spark) == (text, for_spark or text)
    assert Place.of(place) is place
    assert (place / "x").text == f"{text}/x"


@pytest.mark.parametrize(
    "way", ["{root}/archive", "{root}/x/../archive", "{root}/link", "{root}/archive/_aside", "{root}"]
)
def test_messages_are_not_put_aside_into_the_archive_by_any_way(tmp_path: Path, way: str):
    """The batch would look as if it were in the archive."""
    (tmp_path / "archive").mkdir()
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "archive")
    aside = archiving.Aside(target=archiving.Target.of(way.format(root=tmp_path)))
    with pytest.raises(PipelineError, match="one inside of the other"):
        aside.check(archiving.Target.of(tmp_path / "archive"), is_decoded=True)


def test_a_place_without_a_name_is_refused():
    """As where a variable of the shell is not set: it is not the folder that one happens to be in."""
    with pytest.raises(PipelineError, match="a place has no name"):
        Place.of("")


def test_other_schemes_are_refused():
    for where in ("http://host/x", "ftp://host/x", "s3:/bucket/x"):
        with pytest.raises(PipelineError, match="a place is a path, or a URI of"):
            Place.of(where)


def test_a_uri_of_a_file_on_another_machine_is_refused():
    """Two slashes where three were meant: the rows would go to /archive."""
    with pytest.raises(PipelineError, match=r"names the machine 'data': a path of this one is file:///data/archive"):
        Place.of("file://data/archive")


@pytest.mark.parametrize(
    "where",
    ["s3://", "s3:///a", "s3://b/a//c", "s3://b/../a", "hdfs://n:1/a/./b", "s3://b/a#c", "gs://b/a?c", "s3://b/.."],
)
def test_a_uri_that_a_store_would_take_for_another_is_refused(where: str):
    """Of a#c and a?c deltalake opens a, and x/../a is a: two archives would be one."""
    with pytest.raises(PipelineError, match=r"no part of a name|names a bucket"):
        Place.of(where)


def test_missing_credentials_are_told_soon(monkeypatch: pytest.MonkeyPatch):
    """Outside of a cloud nobody answers at the address where a cloud has them; a library waits for three minutes."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"AWS_METADATA_ENDPOINT": address, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}
        options |= {"AWS_REGION": "us-east-1"}
        started = time.monotonic()
        with pytest.raises(PipelineError, match=r"there are no credentials: .*AWS_ACCESS_KEY_ID.*--storage-option"):
            open_table(Place.of("s3://bucket/archive", options))
        assert time.monotonic() - started < 60


def z85(data: bytes) -> str:
    """As ZeroMQ's RFC 32 has it, for the vectors that are in the log itself."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    numbers = [int.from_bytes(data[at : at + 4]) for at in range(0, len(data), 4)]
    return "".join(digits[number // 85**power % 85] for number in numbers for power in range(4, -1, -1))


def delete_by_vector(place: Place, rows: list[int]) -> None:
    """Mark the first rows of the newest file as deleted, as Spark does where deletion vectors are enabled."""
    log = Path(place.text) / "_delta_log"
    known = sorted(log.glob("*.json"))
    lines = [json.loads(line) for path in known for line in path.read_text().splitlines()]
    added = [line["add"] for line in lines if "add" in line][-1]
    # One container of 16-bit numbers, in a bitmap of 32 bits, in one of 64.
    bitmap = struct.pack(f"<IIHHI{len(rows)}H", 12346, 1, 0, len(rows) - 1, 16, *rows)
    vector = struct.pack("<iqi", 1681511377, 1, 0) + bitmap
    vector += bytes(-len(vector) % 4)
    told = {"storageType": "i", "pathOrInlineDv": z85(vector), "sizeInBytes": len(vector), "cardinality": len(rows)}
    features = {
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors", "appendOnly", "invariants"],
    }
    gone = {key: added[key] for key in ("path", "partitionValues", "size")}
    actions = [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"remove": {**gone, "deletionTimestamp": 1, "dataChange": True, "extendedFileMetadata": True}},
        {"add": {**added, "deletionVector": told, "dataChange": True}},
        {"commitInfo": {"timestamp": int(time.time() * 1000), "operation": "DELETE"}},
    ]
    (log / f"{len(known):020d}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def test_rows_that_another_engine_has_deleted_by_marks_alone_do_not_come_back(
    table: Table, format: str, monkeypatch: pytest.MonkeyPatch
):
    bring(table, 0)
    if format == "delta":
        delete_by_vector(table.place, [0, 1])
        assert len(deltalake.DeltaTable(table.place.text).deletion_vectors().read_all()) == 1
    else:
        from pyiceberg.table import DataScan

        plan = DataScan.plan_files

        def marked(scan: Any) -> list[Any]:
            # pyiceberg reads position deletes, and writes none.
            found = list(plan(scan))
            for task in found:
                task.delete_files = {task.file}
            return found

        monkeypatch.setattr(DataScan, "plan_files", marked)
    table = open_table(table.place)
    with pytest.raises(PipelineError, match=r"which only marked them: \d of its files still hold such rows .* rewrite"):
        table.files()
    with pytest.raises(PipelineError, match="only marked"):
        archiving.table_files(None, table)
    # The archive query goes on.
    assert len(table.files(may_lack_rows=True)) == 2
    assert table.has_rows()
    assert bring(table, 1)


def test_a_catalog_is_icebergs_alone(tmp_path: Path):
    pytest.importorskip("pyiceberg")
    options = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/w"}
    place = Place.of(tmp_path / "new")
    assert open_table(place, catalog_options=options).format == "iceberg"
    bring(open_table(Place.of(tmp_path / "delta")), 0)
    for other, format in (("delta", None), ("new", "delta"), ("new", "parquet")):
        with pytest.raises(PipelineError, match="only Iceberg has a catalog"):
            open_table(Place.of(tmp_path / other), format, catalog_options=options)


def test_files_that_another_engine_has_written_say_their_topic_and_hour(tmp_path: Path):
    """Theirs have other names, and are in the folder that the catalog chose."""
    pytest.importorskip("pyiceberg")
    table = open_table(Place.of(tmp_path / "t"), "iceberg")
    bring(table, 0)
    before = {(file.rows, *sorted(file.partition.items())) for file in table.files()}
    # As rewrite_data_files does it: the same rows in files of the engine's own.
    moved = []
    for number, file in enumerate(table.files()):
        path = f"_iceberg/data/topic_name=orders/hour=2026-11-16-{number:02d}/00000-{number}-5f6c.parquet"
        (tmp_path / "t" / path).parent.mkdir(parents=True)
        (tmp_path / "t" / file.path).rename(tmp_path / "t" / path)
        moved.append(f"file://{tmp_path}/t/{path}")
    other = table.load()  # type: ignore[attr-defined]
    with other.transaction() as change:
        change.delete("offset >= 0")
        change.add_files(moved)
    after = table.files()
    assert {(file.rows, *sorted(file.partition.items())) for file in after} == before
    assert not any(file.path.startswith("topic=") for file in after)
    reader = FileReader(table.place, pa.schema([("value", pa.binary()), ("topic", pa.string()), ("hour", pa.int32())]))
    lines = pa.RecordBatch.from_pydict({"file": [json.dumps(vars(file)) for file in after]})
    assert sum(part.num_rows for part in reader([lines])) == PER_BATCH


def test_an_archive_in_a_place_that_cannot_be_written_says_so(tmp_path: Path, format: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(PipelineError, match=r"cannot be (made|opened|read)"):
        bring(open_table(Place.of(tmp_path / "file" / "archive"), format), 0)


def test_an_iceberg_table_of_a_store_needs_a_catalog(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pyiceberg")
    with pytest.raises(PipelineError, match="needs a catalog: --catalog NAME"):
        tables.IcebergTable(Place("s3://bucket/table"))


def test_catalog_options_and_names_are_passed_on(tmp_path: Path):
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    options = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/w"}
    target = archiving.Target(Place.of(tmp_path / "t"), "iceberg", "lake", options, "sales.orders")
    assert bring(target.open(), 0)
    from pyiceberg.catalog import load_catalog

    assert load_catalog("lake", **options).load_table("sales.orders").scan().to_arrow().num_rows == PER_BATCH
    assert not bring(target.open(), 0)


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "of a version before"])
def test_two_places_whose_names_end_alike_do_not_share_a_table_of_a_catalog(tmp_path: Path, noted: bool):
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    options = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/w"}
    first = archiving.Target(Place.of(tmp_path / "x" / "orders"), "iceberg", "lake", options)
    second = archiving.Target(Place.of(tmp_path / "y" / "orders"), "iceberg", "lake", options)
    query = str(uuid.UUID(int=7))
    early = second.open()
    table = first.open()
    assert bring(table, 0, query=query)
    if not noted:
        with table.load().transaction() as change:  # type: ignore[attr-defined]
            change.remove_properties("flintmq.place")
    for begun in (second.open, lambda: bring(early, 0)):
        with pytest.raises(PipelineError, match=r"has its files in .*/x/orders, not in .*/y/orders: .* --table"):
            begun()
    assert bring(first.open(), 1, query=query)
    assert offsets(first.open()) == list(range(2 * PER_BATCH))
    assert bring(archiving.Target(second.place, "iceberg", "lake", options, "flintmq.others").open(), 0)


@pytest.mark.parametrize(("kind", "module"), [("glue", "boto3"), ("hive", "hive_metastore")])
def test_a_catalog_whose_parts_are_missing_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
):
    pytest.importorskip("pyiceberg")
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"pyiceberg.catalog.{kind}", raising=False)
    with pytest.raises(PipelineError, match=rf"(?i)catalog cannot be opened: .*{kind} .*pyiceberg\[{kind}\]"):
        open_table(Place.of(tmp_path / "t"), catalog_options={"type": kind, "uri": "thrift://127.0.0.1:1"})


def test_a_catalog_that_does_not_answer_is_told_in_a_line(tmp_path: Path):
    pytest.importorskip("pyiceberg")
    options = {"type": "rest", "uri": f"http://127.0.0.1:{held_port()}"}
    with pytest.raises(PipelineError, match=r"the Iceberg catalog cannot be opened: .*refused") as caught:
        open_table(Place.of(tmp_path / "t"), catalog_options=options)
    assert "\n" not in str(caught.value)


def test_an_iceberg_table_that_is_only_looked_for_is_not_made(tmp_path: Path):
    pytest.importorskip("pyiceberg")
    target = archiving.Target(Place.of(tmp_path / "typo"), "iceberg")
    with pytest.raises(PipelineError, match="by an engine of that format"):
        archiving.compact(target)
    assert target.open().files() == []
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(("name", "taken"), [("a b", 2), ("100%", 2), ("a%20b", 0), ("a#b", 1), ("a?b", 1), ("[ü]", 2)])
def test_a_table_in_a_folder_of_any_name_works_or_is_refused_at_once(tmp_path: Path, name: str, taken: int):
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    works = 0
    for format in ("delta", "iceberg"):
        root = tmp_path / format / name
        try:
            table = open_table(Place.of(root), format)
        except PipelineError as exc:
            assert "table cannot be at" in str(exc)
            assert not (tmp_path / format).exists()
            continue
        bring(table, 0)
        assert offsets(open_table(Place.of(root))) == list(range(PER_BATCH))
        assert [path.name for path in (tmp_path / format).iterdir()] == [name]
        works += 1
    assert works == taken
