"""Looking at messages without taking them, and one message finished, put back or deferred by its id."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from conftest import StartBroker

from flintmq.broker.daemon import Broker
from flintmq.broker.delivery.channel import Channel
from flintmq.broker.http import peek as peek_module
from flintmq.broker.storage import log as log_module
from flintmq.protocol.seqs import SEQ_MASK
from flintmq.protocol.wire import Message
from support.fakes import SECOND, Client, FakeClock, pass_time, places, quiet, until
from support.http_client import HttpClient

HOUR_MS = 3_600_000


class Operator:
    """Somebody with an HTTP client, and the consumers' side of the same broker."""

    def __init__(self, broker: Broker, http: HttpClient) -> None:
        self.broker = broker
        self.http = http

    @property
    def channel(self) -> Channel:
        return self.broker.topics["t"].channels["c"]

    async def page(self, state: str = "ready", **arguments: Any) -> dict[str, Any]:
        more = "".join(f"&{key}={value}" for key, value in arguments.items())
        answer = await self.http.get(f"/channel/peek?topic=t&channel=c&state={state}{more}")
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found

    async def topic_page(self, **arguments: Any) -> dict[str, Any]:
        more = "".join(f"&{key}={value}" for key, value in arguments.items())
        answer = await self.http.get(f"/topic/peek?topic=t{more}")
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found

    async def bodies(self, state: str = "ready") -> list[bytes]:
        return [body_of(message) for message in (await self.page(state))["messages"]]

    async def act(self, what: str, id: str, **arguments: Any) -> int:
        more = "".join(f"&{key}={value}" for key, value in arguments.items())
        answer = await self.http.post(f"/message/{what}?topic=t&channel=c&id={id}{more}")
        if answer.status == 200:
            assert answer.body == b""
        return answer.status

    def client(self) -> Client:
        return Client(self.broker)

    async def publish(self, *bodies: bytes) -> list[str]:
        """The ids of messages that now wait in the channel."""
        if "t" not in self.broker.topics or "c" not in self.broker.topics["t"].channels:
            self.broker.topic("t").channel("c")
        await self.client().publish_many("t", list(bodies))
        end = self.broker.topics["t"].log.end
        return [f"{self.broker.options.id << 54 | seq:016x}" for seq in range(end - len(bodies), end)]

    async def consumer(self, ready: int) -> Client:
        client = self.client()
        await client.subscribe("t", "c", ready)
        await quiet(self.broker)
        return client


def body_of(message: dict[str, Any]) -> bytes:
    return base64.b64decode(message["body"])


def seq_of(id: str) -> int:
    return int(id, 16) & SEQ_MASK


def id_of(message: Message) -> str:
    return message.id.decode()


@asynccontextmanager
async def operate(broker: Broker) -> AsyncIterator[Operator]:
    async with HttpClient.connect(broker.http_address) as http:
        yield Operator(broker, http)


@pytest.fixture
async def operator(start_broker: StartBroker) -> AsyncIterator[Operator]:
    async with operate(await start_broker(http_address="127.0.0.1:0")) as found:
        yield found


# --- Looking ----------------------------------------------------------------------------------------------------------


async def test_ready_messages_are_shown_and_stay_as_they_are(operator: Operator, clock: FakeClock) -> None:
    ids = await operator.publish(b"one", b"two")
    page = await operator.page()
    assert page["next"] is None
    assert page["messages"] == [
        {
            "id": id,
            "seq": seq_of(id),
            "timestamp": clock.wall(),
            "attempts": 0,
            "size": 3,
            "body": base64.b64encode(body).decode(),
            "truncated": False,
        }
        for id, body in zip(ids, [b"one", b"two"], strict=True)
    ]
    channel = operator.channel
    assert (channel.depth, channel.in_flight_count, len(channel.deferred)) == (2, 0, 0)
    consumer = await operator.consumer(2)
    assert [(m.body, m.attempts) for m in consumer.messages] == [(b"one", 1), (b"two", 1)]
    assert await operator.page() == {"messages": [], "next": None}


