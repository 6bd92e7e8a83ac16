"""An archive that two processes write: one at a time, nothing of a living writer deleted, no batch taken for another.

No Spark here. Writers are processes of their own, which can be stopped, continued and killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from flintmq.errors import PipelineError  # noqa: E402
from flintmq.spark.pipelines import store  # noqa: E402
from flintmq.spark.pipelines.archive import open_archive  # noqa: E402
from flintmq.spark.pipelines.store import Archive, Manifest  # noqa: E402

from .test_store import LATER, PER_BATCH, by_listing, by_manifest, do_batch, write_batch  # noqa: E402

#: Writes batch 0 to a staging folder, says so, and commits it when it is told to go on.
WRITER = """
import sys
from pathlib import Path
from spark import test_store
from flintmq.errors import PipelineError
from flintmq.spark.pipelines.store import Archive

archive = Archive(sys.argv[1])
archive.prepare()
for line in sys.stdin:
    try:
        if line == "begin\\n":
            staged = archive.begin("q", 0)
            test_store.write_batch(staged, 0)
            print("begun", flush=True)
        else:
            archive.commit("q", 0, staged)
            print("committed", flush=True)
    except PipelineError as exc:
        print("refused", exc, flush=True)
"""


class Writer:
    """A process that writes batch 0 of query q."""

    def __init__(self, root: Path) -> None:
        python_path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root)],
            env={**os.environ, "PYTHONPATH": python_path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def writer(root: Path) -> Iterator[Writer]:
    made = Writer(root)
    yield made
    made.end()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    from flintmq.spark.pipelines import writer_lock

    monkeypatch.setattr(writer_lock, "_LOCK_PATIENCE", 0.0)


# --- Two writers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [False, True], ids=["busy", "suspended"])
def test_a_second_writer_is_refused_and_deletes_nothing(root: Path, writer: Writer, impatient, stopped: bool):
    writer.tell("begin")
    assert writer.answer() == "begun"
    if stopped:
        writer.process.send_signal(signal.SIGSTOP)
    second = Archive(root)
    second.prepare()
    with pytest.raises(
        PipelineError, match=rf"another process \(pid {writer.process.pid} on .*stop that one"
    ) as caught:
        do_batch(second, 0, files=3)
    assert "\n" not in str(caught.value)
    if stopped:
        writer.process.send_signal(signal.SIGCONT)
    writer.tell("commit")
    assert writer.answer() == "committed"
    assert by_manifest(root) == by_listing(root) == list(range(PER_BATCH))


def test_a_writer_that_was_killed_blocks_nobody(root: Path, writer: Writer, impatient):
    writer.tell("begin")
    assert writer.answer() == "begun"
    writer.process.kill()
    writer.process.wait(60)
    second = Archive(root)
    second.prepare()
    assert do_batch(second, 0, files=3)
    assert do_batch(second, 1)
    second.close()
    assert by_manifest(root) == by_listing(root) == list(range(2 * PER_BATCH))
    assert list(second.staging.iterdir()) == []
    assert list((root / "_manifest" / "writers").iterdir()) == []


def test_a_writer_that_ends_is_waited_for(root: Path, writer: Writer):
    writer.tell("begin")
    assert writer.answer() == "begun"
    started = time.monotonic()
    writer.process.send_signal(signal.SIGTERM)
    second = Archive(root)
    second.prepare()
    assert do_batch(second, 0)
    assert time.monotonic() - started < 15
    second.close()


def test_a_suspended_writer_whose_lock_was_taken_away_adds_nothing(root: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a network file system that gives up the locks of a machine it does not hear of."""
    zombie = Archive(root)
    zombie.prepare()
    staged = zombie.begin("q", 0)
    assert staged is not None
    write_batch(staged, 0)
    monkeypatch.setattr(store.WriterLock, "acquire", lambda self: None)
    second = Archive(root)
    second.prepare()
    staged_again = second.begin("q", 0)
    assert staged_again is not None
    write_batch(staged_again, 0, files=5)
    write_batch(staged, 0)
    with pytest.raises(PipelineError, match="another process has become the writer"):
        zombie.commit("q", 0, staged)
    second.commit("q", 0, staged_again)
    with pytest.raises(PipelineError, match="another process has become the writer"):
        zombie.commit("q", 0, staged)
    assert by_manifest(root) == by_listing(root) == list(range(PER_BATCH))


