"""Typed messages: what is published as a value is consumed as one, and what is none is a failed message."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flintmq import sync
from flintmq.client import Batch, Consumer, Json, Message, MessagePack, Producer
from flintmq.client.codecs import decode, encode
from flintmq.errors import DecodeError, OptionError
from flintmq.testing import NsqBroker

from .fakes import FakeNsqd, MovableClock, until


class Struct(msgspec.Struct):
    item: str
    amount: int = 1


@dataclasses.dataclass
class Dataclass:
    item: str
    amount: int = 1


KINDS: list[Any] = [Struct, Dataclass]
try:
    import pydantic
except ImportError:
    pass
else:

    class Model(pydantic.BaseModel):
        item: str
        amount: int = 1

    KINDS.append(Model)


class Reversed:
    """A codec of somebody's own."""

    def encode(self, value: Any, /) -> bytes:
        return Json().encode(value)[::-1]

    def decode(self, body: bytes, kind: Any, /) -> Any:
        return Json().decode(body[::-1], kind)


@pytest.mark.parametrize("codec", [None, Json(), MessagePack(), Reversed()], ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_value_is_consumed_as_it_was_published(nsq_broker: NsqBroker, kind: Any, codec: Any) -> None:
    orders = [kind(item="tea"), kind(item="☕", amount=3), kind(item="later")]
    async with Producer(nsq_broker.address, codec=codec) as producer:
        await producer.publish("t", orders[0])
        await producer.publish_many("t", orders[1:2])
        await producer.defer("t", orders[2], 0.01)
    async with Consumer("t", "c", nsqd=nsq_broker.address, type=kind, codec=codec, max_in_flight=3) as consumer:
        found = []
        while len(found) < 3:
            with await consumer.get(timeout=60) as message:
                found.append(message.value)
                assert type(message.body) is bytes
    assert sorted(found, key=lambda order: order.item) == sorted(orders, key=lambda order: order.item)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()))
@pytest.mark.parametrize("codec", [Json(), MessagePack()])
def test_plain_data_comes_back(codec: Any, value: dict[str, Any]) -> None:
    assert decode(codec, encode(codec, value), dict[str, Any]) == value


@pytest.mark.parametrize("value", ["text", 5, None, bytearray(b"x"), memoryview(b"x"), object()])
async def test_what_is_no_value_is_refused_unless_a_codec_takes_it(fake: FakeNsqd, value: Any) -> None:
    async with Producer(fake.address) as producer:
        for publish in (
            lambda: producer.publish("t", value),
            lambda: producer.publish_many("t", [b"x", value]),
            lambda: producer.defer("t", value, 1),
        ):
            with pytest.raises(TypeError, match="a message is bytes"):
                await publish()