async def test_messages_in_flight_have_an_owner_and_a_deadline(operator: Operator, clock: FakeClock) -> None:
    await operator.publish(b"usual", b"again")
    consumer = await operator.consumer(2)
    usual, again = consumer.messages
    consumer.requeue(again)
    await quiet(operator.broker)
    first, second = (await operator.page("in_flight"))["messages"]
    assert (first["id"], first["attempts"], body_of(first)) == (id_of(usual), 1, b"usual")
    assert (second["id"], second["attempts"], body_of(second)) == (id_of(again), 2, b"again")
    timeout = operator.broker.options.msg_timeout
    for message in (first, second):
        assert message["client"] == {"client_id": "127.0.0.1", "remote_address": "127.0.0.1:4"}
        # Deadlines of first deliveries are rounded up by a few milliseconds.
        assert 0 <= message["deadline"] - clock.wall() - timeout < SECOND // 50
    # Its consumer goes: it is in flight until its time is over, and nobody's.
    consumer.hang_up()
    await until(lambda: consumer.transport.lost)
    assert ["client" in message for message in (await operator.page("in_flight"))["messages"]] == [False, False]


async def test_deferred_messages_are_shown_by_the_time_they_are_due(operator: Operator, clock: FakeClock) -> None:
    await operator.publish(b"put back")
    consumer = await operator.consumer(1)
    for body, seconds in ((b"last", 300), (b"first", 10)):
        await operator.client().publish_later("t", body, seconds)
    consumer.requeue(consumer.messages[0], 60)
    await quiet(operator.broker)
    messages = (await operator.page("deferred"))["messages"]
    assert [(body_of(m), m["attempts"], m["due"] - clock.wall()) for m in messages] == [
        (b"first", 0, 10 * SECOND),
        (b"put back", 1, 60 * SECOND),
        (b"last", 0, 300 * SECOND),
    ]


async def test_those_put_back_come_before_those_never_sent(operator: Operator) -> None:
    await operator.publish(b"one", b"two", b"three")
    consumer = await operator.consumer(2)
    one, two = consumer.messages
    consumer.ready(0)
    consumer.requeue(two)
    consumer.requeue(one)
    await quiet(operator.broker)
    messages = (await operator.page())["messages"]
    assert [(body_of(m), m["attempts"]) for m in messages] == [(b"one", 1), (b"two", 1), (b"three", 0)]


async def test_a_topic_without_channels_shows_its_log(operator: Operator) -> None:
    await operator.client().publish_many("t", [b"%d" % i for i in range(5)])
    page = await operator.topic_page(limit=3)
    assert [body_of(m) for m in page["messages"]] == [b"0", b"1", b"2"]
    page = await operator.topic_page(limit=3, after=page["next"])
    assert ([body_of(m) for m in page["messages"]], page["next"]) == ([b"3", b"4"], None)
    assert operator.broker.topics["t"].depth == 5


async def test_an_empty_topic_shows_nothing(operator: Operator) -> None:
    operator.broker.topic("t")
    assert await operator.topic_page() == {"messages": [], "next": None}


@pytest.mark.parametrize(("shown", "body", "truncated"), [(0, b"", True), (3, b"abc", True), (6, b"abcdef", False)])
async def test_a_body_is_cut_where_one_asks(operator: Operator, shown: int, body: bytes, truncated: bool) -> None:
    await operator.publish(b"abcdef")
    [message] = (await operator.page(bytes=shown))["messages"]
    assert (body_of(message), message["truncated"], message["size"]) == (body, truncated, 6)


async def test_a_long_body_is_cut_unless_all_of_it_is_wanted(operator: Operator) -> None:
    body = bytes(range(256)) * 4
    await operator.publish(body)
    [message] = (await operator.page())["messages"]
    assert (body_of(message), message["truncated"]) == (body[:256], True)
    [message] = (await operator.page(bytes="all"))["messages"]
    assert (body_of(message), message["truncated"]) == (body, False)


