"""How much each nsqd may send: RDY over all connections of a consumer, and backoff when messages fail.

RDY is a level: a broker sends while fewer messages than that are unanswered. A Flow gives every connection its share
of `max_in_flight`. Where there are more connections than that, each gets RDY 1 in its turn. In backoff all stand at 0
for a while, then one message is let through as a test; its outcome makes the next wait shorter or longer.

A Flow owns the RDY of its connections and three timers. It neither dials nor knows what messages are.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Protocol

from flintmq.client.clock import Clock, Timer
from flintmq.errors import OptionError

__all__ = ["Flow", "Peer"]

logger = logging.getLogger(__name__)


class Peer(Protocol):
    """What a Flow sees of a connection."""

    ready: int
    max_ready: int
    counts_down: bool
    credit: int
    last_message: float

    @property
    def in_flight(self) -> int: ...
    def in_flight_at(self, now: float) -> int: ...
    def set_ready(self, count: int) -> None: ...


class Flow:
    def __init__(
        self,
        clock: Clock,
        max_in_flight: int,
        *,
        name: str = "",
        max_backoff_duration: float = 120.0,
        backoff_multiplier: float = 1.0,
        backoff_strategy: Callable[[int], float] | None = None,
        backoff_jitter: bool = False,
        low_rdy_idle_timeout: float = 1.0,
        low_rdy_timeout: float = 5.0,
        rdy_redistribute_interval: float = 0.5,
    ) -> None:
        for option, value in (
            ("max_backoff_duration", max_backoff_duration),
            ("backoff_multiplier", backoff_multiplier),
        ):
            if not value >= 0:
                raise OptionError(f"{option} must not be below 0")
        if not rdy_redistribute_interval > 0:
            raise OptionError("rdy_redistribute_interval must be above 0")
        self._clock = clock
        self._name = name
        self._peers: list[Peer] = []
        self._max_in_flight = 0
        self._stopped = False
        # Backoff. At level 0 there is none.
        self.level = 0
        self._longest = max_backoff_duration
        self._strategy = backoff_strategy
        self._multiplier = backoff_multiplier
        self._jitter = backoff_jitter
        self._wait: Timer | None = None
        # Taking turns.
        self._idle_timeout = low_rdy_idle_timeout
        self._held_timeout = low_rdy_timeout
        self._interval = rdy_redistribute_interval
        self._granted: dict[Peer, float] = {}
        self._turns: Timer | None = None
        self.max_in_flight = max_in_flight

    # --- What happens ------------------------------------------------------------------------------------------------

    @property
    def max_in_flight(self) -> int:
        """Messages under way over all connections; 0 pauses."""
        return self._max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        if count < 0:
            raise OptionError("max_in_flight must not be below 0")
        self._max_in_flight = count
        self._apply()

    def add(self, peer: Peer) -> None:
        self._peers.append(peer)
        self._granted[peer] = float("-inf")
        self._apply()

    def remove(self, peer: Peer) -> None:
        if peer in self._granted:
            self._peers.remove(peer)
            del self._granted[peer]
            self._apply()

    def received(self, peer: Peer, count: int) -> None:
        """Messages came; to be called for brokers that count RDY down, which must be told it again."""
        peer.credit -= count
        if not peer.ready or self._stopped:
            return
        if self._takes_turns:
            # The turn is over; the next begins when this message was answered, or its time is over.
            if peer.credit <= 0:
                peer.ready = 0
                self._look_at_turns_later()
            return
        share = self._share(self._peers.index(peer))
        if peer.credit <= 1 or peer.credit < peer.ready // 4 or peer.credit > share:
            self._refill(peer)

    def _refill(self, peer: Peer) -> None:
        """Tell a broker that counts RDY down what it may send: those in flight take places."""
        room = self._share(self._peers.index(peer)) - self._holds(peer)
        if room > 0 or peer.credit > 0:
            self._grant(peer, max(0, room))
        if room <= 0:
            # An answer brings the next; so does the end of a message's time.
            self._look_at_turns_later()

    def answered(self, peer: Peer) -> None:
        """A message was answered. Where connections take turns, that may end one's turn."""
        if peer.counts_down and peer.credit <= 1 and not self._takes_turns:
            if self._wait is None and not self._stopped and peer in self._granted:
                share = self._share(self._peers.index(peer))
                # Not for every single place.
                if share - peer.in_flight >= max(1, share // 4):
                    self._refill(peer)
            return
        if self._takes_turns and peer.ready == 0 and not self._stopped and not self._holds(peer):
            if peer.counts_down and self._may_go_on(peer):
                peer.set_ready(1)
            else:
                self._apply()

    def _may_go_on(self, peer: Peer) -> bool:
        """Return whether a turn is not over yet, where the broker has counted RDY down to 0."""
        taken = sum(max(other.ready, self._holds(other)) for other in self._peers)
        is_new = self._clock.time() - self._granted.get(peer, float("-inf")) < self._held_timeout
        return is_new and not self.level and self._wait is None and taken < self._max_in_flight

    def stop(self) -> None:
        """No RDY goes out any more."""
        self._stopped = True
        for timer in (self._wait, self._turns):
            if timer is not None:
                timer.cancel()
        self._wait = self._turns = None

    @property
    def is_starved(self) -> bool:
        """Some connection has sent nearly all that it may: whoever gathers messages should work on what he has."""
        return any(peer.in_flight > 0 and peer.in_flight >= int(0.85 * peer.ready) for peer in self._peers)

    # --- Backoff -----------------------------------------------------------------------------------------------------

    def succeeded(self) -> None:
        if self.level:
            self._outcome(-1)

    def failed(self) -> None:
        if self._longest > 0:
            self._outcome(1)

    def neither(self) -> None:
        """Given back, but not for a failure. In backoff the test must be made again, or RDY would stay where it is."""
        if self.level:
            self._outcome(0)

    @property
    def is_waiting(self) -> bool:
        """In backoff, and nothing may come."""
        return self._wait is not None

    def _duration(self, level: int) -> float:
        """Return the seconds of a level. A strategy of the user's that fails must not cost a message its answer."""
        if self._strategy is not None:
            try:
                seconds = float(self._strategy(level))
                if seconds >= 0:
                    return seconds
                logger.error("CONSUMER(%s): backoff_strategy(%d) is %r seconds", self._name, level, seconds)
            except Exception:
                logger.exception("CONSUMER(%s): backoff_strategy(%d) failed", self._name, level)
        # Beyond 2 ** 64 it is longer than any limit; and 2.0 ** 2000 is an error.
        return self._multiplier * 2.0 ** min(level, 64)

    def _outcome(self, change: int) -> None:
        # One outcome counts per round: a burst of a hundred failures is one reason to slow down, not a hundred.
        if self._wait is not None or self._stopped:
            return
        # A level that would last too long is not entered; but there is always a first one.
        if (
            change < 1
            or self.level == 0
            or self._duration(self.level) < self._duration(self.level + 1) <= self._longest
        ):
            self.level += change
        if self.level == 0:
            logger.info("CONSUMER(%s): out of backoff", self._name)
            self._apply()
            return
        for peer in self._peers:
            self._grant(peer, 0)
        seconds = min(self._duration(self.level), self._longest)
        if self._jitter:
            seconds = random.uniform(0, seconds)
        logger.warning("CONSUMER(%s): backing off for %.1f s, level %d", self._name, seconds, self.level)
        self._wait = self._clock.call_later(seconds, self._test)

    def _test(self) -> None:
        self._wait = None
        self._apply()

    # --- RDY ---------------------------------------------------------------------------------------------------------

    @property
    def _takes_turns(self) -> bool:
        return self.level > 0 or len(self._peers) > self._max_in_flight

    def _apply(self) -> None:
        """Give everyone what is due now."""
        if self._wait is not None or self._stopped:
            return
        if self._takes_turns:
            self._take_turns()
            return
        shares = [(peer, self._share(index)) for index, peer in enumerate(self._peers)]
        # First lower, then raise: the sum must not pass max_in_flight in between.
        for peer, share in sorted(shares, key=lambda pair: pair[1] - pair[0].ready):
            self._grant(peer, share)

    def _share(self, index: int) -> int:
        share, rest = divmod(self._max_in_flight, len(self._peers))
        return share + (index < rest)

    def _grant(self, peer: Peer, count: int) -> None:
        count = min(count, peer.max_ready)
        if count != peer.ready or (count and peer.counts_down):
            if count and not peer.ready:
                self._granted[peer] = self._clock.time()
            peer.set_ready(count)

    def _holds(self, peer: Peer) -> int:
        """Return how many places a connection takes up. A message past its deadline is the broker's again."""
        return peer.in_flight and peer.in_flight_at(self._clock.time())

    def _take_turns(self) -> None:
        places = min(1, self._max_in_flight) if self.level else self._max_in_flight
        is_paused = places == 0
        holders = sorted((peer for peer in self._peers if peer.ready), key=self._granted.__getitem__, reverse=True)
        for peer in holders[places:]:
            self._grant(peer, 0)
        for peer in holders[:places]:
            if peer.ready > 1:
                self._grant(peer, 1)
        # In backoff, messages still being worked on from before are no reason to let no test through. But a broker that
        # counts RDY down would send one test after the other.
        places -= sum(max(peer.ready, self._holds(peer)) for peer in self._peers if not self.level or peer.counts_down)
        if self.level:
            places -= sum(peer.ready for peer in self._peers if not peer.counts_down)
        waiting = [
            peer
            for peer in self._peers
            if not peer.ready and ((self.level and not peer.counts_down) or not self._holds(peer))
        ]
        # Who waited longest; among those with nothing in flight, since RDY 1 would bring the others nothing.
        waiting.sort(key=lambda peer: (self._holds(peer) > 0, self._granted[peer]))
        for peer in waiting[: max(0, places)]:
            self._grant(peer, 1)
        if not is_paused and not all(peer.ready for peer in self._peers):
            self._look_at_turns_later()

    def _look_at_turns_later(self) -> None:
        if self._turns is None:
            self._turns = self._clock.call_later(self._interval, self._next_turn)

    def _next_turn(self) -> None:
        self._turns = None
        if self._wait is not None or self._stopped:
            return
        if not self._takes_turns:
            for peer in self._peers:
                if peer.counts_down and peer.credit <= 0:
                    self._refill(peer)
            return
        now = self._clock.time()
        for peer in self._peers:
            if not peer.ready:
                continue
            since = self._granted[peer]
            idle = now - max(since, peer.last_message)
            # One that is always busy must not keep its place for ever either.
            if idle >= self._idle_timeout or now - since >= self._held_timeout:
                self._grant(peer, 0)
        self._take_turns()
