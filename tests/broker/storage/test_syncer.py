"""Which publishes share a sync with durability fsync, and how a sync of many files goes."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from flintmq.broker.storage.syncer import FILES_AT_ONCE, QUIET_TURNS
from support.log_rig import BASE, Rig, numbered

SYNC_SECONDS = 0.002


def rig_after_a_sync_of(count: int) -> Rig:
    """A log whose last sync took SYNC_SECONDS and covered ``count`` publishes."""
    rig = Rig(durability="fsync", inline=False)
    rig.store.gathers = True
    rig.publish(b"the first")
    rig.append(*numbered(count))
    rig.disk.hold()
    rig.log.flush()
    rig.clock.advance(SYNC_SECONDS)
    rig.disk.release()
    rig.run()
    assert rig.log.durable == BASE + 1 + count
    rig.delayed.clear()
    return rig


def syncs(rig: Rig) -> int:
    return [kind for kind, _ in rig.disk.history].count("sync")


def take_turns(rig: Rig, count: int) -> None:
    for _ in range(count):
        delayed, rig.delayed[:] = list(rig.delayed), []
        assert len(delayed) <= 1, "one look at a time is planned"
        for look in delayed:
            look()
        rig.run()


@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_publishers_that_were_answered_together_share_the_next_sync(count: int) -> None:
    rig = rig_after_a_sync_of(count)
    before = syncs(rig)
    for number in range(count - 1):
        rig.publish(b"%d" % number)
        take_turns(rig, QUIET_TURNS - 1)
    assert syncs(rig) == before, "more of them are expected"
    rig.publish(b"the last")
    assert syncs(rig) == before + 1
    assert rig.log.durable == rig.log.end
    take_turns(rig, 2 * QUIET_TURNS)
    assert rig.delayed == []
    assert syncs(rig) == before + 1


def test_a_lone_publisher_waits_for_nobody() -> None:
    rig = rig_after_a_sync_of(1)
    for number in range(3):
        rig.publish(b"%d" % number)
        assert rig.log.durable == rig.log.end
    assert rig.delayed == []


def test_a_commit_waits_no_longer_once_nobody_comes() -> None:
    rig = rig_after_a_sync_of(8)
    rig.publish(b"one")
    rig.publish(b"two")
    take_turns(rig, QUIET_TURNS)
    assert rig.log.durable == rig.log.end - 2
    take_turns(rig, 1)
    assert rig.log.durable == rig.log.end
    # The next sync expects those who came, not those who stayed away.
    rig.clock.advance(SYNC_SECONDS)
    rig.publish(b"three")
    assert rig.log.durable == rig.log.end


def test_a_commit_waits_at_most_half_as_long_as_a_sync_takes() -> None:
    rig = rig_after_a_sync_of(8)
    before = syncs(rig)
    rig.publish(b"one")
    take_turns(rig, 2)
    rig.clock.advance(SYNC_SECONDS / 2)
    take_turns(rig, 1)
    assert syncs(rig) == before + 1
    rig.publish(b"two")
    assert rig.log.durable == rig.log.end, "too late to wait for anybody"


def test_a_single_cpu_is_left_to_the_publishers() -> None:
    rig = rig_after_a_sync_of(8)
    rig.store.gathers = False
    rig.publish(b"one")
    assert rig.log.durable == rig.log.end


def test_a_stop_does_not_wait_for_publishers() -> None:
    rig = rig_after_a_sync_of(8)
    rig.publish(b"one")
    rig.stop()
    assert rig.reopened(durable=BASE + 9).log.end == BASE + 10
    take_turns(rig, 2)
    assert rig.delayed == []


# --- Many files -------------------------------------------------------------------------------------------------------


def rig_of_files(count: int) -> Rig:
    """A log of so many small files, none of them synced."""
    rig = Rig(max_bytes_per_file=300, inline=False, sync_every=0)
    for body in numbered(count, 200):
        rig.publish(body)
    assert len(rig.files) == count
    rig.store._close_files(0)
    assert rig.log.durable == BASE
    return rig


def steps(rig: Rig) -> Iterator[int]:
    """Let the loop and the threads take their steps one by one; after each: how many files are open."""
    while rig.posted:
        rig.posted.popleft()()
        yield len(rig.disk.open_files)


@pytest.mark.parametrize("count", [FILES_AT_ONCE - 1, FILES_AT_ONCE, FILES_AT_ONCE + 1, 5 * FILES_AT_ONCE + 3])
def test_a_sync_opens_a_bounded_number_of_files_at_once(count: int) -> None:
    rig = rig_of_files(count)
    before = len(rig.disk.open_files)
    rig.log.sync()
    assert max(steps(rig)) <= before + FILES_AT_ONCE
    assert rig.log.durable == BASE + count
    assert rig.reopened(rig.disk.after_power_loss("none"), durable=BASE + count).bodies() == rig.bodies()


def test_nothing_of_a_sync_counts_before_all_its_files_are_synced() -> None:
    rig = rig_of_files(3 * FILES_AT_ONCE)
    rig.log.sync()
    for _ in steps(rig):
        if rig.log.durable > BASE:
            break
    after = rig.disk.after_power_loss("none")
    assert len(rig.reopened(after, durable=rig.log.durable).seqs()) == 3 * FILES_AT_ONCE == rig.log.durable - BASE


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5, 8, 13])
def test_a_stop_in_the_middle_of_a_sync_syncs_the_files_that_are_left(taken: int) -> None:
    rig = rig_of_files(3 * FILES_AT_ONCE)
    rig.log.sync()
    for _, _ in zip(range(taken), steps(rig), strict=False):
        pass
    rig.append(b"one more")
    rig.stop()
    assert rig.fatal == []
    after = rig.disk.after_power_loss("none")
    assert len(rig.reopened(after, durable=BASE + 3 * FILES_AT_ONCE + 1).bodies()) == 3 * FILES_AT_ONCE + 1


@pytest.mark.parametrize("taken", [1, 2, 3, 4, 5])
def test_a_stop_that_waits_for_its_threads_syncs_the_files_that_are_left(taken: int) -> None:
    """No work is taken any more when the answer of the thread comes, and the files are synced after that."""
    rig = rig_of_files(3 * FILES_AT_ONCE)
    rig.log.sync()
    for _, _ in zip(range(taken), steps(rig), strict=False):
        pass
    rig.disk.refuse_work()
    rig.run()
    rig.stop()
    after = rig.disk.after_power_loss("none")
    assert len(rig.reopened(after, durable=rig.log.durable).bodies()) == 3 * FILES_AT_ONCE


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_files_that_cannot_be_opened_are_synced_later(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of_files(3 * FILES_AT_ONCE)
    rig.log.sync()
    for _, _ in zip(range(taken), steps(rig), strict=False):
        pass
    with monkeypatch.context() as patch:

        def no_descriptor(*_: object, **__: object) -> int:
            raise OSError(errno.EMFILE, "too many open files")

        patch.setattr(rig.store, "open", no_descriptor)
        rig.run()
        assert rig.log.durable == BASE
    unsynced = rig.store.unsynced
    while rig.delayed:
        rig.delayed.pop()()
        rig.run()
    assert rig.log.durable == BASE + 3 * FILES_AT_ONCE
    assert unsynced > 0 == rig.store.unsynced == rig.store.unstarted == rig.log.syncer.bytes
    assert rig.fatal == []


def test_files_that_are_deleted_meanwhile_are_not_opened_again() -> None:
    rig = rig_of_files(3 * FILES_AT_ONCE)
    rig.log.sync()
    for _, _ in zip(range(2), steps(rig), strict=False):
        pass
    rig.log.discard()
    rig.run()
    assert rig.fatal == []
    assert rig.disk.under_way == 0
    assert rig.store.unsynced == 0