async def test_pages_show_everything_once_while_messages_move(operator: Operator) -> None:
    ids = await operator.publish(*(b"%d" % i for i in range(30)))
    consumer = await operator.consumer(20)
    consumer.ready(0)
    for message in consumer.messages[:10]:
        consumer.requeue(message, 60)
    for message in consumer.messages[10:20]:
        consumer.requeue(message)
    await quiet(operator.broker)
    seen: list[str] = []
    after = ""
    while after is not None:
        page = await operator.page(limit=3, after=after)
        seen += [message["id"] for message in page["messages"]]
        after = page["next"]
        if len(seen) == 6:
            # What was seen already goes; what comes is ready in a place of its own.
            assert await operator.act("finish", seen[0]) == 200
            assert await operator.act("defer", seen[1], delay=1000) == 200
            new = await operator.publish(b"new")
    assert seen == [*ids[10:], *new]
    assert [m["id"] for m in (await operator.page("deferred"))["messages"]] == [seen[1], *ids[:10]]


async def test_pages_of_what_is_in_flight(operator: Operator) -> None:
    ids = await operator.publish(*(b"%d" % i for i in range(12)))
    consumer = await operator.consumer(12)
    for message in consumer.messages[::3]:
        consumer.touch(message)
    seen: list[str] = []
    after = ""
    while after is not None:
        page = await operator.page("in_flight", limit=5, after=after)
        seen += [message["id"] for message in page["messages"]]
        after = page["next"]
    assert seen == ids


async def test_a_page_ends_where_its_bodies_become_too_many(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peek_module, "PAGE_BYTES", 1000)
    ids = await operator.publish(*[b"x" * 400] * 5)
    page = await operator.page(bytes="all")
    assert [message["id"] for message in page["messages"]] == ids[:3]
    page = await operator.page(bytes="all", after=page["next"])
    assert ([message["id"] for message in page["messages"]], page["next"]) == (ids[3:], None)


