"""`flintmq torture` with fixed seeds against real brokers; and its oracle: it must notice what it is there for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from flintmq.tools.torture.front import DISK_FULL, FAULTS, KILL, KILL_STARTING
from flintmq.tools.torture.ledger import SMALLEST_BODY, ChannelBook, Ledger, Line
from flintmq.tools.torture.run import Plan, Run, torture


async def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    report = await torture(Plan(3, tmp_path, kills=20, lookupds=0, seconds_between=0.4, faults=()))

    assert report.samples == []
    assert report.passed
    assert report.complete
    assert report.faults[KILL] + report.faults[KILL_STARTING] == 20
    # The seed is such that a kill also hits a broker that is still starting.
    assert report.faults[KILL_STARTING] > 0
    for durability in ("os", "fsync"):
        # It was a load worth the name: much was published, and more than once delivered.
        costs = report.costs[durability]
        assert costs.acknowledged > 500
        assert costs.again[KILL] > 0


async def test_no_fault_costs_what_was_acknowledged(tmp_path: Path) -> None:
    run = Run(Plan(11, tmp_path, kills=0, durabilities=("os",), lookupds=0, seconds_between=0.5))
    work = asyncio.create_task(run.run())
    while not work.done() and not set(FAULTS) <= {*run.faults, *run.report().left_out}:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    run.over.set()
    report = await work

    assert report.samples == []
    assert report.passed
    assert report.complete
    costs = report.costs["os"]
    assert costs.kills == 0
    assert costs.acknowledged > 500
    assert costs.refused > 0


async def test_a_disk_that_others_fill_while_everything_is_drained_is_no_loss(tmp_path: Path) -> None:
    run = Run(Plan(7, tmp_path, kills=2, durabilities=("os",), lookupds=0, seconds_between=0.4, faults=(DISK_FULL,)))
    # The broker keeps all but 256 MiB of the disk free, so this is too much for it.
    taken = tmp_path / "others"
    work = asyncio.create_task(run.run())
    while not work.done():
        if run.phase == "draining" and not taken.exists():
            with taken.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 2 << 30)
        await asyncio.sleep(0.01)
    report = await work

    assert report.samples == []
    assert report.complete
    assert run.fronts[0].ledger.refused > 0


class Process:
    """The command in a process of its own, as users run it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *arguments: str) -> Process:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "flintmq", "torture", *arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        )

    async def children(self) -> list[int]:
        """Its brokers, once there are any."""
        while True:
            found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            if found:
                return [int(pid) for pid in found]
            await asyncio.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for child processes in /proc")
@pytest.mark.parametrize("moment", [0.0, 1.5, 4.0])
async def test_ctrl_c_ends_it_with_the_figures_so_far_and_leaves_no_broker(moment: float, tmp_path: Path) -> None:
    torture = await Process.start("--minutes=10", "--json", "--durability=os", f"--data-path={tmp_path}")
    brokers = await torture.children()
    await asyncio.sleep(moment)
    torture.process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(torture.process.communicate(), 60)

    assert torture.process.returncode == 130, err.decode()
    report = json.loads(out)
    assert not report["complete"]
    assert list(report["costs"])[:1] in ([], ["os"])
    for pid in brokers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    # Nothing was lost, as far as anybody knows: nothing is kept.
    assert list(tmp_path.iterdir()) == []


# --- The oracle -------------------------------------------------------------------------------------------------------


class Scene:
    """A ledger with one topic and one channel; ``publish`` and ``deliver`` stand for a broker that does as it likes."""

    def __init__(self) -> None:
        self.ledger = Ledger(["topic", "other"])
        self.book: ChannelBook = self.ledger.subscribed("topic", "channel")
        self.bodies: dict[int, bytes] = {}
        #: The connection on which everything comes.
        self.line = Line(50.0)

    def publish(self, count: int = 1, *, answered: bool = True, delay: int = 0) -> int:
        first, bodies = self.ledger.publish(0, 100.0, [SMALLEST_BODY + 10] * count, delay)
        self.bodies.update(zip(range(first, first + count), bodies, strict=True))
        (self.ledger.acknowledge if answered else self.ledger.doubt)(first, count)
        return first

    def deliver(
        self,
        number: int,
        *,
        book: ChannelBook | None = None,
        id: int = 0,
        attempts: int = 1,
        now: float = 200.0,
    ) -> None:
        (book or self.book).receive(self.bodies[number], id or 1000 + number, attempts, self.line, now)

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


def test_oracle_calls_nothing_lost_before_everything_was_drained(scene: Scene) -> None:
    scene.publish()
    scene.ledger.is_drained = False
    assert scene.violations() == {"not drained": 1}


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


