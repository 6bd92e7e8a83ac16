"""`flintmq pipeline archive --upgrade`: an archive of the form before tables becomes one, in its place.

That form had its own list of files, `_manifest`: versions of JSON lines, and notes of what was begun. Its files stay
where they are. What a note says is finished first, then one commit adds the live files to a Delta table, together with
the last batch of each query, so that a checkpoint goes on where it was; then `_manifest` is set aside under another
name. Killed at any moment, it is begun again: files that are in are not added twice.

An archive that was a Delta or an Iceberg table already, with the list beside it, only gets the batches.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

from flintmq.errors import FormatError, PipelineError
from flintmq.spark.pipelines.archive import Target
from flintmq.spark.pipelines.tables import OLD_FORM, DeltaTable, IcebergTable, format_of
from flintmq.spark.shipped.files import DataFile, Place, describe, partition_of

__all__ = ["upgrade"]

_FORMAT = 1
#: Where the old list is afterwards. It is not read again.
SET_ASIDE = "_manifest.before-upgrade"


def upgrade(where: str | Path | Target) -> tuple[int, int]:
    """Make a table of an old archive. Rows and files that are in it. PipelineError says why not."""
    target = Target.of(where)
    root = Path(target.place.text)
    if not target.place.is_local or not (root / OLD_FORM).is_dir():
        raise PipelineError(f"{target.place} is not an archive of the form before tables: it has no {OLD_FORM}")
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(root / OLD_FORM / ".lock", "a"))
            # Held by each writer of that form while it changes something.
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_there = os.path.samestat(os.fstat(lock.fileno()), os.stat(root / OLD_FORM / ".lock"))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise PipelineError(f"another process has upgraded {root} at this moment: there is nothing left to do")
        _no_writers(root)
        known = _Manifest(root / OLD_FORM)
        kind = format_of(target.place) or known.facts.get("format", "parquet")
        if kind == "iceberg":
            done = _to_iceberg(target, known)
        else:
            done = _to_delta(target.place, known)
        os.rename(root / OLD_FORM, _free(root / SET_ASIDE))
    return done


def _free(path: Path) -> Path:
    """The path, or with a number behind it where that is taken, as after a list that came back from a backup."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(found for found in itertools.chain([path], numbered) if not found.exists())


def _no_writers(root: Path) -> None:
    for path in (root / OLD_FORM / "writers").glob("*.lock"):
        with open(path) as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise PipelineError(f"{root} is being written ({path.read_text()}): stop that first") from exc


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise PipelineError(f"{where} is damaged ({exc}): restore it from a backup; nothing was changed") from exc
    if not isinstance(found, dict):
        raise PipelineError(f"{where} is damaged (no JSON object): restore it from a backup; nothing was changed")
    return found


class _Manifest:
    """The old list: what was live, and the last batch of each query."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, dict[str, Any]] = {}
        self.batches: dict[str, tuple[int, list[str] | None]] = {}
        self.facts: dict[str, Any] = {}
        # Batches that a note decided and no version names.
        self.finished: list[tuple[str, int, list[str] | None, list[str]]] = []
        whole = sorted(folder.glob("*.full.jsonl"))
        first = int(whole[-1].name.split(".")[0]) + 1 if whole else 0
        versions = [path for path in sorted(folder.glob("*.jsonl")) if not path.name.endswith(".full.jsonl")]
        for path in [*whole[-1:], *(path for path in versions if int(path.name.split(".")[0]) >= first)]:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                self._apply(_parsed(line, f"{path}, line {number},"))
        notes = [_parsed(note.read_text(), str(note)) for note in sorted((folder / "pending").glob("*.json"))]
        for todo in notes:
            self._finish(todo)

    def _apply(self, change: dict[str, Any]) -> None:
        if change.get("format", _FORMAT) > _FORMAT:
            raise FormatError(f"the manifest is of a newer version ({change['format']}) than this program knows")
        if "add" in change:
            self.files[change["add"]["path"]] = change["add"]
        elif "remove" in change:
            self.files.pop(change["remove"], None)
        elif "batch" in change:
            query, batch = change["batch"]
            if batch >= self.batches.get(query, (-1, None))[0]:
                self.batches[query] = (batch, change.get("end", self.batches.get(query, (-1, None))[1]))
        elif "fact" in change:
            self.facts |= change["fact"]

    def _finish(self, todo: dict[str, Any]) -> None:
        """Do what a note says, whatever of it was done: the batch, or the merge, was decided."""
        root = self.folder.parent
        if todo["kind"] == "merge":
            if (root / todo["file"]["path"]).exists():
                for path in todo["old"]:
                    self.files.pop(path, None)
                self.files[todo["file"]["path"]] = todo["file"]
        elif self.batches.get(todo["query"], (-1, None))[0] < todo["batch"]:
            for move in todo["moves"]:
                target = root / move["file"]["path"]
                if not target.exists():
                    if not Path(move["from"]).exists():
                        raise PipelineError(f"{move['from']}, which holds rows of {root}, was deleted: restore it")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(move["from"], target)
                self.files[move["file"]["path"]] = move["file"]
            self.batches[todo["query"]] = (todo["batch"], todo.get("end"))
            paths = [move["file"]["path"] for move in todo["moves"]]
            self.finished.append((todo["query"], todo["batch"], todo.get("end"), paths))


def _to_delta(place: Place, known: _Manifest) -> tuple[int, int]:
    import pyarrow as pa
    from pyarrow import parquet

    root = Path(place.text)
    missing = [path for path in known.files if not (root / path).exists()]
    if missing:
        raise PipelineError(f"{missing[0]}, which holds rows of {root}, is not there: restore it, nothing was changed")
    files = [describe(place, path, partition_of(path)) for path in known.files]
    table = DeltaTable(place)
    if files:
        columns: dict[str, pa.Field] = {}
        for file in files:
            columns |= {column.name: column for column in parquet.read_schema(root / file.path).remove_metadata()}
        table.make(pa.schema(list(columns.values())), partitioned=bool(files[0].partition))
    elif table.schema() is None:
        return 0, 0  # nothing was archived: a table is made with the first batch
    files = [_checked(file, known.files[file.path]) for file in files]
    table.adopt(files, {query: found for query, found in known.batches.items() if found[0] >= 0})
    there = table.files()
    return sum(file.rows for file in there), len(there)


def _checked(file: DataFile, noted: dict[str, Any]) -> DataFile:
    if file.rows != noted["rows"]:
        raise PipelineError(f"{file.path} holds {file.rows:,} rows, and {noted['rows']:,} were written to it")
    return file


def _to_iceberg(target: Target, known: _Manifest) -> tuple[int, int]:
    """Its own log has the batches already, but for one that was decided and not finished."""
    table = IcebergTable(target.place, target.catalog, target.catalog_options, target.table)
    for query, batch, end, paths in known.finished:
        last = table.position(query)
        if last is None or last.batch < batch:
            table.commit(query, batch, end or [], [describe(target.place, path, partition_of(path)) for path in paths])
    there = table.files()
    return sum(file.rows for file in there), len(there)
