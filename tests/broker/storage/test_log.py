"""The log on a disk that fails: torn tails, flipped bits, short writes, no space, no descriptors, no sync.

Most tests drive a Log alone, without an event loop: its disk does submitted work at once, and a Rig calls what it
posts. What only shows from outside (which files go when, who is told) is tested on a whole broker.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pytest
from conftest import StartBroker

from flintmq.broker.delivery.topic import Topic
from flintmq.broker.storage import log as log_module
from flintmq.broker.storage import reader as reader_module
from flintmq.broker.storage import store as store_module
from flintmq.broker.storage.reader import READ_TRIES
from flintmq.broker.storage.segment import FILE_HEADER, RECORD_HEADER
from flintmq.errors import DamageError, FormatError, PublishError, StartError
from flintmq.protocol.wire import FRAME_ERROR, FRAME_RESPONSE, encode_mpub
from support.fakes import SECOND, Client, CountingDisk, FakeClock, dpub, pub, quiet, until
from support.log_rig import BASE, Rig, numbered
from support.simdisk import PowerLoss, SimDisk, settled

EXHAUSTIVE = os.environ.get("FLINTMQ_EXHAUSTIVE") == "1"
STEP = 1 if EXHAUSTIVE else 97


# --- Torn tails ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tear", ["cut off", "zeros", "noise"])
def test_a_torn_tail_keeps_every_whole_batch_and_no_part_of_one(tear: str) -> None:
    rig = Rig()
    batches = []
    for number, (count, size) in enumerate([(1, 100), (50, 700), (3, 40_000), (2, 10), (90, 1_000), (1, 5)]):
        rig.publish(*numbered(count, size, 1_000 * number))
        batches.append((rig.log.end, rig.log.segments[-1].size))
    (path,) = rig.files
    content = rig.disk.content(path)
    noise = random.Random(1).randbytes(len(content))
    for cut in range(max(FILE_HEADER, len(content) - (64 << 10)), len(content) + 1, STEP):
        tail = {"cut off": b"", "zeros": bytes(len(content) - cut), "noise": noise[cut:]}[tear]
        disk = rig.disk.after_kill()
        disk.swap(path, content[:cut] + tail)
        again = rig.reopened(disk)
        end = max([seq for seq, offset in batches if offset <= cut], default=BASE)
        assert again.log.spans() == ([(BASE, end)] if end > BASE else []), f"cut at {cut}"
        assert again.log.end == end
        if end > BASE:
            assert again.body(end - 1) == rig.body(end - 1)


def test_a_batch_with_a_hole_anywhere_is_dropped_whole() -> None:
    """Pages land in any order: the beginning, the middle or the end of a batch may be what is missing."""
    rig = Rig()
    rig.publish(b"before")
    offsets = [rig.log.segments[0].size]
    rig.publish(*numbered(9, 30_000))
    content = rig.disk.content(rig.files[0])
    while offsets[-1] < len(content):
        offsets.append(offsets[-1] + RECORD_HEADER + int.from_bytes(content[offsets[-1] + 4 : offsets[-1] + 8], "big"))
    assert len(offsets) > 4, "the batch must take several records"
    rig.publish(b"after")
    content = rig.disk.content(rig.files[0])
    for start, stop in pairwise(offsets):
        disk = rig.disk.after_kill()
        disk.swap(rig.files[0], content[:start] + bytes(stop - start) + content[stop:])
        assert list(rig.reopened(disk).bodies().values()) == [b"before", b"after"]


def test_a_batch_on_the_device_loses_only_what_is_damaged() -> None:
    rig = Rig()
    rig.publish(*numbered(9, 30_000))
    content = rig.disk.content(rig.files[0])
    disk = rig.disk.after_kill()
    disk.swap(rig.files[0], content[: FILE_HEADER + 50] + b"?" + content[FILE_HEADER + 51 :])
    again = rig.reopened(disk, durable=rig.log.end)
    assert list(again.bodies().values()) == numbered(9, 30_000)[1:]


def test_a_batch_in_slices_counts_only_with_its_last_slice() -> None:
    rig = Rig(durability="fsync")
    rig.publish(b"before")
    rig.publish(*numbered(5), more=True)
    assert rig.log.written == BASE + 6
    assert rig.log.durable == rig.log.committed == BASE + 1, "nobody may see half a batch: it may yet be cut back"
    assert rig.reopened().seqs() == [BASE]
    rig.publish(*numbered(5, start=5), more=True)
    rig.publish(*numbered(5, start=10))
    assert rig.log.committed == BASE + 16
    assert len(rig.reopened().seqs()) == 16


def test_a_batch_in_slices_that_is_never_ended_is_dropped_by_a_clean_stop() -> None:
    rig = Rig()
    rig.publish(b"before")
    rig.publish(*numbered(5), more=True)
    rig.stop()
    again = rig.reopened(durable=rig.log.durable)
    assert again.bodies() == {BASE: b"before"}
    assert again.log.end == rig.log.end == BASE + 1


# --- Flipped bits ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
def test_a_flipped_bit_costs_one_record_and_is_told(sealed: bool) -> None:
    rig = Rig()
    offsets = []
    for body in numbered(20, 1_000):
        offsets.append(rig.log.segments[0].size if rig.log.segments else FILE_HEADER)
        rig.publish(body)
    end = rig.log.segments[0].size
    if sealed:
        rig.stop()
    else:
        rig.log.sync_now()
    whole = dict(enumerate(numbered(20, 1_000), BASE))
    (path,) = rig.files
    content = rig.disk.content(path)
    for at in range(0, len(content), STEP):
        flipped = bytearray(content)
        flipped[at] ^= 1 << (at % 8)
        disk = rig.disk.after_power_loss("none")
        disk.swap(path, bytes(flipped))
        again = rig.reopened(disk, durable=BASE + 20)
        hit = [seq for seq, offset in enumerate(offsets, BASE) if offset <= at < end and at - offset < 2_000]
        lost = set(hit[-1:])
        assert again.bodies() == {seq: body for seq, body in whole.items() if seq not in lost}, f"byte {at}"
        for seq in lost:
            # Read over: it is said, never just passed over.
            with pytest.raises(DamageError) as info:
                again.body(seq)
            assert (info.value.first, info.value.stop) == (seq, seq + 1)


def test_messages_after_a_damaged_record_are_read_in_any_order() -> None:
    """A block in memory holds no holes, a chunk of a file may."""
    rig = Rig()
    for body in numbered(30, 1_000):
        rig.publish(body)
    rig.stop()
    (path,) = rig.files
    content = bytearray(rig.disk.content(path))
    for record in (5, 6, 20):
        content[FILE_HEADER + record * (RECORD_HEADER + 1_034) + 300] ^= 1
    disk = rig.disk.after_power_loss("none")
    disk.swap(path, bytes(content))
    again = rig.reopened(disk, durable=BASE + 30)
    order = [seq for seq in range(BASE, BASE + 30) if seq - BASE not in (5, 6, 20)]
    random.Random(3).shuffle(order)
    for seq in order:
        assert again.body(seq) == rig_body(seq)
    assert sorted(again.log.damaged) == [(BASE + 5, BASE + 7), (BASE + 20, BASE + 21)]


def rig_body(seq: int) -> bytes:
    return numbered(1, 1_000, seq - BASE)[0]


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("origin", ["same file", "another file"])
def test_a_record_inside_a_body_is_never_taken_for_one(sealed: bool, origin: str) -> None:
    rig = Rig()
    source = rig if origin == "same file" else Rig()
    source.publish(b"first")
    record = source.disk.content(source.files[0])[FILE_HEADER : source.log.segments[0].size]
    if source is not rig:
        rig.publish(b"first")
    start = rig.log.segments[0].size
    rig.publish(b"<" + record + b">" + record)
    rig.publish(b"last")
    if sealed:
        rig.stop()
    else:
        rig.log.sync_now()
    (path,) = rig.files
    content = rig.disk.content(path)
    assert content.count(record) == (3 if source is rig else 2)
    for at in range(start, start + RECORD_HEADER + 40):
        # Only where the record around it is damaged does what is inside lie open.
        flipped = bytearray(content)
        flipped[at] ^= 0x10
        disk = rig.disk.after_power_loss("none")
        disk.swap(path, bytes(flipped))
        again = rig.reopened(disk, durable=BASE + 3)
        assert again.bodies() == {BASE: b"first", BASE + 2: b"last"}, f"byte {at}"
        with pytest.raises(DamageError):
            again.body(BASE + 1)


# --- Writes that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("short", [0, 10, RECORD_HEADER + 3, 1_080, 2_500])
@pytest.mark.parametrize("trouble", ["", "truncate"], ids=["cut back", "not cut back"])
def test_a_failed_write_costs_its_publishers_alone(durability: str, short: int, trouble: str) -> None:
    rig = Rig(durability=durability)
    rig.publish(*numbered(3))
    rig.log.sync_now()
    # Three records in one write: a deferred message is always one of its own.
    refused = rig.append(b"refused".ljust(1_000))
    rig.append(b"refused too".ljust(1_000), delay=SECOND)
    rig.append(b"and this".ljust(1_000))
    rig.disk.fail("write", errno.EIO, short=short)
    if trouble:
        rig.disk.fail(trouble, errno.EIO)
    rig.log.flush()
    rig.run()
    assert [seq for seq, _ in rig.failed] == [refused] == [BASE + 3]
    assert rig.log.end == BASE + 3
    assert not rig.log.deferred
    rig.publish(*numbered(2, start=3))
    rig.publish(*numbered(1, start=5))
    assert rig.log.committed == BASE + 6
    whole = dict(enumerate(numbered(6), BASE))
    assert rig.bodies() == whole
    rig.forget()
    assert rig.bodies() == whole
    for durable in (BASE, BASE + 3):
        killed = rig.reopened(durable=durable)
        assert killed.bodies() == whole
        assert killed.reopened(killed.disk.after_power_loss("none"), durable=killed.log.durable).bodies() == whole
    rig.stop()
    assert rig.reopened(durable=rig.log.durable).bodies() == whole


def test_a_failed_write_that_began_a_file_leaves_no_file_in_the_way() -> None:
    rig = Rig(max_bytes_per_file=2_000)
    rig.publish(b"kept".ljust(1_500))
    rig.disk.fail("write", errno.EIO, short=20, path=f"{BASE + 1:016x}")
    rig.disk.fail("remove", errno.EIO)
    rig.publish(b"refused".ljust(1_500))
    assert [seq for seq, _ in rig.failed] == [BASE + 1]
    rig.publish(b"next".ljust(1_500))
    assert [body.strip() for body in rig.bodies().values()] == [b"kept", b"next"]
    assert [body.strip() for body in rig.reopened().bodies().values()] == [b"kept", b"next"]


@pytest.mark.parametrize("in_thread", [False, True], ids=["loop", "thread"])
def test_a_file_is_cut_back_without_a_descriptor(in_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write ends a file and begins the next one, which fails. Nobody publishes again before the process dies."""
    rig = Rig(max_bytes_per_file=2_000)
    rig.publish(b"kept")
    rig.append(b"refused".ljust(1_000))
    # A deferred message is a record of its own, and has no room in the first file.
    rig.append(b"refused too".ljust(1_500), delay=SECOND)
    rig.disk.fail("open", errno.EMFILE, times=50)
    if in_thread:
        monkeypatch.setattr(log_module, "WRITE_IN_THREAD_AT", 0)
        rig.disk.fail("write", errno.ENOSPC, path=f"{BASE + 2:016x}", skip=1)
    else:
        rig.disk.fail("create", errno.EMFILE, times=50)
    rig.log.flush()
    rig.run()
    assert [seq for seq, _ in rig.failed] == [BASE + 1]
    assert b"refused" not in rig.disk.content(rig.files[0])
    rig.disk.heal()
    assert list(rig.reopened().bodies().values()) == [b"kept"]


