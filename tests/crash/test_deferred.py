"""A small version of ``python -m tests.crash.deferred``; the large one is run by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from .deferred import InProcess, OwnProcess, Plan, deferred


async def test_deferred_messages_survive_crashes_and_are_never_early(tmp_path: Path) -> None:
    plan = Plan(messages=4_000, over=86_400, crashes=6, seed=1)
    report = await deferred(plan, InProcess(tmp_path, plan.over))
    assert (report.lost, report.early, report.acknowledged, report.crashes) == (0, 0, 4_000, 6)
    assert report.deliveries >= 4_000


@pytest.mark.slow
async def test_so_they_do_when_the_process_is_killed(tmp_path: Path) -> None:
    plan = Plan(messages=2_000, over=8, crashes=3, seed=2)
    report = await deferred(plan, OwnProcess(tmp_path, plan.over))
    assert (report.lost, report.early, report.acknowledged, report.crashes) == (0, 0, 2_000, 3)
