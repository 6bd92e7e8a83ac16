"""The tables that archives are: Delta Lake and Iceberg, without any jar. Their own logs decide what is in.

Tasks have written the files of a batch, and nobody sees them yet. The driver adds them by one commit of the table,
which also names the query, the number of the batch and where it ends:

 Delta     the transaction (query, batch) of the table's log, and (query/end, a digest of the end); the end itself is in
           the commit's own words, with the topics that the query subscribes to
 Iceberg   properties of the table, set by the same commit that adds the snapshot, which has these in its summary

So a batch is in for every reader at once, or not at all. Two drivers that write one query cannot both add a batch: a
commit is only taken if no other of this query came in since the table was read, and the second of the two stops.

`Table.wants` judges a batch before it is written, by what the table knows of the query: a batch that is in is skipped
if it ends where that one did; a number that comes again with another end, and a batch that does not begin where the
last one ended, are from a checkpoint that does not belong to the table, and stop the writer. So does a table that was
restored to a version before the last batch.

Size: the formats answer the same questions, one method each, and are read side by side.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import secrets
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError
from flintmq.spark.shipped.files import PARTITIONS, DataFile, Place, describe, merge_files, partition_of, sync_folder
from flintmq.spark.shipped.reasons import reason

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "FORMATS",
    "Commit",
    "DeltaTable",
    "IcebergTable",
    "ParquetFolder",
    "Position",
    "Table",
    "format_of",
    "open_table",
]

FORMATS = ("delta", "iceberg", "parquet")
#: So many commits of the table are searched for where a batch ended. Spark keeps 100 batches in its checkpoint.
_KNOWN_ENDS = 512
#: How often a commit is tried that others were faster than, with something that does not concern this query.
_ATTEMPTS = 20
#: So many merged files are put in by one commit.
_MERGES_PER_COMMIT = 100
#: What the names of merged files begin with.
_MERGED = "merged"
_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
#: What tasks and merges call their files: by query and batch, by the id of a query that runs once, or as merged.
_OWN_NAME = re.compile(
    r"(?:topic=[^/]+/date=-?\d{4,}-\d\d-\d\d/hour=\d{1,2}/)?"
    rf"(?:(?P<query>{_UUID}(?=-\d{{10}}-)|[0-9a-f]{{32}})(?:-(?P<batch>\d{{10}}))?|{_MERGED})-[0-9a-f]{{16}}\.parquet"
)
#: Files of batches that are not in, and merged files that are not, are spared for so long: they may be added yet.
_IN_DOUBT = 7 * 86400.0
#: The property of an Iceberg table that says where its files are: the names of two places may end alike.
_PLACE = "flintmq.place"
#: What tells an archive of the form before tables.
OLD_FORM = "_manifest"


@dataclass(frozen=True)
class Position:
    """How far a query is in a table."""

    batch: int
    #: Of where that batch ended; None if the table was not told.
    digest: int | None


@dataclass(frozen=True)
class Commit:
    """One batch, as its commit tells of it."""

    end: list[str]
    #: Topics that its query subscribes to; nothing if the table was not told.
    subscription: str


class Table:
    """What the formats share. One object belongs to one process."""

    format = ""

    def __init__(self, place: Place) -> None:
        self.place = place
        #: Queries that may only begin in a table without rows, and the checkpoints of theirs.
        self._first: dict[str, str] = {}
        #: Queries whose commits are only taken on the very state of the table that was read.
        self._exact: set[str] = set()
        #: Topics that queries subscribe to, for their commits.
        self._subscriptions: dict[str, str] = {}

    # --- What a format does ------------------------------------------------------------------------------------------

    def schema(self) -> pa.Schema | None:
        """The columns of the table; None if there is no table yet."""
        raise NotImplementedError

    @property
    def exists(self) -> bool:
        """Is there a table, with rows or without?"""
        return self.schema() is not None

    def position(self, query: str) -> Position | None:
        """The last batch of a query that is in; None if there is none."""
        raise NotImplementedError

    def _commits(self, limit: int = _KNOWN_ENDS) -> Iterable[Mapping[str, Any]]:
        """The words of the newest commits, the newest first, in the state of the table that was read."""
        raise NotImplementedError

    def _live_commits(self, limit: int) -> Iterable[Mapping[str, Any]]:
        """Those of the newest commits whose files a restore to an older version has not taken out."""
        raise NotImplementedError

    def files(self, *, may_lack_rows: bool = False) -> list[DataFile]:
        """All files that are in. PipelineError if another engine has deleted rows that files still hold.

        With `may_lack_rows` these files are listed too: their rows are not to be read.
        """
        raise NotImplementedError

    def _check_deleted(self, paths: Sequence[str], how: str) -> None:
        """PipelineError if there are files that still hold deleted rows. `how` says what rewrites them."""
        if paths:
            raise PipelineError(
                f"rows of {self.place} were deleted by another engine, which only marked them: {len(paths):,} of its "
                f"files still hold such rows ({paths[0]}), and they would come back. Have that engine rewrite them, "
                f"{how}"
            )

    def make(self, schema: pa.Schema, partitioned: bool) -> None:
        """Make the table, or add columns that it does not have."""
        raise NotImplementedError

    def _add(self, query: str, batch: int, end: list[str], files: Sequence[DataFile], token: str) -> None:
        """One commit, on the state of the table that `_refresh` read. _Conflict if somebody was faster."""
        raise NotImplementedError

    def _words(self, query: str, batch: int, end: list[str], token: str) -> dict[str, str]:
        """A batch in the words of its commit."""
        words = {"query": query, "batch": str(batch), "end": json.dumps(end), "token": token}
        if subscription := self._subscriptions.get(query):
            words["subscription"] = subscription
        return {f"flintmq.{key}": value for key, value in words.items()}

    def _refresh(self) -> None:
        """Read the state of the table."""
        raise NotImplementedError

    # --- What its commits say -----------------------------------------------------------------------------------------

    def ends(self, query: str) -> dict[int, list[str]]:
        """Where the newest batches of a query ended."""
        found: dict[int, list[str]] = {}
        for words in self._commits():
            if words.get("flintmq.query") == query and "flintmq.end" in words:
                found.setdefault(int(words["flintmq.batch"]), json.loads(words["flintmq.end"]))
        return found

    def last_commits(self) -> dict[str, Commit]:
        """The last batch of each query that newest commits tell of, the newest first."""
        self._refresh()
        found: dict[str, Commit] = {}
        for words in self._commits():
            if "flintmq.query" in words and "flintmq.end" in words:
                commit = Commit(json.loads(words["flintmq.end"]), words.get("flintmq.subscription", ""))
                found.setdefault(words["flintmq.query"], commit)
        return found

    def _has_commit(self, token: str) -> bool:
        """Is the commit of this token in?"""
        return any(words.get("flintmq.token") == token for words in self._commits())

    # --- Columns ------------------------------------------------------------------------------------------------------

    def _check_folders(self, by: Sequence[str], partitioned: bool) -> None:
        """PipelineError if the rows of a query would go to an archive, or messages to a table that is none."""
        if partitioned and not by:
            raise PipelineError(
                f"{self.place} is a table without folders, not an archive of messages by topic, date and hour: give "
                "another --to"
            )
        if by and not partitioned:
            raise PipelineError(
                f"{self.place} is partitioned by {', '.join(by)}, as an archive is, and the rows of a query have no "
                "such folders: give another --to-table"
            )

    def _check_columns(self, known: pa.Schema, wanted: pa.Schema) -> list[pa.Field]:
        """The columns that the table lacks, or lacks fields of. PipelineError if one is of another type there."""
        import pyarrow as pa

        new = []
        for column in wanted:
            if column.name not in known.names:
                new.append(column)
                continue
            there = known.field(column.name).type
            if (found := _misfit(column.name, there, column.type)) is not None:
                name, old, other = found
                raise PipelineError(
                    f"column {name} of {self.place} is of type {old}, and what is to be written has {other}: give the "
                    "--schema, or the CAST, that fits, or write to another table"
                )
            if _lacks(there, column.type):
                new.append(column)
        names = [{column.name: column.type for column in schema} for schema in (known, wanted)]
        for there, name in _clashes(names[0], names[1]):
            raise PipelineError(
                f"{self.place} has a column {there}, and what is to be written has {name}, which many readers take for "
                "the same: name it alike"
            )
        return [pa.field(column.name, column.type) for column in new]

    def _not_added(self, new: Sequence[pa.Field], exc: Exception) -> PipelineError:
        names = ", ".join(column.name for column in new)
        return PipelineError(f"the columns {names} cannot be added to {self.place}: {reason(exc)}")

    # --- Batches ------------------------------------------------------------------------------------------------------

    def wants(
        self, query: str, batch: int, end: list[str], before: list[str] | None, *, checkpoint: str, new_query: bool
    ) -> bool:
        """Is this batch to be added? False if it is in. PipelineError if it does not belong here.

        `end` is where it ends, and `before` where the batch before it did, one text for each source.
        """
        self._refresh()
        last = self.position(query)
        self._first.pop(query, None)
        if last is None:
            if not new_query:
                if self.has_rows():
                    raise self.unknown(checkpoint)
                self._first[query] = checkpoint
            if not new_query and batch > 0:
                raise PipelineError(
                    f"{self.place} has nothing of the {batch} batches that {checkpoint} has done: give the --to that "
                    "they went to, an empty --checkpoint to begin anew, or --new-query to go on here without them"
                )
            return True
        if not new_query:
            self._check_restored(query, last)
        if batch <= last.batch:
            self._check_repeat(query, batch, end, last)
            return False
        if batch > last.batch + 1:
            raise PipelineError(
                f"{self.place} ends with batch {last.batch} of this query, and Spark goes on with batch {batch}: the "
                f"batches between are missing, as in a table that was restored from a backup; {self._way_on(query)}"
            )
        if before is not None and last.digest is not None and digest(before) != last.digest:
            raise PipelineError(
                f"batch {last.batch} of this query ends elsewhere in {checkpoint} than in {self.place}: two drivers "
                "had one checkpoint, or it has gone back, and messages would be left out or added twice; "
                f"{self._way_on(query)}"
            )
        return True

    def commit(self, query: str, batch: int, end: list[str], files: Sequence[DataFile], subscription: str = "") -> None:
        """Add a batch whose files are complete. PipelineError if another process has added it: then nothing is."""
        self._subscriptions[query] = subscription

        def check() -> bool:
            begun = query in self._first and self.has_rows()
            last = self.position(query)
            if last is not None and last.batch >= batch:
                raise PipelineError(
                    f"another process writes query {query} of {self.place}, and has added batch {last.batch} while "
                    f"this one wrote batch {batch}: nothing of it was added by this one, which ends here"
                )
            if last is None and begun:
                # Of another query, which has begun at the same time.
                raise self.unknown(self._first[query])
            return True

        self._commit_while(check, query, batch, end, files)

    def _commit_while(
        self, is_wanted: Callable[[], bool], query: str, batch: int, end: list[str], files: Sequence[DataFile]
    ) -> bool:
        """Try to add a batch until it is in; before each try `is_wanted` looks at the table as it is then. False if it
        is not wanted any more."""
        token = secrets.token_hex(8)
        for attempt in range(_ATTEMPTS):
            if not is_wanted():
                return False
            try:
                self._add(query, batch, end, files, token)
            except _Conflict as exc:
                # It may be ours, which is in although the store's answer was lost.
                self._refresh()
                if self._has_commit(token):
                    break
                if attempt == _ATTEMPTS - 1:
                    raise PipelineError(f"batch {batch} cannot be added to {self.place}: {reason(exc)}") from exc
                time.sleep(random.uniform(0.5, 1.0) * min(1.0, 0.02 * 2**attempt))
            else:
                break
        return True

    def commit_note(self, query: str, number: int, text: str) -> bool:
        """Add a batch without rows. False, and nothing is added, if the table has one of this number already."""

        def is_next() -> bool:
            last = self.position(query)
            return last is None or last.batch < number

        return self._commit_while(is_next, query, number, [text], [])

    def has_batch(self, query: str, batch: int) -> bool:
        """Is this batch of a query in, or a later one?"""
        self._refresh()
        last = self.position(query)
        return last is not None and last.batch >= batch

    def commit_unless(
        self,
        query: str,
        batch: int,
        end: list[str],
        files: Sequence[DataFile],
        is_other: Callable[[DataFile], bool],
    ) -> bool:
        """Add a batch, unless the table has a file of which `is_other` says that it must not: then False, and nothing.

        PipelineError if another process has added this batch.
        """
        self._exact.add(query)

        def check() -> bool:
            if any(is_other(file) for file in self.files()):
                return False
            last = self.position(query)
            if last is not None and last.batch >= batch:
                raise PipelineError(
                    f"another process does the same to {self.place}, and has added batch {last.batch} of it meanwhile: "
                    "nothing was added by this one, which ends here"
                )
            return True

        return self._commit_while(check, query, batch, end, files)

    def has_rows(self) -> bool:
        return self.schema() is not None and bool(self.files(may_lack_rows=True))

    def unknown(self, checkpoint: str) -> PipelineError:
        return PipelineError(
            f"{self.place} has rows already, and {checkpoint} does not know of them: they would be archived twice; "
            "give the --checkpoint they came from, or --new-query if these are others"
        )

    def _check_restored(self, query: str, last: Position) -> None:
        """PipelineError if the table was restored to a version before the last batch of a query.

        It says still that this batch is in: a restore brings files back, and neither transactions nor properties.
        """
        kept = -1
        # The batch is among the very newest commits, unless others write here too.
        for limit in (8, 64, _KNOWN_ENDS):
            live = self._live_commits(limit)
            batches = (int(words.get("flintmq.batch", -1)) for words in live if words.get("flintmq.query") == query)
            if (kept := max(batches, default=-1)) >= last.batch:
                return
        if kept >= 0 or last.batch in self.ends(query):
            first = kept + 1
            lost = f"batches {first} to {last.batch}" if first < last.batch else f"batch {last.batch}"
            raise PipelineError(
                f"{self.place} was restored to an older version, and has no rows of {lost} of this query any more, "
                "which it is done with. To have the messages in an archive again run flintmq pipeline backfill; then "
                "start this query once with --new-query, to go on without what is lost"
            )

    def _check_repeat(self, query: str, batch: int, end: list[str], last: Position) -> None:
        """Is this the batch that is in under its number? A checkpoint that went back numbers others so."""
        if last.digest is None:
            return  # written by 0.1.0, which did not keep where batches end
        if batch == last.batch:
            same = digest(end) == last.digest
        else:
            same = self.ends(query).get(batch) == end
        if not same:
            raise PipelineError(
                f"{self.place} has a batch {batch} of this query that ends elsewhere than the one that Spark runs now: "
                "the checkpoint has gone back, as after a power failure or from a backup, and messages would be left "
                f"out; {self._way_on(query)}"
            )

    def _way_on(self, query: str) -> str:
        text = "restore the checkpoint that belongs to the table, or go on with an empty --checkpoint and --new-query"
        known = self.ends(query)
        for end in known[max(known)] if known else []:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                read = json.loads(end)
                if read["mode"] == "log" and len(known[max(known)]) == 1:
                    places = {
                        topic: {node: where["o"] for node, where in nodes.items()} for topic, nodes in read["p"].items()
                    }
                    return f"{text} from where the table ends: --from '{json.dumps(places, separators=(',', ':'))}'"
        return f"{text} from where the table ends"


#: What deltalake and pyiceberg raise for what they do not take, such as a type that they do not have.
_REFUSALS = (OSError, ValueError, TypeError, NotImplementedError)


class _Conflict(Exception):
    """A commit was not taken, or nobody knows whether it was."""


def digest(end: list[str]) -> int:
    """A positive number of 63 bits that stands for where a batch ends."""
    return int.from_bytes(hashlib.sha256(json.dumps(end).encode()).digest()[:8]) >> 1


def _misfit(name: str, there: pa.DataType, wanted: pa.DataType) -> tuple[str, str, str] | None:
    """The first field, at any depth, that is of another type: its name and both types. None if all fit.

    Texts, bytes and lists are the same with small or large offsets. Whole numbers of 8 and 16 bits are stored as those
    of 32 are, which is what Iceberg has for them.
    """
    import pyarrow.types as types

    if types.is_struct(there) and types.is_struct(wanted):
        known = {field.name: field.type for field in there}
        parts = [(f"{name}.{field.name}", known[field.name], field.type) for field in wanted if field.name in known]
    elif _is_list(there) and _is_list(wanted):
        parts = [(f"{name}[]", there.value_type, wanted.value_type)]
    elif types.is_map(there) and types.is_map(wanted):
        parts = [(f"{name} (key)", there.key_type, wanted.key_type)]
        parts.append((f"{name} (value)", there.item_type, wanted.item_type))
    else:
        small = types.is_int32(there) and (types.is_int8(wanted) or types.is_int16(wanted))
        fits = small or _plain_type(there) == _plain_type(wanted)
        return None if fits else (name, str(there), str(wanted))
    return next((found for part in parts if (found := _misfit(*part)) is not None), None)


def _clashes(
    known: Mapping[str, pa.DataType], wanted: Mapping[str, pa.DataType], path: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield names, at any depth, that are wanted and new, each behind another one that differs by case alone."""
    folded: dict[str, str] = {}
    for name in (*known, *wanted):
        first = folded.setdefault(name.lower(), name)
        if first != name and name not in known:
            yield f"{path}{first}", f"{path}{name}"
    for name, kind in wanted.items():
        yield from _clashes(_inside(known.get(name)), _inside(kind), f"{path}{name}.")