def test_a_failed_footer_costs_nothing_that_was_published_before() -> None:
    rig = Rig(max_bytes_per_file=2_000)
    rig.publish(b"kept".ljust(1_500))
    rig.disk.fail("write", errno.EIO, short=7, path=f"{BASE:016x}")
    rig.publish(b"refused".ljust(1_500))
    rig.publish(b"next".ljust(1_500))
    rig.forget()
    assert [body.strip() for body in rig.bodies().values()] == [b"kept", b"next"]
    assert [body.strip() for body in rig.reopened().bodies().values()] == [b"kept", b"next"]


def test_a_batch_in_slices_is_cut_back_whole_when_one_of_them_fails() -> None:
    rig = Rig(durability="fsync")
    rig.publish(b"before")
    rig.publish(*numbered(5), more=True)
    rig.publish(*numbered(5, start=5), more=True)
    rig.disk.fail("write", errno.ENOSPC, short=30)
    rig.publish(*numbered(5, start=10))
    assert [seq for seq, _ in rig.failed] == [BASE + 1]
    assert rig.log.end == rig.log.durable == BASE + 1
    rig.publish(b"after")
    assert rig.log.durable == BASE + 2
    assert list(rig.bodies().values()) == list(rig.reopened().bodies().values()) == [b"before", b"after"]


