"""What pipelines last said of themselves: reports of streaming queries, for ``/stats`` and for nsqadmin.

A ``Pipelines`` owns the last report of each query. It is bounded in number, a report in size; nothing of it is on disk,
and a query that does not renew its report for FORGET_SECONDS is forgotten. The broker itself makes no use of any of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from flintmq.errors import UNREADABLE, OptionError
from flintmq.protocol.wire import valid_name
from flintmq.system import Clock

__all__ = ["FORGET_SECONDS", "MOST_NAMES", "MOST_PIPELINES", "REPORT_BYTES", "Pipelines", "Report", "read_report"]

#: Seconds after its last report at which a query is forgotten.
FORGET_SECONDS = 600
#: Queries that are remembered.
MOST_PIPELINES = 200
#: Topics, or readers, of one query.
MOST_NAMES = 64
#: Bytes of a report.
REPORT_BYTES = 16 << 10
_SECOND = 1_000_000_000

#: Exact in every reader of JSON.
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
#: A line of text: no control characters.
Line = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
Names = Annotated[list[Name], msgspec.Meta(max_length=MOST_NAMES)]


class Report(msgspec.Struct, kw_only=True):
    """One streaming query, in its own words. Fields that are not known here are passed over."""

    #: The same for as long as the query has its checkpoint.
    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}\Z")]
    #: Milliseconds since 1970, by the clock of the driver: of two reports of a query the newer one counts.
    at: Count
    name: Line = ""
    state: Literal["running", "ended", "failed"] = "running"
    error: Annotated[str, msgspec.Meta(max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")] = ""
    host: Line = ""
    #: Topics that it reads, and publishes to; the names that it has as a reader of logs.
    topics: Names = []
    writes: Names = []
    readers: Names = []
    #: The number of its last batch, and when that ended, in milliseconds since 1970; None: none yet.
    batch: Count | None = None
    progress: Count | None = None
    batch_seconds: Amount | None = None
    #: Rows since it was started, and by the second of its last batch; 0 while it waits for messages.
    rows: Count = 0
    rows_per_second: Amount = 0.0
    #: Messages that it has not read; None: it does not know.
    lag: Count | None = None
    state_rows: Count = 0
    state_bytes: Count = 0


_decoder = msgspec.json.Decoder(Report)


def read_report(body: bytes | bytearray) -> Report:
    """Return the report in a body. OptionError says what is wrong with it."""
    try:
        report = _decoder.decode(body)
    except UNREADABLE as exc:
        raise OptionError(f"the body must be the JSON of a report - {exc}") from exc
    for topic in (*report.topics, *report.writes):
        if not valid_name(topic):
            raise OptionError(f"{topic!r} is no name of a topic")
    return report


class _Kept(msgspec.Struct):
    report: Report
    #: When it came: by the clock that never steps, and since 1970.
    at: int
    wall: int


class Pipelines:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: By id, the one that was renewed longest ago first.
        self._kept: dict[str, _Kept] = {}
        #: Grows with every change.
        self.version = 0

    def take(self, report: Report) -> bool:
        """Keep a report in place of the last one of its query. False if there is no room: all others still run."""
        self._forget()
        known = self._kept.get(report.id)
        if known is not None and known.report.at > report.at:
            # It was overtaken on its way.
            return True
        if known is None and len(self._kept) >= MOST_PIPELINES:
            ended = next((id for id, kept in self._kept.items() if kept.report.state != "running"), None)
            if ended is None:
                return False
            del self._kept[ended]
        self._kept.pop(report.id, None)
        self._kept[report.id] = _Kept(report, self._clock.now(), self._clock.wall())
        self.version += 1
        return True

    def describe(self) -> list[dict[str, Any]]:
        """Return all that are known, by name; ``reported`` is when each last said something, in ns since 1970."""
        self._forget()
        kept = sorted(self._kept.values(), key=lambda one: (one.report.name, one.report.id))
        return [{**msgspec.to_builtins(one.report), "reported": one.wall} for one in kept]

    def _forget(self) -> None:
        limit = self._clock.now() - FORGET_SECONDS * _SECOND
        for id, kept in list(self._kept.items()):
            if kept.at > limit:
                break
            del self._kept[id]
            self.version += 1

    def __len__(self) -> int:
        self._forget()
        return len(self._kept)
