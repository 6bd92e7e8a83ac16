"""Channels that lag behind: how much is read from files for each byte that they get, and how much memory that takes.

Both are counted: reads where they reach the table of system calls, memory by the blocks that are kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.storage.cold import IDLE, Cold
from flintmq.broker.storage.segment import CHUNK_BYTES, RECORD_BYTES, Segment
from flintmq.kernel import Block
from flintmq.protocol.wire import encode_mpub
from flintmq.system import System
from support.fakes import SECOND, Client, CountingDisk, quiet, until
from support.log_rig import BASE, Rig, numbered

#: Bytes of a frame beside its body.
FRAME = 34
MB = 1 << 20
#: The default of ``--cold-cache-bytes``.
BUDGET = 32 * MB


@dataclass
class Reading:
    """What cursors were given, what was read for it, and the most bytes that were kept at once."""

    given: int = 0
    read: int = 0
    reads: int = 0
    most: int = 0

    @property
    def ratio(self) -> float:
        return self.read / self.given


class Lagging:
    """A log that is in files alone, and cursors on it that take messages in turns."""

    def __init__(self, bodies: list[bytes], batches: Iterable[int], budget: int = BUDGET) -> None:
        self.rig = Rig(max_bytes_per_file=20_000_000, mem_queue_size=0)
        self.bodies = bodies
        self.end = BASE + len(bodies)
        at = 0
        for batch in batches:
            self.rig.publish(*bodies[at : at + batch])
            at += batch
        assert at >= len(bodies)
        self.rig.forget()
        assert self.rig.log.memory_count == 0
        self.found = Reading()
        system = self.rig.disk.system
        pread = system.pread

        def counted(fd: int, size: int, offset: int) -> bytes:
            data = pread(fd, size, offset)
            self.found.read += len(data)
            self.found.reads += 1
            return data

        system.pread = counted  # type: ignore[method-assign]
        self.start_anew(budget)

    def start_anew(self, budget: int) -> None:
        """Forget all that was read, and what is on its way."""
        self.rig.run()
        self.cold = self.rig.store.cold = self.rig.log.reader._cold = Cold(budget)
        self.found = Reading()

    def step(self, cursor: object, seq: int, most: int) -> int:
        """Give a cursor up to ``most`` messages; how many it got, none while they are being read."""
        block = self.rig.log.block(seq, cursor)
        if block is None:
            return 0
        count = block.cut(seq, most, 256 << 10)
        frames = block.view[block.start : block.stop]
        assert int(frames[18:34].tobytes(), 16) & ((1 << 54) - 1) == seq
        body = self.bodies[seq - BASE]
        assert frames[FRAME : FRAME + len(body)] == body
        self.found.given += len(frames)
        return count

    def run(self, starts: list[int], most: int | list[int], give: int) -> Reading:
        """Let a cursor begin at each of these and take ``most`` messages a turn, up to ``give`` of them or the end."""
        at = dict(enumerate(starts))
        rates = most if isinstance(most, list) else [most] * len(starts)
        left = {cursor: min(give, self.end - start) for cursor, start in at.items()}
        while left:
            for cursor in list(left):
                count = self.step(cursor, at[cursor], min(rates[cursor], left[cursor]))
                at[cursor] += count
                left[cursor] -= count
                if not left[cursor]:
                    del left[cursor]
                    self.rig.log.leave(cursor)
            # The answers of threads come in a later turn.
            self.rig.run()
            self.check()
        return self.found

    def check(self) -> None:
        """Look at the cache from outside: its sums are right, and it holds no more than its tables say."""
        cold = self.cold
        kept = [*cold._held, *cold._free]
        assert sum(one.block.size for one in kept) == cold.bytes
        assert sum(one.block.size for one in cold._held) == cold._in_use
        assert set(kept) == set(chain.from_iterable(row for _, row in cold._by_segment.values()))
        assert set(cold.places.values()) <= set(cold._held)
        theirs = [*cold.places.items(), *cold._ahead.items()]
        assert set(theirs) == {(cursor, one) for one in kept for cursor in one.cursors}
        self.found.most = max(self.found.most, cold.bytes)


@pytest.fixture(scope="module", params=[1, 16], ids=["a record each", "records of 64 KB"])
def lagging(request: pytest.FixtureRequest) -> Lagging:
    """52 MB of messages of 4,000 bytes, each in a record of its own or 16 in one."""
    return Lagging(numbered(13_000, 4_000), [request.param] * 13_000)


def spread(count: int, stop: int, seed: int = 1) -> list[int]:
    """As many places, one in each of so many parts of the first ``stop`` messages."""
    dice = random.Random(seed)
    return [BASE + stop * i // count + dice.randrange(max(1, stop // count)) for i in range(count)]


# --- What is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2500], ids=["RDY 1", "RDY 2500"])
@pytest.mark.parametrize("count", [1, 10, 100])
def test_channels_far_apart_read_little_more_than_they_get(lagging: Lagging, count: int, most: int) -> None:
    lagging.start_anew(BUDGET)
    found = lagging.run(spread(count, 12_000), most, 700)
    assert found.ratio <= (2 if count < 100 else 3)
    assert found.most <= BUDGET


@pytest.mark.parametrize("most", [1, 2500], ids=["RDY 1", "RDY 2500"])
def test_channels_that_share_nothing_read_little_more_than_they_get(lagging: Lagging, most: int) -> None:
    """100 places, and each channel stops before it comes to another one's."""
    lagging.start_anew(BUDGET)
    found = lagging.run([BASE + 130 * i + 65 for i in range(100)], most, 130)
    assert found.ratio <= 3
    assert found.most <= BUDGET


