"""The journal: what was said is what is read back, after torn tails, rolls, snapshots in slices, and full disks.

A Teller says everything to a real Journal on a simulated disk and, in the same words, to a plain State: what recovery
gives must be that State, or an earlier one where the end of the file is gone.
"""

from __future__ import annotations

import errno
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from conftest import StartBroker
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage.journal import ANOTHER_BOOT, NEVER, SIDE, ChannelState, Journal, State
from flintmq.broker.storage.notes import NOTES
from flintmq.errors import FormatError, StartError, StorageError
from support.fakes import Client, FakeClock
from support.simdisk import SimDisk

ROOT = Path("/data")
HEADER = 44


class Book:
    """A channel, as the journal sees it."""

    def __init__(self, ident: int) -> None:
        self.id = ident
        self.done = array("q")
        self.back = array("q")

    def take_done(self) -> bytes:
        done, self.done = self.done.tobytes(), array("q")
        return done

    def take_back(self) -> bytes:
        back, self.back = self.back.tobytes(), array("q")
        return back


class Teller:
    def __init__(self, disk: SimDisk | None = None, clock: FakeClock | None = None) -> None:
        self.disk = disk or SimDisk(ROOT, inline=True)
        self.clock = clock or FakeClock()
        self.posted: deque[Callable[[], None]] = deque()
        self.laters: deque[Callable[[], None]] = deque()
        self.disk.attach(self.posted.append)
        self.fatal: list[BaseException] = []
        self.journal = Journal(
            self.disk,
            self.clock,
            ROOT,
            fatal=self.fatal.append,
            later=self.laters.append,
            snapshot=self._snapshot,
        )
        self.state = self.journal.recover()
        self.journal.start(self.state)
        self.state.apply(NOTES["open"](self.clock.boot_id()))
        self.books: dict[int, Book] = {}

    def note(self, verb: str, *args: Any) -> int:
        self.state.apply(NOTES[verb](*args))
        return self.journal.note(verb, *args)

    def _book(self, channel: int) -> Book:
        book = self.books.setdefault(channel, Book(channel))
        self.journal.touch(book)
        return book

    def done(self, channel: int, first: int, stop: int) -> None:
        self.state.apply_done(channel, array("q", (first, stop)))
        self._book(channel).done.extend((first, stop))

    def back(self, channel: int, seq: int, attempts: int, due: int, wall: int) -> None:
        # A message is put back only while it is outstanding.
        if channel in self.state.channels and seq in self.state.channels[channel].outstanding:
            self.state.apply_back(channel, array("q", (seq, attempts, due, wall)))
            book = self._book(channel)
            self.journal.flush()
            book.back.extend((seq, attempts, due, wall))
            self.journal.touch(book)

    def run(self) -> None:
        while self.posted or self.laters:
            (self.posted or self.laters).popleft()()

    def _snapshot(self) -> Iterator[tuple[Any, ...]]:
        """As the broker does it, of the state at each moment."""
        state = self.state
        yield ("floor", state.floor, state.next_incarnation, state.next_channel)
        for topic in list(state.topics.values()):
            if topic.incarnation not in state.topics:
                continue
            yield ("topic", topic.incarnation, topic.name, topic.base, topic.ceiling)
            yield ("durable", topic.incarnation, topic.durable)
            yield ("pause", topic.incarnation, topic.paused)
            yield ("frozen", topic.incarnation, topic.frozen)
            for channel in list(topic.channels.values()):
                if channel.id not in state.channels:
                    continue
                yield ("channel", topic.incarnation, channel.id, channel.name, topic.durable, SIDE)
                yield ("channel_pause", channel.id, channel.paused)
                yield ("channel_state", channel.id, *rows(channel))

    def recovered(self, disk: SimDisk | None = None) -> dict[str, Any]:
        """What the next start after kill -9 reads."""
        return dump(reader(disk or self.disk.after_kill(), self.clock).recover())


def reader(disk: SimDisk, clock: FakeClock) -> Journal:
    return Journal(
        disk,
        clock,
        ROOT,
        fatal=pytest.fail,
        later=pytest.fail,
        snapshot=lambda: iter(()),  # type: ignore[arg-type]
    )


