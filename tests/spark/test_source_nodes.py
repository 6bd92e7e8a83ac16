"""Nodes that are gone, nodes that have nothing to do with a query, and readers that are there for a while. No Spark."""

from __future__ import annotations

import json
import logging
import random
import urllib.request
from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark")

from flintmq.errors import ConnectError, OptionError
from flintmq.spark.log_mode import topic_log
from flintmq.spark.registration import given_up
from flintmq.spark.shipped.options import read_source_options
from flintmq.spark.source import _find_mode

from .conftest import wait_for
from .test_source_log import publish
from .test_source_planner import next_offset, planner, read, refresh  # noqa: F401

SHORT = {"fetch.timeoutMs": "1000", "fetch.numRetries": "0"}


# --- A node that is gone for good -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_a_range_on_a_node_that_is_gone_is_given_up_where_losses_are_allowed(
    planner,  # noqa: F811
    start_node,
    topic,
    caplog,
    seed,
):
    chosen = random.Random(seed)
    counts = [chosen.randint(1, 60) for _ in range(3)]
    names = [f"{topic}-{number}" for number in range(3)]
    one, two = start_node(), start_node()
    for name, count in zip(names, counts, strict=True):
        publish(one, name, range(count))
        publish(two, name, range(1000, 1000 + count))
    given = {"subscribe": ",".join(names), "startingOffsets": "earliest", "minPartitions": "5", **SHORT}
    first = planner(one, two, **given)
    start = first.initial_offset()
    end = next_offset(first, start)
    two.kill()
    strict = planner(one, two, **given)
    with pytest.raises(ConnectError, match=r"start it, and the query goes on where it stopped.*failOnDataLoss=false"):
        read(strict, start, end)
    lax = planner(one, two, failOnDataLoss="false", **given)
    expected = sorted(number for count in counts for number in range(count))
    with caplog.at_level(logging.WARNING):
        assert sorted(read(lax, start, end)) == expected
    assert "is gone" in caplog.text and "failOnDataLoss=false" in caplog.text
    # They are counted, once, however often the batch is planned, and the query goes on.
    assert sorted(read(lax, start, end)) == expected
    publish(one, names[0], range(5000, 5007))
    after = next_offset(lax, end)
    assert read(lax, end, after) == list(range(5000, 5007))
    progress = SimpleNamespace(sources=[SimpleNamespace(latestOffset=json.dumps(lax.report()))])
    assert given_up(progress) == sum(counts)
    # When it comes back after all, reading goes on behind what was given up.
    two.start()
    publish(two, names[1], range(7000, 7003))
    last = wait_for(lambda: (found := next_offset(lax, after)) != after and found, "the node is found again")
    assert read(lax, after, last) == list(range(7000, 7003))


# --- Nodes with other topics ------------------------------------------------------------------------------------------


def knows(lookupd, nodes):
    with urllib.request.urlopen(f"http://{lookupd.http}/nodes") as answer:
        producers = json.load(answer)["producers"]
    return len(producers) == len(nodes) and all(producer["topics"] for producer in producers)


@pytest.fixture
def mixed(lookupd, start_node, topic):
    """A lookupd with one broker that has the topic, and a plain nsqd that has another."""
    ours = start_node("flintmq", f"--lookupd-tcp-address={lookupd.tcp}")
    plain = start_node("go", f"--lookupd-tcp-address={lookupd.tcp}")
    publish(ours, topic, range(17))
    plain.publish("unrelated", [b"1"])
    wait_for(lambda: knows(lookupd, [ours, plain]), "the lookupd knows both")
    return ours, plain


@pytest.mark.parametrize("by", ["subscribe", "subscribePattern"])
def test_a_plain_nsqd_with_other_topics_does_not_matter(planner, lookupd, mixed, topic, by):  # noqa: F811
    _, plain = mixed
    given = {"nsq.lookupd.http.addresses": lookupd.http, by: topic, "startingOffsets": "earliest"}
    found = planner(**given)
    start = found.initial_offset()
    end = next_offset(found, start)
    assert read(found, start, end) == list(range(17))
    assert sum(part.size for part, _ in planner(streaming=False, **given).snapshot()) == 17
    assert _find_mode(read_source_options(given, streaming=True)) == "log"
    # It matters as soon as it has what is read.
    plain.publish(topic, [b"1"])
    wait_for(lambda: topic in registered(lookupd, plain), "the lookupd knows it")
    refresh(found)
    with pytest.raises(OptionError, match="keeps no log that can be read by offsets"):
        found.latest_offset(end, None)
    with pytest.raises(OptionError, match="name a channel"):
        _find_mode(read_source_options(given, streaming=True))
    assert _find_mode(read_source_options({**given, "channel": "c"}, streaming=True)) == "spool"


def registered(lookupd, node):
    with urllib.request.urlopen(f"http://{lookupd.http}/nodes") as answer:
        producers = json.load(answer)["producers"]
    return next(p["topics"] for p in producers if p["tcp_port"] == int(node.tcp.rpartition(":")[2]))


# --- Readers for a while ----------------------------------------------------------------------------------------------


def positions(node, topic):
    return [position["reader"] for position in node.get("/log/position", topic=topic)["positions"]]


def test_a_temporary_reader_removes_its_positions_at_its_end(planner, broker, topic):  # noqa: F811
    names = [f"{topic}-{number}" for number in range(3)]
    for name in names:
        publish(broker, name, range(10))
    found = planner(broker, subscribe=",".join(names), startingOffsets="earliest", temporaryReader="true")
    start = found.initial_offset()
    end = next_offset(found, start)
    assert sorted(read(found, start, end)) == sorted([*range(10)] * 3)
    found.commit(end)
    for name in names:
        (reader,) = positions(broker, name)
        assert reader.startswith("temporary:")
    found.close()
    assert [positions(broker, name) for name in names] == [[], [], []]


def test_a_lasting_reader_keeps_its_position(planner, broker, topic):  # noqa: F811
    publish(broker, topic, range(10))
    found = planner(broker, subscribe=topic, startingOffsets="earliest")
    start = found.initial_offset()
    read(found, start, next_offset(found, start))
    found.close()
    (reader,) = positions(broker, topic)
    assert reader.startswith("spark-")


def test_a_temporary_reader_says_during_a_long_batch_that_it_is_there(planner, broker, topic, monkeypatch):  # noqa: F811
    """Spark asks nothing while a batch runs, and a position that does not move expires within minutes."""
    monkeypatch.setattr(topic_log, "_TEMPORARY_ALIVE_SECONDS", 0.05)
    publish(broker, topic, range(10))
    found = planner(broker, subscribe=topic, temporaryReader="true", readerName="screen")
    found.initial_offset()

    def moved():
        return broker.get("/log/position", topic=topic, reader="temporary:screen")["moved"]

    before = moved()
    wait_for(lambda: moved() > before, "it said so")
    found.close()
    assert positions(broker, topic) == []