@pytest.mark.parametrize("end", ["no room", "no memory", "stop"])
def test_nothing_counts_as_written_that_is_cut_off_wherever_the_process_ends(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning of a batch is written, and its end never comes. Every call may be the last."""

    def no_block(store: store_module.Store, size: int, base: int) -> None:
        raise MemoryError

    ended, kinds, calls = True, set(), 0
    while ended:
        calls += 1
        rig = Rig()
        rig.publish(b"before")
        rig.publish(*numbered(5), more=True)
        rig.disk.power_off_at = rig.disk.calls + calls
        try:
            with monkeypatch.context() as patch:
                if end == "no room":
                    rig.disk.fail("write", errno.ENOSPC, short=30)
                    rig.publish(*numbered(5, start=5))
                elif end == "no memory":
                    patch.setattr(store_module.Store, "new_block", no_block)
                    with pytest.raises(PublishError):
                        rig.publish(*numbered(5, 2_000, start=5))
                else:
                    rig.stop()
            ended = False
        except PowerLoss:
            kinds.add(rig.disk.history[-1][0])
        content = rig.disk.content(rig.files[0])
        counted = [b"before", *numbered(5)][: rig.log.written - BASE]
        assert all(body in content for body in counted), f"{calls} calls later"
    assert "truncate" in kinds


def test_a_full_disk_refuses_and_recovers_by_itself() -> None:
    rig = Rig()
    rig.publish(*numbered(10, 1_000))
    rig.disk.capacity = rig.disk.used + 1_500
    rig.publish(*numbered(10, 1_000))
    assert [exc.errno for _, exc in rig.failed if isinstance(exc, OSError)] == [errno.ENOSPC]
    assert rig.log.end == BASE + 10
    rig.disk.heal()
    rig.publish(*numbered(10, 1_000, start=10))
    assert list(rig.bodies().values()) == numbered(20, 1_000) == list(rig.reopened().bodies().values())


def test_a_failed_sync_is_fatal_and_not_tried_again() -> None:
    rig = Rig(durability="fsync")
    rig.publish(b"one")
    rig.disk.fail("sync", errno.EIO)
    rig.publish(b"two")
    assert len(rig.fatal) == 1
    assert rig.log.durable == BASE + 1
    assert [kind for kind, _ in rig.disk.history].count("sync") == 2
    # The broker closes its logs then; nothing may call the lost pages durable.
    rig.log.halt()
    rig.log.sync()
    rig.run()
    assert rig.log.durable == BASE + 1


def test_a_sync_of_a_folder_that_was_deleted_meanwhile_is_not_fatal() -> None:
    rig = Rig(durability="fsync", inline=False)
    rig.disk.hold()
    rig.publish(b"one")
    rig.log.discard()
    for path in rig.files:
        rig.disk.remove(path)
    rig.disk.remove_folder(rig.folder)
    rig.disk.release()
    rig.run()
    assert rig.disk.under_way == 0
    assert rig.fatal == []
    assert rig.disk.open_files == []


# --- Memory, and reading back ----------------------------------------------------------------------------------------


def test_durability_memory_spills_the_oldest_first_and_a_clean_stop_keeps_all() -> None:
    rig = Rig(durability="memory")
    for body in numbered(200, 500):
        rig.append(body)
    rig.log.flush()
    assert rig.files == [], "nothing is written before the memory is full"
    rig.log.spill(50, 1 << 30)
    rig.log.trim(50, 1 << 30, _always, _never)
    assert rig.log.blocks[0].base > BASE
    assert rig.log.memory_count <= 50 + rig.log.blocks[0].count
    assert rig.log.written == rig.log.blocks[0].base, "what left the memory is in a file, and no more than that"
    assert list(rig.bodies().values()) == numbered(200, 500)
    rig.stop()
    assert list(rig.reopened(durable=rig.log.durable).bodies().values()) == numbered(200, 500)


def _always(first: int, stop: int) -> bool:
    return True


def _never(first: int, stop: int) -> bool:
    return False


def test_durability_memory_keeps_what_could_not_be_spilled() -> None:
    """It was answered with OK: a full disk is no reason to forget it."""
    rig = Rig(durability="memory", max_bytes_per_file=20_000)
    for body in numbered(200, 500):
        rig.append(body)
    rig.disk.fail("write", errno.ENOSPC, times=3, short=20)
    for _ in range(3):
        rig.log.spill(50, 1 << 30)
        rig.log.trim(50, 1 << 30, _always, _never)
        assert rig.log.memory_count == 200
        assert list(rig.bodies().values()) == numbered(200, 500)
    rig.log.spill(50, 1 << 30)
    rig.log.trim(50, 1 << 30, _always, _never)
    assert rig.log.memory_count < 100
    assert list(rig.bodies().values()) == numbered(200, 500)
    rig.stop()
    assert list(rig.reopened(durable=rig.log.durable).bodies().values()) == numbered(200, 500)


@pytest.mark.parametrize("seed", range(6))
def test_ranges_of_a_time_are_right_after_writes_that_failed(seed: int) -> None:
    """Messages that were laid out in vain are laid out again: their file still knows that its times step back."""
    dice = random.Random(seed)
    rig = Rig(durability="memory", max_bytes_per_file=20_000)
    times = {}
    for body in numbered(300, 500):
        rig.clock.advance(1)
        if not dice.randrange(60):
            rig.clock.step_wall(-dice.randint(2, 90))
        times[rig.append(body)] = rig.clock.wall()
        if not dice.randrange(40):
            rig.disk.fail("write", errno.ENOSPC, times=dice.randint(1, 2), short=20)
        if not dice.randrange(15):
            rig.log.spill(dice.randint(0, 20), 1 << 30)
    rig.disk.heal()
    rig.stop()
    log = rig.log
    assert log.written == log.end and len(log.segments) > 3
    for _ in range(200):
        since, until = sorted(dice.choice(list(times.values())) + dice.choice([0, 1]) for _ in range(2))
        found = log.between(since, until, log.first, log.end)
        for seq, time in times.items():
            fits = [one.all for one in found if one.first <= seq < one.stop]
            assert fits if since <= time < until else fits in ([], [False])


def test_messages_nobody_wants_never_reach_a_file_in_durability_memory() -> None:
    rig = Rig(durability="memory")
    for body in numbered(100, 500):
        rig.append(body)
    rig.log.trim(50, 1 << 30, _never, _never)
    rig.append(b"wanted")
    rig.stop()
    again = rig.reopened(durable=rig.log.durable)
    assert list(again.bodies().values())[-1] == b"wanted"
    assert len(again.bodies()) < 20


def test_everything_is_read_back_with_tiny_caches() -> None:
    rig = Rig(max_bytes_per_file=300_000, cold_cache_bytes=1)
    for number in range(0, 900, 3):
        rig.publish(*numbered(3, 900, number))
    rig.forget()
    assert rig.log.memory_count == 0
    assert len(rig.files) > 2
    assert list(rig.bodies().values()) == numbered(900, 900)
    order = list(range(900))
    random.Random(5).shuffle(order)
    for number in order[:200]:
        assert rig.body(BASE + number) == numbered(1, 900, number)[0]
    assert len(rig.store.cold) <= 3


def test_a_read_error_that_passes_costs_nothing() -> None:
    rig = Rig()
    rig.publish(*numbered(5))
    rig.forget()
    rig.disk.fail("read", errno.EIO)
    assert rig.log.block(BASE) is None
    rig.run()
    assert len(rig.delayed) == 1
    # Nobody asks the device again before the pause is over.
    assert rig.log.block(BASE) is None
    assert not rig.posted
    rig.delayed.pop()()
    assert list(rig.bodies().values()) == numbered(5)


def test_a_read_error_that_stays_gives_up_a_chunk_until_the_next_start() -> None:
    rig = Rig()
    rig.publish(*numbered(5))
    rig.forget()
    for tries in range(READ_TRIES):
        rig.disk.fail("read", errno.EIO)
        assert rig.log.block(BASE) is None
        rig.run()
        assert len(rig.delayed) == (tries + 1 < READ_TRIES)
        while rig.delayed:
            rig.delayed.pop()()
    with pytest.raises(DamageError) as info:
        rig.body(BASE)
    assert (info.value.first, info.value.stop) == (BASE, BASE + 5)
    assert list(rig.reopened().bodies().values()) == numbered(5)


def test_too_many_open_files_are_closed_and_nothing_is_condemned() -> None:
    rig = Rig(max_bytes_per_file=1_000, cold_cache_bytes=1)
    rig.disk.most_files = 3
    for body in numbered(30, 900):
        rig.publish(body)
    assert len(rig.files) == 30
    assert rig.failed == []
    rig.forget()
    assert list(rig.bodies().values()) == numbered(30, 900)
    again = rig.reopened()
    again.disk.most_files = 3
    assert list(again.bodies().values()) == numbered(30, 900)


def test_no_descriptor_at_all_means_not_ready_and_is_asked_again() -> None:
    rig = Rig()
    rig.publish(*numbered(5))
    rig.forget()
    rig.store.close_file(rig.log.segments[0])
    rig.disk.fail("open", errno.EMFILE)
    assert rig.log.frame(BASE) is None
    assert rig.log.segments[0].damaged == []
    # Nobody has to ask: it is tried again.
    (again,) = rig.delayed
    again()
    assert rig.arrived == 1
    assert rig.body(BASE) == numbered(1)[0]


def test_a_start_with_more_segments_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "shares_of_descriptors", lambda: (4, 100))
    rig = Rig(max_bytes_per_file=1_000)
    for body in numbered(20, 900):
        rig.publish(body)
    rig.stop()
    again = rig.reopened(durable=rig.log.durable)
    assert len(again.disk.open_files) <= 4
    assert list(again.bodies().values()) == numbered(20, 900)
    assert len(again.disk.open_files) <= 4


# --- Opening ---------------------------------------------------------------------------------------------------------


def test_a_sealed_segment_is_opened_without_reading_its_records() -> None:
    rig = Rig(max_bytes_per_file=200_000)
    for number in range(0, 1_000, 10):
        rig.publish(*numbered(10, 900, number))
    rig.publish(b"deferred", delay=60 * SECOND)
    rig.stop()
    disk = rig.disk.after_power_loss("none")
    again = rig.reopened(disk, durable=rig.log.durable)
    segments = len(rig.files)
    assert segments > 3
    # The header, the end of the footer, the footer.
    assert [kind for kind, _ in disk.history].count("read") == 3 * segments
    assert not [kind for kind, _ in disk.history if kind in ("write", "truncate", "sync")]
    assert [seq for seqs, _ in again.log.deferrals() for seq in seqs] == [BASE + 1_000]
    assert len(again.seqs()) == 1_001


@pytest.mark.parametrize("loss", ["none", "all", 1, 2, 3])
@pytest.mark.parametrize("size", [300, 1_000_000], ids=["sealed segments", "one segment"])
def test_a_start_after_a_kill_puts_everything_on_the_device_before_it_calls_it_durable(
    loss: int | str, size: int
) -> None:
    rig = Rig(max_bytes_per_file=size)
    rig.publish(b"synced")
    rig.log.sync_now()
    durable = rig.log.durable
    for body in numbered(10, 200):
        rig.publish(body)
    assert rig.log.durable == durable
    killed = rig.reopened(durable=durable)
    assert len(killed.seqs()) == 11
    assert killed.log.durable == BASE + 11
    left = killed.disk.after_power_loss(loss)
    assert killed.reopened(left, durable=killed.log.durable).bodies() == killed.bodies()


@pytest.mark.parametrize("known", [0, 2], ids=["never synced", "synced"])
def test_only_what_was_on_the_device_counts_as_lost_with_a_file_that_is_set_aside(known: int) -> None:
    """After a power loss a file has its size and no content. The log goes on behind what was known to be on the device:
    at the same seq, if nothing was.
    """
    rig = Rig()
    rig.publish(*numbered(2))
    disk = rig.disk.after_kill()
    disk.swap(rig.files[0], bytes(len(disk.content(rig.files[0]))))
    durable = BASE + known
    started = rig.reopened(disk, durable=durable, after=durable)
    assert len(disk.paths(started.folder, ".bad")) == 1
    lost = [(BASE, durable)] if known else []
    assert started.log.reader.lost() == lost
    assert started.publish(b"after") == durable
    started.stop()
    again = started.reopened(durable=durable + 1)
    assert again.log.reader.lost() == lost
    assert again.bodies() == {durable: b"after"}
    place = again.log.reader.place_from(durable, durable + 1)
    assert place is not None and place[0] == durable
    if known:
        with pytest.raises(DamageError):
            again.log.reader.place_from(BASE, durable + 1)


def test_a_file_that_is_set_aside_replaces_none_that_was_before() -> None:
    """Where nothing was known to be on the device the log goes on at the same seq, and that file may be damaged too."""
    rig, aside = Rig(), []
    for number in range(3):
        rig.publish(*numbered(number + 1))
        disk = rig.disk.after_kill()
        aside.append(bytes([number]) * len(disk.content(rig.files[0])))
        disk.swap(rig.files[0], aside[-1])
        rig = rig.reopened(disk, durable=BASE, after=BASE)
        assert sorted(disk.content(path) for path in disk.paths(rig.folder, ".bad")) == aside
        assert rig.log.reader.lost() == []
    names = [path.name for path in disk.paths(rig.folder, ".bad")]
    assert sorted(names) == [f"{BASE:016x}-2.bad", f"{BASE:016x}-3.bad", f"{BASE:016x}.bad"]
    assert rig.reopened(durable=BASE + 2, after=BASE + 2).log.reader.lost() == [(BASE, BASE + 2)]


def test_a_footer_without_its_records_is_not_believed() -> None:
    """Sealed, but never synced: the footer's page may be on the device and a page of records not."""
    rig = Rig(max_bytes_per_file=50_000)
    for body in numbered(12, 8_000):
        rig.publish(body)
    path = rig.files[0]
    content = rig.disk.content(path)
    disk = rig.disk.after_kill()
    disk.swap(path, content[:16_384] + bytes(8_192) + content[24_576:])
    again = rig.reopened(disk)
    assert again.seqs() == list(again.bodies()), "what is offered can be read"
    assert BASE + 2 not in again.seqs()
    assert {BASE, BASE + 5, BASE + 11} <= set(again.seqs())


def test_a_file_that_was_just_made_when_the_power_went_is_removed() -> None:
    rig = Rig()
    rig.publish(b"one")
    rig.log.sync_now()
    disk = rig.disk.after_power_loss("none")
    os_path = rig.folder / f"{BASE + 1:016x}.seg"
    disk.close_file(disk.open(os_path, create=True))
    disk.close_file(disk.open(rig.folder / "left-over.tmp", create=True))
    again = rig.reopened(disk)
    assert again.bodies() == {BASE: b"one"}
    assert disk.names(rig.folder) == [f"{BASE:016x}.seg"]


def test_a_log_goes_on_at_its_ceiling_in_a_new_file_after_an_unclean_stop() -> None:
    rig = Rig()
    rig.publish(*numbered(5))
    again = rig.reopened(after=BASE + 1_000)
    assert again.publish(b"next") == BASE + 1_000
    assert again.log.spans() == [(BASE, BASE + 5), (BASE + 1_000, BASE + 1_001)]
    assert len(again.files) == 2
    with pytest.raises(DamageError) as info:
        again.body(BASE + 5)
    assert (info.value.first, info.value.stop) == (BASE + 5, BASE + 1_000), "a gap is said to be one, up to its end"


def test_a_newer_format_is_refused() -> None:
    rig = Rig()
    rig.publish(b"one")
    content = bytearray(rig.disk.content(rig.files[0]))
    content[8:10] = (2).to_bytes(2, "big")
    crc = google_crc32c.extend(0, bytes(content[: FILE_HEADER - 4]))
    content[FILE_HEADER - 4 : FILE_HEADER] = crc.to_bytes(4, "big")
    disk = rig.disk.after_kill()
    disk.swap(rig.files[0], bytes(content))
    with pytest.raises(FormatError, match=r"newer version of flintmq \(format 2, known: 1\)"):
        rig.reopened(disk)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("reboot", [False, True], ids=["same boot", "another boot"])
def test_a_deferral_survives_a_restart_and_is_never_early(sealed: bool, reboot: bool) -> None:
    rig = Rig()
    rig.publish(b"at once")
    rig.publish(b"later", b"later too", delay=100 * SECOND)
    if sealed:
        rig.stop()
    rig.clock.advance(30)
    if reboot:
        rig.clock.reboot(10)
    left = (60 if reboot else 70) * SECOND
    again = rig.reopened(durable=BASE + 3 if sealed else BASE)
    [(seqs, dues)] = again.log.deferrals()
    assert (list(seqs), list(dues)) == ([BASE + 1, BASE + 2], [rig.clock.now() + left] * 2)
    if not reboot:
        # Somebody sets the date forward: the clock that the delay counts on does not care.
        rig.clock.step_wall(1_000)
        [(_, dues)] = rig.reopened(again.disk.after_kill()).log.deferrals()
        assert [due - rig.clock.now() for due in dues] == [left] * 2


# --- A whole broker --------------------------------------------------------------------------------------------------


async def test_segments_go_only_when_durable_state_says_so(
    start_broker: StartBroker, tmp_path: Path, clock: FakeClock
) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, max_bytes_per_file=1_000)
    client, consumer = Client(broker), Client(broker)
    consumer.send(b"SUB t c\n")
    for body in numbered(6, 900):
        client.send(pub("t", body))
        await settled(broker)
    folder = broker.topics["t"].folder
    assert folder is not None
    broker.upkeep.sync()
    await settled(broker)
    assert len(disk.paths(folder)) == 6
    consumer.send(b"RDY 10\n")
    consumer.finish(*consumer.messages[:5])
    await settled(broker)
    disk.hold()
    broker.upkeep.sync()
    await settled(broker)
    assert len(disk.paths(folder)) == 6, "the journal is not on the device yet"
    disk.release()
    await settled(broker)
    assert len(disk.paths(folder)) == 1
    consumer.finish(consumer.messages[5])
    broker.upkeep.sync()
    await settled(broker)
    assert len(disk.paths(folder)) == 1, "the one that is being written to stays"


