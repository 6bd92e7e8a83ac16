"""Queries that report themselves to brokers: real ones, as nsqadmin shows them, and brokers that are not there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from flintmq.admin.daemon import Admin
from flintmq.broker.observe.pipelines import read_report
from flintmq.cli import main
from flintmq.errors import OptionError
from flintmq.spark import report_queries, reporting
from flintmq.spark.reporting import QueryReporter
from flintmq.spark.shipped.options import read_sink_options

from .conftest import StartNode, run_query, start_query, wait_for
from .daemons import Node
from .test_pipelines_broker import bodies, hold, publish, topics

UNKNOWN = "00000000-0000-0000-0000-000000000000"


@contextlib.contextmanager
def nsqadmin(*nodes: Node) -> Iterator[str]:
    """An nsqadmin of these brokers, in a thread; its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def start() -> Admin:
        admin = Admin(
            http_address="127.0.0.1:0", nsqd_http_addresses=[node.http for node in nodes], refresh_interval=300_000_000
        )
        await admin.start()
        return admin

    try:
        admin = run(start())
        try:
            yield admin.http_address
        finally:
            run(admin.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def shown(address: str, **query: str) -> dict[str, dict[str, Any]]:
    """The queries that nsqadmin shows, by name."""
    text = "&".join(f"{name}={value}" for name, value in query.items())
    with urllib.request.urlopen(f"http://{address}/api/v2/pipelines?{text}", timeout=30) as answer:
        return {one["name"]: one for one in json.load(answer)["queries"]}


def addresses(*nodes: Node) -> dict[str, str]:
    return {"nsq.nsqd.addresses": ",".join(node.tcp for node in nodes)}


def test_a_query_is_in_nsqadmin_also_while_a_broker_is_gone(
    spark, start_node: StartNode, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(reporting, "RENEW_SECONDS", 2.0)
    monkeypatch.setattr(reporting, "_AGAIN_SECONDS", 1.0)
    pair = [start_node(), start_node()]
    stranger = start_node()
    for node in pair:
        hold(node, topic)
        publish(node, topic, bodies(0, 300))
    reporter = report_queries(spark, {**addresses(*pair, stranger), "subscribe": "is passed over"}, writes=[])
    with nsqadmin(*pair, stranger) as admin:
        options = {**addresses(*pair), "maxMessagesPerTrigger": "200"}
        query = start_query(
            lambda: (
                topics(pair[0], topic, **options)
                .stream(spark)
                .groupBy("topic")
                .count()
                .writeStream.queryName("counted")
                .outputMode("complete")
                .format("memory")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .start()
            )
        )
        try:
            found = wait_for(lambda: (one := shown(admin).get("counted")) and one["rows"] == 600 and one)
            assert (found["id"], found["state"], found["topics"]) == (str(query.id), "running", [topic])
            assert (found["batch"], found["state_rows"]) == (2, 1)
            assert found["batch_seconds"] > 0 and found["state_bytes"] > 0
            assert found["host"] == socket.gethostname()
            [reader] = found["readers"]
            assert reader.startswith("spark-")
            wait_for(lambda: shown(admin)["counted"]["lag"] == 0)
            # Each reports to those that it reads.
            wait_for(lambda: shown(admin)["counted"]["nodes"] == sorted(node.http for node in pair), "two nodes")
            assert shown(admin, topic=topic).keys() == {"counted"}
            assert shown(admin, topic="another") == {}

            # A broker goes: the query goes on, and is told of by the other.
            pair[1].kill()
            publish(pair[0], topic, bodies(300, 400))
            wait_for(lambda: shown(admin)["counted"]["rows"] == 700, "the batch without the broker")
            wait_for(lambda: shown(admin)["counted"]["nodes"] == [pair[0].http], "one node")
            assert query.isActive
            pair[1].start()
            wait_for(lambda: len(shown(admin)["counted"]["nodes"]) == 2, "the report to the broker that came back")
            publish(pair[1], topic, bodies(300, 350))
            wait_for(lambda: shown(admin)["counted"]["rows"] == 750, "the batch of the broker that came back")

            assert main(["pipeline", "status", topic, "--nsqd", pair[0].tcp, "--nsqd", pair[1].tcp, "--json"]) == 0
            [told] = json.loads(capsys.readouterr().out)["queries"]
            assert (told["id"], told["rows"], told["state"]) == (str(query.id), 750, "running")
            checkpoint = ["--checkpoint", str(tmp_path / "checkpoint"), "--nsqd", pair[0].tcp]
            assert main(["pipeline", "status", *checkpoint]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert lines[1].split()[:3] == ["QUERY", "STATE", "READS"]
            assert lines[2].split()[:3] == ["counted", "running", topic]
        finally:
            query.stop()
        wait_for(lambda: shown(admin)["counted"]["state"] == "ended", "the end of the query")

        def fail(rows: Any, number: int) -> None:
            raise ValueError("no room left in the test")

        with pytest.raises(Exception, match="no room left"):
            run_query(
                lambda: (
                    topics(pair[0], topic)
                    .stream(spark)
                    .writeStream.queryName("doomed")
                    .foreachBatch(fail)
                    .option("checkpointLocation", str(tmp_path / "doomed"))
                    .start()
                )
            )
        doomed = wait_for(lambda: (one := shown(admin).get("doomed")) and one["state"] == "failed" and one)
        assert "no room left in the test" in doomed["error"]
    reporter.close()


def test_the_end_of_the_reporter_is_the_end_of_its_queries_for_the_brokers(
    spark, broker: Node, topic: str, tmp_path: Path
):
    hold(broker, topic)
    publish(broker, topic, bodies(0, 10))
    reporter = report_queries(spark, addresses(broker), writes=["totals"])
    query = start_query(
        lambda: (
            topics(broker, topic)
            .stream(spark)
            .writeStream.queryName("left")
            .format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
    )

    def left() -> Any:
        return next((one for one in broker.get("/pipeline/report")["pipelines"] if one["name"] == "left"), None)

    try:
        wait_for(lambda: (found := left()) and found["rows"] == 10)
        reporter.close("the driver ends")
        assert (left()["state"], left()["error"], left()["writes"]) == ("failed", "the driver ends", ["totals"])
        assert query.isActive
    finally:
        query.stop()


# --- Without Spark ----------------------------------------------------------------------------------------------------


def progress(**more: Any) -> Any:
    about = {
        "id": UNKNOWN,
        "name": "made up",
        "batchId": 3,
        "numInputRows": 5,
        "processedRowsPerSecond": 2.5,
        "durationMs": {"triggerExecution": 1500, "addBatch": 900},
        "sources": [],
        "stateOperators": [],
    }
    return SimpleNamespace(progress=SimpleNamespace(**about | more))


@contextlib.contextmanager
def silence() -> Iterator[str]:
    """An address where somebody listens, and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unbound.getsockname()[1]}"


@pytest.mark.parametrize("who", [silence, nobody], ids=["hangs", "refuses"])
@pytest.mark.parametrize("option", ["nsq.nsqd.addresses", "nsq.nsqd.http.addresses", "nsq.lookupd.http.addresses"])
def test_brokers_that_do_not_answer_hold_nobody_up(who: Any, option: str):
    with who() as address:
        reporter = QueryReporter(read_sink_options({option: address}).network)
        began = time.monotonic()
        reporter.onQueryStarted(SimpleNamespace(id=UNKNOWN, name="q"))
        for number in range(100):
            reporter.onQueryProgress(progress(batchId=number))
        reporter.onQueryIdle(SimpleNamespace(id=UNKNOWN))
        assert time.monotonic() - began < 1
        began = time.monotonic()
        reporter.close()
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"name": None},
        {"name": "two\nlines\x1b" + "x" * 300},
        {"numInputRows": None, "processedRowsPerSecond": None, "durationMs": {}},
        {"processedRowsPerSecond": float("nan")},
        {"processedRowsPerSecond": float("inf")},
        {"batchId": -1},
        {"stateOperators": [SimpleNamespace(numRowsTotal=7, memoryUsedBytes=-1)]},
        {"sources": [SimpleNamespace(latestOffset="{}", endOffset=None)]},
        {"sources": [SimpleNamespace(latestOffset="not JSON", endOffset="[1")]},
        {"sources": [SimpleNamespace(latestOffset='{"v":1,"mode":"log","p":3}', endOffset='{"v":1,"mode":"log"}')]},
        {"sources": None},
        {
            "sources": [
                SimpleNamespace(
                    latestOffset='{"v":1,"mode":"spool","spool":"s","o":9,"topics":["orders"]}',
                    endOffset='{"v":1,"mode":"spool","spool":"s","o":4}',
                )
            ]
        },
        {
            "sources": [
                SimpleNamespace(
                    latestOffset=json.dumps({"v": 1, "mode": "log", "p": {f"t{n}": {"n": {"e": "e", "o": 9}}}}),
                    endOffset=json.dumps({"v": 1, "mode": "log", "p": {f"t{n}": {"n": {"e": "e", "o": 4}}}}),
                )
                for n in range(100)
            ]
        },
    ],
)
def test_whatever_spark_says_a_broker_takes_the_report(more: dict[str, Any]):
    with nobody() as address:
        reporter = QueryReporter(read_sink_options({"nsq.nsqd.http.addresses": address}).network)
        try:
            reporter.onQueryProgress(progress(**more))
            for query in reporter._queries.values():
                said = read_report(query.as_json("host", ()))
                assert said.id == UNKNOWN
                if more.get("sources") and "spool" in str(more["sources"]):
                    assert (said.topics, said.lag) == (["orders"], 5)
        finally:
            reporter.close("an error of two\nlines and of \x00 " + "x" * 1000)


def test_options_that_are_wrong_are_told_at_once(spark):
    with pytest.raises(OptionError, match="say where the brokers are"):
        report_queries(spark, {"subscribe": "orders"})
