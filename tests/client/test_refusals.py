"""Publishes that cannot be, or that a broker refuses: they fail, and nothing else does. In virtual time."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flintmq.client import Consumer, Producer
from flintmq.errors import ConnectError, OptionError, PublishError

from .test_failures import Seen, Sim, until


@pytest.fixture
def sim() -> Iterator[Sim]:
    random.seed(7)
    sim = Sim()
    yield sim
    assert sim.world.violations == []
    sim.loop.close()


async def outcome(publish: Any) -> str:
    try:
        await publish
    except Exception as exc:
        return type(exc).__name__
    return "stored"


class ReturnsText:
    """A codec whose author forgot to encode."""

    def encode(self, value: Any, /) -> Any:
        return json.dumps(value)

    def decode(self, body: bytes, kind: Any, /) -> Any:
        return json.loads(body)


class Raises(ReturnsText):
    def encode(self, value: Any, /) -> Any:
        raise LookupError("no such schema")


class Text(bytes):
    """Bytes, but not exactly."""


# --- Wrong calls

WRONG: dict[str, Callable[[Any], Any]] = {
    "topic": lambda producer: producer.publish(b"t", b"bad"),
    "topic of several": lambda producer: producer.publish_many(b"t", [b"bad", b"bad"]),
    "topic of a deferred one": lambda producer: producer.defer(b"t", b"bad", 1),
    "no topic": lambda producer: producer.publish(None, b"bad"),
    "a list for a topic": lambda producer: producer.publish(["t"], b"bad"),
    "key": lambda producer: producer.publish("t", b"bad", key=b"k"),
    "key of several": lambda producer: producer.publish_many("t", [b"bad"], key=5),
    "body": lambda producer: producer.publish("t", {"bad": 1}),
    "one body of several": lambda producer: producer.publish_many("t", [b"bad", {"bad": 1}]),
    "body of a deferred one": lambda producer: producer.defer("t", {"bad": 1}, 1),
    "bytes for several": lambda producer: producer.publish_many("t", b"bad"),
    "a dict for several": lambda producer: producer.publish_many("t", {"bad": 1}),
    "delay": lambda producer: producer.defer("t", b"bad", "1"),
}


@pytest.mark.parametrize("codec", [ReturnsText(), Raises()], ids=["returns text", "raises"])
@pytest.mark.parametrize("is_up", [True, False], ids=["connected", "away"])
def test_a_wrong_call_fails_alone(sim: Sim, codec: Any, is_up: bool) -> None:
    """Its place among the answers would take the next one's OK; in the backlog it would end the connection's keeper."""
    nsqd = sim.nsqd()

    async def main() -> None:
        producer = Producer(nsqd.name, timeout=3, codec=codec)
        async with producer:
            for name, wrong in WRONG.items():
                if not is_up:
                    nsqd.kill()
                    await until(lambda: not producer.connections)
                bad = asyncio.create_task(outcome(wrong(producer)))
                good = [asyncio.create_task(outcome(producer.publish("t", b"good"))) for _ in range(3)]
                await asyncio.sleep(0.1)
                nsqd.start()
                assert await asyncio.gather(*good) == ["stored"] * 3, name
                assert await bad in ("TypeError", "LookupError"), name

    sim.run(main(), 200)
    assert nsqd.log == {b"t": [b"good"] * 3 * len(WRONG)}


def test_bytes_of_a_class_of_ones_own_are_bytes_where_a_codec_made_them(sim: Sim) -> None:
    class Own(ReturnsText):
        def encode(self, value: Any, /) -> Any:
            return Text(json.dumps(value), "ascii")

    nsqd = sim.nsqd()

    async def main() -> None:
        async with Producer(nsqd.name, codec=Own()) as producer:
            await asyncio.gather(*(producer.publish("t", {"n": n}) for n in range(2)))
            await producer.publish_many("t", [{"n": 2}, b"3"])

    sim.run(main(), 5)
    assert nsqd.log[b"t"] == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}', b"3"]


def test_a_command_that_cannot_be_encoded_takes_no_answer(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 4 GiB, or no memory for it."""
    from flintmq.client.producer import _Command

    nsqd = sim.nsqd()
    encode = _Command.encode

    def fail(command: Any) -> bytes:
        if b"bad" in command.bodies:
            raise MemoryError
        return encode(command)

    monkeypatch.setattr(_Command, "encode", fail)

    async def main() -> list[str]:
        async with Producer(nsqd.name, timeout=3) as producer:
            calls = [outcome(producer.publish_many("t", [body])) for body in (b"a", b"bad", b"c")]
            return await asyncio.gather(*calls)

    assert sim.run(main(), 10) == ["stored", "MemoryError", "stored"]
    assert nsqd.log[b"t"] == [b"a", b"c"]


