"""What clients must live through, in virtual time: brokers and nsqlookupds that fail, and functions of the user's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from flintmq.client import Consumer, Message, Producer
from flintmq.errors import ConnectError, FlintError, OptionError, PublishError
from simulation.loop import Loop
from simulation.network import Network
from simulation.nodes import Lookupd, Nsqd
from simulation.world import World


class Sim:
    """Simulated brokers and lookupds, and the loop that the client runs on."""

    def __init__(self) -> None:
        self.world = World(1)
        self.network = Network(self.world)
        self.loop = Loop(self.world, self.network)
        self.brokers: list[Nsqd] = []
        self.lookupds: list[Lookupd] = []

    def nsqd(self, *lookupds: Lookupd, start: bool = True, **attributes: Any) -> Nsqd:
        nsqd = Nsqd(self.world, self.network, f"10.0.0.{len(self.brokers) + 1}", len(self.brokers))
        for name, value in attributes.items():
            setattr(nsqd, name, value)
        nsqd.lookupds = list(lookupds)
        nsqd.channel(b"t", b"c")
        self.brokers.append(nsqd)
        if start:
            nsqd.start()
        return nsqd

    def lookupd(self) -> Lookupd:
        lookupd = Lookupd(self.world, self.network, f"10.0.1.{len(self.lookupds) + 1}")
        self.lookupds.append(lookupd)
        lookupd.start()
        return lookupd

    def run(self, work: Coroutine[Any, Any, Any], seconds: float = 1000) -> Any:
        return self.loop.run(work, seconds)


@pytest.fixture
def sim() -> Iterator[Sim]:
    random.seed(7)
    sim = Sim()
    yield sim
    assert sim.world.violations == []
    sim.loop.close()


async def until(condition: Callable[[], object], seconds: float = 100) -> float:
    """Wait in virtual time; how long it took."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    while not condition():
        assert loop.time() - begin < seconds, f"not true after {seconds:g} s"
        await asyncio.sleep(0.02)
    return loop.time() - begin


