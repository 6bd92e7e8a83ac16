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


@pytest.mark.timeout(600)
def test_a_batch_under_a_key_and_a_transaction_are_stored_whole_and_once() -> None:
    engines = [run_seed(seed, small=True, once=True) for seed in range(1, 7)]
    for what in ("under a key", "committed", "aborted", "killed before the answer"):
        assert sum(engine.ledger.counts[what] for engine in engines) >= 8, f"{what}: too few to say anything"
