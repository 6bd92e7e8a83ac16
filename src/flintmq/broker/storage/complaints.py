"""Complaints that would be logged for every publish or call: a line for the first one, and another every ten seconds.

A full disk refuses all writes, and lines about each of them fill it further.
"""

from __future__ import annotations

from flintmq.broker.storage.disk import Clock

__all__ = ["Complaints"]

#: Nanoseconds after which the same complaint is logged again.
AGAIN = 10_000_000_000


class Complaints:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged: dict[str, int] = {}

    def due(self, what: str) -> bool:
        """Return whether this complaint is to be logged now. ``what`` is its kind, of which there are few."""
        now = self._clock.now()
        logged = self._logged.get(what)
        if logged is not None and now - logged < AGAIN:
            return False
        self._logged[what] = now
        return True
