"""The sink's staged write, driven as Spark drives it but without a JVM, against real brokers that are killed and cut.

A Run is one start of a query: for each batch it makes a writer, pickles it to its tasks, and makes another one for the
commit, as Spark does. The ledger is every topic on every broker, read row by row.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import uuid
from collections import Counter

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from pyspark import TaskContext, cloudpickle

from flintmq.errors import ConnectError, FlintError, OptionError, PublishError
from flintmq.protocol.wire import valid_name
from flintmq.spark.shipped.options import read_sink_options, read_source_options
from flintmq.spark.sink import BatchWriter, StreamWriter, staging, writers
from flintmq.spark.sink import chunks as chunks_module
from flintmq.spark.sink.chunks import Chunk, Chunks
from flintmq.spark.source import BatchReader

from .proxy import Proxy

COLUMNS = {"value": "binary", "topic": "string"}


def make_rows(first, count, seed=0):
    """Rows of odd sizes for three topics: (topic, body), the body beginning with the row's number."""
    dice = random.Random(seed)
    return [
        (f"t{dice.randrange(3)}", b"%d:%b" % (number, b"x" * dice.choice([0, 1, 7, 300, 2039, 70_001])))
        for number in range(first, first + count)
    ]


def batches_of(rows, size=97, fails_after=None):
    """The rows as a task gets them. With ``fails_after``, upstream fails there: the input simply ends."""
    rows = rows if fails_after is None else rows[:fails_after]
    for first in range(0, len(rows), size):
        piece = rows[first : first + size]
        topics, values = zip(*piece, strict=True)
        yield pa.record_batch([pa.array(values, pa.binary()), pa.array(topics)], names=["value", "topic"])


class Run:
    """One start of a query: one driver."""

    def __init__(self, nodes, checkpoint, **options):
        self.id = str(uuid.uuid4())
        self.checkpoint = checkpoint
        self.query = json.loads((checkpoint / "metadata").read_text())["id"]
        self.options = {
            "nsq.nsqd.addresses": ",".join(node.tcp for node in nodes),
            "checkpointLocation": str(checkpoint),
            "mpubMaxMessages": "53",
            "fetch.timeoutMs": "10000",
            **options,
        }

    def writer(self):
        return StreamWriter(read_sink_options(self.options), COLUMNS, overwrite=False)

    def batch(self, number):
        return Batch(self, number)

    def write(self, number, rows, partitions=3):
        """Run a batch to its end."""
        batch = self.batch(number)
        batch.commit([batch.task(partition, rows[partition::partitions]) for partition in range(partitions)])


class Batch:
    """One execution of a batch."""

    def __init__(self, run, number):
        self.run, self.number = run, number
        self.pickled = cloudpickle.dumps(run.writer())

    def task(self, partition, rows, **how):
        """A try of a task; what it tells the driver."""
        context = TaskContext._getOrCreate()
        context._partitionId = partition
        context._localProperties = {
            "sql.streaming.queryId": self.run.query,
            "streaming.sql.batchId": str(self.number),
            "spark.jobGroup.id": self.run.id,
        }
        try:
            message = cloudpickle.loads(self.pickled).write(batches_of(rows, **how))
        finally:
            TaskContext._setTaskContext(None)
        return cloudpickle.loads(cloudpickle.dumps(message))

    def commit(self, messages):
        self.run.writer().commit(messages, self.number)

    def abort(self, messages):
        self.run.writer().abort(messages, self.number)


@pytest.fixture
def checkpoint(tmp_path):
    """The part of a checkpoint that is there before the first batch."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    (folder / "offsets").mkdir()
    return folder


def log_offsets(checkpoint, batch, end, is_log=True):
    """What Spark writes before it runs a batch, from a log or from files; the time is another one each time."""
    place = {"v": 1, "mode": "log", "p": {"in": {"node": {"e": "1", "o": end}}}}
    lines = ["v1", json.dumps({"batchTimestampMs": random.randrange(10**9)})]
    lines.append(json.dumps(place if is_log else {"logOffset": end}))
    (checkpoint / "offsets" / str(batch)).write_text("\n".join(lines))


@pytest.fixture
def own_nodes(start_node):
    """Three brokers that may be killed."""
    return [start_node() for _ in range(3)]


def visible(nodes):
    """Every row that anybody can see, with how often: the logs, read as Spark's source reads them."""
    found = Counter()
    for node in nodes:
        topics = [entry["topic_name"] for entry in node.get("/stats", format="json")["topics"]]
        if not topics:
            continue
        options = {"nsq.nsqd.addresses": node.tcp, "subscribe": ",".join(topics)}
        reader = BatchReader(read_source_options(options, streaming=False))
        for partition in reader.partitions():
            for batch in reader.read(partition):
                found.update(zip(batch.column("topic").to_pylist(), batch.column("value").to_pylist(), strict=True))
    return found


def exactly(rows):
    return Counter(dict.fromkeys(rows, 1))


def staged_bytes(node):
    return node.get("/stage")["bytes"]


def staged_of(nodes, query):
    """Bytes that brokers hold of a query."""
    return sum(
        entry["staging"]["bytes"] + sum(found["bytes"] for found in entry["sets"])
        for node in nodes
        for entry in node.get("/stage")["producers"]
        if entry["producer"] == query
    )


