"""One connection, without a socket: any split of its input, bad input of every kind, slow readers, huge batches.

What the Go daemon answers to which command is in ``tests/conformance``; here is what a conversation cannot show.
"""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from conftest import StartBroker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flintmq.broker.daemon import Broker
from flintmq.broker.net.commands import RECEIVE_SLACK
from flintmq.broker.net.heartbeat import MAGIC_TIMEOUT
from flintmq.broker.net.session import LINGER, Session
from flintmq.protocol.compression import Deflate, Snappy
from flintmq.protocol.wire import MAGIC_V2, OK_FRAME, encode_command, encode_mpub
from support.fakes import Client, CountingDisk, FakeClock, dpub, pub, quiet, until

OK = (0, b"OK")


def identify(**fields: Any) -> bytes:
    return encode_command(b"IDENTIFY", body=json.dumps(fields).encode())


def size(number: int) -> bytes:
    return number.to_bytes(4, "big", signed=True)


async def answered(client: Client) -> list[tuple[int, bytes]]:
    """All the frames, when no more will come."""
    await quiet(client.broker)
    return client.frames


# --- Any split of the stream ------------------------------------------------------------------------------------------

bodies = st.binary(min_size=1, max_size=60)
names = st.sampled_from(["t", "u", "v#ephemeral"])
NO_SUCH_ID = b"0123456789abcdef"

publishes = st.one_of(
    st.builds(pub, names, bodies),
    st.builds(lambda name, many: encode_mpub(name.encode(), many), names, st.lists(bodies, min_size=1, max_size=20)),
    st.builds(dpub, names, st.integers(0, 3_600_000), bodies),
    # The same line with something behind it: another way through the parser.
    st.builds(lambda name, body: encode_command(b"PUB", name.encode(), b"extra", body=body), names, bodies),
    st.just(b"NOP\n"),
    st.just(b"NOP\r\n"),
)
answers = st.sampled_from(
    [b"FIN %s\n" % NO_SUCH_ID, b"REQ %s 5\n" % NO_SUCH_ID, b"TOUCH %s\n" % NO_SUCH_ID, b"RDY 0\n", b"RDY\n"]
)
conversations = st.builds(
    lambda before, subscribed, after: b"".join(
        [identify(client_id="c"), *before, b"SUB t ch\n", *subscribed, b"CLS\n", *after]
    ),
    st.lists(publishes, max_size=6),
    st.lists(st.one_of(publishes, answers), max_size=10),
    st.lists(publishes, max_size=3),
)


def in_a_broker(test: Any, tmp_path: Path) -> None:
    """Run an async test once, with a broker of its own: for examples, which come many to one test."""

    async def run() -> None:
        raised: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        async with Broker(data_path=tmp_path, clock=FakeClock(), disk=CountingDisk(), disk_reserve=0) as broker:
            await test(broker)
        assert raised == []

    asyncio.run(run())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stream=conversations, sizes=st.lists(st.integers(1, 40), max_size=400))
def test_any_split_of_a_stream_of_commands_gives_the_same_frames(
    tmp_path_factory: pytest.TempPathFactory, stream: bytes, sizes: list[int]
) -> None:
    async def one_way(broker: Broker, sizes: list[int]) -> tuple[list[Any], dict[str, int]]:
        client = Client(broker, magic=False)
        client.send(MAGIC_V2 + stream, sizes=sizes)
        frames = [frame if frame[0] < 2 else (2, frame[1][26:]) for frame in await answered(client)]
        counts = {name: topic.message_count for name, topic in broker.topics.items()}
        assert not client.is_over
        return frames, counts

    results: list[Any] = []
    for split in ([], sizes, [1] * len(stream)):

        async def test(broker: Broker, split: list[int] = split) -> None:
            results.append(await one_way(broker, split))

        in_a_broker(test, tmp_path_factory.mktemp("data"))
    # Message frames come when they can: their place among the answers is not part of the protocol.
    for frames, _ in results:
        frames.sort(key=lambda frame: frame[0] == 2)
    assert results[0] == results[1] == results[2]