async def test_a_topic_without_a_channel_keeps_its_files(start_broker: StartBroker, tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, max_bytes_per_file=1_000)
    client = Client(broker)
    for body in numbered(6, 900):
        client.send(pub("t", body))
        await settled(broker)
    broker.upkeep.sync()
    await settled(broker)
    broker.upkeep.sync()
    await settled(broker)
    consumer = Client(broker)
    consumer.send(b"SUB t c\nRDY 10\n")
    await settled(broker)
    assert consumer.bodies == numbered(6, 900)


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
async def test_mem_queue_size_zero_keeps_nothing_and_delivers_all(
    start_broker: StartBroker, tmp_path: Path, durability: str
) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, mem_queue_size=0, cold_cache_bytes=1, durability=durability)
    client, consumer = Client(broker), Client(broker)
    consumer.send(b"SUB t c\n")
    client.send(encode_mpub(b"t", numbered(500, 1_000)) + pub("t", b"last"))
    await settled(broker)
    assert broker.topics["t"].log.memory_count < 200
    consumer.send(b"RDY 2500\n")
    await settled(broker)
    assert consumer.bodies == [*numbered(500, 1_000), b"last"]


async def test_a_full_disk_is_answered_and_later_publishes_work(start_broker: StartBroker, tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk)
    good, bad, consumer = Client(broker), Client(broker), Client(broker)
    consumer.send(b"SUB t c\nRDY 100\n")
    good.send(pub("t", b"before"))
    await settled(broker)
    disk.capacity = disk.used + 100
    bad.send(pub("t", b"refused".ljust(1_000)))
    await settled(broker)
    assert bad.frames == [(FRAME_ERROR, b"E_PUB_FAILED PUB failed No space left on device")]
    disk.heal()
    good.send(pub("t", b"after"))
    await settled(broker)
    assert good.responses == [b"OK", b"OK"]
    assert consumer.bodies == [b"before", b"after"]


