"""The options of ``format("nsq")``: one table, read and checked before anything is asked of the network.

Spark hands keys over in lower case; here they have the names of the documents again. Whatever is wrong is an
OptionError of one sentence that says what would be right. Secrets are in no text that comes from here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from flintmq.addresses import split
from flintmq.errors import OptionError
from flintmq.spark.shipped.columns import COLUMNS
from flintmq.spark.shipped.where import Where, read_where

__all__ = [
    "OPTIONS",
    "Network",
    "Option",
    "SinkOptions",
    "SourceOptions",
    "Start",
    "check_names",
    "given_options",
    "read_sink_options",
    "read_source_options",
]

#: A topic or a channel, as NSQ names them: ``flintmq.protocol.wire.valid_name``, which does not travel to executors.
NAME = re.compile(r"(?=.{1,64}\Z)[.a-zA-Z0-9_-]+(#ephemeral)?")
#: What is said of a name that is none.
NAME_RULE = "1 to 64 letters, digits and ._- make one; #ephemeral counts, too"
READER_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")

#: The last time that brokers know, in ns since 1970.
_LATEST = (1 << 63) - 1
#: Rows of an Arrow batch, where messages have their bodies.
_BATCH_ROWS = 10_000
_SIZE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Option(NamedTuple):
    """One option: who takes it, its default as the documents show it, and what it is for."""

    name: str
    #: source, sink or both.
    side: str
    default: str
    text: str


OPTIONS = (
    Option("nsq.lookupd.http.addresses", "both", "", "nsqlookupds to ask for brokers, as host:port or URL"),
    Option("nsq.nsqd.addresses", "both", "", "brokers, as host:port of their TCP side"),
    Option("nsq.nsqd.http.addresses", "both", "", "their HTTP sides, where these cannot be asked for"),
    Option("nsq.tls", "both", "false", "TLS on connections to brokers"),
    Option("nsq.tls.ca", "both", "", "a file of certificates to trust, in place of the system's"),
    Option("nsq.tls.cert", "both", "", "our certificate, for brokers that ask for one"),
    Option("nsq.tls.key", "both", "", "its key"),
    Option("nsq.tls.verify", "both", "true", "whether a broker must prove who it is"),
    Option("nsq.auth.secret", "both", "", "for brokers that ask for AUTH"),
    Option("nsq.http.token", "both", "", "sent as a bearer token with every HTTP request"),
    Option("nsq.compression", "both", "none", "none or deflate, on TCP connections"),
    Option("subscribe", "source", "", "topics, separated by commas"),
    Option("subscribePattern", "source", "", "a regular expression that whole topic names match"),
    Option("channel", "source", "", "the channel that spool mode consumes"),
    Option("mode", "source", "auto", "log, spool, or auto: log where every broker has one"),
    Option("startingOffsets", "source", "latest for streams, earliest for batches", "earliest, latest or JSON"),
    Option("startingTimestamp", "source", "", "begin with what was published at or after a time"),
    Option("endingOffsets", "source", "latest", "where a batch ends: latest or JSON"),
    Option("endingTimestamp", "source", "", "end a batch before what was published at or after a time"),
    Option("where", "source", "", "read only the rows of a batch that fit a condition on places and times, in SQL"),
    Option("columns", "source", "all of them", "columns to read, separated by commas; the others are null"),
    Option("maxMessagesPerTrigger", "source", "", "at most so many messages in a micro-batch"),
    Option("maxOffsetsPerTrigger", "source", "", "the same, under the name that Kafka's source has for it"),
    Option("maxBytesPerTrigger", "source", "", "about so many bytes in a micro-batch"),
    Option("minMessagesPerTrigger", "source", "", "wait for so many messages before a micro-batch starts"),
    Option("maxTriggerDelay", "source", "15m", "but no longer than this"),
    Option("minPartitions", "source", "", "cut ranges so that there are at least so many partitions"),
    Option("maxRecordsPerPartition", "source", "", "cut ranges so that no partition has more"),
    Option("failOnDataLoss", "source", "true", "fail when messages are gone before they were read"),
    Option("readerName", "source", "generated, stored in the checkpoint", "under which brokers keep files for a query"),
    Option(
        "temporaryReader",
        "source",
        "false",
        "the query keeps no checkpoint: brokers keep files for it only while it runs, and for minutes after a kill",
    ),
    Option("spoolLocation", "source", "", "the folder of spool mode; needed unless Spark runs on one machine"),
    Option("spoolMaxBytes", "source", "1g", "take no more from the channel while the spool is larger"),
    Option("spool.maxInFlight", "source", "20000", "messages taken and not yet in the spool"),
    Option("spool.flushIntervalMs", "source", "500", "a message is in the spool after so long, or sooner"),
    Option("fetch.numRetries", "both", "3", "tries after a failure that may pass"),
    Option("fetch.timeoutMs", "both", "30000", "how long an answer may take"),
    Option("arrowBatchRows", "source", "10000", "rows handed to Spark at a time"),
    Option("topic", "sink", "", "where all rows go; without it their column `topic` says so"),
    Option("mpubMaxMessages", "sink", "10000", "messages in one MPUB, or in one chunk of a staged write"),
    Option("mpubMaxBytes", "sink", "1m", "bytes in one of them; a larger message goes alone"),
    Option("idempotent", "sink", "auto", "true: fail where brokers cannot stage; false: publish without staging"),
    Option("writeId", "sink", "generated for every batch write", "the name of a batch write that may be repeated"),
    Option("home", "sink", "found or chosen at the first batch", "the broker that keeps the query's decisions"),
    Option("repeatedBatch", "sink", "stop", "stop or skip, when a batch runs again with other rows"),
)

_NAMES = {option.name.lower(): option for option in OPTIONS}
#: Spark hands a stream's own options to its sink, too, and what its catalog notes of a table to the table's source.
_OF_SPARK = {
    *("checkpointlocation", "queryname", "outputmode"),
    *("provider", "owner", "location", "external", "comment", "collation", "is_managed_location"),
    *("serialization.format", "transient_lastddltime"),
}
#: What only a table of a catalog has.
_OF_CATALOG = ("provider", "serialization.format")


class Start(NamedTuple):
    """Where reading begins or ends: ``earliest``, ``latest``, ``offsets`` by topic and node, or ``time`` in ns."""

    kind: str
    offsets: dict[str, dict[str, int]] | None = None
    time: int = 0


@dataclass(frozen=True, kw_only=True)
class Network:
    """Who is asked, and how."""

    lookupds: tuple[str, ...] = ()
    nsqds: tuple[str, ...] = ()
    http_addresses: tuple[str, ...] = ()
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_verify: bool = True
    auth_secret: str = field(default="", repr=False)
    http_token: str = field(default="", repr=False)
    deflate: bool = False
    retries: int = 3
    timeout: float = 30.0


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a reader needs to know. Times are seconds, sizes bytes, 0 is "no limit"."""

    network: Network
    topics: tuple[str, ...] = ()
    pattern: str = ""
    channel: str = ""
    mode: str = "auto"
    #: None: as it is usual for streams or batches.
    starting: Start | None = None
    ending: Start | None = None
    where: Where | None = None
    #: The columns that are not null; None: all.
    columns: frozenset[str] | None = None
    max_messages: int = 0
    max_bytes: int = 0
    min_messages: int = 0
    max_delay: float = 900.0
    min_partitions: int = 0
    max_records: int = 0
    fail_on_data_loss: bool = True
    reader_name: str = ""
    temporary_reader: bool = False
    spool_location: str = ""
    spool_max_bytes: int = 1 << 30
    spool_in_flight: int = 20_000
    spool_flush_interval: float = 0.5
    batch_rows: int = 10_000

    def wants(self, topic: str) -> bool:
        return topic in self.topics if self.topics else re.fullmatch(self.pattern, topic) is not None


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """What a writer needs to know."""

    network: Network
    topic: str = ""
    max_messages: int = 10_000
    max_bytes: int = 1 << 20
    idempotent: str = "auto"
    write_id: str = ""
    #: A node id or an address; nothing: found or chosen.
    home: str = ""
    repeated_batch: str = "stop"
    #: The checkpoint of a stream, as Spark tells it to the sink.
    checkpoint: str = ""


