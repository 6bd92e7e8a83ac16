"""No pipeline reads what it publishes, and a message that cannot be put aside stays in its archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytest.importorskip("deltalake")

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import archive as archiving
from flintmq.spark.pipelines import common, sql
from flintmq.spark.pipelines.loops import Reads, check_loop

from .daemons import Node
from .test_pipelines_broker import network, publish, texts, topics

HERE = {"nsq.nsqd.addresses": "a:1,b:1"}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["archive", "t", "--to", "x", "--decode", "--undecodable", "topic:t"], "topic t is one of those that are"),
        (["archive", "t", "--to", "x", "--decode", "--undecodable", "topic:{topic}"], "topic t is one of"),
        (["archive", "t", "t.bad", "--to", "x", "--decode", "--undecodable", "topic:{topic}.bad"], "topic t.bad is"),
        (
            ["archive", "--option", "subscribePattern=t.*", "--to", "x", "--decode", "--undecodable", "topic:t.bad"],
            "topic t.bad is one of those that are read",
        ),
        (
            ["archive", "--option", "subscribePattern=t.*", "--to", "x", "--decode", "--undecodable", "topic:{topic}"],
            "topic of a message is one of those that are read",
        ),
        (["archive", "t" * 62, "--to", "x", "--decode", "--undecodable", "topic:{topic}.bad"], "is no name of a topic"),
        (["archive", "t", "--to", "x", "--decode", "--undecodable", "topic:no name"], "is no name of a topic"),
        (["sql", "{query}", "--topic", "t", "--to-topic", "t", "--checkpoint", "c"], "topic t is one of"),
        (["metrics", "t", "--to-topic", "t", "--checkpoint", "c"], "topic t is one of those that are read"),
        (
            ["metrics", "--option", "subscribePattern=t.*", "--to-topic", "t.metrics", "--checkpoint", "c"],
            "topic t.metrics is one of those that are read",
        ),
        (["replay", "t", "--to", "{topic}", "--checkpoint", "c"], "topic t is one of those that are read"),
        (["replay", "t", "--to", "t", "--checkpoint", "c"], "topic t is one of those that are read"),
    ],
)
def test_what_would_be_read_again_is_refused_before_spark_starts(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], text: str
):
    from flintmq.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "open_session", lambda *_: pytest.fail("Spark started"))
    monkeypatch.setattr(common, "check_topics", lambda *_, **__: 0)
    if hasattr(common, "known_topics"):
        monkeypatch.setattr(common, "known_topics", lambda *_: [])
    (tmp_path / "query").write_text("SELECT value FROM t")
    assert main(["pipeline", *(str(tmp_path / "query") if one == "{query}" else one for one in argv)]) == 1
    assert text in capsys.readouterr().err


def test_topics_of_other_brokers_are_others():
    source = {"subscribe": "orders, clicks", **HERE}
    for same in (HERE, {"nsq.nsqd.addresses": "b:1"}):
        with pytest.raises(PipelineError, match="--to clicks: the topic clicks"):
            check_loop(source, "clicks", same, "--to")
        check_loop(source, "{topic}.again", same, "--to")
    for other in ({"nsq.nsqd.addresses": "c:1"}, {"nsq.lookupd.http.addresses": "a:1"}):
        check_loop(source, "{topic}", other, "--to")
        assert "orders" not in Reads.of(source, other)
    # Nothing is said of brokers: they are the same.
    assert "orders1" in Reads.of({"subscribePattern": "orders.*"}, {})


def test_topics_that_match_a_pattern_are_looked_at_before_the_start():
    aside = archiving.Aside(topic="{topic}.bad", network=HERE)
    target = archiving.Target.of("archive")
    source = {"subscribePattern": "t.*", **HERE}
    with pytest.raises(PipelineError, match=r"topic t1\.bad is one of those that are read"):
        aside.check(target, source, is_decoded=True, known=["t1"])
    with pytest.raises(PipelineError, match="is no name of a topic"):
        aside.check(target, {"subscribePattern": "t+", **HERE}, is_decoded=True, known=["t" * 62])
    aside.check(target, {"subscribePattern": "t+", **HERE}, is_decoded=True, known=["t"])


def test_a_message_that_cannot_be_put_aside_stays_in_the_archive_and_stops_nothing(
    spark: Any, broker: Node, topic: str, tmp_path: Path, capfd: Any
):
    """Its topic came after the start, and its name is too long to be continued, or is one that is read."""
    begin = topic[:20]
    named = [f"{begin}-{'x' * 40}", f"{begin}-y"]
    for one in named:
        publish(broker, one, [b"bad", b'{"a": 1}'])
    given = {"startingOffsets": "earliest", "subscribePattern": f"{begin}-[xy]+", **network(broker)}
    aside = archiving.Aside(topic="{topic}.bad", network=network(broker))

    def run(source: Any) -> list[Any]:
        archiving.archive(spark, source, tmp_path / "a", decode=True, schema="a INT", undecodable=aside, once=True)
        return list(archiving.read(spark, tmp_path / "a").collect())

    rows = run(common.Topics([], given).stream)
    assert len(rows) == 4 and sum(row["error"] is not None for row in rows) == 2
    assert texts(spark, broker, f"{begin}-y.bad") == ["bad"]
    told = capfd.readouterr().err
    assert f"messages of {named[0]} would go to '{named[0]}.bad', and that is no name of a topic" in told


def test_a_query_whose_rows_say_themselves_that_they_go_back_stops(
    spark: Any, broker: Node, topic: str, tmp_path: Path
):
    publish(broker, topic, [b"one"])
    source = topics(broker, topic)
    sql.tables(spark, {topic: source.stream})
    with pytest.raises(PipelineError, match=f"the topic {topic} is read, too.*leave the column out"):
        sql.stream(
            spark,
            f"SELECT * FROM {sql.table_name(topic)}",
            topic="elsewhere",
            network=network(broker),
            checkpoint=tmp_path / "c",
            reads=Reads.of(source.all_options, network(broker)),
            once=True,
        )
    assert texts(spark, broker, topic) == ["one"]


def test_brokers_are_asked_which_topics_match_a_pattern(
    broker: Node, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    from flintmq.cli import main

    monkeypatch.setattr(common, "open_session", lambda *_: pytest.fail("Spark started"))
    broker.post("/topic/create", topic=topic)
    flags = ["--to", str(tmp_path / "a"), "--nsqd", broker.tcp, "--option", f"subscribePattern={topic}.*", "--decode"]
    assert main(["pipeline", "archive", *flags, "--undecodable", "topic:{topic}.bad"]) == 1
    assert "that are read, so that each message would come back" in capsys.readouterr().err
