"""A short torture: nothing is lost and nothing is there twice, whatever fails. The long one has a command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from .torture import torture


@pytest.mark.timeout(1500)
def test_rows_through_spark_are_in_their_topics_once_whatever_fails(spark_environment, tmp_path: Path) -> None:
    """On a cluster of two hosts, so that Spark starts copies of slow tasks, too."""
    seed = int.from_bytes(os.urandom(2))
    report = torture(tmp_path / "torture", rows=200_000, faults=8, seed=seed, master="standalone")
    kinds = ("driver", "executor", "source", "target", "cut", "speculation", "zombie", "rollback")
    assert report["faults"] == dict.fromkeys(kinds, 1)
    assert report["passed"], (seed, report)
