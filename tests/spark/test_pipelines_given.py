"""Options on the command line of a pipeline, and the arguments that say the same: nothing is overridden silently."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from flintmq.errors import PipelineError
from flintmq.spark.pipelines import PIPELINES, common, replay
from flintmq.spark.pipelines.archive import write_batch
from flintmq.spark.pipelines.tables import open_table
from flintmq.spark.shipped.files import DataFile, FileWriter


def parsed(pipeline: str, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"flintmq.spark.pipelines.{PIPELINES[pipeline][0]}").add_arguments(parser)
    return parser.parse_args(argv)


def archive(*argv: str) -> argparse.Namespace:
    return parsed("archive", "--to", "x", *argv)


def replayed(*argv: str) -> argparse.Namespace:
    return parsed("replay", "--to", "again", "--checkpoint", "y", *argv)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["t", "--option", "subscribe=x"], "--option subscribe: name topics by TOPIC instead"),
        (["t", "--option", "SUBSCRIBE=t"], "--option subscribe: name topics by TOPIC instead"),
        (["--option", "subscribe=x"], "--option subscribe: name topics by TOPIC instead"),
        (["t", "--option", "subscribepattern=x.*"], "--option subscribePattern and TOPIC exclude each other"),
        (
            ["t", "--channel", "c", "--option", "channel=d"],
            "--option channel and --channel say the same: give one of them",
        ),
        (["t", "--from", "latest", "--option", "startingOffsets=earliest"], "startingOffsets and --from say the same"),
        (["t", "--from", "2026-11-16", "--option", "startingTimestamp=5"], "startingTimestamp and --from say the same"),
        (
            ["t", "--nsqd", "a:1", "--option", "NSQ.nsqd.addresses=b:1"],
            "nsq.nsqd.addresses and --nsqd say the same: give one of them",
        ),
        (
            ["t", "--lookupd", "a:1", "--option", "nsq.lookupd.http.addresses=b:1"],
            "nsq.lookupd.http.addresses and --lookupd say the same",
        ),
        (["t", "--option", "checkpointLocation=/c"], "--option checkpointLocation: .* give --checkpoint"),
        (["t", "--option", "mode=log", "--option", "Mode=spool"], "--option mode is given twice, with two values"),
    ],
)
def test_an_option_that_an_argument_gives_too_is_refused(capsys: Any, argv: list[str], text: str):
    from flintmq.cli import main

    with pytest.raises(PipelineError, match=text):
        common.topics_of(archive(*argv))
    assert main(["pipeline", "archive", "--to", "x", *argv]) == 1
    said = capsys.readouterr().err
    assert said.startswith("flintmq pipeline archive: --option ") and said.count("\n") == 1


def test_a_secret_that_is_given_twice_is_not_shown():
    with pytest.raises(PipelineError, match=r"nsq\.auth\.secret is given twice") as caught:
        common.topics_of(archive("t", "--option", "nsq.auth.secret=one", "--option", "nsq.auth.secret=two"))
    assert "two" not in str(caught.value).replace("two values", "")
    same = archive("t", "--option", "nsq.auth.secret=one", "--option", "nsq.auth.secret=one")
    assert common.topics_of(same).options["nsq.auth.secret"] == "one"


def test_topics_of_a_query_are_named_by_their_own_argument():
    for option in ("subscribe=x", "subscribePattern=x"):
        with pytest.raises(PipelineError, match=f"--option {option[:-2]}.*--topic"):
            common.topics_of(parsed("sql", "q.sql", "--topic", "t", "--option", option))


def test_what_is_given_once_is_taken():
    found = common.topics_of(archive("t", "--option", "maxmessagespertrigger=5", "--option", "startingTimestamp=7"))
    assert found.all_options == {
        "subscribe": "t",
        "maxMessagesPerTrigger": "5",
        "startingTimestamp": "7",
        "nsq.nsqd.addresses": "127.0.0.1:4150",
    }
    assert common.topics_of(archive("t")).options["startingOffsets"] == "earliest"
    assert common.topics_of(archive("t", "--from", "2026-11-16")).options["startingTimestamp"] == "2026-11-16"
    pattern = common.topics_of(archive("--option", "subscribepattern=x.*"))
    assert "subscribe" not in pattern.all_options and pattern.options["subscribePattern"] == "x.*"
    common.need_topics(archive("--option", "SubscribePattern=x.*"))
    by_option = archive("t", "--option", "nsq.nsqd.addresses=b:1", "--channel", "c")
    assert common.topics_of(by_option).options["nsq.nsqd.addresses"] == "b:1"
    assert common.network_options(by_option) == {"nsq.nsqd.addresses": "b:1"}
    assert common.network_options(archive("t", "--option", "fetch.timeoutms=5"))["fetch.timeoutMs"] == "5"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["t", "--since", "2026-11-16", "--from", "latest"], "--since and --from"),
        (["t", "--since", "2026-11-16", "--option", "startingOffsets=latest"], "--since and --from, or an option"),
        (["t", "--until", "2026-11-16", "--option", "endingTimestamp=5"], "--until and an option"),
        (["t", "--to-option", "topic=elsewhere"], "--to-option topic: .* give --to$"),
        (["t", "--to-option", "writeId=w"], "--to-option writeId"),
        (["t", "--to-nsqd", "a:1", "--to-option", "nsq.nsqd.addresses=b:1"], "nsq.nsqd.addresses and --to-nsqd"),
        (["t", "--to-option", "mpubMaxMesages=1"], "did you mean mpubMaxMessages"),
    ],
)
def test_a_replay_that_is_told_two_things_is_refused(capsys: Any, argv: list[str], text: str):
    from flintmq.cli import main

    assert main(["pipeline", "replay", "--to", "again", "--checkpoint", "y", *argv]) == 1
    said = capsys.readouterr().err
    with pytest.raises(PipelineError, match=text):
        raise PipelineError(said.strip())


def test_a_replay_publishes_where_its_source_is_unless_it_is_told_to_go_elsewhere():
    source = ["t", "--nsqd", "a:1", "--option", "nsq.http.token=ours", "--option", "mode=log"]
    here = {"nsq.nsqd.addresses": "a:1", "nsq.http.token": "ours"}
    assert common.sink_options(replayed(*source)) == here
    # Other options of the sink say nothing about its brokers.
    assert common.sink_options(replayed(*source, "--to-option", "mpubmaxmessages=7")) == here | {"mpubMaxMessages": "7"}
    there = common.sink_options(replayed(*source, "--to-lookupd", "b:1", "--to-option", "nsq.http.token=theirs"))
    assert there == {"nsq.lookupd.http.addresses": "b:1", "nsq.http.token": "theirs"}


def test_times_of_a_replay_are_options_of_its_source():
    arguments = replayed("t", "--since", "2026-11-16T01:00:00Z", "--until", "2026-11-16T02:00:00Z")
    options = replay._log_options(arguments)
    assert options["startingTimestamp"] == "2026-11-16T01:00:00+00:00" and "startingOffsets" not in options
    assert options["endingTimestamp"] == "2026-11-16T02:00:00+00:00"
    assert replay._log_options(replayed("--option", "subscribePattern=x"))["subscribePattern"] == "x"


@pytest.mark.parametrize("pipeline", ["status", "dead-letters"])
def test_options_that_nothing_reads_are_refused(capsys: Any, pipeline: str):
    from flintmq.cli import main

    names = ["t", "c"] if pipeline == "dead-letters" else ["t"]
    assert main(["pipeline", pipeline, *names, "--option", "where=offset > 1"]) == 1
    assert "only options of brokers are taken here" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "argument"), [("spark.master", "--master"), ("spark.remote", "--remote")])
def test_settings_of_spark_that_are_arguments_are_refused(key: str, argument: str):
    pytest.importorskip("pyspark")
    with pytest.raises(PipelineError, match=f"--conf {key}: give {argument} x instead"):
        common.open_session(archive("t", "--conf", f"{key}=x"), "test")


def test_packages_of_a_user_are_added_to_those_of_hadoop(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pyspark")
    importlib.import_module("flintmq.spark.session")
    seen: dict[str, Any] = {}

    def session(app: str, **settings: Any) -> Any:
        seen.update(settings)
        raise PipelineError("here Spark would start")

    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["flintmq.spark.session"], "session", session)
    with pytest.raises(PipelineError, match="here Spark"):
        common.open_session(archive("t", "--packages", "--conf", "spark.jars.packages=a:b:1"), "test")
    assert "org.apache.hadoop:hadoop-aws:" in seen["spark.jars.packages"]
    assert seen["spark.jars.packages"].endswith(",a:b:1")


def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let command lines go as far as Spark's start, whatever brokers there are."""

    def session(*_: Any) -> Any:
        raise PipelineError("here Spark would start")

    monkeypatch.setattr(common, "open_session", session)
    monkeypatch.setattr(common, "check_topics", lambda *_, **__: 0)


