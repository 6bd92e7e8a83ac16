"""Places where files are, on disks and in object stores, and the Parquet files that tasks write there and read back.

A `Place` is a folder: a path, or a URI of a store. Stores are spoken to with `deltalake`, whose options (credentials,
endpoint) and environment variables are the same for the driver and for all tasks; a disk needs pyarrow alone.

`FileWriter` runs in the tasks of a batch. It writes each file once, under a name that no other attempt has, and tells
the driver of it when the file is complete and, on a disk, synced. Nobody looks for files that were not told: what a
failed attempt leaves is no part of anything.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
import secrets
import stat
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import PipelineError, permission_hint
from flintmq.spark.shipped.reasons import reason

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "PARTITIONS",
    "DataFile",
    "FileReader",
    "FileWriter",
    "Place",
    "describe",
    "merge_files",
    "partition_of",
    "sync_folder",
]

#: By what messages are put into folders.
PARTITIONS = ("topic", "date", "hour")
_HOUR_NS = 3_600_000_000_000
#: Rows of one folder are held until they are so many bytes: a row group. All folders of a task together hold less
#: than the other.
_ROW_GROUP_BYTES = 32 << 20
_HELD_BYTES = 128 << 20
#: So many files of a task are open at once.
_OPEN_FILES = 100
#: The columns whose least and greatest values are told, to pass over files: whole numbers, none null.
_NOTED = ("offset", "timestamp_ns")
#: The other names of a scheme, as Hadoop's own file systems call themselves.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "abfss"}
_FOR_SPARK = {"s3": "s3a"}
_KNOWN = ("s3", "gs", "abfss", "az", "hdfs")
#: Names of options, and of environment variables, that give credentials; and those that are used most.
_CREDENTIALS = {
    "s3": re.compile("(?i)^(aws_)?(access_key_id|web_identity|container_|profile|skip_signature|shared_cred|config_f)"),
    "gs": re.compile("(?i)^(google_)?(service_account|application_credentials|skip_signature|bearer_token)"),
    "abfss": re.compile("(?i)^azure_|^(account_key|access_key|sas_|bearer_token|client_|tenant_|use_|skip_signature)"),
}
_CREDENTIALS["az"] = _CREDENTIALS["abfss"]
_USUAL = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfss": "AZURE_STORAGE_ACCOUNT_KEY",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
}
#: What a library asks for credentials that nobody has given: the cloud that the machine is in.
_OF_CLOUD = re.compile("169[.]254[.]169[.]254|metadata|latest/api/token|IMDS|oauth2/token|credential", re.IGNORECASE)
#: Ten seconds for the answer of that cloud, which comes within milliseconds where there is one.
_IMPATIENT = {"max_retries": "1", "retry_timeout": "5s", "timeout": "5s", "connect_timeout": "5s"}


def expanded(path: Path) -> Path:
    """Return a path with the folder that ``~`` or ``~NAME`` stands for. PipelineError if there is none."""
    try:
        return path.expanduser()
    except RuntimeError as exc:
        raise PipelineError(f"{path}: no folder is known here for {path.parts[0]}: write the whole path") from exc


@dataclass(frozen=True)
class Place:
    """A folder of a file system or of an object store."""

    #: An absolute path, or a URI without a slash at its end.
    text: str
    #: What the store needs to be opened, as `deltalake` names it.
    options: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(where: str | Path | Place, options: Mapping[str, str] | None = None) -> Place:
        if isinstance(where, Place):
            return where
        text = os.fspath(where)
        if not text:
            raise PipelineError("a place has no name: give a path, or a URI of file, s3 (s3a), gs, abfss or hdfs")
        found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", text)
        scheme = found[1].lower() if found else ""
        if scheme == "file":
            return Place(str(Path(_path_of(text)).absolute()))
        if not scheme:
            return Place(str(expanded(Path(text)).absolute()))
        scheme = _SCHEMES.get(scheme, scheme)
        if scheme not in _KNOWN or "://" not in text:
            raise PipelineError(f"{text}: a place is a path, or a URI of file, s3 (s3a), gs, abfss or hdfs")
        rest = text.partition("://")[2].rstrip("/")
        if re.search("[#?]", rest):
            raise PipelineError(f"{text}: what follows # or ? in the URI of a store is no part of a name: take it away")
        host, *names = rest.split("/")
        if not host or any(name in ("", ".", "..") for name in names):
            raise PipelineError(f"{text}: the URI of a store names a bucket, or a host, and no empty names, . or ..")
        return Place(f"{scheme}://{rest}", dict(options or {}))

    @property
    def is_local(self) -> bool:
        return "://" not in self.text

    @property
    def scheme(self) -> str:
        return "file" if self.is_local else self.text.partition(":")[0]

    @property
    def name(self) -> str:
        return self.text.rsplit("/", 1)[-1]

    @property
    def for_spark(self) -> str:
        """As Spark's own readers, writers and checkpoints name it."""
        if self.is_local:
            return self.text
        return f"{_FOR_SPARK.get(self.scheme, self.scheme)}://{self.text.partition('://')[2]}"

    def is_inside(self, other: Place) -> bool:
        """Is it that folder, or one below it? On a disk by any way that leads there."""
        one, another = (os.path.realpath(place.text) if place.is_local else place.text for place in (self, other))
        return f"{one}/".startswith(f"{another}/")

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.text}/{name}", self.options)

    def __str__(self) -> str:
        return self.text

    def files(self) -> Any:
        """The folder as pyarrow's file system: paths in it begin below the folder."""
        import pyarrow.fs

        if self.is_local:
            return pyarrow.fs.SubTreeFileSystem(self.text, pyarrow.fs.LocalFileSystem())
        try:
            from deltalake.fs import DeltaStorageHandler
        except ImportError as exc:
            raise PipelineError(f"{self.text} needs deltalake on every machine: pip install 'flintmq[spark]'") from exc
        from deltalake.exceptions import DeltaError

        try:
            return pyarrow.fs.PyFileSystem(DeltaStorageHandler(self.text, dict(self.options)))
        except DeltaError as exc:
            raise PipelineError(f"{self.text} cannot be opened: {reason(exc)}") from exc

    def refusal(self, *, writes: bool) -> str:
        """Return why this process may not read or write files here; empty where nothing is known against it."""
        if not self.is_local:
            return ""
        place = Path(self.text)
        for found in (place, *place.parents):
            try:
                about = os.stat(found)
            except PermissionError as exc:
                return f"{exc.strerror}{permission_hint(exc, found)}"
            except OSError:
                continue  # it is not there yet, and its parent decides
            if not stat.S_ISDIR(about.st_mode):
                return f"{found} is not a directory"
            wanted = os.X_OK | (os.W_OK if writes else os.R_OK)
            if not os.access(found, wanted):
                return f"{os.strerror(errno.EACCES)}{permission_hint(PermissionError(), found)}"
            break
        return ""

    def check_credentials(self) -> None:
        """PipelineError if nobody has given credentials for a store, and the machine's cloud has none.

        The store's library would ask that cloud for minutes where the machine is in none.
        """
        named = _CREDENTIALS.get(self.scheme)
        variables = [key for key in os.environ if key.startswith(("AWS_", "GOOGLE_", "AZURE_"))]
        if named is None or any(named.search(key) for key in (*self.options, *variables)):
            return
        try:
            Place(self.text, {**_IMPATIENT, **self.options}).exists("_delta_log")
        except PipelineError as exc:
            if _OF_CLOUD.search(str(exc)):
                raise PipelineError(
                    f"{self.text}: there are no credentials: set them in the environment ({_USUAL[self.scheme]}), or "
                    f"by --storage-option KEY=VALUE, or give this machine a role in its cloud ({exc})"
                ) from exc

    def exists(self, name: str) -> bool:
        """Is there a file or a folder of this name?"""
        import pyarrow.fs

        try:
            if self.is_local:
                return (Path(self.text) / name).exists()
            files = self.files()
            if files.get_file_info(name).type != pyarrow.fs.FileType.NotFound:
                return True
            chosen = pyarrow.fs.FileSelector(name, allow_not_found=True, recursive=False)
            return bool(files.get_file_info(chosen))
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as exc:
            hint = permission_hint(exc, self.text) if self.is_local else ""
            why = f"{os.strerror(errno.EACCES)}{hint}" if hint else reason(exc)
            raise PipelineError(f"{self.text} cannot be read: {why}") from exc

    def read_text(self, name: str) -> str:
        """A small file. FileNotFoundError if there is none."""
        with self.files().open_input_stream(name) as file:
            return bytes(file.read()).decode()

    def write_text(self, name: str, text: str) -> None:
        """Write a small file in one step: a reader finds the old one or the new one."""
        if not self.is_local:
            # With a buffer of its own: without, the store's stream is given what it does not know.
            with self.files().open_output_stream(name, buffer_size=1 << 16) as file:
                file.write(text.encode())
            return
        folder = Path(self.text)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{name}.{os.getpid()}"
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / name)
        sync_folder(folder)


