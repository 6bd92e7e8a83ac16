"""A store that refuses, fails and loses answers while batches are committed, merged and vacuumed: rows are in once."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import replay
from flintmq.spark.pipelines.replay_notes import Notes
from flintmq.spark.pipelines.tables import DeltaTable, open_table
from flintmq.spark.shipped.files import Place

from . import object_store
from .faulty_store import FaultyStore
from .object_store import Bucket
from .test_tables import PER_BATCH, bring

#: A few tries within seconds, so that faults come through to us.
IMPATIENT = {"max_retries": "2", "retry_timeout": "3s", "timeout": "20s"}
IMPATIENT |= {"backoff_config.init_backoff": "5ms", "backoff_config.max_backoff": "20ms"}
BATCHES = 10


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with object_store.server(tmp_path_factory.mktemp("s3") / "weed") as found:
        yield found


@pytest.fixture
def store(bucket: Bucket) -> Iterator[FaultyStore]:
    found = FaultyStore(bucket.endpoint)
    yield found
    found.close()


def way(bucket: Bucket, store: FaultyStore, path: str) -> tuple[Place, Place]:
    """A place by the way that fails, and by the straight one."""
    faulty = replace(bucket, endpoint=store.endpoint)
    uri = f"{bucket.uri}/{path}"
    return Place.of(uri, faulty.options | IMPATIENT), Place.of(uri, bucket.options)


def offsets(place: Place) -> list[int]:
    import deltalake

    table = deltalake.DeltaTable(place.text, storage_options=dict(place.options))
    return sorted(table.to_pyarrow_table(columns=["offset"])["offset"].to_pylist())


@pytest.mark.parametrize(("share", "seed"), [(0.02, 0), (0.05, 1), (0.1, 2), (0.2, 21)])
def test_each_row_is_in_once_whatever_the_store_answers(bucket: Bucket, store: FaultyStore, share: float, seed: int):
    """Two drivers of one query, each started again when it has failed, and merges and vacuums beside them."""
    faulty, straight = way(bucket, store, f"faults-{seed}")
    store.fail(share, seed=seed)
    unexpected: list[BaseException] = []
    over = threading.Event()

    def drive() -> None:
        batch = failures = 0
        while batch < BATCHES and failures < 500:
            try:
                bring(open_table(faulty), batch)
            except (PipelineError, OSError):
                # An OSError is of a data file: tasks write these, and Spark tries them again.
                failures += 1
            else:
                batch += 1
        assert batch == BATCHES

    def tidy() -> None:
        while not over.wait(0.05):
            try:
                table = open_table(faulty)
                if isinstance(table, DeltaTable) and table.exists:
                    table.compact(1 << 20, datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
                    table.vacuum(3600)
            except PipelineError:
                continue

    def guarded(run: object) -> None:
        try:
            run()  # type: ignore[operator]
        except BaseException as exc:
            unexpected.append(exc)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in (drive, drive, tidy)]
    for thread in threads:
        thread.start()
    for thread in threads[:2]:
        thread.join()
    over.set()
    threads[2].join()
    store.work()
    assert not unexpected, unexpected
    assert offsets(straight) == list(range(BATCHES * PER_BATCH))
    assert store.happened() > 0


def test_a_commit_whose_answer_is_lost_is_found_and_not_made_again(bucket: Bucket, store: FaultyStore):
    for fault in ("done-500", "done-503", "lost"):
        faulty, straight = way(bucket, store, f"answers-{fault}")
        bring(open_table(faulty), 0)
        table = open_table(faulty)
        store.fail(1.0, fault, method="PUT", part="_delta_log")
        try:
            assert bring(table, 1)
        finally:
            store.work()
        assert store.happened(fault)
        assert offsets(straight) == list(range(2 * PER_BATCH))
        assert not bring(open_table(faulty), 1)


def test_notes_of_a_replay_whose_answers_are_lost_are_found(bucket: Bucket, store: FaultyStore):
    faulty, _ = way(bucket, store, "notes")
    notes = Notes(faulty, {})
    notes.begin(lambda: [replay.Chunk(1, {})] * 5)
    store.fail(1.0, "done-500", method="PUT", part="_delta_log")
    try:
        for done in range(4):
            notes.begun(done + 1)
            notes.finished(done + 1)
    finally:
        store.work()
    again = Notes(faulty, {})
    again.begin(list)
    assert (again.done, again.name) == (4, notes.name)


def test_a_store_that_is_not_there_is_told_soon(tmp_path: Path, bucket: Bucket):
    """And not after the minutes that a store's library would try for."""
    import time

    from support.ports import held_port

    gone = replace(bucket, endpoint=f"http://127.0.0.1:{held_port()}")
    started = time.monotonic()
    with pytest.raises(PipelineError, match=r"cannot be (read|opened)"):
        open_table(Place.of(f"{bucket.uri}/x", gone.options))
    assert time.monotonic() - started < 60
