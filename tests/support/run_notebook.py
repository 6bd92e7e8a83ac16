"""Run a notebook as Jupyter does, and write it with its outputs: ``python -m support.run_notebook NOTEBOOK TARGET``.

It runs in the folder of TARGET. Times of execution and what is written to standard error are left out, so
that a notebook in the docs can be written again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

#: Seconds for one cell: Spark starts in one of them.
PATIENCE = 600


def main(notebook: str, target: str) -> None:
    document = nbformat.read(notebook, as_version=4)
    folder = Path(target).absolute().parent
    client = NotebookClient(
        document,
        timeout=PATIENCE,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        client.execute()
    finally:
        # Also when a cell fails: what it says is in its outputs.
        for number, cell in enumerate(document.cells):
            cell.id = f"cell-{number}"
            # Java says there what it likes to.
            if "outputs" in cell:
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        document.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        nbformat.write(document, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
