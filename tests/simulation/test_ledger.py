"""The ledger excuses what the docs allow, and nothing beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flintmq.broker.storage.keys import digest_of

from .ledger import Ledger, Sent
from .world import World

BODY = b"<1 nsqd0 plain>"
OLD, NEW = b"0000000000000001", b"0000000000000002"


class Told:
    """A ledger that is told what one client of one node saw: of a message with a key, finished by its consumer."""

    def __init__(self, durability: str) -> None:
        self.world = World(1)
        self.ledger = Ledger(self.world)
        self.book = self.ledger.open("nsqd0", "plain", "a", durability)
        self.world.run_for(1)
        self.sent = Sent(BODY, "nsqd0", "plain", self.world.seconds, key="key-1")
        self.ledger.publish(self.sent)
        self.deliver(OLD, attempts=1)
        self.deliver(OLD, attempts=2)
        self.book.release(BODY)
        self.book.confirmed[BODY] = self.world.seconds
        self.world.run_for(5)

    def kill(self, *, stored: bytes = b"", key: bytes = b"") -> None:
        """``stored``, ``key``: these are in files."""
        self.ledger.killed("nsqd0", 0.3, {"plain": {stored}}, {"plain": {digest_of(key)}})
        self.world.run_for(1)

    def repeat(self) -> None:
        self.ledger.publish(self.sent)
        self.world.run_for(1)

    def deliver(self, id: bytes, attempts: int = 1) -> None:
        consumer: Any = SimpleNamespace(disturbed=False, last_words="", timeout=1.0, gave_back=True)
        self.ledger.delivered("nsqd0", "plain", "a", consumer, id, BODY, attempts)
        self.world.run_for(1)

    @property
    def kinds(self) -> list[str]:
        return [text.split(": ")[1] for text in self.world.violations]


def test_a_kill_takes_a_key_that_was_in_memory_alone_and_a_repeat_is_stored_again() -> None:
    told = Told("memory")
    told.kill()
    told.repeat()
    told.deliver(NEW)
    assert told.kinds == []


def test_what_was_finished_does_not_come_again_without_a_repeat() -> None:
    told = Told("memory")
    told.kill()
    told.deliver(OLD, attempts=3)
    assert told.kinds == ["finished"]


@pytest.mark.parametrize("held", ["a segment", "a file of keys"])
def test_a_kill_takes_no_key_that_is_in_a_file(held: str) -> None:
    told = Told("memory")
    told.kill(**{"stored": BODY} if held == "a segment" else {"key": b"key-1"})
    told.repeat()
    told.deliver(NEW)
    assert told.kinds == ["twice", "finished", "attempts"]


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_kill_takes_no_key_of_what_was_written(durability: str) -> None:
    told = Told(durability)
    told.kill()
    told.repeat()
    told.deliver(NEW)
    assert told.kinds == ["twice", "finished", "attempts"]


def test_a_key_is_known_without_a_crash() -> None:
    told = Told("memory")
    told.repeat()
    told.deliver(NEW)
    assert told.kinds == ["twice", "finished", "attempts"]


def test_a_key_is_known_again_once_its_repeat_was_answered() -> None:
    told = Told("memory")
    told.kill()
    told.repeat()
    told.deliver(NEW)
    told.ledger.acknowledge(told.sent)
    told.book.confirmed[BODY] = told.world.seconds
    told.repeat()
    told.deliver(NEW)
    assert told.kinds == ["finished", "attempts"]


class Dying(Told):
    """The same of a channel with a limit of two attempts: its consumer asks for the message in five seconds."""

    def __init__(self, *, attempts: int) -> None:
        self.world = World(1)
        self.ledger = Ledger(self.world)
        self.book = self.ledger.open("nsqd0", "plain", "a", "fsync")
        self.book.max_attempts = 2
        self.world.run_for(1)
        self.ledger.publish(Sent(BODY, "nsqd0", "plain", self.world.seconds))
        for count in range(1, attempts + 1):
            self.deliver(OLD, count)
        self.book.held.clear()
        by: Any = SimpleNamespace(over=True)
        self.book.requeue(BODY, self.world.seconds, 5.0, by)
        self.world.run_for(1)


def end(told: Told, how: str) -> None:
    if how == "kill":
        told.ledger.killed("nsqd0", 0.3, {}, {})
    elif how == "power":
        told.ledger.lost_power("nsqd0", 0.3)
    else:
        told.ledger.stopped("nsqd0")


@pytest.mark.parametrize("how", ["kill", "power", "exit"])
def test_the_delay_of_the_last_attempt_is_ignored_when_an_end_brings_the_message_back(how: str) -> None:
    told = Dying(attempts=2)
    end(told, how)
    told.deliver(OLD, attempts=3)
    assert told.kinds == []


@pytest.mark.parametrize("how", ["kill", "power", "exit"])
def test_the_delay_of_an_earlier_attempt_outlives_the_end_of_a_process(how: str) -> None:
    told = Dying(attempts=1)
    end(told, how)
    told.deliver(OLD, attempts=2)
    assert told.kinds == ["early"]


def test_what_dies_does_not_come_early_while_its_process_lives() -> None:
    told = Dying(attempts=2)
    told.deliver(OLD, attempts=3)
    assert told.kinds == ["early"]


def test_a_dead_letter_that_was_sent_back_is_not_bound_by_the_delay_of_its_last_attempt() -> None:
    told = Dying(attempts=2)
    told.book.topic.redriven = True
    told.deliver(NEW, attempts=1)
    told.deliver(NEW, attempts=2)
    assert told.kinds == []
