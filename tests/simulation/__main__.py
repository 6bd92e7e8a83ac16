"""Run seeds of the simulation of brokers, print what was reached, and shrink what failed.

python -m tests.simulation --seed 7 --steps 200             one seed
python -m tests.simulation --seed 0 --seeds 1000 --full     many; a state that is reached too rarely fails the run
python -m tests.simulation --seed 7 --script steps.json     exactly these steps, as a failure printed them

A long run appends a line of JSON for each hundred seeds to a file, and the next one goes on there:

python -m tests.simulation --seeds 10000 --full --keep-going --results FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.revision import ENGINE, machine, revision

from .brokers import EXPECTED, Outcome, Step, run_script, run_seed, shrink

#: Seeds that one line of the file of results is about.
CHUNK = 100


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tell(outcome: Outcome) -> None:
    for line in outcome.violations[:8]:
        say(f"  {line}")


class Figures:
    """What became of the seeds so far; with a file, also of those that earlier runs did, of the same sources or of any.

    Of other sources only hundreds without a failure count.
    """

    def __init__(self, path: str | None, sources: str, steps: int, any_sources: bool) -> None:
        self._path = Path(path) if path else None
        self._about = {"commit": sources, "machine": machine(), "steps": steps}
        self.reached: Counter[str] = Counter()
        self.failed: list[int] = []
        self.seeds: set[int] = set()
        #: Seeds by the commit that they were run on.
        self.commits: Counter[str] = Counter()
        self.seconds = 0.0
        if self._path is not None and self._path.exists():
            for text in self._path.read_text().splitlines():
                line = json.loads(text)
                same = line["commit"] == sources
                if line["steps"] == steps and (same or (any_sources and not line["failed"])):
                    self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        if line["first"] in self.seeds:
            return
        self.commits[line["commit"]] += line["seeds"]
        self.reached.update(line["reached"])
        self.failed += line["failed"]
        self.seeds.update(range(line["first"], line["first"] + line["seeds"]))
        self.seconds += line["seconds"]

    def add(self, first: int, seeds: int, failed: list[int], seconds: float, reached: Counter[str]) -> None:
        line = {"first": first, "seeds": seeds, "failed": failed, "seconds": round(seconds, 1)}
        self._add({**self._about, **line, "reached": reached})
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({**self._about, **line, "reached": dict(sorted(reached.items()))}) + "\n")


def run_one(seed: int, arguments: argparse.Namespace) -> tuple[Outcome, bool]:
    """Run a seed; was it as it must be?"""
    if arguments.script:
        lines = Path(arguments.script).read_text().splitlines()
        outcome = run_script(seed, [Step(**json.loads(line)) for line in lines if line.strip()])
    else:
        outcome = run_seed(seed, arguments.steps)
    good = not outcome.violations
    if arguments.seeds == 1:
        say(f"seed {seed}: trace {outcome.trace}")
    if arguments.twice and run_script(seed, outcome.script).trace != outcome.trace:
        say(f"seed {seed}: NOT THE SAME when it is run again")
        good = False
    if outcome.violations:
        say(f"seed {seed}: FAILED")
        tell(outcome)
        if not arguments.no_shrink:
            small = shrink(outcome)
            say(f"  the same with {len(small.script)} steps:")
            tell(small)
            for step in small.script:
                say(f"  {step.line()}")
    return outcome, good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each (default: %(default)s)")
    parser.add_argument("--script", help="a file of steps to run instead of the seed's own, one JSON object a line")
    parser.add_argument(
        "--full", action="store_true", help="fail if a fault or state was reached fewer times than wanted"
    )
    parser.add_argument("--twice", action="store_true", help="run every seed twice: both must make the same calls")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for a shorter script of a failure")
    parser.add_argument(
        "--results", help="append figures to this file; seeds that are in it for the same sources are not run again"
    )
    parser.add_argument("--any-sources", action="store_true", help="seeds that other sources passed count, too")
    parser.add_argument("--minutes", type=float, default=90.0, help="stop after so long (default: %(default)s)")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    arguments = parser.parse_args()
    sources = revision(*ENGINE, "tests/simulation") if arguments.results else ""
    figures = Figures(arguments.results, sources, arguments.steps, arguments.any_sources)
    begin = time.monotonic()
    stopping = False
    for first in range(arguments.seed, arguments.seed + arguments.seeds, CHUNK):
        seeds = [seed for seed in range(first, min(first + CHUNK, arguments.seed + arguments.seeds))]
        if stopping or figures.seeds.issuperset(seeds):
            continue
        reached: Counter[str] = Counter()
        failed: list[int] = []
        done, chunk = 0, time.monotonic()
        for seed in seeds:
            stopping = time.monotonic() - begin > 60 * arguments.minutes
            if stopping:
                break
            outcome, good = run_one(seed, arguments)
            done += 1
            reached.update(outcome.reached)
            if not good:
                failed.append(seed)
                stopping = not arguments.keep_going
                if stopping:
                    break
        # A chunk that was cut off is run again from its beginning.
        if done == len(seeds) or not arguments.results:
            figures.add(first, done, failed, time.monotonic() - chunk, reached)
        elif failed:
            figures.failed += failed
    reached, failed = figures.reached, figures.failed
    missing = {name: reached[name] for name, least in EXPECTED.items() if reached[name] < least}
    if arguments.seeds > 1:
        for name in sorted({*EXPECTED, *reached}):
            mark = "MISSING" if name in missing else ""
            say(f"{reached[name]:10d}  {name}  {mark}".rstrip())
    done, seconds = len(figures.seeds), figures.seconds
    if len(figures.commits) > 1:
        say("seeds by commit: " + ", ".join(f"{commit} {count}" for commit, count in figures.commits.items()))
    say(f"{done} seeds, {len(failed)} failed {failed[:20]}, {seconds:.1f} s, {seconds / max(1, done):.3f} s a seed")
    return 1 if failed or (arguments.full and missing) else 0


if __name__ == "__main__":
    sys.exit(main())
