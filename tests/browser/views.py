"""A window of the browser that notices what no page may do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any, Self

__all__ = ["View"]


class View:
    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        #: Errors on the console, exceptions, and requests to another origin.
        self.errors: list[str] = []
        #: What is expected, as regular expressions.
        self.allowed: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        page.on("request", self._asked)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, browser: Any, url: str, **options: Any) -> AsyncIterator[Self]:
        context = await browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        view = cls(await context.new_page(), url)
        try:
            yield view
            assert not view.unexpected, view.unexpected
        finally:
            await context.close()

    @property
    def unexpected(self) -> list[str]:
        return [error for error in self.errors if not any(re.search(one, error) for one in self.allowed)]

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.errors.append(f"request to {request.url}")

    async def go(self, path: str, ready: str = "main h1, main h2") -> None:
        """Open a page and wait until it shows something of its own."""
        await self.page.goto(self.url + path)
        await self.page.wait_for_selector(ready, state="attached")
        await self.page.wait_for_function("() => !document.querySelector('main .loading')")

    async def text(self, selector: str = "main") -> str:
        return str(await self.page.inner_text(selector))

    async def says(self, text: str, patience: float = 15_000) -> None:
        """Wait until the page has this text somewhere."""
        await self.page.wait_for_function(
            "text => document.body.innerText.includes(text)", arg=text, timeout=patience, polling=50
        )

    def button(self, name: str, within: str = "body") -> Any:
        return self.page.locator(within).get_by_role("button", name=name, exact=True)

    async def problems_found_by(self, axe: str) -> list[str]:
        """What axe calls serious or critical."""
        # As a value that is run by the debugger: the pages' own rules allow no inline script.
        await self.page.evaluate(axe)
        found = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']}: {node['target']} {node['failureSummary']}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]