def test_a_producer_is_used_on_its_own_loop_only(sim: Sim) -> None:
    nsqd = sim.nsqd()

    async def main() -> list[str]:
        said: list[str] = []
        async with Producer(nsqd.name) as producer:
            calls: list[Callable[[], Any]] = [
                lambda: producer.publish("t", b"x"),
                lambda: producer.publish_many("t", [b"x"]),
                lambda: producer.defer("t", b"x", 1),
                producer.flush,
                producer.close,
            ]
            thread = threading.Thread(target=lambda: said.extend(asyncio.run(outcome(call())) for call in calls))
            thread.start()
            thread.join()
            await producer.publish("t", b"mine")
        return said

    assert sim.run(main(), 10) == ["RuntimeError"] * 5
    assert nsqd.log[b"t"] == [b"mine"]


@pytest.mark.parametrize("address", [b"127.0.0.1:4150", [b"127.0.0.1:4150"], 4150, ["127.0.0.1:4150", None]])
@pytest.mark.parametrize("option", ["nsqd", "lookupd"])
def test_an_address_is_a_text(address: Any, option: str) -> None:
    for kind in (lambda **options: Producer(**options), lambda **options: Consumer("t", "c", **options)):
        with pytest.raises(OptionError, match="is not an address"):
            kind(**{option: address})
    with pytest.raises(OptionError, match="is not an address"):
        Producer("127.0.0.1:4150").add_nsqd(b"127.0.0.1:4150")  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [(b"t", "c"), ("t", b"c"), (None, "c"), ("t", 5)])
def test_the_names_of_a_consumer_are_texts(names: tuple[Any, Any]) -> None:
    with pytest.raises(OptionError, match=r"is not a (topic|channel) name"):
        Consumer(*names, nsqd="127.0.0.1:4150")


# --- Refusals


@pytest.mark.parametrize("says_limit", [True, False], ids=["says the limit", "does not say it"])
@pytest.mark.parametrize("seconds_away", [0.0002, 0.05])
def test_refused_publishes_cost_the_others_no_time(sim: Sim, says_limit: bool, seconds_away: float) -> None:
    """Each refusal costs a connection. A pause after each, and the good ones behind them would fail."""
    nsqd = sim.nsqd(max_msg_size=1024, says_limit=says_limit)
    sim.network.delays[nsqd.address[0]] = seconds_away

    async def main() -> collections.Counter[tuple[str, str]]:
        async with Producer(nsqd.name, timeout=10) as producer:
            kinds = ["bad" if number % 4 == 0 else "good" for number in range(400 if says_limit else 100)]
            calls = (outcome(producer.publish("t", kind.encode() * (1000 if kind == "bad" else 1))) for kind in kinds)
            return collections.Counter(zip(kinds, await asyncio.gather(*calls), strict=True))

    count = 100 if says_limit else 25
    assert sim.run(main(), 60) == {("bad", "PublishError"): count, ("good", "stored"): 3 * count}
    assert nsqd.log[b"t"] == [b"good"] * 3 * count
    if says_limit:
        assert nsqd.accepted == 2


@pytest.mark.parametrize("size", [3, 500])
def test_those_published_together_are_refused_together_by_a_limit(sim: Sim, size: int) -> None:
    nsqd = sim.nsqd(max_msg_size=1024)

    async def main() -> list[str]:
        async with Producer(nsqd.name, timeout=10) as producer:
            large = [b"a" * 2000, b"b"]
            calls = [producer.publish_many("t", large if n % 2 else [b"c", b"d"]) for n in range(size)]
            return await asyncio.gather(*map(outcome, calls))

    assert sim.run(main(), 20) == ["PublishError" if n % 2 else "stored" for n in range(size)]
    assert set(nsqd.log[b"t"]) == {b"c", b"d"}