@pytest.mark.parametrize("slice_", [0, 1, 3])
async def test_a_huge_batch_with_a_failed_slice_is_refused_whole(
    start_broker: StartBroker, tmp_path: Path, slice_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk)
    client, consumer = Client(broker), Client(broker)
    consumer.send(b"SUB t c\nRDY 2500\n")
    client.send(pub("t", b"before"))
    await settled(broker)
    writes = 0
    write = disk.write

    def failing(fd: int, buffers: Any, offset: int) -> int:
        nonlocal writes
        if disk.path_of(fd).suffix == ".seg":
            writes += 1
            if writes == slice_ + 1:
                disk.fail("write", errno.EIO, short=100)
        return write(fd, buffers, offset)

    monkeypatch.setattr(disk, "write", failing)
    client.send(encode_mpub(b"t", [b"x"] * 20_001))
    await settled(broker)
    assert client.frames[1:] == [(FRAME_ERROR, b"E_MPUB_FAILED MPUB failed Input/output error")]
    monkeypatch.undo()
    other = Client(broker)
    other.send(pub("t", b"after"))
    await settled(broker)
    assert other.frames == [(FRAME_RESPONSE, b"OK")]
    assert consumer.bodies == [b"before", b"after"]


async def test_a_failed_sync_stops_the_broker(start_broker: StartBroker, tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, durability="fsync")
    client = Client(broker)
    client.send(pub("t", b"one"))
    await settled(broker)
    disk.fail("sync", errno.EIO, path=".seg")
    client.send(pub("t", b"two"))
    await settled(broker)
    assert client.responses == [b"OK"], "nobody is told that it is safe"
    with pytest.raises(Exception, match="cannot sync"):
        await broker.wait_closed()


