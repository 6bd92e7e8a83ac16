"""The consumer against an nsqd that says what the test tells it to say."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import signal
import threading
import time
from typing import Any

import pytest

from flintmq.client import Consumer, Message
from flintmq.errors import ClosedError, ConnectError, OptionError, ProtocolError
from flintmq.testing import NsqBroker

from .fakes import FakeConnection, FakeNsqd, MovableClock, several, until


def consumer(*nsqds: FakeNsqd, **options: Any) -> Consumer:
    return Consumer("t", "c", nsqd=[nsqd.address for nsqd in nsqds], **options)


# --- Iterating


async def test_messages_come_in_an_async_for(fake: FakeNsqd) -> None:
    async with consumer(fake, max_in_flight=5) as messages:
        connection = await fake.subscribed()
        assert connection.said(b"SUB") == [(b"SUB", b"t", b"c")]
        assert connection.ready == 5
        ids = connection.deliver(b"one", b"two", attempts=3)
        found = []
        async for message in messages:
            found.append(message)
            message.finish()
            if len(found) == 2:
                break
        assert [(m.id, m.body, m.attempts, m.timestamp) for m in found] == [
            (ids[0], b"one", 3, 1_700_000_000_000_000_000),
            (ids[1], b"two", 3, 1_700_000_000_000_000_000),
        ]
        assert found[0].address == fake.address
        await until(lambda: connection.said(b"FIN") == [(b"FIN", id) for id in ids])


async def test_attempts_are_unsigned(fake: FakeNsqd) -> None:
    async with consumer(fake, max_attempts=0) as messages:
        (await fake.subscribed()).deliver(b"x", attempts=65535)
        assert (await anext(messages)).attempts == 65535


async def test_with_a_message_finishes_it_or_requeues_it(fake: FakeNsqd) -> None:
    async with consumer(fake, max_in_flight=3, default_requeue_delay=90) as messages:
        connection = await fake.subscribed()
        good, bad, cancelled = connection.deliver(b"good", b"bad", b"cancelled", attempts=2)
        with await anext(messages):
            pass
        with contextlib.suppress(ZeroDivisionError), await anext(messages):
            raise ZeroDivisionError
        with contextlib.suppress(asyncio.CancelledError), await anext(messages):
            raise asyncio.CancelledError
        await until(lambda: len(connection.said(b"REQ")) == 2)
        assert connection.said(b"FIN") == [(b"FIN", good)]
        assert connection.said(b"REQ") == [(b"REQ", bad, b"180000"), (b"REQ", cancelled, b"0")]


async def test_only_the_first_answer_counts(fake: FakeNsqd) -> None:
    async with consumer(fake, max_in_flight=2) as messages:
        connection = await fake.subscribed()
        first, second = connection.deliver(b"x", b"y")
        message = await anext(messages)
        message.finish()
        message.finish()
        message.requeue()
        message.touch()
        (await anext(messages)).finish()
        await until(lambda: (b"FIN", second) in connection.commands)
        assert connection.said(b"FIN") == [(b"FIN", first), (b"FIN", second)]
        assert not connection.said(b"REQ") and not connection.said(b"TOUCH")


@pytest.mark.parametrize(
    ("attempts", "delay", "milliseconds"),
    [
        (1, None, b"90000"),
        (3, None, b"270000"),
        (60, None, b"900000"),
        (1, 0, b"0"),
        (1, 0.25, b"250"),
        (9, 7200, b"7200000"),
        (1, float("inf"), b"31536000000"),
    ],
)
async def test_requeue_delays(fake: FakeNsqd, attempts: int, delay: float | None, milliseconds: bytes) -> None:
    async with consumer(fake, max_attempts=0) as messages:
        connection = await fake.subscribed()
        [id] = connection.deliver(b"x", attempts=attempts)
        (await anext(messages)).requeue(delay)
        await until(lambda: connection.said(b"REQ"))
        assert connection.said(b"REQ") == [(b"REQ", id, milliseconds)]


async def test_a_negative_delay_is_refused_before_it_costs_the_connection(fake: FakeNsqd) -> None:
    async with consumer(fake) as messages:
        (await fake.subscribed()).deliver(b"x")
        message = await anext(messages)
        for delay in (-1, float("nan")):
            with pytest.raises(ValueError, match="requeued"):
                message.requeue(delay)
        assert not message.answered


async def test_leaving_gives_back_what_was_not_answered(fake: FakeNsqd) -> None:
    async with consumer(fake, max_in_flight=3) as messages:
        connection = await fake.subscribed()
        ids = connection.deliver(b"taken", b"waiting", b"waiting too")
        await anext(messages)
    await until(lambda: connection.is_over)
    assert sorted(connection.said(b"REQ")) == [(b"REQ", id, b"0") for id in ids]
    names = [command[0] for command in connection.commands]
    assert names.index(b"CLS") < names.index(b"REQ"), "or the broker would send them here again"


async def test_what_came_after_the_goodbye_is_given_back_too(fake: FakeNsqd) -> None:
    async def late(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] == b"CLS":
            connection.deliver(b"late")
        await fake.behave(connection, command)

    fake.on_command = late
    async with consumer(fake):
        connection = await fake.subscribed()
    await until(lambda: connection.is_over)
    assert [command[2] for command in connection.said(b"REQ")] == [b"0"]


async def test_stop_lets_the_loop_end_after_what_is_here(fake: FakeNsqd) -> None:
    async with consumer(fake, max_in_flight=3) as messages:
        connection = await fake.subscribed()
        ids = connection.deliver(b"a", b"b", b"c")
        found = []
        async for message in messages:
            if not found:
                messages.stop()
            found.append(message.body)
            message.finish()
    assert found == [b"a", b"b", b"c"]
    await until(lambda: connection.is_over)
    assert connection.said(b"FIN") == [(b"FIN", id) for id in ids]
    assert len(connection.said(b"CLS")) == 1


async def test_several_tasks_may_share_one_consumer(fake: FakeNsqd) -> None:
    async with consumer(fake, max_in_flight=10) as messages:
        connection = await fake.subscribed()
        waiting = [asyncio.ensure_future(anext(messages)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        connection.deliver(b"a", b"b")
        assert {message.body for message in await asyncio.gather(*waiting[1:])} == {b"a", b"b"}


async def test_a_call_that_was_cancelled_in_the_last_moment_passes_its_message_on(fake: FakeNsqd) -> None:
    async with consumer(fake, max_in_flight=10) as messages:
        connection = await fake.subscribed()
        first = asyncio.ensure_future(anext(messages))
        second = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        messages._wake(1)  # as an arriving message does, and before its task runs:
        messages._queue.append(Message(b"x"))
        first.cancel()
        assert (await second).body == b"x"
        assert first.cancelled()
        assert connection.ready == 10


# --- Handlers


async def test_a_handler_is_answered_for(fake: FakeNsqd) -> None:
    async def handler(message: Message) -> None:
        if message.body == b"bad":
            raise ZeroDivisionError
        if message.body == b"again":
            message.requeue(1.5, backoff=False)

    async with consumer(fake, handler=handler, max_in_flight=3):
        connection = await fake.subscribed()
        again, good, bad = connection.deliver(b"again", b"good", b"bad")
        await until(lambda: len(connection.said(b"REQ")) == 2)
        assert connection.said(b"REQ") == [(b"REQ", again, b"1500"), (b"REQ", bad, b"90000")]
        assert connection.said(b"FIN") == [(b"FIN", good)]


async def test_a_handler_may_answer_later(fake: FakeNsqd) -> None:
    kept: list[Message] = []

    async def handler(message: Message) -> None:
        message.answer_later()
        kept.append(message)

    async with consumer(fake, handler=handler, max_in_flight=2):
        connection = await fake.subscribed()
        first, second = connection.deliver(b"a", b"b")
        await until(lambda: len(kept) == 2)
        kept[1].finish()
        await until(lambda: connection.said(b"FIN"))
        assert connection.said(b"FIN") == [(b"FIN", second)]
        kept[0].finish()
        await until(lambda: connection.said(b"FIN")[1:] == [(b"FIN", first)])


async def test_concurrency_is_how_many_run_at_once(fake: FakeNsqd) -> None:
    running = 0
    most = 0
    go_on = asyncio.Event()

    async def handler(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1

    async with consumer(fake, handler=handler, concurrency=4, max_in_flight=10) as messages:
        connection = await fake.subscribed()
        connection.deliver(*[b"x"] * 10)
        await until(lambda: running == 4 and messages.stats.received == 10)
        go_on.set()
        await until(lambda: len(connection.said(b"FIN")) == 10)
    assert most == 4


async def test_max_in_flight_is_the_concurrency_if_not_said(fake: FakeNsqd) -> None:
    async def handler(message: Message) -> None: ...

    async with consumer(fake, handler=handler, concurrency=7):
        assert (await fake.subscribed()).ready == 7


async def test_heartbeats_are_answered_while_handlers_run(fake: FakeNsqd) -> None:
    go_on = threading.Event()

    def handler(message: Message) -> None:
        assert go_on.wait(60)

    async with consumer(fake, handler=handler):
        connection = await fake.subscribed()
        [id] = connection.deliver(b"x")
        connection.respond(b"_heartbeat_")
        await until(lambda: connection.said(b"NOP"))
        assert not connection.said(b"FIN")
        go_on.set()
        await until(lambda: connection.said(b"FIN") == [(b"FIN", id)])


async def test_a_plain_function_runs_in_a_thread_and_may_answer_from_there(fake: FakeNsqd) -> None:
    threads: set[int] = set()

    def handler(message: Message) -> None:
        threads.add(threading.get_ident())
        message.touch()
        if message.body == b"bad":
            raise ZeroDivisionError
        message.finish()

    async with consumer(fake, handler=handler, concurrency=2):
        connection = await fake.subscribed()
        connection.deliver(b"good", b"bad")
        await until(lambda: connection.said(b"FIN") and connection.said(b"REQ"))
        assert len(connection.said(b"TOUCH")) == 2
    assert threads and threading.get_ident() not in threads


async def test_commands_of_a_thread_come_before_its_result_where_that_is_passed_on_at_once(
    fake: FakeNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As asyncio does since Python 3.14 with the result of a thread that was fast."""

    def wrap(future: concurrent.futures.Future[Any], *, loop: object = None) -> asyncio.Future[Any]:
        passed_on = asyncio.get_running_loop().create_future()
        if error := future.exception(timeout=60):
            passed_on.set_exception(error)
        else:
            passed_on.set_result(future.result())
        return passed_on

    def handler(message: Message) -> None:
        message.touch()
        raise ZeroDivisionError

    monkeypatch.setattr(asyncio, "wrap_future", wrap)
    monkeypatch.setattr(asyncio.futures, "wrap_future", wrap)
    async with consumer(fake, handler=handler):
        connection = await fake.subscribed()
        connection.deliver(b"bad")
        await until(lambda: connection.said(b"REQ"))
        assert len(connection.said(b"TOUCH")) == 1


