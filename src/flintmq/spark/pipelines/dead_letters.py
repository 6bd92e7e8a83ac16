"""`flintmq pipeline dead-letters`: why messages of a channel died, and which of them to send back.

What a dead letter was (its channel, attempts, reason) is no part of its frame, so a reader of the log does not see it.
It is asked for over HTTP, by peeking into a channel of the dead-letter topic, and becomes a DataFrame, for SQL.

Sending back is the broker's own redrive: to the channel they came from and to no other, each once, across crashes. The
broker's redrive knows no filter. It leaves deferred messages alone, though: so those that do not fit are deferred
first, and put back when it is over. If that is cut off, they come back by themselves after the delay.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flintmq.errors import ConnectError, HttpError, PipelineError
from flintmq.spark.pipelines import common
from flintmq.spark.shipped.net import Cluster, Refused, Web
from flintmq.spark.shipped.options import read_sink_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Letters", "add_arguments", "as_table", "redrive", "report", "run"]

#: The channel that the broker's redrive takes from.
CHANNEL = "redrive"
#: So many are looked at unless told otherwise: all of them are held in memory, bodies too.
LIMIT = 100_000
_PAGE = 1000
#: How long those that do not go back are held aside, unless they are put back before.
_ASIDE_MILLISECONDS = 600_000
_POLL_SECONDS = 0.2
_COLUMNS = (
    "node string, id string, died timestamp, published timestamp, topic string, channel string, origin_id string, "
)
_COLUMNS += "attempts int, reason string, size bigint, value binary, text string"


@dataclass(frozen=True)
class Letters:
    """The dead letters of one channel, on the brokers that the options name (those of `format("nsq")`)."""

    topic: str
    channel: str
    network: Mapping[str, str]
    #: The channel of the dead-letter topic to look into.
    source: str = CHANNEL
    limit: int = LIMIT

    def nodes(self) -> Iterator[_Node]:
        """The brokers that have dead letters of this channel."""
        network = read_sink_options(self.network).network
        web = Web(network)
        try:
            found = False
            for broker in Cluster(network, web).brokers(strict=True):
                with contextlib.suppress(Refused):
                    said = web.ask("GET", broker.http, "/channel/redrive", topic=self.topic, channel=self.channel)
                    found = True
                    yield _Node(web, broker.http, said["dead_letter_topic"], self)
            if not found:
                raise PipelineError(
                    f"no broker has the channel {self.topic}/{self.channel}, or none knows dead letters"
                )
        except (ConnectError, HttpError) as exc:
            raise PipelineError(exc.reason if isinstance(exc, Refused) else str(exc)) from exc
        finally:
            web.close()


class _Node:
    """The dead letters on one broker."""

    def __init__(self, web: Web, address: str, dead_topic: str, letters: Letters) -> None:
        self.address = address
        self.dead_topic = dead_topic
        self._web = web
        self._letters = letters

    def ask(self, method: str, path: str, **query: object) -> dict[str, Any]:
        return self._web.ask(method, self.address, path, **query)

    def rows(self, *, make_channel: bool = False) -> Iterator[tuple[Any, ...]]:
        """Those that wait in the channel, the oldest first; through the topic's log where it has no channel yet."""
        channels = self._channels()
        letters = self._letters
        if channels is None:
            return
        if letters.source in channels:
            yield from self._peek("/channel/peek", channel=letters.source, state="ready")
        elif not channels:
            if make_channel:
                # The first channel of a topic gets everything that has piled up.
                self.ask("POST", "/channel/create", topic=self.dead_topic, channel=letters.source)
                yield from self._peek("/channel/peek", channel=letters.source, state="ready")
            else:
                yield from self._peek("/topic/peek")
        else:
            raise PipelineError(
                f"{self.dead_topic} has no channel {letters.source}, but {', '.join(sorted(channels))}: "
                "say which one to take them from by --from-channel"
            )

    def _channels(self) -> set[str] | None:
        """The channels of the dead-letter topic; None if nothing has died yet."""
        said = self.ask("GET", "/stats", format="json", topic=self.dead_topic)
        for topic in said.get("topics") or []:
            if topic["topic_name"] == self.dead_topic:
                return {channel["channel_name"] for channel in topic["channels"]}
        return None

    def _peek(self, path: str, **query: object) -> Iterator[tuple[Any, ...]]:
        after: dict[str, object] = {}
        count = 0
        while True:
            said = self.ask("GET", path, topic=self.dead_topic, limit=_PAGE, bytes="all", **query, **after)
            for message in said["messages"]:
                dead = message.get("dead")
                if not dead or (dead["topic"], dead["channel"]) != (self._letters.topic, self._letters.channel):
                    continue  # of another channel that shares the topic, or published there directly
                body = base64.b64decode(message["body"])
                yield (
                    self.address,
                    message["id"],
                    _time(dead["time"]),
                    _time(dead.get("published")),
                    dead["topic"],
                    dead["channel"],
                    dead["id"],
                    dead["attempts"],
                    dead["reason"],
                    message["size"],
                    body,
                    body.decode(errors="replace"),
                )
                count += 1
                if count >= self._letters.limit:
                    return
            if not said.get("next"):
                return
            after = {"after": said["next"]}


def as_table(spark: SparkSession, letters: Letters, *, make_channel: bool = False) -> DataFrame:
    """The dead letters that wait, with the columns of `_COLUMNS`: what they were, why they died, their body."""
    rows = [row for node in letters.nodes() for row in node.rows(make_channel=make_channel)]
    return spark.createDataFrame(rows, _COLUMNS)


