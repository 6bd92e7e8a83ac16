"""The page of `flintmq pipeline metrics --plot FILE.html`, from the file and without a network."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'flintmq[spark]'")

from flintmq.spark.pipelines.metrics import Board, plot

pytestmark = pytest.mark.asyncio(loop_scope="session")

WINDOW = 60
FIRST = datetime(2026, 11, 16, 12, tzinfo=UTC)
#: It would end the script, were it not escaped.
ODD = "</script><b>odd"


def add(board: Board, topic: str, minute: int, messages: int, top: tuple[tuple[str, int], ...] = ()) -> None:
    start = FIRST + timedelta(minutes=minute)
    row = {"topic": topic, "start": start, "end": start + timedelta(seconds=WINDOW), "messages": messages}
    row |= {"bytes": messages * 100, "rate": messages / WINDOW, "top": [{"item": v, "count": n} for v, n in top]}
    row |= {f"size_p{share}": 100 + share for share in (50, 90, 99)}
    row |= {f"delay_ms_p{share}": share * 100.0 for share in (50, 90, 99)}
    board.rows[topic, start] = row


def board(*, ended: bool = False) -> Board:
    """Ten windows of two topics, read 15 s after the tenth began; `clicks` has nothing in three of them."""
    read = (FIRST + timedelta(minutes=9, seconds=15)).timestamp()
    made = Board(window=WINDOW, every=5.0, path="$.country", ended=ended, read=read)
    for minute in range(10):
        add(made, "orders", minute, 600 if minute < 9 else 150, (("de", 300), (ODD, 100)))
        if not 3 <= minute <= 5:
            add(made, "clicks", minute, 120 if minute < 9 else 30)
    return made


class Page:
    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
        self.url = path.as_uri()
        self.trouble: list[str] = []
        page.on("pageerror", lambda error: self.trouble.append(str(error)))
        page.on("console", lambda line: self.trouble.append(line.text) if line.type == "error" else None)
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(("file:", "data:")) else self.trouble.append(asked.url),
        )

    async def open(self) -> None:
        await self.page.goto(self.url)

    async def text(self, where: str) -> str:
        return re.sub(r"\s+", " ", await self.page.locator(where).inner_text())

    async def count(self, where: str) -> int:
        found: int = await self.page.locator(where).count()
        return found


@pytest_asyncio.fixture(loop_scope="session", params=["light", "dark"])
async def page(request: pytest.FixtureRequest, browser: Any, tmp_path: Path) -> AsyncIterator[Page]:
    plot(board(ended=True), tmp_path / "metrics.html")
    context = await browser.new_context(
        color_scheme=request.param, timezone_id="UTC", viewport={"width": 1000, "height": 900}
    )
    page = Page(await context.new_page(), tmp_path / "metrics.html")
    await page.open()
    yield page
    await context.close()
    assert page.trouble == []


async def test_an_open_window_is_drawn_as_open_with_its_rate_so_far(page: Page) -> None:
    chart = "[data-chart=rate] g[data-topic=orders]"
    assert await page.count(f"{chart} .ring") == 1
    assert await page.count(f"{chart} .open") == 1
    assert await page.count("[data-chart=rate] .filling") == 1
    # Nine whole windows with 10 messages a second, and 150 in 15 seconds: one height.
    heights = await page.page.eval_on_selector_all(f"{chart} circle", "all => all.map((one) => one.getAttribute('cy'))")
    assert len(heights) == 10
    assert len(set(heights)) == 1


async def test_windows_without_messages_are_a_rate_of_zero_and_a_gap_in_the_delay(page: Page) -> None:
    rate = await page.page.get_attribute("[data-chart=rate] g[data-topic=clicks] .line", "d")
    delay = await page.page.get_attribute("[data-chart=delay] g[data-topic=clicks] .line", "d")
    assert (rate.count("M"), rate.count("L")) == (1, 8)
    assert (delay.count("M"), delay.count("L")) == (2, 4)


async def test_delay_says_that_it_includes_batching_and_names_stand_at_the_lines(page: Page) -> None:
    assert "includes Spark's batching: a batch starts every 5 s" in await page.text("[data-chart=delay] p")
    assert await page.page.locator("[data-chart=delay] .name").all_text_contents() == ["clicks", "orders"]
    assert "complete" in await page.text("#state")


async def test_hovering_shows_the_values_of_a_window_in_all_charts(page: Page) -> None:
    box = await page.page.locator("[data-chart=delay] svg").bounding_box()
    await page.page.mouse.move(box["x"] + 66, box["y"] + 60)
    shown = await page.text("#tip")
    assert "12:00:00 – 12:01:00" in shown
    assert "orders 600 10/s 5 s / 9.9 s 150 B / 199 B" in shown
    assert "Open" not in shown
    assert [await one.get_attribute("d") != "" for one in await page.page.locator(".cross").all()] == [True] * 3
    await page.page.mouse.move(2, 2)
    assert not await page.page.locator("#tip").is_visible()


async def test_the_keyboard_moves_through_the_windows_and_switches_topics(page: Page) -> None:
    await page.page.keyboard.press("End")
    shown = await page.text("#tip")
    assert "12:09:00" in shown and "Open: this window is still filling" in shown
    await page.page.keyboard.press("ArrowLeft")
    assert "12:08:00" in await page.text("#tip")
    await page.page.keyboard.press("Escape")
    assert not await page.page.locator("#tip").is_visible()

    await page.page.keyboard.press("1")
    assert await page.count("[data-chart=rate] g[data-topic=clicks]") == 0
    assert await page.page.get_attribute("#topics [data-topic=clicks]", "aria-pressed") == "false"
    # A reload, as after a batch, keeps it.
    await page.page.reload()
    assert await page.count("[data-chart=rate] g[data-topic]") == 1
    await page.page.locator("#topics [data-topic=clicks]").click()
    assert await page.count("[data-chart=rate] g[data-topic]") == 2


async def test_the_theme_is_that_of_the_system_until_it_is_switched(page: Page, request: pytest.FixtureRequest) -> None:
    first = await page.page.evaluate("document.documentElement.dataset.theme")
    assert first == request.node.callspec.params["page"]
    await page.page.keyboard.press("d")
    await page.page.reload()
    assert await page.page.evaluate("document.documentElement.dataset.theme") != first


async def test_values_of_messages_are_shown_and_never_run(page: Page) -> None:
    shown = await page.text("#frequent")
    assert f"{ODD} 100 (16.7 %)" in shown
    assert "At $.country, in the last whole window from 12:08:00" in shown
    await page.page.locator("summary").click()
    assert await page.count("#rows tbody tr") == 17


async def test_a_page_without_messages_waits_for_them(browser: Any, tmp_path: Path) -> None:
    plot(Board(every=5.0), tmp_path / "metrics.html")
    context = await browser.new_context()
    page = Page(await context.new_page(), tmp_path / "metrics.html")
    await page.open()
    assert await page.text("#state") == "Waiting for the first messages."
    # It is loaded again by itself, when there is something.
    plot(board(), tmp_path / "metrics.html")
    await page.page.wait_for_selector("g[data-topic=orders]", timeout=30_000)
    await context.close()
    assert page.trouble == []


async def test_people_with_a_screen_reader_can_use_it(page: Page, axe: str) -> None:
    await page.page.evaluate(axe)
    found = await page.page.evaluate(
        "async () => (await axe.run()).violations.map((one) => [one.id, one.nodes[0].html])"
    )
    assert found == []
