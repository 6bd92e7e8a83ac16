"""Who gets which message: a channel is a cursor on its topic's log.

A Channel owns which messages are waiting, in flight, deferred, requeued or leaving, and which sessions may be sent
more. A message is in exactly one of these states, or finished. It reads frames from the log and hands them to sessions;
how they are stored or sent is not its business. Seqs from ``SIDE`` on are those of messages for this channel alone.

    waiting      ranges of seqs, never sent
    in flight    see in_flight.py
    requeued     a deque (at once) or a heap by due time (deferred); attempts in a dict
    leaving      see leaving.py: nobody gets them, they are being copied elsewhere

Size: deliveries, answers and operators move messages from one state to another, each in one step; so what changes the
states is side by side. Parts that read them, or have one to themselves, are apart: Needed, InFlight, Leaving.

Nothing here takes longer because much is waiting or deferred: it is done in slices, or large containers are replaced.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

from flintmq.broker.delivery.dead_letters import REQUEUED, TIMED_OUT
from flintmq.broker.delivery.give_back import GiveBack
from flintmq.broker.delivery.in_flight import InFlight, Unusual
from flintmq.broker.delivery.latency import Latency, publish_time
from flintmq.broker.delivery.leaving import Leaving
from flintmq.broker.delivery.needed import Needed
from flintmq.broker.delivery.redrive import Ended, Redrive
from flintmq.broker.delivery.seek import Seek
from flintmq.broker.delivery.slices import discard
from flintmq.broker.delivery.snapshot import Part, restored, snapshot_parts
from flintmq.broker.limits import Pace
from flintmq.broker.settings import ChannelSettings, Settings
from flintmq.broker.storage.disk import pack_numbers
from flintmq.broker.storage.journal import NEVER, SIDE
from flintmq.broker.storage.ranges import Ranges
from flintmq.errors import DamageError, ProtocolError
from flintmq.kernel import Block, Heap
from flintmq.protocol.wire import is_ephemeral

if TYPE_CHECKING:
    from flintmq.broker.delivery.topic import Topic
    from flintmq.broker.net.lanes import FinishLane
    from flintmq.broker.net.session import Session

__all__ = ["Channel"]

logger = logging.getLogger(__name__)

#: A run of frames in one send, at most.
RUN_BYTES = 256 << 10
#: What a pump may send before it hands the loop back.
PUMP_BYTES = 2 << 20
#: Consumers that are sent to in one go.
ROUND = 64
#: Bytes that a run counts at least, or a message where messages are sent one by one: a pump makes 5000 sends at most.
SINGLE_BYTES = PUMP_BYTES // 5_000
#: Deadlines of first deliveries are rounded up to this (8.4 ms), so that one entry serves many small runs.
QUANTUM = 1 << 23
#: Messages that one scan of a channel requeues before it hands the loop back.
EXPIRE_AT_ONCE = 5_000
#: Messages or ranges of them that are dropped before the loop is handed back.
DROP_AT_ONCE = 3_000
#: Requeued messages, or ranges of others, that one pump passes over because nobody gets them, before it hands the loop
#: back.
SKIP_AT_ONCE = 1_000
#: Deferred messages that an ephemeral channel holds where ``--mem-queue-size`` is 0.
LEAST_DEFERRED = 1_000
_MOST_ATTEMPTS = 65_535
#: How near a consumer is to this node: see Session.locality.
ZONE, REGION, GLOBAL = 0, 1, 2


class Channel:
    """A cursor on a topic's log, with its consumers.

    Size: a message changes its state in one step, so the states are side by side; what has many of a kind is an object
    already (ranges, InFlight, Leaving). Counters and flags are flat because a run or a FIN looks at each of them.
    """

    def __init__(self, topic: Topic, name: str, ident: int, start: int) -> None:
        self.topic = topic
        self.broker = topic.broker
        self.name = name
        self.id = ident
        self.ephemeral = is_ephemeral(name)
        # Memory is all there is for its messages: beyond a limit they are dropped.
        self.bounded = self.ephemeral or topic.ephemeral
        if self.bounded:
            topic.awake[self] = None
        self.paused = False
        self.exiting = False
        #: Replaced, never changed.
        self.settings = topic.broker.settings.channel(topic.name, name)
        # Waiting: of what lies before ``seen``, the ranges; of what lies beyond, everything the topic has pumped.
        self.waiting = Ranges()
        self.seen = start
        self.side = Ranges()
        #: The seek that is under way: until it has ended nothing is delivered.
        self.seeking: Seek | None = None
        self.in_flight = InFlight(start)
        self.ring = self.in_flight.ring
        # Requeued: at once, or when due; and how often those were delivered before.
        self.requeued: deque[int] = deque()
        self.deferred = Heap()
        self.attempts: dict[int, int] = {}
        self.leaving = Leaving(self)
        #: What brings dead letters back to here, or did last.
        self.redrive: Redrive | Ended | None = None
        # Consumers; those in ``ready`` may be able to take more.
        self.sessions: dict[int, Session] = {}
        self.ready: deque[Session] = deque()
        #: Requeues what lost consumers held; made when there are any, and only where the options ask for it.
        self.giving_back: GiveBack | None = None
        self._requeued_next = False
        # How many more this pump may pass over.
        self._skips = 0
        #: Where FINs that came in one turn meet; only the broker assigns.
        self.lane: FinishLane | None = None
        #: How fast it may deliver; None: as fast as it can.
        self.pace = Pace.of(self)
        # Counters.
        self._handed = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.dropped_count = 0
        #: Messages sent from memory to consumers of the same zone, of the same region, and to all others.
        self.sent_from_memory = [0, 0, 0]
        #: How long messages take; None unless the options ask for it.
        self.latency: Latency | None = None
        if self.broker.options.e2e_processing_latency_percentiles:
            self.latency = Latency(self.broker.options.e2e_processing_latency_window_time)
        # For the journal: rows of what was requeued since it last asked.
        self._back = array("q")
        self._noted = False
        #: What of the log it still needs.
        self.needed = Needed(self)
        #: The deadline at which the scan will look here; only it assigns.
        self.scheduled = NEVER << 8

    # --- What the numbers are --------------------------------------------------------------------------------------

    @property
    def message_count(self) -> int:
        """Messages handed over by the topic."""
        return self._handed + self.topic.pumped - self.seen

    @property
    def depth(self) -> int:
        return self.waiting.total + self.topic.pumped - self.seen + self.side.total + len(self.requeued)

    @property
    def backend_depth(self) -> int:
        """The part of the depth that is not in memory."""
        if self.ephemeral or self.topic.ephemeral:
            return 0
        memory = self.topic.log.blocks[0].base if self.topic.log.blocks else self.topic.log.end
        count = self.side.total + self.waiting.count_before(memory)
        if self.seen < self.topic.pumped:
            count += max(0, min(memory, self.topic.pumped) - self.seen)
        return count

    @property
    def in_flight_count(self) -> int:
        return self.in_flight.count

    @property
    def leaving_count(self) -> int:
        """Messages that are being copied elsewhere, or will be, and are not finished until then."""
        return len(self.leaving) + self.leaving.expired.total

    @property
    def unusual(self) -> dict[int, Unusual]:
        """Messages in flight that are not ordinary first deliveries."""
        return self.in_flight.unusual

    @property
    def sought(self) -> int | None:
        """Where a channel that was just made will begin, while it looks for that place."""
        return self.seeking.start if self.seeking is not None and self.seeking.noted else None

    def owner(self, seq: int) -> int:
        """Which session holds the message; 0 if none does. It may be gone, and its message in flight all the same."""
        return self.in_flight.owner(seq)

    def deadline(self, seq: int) -> int:
        """Until when the owner of a message in flight may keep it."""
        return self.in_flight.deadline(seq)

    def is_ready(self, seq: int) -> bool:
        """Would it be delivered next, or soon, to whoever can take it?"""
        unsent = seq in self.waiting or self.seen <= seq < self.topic.pumped or seq in self.side
        return unsent or seq in self.requeued

    # --- From the topic --------------------------------------------------------------------------------------------

    def catch_up(self, seq: int) -> None:
        """Everything up to ``seq`` that the topic pumped is waiting here."""
        if self.seen < seq and self.seeking is None:
            self.waiting.add(self.seen, seq)
            self._handed += seq - self.seen
            self.seen = seq

    def hand_deferred(self, messages: list[tuple[int, int]]) -> None:
        """The topic pumps deferred messages, (seq, due): they are not waiting, they wait for their time."""
        if self.seeking is not None:
            self.seeking.postpone(partial(self.hand_deferred, messages))
            return
        now, waiting, seen = self.broker.clock.now(), self.waiting, self.seen
        dues, seqs = array("q"), array("q")
        for seq, due in messages:
            if seen < seq:
                waiting.add(seen, seq)
            seen = seq + 1
            if due <= now:
                self.requeued.append(seq)
            else:
                dues.append(due)
                seqs.append(seq)
        self._handed += seen - self.seen
        self.seen = seen
        if self.bounded and len(dues) > self._room_for_deferred:
            room = self._room_for_deferred
            self.dropped_count += len(dues) - room
            del dues[room:], seqs[room:]
        if dues:
            self.deferred.extend(dues, seqs)
            self._watch(min(dues))

    @property
    def _room_for_deferred(self) -> int:
        """How many more deferred messages an ephemeral channel, or one of an ephemeral topic, may hold."""
        return max(0, (self.topic.settings.mem_queue_size or LEAST_DEFERRED) - len(self.deferred))

    def skip(self, first: int, stop: int) -> None:
        """The topic's backlog was emptied before it was pumped: these were never handed over."""
        if self.seeking is not None:
            self.seeking.postpone(partial(self.skip, first, stop))
            return
        self.catch_up(first)
        self.seen = stop

    def drop_excess(self) -> None:
        """An ephemeral channel holds no more than ``--mem-queue-size``: the newest are dropped.

        Unless consumers take them as fast as they can; a channel whose pace is used up does not let them.
        """
        self.catch_up(self.topic.pumped)
        most = excess = self.depth - self.topic.settings.mem_queue_size
        if excess <= 0 or self.seeking is not None:
            return
        if self.ready and not self.paused and (self.pace is None or self.pace.allowance):
            return
        waiting = self.waiting
        while excess > 0 and waiting:
            n = min(excess, waiting.stop - waiting.last)
            waiting.remove(waiting.stop - n, waiting.stop)
            excess -= n
        while excess > 0 and self.requeued:
            self.attempts.pop(self.requeued.pop(), None)
            excess -= 1
        self.dropped_count += most - excess

    def drop_oldest(self, most: int, before: int) -> tuple[int, bool]:
        """Drop up to ``most`` waiting or requeued messages before this seq, the oldest first.

        Return how many, and whether that is all: otherwise call again in another loop turn.
        """
        self.catch_up(self.topic.pumped)
        waiting, requeued = self.waiting, self.requeued
        left, steps = most, DROP_AT_ONCE
        while left > 0 and steps > 0:
            steps -= 1
            oldest = min(waiting.first, before) if waiting else before
            if requeued and requeued[0] < oldest:
                self._drop_requeued()
                left -= 1
            elif oldest < before:
                count = min(left, waiting.first_stop - oldest, before - oldest)
                waiting.take(count)
                self.finished(oldest, oldest + count)
                left -= count
            else:
                break
        # Not in the order of their age: others may stand behind one that stays.
        for _ in range(min(len(requeued), steps) if left > 0 else 0):
            steps -= 1
            if left > 0 and requeued[0] < before:
                self._drop_requeued()
                left -= 1
            else:
                requeued.rotate(-1)
        self.dropped_count += most - left
        return most - left, steps > 0

    def _drop_requeued(self) -> None:
        seq = self.requeued.popleft()
        self.attempts.pop(seq, None)
        self.finished(seq, seq + 1)

    # --- Consumers -------------------------------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        self.sessions[session.ident] = session
        self.topic.touched += 1
        session.take_timeout(self.settings.msg_timeout)

    def remove(self, session: Session) -> None:
        """The session is gone. What it holds stays in flight until its deadline, as in NSQ, or is requeued."""
        if self.sessions.pop(session.ident, None) is None:
            return
        self.topic.touched += 1
        if session.listed:
            self.ready.remove(session)
            session.listed = False
        # The end of the broker is no reason: it keeps what is in flight, with its attempts.
        if session.in_flight and self.broker.options.requeue_on_disconnect and not self.broker.stopping:
            if self.giving_back is None:
                self.giving_back = GiveBack(self)
            self.giving_back.add(session.ident, session.in_flight)
        if self.ephemeral and not self.sessions and not self.exiting:
            self.broker.later(self._vanish)

    def _vanish(self) -> None:
        if not self.sessions and not self.exiting:
            self.topic.delete_channel(self.name)

    def wake(self, session: Session) -> None:
        """The session may be able to take more: RDY, FIN, REQ, a timeout, a peer that reads again."""
        if not session.listed and session.room > 0:
            session.listed = True
            self.ready.append(session)
            self.topic.awake[self] = None

    # --- Sending ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what is waiting to the sessions that can take it, in turns."""
        ready = self.ready
        if not ready or self.paused or self.exiting or self.seeking is not None:
            return
        if self.seen < self.topic.pumped:
            self.catch_up(self.topic.pumped)
        self._skips = SKIP_AT_ONCE
        if not self.broker.topology_aware:
            self._pump(ready)
            return
        # Those nearby first, as long as they take any: the zone, the region, then everybody.
        near = [deque(session for session in ready if session.nearness == rank) for rank in (ZONE, REGION, GLOBAL)]
        for group in near:
            self._pump(group)
        self.ready = deque(chain(*near))

    def _pump(self, ready: deque[Session]) -> None:
        budget = PUMP_BYTES
        waiting, requeued, side = self.waiting, self.requeued, self.side
        turns = len(ready)
        pace = self.pace
        while ready:
            available = waiting.total + len(requeued) + side.total
            if pace is not None and available:
                available = min(available, pace.allowance)
            if not available:
                return
            ordinary = available == waiting.total
            if turns > 1 and available > 1 and ordinary and pace is None:
                sent, served = self._send_round(ready, turns, budget)
                if served:
                    budget -= max(sent, served * SINGLE_BYTES)
                    turns = turns - served or len(ready)
                    if budget <= 0 and ready:
                        self.broker.turns.pump_later(self)
                        return
                    continue
            session = ready[0]
            room = session.room
            if room > 0:
                # Share what there is among those whose turn is still to come in this round: one of three ready
                # clients must not take a whole burst.
                share = available if turns == 1 else -(-available // turns)
                if room > share:
                    room = share
                before = session.message_count
                sent = self._send_run(session, room) if ordinary else self._send(session, room)
                if sent < 0:
                    # Not in memory, or in another turn: pump is called again.
                    return
                budget -= max(sent, SINGLE_BYTES)
                if pace is not None:
                    pace.spend(session.message_count - before)
            ready.popleft()
            if session.ready_count > session.in_flight and session.room > 0:
                ready.append(session)
            else:
                session.listed = False
            turns = turns - 1 or len(ready)
            if budget <= 0 and ready:
                self.broker.turns.pump_later(self)
                return

    def _send(self, session: Session, limit: int) -> int:
        """Send up to ``limit`` messages; the bytes sent, or -1 if everything must be read from the disk first."""
        sent = -1
        if self.requeued and (self._requeued_next or not self.waiting):
            sent = self._send_singly(session, self.requeued, max(1, limit // 2) if self.waiting else limit)
        if sent < 0 and self.side:
            sent = self._send_side(session, limit)
        if sent < 0 and self.waiting:
            sent = self._send_run(session, limit)
        if sent < 0 and self.requeued:
            sent = self._send_singly(session, self.requeued, limit)
        # Neither may starve the other: a message that is requeued for ever, or a stream of new ones.
        self._requeued_next = not self._requeued_next
        return sent

    def _send_run(self, session: Session, limit: int) -> int:
        waiting = self.waiting
        first, most = waiting.front()
        topic = self.topic
        try:
            block = topic.log.block(first, self)
        except DamageError as exc:
            self._lose(exc)
            return 0
        if block is None:
            return -1
        if topic.settings.ttl:
            fresh = topic.expiry.too_old_from(block, first, first + most)
            if fresh > first:
                if not self._skips:
                    return -1
                self.leaving.expire_before(fresh)
                return -1 if self.leaving.expiring or self._skipped() else 0
        if most > limit:
            most = limit
        if session.sample_rate:
            count = block.cut(first, min(most, RUN_BYTES // SINGLE_BYTES), RUN_BYTES)
            waiting.take(count)
            return self._send_sample(session, block, first, count)
        ring = self.ring
        count = ring.send_run(block, first, most, RUN_BYTES, session.ident, session.fd)
        if not count:
            self._unburden(first + most)
            count = ring.send_run(block, first, most, RUN_BYTES, session.ident, session.fd)
        start, stop = block.start, block.stop
        waiting.take(count)
        if self.latency is not None:
            self.latency.sent(block, first, first + count, ring.lo)
        self._set_deadline(first, first + count, session.deliver_timeout, self.broker.clock.now())
        session.in_flight += count
        session.message_count += count
        if topic.log.from_memory:
            self.sent_from_memory[session.locality] += count
        if ring.sent != stop - start:
            session.send_run(block.view[start + ring.sent : stop])
        return stop - start

    def _send_round(self, ready: deque[Session], turns: int, budget: int) -> tuple[int, int]:
        """Send a run to each of the next ``turns`` sessions in one go: many consumers that take few messages each.

        Return the bytes, and how many sessions were served and have left the front of ``ready``; none where it is not
        as simple as that.
        """
        topic, waiting = self.topic, self.waiting
        if topic.settings.ttl:
            return 0, 0
        first, most = waiting.front()
        available = waiting.total
        # A round ends where the first range does.
        beyond = available - most
        limits: list[int] = []
        fds: list[int] = []
        owners: list[int] = []
        for session in islice(ready, min(turns, ROUND)):
            room = session.room
            if room <= 0 or session.fd < 0 or session.sample_rate or available <= beyond:
                break
            # Each has its share, as in ``_pump``.
            share = available if turns == 1 else -(-available // turns)
            if room > share:
                room = share
            turns -= 1
            available -= room
            limits.append(room)
            fds.append(session.fd)
            owners.append(session.ident)
        if len(fds) < 2:
            return 0, 0
        try:
            block = topic.log.block(first, self)
        except DamageError:
            block = None
        if block is None:
            return 0, 0
        ring = self.ring
        counts: list[int] = []
        size = ring.send_each(block, first, first + most, limits, RUN_BYTES, budget, owners, fds, counts)
        if not counts:
            return 0, 0
        # What the last one's socket did not take.
        rest = block.view[block.start + ring.sent : block.stop]
        stop = first + sum(counts)
        waiting.take(stop - first)
        if self.latency is not None:
            self.latency.sent(block, first, stop, ring.lo)
        now = self.broker.clock.now()
        from_memory = topic.log.from_memory
        timeout = ready[0].deliver_timeout
        seq = first
        for count in counts:
            session = ready.popleft()
            if session.deliver_timeout != timeout:
                self._set_deadline(first, seq, timeout, now)
                first, timeout = seq, session.deliver_timeout
            seq += count
            session.in_flight += count
            session.message_count += count
            if from_memory:
                self.sent_from_memory[session.locality] += count
            if seq == stop and rest:
                session.send_run(rest)
            if session.ready_count > session.in_flight and session.room > 0:
                ready.append(session)
            else:
                session.listed = False
        self._set_deadline(first, seq, timeout, now)
        return size, len(counts)

    def _set_deadline(self, first: int, stop: int, timeout: int, now: int) -> None:
        """These were sent now, and time out after ``timeout``."""
        deadline = (now + timeout + QUANTUM - 1) & -QUANTUM
        self.in_flight.sent(first, stop, timeout, deadline)
        if deadline < self.scheduled:
            self._watch(deadline)

    def _send_sample(self, session: Session, block: Block, first: int, count: int) -> int:
        """A client that wants a sample: what it does not get is gone for the whole channel.

        All of them count as sent, small ones as more than their bytes: a small sample of very many, or one of very
        many small messages, must not take the turn from others.
        """
        size = max(block.stop - block.start, count * SINGLE_BYTES)
        for seq in range(first, first + count):
            # NSQ's own rule: rate + 1 in a hundred pass.
            if random.randrange(100) > session.sample_rate:
                self.finished(seq, seq + 1)
                continue
            block.find(seq)
            frame = block.view[block.start : block.stop]
            self._hold(session, seq, 1, frame)
            session.send_run(frame)
        return size

    def _send_side(self, session: Session, limit: int) -> int:
        """Messages for this channel alone; how often each was delivered is in its frame."""
        batch: deque[int] = deque()
        first, stop = self.side.first, self.side.first_stop
        batch.extend(range(first, min(stop, first + limit)))
        count = len(batch)
        sent = self._send_singly(session, batch, limit)
        self.side.take(count - len(batch))
        return sent

    def _send_singly(self, session: Session, seqs: deque[int], limit: int) -> int:
        """Send from the front of ``seqs`` what can be sent; the bytes, or -1 if the first one must be read.

        -1 also if this pump has passed over as many as it may: then another one is planned.
        """
        if not self._skips:
            return -1
        frames: list[bytearray] = []
        size = 0
        expiry = self.topic.expiry if self.topic.settings.ttl else None
        while seqs and len(frames) < limit and size < RUN_BYTES:
            seq = seqs[0]
            try:
                frame = self.topic.frame(seq)
            except DamageError as exc:
                seqs.popleft()
                logger.error("CHANNEL(%s): message %d cannot be read - %s", self.name, seq, exc)
                self.attempts.pop(seq, None)
                self.finished(seq, seq + 1)
                if self._skipped():
                    break
                continue
            if frame is None:
                break
            seqs.popleft()
            before = self.attempts.pop(seq, -1)
            if before < 0:
                # Never delivered by us: a deferred message, or one of the side log that brings its own count.
                before = int.from_bytes(frame[16:18], "big") - 1
            if expiry is not None and expiry.is_too_old(seq, frame, before):
                self.leaving.expire_single(seq, before)
                if self._skipped():
                    break
                continue
            if session.sample_rate and random.randrange(100) > session.sample_rate:
                self.finished(seq, seq + 1)
                if self._skipped():
                    break
                continue
            attempts = min(before + 1, _MOST_ATTEMPTS)
            frame[16:18] = attempts.to_bytes(2, "big")
            self._hold(session, seq, attempts, frame)
            frames.append(frame)
            size += max(len(frame), SINGLE_BYTES)
        if frames:
            session.send_run(memoryview(b"".join(frames)))
            return size
        return -1 if seqs else 0

    def _skipped(self) -> bool:
        """A message was passed over; was it the last one that this pump may pass over?"""
        self._skips -= 1
        if not self._skips:
            self.broker.turns.pump_later(self)
        return not self._skips

    def _hold(self, session: Session, seq: int, attempts: int, frame: bytearray | memoryview) -> None:
        now = self.broker.clock.now()
        deadline = now + session.deliver_timeout
        published = publish_time(frame) if self.latency is not None else 0
        self.in_flight.hold(seq, Unusual(session.ident, attempts, now, deadline, published))
        self._watch(deadline)
        session.in_flight += 1
        session.message_count += 1
        if self.topic.log.from_memory:
            self.sent_from_memory[session.locality] += 1

    def _unburden(self, stop: int) -> None:
        """The ring would span too much: its oldest deliveries become unusual ones."""
        ring = self.ring
        for seq, _ in ring.held(ring.lo, max(ring.lo, stop - ring.limit // 2)):
            self._make_unusual(seq)

    def _make_unusual(self, seq: int, timeout: int = 0) -> Unusual:
        """Move a first delivery, probably one with this timeout, out of the ring."""
        published = self.latency.published(seq) if self.latency is not None else 0
        return self.in_flight.make_unusual(seq, published, timeout)

    def _lose(self, damage: DamageError) -> None:
        logger.error("CHANNEL(%s): messages %d to %d are lost - %s", self.name, damage.first, damage.stop - 1, damage)
        self.waiting.remove(damage.first, damage.stop)
        self.finished(damage.first, damage.stop)

    # --- Answers ---------------------------------------------------------------------------------------------------

    def finish_run(self, session: Session, data: bytearray, pos: int, stop: int) -> int:
        """Apply consecutive FINs of the usual kind; where the first other command stands."""
        pos = self.ring.finish_run(data, pos, stop, session.ident, self._prefix())
        if self.ring.finished:
            session.in_flight -= self.ring.finished
            session.finish_count += self.ring.finished
            self._finished_some()
            self.wake(session)
        return pos

    def finish_each(self, sessions: list[Session], fds: list[int], data: bytearray, now: float) -> int:
        """The same for what is read from plain sockets now, as long as these bring FINs alone; how many did.

        Of the next session some FINs may be done as well: see ``Ring.finish_each``.
        """
        counts: list[int] = []
        owners = [session.ident for session in sessions]
        read = self.ring.finish_each(fds, owners, data, self._prefix(), counts)
        ready = self.ready
        for session, count in zip(sessions, counts, strict=False):
            if count:
                session.in_flight -= count
                session.finish_count += count
                session.last_command = now
                if not session.listed:
                    # As good as always there is room for more now; the pump looks again.
                    session.listed = True
                    ready.append(session)
        finished = sum(counts)
        if finished:
            self.topic.awake[self] = None
            self.broker.counters.lane_finished += finished
            self._finished_some()
        return read

    def _prefix(self) -> int:
        """The node id of all messages in the ring, at its place in their ids."""
        ids = self.topic.ids
        if ids.single >= 0:
            return ids.single
        ring = self.ring
        last = max(ring.lo, ring.hi - 1)
        if ring.lo < ids.last_step(last):
            # Messages of several node ids are in flight: those of the older ones are finished one by one.
            for seq, _ in ring.held(ring.lo, ids.last_step(last)):
                self._make_unusual(seq)
        return ids.prefix(last)

    def _finished_some(self) -> None:
        """First deliveries were finished, in the ring."""
        self.in_flight.prune()
        if self.latency is not None:
            self.latency.finished(self.ring.take_done(), self.broker.clock.wall(), self.broker.clock.now())
        if not self._noted:
            self._note()

    def _note(self) -> None:
        """Something was finished or requeued: the journal asks for it soon."""
        self._noted = True
        self.broker.journal.touch(self)
        self.broker.soon(self)

    def finish(self, session: Session, seq: int) -> None:
        latency = self.latency
        if latency is not None:
            message = self._owned(session, seq, "FIN")
            published = message.published if message is not None else latency.published(seq)
            clock = self.broker.clock
            latency.sketch.add(clock.wall() - published, 1, clock.now())
        self._take(session, seq, "FIN")
        self.finished(seq, seq + 1)
        session.finish_count += 1
        self.wake(session)

    def requeue(self, session: Session, seq: int, delay: int) -> None:
        attempts = self._take(session, seq, "REQ")
        self.requeue_count += 1
        session.requeue_count += 1
        if not self._gave_up(seq, attempts, REQUEUED):
            self.requeue_at(seq, attempts, self.broker.clock.now() + delay if delay > 0 else 0)
        self.wake(session)

    def give_back(self, seq: int) -> None:
        """Requeue what a lost consumer held, as if it had asked for it: the attempt counts, and there is no delay."""
        attempts = self.in_flight.take(seq)
        self.requeue_count += 1
        if not self._gave_up(seq, attempts, REQUEUED):
            self.requeue_at(seq, attempts, 0)

    def touch(self, session: Session, seq: int) -> None:
        message = self._owned(session, seq, "TOUCH") or self._make_unusual(seq, session.deliver_timeout)
        longest = message.delivered + self.broker.options.max_msg_timeout
        # Only the deadline moves: the heap's entry is pushed on when it comes up.
        message.deadline = min(self.broker.clock.now() + session.msg_timeout, longest)
        if message.deadline < message.queued:
            self.in_flight.queue(seq, message)
        self._watch(message.deadline)

    def _owned(self, session: Session, seq: int, verb: str) -> Unusual | None:
        """The message if it is an unusual one; ProtocolError if ``session`` does not hold it."""
        message = self.unusual.get(seq)
        owner = message.owner if message is not None else self.ring.owner(seq)
        if owner != session.ident:
            reason = "client does not own message" if owner else "ID not in flight"
            text = self.topic.ids.text(seq).decode()
            raise ProtocolError(f"E_{verb}_FAILED", f"{verb} {text} failed {reason}", fatal=False)
        return message

    def _take(self, session: Session, seq: int, verb: str) -> int:
        """It is no longer in flight; how often it was delivered."""
        self._owned(session, seq, verb)
        session.in_flight -= 1
        return self.in_flight.take(seq)

    def _let_go(self, owner: int) -> None:
        """A session has lost one that it held."""
        session = self.sessions.get(owner)
        if session is not None:
            session.in_flight -= 1
            self.wake(session)

    def finished(self, first: int, stop: int) -> None:
        """These are finished, whatever state they were in."""
        self.ring.add_done(first, stop)
        if self.latency is not None:
            # What the ring collects from here on is to be measured.
            self.latency.done += self.ring.take_done()
        self._note()

    def requeue_at(self, seq: int, attempts: int, due: int) -> None:
        """Requeue a message that is in no state now, for ``due`` unless that is 0."""
        if due and self.bounded and not self._room_for_deferred:
            self.dropped_count += 1
            self.finished(seq, seq + 1)
            return
        self._note_back(seq, attempts, due, self.broker.clock.wall() + due - self.broker.clock.now() if due else 0)
        self.attempts[seq] = attempts
        if due:
            self.deferred.push(due, seq)
            self._watch(due)
        else:
            self.requeued.append(seq)
        self._note()

    def note_attempts(self, seq: int, attempts: int) -> None:
        """Tell the journal how often a message was delivered that is not finished."""
        self._note_back(seq, attempts, 0, 0)
        self._note()

    def _note_back(self, seq: int, attempts: int, due: int, wall: int) -> None:
        """A row for the journal: whole or, if a number is too large for it, not at all."""
        self._back += array("q", (seq, attempts, due, wall))

    # --- Time ------------------------------------------------------------------------------------------------------

    def _watch(self, deadline: int) -> None:
        if deadline < self.scheduled:
            self.broker.scan.watch(self, deadline)

    def next_deadline(self) -> int:
        """When the scan has to look here again; very late if never."""
        deadline = self.in_flight.next_deadline()
        if len(self.deferred) and self.deferred.first_due() < deadline:
            deadline = self.deferred.first_due()
        return deadline

    def expire(self, now: int) -> bool:
        """Requeue what timed out and what is due; was there anything, or is there more?"""
        left = EXPIRE_AT_ONCE
        for seq, owner, attempts in self.in_flight.time_out(now, left):
            self._timed_out(seq, owner, attempts)
            left -= 1
        while left > 0 and len(self.deferred) and self.deferred.first_due() <= now:
            self.requeued.append(self.deferred.pop())
            left -= 1
        if left == EXPIRE_AT_ONCE:
            # Its share of the turn may have gone into runs of which nothing is in flight any more.
            return self.in_flight.next_deadline() <= now
        self.pump()
        if self.bounded:
            self.drop_excess()
        return True

    def _timed_out(self, seq: int, owner: int, attempts: int) -> None:
        self.timeout_count += 1
        self._let_go(owner)
        if not self._gave_up(seq, attempts, TIMED_OUT):
            self.requeue_at(seq, attempts, 0)

    def take_ready(self, seqs: Iterable[int]) -> dict[int, int]:
        """Take those of ``seqs`` that wait or are requeued out of that state; how often each was delivered."""
        self.catch_up(self.topic.pumped)
        wanted = set(seqs)
        taken = [seq for seq in sorted(wanted) if self.waiting.remove(seq, seq + 1)]
        wanted.difference_update(taken)
        requeued = self.requeued
        # Redrives go through them from the front.
        while wanted and requeued and requeued[0] in wanted:
            seq = requeued.popleft()
            wanted.remove(seq)
            taken.append(seq)
        found = wanted.intersection(requeued) if wanted else ()
        if found:
            self.requeued = deque(seq for seq in requeued if seq not in found)
            taken += sorted(found)
        return {seq: self.attempts.pop(seq, 0) for seq in taken}

    # --- Dead letters ------------------------------------------------------------------------------------------------

    def _gave_up(self, seq: int, attempts: int, reason: str) -> bool:
        """Was this the last attempt? Then the message is on its way to the dead-letter topic."""
        most = self.settings.max_attempts
        if not most or attempts < most:
            return False
        self.leaving.give_up(seq, attempts, reason)
        return True

    def begin_redrive(
        self, source: Channel, most: int, rate: int, reason: str = "", *, moved: int = 0, stop: int = NEVER
    ) -> None:
        """Bring back what died here and is in the channel ``source`` of the dead-letter topic now: see ``Redrive``."""
        self.redrive = Redrive(self, source, most, rate, reason, moved=moved, stop=stop)

    def redrive_ended(self, ended: Ended) -> None:
        """Remember how the last redrive ended."""
        self.redrive = ended

    def receive(self, places: Iterable[int]) -> None:
        """Messages of the side log came for this channel alone. Their seqs ascend, also from call to call."""
        for place in places:
            self.side.add(place, place + 1)
            self._handed += 1
        self.topic.touched += 1
        self.pump()

    # --- Operators -------------------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        if self.paused != paused:
            self.paused = paused
            self.topic.touched += 1
            if not (self.ephemeral or self.topic.ephemeral):
                self.broker.journal.note("channel_pause", self.id, paused)
            self.broker.upkeep.structure_changed(self.ephemeral or self.topic.ephemeral)
        if not paused:
            for session in self.sessions.values():
                self.wake(session)
            self.pump()

    def take_settings(self, settings: Settings) -> None:
        """Take what holds for it now."""
        self.change_settings(settings.channel(self.topic.name, self.name))

    def change_settings(self, settings: ChannelSettings) -> None:
        """Take other settings; they hold at once, for deliveries from now on."""
        before, self.settings = self.settings, settings
        if settings.delivery_rate != before.delivery_rate:
            self.pace = Pace.of(self)
            self.broker.turns.pump_later(self)
        if settings.msg_timeout != before.msg_timeout:
            for session in self.sessions.values():
                session.take_timeout(settings.msg_timeout)

    def empty(self) -> None:
        """Drop everything: waiting, in flight, deferred. Consumers stay."""
        self._end_seek()
        self.catch_up(self.topic.pumped)
        self.broker.journal.note("empty", self.id, self.seen, self.topic.side_end)
        self.side.clear()
        self._drop_all()
        if self.redrive is not None:
            self.redrive.emptied()
        self.broker.journal.flush()
        self.broker.soon(self)

    def _drop_all(self, leaving: Container[int] = ()) -> None:
        """Forget everything of the log; copies of those that are ``leaving`` are still made. The journal was told."""
        spent = [*self.in_flight.reset(self.seen), self.requeued, self.attempts, self.leaving.clear(leaving)]
        self.waiting.clear()
        self.requeued = deque()
        self.deferred.clear()
        self.attempts = {}
        self._back = array("q")
        discard(self.broker.later, spent)
        for session in self.sessions.values():
            session.in_flight = 0
            self.wake(session)

    def seek(self, start: int, then: Callable[[], None] = lambda: None, *, noted: bool = False) -> None:
        """Deliver everything of the log from ``start`` on, for the first time or again, and nothing before it.

        What is in flight is taken from its consumers, as by ``empty``, and that is what this is if ``start`` lies
        behind all that the topic has handed on. Otherwise messages for this channel alone stay, and if it goes back
        to the very beginning also older ones, of which only a copy is left. Those of them that are leaving go on.

        Where very many are deferred it takes some loop turns; ``then`` is called when it has ended, also if another
        one took its place.
        """
        self._end_seek()
        self.catch_up(self.topic.pumped)
        if start >= self.seen:
            self.empty()
            then()
            return
        self.seeking = Seek(self, start, then, noted=noted)
        self.seeking.run()

    def _end_seek(self) -> None:
        """Give up a seek that is under way."""
        seek, self.seeking = self.seeking, None
        if seek is not None:
            seek.end()

    def take_over(self, seek: Seek) -> None:
        """A seek knows what is waiting and deferred from its start on: that, and little else, is what there is now."""
        self.seeking = None
        self.topic.touched += 1
        self.topic.mover.look_back()
        earliest = seek.start <= self.topic.log.first
        below = self.topic.mover.below if earliest else 0
        kept = [single for single in self._singles_state() if single[0] >= SIDE or earliest]
        leaving = {seq: count for seq, count in self.leaving.attempts.items() if seq < below or seq >= SIDE}
        copies = array("q", sorted(seq for seq in chain((seq for seq, _, _ in kept), leaving) if seq < SIDE))
        self.broker.journal.note("seek", self.id, seek.start, pack_numbers(copies))
        self._drop_all(leaving)
        self.waiting, self.deferred = seek.waiting, seek.deferred
        self.leaving.keep(leaving)
        self.ring.reset(self.waiting.first if self.waiting else self.seen)
        for seq, attempts, due in kept:
            self.requeue_at(seq, attempts, due)
        self.broker.journal.flush()
        self.broker.soon(self)
        self._watch(self.next_deadline())

    def _singles_state(self) -> list[tuple[int, int, int]]:
        """(seq, attempts, when due) of messages that are not waiting and cannot be read from the log.

        Attempts are -1 for one of the side log that was not delivered here yet: it brings its own count.
        """
        below = self.topic.mover.below
        if not below and self.topic.side is None:
            return []
        found = [(seq, 1, 0) for seq, _ in self.ring.held(self.ring.lo, max(self.ring.lo, below))]
        for first, stop in ((0, below), (SIDE, NEVER)):
            these = range(first, stop)
            before = 0 if stop == below else -1
            found += [(seq, self.unusual[seq].attempts, 0) for seq in filter(these.__contains__, self.unusual)]
            found += [(seq, self.attempts.get(seq, before), 0) for seq in filter(these.__contains__, self.requeued)]
            found += [(seq, self.attempts.get(seq, before), due) for due, seq in self.deferred.between(first, stop)]
        return found

    # One message, whatever its state. Who asks is no consumer: nobody has to hold it.

    def dismiss(self, seq: int) -> bool:
        """Finish a message; False if the channel does not have it. Its owner's FIN will find it no longer in flight."""
        if self._withdraw(seq) is None:
            return False
        self.finished(seq, seq + 1)
        self.pump()
        return True

    def reschedule(self, seq: int, delay: int) -> bool:
        """A message is ready now, or after ``delay`` ns; False if the channel does not have it."""
        if delay <= 0 and self.is_ready(seq):
            return True
        in_flight = self.owner(seq) != 0
        attempts = self._withdraw(seq)
        if attempts is None:
            return False
        self.requeue_count += in_flight
        self.requeue_at(seq, attempts, self.broker.clock.now() + delay if delay > 0 else 0)
        self.pump()
        return True

    def _withdraw(self, seq: int) -> int | None:
        """Take a message out of its state; how often it was delivered so far. None: the channel does not have it.

        -1 stands for a message of the side log that was not delivered here yet: its own frame says how often it was.
        """
        owner = self.owner(seq)
        if owner:
            self._let_go(owner)
            return self.in_flight.take(seq)
        self.catch_up(self.topic.pumped)
        unsent, before = (self.waiting, 0) if seq < SIDE else (self.side, -1)
        if unsent.remove(seq, seq + 1):
            return before
        if self.deferred.remove(seq) < 0:
            try:
                self.requeued.remove(seq)
            except ValueError:
                return None
        return self.attempts.pop(seq, before)

    def close(self) -> list[Session]:
        """The channel is going: its consumers, to be disconnected by the caller."""
        self.exiting = True
        self.broker.scan.forget(self)
        self.topic.log.leave(self)
        self.ready.clear()
        sessions = list(self.sessions.values())
        for session in sessions:
            session.listed = False
        return sessions

    # --- What must survive -----------------------------------------------------------------------------------------

    def take_done(self) -> bytes:
        self._noted = False
        done = self.ring.take_done()
        if self.latency is not None and self.latency.done:
            done = bytes(self.latency.done) + done
            self.latency.done.clear()
        return b"" if self.ephemeral or self.topic.ephemeral else done

    def take_back(self) -> bytes:
        back = self._back.tobytes()
        if back:
            del self._back[:]
        return b"" if self.ephemeral or self.topic.ephemeral else back

    def settle(self) -> None:
        """A clean stop: what is in flight was delivered once more, and comes back with its count."""
        for seq, _ in self.ring.held(self.ring.lo, self.ring.hi):
            self._note_back(seq, 1, 0, 0)
        for seq, message in self.unusual.items():
            self._note_back(seq, message.attempts, 0, 0)
        self.broker.journal.touch(self)

    def snapshot_parts(self) -> Iterator[Part]:
        """What is outstanding, as pairs, and what of it was delivered before, as rows: see ``snapshot_parts``."""
        return snapshot_parts(self)

    def restore(
        self,
        outstanding: Ranges,
        back: dict[int, tuple[int, int, int]],
        deferrals: Iterable[tuple[array[int], array[int]]],
    ) -> None:
        """Take up what the journal and the log know. ``outstanding`` holds only seqs that exist."""
        found = restored(outstanding, back, deferrals, self.broker.clock.now(), self.topic.mover.below)
        self.waiting, self.side, self.attempts = found.waiting, found.side, found.attempts
        self.requeued.extend(found.requeued)
        self.deferred.extend(found.dues, found.seqs)
        self._handed = 0
        self._watch(self.next_deadline())

    @property
    def first_unsent(self) -> int:
        """The lowest seq of the log that was never sent here."""
        first = self.waiting.first if self.waiting else self.seen
        if self.seeking is not None:
            first = min(first, self.seeking.start)
        return min(first, self.leaving.expired.first) if self.leaving.expired else first

    def note_due(self, first: int, stop: int) -> None:
        """The segment of these seqs goes, and what it said of deferred publishes with it: the journal must know it."""
        wall = self.broker.clock.wall() - self.broker.clock.now()
        for due, seq in self.deferred.between(first, stop):
            if seq not in self.attempts:
                self._note_back(seq, 0, due, wall + due)
                self.attempts[seq] = 0
        self._note()
