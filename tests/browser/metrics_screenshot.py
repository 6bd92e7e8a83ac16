"""A picture of the metrics page for the docs, with invented windows: ``python -m tests.browser.metrics_screenshot``."""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from browser.screenshots import CHROMIUM, IMAGES, shrink  # noqa: E402
from flintmq.spark.pipelines.metrics import Board, plot  # noqa: E402

WINDOW = 10.0
WINDOWS = 90
#: By topic: messages a second, bytes of a message, seconds of delay.
TOPICS = {"orders": (820, 310, 2.6), "clicks": (1430, 120, 2.4), "payments": (210, 640, 2.9)}
COUNTRIES = {"de": 0.41, "fr": 0.25, "it": 0.14, "pl": 0.1, "se": 0.06}


def a_quarter_of_an_hour() -> Board:
    now = time.time() // WINDOW * WINDOW + 0.7 * WINDOW
    board = Board(window=WINDOW, every=5.0, path="$.country", read=now)
    for topic, (rate, size, delay) in TOPICS.items():
        for number in range(WINDOWS):
            begun = (now // WINDOW - WINDOWS + 1 + number) * WINDOW
            start = datetime.fromtimestamp(begun, UTC)
            if topic == "payments" and 30 < number < 36:
                continue
            wave = 1 + 0.3 * math.sin(number / 13) + random.gauss(0, 0.05)
            messages = int(rate * wave * min(WINDOW, now - begun))
            late = 1000 * (delay + random.gauss(0, 0.2) + (4 if topic == "orders" and 50 < number < 55 else 0))
            row = {"topic": topic, "start": start, "end": start + timedelta(seconds=WINDOW), "messages": messages}
            row |= {"bytes": messages * size, "rate": messages / WINDOW}
            row |= {"size_p50": size + random.randint(-9, 9), "size_p90": size * 3 // 2, "size_p99": size * 2}
            row |= {"delay_ms_p50": late, "delay_ms_p90": late * 1.5, "delay_ms_p99": late + random.uniform(2200, 2600)}
            if topic == "orders":
                row["top"] = [{"item": name, "count": int(messages * share)} for name, share in COUNTRIES.items()]
            board.rows[topic, start] = row
    return board


def main() -> None:
    random.seed(4)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "metrics.html"
        plot(a_quarter_of_an_hour(), file)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 760}, color_scheme="light", timezone_id="UTC")
        page.goto(file.as_uri())
        page.mouse.move(620, 560)
        page.screenshot(path=IMAGES / "metrics.png")
        browser.close()
    shrink(IMAGES / "metrics.png")


if __name__ == "__main__":
    main()