def given_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return what the user gave, of the keys that Spark hands over.

    For CREATE TABLE that is the table's properties, Spark's own and any that somebody made up; each option of OPTIONS
    is among them twice, as itself and with ``option.`` before it. ``path`` is where Spark would keep such a table.
    """
    keys = {key.lower(): key for key in options}
    if "provider" in keys:
        marked = {key.removeprefix("option."): options[name] for key, name in keys.items() if key.startswith("option.")}
        return {key: value for key, value in marked.items() if key != "path" and key not in _OF_SPARK}
    dropped = {*_OF_SPARK, "path"} if any(key in keys for key in _OF_CATALOG) else _OF_SPARK
    return {name: options[name] for key, name in keys.items() if key not in dropped}


def check_names(options: Mapping[str, str], side: str = "") -> None:
    """Is every key one that we know, and of this side? OptionError names the nearest right one."""
    for key in given_options(options):
        known = _NAMES.get(key.lower())
        if key.lower() == "path":
            raise OptionError('format "nsq" takes no path: say load() or save() alone, and name topics by an option')
        if known is None:
            near = difflib.get_close_matches(key.lower(), _NAMES, n=1, cutoff=0.5)
            hint = f": did you mean {_NAMES[near[0]].name}?" if near else "; all of them are in docs/spark.md"
            raise OptionError(f'format "nsq" has no option {key}{hint}')
        if side and known.side not in (side, "both"):
            raise OptionError(f"{known.name} is an option of the {known.side}, not of the {side}: take it away")


def read_source_options(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    check_names(options, "source")
    given = _Given(given_options(options))
    topics = given.names("subscribe")
    pattern = given.text("subscribePattern")
    mode = given.choice("mode", ("auto", "log", "spool"))
    # A batch of a spool reads files and asks nobody.
    reads_files = mode == "spool" and not streaming
    network = _read_network(given, needed=not reads_files)
    if bool(topics) == bool(pattern) and not reads_files:
        raise OptionError("say which topics to read by one of the options subscribe and subscribePattern")
    try:
        re.compile(pattern)
    except re.error as exc:
        raise OptionError(f"subscribePattern is no regular expression: {exc}") from exc
    max_messages = given.count("maxMessagesPerTrigger", 0)
    alias = given.count("maxOffsetsPerTrigger", 0)
    if max_messages and alias and max_messages != alias:
        raise OptionError("maxMessagesPerTrigger and maxOffsetsPerTrigger are the same: give one of them")
    columns = given.columns("columns")
    # Rows without bodies are small, and each batch has its price on the way to Java.
    batch_rows = _BATCH_ROWS if columns is None or "value" in columns else 10 * _BATCH_ROWS
    read = SourceOptions(
        network=network,
        topics=topics,
        pattern=pattern,
        channel=given.text("channel"),
        mode=mode,
        starting=given.position("startingOffsets", "startingTimestamp", ("earliest", "latest")),
        ending=given.position("endingOffsets", "endingTimestamp", ("latest",)),
        where=read_where(given.text("where")) if given.text("where") else None,
        columns=columns,
        max_messages=max_messages or alias,
        max_bytes=given.size("maxBytesPerTrigger", 0),
        min_messages=given.count("minMessagesPerTrigger", 0),
        max_delay=given.duration("maxTriggerDelay", 900.0),
        min_partitions=given.count("minPartitions", 0),
        max_records=given.count("maxRecordsPerPartition", 0),
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        reader_name=given.text("readerName"),
        temporary_reader=given.flag("temporaryReader", False),
        spool_location=given.text("spoolLocation").removeprefix("file://"),
        spool_max_bytes=given.size("spoolMaxBytes", 1 << 30) or 1 << 30,
        spool_in_flight=given.count("spool.maxInFlight", 20_000),
        spool_flush_interval=given.count("spool.flushIntervalMs", 500) / 1000,
        batch_rows=given.count("arrowBatchRows", batch_rows),
    )
    if read.channel and not NAME.fullmatch(read.channel):
        raise OptionError(f'channel: "{read.channel}" is no name of a channel: {NAME_RULE}')
    if read.mode == "spool" and streaming and not read.channel:
        raise OptionError("spool mode consumes a channel: name it by the option channel")
    if "://" in read.spool_location:
        raise OptionError(
            f"spoolLocation: {read.spool_location} is a URI, and a spool is synced, locked and shortened as files of a "
            "disk are: give a folder that all machines have mounted; checkpoints and tables may be on a store"
        )
    if reads_files and not read.spool_location:
        raise OptionError(
            "a plain nsqd cannot be read as a batch: flintmq.spark.drain() takes what is there into a spool"
        )
    if read.mode == "log" and read.channel:
        raise OptionError("log mode reads without a channel: take the option channel away, or say mode=spool")
    if read.mode == "spool" and (read.ending or (read.starting and read.starting.kind != "earliest")):
        raise OptionError("spool mode has no startingOffsets or endingOffsets: a channel knows where it stands")
    if read.reader_name and not READER_NAME.fullmatch(read.reader_name):
        raise OptionError("readerName: 1 to 128 letters, digits and ._:- make a name")
    if read.temporary_reader and len(read.reader_name) > 100:
        raise OptionError("readerName: a temporary reader's name has 100 characters at most")
    if streaming and read.where:
        raise OptionError("where is for batches (spark.read): filter a stream by filter()")
    if streaming and read.ending:
        raise OptionError("a stream has no end: endingOffsets and endingTimestamp are for batches (spark.read)")
    if read.min_messages and read.max_messages and read.min_messages > read.max_messages:
        raise OptionError("minMessagesPerTrigger must not be above maxMessagesPerTrigger")
    if not streaming:
        for name in ("maxMessagesPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minMessagesPerTrigger"):
            if given.text(name):
                raise OptionError(f"a batch reads its whole range: {name} is for streams (spark.readStream)")
    return read


def read_sink_options(options: Mapping[str, str]) -> SinkOptions:
    check_names(options, "sink")
    given = _Given(given_options(options))
    read = SinkOptions(
        network=_read_network(given),
        topic=given.text("topic"),
        max_messages=given.count("mpubMaxMessages", 10_000),
        max_bytes=given.size("mpubMaxBytes", 1 << 20) or 1 << 20,
        idempotent=given.choice("idempotent", ("auto", "true", "false")),
        write_id=given.text("writeId"),
        home=given.text("home"),
        repeated_batch=given.choice("repeatedBatch", ("stop", "skip")),
        # Among what Spark itself hands over.
        checkpoint=_Given(options).text("checkpointLocation"),
    )
    if read.topic and not NAME.fullmatch(read.topic):
        raise OptionError(f'topic: "{read.topic}" is no name of a topic: {NAME_RULE}')
    if read.write_id and not re.fullmatch(r"[!-~]{1,64}", read.write_id):
        raise OptionError("writeId: 1 to 64 printable ASCII characters without space")
    return read


def _read_network(given: _Given, needed: bool = True) -> Network:
    network = Network(
        lookupds=given.addresses("nsq.lookupd.http.addresses"),
        nsqds=given.addresses("nsq.nsqd.addresses"),
        http_addresses=given.addresses("nsq.nsqd.http.addresses"),
        tls=given.flag("nsq.tls", False),
        tls_ca=given.text("nsq.tls.ca"),
        tls_cert=given.text("nsq.tls.cert"),
        tls_key=given.text("nsq.tls.key"),
        tls_verify=given.flag("nsq.tls.verify", True),
        auth_secret=given.text("nsq.auth.secret"),
        http_token=given.text("nsq.http.token"),
        deflate=given.choice("nsq.compression", ("none", "deflate")) == "deflate",
        retries=given.count("fetch.numRetries", 3, least=0),
        timeout=given.count("fetch.timeoutMs", 30_000) / 1000,
    )
    if needed and given.is_empty:
        raise OptionError(
            "there are no options. Spark hands the OPTIONS of a table in a catalog to no source in Python: give them "
            "with the statement, SELECT … FROM t WITH (subscribe = 'orders', …) or INSERT INTO t WITH (…), or make a "
            "TEMPORARY VIEW, which keeps them"
        )
    if needed and not (network.lookupds or network.nsqds or network.http_addresses):
        raise OptionError("say where the brokers are by nsq.lookupd.http.addresses or nsq.nsqd.addresses")
    if network.lookupds and (network.nsqds or network.http_addresses):
        raise OptionError("name the nsqlookupds or the brokers themselves, not both")
    if network.tls_key and not network.tls_cert:
        raise OptionError("nsq.tls.key is the key of a certificate: name that by nsq.tls.cert")
    return network


class _Given:
    """What the user wrote, read value by value."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {key.lower(): str(value) for key, value in options.items()}

    @property
    def is_empty(self) -> bool:
        return not self._values

    def text(self, name: str) -> str:
        return self._values.get(name.lower(), "").strip()

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name).lower()
        if text not in ("", "true", "false"):
            raise OptionError(f'{name}: "{text}" is neither true nor false')
        return text == "true" if text else default

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        text = self.text(name).lower()
        if name == "nsq.compression" and text == "snappy":
            raise OptionError("nsq.compression: snappy needs more than Python's standard library has: say deflate")
        if text and text not in choices:
            raise OptionError(f'{name}: "{text}" is none of {", ".join(choices)}')
        return text or choices[0]

    def count(self, name: str, default: int, least: int = 1) -> int:
        text = self.text(name)
        if not text:
            return default
        if not re.fullmatch(r"\d{1,18}", text) or int(text) < least:
            raise OptionError(f'{name}: "{text}" is no whole number from {least} on')
        return int(text)

    def size(self, name: str, default: int) -> int:
        text = self.text(name).lower()
        if not text:
            return default
        found = re.fullmatch(r"(\d{1,15})\s*([kmgt]?)(?:i?b)?", text)
        if found is None or int(found[1]) == 0:
            raise OptionError(f'{name}: "{text}" is no size such as 1048576, 512k or 1g')
        return int(found[1]) * _SIZE_UNITS[found[2]]

    def duration(self, name: str, default: float) -> float:
        text = self.text(name).lower()
        if not text:
            return default
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d)", text)
        if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d)\s*", "", text):
            raise OptionError(f'{name}: "{text}" is no duration such as 500ms, 30s or 15m')
        return sum(float(number) * _TIME_UNITS[unit] for number, unit in parts)

    def names(self, name: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(part.strip() for part in self.text(name).split(",") if part.strip()))
        for found in names:
            if not NAME.fullmatch(found):
                raise OptionError(f'{name}: "{found}" is no name of a topic')
        return names

    def columns(self, name: str) -> frozenset[str] | None:
        """Names of columns, in any case, as Spark has them."""
        names = [part.strip().lower() for part in self.text(name).split(",") if part.strip()]
        for found in names:
            if found not in COLUMNS:
                near = difflib.get_close_matches(found, COLUMNS, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COLUMNS)}"
                raise OptionError(f'{name}: there is no column "{found}": {hint}')
        return frozenset(names) or None

    def addresses(self, name: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in self.text(name).split(",") if part.strip()))
        for address in found:
            text = address
            if "http" in name:
                text = re.sub(r"^https?://", "", address).partition("/")[0]
            try:
                split(text, unix=False)
            except OptionError as exc:
                shape = "host:port or http(s)://host:port" if "http" in name else "host:port"
                raise OptionError(f"{name}: each address is {shape}, separated by commas") from exc
        return found

    def position(self, offsets_name: str, time_name: str, words: tuple[str, ...]) -> Start | None:
        offsets, time = self.text(offsets_name), self.text(time_name)
        if offsets and time:
            raise OptionError(f"{offsets_name} and {time_name} exclude each other")
        if time:
            return Start("time", time=_read_time(time_name, time))
        if not offsets:
            return None
        if offsets.lower() in words:
            return Start(offsets.lower())
        return Start("offsets", offsets=_read_offsets(offsets_name, offsets, words))


