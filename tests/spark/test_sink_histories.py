"""Queries that come back: with a checkpoint that lost something, and to brokers of which some are not found.

No JVM: a Run drives the writers as Spark does (``test_sink_staging``). A History does at random what may happen to a
query between two batches; the rest are single cases of it.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from flintmq.errors import ConnectError, OptionError, PublishError
from flintmq.spark.shipped.options import read_sink_options
from flintmq.spark.sink import BatchWriter, writers
from flintmq.spark.sink.chunks import Chunk, Chunks
from flintmq.spark.sink.staging import Broker, ranked

from .test_sink_staging import COLUMNS, Run, batches_of, exactly, log_offsets, make_rows, visible, without_checkpoint

#: A broker that does not answer is asked once.
AT_ONCE = {"fetch.numRetries": "0"}
#: How a batch is known: see History.
WAYS = ("log", "count", "away", "writeId")


def make_checkpoint(folder, query=""):
    folder.mkdir()
    (folder / "metadata").write_text(json.dumps({"id": query or str(uuid.uuid4())}))
    (folder / "offsets").mkdir()
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path / "checkpoint")


def identity(node):
    return node.get("/info", extended="true")["flintmq"]["node"]


def homed_at(node, nodes, *, and_rows=True):
    """Return a name whose home is this broker, as the rows' broker is of the partition that is returned with it."""
    brokers = [Broker(identity(one), "") for one in nodes]
    mine = identity(node)
    name = next(name for name in iter(lambda: str(uuid.uuid4()), "") if ranked(brokers, name)[0].node == mine)
    partition = next(number for number in range(99) if ranked(brokers, str(number))[0].node == mine)
    return name, partition


def write_batch(nodes, rows, partition=0, **options):
    """``df.write`` of one partition."""
    where = {"nsq.nsqd.addresses": ",".join(node.tcp for node in nodes), "fetch.timeoutMs": "10000", **options}
    writer = BatchWriter(read_sink_options(where), COLUMNS, overwrite=False)
    writer.commit([writer._job.write(batches_of(rows), writer._write, partition)])


def write_one_partition(run, number, rows, partition):
    batch = run.batch(number)
    batch.commit([batch.task(partition, rows)])


def attempts_of(nodes, producer):
    """Attempts that brokers hold of a producer, by broker; None where it is not known."""
    found = [node.get("/stage", producer=producer)["producers"] for node in nodes]
    return [entries[0]["staging"]["attempts"] if entries else None for entries in found]


# --- At random --------------------------------------------------------------------------------------------------------


