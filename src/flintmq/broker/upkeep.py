"""What is done every few seconds, for all topics: syncing, deleting files nobody needs, free space, ``nsqd.dat``.

An error in one topic is logged with its name and costs no other: on a full disk, the files of all others must still be
deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from flintmq.broker.delivery.topic import Topic
from flintmq.broker.storage.log import Log
from flintmq.broker.turn import report
from flintmq.protocol.wire import NSQ_VERSION

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["SPACE_INTERVAL", "Upkeep"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at the free space.
SPACE_INTERVAL = 1.0
#: Bytes written between two looks, at least. Otherwise half of the room there is: it may be used up within a second.
SPACE_BYTES = 1 << 20
#: Seconds from a change of topics or channels to ``nsqd.dat``.
METADATA_DELAY = 0.05
#: Seconds until it is tried again.
METADATA_RETRY = 10.0

#: A log, the topic it is of, up to where its files may go, and who knows better when they do.
Freeable = tuple[Topic, Log, int, Callable[[], int]]


class Upkeep:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: A round of deletions waits for the journal to be on the device.
        self.freeing = False
        self._metadata_due = False
        self._metadata_busy = False

    # --- Syncing, deleting -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Every ``--sync-timeout``: logs, then the journal, then the files that nobody needs any more."""
        broker = self._broker
        if self.freeing or broker.stopping:
            return
        for topic in list(broker.topics.values()):
            try:
                self._sync_topic(topic)
            except Exception as exc:
                report(topic, "sync", exc)
        self.free()
        broker.store.tidy()

    def _sync_topic(self, topic: Topic) -> None:
        journal = self._broker.journal
        if topic.log.dirty:
            topic.log.sync()
        if topic.side is not None and topic.side.dirty:
            topic.side.sync()
        if not topic.ephemeral and topic.log.durable > topic.noted_durable:
            topic.noted_durable = topic.log.durable
            journal.note("durable", topic.incarnation, topic.log.durable)
        if topic.side is not None and not topic.ephemeral and topic.side.durable > topic.noted_side:
            # Before its files are deleted: no number of it must be used twice.
            topic.noted_side = topic.side.durable
            journal.note("side", topic.incarnation, topic.side.durable)
        if topic.log.memory.pinned or topic.over_memory:
            # Beyond its limit: what a thread has written since the last turn of its own can leave, too.
            topic.trim()

    def free(self) -> None:
        """Delete the files that nobody needs, once the journal that says so is on the device."""
        freeable: list[Freeable] = []
        for topic in list(self._broker.topics.values()):
            try:
                freeable += self._freeable(topic)
            except Exception as exc:
                report(topic, "see which of its files can be deleted", exc)
        journal = self._broker.journal
        journal.flush()

        def synced() -> None:
            self.freeing = False
            for topic, log, seq, first_kept in freeable:
                if not log.closed:
                    try:
                        log.free(seq, first_kept)
                    except Exception as exc:
                        report(topic, "delete files", exc)
            self._look_for_old_messages()

        self.freeing = True
        journal.when_synced(journal.noted, synced)

    def _look_for_old_messages(self) -> None:
        """Only when files were deleted: this reads the oldest ones, and a file that is being read stays."""
        for topic in list(self._broker.topics.values()):
            if topic.settings.ttl:
                try:
                    topic.expiry.look()
                except Exception as exc:
                    report(topic, "find what is too old", exc)

    def _freeable(self, topic: Topic) -> list[Freeable]:
        if topic.keys is not None:
            topic.keys.trim()
        found: list[Freeable] = []
        if topic.ephemeral:
            return found
        if topic.log.segments:
            try:
                stop = topic.let_go()
                if stop:
                    found.append((topic, topic.log, stop, topic.first_kept))
            except Exception as exc:
                # The side log's files may go all the same.
                report(topic, "see which of its files can be deleted", exc)
        if topic.side is not None and topic.side.segments:
            found.append((topic, topic.side, topic.first_side_needed(), topic.first_side_needed))
        return found

    # --- Free space ------------------------------------------------------------------------------------------------

    def look_at_space(self) -> None:
        """Refuse publishes from here on, or take them again, by the free space on the disk."""
        broker = self._broker
        if broker.draining:
            # Publishes are refused already.
            broker.store.expect_room(SPACE_BYTES)
            return
        try:
            free = broker.disk.free(broker.path)
        except OSError as exc:
            logger.error("NSQ: cannot look at the disk - %s", exc.strerror or exc)
            broker.store.expect_room(SPACE_BYTES)
            return
        reserve = broker.options.disk_reserve
        broker.store.expect_room(max(SPACE_BYTES, (free - reserve) // 2))
        broker.counters.free_bytes = free
        if free < 2 * reserve:
            self._make_room(2 * reserve - free)
        if free < reserve:
            if not broker.refusing:
                logger.error("NSQ: the disk is nearly full, publishes are refused (%d bytes free)", free)
            broker.refuse(f"the disk is nearly full: {free} bytes free, {reserve} are kept in reserve")
        else:
            if broker.refusing:
                logger.info("NSQ: there is room on the disk again")
            broker.refuse("")

    def _make_room(self, size: int) -> None:
        """Give up what is kept by retention alone, the oldest of all topics first."""
        spare: list[tuple[int, str, int, int]] = []
        for topic in list(self._broker.topics.values()):
            try:
                spare += [
                    (segment.index_times[0] if segment.index_times else 0, topic.name, segment.size, stop)
                    for segment, stop in topic.retention.spare()
                ]
            except Exception as exc:
                report(topic, "see what is kept by retention alone", exc)
        for _, name, segment_size, stop in sorted(spare):
            if size <= 0:
                break
            logger.warning("TOPIC(%s): the disk is nearly full, a file is deleted early (up to %d)", name, stop)
            self._broker.topics[name].retention.give_up(stop)
            size -= segment_size
        if spare and not self.freeing and not self._broker.stopping:
            self.free()

    # --- nsqd.dat --------------------------------------------------------------------------------------------------

    def structure_changed(self, ephemeral: bool) -> None:
        """Topics or channels came, went or were paused: the journal has it at once, ``nsqd.dat`` follows soon."""
        self._broker.journal.flush()
        if not ephemeral:
            self._plan_metadata(METADATA_DELAY)

    def _plan_metadata(self, seconds: float) -> None:
        if not (self._broker.stopping or self._metadata_due):
            self._metadata_due = True
            self._broker.once("metadata", seconds, self.save_metadata)

    def save_metadata(self) -> None:
        self._metadata_due = False
        if self._metadata_busy:
            self.structure_changed(False)
            return
        self._metadata_busy = True
        content = self._metadata()

        def done(_: None, error: BaseException | None) -> None:
            self._metadata_busy = False
            if error is not None:
                logger.error("NSQ: cannot write nsqd.dat - %s", error)
                # It says what was until it is written.
                self._plan_metadata(METADATA_RETRY)

        self._broker.disk.submit(lambda: self.write_metadata(content), done)

    def _metadata(self) -> bytes:
        """Topics and channels in NSQ's own form; empty lists are null there."""
        topics = [
            {
                "name": topic.name,
                "paused": topic.paused,
                "channels": [
                    {"name": channel.name, "paused": channel.paused}
                    for channel in topic.channels.values()
                    if not channel.ephemeral
                ]
                or None,
            }
            for topic in self._broker.topics.values()
            if not topic.ephemeral
        ]
        return msgspec.json.encode({"topics": topics or None, "version": NSQ_VERSION})

    def write_metadata(self, content: bytes | None = None) -> None:
        """Replace ``nsqd.dat``. OSError says why it cannot be."""
        path = self._broker.path / "nsqd.dat"
        self._broker.disk.replace(path, [content if content is not None else self._metadata()])