def test_oracle_does_not_know_the_first_of_two_channels_that_are_created_at_once(scene: Scene) -> None:
    for name in ("one", "two"):
        scene.ledger.subscribing("other", name)
    first, _ = scene.ledger.publish(1, 100.0, [SMALLEST_BODY])
    scene.ledger.acknowledge(first, 1)
    # The broker may have created the other one, taken the message, and then created this one: its answer is read first.
    assert scene.ledger.subscribed("other", "two").missing() == []
    assert scene.ledger.subscribed("other", "one").missing() == []
    second, _ = scene.ledger.publish(1, 100.0, [SMALLEST_BODY])
    scene.ledger.acknowledge(second, 1)
    assert [scene.ledger.subscribed("other", name).missing() for name in ("one", "two")] == [[second], [second]]


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
    assert scene.violations() == {"two bodies": 1}


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


def test_oracle_notices_what_was_refused_and_is_delivered(scene: Scene) -> None:
    number, bodies = scene.ledger.publish(0, 100.0, [SMALLEST_BODY])
    scene.bodies[number] = bodies[0]
    scene.ledger.refuse(number, 1)
    scene.deliver(number)
    assert scene.violations() == {"ghost": 1}


@pytest.mark.parametrize(
    ("cause", "now", "violations"), [("", 100.9, {"no reason": 1}), ("", 101.0, {}), ("cut", 100.9, {})]
)
def test_oracle_wants_a_reason_for_a_second_delivery(
    scene: Scene, cause: str, now: float, violations: dict[str, int]
) -> None:
    number = scene.publish()
    scene.deliver(number, now=100.1)
    scene.line.cause = cause
    scene.deliver(number, now=now)
    assert scene.violations() == violations
    assert scene.book.again == {cause or ("no reason" if violations else "timed out"): 1}


@pytest.mark.parametrize("until", [0.0, 300.0])
def test_oracle_knows_a_delivery_that_was_overtaken_by_the_next_one(scene: Scene, until: float) -> None:
    number = scene.publish()
    scene.deliver(number, attempts=2)
    scene.book.finished(number)
    scene.book.certain(number, until)
    scene.book.settled(number)
    # It had timed out, and stood unread in another connection's buffer.
    scene.line = Line(50.0)
    scene.deliver(number, attempts=1)
    assert scene.violations() == {}
    assert scene.book.again == {"overtaken": 1}


@pytest.mark.parametrize(
    ("life", "attempts", "violations"), [(0, 2, {"came back": 1}), (0, 3, {"came back": 1}), (1, 1, {"came back": 1})]
)
def test_oracle_takes_nothing_else_for_overtaken(
    scene: Scene, life: int, attempts: int, violations: dict[str, int]
) -> None:
    number = scene.publish()
    scene.deliver(number, attempts=2)
    scene.book.finished(number)
    scene.book.certain(number, 0.0)
    scene.book.settled(number)
    scene.line = Line(50.0, life=life)
    scene.deliver(number, attempts=attempts)
    assert scene.violations() == violations


def test_oracle_accepts_what_was_requeued(scene: Scene) -> None:
    number = scene.publish()
    scene.deliver(number, now=100.1)
    scene.book.requeued(number)
    scene.deliver(number, now=100.2)
    assert scene.violations() == {}
    assert scene.book.again == {"requeued": 1}


def test_oracle_counts_what_is_late(scene: Scene) -> None:
    scene.deliver(scene.publish(delay=500), now=101.4)
    scene.deliver(scene.publish(delay=500), now=101.6)
    assert scene.violations() == {}
    assert scene.book.late == 1
    assert scene.book.latest == pytest.approx(1.1)


def test_oracle_forgives_a_power_loss_what_was_not_synced_and_batches_as_a_whole(scene: Scene) -> None:
    one, batch, other = scene.publish(), scene.publish(3), scene.publish(2)
    assert scene.ledger.forgive(one, {one, batch, batch + 1, other, other + 1}) == 3
    scene.deliver(one)
    scene.deliver(other)
    assert scene.violations() == {"lost": 1}


@pytest.mark.parametrize(("before", "violations"), [(0, {"torn": 1}), (1, {})])
def test_oracle_knows_that_a_batch_may_have_been_delivered_in_part_when_the_power_went(
    scene: Scene, before: int, violations: dict[str, int]
) -> None:
    batch = scene.publish(3)
    for number in range(batch, batch + before):
        scene.deliver(number)
    assert scene.ledger.forgive(batch, set()) == 3
    for number in range(batch + before, batch + 2):
        scene.deliver(number)
    assert scene.violations() == violations
