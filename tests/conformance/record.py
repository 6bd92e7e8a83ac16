"""Writes ``recorded.json``: what a Go daemon answers to every case.

``python -m tests.conformance.record --nsqd PATH``

Nothing is written when an answer is not what its case says; then either the case is wrong, or the daemon has changed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .cases import CASES
from .notation import Transcript
from .play import Replay

RECORDING = Path(__file__).with_name("recorded.json")


def load() -> dict[str, Transcript]:
    recorded: dict[str, Transcript] = json.loads(RECORDING.read_text("ascii"))["answers"]
    return recorded


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record what a Go nsqd answers to the conformance cases.")
    parser.add_argument("--nsqd", required=True, help="path of the daemon")
    nsqd = parser.parse_args(arguments).nsqd

    version = subprocess.run([nsqd, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    replay = Replay([nsqd])
    try:
        replay.start(CASES)
        answers = {case.name: replay.answer(case) for case in CASES}
    finally:
        replay.stop()

    unexpected = [case for case in CASES if answers[case.name] != case.expected()]
    for case in unexpected:
        sys.stderr.write(f"{case.name}\n  expected: {case.expected()}\n  answered: {answers[case.name]}\n")
    if unexpected:
        sys.stderr.write(f"{len(unexpected)} of {len(CASES)} answers are not what the case says; nothing written\n")
        return 1
    RECORDING.write_text(json.dumps({"nsqd": version, "answers": answers}, indent=1) + "\n", "ascii")
    sys.stdout.write(f"{len(CASES)} cases recorded from nsqd {version}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
