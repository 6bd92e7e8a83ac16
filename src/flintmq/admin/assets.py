"""The files of the pages: one HTML document for every page, and what it loads.

The document is the same for all URLs: which page it shows is the script's business. In it stand, for ``{{BASE}}`` and
``{{VERSION}}``, the base path without a slash at its end, and flintmq's version. Files are read once, unless
``--dev-static-dir`` names a folder of somebody who is working on them.
"""

from __future__ import annotations

import hashlib
import html
import mimetypes
from pathlib import Path

from flintmq import __version__
from flintmq.admin.access import NOBODY, Identity
from flintmq.admin.routes import Guarded
from flintmq.errors import HttpError
from flintmq.http import site as web
from flintmq.options import NsqadminOptions

__all__ = ["Assets"]

FOLDER = Path(__file__).with_name("pages")
#: The paths that show a page. ``/topics/:topic`` and others have parts of any name.
PAGES = (
    "/",
    "/topics",
    "/topics/:topic",
    "/topics/:topic/:channel",
    "/nodes",
    "/nodes/:node",
    "/counter",
    "/lookup",
    "/clients",
    "/messages",
    "/dead",
    "/pipelines",
    "/actions",
    "/login",
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".map": "application/json",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
    ".ttf": "font/ttf",
    ".eot": "application/vnd.ms-fontobject",
    ".txt": "text/plain; charset=utf-8",
}


class Assets:
    def __init__(self, options: NsqadminOptions) -> None:
        self._base = options.base_path.rstrip("/")
        self._folder = Path(options.dev_static_dir).resolve() if options.dev_static_dir else FOLDER
        self._is_fixed = not options.dev_static_dir
        self._known: dict[str, tuple[bytes, str]] = {}

    def routes(self) -> list[Guarded]:
        pages = [Guarded("GET", path, self._page, NOBODY, plain=True) for path in PAGES]
        return [
            *pages,
            # Browsers ask for it beside answers that name no icon, such as those of the API: always at the root.
            Guarded("GET", "/favicon.ico", self._icon, NOBODY, plain=True, unlogged=True, at_root=True),
            Guarded("GET", "/static/*path", self._file, NOBODY, plain=True, unlogged=True),
            Guarded("GET", "/fonts/*path", self._file, NOBODY, plain=True, unlogged=True),
        ]

    async def _page(self, request: web.Request, identity: Identity) -> web.Answer:
        return self.document()

    def document(self) -> web.Answer:
        """Return the document of every page, also of those that there are not: its script tells."""
        body, _ = self._read("index.html")
        document = body.decode().replace("{{BASE}}", html.escape(self._base)).replace("{{VERSION}}", __version__)
        return web.Answer(document.encode(), _TYPES[".html"])

    async def _icon(self, request: web.Request, identity: Identity) -> web.Answer:
        return web.Answer(self._read("logo.svg")[0], _TYPES[".svg"])

    async def _file(self, request: web.Request, identity: Identity) -> web.Answer:
        body, tag = self._read(request.parameters["path"])
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return web.Answer(status=304, headers=headers)
        suffix = Path(request.parameters["path"]).suffix.lower()
        kind = _TYPES.get(suffix) or mimetypes.types_map.get(suffix, "application/octet-stream")
        return web.Answer(body, kind, headers=headers)

    def _read(self, name: str) -> tuple[bytes, str]:
        if self._is_fixed and name in self._known:
            return self._known[name]
        if any(part in ("", ".", "..") for part in name.split("/")):
            # A file has one name, so that each is kept once.
            raise HttpError(404, "NOT_FOUND")
        try:
            path = (self._folder / name).resolve()
            # Nothing above the folder, whatever the name says.
            if not path.is_relative_to(self._folder.resolve()) or path.suffix == ".py":
                raise HttpError(404, "NOT_FOUND")
            body = path.read_bytes()
        except (OSError, ValueError):
            raise HttpError(404, "NOT_FOUND") from None
        found = body, '"' + hashlib.sha256(body).hexdigest()[:20] + '"'
        if self._is_fixed:
            self._known[name] = found
        return found
