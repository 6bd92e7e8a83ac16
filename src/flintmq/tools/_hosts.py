"""Which of several destinations gets a message, and how long they take: for nsq_to_http and nsq_to_nsq.

The modes are those of NSQ's tools: `round-robin` counts, `hostpool` leaves out hosts that failed for a while that
doubles, `epsilon-greedy` prefers the host that answers fastest and now and then tries another.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["MODES", "HostPool", "Status"]

logger = logging.getLogger(__name__)

MODES = ("round-robin", "hostpool", "epsilon-greedy")

#: Seconds until a host that failed is tried again: at first, and at most.
_FIRST_RETRY = 30.0
_LONGEST_RETRY = 900.0
#: Share of choices that explore: at first, the factor after each exploration, and the least.
_EPSILON = 0.3
_EPSILON_FACTOR = 0.9
_EPSILON_LEAST = 0.01
#: Response times are kept in this many buckets that cover these seconds.
_BUCKETS = 120
_WINDOW_SECONDS = 300.0


class _Host:
    def __init__(self, address: str) -> None:
        self.address = address
        self.is_dead = False
        self.retry_at = 0.0
        self.retry_delay = 0.0
        #: Bucket number, results in it, seconds they took.
        self.buckets: deque[list[float]] = deque(maxlen=_BUCKETS)

    def mean_seconds(self, now: float) -> float:
        """Return the response time of the last minutes, where newer results weigh more; 0 if there are none."""
        newest = now // (_WINDOW_SECONDS / _BUCKETS)
        weight = total = 0.0
        for number, count, took in self.buckets:
            age = newest - number
            if age < _BUCKETS:
                share = (1 - age / _BUCKETS) * count
                weight += share
                total += share * took / count
        return total / weight if weight else 0.0


class HostPool:
    """Chooses a host for each message. `mark` tells what came of it."""

    def __init__(self, addresses: Sequence[str], mode: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._hosts = {address: _Host(address) for address in addresses}
        self._order = list(self._hosts.values())
        self._mode = mode
        self._clock = clock
        self._next = 0
        self._epsilon = _EPSILON

    def choose(self) -> str:
        if self._mode == "round-robin":
            # As NSQ's tools: counted up before use, so the second address is the first to get a message.
            self._next += 1
            return self._order[self._next % len(self._order)].address
        if self._mode == "epsilon-greedy":
            return self._choose_greedily()
        return self._choose_alive().address

    def _choose_alive(self) -> _Host:
        now = self._clock()
        for step in range(len(self._order)):
            host = self._order[(self._next + step) % len(self._order)]
            if not host.is_dead or host.retry_at <= now:
                if host.is_dead:
                    # One message is the test; the others wait for its outcome, or for the next time.
                    host.retry_delay = min(host.retry_delay * 2, _LONGEST_RETRY)
                    host.retry_at = now + host.retry_delay
                self._next = (self._next + step + 1) % len(self._order)
                return host
        for host in self._order:
            host.is_dead = False
        self._next = 1 % len(self._order)
        return self._order[0]

    def _choose_greedily(self) -> str:
        if random.random() < self._epsilon:
            self._epsilon = max(self._epsilon * _EPSILON_FACTOR, _EPSILON_LEAST)
            return self._choose_alive().address
        now = self._clock()
        rated = [(host, host.mean_seconds(now)) for host in self._order if not host.is_dead or host.retry_at <= now]
        rated = [(host, took) for host, took in rated if took > 0]
        if not rated:
            return self._choose_alive().address
        chosen = random.choices([host for host, _ in rated], [1 / took for _, took in rated])[0]
        return chosen.address

    def mark(self, address: str, is_ok: bool, took: float = 0.0) -> None:
        host = self._hosts[address]
        now = self._clock()
        if not is_ok:
            if not host.is_dead:
                host.is_dead = True
                host.retry_delay = _FIRST_RETRY
                host.retry_at = now + _FIRST_RETRY
            return
        host.is_dead = False
        if self._mode == "epsilon-greedy":
            number = now // (_WINDOW_SECONDS / _BUCKETS)
            if not host.buckets or host.buckets[-1][0] != number:
                host.buckets.append([number, 0, 0.0])
            host.buckets[-1][1] += 1
            host.buckets[-1][2] += took


class Status:
    """A log line after every so many results: how many there were, and how long the last of them took."""

    def __init__(self, every: int, prefix: str) -> None:
        self._every = every
        self._prefix = prefix
        self._last: deque[float] = deque(maxlen=max(1, every))
        self._count = 0
        if 0 < every < 100:
            logger.warning(
                "Warning: use more than 100 status values for accurate percentiles (configured with %d)", every
            )

    def add(self, took: float, count: int = 1) -> None:
        """Results came, all after the same time."""
        if self._every <= 0:
            return
        before = self._count
        self._count += count
        self._last.extend([took] * min(count, self._every))
        # The first line comes with the result after the first full window.
        if (before - 1) // self._every != (self._count - 1) // self._every and self._count > self._every:
            self._print()

    def _print(self) -> None:
        ordered = sorted(self._last)
        ninety_ninth, ninety_fifth = (ordered[math.ceil(len(ordered) * share) - 1] for share in (0.99, 0.95))
        mean = sum(ordered) / len(ordered)
        logger.info(
            "%s finished %d - 99th: %.02fms - 95th: %.02fms - avg: %.02fms",
            self._prefix,
            len(ordered),
            ninety_ninth * 1000,
            ninety_fifth * 1000,
            mean * 1000,
        )
