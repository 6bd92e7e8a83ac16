"""The routes of nsqadmin: who may use each, under which path, and what every answer carries.

A ``Guarded`` is a route with the role that it needs. ``AdminSite`` puts the base path before all of them, asks
``Access`` before a handler runs, compresses answers for those who take that, and adds the headers by which browsers
protect the user.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from flintmq.admin.access import NOBODY, VIEW, Access, Identity
from flintmq.errors import HttpError
from flintmq.http import site as web

__all__ = ["AdminSite", "Guarded"]

GuardedHandler = Callable[[web.Request, Identity], Awaitable[Any]]

#: No script, style or frame but our own, and none inside a page.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:{graphite}; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
#: Answers that are smaller are sent as they are.
LEAST_COMPRESSED = 512


@dataclass(frozen=True)
class Guarded:
    """A route: ``right`` says what web pages of other origins may do with it, as on the other daemons."""

    method: str
    path: str
    handler: GuardedHandler
    #: The least role; NOBODY: everybody may.
    role: str
    #: NSQ's own nsqadmin has it, so that its rules hold where nobody logs in.
    is_nsq: bool = False
    plain: bool = False
    unlogged: bool = False
    #: It shows messages: not for web pages of others, though nothing is changed.
    is_private: bool = False
    #: Its path has no base before it.
    at_root: bool = False

    @property
    def right(self) -> str:
        if self.method != "GET":
            return web.ADMIN
        if self.is_private or self.role not in (NOBODY, VIEW):
            return web.CONSUME
        return web.OPEN if self.role == NOBODY else web.READ


class AdminSite(web.Site):
    def __init__(
        self,
        routes: Iterable[Guarded],
        access: Access,
        base_path: str,
        pages: Iterable[str],
        graphite: str,
        document: Callable[[], web.Answer],
    ) -> None:
        self.access = access
        #: What browsers get where there is nothing.
        self._document = document
        #: As they were given.
        self.guarded = tuple(routes)
        super().__init__(
            [
                web.Route(
                    one.method,
                    one.path if one.at_root else join_path(base_path, one.path),
                    self._guard(one),
                    one.right,
                    plain=one.plain,
                    unlogged=one.unlogged,
                )
                for one in self.guarded
            ],
            None,
            pages,
        )
        self._headers = {
            "Content-Security-Policy": CONTENT_POLICY.format(graphite=f" {graphite}" if graphite else ""),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "same-origin",
        }

    def _guard(self, route: Guarded) -> web.Handler:
        async def handle(request: web.Request) -> Any:
            if route.role == NOBODY:
                return await route.handler(request, ANYBODY)
            identity = await self.access.identify(request)
            self.access.require(request, identity, route.role, is_nsq=route.is_nsq)
            if not route.plain:
                _check_text(request)
            return await route.handler(request, identity)

        return handle

    async def answer(self, request: web.Request) -> web.Answer:
        answer = await super().answer(request)
        headers = {**self._headers, **answer.headers}
        if "Cache-Control" not in headers:
            headers["Cache-Control"] = "no-store"
        body = answer.body
        accepted = [
            word.split(";")[0].strip().lower() for word in request.headers.get("Accept-Encoding", "").split(",")
        ]
        encoding = next((word for word in accepted if word in ("gzip", "deflate")), "")
        if encoding and answer.pieces is None:
            headers["Vary"] = "Accept-Encoding"
            if len(body) >= LEAST_COMPRESSED and "Content-Encoding" not in headers:
                # Go's "deflate" has no header around it.
                packer = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == "gzip" else -15)
                body = packer.compress(body) + packer.flush()
                headers["Content-Encoding"] = encoding
        return replace(answer, headers=headers, body=body)

    def _not_found(self, request: web.Request, started: int) -> web.Answer:
        answer = super()._not_found(request, started)
        is_page = request.method in ("GET", "HEAD") and "text/html" in request.headers.get("Accept", "")
        if answer.status != 404 or not is_page:
            return answer
        return replace(self._document(), status=404)


def _check_text(request: web.Request) -> None:
    """HttpError 400 if a part of the path, or an argument, is not UTF-8. Only a filter may look for any bytes."""
    texts = list(request.parameters.values())
    with contextlib.suppress(HttpError):
        # Not every route looks at them.
        texts += [value for name, value in request.arguments().items() if name != "filter"]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise HttpError(400, "INVALID_REQUEST: names and arguments must be UTF-8") from None


ANYBODY = Identity(None, None, "none")


def join_path(base: str, path: str) -> str:
    """``/admin`` and ``/ping`` are ``/admin/ping``; the root of a base is the base itself."""
    joined = base.rstrip("/") + path
    return joined.rstrip("/") or "/" if path == "/" else joined


def clean_base(base: str) -> str:
    """A base path begins with a slash and ends with none, and has no dots to go up."""
    kept: list[str] = []
    for part in base.split("/"):
        if part == "..":
            del kept[-1:]
        elif part not in ("", "."):
            kept.append(part)
    return "/" + "/".join(kept)
