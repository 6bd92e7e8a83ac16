"""The notebook of the docs runs from top to bottom against a real broker, and its outputs are those of its cells."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .daemons import Node

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOK = REPOSITORY / "docs" / "notebooks" / "topics.ipynb"
#: What the notebook draws, and reads tables, with; and what runs it.
NEEDED = ("nbclient", "ipykernel", "matplotlib", "duckdb", "deltalake")


def outputs(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in document["cells"] for output in cell.get("outputs", ())]


def texts(document: dict[str, Any]) -> str:
    """All that its cells print or show as text."""
    found = []
    for output in outputs(document):
        text = output.get("text") or output.get("data", {}).get("text/plain") or ""
        found.append(text if isinstance(text, str) else "".join(text))
    return "\n".join(found)


def check(document: dict[str, Any]) -> None:
    """Are the outputs there, and the ones that its cells lead to?"""
    assert [output for output in outputs(document) if output["output_type"] == "error"] == []
    [drawn] = [output["data"]["image/png"] for output in outputs(document) if "image/png" in output.get("data", {})]
    assert len(drawn) > 10_000
    said = texts(document)
    assert "1,000 orders, 791 payments" in said
    assert "1,000 messages archived" in said
    # The sum over countries, as DuckDB tells it in the last table: country, orders, unpaid, owed.
    rows = [line.split() for line in said.splitlines() if line.split()[1:2] in (["de"], ["es"], ["fr"], ["it"])]
    counted = [row for row in rows if len(row) == 5]
    assert len(counted) == 4
    assert sum(int(row[2]) for row in counted) == 1000
    assert sum(int(float(row[3])) for row in counted) == 1000 - 791


def test_the_notebook_runs(spark_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'flintmq[spark,notebook]'")
    node = Node("flintmq", tmp_path / "broker")
    node.start()
    try:
        monkeypatch.setenv("FLINTMQ_NSQD", node.tcp)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        target = tmp_path / "run" / "topics.ipynb"
        target.parent.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "support.run_notebook", str(NOTEBOOK), str(target)],
            capture_output=True,
            text=True,
            cwd=REPOSITORY / "tests",
            timeout=550,
            check=False,
        )
    finally:
        node.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    check(json.loads(target.read_text()))


def test_the_notebook_in_the_docs_has_the_outputs_of_its_cells() -> None:
    document = json.loads(NOTEBOOK.read_text())
    check(document)
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), str(NOTEBOOK), "exec")
            assert cell["execution_count"], "".join(cell["source"])
    # Nothing of the machine that it ran on.
    assert "/tmp/" not in texts(document) and "/home/" not in texts(document)
