"""Every case is replayed and must be answered as the Go daemon answered when it was recorded.

Against ``flintmq``: our broker; where it differs on purpose, the case or NEWER_IDENTIFY_KEYS says how and why.
Against ``go``: the real daemon, when $FLINTMQ_PEERS/bin/nsqd or .peers/bin/nsqd is there; this shows that the
recording is true and does not depend on the run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.peers import GO_NSQD

from .cases import CASES, NEWER_IDENTIFY_KEYS
from .notation import Case, Transcript
from .play import Replay
from .record import load

RECORDED = load()

# Every error that a client can provoke without an auth server, a full disk or the right moment in a shutdown.
ERRORS = (
    r"E_BAD_PROTOCOL",
    r"E_INVALID invalid command .*",
    r"E_INVALID cannot (IDENTIFY|AUTH|SUB|RDY|FIN|REQ|TOUCH|CLS) in current state",
    r"E_INVALID cannot SUB with heartbeats disabled",
    r"E_INVALID (SUB|PUB|MPUB|DPUB) insufficient number of parameters",
    r"E_INVALID (FIN|REQ|TOUCH) insufficient number of params",
    r"E_INVALID AUTH invalid number of parameters",
    r"E_INVALID invalid message ID",
    r"E_INVALID RDY could not parse count .*",
    r"E_INVALID RDY count -?\d+ out of range 0-\d+",
    r"E_INVALID (REQ|DPUB) could not parse timeout .*",
    r"E_INVALID DPUB timeout \d+ out of range 0-\d+",
    r'E_BAD_TOPIC (SUB|PUB|DPUB|E_BAD_TOPIC MPUB) topic name ".*" is not valid',
    r'E_BAD_CHANNEL SUB channel name ".*" is not valid',
    r"E_BAD_BODY (IDENTIFY|AUTH|MPUB) failed to read body size",
    r"E_BAD_BODY (IDENTIFY|AUTH|MPUB) body too big \d+ > \d+",
    r"E_BAD_BODY (IDENTIFY|AUTH|MPUB) invalid body size -?\d+",
    r"E_BAD_BODY (IDENTIFY|AUTH) failed to read body",
    r"E_BAD_BODY IDENTIFY failed to decode JSON body",
    r"E_BAD_BODY IDENTIFY (heartbeat interval|output buffer timeout|output buffer size) \(-?\d+\) is invalid",
    r"E_BAD_BODY IDENTIFY (sample rate|msg timeout) \(-?\d+\) is invalid",
    r"E_BAD_BODY MPUB failed to read message count",
    r"E_BAD_BODY MPUB invalid message count -?\d+",
    r"E_BAD_MESSAGE (PUB|DPUB) failed to read message body size",
    r"E_BAD_MESSAGE (PUB|DPUB) invalid message body size -?\d+",
    r"E_BAD_MESSAGE (PUB|DPUB|MPUB) message too big \d+ > \d+",
    r"E_BAD_MESSAGE (PUB|DPUB|MPUB) failed to read message body",
    r"E_BAD_MESSAGE MPUB failed to read message\(\d+\) body size",
    r"E_BAD_MESSAGE MPUB invalid message\(\d+\) body size -?\d+",
    r"E_SUB_FAILED SUB failed consumers for <topic>:ch exceeds limit of \d+",
    r"E_(FIN|REQ|TOUCH)_FAILED \1 .{16} failed ID not in flight",
    r"E_(FIN|REQ|TOUCH)_FAILED \1 <id\d+> failed (ID not in flight|client does not own message)",
    r"E_IDENTIFY_FAILED cannot enable both deflate and snappy compression",
    r"E_IDENTIFY_FAILED IDENTIFY failed tls: first record does not look like a TLS handshake",
    r"E_INVALID cannot .* in current state \(TLS required\)",
    r"E_AUTH_DISABLED AUTH disabled",
    r"E_AUTH_FIRST AUTH required before (SUB|PUB|MPUB|DPUB)",
    r"E_AUTH_FAILED AUTH failed",
)


def _replayed(replay: Replay, request: pytest.FixtureRequest) -> Iterator[Replay]:
    """All selected cases are started at once, because most of their time is waiting; each test takes its own answer."""
    here = (item for item in request.session.items if item.path == request.path)
    tests = (item for item in here if isinstance(item, pytest.Function))
    asked = [test.callspec.params["case"] for test in tests if request.fixturename in test.fixturenames]
    selected = [case for case in asked if isinstance(case, Case)]
    try:
        replay.start(selected)
        yield replay
    finally:
        replay.stop()


@pytest.fixture(scope="module")
def flintmq(request: pytest.FixtureRequest) -> Iterator[Replay]:
    package = importlib.util.find_spec("flintmq")
    if package is None or package.origin is None:
        pytest.skip("flintmq is not there")
    for module in ("flintmq.cli", "flintmq.broker.daemon"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not there")
    # The child must run the package that is tested here, also when only our own sys.path leads to it.
    paths = [str(Path(package.origin).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    yield from _replayed(Replay([sys.executable, "-m", "flintmq", "nsqd"], environment), request)


@pytest.fixture(scope="module")
def go(request: pytest.FixtureRequest) -> Iterator[Replay]:
    nsqd = GO_NSQD
    if not nsqd.exists():
        pytest.skip("no Go nsqd in $FLINTMQ_PEERS/bin or .peers/bin")
    yield from _replayed(Replay([str(nsqd)]), request)


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _ours(case: Case) -> Transcript:
    """The recording, with the differences that are meant."""
    transcript = dict(RECORDED[case.name])
    if case.ours is not None:
        transcript.update((peer, list(lines)) for peer, lines in case.ours.lines.items())
    return {peer: [_with_newer_keys(line) for line in lines] for peer, lines in transcript.items()}


def _with_newer_keys(line: str) -> str:
    if line.startswith('response: {"max_rdy_count":'):
        return line.removesuffix("}") + NEWER_IDENTIFY_KEYS + "}"
    return line


@every_case
def test_our_broker_answers_as_recorded(flintmq: Replay, case: Case) -> None:
    answer = flintmq.answer(case)
    assert answer == _ours(case), flintmq.log(case)


@pytest.mark.interop
@every_case
def test_go_daemon_answers_as_recorded(go: Replay, case: Case) -> None:
    answer = go.answer(case)
    assert answer == RECORDED[case.name], go.log(case)


@every_case
def test_recording_is_what_the_case_says(case: Case) -> None:
    assert RECORDED[case.name] == case.expected()


def test_recording_has_every_case_once_and_nothing_else() -> None:
    names = Counter(case.name for case in CASES)
    assert [name for name, count in names.items() if count > 1] == []
    assert list(RECORDED) == list(names)


def _forms(pattern: str) -> list[str]:
    """The pattern once for each word of its choices: (PUB|DPUB) stands for two errors, and both must be seen."""
    found = re.search(r"(?<!\\)\(([^()]*\|[^()]*)\)", pattern)
    if found is None:
        return [pattern]
    return [
        form for word in found[1].split("|") for form in _forms(pattern.replace(found[0], word, 1).replace(r"\1", word))
    ]


def test_every_error_that_can_be_provoked_is_recorded_and_no_other() -> None:
    lines = {line for transcript in RECORDED.values() for lines in transcript.values() for line in lines}
    errors = {line.removeprefix("error: ") for line in lines if line.startswith("error: ")}
    forms = [form for pattern in ERRORS for form in _forms(pattern)]
    missing = [form for form in forms if not any(re.fullmatch(form, error, re.DOTALL) for error in errors)]
    unknown = [error for error in errors if not any(re.fullmatch(form, error, re.DOTALL) for form in forms)]
    assert (missing, unknown) == ([], [])


def test_a_difference_on_purpose_is_a_difference() -> None:
    for case in CASES:
        for peer, lines in case.ours.lines.items() if case.ours else ():
            assert list(lines) != RECORDED[case.name][peer], case.name