def _path_of(uri: str) -> str:
    """The path that a URI of the scheme file names. PipelineError if it names another machine."""
    rest = uri[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise PipelineError(f"{uri} names the machine {host!r}: a path of this one is file:///{host}{slash}{path}")
        rest = f"/{path}"
    return urllib.parse.unquote(rest)


@dataclass(frozen=True)
class DataFile:
    """One file of a table."""

    #: Below the table's place.
    path: str
    rows: int
    bytes: int
    #: The least and the greatest value of some columns.
    least: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    #: topic, date and hour, as texts; nothing for a table without folders.
    partition: dict[str, str] = field(default_factory=dict)

    @property
    def oldest(self) -> int | None:
        """No message is older, ns since 1970: as the file says, or the hour of its folder. None where neither does."""
        return self.least.get("timestamp_ns", self._hour)

    @property
    def newest(self) -> int | None:
        """No message is newer."""
        hour = self._hour
        return self.most.get("timestamp_ns", None if hour is None else hour + _HOUR_NS - 1)

    @property
    def is_exact(self) -> bool:
        """Are there messages of the oldest and of the newest time?"""
        return "timestamp_ns" in self.least and "timestamp_ns" in self.most

    @property
    def _hour(self) -> int | None:
        try:
            day = datetime.date.fromisoformat(self.partition["date"])
            return ((day - datetime.date(1970, 1, 1)).days * 24 + int(self.partition["hour"])) * _HOUR_NS
        except (KeyError, ValueError):
            return None


class FileWriter:
    """Called by `mapInArrow` in each task of a batch: rows in, one line for each file out."""

    def __init__(self, place: Place, prefix: str, schema: pa.Schema, *, partitioned: bool, keeps_topic: bool) -> None:
        self._place = place
        self._prefix = prefix
        self._partitioned = partitioned
        import pyarrow as pa

        # Of the files: what the folders say is not in them, but for Iceberg, which reads it there.
        dropped = () if keeps_topic or not partitioned else ("topic",)
        self._schema = pa.schema([column for column in schema if column.name not in dropped])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        parts: dict[tuple[str, int], _Part] = {}
        told: list[DataFile] = []
        held = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            for key, rows in self._split(batch):
                part = parts.pop(key, None) or _Part(self._place, self._folder(key), self._prefix, self._schema)
                # The one that was used last is the last.
                parts[key] = part
                held += part.add(rows.select(self._schema.names).cast(self._schema))
                if part.held >= _ROW_GROUP_BYTES:
                    held -= part.flush()
            while held > _HELD_BYTES:
                held -= max(parts.values(), key=lambda part: part.held).flush()
            while len(parts) > _OPEN_FILES:
                oldest = parts.pop(next(iter(parts)))
                held -= oldest.held
                told.append(oldest.close())
        told += [part.close() for part in parts.values()]
        lines = [json.dumps(asdict(file)) for file in told]
        yield pa.RecordBatch.from_arrays([pa.array(lines, pa.string())], names=["file"])

    def _split(self, batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, int], pa.Table]]:
        import pyarrow as pa
        import pyarrow.compute as compute

        rows = pa.Table.from_batches([batch])
        if not self._partitioned:
            yield ("", 0), rows
            return
        times = batch.column("timestamp_ns")
        ends = compute.min_max(times)
        first, last = ends["min"].as_py() // _HOUR_NS, ends["max"].as_py() // _HOUR_NS
        topics = compute.unique(batch.column("topic")).to_pylist()
        for topic in topics:
            of_topic = rows.filter(compute.equal(rows["topic"], topic)) if len(topics) > 1 else rows
            if first == last:
                yield (topic, first), of_topic
                continue
            # From the first hour on no number is below 0, where a division of whole numbers would round up.
            since = compute.subtract(of_topic["timestamp_ns"], first * _HOUR_NS)
            hours = compute.divide(since, _HOUR_NS)
            for hour in compute.unique(hours).to_pylist():
                yield (topic, first + hour), of_topic.filter(compute.equal(hours, hour))

    def _folder(self, key: tuple[str, int]) -> dict[str, str]:
        if not self._partitioned:
            return {}
        import pyarrow as pa

        topic, hours = key
        day, hour = divmod(hours, 24)
        date = pa.scalar(day, pa.int32()).cast(pa.date32()).as_py()
        return {"topic": topic, "date": date.isoformat(), "hour": f"{hour:02d}"}