words = [b"IDENTIFY", b"AUTH", b"SUB", b"PUB", b"MPUB", b"DPUB", b"RDY", b"FIN", b"REQ", b"TOUCH", b"CLS", b"NOP"]
fragments = st.one_of(
    st.sampled_from([word + end for word in words for end in (b"\n", b" ", b" t\n", b" t c\n", b" t 1\n")]),
    st.integers(-(2**31), 2**31 - 1).map(size),
    st.integers(0, 20).map(size),
    st.sampled_from([b"\r\n", b"{}", b'{"heartbeat_interval":-1}', NO_SUCH_ID, b"\n", b" ", b"\xff\x00"]),
    st.binary(max_size=30),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(fragments, max_size=25), magic=st.booleans(), whole=st.booleans())
def test_garbage_gives_error_frames_or_a_close_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    pieces: list[bytes],
    magic: bool,
    whole: bool,
) -> None:
    caplog.clear()

    async def test(broker: Broker) -> None:
        client = Client(broker, magic=magic)
        data = b"".join(pieces)
        client.send(data, sizes=[] if whole else [len(piece) for piece in pieces])
        client.end_input()
        for kind, text in await answered(client):
            assert kind in (0, 1, 2)
            assert kind != 1 or text.startswith(b"E_")
        assert client.is_over
        # The broker is none the worse for it.
        other = Client(broker)
        await other.publish("sound", b"as ever")

    in_a_broker(test, tmp_path_factory.mktemp("data"))
    assert "unexpected error" not in caplog.text


# --- Traps ------------------------------------------------------------------------------------------------------------


async def test_a_publish_goes_to_the_topic_of_its_own_line(broker: Broker) -> None:
    """A repeated PUB line is not parsed again; other publishes in between must not change where it leads."""
    client = Client(broker)
    await client.publish("a", b"1", b"2")
    await client.publish_later("b", b"3", 1)
    await client.publish("a", b"4")
    assert await client.ask(encode_command(b"PUB", b"c", b"extra", body=b"5")) == b"OK"
    await client.publish("a", b"6")
    await client.publish_many("d", [b"7", b"8"])
    await client.publish("a", b"9")
    counts = {name: topic.message_count for name, topic in broker.topics.items()}
    assert counts == {"a": 5, "b": 1, "c": 1, "d": 2}
    assert client.session.publish_counts == counts


async def test_a_repeated_publish_finds_the_topic_made_again(broker: Broker) -> None:
    client = Client(broker)
    await client.publish("t", b"1", b"2")
    old = broker.topics["t"]
    broker.delete_topic("t")
    await client.publish("t", b"3")
    assert broker.topics["t"] is not old
    assert broker.topics["t"].depth == 1


async def test_identify_replaces_names_even_with_nothing(broker: Broker) -> None:
    client = Client(broker, peer=("10.1.2.3", 99))
    assert (client.session.identity.client_id, client.session.identity.hostname) == ("10.1.2.3", "10.1.2.3")
    assert client.session.remote_address == "10.1.2.3:99"
    await client.ask(identify())
    assert (client.session.identity.client_id, client.session.identity.hostname) == ("", "")


async def test_a_client_on_a_unix_socket_has_no_address_to_be_named_after(broker: Broker) -> None:
    client = Client(broker, peer="")
    assert (client.session.identity.client_id, client.session.remote_address) == ("", "@")


