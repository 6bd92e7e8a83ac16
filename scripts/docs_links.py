"""A hook of MkDocs: links to files outside docs/ lead to the repository, and pages make no request to other sites.

A code host follows `../deploy/nsqd.toml` by itself. The site has no such page, so the link becomes one to the source,
which must exist. A link whose text is a page (`[storage.md](storage.md)`) has the title of that page on the site.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
logger = logging.getLogger("mkdocs.hooks.docs_links")


def on_page_markdown(markdown: str, /, *, page: Any, config: Any, files: Any) -> str:
    def to_repository(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        if not (ROOT / path).exists():
            # A warning ends a strict build.
            logger.warning("%s links to %s, which does not exist", page.file.src_path, path)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}{anchor})"

    def with_title(found: re.Match[str]) -> str:
        title = re.search(r"^# (.+)$", (ROOT / "docs" / found[1]).read_text(), re.MULTILINE)
        return f"[{title[1] if title else found[1]}]({found[1]}"

    markdown = re.sub(r"\]\(\.\./([^)#]+)(#[^)]*)?\)", to_repository, markdown)
    return re.sub(r"\[([\w-]+\.md)\]\(\1", with_title, markdown)


def on_post_page(output: str, /, *, page: Any, config: Any) -> str:
    """The theme asks the code host for stars and forks of what is marked like this. Pages ask nobody."""
    return output.replace(' data-md-component="source"', "")