class _Part:
    """The file of one folder that a task is writing."""

    def __init__(self, place: Place, partition: dict[str, str], prefix: str, schema: pa.Schema) -> None:
        from pyarrow import parquet

        self.held = 0
        self._place = place
        self._partition = partition
        # The table has the value; a name with a percent sign is not opened by all who read tables.
        folder = "".join(f"{key}={re.sub('[^A-Za-z0-9._-]', '_', value)}/" for key, value in partition.items())
        self._path = f"{folder}{prefix}-{secrets.token_hex(8)}.parquet"
        self._rows: list[pa.Table] = []
        self._files = place.files()
        if place.is_local:
            self._files.create_dir(folder or ".", recursive=True)
        self._footer: list[Any] = []
        self._stream = self._files.open_output_stream(self._path)
        columns = set(schema.names)
        if "value" in columns and "timestamp_ns" in columns and "topic" not in columns:
            # Messages: only this column repeats itself, and only these are worth least and greatest values. Iceberg,
            # which has the topic in its files, wants those of all.
            how: dict[str, Any] = {
                "use_dictionary": [name for name in ("node",) if name in columns],
                "write_statistics": [name for name in ("offset", "timestamp", "timestamp_ns") if name in columns],
            }
        else:
            how = {}
        self._writer = parquet.ParquetWriter(
            self._stream, schema, compression="zstd", compression_level=1, metadata_collector=self._footer, **how
        )

    def add(self, rows: pa.Table) -> int:
        self._rows.append(rows)
        size = int(rows.nbytes)
        self.held += size
        return size

    def flush(self) -> int:
        """Write what is held. How many bytes that were."""
        import pyarrow as pa

        if self._rows:
            self._writer.write_table(pa.concat_tables(self._rows))
        size, self.held, self._rows = self.held, 0, []
        return size

    def close(self) -> DataFile:
        self.flush()
        self._writer.close()
        self._stream.close()
        if self._place.is_local:
            path = Path(self._place.text) / self._path
            _sync(path)
            _sync_folders(path.parent, Path(self._place.text))
        size = int(self._files.get_file_info(self._path).size)
        return _described(self._footer[0], self._path, size, self._partition)