@pytest.mark.parametrize("body", [b"{", b'{"item": 5}', b"\xff", b"[]", b"null"])
@pytest.mark.parametrize("max_attempts", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_body_that_is_no_value_fails_and_is_given_up_with_its_reason(
    fake: FakeNsqd, caplog: pytest.LogCaptureFixture, kind: Any, body: bytes, max_attempts: int
) -> None:
    reasons: list[str] = []
    handled: list[Any] = []

    async def handler(message: Message[Any]) -> None:
        handled.append(message.value)

    async def on_give_up(message: Message[Any]) -> None:
        with pytest.raises(DecodeError) as error:
            _ = message.value
        reasons.append(str(error.value))

    options: dict[str, Any] = {"max_attempts": max_attempts, "max_backoff_duration": 0}
    async with Consumer("t", "c", nsqd=fake.address, type=kind, handler=handler, on_give_up=on_give_up, **options) as c:
        connection = await fake.subscribed()
        for attempts in range(1, 10):
            connection.deliver(body, attempts=attempts)
            await until(lambda n=attempts: c.stats.finished + c.stats.requeued == n)
            if connection.said(b"FIN") or c.stats.finished:
                break
        connection.deliver(b'{"item": "tea"}')
        await until(lambda: handled)
    assert c.stats.given_up == 1 and c.stats.requeued == attempts - 1
    assert attempts == (max_attempts + 1 if max_attempts else 5)
    assert kind.__name__ in reasons[0] and kind.__name__ in caplog.text
    assert handled == [kind(item="tea")]


async def test_a_failing_body_is_no_endless_loop_in_an_async_for(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", b"no json", {"item": "tea"})
    options: dict[str, Any] = {"max_attempts": 2, "default_requeue_delay": 0, "max_backoff_duration": 0}
    async with Consumer("t", "c", nsqd=nsq_broker.address, type=Struct, **options) as consumer:
        with await consumer.get(timeout=60) as message:
            assert message.value == Struct("tea")
        while not consumer.stats.given_up:
            with pytest.raises(TimeoutError):
                await consumer.get(timeout=0.2)
        assert (consumer.stats.undecodable, consumer.stats.given_up) == (2, 1)


def test_the_same_without_asyncio_and_in_tests(nsq_broker: NsqBroker) -> None:
    sync.publish("t", Struct("tea"), nsqd=nsq_broker.address)
    nsq_broker.publish("t", Dataclass("coffee", 2), delay=0.01)
    with sync.Consumer("t", "c", nsqd=nsq_broker.address, type=Struct) as consumer:
        found = []
        for message in consumer:
            with message:
                found.append(message.value)
            if len(found) == 2:
                break
    assert found == [Struct("tea"), Struct("coffee", 2)]
    nsq_broker.publish("u", Struct("milk"))
    assert nsq_broker.take("u", type=Dataclass) == [Dataclass("milk")]


def test_a_handler_can_be_tested_with_a_value() -> None:
    message = Message(value=Struct("tea"))
    with message:
        assert message.value.item == "tea"
    assert message.answered
    assert Message(b"x").value == b"x"


# --- Batches


async def test_a_batch_is_full_or_late(fake: FakeNsqd, clock: MovableClock) -> None:
    async with Consumer("t", "c", nsqd=fake.address, max_in_flight=10, clock=clock) as consumer:
        connection = await fake.subscribed()
        ids = connection.deliver(*[b"%d" % number for number in range(7)])
        batches = consumer.batches(3, wait=5)
        await until(lambda: consumer.stats.received == 7)
        for first in (0, 3):
            with await anext(batches) as batch:
                assert [message.body for message in batch] == [b"%d" % n for n in range(first, first + 3)]
        last = asyncio.ensure_future(anext(batches))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not last.done()
        clock.advance(5)
        (await last).finish()
        await until(lambda: connection.said(b"FIN") == [(b"FIN", id) for id in ids])


async def test_a_batch_that_fails_is_requeued_whole(fake: FakeNsqd) -> None:
    async with Consumer("t", "c", nsqd=fake.address, max_in_flight=3) as consumer:
        connection = await fake.subscribed()
        connection.deliver(b"a", b"b", b"c")
        with pytest.raises(ZeroDivisionError):
            async for batch in consumer.batches(3, wait=60):
                with batch:
                    batch[1].finish()
                    raise ZeroDivisionError
        await until(lambda: len(connection.said(b"REQ")) == 2 and len(connection.said(b"FIN")) == 1)


@pytest.mark.parametrize("brokers", [1, 3])
async def test_no_batch_waits_for_more_than_may_come(brokers: int, nsq_cluster: Any) -> None:
    """Larger than `max_in_flight`: what may be here is here."""
    cluster = nsq_cluster(brokers=brokers, lookupds=0)
    rng = random.Random(3)
    for number in range(60):
        rng.choice(cluster.brokers).publish("t", b"%d" % number)
    seen: set[bytes] = set()
    async with Consumer("t", "c", nsqd=cluster.addresses, max_in_flight=6) as consumer, asyncio.timeout(60):
        async for batch in consumer.batches(100, wait=0.3):
            # Until all are connected, the first may have sent more than its share.
            assert 1 <= len(batch) <= 6 * brokers
            with batch:
                seen.update(message.body for message in batch)
            if len(seen) == 60:
                break


def test_batches_without_asyncio(nsq_broker: NsqBroker) -> None:
    nsq_broker.publish("t", *[b"%d" % number for number in range(5)])
    sizes = []
    with sync.Consumer("t", "c", nsqd=nsq_broker.address, max_in_flight=5) as consumer:
        for batch in consumer.batches(2, wait=0.2):
            assert isinstance(batch, Batch)
            batch.finish()
            sizes.append(len(batch))
            if sum(sizes) == 5:
                break
    assert sizes == [2, 2, 1]


async def test_the_rest_comes_before_the_end(fake: FakeNsqd) -> None:
    async with Consumer("t", "c", nsqd=fake.address, max_in_flight=5) as consumer:
        connection = await fake.subscribed()
        connection.deliver(b"a", b"b")
        await until(lambda: consumer.stats.received == 2)
        consumer.stop()
        sizes = []
        async for batch in consumer.batches(5, wait=60):
            sizes.append(len(batch))
            batch.finish()
        assert sizes == [2]
        with pytest.raises(OptionError):
            await anext(consumer.batches(0, wait=1))


# --- Types that cannot be read, and those of pydantic


class Other(msgspec.Struct):
    text: str


class Plain:
    """Nothing that anybody could read."""


class HoldsPlain(msgspec.Struct):
    plain: Plain


class MayHoldPlain(msgspec.Struct):
    item: str
    plain: Plain | None = None


class Tree(msgspec.Struct):
    branches: list[Tree]
    parent: Tree | None


class Unfinished(msgspec.Struct):
    item: Nowhere  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("codec", [None, MessagePack()])
@pytest.mark.parametrize(
    "kind", ["Order", 5, Plain, list[Plain], HoldsPlain, Struct | Other, Dataclass | Struct, Unfinished]
)
def test_a_type_that_no_message_can_have_is_refused_at_the_start(kind: Any, codec: Any) -> None:
    for made in (Consumer, sync.Consumer):
        with pytest.raises(OptionError, match="no message can be read as type="):
            made("t", "c", nsqd="127.0.0.1:1", type=kind, codec=codec)


@pytest.mark.parametrize(
    "kind", [Struct | None, list[Struct], dict, list, object, int, str, Any, MayHoldPlain, Tree, dict[str, Struct]]
)
def test_every_other_type_is_taken(kind: Any) -> None:
    Consumer("t", "c", nsqd="127.0.0.1:1", type=kind)
    # Nobody knows what a codec of somebody's own can read.
    Consumer("t", "c", nsqd="127.0.0.1:1", type=Plain, codec=Reversed())


def test_a_codec_of_ones_own_may_refuse_types_too() -> None:
    class Picky(Reversed):
        def check(self, kind: Any, /) -> None:
            raise LookupError("no schema")

    with pytest.raises(OptionError, match="no schema"):
        Consumer("t", "c", nsqd="127.0.0.1:1", type=Struct, codec=Picky())


def pydantic_cases() -> list[tuple[Any, Any]]:
    """Values, and types by which they are read."""
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("pydantic.dataclasses")

    class Aliased(pydantic.BaseModel):
        sender: str = pydantic.Field(alias="from")

    class WrittenOtherwise(pydantic.BaseModel):
        sender: str = pydantic.Field(serialization_alias="from")

    class ReadInTwoWays(pydantic.BaseModel):
        sender: str = pydantic.Field(validation_alias=pydantic.AliasChoices("from", "sender"))

    class Numbered(pydantic.BaseModel):
        n: int

    class Named(pydantic.BaseModel):
        name: str

    class Nested(pydantic.BaseModel):
        inner: Aliased

    @pydantic.dataclasses.dataclass
    class Checked:
        n: int = pydantic.Field(gt=0)

    holder = dataclasses.make_dataclass("Holder", [("model", Numbered)])
    return [
        (Aliased(**{"from": "me"}), Aliased),
        (WrittenOtherwise(sender="me"), WrittenOtherwise),
        (ReadInTwoWays(**{"from": "me"}), ReadInTwoWays),
        (Nested(inner=Aliased(**{"from": "me"})), Nested),
        (Numbered(n=1), Numbered | Named),
        (Named(name="x"), Numbered | Named),
        ([Numbered(n=1), Numbered(n=2)], list[Numbered]),
        ({"a": Aliased(**{"from": "me"})}, dict[str, Aliased]),
        (Checked(n=5), Checked),
        (holder(Numbered(n=1)), holder),
    ]


@pytest.mark.parametrize("codec", [None, MessagePack()])
def test_what_pydantic_knows_comes_back(codec: Any) -> None:
    for value, kind in pydantic_cases():
        Consumer("t", "c", nsqd="127.0.0.1:1", type=kind, codec=codec)
        assert decode(codec, encode(codec, value), kind) == value, kind


@pytest.mark.parametrize("codec", [None, MessagePack()])
def test_a_dataclass_of_pydantics_is_validated(codec: Any) -> None:
    [checked] = [kind for _, kind in pydantic_cases() if getattr(kind, "__name__", "") == "Checked"]
    with pytest.raises(DecodeError, match="greater than 0"):
        decode(codec, encode(codec, {"n": -5}), checked)


def test_a_model_goes_over_the_wire_by_its_aliases() -> None:
    value = pydantic_cases()[0][0]
    assert encode(None, value) == b'{"from":"me"}'
    assert encode(None, [value]) == b'[{"from":"me"}]'


@pytest.mark.parametrize("result", ["text", None, bytearray(b"x"), 5])
def test_what_a_codec_makes_is_bytes(result: Any) -> None:
    class Wrong(Reversed):
        def encode(self, value: Any, /) -> Any:
            return result

    with pytest.raises(TypeError, match=f"Wrong.encode returned {type(result).__name__}, not bytes"):
        encode(Wrong(), {"a": 1})
