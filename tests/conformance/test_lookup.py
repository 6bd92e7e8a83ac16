"""Every case for nsqlookupd is replayed and must be answered as the Go daemon answered when it was recorded.

Against ``flintmq``: our daemon; where it differs on purpose, the case says how and why. Against ``go``: the real one,
when $FLINTMQ_PEERS/bin/nsqlookupd or .peers/bin/nsqlookupd is there.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import flintmq
from support.peers import PEERS

from .lookup_cases import CASES
from .lookup_notation import Case
from .lookup_play import Replay
from .lookup_record import load
from .notation import Transcript

RECORDED = load()


def _replayed(replay: Replay, request: pytest.FixtureRequest) -> Iterator[Replay]:
    """All selected cases are started at once; each test takes its own answer."""
    here = (item for item in request.session.items if item.path == request.path)
    tests = (item for item in here if isinstance(item, pytest.Function))
    asked = [test.callspec.params["case"] for test in tests if request.fixturename in test.fixturenames]
    try:
        # A case is asked for once per event loop.
        replay.start({case.name: case for case in asked if isinstance(case, Case)}.values())
        yield replay
    finally:
        replay.stop()


@pytest.fixture(scope="module", params=["asyncio", "auto"])
def our_lookupd(request: pytest.FixtureRequest) -> Iterator[Replay]:
    # The child must run the package that is tested here, also when only our own sys.path leads to it.
    paths = [str(Path(flintmq.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "flintmq", "nsqlookupd", f"--event-loop={request.param}"]
    yield from _replayed(Replay(command, environment, newer=True), request)


@pytest.fixture(scope="module")
def go_lookupd(request: pytest.FixtureRequest) -> Iterator[Replay]:
    nsqlookupd = PEERS / "bin" / "nsqlookupd"
    if not nsqlookupd.exists():
        pytest.skip("no Go nsqlookupd in $FLINTMQ_PEERS/bin or .peers/bin")
    yield from _replayed(Replay([str(nsqlookupd)], newer=False), request)


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _ours(case: Case) -> Transcript:
    """The recording, with the differences that are meant."""
    transcript = dict(RECORDED[case.name])
    if case.ours is not None:
        transcript.update((peer, list(lines)) for peer, lines in case.ours.lines.items())
    return transcript


@every_case
def test_our_nsqlookupd_answers_as_recorded(our_lookupd: Replay, case: Case) -> None:
    answer = our_lookupd.answer(case)
    assert answer == _ours(case), our_lookupd.log()


@pytest.mark.interop
@every_case
def test_go_nsqlookupd_answers_as_recorded(go_lookupd: Replay, case: Case) -> None:
    answer = go_lookupd.answer(case)
    assert answer == RECORDED[case.name], go_lookupd.log()


@every_case
def test_recording_of_nsqlookupd_is_what_the_case_says(case: Case) -> None:
    assert RECORDED[case.name] == case.expected()


def test_recording_of_nsqlookupd_has_every_case_once_and_nothing_else() -> None:
    names = Counter(case.name for case in CASES)
    assert [name for name, count in names.items() if count > 1] == []
    assert list(RECORDED) == list(names)


def test_a_difference_of_our_nsqlookupd_on_purpose_is_a_difference() -> None:
    for case in CASES:
        for peer, lines in case.ours.lines.items() if case.ours else ():
            assert list(lines) != RECORDED[case.name][peer], case.name
