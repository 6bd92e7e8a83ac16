"""The queue scan: which channels have something due, and when to look again.

The Scan owns an index of deadlines over all channels. A channel tells it when an earlier deadline appears; every
``--queue-scan-interval`` the channels with the earliest deadlines are looked at. It does not know what a deadline is
for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from flintmq.broker.storage.journal import NEVER
from flintmq.options import NsqdOptions

__all__ = ["Scan"]

logger = logging.getLogger(__name__)

#: Entries of the heap that nobody asks for any more and that are kept all the same, beside one for each channel.
SPARE = 64


class Scanned(Protocol):
    """A channel, as the scan sees it."""

    scheduled: int
    exiting: bool

    def expire(self, now: int) -> bool:
        """Handle what is due; was there anything?"""

    def next_deadline(self) -> int:
        """When to look again."""


class Scan:
    def __init__(self, options: Callable[[], NsqdOptions], later: Callable[[Callable[[], None]], Any]) -> None:
        self._options = options
        self._later = later
        # Deadline, a number that no other entry has, and the channel: None where it asked for another deadline since.
        self._heap: list[list[Any]] = []
        self._entries: dict[Scanned, list[Any]] = {}
        self._order = 0
        self._rounds_under_way = False

    def watch(self, channel: Scanned, deadline: int) -> None:
        """Look at the channel when ``deadline`` has passed, and no longer at the one that it asked for before."""
        if channel.exiting:
            return
        self.forget(channel)
        channel.scheduled = deadline
        self._order += 1
        entry = self._entries[channel] = [deadline, self._order, channel]
        heappush(self._heap, entry)

    def forget(self, channel: Scanned) -> None:
        """Look at the channel no more. What its entry in the heap takes up is freed with the next ones."""
        entry = self._entries.pop(channel, None)
        if entry is not None:
            entry[2] = None
            if len(self._heap) > 2 * len(self._entries) + SPARE:
                self._heap = list(self._entries.values())
                heapify(self._heap)

    def tick(self, now: Callable[[], int]) -> None:
        """One interval has passed. A round that is still under way goes on by itself."""
        if not self._rounds_under_way:
            self._round(now)

    def _round(self, now: Callable[[], int]) -> None:
        """Look at up to ``--queue-scan-selection-count`` channels; if many were dirty, again at once."""
        self._rounds_under_way = True
        options = self._options()
        selected = self._select(now(), options.queue_scan_selection_count)
        dirty = 0

        def some(start: int) -> None:
            nonlocal dirty
            stop = min(start + options.queue_scan_worker_pool_max, len(selected))
            for channel in selected[start:stop]:
                if channel.exiting:
                    continue
                try:
                    dirty += channel.expire(now())
                except Exception:
                    # The others are due as well, and this one is asked again.
                    logger.exception("SCAN: a channel failed")
                deadline = channel.next_deadline()
                if deadline < channel.scheduled:
                    self.watch(channel, deadline)
            if stop < len(selected):
                # Everybody else gets a turn in between.
                self._later(lambda: some(stop))
            elif selected and dirty / len(selected) > options.queue_scan_dirty_percent:
                self._later(lambda: self._round(now))
            else:
                self._rounds_under_way = False

        some(0)

    def _select(self, now: int, count: int) -> list[Scanned]:
        selected: list[Scanned] = []
        heap = self._heap
        while heap and len(selected) < count and heap[0][0] <= now:
            channel = heappop(heap)[2]
            if channel is not None:
                del self._entries[channel]
                channel.scheduled = NEVER << 8
                selected.append(channel)
        return selected
