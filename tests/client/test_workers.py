"""Handlers and callbacks that cancel themselves, end the program, wait for their own end or never return."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

from flintmq import NodeClient
from flintmq.client import Consumer, Message, Producer
from flintmq.client.callbacks import Threads
from flintmq.errors import DecodeError, OptionError
from flintmq.testing import NsqBroker

from .fakes import FakeNsqd
from .test_failures import Seen, Sim, sim, until

__all__ = ["sim"]

NO_WAITS: dict[str, Any] = {"default_requeue_delay": 0.1, "max_backoff_duration": 0}


# --- Workers that live


async def _cancel_now() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def _cancel_and_return() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def _cancel_and_swallow() -> None:
    """What deadlines do that were written before `uncancel`."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.01, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(1)


async def _cancel_later() -> None:
    """A deadline that nobody has taken back: it comes when the next handler runs, or none."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.3, task.cancel)


async def _something_cancelled() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("trick", [_cancel_now, _cancel_and_return, _cancel_and_swallow, _cancel_later])
def test_handlers_that_cancel_their_own_task_do_not_end_its_work(
    sim: Sim, trick: Any, concurrency: int, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = sim.nsqd()
    handled: list[bytes] = []
    timed_out: list[bytes] = []

    async def handler(message: Message) -> None:
        if message.body.startswith(b"odd") and message.attempts == 1:
            await trick()
        if message.body == b"last" and message.attempts == 1:
            await _something_cancelled()
        try:
            # Whatever a handler before has left behind, a time limit works as ever.
            async with asyncio.timeout(0.01):
                await asyncio.sleep(1)
        except TimeoutError:
            timed_out.append(message.body)
        handled.append(message.body)

    async def main() -> None:
        async with Consumer("t", "c", nsqd=nsqd.name, handler=handler, concurrency=concurrency, **NO_WAITS) as consumer:
            for number in range(6):
                nsqd.store(b"t", b"odd%d" % number)
                nsqd.store(b"t", b"fine%d" % number)
            await until(lambda: len(set(handled)) == 12, 20)
            # Deadlines that nobody took back have come now. What was cancelled before has no say in what follows.
            await asyncio.sleep(1)
            nsqd.store(b"t", b"last")
            await until(lambda: b"last" in handled, 5)
            begin = asyncio.get_running_loop().time()
            assert consumer.in_flight == 0
        assert asyncio.get_running_loop().time() - begin < 1, "close() waited for somebody"
        assert "has died" not in caplog.text
        assert set(timed_out) == set(handled)

    sim.run(main())


def test_an_event_loop_that_ends_is_not_kept_by_handlers() -> None:
    """The end of asyncio.run cancels all tasks; nobody has closed the consumer."""

    async def main() -> None:
        async with FakeNsqd() as fake:
            consumer = Consumer("t", "c", nsqd=fake.address, handler=handler, concurrency=2)
            await consumer.start()
            (await fake.subscribed()).deliver(b"x")
            await began.wait()

    async def handler(message: Message) -> None:
        began.set()
        await asyncio.sleep(3600)

    began = asyncio.Event()
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


class Panic(BaseException):
    """As libraries written in Rust raise it."""


class PanickingCodec:
    def encode(self, value: Any, /) -> bytes:
        raise NotImplementedError

    def decode(self, body: bytes, kind: Any, /) -> Any:
        if body == b"bad":
            raise Panic("called unwrap() on a None value")
        return body


def test_a_codec_that_raises_anything_costs_one_message(sim: Sim) -> None:
    nsqd = sim.nsqd()
    seen = Seen()
    reasons: list[str] = []

    async def on_give_up(message: Message) -> None:
        try:
            _ = message.value
        except DecodeError as exc:
            reasons.append(str(exc))

    async def main() -> None:
        options: dict[str, Any] = {**NO_WAITS, "type": bytes, "codec": PanickingCodec(), "max_attempts": 2}
        async with Consumer("t", "c", nsqd=nsqd.name, handler=seen, on_give_up=on_give_up, **options) as consumer:
            for body in (b"a", b"bad", b"b"):
                nsqd.store(b"t", body)
            await until(lambda: reasons and len(seen.bodies) == 2, 10)
            assert consumer.stats.undecodable == 2
        assert seen.bodies == [b"a", b"b"]
        assert reasons == ["no bytes: Panic: called unwrap() on a None value"]

    sim.run(main())


def test_a_worker_that_the_program_ended_is_replaced_if_the_program_goes_on(
    sim: Sim, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = sim.nsqd()
    seen: list[int] = []

    async def handler(message: Message) -> None:
        seen.append(message.attempts)
        if message.attempts == 1:
            raise SystemExit(3)

    async def main() -> None:
        async with Consumer("t", "c", nsqd=nsqd.name, handler=handler, **NO_WAITS):
            nsqd.store(b"t", b"x")
            await until(lambda: seen == [1, 2], 5)

    work = sim.loop.create_task(main())
    with pytest.raises(SystemExit):
        sim.world.run(work.done, 20)
    # Somebody has caught it, and runs the loop again.
    sim.world.run(work.done, 20)
    work.result()
    assert "flintmq handler 0 of t/c has died" in caplog.text


# --- Giving up


@pytest.mark.parametrize("form", ["plain", "async", "swallows"])
def test_on_give_up_is_not_cut_short_by_a_timeout(sim: Sim, form: str) -> None:
    nsqd = sim.nsqd()
    ended: list[int] = []

    async def slow(message: Message) -> None:
        await asyncio.sleep(2)
        ended.append(message.attempts)

    async def swallows(message: Message) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(2)
        ended.append(message.attempts)

    def plain(message: Message) -> Any:
        return slow(message)

    on_give_up: Callable[[Message], Any] = {"plain": plain, "async": slow, "swallows": swallows}[form]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"max_attempts": 1, "max_in_flight": 5, **NO_WAITS}
        async with Consumer("t", "c", nsqd=nsqd.name, on_give_up=on_give_up, **options) as consumer:
            nsqd.store(b"t", b"poison")
            (await consumer.get(5)).requeue(0)
            for _ in range(30):
                begin = loop.time()
                with pytest.raises(TimeoutError):
                    await consumer.get(timeout=0.1)
                assert loop.time() - begin < 0.2
            assert ended == [2]
            assert (consumer.stats.given_up, consumer.stats.finished) == (1, 1)

    sim.run(main())


def test_close_waits_for_an_on_give_up_under_way(sim: Sim) -> None:
    nsqd = sim.nsqd()
    ended: list[bytes] = []

    async def on_give_up(message: Message) -> None:
        await asyncio.sleep(3)
        ended.append(message.body)

    async def main() -> None:
        options: dict[str, Any] = {"max_attempts": 1, "max_in_flight": 5, **NO_WAITS}
        async with Consumer("t", "c", nsqd=nsqd.name, on_give_up=on_give_up, **options) as consumer:
            nsqd.store(b"t", b"poison")
            (await consumer.get(5)).requeue(0)
            with pytest.raises(TimeoutError):
                await consumer.get(timeout=0.5)
        assert ended == [b"poison"]
        assert (consumer.stats.requeued, consumer.stats.finished) == (1, 1)

    sim.run(main())


# --- Messages that nobody has got


def test_a_batch_that_is_cancelled_is_handed_out_again(sim: Sim) -> None:
    nsqd = sim.nsqd()

    async def main() -> None:
        async with Consumer("t", "c", nsqd=nsqd.name, max_in_flight=10) as consumer:
            for number in range(9):
                nsqd.store(b"t", b"%d" % number)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(aiter(consumer.batches(20, wait=30))), 1)
            batch = await anext(aiter(consumer.batches(9, wait=1)))
            assert [message.body for message in batch] == [b"%d" % number for number in range(9)]
            assert [message.attempts for message in batch] == [1] * 9
            batch.finish()

    sim.run(main())


def test_tasks_that_give_batches_up_do_not_pass_messages_round_for_ever(sim: Sim) -> None:
    nsqd = sim.nsqd()
    handled: list[bytes] = []

    async def take(consumer: Consumer) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                with await asyncio.wait_for(anext(aiter(consumer.batches(3, wait=0.1))), 0.15) as batch:
                    handled.extend(message.body for message in batch)

    async def main() -> None:
        async with Consumer("t", "c", nsqd=nsqd.name, max_in_flight=10) as consumer:
            takers = []
            for _ in range(2):
                # Each is given up while the other has just been handed the message.
                takers.append(asyncio.ensure_future(take(consumer)))
                await asyncio.sleep(0.06)
            nsqd.store(b"t", b"x")
            await asyncio.sleep(0.5)
            for taker in takers:
                taker.cancel()
            await asyncio.wait(takers)

    sim.run(main())
    assert handled == [b"x"]


def test_a_message_that_is_kept_for_later_is_not_finished_by_with(sim: Sim) -> None:
    nsqd = sim.nsqd()
    kept: list[Message] = []

    async def handler(message: Message) -> None:
        with message:
            message.answer_later()
            kept.append(message)

    async def main() -> None:
        async with Consumer("t", "c", nsqd=nsqd.name, handler=handler) as consumer:
            nsqd.store(b"t", b"x")
            await until(lambda: kept, 5)
            await asyncio.sleep(0.1)
            assert not kept[0].answered
            kept[0].finish()
            assert consumer.stats.finished == 1

    sim.run(main())


# --- The end


def test_all_that_close_a_consumer_wait_for_its_end(sim: Sim) -> None:
    nsqd = sim.nsqd()
    seen: list[str] = []

    async def handler(message: Message) -> None:
        seen.append("began")
        await asyncio.sleep(3)
        seen.append("handled")

    async def main() -> None:
        consumer = Consumer("t", "c", nsqd=nsqd.name, handler=handler)
        running = asyncio.create_task(consumer.run(stop_on=()))
        nsqd.store(b"t", b"x")
        await until(lambda: seen, 5)
        first = asyncio.create_task(consumer.close())
        await asyncio.sleep(0)
        await running
        assert seen == ["began", "handled"]
        await first
        # One that is cancelled does not take the others with it.
        await consumer.close()

    sim.run(main())


def test_all_that_close_a_producer_wait_for_its_end(sim: Sim) -> None:
    nsqd = sim.nsqd()

    async def main() -> None:
        producer = Producer(nsqd.name, timeout=30)
        await producer.start()
        nsqd.unanswering = True
        publishing = asyncio.create_task(producer.publish("t", b"x"))
        await until(lambda: nsqd.log.get(b"t"), 5)
        first = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        second = asyncio.create_task(producer.close())
        await asyncio.sleep(1)
        assert not second.done()
        # One that is cancelled does not take the other with it.
        second.cancel()
        nsqd.sessions[0].send(0, b"OK")
        await producer.close()
        assert publishing.done() and not producer.connections
        await first
        await producer.close()

    sim.run(main())


def test_a_consumer_of_another_event_loop_says_so(sim: Sim) -> None:
    nsqd = sim.nsqd()
    consumer = Consumer("t", "c", nsqd=nsqd.name)
    sim.run(consumer.start())

    async def elsewhere() -> None:
        for call in (consumer.get, lambda: consumer.get(1), consumer.look, consumer.close):
            with pytest.raises(RuntimeError, match="another event loop"):
                await call()
        with pytest.raises(RuntimeError, match="another event loop"):
            await anext(aiter(consumer))

    asyncio.run(elsewhere())
    sim.run(consumer.close())


def test_a_closer_that_is_cancelled_leaves_the_other_one_to_end(sim: Sim) -> None:
    nsqd = sim.nsqd()
    began: list[bytes] = []

    async def handler(message: Message) -> None:
        began.append(message.body)
        await asyncio.sleep(3600)

    async def main() -> None:
        consumer = Consumer("t", "c", nsqd=nsqd.name, handler=handler)
        await consumer.start()
        nsqd.store(b"t", b"x")
        await until(lambda: began, 5)
        closers = [asyncio.create_task(consumer.close()) for _ in range(2)]
        await asyncio.sleep(1)
        closers[0].cancel()
        done, _ = await asyncio.wait(closers, timeout=5)
        assert done == set(closers)
        assert closers[0].cancelled() and closers[1].exception() is None

    sim.run(main())


@pytest.mark.parametrize("where", ["handler", "on_give_up"])
def test_a_handler_is_told_that_it_cannot_close_its_own_consumer(sim: Sim, where: str) -> None:
    nsqd = sim.nsqd()
    errors: list[str] = []

    async def close(message: Message) -> None:
        if where == "on_give_up" and message.attempts == 1:
            raise ZeroDivisionError
        if not errors:
            try:
                await consumer.close()
            except RuntimeError as exc:
                errors.append(str(exc))
        consumer.stop()

    async def main() -> None:
        nonlocal consumer
        consumer = Consumer("t", "c", nsqd=nsqd.name, handler=close, on_give_up=close, max_attempts=1, **NO_WAITS)
        nsqd.store(b"t", b"x")
        async with asyncio.timeout(10):
            await consumer.run(stop_on=())
        assert errors == ["close() in a handler would wait for this very handler: call stop() there"]
        assert consumer.stats.finished == 1

    consumer: Any = None
    sim.run(main())


def test_on_error_may_close_its_consumer(sim: Sim) -> None:
    nsqd = sim.nsqd(start=False)
    closed: list[float] = []

    async def on_error(address: str, error: Exception) -> None:
        if not consumer._closed:
            await consumer.close()
            closed.append(asyncio.get_running_loop().time())

    async def main() -> None:
        nonlocal consumer
        consumer = Consumer("t", "c", nsqd=nsqd.name, on_error=on_error, dial_timeout=1)
        await consumer.start()
        await until(lambda: closed, 5)

    consumer: Any = None
    sim.run(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_in_flight": -1},
        {"max_backoff_duration": -1},
        {"backoff_multiplier": -0.5},
        {"stop_timeout": -1},
        {"stop_timeout": float("nan")},
        {"default_requeue_delay": -1},
        {"rdy_redistribute_interval": 0},
    ],
)
def test_values_that_cannot_be_are_refused_at_once(wrong: Any) -> None:
    [name] = wrong
    with pytest.raises(OptionError, match=name):
        Consumer("t", "c", nsqd="127.0.0.1:4150", **wrong)


async def test_a_start_that_failed_leaves_nothing_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Consumer("t", "c", nsqd="127.0.0.1:1", handler=Seen())

    def fails(handler: Any) -> Any:
        raise ImportError("no tracing")

    monkeypatch.setattr(consumer, "_handler_coroutine", fails)
    with pytest.raises(ImportError):
        await consumer.start()
    await consumer.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_consumer_with_a_handler_hands_out_nothing() -> None:
    consumer = Consumer("t", "c", nsqd="127.0.0.1:1", handler=Seen())
    with pytest.raises(OptionError, match="handler"):
        await anext(consumer)


# --- Callbacks


def test_callbacks_that_are_too_slow_miss_events_and_hold_up_nobody(sim: Sim, caplog: pytest.LogCaptureFixture) -> None:
    nsqd = sim.nsqd()
    away = sim.nsqd(start=False)
    calls = 0
    given_up: list[bytes] = []

    async def on_error(address: str, error: Exception) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(3600)

    async def main() -> None:
        options: dict[str, Any] = {"max_attempts": 1, "max_reconnect_delay": 0.25, "dial_timeout": 0.5, **NO_WAITS}
        async with Consumer(
            "t",
            "c",
            nsqd=[nsqd.name, away.name],
            handler=_fails,
            on_give_up=lambda message: given_up.append(message.body),
            on_error=on_error,
            **options,
        ):
            nsqd.store(b"t", b"poison")
            await until(lambda: given_up, 5)
            await until(lambda: "on_error is too slow" in caplog.text, 600)
            assert calls == 100

    sim.run(main())


async def _fails(message: Message) -> None:
    raise ZeroDivisionError


def test_a_slow_plain_on_error_does_not_hold_up_on_give_up() -> None:
    async def main() -> None:
        held = threading.Event()
        given_up = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with FakeNsqd() as fake:
            async with Consumer(
                "t",
                "c",
                nsqd=[fake.address, "127.0.0.1:1"],
                max_attempts=1,
                handler=_fails,
                on_error=lambda address, error: held.wait(60),
                on_give_up=lambda message: loop.call_soon_threadsafe(given_up.set),
            ):
                (await fake.subscribed()).deliver(b"x", attempts=2)
                async with asyncio.timeout(30):
                    await given_up.wait()
                held.set()

    asyncio.run(main())


def test_threads_run_all_that_was_submitted_and_no_more_than_so_many() -> None:
    threads = Threads("test", 2)
    gate = threading.Barrier(3)
    running = [threads.submit(gate.wait, 30) for _ in range(2)]
    more = [threads.submit(int, str(number)) for number in range(20)]
    assert not any(future.done() for future in more)
    gate.wait(30)
    assert sorted(future.result(30) for future in running) != []
    assert [future.result(30) for future in more] == list(range(20))
    failing = threads.submit(int, "x")
    with pytest.raises(ValueError):
        failing.result(30)
    last = threads.submit(threading.current_thread)
    threads.shutdown()
    assert last.result(30).daemon
    last.result().join(30)
    with pytest.raises(RuntimeError):
        threads.submit(int)


def test_threads_that_the_system_does_not_give_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[int] = []
    threads = Threads("test", 2)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit(ran.append, 1)
    gate = threading.Event()
    first = threads.submit(gate.wait, 30)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        second = threads.submit(int, "2")
    gate.set()
    assert (first.result(30), second.result(30), ran) == (True, 2, [])
    threads.shutdown()


# --- Programs


def _program(text: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_handler_that_blocks_for_ever_does_not_keep_the_program() -> None:
    program = """
        import asyncio, sys, threading
        from flintmq import Consumer
        async def main():
            began = asyncio.Event()
            loop = asyncio.get_running_loop()
            def handler(message):
                loop.call_soon_threadsafe(began.set)
                threading.Event().wait()
            async with Consumer("t", "c", nsqd=sys.argv[1], handler=handler, stop_timeout=0.1):
                await began.wait()
        asyncio.run(main())
        print("the end")
    """
    with NsqBroker() as broker:
        broker.publish("t", b"x")
        with _program(program, broker.address) as process:
            try:
                output, _ = process.communicate(timeout=30)
            finally:
                process.kill()
    assert (output, process.returncode) == ("the end\n", 0)


def test_one_signal_stops_all_consumers_and_the_handler_of_before_comes_back() -> None:
    program = """
        import asyncio, signal, sys
        from flintmq import Consumer
        seen = []
        # In the background of a shell it is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append("mine"))
        async def handler(message): pass
        async def iterate():
            async with Consumer("t", "c3", nsqd=sys.argv[1]) as consumer:
                async for message in consumer:
                    pass
        async def main():
            consumers = [Consumer("t", name, nsqd=sys.argv[1], handler=handler) for name in ("c1", "c2")]
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, seen.append, "loop")
            numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
            runs = [asyncio.create_task(each.run(numbers)) for each in consumers]
            await asyncio.sleep(0)
            third = asyncio.create_task(iterate())
            while not all(each.connections for each in consumers):
                await asyncio.sleep(0.01)
            signal.raise_signal(getattr(signal, sys.argv[2]))
            await asyncio.wait_for(asyncio.gather(*runs), 30)
            if sys.argv[2] == "SIGINT":
                await asyncio.wait_for(third, 30)
            third.cancel()
            await asyncio.sleep(0.01)
        asyncio.run(main())
        signal.raise_signal(signal.SIGTERM)
        print(*seen, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    with NsqBroker() as broker:
        for name, expected in (("SIGTERM", "mine True"), ("SIGINT", "mine True"), ("SIGUSR1", "loop mine True")):
            with _program(program, broker.address, name) as process:
                try:
                    output, errors = process.communicate(timeout=60)
                finally:
                    process.kill()
            assert (output, process.returncode) == (f"{expected}\n", 0), errors


def test_a_consumer_that_outlives_the_main_task_leaves_no_handler_behind() -> None:
    """asyncio.run ends it behind the main task, when its own handler of ctrl-C is no longer of use."""
    program = """
        import asyncio, signal, sys
        from flintmq import Consumer
        # In the background of a shell it is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        async def handler(message): pass
        async def main():
            consumer = Consumer("t", "c", nsqd=sys.argv[1], handler=handler)
            running = asyncio.create_task(consumer.run((signal.SIGINT,)))
            before = signal.getsignal(signal.SIGINT)
            while signal.getsignal(signal.SIGINT) is before:
                await asyncio.sleep(0.01)
            return running
        asyncio.run(main())
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    with NsqBroker() as broker, _program(program, broker.address) as process:
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        assert (output, process.returncode) == ("True\n", 0), errors


async def test_a_signal_handler_that_somebody_set_meanwhile_stays() -> None:
    def theirs(number: int, frame: object) -> None: ...

    async with FakeNsqd() as fake:
        before = signal.getsignal(signal.SIGUSR2)
        try:
            consumer = Consumer("t", "c", nsqd=fake.address, handler=Seen())
            running = asyncio.create_task(consumer.run((signal.SIGUSR2,)))
            await fake.subscribed()
            signal.signal(signal.SIGUSR2, theirs)
            consumer.stop()
            await running
            assert signal.getsignal(signal.SIGUSR2) is theirs
        finally:
            signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(("max_attempts", "becomes_one"), [(5, False), (0, True)])
async def test_dead_letters_need_a_consumer_without_a_lower_limit_of_its_own(
    max_attempts: int, becomes_one: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As docs/dead-letters.md says: a message that the consumer gives up is finished, and never dies."""
    with NsqBroker() as broker:
        async with NodeClient(broker.http_address) as node:
            await node.create_topic("t")
            await node.create_channel("t", "c")
            await node.set_channel_settings("t", "c", {"max-attempts": 7})
        options: dict[str, Any] = {"default_requeue_delay": 0, "max_backoff_duration": 0, "max_attempts": max_attempts}
        async with Consumer("t", "c", nsqd=broker.address, handler=_fails, **options) as consumer:
            broker.publish("t", b"x")
            await until(lambda: broker.has("t.c.dead") or consumer.stats.given_up)
            await broker.until_empty("t", "c")
        assert broker.has("t.c.dead") is becomes_one
        assert ("after 5 attempts (max_attempts): it is finished" in caplog.text) is not becomes_one
        if becomes_one:
            assert await asyncio.to_thread(broker.take, "t.c.dead") == [b"x"]
