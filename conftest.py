"""The project's own tests use its pytest plugin; also where flintmq runs from its source and is not installed."""

from __future__ import annotations

import pytest

import flintmq.testing


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("flintmq"):
        config.pluginmanager.register(flintmq.testing, "flintmq")
