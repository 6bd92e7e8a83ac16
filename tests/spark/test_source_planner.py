"""The planner of log mode on real brokers, without Spark: where batches begin and end, and what is kept for them."""

from __future__ import annotations

import io
import shutil

import pytest

pytest.importorskip("pyarrow")

from flintmq.errors import ConnectError, DataLossError, OptionError
from flintmq.spark.log_mode import topic_log
from flintmq.spark.log_mode.topic_log import Limits, Planner, fetch
from flintmq.spark.shipped.columns import Shape, frame_columns
from flintmq.spark.shipped.offsets import Range, log_offset
from flintmq.spark.shipped.options import read_source_options

from .conftest import wait_for
from .test_source_log import durable, publish

ALL = None


@pytest.fixture
def planner():
    made = []

    def make(*nodes, streaming=True, **given):
        where = {"nsq.nsqd.addresses": ",".join(node.tcp for node in nodes)} if nodes else {}
        found = Planner(read_source_options({**where, **given}, streaming=streaming))
        made.append(found)
        return found

    yield make
    for found in made:
        found.close()


def read(planner, start, end):
    """The numbers in a batch."""
    found = []
    for part, address in planner.partitions(start, end):
        for batch in fetch(part, address, planner._options, planner.reader):
            found += [int(value) for value in batch.column("value").to_pylist()]
    return found


def refresh(planner):
    """Ask the brokers anew, at once."""
    planner._asked = planner._next_discovery = 0.0
    planner._down.clear()


def next_offset(planner, start, limits=ALL):
    refresh(planner)
    return planner.latest_offset(start, limits)


def test_batches_follow_each_other_without_gap_or_overlap(planner, broker, topic):
    publish(broker, topic, range(1000))
    found = planner(broker, subscribe=topic, startingOffsets="earliest")
    start = found.initial_offset()
    rows = []
    while (end := next_offset(found, start, Limits(rows=170))) != start:
        part = read(found, start, end)
        assert 0 < len(part) <= 170
        rows += part
        found.commit(end)
        start = end
    assert rows == list(range(1000))
    assert found.latest_offset(start, ALL) is start


def test_latest_is_the_same_when_asked_twice(planner, broker, topic):
    publish(broker, topic, range(10))
    found = planner(broker, subscribe=topic)
    first = found.initial_offset()
    publish(broker, topic, range(10, 20))
    refresh(found)
    assert found.initial_offset() == first
    assert read(found, first, next_offset(found, first)) == list(range(10, 20))


def test_a_first_batch_is_read_again_by_another_process(planner, broker, topic):
    publish(broker, topic, range(10))
    one = planner(broker, subscribe=topic)
    start = one.initial_offset()
    publish(broker, topic, range(10, 20))
    end = next_offset(one, start)
    publish(broker, topic, range(20, 30))
    two = planner(broker, subscribe=topic)
    assert two.initial_offset() != start
    assert read(two, two.initial_offset(), end) == list(range(10, 20))
    # It reads under the name that the offset carries.
    three = planner(broker, subscribe=topic)
    assert read(three, start, end) == list(range(10, 20))
    assert three.reader == one.reader


def test_a_topic_that_appears_is_read_from_its_beginning(planner, broker, topic):
    found = planner(broker, subscribePattern=f"{topic}.*")
    start = found.initial_offset()
    assert log_offset(start).marks == {}
    assert next_offset(found, start) is start
    publish(broker, f"{topic}-new", range(10))
    end = next_offset(found, start)
    assert read(found, start, end) == list(range(10))
    # Its beginning is written down: read again elsewhere, the batch is the same.
    assert read(planner(broker, subscribePattern=f"{topic}.*"), start, end) == list(range(10))
    publish(broker, f"{topic}-newer", range(10, 20))
    publish(broker, f"{topic}-new", range(20, 25))
    after = next_offset(found, end)
    assert sorted(read(found, end, after)) == [*range(10, 20), *range(20, 25)]


