"""Every HTTP case is replayed and must be answered as the Go daemon answered when it was recorded.

Against ``flintmq``: our broker; where it differs on purpose, the case says how and why. Against ``go``: the real
daemon, when $FLINTMQ_PEERS/bin/nsqd or .peers/bin/nsqd is there.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import flintmq as package
from support.peers import GO_NSQD

from .http_cases import HTTP_CASES, HttpCase
from .http_play import Answers, HttpReplay
from .record_http import load

RECORDED = load()


@pytest.fixture(scope="module")
def flintmq() -> Iterator[HttpReplay]:
    # The child must run the package that is tested here, also when only our own sys.path leads to it.
    paths = [str(Path(package.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    replay = HttpReplay([sys.executable, "-m", "flintmq", "nsqd"], environment)
    yield replay
    replay.stop()


@pytest.fixture(scope="module")
def go() -> Iterator[HttpReplay]:
    nsqd = GO_NSQD
    if not nsqd.exists():
        pytest.skip("no Go nsqd in $FLINTMQ_PEERS/bin or .peers/bin")
    replay = HttpReplay([str(nsqd)])
    yield replay
    replay.stop()


every_case = pytest.mark.parametrize("case", HTTP_CASES, ids=lambda case: case.name)


def _ours(case: HttpCase) -> Answers:
    """The recording, with the differences that are meant."""
    differences = case.ours.answers if case.ours is not None else {}
    return [list(differences.get(number, answer)) for number, answer in enumerate(RECORDED[case.name])]


@every_case
def test_our_broker_answers_as_recorded(flintmq: HttpReplay, case: HttpCase) -> None:
    answers = flintmq.answer(case)
    assert answers == _ours(case), flintmq.log(case)


@pytest.mark.interop
@every_case
def test_go_daemon_answers_as_recorded(go: HttpReplay, case: HttpCase) -> None:
    answers = go.answer(case)
    assert answers == RECORDED[case.name], go.log(case)


def test_recording_has_every_case_once_and_nothing_else() -> None:
    names = Counter(case.name for case in HTTP_CASES)
    assert [name for name, count in names.items() if count > 1] == []
    assert list(RECORDED) == list(names)


def test_a_difference_on_purpose_is_a_difference() -> None:
    for case in HTTP_CASES:
        for number, lines in case.ours.answers.items() if case.ours else ():
            assert list(lines) != RECORDED[case.name][number], case.name
