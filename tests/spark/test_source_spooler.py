"""Spools and how they are filled, without Spark, from real brokers: written first, finished then, and never twice."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest

pytest.importorskip("pyarrow")

from flintmq.errors import ConnectError, SpoolError
from flintmq.spark.shipped.options import read_source_options
from flintmq.spark.spool_mode import filling as spools
from flintmq.spark.spool_mode import spool as spool_folder
from flintmq.spark.spool_mode.filling import Spooler
from flintmq.spark.spool_mode.spool import Piece, Spool, plan_rows, read_pieces, spool_rows

from .conftest import wait_for
from .proxy import Proxy


@pytest.fixture(params=["go", "flintmq"])
def nsqd(request, start_node):
    """A message that nobody finishes comes again after a second."""
    return start_node(request.param, "--msg-timeout=1s")


@pytest.fixture
def filling(tmp_path):
    """``filling(nsqd, topic, **options)``: a spool that is being filled."""
    opened = []

    def fill(*nodes, folder="spool", start=True, **more):
        given = {
            "nsq.nsqd.addresses": ",".join(node.tcp for node in nodes),
            "channel": "c",
            "mode": "spool",
            "spool.flushIntervalMs": "20",
            **more,
        }
        spool = Spool(str(tmp_path / folder))
        spooler = Spooler(read_source_options(given, streaming=True), spool)
        opened.append((spooler, spool))
        if start:
            spooler.start()
        return spooler

    yield fill
    for spooler, spool in opened:
        spooler.close()
        spool.close()


def values(folder, batch_rows=1000):
    first, stop = spool_rows(str(folder))
    batches = read_pieces(plan_rows(str(folder), first, stop), batch_rows, "here")
    return [int(value) for batch in batches for value in batch.column("value").to_pylist()]


def test_a_message_is_finished_only_when_it_is_on_the_disk(nsqd, topic, filling, tmp_path, monkeypatch):
    nsqd.publish(topic, (b"%d" % n for n in range(100)))
    order = []
    append, finish = Spool.append, spools.Feed.finish

    def noted_append(self, batches):
        append(self, batches)
        order.append(("written", self.end))

    def noted_finish(self, connection, ids):
        order.append(("finished", len(ids) // 16))
        finish(self, connection, ids)

    monkeypatch.setattr(Spool, "append", noted_append)
    monkeypatch.setattr(spools.Feed, "finish", noted_finish)
    filling(nsqd, subscribe=topic)
    wait_for(lambda: nsqd.depth(topic, "c") == 0 and len(values(tmp_path / "spool")) == 100, "all are spooled")
    written = finished = 0
    for what, number in order:
        if what == "written":
            written = number
        else:
            finished += number
            assert finished <= written
    assert finished == 100


def test_what_was_written_and_not_finished_is_not_written_again(nsqd, topic, filling, tmp_path, monkeypatch):
    """As after a kill between the two: the channel delivers it once more, and it is known by its id."""
    nsqd.publish(topic, (b"%d" % n for n in range(50)))
    with monkeypatch.context() as patch:
        patch.setattr(spools.Feed, "finish", lambda self, connection, ids: None)
        killed = filling(nsqd, subscribe=topic)
        wait_for(lambda: killed.spool.end >= 50, "all are spooled")
        killed.close()
        killed.spool.close()
    assert nsqd.depth(topic, "c") == 50
    again = filling(nsqd, subscribe=topic)
    wait_for(lambda: nsqd.depth(topic, "c") == 0, "the channel is empty")
    nsqd.publish(topic, [b"50"])
    wait_for(lambda: again.spool.end > 50, "the next one is there")
    assert values(tmp_path / "spool") == list(range(51))


@pytest.mark.parametrize("kind", ["go", "flintmq"])
def test_a_killed_broker_that_counts_attempts_anew_is_not_written_twice(
    kind, start_node, topic, filling, tmp_path, monkeypatch
):
    """A broker that was killed has forgotten that it delivered anything: all comes again as a first attempt."""
    # The Go daemon keeps what it has in files only if there is no room in its memory.
    nsqd = start_node(kind, "--mem-queue-size=0" if kind == "go" else "--mem-queue-size=10000")
    nsqd.publish(topic, (b"%d" % n for n in range(50)))
    with monkeypatch.context() as patch:
        patch.setattr(spools.Feed, "finish", lambda self, connection, ids: None)
        filled = filling(nsqd, subscribe=topic)
        wait_for(lambda: filled.spool.end >= 50, "all are spooled")
        nsqd.kill()
    nsqd.start()
    nsqd.publish(topic, [b"50"])
    wait_for(lambda: filled.spool.end > 50 and nsqd.depth(topic, "c") == 0, "the channel is empty")
    found = values(tmp_path / "spool")
    assert sorted(found) == sorted(set(found))
    assert 50 in found


def test_a_broker_that_dies_and_comes_back_is_consumed_on(nsqd, topic, filling, tmp_path):
    nsqd.publish(topic, (b"%d" % n for n in range(20)))
    filling(nsqd, subscribe=topic)
    wait_for(lambda: len(values(tmp_path / "spool")) == 20, "the first ones")
    nsqd.stop()
    nsqd.start()
    nsqd.publish(topic, (b"%d" % n for n in range(20, 40)))
    wait_for(lambda: set(values(tmp_path / "spool")) == set(range(40)), "the others")


def test_several_brokers_share_what_may_be_in_flight(start_node, topic, filling, tmp_path):
    one, two = start_node("go"), start_node("flintmq")
    one.publish(topic, (b"%d" % n for n in range(300)))
    two.publish(topic, (b"%d" % n for n in range(300, 600)))
    spooler = filling(one, two, subscribe=topic, **{"spool.maxInFlight": "11"})
    wait_for(lambda: len(values(tmp_path / "spool")) == 600, "all are spooled")
    assert sorted(values(tmp_path / "spool")) == list(range(600))
    assert {feed.ready for feed in spooler._feeds.values()} == {5}


def test_a_spool_that_is_full_takes_no_more(nsqd, topic, filling):
    nsqd.publish(topic, (b"%06d" % n * 50 for n in range(3000)))
    spooler = filling(nsqd, subscribe=topic, spoolMaxBytes="100k", **{"spool.maxInFlight": "50"})
    wait_for(lambda: spooler.is_full, "it is full")
    wait_for(lambda: not spooler._received and all(feed.unwritten == 0 for feed in spooler._feeds.values()), "settled")
    end = spooler.spool.end
    assert end < 3000
    assert nsqd.depth(topic, "c") == 3000 - end
    spooler.forget(end)
    wait_for(lambda: spooler.spool.end > end, "it goes on")


def test_nobody_there_is_told(filling, topic):
    class Nobody:
        tcp = "127.0.0.1:1"

    spooler = filling(Nobody(), subscribe=topic)
    with pytest.raises(ConnectError, match=r"nsqd 127\.0\.0\.1:1.*cannot be reached"):
        spooler.wait_connected(60)


def test_topics_are_found_by_a_pattern(start_node, lookupd, filling, topic, tmp_path):
    node = start_node("flintmq", f"--lookupd-tcp-address={lookupd.tcp}")
    node.publish(f"{topic}-a", [b"1"])
    node.publish(f"{topic}-b", [b"2"])
    node.publish("another", [b"3"])

    def registered():
        import urllib.request

        with urllib.request.urlopen(f"http://{lookupd.http}/topics") as answer:
            return len(json.load(answer)["topics"]) == 3

    wait_for(registered, "the lookupd knows the topics")
    filling(**{"nsq.lookupd.http.addresses": lookupd.http, "subscribePattern": f"{topic}-.", "nsq.nsqd.addresses": ""})
    wait_for(lambda: sorted(values(tmp_path / "spool")) == [1, 2], "both topics")


def test_a_disk_that_refuses_fails_the_query_and_finishes_nothing(nsqd, topic, filling, monkeypatch):
    def full(self, batches):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "append", full)
    nsqd.publish(topic, [b"1"])
    spooler = filling(nsqd, subscribe=topic)

    def failed():
        try:
            spooler.check()
        except SpoolError as exc:
            return str(exc)
        return None

    assert "cannot be filled: [Errno 28] No space left" in wait_for(failed, "it failed")
    assert nsqd.depth(topic, "c") == 1


# --- The folder -------------------------------------------------------------------------------------------------------


def rows(first, stop, topic="t"):
    import pyarrow as pa

    from flintmq.spark.shipped.columns import arrow_schema

    count = stop - first
    columns = [[b"%d" % n for n in range(first, stop)], [topic] * count, ["n"] * count, list(range(first, stop))]
    columns += [[f"{n:016x}" for n in range(first, stop)], [0] * count, [0] * count, [1] * count]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, arrow_schema(), strict=True)]
    return pa.record_batch(arrays, schema=arrow_schema())


def test_rows_are_numbered_on_after_everything_was_removed(tmp_path):
    spool = Spool(str(tmp_path))
    spool.append([rows(0, 10), rows(10, 15)])
    spool.append([rows(15, 20)])
    assert spool_rows(str(tmp_path)) == (0, 20)
    spool.forget(15)
    assert [path.name for path in tmp_path.glob("*.arrow")] == [f"{15:020d}-{20:020d}.arrow"]
    spool.forget(20)
    assert (list(tmp_path.glob("*.arrow")), spool.size) == ([], 0)
    identity = spool.id
    spool.close()
    again = Spool(str(tmp_path))
    assert (again.id, again.done, again.end) == (identity, 20, 20)
    again.append([rows(20, 21)])
    assert spool_rows(str(tmp_path)) == (20, 21)
    again.close()


def test_rows_are_found_in_the_middle_of_files(tmp_path):
    spool = Spool(str(tmp_path))
    for first in range(0, 100, 10):
        spool.append([rows(first, first + 4), rows(first + 4, first + 10)])
    for first, stop in ((0, 100), (3, 5), (7, 33), (40, 50), (99, 100)):
        pieces = plan_rows(str(tmp_path), first, stop)
        for batch_rows in (3, 1000):
            batches = list(read_pieces(pieces, batch_rows, "here"))
            assert [n for batch in batches for n in batch.column("offset").to_pylist()] == list(range(first, stop))
            assert max(batch.num_rows for batch in batches) <= batch_rows
    spool.close()


def test_a_file_that_was_cut_off_is_as_if_it_had_never_been(tmp_path):
    spool = Spool(str(tmp_path))
    spool.append([rows(0, 10)])
    spool.close()
    (tmp_path / f"{10:020d}-{20:020d}.tmp").write_bytes(b"half a file")
    again = Spool(str(tmp_path))
    assert again.end == 10
    assert list(tmp_path.glob("*.tmp")) == []
    again.close()


def test_missing_rows_and_folders_that_are_not_shared_are_told(tmp_path):
    spool = Spool(str(tmp_path / "spool"))
    spool.append([rows(0, 10)])
    spool.append([rows(10, 20)])
    spool.close()
    (tmp_path / "spool" / f"{0:020d}-{10:020d}.arrow").unlink()
    with pytest.raises(SpoolError, match="has no rows 5 to 14: was something removed from it"):
        plan_rows(str(tmp_path / "spool"), 5, 15)
    with pytest.raises(SpoolError, match=r"was written on driver-host and is not there on .*: set spoolLocation"):
        list(read_pieces([Piece(str(tmp_path / "elsewhere.arrow"), 0, 5)], 10, "driver-host"))
    with pytest.raises(SpoolError, match="there is no spool in"):
        spool_rows(str(tmp_path / "nothing"))
    (tmp_path / "spool" / "spool.json").unlink()
    with pytest.raises(SpoolError, match=r"has lost its spool\.json"):
        Spool(str(tmp_path / "spool"))


def test_two_queries_cannot_share_a_spool(tmp_path, monkeypatch):
    first = Spool(str(tmp_path))
    monkeypatch.setattr(spool_folder, "_LOCK_PATIENCE", 0.0)
    with pytest.raises(SpoolError, match="another query uses the spool"):
        Spool(str(tmp_path))
    first.close()
    Spool(str(tmp_path)).close()


def test_a_silence_is_no_end_while_the_broker_has_messages(nsqd, topic, filling, monkeypatch):
    """As on a busy machine: the first silence is over before the broker was told RDY."""
    nsqd.publish(topic, (b"%d" % n for n in range(100)))
    waited = []
    set_ready, waiting = spools.Feed.set_ready, spools.Cluster.waiting

    def noted_waiting(self, *about):
        waited.append(waiting(self, *about))
        for feed in spooler._feeds.values():
            set_ready(feed, 50)
        return waited[-1]

    monkeypatch.setattr(spools.Feed, "set_ready", lambda self, count: None)
    monkeypatch.setattr(spools.Cluster, "waiting", noted_waiting)
    spooler = filling(nsqd, subscribe=topic, **{"nsq.nsqd.http.addresses": nsqd.http})
    spooler.wait_connected(10)
    spooler.wait_idle(0.2, 30)
    assert waited[0] == (100, {}) and waited[-1] == (0, {})
    assert spooler.spool.end == 100


def test_messages_that_never_come_are_told(nsqd, topic, filling, monkeypatch):
    nsqd.publish(topic, (b"%d" % n for n in range(7)))
    monkeypatch.setattr(spools.Feed, "set_ready", lambda self, count: None)
    more = {"nsq.nsqd.http.addresses": nsqd.http, "fetch.timeoutMs": "1500"}
    spooler = filling(nsqd, subscribe=topic, **more)
    spooler.wait_connected(10)
    with pytest.raises(ConnectError, match=r"7 messages wait in channel c and did not come for 1\.5 s"):
        spooler.wait_idle(0.02, 3600)
    assert spooler.spool.end == 0


def test_a_broker_that_does_not_say_what_waits_is_asked_again(nsqd, topic, filling, monkeypatch):
    """As on a starved machine: /stats is not answered in time while the channel still has messages."""
    nsqd.publish(topic, (b"%d" % n for n in range(100)))
    proxy = Proxy(nsqd.http)
    proxy.down()
    set_ready, ask = spools.Feed.set_ready, spools.Spooler._waiting
    answers = []

    def noted(self):
        answers.append(ask(self))
        if len(answers) == 3:
            proxy.up()
            for feed in self._feeds.values():
                set_ready(feed, 50)
        return answers[-1]

    monkeypatch.setattr(spools.Feed, "set_ready", lambda self, count: None)
    monkeypatch.setattr(spools.Spooler, "_waiting", noted)
    try:
        spooler = filling(nsqd, subscribe=topic, **{"nsq.nsqd.http.addresses": proxy.address})
        spooler.wait_connected(10)
        spooler.wait_idle(0.2, 60)
    finally:
        proxy.close()
    assert [answer.silent.keys() for answer in answers[:3]] == [{nsqd.tcp}] * 3
    assert spooler.spool.end == 100


def test_a_broker_that_never_says_what_waits_is_an_error(nsqd, topic, filling):
    nsqd.publish(topic, (b"%d" % n for n in range(10)))
    proxy = Proxy(nsqd.http)
    proxy.down()
    try:
        more = {"nsq.nsqd.http.addresses": proxy.address, "fetch.timeoutMs": "1500"}
        spooler = filling(nsqd, subscribe=topic, **more)
        spooler.wait_connected(10)
        with pytest.raises(ConnectError, match=r"nobody knows whether channel c has more messages, for 1\.5 s: .*HTTP"):
            spooler.wait_idle(0.05, 60)
    finally:
        proxy.close()


def test_a_broker_that_is_away_keeps_what_waits_there(nsqd, topic, filling, caplog):
    """One that nobody can connect to does not hold up the others."""

    class Away:
        tcp = "127.0.0.1:1"

    nsqd.publish(topic, (b"%d" % n for n in range(10)))
    more = {"nsq.nsqd.http.addresses": f"{nsqd.http},127.0.0.1:1", "fetch.timeoutMs": "1500"}
    spooler = filling(nsqd, Away, subscribe=topic, **more)
    spooler.wait_connected(10)
    spooler.wait_idle(0.05, 60)
    assert spooler.spool.end == 10
    assert "127.0.0.1:1 is away, and what waits there stays" in caplog.text


@pytest.mark.parametrize("is_told", [True, False], ids=["over-http", "silence-alone"])
def test_a_slow_disk_is_no_end(is_told, nsqd, topic, filling, monkeypatch):
    """Messages that are being written are neither waiting in the channel nor in the spool yet."""
    nsqd.publish(topic, (b"%d" % n for n in range(10)))
    append, is_writing = Spool.append, threading.Event()

    def slow(self, batches):
        is_writing.set()
        time.sleep(1.0)
        append(self, batches)

    monkeypatch.setattr(Spool, "append", slow)
    spooler = filling(nsqd, subscribe=topic, **({"nsq.nsqd.http.addresses": nsqd.http} if is_told else {}))
    spooler.wait_connected(10)
    assert is_writing.wait(30)
    spooler.wait_idle(0.1, 60)
    assert spooler.spool.end == 10


def test_messages_that_the_broker_has_sent_are_waited_for(nsqd, topic, filling, monkeypatch):
    """As on a starved machine: they are in flight to us, and the thread that receives them has no turn."""
    nsqd.publish(topic, (b"%d" % n for n in range(10)))
    receive, held = spools.Connection.receive, threading.Event()

    def late(self):
        data = receive(self)
        if len(data) > 100:
            held.set()
            time.sleep(1.0)
        return data

    monkeypatch.setattr(spools.Connection, "receive", late)
    spooler = filling(nsqd, subscribe=topic, **{"nsq.nsqd.http.addresses": nsqd.http})
    spooler.wait_connected(10)
    assert held.wait(30)
    spooler.wait_idle(0.1, 60)
    assert spooler.spool.end == 10


@pytest.mark.parametrize("kind", ["go", "flintmq"])
def test_who_may_take_much_takes_it_on_several_connections(kind, start_node, topic, filling, tmp_path):
    nsqd = start_node(kind)
    nsqd.publish(topic, (b"%d" % n for n in range(30_000)))
    spooler = filling(nsqd, subscribe=topic, **{"spool.maxInFlight": "6001"})
    wait_for(lambda: spooler.spool.end >= 30_000 and nsqd.depth(topic, "c") == 0, "all are spooled")
    assert sorted(values(tmp_path / "spool")) == list(range(30_000))
    assert [feed.ready for feed in spooler._feeds.values()] == [2000, 2000, 2000]


def test_a_disk_that_is_slower_than_its_brokers_holds_them_up(nsqd, topic, filling, tmp_path, monkeypatch):
    monkeypatch.setattr(spools, "_MOST_BYTES", 1 << 20)
    go = threading.Event()
    append = Spool.append

    def slow(self, batches):
        go.wait(60)
        append(self, batches)

    monkeypatch.setattr(Spool, "append", slow)
    nsqd.publish(topic, (b"%-12000d" % n for n in range(1000)))
    spooler = filling(nsqd, subscribe=topic, **{"spool.maxInFlight": "2500"})
    wait_for(lambda: spooler._received_bytes >= 1 << 20, "as much as there may be has come")
    time.sleep(0.3)
    # Of 12 MB; the last read may go beyond it.
    assert spooler._received_bytes < 4 << 20
    assert not spooler.spool.end
    go.set()
    wait_for(lambda: spooler.spool.end >= 1000 and nsqd.depth(topic, "c") == 0, "all are spooled")
    assert sorted(values(tmp_path / "spool")) == list(range(1000))


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_ids_are_known_and_old_ones_forgotten(seed):
    source = random.Random(seed)
    count = source.choice([1, 7, 100])
    newest = spools._Newest(count)
    added = []
    for _ in range(60):
        where = ("topic", source.choice(["node", "other"]))
        numbers = [source.randrange(1000) for _ in range(source.randint(1, 20))]
        # Now and then one is there twice in one read.
        ids = [b"%016x" % number for number in numbers]
        fresh = newest.fresh(where, b"".join(ids))
        rows = list(range(len(ids)) if fresh is None else fresh)
        assert rows == sorted({ids.index(ids[row]) for row in rows}), "each once, the first of its kind, in order"
        known = set(ids) - {ids[row] for row in rows}
        # The newest are known for sure. The oldest are not; between these it may be either.
        assert known >= {id for id in ids if (where, id) in added[-count:]}
        assert known <= {id for id in ids if (where, id) in added}
        newest.add(where, b"".join(ids))
        added += [(where, id) for id in ids]
        assert len(newest._new) + len(newest._old) <= 2 * (count + 20)
