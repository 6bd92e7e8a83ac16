"""What users of the other NSQ client libraries rely on, the same for every library and all brokers.

No test asks the broker what it thinks: a consumer's limit of messages in flight shows whether a message was really
finished (`assert_all_finished`), so these scenarios need nothing but the TCP protocol.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from .conftest import StartBroker, StartClient
from .processes import DEADLINE, Broker, Client, Delivery

pytestmark = pytest.mark.interop

TOPIC = "interop"
CHANNEL = "readers"

MSG_TIMEOUT_MS = 2000
# The broker's clock and ours may be steered differently, by at most a tiny part of what we measure.
SAME_CLOCK = 0.99


def consume(broker: Broker, client: Client, channel: str = CHANNEL, **options: int) -> None:
    """Subscribe to a channel that exists from now on, even if the library takes its time to connect."""
    broker.create_channel(TOPIC, channel)
    client.subscribe(TOPIC, channel, **options)


def warm_up(client: Client, channels: int = 1) -> None:
    """Bring the consumers to their full RDY: some libraries start with 1, until a first message is finished."""
    client.pub(TOPIC, b"warm-up")
    for _ in range(channels):
        delivery = client.next_message()
        assert delivery.body == b"warm-up"
        client.fin(delivery)


def receive(client: Client, count: int) -> list[Delivery]:
    """Receive and finish that many messages."""
    deliveries = []
    for _ in range(count):
        delivery = client.next_message()
        client.fin(delivery)
        deliveries.append(delivery)
    return deliveries


def assert_all_finished(client: Client, max_in_flight: int) -> None:
    """The broker hands out as many new messages at once as the consumer may hold, and no old one among them.

    A message the broker had not taken as finished would still hold one of those places, or come again.
    """
    assert not client.in_flight
    probes = {b"probe %d" % number for number in range(max_in_flight)}
    for probe in probes:
        client.pub(TOPIC, probe)
    held = [client.next_message() for _ in probes]
    assert {delivery.body for delivery in held} == probes
    for delivery in held:
        client.fin(delivery)


def test_published_messages_arrive_once_and_unchanged(broker: Broker, client: Client) -> None:
    bodies = [bytes(range(256)), b"\x00", b"\n", "größer".encode(), *(b"message %d" % number for number in range(10))]
    consume(broker, client)
    warm_up(client)
    began = time.time()
    for body in bodies:
        client.pub(TOPIC, body)
    deliveries = receive(client, len(bodies))
    ended = time.time()

    assert Counter(delivery.body for delivery in deliveries) == Counter(bodies)
    assert len({delivery.id for delivery in deliveries}) == len(bodies)
    assert all(len(delivery.id) == 16 for delivery in deliveries)
    assert {delivery.attempts for delivery in deliveries} == {1}
    # Nanoseconds since 1970, not any other unit.
    assert all(began - 1 <= delivery.timestamp / 1e9 <= ended + 1 for delivery in deliveries)
    assert_all_finished(client, max_in_flight=1)


def test_mpub_arrives_as_single_messages(broker: Broker, client: Client) -> None:
    bodies = [b"part %d" % number for number in range(50)]
    consume(broker, client, max_in_flight=10)
    warm_up(client)
    client.mpub(TOPIC, bodies)
    deliveries = receive(client, len(bodies))

    assert Counter(delivery.body for delivery in deliveries) == Counter(bodies)
    assert len({delivery.id for delivery in deliveries}) == len(bodies)
    assert_all_finished(client, max_in_flight=10)


def test_messages_published_before_the_consumer_came_are_kept(broker: Broker, client: Client) -> None:
    bodies = [b"early %d" % number for number in range(5)]
    client.mpub(TOPIC, bodies)
    client.subscribe(TOPIC, CHANNEL, max_in_flight=2)
    assert {delivery.body for delivery in receive(client, len(bodies))} == set(bodies)
    assert_all_finished(client, max_in_flight=2)


def test_deferred_message_arrives_but_not_before_its_time(broker: Broker, client: Client) -> None:
    delay_ms = 1500
    consume(broker, client, max_in_flight=2)
    warm_up(client)
    began = time.monotonic()
    client.dpub(TOPIC, b"later", delay_ms)
    client.pub(TOPIC, b"now")

    first, second = receive(client, 2)
    assert (first.body, second.body) == (b"now", b"later")
    assert second.attempts == 1
    assert second.arrived - began >= delay_ms / 1000 * SAME_CLOCK
    assert_all_finished(client, max_in_flight=2)


def test_requeued_message_comes_back_with_one_attempt_more_each_time(broker: Broker, client: Client) -> None:
    consume(broker, client)
    warm_up(client)
    client.pub(TOPIC, b"again")
    ids = set()
    for attempt in range(1, 8):
        delivery = client.next_message()
        assert (delivery.body, delivery.attempts) == (b"again", attempt)
        ids.add(delivery.id)
        client.req(delivery)
    delivery = client.next_message()
    assert (delivery.body, delivery.attempts) == (b"again", 8)
    client.fin(delivery)

    assert ids == {delivery.id}
    assert_all_finished(client, max_in_flight=1)


def test_message_requeued_with_a_delay_waits_for_it(broker: Broker, client: Client) -> None:
    delay_ms = 1500
    consume(broker, client)
    warm_up(client)
    client.pub(TOPIC, b"not yet")
    delivery = client.next_message()
    began = time.monotonic()
    client.req(delivery, delay_ms)
    client.pub(TOPIC, b"meanwhile")

    first, second = receive(client, 2)
    assert (first.body, first.attempts) == (b"meanwhile", 1)
    assert (second.body, second.attempts) == (b"not yet", 2)
    assert second.id == delivery.id
    assert second.arrived - began >= delay_ms / 1000 * SAME_CLOCK
    assert_all_finished(client, max_in_flight=1)


@pytest.fixture
def impatient(start_broker: StartBroker, start_client: StartClient) -> tuple[Broker, Client]:
    """A client whose messages time out soon. gnsq cannot ask for it, so there the broker's own default is short."""
    broker = start_broker()
    client = start_client(broker)
    if "msg_timeout" in client.lacks:
        broker = start_broker(f"--msg-timeout={MSG_TIMEOUT_MS}ms")
        client = start_client(broker)
    return broker, client


