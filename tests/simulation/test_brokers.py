"""Brokers on simulated machines: seeded clients and faults, and what must hold under them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .brokers import run_script, run_seed, script_of, shrink
from .ledger import Ledger
from .world import World

SEEDS = 300
SHARES = 30
STEPS = 200
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("share", range(SHARES))
def test_brokers_keep_their_promises(share: int) -> None:
    reached: Counter[str] = Counter()
    for seed in range(share * SEEDS // SHARES, (share + 1) * SEEDS // SHARES):
        outcome = run_seed(seed, STEPS)
        reached += outcome.reached
        assert not outcome.violations, f"python -m tests.simulation --seed {seed} --steps {STEPS}\n" + "\n".join(
            outcome.violations
        )
    # A fault that does not fire tests nothing, and so does a broker that goes another way than in production.
    for name in ("acknowledged", "published by a lane", "finished by a lane", "FIN confirmed", "kill", "power"):
        assert reached[name] > 0, name


def traced(seed: int, steps: int, **environment: str) -> str:
    """The trace of a seed in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation", "--seed", str(seed), "--steps", str(steps)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("trace ")[1].split()[0]


def test_the_same_seed_makes_the_same_calls_in_every_process_and_in_both_forms_of_the_kernel() -> None:
    trace = run_seed(5, 60).trace
    assert trace == run_seed(5, 60).trace
    assert trace == traced(5, 60, PYTHONHASHSEED="1")
    assert trace == traced(5, 60, PYTHONHASHSEED="2", FLINTMQ_PURE="1")
    assert trace != run_seed(6, 60).trace


@pytest.mark.parametrize("seed", range(0, SEEDS, 23))
def test_another_process_with_other_addresses_and_hashes_makes_the_same_calls(seed: int) -> None:
    """A set of objects has another order in each process: what goes through one must not depend on it."""
    assert run_seed(seed, STEPS).trace == traced(seed, STEPS, PYTHONHASHSEED=str(seed + 1))


@pytest.mark.parametrize("descriptors", [64, 1 << 20])
def test_a_machine_that_allows_other_descriptors_makes_the_same_calls(
    descriptors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = run_seed(8, 80).trace
    monkeypatch.setattr(resource, "getrlimit", lambda which: (descriptors, descriptors))
    assert run_seed(8, 80).trace == trace


def test_a_failure_is_shrunk_to_the_steps_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that is never satisfied finds fault with the first answer."""
    acknowledge = Ledger.acknowledge

    def never_satisfied(self: Ledger, sent: object, last_words: str = "") -> None:
        acknowledge(self, sent, last_words)  # type: ignore[arg-type]
        self.world.violated("owed: nothing is ever enough")

    monkeypatch.setattr(Ledger, "acknowledge", never_satisfied)
    outcome = run_script(3, script_of(3, 8))
    assert outcome.kind == "owed"
    small = shrink(outcome, seconds=100)
    assert small.kind == "owed"
    assert len(small.script) < 4
    for step in small.script:
        # None can be left out: there must be a publish, and time for its answer.
        assert run_script(3, [other for other in small.script if other is not step]).kind == ""
    again = run_script(3, small.script)
    assert (again.violations, again.trace) == (small.violations, small.trace)


def test_things_that_happen_inside_a_call_happen_in_the_order_of_their_times() -> None:
    world = World(1, tick=10)
    seen: list[int] = []
    world.after(3e-9, lambda: seen.append(3))
    world.after(1e-9, lambda: (seen.append(1), world.pass_time(1)))
    world.after(2e-9, lambda: seen.append(2))
    world.pass_time(5)
    assert seen == [1, 2, 3]
