"""Mixed load on real sockets, drawn from seeds: nothing is lost, mixed up, invented or delivered after its finish.

``FLINTMQ_SEEDS=1000`` runs that many seeds instead of a few.
"""

from __future__ import annotations

import os

import pytest

from support.engine import Engine, run_seed

SEEDS = int(os.environ.get("FLINTMQ_SEEDS", "48"))
#: Seeds of one test: a test that fails names its seed.
AT_ONCE = 6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(1, SEEDS + 1, AT_ONCE))
def test_no_promise_is_broken_under_mixed_load(first: int) -> None:
    engines = [run_seed(seed) for seed in range(first, min(first + AT_ONCE, SEEDS + 1))]
    assert_lanes_were_taken(engines)


def assert_lanes_were_taken(engines: list[Engine]) -> None:
    """The fast path is the tested path: most messages of plain publishers and consumers go through the lanes."""
    for what in ("published", "finished"):
        total = sum(engine.ledger.counts[what] for engine in engines)
        through_lanes = sum(engine.lane_counts[what] for engine in engines)
        assert through_lanes * 2 >= total, f"{through_lanes} of {total} messages were {what} through a lane"
