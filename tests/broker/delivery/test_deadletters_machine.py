"""Whatever happens, in whatever order: a message is at its channel, or among the dead letters, or finished.

A real broker with one channel and its dead-letter topic is driven with random deliveries, answers, timeouts, redrives,
changes of the limit and of the longest age, clean restarts and crashes. What it holds is compared with what was
published and not finished: each message is there once, wherever. Only what was finished right before a crash may come
back.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from test_deadletters import body, contents, limit, moved, outstanding

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.redrive import REDRIVE, Redrive
from flintmq.broker.storage import journal as journal_module
from flintmq.broker.storage import syncer as syncer_module
from flintmq.broker.storage.journal import SIDE
from flintmq.protocol.wire import Message
from support.fakes import SECOND, Client, CountingDisk, FakeClock, pass_time, quiet, until

T = TypeVar("T")
DEAD = "t.c.dead"
some = st.integers(1, 5)


class DeadLetterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="flintmq-machine-")
        self.loop = asyncio.new_event_loop()
        self.raised: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.raised.append(context))
        self.clock = FakeClock()
        self.number = 0
        self.most = 1
        self.ttl = 0
        self.mem_queue_size = 0
        #: Published and not finished; and finished, but not yet written down.
        self.alive: set[bytes] = set()
        self.going: set[bytes] = set()
        self.patched = journal_module.ROLL_AT, syncer_module.SYNC_SPACING

    @initialize(mem_queue_size=st.sampled_from([0, 3, 10_000]), most=st.integers(1, 3))
    def begin(self, mem_queue_size: int, most: int) -> None:
        # Small files, so that they roll and go; and no pause between syncs, whose clock stands still here.
        journal_module.ROLL_AT, syncer_module.SYNC_SPACING = 2_000, 0
        self.mem_queue_size, self.most = mem_queue_size, most
        self.start()

    def teardown(self) -> None:
        journal_module.ROLL_AT, syncer_module.SYNC_SPACING = self.patched
        if hasattr(self, "broker"):
            self.run(self.broker.stop())
        self.loop.close()
        shutil.rmtree(self.path)
        assert self.raised == []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def start(self) -> None:
        self.broker = Broker(
            clock=self.clock,
            disk=CountingDisk(),
            data_path=self.path,
            mem_queue_size=self.mem_queue_size,
            max_bytes_per_file=1_000,
            disk_reserve=0,
        )

        async def begin() -> None:
            await self.broker.start()
            self.broker.topic("t").channel("c")
            self.producer = Client(self.broker)

        self.run(begin())
        limit(self.channel, self.most)
        self.limit_age()
        self.settle()

    def limit_age(self) -> None:
        topic = self.broker.topics["t"]
        topic.settings = replace(topic.settings, ttl=self.ttl * SECOND, ttl_action="dead-letter")

    @property
    def channel(self) -> Channel:
        return self.broker.topics["t"].channels["c"]

    def settle(self) -> None:
        async def rest() -> list[bytes]:
            await quiet(self.broker)
            await moved(self.broker)
            return [body for bodies in (await contents(self.broker)).values() for body in bodies]

        found = Counter(self.run(rest()))
        assert not found - Counter(found.keys()), "in two places"
        assert found.keys() == self.alive, (self.alive - found.keys(), found.keys() - self.alive)
        assert self.raised == []

    # --- Deliveries --------------------------------------------------------------------------------------------------

    @rule(count=some, size=st.sampled_from([1, 100, 700]))
    def publish(self, count: int, size: int) -> None:
        bodies = [b"%d-" % (self.number + i) + b"x" * size for i in range(count)]
        self.number += count
        self.run(self.producer.publish_many("t", bodies))
        self.alive.update(bodies)
        self.settle()

    async def take(self, topic: str, name: str, count: int) -> tuple[Client, list[Message]]:
        """A consumer that gets up to ``count`` messages; what it does not answer times out."""
        consumer = Client(self.broker)
        await consumer.subscribe(topic, name)
        consumer.ready(count)
        await quiet(self.broker)
        messages = consumer.messages
        consumer.take()
        consumer.ready(0)
        return consumer, messages

    async def answer(self, topic: str, name: str, count: int, finished: int, delay: float) -> None:
        consumer, messages = await self.take(topic, name, count)
        consumer.finish(*messages[:finished])
        for message in messages[:finished]:
            self.alive.remove(message.body)
            self.going.add(message.body)
        for message in messages[finished:]:
            consumer.requeue(message, delay)
        assert consumer.errors == []
        consumer.hang_up()
        await until(lambda: consumer.transport.lost)

    @rule(count=some, finished=st.integers(0, 2), delay=st.sampled_from([0, 30]))
    def deliver(self, count: int, finished: int, delay: float) -> None:
        self.run(self.answer("t", "c", count, finished, delay))
        self.settle()

    @precondition(lambda self: DEAD in self.broker.topics)
    @rule(count=some, finished=st.integers(0, 2))
    def deliver_dead_letters(self, count: int, finished: int) -> None:
        """Somebody looks after them, from the channel that they are sent back from."""
        self.run(self.answer(DEAD, REDRIVE, count, finished, 0))
        self.settle()

    @rule(count=some)
    def vanish_with_some(self, count: int) -> None:
        async def lose() -> None:
            consumer, _ = await self.take("t", "c", count)
            consumer.hang_up()
            await until(lambda: consumer.transport.lost)

        self.run(lose())
        self.settle()

    @rule(seconds=st.integers(1, 70))
    def time_passes(self, seconds: int) -> None:
        self.run(pass_time(self.broker, self.clock, seconds))
        self.settle()

    # --- Operators ---------------------------------------------------------------------------------------------------

    @rule(most=st.integers(0, 3))
    def change_the_limit(self, most: int) -> None:
        self.most = most
        limit(self.channel, most)

    @rule(seconds=st.sampled_from([0, 15, 60]))
    def change_the_age(self, seconds: int) -> None:
        """What is older becomes a dead letter, sooner or later."""
        self.ttl = seconds
        self.limit_age()

    @precondition(lambda self: DEAD in self.broker.topics)
    @rule(count=some, wait=st.booleans())
    def redrive(self, count: int, wait: bool) -> None:
        async def begin() -> None:
            source, _ = self.broker.topics[DEAD].channel(REDRIVE)
            await quiet(self.broker)
            self.channel.redrive = redrive = Redrive(self.channel, source, count, 0)
            if wait:
                await until(lambda: not redrive.running)

        self.run(begin())
        if wait:
            self.settle()

    @rule(which=st.integers(0, 1 << 16), seconds=st.sampled_from([0, 5, 40]))
    def defer_one(self, which: int, seconds: int) -> None:
        """Whatever state it is in; one that was brought back and not delivered yet, too."""
        found = sorted(outstanding(self.channel), reverse=True)
        if found:
            assert self.channel.reschedule(found[which % len(found)], seconds * SECOND)
        self.settle()

    @rule()
    def seek(self) -> None:
        """To the last message of the log: those before it are dropped, and what was brought back stays."""
        self.publish(1, 1)

        async def go() -> set[bytes]:
            last = self.broker.topics["t"].log.end - 1
            await moved(self.broker)
            dropped = [seq for seq in outstanding(self.channel) if seq < SIDE and seq != last]
            bodies = {await body(self.broker.topics["t"], seq) for seq in dropped}
            self.channel.seek(last)
            await quiet(self.broker)
            return bodies

        dropped = self.run(go())
        self.alive -= dropped
        self.going |= dropped
        self.settle()

    @rule()
    def housekeeping(self) -> None:
        self.broker.turns.housekeeping()
        self.broker.upkeep.sync()
        self.going.clear()
        self.settle()

    @rule(seconds=st.integers(0, 30))
    def restart(self, seconds: int) -> None:
        self.run(self.broker.stop())
        self.going.clear()
        self.clock.advance(seconds)
        self.start()

    @rule(turns=st.integers(0, 8), written=st.booleans(), count=some)
    def crash(self, turns: int, written: bool, count: int) -> None:
        """In the middle of things: some were just put back, and the loop has made so many turns since."""

        async def put_back() -> None:
            consumer, messages = await self.take("t", "c", count)
            consumer.send(b"".join(b"REQ %s 0\n" % message.id for message in messages))
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(put_back())
        if written:
            self.broker.journal.flush()
            self.going.clear()
        self.broker.kill()

        async def found() -> set[bytes]:
            await quiet(self.broker)
            return {body for bodies in (await contents(self.broker)).values() for body in bodies}

        going, self.going = self.going, set()
        settle, self.settle = self.settle, lambda: None  # type: ignore[method-assign]
        self.start()
        self.settle = settle  # type: ignore[method-assign]
        self.alive |= going & self.run(found())
        self.settle()


EXHAUSTIVE = os.environ.get("FLINTMQ_EXHAUSTIVE") == "1"


@pytest.mark.timeout(0 if EXHAUSTIVE else 300)
def test_a_message_is_at_its_channel_or_among_the_dead_letters_or_finished() -> None:
    run_state_machine_as_test(
        DeadLetterMachine,
        settings=settings(
            deadline=None,
            max_examples=2_000 if EXHAUSTIVE else 40,
            stateful_step_count=60 if EXHAUSTIVE else 30,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