def test_a_full_broker_refuses_the_rest_of_a_topic_at_once(sim: Sim) -> None:
    nsqd = sim.nsqd(full=True)
    sim.network.delays[nsqd.address[0]] = 0.05

    async def main() -> tuple[list[str], float]:
        async with Producer(nsqd.name, timeout=10) as producer:
            begin = asyncio.get_running_loop().time()
            calls = [outcome(producer.publish_many(f"t{n % 3}", [b"1", b"2"])) for n in range(300)]
            return await asyncio.gather(*calls), asyncio.get_running_loop().time() - begin

    outcomes, seconds = sim.run(main(), 60)
    assert outcomes == ["PublishError"] * 300 and seconds < 2


def test_a_full_broker_is_passed_over_by_joined_publishes_too(sim: Sim) -> None:
    sick, well = sim.nsqd(full=True, node="1"), sim.nsqd(node="2")

    async def main() -> list[str]:
        async with Producer([sick.name, well.name], timeout=10) as producer:
            await until(lambda: len(producer.connections) == 2)
            calls = [producer.publish(f"t{n % 10}", b"%d" % n) for n in range(200)]
            return await asyncio.gather(*map(outcome, [*calls, producer.publish_many("u", [b"1", b"2"])]))

    assert sim.run(main(), 60) == ["stored"] * 201
    assert sick.log == {}


def test_a_part_of_an_mpub_may_be_stored_by_nsqs_own_nsqd(sim: Sim) -> None:
    """To send it to another broker could store that part twice."""
    sick, well = sim.nsqd(full=True), sim.nsqd()

    async def main() -> set[str]:
        async with Producer([sick.name, well.name], timeout=10) as producer:
            await until(lambda: len(producer.connections) == 2)
            calls = [producer.publish_many("t", [b"%d" % n, b"x"]) for n in range(2)]
            return set(await asyncio.gather(*map(outcome, calls)))

    assert sim.run(main(), 60) == {"PublishError", "stored"}


def test_a_refusal_is_said_although_no_other_broker_came_back(sim: Sim) -> None:
    """Refused by one broker, and kept for another that is lost: it was not "never sent"."""
    brokers = [sim.nsqd(full=True), sim.nsqd(full=True)]
    for nsqd in brokers:
        sim.network.delays[nsqd.address[0]] = 0.05

    async def main() -> list[Any]:
        async with Producer([nsqd.name for nsqd in brokers], timeout=5) as producer:
            await until(lambda: len(producer.connections) == 2)
            for nsqd in brokers:
                # After its refusal has come, and before it could be dialled again.
                sim.world.after(0.12, nsqd.kill)
            calls = [producer.publish(topic, b"x") for topic in ("t", "u")]
            return await asyncio.gather(*calls, return_exceptions=True)

    for error in sim.run(main(), 60):
        assert type(error) is PublishError and error.code == "E_PUB_FAILED"


def test_the_reason_is_not_that_nobody_can_be_reached(sim: Sim) -> None:
    nsqd = sim.nsqd(full=True)

    async def main() -> None:
        async with Producer(nsqd.name, timeout=1) as producer:
            with pytest.raises(PublishError):
                await producer.publish("t", b"x")
            sim.network.black_holes.add(nsqd.address)
            await until(lambda: not producer.connections)
            with pytest.raises(ConnectError, match=f"no broker is connected: {nsqd.name}: E_PUB_FAILED"):
                await producer.publish("t", b"x")

    sim.run(main(), 60)


# --- Keepers


class Panic(BaseException):
    """As extensions written in Rust raise it."""


@pytest.mark.parametrize("error", [Panic, SystemExit, asyncio.CancelledError, ZeroDivisionError])
def test_a_connect_that_fails_in_any_way_is_tried_again(sim: Sim, error: type[BaseException]) -> None:
    from flintmq.client.connection import connect

    nsqd = sim.nsqd()
    tries = 0

    async def my_connect(address: str, factory: Any) -> Any:
        nonlocal tries
        tries += 1
        if 1 < tries < 5:
            raise error
        return await connect(address, factory)

    async def main() -> None:
        seen: list[str] = []
        options: dict[str, Any] = {"connect": my_connect, "on_error": lambda address, error: seen.append(str(error))}
        async with Producer(nsqd.name, timeout=10, **options) as producer:
            nsqd.kill()
            nsqd.start()
            await until(lambda: not producer.connections)
            await producer.publish("t", b"x")
        assert len(seen) == 4 and error.__name__ in seen[1]

    sim.run(main(), 20)


