"""``python -m tests.fuzz TARGET… [--seconds 600]``: look for bytes that a reader cannot take.

With atheris (from PyPI, where the Python is one that it supports) inputs are guided by coverage, of Python's code and
of the kernel where that was built for it; without it, they are mutations of the corpus. An input that fails is kept in
``tests/fuzz/corpus/TARGET`` as ``crash-…``; it stays there with its fix.

Each run appends a line to ``--results FILE``: target, engine, form of the kernel, inputs, seconds, machine, commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

if atheris is not None and __name__ == "__main__" and "mutation" not in " ".join(sys.argv):
    # Coverage is counted in what is imported here for the first time.
    with atheris.instrument_imports(include=["flintmq"], enable_loader_override=False):
        from . import targets
else:
    from . import targets

from . import seeds
from .mutate import mutations

TARGETS = targets.TARGETS

#: CPU seconds that one input may take.
HANG = 1.0


class Counter:
    """A target that counts its inputs, keeps those that fail, and calls a slow one a failure."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._target = TARGETS[name]
        self.inputs = 0
        self.slowest = 0.0
        #: When it is time to end, and how: libFuzzer leaves the process without a word.
        self.until = float("inf")
        self.end: Callable[[], None] = lambda: None

    def __call__(self, data: bytes) -> None:
        self.inputs += 1
        if time.monotonic() > self.until:
            self.end()
        began = time.process_time()
        try:
            self._target(data)
        except BaseException:
            path = seeds.CORPUS / self.name / f"crash-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            sys.stderr.write(f"\n{self.name}: the input is kept in {path}\n")
            raise
        took = time.process_time() - began
        self.slowest = max(self.slowest, took)
        if took > HANG:
            raise AssertionError(f"{self.name}: an input took {took:.1f} s: {data[:200]!r}")


def corpus(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((seeds.CORPUS / name).iterdir())]


def by_mutation(target: Counter, seconds: float) -> None:
    inputs = corpus(target.name)
    end = time.monotonic() + seconds
    seed = time.time_ns()
    for data in inputs:
        target(data)
    while time.monotonic() < end:
        seed += 1
        for data in mutations(inputs, seed, 100):
            target(data)


def by_coverage(target: Counter, seconds: float) -> None:
    found = Path(f"/tmp/flintmq-fuzz-{os.getpid()}-{target.name}")
    found.mkdir(exist_ok=True)
    target.until = time.monotonic() + seconds
    arguments = [
        sys.argv[0],
        f"-max_total_time={int(seconds) + 60}",
        "-max_len=16384",
        "-rss_limit_mb=2048",
        "-timeout=30",
    ]
    arguments += ["-print_final_stats=0", "-verbosity=0", str(found), str(seeds.CORPUS / target.name)]
    atheris.Setup(arguments, target, internal_libfuzzer=True)
    atheris.Fuzz()


def engine() -> tuple[str, Callable[[Counter, float], None]]:
    return ("mutation", by_mutation) if atheris is None else ("atheris", by_coverage)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Look for bytes that a reader cannot take."
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all if none is given")
    parser.add_argument("--seconds", type=float, default=600.0, help="per target (default %(default)g)")
    parser.add_argument("--engine", choices=("atheris", "mutation"), help="atheris where it is installed")
    parser.add_argument("--results", metavar="FILE", type=Path, help="append a line of JSON per target")
    arguments = parser.parse_args()
    for name in arguments.targets:
        if name not in TARGETS:
            parser.error(f"there is no target {name}; there are {', '.join(TARGETS)}")
    names = arguments.targets or list(TARGETS)
    if len(names) > 1:
        # A process each: atheris ends its own, and a crash costs one target.
        status = 0
        for name in names:
            command = [sys.executable, "-m", "tests.fuzz", name, *_flags(arguments)]
            status |= subprocess.run(command, check=False).returncode != 0
        return status
    chosen, run = engine()
    if arguments.engine == "mutation":
        chosen, run = "mutation", by_mutation
    elif arguments.engine == "atheris" and chosen != "atheris":
        parser.error("atheris is not installed: pip install atheris")
    target = Counter(names[0])
    began = time.monotonic()

    def report() -> None:
        from flintmq import kernel

        line = {
            "target": target.name,
            "engine": chosen,
            "kernel": "compiled" if kernel.COMPILED else "pure",
            "inputs": target.inputs,
            "seconds": round(time.monotonic() - began, 1),
            "slowest_seconds": round(target.slowest, 3),
            "resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "machine": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs",
            "commit": subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
            ).stdout.strip(),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(json.dumps(line) + "\n")

    if chosen == "atheris":

        def end() -> None:
            report()
            os._exit(0)

        target.end = end
    with targets.prepared():
        try:
            run(target, arguments.seconds)
        finally:
            report()
    return 0


def _flags(arguments: argparse.Namespace) -> list[str]:
    flags = [f"--seconds={arguments.seconds}"]
    if arguments.engine:
        flags.append(f"--engine={arguments.engine}")
    if arguments.results:
        flags.append(f"--results={arguments.results}")
    return flags


if __name__ == "__main__":
    sys.exit(main())
