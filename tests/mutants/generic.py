"""Do tests that were written for no defect in particular find defects? Run them on mutants of the engine.

    python -m tests.mutants --generic [NAME …] [--results FILE]

The mutants are the defects of the engine that were mended (some of the patches of this folder) and those in
``plausible``. The tests are seeds of the simulation of brokers, then state machines, power losses and fuzz targets;
never a test that a patch names as written for it. A mutant that touches the kernel runs on its interpreted form, which
makes the same calls. With a file of results a mutant that is in it for the same sources is not run again.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .catalog import ROOT, mutants
from .plausible import PLAUSIBLE

__all__ = ["ENGINE", "SURVIVORS", "Candidate", "candidates", "run"]

#: The patches that bring back the defects of the engine which made the simulation necessary.
ENGINE = (
    "pinned_block_is_written_to",
    "node_id_of_old_messages",
    "error_in_a_connection_ends_the_turn",
    "no_descriptor_is_fatal",
    "unread_answers_pile_up",
    "ephemeral_topic_keeps_all",
    "one_topic_stops_housekeeping",
    "thread_writes_to_another_file",
    "sync_never_again",
    "damaged_journal_starts_quietly",
    "open_error_is_damage",
    "journal_roll_retries",
    "memory_batch_dropped_at_a_kill",
    "side_log_forgotten_at_the_end",
    "gap_after_a_deleted_file_is_gone",
    "redrive_ends_with_the_process",
)

#: Mutants that nothing of this finds, and why.
SURVIVORS: dict[str, str] = {
    "gap_after_a_deleted_file_is_gone": "takes a reader that keeps no position, at the end of a file before a gap",
}

#: Of the simulation: the first seed, and how many. No seed was chosen for what it finds.
FIRST_SEED, SEEDS = 50_000, 40
#: Tests that were written for no defect in particular.
MACHINES = (
    "tests/broker/storage/test_power_loss.py",
    "tests/broker/storage/test_error_at_any_call.py",
    "tests/broker/test_engine.py",
    "tests/broker/delivery/test_state_machine.py",
    "tests/broker/stage/test_staging_power_loss.py",
    "tests/broker/storage/test_keys_power_loss.py",
    "tests/broker/delivery/test_deadletters_machine.py",
    "tests/fuzz/test_fuzz.py",
)
_FAILED = re.compile(r"^seed (\d+): FAILED\n\s*(.*)$", re.MULTILINE)
_TEST = re.compile(r"^FAILED (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Candidate:
    """A defect. ``own`` are the tests that were written for it."""

    name: str
    apply: Callable[[Path], None]
    touches_kernel: bool
    own: tuple[str, ...] = ()


def candidates() -> list[Candidate]:
    found = [Candidate(change.name, change.apply, change.touches_kernel) for change in PLAUSIBLE]
    known = {mutant.name: mutant for mutant in mutants()}
    for name in ENGINE:
        mutant = known[name]

        def apply(root: Path, path: Path = mutant.path) -> None:
            subprocess.run(["git", "apply", "-p1", str(path)], cwd=root, check=True)

        found.append(Candidate(name, apply, mutant.touches_kernel, mutant.tests))
    return found


def copy_tree(target: Path) -> None:
    ignored = shutil.ignore_patterns(
        ".git", ".venv", ".peers", "__pycache__", ".hypothesis", "build", "*.egg-info", "docs", "*.c", "bench"
    )
    shutil.copytree(ROOT, target, ignore=ignored)


def killer(candidate: Candidate | None, seeds: int, seconds: float, *, machines: bool = True) -> str:
    """What finds it, empty if nothing does. None: the tree as it is, in which nothing must be found."""
    with tempfile.TemporaryDirectory(prefix="flintmq-mutant-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        own: tuple[str, ...] = ()
        if candidate is not None:
            candidate.apply(tree)
            own = candidate.own
            if candidate.touches_kernel:
                environment["FLINTMQ_PURE"] = "1"
        command = [sys.executable, "-W", "ignore", "-m", "tests.simulation", "--no-shrink"]
        command += ["--seed", str(FIRST_SEED), "--seeds", str(seeds)]
        done: subprocess.CompletedProcess[str] | None
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired as exc:
            # Slow is not found: only a seed that failed is.
            text = exc.stdout.decode() if isinstance(exc.stdout, bytes) else exc.stdout or ""
            if _seed(text):
                return _seed(text)
            done = None
        if done is not None and done.returncode:
            return _seed(done.stdout) or f"simulation: {(done.stderr.strip() or 'failed').splitlines()[-1][:160]}"
        for path in MACHINES if machines else ():
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", path]
            for name in own:
                command += ["--deselect", name]
            try:
                done = subprocess.run(
                    command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds
                )
            except subprocess.TimeoutExpired:
                continue
            if done.returncode == 1:
                failed = _TEST.search(done.stdout)
                return failed.group(1) if failed else path
    return ""


def _seed(text: str) -> str:
    found = _FAILED.search(text)
    return f"simulation seed {found.group(1)}: {found.group(2)[:160]}" if found else ""


def run(
    names: list[str],
    results: str | None,
    commit: str,
    seconds: float,
    say: Callable[[str], None],
    *,
    seeds: int = SEEDS,
) -> int:
    """Run the candidates on these sources, and report; 1 if fewer than 95 % die, or an unexplained one survives."""
    found = [each for each in candidates() if not names or each.name in names]
    unknown = set(names) - {each.name for each in found}
    if unknown:
        say(f"unknown mutants: {', '.join(sorted(unknown))}")
        return 2
    path = Path(results) if results else None
    known: dict[str, str] = {}
    if path is not None and path.exists():
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if line["commit"] == commit:
                known[line["mutant"]] = line["killer"]
    for each in found:
        if each.name not in known:
            begin = time.monotonic()
            known[each.name] = killer(each, seeds, seconds)
            if path is not None:
                line = {"commit": commit, "machine": f"{platform.system()} {platform.release()}", "mutant": each.name}
                line |= {"killer": known[each.name], "seconds": f"{time.monotonic() - begin:.0f}"}
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        by = known[each.name]
        say(f"killed    {each.name}  {by}" if by else f"SURVIVED  {each.name}  {SURVIVORS.get(each.name, '')}")
    alive = [each.name for each in found if not known[each.name]]
    say(f"{len(found) - len(alive)} of {len(found)} mutants killed by tests that were written for no defect")
    return int(bool(set(alive) - SURVIVORS.keys()) or 20 * len(alive) > len(found))