def test_a_keeper_survives_whatever_its_owner_makes_of_a_connection(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = sim.nsqd()
    opened = Producer._opened
    times = 0

    def fail_once(producer: Producer, connection: Any) -> None:
        nonlocal times
        times += 1
        opened(producer, connection)
        if times == 1:
            raise ZeroDivisionError("in the owner")

    monkeypatch.setattr(Producer, "_opened", fail_once)

    async def main() -> None:
        async with Producer(nsqd.name, timeout=10) as producer:
            await asyncio.sleep(1)
            await producer.publish("t", b"x")

    sim.run(main(), 20)
    assert times == 2 and "in the owner" in caplog.text


def test_a_broker_that_is_down_is_logged_once_a_minute(sim: Sim, caplog: pytest.LogCaptureFixture) -> None:
    nsqd = sim.nsqd(start=False)
    heard: list[Exception] = []

    async def main() -> None:
        with pytest.raises(ConnectError):
            await Producer(nsqd.name, timeout=30, on_error=lambda address, error: heard.append(error)).start()

    caplog.set_level(logging.INFO, logger="flintmq")
    sim.run(main(), 60)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines[0].startswith(f"PRODUCER: {nsqd.name}: ")
    assert lines[1:] == ["PRODUCER: waiting up to 30 s for a broker"]
    # 0.25, 0.5, and then every second.
    assert 25 <= len(heard) <= 40


def test_a_second_loss_is_logged_again_and_a_second_refusal_is_not(sim: Sim, caplog: pytest.LogCaptureFixture) -> None:
    nsqd = sim.nsqd(max_msg_size=1000)

    async def main() -> None:
        async with Producer(nsqd.name) as producer:
            for _ in range(5):
                with pytest.raises(PublishError):
                    await producer.publish("t", bytes(2000))
            for _ in range(2):
                await producer.publish("t", b"x")
                nsqd.kill()
                await until(lambda: not producer.connections)
                nsqd.start()

    sim.run(main(), 60)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("too big" in line for line in lines) == 1
    assert sum("too big" not in line for line in lines) >= 2


def test_a_node_of_a_lookupd_is_no_path_of_this_machine(sim: Sim, caplog: pytest.LogCaptureFixture) -> None:
    lookupd = sim.lookupd()
    odd, good = sim.nsqd(lookupd), sim.nsqd(lookupd)
    odd.kill()
    odd.address = ("/tmp/x", 4150)
    lookupd.known.add(odd)
    dialled: list[str] = []
    seen = Seen()

    async def my_connect(address: str, factory: Any) -> Any:
        from flintmq.client.connection import connect

        dialled.append(address)
        return await connect(address, factory)

    async def main() -> None:
        async with Consumer("t", "c", lookupd=lookupd.name, handler=seen, connect=my_connect):
            good.store(b"t", b"x")
            await until(lambda: seen.bodies)

    sim.run(main(), 20)
    assert set(dialled) == {good.name}
    assert "/tmp/x:4150" in caplog.text


def test_a_broker_may_not_fill_the_memory_with_few_large_messages(sim: Sim) -> None:
    """At RDY 1 it sends all it has, and keeps below the limit of messages."""
    nsqd = sim.nsqd()
    for _ in range(40):
        nsqd.store(b"t", bytes(100_000))
    errors: list[str] = []
    held = 0

    async def main() -> None:
        nonlocal held
        options: dict[str, Any] = {"on_error": lambda address, error: errors.append(str(error))}
        async with Consumer("t", "c", nsqd=nsqd.name, max_frame_size=1_000_000, **options) as consumer:
            await until(lambda: nsqd.sessions and nsqd.sessions[0].rdy)
            session = nsqd.sessions[0]
            for number in range(2, 41):
                # As many as one network buffer has room for.
                session.rdy = number
                nsqd.pump(nsqd.channel(b"t", b"c"))
                await asyncio.sleep(0.01)
                held = max(held, consumer.in_flight)

    sim.run(main(), 20)
    assert "more messages than were asked for" in errors[0]
    assert held < 20