class History:
    """A query from numbered rows to topics. Some of its batches have no rows, because a filter drops them.

    ``ends`` is the checkpoint: up to which row each batch goes. Offsets are places (``log``) or only count batches, as
    those of files do; a checkpoint may be out of Python's reach; or every batch is a batch write under a ``writeId``.
    """

    def __init__(self, nodes, folder, seed):
        self.dice = random.Random(seed)
        self.nodes = nodes
        self.way = WAYS[seed % len(WAYS)]
        self.checkpoint = make_checkpoint(folder)
        self.query = json.loads((self.checkpoint / "metadata").read_text())["id"]
        self.ends = []
        #: As ``ends`` was before it lost something.
        self.newest = []
        self.happened = Counter()

    def rows(self, first, stop):
        return [(f"t{number % 3}", b"row %d" % number) for number in range(first, stop) if number // 64 % 3 != 1]

    def plan(self, end):
        self.ends.append(end)
        batch = len(self.ends) - 1
        log_offsets(self.checkpoint, batch, batch if self.way == "count" else end, self.way != "count")

    def run(self, nodes, **options):
        """Run the newest batch."""
        batch = len(self.ends) - 1
        rows = self.rows(self.ends[-2] if batch else 0, self.ends[-1])
        self.dice.shuffle(rows)
        options["mpubMaxMessages"] = str(self.dice.choice([1, 7, 1000]))
        if self.way == "writeId":
            write_batch(nodes, rows, self.dice.randrange(9), writeId=f"{self.query}-{batch}", **options)
            return
        if self.way == "away":
            options |= without_checkpoint(self.checkpoint)
        Run(nodes, self.checkpoint, **options).write(batch, rows, self.dice.randint(1, 4))

    def run_after_a_loss(self):
        """The query stops if the batch is not what it was, and the checkpoint is restored."""
        try:
            self.run(self.nodes)
        except PublishError as exc:
            assert len(self.ends) <= len(self.newest)
            assert "checkpoint went back" in str(exc)
            self.happened["stopped"] += 1
            lost, self.ends = self.newest, []
            for end in lost:
                self.plan(end)

    def step(self, what):
        if what == "lost":
            del self.ends[-self.dice.randint(1, min(3, len(self.ends))) :]
        if what in ("lost", "next"):
            self.plan((self.ends[-1] if self.ends else 0) + self.dice.choice([13, 64, 64, 100]))
        if what == "file":
            (self.checkpoint / "_nsq_home").unlink(missing_ok=True)
        if what == "home":
            # It is down, and nobody lists it.
            producer = f"{self.query}-{len(self.ends) - 1}" if self.way == "writeId" else self.query
            known = {node.tcp: node.get("/stage", producer=producer)["producers"] for node in self.nodes}
            with pytest.raises(ConnectError, match="keeps the decisions of"):
                self.run([node for node in self.nodes if not known[node.tcp][0]["home"]], **AT_ONCE)
        self.run_after_a_loss()
        if len(self.ends) >= len(self.newest):
            self.newest = list(self.ends)


@pytest.mark.parametrize("seed", range(4), ids=WAYS)
def test_whatever_is_lost_or_hidden_between_batches_every_row_is_there_once(nodes, tmp_path, seed):
    history = History(nodes, tmp_path / "checkpoint", seed)
    history.step("next")
    for _ in range(20):
        history.step(history.dice.choice(["next", "next", "again", "home", "lost", "lost", "file"]))
    # What the checkpoint lost and was not planned again is published all the same.
    assert visible(nodes) == exactly(history.rows(0, max(history.newest[-1], history.ends[-1])))
    assert history.happened["stopped"]


# --- The same batch again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_offsets", [False, True], ids=["by sums", "by offsets"])
def test_a_batch_that_had_no_rows_is_not_taken_for_a_new_one(nodes, checkpoint, with_offsets):
    def plan(batch, end):
        if with_offsets:
            log_offsets(checkpoint, batch, end)

    first, second = make_rows(0, 50), make_rows(50, 50)
    run = Run(nodes, checkpoint)
    for batch, (end, rows) in enumerate([(10, first), (20, []), (30, second)]):
        plan(batch, end)
        run.write(batch, rows)
    # The checkpoint lost batches 1 and 2. Planned as it was, batch 1 is what it was.
    plan(1, 20)
    Run(nodes, checkpoint).write(1, [])
    # Planned up to where batch 2 went, it has the rows of that.
    plan(1, 30)
    with pytest.raises(PublishError, match="batch 1 was committed with other rows: the checkpoint went back"):
        Run(nodes, checkpoint).write(1, second)
    assert visible(nodes) == exactly(first + second)


def test_a_number_that_was_passed_over_is_refused_before_rows_are_staged(nodes, checkpoint):
    Run(nodes, checkpoint).write(0, make_rows(0, 50))
    Run(nodes, checkpoint).write(2, make_rows(50, 50))
    with pytest.raises(
        PublishError, match=r"transaction 1 .* was never committed, and transaction 2 is: the checkpoint"
    ):
        Run(nodes, checkpoint).batch(1).task(0, make_rows(50, 50))
    assert visible(nodes) == exactly(make_rows(0, 50) + make_rows(50, 50))


SPOOL = {"v": 1, "mode": "spool", "spool": "4711", "o": 200}


@pytest.mark.parametrize("offset", [SPOOL, {"logOffset": 1}, 17], ids=["spool", "files", "number"])
def test_offsets_that_count_do_not_make_other_rows_the_same(nodes, checkpoint, offset):
    rows = make_rows(0, 100)
    lines = ["v1", "{}", json.dumps(offset)]
    (checkpoint / "offsets" / "0").write_text("\n".join(lines))
    Run(nodes, checkpoint).write(0, rows)
    Run(nodes, checkpoint).write(0, rows[::-1], partitions=2)
    # A restored spool, or a listing of more files: as many rows, and others.
    with pytest.raises(PublishError, match="batch 0 was committed with other rows"):
        Run(nodes, checkpoint).write(0, make_rows(100, 100))
    # Nor do the same rows make another batch the same.
    (checkpoint / "offsets" / "0").write_text("\n".join([*lines[:2], json.dumps({"logOffset": 2})]))
    with pytest.raises(PublishError, match="batch 0 was committed with other rows"):
        Run(nodes, checkpoint).write(0, rows)
    Run(nodes, checkpoint, repeatedBatch="skip").write(0, make_rows(100, 100))
    assert visible(nodes) == exactly(rows)


def test_offsets_of_a_log_beside_others_that_count_are_not_enough(nodes, checkpoint):
    log_offsets(checkpoint, 0, 100)
    path = checkpoint / "offsets" / "0"
    for more, is_same in (("\n-", True), ('\n{"logOffset": 0}', False)):
        query = str(uuid.uuid4())
        (checkpoint / "metadata").write_text(json.dumps({"id": query}))
        log_offsets(checkpoint, 0, 100)
        path.write_text(path.read_text() + more)
        Run(nodes, checkpoint).write(0, make_rows(0, 20))
        again = Run(nodes, checkpoint)
        if is_same:
            again.write(0, make_rows(0, 20, seed=7))
        else:
            with pytest.raises(PublishError, match="batch 0 was committed with other rows"):
                again.write(0, make_rows(0, 20, seed=7))


# --- Homes that are not found -----------------------------------------------------------------------------------------


def test_a_write_is_not_repeated_while_its_home_is_not_listed(nodes):
    """nsqlookupd does not list a broker that is down: nobody seems to be missing."""
    home = nodes[1]
    others = [nodes[0], nodes[2]]
    name, partition = homed_at(home, nodes)
    rows = make_rows(0, 100)
    write_batch(nodes, rows, partition, writeId=name)
    assert all(topic["message_count"] == 0 for node in others for topic in node.get("/stats", format="json")["topics"])
    # Nothing is left of having been told.
    assert attempts_of(nodes, name) == [0, 0, 0]
    with pytest.raises(ConnectError, match=rf"the broker that keeps the decisions of {name} does not answer"):
        write_batch(others, rows, partition, writeId=name, **AT_ONCE)
    write_batch(nodes, rows, partition, writeId=name)
    assert visible(nodes) == exactly(rows)


def test_a_first_batch_is_not_repeated_while_its_home_is_not_listed(nodes, tmp_path):
    home = nodes[2]
    query, partition = homed_at(home, nodes)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", query)
    away = without_checkpoint(checkpoint)
    rows = make_rows(0, 100)
    write_one_partition(Run(nodes, checkpoint, **away), 0, rows, partition)
    with pytest.raises(ConnectError, match=rf"the broker that keeps the decisions of {query} does not answer"):
        write_one_partition(Run(nodes[:2], checkpoint, **away, **AT_ONCE), 0, rows, partition)
    assert visible(nodes) == exactly(rows)


def test_a_checkpoint_that_lost_its_home_finds_it_again_when_a_broker_was_added(nodes, tmp_path):
    added = nodes[0]
    query, partition = homed_at(added, nodes)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", query)
    rows = make_rows(0, 100)
    write_one_partition(Run(nodes[1:], checkpoint), 0, rows, partition)
    (checkpoint / "_nsq_home").unlink()
    write_one_partition(Run(nodes, checkpoint), 0, rows, partition)
    assert [node.get("/stage", producer=query)["producers"][0]["home"] for node in nodes].count(True) == 1
    assert visible(nodes) == exactly(rows)
    # If the home is away as well, it is not chosen anew.
    home = json.loads((checkpoint / "_nsq_home").read_text())["node"]
    (checkpoint / "_nsq_home").unlink()
    with pytest.raises(ConnectError, match="keeps the decisions"):
        run = Run([node for node in nodes if identity(node) != home], checkpoint, **AT_ONCE)
        write_one_partition(run, 0, rows, partition)
    assert not (checkpoint / "_nsq_home").exists()


def test_a_home_that_forgot_a_query_is_named_and_no_other_driver_is_blamed(nodes, checkpoint):
    home, other = nodes[:2]
    run = Run([home, other], checkpoint, home=home.tcp)
    for batch in range(3):
        run.write(batch, make_rows(batch * 50, 50), partitions=9)
    home._ask("DELETE", "/stage", None, {"producer": run.query})
    for _ in range(2):
        with pytest.raises(PublishError, match=r"knows a later epoch .* the home lost its decisions"):
            Run([home, other], checkpoint, home=home.tcp).write(3, make_rows(150, 50), partitions=9)


def test_a_token_that_may_not_read_is_spoken_of(start_node, tmp_path, checkpoint):
    tokens = tmp_path / "tokens"
    tokens.write_text("only-publish publish\nhush-hush read,publish\n")
    tokens.chmod(0o600)
    node = start_node("flintmq", f"--http-auth-token-file={tokens}")
    with pytest.raises(OptionError, match="the token needs the rights read and publish"):
        Run([node], checkpoint, **{"nsq.http.token": "only-publish"}).batch(0)
    batch = Run([node], checkpoint, **{"nsq.http.token": "hush-hush"}).batch(0)
    batch.commit([batch.task(0, make_rows(0, 10))])


# --- Brokers that come back -------------------------------------------------------------------------------------------


@pytest.fixture
def pair(start_node):
    return [start_node(), start_node()]


def back_at_the_first_pause(monkeypatch, node):
    """Kill a broker, and have it back when the sink pauses for the first time."""
    node.kill()
    pauses = []

    def sleep(seconds):
        if not pauses:
            node.start()
        pauses.append(seconds)
        time.sleep(0.01)

    monkeypatch.setattr(writers, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    return pauses


def test_a_home_that_restarts_is_waited_for_where_brokers_have_to_remember_it(pair, checkpoint, monkeypatch):
    away = without_checkpoint(checkpoint)
    run = Run(pair, checkpoint, **away)
    run.write(0, make_rows(0, 50))
    home = next(node for node in pair if node.get("/stage", producer=run.query)["producers"][0]["home"])
    # Away already when the driver looks; then only when a task does.
    with monkeypatch.context() as patch:
        pauses = back_at_the_first_pause(patch, home)
        run.write(1, make_rows(50, 50))
        assert pauses
    batch = run.batch(2)
    with monkeypatch.context() as patch:
        pauses = back_at_the_first_pause(patch, home)
        batch.commit([batch.task(0, make_rows(100, 50))])
        assert pauses
    # Nobody knows a new write. Whoever is away might.
    with monkeypatch.context() as patch:
        pauses = back_at_the_first_pause(patch, home)
        write_batch(pair, make_rows(150, 50), writeId="new")
        assert pauses
    assert visible(pair) == sum((exactly(make_rows(first, 50)) for first in (0, 50, 100, 150)), Counter())


def test_a_new_query_does_not_wait_for_all_brokers(pair, checkpoint):
    away, there = pair
    away.kill()
    Run(pair, checkpoint, **AT_ONCE).write(0, make_rows(0, 50))
    assert visible([there]) == exactly(make_rows(0, 50))
    # One that is not new, and whose home nobody knows, does.
    (checkpoint / "_nsq_home").unlink()
    log_offsets(checkpoint, 1, 100)
    there._ask("DELETE", "/stage", None, {"producer": Run(pair, checkpoint).query})
    with pytest.raises(ConnectError, match=r"no broker that answers \(.*keeps the decisions of"):
        Run(pair, checkpoint, **AT_ONCE).write(1, make_rows(50, 50))


def test_beside_brokers_that_cannot_stage_nothing_is_published_unstaged_while_others_are_away(start_node, checkpoint):
    ours, go = start_node(), start_node("go")
    rows = make_rows(0, 100)
    Run([ours, go], checkpoint).write(0, rows)
    query = json.loads((checkpoint / "metadata").read_text())["id"]
    ours.kill()
    sentence = f"Rows are not published to {go.tcp} meanwhile"
    # The checkpoint names the home, and the broker is missing or not even listed; or nobody knows of any home.
    for nodes in ([ours, go], [go]):
        with pytest.raises(ConnectError, match=f"keeps the decisions of this query .*{sentence}"):
            Run(nodes, checkpoint, **AT_ONCE).write(0, rows)
    with pytest.raises(ConnectError, match=sentence):
        write_batch([ours, go], rows, writeId=query, **AT_ONCE)
    assert go.get("/stats", format="json")["topics"] == []
    # Where nobody is missing, rows are published at least once, as it is said.
    write_batch([go], rows, **AT_ONCE)
    assert sum(topic["message_count"] for topic in go.get("/stats", format="json")["topics"]) == 100
    ours.start()
    assert visible([ours]) == exactly(rows)


# --- Limits, and where rows go ----------------------------------------------------------------------------------------


def test_a_rate_is_waited_for_longer_than_a_broker_that_is_away(nodes, checkpoint):
    node = nodes[0]
    node.post("/topic/create", topic="slow")
    node.put("/topic/config", {"publish-rate": 400}, topic="slow")
    rows = [("slow", b"%d" % number) for number in range(1300)]
    # Chunks of two seconds' worth, and a patience of a fifth of a second.
    run = Run([node], checkpoint, mpubMaxMessages="800", **{"fetch.timeoutMs": "200"})
    run.write(0, rows[:900], partitions=1)
    run.write(1, rows[900:], partitions=1)
    assert visible([node]) == exactly(rows)


def test_the_option_topic_is_for_all_rows():
    for option, topics in (("", {"t0", "t1", "t2"}), ("copy", {"copy"})):
        found: list[Chunk] = []
        chunks = Chunks(read_sink_options({"nsq.nsqd.addresses": "a:1", "topic": option}), found.append)
        rows = make_rows(0, 200)
        for batch in batches_of(rows):
            chunks.add(batch)
        chunks.finish()
        assert {chunk.topic for chunk in found} == topics
        assert Counter(row for chunk in found for row in chunk.rows) == Counter(body for _, body in rows)


def test_a_column_that_the_option_overrides_is_spoken_of(nodes, monkeypatch, caplog):
    monkeypatch.setattr(writers, "_said", set())
    write_batch(nodes, make_rows(0, 10), topic="copy")
    # Not its text: Spark gives the handlers of this process a format of its own.
    assert 'all rows go to copy, as the option topic says: the column "topic" is not looked at' in caplog.messages
    assert {topic for topic, _ in visible(nodes)} == {"copy"}