async def test_what_is_in_files_alone_is_read_and_kept_nowhere(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", mem_queue_size=0, max_bytes_per_file=2_000)
    async with operate(broker) as operator:
        bodies = [b"%03d" % i * 50 for i in range(60)]
        ids = [id for body in bodies for id in await operator.publish(body)]
        await quiet(broker)
        assert operator.channel.backend_depth > 40
        assert not broker.store.cold
        monkeypatch.setattr(peek_module, "PAGE_READS", 4)
        for ask in (operator.page, operator.topic_page):
            seen: list[dict[str, Any]] = []
            after, pages = "", 0
            while after is not None:
                page = await ask(bytes="all", after=after)
                seen += page["messages"]
                after, pages = page["next"], pages + 1
            assert [message["id"] for message in seen] == ids
            assert [body_of(message) for message in seen] == bodies
            assert pages > 2
        assert not broker.store.cold
        assert all(segment.pins == 0 for segment in broker.topics["t"].log.segments)


async def test_messages_of_one_channel_alone_are_ready_with_the_count_they_bring(operator: Operator) -> None:
    await operator.publish(b"usual")
    topic = operator.broker.topics["t"]
    record = bytearray(b"\0\0\0\4side")
    seq = topic.side_log().append(
        record, 0, len(record), 1, 7, attempts=4, extra=operator.channel.id.to_bytes(4, "big")
    )
    topic.side_log().write_all()
    operator.channel.side.add(seq, seq + 1)
    messages = (await operator.page())["messages"]
    assert [(body_of(m), m["attempts"]) for m in messages] == [(b"side", 3), (b"usual", 0)]
    # Deferred and then ready again, it still brings its count.
    assert await operator.act("defer", messages[0]["id"], delay=1000) == 200
    [deferred] = (await operator.page("deferred"))["messages"]
    assert (body_of(deferred), deferred["attempts"]) == (b"side", 3)
    assert await operator.act("requeue", messages[0]["id"]) == 200
    consumer = await operator.consumer(2)
    assert {(m.body, m.attempts) for m in consumer.messages} == {(b"side", 4), (b"usual", 1)}


@pytest.mark.parametrize("cold", [False, True])
async def test_a_dead_letter_says_where_it_comes_from(start_broker: StartBroker, clock: FakeClock, cold: bool) -> None:
    options = {"http_address": "127.0.0.1:0", "mem_queue_size": 0 if cold else 10_000}
    broker = await start_broker(**options)
    async with operate(broker) as operator:
        [id] = await operator.publish(b"it")
        operator.channel.settings = dataclasses.replace(operator.channel.settings, max_attempts=1)
        consumer = await operator.consumer(1)
        consumer.requeue(consumer.messages[0])
        await quiet(broker)
        await operator.client().publish("t.c.dead", b"ordinary")
    if cold:
        await broker.stop()
        broker = await start_broker(**options)
    async with HttpClient.connect(broker.http_address) as http:
        answer = await http.get("/topic/peek?topic=t.c.dead")
        dead, ordinary = answer.json["messages"]
    assert (body_of(dead), body_of(ordinary), "dead" in ordinary) == (b"it", b"ordinary", False)
    found = dead["dead"]
    assert (found["topic"], found["channel"], found["id"]) == ("t", "c", id)
    assert (found["attempts"], found["reason"], found["time"]) == (1, "requeued", clock.wall())


async def test_a_damaged_message_is_shown_as_damaged(start_broker: StartBroker) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", mem_queue_size=0)
    async with operate(broker) as operator:
        ids = []
        for body in (b"before", b"damaged", b"after"):
            ids += await operator.publish(body)
        await quiet(broker)
        topic = broker.topics["t"]
        topic.trim()
        [segment] = topic.log.segments
        data = segment.path.read_bytes()
        with open(segment.path, "r+b") as file:
            file.seek(data.index(b"damaged"))
            file.write(b"DAMAGED")
        messages = (await operator.page())["messages"]
        assert [(m["id"], body_of(m), m.get("damaged", False)) for m in messages] == [
            (ids[0], b"before", False),
            (ids[1], b"", True),
            (ids[2], b"after", False),
        ]
        # It can be got out of the way.
        assert await operator.act("finish", ids[1]) == 200
        assert await operator.bodies() == [b"before", b"after"]


async def test_a_read_that_never_ends_is_not_waited_for(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", mem_queue_size=0)
    async with operate(broker) as operator:
        await operator.publish(b"one")
        await quiet(broker)
        broker.topics["t"].trim()
        monkeypatch.setattr(peek_module, "READ_SECONDS", 0.0)
        monkeypatch.setattr(log_module.Log, "look", lambda self, seq, then: None)
        answer = await operator.http.get("/channel/peek?topic=t&channel=c")
        assert (answer.status, answer.message.partition(":")[0]) == (503, "DISK_BUSY")


@pytest.mark.parametrize(
    ("target", "status", "code"),
    [
        ("/channel/peek", 400, "MISSING_ARG_TOPIC"),
        ("/channel/peek?topic=t", 400, "MISSING_ARG_CHANNEL"),
        ("/channel/peek?topic=t%20&channel=c", 400, "INVALID_ARG_TOPIC"),
        ("/channel/peek?topic=t&channel=$", 400, "INVALID_ARG_CHANNEL"),
        ("/channel/peek?topic=other&channel=c", 404, "TOPIC_NOT_FOUND"),
        ("/channel/peek?topic=t&channel=other", 404, "CHANNEL_NOT_FOUND"),
        ("/channel/peek?topic=t&channel=c&state=finished", 400, "INVALID_STATE"),
        ("/channel/peek?topic=t&channel=c&limit=0", 400, "INVALID_LIMIT"),
        ("/channel/peek?topic=t&channel=c&limit=1001", 400, "INVALID_LIMIT"),
        ("/channel/peek?topic=t&channel=c&limit=ten", 400, "INVALID_LIMIT"),
        ("/channel/peek?topic=t&channel=c&bytes=-1", 400, "INVALID_BYTES"),
        ("/channel/peek?topic=t&channel=c&bytes=most", 400, "INVALID_BYTES"),
        ("/channel/peek?topic=t&channel=c&after=x", 400, "INVALID_AFTER"),
        ("/channel/peek?topic=t&channel=c&after=ffffffffffffffff-0", 400, "INVALID_AFTER"),
        ("/topic/peek", 400, "MISSING_ARG_TOPIC"),
        ("/topic/peek?topic=other", 404, "TOPIC_NOT_FOUND"),
        ("/topic/peek?topic=t&limit=1e3", 400, "INVALID_LIMIT"),
    ],
)
async def test_a_wrong_question_gets_a_clear_answer(operator: Operator, target: str, status: int, code: str) -> None:
    await operator.publish(b"one")
    answer = await operator.http.get(target)
    assert (answer.status, answer.message.partition(":")[0]) == (status, code)


# --- One message ------------------------------------------------------------------------------------------------------

#: How a message gets into each state a channel can have it in; (consumer, its id).
Prepare = Callable[[Operator], Any]


async def waiting(operator: Operator) -> str:
    """In the middle of a range."""
    return (await operator.publish(b"before", b"it", b"after"))[1]


async def put_back(operator: Operator) -> str:
    [id] = await operator.publish(b"it")
    consumer = await operator.consumer(1)
    consumer.ready(0)
    consumer.requeue(consumer.messages[0])
    await quiet(operator.broker)
    return id


async def deferred(operator: Operator) -> str:
    await operator.publish(b"other")
    await operator.client().publish_later("t", b"it", 60)
    return (await operator.page("deferred"))["messages"][0]["id"]


async def in_flight(operator: Operator) -> str:
    ids = await operator.publish(b"before", b"it", b"after")
    await operator.consumer(3)
    return ids[1]


async def in_flight_again(operator: Operator) -> str:
    id = await put_back(operator)
    await operator.consumer(1)
    return id


async def not_seen_yet(operator: Operator) -> str:
    """Pumped by its topic, and not looked at by the channel."""
    [id] = await operator.publish(b"it")
    assert operator.channel.seen <= seq_of(id)
    return id


STATES = [waiting, put_back, deferred, in_flight, in_flight_again, not_seen_yet]


@pytest.mark.parametrize("prepare", STATES)
async def test_a_message_is_finished_whatever_its_state(operator: Operator, prepare: Prepare) -> None:
    id = await prepare(operator)
    channel = operator.channel
    before = channel.depth + channel.in_flight_count + len(channel.deferred)
    assert len(places(channel, seq_of(id))) == 1
    assert await operator.act("finish", id) == 200
    await quiet(operator.broker)
    assert places(channel, seq_of(id)) == []
    assert channel.depth + channel.in_flight_count + len(channel.deferred) == before - 1
    assert sum(session.in_flight for session in channel.sessions.values()) == channel.in_flight_count
    for what in ("finish", "requeue"):
        assert await operator.act(what, id) == 404
    assert await operator.act("defer", id, delay=1) == 404


@pytest.mark.parametrize("prepare", STATES)
async def test_a_finished_message_stays_finished_after_a_crash(start_broker: StartBroker, prepare: Prepare) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with operate(broker) as operator:
        id = await prepare(operator)
        assert await operator.act("finish", id) == 200
        broker.kill()
    broker = await start_broker(http_address="127.0.0.1:0")
    async with operate(broker) as operator:
        assert places(operator.channel, seq_of(id)) == []
        assert await operator.act("finish", id) == 404


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("prepare", STATES)
async def test_a_message_is_deferred_whatever_its_state_and_across_a_crash(
    start_broker: StartBroker, clock: FakeClock, prepare: Prepare, snapshot: bool
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with operate(broker) as operator:
        id = await prepare(operator)
        assert await operator.act("defer", id, delay=90_000) == 200
        await quiet(broker)
        attempts = operator.channel.attempts[seq_of(id)]
        assert places(operator.channel, seq_of(id)) == ["deferred"]
        assert sum(s.in_flight for s in operator.channel.sessions.values()) == operator.channel.in_flight_count
        if snapshot:
            broker.journal.take_snapshot()
            await quiet(broker)
        broker.kill()
    clock.advance(30)
    broker = await start_broker(http_address="127.0.0.1:0")
    async with operate(broker) as operator:
        [message] = [m for m in (await operator.page("deferred"))["messages"] if m["id"] == id]
        assert (body_of(message), message["due"], message["attempts"]) == (b"it", clock.wall() + 60 * SECOND, attempts)
        # Never early, and then delivered with the right count.
        consumer = await operator.consumer(10)
        assert b"it" not in consumer.bodies
        consumer.finish(*consumer.messages)
        await pass_time(broker, clock, 61)
        assert [(m.body, m.attempts) for m in consumer.messages if m.body == b"it"] == [(b"it", attempts + 1)]


@pytest.mark.parametrize("snapshot", [False, True])
async def test_a_deferred_publish_that_was_made_ready_stays_ready_after_a_crash(
    start_broker: StartBroker, snapshot: bool
) -> None:
    broker = await start_broker(http_address="127.0.0.1:0")
    async with operate(broker) as operator:
        id = await deferred(operator)
        assert await operator.act("requeue", id) == 200
        assert await operator.bodies() == [b"it", b"other"]
        if snapshot:
            broker.journal.take_snapshot()
            await quiet(broker)
        broker.kill()
    broker = await start_broker(http_address="127.0.0.1:0")
    async with operate(broker) as operator:
        assert await operator.bodies() == [b"it", b"other"]
        # Also when it is in flight at the next one.
        consumer = await operator.consumer(2)
        assert sorted(consumer.bodies) == [b"it", b"other"]
        broker.journal.take_snapshot()
        await quiet(broker)
        broker.kill()
    broker = await start_broker(http_address="127.0.0.1:0")
    async with operate(broker) as operator:
        assert sorted(await operator.bodies()) == [b"it", b"other"]


async def test_the_owner_of_a_finished_message_is_told_that_it_is_not_in_flight(operator: Operator) -> None:
    await operator.publish(b"one", b"two", b"three")
    consumer = await operator.consumer(2)
    one, two = consumer.messages
    assert await operator.act("finish", id_of(one)) == 200
    await quiet(operator.broker)
    # There was room for another.
    assert consumer.bodies == [b"one", b"two", b"three"]
    assert consumer.session.in_flight == 2
    consumer.finish(one)
    assert consumer.errors == [b"E_FIN_FAILED FIN " + one.id + b" failed ID not in flight"]
    consumer.finish(two, consumer.messages[2])
    await quiet(operator.broker)
    assert (consumer.session.in_flight, operator.channel.in_flight_count, operator.channel.depth) == (0, 0, 0)


async def test_a_message_in_flight_is_put_back_and_delivered_again(operator: Operator) -> None:
    [id] = await operator.publish(b"it")
    holder = await operator.consumer(1)
    holder.ready(0)
    other = await operator.consumer(1)
    assert await operator.act("requeue", id) == 200
    await quiet(operator.broker)
    assert [(m.body, m.attempts) for m in other.messages] == [(b"it", 2)]
    assert (holder.session.in_flight, other.session.in_flight) == (0, 1)
    assert operator.channel.requeue_count == 1
    holder.finish(*holder.messages)
    assert holder.errors == [b"E_FIN_FAILED FIN " + id.encode() + b" failed client does not own message"]


async def test_a_message_in_flight_is_put_back_for_later(operator: Operator, clock: FakeClock) -> None:
    [id] = await operator.publish(b"it")
    consumer = await operator.consumer(1)
    assert await operator.act("requeue", id, delay=5_500) == 200
    assert operator.channel.in_flight_count == 0
    [message] = (await operator.page("deferred"))["messages"]
    assert (message["due"] - clock.wall(), message["attempts"]) == (5_500_000_000, 1)
    consumer.take()
    await pass_time(operator.broker, clock, 6)
    assert [(m.body, m.attempts) for m in consumer.messages] == [(b"it", 2)]


@pytest.mark.parametrize("prepare", [waiting, put_back, not_seen_yet])
async def test_putting_back_what_is_ready_changes_nothing(operator: Operator, prepare: Prepare) -> None:
    id = await prepare(operator)
    operator.channel.catch_up(operator.broker.topics["t"].pumped)
    before = places(operator.channel, seq_of(id)), list(operator.channel.waiting), operator.channel.requeue_count
    assert await operator.act("requeue", id) == 200
    after = places(operator.channel, seq_of(id)), list(operator.channel.waiting), operator.channel.requeue_count
    assert after == before


@pytest.mark.parametrize("durability", ["memory", "fsync"])
async def test_one_message_in_every_durability(start_broker: StartBroker, durability: str) -> None:
    broker = await start_broker(http_address="127.0.0.1:0", durability=durability)
    async with operate(broker) as operator:
        ids = await operator.publish(b"one", b"two", b"three")
        assert await operator.act("finish", ids[0]) == 200
        assert await operator.act("defer", ids[1], delay=1) == 200
        if durability == "fsync":
            assert broker.journal.synced == broker.journal.noted
        assert await operator.bodies() == [b"three"]


async def test_a_message_of_an_ephemeral_channel(operator: Operator) -> None:
    operator.broker.topic("t").channel("c#ephemeral")
    await operator.client().publish("t", b"one")
    answer = await operator.http.get("/channel/peek?topic=t&channel=c%23ephemeral")
    [message] = answer.json["messages"]
    target = f"/message/finish?topic=t&channel=c%23ephemeral&id={message['id']}"
    assert [(await operator.http.post(target)).status for _ in range(2)] == [200, 404]


async def test_what_no_channel_has_seen_is_not_a_channels(operator: Operator) -> None:
    await operator.publish(b"seen")
    operator.broker.topics["t"].pause(True)
    [id] = await operator.publish(b"unseen")
    assert [body_of(m) for m in (await operator.topic_page())["messages"]] == [b"seen", b"unseen"]
    assert await operator.bodies() == [b"seen"]
    assert await operator.act("finish", id) == 404


@pytest.mark.parametrize(
    ("target", "status", "code"),
    [
        ("finish?topic=t&channel=c", 400, "MISSING_ARG_ID"),
        ("finish?topic=t&id=0", 400, "MISSING_ARG_CHANNEL"),
        ("finish?topic=t&channel=other&id=0", 404, "CHANNEL_NOT_FOUND"),
        ("finish?topic=t&channel=c&id=0", 404, "MESSAGE_NOT_FOUND"),
        ("finish?topic=t&channel=c&id=ffffffffffffffff", 404, "MESSAGE_NOT_FOUND"),
        ("finish?topic=t&channel=c&id=0000000000000001", 404, "MESSAGE_NOT_FOUND"),
        ("finish?topic=t&channel=c&id=%ff%00", 404, "MESSAGE_NOT_FOUND"),
        ("requeue?topic=t&channel=c&id=0000000000000001&delay=-1", 400, "INVALID_DELAY"),
        (f"requeue?topic=t&channel=c&id=0000000000000001&delay={HOUR_MS + 1}", 400, "INVALID_DELAY"),
        ("defer?topic=t&channel=c&id=0000000000000001&delay=soon", 400, "INVALID_DELAY"),
        ("defer?topic=t&channel=c&id=0000000000000001", 400, "MISSING_ARG_DELAY"),
        (f"defer?topic=t&channel=c&id=0000000000000001&delay={HOUR_MS}", 404, "MESSAGE_NOT_FOUND"),
    ],
)
async def test_a_wrong_order_gets_a_clear_answer(operator: Operator, target: str, status: int, code: str) -> None:
    await operator.publish(b"one")
    answer = await operator.http.post(f"/message/{target}")
    assert (answer.status, answer.message.partition(":")[0]) == (status, code)
    assert operator.channel.depth == 1
