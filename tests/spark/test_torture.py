"""Short tortures: nothing is lost and nothing is there twice, whatever fails. The long ones have a command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from .torture import torture


@pytest.mark.timeout(1500)
def test_rows_through_spark_are_in_their_topics_once_whatever_fails(spark_environment, tmp_path: Path) -> None:
    report = torture(tmp_path / "torture", rows=60_000, faults=8, seed=int.from_bytes(os.urandom(2)))
    kinds = ("driver", "executor", "source", "target", "cut", "upstream", "zombie", "rollback")
    assert report["faults"] == dict.fromkeys(kinds, 1)
    assert report["passed"], report


@pytest.mark.timeout(1500)
def test_an_archive_on_a_cluster_is_exact_whatever_fails(spark_environment, tmp_path: Path) -> None:
    report = torture(
        tmp_path / "torture",
        rows=40_000,
        faults=3,
        seed=int.from_bytes(os.urandom(2)),
        route="archive",
        master="standalone",
    )
    assert report["faults"] == {"driver": 1, "executor": 1, "source": 1}
    assert report["passed"], report