# --- The ordinary way -------------------------------------------------------------------------------------------------


def test_rows_are_visible_after_the_commit_and_not_before(nodes, checkpoint):
    rows = make_rows(0, 1009)
    batch = Run(nodes, checkpoint).batch(0)
    messages = [batch.task(partition, rows[partition::5]) for partition in range(5)]
    assert visible(nodes) == Counter()
    assert sum(map(staged_bytes, nodes)) > 0
    batch.commit(messages)
    assert visible(nodes) == exactly(rows)
    assert staged_of(nodes, batch.run.query) == 0


def test_rows_go_to_all_brokers(nodes, checkpoint):
    rows = make_rows(0, 2003)
    Run(nodes, checkpoint).write(0, rows, partitions=17)
    assert all(sum(entry["message_count"] for entry in node.get("/stats", format="json")["topics"]) for node in nodes)


def test_batches_follow_each_other_in_one_run_and_in_the_next(nodes, checkpoint):
    rows = make_rows(0, 1501)
    run = Run(nodes, checkpoint)
    run.write(0, rows[:500])
    run.write(1, rows[500:1100])
    Run(nodes, checkpoint, mpubMaxMessages="7").write(2, rows[1100:], partitions=7)
    assert visible(nodes) == exactly(rows)


def test_a_batch_without_rows_is_committed(nodes, checkpoint):
    run = Run(nodes, checkpoint)
    run.write(0, [])
    run.batch(1).commit([])
    run.write(2, make_rows(0, 11))
    assert visible(nodes) == exactly(make_rows(0, 11))


def test_deferred_rows_are_staged_too(nodes, checkpoint):
    run = Run(nodes[:1], checkpoint)
    node = nodes[0]
    node.post("/topic/create", topic="later")
    node.post("/channel/create", topic="later", channel="test")
    calls = staging.Calls(read_sink_options(run.options))
    write = staging.Write(run.query, run.id, uuid.uuid4().hex, 0)
    job = run.writer()._job
    attempt = staging.Attempt(calls, write, job.home, job.brokers)
    attempt.put(Chunk.of("later", 3_600_000, [b"a", b"b"]))
    attempt.put(Chunk.of("later", 0, [b"c"]))
    message = writers.Published(
        3, writers.Staged(write, job.home, 3, attempt.epoch, attempt.broker, attempt.id, attempt.chunks)
    )
    run.writer().commit([message], 0)
    calls.close()
    stats = node.get("/stats", format="json", topic="later")["topics"][0]
    assert (stats["message_count"], stats["channels"][0]["deferred_count"]) == (3, 2)


# --- Tries of a task --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_after", [0, 1, 53, 97, 500])
def test_an_input_that_ended_early_is_not_published(nodes, checkpoint, ends_after):
    rows = make_rows(0, 809)
    batch = Run(nodes, checkpoint).batch(0)
    batch.task(0, rows, fails_after=ends_after)
    batch.commit([batch.task(0, rows)])
    assert visible(nodes) == exactly(rows)
    assert staged_of(nodes, batch.run.query) == 0


def test_of_two_tries_that_ended_the_one_that_spark_passes_on_counts(nodes, checkpoint):
    rows = make_rows(0, 809)
    batch = Run(nodes, checkpoint).batch(0)
    first = batch.task(0, rows)
    shuffled = random.Random(1).sample(rows, len(rows))
    batch.task(0, shuffled)
    batch.commit([first])
    assert visible(nodes) == exactly(rows)


def test_a_try_that_still_runs_when_the_batch_is_committed_is_refused(nodes, checkpoint):
    rows = make_rows(0, 400)
    batch = Run(nodes, checkpoint).batch(0)

    def slow_input():
        pieces = batches_of(rows)
        yield next(pieces)
        batch.commit([batch.task(0, rows)])
        yield from pieces

    writer = cloudpickle.loads(batch.pickled)
    write = staging.Write(batch.run.query, batch.run.id, writer._job.id, 0)
    with pytest.raises(PublishError, match="E_STAGE_"):
        writer._job.write(slow_input(), write, 0)
    assert visible(nodes) == exactly(rows)


def partitions_of(writer, node):
    """Partitions whose rows go to a broker."""
    brokers = writer._job.brokers
    return [number for number in range(99) if staging.ranked(brokers, str(number))[0].tcp == node.tcp]


# --- Networks and brokers ---------------------------------------------------------------------------------------------


@pytest.fixture
def proxies(nodes):
    """A way to each broker that can be cut."""
    found = [Proxy(node.http) for node in nodes]
    yield found
    for proxy in found:
        proxy.close()


def through(proxies):
    return {"nsq.nsqd.http.addresses": ",".join(proxy.address for proxy in proxies)}


@pytest.mark.parametrize("answers", range(9))
def test_a_connection_is_cut_after_any_answer(nodes, proxies, checkpoint, answers):
    rows = make_rows(0, 409)
    run = Run(nodes, checkpoint, mpubMaxMessages="7", **through(proxies))
    batch = run.batch(0)
    for proxy in proxies:
        proxy.cut_after_answers(answers)
    messages = [batch.task(partition, rows[partition::2]) for partition in range(2)]
    for proxy in proxies:
        proxy.cut_after_answers(answers)
    batch.commit(messages)
    assert sum(proxy.cuts for proxy in proxies) > 0
    assert visible(nodes) == exactly(rows)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("is_home", [True, False], ids=["home", "another"])
