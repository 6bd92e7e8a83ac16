"""Run the tests of every mutant on a copy of the tree that has its defect, and report the mutants that survive.

    python -m tests.mutants [NAME …] [--seconds N]
    python -m tests.mutants --by simulation [NAME …] [--seeds N]
    python -m tests.mutants --generic [NAME …] [--results FILE]

A mutant is killed when at least one of its tests fails. The exit status is 1 if a mutant survives. A patch that touches
the kernel has it rebuilt in the copy, which needs Cython.

With ``--by simulation`` seeds of the simulation that a patch names (``# found by:``) run in place of its tests, which
know nothing of the defect. The first seed that fails is printed, with what was violated. ``--generic`` asks the same of
the broker's simulation and state machines: see ``generic``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.mutants import generic
from tests.mutants.catalog import ROOT, Mutant, mutants
from tests.support.revision import ENGINE, revision


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def copy_tree(target: Path) -> None:
    """Copy what the tests need: sources, tests, and the files beside them."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".peers", "__pycache__", ".hypothesis", "build", "*.egg-info")
    shutil.copytree(ROOT, target, ignore=ignored)


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[tuple[Path, dict[str, str]]]:
    """Make a copy of the tree that has the defect, and the environment in which it is the one that runs."""
    with tempfile.TemporaryDirectory(prefix="flintmq-mutant-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        subprocess.run(["git", "apply", "-p1", str(mutant.path)], cwd=tree, check=True)
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        if mutant.touches_kernel and environment.get("FLINTMQ_PURE") != "1":
            # Without Cython nothing is built, and nothing is said: the old form must not stand in for the new one.
            for old in (tree / "src" / "flintmq" / "kernel").glob("*.so"):
                old.unlink()
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
            subprocess.run(build, cwd=tree, env={**environment, "CFLAGS": "-O0"}, check=True, capture_output=True)
            if not list((tree / "src" / "flintmq" / "kernel").glob("*.so")):
                raise SystemExit(f"{mutant.name}: the kernel could not be built; pip install Cython, and a C compiler")
        yield tree, environment


def survives(mutant: Mutant, seconds: float) -> tuple[bool, str]:
    """Return whether every test of the mutant passes, and pytest's last line."""
    with mutated(mutant) as (tree, environment):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False, f"killed by time: no end after {seconds:.0f} s"
        last = (done.stdout.strip() or done.stderr.strip()).rpartition("\n")[2]
        # 1: a test failed. Anything else than 0 and 1 says that the tests could not be run at all.
        if done.returncode not in (0, 1):
            raise SystemExit(f"{mutant.name}: pytest ended with status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.returncode == 0, last


def survives_simulation(mutant: Mutant, module: str, seeds: int, seconds: float) -> tuple[bool, str]:
    """Return whether so many seeds of a simulation pass, and the first that does not with its first violation."""
    with mutated(mutant) as (tree, environment):
        command = [sys.executable, "-m", module, "--seeds", str(seeds)]
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return True, f"no seed has failed after {seconds:.0f} s"
        lines = [line.strip() for line in done.stdout.splitlines()]
        failed = next((number for number, line in enumerate(lines) if line.startswith("seed ")), None)
        if done.returncode == 0 and failed is None:
            return True, lines[-1]
        if done.returncode != 1 or failed is None:
            raise SystemExit(f"{mutant.name}: {module} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return False, f"{lines[failed].partition(':')[0]}: {' '.join(lines[failed + 1 : failed + 2])}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Report mutants that no test finds.")
    parser.add_argument("names", nargs="*", help="mutants to run, without .patch; all if none is named")
    parser.add_argument("--by", choices=["tests", "simulation"], default="tests", help="what is to find them")
    parser.add_argument("--seeds", type=int, default=400, help="seeds of a simulation (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit for one mutant (default: %(default)s)")
    parser.add_argument("--generic", action="store_true", help="run tests that were written for no defect, see generic")
    parser.add_argument("--results", help="with --generic: append figures to this file, and go on where it ends")
    arguments = parser.parse_args()
    if arguments.generic:
        commit = revision(*ENGINE, "tests/simulation", "tests/mutants", *generic.MACHINES)
        return generic.run(arguments.names, arguments.results, commit, arguments.seconds, say)
    chosen = [mutant for mutant in mutants() if not arguments.names or mutant.name in arguments.names]
    unknown = set(arguments.names) - {mutant.name for mutant in chosen}
    if unknown:
        parser.error(f"unknown mutants: {', '.join(sorted(unknown))}")
    if arguments.by == "simulation":
        chosen = [mutant for mutant in chosen if mutant.simulations]
    survivors = []
    for mutant in chosen:
        begin = time.monotonic()
        if arguments.by == "simulation":
            alive, last = survives_simulation(mutant, mutant.simulations[0], arguments.seeds, arguments.seconds)
        else:
            alive, last = survives(mutant, arguments.seconds)
        took = time.monotonic() - begin
        say(f"{'SURVIVED' if alive else 'killed'}  {mutant.name}  {took:.0f} s  {last}")
        if alive:
            survivors.append(mutant.name)
    say(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
