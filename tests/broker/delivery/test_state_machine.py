"""Whatever happens to a broker, in whatever order: each channel has each message in exactly one place.

A real broker is driven with random commands, operators' actions, passing time, clean restarts and crashes, and
compared with a small oracle. The oracle knows, per channel and message, whether it waits, is in flight, waits for its
time or is finished. After every step it checks that

- what was delivered was waiting, or due, or timed out, and carries the right number of attempts;
- nothing that could be delivered was held back;
- the broker's own numbers agree, and its settings are what was set;
- after a crash everything acknowledged is there, nothing comes early, and nothing that the journal knew to be finished
  comes again. What the journal had not yet written may come again: then the oracle follows the broker.

Time moves in whole seconds and every timeout ends on half a second, so that it is always clear what is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.delivery.topic import Topic
from flintmq.broker.http.peek import cursor_of, peek_channel, peek_topic
from flintmq.broker.storage import journal as journal_module
from flintmq.protocol.seqs import SEQ_MASK
from flintmq.protocol.wire import Message, encode_mpub
from support.fakes import SECOND, Client, CountingDisk, FakeClock, dpub, pass_time, places, pub, quiet, until
from support.small_slices import small_slices

T = TypeVar("T")

TOPICS = ["orders", "audit"]
CHANNELS = ["a", "b", "c"]
MSG_TIMEOUT, MAX_MSG_TIMEOUT = 10.5, 25.5
#: Beyond every delay that is asked for.
NO_LIMIT = 10_000_000

WAITING, IN_FLIGHT, LATER, FINISHED = "waiting", "in flight", "later", "finished"


@dataclass
class Entry:
    """One message as one channel sees it."""

    place: str = WAITING
    #: Deliveries so far.
    attempts: int = 0
    due: int = 0
    owner: Client | None = None
    delivered: int = 0
    deadline: int = 0
    # What the journal was told when the message was last put back: attempts and due time. And what it has for certain.
    told: tuple[int, int] = (0, 0)
    sure: tuple[int, int] = (0, 0)
    #: The journal has for certain that it is finished.
    surely_finished: bool = False

    def shift(self, by: int) -> None:
        """The clock that dues go by has started again: all of them are on the new one."""
        self.due += by if self.due else 0
        self.told = (self.told[0], self.told[1] and self.told[1] + by)
        self.sure = (self.sure[0], self.sure[1] and self.sure[1] + by)

    def put_back(self, due: int = 0) -> None:
        self.place, self.owner, self.due = (LATER if due else WAITING), None, due
        self.told = (self.attempts, due)


@dataclass
class ChannelModel:
    paused: bool = False
    entries: dict[int, Entry] = field(default_factory=dict)

    def count(self, place: str) -> int:
        return sum(entry.place == place for entry in self.entries.values())


@dataclass
class TopicModel:
    paused: bool = False
    #: Not handed to any channel yet: seq → when due, 0 if it was not deferred.
    backlog: dict[int, int] = field(default_factory=dict)
    bodies: dict[int, bytes] = field(default_factory=dict)
    #: When those that were deferred by their publisher are due.
    dues: dict[int, int] = field(default_factory=dict)
    channels: dict[str, ChannelModel] = field(default_factory=dict)

    @property
    def frozen(self) -> bool:
        return self.paused or not self.channels


@dataclass
class Consumer:
    client: Client
    topic: str
    channel: str
    held: dict[int, Message] = field(default_factory=dict)


topics = st.sampled_from(TOPICS)
channels = st.sampled_from(CHANNELS)
#: Names and patterns that something is set live for, in the order in which they count.
SET_FOR = [(name,) for name in (*TOPICS, "o*", "*")]
SET_FOR += [(topic, channel) for topic in (*TOPICS, "o*", "*") for channel in (*CHANNELS, "*")]
some = st.randoms(use_true_random=False)


class BrokerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="flintmq-machine-")
        self.loop = asyncio.new_event_loop()
        self.raised: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.raised.append(context))
        self.stack = contextlib.ExitStack()
        self.clock = FakeClock()
        self.models: dict[str, TopicModel] = {}
        self.consumers: list[Consumer] = []
        self.number = 0
        self.roll_at = journal_module.ROLL_AT
        self.mem_queue_size = 10_000
        self.requeue_on_disconnect = False
        #: What was set live: by name or pattern, a value of a setting that changes nothing here.
        self.said: dict[tuple[str, ...], int] = {}
        # After a reboot delays go by the wall clock, and it must not have been set meanwhile.
        self.date_was_set = self.was_rebooted = False

    @initialize(
        mem_queue_size=st.sampled_from([0, 3, 10_000]), requeue_on_disconnect=st.booleans(), size=st.integers(0, 3)
    )
    def begin(self, mem_queue_size: int, requeue_on_disconnect: bool, size: int) -> None:
        self.stack.enter_context(small_slices(size))
        # Small files, so that they roll and go: every way of reading a message back is taken.
        journal_module.ROLL_AT = 3_000
        self.mem_queue_size = mem_queue_size
        self.requeue_on_disconnect = requeue_on_disconnect
        self.start()

    def teardown(self) -> None:
        self.stack.close()
        journal_module.ROLL_AT = self.roll_at
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
            msg_timeout=round(MSG_TIMEOUT * SECOND),
            max_msg_timeout=round(MAX_MSG_TIMEOUT * SECOND),
            requeue_on_disconnect=self.requeue_on_disconnect,
            disk_reserve=0,
        )
        self.run(self.broker.start())

        async def connect() -> Client:
            return Client(self.broker)

        self.producer = self.run(connect())

    # --- What the broker has -----------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        return self.broker.topics[name]

    def channel(self, topic: str, name: str) -> Channel:
        return self.topic(topic).channels[name]

    def model(self, topic: str, channel: str) -> ChannelModel:
        return self.models[topic].channels[channel]

    def all_channels(self) -> list[tuple[str, str]]:
        return [(name, channel) for name, topic in self.models.items() for channel in topic.channels]

    # --- After every step --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the broker come to rest and see what it delivered."""
        self.run(quiet(self.broker))
        now = self.clock.now()
        for consumer in self.consumers:
            model = self.model(consumer.topic, consumer.channel)
            assert consumer.client.errors == []
            for message in consumer.client.messages:
                seq = int(message.id, 16) & SEQ_MASK
                entry = model.entries[seq]
                assert message.body == self.models[consumer.topic].bodies[seq]
                assert entry.place == WAITING or (entry.place == LATER and entry.due <= now), entry
                assert not model.paused
                assert message.attempts == entry.attempts + 1, entry
                entry.place, entry.owner, entry.attempts = IN_FLIGHT, consumer.client, message.attempts
                entry.delivered = now
                entry.deadline = now + round(MSG_TIMEOUT * SECOND)
                consumer.held[seq] = message
            consumer.client.take()

    def journal_is_written(self) -> None:
        """What the oracle knows is from now on what the journal knows."""
        self.broker.journal.flush()
        for topic, channel in self.all_channels():
            for entry in self.model(topic, channel).entries.values():
                entry.sure = entry.told
                entry.surely_finished = entry.place == FINISHED

    def hand_over(self, name: str) -> None:
        """The topic is not frozen: its backlog goes to the channels."""
        topic = self.models[name]
        if topic.frozen:
            return
        for seq, due in topic.backlog.items():
            for channel in topic.channels.values():
                later = due > self.clock.now()
                channel.entries[seq] = Entry(LATER if later else WAITING, due=due if later else 0)
        topic.backlog.clear()

    def expire(self) -> None:
        """What the queue scan must have done by now."""
        now = self.clock.now()
        for topic, channel in self.all_channels():
            for seq, entry in self.model(topic, channel).entries.items():
                if entry.place == IN_FLIGHT and entry.deadline <= now:
                    for consumer in self.consumers:
                        if consumer.client is entry.owner:
                            del consumer.held[seq]
                    entry.put_back()
                elif entry.place == LATER and entry.due <= now:
                    entry.place = WAITING

    @invariant()
    def nothing_raised(self) -> None:
        assert self.raised == []

    @invariant()
    def every_message_is_in_exactly_one_place(self) -> None:
        if not hasattr(self, "broker"):
            return
        for topic, channel in self.all_channels():
            real = self.channel(topic, channel)
            for seq, entry in self.model(topic, channel).entries.items():
                found = places(real, seq)
                if entry.place == FINISHED:
                    assert found == []
                elif entry.place == IN_FLIGHT:
                    assert found in (["in flight"], ["in flight, unusual"]), found
                elif entry.place == LATER:
                    assert found == ["deferred"]
                else:
                    assert found in (["waiting"], ["requeued"]), found

    @invariant()
    def the_numbers_agree(self) -> None:
        if not hasattr(self, "broker"):
            return
        assert set(self.broker.topics) == set(self.models)
        for name, model in self.models.items():
            topic = self.topic(name)
            assert topic.depth == len(model.backlog)
            assert 0 <= topic.backend_depth <= topic.depth
            assert topic.paused == model.paused
            assert set(topic.channels) == set(model.channels)
            for channel_name, channel_model in model.channels.items():
                channel = topic.channels[channel_name]
                assert channel.depth == channel_model.count(WAITING)
                assert 0 <= channel.backend_depth <= channel.depth
                assert channel.in_flight_count == channel_model.count(IN_FLIGHT)
                assert len(channel.deferred) == channel_model.count(LATER)
                assert channel.paused == channel_model.paused
        for consumer in self.consumers:
            assert consumer.client.session.in_flight == len(consumer.held)

    @invariant()
    def nothing_is_held_back(self) -> None:
        for consumer in self.consumers:
            model = self.model(consumer.topic, consumer.channel)
            if consumer.client.session.room > 0 and not model.paused:
                assert model.count(WAITING) == 0, (consumer.topic, consumer.channel)

    # --- Publishing --------------------------------------------------------------------------------------------------

    def publish(self, name: str, command: bytes, bodies: list[bytes], due: int = 0) -> None:
        async def ask() -> bytes:
            return await self.producer.ask(command)

        assert self.run(ask()) == b"OK"
        model = self.models.setdefault(name, TopicModel())
        first = self.topic(name).log.end - len(bodies)
        for seq, body in enumerate(bodies, first):
            assert seq not in model.bodies, "a seq was used twice"
            model.bodies[seq] = body
            model.backlog[seq] = model.dues[seq] = due
        self.hand_over(name)
        self.settle()

    def body(self, size: int) -> bytes:
        self.number += 1
        return b"%d-" % self.number + b"x" * size

    @rule(name=topics, size=st.integers(0, 300))
    def pub(self, name: str, size: int) -> None:
        body = self.body(size)
        self.publish(name, pub(name, body), [body])

    @rule(name=topics, count=st.integers(1, 30), size=st.integers(0, 100))
    def mpub(self, name: str, count: int, size: int) -> None:
        bodies = [self.body(size) for _ in range(count)]
        self.publish(name, encode_mpub(name.encode(), bodies), bodies)

    @rule(name=topics, seconds=st.integers(0, 20))
    def dpub(self, name: str, seconds: int) -> None:
        body = self.body(3)
        milliseconds = seconds * 1000 + 500
        self.publish(name, dpub(name, milliseconds, body), [body], self.clock.now() + milliseconds * 1_000_000)

    # --- Consumers ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.consumers) < 5)
    @rule(topic=topics, channel=channels, ready=st.integers(0, 10))
    def subscribe(self, topic: str, channel: str, ready: int) -> None:
        async def sub() -> Client:
            client = Client(self.broker)
            await client.subscribe(topic, channel)
            return client

        client = self.run(sub())
        model = self.models.setdefault(topic, TopicModel())
        if channel not in model.channels:
            # SUB answers only when the journal has the new channel, and so all that was said before.
            model.channels[channel] = ChannelModel()
            self.journal_is_written()
        self.consumers.append(Consumer(client, topic, channel))
        self.hand_over(topic)
        self.settle()
        client.ready(ready)
        self.settle()

    def some_consumer(self, random: Any) -> Consumer:
        consumer: Consumer = random.choice(self.consumers)
        return consumer

    @precondition(lambda self: self.consumers)
    @rule(random=some, ready=st.integers(0, 10))
    def rdy(self, random: Any, ready: int) -> None:
        self.some_consumer(random).client.ready(ready)
        self.settle()

    @precondition(lambda self: self.consumers)
    @rule(random=some)
    def hang_up(self, random: Any) -> None:
        """What it holds stays in flight until its deadline, or is put back at once."""
        consumer = self.some_consumer(random)
        self.consumers.remove(consumer)
        if self.requeue_on_disconnect:
            for seq in consumer.held:
                self.model(consumer.topic, consumer.channel).entries[seq].put_back()

        async def lose() -> None:
            consumer.client.hang_up()
            await until(lambda: consumer.client.transport.lost)

        self.run(lose())
        self.settle()

    @precondition(lambda self: self.consumers)
    @rule(random=some)
    def stop_reading(self, random: Any) -> None:
        self.some_consumer(random).client.transport.stalled = True

    @precondition(lambda self: any(c.client.transport.stalled for c in self.consumers))
    @rule(random=some)
    def read_again(self, random: Any) -> None:
        random.choice([c for c in self.consumers if c.client.transport.stalled]).client.transport.read_again()
        self.settle()

    @precondition(lambda self: any(c.held for c in self.consumers))
    @rule(random=some, share=st.floats(0, 1))
    def fin(self, random: Any, share: float) -> None:
        """Some of what a client holds, in any order, in one go."""
        consumer = random.choice([c for c in self.consumers if c.held])
        held = list(consumer.held)
        random.shuffle(held)
        chosen = held[: max(1, round(share * len(held)))]
        messages = [consumer.held.pop(seq) for seq in chosen]
        entries = self.model(consumer.topic, consumer.channel).entries
        for seq in chosen:
            entries[seq].place, entries[seq].owner = FINISHED, None
        consumer.client.finish(*messages)
        self.settle()

    @precondition(lambda self: any(c.held for c in self.consumers))
    @rule(random=some, seconds=st.one_of(st.none(), st.integers(0, 20)))
    def req(self, random: Any, seconds: int | None) -> None:
        consumer = random.choice([c for c in self.consumers if c.held])
        seq = random.choice(list(consumer.held))
        message = consumer.held.pop(seq)
        delay = 0 if seconds is None else seconds + 0.5
        entry = self.model(consumer.topic, consumer.channel).entries[seq]
        entry.put_back(self.clock.now() + round(delay * SECOND) if delay else 0)
        consumer.client.requeue(message, delay)
        self.settle()

    @precondition(lambda self: any(c.held for c in self.consumers))
    @rule(random=some)
    def touch(self, random: Any) -> None:
        consumer = random.choice([c for c in self.consumers if c.held])
        seq = random.choice(list(consumer.held))
        entry = self.model(consumer.topic, consumer.channel).entries[seq]
        longest = entry.delivered + round(MAX_MSG_TIMEOUT * SECOND)
        entry.deadline = min(self.clock.now() + round(MSG_TIMEOUT * SECOND), longest)
        consumer.client.touch(consumer.held[seq])
        self.settle()

    @precondition(lambda self: any(c.held for c in self.consumers) and len(self.consumers) > 1)
    @rule(random=some, verb=st.sampled_from([b"FIN %s\n", b"REQ %s 0\n", b"TOUCH %s\n"]))
    def another_answers(self, random: Any, verb: bytes) -> None:
        """An answer from somebody who does not hold the message is an error, and changes nothing."""
        owner = random.choice([c for c in self.consumers if c.held])
        message = random.choice(list(owner.held.values()))
        other = random.choice([c for c in self.consumers if c is not owner])
        seq = int(message.id, 16) & SEQ_MASK
        if seq in other.held:
            return
        other.client.send(verb % message.id)
        [error] = other.client.errors
        assert error.startswith(b"E_%s_FAILED" % verb.split()[0])
        other.client.frames.remove((1, error))
        self.settle()

    # --- Time --------------------------------------------------------------------------------------------------------

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        self.run(pass_time(self.broker, self.clock, seconds))
        self.expire()
        self.settle()

    @precondition(lambda self: not self.was_rebooted)
    @rule(seconds=st.integers(-100_000, 100_000))
    def somebody_sets_the_date(self, seconds: int) -> None:
        self.date_was_set = True
        self.clock.step_wall(seconds)

    @rule()
    def housekeeping(self) -> None:
        """Syncs, and files that nobody needs any more."""
        self.broker.turns.housekeeping()
        self.broker.upkeep.sync()
        self.settle()

    # --- Operators ---------------------------------------------------------------------------------------------------

    def operated(self) -> None:
        """An operator's action is in the journal before it is answered."""
        self.settle()
        self.journal_is_written()

    @rule(name=topics, channel=channels)
    def create_channel(self, name: str, channel: str) -> None:
        async def create() -> None:
            self.broker.topic(name).channel(channel)

        self.run(create())
        self.models.setdefault(name, TopicModel()).channels.setdefault(channel, ChannelModel())
        self.hand_over(name)
        self.operated()

    @precondition(lambda self: self.all_channels())
    @rule(random=some)
    def delete_channel(self, random: Any) -> None:
        topic, channel = random.choice(self.all_channels())
        gone = [c for c in self.consumers if (c.topic, c.channel) == (topic, channel)]
        self.consumers = [c for c in self.consumers if c not in gone]
        del self.models[topic].channels[channel]
        self.said.pop((topic, channel), None)

        async def delete() -> None:
            self.topic(topic).delete_channel(channel)
            for consumer in gone:
                await until(lambda consumer=consumer: consumer.client.transport.closing)

        self.run(delete())
        assert all(c.client.errors == [] for c in gone)
        self.operated()

    @precondition(lambda self: self.models)
    @rule(random=some)
    def delete_topic(self, random: Any) -> None:
        name = random.choice(list(self.models))
        self.consumers = [c for c in self.consumers if c.topic != name]
        # Its messages are forgotten, but a seq must never come again.
        del self.models[name]
        self.said = {names: value for names, value in self.said.items() if names[0] != name}

        async def delete() -> None:
            self.broker.delete_topic(name)

        self.run(delete())
        self.operated()

    @precondition(lambda self: self.models)
    @rule(random=some, paused=st.booleans())
    def pause_topic(self, random: Any, paused: bool) -> None:
        name = random.choice(list(self.models))

        async def pause() -> None:
            self.topic(name).pause(paused)

        self.run(pause())
        self.models[name].paused = paused
        self.hand_over(name)
        self.operated()

    @precondition(lambda self: self.all_channels())
    @rule(random=some, paused=st.booleans())
    def pause_channel(self, random: Any, paused: bool) -> None:
        topic, channel = random.choice(self.all_channels())
        self.model(topic, channel).paused = paused

        async def pause() -> None:
            self.channel(topic, channel).pause(paused)

        self.run(pause())
        self.operated()

    @precondition(lambda self: self.all_channels())
    @rule(random=some)
    def empty_channel(self, random: Any) -> None:
        topic, channel = random.choice(self.all_channels())

        async def empty() -> None:
            self.channel(topic, channel).empty()

        self.run(empty())
        self.emptied(topic, channel)

    def emptied(self, topic: str, channel: str) -> None:
        for entry in self.model(topic, channel).entries.values():
            entry.place, entry.owner = FINISHED, None
        for consumer in self.consumers:
            if (consumer.topic, consumer.channel) == (topic, channel):
                consumer.held.clear()
        self.operated()

    @precondition(lambda self: any(c.held for c in self.consumers))
    @rule(random=some, turns=st.integers(0, 6), touch=st.booleans())
    def hang_up_and_empty(self, random: Any, turns: int, touch: bool) -> None:
        """The channel is emptied while what a lost consumer held is being put back, and perhaps sent to others."""
        lost = random.choice([c for c in self.consumers if c.held])
        self.consumers.remove(lost)

        async def lose_and_empty() -> None:
            for message in lost.held.values() if touch else ():
                # Kept in another place from now on.
                lost.client.touch(message)
            lost.client.hang_up()
            await until(lambda: lost.client.transport.lost)
            for _ in range(turns):
                await asyncio.sleep(0)
            self.channel(lost.topic, lost.channel).empty()

        self.run(lose_and_empty())
        for consumer in self.consumers:
            if (consumer.topic, consumer.channel) == (lost.topic, lost.channel):
                assert consumer.client.errors == []
                consumer.client.take()
        self.emptied(lost.topic, lost.channel)

    @precondition(lambda self: self.all_channels())
    @rule(random=some, where=st.sampled_from(["earliest", "latest", "somewhere"]))
    def seek(self, random: Any, where: str) -> None:
        """All that is in the files from there on comes again; from the very beginning, copies of older ones too."""
        topic, channel = random.choice(self.all_channels())
        log, model, pumped = self.topic(topic).log, self.model(topic, channel), self.topic(topic).pumped
        places = {"earliest": log.first, "latest": log.end, "somewhere": random.randint(log.first, log.end)}
        start = places[where]
        there = {seq for first, stop in log.spans() for seq in range(first, stop)}

        async def seek() -> None:
            self.channel(topic, channel).seek(start)

        for seq in self.models[topic].bodies.keys() - self.models[topic].backlog.keys():
            entry = model.entries.get(seq)
            if start < pumped and seq >= start and seq in there:
                due = self.models[topic].dues[seq]
                later = due > self.clock.now()
                model.entries[seq] = Entry(LATER if later else WAITING, due=due if later else 0)
            elif entry is not None and entry.place != FINISHED:
                if start >= pumped or start > log.first:
                    entry.place, entry.owner = FINISHED, None
                elif entry.place == IN_FLIGHT:
                    entry.put_back()
        for consumer in self.consumers:
            if (consumer.topic, consumer.channel) == (topic, channel):
                consumer.held.clear()
        self.run(seek())
        self.operated()

    @precondition(lambda self: self.models)
    @rule(random=some)
    def empty_topic(self, random: Any) -> None:
        name = random.choice(list(self.models))

        async def empty() -> None:
            self.topic(name).empty()

        self.run(empty())
        self.models[name].backlog.clear()
        self.operated()

    @precondition(lambda self: self.all_channels())
    @rule(random=some, limit=st.integers(1, 40))
    def peek(self, random: Any, limit: int) -> None:
        """Page by page everything is seen once, with its deliveries; that nothing changed the invariants tell."""
        topic, channel = random.choice(self.all_channels())
        entries = self.model(topic, channel).entries
        for state, place in (("ready", WAITING), ("in_flight", IN_FLIGHT), ("deferred", LATER)):

            def look(after: Any, state: str = state) -> Coroutine[Any, Any, dict[str, Any]]:
                return peek_channel(self.channel(topic, channel), state, limit, after, 1_000)

            seen = self.leaf_through(topic, look)
            assert seen == {seq: entry.attempts for seq, entry in entries.items() if entry.place == place}
        seen = self.leaf_through(topic, lambda after: peek_topic(self.topic(topic), limit, after, 1_000))
        assert {seq for seq, entry in entries.items() if entry.place == WAITING and not entry.attempts} <= set(seen)

    def leaf_through(self, topic: str, look: Any) -> dict[int, int]:
        """The messages of all pages and how often each was delivered."""
        seen: dict[int, int] = {}
        after: Any = (-1, -1)
        while after is not None:
            page = self.run(look(after))
            for message in page["messages"]:
                assert message["seq"] not in seen
                assert message["body"] == self.models[topic].bodies[message["seq"]]
                seen[message["seq"]] = message["attempts"]
            after = None if page["next"] is None else cursor_of(page["next"])
        return seen

    @precondition(lambda self: any(self.model(*names).entries for names in self.all_channels()))
    @rule(random=some, verb=st.sampled_from(["finish", "requeue", "defer"]), seconds=st.integers(0, 20))
    def act_on_one(self, random: Any, verb: str, seconds: int) -> None:
        """One message, whatever its state, by its id."""
        topic, channel = random.choice([names for names in self.all_channels() if self.model(*names).entries])
        seq, entry = random.choice(list(self.model(topic, channel).entries.items()))
        delay = seconds * SECOND + SECOND // 2 if verb == "defer" else 0

        async def act() -> bool:
            real = self.channel(topic, channel)
            return real.dismiss(seq) if verb == "finish" else real.reschedule(seq, delay)

        assert self.run(act()) == (entry.place != FINISHED)
        if entry.place == FINISHED:
            return
        for consumer in self.consumers:
            if consumer.client is entry.owner:
                del consumer.held[seq]
        if verb == "finish":
            entry.place, entry.owner = FINISHED, None
        elif verb == "defer" or entry.place != WAITING:
            entry.put_back(self.clock.now() + delay if delay else 0)
        self.operated()

    @rule(names=st.sampled_from(SET_FOR), value=st.none() | st.integers(1, 9))
    def configure(self, names: tuple[str, ...], value: int | None) -> None:
        """Set something live, or take it away; what has a name must be there."""
        topic, channel = (*names, "*")[:2]
        if "*" not in topic and (
            topic not in self.models or ("*" not in channel and channel not in self.models[topic].channels)
        ):
            return

        async def change() -> None:
            key = "reader-bytes" if len(names) == 1 else "max-defer"
            self.broker.settings.change(names, {key: value and value + NO_LIMIT})

        self.run(change())
        self.said.pop(names, None)
        if value:
            self.said[names] = value + NO_LIMIT
        self.operated()

    @invariant()
    def settings_are_what_was_set(self) -> None:
        def expected(*names: str) -> int:
            counting = (
                other
                for other in SET_FOR
                if len(other) == len(names) and all(map(fnmatchcase, names, other)) and other in self.said
            )
            return self.said.get(next(counting, ()), 0)

        for name in self.models:
            assert self.topic(name).settings.reader_bytes == expected(name)
        for topic, channel in self.all_channels():
            # A whole number is milliseconds; the default is an hour.
            found = self.channel(topic, channel).settings.max_defer // 1_000_000
            assert found == (expected(topic, channel) or 3_600_000)

    # --- The end, and a new beginning --------------------------------------------------------------------------------

    @rule(seconds=st.integers(0, 15), reboot=st.booleans())
    def restart(self, seconds: int, reboot: bool) -> None:
        """A clean stop keeps everything: what was in flight comes back, its deliveries counted."""
        self.consumers = []
        self.run(self.broker.stop())
        for topic, channel in self.all_channels():
            for entry in self.model(topic, channel).entries.values():
                if entry.place == IN_FLIGHT:
                    entry.put_back()
        self.come_back(seconds, reboot)
        self.expire()
        self.journal_is_written()
        self.settle()

    @rule(seconds=st.integers(0, 15), written=st.booleans())
    def crash(self, seconds: int, written: bool) -> None:
        """kill -9. Nothing acknowledged is lost; what the journal had not written may be forgotten."""
        if written:
            self.journal_is_written()
        self.consumers = []
        self.broker.kill()
        self.come_back(seconds, False)
        for name, model in self.models.items():
            for channel_name, channel_model in model.channels.items():
                for seq, entry in channel_model.entries.items():
                    self.follow(self.channel(name, channel_name), seq, entry)
        self.journal_is_written()
        self.settle()

    def come_back(self, seconds: int, reboot: bool) -> None:
        if reboot and not self.date_was_set:
            self.was_rebooted = True
            # Only the wall clock knows how long the machine was off: dues are on another clock from now on.
            before = self.clock.now()
            self.clock.reboot(seconds)
            shift = self.clock.now() - before - seconds * SECOND
            for model in self.models.values():
                model.backlog = {seq: due and due + shift for seq, due in model.backlog.items()}
                model.dues = {seq: due and due + shift for seq, due in model.dues.items()}
                for channel in model.channels.values():
                    for entry in channel.entries.values():
                        entry.shift(shift)
        else:
            self.clock.advance(seconds)
        self.start()

    def follow(self, channel: Channel, seq: int, entry: Entry) -> None:
        """After a crash: check that the broker may have the message as it has it, and take that for the truth."""
        found = places(channel, seq)
        if entry.surely_finished:
            assert found == [], "finished, written down, and back again"
            return
        if entry.place == FINISHED and not found:
            return
        assert found in (["waiting"], ["requeued"], ["deferred"]), "lost, or in two places"
        now = self.clock.now()
        attempts = channel.attempts.get(seq, 0)
        assert entry.sure[0] <= attempts <= entry.told[0]
        # Deferred by its publisher, or by a REQ that the journal has: never early.
        published_for = entry.due if entry.told == (0, 0) and entry.place == LATER else 0
        asked_for = entry.sure[1] if entry.sure == entry.told else 0
        if max(published_for, asked_for) > now:
            assert found == ["deferred"], "early"
        due = next((due for due, number in zip(*channel.deferred.columns(), strict=True) if number == seq), 0)
        if due:
            assert due in (entry.due, entry.told[1], entry.sure[1])
        entry.place, entry.attempts, entry.due, entry.owner = (LATER if due else WAITING), attempts, due, None
        entry.told = entry.sure = (attempts, due if attempts else 0)