def test_a_broker_is_killed_in_the_middle_of_a_task(own_nodes, checkpoint, chunk, is_home):
    rows = make_rows(0, 809)
    home, other = own_nodes[:2]
    killed = home if is_home else other
    batch = Run([home, other], checkpoint, home=home.tcp).batch(0)
    writer = cloudpickle.loads(batch.pickled)
    first, second = partitions_of(writer, killed)[:2]
    ended = batch.task(first, rows[::2])

    def killing_input():
        for number, piece in enumerate(batches_of(rows[1::2], size=53)):
            if number == chunk:
                killed.kill()
                killed.start()
            yield piece

    write = staging.Write(batch.run.query, batch.run.id, writer._job.id, 0)
    # The rows of the task that has ended survive, too.
    batch.commit([ended, writer._job.write(killing_input(), write, second)])
    assert visible([home, other]) == exactly(rows)


def test_a_broker_that_is_away_when_a_task_begins_is_passed_over(own_nodes, checkpoint):
    rows = make_rows(0, 409)
    run = Run(own_nodes, checkpoint, **{"fetch.timeoutMs": "500"})
    batch = run.batch(0)
    home = json.loads((checkpoint / "_nsq_home").read_text())["node"]
    lost = next(node for node in own_nodes if node.get("/info", extended="true")["flintmq"]["node"] != home)
    lost.kill()
    batch.commit([batch.task(partition, rows[partition::9]) for partition in range(9)])
    lost.start()
    assert visible(own_nodes) == exactly(rows)


def lose_stage(node):
    """As when power was lost before a sync: the chunks that the broker had taken are gone."""
    node.kill()
    shutil.rmtree(node.data_path / "flintmq" / "stage")
    node.start()


def test_chunks_that_a_broker_lost_fail_the_task_or_the_commit(own_nodes, checkpoint):
    rows = make_rows(0, 409)
    home, other = own_nodes[:2]
    run = Run([home, other], checkpoint, home=home.tcp)
    batch = run.batch(0)
    writer = cloudpickle.loads(batch.pickled)
    write = staging.Write(run.query, run.id, writer._job.id, 0)
    partition = partitions_of(writer, other)[0]

    def losing_input():
        for number, piece in enumerate(batches_of(rows, size=53)):
            if number == 3:
                lose_stage(other)
            yield piece

    with pytest.raises(PublishError, match=r"lost power|E_STAGE_"):
        writer._job.write(losing_input(), write, partition)
    message = batch.task(partition, rows)
    lose_stage(other)
    with pytest.raises(PublishError, match="E_STAGE_UNKNOWN"):
        batch.commit([message])
    batch.abort([message])
    Run([home, other], checkpoint, home=home.tcp).write(0, rows)
    assert visible([home, other]) == exactly(rows)


@pytest.mark.parametrize("verb", ["prepare", "apply"])
def test_a_broker_that_is_long_at_work_is_waited_for(nodes, checkpoint, monkeypatch, verb):
    rows = make_rows(0, 409)
    slow = itertools.count()

    class SlowWeb(staging.Web):
        def ask(self, method, address, path, body=None, /, **query):
            if path == f"/stage/{verb}" and next(slow) < 5:
                raise ConnectError(f"{address} cannot be asked over HTTP: timed out")
            return super().ask(method, address, path, body, **query)

    run = Run(nodes, checkpoint, **{"fetch.numRetries": "0"})
    batch = run.batch(0)
    messages = [batch.task(0, rows)]
    monkeypatch.setattr(staging, "Web", SlowWeb)
    batch.commit(messages)
    assert next(slow) > 5
    assert visible(nodes) == exactly(rows)


# --- Drivers ----------------------------------------------------------------------------------------------------------


class Died(BaseException):
    """The driver was killed."""


def dying(monkeypatch, number, *, answered):
    """Have the driver killed at its nth call: before it is sent, or when it is done and not yet answered."""
    count = itertools.count()

    class DyingCalls(staging.Calls):
        def call(self, broker, verb, **body):
            now = next(count) == number
            if now and not answered:
                raise Died
            answer = super().call(broker, verb, **body)
            if now:
                raise Died
            return answer

    monkeypatch.setattr(writers, "Calls", DyingCalls)


@pytest.mark.parametrize("answered", [False, True], ids=["not sent", "answer lost"])
@pytest.mark.parametrize("with_offsets", [False, True], ids=["by sums", "by offsets"])
def test_a_driver_is_killed_at_any_call_and_the_batch_runs_again(
    nodes, checkpoint, monkeypatch, answered, with_offsets
):
    rows = make_rows(0, 2011)
    done, batch_number = 0, 0
    reached = True
    call = 0
    # Each round is the next batch of one query: killed once, and run again by a new driver with other options.
    while reached:
        some = rows[done : done + 101]
        if with_offsets:
            log_offsets(checkpoint, batch_number, done + 101)
        run = Run(nodes, checkpoint)
        batch = run.batch(batch_number)
        # So many that each broker gets some: their addresses decide where partitions go.
        messages = [batch.task(partition, some[partition::30]) for partition in range(30)]
        with monkeypatch.context() as patch:
            dying(patch, call, answered=answered)
            try:
                batch.commit(messages)
                reached = False
            except Died:
                pass
        again = Run(nodes, checkpoint, mpubMaxMessages=str(3 + call))
        again.write(batch_number, random.Random(call).sample(some, len(some)), partitions=3)
        done, batch_number, call = done + 101, batch_number + 1, call + 1
    assert call > 6
    assert visible(nodes) == exactly(rows[:done])
    assert staged_of(nodes, run.query) == 0


