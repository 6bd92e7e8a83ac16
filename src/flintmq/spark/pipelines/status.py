"""`flintmq pipeline status`: how far streams are, by what brokers and checkpoints know of them. Starts no Spark.

A stream in log mode keeps a reader position at every broker, and its checkpoint names the reader. So brokers say who
reads which topics and how far behind each reader is, and a checkpoint says at which batch its query is. A query that
reports itself to brokers, as pipelines do, is shown with its last batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from flintmq.errors import ConnectError, HttpError, PipelineError
from flintmq.spark.pipelines import common
from flintmq.spark.pipelines.archive import query_id
from flintmq.spark.pipelines.screen import say
from flintmq.spark.shipped.files import Place
from flintmq.spark.shipped.net import Broker, Cluster, Web
from flintmq.spark.shipped.options import Network, read_sink_options
from flintmq.spark.shipped.reasons import reason

__all__ = ["Batch", "Known", "Query", "Reader", "add_arguments", "checkpoint_batch", "known", "readers", "run"]


@dataclass(frozen=True)
class Reader:
    """How far a reader of a topic is on one node."""

    reader: str
    topic: str
    node: str
    #: Messages that are durable and that it has not passed; and about what they take up.
    behind: int
    bytes: int
    #: Seconds since it was last moved, by the clock of this machine.
    moved: float


@dataclass(frozen=True)
class Batch:
    """Where the query of a checkpoint is."""

    checkpoint: str
    #: The last batch that was planned, -1 for none, and whether it is done.
    batch: int
    done: bool
    #: The names of its readers, where its sources are topics in log mode.
    readers: tuple[str, ...]
    #: Spark's lasting name of the query.
    id: str = ""


@dataclass(frozen=True)
class Query:
    """What a query last reported of itself, to whichever broker heard it last."""

    id: str
    name: str
    #: running, ended or failed.
    state: str
    error: str
    topics: tuple[str, ...]
    writes: tuple[str, ...]
    #: The last batch, None for none, and the seconds that it took.
    batch: int | None
    batch_seconds: float | None
    rows: int
    rows_per_second: float
    lag: int | None
    state_rows: int
    state_bytes: int
    #: Seconds since it last reported, by the clocks of this machine and of the broker.
    reported: float


class Known(NamedTuple):
    """What brokers know of streams, and what is to be said of those that did not answer."""

    readers: list[Reader]
    queries: list[Query]
    failures: list[str]


def readers(network: Network, topics: Sequence[str] = ()) -> tuple[list[Reader], list[str]]:
    """Return the readers of these topics, or of all, on all brokers; and what is to be said of who did not answer."""
    found = known(network, topics)
    return found.readers, found.failures


def known(network: Network, topics: Sequence[str] = ()) -> Known:
    """Ask all brokers for the readers and the queries of these topics, or of all. ConnectError if none answers."""
    web = Web(network)
    cluster = Cluster(network, web)
    try:
        found = cluster.survey()
        failures = list(found.failures)
        if not found.brokers and failures:
            raise ConnectError("; ".join(failures))
        positions: list[Reader] = []
        reports: dict[str, Mapping[str, Any]] = {}
        for broker in found.brokers:
            if not broker.has_log:
                continue
            try:
                for topic in topics or cluster.topics(broker):
                    positions += _readers_of(web, broker, topic)
                for report in _reports_of(web, broker):
                    if report["at"] >= reports.get(report["id"], report)["at"]:
                        reports[report["id"]] = report
            except (ConnectError, HttpError) as exc:
                failures.append(str(exc))
    finally:
        cluster.close()
    queries = [_query(one) for one in reports.values()]
    wanted = set(topics)
    queries = [one for one in queries if not wanted or wanted & {*one.topics, *one.writes}]
    return Known(
        sorted(positions, key=lambda one: (one.reader, one.topic, one.node)),
        sorted(queries, key=lambda one: (one.name, one.id)),
        failures,
    )


def _reports_of(web: Web, broker: Broker) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = web.ask("GET", broker.http, "/pipeline/report")["pipelines"]
    except HttpError as exc:
        if exc.status == 404:
            # A version before reports.
            return []
        raise
    return found


def _query(report: Mapping[str, Any]) -> Query:
    facts = {name: report[name] for name in Query.__dataclass_fields__}
    facts |= {"topics": tuple(report["topics"]), "writes": tuple(report["writes"])}
    return Query(**facts | {"reported": round(max(0.0, time.time() - report["reported"] / 1e9), 1)})


def _readers_of(web: Web, broker: Broker, topic: str) -> list[Reader]:
    try:
        said = web.ask("GET", broker.http, "/log/position", topic=topic)
    except HttpError as exc:
        if exc.status in (400, 404):
            # It has no such topic, or no log of it.
            return []
        raise
    now = time.time()
    return [
        Reader(
            str(one["reader"]),
            topic,
            broker.node,
            int(one["lag"]),
            int(one["bytes"]),
            round(max(0.0, now - one["moved"] / 1e9), 1),
        )
        for one in said["positions"]
    ]


def checkpoint_batch(place: Place) -> Batch:
    """Return where the query of a checkpoint is. PipelineError if it is none."""
    import pyarrow.fs

    files = place.files()

    def last(folder: str) -> int:
        try:
            found = files.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True))
        except FileNotFoundError:
            return -1
        return max((int(one.base_name) for one in found if one.base_name.isdecimal()), default=-1)

    lines: list[str] = []
    try:
        if not place.exists("metadata"):
            raise PipelineError(f"{place} is no checkpoint of a stream")
        planned, done = last("offsets"), last("commits")
        lines = place.read_text(f"offsets/{planned}").splitlines()[2:] if planned >= 0 else []
        id = query_id(place)
    except OSError as exc:
        raise PipelineError(f"{place} cannot be read: {reason(exc)}") from exc
    except (ValueError, KeyError, TypeError, IndexError):
        # Spark has not written it whole yet.
        id = ""
    names = {_reader(line) for line in lines} - {""}
    return Batch(str(place), planned, done >= planned, tuple(sorted(names)), id)


def _reader(line: str) -> str:
    """The reader that an offset of a source names, if it is one of ours."""
    try:
        read = json.loads(line)
    except ValueError:
        return ""
    return str(read.get("reader") or "") if isinstance(read, dict) and read.get("mode") == "log" else ""


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show the readers of topics and their lag, from brokers and checkpoints."
    parser.add_argument("topics", metavar="TOPIC", nargs="*", help="only these topics")
    parser.add_argument(
        "--checkpoint",
        metavar="URI",
        action="append",
        default=[],
        help="only the query of this checkpoint; may be repeated",
    )
    parser.add_argument(
        "--storage-option", metavar="KEY=VALUE", type=common.pair, action="append", default=[], help="for the store"
    )
    common.broker_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    common.check_network_only(arguments)
    batches = [checkpoint_batch(common.place_of(arguments, where)) for where in arguments.checkpoint]
    network = read_sink_options(common.network_options(arguments)).network
    found, queries, failures = known(network, arguments.topics)
    if batches:
        wanted = {name for batch in batches for name in batch.readers}
        found = [one for one in found if one.reader.removeprefix("temporary:") in wanted or one.reader in wanted]
        queries = [one for one in queries if one.id in {batch.id for batch in batches}]
    for failure in failures:
        say(failure)
    if arguments.json:
        print_json = {
            "readers": [asdict(one) for one in found],
            "queries": [asdict(one) for one in queries],
            "checkpoints": [asdict(one) for one in batches],
        }
        sys.stdout.write(json.dumps(print_json) + "\n")
    else:
        sys.stdout.write(_table(found, queries, batches))
    return 1 if failures else 0


def _table(found: Sequence[Reader], queries: Sequence[Query], batches: Sequence[Batch]) -> str:
    lines = [
        f"{batch.checkpoint}: batch {batch.batch}{'' if batch.done else ', under way or to be done again'}"
        if batch.batch >= 0
        else f"{batch.checkpoint}: no batch yet"
        for batch in batches
    ]
    lines += _columns([_query_row(one) for one in queries], ("QUERY", "STATE", "READS"))
    if queries:
        lines.append("")
    rows: list[Mapping[str, str]] = [
        {
            "READER": one.reader,
            "TOPIC": one.topic,
            "NODE": one.node[:8],
            "BEHIND": f"{one.behind:,}",
            "MB": f"{one.bytes / 1e6:,.1f}",
            "MOVED": f"{one.moved:,.0f} s ago",
        }
        for one in found
    ]
    if not rows:
        return "\n".join([*lines, "no readers: no Spark query has a position in these logs"]) + "\n"
    return "\n".join([*lines, *_columns(rows, ("READER", "TOPIC", "NODE"))]) + "\n"


def _query_row(query: Query) -> dict[str, str]:
    seconds = query.batch_seconds
    return {
        "QUERY": query.name or query.id,
        "STATE": query.state,
        "READS": ",".join(query.topics) or "-",
        "BATCH": "-" if query.batch is None else f"{query.batch:,}",
        "TOOK": "-" if seconds is None else f"{seconds:,.1f} s",
        "ROWS/S": f"{query.rows_per_second:,.0f}",
        "LAG": "-" if query.lag is None else f"{query.lag:,}",
        "STATE MB": f"{query.state_bytes / 1e6:,.1f}",
        "REPORTED": f"{query.reported:,.0f} s ago",
    }


def _columns(rows: Sequence[Mapping[str, str]], texts: Sequence[str]) -> list[str]:
    """A line for each row, below one of names; texts are on the left of their columns, numbers on the right."""
    if not rows:
        return []
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}

    def line(row: Mapping[str, str]) -> str:
        cells = (row[name].ljust(width) if name in texts else row[name].rjust(width) for name, width in widths.items())
        return "  ".join(cells).rstrip()

    return [line({name: name for name in widths}), *map(line, rows)]