async def test_an_object_with_an_async_call_is_an_async_handler(fake: FakeNsqd) -> None:
    class Handler:
        thread = 0

        async def __call__(self, message: Message) -> None:
            self.thread = threading.get_ident()

    handler = Handler()
    async with consumer(fake, handler=handler):
        connection = await fake.subscribed()
        connection.deliver(b"x")
        await until(lambda: connection.said(b"FIN"))
    assert handler.thread == threading.get_ident()


async def test_handlers_that_never_wait_leave_the_loop_to_others(fake: FakeNsqd) -> None:
    turns = 0

    async def handler(message: Message) -> None:
        time.sleep(0.002)  # noqa: ASYNC251

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async with consumer(fake, handler=handler, max_in_flight=500):
        connection = await fake.subscribed()
        before = turns
        connection.deliver(*[b"x"] * 200)
        await until(lambda: connection.said(b"FIN"))
        assert len(connection.said(b"FIN")) < 200, "answers wait for all messages"
        await until(lambda: len(connection.said(b"FIN")) == 200)
    assert turns - before > 20
    task.cancel()


async def test_asyncio_timeouts_work_in_a_handler(fake: FakeNsqd) -> None:
    async def handler(message: Message) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)

    async with consumer(fake, handler=handler):
        connection = await fake.subscribed()
        connection.deliver(b"x")
        await until(lambda: connection.said(b"FIN"))