def _read_time(name: str, text: str) -> int:
    """RFC 3339, or milliseconds since 1970 as Kafka's source takes them; in ns."""
    if re.fullmatch(r"\d{1,16}", text):
        return min(int(text) * 1_000_000, _LATEST)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise OptionError(f'{name}: "{text}" is no time such as 2026-01-31T08:00:00Z, nor milliseconds since 1970')
    # No message is from before 1970, or after 2262: brokers have no such times.
    return min(max(0, (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000), _LATEST)


def _read_offsets(name: str, text: str, words: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """``{"topic": {"node": 123}}``, or the JSON of an offset as it stands in a checkpoint or in the progress."""
    wrong = OptionError(f'{name}: neither {", ".join(words)} nor JSON such as {{"orders": {{"<node>": 123}}}}')
    try:
        read = json.loads(text)
    except ValueError:
        raise wrong from None
    if isinstance(read, dict) and isinstance(read.get("p"), dict) and read.get("v") == 1:
        read = read["p"]
    if not isinstance(read, dict):
        raise wrong
    found: dict[str, dict[str, int]] = {}
    for topic, nodes in read.items():
        if not isinstance(nodes, dict):
            raise wrong
        for node, where in nodes.items():
            value: Any = where.get("o") if isinstance(where, dict) else where
            if not isinstance(value, int) or isinstance(value, bool) or value < -2:
                raise wrong
            found.setdefault(topic, {})[node] = value
    return found