def test_an_abort_after_a_lost_answer_drops_nothing_that_is_decided(nodes, checkpoint, monkeypatch):
    rows = make_rows(0, 809)
    for number in itertools.count():
        run = Run(nodes, checkpoint)
        batch = run.batch(number)
        some = [(topic, b"%d-%b" % (number, body)) for topic, body in rows[:60]]
        messages = [batch.task(partition, some[partition::5]) for partition in range(5)]
        with monkeypatch.context() as patch:
            dying(patch, number, answered=True)
            try:
                batch.commit(messages)
                ended = True
            except Died:
                ended = False
        batch.abort(messages)
        Run(nodes, checkpoint).write(number, some)
        if ended:
            break
    found = visible(nodes)
    assert set(found.values()) == {1}
    assert len(found) == 60 * (number + 1)


def test_a_driver_that_was_superseded_is_fenced(nodes, checkpoint):
    rows = make_rows(0, 409)
    zombie = Run(nodes, checkpoint).batch(0)
    staged = [zombie.task(partition, rows[partition::3]) for partition in range(3)]
    Run(nodes, checkpoint).write(0, rows)
    with pytest.raises(PublishError, match=r"E_STAGE_FENCED.*superseded"):
        zombie.commit(staged)
    zombie.abort(staged)
    with pytest.raises(PublishError, match="E_STAGE_FENCED"):
        zombie.task(0, rows)
    # Nor with its next batch: the whole run is superseded.
    with pytest.raises(PublishError, match="E_STAGE_FENCED"):
        zombie.run.write(1, rows)
    assert visible(nodes) == exactly(rows)


def test_a_driver_that_prepared_is_fenced_when_it_decides(nodes, checkpoint, monkeypatch):
    rows = make_rows(0, 409)
    zombie = Run(nodes, checkpoint).batch(0)
    staged = [zombie.task(partition, rows[partition::3]) for partition in range(3)]

    class PausedCalls(staging.Calls):
        def call(self, broker, verb, **body):
            if verb == "decide":
                patch.undo()
                Run(nodes, checkpoint).write(0, rows)
            return super().call(broker, verb, **body)

    with monkeypatch.context() as patch:
        patch.setattr(writers, "Calls", PausedCalls)
        with pytest.raises(PublishError, match="E_STAGE_FENCED"):
            zombie.commit(staged)
    assert visible(nodes) == exactly(rows)


def test_a_late_driver_whose_decision_was_completed_by_the_next_ends_well(nodes, checkpoint, monkeypatch):
    rows = make_rows(0, 409)
    zombie = Run(nodes, checkpoint).batch(0)
    staged = [zombie.task(partition, rows[partition::3]) for partition in range(3)]

    class PausedCalls(staging.Calls):
        def call(self, broker, verb, **body):
            answer = super().call(broker, verb, **body)
            if verb == "decide":
                patch.undo()
                Run(nodes, checkpoint).write(0, rows)
            return answer

    with monkeypatch.context() as patch:
        patch.setattr(writers, "Calls", PausedCalls)
        zombie.commit(staged)
    assert visible(nodes) == exactly(rows)


def test_rows_of_a_superseded_driver_where_the_next_never_goes_stay_invisible(nodes, checkpoint):
    rows = make_rows(0, 409)
    home = Run(nodes, checkpoint).writer()._job.home
    zombie = Run(nodes, checkpoint).batch(0)
    for partition in range(9):
        zombie.task(partition, rows[partition::9])
    alone = [node for node in nodes if node.tcp == home.tcp]
    Run(alone, checkpoint).write(0, rows)
    assert visible(nodes) == exactly(rows)


def test_a_driver_that_does_not_see_its_home_stops(nodes, checkpoint):
    rows = make_rows(0, 409)
    home = Run(nodes, checkpoint).writer()._job.home
    others = [node for node in nodes if node.tcp != home.tcp]
    run = Run(others, checkpoint, **{"fetch.timeoutMs": "300"})
    with pytest.raises(ConnectError, match="keeps the decisions of this query"):
        run.write(0, rows)
    assert visible(nodes) == Counter()


def test_a_broker_that_is_away_after_the_decision_gets_its_rows_later(own_nodes, checkpoint, monkeypatch):
    rows = make_rows(0, 809)
    run = Run(own_nodes, checkpoint, **{"fetch.timeoutMs": "1500"})
    home = run.writer()._job.home
    batch = run.batch(0)
    messages = [batch.task(partition, rows[partition::19]) for partition in range(19)]
    used = {message.staged.broker.tcp for message in messages}
    lost = next(node for node in own_nodes if node.tcp in used - {home.tcp})

    class KillingCalls(staging.Calls):
        def call(self, broker, verb, **body):
            answer = super().call(broker, verb, **body)
            if verb == "decide":
                lost.kill()
            return answer

    with monkeypatch.context() as patch:
        patch.setattr(writers, "Calls", KillingCalls)
        with pytest.raises(ConnectError, match=r"batch 0 of .* is committed.*Nothing is lost"):
            batch.commit(messages)
    batch.abort(messages)
    # While it is away, the query does not get past this batch, and says why.
    with pytest.raises(FlintError, match="is committed, and its rows at node"):
        Run(own_nodes, checkpoint, **{"fetch.timeoutMs": "500"}).write(0, rows)
    lost.start()
    run = Run(own_nodes, checkpoint)
    run.write(0, rows)
    run.write(1, make_rows(809, 100))
    assert visible(own_nodes) == exactly(rows + make_rows(809, 100))


