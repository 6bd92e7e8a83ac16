"""The producer against an nsqd that says what the test tells it to say."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from flintmq.client import Producer
from flintmq.errors import ClosedError, ConnectError, OptionError, ProtocolError, PublishError, PublishUnknownError

from .fakes import FakeConnection, FakeNsqd, MovableClock, several, until

PUBLISHES = (b"PUB", b"MPUB", b"DPUB")


def producer(*nsqds: FakeNsqd, **options: Any) -> Producer:
    return Producer([nsqd.address for nsqd in nsqds], **options)


def bodies(command: tuple[bytes, ...]) -> list[bytes]:
    """The messages of a command."""
    if command[0] != b"MPUB":
        return [command[-1]]
    data = command[-1]
    [count] = struct.unpack_from(">I", data)
    at, found = 4, []
    for _ in range(count):
        [size] = struct.unpack_from(">I", data, at)
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    assert at == len(data)
    return found


def published(*nsqds: FakeNsqd) -> list[bytes]:
    """Everything that was sent, to any of them, in any form."""
    return [
        body
        for nsqd in nsqds
        for connection in nsqd.connections
        for command in connection.commands
        if command[0] in PUBLISHES
        for body in bodies(command)
    ]


async def outcome(publish: asyncio.Future[None] | asyncio.Task[None]) -> Exception | None:
    try:
        await publish
    except Exception as exc:
        return exc
    return None


async def hold(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
    """A broker that answers no publish."""
    if command[0] not in PUBLISHES:
        await connection.nsqd.behave(connection, command)


# --- Commands


async def test_what_goes_over_the_wire(fake: FakeNsqd) -> None:
    async with producer(fake) as nsq:
        await nsq.publish("t", b"one")
        await nsq.publish_many("t", [b"two", b"three"])
        await nsq.publish_many("t", [])
        await nsq.publish_many("t", iter([b"four"]))  # type: ignore[arg-type]
        await nsq.defer("t", b"five", 1.5)
    said = [command for command in fake.last.commands if command[0] in PUBLISHES]
    assert [command[:-1] for command in said] == [
        (b"PUB", b"t"),
        (b"MPUB", b"t"),
        (b"PUB", b"t"),
        (b"DPUB", b"t", b"1500"),
    ]
    assert [bodies(command) for command in said] == [[b"one"], [b"two", b"three"], [b"four"], [b"five"]]


async def test_calls_of_one_turn_go_out_as_one_command(fake: FakeNsqd) -> None:
    async with producer(fake) as nsq:
        await asyncio.gather(*(nsq.publish("t", b"%d" % n) for n in range(100)), nsq.publish("other", b"x"))
    said = [command for command in fake.last.commands if command[0] in PUBLISHES]
    assert sorted(command[0] + b" " + command[1] for command in said) == [b"MPUB t", b"PUB other"]
    assert published(fake)[:100] == [b"%d" % n for n in range(100)]


async def test_linger_waits_for_more(fake: FakeNsqd, clock: MovableClock) -> None:
    async with producer(fake, linger=0.01, clock=clock) as nsq:
        first = asyncio.create_task(nsq.publish("t", b"a"))
        for _ in range(10):
            await asyncio.sleep(0)
        second = asyncio.create_task(nsq.publish("t", b"b"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert published(fake) == []
        clock.advance(0.01)
        await asyncio.gather(first, second)
    assert [bodies(command) for command in fake.last.said(b"MPUB")] == [[b"a", b"b"]]


async def test_commands_do_not_wait_for_each_other(fake: FakeNsqd) -> None:
    fake.on_command = hold
    async with producer(fake) as nsq:
        tasks = [asyncio.create_task(nsq.publish_many("t", [b"%d" % n, b"x"])) for n in range(10)]
        await until(lambda: fake.connections and len(fake.last.said(b"MPUB")) == 10)
        for number, task in enumerate(tasks):
            assert not task.done()
            fake.last.respond(b"OK")
            await task
            assert all(not later.done() for later in tasks[number + 1 :])


async def test_batches_have_a_size(fake: FakeNsqd) -> None:
    async with producer(fake) as nsq:
        await asyncio.gather(*(nsq.publish("t", b"%d" % n) for n in range(2500)))
        await asyncio.gather(*(nsq.publish("t", bytes(60_000)) for _ in range(40)))
    sizes = [len(command[-1]) for command in fake.last.said(b"MPUB")]
    assert [len(bodies(command)) for command in fake.last.said(b"MPUB")][:3] == [1000, 1000, 500]
    assert len(sizes) > 4 and max(sizes) < 1_100_000


async def test_a_large_message_goes_alone(fake: FakeNsqd) -> None:
    async with producer(fake) as nsq:
        await asyncio.gather(*(nsq.publish("t", body) for body in (b"a", bytes(100_000), b"b")))
    # And in its order: what was published before it goes before it.
    assert [command[-1] for command in fake.last.said(b"PUB")] == [b"a", bytes(100_000), b"b"]


async def test_a_call_that_was_cancelled_in_time_is_not_sent(fake: FakeNsqd) -> None:
    async with producer(fake) as nsq:
        tasks = [asyncio.create_task(nsq.publish("t", body)) for body in (b"a", b"b", b"c")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(tasks[0], tasks[2])
        assert await asyncio.gather(tasks[1], return_exceptions=True) != [None]
        alone = asyncio.create_task(nsq.publish("t", b"d"))
        await asyncio.sleep(0)
        alone.cancel()
        await nsq.flush()
    assert published(fake) == [b"a", b"c"]


async def test_a_call_that_was_cancelled_too_late_disturbs_no_other(fake: FakeNsqd) -> None:
    fake.on_command = hold
    async with producer(fake) as nsq:
        first = asyncio.create_task(nsq.publish("t", b"a"))
        await until(lambda: published(fake) == [b"a"])
        second = asyncio.create_task(nsq.publish("t", b"b"))
        await until(lambda: published(fake) == [b"a", b"b"])
        first.cancel()
        fake.last.respond(b"OK")
        await until(lambda: first.done())
        await asyncio.sleep(0)
        assert not second.done(), "the answer was for the first"
        fake.last.respond(b"OK")
        await second


@pytest.mark.parametrize("body", ["text", None, bytearray(b"x"), 5])
async def test_a_message_is_bytes(fake: FakeNsqd, body: Any) -> None:
    async with producer(fake) as nsq:
        for publish in (nsq.publish("t", body), nsq.publish_many("t", [b"x", body]), nsq.defer("t", body, 1)):
            with pytest.raises(TypeError):
                await publish
        assert published(fake) == []


async def test_what_the_broker_would_refuse_is_refused_here(fake: FakeNsqd) -> None:
    async with producer(fake) as nsq:
        for publish in (
            nsq.publish("t", b""),
            nsq.publish("bad topic", b"x"),
            nsq.publish("t\n", b"x"),
            nsq.publish_many("t", [b"x", b""]),
            nsq.defer("t", b"x", -1),
            nsq.defer("t", b"x", 3601),
            nsq.defer("t", b"x", float("nan")),
        ):
            with pytest.raises(OptionError):
                await publish
        assert published(fake) == []
        assert len(fake.connections) == 1


# --- Refused


async def refuse_bad(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
    """As nsqd does it: an error, then the end. Nothing behind it is looked at."""
    if command[0] in PUBLISHES and b"bad" in bodies(command):
        connection.commands.pop()
        connection.refuse(f"E_BAD_MESSAGE {command[0].decode()} message too big 2000000 > 1048576")
        connection.close()
        await connection.reader.read(-1)
    else:
        await connection.nsqd.behave(connection, command)


async def test_what_was_sent_behind_a_refused_one_is_sent_again(fake: FakeNsqd) -> None:
    fake.on_command = refuse_bad
    async with producer(fake, reconnect_delay=0.01) as nsq:
        tasks = [asyncio.create_task(nsq.publish_many("t", [b, b"x"])) for b in (b"a", b"bad", b"c", b"d")]
        results = [await outcome(task) for task in tasks]
    assert [result is None for result in results] == [True, False, True, True]
    assert isinstance(results[1], PublishError) and not isinstance(results[1], PublishUnknownError)
    assert (results[1].code, results[1].retriable) == ("E_BAD_MESSAGE", False)
    assert "too big" in str(results[1])
    assert sorted(set(published(fake))) == [b"a", b"c", b"d", b"x"]
    assert published(fake).count(b"c") == 1, "the first time nobody looked at it"


async def test_a_bad_message_harms_none_of_those_it_was_sent_with(fake: FakeNsqd) -> None:
    fake.on_command = refuse_bad
    async with producer(fake, reconnect_delay=0.01) as nsq:
        tasks = [asyncio.create_task(nsq.publish("t", b)) for b in (b"a", b"bad", b"c")]
        results = [await outcome(task) for task in tasks]
    assert [result is None for result in results] == [True, False, True]
    assert sorted(published(fake)) == [b"a", b"c"]


async def test_messages_published_together_are_refused_together(fake: FakeNsqd) -> None:
    fake.on_command = refuse_bad
    async with producer(fake, reconnect_delay=0.01) as nsq:
        with pytest.raises(PublishError, match="E_BAD_MESSAGE"):
            await nsq.publish_many("t", [b"a", b"bad"])
    assert published(fake) == []


async def test_a_broker_that_cannot_take_it_is_passed_over(clock: MovableClock) -> None:
    async def full(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] in PUBLISHES:
            connection.commands.pop()
            connection.refuse(f"E_{command[0].decode()}_FAILED {command[0].decode()} failed no space left")
            connection.close()
        else:
            await connection.nsqd.behave(connection, command)

    async with several(2) as [sick, well]:
        sick.on_command = full
        async with producer(sick, well, clock=clock) as nsq:
            await until(lambda: len(nsq.connections) == 2)
            for n in range(4):
                await nsq.publish("t", b"%d" % n)
                await nsq.defer("t", b"%d later" % n, 1)
        assert len(published(well)) == 8 and published(sick) == []
        async with producer(sick, clock=clock) as nsq:
            with pytest.raises(PublishError, match="no space left") as caught:
                await nsq.publish("t", b"x")
            assert caught.value.retriable


async def test_not_allowed_is_said_as_it_is(fake: FakeNsqd) -> None:
    async def refuse(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] == b"MPUB":
            connection.refuse('E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "t" is not valid')
        else:
            await fake.behave(connection, command)

    fake.on_command = refuse
    async with producer(fake) as nsq:
        with pytest.raises(PublishError) as caught:
            await nsq.publish_many("t", [b"a", b"b"])
    assert caught.value.code == "E_BAD_TOPIC"
    assert not caught.value.retriable


# --- Unknown, and never sent


async def test_a_lost_connection_leaves_what_was_sent_unknown(fake: FakeNsqd) -> None:
    fake.on_command = hold
    async with producer(fake, reconnect_delay=0.01) as nsq:
        tasks = [asyncio.create_task(nsq.publish_many("t", [b"%d" % n, b"x"])) for n in range(3)]
        await until(lambda: fake.connections and len(fake.last.said(b"MPUB")) == 3)
        fake.last.respond(b"OK")
        await until(lambda: tasks[0].done())
        fake.last.abort()
        results = [await outcome(task) for task in tasks]
        assert results[0] is None
        assert all(isinstance(result, PublishUnknownError) for result in results[1:])
        fake.on_command = fake.behave
        await nsq.publish("t", b"after")
        assert len(fake.connections) == 2


async def test_who_prefers_twice_to_perhaps_says_so(fake: FakeNsqd) -> None:
    fake.on_command = hold
    async with producer(fake, reconnect_delay=0.01, retry_unknown=True) as nsq:
        task = asyncio.create_task(nsq.publish("t", b"x"))
        await until(lambda: published(fake) == [b"x"])
        fake.on_command = fake.behave
        fake.last.abort()
        await task
    assert published(fake) == [b"x", b"x"]


async def test_what_was_sent_again_in_vain_is_still_unknown(fake: FakeNsqd, clock: MovableClock) -> None:
    fake.on_command = hold
    async with producer(fake, clock=clock, timeout=10, retry_unknown=True) as nsq:
        task = asyncio.create_task(nsq.publish("t", b"x"))
        await until(lambda: published(fake) == [b"x"])
        await fake.stop()
        await until(lambda: not nsq.connections)
        clock.advance(10)
        assert isinstance(await outcome(task), PublishUnknownError)


async def test_what_was_refused_the_second_time_may_be_there_from_the_first(fake: FakeNsqd) -> None:
    fake.on_command = hold

    async def refuse(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] == b"PUB":
            connection.refuse("E_PUB_FAILED PUB failed disk full")
            connection.close()
        else:
            await fake.behave(connection, command)

    async with producer(fake, reconnect_delay=0.01, retry_unknown=True) as nsq:
        task = asyncio.create_task(nsq.publish("t", b"x"))
        await until(lambda: published(fake) == [b"x"])
        fake.on_command = refuse
        fake.last.abort()
        error = await outcome(task)
    assert isinstance(error, PublishUnknownError)
    assert "disk full" in str(error)


async def test_no_answer_in_time_is_unknown_and_the_late_answer_belongs_to_nobody(
    fake: FakeNsqd, clock: MovableClock
) -> None:
    fake.on_command = hold
    async with producer(fake, clock=clock, timeout=10) as nsq:
        slow = asyncio.create_task(nsq.publish("t", b"slow"))
        await until(lambda: published(fake) == [b"slow"])
        clock.advance(9)
        late = asyncio.create_task(nsq.publish("t", b"late"))
        await until(lambda: published(fake) == [b"slow", b"late"])
        clock.advance(1)
        assert isinstance(await outcome(slow), PublishUnknownError)
        fake.last.respond(b"OK")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not late.done()
        fake.last.respond(b"OK")
        await late


async def test_close_does_not_wait_for_ever(fake: FakeNsqd, clock: MovableClock) -> None:
    fake.on_command = hold
    nsq = producer(fake, clock=clock, timeout=10)
    await nsq.start()
    task = asyncio.create_task(nsq.publish("t", b"x"))
    await until(lambda: published(fake) == [b"x"])
    closing = asyncio.create_task(nsq.close())
    await asyncio.sleep(0)
    clock.advance(10)
    await closing
    assert isinstance(await outcome(task), PublishUnknownError)


async def test_a_publish_waits_for_a_broker_to_come_back(fake: FakeNsqd) -> None:
    async with producer(fake, reconnect_delay=0.01) as nsq:
        await fake.stop()
        await until(lambda: not nsq.connections)
        task = asyncio.create_task(nsq.publish("t", b"x"))
        await asyncio.sleep(0)
        await fake.start()
        await task
    assert published(fake) == [b"x"]


async def test_what_could_not_be_sent_in_time_was_not_sent(fake: FakeNsqd, clock: MovableClock) -> None:
    async with producer(fake, clock=clock, timeout=10) as nsq:
        await fake.stop()
        await until(lambda: not nsq.connections)
        task = asyncio.create_task(nsq.publish("t", b"x"))
        for _ in range(5):
            await asyncio.sleep(0)
        clock.advance(10)
        with pytest.raises(ConnectError, match="not sent"):
            await task


async def test_another_broker_takes_over(fake: FakeNsqd) -> None:
    async with several(2) as nsqds, producer(*nsqds) as nsq:
        await until(lambda: len(nsq.connections) == 2)
        await nsqds[0].stop()
        await until(lambda: len(nsq.connections) == 1)
        for n in range(10):
            await nsq.publish("t", b"%d" % n)
        assert published(nsqds[1]) == [b"%d" % n for n in range(10)]


async def test_the_one_with_the_least_to_do_gets_the_next() -> None:
    async with several(2) as nsqds:
        nsqds[0].on_command = nsqds[1].on_command = hold
        async with producer(*nsqds, timeout=0.5) as nsq:
            await until(lambda: len(nsq.connections) == 2)
            tasks = [asyncio.create_task(nsq.publish_many("t", [b"x", b"y"])) for _ in range(4)]
            await until(lambda: [len(published(nsqd)) for nsqd in nsqds] == [4, 4])
            for nsqd in nsqds:
                nsqd.last.respond(b"OK")
                nsqd.last.respond(b"OK")
            await asyncio.gather(*tasks)


@pytest.mark.parametrize("answer", [b"CLOSE_WAIT", b"OK"])
async def test_an_answer_to_nothing_ends_the_connection(fake: FakeNsqd, answer: bytes) -> None:
    reported: list[Exception] = []
    async with producer(fake, reconnect_delay=0.01, on_error=lambda _, error: reported.append(error)) as nsq:
        await until(lambda: fake.connections)
        fake.last.respond(answer)
        await until(lambda: len(fake.connections) == 2)
        await nsq.publish("t", b"x")
    assert "no such answer" in str(reported[0])


async def test_a_message_to_a_producer_ends_the_connection(fake: FakeNsqd) -> None:
    async with producer(fake, reconnect_delay=0.01) as nsq:
        fake.last.deliver(b"x")
        await until(lambda: len(fake.connections) == 2)
        await nsq.publish("t", b"x")


def a_frame(size: int, kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">iI", size, kind) + payload


BAD_ANSWERS = {
    "garbage": b"\xff" * 64,
    "an HTTP server": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a lying length": a_frame(1 << 30, 0),
    "a negative length": a_frame(-1, 0),
    "a short message": a_frame(29, 2, bytes(25)),
    "an unknown frame": a_frame(4, 7),
    "half a frame and the end": a_frame(1000, 0, b"O"),
    "the end": b"",
}


@pytest.mark.parametrize("moment", [b"IDENTIFY", b"AUTH", b"PUB", b"MPUB", b"DPUB"])
@pytest.mark.parametrize("answer", BAD_ANSWERS)
async def test_a_bad_broker_is_reported_and_tried_again(fake: FakeNsqd, answer: str, moment: bytes) -> None:
    """Nobody knows what became of a publish then; and the next time, when it behaves, all is well."""
    reported: list[Exception] = []
    is_bad = True

    async def bad(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if is_bad and command[0] == moment:
            connection.write(BAD_ANSWERS[answer])
            if "end" in answer:
                connection.close()
        else:
            await fake.behave(connection, command)

    def publishes(nsq: Producer) -> list[asyncio.Task[None]]:
        return [
            asyncio.create_task(call)
            for call in (nsq.publish("t", b"one"), nsq.publish_many("t", [b"a", b"b"]), nsq.defer("t", b"later", 1))
        ]

    fake.on_command = bad
    fake.features["auth_required"] = moment == b"AUTH"
    options: dict[str, Any] = {"auth_secret": "secret", "reconnect_delay": 0.01}
    async with asyncio.timeout(60):
        if moment in (b"IDENTIFY", b"AUTH"):
            with pytest.raises(ConnectError):
                await producer(fake, dial_timeout=0.5, timeout=0.6, **options).start()
            is_bad = False
        async with producer(fake, on_error=lambda _, error: reported.append(error), **options) as nsq:
            if is_bad:
                outcomes = [await outcome(task) for task in publishes(nsq)]
                assert any(isinstance(error, PublishUnknownError) for error in outcomes)
                assert all(error is None or isinstance(error, PublishUnknownError) for error in outcomes)
                is_bad = False
                assert [type(error) in (ConnectError, ProtocolError) for error in reported] == [True]
            assert [await outcome(task) for task in publishes(nsq)] == [None, None, None]


async def test_an_error_at_any_moment_ends_nothing_for_good(fake: FakeNsqd) -> None:
    reported: list[Exception] = []
    async with producer(fake, reconnect_delay=0.01, on_error=lambda _, error: reported.append(error)) as nsq:
        fake.last.refuse("E_INVALID the broker is in a bad mood")
        await until(lambda: len(fake.connections) == 2)
        assert "bad mood" in str(reported[0])
        await until(lambda: nsq.connections)
        fake.last.refuse("E_FIN_FAILED of which a producer knows nothing")
        await nsq.publish("t", b"x")
    assert len(fake.connections) == 2


async def test_a_broker_that_falls_silent_is_left(fake: FakeNsqd, clock: MovableClock) -> None:
    reported: list[Exception] = []
    fake.on_command = hold
    async with producer(fake, clock=clock, timeout=3600, on_error=lambda _, error: reported.append(error)) as nsq:
        publish = asyncio.create_task(nsq.publish("t", b"x"))
        await until(lambda: published(fake))
        clock.advance(60)
        assert isinstance(await outcome(publish), PublishUnknownError)
        assert "nothing came for 60 s" in str(reported[0])
        fake.on_command = fake.behave
        clock.advance(1)
        await nsq.publish("t", b"y")


async def test_one_more_broker_may_be_named_at_any_time() -> None:
    async with several(3) as (first, second, third):
        nsq = producer(first)
        nsq.add_nsqd(second.address)
        async with nsq:
            await until(lambda: nsq.connections == sorted([first.address, second.address]))
            nsq.add_nsqd(third.address)
            await until(lambda: len(nsq.connections) == 3)
            await first.stop()
            await second.stop()
            await until(lambda: nsq.connections == [third.address])
            await nsq.publish("t", b"x")
            with pytest.raises(OptionError, match="is not an address"):
                nsq.add_nsqd("nowhere")
        assert published(third) == [b"x"]


async def test_heartbeats_are_answered(fake: FakeNsqd) -> None:
    async with producer(fake):
        fake.last.respond(b"_heartbeat_")
        await until(lambda: fake.last.said(b"NOP"))


# --- Limits and ends


async def test_memory_is_bounded(fake: FakeNsqd) -> None:
    fake.on_command = hold
    async with producer(fake, max_pending_bytes=1000) as nsq:
        tasks: list[asyncio.Task[None]] = []
        for _ in range(20):
            tasks.append(asyncio.create_task(nsq.publish_many("t", [bytes(100), bytes(100)])))
            await asyncio.sleep(0)
        await until(lambda: fake.connections and len(fake.last.said(b"MPUB")) == 5)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(fake.last.said(b"MPUB")) == 5
        for number in range(20):
            await until(lambda n=number: len(fake.last.said(b"MPUB")) > n)
            fake.last.respond(b"OK")
        await asyncio.gather(*tasks)


async def test_start_fails_when_nobody_is_there() -> None:
    with pytest.raises(ConnectError, match=r"no broker can be reached: 127\.0\.0\.1:1: "):
        async with Producer("127.0.0.1:1", timeout=0.1):
            pass


async def test_one_of_several_is_enough_to_start(fake: FakeNsqd) -> None:
    async with Producer(["127.0.0.1:1", fake.address]) as nsq:
        await nsq.publish("t", b"x")


async def test_close_sends_what_was_gathered(fake: FakeNsqd) -> None:
    nsq = producer(fake, linger=60)
    await nsq.start()
    task = asyncio.create_task(nsq.publish("t", b"x"))
    await asyncio.sleep(0)
    await nsq.close()
    await task
    assert published(fake) == [b"x"]
    await nsq.close()


async def test_before_and_after_it_is_closed(fake: FakeNsqd) -> None:
    nsq = producer(fake)
    with pytest.raises(ClosedError):
        await nsq.publish("t", b"x")
    async with nsq:
        with pytest.raises(ClosedError):
            await nsq.start()
    with pytest.raises(ClosedError):
        await nsq.publish("t", b"x")


async def test_closing_with_no_broker_left_fails_what_waits_when_its_time_is_over(fake: FakeNsqd) -> None:
    nsq = producer(fake, timeout=0.2)
    await nsq.start()
    await fake.stop()
    await until(lambda: not nsq.connections)
    task = asyncio.create_task(nsq.publish("t", b"x"))
    for _ in range(5):
        await asyncio.sleep(0)
    await nsq.close()
    with pytest.raises(ConnectError, match="not sent within"):
        await task


@pytest.mark.parametrize(
    "options", [{"nsqd": None}, {"linger": -1}, {"timeout": 0}, {"nsqd": "x"}, {"sample_rate": -1}], ids=str
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Producer(**{"nsqd": "127.0.0.1:4150", **options})