def rows(channel: ChannelState) -> tuple[bytes, bytes]:
    pairs = array("q", [number for pair in channel.outstanding for number in pair])
    back = array("q", [number for seq, row in channel.back.items() for number in (seq, *row)])
    return pairs.tobytes(), back.tobytes()


def dump(state: State) -> dict[str, Any]:
    return {
        "numbers": (state.floor, state.next_incarnation, state.next_channel),
        "topics": {
            t.incarnation: (t.name, t.base, t.ceiling, t.durable, t.frozen, t.paused, t.end, sorted(t.channels))
            for t in state.topics.values()
        },
        "channels": {
            c.id: (
                c.name,
                c.paused,
                list(c.outstanding),
                {seq: row for seq, row in c.back.items() if seq in c.outstanding},
            )
            for c in state.channels.values()
        },
    }


def two_topics(teller: Teller) -> None:
    teller.note("topic", 1, "t", 100, 1_000)
    teller.note("channel", 1, 1, "c", 100, SIDE)
    teller.note("frozen", 1, None)
    teller.note("topic", 2, "u", 500, 2_000)
    teller.note("channel", 2, 2, "d", 500, SIDE)
    teller.journal.flush()


# --- Any history ------------------------------------------------------------------------------------------------------

seqs = st.integers(0, 60)
incarnations = st.integers(1, 5)
channels = st.integers(1, 6)
steps = st.one_of(
    st.tuples(st.just("topic"), incarnations, st.integers(0, 20)),
    st.tuples(st.just("untopic"), incarnations, st.integers(0, 500)),
    st.tuples(st.just("ceiling"), incarnations, st.integers(100, 200)),
    st.tuples(st.just("durable"), incarnations, seqs),
    st.tuples(st.just("frozen"), incarnations, st.none() | seqs),
    st.tuples(st.just("pause"), incarnations, st.booleans()),
    st.tuples(st.just("channel"), incarnations, channels, seqs),
    st.tuples(st.just("unchannel"), channels),
    st.tuples(st.just("channel_pause"), channels, st.booleans()),
    st.tuples(st.just("skip"), incarnations, seqs, seqs),
    st.tuples(st.just("empty"), channels, seqs),
    st.tuples(st.just("done"), channels, seqs, st.integers(1, 20)),
    st.tuples(st.just("back"), channels, seqs, st.integers(1, 9), st.integers(0, 3)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("roll")),
    st.tuples(st.just("slice")),
    st.tuples(st.just("answers")),
)


