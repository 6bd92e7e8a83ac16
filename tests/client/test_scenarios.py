"""What a client must live through, with real brokers: ours, and NSQ's own where it is there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from flintmq.client import Consumer, Message, Producer
from flintmq.errors import ConnectError, PublishError, PublishUnknownError
from flintmq.testing import NsqBroker, NsqLookupd

from .daemons import Lookupd, Nsqd
from .fakes import MovableClock, until

StartNsqd = Callable[..., Nsqd]


@pytest.fixture(params=["flintmq", "go"])
def start_nsqd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartNsqd]:
    started: list[Nsqd] = []

    def start(*flags: str) -> Nsqd:
        started.append(Nsqd(request.param, tmp_path / f"nsqd-{len(started)}", *flags))
        started[-1].start()
        return started[-1]

    yield start
    for nsqd in started:
        nsqd.stop()


@pytest.fixture
def nsqd(start_nsqd: StartNsqd) -> Nsqd:
    return start_nsqd()


@pytest.fixture(params=["flintmq", "go"])
def lookupd(request: pytest.FixtureRequest) -> Iterator[Lookupd]:
    daemon = Lookupd(request.param)
    daemon.start()
    yield daemon
    daemon.stop()


async def publish(nsqd: Nsqd, topic: str, *bodies: bytes) -> None:
    async with Producer(nsqd.address) as producer:
        await producer.publish_many(topic, bodies)


def numbered(prefix: bytes, count: int) -> list[bytes]:
    return [b"%b %d" % (prefix, number) for number in range(count)]


@contextlib.asynccontextmanager
async def collecting(**options: object) -> AsyncIterator[Counter[bytes]]:
    """A consumer that counts what it is given."""
    found: Counter[bytes] = Counter()

    async def handler(message: Message) -> None:
        found[message.body] += 1

    async with Consumer("t", "c", handler=handler, **options):  # type: ignore[arg-type]
        yield found


# --- Finding brokers


async def test_brokers_are_found_and_new_ones_too(start_nsqd: StartNsqd, lookupd: Lookupd) -> None:
    first, second, third = start_nsqd(), start_nsqd(), start_nsqd()
    options = {"lookupd": lookupd.at["HTTP"], "lookupd_poll_interval": 0.1, "max_in_flight": 10}
    async with collecting(**options) as found, contextlib.AsyncExitStack() as registered:
        # The topic is not known at all: no reason to give up.
        for number, nsqd in enumerate((first, second, third)):
            await publish(nsqd, "t", *numbered(b"%d:" % number, 20))
            await registered.enter_async_context(lookupd.registered(nsqd, "t"))
            await until(lambda n=number: len(found) == 20 * (n + 1))
    assert set(found.values()) == {1}


async def test_a_lookupd_that_is_gone_costs_no_connection(start_nsqd: StartNsqd, lookupd: Lookupd) -> None:
    first, second = start_nsqd(), start_nsqd()
    options = {"lookupd": [lookupd.at["HTTP"], "127.0.0.1:1"], "lookupd_poll_interval": 0.05, "max_in_flight": 10}
    errors: list[str] = []
    async with collecting(on_error=lambda address, error: errors.append(str(error)), **options) as found:
        async with lookupd.registered(first, "t"):
            await publish(first, "t", b"before")
            await until(lambda: found == {b"before": 1})
        lookupd.kill()
        errors.clear()
        await until(lambda: any("no nsqlookupd answered" in error for error in errors))
        await publish(first, "t", b"meanwhile")
        await until(lambda: len(found) == 2)
        lookupd.start()
        async with lookupd.registered(second, "t"):
            await publish(second, "t", b"after")
            await until(lambda: len(found) == 3)


async def test_a_producer_finds_brokers_too(start_nsqd: StartNsqd, lookupd: Lookupd) -> None:
    nsqd = start_nsqd()
    with pytest.raises(ConnectError, match="know of none"):
        async with Producer(lookupd=lookupd.at["HTTP"], timeout=1):
            pass
    async with lookupd.registered(nsqd, "any"), Producer(lookupd=lookupd.at["HTTP"]) as producer:
        await producer.publish("t", b"x")
        async with collecting(nsqd=nsqd.address) as found:
            await until(lambda: found == {b"x": 1})


# --- RDY and backoff


async def test_one_message_in_flight_over_three_brokers(start_nsqd: StartNsqd) -> None:
    nsqds = [start_nsqd() for _ in range(3)]
    for number, nsqd in enumerate(nsqds):
        await publish(nsqd, "t", *numbered(b"%d:" % number, 20))
    found: Counter[bytes] = Counter()
    running = most = 0

    async def handler(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running, consumer.in_flight)
        await asyncio.sleep(0)
        found[message.body] += 1
        running -= 1

    options = {"low_rdy_idle_timeout": 0.05, "low_rdy_timeout": 0.1, "rdy_redistribute_interval": 0.02}
    addresses = [nsqd.address for nsqd in nsqds]
    # Handlers for three, so that only RDY keeps it at one.
    async with Consumer(
        "t", "c", nsqd=addresses, handler=handler, concurrency=3, max_in_flight=1, **options
    ) as consumer:
        await until(lambda: len(found) == 60)
    assert most == 1
    assert set(found.values()) == {1}


async def test_backoff_stops_the_flow_and_lets_one_through(nsqd: Nsqd, clock: MovableClock) -> None:
    await publish(nsqd, "t", *numbered(b"", 50))
    attempts: list[int] = []
    healthy = False

    async def handler(message: Message) -> None:
        attempts.append(message.attempts)
        if not healthy:
            message.requeue(0)

    async with Consumer(
        "t", "c", nsqd=nsqd.address, handler=handler, max_in_flight=5, max_attempts=0, clock=clock
    ) as consumer:
        # What was under way comes still; then it is quiet.
        await until(lambda: consumer.flow.is_waiting and consumer.in_flight == 0)
        seen = consumer.stats.received
        for seconds in (2, 4, 8):
            clock.advance(seconds - 0.01)
            await asyncio.sleep(0.05)  # for messages that must not come
            assert consumer.stats.received == seen
            clock.advance(0.01)
            await until(lambda n=seen: consumer.stats.received == n + 1 and consumer.flow.is_waiting)
            seen += 1
        healthy = True
        for seconds in (16, 8, 4, 2):
            assert consumer.flow.is_waiting
            clock.advance(seconds)
            await until(lambda n=seen: consumer.stats.received > n)
            seen += 1
        await until(lambda: consumer.stats.finished == 50)


# --- Timeouts


async def test_what_is_not_answered_in_time_comes_again(nsqd: Nsqd) -> None:
    await publish(nsqd, "t", b"x")
    async with Consumer("t", "c", nsqd=nsqd.address, msg_timeout=1) as consumer:
        first = await anext(consumer)
        # A second one, since the first message is still counted as ours here.
        async with Consumer("t", "c", nsqd=nsqd.address) as other:
            again = await anext(other)
            assert (again.id, again.attempts) == (first.id, 2)
            again.finish()
        first.finish()  # too late: reported, and harmless
        await publish(nsqd, "t", b"y")
        assert (await anext(consumer)).body == b"y"


@pytest.mark.parametrize("auto", [True, False], ids=["automatic", "by hand"])
async def test_touch_keeps_a_message(nsqd: Nsqd, auto: bool) -> None:
    longest_pause = 0.0
    found: list[tuple[bytes, int]] = []

    async def handler(message: Message) -> None:
        nonlocal longest_pause
        found.append((message.body, message.attempts))
        before = time.monotonic()
        # Much longer than the broker would wait. The Go daemon looks at a new channel only after 5 seconds.
        for _ in range(70 if nsqd.kind == "go" else 25):
            await asyncio.sleep(0.1)
            longest_pause = max(longest_pause, time.monotonic() - before)
            before = time.monotonic()
            if not auto:
                message.touch()

    for _ in range(5):
        longest_pause = 0.0
        found.clear()
        await publish(nsqd, "t", b"long work")
        options = {"handler": handler, "max_in_flight": 2, "concurrency": 2, "msg_timeout": 1, "auto_touch": auto}
        async with Consumer("t", "c", nsqd=nsqd.address, **options) as consumer:  # type: ignore[arg-type]
            await until(lambda c=consumer: c.stats.finished)
        # A machine that stood still for so long let nobody touch in time; that says nothing.
        if longest_pause < 0.4:
            break
    assert found == [(b"long work", 1)]


# --- Ends


async def test_stopping_while_busy_loses_and_delays_nothing(nsqd: Nsqd) -> None:
    bodies = numbered(b"", 500)
    await publish(nsqd, "t", *bodies)
    found: Counter[bytes] = Counter()

    async def slow(message: Message) -> None:
        await asyncio.sleep(0.001)
        found[message.body] += 1

    async with Consumer("t", "c", nsqd=nsqd.address, handler=slow, concurrency=5, max_in_flight=100) as consumer:
        await until(lambda: consumer.stats.finished > 20)
    assert consumer.stats.finished == consumer.stats.received < 500
    async with Consumer("t", "c", nsqd=nsqd.address, max_in_flight=100) as consumer:
        await anext(consumer)  # taken and not answered; those behind it wait
        await until(lambda: consumer.in_flight > 20)
    # The message timeout is a minute: what was given back comes long before.
    async with asyncio.timeout(30):
        async with collecting(nsqd=nsqd.address, max_in_flight=100) as rest:
            await until(lambda: len(found | rest) == 500)
    assert set((found + rest).values()) == {1}


async def test_a_broker_is_killed_and_comes_back(start_nsqd: StartNsqd) -> None:
    nsqd = start_nsqd("--mem-queue-size=0")
    stored: list[bytes] = []
    unknown: list[bytes] = []
    running = True

    async def keep_publishing(producer: Producer) -> None:
        number = 0
        while running:
            body = b"%d" % number
            number += 1
            try:
                await producer.publish("t", body)
                stored.append(body)
            except PublishUnknownError:
                unknown.append(body)
            await asyncio.sleep(0.001)

    options = {"reconnect_delay": 0.02}
    async with (
        collecting(nsqd=nsqd.address, max_in_flight=50, **options) as found,
        Producer(nsqd.address, timeout=60, **options) as producer,
    ):
        task = asyncio.create_task(keep_publishing(producer))
        for _ in range(2):
            before = len(found)
            await until(lambda n=before: len(found) > n + 50)
            nsqd.kill()
            nsqd.start()
        before = len(found)
        await until(lambda n=before: len(found) > n + 50)
        running = False
        await task
        if nsqd.kind == "flintmq":
            # Ours loses nothing that it said OK to. The Go daemon loses what was in flight.
            await until(lambda: found.keys() >= set(stored))
    assert found.keys() <= set(stored) | set(unknown)


# --- Refusals


async def test_a_refused_publish_harms_none_before_or_behind_it(start_nsqd: StartNsqd) -> None:
    nsqd = start_nsqd("--max-msg-size=1000")
    sizes = [10, 20, 2000, 30, 40, 3000, 50]
    async with Producer(nsqd.address, reconnect_delay=0.01) as producer:
        # Joined into one command, and one command each.
        joined = [producer.publish("t", b"j" * size) for size in sizes]
        deferred = [producer.defer("t", b"d" * size, 0.01) for size in sizes]
        results = await asyncio.gather(*joined, *deferred, return_exceptions=True)
    for size, result in zip(sizes * 2, results, strict=True):
        if size <= 1000:
            assert result is None
        else:
            assert isinstance(result, PublishError) and result.code == "E_BAD_MESSAGE", result
    async with collecting(nsqd=nsqd.address, max_in_flight=20) as found:
        await until(lambda: len(found) == 10)
    assert set(found.values()) == {1}, "a publish that was never looked at is sent again, one that was stored is not"


async def test_a_deferred_message_waits(nsqd: Nsqd) -> None:
    async with Producer(nsqd.address) as producer:
        before = time.monotonic()
        await producer.defer("t", b"later", 0.3)
        await producer.publish("t", b"now")
    async with Consumer("t", "c", nsqd=nsqd.address, max_in_flight=2) as consumer:
        for body in (b"now", b"later"):
            with await anext(consumer) as message:
                assert message.body == body
    assert time.monotonic() - before >= 0.3


async def test_lookupds_that_ask_for_a_token(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("secret read\n")
    reported: list[Exception] = []
    with (
        NsqLookupd(http_auth_token_file=str(tokens)) as lookupd,
        NsqBroker(nsqlookupd_tcp_addresses=(lookupd.address,), lookupd_token_file=str(tokens)) as broker,
    ):
        broker.publish("t", b"x")
        await until(lambda: lookupd.knows(broker, "t"))
        async with Consumer("t", "c", lookupd=lookupd.http_address, lookupd_token="secret") as consumer:
            with await anext(consumer) as message:
                assert message.body == b"x"
        async with Consumer("t", "c", lookupd=lookupd.http_address, on_error=lambda _, error: reported.append(error)):
            await until(lambda: reported)
        assert "HTTP 401" in str(reported[0])
        async with Producer(lookupd=lookupd.http_address, lookupd_token="secret") as producer:
            await producer.publish("t", b"y")
