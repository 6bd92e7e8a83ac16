"""Secrets that were refused: each is remembered for a while, and an address that tries many of them is slowed down.

A ``Guesses`` stands before the auth servers. It keeps digests, never secrets, and a bounded number of all it keeps.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Guesses"]

#: Seconds for which a secret that was refused is refused again, without a question.
REFUSED_SECONDS = 5.0
#: Refusals of one address that cost it nothing; each further one doubles the wait, from the first to the longest.
FREE = 5
FIRST_WAIT = 0.1
LONGEST_WAIT = 10.0
#: An address that was refused nothing for so long starts anew.
FORGIVEN_SECONDS = 300.0
#: Entries of each kind that are kept.
MOST = 4096

Key = TypeVar("Key")
Value = TypeVar("Value")


class Guesses:
    """``now`` is the loop's clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._refused: OrderedDict[bytes, float] = OrderedDict()
        self._good: OrderedDict[bytes, None] = OrderedDict()
        #: By address: refusals in a row, when the last one was, and when the next question may be asked.
        self._addresses: OrderedDict[str, tuple[int, float, float]] = OrderedDict()

    def key(self, *parts: bytes) -> bytes:
        """Return what stands for a question."""
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(4, "big") + part)
        return digest.digest()

    def is_refused(self, key: bytes) -> bool:
        """Was this refused a moment ago?"""
        until = self._refused.get(key)
        return until is not None and self._now() < until

    def wait(self, address: str, key: bytes) -> float:
        """Return how many seconds a question from an address has to wait. One that was granted before waits never.

        Each wait is the address's own: two questions at once wait one after the other.
        """
        known = self._addresses.get(address)
        now = self._now()
        if not address or known is None or key in self._good or now - known[1] > FORGIVEN_SECONDS:
            return 0.0
        count, last, free_at = known
        if count < FREE:
            return 0.0
        pause = min(FIRST_WAIT * 2.0 ** min(count - FREE, 16), LONGEST_WAIT)
        # But never for longer: who shares the address with somebody that guesses must get in some time.
        start = min(max(now, free_at) + pause, now + LONGEST_WAIT)
        self._addresses[address] = (count, last, start)
        return start - now

    def refused(self, address: str, key: bytes) -> None:
        """The auth server knows nothing of this secret."""
        now = self._now()
        self._good.pop(key, None)
        _keep(self._refused, key, now + REFUSED_SECONDS)
        if address:
            count, last, free_at = self._addresses.get(address, (0, now, now))
            count = 0 if now - last > FORGIVEN_SECONDS else count
            _keep(self._addresses, address, (count + 1, now, free_at))

    def granted(self, key: bytes) -> None:
        """The secret is good. It does not redeem its address: others may be guessing there."""
        self._refused.pop(key, None)
        _keep(self._good, key, None)


def _keep(table: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > MOST:
        table.popitem(last=False)