def test_queries_do_not_lock_each_other_out(root: Path, impatient):
    one, other = Archive(root), Archive(root)
    one.prepare()
    other.prepare()
    assert do_batch(one, 0, query="one")
    assert do_batch(other, 0, query="other")
    assert do_batch(one, 1, query="one")
    with pytest.raises(PipelineError, match="another process"):
        other.begin("one", 2)
    one.close()
    assert do_batch(other, 2, query="one")
    other.close()


def test_files_of_a_merge_that_goes_on_for_long_are_not_swept(root: Path, monkeypatch: pytest.MonkeyPatch):
    archive = Archive(root)
    archive.prepare()
    for batch in range(3):
        do_batch(archive, batch)
    monkeypatch.setattr(store, "_LITTER_SECONDS", -1)
    concatenate = store._concatenate

    def slow(sources: list[Path], target: Path) -> None:
        concatenate(sources, target)
        Archive(root).prepare()

    monkeypatch.setattr(store, "_concatenate", slow)
    assert archive.merge(1 << 20, LATER) == (6, 2)
    archive.close()
    assert by_manifest(root) == by_listing(root) == list(range(3 * PER_BATCH))


# --- Rows that are missing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_whose_files_hold_other_than_was_written_is_not_added(root: Path, seed: int):
    chosen = random.Random(seed)
    archive = Archive(root)
    archive.prepare()
    assert do_batch(archive, 0)
    staged = archive.begin("q", 1)
    assert staged is not None
    write_batch(staged, 1, files=chosen.randint(2, 7))
    gone = chosen.choice(sorted(staged.rglob("*.parquet")))
    missing = parquet.read_metadata(gone).num_rows
    gone.unlink()
    sentence = f"Spark wrote {PER_BATCH} rows in batch 1 and the files in .* hold {PER_BATCH - missing}"
    with pytest.raises(PipelineError, match=sentence):
        archive.commit("q", 1, staged, rows=PER_BATCH)
    assert by_manifest(root) == by_listing(root) == list(range(PER_BATCH))
    assert do_batch(archive, 1)
    archive.close()
    assert by_manifest(root) == by_listing(root) == list(range(2 * PER_BATCH))


def test_a_decided_batch_whose_files_were_deleted_is_told(root: Path, monkeypatch: pytest.MonkeyPatch):
    archive = Archive(root)
    archive.prepare()
    staged = archive.begin("q", 0)
    assert staged is not None
    write_batch(staged, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Archive, "_finish", lambda self, note: [])
        archive.commit("q", 0, staged)
    archive.close()
    next(staged.rglob("*.parquet")).unlink()
    with pytest.raises(PipelineError, match="was deleted before it came into"):
        Archive(root).prepare()
    assert by_manifest(root) == by_listing(root) == []


# --- A checkpoint that goes back --------------------------------------------------------------------------------------


def end_at(offset: int) -> list[str]:
    """The end of a batch, as the source writes it into a checkpoint."""
    return [json.dumps({"v": 1, "mode": "log", "p": {"orders": {"ab": {"e": "ee", "o": offset}}}})]


def bring(archive: Archive, batch: int, end: list[str] | None) -> bool:
    staged = archive.begin("q", batch, end)
    if staged is None:
        return False
    write_batch(staged, batch)
    archive.commit("q", batch, staged, end=end, rows=PER_BATCH)
    return True


@pytest.fixture
def archive(root: Path) -> Iterator[Archive]:
    made = Archive(root)
    made.prepare()
    yield made
    made.close()


def test_a_batch_number_that_comes_again_with_another_end_stops(archive: Archive):
    for batch in range(3):
        assert bring(archive, batch, end_at(100 * (batch + 1)))
    assert not bring(archive, 2, end_at(300))
    assert not bring(archive, 1, end_at(200))
    version = archive.snapshot().version
    for batch, end in ((2, 350), (2, 250), (1, 300), (0, 1)):
        with pytest.raises(PipelineError, match="the checkpoint has gone back") as caught:
            bring(archive, batch, end_at(end))
        assert "--new-query" in str(caught.value)
        assert """--from '{"orders":{"ab":300}}'""" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert archive.snapshot().version == version
    assert bring(archive, 3, end_at(400))