async def test_snappy_is_granted_with_one_more_ok_inside(broker: Broker) -> None:
    client = Client(broker)
    # What is sent behind IDENTIFY is dropped: it was written before the answer was read.
    client.send(identify(feature_negotiation=True, snappy=True) + b"NOP\n")
    received = bytes(client.transport.received)
    plain, packed = received[: received.index(b"\xff\x06")], received[received.index(b"\xff\x06") :]
    assert json.loads(plain[8:])["snappy"] is True
    assert packed == bytes.fromhex("ff060000734e61507059 010e0000 26982bcf 00000006000000004f4b")


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
async def test_the_answer_to_sub_comes_before_any_message(start_broker: StartBroker, durability: str) -> None:
    broker = await start_broker(durability=durability)
    publisher = Client(broker)
    publisher.send(pub("t", b"one"))
    await quiet(broker)
    client = Client(broker)
    # In one go, so that OKs still wait for the disk when RDY comes.
    client.send(pub("t", b"two") + pub("t", b"x" * 70_000) + b"SUB t c\nRDY 5\n")
    frames = await answered(client)
    assert [frame for frame in frames if frame[0] == 0] == frames[:3] == [OK] * 3
    assert sorted(len(frame[1]) - 26 for frame in frames[3:]) == [3, 3, 70_000]


