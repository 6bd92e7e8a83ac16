"""Run seeds of the simulation of brokers, print what was reached, and shrink what failed.

python -m tests.simulation --seed 7 --steps 200             one seed
python -m tests.simulation --seed 0 --seeds 1000 --full     many; a state that is reached too rarely fails the run
python -m tests.simulation --seed 7 --script steps.json     exactly these steps, as a failure printed them
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from .brokers import EXPECTED, Outcome, Step, run_script, run_seed, shrink


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tell(outcome: Outcome) -> None:
    for line in outcome.violations[:8]:
        say(f"  {line}")


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
    parser.add_argument("--results", help="append a line of JSON to this file at the end")
    parser.add_argument("--minutes", type=float, default=90.0, help="stop after so long (default: %(default)s)")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    arguments = parser.parse_args()
    reached: Counter[str] = Counter()
    failed: list[int] = []
    begin = time.monotonic()
    done = 0
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        if time.monotonic() - begin > 60 * arguments.minutes:
            break
        if arguments.script:
            lines = Path(arguments.script).read_text().splitlines()
            outcome = run_script(seed, [Step(**json.loads(line)) for line in lines if line.strip()])
        else:
            outcome = run_seed(seed, arguments.steps)
        done += 1
        reached.update(outcome.reached)
        if arguments.seeds == 1:
            say(f"seed {seed}: trace {outcome.trace}")
        if arguments.twice and run_script(seed, outcome.script).trace != outcome.trace:
            say(f"seed {seed}: NOT THE SAME when it is run again")
            failed.append(seed)
        if outcome.violations:
            failed.append(seed)
            say(f"seed {seed}: FAILED")
            tell(outcome)
            if not arguments.no_shrink:
                small = shrink(outcome)
                say(f"  the same with {len(small.script)} steps:")
                tell(small)
                for step in small.script:
                    say(f"  {step.line()}")
            if not arguments.keep_going:
                break
    seconds = time.monotonic() - begin
    missing = {name: reached[name] for name, least in EXPECTED.items() if reached[name] < least}
    if arguments.seeds > 1:
        for name in sorted({*EXPECTED, *reached}):
            mark = "MISSING" if name in missing else ""
            say(f"{reached[name]:10d}  {name}  {mark}".rstrip())
    say(f"{done} seeds, {len(failed)} failed {failed[:20]}, {seconds:.1f} s, {seconds / max(1, done):.3f} s a seed")
    if arguments.results:
        with Path(arguments.results).open("a") as file:
            line = {"first": arguments.seed, "seeds": done, "failed": failed, "seconds": round(seconds, 1)}
            file.write(json.dumps({**line, "reached": dict(reached)}) + "\n")
    return 1 if failed or (arguments.full and missing) else 0


if __name__ == "__main__":
    sys.exit(main())
