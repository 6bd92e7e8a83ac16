"""Bring the topics back at a start: what the journal knows, on top of what is in the files.

An Opening reads journal and logs, makes topics and channels of them, and says what the broker goes on with. Folders
that the journal does not know are deleted, or set aside if they hold messages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.broker.data_path import LOST, RECOVERED, remove_tree
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.redrive import RUNS, finish_moved, resume
from flintmq.broker.delivery.topic import RESERVE, Topic
from flintmq.broker.storage.journal import ANOTHER_BOOT, SIDE, State, TopicState, damaged
from flintmq.broker.storage.log import Log
from flintmq.broker.storage.mover import copies
from flintmq.broker.storage.ranges import Ranges
from flintmq.broker.storage.segment import FILE_HEADER, read_header

if TYPE_CHECKING:
    from flintmq.broker.daemon import Broker

__all__ = ["Opening"]

logger = logging.getLogger(__name__)

#: Numbers of channels that are left out after damage to the journal: lost entries may have used them.
SKIPPED_CHANNELS = 1 << 20
#: Ranges of seqs that one line names at most.
_NAMED = 10


class Opening:
    def __init__(self, broker: Broker, root: Path) -> None:
        self._broker = broker
        self._root = root

    def run(self, state: State) -> None:
        """Open every topic of the journal's state, then begin a new journal. Nobody is served before it returns."""
        broker, root = self._broker, self._root
        disk, journal, clean = broker.disk, broker.journal, state.clean
        same_boot = state.boot == broker.clock.boot_id()
        self._check(state)
        journal.release()
        broker.node_ids.read(root)
        opened = [self._open_topic(topic_state, clean) for topic_state in state.topics.values()]
        finish_moved(opened, state)
        for topic, topic_state in zip(opened, state.topics.values(), strict=True):
            self._restore_topic(topic, topic_state, same_boot)
        broker.node_ids.take_up(root, opened)
        skipped = SKIPPED_CHANNELS if journal.damage else 0
        names = disk.names(root / "topics")
        broker.resume(
            state,
            max(state.next_incarnation, highest_incarnation(names) + 1),
            state.next_channel + skipped,
        )
        known = {topic.folder for topic in opened}
        for name in disk.names(root / "topics"):
            if root / "topics" / name not in known and not name.endswith((LOST, RECOVERED)):
                self._clear_away(root / "topics" / name, state.next_incarnation)
        if not clean:
            # What is called durable from here on must be: a folder's own entry too.
            disk.sync_folder(root / "topics")
        journal.start(state)
        for topic in broker.topics.values():
            # The old ceiling was durable; after an unclean stop the log goes on there, so a new one is needed.
            topic.grant(topic.ceiling, 0)
            if clean:
                # Otherwise the snapshot says so, together with what follows from it.
                journal.note("durable", topic.incarnation, topic.log.durable)
            # Ephemeral channels are gone: where the topic stands still now, the next start must know.
            topic.note_frozen()
            broker.turn(topic)
        resume(broker, state)
        journal.sync_now()
        if clean:
            # In slices, when the loop runs: what older files say is said again in one, and they can go.
            broker.later(journal.take_snapshot)
        else:
            journal.secure()

    def _check(self, state: State) -> None:
        """Is there a journal where there are topics? StorageError if not, unless that is accepted.

        A journal that only lacks its end is no damage: a power failure may leave a topic's files and not its note, and
        then no publish to it was answered. Such a topic is set aside.
        """
        journal = self._broker.journal
        if journal.is_new:
            names = self._broker.disk.names(self._root / "topics")
            unknown = [name for name in names if _incarnation(name) >= state.next_incarnation and self._is_topic(name)]
            if unknown:
                journal.damage.append(
                    f"all files in {self._root / 'journal'} are missing, but not {', '.join(unknown)}"
                )
                if not self._broker.options.accept_damaged_journal:
                    raise damaged(journal.damage)
                logger.error("JOURNAL: damaged, which was accepted - %s", journal.damage[-1])
        if journal.damage:
            # Entries that used these numbers may be among those that are gone.
            for topic in state.topics.values():
                topic.ceiling += RESERVE
                topic.side_next = max(topic.side_next, SIDE + self._broker.clock.wall() // 1000) + RESERVE

    def _is_topic(self, name: str) -> bool:
        """Is it the folder of a topic with at least one segment?"""
        disk, folder = self._broker.disk, self._root / "topics" / name
        for child in disk.names(folder):
            if child.endswith(".seg"):
                fd = disk.open(folder / child)
                try:
                    if read_header(folder / child, disk.read(fd, FILE_HEADER, 0)) is not None:
                        return True
                finally:
                    disk.close_file(fd)
        return False

    def _clear_away(self, folder: Path, next_incarnation: int) -> None:
        """A topic's folder that the journal does not know.

        It was deleted; or it was made right before a crash, and nothing in it was ever answered for. If there are
        messages in one that was never heard of, though, it is the journal that is not whole: then they are set aside.
        """
        heard_of = 0 <= _incarnation(folder.name) < next_incarnation and not self._broker.journal.damage
        if heard_of or not any(name.endswith(".seg") for name in self._broker.disk.names(folder)):
            remove_tree(self._broker.disk, folder)
            return
        lost = folder.with_name(folder.name + LOST)
        logger.error(
            "NSQ: the journal does not know %s, it is set aside as %s; flintmq recover brings its messages back",
            folder.name,
            lost,
        )
        self._broker.disk.rename(folder, lost)

    def _open_topic(self, state: TopicState, clean: bool) -> Topic:
        disk, root = self._broker.disk, self._root
        folder = root / "topics" / f"{state.name}@{state.incarnation}"
        if not disk.exists(folder):
            disk.make_folder(folder)
            disk.sync_folder(root / "topics")
        topic = Topic(self._broker, state.name, state.incarnation, state.base, folder)
        after = None if clean and state.end is not None else state.ceiling
        topic.log.recover(state.durable, after)
        if after is None and state.end is not None:
            # Messages that were finished before they were ever written leave no trace but the end.
            topic.log.resume_at(state.end)
        topic.restore_keys()
        # What was written before its reservation was on the device is here all the same, and is seen from now on.
        topic.ceiling = max(state.ceiling, topic.log.end)
        topic.paused = state.paused
        topic.readers.restore(state.readers)
        if topic.log.durability != "memory" and topic.readers.first >= state.durable:
            # Of files that were there for a reader none was deleted. Had they been, the journal would say otherwise.
            topic.log.removal.keep_from(topic.readers.first)
        topic.side_base = state.side_next
        if disk.exists(folder / "side"):
            topic.side = topic._new_log(folder / "side", SIDE)
            topic.side.recover(state.side_end, None)
            topic.side.resume_at(state.side_next)
        self._broker.topics[topic.name] = topic
        return topic

    def _report_missing(self, topic: Topic, state: TopicState, found: list[tuple[int, int]]) -> None:
        """Say which messages that must be in the files are not there, and let readers of the log know.

        A gap that a crash left is none of these, nor what was deleted: only what a channel still has to get counts, and
        only where the journal is exact about it: not while a redrive copies. Of durability ``memory`` much never
        reaches a file.
        """
        if self._broker.journal.damage or topic.log.durability == "memory":
            return
        there = Ranges.union(sorted([*found, *topic.log.reader.lost()]))
        beside = Ranges.union(
            sorted([*topic.side.spans(), *topic.side.reader.lost()]) if topic.side is not None else []
        )
        missing: list[tuple[int, int]] = []
        missing_beside: list[tuple[int, int]] = []
        for channel in state.channels.values():
            if state.whole or (channel.exact and not state.was_frozen):
                missing += channel.outstanding.within([(state.base, state.durable)]).without(there)
            if channel.exact and not (channel.redrive is not None and channel.redrive[RUNS]):
                missing_beside += channel.outstanding.within([(SIDE, state.side_exact)]).without(beside)
        if missing:
            topic.log.reader.set_aside.extend(self._report_lost(topic, topic.log.folder, missing))
        if missing_beside:
            self._report_lost(topic, topic.folder / "side" if topic.folder is not None else None, missing_beside)

    def _report_lost(self, topic: Topic, folder: Path | None, seqs: list[tuple[int, int]]) -> Ranges:
        gone = Ranges.union(sorted(seqs))
        logger.error(
            "TOPIC(%s): %d messages are lost, their files in %s are missing (seqs %s)",
            topic.name,
            gone.total,
            folder,
            ", ".join(f"{first} to {stop - 1}" for first, stop in islice(gone, _NAMED))
            + (" ..." * (len(gone) > _NAMED)),
        )
        return gone

    def _restore_topic(self, topic: Topic, state: TopicState, same_boot: bool) -> None:
        # First of all: it says which files count.
        copied = topic.mover.restore(copies(topic.side)) if topic.side is not None else []
        spans = topic.log.spans()
        end = topic.log.end
        topic.pumped = end if state.frozen is None else min(state.frozen, end)
        if state.frozen is not None:
            # A gap right behind the mark is no backlog.
            behind = [first for first, stop in spans if stop > topic.pumped]
            topic.pumped = max(topic.pumped, behind[0]) if behind else end
            topic.gaps.extend(_between(spans, topic.pumped, end))
        addressed = side_spans(topic.side) if topic.side is not None else {}
        now, wall = self._broker.clock.now(), self._broker.clock.wall()
        self._report_missing(topic, state, [*copied, *spans])
        for channel_state in state.channels.values():
            channel = Channel(topic, channel_state.name, channel_state.id, topic.pumped)
            channel.paused = channel_state.paused
            mine = [*copied, *_before(spans, topic.pumped), *addressed.get(channel_state.id, [])]
            back = channel_state.back
            for seq, (attempts, due, due_wall) in back.items():
                if due == ANOTHER_BOOT or (due and not same_boot):
                    back[seq] = (attempts, now + due_wall - wall, due_wall)
            topic.channels[channel.name] = channel
            # Gone through anew for each: all of them together might take more memory than all else.
            channel.restore(channel_state.outstanding.within(mine), back, topic.log.deferrals(topic.pumped))
        if topic.pumped == end:
            return
        for seqs, dues in topic.log.deferrals(topic.pumped):
            pairs = zip(seqs, dues, strict=True)
            topic.log.deferred.extend((seq, due) for seq, due in pairs if seq >= topic.pumped)


def _incarnation(name: str) -> int:
    """The number in the name of a topic's folder; -1 if it is none, or was set aside."""
    digits = name.rpartition("@")[2]
    return int(digits) if digits.isdecimal() else -1


def highest_incarnation(names: Iterable[str]) -> int:
    """The highest number that any topic's folder has or had, those set aside included."""
    return max((_incarnation(name.removesuffix(RECOVERED).removesuffix(LOST)) for name in names), default=0)


def side_spans(side: Log) -> dict[int, list[tuple[int, int]]]:
    """Which seqs of a side log are for which channel."""
    found: dict[int, list[tuple[int, int]]] = {}
    for first, count, extra in side.addressed():
        # 0 is nobody in particular: the copy of an old message.
        spans = found.setdefault(int.from_bytes(extra[:4], "big"), [])
        if spans and spans[-1][1] == first:
            spans[-1] = (spans[-1][0], first + count)
        else:
            spans.append((first, first + count))
    return found


def _before(spans: list[tuple[int, int]], stop: int) -> Iterator[tuple[int, int]]:
    for first, last in spans:
        if first < stop:
            yield first, min(last, stop)


def _between(spans: list[tuple[int, int]], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """What of ``first`` … ``stop - 1`` no span holds."""
    for start, end in spans:
        if first < start:
            yield first, start
        first = max(first, end)
    if first < stop:
        yield first, stop
