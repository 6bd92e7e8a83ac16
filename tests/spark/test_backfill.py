"""Filling what an archive lacks: gaps, run twice, stopped, killed, beside an archive that runs, and beside another."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from flintmq.cli import main
from flintmq.errors import PipelineError
from flintmq.spark.decoding import decoder
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import backfill as filling
from flintmq.spark.pipelines import common
from flintmq.spark.pipelines.audit import audit
from flintmq.spark.pipelines.backfill import ArchiveSource, LogSource, Span, backfill, cut
from flintmq.spark.pipelines.subscriptions import subscription_of

from .conftest import wait_for
from .daemons import Node
from .test_pipelines_broker import batch, bodies, hold, network, publish, rows_of, topics

HOUR = 3_600_000_000_000
#: More than all that a test publishes.
ALWAYS = Span(0, 2**62)


def logs(broker: Node, *names: str) -> LogSource:
    return LogSource(names, network(broker))


def end_of(broker: Node, topic: str) -> str:
    """Where the log ends now, as an offset to begin at."""
    info = broker.get("/log/info", topic=topic)
    return json.dumps({topic: {info["node"]: info["durable"]}})


def archive(spark: Any, broker: Node, topic: str, root: Path, name: str, **options: str) -> int:
    """Archive all that there is by a query of this name, which may be new."""
    source = topics(broker, topic, **options)
    return archiving.archive(
        spark, source.stream, root, checkpoint=root.parent / name, once=True, new_query=rows_of_any(root) > 0
    ).rows


def rows_of_any(root: Path) -> int:
    return rows_of(root) if root.exists() else 0


def make_gap(spark: Any, broker: Node, topic: str, root: Path, count: int = 300) -> None:
    """An archive of which the middle third is missing: its second query began too late."""
    hold(broker, topic)
    publish(broker, topic, bodies(0, count))
    assert archive(spark, broker, topic, root, "first") == count
    publish(broker, topic, bodies(count, 2 * count))
    late = end_of(broker, topic)
    publish(broker, topic, bodies(2 * count, 3 * count))
    assert archive(spark, broker, topic, root, "second", startingOffsets=late) == count


def judged(spark: Any, broker: Node, topic: str, root: Path) -> Any:
    return audit(spark, batch(broker, topic).batch, lambda spark: archiving.read(spark, root), complete=True)


def is_whole(spark: Any, broker: Node, topic: str, root: Path) -> bool:
    return bool(judged(spark, broker, topic, root).passed)


def test_a_gap_is_counted_filled_and_not_filled_twice(spark, broker: Node, topic: str, tmp_path: Path):
    root = tmp_path / "archive"
    make_gap(spark, broker, topic, root)
    assert judged(spark, broker, topic, root).total("lost") == 300
    before = len(archiving.Target.of(root).open().files())
    counted = backfill(spark, logs(broker, topic), root, ALWAYS, dry_run=True)
    assert (counted.found, counted.missing, counted.added, counted.waiting) == (900, 300, 0, 0)
    assert "300 of 900 messages are missing" in str(counted)
    assert len(archiving.Target.of(root).open().files()) == before

    done = backfill(spark, logs(broker, topic), root, ALWAYS, name="one")
    assert (done.missing, done.added, done.commits, done.is_whole) == (300, 300, 1, True)
    assert is_whole(spark, broker, topic, root)
    again = backfill(spark, logs(broker, topic), root, ALWAYS, name="one")
    assert (again.found, again.missing, again.added, again.commits) == (900, 0, 0, 0)
    assert rows_of(root) == 900

    # Both archive queries go on where they were.
    publish(broker, topic, bodies(900, 910))
    assert archive(spark, broker, topic, root, "second") == 10
    assert is_whole(spark, broker, topic, root)


def test_only_what_was_published_in_the_time_is_added(spark, broker: Node, topic: str, tmp_path: Path):
    root = tmp_path / "archive"
    hold(broker, topic)
    publish(broker, topic, bodies(0, 10))
    publish(broker, topic, bodies(10, 20))
    rows = batch(broker, topic).batch(spark)
    times = [row["timestamp_ns"] for row in rows.orderBy("offset").collect()]
    assert times[9] < times[10]
    publish(broker, topic, bodies(20, 30))
    late = end_of(broker, topic)
    publish(broker, topic, bodies(30, 40))
    archive(spark, broker, topic, root, "late", startingOffsets=late)
    done = backfill(spark, logs(broker, topic), root, Span(times[10], times[10] + 1))
    assert done.added == sum(time == times[10] for time in times)
    early = backfill(spark, logs(broker, topic), root, Span(0, times[10]))
    assert early.added == 10
    assert backfill(spark, logs(broker, topic), root, ALWAYS).added == 30 - done.added - early.added
    assert is_whole(spark, broker, topic, root)


def test_what_the_archive_has_not_read_yet_is_left_to_it(spark, broker: Node, topic: str, tmp_path: Path):
    root = tmp_path / "archive"
    make_gap(spark, broker, topic, root, 100)
    publish(broker, topic, bodies(300, 350))
    done = backfill(spark, logs(broker, topic), root, ALWAYS)
    assert (done.added, done.waiting) == (100, 50)
    assert "50 are left to the archive query" in str(done)
    # Nothing is there twice when the query comes to them.
    assert archive(spark, broker, topic, root, "second") == 50
    report = judged(spark, broker, topic, root)
    assert report.passed and report.total("archived") == 350

    # Where none comes any more, they are missing.
    publish(broker, topic, bodies(350, 360))
    assert backfill(spark, logs(broker, topic), root, ALWAYS, complete=True).added == 10
    assert is_whole(spark, broker, topic, root)


def test_an_archive_that_runs_beside_it_is_not_disturbed(spark, broker: Node, topic: str, tmp_path: Path):
    root = tmp_path / "archive"
    make_gap(spark, broker, topic, root, 200)
    failures: list[BaseException] = []
    published = 600

    def run() -> None:
        try:
            source = topics(broker, topic, maxMessagesPerTrigger="40").stream
            archiving.archive(spark, source, root, checkpoint=tmp_path / "second", every=0.2)
        except BaseException as exc:
            failures.append(exc)

    known = {query.id for query in spark.streams.active}
    thread = threading.Thread(target=run)
    thread.start()
    try:
        added = 0
        for _ in range(4):
            publish(broker, topic, bodies(published, published + 100))
            published += 100
            added += backfill(spark, logs(broker, topic), root, ALWAYS).added
            assert not failures, failures
        assert added == 200
        wait_for(lambda: rows_of(root) >= published, "the archive has all that was published")
    finally:
        for query in spark.streams.active:
            if query.id not in known:
                query.stop()
        thread.join(120)
    assert failures == []
    report = judged(spark, broker, topic, root)
    assert report.passed and report.total("archived") == published


class Killed(BaseException):
    pass


def test_killed_before_its_commit_it_adds_nothing_and_the_next_run_all(
    spark, broker: Node, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = tmp_path / "archive"
    make_gap(spark, broker, topic, root, 100)

    def killed(*_: object) -> bool:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(filling._Filling, "_commit", killed)
        with pytest.raises(Killed):
            backfill(spark, logs(broker, topic), root, ALWAYS, name="one")
    assert rows_of(root) == 200
    assert backfill(spark, logs(broker, topic), root, ALWAYS, name="one").added == 100
    assert is_whole(spark, broker, topic, root)


@pytest.mark.parametrize("other", ["one", "two"], ids=["the same", "another"])
def test_two_at_once_add_each_message_once(
    spark, broker: Node, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
):
    root = tmp_path / "archive"
    make_gap(spark, broker, topic, root, 100)
    commit = filling._Filling._commit
    seconds: list[int] = []

    def after_another(self: Any, *about: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(filling._Filling, "_commit", commit)
            if not seconds:
                seconds.append(backfill(spark, logs(broker, topic), root, ALWAYS, name=other).added)
        return commit(self, *about)

    monkeypatch.setattr(filling._Filling, "_commit", after_another)
    first = backfill(spark, logs(broker, topic), root, ALWAYS, name="one")
    assert (first.added, seconds) == (0, [100])
    assert is_whole(spark, broker, topic, root)


@contextlib.contextmanager
def program(broker: Node, topic: str, root: Path, folder: Path, spans: int) -> Iterator[subprocess.Popen[bytes]]:
    """The command, which cuts the time so finely that it can be stopped in between."""
    code = (
        "import sys; from flintmq.cli import main; from flintmq.spark.pipelines import backfill as b; "
        f"b.SPAN_MESSAGES = {spans}; b.LogSource.finest = 1; sys.exit(main(sys.argv[1:]))"
    )
    since = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    flags = ["--nsqd", broker.tcp, "--to", str(root), "--since", since, "--json"]
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "pipeline", "backfill", topic, *flags, "--master", "local[2]"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-C", "kill"])
def test_stopped_in_the_middle_it_goes_on_with_the_rest(
    spark, broker: Node, topic: str, tmp_path: Path, how: signal.Signals
):
    root = tmp_path / "archive"
    hold(broker, topic)
    publish(broker, topic, bodies(0, 10))
    for number in range(60):
        broker.publish(topic, bodies(10 + 10 * number, 20 + 10 * number))
    publish(broker, topic, bodies(610, 620))
    late = end_of(broker, topic)
    publish(broker, topic, bodies(620, 630))
    assert archive(spark, broker, topic, root, "late", startingOffsets=late) == 10
    with program(broker, topic, root, tmp_path, 20) as process:

        def has_begun() -> bool:
            assert process.poll() is None, (tmp_path / "err").read_text()
            return rows_of(root) > 10

        wait_for(has_begun, "the first part")
        process.send_signal(how)
        status = process.wait(180)
    there = rows_of(root)
    assert 10 < there < 630
    if how is signal.SIGINT:
        assert status == 130, (tmp_path / "err").read_text()
        assert (tmp_path / "err").read_text().endswith("flintmq pipeline backfill: stopped\n")
    done = backfill(spark, logs(broker, topic), root, ALWAYS)
    assert done.added == 630 - there
    assert is_whole(spark, broker, topic, root)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_missing_is_added_once(spark, nodes: list[Node], topic: str, tmp_path: Path, seed: int):
    rng = random.Random(seed)
    given = {"nsq.nsqd.addresses": ",".join(node.tcp for node in nodes)}
    second = f"{topic[:50]}.b"
    for node in nodes:
        for name in (topic, second):
            hold(node, name)
            for _ in range(rng.randint(1, 4)):
                publish(node, name, bodies(0, rng.randint(1, 60)))
    wanted = common.Topics([topic, second], given).batch(spark).cache()
    root = tmp_path / "archive"
    table = archiving.Target.of(root).open()
    # An archive with holes of every size, of no query that anybody knows.
    size = rng.choice([1, 5, 40])
    for number in range(rng.randint(1, 4)):
        some = wanted.filter(f"pmod(xxhash64(topic, node, offset div {size}), 7) = {number}")
        files = archiving.write_batch(table, some, f"{number:032x}", partitioned=True)
        table.commit(f"{number:032x}", 0, ["?"], files)
    before = rows_of(root)
    done = backfill(
        spark,
        LogSource([topic, second], given),
        root,
        ALWAYS,
        complete=True,
        span_messages=rng.choice([10, 100, 10_000]),
    )
    assert done.added == done.missing == wanted.count() - before
    columns = ["topic", "node", "offset", "id", "timestamp_ns", "value"]
    there = archiving.read(spark, root).select(*columns)
    assert there.exceptAll(wanted.select(*columns)).count() == 0
    assert wanted.select(*columns).exceptAll(there).count() == 0
    wanted.unpersist()


def test_out_of_another_archive(spark, broker: Node, topic: str, tmp_path: Path):
    root, other = tmp_path / "archive", tmp_path / "other"
    make_gap(spark, broker, topic, root, 100)
    assert archive(spark, broker, topic, other, "whole") == 300
    publish(broker, topic, bodies(300, 310))
    assert archive(spark, broker, topic, other, "whole") == 10
    source = ArchiveSource(archiving.Target.of(other), [topic])
    counted = backfill(spark, source, root, ALWAYS, dry_run=True)
    # The last ten are the archive query's own business.
    assert counted.missing == 100
    assert backfill(spark, source, root, ALWAYS).added == 100
    assert archive(spark, broker, topic, root, "second") == 10
    assert is_whole(spark, broker, topic, root)
    # Of another topic it has nothing.
    assert backfill(spark, ArchiveSource(archiving.Target.of(other), ["nothing"]), root, ALWAYS).found == 0


def test_a_topic_that_was_created_again_is_another(spark, broker: Node, topic: str, tmp_path: Path):
    root = tmp_path / "archive"
    hold(broker, topic)
    publish(broker, topic, bodies(0, 50))
    assert archive(spark, broker, topic, root, "first") == 50
    broker.post("/topic/delete", topic=topic)
    hold(broker, topic)
    publish(broker, topic, bodies(0, 20))
    # Offsets and ids begin anew, and are not taken for those of before.
    left = backfill(spark, logs(broker, topic), root, ALWAYS)
    assert (left.added, left.waiting) == (0, 20)
    assert backfill(spark, logs(broker, topic), root, ALWAYS, complete=True).added == 20
    assert rows_of(root) == 70


def test_an_archive_with_decoded_messages_gets_them_decoded(spark, broker: Node, topic: str, tmp_path: Path):
    root = tmp_path / "archive"
    hold(broker, topic)
    publish(broker, topic, [*bodies(0, 20), b"no JSON"])
    late = end_of(broker, topic)
    publish(broker, topic, bodies(20, 30))
    source = topics(broker, topic, startingOffsets=late)
    archiving.archive(spark, source.stream, root, once=True, schema="id BIGINT, country STRING")
    with pytest.raises(PipelineError, match="give the --decode that its archive query has"):
        backfill(spark, logs(broker, topic), root, ALWAYS)
    assert backfill(spark, logs(broker, topic), root, ALWAYS, decode=True).added == 21
    rows = archiving.read(spark, root)
    assert sorted(row["id"] for row in rows.filter("data IS NOT NULL").select("data.id").collect()) == list(range(30))
    assert [bytes(row["_undecoded"]) for row in rows.filter("data IS NULL").collect()] == [b"no JSON"]


def test_decoding_is_by_what_the_archive_query_has(spark, broker: Node, topic: str, tmp_path: Path):
    """MessagePack, which JSON's decoder would call undecodable."""
    root = tmp_path / "archive"
    hold(broker, topic)
    packed = [msgspec.msgpack.encode({"id": number}) for number in range(30)]
    publish(broker, topic, packed[:20])
    late = end_of(broker, topic)
    publish(broker, topic, packed[20:])
    decode = decoder("msgpack", schema="id BIGINT")
    source = topics(broker, topic, startingOffsets=late)
    archiving.archive(spark, source.stream, root, once=True, decode=decode)
    assert backfill(spark, logs(broker, topic), root, ALWAYS, decode=decode).added == 20
    rows = archiving.read(spark, root)
    assert sorted(row["id"] for row in rows.select("data.id").collect()) == list(range(30))
    plain = tmp_path / "plain"
    archiving.archive(spark, source.stream, plain, once=True)
    with pytest.raises(PipelineError, match="are not decoded"):
        backfill(spark, logs(broker, topic), plain, ALWAYS, decode=decode)