def test_nodes_are_found_by_lookupds(planner, lookupd, start_node, topic):
    one = start_node("flintmq", f"--lookupd-tcp-address={lookupd.tcp}")
    publish(one, topic, range(10))
    given = {"nsq.lookupd.http.addresses": lookupd.http, "subscribe": topic, "startingOffsets": "earliest"}
    found = planner(**given)
    wait_for(lambda: _known(found), "the lookupd knows the node")
    start = found.initial_offset()
    end = next_offset(found, start)
    assert read(found, start, end) == list(range(10))
    two = start_node("flintmq", f"--lookupd-tcp-address={lookupd.tcp}")
    publish(two, topic, range(10, 20))
    after = wait_for(lambda: _new(found, end), "the second node is found")
    assert read(found, end, after) == list(range(10, 20))


def _known(planner):
    refresh(planner)
    try:
        return planner.observe()
    except ConnectError:
        return None


def _new(planner, start):
    end = next_offset(planner, start)
    return end if end != start else None


def test_limits_are_shared_by_topics(planner, broker, topic):
    publish(broker, f"{topic}-a", range(1000))
    publish(broker, f"{topic}-b", range(1000, 1010))
    found = planner(broker, subscribe=f"{topic}-a,{topic}-b", startingOffsets="earliest")
    start = found.initial_offset()
    rows = read(found, start, next_offset(found, start, Limits(rows=100)))
    assert len(rows) == 100
    assert any(row >= 1000 for row in rows)
    # Rows of about 40 bytes with their frames: some 50 of them.
    rows = read(found, start, next_offset(found, start, Limits(rows=500, bytes=2000)))
    assert 20 <= len(rows) <= 100


def test_a_minimum_is_waited_for_but_not_for_ever(planner, broker, topic):
    publish(broker, topic, range(10))
    found = planner(broker, subscribe=topic, startingOffsets="earliest", maxTriggerDelay="1h")
    start = found.initial_offset()
    assert next_offset(found, start, Limits(least=100)) is start
    # Whoever wants all gets it.
    assert read(found, start, next_offset(found, start, ALL)) == list(range(10))
    hasty = planner(broker, subscribe=topic, startingOffsets="earliest", maxTriggerDelay="1ms")
    start = hasty.initial_offset()
    end = wait_for(lambda: _limited(hasty, start), "the delay is over")
    assert read(hasty, start, end) == list(range(10))


def _limited(planner, start):
    end = next_offset(planner, start, Limits(least=100))
    return end if end != start else None


def test_a_target_bounds_everything_after_it(planner, broker, topic):
    publish(broker, topic, range(100))
    found = planner(broker, subscribePattern=f"{topic}.*", startingOffsets="earliest")
    found.fix_target()
    publish(broker, topic, range(100, 200))
    publish(broker, f"{topic}-late", range(10))
    start = found.initial_offset()
    end = next_offset(found, start, Limits(least=1000))
    assert read(found, start, end) == list(range(100))
    assert next_offset(found, end) is end


def test_positions_are_kept_before_the_first_read_and_move_on_commit(planner, broker, topic):
    publish(broker, topic, range(100))
    info = broker.get("/log/info", topic=topic)
    found = planner(broker, subscribe=topic, startingOffsets="earliest", readerName="nightly")
    start = found.initial_offset()

    def position():
        return broker.get("/log/position", topic=topic, reader="nightly")["offset"]

    assert position() == info["first"]
    end = next_offset(found, start, Limits(rows=40))
    assert len(read(found, start, end)) == 40
    assert position() == info["first"]
    found.commit(end)
    assert position() == info["first"] + 40
    # Another process, as after a restart, goes on from there.
    again = planner(broker, subscribe=topic, readerName="nightly")
    after = next_offset(again, end)
    assert read(again, end, after) == list(range(40, 100))
    again.commit(after)
    assert position() == info["durable"]


def test_an_expired_position_is_made_again(planner, broker, topic):
    publish(broker, topic, range(10))
    found = planner(broker, subscribe=topic, startingOffsets="earliest")
    start = found.initial_offset()
    end = next_offset(found, start, Limits(rows=5))
    read(found, start, end)
    broker._ask("DELETE", "/log/position", None, {"topic": topic, "reader": found.reader})
    again = planner(broker, subscribe=topic)
    next_offset(again, end)
    assert (
        broker.get("/log/position", topic=topic, reader=found.reader)["offset"]
        == log_offset(end).marks[topic, broker.get("/log/info", topic=topic)["node"]].seq
    )


