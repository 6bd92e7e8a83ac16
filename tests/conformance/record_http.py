"""Writes ``recorded_http.json``: what a Go daemon answers to every HTTP case.

``python -m tests.conformance.record_http --nsqd PATH``

Every case is played twice, on daemons of their own; nothing is written when the answers differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .http_cases import HTTP_CASES
from .http_play import Answers, HttpReplay

RECORDING = Path(__file__).with_name("recorded_http.json")


def load() -> dict[str, Answers]:
    recorded: dict[str, Answers] = json.loads(RECORDING.read_text("ascii"))["answers"]
    return recorded


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record what a Go nsqd answers to the HTTP cases.")
    parser.add_argument("--nsqd", required=True, help="path of the daemon")
    nsqd = parser.parse_args(arguments).nsqd

    version = subprocess.run([nsqd, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    takes = []
    for _ in range(2):
        replay = HttpReplay([nsqd])
        try:
            takes.append(replay.answers(HTTP_CASES))
        finally:
            replay.stop()
    first, second = takes
    differing = [name for name in first if first[name] != second[name]]
    for name in differing:
        sys.stderr.write(f"{name}\n  first:  {first[name]}\n  second: {second[name]}\n")
    if differing:
        sys.stderr.write(f"{len(differing)} of {len(first)} answers differ from run to run; nothing written\n")
        return 1
    RECORDING.write_text(json.dumps({"nsqd": version, "answers": first}, indent=1) + "\n", "ascii")
    sys.stdout.write(f"{len(first)} cases recorded from nsqd {version}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
