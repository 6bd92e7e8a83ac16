"""Writing to topics, and reading back what is there."""

from __future__ import annotations

from collections import Counter

from flintmq.spark.shipped.net import Connection
from flintmq.spark.shipped.options import read_sink_options


def to(nsqd, **more):
    return {"nsq.nsqd.addresses": nsqd.tcp, **more}


def write(frame, options):
    frame.write.format("nsq").options(**options).mode("append").save()


def consume(nsqd, topic, count, channel="test"):
    """So many messages of a topic; those that come beyond it fail the test when they are there."""
    options = read_sink_options({"nsq.nsqd.addresses": nsqd.tcp, "topic": topic})
    connection = Connection(nsqd.tcp, options.network)
    try:
        connection.subscribe(topic, channel)
        connection.send(b"RDY 2500\n")
        bodies = []
        while len(bodies) < count:
            kind, data = connection.next_frame()
            assert kind == 2, data
            bodies.append(data[26:])
            connection.send(b"FIN %b\n" % data[10:26])
        return bodies
    finally:
        connection.close()


def count_of(nsqd, topic):
    """How many messages were ever published to a topic."""
    stats = nsqd.get("/stats", format="json", topic=topic)
    return stats["topics"][0]["message_count"] if stats["topics"] else 0


#: Rows of a write: more than two Arrow batches of 10,000, and divisible by nothing.
ROWS = 25_013


def odd_rows(spark, count=ROWS):
    """Rows of 3 to 2,050 bytes that begin with their number."""
    size = "cast(pmod(hash(id), 2039) as int)"
    return spark.range(count, numPartitions=1).selectExpr(
        f"concat(cast(id as string), ':', repeat('x', {size})) as value"
    )


def ledger(nsqd, topic, rows=ROWS):
    """Compare the topic with the rows 0 to ``rows``: how many are missing, how many there are too many."""
    published = count_of(nsqd, topic)
    found = Counter(int(body.partition(b":")[0]) for body in consume(nsqd, topic, published))
    return {"lost": len(set(range(rows)) - found.keys()), "doubled": published - len(found), "of": rows}


EXACT = {"lost": 0, "doubled": 0, "of": ROWS}