def test_channels_close_together_share_what_is_read(lagging: Lagging) -> None:
    lagging.start_anew(BUDGET)
    found = lagging.run(spread(100, 400), 1, 1_000)
    assert found.ratio <= 0.05


def test_a_thousand_channels_stay_within_the_budget(lagging: Lagging) -> None:
    """Each has room for half a record of 64 KB: it is read twice, and not for each message."""
    lagging.start_anew(BUDGET)
    found = lagging.run(spread(1_000, 12_500), 1, 150)
    assert found.ratio <= 3
    assert found.most <= BUDGET


def test_a_slow_channel_keeps_its_place_while_others_run_by(lagging: Lagging) -> None:
    lagging.start_anew(4 * MB)
    slow, fast = BASE + 5_000, [BASE, BASE + 2_000, BASE + 6_000]
    done = 0
    before = 0
    for turn in range(4_000):
        if turn % 40 == 0:
            count = lagging.step("slow", slow + done, 1)
            done += count
            if done == 1 and not before:
                before = lagging.found.reads
        for number in range(len(fast)):
            fast[number] += lagging.step(number, fast[number], 2500) if fast[number] < lagging.end else 0
        lagging.rig.run()
        lagging.check()
    assert done >= 98
    assert lagging.found.ratio <= 2


@pytest.mark.parametrize("seed", range(8))
def test_generated_logs_and_channels_read_within_bounds(seed: int) -> None:
    """Messages and batches of any size, channels of any speed, anywhere, with any budget."""
    dice = random.Random(seed)
    sizes = dice.sample([10, 200, 3_000, 30_000, 150_000, 700_000], dice.randint(1, 3))
    bodies: list[bytes] = []
    left = dice.choice([1, 4]) * MB
    while left > 0 and len(bodies) < 5_000:
        bodies += numbered(1, dice.choice(sizes), len(bodies))
        left -= len(bodies[-1])
    batches: list[int] = []
    while sum(batches) < len(bodies):
        batches.append(dice.choice([1, 1, dice.randint(1, 300)]))
    budget = dice.choice([0, 100_000, 1 * MB, 8 * MB])
    lagging = Lagging(bodies, batches, budget)
    count = dice.choice([1, 3, 20, 60])
    close = dice.choice([len(bodies), len(bodies), 50])
    first = dice.randrange(len(bodies))
    starts = [BASE + min(first + dice.randrange(close), len(bodies) - 1) for _ in range(count)]
    found = lagging.run(starts, [dice.choice([1, 1, 7, 2500]) for _ in starts], dice.choice([100, 1_000]))
    # Two blocks may always stay, and a message cannot be halved; a part ends where a record does.
    largest = max(CHUNK_BYTES, max(map(len, bodies)) + FRAME)
    assert found.most <= max(budget, 2 * largest) + RECORD_BYTES
    if budget >= 3 * count * largest:
        # What lies in the chunk before the place where a channel begins, what follows where it ends, and one ahead.
        assert found.read <= found.given + 3 * count * (largest + RECORD_BYTES)