async def test_what_a_sync_covered_is_answered_although_more_was_written_meanwhile(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, durability="fsync")
    first, second = Client(broker), Client(broker)
    first.send(pub("t", b"the topic is there"))
    await settled(broker)
    disk.hold()
    first.send(pub("t", b"one"))
    await settled(broker)
    second.send(pub("t", b"two"))
    await settled(broker)
    assert (first.responses, second.responses) == ([b"OK"], [])
    disk.release()
    while len(first.responses) < 2:
        assert second.responses == [], "both waited for the second sync"
        await asyncio.sleep(0)
    assert second.responses == []
    await settled(broker)
    assert second.responses == [b"OK"]


async def test_an_id_of_a_message_whose_reservation_was_lost_is_not_given_again(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written, the power failed before the journal had said that its seq may be used, and it was there."""
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk)
    client = Client(broker)
    client.send(b"SUB t c\n")
    await settled(broker)
    broker.kill()
    disk = disk.after_kill()
    with monkeypatch.context() as patch:
        broker = await start_broker(disk=disk)
        patch.setattr(Topic, "_reserve", lambda topic: None)
        client = Client(broker)
        client.send(pub("t", b"one"))
        await settled(broker)
        assert client.responses == [], "its seq may not be used yet"
        broker.kill()
    ids = []
    for body in (b"one", b"two"):
        disk = disk.after_kill()
        broker = await start_broker(disk=disk)
        if body == b"two":
            Client(broker).send(pub("t", body))
        consumer = Client(broker)
        consumer.send(b"SUB t c\nRDY 1\n")
        await settled(broker)
        assert consumer.bodies == [body]
        ids.append(consumer.messages[0].id)
        consumer.send(b"FIN " + ids[-1] + b"\n")
        await settled(broker)
        for _ in range(3):
            broker.upkeep.sync()
            await settled(broker)
        assert body == b"two" or not disk.paths(broker.topics["t"].folder, ".seg"), "nobody needs the file"
        broker.kill()
    assert ids[0] < ids[1]


async def test_stale_folders_are_removed_at_the_start(start_broker: StartBroker, tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk)
    Client(broker).send(pub("t", b"one"))
    await settled(broker)
    await broker.stop()
    disk = disk.after_power_loss("none")
    topics = tmp_path / "flintmq" / "topics"
    for folder in (topics / "t@0", topics / "..@0", topics / "t@0" / "side"):
        disk.make_folder(folder)
        disk.close_file(disk.open(folder / f"{BASE:016x}.seg", create=True))
    broker = await start_broker(disk=disk)
    assert disk.names(topics) == ["t@1"]
    assert list(broker.topics) == ["t"]


async def test_a_recreated_topic_never_uses_a_seq_again(
    start_broker: StartBroker, tmp_path: Path, clock: FakeClock
) -> None:
    """The clock stands still, so only the floor keeps them apart."""
    disk = SimDisk(tmp_path)
    ids: set[bytes] = set()
    for round_ in range(3):
        broker = await start_broker(disk=disk)
        for _ in range(3):
            client, consumer = Client(broker), Client(broker)
            consumer.send(b"SUB t c\nRDY 100\n")
            client.send(encode_mpub(b"t", numbered(10)))
            await settled(broker)
            seen = {message.id for message in consumer.messages}
            assert len(seen) == 10
            assert not ids & seen
            ids |= seen
            broker.delete_topic("t")
            await settled(broker)
        if round_ == 0:
            await broker.stop()
            disk = disk.after_power_loss("none")
        else:
            broker.kill()
            disk = disk.after_kill()


async def test_an_ephemeral_topic_never_uses_a_seq_again(
    start_broker: StartBroker, tmp_path: Path, clock: FakeClock
) -> None:
    """The clock stands still, so only what the journal says keeps them apart."""
    disk = SimDisk(tmp_path)
    ids: set[bytes] = set()
    for how in ("stop", "kill", "power", "power"):
        broker = await start_broker(disk=disk)
        client, consumer = Client(broker), Client(broker)
        consumer.send(b"SUB t#ephemeral c\nRDY 100\n")
        client.send(encode_mpub(b"t#ephemeral", numbered(10)))
        await settled(broker)
        seen = {message.id for message in consumer.messages}
        assert len(seen) == 10
        assert not ids & seen
        ids |= seen
        if how == "stop":
            await broker.stop()
        else:
            broker.kill()
        disk = disk.after_power_loss("none") if how == "power" else disk.after_kill()


async def test_the_backlog_behind_an_ephemeral_channel_outlives_it(start_broker: StartBroker, tmp_path: Path) -> None:
    """After a restart the channel is gone: what is published then waits for the next one, across more restarts."""
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, durability="fsync")
    consumer = Client(broker)
    consumer.send(b"SUB t c#ephemeral\nRDY 1\n")
    client = Client(broker)
    client.send(pub("t", b"for the ephemeral one"))
    await settled(broker)
    # The device knows that messages were handed on at once.
    broker.upkeep.sync()
    await settled(broker)
    consumer.hang_up()
    await settled(broker)
    client.send(pub("t", b"one"))
    await settled(broker)
    assert client.responses == [b"OK", b"OK"]
    broker.kill()
    for body in (b"two", b"three"):
        disk = disk.after_power_loss("none")
        broker = await start_broker(disk=disk, durability="fsync")
        client = Client(broker)
        client.send(pub("t", body))
        await settled(broker)
        assert client.responses == [b"OK"]
        await broker.stop() if body == b"two" else broker.kill()
    broker = await start_broker(disk=disk.after_power_loss("none"), durability="fsync")
    consumer = Client(broker)
    consumer.send(b"SUB t d\nRDY 10\n")
    await settled(broker)
    assert consumer.bodies == [b"one", b"two", b"three"]


async def test_a_put_back_message_is_not_early_after_two_boots(
    start_broker: StartBroker, tmp_path: Path, clock: FakeClock
) -> None:
    """Its due time is on a clock that ran two boots ago."""
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk)
    client, consumer = Client(broker), Client(broker)
    consumer.send(b"SUB t c\nRDY 1\n")
    client.send(pub("t", b"one"))
    client.send(dpub("u", 600_000, b"deferred"))
    await settled(broker)
    consumer.requeue(consumer.messages[0], 600)
    consumer.ready(0)
    await settled(broker)
    await broker.stop()
    for _ in range(2):
        clock.reboot(60)
        disk = disk.after_power_loss("none")
        broker = await start_broker(disk=disk)
        deferred = broker.topics["t"].channels["c"].deferred
        left = 600 - 60 * clock.boot_id()[-1] + 60
        assert [(due - clock.now()) // SECOND for due in deferred.columns()[0]] == [left]
        assert [(due - clock.now()) // SECOND for _, due in broker.topics["u"].log.deferred] == [left]
        broker.kill()
        disk = disk.after_kill()
        broker = await start_broker(disk=disk)
        assert [(due - clock.now()) // SECOND for due in broker.topics["t"].channels["c"].deferred.columns()[0]] == [
            left
        ]
        await broker.stop()


async def test_a_newer_data_path_is_refused_at_the_start(start_broker: StartBroker, tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk)
    await broker.stop()
    disk = disk.after_power_loss("none")
    disk.swap(tmp_path / "flintmq" / "format.json", b'{"format": 99, "node": "00"}')
    with pytest.raises(StartError, match="newer version of flintmq"):
        await start_broker(disk=disk)


async def test_a_clean_stop_with_a_slow_device_keeps_and_syncs_everything(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Syncs are under way, others wait behind them: all must be done when the clean mark is written."""
    caplog.set_level(logging.ERROR)
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, durability="os", sync_every=1)
    client = Client(broker)
    client.send(pub("t", b"one"))
    await settled(broker)
    disk.hold()
    for body in (b"two", b"three"):
        client.send(pub("t", body))
        await settled(broker)
        broker.topics["t"].log.sync()
    await broker.stop()
    broker = await start_broker(disk=disk.after_power_loss("none"))
    consumer = Client(broker)
    consumer.send(b"SUB t c\nRDY 10\n")
    await settled(broker)
    assert consumer.bodies == [b"one", b"two", b"three"]
    assert caplog.records == []


