"""What holds for every test of the project.

It uses its own pytest plugin, also where flintmq runs from its source and is not installed.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

import flintmq.testing
from support.garbage import collect_if_grown

# How long one example takes says more about the machine than about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
#: The full form of a test takes as long as it takes.
EXHAUSTIVE_SECONDS = 7_200


def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores ctrl-C for what it runs in the background, and so would every program that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.pluginmanager.hasplugin("flintmq"):
        config.pluginmanager.register(flintmq.testing, "flintmq")


#: Parts of the names of files whose tests take long.
LONG = ("/crash/", "/simulation/", "power_loss", "error_at_any_call", "test_ctrl_c", "test_engine", "test_examples")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Where several processes share the tests, long ones at the end would keep one of them alone.
    items.sort(key=lambda item: not any(part in item.nodeid for part in LONG))
    if os.environ.get("FLINTMQ_EXHAUSTIVE") == "1":
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(EXHAUSTIVE_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A program that runs in this process leaves its handlers behind: the next test's signals are not for it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    yield
    # Brokers in this process set it, as /config/log_level asks them to.
    logging.getLogger("flintmq").setLevel(logging.NOTSET)
    collect_if_grown()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What clients sent and the log shows may be no text; reports that go from process to process must be."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report
