"""Every example of README and docs is run, or says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.examples import BLOCK, REASONS, can_run, examples, run_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: tests/spark/test_spark_pages.py runs these.
SPARK = {"decoding", "pipelines", "spark", "spark-clusters", "spark-recipes", "spark-tutorial"}
#: The beginning of a block that is commands.
COMMANDS = re.compile(r"\s*(?:\$ |\./|(?:flintmq|nsq\w*|to_nsq|curl|pip|python3?|docker|kubectl|systemctl) )")
#: Of all examples, how many may not be run.
MOST_NOT_RUN = 0.10


def test_every_reason_is_one_of_the_list_and_every_test_exists() -> None:
    for path in PAGES:
        for example in examples(path.read_text()):
            reason, test = example.marked("not run:"), example.marked("run by:")
            assert reason is None or reason in REASONS, f"{path.name}:{example.line}: {reason}"
            assert test is None or (ROOT / test).is_file(), f"{path.name}:{example.line}: {test}"


def test_few_examples_are_not_run() -> None:
    every = [example for path in PAGES for example in examples(path.read_text())]
    not_run = [example for example in every if example.marked("not run:") is not None]
    assert len(every) > 100
    assert len(not_run) <= MOST_NOT_RUN * len(every), f"{len(not_run)} of {len(every)}"


def test_commands_are_in_blocks_that_are_examples() -> None:
    """A block without a language is not run, and is not counted."""
    for path in PAGES:
        for block in BLOCK.finditer(path.read_text()):
            assert block["info"].strip() or not COMMANDS.match(block["text"]), f"{path.name}: {block['text']}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not can_run(), reason="needs curl, and unshare with a network of its own")
@pytest.mark.parametrize("path", [path for path in PAGES if path.stem not in SPARK], ids=lambda path: path.stem)
def test_the_examples_run(path: Path, tmp_path: Path) -> None:
    assert run_page(path, tmp_path, platform="<!-- platform: none -->" not in path.read_text()) == []