async def test_a_full_disk_at_the_stop_saves_what_it_can(start_broker: StartBroker, tmp_path: Path) -> None:
    """nsqd.dat cannot be written, nor a footer: neither is a reason to lose messages or the clean mark."""
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk)
    client = Client(broker)
    client.send(pub("t", b"one") + pub("u", b"two"))
    await settled(broker)
    disk.capacity = disk.used
    await broker.stop()
    await broker.wait_closed()
    broker = await start_broker(disk=disk.after_power_loss("none"))
    for topic, body in (("t", b"one"), ("u", b"two")):
        consumer = Client(broker)
        consumer.send(f"SUB {topic} c\nRDY 10\n".encode())
        await settled(broker)
        assert consumer.bodies == [body]
        assert broker.topics[topic].log.end - broker.topics[topic].log.first == 1, "no gap: the stop was a clean one"


@pytest.mark.parametrize("durability", ["memory", "os"])
async def test_a_publish_after_the_last_ephemeral_channel_waits_until_the_backlog_is_known(
    start_broker: StartBroker, tmp_path: Path, durability: str
) -> None:
    """A start that did not know of a backlog would take the message for one that had been handed on."""
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, durability=durability)
    client, consumer = Client(broker), Client(broker)
    consumer.send(b"SUB t c#ephemeral\n")
    await settled(broker)
    disk.hold()
    consumer.hang_up()
    await settled(broker)
    client.send(pub("t", b"one"))
    await settled(broker)
    assert client.responses == []
    disk.release()
    await settled(broker)
    assert client.responses == [b"OK"]


# --- Which message was the first at a time ---------------------------------------------------------------------------


def seq_at(rig: Rig, time: int) -> int:
    found: list[int] = []

    def then(seq: int, error: BaseException | None) -> None:
        assert error is None
        found.append(seq)

    rig.log.seq_at(time, then)
    rig.run()
    (seq,) = found
    return seq


def timed(rig: Rig) -> dict[int, int]:
    """Batches a second apart, some of them of several records; when each message was published."""
    times = {}
    for number in range(60):
        first = rig.publish(*numbered(1 + number % 7, 3_000 if number % 5 else 30_000))
        times.update({seq: rig.clock.wall() for seq in range(first, rig.log.end)})
        rig.clock.advance(1)
    return times


