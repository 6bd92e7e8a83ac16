"""Short forms of ``python -m tests.crash.load``; the full ones are run by hand."""

from __future__ import annotations

import resource
import shutil
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from .flow import Reading
from .gauge import raise_file_limit
from .load import SHORT, Outcome, _check_each, _Watch, main, run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, and the load generator uses epoll"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler"),
]


@pytest.fixture(autouse=True)
def file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


# Latencies are compared in it, so nothing else should run meanwhile.
@pytest.mark.parametrize(
    "what", [pytest.param("idle", marks=pytest.mark.alone), "churn", "topics", "lagging", "deferred"]
)
async def test_a_broker_keeps_its_promises_under_a_large_load(what: str, tmp_path: Path) -> None:
    plan = SHORT[what]
    if why := raise_file_limit(plan.descriptors):
        pytest.skip(why)
    outcome = await run(what, plan, tmp_path)
    assert outcome.failures == []
    assert outcome.figures


@pytest.mark.parametrize(
    ("reading", "found"),
    [
        (Reading("done", 2, messages=20, least=10, most=10), ""),
        (Reading("done", 2, messages=19, least=9, most=10), "19 messages were delivered"),
        (Reading("done", 2, messages=20, least=9, most=11), "a channel delivered 9 messages"),
        (Reading("done", 2, messages=20, least=10, most=10, redelivered=1), "1 were delivered again"),
        (Reading("done", 2, messages=20, least=10, most=10, disordered=3), "3 were out of order"),
    ],
)
def test_what_a_channel_gets_is_all_once_and_in_order(reading: Reading, found: str) -> None:
    outcome = Outcome("topics")
    _check_each(outcome, reading, connections=2, messages=10)
    assert outcome.passed == (not found)
    assert found in "".join(outcome.failures)


def test_growth_is_that_of_the_second_half() -> None:
    watch = object.__new__(_Watch)
    for memory, growth in (([1, 9, 9, 9], 0), ([1, 2, 3, 4], 2), ([1, 2], 0), ([0, 5, 50, 5], 0)):
        watch.memory = array("d", memory)
        assert watch.growth() == growth


def test_too_few_descriptors_are_said_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1_024))
    with pytest.raises(SystemExit, match=r"idle: 10,712 descriptors are needed, and the hard limit is 1,024"):
        main(["idle"])
