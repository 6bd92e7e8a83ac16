"""Every target on its corpus and on mutations of it, driven by Hypothesis; ``python -m tests.fuzz`` looks further."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from .__main__ import HANG, corpus
from .mutate import mutations
from .seeds import CORPUS
from .targets import TARGETS, prepared

#: Inputs of a target in the suite: those of readers that need a broker or a disk take a hundred times as long.
INPUTS = {
    **dict.fromkeys(("frames", "messages", "deflate", "snappy", "columns", "offsets"), 20_000),
    **dict.fromkeys(("config", "go_metadata", "go_queue", "segment", "journal", "keys"), 500),
    **dict.fromkeys(("commands", "identify", "deflated", "snappied", "lane", "http"), 400),
    # A handshake each.
    **dict.fromkeys(("handshake", "tls"), 100),
}
BATCH = 100


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    with prepared():
        yield


def run(name: str, data: bytes) -> None:
    began = time.process_time()
    TARGETS[name](data)
    assert time.process_time() - began < HANG, f"{data[:200]!r} takes too long"


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_read_or_refused(name: str) -> None:
    inputs = corpus(name)
    assert inputs
    for data in [*inputs, b""]:
        run(name, data)


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_of_the_corpus_are_read_or_refused(name: str) -> None:
    inputs = corpus(name)

    @settings(
        max_examples=INPUTS[name] // BATCH,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @example(0)
    @given(st.integers(0, 1 << 32))
    def many(seed: int) -> None:
        for data in mutations(inputs, seed, BATCH):
            try:
                run(name, data)
            except Exception as exc:
                raise AssertionError(f"{name}: {data!r}") from exc

    many()


def test_every_target_has_a_small_corpus() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS) == set(INPUTS)
    sizes = [path.stat().st_size for path in Path(CORPUS).rglob("*") if path.is_file()]
    assert max(sizes) <= 16_384
    assert sum(sizes) < 500_000


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, again = (list(mutations([b"one", b"two"], 7, 50)) for _ in range(2))
    assert first == again
    assert len(set(first)) > 20