# --- Too many attempts


async def test_after_max_attempts_the_hook_is_called_and_the_message_finished(fake: FakeNsqd) -> None:
    handled: list[int] = []
    given_up: list[int] = []

    async def handler(message: Message) -> None:
        handled.append(message.attempts)

    async def on_give_up(message: Message) -> None:
        given_up.append(message.attempts)

    async with consumer(fake, handler=handler, on_give_up=on_give_up, max_attempts=5, max_in_flight=10) as messages:
        connection = await fake.subscribed()
        connection.deliver(b"fifth", attempts=5)
        connection.deliver(b"sixth", attempts=6)
        await until(lambda: len(connection.said(b"FIN")) == 2)
        assert messages.stats.given_up == 1
    assert (handled, given_up) == ([5], [6])


async def test_a_hook_that_fails_does_not_lose_the_message(fake: FakeNsqd, caplog: pytest.LogCaptureFixture) -> None:
    def on_give_up(message: Message) -> None:
        raise ZeroDivisionError

    async with consumer(fake, on_give_up=on_give_up, max_in_flight=2, max_backoff_duration=0) as messages:
        connection = await fake.subscribed()
        connection.deliver(b"lost cause", attempts=6)
        connection.deliver(b"next")
        assert (await anext(messages)).body == b"next"
        await until(lambda: connection.said(b"REQ"))
        assert not connection.said(b"FIN")
    assert "on_give_up failed" in caplog.text


async def test_zero_attempts_means_no_limit(fake: FakeNsqd) -> None:
    async with consumer(fake, max_attempts=0) as messages:
        (await fake.subscribed()).deliver(b"x", attempts=60000)
        assert (await anext(messages)).body == b"x"


async def test_giving_up_counts_as_a_success(fake: FakeNsqd, clock: MovableClock) -> None:
    async with consumer(fake, clock=clock, max_in_flight=10, on_give_up=lambda message: None) as messages:
        connection = await fake.subscribed()
        connection.deliver(b"x")
        (await anext(messages)).requeue()
        assert messages.flow.level == 1
        clock.advance(2)
        connection.deliver(b"x", attempts=6)
        connection.deliver(b"y")
        await anext(messages)
        assert messages.flow.level == 0


# --- Backoff on the wire


async def test_ready_goes_out_before_the_answer_that_changed_it(fake: FakeNsqd, clock: MovableClock) -> None:
    async with consumer(fake, clock=clock, max_in_flight=10) as messages:
        connection = await fake.subscribed()
        connection.deliver(b"a", b"b", b"c")
        (await anext(messages)).finish()
        (await anext(messages)).requeue()
        (await anext(messages)).requeue()
        await until(lambda: len(connection.said(b"REQ")) == 2)
        names = [command[0] for command in connection.commands[-4:]]
        assert names == [b"RDY", b"FIN", b"REQ", b"REQ"]
        assert connection.ready == 0

        clock.advance(2)
        await until(lambda: connection.ready == 1)
        connection.deliver(b"test")
        (await anext(messages)).finish()
        await until(lambda: connection.ready == 10)
        assert [command[0] for command in connection.commands[-2:]] == [b"RDY", b"FIN"]


