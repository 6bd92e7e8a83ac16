"""Archives as Delta Lake or Iceberg tables, without any jar: their logs are written from Python.

Executors write Parquet files and the driver adds them to the table, in one commit that also says which batch of which
query they are. That is all a `Table` of the store is; where files are staged, and what happens after a kill, is as for
plain Parquet.
"""

from __future__ import annotations

import json
import os
import urllib.parse
from pathlib import Path
from typing import Any

from flintmq.errors import PipelineError
from flintmq.spark.pipelines.store import DataFile

__all__ = ["DeltaLog", "IcebergTable"]

_NEEDED = "pip install 'flintmq[lake]'"
#: The columns that the names of folders hold, as a table knows them.
_PARTITIONS = ("topic", "date", "hour")


class DeltaLog:
    """The log of a Delta table in the archive's folder."""

    def __init__(self, root: Path) -> None:
        try:
            import deltalake
        except ImportError as exc:
            raise PipelineError(f"deltalake is not installed: {_NEEDED}") from exc
        self._root = root
        self._lib = deltalake

    def last_batch(self, query: str) -> int:
        if not self._lib.DeltaTable.is_deltatable(str(self._root)):
            return -1
        version: int | None = self._lib.DeltaTable(str(self._root)).transaction_version(query)
        return -1 if version is None else version

    def commit(self, query: str, batch: int, files: list[DataFile]) -> None:
        if not files:
            return  # nothing to make a table of; the same batch is empty again if it is replayed
        from deltalake.transaction import AddAction, CommitProperties, Transaction

        schema = self._schema(files[0])
        if not self._lib.DeltaTable.is_deltatable(str(self._root)):
            self._lib.DeltaTable.create(str(self._root), schema, partition_by=list(_PARTITIONS))
        actions = [
            AddAction(
                path=urllib.parse.quote(file.path, safe="/=-_.~"),
                size=file.bytes,
                partition_values=file.partition | {"hour": str(int(file.partition["hour"]))},
                modification_time=int((self._root / file.path).stat().st_mtime * 1000),
                data_change=True,
                stats=json.dumps({"numRecords": file.rows}),
            )
            for file in files
        ]
        self._lib.DeltaTable(str(self._root)).create_write_transaction(
            actions,
            mode="append",
            schema=schema,
            partition_by=list(_PARTITIONS),
            commit_properties=CommitProperties(app_transactions=[Transaction(query, batch)]),
        )

    def live(self) -> list[str]:
        if not self._lib.DeltaTable.is_deltatable(str(self._root)):
            return []
        table = self._lib.DeltaTable(str(self._root))
        return [
            os.path.relpath(urllib.parse.unquote(uri.removeprefix("file://")), self._root) for uri in table.file_uris()
        ]

    def compact(self, target_bytes: int) -> tuple[int, int]:
        """Merge small files, as the format itself does it. How many files became how many."""
        metrics = self._lib.DeltaTable(str(self._root)).optimize.compact(target_size=target_bytes)
        return int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"])

    def _schema(self, file: DataFile) -> Any:
        import pyarrow
        import pyarrow.parquet as parquet

        written = parquet.read_schema(self._root / file.path).remove_metadata()
        partitions = zip(_PARTITIONS, (pyarrow.string(), pyarrow.date32(), pyarrow.int32()), strict=True)
        return self._lib.Schema.from_arrow(pyarrow.schema([*written, *partitions]))


class IcebergTable:
    """An Iceberg table whose files are in the archive's folder.

    The catalog is one of pyiceberg's, by the name it has in its configuration; without a name, a small SQLite file in
    the archive's folder.
    """

    def __init__(self, root: Path, catalog: str | None = None) -> None:
        try:
            import pyiceberg  # noqa: F401
            from pyiceberg.catalog import load_catalog
        except ImportError as exc:
            raise PipelineError(f"pyiceberg is not installed: {_NEEDED}") from exc
        self._root = root
        self._name = ("flintmq", root.name.replace(".", "_"))
        try:
            if catalog:
                self._catalog = load_catalog(catalog)
            else:
                folder = root / "_iceberg"
                folder.mkdir(parents=True, exist_ok=True)
                settings = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
                self._catalog = load_catalog("archive", **settings)
        except Exception as exc:
            raise PipelineError(f"the Iceberg catalog cannot be opened ({exc}); its parts come with {_NEEDED}") from exc

    def last_batch(self, query: str) -> int:
        if not self._catalog.table_exists(self._name):
            return -1
        return int(self.load().properties.get(f"flintmq.batch.{query}", -1))

    def commit(self, query: str, batch: int, files: list[DataFile]) -> None:
        if not files:
            return
        table = self._open(files[0])
        with table.transaction() as change:
            change.add_files(
                # Not as_uri(): nobody would undo its quoting.
                [f"file://{self._root / file.path}" for file in files],
                snapshot_properties={"flintmq.query": query, "flintmq.batch": str(batch)},
            )
            change.set_properties({f"flintmq.batch.{query}": str(batch)})

    def live(self) -> list[str]:
        if not self._catalog.table_exists(self._name):
            return []
        files = (task.file.file_path for task in self.load().scan().plan_files())
        return [os.path.relpath(path.removeprefix("file://"), self._root) for path in files]

    def load(self) -> Any:
        """The table, as pyiceberg has it."""
        return self._catalog.load_table(self._name)

    def _open(self, file: DataFile) -> Any:
        if self._catalog.table_exists(self._name):
            return self.load()
        import pyarrow.parquet as parquet
        from pyiceberg.transforms import HourTransform, IdentityTransform

        self._catalog.create_namespace_if_not_exists(self._name[0])
        schema = parquet.read_schema(self._root / file.path).remove_metadata()
        table = self._catalog.create_table(self._name, schema=schema)
        with table.update_spec() as spec:
            spec.add_field("topic", IdentityTransform(), "topic_name")
            spec.add_field("timestamp", HourTransform(), "hour")
        return table
