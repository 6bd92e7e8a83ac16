"""The pipelines with a real broker: from topics, to topics, and as commands."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.ports import held_port

pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")

import deltalake
import msgspec

from flintmq.cli import main
from flintmq.errors import PipelineError
from flintmq.spark.counting import count as messages_in
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import common, dead_letters, metrics, replay, sql
from flintmq.spark.pipelines.audit import audit
from flintmq.spark.pipelines.replay_notes import Notes

from . import cluster as spark_cluster
from .conftest import wait_for
from .daemons import Node
from .sink_tools import consume, count_of

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def topics(broker: Node, *names: str, **options: str) -> common.Topics:
    return common.Topics(names, {"nsq.nsqd.addresses": broker.tcp, "startingOffsets": "earliest", **options})


def batch(broker: Node, *names: str) -> common.Topics:
    return common.Topics(names, {"nsq.nsqd.addresses": broker.tcp})


def network(broker: Node) -> dict[str, str]:
    return {"nsq.nsqd.addresses": broker.tcp}


def hold(broker: Node, topic: str) -> None:
    """A channel that nobody reads keeps the log."""
    broker.post("/topic/create", topic=topic)
    broker.post("/channel/create", topic=topic, channel="holder")


def publish(broker: Node, topic: str, messages: list[bytes]) -> None:
    """Publish, and wait until it is on the device: readers of a log are shown nothing else."""
    broker.publish(topic, messages)

    def is_durable() -> bool:
        info = broker.get("/log/info", topic=topic)
        return bool(info["durable"] == info["end"])

    wait_for(is_durable, "all is on the device")


def texts(spark: Any, broker: Node, topic: str) -> list[str]:
    rows = batch(broker, topic).batch(spark).orderBy("offset").selectExpr("cast(value AS string) AS text").collect()
    return [row["text"] for row in rows]


def bodies(first: int, stop: int) -> list[bytes]:
    return [
        json.dumps({"id": number, "country": "de" if number % 3 else "fr"}).encode() for number in range(first, stop)
    ]


def rows_of(root: Path) -> int:
    """How many rows are in a table; 0 where there is none."""
    table = archiving.Target.of(root).open()
    return sum(file.rows for file in table.files())


# --- From and to topics -----------------------------------------------------------------------------------------------


def test_archive_audit_and_replay_of_a_topic(spark, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 3000))
    root = tmp_path / "archive"
    source = topics(broker, topic, maxMessagesPerTrigger="1000")
    summary = archiving.archive(spark, source.stream, root, once=True)
    assert summary.rows == 3000
    assert summary.batches >= 3
    assert summary.lag == 0
    publish(broker, topic, bodies(3000, 4000))
    assert archiving.archive(spark, source.stream, root, once=True).rows == 1000
    report = audit(spark, batch(broker, topic).batch, lambda spark: archiving.read(spark, root), complete=True)
    assert report.passed
    assert (report.total("published"), report.total("archived")) == (4000, 4000)

    # Out of the archive, with a filter, stopped half-way and gone on with.
    again = f"{topic[:50]}.again"
    where = "get_json_object(text, '$.country') = 'fr'"
    chunks = replay.archive_chunks(spark, root, size=1000)
    assert len(chunks) >= 4
    stops = iter([False, True])

    def read(spark: Any, chunk: replay.Chunk) -> Any:
        if next(stops, False):
            raise PipelineError("stopped here")
        return replay.archive_reader(root)(spark, chunk)

    for reader in (read, replay.archive_reader(root)):
        try:
            replay.replay(spark, lambda: chunks, reader, again, network(broker), tmp_path / "replay", where=where)
        except PipelineError as exc:
            assert str(exc) == "stopped here"
    assert [json.loads(text)["id"] for text in texts(spark, broker, again)] == list(range(0, 4000, 3))

    # The chunk that was under way when it was stopped is not published twice.
    (tmp_path / "replay" / "done.json").write_text(str(len(chunks) - 1))
    replay.replay(
        spark, lambda: [], replay.archive_reader(root), again, network(broker), tmp_path / "replay", where=where
    )
    assert len(texts(spark, broker, again)) == len(range(0, 4000, 3))
    with pytest.raises(PipelineError, match="another replay"):
        replay.replay(spark, lambda: [], replay.archive_reader(root), "elsewhere", network(broker), tmp_path / "replay")


def test_a_long_backlog_is_cut_into_batches_and_tasks(
    spark, broker: Node, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 3000))
    assert batch(broker, topic).batch(spark).rdd.getNumPartitions() == spark.sparkContext.defaultParallelism == 2
    one = batch(broker, topic).batch(spark, minPartitions="1")
    assert one.rdd.getNumPartitions() == 1, "what is said wins"
    monkeypatch.setattr(common, "_BATCH_BYTES", "40k")
    monkeypatch.setattr(common, "_TASK_MESSAGES", 200)
    summary = archiving.archive(spark, topics(broker, topic).stream, tmp_path / "archive", once=True)
    assert summary.rows == 3000
    assert 2 <= summary.batches <= 6
    files = archiving.Target.of(tmp_path / "archive").open().files()
    assert max(file.rows for file in files) <= 200
    whole = topics(broker, topic, maxMessagesPerTrigger="100000", minPartitions="1")
    assert archiving.archive(spark, whole.stream, tmp_path / "whole", once=True).batches == 1


def test_archive_of_a_channel_of_a_plain_nsqd(spark, go_broker: Node, topic: str, tmp_path: Path):
    go_broker.post("/topic/create", topic=topic)
    go_broker.post("/channel/create", topic=topic, channel="archive")
    go_broker.publish(topic, bodies(0, 500))
    parser = argparse.ArgumentParser()
    common.source_arguments(parser)
    flags = ["--nsqd", go_broker.tcp, "--channel", "archive", "--option", f"spoolLocation={tmp_path / 'spool'}"]
    source = common.stream_reader(parser.parse_args([topic, *flags]))
    assert archiving.archive(spark, source, tmp_path / "archive", once=True).rows == 500
    assert go_broker.depth(topic, "archive") == 0


def test_replay_to_brokers_that_cannot_stage(
    spark, broker: Node, go_broker: Node, start_node, topic: str, tmp_path: Path
):
    """NSQ's own, one of which is gone. Each message is there, and those of a node in their order."""
    hold(broker, topic)
    publish(broker, topic, [b"%d" % number for number in range(5000)])
    gone = start_node("go")
    gone.kill()
    options = {**network(broker), "subscribe": topic}
    there = {"nsq.nsqd.addresses": f"{gone.tcp},{go_broker.tcp}", "idempotent": "false"}
    root = tmp_path / "archive"
    assert archiving.archive(spark, topics(broker, topic).stream, root, once=True).rows == 5000
    for name, plan, read, ordered in (
        ("log", lambda: replay.log_chunks(options, size=2000), replay.log_reader(options), False),
        ("archive", lambda: replay.archive_chunks(spark, root, size=2000), replay.archive_reader(root), False),
        ("ordered", lambda: replay.archive_chunks(spark, root, size=2000), replay.archive_reader(root), True),
    ):
        again = f"{topic[:50]}.{name}"
        go_broker.post("/topic/create", topic=again)
        go_broker.post("/channel/create", topic=again, channel="test")
        done = replay.replay(spark, plan, read, again, there, tmp_path / name, ordered=ordered)
        assert (done.rows, done.batches) == (5000, 3)
        assert count_of(go_broker, again) == 5000
        assert [int(body) for body in consume(go_broker, again, 5000)] == list(range(5000)), name


