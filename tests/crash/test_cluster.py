"""`flintmq torture` of a cluster; and its oracle's own test: it must notice what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from flintmq.tools.torture.cluster_ledger import ClusterLedger, NodeLink, Publish
from flintmq.tools.torture.run import LOOKUPD_KILLED, Plan, torture


@pytest.mark.slow
@pytest.mark.timeout(900)  # a machine may stand still for minutes; it takes about half a minute
async def test_killed_nodes_cost_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    report = await torture(Plan(3, tmp_path, seconds=20, durabilities=("os", "os", "fsync"), raw=False, faults=()))

    assert report.samples == []
    assert report.passed
    assert report.complete
    # It was a torture worth the name.
    costs = report.costs["cluster"]
    assert report.faults[LOOKUPD_KILLED] > 0
    assert costs.acknowledged > 500
    assert costs.deliveries > costs.acknowledged
    assert costs.again["put back"] > 0


# --- The oracle -------------------------------------------------------------------------------------------------------


class Scene:
    """A ledger with one channel; a cluster that does as it likes."""

    def __init__(self) -> None:
        self.ledger = ClusterLedger([("topic", "channel"), ("other", "channel")], msg_timeout=5.0)
        self.book = self.ledger.books["topic", "channel"]
        self.link = self.ledger.opened("node", 100.0)
        self.bodies: list[bytes] = []

    def publish(self, count: int = 1, *, answered: bool = True) -> Publish:
        publish, bodies = self.ledger.publish("topic", [50] * count, 110.0)
        self.bodies += bodies
        if answered:
            self.ledger.acknowledge(publish)
        return publish

    def deliver(
        self,
        number: int = 0,
        *,
        now: float = 111.0,
        id: bytes = b"id",
        link: NodeLink | None = None,
        put_back: bool = False,
    ) -> None:
        delivery = self.book.receive(self.bodies[number], b"%b %d" % (id, number), link or self.link, now)
        assert delivery is not None
        delivery.put_back = put_back

    def violations(self) -> dict[str, int]:
        self.ledger.conclude()
        return dict(self.ledger.violations.counts)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_oracle_accepts_what_came_once(scene: Scene) -> None:
    scene.publish(2)
    scene.deliver(0)
    assert scene.ledger.owed == 1
    scene.deliver(1)
    assert scene.ledger.owed == 0
    assert scene.violations() == {}


def test_oracle_notices_a_lost_message(scene: Scene) -> None:
    scene.publish(2)
    scene.deliver(1)
    assert scene.violations() == {"lost": 1}


def test_oracle_notices_a_duplicate_without_a_reason(scene: Scene) -> None:
    scene.publish()
    scene.deliver()
    # That another connection ended explains nothing.
    scene.ledger.opened("another node", 100.0)
    scene.ledger.killed("another node", 111.5)
    scene.deliver(now=112.0)
    assert scene.violations() == {"no reason": 1}
    assert scene.book.again == {"no reason": 1}


def test_oracle_forgives_a_duplicate_of_a_node_that_was_killed(scene: Scene) -> None:
    scene.publish()
    scene.deliver()
    scene.ledger.killed("node", 111.5)
    scene.ledger.lost(scene.link, 111.6)
    scene.ledger.is_gone("node")
    again = scene.ledger.opened("node", 112.0)
    scene.deliver(now=113.0, link=again)
    assert scene.book.again == {"killed or cut": 1}
    assert scene.violations() == {}
    # Once: the new connection is whole.
    scene.deliver(now=114.0, link=again)
    assert scene.violations() == {"no reason": 1}


@pytest.mark.parametrize(("now", "violations"), [(114.9, {"no reason": 1}), (115.0, {})])
def test_oracle_forgives_what_may_have_timed_out(scene: Scene, now: float, violations: dict[str, int]) -> None:
    scene.publish()
    scene.deliver()
    scene.deliver(now=now)
    assert scene.violations() == violations


@pytest.mark.parametrize(("now", "violations"), [(119.9, {"no reason": 1}), (120.0, {})])
def test_oracle_knows_that_nothing_is_sent_before_there_is_a_connection(
    scene: Scene, now: float, violations: dict[str, int]
) -> None:
    scene.publish()
    late = scene.ledger.opened("node", 115.0)
    scene.deliver(now=116.0, link=late)
    scene.deliver(now=now, link=late)
    assert scene.violations() == violations


def test_oracle_forgives_what_a_handler_put_back(scene: Scene) -> None:
    scene.publish()
    scene.deliver(put_back=True)
    scene.deliver(now=111.1)
    assert scene.book.again == {"put back": 1}
    assert scene.violations() == {}


def test_oracle_notices_what_was_stored_twice(scene: Scene) -> None:
    scene.publish()
    scene.deliver(id=b"one")
    scene.deliver(id=b"two")
    assert scene.violations() == {"stored twice": 1}


def test_oracle_forgives_what_was_sent_twice(scene: Scene) -> None:
    scene.ledger.acknowledge(scene.publish(answered=False), resent=True)
    scene.deliver(id=b"one")
    scene.deliver(id=b"two")
    assert scene.book.again == {"stored twice": 1}
    assert scene.violations() == {}


@pytest.mark.parametrize(("got", "violations"), [(0, {}), (2, {"torn": 1}), (3, {})])
def test_oracle_notices_a_part_of_a_batch(scene: Scene, got: int, violations: dict[str, int]) -> None:
    scene.ledger.doubt(scene.publish(3, answered=False))
    for number in range(got):
        scene.deliver(number)
    assert scene.violations() == violations


def test_oracle_notices_what_should_not_be_there(scene: Scene) -> None:
    scene.ledger.refuse(scene.publish(answered=False))
    scene.deliver()
    assert scene.violations() == {"ghost": 1}


def test_oracle_notices_a_connection_that_ended_for_no_reason(scene: Scene) -> None:
    scene.ledger.lost(scene.link, 111.0)
    closed = scene.ledger.opened("node", 112.0)
    closed.closing = True
    scene.ledger.lost(closed, 113.0)
    assert scene.violations() == {"dropped": 1}


def test_oracle_knows_that_a_dying_node_may_still_take_in_a_connection(scene: Scene) -> None:
    scene.ledger.killed("node", 111.0)
    scene.ledger.lost(scene.ledger.opened("node", 111.1), 111.2)
    scene.ledger.lost(scene.link, 111.2)
    scene.ledger.is_gone("node")
    assert scene.violations() == {}
    scene.ledger.lost(scene.ledger.opened("node", 112.0), 113.0)
    assert scene.violations() == {"dropped": 1}


def test_oracle_notices_a_changed_byte_and_a_wrong_topic(scene: Scene) -> None:
    scene.publish()
    body = bytearray(scene.bodies[0])
    body[-1] ^= 1
    for topic, content in (("topic", bytes(body)), ("topic", b"short"), ("other", scene.bodies[0])):
        assert scene.ledger.books[topic, "channel"].receive(content, b"id", scene.link, 111.0) is None
    assert scene.ledger.violations.counts == {"damaged": 3}


def test_oracle_knows_that_a_starved_node_may_drop_connections(scene: Scene) -> None:
    scene.ledger.disturbed("node", 111.0)
    scene.ledger.lost(scene.link, 111.2)
    scene.ledger.lost(scene.ledger.opened("node", 111.3), 111.4)
    scene.ledger.killed("node", 112.0)
    scene.ledger.is_gone("node")
    assert scene.violations() == {}
    scene.ledger.lost(scene.ledger.opened("node", 113.0), 114.0)
    assert scene.violations() == {"dropped": 1}
