"""Every mended defect can be brought back: its patch applies, and the tests that find it exist."""

from __future__ import annotations

import ast
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from mutants import generic
from mutants.catalog import ROOT, Mutant, mutants
from mutants.plausible import PLAUSIBLE, Change

MUTANTS = [pytest.param(mutant, id=mutant.name) for mutant in mutants()]


@cache
def names_of(path: Path) -> set[str]:
    """Return the names of the functions and classes of a file. Most files are asked about for many mutants."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def test_there_are_mutants() -> None:
    assert len(MUTANTS) >= 16


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_patch_applies(mutant: Mutant) -> None:
    command = ["git", "apply", "--check", "-p1", str(mutant.path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_tests_that_kill_it_exist(mutant: Mutant) -> None:
    assert mutant.tests, f"{mutant.path.name} has no line '# killed by: path::test'"
    for name in mutant.tests:
        path, _, rest = name.partition("::")
        if not rest:
            assert (ROOT / path).is_file(), name
            continue
        assert set(rest.partition("[")[0].split("::")) <= names_of(ROOT / path), name


@pytest.mark.parametrize("change", [pytest.param(change, id=change.name) for change in PLAUSIBLE])
def test_the_plausible_change_can_be_made(change: Change) -> None:
    assert (ROOT / change.file).read_text().count(change.old) == 1
    assert change.old != change.new


def test_the_mutants_of_the_engine_are_known() -> None:
    names = [each.name for each in generic.candidates()]
    assert len(names) == len(set(names)) >= 46
    assert set(generic.ENGINE) <= set(names)
    assert generic.SURVIVORS.keys() <= set(names)


#: Of those that few seeds find: a missing sync, a wrong order, an off-by-one, a forgotten guard in the kernel.
FOUND_SOON = [
    "sync_leaves_out_the_folder",
    "snapshot_has_no_entry_yet_when_others_go",
    "range_keeps_the_last_of_a_hole",
    "lane_writes_all_to_one_place",
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FOUND_SOON)
def test_the_simulation_finds_a_defect_by_itself(name: str) -> None:
    candidate = next(each for each in generic.candidates() if each.name == name)
    assert "simulation seed" in generic.killer(candidate, seeds=8, seconds=280, machines=False)