def test_an_iceberg_table_is_filled_too(spark, broker: Node, topic: str, tmp_path: Path):
    pytest.importorskip("pyiceberg")
    root = tmp_path / "archive"
    hold(broker, topic)
    publish(broker, topic, bodies(0, 20))
    late = end_of(broker, topic)
    publish(broker, topic, bodies(20, 30))
    source = topics(broker, topic, startingOffsets=late)
    archiving.archive(spark, source.stream, root, once=True, format="iceberg")
    assert backfill(spark, logs(broker, topic), root, ALWAYS).added == 20
    assert backfill(spark, logs(broker, topic), root, ALWAYS).added == 0
    assert is_whole(spark, broker, topic, root)


# --- Command line -----------------------------------------------------------------------------------------------------


def command(*flags: str) -> list[str]:
    return ["pipeline", "backfill", *flags]


def test_the_command_counts_and_fills(spark, broker: Node, topic: str, tmp_path: Path, capsys):
    root = tmp_path / "archive"
    make_gap(spark, broker, topic, root, 100)
    since = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    flags = [topic, "--nsqd", broker.tcp, "--to", str(root), "--since", since]
    assert main(command(*flags, "--dry-run")) == 0
    assert "100 of 300 messages are missing" in capsys.readouterr().out
    assert main(command(*flags, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["pipeline"], told["missing"], told["added"], told["waiting"]) == ("backfill", 100, 100, 0)
    assert is_whole(spark, broker, topic, root)
    # Before all of it there was nothing.
    assert main(command(*flags, "--until", "2021-01-01T00:00:00Z", "--since", "2020-01-01T00:00:00Z")) == 0
    assert "0 of 0 messages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--to", "{none}"], "there is no archive at"),
        (["--to", "{root}", "--until", "2019-01-01T00:00:00Z"], "--until is a time after --since"),
        (["--to", "{root}", "--remote", "sc://127.0.0.1:1"], "give a --master, not --remote"),
        (["--to", "{root}", "--archive", "{root}"], "are the same table"),
        (["--to", "{root}", "--archive", "{none}"], "there is no archive at"),
        (["--to", "{plain}"], "is plain Parquet"),
        (["--to", "{rows}"], "is no archive of messages"),
        (["--to", "{root}", "--nsqd", "127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_said_before_spark_starts(tmp_path: Path, capsys, flags: list[str], said: str):
    pa = pytest.importorskip("pyarrow")
    deltalake = pytest.importorskip("deltalake")
    columns = {"value": pa.binary(), "topic": pa.string(), "node": pa.string(), "id": pa.string()}
    schema = pa.schema([*columns.items(), ("timestamp_ns", pa.int64())])
    deltalake.DeltaTable.create(str(tmp_path / "root"), deltalake.Schema.from_arrow(schema))
    deltalake.DeltaTable.create(str(tmp_path / "rows"), deltalake.Schema.from_arrow(pa.schema([("n", pa.int64())])))
    (tmp_path / "plain" / "_spark_metadata").mkdir(parents=True)
    places = {name: str(tmp_path / name) for name in ("root", "rows", "plain", "none")}
    given = [flag.format(**places) for flag in flags]
    assert main(command("orders", "--since", "2020-01-01T00:00:00Z", *given)) == 1
    assert said in capsys.readouterr().err


def table_with(root: Path, ends: dict[str, list[str]], subscription: str = "", format: str | None = None) -> Any:
    """A table whose log has the ends of these queries, the oldest first."""
    pa = pytest.importorskip("pyarrow")
    table = archiving.Target.of(root, format=format).open()
    table.make(
        pa.schema(
            [
                ("topic", pa.string()),
                ("timestamp", pa.timestamp("us", "UTC")),
                ("value", pa.binary()),
                ("timestamp_ns", pa.int64()),
            ]
        ),
        True,
    )
    for query, end in ends.items():
        table.commit(query, 0, end, [], subscription)
        table = archiving.Target.of(root).open()
    return table


def test_a_table_that_is_filled_from_a_channel_is_refused(tmp_path: Path):
    table = table_with(tmp_path / "table", {"q": ['{"v":1,"mode":"spool","spool":"s","o":4}']})
    with pytest.raises(PipelineError, match="is filled from a channel"):
        filling.positions(table)


def test_of_several_queries_the_one_that_is_furthest_counts(tmp_path: Path):
    def end(epoch: str = "e", **offsets: int) -> list[str]:
        marks = {node: {"e": epoch, "o": offset} for node, offset in offsets.items()}
        return [json.dumps({"v": 1, "mode": "log", "p": {"orders": marks}})]

    ends = {
        "of a log before": end("old", c=99),
        "strange": ["no JSON", "[1]", '{"v":1,"mode":"log"}'],
        "backfill": ['{"mode":"backfill"}'],
        "older": end(a=9, b=3),
        "newest": end(a=5, c=1),
    }
    found = filling.positions(table_with(tmp_path / "table", ends))
    assert {key[1]: mark.seq for key, mark in found.items()} == {"a": 9, "b": 3, "c": 1}


#: Where a query ends that has met `orders` alone.
MET_ORDERS = ['{"v":1,"mode":"log","p":{"orders":{"a":{"e":"e","o":5}}}}']


@pytest.mark.parametrize("format", ["delta", "iceberg"])
@pytest.mark.parametrize("subscribed", [{"subscribe": "orders,clicks"}, {"subscribePattern": "c.*|orders"}])
def test_a_topic_that_a_query_subscribes_to_and_has_not_met_is_left_to_it(
    tmp_path: Path, subscribed: dict[str, str], format: str
):
    if format == "iceberg":
        pytest.importorskip("pyiceberg")
    source = common.Topics([], {"nsq.nsqd.addresses": "127.0.0.1:1", **subscribed})
    table = table_with(tmp_path / "table", {"q": MET_ORDERS}, subscription_of(source.stream), format)
    found = filling.limits_of(None, table, ["clicks", "orders", "other"])
    assert (list(found.marks), found.left) == ([("orders", "a")], ["clicks"])
    # No topic that is left is among those of which all is taken.
    assert "topic NOT IN ('clicks', 'orders')" in found.condition()
    assert not filling.limits_of(None, table, ["other"])
    assert filling.limits_of(None, table, ["clicks"], unmet=True).left == []


def test_a_table_that_does_not_tell_its_subscriptions_gets_no_topic_that_its_queries_have_not_met(tmp_path: Path):
    """Of a version before, or of a source that is a function of the user's."""
    assert subscription_of(lambda spark: spark.table("t")) == ""
    table = table_with(tmp_path / "table", {"q": MET_ORDERS})
    with pytest.raises(PipelineError, match=r"whether its archive queries subscribe to clicks, .* give --unmet"):
        filling.limits_of(None, table, ["orders", "clicks"])
    assert list(filling.limits_of(None, table, ["orders"]).marks) == [("orders", "a")]
    assert not filling.limits_of(None, table, ["clicks"], unmet=True)
    # Nobody fills a table that has nothing but backfills.
    assert not filling.limits_of(None, table_with(tmp_path / "other", {"b": ['{"mode":"backfill"}']}), ["clicks"])


def test_a_node_of_another_archive_that_no_query_has_met_is_left_to_it(spark, tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    root = tmp_path / "other"
    ids = [(node, offset) for node in ("a", "b") for offset in range(10)]
    rows = [(b"x", "orders", node, offset, f"{node}{offset}", 1 + offset) for node, offset in ids]
    columns = "value binary, topic string, node string, offset bigint, id string, timestamp_ns bigint"
    frame = spark.createDataFrame(rows, columns).selectExpr(
        "*", "timestamp_micros(0) AS timestamp", "CAST(NULL AS INT) AS attempts"
    )
    other = archiving.Target.of(root).open()
    files = archiving.write_batch(other, frame, "0" * 32, partitioned=True)
    other.commit("q", 0, ["?"], files)
    subscribed = json.dumps({"topics": ["orders"]})
    table = table_with(tmp_path / "table", {"q": MET_ORDERS}, subscribed)
    table.make(pa.schema([("node", pa.string()), ("id", pa.string())]), True)
    source = ArchiveSource(archiving.Target.of(root), ["orders"])
    counted = backfill(spark, source, tmp_path / "table", ALWAYS, dry_run=True)
    assert (counted.missing, counted.waiting) == (5, 15)
    counted = backfill(spark, source, tmp_path / "table", ALWAYS, dry_run=True, unmet=True)
    assert (counted.missing, counted.waiting) == (15, 5)


@pytest.mark.parametrize("by", ["subscribe", "subscribePattern"])
def test_a_new_topic_of_an_archive_query_is_there_once(spark, broker: Node, topic: str, tmp_path: Path, by: str):
    root, new = tmp_path / "archive", f"{topic[:50]}.new"
    wanted = {"subscribe": f"{topic},{new}"} if by == "subscribe" else {by: f"{topic[:50]}.*"}
    source = common.Topics([], {**network(broker), "startingOffsets": "earliest", **wanted})
    hold(broker, topic)
    publish(broker, topic, bodies(0, 5))
    archiving.archive(spark, source.stream, root, once=True)
    hold(broker, new)
    publish(broker, new, bodies(0, 7))
    done = backfill(spark, logs(broker, topic, new), root, ALWAYS)
    assert (done.added, done.waiting) == (0, 7)
    assert archiving.archive(spark, source.stream, root, once=True).rows == 7
    assert rows_of(root) == 12


@given(
    st.lists(st.integers(0, 100 * HOUR - 1), max_size=60),
    st.integers(1, 20),
    st.sampled_from([1, 1_000_000_000, HOUR]),
)
def test_spans_cover_all_messages_and_nothing_twice(times: list[int], most: int, finest: int):
    def count(span: Span) -> int:
        return sum(span.since <= time < span.until for time in times)

    spans = cut(Span(0, 100 * HOUR), count, most, finest)
    assert sum(map(count, spans)) == len(times)
    for one, other in itertools.pairwise(spans):
        assert one.until <= other.since
    for span in spans:
        assert count(span) and (count(span) <= most or span.until - span.since < 2 * finest)


def test_a_time_without_a_zone_is_in_utc():
    assert common.nanoseconds(common.moment("1970-01-01T01:00:00")) == HOUR
    assert common.nanoseconds(common.moment("1970-01-01T01:00:00+01:00")) == 0
    with pytest.raises(argparse.ArgumentTypeError, match="is no time"):
        common.moment("yesterday")
