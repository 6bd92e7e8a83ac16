"""Two tables out of one topic: every order as it came, and what each country bought.

flintmq up &
flintmq pub orders '{"id": 1, "country": "fr", "amount": 20}'
cd examples/declarative && spark-pipelines run
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()

NSQD = spark.conf.get("flintmq.nsqd")
TOPIC = spark.conf.get("flintmq.topic")


@dp.table(comment="every message of the topic, once")
def orders() -> DataFrame:
    messages = (
        spark.readStream.format("nsq")
        .option("nsq.nsqd.addresses", NSQD)
        .option("subscribe", TOPIC)
        .option("startingOffsets", "earliest")
        .load()
    )
    order = f.from_json(f.col("value").cast("string"), "id BIGINT, country STRING, amount DOUBLE")
    return messages.select("timestamp", "node", "offset", order.alias("order")).select("*", "order.*").drop("order")


@dp.materialized_view(comment="computed anew from the table above in every run")
def sales() -> DataFrame:
    return (
        spark.read.table("orders").groupBy("country").agg(f.count("*").alias("orders"), f.sum("amount").alias("amount"))
    )
