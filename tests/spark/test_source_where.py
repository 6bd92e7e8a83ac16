"""The options ``where`` and ``columns``, and counting: less is read, and the rows are those that Spark would keep."""

from __future__ import annotations

import functools
import random
import sqlite3
import time
from datetime import UTC, datetime, timedelta

import pytest

from flintmq.errors import OptionError
from flintmq.spark import count
from flintmq.spark.shipped.columns import COLUMNS, arrow_schema
from flintmq.spark.shipped.options import read_source_options
from flintmq.spark.shipped.where import read_where

from .conftest import wait_for

TOPICS, NODES = ("a", "b", "c"), ("n1", "n2")
SIGNS = ("=", "<>", "<", "<=", ">", ">=")


class Conditions:
    """Makes conditions: the text for us and for Spark, and the same for SQLite, where times are numbers."""

    def __init__(self, dice, offsets, micros, topics=TOPICS, nodes=NODES):
        self.dice = dice
        self.values = {"offset": offsets, "timestamp": micros, "timestamp_ns": micros, "topic": topics, "node": nodes}

    def make(self, depth=3):
        kind = self.dice.randrange(7) if depth else 6
        if kind < 2:
            parts = [self.make(depth - 1) for _ in range(self.dice.randint(2, 3))]
            word = (" AND ", " or ")[kind]
            return tuple(f"({word.join(texts)})" for texts in zip(*parts, strict=True))
        if kind == 2:
            return tuple(f"NOT ({text})" for text in self.make(depth - 1))
        column = self.dice.choice(list(self.values))
        name = self.dice.choice([column, column.upper(), f"`{column}`"])
        negated = self.dice.choice(["", "NOT "])
        if kind == 3:
            values = [self.value(column) for _ in range(self.dice.randint(1, 4))]
            return tuple(f"{name} {negated}IN ({', '.join(texts)})" for texts in zip(*values, strict=True))
        if kind == 4:
            low, high = (self.value(column) for _ in range(2))
            return tuple(f"{name} {negated}BETWEEN {a} AND {b}" for a, b in zip(low, high, strict=True))
        if kind == 5:
            return (f"{name} IS {negated}NULL",) * 2
        sign, value = self.dice.choice(SIGNS), self.value(column)
        if self.dice.randrange(4):
            return tuple(f"{name} {sign} {text}" for text in value)
        return tuple(f"{text} {sign} {name}" for text in value)

    def value(self, column):
        if not self.dice.randrange(12):
            return ("NULL",) * 2
        value = self.dice.choice(self.values[column])
        if column in ("topic", "node"):
            return (f"'{self.dice.choice([value, value[:-1], value + 'z', ''])}'",) * 2
        if column == "offset":
            return (f"{value + self.dice.choice([0, 0, -1, 1, -(10**6), 10**6])}",) * 2
        value += self.dice.choice([0, 0, 1, -1, 1_000_000, -3_600_000_000])
        if column == "timestamp_ns":
            return (f"{value * 1000 + self.dice.choice([0, 1, 999])}",) * 2
        hours = self.dice.choice([0, 0, 5])
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=value - hours * 3_600_000_000)
        zone = self.dice.choice(["Z", "+00:00"])
        text = f"TIMESTAMP '{moment.replace(tzinfo=None).isoformat()}{zone}'"
        return f"{text} + INTERVAL {hours} HOURS" if hours else text, str(value)


@pytest.mark.parametrize("seed", range(4))
def test_a_condition_keeps_the_rows_that_sql_keeps(seed):
    """Any condition, against SQLite: the same rows, all of them in the boxes, all others in the boxes of the others."""
    pa = pytest.importorskip("pyarrow")
    dice = random.Random(seed)
    begun = 1_790_000_000_000_000
    rows = []
    for offset in range(60):
        stamp = begun * 1000 + dice.randrange(10**10) if offset % 7 else begun * 1000
        rows.append((b"x", dice.choice(TOPICS), dice.choice(NODES), offset, "i", stamp // 1000, stamp, None))
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), arrow_schema(), strict=True)
    ]
    batch = pa.record_batch(columns, schema=arrow_schema())
    table = sqlite3.connect(":memory:")
    table.execute(f"CREATE TABLE t ({', '.join(COLUMNS)})")
    table.executemany(f"INSERT INTO t VALUES ({', '.join('?' * len(COLUMNS))})", rows)
    conditions = Conditions(dice, range(60), [row[5] for row in rows])
    kept = 0
    for _ in range(400):
        ours, theirs = conditions.make()
        where = read_where(ours)
        expected = [row[0] for row in table.execute(f"SELECT offset FROM t WHERE {theirs} ORDER BY offset")]
        assert where.fitting(batch).column(3).to_pylist() == expected, ours
        kept += 0 < len(expected) < len(rows)
        for row in rows:
            boxes = where.boxes(row[1], row[2]) if row[3] in expected else where.others(row[1], row[2])
            assert any(b.first <= row[3] < b.stop and b.since <= row[6] < b.until for b in boxes), (ours, row)
    assert kept > 100
    table.close()


