"""Which sources and machine a long run was about: its figures carry both, and the next run goes on where they end."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The broker, what it needs, and what talks to it. A change of anything else leaves its figures as they are.
ENGINE = ("src/flintmq", *(f":(exclude)src/flintmq/{name}" for name in ("admin", "spark", "tools")))
#: Figures are no sources.
_FIGURES = ":(exclude)*.jsonl"


def revision(*paths: str) -> str:
    """Return the newest commit that changed one of these paths of git, marked if they were changed since."""
    changed = _git("status", "--porcelain", "--", *paths, _FIGURES)
    commit = _git("log", "-1", "--format=%h", "--", *paths, _FIGURES) or "unknown"
    return f"{commit}-dirty" if changed else commit


def machine() -> str:
    return f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"


def about(*paths: str) -> dict[str, object]:
    """Return the beginning of a line of results: when and where it was, and on which sources."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": revision(*paths),
        "machine": machine(),
        "cores": os.cpu_count(),
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
