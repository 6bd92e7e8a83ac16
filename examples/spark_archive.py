"""A topic into a Delta table, for spark-submit: TOPIC TABLE CHECKPOINT [nsqlookupd ...]; see docs/spark-clusters.md."""

import sys

from flintmq.spark import session
from flintmq.spark.pipelines.archive import archive
from flintmq.spark.pipelines.common import Topics

topic, table, checkpoint, *lookupds = sys.argv[1:]
brokers = {"nsq.lookupd.http.addresses": ",".join(lookupds or ["127.0.0.1:4161"])}
spark = session("archive")
orders = Topics([topic], {**brokers, "startingOffsets": "earliest"})
print(
    archive(spark, orders.stream, table, checkpoint=checkpoint, once=spark.conf.get("spark.archive.once", "") == "yes")
)
