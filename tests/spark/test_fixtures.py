"""The fixtures themselves: a session works, and so does a broker beside it."""

from __future__ import annotations


def test_a_session_counts_and_runs_python(spark):
    assert spark.range(1000).count() == 1000
    assert spark.range(4).rdd.map(lambda row: row.id + 1).sum() == 10


def test_a_broker_takes_messages(broker, topic):
    assert broker.publish(topic, (b"%d" % n for n in range(10))) == 10
    stats = broker.get("/stats", format="json", topic=topic)
    assert stats["topics"][0]["depth"] == 10