@pytest.mark.parametrize("kill_before", [True, False], ids=["before", "after"])
def test_the_home_is_killed_around_its_decision(own_nodes, checkpoint, monkeypatch, kill_before):
    rows = make_rows(0, 409)
    run = Run(own_nodes, checkpoint, **{"fetch.timeoutMs": "30000"})
    address = run.writer()._job.home.tcp
    home = next(node for node in own_nodes if node.tcp == address)
    batch = run.batch(0)
    messages = [batch.task(partition, rows[partition::3]) for partition in range(3)]

    class KillingCalls(staging.Calls):
        def call(self, broker, verb, **body):
            if verb != "decide":
                return super().call(broker, verb, **body)
            if not kill_before:
                super().call(broker, verb, **body)
            home.kill()
            home.start()
            return super().call(broker, verb, **body)

    with monkeypatch.context() as patch:
        patch.setattr(writers, "Calls", KillingCalls)
        batch.commit(messages)
    assert visible(own_nodes) == exactly(rows)


def test_a_broker_that_is_gone_before_the_decision_fails_the_batch_which_runs_again_elsewhere(own_nodes, checkpoint):
    rows = make_rows(0, 409)
    run = Run(own_nodes, checkpoint, **{"fetch.timeoutMs": "500"})
    home = run.writer()._job.home
    batch = run.batch(0)
    messages = [batch.task(partition, rows[partition::19]) for partition in range(19)]
    used = {message.staged.broker.tcp for message in messages}
    lost = next(node for node in own_nodes if node.tcp in used - {home.tcp})
    lost.kill()
    with pytest.raises(ConnectError, match="did not answer"):
        batch.commit(messages)
    batch.abort(messages)
    Run(own_nodes, checkpoint, **{"fetch.timeoutMs": "500"}).write(0, rows)
    lost.start()
    Run(own_nodes, checkpoint).write(1, make_rows(409, 50), partitions=9)
    assert visible(own_nodes) == exactly(rows + make_rows(409, 50))


def test_a_home_from_an_old_backup_is_noticed(own_nodes, checkpoint, tmp_path):
    home, other = own_nodes[:2]
    run = Run([home, other], checkpoint, home=home.tcp)
    run.write(0, make_rows(0, 100), partitions=9)
    home.stop()
    shutil.copytree(home.data_path, tmp_path / "old")
    home.start()
    run.write(1, make_rows(100, 100), partitions=19)
    home.kill()
    shutil.rmtree(home.data_path)
    shutil.copytree(tmp_path / "old", home.data_path)
    home.start()
    rows = make_rows(200, 100)
    with pytest.raises(PublishError, match="the home lost its decisions"):
        Run([home, other], checkpoint, home=home.tcp).write(2, rows, partitions=19)


def restored_home(own_nodes, checkpoint, tmp_path, **options):
    """A query whose second batch is at ``other`` alone, which is down; its home is from a backup before that batch."""
    home, other, third = own_nodes
    run = Run([home, third], checkpoint, home=home.tcp, **options)
    run.write(0, make_rows(0, 100), partitions=9)
    home.stop()
    shutil.copytree(home.data_path, tmp_path / "old")
    home.start()
    batch = Run(own_nodes, checkpoint, home=home.tcp, **options).batch(1)
    brokers = cloudpickle.loads(batch.pickled)._job.brokers
    # The partition whose rows go there.
    partition = next(n for n in range(99) if staging.ranked(brokers, str(n))[0].tcp == other.tcp)
    batch.commit([batch.task(partition, make_rows(100, 100))])
    home.kill()
    other.kill()
    shutil.rmtree(home.data_path)
    shutil.copytree(tmp_path / "old", home.data_path)
    home.start()
    return home, other


@pytest.mark.parametrize("witness", ["checkpoint", "brokers", "brokers of a checkpoint that takes no file"])
def test_a_home_from_an_old_backup_is_noticed_without_the_node_that_has_the_rows(
    own_nodes, checkpoint, tmp_path, witness, monkeypatch
):
    """Spark had not noted the batch, and runs it again: with the rows that are down they would be there twice."""
    is_noted = witness == "checkpoint"
    if witness == "brokers of a checkpoint that takes no file":

        def refuse(*paths):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr("os.replace", refuse)
    options = without_checkpoint(checkpoint) if witness == "brokers" else {}
    home, other = restored_home(own_nodes, checkpoint, tmp_path, **options)
    again = Run(own_nodes, checkpoint, home=home.tcp, **options)
    with pytest.raises(PublishError, match=r"batch 1 .*the home lost its decisions") as caught:
        again.write(1, make_rows(100, 100), partitions=9)
    assert ("_nsq_decided" in str(caught.value)) == is_noted
    assert [path.name for path in checkpoint.iterdir() if ".tmp" in path.name or path.name.startswith("._nsq")] == []
    other.start()
    assert visible(own_nodes) == exactly(make_rows(0, 100) + make_rows(100, 100))