@pytest.mark.parametrize("where", ["memory", "files", "both", "sealed files", "salvaged files"])
def test_the_first_message_at_a_time_is_found_wherever_it_is(where: str) -> None:
    rig = Rig(max_bytes_per_file=900_000)
    times = timed(rig)
    assert len(rig.files) > 2 and any(len(segment.index_seqs) > 1 for segment in rig.log.segments)
    if where == "files":
        rig.forget()
        assert not rig.log.blocks
    elif where == "both":
        middle = list(times)[len(times) // 2]
        rig.log.trim(1 << 60, 1 << 60, lambda first, stop: stop > middle, lambda first, stop: False)
        assert BASE < rig.log.blocks[0].base < rig.log.end
    elif where == "sealed files":
        rig.stop()
        rig = rig.reopened(durable=rig.log.durable)
    elif where == "salvaged files":
        rig.log.sync_now()
        rig = rig.reopened(durable=BASE + 30)
    begun, ended = min(times.values()), max(times.values())
    for time in range(begun - SECOND, ended + 2 * SECOND, SECOND // 2):
        expected = min((seq for seq, published in times.items() if published >= time), default=rig.log.end)
        assert seq_at(rig, time) == expected, (time - begun) / SECOND


def test_the_first_message_at_a_time_may_come_after_a_gap_or_be_damaged() -> None:
    rig = Rig()
    rig.publish(*numbered(10))
    rig.log.sync_now()
    after_gap = rig.reopened(durable=rig.log.end, after=BASE + 5_000)
    assert seq_at(after_gap, 0) == BASE
    assert seq_at(after_gap, rig.clock.wall() + 1) == BASE + 5_000
    rig.clock.advance(1)
    after_gap.publish(b"later")
    after_gap.forget()
    assert seq_at(after_gap, rig.clock.wall()) == BASE + 5_000
    content = bytearray(after_gap.disk.content(after_gap.files[0]))
    content[FILE_HEADER + RECORD_HEADER + 40] ^= 1
    after_gap.disk.swap(after_gap.files[0], bytes(content))
    after_gap = after_gap.reopened(after_gap.disk, durable=after_gap.log.end)
    assert seq_at(after_gap, 0) == after_gap.log.first, "what cannot be read has no time"


def test_a_clock_that_was_set_back_gives_the_first_place_that_reaches_a_time() -> None:
    rig = Rig(max_bytes_per_file=10_000)
    for _ in range(20):
        rig.publish(*numbered(10, 300))
        rig.clock.advance(60)
    noon = rig.clock.wall()
    rig.clock.step_wall(-600)
    for _ in range(20):
        rig.publish(*numbered(10, 300))
        rig.clock.advance(60)
    rig.forget()
    assert seq_at(rig, noon - 300 * SECOND) == BASE + 150
    assert seq_at(rig, noon) == BASE + 300


def test_a_footer_without_times_gets_them_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_bytes_per_file=900_000)
    encode = msgspec.msgpack.encode
    with monkeypatch.context() as patch:
        patch.setattr(
            "flintmq.broker.storage.segment.msgspec.msgpack.encode",
            lambda footer: encode({key: value for key, value in footer.items() if key != "times"}),
        )
        times = timed(rig)
        rig.stop()
    again = rig.reopened(durable=rig.log.end)
    some = list(times)[40]
    assert times[some - 1] == times[some], "in the middle of a batch"
    assert seq_at(again, times[some]) < some
    again.stop()
    size = sum(len(again.disk.content(path)) for path in again.files)
    third = again.reopened(durable=rig.log.end)
    assert third.bodies() == again.reopened(durable=rig.log.end).bodies() and len(third.seqs()) == len(times)
    assert sum(len(third.disk.content(path)) for path in third.files) == size, "and only once"


def test_what_a_thread_is_still_writing_is_not_taken_for_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(inline=False)
    rig.publish(*numbered(50))
    rig.forget()
    monkeypatch.setattr(log_module, "WRITE_IN_THREAD_AT", 0)
    rig.disk.hold()
    rig.append(*numbered(50, start=50))
    rig.log.flush()
    assert rig.log.written == BASE + 50
    # Both are under way: the write, and a read of the place that it writes to.
    assert rig.log.frame(BASE) is None
    rig.disk._queue.reverse()
    for *_, work, done in list(rig.disk._queue):
        rig.disk._finish(work, done, 0)
    rig.disk._queue.clear()
    rig.disk.release()
    rig.run()
    rig.forget()
    assert list(rig.bodies().values()) == numbered(100) and rig.log.damaged == []


class SlowToRemove(CountingDisk):
    """Removing a segment takes until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.threads: set[int] = set()

    def remove(self, path: Path) -> None:
        if path.suffix == ".seg":
            self.threads.add(threading.get_ident())
            if threading.get_ident() != threading.main_thread().ident:
                self.go_on.wait(30)
        super().remove(path)


@pytest.mark.parametrize("how", ["delete the topic", "finish everything"])
async def test_others_are_served_while_files_are_removed(start_broker: StartBroker, how: str) -> None:
    disk = SlowToRemove()
    broker = await start_broker(disk=disk, max_bytes_per_file=1_000)
    client, consumer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 100)
    await client.publish("t", *numbered(10, 900))
    await until(lambda: len(consumer.messages) == 10)
    folder = broker.topics["t"].folder
    assert folder is not None
    if how == "delete the topic":
        broker.delete_topic("t")
    else:
        consumer.finish(*consumer.messages)
        await until(lambda: broker.topics["t"].channels["c"].in_flight_count == 0)
        broker.upkeep.sync()
    await until(lambda: disk.threads)
    await client.publish("u", b"meanwhile")
    assert threading.get_ident() not in disk.threads, "files are removed on the event loop"
    disk.go_on.set()
    await quiet(broker)
    assert not folder.exists() if how == "delete the topic" else len(disk.names(folder)) == 1


async def test_many_topics_with_a_little_each_do_not_stop_their_publishers(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """None of them has enough for a sync of its own, all together have more than may be unsynced."""
    broker = await start_broker(sync_timeout=3600 * SECOND, sync_every=1 << 40, mem_queue_size=100)
    clients = [Client(broker) for _ in range(14)]
    batch = [bytes(100_000)] * 10
    for _ in range(11):
        for number, client in enumerate(clients):
            client.send(encode_mpub(b"t%d" % number, batch))
        for client in clients:
            await until(lambda client=client: client.take() == [(FRAME_RESPONSE, b"OK")])
    assert broker.store.unsynced < 128 << 20
    await quiet(broker)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize("times", [1, 3, 9])
async def test_a_file_that_cannot_be_opened_for_a_while_costs_no_message(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, times: int
) -> None:
    monkeypatch.setattr(reader_module, "READ_PAUSE", 0.001)
    disk = SimDisk(tmp_path)
    broker = await start_broker(disk=disk, mem_queue_size=0, cold_cache_bytes=1, max_bytes_per_file=20_000)
    client = Client(broker)
    await Client(broker).subscribe("t", "c")
    for number in range(0, 50, 10):
        await client.publish_many("t", numbered(10, 1_000, number))
    await settled(broker)
    for segment in broker.topics["t"].log.segments:
        broker.store.close_file(segment)
    disk.fail("open", error, times=times, path=".seg")
    consumer = Client(broker)
    await consumer.subscribe("t", "c", 100)
    await until(lambda: broker.topics["t"].channels["c"].depth == 0)
    assert sorted(consumer.bodies) == sorted(numbered(50, 1_000))


@pytest.mark.parametrize("fault", [None, OSError(errno.EIO, "input/output error")])
def test_a_block_that_is_being_read_is_asked_for_once(fault: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that finishes messages meanwhile asks again and again, and each read costs a plan."""
    rig = Rig(inline=False)
    rig.publish(*numbered(50, 1_000))
    rig.log.sync_now()
    rig.forget()
    reader = rig.log.reader
    plans = []
    part = reader._part
    monkeypatch.setattr(type(reader), "_part", lambda _, *place: plans.append(place) or part(*place))
    with monkeypatch.context() as patch:
        if fault is not None:
            patch.setattr(rig.disk, "read", lambda *_: (_ for _ in ()).throw(fault))
        for _ in range(5):
            assert rig.log.block(BASE, "a channel") is None
        assert len(plans) == 1
        assert rig.log.block(BASE + 1, "a channel") is None, "elsewhere: that is another question"
        assert rig.log.block(BASE, "another channel") is None
        assert len(plans) == 3
        rig.run()
    while rig.delayed:
        rig.delayed.pop()()
        if rig.log.block(BASE, "a channel") is None:
            rig.run()
    block = rig.log.block(BASE, "a channel")
    assert block is not None and block.base == BASE
    rig.log.leave("a channel")
    assert "a channel" not in reader._asked