def test_an_idle_query_says_that_it_is_still_there(planner, broker, topic, monkeypatch):
    publish(broker, topic, range(10))
    found = planner(broker, subscribe=topic)
    start = found.initial_offset()

    def moved():
        return broker.get("/log/position", topic=topic, reader=found.reader)["moved"]

    before = moved()
    assert next_offset(found, start) is start
    assert moved() == before
    monkeypatch.setattr(topic_log, "_ALIVE_SECONDS", 0.0)
    assert next_offset(found, start) is start
    assert moved() > before


def test_a_topic_made_anew_is_a_loss_unless_that_is_allowed(planner, broker, topic):
    publish(broker, topic, range(10))
    found = planner(broker, subscribe=topic, startingOffsets="earliest")
    start = found.initial_offset()
    end = next_offset(found, start)
    read(found, start, end)
    broker.post("/topic/delete", topic=topic)
    publish(broker, topic, range(100, 110))
    with pytest.raises(DataLossError, match="was deleted and made anew before they were read: to go on"):
        next_offset(found, end)
    lax = planner(broker, subscribe=topic, failOnDataLoss="false")
    after = next_offset(lax, end)
    assert read(lax, end, after) == list(range(100, 110))
    # And a batch of the old one cannot be read again.
    with pytest.raises(DataLossError, match="deleted or made anew"):
        read(found, start, end)
    assert read(lax, start, end) == []


def test_numbers_that_a_crash_left_out_are_no_loss_and_no_empty_batches(planner, start_node, topic):
    node = start_node()
    publish(node, topic, range(10))
    found = planner(node, subscribe=topic, startingOffsets="earliest")
    start = found.initial_offset()
    end = next_offset(found, start)
    assert read(found, start, end) == list(range(10))
    found.commit(end)
    node.kill()
    node.start()
    publish(node, topic, range(10, 20))
    info = durable(node, topic)
    assert info["durable"] - info["first"] > 1000
    after = next_offset(found, end, Limits(rows=4))
    assert read(found, end, after) == list(range(10, 14))
    last = next_offset(found, after)
    assert read(found, after, last) == list(range(14, 20))


def test_a_broker_on_an_older_copy_of_its_data_path_is_told(planner, start_node, topic, tmp_path):
    """New messages have numbers that the query has read: it would pass over them, and say nothing."""
    node = start_node()
    publish(node, topic, range(10))
    durable(node, topic)
    node.stop()
    shutil.copytree(node.data_path, tmp_path / "copy")
    node.start()
    publish(node, topic, range(10, 20))
    found = planner(node, subscribe=topic, startingOffsets="earliest")
    start = found.initial_offset()
    end = next_offset(found, start)
    assert read(found, start, end) == list(range(20))
    found.commit(end)
    node.stop()
    shutil.rmtree(node.data_path)
    shutil.copytree(tmp_path / "copy", node.data_path)
    node.start()
    publish(node, topic, range(100, 105))
    for again in (found, planner(node, subscribe=topic)):
        with pytest.raises(DataLossError, match="an older copy of its data path"):
            next_offset(again, end)
    careless = planner(node, subscribe=topic, failOnDataLoss="false")
    after = next_offset(careless, end)
    assert read(careless, end, after) == [*range(10), *range(100, 105)]
    assert next_offset(careless, after) == after


def test_a_node_that_is_down_stands_still(planner, start_node, topic):
    one, two = start_node(), start_node()
    publish(one, topic, range(10))
    publish(two, topic, range(100, 110))
    given = {"subscribe": topic, "startingOffsets": "earliest", "fetch.timeoutMs": "1000", "fetch.numRetries": "0"}
    found = planner(one, two, **given)
    start = found.initial_offset()
    end = next_offset(found, start)
    two.kill()
    publish(one, topic, range(10, 20))
    after = next_offset(found, end)
    assert read(found, end, after) == list(range(10, 20))
    # A batch that has its messages fails, and says what to do; a batch read fails before it begins.
    with pytest.raises(ConnectError, match="could not be fetched from"):
        read(found, start, end)
    with pytest.raises(ConnectError, match=f"nsqd {two.tcp} cannot be reached"):
        planner(one, two, streaming=False, **given).snapshot()
    fresh = planner(one, two, **given)
    with pytest.raises(ConnectError, match="is not there: start it, and the query goes on where it stopped"):
        read(fresh, start, end)
    two.start()
    patient = planner(one, two, subscribe=topic)
    assert sorted(read(patient, start, end)) == [*range(10), *range(100, 110)]