def _check_paths(*schemas: pa.Schema) -> None:
    """PipelineError if a field has a name with a dot that is the path of another, at any depth: Iceberg's are paths."""
    found: dict[str, tuple[str, ...]] = {}

    def look(path: tuple[str, ...], kind: pa.DataType) -> None:
        name = ".".join(path)
        if found.setdefault(name, path) != path:
            raise PipelineError(
                f"two fields are {name} to Iceberg, where b inside of a is named a.b too: leave one of them out of the "
                "--schema, or take --format delta"
            )
        for inner, inside in _inside(kind).items():
            look((*path, "element" if inner == "[]" else inner), inside)

    for schema in schemas:
        for column in schema:
            look((column.name,), column.type)


def _inside(kind: pa.DataType | None) -> dict[str, pa.DataType]:
    """The types that a type is made of, by the names of the fields."""
    import pyarrow.types as types

    if kind is None:
        return {}
    if types.is_map(kind):
        return {"key": kind.key_type, "value": kind.item_type}
    if _is_list(kind):
        return {"[]": kind.value_type}
    return {field.name: field.type for field in kind} if types.is_struct(kind) else {}


def _lacks(there: pa.DataType, wanted: pa.DataType) -> bool:
    """Has what is wanted fields, at any depth, that are not there? Of types that fit."""
    import pyarrow.types as types

    if types.is_struct(wanted):
        known = {field.name: field.type for field in there}
        return any(field.name not in known or _lacks(known[field.name], field.type) for field in wanted)
    if types.is_map(wanted):
        return _lacks(there.key_type, wanted.key_type) or _lacks(there.item_type, wanted.item_type)
    return _is_list(wanted) and _lacks(there.value_type, wanted.value_type)


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind))


