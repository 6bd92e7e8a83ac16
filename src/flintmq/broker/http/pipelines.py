"""The HTTP routes by which pipelines report themselves. ``/stats?extended=true`` shows the reports, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flintmq.broker.observe.pipelines import MOST_PIPELINES, REPORT_BYTES, read_report
from flintmq.errors import HttpError, OptionError
from flintmq.http.site import PUBLISH, READ, Request, Route

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["routes"]


def routes(broker: Broker) -> list[Route]:
    async def report(request: Request) -> None:
        body = await request.body(REPORT_BYTES, f"BODY_TOO_BIG: a report has at most {REPORT_BYTES} bytes")
        try:
            given = read_report(body)
        except OptionError as exc:
            raise HttpError(400, f"INVALID_REPORT: {exc}") from exc
        if not broker.pipelines.take(given):
            raise HttpError(429, f"TOO_MANY_PIPELINES: {MOST_PIPELINES} that run report to this node already")

    async def reports(request: Request) -> dict[str, Any]:
        return {"pipelines": broker.pipelines.describe()}

    return [
        Route("GET", "/pipeline/report", reports, READ),
        Route("POST", "/pipeline/report", report, PUBLISH, unlogged=True),
    ]