def test_damage_is_told_or_skipped(planner, start_node, topic):
    node = start_node()
    publish(node, topic, range(1000))
    found = planner(node, subscribe=topic, startingOffsets="earliest")
    start = found.initial_offset()
    end = next_offset(found, start)
    (segment,) = (path for path in node.data_path.rglob("*") if path.is_file() and b"999" in path.read_bytes())
    node.stop()
    data = bytearray(segment.read_bytes())
    data[data.index(b"\x00\x00\x00\x02") + 3000] ^= 0xFF
    segment.write_bytes(data)
    node.start()
    refresh(found)
    with pytest.raises(DataLossError, match="are damaged: to go on with what is there, set failOnDataLoss=false"):
        read(found, start, end)
    lax = planner(node, subscribe=topic, failOnDataLoss="false")
    assert set(read(lax, start, end)) < set(range(1000))


def test_a_plain_nsqd_has_no_log(planner, go_broker, topic):
    with pytest.raises(OptionError, match=r"keeps no log.*mode=spool.*flintmq\.spark\.drain"):
        planner(go_broker, subscribe=topic, streaming=False).snapshot()


def test_planning_a_batch_changes_nothing(planner, broker, topic):
    publish(broker, topic, range(10))
    found = planner(broker, subscribe=topic, streaming=False)
    assert [part.size for part, _ in found.snapshot()] == [10]
    assert [part.size for part, _ in found.snapshot()] == [10]
    assert broker.get("/log/position", topic=topic)["positions"] == []


def test_what_was_just_published_is_waited_for_until_it_is_durable(planner, broker, topic):
    for count in (100, 200):
        broker.publish(topic, [b"body"] * 100)
        ranges = planner(broker, streaming=False, subscribe=topic).snapshot()
        assert sum(found.size for found, _ in ranges) == count
    stream = planner(broker, subscribe=topic, startingOffsets="earliest")
    start = stream.initial_offset()
    broker.publish(topic, [b"body"] * 100)
    refresh(stream)
    stream.fix_target()
    assert sum(found.size for found, _ in stream.partitions(start, stream.latest_offset(start, ALL))) == 300


class Answer:
    """The bytes of a fetch, and how many were asked for at a time."""

    def __init__(self, data: bytes) -> None:
        self.asked: list[int] = []
        self._file = io.BytesIO(data)

    def read(self, size: int) -> bytes:
        self.asked.append(size)
        return self._file.read(size)


@pytest.mark.parametrize("size", [1, 5 << 20, 40 << 20, 100 << 20])
def test_a_long_message_is_not_copied_again_with_each_piece_of_it(size):
    head = (30 + size).to_bytes(4, "big") + (2).to_bytes(4, "big") + (1).to_bytes(8, "big") + b"\0\1"
    frames = [head + b"%016x" % seq + bytes(size) for seq in range(2)]
    answer = Answer(b"".join(frames))
    shape = Shape("t", "n", 10)
    found = list(topic_log._batches(answer, Range("t", "n", "e", 0, 2), shape, frame_columns(), 10))
    assert sum(batch.num_rows for _, batch in found) == 2
    assert [last for last, _ in found][-1] == 1
    # Pieces of 4 MiB only where a message begins, and of 64 MiB at most.
    assert len(answer.asked) <= 5 + 2 * (size >> 26)


def test_a_size_that_cannot_be_is_not_asked_for():
    answer = Answer((0x7FFFFFFF).to_bytes(4, "big") + (2).to_bytes(4, "big") + bytes(5 << 20))
    with pytest.raises(ConnectError, match="ended within a message"):
        list(topic_log._batches(answer, Range("t", "n", "e", 0, 2), Shape("t", "n", 10), frame_columns(), 10))
    assert max(answer.asked) == 64 << 20