async def test_a_crashing_handler_backs_off(fake: FakeNsqd, clock: MovableClock) -> None:
    async def handler(message: Message) -> None:
        raise ZeroDivisionError

    async with consumer(fake, clock=clock, handler=handler, max_in_flight=10):
        connection = await fake.subscribed()
        for seconds in (2, 4, 8):
            connection.deliver(b"x")
            await until(lambda: connection.ready == 0)
            clock.advance(seconds)
            await until(lambda: connection.ready == 1)


# --- Timeouts and touch


async def test_a_message_that_timed_out_before_its_turn_is_left_to_the_broker(
    fake: FakeNsqd, clock: MovableClock
) -> None:
    async with consumer(fake, clock=clock, max_in_flight=3, read_timeout=300) as messages:
        connection = await fake.subscribed()
        connection.deliver(b"old", b"touched")
        await until(lambda: messages.stats.received == 2)
        clock.advance(40)
        messages._queue[1].touch()
        clock.advance(21)
        assert (await anext(messages)).body == b"touched"
        assert messages.stats.expired == 1
        assert not connection.said(b"FIN") and not connection.said(b"REQ")
        assert messages.in_flight == 1


async def test_automatic_touch_keeps_what_is_being_worked_on(fake: FakeNsqd, clock: MovableClock) -> None:
    async with consumer(fake, clock=clock, max_in_flight=2, auto_touch=True) as messages:
        connection = await fake.subscribed()
        worked_on, waiting = connection.deliver(b"a", b"b")
        message = await anext(messages)
        for minutes in range(1, 4):
            for _ in range(60):
                clock.advance(1)
                if clock.time() % 20 == 0:
                    connection.respond(b"_heartbeat_")
                    heartbeats = len(connection.said(b"NOP"))
                    await until(lambda n=heartbeats: len(connection.said(b"NOP")) > n)
            await until(lambda n=minutes: connection.said(b"TOUCH").count((b"TOUCH", worked_on)) >= n)
        assert (b"TOUCH", waiting) in connection.commands
        message.finish()
        await until(lambda: connection.said(b"FIN"))
        assert (await anext(messages)).body == b"b", "it did not expire"


async def test_an_answer_that_came_too_late_is_reported_and_harms_nothing(
    fake: FakeNsqd, caplog: pytest.LogCaptureFixture
) -> None:
    async with consumer(fake) as messages:
        connection = await fake.subscribed()
        connection.deliver(b"x")
        (await anext(messages)).finish()
        connection.refuse("E_FIN_FAILED FIN 0000000000000001 failed ID not in flight")
        connection.deliver(b"y")
        assert (await anext(messages)).body == b"y"
        assert len(fake.connections) == 1
    assert "E_FIN_FAILED" in caplog.text


# --- Stopping


async def test_close_waits_for_handlers(fake: FakeNsqd) -> None:
    started = asyncio.Event()
    go_on = asyncio.Event()

    async def handler(message: Message) -> None:
        started.set()
        await go_on.wait()

    messages = consumer(fake, handler=handler, max_in_flight=3)
    await messages.start()
    connection = await fake.subscribed()
    ids = connection.deliver(b"a", b"b", b"c")
    await started.wait()
    closing = asyncio.create_task(messages.close())
    await until(lambda: connection.said(b"CLS"))
    assert not closing.done()
    go_on.set()
    await closing
    await until(lambda: connection.is_over)
    assert connection.said(b"FIN") == [(b"FIN", id) for id in ids]
    assert not connection.said(b"REQ")


async def test_close_waits_no_longer_than_it_may(fake: FakeNsqd, clock: MovableClock) -> None:
    started = asyncio.Event()

    async def handler(message: Message) -> None:
        started.set()
        await asyncio.Event().wait()

    messages = consumer(fake, clock=clock, handler=handler, max_in_flight=2, stop_timeout=30)
    await messages.start()
    connection = await fake.subscribed()
    ids = connection.deliver(b"a", b"b")
    await started.wait()
    closing = asyncio.create_task(messages.close())
    await until(lambda: connection.said(b"CLS"))
    clock.advance(29)
    await asyncio.sleep(0)
    assert not closing.done()
    clock.advance(1)
    await closing
    await until(lambda: connection.is_over)
    assert sorted(connection.said(b"REQ")) == [(b"REQ", id, b"0") for id in ids]


async def test_close_ends_although_the_broker_says_nothing(fake: FakeNsqd, clock: MovableClock) -> None:
    async def silent(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] != b"CLS":
            await fake.behave(connection, command)

    fake.on_command = silent
    messages = consumer(fake, clock=clock, stop_timeout=30)
    await messages.start()
    await fake.subscribed()
    closing = asyncio.create_task(messages.close())
    await until(lambda: fake.last.said(b"CLS"))
    clock.advance(30)
    await closing


async def test_closing_before_a_connection_is_there(fake: FakeNsqd) -> None:
    async with consumer(fake):
        pass
    async with Consumer("t", "c", nsqd="127.0.0.1:1"):
        pass
    await Consumer("t", "c", nsqd="127.0.0.1:1").close()