# --- What is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_read_in_whatever_order_the_tables_agree(seed: int) -> None:
    """Blocks of any base and size, as several readers bring them, and cursors that enter, wait and leave."""
    dice = random.Random(seed)
    cold = Cold(dice.choice([0, 20_000, 100_000]))
    segments = [Segment(Path(str(number)), 0, 1, b"") for number in range(2)]
    cursors = [f"cursor {number}" for number in range(dice.choice([2, 6, 20]))]
    now = 0
    for _ in range(600):
        segment, cursor = dice.choice(segments), dice.choice(cursors)
        what = dice.random()
        if what < 0.35:
            waiting = [each for each in cursors if each in cold._waiting]
            whose = dice.sample(waiting, dice.randint(0, len(waiting)))
            cold.keep(segment, block_of(dice.randrange(0, 60, dice.choice([1, 10])), dice.randint(1, 40)), whose)
        elif what < 0.75:
            kept = cold.find(segment, dice.randrange(100))
            if kept is None:
                cold.wait(cursor)
            else:
                cold.enter(cursor, kept)
        elif what < 0.85:
            cold.leave(cursor)
        elif what < 0.9:
            now += dice.choice([1, IDLE])
            cold.tidy(now)
        elif what < 0.95:
            cold.lend(cold._lent, dice.choice([0, 0, 5_000]))
        elif what < 0.97:
            cold.forget(segment)
        blocks = {*cold._held, *cold._free}
        assert len(blocks) == len(cold)
        assert cold.bytes == sum(kept.block.size for kept in blocks)
        assert cold._in_use == sum(kept.block.size for kept in cold._held)
        assert all(kept.cursors for kept in cold._held) and not any(kept.cursors for kept in cold._free)
        assert {kept for _, row in cold._by_segment.values() for kept in row} == blocks
        for kept in blocks:
            base, stop = kept.block.base, kept.block.base + kept.block.count
            assert all(cold.places.get(each) is kept or cold._ahead.get(each) is kept for each in kept.cursors)
            others = [each for each in blocks if each is not kept and each.segment is kept.segment]
            assert not any(each.block.base <= base and stop <= each.block.base + each.block.count for each in others)
        for each, kept in (*cold.places.items(), *cold._ahead.items()):
            assert kept in blocks and each in kept.cursors


def block_of(base: int, count: int) -> Block:
    frame = (196).to_bytes(4, "big") + (2).to_bytes(4, "big") + bytes(192)
    block = Block(0, base, bytearray(frame * count))
    block.adopt(len(frame) * count, count)
    return block