def swap_addresses(one, other):
    """As when machines, or containers, come back each with the other's address."""
    one.kill()
    other.kill()
    aside = one.data_path.with_name("aside")
    one.data_path.rename(aside)
    other.data_path.rename(one.data_path)
    aside.rename(other.data_path)
    one.start()
    other.start()


@pytest.mark.parametrize("when", ["before the tasks", "before the commit"])
def test_a_broker_that_has_the_address_of_another_is_not_taken_for_it(own_nodes, checkpoint, when):
    home, other = own_nodes[:2]
    rows = make_rows(0, 309)
    run = Run([home, other], checkpoint, home=home.get("/info", extended="true")["flintmq"]["node"])
    [partition, *_] = partitions_of(run.writer(), home)
    batch = run.batch(0)
    batch.commit([batch.task(partition, rows)])
    # The driver dies before it notes that, so the batch runs again; the other broker knows nothing of it.
    run.options["fetch.timeoutMs"] = "500"
    batch = run.batch(0)
    if when == "before the tasks":
        swap_addresses(home, other)
        with pytest.raises(ConnectError, match="E_STAGE_NODE"):
            batch.task(partition, rows)
    else:
        messages = [batch.task(partition, rows)]
        swap_addresses(home, other)
        with pytest.raises(ConnectError, match="E_STAGE_NODE"):
            batch.commit(messages)
        batch.abort(messages)
    assert visible([home, other]) == exactly(rows)
    run = Run([home, other], checkpoint, home=run.options["home"])
    run.write(0, rows)
    run.write(1, make_rows(309, 100))
    assert visible([home, other]) == exactly(rows + make_rows(309, 100))


# --- The same batch again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_offsets", [False, True], ids=["by sums", "by offsets"])
def test_a_checkpoint_that_went_back_is_noticed(nodes, checkpoint, with_offsets):
    run = Run(nodes, checkpoint)
    for number, first in enumerate((0, 100, 200)):
        if with_offsets:
            log_offsets(checkpoint, number, first + 100)
        run.write(number, make_rows(first, 100))
    # The same rows again, in another order: nothing new.
    again = Run(nodes, checkpoint)
    for number in (1, 2):
        again.write(number, random.Random(3).sample(make_rows(number * 100, 100), 100), partitions=2)
    # Batch 2 was planned anew, when more had come.
    if with_offsets:
        log_offsets(checkpoint, 2, 350)
    sentence = r"batch 2 was committed with other rows: the checkpoint went back .* \(set repeatedBatch=skip\)"
    with pytest.raises(PublishError, match=sentence):
        Run(nodes, checkpoint).write(2, make_rows(200, 150))
    with pytest.raises(PublishError, match="batch 2 was committed with other rows"):
        Run(nodes, checkpoint).write(2, [])
    Run(nodes, checkpoint, repeatedBatch="skip").write(2, make_rows(200, 150))
    assert visible(nodes) == exactly(make_rows(0, 100) + make_rows(100, 100) + make_rows(200, 100))


def test_rows_that_differ_at_each_computation_are_the_same_batch_by_its_offsets(nodes, checkpoint):
    log_offsets(checkpoint, 0, 100)
    Run(nodes, checkpoint).write(0, make_rows(0, 100))
    log_offsets(checkpoint, 0, 100)
    Run(nodes, checkpoint).write(0, make_rows(0, 100, seed=7))
    assert visible(nodes) == exactly(make_rows(0, 100))


# --- Homes ------------------------------------------------------------------------------------------------------------


def without_checkpoint(checkpoint):
    """Options of a query whose checkpoint Python cannot read."""
    return {"checkpointLocation": f"hdfs://name{checkpoint}"}


def test_a_home_is_remembered_by_the_brokers_where_the_checkpoint_cannot_be_read(nodes, checkpoint):
    away = without_checkpoint(checkpoint)
    Run(nodes, checkpoint, **away).write(0, make_rows(0, 100))
    Run(nodes, checkpoint, **away).write(0, make_rows(0, 100))
    Run(nodes, checkpoint, **away).write(1, make_rows(100, 100))
    assert not (checkpoint / "_nsq_home").exists()
    assert visible(nodes) == exactly(make_rows(0, 100) + make_rows(100, 100))


def test_a_home_that_nobody_remembers_is_not_guessed(nodes, checkpoint):
    away = without_checkpoint(checkpoint)
    with pytest.raises(OptionError, match=r"keeps the decisions of .* name any of"):
        Run(nodes, checkpoint, **away).write(7, make_rows(0, 100))
    Run(nodes, checkpoint, home=nodes[0].tcp, **away).write(7, make_rows(0, 100))
    Run(nodes, checkpoint, **away).write(8, make_rows(100, 100))
    assert visible(nodes) == exactly(make_rows(0, 100) + make_rows(100, 100))


def test_a_checkpoint_that_takes_no_file_is_one_that_cannot_be_read(nodes, checkpoint, monkeypatch, caplog):
    def refuse(*paths):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr(writers, "_said", set())
    Run(nodes, checkpoint).write(0, make_rows(0, 100))
    Run(nodes, checkpoint).write(1, make_rows(100, 100))
    assert "brokers have to remember it" in caplog.text
    assert [path.name for path in checkpoint.iterdir() if "home" in path.name] == []
    assert visible(nodes) == exactly(make_rows(0, 100) + make_rows(100, 100))