def _plain_type(kind: pa.DataType) -> str:
    import pyarrow.types as types

    if types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamp with a zone"
    return str(kind).removeprefix("large_").removesuffix("_view")


def format_of(place: Place) -> str | None:
    """The format of what is there; None if nothing is."""
    if place.exists("_delta_log"):
        return "delta"
    if place.exists("_iceberg"):
        return "iceberg"
    return "parquet" if place.exists("_spark_metadata") else None


def open_table(
    place: Place,
    format: str | None = None,
    *,
    catalog: str | None = None,
    catalog_options: Mapping[str, str] | None = None,
    table: str | None = None,
) -> Table:
    """A table, as it is or to be made: of the format that it has, of the one that is asked for, or Delta.

    A new one that has a catalog is Iceberg.
    """
    if format is not None and format not in FORMATS:
        raise PipelineError(f"there is no format {format!r}, only {', '.join(FORMATS)}")
    if why := place.refusal(writes=False):
        raise PipelineError(f"{place} cannot be read: {why}")
    place.check_credentials()
    if place.exists(OLD_FORM):
        raise PipelineError(
            f"{place} is an archive of the form before tables: flintmq pipeline archive --upgrade --to {place} makes a "
            "table of it, in its place"
        )
    found = format_of(place)
    if found is not None and format is not None and found != format:
        raise PipelineError(f"{place} is a table of format {found}, not {format}")
    has_catalog = bool(catalog or catalog_options or table)
    format = found or format or ("iceberg" if has_catalog else "delta")
    if has_catalog and format != "iceberg":
        raise PipelineError(
            f"{place} is a table of format {format}, and only Iceberg has a catalog: take --catalog, --catalog-option "
            "and --table away"
        )
    if format == "delta":
        return DeltaTable(place)
    return IcebergTable(place, catalog, catalog_options, table) if format == "iceberg" else ParquetFolder(place)


