"""Mixed load on real sockets, drawn from seeds: nothing is lost, mixed up, invented or delivered after its finish.

``FLINTMQ_SEEDS=1000`` runs that many seeds instead of a few.
"""

from __future__ import annotations

import os

import pytest

from support.engine import run_seed

SEEDS = int(os.environ.get("FLINTMQ_SEEDS", "48"))
#: Seeds of one test: a test that fails names its seed.
AT_ONCE = 6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(1, SEEDS + 1, AT_ONCE))
def test_no_promise_is_broken_under_mixed_load(first: int) -> None:
    for seed in range(first, min(first + AT_ONCE, SEEDS + 1)):
        run_seed(seed)


@pytest.mark.timeout(600)
def test_most_messages_of_plain_publishers_and_consumers_go_through_lanes() -> None:
    engines = [run_seed(seed, small=True) for seed in range(1, 9)]
    for what, counted in (("published", "over TCP"), ("finished", "finished")):
        total = sum(engine.ledger.counts[counted] for engine in engines)
        through_lanes = sum(engine.lane_counts[what] for engine in engines)
        assert through_lanes * 2 >= total, f"{through_lanes} of {total} messages were {what} through a lane"
