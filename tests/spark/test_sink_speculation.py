"""Speculation: a slow task runs twice at a time, on executors of their own, and both stage or publish their rows."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from .conftest import small_session
from .sink_tools import EXACT, ledger, odd_rows, to, write


@pytest.fixture(scope="module")
def speculative(spark_environment, tmp_path_factory):
    """A session with two executors that starts slow tasks twice. A local one never does."""
    settings = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.minTaskRuntime": "200ms",
        "spark.executor.memory": "512m",
    }
    session = small_session("local-cluster[2,2,1024]", tmp_path_factory.mktemp("cluster"), **settings)
    yield session
    session.stop()


def test_a_slow_task_runs_twice_and_its_rows_come_in_another_order(speculative, broker, topic, tmp_path):
    rows = odd_rows(speculative).repartition(4)
    seen = tmp_path / "seen"
    seen.mkdir()
    folder = str(seen)

    def slow_first(batches):
        import os
        import random
        import time

        import pyarrow as pa
        from pyspark import TaskContext

        task = TaskContext.get()
        name = os.path.join(folder, f"{task.partitionId()}-{task.attemptNumber()}")
        open(name, "w").close()
        slow = task.partitionId() == 0 and task.attemptNumber() == 0
        for batch in batches:
            order = list(range(batch.num_rows))
            random.shuffle(order)
            batch = batch.take(pa.array(order))
            for first in range(0, batch.num_rows, 619):
                yield batch.slice(first, 619)
                if slow:
                    time.sleep(1.0)

    write(rows.mapInArrow(slow_first, "value string"), to(broker, topic=topic, mpubMaxMessages="101"))
    assert {path.name for path in seen.iterdir()} > {"0-0", "0-1"}
    assert ledger(broker, topic) == EXACT
