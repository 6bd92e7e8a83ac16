"""Complaints that would be logged for every publish or call: a line for the first one, and another every ten seconds.

A full disk refuses all writes, and lines about each of them fill it further.
"""

from __future__ import annotations

from flintmq.broker.storage.disk import Clock

__all__ = ["Complaints"]

#: Nanoseconds after which the same complaint is logged again.
AGAIN = 10_000_000_000
#: Complaints at which those are forgotten that would be logged again anyway.
MANY = 1_000


class Complaints:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged: dict[tuple[str, str], int] = {}

    def due(self, what: str, whose: str) -> bool:
        """Return whether a complaint of this kind, about this topic or producer, is to be logged now."""
        now = self._clock.now()
        logged = self._logged.get((what, whose))
        if logged is not None and now - logged < AGAIN:
            return False
        if len(self._logged) >= MANY:
            self._logged = {key: logged for key, logged in self._logged.items() if now - logged < AGAIN}
        self._logged[what, whose] = now
        return True
