"""One Chromium for all tests of the pages, and one cluster for those that break nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.peers import PEERS

from .cluster import Cluster, order
from .views import View

CHROMIUM = os.environ.get("FLINTMQ_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or ""
AXE = PEERS / "axe" / "node_modules" / "axe-core" / "axe.min.js"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Any]:
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed: pip install 'flintmq[test]'")
    if not CHROMIUM:
        pytest.skip("no Chromium: install the package chromium, or name one in $FLINTMQ_CHROMIUM")
    async with api.async_playwright() as playwright:
        # As root there is no sandbox; a small /dev/shm must not end a tab.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        await browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script that finds what people with a screen reader, or weak eyes, cannot use."""
    if not AXE.is_file():
        pytest.skip("no axe-core in $FLINTMQ_PEERS/axe or .peers/axe: run scripts/peers")
    return AXE.read_text(encoding="utf-8")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        await cluster.fill()
        await cluster.consume("orders", "archive", 2)
        cluster.keep_publishing("orders", 50, order)
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def view(browser: Any, cluster: Cluster) -> AsyncIterator[View]:
    """A new window on the cluster. At its end there was no error, and no request to another origin."""
    async with View.open(browser, cluster.url) as view:
        yield view


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
