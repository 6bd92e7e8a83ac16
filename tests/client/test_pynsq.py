"""pynsq's names on our client: what a handler may do, and a whole program that only changed its import."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib.util
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flintmq import sync
from flintmq.compat import pynsq as nsq
from flintmq.testing import NsqBroker, NsqCluster

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
    made._consumer._options = dataclasses.replace(made._consumer._options, stop_timeout=0.01)
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
    await until(lambda: "Connection refused" in caplog.text)
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


def test_commands_take_names_of_bytes_too() -> None:
    assert nsq.subscribe(b"t", b"c") == nsq.subscribe("t", "c")
    assert nsq.pub(b"t", b"x") == nsq.pub("t", b"x")
    assert nsq.mpub(b"t", [b"x"]) == nsq.mpub("t", [b"x"])
    assert nsq.valid_topic_name(b"a.b") and not nsq.valid_channel_name(b"a b")


# --- Brokers that come later, and pauses ------------------------------------------------------------------------------


async def test_a_reader_and_a_writer_connect_to_one_more_nsqd(nsq_cluster: Callable[..., NsqCluster]) -> None:
    first, second = nsq_cluster(brokers=2, lookupds=0).brokers
    found: list[bytes] = []

    def handler(message: nsq.Message) -> bool:
        found.append(message.body)
        return True

    made = nsq.Reader("t", "c", handler, nsqd_tcp_addresses=[first.address], max_in_flight=2)
    writer = nsq.Writer([first.address])
    host, _, port = second.address.rpartition(":")
    for each in (made, writer):
        await until(lambda each=each: list(each.conns) == [first.address])
        added = each.connect_to_nsqd(host, int(port))
        assert added is not None
        assert (added.id, added.host, added.port) == (second.address, host, int(port))
        await until(lambda each=each: sorted(each.conns) == sorted([first.address, second.address]))
        # It is there already.
        assert each.connect_to_nsqd(host, int(port)) is None
    second.publish("t", b"from the second")
    await until(lambda: found == [b"from the second"])
    # The only one that is left must be used.
    first.stop()
    await until(lambda: list(writer.conns) == [second.address])
    await writer.pub("t", b"to the second")
    await until(lambda: found == [b"from the second", b"to the second"])
    for each in (made, writer):
        each.close()
        await each._closing


async def test_an_nsqd_that_is_added_before_the_start_is_used_too(nsq_broker: NsqBroker) -> None:
    nowhere = "127.0.0.1:1"
    host, _, port = nsq_broker.address.rpartition(":")
    writer = nsq.Writer([nowhere], reconnect_interval=0.01)
    writer.connect_to_nsqd(host, int(port))
    await writer.pub("t", b"x")
    writer.close()
    await writer._closing
    assert nsq_broker.take("t") == [b"x"]


async def test_lookupds_are_asked_when_somebody_wants_it(nsq_cluster: Callable[..., NsqCluster]) -> None:
    cluster = nsq_cluster(brokers=1)
    found: list[bytes] = []

    def handler(message: nsq.Message) -> bool:
        found.append(message.body)
        return True

    made = nsq.Reader(
        "t", "c", handler, lookupd_http_addresses=cluster.lookupd_addresses, lookupd_poll_interval=10 * 3600
    )
    await made.query_lookupd()
    assert made.conns == {}  # nobody has the topic
    cluster.brokers[0].publish("t", b"x")
    cluster.wait_until_registered("t")
    await made.query_lookupd()
    await until(lambda: found == [b"x"])
    made.close()
    await made._closing


async def test_without_lookupds_there_is_nobody_to_ask(fake: FakeNsqd) -> None:
    made = reader(fake, lambda message: True)
    with pytest.raises(AssertionError):
        made.query_lookupd()
    await fake.subscribed()
    made.close()
    await made._closing


async def test_a_disabled_reader_receives_nothing_until_it_is_enabled(
    fake: FakeNsqd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nsq, "_DISABLED_POLL_SECONDS", 0.001)
    answer: list[Any] = [True]

    class Pausable(nsq.Reader):
        def disabled(self) -> bool:
            if isinstance(answer[0], Exception):
                raise answer[0]
            return bool(answer[0])

    made = Pausable("t", "c", lambda message: True, nsqd_tcp_addresses=[fake.address], max_in_flight=10)
    await until(lambda: fake.connections and fake.last.said(b"SUB"))
    made.set_max_in_flight(7)
    await asyncio.sleep(0.02)
    assert not fake.last.ready
    answer[0] = False
    await until(lambda: fake.last.ready == 7)
    answer[0] = True
    await until(lambda: fake.last.ready == 0)
    # Who cannot tell changes nothing.
    answer[0] = ZeroDivisionError()
    await until(lambda: "disabled() failed" in caplog.text)
    assert fake.last.ready == 0
    answer[0] = False
    await until(lambda: fake.last.ready == 7)
    made.close()
    await made._closing


async def test_a_legacy_reader_has_a_channel_for_each_task(nsq_broker: NsqBroker) -> None:
    found: list[str] = []

    def handler(name: str) -> Callable[[nsq.Message], bool]:
        def handle(message: nsq.Message) -> bool:
            found.append(f"{name} {message.body.decode()}")
            return True

        return handle

    with pytest.warns(DeprecationWarning, match="Reader for each handler"):
        made = nsq.LegacyReader({"a": handler("a"), "b": handler("b")}, "t", "c", [nsq_broker.address], max_in_flight=3)
    with pytest.warns(DeprecationWarning):
        single = nsq.LegacyReader(
            all_tasks={"only": handler("only")}, topic="t", channel="d", nsqd_tcp_addresses=nsq_broker.address
        )
    assert [reader.channel for reader in (*made.readers, *single.readers)] == ["c.a", "c.b", "d"]
    assert made.readers[0].max_in_flight == 3
    await until(lambda: all(reader.conns for reader in (*made.readers, *single.readers)))
    nsq_broker.publish("t", b"x")
    await until(lambda: len(found) == 3)
    assert sorted(found) == ["a x", "b x", "only x"]
    for each in (*made.readers, *single.readers):
        each.close()
        await each._closing
    with pytest.warns(DeprecationWarning), pytest.raises(AssertionError, match="callable"):
        nsq.LegacyReader({"a": 5}, "t", "c", [nsq_broker.address])


# --- Single connections -----------------------------------------------------------------------------------------------


class Listener:
    """Notes every event of an AsyncConn."""

    NAMES = (
        *("connect", "identify", "identify_response", "auth", "auth_response", "ready", "message", "response"),
        *("heartbeat", "error", "close", "backoff", "resume", "continue"),
    )

    def __init__(self, conn: nsq.AsyncConn) -> None:
        self.events: list[str] = []
        self.messages: list[nsq.Message] = []
        self.responses: list[bytes] = []
        self.errors: list[nsq.Error] = []
        self.data: dict[str, Any] = {}
        for name in self.NAMES:
            conn.on(name, self._noting(conn, name))

    def _noting(self, expected: nsq.AsyncConn, name: str) -> Callable[..., None]:
        def note(
            conn: nsq.AsyncConn,
            data: Any = None,
            message: nsq.Message | None = None,
            error: nsq.Error | None = None,
        ) -> None:
            assert conn is expected
            self.events.append(name)
            if message is not None:
                self.messages.append(message)
            if error is not None:
                self.errors.append(error)
            if name == "response":
                self.responses.append(data)
            elif data is not None:
                self.data[name] = data

        return note


def connection_to(address: str, **options: Any) -> tuple[nsq.AsyncConn, Listener]:
    host, _, port = address.rpartition(":")
    conn = nsq.AsyncConn(host, int(port), **options)
    return conn, Listener(conn)


async def test_a_connection_tells_what_happens(nsq_broker: NsqBroker) -> None:
    conn, told = connection_to(nsq_broker.address, requeue_delay=0, deflate=True)
    assert conn.id == str(conn) == nsq_broker.address
    assert conn.closed() and conn.in_flight == conn.rdy == 0
    with pytest.raises(nsq.SendError, match="not connected"):
        conn.send(nsq.nop())
    assert not conn.send_rdy(1)
    conn.connect()
    assert conn.connecting()
    conn.connect()  # already on its way
    await until(lambda: "ready" in told.events)
    assert told.events == ["connect", "identify", "identify_response", "ready"]
    assert told.data["identify"]["deflate"] is told.data["identify_response"]["deflate"] is True
    assert conn.connected() and conn.max_rdy_count == told.data["identify_response"]["max_rdy_count"]

    # All in one turn; what belongs before RDY goes before it.
    conn.send(nsq.pub("t", b"one"))
    conn.send(nsq.mpub("t", [b"two", b"three"]))
    conn.send(nsq.subscribe("t", "c"))
    assert conn.send_rdy(5)
    assert conn.send_rdy(5)
    await until(lambda: len(told.messages) == 3)
    assert told.responses == [b"OK"] * 3
    assert (conn.rdy, conn.last_rdy, conn.in_flight) == (5, 5, 3)
    one, two, three = told.messages
    assert (one.body, two.body, three.body) == (b"one", b"two", b"three")

    one.finish()
    two.requeue()
    three.touch()
    three.requeue(backoff=False, delay=0)
    await until(lambda: len(told.messages) == 5)
    assert told.events[-5:-2] == ["resume", "backoff", "continue"]
    assert [message.attempts for message in told.messages[3:]] == [2, 2]
    # By hand, as a program may that keeps only ids.
    for message in told.messages[3:]:
        conn.send(nsq.finish(message.id))
    assert conn.in_flight == 0
    assert told.events[-2:] == ["resume", "resume"]
    await nsq_broker.until_empty("t", "c")
    conn.send(nsq.finish(one.id))  # twice
    await until(lambda: told.errors)
    assert "E_FIN_FAILED" in str(told.errors[0])

    conn.close()
    await until(lambda: "close" in told.events)
    assert conn.closed() and len(told.errors) == 1
    conn.close()


async def test_a_connection_that_is_refused_or_lost_tells_so_and_may_be_made_again(nsq_broker: NsqBroker) -> None:
    conn, told = connection_to(nsq_broker.address)
    nsq_broker.stop()
    conn.connect()
    await until(lambda: "close" in told.events)
    assert told.events == ["error", "close"]
    assert isinstance(told.errors[0], nsq.ConnectionClosedError)

    nsq_broker.restart()
    conn.connect()
    await until(lambda: "ready" in told.events)
    nsq_broker.cut()
    await until(lambda: told.events.count("close") == 2)
    assert isinstance(told.errors[1], nsq.ConnectionClosedError)
    assert conn.closed()

    conn.connect()
    await until(lambda: told.events.count("ready") == 2)
    conn.send(b"NONSENSE\n")
    await until(lambda: told.events.count("close") == 3)
    # Once, though the connection ends by it.
    assert len(told.errors) == 3
    assert "E_INVALID" in str(told.errors[2])

    conn.connect()
    conn.close()
    await until(lambda: told.events.count("close") == 4)
    assert len(told.errors) == 3


async def test_a_connection_to_somebody_who_talks_nonsense_ends(fake: FakeNsqd) -> None:
    conn, told = connection_to(fake.address, auth_secret="secret")
    fake.features["auth_required"] = True
    conn.connect()
    await until(lambda: "ready" in told.events)
    assert told.events[2:] == ["identify_response", "auth", "auth_response", "ready"]
    assert told.data["auth"] == "secret"
    assert told.data["auth_response"]["permission_count"] == 1
    fake.last.respond(b"_heartbeat_")
    await until(lambda: fake.last.said(b"NOP") and "heartbeat" in told.events)
    fake.last.write(b"\xff" * 20)
    await until(lambda: "close" in told.events)
    assert isinstance(told.errors[0], nsq.IntegrityError)


async def test_a_listener_that_fails_ends_nothing(fake: FakeNsqd, caplog: pytest.LogCaptureFixture) -> None:
    conn, told = connection_to(fake.address)

    def fail(**_: Any) -> None:
        raise ZeroDivisionError

    conn.on("ready", fail)
    conn.connect()
    await until(lambda: "a listener to ready failed" in caplog.text)
    conn.send(nsq.nop())
    await until(lambda: fake.last.said(b"NOP"))
    conn.off("ready", fail)
    conn.close()
    await until(lambda: "close" in told.events)


def test_a_connection_takes_pynsqs_arguments_only() -> None:
    assert nsq.AsyncConn("::1", 4150, 2.0, 15).id == "[::1]:4150"
    for arguments in ({"host": 1}, {"port": "4150"}, {"no_such_argument": 1}, {"requeue_delay": -1}):
        with pytest.raises(AssertionError):
            nsq.AsyncConn(**{"host": "127.0.0.1", "port": 4150, **arguments})


def test_a_socket_that_blocks(nsq_broker: NsqBroker) -> None:
    host, _, port = nsq_broker.address.rpartition(":")
    with nsq.SyncConn(timeout=60.0) as conn:
        with pytest.raises(nsq.SendError, match="not connected"):
            conn.send(nsq.nop())
        conn.connect(host, int(port))
        body = b"x" * 100_000
        conn.send(nsq.mpub("t", [b"one", body]) + nsq.subscribe("t", "c") + nsq.ready(2))
        frames = [nsq.unpack_response(conn.read_response()) for _ in range(4)]
        assert frames[:2] == [(nsq.FRAME_TYPE_RESPONSE, b"OK")] * 2
        assert [kind for kind, _ in frames[2:]] == [nsq.FRAME_TYPE_MESSAGE] * 2
        messages = [nsq.decode_message(payload) for _, payload in frames[2:]]
        assert [message.body for message in messages] == [b"one", body]
        for message in messages:
            conn.send(nsq.finish(message.id))
        nsq_broker.wait_until_empty("t", "c")
        nsq_broker.cut()
        with pytest.raises((nsq.ConnectionClosedError, ConnectionError)):
            conn.read_response()


async def test_a_socket_does_not_believe_a_size_and_keeps_what_came(fake: FakeNsqd) -> None:
    host, _, port = fake.address.rpartition(":")
    with nsq.SyncConn(timeout=0.05) as conn:
        await asyncio.to_thread(conn.connect, host, int(port))
        await until(lambda: fake.connections)
        fake.last.write(b"\0\0\0\x06\0\0")
        # Half a frame: nobody knows when the rest comes.
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(conn.read_response)
        fake.last.write(b"\0\0OK")
        conn.s.settimeout(60)  # type: ignore[union-attr]
        assert await asyncio.to_thread(conn.read_response) == b"\0\0\0\0OK"
        for size in (-1, 3, 1 << 30):
            conn.buffer.clear()
            fake.last.write(size.to_bytes(4, "big", signed=True))
            with pytest.raises(nsq.IntegrityError, match=f"a frame of {size} bytes"):
                await asyncio.to_thread(conn.read_response)


# --- A whole program --------------------------------------------------------------------------------------------------

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


# --- Under Tornado, as pynsq's own programs are written

needs_tornado = pytest.mark.skipif(importlib.util.find_spec("tornado") is None, reason="Tornado is not installed")

#: Only the address is not in the program.
TORNADO_PROGRAMS = {
    "on Tornado's own loop": """
        import tornado.ioloop

        def handler(message):
            print(message.body)
            loop.call_later(0, loop.stop)
            return True

        reader = nsq.Reader('numbers', 'tornado', handler, nsqd_tcp_addresses=[NSQD])
        loop = tornado.ioloop.IOLoop.current()
        loop.start()
    """,
    "without Tornado": """
        def handler(message):
            print(message.body)
            os.kill(os.getpid(), signal.SIGTERM)
            return True

        reader = nsq.Reader('numbers', 'plain', handler, nsqd_tcp_addresses=[NSQD])
        nsq.run()
    """,
}

_BEFORE = """
import os, signal, sys
from flintmq.compat import pynsq as nsq
NSQD = sys.argv[1]
"""


@needs_tornado
@pytest.mark.parametrize("name", TORNADO_PROGRAMS)
def test_a_reader_that_is_made_before_the_loop_receives(nsq_broker: NsqBroker, name: str) -> None:
    nsq_broker.publish("numbers", b"1", b"2", b"3")
    program = _BEFORE + textwrap.dedent(TORNADO_PROGRAMS[name])
    command = [sys.executable, "-c", program, nsq_broker.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "b'" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def _documented_programs() -> dict[str, str]:
    """The programs in the documentation of the pynsq that is installed, by class and number."""
    spec = importlib.util.find_spec("nsq")
    found: dict[str, str] = {}
    if spec is None or spec.origin is None:
        return found
    for name in ("reader", "writer"):
        module = ast.parse(Path(spec.origin).with_name(f"{name}.py").read_text(encoding="utf-8"))
        text = next(ast.get_docstring(node) or "" for node in module.body if isinstance(node, ast.ClassDef))
        for number, block in enumerate(re.findall(r"::\n\n((?: {4}.*\n|\n)+)", text)):
            found[f"{name} {number}"] = textwrap.dedent(block)
    return found


DOCUMENTED = _documented_programs()
#: What a program prints, or where it has published, when it works.
WORKS = {"reader 0": 3, "reader 1": 5, "writer 0": 2, "writer 1": 0}
#: A program that ends where a web application begins.
_SERVE = """
import tornado.httpclient
server = tornado.httpserver.HTTPServer(Application([('/', MainHandler)]))
server.listen(0, '127.0.0.1')
port = next(iter(server._sockets.values())).getsockname()[1]
tornado.ioloop.IOLoop.current().add_callback(
    tornado.httpclient.AsyncHTTPClient().fetch, 'http://127.0.0.1:%d/' % port)
