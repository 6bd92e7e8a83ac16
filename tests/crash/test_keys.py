"""A short run of publishes with keys across kills; and the oracle's own test: it must notice what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from .keys import Report, Run, Settings, keys


@pytest.mark.parametrize(("durability", "kills", "seed"), [("os", 4, 1), ("fsync", 2, 2)])
async def test_what_is_repeated_across_kills_is_stored_once(
    durability: str, kills: int, seed: int, tmp_path: Path
) -> None:
    report = await keys(Settings(400, kills, durability, seed), tmp_path)

    assert report.samples == []
    assert report.violations == {}
    assert report.kills == kills
    # It was a load worth the name.
    assert report.repeats > 200
    assert report.deliveries >= report.messages > 2000


def concluded(run: Run) -> dict[str, int]:
    run._conclude()
    report: Report = run.report
    return report.violations


def test_the_oracle_notices_a_lost_and_a_doubled_message(tmp_path: Path) -> None:
    run = Run(Settings(2, 0, "os", 1), tmp_path, lambda report: None)
    bodies = [b"%d %d ..." % (number, index) for number, count in run._counts.items() for index in range(count)]
    for ident, body in enumerate(bodies):
        run.saw(body, ident)
        run.saw(body, ident)
    assert concluded(run) == {}
    run.saw(bodies[0], 1000)
    assert concluded(run) == {"doubled": 1}
    again = Run(Settings(2, 0, "os", 1), tmp_path, lambda report: None)
    for ident, body in enumerate(bodies[1:]):
        again.saw(body, ident)
    assert concluded(again) == {"lost": 1}