def test_batches_that_are_missing_in_the_archive_stop_it(archive: Archive):
    for batch in range(3):
        assert bring(archive, batch, end_at(100 * (batch + 1)))
    with pytest.raises(PipelineError, match="ends with batch 2 of this query, and Spark goes on with batch 5"):
        bring(archive, 5, end_at(600))
    assert bring(archive, 3, end_at(400))


def test_batches_that_are_missing_stop_a_delta_table_too(root: Path):
    pytest.importorskip("deltalake")
    archive = open_archive(root, format="delta")
    archive.prepare()
    try:
        assert bring(archive, 0, end_at(100))
        assert archive.begin("q", 1, end_at(100)) is not None
        staged = archive.staging / "empty"
        staged.mkdir(parents=True)
        archive.commit("q", 1, staged, end=end_at(100), rows=0)
        with pytest.raises(PipelineError, match="ends with batch 1 of this query, and Spark goes on with batch 3"):
            bring(archive, 3, end_at(400))
        assert not bring(archive, 1, end_at(100)), "an empty batch that is repeated"
        with pytest.raises(PipelineError, match="the checkpoint has gone back"):
            bring(archive, 1, end_at(250))
        assert bring(archive, 2, end_at(300))
    finally:
        archive.close()


def test_ends_survive_full_versions_and_old_ones_are_dropped(archive: Archive, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_FULL_EVERY", 7)
    monkeypatch.setattr(store, "_KEPT_ENDS", 10)
    for batch in range(30):
        archive.manifest.commit("q", batch, [], end_at(batch))
    known = Manifest(archive.root).snapshot().ends["q"]
    assert known == {batch: end_at(batch) for batch in range(20, 30)}
    assert not bring(archive, 20, end_at(20))
    with pytest.raises(PipelineError, match="gone back"):
        bring(archive, 19, end_at(19))


def test_an_archive_of_0_1_0_goes_on(archive: Archive):
    """It knows the number of its last batch, and not where that ended."""
    archive.manifest.commit("q", 4, [])
    assert not bring(archive, 4, end_at(500))
    assert not bring(archive, 3, end_at(400))
    assert bring(archive, 5, end_at(600))
    assert not bring(archive, 5, end_at(600))
    with pytest.raises(PipelineError, match="gone back"):
        bring(archive, 5, end_at(700))


def test_a_reader_of_0_1_0_understands_the_lines(archive: Archive):
    bring(archive, 0, end_at(100))
    lines = [
        json.loads(line)
        for path in sorted((archive.root / "_manifest").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert [line["batch"] for line in lines if "batch" in line] == [["q", -1], ["q", 0]]
    assert {key for line in lines for key in line} <= {"format", "version", "made", "add", "batch", "end", "writer"}


def test_another_table_keeps_the_files_and_the_manifest_the_ends(root: Path):
    class Other:
        """A table that keeps what it is told in memory."""

        def __init__(self) -> None:
            self.batches: dict[str, int] = {}
            self.files: list[str] = []

        def last_batch(self, query: str) -> int:
            return self.batches.get(query, -1)

        def commit(self, query: str, batch: int, files: list[store.DataFile]) -> None:
            self.batches[query] = batch
            self.files += [file.path for file in files]

        def live(self) -> list[str]:
            return self.files

    archive = Archive(root, table=Other())
    archive.prepare()
    assert bring(archive, 0, end_at(100))
    assert not bring(archive, 0, end_at(100))
    with pytest.raises(PipelineError, match="gone back"):
        bring(archive, 0, end_at(101))
    with pytest.raises(PipelineError, match="the batches between are missing"):
        bring(archive, 7, end_at(700))
    assert bring(archive, 1, end_at(200))
    archive.close()
    assert archive.snapshot().files == {}
    assert by_listing(root) == list(range(2 * PER_BATCH))