class History:
    """Turns steps into what a broker could say: numbers are not used twice, and only what exists changes."""

    def __init__(self, teller: Teller) -> None:
        self.teller = teller
        self._incarnations: dict[int, int] = {}
        self._channels: dict[int, tuple[int, int]] = {}
        self._next = 1

    def take(self, step: tuple[Any, ...]) -> None:
        teller, (verb, *args) = self.teller, step
        if verb == "flush":
            teller.journal.flush()
        elif verb == "roll":
            teller.journal.flush()
            if not teller.journal._snapshotting and not teller.journal._syncing:
                teller.journal._roll()
        elif verb == "slice":
            if teller.laters:
                teller.laters.popleft()()
        elif verb == "answers":
            while teller.posted:
                teller.posted.popleft()()
        elif verb == "topic":
            if args[0] not in self._incarnations:
                self._incarnations[args[0]] = self._next
                teller.note("topic", self._next, f"t{args[0]}", args[1], args[1] + 100)
                self._next += 1
        elif verb == "untopic":
            incarnation = self._incarnations.pop(args[0], None)
            if incarnation is not None:
                self._channels = {name: ids for name, ids in self._channels.items() if ids[0] != incarnation}
                teller.note("untopic", incarnation, args[1])
        elif verb == "channel":
            if args[0] in self._incarnations and args[1] not in self._channels:
                incarnation = self._incarnations[args[0]]
                self._channels[args[1]] = (incarnation, self._next)
                teller.note("channel", incarnation, self._next, f"c{args[1]}", args[2], SIDE)
                self._next += 1
        elif verb in ("ceiling", "durable", "frozen", "pause"):
            if args[0] in self._incarnations:
                teller.note(verb, self._incarnations[args[0]], *args[1:])
        elif verb == "skip":
            if args[0] in self._incarnations and args[1] < args[2]:
                teller.note(verb, self._incarnations[args[0]], args[1], args[2])
        elif args[0] in self._channels:
            incarnation, channel = self._channels[args[0]]
            if verb == "unchannel":
                del self._channels[args[0]]
                teller.note("unchannel", incarnation, channel)
            elif verb == "channel_pause":
                teller.note(verb, channel, args[1])
            elif verb == "empty":
                teller.note(verb, channel, args[1], SIDE)
            elif verb == "done":
                teller.done(channel, args[1], args[1] + args[2])
            else:
                teller.back(channel, args[1], args[2], args[3], args[3])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note per slice, so that much happens in between; files with less room ahead."""
    monkeypatch.setattr(journal_module, "_SLICE", 1)
    monkeypatch.setattr(journal_module, "ROLL_AT", 100_000)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=60))
def test_any_history_is_read_back_as_it_was(history: list[tuple[Any, ...]]) -> None:
    """Also while snapshots are taken, a slice at a time, and the state changes in between."""
    teller = Teller()
    told = History(teller)
    for step in history:
        told.take(step)
    teller.journal.flush()
    assert teller.recovered() == dump(teller.state)
    teller.run()
    assert teller.recovered() == dump(teller.state)
    assert teller.fatal == []


# --- Tails ------------------------------------------------------------------------------------------------------------


def test_a_torn_tail_costs_the_torn_batch_and_what_follows_it() -> None:
    teller = Teller()
    two_topics(teller)
    marks = [(teller.journal._offset, teller.recovered())]
    for seq in range(100, 110):
        teller.done(1, seq, seq + 1)
        teller.journal.flush()
        marks.append((teller.journal._offset, teller.recovered()))
    (path,) = teller.disk.paths(ROOT)
    content = teller.disk.content(path)
    for cut in range(marks[0][0], marks[-1][0] + 1):
        for tail in (b"", bytes(5_000), b"?" * 50):
            torn = content[:cut] + tail
            # A batch that ends in zeros is whole when zeros follow.
            expected = [state for offset, state in marks if torn[:offset] == content[:offset]][-1]
            disk = SimDisk(ROOT, inline=True)
            disk.swap(path, torn)
            assert teller.recovered(disk) == expected, f"cut at {cut}"


def test_a_file_whose_header_never_arrived_is_passed_over() -> None:
    teller = Teller()
    two_topics(teller)
    for size in (0, 10, HEADER, 5_000):
        disk = teller.disk.after_kill()
        disk.close_file(disk.open(ROOT / "journal-00000002", create=True))
        disk.swap(ROOT / "journal-00000002", bytes(size))
        assert teller.recovered(disk) == dump(teller.state)
        again = Teller(disk, teller.clock)
        assert dump(again.state) == dump(teller.state)
        assert disk.paths(ROOT)[-1].name == "journal-00000003", "its number is not used again"


def test_a_clean_stop_is_known_and_only_the_last_word_counts() -> None:
    teller = Teller()
    two_topics(teller)
    teller.note("end", 1, 777, SIDE)
    teller.journal.save(clean=True)
    teller.journal.close()
    disk = teller.disk.after_power_loss("none")
    state = reader(disk, teller.clock).recover()
    assert state.clean
    assert state.topics[1].end == 777
    again = Teller(disk, teller.clock)
    assert not again.journal.recover().clean
    assert again.state.topics[1].end is None


def test_a_newer_journal_is_refused() -> None:
    teller = Teller()
    (path,) = teller.disk.paths(ROOT)
    content = bytearray(teller.disk.content(path))
    content[8:10] = (3).to_bytes(2, "big")
    content[HEADER - 4 : HEADER] = google_crc32c.extend(0, bytes(content[: HEADER - 4])).to_bytes(4, "big")
    disk = teller.disk.after_kill()
    disk.swap(path, bytes(content))
    with pytest.raises(FormatError, match=r"newer version of flintmq \(format 3, known: 2\)"):
        teller.recovered(disk)


def test_due_times_of_an_earlier_boot_count_by_the_wall() -> None:
    teller = Teller()
    two_topics(teller)
    teller.back(1, 100, 3, 5_000, 9_000)
    teller.back(1, 101, 3, 0, 0)
    teller.journal.flush()
    teller.clock.reboot()
    again = Teller(teller.disk.after_kill(), teller.clock)
    again.back(1, 102, 1, 6_000, 9_500)
    again.journal.flush()
    state = reader(again.disk.after_kill(), teller.clock).recover()
    assert state.boot == teller.clock.boot_id()
    assert state.channels[1].back == {100: (3, ANOTHER_BOOT, 9_000), 101: (3, 0, 0), 102: (1, 6_000, 9_500)}


# --- Rolling ----------------------------------------------------------------------------------------------------------


def test_a_roll_leaves_a_snapshot_and_one_file() -> None:
    teller = Teller()
    two_topics(teller)
    teller.done(1, 100, 150)
    teller.journal.flush()
    teller.journal._roll()
    teller.done(1, 160, 170)
    teller.journal.flush()
    teller.run()
    assert [path.name for path in teller.disk.paths(ROOT)] == ["journal-00000002", "snapshot-00000002"]
    assert teller.recovered() == dump(teller.state)
    assert len(teller.disk.open_files) == 1


def test_a_file_rolls_at_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ROLL_AT", 1_000)
    teller = Teller()
    two_topics(teller)
    for seq in range(100, 500, 2):
        teller.done(1, seq, seq + 1)
        teller.journal.flush()
        teller.run()
    assert len(teller.disk.paths(ROOT)) == 2
    assert teller.journal._number > 3
    assert teller.recovered() == dump(teller.state)


def test_a_file_rolls_although_there_is_always_a_sync_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ROLL_AT", 1_000)
    teller = Teller()
    two_topics(teller)
    for number in range(400):
        position = teller.note("ceiling", 1, 10_000 + number)
        teller.journal.flush()
        teller.journal.when_synced(position, lambda: None)
        # The end of a sync begins the next one.
        for queue in (teller.posted, teller.laters):
            if queue:
                queue.popleft()()
    teller.run()
    assert teller.journal._number > 3
    assert len(teller.disk.paths(ROOT)) == 2
    assert teller.recovered() == dump(teller.state)


def test_whoever_waits_for_a_sync_is_told_after_a_roll() -> None:
    teller = Teller()
    told: list[str] = []
    teller.journal.when_synced(teller.note("topic", 1, "t", 100, 1_000), lambda: told.append("before"))
    teller.run()
    position = teller.note("ceiling", 1, 2_000)
    teller.journal._waiting.append((position, lambda: told.append("during")))
    teller.journal.flush()
    teller.journal._roll()
    teller.journal.when_synced(teller.note("ceiling", 1, 3_000), lambda: told.append("after"))
    assert told == ["before"], "nobody is told before the device has it"
    teller.run()
    assert told == ["before", "during", "after"]


def test_what_was_said_before_a_roll_is_on_the_device_when_it_is_told_so() -> None:
    teller = Teller()
    told: list[str] = []
    position = teller.note("topic", 1, "t", 100, 1_000)
    teller.journal.flush()
    teller.journal._waiting.append((position, lambda: told.append("synced")))
    teller.journal._roll()
    while teller.posted:
        teller.posted.popleft()()
    assert told == ["synced"]
    assert teller.laters, "the snapshot is not written yet"
    assert teller.recovered(teller.disk.after_power_loss("none")) == dump(teller.state)


def test_a_roll_that_begins_as_another_ends_has_no_snapshot_before_it_is_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waited for the first may write so much that the next begins at once. The power may go at any moment."""
    monkeypatch.setattr(journal_module, "ROLL_AT", 600)
    teller = Teller()
    two_topics(teller)
    works: deque[Callable[[], None]] = deque()

    def submit(work: Callable[[], Any], then: Callable[[Any, BaseException | None], None], urgency: int = 0) -> None:
        works.append(lambda: then(work(), None))

    def write_more() -> None:
        while teller.journal._number < 3:
            teller.done(1, 100, 101)
            teller.journal.flush()

    teller.disk.submit = submit  # type: ignore[assignment, method-assign]
    teller.journal.flush()
    teller.journal._waiting.append((teller.note("ceiling", 1, 2_000), write_more))
    teller.journal.flush()
    teller.journal._roll()
    steps = 0
    # Threads may be slow, and what was submitted last is done first: no order is promised.
    while works or teller.laters:
        (teller.laters.popleft() if teller.laters else works.pop())()
        reader(teller.disk.after_power_loss("none"), teller.clock).recover()
        steps += 1
    assert (teller.journal._number, steps > 3) == (3, True)
    assert [path.name for path in teller.disk.paths(ROOT)] == ["journal-00000003", "snapshot-00000003"]


