"""What holds for every test."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from garbage import collect_if_grown


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    yield
    collect_if_grown()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What clients sent and the log shows may be no text; reports that go from process to process must be."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report
