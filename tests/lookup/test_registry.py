"""What the registry knows after what it was told; time is moved by hand."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flintmq.errors import FullError
from flintmq.lookup import registry as module
from flintmq.lookup.registry import NEVER, Producer, Registry

SECOND = 1_000_000_000


class Time:
    """A clock that stands still until it is moved; the date is far from the other one."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def now(self) -> int:
        return round(self.seconds * SECOND)

    def wall(self) -> int:
        return round((1_700_000_000 + self.seconds) * SECOND)


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def registry(clock: Time) -> Registry:
    return make_registry(clock)


def make_registry(clock: Time) -> Registry:
    return Registry(inactive_timeout=300 * SECOND, tombstone_lifetime=45 * SECOND, now=clock.now, wall=clock.wall)


def producer(number: int = 1, **fields: Any) -> Producer:
    about: dict[str, Any] = {
        "broadcast_address": f"q{number}.example",
        "tcp_port": 4150,
        "http_port": 4151,
        "version": "1.3.0",
        "hostname": f"q{number}",
    }
    return Producer(f"10.0.0.{number}:50000", **(about | fields))


def added(registry: Registry, number: int = 1, **fields: Any) -> Producer:
    new = producer(number, **fields)
    registry.add(new)
    return new


def found(registry: Registry, topic: str) -> list[str] | None:
    producers = registry.lookup(topic)
    return None if producers is None else [p.hostname for p in producers]


# --- Registering


def test_a_topic_that_nobody_named_is_unknown(registry):
    assert found(registry, "t") is None
    assert registry.channels("t") == []


def test_a_registered_topic_is_found_with_who_has_it(registry):
    one, two = added(registry, 1), added(registry, 2)
    registry.register(one, "t")
    registry.register(two, "t")
    assert found(registry, "t") == ["q1", "q2"]
    assert list(registry.topics) == ["t"]


def test_a_channel_brings_its_topic(registry):
    one = added(registry)
    registry.register(one, "t", "c")
    assert found(registry, "t") == ["q1"]
    assert registry.channels("t") == ["c"]


def test_unregistering_a_channel_keeps_the_topic_and_the_name(registry):
    one = added(registry)
    registry.register(one, "t", "c")
    registry.unregister(one, "t", "c")
    assert found(registry, "t") == ["q1"]
    assert registry.channels("t") == ["c"]
    assert "channel:t:c" not in dict(registry.dump())


def test_unregistering_a_topic_takes_the_producer_from_all_its_channels(registry):
    one, two = added(registry, 1), added(registry, 2)
    for each in (one, two):
        registry.register(each, "t", "c")
    registry.unregister(one, "t")
    assert found(registry, "t") == ["q2"]
    records = dict(registry.dump())
    assert [record["hostname"] for record in records["channel:t:c"]] == ["q2"]
    assert one.count == 0


def test_unregistering_what_is_unknown_changes_nothing(registry):
    one = added(registry)
    registry.unregister(one, "t")
    registry.unregister(one, "t", "c")
    registry.make_topic("t")
    registry.unregister(one, "t", "c")
    assert found(registry, "t") == []


def test_names_outlive_their_last_producer(registry):
    one = added(registry)
    registry.register(one, "t", "c")
    registry.remove(one)
    assert found(registry, "t") == []
    assert registry.channels("t") == ["c"]
    assert list(registry.nodes()) == []


def test_ephemeral_names_go_with_their_last_producer_however_it_goes(registry):
    one, two = added(registry, 1), added(registry, 2)
    for each in (one, two):
        registry.register(each, "t", "c#ephemeral")
        registry.register(each, "e#ephemeral", "c")
    registry.unregister(one, "t", "c#ephemeral")
    registry.unregister(one, "e#ephemeral")
    assert registry.channels("t") == ["c#ephemeral"]
    assert found(registry, "e#ephemeral") == ["q2"]
    # The other one just vanishes.
    registry.remove(two)
    assert registry.channels("t") == []
    assert list(registry.topics) == ["t"]
    assert registry.channel_count == 0


def test_an_ephemeral_name_that_was_made_in_advance_stays_until_someone_unregisters_it(registry):
    one = added(registry)
    registry.make_channel("t", "c#ephemeral")
    registry.register(one, "t")
    assert registry.channels("t") == ["c#ephemeral"]
    registry.unregister(one, "t", "c#ephemeral")
    assert registry.channels("t") == []