class Seen:
    """A handler that notes bodies."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        self.bodies.append(message.body)


# --- Brokers that go and come back


@pytest.mark.parametrize("seconds_down", [0.3, 2, 30, 100])
def test_clients_are_back_within_three_seconds_of_a_restart(sim: Sim, seconds_down: float) -> None:
    """nsqlookupd forgets a broker that stops; the client must not forget it as fast, nor wait for the next poll."""
    lookupd = sim.lookupd()
    nsqd = sim.nsqd(lookupd)
    seen = Seen()

    async def main() -> float:
        consumer = Consumer("t", "c", lookupd=lookupd.name, handler=seen)
        producer = Producer(lookupd=lookupd.name, timeout=150)
        async with consumer, producer:
            await until(lambda: consumer.connections)
            nsqd.kill()
            await asyncio.sleep(seconds_down)
            publish = asyncio.create_task(producer.publish("t", b"after"))
            nsqd.start()
            took = await until(lambda: seen.bodies)
            await publish
            return took

    assert sim.run(main()) < 3


@pytest.mark.parametrize("restarts", [False, True])
def test_a_lookupd_that_hangs_does_not_hold_up_what_the_other_says(sim: Sim, restarts: bool) -> None:
    lookupds = [sim.lookupd(), sim.lookupd()]
    lookupds[1].mood = "silent"
    nsqd = sim.nsqd(*lookupds)

    async def main() -> None:
        names = [lookupd.name for lookupd in lookupds]
        async with Consumer("t", "c", lookupd=names, lookupd_timeout=5, handler=Seen()) as consumer:
            assert await until(lambda: consumer.connections) < 0.5
            if restarts:
                nsqd.kill()
                await asyncio.sleep(40)
                nsqd.start()
                assert await until(lambda: consumer.connections) < 6
        async with Producer(lookupd=names, lookupd_timeout=5) as producer:
            assert producer.connections == [nsqd.name]

    sim.run(main())


def test_a_broker_is_not_dropped_because_its_lookupd_is_down(sim: Sim) -> None:
    knowing, other = sim.lookupd(), sim.lookupd()
    nsqd = sim.nsqd(knowing)
    seen = Seen()

    async def main() -> None:
        async with Consumer("t", "c", lookupd=[knowing.name, other.name], handler=seen) as consumer:
            await until(lambda: consumer.connections)
            knowing.kill()
            nsqd.kill()
            # Much longer than a broker is dialled that nobody names.
            await asyncio.sleep(1000)
            nsqd.start()
            nsqd.store(b"t", b"x")
            await until(lambda: seen.bodies, 16)

    sim.run(main(), 2000)


def test_a_broker_that_nobody_names_any_more_is_forgotten_at_last(sim: Sim) -> None:
    lookupd = sim.lookupd()
    gone, there = sim.nsqd(lookupd), sim.nsqd(lookupd)

    async def main() -> None:
        async with Consumer("t", "c", lookupd=lookupd.name, handler=Seen()) as consumer:
            await until(lambda: len(consumer.connections) == 2)
            gone.kill()
            await asyncio.sleep(400)
            names = {task.get_name() for task in asyncio.all_tasks()}
            assert f"flintmq connection to {there.name}" in names
            assert f"flintmq connection to {gone.name}" not in names

    sim.run(main(), 2000)


def test_a_producer_waits_for_a_broker_that_is_not_up_yet(sim: Sim) -> None:
    nsqd = sim.nsqd(start=False)
    sim.world.after(7, nsqd.start)

    async def main() -> None:
        async with Producer(nsqd.name, timeout=10) as producer:
            await producer.publish("t", b"x")

    sim.run(main(), 15)
    assert nsqd.log[b"t"] == [b"x"]


def test_refused_publishes_do_not_hold_up_others(sim: Sim) -> None:
    """A broker closes the connection after a refusal. That is not a dial that failed."""
    nsqd = sim.nsqd(max_msg_size=1000)
    waits: list[float] = []

    async def main() -> None:
        async with Producer(nsqd.name) as producer:

            async def refused() -> None:
                for _ in range(75):
                    with pytest.raises(PublishError, match="E_BAD_MESSAGE"):
                        await producer.publish("t", bytes(5000))
                    await asyncio.sleep(1)

            bad = asyncio.create_task(refused())
            while not bad.done():
                begin = asyncio.get_running_loop().time()
                await producer.publish("t", b"good")
                waits.append(asyncio.get_running_loop().time() - begin)
                await asyncio.sleep(0.1)
            await bad

    sim.run(main())
    blocked = sum(wait for wait in waits if wait > 0.05)
    assert blocked < 2, f"good publishes were blocked for {blocked:.0f} of {sum(waits) + 0.1 * len(waits):.0f} s"


def test_a_name_that_cannot_be_does_not_end_discovery(sim: Sim) -> None:
    lookupd = sim.lookupd()
    nsqd = sim.nsqd(lookupd)
    names = [lookupd.name, "bad..name:4161", f"{'x' * 70}.example:4161", "nobody.example:4161"]
    errors: list[str] = []

    async def heard(address: str, error: Exception) -> None:
        errors.append(address)

    async def main() -> None:
        async with Producer(lookupd=names, timeout=5, on_error=heard) as producer:
            await producer.publish("t", b"x")

    sim.run(main(), 20)
    assert nsqd.log[b"t"] == [b"x"]
    assert len(set(errors)) == 3


def test_a_producer_of_bad_names_alone_says_so(sim: Sim) -> None:
    async def main() -> None:
        producer = Producer(lookupd="bad..name:4161", timeout=5)
        with pytest.raises(ConnectError, match=r"bad\.\.name"):
            await producer.start()
        await producer.close()
        await asyncio.sleep(1)
        assert len(asyncio.all_tasks()) == 1

    sim.run(main(), 20)


# --- Handlers that do anything


class Odd(BaseException):
    pass


async def _inner_cancel() -> None:
    inner = asyncio.ensure_future(asyncio.sleep(10))
    asyncio.get_running_loop().call_later(0.01, inner.cancel)
    await inner


@pytest.mark.parametrize("error", [asyncio.CancelledError, Odd, GeneratorExit, "inner cancel"])
def test_a_handler_that_lets_anything_out_has_its_message_requeued(
    sim: Sim, error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = sim.nsqd()
    seen: list[int] = []

    async def handler(message: Message) -> None:
        seen.append(message.attempts)
        if message.attempts == 1:
            if isinstance(error, str):
                await _inner_cancel()
            raise error

    async def main() -> None:
        options: dict[str, Any] = {"default_requeue_delay": 0.1, "max_backoff_duration": 0}
        async with Consumer("t", "c", nsqd=nsqd.name, handler=handler, **options):
            nsqd.store(b"t", b"x")
            await until(lambda: seen == [1, 2], 5)
        assert "has died" not in caplog.text

    sim.run(main())


@pytest.mark.parametrize("error", [StopIteration, SystemExit, Odd, asyncio.CancelledError, ZeroDivisionError])
def test_so_has_a_plain_one(sim: Sim, error: type[BaseException]) -> None:
    nsqd = sim.nsqd()
    seen: list[int] = []

    def handler(message: Message) -> None:
        seen.append(message.attempts)
        if message.attempts == 1:
            raise error

    async def main() -> None:
        options: dict[str, Any] = {"default_requeue_delay": 0.1, "max_backoff_duration": 0}
        async with Consumer("t", "c", nsqd=nsqd.name, handler=handler, **options):
            nsqd.store(b"t", b"x")
            await until(lambda: seen == [1, 2], 5)

    sim.run(main())


@pytest.mark.parametrize("error", [asyncio.CancelledError, StopIteration, Odd])
def test_so_has_on_give_up(sim: Sim, error: type[BaseException]) -> None:
    nsqd = sim.nsqd()
    given_up: list[bytes] = []

    def on_give_up(message: Message) -> None:
        given_up.append(message.body)
        if len(given_up) == 1:
            raise error

    async def main() -> None:
        options: dict[str, Any] = {"default_requeue_delay": 0.1, "max_backoff_duration": 0, "max_attempts": 1}
        async with Consumer("t", "c", nsqd=nsqd.name, handler=_fails, on_give_up=on_give_up, **options):
            nsqd.store(b"t", b"x")
            await until(lambda: given_up == [b"x", b"x"], 5)

    sim.run(main())


async def _fails(message: Message) -> None:
    raise ZeroDivisionError


def _generator(message: Message) -> Iterator[None]:
    yield


async def _async_generator(message: Message) -> AsyncIterator[None]:
    yield


class _Called:
    def __call__(self, message: Message) -> Iterator[None]:
        yield


@pytest.mark.parametrize("function", [_generator, _async_generator, _Called()])
@pytest.mark.parametrize("option", ["handler", "on_give_up", "on_error", "on_heartbeat"])
def test_functions_whose_code_would_not_run_are_refused(option: str, function: Any) -> None:
    with pytest.raises(OptionError, match=f"{option} is a generator function"):
        Consumer("t", "c", nsqd="127.0.0.1:1", **{option: function})


def _failing_future(message: Message) -> Any:
    failed: concurrent.futures.Future[None] = concurrent.futures.Future()
    failed.set_exception(ZeroDivisionError("in a future"))
    return failed


async def _failing_future_later(message: Message) -> Any:
    return _failing_future(message)


@pytest.mark.parametrize(
    "handler", [_failing_future, _failing_future_later, lambda message: _generator(message), lambda m: _fails(m)]
)
def test_nothing_is_finished_whose_code_failed_or_never_ran(sim: Sim, handler: Any) -> None:
    nsqd = sim.nsqd()
    finished: list[bytes] = []
    nsqd.finished_hook = finished.append

    async def main() -> None:
        async with Consumer("t", "c", nsqd=nsqd.name, handler=handler) as consumer:
            nsqd.store(b"t", b"x")
            await until(lambda: consumer.stats.finished + consumer.stats.requeued)
            assert (consumer.stats.finished, consumer.stats.requeued) == (0, 1)

    sim.run(main())
    assert finished == []


def test_plain_callbacks_do_not_run_on_the_event_loop(sim: Sim) -> None:
    """They may block."""
    nsqd = sim.nsqd()
    called: dict[str, bool] = {}

    def note(name: str) -> Callable[..., None]:
        def function(*_: object) -> None:
            called[name] = asyncio._get_running_loop() is None

        return function

    async def main() -> None:
        names = ("on_give_up", "on_error", "on_heartbeat")
        options: dict[str, Any] = {name: note(name) for name in names}
        options |= {"max_attempts": 1, "default_requeue_delay": 0.1, "heartbeat_interval": 1, "max_backoff_duration": 0}
        async with Consumer("t", "c", nsqd=[nsqd.name, "10.0.0.9:4150"], handler=_fails, **options):
            nsqd.store(b"t", b"x")
            await until(lambda: set(called) == set(names), 20)

    sim.run(main())
    assert all(called.values()), called


def test_a_backoff_strategy_that_fails_costs_nothing(sim: Sim, caplog: pytest.LogCaptureFixture) -> None:
    nsqd = sim.nsqd()
    seen: list[int] = []

    async def handler(message: Message) -> None:
        seen.append(message.attempts)
        if message.attempts < 3:
            raise ZeroDivisionError

    def strategy(level: int) -> float:
        raise LookupError

    async def main() -> None:
        options: dict[str, Any] = {
            "default_requeue_delay": 0.1,
            "backoff_multiplier": 0.1,
            "backoff_strategy": strategy,
        }
        async with Consumer("t", "c", nsqd=nsqd.name, handler=handler, **options) as consumer:
            nsqd.store(b"t", b"x")
            await until(lambda: consumer.stats.finished, 10)

    sim.run(main())
    assert seen == [1, 2, 3]
    assert "backoff_strategy(1) failed" in caplog.text


# --- Messages in flight


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("version", ["1.3.0", "0.2.30"])
def test_an_unanswered_message_starves_nobody_longer_than_its_time(sim: Sim, count: int, version: str) -> None:
    """With fewer places than brokers, one that is never answered must not keep its place for ever."""
    brokers = [sim.nsqd(msg_timeout=5.0, version=version) for _ in range(count)]
    kept: list[Message] = []
    seen: list[bytes] = []

    async def handler(message: Message) -> None:
        if message.body == b"never":
            message.answer_later()
            kept.append(message)
        else:
            seen.append(message.body)

    async def main() -> None:
        names = [nsqd.name for nsqd in brokers]
        async with Consumer("t", "c", nsqd=names, handler=handler, max_in_flight=1, max_attempts=1):
            brokers[0].store(b"t", b"never")
            await until(lambda: kept)
            for nsqd in brokers:
                nsqd.store(b"t", nsqd.name.encode())
            await until(lambda: len(seen) == count, 30)

    sim.run(main())


@pytest.mark.parametrize("seconds_late", [0, 1, 5])
def test_automatic_touch_begins_when_a_broker_comes(sim: Sim, seconds_late: float) -> None:
    nsqd = sim.nsqd(start=False, msg_timeout=2.0)
    timed_out: list[bytes] = []
    nsqd.timed_out_hook = lambda session, body: timed_out.append(body)
    sim.world.after(seconds_late, nsqd.start)

    async def handler(message: Message) -> None:
        await asyncio.sleep(9)

    async def main() -> None:
        async with Consumer("t", "c", nsqd=nsqd.name, handler=handler, auto_touch=True) as consumer:
            nsqd.store(b"t", b"x")
            await until(lambda: consumer.stats.finished, 40)

    sim.run(main())
    assert timed_out == []


def test_a_touch_that_comes_too_late_is_not_sent(sim: Sim) -> None:
    nsqd = sim.nsqd(msg_timeout=2.0)

    async def main() -> None:
        async with Consumer("t", "c", nsqd=nsqd.name) as consumer:
            nsqd.store(b"t", b"x")
            message = await consumer.get()
            deadline = message.deadline
            await asyncio.sleep(2.5)
            message.touch()
            assert message.deadline == deadline

    sim.run(main())


# --- The end


@pytest.mark.parametrize("waiting", [0, 3])
def test_close_does_not_wait_when_all_is_done(sim: Sim, waiting: int) -> None:
    """Messages that wait here run out of time while a handler works; then nothing is left."""
    nsqd = sim.nsqd(msg_timeout=2.0)

    async def handler(message: Message) -> None:
        await asyncio.sleep(3)

    async def main() -> float:
        options: dict[str, Any] = {"max_in_flight": 5, "stop_timeout": 15}
        consumer = Consumer("t", "c", nsqd=nsqd.name, handler=handler, **options)
        await consumer.start()
        for number in range(1 + waiting):
            nsqd.store(b"t", b"%d" % number)
        await until(lambda: consumer.stats.received == 1 + waiting)
        begin = asyncio.get_running_loop().time()
        await consumer.close()
        return asyncio.get_running_loop().time() - begin

    took = sim.run(main())
    assert took < 3.5, f"close() took {took:.1f} s, the handler 3 s"


def test_close_does_not_wait_for_an_answer_that_would_come_too_late(sim: Sim) -> None:
    nsqd = sim.nsqd(msg_timeout=2.0)

    async def handler(message: Message) -> None:
        message.answer_later()

    async def main() -> float:
        consumer = Consumer("t", "c", nsqd=nsqd.name, handler=handler, stop_timeout=15)
        await consumer.start()
        nsqd.store(b"t", b"x")
        await until(lambda: consumer.stats.received)
        begin = asyncio.get_running_loop().time()
        await consumer.close()
        return asyncio.get_running_loop().time() - begin

    assert sim.run(main()) < 2.5


async def _unstoppable(message: Message) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + 200
    while (left := end - loop.time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)


def test_a_handler_that_cannot_be_cancelled_does_not_hold_up_close(sim: Sim) -> None:
    nsqd = sim.nsqd()

    async def main() -> float:
        consumer = Consumer("t", "c", nsqd=nsqd.name, handler=_unstoppable, stop_timeout=4)
        await consumer.start()
        nsqd.store(b"t", b"x")
        await until(lambda: consumer.stats.received)
        begin = asyncio.get_running_loop().time()
        await consumer.close()
        return asyncio.get_running_loop().time() - begin

    assert sim.run(main(), 100) < 8
    sim.world.run_for(300)


@pytest.mark.parametrize("kind", ["consumer", "producer"])
def test_a_close_that_is_cancelled_ends(sim: Sim, kind: str) -> None:
    nsqd = sim.nsqd()

    async def main() -> float:
        client: Consumer | Producer
        if kind == "consumer":
            client = Consumer("t", "c", nsqd=[nsqd.name, "10.0.0.9:4150"], handler=_unstoppable, stop_timeout=60)
        else:
            client = Producer([nsqd.name, "10.0.0.9:4150"], timeout=60)
        await client.start()
        nsqd.store(b"t", b"x")
        await until(lambda: client.connections)
        await asyncio.sleep(1)
        nsqd.unanswering = True
        publish = asyncio.create_task(client.publish("t", b"x")) if isinstance(client, Producer) else None
        await asyncio.sleep(0)
        begin = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.close()
        took = asyncio.get_running_loop().time() - begin
        if publish is not None:
            with pytest.raises(PublishError):
                await publish
        return took

    assert sim.run(main(), 30) < 2
    sim.world.run_for(300)
    ours = [end for end in sim.world.descriptors if getattr(end, "name", ("",))[0] == sim.loop.host]
    assert ours == []


@pytest.mark.parametrize("moment", range(1, 12))
def test_no_moment_of_a_close_swallows_a_cancellation(sim: Sim, moment: int) -> None:
    """Cancelled at the first step of `close`, the second, …: it ends as cancelled."""
    nsqd = sim.nsqd()

    async def main() -> None:
        consumer = Consumer("t", "c", nsqd=[nsqd.name, "10.0.0.9:4150"], handler=Seen(), lookupd="10.0.0.8:4161")
        await consumer.start()
        await until(lambda: consumer.connections)
        closing = asyncio.create_task(consumer.close())
        for _ in range(moment):
            await asyncio.sleep(0)
        if closing.done():
            return
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()

    sim.run(main(), 60)
    sim.world.run_for(60)
    assert asyncio.all_tasks(sim.loop) == set()


# --- Publishing


def test_memory_is_bounded_although_no_publish_is_answered(sim: Sim) -> None:
    """The broker reads everything, sends heartbeats and answers nothing."""
    nsqd = sim.nsqd(unanswering=True)
    limit = 1 << 20
    most = 0

    def held(producer: Producer) -> int:
        outlets = producer._outlets.values()
        return sum(len(body) for outlet in outlets for command in outlet.unanswered for body in command.bodies)

    async def main() -> None:
        nonlocal most
        options: dict[str, Any] = {"timeout": 1, "max_pending_bytes": limit, "heartbeat_interval": 1}
        async with Producer(nsqd.name, **options) as producer:

            async def publish() -> None:
                for _ in range(30):
                    with contextlib.suppress(FlintError):
                        await producer.publish("t", bytes(50_000))

            tasks = [asyncio.create_task(publish()) for _ in range(30)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.1)
                sent = sum(len(body) for body in nsqd.log.get(b"t", ()))
                most = max(most, sent, held(producer))
                if most > 3 * limit:
                    break
            for task in tasks:
                task.cancel()

    sim.run(main())
    assert most < 1.2 * limit, f"{most / limit:.1f} times max_pending_bytes"


def test_a_broker_that_answers_no_publish_is_dialled_anew(sim: Sim) -> None:
    nsqd = sim.nsqd(unanswering=True)

    async def main() -> None:
        options: dict[str, Any] = {"timeout": 2, "read_timeout": 6, "heartbeat_interval": 2}
        async with Producer(nsqd.name, **options) as producer:
            before = list(nsqd.sessions)
            for _ in range(5):
                with pytest.raises(PublishError):
                    await producer.publish("t", b"x")
            await until(lambda: nsqd.sessions and nsqd.sessions != before, 5)

    sim.run(main())


def test_a_producer_that_is_full_recovers_from_a_broker_that_answers_nothing(sim: Sim) -> None:
    nsqd = sim.nsqd(unanswering=True)

    async def main() -> None:
        options: dict[str, Any] = {"timeout": 2, "read_timeout": 6, "heartbeat_interval": 2, "max_pending_bytes": 1000}
        async with Producer(nsqd.name, **options) as producer:
            with pytest.raises(PublishError):
                await producer.publish("t", bytes(2000))
            nsqd.unanswering = False

            async def publish() -> None:
                while True:
                    with contextlib.suppress(ConnectError):
                        await producer.publish("t", b"x")
                        return

            async with asyncio.timeout(20):
                await publish()

    sim.run(main())


@pytest.mark.parametrize("linger", [0, 0.01])
@pytest.mark.parametrize("refused", [False, True])
def test_publishes_of_one_task_are_stored_in_their_order(sim: Sim, linger: float, refused: bool) -> None:
    nsqd = sim.nsqd(max_msg_size=200_000)
    rng = random.Random(5)
    expected: list[bytes] = []

    async def main() -> None:
        async with Producer(nsqd.name, linger=linger) as producer:
            for _ in range(30):
                calls = []
                for _ in range(8):
                    number = b"%d " % len(expected)
                    kind = rng.choice(["small", "large", "many", "defer", "refused" if refused else "small"])
                    if kind == "refused":
                        calls.append(producer.publish("t", bytes(300_000)))
                    elif kind == "many":
                        bodies = [b"%d " % (len(expected) + n) for n in range(3)]
                        expected.extend(bodies)
                        calls.append(producer.publish_many("t", bodies))
                    elif kind == "defer":
                        expected.append(number)
                        calls.append(producer.defer("t", number, 1))
                    else:
                        expected.append(number + bytes(100_000 if kind == "large" else 1))
                        calls.append(producer.publish("t", expected[-1]))
                tasks = [asyncio.create_task(call) for call in calls]
                await asyncio.wait(tasks)
                assert all(task.exception() is None or isinstance(task.exception(), PublishError) for task in tasks)

    sim.run(main())
    assert [body[:8] for body in nsqd.log[b"t"]] == [body[:8] for body in expected]


def test_what_is_sent_again_goes_before_what_was_published_later(sim: Sim) -> None:
    """In the moment between a refusal and the end of its connection."""
    nsqd = sim.nsqd(max_msg_size=1000)

    async def main() -> None:
        async with Producer(nsqd.name) as producer:

            async def refused() -> None:
                with pytest.raises(PublishError):
                    await producer.publish_many("t", [bytes(5000)])
                await producer.publish_many("t", [b"later"])

            await asyncio.gather(refused(), producer.publish_many("t", [b"behind"]))

    sim.run(main())
    assert nsqd.log[b"t"] == [b"behind", b"later"]


def test_a_message_that_is_here_is_had_without_waiting(sim: Sim) -> None:
    nsqd = sim.nsqd()

    async def main() -> None:
        async with Consumer("t", "c", nsqd=nsqd.name, max_in_flight=2) as consumer:
            for body in (b"a", b"b"):
                nsqd.store(b"t", body)
                # However long it has been here, and however long ago the last one was taken.
                await asyncio.sleep(1)
                assert (await consumer.get(timeout=0)).body == body
            with pytest.raises(TimeoutError):
                await consumer.get(timeout=0)

    sim.run(main())


def test_close_waits_for_publishes_while_a_broker_is_away(sim: Sim) -> None:
    nsqd = sim.nsqd()

    async def main() -> None:
        producer = Producer(nsqd.name, timeout=20)
        await producer.start()
        nsqd.kill()
        await asyncio.sleep(1)
        publishes = [asyncio.create_task(producer.publish("t", b"%d" % n)) for n in range(3)]
        await asyncio.sleep(0)
        sim.world.after(4, nsqd.start)
        await producer.close()
        await asyncio.gather(*publishes)

    sim.run(main())
    assert nsqd.log[b"t"] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("kind", [Consumer, Producer])
@pytest.mark.parametrize("interval", [0, -1, 0.001, float("nan")])
def test_a_poll_interval_of_nothing_is_refused(kind: Any, interval: float) -> None:
    names = ("t", "c") if kind is Consumer else ()
    with pytest.raises(OptionError, match="lookupd_poll_interval"):
        kind(*names, lookupd="127.0.0.1:4161", lookupd_poll_interval=interval)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