async def test_run_ends_on_a_signal_with_everything_answered(fake: FakeNsqd) -> None:
    async def handler(message: Message) -> None:
        if message.body == b"stop":
            signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0)

    before = signal.getsignal(signal.SIGTERM)
    running = asyncio.create_task(consumer(fake, handler=handler, max_in_flight=10).run())
    connection = await fake.subscribed()
    ids = connection.deliver(b"a", b"stop", b"b")
    await running
    await until(lambda: connection.is_over)
    assert connection.said(b"FIN") == [(b"FIN", id) for id in ids]
    assert signal.getsignal(signal.SIGTERM) == before


async def test_a_consumer_runs_once_and_only_after_its_start(fake: FakeNsqd) -> None:
    messages = consumer(fake)
    with pytest.raises(ClosedError):
        await anext(messages)
    async with messages:
        with pytest.raises(ClosedError):
            await messages.start()
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


# --- Several brokers, and broken ones


async def test_ready_is_shared_by_the_brokers(fake: FakeNsqd) -> None:
    async with several(3) as nsqds, consumer(*nsqds, max_in_flight=9) as messages:
        await until(lambda: all(nsqd.connections and nsqd.last.ready == 3 for nsqd in nsqds))
        messages.max_in_flight = 0
        await until(lambda: all(nsqd.last.ready == 0 for nsqd in nsqds))
        messages.max_in_flight = 3
        await until(lambda: all(nsqd.last.ready == 1 for nsqd in nsqds))
        assert messages.connections == sorted(nsqd.address for nsqd in nsqds)


async def test_one_more_broker_may_be_named_at_any_time() -> None:
    async with several(3) as (first, second, third):
        messages = consumer(first, max_in_flight=9)
        messages.add_nsqd(second.address)
        with pytest.raises(ClosedError, match="start"):
            await messages.look()
        async with messages:
            await until(lambda: messages.connections == sorted([first.address, second.address]))
            messages.add_nsqd(third.address)
            messages.add_nsqd(third.address)
            await until(lambda: all(nsqd.connections and nsqd.last.ready == 3 for nsqd in (first, second, third)))
            with pytest.raises(OptionError, match="is not an address"):
                messages.add_nsqd("nowhere")
            await messages.look()  # there is nobody to ask
        # Too late.
        messages.add_nsqd(first.address)
        await messages.look()
        await asyncio.sleep(0.01)
        assert [len(nsqd.connections) for nsqd in (first, second, third)] == [1, 1, 1]


async def test_a_lost_broker_is_found_again(fake: FakeNsqd) -> None:
    async with consumer(fake, max_in_flight=2, reconnect_delay=0.01) as messages:
        connection = await fake.subscribed()
        connection.deliver(b"before")
        message = await anext(messages)
        connection.deliver(b"never seen")
        await until(lambda: messages.stats.received == 2)
        await fake.stop()
        await until(lambda: not messages.connections)
        assert messages.in_flight == 0
        message.finish()  # into the void
        await fake.start()
        connection = await fake.subscribed(2)
        connection.deliver(b"after")
        assert (await anext(messages)).body == b"after", "the broker gives the other to somebody else"


