"""The archive's folder under kill -9 at every file operation, with many writers at once, and as plain readers see it.

No Spark here: batches are written with pyarrow, by processes of their own that end themselves at the chosen moment.
"""

from __future__ import annotations

import datetime
import json
import os
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from flintmq.errors import FormatError, PipelineError  # noqa: E402
from flintmq.spark.pipelines import store  # noqa: E402
from flintmq.spark.pipelines.store import Archive, DataFile, Manifest, hour_of, local_path  # noqa: E402

#: The beginning of an hour, ns.
HOUR = 1_794_794_400_000_000_000
FOLDERS = ("topic=orders/date=2026-11-16/hour=02", "topic=orders/date=2026-11-16/hour=03")
LATER = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
PER_BATCH = 40


def write_batch(staged: Path, batch: int, files: int = 2) -> None:
    """What Spark would write: a batch's messages in some files, over two hours."""
    offsets = range(batch * PER_BATCH, (batch + 1) * PER_BATCH)
    for number in range(files):
        mine = [offset for offset in offsets if offset % files == number]
        folder = staged / FOLDERS[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        times = [HOUR + (number % 2) * 3_600_000_000_000 + offset for offset in mine]
        table = pa.table({"offset": pa.array(mine, pa.int64()), "timestamp_ns": pa.array(times, pa.int64())})
        parquet.write_table(table, folder / f"part-{number}-{os.getpid()}.parquet")
    (staged / "_SUCCESS").touch()


def do_batch(archive: Archive, batch: int, files: int = 2, query: str = "q") -> bool:
    staged = archive.begin(query, batch)
    if staged is None:
        return False
    write_batch(staged, batch, files)
    archive.commit(query, batch, staged)
    return True


def offsets(paths: list[Path]) -> list[int]:
    return [offset for path in paths for offset in parquet.read_table(path, columns=["offset"])["offset"].to_pylist()]


def by_manifest(root: Path) -> list[int]:
    return sorted(offsets([root / path for path in Archive(root).snapshot().files]))


def by_listing(root: Path) -> list[int]:
    """What one finds who knows nothing of us and takes every Parquet file there is."""
    return sorted(offsets(list(root.rglob("*.parquet"))))


# --- Ordinary life ----------------------------------------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    made = Archive(tmp_path / "archive")
    made.prepare()
    yield made
    made.close()


def test_batches_come_in_under_names_of_query_and_batch(archive: Archive):
    assert do_batch(archive, 0)
    assert do_batch(archive, 1, files=3)
    assert by_manifest(archive.root) == by_listing(archive.root) == list(range(2 * PER_BATCH))
    names = sorted(path.relative_to(archive.root).as_posix() for path in archive.root.rglob("*.parquet"))
    assert f"{FOLDERS[0]}/q-0000000000-0000.parquet" in names
    assert f"{FOLDERS[1]}/q-0000000001-0002.parquet" in names
    assert list(archive.staging.iterdir()) == []


def test_a_replayed_batch_changes_nothing_whatever_files_it_would_have(archive: Archive):
    do_batch(archive, 0)
    version = archive.snapshot().version
    assert not do_batch(archive, 0, files=5)
    assert archive.snapshot().version == version
    assert by_listing(archive.root) == list(range(PER_BATCH))


def test_the_manifest_knows_rows_bytes_and_times(archive: Archive):
    do_batch(archive, 0)
    file = archive.snapshot().files[f"{FOLDERS[0]}/q-0000000000-0000.parquet"]
    assert file.rows == PER_BATCH // 2
    assert file.bytes == (archive.root / file.path).stat().st_size
    assert (file.oldest, file.newest) == (HOUR, HOUR + 38)
    assert file.partition == {"topic": "orders", "date": "2026-11-16", "hour": "02"}
    assert hour_of(file) == datetime.datetime(2026, 11, 16, 2, tzinfo=datetime.UTC)


def test_a_batch_without_rows_is_remembered_too(archive: Archive):
    staged = archive.begin("q", 0)
    assert staged is not None
    staged.mkdir()
    archive.commit("q", 0, staged)
    assert archive.begin("q", 0) is None


def test_small_files_of_closed_hours_are_merged(archive: Archive):
    for batch in range(5):
        do_batch(archive, batch)
    only_first = datetime.datetime(2026, 11, 16, 3, 30, tzinfo=datetime.UTC)
    assert archive.merge(1 << 20, only_first) == (5, 1)
    assert archive.merge(1 << 20, LATER) == (5, 1)
    assert archive.merge(1 << 20, LATER) == (0, 0)
    assert by_manifest(archive.root) == by_listing(archive.root) == list(range(5 * PER_BATCH))
    assert len(archive.snapshot().files) == 2
    assert not do_batch(archive, 4)
    assert do_batch(archive, 5)
    assert by_manifest(archive.root) == by_listing(archive.root) == list(range(6 * PER_BATCH))


def test_files_with_other_columns_are_not_merged_with_the_rest(archive: Archive):
    do_batch(archive, 0)
    do_batch(archive, 1)
    staged = archive.begin("q", 2)
    assert staged is not None
    folder = staged / FOLDERS[0]
    folder.mkdir(parents=True)
    parquet.write_table(pa.table({"offset": [1000], "data": ["x"]}), folder / "part.parquet")
    archive.commit("q", 2, staged)
    assert archive.merge(1 << 20, LATER) == (4, 2)
    assert by_listing(archive.root) == [*range(2 * PER_BATCH), 1000]


def test_without_an_exchange_of_folders_merging_still_works(archive: Archive, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_exchange_folders", lambda one, other: False)
    for batch in range(3):
        do_batch(archive, batch)
    assert archive.merge(1 << 20, LATER) == (6, 2)
    assert by_manifest(archive.root) == by_listing(archive.root) == list(range(3 * PER_BATCH))


def test_a_long_history_is_read_from_its_last_full_version(archive: Archive, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_FULL_EVERY", 5)
    manifest = Manifest(archive.root)
    files = [DataFile(f"{FOLDERS[0]}/{number}.parquet", 1, 10) for number in range(23)]
    for number, file in enumerate(files):
        manifest.commit("q", number, [file])
    manifest.swap([files[0].path], [DataFile(f"{FOLDERS[0]}/merged.parquet", 1, 10)])
    found = manifest.snapshot()
    assert found.version == 24
    assert found.batches == {"q": 22}
    assert set(found.files) == {*(file.path for file in files[1:]), f"{FOLDERS[0]}/merged.parquet"}
    # What only old readers would need is gone, and one full version before the last is kept for those who just read it.
    kept = sorted(path.name for path in (archive.root / "_manifest").glob("*.jsonl"))
    assert kept[0] == f"{15:020d}.full.jsonl"
    assert len(kept) == 12


def test_two_writers_at_once_lose_nothing(archive: Archive):
    def work(query: str, base: int) -> None:
        for batch in range(8):
            mine = Archive(archive.root)
            staged = mine.begin(query, batch)
            assert staged is not None
            folder = staged / FOLDERS[0]
            folder.mkdir(parents=True)
            parquet.write_table(pa.table({"offset": [base + batch]}), folder / "part.parquet")
            mine.commit(query, batch, staged)
            mine.close()

    threads = [threading.Thread(target=work, args=(f"q{number}", number * 100)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        archive.merge(1 << 20, LATER)
    for thread in threads:
        thread.join()
    expected = sorted(number * 100 + batch for number in range(4) for batch in range(8))
    assert by_manifest(archive.root) == by_listing(archive.root) == expected


def test_readers_during_merges_never_see_a_message_twice_or_not_at_all(archive: Archive):
    """A listing of one hour finds each message once, however often folders are swapped meanwhile."""
    folder = archive.root / FOLDERS[0]
    do_batch(archive, 0)
    done = threading.Event()
    wrong: list[object] = []

    def watch() -> None:
        while not done.is_set():
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                # One folder, as it was at one moment: its files can be opened although it was swapped since.
                names = sorted(os.listdir(descriptor))
                batches = Counter()
                for name in names:
                    with open(os.open(name, os.O_RDONLY, dir_fd=descriptor), "rb") as file:
                        batches.update(offset // PER_BATCH for offset in parquet.read_table(file)["offset"].to_pylist())
            except FileNotFoundError:
                continue  # removed between listing and opening: seen by the reader, and no wrong answer
            finally:
                os.close(descriptor)
            if set(batches.values()) != {PER_BATCH // 2} or sorted(batches) != list(range(len(batches))):
                wrong.append((names, batches))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for batch in range(1, 7):
            do_batch(archive, batch)
            archive.merge(1 << 20, LATER)
    finally:
        done.set()
        watcher.join()
    assert wrong == []


# --- Kill -9 ----------------------------------------------------------------------------------------------------------

#: Children that end themselves before the n-th file operation of what they are asked to do, for n = 0, 1, … until one
#: comes to its end. Forked, so that pyarrow is imported once; the parent never uses it, and so has no threads.
KILLED = """
import itertools, os, shutil, signal, sys
from pathlib import Path
from spark import test_store
from flintmq.spark.pipelines import store

# What was written before a kill survives it either way.
os.fsync = lambda descriptor: None

def prepare(root):
    archive = store.Archive(root)
    archive.prepare()
    for batch in range(2):
        test_store.do_batch(archive, batch)
    archive.close()

def work(root, moment):
    archive = store.Archive(root)
    archive.prepare()
    left = moment
    def deadly(function):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return call
    for name in ("link", "rename", "replace", "unlink", "mkdir", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))
    way = store._exchange_folders if sys.argv[3] == "exchange" else lambda one, other: False
    store._exchange_folders = deadly(way)
    if sys.argv[2] == "batch":
        test_store.do_batch(archive, 2, files=3)
    else:
        archive.merge(1 << 20, test_store.LATER)

def in_child(function, *arguments):
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

first = Path(sys.argv[1]) / "first"
if status := in_child(prepare, first):
    sys.exit(status)
for moment in itertools.count():
    root = Path(sys.argv[1]) / str(moment) / "archive"
    shutil.copytree(first, root)
    status = in_child(work, root, moment)
    if status != -signal.SIGKILL:
        sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", ["batch exchange", "merge exchange", "merge renames"])
def test_a_kill_before_any_file_operation_costs_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
):
    task, way = work.split()
    python_path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
    command = [sys.executable, "-c", KILLED, str(tmp_path), task, way]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": python_path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    roots = sorted(tmp_path.glob("*/archive"))
    assert len(roots) > 8
    before = list(range(2 * PER_BATCH))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for root in roots:
        # As the kill left it: a batch may be there in part, but nothing is there twice and no file is half.
        seen = Counter(by_listing(root))
        assert set(seen.values()) == {1}
        if task == "batch":
            assert set(before) <= set(seen) <= set(range(3 * PER_BATCH))
            assert by_manifest(root) in (before, list(range(3 * PER_BATCH)))
        else:
            hours = {offset % 2 for offset in before if offset not in seen}
            # With two renames in the place of an exchange an hour may be away, until somebody finishes that.
            assert not hours or (way == "renames" and len(hours) == 1)
            if not hours:
                assert by_manifest(root) == before

        # Whoever comes next finishes it, with other files for the same batch.
        again = Archive(root)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_LITTER_SECONDS", -1)
            again.prepare()
        do_batch(again, 2, files=4)
        again.merge(1 << 20, LATER)
        again.close()
        assert by_manifest(root) == by_listing(root) == list(range(3 * PER_BATCH))
        assert list(again.staging.iterdir()) == []
        assert list((root / "_manifest" / "pending").iterdir()) == []
        assert [path.name for path in (root / "_manifest").glob(".*")] == [".lock"]


# --- Power ------------------------------------------------------------------------------------------------------------


class Device:
    """Which files are on the device, as far as they were synced, and of which folders the names are.

    A note in ``pending``, and a version of the manifest, promise that all they name is there: who writes one is asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, archive: Archive) -> None:
        self.archive = archive
        self.notes = self.versions = 0
        self._synced: set[int] = set()
        # The names of a folder, when it was last synced.
        self._names: dict[int, set[str]] = {}
        for name in ("fsync", "replace", "link"):
            monkeypatch.setattr(os, name, getattr(self, name)(getattr(os, name)))

    def fsync(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            original(descriptor)
            found = os.fstat(descriptor)
            self._synced.add(found.st_ino)
            if stat.S_ISDIR(found.st_mode):
                self._names[found.st_ino] = set(os.listdir(descriptor))

        return call

    def replace(self, original: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def call(partial: Path, path: Path) -> None:
            self.is_safe(partial, named=False)
            todo = json.loads(partial.read_text())
            folder = Path(todo["in"])
            sources = [Path(move["from"]) for move in todo.get("moves", ())]
            for source in sources or [folder / os.path.basename(todo["file"]["path"])]:
                self.is_safe(source, self.archive.staging)
            self.notes += 1
            original(partial, path)

        return call

    def link(self, original: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def call(one: Path, other: Path) -> None:
            if other.suffix == ".jsonl":
                self.is_safe(one, named=False)
                for line in map(json.loads, one.read_text().splitlines()):
                    if "add" in line:
                        self.is_safe(self.archive.root / line["add"]["path"], self.archive.root)
                        self.versions += 1
            original(one, other)

        return call

    def is_safe(self, path: Path, root: Path | None = None, *, named: bool = True) -> None:
        assert path.stat().st_ino in self._synced, f"{path} is not on the device"
        while named and path != root:
            assert path.name in self._names.get(path.parent.stat().st_ino, ()), f"the name of {path} is not"
            path = path.parent


def test_what_notes_and_versions_name_is_on_the_device(archive: Archive, monkeypatch: pytest.MonkeyPatch):
    device = Device(monkeypatch, archive)
    for batch in range(3):
        do_batch(archive, batch, files=3)
    archive.merge(1 << 20, LATER)
    do_batch(archive, 3)
    # Two hours were merged.
    assert device.notes == 4 + 2
    assert device.versions == 3 * 3 + 2 + 2
    assert by_manifest(archive.root) == list(range(4 * PER_BATCH))


# --- What is refused --------------------------------------------------------------------------------------------------


def test_a_newer_format_is_refused(archive: Archive):
    line = json.dumps({"format": 99, "version": 1})
    (archive.root / "_manifest" / f"{1:020d}.jsonl").write_text(line + "\n")
    with pytest.raises(FormatError, match="newer"):
        archive.snapshot()


def test_what_is_no_archive_is_said_to_be_none(tmp_path: Path):
    with pytest.raises(PipelineError, match="not an archive"):
        Archive(tmp_path).snapshot()


def test_an_archive_in_a_place_that_cannot_be_written_says_so(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(PipelineError, match="cannot make the archive"):
        Archive(tmp_path / "file" / "archive").prepare()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system at /dev/shm")
def test_staging_on_another_file_system_is_refused(tmp_path: Path):
    with pytest.raises(PipelineError, match="different file systems"):
        Archive(tmp_path / "archive", staging=f"/dev/shm/flintmq-test-{os.getpid()}").prepare()
    os.rmdir(f"/dev/shm/flintmq-test-{os.getpid()}")


def test_only_paths_of_file_systems_are_taken():
    assert local_path("file:///a/b%20c") == Path("/a/b c")
    with pytest.raises(PipelineError, match="s3://bucket"):
        local_path("s3://bucket/x")
