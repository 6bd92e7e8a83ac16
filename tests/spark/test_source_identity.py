"""A spool belongs to a checkpoint: nothing is consumed into a folder before that was checked. No Spark here."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from flintmq.errors import SpoolError
from flintmq.spark.shipped.options import read_source_options
from flintmq.spark.source import StreamReader

from .conftest import wait_for

ALL = ReadAllAvailable()


@pytest.fixture(params=["go", "flintmq"])
def nsqd(request, start_node):
    return start_node(request.param)


@pytest.fixture
def reader(nsqd, topic, tmp_path):
    """``reader(folder)``: what Spark makes in a new process, with another folder as its spool."""
    made = []

    def make(folder, **more):
        given = {
            "nsq.nsqd.addresses": nsqd.tcp,
            "subscribe": topic,
            "channel": "c",
            "mode": "spool",
            "spoolLocation": str(tmp_path / folder),
            "spool.flushIntervalMs": "20",
            **more,
        }
        found = StreamReader(read_source_options(given, streaming=True))
        made.append(found)
        return found

    yield make
    for found in made:
        found.stop()


def first_batch(reader):
    """The start and the end of a first batch, as Spark asks for them."""
    start = reader.initialOffset()
    end = wait_for(lambda: (found := reader.latestOffset(start, ALL)) != start and found, "something was spooled")
    return start, end


@pytest.fixture
def consumed(nsqd, topic, reader):
    """The offsets of a batch that was spooled, from a process that is gone, and a channel with 37 messages more."""
    nsqd.publish(topic, (b"%d" % n for n in range(13)))
    one = reader("spool")
    _, end = first_batch(one)
    wait_for(lambda: nsqd.depth(topic, "c") == 0, "all is consumed")
    one.stop()
    wait_for(lambda: channel_of(nsqd, topic)["clients"] == [], "its connection is gone")
    nsqd.publish(topic, (b"%d" % n for n in range(37)))
    # Go's nsqd hands them on to the channel by and by.
    wait_for(lambda: nsqd.depth(topic, "c") == 37, "the channel has them")
    return end


def channel_of(nsqd, topic):
    (channel,) = nsqd.get("/stats", format="json", topic=topic)["topics"][0]["channels"]
    return channel


def assert_untouched(nsqd, topic, folder):
    assert nsqd.depth(topic, "c") == 37
    channel = channel_of(nsqd, topic)
    assert (channel["in_flight_count"], channel["clients"]) == (0, [])
    assert not list(folder.glob("*.arrow"))


@pytest.mark.parametrize("question", ["latestOffset", "partitions", "commit"])
def test_a_query_that_goes_on_with_another_spool_consumes_nothing(nsqd, topic, reader, consumed, tmp_path, question):
    wrong = reader("spol")
    ask = {
        "latestOffset": lambda: wrong.latestOffset(consumed, ALL),
        "partitions": lambda: wrong.partitions(consumed, consumed),
        "commit": lambda: wrong.commit(consumed),
    }[question]
    with pytest.raises(SpoolError, match=r"belongs to another spool than the one in .*spol: set spoolLocation"):
        ask()
    assert_untouched(nsqd, topic, tmp_path / "spol")
    assert not (tmp_path / "spol").exists()


@pytest.mark.parametrize("once", [False, True], ids=["stream", "availableNow"])
def test_a_first_batch_that_is_run_again_on_another_spool_consumes_nothing(
    nsqd, topic, reader, consumed, tmp_path, once
):
    """Before its first batch is done, Spark asks where a query begins, and shows its checkpoint only then."""
    wrong = reader("spol")
    if once:
        wrong.prepareForTriggerAvailableNow()
    start = wrong.initialOffset()
    with pytest.raises(SpoolError, match="belongs to another spool"):
        wrong.partitions(start, consumed)
    assert_untouched(nsqd, topic, tmp_path / "spol")


def test_a_spool_of_another_query_is_left_alone(nsqd, topic, reader, consumed, tmp_path):
    nsqd.publish(f"{topic[:50]}.other", [b"1"])
    other = reader("other", subscribe=f"{topic[:50]}.other")
    first_batch(other)
    other.stop()
    before = sorted(path.name for path in (tmp_path / "other").iterdir())
    with pytest.raises(SpoolError, match="belongs to another spool"):
        reader("other").latestOffset(consumed, ALL)
    assert_untouched(nsqd, topic, tmp_path / "spol")
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == before


def test_the_right_spool_goes_on(nsqd, topic, reader, consumed):
    again = reader("spool")
    end = wait_for(
        lambda: (found := again.latestOffset(consumed, ALL)) != consumed and found["o"] == 50 and found, "the rest"
    )
    assert end["spool"] == consumed["spool"]
    again.commit(consumed)
    wait_for(lambda: nsqd.depth(topic, "c") == 0, "all is consumed")


def test_a_spool_from_a_backup_that_was_filled_again_is_not_taken_for_what_it_was(nsqd, topic, reader, tmp_path):
    """The same count of the same bodies: only the messages' ids tell that they are others."""
    bodies = [b"tick"] * 13

    def whole_batch(one, start):
        return wait_for(lambda: (end := one.latestOffset(start, ALL))["o"] == 13 and end, "all is spooled")

    first = reader("spool")
    start = first.initialOffset()
    shutil.copytree(tmp_path / "spool", tmp_path / "backup")
    nsqd.publish(topic, bodies)
    before = whole_batch(first, start)
    assert before == first.latestOffset(start, ALL), "the same rows are the same offset"
    first.partitions(start, before)
    wait_for(lambda: nsqd.depth(topic, "c") == 0, "all is consumed")
    first.stop()
    shutil.rmtree(tmp_path / "spool")
    shutil.copytree(tmp_path / "backup", tmp_path / "spool")
    nsqd.publish(topic, bodies)
    second = reader("spool")
    after = whole_batch(second, start)
    assert {**after, "last": before["last"]} == before
    assert after != before, "who compares offsets sees other rows"
    with pytest.raises(SpoolError, match="other messages in its rows up to 13 than when the batch was planned"):
        second.partitions(start, before)
    second.partitions(start, after)