def test_alternatives_beyond_count_become_one_range():
    many = read_where(" OR ".join(f"offset = {n}" for n in range(0, 1000, 7)))
    [box] = many.boxes("t", "n")
    assert (box.first, box.stop) == (0, 995)
    few = read_where("offset IN (1, 5) AND timestamp_ns < 9 OR timestamp > '2026-01-01T00:00:00Z'")
    assert [(box.first, box.stop, box.has_time) for box in few.boxes("t", "n")][:2] == [(1, 2, True), (5, 6, True)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("offset", "a comparison is needed before 'the end'"),
        ("value = 'x'", "a value is needed before \"value = 'x'\""),
        ("offset = 'x'", "offset is compared with a whole number"),
        ("topic = 3", "topic is compared with a text in quotes"),
        ("timestamp = 3", "timestamp is compared with a time"),
        ("timestamp > '2026-01-01T00:00:00'", "no time with its zone"),
        ("offset = 1)", "AND, OR or the end is needed"),
        ("(offset = 1", r"\) is needed before 'the end'"),
        ("offset = 1.5", "'1.5' is not understood"),
        ("topic LIKE 'a%'", "a comparison is needed"),
        ("timestamp > now() - INTERVAL 1 FORTNIGHT", "one of microsecond, .* is needed"),
        ("timestamp > now() - INTERVAL MINUTE", "a number of INTERVAL is needed"),
        ("offset = 9223372036854775808", "more than 64 bits"),
        ("timestamp > now() - INTERVAL 99999999999 WEEKS", "more than 64 bits"),
        ("NOT " * 200 + "offset = 1", "more than 100 brackets"),
        ("topic = 'it''s'", "AND, OR or the end"),
    ],
)
def test_a_condition_that_is_none_is_told(text, sentence):
    with pytest.raises(OptionError, match=rf"where: .*{sentence}"):
        read_where(text)


def test_columns_and_conditions_are_read_with_the_options():
    given = {"nsq.nsqd.addresses": "127.0.0.1:4150", "subscribe": "orders"}
    assert read_source_options(given, streaming=False).columns is None
    read = read_source_options({**given, "columns": " Offset,timestamp "}, streaming=True)
    assert read.columns == {"offset", "timestamp"}
    for wrong, sentence in (("ofset", 'no column "ofset": did you mean offset'), ("x", "there are value, topic, node")):
        with pytest.raises(OptionError, match=sentence):
            read_source_options({**given, "columns": wrong}, streaming=False)
    with pytest.raises(OptionError, match="where is for batches"):
        read_source_options({**given, "where": "offset > 1"}, streaming=True)


# --- With brokers -----------------------------------------------------------------------------------------------------


def options(nodes, topics, **more):
    addresses = ",".join(node.tcp for node in nodes)
    return {"nsq.nsqd.addresses": addresses, "subscribe": ",".join(topics), **more}


def fill(nodes, topics, dice):
    """Messages of both topics on all nodes, over about a second; several chunks of the index on each."""
    for _ in range(6):
        for node in nodes:
            for topic in topics:
                size = dice.choice([10, 300, 3_000])
                node.publish(topic, (dice.randbytes(size) for _ in range(dice.randint(1, 400))))
        time.sleep(0.1)
    for node in nodes:
        for topic in topics:
            wait_for(
                lambda node=node, topic=topic: (info := node.get("/log/info", topic=topic))["durable"] == info["end"]
            )


def rows_of(given):
    """What a batch read gives, without Spark: its rows by topic, node and offset."""
    pytest.importorskip("pyspark")
    from flintmq.spark.source import BatchReader

    reader = BatchReader(read_source_options(given, streaming=False))
    found = {}
    for partition in reader.partitions():
        for batch in reader.read(partition):
            for row in batch.to_pylist():
                key = row["topic"], row["node"], row["offset"]
                assert key not in found, "no row comes twice"
                found[key] = row
    return found


