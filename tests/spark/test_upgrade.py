"""Archives of the form before tables become tables: nothing lost or doubled, and their checkpoints go on.

The old form is written here as it was: versions of JSON lines, and notes of what was begun. `test_fixtures_v0_1_0` has
an archive that 0.1.0 itself has written.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")
parquet = pytest.importorskip("pyarrow.parquet")

from flintmq.errors import FormatError, PipelineError  # noqa: E402
from flintmq.spark.pipelines import tables, upgrade  # noqa: E402
from flintmq.spark.pipelines.tables import open_table  # noqa: E402
from flintmq.spark.shipped.files import Place  # noqa: E402

from .test_tables import PER_BATCH, bring, end_at, offsets, rows  # noqa: E402

FOLDER = "topic=orders/date=2026-11-16/hour=02"


class Old:
    """An archive as the versions before tables wrote it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = 0
        (root / "_manifest" / "pending").mkdir(parents=True)

    def file(self, name: str, numbers: list[int], folder: Path | None = None) -> dict[str, Any]:
        path = (folder or self.root / FOLDER) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_batches([rows(numbers, times=[1_794_794_400_000_000_000 + n for n in numbers])])
        parquet.write_table(table.drop(["topic"]), path)
        return {"path": f"{FOLDER}/{name}", "rows": len(numbers), "bytes": path.stat().st_size}

    def add(self, *changes: dict[str, Any], full: bool = False) -> None:
        self.version += 0 if full else 1
        name = f"{self.version:020d}{'.full' if full else ''}.jsonl"
        lines = [{"format": 1, "version": self.version, "made": 1.0}, *changes]
        (self.root / "_manifest" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def note(self, name: str, **todo: Any) -> None:
        (self.root / "_manifest" / "pending" / f"{name}.json").write_text(json.dumps(todo))


def numbers(batch: int) -> list[int]:
    return list(range(batch * PER_BATCH, (batch + 1) * PER_BATCH))


@pytest.fixture
def old(tmp_path: Path) -> Old:
    """Two batches, the first merged, with a file that is dead; a third that is decided and not finished."""
    made = Old(tmp_path / "archive")
    made.add({"batch": ["q", -1]}, {"fact": {"format": "parquet"}})
    first = made.file("q-0-0.parquet", numbers(0))
    made.add({"add": first}, {"batch": ["q", 0], "end": end_at(100)})
    merged = made.file("merge-1.parquet", numbers(0))
    made.add({"remove": first["path"]}, {"add": merged})
    made.add({"add": merged}, {"batch": ["q", 0], "end": end_at(100)}, {"batch": ["q", -1]}, full=True)
    made.add({"add": made.file("q-1-0.parquet", numbers(1))}, {"batch": ["q", 1], "end": end_at(200)})
    staging = tmp_path / ".archive.staging"
    moved = made.file("part.parquet", numbers(2), staging)
    move = {"from": str(staging / "part.parquet"), "file": {**moved, "path": f"{FOLDER}/q-2-0.parquet"}}
    made.note("q-2", kind="batch", query="q", batch=2, end=end_at(300), moves=[move], **{"in": str(staging)})
    return made


def test_an_old_archive_becomes_a_table_and_goes_on(old: Old):
    with pytest.raises(PipelineError, match="flintmq pipeline archive --upgrade --to"):
        open_table(Place.of(old.root))
    assert upgrade.upgrade(old.root) == (3 * PER_BATCH, 3)
    table = open_table(Place.of(old.root))
    assert table.format == "delta"
    assert offsets(table) == list(range(3 * PER_BATCH))
    assert table.position("q") == tables.Position(2, tables.digest(end_at(300)))
    assert not bring(table, 2)
    with pytest.raises(PipelineError, match="the checkpoint has gone back"):
        bring(table, 2, end=301)
    with pytest.raises(PipelineError, match="the batches between are missing"):
        bring(table, 4)
    assert bring(table, 3)
    assert offsets(table) == list(range(4 * PER_BATCH))
    with pytest.raises(PipelineError, match="is not an archive of the form before tables"):
        upgrade.upgrade(old.root)


@pytest.mark.parametrize("step", ["describe", "adopt", "rename"])
def test_an_upgrade_that_was_killed_is_begun_again(old: Old, monkeypatch: pytest.MonkeyPatch, step: str):
    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        where: Any = {"describe": upgrade, "adopt": tables.DeltaTable, "rename": os}[step]
        patch.setattr(where, step, killed)
        with pytest.raises(Killed):
            upgrade.upgrade(old.root)
    assert upgrade.upgrade(old.root) == (3 * PER_BATCH, 3)
    assert offsets(open_table(Place.of(old.root))) == list(range(3 * PER_BATCH))


def test_a_merge_that_was_killed_between_its_steps_is_not_counted_twice(old: Old):
    merged = old.file("merge-2.parquet", [*numbers(0), *numbers(1)])
    paths = [f"{FOLDER}/merge-1.parquet", f"{FOLDER}/q-1-0.parquet"]
    for path in paths:
        (old.root / path).unlink()
    old.note("merge-2", kind="merge", old=paths, file=merged, **{"in": "/nowhere"})
    assert upgrade.upgrade(old.root) == (3 * PER_BATCH, 2)


def test_a_delta_archive_keeps_its_log(old: Old, tmp_path: Path):
    """There the list beside the table only had the batches."""
    place = Place.of(tmp_path / "delta")
    table = open_table(place)
    bring(table, 0)
    other = Old(tmp_path / "delta")
    other.add(
        {"fact": {"format": "delta"}}, {"batch": ["q", 0], "end": end_at(100)}, {"batch": ["q", 1], "end": end_at(200)}
    )
    assert upgrade.upgrade(tmp_path / "delta") == (PER_BATCH, 2)
    assert open_table(place).position("q") == tables.Position(1, tables.digest(end_at(200)))


def test_an_iceberg_archive_keeps_its_log(tmp_path: Path):
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    place = Place.of(tmp_path / "iceberg")
    bring(open_table(place, "iceberg"), 0)
    other = Old(tmp_path / "iceberg")
    other.add({"fact": {"format": "iceberg"}}, {"batch": ["q", 0], "end": end_at(100)})
    assert upgrade.upgrade(tmp_path / "iceberg") == (PER_BATCH, 2)
    table = open_table(place)
    assert not bring(table, 0)
    assert bring(table, 1)


def test_what_cannot_be_upgraded_is_said_and_left_as_it_is(old: Old, tmp_path: Path):
    writers = old.root / "_manifest" / "writers"
    writers.mkdir()
    with open(writers / "q.lock", "w") as lock:
        lock.write('{"pid": 7}')
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PipelineError, match="is being written"):
            upgrade.upgrade(old.root)
    gone = old.root / FOLDER / "q-1-0.parquet"
    kept = gone.read_bytes()
    gone.unlink()
    with pytest.raises(PipelineError, match="is not there: restore it"):
        upgrade.upgrade(old.root)
    parquet.write_table(pa.Table.from_batches([rows(numbers(1)[1:])]), gone)
    with pytest.raises(PipelineError, match="holds 39 rows, and 40 were written"):
        upgrade.upgrade(old.root)
    gone.write_bytes(kept)
    assert upgrade.upgrade(old.root) == (3 * PER_BATCH, 3)
    newer = Old(tmp_path / "newer")
    (newer.root / "_manifest" / f"{1:020d}.jsonl").write_text('{"format": 2, "version": 1}\n')
    with pytest.raises(FormatError, match="newer version"):
        upgrade.upgrade(newer.root)