def test_a_producer_that_comes_back_from_the_same_address_is_not_removed_with_the_old_one(registry):
    old = added(registry)
    new = added(registry)
    registry.register(old, "t")
    registry.register(new, "t")
    registry.remove(old)
    assert list(registry.producers.values()) == [new]
    assert found(registry, "t") == ["q1"]


# --- Who is alive


def test_a_producer_is_hidden_when_it_was_silent_for_too_long_and_one_ping_brings_it_back(registry, clock):
    one = added(registry)
    registry.register(one, "t")
    clock.seconds += 300
    assert found(registry, "t") == ["q1"]
    clock.seconds += 0.001
    assert found(registry, "t") == []
    assert list(registry.nodes()) == []
    assert registry.active_count() == 0
    # Registering is no sign of life.
    registry.register(one, "u")
    assert found(registry, "u") == []
    registry.ping(one)
    assert found(registry, "t") == ["q1"]
    assert registry.active_count() == 1


# --- Tombstones


def test_a_tombstone_hides_one_topic_of_one_producer_for_its_lifetime(registry, clock):
    one, two = added(registry, 1), added(registry, 2)
    for each in (one, two):
        registry.register(each, "t", "c")
        registry.register(each, "u")
    registry.tombstone("t", "q1.example:4151")
    assert found(registry, "t") == ["q2"]
    assert found(registry, "u") == ["q1", "q2"]
    [node, _] = registry.nodes()
    assert (node["topics"], node["tombstones"]) == (["t", "u"], [True, False])
    clock.seconds += 44.999
    assert found(registry, "t") == ["q2"]
    clock.seconds += 0.001
    assert found(registry, "t") == ["q1", "q2"]
    [node, _] = registry.nodes()
    assert node["tombstones"] == [False, False]


def test_registering_again_keeps_a_tombstone_and_unregistering_ends_it(registry):
    one = added(registry)
    registry.register(one, "t")
    registry.tombstone("t", "q1.example:4151")
    registry.register(one, "t")
    registry.register(one, "t", "c")
    assert found(registry, "t") == []
    registry.unregister(one, "t")
    registry.register(one, "t")
    assert found(registry, "t") == ["q1"]


@pytest.mark.parametrize("node", ["q1.example", "q1.example:4150", "q1:4151", "", ":4151", "[q1.example:4151]"])
def test_a_tombstone_for_nobody_hides_nobody(registry, node):
    registry.register(added(registry), "t")
    registry.tombstone("t", node)
    registry.tombstone("nobody", "q1.example:4151")
    assert found(registry, "t") == ["q1"]


@pytest.mark.parametrize("announced", ["fe80::1", "[fe80::1]"])
@pytest.mark.parametrize("node", ["fe80::1:4151", "[fe80::1]:4151"])
def test_an_ipv6_address_may_have_its_brackets_or_not(registry, announced, node):
    registry.register(added(registry, broadcast_address=announced), "t")
    registry.tombstone("t", node)
    assert found(registry, "t") == []


# --- What operators do


def test_names_are_made_and_deleted_without_a_producer(registry):
    registry.make_channel("t", "c")
    registry.make_topic("t")
    assert (found(registry, "t"), registry.channels("t")) == ([], ["c"])
    assert registry.delete_channel("t", "c")
    assert not registry.delete_channel("t", "c")
    assert not registry.delete_channel("u", "c")
    registry.delete_topic("t")
    registry.delete_topic("t")
    assert found(registry, "t") is None


def test_a_deleted_topic_comes_back_when_its_producer_names_it_again(registry):
    one = added(registry)
    registry.register(one, "t", "c")
    registry.delete_topic("t")
    assert [node["topics"] for node in registry.nodes()] == [[]]
    assert one.count == 0
    registry.unregister(one, "t", "c")
    registry.register(one, "t", "c")
    assert (found(registry, "t"), registry.channels("t")) == (["q1"], ["c"])


# --- Limits