tornado.ioloop.IOLoop.current().start()
"""


@needs_tornado
@pytest.mark.skipif(not DOCUMENTED, reason="pynsq is not installed")
@pytest.mark.parametrize("name", WORKS)
def test_programs_of_pynsq_run_unchanged(nsq_cluster: Callable[..., NsqCluster], name: str) -> None:
    cluster = nsq_cluster(brokers=1)
    broker = cluster.brokers[0]
    assert DOCUMENTED.keys() == WORKS.keys()
    program = DOCUMENTED[name] + (_SERVE if name == "writer 1" else "")
    # Python 2 is where they come from: there print is a statement, and text is bytes. The rest is where and how often.
    program = re.sub(r"^( *)print ([^(\n].*)$", r"\1print(\2)", program, flags=re.MULTILINE)
    program = program.replace("time.strftime('%H:%M:%S')", "time.strftime('%H:%M:%S').encode()").replace("1000", "50")
    program = program.replace("127.0.0.1:4150", broker.address)
    program = program.replace("http://127.0.0.1:4161", cluster.lookupd_addresses[0])
    broker.publish("nsq_reader", b"1", b"2", b"3")
    cluster.wait_until_registered("nsq_reader")
    before = "import sys; from flintmq.compat import pynsq; sys.modules['nsq'] = pynsq\n"
    command = [sys.executable, "-u", "-c", before + program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watch = threading.Timer(30, process.kill)
        watch.start()
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline().strip() for _ in range(WORKS[name])]
        if name == "writer 1":
            # Two that are published alone, and two together; one more is deferred.
            assert len(broker.take("log", 4)) == 4
        process.terminate()
        said = process.stderr.read()
        watch.cancel()
    assert all(lines), said
    assert "Traceback" not in said
    if name == "writer 0":
        assert lines == ["b'OK'"] * 2
    if name != "writer 1":
        # `nsq.run` ends in order; Tornado's own loop is ended by the signal.
        assert process.returncode == 0, said


# --- What goes wrong is said


async def test_a_message_that_is_none_is_an_assertion_at_the_call(fake: FakeNsqd) -> None:
    writer = nsq.Writer([fake.address])
    for body in ("a text", 7, None, {"a": 1}):
        for call in (
            lambda body=body: writer.pub("t", body),
            lambda body=body: writer.mpub("t", [b"x", body]),
            lambda body=body: writer.dpub("t", 5, body),
        ):
            with pytest.raises(AssertionError, match="a message must be bytes"):
                call()
    with pytest.raises(AssertionError, match="a topic must be"):
        writer.pub(None, b"x")  # type: ignore[arg-type]
    # pynsq takes bytes.
    await writer.pub(b"t", bytearray(b"x"))
    assert [command[:2] for command in fake.last.said(b"PUB")] == [(b"PUB", b"t")]
    with pytest.raises(nsq.Error, match="not a topic name"):
        await writer.pub(b"\xff", b"x")
    writer.close()
    await writer._closing


async def test_a_callback_that_fails_is_logged(fake: FakeNsqd, caplog: pytest.LogCaptureFixture) -> None:
    def callback(conn: Any, data: Any) -> None:
        raise ZeroDivisionError("in a callback")

    writer = nsq.Writer([fake.address])
    await writer.pub("t", b"x", callback)
    assert "in a callback" in caplog.text
    writer.close()
    await writer._closing


@pytest.mark.parametrize("count", [1, 1000])
async def test_a_writer_that_was_never_connected_is_closed_at_once(count: int) -> None:
    told: list[Any] = []
    writer = nsq.Writer(["127.0.0.1:1"])
    body = bytes(100_000)
    for _ in range(count):
        writer.pub("t", body, lambda conn, data: told.append(data))
    async with asyncio.timeout(20):
        # Those for which there is no more room are told so.
        await until(lambda: count == 1 or told)
        writer.close()
        await writer._closing
    assert len(told) == count and all(isinstance(data, nsq.Error) for data in told)
    refused = [data for data in told if "wait for a connection" in str(data)]
    assert len(refused) == max(0, count - (64 << 20) // 102_048 - 1)


@pytest.mark.parametrize(("arguments", "reason"), [({"topic": "bad topic!"}, "not a topic name"), ({}, "handler")])
async def test_a_reader_that_cannot_start_says_so_and_can_be_closed(
    arguments: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    handler = (lambda message: True) if arguments else None
    options: dict[str, Any] = {"topic": "t", "channel": "c", "nsqd_tcp_addresses": ["127.0.0.1:1"], **arguments}
    made = nsq.Reader(message_handler=handler, **options)
    await until(lambda: "cannot start" in caplog.text)
    assert reason in caplog.text
    made.close()
    await made._closing


STUCK = """
    import signal, os, threading
    from flintmq.compat import pynsq as nsq

    class Slow(nsq.Writer):
        async def _stop(self):
            print("stopping", flush=True)
            await __import__("asyncio").sleep(1000)

    KIND
    try:
        nsq.run()
    finally:
        print("ended", flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "signals", "expected"),
    [
        ("nsq.Reader('bad topic!', 'c', print, nsqd_tcp_addresses=['127.0.0.1:1'])", 0, ["ended"]),
        ("Slow(['127.0.0.1:1'])", 2, ["stopping", "ended"]),
    ],
    ids=["a Reader that cannot start", "a second signal"],
)
def test_run_ends(kind: str, signals: int, expected: list[str]) -> None:
    program = textwrap.dedent(STUCK).replace("KIND", kind)
    process = subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines: list[str] = []
    assert process.stderr is not None and process.stdout is not None
    with process.stdout, process.stderr:
        if signals:
            # What it dials is not there; by then its signals are handled.
            assert b"127.0.0.1:1" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            lines.append(process.stdout.readline().decode().strip())
            process.send_signal(signal.SIGTERM)
        lines += process.stdout.read().decode().split()
        said = process.stderr.read().decode()
    assert process.wait(60) == (0 if signals else 1), said
    assert lines == expected
    if not signals:
        assert "OptionError" in said and "bad topic!" in said