def test_a_wait_for_what_is_synced_already_is_over_at_once() -> None:
    teller = Teller()
    told: list[str] = []
    teller.journal.when_synced(0, lambda: told.append("now"))
    assert told == ["now"]


def test_a_full_disk_puts_a_roll_off_and_the_next_try_works() -> None:
    teller = Teller()
    two_topics(teller)
    for kind in ("allocate", "write"):
        teller.disk.fail(kind, errno.ENOSPC, path="journal-00000002", short=10)
        teller.journal._roll()
        teller.run()
        assert [path.name for path in teller.disk.paths(ROOT)] == ["journal-00000001"]
        teller.done(1, 100, 110)
        teller.journal.flush()
        assert teller.recovered() == dump(teller.state)
    teller.journal._roll()
    teller.run()
    assert [path.name for path in teller.disk.paths(ROOT)] == ["journal-00000002", "snapshot-00000002"]
    assert teller.recovered() == dump(teller.state)
    assert teller.fatal == []


@pytest.mark.parametrize("kind", ["create", "write", "sync", "rename", "sync_folder"])
def test_a_failed_snapshot_keeps_the_old_files(kind: str) -> None:
    teller = Teller()
    two_topics(teller)
    teller.journal.take_snapshot()
    teller.run()
    names = [entry.name for entry in teller.disk.paths(ROOT)]
    assert "snapshot-00000001" in names
    teller.disk.fail(kind, errno.EIO, path="" if kind == "sync_folder" else "snapshot")
    number = teller.journal._number
    teller.note("floor", 9_999, 1, 1)
    teller.journal.flush()
    teller.journal.take_snapshot()
    teller.run()
    assert not teller.journal._snapshotting
    assert teller.journal._number == number
    assert teller.recovered() == dump(teller.state)
    assert len(teller.disk.open_files) == 1
    teller.journal._roll()
    teller.run()
    assert [entry.name for entry in teller.disk.paths(ROOT)] == ["journal-00000002", "snapshot-00000002"]
    assert teller.recovered() == dump(teller.state)


