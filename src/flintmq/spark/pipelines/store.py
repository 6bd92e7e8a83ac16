"""An archive's folder: complete files only, each batch once, and a list of the files that are live.

    ROOT/topic=orders/date=2026-11-16/hour=02/3f1c…-0000000007-0000.parquet     named by query, batch and number
    ROOT/_manifest/00000000000000000012.jsonl                                   what version 12 changed
    ROOT/_manifest/00000000000000000010.full.jsonl                              all that was live at version 10
    ROOT/_manifest/pending/…                                                    what was begun and must be finished
    ROOT/_manifest/writers/3f1c….lock                                           held by the process that writes a query
    .ROOT.staging/…                                                             files that are still being written

How a batch gets in, and why a kill at any moment does no harm:

 1  Spark writes its files to a staging folder beside the archive, where no reader looks.
 2  A pending note lists them with their final names. From here on the batch is decided: its files are
    complete, and they will become part of the archive. Without the note the batch is written again.
 3  Each file is renamed to its place.
 4  A new version of the manifest names them, and the batch; then the note goes.

The next writer, after a kill or not, first finishes what is pending. A batch that the manifest has is not written
again, so that a batch replayed by Spark changes nothing, whatever files it would have made this time. The manifest
keeps the end offsets of the newest batches: a batch number that comes again with other end offsets is other data, from
a checkpoint that has gone back, and stops the writer.

One process at a time writes the batches of a query. It holds a file lock for its lifetime, which the system frees when
the process ends, however it ends. The manifest names the writer too, and a batch is only decided by the one that it
names: a process that was suspended for so long that a network file system took its lock away adds nothing.

Merging small files swaps a whole hour's folder in one step (where the system can exchange two folders, as Linux can),
so that a reader who lists it finds the old files or the new one, never both.

This module knows files, not Spark. Only the standard library and pyarrow, so that it can be shipped to a Spark Connect
server.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import fcntl
import json
import os
import secrets
import shutil
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flintmq.errors import FormatError, PipelineError
from flintmq.spark.pipelines.writer_lock import WriterLock, is_locked

__all__ = ["Archive", "DataFile", "Manifest", "Snapshot", "Table", "hour_of", "local_path"]

_FORMAT = 1
#: Every so many versions the whole list is written, so that readers need not begin at version 1.
_FULL_EVERY = 50
_HOUR = datetime.timedelta(hours=1)
#: Of a merged file; also what merging takes of memory.
_ROW_GROUP_BYTES = 64 << 20
#: Nothing that is half done and still wanted is so old.
_LITTER_SECONDS = 6 * 3600
#: Readers of partitioned folders pass over names that begin like this.
_MANIFEST = "_manifest"
#: In a staging folder: held by the process that fills it.
_STAGED_LOCK = ".lock"
#: Batches of a query whose end offsets are kept. Spark keeps 100 in its checkpoint, so no older one comes again.
_KEPT_ENDS = 128


@dataclass(frozen=True)
class DataFile:
    """One live file."""

    #: Below the root.
    path: str
    rows: int
    bytes: int
    #: The oldest and the newest message in it, ns since 1970; None where the file does not say.
    oldest: int | None = None
    newest: int | None = None

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path)

    @property
    def partition(self) -> dict[str, str]:
        """What the names of its folders say: topic, date, hour."""
        parts = (part.partition("=") for part in self.folder.split("/") if "=" in part)
        return {key: urllib.parse.unquote(value) for key, _, value in parts}


@dataclass
class Snapshot:
    """What was live at one version."""

    version: int = 0
    files: dict[str, DataFile] = field(default_factory=dict)
    #: The last batch of each query that is in; -1 for a query that has begun and has none yet.
    batches: dict[str, int] = field(default_factory=dict)
    #: The end offsets of its newest batches, one text for each source. Batches of 0.1.0 have none.
    ends: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    #: The token of the process that writes a query.
    writers: dict[str, str] = field(default_factory=dict)
    #: What else is remembered, such as an inferred schema.
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files.values())

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def copy(self) -> Snapshot:
        ends = {query: dict(known) for query, known in self.ends.items()}
        return Snapshot(self.version, dict(self.files), dict(self.batches), ends, dict(self.writers), dict(self.facts))

    def apply(self, lines: Iterable[str]) -> None:
        for line in lines:
            change = json.loads(line)
            if "add" in change:
                file = DataFile(**change["add"])
                self.files[file.path] = file
            elif "remove" in change:
                self.files.pop(change["remove"], None)
            elif "batch" in change:
                query, batch = change["batch"]
                self.batches[query] = max(batch, self.batches.get(query, -1))
                if "end" in change:
                    known = self.ends.setdefault(query, {})
                    known[batch] = change["end"]
                    for old in sorted(known)[:-_KEPT_ENDS]:
                        del known[old]
            elif "writer" in change:
                self.writers.update(change["writer"])
            elif "fact" in change:
                self.facts.update(change["fact"])
            elif "format" in change:
                if change["format"] > _FORMAT:
                    raise FormatError(
                        f"the manifest is of a newer version ({change['format']}) than this program knows"
                    )
                self.version = change["version"]

    def lines(self) -> list[str]:
        """All of it, as `apply` reads it."""
        changes: list[dict[str, Any]] = [{"add": asdict(file)} for file in self.files.values()]
        changes += [{"batch": list(item)} for item in self.batches.items()]
        for query, known in self.ends.items():
            changes += [{"batch": [query, batch], "end": end} for batch, end in sorted(known.items())]
        changes += [{"writer": self.writers}] if self.writers else []
        changes += [{"fact": self.facts}] if self.facts else []
        return [json.dumps(change) for change in changes]


class Table(Protocol):
    """Who keeps the list of live files: our manifest, or a lakehouse format's own log."""

    def last_batch(self, query: str) -> int:
        """The last batch of a query that is in; -1 if none."""

    def commit(self, query: str, batch: int, files: list[DataFile]) -> None:
        """Make the files of a batch live, all at once, and remember the batch with them."""

    def live(self) -> list[str]:
        """The paths of all live files, below the root."""