def test_replay_of_a_log_keeps_a_rate(spark, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 300))
    options = {**network(broker), "subscribe": topic}
    chunks = replay.log_chunks(options, size=100)
    assert [chunk.rows for chunk in chunks] == [100, 100, 100]
    summary = replay.replay(
        spark, lambda: chunks, replay.log_reader(options), "{topic}.b", network(broker), tmp_path / "replay", rate=200
    )
    assert summary.rows == 300
    assert summary.details["rate"] <= 1.1 * 200
    assert texts(spark, broker, f"{topic}.b") == [body.decode() for body in bodies(0, 300)]


def by_node(spark: Any, given: dict[str, str], topic: str) -> dict[str, list[str]]:
    """The messages of a topic on each node, in the order of its log."""
    rows = spark.read.format("nsq").options(**{**given, "subscribe": topic}).load().orderBy("offset").collect()
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.node, []).append(bytes(row.value).decode())
    return found


@pytest.mark.parametrize("ordered", [False, True])
def test_tasks_of_a_replay_keep_the_order_of_each_node(
    spark, nodes: list[Node], topic: str, tmp_path: Path, ordered: bool
):
    """Two nodes replayed to a third, by more tasks than nodes: of each node in its order; ordered, in that of times."""
    sources, target = nodes[:2], nodes[2]
    for number in range(0, 6000, 300):
        publish(sources[number // 300 % 2], topic, [b"%d" % n for n in range(number, number + 300)])
    given = {"nsq.nsqd.addresses": ",".join(node.tcp for node in sources), "subscribe": topic}
    read, there = replay.log_reader(given), {"nsq.nsqd.addresses": target.tcp}
    chunks = replay.log_chunks({**given, "minPartitions": "7"}, size=1300)
    assert len(chunks) == 3
    tasks = []

    class Read(replay.LogReader):
        def read(self, *arguments: Any, **more: Any) -> Any:
            found = super().read(*arguments, **more)
            tasks.append(found.rdd.getNumPartitions())
            return found

    again = f"{topic[:40]}-again"
    summary = replay.replay(
        spark, lambda: chunks, Read(read.options), again, there, tmp_path / "replay", ordered=ordered
    )
    assert (summary.rows, summary.batches) == (6000, 3)
    [found] = by_node(spark, there, again).values()
    before = by_node(spark, given, topic)
    assert len(before) == 2
    for numbers in before.values():
        mine = set(numbers)
        assert [number for number in found if number in mine] == numbers
    if ordered:
        # Within each chunk.
        assert all(
            [int(number) for number in found[at : at + 2000]] == sorted(map(int, found[at : at + 2000]))
            for at in (0, 2000, 4000)
        )
    else:
        assert min(tasks) >= 2
    assert len(found) == 6000


def test_a_replay_goes_on_with_the_write_that_was_under_way(spark, broker: Node, topic: str, tmp_path: Path):
    """Killed after a write of several chunks and before the note of it: the same chunks again, and no row twice."""
    hold(broker, topic)
    publish(broker, topic, bodies(0, 1000))
    options = {**network(broker), "subscribe": topic}
    chunks = replay.log_chunks(options, size=100)
    folder, again = tmp_path / "replay", f"{topic[:40]}.again"

    def run() -> Any:
        return replay.replay(
            spark, lambda: chunks, replay.log_reader(options), again, network(broker), folder, rate=300
        )

    summary = run()
    assert (summary.rows, summary.details["done"]) == (1000, 10)
    assert summary.batches < 10, "several chunks at once: a write takes longer than a chunk's third of a second"
    first, stop = json.loads((folder / "doing.json").read_text())
    assert stop == 10
    (folder / "done.json").write_text(str(first))
    assert run().rows == stop * 100 - first * 100
    assert texts(spark, broker, again) == [body.decode() for body in bodies(0, 1000)]


@pytest.mark.parametrize("seed", range(20))
def test_writes_of_a_replay_are_paced(seed: int):
    """Any cost of a write, and any part that a condition leaves: the rate is kept within 3 %."""
    dice = random.Random(seed)
    rate = dice.choice([50, 2_000, 100_000])
    fixed, each = dice.choice([0.05, 0.4, 1.5, 6]), dice.choice([0, 0.1, 0.3]) / rate
    part = dice.choice([1, 1, 0.3])
    chunks = [replay.Chunk(rate, {})] * 3_000
    pace = replay._Pace(rate)
    at, done, rows = 0.0, 0, 0
    # When rows became visible, and how many had by then.
    seen: list[tuple[float, int]] = []
    while done < 600 / part:
        count = pace.take(chunks[done:])
        begun = max(at, pace.next)
        published = round(count * rate * part * dice.uniform(0.9, 1.1)) if part < 1 else count * rate
        at = begun + (fixed + each * published) * dice.uniform(0.9, 1.1) + (10 if not done else 0)
        done += count
        rows += published
        pace.wrote(begun, at, published)
        seen.append((at, rows))

    def rate_from(number: int) -> float:
        (first, before), (last, after) = seen[number], seen[-1]
        return (after - before) / (last - first)

    assert len(seen) > 7
    assert pace.details()["rate"] == pytest.approx(rate_from(0), rel=0.01)
    # It may be behind while it learns how long writes take.
    assert 0.9 * rate < rate_from(0) < 1.03 * rate
    # But it is never much ahead, not even at first.
    (first, before), *later = seen
    assert max((after - before) / (last - first) for last, after in later) < 1.1 * rate
    assert rate_from(len(seen) // 3) == pytest.approx(rate, rel=0.035)


@pytest.mark.parametrize("seed", range(20))
def test_a_condition_that_leaves_nothing_for_long_does_not_let_the_rest_go_at_once(seed: int):
    """Any stretches of messages that fit or do not: no write has much more than is due, and little is read twice."""
    dice = random.Random(seed)
    rate = dice.choice([2, 100, 5_000])
    # Messages of each chunk that fit.
    fits = [rows for _ in range(9) for rows in [dice.choice([0, 0, 1, rate // 2, rate])] * dice.randint(1, 400)]
    chunks = [replay.Chunk(rate, {})] * len(fits)
    pace = replay._Pace(rate)
    at, done, read = 0.0, 0, 0
    # When rows became visible, and how many had by then.
    seen = [(0.0, 0)]

    def published(count: int) -> int:
        nonlocal read
        read += count
        return sum(fits[done : done + count])

    under_way = 1
    while done < len(fits):
        count = pace.take(chunks[done:], under_way, published)
        under_way = 0
        begun = max(at, pace.next)
        rows = published(count)
        at = begun + 0.4
        done += count
        pace.wrote(begun, at, rows)
        seen.append((at, seen[-1][1] + rows))
    assert seen[-1][1] == sum(fits)
    # A write is of a second, or has half as much again before it is counted.
    assert max(after - before for (_, before), (_, after) in itertools.pairwise(seen)) <= 1.5 * rate
    (first, before), *later = seen[1:]
    assert all(after - before <= 1.1 * rate * (last - first) + 1.5 * rate for last, after in later)
    assert read < 5 * len(fits) + 100


def test_numbers_that_a_crash_left_out_are_no_chunks_of_a_replay(start_node, topic: str):
    """16 million numbers are missing between two messages: each chunk has as many messages as it says."""
    node = start_node()
    hold(node, topic)
    for number in range(3):
        publish(node, topic, bodies(100 * number, 100 * number + 100))
        node.kill()
        node.start()
    options = {**network(node), "subscribe": topic}
    chunks = replay.log_chunks(options, size=30)
    assert len(chunks) == 10
    assert [chunk.rows for chunk in chunks] == [30] * 10
    for chunk, after in itertools.pairwise([*chunks, None]):
        [(identity, first)], [stop] = chunk.what["first"][topic].items(), chunk.what["stop"][topic].values()
        assert abs(messages_in({**options, "where": f"offset >= {first} AND offset < {stop}"}) - chunk.rows) <= 30
        if after is not None:
            assert after.what["first"][topic][identity] == stop
    ends = (
        f"offset >= {chunks[0].what['first'][topic][identity]} AND offset < {chunks[-1].what['stop'][topic][identity]}"
    )
    assert messages_in({**options, "where": ends}) == messages_in(options) == 300


def test_two_replays_do_not_share_a_checkpoint(tmp_path: Path):
    """Each would put other chunks into a write, under another key."""
    notes = [Notes(common.Place.of(tmp_path / "replay"), {}) for _ in range(2)]
    with notes[0].alone(), pytest.raises(PipelineError, match="another process replays from"), notes[1].alone():
        pass
    with notes[1].alone():
        assert notes[1].begin(list) == []


def test_status_tells_of_readers_and_checkpoints(
    spark, nodes: list[Node], topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for node in nodes[:2]:
        hold(node, topic)
        publish(node, topic, bodies(0, 500))
    addresses = [flag for node in nodes for flag in ("--nsqd", node.tcp)]
    given = {"nsq.nsqd.addresses": ",".join(node.tcp for node in nodes), "startingOffsets": "earliest"}

    def status(*more: str) -> Any:
        assert main(["pipeline", "status", *addresses, "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    assert status() == {"readers": [], "queries": [], "checkpoints": []}
    source = common.Topics([topic], {**given, "maxMessagesPerTrigger": "400"})
    archiving.archive(spark, source.stream, tmp_path / "archive", once=True)
    nodes[0].post("/log/position", topic=topic, reader="other", to="earliest")
    checkpoint = str(tmp_path / "archive" / "_checkpoint")
    found = status("--checkpoint", checkpoint)
    [batch] = found["checkpoints"]
    assert (batch["checkpoint"], batch["batch"], batch["done"]) == (checkpoint, 2, True)
    [name] = batch["readers"]
    assert [(one["reader"], one["topic"]) for one in found["readers"]] == [(name, topic)] * 2
    # The last batch is committed at the brokers when the next one is planned.
    assert sum(one["behind"] for one in found["readers"]) == 200
    everybody = status(topic)["readers"]
    assert {one["reader"] for one in everybody} == {name, "other"}
    assert [one["behind"] for one in everybody if one["reader"] == "other"] == [500]
    assert status("no-such-topic")["readers"] == []

    assert main(["pipeline", "status", *addresses, "--checkpoint", checkpoint]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{checkpoint}: batch 2"
    assert lines[1].split() == ["READER", "TOPIC", "NODE", "BEHIND", "MB", "MOVED"]
    assert len(lines) == 4
    assert main(["pipeline", "status", *addresses, "--checkpoint", str(tmp_path)]) == 1
    assert "is no checkpoint of a stream" in capsys.readouterr().err
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert main(["pipeline", "status", *addresses, "--nsqd", away, "--json"]) == 1
        said = capsys.readouterr()
        assert away in said.err and len(json.loads(said.out)["readers"]) == 3


def numbers(address: str, query: str = "counted") -> dict[str, Any]:
    """What /metrics has of a query."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        sample.name: (sample.value, sample.labels)
        for family in families
        for sample in family.samples
        if sample.labels["query"] == query
    }


def test_numbers_of_a_query_are_served(spark, broker: Node, topic: str, tmp_path: Path):
    from flintmq.spark import serve_metrics

    hold(broker, topic)
    publish(broker, topic, bodies(0, 300))

    server = serve_metrics(spark, "127.0.0.1:0")
    try:
        source = topics(broker, topic, maxMessagesPerTrigger="100").stream(spark)
        query = (
            source.groupBy("topic")
            .count()
            .writeStream.queryName("counted")
            .outputMode("complete")
            .format("memory")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        try:
            wait_for(lambda: numbers(server.address).get("flintmq_query_rows_total", (0,))[0] == 300)
            wait_for(lambda: numbers(server.address)["flintmq_query_lag_messages"][0] == 0)
            found = numbers(server.address)
            assert found["flintmq_query_active"][0] == 1
            assert found["flintmq_query_batches_total"][0] == 3
            assert found["flintmq_query_state_rows"][0] == 1
            assert found["flintmq_query_batch_seconds"][0] > 0
            assert found["flintmq_query_lag_messages"][1]["topic"] == topic
        finally:
            query.stop()
        wait_for(lambda: numbers(server.address)["flintmq_query_active"][0] == 0)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{server.address}/", timeout=30)
        with pytest.raises(PipelineError, match="cannot be opened for metrics"):
            serve_metrics(spark, server.address)
    finally:
        server.close()


def test_metrics_and_a_query_to_topics(spark, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 300))
    board = metrics.Board()
    metrics.metrics(spark, topics(broker, topic).stream, window=3600, path="$.country", board=board, once=True)
    assert sum(row["messages"] for row in board.of(topic)) == 300
    assert board.of(topic)[0]["top"][0] == {"item": "de", "count": board.of(topic)[0]["top"][0]["count"]}

    sql.tables(spark, {topic: topics(broker, topic).stream}, {topic: "id BIGINT, country STRING"})
    query = f"SELECT data.id, data.country FROM {sql.table_name(topic)} WHERE data.country = 'fr'"
    out = f"{topic[:50]}.out"
    for _ in range(2):
        sql.stream(spark, query, topic=out, network=network(broker), checkpoint=tmp_path / "sql", once=True)
    found = [json.loads(text) for text in texts(spark, broker, out)]
    assert sorted(row["id"] for row in found) == list(range(0, 300, 3))
    assert found[0].keys() == {"id", "country"}


def test_dead_letters_are_reported_and_sent_back_by_a_filter(spark, broker: Node, topic: str):
    letters = dead_letters.Letters(topic, "billing", network(broker))
    broker.post("/topic/create", topic=topic)
    broker.post("/channel/create", topic=topic, channel="billing")
    try:
        broker.put("/channel/config", {"max-attempts": 1}, topic=topic, channel="billing")
        broker.get("/channel/redrive", topic=topic, channel="billing")
    except urllib.error.HTTPError as exc:
        pytest.skip(f"this broker has no dead letters: {exc}")
    publish(broker, topic, bodies(0, 30))
    fail_all(broker, topic, "billing", 30)
    table = dead_letters.as_table(spark, letters)
    [group] = dead_letters.report(table)
    assert (group["messages"], group["reason"], group["channel"]) == (30, "requeued", "billing")
    fits = "get_json_object(text, '$.country') = 'fr'"
    assert sum(group["messages"] for group in dead_letters.report(table, fits)) == 10
    assert dead_letters.redrive(spark, letters, where=fits) == (10, 20)
    wait_for(lambda: broker.depth(topic, "billing") == 10, "ten came back")
    assert dead_letters.as_table(spark, letters).count() == 20
    assert dead_letters.redrive(spark, letters) == (20, 0)
    wait_for(lambda: broker.depth(topic, "billing") == 30, "all came back")
    with pytest.raises(PipelineError, match="--where"):
        dead_letters.report(table, "no such column")


def fail_all(broker: Node, topic: str, channel: str, count: int) -> None:
    """Take every message and put it back: its one attempt has failed."""
    from flintmq import sync

    with sync.Consumer(topic, channel, nsqd=broker.tcp, max_in_flight=50) as consumer:
        for _ in range(count):
            consumer.get(timeout=60).requeue()
        wait_for(lambda: broker.depth(topic, channel) == 0, "all have died")


# --- As commands ------------------------------------------------------------------------------------------------------


def run(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flintmq", "pipeline", *argv],
        env=spark_cluster.environment(**variables),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_commands_end_to_end_and_their_exit_status(spark_environment, broker: Node, topic: str, tmp_path: Path):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 500))
    small = ("--nsqd", broker.tcp, "--conf", "spark.driver.memory=1g", "--master", "local[2,4]")
    archive = str(tmp_path / "archive")
    done = run("archive", topic, "--to", archive, "--once", *small)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^archive: 500 messages in 1 batches", done.stdout)
    assert f"archive: {archive}" in done.stdout
    assert "starting Spark" in done.stderr
    # One file less is noticed.
    next(Path(archive).rglob("*.parquet")).rename(tmp_path / "aside")
    bad = run("audit", topic, "--archive", archive, "--json", *small)
    assert bad.returncode == 1
    assert "Traceback" not in bad.stderr


def test_an_audit_of_a_pattern_is_of_the_topics_that_match_it(spark, broker: Node, topic: str, tmp_path: Path, capsys):
    one, other = f"{topic[:50]}.one", f"{topic[:50]}.two"
    for name in (one, other):
        hold(broker, name)
        publish(broker, name, bodies(0, 5))
    archiving.archive(spark, topics(broker, one, other).stream, tmp_path / "a", once=True)
    flags = ["--archive", str(tmp_path / "a"), "--nsqd", broker.tcp]
    assert main(["pipeline", "audit", *flags, "--option", f"subscribePattern={topic[:50]}.o.*", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(node["topic"], node["archived"], node["gone"]) for node in told["nodes"]] == [(one, 5, 0)]
    # Where a part of the log is read, nothing is said of the rest.
    assert main(["pipeline", "audit", one, *flags, "--from", "latest"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "5 were published before the part of the log that was read" in told and "no longer" not in told


def test_brokers_that_nobody_answers_for_are_named_without_starting_spark(topic: str, tmp_path: Path, capsys):
    address = f"127.0.0.1:{held_port()}"
    assert main(["pipeline", "archive", topic, "--to", str(tmp_path / "other"), "--once", "--nsqd", address]) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(f"flintmq pipeline archive: nsqd {address} cannot be reached: .*\n", told), told


@pytest.mark.parametrize("pipeline", ["archive", "audit", "metrics", "replay", "sql"])
def test_topics_that_no_broker_knows_are_named_and_fail_a_run_that_ends(
    broker: Node, topic: str, tmp_path: Path, capsys, pipeline: str
):
    query = tmp_path / "query.sql"
    query.write_text("SELECT 1")
    argv = {
        "archive": [topic, "--to", str(tmp_path / "archive"), "--once"],
        "audit": [topic, "--archive", str(tmp_path / "archive")],
        "metrics": [topic, "--once"],
        "replay": [topic, "--to", f"{topic}-again", "--checkpoint", str(tmp_path / "checkpoint")],
        "sql": [str(query), "--topic", topic, "--batch"],
    }
    assert main(["pipeline", pipeline, *argv[pipeline], "--nsqd", broker.tcp]) == 1
    sentence = f"flintmq pipeline {pipeline}: no broker knows the topic {topic}; asked were {broker.tcp}\n"
    assert capsys.readouterr().err == sentence, "and Spark was not started for it"


def test_a_batch_of_topics_that_brokers_do_not_all_know_is_refused_whole(
    broker: Node, topic: str, tmp_path: Path, capsys
):
    publish(broker, topic, bodies(0, 3))
    argv = [topic, f"{topic}-not", "--archive", str(tmp_path / "archive"), "--nsqd", broker.tcp]
    assert main(["pipeline", "audit", *argv]) == 1
    sentence = f"flintmq pipeline audit: no broker knows the topic {topic}-not; asked were {broker.tcp}\n"
    assert capsys.readouterr().err == sentence


def test_a_query_over_a_part_of_a_log_may_say_where_it_ends(spark, broker: Node, topic: str, tmp_path: Path, capsys):
    publish(broker, topic, bodies(0, 3))
    query = tmp_path / "query.sql"
    query.write_text(f"SELECT count(*) AS messages FROM {sql.table_name(topic)}")
    for end, count in (("2020-01-01T00:00:00Z", 0), ("2100-01-01T00:00:00Z", 3)):
        argv = [str(query), "--topic", topic, "--nsqd", broker.tcp, "--option", f"endingTimestamp={end}"]
        assert main(["pipeline", "sql", *argv, "--batch", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"messages": count}


def test_what_is_known_is_done_where_another_topic_is_not(spark, broker: Node, topic: str, tmp_path: Path, capsys):
    publish(broker, topic, bodies(0, 3))
    argv = [topic, f"{topic}-not", "--to", str(tmp_path / "archive"), "--nsqd", broker.tcp, "--once"]
    assert main(["pipeline", "archive", *argv]) == 1
    told = capsys.readouterr()
    assert f"no broker knows the topic {topic}-not; asked" in told.err
    assert "archive: 3 messages in 1 batches" in told.out


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("SELEC 1", "the query is refused: "),
        ("SELECT * FROM nowhere", "the query is refused: .*nowhere"),
        ("SELECT cast(text AS int) FROM {table}", "a word"),
    ],
)
def test_a_query_that_cannot_run_ends_with_a_sentence(
    spark, broker: Node, topic: str, tmp_path: Path, capsys, query: str, sentence: str
):
    publish(broker, topic, [b"a word"])
    file = tmp_path / "query.sql"
    file.write_text(query.format(table=sql.table_name(topic)))
    assert main(["pipeline", "sql", str(file), "--topic", topic, "--nsqd", broker.tcp, "--batch"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert re.match(f"flintmq pipeline sql: .*{sentence}", told[-1]), told
    assert not [line for line in told if "Traceback" in line]


def test_the_declarative_example_runs(spark_environment, broker: Node, topic: str, tmp_path: Path):
    pytest.importorskip("yaml", reason="spark-pipelines needs PyYAML: pip install 'flintmq[spark]'")
    hold(broker, topic)
    orders = [json.dumps({"id": n, "country": "de" if n % 3 else "fr", "amount": 2.5}).encode() for n in range(30)]
    wrong = {
        b"no json": "no JSON, or without an id",
        b'{"id": 99, "amount": 1}': "without a country",
        b'{"id": 99, "country": "de", "amount": -1}': "amount missing or negative",
    }
    publish(broker, topic, [*orders, *wrong])
    project = tmp_path / "project"
    shutil.copytree(REPOSITORY / "examples" / "declarative", project)
    spec = (project / "spark-pipeline.yml").read_text()
    spec = spec.replace("file:///tmp/flintmq-declarative", (tmp_path / "storage").as_uri())
    spec = spec.replace("127.0.0.1:4150", broker.tcp).replace("flintmq.topic: orders", f"flintmq.topic: {topic}")
    (project / "spark-pipeline.yml").write_text(spec)
    # A catalog that outlives the process, in the project's folder, so that the second run goes on with the tables.
    conf = {"spark.sql.warehouse.dir": tmp_path / "warehouse", "spark.sql.catalogImplementation": "hive"}
    flags = [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    program = str(spark_cluster.spark_home() / "bin" / "spark-pipelines")
    for expected in (30, 40):
        done = subprocess.run(
            [program, *flags, "run", "--spec", str(project / "spark-pipeline.yml")],
            env=spark_cluster.environment(),
            cwd=project,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        from pyarrow import dataset

        table = dataset.dataset(str(tmp_path / "warehouse" / "orders"), format="parquet").to_table()
        assert table.num_rows == expected
        sales = dataset.dataset(str(tmp_path / "warehouse" / "sales"), format="parquet").to_table().to_pylist()
        assert sum(row["orders"] for row in sales) == expected
        rejected = dataset.dataset(str(tmp_path / "warehouse" / "rejected"), format="parquet").to_table().to_pylist()
        assert {row["value"]: row["wrong"] for row in rejected} == wrong
        assert len(rejected) == len(wrong)
        publish(broker, topic, orders[:10])


def test_archive_behind_spark_connect_without_our_code_there(
    spark_environment, bare_python: str, broker: Node, topic: str, tmp_path: Path
):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 400))
    port = held_port()
    server = spark_cluster.Program(
        [
            str(spark_cluster.spark_home() / "bin" / "spark-submit"),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", "local[2,4]"),
            *(
                "--conf",
                f"spark.connect.grpc.binding.port={port}",
                "--conf",
                "spark.connect.grpc.binding.address=127.0.0.1",
            ),
            *("--conf", "spark.driver.memory=1g", "--conf", "spark.ui.enabled=false", "spark-internal"),
        ],
        tmp_path / "server.log",
        PYTHONPATH=str(spark_cluster.READY_PYTHON),
        PYSPARK_PYTHON=bare_python,
        PYSPARK_DRIVER_PYTHON=bare_python,
    )
    try:
        wait_for(lambda: is_open(port) or server.process.poll() is not None, "the server listens")
        archive = tmp_path / "archive"
        variables = {"SPARK_HOME": "", "JAVA_HOME": "/nowhere"}
        command = ("archive", topic, "--to", str(archive), "--once", "--nsqd", broker.tcp)
        command = (*command, "--remote", f"sc://127.0.0.1:{port}")
        done = run(*command, **variables)
        assert done.returncode == 0, done.stderr + server.log.read_text()[-3000:]
        assert rows_of(archive) == 400
        # The files are the server's, and so is the judgement that a checkpoint is missing.
        shutil.rmtree(archive / "_checkpoint")
        lost = run(*command, **variables)
        assert lost.returncode == 1, lost.stdout
        assert "archived twice" in lost.stderr.splitlines()[-1]
        assert rows_of(archive) == 400
        added = run(*command, "--new-query", **variables)
        assert added.returncode == 0, added.stderr
        assert rows_of(archive) == 800
        # A query's numbers are served by the command, to which the server tells them.
        publish(broker, topic, bodies(400, 500))
        address = f"127.0.0.1:{held_port()}"
        words = [sys.executable, "-m", "flintmq", "pipeline", *command, "--every", "1s", "--metrics-address", address]
        following = spark_cluster.Program(
            [one for one in words if one != "--once"], tmp_path / "following", **variables
        )
        try:

            def served() -> dict[str, Any]:
                assert following.process.poll() is None, following.log.read_text()
                port_of_metrics = int(address.rpartition(":")[2])
                return numbers(address, "flintmq archive") if is_open(port_of_metrics) else {}

            wait_for(lambda: served().get("flintmq_query_rows_total", (0,))[0] == 100, "the rows are counted")
            assert served()["flintmq_query_active"][0] == 1
            assert served()["flintmq_query_lag_messages"][0] == 0
            following.process.send_signal(signal.SIGINT)
            assert following.process.wait(120) == 0, following.log.read_text()
        finally:
            following.kill()
        assert rows_of(archive) == 900
        refused = run(
            "metrics", topic, "--nsqd", broker.tcp, "--once", "--remote", f"sc://127.0.0.1:{port}", **variables
        )
        assert refused.returncode == 1
        assert "--to-topic or --to-table" in refused.stderr
        # What decodes goes along, too.
        packed = f"{topic}.packed"
        hold(broker, packed)
        publish(broker, packed, [msgspec.msgpack.encode({"id": n}) if n % 5 else b"no map" for n in range(50)])
        done = run(
            *("archive", packed, "--to", str(tmp_path / "decoded"), "--once", "--nsqd", broker.tcp),
            *("--remote", f"sc://127.0.0.1:{port}", "--decode", "msgpack", "--schema", "id BIGINT"),
            *("--undecodable", "topic:{topic}.bad"),
            **variables,
        )
        assert done.returncode == 0, done.stderr + server.log.read_text()[-3000:]
        rows = deltalake.DeltaTable(str(tmp_path / "decoded")).to_pyarrow_table().to_pylist()
        assert sorted(row["data"]["id"] for row in rows if row["data"]) == [n for n in range(50) if n % 5]
        assert sum(row["error"] is not None for row in rows) == 10
        assert messages_in({"nsq.nsqd.addresses": broker.tcp, "subscribe": f"{packed}.bad"}) == 10
    finally:
        server.kill()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
