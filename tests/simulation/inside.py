"""What must hold inside a broker between two of its turns: its marks, blocks and files, as the modules' texts say.

Clients see the end of a defect, and many a defect never comes to its end: the message is consumed before the crash that
would have lost it. An Inside looks at each broker after every step, and at the end of its process:

- nobody sees a batch before its last message is there (looked at after every turn that has written something)
- the blocks in memory lead up to the log's end without a hole, and no file reaches into the next one
- what counts as written is in its file, and what counts as durable is on the device, with all names that lead to it
- all that a start has found is on the device when it serves, and so is the journal as far as it says so
- no message was given up as damaged; an old journal was synced before the next one counts
- what was written is synced in time
- a channel with messages and a consumer that can take them does not sleep

Each message is looked at once, when a mark passes it and while it is in memory.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.storage.journal import Journal
from flintmq.broker.storage.keys import KeyBlock
from flintmq.broker.storage.log import Log
from flintmq.broker.storage.segment import Segment

from .machine import Machine

if TYPE_CHECKING:
    from .brokers import Run
    from .cluster import Nsqd

__all__ = ["Inside", "stored", "stored_keys"]

#: Seconds that written messages may wait for a sync when nothing is wrong with the disk: three times the sync timeout,
#: and the pause after a sync that found no descriptor.
LAG = 1.0
#: Seconds that messages may wait for a consumer that is ready for them: reads from a slow disk, and the next turns.
ASLEEP = 3.0
#: An id, and how the body of a simulated message begins.
_MESSAGE = re.compile(rb"([0-9a-f]{16})(<\d+ [a-z]+\d+ [^>]+>)")


class Inside:
    def __init__(self, run: Run) -> None:
        self._run = run
        #: By log: how far it was looked at what was written.
        self._looked: dict[Log, int] = {}
        #: By log: a mark that is to be durable, and since when it was not.
        self._unsynced: dict[Log, tuple[int, float]] = {}
        #: By node: when something was wrong with its disk for the last time.
        self._ill: dict[str, float] = {}
        #: By channel: how many deliveries there were, and since when there are no more, although one is possible.
        self._idle: dict[Channel, tuple[int, float]] = {}
        #: By file: where the last message was found.
        self._places: dict[tuple[Path, bool], int] = {}

    def look(self, node: Nsqd, *, ended: bool = False) -> None:
        """Look at a broker that serves; or that has ``ended``, perhaps in the middle of a turn."""
        machine, broker = node.machine, node.broker
        if machine is None or broker is None or not node.up:
            return
        now = self._run.world.seconds
        if node.faulty(machine):
            self._ill[node.name] = now
        for topic in list(broker.topics.values()):
            if topic.exiting:
                continue
            for log in (topic.log, topic.side):
                if log is not None and not log.closed:
                    where = f"{node.name} {topic.name}{' (side)' if log is topic.side else ''}"
                    if not ended:
                        self._look_at_memory(where, log)
                    if log.folder is not None:
                        self._look_at_files(where, log, machine, ended)
                        if not (node.stopping or ended):
                            ill = max(self._ill.get(node.name, 0.0), node.faulty_until, machine.failed_at)
                            self._look_at_syncs(where, log, ill)
        if not (broker.stopping or ended):
            self._look_at_journals(node, machine)
            ill = max(self._ill.get(node.name, 0.0), node.faulty_until, machine.failed_at)
            for topic in broker.topics.values():
                for channel in topic.channels.values():
                    self._look_at_deliveries(f"{node.name} {topic.name}/{channel.name}", channel, ill)

    def started(self, node: Nsqd) -> None:
        """Look at a broker that has just started: what was in the page cache alone is on the device."""
        machine, broker = node.machine, node.broker
        assert machine is not None and broker is not None
        for topic in broker.topics.values():
            for segment in topic.log.segments if topic.log.durability != "memory" else ():
                if segment.end > topic.log.durable or segment.end <= topic.first_kept():
                    # It is new: clients are served before the start is over. Or nobody needs it: the process before
                    # had given it up and could not delete it.
                    continue
                file = self._find(machine, segment.path, on_device=True)
                known = set() if file is None else {each[1] for each in _MESSAGE.finditer(file.synced.data)}
                if not _ids(topic, segment, segment.end) <= known:
                    self._violated(f"{node.name} has started, and {segment.path} is not on the device")

    def reached(self, journal: Journal, mark: int) -> None:
        """A journal says that everything up to ``mark`` is on the device."""
        machine = journal._disk.system
        # Behind the mark a journal that has failed may have a part of what it could not write.
        if isinstance(machine, Machine) and not (machine.dead or journal.closed) and mark >= journal._written:
            name = f"journal-{journal._number:08d}"
            file = self._find(machine, journal._folder / name, on_device=True)
            if file is None or any(data is not None for _, data in file.changes):
                self._violated(f"{machine.name} counts on {name}, and it is not on the device")

    def _find(self, machine: Machine, path: Path, *, on_device: bool) -> Any:
        """Find a file by its names; ``on_device``: by those that are there after a power loss."""
        found: Any = machine.tree
        for part in path.relative_to(machine.root).parts:
            found = (found.synced if on_device else found.entries).get(part)
            if found is None:
                return None
        return found

    def wrote(self, node: Nsqd) -> None:
        """Look at a broker that has written something in this turn of its loop."""
        for topic in node.broker.topics.values() if node.broker is not None and node.up else ():
            log = topic.log
            if log.in_group and topic.pumped > log._group_first:
                self._violated(f"{node.name} {topic.name} hands on the beginning of a batch whose end is to come")

    def _violated(self, text: str) -> None:
        self._run.world.violated(f"inside: {text}")

    def _look_at_memory(self, where: str, log: Log) -> None:
        memory, blocks = log.memory, log.memory.blocks
        pinned = [each.block for each in memory.pinned]
        if not all(block.count for block in (*pinned, *blocks[:-1])):
            self._violated(f"{where} keeps an empty block that it does not fill")
        if any(block.base + block.count > following.base for block, following in pairwise((*pinned, *blocks))):
            self._violated(f"{where} has blocks of the same messages, or in the wrong order")
        if memory.bytes != sum(block.size for block in (*pinned, *blocks)):
            self._violated(f"{where} counts {memory.bytes} bytes of memory, which are not those of its blocks")
        if memory.pinned_count != sum(block.count for block in pinned):
            self._violated(f"{where} counts {memory.pinned_count} pinned messages, which are not those of its blocks")
        if memory.active is not (blocks[-1] if blocks else None):
            self._violated(f"{where} fills a block that is not its last one")
        for block, following in pairwise(blocks):
            if block.base + block.count != following.base:
                self._violated(f"{where} has a hole in memory before seq {following.base}")
        if blocks and blocks[-1].base + blocks[-1].count != log.end:
            self._violated(f"{where} ends at {log.end}, its last block does not")

    def _look_at_files(self, where: str, log: Log, machine: Machine, ended: bool) -> None:
        for segment, following in pairwise(log.segments) if not ended else ():
            if segment.end > following.base:
                self._violated(f"{where}: {segment.path.name} reaches into {following.path.name}")
        for segment in log.segments:
            if segment.damaged:
                self._violated(f"{where}: {segment.path.name} is called damaged: {segment.damaged}")
        if log.durability == "memory":
            return
        written = self._looked.get(log, log.written)
        for seq in range(min(written, log.written), log.written):
            self._look_for(where, log, machine, seq, on_device=False)
        self._looked[log] = log.written

    def made_durable(self, log: Log, seq: int) -> None:
        """A log is told that everything before ``seq`` is on the device: another sync may bring it there soon."""
        machine = log._disk.system
        if isinstance(machine, Machine) and not machine.dead and log.folder is not None and log.durability != "memory":
            for each in range(log.durable, seq):
                self._look_for(f"{machine.name} {log.name}", log, machine, each, on_device=True)

    def _look_for(self, where: str, log: Log, machine: Machine, seq: int, *, on_device: bool) -> None:
        """A message that is in memory is in its file, too; ``on_device``: also if the power goes now."""
        frame = log.frame(seq) if log.in_memory(seq) else None
        segment = next((each for each in log.segments if any(each.present(seq, seq + 1))), None)
        if frame is None or segment is None:
            return
        mark = "durable" if on_device else "written"
        file = self._find(machine, segment.path, on_device=on_device)
        if file is None:
            self._violated(f"{where}: seq {seq} counts as {mark}, and {segment.path} is not there")
            return
        data = file.synced.data if on_device else file.content.data
        # Not how often it was delivered, which is not in the file.
        wanted, place = bytes(frame[18:]), (segment.path, on_device)
        at = data.find(wanted, self._places.get(place, 0))
        if at < 0:
            at = data.find(wanted)
        if at < 0:
            self._violated(f"{where}: seq {seq} counts as {mark}, and is not in {segment.path.name}")
        else:
            self._places[place] = at

    def _look_at_syncs(self, where: str, log: Log, ill: float) -> None:
        now = self._run.world.seconds
        mark, since = self._unsynced.get(log, (0, now))
        if log.durability == "memory" or log.durable >= mark:
            self._unsynced[log] = (log.whole, now)
        elif now - max(since, ill) > LAG:
            self._violated(
                f"{where} was written up to {mark} {now - since:.1f} s ago, and is durable up to {log.durable}"
            )

    def _look_at_deliveries(self, where: str, channel: Channel, ill: float) -> None:
        now = self._run.world.seconds
        waiting = channel.waiting.total + len(channel.requeued) + channel.side.total
        stands = channel.exiting or channel.paused or channel.seeking is not None or channel.pace is not None
        if stands or not waiting or not any(session.room > 0 for session in channel.sessions.values()):
            self._idle.pop(channel, None)
            return
        count = sum(session.message_count for session in channel.sessions.values())
        before, since = self._idle.setdefault(channel, (count, now))
        if count != before:
            self._idle[channel] = count, now
        elif now - max(since, ill) > ASLEEP:
            self._violated(f"{where} sleeps for {now - since:.1f} s with {waiting} messages and a consumer for them")

    def _look_at_journals(self, node: Nsqd, machine: Machine) -> None:
        assert node.broker is not None
        journal = node.broker.journal
        if journal._syncing or journal.closed:
            return
        for name, file in machine._folder(journal._folder).entries.items():
            kind, _, digits = name.partition("-")
            if kind == "journal" and int(digits) < journal._number:
                if any(data is not None for _, data in file.changes):  # type: ignore[union-attr]
                    self._violated(f"{node.name} goes on in another journal, and {name} is not on the device")


def stored(topic: Topic, machine: Machine) -> set[bytes]:
    """Return how the bodies begin of the messages that are in the topic's files."""
    found: set[bytes] = set()
    for segment in topic.log.segments:
        try:
            file: Any = machine._node(segment.path)
        except FileNotFoundError:
            continue
        ids = _ids(topic, segment, topic.log.written)
        found.update(each[2] for each in _MESSAGE.finditer(file.content.data) if each[1] in ids)
    return found


def stored_keys(topic: Topic, machine: Machine) -> set[bytes]:
    """Return the digests in the topic's files of keys: these stood in segments that are deleted."""
    found: set[bytes] = set()
    folder = topic.log.folder
    assert folder is not None
    try:
        entries: dict[str, Any] = machine._folder(folder).entries
    except FileNotFoundError:
        return found
    for name, file in entries.items():
        if name.endswith(".keys"):
            data = bytes(file.content.data)
            digests = KeyBlock.decode(data[20:], int.from_bytes(data[12:16], "big")).digests
            found.update(bytes(digests[at : at + 16]) for at in range(0, len(digests), 16))
    return found


def _ids(topic: Topic, segment: Segment, stop: int) -> set[bytes]:
    """Return the ids of the messages before ``stop`` that a segment holds."""
    return {topic.ids.text(seq) for first, last in segment.present(0, stop) for seq in range(first, last)}