def table_of(root: Path, *topics: str) -> str:
    """An archive that has a message of each of these topics."""
    pytest.importorskip("deltalake")
    import pyarrow as pa

    from flintmq.spark.shipped.files import Place

    columns = {"value": pa.binary(), "node": pa.string(), "id": pa.string()}
    columns |= {"topic": pa.string(), "offset": pa.int64(), "timestamp_ns": pa.int64()}
    schema = pa.schema(list(columns.items()))
    table = open_table(Place.of(root))
    table.make(schema, True)
    batches = [
        pa.RecordBatch.from_pylist([dict.fromkeys(columns) | {"topic": one, "offset": 0, "timestamp_ns": 0}], schema)
        for one in topics
    ]
    told = FileWriter(table.place, "f", schema, partitioned=True, keeps_topic=False)(iter(batches))
    files = [DataFile(**json.loads(line)) for batch in told for line in batch.column(0).to_pylist()]
    table.commit("q", 0, [], files)
    return str(root)


REFUSED_BESIDE_AN_ARCHIVE = [
    (["--option", "nonsense=1"], "--option nonsense: only options of brokers"),
    (["--option", "where=offset > 1"], "--option where: only options of brokers"),
    (["--option", "startingTimestamp=5"], "--option startingTimestamp: only options of brokers"),
    (["--option", "subscribePattern=x.*"], "--option subscribePattern: only options of brokers"),
    (["--option", "nsq.nonsense=1"], "no option nsq.nonsense"),
    (["--from", "latest"], "--from has no meaning with --archive"),
    (["--channel", "c"], "--channel has no meaning with --archive"),
    (["--to-nsqd", "a:1", "--nsqd", "b:1"], "--nsqd has no meaning with --archive and brokers to publish to"),
    (["--to-nsqd", "a:1", "--option", "nsq.tls=true"], "--option has no meaning with --archive and brokers to"),
]


