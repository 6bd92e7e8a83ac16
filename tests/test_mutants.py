"""Every mended defect can be brought back: its patch applies, and the tests that find it exist."""

from __future__ import annotations

import ast
import shutil
import subprocess

import pytest

from mutants.catalog import ROOT, Mutant, mutants

MUTANTS = [pytest.param(mutant, id=mutant.name) for mutant in mutants()]


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
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        assert set(rest.partition("[")[0].split("::")) <= found, name
