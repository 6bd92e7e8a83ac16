"""Places and times in a topic's log, by the index that brokers keep of it: no message is read."""

from __future__ import annotations

import logging
from typing import Any

from flintmq.spark.shipped.net import Refused, Web
from flintmq.spark.shipped.offsets import Range
from flintmq.spark.shipped.where import LEAST, MOST, Box

__all__ = ["Index", "outside"]

logger = logging.getLogger("flintmq.spark")


class Index:
    """Asks brokers. Each is the node of the range that it is asked about, or its answer does not count."""

    def __init__(self, web: Web) -> None:
        self._web = web

    def within(self, found: Range, address: str, boxes: list[Box]) -> list[Range]:
        """Return the parts of a range that may have rows in some of the boxes: in order, none touching the next."""
        spans = []
        for box in boxes:
            part = found._replace(first=max(found.first, box.first), stop=min(found.stop, box.stop))
            if part.size > 0:
                spans += self._of_time(part, address, box) if box.has_time else [(part.first, part.stop)]
        pieces: list[Range] = []
        for first, stop in sorted(spans):
            if pieces and first <= pieces[-1].stop:
                pieces[-1] = pieces[-1]._replace(stop=max(stop, pieces[-1].stop))
            else:
                pieces.append(found._replace(first=first, stop=stop))
        return pieces

    def messages(self, found: Range, address: str) -> int | None:
        """Return how many messages a range has; None if its broker cannot say."""
        said = self._ask(found, address)
        return None if said is None else sum(int(one["messages"]) for one in said)

    def _of_time(self, found: Range, address: str, box: Box) -> list[tuple[int, int]]:
        """Where in a range messages of a time may be; all of it, if its broker cannot say."""
        times = {"since": max(0, box.since)} if box.since > LEAST else {}
        times |= {"until": max(0, box.until)} if box.until < MOST else {}
        said = self._ask(found, address, **times)
        return [(found.first, found.stop)] if said is None else [(int(one["from"]), int(one["to"])) for one in said]

    def _ask(self, found: Range, address: str, **times: int) -> list[dict[str, Any]] | None:
        query = {"from": found.first, "to": found.stop, **times}
        try:
            said = self._web.ask("GET", address, "/log/ranges", topic=found.topic, **query)
        except Refused as exc:
            # One that is too old to know, or that has let go some of it, of which reading will tell.
            logger.info("the index of %s on node %s does not say: %s", found.topic, found.node, exc)
            return None
        if (said.get("node"), said.get("epoch")) != (found.node, found.epoch):
            return None
        return list(said["ranges"])


def outside(found: Range, pieces: list[Range]) -> list[Range]:
    """Return what of a range is in none of its pieces, which are in order."""
    edges = [found.first, *(edge for piece in pieces for edge in (piece.first, piece.stop)), found.stop]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return [found._replace(first=first, stop=stop) for first, stop in gaps if first < stop]