@pytest.mark.parametrize(("flags", "text"), REFUSED_BESIDE_AN_ARCHIVE)
def test_a_replay_of_an_archive_refuses_what_it_would_not_read(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], text: str
):
    from flintmq.cli import main

    without_spark(monkeypatch)
    place = table_of(tmp_path / "archive", "t")
    given = ["--archive", place, "--to", "again", "--checkpoint", str(tmp_path / "c"), *flags]
    assert main(["pipeline", "replay", *given]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--format", "--catalog", "--table"])
def test_a_replay_of_a_log_refuses_what_is_of_a_table(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
):
    from flintmq.cli import main

    without_spark(monkeypatch)
    given = ["t", "--to", "again", "--checkpoint", str(tmp_path / "c"), flag, "delta"]
    assert main(["pipeline", "replay", *given]) == 1
    assert f"{flag} has no meaning without --archive" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--option", "where=offset < 0"], ["--nsqd", "a:1"], ["--lookupd", "a:1"]])
def test_a_backfill_out_of_an_archive_refuses_what_it_would_not_read(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
):
    from flintmq.cli import main

    without_spark(monkeypatch)
    places = [table_of(tmp_path / name, "t") for name in ("to", "from")]
    given = ["t", "--to", places[0], "--archive", places[1], "--since", "2020-01-01", *flags]
    assert main(["pipeline", "backfill", *given]) == 1
    assert f"{flags[0]} has no meaning with --archive" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["nonsense=1", "subscribePattern=("])
def test_options_beside_a_pattern_are_checked_before_spark_starts(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
):
    pytest.importorskip("pyspark")
    from flintmq.cli import main

    monkeypatch.setattr(common, "open_session", lambda *_: pytest.fail("Spark started"))
    given = ["--archive", table_of(tmp_path / "a", "t"), "--option", option]
    given += [] if "Pattern" in option else ["--option", "subscribePattern=t.*"]
    assert main(["pipeline", "audit", *given]) == 1
    assert "nonsense" in (said := capsys.readouterr().err) or "is no regular expression" in said


@pytest.mark.parametrize("pipeline", ["replay", "backfill"])
def test_topics_that_an_archive_does_not_have_are_named(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str
):
    from flintmq.cli import main

    without_spark(monkeypatch)
    place, checkpoint = table_of(tmp_path / "archive", "orders", "clicks"), tmp_path / "c"
    given = {
        "replay": ["--to", "again", "--checkpoint", str(checkpoint)],
        "backfill": ["--to", table_of(tmp_path / "to", "orders"), "--since", "2020-01-01"],
    }[pipeline]
    assert main(["pipeline", pipeline, "ordrs", "orders", "--archive", place, *given]) == 1
    assert "has no messages of the topic ordrs: it has clicks, orders" in capsys.readouterr().err
    assert not (checkpoint / "plan.json").exists()
    assert main(["pipeline", pipeline, "orders", "--archive", place, *given]) == 1
    assert "here Spark would start" in capsys.readouterr().err