def test_two_drivers_agree_on_a_home_through_the_checkpoint(nodes, checkpoint):
    # Each of them sees one broker alone: the first names it, and the others must not name another.
    trouble = [Run([node], checkpoint, **{"fetch.numRetries": "0"}).writer()._job.trouble for node in nodes]
    assert trouble[0] == ""
    assert all("keeps the decisions of this query" in text for text in trouble[1:])


def test_a_broker_that_was_taken_for_the_home_takes_part_in_what_the_home_decides(nodes, checkpoint):
    # A driver that saw it alone opened it, and then found that the checkpoint names another one.
    alone = {"fetch.numRetries": "0"}
    Run(nodes[:1], checkpoint, **alone).writer()
    (checkpoint / "_nsq_home").unlink()
    Run(nodes[1:2], checkpoint, **alone).writer()
    for number in range(2):
        Run(nodes, checkpoint).write(number, make_rows(100 * number, 100), partitions=19)
    assert visible(nodes) == exactly(make_rows(0, 100) + make_rows(100, 100))


# --- Batch writes -----------------------------------------------------------------------------------------------------


def batch_write(nodes, rows, **options):
    where = {"nsq.nsqd.addresses": ",".join(node.tcp for node in nodes), "fetch.timeoutMs": "5000", **options}
    writer = BatchWriter(read_sink_options(where), COLUMNS, overwrite=False)
    found = [writer._job.write(batches_of(rows[part::3]), writer._write, part) for part in range(3)]
    return writer, found


def test_a_batch_write_with_an_id_is_written_once(nodes):
    rows = make_rows(0, 300)
    name = f"report-{uuid.uuid4().hex}"
    for _ in range(2):
        writer, messages = batch_write(nodes, rows, writeId=name)
        writer.commit(messages)
    assert visible(nodes) == exactly(rows)
    writer, messages = batch_write(nodes, make_rows(0, 301), writeId=name)
    with pytest.raises(PublishError, match="committed with other rows"):
        writer.commit(messages)


def test_writes_with_ids_of_one_query_have_one_home_that_their_checkpoint_names(nodes, tmp_path):
    """The batches of foreachBatch: one that is repeated while its home is not listed is not decided elsewhere."""
    name = f"query-{uuid.uuid4().hex}"
    place = {"checkpointLocation": str(tmp_path)}
    rows = make_rows(0, 900)
    for number in range(2):
        writer, messages = batch_write(nodes, rows[number::3], writeId=f"{name}-{number}", **place)
        writer.commit(messages)
    home = json.loads((tmp_path / "_nsq_home").read_text())["node"]
    others = [node for node in nodes if node.get("/info", extended="true")["flintmq"]["node"] != home]
    assert len(others) == 2
    for number in (1, 2):
        with pytest.raises(ConnectError, match=f"{home} keeps the decisions of this query and does not answer"):
            batch_write(others, rows[number::3], writeId=f"{name}-{number}", **place, **{"fetch.numRetries": "0"})
    for number in (1, 2):
        writer, messages = batch_write(nodes, rows[number::3], writeId=f"{name}-{number}", **place)
        writer.commit(messages)
    assert visible(nodes) == exactly(rows)


def test_one_write_id_twice_at_once(nodes):
    rows = make_rows(0, 300)
    name = f"report-{uuid.uuid4().hex}"
    first, staged = batch_write(nodes, rows, writeId=name)
    second, others = batch_write(nodes, rows, writeId=name)
    with pytest.raises(PublishError, match="E_STAGE_FENCED"):
        first.commit(staged)
    first.abort(staged)
    second.commit(others)
    assert visible(nodes) == exactly(rows)


def test_a_batch_write_that_fails_leaves_nothing(nodes):
    before = sum(map(staged_bytes, nodes))
    writer, messages = batch_write(nodes, make_rows(0, 300))
    assert sum(map(staged_bytes, nodes)) > before
    writer.abort([*messages, None])
    assert visible(nodes) == Counter()
    assert sum(map(staged_bytes, nodes)) == before


def test_large_bodies_come_in_whole_on_every_route(nodes):
    """The general HTTP server's parser stops while its reader is behind, and must go on afterwards."""
    node = nodes[0]
    name = f"p-{uuid.uuid4().hex}"

    def call(verb, **body):
        return node.post(f"/stage/{verb}", json.dumps({"producer": name, **body}).encode())

    assert call("open", run="r", job="j", txn=0)["epoch"] == 1
    call("begin", epoch=1, txn=0, attempt="a", decided=None)
    # Just above what the server reads at once, twice: little is left to come when the parser stops.
    for chunk, size in enumerate(range(525_000, 600_000, 1_871)):
        body = Chunk.of("t0", 0, [b"x" * size]).body
        node.post("/stage/put", body, producer=name, epoch=1, txn=0, attempt="a", chunk=chunk, topic="t0")
    call("abort", epoch=1, txn=0)


