"""Messages in flight in one channel: who holds each of them, and until when.

An InFlight owns the owner ring and all deadlines. It knows numbers only: which session is behind an owner, and what
becomes of a message that timed out, is its channel's business.

    first delivery    an owner per seq in the ring, and one entry per run in a FIFO of deadlines, one FIFO per timeout
    anything else     a dict ``unusual`` (attempt > 1, TOUCHed, stragglers), and a heap of deadlines
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

from flintmq.broker.storage.journal import NEVER
from flintmq.kernel import Ring

__all__ = ["InFlight", "Runs", "Unusual"]

#: Seqs of a run that are looked at in one go when it times out.
LOOK_AT_ONCE = 20_000
#: FIFOs of deadlines up to which empty ones are kept for the next delivery.
KEPT_EMPTY = 4


class Runs:
    """Deadlines of first deliveries with one timeout: runs of seqs in the order they were sent."""

    __slots__ = ("_deadlines", "_firsts", "_head", "_stops", "timeout")

    def __init__(self, timeout: int) -> None:
        self.timeout = timeout
        self._firsts: list[int] = []
        self._stops: list[int] = []
        self._deadlines: list[int] = []
        self._head = 0

    def __bool__(self) -> bool:
        return self._head < len(self._firsts)

    @property
    def deadline(self) -> int:
        return self._deadlines[self._head]

    def take(self, most: int) -> tuple[int, int]:
        """Remove the first run, or the first ``most`` seqs of it."""
        first, stop = self._firsts[self._head], self._stops[self._head]
        if stop - first > most:
            stop = self._firsts[self._head] = first + most
        else:
            self._drop()
        return first, stop

    def _drop(self) -> None:
        self._head += 1
        if self._head == len(self._firsts):
            self._firsts.clear()
            self._stops.clear()
            self._deadlines.clear()
            self._head = 0
        elif self._head > 512 and self._head * 2 > len(self._firsts):
            del self._firsts[: self._head], self._stops[: self._head], self._deadlines[: self._head]
            self._head = 0

    def prune(self, lo: int) -> None:
        """Forget runs that lie wholly before ``lo``: all of them is finished."""
        while self._head < len(self._stops) and self._stops[self._head] <= lo:
            self._drop()

    def find(self, seq: int) -> int:
        """The deadline of the run that holds ``seq``, 0 if none does."""
        i = bisect_right(self._firsts, seq, self._head) - 1
        return self._deadlines[i] if i >= self._head and seq < self._stops[i] else 0


class Unusual:
    """A message in flight that is not an ordinary first delivery."""

    __slots__ = ("attempts", "deadline", "delivered", "owner", "published", "queued")

    def __init__(self, owner: int, attempts: int, delivered: int, deadline: int, published: int) -> None:
        self.owner = owner
        self.attempts = attempts
        self.delivered = delivered
        self.deadline = deadline
        #: The deadline under which it stands in the heap; any other entry there is from an earlier delivery.
        self.queued = deadline
        #: When it was published; 0 where nobody asks for latencies.
        self.published = published


class InFlight:
    def __init__(self, start: int) -> None:
        self.ring = Ring()
        self.ring.reset(start)
        self.unusual: dict[int, Unusual] = {}
        self._runs: dict[int, Runs] = {}
        self._deadlines: list[tuple[int, int]] = []
        # How often ``prune`` has had nothing to do since it last went through all runs.
        self._rested = 0
        # First deliveries that ended one by one while somebody goes through the ring in slices; one list for each.
        self._listeners: list[list[int]] = []

    @property
    def count(self) -> int:
        return self.ring.count + len(self.unusual)

    def owner(self, seq: int) -> int:
        """Return which session holds the message, 0 if none does."""
        message = self.unusual.get(seq)
        return message.owner if message is not None else self.ring.owner(seq)

    def deadline(self, seq: int) -> int:
        """Return until when the owner of a message in flight may keep it."""
        message = self.unusual.get(seq)
        if message is not None:
            return message.deadline
        return next((found for runs in self._runs.values() if (found := runs.find(seq))), 0)

    # --- Deliveries ------------------------------------------------------------------------------------------------

    def sent(self, first: int, stop: int, timeout: int, deadline: int) -> None:
        """Set the deadline of a run that the ring knows already."""
        runs = self._runs.get(timeout)
        if runs is None:
            runs = self._runs[timeout] = Runs(timeout)
        stops, deadlines = runs._stops, runs._deadlines
        if stops and stops[-1] == first and deadlines[-1] == deadline:
            stops[-1] = stop
        else:
            runs._firsts.append(first)
            stops.append(stop)
            deadlines.append(deadline)

    def hold(self, seq: int, message: Unusual) -> None:
        """Take in a delivery that is not an ordinary first one."""
        self.unusual[seq] = message
        self.queue(seq, message)

    def queue(self, seq: int, message: Unusual) -> None:
        """Push its deadline onto the heap."""
        message.queued = message.deadline
        heappush(self._deadlines, (message.deadline, seq))
        if len(self._deadlines) > 2 * len(self.unusual) + 1_000:
            # Messages that are requeued and delivered again at once leave their old entries behind.
            self._deadlines = [(other.queued, number) for number, other in self.unusual.items()]
            heapify(self._deadlines)

    def make_unusual(self, seq: int, published: int, timeout: int) -> Unusual:
        """Move a first delivery out of the ring; it stays in flight. It was probably sent with this timeout."""
        owner = self.ring.owner(seq)
        deadline = delivered = 0
        likely = self._runs.get(timeout)
        for runs in chain(() if likely is None else (likely,), self._runs.values()):
            deadline = runs.find(seq)
            if deadline:
                delivered = deadline - runs.timeout
                break
        self._release(seq)
        message = Unusual(owner, 1, delivered, deadline, published)
        self.hold(seq, message)
        return message

    # --- Ends ------------------------------------------------------------------------------------------------------

    def take(self, seq: int) -> int:
        """End a delivery; return how often the message was delivered."""
        message = self.unusual.pop(seq, None)
        if message is not None:
            return message.attempts
        self._release(seq)
        self.prune()
        return 1

    def _release(self, seq: int) -> None:
        self.ring.release(seq)
        for gone in self._listeners:
            gone.append(seq)

    def prune(self) -> None:
        """Forget the deadlines of runs that are finished. Called for every FIN."""
        if len(self._runs) > KEPT_EMPTY:
            self._prune_many()
            return
        lo = self.ring.lo
        for runs in self._runs.values():
            head, stops = runs._head, runs._stops
            if head < len(stops) and stops[head] <= lo:
                runs.prune(lo)

    def _prune_many(self) -> None:
        """The same where clients ask for many timeouts: all are gone through once in as many calls."""
        self._rested += 1
        if self._rested < len(self._runs):
            return
        self._rested = 0
        lo = self.ring.lo
        for runs in list(self._runs.values()):
            runs.prune(lo)
            if not runs:
                del self._runs[runs.timeout]

    def time_out(self, now: int, most: int) -> Iterator[tuple[int, int, int]]:
        """End deliveries whose time is up; yield (seq, owner, attempts) of each.

        Stops after ``most``, to within a slice of a run: the rest is still due.
        """
        left = most
        for runs in list(self._runs.values()):
            while left > 0 and runs and runs.deadline <= now:
                for seq, owner in self.ring.held(*runs.take(LOOK_AT_ONCE)):
                    self._release(seq)
                    left -= 1
                    yield seq, owner, 1
                left -= 1
            if not runs and len(self._runs) > KEPT_EMPTY:
                # A client may ask for any timeout: do not keep a FIFO for each ever seen.
                self._runs.pop(runs.timeout, None)
        while left > 0 and self._deadlines and self._deadlines[0][0] <= now:
            queued, seq = heappop(self._deadlines)
            left -= 1
            message = self.unusual.get(seq)
            if message is None or message.queued != queued:
                continue
            if message.deadline > now:
                self.queue(seq, message)
                continue
            del self.unusual[seq]
            yield seq, message.owner, message.attempts

    def next_deadline(self) -> int:
        """Return the earliest deadline; very late if there is none."""
        deadline = NEVER << 8
        for runs in self._runs.values():
            if runs and runs.deadline < deadline:
                deadline = runs.deadline
        if self._deadlines and self._deadlines[0][0] < deadline:
            deadline = self._deadlines[0][0]
        return deadline

    def reset(self, seq: int) -> tuple[Any, ...]:
        """Hold nothing any more; deliveries go on at ``seq``. Return the containers that are left over, to be freed."""
        spent = self.unusual, self._deadlines
        self.ring.reset(seq)
        self._runs.clear()
        self.unusual, self._deadlines = {}, []
        return spent

    # --- Looking through -------------------------------------------------------------------------------------------

    def slices(self, size: int) -> Iterator[list[int]]:
        """Yield the seqs of the ring's first deliveries in ascending slices, each as it is when it is asked for.

        A delivery that ended one by one since the first slice is among them all the same: the message is requeued, or
        held elsewhere. Only those that a client finished in the usual way may be missing.
        """
        gone: list[int] = []
        self._listeners.append(gone)
        try:
            at, stop = self.ring.lo, self.ring.hi
            while at < stop:
                until = min(at + size, stop)
                found = [seq for seq, _ in self.ring.held(at, until)]
                found += [seq for seq in gone if at <= seq < until]
                yield sorted(set(found))
                at = until
        finally:
            self._listeners = [other for other in self._listeners if other is not gone]
