"""Writing to topics, and reading back what is there."""

from __future__ import annotations

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