def test_a_producer_may_claim_only_so_many_names(registry, monkeypatch):
    monkeypatch.setattr(module, "MOST_REGISTRATIONS", 4)
    one, two = added(registry, 1), added(registry, 2)
    registry.register(one, "t", "c")
    registry.register(one, "u", "c")
    with pytest.raises(FullError, match="too many registrations"):
        registry.register(one, "v")
    # What it has it may say again, and others have their own count.
    registry.register(one, "u", "c")
    registry.register(two, "v")
    registry.unregister(one, "u")
    registry.register(one, "v")
    assert found(registry, "v") == ["q2", "q1"]


def test_only_so_many_names_are_kept(registry, monkeypatch):
    monkeypatch.setattr(module, "MOST_NAMES", 3)
    one = added(registry)
    registry.make_channel("t", "c")
    registry.register(one, "u")
    with pytest.raises(FullError, match="too many topics and channels"):
        registry.make_topic("v")
    with pytest.raises(FullError, match="too many topics and channels"):
        registry.register(one, "t", "d")
    registry.register(one, "t", "c")
    registry.delete_channel("t", "c")
    registry.make_topic("v")


# --- The whole of it


def test_the_dump_has_every_record_in_nsq_s_form(registry, clock):
    one = added(registry, topology_zone="z", topology_region="r")
    registry.register(one, "t", "c")
    registry.make_topic("nobody_has_it")
    clock.seconds += 5
    registry.tombstone("t", "q1.example:4151")
    record = {
        "broadcast_address": "q1.example",
        "hostname": "q1",
        "http_port": 4151,
        "id": "10.0.0.1:50000",
        "last_update": 1_700_001_000 * SECOND,
        "tcp_port": 4150,
        "tombstoned": False,
        "tombstoned_at": NEVER,
        "topology_region": "r",
        "topology_zone": "z",
        "version": "1.3.0",
    }
    hidden = record | {"tombstoned": True, "tombstoned_at": 1_700_001_005 * SECOND}
    dump = list(registry.dump())
    assert dump == [("channel:t:c", [record]), ("client::", [record]), ("topic:t:", [hidden])]
    assert all(list(entry) == sorted(entry) for _, entries in dump for entry in entries)


TOPICS = ("t", "u", "e#ephemeral")
CHANNELS = ("", "c", "d#ephemeral")


