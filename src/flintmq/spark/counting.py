"""Counting messages without reading them, and without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from flintmq.errors import OptionError

if TYPE_CHECKING:
    from flintmq.spark.log_mode.index import Index
    from flintmq.spark.shipped.offsets import Range
    from flintmq.spark.shipped.options import SourceOptions

__all__ = ["count"]


def count(
    options: Mapping[str, str],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    nodes: Sequence[str] = (),
) -> int:
    """Count the messages that a batch read with these options of ``format("nsq")`` would give now.

    The brokers count by the index of their logs; no more is read than half a MiB at either end of a time, and no
    message body. ``since`` (at or after) and ``until`` (before) are times with a zone, ``nodes`` the identities of
    brokers; they are added to the option ``where``. Counted are all messages that are durable and still in the files,
    deferred and finished ones too: not what a channel has to deliver. Needs log mode; OptionError otherwise.
    """
    from flintmq.spark.log_mode.index import Index
    from flintmq.spark.log_mode.topic_log import Planner
    from flintmq.spark.shipped.net import Web
    from flintmq.spark.shipped.options import read_source_options

    terms = [_time("since", ">=", since), _time("until", "<", until), _nodes(nodes)]
    given = dict(options)
    before = [value for key, value in given.items() if key.lower() == "where"] or [""]
    joined = [f"({term})" for term in (before[-1], *terms) if term]
    if joined:
        given = {key: value for key, value in given.items() if key.lower() != "where"}
        given["where"] = " AND ".join(joined)
    read = read_source_options(given, streaming=False)
    if read.mode == "spool":
        raise OptionError("count() asks brokers for what is in their logs: a spool has none, read it and count()")
    planner, web = Planner(read), Web(read.network)
    try:
        index = Index(web)
        return sum(_count(index, found, address, read) for found, address in planner.snapshot())
    finally:
        planner.close()
        web.close()


def _count(index: Index, found: Range, address: str, options: SourceOptions) -> int:
    """Count the rows of a range. What the index cannot count is read, without bodies."""
    from flintmq.spark.log_mode.index import outside

    where = options.where
    bare = replace(options, columns=frozenset({"offset"}))
    # Parts that have to be looked at; of the rest all rows fit.
    unsure = [] if where is None else index.within(found, address, where.others(found.topic, found.node))
    total = sum(_read(piece, address, bare) for piece in unsure)
    for piece in outside(found, unsure):
        messages = index.messages(piece, address)
        total += _read(piece, address, bare) if messages is None else messages
    return total


def _read(found: Range, address: str, options: SourceOptions) -> int:
    from flintmq.spark.log_mode.topic_log import fetch

    return sum(batch.num_rows for batch in fetch(found, address, options))


def _time(name: str, sign: str, when: datetime | None) -> str:
    if when is None:
        return ""
    if when.tzinfo is None:
        raise OptionError(f"{name} is a time without a zone: say which, such as datetime(…, tzinfo=UTC)")
    return f"timestamp {sign} '{when.astimezone(UTC).isoformat()}'"


def _nodes(nodes: Sequence[str]) -> str:
    for node in nodes:
        if not node.isalnum():
            raise OptionError(f"nodes: {node!r} is no identity of a broker")
    return f"node IN ({', '.join(repr(node) for node in nodes)})" if nodes else ""
