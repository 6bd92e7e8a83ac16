"""Secrets that were refused: each is remembered for a while, and an address that tries many of them is slowed down.

A ``Guesses`` stands before the auth servers. It keeps digests, never secrets, and a bounded number of all it keeps.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

__all__ = ["Guesses"]

#: Seconds for which a secret that was refused is refused again, without a question.
REFUSED_SECONDS = 5.0
#: Refusals of one address that cost it nothing; each further one doubles the wait, from the first to the longest.
FREE = 5
FIRST_WAIT = 0.1
LONGEST_WAIT = 10.0
#: Questions of one address that may be under way at a time; questions of all, with secrets that are known or not.
AT_ONCE = 8
AT_ONCE_IN_ALL = 32
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
        #: By address: the places of questions under way, and how many hold or want one.
        self._places: dict[str, asyncio.Semaphore] = {}
        self._held: Counter[str] = Counter()
        # The places of all addresses together.
        self._known, self._unknown = asyncio.Semaphore(AT_ONCE_IN_ALL), asyncio.Semaphore(AT_ONCE_IN_ALL)

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

    @asynccontextmanager
    async def place(self, address: str, key: bytes) -> AsyncIterator[None]:
        """Hold one of the address's places while a question is asked, or wait for one.

        A fleet behind one address gets in a few at a time; those that guess in parallel hear of the first refusals
        before they have asked much more. A secret that was granted before needs no place there. Each question costs
        a descriptor, so the number of all of them has a limit too; strangers do not use up that of known secrets.
        """
        is_known = key in self._good
        everywhere = self._known if is_known else self._unknown
        if not address or is_known:
            async with everywhere:
                yield
            return
        places = self._places.get(address)
        if places is None:
            places = self._places[address] = asyncio.Semaphore(AT_ONCE)
        self._held[address] += 1
        try:
            async with places, everywhere:
                yield
        finally:
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address], self._places[address]

    def wait(self, address: str, key: bytes) -> float | None:
        """Return how many seconds a question from an address has to wait; None if it is one too many.

        One that was granted before waits never. Questions at once wait one after the other, and for no longer than
        LONGEST_WAIT: an address cannot make more guesses by more connections.
        """
        known = self._addresses.get(address)
        now = self._now()
        if not address or known is None or key in self._good or now - known[1] > FORGIVEN_SECONDS:
            return 0.0
        count, last, free_at = known
        if count < FREE:
            return 0.0
        pause = min(FIRST_WAIT * 2.0 ** min(count - FREE, 16), LONGEST_WAIT)
        delay = max(free_at - now, 0.0) + pause
        if delay > LONGEST_WAIT:
            return None
        self._addresses[address] = (count, last, now + delay)
        return delay

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
