"""`flintmq pipeline sample`: orders that come in, are archived and measured, to have something to look at.

What `scripts/up` runs beside the broker: a producer of sample messages, and the pipelines `archive` and `metrics` in
one session, so that it takes one Java and not two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.errors import FlintError, PipelineError
from flintmq.spark.pipelines import archive, common, metrics, reports
from flintmq.spark.pipelines.given import DEFAULT_NSQD
from flintmq.spark.pipelines.screen import say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["add_arguments", "run", "sample"]

#: No topic of the documentation's examples: their output shows only what a reader published.
TOPIC = "sample.orders"
_COUNTRIES = ("de", "fr", "it", "pl", "se")
#: Messages of one publish come this often.
_PACE_SECONDS = 0.25


def sample(spark: SparkSession, nsqd: str, folder: Path, *, rate: float = 20.0, stop: threading.Event) -> None:
    """Publish, archive and measure until `stop` is set. PipelineError says what failed first."""
    source = common.Topics([TOPIC], {"nsq.nsqd.addresses": nsqd, "startingOffsets": "earliest"})
    failures: list[str] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except FlintError as exc:
            failures.append(str(exc))
        finally:
            stop.set()

    board = metrics.Board(lambda board: metrics.plot(board, folder / "metrics.html"))
    jobs: tuple[Callable[[], object], ...] = (
        lambda: asyncio.run(_publish(nsqd, rate, stop)),
        lambda: archive.archive(spark, source.stream, folder / TOPIC, every=10.0),
        lambda: metrics.metrics(spark, source.stream, window=10.0, path="$.country", board=board, every=5.0),
    )
    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    stop.wait()
    for query in spark.streams.active:
        query.stop()
    for thread in threads:
        thread.join()
    if failures:
        raise PipelineError(failures[0])


async def _publish(nsqd: str, rate: float, stop: threading.Event) -> None:
    from flintmq.client.producer import Producer

    number = int(time.time())
    async with Producer(nsqd) as producer:
        while not stop.is_set():
            count = max(1, round(rate * _PACE_SECONDS))
            orders = []
            for _ in range(count):
                number += 1
                order = {"id": number, "country": random.choice(_COUNTRIES), "amount": random.randint(1, 500)}
                orders.append(json.dumps(order).encode())
            await producer.publish_many(TOPIC, orders)
            await asyncio.sleep(count / rate)


# --- Command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Publish sample orders, archive them and measure them, until ctrl-C."
    parser.add_argument("--nsqd", metavar="ADDRESS", default=DEFAULT_NSQD, help="the broker (default %(default)s)")
    parser.add_argument(
        "--folder", metavar="DIR", default="flintmq-spark", help="folder of the results (default ./%(default)s)"
    )
    parser.add_argument("--rate", metavar="N", type=float, default=20.0, help="orders a second (default %(default)g)")
    common.spark_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.rate <= 0:
        raise PipelineError("--rate is a number above 0")
    folder = Path(arguments.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    metrics.plot(metrics.Board(), folder / "metrics.html")
    # Before signals only ask for the end: ctrl-C must not wait for Spark to start.
    spark = common.open_session(arguments, "flintmq sample")
    if not common.is_remote(spark):
        reports.begin(spark, {"nsq.nsqd.addresses": arguments.nsqd})
    with common.asked_to_stop() as stop:
        say(
            f"orders are published to the topic {TOPIC}, archived and measured\n"
            f"  metrics   {(folder / 'metrics.html').as_uri()}\n"
            f"  archive   {folder / TOPIC}\n"
            f"  check it  flintmq pipeline audit {TOPIC} --nsqd {arguments.nsqd} --archive {folder / TOPIC}"
        )
        sample(spark, arguments.nsqd, folder, rate=arguments.rate, stop=stop)
    return 0
