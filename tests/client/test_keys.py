"""Publishes with keys: against an nsqd that says what the test tells it to say, and against real ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flintmq import Broker, sync
from flintmq.client import Consumer, Producer
from flintmq.errors import (
    ClosedError,
    ConnectError,
    KeysUnsupportedError,
    OptionError,
    PublishError,
    PublishUnknownError,
)

from .daemons import Nsqd
from .fakes import FakeConnection, FakeNsqd, MovableClock, until
from .test_producer import PUBLISHES, bodies, hold, outcome, producer, published


def keyed(node: str = "one") -> FakeNsqd:
    """An nsqd that knows keys."""
    return FakeNsqd(flintmq={"version": "1", "node": node, "log": True, "keys": True})


def said(nsqd: FakeNsqd) -> list[tuple[bytes, ...]]:
    return [
        command[:-1] for connection in nsqd.connections for command in connection.commands if command[0] in PUBLISHES
    ]


def keys(*nsqds: FakeNsqd) -> list[bytes]:
    return [command[-1] for nsqd in nsqds for command in said(nsqd)]


async def test_what_goes_over_the_wire_with_a_key() -> None:
    async with keyed() as nsqd, producer(nsqd) as nsq:
        await nsq.publish("t", b"one", key="a")
        await nsq.publish_many("t", [b"two", b"three"], key="b/1")
        await nsq.publish_many("t", [b"four"], key="c")
        await nsq.defer("t", b"five", 1.5, key="d")
        await nsq.publish("t", b"six")
        assert nsqd.last.identify["flintmq"] is True
    assert said(nsqd) == [
        (b"PUB", b"t", b"a"),
        (b"MPUB", b"t", b"b/1"),
        (b"PUB", b"t", b"c"),
        (b"DPUB", b"t", b"1500", b"d"),
        (b"PUB", b"t"),
    ]
    assert published(nsqd) == [b"one", b"two", b"three", b"four", b"five", b"six"]


async def test_publishes_with_keys_are_not_joined() -> None:
    async with keyed() as nsqd, producer(nsqd) as nsq:
        await asyncio.gather(*(nsq.publish("t", b"x", key=f"k{n}") for n in range(10)), nsq.publish("t", b"plain"))
        assert sorted(len(command) for command in said(nsqd)) == [2] + [3] * 10


async def test_a_consumer_does_not_ask_for_keys(fake: FakeNsqd) -> None:
    async with Consumer("t", "c", nsqd=fake.address):
        assert "flintmq" not in (await fake.subscribed()).identify


@pytest.mark.parametrize("key", ["", "a b", "a\n", "ä", "x" * 129, "\ud800"])
async def test_a_bad_key_is_refused_before_it_is_sent(key: str) -> None:
    async with keyed() as nsqd, producer(nsqd) as nsq:
        for publish in (nsq.publish("t", b"x", key=key), nsq.publish_many("t", [b"x"], key=key)):
            with pytest.raises(OptionError, match="is not a key"):
                await publish
        with pytest.raises(OptionError, match="is not a key"):
            await nsq.defer("t", b"x", 1, key=key)
        assert published(nsqd) == []


@pytest.mark.parametrize("features", [{}, {"flintmq": {"node": "n", "keys": False}}, {"flintmq": True}])
async def test_a_broker_that_does_not_know_keys_is_not_sent_any(features: dict[str, Any]) -> None:
    """It would ignore them, and store what is repeated."""
    async with FakeNsqd(**features) as nsqd, producer(nsqd) as nsq:
        with pytest.raises(KeysUnsupportedError, match=nsqd.address) as raised:
            await nsq.publish("t", b"one", key="k")
        assert not raised.value.retriable
        await nsq.publish("t", b"two")
        assert published(nsqd) == [b"two"]


async def test_of_several_brokers_one_that_knows_keys_is_chosen() -> None:
    async with FakeNsqd() as old, keyed() as new, producer(old, new) as nsq:
        await until(lambda: len(nsq.connections) == 2)
        for number in range(10):
            await nsq.publish("t", b"x", key=f"k{number}")
        assert (len(keys(old)), len(keys(new))) == (0, 10)


async def test_the_same_key_goes_to_the_same_broker() -> None:
    async with keyed("one") as one, keyed("other") as other, producer(one, other) as nsq:
        await until(lambda: len(nsq.connections) == 2)
        for _ in range(3):
            await asyncio.gather(*(nsq.publish("t", b"x", key=f"k{number}") for number in range(50)))
        assert set(keys(one)) | set(keys(other)) == {b"k%d" % number for number in range(50)}
        assert not set(keys(one)) & set(keys(other))
        assert keys(one) and keys(other)


async def test_what_was_sent_is_sent_again_to_the_same_broker_when_the_connection_is_lost() -> None:
    async with keyed("one") as one, keyed("other") as other:
        one.on_command = other.on_command = hold
        async with producer(one, other, reconnect_delay=0.01) as nsq:
            await until(lambda: len(nsq.connections) == 2)
            tasks = [asyncio.create_task(nsq.publish("t", b"%d" % n, key=f"k{n}")) for n in range(20)]
            tasks.append(asyncio.create_task(nsq.publish_many("t", [b"x", b"y"], key="batch")))
            tasks.append(asyncio.create_task(nsq.defer("t", b"z", 1, key="later")))
            await until(lambda: len(keys(one)) + len(keys(other)) == 22)
            before = {b: nsqd for nsqd in (one, other) for b in keys(nsqd)}
            one.on_command, other.on_command = one.behave, other.behave
            one.last.abort()
            other.last.abort()
            await asyncio.gather(*tasks)
        for nsqd in (one, other):
            mine = sorted(key for key, home in before.items() if home is nsqd)
            assert mine and sorted(keys(nsqd)) == sorted(mine * 2)


async def test_what_may_be_stored_waits_for_its_own_broker_and_is_unknown_in_the_end(clock: MovableClock) -> None:
    async with keyed("one") as one, producer(one, clock=clock, timeout=30) as nsq:
        one.on_command = hold
        publish = asyncio.create_task(nsq.publish("t", b"x", key="k"))
        await until(lambda: keys(one))
        # The same address, another node: perhaps a load balancer.
        one.features["flintmq"] = {"node": "other", "keys": True}
        one.on_command = one.behave
        one.last.abort()
        await until(lambda: not nsq.connections)
        clock.advance(1)
        await until(lambda: len(nsq.connections) == 1)
        await nsq.publish("t", b"another", key="other")
        assert keys(one) == [b"k", b"other"]
        clock.advance(30)
        error = await outcome(publish)
        assert isinstance(error, PublishUnknownError)
        assert "it may be stored" in str(error)


async def test_what_was_never_sent_is_no_mystery(clock: MovableClock) -> None:
    async with keyed() as one, producer(one, clock=clock, timeout=30) as nsq:
        await one.stop()
        await until(lambda: not nsq.connections)
        publish = asyncio.create_task(nsq.publish("t", b"x", key="k"))
        await asyncio.sleep(0)
        clock.advance(30)
        assert isinstance(await outcome(publish), ConnectError)


async def test_a_refusal_says_that_nothing_is_stored_so_another_may_take_it() -> None:
    """Also where it was sent before: the broker would have known the key."""
    async with keyed("one") as one, keyed("other") as other:

        async def refuse(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
            if command[0] in PUBLISHES:
                connection.refuse("E_MPUB_FAILED MPUB failed the disk is nearly full")
                connection.close()
            else:
                await connection.nsqd.behave(connection, command)

        async with producer(one, other, reconnect_delay=0.01) as nsq:
            await until(lambda: len(nsq.connections) == 2)
            number = 0
            while not keys(one):
                await nsq.publish_many("t", [b"x", b"y"], key=f"k{number}")
                number += 1
            key = f"k{number - 1}"
            one.on_command = hold
            publish = asyncio.create_task(nsq.publish_many("t", [b"x", b"y"], key=key))
            await until(lambda: len(keys(one)) == 2)
            one.on_command = refuse
            one.last.abort()
            await publish
            assert keys(one) == [key.encode()] * 3
            assert keys(other)[-1] == key.encode()


async def test_a_refusal_without_another_broker_is_not_unknown() -> None:
    async with keyed() as nsqd, producer(nsqd, reconnect_delay=0.01) as nsq:
        nsqd.on_command = hold
        publish = asyncio.create_task(nsq.publish("t", b"x", key="k"))
        await until(lambda: keys(nsqd))

        async def refuse(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
            if command[0] in PUBLISHES:
                connection.refuse("E_PUB_FAILED PUB failed the disk is nearly full")
            else:
                await connection.nsqd.behave(connection, command)

        nsqd.on_command = refuse
        nsqd.last.abort()
        error = await outcome(publish)
        assert type(error) is PublishError
        assert (error.code, error.retriable) == ("E_PUB_FAILED", True)


async def test_closing_waits_for_what_has_a_key() -> None:
    async with keyed() as nsqd:
        nsq = producer(nsqd, reconnect_delay=0.01)
        await nsq.start()
        nsqd.on_command = hold
        publish = asyncio.create_task(nsq.publish("t", b"x", key="k"))
        await until(lambda: keys(nsqd))
        closing = asyncio.create_task(nsq.close())
        await asyncio.sleep(0)
        nsqd.on_command = nsqd.behave
        nsqd.last.abort()
        await asyncio.gather(publish, closing)
        assert keys(nsqd) == [b"k", b"k"]
        with pytest.raises(ClosedError):
            await nsq.publish("t", b"x", key="k")


async def test_bodies_are_kept_for_the_second_time() -> None:
    async with keyed() as nsqd, producer(nsqd, reconnect_delay=0.01) as nsq:
        nsqd.on_command = hold
        publish = asyncio.create_task(nsq.publish_many("t", [b"one", b"two"], key="k"))
        await until(lambda: keys(nsqd))
        nsqd.on_command = nsqd.behave
        nsqd.last.abort()
        await publish
        commands = [command for connection in nsqd.connections for command in connection.said(b"MPUB")]
        assert [bodies(command) for command in commands] == [[b"one", b"two"]] * 2


# --- Real daemons


async def test_a_killed_broker_stores_each_once(tmp_path: Path) -> None:
    nsqd = Nsqd("flintmq", tmp_path / "data")
    nsqd.start()
    try:
        async with Producer(nsqd.address, reconnect_delay=0.05, max_reconnect_delay=0.2, timeout=300) as nsq:
            await nsq.publish("t", b"0", key="k0")
            for life in range(3):
                numbers = range(1 + 100 * life, 101 + 100 * life)
                tasks = [asyncio.create_task(nsq.publish("t", b"%d" % n, key=f"k{n}")) for n in numbers]
                await tasks[life]
                await asyncio.to_thread(nsqd.kill)
                await asyncio.to_thread(nsqd.start)
                await asyncio.gather(*tasks)
        got: list[bytes] = []
        async with Consumer("t", "c", nsqd=nsqd.address, max_in_flight=400) as consumer:
            await nsq_publish_last(nsqd.address)
            async for message in consumer:
                message.finish()
                if message.body == b"last":
                    break
                got.append(message.body)
        assert sorted(got, key=int) == [b"%d" % n for n in range(301)]
    finally:
        nsqd.stop()


async def nsq_publish_last(address: str) -> None:
    async with Producer(address) as nsq:
        await nsq.publish("t", b"last", key="last")


async def test_a_go_broker_knows_no_keys(tmp_path: Path) -> None:
    nsqd = Nsqd("go", tmp_path / "data")
    nsqd.start()
    try:
        async with Producer(nsqd.address) as nsq:
            with pytest.raises(KeysUnsupportedError):
                await nsq.publish("t", b"x", key="k")
            await nsq.publish("t", b"x")
    finally:
        nsqd.stop()


def test_keys_without_asyncio(tmp_path: Path) -> None:
    nsqd = Nsqd("flintmq", tmp_path / "data")
    nsqd.start()
    try:
        with sync.Producer(nsqd.address) as nsq:
            for _ in range(2):
                nsq.publish("t", b"one", key="a")
                nsq.publish_many("t", [b"two", b"three"], key="b")
                nsq.defer("t", b"four", 0, key="c")
            nsq.publish("t", b"last")
        with sync.Consumer("t", "c", nsqd=nsqd.address, max_in_flight=10) as consumer:
            got = []
            while len(got) < 5:
                with consumer.get(timeout=60) as message:
                    got.append(message.body)
            assert sorted(got) == sorted([b"one", b"two", b"three", b"four", b"last"])
    finally:
        nsqd.stop()


async def test_a_key_that_was_used_for_other_content_is_refused_for_good(tmp_path: Path) -> None:
    async with Broker(data_path=tmp_path) as broker, Producer(broker.tcp_address) as nsq:
        await nsq.publish("t", b"one", key="k")
        await nsq.publish("t", b"one", key="k")
        for publish in (nsq.publish("t", b"two", key="k"), nsq.publish_many("t", [b"one", b"two"], key="k")):
            with pytest.raises(PublishError, match="E_KEY_CONTENT key k was used for another publish") as refused:
                await publish
            assert not refused.value.retriable
        await nsq.publish("t", b"three", key="l")
