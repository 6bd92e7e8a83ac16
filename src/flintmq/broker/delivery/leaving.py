"""Messages that leave a channel for another place: those nobody could handle, those that expired, those redriven.

A Leaving belongs to one channel. It owns which messages are leaving: they are in no state in which they could be
delivered, and are finished once a copy of them is safe elsewhere. Dead letters are copied by ``dead_letters``, redriven
ones by ``redrive``; who copies asks here which they are.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from flintmq.broker.delivery.dead_letters import EXPIRED, LONGEST_QUEUE, RETRY_DELAY, DeadLetters
from flintmq.broker.storage.ranges import Ranges

if TYPE_CHECKING:
    from flintmq.broker.delivery.channel import Channel
    from flintmq.broker.storage.log import Log

__all__ = ["Leaving"]

#: Messages or ranges of them that expire before the loop is handed back.
EXPIRE_AT_ONCE = 3_000
#: Requeued messages that are looked through before the loop is handed back.
LOOK_AT_ONCE = 1_000


class Leaving:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        #: How often each was delivered, by seq.
        self.attempts: dict[int, int] = {}
        #: Expired while they waited; each is leaving as soon as it can be copied.
        self.expired = Ranges()
        #: Copies dead letters; made when there are any.
        self.dead_letters: DeadLetters | None = None
        #: Logs with copies of what left: the kind of note that says how far one is durable, of whom, and up to where.
        self.copied_to: dict[Log, tuple[str, int, int]] = {}
        #: More of what waits expires in the next loop turn; up to which seq.
        self.expiring = False
        self._expire_stop = 0
        # Requeued messages are being looked through.
        self._looking_through = False
        # Counters.
        self.dead_lettered_count = 0
        self.expired_count = 0

    def __len__(self) -> int:
        return len(self.attempts)

    def __contains__(self, seq: object) -> bool:
        return seq in self.attempts

    def __iter__(self) -> Iterator[int]:
        return iter(self.attempts)

    def clear(self, kept: Container[int] = ()) -> dict[int, int]:
        """Forget them all, but for the copies that are to be made of those that ``keep`` brings back at once.

        Return what is to be discarded.
        """
        spent, self.attempts = self.attempts, {}
        if self.dead_letters is not None:
            self.dead_letters.retain(kept)
        self.expired.clear()
        return spent

    def keep(self, attempts: dict[int, int]) -> None:
        """These alone are still leaving after a seek; the journal forgot them with it."""
        self.attempts = attempts
        for seq, count in attempts.items():
            self._channel.note_attempts(seq, count)

    # --- Dead letters ----------------------------------------------------------------------------------------------

    def give_up(self, seq: int, attempts: int, reason: str) -> None:
        """This was the last attempt: the message is on its way to the dead-letter topic."""
        channel = self._channel
        if len(self.attempts) >= LONGEST_QUEUE:
            # Copies are not made as fast as consumers give up.
            channel.requeue_at(seq, attempts, channel.broker.clock.now() + RETRY_DELAY)
            return
        self.attempts[seq] = attempts
        # Known to the journal before it is finished: a crash in between brings it back with its count.
        channel.note_attempts(seq, attempts)
        self._copy_soon().add(seq, reason)

    def expire_before(self, stop: int) -> None:
        """Drop what waits before this seq: it was published too early. What was deferred may be good for some time yet.

        Very many are dropped in slices, the oldest first; while ``expiring`` the rest is still to be dropped.
        """
        channel = self._channel
        self._expire_stop = max(self._expire_stop, stop)
        if self.expiring:
            return
        stop, self._expire_stop = self._expire_stop, 0
        channel.catch_up(channel.topic.pumped)
        if not channel.waiting or channel.waiting.first >= stop:
            return
        start = channel.waiting.first
        good, end = channel.topic.expiry.still_good(start, stop, EXPIRE_AT_ONCE)
        end = min(end, channel.waiting.place(EXPIRE_AT_ONCE))
        for seq in good:
            if seq < end and channel.waiting.remove(seq, seq + 1):
                # From there it is sent by itself.
                channel.requeued.append(seq)
        to_dead_letters = channel.topic.settings.ttl_action == "dead-letter"
        while channel.waiting and channel.waiting.first < end:
            first = channel.waiting.first
            after = min(channel.waiting.first_stop, end)
            channel.waiting.take(after - first)
            self.expired_count += after - first
            if to_dead_letters:
                self.expired.add(first, after)
            else:
                channel.finished(first, after)
        if self.expired:
            self._copy_soon()
        if end < stop and not channel.exiting:
            self.expiring = True
            channel.broker.later(self._expire_on, stop)

    def _expire_on(self, stop: int) -> None:
        self.expiring = False
        self.expire_before(stop)
        if not self.expiring:
            self._channel.pump()

    def expire_requeued(self, stop: int) -> None:
        """The same for what was requeued, and not deferred: nobody may come for it. All of it in slices."""
        requeued = self._channel.requeued
        if requeued and not self._looking_through:
            self._look_through(stop, len(requeued))

    def _look_through(self, stop: int, left: int) -> None:
        channel = self._channel
        topic, requeued = channel.topic, channel.requeued
        self._looking_through = False
        if channel.exiting or channel.broker.stopping or not topic.settings.ttl:
            return
        for _ in range(min(left, LOOK_AT_ONCE, len(requeued))):
            seq = requeued[0]
            expired: bool | None = False
            if seq < stop:
                expired = topic.expiry.has_expired(seq, channel.attempts.get(seq, 0))
            if expired is None:
                self._looking_through = True
                topic.when_read(partial(self._look_through, stop, left))
                return
            left -= 1
            if expired:
                requeued.popleft()
                self.expire_single(seq, channel.attempts.pop(seq, 0))
            else:
                requeued.rotate(-1)
        if left > 0 and requeued:
            self._looking_through = True
            channel.broker.later(self._look_through, stop, left)

    def expire_single(self, seq: int, attempts: int) -> None:
        channel = self._channel
        self.expired_count += 1
        if channel.topic.settings.ttl_action != "dead-letter":
            channel.finished(seq, seq + 1)
        else:
            self.attempts[seq] = attempts
            self._copy_soon().add(seq, EXPIRED)

    def _copy_soon(self) -> DeadLetters:
        if self.dead_letters is None:
            self.dead_letters = DeadLetters(self._channel)
        self.dead_letters.go_on()
        return self.dead_letters

    def take_expired(self, most: int) -> list[int]:
        """Some of those that expired while they waited; from now on they are leaving one by one."""
        seqs: list[int] = []
        while self.expired and len(seqs) < most:
            first = self.expired.first
            count = min(most - len(seqs), self.expired.first_stop - first)
            self.expired.take(count)
            seqs.extend(range(first, first + count))
        self.attempts.update(dict.fromkeys(seqs, 0))
        return seqs

    def take_out(self, seqs: Iterable[int]) -> list[int]:
        """Those of ``seqs`` that wait or are requeued now; from now on they are leaving."""
        taken = self._channel.take_ready(seqs)
        self.attempts.update(taken)
        return list(taken)

    def left(self, seqs: Iterable[int]) -> int:
        """These are safe elsewhere and finished here; how many they were: some may have been emptied meanwhile."""
        channel = self._channel
        count = 0
        for seq in seqs:
            if self.attempts.pop(seq, None) is not None:
                channel.finished(seq, seq + 1)
                count += 1
        return count

    def copied(self, log: Log, verb: str, incarnation: int) -> None:
        """The end of the log holds copies of what is leaving: a seek has to tell the journal of them first."""
        if log.folder is not None:
            self.copied_to[log] = (verb, incarnation, log.end)

    def stay(self, seqs: Iterable[int], delay: int) -> None:
        """These cannot leave: they are requeued, for later if there is a ``delay``."""
        channel = self._channel
        due = channel.broker.clock.now() + delay if delay else 0
        for seq in seqs:
            attempts = self.attempts.pop(seq, None)
            if attempts is not None:
                channel.requeue_at(seq, attempts, due)
        if not due:
            channel.pump()