def test_an_archive_without_the_topic_of_a_replay_makes_no_plan(tmp_path: Path):
    pytest.importorskip("pyspark")
    from flintmq.spark.pipelines import replay

    place, spark = table_of(tmp_path / "archive", "orders"), None
    with pytest.raises(PipelineError, match="of the topic ordrs: it has orders"):
        replay.archive_chunks(spark, place, topics=["ordrs"])  # type: ignore[arg-type]
    assert len(replay.archive_chunks(spark, place, topics=["orders"])) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("argv", [["audit", "t", "--archive", "a"], ["replay", "t", "--to", "x", "--checkpoint", "c"]])
def test_a_channel_is_refused_where_logs_are_read(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]
):
    pytest.importorskip("pyspark")
    from flintmq.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", *argv, "--channel", "c"]) == 1
    assert "leave out --channel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("336h", "1209600000000 microseconds"),
        ("20m34567ms", "1234567000 microseconds"),
        ("0.05s", "50000 microseconds"),
    ],
)
def test_a_long_time_between_batches_is_one_that_spark_reads(monkeypatch: pytest.MonkeyPatch, given: str, taken: str):
    class Writer:
        def trigger(self, *, processingTime: str) -> None:
            assert processingTime == taken
            raise KeyError("done")

    every = archive("t", "--every", given).every
    with pytest.raises(KeyError, match="done"):
        common.run_stream(Writer(), "archive", once=False, every=every)  # type: ignore[arg-type]


def test_a_folder_of_a_user_that_there_is_not_is_refused_in_a_sentence(capsys: Any, tmp_path: Path):
    pytest.importorskip("pyspark")
    from flintmq.cli import main

    for argv in (
        ["archive", "t", "--to", "~nosuchuser/x"],
        ["status", "--checkpoint", "~nosuchuser/x"],
        ["archive", "t", "--to", str(tmp_path / "a"), "--schema", "@~nosuchuser/x"],
        ["archive", "t", "--to", str(tmp_path / "a"), "--decode", "avro", "--schema", "@~nosuchuser/x"],
        ["sql", "~nosuchuser/x", "--topic", "t"],
    ):
        assert main(["pipeline", *argv]) == 1, argv
        said = capsys.readouterr().err
        assert "nosuchuser" in said and said.count("\n") == 1, argv


@pytest.mark.parametrize("format", ["json", "msgpack", "avro", "protobuf"])
def test_a_schema_that_cannot_be_read_is_told_before_spark_starts(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
):
    pytest.importorskip("pyspark")
    from flintmq.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "open_session", lambda *_: pytest.fail("Spark started"))
    monkeypatch.setattr(common, "check_topics", lambda *_, **__: 0)
    (tmp_path / "q").write_text("SELECT 1")
    (tmp_path / "latin").write_bytes(b"\xe4 INT")
    table_of(tmp_path / "b", "t")
    for argv in (
        ["archive", "t", "--to", "a", "--schema", "@nowhere"],
        ["sql", "q", "--topic", "t", "--schema", "t=@nowhere"],
        ["backfill", "t", "--to", "b", "--since", "2020-01-01", "--schema", "@nowhere"],
    ):
        assert main(["pipeline", *argv, "--decode", format]) == 1
        assert "the schema cannot be read: " in capsys.readouterr().err
    if format != "protobuf":
        assert main(["pipeline", "archive", "t", "--to", "a", "--schema", "@latin", "--decode", format]) == 1
        assert "latin is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_a_type_that_a_table_does_not_have_is_named(tmp_path: Path, format: str):
    """Before a task of the first batch runs, and in one line, as it comes through Java."""
    types = pytest.importorskip("pyspark.sql.types")
    pytest.importorskip("deltalake" if format == "delta" else "pyiceberg")
    from flintmq.spark.shipped.files import Place

    kind = types.TimeType(6) if format == "delta" else types.DayTimeIntervalType()
    rows: Any = argparse.Namespace(schema=types.StructType([types.StructField("t", kind)]))
    table = open_table(Place.of(tmp_path / "a"), format)
    with pytest.raises(
        PipelineError, match=r"(?i)cannot be made: .*(invalid data|unsupported) type.*(Time64|duration)"
    ):
        write_batch(table, rows, "n", partitioned=False)


def test_the_words_of_a_plain_exception_come_out_of_spark():
    said = """[STREAM_FAILED] Query [id = a, runId = b] terminated with exception: [X] An error
py4j.Py4JException: An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "x.py", line 1, in call
    self.func(DataFrame(jdf, wrapped_session_jdf), batch_id)
Exception: the store says no

	at py4j.Protocol.getReturnValue(Protocol.java:476)"""
    assert common.explain(RuntimeError(said)) == "the store says no"