def test_a_damaged_snapshot_is_refused_not_guessed_at() -> None:
    teller = Teller()
    two_topics(teller)
    teller.journal._roll()
    teller.run()
    path = ROOT / "snapshot-00000002"
    content = teller.disk.content(path)
    for damaged in (content[:-1], content[:100] + b"?" + content[101:], b""):
        disk = teller.disk.after_kill()
        disk.swap(path, damaged)
        with pytest.raises(StorageError, match="is damaged"):
            teller.recovered(disk)


def test_a_topic_made_again_replaces_one_whose_deletion_was_lost() -> None:
    """The end of the old file is gone, the beginning of the new one is there: pages land in any order."""
    teller = Teller()
    two_topics(teller)
    (path,) = teller.disk.paths(ROOT)
    before = teller.journal._offset
    teller.note("untopic", 1, 1_000)
    teller.journal.flush()
    content = teller.disk.content(path)
    teller.journal._roll()
    teller.note("topic", 3, "t", 1_000, 2_000)
    teller.journal.flush()
    disk = teller.disk.after_kill()
    disk.swap(path, content[:before] + bytes(len(content) - before))
    state = reader(disk, teller.clock).recover()
    assert sorted(state.topics) == [2, 3]
    assert state.floor >= 1_000
    assert list(state.channels) == [2]


def test_a_failed_write_or_sync_is_fatal() -> None:
    for kind in ("write", "sync"):
        teller = Teller()
        told: list[str] = []
        teller.disk.fail(kind, errno.EIO)
        teller.journal.when_synced(teller.note("topic", 1, "t", 100, 1_000), lambda: told.append("?"))  # noqa: B023
        teller.run()
        assert len(teller.fatal) == 1
        assert told == []


def test_finishing_messages_works_on_a_full_disk() -> None:
    """Its space was allocated ahead, so that consumers can free the disk."""
    teller = Teller()
    two_topics(teller)
    teller.disk.capacity = teller.disk.used
    for seq in range(100, 200):
        teller.done(1, seq, seq + 1)
        teller.journal.flush()
    teller.journal.sync()
    teller.run()
    assert teller.fatal == []
    assert teller.recovered() == dump(teller.state)