async def test_pauses_between_tries_grow_and_end_at_the_longest(
    clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    tries: list[float] = []

    async def connect(address: str, factory: object) -> Any:
        tries.append(clock.time())
        raise ConnectionRefusedError("no one there")

    async with Consumer(
        "t", "c", nsqd="127.0.0.1:1", connect=connect, clock=clock, reconnect_delay=1, max_reconnect_delay=8
    ):
        for _ in range(300):
            await asyncio.sleep(0)
            clock.advance(0.1)
        await until(lambda: len(tries) >= 5)
    pauses = [round(after - before) for before, after in itertools.pairwise(tries)]
    assert pauses[:5] == [1, 2, 4, 8, 8]


Behave = Any


async def garbage(connection: FakeConnection) -> None:
    connection.write(b"\xff" * 64)


async def an_http_server(connection: FakeConnection) -> None:
    connection.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def a_lying_length(connection: FakeConnection) -> None:
    connection.write((1 << 30).to_bytes(4, "big"))


async def a_short_message(connection: FakeConnection) -> None:
    connection.write((29).to_bytes(4, "big") + (2).to_bytes(4, "big") + bytes(25))


async def an_unknown_frame(connection: FakeConnection) -> None:
    connection.write((4).to_bytes(4, "big") + (7).to_bytes(4, "big"))


async def an_error(connection: FakeConnection) -> None:
    connection.refuse("E_INVALID the broker is in a bad mood")


async def a_bare_error(connection: FakeConnection) -> None:
    connection.refuse("E_BAD_PROTOCOL")


async def a_hang_up(connection: FakeConnection) -> None:
    connection.close()


async def a_reset(connection: FakeConnection) -> None:
    connection.abort()


BAD = [
    garbage,
    an_http_server,
    a_lying_length,
    a_short_message,
    an_unknown_frame,
    an_error,
    a_bare_error,
    a_hang_up,
    a_reset,
]


@pytest.mark.parametrize("moment", [b"IDENTIFY", b"AUTH", b"SUB", b"RDY", b"FIN"])
@pytest.mark.parametrize("misbehave", BAD)
async def test_a_bad_broker_is_reported_and_tried_again(fake: FakeNsqd, misbehave: Behave, moment: bytes) -> None:
    """At any moment of the conversation; and the second time, when it behaves, all is well."""
    reported: list[tuple[str, Exception]] = []

    async def bad(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] == moment and len(fake.connections) == 1:
            await misbehave(connection)
        else:
            await fake.behave(connection, command)
            if command[0] == b"RDY" and command[1] != b"0":
                connection.deliver(b"x")

    fake.on_command = bad
    fake.features["auth_required"] = moment == b"AUTH"
    options: dict[str, Any] = {"reconnect_delay": 0.01, "auth_secret": "secret"}
    if moment in (b"IDENTIFY", b"AUTH", b"SUB"):
        options["dial_timeout"] = 0.5
    async with consumer(fake, on_error=lambda address, error: reported.append((address, error)), **options) as messages:
        async with asyncio.timeout(60):
            async for message in messages:
                message.finish()
                if len(fake.connections) == 2:
                    break
    assert [address for address, _ in reported] == [fake.address]
    assert isinstance(reported[0][1], ConnectError | ProtocolError)
    if misbehave is an_http_server:
        assert "HTTP" in str(reported[0][1])
    if misbehave is an_error:
        assert "bad mood" in str(reported[0][1])


@pytest.mark.parametrize("misbehave", BAD)
async def test_a_bad_broker_cannot_keep_us_from_closing(fake: FakeNsqd, misbehave: Behave) -> None:
    async def bad(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] == b"CLS":
            await misbehave(connection)
        else:
            await fake.behave(connection, command)

    fake.on_command = bad
    async with asyncio.timeout(60):
        async with consumer(fake, stop_timeout=0.5) as messages:
            connection = await fake.subscribed()
        await until(lambda: connection.is_over)
        with pytest.raises(StopAsyncIteration):
            await anext(messages)


@pytest.mark.parametrize("compression", ["snappy", "deflate"])
async def test_compressed_nonsense_is_reported_and_the_broker_tried_again(
    nsq_broker: NsqBroker, compression: str
) -> None:
    reported: list[Exception] = []
    async with Consumer(
        "t",
        "c",
        nsqd=nsq_broker.address,
        reconnect_delay=0.01,
        on_error=lambda _, error: reported.append(error),
        **{compression: True},
    ) as messages:
        nsq_broker.publish("t", b"before")
        with await anext(messages) as message:
            assert message.body == b"before"
        [connection] = messages._connections
        connection.data_received(b"\xff" * 100)
        nsq_broker.publish("t", b"after")
        with await anext(messages) as message:
            assert message.body == b"after"
    assert [type(error) for error in reported] == [ProtocolError]


async def test_a_length_that_swallows_all_that_follows_is_noticed(fake: FakeNsqd, clock: MovableClock) -> None:
    """Something does come: heartbeats, but each is taken for a piece of the frame that never ends."""
    reported: list[Exception] = []
    async with consumer(fake, clock=clock, on_error=lambda _, error: reported.append(error)) as messages:
        connection = await fake.subscribed()
        [ours] = messages._connections
        connection.write((32 << 20).to_bytes(4, "big") + (2).to_bytes(4, "big"))
        while ours.is_open:
            came = ours._unfinished
            connection.respond(b"_heartbeat_")
            await until(lambda came=came: ours._unfinished > came)
            clock.advance(29)
        await until(lambda: reported)
        assert "no frame" in str(reported[0])
        clock.advance(1)
        await fake.subscribed(2)


async def test_a_large_message_on_a_slow_line_is_waited_for(fake: FakeNsqd, clock: MovableClock) -> None:
    async with consumer(fake, clock=clock) as messages:
        connection = await fake.subscribed()
        [ours] = messages._connections
        frame = bytes(10) + b"0" * 16 + b"x" * (4 << 20)
        data = (4 + len(frame)).to_bytes(4, "big") + (2).to_bytes(4, "big") + frame
        step = 512 << 10
        for start in range(0, len(data), step):
            came = ours._unfinished
            connection.write(data[start : start + step])
            if start + step < len(data):
                await until(lambda came=came: ours._unfinished == came + step)
                clock.advance(29)
        with await anext(messages) as message:
            assert len(message.body) == 4 << 20


async def test_silence_after_the_magic_is_noticed(fake: FakeNsqd, clock: MovableClock) -> None:
    reported: list[Exception] = []

    async def silent(connection: FakeConnection, command: tuple[bytes, ...]) -> None: ...

    fake.on_command = silent
    async with consumer(fake, clock=clock, dial_timeout=5, on_error=lambda _, error: reported.append(error)):
        await until(lambda: fake.connections and fake.last.said(b"IDENTIFY"))
        clock.advance(5)
        await until(lambda: reported)
        assert "no answer" in str(reported[0])
        clock.advance(1)
        await until(lambda: len(fake.connections) == 2)


async def test_silence_afterwards_is_noticed(fake: FakeNsqd, clock: MovableClock) -> None:
    reported: list[Exception] = []
    async with consumer(fake, clock=clock, on_error=lambda _, error: reported.append(error)):
        connection = await fake.subscribed()
        for _ in range(3):
            clock.advance(59)
            heartbeats = len(connection.said(b"NOP"))
            connection.respond(b"_heartbeat_")
            await until(lambda n=heartbeats: len(connection.said(b"NOP")) > n)
        clock.advance(60)
        await until(lambda: reported)
        assert "nothing came" in str(reported[0])
        clock.advance(1)
        await fake.subscribed(2)


async def test_a_broker_that_does_not_read_is_noticed(fake: FakeNsqd, clock: MovableClock) -> None:
    reported: list[Exception] = []
    async with consumer(
        fake, clock=clock, write_timeout=10, on_error=lambda _, error: reported.append(error)
    ) as messages:
        connection = await fake.subscribed()
        connection.reader._transport.pause_reading()  # type: ignore[attr-defined]
        [ours] = messages._connections
        while ours._write_timer is None:
            ours.write(b"NOP\n" * 100_000)
            await asyncio.sleep(0)
        while ours.is_open:
            # The kernel may still take something; then there is more time.
            clock.advance(10)
            await asyncio.sleep(0)
        await until(lambda: reported)
        assert "does not read" in str(reported[0])


async def test_a_broker_that_reads_slowly_is_waited_for(fake: FakeNsqd, clock: MovableClock) -> None:
    async with consumer(fake, clock=clock, write_timeout=10, read_timeout=600) as messages:
        await fake.subscribed()
        [ours] = messages._connections
        transport = SlowTransport(ours._transport)
        ours._transport = transport  # type: ignore[assignment]
        ours.write(b"x" * 1000)
        ours.flush()
        transport.buffered = 1000
        ours.pause_writing()
        for _ in range(5):
            transport.buffered -= 1
            ours.write(b"x" * 5)  # more is wanted than leaves
            ours.flush()
            transport.buffered += 5
            clock.advance(10)
            assert ours.is_open
        clock.advance(10)
        assert not ours.is_open
        assert "does not read" in str(ours.reason)


class SlowTransport:
    """As much is buffered as the test says; what is written goes nowhere."""

    def __init__(self, real: Any) -> None:
        self.abort = real.abort
        self.is_closing = real.is_closing
        self.buffered = 0

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.buffered


async def test_a_broker_that_does_not_keep_to_ready_is_left(fake: FakeNsqd) -> None:
    reported: list[Exception] = []
    async with consumer(fake, reconnect_delay=0.01, on_error=lambda _, error: reported.append(error)):
        connection = await fake.subscribed()
        connection.deliver(*[b"x"] * 1001)
        await until(lambda: reported)
        assert "more messages than" in str(reported[0])
        await fake.subscribed(2)


async def test_whatever_a_connect_raises_is_no_end(fake: FakeNsqd) -> None:
    tries = 0

    async def connect(address: str, factory: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise KeyError("a bug")
        host, _, port = address.rpartition(":")
        return await asyncio.get_running_loop().create_connection(factory, host, int(port))

    async with consumer(fake, connect=connect, reconnect_delay=0.01):
        await fake.subscribed()
    assert tries == 3


async def test_heartbeats_after_the_goodbye_harm_nothing(fake: FakeNsqd, caplog: pytest.LogCaptureFixture) -> None:
    real = FakeConnection.serve
    heartbeats = 0

    async def slow_to_end(connection: FakeConnection) -> None:
        nonlocal heartbeats
        await real(connection)
        for _ in range(5):
            connection.respond(b"_heartbeat_")
            heartbeats += 1
            await asyncio.sleep(0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeConnection, "serve", slow_to_end)
        async with consumer(fake):
            await fake.subscribed()
    assert heartbeats == 5
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_callback_that_fails_stops_nothing(fake: FakeNsqd) -> None:
    def on_error(address: str, error: Exception) -> None:
        raise ZeroDivisionError

    async with consumer(fake, on_error=on_error, reconnect_delay=0.01):
        (await fake.subscribed()).abort()
        await fake.subscribed(2)


# --- The handshake


async def test_what_identify_says(fake: FakeNsqd) -> None:
    options = {
        "client_id": "me",
        "hostname": "here.example",
        "user_agent": "test/1",
        "heartbeat_interval": 10,
        "msg_timeout": 2.5,
        "output_buffer_size": 1024,
        "output_buffer_timeout": 0.05,
        "sample_rate": 10,
        "topology_region": "r",
        "topology_zone": "z",
        "snappy": True,
    }
    async with consumer(fake, **options):
        connection = await fake.subscribed()
    assert connection.identify == {
        "client_id": "me",
        "hostname": "here.example",
        "user_agent": "test/1",
        "feature_negotiation": True,
        "heartbeat_interval": 10_000,
        "msg_timeout": 2500,
        "output_buffer_size": 1024,
        "output_buffer_timeout": 50,
        "sample_rate": 10,
        "topology_region": "r",
        "topology_zone": "z",
        "tls_v1": False,
        "snappy": True,
        "deflate": False,
        "deflate_level": 6,
    }


async def test_a_very_old_broker_that_only_says_ok(fake: FakeNsqd) -> None:
    async def old(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] == b"IDENTIFY":
            connection.respond(b"OK")
        else:
            await fake.behave(connection, command)

    fake.on_command = old
    async with consumer(fake, max_in_flight=5000) as messages:
        connection = await fake.subscribed()
        assert connection.ready == 2500
        # It counts RDY down, so it must be told again.
        connection.deliver(*[b"x"] * 2000)
        for _ in range(2000):
            (await anext(messages)).finish()
        await until(lambda: len(connection.said(b"RDY")) == 2)


async def test_max_rdy_count_is_kept(fake: FakeNsqd) -> None:
    fake.features["max_rdy_count"] = 100
    async with consumer(fake, max_in_flight=1000):
        assert (await fake.subscribed()).ready == 100


async def test_auth_is_sent_when_asked_for(fake: FakeNsqd) -> None:
    fake.features["auth_required"] = True
    async with consumer(fake, auth_secret="secret"):
        assert (await fake.subscribed()).said(b"AUTH") == [(b"AUTH", b"secret")]


async def test_auth_is_not_sent_when_nobody_asked(fake: FakeNsqd) -> None:
    async with consumer(fake, auth_secret="secret"):
        assert not (await fake.subscribed()).said(b"AUTH")


@pytest.mark.parametrize(
    ("features", "options", "text"),
    [({"auth_required": True}, {}, "asks for AUTH"), ({"tls_v1": False}, {"tls": True}, "does not offer TLS")],
)
async def test_what_must_not_be_done_without(
    fake: FakeNsqd, features: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    fake.features.update(features)
    reported: list[Exception] = []
    async with consumer(fake, on_error=lambda _, error: reported.append(error), **options):
        await until(lambda: reported)
    assert text in str(reported[0])
    assert not fake.last.said(b"SUB")


async def test_compression_that_is_not_granted_is_done_without(fake: FakeNsqd) -> None:
    async with consumer(fake, deflate=True) as messages:
        (await fake.subscribed()).deliver(b"plain")
        assert (await anext(messages)).body == b"plain"


async def test_heartbeats_during_the_handshake_are_answered(fake: FakeNsqd) -> None:
    async def slow(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] == b"SUB":
            connection.respond(b"_heartbeat_")
        await fake.behave(connection, command)

    fake.on_command = slow
    async with consumer(fake):
        assert len((await fake.subscribed()).said(b"NOP")) == 1


async def test_a_message_may_come_in_pieces(fake: FakeNsqd) -> None:
    async with consumer(fake, max_in_flight=10) as messages:
        connection = await fake.subscribed()
        sent: list[bytes] = []
        real = connection.writer.write
        connection.writer.write = sent.append  # type: ignore[method-assign]
        connection.deliver(b"x" * 300_000, b"small", b"y" * 70_000)
        connection.writer.write = real  # type: ignore[method-assign]
        [data] = sent
        for start in range(0, 100):
            connection.writer.write(data[start : start + 1])
            await connection.writer.drain()
            await asyncio.sleep(0)
        connection.writer.write(data[100:])
        found = [await anext(messages) for _ in range(3)]
        assert [len(message.body) for message in found] == [300_000, 5, 70_000]


# --- Options


@pytest.mark.parametrize(
    "options",
    [
        {"topic": "bad topic"},
        {"channel": ""},
        {"nsqd": None},
        {"nsqd": "nowhere"},
        {"nsqd": "host:99999"},
        {"nsqd": "::1:4150"},
        {"nsqd": None, "lookupd": "127.0.0.1"},
        {"nsqd": None, "lookupd": "ftp://127.0.0.1:4161"},
        {"nsqd": None, "lookupd": "http://[::1"},
        {"concurrency": 0},
        {"max_in_flight": -1},
        {"max_attempts": 70000},
        {"lookupd_poll_jitter": 2},
        {"heartbeat_interval": 0.5},
        {"heartbeat_interval": 61},
        {"msg_timeout": 0.5},
        {"sample_rate": 100},
        {"snappy": True, "deflate": True},
        {"deflate_level": 0},
        {"dial_timeout": 0},
        {"max_backoff_duration": -1},
        {"rdy_redistribute_interval": 0},
    ],
    ids=str,
)
async def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    arguments = {"topic": "t", "channel": "c", "nsqd": "127.0.0.1:4150", **options}
    with pytest.raises(OptionError):
        await Consumer(**arguments).start()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError):
        Consumer("t", "c", nsqd="127.0.0.1:4150", no_such_option=1)


async def test_run_needs_a_handler_and_a_handler_leaves_nothing_to_iterate(fake: FakeNsqd) -> None:
    with pytest.raises(OptionError):
        await consumer(fake).run()
    with pytest.raises(OptionError):
        aiter(consumer(fake, handler=print))


def test_messages_can_be_made_for_tests_of_handlers() -> None:
    message = Message(b"body", attempts=2)
    message.touch()
    with message:
        assert (message.body, message.attempts, message.address, message.answered) == (b"body", 2, "", False)
    assert message.answered
    assert "body" in repr(message)


async def test_nothing_is_logged_above_info_when_all_is_well(fake: FakeNsqd, caplog: pytest.LogCaptureFixture) -> None:
    async with consumer(fake) as messages:
        (await fake.subscribed()).deliver(b"x")
        (await anext(messages)).finish()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