def test_a_block_goes_when_the_last_channel_has_passed_it_and_room_is_needed(lagging: Lagging) -> None:
    lagging.start_anew(5 * CHUNK_BYTES // 2)
    seq = BASE + 1
    for cursor in ("first", "second"):
        assert not lagging.step(cursor, seq, 1)
    lagging.rig.run()
    assert lagging.step("first", seq, 1) and lagging.step("second", seq, 1)
    for cursor in ("first", "second"):
        for at in (BASE + 5_000, BASE + 9_000, BASE + 11_000, BASE + 3_000):
            lagging.step(cursor, at, 1)
            lagging.rig.run()
            lagging.step(cursor, at, 1)
            kept = any(one.block.base <= seq < one.block.base + one.block.count for one in lagging.cold._held)
            assert kept == (cursor == "first")
            lagging.check()
    read = lagging.found.read
    assert not lagging.step("third", seq, 1)
    assert lagging.found.read > read


def test_a_channel_that_stops_asking_keeps_nothing_from_others_for_long(lagging: Lagging) -> None:
    lagging.start_anew(BUDGET)
    clock, cold = lagging.rig.clock, lagging.cold
    for cursor, seq in (("gone", BASE + 1), ("here", BASE + 9_000)):
        lagging.step(cursor, seq, 1)
    lagging.rig.run()
    lagging.step("gone", BASE + 1, 1)
    for number in range(5):
        lagging.step("here", BASE + 9_000 + number, 1)
        lagging.rig.store.tidy()
        assert ("gone" in cold.places) == (number < 2)
        clock.advance(IDLE / SECOND / 2)
    assert "here" in cold.places
    assert all("gone" not in one.cursors for one in (*cold._held, *cold._free))
    lagging.check()


def test_a_channel_that_leaves_is_forgotten_and_so_is_a_closed_log() -> None:
    lagging = Lagging(numbered(300, 4_000), [300])
    for cursor in ("one", "other"):
        lagging.step(cursor, BASE, 1)
        lagging.rig.run()
        lagging.step(cursor, BASE, 1)
    lagging.rig.log.leave("one")
    assert list(lagging.cold.places) == ["other"]
    lagging.check()
    assert lagging.cold.bytes
    lagging.rig.log.close()
    assert not lagging.cold.places and not lagging.cold.bytes and not len(lagging.cold)
    lagging.check()


def test_a_log_is_lent_only_memory_that_no_channel_is_in(lagging: Lagging) -> None:
    lagging.start_anew(4 * CHUNK_BYTES)
    lagging.step("channel", BASE, 1)
    lagging.rig.run()
    lagging.step("channel", BASE, 1)
    cold = lagging.cold
    assert not cold.lend(0, 4 * CHUNK_BYTES)
    assert cold.lend(0, 4 * CHUNK_BYTES - cold._in_use)
    assert lagging.step("channel", BASE + 1, 1)
    lagging.check()
    assert cold.lend(4 * CHUNK_BYTES - cold._in_use, 0)
    assert cold.room > CHUNK_BYTES


# --- With everything around it ---------------------------------------------------------------------------------------


class CountingSystem(System):
    """The real one, which counts the bytes that are read from files."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        data = super().pread(fd, size, offset)
        self.read += len(data)
        return data


async def test_100_consumers_with_rdy_1_of_channels_that_lag(start_broker: StartBroker) -> None:
    """Some of the channels are ephemeral: these hold no message in files, and do not lag."""
    system = CountingSystem()
    broker: Broker = await start_broker(disk=CountingDisk(system), mem_queue_size=100)
    client = Client(broker)
    names = [f"c{number}" + "#ephemeral" * (number % 10 == 9) for number in range(100)]
    durable = [name for name in names if "#" not in name]
    consumers = {name: Client(broker) for name in names}
    for name, consumer in consumers.items():
        await consumer.subscribe("t", name)
    count, each, size = 10_000, 120, 4_000
    for number in range(0, count, 200):
        client.send(encode_mpub(b"t", numbered(200, size, number)))
        await until(lambda: client.take() == [(0, b"OK")])
    topic = broker.topics["t"]
    first = topic.log.first
    for number, name in enumerate(durable):
        topic.channels[name].seek(first + (count - each) * number // len(durable))
    await quiet(broker)
    system.read = 0
    for name in names:
        consumers[name].send(b"RDY 1\n")
    taken = dict.fromkeys(names, 0)
    for _ in range(each):
        for name, consumer in consumers.items():
            if "#" not in name:
                await until(lambda consumer=consumer: consumer.messages)
            (message,) = consumer.messages or (None,)
            consumer.take()
            if message is not None:
                taken[name] += 1
                consumer.finish(message)
    assert all(taken[name] == (each if name in durable else 100) for name in names)
    given = len(durable) * each * (size + FRAME)
    assert system.read <= 3 * given
    assert broker.store.cold.bytes <= broker.options.cold_cache_bytes