class Comparison(RuleBasedStateMachine):
    """Whatever is said in whatever order, the registry knows what a flat table of who has what knows."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = make_registry(Time())
        self.connected: dict[int, Producer] = {}
        # (topic, channel) → who has it. No entry: never named.
        self.table: dict[tuple[str, str], set[int]] = {}

    def tidy(self, *, left_by: set[tuple[str, str]]) -> None:
        for key in left_by:
            topic, channel = key
            if self.table.get(key) == set() and (channel or topic).endswith("#ephemeral"):
                del self.table[key]
                if not channel:
                    self.table = {k: v for k, v in self.table.items() if k[0] != topic}

    @rule(number=st.integers(1, 3))
    def connect_or_leave(self, number: int) -> None:
        if number not in self.connected:
            self.connected[number] = added(self.registry, number)
            return
        self.registry.remove(self.connected.pop(number))
        held = {key for key, holders in self.table.items() if number in holders}
        for key in held:
            self.table[key].discard(number)
        self.tidy(left_by=held)

    @rule(number=st.integers(1, 3), topic=st.sampled_from(TOPICS), channel=st.sampled_from(CHANNELS))
    def register(self, number: int, topic: str, channel: str) -> None:
        if number in self.connected:
            self.registry.register(self.connected[number], topic, channel)
            for key in {(topic, ""), (topic, channel)}:
                self.table.setdefault(key, set()).add(number)

    @rule(number=st.integers(1, 3), topic=st.sampled_from(TOPICS), channel=st.sampled_from(CHANNELS))
    def unregister(self, number: int, topic: str, channel: str) -> None:
        if number in self.connected:
            self.registry.unregister(self.connected[number], topic, channel)
            named = (topic, channel)
            keys = {key for key, holders in self.table.items() if key[0] == topic and number in holders}
            keys = (keys if not channel else keys & {named}) | {named}
            for key in keys:
                self.table.get(key, set()).discard(number)
            self.tidy(left_by=keys)

    @rule(topic=st.sampled_from(TOPICS), channel=st.sampled_from(CHANNELS))
    def make(self, topic: str, channel: str) -> None:
        self.registry.make_topic(topic)
        self.table.setdefault((topic, ""), set())
        if channel:
            self.registry.make_channel(topic, channel)
            self.table.setdefault((topic, channel), set())

    @rule(topic=st.sampled_from(TOPICS), channel=st.sampled_from(CHANNELS))
    def delete(self, topic: str, channel: str) -> None:
        if channel:
            assert self.registry.delete_channel(topic, channel) == ((topic, channel) in self.table)
            self.table.pop((topic, channel), None)
        else:
            self.registry.delete_topic(topic)
            self.table = {key: holders for key, holders in self.table.items() if key[0] != topic}

    @invariant()
    def the_answers_agree(self) -> None:
        for topic in TOPICS:
            holders = self.table.get((topic, ""))
            expected = None if holders is None else {f"q{number}" for number in holders}
            names = found(self.registry, topic)
            assert (None if names is None else set(names)) == expected
            channels = set(self.registry.channels(topic))
            lingering = channels - {c for t, c in self.table if t == topic and c}
            assert channels - lingering == {c for t, c in self.table if t == topic and c}
            # A name that only waits to be forgotten may still be listed; nothing else.
            assert not lingering or (self.unsettled and all(name.endswith("#ephemeral") for name in lingering))
        held = {number: {key for key, holders in self.table.items() if number in holders} for number in self.connected}
        for number, one in self.connected.items():
            assert one.count == len(held[number])
            assert {topic.name for topic in one.topics} == {topic for topic, channel in held[number] if not channel}
        shown = {key for key, _ in self.registry.dump() if key != "client::"}
        assert shown == {
            f"channel:{topic}:{channel}" if channel else f"topic:{topic}:"
            for (topic, channel), holders in self.table.items()
            if holders
        }
        assert self.registry.channel_count == sum(len(topic.channels) for topic in self.registry.topics.values())
        assert self.unsettled or self.registry.channel_count == sum(1 for _, channel in self.table if channel)

    @property
    def unsettled(self) -> bool:
        return bool(self.registry._leaving)


class SlicedComparison(Comparison):
    """The same, while what producers have left is taken out of the lists a step at a time, at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "SLICE", 0)

    def teardown(self) -> None:
        self.patch.setattr(module, "SLICE", 1)
        while self.registry.settle():
            self.the_answers_agree()
        self.the_answers_agree()
        self.patch.undo()

    @rule(steps=st.integers(1, 4))
    def settle(self, steps: int) -> None:
        self.patch.setattr(module, "SLICE", steps)
        self.registry.settle()
        self.patch.setattr(module, "SLICE", 0)


TestComparison = Comparison.TestCase
TestComparison.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSlicedComparison = SlicedComparison.TestCase
TestSlicedComparison.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


# --- Many names


def counted(registry: Registry, function: Any, *arguments: Any) -> list[int]:
    """Call something, then settle: how many lines of Python each step took."""
    steps: list[int] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        steps[-1] += event == "line"
        return trace

    def measured(call: Any, *given: Any) -> Any:
        steps.append(0)
        sys.settrace(trace)
        try:
            return call(*given)
        finally:
            sys.settrace(None)

    measured(function, *arguments)
    while measured(registry.settle):
        pass
    return steps


@pytest.mark.parametrize("operation", ["remove", "unregister", "delete"])
def test_no_step_grows_with_the_number_of_names(clock, operation):
    longest = {}
    for names in (300, 3_000):
        registry = make_registry(clock)
        one, two = added(registry, 1), added(registry, 2)
        for number in range(names):
            for each in (one, two):
                if operation == "remove":
                    registry.register(each, f"t{number}", "c")
                else:
                    registry.register(each, "t", f"c{number}")
        match operation:
            case "remove":
                steps = counted(registry, registry.remove, one)
                assert found(registry, "t0") == ["q2"]
            case "unregister":
                steps = counted(registry, registry.unregister, one, "t")
                assert found(registry, "t") == ["q2"]
            case _:
                steps = counted(registry, registry.delete_topic, "t")
                assert (found(registry, "t"), registry.channel_count, one.count) == (None, 0, 0)
        assert not registry._leaving
        longest[names] = max(steps)
    assert longest[3_000] < 1.5 * longest[300]
