"""A topic: a log, its marks and its channels.

A Topic owns the mark ``pumped``, which says what channels may see, its channels, its counters, and who waits for a
publish to be committed. Bytes are its log's business, deliveries its channels'.

``pumped`` follows what is committed, and stands still while the topic is paused or has no channel. What lies beyond
it is the topic's own depth; a new channel starts there.

Size: a publish, its commit and the mark that lets channels see it change the same few numbers in one turn, so they stay
in one module. What does not is elsewhere: see the class.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.commit import Commit, Piece
from flintmq.broker.delivery.expiry import Expiry
from flintmq.broker.limits import TopicLimits
from flintmq.broker.settings import Settings, TopicSettings
from flintmq.broker.storage.journal import NEVER, SIDE
from flintmq.broker.storage.keys import Keys
from flintmq.broker.storage.log import TAKE_AT_ONCE, WRITE_AT, Log
from flintmq.broker.storage.mover import Mover
from flintmq.broker.storage.readers import Readers, Retention
from flintmq.errors import DamageError, NotFoundError, PublishError
from flintmq.kernel import FAILED, FRAME_OVERHEAD, BatchParser, Intake
from flintmq.protocol.wire import is_ephemeral

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["Topic"]

logger = logging.getLogger(__name__)

#: Seqs are reserved ahead, this many at a time, so that none is used twice whatever a crash costs.
RESERVE = 1 << 24
#: Deferred messages, times channels, that are handed over before the loop is handed back.
HAND_AT_ONCE = 10_000
#: Waiting messages from which on a channel with consumers has fallen behind.
BEHIND = 2_500
#: More messages than are taken straight from sockets in one go.
MOST_AT_ONCE = 1 << 20


def _never(first: int, stop: int) -> bool:
    return False


class Topic:
    """A log, its marks, its channels, and the publishers that wait for a commit.

    Size: marks, commits and counters are looked at for every publish or turn, so they are flat; what is not has objects
    of its own (Mover, Readers, Retention, Expiry, Keys, limits).
    """

    # A dict of so many attributes is looked up in several places of memory; one object of many is rarely in the cache.
    __slots__ = (
        "__weakref__",
        "_batch_error",
        "_commits",
        "_holder",
        "_open_commit",
        "_pumping",
        "_readers",
        "_refusal",
        "_settled",
        "_settling",
        "_usable",
        "_waiting",
        "awake",
        "broker",
        "ceiling",
        "channels",
        "dropped_count",
        "ephemeral",
        "exiting",
        "expired_count",
        "expiry",
        "folder",
        "gaps",
        "gated",
        "ids",
        "incarnation",
        "keys",
        "limits",
        "log",
        "message_bytes",
        "message_count",
        "mover",
        "name",
        "noted_durable",
        "noted_side",
        "paused",
        "pumped",
        "readers",
        "retention",
        "settings",
        "side",
        "side_base",
        "touched",
    )

    def __init__(self, broker: Broker, name: str, incarnation: int, base: int, folder: Path | None) -> None:
        self.broker = broker
        self.name = name
        self.incarnation = incarnation
        self.ephemeral = is_ephemeral(name)
        self.paused = False
        self.exiting = False
        self.folder = folder
        #: Which node id its messages were published under.
        self.ids = broker.node_ids.of(incarnation)
        #: Replaced, never changed.
        self.settings = broker.settings.topic(name)
        self.log = self._new_log(folder, base)
        #: Messages for one channel only, and copies of old ones; made when there are any.
        self.side: Log | None = None
        #: Where the side log begins at the earliest: nothing before it is used for a message from now on.
        self.side_base = SIDE
        self.mover = Mover(self)
        #: What stays in files for others than channels.
        self.readers = Readers(self)
        self.retention = Retention(self)
        self.expiry = Expiry(self)
        self.channels: dict[str, Channel] = {}
        #: Those of them that may have a consumer to send to, or are bounded: most channels of most topics are not.
        self.awake: dict[Channel, None] = {}
        #: The idempotency keys it knows; None until there is one.
        self.keys: Keys | None = None
        # Marks.
        self.pumped = base
        self.ceiling = base
        self._usable = base
        # While the journal does not know yet that ``pumped`` stands still: nothing beyond this is safe.
        self._settled = NEVER
        self._settling = 0
        #: Holes beyond ``pumped`` that unclean stops left: no message has these seqs. Only the broker adds to them.
        self.gaps: deque[tuple[int, int]] = deque()
        #: What the journal knows to be durable, of the log and of the side log; only the broker assigns.
        self.noted_durable = base
        self.noted_side = SIDE
        #: Something else keeps ``pumped`` from moving: lookupds that have not answered yet.
        self.gated = False
        # Publishers.
        self._commits: deque[Commit] = deque()
        self._open_commit: Commit | None = None
        self._holder: object = None
        # Deferred messages are handed over in slices, and the next one is planned.
        self._pumping = False
        # Why the rest of the batch that is being appended in slices has to be refused.
        self._batch_error: PublishError | None = None
        # Why the last write failed.
        self._refusal = ""
        self._waiting: list[Callable[[], None]] = []
        # Who waits for something that is being read back.
        self._readers: list[Callable[[], None]] = []
        # Counters.
        self.message_count = self.message_bytes = 0
        self.dropped_count = self.expired_count = 0
        #: How often something happened to one of its channels without ``pumped`` moving: a consumer, a pause, a seek,
        #: messages for it alone. A channel that has no messages changes only with one of the two.
        self.touched = 0
        #: What it may hold and how fast it may grow; None: no limit.
        self.limits = TopicLimits.of(self)

    def _new_log(self, folder: Path | None, base: int) -> Log:
        return Log(
            self.broker.store,
            self.name,
            folder,
            base,
            self.settings.durability,
            progressed=self._progressed,
            failed=self._write_failed,
            arrived=self._arrived,
        )

    # --- Publishing ------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Messages that no channel has seen yet."""
        return self.log.end - self.pumped - self._gap_count

    @property
    def backend_depth(self) -> int:
        if self.ephemeral:
            return 0
        memory = self.log.blocks[0].base if self.log.blocks else self.log.end
        # Gaps are as old as the last start: all of them lie before what is in memory.
        return max(0, memory - self.pumped - self._gap_count)

    @property
    def _gap_count(self) -> int:
        return sum(stop - first for first, stop in self.gaps)

    @property
    def durable(self) -> int:
        """First seq that may be lost in a power failure. Log readers only see seqs below it."""
        return min(self.log.durable, self._usable)

    @property
    def epoch(self) -> str:
        """Another one says that the log has begun anew: the topic was deleted, or the node is a restored copy."""
        return f"{self.broker.node.hex()}-{self.incarnation}"

    @property
    def frozen(self) -> bool:
        return self.paused or self.gated or not self.channels

    @property
    def busy(self) -> bool:
        """A large batch is being appended in slices: others have to wait for their turn."""
        return self._holder is not None

    def when_free(self, then: Callable[[], None]) -> None:
        self._waiting.append(then)

    def hold(self, holder: object) -> None:
        self._holder = holder

    def release(self) -> None:
        self._holder = None
        self._batch_error = None
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            self.broker.later(then)

    @property
    def open(self) -> bool:
        """Can a publish go ahead without a second look?"""
        return not (
            self.exiting
            or self._holder
            or self.ephemeral
            or self.limits
            or self.broker.refusing
            or self.broker.store.congested
        )

    def publish(
        self,
        data: bytearray,
        pos: int,
        stop: int,
        count: int,
        *,
        delay: int = 0,
        more: bool = False,
        extra: bytes = b"",
        admitted: bool = False,
    ) -> Commit | None:
        """Append ``count`` records ``[size][body]``. None: safe already; else the commit to wait for.

        With ``more`` this is a slice of a batch that goes on. ``extra`` is kept with them, for ``extra_of``.
        PublishError says why it is refused; what was ``admitted`` before is not refused for any limit.
        """
        if self.exiting:
            raise PublishError("exiting")
        broker, log = self.broker, self.log
        if self._batch_error is not None:
            broker.counters.refused_count += count
            raise self._batch_error
        if broker.refusing and not log.in_group and not admitted:
            broker.counters.refused_count += count
            raise PublishError(broker.refusing)
        size = stop - pos - 4 * count
        if self.limits is not None:
            self.limits.admit(count, size, admitted)
        kept = count
        if self.ephemeral and self.frozen:
            stop, kept = self._fitting(data, pos, stop, count)
        if more and not log.in_group:
            # If the batch is given up, its commits fail, and those of others must not.
            self._open_commit = None
        try:
            if kept or not count:
                log.append(data, pos, stop, kept, broker.clock.wall(), delay=delay, extra=extra, more=more)
            elif not more:
                log.end_batch()
        except PublishError:
            broker.counters.refused_count += count
            raise
        self.message_count += count
        self.message_bytes += size
        if count and not kept:
            return None
        if log.end > self._usable - RESERVE // 2:
            self._reserve()
        broker.turn(self)
        if log.durability == "memory" and log.end <= min(self._usable, self._settled):
            return None
        return self._commit(self.message_count - count, self.message_bytes - size)

    def _fitting(self, data: bytearray, pos: int, stop: int, count: int) -> tuple[int, int]:
        """Where nobody listens and the memory is full, the newest are dropped without a word, as NSQ does.

        Up to where these records fit, and how many that are.
        """
        room = max(0, self.settings.mem_queue_size - self.depth)
        if count <= room:
            return stop, count
        fitting = BatchParser(pos)
        if room:
            fitting.run(data, stop, room, stop)
        return fitting.pos, room

    def publish_slices(
        self, slices: Iterator[Piece], extra: bytes = b"", *, delay: int = 0, admitted: bool = False
    ) -> Commit | None:
        """Append a very large batch: one piece per loop turn, committed as one. The topic must not be ``busy``.

        As with ``publish``: None if it is safe already, else what to wait for. PublishError if it is refused at once.
        """
        piece = next(slices, None)
        if piece is None:
            return None
        self.hold(slices)
        whole = Commit()

        def some(data: bytearray, pos: int, stop: int, count: int) -> None:
            following = next(slices, None)
            try:
                more = following is not None
                commit = self.publish(data, pos, stop, count, delay=delay, more=more, extra=extra, admitted=admitted)
            except PublishError as exc:
                self.release()
                whole.resolve(exc)
                return
            if following is not None:
                self.broker.later(some, *following)
                return
            self.release()
            if commit is None:
                whole.resolve()
            else:
                commit.waiters.append(lambda: whole.resolve(commit.error))

        some(*piece)
        if not whole.done:
            return whole
        if whole.error is not None:
            raise whole.error
        return None

    def once(self, key: bytes, publish: Callable[[bytes], Commit | None], content: int) -> tuple[Commit | None, bool]:
        """Publish under a key: see ``Keys.once``."""
        return self.own_keys().once(key, publish, content)

    def own_keys(self) -> Keys:
        """The keys, made if need be."""
        if self.keys is None:
            self.keys = Keys(self)
        return self.keys

    def restore_keys(self) -> None:
        """At the start, when the log has been read back: which keys are known."""
        keys = Keys(self)
        if self.broker.stage.holds(self.name):
            keys.hold()
        if keys.restore():
            self.keys = keys

    @property
    def last_commit(self) -> Commit | None:
        """The last of the commits that publishers wait for; those before it are resolved first."""
        return self._commits[-1] if self._commits else None

    def _commit(self, count: int, size: int) -> Commit:
        """What this turn's publishers wait for. ``count`` and ``size`` are the counters before this publish."""
        commit = self._open_commit
        if commit is None:
            commit = self._open_commit = Commit()
            commit.before = (count, size)
            self._commits.append(commit)
        commit.end = self.log.end
        return commit

    def take_in(self, intake: Intake, fds: list[int], counts: list[int], start: int) -> tuple[int, Commit | None]:
        """Publishes straight from sockets: see ``Intake.run``.

        How that ended, and what those that brought something wait for: None if they were answered. A commit that is
        done has failed.
        """
        log = self.log
        end = log.end
        # May publishes be answered as soon as they are written, without another look at marks and commits?
        settled = not self._commits and end + MOST_AT_ONCE < self._usable and self._settled == NEVER
        status, answered = log.take_in(intake, fds, counts, start, settled, self._budget())
        count = log.end - end
        before = (self.message_count, self.message_bytes)
        if count:
            self.message_count += count
            self.message_bytes += log.last_bytes - FRAME_OVERHEAD * count
            if log.end > self._usable - RESERVE // 2:
                self._reserve()
            self.broker.turn(self)
        if status == FAILED:
            self.broker.counters.refused_count += sum(counts[i] for i in intake.unanswered)
            failed = Commit()
            failed.resolve(PublishError(self._refusal))
            return status, failed
        return status, self._commit(*before) if count and not answered else None

    def _budget(self) -> int:
        """How much to take from publishers before consumers have their turn: less where they fall behind."""
        for channel in self.channels.values():
            if channel.sessions and channel.waiting.total + self.pumped - channel.seen > BEHIND:
                return WRITE_AT
        return TAKE_AT_ONCE

    def _reserve(self) -> None:
        """Say which seqs may be used from now on, and use none of them before that is on the device."""
        if self.ceiling - self.log.end > RESERVE // 2:
            return
        ceiling = self.log.end + RESERVE
        if self.ephemeral:
            self.grant(ceiling, self.broker.note_floor(ceiling))
        else:
            self.grant(ceiling, self.broker.journal.note("ceiling", self.incarnation, ceiling))

    def grant(self, ceiling: int, position: int) -> None:
        """Seqs below ``ceiling`` may be used as soon as the journal is on the device up to ``position``."""
        self.ceiling = ceiling

        def usable() -> None:
            self._usable = max(self._usable, ceiling)
            self._progressed()

        self.broker.journal.when_synced(position, usable)

    def flush(self) -> None:
        """The end of a loop turn: write, commit, hand on to the channels."""
        self._open_commit = None
        log = self.log
        written = log.written
        log.flush()
        if log.written == written:
            # Nothing to write, or not yet: otherwise the log has said so already.
            self._progressed()
        if self.limits is not None:
            self.limits.trim()
        settings = self.settings
        memory = log.memory
        if memory.count(log.end) > settings.mem_queue_size or memory.bytes > settings.mem_queue_bytes:
            self.trim()

    def _progressed(self) -> None:
        """A mark of the log moved: answer publishers, let the channels see more."""
        committed = self.log.committed
        if committed > self._usable or committed > self._settled:
            committed = min(self._usable, self._settled)
        commits = self._commits
        while commits and commits[0].end <= committed and commits[0] is not self._open_commit:
            commits.popleft().resolve()
        if committed > self.pumped and not self.frozen:
            self._pump(committed)

    def _pump(self, seq: int) -> None:
        """Let the channels see what lies before ``seq``; many deferred messages are handed over in slices."""
        stop = self._hand_deferred(seq) if self.log.deferred or self.gaps else seq
        self.pumped = stop
        for channel in tuple(self.awake) if self.awake else ():
            try:
                channel.pump()
                if channel.bounded:
                    channel.drop_excess()
                if channel.exiting or not (channel.ready or channel.bounded):
                    self.awake.pop(channel, None)
            except Exception:
                self._failed(channel)
        if stop < seq and not self._pumping:
            self._pumping = True
            self.broker.later(self._pump_on)

    def _pump_on(self) -> None:
        self._pumping = False
        if not self.exiting and not self.broker.stopping:
            self._progressed()

    def _hand_deferred(self, seq: int) -> int:
        """Hand over deferred messages before ``seq``, and skip gaps; up to where that was done."""
        deferred, gaps = self.log.deferred, self.gaps
        channels = list(self.channels.values())
        most = max(1, HAND_AT_ONCE // max(1, len(channels)))
        while most > 0:
            gap = gaps[0][0] if gaps else NEVER
            if gap < seq and not (deferred and deferred[0][0] < gap):
                first, stop = gaps.popleft()
                for channel in channels:
                    try:
                        channel.skip(first, stop)
                    except Exception:
                        self._failed(channel)
                most -= 1
                continue
            messages: list[tuple[int, int]] = []
            before = min(seq, gap)
            while deferred and deferred[0][0] < before and len(messages) < most:
                messages.append(deferred.popleft())
            most -= len(messages)
            # Those of a backlog that was emptied are not handed over.
            fresh = messages if messages and messages[0][0] >= self.pumped else self._not_pumped(messages)
            if fresh:
                for channel in channels:
                    try:
                        channel.hand_deferred(fresh)
                    except Exception:
                        self._failed(channel)
            if gap >= seq and not (deferred and deferred[0][0] < seq):
                return seq
        return max(self.pumped, min(seq, deferred[0][0] if deferred else seq, gaps[0][0] if gaps else seq))

    def _not_pumped(self, messages: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [message for message in messages if message[0] >= self.pumped]

    def _failed(self, channel: Channel) -> None:
        """A channel raised: that must not keep the others from their turn."""
        logger.exception("TOPIC(%s): channel %s failed", self.name, channel.name)

    def _write_failed(self, seq: int, exc: Exception) -> None:
        reason = self._refusal = getattr(exc, "strerror", None) or str(exc)
        if isinstance(exc, OSError):
            self.broker.unwell(f"cannot write to the disk: {reason}")
        if seq >= SIDE:
            # Nothing that was published.
            self.mover.write_failed(seq)
            return
        self._open_commit = None
        if self.busy and self.log.durability != "memory":
            # The slices of a batch so far are gone: its last one must not pass for the whole.
            self._batch_error = PublishError(reason)
        while self._commits and self._commits[-1].end > seq:
            commit = self._commits.pop()
            # These publishes did not happen.
            count, size = commit.before
            self.broker.counters.refused_count += self.message_count - count
            self.message_count, self.message_bytes = count, size
            commit.resolve(PublishError(reason))

    def _arrived(self, cursors: Collection[object] | None) -> None:
        """Something was read back: channels among these wait for it; None: anybody may."""
        self.mover.step()
        for channel in self.channels.values() if cursors is None else cursors:
            if isinstance(channel, Channel):
                try:
                    channel.pump()
                except Exception:
                    self._failed(channel)
        readers, self._readers = self._readers, []
        for then in readers:
            try:
                then()
            except Exception:
                logger.exception("TOPIC(%s): a reader of the log failed", self.name)

    def when_read(self, then: Callable[[], None]) -> None:
        """Call ``then`` when something was read back: ask for what you want again."""
        self._readers.append(then)

    def frame(self, seq: int) -> bytearray | None:
        """A copy of one message's frame; None while it is being read back."""
        if seq < self.mover.below and not self.log.in_memory(seq):
            return self.mover.frame(seq)
        source = self.log if seq < SIDE else self.side
        if source is None:
            raise LookupError(f"{self.name} has no side log")
        return source.frame(seq)

    def extra_of(self, seq: int) -> dict[str, Any] | None:
        """What is kept with a message beside its frame, such as ``dead``: empty if nothing is.

        As with ``frame``, None means that it is being read back (``when_read``), and DamageError that it cannot be.
        """
        if seq >= SIDE:
            # What is kept there is for whom it is.
            return {}
        moved = seq < self.mover.below and not self.log.in_memory(seq)
        extra = self.mover.extra(seq) if moved else self.log.extra(seq)
        if not extra:
            return None if extra is None else {}
        found: dict[str, Any] = msgspec.msgpack.decode(extra)
        return found

    def place(self, seq: int) -> tuple[Log, int]:
        """The log that holds a message, and its seq in it. DamageError if none does."""
        if seq < self.mover.below and not self.log.in_memory(seq):
            return self.mover.place(seq)
        if seq < SIDE:
            return self.log, seq
        if self.side is None:
            raise DamageError(f"{self.name} has no side log", seq, seq + 1)
        return self.side, seq

    def side_log(self) -> Log:
        """The side log, made if need be. OSError if it cannot be."""
        if self.side is None:
            folder = None
            if self.folder is not None:
                folder = self.folder / "side"
                self.broker.disk.make_folder(folder)
            self.side_base = max(self.side_base, SIDE + self.broker.first_number())
            if not self.ephemeral:
                self.broker.journal.note("side", self.incarnation, self.side_base)
            self.side = self._new_log(folder, self.side_base)
        return self.side

    @property
    def side_end(self) -> int:
        return self.side.end if self.side is not None else self.side_base

    # --- Channels --------------------------------------------------------------------------------------------------

    def channel(self, name: str) -> tuple[Channel, int]:
        """The channel, made if need be, and the journal's position at which that is known (0: it was there)."""
        channel = self.channels.get(name)
        if channel is not None:
            return channel, 0
        position = 0
        ident = self.broker.next_channel_id()
        channel = Channel(self, name, ident, self.pumped)
        self.channels[name] = channel
        if not (channel.ephemeral or self.ephemeral):
            position = self.broker.journal.note("channel", self.incarnation, ident, name, self.pumped, self.side_end)
        if len(self.channels) == 1:
            self._freeze()
        if self.settings.new_channel != "backlog":
            self._start_elsewhere(channel)
        logger.info("TOPIC(%s): new channel(%s)", self.name, name)
        self.broker.upkeep.structure_changed(self.ephemeral or channel.ephemeral)
        self.broker.peers.made(self.name, name)
        if not self.frozen:
            # Its first channel gets what has piled up.
            self.broker.turn(self)
        return channel, position

    def _start_elsewhere(self, channel: Channel) -> None:
        """A new channel starts elsewhere than where the others have got to."""
        if self.settings.new_channel == "latest":
            if len(self.channels) == 1:
                # What has piled up was not for it. Handed over, much of it would still be on its way.
                self.empty()
            self._progressed()
            channel.empty()
        elif not channel.ephemeral and self.log.durability != "memory":
            # The journal knows of it before the answer, whenever the channel has found its place.
            self.broker.journal.note("seek", channel.id, self.log.first, b"")
            channel.seek(self.log.first, noted=True)

    def existing_channel(self, name: str) -> Channel:
        channel = self.channels.get(name)
        if channel is None:
            raise NotFoundError("channel does not exist")
        return channel

    def delete_channel(self, name: str) -> None:
        channel = self.existing_channel(name)
        logger.info("TOPIC(%s): deleting channel %s", self.name, name)
        sessions = channel.close()
        channel.empty()
        del self.channels[name]
        self.awake.pop(channel, None)
        self.broker.journal.forget(channel)
        self.broker.settings.forget(self.name, name)
        if not (channel.ephemeral or self.ephemeral):
            self.broker.journal.note("unchannel", self.incarnation, channel.id)
        if not self.channels:
            self._freeze()
        self.broker.upkeep.structure_changed(self.ephemeral or channel.ephemeral)
        self.broker.peers.deleted(self.name, name)
        for session in sessions:
            try:
                session.drop()
            except Exception:
                logger.exception("TOPIC(%s): a client of channel %s cannot be disconnected", self.name, name)
        if self.ephemeral and not self.channels and not self.exiting:
            self.broker.later(self._vanish)

    def _vanish(self) -> None:
        if not self.channels and not self.exiting:
            self.broker.delete_topic(self.name)

    def _freeze(self) -> None:
        """``pumped`` stands still from here on, or moves again."""
        position = self.note_frozen()
        self._settled = NEVER
        if not self.frozen or not position or any(not channel.ephemeral for channel in self.channels.values()):
            return
        # No channel that outlives a crash would get what is published now, so it is safe only once the journal knows
        # that there is a backlog.
        self._settled = self.pumped
        self._settling = position

        def settled() -> None:
            if self._settling == position:
                self._settled = NEVER
                self._progressed()

        self.broker.journal.when_synced(position, settled)

    def note_frozen(self) -> int:
        """Tell the journal whether, and where, ``pumped`` stands still; its position, 0 if it need not know."""
        if self.ephemeral:
            return 0
        return self.broker.journal.note("frozen", self.incarnation, self.pumped if self.frozen else None)

    # --- Operators -------------------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        if self.paused != paused:
            self.paused = paused
            if not self.ephemeral:
                self.broker.journal.note("pause", self.incarnation, paused)
            self._freeze()
            self.broker.upkeep.structure_changed(self.ephemeral)
        if not self.frozen:
            self.broker.turn(self)

    def gate(self, closed: bool) -> None:
        """Keep ``pumped`` where it is until it is known which channels the topic has elsewhere."""
        frozen = self.frozen
        self.gated = closed
        if self.frozen != frozen:
            self._freeze()
            if not closed:
                self.broker.turn(self)

    def empty(self) -> None:
        """Drop what no channel has seen yet; the channels keep theirs."""
        self._skip(min(self.log.end, self.log.committed))

    def beyond_backlog(self, count: int) -> int:
        """The seq before which so many messages lie that no channel has seen yet."""
        seq = self.pumped
        for first, stop in self.gaps if count else ():
            if count < first - seq:
                break
            count -= first - seq
            seq = stop
        return seq + count

    def drop_backlog(self, before: int) -> int:
        """Drop what no channel has seen yet and lies before this seq; how many that were."""
        depth = self.depth
        self._skip(min(before, self.log.committed))
        self.dropped_count += depth - self.depth
        return depth - self.depth

    def expire_backlog(self, before: int) -> None:
        """What no channel has seen yet before this seq is too old, up to a deferred message that is good yet."""
        good, stop = self.expiry.still_good(self.pumped, before, HAND_AT_ONCE)
        depth = self.depth
        self._skip(min(stop, self.log.committed, *good[:1]))
        self.expired_count += depth - self.depth
        if stop < before and not good and not self.exiting:
            self.broker.later(self.expire_backlog, before)

    def _skip(self, stop: int) -> None:
        if stop <= self.pumped:
            return
        if not self.ephemeral:
            self.broker.journal.note("skip", self.incarnation, self.pumped, stop)
        while self.gaps and self.gaps[0][0] < stop:
            _, last = self.gaps.popleft()
            if last > stop:
                self.gaps.appendleft((stop, last))
                break
        for channel in self.channels.values():
            channel.skip(self.pumped, stop)
        self.pumped = stop
        self._drop_deferred()
        # It stands still, or not, as before: nobody has to wait until the journal knows that once more.
        self.note_frozen()
        self.broker.journal.flush()
        self.broker.turn(self)
        self.trim()

    def _drop_deferred(self) -> None:
        """Forget deferred messages of a backlog that was emptied, in slices. Nobody gets them meanwhile."""
        deferred = self.log.deferred
        for _ in range(HAND_AT_ONCE):
            if not deferred or deferred[0][0] >= self.pumped:
                return
            deferred.popleft()
        self.broker.later(self._drop_deferred)

    def obstacle_to(self, settings: TopicSettings) -> str:
        """Why it cannot have these settings now; empty if it can."""
        changed = {self.log.durability, settings.durability}
        if self.ephemeral or len(changed) == 1 or "memory" not in changed:
            return ""
        # What is only in memory was promised no more than that: a write that fails must not be able to take it back.
        self.trim()
        unfinished = self.depth + sum(
            c.depth + c.in_flight_count + len(c.deferred) + c.leaving_count for c in self.channels.values()
        )
        logs = [log for log in (self.log, self.side) if log is not None]
        if not (unfinished or self.busy or self._commits or any(log.written != log.end for log in logs)):
            return ""
        return (
            f"durability: topic {self.name} holds messages, and only an empty one can be changed from "
            f"{self.log.durability} to {settings.durability}: let them be finished, or empty it and its channels"
        )

    def take_settings(self, settings: Settings) -> None:
        """Take what holds for it now."""
        self.change_settings(settings.topic(self.name))

    def change_settings(self, settings: TopicSettings) -> None:
        """Take other settings; they hold at once."""
        obstacle = self.obstacle_to(settings)
        if obstacle:
            logger.warning("TOPIC(%s): its durability stays as it was until the next start - %s", self.name, obstacle)
            settings = replace(settings, durability=self.log.durability)
        if settings == self.settings:
            return
        self.settings = settings
        for storage in (self.log, self.side):
            if storage is not None:
                storage.change_durability(settings.durability)
        self.limits = self.limits.changed() if self.limits is not None else TopicLimits.of(self)
        self.trim()
        self.broker.turn(self)

    def close(self) -> None:
        """Refuse everything from here on: the topic is deleted. Publishers that wait for a commit are refused."""
        self.exiting = True
        for commit in self._commits:
            commit.resolve(PublishError("exiting"))
        self._commits.clear()
        self._open_commit = None

    def halt(self) -> None:
        """Take, write and deliver nothing from here on: the broker stops without saving anything."""
        self.exiting = True
        for storage in (self.log, self.side):
            if storage is not None:
                storage.halt()

    def abandon(self) -> None:
        """Close all files and leave them as they are."""
        self.exiting = True
        for storage in (self.log, self.side):
            if storage is not None:
                storage.abandon()

    # --- Letting go ------------------------------------------------------------------------------------------------

    @property
    def over_memory(self) -> bool:
        """Does the log hold more in memory than it is to?"""
        log, settings = self.log, self.settings
        return log.memory_count > settings.mem_queue_size or log.memory_bytes > settings.mem_queue_bytes

    def trim(self) -> None:
        """Let the log forget what it need not keep in memory."""
        limit, cap = self.settings.mem_queue_size, self.settings.mem_queue_bytes
        if self.log.durability == "memory" and not self.ephemeral:
            self.log.spill(limit, cap, self._spilled)
        self.log.trim(limit, cap, self.needs, self._pins, self._awaits)
        if self.side is not None and self.side.blocks:
            # Messages of the side log are read one by one: once they are in a file they need not stay in memory.
            first = self.first_side_needed() if self.ephemeral else SIDE
            self.side.trim(0, 0, lambda _, stop: first < stop, _never, _never)

    def _spilled(self) -> None:
        if not self.exiting:
            self.trim()

    def needs(self, first: int, stop: int) -> bool:
        """Does a channel, or the backlog for the first one, still want one of these?"""
        return self.pumped < stop or any(channel.needed.between(first, stop) for channel in self.channels.values())

    def _pins(self, first: int, stop: int) -> bool:
        return any(c.ephemeral and c.needed.between(first, stop) for c in self.channels.values())

    def _awaits(self, first: int, stop: int) -> bool:
        return any(c.sessions and not c.paused and first <= c.first_unsent < stop for c in self.channels.values())

    def first_needed(self) -> int:
        """The lowest seq that any channel, or the backlog for the first one, still needs from the files."""
        lowest = self.pumped
        for channel in self.channels.values():
            if not channel.ephemeral:
                lowest = min(lowest, channel.needed.first())
        return lowest

    def first_kept(self) -> int:
        """The lowest seq whose file must stay: for channels, for readers, or by retention."""
        return min(self.first_needed(), self.readers.first, self.retention.first)

    def let_go(self) -> int:
        """Every few seconds: see to what need not be kept any longer. Up to where files may go, 0 if none is whole."""
        self.readers.expire()
        if self.readers and not self.channels:
            # The log is read, only not by a channel: what piles up for a first one goes with its file, once all
            # readers are past it.
            self._skip(min(self.log.boundary(min(self.readers.first, self.retention.first)), self.log.committed))
        self.mover.look()
        return self.first_kept() if self.log.has_complete_files else 0

    def first_side_needed(self) -> int:
        lowest = min(self.side_end, self.mover.first_place)
        for channel in self.channels.values():
            if channel.side:
                lowest = min(lowest, channel.side.first)
            singles = chain(channel.attempts, channel.unusual, channel.leaving)
            lowest = min(lowest, min(filter(SIDE.__le__, singles), default=lowest))
            if channel.redrive is not None:
                lowest = min(lowest, channel.redrive.first_place)
        return lowest
