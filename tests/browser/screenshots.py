"""Pictures of every page, light and dark, for the docs: ``python -m tests.browser.screenshots`` from the repository.

The cluster is real and runs in this process; the hour before its start is made up, so that the charts have something
to show. It leads to the real numbers.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from playwright.async_api import async_playwright  # noqa: E402

from browser.cluster import Cluster, order  # noqa: E402
from flintmq.admin.history import FIELDS, History  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150_000
CHROMIUM = os.environ.get("FLINTMQ_CHROMIUM") or shutil.which("chromium") or ""
PAGES = {
    "overview": "/",
    "topics": "/topics",
    "topic": "/topics/orders",
    "channel": "/topics/orders/archive",
    "settings": "/topics/orders?tab=settings",
    "seek": "/topics/orders/archive?tab=seek",
    "messages": "/messages?topic=orders&channel=billing",
    "tail": "/messages?topic=orders&state=tail",
    "clients": "/clients",
    "nodes": "/nodes",
    "node": "/nodes/{node}",
    "lookup": "/lookup",
    "dead": "/dead",
    "pipelines": "/pipelines",
    "actions": "/actions",
    "counter": "/counter",
}


def make_up_an_hour(cluster: Cluster) -> None:
    """Fill the history of everything that is there with an hour that leads to the present numbers."""
    state, now = cluster.admin.state, time.time()
    before = state.history
    # A history takes nothing that is older than what it has: begin with an empty one.
    history = state.history = History(64 << 20)
    things = [("cluster", "", 1.0), *(("node", name, 0.4) for name in state.nodes)]
    things += [("topic", name, 0.2 + 0.2 * i) for i, name in enumerate(sorted(state.topics))]
    things += [("channel", f"{topic}/{channel}", 0.5) for topic, channel in sorted(state.channels)]
    things += [("reader", name, 0.5) for name in sorted(state.readers)]
    things += [("query", id, 0.5) for id in state.queries]
    for kind, name, size in things:
        phase = random.uniform(0, 6)
        usual = {
            "published": 80 * size,
            "handed": 80 * size,
            "delivered": 80 * size,
            "depth": 900 * size,
            "in_flight": 20 * size,
            "deferred": 10.0,
            "requeued": size,
            "timed_out": 0.0,
            # As much as there is: what the nodes say follows, and a page tells when a shrinking disk is full.
            "disk_free": float(shutil.disk_usage(tempfile.gettempdir()).free),
            "lag": 900 * size,
            "throughput": 80 * size,
            "rows_per_second": 80 * size,
            "batch_seconds": 0.8,
        }
        ends = {field: before.last(kind, name, field, now) or 0.0 for field in FIELDS[kind]}
        for second in range(-3600, 0, 2):
            # The nearer to now, the more of the present.
            past = min(1.0, -second / 900)
            wave = 0.35 * math.sin(second / 500 + phase) + 0.06 * math.sin(second / 37 + phase)
            values = []
            for field in FIELDS[kind]:
                level = ends[field] + past * (usual[field] - ends[field])
                swing = 0.002 * wave if field == "disk_free" else wave + random.uniform(-0.03, 0.03)
                values.append(max(0.0, level * (1 + past * swing)))
            history.add(kind, name, now + second, values)


async def prepare(cluster: Cluster) -> None:
    await cluster.fill()
    await cluster.admin.state.sample()
    await cluster.consume("orders", "archive", 3)
    cluster.keep_publishing("orders", 80, order)
    async with cluster.client() as client:
        await client.pause_topic("audit.trail")
    await cluster.admin.state.sample()


async def take(page: Any, cluster: Cluster, name: str, path: str, file: Path) -> None:
    await page.goto(cluster.url + path.format(node=cluster.node(0)))
    await page.wait_for_selector("main h1, main h2", state="attached")
    await page.wait_for_timeout(2600)
    if name in ("messages", "tail"):
        await page.locator(".message-list li > button").nth(2).click()
        await page.evaluate("scrollTo(0, 0)")
        await page.wait_for_timeout(300)
    if name == "seek":
        await page.locator(".timeline svg").click(position={"x": 300, "y": 20})
        await page.wait_for_selector(".counted")
    await page.mouse.move(640, 4)
    await page.screenshot(path=file)
    shrink(file)


def shrink(file: Path) -> None:
    from PIL import Image

    # A palette that keeps rare colours, such as that of a dot.
    picture = Image.open(file).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE).save(file, optimize=True)
    size = file.stat().st_size
    assert size < MOST_BYTES, f"{file} has {size} bytes"
    print(f"{file.relative_to(ROOT)}: {size:,} bytes")  # noqa: T201


async def main() -> None:
    random.seed(3)
    wanted = sys.argv[1:] or [*PAGES, "login", "phone"]
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        async with Cluster(Path(folder), interval=2000) as cluster, async_playwright() as playwright:
            await prepare(cluster)
            # Until the burst of the beginning is over, and channels have two rows, of 10 s each.
            await asyncio.sleep(25)
            make_up_an_hour(cluster)
            await cluster.make_dead(9, 1)
            async with cluster.admin_client() as ask:
                for action, channel in (("pause_channel", "billing"), ("unpause_channel", "billing")):
                    await ask("/actions", {"action": action, "topic": "orders", "channel": channel})
                await ask("/publish", {"topic": "audit.trail", "body": "login eve"})
                await ask("/actions", {"action": "create_channel", "topic": "invoices", "channel": "mail"})
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for theme in ("light", "dark"):
                size = {"width": 1280, "height": 800}
                context = await browser.new_context(viewport=size, color_scheme=theme, timezone_id="UTC")
                page = await context.new_page()
                for name, path in PAGES.items():
                    if name in wanted:
                        await take(page, cluster, name, path, IMAGES / f"nsqadmin-{name}-{theme}.png")
                if "login" in wanted:
                    await page.goto(cluster.url + "/counter")
                    await page.route("**/api/v2/session", _as_a_stranger)
                    await take(page, cluster, "login", "/login", IMAGES / f"nsqadmin-login-{theme}.png")
                if "phone" in wanted:
                    await page.unroute("**/api/v2/session")
                    await page.set_viewport_size({"width": 390, "height": 844})
                    await take(page, cluster, "phone", "/", IMAGES / f"nsqadmin-phone-{theme}.png")
                await context.close()
            await browser.close()


async def _as_a_stranger(route: Any) -> None:
    """What the daemon says to somebody who has not logged in, where there are users."""
    answer = await route.fetch()
    about = await answer.json()
    await route.fulfill(response=answer, json={**about, "login": "password", "role": None, "user": None})


if __name__ == "__main__":
    asyncio.run(main())
