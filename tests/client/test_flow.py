"""RDY and backoff, with connections that only remember and time that only the test moves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.client.flow import Flow
from flintmq.errors import OptionError

from .fakes import MovableClock


class Peer:
    """A connection that notes what it was told."""

    def __init__(self, clock: MovableClock, *, max_ready: int = 2500, counts_down: bool = False) -> None:
        self.ready = 0
        self.max_ready = max_ready
        self.counts_down = counts_down
        self.credit = 0
        self.last_message = clock.time()
        self.in_flight = 0
        self.told: list[int] = []

    def in_flight_at(self, now: float) -> int:
        return self.in_flight

    def set_ready(self, count: int) -> None:
        self.ready = self.credit = count
        self.told.append(count)


def flow_with(clock: MovableClock, count: int, max_in_flight: int, **options: object) -> tuple[Flow, list[Peer]]:
    flow = Flow(clock, max_in_flight, **options)  # type: ignore[arg-type]
    peers = [Peer(clock) for _ in range(count)]
    for peer in peers:
        flow.add(peer)
    return flow, peers


def levels(peers: list[Peer]) -> list[int]:
    return [peer.ready for peer in peers]


# --- Shares


def test_each_connection_gets_its_share_and_nothing_is_lost_by_rounding(clock: MovableClock) -> None:
    _, peers = flow_with(clock, 3, 10)
    assert levels(peers) == [4, 3, 3]


def test_ready_is_said_once_and_again_only_when_the_share_changes(clock: MovableClock) -> None:
    flow, [peer] = flow_with(clock, 1, 10)
    for _ in range(100):
        flow.succeeded()
        flow.answered(peer)
    assert peer.told == [10]
    flow.max_in_flight = 20
    assert peer.told == [10, 20]


def test_others_are_lowered_before_a_new_connection_is_raised(clock: MovableClock) -> None:
    flow, [first] = flow_with(clock, 1, 10)
    second = Peer(clock)
    order: list[str] = []
    for name, peer in (("first", first), ("second", second)):

        def note(count: int, name: str = name, peer: Peer = peer) -> None:
            peer.ready = count
            order.append(name)

        peer.set_ready = note  # type: ignore[method-assign]
    flow.add(second)
    assert order == ["first", "second"]
    assert (first.ready, second.ready) == (5, 5)


def test_a_lost_connection_gives_its_share_to_the_others(clock: MovableClock) -> None:
    flow, peers = flow_with(clock, 2, 10)
    flow.remove(peers[0])
    assert peers[1].ready == 10
    flow.remove(peers[0])  # a second goodbye changes nothing
    assert peers[1].told == [5, 10]


def test_no_broker_is_told_more_than_it_takes(clock: MovableClock) -> None:
    flow = Flow(clock, 5000)
    peer = Peer(clock, max_ready=2500)
    flow.add(peer)
    assert peer.told == [2500]


def test_zero_pauses_and_more_goes_on(clock: MovableClock) -> None:
    flow, peers = flow_with(clock, 2, 4)
    flow.max_in_flight = 0
    assert levels(peers) == [0, 0]
    clock.advance(60)
    assert levels(peers) == [0, 0]
    flow.max_in_flight = 4
    assert levels(peers) == [2, 2]


def test_a_negative_limit_is_refused(clock: MovableClock) -> None:
    with pytest.raises(OptionError):
        Flow(clock, -1)


def test_starved_means_that_a_connection_has_sent_nearly_all_it_may(clock: MovableClock) -> None:
    flow, peers = flow_with(clock, 2, 20)
    assert not flow.is_starved
    peers[1].in_flight = 7
    assert not flow.is_starved
    peers[1].in_flight = 8  # 85 % of 10, rounded down
    assert flow.is_starved


def test_after_stop_nothing_is_said(clock: MovableClock) -> None:
    flow, peers = flow_with(clock, 3, 1)
    said = [list(peer.told) for peer in peers]
    flow.stop()
    flow.max_in_flight = 100
    flow.failed()
    clock.advance(1000)
    assert [peer.told for peer in peers] == said


# --- Turns


def test_with_more_connections_than_messages_in_flight_some_stand_at_zero(clock: MovableClock) -> None:
    _, peers = flow_with(clock, 5, 2)
    assert sorted(levels(peers)) == [0, 0, 0, 1, 1]


def test_everyone_gets_a_turn(clock: MovableClock) -> None:
    _, peers = flow_with(clock, 5, 1, low_rdy_idle_timeout=1, rdy_redistribute_interval=0.5)
    served: set[int] = set()
    for _ in range(20):
        served.update(index for index, peer in enumerate(peers) if peer.ready)
        assert sum(levels(peers)) == 1
        clock.advance(0.5)
    assert served == {0, 1, 2, 3, 4}


def test_one_that_sends_all_the_time_keeps_its_place_only_for_a_while(clock: MovableClock) -> None:
    _, peers = flow_with(clock, 2, 1, low_rdy_idle_timeout=1, low_rdy_timeout=5, rdy_redistribute_interval=0.5)
    [busy] = [peer for peer in peers if peer.ready]
    for _ in range(9):
        clock.advance(0.5)
        busy.last_message = clock.time()
        assert busy.ready == 1
    clock.advance(0.5)
    assert busy.ready == 0
    assert sum(levels(peers)) == 1


def test_a_place_is_free_only_when_its_message_was_answered(clock: MovableClock) -> None:
    flow, peers = flow_with(clock, 2, 1, low_rdy_timeout=5)
    [busy] = [peer for peer in peers if peer.ready]
    [other] = [peer for peer in peers if not peer.ready]
    busy.in_flight = 1
    clock.advance(60)
    assert (busy.ready, other.ready) == (0, 0)
    busy.in_flight = 0
    flow.answered(busy)
    assert other.ready == 1


def test_a_holder_that_is_lost_leaves_its_place_at_once(clock: MovableClock) -> None:
    flow, peers = flow_with(clock, 3, 1)
    [holder] = [peer for peer in peers if peer.ready]
    flow.remove(holder)
    assert sum(peer.ready for peer in peers if peer is not holder) == 1


def test_when_connections_go_turns_end(clock: MovableClock) -> None:
    flow, peers = flow_with(clock, 3, 2)
    flow.remove(peers[2])
    assert levels(peers[:2]) == [1, 1]
    clock.advance(100)
    assert levels(peers[:2]) == [1, 1]


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "send", "answer", "fail", "time"]), st.integers(0, 100)),
        max_size=60,
    ),
)
def test_the_sum_never_passes_max_in_flight(limit: int, steps: list[tuple[str, int]]) -> None:
    clock = MovableClock()
    flow = Flow(clock, limit)
    peers: list[Peer] = []
    for what, number in steps:
        if what == "add" and len(peers) < 8:
            peers.append(Peer(clock))
            flow.add(peers[-1])
        elif what == "time":
            clock.advance(number / 10)
        elif peers:
            peer = peers[number % len(peers)]
            if what == "remove":
                peers.remove(peer)
                flow.remove(peer)
            elif what == "send" and peer.in_flight < peer.ready:
                peer.in_flight += 1
                peer.last_message = clock.time()
            elif what in ("answer", "fail") and peer.in_flight:
                peer.in_flight -= 1
                if what == "fail":
                    flow.failed()
                else:
                    flow.succeeded()
                flow.answered(peer)
        assert sum(levels(peers)) <= limit
    # Whatever happened: when all is answered and time passes, messages can flow.
    for peer in peers:
        peer.in_flight = 0
        flow.answered(peer)
    for _ in range(40):
        clock.advance(130)
        flow.succeeded()
    assert sum(levels(peers)) == (limit if peers else 0)


# --- Backoff


def test_failures_lengthen_the_wait_and_successes_shorten_it(clock: MovableClock) -> None:
    flow, [peer] = flow_with(clock, 1, 10)
    for seconds in (2, 4, 8, 16, 32, 64, 64, 64):
        flow.failed()
        assert peer.ready == 0 and flow.is_waiting
        clock.advance(seconds - 0.01)
        assert peer.ready == 0
        clock.advance(0.01)
        assert peer.ready == 1  # the test
    for seconds in (32, 16, 8, 4, 2):
        flow.succeeded()
        assert peer.ready == 0
        clock.advance(seconds - 0.01)
        assert peer.ready == 0
        clock.advance(0.01)
        assert peer.ready == 1
    flow.succeeded()
    assert peer.ready == 10 and flow.level == 0


def test_a_burst_of_failures_counts_once(clock: MovableClock) -> None:
    flow, [peer] = flow_with(clock, 1, 100)
    for _ in range(100):
        flow.failed()
    flow.succeeded()  # neither do successes count while it waits
    assert flow.level == 1
    clock.advance(2)
    assert peer.ready == 1


def test_a_requeue_that_is_no_failure_repeats_the_test(clock: MovableClock) -> None:
    flow, [peer] = flow_with(clock, 1, 10)
    flow.neither()
    assert peer.ready == 10
    flow.failed()
    clock.advance(2)
    flow.neither()
    assert (peer.ready, flow.level) == (0, 1)
    clock.advance(2)
    assert peer.ready == 1


def test_a_new_connection_gets_nothing_in_backoff(clock: MovableClock) -> None:
    flow, [first] = flow_with(clock, 1, 10)
    flow.failed()
    second = Peer(clock)
    flow.add(second)
    assert (first.ready, second.ready) == (0, 0)
    clock.advance(2)
    assert sorted([first.ready, second.ready]) == [0, 1]


def test_the_test_moves_on_from_a_connection_that_brings_nothing(clock: MovableClock) -> None:
    flow, peers = flow_with(clock, 3, 30, low_rdy_idle_timeout=1)
    flow.failed()
    clock.advance(2)
    tested: set[int] = set()
    for _ in range(10):
        tested.update(index for index, peer in enumerate(peers) if peer.ready)
        assert sum(levels(peers)) == 1
        clock.advance(1)
    assert tested == {0, 1, 2}


def test_the_test_moves_on_when_its_connection_is_lost(clock: MovableClock) -> None:
    flow, peers = flow_with(clock, 2, 10)
    flow.failed()
    clock.advance(2)
    [tested] = [peer for peer in peers if peer.ready]
    flow.remove(tested)
    assert [peer.ready for peer in peers if peer is not tested] == [1]


def test_with_no_connection_the_next_one_is_tested(clock: MovableClock) -> None:
    flow, [peer] = flow_with(clock, 1, 10)
    flow.failed()
    flow.remove(peer)
    clock.advance(60)
    late = Peer(clock)
    flow.add(late)
    assert late.told == [1]
    flow.succeeded()
    assert late.told == [1, 10]


def test_backoff_can_be_switched_off(clock: MovableClock) -> None:
    flow, [peer] = flow_with(clock, 1, 10, max_backoff_duration=0)
    flow.failed()
    assert peer.told == [10]


def test_a_short_limit_is_kept_from_the_first_level(clock: MovableClock) -> None:
    flow, [peer] = flow_with(clock, 1, 10, max_backoff_duration=0.5)
    for _ in range(3):
        flow.failed()
        assert flow.level == 1
        clock.advance(0.5)
        assert peer.ready == 1


@pytest.mark.parametrize("jitter", [False, True])
def test_a_multiplier_of_zero_waits_no_time(clock: MovableClock, jitter: bool) -> None:
    flow, [peer] = flow_with(clock, 1, 10, backoff_multiplier=0, backoff_jitter=jitter)
    for _ in range(5):
        flow.failed()
        assert flow.level == 1
        clock.advance(0)
        assert peer.ready == 1


def test_jitter_draws_from_zero_to_the_level(clock: MovableClock, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        drawn.append((low, high))
        return high / 2

    monkeypatch.setattr(random, "uniform", uniform)
    flow, [peer] = flow_with(clock, 1, 10, backoff_jitter=True)
    for seconds in (1, 2, 4):
        flow.failed()
        clock.advance(seconds)
        assert peer.ready == 1
    assert drawn == [(0, 2), (0, 4), (0, 8)]


def test_a_strategy_of_ones_own(clock: MovableClock) -> None:
    flow, [peer] = flow_with(clock, 1, 10, backoff_strategy=lambda level: level * 5.0, max_backoff_duration=12)
    for seconds in (5, 10, 10):
        flow.failed()
        clock.advance(seconds - 0.01)
        assert peer.ready == 0
        clock.advance(0.01)
        assert peer.ready == 1


# --- Brokers that count RDY down


def test_an_old_broker_is_told_again_when_a_quarter_is_left(clock: MovableClock) -> None:
    flow = Flow(clock, 100)
    peer = Peer(clock, counts_down=True)
    flow.add(peer)
    flow.received(peer, 70)
    assert peer.told == [100]
    flow.received(peer, 6)
    assert peer.told == [100, 100]


def test_an_old_broker_with_a_small_share_is_told_at_the_last_message(clock: MovableClock) -> None:
    flow = Flow(clock, 2)
    peer = Peer(clock, counts_down=True)
    flow.add(peer)
    flow.received(peer, 1)
    assert peer.told == [2, 2]


def test_an_old_broker_sends_no_more_than_there_are_places(clock: MovableClock) -> None:
    flow = Flow(clock, 1)
    peer = Peer(clock, counts_down=True)
    flow.add(peer)
    peer.in_flight = 1
    flow.received(peer, 1)
    assert peer.told == [1]
    peer.in_flight = 0
    flow.answered(peer)
    assert peer.told == [1, 1]


def test_an_old_broker_goes_on_when_the_time_of_its_messages_is_over(clock: MovableClock) -> None:
    flow = Flow(clock, 4)
    peer = Peer(clock, counts_down=True)
    flow.add(peer)
    peer.in_flight = 4
    flow.received(peer, 4)
    clock.advance(60)
    assert peer.told == [4]
    peer.in_flight = 1
    clock.advance(60)
    assert peer.told == [4, 3]


def test_an_old_broker_in_backoff_is_not_told_again(clock: MovableClock) -> None:
    flow = Flow(clock, 10)
    peer = Peer(clock, counts_down=True)
    flow.add(peer)
    flow.failed()
    clock.advance(2)
    assert peer.told == [10, 0, 1]
    peer.in_flight = 1
    flow.received(peer, 1)
    assert peer.told == [10, 0, 1]
    peer.in_flight = 0
    flow.succeeded()
    flow.answered(peer)
    assert peer.told == [10, 0, 1, 10]


def test_old_brokers_take_turns_too(clock: MovableClock) -> None:
    flow = Flow(clock, 1)
    peers = [Peer(clock, counts_down=True) for _ in range(2)]
    for peer in peers:
        flow.add(peer)
    first, second = sorted(peers, key=lambda peer: -peer.ready)
    for told in ([1], [1, 1]):
        first.in_flight = 1
        flow.received(first, 1)
        assert (first.told, second.told) == (told, [])
        first.in_flight = 0
        flow.answered(first)
    # A turn is more than one message, but it has an end.
    first.in_flight = 1
    flow.received(first, 1)
    clock.advance(6)
    first.in_flight = 0
    flow.answered(first)
    assert (first.told, second.told) == ([1, 1, 1], [1])