def test_nothing_that_was_archived_is_no_trouble(tmp_path: Path):
    empty = Old(tmp_path / "empty")
    empty.add({"fact": {"format": "parquet"}})
    assert upgrade.upgrade(empty.root) == (0, 0)
    assert bring(open_table(Place.of(empty.root)), 0)


def test_of_several_upgrades_at_once_one_does_it(old: Old):
    """The others wait for its lock, find the work done, and add no commit."""

    def attempt(_: int) -> tuple[int, int] | str:
        try:
            return upgrade.upgrade(old.root)
        except PipelineError as exc:
            return str(exc)

    with open(old.root / "_manifest" / ".lock", "a") as lock, ThreadPoolExecutor(3) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = pool.map(attempt, range(3))
        wait_for_waiters(old.root / "_manifest" / ".lock", 3)
        fcntl.flock(lock, fcntl.LOCK_UN)
        ended = list(running)
    assert ended.count((3 * PER_BATCH, 3)) == 1
    assert sum("another process has upgraded" in str(one) for one in ended) == 2
    assert offsets(open_table(Place.of(old.root))) == list(range(3 * PER_BATCH))
    assert len(list((old.root / "_delta_log").glob("*.json"))) == 2, "made, and filled"


def wait_for_waiters(path: Path, count: int) -> None:
    """Until so many wait for the lock of a file."""
    inode = f":{path.stat().st_ino} "
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        lines = Path("/proc/locks").read_text().splitlines()
        if sum("->" in line and inode in line for line in lines) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"nobody waits for {path}")


def test_a_list_that_was_set_aside_before_is_no_obstacle(old: Old):
    for name in ("_manifest.before-upgrade", "_manifest.before-upgrade-2"):
        (old.root / name).mkdir()
        (old.root / name / "kept").touch()
    assert upgrade.upgrade(old.root) == (3 * PER_BATCH, 3)
    assert (old.root / "_manifest.before-upgrade-3" / "pending").is_dir()
    assert (old.root / "_manifest.before-upgrade" / "kept").exists()
    assert not (old.root / "_manifest").exists()


@pytest.mark.parametrize("name", [f"{5:020d}.jsonl", "pending/q-3.json"])
def test_a_damaged_list_is_said_and_left_as_it_is(old: Old, name: str):
    torn = old.root / "_manifest" / name
    torn.write_text('{"format": 1, "ver')
    before = sorted(old.root.parent.rglob("*"))
    with pytest.raises(PipelineError, match=rf"{torn.name}.* is damaged .*: restore it from a backup"):
        upgrade.upgrade(old.root)
    assert [path for path in sorted(old.root.parent.rglob("*")) if path.name != ".lock"] == before