def conditions_on(whole, topics, dice):
    """Conditions with the places and times of some rows."""
    rows = list(whole.values())
    micros = [row["timestamp_ns"] // 1000 for row in rows]
    return Conditions(dice, [row["offset"] for row in rows], micros, topics, sorted({row["node"] for row in rows}))


@pytest.fixture(scope="module")
def filled(three):
    """Two topics on two of the nodes."""
    dice = random.Random(5)
    topics = ("where-a", "where-b")
    fill(three[:2], topics, dice)
    return three[:2], topics


def test_what_a_condition_reads_is_what_spark_would_keep(spark, filled):
    """Generated conditions, with Spark itself to say which rows are right; and no more is counted than there is."""
    nodes, topics = filled
    dice = random.Random(8)
    whole = rows_of(options(nodes, topics))
    assert {key[:2] for key in whole} == {
        (topic, node.get("/log/info", topic=topic)["node"]) for node in nodes for topic in topics
    }
    conditions = conditions_on(whole, topics, dice)
    texts = ["timestamp >= now() - INTERVAL 1 HOUR", "timestamp > current_timestamp() + INTERVAL '2' hours"]
    texts += [conditions.make()[0] for _ in range(40)]
    table = spark.read.format("nsq").options(**options(nodes, topics)).load()
    said = table.selectExpr("topic", "node", "offset", *(f"({text}) AS c{n}" for n, text in enumerate(texts))).collect()
    assert len(said) == len(whole)
    narrow = 0
    for number, text in enumerate(texts):
        given = options(nodes, topics, where=text)
        expected = {tuple(row[:3]): whole[tuple(row[:3])] for row in said if row[3 + number]}
        assert rows_of(given) == expected, text
        assert count(given) == len(expected), text
        narrow += 0 < len(expected) < len(whole)
    assert narrow > 8


def test_only_the_columns_that_are_wanted_are_there(filled, monkeypatch):
    """Generated choices of columns and conditions. Where the index of the log says it all, no message is fetched."""
    from flintmq.spark.log_mode import topic_log

    nodes, topics = filled
    dice = random.Random(9)
    whole = rows_of(options(nodes, topics))
    conditions = conditions_on(whole, topics, dice)
    fetched = []
    batches = topic_log._batches
    monkeypatch.setattr(topic_log, "_batches", lambda *given: fetched.append(given) or batches(*given))
    known = {"topic", "node", "offset"}
    spared = 0
    for _ in range(40):
        wanted = known | set(dice.sample(COLUMNS, dice.choice([0, 0, 1, 3])))
        where = {"where": conditions.make()[0]} if dice.randrange(2) else {}
        given = options(nodes, topics, **where, minPartitions=str(dice.randint(1, 9)))
        fetched.clear()
        found = rows_of({**given, "columns": ",".join(wanted), "arrowBatchRows": str(dice.choice([1, 7, 500, 10_000]))})
        if wanted == known and not where:
            assert not fetched
            spared += 1
        assert found == {
            key: {name: value if name in wanted else None for name, value in row.items()}
            for key, row in rows_of(given).items()
        }
    assert spared > 5


def test_conditions_columns_and_parts_go_together_in_spark(spark, filled):
    nodes, topics = filled
    whole = rows_of(options(nodes, topics))
    stamps = sorted(row["timestamp"] for row in whole.values())
    low, high = stamps[len(stamps) // 5].isoformat(), stamps[len(stamps) // 2].isoformat()
    where = f"timestamp >= '{low}' AND timestamp < '{high}' AND topic = 'where-b'"
    given = options(nodes, topics, where=where, columns="offset,id", minPartitions="5", arrowBatchRows="77")
    expected = {
        (row["offset"], row["id"])
        for row in whole.values()
        if low <= row["timestamp"].isoformat() < high and row["topic"] == "where-b"
    }
    found = spark.read.format("nsq").options(**given).load().collect()
    assert {(row.offset, row.id) for row in found} == expected and len(found) == len(expected) > 10
    assert {(row.value, row.topic, row.node, row.timestamp, row.timestamp_ns, row.attempts) for row in found} == {
        (None,) * 6
    }
    # The table is its own: another condition on the same topics is another table, also in one query.
    late = options(nodes, topics, where=f"timestamp >= '{high}'")
    tables = [spark.read.format("nsq").options(**one).load() for one in (given, late, options(nodes, topics))]
    sizes = [tables[0].count(), tables[1].count(), tables[2].count(), tables[0].union(tables[1]).count()]
    after = sum(row["timestamp"].isoformat() >= high for row in whole.values())
    assert sizes == [len(expected), after, len(whole), len(expected) + after]


class Queries:
    """Makes queries over a topic, and the same ones over a plain table with its rows.

    One DataFrame, one view, one table of the catalog and one cached DataFrame are read again and again, with filters
    that Spark may push down and without, beside reads with the option ``where``.
    """

    def __init__(self, spark, dice, conditions, given, rows):
        self.spark, self.dice, self.conditions, self.given = spark, dice, conditions, given
        columns = "topic STRING, node STRING, offset BIGINT, timestamp TIMESTAMP, timestamp_ns BIGINT"
        names = [part.split()[0] for part in columns.split(", ")]
        self.plain = spark.createDataFrame([tuple(row[name] for name in names) for row in rows], columns)
        self.shared = spark.read.format("nsq").options(**given).load()
        self.cached = self.leaf(self.conditions.make()[0])
        self.cached[0].cache()
        said = ", ".join(f"`{key}` '{value}'" for key, value in given.items())
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW where_view USING nsq OPTIONS ({said})")
        spark.sql(f"CREATE TABLE where_table USING nsq OPTIONS ({said})")

    def close(self):
        self.cached[0].unpersist()
        self.spark.sql("DROP VIEW where_view")
        self.spark.sql("DROP TABLE where_table")

    def leaf(self, text):
        """Rows by the option where."""
        return self.spark.read.format("nsq").options(**self.given, where=text).load(), self.plain.where(text)

    def rows(self):
        """Some rows of the topic, and the same ones of the table."""
        text = self.conditions.make()[0]
        said = ", ".join(f"`{key}` = '{value}'" for key, value in self.given.items())
        match self.dice.randrange(8):
            case 0:
                return self.shared, self.plain
            case 1:
                return self.shared.where(text), self.plain.where(text)
            case 2:
                return self.leaf(text)
            case 3:
                again = self.conditions.make()[0]
                return tuple(one.where(again) for one in self.leaf(text))
            case 4:
                return self.cached
            case 5:
                return tuple(one.where(text) for one in self.cached)
            case 6:
                return self.spark.sql(f"SELECT * FROM where_view WHERE {text}"), self.plain.where(text)
        again = self.conditions.make()[0]
        read = f'SELECT * FROM where_table WITH ({said}, where = "{again}") WHERE {text}'
        return self.spark.sql(read), self.plain.where(text).where(again)

    def query(self):
        """Rows, two of these together, or joined; as one row of numbers."""
        one, other = self.rows(), self.rows()
        names = ["topic", "node", "offset"]
        match self.dice.randrange(4):
            case 0:
                made = one
            case 1:
                made = tuple(a.select(names).union(b.select(names)) for a, b in zip(one, other, strict=True))
            case 2:
                how = self.dice.choice(["inner", "left", "left_anti"])
                made = tuple(a.join(b.select(names), names, how) for a, b in zip(one, other, strict=True))
            case _:
                made = tuple(a.join(b.select("node").distinct(), "node") for a, b in zip(one, other, strict=True))
        return tuple(a.selectExpr("count(*) AS n", "sum(hash(topic, node, offset)) AS h") for a in made)


@pytest.mark.parametrize("pushdown", ["true", "false"])
def test_no_query_gets_the_rows_of_another(spark, filled, pushdown):
    """Generated queries, one after the other and many in one, against a table that has nothing to push down to."""
    nodes, topics = filled
    dice = random.Random(f"queries {pushdown}")
    whole = list(rows_of(options(nodes, topics)).values())
    conditions = Conditions(
        dice,
        [row["offset"] for row in whole],
        [row["timestamp_ns"] // 1000 for row in whole],
        topics,
        sorted({row["node"] for row in whole}),
    )
    name = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(name)
    spark.conf.set(name, pushdown)
    queries = Queries(spark, dice, conditions, options(nodes, topics), whole)
    try:
        for together in (1, 1, 5):
            made = [queries.query() for _ in range(together)]
            found, expected = (
                functools.reduce(lambda a, b: a.union(b), side).collect() for side in zip(*made, strict=True)
            )
            assert found == expected
        assert queries.shared.count() == len(whole)
    finally:
        queries.close()
        spark.conf.set(name, before)


def test_every_choice_of_columns_gives_these_and_no_others(filled):
    nodes, topics = filled
    dice = random.Random(2)
    whole = rows_of(options(nodes[:1], topics[:1]))
    order = sorted(whole)
    for _ in range(12):
        wanted = dice.sample(COLUMNS, dice.randint(1, len(COLUMNS)))
        where = dice.choice([{}, {"where": f"offset > {order[len(order) // 3][2]} OR topic < 'a'"}])
        from flintmq.spark.source import BatchReader

        reader = BatchReader(
            read_source_options(options(nodes[:1], topics[:1], columns=",".join(wanted), **where), streaming=False)
        )
        found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
        kept = [whole[key] for key in order if not where or key[2] > order[len(order) // 3][2]]
        expected = [{name: row[name] if name in wanted else None for name in COLUMNS} for row in kept]
        assert found == expected, wanted


def test_a_count_is_of_a_time_a_topic_and_nodes(filled):
    nodes, topics = filled
    whole = rows_of(options(nodes, topics))
    stamps = sorted(row["timestamp"] for row in whole.values())
    node = next(iter(whole))[1]
    since, until = stamps[100], stamps[-100]
    inside = [row for row in whole.values() if since <= row["timestamp"] < until]
    given = options(nodes, topics)
    assert count(given) == len(whole)
    assert count(given, since=since, until=until) == len(inside) > 100
    assert count(given, since=since, nodes=[node]) == sum(
        row["node"] == node and row["timestamp"] >= since for row in whole.values()
    )
    assert count({**given, "WHERE": "topic = 'where-a' OR offset < 0"}, until=until) == sum(
        row["topic"] == "where-a" and row["timestamp"] < until for row in whole.values()
    )
    with pytest.raises(OptionError, match="a time without a zone"):
        count(given, since=since.replace(tzinfo=None))
    with pytest.raises(OptionError, match="no identity of a broker"):
        count(given, nodes=["' OR"])
    with pytest.raises(OptionError, match="a spool has none"):
        count({"mode": "spool", "spoolLocation": "/nowhere"})


def test_a_condition_on_the_time_fetches_little(start_node, topic):
    """What is read of a long log is about what the condition asks for, also after the broker was killed."""
    node = start_node()
    for _ in range(5):
        # 4 MB each: eight chunks of the index.
        node.publish(topic, (b"x" * 4_000 for _ in range(1_000)))
        time.sleep(0.02)
    wait_for(lambda: (info := node.get("/log/info", topic=topic))["durable"] == info["end"])
    whole = rows_of(options([node], [topic]))
    stamps = sorted(row["timestamp_ns"] for row in whole.values())
    last = options([node], [topic], where=f"timestamp_ns >= {stamps[-500]}")

    def planned(given):
        from flintmq.spark.source import BatchReader

        reader = BatchReader(read_source_options(given, streaming=False))
        return sum(partition.range.size for partition in reader.partitions())

    assert planned(options([node], [topic])) == 5_000
    assert 500 <= planned(last) < 1_500
    assert planned(options([node], [topic], where="timestamp >= now() + INTERVAL 1 DAY")) == 0
    assert planned(options([node], [topic], where="topic = 'other'")) == 0
    node.kill()
    node.start()
    # Its file was not complete: the index does not say in which order its times are.
    assert planned(last) == 5_000
    assert len(rows_of(last)) == sum(stamp >= stamps[-500] for stamp in stamps)


def test_spark_still_gives_the_plan_of_one_query_to_the_next(spark):
    """Why filters are not pushed down: when this fails Spark has changed, and the source may take them."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, GreaterThanOrEqual, InputPartition

    class Reader(DataSourceReader):
        least = 0

        def pushFilters(self, filters):
            for found in filters:
                if isinstance(found, GreaterThanOrEqual):
                    self.least = found.value
            return filters

        def partitions(self):
            return [InputPartition(self.least)]

        def read(self, partition):
            return iter([(n,) for n in range(partition.value, 100)])

    class Numbers(DataSource):
        @classmethod
        def name(cls):
            return "flintmq_test_numbers"

        def schema(self):
            return "n INT"

        def reader(self, schema):
            return Reader()

    name = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(name)
    spark.conf.set(name, "true")
    try:
        spark.dataSource.register(Numbers)
        table = spark.read.format("flintmq_test_numbers").load()
        assert table.where("n >= 90").count() == 10
        assert table.count() == 10, "of 100: the narrowed plan is used again"
        many, few = table.where("n >= 50"), table.where("n >= 90")
        assert many.union(few).count() == 20, "of 60: the plan of the one is that of the other, too"
    finally:
        spark.conf.set(name, before)