class StepwiseDisk(CountingDisk):
    """What its threads are to do waits until it is told to go on, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = False
        self.held: list[tuple[Any, ...]] = []

    def submit(self, *work: Any) -> None:
        if self.hold:
            self.held.append(work)
        else:
            super().submit(*work)

    def step(self) -> None:
        super().submit(*self.held.pop(0))

    def let_go(self) -> None:
        self.hold = False
        while self.held:
            self.step()


async def test_the_last_rdy_counts_whatever_the_others_wait_for(start_broker: StartBroker) -> None:
    disk = StepwiseDisk()
    broker = await start_broker(disk=disk, durability="fsync")
    await Client(broker).publish("t", b"one")
    await quiet(broker)
    client = Client(broker)
    disk.hold = True
    client.send(b"SUB t c\nRDY 5\n")
    await until(lambda: len(disk.held) == 1)
    client.send(pub("u", b"two"))
    await until(lambda: len(disk.held) == 2)
    client.send(b"RDY 3\n")
    [session] = broker.topics["t"].channels["c"].sessions.values()
    disk.step()
    await until(lambda: session.ready_count == 5)
    client.send(b"RDY 0\n")
    disk.let_go()
    await quiet(broker)
    assert client.responses == [b"OK", b"OK"]
    assert session.ready_count == 0
    await Client(broker).publish("t", b"three")
    await quiet(broker)
    assert client.bodies == [b"one"]
    client.send(b"RDY 1\n" + b"FIN " + client.messages[0].id + b"\n")
    await quiet(broker)
    assert client.bodies == [b"one", b"three"]


@pytest.mark.parametrize("codec", [Snappy, lambda: Deflate(6)], ids=["snappy", "deflate"])
async def test_a_compressed_conversation_may_be_split_anywhere(broker: Broker, codec: Any) -> None:
    client = Client(broker)
    field = "snappy" if codec is Snappy else "deflate"
    client.send(identify(feature_negotiation=True, **{field: True}))
    mine, theirs = codec(), codec()
    head = int.from_bytes(client.transport.received[:4], "big") + 4
    del client.transport.received[:head]
    stream = mine.compress(pub("t", b"one") + pub("t", b"x" * 70_000)) + mine.compress(b"SUB t c\nRDY 5\n")
    client.send(stream, sizes=[1] * 200)
    await quiet(broker)
    received = b"".join(theirs.decompress(bytes(client.transport.received)))
    assert received.startswith(OK_FRAME * 4)
    assert received.count(b"x" * 70_000) == 1
    assert len(received) == 4 * len(OK_FRAME) + 2 * 34 + 3 + 70_000


async def test_a_compressed_stream_that_is_damaged_closes_the_connection(broker: Broker) -> None:
    client = Client(broker)
    client.send(identify(feature_negotiation=True, deflate=True))
    client.send(b"\xff" * 20)
    assert client.transport.closing


async def test_a_compression_bomb_costs_its_connection_and_not_the_memory(broker: Broker) -> None:
    client = Client(broker)
    client.send(identify(feature_negotiation=True, deflate=True))
    bomb = Deflate(9).compress(bytes(200 << 20))
    tracemalloc.start()
    try:
        client.send(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert client.transport.closing
    assert peak < 8 << 20


async def test_a_deflate_stream_that_ended_closes_the_connection(broker: Broker) -> None:
    client = Client(broker)
    client.send(identify(feature_negotiation=True, deflate=True))
    stream = zlib.compressobj(6, zlib.DEFLATED, -15)
    client.send(stream.compress(pub("t", b"last")) + stream.flush() + b"more")
    await quiet(broker)
    assert broker.topics["t"].depth == 1
    assert client.transport.closing


# --- Lengths that lie -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        b"PUB t\n" + size(1 << 30) + b"x" * 100,
        b"DPUB t 5\n" + size(1 << 30) + b"x" * 100,
        b"MPUB t\n" + size(1 << 30) + size(1) + size(1 << 30) + b"x" * 100,
        b"MPUB t\n" + size(1 << 30) + size((1 << 30) // 5 - 1) + size(1) + b"x",
        b"IDENTIFY\n" + size(64 << 10) + b"x" * 100,
        b"AUTH\n" + size(64 << 10) + b"x" * 100,
    ],
    ids=lambda command: command.split(b"\n")[0].decode(),
)
async def test_a_length_that_promises_much_takes_no_memory(start_broker: StartBroker, command: bytes) -> None:
    broker = await start_broker(max_msg_size=1 << 30, max_body_size=1 << 30)
    client = Client(broker)
    tracemalloc.start()
    try:
        client.send(command)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not client.is_over
    assert peak < 1 << 20


@pytest.mark.parametrize("value", [b"{}", b"0", b"[[]]", b'{"a":0}'])
async def test_an_identify_of_very_many_values_is_refused_unread(broker: Broker, value: bytes) -> None:
    """As Python objects they would take hundreds of megabytes, and seconds to make."""
    client = Client(broker)
    body = b'{"x":[' + b",".join([value] * (60_000 // (len(value) + 1))) + b"]}"
    tracemalloc.start()
    try:
        client.send(b"IDENTIFY\n" + size(len(body)) + body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert client.errors == [b"E_BAD_BODY IDENTIFY failed to decode JSON body"]
    assert peak < 8 * len(body)
    other = Client(broker)
    other.send(b"IDENTIFY\n" + size(len(body)) + b'{"client_id":"' + b"x" * (len(body) - 16) + b'"}')
    assert await answered(other) == [OK]


async def test_memory_follows_the_bytes_that_came(broker: Broker) -> None:
    client = Client(broker)
    client.send(b"PUB t\n" + size(1 << 20))
    for _ in range(15):
        client.send(b"x" * (64 << 10))
    tracemalloc.start()
    try:
        client.send(b"x" * (32 << 10))
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
    client.send(b"x" * (32 << 10))
    assert await answered(client) == [OK]


async def test_a_batch_whose_size_lies_has_a_limit_all_the_same(start_broker: StartBroker) -> None:
    broker = await start_broker(max_body_size=1000, max_msg_size=10_000)
    client = Client(broker)
    client.send(b"MPUB t\n" + size(4) + size(190))
    record = size(10_000) + b"x" * 10_000
    sent = 0
    while not client.is_over:
        client.send(record)
        sent += len(record)
        assert sent <= 2 * 1000 + RECEIVE_SLACK + 2 * len(record)
    [error] = client.errors
    assert error.startswith(b"E_BAD_BODY MPUB body too big")
    assert broker.topics["t"].message_count == 0


async def test_a_line_without_end_is_cut_off_at_its_limit(broker: Broker) -> None:
    client = Client(broker)
    client.send(b"x" * 16_383)
    assert not client.transport.closing
    client.send(b"x")
    assert client.transport.closing
    assert client.frames == []


# --- Silence ----------------------------------------------------------------------------------------------------------


def timer_of(session: Session) -> asyncio.TimerHandle:
    assert session.heartbeat.timer is not None
    return session.heartbeat.timer


async def test_silence_before_the_magic_is_closed_after_five_seconds(broker: Broker) -> None:
    client = Client(broker, magic=False)
    timer = timer_of(client.session)
    loop = asyncio.get_running_loop()
    assert MAGIC_TIMEOUT == 5
    assert 4 < timer.when() - loop.time() <= 5
    client.session.heartbeat.no_magic()
    assert client.transport.closing
    assert client.frames == []
    assert client.session.ident not in broker.sessions


async def test_three_bytes_of_the_magic_are_silence_too(broker: Broker) -> None:
    client = Client(broker, magic=False)
    timer = timer_of(client.session)
    client.send(MAGIC_V2[:3])
    assert timer_of(client.session) is timer
    client.send(MAGIC_V2[3:])
    assert timer.cancelled()
    assert not client.transport.closing


class LoopTime:
    """The loop's time, moved by hand: a session's timer is called when its moment has come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._time = loop.time()
        self._client: Client | None = None
        monkeypatch.setattr(loop, "time", lambda: self._time)

    def move(self, client: Client, seconds: float) -> None:
        """Let so much time pass for this client, as the loop would."""
        end = self._time + seconds
        while client.session.heartbeat.timer is not None and client.session.heartbeat.timer.when() <= end:
            timer = client.session.heartbeat.timer
            self._time = max(self._time, timer.when())
            timer.cancel()
            client.session.heartbeat.on_timer()
        self._time = end


