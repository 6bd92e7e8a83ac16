"""The client on simulated brokers: seeded faults, and what must hold under them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from .client import run_seed

SEEDS = 300
SHARES = 20


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of warnings of brokers that were meant to fail."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("share", range(SHARES))
def test_the_client_keeps_its_promises(share: int) -> None:
    for seed in range(share * SEEDS // SHARES, (share + 1) * SEEDS // SHARES):
        violations = run_seed(seed)
        assert not violations, f"python -m tests.simulation.client --start {seed} --seeds 1\n" + "\n".join(violations)