def test_a_stop_does_not_begin_a_new_file(monkeypatch: pytest.MonkeyPatch) -> None:
    teller = Teller()
    two_topics(teller)
    teller.disk.close()
    monkeypatch.setattr(journal_module, "ROLL_AT", 100)
    teller.journal.save(clean=True)
    teller.journal.close()
    state = reader(teller.disk.after_power_loss("none"), teller.clock).recover()
    assert state.clean
    assert dump(state) == dump(teller.state)


def test_what_was_put_back_and_then_finished_is_finished() -> None:
    teller = Teller()
    two_topics(teller)
    book = teller._book(1)
    book.back.extend((105, 1, 0, 0))
    book.done.extend((105, 106))
    teller.journal.flush()
    state = reader(teller.disk.after_kill(), teller.clock).recover()
    assert list(state.channels[1].outstanding) == [(100, 105), (106, NEVER)]
    assert state.channels[1].back == {}


def test_securing_puts_everything_on_the_device() -> None:
    """After kill -9 what was read back may be in the page cache only."""
    teller = Teller()
    two_topics(teller)
    again = Teller(teller.disk.after_kill(), teller.clock)
    again.journal.secure()
    assert again.recovered(again.disk.after_power_loss("none")) == dump(teller.state)


def test_a_journal_that_cannot_roll_tries_again_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "ROLL_AT", 500)
    teller = Teller()
    first = teller.journal.size
    tried: list[float] = []

    def refuse(fd: int, size: int) -> None:
        tried.append(teller.clock.now() / 1e9)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(teller.disk, "allocate", refuse)
        # 200 times a second for ten minutes of the clock, less where nothing can happen.
        for _ in range(600):
            for _ in range(5):
                teller.note("floor", 1, 1, 1)
                teller.journal.flush()
                teller.clock.advance(0.2)
        teller.run()
    assert teller.journal.size > 500 > first
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert 8 <= len(tried) <= 20, tried
    assert gaps == sorted(gaps) and gaps[-1] <= 65
    warnings = [record for record in caplog.records if "cannot begin a new file" in record.message]
    assert len(warnings) == len(tried)
    # Room again: it rolls at the next try.
    teller.clock.advance(65)
    teller.note("floor", 2, 1, 1)
    teller.journal.flush()
    teller.run()
    assert teller.journal.size < 500


def _full(teller: Teller) -> None:
    """Note more than fits into one file."""
    while teller.journal.size <= 500:
        teller.note("floor", 1, 1, 1)
        teller.journal.flush()
    teller.note("floor", 1, 1, 1)
    teller.journal.flush()
    teller.run()


def test_a_journal_without_a_descriptor_for_its_folder_rolls_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing descriptors are no reason to stop: the old file has room."""
    monkeypatch.setattr(journal_module, "ROLL_AT", 500)
    teller = Teller()
    teller.disk.fail("open_folder", errno.EMFILE)
    _full(teller)
    assert teller.fatal == [] and teller.journal.size > 500
    teller.clock.advance(65)
    teller.note("floor", 2, 1, 1)
    teller.journal.flush()
    teller.run()
    assert teller.fatal == [] and teller.journal.size < 500


def test_a_sync_that_fails_when_the_journal_rolls_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ROLL_AT", 500)
    teller = Teller()
    teller.disk.fail("sync", errno.EIO, path="journal-")
    _full(teller)
    assert len(teller.fatal) == 1
    teller.journal.close()
    assert teller.disk.open_files == []


async def test_rows_that_are_not_whole_are_damage_with_the_file_s_name(start_broker: StartBroker) -> None:
    broker = await start_broker()
    channel, _ = broker.topic("t").channel("c")
    await Client(broker).publish("t", b"x")
    # As a version left them that noted three of four numbers.
    channel._back.extend((broker.topics["t"].log.first, 1, 5))
    broker.journal.touch(channel)
    broker.journal.flush()
    broker.kill()
    with pytest.raises(StartError, match=r"journal-0+1: in the batch at offset \d+ .*3 numbers are no whole rows of 4"):
        await start_broker()
    broker = await start_broker(accept_damaged_journal=True)
    assert broker.topics["t"].channels["c"].depth == 1
