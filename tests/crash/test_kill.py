"""A short torture of a real broker with fixed seeds; and the oracle's own test: it must notice what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from .ledger import SMALLEST_BODY, ChannelBook, Ledger
from .torture import Settings, torture


@pytest.mark.parametrize(("durability", "kills", "seed"), [("os", 5, 3), ("fsync", 3, 5)])
async def test_kill_9_loses_nothing_that_was_acknowledged(
    durability: str, kills: int, seed: int, tmp_path: Path
) -> None:
    report = await torture(Settings(kills, durability, seed, seconds_between=0.4), tmp_path)

    assert report.samples == []
    assert report.violations == {}
    assert report.kills == kills
    # The seeds are such that a kill also hits a broker that is still starting.
    assert report.kills_while_starting > 0
    # It was a load worth the name: much was published, and more than once delivered.
    assert report.acknowledged > 500
    assert report.redeliveries > 0


# --- The oracle -------------------------------------------------------------------------------------------------------


class Scene:
    """A ledger with one topic and one channel; ``publish`` and ``deliver`` stand for a broker that does as it likes."""

    def __init__(self) -> None:
        self.ledger = Ledger(["topic", "other"])
        self.book: ChannelBook = self.ledger.subscribed("topic", "channel")
        self.bodies: dict[int, bytes] = {}

    def publish(self, count: int = 1, *, answered: bool = True, delay: int = 0) -> int:
        first, bodies = self.ledger.publish(0, 100.0, [SMALLEST_BODY + 10] * count, delay)
        self.bodies.update(zip(range(first, first + count), bodies, strict=True))
        (self.ledger.acknowledge if answered else self.ledger.doubt)(first, count)
        return first

    def deliver(
        self, number: int, *, book: ChannelBook | None = None, id: int = 0, attempts: int = 1, now: float = 200.0
    ) -> None:
        (book or self.book).receive(self.bodies[number], id or 1000 + number, attempts, now)

    def violations(self) -> dict[str, int]:
        self.ledger.conclude()
        return dict(self.ledger.violations.counts)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_oracle_accepts_what_is_delivered_twice_and_finished_once(scene: Scene) -> None:
    number = scene.publish()
    scene.deliver(number)
    scene.deliver(number, attempts=2)
    scene.book.finished(number)
    scene.book.certain(number, 0.0)
    assert scene.violations() == {}
    assert (scene.book.deliveries, scene.book.redeliveries, scene.book.duplicates) == (2, 1, 0)


def test_oracle_notices_a_lost_message(scene: Scene) -> None:
    scene.deliver(scene.publish())
    scene.publish()
    scene.publish(answered=False)
    assert scene.violations() == {"lost": 1}


def test_oracle_expects_for_a_second_channel_only_what_was_sent_after_it(scene: Scene) -> None:
    scene.deliver(scene.publish())
    second = scene.ledger.subscribed("topic", "second")
    both = scene.publish()
    scene.deliver(both)
    assert second.missing() == [both]
    scene.deliver(both, book=second)
    assert scene.violations() == {}


def test_oracle_expects_the_backlog_for_a_first_channel(scene: Scene) -> None:
    first, _ = scene.ledger.publish(1, 100.0, [SMALLEST_BODY])
    scene.ledger.acknowledge(first, 1)
    assert scene.ledger.subscribed("other", "first").missing() == [first]


@pytest.mark.parametrize(("got", "violations"), [(0, {}), (2, {"torn": 1}), (3, {})])
def test_oracle_notices_a_part_of_a_batch_without_answer(scene: Scene, got: int, violations: dict[str, int]) -> None:
    first = scene.publish(3, answered=False)
    for number in range(first, first + got):
        scene.deliver(number)
    assert scene.violations() == violations


def test_oracle_notices_what_comes_back_although_the_broker_knew(scene: Scene) -> None:
    number = scene.publish()
    scene.deliver(number)
    scene.book.finished(number)
    scene.book.certain(number, 0.0)
    scene.deliver(number)
    assert scene.violations() == {"came back": 1}


def test_oracle_forgives_what_comes_back_if_the_broker_died_before_it_surely_knew(scene: Scene) -> None:
    number = scene.publish()
    scene.deliver(number)
    scene.book.finished(number)
    scene.book.certain(number, 0.0)
    scene.book.uncertain(number)
    scene.deliver(number)
    assert scene.violations() == {}
    assert scene.book.duplicates == 1


@pytest.mark.parametrize(("now", "violations"), [(100.497, {"early": 1}), (100.499, {}), (100.5, {})])
def test_oracle_notices_a_deferred_message_before_its_time(
    scene: Scene, now: float, violations: dict[str, int]
) -> None:
    scene.deliver(scene.publish(delay=500), now=now)
    assert scene.violations() == violations


@pytest.mark.parametrize(("now", "violations"), [(200.9, {"early": 1}), (201.0, {})])
def test_oracle_notices_a_message_that_was_put_back_for_longer(
    scene: Scene, now: float, violations: dict[str, int]
) -> None:
    number = scene.publish()
    scene.deliver(number)
    scene.book.certain(number, 201.0)
    scene.deliver(number, now=now)
    assert scene.violations() == violations


def test_oracle_notices_one_id_for_two_messages(scene: Scene) -> None:
    first = scene.publish(2)
    scene.deliver(first, id=7)
    scene.deliver(first + 1, id=7)
    assert scene.violations() == {"two bodies": 1, "lost": 1}


def test_oracle_notices_two_ids_for_one_message(scene: Scene) -> None:
    number = scene.publish()
    scene.deliver(number, id=7)
    scene.deliver(number, id=8)
    assert scene.violations() == {"two bodies": 1}


def test_oracle_notices_a_message_of_another_topic(scene: Scene) -> None:
    number, bodies = scene.ledger.publish(1, 100.0, [SMALLEST_BODY])
    scene.bodies[number] = bodies[0]
    scene.deliver(number)
    assert scene.violations() == {"damaged": 1}


def test_oracle_notices_a_changed_byte(scene: Scene) -> None:
    number = scene.publish(answered=False)
    body = bytearray(scene.bodies[number])
    body[-6] ^= 1
    scene.bodies[number] = bytes(body)
    scene.deliver(number)
    assert scene.violations() == {"damaged": 1}


def test_oracle_notices_attempts_of_zero(scene: Scene) -> None:
    scene.deliver(scene.publish(), attempts=0)
    assert scene.violations() == {"attempts": 1}