def report(table: DataFrame, where: str | None = None) -> list[dict[str, Any]]:
    """How many died of what, hour by hour."""
    from pyspark.sql import functions as f

    chosen = _filtered(table, where)
    grouped = chosen.groupBy("topic", "channel", "reason", f.date_trunc("hour", "died").alias("hour")).agg(
        f.count(f.lit(1)).alias("messages"),
        f.sum("size").alias("bytes"),
        f.max("attempts").alias("attempts"),
        f.min("died").alias("first"),
        f.max("died").alias("last"),
        f.min_by("text", "died").alias("example"),
    )
    return [row.asDict() for row in grouped.orderBy("hour", "reason").collect()]


def redrive(spark: SparkSession, letters: Letters, *, where: str | None = None, rate: int = 0) -> tuple[int, int]:
    """Send those that fit back to the channel they came from. How many went, and how many stay."""
    table = as_table(spark, letters, make_channel=True)
    waiting = table.select("node", "id").collect()
    chosen = {(row["node"], row["id"]) for row in _filtered(table, where).select("node", "id").collect()}
    went = 0
    for node in letters.nodes():
        mine = [row["id"] for row in waiting if row["node"] == node.address]
        going = sum((node.address, message) in chosen for message in mine)
        staying = [message for message in mine if (node.address, message) not in chosen]
        if not going:
            continue
        try:
            for message in staying:
                _move(node, letters, "/message/defer", message, delay=_ASIDE_MILLISECONDS)
            went += _run_redrive(node, letters, going, rate)
        finally:
            for message in staying:
                _move(node, letters, "/message/requeue", message)
    return went, len(waiting) - went


def _run_redrive(node: _Node, letters: Letters, count: int, rate: int) -> int:
    where = {"topic": letters.topic, "channel": letters.channel}
    # No more than that: what dies from now on was not looked at, and stands behind those that were.
    limits: dict[str, object] = {"count": count, **({"rate": rate} if rate else {})}
    if letters.source != CHANNEL:
        limits["from"] = letters.source
    try:
        said = node.ask("POST", "/channel/redrive", **where, **limits)
        while said["running"]:
            time.sleep(_POLL_SECONDS)
            said = node.ask("GET", "/channel/redrive", **where)
    except Refused as exc:
        raise PipelineError(f"{node.address}: {exc.reason}") from exc
    if said.get("error"):
        raise PipelineError(f"{node.address}: the redrive ended after {said['moved']} messages: {said['error']}")
    return int(said["moved"])


def _move(node: _Node, letters: Letters, path: str, message: str, **more: object) -> None:
    try:
        node.ask("POST", path, topic=node.dead_topic, channel=letters.source, id=message, **more)
    except Refused as exc:
        if exc.status != 404:  # somebody has taken it meanwhile
            raise PipelineError(f"{node.address}: {exc.reason}") from exc


def _filtered(table: DataFrame, where: str | None) -> DataFrame:
    if not where:
        return table
    try:
        return table.filter(where)
    except Exception as exc:
        raise PipelineError(f"--where {where!r}: {common.explain(exc)}") from exc


def _time(nanoseconds: int | None) -> datetime.datetime | None:
    if nanoseconds is None:
        return None
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=nanoseconds // 1000)


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show why messages of a channel died; with --redrive, send them back."
    parser.add_argument("topic", metavar="TOPIC", help="topic in which they were published")
    parser.add_argument("channel", metavar="CHANNEL", help="where they died")
    parser.add_argument(
        "--where",
        metavar="SQL",
        help="only those that match: columns reason, attempts, died, published, text, value, …",
    )
    parser.add_argument("--redrive", action="store_true", help="send the matching ones back to the channel")
    parser.add_argument("--rate", metavar="N", type=int, default=0, help="send back at most N a second")
    parser.add_argument(
        "--from-channel", metavar="NAME", default=CHANNEL, help="of the dead-letter topic (default %(default)s)"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIMIT,
        help="dead letters of a broker to read (default %(default)s)",
    )
    common.broker_arguments(parser)
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    common.check_network_only(arguments)
    letters = Letters(
        arguments.topic,
        arguments.channel,
        common.network_options(arguments),
        source=arguments.from_channel,
        limit=arguments.limit,
    )
    spark = common.open_session(arguments, "flintmq dead letters")
    if arguments.redrive:
        went, stayed = redrive(spark, letters, where=arguments.where, rate=arguments.rate)
        if arguments.json:
            sys.stdout.write(json.dumps({"pipeline": "dead-letters", "redriven": went, "left": stayed}) + "\n")
        else:
            sys.stdout.write(f"{went:,} went back to {arguments.topic}/{arguments.channel}, {stayed:,} stay\n")
        return 0
    rows = report(as_table(spark, letters), arguments.where)
    if arguments.json:
        sys.stdout.write(json.dumps({"pipeline": "dead-letters", "groups": rows}, default=str) + "\n")
        return 0
    _print(rows, f"{arguments.topic}/{arguments.channel}")
    return 0


def _print(rows: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("hour (UTC)", "reason", title=f"dead letters of {title}")
    for name in ("messages", "bytes", "attempts"):
        table.add_column(name, justify="right")
    table.add_column("example")
    for row in rows:
        numbers = (f"{row[name]:,}" for name in ("messages", "bytes", "attempts"))
        table.add_row(f"{row['hour']:%Y-%m-%d %H}", row["reason"], *numbers, row["example"][:60])
    console = Console()
    console.print(table if rows else f"no dead letters of {title} fit", highlight=False)