# --- Delta Lake -------------------------------------------------------------------------------------------------------


class DeltaTable(Table):
    """A Delta table, through `deltalake`."""

    format = "delta"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        try:
            import deltalake
        except ImportError as exc:
            raise PipelineError("deltalake is not installed: pip install 'flintmq[spark]'") from exc
        if urllib.parse.unquote(place.text) != place.text:
            raise PipelineError(
                f"a Delta table cannot be at {place}: deltalake takes a % with two digits for another character"
            )
        self._lib = deltalake
        self._options = dict(place.options) or None
        # What was read last; None if there was no table.
        self._table: Any = None
        self._refresh()

    def _refresh(self) -> None:
        from deltalake.exceptions import TableNotFoundError

        try:
            self._table = self._lib.DeltaTable(self.place.text, storage_options=self._options)
        except TableNotFoundError:
            self._table = None
        except Exception as exc:
            raise PipelineError(f"{self.place} cannot be opened: {reason(exc)}") from exc

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Errors of the store, while the log of the table is read, as PipelineError."""
        from deltalake.exceptions import DeltaError

        try:
            yield
        except (DeltaError, OSError) as exc:
            raise PipelineError(f"{self.place} cannot be read: {reason(exc)}") from exc

    def _commits(self, limit: int = _KNOWN_ENDS) -> Iterable[Mapping[str, Any]]:
        with self._asking():
            return [] if self._table is None else list(self._table.history(limit))

    def _live_commits(self, limit: int) -> Iterable[Mapping[str, Any]]:
        newest: dict[str, float] = {"version": math.inf, "timestamp": math.inf}
        for commit in self._commits(limit):
            if any(commit.get(key, -1) > most for key, most in newest.items()):
                continue
            yield commit
            if commit.get("operation") == "RESTORE":
                said = commit.get("operationParameters") or {}
                if str(said.get("version")).isdecimal():
                    newest["version"] = int(said["version"])
                elif str(said.get("datetime")).isdecimal():
                    newest["timestamp"] = int(said["datetime"])
                else:
                    newest["version"] = -1  # nobody knows to which: to none that has a batch

    def schema(self) -> pa.Schema | None:
        import pyarrow as pa

        return None if self._table is None else pa.schema(self._table.schema().to_arrow())

    def position(self, query: str) -> Position | None:
        with self._asking():
            batch = None if self._table is None else self._table.transaction_version(query)
            return None if batch is None else Position(batch, self._table.transaction_version(f"{query}/end"))

    def has_rows(self) -> bool:
        # Another engine may have made it with its rows, in version 0.
        with self._asking():
            return self._table is not None and bool(self._table.file_uris())

    def files(self, *, may_lack_rows: bool = False) -> list[DataFile]:
        self._refresh()
        if not may_lack_rows:
            self._check_deleted(self._with_deleted(), "in Spark by REORG TABLE … APPLY (PURGE)")
        return [_delta_file(row) for row in self._rows()]

    def _with_deleted(self) -> list[str]:
        """The files that have a deletion vector, in the state that was read."""
        import pyarrow as pa

        if self._table is None or "deletionVectors" not in (self._table.protocol().reader_features or ()):
            return []
        with self._asking():
            # Batch by batch: a vector has a value for each row of its file.
            marked = pa.RecordBatchReader.from_stream(self._table.deletion_vectors())
            return [str(path) for batch in marked for path in batch["filepath"].to_pylist()]

    def _rows(self) -> list[dict[str, Any]]:
        """What the log says of each file, in the state that was read."""
        import pyarrow as pa

        found: list[dict[str, Any]] = []
        if self._table is not None:
            with self._asking():
                found = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
        return found

    def make(self, schema: pa.Schema, partitioned: bool) -> None:
        import pyarrow as pa
        from deltalake.exceptions import DeltaError

        if self._table is None:
            self._check_columns(pa.schema([]), schema)
            types = (pa.string(), pa.date32(), pa.int32())
            more = list(zip(PARTITIONS, types, strict=True)) if partitioned else []
            columns = [column for column in schema if column.name not in dict(more)]
            try:
                wanted = self._lib.Schema.from_arrow(pa.schema([*columns, *(pa.field(*column) for column in more)]))
                self._lib.DeltaTable.create(
                    self.place.text,
                    wanted,
                    partition_by=[name for name, _ in more],
                    storage_options=self._options,
                    mode="ignore",
                )
            except _REFUSALS as exc:
                raise PipelineError(f"the table {self.place} cannot be made: {reason(exc)}") from exc
            except DeltaError as exc:
                # Somebody else may have made it at the same moment.
                self._refresh()
                if self._table is None:
                    raise PipelineError(f"the table {self.place} cannot be made: {reason(exc)}") from exc
            self._sync()
            self._refresh()
        for attempt in range(_ATTEMPTS):
            known = self.schema()
            assert known is not None
            self._check_folders(self._table.metadata().partition_columns, partitioned)
            if not (new := self._check_columns(known, schema)):
                break
            try:
                self._table.alter.add_columns(self._lib.Schema.from_arrow(pa.schema(new)).fields)
            except (DeltaError, *_REFUSALS) as exc:
                if attempt == _ATTEMPTS - 1 or isinstance(exc, _REFUSALS):
                    raise self._not_added(new, exc) from exc
                time.sleep(random.uniform(0, 0.02 * 2 ** min(attempt, 5)))
            self._sync()
            self._refresh()

    def _add(self, query: str, batch: int, end: list[str], files: Sequence[DataFile], token: str) -> None:
        from deltalake.exceptions import DeltaError
        from deltalake.transaction import CommitProperties, Transaction

        noted = CommitProperties(
            custom_metadata=self._words(query, batch, end, token),
            app_transactions=[Transaction(query, batch), Transaction(f"{query}/end", digest(end))],
            # The first one on this very state of the table, which has no rows, and those that depend on its files.
            max_commit_retries=0 if query in self._first or query in self._exact else None,
        )
        self._write([_add_action(file) for file in files], noted, (DeltaError, OSError))

    def adopt(self, files: Sequence[DataFile], batches: Mapping[str, tuple[int, list[str] | None]]) -> None:
        """Take files and the positions of queries over from an archive of the form before, by one commit."""
        from deltalake.transaction import CommitProperties, Transaction

        known = []
        for query, (batch, end) in batches.items():
            known.append(Transaction(query, batch))
            if end is not None:
                known.append(Transaction(f"{query}/end", digest(end)))
        words = {"flintmq.upgraded": "yes"}
        if len(batches) == 1:
            [(query, (batch, end))] = batches.items()
            words |= {"flintmq.query": query, "flintmq.batch": str(batch)}
            words |= {"flintmq.end": json.dumps(end)} if end is not None else {}
        there = {file.path for file in self.files()}
        new = [_add_action(file) for file in files if file.path not in there]
        self._write(new, CommitProperties(custom_metadata=words, app_transactions=known), ())
        self._refresh()

    def _write(self, actions: list[Any], noted: Any, conflicts: tuple[type[Exception], ...]) -> None:
        try:
            # On the state that was read: a commit of the same query since then is a conflict, others are not.
            self._table.create_write_transaction(
                actions,
                mode="append",
                schema=self._table.schema(),
                partition_by=self._table.metadata().partition_columns,
                commit_properties=noted,
            )
        except conflicts as exc:
            raise _Conflict(reason(exc)) from exc
        self._sync()

    def _sync(self) -> None:
        """On a disk: bring the newest of the log to the device, before Spark notes that the batch is done."""
        folder = Path(self.place.text) / "_delta_log"
        if self.place.is_local and folder.is_dir():
            newest = max(folder.glob("*.json"))
            with open(newest, "rb") as file:
                os.fsync(file.fileno())
            for path in (folder, folder.parent):
                sync_folder(path)

    # --- Care ---------------------------------------------------------------------------------------------------------

    def compact(self, target_bytes: int, closed_before: Any) -> tuple[int, int]:
        """Merge small files of hours that began before a time. How many files became how many.

        Not by deltalake's own `optimize`: of two at the same time, both are taken, and every row is in twice.
        """
        self._refresh()
        if self._table is None:
            raise PipelineError(f"{self.place} is no table")
        if target_bytes < 1:
            raise PipelineError("merged files are at least 1 MiB")
        self._check_mergeable()
        closed = (closed_before.date().isoformat(), f"{closed_before.hour:02d}")
        groups: dict[tuple[str, ...], list[DataFile]] = {}
        for file in self.files():
            hour = (file.partition.get("date", ""), file.partition.get("hour", ""))
            if file.bytes < target_bytes and (not file.partition or hour < closed):
                groups.setdefault(tuple(file.partition.values()), []).append(file)
        wanted = [chosen for group in groups.values() for chosen in _bins(group, target_bytes)]
        before = after = 0
        with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for at in range(0, len(wanted), _MERGES_PER_COMMIT):
                some = wanted[at : at + _MERGES_PER_COMMIT]
                taken = self._replace(list(zip(some, pool.map(self._merge, some), strict=True)))
                before, after = before + sum(len(old) for old, _ in taken), after + len(taken)
        return before, after

    def _check_mergeable(self) -> None:
        """PipelineError if the files of the table are not all that its rows depend on, or are not in our folders."""
        protocol, noted = self._table.protocol(), self._table.metadata()
        strange = set(protocol.reader_features or ()) - {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
        if noted.configuration.get("delta.columnMapping.mode", "none") != "none":
            strange.add("columnMapping")
        if noted.partition_columns not in ([], list(PARTITIONS)):
            strange.add(f"partitioned by {', '.join(noted.partition_columns)}")
        if strange:
            raise PipelineError(
                f"{self.place} was made or changed by another engine ({', '.join(sorted(strange))}): "
                "merge its files there"
            )

    def _merge(self, old: Sequence[DataFile]) -> DataFile:
        """Write the rows of some files of one folder to one, which is no part of the table yet."""
        known = self.schema()
        assert known is not None
        try:
            merged = merge_files(self.place, old, known, _MERGED)
        except (OSError, ValueError) as exc:
            raise PipelineError(f"files of {self.place} cannot be merged: {reason(exc)}") from exc
        rows = sum(file.rows for file in old)
        if merged.rows != rows:
            raise PipelineError(
                f"{merged.rows:,} rows were found in files of {self.place} of which the table says that they hold "
                f"{rows:,} ({old[0].path} and others): they were not merged"
            )
        return merged

    def _replace(self, merges: list[tuple[list[DataFile], DataFile]]) -> list[tuple[list[DataFile], DataFile]]:
        """Put merged files in the place of theirs, by one commit. Those that were; others had been merged meanwhile."""
        from deltalake.exceptions import DeltaError
        from deltalake.transaction import CommitProperties, RemoveAction

        token = secrets.token_hex(8)
        for attempt in range(_ATTEMPTS):
            live = {urllib.parse.unquote(row["path"]) for row in self._rows()}
            late = [merge for merge in merges if not all(file.path in live for file in merge[0])]
            merges = [merge for merge in merges if merge not in late]
            for _, merged in late:
                self._delete(merged.path)
            if not merges:
                return []
            now = int(time.time() * 1000)
            actions: list[Any] = []
            for old, merged in merges:
                actions += [
                    RemoveAction(
                        path=file.path,
                        data_change=False,
                        deletion_timestamp=now,
                        partition_values=_partition_values(file),
                        size=file.bytes,
                    )
                    for file in old
                ]
                actions.append(_add_action(merged, data_change=False))
            # On this very state of the table, or not at all: nobody else looks whether the old files are still in.
            noted = CommitProperties(
                custom_metadata={"flintmq.merge": str(len(merges)), "flintmq.token": token}, max_commit_retries=0
            )
            base = self._table.version()
            try:
                self._write(actions, noted, (DeltaError, OSError))
            except _Conflict as exc:
                self._refresh()
                if not self._has_commit(token):
                    if attempt == _ATTEMPTS - 1:
                        raise PipelineError(f"the merged files cannot be added to {self.place}: {reason(exc)}") from exc
                    time.sleep(random.uniform(0, 0.02 * 2 ** min(attempt, 5)))
                    continue
            self._refresh()
            self._check_replaced(merges, base)
            return merges
        raise AssertionError("not reached")

    def _check_replaced(self, merges: Sequence[tuple[list[DataFile], DataFile]], base: int) -> None:
        """PipelineError, and the table as it was, if a commit has not taken the old files out."""
        there = {urllib.parse.unquote(row["path"]) for row in self._rows()}
        if any(file.path in there for old, _ in merges for file in old):
            with self._asking():
                self._table.restore(base)
            raise PipelineError(f"merged files did not replace theirs in {self.place}: version {base} was restored")

    def _delete(self, path: str) -> bool:
        try:
            self.place.files().delete_file(path)
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise PipelineError(f"{self.place / path} cannot be deleted: {reason(exc)}") from exc
        return True

    def vacuum(self, retain: float) -> int:
        """Delete files that no version of the newest `retain` seconds has. How many.

        Only those that the table once had, and those under names that tasks and merges give: a folder may hold more
        than a table. A file of a batch that is not in yet may be one that is being written, for days.
        """
        self._refresh()
        if self._table is None:
            raise PipelineError(f"{self.place} is no table")
        flags = {"retention_hours": math.ceil(retain / 3600), "dry_run": True, "enforce_retention_duration": False}
        with self._asking():
            gone = set(self._table.vacuum(**flags, full=False))
            doubtful = self._table.vacuum(**flags, full=True)
        files, now = self.place.files(), time.time()
        for path in doubtful:
            if path in gone or not (named := _OWN_NAME.fullmatch(path)):
                continue
            query = named["query"]
            last = None if query is None else self.position(query)
            in_doubt = last is None or int(named["batch"] or 0) > last.batch
            with self._asking():
                modified = files.get_file_info(path).mtime
            if modified is not None and modified.timestamp() < now - max(retain, _IN_DOUBT if in_doubt else 0):
                gone.add(path)
        return sum(self._delete(path) for path in sorted(gone))


def _bins(group: Sequence[DataFile], target_bytes: int) -> list[list[DataFile]]:
    """Files of one folder, oldest first, in parts that are no larger than a merged file is to be."""
    found: list[list[DataFile]] = []
    held = target_bytes
    for file in sorted(group, key=lambda file: (file.oldest or 0, file.path)):
        if held + file.bytes > target_bytes:
            found.append([])
            held = 0
        found[-1].append(file)
        held += file.bytes
    return [chosen for chosen in found if len(chosen) > 1]


def _partition_values(file: DataFile) -> dict[str, str]:
    """As a Delta log has them."""
    return {key: str(int(value)) if key == "hour" else value for key, value in file.partition.items()}


def _add_action(file: DataFile, data_change: bool = True) -> Any:
    from deltalake.transaction import AddAction

    # No least and greatest values: deltalake (1.6.6) takes a column that has none, beside others that have some, for
    # one without rows that fit. A reader has the folders, and what the files themselves say.
    noted = {"numRecords": file.rows}
    return AddAction(
        path=file.path,  # deltalake quotes it
        size=file.bytes,
        partition_values=_partition_values(file),
        modification_time=int(time.time() * 1000),
        data_change=data_change,
        stats=json.dumps(noted),
    )


def _delta_file(row: Mapping[str, Any]) -> DataFile:
    def of(prefix: str) -> dict[str, Any]:
        return {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}

    partition = {key: str(value) for key, value in of("partition.").items() if value is not None}
    if "hour" in partition:
        partition["hour"] = f"{int(partition['hour']):02d}"
    bounds = []
    for kind in ("min.", "max."):
        found = of(kind)
        bounds.append({name: found[name] for name in ("offset", "timestamp_ns") if found.get(name) is not None})
    path = urllib.parse.unquote(row["path"])
    return DataFile(path, row["num_records"] or 0, row["size_bytes"], bounds[0], bounds[1], partition)


# --- Iceberg ----------------------------------------------------------------------------------------------------------


class IcebergTable(Table):
    """An Iceberg table whose files are in the place, through pyiceberg.

    The catalog is one of pyiceberg's: by the name that it has in its configuration, by options, or both. Without
    either it is a SQLite file in the place, which must then be on a disk.
    """

    format = "iceberg"

    def __init__(
        self,
        place: Place,
        catalog: str | None = None,
        options: Mapping[str, str] | None = None,
        table: str | None = None,
    ) -> None:
        super().__init__(place)
        try:
            from pyiceberg.catalog import load_catalog
        except ImportError as exc:
            raise PipelineError("pyiceberg is not installed: pip install 'flintmq[lake]'") from exc
        #: Of the catalog that is in the place itself.
        self._folder: Path | None = None
        name = table or f"flintmq.{re.sub(r'[^A-Za-z0-9_]', '_', place.name)}"
        self._name = tuple(name.rsplit(".", 1)) if "." in name else ("flintmq", name)
        if re.search("[#?]", place.text) or urllib.parse.unquote(place.text) != place.text:
            raise PipelineError(
                f"an Iceberg table cannot be at {place}: what opens it takes #, ? and a % with two digits "
                "for parts of a URI"
            )
        if not catalog and not options:
            if not place.is_local:
                raise PipelineError(
                    f"an Iceberg table at {place} needs a catalog: --catalog NAME of pyiceberg's configuration, or "
                    "--catalog-option KEY=VALUE, such as uri=https://…"
                )
            self._folder = Path(place.text) / "_iceberg"
            uri = f"sqlite:///{self._folder}/catalog.db"
            options = {"type": "sql", "uri": uri, "warehouse": f"file://{self._folder}"}
        self._load = functools.partial(load_catalog, catalog or "archive", **dict(options or {}))
        # Opened when it is there, or is to be made.
        self._catalog: Any = None
        self._table: Any = None
        self._refresh()

    def _open(self, make: bool = False) -> None:
        if self._catalog is not None:
            return
        if self._folder is not None:
            try:
                if make:
                    self._folder.mkdir(parents=True, exist_ok=True)
                elif not self._folder.is_dir():
                    return
            except OSError as exc:
                raise PipelineError(f"the table {self.place} cannot be made: {exc.strerror} ({exc.filename})") from exc
        for attempt in range(3):
            try:
                self._catalog = self._load()
            except Exception as exc:
                if "already exists" in str(exc) and attempt < 2:
                    continue  # another has made its tables at the same moment
                raise PipelineError(f"the Iceberg catalog cannot be opened: {reason(exc)}") from exc
            return

    def _refresh(self) -> None:
        self._open()
        if self._catalog is None:
            return
        try:
            self._table = self._catalog.load_table(self._name) if self._catalog.table_exists(self._name) else None
        except Exception as exc:
            raise PipelineError(f"the table {'.'.join(self._name)} cannot be opened: {reason(exc)}") from exc
        # Of a catalog that is in the place itself it can be no other.
        if self._table is not None and self._folder is None:
            self._check_place()

    def _check_place(self) -> None:
        """PipelineError if the table that the catalog has under this name is that of another place."""
        noted = self._table.properties.get(_PLACE) or self._place_of_files()
        # As they are written: the table names its files so, and by another way to the same folder they are not found.
        if noted and noted != self.place.text:
            raise PipelineError(
                f"the table {'.'.join(self._name)} of the catalog has its files in {noted}, not in {self.place}: give "
                "another --table, or that --to"
            )

    def _place_of_files(self) -> str:
        """Where the files are of a table that does not note it; nothing if none of them is one of ours."""
        with self._asking():
            paths = (task.file.file_path for task in self._table.scan().plan_files())
            found = next(((path, own) for path in paths if (own := _OWN_NAME.search(path))), None)
        return "" if found is None else found[0][: found[1].start()].removeprefix("file://").rstrip("/")

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Errors of the store, while the log of the table is read, as PipelineError."""
        try:
            yield
        except (OSError, ValueError, NotImplementedError) as exc:
            raise PipelineError(f"{self.place} cannot be read: {reason(exc)}") from exc

    def load(self) -> Any:
        """The table, as pyiceberg has it."""
        self._refresh()
        return self._table

    def schema(self) -> pa.Schema | None:
        if self._table is None:
            return None
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        return schema_to_pyarrow(self._table.schema(), include_field_ids=False)

    def position(self, query: str) -> Position | None:
        noted = {} if self._table is None else self._table.properties
        if (batch := noted.get(f"flintmq.batch.{query}")) is None:
            return None
        end = noted.get(f"flintmq.end.{query}")
        return Position(int(batch), None if end is None else int(end))

    def _commits(self, limit: int = _KNOWN_ENDS) -> Iterable[Mapping[str, Any]]:
        known = [] if self._table is None else self._table.snapshots()
        newest = sorted(known, key=lambda found: found.sequence_number, reverse=True)[:limit]
        return [found.summary.additional_properties for found in newest if found.summary]

    def _live_commits(self, limit: int) -> Iterable[Mapping[str, Any]]:
        from pyiceberg.table.snapshots import ancestors_of

        known = () if self._table is None else ancestors_of(self._table.current_snapshot(), self._table.metadata)
        newest = itertools.islice(known, limit)
        return [found.summary.additional_properties for found in newest if found.summary]

    def files(self, *, may_lack_rows: bool = False) -> list[DataFile]:
        self._refresh()
        if self._table is None:
            return []
        from pyiceberg.conversions import from_bytes

        with self._asking():
            tasks = list(self._table.scan().plan_files())
        if not may_lack_rows:
            marked = [task.file.file_path for task in tasks if task.delete_files]
            self._check_deleted(marked, "in Spark by CALL rewrite_data_files with delete-file-threshold 1")

        fields = {column.name: column for column in self._table.schema().fields}
        noted = [fields[name] for name in ("offset", "timestamp_ns") if name in fields]
        found = []
        for task in tasks:
            file = task.file
            bounds = [
                {
                    column.name: from_bytes(column.field_type, known[column.field_id])
                    for column in noted
                    if column.field_id in known
                }
                for known in (file.lower_bounds or {}, file.upper_bounds or {})
            ]
            path = file.file_path.removeprefix("file://").removeprefix(f"{self.place.text}/")
            size, partition = file.file_size_in_bytes, self._partition_of(file)
            found.append(DataFile(path, file.record_count, size, bounds[0], bounds[1], partition))
        return found

    def _partition_of(self, file: Any) -> dict[str, str]:
        """Topic, date and hour of a file, by its values and not by its name, which may be that of another engine."""
        names = [field.name for field in self._table.specs()[file.spec_id].fields]
        values = dict(zip(names, (file.partition[at] for at in range(len(names))), strict=True))
        if values.get("topic_name") is None or values.get("hour") is None:
            return {}
        day, hour = divmod(int(values["hour"]), 24)
        date = datetime.date(1970, 1, 1) + datetime.timedelta(days=day)
        return {"topic": str(values["topic_name"]), "date": date.isoformat(), "hour": f"{hour:02d}"}

    def make(self, schema: pa.Schema, partitioned: bool) -> None:
        import pyarrow as pa
        from pyiceberg.exceptions import CommitFailedException

        if self._table is None:
            self._check_columns(pa.schema([]), schema)
            _check_paths(schema)
            self._open(make=True)
            try:
                self._catalog.create_namespace_if_not_exists(self._name[0])
                noted = {_PLACE: self.place.text}
                self._catalog.create_table_if_not_exists(self._name, schema=schema, properties=noted)
            except _REFUSALS as exc:
                raise PipelineError(f"the table {self.place} cannot be made: {reason(exc)}") from exc
            self._refresh()
        for attempt in range(_ATTEMPTS):
            try:
                if self._is_as(schema, partitioned):
                    break
            except CommitFailedException as exc:
                # Another has made or changed it at the same time: perhaps it is as it should be now.
                if attempt == _ATTEMPTS - 1:
                    raise PipelineError(f"the table {self.place} cannot be changed: {reason(exc)}") from exc
                time.sleep(random.uniform(0, 0.02 * 2 ** min(attempt, 5)))
            self._refresh()

    def _is_as(self, schema: pa.Schema, partitioned: bool) -> bool:
        """Has the table these columns and folders? If not, one change towards it."""
        from pyiceberg.transforms import HourTransform, IdentityTransform

        known, table = self.schema(), self._table
        assert known is not None
        by = [field.name for spec in table.specs().values() for field in spec.fields]
        if partitioned and not by and not table.snapshots():
            with table.update_spec() as spec:
                spec.add_field("topic", IdentityTransform(), "topic_name")
                spec.add_field("timestamp", HourTransform(), "hour")
            return False
        self._check_folders(by, partitioned)
        if not (new := self._check_columns(known, schema)):
            return True
        _check_paths(known, schema)
        try:
            with table.update_schema() as change:
                change.union_by_name(schema)
        except _REFUSALS as exc:
            raise self._not_added(new, exc) from exc
        return False

    def _add(self, query: str, batch: int, end: list[str], files: Sequence[DataFile], token: str) -> None:
        from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

        summary = self._words(query, batch, end, token)
        # In this process alone: pyiceberg would add the batch again to a table that has it by now.
        self._table.metadata.properties["commit.retry.num-retries"] = "0"
        scheme = "file://" if self.place.is_local else ""
        try:
            with self._table.transaction() as change:
                if files:
                    # Not as_uri(): nobody would undo its quoting.
                    paths = [f"{scheme}{self.place.text}/{file.path}" for file in files]
                    change.add_files(paths, snapshot_properties=summary)
                else:
                    with change.update_snapshot(snapshot_properties=summary).fast_append():
                        pass
                noted = {f"flintmq.batch.{query}": str(batch), f"flintmq.end.{query}": str(digest(end))}
                if _PLACE not in self._table.properties:
                    noted[_PLACE] = self.place.text
                change.set_properties(noted)
        except (CommitFailedException, CommitStateUnknownException, OSError) as exc:
            raise _Conflict(reason(exc)) from exc


# --- Plain Parquet ----------------------------------------------------------------------------------------------------


class ParquetFolder(Table):
    """A folder that Spark's own file sink writes, and keeps the list of. Only read here."""

    format = "parquet"

    def schema(self) -> pa.Schema | None:
        return None

    @property
    def exists(self) -> bool:
        return self.place.exists("_spark_metadata")

    def has_rows(self) -> bool:
        return self.exists

    def files_of(self, paths: Sequence[str]) -> list[DataFile]:
        """What the footers of some files say, which Spark names."""
        found = []
        for uri in paths:
            path = urllib.parse.unquote(re.sub(r"^[a-z0-9]+:(?://)?(?=/)", "", uri))
            root = self.place.text if self.place.is_local else f"/{self.place.text.partition('://')[2]}"
            path = path.removeprefix(root).lstrip("/")
            found.append(describe(self.place, path, partition_of(path)))
        return found
