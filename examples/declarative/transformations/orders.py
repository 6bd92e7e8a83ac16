"""A topic in tables: the orders among its messages, those that are none, and what each country bought.

flintmq up &
flintmq pub orders '{"id": 1, "country": "fr", "amount": 20}'
flintmq pub orders '{"id": 2, "country": "fr", "amount": -5}'
cd examples/declarative && spark-pipelines run
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()

NSQD = spark.conf.get("flintmq.nsqd")
TOPIC = spark.conf.get("flintmq.topic")

# What is wrong with a message, by the first of these that is true.
RULES = {
    "no JSON, or without an id": "data.id IS NULL",
    "without a country": "data.country IS NULL",
    "amount missing or negative": "data.amount IS NULL OR data.amount < 0",
}


def judged() -> DataFrame:
    """Return the messages of the topic, once, with what is wrong with them, null if nothing is."""
    read = (
        spark.readStream.format("nsq")
        .option("nsq.nsqd.addresses", NSQD)
        .option("subscribe", TOPIC)
        .option("startingOffsets", "earliest")
        .load()
    )
    data = f.from_json(f.col("value").cast("string"), "id BIGINT, country STRING, amount DOUBLE")
    found = [f.when(f.expr(rule), reason) for reason, rule in RULES.items()]
    return read.withColumn("data", data).withColumn("wrong", f.coalesce(*found))


@dp.table(comment="the messages that are orders")
def orders() -> DataFrame:
    return judged().where("wrong IS NULL").select("timestamp", "node", "offset", "data.*")


@dp.table(comment="the other messages, and why they are no orders")
def rejected() -> DataFrame:
    return judged().where("wrong IS NOT NULL").select("timestamp", "node", "offset", "value", "wrong")


@dp.materialized_view(comment="computed anew from the table of orders in every run")
def sales() -> DataFrame:
    return (
        spark.read.table("orders").groupBy("country").agg(f.count("*").alias("orders"), f.sum("amount").alias("amount"))
    )