# --- Rows that cannot be messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rows", "options", "sentences"),
    [
        (1_048_577, 1, {}, ["a row for t0 has 1048577 bytes", "--max-msg-size is 1048576", "filter them, or raise"]),
        (7_000_001, 1, {}, ["a row for t0 has 7000001 bytes", "5242880 bytes of --max-body-size"]),
        (1_000_001, 6, {"mpubMaxBytes": "9m"}, ["6 rows for t0, 6000034 bytes", "Set mpubMaxBytes below"]),
        (1_048_577, 1, {"idempotent": "false"}, ["a row for t0 has 1048577 bytes", "1048577 > 1048576", "raise"]),
        (1_000_001, 6, {"mpubMaxBytes": "9m", "idempotent": "false"}, ["6000034 > 5242880", "Set mpubMaxBytes below"]),
    ],
)
def test_rows_that_are_too_large_are_named_with_topic_size_limit_and_advice(
    nodes, checkpoint, size, rows, options, sentences
):
    batch = Run(nodes, checkpoint, **options).batch(0)
    with pytest.raises(PublishError) as caught:
        batch.task(0, [("t0", b"x" * size)] * rows)
    for sentence in sentences:
        assert sentence in str(caught.value)


def test_what_is_no_name_for_the_broker_is_none_for_the_sink(nodes, checkpoint):
    batch = Run(nodes, checkpoint).batch(0)
    for name in ("n" * 64, "n" * 54 + "#ephemeral", ".", "a-_.9"):
        assert valid_name(name)
        batch.task(0, [(name, b"x")])
    for name in ("n" * 65, "n" * 55 + "#ephemeral", "#ephemeral", "a\n", "a#ephemeral\n", "a b", "a#b", "\N{SNOWMAN}"):
        assert not valid_name(name)
        with pytest.raises(OptionError, match=r"no name of a topic: 1 to 64 letters.*#ephemeral counts"):
            batch.task(0, [(name, b"x")])


# --- Chunks -----------------------------------------------------------------------------------------------------------


KINDS = [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()]


@pytest.mark.parametrize("seed", range(30))
def test_chunks_keep_the_order_of_rows_whatever_they_come_in(seed, monkeypatch):
    """Any type of column, slices of batches, topics and delays by row or by the option: the records are the rows."""
    dice = random.Random(seed)
    monkeypatch.setattr(chunks_module, "_LARGE", dice.choice([1 << 30, 500]))
    has_topic, has_delay = dice.random() < 0.5, dice.random() < 0.5
    where = {"nsq.nsqd.addresses": "a:1", "mpubMaxMessages": str(dice.choice([1, 7, 500]))}
    where |= {"mpubMaxBytes": str(dice.choice([1, 60, 3000])), **({} if has_topic else {"topic": "t"})}
    found: list[Chunk] = []
    chunks = Chunks(read_sink_options(where), found.append)
    expected: dict[tuple[str, int], list[bytes]] = {}
    for _ in range(dice.randrange(1, 6)):
        rows = [dice.randbytes(dice.choice([1, 5, 40, 900])).hex().encode() for _ in range(dice.randrange(200))]
        topics = [dice.choice(["a", "b", "c"]) if has_topic else "t" for _ in rows]
        delays = [dice.choice([None, 0, 5, 1000]) if has_delay else 0 for _ in rows]
        columns = {"value": pa.array(rows, pa.binary()).cast(dice.choice(KINDS))}
        columns |= {"topic": pa.array(topics, pa.string())} if has_topic else {}
        columns |= {"defer_ms": pa.array(delays, pa.int64())} if has_delay else {}
        batch = pa.RecordBatch.from_pydict(columns)
        first = dice.randrange(len(rows) + 1)
        for part in (batch.slice(0, first), batch.slice(first)):
            chunks.add(part)
        for row, topic, delay in zip(rows, topics, delays, strict=True):
            expected.setdefault((topic, delay or 0), []).append(row)
    chunks.finish()
    got: dict[tuple[str, int], list[bytes]] = {}
    for chunk in found:
        assert chunk == Chunk.of(chunk.topic, chunk.delay, chunk.rows)
        got.setdefault((chunk.topic, chunk.delay), []).extend(chunk.rows)
    assert got == expected
    for bad, what in ((None, "null"), (b"", "empty")):
        with pytest.raises(OptionError, match=f"a value that is {what}"):
            columns = {"value": pa.array([b"a", bad], pa.binary()), "topic": ["t", "t"]}
            chunks.add(pa.RecordBatch.from_pydict(columns))


def test_chunks_hold_every_row_once_within_the_limits():
    dice = random.Random(5)
    for _ in range(50):
        limit, size = dice.choice([1, 3, 100, 1000]), dice.choice([1, 50, 5000, 10**6])
        where = {"nsq.nsqd.addresses": "a:1", "mpubMaxMessages": str(limit), "mpubMaxBytes": str(size)}
        found: list[Chunk] = []
        chunks = Chunks(read_sink_options(where), found.append)
        rows = make_rows(0, dice.randrange(1, 400), seed=dice.random())
        for batch in batches_of(rows, size=dice.choice([1, 7, 97, 1000])):
            chunks.add(batch)
        chunks.finish()
        assert chunks.rows == len(rows)
        assert Counter((chunk.topic, row) for chunk in found for row in chunk.rows) == exactly(rows)
        for chunk in found:
            assert len(chunk.rows) <= limit
            assert len(chunk.rows) == 1 or len(chunk.body) - 4 <= size
