"""Every example of the pages on Spark is run, or says why not; tests/test_examples.py runs the other pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.examples import can_run
from support.spark_examples import run_pages
from test_examples import PAGES, SPARK

from . import object_store


@pytest.mark.slow
@pytest.mark.skipif(not can_run(), reason="needs curl, and unshare with a network of its own")
def test_the_examples_on_spark_run(spark_environment: None, tmp_path: Path) -> None:
    object_store.program()
    paths = [path for path in PAGES if path.stem in SPARK - {"decoding"}]
    # All other examples of the README are marked as run by other tests.
    paths.append(PAGES[0])
    assert run_pages(paths, tmp_path) == {path.stem: [] for path in paths}


@pytest.mark.slow
@pytest.mark.skipif(not can_run(), reason="needs curl, and unshare with a network of its own")
def test_the_examples_on_decoding_run(spark_environment: None, tmp_path: Path) -> None:
    pytest.importorskip("fastavro", reason="fastavro is not installed: pip install 'flintmq[decode]'")
    [path] = [path for path in PAGES if path.stem == "decoding"]
    assert run_pages([path], tmp_path) == {path.stem: []}
