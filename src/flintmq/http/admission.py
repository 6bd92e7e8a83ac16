"""Who is connected to a daemon, from where, and whether one more may be.

An ``Admission`` owns the counts. Whoever accepts a connection asks it first, before a TLS handshake and before the
first byte, and tells it when the connection has ended. What becomes of one that is turned away is not its business.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["Admission", "address_of"]

logger = logging.getLogger(__name__)

#: Nanoseconds after which the same complaint is logged again.
_LOG_AGAIN = 10_000_000_000


class Admission:
    """At most ``most`` connections, and so many from one address; 0: any number. ``now`` is in nanoseconds."""

    def __init__(self, most: int, most_per_address: int, now: Callable[[], int]) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._now = now
        self._addresses: dict[Hashable, str] = {}
        self._counts: Counter[str] = Counter()
        self._turned_away = 0
        self._logged = 0

    def admit(self, key: Hashable, address: str) -> str:
        """Count a connection from ``address``, empty for a unix socket. If it is one too many: why, and not counted.

        One that is counted already stays so: it may be asked for before its TLS handshake and after it.
        """
        if key in self._addresses:
            return ""
        reason = ""
        if self._most and len(self._addresses) >= self._most:
            reason = f"limit of {self._most} connections reached"
        elif self._most_per_address and address and self._counts[address] >= self._most_per_address:
            reason = f"limit of {self._most_per_address} connections from {address} reached"
        if reason:
            self._complain(reason)
            return reason
        self._addresses[key] = address
        self._counts[address] += 1
        return ""

    def release(self, key: Hashable) -> None:
        """The connection is gone; one that was turned away is not known here."""
        address = self._addresses.pop(key, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _complain(self, reason: str) -> None:
        # Somebody who is turned away tries again at once: not a line for each.
        self._turned_away += 1
        now = self._now()
        if not self._logged or now - self._logged >= _LOG_AGAIN:
            self._logged = now
            logger.warning("TCP: %s, %d turned away so far", reason, self._turned_away)


def address_of(peer: Any) -> str:
    """Return the address of a socket's peer name without its port; empty for a unix socket."""
    return str(peer[0]) if isinstance(peer, tuple) else ""