HEARTBEAT_BYTES = bytes.fromhex("0000000f 00000000") + b"_heartbeat_"


async def test_half_a_frame_and_then_silence_is_told_and_closed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = LoopTime(monkeypatch)
    client = Client(broker)
    client.send(b"PUB t\n" + size(10) + b"half")
    time.move(client, 59)
    assert not client.is_over
    time.move(client, 2)
    assert client.errors == [b"E_BAD_MESSAGE PUB failed to read message body"]
    assert client.transport.ended
    assert "t" not in broker.topics


async def test_silence_ends_at_its_moment_however_sums_are_rounded(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer of the very moment that is not taken for it would be set again and again.

    Numbers beyond a power of two have a bit less behind the point: a machine that runs for 8,192 seconds, for example.
    """
    time = LoopTime(monkeypatch)
    chance = random.Random(1)
    for power in range(14, 34):
        time._time = 2.0**power - 60 * chance.random()
        client = Client(broker)
        time.move(client, 61)
        assert client.is_over


async def test_bytes_alone_do_not_keep_a_connection(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that trickles in is as good as silence: only whole commands count."""
    time = LoopTime(monkeypatch)
    client = Client(broker)
    client.send(b"PUB t\n" + size(1000))
    for _ in range(13):
        client.send(b"x")
        time.move(client, 5)
    assert client.is_over


async def test_a_busy_client_gets_heartbeats_all_the_same(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    time = LoopTime(monkeypatch)
    client = Client(broker)
    for _ in range(20):
        client.send(b"NOP\n")
        time.move(client, 10)
    assert bytes(client.transport.received) == HEARTBEAT_BYTES * 6
    assert not client.is_over


async def test_without_heartbeats_a_connection_may_be_silent_for_ever(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = LoopTime(monkeypatch)
    client = Client(broker)
    assert await client.ask(identify(heartbeat_interval=-1)) == b"OK"
    time.move(client, 100_000)
    assert not client.is_over
    assert client.session.heartbeat.timer is None
    assert bytes(client.transport.received) == b""


async def test_a_peer_that_does_not_read_is_dropped_after_an_interval(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may send as many commands as it likes: nothing reaches it."""
    time = LoopTime(monkeypatch)
    client = Client(broker)
    client.transport.stalled = True
    await client.publish("t", b"x")
    for _ in range(7):
        client.send(b"NOP\n")
        time.move(client, 10)
    assert client.transport.aborted


async def test_after_an_error_the_peer_gets_a_moment_to_read_it(broker: Broker) -> None:
    client = Client(broker)
    client.send(b"nonsense\n")
    assert client.errors == [b"E_INVALID invalid command nonsense"]
    assert client.transport.ended
    assert not client.transport.closing
    assert client.session.ident not in broker.sessions
    # What the peer still sends is read and thrown away, so that it does not reset the connection.
    assert client.transport.reading
    client.send(pub("t", b"x"))
    assert "t" not in broker.topics
    assert LINGER <= 5


# --- Readers that do not read -----------------------------------------------------------------------------------------


async def test_a_reader_that_stops_reading_is_not_ready(broker: Broker) -> None:
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c", 2500)
    consumer.transport.stalled = True
    await producer.publish("t", b"first")
    await quiet(broker)
    assert consumer.session.room == 0
    for _ in range(10):
        await producer.publish_many("t", [b"x" * 1000] * 1000)
    await quiet(broker)
    # Only what was on its way when the peer stopped; ten megabytes stay where they are.
    assert consumer.bodies == [b"first"]
    assert consumer.transport.unsent < 100
    assert broker.topics["t"].channels["c"].depth == 10_000
    consumer.transport.read_again()
    await until(lambda: len(consumer.messages) == 2500)
    assert consumer.session.in_flight == 2500


async def test_others_get_what_a_stalled_reader_does_not_take(broker: Broker) -> None:
    stalled, reading, producer = Client(broker), Client(broker), Client(broker)
    await stalled.subscribe("t", "c", 100)
    await reading.subscribe("t", "c", 100)
    stalled.transport.stalled = True
    await producer.publish_many("t", [b"%d" % n for n in range(60)])
    await quiet(broker)
    taken = len(stalled.messages)
    await producer.publish_many("t", [b"more %d" % n for n in range(40)])
    await quiet(broker)
    assert len(stalled.messages) == taken
    assert len(reading.messages) == 100 - taken


async def test_a_consumer_is_never_sent_more_than_a_run_beyond_what_it_reads(broker: Broker) -> None:
    """Large messages: a run is bounded in bytes, and the next one waits until it is out."""
    consumer, producer = Client(broker), Client(broker)
    await consumer.subscribe("t", "c")
    consumer.transport.stalled = True
    for _ in range(4):
        await producer.publish_many("t", [b"x" * 100_000] * 10)
    consumer.ready(100)
    await quiet(broker)
    assert 0 < consumer.transport.unsent <= 256 << 10
    count = len(consumer.messages)
    consumer.transport.unsent = 0
    consumer.session.resume_writing()
    await quiet(broker)
    assert count < len(consumer.messages) <= 2 * count


# --- Huge batches -----------------------------------------------------------------------------------------------------

MILLION = 1_000_000


def a_million() -> bytes:
    return b"MPUB t\n" + size(4 + 5 * MILLION) + size(MILLION) + (size(1) + b"x") * MILLION


async def test_a_million_messages_in_one_batch_leave_the_loop_to_others(start_broker: StartBroker) -> None:
    broker = await start_broker(mem_queue_size=100)
    batch = Client(broker)
    # The bytes arrive as from a socket: a piece per loop turn.
    data, last = a_million()[:-1], b"x"
    for at in range(0, len(data), 256 << 10):
        batch.send(data[at : at + (256 << 10)])
        await asyncio.sleep(0)
    turns = 0

    def tick() -> None:
        nonlocal turns
        turns += 1
        if not batch.frames:
            asyncio.get_running_loop().call_soon(tick)

    batch.send(last)
    topic = broker.topics["t"]
    assert topic.busy
    tick()
    # Others who publish to the topic wait for the end of the batch, and then are answered in their order.
    first, second, elsewhere = Client(broker), Client(broker), Client(broker)
    first.send(pub("t", b"first") + pub("t", b"first again"))
    second.send(encode_mpub(b"t", [b"second", b"second again"]))
    await elsewhere.publish("u", b"not held up")
    assert (first.frames, second.frames, batch.frames) == ([], [], [])
    await until(lambda: first.frames[1:] and second.frames)
    assert (batch.frames, first.frames, second.frames) == ([OK], [OK, OK], [OK])
    # A turn for everybody else after every few thousand messages.
    assert turns >= MILLION // 10_000
    assert topic.message_count == topic.depth == MILLION + 4
    frames = [await until(lambda seq=seq: topic.frame(seq)) for seq in range(topic.log.end - 4, topic.log.end)]
    assert [bytes(frame[34:]) for frame in frames] == [b"first", b"first again", b"second", b"second again"]


async def test_a_client_may_leave_in_the_middle_of_its_batch(broker: Broker) -> None:
    """The batch was taken, so it stays; nobody is left waiting."""
    batch, other = Client(broker), Client(broker)
    count = 30_000
    batch.send(b"MPUB t\n" + size(4 + 5 * count) + size(count) + (size(1) + b"x") * count)
    assert broker.topics["t"].busy
    batch.hang_up()
    await other.publish("t", b"next")
    assert not broker.topics["t"].busy
    assert broker.topics["t"].depth == count + 1


async def test_a_topic_may_go_in_the_middle_of_a_batch(broker: Broker) -> None:
    batch, other = Client(broker), Client(broker)
    count = 30_000
    batch.send(b"MPUB t\n" + size(4 + 5 * count) + size(count) + (size(1) + b"x") * count)
    other.send(pub("t", b"waits"))
    broker.delete_topic("t")
    await until(lambda: batch.frames and other.frames)
    assert batch.errors == [b"E_MPUB_FAILED MPUB failed exiting"]
    # Who waited finds a new topic.
    assert other.frames == [OK]
    assert broker.topics["t"].depth == 1


# --- The order of answers ---------------------------------------------------------------------------------------------


async def test_answers_come_in_the_order_of_their_commands(start_broker: StartBroker) -> None:
    """A SUB behind a publish that waits for its sync waits too, and an error comes last."""
    broker = await start_broker(durability="fsync")
    client = Client(broker)
    client.send(
        identify(feature_negotiation=True)
        + pub("t", b"1")
        + b"SUB t c\n"
        + b"FIN %s\n" % NO_SUCH_ID
        + pub("u", b"2")
        + b"CLS\n"
        + b"bad\n"
        + pub("t", b"never")
    )
    await until(lambda: client.is_over)
    kinds = [data if data[:1] != b"{" else b"{}" for _, data in await answered(client)]
    assert kinds == [
        b"{}",
        b"OK",
        b"OK",
        b"E_FIN_FAILED FIN %s failed ID not in flight" % NO_SUCH_ID,
        b"OK",
        b"CLOSE_WAIT",
        b"E_INVALID invalid command bad",
    ]
    assert broker.topics["t"].message_count == 1


async def test_what_was_published_before_the_end_of_input_is_still_answered(broker: Broker) -> None:
    client = Client(broker)
    client.send(pub("t", b"1") + pub("t", b"2"))
    client.end_input()
    assert client.frames == []
    assert await answered(client) == [OK, OK]
    await until(lambda: client.transport.ended)


async def test_a_session_that_is_gone_is_in_no_table(broker: Broker) -> None:
    clients = [Client(broker) for _ in range(3)]
    for client in clients:
        await client.subscribe("t", "c", 1)
    assert len(broker.sessions) == len(broker.topics["t"].channels["c"].sessions) == 3
    clients[0].hang_up()
    clients[1].end_input()
    clients[2].send(b"nonsense\n")
    await quiet(broker)
    assert broker.sessions == {}
    assert broker.topics["t"].channels["c"].sessions == {}
