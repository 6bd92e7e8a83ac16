"""pynsq's names on our client: what a handler may do, and a whole program that only changed its import."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flintmq import sync
from flintmq.compat import pynsq as nsq

from .daemons import Nsqd
from .fakes import FakeConnection, FakeNsqd, until


def reader(fake: FakeNsqd, handler: Callable[[nsq.Message], Any], **options: Any) -> nsq.Reader:
    return nsq.Reader("t", "c", handler, nsqd_tcp_addresses=[fake.address], max_in_flight=10, **options)


async def answers(
    fake: FakeNsqd, handler: Callable[[nsq.Message], Any], attempts: int = 1, **options: Any
) -> list[Any]:
    """What the broker is told about one message."""
    made = reader(fake, handler, **options)
    connection = await fake.subscribed()
    connection.deliver(b"body", attempts=attempts)
    await until(lambda: connection.said(b"FIN") or connection.said(b"REQ"))
    made.close()
    await until(lambda: connection.is_over)
    return [(command[0], *command[2:]) for command in connection.commands if command[0] in (b"FIN", b"REQ", b"TOUCH")]


async def returns_true_later(message: nsq.Message) -> bool:
    await asyncio.sleep(0)
    return True


async def returns_nothing(message: nsq.Message) -> None: ...


async def raises_later(message: nsq.Message) -> None:
    raise ZeroDivisionError


def raises(message: nsq.Message) -> None:
    raise ZeroDivisionError


def answers_itself(message: nsq.Message) -> None:
    message.touch()
    message.finish()


def answers_much_later(message: nsq.Message) -> None:
    message.enable_async()
    asyncio.get_running_loop().call_later(0.01, message.finish)


FIN = [(b"FIN",)]
REQ = [(b"REQ", b"90000")]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (lambda message: True, FIN),
        (lambda message: False, REQ),
        (raises, REQ),
        (returns_true_later, FIN),
        (returns_nothing, REQ),
        (raises_later, REQ),
        (answers_itself, [(b"TOUCH",), *FIN]),
        (answers_much_later, FIN),
        (lambda message: message.requeue(delay=3), [(b"REQ", b"3000")]),
        (lambda message: message.requeue(delay=0.5), [(b"REQ", b"500")]),
        (lambda message: message.requeue(time_ms=7, backoff=False), [(b"REQ", b"7")]),
        (lambda message: message.requeue(delay=-1), REQ),
    ],
)
async def test_what_a_handler_may_do(fake: FakeNsqd, handler: Callable[[nsq.Message], Any], expected: Any) -> None:
    assert await answers(fake, handler) == expected


async def test_the_delay_grows_with_the_attempts(fake: FakeNsqd) -> None:
    assert await answers(fake, lambda message: False, attempts=3, requeue_delay=10) == [(b"REQ", b"30000")]


async def test_neither_answer_nor_result_is_logged_and_left_to_time_out(
    fake: FakeNsqd, caplog: pytest.LogCaptureFixture
) -> None:
    made = reader(fake, lambda message: None)
    connection = await fake.subscribed()
    connection.deliver(b"body")
    await until(lambda: "ambiguous" in caplog.text)
    assert not connection.said(b"FIN") and not connection.said(b"REQ")
    made.set_max_in_flight(0)
    await until(lambda: connection.ready == 0)
    assert made._consumer is not None
    made._consumer._stop_timeout = 0.01
    made.close()
    await until(lambda: connection.is_over)


async def test_hooks(fake: FakeNsqd) -> None:
    seen: list[str] = []

    class MyReader(nsq.Reader):
        def giving_up(self, message: nsq.Message) -> None:
            seen.append("giving up")

        def validate_message(self, message: nsq.Message) -> bool:
            return message.body != b"invalid"

        def preprocess_message(self, message: nsq.Message) -> nsq.Message:
            message.body = message.body.lower()
            return message

        def process_message(self, message: nsq.Message) -> Any:
            seen.append(message.body.decode())
            return super().process_message(message)

        def heartbeat(self, conn: Any) -> None:
            seen.append(f"heartbeat {conn.host}:{conn.port}")

    made = MyReader("t", "c", lambda message: True, nsqd_tcp_addresses=fake.address, max_tries=2, max_in_flight=9)
    connection = await fake.subscribed()
    connection.deliver(b"GOOD", b"invalid")
    connection.deliver(b"late", attempts=3)
    connection.respond(b"_heartbeat_")
    await until(lambda: len(connection.said(b"FIN")) == 3 and len(seen) == 3)
    assert sorted(seen) == ["giving up", "good", f"heartbeat {fake.address}"]
    assert not made.is_starved()
    made.close()
    await until(lambda: connection.is_over)


def test_answering_twice_is_an_error() -> None:
    message = nsq.Message(b"0" * 16, b"body", 1, 1)
    events: list[str] = []
    message.on("finish", lambda message: events.append("finish"))
    message.finish()
    assert events == ["finish"] and message.has_responded()
    for answer in (message.finish, message.requeue, message.touch):
        with pytest.raises(AssertionError):
            answer()


async def test_a_writer_calls_back_and_its_future_means_stored(fake: FakeNsqd) -> None:
    async def refuse(connection: FakeConnection, command: tuple[bytes, ...]) -> None:
        if command[0] == b"DPUB":
            connection.refuse("E_DPUB_FAILED DPUB failed exiting")
        else:
            await fake.behave(connection, command)

    fake.on_command = refuse
    told: list[Any] = []
    writer = nsq.Writer([fake.address])
    await asyncio.gather(
        writer.pub("t", b"x", lambda conn, data: told.append((conn.id, data))),
        writer.mpub("t", (b"a", b"b")),
        writer.mpub("t", b"alone"),
    )
    assert told == [(fake.address, b"OK")]
    with pytest.raises(nsq.Error, match="exiting"):
        await writer.dpub("t", 1000, b"x", lambda conn, data: told.append(data))
    assert isinstance(told[1], nsq.Error)
    writer.close()
    await writer._closing


async def test_a_writer_waits_for_its_broker(fake: FakeNsqd, caplog: pytest.LogCaptureFixture) -> None:
    await fake.stop()
    writer = nsq.Writer([fake.address], reconnect_interval=0.01)
    published = writer.pub("t", b"x")
    await until(lambda: "no broker" in caplog.text)
    await fake.start()
    await published
    writer.close()
    await writer._closing


@pytest.mark.parametrize(
    "arguments",
    [
        {"topic": ""},
        {"max_in_flight": 0},
        {"lookupd_poll_jitter": 2.0},
        {"no_such_argument": 1},
        {"nsqd_tcp_addresses": None},
        {"message_handler": 5},
    ],
)
async def test_wrong_arguments_are_assertions(arguments: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        nsq.Reader(**{"topic": "t", "channel": "c", "nsqd_tcp_addresses": ["127.0.0.1:1"], **arguments})


def test_the_backoff_timer_has_two_slopes() -> None:
    timer = nsq.BackoffTimer(0, 128)
    for _ in range(10):
        timer.failure()
    assert timer.get_interval() == pytest.approx(35.84)
    timer.failure()
    assert timer.get_interval() == pytest.approx(36.224)
    for _ in range(300):
        timer.failure()
    assert timer.get_interval() == 128
    for _ in range(300):
        timer.success()
    assert timer.get_interval() == 0


def test_commands() -> None:
    assert nsq.subscribe("t", "c") == b"SUB t c\n"
    assert nsq.ready(3) == b"RDY 3\n"
    assert nsq.requeue(b"0" * 16, 5) == b"REQ 0000000000000000 5\n"
    assert (
        nsq.finish(b"0" * 16) + nsq.touch(b"1" * 16) + nsq.nop()
        == b"FIN 0000000000000000\nTOUCH 1111111111111111\nNOP\n"
    )
    assert nsq.pub("t", b"x") == b"PUB t\n\0\0\0\x01x"
    assert nsq.mpub("t", (b"x",)) == b"MPUB t\n\0\0\0\x09\0\0\0\x01\0\0\0\x01x"
    assert nsq.identify({"a": 1}) == b'IDENTIFY\n\0\0\0\x07{"a":1}'
    assert nsq.unpack_response(b"\0\0\0\x01E_X") == (nsq.FRAME_TYPE_ERROR, b"E_X")
    message = nsq.decode_message(bytes(7) + b"\x05\xff\xff" + b"0" * 16 + b"body")
    assert (message.timestamp, message.attempts, message.body) == (5, 65535, b"body")
    assert nsq.valid_topic_name("a.b") and not nsq.valid_channel_name("a b")


PROGRAM = """
    import sys
    IMPORT

    kept = []

    def handler(message):
        if message.body == b"go":
            writer.mpub("program", [b"1", b"2", b"3"], answered)
            return True
        message.enable_async()
        kept.append(message)
        if len(kept) == 3:
            for each in kept:
                print(each.body.decode(), each.attempts, flush=True)
                each.finish()

    def answered(conn, data):
        print("stored", data, flush=True)

    reader = nsq.Reader("program", "c", handler, nsqd_tcp_addresses=[sys.argv[1]], max_in_flight=5)
    writer = nsq.Writer([sys.argv[1]])
    nsq.run()
    print("ended", flush=True)
"""


@pytest.mark.parametrize("line", ["import nsq", "from flintmq.compat import pynsq as nsq"])
def test_a_program_moves_by_its_import(line: str, tmp_path: Path) -> None:
    if line == "import nsq" and importlib.util.find_spec("nsq") is None:
        pytest.skip("pynsq is not installed: run scripts/peers")
    nsqd = Nsqd("flintmq", tmp_path / "data")
    nsqd.start()
    try:
        sync.publish("program", b"go", nsqd=nsqd.address)
        program = textwrap.dedent(PROGRAM).replace("IMPORT", line)
        process = subprocess.Popen([sys.executable, "-c", program, nsqd.address], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout as output:
            lines = [output.readline().strip() for _ in range(4)]
            process.send_signal(signal.SIGTERM)
            lines.append(output.readline().strip())
        assert process.wait(60) == 0
    finally:
        nsqd.stop()
    assert sorted(lines) == ["1 1", "2 1", "3 1", "ended", "stored b'OK'"]
