"""Writes ``lookup_recorded.json``: what a Go nsqlookupd answers to every case.

``python -m tests.conformance.lookup_record --nsqlookupd PATH``

Nothing is written when an answer is not what its case says; then either the case is wrong, or the daemon has changed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .lookup_cases import CASES
from .lookup_play import Replay
from .notation import Transcript

RECORDING = Path(__file__).with_name("lookup_recorded.json")


def load() -> dict[str, Transcript]:
    recorded: dict[str, Transcript] = json.loads(RECORDING.read_text("ascii"))["answers"]
    return recorded


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record what a Go nsqlookupd answers to the conformance cases.")
    parser.add_argument("--nsqlookupd", required=True, help="path of the daemon")
    nsqlookupd = parser.parse_args(arguments).nsqlookupd

    version = subprocess.run([nsqlookupd, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    replay = Replay([nsqlookupd], newer=False)
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
    RECORDING.write_text(json.dumps({"nsqlookupd": version, "answers": answers}, indent=1) + "\n", "ascii")
    sys.stdout.write(f"{len(CASES)} cases recorded from nsqlookupd {version}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