def partition_of(path: str) -> dict[str, str]:
    """What the names of a file's folders say."""
    folders = (part.partition("=") for part in path.split("/")[:-1] if "=" in part)
    found = {key: urllib.parse.unquote(value) for key, _, value in folders}
    if found.get("hour", "").isdigit():
        found["hour"] = f"{int(found['hour']):02d}"
    return found


def describe(place: Place, path: str, partition: dict[str, str]) -> DataFile:
    """What the footer of a file says."""
    from pyarrow import parquet

    files = place.files()
    with files.open_input_file(path) as file:
        footer = parquet.ParquetFile(file).metadata
    return _described(footer, path, int(files.get_file_info(path).size), partition)


def _described(footer: Any, path: str, size: int, partition: dict[str, str]) -> DataFile:
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    # By their whole path: a field inside of another column may have the same name.
    paths = [footer.schema.column(number).path for number in range(len(footer.schema))]
    for name in _NOTED:
        found = []
        for group in range(footer.num_row_groups if name in paths else 0):
            noted = footer.row_group(group).column(paths.index(name)).statistics
            # The rows of a query may have anything under these names. Of a column with nulls nothing is noted.
            if noted is None or not noted.has_min_max or type(noted.min) is not int or noted.null_count != 0:
                break
            found += [noted.min, noted.max]
        else:
            if found:
                least[name], most[name] = min(found), max(found)
    return DataFile(path, footer.num_rows, size, least, most, partition)


