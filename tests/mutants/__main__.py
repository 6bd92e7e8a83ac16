"""Run the tests of every mutant on a copy of the tree that has its defect, and report the mutants that survive.

    python -m tests.mutants [NAME …] [--seconds N]

A mutant is killed when at least one of its tests fails. The exit status is 1 if a mutant survives. A patch that touches
the kernel has it rebuilt in the copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.catalog import ROOT, Mutant, mutants


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def copy_tree(target: Path) -> None:
    """Copy what the tests need: sources, tests, and the files beside them."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".peers", "__pycache__", ".hypothesis", "build", "*.egg-info")
    shutil.copytree(ROOT, target, ignore=ignored)


def survives(mutant: Mutant, seconds: float) -> tuple[bool, str]:
    """Return whether every test of the mutant passes, and pytest's last line."""
    with tempfile.TemporaryDirectory(prefix="flintmq-mutant-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        subprocess.run(["git", "apply", "-p1", str(mutant.path)], cwd=tree, check=True)
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        if mutant.touches_kernel and environment.get("FLINTMQ_PURE") != "1":
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
            subprocess.run(build, cwd=tree, env={**environment, "CFLAGS": "-O0"}, check=True, capture_output=True)
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Report mutants that no test finds.")
    parser.add_argument("names", nargs="*", help="mutants to run, without .patch; all if none is named")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit for one mutant (default: %(default)s)")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in mutants() if not arguments.names or mutant.name in arguments.names]
    unknown = set(arguments.names) - {mutant.name for mutant in chosen}
    if unknown:
        parser.error(f"unknown mutants: {', '.join(sorted(unknown))}")
    survivors = []
    for mutant in chosen:
        begin = time.monotonic()
        alive, last = survives(mutant, arguments.seconds)
        took = time.monotonic() - begin
        say(f"{'SURVIVED' if alive else 'killed'}  {mutant.name}  {took:.0f} s  {last}")
        if alive:
            survivors.append(mutant.name)
    say(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
