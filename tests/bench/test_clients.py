"""The comparison of clients: a small run of it, with ours alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_run_gives_a_figure_for_every_scenario() -> None:
    command = [sys.executable, "-m", "bench.clients", "--clients=flintmq", "--repeat=1", "--divide=100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    figures = [float(row[1].replace(",", "")) for row in rows if "flintmq" not in row[1] and "--" not in row[1]]
    assert len(figures) == 6
    assert all(figure > 0 for figure in figures)