@pytest.mark.parametrize("seconds", [0, 1, 15])
def test_what_was_asked_for_before_a_reboot_is_due_on_the_new_clock(seconds: int) -> None:
    """Deferred, a reboot, then a crash: the oracle once compared a due time of the old clock with the new one."""
    machine = BrokerMachine()
    try:
        machine.begin(mem_queue_size=0, requeue_on_disconnect=False, size=0)
        machine.subscribe(topic="orders", channel="a", ready=0)
        machine.mpub(name="orders", count=1, size=0)
        machine.act_on_one(random=Random(0), verb="defer", seconds=3)
        machine.restart(seconds=seconds, reboot=True)
        machine.every_message_is_in_exactly_one_place()
        machine.crash(seconds=0, written=False)
        machine.every_message_is_in_exactly_one_place()
        [entry] = machine.model("orders", "a").entries.values()
        assert entry.place == (WAITING if seconds == 15 else LATER)
    finally:
        machine.teardown()


EXHAUSTIVE = os.environ.get("FLINTMQ_EXHAUSTIVE") == "1"


@pytest.mark.timeout(0 if EXHAUSTIVE else 300)
def test_every_channel_has_every_message_in_exactly_one_place() -> None:
    run_state_machine_as_test(
        BrokerMachine,
        settings=settings(
            deadline=None,
            max_examples=3_000 if EXHAUSTIVE else 60,
            stateful_step_count=80 if EXHAUSTIVE else 40,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )


def test_a_look_that_finds_runs_of_finished_messages_alone_is_no_end_of_the_scan() -> None:
    """Runs behind each other take the share of a look, and what is due behind them is due at once."""
    machine = BrokerMachine()
    try:
        machine.begin(mem_queue_size=0, size=2, requeue_on_disconnect=False)
        machine.create_channel(channel="a", name="orders")
        for seconds in (20, 1, 0):
            machine.dpub(name="orders", seconds=seconds)
        machine.time_passes(seconds=2)
        machine.crash(seconds=0, written=False)
        machine.time_passes(seconds=12)
        machine.dpub(name="orders", seconds=0)
        machine.restart(reboot=True, seconds=0)
        machine.time_passes(seconds=20)
        machine.dpub(name="orders", seconds=0)
        machine.restart(reboot=False, seconds=0)
        machine.time_passes(seconds=1)
        machine.subscribe(channel="a", ready=10, topic="orders")
        machine.time_passes(seconds=26)
        machine.every_message_is_in_exactly_one_place()
    finally:
        machine.teardown()