def merge_files(place: Place, files: Sequence[DataFile], schema: pa.Schema, prefix: str) -> DataFile:
    """Write the rows of files that are in one folder to a new one there. What the folder says stays out of it."""
    import pyarrow as pa
    from pyarrow import parquet

    partition = files[0].partition
    columns = pa.schema([column for column in schema if column.name not in partition])
    reader = FileReader(place, columns)
    opened = place.files()
    part = _Part(place, partition, prefix, columns)
    for file in files:
        with opened.open_input_file(file.path) as stream:
            for batch in reader.rows_of(parquet.ParquetFile(stream), {}):
                part.add(pa.Table.from_batches([batch]))
                if part.held >= _ROW_GROUP_BYTES:
                    part.flush()
    return part.close()


def fitted(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """A column as a table has it: fields of structs go by their names, and those that are missing are null."""
    import pyarrow as pa

    if column.type == wanted:
        return column
    if pa.types.is_struct(wanted) and pa.types.is_struct(column.type):
        there = {field.name: at for at, field in enumerate(column.type)}
        parts = [
            fitted(column.field(there[field.name]), field.type)
            if field.name in there
            else pa.nulls(len(column), field.type)
            for field in wanted
        ]
        return pa.StructArray.from_arrays(parts, fields=list(wanted), mask=column.is_null())
    if pa.types.is_list(wanted) and pa.types.is_list(column.type):
        items = fitted(column.values, wanted.value_type)
        return pa.ListArray.from_arrays(_offsets(column), items, type=wanted, mask=column.is_null())
    if pa.types.is_map(wanted) and pa.types.is_map(column.type):
        keys, items = fitted(column.keys, wanted.key_type), fitted(column.items, wanted.item_type)
        return pa.MapArray.from_arrays(_offsets(column), keys, items, type=wanted, mask=column.is_null())
    return column.cast(wanted)


def _offsets(column: Any) -> pa.Array:
    """Where the lists of a column begin, in an array of its own: a part of another is not taken."""
    import pyarrow.compute as compute

    return compute.add(column.offsets, 0)


class FileReader:
    """Called by `mapInArrow` over rows (path, topic, date, hour): gives the rows of the files.

    For stores that Spark itself cannot read without jars of Hadoop.
    """

    def __init__(self, place: Place, schema: pa.Schema) -> None:
        self._place = place
        self._schema = schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyarrow import parquet

        files = self._place.files()
        for wanted in batches:
            for line in wanted.column(0).to_pylist():
                file = DataFile(**json.loads(line))
                with files.open_input_file(file.path) as opened:
                    yield from self.rows_of(parquet.ParquetFile(opened), file.partition)

    def rows_of(self, source: Any, partition: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
        """The rows of one Parquet file, with what its folders say."""
        there = [name for name in self._schema.names if name in source.schema_arrow.names]
        for batch in source.iter_batches(batch_size=10_000, columns=there):
            yield self._complete(batch, partition)

    def _complete(self, batch: pa.RecordBatch, partition: Mapping[str, str]) -> pa.RecordBatch:
        import pyarrow as pa

        columns = []
        for wanted in self._schema:
            if wanted.name in batch.schema.names:
                column = fitted(batch.column(wanted.name), wanted.type)
            elif wanted.name in partition:
                column = pa.repeat(pa.scalar(partition[wanted.name]).cast(wanted.type), batch.num_rows)
            else:
                column = pa.nulls(batch.num_rows, wanted.type)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the device."""
    _sync(folder)


def _sync_folders(folder: Path, root: Path) -> None:
    """A folder, and those above it up to the root, which may be new."""
    while True:
        sync_folder(folder)
        if folder == root:
            return
        folder = folder.parent