class Manifest:
    """The versions in `_manifest`. A version is a file that is created, never changed."""

    def __init__(self, root: Path) -> None:
        self._folder = root / _MANIFEST
        # The last one that was read: the next begins there.
        self._known = Snapshot()

    def snapshot(self) -> Snapshot:
        """What is live now."""
        if not (self._folder / _version_name(self._known.version)).exists():
            # Nothing is known yet, or what is known is so old that its version was removed.
            self._known = Snapshot()
            full = sorted(self._folder.glob("*.full.jsonl"))
            if full:
                self._known.apply(full[-1].read_text().splitlines())
        while True:
            try:
                text = (self._folder / _version_name(self._known.version + 1)).read_text()
            except FileNotFoundError:
                return self._known.copy()
            self._known.apply(text.splitlines())

    def last_batch(self, query: str) -> int:
        return self.snapshot().batches.get(query, -1)

    def commit(self, query: str, batch: int, files: list[DataFile], end: list[str] | None = None) -> None:
        def changes(snapshot: Snapshot) -> list[dict[str, Any]] | None:
            if snapshot.batches.get(query, -1) >= batch:
                return None
            return [*({"add": asdict(file)} for file in files), _batch_line(query, batch, end)]

        self.change(changes)

    def note_end(self, query: str, batch: int, end: list[str] | None) -> None:
        """Remember the end offsets of a batch whose files another table keeps."""

        def changes(snapshot: Snapshot) -> list[dict[str, Any]] | None:
            return None if snapshot.batches.get(query, -1) >= batch else [_batch_line(query, batch, end)]

        self.change(changes)

    def claim(self, query: str, token: str) -> None:
        """Name the process that writes a query from now on."""

        def changes(snapshot: Snapshot) -> list[dict[str, Any]] | None:
            lines: list[dict[str, Any]] = [{"writer": {query: token}}]
            return lines if query in snapshot.batches else [*lines, _batch_line(query, -1, None)]

        self.change(changes)

    def live(self) -> list[str]:
        return list(self.snapshot().files)

    def swap(self, old: Iterable[str], new: list[DataFile]) -> None:
        """Replace files by others that hold the same rows."""

        def changes(snapshot: Snapshot) -> list[dict[str, Any]] | None:
            if all(file.path in snapshot.files for file in new):
                return None
            return [*({"remove": path} for path in old), *({"add": asdict(file)} for file in new)]

        self.change(changes)

    def remember(self, key: str, value: Any) -> Any:
        """Keep a fact, unless there is one of this name already; the one that is kept."""

        def changes(snapshot: Snapshot) -> list[dict[str, Any]] | None:
            return None if key in snapshot.facts else [{"fact": {key: value}}]

        return self.change(changes).facts[key]

    def change(self, changes: Callable[[Snapshot], list[dict[str, Any]] | None]) -> Snapshot:
        """Make the next version out of the last one, as often as somebody else is faster. None is: nothing to do."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            snapshot = self.snapshot()
            made = changes(snapshot)
            if made is None:
                return snapshot
            version = snapshot.version + 1
            head = {"format": _FORMAT, "version": version, "made": round(time.time(), 3)}
            lines = [json.dumps(line) for line in (head, *made)]
            if _create(self._folder / _version_name(version), "\n".join(lines) + "\n"):
                snapshot.apply(lines)
                if version % _FULL_EVERY == 0:
                    self._write_full(snapshot, json.dumps(head))
                return snapshot

    def _write_full(self, snapshot: Snapshot, head: str) -> None:
        older = sorted(self._folder.glob("*.full.jsonl"))
        name = _version_name(snapshot.version).removesuffix(".jsonl") + ".full.jsonl"
        _create(self._folder / name, "\n".join([head, *snapshot.lines()]) + "\n")
        # A reader may just have chosen the last full one: that one stays, and what follows it.
        if older:
            for path in self._folder.glob("*.jsonl"):
                if path.name < older[-1].name.removesuffix(".full.jsonl"):
                    path.unlink(missing_ok=True)


class Archive:
    """One archive folder, for one writer of each query and any number of readers.

    A writer calls `claim` once, then `begin` and `commit` for each batch, and `close` at its end.
    """

    def __init__(self, root: str | Path, *, table: Table | None = None, staging: str | Path | None = None) -> None:
        self.root = local_path(root)
        self.manifest = Manifest(self.root)
        self.staging = local_path(staging) if staging else self.root.with_name(f".{self.root.name}.staging")
        self.table: Table = table or self.manifest
        self._pending = self.root / _MANIFEST / "pending"
        # The queries that this process writes: the lock of each.
        self._locks: dict[str, WriterLock] = {}
        self._token = secrets.token_hex(8)

    def prepare(self) -> None:
        """Make the folders, and finish what an earlier run began. PipelineError says why that cannot be."""
        try:
            self._pending.mkdir(parents=True, exist_ok=True)
            self.staging.mkdir(parents=True, exist_ok=True)
            if self.staging.stat().st_dev != self.root.stat().st_dev:
                raise PipelineError(
                    f"{self.staging} and {self.root} are on different file systems, so that files cannot be renamed "
                    "from one to the other: give --staging a folder on the archive's own"
                )
        except OSError as exc:
            raise PipelineError(f"cannot make the archive {self.root}: {exc.strerror} ({exc.filename})") from exc
        self.finish_pending()
        self._sweep()

    def _sweep(self) -> None:
        """Delete what processes that were killed left half done, once it is old; nothing of a process that lives."""
        litter = [*self._pending.glob(".*"), *self._pending.parent.glob(".*.jsonl.*"), *self.staging.glob("merge-*")]
        for path in litter:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime <= _LITTER_SECONDS:
                    continue
                if path.is_dir():
                    if not is_locked(path / _STAGED_LOCK):
                        shutil.rmtree(path)
                else:
                    path.unlink()

    def has_batches(self) -> bool:
        """Was anything archived here before?"""
        return any(not path.name.startswith(("_", ".")) for path in self.root.iterdir())

    # --- Batches -----------------------------------------------------------------------------------------------------

    def claim(self, query: str) -> None:
        """Become the writer of a query, until `close`. PipelineError if another process is."""
        if self.writes(query):
            return
        lock = WriterLock(self.root / _MANIFEST / "writers" / f"{query}.lock", f"query {query} of {self.root}")
        lock.acquire()
        try:
            self.manifest.claim(query, self._token)
        except BaseException:
            lock.release()
            raise
        self._locks[query] = lock

    def writes(self, query: str) -> bool:
        """Is this process the writer of a query?"""
        return query in self._locks

    def knows(self, query: str) -> bool:
        """Did this query write here before?"""
        return query in self.manifest.snapshot().batches or self.table.last_batch(query) >= 0

    def close(self) -> None:
        """Let others write the queries that this process wrote."""
        while self._locks:
            self._locks.popitem()[1].release()

    def begin(self, query: str, batch: int, end: list[str] | None = None) -> Path | None:
        """A new folder to write the files of a batch to; None if the batch is in the archive already.

        `end` is where the batch ends, one text for each source. PipelineError if a batch of this number is in with
        another end, or if batches before it are missing.
        """
        self.claim(query)
        self.finish_pending()
        # A table of another format hears nothing of empty batches; the manifest notes every batch.
        noted = self.manifest.last_batch(query)
        last = max(noted, self.table.last_batch(query))
        if last >= batch:
            self._check_repeat(query, batch, end)
            return None
        # Version 0.1.0 noted the batches of its own format only.
        if 0 <= noted and last < batch - 1:
            raise PipelineError(
                f"{self.root} ends with batch {last} of this query, and Spark goes on with batch {batch}: the batches "
                f"between are missing, as in an archive that was restored from a backup; {self._way_on(query)}"
            )
        # Left by attempts of ours that failed, or by writers that are dead: one that lives would hold our lock.
        for path in self.staging.glob(f"{query}-{'[0-9]' * 10}-*"):
            shutil.rmtree(path)
        return self.staging / f"{query}-{batch:010d}-{secrets.token_hex(4)}"

    def _check_repeat(self, query: str, batch: int, end: list[str] | None) -> None:
        """Is this the batch that the archive has under its number? A checkpoint that went back numbers others so."""
        known = self.manifest.snapshot().ends.get(query)
        if end is None or not known:
            return  # written by 0.1.0, which did not keep where batches end
        if known.get(batch) != end:
            raise PipelineError(
                f"{self.root} has a batch {batch} of this query that ends elsewhere than the one that Spark runs now: "
                "the checkpoint has gone back, as after a power failure or from a backup, and messages would be left "
                f"out; {self._way_on(query)}"
            )

    def _way_on(self, query: str) -> str:
        known = self.manifest.snapshot().ends.get(query) or {}
        text = "restore the checkpoint that belongs to the archive, or go on with an empty --checkpoint and --new-query"
        for end in known[max(known)] if known else []:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                read = json.loads(end)
                if read["mode"] == "log" and len(known[max(known)]) == 1:
                    places = {
                        topic: {node: where["o"] for node, where in nodes.items()} for topic, nodes in read["p"].items()
                    }
                    return f"{text} from where the archive ends: --from '{json.dumps(places, separators=(',', ':'))}'"
        return f"{text} from where the archive ends"

    def commit(
        self, query: str, batch: int, staged: Path, *, end: list[str] | None = None, rows: int | None = None
    ) -> list[DataFile]:
        """Bring the files of a batch, which are complete, into the archive.

        `rows` is what their writer counted. PipelineError if the files hold another number, or if another process has
        become the writer of the query: then nothing of the batch is added.
        """
        sources = sorted(path for path in staged.rglob("*.parquet") if not _is_hidden(path.relative_to(staged)))
        found = []
        for number, source in enumerate(sources):
            name = f"{query}-{batch:010d}-{number:04d}.parquet"
            target = (source.parent.relative_to(staged) / name).as_posix()
            _sync(source)
            found.append(_describe(source, target))
        if rows is not None and (held := sum(file.rows for file in found)) != rows:
            raise PipelineError(
                f"Spark wrote {rows:,} rows in batch {batch} and the files in {staged} hold {held:,}: nothing of it "
                "was added. Find out what deletes files there; started again, the batch is written again"
            )
        # Before the note: what it names must be found by who finishes it after a power failure.
        for folder in {source.parent for source in sources}:
            _sync_folders(folder, self.staging)
        note = self._pending / f"{query}-{batch:010d}.json"
        moves = [{"from": str(source), "file": asdict(file)} for source, file in zip(sources, found, strict=True)]
        todo = {"kind": "batch", "query": query, "batch": batch, "end": end, "moves": moves, "in": str(staged)}
        with self._lock(fcntl.LOCK_EX):
            if self.manifest.snapshot().writers.get(query) != self._token:
                raise PipelineError(
                    f"another process has become the writer of query {query} of {self.root} while this one stood "
                    f"still: nothing of batch {batch} was added by this one, which ends here"
                )
            _replace(note, json.dumps(todo))
            return self._finish(note)

    # --- Reading -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What is live now, as far as our manifest keeps it."""
        if not (self.root / _MANIFEST).is_dir():
            raise PipelineError(f"{self.root} is not an archive: it has no folder {_MANIFEST}")
        with self._lock(fcntl.LOCK_SH):
            snapshot = self.manifest.snapshot()
            # A merge that was killed between its two steps: the folder is new, the manifest is not.
            for note in self._pending.glob("merge-*.json"):
                merge = json.loads(note.read_text())
                merged = DataFile(**merge["file"])
                if merged.path not in snapshot.files and (self.root / merged.path).exists():
                    for path in merge["old"]:
                        snapshot.files.pop(path, None)
                    snapshot.files[merged.path] = merged
        return snapshot

    # --- Merging small files -----------------------------------------------------------------------------------------

    def merge(
        self,
        target_bytes: int,
        closed_before: datetime.datetime,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> tuple[int, int]:
        """Merge the small files of each hour that began before a time. How many files became how many."""
        self.finish_pending()
        plan = list(_small_files(self.snapshot(), target_bytes, closed_before))
        before = after = 0
        for number, files in enumerate(plan):
            progress(number, len(plan))
            for group in _of_one_schema(self.root, files):
                if len(group) > 1:
                    self._merge(group)
                    before, after = before + len(group), after + 1
        progress(len(plan), len(plan))
        return before, after

    def _merge(self, files: list[DataFile]) -> None:
        name = f"merge-{secrets.token_hex(8)}"
        staged = self.staging / name
        staged.mkdir(parents=True)
        # Says that the folder belongs to a process that lives, however long this takes.
        lock = WriterLock(staged / _STAGED_LOCK, f"{staged}")
        lock.acquire()
        try:
            source = staged / f"{name}.parquet"
            _concatenate([self.root / file.path for file in files], source)
            _sync(source)
            _sync_folders(staged, self.staging)
            described = _describe(source, f"{files[0].folder}/{name}.parquet")
            if described.rows != sum(file.rows for file in files):
                raise PipelineError(f"merging {len(files)} files of {files[0].folder} gave {described.rows} rows")
            note = self._pending / f"{name}.json"
            old = [file.path for file in files]
            with self._lock(fcntl.LOCK_EX):
                _replace(note, json.dumps({"kind": "merge", "old": old, "file": asdict(described), "in": str(staged)}))
                self._finish(note)
        finally:
            lock.release()

    # --- Finishing ---------------------------------------------------------------------------------------------------

    def finish_pending(self) -> None:
        for note in sorted(self._pending.glob("*.json")):
            with self._lock(fcntl.LOCK_EX):
                self._finish(note)

    def _finish(self, note: Path) -> list[DataFile]:
        """Do what a note says, whatever of it was done before. Called with the lock held."""
        try:
            todo = json.loads(note.read_text())
        except FileNotFoundError:
            return []  # another process has done it
        staged = Path(todo["in"])
        if todo["kind"] == "batch":
            files = self._finish_batch(todo, note)
        else:
            files = self._finish_merge(todo, staged)
        shutil.rmtree(staged, ignore_errors=True)
        note.unlink()
        return files

    def _finish_batch(self, todo: dict[str, Any], note: Path) -> list[DataFile]:
        query, batch, end = todo["query"], todo["batch"], todo.get("end")
        files = [DataFile(**move["file"]) for move in todo["moves"]]
        if self.table.last_batch(query) >= batch:
            self.manifest.note_end(query, batch, end)
            return files
        for move, file in zip(todo["moves"], files, strict=True):
            if not (self.root / file.path).exists() and not Path(move["from"]).exists():
                raise PipelineError(
                    f"{move['from']}, which holds rows of batch {batch}, was deleted before it came into {self.root}: "
                    f"restore it; the note of it is {note}"
                )
        folders = set()
        for move, file in zip(todo["moves"], files, strict=True):
            target = self.root / file.path
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.rename(move["from"], target)
                folders.add(target.parent)
        for folder in folders:
            _sync_folders(folder, self.root)
        if self.table is self.manifest:
            self.manifest.commit(query, batch, files, end)
        else:
            self.table.commit(query, batch, files)
            self.manifest.note_end(query, batch, end)
        return files

    def _finish_merge(self, todo: dict[str, Any], staged: Path) -> list[DataFile]:
        merged = DataFile(**todo["file"])
        live = self.manifest.snapshot().files
        if merged.path in live:
            return [merged]
        folder = self.root / merged.folder
        if not (self.root / merged.path).exists():
            if not all(path in live for path in todo["old"]):
                return []  # they are gone: there is nothing to merge any more
            self._exchange(
                folder, staged, {os.path.basename(path) for path in todo["old"]}, os.path.basename(merged.path)
            )
        self.manifest.swap(todo["old"], [merged])
        return [merged]

    def _exchange(self, folder: Path, staged: Path, old: set[str], merged: str) -> None:
        """Swap the folder of an hour for one that has the merged file in the place of the old ones."""
        built = staged / "folder"
        aside = staged / "aside"
        if not aside.exists():
            shutil.rmtree(built, ignore_errors=True)
            built.mkdir()
            for path in folder.iterdir():
                if path.name not in old:
                    os.link(path, built / path.name)
            os.link(staged / merged, built / merged)
            shutil.copystat(folder, built)
            _sync_folder(built)
            if _exchange_folders(built, folder):
                _sync_folder(folder.parent)
                return
            os.rename(folder, aside)
        # Without an exchange in one step the hour is away for a moment, which is better than there twice.
        os.rename(built, folder)
        _sync_folder(folder.parent)

    @contextlib.contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        """Held while folders and manifest change together. The system lets go of it when a process is killed."""
        try:
            descriptor = os.open(self.root / _MANIFEST / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as exc:
            if kind == fcntl.LOCK_SH and exc.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
                yield  # one who may only read; the manifest alone is consistent, too
                return
            raise
        try:
            fcntl.flock(descriptor, kind)
            yield
        finally:
            os.close(descriptor)


# --- Times and names --------------------------------------------------------------------------------------------------


def hour_of(file: DataFile) -> datetime.datetime:
    """When the hour of a file's folder began."""
    partition = file.partition
    day = datetime.date.fromisoformat(partition["date"])
    return datetime.datetime(day.year, day.month, day.day, int(partition["hour"]), tzinfo=datetime.UTC)


def local_path(path: str | Path) -> Path:
    """A path of this machine's file systems. Other schemes than `file:` are not for us."""
    text = os.fspath(path)
    parts = urllib.parse.urlsplit(text)
    if parts.scheme == "file":
        return Path(urllib.parse.unquote(parts.path)).absolute()
    if "://" in text:
        raise PipelineError(
            f"{text}: an archive is a folder of a file system that the driver and all executors see under the same path"
        )
    return Path(text).absolute()


def _version_name(version: int) -> str:
    return f"{version:020d}.jsonl"


def _batch_line(query: str, batch: int, end: list[str] | None) -> dict[str, Any]:
    return {"batch": [query, batch]} if end is None else {"batch": [query, batch], "end": end}


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(("_", ".")) for part in path.parts)


# --- Files ------------------------------------------------------------------------------------------------------------


def _create(path: Path, text: str) -> bool:
    """Create a file in one step. False if there is one already."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    _write(partial, text)
    try:
        # Unlike a rename, a link does not replace what somebody else has just created.
        os.link(partial, path)
    except FileExistsError:
        return False
    finally:
        partial.unlink()
    _sync_folder(path.parent)
    return True


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    _write(partial, text)
    os.replace(partial, path)
    _sync_folder(path.parent)


def _write(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_folder = _sync


def _sync_folders(folder: Path, root: Path) -> None:
    """A folder, and those above it up to the root, which may be new."""
    while True:
        _sync_folder(folder)
        if folder == root:
            return
        folder = folder.parent


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _exchange_folders(one: Path, other: Path) -> bool:
    """Give each of two folders the other's name, in one step. False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one))


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _describe(source: Path, target: str) -> DataFile:
    """What the manifest says of a file, read from its footer."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(source) as file:
        footer = file.metadata
        column = footer.schema.names.index("timestamp_ns") if "timestamp_ns" in footer.schema.names else None
        times = []
        for group in range(footer.num_row_groups if column is not None else 0):
            statistics = footer.row_group(group).column(column).statistics
            if statistics is not None and statistics.has_min_max:
                times += [statistics.min, statistics.max]
        oldest, newest = (min(times), max(times)) if times else (None, None)
        return DataFile(target, footer.num_rows, source.stat().st_size, oldest, newest)


def _small_files(snapshot: Snapshot, target_bytes: int, closed_before: datetime.datetime) -> Iterator[list[DataFile]]:
    """Files of one hour that together fit into one of the target's size."""
    folders: dict[str, list[DataFile]] = {}
    for file in snapshot.files.values():
        is_of_an_hour = file.partition.keys() >= {"date", "hour"}
        if is_of_an_hour and file.bytes < target_bytes // 2 and hour_of(file) + _HOUR <= closed_before:
            folders.setdefault(file.folder, []).append(file)
    for _, files in sorted(folders.items()):
        group: list[DataFile] = []
        for file in sorted(files, key=lambda file: (file.oldest or 0, file.path)):
            if group and sum(member.bytes for member in group) + file.bytes > target_bytes:
                yield group
                group = []
            group.append(file)
        if len(group) > 1:
            yield group


def _of_one_schema(root: Path, files: list[DataFile]) -> list[list[DataFile]]:
    """Files can be put behind each other where they have the same columns."""
    import pyarrow.parquet as parquet

    groups: list[tuple[Any, list[DataFile]]] = []
    for file in files:
        schema = parquet.read_schema(root / file.path)
        for known, members in groups:
            if known.equals(schema):
                members.append(file)
                break
        else:
            groups.append((schema, [file]))
    return [members for _, members in groups]


def _concatenate(sources: list[Path], target: Path) -> None:
    """The rows of several files in one, a row group at a time."""
    import pyarrow
    import pyarrow.parquet as parquet

    with parquet.ParquetWriter(target, parquet.read_schema(sources[0]), compression="zstd") as writer:
        held: list[Any] = []
        for source in sources:
            with parquet.ParquetFile(source) as file:
                for batch in file.iter_batches(batch_size=65536):
                    held.append(batch)
                    if sum(batch.nbytes for batch in held) >= _ROW_GROUP_BYTES:
                        writer.write_table(pyarrow.Table.from_batches(held))
                        held = []
        if held:
            writer.write_table(pyarrow.Table.from_batches(held))