def test_unanswered_message_is_delivered_again_but_not_before_its_timeout(impatient: tuple[Broker, Client]) -> None:
    broker, client = impatient
    consume(broker, client, msg_timeout_ms=MSG_TIMEOUT_MS)
    warm_up(client)
    began = time.monotonic()
    client.pub(TOPIC, b"slow")
    unanswered = client.next_message()
    delivery = client.next_message()

    assert (delivery.body, delivery.id, delivery.attempts) == (b"slow", unanswered.id, 2)
    assert delivery.arrived - began >= MSG_TIMEOUT_MS / 1000 * SAME_CLOCK
    client.forget(unanswered)
    client.fin(delivery)
    assert_all_finished(client, max_in_flight=1)


def test_touched_message_stays_with_its_consumer_past_its_timeout(impatient: tuple[Broker, Client]) -> None:
    broker, client = impatient
    consume(broker, client, max_in_flight=2, msg_timeout_ms=MSG_TIMEOUT_MS)
    warm_up(client)
    client.mpub(TOPIC, [b"touched", b"left alone"])
    held = {delivery.body: delivery for delivery in (client.next_message(), client.next_message())}
    touched, left_alone = held[b"touched"], held[b"left alone"]

    # The message left alone shows that timeouts do happen; the touched one has to outlive two of its own.
    came_back = None
    give_up = time.monotonic() + DEADLINE
    while came_back is None or time.monotonic() < touched.arrived + 2 * MSG_TIMEOUT_MS / 1000:
        assert time.monotonic() < give_up, "the message left alone never timed out"
        client.touch(touched)
        delivery = client.poll_message(timeout=MSG_TIMEOUT_MS / 1000 / 8)
        if delivery is not None:
            assert (delivery.body, delivery.id, delivery.attempts) == (b"left alone", left_alone.id, 2)
            client.forget(left_alone)
            client.fin(delivery)
            came_back = delivery
    client.fin(touched)
    assert_all_finished(client, max_in_flight=2)


def test_each_channel_gets_every_message(broker: Broker, client: Client) -> None:
    channels = ["one", "two"]
    bodies = [b"for both %d" % number for number in range(20)]
    for channel in channels:
        consume(broker, client, channel, max_in_flight=5)
    warm_up(client, len(channels))
    client.mpub(TOPIC, bodies)
    deliveries = receive(client, len(bodies) * len(channels))

    by_channel = {
        channel: {delivery.body: delivery.id for delivery in deliveries if delivery.channel == channel}
        for channel in channels
    }
    assert set(by_channel["one"]) == set(bodies)
    # A message has the same id on every channel.
    assert by_channel["one"] == by_channel["two"]


def test_large_message_arrives_unchanged(broker: Broker, client: Client) -> None:
    # Incompressible and with every byte value, so that neither a shortened nor a shifted body can look right.
    body = random.Random(900).randbytes(900_000)
    consume(broker, client)
    warm_up(client)
    client.pub(TOPIC, body)
    (delivery,) = receive(client, 1)
    assert delivery.body == body
    client.mpub(TOPIC, [body[:450_000], body[450_000:]])
    assert {delivery.body for delivery in receive(client, 2)} == {body[:450_000], body[450_000:]}
    assert_all_finished(client, max_in_flight=1)


def test_many_messages_never_exceed_max_in_flight(broker: Broker, client: Client) -> None:
    total, max_in_flight = 2000, 100
    bodies = [b"%d" % number for number in range(total)]
    consume(broker, client, max_in_flight=max_in_flight)
    warm_up(client)
    for start in range(0, total, 100):
        client.mpub(TOPIC, bodies[start : start + 100])

    held = [client.next_message() for _ in range(max_in_flight)]
    assert client.poll_message(timeout=0.5) is None, "the broker went beyond the consumer's RDY"

    received: Counter[bytes] = Counter()
    while held:
        # Finish half of what we hold, then take all that this made room for.
        for delivery in held[: max_in_flight // 2]:
            client.fin(delivery)
            received[delivery.body] += 1
        del held[: max_in_flight // 2]
        still_to_come = total - received.total() - len(held)
        held += [client.next_message() for _ in range(min(max_in_flight - len(held), still_to_come))]
    assert received == Counter(bodies)
    assert_all_finished(client, max_in_flight)
