"""``python -m tests.spark.spool_torture``: NSQ's own nsqd into an archive while the driver is killed; is it all there?

    --messages 500000 --kills 3 --folder DIR

The Go daemon (scripts/peers gets it) is published to, `flintmq pipeline archive` consumes a channel of it in spool
mode, and its driver, Java and all, is killed with SIGKILL at moments spread over the run. Each time it comes back. At
the end every message must be in the archive; some may be there twice, which is what a broker without a log can promise.
Exit status 1 says that one is missing.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# For `python -m`, which knows the repository but not the tests' own names.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flintmq.spark.pipelines.archive import Target
from spark.cluster import Program
from spark.daemons import Node
from spark.ordeal import run_command

TOPIC, CHANNEL = "orders", "archive"
_BATCH = 1000
#: What nothing here should ever take.
_PATIENCE = 1800.0


def torture(
    folder: Path, messages: int, kills: int, seed: int = 0, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run it; what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    started = time.monotonic()
    # What a killed driver had in flight comes again after this.
    broker = Node("go", folder / "broker", "--msg-timeout=10s", "--mem-queue-size=10000")
    broker.start()
    driver: Program | None = None
    try:
        broker.post("/topic/create", topic=TOPIC)
        broker.post("/channel/create", topic=TOPIC, channel=CHANNEL)
        for first in range(0, messages, _BATCH):
            broker.publish(TOPIC, [b"message %d" % n for n in range(first, min(first + _BATCH, messages))])
        say(f"{messages:,} published")
        driver = _start(broker, folder)
        killed = 0
        give_up = time.monotonic() + _PATIENCE
        while killed < kills or broker.depth(TOPIC, CHANNEL) or _archived(folder) < messages:
            assert driver.process.poll() is None, f"the driver ended:\n{driver.log.read_text()[-3000:]}"
            assert time.monotonic() < give_up, "it does not get on"
            archived = _archived(folder)
            say(f"{archived:,} archived, {killed} of {kills} killed")
            if killed < kills and archived >= messages * (killed + 1) // (kills + 1):
                time.sleep(chance.uniform(0.0, 2.0))
                driver.kill()
                killed += 1
                driver = _start(broker, folder)
            time.sleep(0.5)
        driver.process.terminate()
        driver.process.wait(_PATIENCE)
    finally:
        if driver is not None:
            driver.kill()
        broker.stop()
    return _judge(folder, messages) | {"kills": kills, "seconds": round(time.monotonic() - started, 1)}


def _start(broker: Node, folder: Path) -> Program:
    settings = {
        "spoolLocation": str(folder / "spool"),
        # Several batches between two kills.
        "maxMessagesPerTrigger": "20000",
    }
    options = [part for key, value in settings.items() for part in ("--option", f"{key}={value}")]
    flags = ["--nsqd", broker.tcp, "--channel", CHANNEL, "--every", "1s", "--to", str(folder / "archive")]
    spark = ["--master", "local[2,4]", "--conf", "spark.driver.memory=1g"]
    command = [sys.executable, "-m", "flintmq", "pipeline", "archive", TOPIC, *flags, *options, *spark]
    return Program(command, folder / "driver.log")


def _archived(folder: Path) -> int:
    return sum(file.rows for file in Target.of(folder / "archive").open().files())


def _judge(folder: Path, messages: int) -> dict[str, Any]:
    import deltalake

    table = deltalake.DeltaTable(str(folder / "archive")).to_pyarrow_table(columns=["value", "offset"])
    found = Counter(int(value.split()[-1]) for value in table["value"].to_pylist())
    rows = Counter(table["offset"].to_pylist())
    report = {
        "messages": messages,
        "rows": table.num_rows,
        "lost": messages - len(found.keys() & set(range(messages))),
        "repeated_by_the_broker": table.num_rows - len(found),
        # A row of the spool has a number of its own: Spark must bring in each once.
        "spool_rows_twice": table.num_rows - len(rows),
    }
    return report | {"passed": not report["lost"] and not report["spool_rows_twice"]}


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("spool_torture", __doc__, torture, 500_000, 3, argv)


if __name__ == "__main__":
    sys.exit(main())
